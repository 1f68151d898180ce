"""Makes the pictures of the page "Watching a run" from a short run of the demo's model.

python examples/inspect_gallery.py                # into docs/images
python examples/inspect_gallery.py --out out
"""

import argparse
import dataclasses
import pathlib

import equinox as eqx
import jax
import optax

import mpx
from digits import SIZE, batches, load_digits, loss_fn
from equinox_vit import ViT

IMAGES = pathlib.Path(__file__).parents[1] / "docs" / "images"


def watched_run(model, batches):
    """Trains in f16 with a scale that starts too high, and records each step."""
    optimizer = optax.adam(1e-3)
    recorder = mpx.inspect.watch()

    @eqx.filter_jit
    def step(model, state, scaling, *batch):
        result = mpx.value_and_grad(mpx.amp(loss_fn, "f16"))(scaling, model, *batch)
        new, state = mpx.optimizer_update(
            model, optimizer, state, result.grads, result.finite
        )
        seen = recorder.observe(result, scaling=scaling, before=model, after=new)
        return new, state, result.scaling, seen

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling.pow2(init=2.0**24, period=40)
    for batch in batches:
        model, state, scaling, seen = step(model, state, scaling, *batch)
        recorder.record(seen)
    recorder.flush()
    return recorder


def matrices(stats):
    """Returns the histograms of weights, without biases and norms."""
    rows = [
        i
        for i, name in enumerate(stats.names)
        if name.endswith("weight") and "norm" not in name
    ]
    return dataclasses.replace(
        stats,
        counts=stats.counts[rows],
        squares=stats.squares[rows],
        names=tuple(stats.names[i] for i in rows),
        dtypes=tuple(stats.dtypes[i] for i in rows),
    )


def together(stats):
    """Returns one histogram of all leaves."""
    counts, squares = (x.sum(0, keepdims=True) for x in (stats.counts, stats.squares))
    names, dtypes = ("all gradients",), stats.dtypes[:1]
    return dataclasses.replace(
        stats, counts=counts, squares=squares, names=names, dtypes=dtypes
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description="Draws exponents of gradients.")
    parser.add_argument("--out", type=pathlib.Path, default=IMAGES, metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=200, metavar="N")
    args = parser.parse_args(argv)
    model = eqx.filter_jit(ViT)(jax.random.key(0), **SIZE)
    recorder = watched_run(model, batches(*load_digits(), args.steps))
    stats, summary = recorder.exponents, recorder.summary()
    scale = summary.numbers["loss_scaling"]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, title, shown in (
        ("exponents", "Gradients of a ViT", together(stats)),
        ("exponents_by_leaf", "Gradients of its weights", matrices(stats)),
    ):
        figure = mpx.inspect.plot_exponents(shown, scale=scale, title=title)
        figure.savefig(args.out / f"{name}.png", dpi=100)
        print(f"{name}: {args.out / name}.png")
    print("", *matrices(stats).tables(scale=scale), summary, sep="\n\n")


if __name__ == "__main__":
    main()
