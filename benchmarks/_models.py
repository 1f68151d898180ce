"""The models of the benchmarks, in plain f32, with their losses and data.

A ViT and a GPT of Equinox layers, the same GPT with the attention of Linen and of NNX, and
a decoder in plain functions. Nothing here knows about mixed precision: every mode of a
benchmark gets the same model, the same batches and the same loss, and differs only in what
it does around them.
"""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax

import _measure as measure


class Size(NamedTuple):
    """Shape of a decoder with a tied head, or of a vision transformer."""

    features: int = 768
    heads: int = 12
    depth: int = 12
    vocabulary: int = 50257
    context: int = 1024
    library: str = "equinox"
    image: int = 0  # of a vision transformer, as what follows
    patch: int = 16
    hidden: int = 3072
    classes: int = 1000


TINY = Size(64, 4, 2, 256, 32)
# The defaults are those of GPT-2 124M, and of ViT-Base/16.
SIZES = {
    "vit-base": Size(image=224),
    "vit-desktop": Size(256, 4, image=32, patch=4, hidden=800, classes=100),
    "gpt2": Size(),
    "gpt2-linen": Size(library="linen"),
    "gpt2-nnx": Size(library="nnx"),
    "gpt-1b": Size(2048, 16, 20),
    "tiny": TINY._replace(image=32, patch=8, hidden=128, classes=10),
    "tiny-gpt": TINY,
    "tiny-linen": TINY._replace(library="linen"),
    "tiny-nnx": TINY._replace(library="nnx"),
}
BATCH = {"vit-base": 128, "gpt2": 8, "gpt2-linen": 8, "gpt2-nnx": 8, "gpt-1b": 4}


def cast(tree, dtype):
    """Casts the floating leaves as one does by hand."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


# --- in Equinox ---------------------------------------------------------------------------


class Block(eqx.Module):
    """A pre-norm transformer block on one sequence."""

    norm_attention: eqx.nn.LayerNorm
    attention: Any
    norm_mlp: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, features, hidden, heads, key):
        attention, up, down = jax.random.split(key, 3)
        biases = {f"use_{x}_bias": True for x in ("query", "key", "value", "output")}
        self.norm_attention = eqx.nn.LayerNorm(features)
        self.attention = eqx.nn.MultiheadAttention(
            heads, features, **biases, key=attention
        )
        self.norm_mlp = eqx.nn.LayerNorm(features)
        self.up = eqx.nn.Linear(features, hidden, key=up)
        self.down = eqx.nn.Linear(hidden, features, key=down)

    def __call__(self, x, mask=None):
        h = jax.vmap(self.norm_attention)(x)
        x = x + self.attention(h, h, h, mask)
        h = jax.vmap(self.up)(jax.vmap(self.norm_mlp)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(h))


class Vit(eqx.Module):
    """A vision transformer on one image (3, height, width)."""

    embed: eqx.nn.Linear
    class_token: jax.Array
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, size, key):
        embed, token, position, head, *blocks = jax.random.split(key, 4 + size.depth)
        tokens = (size.image // size.patch) ** 2 + 1
        self.embed = eqx.nn.Linear(3 * size.patch**2, size.features, key=embed)
        self.class_token = 0.02 * jax.random.normal(token, (1, size.features))
        self.position = 0.02 * jax.random.normal(position, (tokens, size.features))
        self.blocks = [Block(size.features, size.hidden, size.heads, k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(size.features)
        self.head = eqx.nn.Linear(size.features, size.classes, key=head)
        self.patch = size.patch

    def __call__(self, image):
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

    embed: jax.Array
    position: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, size, key):
        embed, position, *blocks = jax.random.split(key, 2 + size.depth)
        width, normal = size.features, jax.random.normal
        self.embed = 0.02 * normal(embed, (size.vocabulary, width))
        self.position = 0.02 * normal(position, (size.context, width))
        self.blocks = [Block(width, 4 * width, size.heads, k) for k in blocks]
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, tokens):
        (length,) = tokens.shape
        mask = jnp.tril(jnp.ones((length, length), bool))
        x = self.embed[tokens] + self.position[:length]
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.norm)(x) @ self.embed.T


# --- attention by hand --------------------------------------------------------------------


def cudnn(q, k, v, *, causal=False, **more):
    """Attention in bf16 in cuDNN; odd lengths, which it does not take, are padded."""
    length, keys = q.shape[1], k.shape[1]
    if length % 2 or keys % 2:
        pad = lambda x: jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0)))  # noqa: E731
        q, k, v = map(pad, (q, k, v))
        if not causal and "key_value_seq_lengths" not in more:
            more["key_value_seq_lengths"] = jnp.full(len(q), keys, jnp.int32)
    kernel = "cudnn" if jax.default_backend() == "gpu" else None
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=causal, implementation=kernel, **more
    )
    return out[:, :length]


class ByHand(eqx.Module):
    """Equinox' attention of one sequence, with the product in cuDNN."""

    inner: eqx.nn.MultiheadAttention

    def __call__(self, q, k, v, mask=None):
        inner = self.inner
        projections = inner.query_proj, inner.key_proj, inner.value_proj
        q, k, v = (
            jax.vmap(project)(x).reshape(1, len(x), inner.num_heads, -1)
            for project, x in zip(projections, (q, k, v), strict=True)
        )
        out = cudnn(q, k, v, causal=mask is not None)
        return jax.vmap(inner.output_proj)(out[0].reshape(out.shape[1], -1))


def with_attention_by_hand(model):
    """Returns an Equinox model whose attention is in cuDNN."""
    each = lambda model: [block.attention for block in model.blocks]  # noqa: E731
    return eqx.tree_at(each, model, [ByHand(x) for x in each(model)])


def flax_options(by_hand) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns options of all Flax layers, and of attention, for bf16 by hand."""
    if not by_hand:
        return {}, {}
    attend = lambda q, k, v, **_: cudnn(q, k, v, causal=True)  # noqa: E731
    return {"dtype": jnp.bfloat16}, {"attention_fn": attend}


# --- the GPT in Flax ----------------------------------------------------------------------


def linen_gpt(size, by_hand):
    """Returns `init(key, tokens)` and `apply(params, tokens)` of a GPT of Linen."""
    import flax.linen as nn

    options, attend = flax_options(by_hand)
    norm = functools.partial(nn.LayerNorm, **options)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(size.vocabulary, size.features, **options)
            place = nn.Embed(size.context, size.features, **options)
            x = embed(tokens) + place(jnp.arange(tokens.shape[1]))
            mask = nn.make_causal_mask(tokens)
            for _ in range(size.depth):
                layer = nn.MultiHeadDotProductAttention(
                    size.heads, deterministic=True, **options, **attend
                )
                x = x + layer(norm()(x), mask=mask)
                h = nn.Dense(4 * size.features, **options)(norm()(x))
                x = x + nn.Dense(size.features, **options)(nn.gelu(h))
            return embed.attend(norm()(x))

    return Model().init, Model().apply


def nnx_gpt(size, by_hand):
    """Returns the same of a GPT of NNX."""
    from flax import nnx

    options, attend = flax_options(by_hand)
    width, options["rngs"] = size.features, nnx.Rngs(0)

    class Block(nnx.Module):
        def __init__(self):
            self.first = nnx.LayerNorm(width, **options)
            self.second = nnx.LayerNorm(width, **options)
            self.attention = nnx.MultiHeadAttention(
                size.heads, width, decode=False, **options, **attend
            )
            self.up = nnx.Linear(width, 4 * width, **options)
            self.down = nnx.Linear(4 * width, width, **options)

        def __call__(self, x, mask):
            x = x + self.attention(self.first(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(size.vocabulary, width, **options)
            self.place = nnx.Embed(size.context, width, **options)
            self.blocks = nnx.List([Block() for _ in range(size.depth)])
            self.norm = nnx.LayerNorm(width, **options)

        def __call__(self, tokens):
            x = self.embed(tokens) + self.place(jnp.arange(tokens.shape[1]))
            mask = nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.embed.attend(self.norm(x))

    graph, state = nnx.split(Model())
    return lambda *_: state, lambda state, x: nnx.merge(graph, state)(x)


# --- tasks --------------------------------------------------------------------------------


def cross_entropy(logits, labels):
    """Returns the mean cross entropy, in f32 whatever dtype the logits have."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def vit_batch(size, batch, key):
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


def gpt_batch(size, batch, length, key):
    """Tokens with about Zipf's frequencies, so that there is something to learn."""
    uniform = jax.random.uniform(key, (batch, length + 1))
    tokens = jnp.floor(size.vocabulary**uniform).astype(jnp.int32) - 1
    return {"tokens": jnp.clip(tokens, 0, size.vocabulary - 1)}


class Task(NamedTuple):
    """Parameters (arrays alone), `loss(params, batch)` and some batches, all f32."""

    params: Any
    loss: Any
    batches: list[Any]


def make_task(name, batch, *, batches=2, length=None, by_hand=False, shapes=False):
    """Builds a task of `SIZES`; the same arguments give the same numbers.

    With `by_hand` attention is cuDNN's, and the loss that of bf16 parameters; with `shapes`
    there are no numbers, only shapes.
    """
    size = SIZES[name]
    run = eqx.filter_eval_shape if shapes else eqx.filter_jit(lambda f, *args: f(*args))
    key, *data_keys = jax.random.split(jax.random.key(0), 1 + batches)
    if size.image:
        make = functools.partial(vit_batch, size, batch)
        split = lambda data: (data["image"], data["label"])  # noqa: E731
    else:
        make = functools.partial(gpt_batch, size, batch, length or size.context)
        split = lambda data: (data["tokens"][:, :-1], data["tokens"][:, 1:])  # noqa: E731
    data = [run(make, key) for key in data_keys]
    if size.library == "equinox":
        build = functools.partial(Vit if size.image else Gpt, size)
        is_array = lambda x: eqx.is_inexact_array(x) or hasattr(x, "shape")  # noqa: E731
        # Op by op: layers of one shape share compiled programs.
        model = run(build, key) if shapes else measure.on_host(build, key)
        params, static = eqx.partition(model, is_array)

        def apply(params, x):
            model = eqx.combine(params, static)
            return jax.vmap(with_attention_by_hand(model) if by_hand else model)(x)
    else:
        gpt = linen_gpt if size.library == "linen" else nnx_gpt
        init, apply = gpt(size, by_hand)  # pyright: ignore[reportAssignmentType]
        begin = run if shapes else functools.partial(measure.on_host, run)
        params = begin(init, jax.random.key(0), data[0]["tokens"][:, :-1])

    def loss(params, batch):
        inputs, targets = split(batch)
        return cross_entropy(apply(params, inputs), targets)

    return Task(params, loss, data)


# --- a decoder in plain functions ---------------------------------------------------------


class Decoder(NamedTuple):
    """Sizes of a decoder, and the sequences of one step on each device.

    Its layers are scanned and rematerialised, with RMSNorm and rotary positions. A `gated`
    one has the matrices of Llama; otherwise q, k and v are one, and the MLP has a gelu.
    """

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000
    sequences: int = 1
    length: int = 4096
    gated: bool = True

    @property
    def tokens(self):
        return self.sequences * self.length

    def shapes(self):
        """Returns the shapes of the parameters."""
        n, d, hidden = self.layers, self.width, self.hidden
        narrow = d // self.heads * self.kv_heads
        layers = {"o": (n, d, d), "up": (n, d, hidden), "down": (n, hidden, d)}
        if self.gated:
            layers = {"q": (n, d, d), "k": (n, d, narrow), "v": (n, d, narrow),
                      "gate": (n, d, hidden), **layers}  # fmt: skip
        else:
            layers = {"qkv": (n, d, 3 * d), **layers}
        layers |= {"norm1": (n, d), "norm2": (n, d)}
        table = (self.vocabulary, d)
        return {"embed": table, "layers": layers, "norm": (d,), "head": table[::-1]}

    def init(self, key):
        """Returns f32 parameters to start with."""
        keys = iter(jax.random.split(key, 16))
        # The outputs of a block are added to the stream: smaller with more of them.
        scales = dict.fromkeys(("o", "down"), (2 * self.layers) ** -0.5) | {"head": 0.5}

        def draw(name):
            shape = shapes["layers"].get(name) or shapes[name]
            if "norm" in name:
                return jnp.ones(shape)
            fan = 0.02 if name == "embed" else shape[-2] ** -0.5 * scales.get(name, 1.0)
            return fan * normal(next(keys), shape)

        normal, shapes = jax.random.normal, self.shapes()
        embed, layers = draw("embed"), {name: draw(name) for name in shapes["layers"]}
        return {"embed": embed, "layers": layers} | {
            x: draw(x) for x in ("head", "norm")
        }

    def loss(self, params, tokens, *, place=lambda x: x, attention=None):
        """Mean cross entropy of the next token; tokens are (batch, length + 1).

        `place` pins what is between the blocks to the devices that have it.
        """
        split = self.width // self.heads

        @jax.checkpoint
        def block(h, w):
            x = rms_norm(h, w["norm1"])
            if self.gated:
                q, k, v = (x @ w[name] for name in "qkv")
            else:
                q, k, v = jnp.split(x @ w["qkv"], 3, -1)
            q, k, v = (y.reshape(*x.shape[:2], -1, split) for y in (q, k, v))
            mixed = jax.nn.dot_product_attention(
                rotate(q), rotate(k), v, is_causal=True, implementation=attention
            )
            h = place(h + mixed.reshape(h.shape) @ w["o"])
            x = rms_norm(h, w["norm2"])
            up = x @ w["up"]
            y = jax.nn.silu(x @ w["gate"]) * up if self.gated else jax.nn.gelu(up)
            return place(h + y @ w["down"])

        h = place(params["embed"][tokens[:, :-1]])
        h, _ = lax.scan(lambda h, w: (block(h, w), None), h, params["layers"])
        logits = rms_norm(h, params["norm"]) @ params["head"]
        logits = logits.astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def batch(self, seed=1):
        """Returns random tokens."""
        shape = (self.sequences, self.length + 1)
        return jax.random.randint(jax.random.key(seed), shape, 0, self.vocabulary)


def rms_norm(x, weight):
    wide = x.astype(jnp.float32)
    size = lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
    return (wide * size).astype(x.dtype) * weight


def rotate(x):
    """Rotary positions; x is (batch, length, heads, width)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rate
    cos, sin = (f(angle)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
