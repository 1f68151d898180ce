"""Compressed optimizers reach the loss of f32 optimizers, in whole training runs.

A language model is trained from three seeds, with optax in f32 and with mpx in bf16
and 24-bit master weights. The statistic is the mean, over the seeds, of the difference
of the final losses of the two runs that share a seed, and so initial weights and
batches. The noise it is compared with is the range of the f32 losses over the seeds.
Final losses are those of all data, with the parameters that the model has: bf16.
"""

import functools
import importlib
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpx
from mpx._quant._codecs import Quantized

# Default promotion for `optax.apply_updates`.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.slow]

SEEDS, BATCH, DECAY, MOMENTUM = 3, 32, 1e-2, 0.9


class Problem(NamedTuple):
    """What is trained, and how.

    Learning rates are those with which the f32 runs learn in so few steps.
    """

    init: Any
    loss: Any
    data: tuple
    steps: int
    rates: dict


# --- The model -------------------------------------------------------------------------


def language_model(params, text):
    """The next character, from the eight before it."""
    x = params["embed"][text].reshape(-1)
    return jax.nn.relu(x @ params["hidden"] + params["bias"]) @ params["head"]


def init_language_model(key, width=64):
    keys = jax.random.split(key, 3)
    normal = jax.random.normal
    return {
        "embed": normal(keys[0], (128, 32)) / 2,
        "hidden": normal(keys[1], (8 * 32, width)) / 16,
        "bias": jnp.zeros(width),
        "head": normal(keys[2], (width, 128)) * width**-0.5,
    }


def cross_entropy(model):
    def loss(params, batch):
        *inputs, labels = batch
        # bf16 weights and bf16 gradients; between them f32, to compare optimizers only.
        params = mpx.cast_to_float32(params)
        logits = jax.vmap(functools.partial(model, params))(*inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def characters():
    # Text that comes with Python: the manual behind `help()`.
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(text, np.uint8), 9)
    windows = windows[: 7 * 2048 : 7].astype(np.int32)
    return windows[:, :-1], windows[:, -1]


def make_problem():
    rates = dict(adamw=1e-3, lion=1e-3, sgdw=0.1)
    loss = cross_entropy(language_model)
    return Problem(init_language_model, loss, characters(), 150, rates)


# --- Optimizers -----------------------------------------------------------------------


def optax_sgdw(rate, momentum, weight_decay):
    return optax.chain(
        optax.trace(momentum),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


OPTIMIZERS = {
    "adamw": (optax.adamw, mpx.optim.flash_adamw, dict(weight_decay=DECAY)),
    "lion": (optax.lion, mpx.optim.flash_lion, dict(weight_decay=DECAY)),
    "sgdw": (
        optax_sgdw,
        mpx.optim.flash_sgdw,
        dict(momentum=MOMENTUM, weight_decay=DECAY),
    ),
}


def step_with(optimizer, params, state, grads):
    if isinstance(optimizer, mpx.optim.FlashOptimizer):
        return tuple(optimizer.step(params, state, grads))
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def train(problem, optimizers, dtype):
    """Trains with several optimizers from all seeds.

    The model is compiled once for all optimizers: it is mapped over their parameters.

    Returns:
        Losses before and after by optimizer, arrays over the seeds; and the states.
    """

    def stack(*params):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)

    def run(params, batches):
        def step(carry, batch):
            params = stack(*(p for p, _ in carry))
            grads = jax.vmap(jax.grad(problem.loss), (0, None))(params, batch)
            grads = [jax.tree.map(lambda g: g[i], grads) for i in range(len(carry))]  # noqa: B023
            rows = zip(optimizers.values(), carry, grads, strict=True)
            return [step_with(tx, *pair, grads=grad) for tx, pair, grad in rows], None

        start = [(params, tx.init(params)) for tx in optimizers.values()]
        carry, _ = lax.scan(step, start, batches)
        trained, states = zip(*carry, strict=True)
        params = stack(params, *trained)
        return jax.vmap(problem.loss, (0, None))(params, problem.data), states

    rows = [
        np.random.default_rng(seed).integers(
            0, len(problem.data[0]), (problem.steps, BATCH)
        )
        for seed in range(SEEDS)
    ]
    # A generator that compiles quickly.
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in range(SEEDS)]
    params = jax.jit(jax.vmap(problem.init))(jnp.stack(keys))
    params = mpx.cast_tree(params, dtype)
    batches = tuple(leaf[np.stack(rows)] for leaf in problem.data)
    losses, states = jax.device_get(jax.jit(jax.vmap(run))(params, batches))
    before, *after = losses.T
    return (
        before,
        dict(zip(optimizers, after, strict=True)),
        dict(zip(optimizers, states, strict=True)),
    )


def train_all(problem):
    """Returns the losses of optax in f32, those of mpx, and the states of mpx."""
    full, low = {}, {}
    for name, rate in problem.rates.items():
        plain, compressed, options = OPTIMIZERS[name]
        rate = optax.cosine_decay_schedule(rate, problem.steps)
        full[name] = plain(rate, **options)
        low[name] = compressed(rate, **options)
        if name == "adamw":
            bare = mpx.optim.Compression(master_bits=None, rounding="nearest")
            low["no masters"] = compressed(rate, **options, compression=bare)
    untrained, reference, _ = train(problem, full, jnp.float32)
    _, losses, states = train(problem, low, jnp.bfloat16)
    return untrained, reference, losses, states


def quantized_share(state):
    """Returns which part of the moments is stored in 8 bits."""
    is_quantized = lambda x: isinstance(x, Quantized)  # noqa: E731
    leaves = jax.tree.leaves(state.mu, is_leaf=is_quantized)
    sizes = [x.codes.size if is_quantized(x) else x.size for x in leaves]
    return sum(
        size for size, x in zip(sizes, leaves, strict=True) if is_quantized(x)
    ) / sum(sizes)


def test_compressed_optimizers_reach_the_loss_of_f32():
    untrained, reference, losses, states = train_all(make_problem())
    for name, full in reference.items():
        noise = np.ptp(full)
        # The premises: it learns, the noise would not hide that it does not, and what
        # is compared is compressed.
        assert np.all(full < 0.7 * untrained), name
        assert 0 < noise < 0.1 * untrained.mean(), name
        assert quantized_share(states[name]) > 0.9, name
        assert np.all(losses[name] != full), name
        assert abs(np.mean(losses[name] - full)) <= noise, name
    # And it can fail: bf16 that is rounded to nearest, without master weights, does.
    full = reference["adamw"]
    assert np.mean(losses["no masters"] - full) > np.ptp(full)


@pytest.mark.usefixtures("optimized_programs")
def test_example_shows_what_it_promises(monkeypatch, capsys):
    folder = pathlib.Path(__file__).parents[1] / "examples"
    monkeypatch.syspath_prepend(str(folder))
    example = importlib.import_module("compressed_optimizer")
    full, compressed, bare = example.main(["--steps", "150"]).values()
    assert [round(nbytes, 1) for _, nbytes in (full, compressed, bare)] == [
        12.0,
        5.2,
        4.2,
    ]
    # The masters make the difference.
    assert abs(compressed[0] - full[0]) < (bare[0] - full[0]) / 4
    assert "flash_adamw, bf16" in capsys.readouterr().out
