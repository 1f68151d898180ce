"""The arrays that are stored for the leaves of a training state, and their checksums."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import PyTree

from mpx._jax._compat import as_weak
from mpx._jax._tree import dtype_of, shape_of

# --- Stored arrays --------------------------------------------------------------------
# Orbax's storage knows no keys, and not every format of 8 or fewer bits. These are stored
# as the integers that they consist of.


def is_key(leaf: object) -> bool:
    """Returns whether a leaf is a typed PRNG key."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _integers(dtype: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the integers of the same bits, and those that are stored; else `None`."""
    name = str(dtype)
    if name in {"int4", "uint4", "int2", "uint2"}:
        return dtype, np.dtype(name.rstrip("24") + "8")
    if name.startswith("float8_"):
        return np.dtype(np.uint8), np.dtype(np.uint8)
    if name.startswith("float4_"):
        return np.dtype(jnp.uint4), np.dtype(np.uint8)
    return None, None


def to_stored(leaf: PyTree) -> PyTree:
    """Returns the array that is stored for a leaf: of plain numbers, sharded like it."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    small, wide = _integers(leaf.dtype)
    is_jax = isinstance(leaf, jax.Array)
    if not is_jax:
        leaf = np.array(leaf)  # a copy, since the caller may go on writing to it
    if small is None:
        return leaf
    bits = lax.bitcast_convert_type(leaf, small) if is_jax else leaf.view(small)
    return bits.astype(wide)


def from_stored(array: PyTree, template: PyTree) -> PyTree:
    """Returns the leaf that an array was stored for, of the kind that a template is."""
    array, (small, _) = placed(array, template), _integers(template.dtype)
    if is_key(template):
        found = []  # the implementation can be asked of arrays and tracers only
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), template)
        return jax.random.wrap_key_data(array, impl=found[0])
    if is_numpy(template):
        array = np.asarray(array)
        array = array if small is None else array.astype(small).view(template.dtype)
        return array[()] if isinstance(template, np.generic) else array
    leaf = array
    if small is not None:
        leaf = lax.bitcast_convert_type(array.astype(small), template.dtype)
    if getattr(template, "weak_type", False):
        leaf = as_weak(leaf)
    # The same specification too, not only the same placement: it is part of jit's key.
    is_moved = leaf is not array and array.committed
    return jax.device_put(leaf, array.sharding) if is_moved else leaf


def placed(array: PyTree, template: PyTree) -> PyTree:
    """Returns an array where its template lies, committed to devices only if that is."""
    if isinstance(array, jax.Array) or is_numpy(template):
        return array
    sharding = stored_type(template).sharding
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def stored_type(template: PyTree) -> jax.ShapeDtypeStruct:
    """Returns dtype and shape of the array that is stored for a leaf, and its sharding.

    That is `None` for arrays that are not committed to devices: a restored array must
    not be, either, or it could not be used beside arrays on other devices.
    """
    sharding = getattr(template, "sharding", None)
    if not getattr(template, "committed", True):
        sharding = None
    shape, dtype = shape_of(template), template.dtype
    if is_key(template):
        data = jax.eval_shape(jax.random.key_data, template)
        shape, dtype = data.shape, data.dtype
    return jax.ShapeDtypeStruct(shape, _integers(dtype)[1] or dtype, sharding=sharding)


def is_numpy(template: PyTree) -> bool:
    """Returns whether a template is one of NumPy, or has a dtype that JAX would change."""
    if isinstance(template, jax.ShapeDtypeStruct) and not is_key(template):
        dtype = template.dtype
        is_float0 = dtype == jax.dtypes.float0
        return is_float0 or jax.dtypes.canonicalize_dtype(dtype) != dtype
    return not isinstance(template, jax.Array | jax.ShapeDtypeStruct)


def spans_processes(leaf: object) -> bool:
    """Returns whether an array, or a template for one, lies on several processes."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


# --- Checksums ------------------------------------------------------------------------
# A checksum is the sum over all words of an array, modulo 2**32, of a hash of the word and
# of its position in the whole array. Each device sums up its own shards, so nothing is
# gathered, and an array that is restored to another mesh has the checksum it was saved
# with. For a given position the hash is a bijection: an array with one wrong word never has
# the right checksum.

_LARGE = 2**22
"""Shards of this many bytes are summed on their device. Smaller ones are copied to the host,
which takes less time than compiling a program for their shape."""
_BLOCK = 2**16
"""How many words NumPy hashes at once: the intermediate results fit into a CPU's cache."""
_U32 = np.uint32


def checksums(arrays: Iterable[PyTree]) -> list[int]:
    """Returns what the shards of this process contribute to the checksum of each array.

    If an array lies on several processes, the checksum is the sum of their contributions
    modulo 2**32. Of shards with several copies, one process contributes.
    """
    # All devices compute before the first result is waited for.
    found = [list(_of_shards(array)) for array in arrays]
    return [sum(map(int, parts)) % 2**32 for parts in found]


def _of_shards(array: PyTree) -> Iterable[PyTree]:
    shards = [(array, [0] * array.ndim)]
    if isinstance(array, jax.Array):
        shards = [
            (shard.data, [part.start or 0 for part in shard.index])
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
    words, spread = -(-array.dtype.itemsize // 4), 0x9E3779B1  # over all bits
    sizes = (*array.shape, words, spread)
    strides = [math.prod(sizes[axis + 1 :]) % 2**32 for axis in range(array.ndim + 1)]
    for shard, starts in shards:
        first = sum(map(math.prod, zip(starts, strides, strict=False)))
        place = np.array([first % 2**32], _U32), np.array(strides, _U32)
        if _is_summed_on_device(shard):
            # Under a mesh that the caller has set, jit refuses arrays of a single device.
            with jax.set_mesh(Mesh(np.array([*shard.devices()]), ("shard",))):
                yield _sum_on_device(shard, *place)
        else:
            data = np.asarray(shard, order="C")
            bits = f"u{min(data.dtype.itemsize, 4)}"
            yield _sum_on_host(data[..., None].view(bits), *place)


def _is_summed_on_device(shard: PyTree) -> bool:
    if not isinstance(shard, jax.Array) or shard.nbytes < _LARGE:
        return False
    (device,) = shard.devices()
    is_offloaded = shard.sharding.memory_kind != device.default_memory().kind
    is_wide = shard.dtype.itemsize > 4  # complex numbers have no bitcast
    # On CPUs NumPy is as fast, and needs no compilation.
    return device.platform != "cpu" and not is_offloaded and not is_wide


@jax.jit
def _sum_on_device(shard: PyTree, first: PyTree, strides: PyTree) -> PyTree:
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


def _hashed(words: PyTree, first: PyTree, strides: PyTree, numpy: PyTree) -> PyTree:
    """Returns a hash of each word and its position: the finalizer of MurmurHash3."""
    place = first.reshape([1] * words.ndim)
    for axis, size in enumerate(words.shape):
        shape = [-1 if i == axis else 1 for i in range(words.ndim)]
        along = numpy.arange(size, dtype=_U32) * strides[axis : axis + 1]
        place = place + along.reshape(shape)
    x = words.astype(_U32) ^ place
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))
