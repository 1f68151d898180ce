"""With 64-bit numbers enabled, what is given in f32 computes in f32, and all parts work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpx
from mpx._ops._cross_entropy import _operation
from mpx.optim import Compression

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TINY = Compression(min_size=64)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_params(dtype=F32):
    weights = {
        "table": draw(48, 64),
        "up": draw(2, 64, 96, seed=1) / 8,
        "down": draw(2, 96, 64, seed=2) / 10,
        "scale": np.ones((2, 64), np.float32),
        "gate": np.float32(0.5),
    }
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), weights)


def make_words():
    return jnp.asarray(np.random.default_rng(3).integers(0, 48, (4, 16)), jnp.int32)


def hidden_of(params, words):
    def layer(x, p):
        up, down, scale = p
        norm = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale
        scores = jnp.einsum("bqd,bkd->bqk", norm, norm) / 8
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), norm)
        return x + params["gate"] * jax.nn.gelu(mixed @ up) @ down, None

    layers = params["up"], params["down"], params["scale"]
    return lax.scan(layer, params["table"][words], layers)[0]


def loss(params, words):
    logits = hidden_of(params, words) @ params["table"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)
    return -jnp.mean(chosen)


def loss_without_logits(params, words, **options):
    hidden = hidden_of(params, words)
    return mpx.linear_cross_entropy(hidden, params["table"].T, words, **options)


def gradient(func):
    return lambda: jax.jit(jax.value_and_grad(func))(make_params(), make_words())


def delayed():
    func = mpx.fp8(mpx.amp(loss), mpx.recipes.DelayedScaling(), min_gain=0)
    state = func.init(make_params(), make_words())
    return jax.jit(jax.value_and_grad(func, argnums=(0, 1)))(
        state, make_params(), make_words()
    )


def scaled():
    step = mpx.value_and_grad(mpx.amp(loss, "f16"))
    scaling = mpx.DynamicLossScaling.pow2()
    found = jax.jit(step)(scaling, make_params(), make_words())
    return found.value, found.grads, found.finite, found.scaling


def accumulated():
    step = mpx.accumulate(mpx.amp(loss), 2)
    return tuple(jax.jit(step)(mpx.NoLossScaling(), make_params(), make_words()))


def stepped(make, dtype=BF16, **options):
    optimizer, params = make(1e-2, compression=TINY, **options), make_params(dtype)
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(functools.partial(mpx.optimizer_update, optimizer=optimizer))
    for _ in range(2):
        grads = jax.tree.map(lambda x: jnp.sin(7 * x.astype(F32)), params)
        params, state = step(
            params, optimizer_state=state, grads=grads, grads_finite=True
        )
    return params, state


def released():
    optimizer = mpx.optim.flash_adamw(1e-2, compression=TINY)
    step = mpx.optim.release(mpx.amp(loss), optimizer)
    params = make_params(BF16)
    return jax.jit(step)(params, optimizer.init(params), make_words())


def skipped():
    optimizer = mpx.optim.skip_nonfinite(mpx.optim.master_weights(optax.adam(1e-2)))
    params = make_params(BF16)
    state = optimizer.init(params)
    grads = jax.tree.map(lambda x: jnp.sin(7 * x.astype(F32)), params)
    return jax.jit(optimizer.update)(grads, state, params)


def ragged():
    sizes = jnp.asarray([10, 0, 30, 24], jnp.int32)
    experts = {"w": jnp.asarray(draw(4, 64, 32))}
    run = lambda p, x: jnp.mean(lax.ragged_dot(x, p["w"], sizes) ** 2)  # noqa: E731
    return jax.jit(jax.value_and_grad(mpx.amp(run)))(experts, jnp.asarray(draw(64, 64)))


def quantised(recipe):
    return gradient(mpx.fp8(mpx.amp(loss), recipe, min_gain=0))


def observed():
    grads = gradient(mpx.amp(loss))()[1]
    counts = jax.jit(mpx.inspect.exponent_stats)(grads)
    return jax.tree.map(lambda x: x.astype(F32), counts)  # 64 bits count further


CASES = {
    "f32": gradient(loss),
    "amp": gradient(mpx.amp(loss)),
    "int8 residuals": gradient(mpx.amp(loss, residuals="int8")),
    "e4m3 residuals": gradient(mpx.amp(loss, residuals="e4m3")),
    "current": quantised("current"),
    "MXFP8": quantised(mpx.recipes.MXFP8(emulate=True)),
    "delayed": delayed,
    "scaled": scaled,
    "accumulated": accumulated,
    "chunks": gradient(functools.partial(loss_without_logits, chunks=5)),
    "kept chunks": gradient(mpx.amp(functools.partial(loss_without_logits, chunks=5))),
    "ragged": ragged,
    "adamw": lambda: stepped(mpx.optim.flash_adamw),
    "adamw f32": lambda: stepped(mpx.optim.flash_adamw, F32),
    "adamw f16": lambda: stepped(mpx.optim.flash_adamw, F16),
    "lion": lambda: stepped(mpx.optim.flash_lion),
    "sgd": lambda: stepped(mpx.optim.flash_sgd, momentum=0.9, nesterov=True),
    "muon": lambda: stepped(mpx.optim.flash_muon),
    "released": released,
    "skipped": skipped,
    "exponents": observed,
}


@pytest.mark.some(2)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", CASES)
def test_f32_inputs_give_the_same_numbers(name, monkeypatch):
    if name == "kept chunks":  # as on one device
        monkeypatch.setattr(_operation, "_devices", lambda: 1)
    want = CASES[name]()
    with jax.enable_x64(True):
        got = CASES[name]()
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-5, atol=1e-6
        )
