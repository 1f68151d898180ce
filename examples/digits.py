"""Trains one vision transformer in five precisions and shows what each one costs.

    python examples/digits.py

`f32` is the reference. `mixed-bf16` and `mixed-f16` use mpx: weights stay in f32, the
model computes in 16 bits. `plain-bf16` and `plain-f16` show what goes wrong when the
weights themselves are cast. The images are the 8 × 8 digits of scikit-learn: no download.
The run ends with a table, a figure and the precision report of the model.
"""

import argparse
import pathlib
import platform
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx

try:
    import sklearn.datasets

    from _report import Run, findings, save_figure, table, write_page
except ImportError as error:
    sys.exit(f'{error}. The demo needs: pip install "mpx-jax[examples]"')
from equinox_vit import ViT

SIZE = {"patch": 4, "width": 32, "hidden": 64, "heads": 4, "layers": 2}
# Adam moves a weight by about LR. bf16 drops what is below 1/512 of a weight.
BATCH, LR = 32, 2e-4
TEST = 360

# The dtype of the weights and, with mpx, that of matmuls.
MODES = {
    "f32": ("float32", None),
    "mixed-bf16": ("float32", "bf16"),
    "mixed-f16": ("float32", "f16"),
    "plain-bf16": ("bfloat16", None),
    "plain-f16": ("float16", None),
}


def load_digits():
    """Returns images with about mean 0 and deviation 1, and labels; shuffled."""
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = ((images[order] - 5) / 6).astype(np.float32)
    return images, labels[order].astype(np.int32)


def batches(images, labels, steps):
    """Yields random batches of all but the first `TEST` images, each time the same."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        rows = rng.integers(TEST, len(labels), size=BATCH)
        yield images[rows], labels[rows]


def loss_fn(model, images, labels):
    logits = mpx.cast_to_float32(jax.vmap(model)(images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_step(optimizer, compute):
    """Returns the usual step, or with `compute` the same in mixed precision."""

    @eqx.filter_jit
    def step(model, state, scaling, *batch):
        if compute is None:  # every number has the dtype of the weights
            loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
            updates, state = optimizer.update(grads, state)
            return eqx.apply_updates(model, updates), state, scaling, loss
        result = mpx.value_and_grad(mpx.amp(loss_fn, compute))(scaling, model, *batch)
        model, state = mpx.optimizer_update(
            model, optimizer, state, result.grads, result.finite
        )
        return model, state, result.scaling, result.value

    return step


@eqx.filter_jit
def predict(model, images):
    return jnp.argmax(jax.vmap(model)(images), -1)


def train(mode, model, images, labels, steps):
    """Trains a model in one mode, with a line of progress."""
    dtype, compute = MODES[mode]
    optimizer = optax.adam(LR)
    step = make_step(optimizer, compute)
    model = mpx.cast_tree(model, dtype)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.NoLossScaling()
    if compute == "f16":
        # Too high at the start and quick to grow, so that a short run shows it at work.
        scaling = mpx.DynamicLossScaling.pow2(init=2.0**24, period=200)
    losses = []
    for batch in batches(images.astype(dtype), labels, steps):
        if sys.stdout.isatty():
            print(f"{mode}: step {len(losses) + 1} of {steps}", end="\r", flush=True)
        model, state, scaling, loss = step(model, state, scaling, *batch)
        losses.append(float(loss))
    weights = [np.asarray(x) for x in jax.tree.leaves(eqx.filter(model, eqx.is_array))]
    stuck = [np.ravel(w + np.asarray(LR, w.dtype) == w) for w in weights]
    guess = predict(mpx.cast_to_float32(model), images[:TEST])
    run = Run(
        losses=np.asarray(losses),
        scale=float(scaling.loss_scaling),
        skipped=int(scaling.metrics().get("skipped", 0)),
        accuracy=float(np.mean(guess == labels[:TEST])),
        state_bytes=sum(x.nbytes for x in jax.tree.leaves((weights, state))),
        stuck=float(np.mean(np.concatenate(stuck))),
    )
    print(f"{mode}: test accuracy {run.accuracy:.3f}, loss {run.loss:.3f}", flush=True)
    return run


def main(argv=None):
    parser = argparse.ArgumentParser(description="Trains a ViT in five precisions.")
    parser.add_argument("--steps", type=int, default=800, metavar="N")
    path = {"type": pathlib.Path, "metavar": "FILE"}
    parser.add_argument("--figure", default="out/digits.png", **path)
    parser.add_argument("--page", help="a page to write the table into", **path)
    args = parser.parse_args(argv)
    images, labels = load_digits()
    intro = (
        f"{len(labels) - TEST:,} training and {TEST} test images, on "
        f"{jax.devices()[0].device_kind}. Adam, lr {LR:g}, {args.steps} steps of "
        f"{BATCH} images. Python {platform.python_version()}, jax {jax.__version__}, "
        f"{platform.machine()}."
    )
    print(intro, flush=True)
    model = eqx.filter_jit(ViT)(jax.random.key(0), **SIZE)
    runs = {mode: train(mode, model, images, labels, args.steps) for mode in MODES}
    text = "\n".join([*table(runs), "", *findings(runs, TEST, LR)])
    save_figure(runs, args.figure)
    if args.page:
        write_page(args.page, f"{intro}\n\n{text}")
    print(f"\n{text}\n\nFigure: {args.figure}\n")
    print(mpx.inspect.report(mpx.amp(loss_fn), model, images[:BATCH], labels[:BATCH]))
    return runs


if __name__ == "__main__":
    main()
