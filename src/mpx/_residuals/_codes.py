"""The codes of `amp(residuals=...)`: arrays in 8 bits, with a peak for each block."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._jax._formats import F32, FORMATS, LOW_DTYPES
from mpx._program._interpreter import Aval
from mpx._quant._codecs import to_integer

# By name: the dtype of codes, the largest and the smallest positive one.
FORMS: dict[str, tuple[type, float, float]] = {
    "e4m3": (jnp.float8_e4m3fn, FORMATS["e4m3"].max, FORMATS["e4m3"].smallest),
    "int8": (jnp.int8, 127.0, 1.0),
}
BLOCK = 32
LEAST = 4096  # Smaller arrays are kept as they are.


class Coded(NamedTuple):
    """An array in 8 bits: `original ≈ codes · peak / largest code`."""

    codes: Array  # integers: `jax.checkpoint` rounds what it saves, if it is a float
    peak: Array  # the largest magnitude of each block of an axis, in its own dtype


def encode(
    x: Array, form: str, *, keeps_signs: bool = False, peak: Array | None = None
) -> Coded:
    """Returns an array in 8 bits; only 0 becomes 0 if codes keep the signs of numbers.

    The error is at most half a code: 1/254 of the largest number of a block in int8, 1/16 of
    each number in e4m3 that is not tiny. Of a tiny number it is a whole code if signs are
    kept. A block with an inf or nan becomes nan. `peak` is what `peaks` returns.
    """
    dtype, largest, smallest = FORMS[form]
    peak = peaks(x) if peak is None else peak
    # Four times the inverse, which of the largest numbers is too small for a normal number.
    inverse = 4 / jnp.maximum(peak, 2 * FORMATS["f32"].tiny)
    numbers = x.astype(jnp.float32) * _repeat(inverse, jax.typeof(x)) * (largest / 4)
    if keeps_signs:
        # A `select` would need constants of the shape of `x`, which a scan takes as arrays.
        numbers = jnp.sign(numbers) * jnp.maximum(jnp.abs(numbers), smallest)
    if form == "int8":
        codes = to_integer(numbers, dtype)  # XLA needs seven instructions for this
    else:
        codes = lax.bitcast_convert_type(numbers.astype(dtype), jnp.uint8)
    return Coded(codes, (peak + 0 * peak).astype(x.dtype))  # inf becomes nan


def peaks(x: Array) -> Array:
    """Returns the largest magnitude of each block, in f32."""
    axis = axis_of(jax.typeof(x))
    padding = [(0, 0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % BLOCK, 0)
    blocks = lax.pad(jnp.abs(x.astype(jnp.float32)), np.float32(0), padding)
    blocks = blocks.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
    return jnp.max(blocks, axis=axis + 1)


def decode(coded: Coded, form: str, dtype: np.dtype, one: Any = 1.0) -> Array:
    """Returns the numbers of an array in 8 bits, times `one`."""
    wide = lax.bitcast_convert_type(coded.codes, FORMS[form][0]).astype(jnp.float32)
    peak = _repeat(coded.peak.astype(jnp.float32), jax.typeof(wide))
    # The largest code becomes 1, so that a peak comes back exactly, as the 1 of a softmax that
    # is sure, from which a derivative subtracts 1.
    return (wide * np.float32(1 / FORMS[form][1]) * peak * one).astype(dtype)


def can_code(aval: Aval) -> bool:
    """Returns whether 8 bits are possible and save a quarter at least."""
    dtype = getattr(aval, "dtype", None)
    if dtype not in (F32, *LOW_DTYPES) or not isinstance(aval.size, int):
        return False  # An exported function may have sizes that are symbols.
    if aval.size < LEAST:
        return False
    axis, each = axis_of(aval), aval.dtype.itemsize
    if _is_sharded(aval, axis):
        return False
    count = aval.shape[axis]
    size = aval.size + each * aval.size // count * -(-count // BLOCK)
    return 4 * size <= 3 * aval.size * each


def axis_of(aval: Aval) -> int:
    """Returns the axis of an array that is split into blocks: the last one.

    A block that lay across rows would hold large and small ones, and what reads them may
    divide each by its own size, as the derivative of a norm does. JAX cannot split an axis
    with an explicit sharding: then it is the last of the others.
    """
    free = [axis for axis in range(aval.ndim) if not _is_sharded(aval, axis)]
    return free[-1] if free else aval.ndim - 1


def _is_sharded(aval: Aval, axis: int) -> bool:
    return any(x is not None for x in aval.sharding.spec[axis : axis + 1])


def _repeat(blocks: Array, aval: Aval) -> Array:
    """Returns numbers of blocks for each number, so that XLA fuses with what reads these."""
    axis = axis_of(aval)
    each = jnp.repeat(blocks, BLOCK, axis)
    return lax.slice_in_dim(each, 0, aval.shape[axis], axis=axis)
