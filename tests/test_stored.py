"""Numbers that are stored in 16 bits: `load` and `store`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import equations, normal
from mpx._jax._formats import LOW_DTYPES
from mpx._ops._stored import add, load, store

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
def test_both_are_linear_and_their_cotangents_have_the_dtypes_of_casts(dtype):
    x = normal(1, 64).astype(dtype)

    def func(x):
        return store(load(x) * 3, dtype)

    out, tangent = jax.jvp(func, (x,), (x,))
    np.testing.assert_array_equal(out, tangent)
    (back,) = jax.vjp(func, x)[1](x)
    assert back.dtype == dtype
    np.testing.assert_array_equal(back, out)
    wide = jax.grad(lambda x: store(x, dtype).astype(jnp.float32).sum())
    assert wide(x.astype(jnp.float32)).dtype == jnp.float32


@each_dtype
def test_the_cotangent_of_a_load_waits_behind_a_barrier(dtype):
    func = jax.grad(lambda x: jnp.sum(load(x) ** 2))
    found = equations(jax.make_jaxpr(func)(jnp.ones(8, dtype)))
    assert "optimization_barrier" in {eqn.primitive.name for eqn in found}


@each_dtype
@pytest.mark.parametrize("axes", [None, (0, 0), (1, None), (None, 0)], ids=str)
def test_a_bias_sums_what_is_stored_in_f32(dtype, axes):
    """Also if only one of the two has a batch."""
    n, d = 512, 3
    x, bias = normal(2, n, d).astype(dtype), normal(3, n, d)
    weights = 1 + np.abs(normal(4, n, d)) / 4
    if axes is None:
        run, wide = add, lambda x, b: x.astype(jnp.float32) + b
    else:
        x, bias = (
            y[0] if axis is None else jnp.moveaxis(y, 0, axis)
            for y, axis in zip((x, bias), axes, strict=True)
        )
        run = jax.vmap(add, axes)
        wide = jax.vmap(lambda x, b: x.astype(jnp.float32) + b, axes)
    np.testing.assert_array_equal(run(x, bias), wide(x, bias))
    found, back = jax.vjp(run, x, bias)
    grads = back(jnp.asarray(weights, jnp.float32))
    rounded = np.asarray(weights.astype(dtype), np.float64)
    for grad, like, axis in zip(grads, (x, bias), axes or (0, 0), strict=True):
        expected = rounded.sum(0) if axis is None else np.moveaxis(rounded, 0, axis)
        assert grad.dtype == like.dtype
        close = 2e-6 if like.dtype == jnp.float32 else 2.0**-7
        np.testing.assert_allclose(np.asarray(grad, np.float64), expected, rtol=close)


@each_dtype
def test_a_bias_or_numbers_that_are_not_differentiated(dtype):
    x, bias = normal(5, 8).astype(dtype), normal(6, 8)
    loss = lambda x, bias: jnp.sum(add(x, bias) ** 2)  # noqa: E731
    both = jax.grad(loss, (0, 1))(x, bias)
    for i, grad in enumerate(both):
        alone = jax.grad(loss, i)(x, bias)
        np.testing.assert_allclose(
            np.asarray(alone, np.float32), np.asarray(grad, np.float32), rtol=2.0**-7
        )
