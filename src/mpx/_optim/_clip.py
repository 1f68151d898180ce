"""Clipping folded into the step: one number instead of another copy of the gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, PyTree

from mpx._optim._checks import check_factor, check_range
from mpx._optim._scalars import as_scalar
from mpx._tree import dtype_of


class Clip(NamedTuple):
    """What `clip_scale` returns.

    Attributes:
        grad_scale: For `step`: undoes the loss scale and clips.
        norm: The norm of the unscaled gradients before clipping.
        finite: Whether that norm is finite, for `step(ok=...)`.
    """

    grad_scale: Float[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def clip_scale(grads: PyTree, max_norm: Any, *, grad_scale: Any = 1.0) -> Clip:
    """Returns what gradients must be multiplied by to have at most a global norm.

    The gradients are read once and not copied: pass the result to the `step` of a
    compressed optimizer. The rule is that of `optax.clip_by_global_norm`; squares are
    summed in f32.

    Args:
        grads: The gradients, possibly still scaled, in any floating or complex dtype;
            all else, such as `None` and integers, is left out.
        max_norm: The largest norm allowed, a scalar; inf only computes the norm.
        grad_scale: What unscales the gradients, a scalar: one over the loss scale.

    Raises:
        TypeError: If `max_norm` or `grad_scale` is no number.
        ValueError: If one of them is not a scalar, or `max_norm` is not positive.

    Examples:
        >>> clip = clip_scale({"w": jnp.full(4, 8.0)}, 1.0, grad_scale=0.5)
        >>> float(clip.norm), float(clip.grad_scale)
        (8.0, 0.0625)
    """
    limit = as_scalar("max_norm", max_norm)
    check_range("max_norm", max_norm, lambda x: x > 0, "be positive")
    scale = as_scalar("grad_scale", grad_scale)
    check_factor("grad_scale", grad_scale)
    one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
    norm = jnp.sqrt(sum((_squares(g, scale) for g in jax.tree.leaves(grads)), zero))
    # Not `limit / max(norm, limit)`, which is nan if there is no limit: inf.
    factor = jnp.where(norm > limit, limit / norm, one)
    return Clip(scale * factor, norm, jnp.isfinite(norm))


def _squares(grad: Any, scale: Array) -> Array:
    """Returns the sum of the squares of a gradient; zero if it is something else."""
    dtype = dtype_of(grad)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros((), jnp.float32)
    grad = jnp.asarray(grad)
    parts = (grad.real, grad.imag) if jnp.iscomplexobj(grad) else (grad,)
    squares = [jnp.sum(jnp.square(part.astype(jnp.float32) * scale)) for part in parts]
    return sum(squares[1:], squares[0])
