"""Faults in models of Equinox, Flax and Haiku."""

import importlib.util
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import mpx
from _faults.table import BF16, Case, normal, planted

X = normal(1, 24, 12)
AMP16 = mpx.amp(dtype="f16")


# --- Equinox ----------------------------------------------------------------------------


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
    loss = lambda net, x: jnp.mean(jnp.square(jax.vmap(net)(x)))  # noqa: E731
    return Case(BF16(loss), (net, X))


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


# --- NNX --------------------------------------------------------------------------------


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


# --- Linen ------------------------------------------------------------------------------


class LinenHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(64, name="proj")(x)  # <- linen_library_layer_beyond_f16
        return nn.Dense(2, name="head")(nn.tanh(h))


@planted("overflow", path="proj")
def linen_library_layer_beyond_f16():
    change = lambda w: w * 1e6 if w.shape == (12, 64) else w  # noqa: E731
    made: Any = LinenHead()
    params = jax.tree.map(change, made.init(jax.random.key(0), X))
    loss = lambda p, x: jnp.mean(jnp.square(made.apply(p, x)))  # noqa: E731
    return Case(AMP16(loss), (params, X), 1.0)


# --- Haiku ------------------------------------------------------------------------------

if importlib.util.find_spec("haiku") is not None:
    import haiku as hk

    @planted("overflow", path="head")
    def haiku_gain_under_amp():
        def forward(x):
            h = hk.Linear(24, name="proj")(x)
            with hk.name_scope("scale_layer"):
                h = h * 1e5  # in f32
            out = hk.Linear(2, name="head")(h)  # <- haiku_gain_under_amp
            return jax.nn.sigmoid(out * 1e-6)

        model = hk.without_apply_rng(hk.transform(forward))
        loss = lambda p, x: jnp.mean(model.apply(p, x))  # noqa: E731
        return Case(AMP16(loss), (model.init(jax.random.key(0), X), X), 1.0)
