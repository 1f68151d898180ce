"""Layers, trainings and comparisons that the tests of several recipes share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import mpx
from models import normal
from mpx import fp8
from mpx.testing import assert_trees_equal

BF16 = jnp.bfloat16
everywhere = functools.partial(fp8, min_gain=0)


def as_f64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def ones_and_signs(shape, key=0):
    """Numbers 0 and ±1: exact in every format, so that products can be compared."""
    return jnp.asarray(np.random.default_rng(key).integers(-1, 2, shape), BF16)


# --- scan and remat -------------------------------------------------------------------


def layers(p, x):
    @jax.checkpoint
    def block(h, w):
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"]

    h, _ = lax.scan(lambda h, w: (block(h, w), None), x, p)
    return jnp.mean(h.astype(jnp.float32) ** 2)


@functools.cache
def layer_problem():
    p = {
        "up": normal(0, 2, 32, 64, dtype=BF16) * 0.2,
        "down": normal(1, 2, 64, 32, dtype=BF16) * 0.2,
    }
    return p, normal(2, 64, 32, dtype=BF16)


def assert_scan_is_the_unrolled_loop(recipe):
    """Compares a scan of remat, eager and jitted, with the plain loop, bit for bit.

    Each column of a weight copies one number, and all numbers are 0 or ±1: nothing is
    rounded, so that neither order nor fusion matters.
    """
    rows = np.arange(32)
    weights = np.zeros((2, 32, 32), np.float32)
    weights[0, rows, (rows + 1) % 32], weights[1, rows, (rows * 3) % 32] = 1, 1
    p, x = jnp.asarray(weights, BF16), ones_and_signs((16, 32))
    block = lambda h, w: jax.nn.relu(h @ w)  # noqa: E731
    again = jax.checkpoint(block)

    def scanned(p, x):
        return jnp.sum(lax.scan(lambda h, w: (again(h, w), None), x, p)[0] * x)

    def unrolled(p, x):
        return jnp.sum(block(block(x, p[0]), p[1]) * x)

    step = jax.value_and_grad(everywhere(scanned, recipe))
    want = jax.jit(jax.value_and_grad(mpx.amp(unrolled, params=0)))(p, x)
    assert_trees_equal(jax.jit(step)(p, x), want)
    assert_trees_equal(step(p, x), want)
    assert np.any(want[1])


# --- inspect --------------------------------------------------------------------------


def two_layers(params, x):
    return jnp.mean(jnp.square(jax.nn.relu(x @ params["a"]) @ params["b"]))


@functools.cache
def two_layer_problem():
    params = {"a": normal(0, 32, 64) / 6, "b": normal(1, 64, 32) / 8}
    return params, normal(2, 48, 32)


def one_layer(params, x):
    return jnp.mean(jnp.square(x @ params["a"]))


def one_layer_problem():
    # One shape: `explain` compiles each operation once a shape.
    return {"a": normal(0, 32, 32) / 6}, normal(2, 32, 32)


def explained(recipe):
    """Returns what `explain` says of `one_layer`, after it found nothing wrong."""
    found = mpx.inspect.explain(everywhere(one_layer, recipe), *one_layer_problem())
    assert found.ok, str(found)
    return found


# --- training -------------------------------------------------------------------------


def assert_training_ends_near_bf16(recipe, share):
    """Trains a student in bf16 and with a recipe.

    Both learn. What is left of the loss differs by less than a share of what it was.
    """
    teacher = {"a": normal(5, 32, 64) / 6, "b": normal(6, 64, 16) / 8}
    start = {"a": normal(7, 32, 64) / 6, "b": normal(8, 64, 16) / 8}
    x = normal(9, 256, 32)
    y = jnp.tanh(x @ teacher["a"]) @ teacher["b"]

    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)

    def trained(func):
        optimizer = optax.adam(1e-2)

        @jax.jit
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(func)(params, x, y)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        return lax.scan(step, (start, optimizer.init(start)), None, length=200)[1]

    bf16, low = trained(mpx.amp(loss)), trained(everywhere(loss, recipe))
    first = float(bf16[0])
    assert float(bf16[-1]) < 0.1 * first
    assert abs(float(low[-1]) - float(bf16[-1])) < share * first
