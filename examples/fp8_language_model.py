"""Trains a language model in bf16 and with its linear layers in 8-bit floating point.

    python examples/fp8_language_model.py

The model is a dict of arrays, written as for f32: `mpx.fp8` rounds the operands of its
linear layers to 8 bits, forward and backward, and keeps attention and head as `mpx.amp` has
them. Only a GPU with fp8 units becomes faster, and only with wide layers; on a CPU, and with
`min_gain=0`, this shows that the loss stays the same.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _text import CHARACTERS, batches

LENGTH, WIDTH, HEADS, LAYERS = 64, 128, 4, 2


@jax.jit
def init(key):
    def matrix(*shape):
        nonlocal key
        key, own = jax.random.split(key)
        return jax.random.normal(own, shape) * shape[0] ** -0.5

    def layer():
        return {
            "qkv": matrix(WIDTH, 3 * WIDTH),
            "out": matrix(WIDTH, WIDTH),
            "up": matrix(WIDTH, 4 * WIDTH),
            "down": matrix(4 * WIDTH, WIDTH),
            "norms": jnp.ones((2, WIDTH)),
        }

    return {
        "embed": matrix(CHARACTERS, WIDTH),
        "places": matrix(LENGTH, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "head": matrix(WIDTH, CHARACTERS),
    }


def norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * weight


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["places"]
    for layer in params["layers"]:
        qkv = norm(x, layer["norms"][0]) @ layer["qkv"]
        q, k, v = jnp.split(qkv.reshape(len(x), LENGTH, HEADS, -1), 3, -1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
    logits = norm(x, jnp.ones(WIDTH)) @ params["head"]
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def train(loss_fn, steps):
    """Returns the mean loss of the last tenth of the steps."""
    params = init(jax.random.key(0))
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, steps))
    state = optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for tokens in batches(steps, 16, LENGTH):
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    return np.mean(losses[-max(1, steps // 10) :])


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Trains a language model in f32, bf16 and fp8."
    )
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    args = parser.parse_args(argv)
    modes = {
        "f32": loss_fn,
        "bf16": mpx.amp(loss_fn),
        "fp8": mpx.fp8(mpx.amp(loss_fn), min_gain=0),
    }
    shapes = jax.eval_shape(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((16, LENGTH + 1), jnp.int32)
    report = mpx.inspect.report(modes["fp8"], shapes, tokens)
    assert report.fp8 is not None
    print("in fp8:", *dict.fromkeys(x.param for x in report.fp8.changed))
    results = {}
    for name, loss in modes.items():
        results[name] = train(loss, args.steps)
        print(f"{name:>4}: loss {results[name]:.3f}", flush=True)
    return results, report


if __name__ == "__main__":
    main()
