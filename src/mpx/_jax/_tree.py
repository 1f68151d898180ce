"""Leaves of pytrees: which are floating, their names and dtypes, and choosing by a flag.

A *floating leaf* is an array (JAX, NumPy, tracer or `ShapeDtypeStruct`) with a real
floating dtype of at least 16 bits. Everything else passes through mpx untouched.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr
from jaxtyping import Array, Bool, PyTree

from mpx._jax._formats import is_float_dtype

AxisName = str | tuple[str, ...]

# Flags of one kernel, and how many numbers they may have: those of eight parameters and
# their moments. Large arrays are read faster alone.
_JOINED, _JOINED_SIZE = 24, 2**22


def axis_names(axis_name: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the names of several axes, of one or of none."""
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())


def is_array(leaf: object) -> bool:
    """Returns whether `leaf` is a JAX or NumPy array, a NumPy scalar or a tracer."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def dtype_of(leaf: object) -> PyTree:
    """Returns the dtype of an array or `ShapeDtypeStruct`, else `None`."""
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return None


def shape_of(leaf: object) -> tuple[int, ...]:
    """Returns the shape of an array; Python scalars and other objects have none: ()."""
    return tuple(getattr(leaf, "shape", ()))


def is_none(leaf: object) -> bool:
    """Returns whether a leaf is `None`, for `is_leaf`."""
    return leaf is None


def is_floating(leaf: object) -> bool:
    """Returns whether `leaf` is a real floating array of at least 16 bits."""
    dtype = dtype_of(leaf)
    # Typed PRNG keys have an extended dtype, which is no NumPy dtype.
    return isinstance(dtype, np.dtype) and is_float_dtype(dtype)


def is_inexact(leaf: object) -> bool:
    """Returns whether `leaf` is a floating leaf or a complex array."""
    dtype = dtype_of(leaf)
    if not isinstance(dtype, np.dtype):
        return False
    return is_float_dtype(dtype) or jnp.issubdtype(dtype, jnp.complexfloating)


def cast_leaf(leaf: PyTree, dtype: np.dtype) -> PyTree:
    """Casts one floating leaf: JAX and NumPy arrays and `ShapeDtypeStruct`s alike."""
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        # Like an array, which is no longer weakly typed once it has been cast.
        return leaf.update(dtype=dtype, weak_type=False)
    # NumPy would warn about overflow to infinity and about signalling NaNs; JAX does not.
    with np.errstate(over="ignore", invalid="ignore"):
        return leaf.astype(dtype)


def path_name(path: Sequence[Any]) -> str:
    """Returns `layers/0/weight` for a key path; the root is the empty string."""
    return keystr(tuple(path), simple=True, separator="/")


class LeafName(str):
    """Name of a leaf, such as `model/layers/0/weight`."""

    argument: str  # that holds the leaf, `model`; "" for a tree by itself
    path: str  # inside it, `layers/0/weight`; "" if the argument is the leaf
    types: tuple[type, ...]  # of the nodes that hold the leaf, from the outside in

    def __new__(
        cls, path: str, types: tuple[type, ...] = (), argument: str = ""
    ) -> "LeafName":
        """Makes the name of a leaf from its parts."""
        self = super().__new__(cls, "/".join(filter(None, (argument, path))))
        self.argument, self.path, self.types = argument, path, types
        return self

    def inside(self, path: Iterable[PyTree], types: Iterable[type]) -> "LeafName":
        """Returns the name of what lies at a path inside the node with this name."""
        parts = filter(None, (self.path, *map(str, path)))
        return LeafName("/".join(parts), (*self.types, *types), self.argument)


def flatten_with_names(
    tree: PyTree, argument: str = "", is_leaf: Callable[[PyTree], bool] | None = None
) -> tuple[list[tuple[LeafName, PyTree]], Any]:
    """Returns `(name, leaf)` pairs, and the structure of the tree."""
    flat, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    holders = types_around(structure)
    return [
        (LeafName(path_name(path), types, argument), leaf)
        for (path, leaf), types in zip(flat, holders, strict=True)
    ], structure


def types_around(structure: Any) -> list[tuple[type, ...]]:
    """Returns, for each leaf of a tree structure, the types of the nodes around it."""
    if (data := structure.node_data()) is None:
        return [()] * structure.num_leaves
    return [
        (data[0], *types) for x in structure.children() for types in types_around(x)
    ]


def map_with_name(
    fn: Callable[..., PyTree],
    tree: PyTree,
    *rest: PyTree,
    argument: str = "",
    is_leaf: Callable[[PyTree], bool] | None = None,
) -> PyTree:
    """Maps `fn(name, leaf, ...)` over trees of one structure."""
    named, structure = flatten_with_names(tree, argument, is_leaf)
    others = [structure.flatten_up_to(other) for other in rest]
    return structure.unflatten(
        [fn(*pair, *leaves) for pair, *leaves in zip(named, *others, strict=True)]
    )


def named_leaves(tree: PyTree, argument: str = "") -> list[tuple[LeafName, PyTree]]:
    """Returns `(name, leaf)` pairs; the name of a bare leaf is that of the argument."""
    return flatten_with_names(tree, argument)[0]


def check_same_structure(
    a: PyTree, b: PyTree, what: str, names: tuple[str, str] = ("first", "second")
) -> None:
    """Raises a `ValueError` naming the first difference between two trees."""
    structures = jax.tree.structure(a), jax.tree.structure(b)
    if structures[0] == structures[1]:
        return
    names_a, names_b = dict(named_leaves(a)), dict(named_leaves(b))
    only_a = [name for name in names_a if name not in names_b]
    only_b = [name for name in names_b if name not in names_a]
    where = ", ".join(
        f"only in the {tree}: {only[:3] or 'nothing'}"
        for tree, only in zip(names, (only_a, only_b), strict=True)
    )
    if not only_a and not only_b:
        where = f"{structures[0]} against {structures[1]}"
    raise ValueError(
        f"{what} needs two trees of the same structure, but they differ: {where}. "
        "Pass trees made by the same constructor or filter."
    )


def check_shape(what: str, leaf: object, param: object) -> None:
    """Raises a `ValueError` if a leaf does not have the shape of its parameter."""
    if shape_of(leaf) != shape_of(param):
        raise ValueError(
            f"{what} has shape {shape_of(leaf)}, but the parameter has shape "
            f"{shape_of(param)}."
        )


def as_flag(value: PyTree, what: str) -> Bool[Array, ""]:
    """Returns a boolean scalar array from a Python, NumPy or JAX boolean."""
    shape, dtype = shape_of(value), getattr(value, "dtype", type(value))
    if shape != () or dtype != np.dtype(bool):
        raise TypeError(
            f"`{what}` must be a boolean scalar, but {dtype} of shape {shape} was "
            "given. Reduce it first, for example with `mpx.all_finite`."
        )
    return jnp.asarray(value)


def all_finite(tree: PyTree, *, axis_name: AxisName | None = None) -> Bool[Array, ""]:
    """Returns whether every floating or complex number in a pytree is finite.

    Everything else counts as finite, and so does an empty tree. Python floats and 8-bit
    floating arrays are looked at.

    Args:
        tree: Any pytree, for example gradients.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which the
            answer is combined: every device then gets the same answer.

    Examples:
        >>> all_finite({"w": jnp.array([1.0, jnp.inf]), "step": 3})
        Array(False, dtype=bool)
    """
    flags = [is_finite(x) for x in filter(_has_numbers, jax.tree.leaves(tree))]
    finite = all_true(flags)
    return finite if axis_name is None else all_devices(finite, axis_name)


def all_true(flags: Sequence[PyTree]) -> Bool[Array, ""]:
    """Returns whether all elements of boolean arrays are true."""
    # XLA starts two kernels for each array, so on one device small arrays of a type are
    # joined. On several only flags are sent.
    groups: dict[Any, list[Array]] = {}
    for index, x in enumerate(map(jnp.asarray, flags)):
        key = jax.typeof(x) if jax.device_count() == 1 else index
        groups.setdefault(key, []).append(x)
    checks = []
    for group in groups.values():
        count = min(_JOINED, max(_JOINED_SIZE // max(group[0].size, 1), 1))
        for i in range(0, len(group), count):
            both = functools.reduce(jnp.logical_and, group[i : i + count])
            checks.append(jnp.all(both))
    # The first that is false. XLA for CPUs would compute a product of all flags again for
    # each array that is selected by it, and compile for minutes; this it computes once.
    return jnp.argmin(jnp.stack([*checks, jnp.array(False)])) == len(checks)


def all_devices(flag: Bool[Array, ""], axis_name: AxisName) -> Bool[Array, ""]:
    """Returns whether a flag holds on every device of mapped axes."""
    # There is no boolean collective: the smallest of zeros and ones is "and".
    return lax.pmin(flag.astype(jnp.int32), axis_name).astype(bool)


def _has_numbers(leaf: object) -> bool:
    """Returns whether `leaf` is floating, also of 8 bits or of Python, or complex."""
    dtype = dtype_of(leaf)
    is_inexact = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)
    return is_inexact or isinstance(leaf, float | complex)


def is_finite(leaf: PyTree) -> PyTree:
    """Returns which numbers of a leaf are finite."""
    if getattr(leaf, "dtype", None) is not None and leaf.dtype.itemsize == 1:
        leaf = leaf.astype(np.float32)  # not every 8-bit format has `isfinite`
    # NumPy answers for what is not in JAX: a finite f64 may be infinite in f32.
    return (jnp if isinstance(leaf, jax.Array) else np).isfinite(leaf)


def select_tree(pred: PyTree, a: PyTree, b: PyTree) -> PyTree:
    """Returns `a` where `pred` is true and `b` where it is not, leaf by leaf.

    Both trees are computed; nothing is read back to the host. Leaves that are no arrays
    come from `a`. Where dtypes differ, the result has the dtype of `b`: an updated
    state keeps the dtypes of the state it replaces.

    Args:
        pred: A boolean scalar: Python, NumPy or JAX.
        a: The tree for `True`.
        b: The tree for `False`, of the same structure and shapes; else a `ValueError`
            names the leaf.

    Examples:
        >>> select_tree(False, {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    flag = as_flag(pred, "pred")
    check_same_structure(a, b, "`select_tree`")

    def select(name: str, x: PyTree, y: PyTree) -> PyTree:
        if dtype_of(x) is None and dtype_of(y) is None:
            return x
        if shape_of(x) != shape_of(y):
            raise ValueError(
                f"`select_tree` needs equal shapes, but `{name}` is {shape_of(x)} in "
                f"the first tree and {shape_of(y)} in the second."
            )
        is_struct = isinstance(y, jax.ShapeDtypeStruct)
        if x is y or is_struct or dtype_of(y) == jax.dtypes.float0:
            return y
        x, y = jnp.asarray(x), jnp.asarray(y)
        return jnp.where(flag, x if x.dtype == y.dtype else x.astype(y.dtype), y)

    return map_with_name(select, a, b)
