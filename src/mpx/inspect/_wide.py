"""Equations of 16-bit programs, run in f32."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from mpx._jax._compat import bind, eval_equation
from mpx._program._interpreter import as_array
from mpx._program._queries import Equation, equations_inside, has_body
from mpx.inspect._dtypes import HALF, is_half


def touches_half(eqn: Equation) -> bool:
    """Returns whether the jaxprs of an equation read or make values of 16 bits."""
    return any(
        is_half(x.aval)
        for inner in equations_inside(eqn)
        for x in (*inner.invars, *inner.outvars)
    )


def bind_wide(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Runs an equation with f32 in place of 16 bits."""
    if has_body(eqn):
        return bind_as_written(eqn, values)
    changes: dict[str, Any] = {
        key: np.dtype(np.float32)
        for key, value in eqn.params.items()
        if _is_half_dtype(value)
    }
    if "precision" in eqn.params:
        changes["precision"] = lax.Precision.HIGHEST  # or GPUs round to TF32
    return bind(eqn, [as_array(x) for x in values], **changes)


def bind_as_written(eqn: Equation, values: Sequence[Any]) -> list[Any]:
    """Runs an equation at its own dtypes, on f32 values."""
    cast = [
        x.astype(var.aval.dtype) if is_half(var.aval) else x
        for x, var in zip(map(as_array, values), eqn.invars, strict=True)
    ]
    outs = eval_equation(eqn, cast)
    return [x.astype(np.float32) if is_half(jax.typeof(x)) else x for x in outs]


def _is_half_dtype(value: Any) -> bool:
    if not isinstance(value, np.dtype | type):
        return False
    try:
        return str(np.dtype(value)) in HALF
    except TypeError:
        return False
