"""Faults inside loops, branches, calls and batches."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import mpx
from _faults.table import (
    BF16,
    F16,
    Case,
    given,
    in_low,
    is_healthy,
    linear,
    mlp,
    normal,
    planted,
    weight,
)


@planted("step", "accumulation", "precision")
@given({"w": weight(0, 8, 8)}, normal(1, 200, 8), how=BF16)
def sum_in_a_bf16_carry(params, x):
    def total(x):
        def step(carry, row):
            return carry + row, None  # <- sum_in_a_bf16_carry

        return jax.lax.scan(step, jnp.zeros((), x.dtype), x)[0]

    h = jax.nn.softplus(x @ params["w"])
    return total(h.reshape(-1)) / h.size


@planted("step", "accumulation", "precision")
@given({"w": weight(0, 4, 4, scale=0.2)}, normal(1, 1500, 4), how=BF16)
def moving_average_in_bf16(params, x):
    def moving(x):
        def step(mean, row):
            return mean * 0.999 + row * 0.001, None  # <- moving_average_in_bf16

        return jax.lax.scan(step, x[0] + 1, x)[0]

    return jnp.mean(jnp.square(moving(x @ params["w"] + 1)))


@planted("step", "accumulation", "precision")
@given({"w": weight(0, 4, 1)}, normal(1, 900, 4), jnp.ones(900, bool))
def counter_above_256_in_bf16(params, x, mask):
    def count(mask, dtype):
        def step(n, m):
            return n + m.astype(dtype), None  # <- counter_above_256_in_bf16

        return jax.lax.scan(step, jnp.zeros((), dtype), mask)[0]

    each = jnp.square(x @ params["w"])[:, 0].astype(jnp.float32)
    return jnp.sum(each * mask) / count(mask, jnp.bfloat16).astype(jnp.float32)


@planted("layers", "overflow")
@given(
    {"w": weight(0, 6, 16, 16).at[4].multiply(60000.0), "out": weight(1, 16, 2)},
    normal(2, 4, 16),
    how=mpx.amp(dtype="f16"),
    scaling=mpx.StaticLossScaling(4.0),
)
def overflow_in_one_layer_of_a_scan(params, x):
    def layer(h, w):
        with jax.named_scope("layers"):
            h = h @ w  # <- overflow_in_one_layer_of_a_scan
            h = h * jax.lax.rsqrt(jnp.mean(jnp.square(h)))
        return h, None

    h, _ = jax.lax.scan(layer, x, params["w"])
    return jnp.mean(jnp.square(h @ params["out"]))


@planted("block", "overflow")
def exp_in_a_scan():
    def block(h, p):
        z = h @ p["w"]
        gate = jnp.exp(z)  # <- exp_in_a_scan
        return h + 0.1 * (z * gate / gate.sum(-1, keepdims=True)), None

    def loss(params, x):
        h, _ = jax.lax.scan(block, x, params["blocks"])
        return jnp.mean(jnp.square(h))

    w = weight(0, 5, 12, 12).at[3].multiply(12.0)
    return Case(in_low(loss, jnp.float16), ({"blocks": {"w": w}}, normal(1, 4, 12)))


@planted("inner", "overflow")
@given(mlp(0, 8, 6), normal(1, 10, 8), how=F16)
def exp_in_a_jit(params, x):
    @jax.jit
    def inner(z):
        e = jnp.exp2(z)  # <- exp_in_a_jit
        return e / e.sum(-1, keepdims=True)

    return jnp.mean(inner(linear(params["layer0"], x) * 16)[:, 0])


@planted("block", "cancellation")
def variance_in_a_remat():
    @jax.checkpoint
    def block(p, x):
        h = x @ p["w"] + p["b"]
        m = h.mean(-1, keepdims=True)
        v = jnp.mean(h**2, -1, keepdims=True) - m**2  # <- variance_in_a_remat
        return (h - m) / jnp.sqrt(jnp.abs(v) + 1e-5)

    def loss(params, x):
        h = block(params["layer0"], x)
        return jnp.mean(jnp.tanh(h @ params["layer1"]["w"]))

    params = mlp(0, 8, 32, 3)
    params["layer0"]["b"] = jnp.full(32, 60.0)
    return Case(in_low(loss, jnp.bfloat16), (params, normal(1, 10, 8)))


@planted("one", "overflow")
@given({"w": weight(0, 8, 8)}, normal(1, 10, 8), how=F16)
def overflow_in_a_vmap(params, x):
    def one(p, x):
        h = jnp.tanh(x @ p["w"])
        return jnp.sum(jnp.square(h * 900))  # <- overflow_in_a_vmap

    return jnp.mean(jax.vmap(one, (None, 0))(params, x)) / 1e6


@planted("body", "underflow", "cancellation", "singularity", "precision")
@given({"w": weight(0, 8, 8)}, normal(1, 10, 8), how=F16)
def newton_in_a_while(params, x):
    def newton(x):
        def body(state):
            i, y = state
            rise = jnp.square(y + 1e-4) - jnp.square(y)  # <- newton_in_a_while
            slope = rise / 1e-4
            return i + 1, y - (jnp.square(y) - x) / slope

        return jax.lax.while_loop(lambda s: s[0] < 5, body, (0, x))[1]

    h = jax.nn.softplus(x @ params["w"]) + 1
    root = newton(jax.lax.stop_gradient(h))
    return jnp.mean(h / root)


@planted("<lambda>", "accumulation", "precision")
@given({"w": weight(0, 8, 8)}, normal(1, 10, 8))
def counter_in_a_while(params, x):
    def position(n):
        return jax.lax.while_loop(
            lambda i: i < n,
            lambda i: i + 1,  # <- counter_in_a_while
            jnp.bfloat16(0),
        )

    scale = position(jnp.bfloat16(700)).astype(jnp.float32)
    return jnp.mean(jnp.square(x @ params["w"])) * scale


@planted("hot", "overflow")
@given({"w": weight(0, 8, 8)}, normal(1, 6, 8), jnp.array(True), how=F16)
def overflow_in_a_branch(params, x, training):
    def hot(h):
        return jnp.log1p(jnp.exp(h * 30))  # <- overflow_in_a_branch

    h = x @ params["w"]
    return jnp.mean(jax.lax.cond(training, hot, jax.nn.relu, h))


@planted("w", "overflow", backward=True)
def overflow_in_a_custom_vjp():
    @jax.custom_vjp
    def clipped(x):
        return jnp.clip(x, -1, 1)

    def forward_rule(x):
        return clipped(x), x

    def backward_rule(x, g):
        # JAX gives the equations of this rule the line of the call.
        return (g * jnp.exp(jnp.abs(x)),)

    clipped.defvjp(forward_rule, backward_rule)

    def loss(params, x):
        return jnp.sum(clipped(x @ params["w"] * 20))  # <- overflow_in_a_custom_vjp

    return Case(in_low(loss, jnp.float16), ({"w": weight(0, 8, 8)}, normal(1, 6, 8)))


@planted("w", "singularity", "nan", "overflow", backward=True)
@given({"w": weight(0, 4, 3)}, normal(1, 40, 4).at[7].set(0.0))
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


@planted("inner", "overflow")
@given({"w": weight(0, 3, 8, 8)}, normal(1, 4, 8), how=F16)
def overflow_in_nested_scans(params, x):
    def deep(h, w):
        def inner(h, _):
            h = h * h  # <- overflow_in_nested_scans
            return h, None

        h, _ = jax.lax.scan(inner, jnp.abs(h @ w) + 1.5, None, length=3)
        return h * 1e-3, None

    h, _ = jax.lax.scan(deep, x, params["w"])
    return jnp.mean(jnp.log(h + 1))


@planted("wh", "overflow")
@given({"wh": jnp.eye(8) * 1.7, "wx": weight(0, 4, 8)}, normal(1, 40, 3, 4), how=F16)
def growing_state_of_an_rnn(params, xs):
    def rnn(params, xs):
        def cell(h, x):
            h = h @ params["wh"] + x @ params["wx"]  # <- growing_state_of_an_rnn
            return h, h

        return jax.lax.scan(cell, jnp.zeros((xs.shape[1], 8), xs.dtype), xs)[1]

    return jnp.mean(jnp.tanh(rnn(params, xs)[-1] * 1e-6))


@planted("unrolled", "accumulation", "precision")
@given({"w": weight(0, 4, 4)}, normal(1, 700, 4), how=BF16)
def sum_in_an_unrolled_loop(params, x):
    def unrolled(x):
        acc = jnp.zeros_like(x[0])
        for i in range(x.shape[0]):
            acc = acc + x[i]  # <- sum_in_an_unrolled_loop
        return acc

    h = jax.nn.sigmoid(x @ params["w"]) + 1
    return jnp.mean(unrolled(h)) / x.shape[0]


@planted("w", "overflow")
@given({"w": weight(0, 4, 4, scale=8)}, normal(1, 3, 9, 4), how=F16)
def overflow_in_a_vmapped_scan(params, xs):
    def mixture(p, xs):
        def step(c, x):
            e = jnp.exp(x @ p["w"])  # <- overflow_in_a_vmapped_scan
            return c + e / (1 + e), None

        return jax.lax.scan(step, jnp.zeros(4, xs.dtype), xs)[0]

    return jnp.mean(jax.vmap(functools.partial(mixture, params))(xs))


def sharded(func, specs):
    """Maps a function over the batch, on all devices."""
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    return jax.shard_map(func, mesh=mesh, in_specs=specs, out_specs=P())


@planted("w", "overflow")
def overflow_in_a_shard_map():
    def local(params, x):
        e = jnp.exp(x @ params["w"])  # <- overflow_in_a_shard_map
        return jax.lax.pmean(jnp.mean(e[:, 0] / e.sum(-1)), "data")

    loss = sharded(local, (P(), P("data")))
    return Case(
        in_low(loss, jnp.float16), ({"w": weight(0, 4, 4, scale=9)}, normal(1, 16, 4))
    )


@is_healthy
def layers_in_a_shard_map_bf16():
    def local(params, x):
        layer = lambda h, w: (h + jnp.tanh(h @ w), h.sum())  # noqa: E731
        h, sums = jax.lax.scan(layer, x, params["w"])
        rank = 1 + jax.lax.axis_index("data")
        return jax.lax.pmean(
            jnp.mean(jnp.square(h)) * rank + 1e-3 * sums.mean(), "data"
        )

    loss = sharded(local, (P(), P("data")))
    return Case(mpx.amp(loss), ({"w": weight(0, 3, 4, 4)}, normal(1, 16, 4)))
