"""Flax: modules of Linen and NNX, and packages that are built on them."""

# pyright: reportMissingImports=false

import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

from _zoo.model import (
    Case,
    Lazy,
    Model,
    at_least_f32,
    cross_entropy,
    key,
    next_token,
    normal,
    squared_error,
    tokens,
)

diffusers = Lazy("diffusers.models.unets.unet_2d_condition_flax")
kan_layers = Lazy("jaxkan.layers")
llamalike_common = Lazy("penzai.models.transformer.variants.llamalike_common")
mamba2_jax = Lazy("mamba2_jax")
nn = Lazy("flax.linen")
nnx = Lazy("flax.nnx")
pz = Lazy("penzai.pz")
qwix = Lazy("qwix")

BF16 = jnp.bfloat16


def of_linen(make, batch):
    """Makes a case of a Linen module, whose own option for bf16 is `dtype`."""

    def of(module):
        def loss(params, batch):
            *inputs, target = batch
            return squared_error(module.apply(params, *inputs), target)

        return loss

    params = jax.jit(make(None).init)(key(0), *batch[:-1])
    return Case(of(make(None)), params, batch, of(make(BF16)))


def linen_attention():
    """`MultiHeadDotProductAttention` with a causal mask."""

    def make(dtype):
        return nn.MultiHeadDotProductAttention(num_heads=4, dtype=dtype)

    mask = jnp.tril(jnp.ones((16, 16), bool))[None, None]

    def of(module):
        def loss(params, batch):
            x, mask, y = batch
            return squared_error(module.apply(params, x, mask=mask), y)

        return loss

    x, y = normal(0, 4, 16, 64), normal(1, 4, 16, 64)
    params = jax.jit(make(None).init)(key(2), x)
    return Case(of(make(None)), params, (x, mask, y), of(make(BF16)))


def linen_lstm():
    """`RNN` over an `OptimizedLSTMCell`: a scan with a carry."""

    def make(dtype):
        return nn.RNN(nn.OptimizedLSTMCell(64, dtype=dtype))

    return of_linen(make, (normal(0, 16, 12, 32), normal(1, 16, 12, 64)))


def of_nnx(model, call, batch, own=None):
    """Makes a case of an NNX module."""

    def of(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params, batch):
            # New variables: those of another trace could not be written to.
            state = jax.tree.map(lambda x: x, rest)
            return call(nnx.merge(graph, params, state), batch)

        return params, loss

    params, loss = of(model)
    return Case(loss, params, batch, None if own is None else of(own)[1])


def nnx_attention():
    """`nnx.MultiHeadAttention`, which calls `jax.nn.dot_product_attention`."""

    def make(dtype):
        return nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, dtype=dtype, rngs=nnx.Rngs(0)
        )

    def call(model, batch):
        x, y = batch
        return squared_error(model(x), y)

    batch = (normal(0, 4, 16, 64), normal(1, 4, 16, 64))
    return of_nnx(make(None), call, batch, make(BF16))


def mamba2():
    """A state-space model: cumulative sums, exponentials, a scan over chunks."""
    config = mamba2_jax.Mamba2Config(
        vocab_size=128,
        hidden_size=64,
        state_size=16,
        head_dim=16,
        chunk_size=8,
        num_hidden_layers=1,
    )
    model = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))

    def call(model, ids):
        return next_token(model(ids)["logits"], ids)

    return of_nnx(model, call, tokens(0, 128, 4, 16))


def kan():
    """A Kolmogorov–Arnold network with B-splines."""
    # Not `jaxkan.KAN`: it keeps its layers in a list, which Flax 0.12 does not take.
    layer = kan_layers.get_layer("base")
    sizes = ((4, 16), (16, 16), (16, 1))
    model = nnx.Sequential(*(layer(m, n, k=3, G=5, seed=0) for m, n in sizes))

    def call(model, batch):
        x, y = batch
        return squared_error(model(x), y)

    x = jax.random.uniform(key(0), (64, 4), minval=-1)
    return of_nnx(model, call, (x, jnp.sin(3 * x.sum(1, keepdims=True))))


def penzai_gemma():
    """Penzai's transformer, with named axes, built like Gemma."""
    os.environ.setdefault("PENZAI_NO_IPYTHON", "1")

    def make(dtype):
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

    def of(model):
        model, params = pz.unbind_params(model, freeze=True)

        def loss(values, ids):
            pairs = zip(params, values, strict=True)
            new = [dataclasses.replace(param, value=value) for param, value in pairs]
            bound = pz.bind_variables(model, new)
            named = pz.nx.wrap(ids).tag("batch", "seq")
            logits = bound(named, token_positions=pz.nx.arange("seq", ids.shape[1]))
            logits = logits.unwrap("batch", "seq", "vocabulary")
            return next_token(logits, ids)

        return [p.value for p in params], loss

    params, loss = of(make(jnp.float32))
    return Case(loss, params, tokens(0, 128, 4, 16), of(make(BF16))[1])


def lora():
    """`nnx.LoRA`: f32 adapters beside a frozen base in bf16."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(128, 64, rngs=rngs)
            self.layers = nnx.List(
                nnx.LoRA(
                    64, 8, 64, base_module=nnx.Linear(64, 64, rngs=rngs), rngs=rngs
                )
                for _ in range(3)
            )

        def __call__(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + jax.nn.gelu(layer(x))
            return self.embed.attend(x)

    graph, adapters, base = nnx.split(Network(nnx.Rngs(0)), nnx.LoRAParam, ...)

    def loss(adapters, base, ids):
        return next_token(nnx.merge(graph, adapters, base)(ids), ids)

    base = jax.tree.map(lambda x: x.astype(BF16), base)
    return Case(loss, adapters, tokens(0, 128, 4, 32), learning_rate=1e-2, beside=base)


def normalised():
    """`nnx.WeightNorm` and `nnx.SpectralNorm`, which set the weights in each call."""

    def make(dtype):
        rngs = nnx.Rngs(0)
        linear = [nnx.Linear(m, 64, dtype=dtype, rngs=rngs) for m in (32, 64)]
        return nnx.Sequential(
            nnx.WeightNorm(linear[0], rngs=rngs),
            jax.nn.relu,
            nnx.SpectralNorm(linear[1], n_steps=3, rngs=rngs),
            jax.nn.relu,
            nnx.Linear(64, 8, dtype=dtype, rngs=rngs),
        )

    def call(model, batch):
        x, y = batch
        return squared_error(model(x), y)

    x = normal(0, 64, 32)
    return of_nnx(make(None), call, (x, jnp.sin(x[:, :8])), make(BF16))


def mixer():
    """An MLP-Mixer: matmuls over tokens, and over channels."""

    class Mixer(nnx.Module):
        def __init__(self, dtype):
            rngs = nnx.Rngs(0)
            linear = functools.partial(nnx.Linear, dtype=dtype, rngs=rngs)
            norm = functools.partial(nnx.LayerNorm, dtype=dtype, rngs=rngs)
            self.stem = nnx.Conv(3, 64, (4, 4), 4, dtype=dtype, rngs=rngs)
            self.norms = nnx.List(norm(64) for _ in range(4))
            self.blocks = nnx.List(
                nnx.Sequential(linear(n, 2 * n), jax.nn.gelu, linear(2 * n, n))
                for n in (16, 64, 16, 64)
            )
            self.head = linear(64, 10)

        def __call__(self, images):
            x = self.stem(images).reshape(len(images), 16, 64)
            for i, (norm, block) in enumerate(
                zip(self.norms, self.blocks, strict=True)
            ):
                h = norm(x)
                x = x + (block(h) if i % 2 else block(h.mT).mT)
            return self.head(x.mean(1))

    def call(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    batch = (normal(0, 16, 16, 16, 3), tokens(1, 10, 16))
    return of_nnx(Mixer(None), call, batch, Mixer(BF16))


def unet():
    """Diffusers' U-Net with cross attention, which predicts the noise."""

    def make(dtype):
        return diffusers.FlaxUNet2DConditionModel(
            sample_size=8,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            block_out_channels=(32,),
            layers_per_block=1,
            attention_head_dim=4,
            cross_attention_dim=32,
            dtype=dtype,
        )

    def of(module):
        def loss(params, batch):
            images, noise, times, words = batch
            keep = jnp.cos(times / 1000 * jnp.pi / 2)[:, None, None, None]
            keep = keep.astype(images.dtype)
            noisy = keep * images + jnp.sqrt(1 - keep**2) * noise
            out = module.apply({"params": params}, noisy, times, words).sample
            return squared_error(out, noise)

        return loss

    params = jax.jit(make(jnp.float32).init_weights)(key(0))
    batch = (normal(1, 4, 4, 8, 8), normal(2, 4, 4, 8, 8))
    batch += (tokens(3, 1000, 4), normal(4, 4, 6, 32))
    return Case(of(make(jnp.float32)), params, batch, of(make(BF16)))


def ctc():
    """Speech in Linen: a convolution, LSTMs in both directions, `optax.ctc_loss`."""

    def make(dtype):
        cells = [nn.OptimizedLSTMCell(32, dtype=dtype) for _ in range(2)]
        return nn.Sequential(
            [
                nn.Conv(32, (5,), 2, dtype=dtype),
                nn.gelu,
                nn.Bidirectional(nn.RNN(cells[0]), nn.RNN(cells[1])),
                nn.Dense(16, dtype=dtype),
            ]
        )

    def of(module):
        def loss(params, batch):
            sound, labels, padding = batch
            logits = at_least_f32(module.apply(params, sound))
            none = jnp.zeros(logits.shape[:2])
            return jnp.mean(optax.ctc_loss(logits, none, labels, padding))

        return loss

    lengths = 3 + tokens(3, 4, 16, 1)
    padding = (jnp.arange(6) >= lengths).astype(jnp.float32)
    batch = (normal(0, 16, 32, 16), 1 + tokens(1, 15, 16, 6), padding)
    params = jax.jit(make(None).init)(key(2), batch[0])
    return Case(of(make(None)), params, batch, of(make(BF16)))


def gumbel():
    """A variational autoencoder with categories, sampled by Gumbel's trick in Linen."""

    class Autoencoder(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x, noise):
            def mlp(x, width):
                hidden = nn.relu(nn.Dense(64, dtype=self.dtype)(x))
                return at_least_f32(nn.Dense(width, dtype=self.dtype)(hidden))

            logits = mlp(x, 64).reshape(-1, 8, 8)
            codes = nn.softmax((logits + noise) / 0.7)
            return logits, mlp(codes.reshape(-1, 64), 32)

    def of(module):
        def loss(params, batch):
            logits, out = module.apply(params, *batch)
            logp = jax.nn.log_softmax(logits)
            divergence = jnp.sum(jnp.exp(logp) * (logp + jnp.log(8.0)), (1, 2))
            bits = at_least_f32(batch[0])
            error = jnp.sum(jax.nn.softplus(out) - bits * out, 1)
            return jnp.mean(error + divergence)

        return loss

    bits = (normal(0, 64, 32) > 0).astype(jnp.float32)
    batch = (bits, jax.random.gumbel(key(1), (64, 8, 8)))
    params = jax.jit(Autoencoder(None).init)(key(2), *batch)
    return Case(of(Autoencoder(None)), params, batch, of(Autoencoder(BF16)))


def qwix_int8():
    """Qwix: quantisation-aware training of a Linen MLP in int8."""
    plain = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64), nn.gelu, nn.Dense(8)])
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    module = qwix.quantize_model(plain, qwix.QtProvider([rule]))

    def loss(params, batch):
        x, y = batch
        return squared_error(module.apply(params, x), y)

    x = normal(0, 48, 32)  # not 64: Qwix tells weights by their shapes
    params = jax.jit(module.init)(key(1), x)
    return Case(loss, {"params": params["params"]}, (x, jnp.sin(x[:, :8])))


QWIX_F16 = "Qwix takes scales below 0.008 for zero if they are f16: use `amp`"
NNX_F16 = "the f16 matmul that `nnx` asks for does not exist on CPUs"

MODELS = (
    Model("attention (Linen)", "flax", linen_attention),
    Model("LSTM (Linen)", "flax", linen_lstm),
    Model("attention (NNX)", "flax", nnx_attention, {"policy f16": NNX_F16}),
    Model("Mamba 2", "mamba2-jax", mamba2),
    Model("KAN", "jaxkan", kan),
    Model("Gemma (Penzai)", "penzai", penzai_gemma),
    Model("LoRA (NNX)", "flax", lora),
    Model("weight and spectral norm (NNX)", "flax", normalised),
    Model("Mixer (NNX)", "flax", mixer),
    Model("diffusion U-Net (Diffusers)", "diffusers", unet),
    Model("CTC (Linen)", "flax", ctc),
    Model("Gumbel VAE (Linen)", "flax", gumbel),
    Model("int8 training (Qwix)", "qwix", qwix_int8, {"policy f16": QWIX_F16}),
)
