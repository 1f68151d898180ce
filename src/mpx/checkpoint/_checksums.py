"""Checksums of arrays that do not depend on how the arrays are sharded.

A checksum is the sum over all words of an array, modulo 2**32, of a hash of the word and of
its position in the whole array. Each device sums up its own shards, so nothing is gathered,
and an array that is restored to another mesh has the checksum it was saved with. For a given
position the hash is a bijection: an array with one wrong word never has the right checksum.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

_LARGE = 2**22
"""Shards of this many bytes are summed on their device. Smaller ones are copied to the host,
which takes less time than compiling a program for their shape."""
_BLOCK = 2**16
"""How many words NumPy hashes at once: the intermediate results fit into a CPU's cache."""
_U32 = np.uint32


def checksums(arrays: Iterable[Any]) -> list[int]:
    """Returns what the shards of this process contribute to the checksum of each array.

    If an array lies on several processes, the checksum is the sum of their contributions
    modulo 2**32. Of shards with several copies, one process contributes.

    Args:
        arrays: JAX arrays and NumPy arrays, of dtypes with whole bytes.
    """
    # All devices compute before the first result is waited for.
    found = [[_of_shard(*shard) for shard in _shards(array)] for array in arrays]
    return [sum(map(int, parts)) % 2**32 for parts in found]


def _shards(array: Any) -> list[tuple[Any, list[int], tuple[int, ...]]]:
    """Returns the distinct shards of this process: data, first indices, whole shape."""
    if not isinstance(array, jax.Array):
        return [(array, [0] * array.ndim, array.shape)]
    return [
        (shard.data, [part.start or 0 for part in shard.index], array.shape)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _of_shard(shard: Any, starts: Sequence[int], shape: Sequence[int]) -> Any:
    words = -(-shard.dtype.itemsize // 4)
    sizes = (*shape, words)
    strides = [math.prod(sizes[axis + 1 :]) % 2**32 for axis in range(len(sizes))]
    first = sum(map(math.prod, zip(starts, strides, strict=False)))
    place = np.array([first % 2**32], _U32), np.array(strides, _U32)
    if _is_summed_on_device(shard):
        # Under a mesh that the caller has set, jit refuses arrays of a single device.
        with jax.set_mesh(Mesh(np.array([*shard.devices()]), ("shard",))):
            return _sum_on_device(shard, *place)
    array = np.asarray(shard, order="C")
    bits = f"u{min(array.dtype.itemsize, 4)}"
    return _sum_on_host(array[..., None].view(bits), *place)


def _is_summed_on_device(shard: Any) -> bool:
    if not isinstance(shard, jax.Array) or shard.nbytes < _LARGE:
        return False
    (device,) = shard.devices()
    is_offloaded = shard.sharding.memory_kind != device.default_memory().kind
    is_wide = shard.dtype.itemsize > 4  # complex numbers have no bitcast
    # On CPUs NumPy is as fast, and needs no compilation.
    return device.platform != "cpu" and not is_offloaded and not is_wide


@jax.jit
def _sum_on_device(shard: Any, first: Any, strides: Any) -> Any:
    bits = f"uint{8 * shard.dtype.itemsize}"
    is_bool = shard.dtype == np.bool_
    words = shard.astype(bits) if is_bool else lax.bitcast_convert_type(shard, bits)
    # XLA vectorizes sums over the first axis, not over the last one.
    hashed = _hashed(words[..., None], first, strides, jnp)
    return hashed.sum(axis=0, dtype=_U32).sum(dtype=_U32)


def _sum_on_host(words: np.ndarray, first: np.ndarray, strides: np.ndarray) -> int:
    if words.size <= _BLOCK:
        return int(_hashed(words, first, strides, np).sum(dtype=_U32))
    axis = int(np.argmax(words.shape))
    middle = words.shape[axis] // 2
    low, high = np.split(words, [middle], axis)
    after = first + strides[axis : axis + 1] * _U32(middle)
    return _sum_on_host(low, first, strides) + _sum_on_host(high, after, strides)


def _hashed(words: Any, first: Any, strides: Any, numpy: Any) -> Any:
    """Returns a hash of each word and its position: the finalizer of MurmurHash3."""
    factor = _U32(0x9E3779B1)  # spreads positions over all bits

    def along(axis: int) -> Any:
        shape = [-1 if i == axis else 1 for i in range(words.ndim)]
        positions = numpy.arange(words.shape[axis], dtype=_U32)
        return (positions * (strides[axis : axis + 1] * factor)).reshape(shape)

    start = (first * factor).reshape([1] * words.ndim)
    place = functools.reduce(lambda x, axis: x + along(axis), range(words.ndim), start)
    x = words.astype(_U32) ^ place
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))
