"""Healthy models: nothing is to be found in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import mpx
from planted.table import (
    BF16,
    F16,
    HEALTHY,
    Case,
    cast,
    cross_entropy,
    healthy,
    linear,
    mlp,
    normal,
    weight,
)
from scripts import script

make_task = script("_models").make_task
AMP16 = mpx.amp(dtype="f16")


def fp8(loss):
    return mpx.fp8(loss, min_gain=0)


# --- every model on every route ---------------------------------------------------------

# By route: how the loss is wrapped, and the first loss scale.
ROUTES = {
    "amp_bf16": (mpx.amp, None),
    "fp8": (fp8, None),
    "policy_bf16": (BF16, None),
    "amp_f16": (AMP16, 2.0**12),
    "policy_f16": (F16, 2.0**12),
}


def routes(*names):
    """Adds a model on some routes, or on all of them."""

    def add(make):
        for name in names or ROUTES:

            def case(wrap=ROUTES[name][0], scale=ROUTES[name][1]):
                loss, args = make()
                scaling = None if scale is None else mpx.DynamicLossScaling.pow2(scale)
                return Case(wrap(loss), args, scaling)

            HEALTHY[f"{make.__name__.removeprefix('plain_')}_{name}"] = case
        return make

    return add


@routes()
def plain_mlp():
    def loss(params, x, y):
        *layers, head = (params[name] for name in sorted(params))
        for layer in layers:
            x = jax.nn.gelu(linear(layer, x))
        return cross_entropy(linear(head, x), y)

    return loss, (mlp(0, 16, 64, 64, 16), normal(1, 32, 16), jnp.arange(32) % 10)


@routes()
def deep_relu():
    def loss(params, x, y):
        h, _ = jax.lax.scan(lambda h, p: (h + jax.nn.relu(h @ p), None), x, params["w"])
        return jnp.mean(jnp.square(h[:, 0] - y).astype(jnp.float32))

    params = {"w": weight(0, 16, 24, 24, scale=0.2)}
    return loss, (params, normal(1, 16, 24), normal(2, 16))


@routes()
def transformer():
    task = make_task("tiny-gpt", 4, batches=1)
    return task.loss, (task.params, task.batches[0])


def of_linen(model, x, classes):
    """Returns the cross entropy of a module of Linen, and its arguments."""
    params = {"params": model.init(jax.random.key(0), x)["params"]}

    def loss(params, x, y):
        out = model.apply(params, x, mutable=["batch_stats"])[0]
        return cross_entropy(jnp.asarray(out), y)

    return loss, (params, x, jnp.arange(len(x)) % classes)


@routes()
def lstm():
    layers = [nn.RNN(nn.OptimizedLSTMCell(16)), lambda h: h[:, -1], nn.Dense(5)]
    return of_linen(nn.Sequential(layers), normal(3, 8, 24, 8), 5)


class Convolutions(nn.Module):
    """Convolutions, batch statistics behind a bias, and max pooling."""

    @nn.compact
    def __call__(self, x):
        for channels in (8, 16):
            x = nn.BatchNorm(use_running_average=False)(nn.Conv(channels, (3, 3))(x))
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(4, use_bias=False)(x.mean((1, 2)))


@routes()
def cnn():
    return of_linen(Convolutions(), normal(6, 8, 8, 8, 3), 4)


# --- single models ----------------------------------------------------------------------


def trained(loss, args, steps=150, rate=0.1):
    """Trains in f32, so that gradients become small."""
    params, *batch = args

    @jax.jit
    def step(params):
        grads = jax.grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    for _ in range(steps):
        params = step(params)
    return Case(mpx.amp(loss), (params, *batch))


@healthy()
def trained_mlp_amp_bf16():
    return trained(*plain_mlp())


@healthy()
def trained_regression_amp_bf16():
    loss = lambda p, x, y: jnp.mean(jnp.square(x @ p["w"] - y))  # noqa: E731
    x = normal(0, 64, 8)
    y = x @ normal(1, 8, 1) + 0.1 * normal(2, 64, 1)
    return trained(loss, ({"w": jnp.zeros((8, 1))}, x, y))


@healthy({"qkv": weight(0, 16, 48)}, normal(1, 2, 12, 16), how=BF16)
def masks_of_minus_infinity_bf16(params, x):
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    mask = jnp.tril(jnp.ones((12, 12), bool))
    s = jnp.where(mask, q @ k.swapaxes(-1, -2) / 4, -jnp.inf)
    return jnp.mean(jnp.square(jax.nn.softmax(s) @ v))


@healthy({"w": weight(0, 6, 6)}, normal(1, 20, 6))
def log_of_zero_under_where_f32(params, x):
    p = jax.nn.relu(x @ params["w"])
    safe = jnp.where(p > 0, p, 1.0)
    return jnp.mean(jnp.where(p > 0, p * jnp.log(safe), 0.0))


@healthy(mlp(0, 8, 16), normal(1, 16, 8), jnp.arange(16), how=mpx.amp)
def sharp_softmax_bf16(params, x, y):
    return cross_entropy(linear(params["layer0"], x) * 20, y)


TABLE = {"embed": normal(0, 50, 16), "w": weight(1, 16, 3)}


@healthy(TABLE, jnp.arange(40).reshape(4, 10), jax.random.key(0), how=mpx.amp)
def dropout_and_embeddings_bf16(params, ids, key):
    h = params["embed"][ids]
    h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0)
    return jnp.mean(jax.nn.softplus(h @ params["w"]).astype(jnp.float32))


@healthy({"w": weight(0, 16, 8)}, normal(1, 16, 16), how=BF16)
def straight_through_estimator_bf16(params, x):
    w = params["w"]
    w = w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w)
    return jnp.mean(jnp.square(jnp.tanh(x @ w)))


@routes("amp_bf16")
def equinox_mlp():
    net = eqx.nn.MLP(12, 4, 32, 3, key=jax.random.key(0))
    loss = lambda m, x, y: cross_entropy(jax.vmap(m)(x), y)  # noqa: E731
    return loss, (net, normal(1, 16, 12), jnp.arange(16) % 4)


@healthy()
def equinox_attention_f16():
    """With a bias in its keys, whose gradient is exactly zero."""
    net = eqx.nn.MultiheadAttention(4, 32, use_key_bias=True, key=jax.random.key(0))

    def loss(model, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jnp.mean(jnp.square(jax.vmap(lambda z: model(z, z, z, mask))(x)))

    args = net, normal(1, 4, 10, 32)
    return Case(AMP16(loss), args, mpx.DynamicLossScaling.pow2())


@healthy()
def equinox_gru_policy_bf16():
    def loss(model, xs):
        model, xs = cast((model, xs), jnp.bfloat16)
        step = lambda h, z: (model(z, h), None)  # noqa: E731
        run = lambda x: jax.lax.scan(step, jnp.zeros(16, x.dtype), x)[0]  # noqa: E731
        return jnp.mean(jnp.square(jax.vmap(run)(xs)).astype(jnp.float32))

    cell = eqx.nn.GRUCell(8, 16, key=jax.random.key(0))
    return Case(loss, (cell, normal(1, 4, 12, 8)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(x.mean((1, 2)))


@routes("amp_bf16", "amp_f16")
def nnx_cnn():
    loss = lambda model, x, y: cross_entropy(model(x), y)  # noqa: E731
    return loss, (Net(nnx.Rngs(0)), normal(1, 8, 8, 8, 3), jnp.arange(8) % 5)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h)
            h = nn.Dense(64)(nn.LayerNorm()(x))
            x = x + nn.Dense(32)(nn.gelu(h))
        return nn.Dense(5)(nn.LayerNorm()(x).mean(1))


@routes("amp_bf16", "amp_f16", "fp8")
def linen_vit():
    return of_linen(Encoder(), normal(1, 4, 9, 32), 5)
