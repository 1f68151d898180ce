"""Residuals by which a derivative divides: their small numbers are kept as exactly as large."""

import jax
import jax.numpy as jnp
import pytest

import mpx

N = 256  # so that blocks lie along the last axis, also on eight devices
X = jax.random.normal(jax.random.key(0), (128, N))
# Outputs from 1e-4 to 10, in one block.
SCALES = 10.0 ** jax.random.uniform(jax.random.key(2), (1, N), minval=-4, maxval=1)
PARAMS = {"w": jax.random.normal(jax.random.key(1), (N, N)) / 16}


def positive(p, x):
    return jnp.abs(x) @ (jnp.abs(p["w"]) * SCALES)


def dot(x, w):
    return jnp.dot(x, w, precision="highest")


def near_a_pole(p, x):
    """Numbers up to 1.5, of which bf16 cannot say how far they are from a half of pi."""
    return dot(jnp.abs(jnp.sin(x)), 1.5 * jnp.eye(N) + 1e-3 * p["w"])


def near_one(p, x):
    return 0.999 * jnp.sin(jnp.dot(x, p["w"], precision="highest"))


def root_of_a_square(p, x):
    error = x @ p["w"] - x
    return jnp.sqrt(error * error + 1e-6)


def unit_vectors(p, x):
    a, b = jnp.split(x @ p["w"], 2, axis=1)
    return jnp.abs(a) / jnp.sqrt(a * a + b * b + 1e-6)


def entropy(p, x):
    weights = jax.nn.softmax(4 * x @ p["w"])
    weights = weights @ (jnp.eye(N) * 0.99 + 0.01 / N)
    return weights * jnp.log(weights)


def in_a_scan(p, x):
    def body(carry, row):
        return carry + 1 / positive(p, row), None

    return jax.lax.scan(body, jnp.zeros((32, N)), x.reshape(4, 32, N))[0]


def others(p, x):
    return jnp.abs(x) @ (p["w"] ** 2 * SCALES)


def batch_norm(p, x):
    h = positive(p, x)
    centred = h - h.mean(0, keepdims=True)
    return (centred * jax.lax.rsqrt(h.var(0, keepdims=True) + 1e-12)) ** 3


CASES = {
    "log": lambda p, x: jnp.log(positive(p, x)),
    "inverse": lambda p, x: 1 / positive(p, x),
    "power of -1": lambda p, x: (1e-3 + positive(p, x)) ** -1,
    "ratio": lambda p, x: positive(p, x) / others(p, x),
    "times an inverse": lambda p, x: positive(p, x) * (1 / others(p, x)),
    "times a power": lambda p, x: positive(p, x) * others(p, x) ** -1.0,
    "times a root": lambda p, x: positive(p, x) * jax.lax.rsqrt(others(p, x)),
    "norm of columns": batch_norm,
    "root": lambda p, x: jnp.sqrt(positive(p, x)),
    "inverse root": lambda p, x: jax.lax.rsqrt(positive(p, x)),
    "cube root": lambda p, x: jnp.cbrt(positive(p, x)),
    "arctanh": lambda p, x: jnp.arctanh(near_one(p, x)) + x @ p["w"],
    "log1p": lambda p, x: jnp.log1p(near_one(p, x)) + x @ p["w"],
    "inverse of a square": lambda p, x: 1 / ((x @ p["w"]) ** 2 + 1e-2),
    "in remat": jax.checkpoint(lambda p, x: jnp.log(positive(p, x))),
    "remat of the rest": lambda p, x: jax.checkpoint(jnp.log)(positive(p, x)),
    "root of a square": root_of_a_square,
    "unit vectors": unit_vectors,
    "entropy": entropy,
    "in a scan": in_a_scan,
    "cosine": lambda p, x: jnp.log(jnp.cos(near_a_pole(p, x))) + 1e-4 * (x @ p["w"]),
}


ERRORS = {"int8": 2.0**-8, "e4m3": 2.0**-4}
WITH_E4M3 = "log", "ratio", "norm of columns", "in a scan"


@pytest.mark.parametrize(
    ("name", "form"),
    [*((x, "int8") for x in CASES), *((x, "e4m3") for x in WITH_E4M3)],
)
def test_codes_change_gradients_by_a_rounding(name, form):
    def loss(p, x):
        return jnp.mean(CASES[name](p, x))

    exact, low, coded = (
        jax.jit(jax.grad(f, argnums=(0, 1)))(PARAMS, X)
        for f in (loss, mpx.amp(loss), mpx.amp(loss, residuals=form))
    )
    for e, a, c in zip(*map(jax.tree.leaves, (exact, low, coded)), strict=True):
        size = jnp.linalg.norm(e)
        rounding = 1.5 * jnp.linalg.norm(a - e) / size
        assert jnp.linalg.norm(c - e) / size < rounding + ERRORS[form]
