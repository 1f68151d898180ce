"""Optimizers, models and gradients for the tests of `optimizer_update`."""

import functools

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpx
from mpx.testing import assert_trees_equal

# For tests that round parameters to 16 bits on purpose.
rounds_updates = pytest.mark.filterwarnings("ignore:.*keeps no master weights")


# --- One table of optimizers: a new row inherits every test that takes `name` ---------


def decay_mask(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", tree)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, mask=decay_mask),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "clip and schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.2, 3)),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.2, 3)
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), 2
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), decay_mask),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}, labels
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
}


@functools.cache  # one object for all tests, so that each is compiled once
def optimizer_and_extras(name):
    extras = {"value": jnp.float32(1.5)} if "plateau" in name else {}
    return OPTIMIZERS[name](), extras


class Model(eqx.Module):
    """Everything that a model may hold besides floating arrays."""

    weight: jax.Array
    bias: jax.Array
    table: jax.Array
    key: jax.Array
    activation: object
    rate: float
    name: str
    nothing: None

    def __init__(self, dtype=jnp.float32):
        random = np.random.default_rng(0)
        self.weight = jnp.array(random.normal(size=(4, 3)), dtype)
        self.bias = jnp.array(random.normal(size=3), dtype)
        self.table = jnp.arange(3)
        self.key = jax.random.key(0)
        self.activation = jax.nn.relu
        self.rate = 0.1
        self.name = "model"
        self.nothing = None


MODELS = {
    "equinox": Model,
    "dict": lambda: {"w": Model().weight, "layers": [{"b": Model().bias}]},
}


def trainable(model):
    return eqx.filter(model, eqx.is_inexact_array)


def gradients(model, step):
    """Returns f32 gradients with few bits, none of them zero: times 1/8 is exact."""
    random = np.random.default_rng(step)

    def draw(leaf):
        sign = random.choice([-1, 1], leaf.shape)
        return jnp.array(sign * random.integers(1, 64, leaf.shape) / 32, jnp.float32)

    return jax.tree.map(draw, trainable(model))


def plain(model, optimizer, state, grads, **extras):
    """What a user writes who has never heard of mpx."""
    updates, state = optimizer.update(grads, state, trainable(model), **extras)
    return eqx.apply_updates(model, updates), state


def assert_close(tree, expected):
    """Compares two compilations of the same step; everything but floats exactly.

    The compiler fuses products with sums, so that one of the some ten roundings on the
    way to a parameter is left out here and there; all numbers are below 4.
    """
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        if not eqx.is_inexact_array(one):
            assert_trees_equal(one, other)
            continue
        assert one.dtype == other.dtype
        x, y = np.asarray(one, "f8"), np.asarray(other, "f8")
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        difference = np.abs(x[finite] - y[finite])
        assert np.all(difference <= 10 * float(jnp.finfo(one.dtype).eps))


update = eqx.filter_jit(mpx.optimizer_update)


@eqx.filter_jit
def all_ways(model, optimizer, state, grads, finite, extras):
    """Returns the steps of plain optax and of mpx from one compilation."""
    args = model, optimizer, state, grads
    return plain(*args, **extras), mpx.optimizer_update(*args, finite, **extras)


def momentum_case():
    """Returns parameters, optimizer, state and gradients."""
    params = MODELS["dict"]()
    optimizer, _ = optimizer_and_extras("sgd")
    return params, optimizer, optimizer.init(params), gradients(params, 0)


# --- Flax -----------------------------------------------------------------------------


class Network(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full((4, 3), 2.0))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.calls = nnx.Variable(jnp.array(3))


def make_nnx(tx):
    model = Network()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


class StateWithStatistics(TrainState):
    batch_stats: dict


def make_train_state(dtype):
    module = flax.linen.Dense(3)
    params = {"kernel": jnp.ones((4, 3), dtype), "bias": jnp.ones(3, dtype)}
    return StateWithStatistics.create(
        apply_fn=module.apply,
        params=params,
        tx=optax.sgd(0.125, momentum=0.5),
        batch_stats={"mean": jnp.zeros(3)},
    )
