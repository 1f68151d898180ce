"""Comparing numbers and trees, and planting faults: for our tests and for yours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._formats import is_float_dtype
from mpx._tree import dtype_of, is_floating, named_leaves


def ulp_distance(a: Any, b: Any) -> np.ndarray:
    """Returns how many representable numbers lie between two arrays, element by element.

    0 means bit-equal up to the sign of zero, 1 means neighbours. Two NaNs have distance
    0; a NaN and a number the largest distance there is.

    Args:
        a: An array with a real floating dtype.
        b: An array of the same dtype and shape.

    Raises:
        ValueError: If dtypes or shapes differ, or the dtype is not floating.

    Example:
        >>> ulp_distance(np.float32(1), np.nextafter(np.float32(1), np.float32(2)))
        array(1)
    """
    x, y = np.asarray(a), np.asarray(b)
    if x.dtype != y.dtype or x.shape != y.shape or not is_float_dtype(x.dtype):
        raise ValueError(
            "`ulp_distance` compares floating arrays of one dtype and shape, but got "
            f"{x.dtype}{list(x.shape)} and {y.dtype}{list(y.shape)}."
        )
    unsigned = np.dtype(f"u{x.dtype.itemsize}")

    def order(z: np.ndarray) -> np.ndarray:
        # Bits as sign and magnitude: negative numbers count downwards from zero. In
        # Python integers, since the distance of two f64 numbers needs 65 bits.
        bits = z.view(unsigned).astype(object)
        sign = 1 << (8 * z.dtype.itemsize - 1)
        return np.where(bits >= sign, sign - bits, bits)

    distance = np.abs(order(x) - order(y))
    nan_x, nan_y = np.isnan(x), np.isnan(y)
    largest = np.iinfo(np.int64).max
    distance = np.where(nan_x & nan_y, 0, np.where(nan_x | nan_y, largest, distance))
    return np.minimum(distance, largest).astype(np.int64)


def assert_trees_equal(a: PyTree, b: PyTree) -> None:
    """Raises unless two pytrees agree in structure, dtypes, shapes and every bit.

    NaNs with the same bits are equal, 0 and -0 are not. Leaves that are no arrays are
    compared with `==`.

    Args:
        a: A pytree.
        b: Another.

    Raises:
        AssertionError: With the name of the first leaf that differs.

    Example:
        >>> assert_trees_equal({"w": np.zeros(2)}, {"w": np.zeros(2)})
    """
    if jax.tree.structure(a) != jax.tree.structure(b):
        raise AssertionError(
            f"structures differ: {jax.tree.structure(a)} against {jax.tree.structure(b)}"
        )
    for (name, x), (_, y) in zip(named_leaves(a), named_leaves(b), strict=True):
        if dtype_of(x) is None and dtype_of(y) is None:
            if x is not y and x != y:
                raise AssertionError(f"`{name}` differs: {x!r} against {y!r}")
        elif _bits(x) != _bits(y):
            raise AssertionError(f"`{name}` differs: {x!r} against {y!r}")


def _bits(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.dtype, leaf.shape, None
    dtype = leaf.dtype
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
        value: What to plant.
        leaf: The name of the leaf, such as `layers/0/weight`; `None` is the first.
        index: Which number of the leaf, counted in the flattened array.

    Raises:
        ValueError: If there is no such leaf.

    Example:
        >>> inject_nonfinite({"w": jnp.ones(2), "step": 3}, jnp.inf, leaf="w")
        {'step': 3, 'w': Array([inf,  1.], dtype=float32)}
    """
    names = [name for name, x in named_leaves(tree) if is_floating(x) and x.size]
    target = leaf if leaf is not None else next(iter(names), None)
    if target not in names:
        raise ValueError(
            f"There is no non-empty floating leaf `{leaf}` to plant {value} in; the "
            f"tree has {names}."
        )

    flat, structure = jax.tree.flatten(tree)
    for position, (name, x) in enumerate(named_leaves(tree)):
        if name == target:
            changed = jnp.asarray(x).ravel().at[index].set(value)
            flat[position] = changed.reshape(x.shape)
    return jax.tree.unflatten(structure, flat)
