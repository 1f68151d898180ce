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
    BF16,
    Case,
    Lazy,
    at_least_f32,
    cross_entropy,
    key,
    model,
    next_token,
    normal,
    of_linen,
    of_nnx,
    regression,
    settings,
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


@model("attention (Linen)", "flax")
def linen_attention():
    make = lambda dtype: nn.MultiHeadDotProductAttention(num_heads=4, dtype=dtype)  # noqa: E731

    def score(apply, batch):
        x, mask, y = batch
        return squared_error(apply(x, mask=mask), y)

    x, y = normal(0, 4, 16, 64), normal(1, 4, 16, 64)
    mask = jnp.tril(jnp.ones((16, 16), bool))[None, None]
    return of_linen(make, (x, mask, y), score, (x,))


@model("LSTM (Linen)", "flax")
def linen_lstm():
    make = lambda dtype: nn.RNN(nn.OptimizedLSTMCell(64, dtype=dtype))  # noqa: E731
    return of_linen(make, (normal(0, 16, 12, 32), normal(1, 16, 12, 64)), seed=0)


NNX_F16 = "the f16 matmul that `nnx` asks for does not exist on CPUs"


@model("attention (NNX)", "flax", {"policy f16": NNX_F16})
def nnx_attention():
    def make(dtype):
        return nnx.MultiHeadAttention(
            num_heads=4, in_features=64, decode=False, dtype=dtype, rngs=nnx.Rngs(0)
        )

    batch = (normal(0, 4, 16, 64), normal(1, 4, 16, 64))
    return of_nnx(make(None), regression, batch, make(BF16))


@model("Mamba 2", "mamba2-jax")
def mamba2():
    """A state-space model: cumulative sums, exponentials, a scan over chunks."""
    text = "vocab_size=128 hidden_size=64 state_size=16 head_dim=16 chunk_size=8"
    config = mamba2_jax.Mamba2Config(**settings(text), num_hidden_layers=1)
    made = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    call = lambda made, ids: next_token(made(ids)["logits"], ids)  # noqa: E731
    return of_nnx(made, call, tokens(0, 128, 4, 16))


@model("KAN", "jaxkan")
def kan():
    """A Kolmogorov–Arnold network with B-splines."""
    # Not `jaxkan.KAN`: it keeps its layers in a list, which Flax 0.12 does not take.
    layer = kan_layers.get_layer("base")
    sizes = ((4, 16), (16, 16), (16, 1))
    made = nnx.Sequential(*(layer(m, n, k=3, G=5, seed=0) for m, n in sizes))
    x = jax.random.uniform(key(0), (64, 4), minval=-1)
    return of_nnx(made, regression, (x, jnp.sin(3 * x.sum(1, keepdims=True))))


@model("Gemma (Penzai)", "penzai")
def penzai_gemma():
    """Penzai's transformer, with named axes, built like Gemma."""
    os.environ.setdefault("PENZAI_NO_IPYTHON", "1")
    text = (
        "num_kv_heads=1 query_head_multiplier=4 embedding_dim=64 projection_dim=16 "
        "mlp_hidden_dim=128 num_decoder_blocks=2 vocab_size=128"
    )

    def make(dtype):
        config = llamalike_common.LlamalikeTransformerConfig(
            **settings(text),
            mlp_variant="geglu_approx",
            tie_embedder_and_logits=True,
            activation_dtype=dtype,
        )
        return llamalike_common.build_llamalike_transformer(config, key(0))

    def of(made):
        made, params = pz.unbind_params(made, freeze=True)

        def loss(values, ids):
            pairs = zip(params, values, strict=True)
            new = [dataclasses.replace(param, value=value) for param, value in pairs]
            bound = pz.bind_variables(made, new)
            named = pz.nx.wrap(ids).tag("batch", "seq")
            logits = bound(named, token_positions=pz.nx.arange("seq", ids.shape[1]))
            return next_token(logits.unwrap("batch", "seq", "vocabulary"), ids)

        return [p.value for p in params], loss

    params, loss = of(make(jnp.float32))
    return Case(loss, params, tokens(0, 128, 4, 16), of(make(BF16))[1])


@model("LoRA (NNX)", "flax")
def lora():
    """f32 adapters beside a frozen base in bf16."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(128, 64, rngs=rngs)
            base = lambda: nnx.Linear(64, 64, rngs=rngs)  # noqa: E731
            self.layers = nnx.List(
                nnx.LoRA(64, 8, 64, base_module=base(), rngs=rngs) for _ in range(3)
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


@model("weight and spectral norm (NNX)", "flax")
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

    x = normal(0, 64, 32)
    return of_nnx(make(None), regression, (x, jnp.sin(x[:, :8])), make(BF16))


@model("Mixer (NNX)", "flax")
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
            pairs = zip(self.norms, self.blocks, strict=True)
            for i, (norm, block) in enumerate(pairs):
                h = norm(x)
                x = x + (block(h) if i % 2 else block(h.mT).mT)
            return self.head(x.mean(1))

    call = lambda made, batch: cross_entropy(made(batch[0]), batch[1])  # noqa: E731
    batch = (normal(0, 16, 16, 16, 3), tokens(1, 10, 16))
    return of_nnx(Mixer(None), call, batch, Mixer(BF16))


@model("diffusion U-Net (Diffusers)", "diffusers")
def unet():
    """A U-Net with cross attention, which predicts the noise."""

    def make(dtype):
        return diffusers.FlaxUNet2DConditionModel(
            **settings("sample_size=8 layers_per_block=1 attention_head_dim=4"),
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            block_out_channels=(32,),
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


@model("CTC (Linen)", "flax")
def ctc():
    """Speech: a convolution, LSTMs in both directions, `optax.ctc_loss`."""

    def make(dtype):
        cells = [nn.OptimizedLSTMCell(32, dtype=dtype) for _ in range(2)]
        both = nn.Bidirectional(*map(nn.RNN, cells))
        stem, head = nn.Conv(32, (5,), 2, dtype=dtype), nn.Dense(16, dtype=dtype)
        return nn.Sequential([stem, nn.gelu, both, head])

    def score(apply, batch):
        sound, labels, padding = batch
        logits = at_least_f32(apply(sound))
        none = jnp.zeros(logits.shape[:2])
        return jnp.mean(optax.ctc_loss(logits, none, labels, padding))

    padding = (jnp.arange(6) >= 3 + tokens(3, 4, 16, 1)).astype(jnp.float32)
    batch = (normal(0, 16, 32, 16), 1 + tokens(1, 15, 16, 6), padding)
    return of_linen(make, batch, score, batch[:1])


@model("Gumbel VAE (Linen)", "flax")
def gumbel():
    """A variational autoencoder with categories, sampled by Gumbel's trick."""

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

    def score(apply, batch):
        logits, out = apply(*batch)
        logp = jax.nn.log_softmax(logits)
        divergence = jnp.sum(jnp.exp(logp) * (logp + jnp.log(8.0)), (1, 2))
        error = jnp.sum(jax.nn.softplus(out) - at_least_f32(batch[0]) * out, 1)
        return jnp.mean(error + divergence)

    bits = (normal(0, 64, 32) > 0).astype(jnp.float32)
    batch = (bits, jax.random.gumbel(key(1), (64, 8, 8)))
    return of_linen(Autoencoder, batch, score, batch)


QWIX_F16 = "Qwix takes scales below 0.008 for zero if they are f16: use `amp`"


@model("int8 training (Qwix)", "qwix", {"policy f16": QWIX_F16})
def qwix_int8():
    plain = nn.Sequential([nn.Dense(64), nn.gelu, nn.Dense(64), nn.gelu, nn.Dense(8)])
    rule = qwix.QtRule(module_path=".*", weight_qtype="int8", act_qtype="int8")
    module = qwix.quantize_model(plain, qwix.QtProvider([rule]))
    x = normal(0, 48, 32)  # not 64: Qwix tells weights by their shapes
    params = {"params": jax.jit(module.init)(key(1), x)["params"]}
    loss = lambda p, batch: regression(lambda x: module.apply(p, x), batch)  # noqa: E731
    return Case(loss, params, (x, jnp.sin(x[:, :8])))


# --- a decoder --------------------------------------------------------------------------


def decoder(tied):
    """Returns a decoder that reads bytes of Python's own documentation.

    Built like google-deepmind/nanodo: norms before attention and MLP, learnt positions,
    gelu, no biases, and a head that is the embedding, or one of its own.
    """
    from text import TINY, batches, read_text

    width, heads, length = 64, 4, 32

    class Decoder(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, ids):
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype)
            dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
            embed = nn.Embed(256, width, name="embed")
            places = nn.Embed(length, width, name="positions")
            x = embed(ids) + places(jnp.arange(ids.shape[1]))
            for _ in range(2):
                x = x + self.attention(norm()(x))
                x = x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))
            x = norm()(x)
            return embed.attend(x) if tied else dense(256, name="head")(x)

        def attention(self, x):
            options = {"use_bias": False, "dtype": self.dtype}
            split = (heads, width // heads)
            q, k, v = (nn.DenseGeneral(split, **options)(x) for _ in range(3))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)
            mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
            scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
            weights = nn.softmax(scores).astype(v.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            return nn.DenseGeneral(width, axis=(-2, -1), **options)(mixed)

    size = TINY._replace(sequences=4, length=length)
    ids = jnp.asarray(next(batches(read_text()[0], size, 0)))[:, :-1]
    score = lambda apply, ids: next_token(apply(ids), ids)  # noqa: E731
    return of_linen(Decoder, ids, score, (ids[:1],), seed=0)


model("decoder, tied (Linen)", "flax")(lambda: decoder(tied=True))
model("decoder, own head (Linen)", "flax")(lambda: decoder(tied=False))
