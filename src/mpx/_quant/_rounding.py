"""Rounding to integers and to 16 bits, to nearest or at random."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

F32 = jnp.float32
# Adding 1.5 · 2²³ leaves no bits behind the point: the hardware rounds to nearest, ties
# to even, and the integer stands in the lowest bits of the sum.
SHIFT = np.float32(12582912.0)
_SHIFT_BITS = SHIFT.view(np.int32)
UPWARDS = 0.5 - 2.0**-16


def to_integer(x: Array, dtype: type) -> Array:
    """Rounds f32 numbers below 2²² to nearest, ties to even, as an 8-bit integer.

    Exact and the same on every backend. Numbers that do not fit, and nan, give an
    arbitrary code.
    """
    return shifted_to_integer(x + SHIFT, dtype)


def shifted_to_integer(x: Array, dtype: type) -> Array:
    """As `to_integer`, of numbers to which `SHIFT` has been added already."""
    # Without the subtraction XLA for GPUs (jax 0.11.2) makes -1 of every number: it does
    # not cut off the high bits of an integer that comes out of a float's bits.
    return (bits(x) - _SHIFT_BITS).astype(dtype)


def bits(x: Array) -> Array:
    """Returns the bits of f32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: Array) -> Array:
    """Returns the f32 numbers that have these bits."""
    return lax.bitcast_convert_type(x, F32)


def to_bf16_bits(x: Array, dither: Array | float | None = None) -> Array:
    """Rounds finite f32 numbers to bf16, in integers; still as f32 bits.

    A cast down and up again would be removed by XLA.

    Args:
        x: The numbers.
        dither: What to add before they are rounded to nearest, in ulps of bf16, from
            -1/2 to `UPWARDS`, with which they are rounded away from zero. `None` adds
            nothing, and ties are rounded to even.
    """
    b = bits(x)
    if dither is None:
        up = 0x7FFF + ((b >> 16) & 1)
    elif isinstance(dither, int | float):
        up = int((dither + 0.5) * 65536.0)
    else:
        up = ((dither + 0.5) * 65536.0).astype(jnp.int32)
    return (b + up) & np.int32(-65536)


class Dither(NamedTuple):
    """What is added to magnitudes before they are rounded, f32 scalars.

    What moves by less than half a code in a step would stay for ever if it were always
    rounded to nearest. The multiples of an irrational number, modulo 1, are spread evenly
    over any stretch of steps: each number is rounded up as often as it should be. They are
    the same for all numbers of a step, so a kernel need not make them.

    A step reads moments that the last ones rounded, and rounds the weight. With multiples
    of one number the two roundings would always fall together in the same way: a moment
    that is one code or none, and an update of half a unit, could move the weight twice as
    fast as they should, or not at all. So there are two numbers, and 1 is no sum of integer
    multiples of them: pairs of multiples are spread evenly over the square (Weyl).

    Attributes:
        moments: By the golden ratio, between ±(1/2 - 2⁻¹²): what is an integer but for the
            roundings of f32 stays.
        masters: By √½, from [0, 1), a multiple of 2⁻²⁴: the threshold that `floor` takes,
            in units of what is stored.
    """

    moments: Array
    masters: Array


def dither_of(step: Array) -> Dither:
    """Returns what rounds the numbers of a step; it depends on nothing else."""
    golden, root = (_turn(step, ratio) for ratio in (0x9E3779B1, 0xB504F333))
    return Dither(centred(golden), root)


def _turn(step: Array, ratio: int) -> Array:
    """Returns a multiple of `ratio` · 2⁻³², modulo 1."""
    turns = step.astype(jnp.uint32) * np.uint32(ratio)
    return (turns >> np.uint32(8)).astype(jnp.int32).astype(F32) * np.float32(2.0**-24)


def centred(threshold: Array) -> Array:
    """Returns what to add before rounding to nearest, of what to add before a floor.

    The sum of this and an integer, which may be off by roundings of f32, is that integer.
    """
    return (threshold - np.float32(0.5)) * np.float32(1 - 2.0**-11)


def signed_like(number: Array, x: Array) -> Array:
    """Returns the number where `x` is positive or zero, else its negative."""
    sign = bits(x) & np.int32(-(2**31))
    # Mosaic has no bits of scalars.
    return from_bits(bits(jnp.broadcast_to(number, x.shape)) ^ sign)


def is_finite(x: Array) -> Array:
    """Whether numbers are neither inf nor nan; `jnp.isfinite` is not for kernels."""
    return jnp.abs(x) < jnp.inf


# --- at random ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Noise:
    """Random bits for each element, a function of its index and of a seed.

    There is no state to carry or to save: the seed comes from the step count.

    Attributes:
        index: The number of each element, uint32.
        seed: A uint32 scalar.
    """

    index: Array
    seed: Array

    def bits(self, stream: int) -> Array:
        """Returns 32 random bits per element; streams are independent."""
        salt = np.uint32((stream * 0x9E3779B9) & 0xFFFFFFFF)
        return _mix(self.index ^ _mix(self.seed ^ salt))

    def centred(self, stream: int) -> Array:
        """Returns f32 numbers from [-1/2, 1/2)."""
        mantissa = (self.bits(stream) >> np.uint32(8)).astype(jnp.int32)
        return mantissa.astype(F32) * np.float32(2.0**-24) - np.float32(0.5)


def _mix(x: Array) -> Array:
    # A bijection of 32-bit integers in which each input bit flips about half of the
    # output bits (constants found by search: prospector, "lowbias32").
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def element_index(shape: tuple[int, ...]) -> Array:
    """Numbers the elements of an array, modulo 2³².

    A sum over axes rather than a reshaped range: this one is sharded like any array.
    """
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        step = np.uint32(stride & 0xFFFFFFFF)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * step
        stride *= shape[axis]
    return index
