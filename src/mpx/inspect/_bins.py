"""Bins of exponents: their order, the bin of a value, and counts of more than 31 bits.

A value `x` with `2**e <= |x| < 2**(e+1)` has the exponent `e`. There is one bin for each
exponent from `LOWEST` to `HIGHEST`, and one each for zeros, for smaller and larger values,
for infinities and for nans. A count is two int32 numbers, `high * 2**16 + low`: a leaf, or
the sum over many steps, may have more than 2³¹ values.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LOWEST, HIGHEST = -63, 31
BINS = HIGHEST - LOWEST + 6
ZERO, BELOW, FIRST = 0, 1, 2
ABOVE, INF, NAN = BINS - 3, BINS - 2, BINS - 1
BASE_BITS = 16


def bin_of(x: Array) -> Array:
    """Returns the bin of each value, int32. Works on bits: nothing is flushed to zero."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    elif x.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(x, jnp.uint64)
    else:  # f32 holds every number of the narrower formats, as a normal one
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    mantissa, bias = (52, 1023) if x.dtype.itemsize == 8 else (23, 127)
    magnitude = bits << 1 >> 1
    field = (magnitude >> mantissa).astype(jnp.int32)
    index = jnp.clip(field - (bias + LOWEST) + FIRST, BELOW, ABOVE)
    index = jnp.where(magnitude == 0, ZERO, index)
    infinity = np.asarray((2 * bias + 1) << mantissa, bits.dtype)
    special = jnp.where(magnitude == infinity, INF, NAN)
    return jnp.where(magnitude >= infinity, special, index)


def split(counts: Array) -> Array:
    """Returns counts of one int32 as pairs (low, high)."""
    low = counts & (2**BASE_BITS - 1)
    return jnp.stack([low, counts >> BASE_BITS], axis=-1)


def carried(pairs: Array) -> Array:
    """Returns pairs whose low numbers have less than 16 bits again."""
    low, high = pairs[..., 0], pairs[..., 1]
    low, carry = low & (2**BASE_BITS - 1), low >> BASE_BITS
    return jnp.stack([low, high + carry], axis=-1)


def add_up(pairs: Array, axes: int) -> Array:
    """Returns the sums of pairs over so many leading axes; exact up to 2²³ of them."""
    if not axes:
        return carried(pairs)
    over = tuple(range(axes))
    # The two bytes apart: a sum of 2²³ bytes fits into an int32.
    low, high = pairs[..., 0], pairs[..., 1]
    first, second = jnp.sum(low & 255, over), jnp.sum(low >> 8, over)
    second = second + (first >> 8)
    low = (second & 255) << 8 | (first & 255)
    return jnp.stack([low, jnp.sum(high, over) + (second >> 8)], axis=-1)


def as_integers(pairs: Any) -> np.ndarray:
    """Returns pairs on the host as int64."""
    pairs = np.asarray(pairs).astype(np.int64)
    return (pairs[..., 1] << BASE_BITS) + pairs[..., 0]


def as_pairs(counts: np.ndarray) -> np.ndarray:
    """Returns int64 on the host as pairs."""
    low = counts & (2**BASE_BITS - 1)
    return np.stack([low, counts >> BASE_BITS], axis=-1).astype(np.int32)
