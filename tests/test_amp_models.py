"""`amp` of whole models, from every library, is as exact as one written in bf16."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from jax import lax

import mpx
from models import equations, normal, trace_together
from mpx import AmpRules, amp
from mpx.testing import assert_trees_equal

pytestmark = [
    pytest.mark.standard_promotion,
]

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
BF16 = jnp.bfloat16

bf16 = functools.partial(amp, dtype="bf16")


def key(seed):
    return jax.random.key(seed, impl="unsafe_rbg")


def matmul_dtypes(jaxpr):
    return {
        str(var.aval.dtype)
        for eqn in equations(jaxpr)
        if eqn.primitive.name in MATMULS
        for var in eqn.invars[:2]
    }


IMAGES = normal(0, 4, 6, 6, 3)
TOKENS = normal(1, 4, 6, 16)


class Case(NamedTuple):
    """A model of one library, and how its users write it in bf16.

    Attributes:
        loss: A function of parameters that returns a scalar; all f32.
        params: The parameters.
        by_hand: The same loss as a user of the library writes it in bf16.
    """

    loss: Callable[..., Any]
    params: Any
    by_hand: Callable[..., Any]


def scalar(out):
    out = out.astype(jnp.float32)
    return jnp.sum(out * jnp.sin(jnp.arange(out.size)).reshape(out.shape))


def half(tree):
    return jax.tree.map(
        lambda leaf: leaf.astype(BF16) if eqx.is_inexact_array(leaf) else leaf, tree
    )


# --- Equinox --------------------------------------------------------------------------


def equinox_case(model, forward):
    """A model and its bf16 version with all parameters and inputs cast."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, dtype=jnp.float32):
        return scalar(forward(eqx.combine(params, static), dtype))

    return Case(loss, params, lambda params: loss(half(params), BF16))


class EquinoxCNN(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __call__(self, x, state):
        x = self.conv(x)
        x, state = self.norm(x.astype(jnp.float32), state)
        x = jax.nn.relu(x).mean(axis=(1, 2)).astype(self.head.weight.dtype)
        return self.head(x), state


def equinox_cnn():
    def make(seed):
        k1, k2 = jax.random.split(key(seed))
        return EquinoxCNN(
            eqx.nn.Conv2d(3, 8, 3, key=k1),
            eqx.nn.BatchNorm(8, axis_name="batch", mode="batch"),
            eqx.nn.Linear(8, 4, key=k2),
        )

    model, state = eqx.nn.make_with_state(make)(0)

    def forward(model, dtype):
        images = IMAGES.transpose(0, 3, 1, 2).astype(dtype)
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return run(images, state)[0]

    return equinox_case(model, forward)


def equinox_attention():
    model = eqx.nn.MultiheadAttention(2, 16, key=key(1))

    def forward(model, dtype):
        x = TOKENS[0].astype(dtype)
        return model(x, x, x)

    return equinox_case(model, forward)


def equinox_lstm():
    cell = eqx.nn.LSTMCell(16, 8, key=key(2))

    def forward(cell, dtype):
        def step(carry, x):
            carry = cell(x, carry)
            return carry, carry[0]

        start = (jnp.zeros(8, dtype), jnp.zeros(8, dtype))
        return lax.scan(step, start, TOKENS[0].astype(dtype))[1]

    return equinox_case(cell, forward)


# --- Linen ----------------------------------------------------------------------------


def linen_case(make, x, **variables):
    """A module, and the same module with `dtype=bf16`."""
    params = jax.jit(make(None).init)(key(3), x, **variables)

    def loss(params, dtype=None):
        out = make(dtype).apply(params, x, mutable=["batch_stats"], **variables)[0]
        return scalar(out)

    return Case(loss, params, lambda params: loss(params, BF16))


class LinenCNN(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.GroupNorm(2, dtype=self.dtype)(nn.Conv(8, (3, 3), dtype=self.dtype)(x))
        return nn.Dense(4, dtype=self.dtype)(nn.relu(x).mean(axis=(1, 2)))


class LinenBlock(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(y, y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(16, dtype=self.dtype)(nn.gelu(nn.Dense(16, dtype=self.dtype)(y)))
        return x + y


class LinenStack(nn.Module):
    """Two blocks by `nn.scan`, each under `nn.remat`."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        block = nn.remat(LinenBlock)
        scan = nn.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(block(self.dtype, name="blocks"), x, None)[0]


# --- A GPT whose layers are scanned ---------------------------------------------------


def gpt():
    # Large enough that the errors of two programs can be compared: with a width of 8 their
    # ratio is 0.4 to 2, depending on the draw, with these sizes 0.77 to 1.01.
    width, hidden, layers, length, words = 32, 64, 2, 16, 61
    shapes = {
        "qkv": (width, 3 * width),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    params = {
        name: normal(i, layers, *shape) / shape[0] ** 0.5
        for i, (name, shape) in enumerate(shapes.items(), start=10)
    }
    params["bias"] = 0.1 * normal(13, layers, hidden)
    params = {"layers": params, "embedding": normal(14, words, width)}
    tokens = jnp.arange(4 * length).reshape(4, length) ** 2 * 5 % words

    def norm(x):
        x = x.astype(jnp.float32)
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)

    def block(x, layer):
        dtype = layer["qkv"].dtype
        q, k, v = jnp.split(norm(x).astype(dtype) @ layer["qkv"], 3, axis=-1)
        scores = (q @ k.swapaxes(-1, -2)).astype(jnp.float32) / width**0.5
        scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
        x = x + jax.nn.softmax(scores).astype(dtype) @ v
        hidden = jax.nn.gelu(norm(x).astype(dtype) @ layer["up"] + layer["bias"])
        return x + hidden @ layer["down"], None

    def loss(params):
        x = lax.scan(
            jax.checkpoint(block), params["embedding"][tokens], params["layers"]
        )
        logits = norm(x[0]).astype(params["embedding"].dtype) @ params["embedding"].T
        logits = jax.nn.log_softmax(logits.astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1))

    return Case(loss, params, lambda params: loss(half(params)))


# --- Haiku ----------------------------------------------------------------------------


def haiku_case():
    def forward(x):
        x = hk.LayerNorm(-1, True, True)(hk.Linear(16)(x).astype(jnp.float32))
        return hk.nets.MLP([16, 4])(
            x.astype(hk.get_parameter("as", (), init=jnp.ones).dtype)
        )

    network = hk.without_apply_rng(hk.transform(forward))
    params = jax.jit(network.init)(key(4), TOKENS)

    def loss(params, dtype=jnp.float32):
        return scalar(network.apply(params, TOKENS.astype(dtype)))

    return Case(loss, params, lambda params: loss(half(params), BF16))


CASES = {
    "equinox Conv and BatchNorm": equinox_cnn,
    "equinox MultiheadAttention": equinox_attention,
    "equinox LSTM by scan": equinox_lstm,
    "linen Conv, BatchNorm and GroupNorm": lambda: linen_case(LinenCNN, IMAGES),
    "linen LayerNorm and attention": lambda: linen_case(LinenBlock, TOKENS),
    "linen scan and remat": lambda: linen_case(LinenStack, TOKENS),
    "haiku": haiku_case,
    "gpt": gpt,
}


def total_error(actual, expected):
    """Returns the relative error of a gradient as one long vector."""
    pairs = list(zip(*map(jax.tree.leaves, (actual, expected)), strict=True))

    def flat(leaf):
        return np.asarray(leaf, np.float64).ravel()

    error = np.concatenate([flat(a) - flat(b) for a, b in pairs])
    return np.linalg.norm(error) / np.linalg.norm(
        np.concatenate([flat(b) for _, b in pairs])
    )


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_gradient_under_amp_is_as_exact_as_one_written_in_bf16(name):
    case = CASES[name]()

    def grad(loss):
        return jax.grad(loss, allow_int=True)

    losses = (bf16(case.loss), case.loss, case.by_hand)
    traced, jaxprs = trace_together(map(grad, losses), case.params)
    assert matmul_dtypes(jaxprs[0]) == {"bfloat16"}
    actual, expected, by_hand = traced.lower().compile()(case.params)

    def of(tree):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert of(actual) == of(expected)
    error = total_error(actual, expected)
    assert 0 < error <= 1.1 * total_error(by_hand, expected)


# --- State ----------------------------------------------------------------------------


def test_running_statistics_of_equinox_are_kept_in_f32():
    def make(seed):
        conv = eqx.nn.Conv2d(3, 4, 3, key=key(seed))
        return conv, eqx.nn.BatchNorm(4, axis_name="batch", mode="ema")

    (conv, norm), state = eqx.nn.make_with_state(make)(0)

    def run(model, state, images):
        conv, norm = model

        def call(x, state):
            return norm(conv(x), state)

        return jax.vmap(call, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            images, state
        )

    images = IMAGES.transpose(0, 3, 1, 2)
    out, new = eqx.filter_jit(bf16(run))((conv, norm), state, images)
    plain_out, plain = eqx.filter_jit(run)((conv, norm), state, images)
    assert jax.tree.structure(new) == jax.tree.structure(plain)
    for actual, expected in zip(*map(jax.tree.leaves, (new, plain)), strict=True):
        assert type(actual) is type(expected)
        assert jnp.result_type(actual) == jnp.result_type(expected)
        np.testing.assert_allclose(actual, expected, atol=2.0**-6)
    assert out.dtype == plain_out.dtype == jnp.float32


class NNXModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=key(0))
        self.linear = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(jnp.tanh(self.norm(self.linear(x)))))


def nnx_loss(model, x):
    return scalar(model(x))


def test_nnx_model_keeps_its_statistics_and_dropout_counter():
    under_amp, plain = NNXModel(), NNXModel()
    for _ in range(2):
        value = bf16(nnx_loss)(under_amp, TOKENS)
        expected = nnx_loss(plain, TOKENS)
        assert value.dtype == expected.dtype
    state, wanted = nnx.state(under_amp), nnx.state(plain)
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    assert_trees_equal(state["dropout"], wanted["dropout"])
    assert_trees_equal(state["linear"], wanted["linear"])
    for name in ("mean", "var"):
        statistic = np.asarray(state["norm"][name][...])
        assert statistic.dtype == jnp.float32
        expected = np.asarray(wanted["norm"][name][...])
        np.testing.assert_allclose(statistic, expected, rtol=2.0**-6, atol=2.0**-8)


def test_nnx_gradient_under_jit_runs_low_and_updates_the_statistics():
    under_amp, plain = NNXModel(), NNXModel()

    def step(loss):
        return nnx.jit(nnx.value_and_grad(loss))

    value, grads = step(bf16(nnx_loss))(under_amp, TOKENS)
    wanted, wanted_grads = step(nnx_loss)(plain, TOKENS)
    assert jax.tree.structure(grads) == jax.tree.structure(wanted_grads)
    # Two layers forward and backward, each rounding two operands and a result.
    assert 0 < total_error(grads, wanted_grads) <= 2 * 2 * 3 * 2.0**-8
    mean, start = under_amp.norm.mean[...], NNXModel().norm.mean[...]
    assert not np.array_equal(mean, start)
    graph, state = nnx.split(under_amp)
    jaxpr = jax.make_jaxpr(lambda state, x: bf16(nnx_loss)(nnx.merge(graph, state), x))(
        state, TOKENS
    )
    assert matmul_dtypes(jaxpr) == {"bfloat16"}


def test_nnx_model_as_the_function_keeps_its_statistics_and_dropout_counter():
    under_amp, as_argument = NNXModel(), NNXModel()
    for _ in range(2):
        value = bf16(under_amp)(TOKENS)
        assert_trees_equal(value, bf16(lambda m, x: m(x))(as_argument, TOKENS))
    assert_trees_equal(nnx.state(under_amp), nnx.state(as_argument))
    fresh = NNXModel()
    assert not np.array_equal(under_amp.norm.mean[...], fresh.norm.mean[...])
    assert_trees_equal(nnx.state(under_amp)["linear"], nnx.state(fresh)["linear"])


def test_nnx_model_inside_of_the_function_keeps_its_statistics():
    models = NNXModel(), NNXModel()
    func = jax.tree_util.Partial(lambda pair, x: pair[0](x) + pair[1](x), models)
    bf16(func)(TOKENS)
    for model in models:
        assert not np.array_equal(model.norm.mean[...], NNXModel().norm.mean[...])


def test_parameter_of_an_nnx_model_as_the_function_is_named_by_its_path():
    report = mpx.inspect.report(amp(NNXModel(), "bf16"), TOKENS)
    assert [op.params[-1] for op in report.amp.matmuls] == [
        "linear/kernel",
        "head/kernel",
    ]
    policy = AmpRules(params={"^head/kernel$": "f32"})
    report = mpx.inspect.report(amp(NNXModel(), "bf16", rules=policy), TOKENS)
    assert [op.after for op in report.amp.matmuls] == [("bfloat16",), ("float32",)]


def test_nnx_model_without_state_may_be_used_under_a_jit_that_closes_over_it():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    by_hand = jax.jit(bf16(lambda kernel, x: x @ kernel))(model.kernel[...], TOKENS)
    assert_trees_equal(jax.jit(bf16(model))(TOKENS), by_hand)
    called = jax.jit(lambda x: bf16(lambda m, x: m(x))(model, x))
    assert_trees_equal(called(TOKENS), by_hand)
    assert isinstance(model.kernel[...], jax.Array)
    np.asarray(model.kernel[...])  # no tracer was left in it


def test_nnx_state_that_changes_under_a_jit_that_closes_over_it_is_refused():
    model = NNXModel()
    with pytest.raises(errors.TraceContextError):
        jax.jit(bf16(model))(TOKENS)
