"""The head of a loss: how its logits are computed, and how its vocabulary is divided."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

CHUNK = 2**26
"""The largest number of logits of a chunk on one device: 256 MiB in f32."""
FEWEST = 8
"""The least number of chunks on several devices, which may not share the work after all."""
_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """How logits are computed.

    Attributes:
        dtype: The dtype of the operands of the matmuls.
        vocab_axis: The axis of the weight that is the vocabulary.
        has_bias: Whether there is a bias.
        chunks: The number of chunks, `None` for one that depends on the sizes.
        soft_cap: The bound c of the logits.
        has_total: Whether the sum of the logits is computed.
        precision: The precision of the matmuls.
        devices: The number of devices that may share the work.
        may_keep: Whether logits may be kept for the backward pass.
        kept: The dtype of the logits that are kept; `None` if none are.
    """

    dtype: np.dtype
    vocab_axis: int = 1
    has_bias: bool = False
    chunks: int | None = None
    soft_cap: float | None = None
    has_total: bool = False
    precision: Any = None
    devices: int = 1
    may_keep: bool = True
    kept: np.dtype | None = None

    @property
    def wide(self) -> np.dtype:
        """The dtype of sums: f32, or f64 for operands in f64."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)

    def keeping(self, hidden: Any, weight: Any) -> "Head":
        """Returns the head that keeps logits in an array like the weight, if it can.

        On several devices that array may be sharded in another way than the logits are.
        """
        if not self.may_keep or self.devices > 1:
            return self
        head = dataclasses.replace(self, kept=self.dtype)
        return head if Chunks(head, hidden, weight).kept else self


class Chunks:
    """The chunks of one head.

    Attributes:
        axis: The axis of the weight that is the vocabulary.
        vocabulary: The size of the vocabulary.
        shards: The number of equal parts of the vocabulary. Each chunk has a share of each
            part, so that devices that hold one part each all take part in each chunk.
        size: The width of the share of a chunk.
        kept: The number of tokens whose logits are kept.
    """

    def __init__(self, head: Head, hidden: Any, weight: Any) -> None:
        self.axis = head.vocab_axis
        self.vocabulary = weight.shape[self.axis]
        tokens = math.prod(hidden.shape[:-1])
        self.shards = math.gcd(head.devices, self.vocabulary)
        self.size = self._size(head, tokens)
        self.kept = 0
        words = 0 if head.kept is None else weight.dtype.itemsize // head.kept.itemsize
        if words and isinstance(tokens, int):
            self.kept = min(tokens, words * hidden.shape[-1]) // words * words

    def _size(self, head: Head, tokens: int) -> int:
        part = self.vocabulary // self.shards
        if head.chunks is not None:
            return -(-part // head.chunks)
        count = FEWEST
        if isinstance(tokens, int):  # else it is the size of an exported program
            count = -(-tokens * self.vocabulary // (CHUNK * head.devices))
            count = max(count, FEWEST if head.devices > 1 else 1)
        multiple = max(1, _MULTIPLE // self.shards)
        return min(-(-part // (count * multiple)) * multiple, part)

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.vocabulary // (self.shards * self.size))

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

    def is_label(self, labels: Array, start: Any, size: int) -> Array:
        """Returns which entries of a chunk are the labels of the tokens."""
        part = self.vocabulary // self.shards
        first = jnp.arange(self.shards, dtype=jnp.int32)[:, None] * part
        entries = (first + jnp.arange(size, dtype=jnp.int32)[None] + start).reshape(-1)
        return labels[..., None] == jnp.expand_dims(entries, range(labels.ndim))

    def over(
        self, step: Callable[..., tuple[Any, Any]], carry: Any, xs: Any = None
    ) -> tuple[Any, Any]:
        """Runs `step(carry, x, start, size)` for each chunk; the last one may be smaller.

        Args:
            step: Returns the new carry and a result.
            carry: The first carry.
            xs: Arrays with one `x` for each chunk, or `None`.

        Returns:
            The last carry, and the results of all chunks, stacked.
        """
        whole, rest = divmod(self.vocabulary // self.shards, self.size)
        outs = []
        if whole:
            starts = jnp.arange(whole, dtype=jnp.int32) * self.size
            loop = lambda carry, x: step(carry, x[1], x[0], self.size)  # noqa: E731
            given = jax.tree.map(lambda x: x[:whole], xs)
            carry, ys = lax.scan(loop, carry, (starts, given))
            outs.append(ys)
        if rest:
            x = jax.tree.map(lambda x: x[whole], xs)
            carry, y = step(carry, x, whole * self.size, rest)
            outs.append(jax.tree.map(lambda y: y[None], y))
        return carry, jax.tree.map(lambda *ys: jnp.concatenate(ys), *outs)
