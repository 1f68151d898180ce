"""Fine-tunes a model whose weights are bf16 with adapters of low rank (LoRA).

    python examples/lora.py

The weights are frozen and stay in 16 bits, as they are published: no f32 copy, no optimizer
state. The adapters are f32 and train under `mpx.amp`, which multiplies both in bf16. At the
end the adapters are merged into the weights.

The model has learnt the digits 0 to 9 of scikit-learn; the task is the same images with rows
and columns exchanged.
"""

import argparse
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

import mpx

SIZES, RANK = (64, 256, 256, 10), 8


def init(key):
    keys = jax.random.split(key, len(SIZES))
    shapes = list(itertools.pairwise(SIZES))
    return [
        jax.random.normal(k, x) * x[0] ** -0.5
        for k, x in zip(keys, shapes, strict=False)
    ]


def init_adapters(key, weights):
    """Returns a factor of noise and one of zeros a weight: their product changes nothing."""
    keys = jax.random.split(key, len(weights))
    return [
        (
            jax.random.normal(k, (w.shape[0], RANK)) * RANK**-0.5,
            jnp.zeros((RANK, w.shape[1])),
        )
        for k, w in zip(keys, weights, strict=True)
    ]


def predict(adapters, weights, x):
    for number, (weight, (down, up)) in enumerate(zip(weights, adapters, strict=True)):
        x = jax.nn.relu(x) if number else x
        x = x @ weight + (x @ down) @ up
    return x


def loss_fn(adapters, weights, x, y):
    logits = predict(adapters, weights, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(trained, loss_fn, x, y, steps):
    """Trains what comes first in the arguments of a loss."""
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, steps))
    state = optimizer.init(trained)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(trained, state, x, y):
        grads = jax.grad(loss_fn)(trained, x, y)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.integers(len(y), size=64)
        trained, state = step(trained, state, x[rows], y[rows])
    return trained, state


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Fine-tunes frozen bf16 weights with adapters."
    )
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    args = parser.parse_args(argv)
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    x, y = (x / 16).astype(np.float32), y.astype(np.int32)
    other = x.reshape(-1, 8, 8).swapaxes(1, 2).reshape(x.shape)
    first, second = jax.random.split(jax.random.key(0))

    def pretraining_loss(weights, x, y):
        return loss_fn(none, weights, x, y)

    weights = init(first)
    none = [(jnp.zeros((w.shape[0], 1)), jnp.zeros((1, w.shape[1]))) for w in weights]
    weights, _ = train(weights, mpx.amp(pretraining_loss), x, y, args.steps)
    weights = mpx.cast_to_bfloat16(weights)  # as published

    adapters = init_adapters(second, weights)
    tune = mpx.amp(lambda adapters, x, y: loss_fn(adapters, weights, x, y))
    adapters, state = train(adapters, tune, other[:1500], y[:1500], args.steps)
    merged = [
        (w + down @ up).astype(w.dtype)
        for w, (down, up) in zip(weights, adapters, strict=True)
    ]

    def accuracy(weights, adapters):
        return float(
            jnp.mean(predict(adapters, weights, other[1500:]).argmax(-1) == y[1500:])
        )

    results = {
        "before": accuracy(weights, none),
        "with adapters": accuracy(weights, adapters),
        "merged": accuracy(merged, none),
    }
    for name, found in results.items():
        print(f"{name}: accuracy {found:.3f}")
    sizes = [
        sum(a.nbytes for a in jax.tree.leaves(t)) for t in (weights, (adapters, state))
    ]
    print(f"frozen: {sizes[0]:,} bytes; adapters and their Adam: {sizes[1]:,} bytes")
    return results, merged


if __name__ == "__main__":
    main()
