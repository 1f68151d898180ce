"""Faults inside loops, branches, calls and batches; and ranges under amp and fp8."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpx
from _faults.table import (
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
    "cancellation",
    {"a": weight(0, 8, 16), "b": weight(1, 8, 16), "out": weight(2, 16, 2)},
    normal(4, 32, 8),
    how=mpx.amp,
)
def difference_of_large_activations_under_amp(params, x):
    a, b = x @ params["a"] + 500, x @ params["b"] + 500
    centred = a - b  # <- difference_of_large_activations_under_amp
    return jnp.mean(jnp.tanh(centred @ params["out"]))


@planted("overflow", mlp(0, 16, 32, 16), normal(4, 16, 16), how=mpx.fp8, path="softmax")
def softmax_without_shift_under_fp8(params, x):
    def softmax(z):
        e = jnp.exp(z)  # <- softmax_without_shift_under_fp8
        return e / e.sum(-1, keepdims=True)

    h = jax.nn.relu(linear(params["layer0"], x))
    return jnp.mean(softmax(linear(params["layer1"], h) * 120)[:, 0])
