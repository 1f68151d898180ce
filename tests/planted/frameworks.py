"""Faults in models of Equinox, Flax and Haiku."""

import importlib.util

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import mpx
from planted.table import BF16, F16, Case, cross_entropy, healthy, normal, planted

X = normal(1, 24, 12)
AMP16 = mpx.amp(dtype="f16")


def mean_square(model, x):
    """Returns the mean square of what a model makes of a batch of examples."""
    return jnp.mean(jnp.square(jax.vmap(model)(x)))


# --- Equinox ----------------------------------------------------------------------------


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear

    def __call__(self, x):
        q, k, v = (jax.vmap(layer)(x) for layer in (self.query, self.key, self.value))
        e = jnp.exp(q @ k.T * 12)  # <- equinox_softmax_without_shift
        return (e / e.sum(-1, keepdims=True)) @ v


@planted("overflow", path="key/weight")
def equinox_softmax_without_shift():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = (eqx.nn.Linear(12, 12, use_bias=False, key=k) for k in keys)
    return Case(F16(mean_square), (Attention(*layers), normal(1, 2, 24, 12) * 2))


class Norm(eqx.Module):
    linear: eqx.nn.Linear
    head: eqx.nn.Linear

    def __call__(self, x):
        x = self.linear(x) + 70
        mean = jnp.mean(x)
        var = jnp.mean(x * x) - mean * mean  # <- equinox_variance
        return self.head((x - mean) * jax.lax.rsqrt(var + 1e-5))[:1]


@planted("cancellation", path="linear")
def equinox_variance():
    sizes = zip(jax.random.split(jax.random.key(0)), ((12, 32), (32, 2)), strict=True)
    net = Norm(*(eqx.nn.Linear(*size, key=key) for key, size in sizes))
    return Case(BF16(mean_square), (net, X))


class Wrapped(eqx.Module):
    net: eqx.nn.MLP

    def __call__(self, x):
        return jnp.tanh(self.net(x) * 1e-5)  # <- equinox_mlp_beyond_f16


@planted("overflow", path="layers/2/weight")
def equinox_mlp_beyond_f16():
    net = eqx.nn.MLP(12, 4, 32, 3, key=jax.random.key(0))
    net = eqx.tree_at(lambda m: m.layers[2].weight, net, replace_fn=lambda w: w * 3e5)
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x))  # noqa: E731
    return Case(AMP16(loss), (Wrapped(net), X), 1.0)


class Growing(eqx.Module):
    cell: eqx.nn.GRUCell
    gain: jax.Array

    def __call__(self, xs):
        def step(h, x):
            h = self.cell(x, h) * self.gain  # <- equinox_growing_gru
            return h, None

        h, _ = jax.lax.scan(step, jnp.ones(8, xs.dtype), xs)
        return jnp.tanh(h.astype(jnp.float32) * 1e-4)


@planted("overflow", path="gain")
def equinox_growing_gru():
    net = Growing(eqx.nn.GRUCell(12, 8, key=jax.random.key(0)), jnp.asarray(9.0))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x))  # noqa: E731
    return Case(F16(loss), (net, normal(1, 3, 30, 12)))


# --- NNX --------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(12, 48, rngs=rngs)
        self.down = nnx.Linear(48, 12, rngs=rngs)

    def __call__(self, x):
        h = self.up(x)
        gate = jnp.exp(h * 6)  # <- nnx_exp_in_a_block
        return x + self.down(h * gate / (1 + gate))


@planted("overflow", path="up")
def nnx_exp_in_a_block():
    rngs = nnx.Rngs(0)
    graph, state = nnx.split(nnx.Sequential(Block(rngs), Block(rngs)))
    loss = lambda s, x: jnp.mean(jnp.square(nnx.merge(graph, s)(x)))  # noqa: E731
    return Case(F16(loss), (state, X * 2))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.Linear(12, 32, rngs=rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.body(x))
        return self.head(h)  # <- nnx_head_beyond_f16


@planted("overflow", path="head/kernel")
def nnx_head_beyond_f16():
    net = Head(nnx.Rngs(0))
    net.head.kernel[...] *= 6e4
    loss = lambda model, x: jnp.mean(jnp.square(model(x) * 1e-5))  # noqa: E731
    return Case(AMP16(loss), (net, X * 2), 1.0)


class Bag(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(50, 8, rngs=rngs)

    def __call__(self, ids):
        def add(total, i):
            row = self.embed.embedding[...][i].astype(total.dtype)
            return total + row, None  # <- nnx_sum_of_embeddings

        return jax.lax.scan(add, jnp.zeros(8, jnp.bfloat16), ids)[0]


@planted("accumulation precision", path="embed")
def nnx_sum_of_embeddings():
    bag = Bag(nnx.Rngs(0))
    bag.embed.embedding[...] = jnp.abs(bag.embed.embedding[...]) + 0.5
    loss = lambda model, ids: jnp.mean(model(ids).astype(jnp.float32)) / ids.size  # noqa: E731
    return Case(loss, (bag, jnp.arange(700) % 50))


# --- Linen ------------------------------------------------------------------------------


def linen_case(model, wrap, args, change=lambda w: w, scaling=None):
    """Makes a case of the mean square of a module, with changed parameters."""
    params = jax.tree.map(change, model.init(jax.random.key(0), *args))
    loss = lambda p, *args: jnp.mean(jnp.square(jnp.asarray(model.apply(p, *args))))  # noqa: E731
    return Case(wrap(loss), (params, *args), scaling)


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        q, k = nn.Dense(12, name="q")(x), nn.Dense(12, name="k")(x)
        scores = q @ k.swapaxes(-1, -2)
        scores = jnp.where(mask, scores, -jnp.inf)  # <- linen_row_masked_completely
        return jax.nn.softmax(scores) @ x


@planted("constant nan", path="LinenAttention")
def linen_row_masked_completely():
    mask = jnp.tril(jnp.ones((24, 24), bool)).at[0].set(False)
    return linen_case(LinenAttention(), mpx.amp, (normal(1, 2, 24, 12), mask))


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="proj", param_dtype=x.dtype, dtype=x.dtype)(x)
        squares = jnp.square(x)  # <- linen_squares_beyond_f16
        return x / jnp.sqrt(squares.mean(-1, keepdims=True) + 1e-3)


@planted("overflow", path="LinenNorm")
def linen_squares_beyond_f16():
    return linen_case(LinenNorm(), F16, (X,), lambda w: w * 500)


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64, name="proj")(x)  # <- linen_library_layer_beyond_f16
        return nn.Dense(2, name="head")(nn.tanh(h))


@planted("overflow", path="proj")
def linen_library_layer_beyond_f16():
    change = lambda w: w * 1e6 if w.shape == (12, 64) else w  # noqa: E731
    return linen_case(LinenHead(), AMP16, (X,), change, 1.0)


# --- Haiku ------------------------------------------------------------------------------

if importlib.util.find_spec("haiku") is not None:
    import haiku as hk

    def haiku_case(forward, wrap, score, *batch, scaling=None):
        """Makes a case of a function that calls Haiku's modules, and of its score."""
        model = hk.without_apply_rng(hk.transform(forward))
        params = model.init(jax.random.key(0), batch[0])
        loss = lambda p, x, *more: score(model.apply(p, x), *more)  # noqa: E731
        return Case(wrap(loss), (params, *batch), scaling)

    @planted("overflow", path="proj")
    def haiku_exp_of_logits():
        def forward(x):
            h = jax.nn.relu(hk.Linear(24, name="proj")(x))
            e = jnp.exp(h * 9)  # <- haiku_exp_of_logits
            return e / (e + 1)

        return haiku_case(forward, F16, jnp.mean, X)

    @planted("overflow", path="head")
    def haiku_gain_under_amp():
        def forward(x):
            h = hk.Linear(24, name="proj")(x)
            with hk.name_scope("scale_layer"):
                h = h * 1e5  # in f32
            out = hk.Linear(2, name="head")(h)  # <- haiku_gain_under_amp
            return jax.nn.sigmoid(out * 1e-6)

        return haiku_case(forward, AMP16, jnp.mean, X, scaling=1.0)

    @healthy()
    def haiku_lstm_amp_bf16():
        def forward(x):
            core = hk.LSTM(16)
            out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
            return hk.Linear(4)(hk.LayerNorm(-1, True, True)(out[-1]))

        batch = normal(1, 10, 6, 8), jnp.arange(6) % 4
        return haiku_case(forward, mpx.amp, cross_entropy, *batch)
