"""Codecs, one row each, and how their results are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx._quant._codecs import BitDelta, Block, SoftsignInt8, SqrtUint8, UlpFraction

BLOCK = Block()
BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))
INT8, INT16 = np.dtype(np.int8), np.dtype(np.int16)

# One row a format: a new one inherits every test that takes `codec`.
MASTERS = {
    "bit delta 8": (BitDelta(INT8), BF16),
    "bit delta 16": (BitDelta(INT16), BF16),
    "ulp fraction 8 of bf16": (UlpFraction(INT8), BF16),
    "ulp fraction 16 of bf16": (UlpFraction(INT16), BF16),
    "ulp fraction 8 of f16": (UlpFraction(INT8), F16),
    "ulp fraction 16 of f16": (UlpFraction(INT16), F16),
}
MOMENTS = {
    "mu": SoftsignInt8(),
    "nu": SqrtUint8(),
    "mu of flashoptim": SoftsignInt8(F16),
    "nu of flashoptim": SqrtUint8(F16),
}
masters = pytest.mark.parametrize(
    ("codec", "dtype"), MASTERS.values(), ids=MASTERS.keys()
)
moments = pytest.mark.parametrize("codec", MOMENTS.values(), ids=MOMENTS.keys())


def floats(patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


def patterns_of(x):
    return np.asarray(x, np.float32).view(np.int32).astype(np.int64)


def round_trip(codec, dtype, weight, dither=None):
    param, correction = codec.encode(weight, dtype, BLOCK, dither)
    return param, correction, codec.decode(param, correction, BLOCK)


@functools.cache
def compiled(codec, dtype):
    """Encodes and decodes in one program, where XLA could remove pairs of casts."""
    return jax.jit(lambda weight: round_trip(codec, dtype, weight))


def half_ulp(param):
    """Returns half the distance to the next larger number, in f64."""
    mantissa, smallest = (7, -126) if param.dtype == BF16 else (10, -14)
    _, exponent = np.frexp(np.abs(param.astype(np.float64)))
    return 2.0 ** (np.maximum(exponent - 1, smallest) - mantissa - 1)


def check_master(codec, dtype, weight):
    """Checks parameters and weights that were encoded and decoded again."""
    param, correction, decoded = map(np.asarray, compiled(codec, dtype)(weight))
    assert correction.dtype == codec.dtype
    if isinstance(codec, BitDelta):
        distance = np.abs(patterns_of(decoded) - patterns_of(weight))
        assert np.all(distance <= (128 if codec.dtype == INT8 else 0))
        # The parameter is nearest to what is decoded: half a bf16 ulp at most.
        left = patterns_of(decoded) - patterns_of(param.astype(np.float32))
        assert np.all(np.abs(left) <= 0x8000)
    else:
        assert np.array_equal(param.view("u2"), weight.astype(dtype).view("u2"))
        error = np.abs(decoded.astype(np.float64) - weight.astype(np.float64))
        unit = half_ulp(param) / np.iinfo(codec.dtype).max
        # The sum is rounded to f32, and the correction before it.
        rounding = np.spacing(np.abs(weight)) / 2 + half_ulp(param) * 2.0**-22
        assert np.all(error <= unit / 2 + rounding)
    return param, correction, decoded
