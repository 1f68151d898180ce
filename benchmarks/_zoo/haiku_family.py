"""Haiku's networks, and graph networks of jraph that are built of them."""

# pyright: reportMissingImports=false

import jax
import jax.numpy as jnp

from _zoo.model import (
    Case,
    Lazy,
    at_least_f32,
    cross_entropy,
    key,
    model,
    normal,
    squared_error,
    tokens,
)

hk = Lazy("haiku")
jraph = Lazy("jraph")


def of(forward, batch, score):
    """Makes a case of a function that calls Haiku modules.

    Running averages are computed and dropped: in training the batch is normalised by its
    own statistics.
    """
    network = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = jax.jit(network.init)(key(0), *batch[:-1])

    def loss(params, batch):
        *inputs, target = batch
        return score(network.apply(params, state, *inputs)[0], target)

    return Case(loss, params, batch)


def layer_norm():
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)


@model("MLP (Haiku)", "dm-haiku")
def mlp():
    batch = (x := normal(1, 64, 16), jnp.sin(x.sum(1, keepdims=True)))
    return of(lambda x: hk.nets.MLP([64, 64, 1])(x), batch, squared_error)


@model("transformer block (Haiku)", "dm-haiku")
def transformer():
    def forward(x):
        h = layer_norm()(x)
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(4, 16, w_init=init)(h, h, h)
        return x + hk.nets.MLP([128, 64])(layer_norm()(x))

    return of(forward, (normal(1, 4, 16, 64), normal(2, 4, 16, 64)), squared_error)


@model("LSTM (Haiku)", "dm-haiku")
def lstm():
    def forward(x):
        core = hk.LSTM(64)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return of(forward, (normal(1, 12, 16, 32), normal(2, 12, 16, 64)), squared_error)


@model("ResNet (Haiku)", "dm-haiku")
def resnet():
    def forward(images):
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            bottleneck=False,
            channels_per_group=(16, 16, 32, 32),
            use_projection=(True,) * 4,
        )
        return net(images, is_training=True)

    return of(forward, (normal(1, 8, 32, 32, 3), tokens(2, 10, 8)), cross_entropy)


def graph_batch():
    """Returns two random graphs in one, and a target for each."""
    graph = jraph.GraphsTuple(
        nodes=normal(5, 16, 16),
        edges=normal(6, 48, 16),
        senders=jnp.concatenate([tokens(1, 6, 20), 6 + tokens(2, 10, 28)]),
        receivers=jnp.concatenate([tokens(3, 6, 20), 6 + tokens(4, 10, 28)]),
        n_node=jnp.array([6, 10]),
        n_edge=jnp.array([20, 28]),
        globals=normal(7, 2, 16),
    )
    return graph, normal(8, 2, 16)


@model("graph network (jraph)", "jraph")
def graph_network():
    """`jraph.GraphNetwork`: MLPs of edges, nodes and globals, with segment sums."""

    def forward(graph):
        mlp = jraph.concatenated_args(lambda x: hk.nets.MLP([32, 16])(x))
        for _ in range(2):
            graph = jraph.GraphNetwork(mlp, mlp, mlp)(graph)
        return graph.globals

    return of(forward, graph_batch(), squared_error)


@model("graph attention (jraph)", "jraph")
def graph_attention():
    """`jraph.GAT`: a softmax over the edges of each node."""

    def forward(graph):
        query, logit = hk.Linear(32), hk.Linear(1)

        def score(sent, received, _):
            return jax.nn.leaky_relu(logit(jnp.concatenate([sent, received], axis=1)))

        return jraph.GAT(query, score, hk.Linear(16))(graph).nodes

    graph, _ = graph_batch()
    return of(forward, (graph, normal(8, 16, 16)), squared_error)


@model("VQ-VAE (Haiku)", "dm-haiku")
def vector_quantised():
    """`hk.nets.VectorQuantizer` between an encoder and a decoder."""

    def forward(x):
        latent = hk.nets.MLP([64, 32])(x).reshape(-1, 16)
        quantise = hk.nets.VectorQuantizer(16, 32, commitment_cost=0.25)
        found = quantise(latent, is_training=True)
        code = found["quantize"].reshape(len(x), 32)
        return hk.nets.MLP([64, 32])(code), found["loss"]

    def score(out, target):
        return squared_error(out[0], target) + at_least_f32(out[1])

    x = normal(1, 64, 32)
    return of(forward, (x, x), score)


@model("Perceiver (Haiku)", "dm-haiku")
def perceiver():
    """Learnt queries that attend to a long input, then to each other."""

    def forward(x):
        start = hk.initializers.TruncatedNormal(0.5)
        latent = hk.get_parameter("latent", (16, 64), x.dtype, init=start)
        latent = jnp.broadcast_to(latent, (len(x), *latent.shape))
        init = hk.initializers.VarianceScaling(1.0)
        for source in (x, None, None):
            query = layer_norm()(latent)
            seen = query if source is None else source
            heads = hk.MultiHeadAttention(4, 16, w_init=init, model_size=64)
            latent = latent + heads(query, seen, seen)
            latent = latent + hk.nets.MLP([128, 64])(layer_norm()(latent))
        return hk.Linear(10)(latent.mean(1))

    return of(forward, (normal(1, 8, 64, 32), tokens(2, 10, 8)), cross_entropy)


@model("slot attention (Haiku)", "dm-haiku")
def slots():
    """Slot attention: a softmax over the queries, and a GRU that is applied three times."""

    def forward(x):
        x = layer_norm()(hk.Linear(32)(x))
        keys, values = hk.Linear(32, with_bias=False)(x), hk.Linear(32)(x)
        start = hk.initializers.TruncatedNormal(1.0)
        slots = hk.get_parameter("slots", (4, 32), x.dtype, init=start)
        slots = jnp.broadcast_to(slots, (len(x), *slots.shape))
        norm = layer_norm()
        query, core = hk.Linear(32, with_bias=False), hk.GRU(32)
        for _ in range(3):
            logits = jnp.einsum("bsd,bnd->bsn", query(norm(slots)), keys) / 32**0.5
            weights = jax.nn.softmax(logits, axis=1) + 1e-4
            weights = weights / weights.sum(-1, keepdims=True)
            updates = jnp.einsum("bsn,bnd->bsd", weights, values)
            slots = hk.BatchApply(lambda u, s: core(u, s)[1])(updates, slots)
        drawn = hk.nets.MLP([64, 16 * 17])(slots).reshape(len(x), 4, 16, 17)
        return jnp.sum(jax.nn.softmax(drawn[..., 16:], 1) * drawn[..., :16], 1)

    x = normal(1, 16, 16, 16)
    return of(forward, (x, x), squared_error)


@model("world model (Haiku)", "dm-haiku")
def world_model():
    """A recurrent state-space model: a GRU, samples and divergences in a scan."""

    def forward(frames, actions, noise):
        core, widths = hk.GRU(64), [64, 32]
        prior, posterior = hk.nets.MLP(widths), hk.nets.MLP(widths)
        encode, decode = hk.nets.MLP([64, 32]), hk.nets.MLP([64, 16])

        def step(carry, now):
            state, code = carry
            frame, action, noise = now
            _, state = core(jnp.concatenate([code, action], -1), state)
            seen = jnp.concatenate([state, encode(frame)], -1)
            mean, spread = jnp.split(posterior(seen), 2, -1)
            code = mean + jax.nn.softplus(spread) * noise
            out = decode(jnp.concatenate([state, code], -1))
            return (state, code), (prior(state), jnp.stack([mean, spread]), out)

        start = (core.initial_state(frames.shape[1]), jnp.zeros_like(noise[0]))
        start = jax.tree.map(lambda x: x.astype(frames.dtype), start)
        return hk.scan(step, start, (frames, actions, noise))[1]

    def score(found, frames):
        prior, posterior, out = jax.tree.map(at_least_f32, found)
        mean, spread = posterior[:, 0], jax.nn.softplus(posterior[:, 1]) + 1e-3
        wanted, width = jnp.split(prior, 2, -1)
        width = jax.nn.softplus(width) + 1e-3
        ratio = (jnp.square(spread) + jnp.square(mean - wanted)) / jnp.square(width)
        divergence = jnp.log(width / spread) + (ratio - 1) / 2
        return squared_error(out, frames) + 0.1 * jnp.mean(divergence.sum(-1))

    frames = jnp.sin(jnp.cumsum(normal(1, 12, 16, 16), 0))
    batch = (frames, normal(2, 12, 16, 4), normal(3, 12, 16, 16), frames)
    return of(forward, batch, score)
