"""Numbers that are stored in 16 bits: `store` rounds them, `load` returns them in f32.

XLA leaves out a rounding between two f32 numbers, and then stores these as well. Here it does
not: `load` reads the bits, and the cotangents that leave it wait behind a barrier. A bias sums
the cotangents that are stored: see `add`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import Primitive, convert_dtype
from mpx._jax._formats import F32, is_low
from mpx._jax._private import private
from mpx._program._primitives import CASTS

LOAD, STORE = CASTS[1:]
ADD = "add_stored"


def load(x: Array) -> Array:
    """Returns numbers of 16 bits in f32."""
    return _cast(LOAD, x, F32)


def store(x: Array, dtype: np.dtype) -> Array:
    """Returns f32 numbers in 16 bits."""
    return _cast(STORE, x, dtype)


def add(x: Array, bias: Array) -> Array:
    """Returns the sum in f32 of 16-bit numbers, and of f32 numbers of the same shape.

    The cotangent of both is rounded where that of the first is stored, and read there.
    """
    if private("stored") is None:
        return load(x) + bias
    return _primitive(ADD).bind(x, bias)


def _cast(name: str, x: Array, dtype: np.dtype) -> Array:
    if private("stored") is None:
        return convert_dtype(x, dtype)
    return _primitive(name).bind(x, dtype=dtype)


def _bits(x: Array) -> Array:
    """Returns 16-bit numbers in f32 by their bits, which XLA does not look through."""
    if not is_low(x):  # in a shadow, which runs in f32
        return x.astype(F32)
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(bits << 16, F32)
    size = bits & 0x7FFF
    tiny = size.astype(F32) * np.float32(2.0**-24)  # below the normal numbers of f16
    exponent = jnp.where(size < 0x7C00, jnp.uint32(112 << 23), jnp.uint32(224 << 23))
    normal = lax.bitcast_convert_type((size << 13) + exponent, F32)
    found = jnp.where(size < 0x400, tiny, normal)
    return jnp.where(bits >> 15 == 1, -found, found)


def _run(name: str, x: Array, *more: Array, dtype: np.dtype = F32) -> Array:
    if name == ADD:
        return _bits(x) + more[0]
    return _bits(x) if name == LOAD else x.astype(dtype)


def _back(name: str, x: Array, dtype: np.dtype) -> list[Array]:
    """Returns the cotangents of what was cast or added, from that of the result."""
    low = x.astype(dtype)
    if name == ADD:
        return [low, load(low)]
    return [lax.optimization_barrier(low) if name == LOAD else low]


@functools.cache
def _primitive(name: str) -> Primitive:
    names, primitive = private("stored"), Primitive(name)
    run = functools.partial(_run, name)

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Array, PyTree]:
        out, zeros = primitive.bind(*primals, **params), names.Zero
        if not any(type(x) is zeros for x in tangents):
            return out, primitive.bind(*tangents, **params)
        if all(type(x) is zeros for x in tangents):
            return out, zeros(jax.typeof(out).to_tangent_aval())
        x, bias = tangents
        return out, bias if type(x) is zeros else load(x)

    def transpose(cotangent: PyTree, *args: Any, **params: Any) -> list[PyTree]:
        if type(cotangent) is names.Zero:
            return [names.Zero(x.aval) for x in args]
        return _back(name, cotangent, args[0].aval.dtype)

    def batch(
        args: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Array, int | None]:
        if name != ADD:
            return primitive.bind(*args, **params), dims[0]
        # What has no batch is repeated in f32, and its cotangents add up in f32.
        first = [
            None if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(args, dims, strict=True)
        ]
        zeros = next(lax.full_like(x, 0, F32) for x in first if x is not None)
        x, bias = args
        if dims[0] is None:
            first[0] = store(zeros + lax.expand_dims(load(x), [0]), x.dtype)
        elif dims[1] is None:
            first[1] = zeros + lax.expand_dims(bias, [0])
        return primitive.bind(*first), 0

    primitive.def_impl(jax.jit(run, static_argnames=("dtype",)))
    primitive.def_abstract_eval(
        lambda *avals, dtype=F32: avals[-1].update(dtype=dtype, weak_type=False)
    )
    names.primitive_jvps[primitive] = jvp
    names.primitive_transposes[primitive] = transpose
    names.primitive_batchers[primitive] = batch
    names.register_lowering(primitive, names.lower_fun(run, multiple_results=False))
    return primitive
