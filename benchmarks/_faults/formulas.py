"""Formulas that need more range or digits than a 16-bit format has."""

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from _faults.table import (
    BF16,
    F16,
    Case,
    cast,
    cross_entropy,
    given,
    in_low,
    linear,
    mlp,
    normal,
    planted,
    weight,
)


@planted("attention/softmax", "overflow")
@given(
    {name: weight(i, 16, 16, scale=2.0) for i, name in enumerate(("wq", "wk", "wv"))},
    normal(9, 2, 12, 16),
    how=F16,
)
def softmax_without_shift(params, x):
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in ("wq", "wk", "wv"))
        scores = q @ k.swapaxes(-1, -2) / 4
        with jax.named_scope("softmax"):
            e = jnp.exp(scores)  # <- softmax_without_shift
            p = e / e.sum(-1, keepdims=True)
        out = p @ v
    return jnp.mean(jnp.square(out))


@planted("head", "overflow")
@given(mlp(0, 8, 32, 10), normal(3, 16, 8, scale=3), jnp.arange(16) % 10)
def softmax_without_shift_in_f32(params, x, y):
    logits = linear(params["layer1"], jax.nn.relu(linear(params["layer0"], x)))
    with jax.named_scope("head"):
        e = jnp.exp(logits * 40)  # <- softmax_without_shift_in_f32
        p = e / e.sum(-1, keepdims=True)
    return -jnp.mean(jnp.log(jnp.take_along_axis(p, y[:, None], -1)))


@planted("norm", "cancellation")
@given(mlp(0, 8, 64, 4), normal(4, 16, 8), how=BF16)
def variance_from_squares(params, x):
    def norm(x):
        mean = x.mean(-1, keepdims=True)
        var = (x * x).mean(-1, keepdims=True) - mean * mean  # <- variance_from_squares
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    h = linear(params["layer0"], x) + 40
    return jnp.mean(linear(params["layer1"], norm(h))[:, 0] ** 2)


@planted("batch_norm", "cancellation")
def variance_from_squares_in_f16():
    def batch_norm(params, x):
        second = jnp.mean(jnp.square(x), axis=0)
        first = jnp.mean(x, axis=0)
        spread = second - jnp.square(first)  # <- variance_from_squares_in_f16
        return (x - first) / jnp.sqrt(spread + 1e-3) * params["scale"]

    def loss(params, x):
        with jax.named_scope("batch_norm"):
            h = batch_norm(params["norm"], x @ params["w"] + params["shift"])
        return jnp.mean(jax.nn.softplus(h @ params["head"]))

    params = {
        "w": weight(0, 6, 12),
        "shift": jnp.full(12, 90.0),
        "norm": {"scale": jnp.ones(12)},
        "head": weight(1, 12, 1),
    }
    return Case(in_low(loss, jnp.float16), (params, normal(2, 32, 6)))


@planted("energy", "overflow")
@given({"w": weight(0, 8, 8)}, normal(1, 4, 8), how=F16)
def large_constant(params, x):
    def energy(h):
        return 1e3 * h * 500.0  # <- large_constant

    return jnp.mean(jnp.tanh(energy(x @ params["w"]) * 1e-5))


@planted("penalty", "constant")
@given({"w": weight(0, 8, 8)}, normal(1, 4, 8), how=F16)
def constant_beyond_f16(params, x):
    h = x @ params["w"]
    with jax.named_scope("penalty"):
        cost = jax.nn.relu(h - 1) * 1e6  # <- constant_beyond_f16
    return jnp.mean(cost) * 1e-6 + jnp.mean(h)


@planted("table", "overflow")
def large_table_cast_to_f16():
    energies = np.array([1.0, 2e3, 7e4, 3e5], np.float32)

    def loss(params, x):
        with jax.named_scope("table"):
            scaled = jnp.asarray(energies).astype(x.dtype)  # <- large_table_cast_to_f16
        return jnp.mean(jax.nn.sigmoid((x @ params["w"]) * scaled))

    return Case(in_low(loss, jnp.float16), ({"w": weight(0, 8, 4)}, normal(1, 4, 8)))


@planted("norm_of", "underflow")
@given({"w": weight(0, 8, 16)}, normal(1, 6, 8), how=F16)
def norm_of_small_numbers(params, x):
    def norm_of(x):
        squares = x * x  # <- norm_of_small_numbers
        return jnp.sqrt(squares.sum(-1, keepdims=True))

    h = x @ params["w"] * 1e-4
    return jnp.mean((h / norm_of(h))[:, 0])


@planted("rms", "overflow")
@given({"w": weight(0, 8, 16), "out": weight(1, 16, 4)}, normal(1, 6, 8), how=F16)
def squares_beyond_f16(params, x):
    def rms(x):
        power = jnp.square(x)  # <- squares_beyond_f16
        return x * jax.lax.rsqrt(power.mean(-1, keepdims=True) + 1e-6)

    with jax.named_scope("block0/rms"):
        h = rms(x @ params["w"] * 300)
    return jnp.mean(jnp.square(h @ params["out"]))


@planted("layer_norm", "constant")
@given({"w": weight(0, 8, 16)}, normal(1, 6, 8).at[2].set(0.0), how=F16)
def epsilon_lost_in_f16(params, x):
    def layer_norm(x, eps=1e-12):
        centred = x - x.mean(-1, keepdims=True)
        var = jnp.square(centred).mean(-1, keepdims=True)
        return centred / jnp.sqrt(var + eps)  # <- epsilon_lost_in_f16

    return jnp.mean(layer_norm(jax.nn.relu(x @ params["w"]))[..., 0])


@planted("rope", "precision")
@given(
    {"wq": weight(0, 16, 16), "wk": weight(1, 16, 16)}, normal(2, 1, 1200, 16), how=BF16
)
def rope_in_bf16(params, x):
    def rope(x):
        half = x.shape[-1] // 2
        freqs = 10000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
        angles = jnp.arange(x.shape[-2]).astype(x.dtype)[:, None] * freqs
        cos, sin = jnp.cos(angles), jnp.sin(angles)  # <- rope_in_bf16
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    q, k = rope(x @ params["wq"]), rope(x @ params["wk"])
    p = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    return jnp.mean(jnp.square(p @ x))


@planted("fourier", "precision")
def fourier_features_in_bf16():
    def fourier(x):
        return jnp.sin(2 * jnp.pi * 512 * x)  # <- fourier_features_in_bf16

    def loss(params, x):
        return jnp.mean(jnp.square(fourier(x) @ params["w"]))

    x = jnp.abs(normal(3, 64, 8))
    return Case(
        lambda p, x: loss(cast(p, "bfloat16"), x.astype("bfloat16")).astype("float32"),
        ({"w": weight(0, 8, 4)}, x),
    )


@planted("masked_softmax", "constant", "nan")
def row_masked_completely():
    def masked_softmax(scores, mask):
        masked = jnp.where(mask, scores, -jnp.inf)  # <- row_masked_completely
        return jax.nn.softmax(masked, -1)

    def loss(params, x, mask):
        q, k = x @ params["wq"], x @ params["wk"]
        p = masked_softmax(q @ k.swapaxes(-1, -2), mask)
        return jnp.mean(jnp.square(p @ x))

    params = {"wq": weight(0, 8, 8), "wk": weight(1, 8, 8)}
    mask = jnp.tril(jnp.ones((6, 6), bool)).at[0].set(False)
    return Case(mpx.amp(loss, "bf16"), (params, normal(2, 3, 6, 8), mask))


@planted("attend", "constant", "nan")
def fill_value_beyond_f16():
    def attend(q, k, v, mask):
        s = q @ k.swapaxes(-1, -2)
        s = jnp.where(mask, s, -1e9)  # <- fill_value_beyond_f16
        return jax.nn.softmax(s, -1) @ v

    def loss(params, x, mask):
        out = attend(x @ params["wq"], x @ params["wk"], x, mask)
        return jnp.mean(jnp.square(out))

    params = {"wq": weight(0, 8, 8), "wk": weight(1, 8, 8)}
    mask = jnp.ones((6, 6), bool).at[4].set(False)
    return Case(in_low(loss, jnp.float16), (params, normal(2, 3, 6, 8), mask))


@planted("attend", "constant", "nan", "overflow")
def additive_mask_beyond_f16():
    def attend(q, k, v, mask):
        bias = (1.0 - mask) * -1e30  # <- additive_mask_beyond_f16
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) + bias, -1) @ v

    def loss(params, x, mask):
        out = attend(x @ params["wq"], x @ params["wk"], x, mask)
        return jnp.mean(jnp.square(out))

    params = {"wq": weight(0, 8, 8), "wk": weight(1, 8, 8)}
    mask = jnp.tril(jnp.ones((6, 6)))
    return Case(in_low(loss, jnp.float16), (params, normal(2, 3, 6, 8), mask))


@planted("attn", "overflow")
@given(
    {name: weight(i, 64, 64, scale=90.0) for i, name in enumerate(("wq", "wk", "wv"))},
    normal(5, 2, 10, 64),
    how=mpx.amp(dtype="f16"),
    scaling=mpx.StaticLossScaling(8.0),
)
def attention_logits_beyond_f16(params, x):
    with jax.named_scope("attn"):
        q, k = x @ params["wq"], x @ params["wk"]
        s = jnp.einsum("bqd,bkd->bqk", q, k)  # <- attention_logits_beyond_f16
        p = jax.nn.softmax(s / 8)
    return jnp.mean(jnp.square(p @ (x @ params["wv"])))


@planted("nll", "underflow", "singularity")
@given(mlp(0, 6, 5), normal(1, 12, 6, scale=2), jnp.arange(12) % 5, how=F16)
def log_of_underflowed_probability(params, x, labels):
    def nll(p, labels):
        picked = jnp.take_along_axis(p, labels[:, None], -1)
        return -jnp.mean(jnp.log(picked))  # <- log_of_underflowed_probability

    return nll(jax.nn.softmax(linear(params["layer0"], x) * 12), labels)


@planted("head", "cancellation", "underflow")
@given({"w": jnp.eye(4), "head": jnp.full((4, 1), 2.0)}, jnp.ones((16, 4)), how=mpx.amp)
def log_of_one_minus_sigmoid(params, x):
    h = jax.nn.relu(x @ params["w"])
    with jax.named_scope("head"):
        p = jax.nn.sigmoid(h @ params["head"])
        q = 1 - p  # <- log_of_one_minus_sigmoid
        return -jnp.mean(jnp.log(q))


@planted("geometric_mean", "overflow", "underflow")
@given({"w": weight(0, 8, 40)}, normal(1, 5, 8), how=F16)
def product_of_many(params, x):
    def geometric_mean(x):
        return jnp.prod(x, -1) ** (1 / x.shape[-1])  # <- product_of_many

    h = jnp.exp(x @ params["w"] * 0.1 + 1)
    return jnp.mean(geometric_mean(h))


@planted("angle", "nan", "singularity")
@given({"w": jnp.eye(12) * 3}, normal(1, 40, 12), how=BF16)
def cosine_beyond_one(params, x):
    def angle(a, b):
        a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        return jnp.arccos(jnp.sum(a * b, -1) + 0.004)  # <- cosine_beyond_one

    h = x @ params["w"]
    return jnp.mean(angle(h, h * 1.5 + 0.25 * x))


@planted("pairwise", "cancellation")
@given({"w": weight(0, 6, 8)}, normal(1, 10, 6), how=BF16)
def squared_distances_by_expansion(params, x):
    def pairwise(x):
        sq = jnp.sum(x * x, -1)
        d = sq[:, None] + sq[None, :] - 2 * x @ x.T  # <- squared_distances_by_expansion
        return d

    h = x @ params["w"] + 25
    return jnp.mean(jnp.exp(-pairwise(h) / 16))


@planted("finite_difference", "cancellation")
@given({"w": weight(0, 6, 8)}, normal(1, 20, 6), how=BF16)
def finite_difference_in_bf16(params, x):
    def finite_difference(f, x, h=1e-2):
        return (f(x + h) - f(x)) / h  # <- finite_difference_in_bf16

    f = lambda z: jnp.tanh(z @ params["w"] + 2.0)  # noqa: E731
    return jnp.mean(jnp.square(finite_difference(f, x)))


@planted("gelu_by_hand", "overflow", "nan")
@given({"w": weight(0, 8, 16)}, normal(1, 6, 8), how=F16)
def cube_in_own_gelu(params, x):
    def gelu_by_hand(x):
        inner = x + 0.044715 * x**3  # <- cube_in_own_gelu
        return 0.5 * x * (1 + jnp.tanh(0.79788 * inner))

    return jnp.mean(gelu_by_hand(x @ params["w"] * 250))


@planted("logsumexp_by_hand", "overflow")
@given(mlp(7, 10, 24, 12), normal(3, 20, 10), jnp.arange(20) % 12, how=F16)
def logsumexp_without_shift(params, x, y):
    def logsumexp_by_hand(z):
        return jnp.log(jnp.sum(jnp.exp(z), -1))  # <- logsumexp_without_shift

    z = linear(params["layer1"], jnp.tanh(linear(params["layer0"], x))) * 9
    return jnp.mean(logsumexp_by_hand(z) - jnp.take_along_axis(z, y[:, None], -1)[:, 0])


@planted("softplus_by_hand", "overflow")
@given({"w": weight(0, 8, 8)}, normal(1, 6, 8), how=F16)
def own_softplus_under_amp_low(params, x):
    def softplus_by_hand(x):
        return jnp.log(1 + jnp.exp(x))  # <- own_softplus_under_amp_low

    h = x @ params["w"] * 30
    return jnp.mean(softplus_by_hand(h))


@planted("bucket", "precision")
@given({"table": normal(0, 600, 4)}, normal(1, 600, 4), how=BF16)
def positions_in_bf16_as_indices(params, x):
    def bucket(table, length, dtype):
        position = jnp.arange(length).astype(dtype)  # <- positions_in_bf16_as_indices
        return table[position.astype(jnp.int32)]

    return jnp.mean(jnp.square(x + bucket(params["table"], x.shape[0], x.dtype)))


@planted("head", "overflow")
@given(
    {**mlp(0, 16, 64), "head": weight(5, 64, 8, scale=9000.0)},
    normal(1, 12, 16, scale=6),
    jnp.arange(12) % 8,
    how=mpx.amp(dtype="f16"),
    scaling=mpx.StaticLossScaling(2.0),
)
def logits_beyond_f16_in_cross_entropy(params, x, y):
    h = jax.nn.relu(linear(params["layer0"], x))
    with jax.named_scope("head"):
        logits = h @ params["head"]  # <- logits_beyond_f16_in_cross_entropy
    return cross_entropy(logits, y)
