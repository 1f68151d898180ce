"""Moments in 8 bits: groups of the flattened array, each with an f16 scale."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from mpx._optim._packing import decode_moment, encode_moment
from mpx._quant._codecs import Quantized


class QuantizedArray(NamedTuple):
    """Numbers in 8 bits: a code per element, an f16 scale per group of the flat array."""

    values: Array
    scales: Array


def is_quantized(leaf: object) -> bool:
    """Returns whether a leaf is a `QuantizedArray`, ours or that of flashoptim-jax itself."""
    return getattr(leaf, "_fields", None) == QuantizedArray._fields


def check_scales(x: PyTree, group_size: int) -> None:
    """Raises if an array does not have a scale for each group of `group_size`."""
    groups = -(-np.size(x.values) // group_size)
    if np.size(x.scales) != groups:
        raise ValueError(
            f"An array of shape {np.shape(x.values)} has {np.size(x.scales)} scales, but "
            f"groups of {group_size} have {groups}. Give the `group_size` that the state "
            "was made with."
        )


def _padded(x: Array, group_size: int) -> Array:
    return jnp.pad(x.reshape(-1), (0, -x.size % group_size))


@functools.partial(jax.jit, static_argnums=(0, 2))
def quantize(name: str, x: Array, group_size: int) -> QuantizedArray:
    """Stores the moment `mu` or `nu` in 8 bits."""
    padded = _padded(x, group_size)
    codes, scales = encode_moment(name, padded, "flashoptim", group_size)
    codes = codes[: x.size].reshape(x.shape)
    if name == "nu":  # mpx never writes the code 0, but flashoptim-jax does, for zeros
        codes = jnp.where(x == 0, codes.dtype.type(0), codes)
    return QuantizedArray(codes, scales)


@functools.partial(jax.jit, static_argnums=(0, 2))
def dequantize(name: str, x: PyTree, group_size: int) -> Array:
    """Returns the f32 numbers of the moment `mu` or `nu`."""
    check_scales(x, group_size)
    values, scales = x
    padded = Quantized(_padded(values, group_size), scales.astype(jnp.float16))
    flat = decode_moment(name, padded, "flashoptim")[: values.size]
    return flat.reshape(values.shape)


def quantize_momentum(x: Array, group_size: int = 32) -> QuantizedArray:
    """Stores signed numbers in int8, finer near zero."""
    return quantize("mu", jnp.asarray(x, jnp.float32), group_size)


def dequantize_momentum(x: PyTree, group_size: int = 32) -> Array:
    """Returns the f32 numbers behind `quantize_momentum`."""
    return dequantize("mu", x, group_size)


def quantize_variance(x: Array, group_size: int = 32) -> QuantizedArray:
    """Stores the roots of numbers ≥ 0 in uint8; only zero becomes zero."""
    return quantize("nu", jnp.asarray(x, jnp.float32), group_size)


def dequantize_variance(x: PyTree, group_size: int = 32) -> Array:
    """Returns the f32 numbers behind `quantize_variance`."""
    return dequantize("nu", x, group_size)
