"""How the benchmarks measure: one process per mode, groups of steps, medians.

A benchmark script is two programs. The parent never starts a JAX backend: it runs
itself once per mode with `--child MODE`, so that each mode has the device, the
allocator's peak and the compiler to itself. A child prints one JSON record as its last
line.
"""

import collections
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

import jax

Record = dict[str, Any]
Step = Callable[[Any, Any], tuple[Any, Any]]


# --- in the parent -----------------------------------------------------------------


def run_child(script: str, arguments: Sequence[str], *, timeout: float) -> Record:
    """Runs `script` with `arguments` and returns the record it printed last.

    A child that fails gives a record with `error`, the end of what it wrote, so that
    one broken mode does not cost the others.
    """
    start = time.perf_counter()
    command = [sys.executable, script, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = (done.stdout + done.stderr).strip().splitlines()[-15:]
        return {"error": "\n".join(tail) or f"exit status {done.returncode}"}
    return json.loads(lines[-1]) | {"wall_s": time.perf_counter() - start}


class Log:
    """JSON lines, written as they come: a run that is cut off keeps what it has."""

    def __init__(self, path: str | None):
        self._file: TextIO | None = None if path is None else open(path, "a")  # noqa: SIM115

    def write(self, record: Record) -> None:
        """Appends one record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    table = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]

    def line(row: Sequence[str]) -> str:
        first, *rest = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(w) for cell, w in rest)]
        return "| " + " | ".join(cells) + " |"

    return "\n".join([line(table[0]), line(rule), *map(line, table[1:])])


def number(value: float | None, digits: int = 2, suffix: str = "") -> str:
    """Formats a measurement; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{suffix}"


def ratio(value: float | None, base: float | None) -> float | None:
    """`value / base`, or None where one of the two was not measured."""
    return value / base if value is not None and base else None


# --- in the child ------------------------------------------------------------------


def start_child(cache: str | None) -> None:
    """Turns JAX's compilation cache on (never on a CPU, which does not autotune).

    What is shared through it are the autotuner's choices: two modes that need the same
    matmul then run the same kernel, and a repetition measures the step rather than the
    autotuner's luck.
    """
    if cache is None or jax.default_backend() == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def environment() -> Record:
    """What the numbers were measured on."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def own_small_buffers(tree: Any) -> Any:
    """Copies the scalars of a tree that will be donated.

    Two leaves made from one constant may share a buffer, which can be donated only
    once. Large leaves are not copied: that would raise the peak that is to be measured.
    """
    return jax.tree.map(lambda x: x.copy() if x.size == 1 else x, tree)


def compile_step(step: Step, state: Any, inputs: Any) -> tuple[Step, Record]:
    """Compiles `step(state, inputs)` with the state donated; says what that cost.

    What is returned for the timing is the jitted function, which is dispatched faster
    than the compiled object; off the CPU it takes the program out of the cache.
    """
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event.endswith("/compilation_cache/cache_hits"):
            hits.append(event)

    start = time.perf_counter()
    jitted = jax.jit(step, donate_argnums=0)
    traced = jitted.trace(state, inputs)
    lowered = traced.lower()
    middle = time.perf_counter()
    jax.monitoring.register_event_listener(listen)
    compiled = lowered.compile()
    end = time.perf_counter()
    jax.monitoring.unregister_event_listener(listen)
    record: Record = {
        "trace_s": middle - start,
        # A program that came out of the cache says nothing about compilation.
        "compile_s": None if hits else end - middle,
        "dots": dict(count_dots(traced.jaxpr)),
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    }
    return jitted, record | _compiled_memory(compiled)


def _compiled_memory(compiled: Any) -> Record:
    try:
        stats = compiled.memory_analysis()
    except (RuntimeError, NotImplementedError):  # a program from the cache may not know
        stats = None
    if stats is None:
        return {}
    return {
        "compiled_bytes": stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        + stats.temp_size_in_bytes
        - stats.alias_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
    }


def count_dots(jaxpr: Any) -> collections.Counter[str]:
    """Counts the matmuls of a jaxpr by operand dtype, nested jaxprs included."""
    counts: collections.Counter[str] = collections.Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "dot_general":
            operands = {str(variable.aval.dtype) for variable in equation.invars}
            counts["×".join(sorted(operands))] += 1
        for inner in _nested(equation.params.values()):
            counts += count_dots(inner)
    return counts


def _nested(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _nested(value)
        elif hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value


def peak_bytes() -> int | None:
    """The allocator's peak since the process started (None on a CPU)."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def time_steps(
    step: Step, state: Any, inputs: Sequence[Any], *, steps: int, group: int
) -> tuple[Any, list[Any], Record]:
    """Times `steps` steps in groups; the device is waited for after each group only.

    Within a group steps are sent ahead as in a training loop. `host_ms` is the time the
    host needs to send one: where it comes near `ms`, the host is what was measured.

    Returns:
        The last state, what each step returned beside it, and the timings.
    """
    groups, sending, outputs = [], [], []
    jax.block_until_ready(state)
    for first in range(0, steps, group):
        start = time.perf_counter()
        for index in range(first, first + group):
            state, output = step(state, inputs[index % len(inputs)])
            outputs.append(output)
        sent = time.perf_counter()
        jax.block_until_ready((state, outputs[-1]))
        groups.append((time.perf_counter() - start) / group * 1e3)
        sending.append((sent - start) / group * 1e3)
    record = {
        "ms": statistics.median(groups),
        "ms_low": min(groups),
        "ms_high": max(groups),
        "host_ms": statistics.median(sending),
        "groups": len(groups),
    }
    return state, outputs, record
