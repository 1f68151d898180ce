"""Blocks of numbers that codecs work on.

The same codec serves a whole array in plain JAX and a tile in a kernel. A block hides what
differs: where the groups are, and how roots and reciprocals are computed.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from mpx._quant._rounding import F32, bits


class Block:
    """A block whose last axis is one group: `(..., groups, group_size)`.

    Kernels have blocks of their own, in which results may differ by about one ulp.

    Attributes:
        in_registers: Whether the whole block is held in registers, so that results can
            be shared. XLA would write shared results to memory.
    """

    in_registers: bool = False

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
