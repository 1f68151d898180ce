"""What fp8 gains beside bf16: a block, four blocks, a language model, a small model.

    python benchmarks/fp8.py                       # an NVIDIA GPU with fp8 units
    python benchmarks/fp8.py --sections sizes      # single matmuls, for the size rule
    python benchmarks/fp8.py --tiny                # try the script on a CPU

Every case runs in a process of its own; bf16 and fp8 of a section follow each other.
"""

import argparse
import functools
import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import _fp8 as models
import _measure as measure
import mpx
from _fp8 import BF16, Size
from _measure import Record, number, ratio
from mpx._fp8 import _operands
from mpx._fp8._selection import predicted_gain

POLICY = "p=f32,c=bf16,o=f32"
RECIPES: dict[str, Any] = {
    "fp8": mpx.recipes.CurrentScaling(),
    "fp8-delayed": mpx.recipes.DelayedScaling(),
    "fp8-static": mpx.recipes.StaticScaling(
        activation_max=8.0, weight_max=0.25, grad_max=1.0
    ),
    "fp8-row": mpx.recipes.CurrentScaling(granularity="row"),
    "fp8-compute": mpx.recipes.CurrentScaling(weight_grad="compute"),
    # The codes of weights in one order, as a program over several devices has them.
    "fp8-one-order": mpx.recipes.CurrentScaling(),
}
SECTIONS = {
    "mlp": ("bf16", "fp8", "fp8-delayed", "fp8-static", "fp8-row", "fp8-compute"),
    "tower": ("bf16", "fp8", "fp8-delayed", "fp8-one-order"),
    "lm": ("bf16", "fp8", "fp8-one-order"),
    "lm-accumulate": ("bf16", "fp8"),
    "small": ("bf16", "fp8"),
}
# fp8 over bf16 in speed. "small" must not be slower; 2 % is the spread of such steps.
TARGETS = {"mlp": 1.58, "tower": 1.5, "lm": 1.3, "small": 0.98}
SIZES = {
    "mlp": Size(width=4096, hidden=16384, batch=8, length=2048),
    "tower": Size(width=4096, hidden=16384, layers=4, batch=8, length=2048),
    "lm": Size(4096, 16384, layers=4, heads=32, vocab=32768, batch=8, length=2048),
    "lm-accumulate": Size(
        4096, 16384, layers=4, heads=32, vocab=32768, batch=8, length=2048
    ),
    "small": Size(768, 3072, layers=12, heads=12, vocab=32768, batch=8, length=1024),
}
TURNS = 20  # gradients of a single matmul in one call
TINY = Size(width=64, hidden=128, layers=2, heads=2, vocab=256, batch=4, length=32)
SINGLE = [
    (m, k, n)
    for m in (4096, 16384)
    for k, n in (
        (1024, 1024),
        (1024, 4096),
        (2048, 2048),
        (4096, 1024),
        (4096, 4096),
        (4096, 16384),
    )
]


# --- one case, in its own process ------------------------------------------------------


def under(mode: str, loss: Any, *, tiny: bool) -> Any:
    """The loss as a mode runs it. Where a CPU tries the script, nothing is too small."""
    if mode == "bf16":
        return loss
    if mode == "fp8-one-order":
        _operands.automatic_size = lambda x: 8
    return mpx.fp8(loss, RECIPES[mode], min_gain=0 if tiny else 1.1)


def build_gradient(section: str, mode: str, size: Size, tiny: bool) -> Any:
    """Forward and backward of blocks in bf16. The state holds the last gradients."""
    layers = None if section == "mlp" else size.layers
    params = models.mlp_params(size, jax.random.key(0), layers=layers)
    loss = models.mlp_loss if section == "mlp" else models.tower_loss
    x = jax.random.normal(jax.random.key(1), (size.tokens, size.width)).astype(BF16)
    func = under(mode, loss, tiny=tiny)
    scales = func.init(params, x) if getattr(func, "has_state", False) else None

    def step(state: Any, x: Any) -> Any:
        params, scales, _ = state
        if scales is None:
            value, grads = jax.value_and_grad(func, argnums=(0, 1))(params, x)
            return (params, None, grads), value
        value, (seen, *grads) = jax.value_and_grad(func, argnums=(0, 1, 2))(
            scales, params, x
        )
        return (params, scales.update(seen), tuple(grads)), value

    gradients = jax.tree.map(jnp.zeros_like, (params, x))
    return step, (params, scales, gradients), x


def build_training(section: str, mode: str, size: Size, tiny: bool) -> Any:
    """A whole training step of a language model: f32 weights, adamw."""
    params = models.lm_params(size, jax.random.key(0))
    loss = functools.partial(models.lm_loss, heads=size.heads)
    func = under(mode, lambda params, tokens: loss(params, tokens), tiny=tiny)
    optimizer = optax.adamw(1e-4)
    if section == "lm-accumulate":
        gradient = mpx.accumulate(func, steps=4, policy=POLICY)
    else:
        gradient = mpx.value_and_grad(func, policy=POLICY)
    tokens = jax.random.randint(
        jax.random.key(1), (size.batch, size.length + 1), 0, size.vocab
    )

    def step(state: Any, tokens: Any) -> Any:
        params, opt_state = state
        result = gradient(mpx.NoLossScaling(), params, tokens)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), result.value

    return step, (params, optimizer.init(params)), tokens


def measure_step(step: Any, state: Any, inputs: Any, options: Any) -> Record:
    """Compiles a step, says what its matmuls became, and times it."""
    state = measure.own_small_buffers(state)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(state, inputs)
    middle = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    found = mpx.inspect.fp8_check(compiled)
    memory = compiled.memory_analysis()
    run = functools.partial(measure.time_steps, compiled, inputs=[inputs])
    state, _, _ = run(state, steps=options.warmup, group=options.warmup)
    state, values, timing = run(state, steps=options.steps, group=options.group)
    return timing | {
        "trace_s": middle - start,
        "compile_s": end - middle,
        "fp8": found.fp8,
        "other": dict(found.other),
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        "peak_bytes": measure.peak_bytes(),
        "first": float(values[0]),
        "last": float(values[-1]),
        "environment": measure.environment(),
    }


def run_case(section: str, mode: str, options: Any) -> Record:
    """One mode of one section."""
    # No cache: compile time is among what is compared.
    measure.start_child(None)
    size = TINY if options.tiny else SIZES[section]
    build = build_gradient if section in ("mlp", "tower") else build_training
    step, state, inputs = build(section, mode, size, options.tiny)
    return measure_step(step, state, inputs, options)


def run_sizes(options: Any) -> Record:
    """Single linear layers of several sizes: predicted gain beside the measured one."""
    measure.start_child(None)
    rows = []
    shapes = [(64, 32, 48)] if options.tiny else SINGLE
    for m, k, n in shapes:
        x = jnp.ones((m, k), BF16)
        params = jax.random.normal(jax.random.key(0), (k, n)).astype(BF16)

        # A nonlinearity on both sides, as in a model: casts are fused into it.
        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(jnp.tanh(jnp.tanh(x) @ w).astype(jnp.float32))

        times = {}
        for mode in ("bf16", "fp8"):
            func = loss if mode == "bf16" else mpx.fp8(loss, min_gain=0)
            step = functools.partial(repeated, jax.grad(func, argnums=(0, 1)))
            state = jax.tree.map(jnp.copy, (params, x))
            times[mode] = measure_step(step, state, None, options)["ms"] / TURNS
        gain = times["bf16"] / times["fp8"]
        rows.append(
            [m, k, n, times["bf16"], times["fp8"], gain, predicted_gain(m, k, n)]
        )
    return {"rows": rows, "environment": measure.environment()}


def repeated(gradient: Any, state: Any, _: Any) -> Any:
    """Many gradients in one call, so that the device is measured and not the host.

    Each needs the last one: nothing can be left out, or computed once for all.
    """

    def turn(_: int, state: Any) -> Any:
        return jax.tree.map(
            lambda x, dx: x + dx * jnp.asarray(1e-6, x.dtype), state, gradient(*state)
        )

    state = lax.fori_loop(0, TURNS, turn, state)
    return state, state[0][0, 0]


# --- all of them -----------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> dict[tuple[str, str], Record]:
    """Runs the cases one by one and prints each as it is done."""
    log = measure.Log(options.json)
    passed = [
        f"--{name}={getattr(options, name)}" for name in ("steps", "group", "warmup")
    ]
    passed += ["--tiny"] if options.tiny else []
    results = {}
    for section in options.sections:
        for mode in SECTIONS.get(section, ("all",)):
            if options.modes and mode not in (*options.modes, "bf16", "all"):
                continue
            record = measure.run_child(
                __file__,
                [*passed, "--child", f"{section}:{mode}"],
                timeout=options.timeout,
            )
            log.write({"section": section, "mode": mode} | record)
            results[section, mode] = record
            told = record.get("error") or number(record.get("ms"), 3, " ms")
            print(f"{section} {mode}: {told}", flush=True)
    return results


def print_table(results: dict[tuple[str, str], Record]) -> None:
    """One line per case."""
    header = [
        "case", "ms", "spread", "× bf16", "fp8 calls", "other matmuls", "compile s",
        "beside bf16", "temp GB", "value",
    ]  # fmt: skip
    rows = []
    for (section, mode), record in results.items():
        if "error" in record or "rows" in record:
            continue
        base = results.get((section, "bf16"), {})
        slower = record["compile_s"] - base.get("compile_s", record["compile_s"])
        temp = record["temp_bytes"]
        rows.append(
            [
                f"{section} {mode}",
                number(record["ms"], 3),
                number(
                    100 * (record["ms_high"] - record["ms_low"]) / record["ms"], 1, " %"
                ),
                number(ratio(base.get("ms"), record["ms"]), 3),
                str(record["fp8"]),
                ", ".join(f"{count} {name}" for name, count in record["other"].items()),
                number(record["compile_s"], 1),
                f"{slower:+.1f}",
                number(None if temp is None else temp / 1e9),
                f"{record['first']:.4f} → {record['last']:.4f}",
            ]
        )
    if rows:
        print(measure.format_table(header, rows))
    for record in results.values():
        if "rows" in record:
            print_sizes(record["rows"])


def print_sizes(rows: list[list[float]]) -> None:
    """Single matmuls: does the size rule choose those that gain?"""
    cells = [
        [
            f"{m:.0f}×{k:.0f}×{n:.0f}",
            number(bf16, 3),
            number(fp8, 3),
            number(gain),
            number(predicted),
            "fp8" if predicted >= 1.1 else "kept",
        ]
        for m, k, n, bf16, fp8, gain, predicted in rows
    ]
    print(measure.format_table(
        ["m×k×n", "bf16 ms", "fp8 ms", "measured", "predicted", "size rule"], cells
    ))  # fmt: skip


def print_verdict(results: dict[tuple[str, str], Record]) -> bool:
    """Says which targets were met; returns whether all were."""
    met = True
    for section, target in TARGETS.items():
        base, found = results.get((section, "bf16")), results.get((section, "fp8"))
        if not base or not found or "error" in base or "error" in found:
            continue
        gain = base["ms"] / found["ms"]
        slower = found["compile_s"] - base["compile_s"]
        good = gain >= target and slower <= 3
        met &= good
        print(
            f"{section}: {gain:.3f}× bf16 (target {target}×), compiled {slower:+.1f} s"
            f" beside it (target 3 s): {'met' if good else 'MISSED'}"
        )
    return met


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--sections", default="mlp,tower,lm,small", help="and lm-accumulate, sizes")
    add("--modes", default="", help="besides bf16; all if left out")
    add("--steps", type=int, default=40, help="timed steps")
    add("--warmup", type=int, default=5, help="steps before them")
    add("--group", type=int, default=5, help="steps between two readings of the clock")
    add("--timeout", type=float, default=240, help="seconds for one process")
    add("--tiny", action="store_true", help="tiny models, to try the script")
    add("--json", help="append the records to this file, one JSON object a line")
    add("--strict", action="store_true", help="a missed target is an error, too")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    options.modes = [mode for mode in options.modes.split(",") if mode]
    if unknown := set(options.sections) - {*SECTIONS, "sizes"}:
        parser.error(f"unknown sections {sorted(unknown)}")
    return options


def main() -> int:
    """Runs one case or all of them; returns the exit status."""
    options = parse()
    if options.child is not None:
        section, _, mode = options.child.partition(":")
        if section == "sizes":
            record = run_sizes(options)
        else:
            record = run_case(section, mode, options)
        print(json.dumps(record))
        return 0
    results = run_all(options)
    good = [record for record in results.values() if "error" not in record]
    if good:
        machine = good[0]["environment"]
        print(
            f"\n{machine['device']}, jax {machine['jax']}, Python {machine['python']}\n"
        )
        print_table(results)
        print()
        if machine["backend"] == "cpu":
            print("On a CPU the times say nothing about fp8.")
            return int(len(good) < len(results))
        met = print_verdict(results)
        return int(len(good) < len(results) or (options.strict and not met))
    return 1


if __name__ == "__main__":
    sys.exit(main())
