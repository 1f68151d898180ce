"""Numbers that are stored in 16 bits: `load` and `store`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import equations, normal
from mpx._jax._formats import LOW_DTYPES
from mpx._ops._stored import load, store

each_dtype = pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)


@each_dtype
@pytest.mark.parametrize(
    "run", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"]
)
def test_every_number_is_loaded_bit_by_bit(dtype, run):
    x = jnp.asarray(np.arange(2**16, dtype=np.uint16).view(dtype))
    found, expected = np.asarray(run(load)(x)), np.asarray(x).astype(np.float32)
    nans = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nans)
    np.testing.assert_array_equal(
        found[~nans].view(np.uint32), expected[~nans].view(np.uint32)
    )


@each_dtype
def test_stored_numbers_are_rounded_as_a_cast_rounds_them(dtype):
    x = normal(0, 4096) * 8
    np.testing.assert_array_equal(store(x, dtype), x.astype(dtype))
    np.testing.assert_array_equal(
        jax.vmap(lambda x: store(x, dtype))(x), x.astype(dtype)
    )


@each_dtype
@pytest.mark.parametrize("fuses", [False, True])
def test_both_are_linear_and_their_cotangents_have_the_dtypes_of_casts(dtype, fuses):
    x = normal(1, 64).astype(dtype)

    def func(x):
        return store(load(x, fuses=fuses) * 3, dtype, fuses=fuses)

    out, tangent = jax.jvp(func, (x,), (x,))
    np.testing.assert_array_equal(out, tangent)
    (back,) = jax.vjp(func, x)[1](x)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, out)
    wide = jax.grad(lambda x: store(x, dtype, fuses=fuses).astype(jnp.float32).sum())
    assert wide(x.astype(jnp.float32)).dtype == jnp.float32


@each_dtype
def test_the_cotangent_of_a_load_waits_behind_a_barrier(dtype):
    def primitives(**options):
        func = jax.grad(lambda x: jnp.sum(load(x, **options) ** 2))
        found = equations(jax.make_jaxpr(func)(jnp.ones(8, dtype)))
        return {eqn.primitive.name for eqn in found}

    assert "optimization_barrier" in primitives()
    assert "optimization_barrier" not in primitives(fuses=True)
