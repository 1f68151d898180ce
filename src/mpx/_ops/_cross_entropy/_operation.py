"""`linear_cross_entropy`: the public function."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx._jax._arguments import as_count, as_real, check_choice, check_value, is_tracer
from mpx._jax._compat import default_matmul_precision, has_explicit_axes
from mpx._jax._private import private
from mpx._ops._cross_entropy._chunks import Head, Operands, statistics


def linear_cross_entropy(  # noqa: PLR0913 (options are keywords)
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    label_smoothing: float | Array = 0.0,
    z_loss: float | Array = 0.0,
    soft_cap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocab_axis: int = 1,
    axis_name: str | None = None,
    chunks: int | None = None,
) -> Array:
    r"""Returns the cross entropy of `hidden @ weight + bias` without storing the logits.

    The logits are computed for a part of the vocabulary at a time. The result and all sums
    are f32, whatever dtypes the operands have; gradients have the dtypes of the operands
    and are rounded once. For each token with logits z and label y, the loss is

        (1 - s) · (logsumexp(z) - z[y]) + s · (logsumexp(z) - mean(z)) + z_loss · logsumexp(z)²

    where s is `label_smoothing`. Matmuls run in the dtype that both operands promote to;
    under `mpx.amp` in its compute dtype, unless `keep` selects the weight.

    It has derivatives of any order and works under all transformations. Under `jit`, tokens
    and vocabulary may be sharded in any way, and devices send each other no logits. On one
    device, logits wait for the backward pass in memory that the gradient of `weight` will
    fill. A `scan` that is differentiated as a whole would hold such an array for each step:
    wrap its body in `jax.checkpoint`.

    Args:
        hidden: The last hidden states (..., features).
        weight: The weight of the head (features, vocabulary), or with `vocab_axis=0`
            (vocabulary, features).
        labels: Integer labels (...). A label outside the vocabulary makes the loss of its
            token nan.
        bias: The bias (vocabulary). Entries of -inf exclude words.
        weights: The weight of each token (...), or a mask. A token of weight 0 contributes
            nothing, whatever its label is: pass `weights=labels != -100` for torch's.
            Negative ones, as advantages, have no mean: pass another `reduction`.
        label_smoothing: The part of each label that is spread over the vocabulary.
        z_loss: The factor of the squared logsumexp.
        soft_cap: Bounds the logits: each z becomes `soft_cap * tanh(z / soft_cap)`.
        reduction: `"mean"` divides the weighted sum of the losses by the sum of the
            weights, and is 0 if that is 0; `"sum"` does not; `"none"` returns the weighted
            loss of each token.
        vocab_axis: The axis of `weight` that is the vocabulary: 0 for embedding tables
            and `eqx.nn.Linear`, 1 for the kernels of Flax and Haiku.
        axis_name: The mesh axis over which `weight` and `bias` are split along the
            vocabulary, inside `jax.shard_map`. Labels count through all parts.
        chunks: The number of parts of the vocabulary; by default of 2²⁶ logits a device.

    Raises:
        ValueError: If shapes do not fit, an option has an unknown value, or a weight is
            negative where their mean is asked for. (Traced, such a mean is nan.)
        TypeError: If the labels are not integers, or an operand is not floating.

    Examples:
        >>> hidden, embedding = jnp.ones((2, 3)), jnp.zeros((5, 3))
        >>> linear_cross_entropy(hidden, embedding, jnp.array([0, 4]), vocab_axis=0)
        Array(1.609438, dtype=float32)
    """
    arrays = (hidden, weight, bias, labels)
    operands = Operands(*(None if x is None else jnp.asarray(x) for x in arrays))
    check_choice(vocab_axis, "vocab_axis", (0, 1, -1, -2))
    check_choice(reduction, "reduction", ("mean", "sum", "none"))
    if soft_cap is not None:
        soft_cap = as_real(soft_cap, "soft_cap")
        check_value(soft_cap > 0, "soft_cap", "positive", soft_cap)
    if not is_tracer(label_smoothing):
        is_share = bool(np.all((label_smoothing >= 0) & (label_smoothing <= 1)))
        check_value(is_share, "label_smoothing", "from 0 to 1", label_smoothing)
    _check(operands, vocab_axis % 2)
    dtypes = {operands.hidden.dtype, operands.weight.dtype}
    # JAX may be told not to promote dtypes.
    wide = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)
    is_zero = lambda x: isinstance(x, int | float) and x == 0  # noqa: E731
    head = Head(
        dtype=wide if len(dtypes) > 1 else operands.weight.dtype,
        vocab_axis=vocab_axis % 2,
        has_bias=bias is not None,
        chunks=None if chunks is None else as_count(chunks, "chunks", at_least=1),
        soft_cap=soft_cap,
        has_total=not is_zero(label_smoothing),
        precision=default_matmul_precision(),
        devices=_devices(),
    )
    vocabulary, first = operands.weight.shape[head.vocab_axis], 0
    if axis_name is not None:
        first = vocabulary * lax.axis_index(axis_name)
        vocabulary *= jax.lax.axis_size(axis_name)
    wanted: Array = operands.labels
    if wanted.dtype.itemsize < 4:  # where the vocabulary may be no number
        wanted = wanted.astype(jnp.int32)
    is_valid = (wanted >= 0) & (wanted < vocabulary)
    places = jnp.where(is_valid, wanted.astype(jnp.int32) - first, -1)
    logsumexp, chosen, *total = _statistics(head, operands._replace(labels=places))
    if axis_name is not None:
        logsumexp = _joined(logsumexp, axis_name)
        chosen, *total = (lax.psum(x, axis_name) for x in (chosen, *total))
    factors = _factors(weights, logsumexp)
    is_ignored = (factors == 0) & ~jnp.isfinite(logsumexp - chosen)
    logsumexp, chosen, *total = (
        jnp.where(is_ignored, 0.0, x) for x in (logsumexp, chosen, *total)
    )
    losses = logsumexp - chosen
    for x in total:
        smoothing = jnp.asarray(label_smoothing, head.wide)
        losses += smoothing * (chosen - x / vocabulary)
    if not is_zero(z_loss):
        losses += jnp.asarray(z_loss, head.wide) * jnp.square(logsumexp)
    losses = jnp.where(is_valid | (factors == 0), losses, jnp.nan)
    return _reduced(losses, factors, reduction)


def _joined(logsumexp: Array, axis_name: str) -> Array:
    """Returns the logsumexp over the parts of a vocabulary."""
    highest = lax.pmax(lax.stop_gradient(logsumexp), axis_name)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    return highest + jnp.log(lax.psum(jnp.exp(logsumexp - highest), axis_name))


def _statistics(head: Head, operands: Operands) -> list[Array]:
    if private("cross_entropy") is None:
        return statistics(head, operands, remat=True)
    from mpx._ops._cross_entropy._primitive import bind_statistics

    call: PyTree = functools.partial(bind_statistics, head)
    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        # The results are sharded as the tokens are; inside, XLA decides.
        like = jax.typeof(operands.labels).sharding
        call = jax.sharding.auto_axes(call, out_sharding=like)
    return call(operands)


def _factors(weights: ArrayLike | None, like: Array) -> Array:
    factors = jnp.asarray(1.0 if weights is None else weights).astype(like.dtype)
    if weights is not None and factors.shape != like.shape:
        raise ValueError(
            f"`weights` {factors.shape} must have the shape {like.shape} of the "
            "labels: one number for each token."
        )
    return jnp.broadcast_to(factors, like.shape)


def _reduced(losses: Array, factors: Array, reduction: str) -> Array:
    losses *= factors
    if reduction == "none":
        return losses
    if reduction == "sum":
        return jnp.sum(losses)
    has_negative, count = jnp.any(factors < 0), jnp.sum(factors)
    if not is_tracer(has_negative) and has_negative:
        raise ValueError(
            "`weights` must not be negative for a mean, which divides by their sum. "
            'Pass `reduction="sum"` and divide by what you choose.'
        )
    mean = jnp.sum(losses) / jnp.where(count == 0, 1.0, count)
    return jnp.where(has_negative, jnp.nan, jnp.where(count == 0, 0.0, mean))


def _devices() -> int:
    """Returns how many devices may run the program together, outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count()
    manual = set(mesh.manual_axes)
    return math.prod(n for name, n in mesh.shape.items() if name not in manual)


def _check(operands: Operands, vocab_axis: int) -> None:
    """Raises unless the operands have the dtypes and shapes of a head."""
    if not jnp.issubdtype(operands.labels.dtype, jnp.integer):
        raise TypeError(
            f"`labels` must be integers, but they are {operands.labels.dtype}. For "
            "probabilities as labels, compute the logits."
        )
    for name, x in zip(("hidden", "weight", "bias"), operands, strict=False):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"`{name}` must be floating, but it is {x.dtype}.")
    hidden, weight, bias, labels = map(np.shape, operands)
    if len(weight) != 2:
        raise ValueError(
            f"`weight` must have two axes, features and vocabulary, but it has {weight}."
        )
    vocabulary, features = weight[vocab_axis], weight[1 - vocab_axis]
    found = {
        f"`weight` {weight} must hold at least one word, but axis {vocab_axis}, its "
        "vocabulary, has length 0.": vocabulary == 0,
        f"`hidden` {hidden} must end with the {features} features of `weight` {weight}, "
        f"whose vocabulary is axis {vocab_axis}. Pass `vocab_axis={1 - vocab_axis}` if "
        "it is the other one.": hidden[-1:] != (features,),
        f"`labels` {labels} must have the axes of `hidden` {hidden} but the last: one "
        "label for each token.": labels != hidden[:-1],
        f"`bias` must have the shape ({vocabulary},), one number for each entry of the "
        f"vocabulary, but its shape is {bias}.": operands.bias is not None
        and bias != (vocabulary,),
    }
    faults = [message for message, is_fault in found.items() if is_fault]
    if faults:
        raise ValueError(faults[0])
