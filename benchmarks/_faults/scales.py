"""Faults under amp and fp8: ranges of activations, gradients and loss scales."""

import jax
import jax.numpy as jnp

import mpx
from _faults.table import (
    Case,
    cross_entropy,
    given,
    linear,
    mlp,
    normal,
    planted,
    weight,
)


@planted("layer1/w", "overflow")
def activation_beyond_f16_under_amp():
    def loss(params, x, y):
        h = jax.nn.relu(linear(params["layer0"], x))
        h = jax.nn.relu(h @ params["layer1"]["w"])  # <- activation_beyond_f16_under_amp
        return cross_entropy(linear(params["layer2"], h) * 1e-6, y)

    params = mlp(0, 8, 32, 32, 5)
    params["layer1"]["w"] *= 2e5
    args = (params, normal(4, 16, 8), jnp.arange(16) % 5)
    return Case(mpx.amp(loss, "f16"), args, mpx.DynamicLossScaling.pow2(2.0**10))


@planted("layer1", "underflow", backward=True)
@given(mlp(0, 8, 16, 3), normal(4, 64, 8), how=mpx.amp(dtype="f16"))
def no_loss_scale_under_amp(params, x):
    h = jnp.tanh(linear(params["layer0"], x))
    out = h @ params["layer1"]["w"]
    return 1e-7 * jnp.mean(jnp.square(out))  # <- no_loss_scale_under_amp


@planted("layer1/w", "overflow", backward=True)
@given(mlp(0, 8, 16, 3), normal(4, 8, 8), how=mpx.amp(dtype="f16"), scaling=2.0**22)
def scale_too_large_under_amp(params, x):
    h = jax.nn.relu(linear(params["layer0"], x))
    out = h @ params["layer1"]["w"]
    return jnp.sum(jnp.square(out))  # <- scale_too_large_under_amp


@planted("gain", "overflow")
def gain_beyond_f16_under_amp():
    def loss(params, x):
        h = x @ params["w"]
        with jax.named_scope("gain"):
            h = h * 3e4  # <- gain_beyond_f16_under_amp
        return jnp.mean(jax.nn.sigmoid(h @ params["out"] * 1e-5))

    params = {"w": weight(0, 8, 16), "out": weight(1, 16, 2)}
    return Case(mpx.amp(loss, "f16"), (params, normal(4, 8, 8, scale=3)), 2.0)


@planted("centre", "cancellation")
def difference_of_large_activations_under_amp():
    def centre(a, b):
        return a - b  # <- difference_of_large_activations_under_amp

    def loss(params, x):
        a = x @ params["a"] + 500
        b = x @ params["b"] + 500
        return jnp.mean(jnp.tanh(centre(a, b) @ params["out"]))

    params = {"a": weight(0, 8, 16), "b": weight(1, 8, 16), "out": weight(2, 16, 2)}
    return Case(mpx.amp(loss), (params, normal(4, 32, 8)))


@planted("loop", "overflow")
def overflow_in_a_scan_under_amp():
    def loop(h, p):
        z = jax.nn.relu(h @ p["up"]) ** 2  # in f32
        return h + z @ p["down"], None  # <- overflow_in_a_scan_under_amp

    def loss(params, x):
        h, _ = jax.lax.scan(loop, x, params["layers"])
        return jnp.mean(jnp.square(h)) * 1e-9

    up = weight(0, 4, 8, 32).at[2].multiply(300.0)
    params = {"layers": {"up": up, "down": weight(1, 4, 32, 8)}}
    return Case(mpx.amp(loss, "f16"), (params, normal(4, 8, 8, scale=2)), 1.0)


@planted("softmax", "overflow")
@given(mlp(0, 16, 32, 16), normal(4, 16, 16), how=mpx.fp8)
def softmax_without_shift_under_fp8(params, x):
    def softmax(z):
        e = jnp.exp(z)  # <- softmax_without_shift_under_fp8
        return e / e.sum(-1, keepdims=True)

    h = jax.nn.relu(linear(params["layer0"], x))
    return jnp.mean(softmax(linear(params["layer1"], h) * 120)[:, 0])
