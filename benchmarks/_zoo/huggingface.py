"""Transformers of Hugging Face in Flax, and of Keras with the JAX backend."""

# pyright: reportMissingImports=false

import importlib
import os
from typing import Any

import jax
import jax.numpy as jnp

from _zoo.model import (
    BF16,
    Case,
    Lazy,
    cross_entropy,
    model,
    next_token,
    normal,
    settings,
    tokens,
)

os.environ["KERAS_BACKEND"] = "jax"
hf = Lazy("transformers")
hub = Lazy("keras_hub.models")
keras = Lazy("keras")

WORDS = 128
# Without and with the words.
BODY = "hidden_size=64 num_hidden_layers=1 num_attention_heads=4 intermediate_size=128"
SIZES = f"{BODY} vocab_size=128"
CASTS = (
    "each Keras layer casts its inputs and weights to its own dtype policy, here f32; "
    "use `amp`, or Keras' `mixed_bfloat16`"
)
NOTES = {"policy bf16": CASTS, "policy f16": CASTS}


# --- Hugging Face -----------------------------------------------------------------------


def both(name, config, loss, batch, **options):
    """Makes the case of a model class, whose own option for bf16 is `dtype`."""
    make = getattr(hf, f"Flax{name}")
    with jax.default_prng_impl("unsafe_rbg"):  # compiles in half of the time
        model = make(config, seed=0, dtype=jnp.float32, **options)
    low = make(config, dtype=BF16, _do_init=False, **options)
    of = lambda model: lambda params, batch: loss(model, params, batch)  # noqa: E731
    return Case(of(model), model.params, batch, of(low))


def causal(config, kind, text):
    """Makes the case of a causal language model from the text of its settings."""
    loss = lambda m, params, ids: next_token(m(ids, params=params).logits, ids)  # noqa: E731
    made = getattr(hf, f"{config}Config")(**settings(text))
    return both(f"{config}{kind}", made, loss, tokens(0, WORDS, 4, 32))


@model("GPT-2", "transformers")
def gpt2():
    text = "vocab_size=128 n_positions=32 n_embd=64 n_layer=1 n_head=4"
    return causal("GPT2", "LMHeadModel", text)


@model("BERT", "transformers")
def bert():
    def loss(model, params, batch):
        ids, mask, labels = batch
        return cross_entropy(model(ids, mask, params=params).logits, labels)

    mask = jnp.arange(32)[None] < jnp.array([[32], [24], [16], [8]])
    batch = (tokens(0, WORDS, 4, 32), mask.astype(int), tokens(1, WORDS, 4, 32))
    config = hf.BertConfig(**settings(f"{SIZES} max_position_embeddings=32"))
    return both("BertForMaskedLM", config, loss, batch)


class WithClip:
    """`jax.numpy` with the argument of `clip` that T5 still uses and JAX removed."""

    def __getattr__(self, name):
        return getattr(jnp, name)

    @staticmethod
    def clip(x, a_max):
        """Returns the smaller of two numbers."""
        return jnp.clip(x, max=a_max)


@model("T5", "transformers")
def t5():
    """Encoder and decoder, relative positions, RMSNorm, unscaled attention."""
    module: Any = importlib.import_module("transformers.models.t5.modeling_flax_t5")
    module.jnp = WithClip()

    def loss(model, params, batch):
        ids, target = batch
        out = model(ids, decoder_input_ids=target, params=params)
        return next_token(out.logits, target)

    text = "vocab_size=128 d_model=64 d_kv=16 d_ff=128 num_layers=1 num_heads=4"
    batch = (tokens(0, WORDS, 4, 24), tokens(1, WORDS, 4, 16))
    config = hf.T5Config(**settings(text))
    return both("T5ForConditionalGeneration", config, loss, batch)


@model("Llama", "transformers")
def llama():
    text = f"{SIZES} num_key_value_heads=4 max_position_embeddings=64"
    return causal("Llama", "ForCausalLM", text)


@model("Mistral", "transformers")
def mistral():
    text = f"{SIZES} num_key_value_heads=2 max_position_embeddings=64 sliding_window=16"
    return causal("Mistral", "ForCausalLM", text)


@model("Gemma", "transformers")
def gemma():
    text = f"{SIZES} num_key_value_heads=1 head_dim=16 max_position_embeddings=64"
    return causal("Gemma", "ForCausalLM", text)


@model("ViT", "transformers")
def vit():
    def loss(model, params, batch):
        return cross_entropy(model(batch[0], params=params).logits, batch[1])

    text = f"{BODY} image_size=16 patch_size=4"
    config = hf.ViTConfig(**settings(text), num_labels=10)
    batch = (normal(0, 16, 3, 16, 16), tokens(1, 10, 16))
    return both("ViTForImageClassification", config, loss, batch)


@model("CLIP", "transformers")
def clip():
    """Two towers and a contrastive loss with a learned temperature."""

    def loss(model, params, batch):
        logits = model(*batch, params=params).logits_per_text
        labels = jnp.arange(len(logits))
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    config = hf.CLIPConfig(
        text_config=settings(f"{SIZES} max_position_embeddings=16 eos_token_id=2"),
        vision_config=settings(f"{BODY} image_size=16 patch_size=4"),
        projection_dim=32,
    )
    batch = (tokens(0, WORDS, 16, 16), normal(1, 16, 3, 16, 16))
    shapes = ((1, 16), (1, 16, 16, 3))
    return both("CLIPModel", config, loss, batch, input_shape=shapes)


@model("Whisper", "transformers")
def whisper():
    def loss(model, params, batch):
        return next_token(model(*batch, params=params).logits, batch[1])

    text = (
        "vocab_size=128 num_mel_bins=16 d_model=64 encoder_layers=1 decoder_layers=1 "
        "encoder_attention_heads=4 decoder_attention_heads=4 encoder_ffn_dim=128 "
        "decoder_ffn_dim=128 max_source_positions=32 max_target_positions=16 "
        "pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=1"
    )
    config = hf.WhisperConfig(**settings(text))
    batch, shape = (normal(0, 2, 16, 64), tokens(1, WORDS, 2, 16)), (1, 16, 64)
    name = "WhisperForConditionalGeneration"
    return both(name, config, loss, batch, input_shape=shape)


@model("Wav2Vec2", "transformers")
def wav2vec2():
    """A stack of convolutions over raw sound, group norm, a transformer."""

    def loss(model, params, batch):
        logits = model(batch[0], params=params).logits
        return cross_entropy(logits, batch[1][:, : logits.shape[1]])

    text = (
        f"{BODY} vocab_size=32 num_feat_extract_layers=3 num_conv_pos_embeddings=16 "
        "num_conv_pos_embedding_groups=4 do_stable_layer_norm=1"
    )
    config = hf.Wav2Vec2Config(
        **settings(text),
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 4, 4),
        feat_extract_norm="layer",
    )
    batch = (normal(0, 2, 2000), tokens(1, 32, 2, 64))
    return both("Wav2Vec2ForCTC", config, loss, batch, input_shape=(1, 2000))


# --- Keras ------------------------------------------------------------------------------


def of_keras(build, loss, batch):
    """Makes the case of a model, whose own option for bf16 is `mixed_bfloat16`."""

    def one(dtype):
        keras.utils.set_random_seed(0)
        model = build(dtype)

        def call(params, inputs):
            rest = [v.value for v in model.non_trainable_variables]
            return model.stateless_call(params, rest, inputs, training=True)[0]

        return model, lambda params, batch: loss(lambda x: call(params, x), batch)

    model, plain = one("float32")
    params = [v.value for v in model.trainable_variables]
    return Case(plain, params, batch, one("mixed_bfloat16")[1])


def language_loss(call, ids):
    """Returns the loss of a causal model with tied embeddings."""
    return next_token(call({"token_ids": ids, "padding_mask": jnp.ones_like(ids)}), ids)


@model("Llama (Keras)", "keras-hub", NOTES)
def keras_llama():
    def build(dtype):
        backbone = hub.LlamaBackbone(WORDS, 2, 4, 64, 128, 2, dtype=dtype)
        return hub.LlamaCausalLM(backbone=backbone, preprocessor=None)

    return of_keras(build, language_loss, tokens(0, WORDS, 4, 32))


@model("Mixtral (Keras)", "keras-hub", NOTES)
def mixtral():
    def build(dtype):
        backbone = hub.MixtralBackbone(WORDS, 1, 4, 64, 64, 2, 4, 2, dtype=dtype)
        return hub.MixtralCausalLM(backbone=backbone, preprocessor=None)

    return of_keras(build, language_loss, tokens(0, WORDS, 4, 16))


@model("Gemma 3 (Keras)", "keras-hub", NOTES)
def gemma3():
    """Local and global attention, norms of queries and keys."""

    def build(dtype):
        backbone = hub.Gemma3Backbone(
            *(WORDS, 16, 2, 4, 1, 64, 128, 16),
            use_query_key_norm=True,
            use_sliding_window_attention=True,
            sliding_window_size=8,
            vision_encoder=None,
            dtype=dtype,
        )
        return hub.Gemma3CausalLM(backbone=backbone, preprocessor=None)

    return of_keras(build, language_loss, tokens(0, WORDS, 4, 16))


@model("BERT (Keras)", "keras-hub", NOTES)
def keras_bert():
    def build(dtype):
        options = {"dropout": 0.0, "dtype": dtype}
        sizes = (WORDS, 2, 4, 64, 128)
        backbone = hub.BertBackbone(*sizes, max_sequence_length=16, **options)
        return hub.BertTextClassifier(backbone, 10, preprocessor=None, **options)

    def loss(call, batch):
        ids, labels = batch
        masks = {"padding_mask": jnp.ones_like(ids), "segment_ids": jnp.zeros_like(ids)}
        return cross_entropy(call({"token_ids": ids, **masks}), labels)

    return of_keras(build, loss, (tokens(0, WORDS, 8, 16), tokens(1, 10, 8)))
