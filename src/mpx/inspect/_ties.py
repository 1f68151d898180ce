"""Decisions that depend on roundings: comparisons of nearly equal numbers.

A rectifier passes a number or not, a maximum is one of two almost equal numbers: each
rounding turns over a few such decisions, and each changes the gradient by much more than the
rounding. That is no fault. The shadow decides such ties as the program does, and so do the
runs that are compared with the shadow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpx._jax._compat import primitive_name
from mpx._program._queries import Equation, names
from mpx._program._run import Array, on_host
from mpx.inspect._dtypes import is_float

_COMPARISONS = frozenset(names("eq ne lt le gt ge"))
_PICKS = frozenset(names("argmax argmin"))
_ROUNDINGS = 16
"""Numbers are nearly equal if they differ by so many roundings of their tensors."""


def is_decision(eqn: Equation) -> bool:
    """Returns whether an equation compares floating numbers."""
    name = primitive_name(eqn)
    return name in _COMPARISONS | _PICKS and is_float(eqn.invars[0].aval)


def settled(
    eqn: Equation, args: Sequence[Array], result: Array, other: np.ndarray, eps: float
) -> np.ndarray:
    """Returns a decision, with that of another run where the numbers are nearly equal.

    Args:
        eqn: The equation.
        args: Its operands.
        result: The decision on these.
        other: The decision of the other run.
        eps: The distance of numbers in the coarsest format of the program.
    """
    numbers = [np.asarray(on_host(x)).astype(np.float32) for x in args]
    own = np.asarray(result)
    with np.errstate(all="ignore"):
        margin = _ROUNDINGS * eps * sum(map(_size, numbers))
        if primitive_name(eqn) in _COMPARISONS:
            if all(np.array_equal(x, np.round(x)) for x in numbers):
                return own  # they are counted or masks, and exact
            near = np.abs(numbers[0] - numbers[1]) <= margin
            return np.where(near, other, own)
        (axis,) = eqn.params["axes"]
        first, second = (_taken(numbers[0], x, axis) for x in (own, other))
        return np.where(np.abs(first - second) <= margin, other, own).astype(own.dtype)


def _taken(x: np.ndarray, index: np.ndarray, axis: int) -> Any:
    return np.take_along_axis(x, np.expand_dims(index, axis), axis).squeeze(axis)


def _size(x: np.ndarray) -> float:
    """Returns the root of the mean square of the finite numbers."""
    x = x[np.isfinite(x)]
    largest = float(np.max(np.abs(x), initial=0.0))
    return (
        0.0 if largest == 0 else largest * float(np.sqrt(np.mean((x / largest) ** 2)))
    )
