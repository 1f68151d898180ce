"""Faults of the backward pass: the loss is fine."""

import jax
import jax.numpy as jnp

from _faults.table import Case, in_low, linear, mlp, normal, planted, weight


@planted("distance", "singularity", "nan", backward=True)
def sqrt_at_zero():
    def distance(a, b):
        return jnp.sqrt(jnp.sum((a - b) ** 2, -1))  # <- sqrt_at_zero

    def loss(params, x):
        h = x @ params["w"]
        return jnp.mean(distance(h[:, None], h[None, :]))

    return Case(loss, ({"w": weight(0, 4, 4)}, normal(1, 6, 4)))


@planted("gated", "singularity", "nan", backward=True)
def where_after_the_pole():
    def gated(x):
        return jnp.where(x > 0, jnp.log(x), 0.0)  # <- where_after_the_pole

    def loss(params, x):
        return jnp.mean(gated(x @ params["w"]))

    return Case(loss, ({"w": weight(0, 4, 4)}, normal(1, 6, 4).at[3].set(0.0)))


@planted("loss", "singularity", "nan", backward=True)
def norm_at_zero():
    def loss(params, x):
        decay = jnp.linalg.norm(params["bias"])  # <- norm_at_zero
        return jnp.mean(jnp.square(x @ params["w"] + params["bias"])) + 1e-3 * decay

    return Case(loss, ({"w": weight(0, 4, 4), "bias": jnp.zeros(4)}, normal(1, 6, 4)))


@planted("power", "singularity", "nan", backward=True)
def fractional_power_at_zero():
    def power(x):
        return x**0.5  # <- fractional_power_at_zero

    def loss(params, x):
        return jnp.mean(power(jnp.square(linear(params["layer0"], x))))

    return Case(loss, (mlp(0, 4, 5), normal(1, 9, 4).at[5].set(0.0)))


@planted("w", "singularity", "nan", backward=True)
def std_of_equal_numbers():
    def loss(params, x):
        h = x @ params["w"]
        spread = jnp.std(h, -1)  # <- std_of_equal_numbers
        return jnp.mean(spread)

    return Case(loss, ({"w": jnp.ones((4, 6))}, jnp.round(normal(1, 5, 4))))


@planted("out", "underflow", backward=True)
def tiny_gradients_in_f16():
    def loss(params, x):
        h = jnp.tanh(x @ params["w"])
        return jnp.mean(h @ params["out"])  # <- tiny_gradients_in_f16

    params = {"w": weight(0, 8, 64), "out": weight(1, 64, 1, scale=2e-3)}
    return Case(in_low(loss, jnp.float16), (params, normal(2, 2048, 8)))


@planted("squash", "underflow", "cancellation", backward=True)
def saturated_gradients_in_f16():
    def squash(x):
        return jax.nn.sigmoid(x)  # <- saturated_gradients_in_f16

    def loss(params, x):
        return jnp.mean(squash(x @ params["w"] + 13))

    return Case(in_low(loss, jnp.float16), ({"w": weight(0, 8, 4)}, normal(2, 64, 8)))


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
def reciprocal_of_small_numbers():
    def log_abs(x):
        return jnp.log(jnp.abs(x) + 6e-6)  # <- reciprocal_of_small_numbers

    def loss(params, x):
        return jnp.sum(log_abs(x @ params["w"]))

    x = normal(1, 10, 4).at[3].set(0.0)
    return Case(in_low(loss, jnp.float16), ({"w": weight(0, 4, 4)}, x))


@planted("entropy", "singularity", "nan")
def zero_times_log_of_zero():
    def entropy(p):
        return -jnp.sum(p * jnp.log(p), -1)  # <- zero_times_log_of_zero

    def loss(params, x):
        return jnp.mean(entropy(jax.nn.softmax(x @ params["w"] * 150)))

    return Case(loss, ({"w": weight(0, 8, 8)}, normal(1, 10, 8)))


@planted("ratio", "singularity", "nan")
def division_by_zero():
    def ratio(a, b):
        return a / b  # <- division_by_zero

    def loss(params, x, counts):
        h = jax.nn.relu(x @ params["w"])
        return jnp.mean(ratio(h.sum(-1), counts))

    return Case(
        loss, ({"w": weight(0, 4, 4)}, normal(1, 6, 4), jnp.array([3.0, 2, 0, 1, 4, 4]))
    )


@planted("x", "input")
def nan_in_the_batch():
    def loss(params, x):  # <- nan_in_the_batch
        return jnp.mean(jnp.square(linear(params["layer0"], x)))

    return Case(loss, (mlp(0, 4, 4), normal(1, 6, 4).at[2, 1].set(jnp.nan)))


@planted("normalise", "overflow", "singularity", backward=True)
def normalising_a_small_vector():
    def normalise(v):
        return v / jnp.sqrt(jnp.sum(v * v) + 1e-7)  # <- normalising_a_small_vector

    def loss(params, x):
        direction = normalise(params["v"])
        return jnp.mean(jnp.tanh(x @ direction * 1e4))

    return Case(
        in_low(loss, jnp.float16), ({"v": normal(0, 8) * 1e-3}, normal(1, 6, 8))
    )


@planted("kl", "underflow", "overflow", "singularity", "nan")
def exponential_of_a_log_variance():
    def kl(mean, logvar):
        var = jnp.exp(logvar)  # <- exponential_of_a_log_variance
        return 0.5 * jnp.mean(mean**2 + var - 1 - logvar)

    def loss(params, x):
        h = x @ params["enc"]
        mean, logvar = h[:, :4], h[:, 4:] * 12
        return kl(mean, logvar)

    return Case(in_low(loss, jnp.float16), ({"enc": weight(0, 8, 8)}, normal(1, 20, 8)))
