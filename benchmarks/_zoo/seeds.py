"""Recipes and optimizers over several seeds, on new batches of data that can be learnt."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from _zoo.measure import attempt, make
from _zoo.routes import axes_of, run_of
from text import TINY, batches, read_text
from untouched import image_batches

TESTS, TEST_SEED = 16, 1000  # unseen batches, the same for all seeds
# Each route, and that from whose seeds it must not differ.
ROUTES = {
    "amp bf16": None,
    **dict.fromkeys(("f32", "fp8", "int8", "nvfp4"), "amp bf16"),
    **dict.fromkeys(("residuals int8", "residuals e4m3"), "amp bf16"),
    "muon f32": None,
    "flash muon": "muon f32",
}


# --- data of the shapes of a batch ------------------------------------------------------


def text(ids, seed):
    """Yields pieces of Python's language reference, as ASCII."""
    size = TINY._replace(sequences=ids.shape[0], length=ids.shape[1])
    yield from (x[:, :-1] % 128 for x in batches(read_text()[0], size, seed))


def images(batch, seed):
    """Yields images, channels first, and labels: noise around a pattern for each class."""
    count, channels, size, _ = batch[0].shape
    for x, labels in image_batches(count, size, channels, 10, seed):
        yield np.moveaxis(x, -1, 1), labels


def noisy(batch, seed):
    """Yields images, the noise to predict, times, and words that say the class."""
    rng, words = np.random.default_rng(seed), np.random.default_rng(0)
    words = words.normal(size=(10, *batch[3].shape[1:])).astype(np.float32)
    for x, labels in images(batch, seed):
        noise = rng.normal(size=x.shape).astype(np.float32)
        yield x, noise, rng.integers(0, 1000, len(x), np.int32), words[labels]


def mixed(batch, seed):
    """Yields tokens, and each in reverse order plus the mean of all."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=batch[0].shape).astype(np.float32)
        yield x, x[..., ::-1] + x.mean(1, keepdims=True)


class Task(NamedTuple):
    """Makes batches of the shapes of a batch, from a seed; how fast and long to train."""

    batches: Callable[[Any, int], Iterator[Any]]
    rate: float = 1e-3
    steps: int = 200


TASKS = {
    "GPT-2": Task(text),
    "Llama": Task(text),
    "ViT": Task(images),
    "Mixtral (Keras)": Task(text),
    "attention (NNX)": Task(mixed, rate=3e-3),  # hardly begins to learn at 1e-3
    "Mamba 2": Task(text),
    "diffusion U-Net (Diffusers)": Task(noisy, steps=60),  # steps take long
}


# --- training ---------------------------------------------------------------------------


def shuffled(params, seed):
    """Permutes the elements of each array: another draw, whatever drew the first."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.permutation(np.ravel(x)).reshape(x.shape)), params
    )


def measure(name, routes, seeds):
    """Returns the loss of unseen batches after training, by route and seed."""
    task, cells = TASKS[name], {}
    case = dataclasses.replace(make(name), learning_rate=task.rate)
    tests = list(itertools.islice(task.batches(case.batch, TEST_SEED), TESTS))
    judge = jax.jit(case.loss)
    loss = lambda params: float(np.mean([judge(params, x) for x in tests]))  # noqa: E731

    def train(route):
        step, ends = None, []
        for seed in range(seeds):
            params = shuffled(case.params, seed)
            run = run_of(route, dataclasses.replace(case, params=params))
            step, carry = step or jax.jit(run.step), run.carry  # one program
            for batch in itertools.islice(task.batches(case.batch, seed), task.steps):
                carry = step(carry, batch)[0]
            ends.append(loss(carry[0]))
        return None, {"losses": ends}

    attempt(cells, "before", lambda: (None, {"losses": [loss(case.params)]}))
    for route in routes:
        if "muon" not in route or jax.tree.leaves(axes_of(case.params)):
            attempt(cells, route, lambda route=route: train(route))
    return cells
