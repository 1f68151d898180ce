"""Checks of arguments that must be known while tracing: numbers and axis names."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpx._jax._compat import is_tracer

_STATIC = " Make it a static argument of the jitted function."


def check_value(holds: bool, what: str, expected: str, value: Any) -> None:
    """Raises a `ValueError` that names the expected value, unless the condition holds."""
    if not holds:
        raise ValueError(f"`{what}` must be {expected}, but {value} was given.")


def check_choice(value: object, what: str, choices: Sequence[object]) -> None:
    """Raises a `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"`{what}` must be one of {listed}, but {value!r} was given.")


def check_function(func: object) -> None:
    """Raises a `TypeError` unless `func` can be called."""
    if not callable(func):
        raise TypeError(
            f"Expected a function, such as a loss, but {type(func).__name__} was given. "
            "Pass it before it is called: `mpx.amp(loss)(params)`. Options come after it, "
            'or by name: `@mpx.amp(dtype="f16")`.'
        )


def refuse_result(grads: object) -> None:
    """Raises a `TypeError` if a whole `GradResult` is passed as gradients."""
    if hasattr(grads, "grads") and hasattr(grads, "finite"):
        raise TypeError(
            "`grads` is a whole `GradResult`. Pass its fields: `result.grads` as the "
            "gradients and `result.finite` as the flag."
        )


def check_bool(value: object, what: str) -> None:
    """Raises a `TypeError` unless `value` is a Python or NumPy boolean."""
    if not isinstance(value, bool | np.bool_):
        hint = _STATIC if is_tracer(value) else ""
        raise TypeError(f"{what} must be True or False, but {value!r} was given.{hint}")


def as_count(value: Any, what: str, at_least: int | None = None) -> int:
    """Returns an integer from Python's, NumPy's or a concrete JAX scalar."""
    try:
        number = operator.index(value)
    except Exception:  # a `TypeError`, or that of a traced array
        hint = _STATIC if is_tracer(value) else ""
        raise TypeError(
            f"`{what}` must be an integer, but {value!r} of type "
            f"{type(value).__name__} was given.{hint}"
        ) from None
    if at_least is not None:
        words = "0 or more" if at_least == 0 else f"at least {at_least}"
        check_value(number >= at_least, what, words, number)
    return number


def as_counts(values: Any, what: str) -> tuple[int, ...]:
    """Returns the integers of a sequence, or one that is given by itself."""
    several = isinstance(values, Sequence) and not isinstance(values, str)
    return tuple(as_count(x, what) for x in (values if several else [values]))


def as_real(value: Any, what: str) -> float:
    """Returns a concrete real number as a float."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except Exception:  # a `TypeError`, or that of a traced array
        raise TypeError(
            f"`{what}` must be a number, but {value!r} of type {type(value).__name__} "
            "was given."
        ) from None


def check_axis_name(value: Any) -> None:
    """Raises unless `value` is the name of a mapped axis, several, or `None`."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(
            "`axis_name` must be the name of a `shard_map`, `pmap` or `vmap` axis such "
            f'as "data", or a tuple of names, but {value!r} was given.'
        )
