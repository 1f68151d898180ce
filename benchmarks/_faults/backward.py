"""Faults of the backward pass: the loss is fine."""

import jax
import jax.numpy as jnp

from _faults.table import (
    F16,
    Case,
    given,
    in_low,
    linear,
    mlp,
    normal,
    planted,
    weight,
)


@planted("distance", "singularity", "nan", backward=True)
@given({"w": weight(0, 4, 4)}, normal(1, 6, 4))
def sqrt_at_zero(params, x):
    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2, -1))  # <- sqrt_at_zero

    h = x @ params["w"]
    return jnp.mean(distance(h[:, None], h[None, :]))


@planted("gated", "singularity", "nan", backward=True)
@given({"w": weight(0, 4, 4)}, normal(1, 6, 4).at[3].set(0.0))
def where_after_the_pole(params, x):
    def gated(x):
        return jnp.where(x > 0, jnp.log(x), 0.0)  # <- where_after_the_pole

    return jnp.mean(gated(x @ params["w"]))


@planted("norm_at_zero", "singularity", "nan", backward=True)
@given({"w": weight(0, 4, 4), "bias": jnp.zeros(4)}, normal(1, 6, 4))
def norm_at_zero(params, x):
    decay = jnp.linalg.norm(params["bias"])  # <- norm_at_zero
    return jnp.mean(jnp.square(x @ params["w"] + params["bias"])) + 1e-3 * decay


@planted("power", "singularity", "nan", backward=True)
@given(mlp(0, 4, 5), normal(1, 9, 4).at[5].set(0.0))
def fractional_power_at_zero(params, x):
    def power(x):
        return x**0.5  # <- fractional_power_at_zero

    return jnp.mean(power(jnp.square(linear(params["layer0"], x))))


@planted("w", "singularity", "nan", backward=True)
@given({"w": jnp.ones((4, 6))}, jnp.round(normal(1, 5, 4)))
def std_of_equal_numbers(params, x):
    h = x @ params["w"]
    spread = jnp.std(h, -1)  # <- std_of_equal_numbers
    return jnp.mean(spread)


@planted("out", "underflow", backward=True)
def tiny_gradients_in_f16():
    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        return jnp.mean(h @ params["out"])  # <- tiny_gradients_in_f16

    params = {"w": weight(0, 8, 64), "out": weight(1, 64, 1, scale=2e-3)}
    return Case(in_low(loss, jnp.float16), (params, normal(2, 2048, 8)))


@planted("squash", "underflow", "cancellation", backward=True)
@given({"w": weight(0, 8, 4)}, normal(2, 64, 8), how=F16)
def saturated_gradients_in_f16(params, x):
    def squash(x):
        return jax.nn.sigmoid(x)  # <- saturated_gradients_in_f16

    return jnp.mean(squash(x @ params["w"] + 13))


@planted("loss", "overflow", backward=True)
def loss_scale_too_large():
    def loss(params, x):
        h = jax.nn.relu(x @ params["w"])
        out = h @ params["out"]
        return jnp.mean(jnp.square(out.astype(jnp.float32)))  # <- loss_scale_too_large

    def low(params, x):
        return loss(
            jax.tree.map(lambda a: a.astype(jnp.float16), params), x.astype(jnp.float16)
        )

    params = {"w": weight(0, 8, 16), "out": weight(1, 16, 2)}
    return Case(low, (params, normal(2, 16, 8, scale=4)), 2.0**24)


@planted("log_abs", "constant")
@given({"w": weight(0, 4, 4)}, normal(1, 10, 4).at[3].set(0.0), how=F16)
def reciprocal_of_small_numbers(params, x):
    def log_abs(x):
        return jnp.log(jnp.abs(x) + 6e-6)  # <- reciprocal_of_small_numbers

    return jnp.sum(log_abs(x @ params["w"]))


@planted("entropy", "singularity", "nan")
@given({"w": weight(0, 8, 8)}, normal(1, 10, 8))
def zero_times_log_of_zero(params, x):
    def entropy(p):
        return -jnp.sum(p * jnp.log(p), -1)  # <- zero_times_log_of_zero

    return jnp.mean(entropy(jax.nn.softmax(x @ params["w"] * 150)))


@planted("ratio", "singularity", "nan")
@given({"w": weight(0, 4, 4)}, normal(1, 6, 4), jnp.array([3.0, 2, 0, 1, 4, 4]))
def division_by_zero(params, x, counts):
    def ratio(a, b):
        return a / b  # <- division_by_zero

    h = jax.nn.relu(x @ params["w"])
    return jnp.mean(ratio(h.sum(-1), counts))


@planted("x", "input")
@given(mlp(0, 4, 4), normal(1, 6, 4).at[2, 1].set(jnp.nan))
def nan_in_the_batch(params, x):  # <- nan_in_the_batch
    return jnp.mean(jnp.square(linear(params["layer0"], x)))


@planted("normalise", "overflow", "singularity", backward=True)
@given({"v": normal(0, 8) * 0.001}, normal(1, 6, 8), how=F16)
def normalising_a_small_vector(params, x):
    def normalise(v):
        return v / jnp.sqrt(jnp.sum(v * v) + 1e-7)  # <- normalising_a_small_vector

    direction = normalise(params["v"])
    return jnp.mean(jnp.tanh(x @ direction * 1e4))


@planted("kl", "underflow", "overflow", "singularity", "nan")
@given({"enc": weight(0, 8, 8)}, normal(1, 20, 8), how=F16)
def exponential_of_a_log_variance(params, x):
    def kl(mean, logvar):
        var = jnp.exp(logvar)  # <- exponential_of_a_log_variance
        return 0.5 * jnp.mean(mean**2 + var - 1 - logvar)

    h = x @ params["enc"]
    mean, logvar = h[:, :4], h[:, 4:] * 12
    return kl(mean, logvar)
