"""Numbers that are written in a function guard what they guard in f32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from models import normal

X = 4 * normal(0, 64, 16)
Y = (normal(1, 64, 16) > 0).astype(jnp.float32)
W = 2 * jnp.eye(16)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def clipped(h, eps):
    q = jnp.clip(jax.nn.sigmoid(h), eps, 1 - eps)
    return -jnp.mean(Y * jnp.log(q) + (1 - Y) * jnp.log(1 - q))


GUARDED = {
    "cross entropy": lambda h: clipped(h, 1e-3),
    "arccos": lambda h: jnp.mean(
        jnp.arccos(jnp.clip(unit(h) @ unit(X).T, -0.999, 0.999))
    ),
    "arctanh": lambda h: jnp.mean(jnp.arctanh(jnp.clip(jnp.tanh(h), -0.999, 0.999))),
    "minimum": lambda h: jnp.mean(
        jnp.log(1 - jnp.minimum(jax.nn.sigmoid(h), np.float32(1 - 1e-4)))
    ),
    "arccosh": lambda h: jnp.mean(jnp.arccosh(jnp.maximum(h, 1 + 1e-6))),
    "inverse": lambda h: jnp.mean(1 / (1 - jax.lax.clamp(-0.999, jnp.tanh(h), 0.999))),
}


@pytest.mark.product
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16:RuntimeWarning")
def test_a_bound_is_not_rounded(name, dtype):
    loss = lambda w, x: GUARDED[name](x @ w)  # noqa: E731
    value, grad = jax.jit(jax.value_and_grad(mpx.amp(loss, dtype)))(W, X)
    assert jnp.all(jnp.isfinite(grad))
    # What lies within a rounding of the bound, and each number, is off by a rounding.
    np.testing.assert_allclose(value, loss(W, X), rtol=0.15)


@pytest.mark.parametrize("bound", [100.25, np.float32(100.25), jnp.float32(100.25)])
def test_a_comparison_is_with_the_number_that_is_written(bound):
    counted = mpx.amp(lambda w, x: jnp.sum((x @ w >= bound).astype(jnp.float32)))
    assert counted(jnp.eye(16), jnp.full((4, 16), 100.0)) == 0
    assert counted(jnp.eye(16), jnp.full((4, 16), 101.0)) == 64


def average(w, x):
    h, mean = jnp.abs(x @ w), jnp.zeros(16)
    mean = h[0]
    for row in h[1:]:
        mean = 0.99 * mean + 0.01 * row
    return jnp.mean(mean)


def test_factors_of_an_average_add_up_to_one():
    # 0.99 and 0.01 of bf16 add up to 0.9983: after 63 steps a tenth would be lost.
    found, exact = jax.jit(mpx.amp(average))(W, X), average(W, X)
    np.testing.assert_allclose(found, exact, rtol=0.03)


def test_a_factor_is_the_number_that_is_written():
    scaled = lambda w, x: jnp.sum(jnp.abs(x @ w) * 0.998)  # noqa: E731
    np.testing.assert_allclose(mpx.amp(scaled)(W, X), scaled(W, X), rtol=5e-4)


@pytest.mark.parametrize("norm", [unit, lambda h: h * jax.lax.rsqrt(
    jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)])  # fmt: skip
@pytest.mark.parametrize("scale", [100.0, 1e-3])
def test_norm_in_f16_neither_overflows_nor_vanishes(norm, scale):
    def loss(w, x):
        return jnp.mean((norm(x @ w) - Y) ** 2)

    step = mpx.value_and_grad(mpx.amp(loss, "f16"))
    result = jax.jit(step)(mpx.StaticLossScaling(2.0**10), scale * W, X)
    value, grad = jax.value_and_grad(loss)(scale * W, X)
    assert result.finite
    np.testing.assert_allclose(result.value, value, rtol=0.02)
    assert jnp.linalg.norm(result.grads - grad) < 0.05 * jnp.linalg.norm(grad)
