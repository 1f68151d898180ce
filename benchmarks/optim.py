"""What a step of a compressed optimizer costs, in time and memory, beside optax in f32.

    python benchmarks/optim.py                       # four workloads on a GPU
    python benchmarks/optim.py --sweep               # blocks and warps of the kernel
    python benchmarks/optim.py --models tiny         # try the script on a CPU

Each implementation runs in a process of its own, on the same parameters and bf16
gradients. Many steps run inside one call, so that the device is measured and not the
host; the column "dispatched" has one call per step. See README.md beside this file.
"""

import argparse
import functools
import importlib.util
import json
import math
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import _measure as measure
import _optim_modes as modes
from _measure import Record, number, ratio
from _optim_modes import MODES, RATES, TINY, WORKLOADS, Built

CHECKED = 20  # steps of the quadratic
# The moment of Adam or Lion is off by 1/127 of the largest of its group at most, which is
# 2.5 times the typical one of 32 normal numbers: 2 % of a step, if all errors had one sign.
AGREEMENT = 0.02
TARGET_ADD, TARGET_BYTES, TARGET_PEAK = 1.08, 7.2, 1.02
BLOCKS, WARPS = (512, 1024, 2048, 4096, 8192), (2, 4, 8)


# --- one mode, in its own process ----------------------------------------------------


def run_mode(name: str, options: argparse.Namespace) -> list[Record]:
    """Measures one implementation on all workloads, the smallest first."""
    for path in reversed(options.peer):
        sys.path.insert(0, path)
    mode = MODES[name]
    if mode.library == "copy":
        measure.start_child(None)
        return [copy_bandwidth(options) | {"environment": measure.environment()}]
    if mode.library == "torch":
        import _optim_torch

        return _optim_torch.run(options)
    measure.start_child(None)
    records, start = [], time.perf_counter()
    for model in sorted(
        options.models, key=lambda m: modes.count_of(modes.shapes_of(m))
    ):
        if records and time.perf_counter() - start > options.child_budget:
            records.append({"model": model, "error": "skipped: no time left"})
            continue
        record = {"model": model, "environment": measure.environment()}
        records.append(record | run_workload(mode, model, options))
    return records


def run_workload(mode: modes.Mode, model: str, options: argparse.Namespace) -> Record:
    """Compiles, times and checks one implementation on one workload."""
    shapes = modes.shapes_of(model)
    before = measure.peak_bytes() or 0
    build = functools.partial(modes.BUILDERS[mode.library], shapes, options.optimizer)
    built = build(mode.options)
    record = sizes(built, modes.count_of(shapes))
    step, compiled = measure.compile_step(
        lambda carry, grads: (built.step(carry, grads), None), built.carry, built.grads
    )
    record |= compiled
    carry, _, timing = measure.time_steps(
        step, built.carry, [built.grads], steps=4 * options.group, group=options.group
    )
    record |= {"dispatched_us": timing["ms"] * 1e3, "host_us": timing["host_ms"] * 1e3}
    carry, looped = time_loop(built, carry, options)
    peak = measure.peak_bytes()
    # An earlier workload may have needed more: then this one's peak is not known.
    record |= looped | {"peak_bytes": peak if peak and peak > before else None}
    del carry
    # The checks start from the beginning; the buffers of the timed run are gone by now.
    return record | check(build(mode.options), step, mode)


def sizes(built: Built, params: int) -> Record:
    """The bytes that a step must read and write, and those that stay."""
    kept = sum(x.nbytes for x in jax.tree.leaves(built.carry))
    read_only = sum(x.nbytes for x in jax.tree.leaves(built.grads))
    return {
        "params": params,
        "bytes": 2 * kept + read_only,
        "resident_bytes": kept + read_only,
    }


def time_loop(
    built: Built, carry: Any, options: argparse.Namespace
) -> tuple[Any, Record]:
    """Times many steps inside one call."""

    def loop(carry: Any, grads: Any) -> Any:
        def body(index: Any, carry: Any) -> Any:
            # Else XLA would take what depends on the gradients alone out of the loop.
            step_grads, _ = lax.optimization_barrier((grads, index))
            return built.step(carry, step_grads)

        return lax.fori_loop(0, options.steps, body, carry)

    jitted = jax.jit(loop, donate_argnums=0)
    for _ in range(2):  # the second may find arguments that are placed otherwise
        carry = jax.block_until_ready(jitted(carry, built.grads))
    times = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        carry = jax.block_until_ready(jitted(carry, built.grads))
        times.append((time.perf_counter() - start) / options.steps * 1e6)
    return carry, {
        "us": statistics.median(times),
        "us_low": min(times),
        "us_high": max(times),
    }


def check(built: Built, step: measure.Step, mode: modes.Mode) -> Record:
    """Steps down the quadratic |w|²/2, whose gradient is the parameter itself."""

    @jax.jit
    def loss(weights: Any) -> Any:
        return sum(jnp.sum(jnp.square(w)) for w in weights.values()) / 2

    @jax.jit
    def unchanged(old: Any, weights: Any) -> Any:
        same = [jnp.all(old[name] == w) for name, w in weights.items()]
        return jnp.sum(jnp.stack(same))

    @jax.jit
    def gradients(params: Any) -> Any:
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16) + 0, params)

    carry = built.carry
    weights = jax.jit(built.weights)
    # A copy: the parameters of optax are its weights, and will be donated.
    old = jax.tree.map(jnp.copy, weights(carry))
    losses = [float(loss(old))]
    for _ in range(CHECKED):
        grads = built.grads and gradients(built.params(carry))
        carry, _ = step(carry, grads)
    new = weights(carry)
    record = {"unchanged": int(unchanged(old, new))}
    if mode.library == "add":
        return record
    return record | {"losses": [*losses, float(loss(new))]}


def copy_bandwidth(options: argparse.Namespace) -> Record:
    """Times copies of one large array from the device to itself."""
    on_cpu = jax.default_backend() == "cpu"
    array = jnp.zeros(2**20 if on_cpu else 2**28, jnp.float32)
    copy = jax.jit(jnp.copy)
    jax.block_until_ready(copy(array))
    times = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        results = [copy(array) for _ in range(options.group)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / options.group)
    return {"copy": 2 * array.nbytes / statistics.median(times)}


# --- the launch of the kernel --------------------------------------------------------


def run_sweep(options: argparse.Namespace) -> list[Record]:
    """Times the kernel of mpx for blocks and warps, on the first workload."""
    measure.start_child(None)
    model = options.models[0]
    shapes, records = modes.shapes_of(model), []
    for block in options.blocks:
        for warps in options.warps:
            modes.retune(block, warps)
            built = modes.build_mpx(shapes, options.optimizer, ())
            record = sizes(built, modes.count_of(shapes))
            record |= {"model": model, "block": block, "warps": warps}
            try:
                record |= time_loop(built, built.carry, options)[1]
            except jax.errors.JaxRuntimeError as error:  # a block may need too much
                record |= {"error": str(error).splitlines()[0]}
            records.append(record)
    return records


def print_sweep(records: list[Record]) -> None:
    """Prints microseconds by block and warps."""
    cells = {(r["block"], r["warps"]): r for r in records}
    warps = sorted({r["warps"] for r in records})
    rows = [
        [str(block)] + [number(cells[block, w].get("us"), 1) for w in warps]
        for block in sorted({r["block"] for r in records})
    ]
    print(measure.format_table(["block", *(f"{w} warps, µs" for w in warps)], rows))


# --- all modes -----------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> dict[str, list[Record]]:
    """Runs each mode in a process of its own, while the budget lasts."""
    runs: dict[str, list[Record]] = {}
    log, start = measure.Log(options.json), time.perf_counter()
    for name in options.modes:
        left = options.budget - (time.perf_counter() - start)
        if reason := missing(name, options):
            records = [{"error": f"skipped: {reason}", "skip": True}]
        elif left < 0:
            records = [{"error": "skipped: no time left", "skip": True}]
        else:
            records = child(name, options, left)
        for record in records:
            record |= {"mode": name, "optimizer": options.optimizer}
            log.write(record | {"command": command()})
            progress(record, time.perf_counter() - start)
        runs[name] = records
    return runs


def missing(name: str, options: argparse.Namespace) -> str | None:
    """Says what a peer lacks, if anything."""
    wanted = {
        "flashoptim-jax": ("flashoptim_jax",),
        "flashoptim-torch": ("torch", "flashoptim"),
    }
    sys.path[:0] = options.peer
    names = [n for n in wanted.get(name, ()) if importlib.util.find_spec(n) is None]
    del sys.path[: len(options.peer)]
    return f"{' and '.join(names)} not installed" if names else None


def child(name: str, options: argparse.Namespace, left: float) -> list[Record]:
    """Runs one mode in a process of its own."""
    models = options.peer_models if MODES[name].peer else options.models
    arguments = ["--child", name, "--models", ",".join(models)]
    arguments += ["--child-budget", str(left)]
    for option in ("optimizer", "steps", "group", "repeat"):
        arguments += [f"--{option}", str(getattr(options, option))]
    for path in options.peer:
        arguments += ["--peer", path]
    record = measure.run_child(__file__, arguments, timeout=options.timeout)
    return record.get("records", [record])


def command() -> str:
    """Returns how the script was called."""
    return shlex.join(["python", "benchmarks/optim.py", *sys.argv[1:]])


def progress(record: Record, spent: float) -> None:
    """Prints one line for a record."""
    what = f"{record['mode']:16s} {record.get('model', ''):10s} after {spent:4.0f} s: "
    if "error" in record:
        print(what + record["error"], flush=True)
    elif "copy" in record:
        print(what + f"{record['copy'] / 1e12:.2f} TB/s", flush=True)
    else:
        print(what + f"{record['us']:.1f} µs", flush=True)


def by_model(runs: dict[str, list[Record]]) -> dict[str, dict[str, Record]]:
    """Good records by workload and mode."""
    found: dict[str, dict[str, Record]] = {}
    for name, records in runs.items():
        for record in records:
            if "error" not in record and "model" in record:
                found.setdefault(record["model"], {})[name] = record
    return found


def print_table(model: str, rows: dict[str, Record], copy: float | None) -> None:
    """Prints one line per mode."""
    first = next(iter(rows.values()))
    params = first["params"]
    leaves = len(modes.shapes_of(model))
    print(f"\n{model}: {params / 1e6:.1f}M parameters in {leaves} arrays\n")
    header = [
        "mode", "µs", "spread", "TB/s", "of copy", "× add", "× optax", "dispatched µs",
        "B/param moved", "resident", "peak", "compiled", "trace s", "compile s",
    ]  # fmt: skip
    table = []
    for name, r in rows.items():
        rate = r["bytes"] / r["us"] * 1e6
        spread = 100 * (r["us_high"] - r["us_low"]) / r["us"]
        share = ratio(rate, copy)
        per_param = [
            number(ratio(r.get(key), params))
            for key in ("bytes", "resident_bytes", "peak_bytes", "compiled_bytes")
        ]
        if name == "add":  # it has no parameters
            per_param[1:] = ["–"] * 3
        table.append(
            [
                name,
                number(r["us"], 1),
                number(spread, 1, " %"),
                number(rate / 1e12),
                number(None if share is None else 100 * share, 0, " %"),
                number(ratio(r["us"], rows.get("add", {}).get("us")), 3),
                number(ratio(r["us"], rows.get("optax", {}).get("us")), 3),
                number(r["dispatched_us"], 1),
                *per_param,
                number(r.get("trace_s"), 1),
                number(r.get("compile_s"), 1),
            ]
        )
    print(measure.format_table(header, table))


# --- does every mode do the work? ----------------------------------------------------


def failures(rows: dict[str, Record]) -> Iterable[tuple[str, str]]:
    """Yields what is wrong with each mode."""
    base = rows.get("optax")
    for name, record in rows.items():
        if record["unchanged"]:
            yield name, f"{record['unchanged']} arrays did not change"
        in_place = record.get("alias_bytes", math.inf)
        if in_place < record.get("state_bytes", 0) and not MODES[name].peer:
            yield name, f"{record['state_bytes'] - in_place} bytes are not in place"
        if "losses" not in record:
            continue
        first, last = record["losses"]
        if not (math.isfinite(last) and last < first):
            yield name, f"the loss did not go down: {first:.6g} → {last:.6g}"
        if base is not None and base is not record:
            reference = base["losses"][0] - base["losses"][1]
            apart = abs(first - last - reference) / reference
            if not apart <= AGREEMENT:
                yield name, f"its loss falls by {apart:.1%} more or less than optax's"


def targets(rows: dict[str, Record], optimizer: str) -> Iterable[tuple[str, bool]]:
    """Yields what was aimed at and whether it was reached; nothing on a CPU."""
    ours, add, base = (rows.get(name) for name in ("mpx", "add", "optax"))
    if ours is None or ours["environment"]["backend"] == "cpu":
        return
    if add is not None and "one" in ours["model"]:
        value = ours["us"] / add["us"]
        yield (
            f"{value:.3f}× the in-place add, at most {TARGET_ADD}",
            value <= TARGET_ADD,
        )
    if base is not None:
        value = ours["us"] / base["us"]
        yield f"{value:.3f}× the time of optax in f32, below 1", value < 1
    resident = ours["resident_bytes"] / ours["params"]
    if optimizer == "adamw":
        met = resident <= TARGET_BYTES
        yield f"{resident:.2f} resident bytes a parameter, at most {TARGET_BYTES}", met
    peak = ours["peak_bytes"] or ours.get("compiled_bytes")
    if peak is not None:
        value = peak / ours["resident_bytes"]
        yield f"peak {value:.3f}× resident, at most {TARGET_PEAK}", value <= TARGET_PEAK


# --- command line --------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--models", default="one,many,vit-base,gpt2", help=f"of {', '.join(WORKLOADS)}")
    add("--peer-models", default="one,many", help="those that the peers run")
    add("--optimizer", default="adamw", choices=RATES)
    usual = [name for name, mode in MODES.items() if not mode.by_name]
    add("--modes", default=",".join(usual), help=f"of {', '.join(MODES)}")
    add("--steps", type=int, default=200, help="steps within one call")
    add("--repeat", type=int, default=7, help="timed calls; the median counts")
    add("--group", type=int, default=10, help="dispatched steps between two clocks")
    add("--peer", action="append", default=[], help="folder to import peers from")
    add("--budget", type=float, default=300, help="seconds; then no process starts")
    add("--timeout", type=float, default=300, help="seconds for one process")
    add("--json", help="append the records to this file, one JSON object a line")
    add("--strict", action="store_true", help="a missed target is an error, too")
    add("--sweep", action="store_true", help="only time the kernel by block and warps")
    add("--blocks", default=",".join(map(str, BLOCKS)), help="for --sweep")
    add("--warps", default=",".join(map(str, WARPS)), help="for --sweep")
    add("--child", choices=MODES, help=argparse.SUPPRESS)
    add("--child-budget", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, known in (
        ("models", WORKLOADS),
        ("peer_models", WORKLOADS),
        ("modes", MODES),
    ):
        values = getattr(options, name).split(",")
        if unknown := set(values) - set(known):
            parser.error(
                f"unknown {name} {sorted(unknown)}; there are {', '.join(known)}"
            )
        setattr(options, name, values)
    if options.models == ["tiny"] and options.child is None:
        options.models = options.peer_models = list(TINY)
    options.blocks = [int(x) for x in options.blocks.split(",")]
    options.warps = [int(x) for x in options.warps.split(",")]
    options.peer = [str(pathlib.Path(path).resolve()) for path in options.peer]
    return options


def main() -> int:
    """Runs one mode or all of them; returns the exit status."""
    options = parse()
    if options.child is not None:
        print(json.dumps({"records": run_mode(options.child, options)}))
        return 0
    if options.sweep:
        records = run_sweep(options)
        log = measure.Log(options.json)
        for record in records:
            log.write(record | {"command": command()})
        print_sweep(records)
        return 0
    runs = run_all(options)
    copy = next((r["copy"] for r in runs.get("copy", []) if "copy" in r), None)
    tables = by_model(runs)
    if not tables:
        return 1
    machine = next(iter(next(iter(tables.values())).values()))["environment"]
    print(
        f"\n{options.optimizer}, {options.steps} steps in one call, {options.repeat} calls;"
        f" {machine['device']}, jax {machine['jax']}, Python {machine['python']};"
        f" copy {number(None if copy is None else copy / 1e12)} TB/s"
    )
    wrong, missed = [], []
    for model, rows in tables.items():
        print_table(model, rows, copy)
        for name, text in failures(rows):
            print(f"CHECK FAILED {name}: {text}")
            wrong.append(name)
        for text, met in targets(rows, options.optimizer):
            print(f"mpx: {text}: {'met' if met else 'MISSED'}")
            missed += [] if met else [text]
    if machine["backend"] == "cpu":
        print("\nOn a CPU the times and ratios say nothing about a GPU.")
    if not wrong:
        print(
            "\nChecks passed: every array changed, in place; the loss of a quadratic fell,"
            f" within {AGREEMENT:.0%} of the decrease of optax."
        )
    # The peers' own errors are reported but are not ours.
    broken = [
        name
        for name, records in runs.items()
        if name in wrong or any("error" in r and "skip" not in r for r in records)
    ]
    ours = [name for name in broken if not MODES[name].peer]
    return int(bool(ours or (options.strict and missed)))


if __name__ == "__main__":
    sys.exit(main())
