"""What statistics of exponents cost, alone and in a training step.

    python benchmarks/stats.py                          # ViT-Base/16, batch 128
    python benchmarks/stats.py --model tiny --batch 16  # try the script on a CPU

First the gradients of the model are counted in several ways and compared with a finite
check; every way must find the same counts. Then whole training steps are timed in turn:
the step of `mpx-bf16` (which has a finite check), and the same with statistics.
"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import _measure as measure
import mpx
from _measure import number
from _models import SIZES, Task, Vit, VitSize, vit_loss
from mpx.inspect import _counting
from mpx.inspect._counting import BINS, Tuning, bin_of, count_local, split

TARGET = 0.02  # of a step
REPLICAS = 1024

Tree = Any


# --- ways to count -------------------------------------------------------------------


def finite(grads: list[Any]) -> Any:
    """The finite check that a mixed-precision step has anyway."""
    return mpx.all_finite(grads)


def stats(grads: list[Any]) -> Any:
    """What `mpx.inspect.exponent_stats` does."""
    return mpx.inspect.exponent_stats(grads).counts


def sampled(grads: list[Any]) -> Any:
    """Every 17th row."""
    return mpx.inspect.exponent_stats(grads, sample=16).counts


def compared(grads: list[Any]) -> Any:
    """A comparison with each bin, as XLA compiles it; no kernel."""
    counts = [_counting._compared(bin_of(x), first=0, count=BINS) for x in grads]
    return split(jnp.stack(counts))


def scattered(grads: list[Any]) -> Any:
    """Atomic additions, to one of many copies of the bins."""

    def one(x: Any) -> Any:
        bins = bin_of(x).reshape(-1)
        copy = lax.iota(jnp.int32, bins.size) % REPLICAS
        zeros = jnp.zeros((REPLICAS, BINS), jnp.int32)
        return jnp.sum(zeros.at[copy, bins].add(1), axis=0)

    return split(jnp.stack([one(x) for x in grads]))


def kernel(grads: list[Any], tuning: Tuning) -> Any:
    """The kernel for the large leaves, in other sizes."""
    large = [i for i, x in enumerate(grads) if x.size > _counting.SMALL]
    counts, _ = count_local([grads[i] for i in large], tuning)
    small = [i for i in range(len(grads)) if i not in large]
    rest = mpx.inspect.exponent_stats([grads[i] for i in small]).counts
    every = jnp.concatenate([split(counts), rest])
    return every[np.argsort([*large, *small])]


TUNINGS = [
    Tuning(64, 32),
    Tuning(128, 16, warps=2),
    Tuning(128, 8),
    Tuning(32, 32),
    Tuning(64, 16, batch=24),
]


FIRST = {"finite": finite, "stats": stats}


def others(slow: bool) -> dict[str, Callable[[list[Any]], Any]]:
    """More ways by name; on a CPU there is no kernel to tune."""
    found = {"finite": finite, "stats, sample=16": sampled}
    if jax.default_backend() == "gpu":
        for tuning in TUNINGS:
            name = "kernel {}×{}, {} warps, {} leaves".format(*tuning)
            found[name] = functools.partial(kernel, tuning=tuning)
    if slow:
        found |= {"scatter": scattered, "compare": compared}
    return found


# One row of random numbers, cut into leaves: to draw each leaf by itself compiles for
# longer than all else takes.
@functools.cache
def numbers(size: int) -> np.ndarray:
    """Numbers of many magnitudes, like gradients."""
    rng = np.random.default_rng(0)
    return (1e-5 * rng.standard_normal(size, np.float32) ** 3).astype(np.float32)


@functools.cache
def expected(size: int) -> np.ndarray:
    """The counts of `numbers` by NumPy."""
    x = numbers(size)
    exponents = np.clip(np.frexp(x[x != 0])[1] - 1, -64, 32)
    counts = np.bincount(exponents + 65, minlength=BINS)[:BINS]
    counts[0] = np.sum(x == 0)
    return counts


def filled(shapes: Any, scale: float = 1.0) -> Any:
    """Arrays in place of the shapes of a tree."""

    def fill(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.device_put(scale * numbers(math.prod(x.shape)).reshape(x.shape))

    return jax.tree.map(fill, shapes)


def time_alone(
    grads: list[Any], repeat: int, ways: dict[str, Callable[[list[Any]], Any]]
) -> list[list[str]]:
    """Times each way by itself, and checks its counts."""
    size = sum(x.nbytes for x in grads)
    want, base, rows = np.stack([expected(x.size) for x in grads]), None, []
    progress("counted by NumPy")
    for name, way in ways.items():
        call = jax.jit(way)
        start = time.perf_counter()
        try:
            out = jax.block_until_ready(call(grads))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        compile_s = time.perf_counter() - start
        right = "–"
        if name != "finite" and "sample" not in name:
            found = np.asarray(out).astype(np.int64)
            found = found[..., 0] + (found[..., 1] << 16)
            right = "yes" if np.array_equal(found, want) else "NO"
            for leaf, bin_ in np.argwhere(found != want)[:8]:
                counts = f"{found[leaf, bin_]} instead of {want[leaf, bin_]}"
                progress(f"leaf {leaf} {grads[leaf].shape}, bin {bin_}: {counts}")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(repeat):
                out = call(grads)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - start) / repeat * 1e3)
        ms = statistics.median(times)
        base = base or ms
        rows.append(
            [
                name,
                number(ms, 3),
                number(ms / base, 2),
                number(size / ms / 1e9, 2),
                number(compile_s, 1),
                right,
            ]
        )
        progress("  ".join(rows[-1]))
    return rows


# --- in a step -----------------------------------------------------------------------


def build(task: Any, optimizer: Any, mode: str) -> tuple[Any, Callable[..., Any]]:
    """Returns the state and the step of a mode."""
    value_and_grad = mpx.value_and_grad(task.loss, policy="p=f32,c=bf16,o=f32")
    options: dict[str, Any] = {"stats, sample=16": {"sample": 16}}

    def step(state: Any, batch: Any) -> Any:
        model, opt_state, scaling = state
        result = value_and_grad(scaling, model, batch)
        out, finite = result.value, result.finite
        if mode.startswith("stats"):
            found = mpx.inspect.exponent_stats(result.grads, **options.get(mode, {}))
            out = out, found
            if "check" in mode:  # they know whether all is finite: one pass for both
                finite = found.all_finite()
        new, opt_state = mpx.optimizer_update(
            model, optimizer, opt_state, result.grads, finite
        )
        if mode.startswith("watch"):
            after = new if "stuck" in mode else None
            before = model if "stuck" in mode else None
            out = mpx.inspect.watch().observe(result, before=before, after=after)
        return (new, opt_state, result.scaling), out

    params = eqx.filter(task.model, eqx.is_inexact_array)
    state = (task.model, jax.jit(optimizer.init)(params), mpx.NoLossScaling())
    return state, step


def time_in_step(options: argparse.Namespace) -> list[list[str]]:
    """Times steps with and without statistics in turn, group by group."""
    runs, traces = {}, {}
    for mode in options.modes:
        task = make_task(options)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
        state, step = build(task, optimizer, mode)
        arrays, static = eqx.partition(state, eqx.is_array)
        arrays = measure.own_small_buffers(arrays)

        def on_arrays(arrays: Any, batch: Any, step: Any = step, static: Any = static):
            state, output = step(eqx.combine(arrays, static), batch)
            return eqx.filter(state, eqx.is_array), output

        jitted, record = measure.compile_step(on_arrays, arrays, task.batches[0])
        traces[mode] = record
        arrays, _, _ = measure.time_steps(
            jitted, arrays, task.batches, steps=10, group=10
        )
        runs[mode] = [jitted, arrays, task.batches, []]
        progress(f"{mode}: traced in {record['trace_s']:.1f} s, compiled")
    for _ in range(options.rounds):
        for run in runs.values():
            jitted, arrays, batches, times = run
            run[1], _, timing = measure.time_steps(
                jitted, arrays, batches, steps=options.group, group=options.group
            )
            times.append(timing["ms"])
    base = statistics.median(runs[options.modes[0]][3])
    rows = []
    for mode, (_, _, _, times) in runs.items():
        ms = statistics.median(times)
        share = ms / base - 1
        rows.append(
            [
                mode,
                number(ms, 3),
                number(ms - base, 3),
                number(100 * share, 2, " %"),
                number(100 * (max(times) / min(times) - 1), 1, " %"),
                number(traces[mode]["trace_s"], 1),
                number(traces[mode]["compile_s"], 1),
                "–"
                if mode == options.modes[0]
                else ("met" if share <= TARGET else "MISSED"),
            ]
        )
    return rows


START = time.perf_counter()


def progress(text: str) -> None:
    """Says what is done, and after how many seconds."""
    print(f"{time.perf_counter() - START:6.1f} s  {text}", flush=True)


def size_of(options: argparse.Namespace) -> VitSize:
    """The size of the model."""
    size = SIZES[options.model]
    assert isinstance(size, VitSize)
    return dataclasses.replace(size, **options.size)


def make_task(options: argparse.Namespace) -> Task:
    """A model of small random weights and a batch of random images."""
    size = size_of(options)
    shapes = eqx.filter_eval_shape(Vit, size, jax.random.key(0))
    model = filled(shapes, 1e3)
    shape = (options.batch, 3, size.image, size.image)
    image = filled(jax.ShapeDtypeStruct(shape, jnp.float32), 1e5)
    label = jnp.arange(options.batch) % size.classes
    return Task(model, vit_loss, [{"image": image, "label": label}])


def main() -> int:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="vit-base", choices=["vit-base", "tiny"])
    add("--batch", type=int, default=128)
    add("--depth", type=int, help="fewer layers: less to compile")
    add("--repeat", type=int, default=20)
    add("--rounds", type=int, default=8)
    add("--group", type=int, default=10)
    add("--modes", default="step;stats;stats as the check;stats, sample=16")
    add("--slow", action="store_true", help="count in ways that are known to be slow")
    add("--alone", action="store_true", help="leave out the steps")
    options = parser.parse_args()
    options.modes = options.modes.split(";")
    options.size = {} if options.depth is None else {"depth": options.depth}
    with tempfile.TemporaryDirectory() as cache:
        measure.start_child(cache)
        progress(str(measure.environment()))
        shapes = eqx.filter_eval_shape(Vit, size_of(options), jax.random.key(0))
        grads = jax.tree.leaves(filled(shapes))
        grads = [x for x in grads if isinstance(x, jax.Array)]
        progress(f"{len(grads)} leaves, {sum(x.size for x in grads)} values")
        rows = time_alone(grads, options.repeat, FIRST)
        # What matters most comes first, should the time run out.
        if not options.alone:
            head = [
                "step",
                "ms",
                "+ ms",
                "+ %",
                "spread",
                "trace s",
                "compile s",
                "2 %",
            ]
            table = measure.format_table(head, time_in_step(options))
            print(f"\n{table}\n", flush=True)
        rows += time_alone(grads, options.repeat, others(options.slow))[1:]
        head = ["alone", "ms", "× finite", "TB/s", "compile s", "right"]
        print("\n" + measure.format_table(head, rows))
    return int(any("NO" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
