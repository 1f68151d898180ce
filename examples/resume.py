"""Trains with a compressed AdamW, stops half way, and goes on from its checkpoint.

    python examples/resume.py

Parameters, optimizer, loss scale and step number are saved together by `mpx.checkpoint`,
while training goes on. The run that was stopped ends bit for bit where the other one does.
Run it twice with `--folder run`: the second call finds the first one's end.
"""

import argparse
import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax

import mpx
from _text import CHARACTERS, batches

LENGTH, WIDTH, HIDDEN = 16, 32, 256
OPTIMIZER = mpx.optim.flash_adamw(1e-3)


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]].reshape(len(tokens), -1)
    logits = jax.nn.relu(x @ params["hidden"] + params["bias"]) @ params["head"]
    labels = tokens[:, -1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def init():
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = LENGTH * WIDTH
    weights = {
        "embed": jax.random.normal(keys[0], (CHARACTERS, WIDTH)) / 2,
        "hidden": jax.random.normal(keys[1], (inputs, HIDDEN)) * inputs**-0.5,
        "bias": jnp.zeros(HIDDEN),
        "head": jax.random.normal(keys[2], (HIDDEN, CHARACTERS)) * HIDDEN**-0.5,
    }
    params, optimizer = OPTIMIZER.init_from(weights, "f16")
    scaling = mpx.DynamicLossScaling.pow2()
    return {"params": params, "optimizer": optimizer, "scaling": scaling}


@functools.partial(jax.jit, donate_argnums=0)
def step(state, tokens):
    value_and_grad = mpx.value_and_grad(mpx.amp(loss_fn, "f16"))
    result = value_and_grad(state["scaling"], state["params"], tokens)
    params, optimizer = OPTIMIZER.step(
        state["params"], state["optimizer"], result.grads, finite=result.finite
    )
    state = {"params": params, "optimizer": optimizer, "scaling": result.scaling}
    return state, result.value


def train(folder, steps):
    """Trains up to a number of steps, from the last checkpoint if there is one."""
    with mpx.checkpoint.Checkpointer(folder, keep=2) as checkpoints:
        latest = checkpoints.latest()
        first = 0 if latest is None else latest + 1
        state = init() if latest is None else checkpoints.restore(jax.eval_shape(init))
        print(f"{folder.name}: from step {first}", end="", flush=True)
        loss = None
        for number, tokens in enumerate(batches(steps, 64, LENGTH)):
            if number < first:
                continue  # the same batches as in the run that was stopped
            state, loss = step(state, tokens)
            if number % 10 == 9 or number == steps - 1:
                checkpoints.save(number, state)
        end = "nothing to do" if loss is None else f"loss {float(loss):.3f}"
        print(f" to {steps}, {end}", flush=True)
    return state


def main(argv=None):
    parser = argparse.ArgumentParser(description="Stops and resumes a training run.")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    parser.add_argument("--folder", type=pathlib.Path, metavar="PATH")
    args = parser.parse_args(argv)
    if args.folder is not None:
        return train(args.folder.absolute(), args.steps)
    with tempfile.TemporaryDirectory() as folder:
        whole = train(pathlib.Path(folder, "undisturbed"), args.steps)
        train(pathlib.Path(folder, "stopped"), args.steps // 2)
        resumed = train(pathlib.Path(folder, "stopped"), args.steps)
    mpx.testing.assert_trees_equal(resumed, whole)
    print("both runs end with the same bits")
    return resumed


if __name__ == "__main__":
    main()
