"""Faults that leave every number finite and a result that is 5 to 100 % off."""

import functools

import jax
import jax.numpy as jnp

import mpx
from _faults.table import (
    BF16,
    Case,
    given,
    is_healthy,
    normal,
    planted,
    weight,
)


@planted("step", "accumulation")
@given({"w": weight(0, 4, 1)}, normal(1, 300, 4), jnp.ones(300, bool))
def counter_at_256_of_300(params, x, mask):
    def count(mask):
        def step(n, m):
            return n + m.astype(jnp.bfloat16), None  # <- counter_at_256_of_300

        return jax.lax.scan(step, jnp.zeros((), jnp.bfloat16), mask)[0]

    each = jnp.square(x @ params["w"])[:, 0]
    return jnp.sum(each * mask) / count(mask).astype(jnp.float32)


@planted("rows", "accumulation")
@given({"w": weight(0, 4, 4)}, normal(1, 512, 4), jnp.arange(0, 512, 2))
def difference_of_a_running_sum(params, x, ends):
    def rows(h, ends):
        total = jnp.cumsum(h, axis=0)  # <- difference_of_a_running_sum
        picked = total[ends]
        return jnp.diff(picked, axis=0)

    h = jnp.square(x @ params["w"]).astype(jnp.bfloat16)
    return jnp.mean(jnp.square(rows(h, ends)).astype(jnp.float32))


@planted("gate", "accumulation", backward=True)
@given({"gain": jnp.float32(1)}, 1 + normal(0, 8, 512, 8, scale=0.1))
def gradient_of_a_gain_summed_in_bf16(params, x):
    def gate(params, h):
        gain = params["gain"].astype(jnp.bfloat16)
        return h * gain  # <- gradient_of_a_gain_summed_in_bf16

    h = gate(params, x.astype(jnp.bfloat16))
    return jnp.mean(h.astype(jnp.float32))


@planted("above", "decision")
@given({"w": jnp.float32(1)}, jnp.full(8, 1.001))
def comparison_of_equal_numbers(params, x):
    def above(h, threshold):
        return h > threshold  # <- comparison_of_equal_numbers

    h = (x * params["w"]).astype(jnp.bfloat16)
    return jnp.mean(above(h, jnp.bfloat16(1)).astype(jnp.float32)) * params["w"]


@planted("residual", "accumulation", "cancellation", "precision")
@given({"w": jnp.float32(1)}, 1 + jnp.arange(16.0))
def result_of_zero_in_f32(params, x):
    def residual(h):
        moved = h + jnp.bfloat16(1000)  # <- result_of_zero_in_f32
        return moved - jnp.bfloat16(1000) - h  # <- result_of_zero_in_f32

    h = (x * params["w"]).astype(jnp.bfloat16)
    return jnp.sum(jnp.square(residual(h)).astype(jnp.float32))


def _fixed_point(step, start, tolerance):
    def goes_on(state):
        return state[1] > tolerance  # <- tolerance_below_the_format

    def body(state):
        new = step(state[0])
        return new, jnp.max(jnp.abs(new - state[0]))

    return jax.lax.while_loop(goes_on, body, (start, jnp.float32(jnp.inf)))[0]


@planted("goes_on", "convergence")
def tolerance_below_the_format():
    def loss(params, x):
        frozen = jax.lax.stop_gradient(params["w"])
        h = _fixed_point(lambda y: jnp.tanh(y @ frozen + x), jnp.zeros_like(x), 1e-4)
        return jnp.mean(h @ params["head"])

    params = {"w": weight(0, 32, 32, scale=0.9), "head": weight(1, 32, 1)}
    return Case(mpx.amp(loss), (params, normal(2, 4, 32)))


@is_healthy
def fixed_point_with_a_coarse_tolerance_bf16():
    def loss(params, x):
        frozen = jax.lax.stop_gradient(params["w"])
        h = _fixed_point(lambda y: jnp.tanh(y @ frozen + x), jnp.zeros_like(x), 0.05)
        return jnp.mean(jnp.square(h @ params["head"]))

    params = {"w": weight(0, 32, 32, scale=0.9), "head": weight(1, 32, 1)}
    return Case(mpx.amp(loss), (params, normal(2, 4, 32)))


@planted("likelihood", "constant")
def epsilon_with_a_huge_reciprocal():
    def likelihood(h):
        return jnp.log(jax.nn.sigmoid(h) + 1e-8)  # <- epsilon_with_a_huge_reciprocal

    def loss(params, x):
        h = jax.nn.relu(x @ params["w"]) @ params["head"]
        return -jnp.mean(likelihood(-40 * h))

    params = {"w": weight(0, 8, 16), "head": jnp.abs(weight(1, 16, 4))}
    return Case(mpx.amp(loss, "f16"), (params, normal(2, 6, 8)), 1024.0)


@planted("block", "accumulation", "precision")
@given({"w": jnp.float32(1)}, jnp.full(200, 0.101), how=BF16)
def moving_sum_of_a_tenth(params, x):
    def block(x):
        total = jnp.zeros((), x.dtype)
        for row in x:
            total = total + row  # <- moving_sum_of_a_tenth
        return total

    return block(x * params["w"]) / len(x)


@is_healthy
@given({"w": jnp.float32(1)}, normal(0, 12) + 3, how=BF16)
def sum_of_a_few_numbers_bf16(params, x):
    return functools.reduce(jnp.add, list(x * params["w"])) / len(x)


@is_healthy
def converged_regression_with_relu_bf16():
    def predict(params, x):
        return jax.nn.relu(x @ params["w"]) @ params["head"]

    def loss(params, x, y):
        return jnp.mean(jnp.square(predict(params, x) - y))

    params = {"w": weight(0, 8, 16), "head": weight(1, 16, 1)}
    x = normal(2, 32, 8)
    return Case(mpx.amp(loss), (params, x, predict(params, x)))
