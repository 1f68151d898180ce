"""Unmodified models, in every framework: gradients off by what fp8 rounding explains."""

import functools
import math
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from models import normal
from mpx import fp8
from mpx.recipes import CurrentScaling

WIDTH, TOKENS, CLASSES = 32, 32, 16
X = normal(7, TOKENS, WIDTH)
LABELS = jnp.arange(TOKENS) % CLASSES


def cross_entropy(logits):
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, LABELS[:, None], axis=1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked[:, 0])


# --- the models: a loss, its parameters, and how many matmuls become fp8 ---------------


def equinox_mlp():
    model = eqx.nn.MLP(WIDTH, CLASSES, WIDTH, 2, key=jax.random.key(0))
    return lambda model, x: cross_entropy(jax.vmap(model)(x)), model, 2


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=a)
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=b)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Tower(eqx.Module):
    blocks: Block
    head: eqx.nn.Linear

    def __call__(self, x):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def step(x, block):
            return jax.vmap(eqx.combine(block, static))(x), None

        return jax.vmap(self.head)(lax.scan(step, x, arrays)[0])


def equinox_scan_remat():
    keys = jax.random.split(jax.random.key(0), 2)
    head = eqx.nn.Linear(WIDTH, CLASSES, key=jax.random.key(1))
    model = Tower(eqx.filter_vmap(Block)(keys), head)
    return lambda model, x: cross_entropy(model(x)), model, 2


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.Dense(WIDTH)(jax.nn.silu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES, name="lm_head")(x)


def linen():
    model = LinenModel()
    params = model.init(jax.random.key(0), X)
    return lambda params, x: cross_entropy(model.apply(params, x)), params, 2


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(x + self.down(jax.nn.relu(self.up(x))))


def nnx_module():
    graphdef, params = nnx.split(NnxModel())
    loss = lambda params, x: cross_entropy(nnx.merge(graphdef, params)(x))  # noqa: E731
    return loss, params, 2


def haiku():
    def forward(x):
        x = x + hk.nets.MLP([2 * WIDTH, WIDTH])(x)
        return hk.Linear(CLASSES, name="logits")(x)

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), X)
    return lambda params, x: cross_entropy(model.apply(params, x)), params, 2


def weights(key, *shape):
    return normal(key, *shape) / math.sqrt(shape[-2])


def plain():
    params = {"w1": weights(0, WIDTH, WIDTH), "w2": weights(1, WIDTH, CLASSES)}

    def loss(params, x):
        return cross_entropy(jnp.tanh(x @ params["w1"]) @ params["w2"])

    return loss, params, 1


def experts():
    params = {
        "router": weights(0, WIDTH, 16),
        "experts": weights(1, 4, WIDTH, WIDTH),
        "out": weights(2, WIDTH, CLASSES),
    }

    def loss(params, x):
        best = jnp.argmax(jnp.mean(x @ params["router"], axis=0)) % 4
        branches = [
            lambda x, i=i: jax.nn.gelu(x @ params["experts"][i]) for i in range(4)
        ]
        return cross_entropy((x + lax.switch(best, branches, x)) @ params["out"])

    return loss, params, 4


def tied_embedding():
    params = {"tokens": weights(0, CLASSES, WIDTH) * 4, "w": weights(1, WIDTH, WIDTH)}

    def loss(params, x):
        h = params["tokens"][LABELS[::-1]] + x
        h = h + jnp.tanh(h @ params["w"])
        return cross_entropy(h @ params["tokens"].T)

    return loss, params, 1


MODELS = {
    f.__name__: f
    for f in (
        equinox_mlp,
        equinox_scan_remat,
        linen,
        nnx_module,
        haiku,
        plain,
        experts,
        tied_embedding,
    )
}
# How many matmuls lie one behind the other, forward; as many lie behind backward.
DEPTH = {"equinox_mlp": 3, "equinox_scan_remat": 4}


def expected_error(depth):
    """The relative error of a gradient that rounding to e4m3 and e5m2 explains.

    A number is rounded by at most u = 2**-4 (e4m3) or 2**-3 (e5m2) of itself, evenly
    spread: u/√3 in the mean square. Errors of different numbers are independent, so a
    product of two tensors is off by √(u₁² + u₂²)/√3 relative to Σ|x||w|, which for
    tensors of random signs is the size of the product. A gradient lies behind at most
    `depth` forward and `depth + 1` backward products; their errors add up in squares.
    What a nonlinearity does to them is a factor near 1; 2 is allowed for it.
    """
    forward = (2.0**-4) ** 2 + (2.0**-4) ** 2
    backward = (2.0**-3) ** 2 + (2.0**-4) ** 2
    return 2 * math.sqrt((depth * forward + (depth + 1) * backward) / 3)


def size(arrays):
    return math.sqrt(sum(float(np.sum(np.square(x))) for x in arrays))


def distance(a, b):
    # In NumPy: JAX would compile programs for each shape.
    a, b = (
        [np.float64(x) for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]
        for tree in (a, b)
    )
    return size([x - y for x, y in zip(a, b, strict=True)]) / size(b)


@functools.cache
def prepared(name):
    loss, params, count = MODELS[name]()
    gradient: Any = eqx.filter_jit(eqx.filter_grad(loss))
    return loss, params, count, gradient(params, X)


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", MODELS)
def test_unmodified_model(name):
    loss, params, count, true = prepared(name)
    low = mpx.amp(loss, dtype="bf16")
    f8 = fp8(low, min_gain=0)
    report = mpx.inspect.report(f8, params, X)
    assert len(report.fp8.changed) == count, str(report)

    def gradient(func):
        return eqx.filter_jit(eqx.filter_grad(func))(params, X)

    error, bf16_error = distance(gradient(f8), true), distance(gradient(low), true)
    assert error <= expected_error(DEPTH.get(name, 2))
    # It did happen: bf16 has 16 times the precision of e4m3.
    assert error > 2 * bf16_error


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", ["equinox_scan_remat", "plain"])
def test_rows_of_their_own_are_no_worse(name):
    loss, params, _, true = prepared(name)
    low = mpx.amp(loss, dtype="bf16")
    f8 = fp8(low, CurrentScaling(granularity="row"), min_gain=0)
    error = distance(eqx.filter_jit(eqx.filter_grad(f8))(params, X), true)
    assert error <= expected_error(DEPTH.get(name, 2))


@pytest.mark.standard_promotion
def test_equinox_module_itself_can_be_called():
    model = eqx.nn.MLP(WIDTH, CLASSES, WIDTH, 1, key=jax.random.key(0))
    batched: Any = lambda x: jax.vmap(model)(x)  # noqa: E731
    low = jax.tree.map(lambda x: x.astype("bfloat16") if eqx.is_array(x) else x, model)

    class Batched(eqx.Module):
        inner: eqx.nn.MLP

        def __call__(self, x):
            return jax.vmap(self.inner)(x)

    x = X.astype(jnp.bfloat16)
    report = mpx.inspect.report(fp8(Batched(low), min_gain=0), x)
    assert [m.param for m in report.fp8.changed] == [
        "inner/layers/0/weight",
        "inner/layers/1/weight",
    ]
    out = fp8(Batched(low), min_gain=0)(x)
    assert distance(out.astype(jnp.float32), batched(X)) <= expected_error(2)


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("cast", [mpx.amp, lambda f: f], ids=["amp", "by itself"])
def test_nnx_modules_are_taken_apart_and_updated_once(cast):
    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(WIDTH, CLASSES, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.linear(self.norm(x))) @ jnp.eye(CLASSES)

    model = Net()
    before = np.asarray(model.norm.mean[...])
    loss = fp8(cast(lambda model, x: cross_entropy(model(x))), min_gain=0)
    report = mpx.inspect.report(loss, model, X)
    assert [m.param for m in report.fp8.changed] == ["model/linear/kernel"]
    assert np.array_equal(before, model.norm.mean[...])
    loss(model, X)
    plain = Net()
    plain(X)
    assert not np.array_equal(before, plain.norm.mean[...])
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-6)
    assert bool(mpx.value_and_grad(loss)(mpx.NoLossScaling(), model, X).finite)
