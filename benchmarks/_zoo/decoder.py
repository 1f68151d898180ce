"""A decoder in Linen that reads bytes, at the size of the zoo and at those of a GPU.

Built like google-deepmind/nanodo: norms before attention and MLP, learnt positions, gelu,
no biases, and a head that is the embedding, or one of its own.
"""

# pyright: reportMissingImports=false

import dataclasses
import functools

import jax
import jax.numpy as jnp

from _zoo.model import Case, Lazy, Model, key, next_token

nn = Lazy("flax.linen")

VOCAB = 256


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a decoder and of its batch."""

    width: int
    heads: int
    layers: int
    sequences: int
    length: int
    tied: bool = True


SIZES = {
    "tiny": Size(64, 4, 2, sequences=4, length=32),
    "43M": Size(768, 12, 6, sequences=32, length=512),
    "405M": Size(2048, 16, 8, sequences=8, length=1024),
}


def decoder(size, dtype=None):
    """Returns the module; `dtype` is its own option for mixed precision."""
    norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=dtype)
    dense = functools.partial(nn.Dense, use_bias=False, dtype=dtype)

    class Decoder(nn.Module):
        """From ids to logits."""

        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(VOCAB, size.width, name="embed")
            places = nn.Embed(size.length, size.width, name="positions")
            x = embed(ids) + places(jnp.arange(ids.shape[1]))
            for _ in range(size.layers):
                x = x + self.attention(norm()(x))
                x = x + dense(size.width)(nn.gelu(dense(4 * size.width)(norm()(x))))
            x = norm()(x)
            return embed.attend(x) if size.tied else dense(VOCAB, name="head")(x)

        def attention(self, x):
            project = functools.partial(
                nn.DenseGeneral,
                (size.heads, size.width // size.heads),
                use_bias=False,
                dtype=dtype,
            )
            q, k, v = (project()(x) for _ in range(3))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)
            mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
            scores = jnp.where(mask, scores.astype(jnp.float32), -1e30)
            weights = nn.softmax(scores).astype(v.dtype)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
            return nn.DenseGeneral(
                size.width, axis=(-2, -1), use_bias=False, dtype=dtype
            )(mixed)

    return Decoder()


def case(size, seed=0):
    """Returns the decoder of that size with a batch of Python's own documentation."""
    from text import batches, read_text

    def of(module):
        return lambda params, ids: next_token(module.apply(params, ids), ids)

    source = size  # the fields that `batches` reads
    ids = jnp.asarray(next(batches(read_text()[0], source, seed)))[:, :-1]
    module = decoder(size)
    params = jax.jit(module.init)(key(seed), ids[:1])
    return Case(of(module), params, ids, of(decoder(size, jnp.bfloat16)))


def untied():
    """Returns the tiny decoder with a head of its own."""
    return case(dataclasses.replace(SIZES["tiny"], tied=False))


MODELS = (
    Model("decoder, tied (Linen)", "flax", lambda: case(SIZES["tiny"])),
    Model("decoder, own head (Linen)", "flax", untied),
)
