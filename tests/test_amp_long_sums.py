"""Sums that are written as additions are made in f32 under `amp`, and counts are exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import equations, normal, store, stored

N, D = 64, 8
X, W = normal(0, N, 16), normal(1, 16, D) / 4
LABELS = jnp.arange(1500) % 3


def low(w, x):
    return jnp.abs(x @ w)


def tree(h):
    while len(h) > 1:
        h = h[::2] + h[1::2]
    return h[0]


def scanned(h):
    return lax.associative_scan(jnp.add, h, axis=0)[-1]


def average(h, start=0.0):
    for row in h:
        start = 0.998 * start + 0.002 * row
    return start


def towards(h):
    mean = h[0]
    for row in h[1:]:
        mean = mean - (mean - row) / 500
    return mean


def faded(h):
    for _ in range(N):
        h = h * 0.998
    return h


def of_layers(h):
    total = jnp.zeros(D)
    for i in range(0, N, 2):
        total = total + 0.37 * jnp.abs(h[i : i + 2]).reshape(-1, D)[0]
    return -total


SUMS = {
    "tree": tree,
    "scan": scanned,
    "average": lambda h: average(h, h[0]),
    "towards": towards,
    "faded": faded,
    "layers": of_layers,
    "python": lambda h: sum(h),
}


@pytest.mark.some(2)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16:RuntimeWarning")
def test_a_sum_of_many_additions_is_rounded_once(name, dtype):
    # Both sum the same numbers, which 16 bits hold.
    w, x = jnp.round(16 * W) / 16, jnp.round(4 * X) / 4
    as_16_bits = functools.partial(
        lax.reduce_precision, exponent_bits=8, mantissa_bits=7
    )
    mark = {"bf16": mpx.amp_low, "f16": mpx.amp_low, None: as_16_bits}

    def loss(w, x, dtype=None):
        return jnp.sum(SUMS[name](mark[dtype](low(w, x))))

    value, grad = jax.value_and_grad(mpx.amp(loss, dtype))(w, x, dtype)
    wanted, slope = jax.value_and_grad(loss)(w, x)
    np.testing.assert_allclose(value, wanted, rtol=2.0**-9)
    # Cotangents are rounded once, and so are the terms of the product.
    assert jnp.linalg.norm(grad - slope) < 2.0**-7 * jnp.linalg.norm(slope)


def test_terms_may_be_computed_from_numbers_alone():
    def loss(w, x):
        h = low(w, x)
        for i in range(12):
            h = h * 0.998 + 0.002 * jnp.float32(i)
        return jnp.sum(h)

    np.testing.assert_allclose(mpx.amp(loss)(W, X), loss(W, X), rtol=2e-3)


def test_a_unit_vector_has_length_one():
    def lengths(w, x):
        h = (x @ w)[:, :2]
        norm = jnp.sqrt(jnp.sum(h * h, axis=-1, keepdims=True))
        return jnp.sum(jnp.square(h / norm), axis=-1)

    np.testing.assert_allclose(mpx.amp(lengths)(W, X), 1, rtol=1e-6)


def test_a_sum_of_products_keeps_operands_of_16_bits():
    total = mpx.amp(lambda w: jnp.sum((X @ w) * jnp.tanh(X @ w)))
    kept = jax.tree.leaves(jax.linearize(total, W)[1])
    assert {str(x.dtype) for x in kept if x.shape == (N, D)} == {"bfloat16"}


def stream(w, x):
    x = mpx.amp_low(x)
    for _ in range(10):
        x = store(x + jnp.tanh(x @ w) @ w + x @ w)
    return x


def test_a_residual_stream_stays_in_16_bits():
    traced = jax.make_jaxpr(mpx.amp(stream))(jnp.eye(16), X)
    assert stored(traced) == 10 * ["bfloat16"]


def lower(n):
    return jnp.tril(jnp.ones((n, n)))


def one_hot(labels):
    return jax.nn.one_hot(labels, 3)


COUNTS = {
    "positions": lambda labels: lower(1500) @ one_hot(labels),
    "positions of some": lambda labels: (
        lower(1500) @ (one_hot(labels) * (labels > 0).astype(jnp.float32)[:, None])
    ),
    "rows of a unit matrix": lambda labels: lower(1500) @ jnp.eye(3)[labels],
    "where": lambda labels: (
        lower(1500) @ jnp.where(labels[:, None] == jnp.arange(3), 1.0, 0.0)
    ),
    "pairs": lambda labels: one_hot(labels).T @ one_hot(jnp.minimum(labels, 1)),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", COUNTS)
def test_products_of_masks_count(name):
    counts = mpx.amp(lambda labels: COUNTS[name](labels - 1))(LABELS + 1)
    np.testing.assert_array_equal(counts, COUNTS[name](LABELS))


def test_a_product_of_a_mask_and_data_runs_low():
    pick = lambda x, labels: one_hot(labels[:N]).T @ x  # noqa: E731
    (dot,) = [
        x
        for x in equations(jax.make_jaxpr(mpx.amp(pick))(X, LABELS))
        if x.primitive.name == "dot_general"
    ]
    assert dot.outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_sum_over_the_examples_of_a_vmap_is_f32_on_either_side(is_inside):
    def mean(x):
        return lax.pmean(mpx.amp_low(x), "examples")

    map_ = functools.partial(jax.vmap, axis_name="examples")
    x = jnp.round(64 + X)
    found = map_(mpx.amp(mean))(x) if is_inside else mpx.amp(map_(mean))(x)
    np.testing.assert_allclose(found, map_(mean)(x), rtol=1e-6)
