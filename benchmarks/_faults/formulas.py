"""Formulas that need more range or digits than a 16-bit format has; faults of gradients."""

import functools

import jax
import jax.numpy as jnp

import mpx
from _faults.table import (
    BF16,
    F16,
    backward,
    healthy,
    linear,
    mlp,
    normal,
    planted,
    weight,
    weights,
)

ATTENTION = ("wq", "wk", "wv")
X = normal(1, 6, 8)
W, WIDE = {"w": weight(0, 8, 8)}, {"w": weight(0, 8, 16)}

# --- the forward pass -------------------------------------------------------------------


@planted("overflow", mlp(0, 8, 32, 10), normal(3, 16, 8, scale=3), path="head")
def softmax_without_shift_in_f32(params, x):
    logits = linear(params["layer1"], jax.nn.relu(linear(params["layer0"], x)))
    with jax.named_scope("head"):
        e = jnp.exp(logits * 40)  # <- softmax_without_shift_in_f32
        p = e / e.sum(-1, keepdims=True)
    y = jnp.arange(16) % 10
    return -jnp.mean(jnp.log(jnp.take_along_axis(p, y[:, None], -1)))


@planted("cancellation", mlp(0, 8, 64, 4), normal(4, 16, 8), how=BF16, path="norm")
def variance_from_squares(params, x):
    def norm(x):
        mean = x.mean(-1, keepdims=True)
        var = (x * x).mean(-1, keepdims=True) - mean * mean  # <- variance_from_squares
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    h = linear(params["layer0"], x) + 40
    return jnp.mean(linear(params["layer1"], norm(h))[:, 0] ** 2)


@planted("constant", W, normal(1, 4, 8), how=F16, path="penalty")
def constant_beyond_f16(params, x):
    h = x @ params["w"]
    with jax.named_scope("penalty"):
        cost = jax.nn.relu(h - 1) * 1e6  # <- constant_beyond_f16
    return jnp.mean(cost) * 1e-6 + jnp.mean(h)


@planted("underflow", WIDE, X, how=F16, path="norm_of")
def norm_of_small_numbers(params, x):
    def norm_of(x):
        squares = x * x  # <- norm_of_small_numbers
        return jnp.sqrt(squares.sum(-1, keepdims=True))

    h = x @ params["w"] * 1e-4
    return jnp.mean((h / norm_of(h))[:, 0])


@planted("constant", WIDE, X.at[2].set(0.0), how=F16, path="layer_norm")
def epsilon_lost_in_f16(params, x):
    def layer_norm(x, eps=1e-12):
        centred = x - x.mean(-1, keepdims=True)
        var = jnp.square(centred).mean(-1, keepdims=True)
        return centred / jnp.sqrt(var + eps)  # <- epsilon_lost_in_f16

    return jnp.mean(layer_norm(jax.nn.relu(x @ params["w"]))[..., 0])


LONG = weights(16, *ATTENTION[:2]), normal(2, 1, 1200, 16)


@planted("precision", *LONG, how=BF16, path="rope")
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


@planted("precision", {"w": weight(0, 8, 4)}, jnp.abs(normal(3, 64, 8)), how=BF16)
def fourier_features_in_bf16(params, x):
    features = jnp.sin(2 * jnp.pi * 512 * x)  # <- fourier_features_in_bf16
    return jnp.mean(jnp.square(features @ params["w"]))


QK, TOKENS = weights(8, *ATTENTION[:2]), normal(2, 3, 6, 8)
CAUSAL = jnp.tril(jnp.ones((6, 6), bool))


@planted("constant nan", QK, TOKENS, CAUSAL.at[0].set(False), how=mpx.amp)
def row_masked_completely(params, x, mask):
    scores = (x @ params["wq"]) @ (x @ params["wk"]).swapaxes(-1, -2)
    masked = jnp.where(mask, scores, -jnp.inf)  # <- row_masked_completely
    return jnp.mean(jnp.square(jax.nn.softmax(masked, -1) @ x))


@planted("constant nan overflow", QK, TOKENS, jnp.tril(jnp.ones((6, 6))), how=F16)
def additive_mask_beyond_f16(params, x, mask):
    bias = (1.0 - mask) * -1e30  # <- additive_mask_beyond_f16
    scores = (x @ params["wq"]) @ (x @ params["wk"]).swapaxes(-1, -2)
    return jnp.mean(jnp.square(jax.nn.softmax(scores + bias, -1) @ x))


@planted(
    "overflow",
    weights(64, *ATTENTION, scale=90.0),
    normal(5, 2, 10, 64),
    how=mpx.amp(dtype="f16"),
    scaling=mpx.StaticLossScaling(8.0),
    path="attn",
)
def attention_logits_beyond_f16(params, x):
    with jax.named_scope("attn"):
        q, k = x @ params["wq"], x @ params["wk"]
        s = jnp.einsum("bqd,bkd->bqk", q, k)  # <- attention_logits_beyond_f16
        p = jax.nn.softmax(s / 8)
    return jnp.mean(jnp.square(p @ (x @ params["wv"])))


@planted("underflow singularity", mlp(0, 6, 5), normal(1, 12, 6, scale=2), how=F16)
def log_of_underflowed_probability(params, x):
    p, labels = jax.nn.softmax(linear(params["layer0"], x) * 12), jnp.arange(12) % 5
    picked = jnp.take_along_axis(p, labels[:, None], -1)
    return -jnp.mean(jnp.log(picked))  # <- log_of_underflowed_probability


@planted(
    "cancellation underflow",
    {"w": jnp.eye(4), "head": jnp.full((4, 1), 2.0)},
    jnp.ones((16, 4)),
    how=mpx.amp,
    path="head",
)
def log_of_one_minus_sigmoid(params, x):
    h = jax.nn.relu(x @ params["w"])
    with jax.named_scope("head"):
        p = jax.nn.sigmoid(h @ params["head"])
        q = 1 - p  # <- log_of_one_minus_sigmoid
        return -jnp.mean(jnp.log(q))


@planted("nan singularity", {"w": jnp.eye(12) * 3}, normal(1, 40, 12), how=BF16)
def cosine_beyond_one(params, x):
    a = x @ params["w"]
    a, b = (
        v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, a * 1.5 + 0.25 * x)
    )
    return jnp.mean(jnp.arccos(jnp.sum(a * b, -1) + 0.004))  # <- cosine_beyond_one


@planted(
    "cancellation",
    {"w": weight(0, 6, 8)},
    normal(1, 20, 6),
    how=BF16,
    path="finite_difference",
)
def finite_difference_in_bf16(params, x):
    def finite_difference(f, x, h=1e-2):
        return (f(x + h) - f(x)) / h  # <- finite_difference_in_bf16

    f = lambda z: jnp.tanh(z @ params["w"] + 2.0)  # noqa: E731
    return jnp.mean(jnp.square(finite_difference(f, x)))


# --- the backward pass: the loss is fine, mostly ----------------------------------------

SQUARE, SMALL = {"w": weight(0, 4, 4)}, normal(1, 6, 4)


@backward("singularity nan", SQUARE, SMALL, path="distance")
def sqrt_at_zero(params, x):
    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2, -1))  # <- sqrt_at_zero

    h = x @ params["w"]
    return jnp.mean(distance(h[:, None], h[None, :]))


@backward("singularity nan", SQUARE, SMALL.at[3].set(0.0))
def where_after_the_pole(params, x):
    h = x @ params["w"]
    return jnp.mean(jnp.where(h > 0, jnp.log(h), 0.0))  # <- where_after_the_pole


@backward("singularity nan", {**SQUARE, "bias": jnp.zeros(4)}, SMALL)
def norm_at_zero(params, x):
    decay = jnp.linalg.norm(params["bias"])  # <- norm_at_zero
    return jnp.mean(jnp.square(x @ params["w"] + params["bias"])) + 1e-3 * decay


@backward(
    "singularity nan", {"w": jnp.ones((4, 6))}, jnp.round(normal(1, 5, 4)), path="w"
)
def std_of_equal_numbers(params, x):
    h = x @ params["w"]
    spread = jnp.std(h, -1)  # <- std_of_equal_numbers
    return jnp.mean(spread)


@backward(
    "underflow",
    {"w": weight(0, 8, 64), "out": weight(1, 64, 1, scale=2e-3)},
    normal(2, 2048, 8),
    how=F16,
    path="out",
)
def tiny_gradients_in_f16(params, x):
    h = jnp.tanh(x @ params["w"])
    return jnp.mean(h @ params["out"])  # <- tiny_gradients_in_f16


@backward(
    "overflow",
    {**WIDE, "out": weight(1, 16, 2)},
    normal(2, 16, 8, scale=4),
    how=F16,
    scaling=2.0**24,
)
def loss_scale_too_large(params, x):
    out = jax.nn.relu(x @ params["w"]) @ params["out"]
    return jnp.mean(jnp.square(out.astype(jnp.float32)))  # <- loss_scale_too_large


@planted("singularity nan", W, normal(1, 10, 8), path="entropy")
def zero_times_log_of_zero(params, x):
    def entropy(p):
        return -jnp.sum(p * jnp.log(p), -1)  # <- zero_times_log_of_zero

    return jnp.mean(entropy(jax.nn.softmax(x @ params["w"] * 150)))


@planted("singularity nan", SQUARE, SMALL, jnp.array([3.0, 2, 0, 1, 4, 4]))
def division_by_zero(params, x, counts):
    h = jax.nn.relu(x @ params["w"])
    return jnp.mean(h.sum(-1) / counts)  # <- division_by_zero


@planted("input", mlp(0, 4, 4), SMALL.at[2, 1].set(jnp.nan), path="x")
def nan_in_the_batch(params, x):  # <- nan_in_the_batch
    return jnp.mean(jnp.square(linear(params["layer0"], x)))


# --- every number finite, and a result that is 5 to 100 % off ---------------------------


@planted("accumulation", {"w": weight(0, 4, 1)}, normal(1, 300, 4), path="step")
def counter_at_256_of_300(params, x):
    def step(n, m):
        return n + m.astype(jnp.bfloat16), None  # <- counter_at_256_of_300

    count, _ = jax.lax.scan(step, jnp.bfloat16(0), jnp.ones(300, bool))
    return jnp.sum(jnp.square(x @ params["w"])) / count.astype(jnp.float32)


@planted("accumulation", SQUARE, normal(1, 512, 4), path="rows")
def difference_of_a_running_sum(params, x):
    def rows(h):
        total = jnp.cumsum(h, axis=0)  # <- difference_of_a_running_sum
        return jnp.diff(total[jnp.arange(0, 512, 2)], axis=0)

    h = jnp.square(x @ params["w"]).astype(jnp.bfloat16)
    return jnp.mean(jnp.square(rows(h)).astype(jnp.float32))


@backward("accumulation", {"gain": jnp.float32(1)}, 1 + normal(0, 8, 512, 8, scale=0.1))
def gradient_of_a_gain_summed_in_bf16(params, x):
    h, gain = x.astype(jnp.bfloat16), params["gain"].astype(jnp.bfloat16)
    h = h * gain  # <- gradient_of_a_gain_summed_in_bf16
    return jnp.mean(h.astype(jnp.float32))


@planted("decision", {"w": jnp.float32(1)}, jnp.full(8, 1.001), path="above")
def comparison_of_equal_numbers(params, x):
    def above(h, threshold):
        return h > threshold  # <- comparison_of_equal_numbers

    h = (x * params["w"]).astype(jnp.bfloat16)
    return jnp.mean(above(h, jnp.bfloat16(1)).astype(jnp.float32)) * params["w"]


@planted(
    "accumulation cancellation precision", {"w": jnp.float32(1)}, 1 + jnp.arange(16.0)
)
def result_of_zero_in_f32(params, x):
    h = (x * params["w"]).astype(jnp.bfloat16)
    moved = h + jnp.bfloat16(1000)  # <- result_of_zero_in_f32
    residual = moved - jnp.bfloat16(1000) - h  # <- result_of_zero_in_f32
    return jnp.sum(jnp.square(residual).astype(jnp.float32))


FIXED = {"w": weight(0, 32, 32, scale=0.9), "head": weight(1, 32, 1)}, normal(2, 4, 32)


def fixed_point(params, x, tolerance):
    frozen = jax.lax.stop_gradient(params["w"])

    def goes_on(state):
        return state[1] > tolerance  # <- tolerance_below_the_format

    def body(state):
        new = jnp.tanh(state[0] @ frozen + x)
        return new, jnp.max(jnp.abs(new - state[0]))

    start = jnp.zeros_like(x), jnp.float32(jnp.inf)
    return jax.lax.while_loop(goes_on, body, start)[0] @ params["head"]


@planted("convergence", *FIXED, how=mpx.amp, path="goes_on")
def tolerance_below_the_format(params, x):
    return jnp.mean(fixed_point(params, x, 1e-4))


@healthy(*FIXED, how=mpx.amp)
def fixed_point_with_a_coarse_tolerance_bf16(params, x):
    return jnp.mean(jnp.square(fixed_point(params, x, 0.05)))


@planted(
    "constant",
    {**WIDE, "head": jnp.abs(weight(1, 16, 4))},
    normal(2, 6, 8),
    how=mpx.amp(dtype="f16"),
    scaling=1024.0,
    path="likelihood",
)
def epsilon_with_a_huge_reciprocal(params, x):
    def likelihood(h):
        return jnp.log(jax.nn.sigmoid(h) + 1e-8)  # <- epsilon_with_a_huge_reciprocal

    h = jax.nn.relu(x @ params["w"]) @ params["head"]
    return -jnp.mean(likelihood(-40 * h))


@planted(
    "accumulation precision", {"w": jnp.float32(1)}, jnp.full(200, 0.101), how=BF16
)
def moving_sum_of_a_tenth(params, x):
    total = jnp.zeros((), x.dtype)
    for row in x * params["w"]:
        total = total + row  # <- moving_sum_of_a_tenth
    return total / len(x)


@healthy({"w": jnp.float32(1)}, normal(0, 12) + 3, how=BF16)
def sum_of_a_few_numbers_bf16(params, x):
    return functools.reduce(jnp.add, list(x * params["w"])) / len(x)


REGRESSION = {**WIDE, "head": weight(1, 16, 1)}


def predict(params, x):
    return jax.nn.relu(x @ params["w"]) @ params["head"]


@healthy(
    REGRESSION, normal(2, 32, 8), predict(REGRESSION, normal(2, 32, 8)), how=mpx.amp
)
def converged_regression_with_relu_bf16(params, x, y):
    return jnp.mean(jnp.square(predict(params, x) - y))
