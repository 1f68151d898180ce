"""Faults in models of Equinox, Flax and Haiku."""

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import mpx
from _faults.table import Case, cast, normal, planted

X = (24, 12)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, size, key):
        keys = jax.random.split(key, 3)
        self.query, self.key, self.value = (
            eqx.nn.Linear(size, size, use_bias=False, key=k) for k in keys
        )

    def __call__(self, x):
        q, k, v = (jax.vmap(layer)(x) for layer in (self.query, self.key, self.value))
        e = jnp.exp(q @ k.T * 12)  # <- equinox_softmax_without_shift
        return (e / e.sum(-1, keepdims=True)) @ v


@planted("key/weight", "overflow")
def equinox_softmax_without_shift():
    def loss(model, x):
        return jnp.mean(jnp.square(jax.vmap(model)(x))).astype(jnp.float32)

    model = cast(Attention(12, jax.random.key(0)), jnp.float16)
    return Case(loss, (model, normal(1, 2, *X).astype(jnp.float16) * 2))


class Norm(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        mean = jnp.mean(x)
        var = jnp.mean(x * x) - mean * mean  # <- equinox_variance
        return (x - mean) * jax.lax.rsqrt(var + 1e-5) * self.weight


@planted("linear", "cancellation")
def equinox_variance():
    class Net(eqx.Module):
        linear: eqx.nn.Linear
        norm: Norm
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(self.norm(self.linear(x) + 70))

    keys = jax.random.split(jax.random.key(0))
    net = Net(
        eqx.nn.Linear(12, 32, key=keys[0]),
        Norm(jnp.ones(32)),
        eqx.nn.Linear(32, 2, key=keys[1]),
    )

    def loss(model, x):
        return jnp.mean(
            jax.vmap(cast(model, "bfloat16"))(x.astype("bfloat16"))[:, 0] ** 2
        ).astype("float32")

    return Case(loss, (net, normal(1, *X)))


@planted("layers/2/weight", "overflow")
def equinox_mlp_beyond_f16():
    net = eqx.nn.MLP(12, 4, 32, 3, key=jax.random.key(0))
    net = eqx.tree_at(lambda m: m.layers[2].weight, net, replace_fn=lambda w: w * 3e5)

    class Wrapped(eqx.Module):
        net: eqx.nn.MLP

        def __call__(self, x):
            return self.net(x)  # <- equinox_mlp_beyond_f16

    def loss(model, x):
        return jnp.mean(jnp.tanh(jax.vmap(model)(x) * 1e-5))

    return Case(mpx.amp(loss, "f16"), (Wrapped(net), normal(1, *X)), 1.0)


@planted("gain", "overflow")
def equinox_growing_gru():
    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        gain: jax.Array

        def __call__(self, xs):
            def step(h, x):
                h = self.cell(x, h) * self.gain  # <- equinox_growing_gru
                return h, None

            return jax.lax.scan(step, jnp.ones(8, xs.dtype), xs)[0]

    net = Net(eqx.nn.GRUCell(12, 8, key=jax.random.key(0)), jnp.asarray(9.0))

    def loss(model, x):
        out = jax.vmap(cast(model, "float16"))(x.astype("float16"))
        return jnp.mean(jnp.tanh(out.astype(jnp.float32) * 1e-4))

    return Case(loss, (net, normal(1, 3, 30, 12)))


class Block(nnx.Module):
    def __init__(self, size, rngs):
        self.up = nnx.Linear(size, 4 * size, rngs=rngs)
        self.down = nnx.Linear(4 * size, size, rngs=rngs)

    def __call__(self, x):
        h = self.up(x)
        gate = jnp.exp(h * 6)  # <- nnx_exp_in_a_block
        return x + self.down(h * gate / (1 + gate))


@planted("up", "overflow")
def nnx_exp_in_a_block():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(12, rngs) for _ in range(2)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    net = Net(nnx.Rngs(0))
    graph, state = nnx.split(net)

    def loss(state, x):
        model = nnx.merge(graph, cast(state, jnp.float16))
        return jnp.mean(jnp.square(model(x.astype(jnp.float16)))).astype(jnp.float32)

    return Case(loss, (state, normal(1, *X) * 2))


@planted("head/kernel", "overflow")
def nnx_head_beyond_f16():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(12, 32, rngs=rngs)
            self.head = nnx.Linear(32, 4, rngs=rngs)

        def __call__(self, x):
            h = nnx.relu(self.body(x))
            return self.head(h)  # <- nnx_head_beyond_f16

    net = Net(nnx.Rngs(0))
    net.head.kernel[...] *= 6e4

    def loss(model, x):
        return jnp.mean(jnp.square(model(x) * 1e-5))

    return Case(mpx.amp(loss, "f16"), (net, normal(1, *X) * 2), 1.0)


@planted("embed", "accumulation", "precision")
def nnx_sum_of_embeddings():
    class Bag(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(50, 8, rngs=rngs)

        def __call__(self, ids):
            def add(total, i):
                row = self.embed.embedding[...][i].astype(total.dtype)
                return total + row, None  # <- nnx_sum_of_embeddings

            return jax.lax.scan(add, jnp.zeros(8, jnp.bfloat16), ids)[0]

    bag = Bag(nnx.Rngs(0))
    bag.embed.embedding[...] = jnp.abs(bag.embed.embedding[...]) + 0.5

    def loss(model, ids):
        return jnp.mean(model(ids).astype(jnp.float32)) / ids.size

    return Case(loss, (bag, jnp.arange(700) % 50))


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        q, k = nn.Dense(12, name="q")(x), nn.Dense(12, name="k")(x)
        scores = q @ k.swapaxes(-1, -2)
        scores = jnp.where(mask, scores, -jnp.inf)  # <- linen_row_masked_completely
        return jax.nn.softmax(scores) @ x


@planted("LinenAttention", "constant", "nan")
def linen_row_masked_completely():
    model = LinenAttention()
    x, mask = normal(1, 2, *X), jnp.tril(jnp.ones((24, 24), bool)).at[0].set(False)
    params = model.init(jax.random.key(0), x, mask | True)

    def loss(params, x, mask):
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x, mask))))

    return Case(mpx.amp(loss), (params, x, mask))


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="proj", param_dtype=x.dtype, dtype=x.dtype)(x)
        squares = jnp.square(x)  # <- linen_squares_beyond_f16
        return x / jnp.sqrt(squares.mean(-1, keepdims=True) + 1e-3)


@planted("LinenNorm", "overflow")
def linen_squares_beyond_f16():
    model = LinenNorm()
    x = normal(1, *X)
    params = model.init(jax.random.key(0), x)
    params = jax.tree.map(lambda w: w * 500, params)

    def loss(params, x):
        out = model.apply(cast(params, jnp.float16), x.astype(jnp.float16))
        return jnp.mean(jnp.square(jnp.asarray(out))).astype(jnp.float32)

    return Case(loss, (params, x))


@planted("proj", "overflow")
def linen_library_layer_beyond_f16():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(64, name="proj")(x)  # <- linen_library_layer_beyond_f16
            return nn.Dense(2, name="head")(nn.tanh(h))

    model = Net()
    x = normal(1, *X)
    params = model.init(jax.random.key(0), x)
    params = jax.tree.map(lambda w: w * 1e6 if w.shape == (12, 64) else w, params)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, x))))

    return Case(mpx.amp(loss, "f16"), (params, x), 1.0)
