"""The warning that something in f16 is differentiated without a loss scale."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mpx._casting._context import in_gradient_function
from mpx._jax._warn import warn

_UNSCALED = (
    "A function under `amp` in f16, or with parameters stored in f16, is differentiated "
    "without a loss scale that mpx knows of: gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    "use bf16 for both, which needs no scale. If you scale the loss yourself, "
    "filter this warning."
)


@jax.custom_jvp
def warn_if_unscaled(x: PyTree) -> PyTree:
    """Returns a parameter or a result as it is; if it is differentiated, that may warn.

    The derivative rule runs when JAX takes the derivative, also of a jitted function.
    """
    return x


@warn_if_unscaled.defjvp
def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    is_trained = jnp.issubdtype(tangents[0].dtype, jnp.floating)
    if is_trained and not in_gradient_function.value:
        warn(_UNSCALED)
    return warn_if_unscaled(*primals), tangents[0]
