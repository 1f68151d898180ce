"""Distances in representable numbers, and single numbers that are replaced."""

import jax
import jax.numpy as jnp
import numpy as np

from mpx._jax._tree import is_array, is_floating, map_with_name, named_leaves


def ulp_distance(a, b):
    """Returns how many representable numbers lie between two arrays, element by element.

    0 means bit-equal up to the sign of zero. Two NaNs have distance 0; a NaN and a number
    the largest distance there is.
    """
    x, y = np.asarray(a), np.asarray(b)
    assert x.dtype == y.dtype, (x.dtype, y.dtype)
    assert x.shape == y.shape, (x.shape, y.shape)
    assert jnp.issubdtype(x.dtype, jnp.floating), x.dtype
    sign = 1 << (8 * x.dtype.itemsize - 1)

    def order(z):
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


def inject_nonfinite(tree, value=np.nan, *, leaf=None, index=0):
    """Returns a tree with one number of a leaf, by default the first, replaced."""
    names = [
        name
        for name, x in named_leaves(tree)
        if is_array(x) and is_floating(x) and x.size
    ]
    chosen = names[0] if leaf is None else leaf
    assert chosen in names, (leaf, names)

    def plant(name, x):
        if name != chosen:
            return x
        place = np.zeros(x.shape, bool)
        place.flat[index] = True
        where = jnp.where if isinstance(x, jax.Array) else np.where
        return where(place, np.asarray(value, x.dtype), x)

    return map_with_name(plant, tree)
