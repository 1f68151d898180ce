"""How the benchmarks measure: one process per case, groups of steps, medians.

A script that compares programs is itself two programs. The parent never starts a JAX
backend: it runs itself once per case with `--child CASE`, so that each case has the
device, the allocator's peak and the compiler to itself. A child prints one JSON record as
its last line. While one has the device, the next one imports and traces.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp

BEGAN = time.perf_counter()

# --- the command line -------------------------------------------------------------------


def read_options(doc, text):
    """Reads the options that a text lists; the docstring of the script is their help.

    `name` is a flag, `name=3` has a default and its type, `name=a,b` is a list with commas,
    and `name=int` or `name=str` has no default. `--child` and `--child-cache` are passed to
    the processes of single cases.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in f"{text} child=str child_cache=str".split():
        name, is_given, default = option.partition("=")
        flag = f"--{name.replace('_', '-')}"
        if not is_given:
            parser.add_argument(flag, action="store_true")
        elif "," in default:
            parser.add_argument(flag, type=split, default=split(default))
        elif default in ("int", "str"):
            parser.add_argument(flag, type=int if default == "int" else str)
        else:
            value = number_of(default)
            parser.add_argument(flag, type=type(value), default=value)
    options = parser.parse_args()
    TURN.folder = options.child_cache
    return options


def split(text):
    return [number_of(x) for x in text.split(",") if x]


def number_of(text):
    """Returns the number that a text is, or the text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def pick(known, names):
    """Returns the entries of a dictionary by their names; unknown names end the program."""
    if unknown := set(names) - set(known):
        sys.exit(f"There is no {sorted(unknown)}: {', '.join(known)}.")
    return {name: known[name] for name in names}


# --- in the parent ----------------------------------------------------------------------


def run_child(case, *more, timeout=300):
    """Runs this program for one case; returns its record, or one with its `error`."""
    start = time.perf_counter()
    command = [sys.executable, *sys.argv, "--child", case, *more]
    # One that waits for the device must not hold its memory.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=env,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = (done.stdout + done.stderr).strip().splitlines()[-15:]
        return {"error": "\n".join(tail) or f"exit status {done.returncode}"}
    return json.loads(lines[-1]) | {"wall_s": time.perf_counter() - start}


def run_cases(cases, options, *, shared_cache=True):
    """Runs the cases pass by pass, and returns the records of each.

    Passes after the first start only within `options.budget`. The cases share the
    autotuner's choices through JAX's compilation cache, unless `shared_cache` is False:
    then the time of compilation can be compared, and nothing runs beside.
    """
    runs, start = {case: [] for case in cases}, time.perf_counter()

    def run(case):
        done, spent = runs[case], time.perf_counter() - start
        # A repetition finds its program in the cache and so takes no longer.
        late = done and spent + done[0].get("wall_s", 0) > options.budget
        if late or any("error" in record for record in done):
            return None
        return run_child(case, *more, timeout=options.timeout)

    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ThreadPoolExecutor(2 if shared_cache else 1) as pool,
    ):
        more = ["--child-cache", cache] if shared_cache else []
        for _ in range(getattr(options, "repeat", 1)):
            for case, record in zip(cases, pool.map(run, cases), strict=True):
                if record is None:
                    continue
                runs[case].append(record | {"case": case})
                spent = time.perf_counter() - start
                told = record.get("error") or number(record.get("ms"), 3, " ms")
                print(f"{case:24} after {spent:4.0f} s: {told}", flush=True)
                if options.json:  # a run that is cut off keeps what it has
                    write_json(options.json, runs)
    return runs


def write_json(path, runs):
    """Writes the best pass of each case, with the command and the machine."""
    best = {
        case: min(good, key=lambda record: record.get("ms", 0))
        for case, records in runs.items()
        if (good := [record for record in records if "error" not in record])
    }
    machine = next((record["environment"] for record in best.values()), None)
    own = lambda record: {k: v for k, v in record.items() if k != "environment"}  # noqa: E731
    cases = {case: own(record) for case, record in best.items()}
    found = {"command": command(), "machine": machine, "cases": cases}
    text = json.dumps(found, indent=1, ensure_ascii=False)
    # A list of numbers on one line.
    text = re.sub(r"\[[-\d.e,\s]+\]", lambda x: re.sub(r"\s+", " ", x[0]), text)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def command():
    """Returns the command of this run, without the names of files of this machine."""
    script = pathlib.Path(sys.argv[0]).name
    text = " ".join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    if flags := os.environ.get("XLA_FLAGS"):
        text = f'XLA_FLAGS="{flags}" {text}'
    text = re.sub(r" --json \S+", "", text)
    return re.sub(r"(--clones|--peer) \S+", r"\1 FOLDER", text)


def best_runs(runs):
    """Returns by case the pass with the smallest median, and what the passes say together."""
    best = {}
    for case, records in runs.items():
        good = [record for record in records if "error" not in record]
        if not good:
            continue
        medians = [record["ms"] for record in good]
        compiles = [r["compile_s"] for r in good if r["compile_s"] is not None]
        peaks = [r["peak_bytes"] for r in good if r["peak_bytes"] is not None]
        best[case] = min(good, key=lambda record: record["ms"]) | {
            # A process that autotunes may need memory that the step does not.
            "peak_bytes": min(peaks, default=None),
            "between": max(medians) / min(medians) - 1 if len(good) > 1 else None,
            "compile_s": max(compiles, default=None),
        }
    return best


def format_table(header, rows):
    """Returns a Markdown table; all columns but the first are aligned to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]

    def line(row):
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in rest)]
        return "| " + " | ".join(cells) + " |"

    return "\n".join([line(table[0]), line(rule), *map(line, table[1:])])


def print_row(*cells):
    """Prints a line of a table at once: a run that is cut off keeps what it has."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names):
    """Prints the head of a table whose lines follow one by one."""
    print()
    print_row(*names)
    print_row(*["---"] * len(names))


def print_end(fine, began, what=""):
    """Prints whether a check passed, and how long it took; returns the exit status."""
    seconds = f"{time.perf_counter() - began:.0f} s"
    print(f"\n{'passed' if fine else 'FAILED'}: {what} in {seconds}")
    return int(not fine)


def print_columns(rows, *columns):
    """Prints a table of records; each column is a name and a function of a record."""
    names, cells = zip(*columns, strict=True)
    print(format_table(names, [[cell(row) for cell in cells] for row in rows]))


def print_machine(record, what=""):
    """Prints what the numbers were measured on; returns whether that was a CPU."""
    machine = record["environment"]
    print(f"\n{what}{machine['device']}, jax {machine['jax']}, Python "
          f"{machine['python']}\n")  # fmt: skip
    return machine["backend"] == "cpu"


def print_verdict(wrong, passed, on_cpu=False):
    """Prints what failed or what passed; returns the exit status."""
    print("".join(f"CHECK FAILED {text}\n" for text in wrong) or f"\nPassed: {passed}")
    if on_cpu:
        print("On a CPU the times and ratios say nothing about a GPU.")
    return int(bool(wrong))


def number(value, digits=2, suffix=""):
    """Formats a measurement; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def ratio(value, base):
    """`value / base`, or None where one of the two was not measured."""
    return value / base if value is not None and base else None


def giga(value):
    return number(ratio(value, 1e9))


def percent(value, digits=1):
    return number(None if value is None else 100 * value, digits, " %")


def spread(record):
    return percent((record["ms_high"] - record["ms_low"]) / record["ms"])


# --- in the child -----------------------------------------------------------------------


class Turn:
    """The right to use the device, which one child at a time has."""

    def __init__(self):
        self.folder, self.file, self.guard = None, None, threading.Lock()

    def take(self):
        """Waits for the device; this process then has it until it ends."""
        with self.guard:
            if self.folder and not self.file:
                self.file = (pathlib.Path(self.folder) / "turn").open("w")
                fcntl.flock(self.file, fcntl.LOCK_EX)


TURN = Turn()


def start_child(cache=None):
    """Turns JAX's compilation cache on (never on a CPU, which does not autotune).

    Two modes that need the same matmul then run the same kernel, and a repetition
    measures the step rather than the autotuner's luck. Random numbers are the device's:
    to compile the start of a ViT took 39 s with JAX's own.
    """
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    if cache is None or jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def on_host(make, *args):
    """Runs a function on the CPU, and puts what it returns on the device.

    To compile the initialisation of a ViT for a GPU takes longer than its step does.
    """
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = make(*args)
    move = lambda x: jax.device_put(x, jax.devices()[0])  # noqa: E731
    return jax.tree.map(lambda x: move(x) if isinstance(x, jax.Array) else x, made)


def end_child(record):
    """Prints the record of a child, with what it was measured on; returns the exit status."""
    print(json.dumps(record | {"environment": environment()}))
    return 0


def environment():
    return {
        "device": jax.devices()[0].device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def own_small_buffers(tree):
    """Copies the scalars of a tree that will be donated.

    Two leaves made from one constant may share a buffer, which can be donated only once.
    Large leaves are not copied: that would raise the peak that is to be measured.
    """
    return jax.tree.map(lambda x: x.copy() if x.size == 1 else x, tree)


def compile_step(step, state, inputs):
    """Returns the program of a step, with the state donated, and what that cost.

    State and inputs may be shapes. From the compilation on, the device is this process's.
    A jitted function is dispatched no faster, and compiles once more: 15 s for a ViT.
    """
    hits = []

    def listen(event, **_):
        if event.endswith("/compilation_cache/cache_hits"):
            hits.append(event)

    start = time.perf_counter()
    traced = jax.jit(step, donate_argnums=0).trace(state, inputs)
    lowered = traced.lower()
    middle = time.perf_counter()
    TURN.take()
    turn = time.perf_counter()
    jax.monitoring.register_event_listener(listen)
    program = lowered.compile()
    end = time.perf_counter()
    jax.monitoring.unregister_event_listener(listen)
    record = {
        "begin_s": start - BEGAN,  # to import, and to make parameters and data
        "trace_s": middle - start,
        # A program that came out of the cache says nothing about compilation.
        "compile_s": None if hits else end - turn,
        "dots": dict(count_dots(traced.jaxpr)),
        "fused": str(traced.jaxpr).count("cudnn_attention["),
        "state_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
    }
    return program, record | planned_memory(program)


def planned_memory(program):
    """Returns the bytes that the compiler planned; a program from the cache may not know."""
    try:
        stats = program.memory_analysis()
    except (RuntimeError, NotImplementedError):
        stats = None
    if stats is None:
        return {}
    sizes = {name: getattr(stats, f"{name}_size_in_bytes")
             for name in ("argument", "output", "temp", "alias")}  # fmt: skip
    found = {f"{name}_bytes": size for name, size in sizes.items()}
    return found | {"compiled_bytes": sum(sizes.values()) - 2 * sizes["alias"]}


def count_dots(jaxpr):
    """Counts the matmuls of a jaxpr by operand dtype, nested jaxprs included."""
    dots = (x for x, _ in equations(jaxpr) if x.primitive.name == "dot_general")
    operands = ({str(variable.aval.dtype) for variable in x.invars} for x in dots)
    return collections.Counter("×".join(sorted(x)) for x in operands)


def equations(jaxpr, runs=1):
    """Yields the equations of a jaxpr and of those inside, and how often scans run them."""
    is_jaxpr = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")  # noqa: E731
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation, runs
        times = runs * equation.params.get("length", 1)
        inside = jax.tree.leaves([*equation.params.values()], is_leaf=is_jaxpr)
        for inner in filter(is_jaxpr, inside):
            yield from equations(inner, times)


def peak_bytes():
    """Returns the allocator's peak since the process started (None on a CPU)."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def memory(record):
    """Returns peak bytes: the allocator's, or the compiler's where there is no allocator."""
    return record["peak_bytes"] or record.get("compiled_bytes")


def time_steps(step, state, inputs, *, steps, group, keep=True):
    """Times `steps` steps in groups; the device is waited for after each group only.

    Within a group steps are sent ahead as in a training loop. `host_ms` is the time the
    host needs to send one. `keep` returns what each step returned beside the state.
    """
    groups, sending, outputs = [], [], []
    jax.block_until_ready(state)
    for first in range(0, steps, group):
        start = time.perf_counter()
        for index in range(first, first + group):
            state, output = step(state, inputs[index % len(inputs)])
            outputs = outputs if keep else []
            outputs.append(output)
        sent = time.perf_counter()
        jax.block_until_ready((state, outputs[-1]))
        groups.append((time.perf_counter() - start) / group * 1e3)
        sending.append((sent - start) / group * 1e3)
    return state, outputs, {
        "ms": statistics.median(groups),
        "ms_low": min(groups),
        "ms_high": max(groups),
        "host_ms": statistics.median(sending),
    }  # fmt: skip


def profile_steps(step, state, inputs, steps=5):
    """Returns the state, and by kernel how often it runs in a step and for how many ms."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, *_ = time_steps(step, state, inputs, steps=steps, group=steps)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    found = collections.defaultdict(lambda: [0.0, 0.0])
    for line in (line for plane in profile.planes for line in plane.lines):
        for event in line.events:
            # A GPU has a line with operations beside the line with their kernels.
            if "hlo_op" in dict(event.stats) and line.name != "XLA Ops":
                row = found[event.name]
                row[0] += 1 / steps
                row[1] += event.duration_ns / steps / 1e6
    rows = [[name, *row] for name, row in found.items()]
    return state, sorted(rows, key=lambda row: -row[-1])


def time_call(call, *args, runs=20, groups=5, warmup=3):
    """Returns the median time in ms of a call whose result is dropped."""
    step = lambda _, args: (None, call(*args))  # noqa: E731
    for steps, group in ((warmup, warmup), (runs * groups, runs)):
        found = time_steps(step, None, [args], steps=steps, group=group, keep=False)
    return found[2]["ms"]


@jax.jit
def relative_error(found, exact):
    """Returns the norm of the difference over the norm of the exact array."""
    exact = exact.astype(jnp.float32)
    return jnp.linalg.norm(found.astype(jnp.float32) - exact) / jnp.linalg.norm(exact)
