"""The statistics of logits that cross entropy needs, and their derivative, in chunks.

For hidden states h (tokens, width), weights W and a bias b, with one label y for each token:

    logits = h W + b
    logsumexp = log Σ_v exp(logits_v)          chosen = logits_y

A chunk holds the logits of all tokens for a part of the vocabulary. The backward pass needs

    dlogits_v = softmax_v · d logsumexp + (v = y) · d chosen
    dh = dlogits Wᵀ         dW = hᵀ dlogits         db = Σ_tokens dlogits

and so the logits of each chunk again. They are computed again, or, if there is room, taken
from the memory of dW: until its chunk of dW is known, that holds logits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._compat import varying_like

F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunks:
    """How logits are computed.

    Attributes:
        dtype: The dtype of the operands of the matmuls: bf16 or f16.
        vocab_first: Whether the weights are (vocabulary, width), as a tied embedding is.
            Chunks of logits are then (vocabulary, tokens), else (tokens, vocabulary).
        size: The width of a chunk in each of the shards.
        shards: The number of equal parts of the vocabulary. Each chunk has a share of each
            part, so that devices that hold one part each all take part in each chunk.
        kept: How many tokens' logits are kept from the forward pass, in the memory of the
            gradient of the weights.
    """

    dtype: np.dtype
    vocab_first: bool
    size: int
    shards: int = 1
    kept: int = 0

    @property
    def axis(self) -> int:
        """The axis of the vocabulary, in the weights as in the logits."""
        return 0 if self.vocab_first else 1

    def by_token(self, x: Array) -> Array:
        """Returns a number for each token in a shape that broadcasts with logits."""
        return jnp.expand_dims(x, self.axis)

    def by_entry(self, x: Array) -> Array:
        """Returns a number for each entry of the vocabulary in such a shape."""
        return jnp.expand_dims(x, 1 - self.axis)

    def take(self, x: Array, start: Any, size: int, axis: int) -> Array:
        """Returns a chunk of an array along its axis of the vocabulary."""
        if self.shards == 1:
            return lax.dynamic_slice_in_dim(x, start, size, axis)
        parts = lax.dynamic_slice_in_dim(self._parts(x, axis), start, size, axis + 1)
        shape = (*x.shape[:axis], self.shards * size, *x.shape[axis + 1 :])
        return jnp.reshape(parts, shape)

    def put(self, x: Array, chunk: Array, start: Any, axis: int) -> Array:
        """Returns an array with one chunk replaced."""
        if self.shards == 1:
            return lax.dynamic_update_slice_in_dim(x, chunk, start, axis)
        new = self._parts(chunk, axis)
        return lax.dynamic_update_slice_in_dim(
            self._parts(x, axis), new, start, axis + 1
        ).reshape(x.shape)

    def _parts(self, x: Array, axis: int) -> Array:
        shape = (*x.shape[:axis], self.shards, -1, *x.shape[axis + 1 :])
        return jnp.reshape(x, shape)

    def entries(self, vocabulary: int, start: Any, size: int) -> Array:
        """Returns which entries of the vocabulary a chunk holds."""
        part = vocabulary // self.shards
        first = jnp.arange(self.shards, dtype=jnp.int32)[:, None] * part
        return (first + jnp.arange(size, dtype=jnp.int32)[None] + start).reshape(-1)

    def over(
        self, vocabulary: int, step: Callable[[Any, Any, int], Any], carry: Any
    ) -> Any:
        """Runs `step(carry, start, size)` for each chunk; the last one may be smaller."""
        count, rest = divmod(vocabulary // self.shards, self.size)
        if count:
            starts = jnp.arange(count, dtype=jnp.int32) * self.size
            body = lambda carry, start: (step(carry, start, self.size), None)  # noqa: E731
            carry, _ = lax.scan(body, carry, starts)
        return step(carry, count * self.size, rest) if rest else carry


class Operands(NamedTuple):
    """What logits are computed from, and the labels at which they are read.

    Attributes:
        hidden: Hidden states (tokens, width).
        weight: Weights (width, vocabulary) or (vocabulary, width).
        bias: A bias (vocabulary), or `None`.
        labels: Labels (tokens). One that is no entry of the vocabulary chooses 0.
    """

    hidden: Array
    weight: Array
    bias: Array | None
    labels: Array


class Statistics(NamedTuple):
    """The logsumexp, the logit of the label and the highest logit of each token, in f32."""

    logsumexp: Array
    chosen: Array
    highest: Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def _dot(a: Array, b: Array, axes: tuple[int, int], dtype: Any) -> Array:
    """Multiplies matrices of a low dtype, summed over these axes in f32."""

    def product(a: Array, b: Array) -> Array:
        dims = (((axes[0],), (axes[1],)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=dtype)

    if dtype != F32:
        return product(a, b)
    # XLA has no such matmul on CPUs for all shapes. The products are the same.
    wide = lambda a, b: product(a.astype(F32), b.astype(F32))  # noqa: E731
    return lax.platform_dependent(a, b, cpu=wide, default=product)


def _logits(spec: Chunks, hidden: Array, weight: Array) -> Array:
    """Returns a chunk of logits, rounded to the dtype of the operands as by `amp`."""
    if spec.vocab_first:
        return _dot(weight, hidden, (1, 1), spec.dtype)
    return _dot(hidden, weight, (1, 0), spec.dtype)


def _with_bias(
    spec: Chunks, logits: Array, bias: Array | None, start: Any, size: int
) -> Array:
    logits = logits.astype(F32)
    if bias is None:
        return logits
    return logits + spec.by_entry(spec.take(bias, start, size, 0).astype(F32))


def _filled(
    like: Array, shape: Sequence[int], dtype: Any = F32, number: float = 0.0
) -> Array:
    """Returns an array of one number that varies between devices as another one does."""
    return varying_like(jnp.full(shape, number, dtype), jax.typeof(like))


# --- Forward --------------------------------------------------------------------------


def statistics(spec: Chunks, operands: Operands) -> tuple[Statistics, Array | None]:
    """Returns the statistics of each token, and the kept logits.

    Those fill an array with the type of the weights.
    """
    hidden, weight, bias, labels = operands
    low = hidden.astype(spec.dtype)
    vocabulary, tokens = weight.shape[spec.axis], hidden.shape[0]
    start = tuple(_filled(hidden, (tokens,), F32, x) for x in (-jnp.inf, 0.0, 0.0))
    kept = _filled(hidden, weight.shape, weight.dtype) if spec.kept else None

    def step(carry: Any, start: Any, size: int) -> Any:
        (highest, total, chosen), kept = carry
        chunk = spec.take(weight, start, size, spec.axis).astype(spec.dtype)
        product = _logits(spec, low, chunk)
        logits = _with_bias(spec, product, bias, start, size)
        now = jnp.maximum(highest, jnp.max(logits, axis=spec.axis))
        shift = jnp.where(jnp.isfinite(now), now, 0.0)
        powers = jnp.sum(jnp.exp(logits - spec.by_token(shift)), axis=spec.axis)
        total = total * jnp.exp(highest - shift) + powers
        chosen += _chosen(spec, logits, labels, start, vocabulary)
        if kept is not None:
            part = lax.slice_in_dim(product, 0, spec.kept, axis=1 - spec.axis)
            kept = _put_packed(spec, kept, part, start)
        return (now, total, chosen), kept

    (highest, total, chosen), kept = spec.over(vocabulary, step, (start, kept))
    shift = jnp.where(jnp.isfinite(highest), highest, 0.0)
    return Statistics(jnp.log(total) + shift, chosen, highest), kept


def _chosen(
    spec: Chunks, logits: Array, labels: Array, start: Any, vocabulary: int
) -> Array:
    """Returns the logit of each token's label if a chunk has it, else 0."""
    size = logits.shape[spec.axis] // spec.shards
    if spec.shards > 1:  # summed where it is: a gather would move the logits
        entries = spec.entries(vocabulary, start, size)
        is_label = spec.by_entry(entries) == spec.by_token(labels)
        return jnp.sum(jnp.where(is_label, logits, 0.0), axis=spec.axis)
    place = labels.astype(jnp.int32) - start
    index = spec.by_token(jnp.clip(place, 0, size - 1))
    found = jnp.take_along_axis(logits, index, spec.axis, mode="clip")
    is_here = (place >= 0) & (place < size)
    return jnp.where(is_here, jnp.squeeze(found, spec.axis), 0.0)


def _put_packed(spec: Chunks, room: Array, part: Array, start: Any) -> Array:
    """Stores a chunk of logits where the gradient goes: two tokens share 32 bits."""
    bits = lax.bitcast_convert_type(part, jnp.uint16)
    if room.dtype.itemsize == 4:
        pairs = _pairs(spec, bits).astype(jnp.uint32)
        first, second = (
            lax.index_in_dim(pairs, i, 2 - spec.axis, False) for i in (0, 1)
        )
        bits = first | (second << 16)
    position = (start, 0) if spec.vocab_first else (0, start)
    stored = lax.bitcast_convert_type(bits, room.dtype)
    return lax.dynamic_update_slice(room, stored, position)


def _take_packed(spec: Chunks, room: Array, start: Any, size: int) -> Array:
    """Returns what `_put_packed` stored."""
    words = spec.kept // (room.dtype.itemsize // 2)
    position, shape = (start, 0), (size, words)
    if not spec.vocab_first:
        position, shape = position[::-1], shape[::-1]
    stored = lax.dynamic_slice(room, position, shape)
    if room.dtype.itemsize == 2:
        return lax.bitcast_convert_type(stored, spec.dtype)
    bits = lax.bitcast_convert_type(stored, jnp.uint32)
    axis = 2 - spec.axis
    shift = jnp.arange(0, 32, 16, dtype=jnp.uint32).reshape(
        (1, 1, 2) if axis == 2 else (1, 2, 1)
    )
    halves = (jnp.expand_dims(bits, axis) >> shift).astype(jnp.uint16)
    shape = (size, spec.kept) if spec.vocab_first else (spec.kept, size)
    return lax.bitcast_convert_type(halves, spec.dtype).reshape(shape)


def _pairs(spec: Chunks, x: Array) -> Array:
    """Splits the axis of the tokens into pairs of neighbours."""
    rows, columns = x.shape
    if spec.vocab_first:
        return x.reshape(rows, columns // 2, 2)
    return x.reshape(rows // 2, 2, columns)


# --- Backward -------------------------------------------------------------------------


def gradients(
    spec: Chunks,
    operands: Operands,
    logsumexp: Array,
    cotangents: Sequence[Array],
    wanted: Wanted,
    *,
    kept: Array | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Returns the gradients of hidden states, weights and bias, if wanted.

    Those of the hidden states and of the bias are f32, those of the weights have the dtype
    of the weights.

    Args:
        spec: How logits are computed.
        operands: The operands.
        logsumexp: That of each token.
        cotangents: Those of logsumexp and chosen logit of each token.
        wanted: Which gradients are computed.
        kept: The logits that `statistics` kept.
    """
    hidden, weight, bias, labels = operands
    low = hidden.astype(spec.dtype)
    vocabulary = weight.shape[spec.axis]
    unit = _unit(spec, cotangents)
    for_sum, for_chosen = (spec.by_token(x * unit) for x in cotangents)

    def step(carry: Any, start: Any, size: int) -> Any:
        sums, room, by_entry = carry
        chunk = spec.take(weight, start, size, spec.axis).astype(spec.dtype)
        logits = _again(spec, low, chunk, room, start)
        logits = _with_bias(spec, logits, bias, start, size)
        entries = spec.entries(vocabulary, start, size)
        is_label = spec.by_entry(entries) == spec.by_token(labels)
        wide = for_sum * jnp.exp(logits - spec.by_token(logsumexp))
        wide += jnp.where(is_label, for_chosen, 0.0)
        grad = wide.astype(spec.dtype)
        if sums is not None:
            sums += _dot(grad, chunk, (spec.axis, spec.axis), F32)
        if wanted.weight:
            pair = (grad, low) if spec.vocab_first else (low, grad)
            found = _dot(*pair, (1 - spec.axis, 0), F32) / unit
            room = spec.put(room, found.astype(weight.dtype), start, spec.axis)
        if by_entry is not None:
            summed = jnp.sum(wide, axis=1 - spec.axis) / unit
            by_entry = spec.put(by_entry, summed, start, 0)
        return sums, room, by_entry

    if kept is None and wanted.weight:
        kept = _filled(hidden, weight.shape, weight.dtype)
    sums = _filled(hidden, hidden.shape) if wanted.hidden else None
    by_entry = _filled(hidden, (vocabulary,)) if wanted.bias else None
    sums, room, by_entry = spec.over(vocabulary, step, (sums, kept, by_entry))
    return None if sums is None else sums / unit, room, by_entry


def _again(
    spec: Chunks, low: Array, chunk: Array, room: Array | None, start: Any
) -> Array:
    """Returns a chunk of logits: those that were kept, and the others computed again."""
    parts = []
    if spec.kept:
        assert room is not None
        parts.append(_take_packed(spec, room, start, chunk.shape[spec.axis]))
    if spec.kept < low.shape[0]:
        rest = lax.slice_in_dim(low, spec.kept, low.shape[0], axis=0)
        parts.append(_logits(spec, rest, chunk))
    return jnp.concatenate(parts, 1 - spec.axis) if parts[1:] else parts[0]


def _unit(spec: Chunks, cotangents: Sequence[Array]) -> Array | float:
    """Returns a power of two that brings cotangents into the range of f16.

    In bf16, whose range is that of f32, it is 1.
    """
    if spec.dtype != np.float16:
        return 1.0
    highest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x)) for x in cotangents])
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(highest), highest, 1.0))
    return jnp.ldexp(jnp.float32(1), jnp.clip(14 - exponent, -100, 100))
