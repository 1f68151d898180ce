"""Flax: modules of Linen and NNX, and packages that are built on them."""

# pyright: reportMissingImports=false

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp

from _zoo.model import (
    Case,
    Loss,
    Model,
    key,
    next_token,
    normal,
    squared_error,
    tokens,
)

BF16 = jnp.bfloat16


def of_linen(make: Any, batch: tuple[Any, ...]) -> Case:
    """Makes a case of a Linen module, whose own option for bf16 is `dtype`."""

    def of(module: Any) -> Loss:
        def loss(params: Any, batch: Any) -> Any:
            *inputs, target = batch
            return squared_error(module.apply(params, *inputs), target)

        return loss

    params = jax.jit(make(None).init)(key(0), *batch[:-1])
    return Case(of(make(None)), params, batch, of(make(BF16)))


def linen_attention() -> Case:
    """`MultiHeadDotProductAttention` with a causal mask."""
    import flax.linen as nn

    def make(dtype: Any) -> Any:
        return nn.MultiHeadDotProductAttention(num_heads=4, dtype=dtype)

    mask = jnp.tril(jnp.ones((16, 16), bool))[None, None]

    def of(module: Any) -> Loss:
        def loss(params: Any, batch: Any) -> Any:
            x, mask, y = batch
            return squared_error(module.apply(params, x, mask=mask), y)

        return loss

    x, y = normal(0, 4, 16, 64), normal(1, 4, 16, 64)
    params = jax.jit(make(None).init)(key(2), x)
    return Case(of(make(None)), params, (x, mask, y), of(make(BF16)))


def linen_lstm() -> Case:
    """`RNN` over an `OptimizedLSTMCell`: a scan with a carry."""
    import flax.linen as nn

    def make(dtype: Any) -> Any:
        return nn.RNN(nn.OptimizedLSTMCell(64, dtype=dtype))

    return of_linen(make, (normal(0, 16, 12, 32), normal(1, 16, 12, 64)))


def of_nnx(model: Any, call: Any, batch: Any, own: Any = None) -> Case:
    """Makes a case of an NNX module."""
    from flax import nnx

    def of(model: Any) -> tuple[Any, Loss]:
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params: Any, batch: Any) -> Any:
            return call(nnx.merge(graph, params, rest), batch)

        return params, loss

    params, loss = of(model)
    return Case(loss, params, batch, None if own is None else of(own)[1])


def nnx_attention() -> Case:
    """`nnx.MultiHeadAttention`, which calls `jax.nn.dot_product_attention`."""
    from flax import nnx

    def make(dtype: Any) -> Any:
        return nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, dtype=dtype, rngs=nnx.Rngs(0)
        )

    def call(model: Any, batch: Any) -> Any:
        x, y = batch
        return squared_error(model(x), y)

    batch = (normal(0, 4, 16, 64), normal(1, 4, 16, 64))
    return of_nnx(make(None), call, batch, make(BF16))


def mamba2() -> Case:
    """A state-space model: cumulative sums, exponentials, a scan over chunks."""
    import mamba2_jax
    from flax import nnx

    config = mamba2_jax.Mamba2Config(
        vocab_size=128,
        hidden_size=64,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=1,
    )
    model = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))

    def call(model: Any, ids: Any) -> Any:
        return next_token(model(ids)["logits"], ids)

    return of_nnx(model, call, tokens(0, 128, 4, 16))


def kan() -> Case:
    """A Kolmogorov–Arnold network with B-splines."""
    from flax import nnx
    from jaxkan.layers import get_layer

    # Not `jaxkan.KAN`: it keeps its layers in a list, which Flax 0.12 does not take.
    layer = get_layer("base")
    sizes = ((4, 16), (16, 16), (16, 1))
    model = nnx.Sequential(*(layer(m, n, k=3, G=5, seed=0) for m, n in sizes))

    def call(model: Any, batch: Any) -> Any:
        x, y = batch
        return squared_error(model(x), y)

    x = jax.random.uniform(key(0), (64, 4), minval=-1)
    return of_nnx(model, call, (x, jnp.sin(3 * x.sum(1, keepdims=True))))


def penzai_gemma() -> Case:
    """Penzai's transformer, with named axes, built like Gemma."""
    os.environ.setdefault("PENZAI_NO_IPYTHON", "1")
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common

    def make(dtype: Any) -> Any:
        config = llamalike_common.LlamalikeTransformerConfig(
            num_kv_heads=1,
            query_head_multiplier=4,
            embedding_dim=64,
            projection_dim=16,
            mlp_hidden_dim=128,
            num_decoder_blocks=2,
            vocab_size=128,
            mlp_variant="geglu_approx",
            tie_embedder_and_logits=True,
            activation_dtype=dtype,
        )
        return llamalike_common.build_llamalike_transformer(config, key(0))

    def of(model: Any) -> tuple[Any, Loss]:
        model, params = pz.unbind_params(model, freeze=True)

        def loss(values: Any, ids: Any) -> Any:
            pairs = zip(params, values, strict=True)
            new = [dataclasses.replace(param, value=value) for param, value in pairs]
            bound = pz.bind_variables(model, new)
            named = pz.nx.wrap(ids).tag("batch", "seq")
            logits = bound(
                named,
                token_positions=pz.nx.arange("seq", ids.shape[1]),
            )
            logits = logits.unwrap("batch", "seq", "vocabulary")
            return next_token(logits, ids)

        return [p.value for p in params], loss

    params, loss = of(make(jnp.float32))
    return Case(loss, params, tokens(0, 128, 4, 16), of(make(BF16))[1])


MODELS = (
    Model("attention (Linen)", "flax", linen_attention),
    Model("LSTM (Linen)", "flax", linen_lstm),
    Model(
        "attention (NNX)",
        "flax",
        nnx_attention,
        {"policy f16": "the f16 matmul that `nnx` asks for does not exist on CPUs"},
    ),
    Model("Mamba 2", "mamba2-jax", mamba2),
    Model("KAN", "jaxkan", kan),
    Model("Gemma (Penzai)", "penzai", penzai_gemma),
)
