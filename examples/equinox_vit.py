"""Trains a vision transformer written in Equinox, in f32 and under `mpx.amp`.

    python examples/equinox_vit.py

The images are the 8 × 8 digits of scikit-learn: no download. The model is written as for
f32. The only difference between the two runs is `mpx.amp` around the loss.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets

import mpx

SIZE = {"patch": 2, "width": 64, "hidden": 256, "heads": 4, "layers": 3}


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key, width, hidden, heads):
        first, second, third = jax.random.split(key, 3)
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=first)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.up = eqx.nn.Linear(width, hidden, key=second)
        self.down = eqx.nn.Linear(hidden, width, key=third)

    def __call__(self, x):
        normed = jax.vmap(self.norm1)(x)
        x = x + self.attention(normed, normed, normed)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(hidden)


class ViT(eqx.Module):
    embed: eqx.nn.Linear
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, key, *, patch, width, hidden, heads, layers):
        keys = jax.random.split(key, layers + 3)
        places = (8 // patch) ** 2
        self.embed = eqx.nn.Linear(patch**2, width, key=keys[0])
        self.places = 0.02 * jax.random.normal(keys[1], (places, width))
        self.blocks = [Block(k, width, hidden, heads) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=keys[2])
        self.patch = patch

    def __call__(self, image):
        p = self.patch
        patches = image.reshape(8 // p, p, 8 // p, p)
        patches = patches.transpose(0, 2, 1, 3).reshape(-1, p**2)
        x = jax.vmap(self.embed)(patches) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(0)))


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit
def predict(model, images):
    return jax.vmap(model)(images).argmax(-1)


def train(loss_fn, model, images, labels, steps):
    """Returns the trained model and its losses."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 2e-3, 20, steps))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, images, labels):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, labels)
        updates, state = optimizer.update(
            grads, state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), state, loss

    rng, losses = np.random.default_rng(0), []  # the same batches for both
    for _ in range(steps):
        rows = rng.integers(len(labels), size=64)
        model, state, loss = step(model, state, images[rows], labels[rows])
        losses.append(float(loss))
    return model, losses


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains a ViT in f32 and under amp.")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    args = parser.parse_args(argv)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    test = slice(1500, None)
    model, results = eqx.filter_jit(ViT)(jax.random.key(0), **SIZE), {}
    for name, loss in {"f32": loss_fn, "amp": mpx.amp(loss_fn)}.items():
        trained, losses = train(loss, model, images[:1500], labels[:1500], args.steps)
        guess = predict(trained, images[test])
        accuracy = float(jnp.mean(guess == labels[test]))
        results[name] = np.mean(losses[-max(1, args.steps // 10) :]), accuracy
        print(f"{name}: loss {results[name][0]:.3f}, test accuracy {accuracy:.3f}")
    print(mpx.inspect.report(mpx.amp(loss_fn), model, images[:64], labels[:64]))
    return results


if __name__ == "__main__":
    main()
