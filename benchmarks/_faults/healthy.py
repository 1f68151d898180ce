"""Healthy models: nothing is to be found in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import mpx
from _faults.table import (
    BF16,
    Case,
    cast,
    cross_entropy,
    given,
    in_low,
    is_healthy,
    linear,
    mlp,
    normal,
    weight,
)


def routes(name, make, *, f16=True):
    """Adds a model under amp in bf16 and f16, fp8 and a policy."""
    variants = {
        "amp_bf16": lambda loss, args: Case(mpx.amp(loss), args),
        "fp8": lambda loss, args: Case(mpx.fp8(loss, min_gain=0), args),
        "policy_bf16": lambda loss, args: Case(in_low(loss, jnp.bfloat16), args),
    }
    if f16:
        scaling = mpx.DynamicLossScaling.pow2(2.0**12)
        variants["amp_f16"] = lambda loss, args: Case(
            mpx.amp(loss, "f16"), args, scaling
        )
        variants["policy_f16"] = lambda loss, args: Case(
            in_low(loss, jnp.float16), args, scaling
        )
    for route, wrap in variants.items():
        case = lambda wrap=wrap: wrap(*make())  # noqa: E731
        case.__name__ = f"{name}_{route}"
        is_healthy(case)


def layer_norm(p, x):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    var = jnp.square(x32 - mean).mean(-1, keepdims=True)
    y = (x32 - mean) * jax.lax.rsqrt(var + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def plain_mlp():
    def loss(params, x, y):
        h = x
        for name in sorted(params)[:-1]:
            h = jax.nn.gelu(linear(params[name], h))
        return cross_entropy(linear(params[sorted(params)[-1]], h), y)

    return loss, (mlp(0, 16, 64, 64, 16), normal(1, 32, 16), jnp.arange(32) % 10)


def deep_relu():
    def loss(params, x, y):
        h, _ = jax.lax.scan(lambda h, p: (h + jax.nn.relu(h @ p), None), x, params["w"])
        return jnp.mean(jnp.square(h[:, 0] - y).astype(jnp.float32))

    return loss, (
        {"w": weight(0, 16, 24, 24, scale=0.2)},
        normal(1, 16, 24),
        normal(2, 16),
    )


def transformer():
    """A causal language model with a bias in its keys: that gradient is exactly zero."""
    size, heads, vocab = 32, 4, 40

    def block(h, p):
        z = layer_norm(p["ln1"], h)
        q, k, v = jnp.split(z @ p["qkv"] + p["qkv_bias"], 3, -1)
        q, k, v = (
            x.reshape(*x.shape[:-1], heads, -1).swapaxes(-2, -3) for x in (q, k, v)
        )
        s = q @ k.swapaxes(-1, -2) / np.sqrt(size // heads)
        mask = jnp.tril(jnp.ones(s.shape[-2:], bool))
        a = jax.nn.softmax(
            jnp.where(mask, s, jnp.finfo(s.dtype).min).astype(jnp.float32)
        )
        a = (a.astype(v.dtype) @ v).swapaxes(-2, -3).reshape(h.shape)
        h = h + a @ p["out"]
        z = layer_norm(p["ln2"], h)
        return h + jax.nn.gelu(z @ p["up"]) @ p["down"], None

    def loss(params, ids):
        h = params["embed"][ids] + params["pos"][: ids.shape[1]]
        h, _ = jax.lax.scan(jax.checkpoint(block), h, params["blocks"])
        logits = layer_norm(params["ln"], h) @ params["embed"].T
        return cross_entropy(logits[:, :-1], ids[:, 1:])

    n = 3
    norm = lambda *shape: {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}  # noqa: E731
    params = {
        "embed": normal(0, vocab, size) * 0.1,
        "pos": normal(1, 20, size) * 0.1,
        "ln": norm(size),
        "blocks": {
            "ln1": norm(n, size),
            "ln2": norm(n, size),
            "qkv": weight(2, n, size, 3 * size),
            "qkv_bias": normal(3, n, 3 * size) * 0.1,
            "out": weight(4, n, size, size),
            "up": weight(5, n, size, 4 * size),
            "down": weight(6, n, 4 * size, size),
        },
    }
    ids = jnp.asarray(np.random.default_rng(7).integers(0, vocab, (4, 16)))
    return loss, (params, ids)


def lstm():
    def loss(params, xs, y):
        def cell(state, x):
            h, c = state
            z = x @ params["wx"] + h @ params["wh"] + params["b"]
            i, f, g, o = jnp.split(z, 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), None

        zero = jnp.zeros((xs.shape[1], 16), xs.dtype)
        (h, _), _ = jax.lax.scan(cell, (zero, zero), xs)
        return cross_entropy(h @ params["head"], y)

    params = {
        "wx": weight(0, 8, 64),
        "wh": weight(1, 16, 64),
        "b": jnp.zeros(64),
        "head": weight(2, 16, 5),
    }
    return loss, (params, normal(3, 24, 8, 8), jnp.arange(8) % 5)


def cnn():
    """Convolutions, batch statistics behind a bias, and max pooling."""

    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params, x, y):
        h = x
        for p in params["convs"]:
            h = conv(h, p["w"]) + p["b"]
            h32 = h.astype(jnp.float32)
            mean, var = h32.mean((0, 1, 2)), h32.var((0, 1, 2))
            h = ((h32 - mean) * jax.lax.rsqrt(var + 1e-5) * p["scale"]).astype(h.dtype)
            h = jax.nn.relu(h)
            n, rows, columns, channels = h.shape
            h = h.reshape(n, rows // 2, 2, columns // 2, 2, channels).max((2, 4))
        return cross_entropy(h.mean((1, 2)) @ params["head"], y)

    convs = [
        {
            "w": normal(i, 3, 3, a, b) * (9 * a) ** -0.5,
            "b": jnp.zeros(b),
            "scale": jnp.ones(b),
        }
        for i, (a, b) in enumerate(((3, 8), (8, 16)))
    ]
    params = {"convs": convs, "head": weight(5, 16, 4)}
    return loss, (params, normal(6, 8, 8, 8, 3), jnp.arange(8) % 4)


routes("mlp", plain_mlp)
routes("deep_relu", deep_relu)
routes("transformer", transformer)
routes("lstm", lstm)
routes("cnn", cnn)


def trained(loss, args, steps=150, rate=0.1):
    """Trains in f32, so that gradients become small."""
    params, *batch = args

    @jax.jit
    def step(params):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    for _ in range(steps):
        params = step(params)
    return (params, *batch)


@is_healthy
def trained_mlp_amp_bf16():
    loss, args = plain_mlp()
    return Case(mpx.amp(loss), trained(loss, args))


@is_healthy
def trained_regression_amp_bf16():
    loss = lambda p, x, y: jnp.mean(jnp.square(x @ p["w"] - y))  # noqa: E731
    x = normal(0, 64, 8)
    y = x @ normal(1, 8, 1) + 0.1 * normal(2, 64, 1)
    return Case(mpx.amp(loss), trained(loss, ({"w": jnp.zeros((8, 1))}, x, y)))


@is_healthy
@given(
    {"qkv": weight(0, 16, 48)},
    normal(1, 2, 12, 16),
    jnp.tril(jnp.ones((12, 12), bool)),
    how=BF16,
)
def masks_of_minus_infinity_bf16(params, x, mask):
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    s = jnp.where(mask, q @ k.swapaxes(-1, -2) / 4, -jnp.inf)
    return jnp.mean(jnp.square(jax.nn.softmax(s) @ v))


@is_healthy
@given({"w": weight(0, 6, 6)}, normal(1, 20, 6))
def log_of_zero_under_where_f32(params, x):
    p = jax.nn.relu(x @ params["w"])
    safe = jnp.where(p > 0, p, 1.0)
    return jnp.mean(jnp.where(p > 0, p * jnp.log(safe), 0.0))


@is_healthy
@given(mlp(0, 8, 16), normal(1, 16, 8), jnp.arange(16), how=mpx.amp)
def sharp_softmax_bf16(params, x, y):
    return cross_entropy(linear(params["layer0"], x) * 20, y)


@is_healthy
def dropout_and_embeddings_bf16():
    def loss(params, ids, key):
        h = params["embed"][ids]
        keep = jax.random.bernoulli(key, 0.8, h.shape)
        h = jnp.where(keep, h / 0.8, 0)
        return jnp.mean(jax.nn.softplus(h @ params["w"]).astype(jnp.float32))

    params = {"embed": normal(0, 50, 16), "w": weight(1, 16, 3)}
    ids = jnp.arange(40).reshape(4, 10) % 50
    return Case(mpx.amp(loss), (params, ids, jax.random.key(0)))


@is_healthy
@given({"w": weight(0, 16, 8)}, normal(1, 16, 16), how=BF16)
def straight_through_estimator_bf16(params, x):
    w = params["w"]
    w = w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w)
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@is_healthy
def equinox_mlp_amp_bf16():
    net = eqx.nn.MLP(12, 4, 32, 3, key=jax.random.key(0))
    loss = lambda m, x, y: cross_entropy(jax.vmap(m)(x), y)  # noqa: E731
    return Case(mpx.amp(loss), (net, normal(1, 16, 12), jnp.arange(16) % 4))


@is_healthy
def equinox_attention_f16():
    net = eqx.nn.MultiheadAttention(4, 32, use_key_bias=True, key=jax.random.key(0))

    def loss(model, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jnp.mean(jnp.square(jax.vmap(lambda z: model(z, z, z, mask))(x)))

    return Case(
        mpx.amp(loss, "f16"), (net, normal(1, 4, 10, 32)), mpx.DynamicLossScaling.pow2()
    )


@is_healthy
def equinox_gru_policy_bf16():
    cell = eqx.nn.GRUCell(8, 16, key=jax.random.key(0))

    def loss(model, xs):
        model, xs = cast(model, jnp.bfloat16), xs.astype(jnp.bfloat16)
        run = lambda x: jax.lax.scan(  # noqa: E731
            lambda h, z: (model(z, h), None), jnp.zeros(16, xs.dtype), x
        )[0]
        return jnp.mean(jnp.square(jax.vmap(run)(xs)).astype(jnp.float32))

    return Case(loss, (cell, normal(1, 4, 12, 8)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


def nnx_case(wrap, **options):
    loss = lambda model, x, y: cross_entropy(model(x), y)  # noqa: E731
    args = (Net(nnx.Rngs(0)), normal(1, 8, 8, 8, 3), jnp.arange(8) % 5)
    return Case(wrap(loss), args, **options)


@is_healthy
def nnx_cnn_amp_bf16():
    return nnx_case(mpx.amp)


@is_healthy
def nnx_cnn_amp_f16():
    return nnx_case(mpx.amp(dtype="f16"), scaling=mpx.DynamicLossScaling.pow2())


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h)
            h = nn.Dense(64)(nn.LayerNorm()(x))
            x = x + nn.Dense(32)(nn.gelu(h))
        return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


def linen_case(wrap, **options):
    model, x = Encoder(), normal(1, 4, 9, 32)
    params = model.init(jax.random.key(0), x)
    loss = lambda p, x, y: cross_entropy(jnp.asarray(model.apply(p, x)), y)  # noqa: E731
    return Case(wrap(loss), (params, x, jnp.arange(4)), **options)


@is_healthy
def linen_vit_amp_bf16():
    return linen_case(mpx.amp)


@is_healthy
def linen_vit_amp_f16():
    return linen_case(mpx.amp(dtype="f16"), scaling=mpx.DynamicLossScaling.pow2())


@is_healthy
def linen_vit_fp8():
    return linen_case(lambda loss: mpx.fp8(loss, min_gain=0))
