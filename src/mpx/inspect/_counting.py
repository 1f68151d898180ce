"""Histograms of exponents, counted where the arrays are.

A value `x` with `2**e <= |x| < 2**(e+1)` has the exponent `e`. There is one bin for each
exponent from `LOWEST` to `HIGHEST`, and one each for zeros, for smaller and larger values,
for infinities and for nans. A count is two int32 numbers, `high * 2**16 + low`: a leaf, or
the sum over many steps, may have more than 2³¹ values.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from mpx._jax._compat import has_explicit_axes
from mpx._jax._sharding import axes_of, may_cut_groups

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
    """Returns the sums of pairs over this many leading axes; exact up to 2²³ of them."""
    if not axes:
        return carried(pairs)
    over = tuple(range(axes))
    # The two bytes apart: a sum of 2²³ bytes fits into an int32.
    low, high = pairs[..., 0], pairs[..., 1]
    first, second = jnp.sum(low & 255, over), jnp.sum(low >> 8, over)
    second = second + (first >> 8)
    low = (second & 255) << 8 | (first & 255)
    return jnp.stack([low, jnp.sum(high, over) + (second >> 8)], axis=-1)


def as_integers(pairs: ArrayLike) -> np.ndarray:
    """Returns pairs on the host as int64."""
    pairs = np.asarray(pairs).astype(np.int64)
    return (pairs[..., 1] << BASE_BITS) + pairs[..., 0]


# --- Counting -------------------------------------------------------------------------

LIMIT = 2**31
"""The number of values whose count may not fit into one int32."""
SMALL = 2**15
"""Leaves of up to this many values are stacked with others of their type: a pass for each
costs more than its values."""


def count(leaves: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the counts of each leaf, int32[leaves, BINS, 2], and its sum of squares, f32.

    Sharded leaves are counted where they are: the counts are added over devices.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, x in enumerate(leaves):
        kind = (x.shape, x.dtype, jax.typeof(x).sharding)
        groups.setdefault(kind if x.size <= SMALL else index, []).append(index)
    if not groups:
        return jnp.zeros((0, BINS, 2), jnp.int32), jnp.zeros(0, jnp.float32)
    parts = []
    for indices in groups.values():
        if len(indices) > 1:
            parts.append(jax.vmap(_count_leaf)(jnp.stack([leaves[i] for i in indices])))
        else:
            counts, squares = _count_leaf(leaves[indices[0]])
            parts.append((counts[None], squares[None]))
    counts, squares = map(jnp.concatenate, zip(*parts, strict=True))
    order = np.argsort([i for group in groups.values() for i in group])
    return counts[order], squares[order]


# Under jit, so that leaves of equal types are traced and lowered once.
@jax.jit
def _count_leaf(x: Array) -> tuple[Array, Array]:
    """Counts one leaf."""
    wide = x.astype(jnp.float32)
    squares, sharding = jnp.sum(wide * wide), jax.typeof(x).sharding
    if not has_explicit_axes(sharding.mesh) or sharding.mesh.are_all_axes_manual:
        return _counts(x), squares
    # JAX cannot type a scatter of explicitly sharded arrays: each device counts its own.
    axes = tuple(itertools.chain.from_iterable(axes_of(sharding.spec)))
    count = jax.shard_map(
        lambda x: carried(lax.psum(_counts(x), axes) if axes else _counts(x)),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(),
    )
    return count(x), squares


def _counts(x: Array) -> Array:
    """Counts as pairs; in parts if a count may not fit into int32."""
    bins, parts = bin_of(x), max(1, -(-x.size // LIMIT))
    if parts > 1:  # each with its own bins, by the position along the longest axis
        axis = int(np.argmax(x.shape))
        length = -(-x.shape[axis] // parts)
        bins += BINS * (lax.broadcasted_iota(jnp.int32, x.shape, axis) // length)
    size = BINS * parts
    counts = lax.platform_dependent(
        bins,
        # On a CPU 12 ns a value, instead of 280 ns.
        cpu=lambda bins: (
            jnp.zeros(size, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
        ),
        default=functools.partial(count_in_words, size=size),
    )
    return add_up(split(counts.reshape(parts, BINS)), 1)


def count_in_words(bins: Array, *, size: int) -> Array:
    """Returns how many values are in each bin, without a scatter.

    Each value is compared with four bins at a time: their counts in a row of up to 128
    values are the bytes of an int32.
    """
    width = math.gcd(*bins.shape[-1:], 128)
    over, lead = tuple(range(bins.ndim)), [1] * bins.ndim
    if width < 32 or not bins.ndim or may_cut_groups(bins, width):
        every = lax.iota(jnp.int32, size).reshape(*lead, size)
        is_in = lax.expand_dims(bins, (bins.ndim,)) == every
        return jnp.sum(is_in, over, jnp.int32)
    rows = bins.reshape(*bins.shape[:-1], bins.shape[-1] // width, 1, width)
    every = lax.iota(jnp.int32, size // 4).reshape(*lead, -1, 1)
    ones = jnp.where(rows >> 2 == every, 1 << 8 * (rows & 3), 0)
    words = jnp.sum(ones, axis=-1, keepdims=True, dtype=jnp.int32)
    counts = words >> (8 * lax.iota(jnp.int32, 4)).reshape(*lead, 1, 4) & 255
    return jnp.sum(counts, over, jnp.int32).reshape(size)
