"""What a mixed-precision training step costs beside the same step cast by hand.

    python benchmarks/step.py                            # ViT-Base/16, 224², batch 128
    python benchmarks/step.py --model tiny --steps 40    # try the script on a CPU

Every mode trains the same f32 model on the same data with the same optimizer, in a
process of its own. See README.md beside this file for the modes and the method.
"""

import argparse
import json
import math
import pathlib
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import _measure as measure
from _measure import Record, number, ratio
from _models import make_task
from _steps import BUILDERS, MODES, Mode

EPS = {"bf16": 2.0**-7, "f16": 2.0**-10}
BATCH = {"vit-base": 128, "gpt2": 8, "gpt-1b": 4, "tiny": 16, "tiny-gpt": 8}
TAIL = 10  # the last loss is a mean over so many steps
TARGET = 1.02
AGREEMENT = 0.02  # distance of two loss curves, as a share of the decrease by hand
FEW = 3  # steps that dynamic scaling may skip while it finds its scale


# --- one mode, in its own process ----------------------------------------------------


def run_mode(mode: Mode, options: argparse.Namespace) -> Record:
    """Builds, compiles, checks and times one mode."""
    if mode.library == "peer":
        sys.path.insert(0, options.peer)
    measure.start_child(options.cache)
    task = make_task(options.model, options.batch, seed=options.seed)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2)
    )
    state, step = BUILDERS[mode.library](mode, task, optimizer)
    # Functions and other static parts of the model are not arguments of the program.
    arrays, static = eqx.partition(state, eqx.is_array)
    arrays = measure.own_small_buffers(arrays)
    batches = task.batches

    def on_arrays(arrays: Any, batch: Any) -> tuple[Any, Any]:
        state, output = step(eqx.combine(arrays, static), batch)
        return eqx.filter(state, eqx.is_array), output

    compiled, record = measure.compile_step(on_arrays, arrays, batches[0])
    arrays, warm, _ = measure.time_steps(
        compiled, arrays, batches, steps=options.warmup, group=options.group
    )
    arrays, timed, timing = measure.time_steps(
        compiled, arrays, batches, steps=options.steps, group=options.group
    )
    losses, finite = zip(*jax.device_get(warm + timed), strict=True)
    return (
        record
        | timing
        | {
            "mode": mode.name,
            "losses": [float(loss) for loss in losses],
            "skipped": len(finite) - int(np.sum(np.asarray(finite))),
            "peak_bytes": measure.peak_bytes(),
            "environment": measure.environment(),
        }
    )


# --- all modes -----------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> dict[str, list[Record]]:
    """Runs the modes pass by pass; later passes only while the budget lasts."""
    runs: dict[str, list[Record]] = {}
    log = measure.Log(options.json)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(options.repeat):
            for name in options.modes:
                done = runs.setdefault(name, [])
                if any("error" in record for record in done):
                    continue
                # A repetition finds its program in the cache and so takes no longer.
                expected = done[0]["wall_s"] if done else 0.0
                spent = time.perf_counter() - start
                if done and spent + expected > options.budget:
                    continue
                record = _run_child(name, options, cache)
                record |= {"mode": name, "pass": turn, "model": options.model}
                log.write(record | {"batch": options.batch, "command": _command()})
                done.append(record)
                _progress(record, time.perf_counter() - start)
    return runs


def _run_child(name: str, options: argparse.Namespace, cache: str) -> Record:
    if MODES[name].library == "peer" and options.peer is None:
        return {"error": "skipped: say with --peer where the peer is", "skip": True}
    arguments = ["--child", name]
    for option in ("model", "batch", "steps", "warmup", "group", "seed", "peer"):
        if getattr(options, option) is not None:
            arguments += [f"--{option}", str(getattr(options, option))]
    if not options.fresh:
        arguments += ["--cache", cache]
    return measure.run_child(__file__, arguments, timeout=options.timeout)


def _command() -> str:
    return shlex.join(["python", "benchmarks/step.py", *sys.argv[1:]])


def _progress(record: Record, spent: float) -> None:
    text = f"{record['mode']:16s} pass {record['pass'] + 1} after {spent:4.0f} s: "
    if "error" in record:
        text += record["error"]
    else:
        text += f"{record['ms']:.2f} ms"
    print(text, flush=True)


def best_runs(runs: dict[str, list[Record]]) -> dict[str, Record]:
    """Per mode the pass with the smallest median, with what the passes say together."""
    best = {}
    for name in MODES:  # the order of the table, not that of the options
        good = [record for record in runs.get(name, []) if "error" not in record]
        if not good:
            continue
        medians = [record["ms"] for record in good]
        compiles = [r["compile_s"] for r in good if r["compile_s"] is not None]
        peaks = [r["peak_bytes"] for r in good if r["peak_bytes"] is not None]
        best[name] = min(good, key=lambda record: record["ms"]) | {
            # A process that autotunes may need memory that the step does not.
            "peak_bytes": min(peaks, default=None),
            "between": max(medians) / min(medians) - 1 if len(good) > 1 else None,
            "compile_s": max(compiles, default=None),
            "passes": len(good),
        }
    if "f32" in best:
        best = {"f32": best.pop("f32"), **best}
    return best


def memory(record: Record) -> float | None:
    """Peak bytes: the allocator's, or the compiler's where there is no allocator."""
    return record["peak_bytes"] or record.get("compiled_bytes")


def print_table(best: dict[str, Record]) -> None:
    """Prints one line per mode."""
    header = [
        "step", "ms", "spread", "passes", "× hand", "× checked", "vs f32",
        "peak GB", "× hand", "compiled GB", "trace s", "compile s", "loss", "skipped",
    ]  # fmt: skip
    rows = []
    for name, record in best.items():
        hand = best.get(MODES[name].hand, {})
        checked = best.get(f"{MODES[name].hand}-check", {})
        f32 = best.get("f32", {})
        spread = (record["ms_high"] - record["ms_low"]) / record["ms"]
        between = record["between"]
        hand_memory = memory(hand) if hand else None
        rows.append(
            [
                name,
                number(record["ms"]),
                number(100 * spread, 1, " %"),
                number(None if between is None else 100 * between, 1, " %"),
                number(ratio(record["ms"], hand.get("ms")), 3),
                number(ratio(record["ms"], checked.get("ms")), 3),
                number(ratio(f32.get("ms"), record["ms"])),
                number(_giga(record["peak_bytes"])),
                number(ratio(memory(record), hand_memory), 3),
                number(_giga(record.get("compiled_bytes"))),
                number(record["trace_s"], 1),
                number(record["compile_s"], 1),
                f"{record['losses'][0]:.3f} → {last_loss(record):.3f}",
                str(record["skipped"]),
            ]
        )
    print(measure.format_table(header, rows))


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


# --- does every mode do the work? ----------------------------------------------------


def last_loss(record: Record) -> float:
    """The mean over the last steps."""
    tail = record["losses"][-TAIL:]
    return sum(tail) / len(tail)


def distance(record: Record, hand: Record) -> float:
    """Mean distance of two loss curves over the decrease of the second.

    One update left out of n shifts a curve by one step: a distance of about 1/n.
    """
    pairs = list(zip(record["losses"], hand["losses"], strict=True))
    decrease = hand["losses"][0] - last_loss(hand)
    return sum(abs(a - b) for a, b in pairs) / len(pairs) / abs(decrease)


def failures(best: dict[str, Record]) -> dict[str, list[str]]:
    """What is wrong with each mode: {} when every one did the work it claims."""
    found = {}
    for name, record in best.items():
        wrong = list(_wrong_alone(record))
        hand = best.get(MODES[name].hand)
        if hand is not None and hand is not record:
            wrong += _wrong_beside(MODES[name], record, hand)
        if wrong:
            found[name] = wrong
    return found


def _wrong_alone(record: Record) -> Iterable[str]:
    losses = record["losses"]
    if not all(map(math.isfinite, losses)):
        yield f"{sum(not math.isfinite(x) for x in losses)} losses are not finite"
    elif not last_loss(record) < losses[0]:
        yield f"the loss did not go down: {losses[0]:.4f} → {last_loss(record):.4f}"
    if record.get("alias_bytes", math.inf) < record["state_bytes"]:
        yield (
            f"{record['state_bytes'] - record['alias_bytes']} of "
            f"{record['state_bytes']} bytes of the state are not updated in place"
        )


def _wrong_beside(mode: Mode, record: Record, hand: Record) -> Iterable[str]:
    first, first_hand = record["losses"][0], hand["losses"][0]
    if not abs(first - first_hand) <= EPS[mode.dtype] * first_hand:
        yield f"the first loss is {first:.5f}, by hand {first_hand:.5f}"
    apart = distance(record, hand)
    # An update that was left out, and counted, shifts the curve by one step.
    if not apart <= AGREEMENT + record["skipped"] / len(record["losses"]):
        yield (
            f"the losses are {apart:.1%} of their decrease away from those by hand;"
            f" the last is {last_loss(record):.4f}, by hand {last_loss(hand):.4f}"
        )
    if record["skipped"] > FEW:
        yield f"{record['skipped']} steps were skipped"
    if record["dots"] != hand["dots"]:
        yield f"the matmuls are {record['dots']}, by hand {hand['dots']}"


def print_verdict(best: dict[str, Record], wrong: dict[str, list[str]]) -> None:
    """Says which checks failed and whether the target was met."""
    for name, texts in wrong.items():
        for text in texts:
            print(f"CHECK FAILED {name}: {text}")
    if not wrong:
        print(
            "Checks passed: losses finite and falling, state updated in place; beside"
            " the step by hand the same matmuls, the first loss within one ulp of the"
            f" half dtype, the loss curves within {AGREEMENT:.0%} of the decrease."
        )
    for name, (milliseconds, peak) in target_ratios(best).items():
        met = "met" if max(milliseconds, peak) <= TARGET else "MISSED"
        print(
            f"{name}: {milliseconds:.3f}× the time and {peak:.3f}× the peak memory of"
            f" {MODES[name].hand}; target {TARGET}×: {met}"
        )


def target_ratios(best: dict[str, Record]) -> dict[str, tuple[float, float]]:
    """Time and memory of the default mpx step over the step by hand; none on a CPU."""
    ratios = {}
    for name in ("mpx-bf16", "mpx-f16"):
        record, hand = best.get(name), best.get(MODES[name].hand)
        if record is None or hand is None or record["peak_bytes"] is None:
            continue
        ratios[name] = (
            record["ms"] / hand["ms"],
            record["peak_bytes"] / hand["peak_bytes"],
        )
    return ratios


# --- command line --------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = ",".join(name for name, mode in MODES.items() if mode.default)
    add = parser.add_argument
    add("--model", default="vit-base", choices=BATCH)
    add("--batch", type=int, help="examples per step (None: 128 for vit-base)")
    add("--steps", type=int, default=120, help="timed steps")
    add("--warmup", type=int, default=20, help="steps before them")
    add("--group", type=int, default=10, help="steps between two readings of the clock")
    add("--modes", default=default, help=f"of {', '.join(MODES)}")
    add("--repeat", type=int, default=2, help="processes per mode; the best counts")
    add("--budget", type=float, default=300, help="seconds; then no repetition starts")
    add("--timeout", type=float, default=300, help="seconds for one process")
    add("--seed", type=int, default=0)
    add("--peer", help="folder with the `mpx` package of mixed-precision-for-JAX")
    add("--fresh", action="store_true", help="let every process autotune for itself")
    add("--json", help="append the records to this file, one JSON object a line")
    add("--strict", action="store_true", help="a missed target is an error, too")
    add("--child", choices=MODES, help=argparse.SUPPRESS)
    add("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch = options.batch or BATCH[options.model]
    options.modes = options.modes.split(",")
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"unknown modes {sorted(unknown)}; there are {', '.join(MODES)}")
    if options.steps % options.group or options.warmup % options.group:
        parser.error("--steps and --warmup must be multiples of --group")
    if options.peer is not None:
        options.peer = str(pathlib.Path(options.peer).resolve())
        if not (pathlib.Path(options.peer) / "mpx" / "__init__.py").is_file():
            print(f"No mpx/__init__.py in {options.peer}: peer modes are skipped.")
            options.peer = None
    return options


def main() -> int:
    """Runs one mode or all of them; returns the exit status."""
    options = parse()
    if options.child is not None:
        print(json.dumps(run_mode(MODES[options.child], options)))
        return 0
    runs = run_all(options)
    best = best_runs(runs)
    if not best:
        return 1
    machine = next(iter(best.values()))["environment"]
    print(
        f"\n{options.model}, batch {options.batch}, {options.steps} steps;"
        f" {machine['device']}, jax {machine['jax']}, Python {machine['python']}\n"
    )
    print_table(best)
    print()
    if machine["backend"] == "cpu":
        print("On a CPU the times and ratios say nothing about mixed precision.")
    wrong = failures(best)
    print_verdict(best, wrong)
    # The peer's own errors are reported but are not ours.
    broken = [
        name
        for name, records in runs.items()
        if name in wrong or any("error" in r and "skip" not in r for r in records)
    ]
    missed = [n for n, pair in target_ratios(best).items() if max(pair) > TARGET]
    ours = [name for name in broken if MODES[name].library != "peer"]
    return int(bool(ours or (options.strict and missed)))


if __name__ == "__main__":
    sys.exit(main())
