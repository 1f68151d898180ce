"""How training scales: time and memory of 7B and 70B on 8 to 1,024 GPUs, predicted.

    python benchmarks/scale.py                      # the table; about 10 minutes
    python benchmarks/scale.py --layouts --all      # and other layouts than FSDP
    python benchmarks/scale.py --cache out/scale    # keeps what was read from the programs
    python benchmarks/scale.py --cache out/scale --set network=25e9   # another machine
    python benchmarks/scale.py --models 7B --gpus 8 --detail          # where the time goes
    python benchmarks/scale.py --known              # beside times of other benchmarks
    python benchmarks/scale.py --check              # on a GPU: predicted and measured

Whole training steps are compiled for H200s, which need not be there: `make gpu-compile`
installs what that takes, and then `.venv-gpu/bin/python benchmarks/scale.py` runs. `_cost.py`
reads kernels and collectives from the compiled programs and divides them by the rates of a
machine, `--set NAME=VALUE` changes one of them. `_llama.py` holds models and layouts.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

import _cost as cost
import _llama as llama
import _measure as measure
import _scale_check as checks
from _cost import Machine, Program, Transfer, from_record
from _llama import Sizes
from _measure import number

GPUS = (8, 64, 256, 1024)


# --- programs -------------------------------------------------------------------------


class Case(NamedTuple):
    """One training step: model, precision, layout and the number of GPUs."""

    model: str
    precision: str
    layout: str
    gpus: int

    def __str__(self) -> str:
        return f"{self.model}, {self.precision}, {self.layout}, {self.gpus} GPUs"


def cases(
    models: Sequence[str], gpus: Sequence[int], layouts: Sequence[str]
) -> Iterator[Case]:
    """Yields every case; in a single node all of FSDP is in a node."""
    for model, count, precision in itertools.product(models, gpus, llama.PRECISIONS):
        for layout in layouts:
            if layout != "FSDP in a node" or count > llama.NODE:
                yield Case(model, precision, layout, count)


def program_of(case: Case, cache: pathlib.Path | None) -> Program:
    """Compiles a case and reads the program, or takes it from the cache."""
    file = cache / f"{case}.json".replace(" ", "-") if cache else None
    if file is not None and file.exists():
        return from_record(json.loads(file.read_text()))
    compiled = llama.compiled(
        llama.MODELS[case.model],
        llama.PRECISIONS[case.precision],
        case.layout,
        case.gpus,
    )
    program = cost.read(compiled)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(program._asdict()))
    return program


# --- the table ------------------------------------------------------------------------


class Prediction(NamedTuple):
    """What a case costs on each GPU: seconds of kernels and of collectives, bytes."""

    case: Case
    compute: float
    communication: float
    peak_bytes: int
    argument_bytes: int

    @property
    def seconds(self) -> tuple[float, float]:
        """The time of a step if communication is hidden as far as possible, or not at all."""
        both = self.compute, self.communication
        return max(both), sum(both)

    def fits(self, machine: Machine) -> bool:
        """Returns whether the GPU has that memory."""
        return self.peak_bytes <= machine.capacity


def model_flops(sizes: Sizes) -> float:
    """Returns the operations of a step on one GPU, without what is computed again.

    Six for each weight of a matmul and token, and those of causal attention.
    """
    weights = sizes.params - sizes.vocabulary * sizes.width
    attention = 6.0 * sizes.layers * sizes.width * sizes.length
    return (6.0 * weights + attention) * sizes.tokens


def predict(case: Case, program: Program, machine: Machine) -> Prediction:
    """Divides what a program does by the rates of a machine."""
    return Prediction(
        case,
        program.compute(machine),
        program.communication(machine),
        program.peak_bytes,
        program.argument_bytes,
    )


def best(found: Sequence[Prediction], machine: Machine) -> Prediction:
    """Returns the layout that fits and is fastest without overlap, or the smallest one."""
    fitting = [x for x in found if x.fits(machine)]
    if fitting:
        return min(fitting, key=lambda x: x.seconds[1])
    return min(found, key=lambda x: x.peak_bytes)


HEADER = (
    "model, GPUs", "precision", "layout", "ms a step", "tokens/s a GPU", "MFU, %",
    "GB a GPU", "of which state", "communication, %",
)  # fmt: skip


def row(x: Prediction, machine: Machine) -> list[str]:
    """Returns the cells of a case: from full overlap to none."""
    sizes = llama.MODELS[x.case.model]
    names = [f"{x.case.model}, {x.case.gpus}", x.case.precision, x.case.layout]
    gigabytes = [f"{size / 1e9:.1f}" for size in (x.peak_bytes, x.argument_bytes)]
    if not x.fits(machine):
        return [*names, "does not fit", "–", "–", *gigabytes, "–"]
    fast, slow = x.seconds
    share = model_flops(sizes) / machine.peak
    return [
        *names,
        f"{fast * 1e3:.0f}–{slow * 1e3:.0f}",
        f"{sizes.tokens / slow:.0f}–{sizes.tokens / fast:.0f}",
        f"{100 * share / slow:.0f}–{100 * share / fast:.0f}",
        *gigabytes,
        f"{100 * x.communication / slow:.0f}",
    ]


def print_detail(case: Case, program: Program, machine: Machine) -> None:
    """Says where time and memory go."""
    sizes, precision = llama.MODELS[case.model], llama.PRECISIONS[case.precision]
    print(f"\n{case}")
    for kind, flops in program.flops().items():
        print(f"  {flops / 1e12:8.1f} TFLOP {kind}")
    for kind, seconds in program.time_by_kind(machine).items():
        print(f"  {seconds * 1e3:8.1f} ms {kind}")
    groups: dict[tuple[Any, ...], list[Transfer]] = {}
    for x in program.transfers:
        groups.setdefault((x.kind, x.dtype, x.devices, x.nodes), []).append(x)
    for (kind, dtype, devices, nodes), found in sorted(groups.items()):
        seconds = sum(x.seconds(machine) for x in found)
        sent = sum(x.runs * x.bytes for x in found)
        if seconds > 1e-4:
            where = f"{devices} GPUs in {nodes} nodes"
            print(
                f"  {seconds * 1e3:8.1f} ms {kind} {dtype}, {where}: {sent / 1e9:.2f} GB"
            )
    wide = 4 if precision.params == "float32" else 2
    stream = sizes.layers * sizes.tokens * sizes.width * wide
    rest = program.peak_bytes - program.argument_bytes
    print(f"  {program.argument_bytes / 1e9:8.2f} GB parameters and optimizer")
    print(f"  {stream / 1e9:8.2f} GB inputs of the layers, kept for the backward pass")
    print(
        f"  {(rest - stream) / 1e9:8.2f} GB gradients, gathered weights, logits and others"
    )


def print_assumptions(machine: Machine) -> None:
    """Prints the rates that times are made with."""
    print("\nAssumptions:")
    for field in dataclasses.fields(machine):
        print(f"  {field.name} = {getattr(machine, field.name):g}")
    print(
        f"  {llama.MODELS['7B'].sequences} × {llama.MODELS['7B'].length} tokens a GPU;"
        " layers scanned and rematerialised; no late GPU, no input pipeline"
    )
    print(
        f"  FSDP cuts a weight into {llama.PARTS} parts at most, and has copies beyond"
    )


def print_table(options: argparse.Namespace, machine: Machine) -> None:
    """Predicts all cases and prints the best layout of each, or all of them."""
    jax.config.update("jax_platforms", "cpu")  # nothing is run
    found: dict[tuple[str, int, str], list[Prediction]] = {}
    layouts = llama.LAYOUTS if options.layouts else llama.LAYOUTS[:1]
    for case in cases(options.models, options.gpus, layouts):
        start = time.perf_counter()
        program = program_of(case, options.cache)
        prediction = predict(case, program, machine)
        found.setdefault((case.model, case.gpus, case.precision), []).append(prediction)
        if options.detail:
            print_detail(case, program, machine)
        told = f"{case}: {time.perf_counter() - start:.0f} s"
        print(told, file=sys.stderr, flush=True)
    rows = []
    for several in found.values():
        shown = several if options.all else [best(several, machine)]
        rows += [row(x, machine) for x in shown]
    print(f"\nH200s, compiled and not run, jax {jax.__version__}\n")
    print(measure.format_table(HEADER, rows))
    print_assumptions(machine)


# --- beside times that other benchmarks measured --------------------------------------

# Of docs/performance.md, in ms: `benchmarks/fp8.py --sections mlp,tower,lm` on one H200.
KNOWN = {
    ("mlp", "bf16"): 20.1,
    ("mlp", "fp8"): 12.3,
    ("tower", "bf16"): 97.2,
    ("tower", "fp8"): 61.8,
    ("lm", "bf16"): 196.5,
    ("lm", "fp8"): 140.1,
}


def print_known(machine: Machine) -> None:
    """Predicts the programs of `fp8.py` and compares with what was measured there."""
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for (section, mode), measured in KNOWN.items():
        program = cost.read(known_program(section, mode))
        seconds = program.compute(machine)
        parts = program.time_by_kind(machine)
        rows.append(
            [
                f"{section} {mode}",
                number(seconds * 1e3, 1),
                number(measured, 1),
                number(seconds * 1e3 / measured, 2),
                ", ".join(f"{kind} {part * 1e3:.1f}" for kind, part in parts.items()),
            ]
        )
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ["program", "predicted, ms", "measured, ms", "ratio", "of which"]
    print(measure.format_table(header, rows))


def known_program(section: str, mode: str) -> Any:
    """Compiles a program of `fp8.py` for one H200."""
    import fp8

    built: list[Any] = []
    build = fp8.build_training if section == "lm" else fp8.build_gradient

    def shapes() -> Any:
        step, *arguments = build(section, mode, fp8.SIZES[section], tiny=False)
        built.append(step)
        return arguments

    with llama.on_one_h200() as place:
        state, inputs = place(jax.eval_shape(shapes))
        lowered = jax.jit(built[0], donate_argnums=0).lower(state, inputs)
        return lowered.compile(llama.compile_options())


# --- the program ----------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", default="7B,70B", help="names of models, with commas")
    add("--gpus", default=",".join(map(str, GPUS)), help="numbers of GPUs, with commas")
    add("--layouts", action="store_true", help="other layouts than FSDP, too")
    add("--all", action="store_true", help="print every layout, not only the best")
    add("--detail", action="store_true", help="where time and memory go")
    add("--cache", type=pathlib.Path, help="folder for what was read from programs")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a rate")
    add("--known", action="store_true", help="beside times of other benchmarks")
    add("--check", action="store_true", help="on the GPU that is here")
    add("--tiny", action="store_true", help="a tiny model, to try `--check` on a CPU")
    add("--steps", type=int, default=30, help="timed steps of a check")
    add("--warmup", type=int, default=20, help="steps before them")
    add("--timeout", type=float, default=120, help="seconds for one process of a check")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.models = options.models.split(",")
    options.gpus = [int(x) for x in options.gpus.split(",")]
    fields = {x.name: type(x.default) for x in dataclasses.fields(Machine)}
    pairs = [pair.partition("=")[::2] for pair in options.set]
    if unknown := {name for name, _ in pairs} - fields.keys():
        parser.error(f"unknown rates {sorted(unknown)}; known are {sorted(fields)}")
    options.set = {name: fields[name](float(value)) for name, value in pairs}
    return options


def main() -> int:
    """Prints the table, or checks it; returns the exit status."""
    options = parse()
    machine = Machine(**options.set)
    if options.child == "rates":
        print(json.dumps(checks.run_rates(options)))
    elif options.child is not None:
        model, layers, precision = options.child.split(":")
        print(json.dumps(checks.run_step(model, int(layers), precision, options)))
    elif options.check:
        return int(checks.print_check(__file__, options, machine) > 0)
    elif options.known:
        print_known(machine)
    else:
        print_table(options, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
