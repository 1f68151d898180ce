"""Faults inside loops, branches, calls and batches; and ranges under amp and fp8."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpx
from planted.table import (
    BF16,
    F16,
    Case,
    backward,
    cross_entropy,
    healthy,
    linear,
    mlp,
    normal,
    planted,
    weight,
)

AMP16 = mpx.amp(dtype="f16")
W, X = {"w": weight(0, 8, 8)}, normal(1, 10, 8)
SMALL = {"w": weight(0, 4, 4)}


@planted("accumulation precision", W, normal(1, 200, 8), how=BF16, path="step")
def sum_in_a_bf16_carry(params, x):
    def step(carry, row):
        return carry + row, None  # <- sum_in_a_bf16_carry

    h = jax.nn.softplus(x @ params["w"])
    return jax.lax.scan(step, jnp.zeros((), x.dtype), h.reshape(-1))[0] / h.size


@planted(
    "accumulation precision",
    {"w": weight(0, 4, 4, scale=0.2)},
    normal(1, 1500, 4),
    how=BF16,
    path="step",
)
def moving_average_in_bf16(params, x):
    def step(mean, row):
        return mean * 0.999 + row * 0.001, None  # <- moving_average_in_bf16

    h = x @ params["w"] + 1
    return jnp.mean(jnp.square(jax.lax.scan(step, h[0] + 1, h)[0]))


@planted(
    "accumulation precision", {"w": weight(0, 4, 1)}, normal(1, 900, 4), path="step"
)
def counter_above_256_in_bf16(params, x):
    def step(n, m):
        return n + m.astype(jnp.bfloat16), None  # <- counter_above_256_in_bf16

    count, _ = jax.lax.scan(step, jnp.bfloat16(0), jnp.ones(900, bool))
    return jnp.sum(jnp.square(x @ params["w"])) / count.astype(jnp.float32)


@planted(
    "overflow",
    {"w": weight(0, 6, 16, 16).at[4].multiply(60000.0), "out": weight(1, 16, 2)},
    normal(2, 4, 16),
    how=AMP16,
    scaling=mpx.StaticLossScaling(4.0),
    path="layers",
)
def overflow_in_one_layer_of_a_scan(params, x):
    def layer(h, w):
        with jax.named_scope("layers"):
            h = h @ w  # <- overflow_in_one_layer_of_a_scan
            h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h)))
        return h, None

    h, _ = jax.lax.scan(layer, x, params["w"])
    return jnp.mean(jnp.square(h @ params["out"]))


@planted(
    "overflow",
    {"w": weight(0, 5, 12, 12).at[3].multiply(12.0)},
    normal(1, 4, 12),
    how=F16,
    path="block",
)
def exp_in_a_scan(params, x):
    def block(h, w):
        z = h @ w
        gate = jnp.exp(z)  # <- exp_in_a_scan
        return h + 0.1 * (z * gate / gate.sum(-1, keepdims=True)), None

    return jnp.mean(jnp.square(jax.lax.scan(block, x, params["w"])[0]))


@planted("overflow", mlp(0, 8, 6), X, how=F16, path="inner")
def exp_in_a_jit(params, x):
    @jax.jit
    def inner(z):
        e = jnp.exp2(z)  # <- exp_in_a_jit
        return e / e.sum(-1, keepdims=True)

    return jnp.mean(inner(linear(params["layer0"], x) * 16)[:, 0])


@planted("cancellation", mlp(0, 8, 32, 3), X, how=BF16, path="block")
def variance_in_a_remat(params, x):
    @jax.checkpoint
    def block(p, x):
        h = x @ p["w"] + 60
        m = h.mean(-1, keepdims=True)
        v = jnp.mean(h**2, -1, keepdims=True) - m**2  # <- variance_in_a_remat
        return (h - m) / jnp.sqrt(jnp.abs(v) + 1e-5)

    return jnp.mean(jnp.tanh(block(params["layer0"], x) @ params["layer1"]["w"]))


@planted("overflow", W, X, how=F16, path="one")
def overflow_in_a_vmap(params, x):
    def one(p, x):
        h = jnp.tanh(x @ p["w"])
        return jnp.sum(jnp.square(h * 900))  # <- overflow_in_a_vmap

    return jnp.mean(jax.vmap(one, (None, 0))(params, x)) / 1e6


@planted("underflow cancellation singularity precision", W, X, how=F16, path="body")
def newton_in_a_while(params, x):
    h = jax.nn.softplus(x @ params["w"]) + 1
    square = jax.lax.stop_gradient(h)

    def body(state):
        i, y = state
        rise = jnp.square(y + 1e-4) - jnp.square(y)  # <- newton_in_a_while
        return i + 1, y - (jnp.square(y) - square) / (rise / 1e-4)

    return jnp.mean(h / jax.lax.while_loop(lambda s: s[0] < 5, body, (0, square))[1])


@planted("accumulation precision", W, X, path="<lambda>")
def counter_in_a_while(params, x):
    scale = jax.lax.while_loop(
        lambda i: i < jnp.bfloat16(700),
        lambda i: i + 1,  # <- counter_in_a_while
        jnp.bfloat16(0),
    )
    return jnp.mean(jnp.square(x @ params["w"])) * scale.astype(jnp.float32)


@planted("overflow", W, normal(1, 6, 8), jnp.array(True), how=F16, path="hot")
def overflow_in_a_branch(params, x, training):
    def hot(h):
        return jnp.log1p(jnp.exp(h * 30))  # <- overflow_in_a_branch

    return jnp.mean(jax.lax.cond(training, hot, jax.nn.relu, x @ params["w"]))


@backward("overflow", W, normal(1, 6, 8), how=F16, path="w")
def overflow_in_a_custom_vjp(params, x):
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    # JAX gives the equations of this rule the line of the call.
    clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g * jnp.exp(jnp.abs(x)),))
    return jnp.sum(clipped(x @ params["w"] * 20))  # <- overflow_in_a_custom_vjp


@backward(
    "singularity nan overflow",
    {"w": weight(0, 4, 3)},
    normal(1, 40, 4).at[7].set(0.0),
    path="w",
)
def pole_in_a_custom_jvp(params, x):
    @jax.custom_jvp
    def safe_norm(x):
        return jnp.sqrt(jnp.sum(x * x, -1))

    @safe_norm.defjvp
    def tangent_rule(primals, tangents):
        (x,), (t,) = primals, tangents
        n = safe_norm(x)
        # JAX gives this the line of the call when it transposes it.
        return n, jnp.sum(x * t, -1) / n

    return jnp.mean(safe_norm(x @ params["w"]))  # <- pole_in_a_custom_jvp


@planted("overflow", {"w": weight(0, 3, 8, 8)}, normal(1, 4, 8), how=F16, path="inner")
def overflow_in_nested_scans(params, x):
    def inner(h, _):
        h = h * h  # <- overflow_in_nested_scans
        return h, None

    def deep(h, w):
        h, _ = jax.lax.scan(inner, jnp.abs(h @ w) + 1.5, None, length=3)
        return h * 1e-3, None

    return jnp.mean(jnp.log(jax.lax.scan(deep, x, params["w"])[0] + 1))


@planted(
    "overflow",
    {"wh": jnp.eye(8) * 1.7, "wx": weight(0, 4, 8)},
    normal(1, 40, 3, 4),
    how=F16,
    path="wh",
)
def growing_state_of_an_rnn(params, xs):
    def cell(h, x):
        h = h @ params["wh"] + x @ params["wx"]  # <- growing_state_of_an_rnn
        return h, None

    h, _ = jax.lax.scan(cell, jnp.zeros((3, 8), xs.dtype), xs)
    return jnp.mean(jnp.tanh(h * 1e-6))


@planted("accumulation precision", SMALL, normal(1, 700, 4), how=BF16)
def sum_in_an_unrolled_loop(params, x):
    h = jax.nn.sigmoid(x @ params["w"]) + 1
    acc = jnp.zeros_like(h[0])
    for i in range(x.shape[0]):
        acc = acc + h[i]  # <- sum_in_an_unrolled_loop
    return jnp.mean(acc) / x.shape[0]


@planted(
    "overflow", {"w": weight(0, 4, 4, scale=8)}, normal(1, 3, 9, 4), how=F16, path="w"
)
def overflow_in_a_vmapped_scan(params, xs):
    def step(c, x):
        e = jnp.exp(x @ params["w"])  # <- overflow_in_a_vmapped_scan
        return c + e / (1 + e), None

    run = functools.partial(jax.lax.scan, step, jnp.zeros(4, xs.dtype))
    return jnp.mean(jax.vmap(lambda x: run(x)[0])(xs))


def sharded(func):
    """Maps a function over the batch, on all devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    return jax.shard_map(func, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


@planted("overflow", path="w")
def overflow_in_a_shard_map():
    def local(params, x):
        e = jnp.exp(x @ params["w"])  # <- overflow_in_a_shard_map
        return jax.lax.pmean(jnp.mean(e[:, 0] / e.sum(-1)), "data")

    args = {"w": weight(0, 4, 4, scale=9)}, normal(1, 16, 4)
    return Case(F16(sharded(local)), args)


@healthy()
def layers_in_a_shard_map_bf16():
    def local(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w), h.sum())  # noqa: E731
        h, sums = jax.lax.scan(layer, x, params["w"])
        loss = jnp.mean(jnp.square(h)) * (1 + jax.lax.axis_index("data"))
        return jax.lax.pmean(loss + 1e-3 * sums.mean(), "data")

    args = {"w": weight(0, 3, 4, 4)}, normal(1, 16, 4)
    return Case(mpx.amp(sharded(local)), args)


# --- under amp and fp8: activations, gradients and loss scales --------------------------


DEEP = mlp(0, 8, 32, 32, 5)
DEEP["layer1"]["w"] *= 2e5
SCALING = mpx.DynamicLossScaling.pow2(2.0**10)


@planted(
    "overflow", DEEP, normal(4, 16, 8), how=AMP16, scaling=SCALING, path="layer1/w"
)
def activation_beyond_f16_under_amp(params, x):
    h = jax.nn.relu(linear(params["layer0"], x))
    h = jax.nn.relu(h @ params["layer1"]["w"])  # <- activation_beyond_f16_under_amp
    return cross_entropy(linear(params["layer2"], h) * 1e-6, jnp.arange(16) % 5)


@backward("underflow", mlp(0, 8, 16, 3), normal(4, 64, 8), how=AMP16, path="layer1")
def no_loss_scale_under_amp(params, x):
    h = jnp.tanh(linear(params["layer0"], x))
    out = h @ params["layer1"]["w"]
    return 1e-7 * jnp.mean(jnp.square(out))  # <- no_loss_scale_under_amp


@backward(
    "overflow",
    mlp(0, 8, 16, 3),
    normal(4, 8, 8),
    how=AMP16,
    scaling=2.0**22,
    path="layer1/w",
)
def scale_too_large_under_amp(params, x):
    h = jax.nn.relu(linear(params["layer0"], x))
    out = h @ params["layer1"]["w"]
    return jnp.sum(jnp.square(out))  # <- scale_too_large_under_amp


@planted(
    "overflow",
    {"w": weight(0, 8, 16), "out": weight(1, 16, 2)},
    normal(4, 8, 8, scale=3),
    how=AMP16,
    scaling=2.0,
    path="gain",
)
def gain_beyond_f16_under_amp(params, x):
    h = x @ params["w"]
    with jax.named_scope("gain"):
        h = h * 3e4  # <- gain_beyond_f16_under_amp
    return jnp.mean(jax.nn.sigmoid(h @ params["out"] * 1e-5))


@planted(
    "cancellation",
    {"a": weight(0, 8, 16), "b": weight(1, 8, 16), "out": weight(2, 16, 2)},
    normal(4, 32, 8),
    how=mpx.amp,
)
def difference_of_large_activations_under_amp(params, x):
    a, b = x @ params["a"] + 500, x @ params["b"] + 500
    centred = a - b  # <- difference_of_large_activations_under_amp
    return jnp.mean(jnp.tanh(centred @ params["out"]))


@planted(
    "overflow",
    {"up": weight(0, 4, 8, 32).at[2].multiply(300.0), "down": weight(1, 4, 32, 8)},
    normal(4, 8, 8, scale=2),
    how=AMP16,
    scaling=1.0,
    path="loop",
)
def overflow_in_a_scan_under_amp(params, x):
    def loop(h, p):
        z = jax.nn.relu(h @ p["up"]) ** 2  # in f32
        return h + z @ p["down"], None  # <- overflow_in_a_scan_under_amp

    return jnp.mean(jnp.square(jax.lax.scan(loop, x, params)[0])) * 1e-9


@planted("overflow", mlp(0, 16, 32, 16), normal(4, 16, 16), how=mpx.fp8, path="softmax")
def softmax_without_shift_under_fp8(params, x):
    def softmax(z):
        e = jnp.exp(z)  # <- softmax_without_shift_under_fp8
        return e / e.sum(-1, keepdims=True)

    h = jax.nn.relu(linear(params["layer0"], x))
    return jnp.mean(softmax(linear(params["layer1"], h) * 120)[:, 0])
