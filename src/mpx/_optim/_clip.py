"""Clipping folded into the step: one number instead of another copy of the gradients."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, PyTree

from mpx._tree import is_floating


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
        grads: The gradients, possibly still scaled; `None` and integers are left out.
        max_norm: The largest norm allowed; inf only computes the norm.
        grad_scale: What unscales the gradients, one over the loss scale.

    Raises:
        ValueError: If `max_norm` is a number that is not positive.

    Examples:
        >>> clip = clip_scale({"w": jnp.full(4, 8.0)}, 1.0, grad_scale=0.5)
        >>> float(clip.norm), float(clip.grad_scale)
        (8.0, 0.0625)
    """
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(f"`max_norm` must be positive, but {max_norm!r} was given.")
    scale = jnp.asarray(grad_scale, jnp.float32)
    squares = [
        jnp.sum(jnp.square(jnp.asarray(grad).astype(jnp.float32) * scale))
        for grad in jax.tree.leaves(grads)
        if is_floating(grad)
    ]
    norm = jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))
    limit = jnp.asarray(max_norm, jnp.float32)
    # Not `limit / max(norm, limit)`, which is nan if there is no limit: inf.
    factor = jnp.where(norm > limit, limit / norm, jnp.ones(()))
    return Clip(scale * factor, norm, jnp.isfinite(norm))
