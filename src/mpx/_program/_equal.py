"""Which equations of a program are equal, whatever their variables are called."""

from collections.abc import Hashable
from typing import Any

import numpy as np

from mpx._jax._compat import Literal, is_jaxpr, open_jaxpr
from mpx._program._queries import Equation


def _key(value: Any) -> Hashable:
    """Returns something that is equal only for parameters that mean the same."""
    if is_jaxpr(value):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return (type(value), *map(_key, value))
    if isinstance(value, float):
        return float, value.hex()
    try:
        hash(value)
    except TypeError:
        return "id", id(value)  # of an equation that the program holds
    return type(value), value


def _jaxpr_key(jaxpr: Any) -> Hashable:
    body, consts = open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}
    for var in (*body.constvars, *body.invars):
        numbers[var] = len(numbers)
    types = [var.aval for var in numbers]
    eqns = []
    for eqn in body.eqns:
        operands = [_atom_key(atom, numbers) for atom in eqn.invars]
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        eqns.append((equation_key(eqn), *operands))
    outs = [_atom_key(atom, numbers) for atom in body.outvars]
    return "jaxpr", *types, *map(id, consts), *eqns, *outs


def _atom_key(atom: Any, numbers: dict[Any, int]) -> Hashable:
    return literal_key(atom) if isinstance(atom, Literal) else numbers[atom]


def literal_key(atom: Any) -> Hashable:
    """Returns what is equal for the same number of the same type, bit for bit."""
    value = np.asarray(atom.val)
    return atom.aval, value.dtype, value.tobytes()


def equation_key(eqn: Equation) -> Hashable:
    """Returns what is equal only for equations that compute the same of their operands.

    It holds the `id` of what cannot be compared: keep the equation as long as the key.
    """
    params = ((key, _key(value)) for key, value in sorted(eqn.params.items()))
    return eqn.primitive, _key(getattr(eqn, "ctx", None)), *params
