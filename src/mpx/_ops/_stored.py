"""Numbers that are stored in 16 bits: `store` rounds them, `load` returns them in f32.

XLA leaves out a rounding between two f32 numbers, and then stores these as well. Here it does
not: `load` reads the bits, and the cotangents that leave it wait behind a barrier.
"""

import functools
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


def load(x: Array, *, fuses: bool = False) -> Array:
    """Returns numbers of 16 bits in f32; `fuses` leaves the barrier out."""
    return _cast(LOAD, x, F32, fuses)


def store(x: Array, dtype: np.dtype, *, fuses: bool = False) -> Array:
    """Returns f32 numbers in 16 bits; `fuses` reads the bits of their cotangents, too."""
    return _cast(STORE, x, dtype, fuses)


def _cast(name: str, x: Array, dtype: np.dtype, fuses: bool) -> Array:
    if private("stored") is None:
        return convert_dtype(x, dtype)
    return _primitive(name).bind(x, dtype=dtype, fuses=fuses)


def _bits(x: Array) -> Array:
    """Returns 16-bit numbers in f32 by their bits, which XLA does not look through."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    if x.dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(bits << 16, F32)
    size = bits & 0x7FFF
    tiny = size.astype(F32) * np.float32(2.0**-24)  # below the normal numbers of f16
    exponent = jnp.where(size < 0x7C00, jnp.uint32(112 << 23), jnp.uint32(224 << 23))
    normal = lax.bitcast_convert_type((size << 13) + exponent, F32)
    found = jnp.where(size < 0x400, tiny, normal)
    return jnp.where(bits >> 15 == 1, -found, found)


def _run(name: str, x: Array, *, dtype: np.dtype, fuses: bool) -> Array:
    # A shadow runs it on f32 numbers.
    return _bits(x) if name == LOAD and is_low(x) else x.astype(dtype)


def _back(name: str, x: Array, dtype: np.dtype, *, fuses: bool) -> Array:
    """Returns the cotangent of what was cast, from that of the result."""
    if name == LOAD:
        return x.astype(dtype) if fuses else lax.optimization_barrier(x.astype(dtype))
    return _bits(x) if fuses else x.astype(dtype)


@functools.cache
def _primitive(name: str) -> Primitive:
    names, primitive = private("stored"), Primitive(name)
    run = functools.partial(_run, name)

    def jvp(
        primals: list[Array], tangents: list[PyTree], **params: Any
    ) -> tuple[Array, PyTree]:
        out, tangent = primitive.bind(*primals, **params), tangents[0]
        if type(tangent) is names.Zero:
            return out, names.Zero(jax.typeof(out).to_tangent_aval())
        return out, primitive.bind(tangent, **params)

    def transpose(
        cotangent: PyTree, x: Any, *, dtype: np.dtype, fuses: bool
    ) -> list[PyTree]:
        if type(cotangent) is names.Zero:
            return [names.Zero(x.aval)]
        return [_back(name, cotangent, x.aval.dtype, fuses=fuses)]

    primitive.def_impl(jax.jit(run, static_argnames=("dtype", "fuses")))
    primitive.def_abstract_eval(
        lambda aval, *, dtype, fuses: aval.update(dtype=dtype, weak_type=False)
    )
    names.primitive_jvps[primitive] = jvp
    names.primitive_transposes[primitive] = transpose
    names.primitive_batchers[primitive] = lambda xs, dims, **params: (
        primitive.bind(*xs, **params),
        dims[0],
    )
    names.register_lowering(primitive, names.lower_fun(run, multiple_results=False))
    return primitive
