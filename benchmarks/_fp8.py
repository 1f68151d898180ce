"""The models of the fp8 benchmarks, as plain functions that know nothing of fp8."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpx._jax._devices import cuda_capability

Params = dict[str, Any]
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Size:
    """The shape of a model and of its batch."""

    width: int
    hidden: int
    layers: int = 1
    heads: int = 1
    vocab: int = 256
    batch: int = 1
    length: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.length


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape) / math.sqrt(shape[-2])


# --- an MLP block, alone or several of them under scan and remat -----------------------


def mlp_params(size: Size, key: jax.Array, *, layers: int | None = None) -> Params:
    """Weights in bf16, with a leading axis if there are several layers."""
    up, down = jax.random.split(key)
    stack = () if layers is None else (layers,)
    return {
        "up": _normal(up, *stack, size.width, size.hidden).astype(BF16),
        "down": _normal(down, *stack, size.hidden, size.width).astype(BF16),
    }


def mlp_loss(params: Params, x: jax.Array) -> jax.Array:
    """One block: up, gelu, down."""
    out = jax.nn.gelu(x @ params["up"]) @ params["down"]
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def tower_loss(params: Params, x: jax.Array) -> jax.Array:
    """Blocks one behind the other, each computed again in the backward pass."""

    @jax.checkpoint
    def block(h: jax.Array, w: Params) -> jax.Array:
        return h + jax.nn.gelu(h @ w["up"]) @ w["down"]

    h, _ = lax.scan(lambda h, w: (block(h, w), None), x, params)
    return jnp.mean(jnp.square(h.astype(jnp.float32)))


# --- a language model ------------------------------------------------------------------


def lm_params(size: Size, key: jax.Array) -> Params:
    """f32 weights of a decoder: rotary attention, gelu MLP, untied head."""
    keys = jax.random.split(key, 7)
    n, d, f = size.layers, size.width, size.hidden
    # The outputs of a block are added to the stream: smaller with more of them.
    small = 1 / math.sqrt(2 * n)
    return {
        "embedding": jax.random.normal(keys[0], (size.vocab, d)) * 0.02,
        "layers": {
            "qkv": _normal(keys[1], n, d, 3 * d),
            "out": _normal(keys[2], n, d, d) * small,
            "up": _normal(keys[3], n, d, f),
            "down": _normal(keys[4], n, f, d) * small,
            "norms": jnp.ones((n, 2, d)),
        },
        "norm": jnp.ones(d),
        "head": _normal(keys[5], d, size.vocab) * 0.5,
    }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    return (wide * size * scale.astype(jnp.float32)).astype(x.dtype)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions; x is (batch, length, heads, width)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def lm_loss(params: Params, tokens: jax.Array, *, heads: int) -> jax.Array:
    """Mean cross-entropy of the next token; tokens are (batch, length + 1)."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    kernel = "xla" if cuda_capability() is None else "cudnn"

    @jax.checkpoint
    def block(h: jax.Array, w: Params) -> jax.Array:
        batch, length, width = h.shape
        qkv = _norm(h, w["norms"][0]) @ w["qkv"]
        split = qkv.reshape(batch, length, 3, heads, width // heads)
        q, k, v = _rotate(split[:, :, 0]), _rotate(split[:, :, 1]), split[:, :, 2]
        mixed = jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=kernel
        )
        h = h + mixed.reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(_norm(h, w["norms"][1]) @ w["up"]) @ w["down"]

    h = params["embedding"][inputs]
    h, _ = lax.scan(lambda h, w: (block(h, w), None), h, params["layers"])
    logits = (_norm(h, params["norm"]) @ params["head"]).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)
