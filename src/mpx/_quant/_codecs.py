"""How optimizer states store f32 numbers: 8-bit moments with scales, and master weights."""

import dataclasses
from typing import ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

F32 = jnp.float32
BF16, F16, _F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, F32))
_INT8 = np.dtype(np.int8)
_TINY = np.float32(1.1754944e-38)
_LARGEST = {t: np.float32(jnp.finfo(t).max) for t in (BF16, F16, _F32)}
# Mantissa bits and exponent bias of the 16-bit formats.
_LAYOUT = {BF16: (7, 127), F16: (10, 15)}
# Adding 1.5 · 2²³ leaves no bits after the point: the hardware rounds to nearest, ties
# to even, and the lowest bits of the sum hold the integer.
SHIFT = np.float32(12582912.0)
Rounding: TypeAlias = Array | None
"""One number of a `Dither`; `None` rounds to nearest."""


# --- Rounding and pseudo-random bits ----------------------------------------------------


def to_integer(x: Array, dtype: DTypeLike) -> Array:
    """Rounds f32 numbers below 2²² to nearest, ties to even; others give any code."""
    return bits_to_cut(x + SHIFT).astype(dtype)


def bits(x: Array) -> Array:
    """Returns the bits of f32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def bits_to_cut(x: Array) -> Array:
    """Returns the bits of f32 numbers, of which only the lowest 8 or 16 will be stored.

    NVIDIA's assembler up to CUDA 13.0 stores such bits wrong, of small arrays, if a float
    operation made them: it converts the number, and every code is 255. Here an operation
    on integers makes them, and the compiler cannot know that it changes at most a nan.
    """
    return jnp.minimum(bits(x), np.int32(0x7FFFFFFE))


def from_bits(x: Array) -> Array:
    """Returns the f32 numbers that have these bits."""
    return lax.bitcast_convert_type(x, F32)


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
    of steps, so each number is rounded up as often as it should be. With the same one for
    moments and weights, a weight could move twice as fast as it should, or not at all.

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
    """Converts an offset for a floor to one for rounding to nearest."""
    return (threshold - np.float32(0.5)) * np.float32(1 - 2.0**-11)


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
    """Numbers the elements of an array, modulo 2³²; unlike a range, it can be sharded."""
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

    def sqrt(self, x: Array) -> Array:
        return jnp.sqrt(x)

    def reciprocal(self, x: Array) -> Array:
        return 1.0 / x

    def multiply_add(self, x: ArrayLike, y: Array, z: ArrayLike) -> Array:
        """Returns x · y + z, in a kernel rounded once."""
        return jnp.add(jnp.multiply(x, y), z)

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


# --- Moments ---------------------------------------------------------------------------
# Numbers to encode are below 2¹²⁵. `rounding` is `Dither.moments`, which also rounds bf16
# scales and which the formats of FlashOptim ignore.


class Quantized(NamedTuple):
    """Numbers in 8 bits: a code per element, and a scale per group of the last axis."""

    codes: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class SoftsignInt8:
    """Signed numbers, finer near zero: `x = scale · q / (254 - |q|)`, q in ±127.

    `scale` is the largest magnitude of the group, rounded. A number is off by at most
    `scale / 127` and by `scale / 508` near zero. Dithered, the error is at most twice as
    large; averaged over steps the largest number is exact and others are off by at most a
    quarter of a code, since the same offset rounds codes and `scale`. (With independent
    ones the largest code could be one too large.) Encoding a decoded block changes
    nothing. A group whose largest magnitude exceeds 2¹²⁵ is stored as zeros.
    A `scale` of bf16 has the range of f32; with f16, the format of FlashOptim, numbers end
    at 65504 and groups below 3e-8 are zeros.
    """

    code_dtype: ClassVar[np.dtype] = np.dtype(np.int8)
    scale_dtype: np.dtype = BF16

    def decode(self, stored: Quantized, block: Block) -> Array:
        q = stored.codes.astype(F32)
        scale = block.spread(stored.scale.astype(F32))
        return q * block.reciprocal(254.0 - jnp.abs(q)) * scale

    def encode(self, x: Array, block: Block, rounding: Rounding = None) -> Quantized:
        peak = block.peak(jnp.abs(x))
        scale, stored = _rounded_scale(peak, self.scale_dtype, rounding)
        # n / (1 + |n|) with n = x / scale.
        positive = block.spread(jnp.maximum(scale, _TINY))
        divisor = block.reciprocal(positive + jnp.abs(x))
        if self.scale_dtype == F16:
            # The largest number may exceed the scale: f16 ends at 65504.
            q = jnp.clip(254.0 * (x * divisor), -127.0, 127.0)
            return Quantized(to_integer(q, jnp.int8), stored)
        fraction = x * divisor
        if rounding is not None:
            more = signed_like(rounding * np.float32(1 / 254), x)
            fraction = block.multiply_add(x, divisor, more)
        q = block.multiply_add(np.float32(254), fraction, SHIFT)
        return Quantized(bits_to_cut(q).astype(jnp.int8), stored)


@dataclasses.dataclass(frozen=True)
class SqrtUint8:
    """Numbers ≥ 0 by their roots: `x = (scale · q / 255)²`, q in 1…255.

    `scale` is the root of the largest number of the group. The root of a number is off by
    at most `scale / 510`, and by at most `scale / 255` below that; dithered, by twice as
    much. The code 0 means zero but is never written: with a second moment rounded to zero
    the step of Adam would have no bound. A group of zeros has the scale 0. Encoding a
    decoded block changes no code, and an f32 scale only by rounding errors.
    A `scale` of f32 follows a slow average; with f16, the format of FlashOptim, roots end
    at 65504, groups below 3e-8 are zeros, and codes, which are never dithered, are chosen
    for the root before its rounding: errors are up to 1.25 times as large, and larger
    still where it is below 6e-5.
    """

    code_dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    scale_dtype: np.dtype = _F32

    def decode(self, stored: Quantized, block: Block) -> Array:
        unit = block.spread(stored.scale.astype(F32) * np.float32(1 / 255))
        root = stored.codes.astype(F32) * unit
        return root * root

    def encode(self, x: Array, block: Block, rounding: Rounding = None) -> Quantized:
        # Not the maximum of the roots: XLA would write all roots to memory.
        scale, stored = _rounded_scale(block.sqrt(block.peak(x)), self.scale_dtype)
        root = block.sqrt(x)
        # Below all roots of f32 numbers; a smaller floor would make 0 · ∞ of a zero.
        unit = 255.0 * block.reciprocal(jnp.maximum(scale, np.float32(2.0**-100)))
        if self.scale_dtype == F16:  # which ends at 65504
            q = jnp.clip(root * block.spread(unit), 1.0, 255.0)
            return Quantized(to_integer(q, jnp.uint8), stored)
        more = SHIFT if rounding is None else rounding
        q = block.multiply_add(root, block.spread(unit), more)
        q = q if rounding is None else q + SHIFT
        codes = bits_to_cut(jnp.maximum(q, SHIFT + 1)).astype(jnp.uint8)
        return Quantized(codes, stored)


def _rounded_scale(
    peak: Array, dtype: np.dtype, dither: Rounding = None
) -> tuple[Array, Array]:
    """Returns the scale that codes are chosen for, and the stored one."""
    peak = jnp.minimum(peak, _LARGEST[dtype])
    if dtype == BF16:
        # In integers: XLA would remove a cast down followed by a cast up.
        b = bits(peak)
        if dither is None:
            up = 0x7FFF + ((b >> 16) & 1)  # to nearest, ties to even
        else:
            up = ((dither + 0.5) * 65536.0).astype(jnp.int32)
        rounded = from_bits((b + up) & np.int32(-65536))
        return rounded, rounded.astype(BF16)
    # f16, as FlashOptim does it: codes for the f32 maximum, decoded with its rounding.
    return peak, peak.astype(dtype)


MomentCodec = SoftsignInt8 | SqrtUint8


# --- Master weights: a 16-bit parameter and the remainder of its rounding ----------------
# `encode` returns parameters of `dtype` and their corrections, rounded by `Dither.masters`.


@dataclasses.dataclass(frozen=True)
class RoundedMaster:
    """No correction: the parameter is the weight, rounded to its dtype.

    Rounding to nearest loses updates below half an ulp; dithered, they are kept on average.
    """

    def decode(self, param: Array, correction: Array | None, block: Block) -> Array:
        return param.astype(F32)

    def encode(
        self, weight: Array, dtype: DTypeLike, block: Block, rounding: Rounding = None
    ) -> tuple[Array, Array | None]:
        if rounding is not None and np.dtype(dtype).itemsize == 2:
            up = (rounding * np.float32(2.0**16)).astype(jnp.int32)
            weight = _rounded_by(weight, np.dtype(dtype), up)
        return weight.astype(dtype), None


@dataclasses.dataclass(frozen=True)
class BitDelta:
    """bf16 with the difference of the bit patterns, in integers only: int8 or int16.

    `bits(weight) = (bits(param) << 16) + (correction << shift)`. 8 bits leave an error of
    at most 128 f32 ulps everywhere (a bf16 ulp is 65536), dithered 255, and 16 bits none.
    The parameter is the bf16 number nearest to the sum; of two, the one away from zero.
    This holds for subnormal numbers, ±0, ±inf and weights between the largest bf16 and the
    largest f32, of which 8 bits make the last 128 (255) infinite; nan stays nan. Encoding a
    decoded weight changes nothing, with any threshold.
    """

    dtype: np.dtype = _INT8

    def decode(self, param: Array, correction: Array, block: Block) -> Array:
        pattern = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
        high = lax.bitcast_convert_type(pattern << np.uint32(16), jnp.int32)
        total = high + (
            correction.astype(jnp.int32) << (16 - np.iinfo(self.dtype).bits)
        )
        # There are no bit patterns below ±0: a parameter that was set to zero is zero,
        # whatever its old correction.
        return from_bits(jnp.where((total ^ high) < 0, high, total))

    def encode(
        self, weight: Array, dtype: DTypeLike, block: Block, rounding: Rounding = None
    ) -> tuple[Array, Array]:
        pattern = bits(weight)
        # A nan that is not this one could become inf, or be carried over into the sign.
        pattern = jnp.where(weight == weight, pattern, np.int32(0x7FC00000))
        # Added before the last bits are cut off: half a unit rounds to nearest.
        half = jnp.int32(128 if self.dtype == _INT8 else 0)
        if self.dtype == _INT8 and rounding is not None:
            half = (rounding * np.float32(2.0**8)).astype(jnp.int32)
        # Half a bf16 ulp more, so that the remainder of the parameter has no sign yet.
        total = pattern + (half + 0x8000)
        info = np.iinfo(self.dtype)
        low = (total >> (16 - info.bits)) & (2**info.bits - 1)
        param = block.rounded(from_bits(total & np.int32(-65536)), BF16)
        return param.astype(BF16), (low + info.min).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class UlpFraction:
    """bf16 or f16 with the rounding error in units of half an ulp (FlashOptim's format).

    `weight = param + correction / M · ulp(param) / 2` with M = 127 (int8) or 32767 (int16).
    With 8 bits the error is at most 1/254 of half an ulp of the parameter: 129 f32 ulps for
    bf16 and 16 for f16, twice that just below a power of two, and twice that again if
    dithered. With 16 bits it is 1 f32 ulp for bf16, 2 if dithered, and 0 for f16. Below
    2⁻¹¹⁰ (8 bits) or 2⁻¹⁰³ (16 bits) a bf16 correction may be lost, and a weight beyond the
    range of f16 becomes inf. Encoding a decoded weight changes nothing, except that one
    half-way below a power of two may move by the bound, once. Dithered, f16 with 8 bits
    follows updates to half an f32 ulp per step.
    """

    dtype: np.dtype = _INT8

    def decode(self, param: Array, correction: Array, block: Block) -> Array:
        low, high = _half_ulp(param)
        fraction = correction.astype(F32) * np.float32(1 / np.iinfo(self.dtype).max)
        return param.astype(F32) + fraction * low * high

    def encode(
        self, weight: Array, dtype: DTypeLike, block: Block, rounding: Rounding = None
    ) -> tuple[Array, Array]:
        rounded = block.rounded(weight, np.dtype(dtype))
        param = rounded.astype(dtype)
        low, high = _half_ulp(param)
        left = jnp.where(jnp.abs(weight) < jnp.inf, weight - rounded, 0.0)
        # Divided twice by roots of half an ulp, which may itself be no f32 number.
        fraction = left * block.reciprocal(low) * block.reciprocal(high)
        top = np.float32(np.iinfo(self.dtype).max)
        code = jnp.clip(fraction, -1.0, 1.0) * top
        if rounding is not None:
            code = jnp.clip(code + centred(rounding), -top, top)
        return param, to_integer(code, self.dtype.type)


MasterCodec = RoundedMaster | BitDelta | UlpFraction


def place(codec: BitDelta | UlpFraction, param: Array, random: Array) -> Array:
    """Returns corrections for weights anywhere in the rounding intervals of parameters.

    From the middle, small steps would change no parameter for a long time, then all at
    once. `random` has 32 bits for each.
    """
    info, width = np.iinfo(codec.dtype), 8 * codec.dtype.itemsize
    code = (random >> np.uint32(32 - width)).astype(jnp.int32) + info.min
    code = jnp.maximum(code, -info.max)
    weight = codec.decode(param, code.astype(codec.dtype), Block())
    # What lies half-way may be rounded to the neighbour. Below a power of two the interval
    # has half the width.
    inside = _pattern(weight.astype(param.dtype)) == _pattern(param)
    code = jnp.where(inside, code, lax.div(code, np.int32(2)))
    mantissa, bias = _LAYOUT[np.dtype(param.dtype)]
    exponent = (_pattern(param) & 0x7FFF) >> mantissa
    is_normal = (exponent > 0) & (exponent <= 2 * bias)
    return jnp.where(is_normal, code, 0).astype(codec.dtype)


def _pattern(param: Array) -> Array:
    """Returns the bits of 16-bit numbers as int32."""
    return lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.int32)


def _half_ulp(param: Array) -> tuple[Array, Array]:
    """Returns two powers of two whose product is half an ulp."""
    mantissa, bias = _LAYOUT[np.dtype(param.dtype)]
    exponent = (_pattern(param) >> mantissa) & ((1 << (15 - mantissa)) - 1)
    log = jnp.maximum(exponent, 1) - (bias + mantissa + 1)
    half = log >> 1
    return from_bits((half + 127) << 23), from_bits((log - half + 127) << 23)


def _rounded_by(weight: Array, dtype: np.dtype, up: Array) -> Array:
    """Rounds each weight to one of its two neighbours.

    The one away from zero is taken if the distance from the other one, in ulps, plus `up`
    · 2⁻¹⁶ is at least 1: as often as that distance says.
    """
    size, low, more = jnp.abs(weight), 16, np.float32(0)
    if dtype == F16:
        # Subnormal numbers have the ulp of 2⁻¹⁴.
        low, least = 13, np.float32(2.0**-14)
        more = jnp.where(size < least, least, more)
    rounded = (bits(size + more) + (up >> (16 - low))) & np.int32(-(2**low))
    rounded = signed_like(from_bits(rounded) - more, weight)
    return jnp.where(is_finite(weight), rounded, weight)
