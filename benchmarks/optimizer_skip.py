"""What skipping a non-finite update costs where the optimizer dominates the step.

    python benchmarks/optimizer_skip.py                            # 124M and 1.1B
    python benchmarks/optimizer_skip.py --models tiny-gpt          # a check on a CPU

Two workloads on a large model: the update alone, with gradients and flag given, and a
whole bf16 step on one short sequence. Each mode runs in a process of its own, and is
timed with finite gradients and with non-finite ones,
many steps in one call. See README.md beside this file.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import _measure as measure
import _steps
from _measure import Record, number, ratio
from _models import make_task

WORKS = ("update", "step")
MODELS = ("gpt2", "gpt-1b", "tiny-gpt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to leave an update out."""

    library: str
    skip: Literal["select", "cond", "never"]
    default: bool = True


MODES = {
    "optax": Mode(library="hand", skip="never"),
    "select": Mode(library="mpx", skip="select"),
    "cond": Mode(library="mpx", skip="cond"),
    "never": Mode(library="mpx", skip="never", default=False),
    "hand-select": Mode(library="hand", skip="select", default=False),
}


# --- the two workloads ---------------------------------------------------------------
# A builder returns the state, `step(state, inputs) -> state, output` and the inputs of
# an applied and of a skipped step.

Built = tuple[Any, Callable[[Any, Any], tuple[Any, Any]], Any, Any]


def build_update(mode: Mode, options: argparse.Namespace, optimizer: Any) -> Built:
    """The optimizer alone: gradients and flag are arguments."""
    model = make_task(options.model, 1, batches=1, length=options.length).model
    params, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    grads = treedef.unflatten(
        [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    )

    def by_hand(state: Any, inputs: Any) -> Any:
        params, opt_state = state
        grads, finite = inputs
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        if mode.skip == "select":
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return new, finite

    def with_mpx(state: Any, inputs: Any) -> Any:
        import mpx

        params, opt_state = state
        grads, finite = inputs
        model, opt_state = mpx.optimizer_update(
            eqx.combine(params, static),
            optimizer,
            opt_state,
            grads,
            finite,
            skip=mode.skip,
        )
        return (eqx.filter(model, eqx.is_inexact_array), opt_state), finite

    step = by_hand if mode.library == "hand" else with_mpx
    state = (params, jax.jit(optimizer.init)(params))
    return state, step, (grads, jnp.array(True)), (grads, jnp.array(False))


def build_step(mode: Mode, options: argparse.Namespace, optimizer: Any) -> Built:
    """A bf16 training step on one sequence; an infinite loss makes it a skipped one."""
    task = make_task(options.model, 1, batches=1, length=options.length)
    (batch,) = task.batches

    def loss(model: Any, batch: Any) -> Any:
        return task.loss(model, batch) * batch["factor"].astype(jnp.float32)

    built = _steps.BUILDERS[mode.library](
        _steps.Mode(name="", dtype="bf16", library=mode.library, skip=mode.skip),
        dataclasses.replace(task, loss=loss),
        optimizer,
    )
    state, static = eqx.partition(built[0], eqx.is_array)

    def step(state: Any, batch: Any) -> Any:
        state, output = built[1](eqx.combine(state, static), batch)
        return eqx.filter(state, eqx.is_array), output

    applied = batch | {"factor": jnp.float32(1.0)}
    return state, step, applied, batch | {"factor": jnp.float32(jnp.inf)}


def looped(step: Any, inner: int) -> Any:
    """Several steps in one call: a thousand small buffers keep the host busy longer
    than the device, and it is the device that is to be timed.
    """

    def call(state: Any, inputs: Any) -> Any:
        def body(i: Any, state: Any) -> Any:
            # Inputs that change with the step cannot be hoisted out of the loop.
            factor = 1 + jnp.float32(2**-10) * i.astype(jnp.float32)
            varied = jax.tree.map(
                lambda x: x * factor if x.dtype == jnp.float32 else x, inputs
            )
            return step(state, varied)[0]

        return jax.lax.fori_loop(0, inner, body, state), jnp.array(True)

    return call


# --- one mode, in its own process ----------------------------------------------------


def run_mode(name: str, options: argparse.Namespace) -> Record:
    """Times applied steps, then skipped ones, and takes fingerprints around them."""
    measure.start_child(options.cache)
    mode = MODES[name]
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2)
    )
    build = build_update if options.work == "update" else build_step
    state, step, applied, skipped = build(mode, options, optimizer)
    state = measure.own_small_buffers(state)
    _, record = measure.compile_step(step, state, applied)
    compiled, _ = measure.compile_step(looped(step, options.inner), state, applied)
    record["leaves"] = len(jax.tree.leaves(state[0]))
    record["params"] = sum(leaf.size for leaf in jax.tree.leaves(state[0]))

    prints = [fingerprint(state)]
    for outcome, inputs in (("applied", applied), ("skipped", skipped)):
        if outcome == "skipped" and mode.skip == "never":
            continue
        for steps in (options.warmup, options.steps):
            state, _, record[outcome] = measure.time_steps(
                compiled, state, [inputs], steps=steps, group=options.group
            )
        for name in ("ms", "ms_low", "ms_high", "host_ms"):
            record[outcome][name] /= options.inner
        prints.append(fingerprint(state))
    return record | {"fingerprints": prints, "environment": measure.environment()}


def fingerprint(state: Any) -> Record:
    """Per leaf of parameters and optimizer state: the sum of its bits, and of |x|."""

    @jax.jit
    def measure_leaf(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return bits.sum(dtype=jnp.uint32), jnp.abs(x.astype(jnp.float32)).mean()

    pairs = [measure_leaf(leaf) for leaf in jax.tree.leaves(state[:2])]
    bits, means = zip(*jax.device_get(pairs), strict=True)
    return {"bits": [int(b) for b in bits], "means": [float(m) for m in means]}


# --- all modes -----------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> Iterator[Record]:
    """Runs every model, workload and mode in turn."""
    log = measure.Log(options.json)
    command = shlex.join(["python", "benchmarks/optimizer_skip.py", *sys.argv[1:]])
    with tempfile.TemporaryDirectory() as cache:
        for model in options.models:
            for work in options.works:
                for name in options.modes:
                    arguments = ["--child", name, "--model", model, "--work", work]
                    for option in ("length", "steps", "warmup", "group", "inner"):
                        arguments += [f"--{option}", str(getattr(options, option))]
                    record = measure.run_child(
                        __file__, [*arguments, "--cache", cache], timeout=300
                    )
                    record |= {"model": model, "work": work, "mode": name}
                    log.write(record | {"command": command})
                    result = record.get("error") or f"{record['applied']['ms']:.3f} ms"
                    print(f"{model} {work} {name}: {result}", flush=True)
                    yield record


def print_table(records: list[Record]) -> None:
    """Prints one line per model, workload and mode."""
    header = [
        "model", "work", "mode", "applied ms", "spread", "× optax", "skipped ms",
        "× optax", "host ms", "planned GB", "× optax", "compile s",
    ]  # fmt: skip
    rows = []
    for record in records:
        base = _base(records, record) or {}
        applied, skipped = record["applied"], record.get("skipped", {})
        base_ms = base.get("applied", {}).get("ms")
        memory, base_memory = (r.get("compiled_bytes") for r in (record, base))
        spread = (applied["ms_high"] - applied["ms_low"]) / applied["ms"]
        rows.append(
            [
                record["model"],
                record["work"],
                record["mode"],
                number(applied["ms"], 3),
                number(100 * spread, 1, " %"),
                number(ratio(applied["ms"], base_ms), 3),
                number(skipped.get("ms"), 3),
                number(ratio(skipped.get("ms"), base_ms), 3),
                number(applied["host_ms"], 3),
                number(_giga(memory), 3),
                number(ratio(memory, base_memory), 3),
                number(record["compile_s"], 1),
            ]
        )
    print(measure.format_table(header, rows))


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _base(records: list[Record], record: Record) -> Record | None:
    same = (record["model"], record["work"])
    for other in records:
        if (other["model"], other["work"]) == same and other["mode"] == "optax":
            return other
    return None


def failures(records: list[Record]) -> Iterable[str]:
    """What is wrong: nothing when applied steps train and skipped ones do nothing."""
    for record in records:
        name = f"{record['model']} {record['work']} {record['mode']}"
        before, applied, *skipped = record["fingerprints"]
        pairs = zip(before["bits"], applied["bits"], strict=True)
        if still := sum(a == b for a, b in pairs):
            yield f"{name}: {still} leaves did not change in applied steps"
        if not all(map(math.isfinite, applied["means"])):
            yield f"{name}: applied steps made non-finite numbers"
        if any(after["bits"] != applied["bits"] for after in skipped):
            yield f"{name}: skipped steps changed the state"
        if record.get("alias_bytes", math.inf) < record["state_bytes"]:
            yield f"{name}: not all of the state is updated in place"
        base = _base(records, record)
        if base is None or record["work"] != "update":
            continue
        expected = base["fingerprints"][1]["means"]
        apart = max(
            abs(a - b) / max(abs(b), 1e-30)
            for a, b in zip(applied["means"], expected, strict=True)
        )
        # The same f32 operations, at most in another order: √n·eps with room to spare.
        if not apart <= 1e-4:
            yield f"{name}: leaves are up to {apart:.1e} away from those of optax"


# --- command line --------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = ",".join(name for name, mode in MODES.items() if mode.default)
    add = parser.add_argument
    add("--models", default="gpt2,gpt-1b", help=f"of {', '.join(MODELS)}")
    add("--works", default="update,step")
    add("--modes", default=default, help=f"of {', '.join(MODES)}")
    add("--length", type=int, default=128, help="tokens of the one sequence of `step`")
    add("--inner", type=int, default=20, help="steps in one call")
    add("--steps", type=int, default=20, help="timed calls")
    add("--warmup", type=int, default=4, help="calls before them")
    add("--group", type=int, default=4, help="calls between two readings of the clock")
    add("--json", help="append the records to this file, one JSON object a line")
    add("--child", choices=MODES, help=argparse.SUPPRESS)
    add("--model", choices=MODELS, help=argparse.SUPPRESS)
    add("--work", choices=WORKS, help=argparse.SUPPRESS)
    add("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for option, known in (("models", MODELS), ("works", WORKS), ("modes", MODES)):
        values = getattr(options, option).split(",")
        if unknown := set(values) - set(known):
            parser.error(f"--{option} has {sorted(unknown)}; use {', '.join(known)}")
        setattr(options, option, values)
    if options.steps % options.group or options.warmup % options.group:
        parser.error("--steps and --warmup must be multiples of --group")
    return options


def main() -> int:
    """Runs one mode or all of them; returns the exit status."""
    options = parse()
    if options.child is not None:
        print(json.dumps(run_mode(options.child, options)))
        return 0
    everything = list(run_all(options))
    records = [record for record in everything if "error" not in record]
    if not records:
        return 1
    machine = records[0]["environment"]
    print(f"\n{machine['device']}, jax {machine['jax']}, Python {machine['python']}\n")
    print_table(records)
    print()
    if machine["backend"] == "cpu":
        print("On a CPU the times and ratios say nothing about a GPU.")
    wrong = list(failures(records))
    for text in wrong:
        print(f"CHECK FAILED {text}")
    if not wrong:
        print("Checks passed: applied steps train, skipped ones change no bit.")
    return int(bool(wrong) or len(records) < len(everything))


if __name__ == "__main__":
    sys.exit(main())
