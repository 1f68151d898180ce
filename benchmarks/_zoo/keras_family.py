"""Keras models with the JAX backend, through Keras' stateless calls."""

# pyright: reportMissingImports=false

import os

import jax.numpy as jnp

from _zoo.model import Case, Lazy, Model, cross_entropy, next_token, tokens

os.environ["KERAS_BACKEND"] = "jax"
hub = Lazy("keras_hub.models")
keras = Lazy("keras")

WORDS = 128
CASTS = (
    "each Keras layer casts its inputs and weights to its own dtype policy, here f32; "
    "use `amp`, or Keras' `mixed_bfloat16`"
)
NOTES = {"policy bf16": CASTS, "policy f16": CASTS}


def of(build, loss, batch):
    """Makes the case of a model, whose own option for bf16 is `mixed_bfloat16`."""

    def one(dtype):
        keras.utils.set_random_seed(0)
        model = build(dtype)

        def call(params, inputs):
            rest = [v.value for v in model.non_trainable_variables]
            return model.stateless_call(params, rest, inputs, training=True)[0]

        return model, lambda params, batch: loss(lambda x: call(params, x), batch)

    model, plain = one("float32")
    _, low = one("mixed_bfloat16")
    return Case(plain, [v.value for v in model.trainable_variables], batch, low)


def language_loss(call, ids):
    """Returns the loss of a causal model with tied embeddings."""
    return next_token(call({"token_ids": ids, "padding_mask": jnp.ones_like(ids)}), ids)


def llama():
    """Rotary positions, RMSNorm, SwiGLU, grouped queries."""

    def build(dtype):
        backbone = hub.LlamaBackbone(WORDS, 2, 4, 64, 128, 2, dtype=dtype)
        return hub.LlamaCausalLM(backbone=backbone, preprocessor=None)

    return of(build, language_loss, tokens(0, WORDS, 4, 32))


def mixtral():
    """A mixture of experts with a router."""

    def build(dtype):
        backbone = hub.MixtralBackbone(WORDS, 1, 4, 64, 64, 2, 4, 2, dtype=dtype)
        return hub.MixtralCausalLM(backbone=backbone, preprocessor=None)

    return of(build, language_loss, tokens(0, WORDS, 4, 16))


def gemma3():
    """Local and global attention, norms of queries and keys."""

    def build(dtype):
        backbone = hub.Gemma3Backbone(
            WORDS,
            16,
            2,
            4,
            1,
            64,
            128,
            16,
            use_query_key_norm=True,
            use_sliding_window_attention=True,
            sliding_window_size=8,
            vision_encoder=None,
            dtype=dtype,
        )
        return hub.Gemma3CausalLM(backbone=backbone, preprocessor=None)

    return of(build, language_loss, tokens(0, WORDS, 4, 16))


def bert():
    """A classifier with segments and a padding mask."""

    def build(dtype):
        backbone = hub.BertBackbone(
            WORDS, 2, 4, 64, 128, dropout=0.0, max_sequence_length=16, dtype=dtype
        )
        return hub.BertTextClassifier(
            backbone, 10, preprocessor=None, dropout=0.0, dtype=dtype
        )

    def loss(call, batch):
        ids, labels = batch
        inputs = {
            "token_ids": ids,
            "padding_mask": jnp.ones_like(ids),
            "segment_ids": jnp.zeros_like(ids),
        }
        return cross_entropy(call(inputs), labels)

    return of(build, loss, (tokens(0, WORDS, 8, 16), tokens(1, 10, 8)))


MODELS = (
    Model("Llama (Keras)", "keras-hub", llama, NOTES),
    Model("Mixtral (Keras)", "keras-hub", mixtral, NOTES),
    Model("Gemma 3 (Keras)", "keras-hub", gemma3, NOTES),
    Model("BERT (Keras)", "keras-hub", bert, NOTES),
)
