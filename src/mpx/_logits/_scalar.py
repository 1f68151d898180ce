"""The scalar through which everything that is computed from some values passes."""

import math
from collections.abc import Collection, Sequence

import numpy as np

from mpx._jaxpr._queries import Equation, equations_inside
from mpx._jaxpr._terms import Level, Term

Place = tuple[float, ...]
"""The position of an equation or of the end: see `Level.place`."""

MOST = 200
"""The largest number of equations that are run again from inside a call."""


def dependents(terms: Sequence[Term]) -> dict[int, Term]:
    """Returns the terms that depend on values, with these, by their `id`."""
    found: dict[int, Term] = {}
    waiting = list(terms)
    while waiting:
        term = waiting.pop()
        if id(term) not in found:
            found[id(term)] = term
            uses = filter(None, term.level.readers(term.atom))
            waiting += [level.term(x) for level, eqn in uses for x in eqn.outvars]
    return found


def scalar_after(
    terms: Sequence[Term], without: Collection[int] = ()
) -> tuple[Term, dict[int, Term]] | None:
    """Returns the last scalar through which all that depends on values passes.

    Args:
        terms: The values.
        without: The `id`s of terms that it must not be.

    Returns:
        The scalar, and the terms that depend on the values, by their `id`. `None` if there
        is no such scalar.
    """
    found = dependents(terms)
    if len(found) > MOST:
        return None
    barred = [x for x in found.values() if _is_barred(x.eqn)]
    without = {*without, *dependents(barred)}
    made = {key: x.level.place(x.eqn) for key, x in found.items()}
    last = {
        key: max((_place(use) for use in x.level.readers(x.atom)), default=made[key])
        for key, x in found.items()
    }
    start = max(made[id(term)] for term in terms)
    for key in sorted(found, key=lambda key: made[key], reverse=True):
        here = made[key]
        if here < start:
            return None
        earlier = (x for x in found if made[x] <= here and x != key)
        if key in without or not _is_scalar(found[key]):
            continue
        if all(last[x] <= here for x in earlier):
            return found[key], found
    return None


def _place(use: tuple[Level, Equation] | None) -> Place:
    """Returns where a value is read; results are read after all equations."""
    return (math.inf,) if use is None else use[0].place(use[1])


def _is_barred(eqn: Equation) -> bool:
    """Returns whether gradients must pass an equation in the backward pass itself.

    What is computed before is the gradient for a cotangent of 1, and then multiplied. The
    backward function of a `custom_vjp` may be no linear one, such as one that clips; that of
    a collective adds up the cotangents of all devices. Effects happen once.
    """
    axes = eqn.params.get("axes") or ()
    is_named = isinstance(axes, tuple | list) and any(isinstance(x, str) for x in axes)
    if eqn.effects or is_named or "axis_name" in eqn.params:
        return True
    names = [eqn.primitive.name]
    names += [x.primitive.name for x in equations_inside(eqn)]
    return any(name.startswith(("custom_vjp", "shard_map")) for name in names)


def _is_scalar(term: Term) -> bool:
    is_float = getattr(term.aval, "dtype", None) == np.float32
    return is_float and term.shape == () and len(term.eqn.outvars) == 1
