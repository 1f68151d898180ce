"""Flax models of Hugging Face's transformers and diffusers, from tiny configurations."""

# pyright: reportMissingImports=false

import importlib
from typing import Any

import jax
import jax.numpy as jnp

from _zoo.model import Case, Lazy, Model, cross_entropy, next_token, normal, tokens

hf = Lazy("transformers")

WORDS = 128
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": WORDS,
}
BF16 = jnp.bfloat16


class WithClip:
    """`jax.numpy` with the argument of `clip` that T5 still uses and JAX removed."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    @staticmethod
    def clip(x, a_max):
        """Returns the smaller of two numbers."""
        return jnp.clip(x, max=a_max)


def both(model_class, config, loss, batch, **options):
    """Makes the case of a model class, whose own option for bf16 is `dtype`."""
    with jax.default_prng_impl("unsafe_rbg"):  # compiles in half of the time
        model = model_class(config, seed=0, dtype=jnp.float32, **options)
    low = model_class(config, dtype=BF16, _do_init=False, **options)

    def of(model):
        return lambda params, batch: loss(model, params, batch)

    return Case(of(model), model.params, batch, of(low))


def language_loss(model, params, ids):
    """Returns the loss of a causal model."""
    return next_token(model(ids, params=params).logits, ids)


def gpt2():
    """Learned positions, tied embeddings, gelu."""
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=1, n_head=4
    )
    return both(hf.FlaxGPT2LMHeadModel, config, language_loss, tokens(0, WORDS, 4, 32))


def llama():
    """Rotary positions, RMSNorm, SwiGLU, grouped queries."""
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=4, max_position_embeddings=64)
    return both(hf.FlaxLlamaForCausalLM, config, language_loss, tokens(0, WORDS, 4, 32))


def mistral():
    """Rotary positions, a sliding window, grouped queries."""
    config = hf.MistralConfig(
        **SIZES, num_key_value_heads=2, max_position_embeddings=64, sliding_window=16
    )
    return both(
        hf.FlaxMistralForCausalLM, config, language_loss, tokens(0, WORDS, 4, 32)
    )


def gemma():
    """Rotary positions, GeGLU, scaled embeddings."""
    config = hf.GemmaConfig(
        **SIZES, num_key_value_heads=1, head_dim=16, max_position_embeddings=64
    )
    return both(hf.FlaxGemmaForCausalLM, config, language_loss, tokens(0, WORDS, 4, 32))


def bert():
    """Bidirectional attention with a padding mask, masked language model."""

    def loss(model, params, batch):
        ids, mask, labels = batch
        return cross_entropy(model(ids, mask, params=params).logits, labels)

    mask = jnp.arange(32)[None] < jnp.array([[32], [24], [16], [8]])
    batch = (tokens(0, WORDS, 4, 32), mask.astype(int), tokens(1, WORDS, 4, 32))
    config = hf.BertConfig(**SIZES, max_position_embeddings=32)
    return both(hf.FlaxBertForMaskedLM, config, loss, batch)


def t5():
    """Encoder and decoder, relative positions, RMSNorm, unscaled attention."""
    module: Any = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    module.jnp = WithClip()

    def loss(model, params, batch):
        ids, target = batch
        out = model(ids, decoder_input_ids=target, params=params)
        return next_token(out.logits, target)

    config = hf.T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=1, num_heads=4
    )
    batch = (tokens(0, WORDS, 4, 24), tokens(1, WORDS, 4, 16))
    return both(hf.FlaxT5ForConditionalGeneration, config, loss, batch)


def whisper():
    """Convolutions over a spectrogram, encoder and decoder."""

    def loss(model, params, batch):
        sound, ids = batch
        return next_token(model(sound, ids, params=params).logits, ids)

    config = hf.WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=32,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    batch = (normal(0, 2, 16, 64), tokens(1, WORDS, 2, 16))
    return both(
        hf.FlaxWhisperForConditionalGeneration,
        config,
        loss,
        batch,
        input_shape=(1, 16, 64),
    )


def vit():
    """Image patches, pre-norm transformer."""

    def loss(model, params, batch):
        images, labels = batch
        return cross_entropy(model(images, params=params).logits, labels)

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=10)
    batch = (normal(0, 16, 3, 16, 16), tokens(1, 10, 16))
    return both(hf.FlaxViTForImageClassification, config, loss, batch)


def clip():
    """Two towers and a contrastive loss with a learned temperature."""

    def loss(model, params, batch):
        ids, images = batch
        out = model(ids, images, params=params)
        logits = out.logits_per_text
        labels = jnp.arange(len(ids))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    sizes = {name: size for name, size in SIZES.items() if name != "vocab_size"}
    config = hf.CLIPConfig(
        text_config={**SIZES, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=32,
    )
    batch = (tokens(0, WORDS, 16, 16), normal(1, 16, 3, 16, 16))
    return both(
        hf.FlaxCLIPModel, config, loss, batch, input_shape=((1, 16), (1, 16, 16, 3))
    )


def wav2vec2():
    """A stack of convolutions over raw sound, group norm, a transformer."""

    def loss(model, params, batch):
        sound, labels = batch
        logits = model(sound, params=params).logits
        return cross_entropy(logits, labels[:, : logits.shape[1]])

    config = hf.Wav2Vec2Config(
        **{**SIZES, "vocab_size": 32},
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 4, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
    )
    batch = (normal(0, 2, 2000), tokens(1, 32, 2, 64))
    return both(hf.FlaxWav2Vec2ForCTC, config, loss, batch, input_shape=(1, 2000))


MODELS = (
    Model("GPT-2", "transformers", gpt2),
    Model("BERT", "transformers", bert),
    Model("T5", "transformers", t5),
    Model("Llama", "transformers", llama),
    Model("Mistral", "transformers", mistral),
    Model("Gemma", "transformers", gemma),
    Model("ViT", "transformers", vit),
    Model("CLIP", "transformers", clip),
    Model("Whisper", "transformers", whisper),
    Model("Wav2Vec2", "transformers", wav2vec2),
)
