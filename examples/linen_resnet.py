"""Trains a Flax Linen ResNet with BatchNorm in f16, with dynamic loss scaling.

    python examples/linen_resnet.py

The images are the 8 × 8 digits of scikit-learn: no download. The scale starts too high on
purpose: the first steps overflow, are skipped, and leave parameters, optimizer and running
statistics as they were.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets
from flax.training import train_state

import mpx

BLOCKS = (32, 1), (32, 1), (64, 2), (64, 1)  # width and stride


class Block(nn.Module):
    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, train):
        def norm():
            return nn.BatchNorm(use_running_average=not train, momentum=0.9)

        skip, strides = x, (self.stride, self.stride)
        x = nn.relu(norm()(nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)))
        x = norm()(nn.Conv(self.width, (3, 3), use_bias=False)(x))
        if skip.shape != x.shape:
            skip = norm()(nn.Conv(self.width, (1, 1), strides, use_bias=False)(skip))
        return nn.relu(x + skip)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for width, stride in BLOCKS:
            x = Block(width, stride)(x, train)
        return nn.Dense(10)(x.mean((1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: dict
    scaling: mpx.LossScaling


def loss_fn(params, batch_stats, images, labels):
    variables = {"params": params, "batch_stats": batch_stats}
    logits, changed = ResNet().apply(variables, images, True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean(), changed["batch_stats"]


@jax.jit
def step(state, images, labels):
    value_and_grad = mpx.value_and_grad(mpx.amp(loss_fn, "f16"), has_aux=True)
    result = value_and_grad(
        state.scaling, state.params, state.batch_stats, images, labels
    )
    state, _ = mpx.optimizer_update(state, None, None, result.grads, result.finite)
    state = state.replace(batch_stats=result.aux, scaling=result.scaling)
    return state, result.value, result.finite


@jax.jit
def predict(state, images):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = ResNet().apply(variables, images, False)
    return jnp.argmax(jnp.asarray(logits), -1)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains a ResNet in f16.")
    parser.add_argument("--steps", type=int, default=150, metavar="N")
    args = parser.parse_args(argv)
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = np.float32(images / 16).reshape(-1, 8, 8, 1)
    init = jax.jit(ResNet().init, static_argnums=2)
    variables = init(jax.random.key(0), images[:1], True)
    state = TrainState.create(
        apply_fn=None,
        params=variables["params"],
        tx=optax.adam(optax.cosine_decay_schedule(2e-3, args.steps)),
        batch_stats=variables["batch_stats"],
        scaling=mpx.DynamicLossScaling.pow2(init=2.0**20),
    )
    rng, skipped, losses = np.random.default_rng(0), 0, []
    for _ in range(args.steps):
        rows = rng.integers(1500, size=64)
        state, loss, finite = step(state, images[rows], labels[rows])
        skipped += not finite
        losses.append(float(loss))
    accuracy = float(jnp.mean(predict(state, images[1500:]) == labels[1500:]))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, test accuracy {accuracy:.3f}")
    print(f"{skipped} steps skipped, {int(state.step)} taken")
    print(f"the scale went from 2**20 to {float(state.scaling.loss_scaling):g}")
    return losses, skipped, state


if __name__ == "__main__":
    main()
