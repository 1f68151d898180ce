"""Residuals that are read by what bears no codes: they are kept in 16 bits or as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
from models import normal

N, ROWS = 256, 256
KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (ROWS, N))
PARAMS = {
    "w": jax.random.normal(KEYS[1], (N, N)) / 16,
    "v": jax.random.normal(KEYS[2], (N, N)) / 16,
}
NOISE = jax.random.normal(KEYS[3], (ROWS, N))
TARGETS = X @ PARAMS["w"]


def regression(p, x):
    return jnp.mean((x @ p["w"] - (TARGETS + 0.03 * NOISE)) ** 2)


def regression_with_an_offset(p, x):
    return jnp.mean((x @ p["w"] + p["b"][None] - (TARGETS + 300 + 0.1 * NOISE)) ** 2)


def centred(p, x):
    return jnp.mean((x @ p["w"] - p["v"][:ROWS]) ** 2)


def divergence_of_the_best(p, x):
    h = x @ p["w"]
    best = h >= jnp.sort(h, axis=-1)[:, -32:-31]
    masked = h + jnp.where(best, 0.0, -1e9)
    teacher = jax.nn.softmax(jnp.where(best, x @ p["v"], -1e9))
    return -jnp.mean(jnp.sum(teacher * jax.nn.log_softmax(masked), axis=-1))


def binary_cross_entropy(p, x):
    s = jax.nn.sigmoid(6 * (x @ p["w"])) * 0.9998 + 1e-4
    y = jnp.where(TARGETS > 0, 1.0, 0.0)
    return -jnp.mean(y * jnp.log(s) + (1 - y) * jnp.log(1 - s))


def norm_over_tokens(p, x):
    h = (x @ (p["w"] * 10.0 ** jax.random.uniform(KEYS[4], (1, N), minval=-4))).T
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-12)
    return jnp.mean(jnp.tanh(h.T @ p["v"]) * NOISE)


def norm_of_rows_far_from_0(p, x):
    h = x @ p["w"] + 8.0
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-12)
    return jnp.mean(jnp.tanh(h @ p["v"]) * NOISE)


def divisor_before_a_scan(p, x):
    divisor = jnp.abs(x @ p["w"]) + 0.1

    def body(carry, row):
        return carry + jnp.sin(row)[None] / divisor, None

    return jnp.mean(jax.lax.scan(body, jnp.zeros((ROWS, N)), x[:3])[0])


def maxout(p, x):
    a, b = jnp.split(x @ p["w"], 2, axis=-1)
    return jnp.mean((jnp.maximum(a, b) @ p["v"][:128]) * NOISE)


def pooled_by_hand(p, x):
    h = (x @ p["w"]).reshape(ROWS, N // 2, 2).max(-1)
    return jnp.mean((h @ p["v"][:128]) * NOISE)


def rolled(p, x):
    h = x @ p["w"]
    return jnp.mean((jnp.where(h > jnp.roll(h, 1, 1), h, 0) @ p["v"]) * NOISE)


def running_maximum(p, x):
    return jnp.mean((jax.lax.cummax(x @ p["w"], axis=1) @ p["v"]) * NOISE)


def siren(p, x):
    h = jnp.sin(8 * (x @ p["w"]))
    return jnp.mean((jnp.sin(4 * (h @ p["v"]))) * NOISE)


def uncertain(p, x):
    h, s = x @ p["w"], 4 * (x @ p["v"])
    return jnp.mean(jax.lax.square(h - X) * jnp.exp(-s) + s)


def scaled_by_an_exponential(p, x):
    return jnp.mean(x @ p["w"] * jnp.exp(-8 * (x @ p["v"])) * NOISE)


@jax.custom_vjp
def straight_through(x):
    return x


straight_through.defvjp(
    lambda x: (straight_through(x), x), lambda x, g: (jnp.where(x < 0.1, g, 0.0),)
)


@jax.custom_vjp
def divided(x):
    return 2 * x


divided.defvjp(lambda x: (divided(x), x), lambda x, g: (g / (1e-3 + jnp.abs(x)),))


def with_a_rule(rule):
    def loss(p, x):
        part = jax.checkpoint(lambda h: rule(h) @ p["v"])
        return jnp.mean(part(x @ p["w"]) * NOISE)

    return loss


CASES = {
    "regression": regression,
    "regression with an offset": regression_with_an_offset,
    "distance to parameters": centred,
    "divergence of the best": divergence_of_the_best,
    "binary cross entropy": binary_cross_entropy,
    "norm over tokens": norm_over_tokens,
    "norm of rows far from 0": norm_of_rows_far_from_0,
    "divisor before a scan": divisor_before_a_scan,
    "maxout": maxout,
    "pooled by hand": pooled_by_hand,
    "rolled": rolled,
    "running maximum": running_maximum,
    "siren": siren,
    "uncertain": uncertain,
    "scaled by an exponential": scaled_by_an_exponential,
    "straight through": with_a_rule(straight_through),
    "rule that divides": with_a_rule(divided),
}
# The largest error of a number, as a share of it or of the largest of its block.
CODE = {"int8": 1 / 127, "e4m3": 2.0**-5}


@pytest.mark.parametrize("form", CODE)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_off_by_less_than_a_code(name, form):
    loss, params = CASES[name], PARAMS
    if name == "regression with an offset":
        params = params | {"b": jnp.full((N,), 300.0)}
    # In f32, where codes alone make errors.
    func = mpx.amp(loss, rules="original", residuals=form)
    found, exact = (jax.jit(jax.grad(f))(params, X) for f in (func, loss))
    for key, wanted in exact.items():
        if np.any(wanted):
            off = jnp.linalg.norm(found[key] - wanted) / jnp.linalg.norm(wanted)
            assert off < CODE[form], key


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("offset", [0.0, 8.0])
def test_the_stream_before_a_norm_by_two_moments_is_coded(offset, keepdims):
    def loss(p, x):
        # Rows of unlike sizes, of which Flax's norm takes the mean of squares.
        h = (x + x @ p["w"]) * 10.0 ** jnp.linspace(0, 2, ROWS)[:, None] + offset
        mean, square = (jnp.mean(x, -1, keepdims=keepdims) for x in (h, h * h))
        scale = jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-6)
        mean, scale = (x if keepdims else x[:, None] for x in (mean, scale))
        return jnp.mean(jnp.tanh((h - mean) * scale @ p["v"]) @ p["w"])

    func = mpx.amp(loss, rules="original", residuals="int8")
    found, exact = (jax.jit(jax.grad(f))(PARAMS, X) for f in (func, loss))
    for key, wanted in exact.items():
        off = jnp.linalg.norm(found[key] - wanted) / jnp.linalg.norm(wanted)
        assert off < CODE["int8"], key
    kept = mpx.inspect.report(mpx.amp(loss, residuals="int8"), PARAMS, X).residuals
    assert {row.format for row in kept} == {"int8"}


FAR = {
    "square": lambda p, a: (a + p["c"]) ** 2 - 2 * p["c"] * a - p["c"] ** 2,
    "relu": lambda p, a: jax.nn.relu(a + p["c"]) - p["d"],
    "two terms": lambda p, a: a - p["e"] * a,
    "two factors": lambda p, a: p["f"] * a - p["f"] * jnp.tanh(a * 0.1) * 10,
}


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("name", FAR)
def test_parameters_that_cancel_leave_the_gradient_right(name, form):
    numbers = {"c": 60.0, "d": 60.0, "e": 0.99, "f": 1.0}
    params = PARAMS | {key: jnp.full((1, N), x) for key, x in numbers.items()}

    def loss(p, x):
        return jnp.mean((FAR[name](p, x @ p["w"]) @ p["v"] - NOISE) ** 2)

    found, exact = (
        jax.jit(jax.grad(f))(params, X) for f in (mpx.amp(loss, residuals=form), loss)
    )
    for key in PARAMS:
        off = jnp.linalg.norm(found[key] - exact[key]) / jnp.linalg.norm(exact[key])
        assert off < 0.02, key


MASKS = {
    "added": lambda h, fill: h + jnp.where(jnp.arange(h.shape[-1]) % 7 == 0, fill, 0.0),
    "selected": lambda h, fill: jnp.where(jnp.arange(h.shape[-1]) % 7 == 0, fill, h),
    "a constant": lambda h, fill: (
        h + np.where(np.arange(h.shape[-1]) % 7 == 0, fill, 0.0).astype(np.float32)
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("fill", [-1e4, -1e9, -np.inf])
@pytest.mark.parametrize("func", [jax.nn.sigmoid, jax.nn.relu])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_no_scale_of_a_block(name, func, fill):
    params = {"w": normal(0, 64, 64) / 8, "v": normal(1, 64, 64) / 8}
    x, y = normal(2, 32, 64), normal(3, 32, 64)

    def loss(p, x):
        return jnp.mean((func(MASKS[name](x @ p["w"], fill)) @ p["v"] - y) ** 2)

    plain = jax.jit(jax.grad(mpx.amp(loss)))(params, x)
    coded = jax.jit(jax.grad(mpx.amp(loss, residuals="int8")))(params, x)
    for key in params:
        difference = np.linalg.norm(coded[key] - plain[key])
        assert difference < 0.02 * np.linalg.norm(plain[key])


# One variable in sixteen is in a unit of its own, which weights undo.
UNITS = jnp.where(jnp.arange(N) % 16 == 0, 1000.0, 1.0)[None]


@pytest.mark.parametrize("where", ["inside", "outside", "before an activation"])
def test_weights_that_are_arguments_may_undo_that_numbers_are_unlike(where):
    def loss(p, x, y, weights):
        h = x @ p["w"]
        if where == "before an activation":
            return jnp.mean(jnp.tanh(h * UNITS @ jnp.eye(N) * weights) * y)
        error = h - y
        if where == "inside":
            return jnp.mean((error * weights) ** 2)
        return jnp.mean(weights**2 * error**2)

    args = X, TARGETS * UNITS + NOISE * UNITS, 1 / UNITS
    p = PARAMS if where == "before an activation" else {"w": PARAMS["w"] * UNITS}
    low, plain, exact = (
        jax.jit(jax.grad(f))(p, *args)["w"]
        for f in (mpx.amp(loss, residuals="int8"), mpx.amp(loss), loss)
    )
    off = [jnp.linalg.norm((x - exact) / UNITS) for x in (low, plain)]
    assert off[0] < 2 * off[1] + 0.02 * jnp.linalg.norm(exact / UNITS)


@pytest.mark.parametrize("width", [48, 100])
def test_small_rows_before_a_norm_keep_their_numbers_at_any_width(width):
    keys = jax.random.split(jax.random.key(9), 3)
    p = {
        "w": jax.random.normal(keys[0], (N, width)) / 16,
        "v": jax.random.normal(keys[1], (width, N)) / 7,
    }
    x = X * jnp.exp(jax.random.normal(keys[2], (ROWS, 1)))

    def loss(p, x):
        h = jax.nn.relu(x @ p["w"]) @ p["v"]
        h = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return jnp.mean(jnp.tanh(h) * NOISE)

    low, plain, exact = (
        jax.jit(jax.grad(f))(p, x)
        for f in (mpx.amp(loss, residuals="int8"), mpx.amp(loss), loss)
    )
    for key, wanted in exact.items():
        off = [jnp.linalg.norm(x[key] - wanted) for x in (low, plain)]
        assert off[0] < 2 * off[1] + 0.02 * jnp.linalg.norm(wanted), key


def test_complex_numbers_are_not_taken_for_real_ones():
    def loss(p, x):
        return jnp.mean(jnp.abs(jnp.fft.fft(x @ p["w"]) * np.complex64(1 + 2j)) ** 2)

    low, plain = (
        jax.jit(jax.grad(f))(PARAMS, X)["w"]
        for f in (mpx.amp(loss, residuals="int8"), mpx.amp(loss))
    )
    assert jnp.linalg.norm(low - plain) < 0.02 * jnp.linalg.norm(plain)
