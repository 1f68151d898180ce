"""Comparison of numbers and trees, and non-finite numbers in a leaf, for tests."""
# jaxtyping's `PyTree` is unknown to pyright:
# pyright: reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownLambdaType=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._formats import is_float_dtype
from mpx._jax._tree import (
    dtype_of,
    is_array,
    is_floating,
    map_with_name,
    named_leaves,
)


def ulp_distance(a: Any, b: Any) -> np.ndarray:
    """Returns how many representable numbers lie between two arrays, element by element.

    0 means bit-equal up to the sign of zero, 1 means neighbours. Two NaNs have distance
    0; a NaN and a number the largest distance there is.

    Args:
        a: An array with a real floating dtype.
        b: An array of the same dtype and shape.

    Raises:
        ValueError: If dtypes or shapes differ, or the dtype is not floating.

    Examples:
        >>> ulp_distance(np.float32(1), np.nextafter(np.float32(1), np.float32(2)))
        array(1)
    """
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != y.dtype or x.shape != y.shape or not is_float_dtype(x.dtype):
        raise ValueError(
            "`ulp_distance` compares floating arrays of one dtype and shape, but got "
            f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    sign = 1 << (8 * x.dtype.itemsize - 1)

    def order(z: np.ndarray) -> np.ndarray:
        # Bits as sign and magnitude: negative numbers count downwards from zero. In
        # Python integers, since the distance of two f64 numbers needs 65 bits.
        bits = z.ravel().view(f"u{z.dtype.itemsize}").astype(object)
        return np.where(bits >= sign, sign - bits, bits)

    largest = np.iinfo(np.int64).max
    distance = np.minimum(abs(order(x) - order(y)), largest).astype(np.int64)
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        nan_x, nan_y = np.isnan(x), np.isnan(y)
    return np.where(
        nan_x & nan_y, 0, np.where(nan_x | nan_y, largest, distance.reshape(x.shape))
    )


def assert_trees_equal(a: PyTree, b: PyTree) -> None:
    """Raises unless two pytrees agree in structure, dtypes, shapes and every bit.

    NaNs with the same bits are equal, 0 and -0 are not. Leaves that are no arrays are
    compared with `==`.

    Args:
        a: A pytree.
        b: Another.

    Raises:
        AssertionError: With the name of the first leaf that differs.

    Examples:
        >>> assert_trees_equal({"w": np.zeros(2)}, {"w": np.zeros(2)})
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise AssertionError(
            f"structures differ: {jax.tree.structure(a)} against {jax.tree.structure(b)}"
        )
    for (name, x), (_, y) in zip(named_leaves(a), named_leaves(b), strict=True):
        if x is not y and _bits(x) != _bits(y):
            raise AssertionError(f"`{name}` differs: {x!r} against {y!r}")


def _bits(leaf: Any) -> Any:
    """Returns what equal leaves have in common: a leaf that is no array itself."""
    dtype = dtype_of(leaf)
    if dtype is None or isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf if dtype is None else (dtype, leaf.shape)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return dtype, array.shape, array.tobytes()


def inject_nonfinite(
    tree: PyTree, value: float = np.nan, *, leaf: str | None = None, index: int = 0
) -> PyTree:
    """Returns a pytree with one number replaced by a NaN or an infinity.

    Args:
        tree: A pytree with at least one non-empty floating array.
        value: The NaN or infinity.
        leaf: The name of the leaf, such as `layers/0/weight`; `None` is the first.
        index: The place of the number in the flattened leaf.

    Raises:
        ValueError: If there is no such leaf, or no such number in it.

    Examples:
        >>> inject_nonfinite({"w": jnp.ones(2), "step": 3}, jnp.inf, leaf="w")
        {'step': 3, 'w': Array([inf,  1.], dtype=float32)}
    """
    found = {
        name: x
        for name, x in named_leaves(tree)
        if is_array(x) and is_floating(x) and x.size
    }
    chosen = next(iter(found), None) if leaf is None else leaf
    if chosen not in found:
        raise ValueError(
            f"There is no non-empty floating leaf{'' if leaf is None else f' `{leaf}`'} "
            f"to plant {value} in; the tree has {list(found)}."
        )
    size = found[chosen].size
    if not -size <= index < size:
        raise ValueError(
            f"`{chosen}` has {size} numbers, so there is no number {index} in it."
        )

    def plant(name: str, x: Any) -> Any:
        if name != chosen:
            return x
        place = np.zeros(x.shape, bool)
        place.flat[index] = True
        where = jnp.where if isinstance(x, jax.Array) else np.where
        return where(place, np.asarray(value, x.dtype), x)

    return map_with_name(plant, tree)
