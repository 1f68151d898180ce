"""The scalar through which everything that is computed from some values passes."""

import math
from collections.abc import Sequence

import numpy as np

from mpx._jaxpr._queries import Equation
from mpx._jaxpr._terms import Level, Term

Place = tuple[float, ...]
"""The position of an equation: that of the call around it, ..., its own."""

MOST = 200
"""The largest number of equations that are run again from inside a call."""


def place_of(level: Level, eqn: Equation) -> Place:
    """Returns where an equation is in the outermost level: places are run in order."""
    index = next(i for i, other in enumerate(level.jaxpr.eqns) if other is eqn)
    outer = () if level.caller is None else place_of(*level.caller)
    return (*outer, index)


def scalar_after(terms: Sequence[Term]) -> tuple[Term, dict[int, Term]] | None:
    """Returns the last scalar through which all that depends on values passes.

    Returns:
        The scalar, and the terms that depend on the values, by their `id`. `None` if there
        is no such scalar.
    """
    found: dict[int, Term] = {}
    made: dict[int, Place] = {}
    last: dict[int, Place] = {}
    waiting = list(terms)
    while waiting:
        term = waiting.pop()
        if id(term) in found:
            continue
        if term.eqn is None or term.eqn.effects or len(found) > MOST:
            return None
        found[id(term)] = term
        made[id(term)] = last[id(term)] = place_of(term.level, term.eqn)
        for use in term.level.readers(term.atom):
            if use is None:
                last[id(term)] = (math.inf,)
                continue
            level, eqn = use
            last[id(term)] = max(last[id(term)], place_of(level, eqn))
            waiting += [level.term(var) for var in eqn.outvars]
    start = max(made[id(term)] for term in terms)
    for key in sorted(found, key=lambda key: made[key], reverse=True):
        here = made[key]
        if here < start:
            return None
        earlier = (x for x in found if made[x] <= here and x != key)
        if _is_scalar(found[key]) and all(last[x] <= here for x in earlier):
            return found[key], found
    return None


def _is_scalar(term: Term) -> bool:
    is_float = getattr(term.aval, "dtype", None) == np.float32
    return is_float and term.shape == () and len(term.eqn.outvars) == 1
