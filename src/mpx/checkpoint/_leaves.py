"""The leaves of a training state: their names, and the arrays that are stored for them."""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr
from jaxtyping import PyTree

from mpx._jax._nnx import nnx_module, put_back, take_out
from mpx._jax._processes import sharding_by_process
from mpx._jax._tree import dtype_of, path_name, shape_of, types_around

PYTHON = {"bool": bool, "int": int, "float": float, "complex": complex}
"""The Python scalars that a checkpoint holds, by name."""


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
    leaves: list[Any]
    configures: list[bool]
    close: Callable[[Sequence[Any]], PyTree]


def open_state(state: PyTree) -> Opened:
    """Flattens a training state, which may hold NNX objects."""
    plain, objects = take_out(state)
    rest, merge = None, lambda tree: {}
    if objects:
        nnx = nnx_module()
        graphdef, rest = nnx.split(tuple(objects.values()))

        def merge(tree: PyTree) -> dict[Any, Any]:
            return dict(zip(objects, nnx.merge(graphdef, tree), strict=True))

    flat, structure = jax.tree_util.tree_flatten_with_path((plain, rest))
    found = list(objects)

    def name(path: tuple[Any, ...], of: Callable[[Any], str]) -> str:
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

    def close(leaves: Sequence[Any]) -> PyTree:
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
        contents: The value of a Python scalar, or the checksum of an array: one, or one
            for each process if they differ. Empty if not known.
    """

    dtype: str
    shape: tuple[int, ...] | None
    contents: tuple[Any, ...] = ()

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
    def is_per_process(self) -> bool:
        """Whether each process saved its own value."""
        return len(self.contents) > 1

    def restores(self, saved: "Leaf") -> bool:
        """Returns whether a saved leaf fits this one of a template.

        A Python number and an array of no axes fit each other if no digit is lost: a
        step count begins as a number and comes out of `jit` as an array.
        """
        if (self.dtype, self.shape) == (saved.dtype, saved.shape):
            return True
        if self.shape is None:
            return saved.shape == () and _is_kind(saved.dtype, self.dtype)
        if (
            saved.shape is None
            and self.shape == ()
            and _is_kind(self.dtype, saved.dtype)
        ):
            numbers = (_number(saved.dtype, value) for value in saved.contents)
            return all(_is_exact(number, self.dtype) for number in numbers)
        return False


def describe(leaf: Any) -> Leaf | None:
    """Returns what a leaf is; `None` for functions, strings and other static leaves."""
    if type(leaf) in PYTHON.values():
        value = [leaf.real, leaf.imag] if isinstance(leaf, complex) else leaf
        return Leaf(type(leaf).__name__, None, (value,))
    dtype = dtype_of(leaf)
    if dtype is None:
        return None
    name = "float0" if dtype == jax.dtypes.float0 else str(dtype)
    return Leaf(name, shape_of(leaf))


def python_scalar(leaf: Leaf, process: int) -> Any:
    """Returns the Python scalar that a process saved."""
    return _number(leaf.dtype, leaf.contents[process if leaf.is_per_process else 0])


def _number(kind: str, value: Any) -> Any:
    return complex(*value) if kind == "complex" else value


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


def _is_exact(number: Any, dtype: str) -> bool:
    try:
        stored = np.asarray(number, jnp.dtype(dtype)).item()
    except OverflowError:
        return False
    return stored == number or number != number  # NaN


# --- Stored arrays --------------------------------------------------------------------
# Orbax's storage knows no keys, and not every format of 8 or fewer bits. These are stored
# as the integers that they consist of.


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is a typed PRNG key."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def to_stored(leaf: Any) -> Any:
    """Returns the array that is stored for a leaf: of plain numbers, sharded like it."""
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    elif isinstance(leaf, jax.Array):
        small, wide = _integers(leaf.dtype)
        if small is not None:
            leaf = lax.bitcast_convert_type(leaf, small).astype(wide)
    else:
        array = np.array(leaf)  # a copy, since the caller may go on writing to it
        small, wide = _integers(array.dtype)
        return array if small is None else array.view(small).astype(wide)
    return leaf


def spans_processes(leaf: Any) -> bool:
    """Returns whether an array, or a template for one, lies on several processes."""
    sharding = getattr(leaf, "sharding", None)
    return sharding is not None and not sharding.is_fully_addressable


def to_rows(array: Any) -> jax.Array:
    """Returns an array whose rows are the bytes that each process has of its own."""
    row = np.asarray(array, order="C").reshape(1, -1).view(np.uint8)
    sharding = sharding_by_process()
    (device,) = sharding.addressable_devices
    shape = (jax.process_count(), row.size)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [jax.device_put(row, device)]
    )


def rows_type(kind: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns the type of `to_rows` for arrays of a type."""
    shape = (jax.process_count(), math.prod(kind.shape) * kind.dtype.itemsize)
    return jax.ShapeDtypeStruct(shape, np.uint8, sharding=sharding_by_process())


def from_rows(rows: jax.Array, kind: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns the array of this process; the inverse of `to_rows`."""
    (shard,) = rows.addressable_shards
    return np.asarray(shard.data).reshape(-1).view(kind.dtype).reshape(kind.shape)


def from_stored(array: Any, template: Any) -> Any:
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


def number_like(number: Any, template: Any) -> Any:
    """Returns an array of no axes that holds a number, of the kind that a template is."""
    array = np.asarray(number, template.dtype)
    if is_numpy(template):
        return array[()] if isinstance(template, np.generic) else array
    return placed(array, stored_type(template).sharding)


def placed(array: Any, sharding: Any) -> jax.Array:
    """Returns a JAX array with a sharding, or uncommitted if there is none."""
    return jnp.asarray(array) if sharding is None else jax.device_put(array, sharding)


def stored_type(template: Any) -> jax.ShapeDtypeStruct:
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


def empty_like(template: Any) -> Any:
    """Returns an empty array like a template that has no elements."""
    shape, dtype = shape_of(template), template.dtype
    if is_key(template):
        return _wrap_key(np.zeros(stored_type(template).shape, np.uint32), template)
    if dtype == jax.dtypes.float0 or is_numpy(template):
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype, device=stored_type(template).sharding)


def _integers(dtype: Any) -> tuple[Any, Any]:
    """Returns the integers of the same bits, and those that are stored; else `None`."""
    name = str(dtype)
    if name in {"int4", "uint4", "int2", "uint2"}:
        return dtype, np.dtype(name.rstrip("24") + "8")
    if name.startswith("float8_"):
        return np.dtype(np.uint8), np.dtype(np.uint8)
    if name.startswith("float4_"):
        return np.dtype(jnp.uint4), np.dtype(np.uint8)
    return None, None


def is_numpy(template: Any) -> bool:
    """Returns whether a template is one of NumPy, or has 64 bits that JAX would cut."""
    if isinstance(template, jax.ShapeDtypeStruct):
        if is_key(template):
            return False
        return jax.dtypes.canonicalize_dtype(template.dtype) != template.dtype
    return not isinstance(template, jax.Array)


def _wrap_key(data: Any, template: Any) -> Any:
    """Returns a typed key from its words, of the implementation of a template."""
    found = []  # the implementation can be asked of arrays and tracers only
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), template)
    return jax.random.wrap_key_data(jnp.asarray(data), impl=found[0])
