"""Rounding to integers and to 16 bits, to nearest or dithered; pseudo-random bits."""

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

F32 = jnp.float32
# Adding 1.5 · 2²³ leaves no bits after the point: the hardware rounds to nearest, ties
# to even, and the lowest bits of the sum hold the integer.
SHIFT = np.float32(12582912.0)
_SHIFT_BITS = SHIFT.view(np.int32)


def to_integer(x: Array, dtype: type) -> Array:
    """Rounds f32 numbers below 2²² to nearest, ties to even; others give any code."""
    return shifted_to_integer(x + SHIFT, dtype)


def shifted_to_integer(x: Array, dtype: type) -> Array:
    """Finishes `to_integer` for numbers to which `SHIFT` was already added."""
    # Without the subtraction XLA for GPUs (jax 0.11.2) makes -1 of every number: it does
    # not cut off the high bits of an integer that comes out of a float's bits.
    return (bits(x) - _SHIFT_BITS).astype(dtype)


def bits(x: Array) -> Array:
    """Returns the bits of f32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Array) -> Array:
    """Returns the f32 numbers that have these bits."""
    return lax.bitcast_convert_type(x, F32)


def to_bf16_bits(x: Array, dither: Array | None = None) -> Array:
    """Rounds finite f32 numbers to bf16 in integers; returns f32 bits.

    XLA would remove a cast down followed by a cast up. `dither` is added before rounding
    to nearest, in ulps of bf16, from -1/2 to 1/2; `None` rounds ties to even.
    """
    b = bits(x)
    if dither is None:
        up = 0x7FFF + ((b >> 16) & 1)
    else:
        up = ((dither + 0.5) * 65536.0).astype(jnp.int32)
    return (b + up) & np.int32(-65536)


def signed_like(number: Array, x: Array) -> Array:
    """Returns `number` where `x` is positive or zero, else its negative."""
    sign = bits(x) & np.int32(-(2**31))
    return from_bits(bits(jnp.broadcast_to(number, x.shape)) ^ sign)


def is_finite(x: Array) -> Array:
    """Tells which numbers are finite; `jnp.isfinite` does not run in kernels."""
    return jnp.abs(x) < jnp.inf


class Dither(NamedTuple):
    """Offsets added to magnitudes before rounding, f32 scalars, one pair per step.

    Rounded to nearest, a number that moves by less than half a code per step would never
    move. The multiples of an irrational number modulo 1 are spread evenly over any range
    of steps, so each number is rounded up as often as it should be. All numbers of a step
    share them, so kernels need not generate any. Moments and weights have two numbers that
    are independent of 1 over the integers: with one, the two roundings of a step would be
    correlated, and a weight could move twice as fast as it should, or not at all.

    That of moments, by the golden ratio, is between ±(1/2 - 2⁻¹²): an integer with f32
    rounding errors stays that integer. That of masters, by √½, is from [0, 1), a multiple
    of 2⁻²⁴: the threshold added before a floor, in units of the stored format.
    """

    moments: Array
    masters: Array


def dither_of(step: Array) -> Dither:
    """Returns the offsets of a step; they depend on nothing else."""

    def multiple(ratio: int) -> Array:  # of `ratio` · 2⁻³², modulo 1
        high = (step.astype(jnp.uint32) * np.uint32(ratio)) >> np.uint32(8)
        return high.astype(jnp.int32).astype(F32) * np.float32(2.0**-24)

    return Dither(centred(multiple(0x9E3779B1)), multiple(0xB504F333))


def centred(threshold: Array) -> Array:
    """Converts an offset for a floor to one for rounding to nearest.

    An integer with f32 rounding errors, plus the offset, rounds to that integer.
    """
    return (threshold - np.float32(0.5)) * np.float32(1 - 2.0**-11)


Rounding: TypeAlias = Array | None
"""One number of a `Dither`; `None` rounds to nearest."""


def random_bits(shape: tuple[int, ...], seed: Array) -> Array:
    """Returns 32 pseudo-random bits per element, given a uint32 seed."""
    return _mix(_element_index(shape) ^ _mix(seed))


def _mix(x: Array) -> Array:
    # A bijection of 32-bit integers in which each input bit flips about half of the
    # output bits (constants found by search: prospector, "lowbias32").
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _element_index(shape: tuple[int, ...]) -> Array:
    """Numbers the elements of an array, modulo 2³².

    It is a sum over axes, which is sharded like any array; a reshaped range is not.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        step = np.uint32(stride & 0xFFFFFFFF)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return index


class Block:
    """A block whose last axis is one group: `(..., groups, group_size)`.

    Kernels have blocks of their own, in which results may differ by about one ulp.
    """

    def peak(self, x: Array) -> Array:
        """Returns the largest number of each group."""
        return jnp.max(x, axis=-1)

    def spread(self, per_group: Array) -> Array:
        """Returns each group's number for each of its elements."""
        return per_group[..., None]

    def root_peak(self, x: Array, root: Array) -> Array:
        """Returns the largest root of each group, given numbers and their roots."""
        # Not the maximum of the roots: XLA would write all roots to memory.
        return self.sqrt(self.peak(x))

    def sqrt(self, x: Array) -> Array:
        """Returns the square root."""
        return jnp.sqrt(x)

    def reciprocal(self, x: Array) -> Array:
        """Returns 1 / x."""
        return 1.0 / x

    def multiply_add(self, x: ArrayLike, y: Array, z: ArrayLike) -> Array:
        """Returns x · y + z, in a kernel rounded once."""
        return jnp.add(jnp.multiply(x, y), z)

    def sign(self, x: Array) -> Array:
        """Returns -1, 0 or 1; nan of nan."""
        return jnp.sign(x)

    def rounded(self, x: Array, dtype: np.dtype) -> Array:
        """Rounds f32 numbers to those that `dtype` has; the result is f32."""
        # Not two casts: XLA removes a cast down followed by a cast up.
        info = jnp.finfo(dtype)
        rounded = lax.reduce_precision(x, info.nexp, info.nmant)
        if info.nexp == 8:
            return rounded
        # `reduce_precision` has no subnormal numbers. Those of f16 are multiples of 2⁻²⁴,
        # the last bit of 0.75 in f32.
        last = bits(x + np.float32(0.75)) - np.float32(0.75).view(np.int32)
        multiple = last.astype(F32) * np.float32(2.0**-24)
        return jnp.where(jnp.abs(x) < np.float32(2.0**-14), multiple, rounded)
