"""Warns where f16 gradients are taken without a loss scale."""

import pathlib
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mpx._half import in_gradient_function

_MESSAGE = (
    "A function under `amp` with `compute_dtype` f16 is differentiated outside of mpx's "
    "gradient functions: without a loss scale, gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    'use `compute_dtype="bf16"`, which needs no scale. If you scale the loss yourself, '
    "filter this warning."
)
# Other packages are beside JAX, and generated code has a name such as "<string>".
_LIBRARIES = (
    str(pathlib.Path(warnings.__file__).parent),
    str(pathlib.Path(jax.__file__).parents[1]),
    str(pathlib.Path(__file__).parents[1]),
    "<",
)


@jax.custom_jvp
def warn_if_unscaled(x: Any) -> Any:
    """Returns a result as it is; if it is differentiated, that may warn.

    The derivative rule runs when JAX takes the derivative, also that of a jitted
    function, and not before: a function that is only called has no rule to run.
    """
    return x


@warn_if_unscaled.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    is_trained = jnp.issubdtype(tangents[0].dtype, jnp.floating)
    if is_trained and not in_gradient_function():
        _warn(_MESSAGE)
    return warn_if_unscaled(*primals), tangents[0]


def _warn(message: str) -> None:
    """Warns at the innermost line that is in no library."""
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, UserWarning, *place, registry=registry)
