"""The leaves of a training state: their names, and the arrays that are stored for them."""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.tree_util import keystr
from jaxtyping import PyTree

from mpx._jax._nnx import nnx_module, put_back, take_out
from mpx._jax._tree import LeafName, dtype_of, path_name, shape_of, types_around


class Opened(NamedTuple):
    """A training state as a flat list, with NNX objects taken apart.

    Attributes:
        names: A unique name for each leaf, such as `model/layers/0/weight`.
        leaves: The leaves.
        configures: Whether a Python scalar in the place of a leaf configures an Equinox
            module, as the rate of a dropout, and is not a number of the run.
        close: Makes a state of the same structure from other leaves. NNX objects in it
            are new.
    """

    names: list[str]
    leaves: list[PyTree]
    configures: list[bool]
    close: Callable[[Sequence[PyTree]], PyTree]


def open_state(state: PyTree) -> Opened:
    """Flattens a training state, which may hold NNX objects."""
    plain, objects = take_out(state)
    rest, merge = None, lambda tree: {}
    if objects:
        nnx = nnx_module()
        graphdef, rest = nnx.split(tuple(objects.values()))

        def merge(tree: PyTree) -> dict[LeafName, PyTree]:
            return dict(zip(objects, nnx.merge(graphdef, tree), strict=True))

    flat, structure = jax.tree_util.tree_flatten_with_path((plain, rest))
    found = list(objects)

    def name(path: tuple[PyTree, ...], of: Callable[[PyTree], str]) -> str:
        if path[0].idx == 0:
            return of(path[1:])
        _, position, *inside = path
        return "/".join(filter(None, (found[position.key], of(tuple(inside)))))

    names = [name(path, path_name) for path, _ in flat]
    # A key with a slash may look like nested ones.
    twice = {name for name, times in collections.Counter(names).items() if times > 1}
    for index, (path, _) in enumerate(flat):
        if names[index] in twice:
            names[index] = name(path, keystr)

    def close(leaves: Sequence[PyTree]) -> PyTree:
        plain, rest = structure.unflatten(leaves)
        return put_back(plain, merge(rest))

    configures = list(map(_is_configuration, types_around(structure)))
    return Opened(names, [leaf for _, leaf in flat], configures, close)


def _is_configuration(types: Sequence[type]) -> bool:
    holders = [x for x in types if x not in (dict, list, tuple)]
    return bool(holders) and issubclass(holders[-1], eqx.Module)


# --- Kinds of leaves ------------------------------------------------------------------


class Leaf(NamedTuple):
    """What a leaf is, as a checkpoint records it.

    Attributes:
        dtype: The name of a dtype such as `bfloat16` or `key<fry>`, or `int` and the like
            for a Python scalar.
        shape: The shape; `None` for a Python scalar.
        value: The value of a Python scalar, or the checksum of an array.
    """

    dtype: str
    shape: tuple[int, ...] | None
    value: PyTree = 0

    @property
    def shown(self) -> str:
        """The leaf in an error message."""
        if self.shape is None:
            return f"a Python {self.dtype}"
        return f"{self.dtype}{list(self.shape)}"

    @property
    def is_stored(self) -> bool:
        """Whether there are bytes to store for it; empty arrays have none."""
        return self.shape is not None and 0 not in self.shape and self.dtype != "float0"

    @property
    def number(self) -> PyTree:
        """The Python scalar."""
        return complex(*self.value) if self.dtype == "complex" else self.value

    def restores(self, saved: "Leaf") -> bool:
        """Returns whether a saved leaf fits this one of a template.

        A Python number and an array of no axes fit each other if no digit is lost: a
        step count begins as a number and comes out of `jit` as an array.
        """
        if (self.dtype, self.shape) == (saved.dtype, saved.shape):
            return True
        if self.shape is None:
            return saved.shape == () and _is_kind(saved.dtype, self.dtype)
        is_number = saved.shape is None and self.shape == ()
        return (
            is_number
            and _is_kind(self.dtype, saved.dtype)
            and _is_exact(saved.number, self.dtype)
        )


def describe(leaf: PyTree) -> Leaf | None:
    """Returns what a leaf is; `None` for functions, strings and other static leaves."""
    if type(leaf) in (bool, int, float, complex):
        value = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
        return Leaf(type(leaf).__name__, None, value)
    dtype = dtype_of(leaf)
    if dtype is None:
        return None
    name = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Leaf(name, shape_of(leaf))


_KINDS = {
    "bool": np.bool_,
    "int": jnp.integer,
    "float": jnp.floating,
    "complex": jnp.complexfloating,
}


def _is_kind(dtype: str, number: str) -> bool:
    """Returns whether arrays of a dtype hold Python numbers of a type."""
    try:
        return jnp.issubdtype(jnp.dtype(dtype), _KINDS[number])
    except TypeError:  # a PRNG key, or float0
        return False


def _is_exact(number: PyTree, dtype: str) -> bool:
    try:
        stored = np.asarray(number, jnp.dtype(dtype)).item()
    except OverflowError:
        return False
    return stored == number or number != number  # NaN


# --- Stored arrays --------------------------------------------------------------------
# Orbax's storage knows no keys, and not every format of 8 or fewer bits. These are stored
# as the integers that they consist of.


def is_key(leaf: object) -> bool:
    """Returns whether a leaf is a typed PRNG key."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_stored(leaf: PyTree) -> PyTree:
    """Returns the array that is stored for a leaf: of plain numbers, sharded like it."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    elif isinstance(leaf, jax.Array):
        small, wide = _integers(leaf.dtype)
        if small is not None:
            leaf = lax.bitcast_convert_type(leaf, small).astype(wide)
    else:
        leaf = np.array(leaf)  # a copy, since the caller may go on writing to it
        small, wide = _integers(leaf.dtype)
        leaf = leaf if small is None else leaf.view(small).astype(wide)
    return leaf


def spans_processes(leaf: object) -> bool:
    """Returns whether an array, or a template for one, lies on several processes."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def from_stored(array: PyTree, template: PyTree) -> PyTree:
    """Returns the leaf that an array was stored for, of the kind that a template is."""
    if is_key(template):
        return _wrap_key(array, template)
    small, _ = _integers(template.dtype)
    if is_numpy(template):
        array = np.asarray(array)
        array = array if small is None else array.astype(small).view(template.dtype)
        return array[()] if isinstance(template, np.generic) else array
    array = jnp.asarray(array)
    if small is None:
        return array
    leaf = lax.bitcast_convert_type(array.astype(small), template.dtype)
    # The same specification too, not only the same placement: it is part of jit's key.
    return jax.device_put(leaf, array.sharding) if array.committed else leaf


def number_like(number: PyTree, template: PyTree) -> PyTree:
    """Returns an array of no axes that holds a number, of the kind that a template is."""
    array = np.asarray(number, template.dtype)
    if is_numpy(template):
        return array[()] if isinstance(template, np.generic) else array
    return placed(array, stored_type(template).sharding)


def placed(array: PyTree, sharding: PyTree) -> jax.Array:
    """Returns a JAX array with a sharding, or uncommitted if there is none."""
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def stored_type(template: PyTree) -> jax.ShapeDtypeStruct:
    """Returns dtype and shape of the array that is stored for a leaf, and its sharding.

    The sharding is `None` for NumPy arrays and for arrays that are not committed to
    devices: a restored array must not be, either, or it could not be used beside arrays
    on other devices.
    """
    sharding = getattr(template, "sharding", None)
    if not getattr(template, "committed", True):
        sharding = None
    if is_key(template):
        data = jax.eval_shape(jax.random.key_data, template)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    _, wide = _integers(template.dtype)
    return jax.ShapeDtypeStruct(
        shape_of(template), wide or template.dtype, sharding=sharding
    )


def empty_like(template: PyTree) -> PyTree:
    """Returns an empty array like a template that has no elements."""
    shape, dtype = shape_of(template), template.dtype
    if is_key(template):
        return _wrap_key(np.zeros(stored_type(template).shape, np.uint32), template)
    if dtype == jax.dtypes.float0 or is_numpy(template):
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype, device=stored_type(template).sharding)


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


def is_numpy(template: PyTree) -> bool:
    """Returns whether a template is one of NumPy, or has 64 bits that JAX would cut."""
    if isinstance(template, jax.ShapeDtypeStruct):
        if is_key(template):
            return False
        return jax.dtypes.canonicalize_dtype(template.dtype) != template.dtype
    return not isinstance(template, jax.Array)


def _wrap_key(data: PyTree, template: PyTree) -> PyTree:
    """Returns a typed key from its words, of the implementation of a template."""
    found = []  # the implementation can be asked of arrays and tracers only
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), template)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=found[0])


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
    found = [[_of_shard(*shard) for shard in _shards(array)] for array in arrays]
    return [sum(map(int, parts)) % 2**32 for parts in found]


def _shards(array: PyTree) -> list[tuple[PyTree, list[int], tuple[int, ...]]]:
    """Returns the distinct shards of this process: data, first indices, whole shape."""
    if not isinstance(array, jax.Array):
        return [(array, [0] * array.ndim, array.shape)]
    return [
        (shard.data, [part.start or 0 for part in shard.index], array.shape)
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def _of_shard(shard: PyTree, starts: Sequence[int], shape: Sequence[int]) -> PyTree:
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
    factor = _U32(0x9E3779B1)  # spreads positions over all bits

    def along(axis: int) -> PyTree:
        shape = [-1 if i == axis else 1 for i in range(words.ndim)]
        positions = numpy.arange(words.shape[axis], dtype=_U32)
        return (positions * (strides[axis : axis + 1] * factor)).reshape(shape)

    start = (first * factor).reshape([1] * words.ndim)
    place = functools.reduce(lambda x, axis: x + along(axis), range(words.ndim), start)
    x = words.astype(_U32) ^ place
    x = (x ^ (x >> _U32(16))) * _U32(0x85EBCA6B)
    x = (x ^ (x >> _U32(13))) * _U32(0xC2B2AE35)
    return x ^ (x >> _U32(16))
