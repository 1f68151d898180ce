"""What `amp` does depends on the function, the types of its arguments and the rules alone.

Programs are drawn from pieces of models. Each is then evaluated, jitted, differentiated,
mapped, given its arguments in another order, and written with other names: decisions and
numbers must be the same.
"""

import functools
import random

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import normal
from mpx import amp
from mpx._program._recording import recorded

D, T = 8, 6


def grid(seed, *shape):
    """Returns numbers whose products and sums of a few are exact in f32, not in bf16."""
    return jnp.round(normal(seed, *shape) * 4) / 4 + 2.0**-9


# --- Pieces of models: from a layer's parameters and an activation to another ---------


def dense(p, x):
    return x @ p["w"] + p["b"]


def gated(p, x):
    return x + p["g"] * dense(p, x)


def activated(p, x):
    return jax.nn.gelu(dense(p, x))


def normed(p, x):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-3) * p["b"]


def attention(p, x):
    q, k = dense(p, x), x @ p["w"].T
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 2.0) @ x


def scanned(p, x):
    stacked = jnp.stack([p["w"], p["w"].T])
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stacked)[0]


def looped(p, x):
    stacked = jnp.stack([p["w"], p["w"].T])
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ stacked[i]), x)


def branched(p, x):
    return lax.cond(p["g"] > 0, lambda: dense(p, x), lambda: x)


def remembered(p, x):
    return jax.checkpoint(activated)(p, x)


def penalised(p, x):
    return x * (1 + jnp.vdot(x, x) * 2.0**-10)


PIECES = (
    dense,
    gated,
    activated,
    normed,
    attention,
    scanned,
    looped,
    branched,
    remembered,
    penalised,
)


def draw(seed, wrap=lambda piece: piece):
    """Returns a loss of a list of layers and an example, and its arguments."""
    drawn = random.Random(seed).choices(PIECES, k=4)
    params = [
        {"w": grid(i, D, D) / 2, "b": grid(i + 50, 1, D), "g": jnp.float32(0.5)}
        for i in range(len(drawn))
    ]

    def loss(params, x):
        for p, piece in zip(params, drawn, strict=True):
            x = wrap(piece)(p, x)
        return jnp.sum(x * grid(90, T, D))

    return loss, params, grid(91 + seed, T, D)


SEEDS = range(6)


def decisions(func, *args):
    """Returns what was decided while a function was traced, operation by operation."""
    with recorded() as recording:
        jax.make_jaxpr(func)(*args)
    return [(x.primitive, x.rule, x.reason, x.after) for x in recording.decisions]


def exactly(func, *args):
    """Runs a function without XLA's freedom to leave out roundings."""
    options = {"xla_allow_excess_precision": False}
    return jax.jit(func).lower(*args).compile(compiler_options=options)(*args)


def assert_same(actual, wanted):
    # Other programs add up f32 numbers in another order. A value that is rounded to 16 bits
    # in one program and not in the other differs by 2^-9.
    np.testing.assert_allclose(actual, wanted, rtol=2.0**-14)


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_value_and_decisions_do_not_depend_on_who_differentiates(seed):
    loss, params, x = draw(seed)
    low = amp(loss)
    wanted = decisions(low, params, x)
    assert wanted
    ways = {
        "jit": (jax.jit(low), lambda out: out),
        "value_and_grad": (jax.value_and_grad(low), lambda out: out[0]),
        "of jit": (jax.value_and_grad(jax.jit(low)), lambda out: out[0]),
        "of the input": (jax.value_and_grad(low, argnums=1), lambda out: out[0]),
        "vjp": (lambda *args: jax.vjp(low, *args)[0], lambda out: out),
        "mpx": (
            lambda *args: mpx.value_and_grad(low)(mpx.NoLossScaling(), *args),
            lambda out: out.value,
        ),
    }
    value = exactly(low, params, x)
    assert not np.isclose(value, loss(params, x), rtol=2.0**-14)  # something is rounded
    for name, (func, value_of) in ways.items():
        forward = decisions(func, params, x)[: len(wanted)]
        assert forward == wanted, name
        assert_same(value_of(exactly(func, params, x)), value)


@pytest.mark.some(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_order_and_kind_of_arguments_do_not_matter(seed):
    loss, params, x = draw(seed)
    wanted = decisions(amp(loss), params, x)

    class Model(eqx.Module):
        layers: list

        def __call__(self, x):
            return loss(self.layers, x)

        def method(self, x):
            return loss(self.layers, x)

    model = Model(params)
    ways = {
        "swapped": (amp(lambda x, params: loss(params, x)), x, params),
        "keywords": (lambda p, x: amp(loss)(x=x, params=p), params, x),
        "module": (amp(lambda m, x: m(x)), model, x),
        "module second": (amp(lambda x, m: m(x)), x, model),
        "as the function": (lambda m, x: amp(m)(x), model, x),
        "method": (lambda m, x: amp(m.method)(x), model, x),
        "partial": (lambda p, x: amp(functools.partial(loss, p))(x), params, x),
        "named": (
            amp(lambda a, b: loss(b["p"], a["x"]), params=1),
            {"x": x},
            {"p": params},
        ),
    }
    for name, (func, *args) in ways.items():
        assert decisions(func, *args) == wanted, name


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_vmap_may_be_inside_or_outside(seed):
    loss, params, _ = draw(seed)
    batch = grid(7 + seed, 3, T, D)

    def inside(params):
        return jnp.sum(amp(jax.vmap(loss, in_axes=(None, 0)))(params, batch))

    def outside(params):
        return jnp.sum(jax.vmap(amp(loss), in_axes=(None, 0))(params, batch))

    actual, wanted = exactly(
        lambda params: (
            jax.value_and_grad(inside)(params),
            jax.value_and_grad(outside)(params),
        ),
        params,
    )
    assert_same(actual[0], wanted[0])
    for got, other in zip(*map(jax.tree.leaves, (actual[1], wanted[1])), strict=True):
        scale = float(jnp.max(jnp.abs(other))) + 1e-6
        # Cotangents are rounded to 16 bits: each example's by itself, or of all.
        np.testing.assert_allclose(got, other, atol=2.0**-7 * scale)


def jitted(piece):
    return jax.jit(piece)


def scoped(piece):
    return jax.named_scope(f"amp_step_head_embedding_{piece.__name__}")(piece)


def renamed(piece):
    def router_classifier_logits(p, x):
        return piece(p, x)

    return router_classifier_logits


@pytest.mark.some(3)
@pytest.mark.parametrize("wrap", [jitted, scoped, renamed])
@pytest.mark.parametrize("seed", SEEDS)
def test_helpers_may_be_jitted_and_named_at_will(seed, wrap):
    loss, params, x = draw(seed)
    other, *_ = draw(seed, wrap)
    plain = jax.value_and_grad(amp(loss))
    helped = jax.value_and_grad(amp(other))
    actual, wanted = exactly(lambda *args: (helped(*args), plain(*args)), params, x)
    # A jitted function is rewritten once for all its calls, and not if all of it is f32.
    rounded = [
        {row for row in decisions(amp(func), params, x) if "bfloat16" in row[-1]}
        for func in (other, loss)
    ]
    assert rounded[0] == rounded[1]
    assert_same(actual[0], wanted[0])


def test_what_ran_before_in_the_process_does_not_matter():
    drawn = [draw(seed) for seed in SEEDS]
    first = [decisions(amp(loss), params, x) for loss, params, x in drawn]
    again = [decisions(amp(loss), params, x) for loss, params, x in reversed(drawn)]
    assert again[::-1] == first


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_parameters_of_16_bits_are_storage(seed, dtype):
    loss, params, x = draw(seed)
    stored = mpx.cast_tree(params, dtype)
    wide = mpx.cast_tree(stored, "f32")
    low = jax.value_and_grad(amp(loss))
    (value, grads), (wanted, exact) = exactly(low, stored, x), exactly(low, wide, x)
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, wanted)
    for got, grad in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert got.dtype == stored[0]["w"].dtype
        np.testing.assert_array_equal(got, grad.astype(got.dtype))
    assert decisions(amp(loss), stored, x) == decisions(amp(loss), wide, x)
