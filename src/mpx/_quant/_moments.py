"""Codecs for the moments of an optimizer: 8 bits an element and one scale a group."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._quant._block import Block
from mpx._quant._rounding import (
    F32,
    SHIFT,
    UPWARDS,
    Noise,
    Rounding,
    from_bits,
    is_finite,
    shifted_to_integer,
    signed_like,
    to_bf16_bits,
    to_integer,
)

BF16 = np.dtype(jnp.bfloat16)
F16 = np.dtype(jnp.float16)
_F32 = np.dtype(F32)
_TINY = np.float32(1.1754944e-38)
_LARGEST = {
    BF16: np.float32(jnp.finfo(jnp.bfloat16).max),
    F16: np.float32(65504.0),
    _F32: np.float32(jnp.finfo(F32).max),
}


class Quantized(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
        codes: One integer per element, in the shape of the array it stands for.
        scale: One number per group: `shape[:-1] + (groups,)`.
    """

    codes: Array
    scale: Array


class MomentCodec(abc.ABC):
    """Storage format of a moment. Codecs are static: hashable and compared by value.

    Attributes:
        code_dtype: The dtype of the number stored per element.
        scale_dtype: The dtype of the number stored per group; `None` if there is none.
    """

    code_dtype: ClassVar[np.dtype]
    scale_dtype: Any

    @abc.abstractmethod
    def decode(self, stored: Any, block: Block) -> Array:
        """Returns the f32 numbers."""

    @abc.abstractmethod
    def encode(
        self, x: Array, block: Block, rounding: Rounding = None, is_safe: bool = False
    ) -> Any:
        """Encodes f32 numbers.

        Args:
            x: The numbers.
            block: Their groups.
            rounding: How codes are rounded: to nearest, at random, or with
                `Dither.moments`, which also rounds bf16 scales and which the formats of
                FlashOptim do not support.
            is_safe: Whether all numbers are known to be below 2¹²⁵. Otherwise zero is
                stored for inf and nan, so that they do not spread to their group.
        """


@dataclasses.dataclass(frozen=True)
class Full(MomentCodec):
    """Stores f32 as it is, inf and nan included."""

    code_dtype: ClassVar[np.dtype] = _F32
    scale_dtype: Any = None

    def decode(self, stored: Array, block: Block) -> Array:
        return stored

    def encode(
        self, x: Array, block: Block, rounding: Rounding = None, is_safe: bool = False
    ) -> Array:
        return x


@dataclasses.dataclass(frozen=True)
class SoftsignInt8(MomentCodec):
    """Signed numbers, finer near zero: `x = scale · q / (254 - |q|)`, q in ±127.

    `scale` is the largest magnitude of the group, rounded. A number is off by at most
    `scale / 127` and by `scale / 508` near zero, half of the distance to its neighbours
    (with the nearest code): codes are chosen for the rounded `scale`. Dithered, the error
    is at most twice as large; averaged over steps the largest number is exact and others
    are off by at most a quarter of a code, since the same offset rounds codes and `scale`.
    (With independent ones the largest code could be one too large.) If codes are rounded
    at random, `scale` is rounded up so that larger numbers are not cut off. Encoding a
    decoded block changes nothing. A group whose largest magnitude exceeds 2¹²⁵ is stored
    as zeros.

    Attributes:
        scale_dtype: bf16 keeps the range of f32; f16 is the format of FlashOptim, in
            which numbers end at 65504 and groups below 3e-8 are zeros.
    """

    code_dtype: ClassVar[np.dtype] = np.dtype(np.int8)
    scale_dtype: Any = BF16

    def decode(self, stored: Quantized, block: Block) -> Array:
        q = stored.codes.astype(F32)
        scale = block.spread(stored.scale.astype(F32))
        return q * block.reciprocal(254.0 - jnp.abs(q)) * scale

    def encode(
        self, x: Array, block: Block, rounding: Rounding = None, is_safe: bool = False
    ) -> Quantized:
        x = x if is_safe else jnp.where(is_finite(x), x, 0.0)
        peak = block.peak(jnp.abs(x))
        dither = UPWARDS if isinstance(rounding, Noise) else rounding
        scale, stored = _rounded_scale(peak, self.scale_dtype, dither)
        # n / (1 + |n|) with n = x / scale.
        positive = block.spread(jnp.maximum(scale, _TINY))
        divisor = block.reciprocal(positive + jnp.abs(x))
        if not isinstance(rounding, Noise) and self.scale_dtype != F16:
            fraction = x * divisor
            if rounding is not None:
                more = signed_like(rounding * np.float32(1 / 254), x)
                fraction = block.multiply_add(x, divisor, more)
            q = block.multiply_add(np.float32(254), fraction, SHIFT)
            return Quantized(shifted_to_integer(q, jnp.int8), stored)
        q = 254.0 * (x * divisor)
        if isinstance(rounding, Noise):
            q = q + rounding.centred()
        # The scale may be below the largest number: a little, by rounding, or much, since
        # f16 ends at 65504.
        return Quantized(to_integer(jnp.clip(q, -127.0, 127.0), jnp.int8), stored)


@dataclasses.dataclass(frozen=True)
class SqrtUint8(MomentCodec):
    """Numbers ≥ 0 by their roots: `x = (scale · q / 255)²`, q in 1…255.

    `scale` is the root of the largest number of the group. The root of a number is off by
    at most `scale / 510`, and by at most `scale / 255` below that; dithered, by twice as
    much. The code 0 means zero but is never written: with a second moment rounded to zero
    the step of Adam would have no bound. A group of zeros has the scale 0. Encoding a
    decoded block changes no code, and an f32 scale only by rounding errors.

    Attributes:
        scale_dtype: f32 follows a slow average; f16 is the format of FlashOptim, in
            which roots end at 65504 and groups below 3e-8 are zeros.
    """

    code_dtype: ClassVar[np.dtype] = np.dtype(np.uint8)
    scale_dtype: Any = _F32

    def decode(self, stored: Quantized, block: Block) -> Array:
        unit = block.spread(stored.scale.astype(F32) * np.float32(1 / 255))
        root = stored.codes.astype(F32) * unit
        return root * root

    def encode(
        self, x: Array, block: Block, rounding: Rounding = None, is_safe: bool = False
    ) -> Quantized:
        x = x if is_safe else jnp.where(is_finite(x), x, 0.0)
        root = block.sqrt(x)
        peak = block.root_peak(x, root)
        scale, stored = _rounded_scale(peak, self.scale_dtype)
        # Below all roots of f32 numbers; a smaller floor would make 0 · ∞ of a zero.
        unit = 255.0 * block.reciprocal(jnp.maximum(scale, np.float32(2.0**-100)))
        if not isinstance(rounding, Noise) and self.scale_dtype != F16:
            more = SHIFT if rounding is None else rounding
            q = block.multiply_add(root, block.spread(unit), more)
            q = q if rounding is None else q + SHIFT
            q = jnp.maximum(q, SHIFT + 1)
            return Quantized(shifted_to_integer(q, jnp.uint8), stored)
        q = root * block.spread(unit)
        if isinstance(rounding, Noise):
            q = q + rounding.centred()
        # f16 ends at 65504.
        return Quantized(to_integer(jnp.clip(q, 1.0, 255.0), jnp.uint8), stored)


def _rounded_scale(
    peak: Array, dtype: np.dtype, dither: Array | float | None = None
) -> tuple[Array, Array]:
    """Returns the scale that codes are chosen for, and the stored one."""
    peak = jnp.minimum(peak, _LARGEST[dtype])
    if dtype == BF16:
        rounded = from_bits(to_bf16_bits(peak, dither))
        return rounded, rounded.astype(BF16)
    # f16, as FlashOptim does it: codes for the f32 maximum, decoded with its rounding.
    return peak, peak.astype(dtype)
