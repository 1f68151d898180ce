"""Trains a character language model with AdamW in 12, 5.2 and 4.2 bytes a parameter.

    python examples/compressed_optimizer.py

The text is the manual behind Python's `help()`, which every Python has: no download. The
model guesses the next character from the sixteen before it. The first line of the table
is `optax.adamw` in f32; the second `mpx.optim.flash_adamw`, which ends at the same loss; the
third leaves out the master weights and rounds to nearest, as plain bf16 weights are
rounded: small updates are lost.
"""

import argparse
import functools
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx

CONTEXT, WIDTH, HIDDEN, BATCH = 16, 32, 256, 64


def load_text():
    """Returns all windows of the text: the characters before, and the next one."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = np.frombuffer(text, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)
    return windows[:, :-1], windows[:, -1]


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    inputs = CONTEXT * WIDTH
    return {
        "embed": jax.random.normal(k1, (128, WIDTH)) / 2,
        "hidden": jax.random.normal(k2, (inputs, HIDDEN)) * inputs**-0.5,
        "bias": jnp.zeros(HIDDEN),
        "head": jax.random.normal(k3, (HIDDEN, 128)) * HIDDEN**-0.5,
    }


def loss_fn(params, before, after):
    x = params["embed"][before].reshape(len(before), -1)
    x = jax.nn.relu(x @ params["hidden"] + params["bias"])
    logits = mpx.cast_to_float32(x @ params["head"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, after).mean()


def optax_step(optimizer):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, before, after):
        loss, grads = jax.value_and_grad(loss_fn)(params, before, after)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def flash_step(optimizer):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, before, after):
        loss, grads = jax.value_and_grad(loss_fn)(params, before, after)
        params, state = optimizer.step(params, state, grads)
        return params, state, loss

    return step


def train(optimizer, make_step, dtype, steps):
    """Returns the mean loss of the last tenth of the steps, and bytes a parameter."""
    before, after = load_text()
    params = init(jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    if dtype == "f32":
        state = optimizer.init(params)
    else:
        params, state = optimizer.init_from(params, dtype)
    step, losses = make_step(optimizer), []
    rng = np.random.default_rng(0)  # the same batches for every optimizer
    for _ in range(steps):
        rows = rng.integers(len(after), size=BATCH)
        params, state, loss = step(
            params, state, before[rows].astype(np.int32), after[rows].astype(np.int32)
        )
        losses.append(loss)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)))
    return float(np.mean(losses[-max(1, steps // 10) :])), nbytes / count


def main(argv=None):
    parser = argparse.ArgumentParser(description="Compares AdamW in 12 and in 5 bytes.")
    parser.add_argument("--steps", type=int, default=1000, metavar="N")
    parser.add_argument("--lr", type=float, default=5e-4, metavar="X")
    args = parser.parse_args(argv)
    rate = optax.cosine_decay_schedule(args.lr, args.steps)
    bare = mpx.optim.Compression(master_bits=None, rounding="nearest")
    runs = {
        "optax.adamw, f32": (optax.adamw(rate), optax_step, "f32"),
        "flash_adamw, bf16": (mpx.optim.flash_adamw(rate), flash_step, "bf16"),
        "flash_adamw, bf16, no masters": (
            mpx.optim.flash_adamw(rate, compression=bare),
            flash_step,
            "bf16",
        ),
    }
    print(f"{'optimizer':<30} {'loss':>6} {'bytes a parameter':>18}")
    results = {}
    for name, (optimizer, make_step, dtype) in runs.items():
        results[name] = train(optimizer, make_step, dtype, args.steps)
        loss, nbytes = results[name]
        print(f"{name:<30} {loss:6.3f} {nbytes:18.2f}", flush=True)
    return results


if __name__ == "__main__":
    main()
