"""Rounding to int8 and e2m1, to nearest or stochastically, and their scales.

Functions under `fp8` have no random key. The random bits are a hash of each number and its
index, so a step that is run again, or computed again under remat, rounds in the same way.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from mpx._jax._formats import FORMATS
from mpx._quant._codecs import random_bits

_INT8_MAX = 127
TINY = np.float32(2.0**-126)  # GPUs take smaller numbers for zero


def integer_scale(amax: Array) -> Float32[Array, "..."]:
    """Returns `amax / 127`, at least 2⁻¹²⁶."""
    # XLA replaces a division by this product in some programs only: ties would differ.
    return jnp.maximum(amax * np.float32(1 / _INT8_MAX), TINY)


def noise_of(x: Array) -> Float32[Array, "..."]:
    """Returns a pseudo-random number between 0 and 1 for each element.

    They are odd multiples of 2⁻¹⁷, which are exact when added to an integer below 128: an
    integer stays that integer, and a fraction is off by at most 2⁻¹⁷ on average.
    """
    seed = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    high = (random_bits(x.shape, seed) >> np.uint32(16)).astype(jnp.int32)
    return (high.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-16)


# Not inlined: `mpx.inspect.explain` knows it by its name, and leaves it out in f32.
@functools.partial(jax.jit, static_argnums=2)
def mpx_round(x: Array, noise: Array | None, form: str) -> Array:
    """Returns the codes of scaled numbers: the nearest ones, or by `noise` one beside."""
    largest = np.float32(_INT8_MAX if form == "int8" else FORMATS[form].max)
    # A number times a rounded inverse may exceed the range by an ulp.
    x = jnp.clip(x, -largest, largest)
    whole = lambda x: jnp.round(x) if noise is None else jnp.floor(x + noise)  # noqa: E731
    if form == "int8":
        return whole(x).astype(np.int8)
    size = jnp.abs(x)  # 0, ½, 1, 1½, 2, 3, 4, 6
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return (whole(x / step) * step).astype(FORMATS[form].dtype)


def to_e4m3(x: Array, *, up: bool) -> Float32[Array, "..."]:
    """Rounds f32 numbers from 0 to 448 to e4m3 numbers, to nearest or up.

    Not by two casts: XLA takes them for none. Below 2⁻⁶ the numbers are multiples of 2⁻⁹.
    """
    fine = x * 512.0
    small = jnp.ceil(fine) if up else jnp.round(fine)
    if up:
        bits = lax.bitcast_convert_type(x, jnp.uint32) + np.uint32(0xFFFFF)
        normal = lax.bitcast_convert_type(bits & np.uint32(0xFFF00000), jnp.float32)
    else:
        normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)
    return jnp.where(fine < 8, small / 512.0, normal)
