"""Trains one vision transformer in five precisions and shows what each one costs.

    python examples/digits.py

`f32` is the reference. `mixed-bf16` and `mixed-f16` use mpx: weights stay in f32, the
model computes in 16 bits. `plain-bf16` and `plain-f16` show what goes wrong when the
weights themselves are cast. The run ends with a table, a figure, the precision report of
the model, and the exponents of its gradients. The images are the handwritten digits inside
scikit-learn; `--help` lists larger models and data sets.
"""

import argparse
import dataclasses
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

import mpx
from _data import DataError, Dataset, load, load_digits
from _gallery import draw, sparklines, watched_run
from _report import Live, Run, save_figure, show_table, verdict, write_page
from _vit import Size, ViT

is_weight = eqx.is_inexact_array


def loss_fn(model: ViT, batch: tuple[Array, Array]) -> Float[Array, ""]:
    """Returns the mean cross entropy, computed in f32."""
    images, labels = batch
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    losses = mpx.force_full_precision(cross_entropy, jnp.float32)
    return jnp.mean(losses(jax.vmap(model)(images), labels))


def plain_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the usual step: every number has the dtype of the weights."""

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Any, model: ViT, state: Any, scaling: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, state = optimizer.update(grads, state, eqx.filter(model, is_weight))
        return eqx.apply_updates(model, updates), state, scaling, loss

    return step


def mixed_step(
    optimizer: optax.GradientTransformation, dtype: str
) -> Callable[..., Any]:
    """Returns the same step in mixed precision: two calls have changed."""

    @eqx.filter_jit(donate="all-except-first")
    def step(batch: Any, model: ViT, state: Any, scaling: Any) -> Any:
        result = mpx.value_and_grad(mpx.amp(loss_fn, dtype))(scaling, model, batch)
        model, state = mpx.optimizer_update(
            model, optimizer, state, result.grads, result.finite
        )
        return model, state, result.scaling, result.value

    return step


def _f16_scaling() -> mpx.DynamicLossScaling:
    # Too high at the start and quick to grow, so that a short run shows it at work.
    return mpx.DynamicLossScaling.pow2(init=2.0**24, period=200)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to train: the dtype of the weights and, with mpx, that of matmuls."""

    dtype: str = "float32"
    compute: str | None = None
    scaling: Callable[..., Any] = mpx.NoLossScaling


MODES = {
    "f32": Mode(),
    "mixed-bf16": Mode(compute="bf16"),
    "mixed-f16": Mode(compute="f16", scaling=_f16_scaling),
    "plain-bf16": Mode(dtype="bfloat16"),
    "plain-f16": Mode(dtype="float16"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """A model size and how long and how fast it is trained."""

    size: Size
    steps: int
    batch: int
    lr: float
    seeds: int = 1


PRESETS = {
    "digits": Preset(
        size=Size(features=32, hidden=64, layers=2, heads=4, patch=4),
        steps=800,
        batch=32,
        # Adam moves a weight by about lr. bf16 drops what is below 1/512 of a weight.
        lr=2e-4,
        seeds=2,
    ),
    "vit-desktop": Preset(
        size=Size(features=256, hidden=800, layers=6, heads=8, patch=4),
        steps=4000,
        batch=256,
        lr=3e-4,
    ),
    "vit-base": Preset(
        size=Size(features=768, hidden=3072, layers=12, heads=12, patch=4),
        steps=4000,
        batch=256,
        lr=1e-4,
    ),
}


def train(
    name: str, preset: Preset, data: Dataset, *, seed: int, live: Live
) -> list[Run]:
    """Trains in one mode, once for each of the seeds `seed`, `seed + 1`, ..."""
    mode = MODES[name]
    optimizer = optax.adam(preset.lr)
    if mode.compute is None:
        step = plain_step(optimizer)
    else:
        step = mixed_step(optimizer, mode.compute)
    runs = []
    for run_seed in range(seed, seed + preset.seeds):
        key = jax.random.key(run_seed)
        model = ViT(preset.size, data.image_shape, data.classes, key=key)
        model = mpx.cast_tree(model, mode.dtype)
        state = optimizer.init(eqx.filter(model, is_weight))
        scaling = mode.scaling()
        losses, scales, skipped = [], [float(scaling.loss_scaling)], 0
        for batch in data.batches(preset.batch, preset.steps, run_seed):
            batch = mpx.cast_tree(batch, mode.dtype)
            model, state, scaling, loss = step(batch, model, state, scaling)
            losses.append(loss)
            if len(losses) % 20 == 0 or len(losses) == preset.steps:
                metrics = scaling.metrics()
                scales.append(float(metrics["loss_scaling"]))
                skipped = int(metrics.get("skipped", 0))
                live.update(name, len(losses), float(loss), scales[-1], skipped)
        runs.append(
            Run(
                losses=np.asarray(jax.device_get(losses), np.float32),
                scales=np.asarray(scales),
                skipped=skipped,
                accuracy=_accuracy(mpx.cast_to_float32(model), data),
                state_bytes=_nbytes((model, state)),
                stuck=_stuck(model, preset.lr),
            )
        )
    live.finish(name, runs)
    return runs


def inspect_run(preset: Preset, data: Dataset, out: Path, steps: int = 120) -> str:
    """Records a short run in f16, draws what it saw, and returns a table of it."""
    model = ViT(preset.size, data.image_shape, data.classes, key=jax.random.key(0))
    batches = data.batches(preset.batch, min(steps, preset.steps), seed=0)
    recorder = watched_run(loss_fn, model, batches, lr=preset.lr)
    if recorder.exponents is None:
        return "No step was taken."
    paths = draw(recorder, out)
    places = ", ".join(str(path) for path in paths.values())
    return f"{sparklines(recorder)}\n\nExponents: {places}"


def precision_report(preset: Preset, data: Dataset) -> str:
    """Returns what `amp` does with each operation of the model."""
    model = ViT(preset.size, data.image_shape, data.classes, key=jax.random.key(0))
    (batch,) = data.batches(preset.batch, 1, seed=0)
    return str(mpx.inspect.report(mpx.amp(loss_fn), model, batch))


@eqx.filter_jit
def _predict(model: ViT, images: Any) -> Array:
    return jnp.argmax(jax.vmap(model)(images), axis=-1)


def _accuracy(model: ViT, data: Dataset) -> float:
    """Returns the share of test images that the model, run in f32, gets right."""
    images, labels = data.test
    right = 0
    for i in range(0, len(labels), 500):
        guess = _predict(model, data.normalised(images[i : i + 500]))
        right += int(np.sum(np.asarray(guess) == labels[i : i + 500]))
    return right / len(labels)


def _arrays(tree: Any) -> list[Array]:
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in _arrays(tree))


def _stuck(model: ViT, lr: float) -> float:
    """Returns the share of weights that a step of size `lr` does not change."""
    weights = np.concatenate([np.ravel(leaf) for leaf in _arrays(model)])
    return float(np.mean(weights + np.asarray(lr, weights.dtype) == weights))


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Preset, Dataset]:
    parser = argparse.ArgumentParser(
        description="Trains a ViT in several precisions and compares them."
    )
    parser.add_argument("--preset", choices=PRESETS, default="digits")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="PATH",
        help="folder or archive of CIFAR-10, MNIST or Fashion-MNIST "
        "(default for the preset digits: the digits of scikit-learn)",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        metavar="MODE",
        help=f"which of {', '.join(MODES)} (default: all)",
    )
    for option in ("steps", "batch", "seeds"):
        parser.add_argument(f"--{option}", type=_positive(int), metavar="N")
    parser.add_argument("--lr", type=_positive(float), metavar="X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="FOLDER")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="a page to write the table into"
    )
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="default: FOLDER/PRESET.png"
    )
    args = parser.parse_args(argv)
    if args.data is None and args.preset != "digits":
        parser.error(f"--preset {args.preset} needs --data PATH, see --help.")
    chosen = {k: getattr(args, k) for k in ("steps", "batch", "seeds", "lr")}
    chosen = {k: v for k, v in chosen.items() if v is not None}
    preset = dataclasses.replace(PRESETS[args.preset], **chosen)
    try:
        data = load_digits() if args.data is None else load(args.data)
    except DataError as error:
        parser.error(str(error))
    return args, preset, data


def _positive(number: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = number(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    parse.__name__ = f"positive {number.__name__}"  # argparse: "invalid positive int"
    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 1 if a mixed mode ends below f32, beyond the noise."""
    args, preset, data = _parse(argv)
    intro = (
        f"{data.name}: {len(data.train[1]):,} training and {len(data.test[1]):,} "
        f"test images, on {jax.devices()[0].device_kind}. Adam, lr {preset.lr:g}, "
        f"{preset.steps} steps of {preset.batch} images, {preset.seeds} seed(s)."
    )
    with Live(args.modes, preset.steps, preset.seeds) as live:
        live.print(intro)
        runs = {
            mode: train(mode, preset, data, seed=args.seed, live=live)
            for mode in args.modes
        }
    show_table(live.console, runs)
    lines, failed = verdict(runs, len(data.test[1]), preset.lr)
    for line in lines:
        live.print(line)
    figure = save_figure(runs, args.figure or args.out / f"{args.preset}.png")
    live.print(f"Figure: {figure}\n")
    live.print(precision_report(preset, data))
    live.print("\n" + inspect_run(preset, data, args.out))
    if args.page is not None:
        versions = f"Python {platform.python_version()}, jax {jax.__version__}"
        intro = f"{intro} {versions}, {platform.machine()}."
        write_page(args.page, intro, runs, lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
