"""The models and data of the benchmarks: a ViT and a GPT of Equinox layers, plain f32.

Nothing here knows about mixed precision: every mode of a benchmark gets the same model,
the same batches and the same loss, and differs only in what it does around them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray

Batch = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitSize:
    """Shape of a vision transformer; the defaults are ViT-Base/16 at 224²."""

    image: int = 224
    patch: int = 16
    features: int = 768
    hidden: int = 3072
    heads: int = 12
    depth: int = 12
    classes: int = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptSize:
    """Shape of a decoder with a tied head; the defaults are GPT-2 124M."""

    vocabulary: int = 50257
    context: int = 1024
    features: int = 768
    heads: int = 12
    depth: int = 12


SIZES: dict[str, VitSize | GptSize] = {
    "vit-base": VitSize(),
    "gpt2": GptSize(),
    "gpt-1b": GptSize(features=2048, heads=16, depth=20),
    "tiny": VitSize(
        image=32, patch=8, features=64, hidden=128, heads=4, depth=2, classes=10
    ),
    "tiny-gpt": GptSize(vocabulary=256, context=32, features=64, heads=4, depth=2),
}


class Block(eqx.Module):
    """A pre-norm transformer block on one sequence."""

    norm_attention: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm_mlp: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, features: int, hidden: int, heads: int, key: PRNGKeyArray):
        attention, up, down = jax.random.split(key, 3)
        self.norm_attention = eqx.nn.LayerNorm(features)
        self.attention = eqx.nn.MultiheadAttention(
            heads,
            features,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=attention,
        )
        self.norm_mlp = eqx.nn.LayerNorm(features)
        self.up = eqx.nn.Linear(features, hidden, key=up)
        self.down = eqx.nn.Linear(hidden, features, key=down)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Maps (tokens, features) to the same shape."""
        h = jax.vmap(self.norm_attention)(x)
        x = x + self.attention(h, h, h, mask)
        h = jax.vmap(self.up)(jax.vmap(self.norm_mlp)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class Vit(eqx.Module):
    """A vision transformer on one image (3, height, width)."""

    embed: eqx.nn.Linear
    class_token: Array
    position: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, size: VitSize, key: PRNGKeyArray):
        embed, token, position, head, *blocks = jax.random.split(key, 4 + size.depth)
        tokens = (size.image // size.patch) ** 2 + 1
        self.embed = eqx.nn.Linear(3 * size.patch**2, size.features, key=embed)
        self.class_token = 0.02 * jax.random.normal(token, (1, size.features))
        self.position = 0.02 * jax.random.normal(position, (tokens, size.features))
        self.blocks = [Block(size.features, size.hidden, size.heads, k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(size.features)
        self.head = eqx.nn.Linear(size.features, size.classes, key=head)
        self.patch = size.patch

    def __call__(self, image: Array) -> Array:
        """Returns the logits of the classes."""
        channels, height, width = image.shape
        p = self.patch
        grid = image.reshape(channels, height // p, p, width // p, p)
        patches = grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels * p * p)
        x = jax.vmap(self.embed)(patches)
        x = jnp.concatenate([self.class_token, x]) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


class Gpt(eqx.Module):
    """A decoder on one sequence of tokens; the head is the embedding, transposed."""

    embed: Array
    position: Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, size: GptSize, key: PRNGKeyArray):
        embed, position, *blocks = jax.random.split(key, 2 + size.depth)
        shape = (size.vocabulary, size.features)
        self.embed = 0.02 * jax.random.normal(embed, shape)
        self.position = 0.02 * jax.random.normal(
            position, (size.context, size.features)
        )
        self.blocks = [
            Block(size.features, 4 * size.features, size.heads, k) for k in blocks
        ]
        self.norm = eqx.nn.LayerNorm(size.features)

    def __call__(self, tokens: Array) -> Array:
        """Returns the logits of each next token, (tokens, vocabulary)."""
        (length,) = tokens.shape
        mask = jnp.tril(jnp.ones((length, length), bool))
        x = self.embed[tokens] + self.position[:length]
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.norm)(x) @ self.embed.T


def _cross_entropy(logits: Array, labels: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )
    return losses.mean()


def vit_loss(model: Vit, batch: Batch) -> Array:
    """Mean cross-entropy, computed in f32 whatever dtype the logits have."""
    return _cross_entropy(jax.vmap(model)(batch["image"]), batch["label"])


def gpt_loss(model: Gpt, batch: Batch) -> Array:
    """Mean next-token cross-entropy, computed in f32."""
    tokens = batch["tokens"]
    return _cross_entropy(jax.vmap(model)(tokens[:, :-1]), tokens[:, 1:])


def vit_batch(size: VitSize, batch: int, key: PRNGKeyArray) -> Batch:
    """Noise images over a pattern of their class: random, yet learnable."""
    image, label = jax.random.split(key)
    # The patterns belong to the task, not to the batch: one fixed key.
    shape = (size.classes, 3, size.patch, size.patch)
    patterns = jax.random.normal(jax.random.key(7), shape)
    labels = jax.random.randint(label, (batch,), 0, size.classes)
    repeat = size.image // size.patch
    signal = jnp.tile(patterns[labels], (1, 1, repeat, repeat))
    noise = jax.random.normal(image, (batch, 3, size.image, size.image))
    return {"image": 0.5 * signal + noise, "label": labels}


def gpt_batch(size: GptSize, batch: int, length: int, key: PRNGKeyArray) -> Batch:
    """Tokens with about Zipf's frequencies, so that there is something to learn."""
    uniform = jax.random.uniform(key, (batch, length + 1))
    tokens = jnp.floor(size.vocabulary**uniform).astype(jnp.int32) - 1
    return {"tokens": jnp.clip(tokens, 0, size.vocabulary - 1)}


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its loss and some batches, all f32 and on the device."""

    model: Any
    loss: Callable[[Any, Batch], Array]
    batches: list[Batch]


def make_task(
    name: str, batch: int, *, batches: int = 2, length: int | None = None, seed: int = 0
) -> Task:
    """Builds a task of `SIZES`; the same arguments give the same numbers.

    Args:
        name: A key of `SIZES`.
        batch: Examples in a batch.
        batches: How many batches; a benchmark takes them in turn.
        length: Tokens of a sequence, at most the context (GPT only).
        seed: Of the parameters and the data.
    """
    size = SIZES[name]
    model_key, *data_keys = jax.random.split(jax.random.key(seed), 1 + batches)
    # One compilation for the whole model instead of one per leaf.
    if isinstance(size, VitSize):
        model = eqx.filter_jit(Vit)(size, model_key)
        make = jax.jit(lambda key: vit_batch(size, batch, key))
        return Task(model, vit_loss, [make(key) for key in data_keys])
    model = eqx.filter_jit(Gpt)(size, model_key)
    tokens = length or size.context
    make = jax.jit(lambda key: gpt_batch(size, batch, tokens, key))
    return Task(model, gpt_loss, [make(key) for key in data_keys])
