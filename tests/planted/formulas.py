"""Formulas that need more range or digits than a 16-bit format has; faults of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpx
from planted.table import (
    BF16,
    F16,
    backward,
    cross_entropy,
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


@planted(
    "overflow",
    weights(16, *ATTENTION, scale=2.0),
    normal(9, 2, 12, 16),
    how=F16,
    path="attention/softmax",
)
def softmax_without_shift(params, x):
    with jax.named_scope("attention"):
        q, k, v = (x @ params[name] for name in ATTENTION)
        with jax.named_scope("softmax"):
            e = jnp.exp(q @ k.swapaxes(-1, -2) / 4)  # <- softmax_without_shift
            p = e / e.sum(-1, keepdims=True)
        out = p @ v
    return jnp.mean(jnp.square(out))


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


@planted(
    "cancellation",
    {"w": weight(0, 6, 12), "scale": jnp.ones(12), "head": weight(1, 12, 1)},
    normal(2, 32, 6),
    how=F16,
    path="batch_norm",
)
def variance_from_squares_in_f16(params, x):
    x = x @ params["w"] + 90.0
    with jax.named_scope("batch_norm"):
        second = jnp.mean(jnp.square(x), axis=0)
        first = jnp.mean(x, axis=0)
        spread = second - jnp.square(first)  # <- variance_from_squares_in_f16
        h = (x - first) / jnp.sqrt(spread + 1e-3) * params["scale"]
    return jnp.mean(jax.nn.softplus(h @ params["head"]))


@planted("overflow", W, normal(1, 4, 8), how=F16, path="energy")
def large_constant(params, x):
    def energy(h):
        return 1e3 * h * 500.0  # <- large_constant

    return jnp.mean(jnp.tanh(energy(x @ params["w"]) * 1e-5))


@planted("constant", W, normal(1, 4, 8), how=F16, path="penalty")
def constant_beyond_f16(params, x):
    h = x @ params["w"]
    with jax.named_scope("penalty"):
        cost = jax.nn.relu(h - 1) * 1e6  # <- constant_beyond_f16
    return jnp.mean(cost) * 1e-6 + jnp.mean(h)


ENERGIES = np.array([1.0, 2e3, 7e4, 3e5], np.float32)


@planted("overflow", {"w": weight(0, 8, 4)}, normal(1, 4, 8), how=F16, path="table")
def large_table_cast_to_f16(params, x):
    with jax.named_scope("table"):
        scaled = jnp.asarray(ENERGIES).astype(x.dtype)  # <- large_table_cast_to_f16
    return jnp.mean(jax.nn.sigmoid((x @ params["w"]) * scaled))


@planted("underflow", WIDE, X, how=F16, path="norm_of")
def norm_of_small_numbers(params, x):
    def norm_of(x):
        squares = x * x  # <- norm_of_small_numbers
        return jnp.sqrt(squares.sum(-1, keepdims=True))

    h = x @ params["w"] * 1e-4
    return jnp.mean((h / norm_of(h))[:, 0])


@planted("overflow", {**WIDE, "out": weight(1, 16, 4)}, X, how=F16, path="rms")
def squares_beyond_f16(params, x):
    with jax.named_scope("block0/rms"):
        h = x @ params["w"] * 300
        power = jnp.square(h)  # <- squares_beyond_f16
        h = h * jax.lax.rsqrt(power.mean(-1, keepdims=True) + 1e-6)
    return jnp.mean(jnp.square(h @ params["out"]))


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


@planted("constant nan", QK, TOKENS, jnp.ones((6, 6), bool).at[4].set(False), how=F16)
def fill_value_beyond_f16(params, x, mask):
    scores = (x @ params["wq"]) @ (x @ params["wk"]).swapaxes(-1, -2)
    scores = jnp.where(mask, scores, -1e9)  # <- fill_value_beyond_f16
    return jnp.mean(jnp.square(jax.nn.softmax(scores, -1) @ x))


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


@planted("overflow underflow", {"w": weight(0, 8, 40)}, normal(1, 5, 8), how=F16)
def product_of_many(params, x):
    h = jnp.exp(x @ params["w"] * 0.1 + 1)
    return jnp.mean(jnp.prod(h, -1) ** (1 / 40))  # <- product_of_many


@planted("nan singularity", {"w": jnp.eye(12) * 3}, normal(1, 40, 12), how=BF16)
def cosine_beyond_one(params, x):
    a = x @ params["w"]
    a, b = (
        v / jnp.linalg.norm(v, axis=-1, keepdims=True) for v in (a, a * 1.5 + 0.25 * x)
    )
    return jnp.mean(jnp.arccos(jnp.sum(a * b, -1) + 0.004))  # <- cosine_beyond_one


@planted("cancellation", {"w": weight(0, 6, 8)}, normal(1, 10, 6), how=BF16)
def squared_distances_by_expansion(params, x):
    h = x @ params["w"] + 25
    sq = jnp.sum(h * h, -1)
    d = sq[:, None] + sq[None, :] - 2 * h @ h.T  # <- squared_distances_by_expansion
    return jnp.mean(jnp.exp(-d / 16))


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


@planted("overflow nan", WIDE, X, how=F16)
def cube_in_own_gelu(params, x):
    h = x @ params["w"] * 250
    inner = h + 0.044715 * h**3  # <- cube_in_own_gelu
    return jnp.mean(0.5 * h * (1 + jnp.tanh(0.79788 * inner)))


@planted("overflow", mlp(7, 10, 24, 12), normal(3, 20, 10), how=F16)
def logsumexp_without_shift(params, x):
    z = linear(params["layer1"], jnp.tanh(linear(params["layer0"], x))) * 9
    total = jnp.log(jnp.sum(jnp.exp(z), -1))  # <- logsumexp_without_shift
    return jnp.mean(total - z[jnp.arange(20), jnp.arange(20) % 12])


@planted("overflow", W, X, how=F16, path="softplus_by_hand")
def own_softplus_under_amp_low(params, x):
    def softplus_by_hand(x):
        return jnp.log(1 + jnp.exp(x))  # <- own_softplus_under_amp_low

    return jnp.mean(softplus_by_hand(x @ params["w"] * 30))


@planted("precision", {"table": normal(0, 600, 4)}, normal(1, 600, 4), how=BF16)
def positions_in_bf16_as_indices(params, x):
    position = jnp.arange(600).astype(x.dtype)  # <- positions_in_bf16_as_indices
    return jnp.mean(jnp.square(x + params["table"][position.astype(jnp.int32)]))


@planted(
    "overflow",
    {**mlp(0, 16, 64), "head": weight(5, 64, 8, scale=9000.0)},
    normal(1, 12, 16, scale=6),
    how=mpx.amp(dtype="f16"),
    scaling=mpx.StaticLossScaling(2.0),
    path="head",
)
def logits_beyond_f16_in_cross_entropy(params, x):
    h = jax.nn.relu(linear(params["layer0"], x))
    with jax.named_scope("head"):
        logits = h @ params["head"]  # <- logits_beyond_f16_in_cross_entropy
    return cross_entropy(logits, jnp.arange(12) % 8)


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


@backward("singularity nan", mlp(0, 4, 5), normal(1, 9, 4).at[5].set(0.0))
def fractional_power_at_zero(params, x):
    h = jnp.square(linear(params["layer0"], x))
    return jnp.mean(h**0.5)  # <- fractional_power_at_zero


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


@backward("underflow cancellation", {"w": weight(0, 8, 4)}, normal(2, 64, 8), how=F16)
def saturated_gradients_in_f16(params, x):
    h = x @ params["w"] + 13
    return jnp.mean(jax.nn.sigmoid(h))  # <- saturated_gradients_in_f16


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


@planted("constant", SQUARE, normal(1, 10, 4).at[3].set(0.0), how=F16)
def reciprocal_of_small_numbers(params, x):
    h = jnp.abs(x @ params["w"])
    return jnp.sum(jnp.log(h + 6e-6))  # <- reciprocal_of_small_numbers


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


@backward("overflow singularity", {"v": normal(0, 8) * 0.001}, X, how=F16)
def normalising_a_small_vector(params, x):
    v = params["v"]
    direction = v / jnp.sqrt(jnp.sum(v * v) + 1e-7)  # <- normalising_a_small_vector
    return jnp.mean(jnp.tanh(x @ direction * 1e4))


@planted(
    "underflow overflow singularity nan", {"enc": W["w"]}, normal(1, 20, 8), how=F16
)
def exponential_of_a_log_variance(params, x):
    mean, logvar = jnp.split(x @ params["enc"], 2, -1)
    var = jnp.exp(logvar * 12)  # <- exponential_of_a_log_variance
    return 0.5 * jnp.mean(mean**2 + var - 1 - logvar * 12)


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
