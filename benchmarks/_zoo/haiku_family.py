"""Haiku's networks, and graph networks of jraph that are built of them."""

# pyright: reportMissingImports=false

from typing import Any

import jax
import jax.numpy as jnp

from _zoo.model import Case, Model, cross_entropy, key, normal, squared_error, tokens


def of(forward: Any, batch: tuple[Any, ...], score: Any) -> Case:
    """Makes a case of a function that calls Haiku modules.

    Running averages are computed and dropped: in training the batch is normalised by its
    own statistics.
    """
    import haiku as hk

    network = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = jax.jit(network.init)(key(0), *batch[:-1])

    def loss(params: Any, batch: Any) -> Any:
        *inputs, target = batch
        return score(network.apply(params, state, *inputs)[0], target)

    return Case(loss, params, batch)


def mlp() -> Case:
    """`hk.nets.MLP`."""
    import haiku as hk

    x = normal(1, 64, 16)
    batch = (x, jnp.sin(x.sum(1, keepdims=True)))
    return of(lambda x: hk.nets.MLP([64, 64, 1])(x), batch, squared_error)


def resnet() -> Case:
    """`hk.nets.ResNet` with one block a group: convolutions and batch norm."""
    import haiku as hk

    def forward(images: Any) -> Any:
        net = hk.nets.ResNet(
            blocks_per_group=(1, 1, 1, 1),
            num_classes=10,
            bottleneck=False,
            channels_per_group=(16, 16, 32, 32),
            use_projection=(True, True, True, True),
        )
        return net(images, is_training=True)

    batch = (normal(1, 8, 32, 32, 3), tokens(2, 10, 8))
    return of(forward, batch, cross_entropy)


def lstm() -> Case:
    """`hk.LSTM` in `hk.dynamic_unroll`."""
    import haiku as hk

    def forward(x: Any) -> Any:
        core = hk.LSTM(64)
        return hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))[0]

    return of(forward, (normal(1, 12, 16, 32), normal(2, 12, 16, 64)), squared_error)


def transformer() -> Case:
    """`hk.MultiHeadAttention` and `hk.LayerNorm` in a pre-norm block."""
    import haiku as hk

    def forward(x: Any) -> Any:
        norm = hk.LayerNorm(-1, create_scale=True, create_offset=True)
        h = norm(x)
        init = hk.initializers.VarianceScaling(1.0)
        x = x + hk.MultiHeadAttention(4, 16, w_init=init)(h, h, h)
        h = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return x + hk.nets.MLP([128, 64])(h)

    return of(forward, (normal(1, 4, 16, 64), normal(2, 4, 16, 64)), squared_error)


def graph_batch() -> tuple[Any, Any]:
    """Returns two random graphs in one, and a target for each."""
    import jraph

    sizes, edges = [6, 10], [20, 28]
    senders = jnp.concatenate([tokens(1, 6, 20), 6 + tokens(2, 10, 28)])
    receivers = jnp.concatenate([tokens(3, 6, 20), 6 + tokens(4, 10, 28)])
    graph = jraph.GraphsTuple(
        nodes=normal(5, sum(sizes), 16),
        edges=normal(6, sum(edges), 16),
        senders=senders,
        receivers=receivers,
        n_node=jnp.array(sizes),
        n_edge=jnp.array(edges),
        globals=normal(7, 2, 16),
    )
    return graph, normal(8, 2, 16)


def graph_network() -> Case:
    """`jraph.GraphNetwork`: MLPs of edges, nodes and globals, with segment sums."""
    import haiku as hk
    import jraph

    def mlp(features: Any) -> Any:
        return hk.nets.MLP([32, 16])(features)

    def forward(graph: Any) -> Any:
        for _ in range(2):
            graph = jraph.GraphNetwork(
                update_edge_fn=jraph.concatenated_args(mlp),
                update_node_fn=jraph.concatenated_args(mlp),
                update_global_fn=jraph.concatenated_args(mlp),
            )(graph)
        return graph.globals

    return of(forward, graph_batch(), squared_error)


def graph_attention() -> Case:
    """`jraph.GAT`: a softmax over the edges of each node."""
    import haiku as hk
    import jraph

    def forward(graph: Any) -> Any:
        query = hk.Linear(32)
        logit = hk.Linear(1)
        graph = jraph.GAT(
            attention_query_fn=lambda nodes: query(nodes),
            attention_logit_fn=lambda sent, received, _: jax.nn.leaky_relu(
                logit(jnp.concatenate([sent, received], axis=1))
            ),
            node_update_fn=hk.Linear(16),
        )(graph)
        return graph.nodes

    graph, _ = graph_batch()
    return of(forward, (graph, normal(8, 16, 16)), squared_error)


MODELS = (
    Model("MLP (Haiku)", "dm-haiku", mlp),
    Model("transformer block (Haiku)", "dm-haiku", transformer),
    Model("LSTM (Haiku)", "dm-haiku", lstm),
    Model("ResNet (Haiku)", "dm-haiku", resnet),
    Model("graph network (jraph)", "jraph", graph_network),
    Model("graph attention (jraph)", "jraph", graph_attention),
)
