"""What a step observes of itself: scale, gradients, updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from mpx._fp8 import Fp8State
from mpx._gradients._grad import GradResult
from mpx._jax._nnx import without_variables
from mpx._jax._tree import (
    all_finite,
    check_same_structure,
    is_floating,
    map_with_name,
    named_leaves,
)
from mpx.inspect._exponents import exponent_stats

AMAXES = ("activation", "weight", "gradient")
FORMATS_LOST = ("f16", "e5m2", "e4m3")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The numbers of one step, as arrays on the device; made by `observe`.

    Attributes:
        loss: The loss, f32[], or `None`.
        finite: Whether the step was taken, bool[].
        scale: The loss scale of the step, f32[], or `None` if that is not known.
        scaling: The metrics of the loss scaling for the next step, by name.
        grads: The exponents of the gradients, an `ExponentStats`, or `None`.
        stuck: By parameter, the share of its numbers that have a gradient and that the
            step did not change.
        amaxes: By matmul in fp8, the newest magnitudes of activation, weight, gradient.
        extra: Other scalars.
    """

    # JAX puts other objects in their place when it rebuilds trees.
    loss: Any
    finite: Any
    scale: Any
    scaling: Any
    grads: Any
    stuck: Any
    amaxes: Any
    extra: Any


def observe(
    result: GradResult | None = None,
    *,
    loss: ArrayLike | None = None,
    grads: PyTree = None,
    finite: ArrayLike | None = None,
    scaling: object = None,
    fp8: Fp8State | None = None,
    before: PyTree = None,
    after: PyTree = None,
    exponents: bool = True,
    **extra: ArrayLike,
) -> Observation:
    """Returns what there is to record about a step. Call it inside the jitted step.

    It adds one pass over the gradients, and one over the parameters if they are given.
    Nothing is read back to the host.

    Args:
        result: What `mpx.value_and_grad` or `mpx.accumulate` returned. Without it, pass
            `loss` and `grads`.
        loss: The loss, if there is no `result`.
        grads: The gradients, if there is no `result`.
        finite: Whether the step was taken; by default, whether the gradients are finite.
        scaling: The loss scaling with which the step was taken. A `result` holds that of
            the next step, from which the recorder knows the scale of all steps but the
            first.
        fp8: The state of delayed scaling, if there is no `result`.
        before: The parameters before the step, to find those that do not move. For a
            compressed optimizer these are `mpx.optim.master_params(params, state)`.
        after: The parameters after it.
        exponents: Whether to count the exponents of the gradients; a Python value. Without
            them there are no norms, and skipped steps come without the gradient's name.
        **extra: Further scalars to record, such as the learning rate.

    Raises:
        ValueError: If only one of `before` and `after` is given, or they differ in
            structure.

    Examples:
        >>> seen = observe(loss=0.5, grads={"w": jnp.array([1.0, jnp.inf])})
        >>> bool(seen.finite), seen.grads.infs
        (False, array([1]))
    """
    if result is not None:
        loss, grads = result.value, result.grads
        finite, fp8 = result.finite, result.fp8
    if (before is None) != (after is None):
        raise ValueError(
            "`before` and `after` must be given together: the parameters before and after "
            "the step."
        )
    stats = exponent_stats(grads) if exponents and grads is not None else None
    if finite is None:
        finite = all_finite((loss, grads)) if stats is None else stats.all_finite()
    following = scaling if result is None else result.scaling
    metrics = getattr(following, "metrics", dict)
    newest = {} if fp8 is None else {k: _newest(x) for k, x in fp8.amaxes.items()}
    return Observation(
        loss=None if loss is None else jnp.asarray(loss, jnp.float32),
        finite=jnp.asarray(finite),
        scale=getattr(scaling, "loss_scaling", None),
        scaling=metrics(),
        grads=stats,
        stuck={} if before is None else _stuck(before, after, grads),
        amaxes=newest,
        extra={name: jnp.asarray(x) for name, x in extra.items()},
    )


def _newest(amaxes: Array) -> Array:
    """Returns the last magnitudes of a matmul, the largest over the layers of a scan."""
    newest = amaxes[..., 0, :]
    return jnp.max(newest.reshape(-1, newest.shape[-1]), axis=0)


def _stuck(before: PyTree, after: PyTree, grads: PyTree) -> dict[str, Array]:
    before, after, grads = map(without_variables, (before, after, grads))
    check_same_structure(before, after, "`before` and `after`")
    slopes = {str(name): leaf for name, leaf in named_leaves(grads)}
    found: dict[str, Array] = {}

    def compare(name: str, old: ArrayLike, new: ArrayLike) -> None:
        if not is_floating(old) or not is_floating(new) or not jnp.size(old):
            return
        still = jnp.asarray(old) == jnp.asarray(new)
        slope = slopes.get(str(name))
        if slope is not None and jnp.shape(slope) == jnp.shape(old):
            still = still & (jnp.asarray(slope) != 0)
        found[str(name)] = jnp.mean(still, dtype=jnp.float32)

    map_with_name(compare, before, after)
    return found
