"""A small vision transformer in Equinox. Nothing in it knows about precision."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of a `ViT`: `features` wide, `hidden` neurons in each residual MLP."""

    features: int
    hidden: int
    layers: int
    heads: int
    patch: int


class Block(eqx.Module):
    """Attention and MLP, each behind a norm and inside a residual connection."""

    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, size: Size, key: PRNGKeyArray) -> None:
        key1, key2 = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(size.features)
        self.attention = eqx.nn.MultiheadAttention(size.heads, size.features, key=key1)
        self.norm2 = eqx.nn.LayerNorm(size.features)
        self.mlp = eqx.nn.MLP(
            size.features, size.features, size.hidden, 1, jax.nn.gelu, key=key2
        )

    def __call__(
        self, tokens: Float[Array, "n features"]
    ) -> Float[Array, "n features"]:
        normed = jax.vmap(self.norm1)(tokens)
        tokens = tokens + self.attention(normed, normed, normed)
        return tokens + jax.vmap(self.mlp)(jax.vmap(self.norm2)(tokens))


class ViT(eqx.Module):
    """Patches to tokens, transformer blocks, mean over the tokens, class logits."""

    embed: eqx.nn.Linear
    position: Float[Array, "n features"]
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(
        self,
        size: Size,
        image_shape: tuple[int, int, int],
        classes: int,
        *,
        key: PRNGKeyArray,
    ) -> None:
        height, width, channels = image_shape
        if height % size.patch or width % size.patch:
            raise ValueError(
                f"Images of {height}×{width} do not divide into patches of "
                f"{size.patch}×{size.patch}; choose another preset."
            )
        n = (height // size.patch) * (width // size.patch)
        keys = jax.random.split(key, size.layers + 3)
        self.embed = eqx.nn.Linear(size.patch**2 * channels, size.features, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (n, size.features))
        self.head = eqx.nn.Linear(size.features, classes, key=keys[2])
        self.blocks = [Block(size, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(size.features)
        self.patch = size.patch

    def __call__(
        self, image: Float[Array, "height width channels"]
    ) -> Float[Array, " classes"]:
        height, width, channels = image.shape
        p = self.patch
        patches = image.reshape(height // p, p, width // p, p, channels)
        patches = patches.swapaxes(1, 2).reshape(-1, p * p * channels)
        tokens = jax.vmap(self.embed)(patches) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(jnp.mean(tokens, axis=0)))
