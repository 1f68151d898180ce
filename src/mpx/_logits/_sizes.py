"""How large chunks are."""

import math
from typing import Any

import jax
import numpy as np

from mpx._logits._chunks import Chunks

CHUNK = 2**26
"""The largest number of logits of a chunk on one device: 128 MiB in 16 bits.

On an H200, with 8192 tokens, a width of 4096 and a vocabulary of 128256, that makes 16 chunks,
which take 1.04 times as long as whole logits. 8 chunks take 1.03 and nearly twice the memory,
32 take 1.08.
"""
FEWEST = 8
"""The least number of chunks on several devices, which may not share the work after all."""

_MULTIPLE = 128


def chunks_for(
    dtype: np.dtype, *, tokens: int, weight: Any, vocab_first: bool
) -> Chunks:
    """Returns chunks for a number of tokens and weights.

    On one device, logits are kept in the memory of the gradient of the weights as far as
    they fit. On several, that may be sharded in another way than they are.

    Args:
        dtype: The dtype of the matmuls.
        tokens: The number of tokens.
        weight: The type of the weights.
        vocab_first: Whether the vocabulary is their first axis.
    """
    vocabulary, width = weight.shape if vocab_first else weight.shape[::-1]
    devices = _devices()
    shards = math.gcd(devices, vocabulary)
    part = vocabulary // shards
    count = -(-tokens * vocabulary // (CHUNK * devices))
    if devices > 1:
        count = max(count, FEWEST)
    multiple = max(1, _MULTIPLE // shards)
    size = min(-(-part // (count * multiple)) * multiple, part)
    words = weight.dtype.itemsize // 2
    kept = min(tokens, words * width) if devices == 1 else 0
    return Chunks(
        dtype=dtype,
        vocab_first=vocab_first,
        size=size,
        shards=shards,
        kept=kept - kept % 2,
    )


def _devices() -> int:
    """Returns how many devices may run the program together, outside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count()
    manual = set(mesh.manual_axes)
    return math.prod(n for name, n in mesh.shape.items() if name not in manual)
