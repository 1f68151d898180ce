"""Warns where f16 gradients are taken without a loss scale."""

from typing import Any

import jax
import jax.numpy as jnp

from mpx._half import in_gradient_function
from mpx._warn import warn

_MESSAGE = (
    "A function under `amp` in f16 is differentiated outside of mpx's "
    "gradient functions: without a loss scale, gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    "use bf16, which needs no scale. If you scale the loss yourself, "
    "filter this warning."
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
        warn(_MESSAGE)
    return warn_if_unscaled(*primals), tangents[0]
