"""Pictures of what `mpx.inspect` sees in a short run, for the demo and the docs."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import optax

import mpx

Loss = Callable[[Any, Any], Any]


def watched_run(
    loss: Loss, model: Any, batches: Any, *, lr: float
) -> mpx.inspect.Watch:
    """Trains in f16 with a scale that starts too high, and records each step."""
    optimizer = optax.adam(lr)
    recorder = mpx.inspect.watch()
    grads_of = mpx.value_and_grad(mpx.amp(loss, "f16"))

    @eqx.filter_jit
    def step(model: Any, state: Any, scaling: Any, batch: Any) -> Any:
        result = grads_of(scaling, model, batch)
        new, state = mpx.optimizer_update(
            model, optimizer, state, result.grads, result.finite
        )
        seen = recorder.observe(result, scaling=scaling, before=model, after=new)
        return new, state, result.scaling, seen

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling.pow2(init=2.0**24, period=40)
    for batch in batches:
        model, state, scaling, seen = step(model, state, scaling, batch)
        recorder.record(seen)
    recorder.flush()
    return recorder


def matrices(stats: mpx.inspect.ExponentStats) -> mpx.inspect.ExponentStats:
    """The histograms of weights, without biases and norms."""
    wanted = [x.endswith("weight") and "norm" not in x for x in stats.names]
    rows = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    return dataclasses.replace(
        stats,
        counts=stats.counts[rows],
        squares=stats.squares[rows],
        names=tuple(stats.names[i] for i in rows),
        dtypes=tuple(stats.dtypes[i] for i in rows),
    )


def together(stats: mpx.inspect.ExponentStats) -> mpx.inspect.ExponentStats:
    """One histogram of all leaves."""
    counts, squares = (x.sum(0, keepdims=True) for x in (stats.counts, stats.squares))
    names, dtypes = ("all gradients",), stats.dtypes[:1]
    return dataclasses.replace(
        stats, counts=counts, squares=squares, names=names, dtypes=dtypes
    )


def draw(recorder: mpx.inspect.Watch, folder: Path) -> dict[str, Path]:
    """Writes the pictures of a run; returns their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    stats = recorder.exponents
    assert stats is not None, "no step was taken"
    scale = recorder.summary().numbers["loss_scaling"]
    pictures = {
        "exponents": mpx.inspect.plot_exponents(
            together(stats), scale=scale, title="Gradients of a ViT"
        ),
        "exponents_by_leaf": mpx.inspect.plot_exponents(
            matrices(stats), scale=scale, title="Gradients of its weights"
        ),
    }
    paths = {}
    for name, figure in pictures.items():
        paths[name] = folder / f"{name}.png"
        figure.savefig(paths[name], dpi=100)
    return paths


def sparklines(recorder: mpx.inspect.Watch) -> str:
    """The table of the gradients of weights, at the last loss scale."""
    assert recorder.exponents is not None, "no step was taken"
    scale = recorder.summary().numbers["loss_scaling"]
    tables = matrices(recorder.exponents).tables(scale=scale)
    return "\n\n".join(map(str, tables))
