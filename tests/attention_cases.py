"""Attention as people write it, what looks like it and is not, and a pretended H200."""

import functools

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.nn import softmax

from models import normal
from mpx._amp import _decide
from mpx._amp import _recognition as found
from mpx._ops import _attention

B, T, H, D = 2, 8, 4, 16


def pretend_h200(monkeypatch):
    """Pretends that this is a machine with an H200 and cuDNN 9.10."""
    module = "jax._src.cudnn.fused_attention_stablehlo"
    for owner in (_attention, _decide, found):
        monkeypatch.setattr(owner, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{module}.check_compute_capability", lambda _: True)
    monkeypatch.setattr(_attention, "LEAST", {9: 0})
    _attention._reason_by_jax.cache_clear()


@pytest.fixture
def h200(monkeypatch):
    pretend_h200(monkeypatch)
    yield
    _attention._reason_by_jax.cache_clear()


Q, K, V = (normal(i, B, T, H, D) for i in range(3))
X = normal(3, B, T, H * D)
TRIL = np.tril(np.ones((T, T), bool))
PADDED = jnp.arange(T)[None] < jnp.array([5, 8])[:, None]  # (B, T), True: a token
NO_KEY = jnp.arange(T)[None] < jnp.array([0, 8])[:, None]  # the first has none
LOWEST = float(jnp.finfo(jnp.float32).min)


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5


def mix(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


def with_scores(change, normalise=softmax):
    """Attention with something done to the scores, given further arguments."""
    return lambda q, k, v, *more: mix(normalise(change(scores(q, k), *more)), v)


# --- Written by hand ------------------------------------------------------------------


def nano_gpt(q, k, v):
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    s = (q @ k.swapaxes(-2, -1)) * (1.0 / np.sqrt(k.shape[-1]))
    s = jnp.where(jnp.tril(jnp.ones((T, T))).reshape(1, 1, T, T) == 0, -jnp.inf, s)
    return (softmax(s, axis=-1) @ v).swapaxes(1, 2).reshape(B, T, H * D)


def grouped(q, k, v):  # as in Llama and Gemma
    k, v = k[:, :, :2], v[:, :, :2]
    q = q.reshape(B, T, 2, 2, D)
    s = jnp.einsum("btkgd,bskd->bkgts", q, k) / jnp.sqrt(D)
    s = jnp.where(TRIL[None, None, None], s, -2.3819763e38)
    return jnp.einsum("bkgts,bskd->btkgd", softmax(s), v).reshape(B, T, H, D)


def one_key_head(q, k, v):
    s = jnp.einsum("bthd,bsd->bhts", q, k[:, :, 0]) * 0.25
    return jnp.einsum("bhts,bsd->bthd", softmax(s), v[:, :, 0])


def folded(q, k, v):  # heads in the batch, as in older models
    q, k, v = (x.swapaxes(1, 2).reshape(B * H, T, D) for x in (q, k, v))
    p = softmax(lax.batch_matmul(q, k.swapaxes(1, 2)) * 0.25)
    return lax.batch_matmul(p, v)


def swapped(q, k, v):
    s = jnp.einsum("bshd,bthd->bhst", k, q) * 0.25
    return jnp.einsum("bshd,bhst->bthd", v, softmax(s, axis=2))


def by_hand(s):
    s = s - (1 - TRIL) * 1e9
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def iota_mask(s):
    rows, keys = (lax.broadcasted_iota(jnp.int32, (1, 1, T, T), i) for i in (2, 3))
    return jnp.where(rows >= keys, s, LOWEST)


def window(s):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    return jnp.where((distance >= 0) & (distance < 3), s, -1e9)


def alibi(s):
    slopes = 2.0 ** -jnp.arange(1.0, H + 1)
    distance = jnp.arange(T)[None] - jnp.arange(T)[:, None]
    s = s + slopes[:, None, None] * distance
    return jnp.where(TRIL, s, -1e30)


def padding(s, tokens, fill=LOWEST):
    return jnp.where(tokens[:, None, None], s, fill)


def added_padding(s, tokens):  # Hugging Face
    bias = lax.select(
        tokens, jnp.zeros((B, T)), jnp.full((B, T), jnp.finfo(jnp.float32).min)
    )
    return s + bias[:, None, None]


def added_both(s, tokens):  # GPT-2 of Hugging Face
    keep = TRIL[None, None] & tokens[:, None, None]
    return s + lax.select(keep, jnp.zeros(keep.shape), jnp.full(keep.shape, LOWEST))


def table_and_padding(s, bias, tokens):  # T5 of Hugging Face
    places = (jnp.arange(T)[:, None] - jnp.arange(T)) % 4
    padding = jnp.where(tokens, 0.0, LOWEST)[:, None, None]
    return s + (bias[places].transpose(2, 0, 1)[None] + padding)


def keras_padding(s, tokens):
    return s + (1.0 - tokens[:, None, None].astype(jnp.float32)) * -1e9


def both(s, tokens, fill=-1e30):
    return jnp.where(tokens[:, None, None] & TRIL, s, fill)


def where(q, k, v, tokens):
    mask = jnp.broadcast_to(tokens[:, None, None], (B, H, T, T))
    return mix(softmax(scores(q, k), where=mask), v)


def masked_by_hand(s, tokens):
    keep = jnp.broadcast_to(tokens[:, None, None], s.shape)
    s = jnp.where(keep, s, -1e30)
    e = jnp.where(keep, jnp.exp(s - s.max(-1, keepdims=True)), 0.0)
    return e / e.sum(-1, keepdims=True)


def table(s, bias):  # T5: an embedding of distances
    places = (jnp.arange(T)[:, None] - jnp.arange(T)) % 4
    return s + bias[places].transpose(2, 0, 1)[None]


def low(func):
    """The same with 16-bit operands and result."""

    def call(*args):
        args = [a.astype(jnp.bfloat16) if a.dtype == jnp.float32 else a for a in args]
        return func(*args).astype(jnp.float32)

    return call


def odd(func):
    return lambda q, k, v, *more: func(q[:, :7], k[:, :5], v[:, :5], *more)


def small_heads(func):
    return lambda q, k, v, *more: func(q[..., :12], k[..., :12], v[..., :9], *more)


def nothing(s):
    return s


dpa = jax.nn.dot_product_attention
ARRAYS = (Q, K, V)
BY_HAND = {
    "einsum": (with_scores(nothing), ARRAYS),
    "nanoGPT": (nano_gpt, ARRAYS),
    "grouped": (grouped, ARRAYS),
    "one head of keys": (one_key_head, ARRAYS),
    "heads in the batch": (folded, ARRAYS),
    "swapped operands": (swapped, ARRAYS),
    "softmax by hand": (with_scores(nothing, by_hand), ARRAYS),
    "softmax of two jits": (
        with_scores(jax.jit(nothing), jax.jit(lambda s: softmax(s))),
        ARRAYS,
    ),
    "mask of heads": (
        with_scores(
            nothing,
            lambda s: jnp.einsum("...hqk,h->...hqk", softmax(s), jnp.ones((2, H))[0]),
        ),
        ARRAYS,
    ),
    "iota": (with_scores(iota_mask), ARRAYS),
    "constant": (with_scores(lambda s: jnp.where(TRIL, s, -1e30)), ARRAYS),
    "added constant": (
        with_scores(lambda s: s + jnp.where(TRIL, 0.0, -1e9)),
        ARRAYS,
    ),
    "window": (with_scores(window), ARRAYS),
    "ALiBi": (with_scores(alibi), ARRAYS),
    "T5": (with_scores(table), (*ARRAYS, normal(4, 4, H))),
    "bias of each": (with_scores(lambda s, b: s + b), (*ARRAYS, normal(4, B, H, T, T))),
    "bias of keys": (
        with_scores(lambda s, b: s + b[:, None, None]),
        (*ARRAYS, normal(4, B, T)),
    ),
    "bias of pairs": (
        with_scores(lambda s, x, w: s + jnp.moveaxis(x @ w, -1, 0)),
        (*ARRAYS, normal(4, T, T, 8), normal(5, 8, H)),
    ),
    "padding": (with_scores(padding), (*ARRAYS, PADDED)),
    "padding, added": (with_scores(added_padding), (*ARRAYS, PADDED)),
    "padding and causal, added": (with_scores(added_both), (*ARRAYS, PADDED)),
    "T5, padding": (
        with_scores(table_and_padding),
        (*ARRAYS, normal(4, 4, H), PADDED),
    ),
    "padding of Keras": (with_scores(keras_padding), (*ARRAYS, PADDED)),
    "padding, causal": (with_scores(both), (*ARRAYS, PADDED)),
    "softmax where": (where, (*ARRAYS, PADDED)),
    "odd lengths": (odd(with_scores(nothing)), ARRAYS),
    "odd lengths, bias": (
        odd(with_scores(lambda s, b: s + b[:, :, :7, :5])),
        (*ARRAYS, normal(4, 1, H, T, T)),
    ),
    "odd lengths, padding": (
        odd(with_scores(lambda s, x: jnp.where(x[:, None, None, :5], s, -1e30))),
        (*ARRAYS, PADDED),
    ),
    "heads of 12 and 9": (small_heads(with_scores(nothing)), ARRAYS),
    "bf16": (low(with_scores(nothing)), ARRAYS),
    "bf16, f32 softmax": (
        low(with_scores(lambda s: s.astype(jnp.float32))),
        ARRAYS,
    ),
    "JAX": (functools.partial(dpa, is_causal=True), ARRAYS),
    "JAX, xla": (functools.partial(dpa, implementation="xla"), ARRAYS),
    "JAX, bf16": (low(functools.partial(dpa, is_causal=True)), ARRAYS),
    "JAX, bf16, grouped": (
        low(lambda q, k, v: dpa(q, k[:, :, :2], v[:, :, :2])),
        ARRAYS,
    ),
    "JAX, bf16, mask": (
        low(lambda q, k, v, m: dpa(q, k, v, mask=m[:, None, None])),
        (*ARRAYS, PADDED),
    ),
}
EMPTY = {
    "mean": (with_scores(padding), (*ARRAYS, NO_KEY)),
    "mean, added": (with_scores(added_padding), (*ARRAYS, NO_KEY)),
    "mean, causal, added": (with_scores(added_both), (*ARRAYS, NO_KEY[:, ::-1])),
    "mean, T5": (
        with_scores(table_and_padding),
        (*ARRAYS, normal(4, 4, H), NO_KEY),
    ),
    "mean, causal": (with_scores(both), (*ARRAYS, NO_KEY[:, ::-1])),
    "mean, odd": (
        odd(with_scores(lambda s, x: jnp.where(x[:, None, None, :5], s, -1e30))),
        (*ARRAYS, NO_KEY),
    ),
    "softmax of the scores": (with_scores(keras_padding), (*ARRAYS, NO_KEY)),
    "nan": (with_scores(functools.partial(padding, fill=-jnp.inf)), (*ARRAYS, NO_KEY)),
    "nan, by hand": (
        lambda q, k, v, tokens: mix(masked_by_hand(scores(q, k), tokens), v),
        (*ARRAYS, NO_KEY),
    ),
    "zero": (where, (*ARRAYS, NO_KEY)),
}


# --- Libraries ------------------------------------------------------------------------


def linen_layer(mask=None, **options):
    layer = linen.MultiHeadDotProductAttention(H, deterministic=True, **options)
    params = layer.init(jax.random.key(0), X)
    return lambda params, x: layer.apply(params, x, mask=mask), (params, X)


def nnx_layer(**options):
    layer = nnx.MultiHeadAttention(
        H, H * D, rngs=nnx.Rngs(0), decode=False, **{"dropout_rate": 0.0} | options
    )
    graph, state = nnx.split(layer)
    mask = nnx.make_causal_mask(X[..., 0])
    return lambda state, x: nnx.merge(graph, state)(x, mask=mask), (state, X)


def equinox_layer(batched=True, **options):
    layer = eqx.nn.MultiheadAttention(H, H * D, key=jax.random.key(0), **options)
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)
    mask = jnp.asarray(TRIL)

    def call(arrays, x):
        return eqx.combine(arrays, static)(x, x, x, mask=mask)

    if not batched:
        return call, (arrays, X[0])
    return jax.vmap(call, (None, 0)), (arrays, X)


def haiku_layer():
    import haiku as hk

    def call(x):
        initial = hk.initializers.VarianceScaling(1.0)
        layer = hk.MultiHeadAttention(H, D, model_size=H * D, w_init=initial)
        return layer(x, x, x, mask=jnp.asarray(TRIL)[None, None])

    model = hk.without_apply_rng(hk.transform(call))
    return model.apply, (model.init(jax.random.key(0), X), X)


LIBRARIES = {
    "Linen": linen_layer,
    "Linen, causal": lambda: linen_layer(linen.make_causal_mask(X[..., 0])),
    "Linen, padding": lambda: linen_layer(PADDED[:, None, None]),
    "Linen, bf16": lambda: linen_layer(dtype=jnp.bfloat16),
    "Linen, bf16, f32 softmax": lambda: linen_layer(
        dtype=jnp.bfloat16, force_fp32_for_softmax=True
    ),
    "NNX": nnx_layer,
    "NNX, bf16": lambda: nnx_layer(dtype=jnp.bfloat16),
    "Equinox": equinox_layer,
    "Equinox, one example": lambda: equinox_layer(batched=False),
    "Haiku": haiku_layer,
}
