"""Power-of-two scales from exponent bits, and casting to 8-bit formats with them.

A quantised tensor stands for `original ≈ codes · scale`. Scales are powers of two: they
are exact in every format, so scaling before or after a matmul gives the same bits, and
rounding is that of the 8-bit format alone. They are built from exponent bits because
`exp2` of an integer is inexact on GPUs and CPUs.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from mpx._jax._formats import FORMATS

DTYPES: dict[str, np.dtype] = {
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e5m2": np.dtype(jnp.float8_e5m2),
}
_MANTISSA = 0x7FFFFF
# Scale and inverse are both normal f32 numbers between these biased exponents.
_LOWEST, _HIGHEST = 1, 253


def largest_magnitude(
    x: Array, axes: Sequence[int] | None = None
) -> Float32[Array, "..."]:
    """Returns the largest absolute value, 0 for an empty array, nan if there is one.

    It is a scalar, or that over some axes, which are kept with length 1.
    """
    over = None if axes is None else tuple(axes)
    found = jnp.max(jnp.abs(x), axis=over, keepdims=over is not None, initial=0.0)
    return found.astype(jnp.float32)


def power_of_two_scale(amax: Array, form: str) -> Float32[Array, "..."]:
    """Returns the smallest power of two that brings `amax` into a format's range.

    That is `2**ceil(log2(amax / max))`, computed exactly. A scale of 1 is returned for
    0, inf and nan, so that these come through the cast as what they are.
    """
    mantissa, exponent = np.frexp(FORMATS[form].max)  # mantissa in [1/2, 1)
    limit = np.uint32(int((2 * mantissa - 1) * (_MANTISSA + 1)))
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.uint32)
    above = ((bits & np.uint32(_MANTISSA)) > limit).astype(jnp.int32)
    biased = (bits >> np.uint32(23)).astype(jnp.int32) - np.int32(exponent - 1) + above
    scale = _from_exponent(jnp.clip(biased, _LOWEST, _HIGHEST))
    usable = (amax > 0) & (amax < jnp.inf)
    return jnp.where(usable, scale, jnp.ones_like(scale))


def _from_exponent(biased: Array) -> Array:
    return lax.bitcast_convert_type(
        biased.astype(jnp.uint32) << np.uint32(23), jnp.float32
    )


def inverse(scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the exact `1 / scale` of a power of two, by its exponent bits."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    return _from_exponent(np.int32(254) - (bits >> np.uint32(23)).astype(jnp.int32))


def quantize(x: Array, scale: Array, form: str, *, clip: bool) -> Array:
    """Returns `x / scale` in an 8-bit format; the error is half an ulp of the format.

    With `clip`, magnitudes above the range become the largest number, as they must where
    the scale was chosen before `x` was known. Elsewhere a clip has made XLA fail ("A cycle
    is detected", jaxlib 0.11.2) where `x` comes out of a matmul.
    """
    return cast_scaled(x, inverse(scale), form, clip=clip)


def cast_scaled(x: Array, factor: Array, form: str, *, clip: bool) -> Array:
    """Returns `x · factor` in an 8-bit format. inf and nan become nan.

    A clipped inf would hide an overflow from loss scaling, and GPUs clip it.
    """
    # In f32: 2**126 would overflow f16. XLA fuses the product into the cast.
    scaled = x.astype(jnp.float32) * factor
    finite = jnp.abs(scaled) < jnp.inf
    if clip:
        largest = np.float32(FORMATS[form].max)
        scaled = jnp.clip(scaled, -largest, largest)
    return jnp.where(finite, scaled, jnp.nan).astype(DTYPES[form])
