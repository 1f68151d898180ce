"""The head of a loss: how its logits are computed, and how its vocabulary is divided."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import convert_dtype, varying_like

CHUNK = 2**26
"""The largest number of logits of a chunk on one device: 256 MiB in f32."""
FEWEST = 8
"""The least number of chunks on several devices, which may not share the work after all."""
_MULTIPLE = 128
Pair = tuple[Sequence[int], Sequence[int]]
"""The axes of both operands of a product over which it sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """How logits are computed."""

    dtype: np.dtype  # The dtype of the operands of the matmuls
    vocab_axis: int = 1  # The axis of the weight that is the vocabulary
    has_bias: bool = False  # Whether there is a bias
    chunks: int | None = None  # `None` for a number that depends on the sizes
    soft_cap: float | None = None  # The bound c of the logits
    has_total: bool = False  # Whether the sum of the logits is computed
    precision: Any = None  # The precision of the matmuls
    devices: int = 1  # The number of devices that may share the work
    may_keep: bool = True  # Whether logits may be kept for the backward pass
    kept: np.dtype | None = None  # The dtype of the logits that are kept

    @property
    def wide(self) -> np.dtype:
        """The dtype of sums: f32, or f64 for operands in f64."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def keeping(self, hidden: PyTree, weight: PyTree) -> "Head":
        """Returns the head that keeps logits in an array like the weight, if it can."""
        # On several devices that array may be sharded in another way than the logits are.
        if not self.may_keep or self.devices > 1:
            return self
        head = dataclasses.replace(self, kept=self.dtype)
        return head if Chunks(head, Operands(hidden, weight)).kept else self


class Operands(NamedTuple):
    """What logits are computed from, and the labels at which they are read."""

    hidden: PyTree  # Hidden states (..., features)
    weight: PyTree  # The weight (features, vocabulary) or (vocabulary, features)
    bias: PyTree = None  # The bias (vocabulary), or `None`
    labels: PyTree = None  # Labels (...). One outside the vocabulary chooses 0.


class Chunks:
    """The chunks of one head."""

    def __init__(self, head: Head, operands: Operands) -> None:
        hidden, weight, self.bias, self.labels = operands
        self.head, self.weight, self.axis = head, weight, head.vocab_axis
        vocabulary = weight.shape[self.axis]
        tokens = math.prod(hidden.shape[:-1])
        # The vocabulary has equal parts. Each chunk has a share of each part, so that
        # devices that hold one part each all take part in each chunk.
        self.shards = math.gcd(head.devices, vocabulary)
        self.part = vocabulary // self.shards
        is_known = isinstance(tokens, int)  # else it is the size of an exported program
        count, multiple = head.chunks, 1
        if count is None:
            count, multiple = FEWEST, max(1, _MULTIPLE // self.shards)
            if is_known:
                count = -(-tokens * vocabulary // (CHUNK * head.devices))
                count = max(count, FEWEST if head.devices > 1 else 1)
        # The width of the share of a chunk
        self.size = min(-(-self.part // (count * multiple)) * multiple, self.part)
        self.count = -(-self.part // self.size)
        # The number of tokens whose logits are kept, of which one word holds several.
        self.kept = self.words = 0
        if head.kept is not None and is_known:
            self.words = weight.dtype.itemsize // head.kept.itemsize
        if self.words:
            self.kept = min(tokens, self.words * hidden.shape[-1])
            self.kept -= self.kept % self.words

    def take(self, x: Array, start: ArrayLike, size: int, axis: int) -> Array:
        """Returns a chunk of an array along its axis of the vocabulary."""
        parts = lax.dynamic_slice_in_dim(self._parts(x, axis), start, size, axis + 1)
        shape = (*x.shape[:axis], self.shards * size, *x.shape[axis + 1 :])
        return jnp.reshape(parts, shape)

    def put(self, x: Array, chunk: Array, start: ArrayLike, axis: int) -> Array:
        """Returns an array with one chunk replaced."""
        parts, new = self._parts(x, axis), self._parts(chunk, axis)
        parts = lax.dynamic_update_slice_in_dim(parts, new, start, axis + 1)
        return parts.reshape(x.shape)

    def _parts(self, x: Array, axis: int) -> Array:
        shape = (*x.shape[:axis], self.shards, -1, *x.shape[axis + 1 :])
        return jnp.reshape(x, shape)

    def is_label(self, start: ArrayLike, size: int) -> Array:
        """Returns which entries of a chunk are the labels of the tokens."""
        first = jnp.arange(self.shards, dtype=jnp.int32)[:, None] * self.part
        entries = (first + jnp.arange(size, dtype=jnp.int32)[None] + start).reshape(-1)
        entries = jnp.expand_dims(entries, range(self.labels.ndim))
        return self.labels[..., None] == entries

    def over(
        self, step: Callable[..., PyTree], carry: PyTree, xs: PyTree = None
    ) -> tuple[PyTree, PyTree]:
        """Runs `step(carry, x, start, size)` for each chunk; the last one may be smaller."""
        whole, rest = divmod(self.part, self.size)
        starts = jnp.arange(whole, dtype=jnp.int32) * self.size
        loop = lambda carry, x: step(carry, x[1], x[0], self.size)  # noqa: E731
        given = jax.tree.map(lambda x: x[:whole], xs)
        carry, ys = lax.scan(loop, carry, (starts, given))
        if not rest:
            return carry, ys
        last = jax.tree.map(lambda x: x[whole], xs)
        carry, y = step(carry, last, np.int32(whole * self.size), rest)
        join = lambda ys, y: jnp.concatenate([ys, y[None]])  # noqa: E731
        return carry, jax.tree.map(join, ys, y)

    def dot(self, a: Array, b: Array, axes: Pair) -> Array:
        """Multiplies operands of the compute dtype, summed over some axes in f32."""
        head, wide = self.head, self.head.wide
        options = {"precision": head.precision, "preferred_element_type": wide}
        product = lambda a, b: lax.dot_general(a, b, (axes, ((), ())), **options)  # noqa: E731
        if head.dtype == wide:
            return product(a, b)
        # XLA has no such matmul on CPUs for all shapes. The products are the same.
        on_cpu = lambda a, b: product(a.astype(wide), b.astype(wide))  # noqa: E731
        return lax.platform_dependent(a, b, cpu=on_cpu, default=product)

    def weights(self, start: ArrayLike, size: int) -> Array:
        """Returns a chunk of the weight in the compute dtype."""
        part = self.take(self.weight, start, size, self.axis)
        return convert_dtype(part, self.head.dtype)

    def logits(self, low: Array, part: Array, start: ArrayLike, size: int) -> Array:
        """Returns the logits of a chunk, given its part of the weight."""
        cap = self.head.soft_cap
        logits = self.dot(low, part, ((low.ndim - 1,), (1 - self.axis,)))
        if self.bias is not None:
            bias = self.take(self.bias, start, size, 0).astype(self.head.wide)
            logits += jnp.expand_dims(bias, range(logits.ndim - 1))
        if cap is not None:
            # Excluded words stay so.
            is_out, capped = jnp.isneginf(logits), cap * jnp.tanh(logits / cap)
            logits = jnp.where(is_out, logits, capped)
        return logits

    # Logits that are kept are where their gradient goes, in their own bits.

    def _place(self, start: ArrayLike, size: int) -> tuple[Any, Any]:
        shape, position = (self.kept // self.words, size), (np.int32(0), start)
        return (shape[::-1], position[::-1]) if self.axis == 0 else (shape, position)

    def store(self, room: Array, part: Array, start: ArrayLike) -> Array:
        """Returns the array of kept logits with those of a chunk."""
        shape, position = self._place(start, part.shape[1])
        bits = part.astype(self.head.kept).reshape(-1, self.words)
        bits = bits if self.words > 1 else bits[:, 0]
        stored = lax.bitcast_convert_type(bits, room.dtype).reshape(shape)
        return lax.dynamic_update_slice(room, stored, position)

    def stored(self, room: Array, start: ArrayLike, size: int) -> Array:
        """Returns what `store` stored."""
        assert self.head.kept is not None
        shape, position = self._place(start, size)
        bits = lax.dynamic_slice(room, position, shape).reshape(-1)
        part = lax.bitcast_convert_type(bits, self.head.kept).reshape(self.kept, size)
        return part.astype(self.head.wide)


def _filled(
    like: Array, shape: Sequence[int], dtype: DTypeLike, number: float = 0
) -> Array:
    """Returns an array of one number that varies between devices as another one does."""
    return varying_like(jnp.full(shape, number, dtype), jax.typeof(like))


def _finite(shift: Array) -> Array:
    """Returns what is subtracted from logits: their maximum, unless that is infinite."""
    return jnp.where(jnp.isfinite(shift), shift, 0.0)


# --- Forward --------------------------------------------------------------------------


def statistics(head: Head, operands: Operands, *, remat: bool = False) -> list[Array]:
    """Returns logsumexp, chosen logit and perhaps total of each token.

    If logits are kept, it also returns an array of the type of the weight that holds them
    minus their shifts; and these, the largest logit of each token up to each chunk.
    With `remat`, a derivative by JAX computes the logits of each chunk again.
    """
    hidden, weight, *_ = operands
    chunks, tokens = Chunks(head, operands), hidden.shape[:-1]
    low = convert_dtype(hidden, head.dtype)
    zeros = [_filled(hidden, tokens, head.wide) for _ in range(2 + head.has_total)]
    room = _filled(hidden, weight.shape, weight.dtype) if chunks.kept else None

    def step(carry: PyTree, _: PyTree, start: ArrayLike, size: int) -> PyTree:
        highest, sums, room = carry
        logits = chunks.logits(low, chunks.weights(start, size), start, size)
        now = jnp.maximum(highest, lax.stop_gradient(jnp.max(logits, axis=-1)))
        shift = _finite(now)[..., None]
        is_label = chunks.is_label(start, size)
        terms = [jnp.exp(logits - shift), jnp.where(is_label, logits, 0.0), logits]
        more = [jnp.sum(x, axis=-1) for x in terms[: len(sums)]]
        scaled = [sums[0] * jnp.exp(highest - shift[..., 0]), *sums[1:]]
        shifts = None
        if room is not None:
            waiting = (logits - shift).reshape(-1, size)[: chunks.kept]
            room = chunks.store(room, waiting, start)
            shifts = shift.reshape(-1)[: chunks.kept]
        return (now, [x + y for x, y in zip(scaled, more, strict=True)], room), shifts

    if remat:
        step = jax.checkpoint(step, static_argnums=(3,), prevent_cse=False)
    lowest = _filled(hidden, tokens, head.wide, -jnp.inf)
    (highest, sums, room), shifts = chunks.over(step, (lowest, zeros, room))
    # Without this, a part in which all words are excluded has a derivative of 0 / 0.
    is_empty = sums[0] == 0
    log = jnp.where(is_empty, -jnp.inf, jnp.log(jnp.where(is_empty, 1.0, sums[0])))
    found = [log + _finite(highest), *sums[1:]]
    return found if room is None else [*found, room, shifts]


# --- Backward -------------------------------------------------------------------------


def gradients(  # noqa: PLR0915 (one pass over the chunks)
    head: Head,
    operands: Operands,
    logsumexp: Array,
    cotangents: Sequence[Array],
    *,
    kept: Sequence[Array],
    wrt: Sequence[int],
) -> list[Array]:
    """Returns the gradients of the operands `wrt`, in the dtypes of these.

    `kept` is what `statistics` returned of kept logits.
    """
    hidden, weight, bias, labels = operands
    if kept:
        hidden, labels, logsumexp, *cotangents = (
            x.reshape(-1, *x.shape[hidden.ndim - 1 :])
            for x in (hidden, labels, logsumexp, *cotangents)
        )
    chunks = Chunks(head, Operands(hidden, weight, bias, labels))
    tokens = tuple(range(hidden.ndim - 1))
    # A token that no cotangent reaches may hold nan or inf, as padding does.
    is_read = functools.reduce(jnp.logical_or, [x != 0 for x in cotangents])[..., None]
    low = jnp.where(is_read, convert_dtype(hidden, head.dtype), 0)
    shift = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)[..., None]
    unit = _unit(head, cotangents)
    for_sum, for_chosen, *for_total = (x[..., None] * unit for x in cotangents)

    def step(
        carry: dict[int, Array], shifts: PyTree, start: ArrayLike, size: int
    ) -> PyTree:
        part, again, logits = chunks.weights(start, size), low[chunks.kept :], []
        if kept:
            logits.append(chunks.stored(carry[1], start, size) + shifts[:, None])
        if again.size or not kept:
            logits.append(chunks.logits(again, part, start, size))
        z = logits[0] if len(logits) == 1 else jnp.concatenate(logits)
        p = jnp.exp(z - shift)
        is_label = chunks.is_label(start, size)
        dz = for_sum * p + jnp.where(is_label, for_chosen, 0.0)
        dz = functools.reduce(jnp.add, for_total, dz)
        if head.soft_cap is not None:
            slope = 1 - jnp.square(z / head.soft_cap)
            dz = jnp.where(jnp.isneginf(z), 0.0, dz * slope)
        dz = jnp.where(is_read, dz, 0.0)
        narrow, found = convert_dtype(dz, head.dtype), dict(carry)
        if 0 in carry:
            axes = (len(tokens),), (chunks.axis,)
            found[0] = carry[0] + chunks.dot(narrow, part, axes)
        if 1 in carry:
            pair = (low, narrow) if chunks.axis == 1 else (narrow, low)
            new = (chunks.dot(*pair, (tokens, tokens)) / unit).astype(weight.dtype)
            found[1] = chunks.put(carry[1], new, start, chunks.axis)
        if 2 in carry:
            new = (jnp.sum(dz, axis=tokens) / unit).astype(bias.dtype)
            found[2] = chunks.put(carry[2], new, start, 0)
        return found, None

    # That of the hidden states adds up over the chunks.
    types = [(hidden.shape, head.wide)]
    types += [(x.shape, x.dtype) for x in (weight, bias) if x is not None]
    carry = {i: _filled(hidden, *types[i]) for i in wrt}
    room, shifts = kept or (None, None)
    found, _ = chunks.over(step, carry if room is None else carry | {1: room}, shifts)
    if 0 in wrt:
        found[0] = (found[0] / unit).astype(hidden.dtype).reshape(operands.hidden.shape)
    return [found[i] for i in wrt]


def _unit(head: Head, cotangents: Sequence[Array]) -> Array | float:
    """Returns a power of two that brings cotangents into the range of f16; else 1."""
    if head.dtype != np.float16:
        return 1.0
    largest = [jnp.max(jnp.abs(x), initial=0.0) for x in cotangents]
    highest = functools.reduce(jnp.maximum, largest)
    _, exponent = jnp.frexp(jnp.where(jnp.isfinite(highest), highest, 1.0))
    return jnp.ldexp(jnp.float32(1), jnp.clip(14 - exponent, -100, 100))
