"""`doctor`: what this machine offers for mixed precision, and what to use on it."""

import dataclasses
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array

from mpx._jax._compat import __version__, version_tuple
from mpx._jax._devices import cuda_capability
from mpx.inspect._result import Result, Table, amount

# The compute capability since which matmuls run in a format.
CUDA_SINCE = {
    "f16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "mx": (10, 0),
}
# JAX calls the seventh generation "TPU7x".
TPU_FP8 = re.compile(r"(?:v|tpu)([7-9]|\d\d)|ironwood", re.IGNORECASE)


class Check(NamedTuple):
    """One check; `passed` is `None` if it was not run, and `figures` says why."""

    name: str
    passed: bool | None
    figures: str


class Rate(NamedTuple):
    """The measured speed of a collective."""

    kind: str
    bytes: int  # of the whole array
    seconds: float  # of the fastest call, on the slowest process
    bus: float  # bytes per second that each device sends, by the usual ring algorithms


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """What a machine or a cluster offers; made by `doctor`.

    Attributes:
        versions: The versions of mpx, jax, jaxlib, Python, and the processor.
        processes: The number of processes of the job.
        platform: The default backend: "cpu", "gpu", "tpu".
        devices: How many devices of each kind there are, on all hosts.
        memory: The bytes of memory of a device; `None` if JAX does not tell.
        bandwidth: The measured memory bandwidth in bytes per second, or `None`.
        formats: The formats in which matmuls run natively; `None` if that is not known.
        policy: The recommended precision, as code.
        reason: Why.
        problems: What is wrong with this installation.
        checks: Whether processes agree, by `python -m mpx doctor --cluster`.
        rates: The measured speed of collectives, by the same.
    """

    versions: Mapping[str, str]
    processes: int
    platform: str
    devices: Mapping[str, int]
    memory: int | None
    bandwidth: float | None
    formats: tuple[str, ...] | None
    policy: str
    reason: str
    problems: tuple[str, ...]
    checks: tuple[Check, ...] = ()
    rates: tuple[Rate, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether there is no problem and no check failed."""
        return not self.problems and all(x.passed is not False for x in self.checks)

    def tables(self) -> Sequence[Table]:
        """Returns versions, devices, the recommendation, problems and checks."""
        text = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        for kind, count in self.devices.items():
            text += f"\n{count} × {kind} ({self.platform})"
            text += f" with {amount(self.memory, 'B')}" if self.memory else ""
        if self.bandwidth:
            text += f"\nMemory: {amount(self.bandwidth, 'B/s')} (measured)."
        if self.formats is not None:
            text += f"\nNative matmuls: {', '.join(self.formats)}."
        found = [Table.text(text)]
        found.append(Table.text(f"{self.policy}\n{self.reason}", "Recommended"))
        found += [Table.text(problem, "Problem") for problem in self.problems]
        words = {True: "pass", False: "FAIL", None: "–"}
        if self.checks:
            rows = [(x.name, words[x.passed], x.figures) for x in self.checks]
            title = f"Processes: {self.processes}"
            found.append(Table(("check", "result", ""), rows, title))
        if self.rates:
            rows = [
                (kind, amount(size, "B"), f"{1e6 * seconds:.0f} µs", amount(bus, "B/s"))
                for kind, size, seconds, bus in self.rates
            ]
            head, right = ("collective", "array", "time", "bus"), frozenset({1, 2, 3})
            found.append(Table(head, rows, "f32 collectives", right))
        if self.checks:
            is_bad = any(x.passed is False for x in self.checks)
            found.append(
                Table.text("A check FAILED." if is_bad else "No check failed.")
            )
        return found


def doctor(*, measure: bool = True) -> Diagnosis:
    """Returns what this machine offers for mixed precision, and what to use on it.

    Args:
        measure: Whether to time the memory, which takes a second.

    Examples:
        >>> doctor(measure=False).versions["jax"] == jax.__version__
        True
    """
    policy, reason = recommend(found := formats())
    # Only a device of this process tells.
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Diagnosis(
        versions=versions() | {"on": platform.machine()},
        processes=jax.process_count(),
        platform=jax.default_backend(),
        devices=dict(Counter(device.device_kind for device in jax.devices())),
        memory=memory,
        bandwidth=_bandwidth() if measure else None,
        formats=found,
        policy=policy,
        reason=reason,
        problems=tuple(problems(jaxlib.__version__, platform.machine())),
    )


def formats() -> tuple[str, ...] | None:
    """Returns the formats in which matmuls run natively; `None` if that is not known."""
    backend, capability = jax.default_backend(), cuda_capability()
    if capability is not None:
        return ("f32", *(x for x, since in CUDA_SINCE.items() if capability >= since))
    if backend == "tpu":
        has_fp8 = TPU_FP8.search(jax.devices()[0].device_kind)
        return ("bf16", "fp8") if has_fp8 else ("bf16",)
    return ("f32",) if backend == "cpu" else None


def recommend(native: Sequence[str] | None) -> tuple[str, str]:
    """Returns the precision to use, as code, and why."""
    if native is None:
        reason = "Measure bf16 first: mpx does not know this device."
        return "loss = mpx.amp(loss)", reason
    if "bf16" in native:
        reason = "bf16 runs natively and has the range of f32: no loss scaling."
        if "fp8" in native:
            reason += " Large matmuls can run in fp8 as well: compare `mpx.fp8(loss)`."
        return "loss = mpx.amp(loss)", reason
    if "f16" in native:
        code = 'loss = mpx.amp(loss, "f16"); scaling = mpx.DynamicLossScaling.pow2()'
        return code, "Only f16 runs natively, and it needs loss scaling."
    reason = "Only f32 is native: half precision saves memory, and rarely time."
    return "loss = loss  # f32", f"{reason} Use bf16 to test for an accelerator."


def problems(jaxlib_version: str, machine: str) -> list[str]:
    """Returns what is wrong with an installation."""
    if version_tuple(jaxlib_version) != (0, 10, 2):
        return []
    here = ", and this is one" if machine in ("aarch64", "arm64") else ""
    return [
        f"jaxlib 0.10.2 computes wrong numbers on aarch64 CPUs{here}. "
        'Run `pip install "jax!=0.10.2"`.'
    ]


def versions() -> dict[str, str]:
    """Returns the versions of mpx, JAX and Python."""
    return {
        "mpx": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": platform.python_version(),
    }


def fastest(call: Callable[[Array], Array], x: Array) -> float:
    """Returns the seconds of the fastest of ten calls, after one that compiles."""
    times = list[float]()
    for _ in range(11):  # the same on every process: a collective waits for all of them
        before = time.perf_counter()
        jax.block_until_ready(call(x))
        times.append(time.perf_counter() - before)
    return min(times[1:])


def _bandwidth() -> float:
    """Returns the bytes per second that an addition reads and writes."""
    x = jnp.zeros(2**22 if jax.default_backend() == "cpu" else 2**28)
    return 2 * x.nbytes / fastest(jax.jit(lambda x: x + 1), x)
