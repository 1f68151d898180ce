"""What this machine offers for mixed precision, and what to use on it."""

import argparse
import dataclasses
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib

from mpx._jax._devices import cuda_capability
from mpx._jax._version import __version__, version_tuple
from mpx.inspect._call_command import show
from mpx.inspect._machine import formats, measure_bandwidth, measure_rates
from mpx.inspect._result import Result, Table, amount

EXTRAS = {
    "rich": "inspect",
    "matplotlib": "inspect",
    "tensorboardX": "",
    "wandb": "",
    "flax": "flax",
    "orbax-checkpoint": "checkpoint",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """Devices of one kind.

    Attributes:
        kind: What they are, such as "NVIDIA H200".
        platform: The platform: "cpu", "gpu", "tpu".
        count: How many there are, on all hosts.
        memory: The bytes of memory of each; `None` if JAX does not tell.
    """

    kind: str
    platform: str
    count: int
    memory: int | None


@dataclasses.dataclass(frozen=True)
class FormatSupport:
    """How a number format runs here.

    Attributes:
        name: The format.
        native: Whether matmuls run in it natively; `None` if that is not known.
        reason: Why.
        rate: The measured rate of a large matmul in FLOP/s; `None` if not measured.
    """

    name: str
    native: bool | None
    reason: str
    rate: float | None


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """What a machine offers; made by `doctor`.

    Attributes:
        versions: The versions of mpx, jax, jaxlib, Python, and the processor.
        devices: The devices of the default backend, by kind.
        formats: How each number format runs.
        bandwidth: The measured memory bandwidth in bytes per second, or `None`.
        extras: The versions of optional packages; `None` for one that is not installed.
        policy: The recommended precision, as code.
        reason: Why.
        problems: What is wrong with this installation.
    """

    versions: dict[str, str]
    devices: tuple[Device, ...]
    formats: tuple[FormatSupport, ...]
    bandwidth: float | None
    extras: dict[str, str | None]
    policy: str
    reason: str
    problems: tuple[str, ...]

    def tables(self) -> Sequence[Table]:
        """Returns versions, devices, formats, the recommendation and problems."""
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        devices = "; ".join(
            f"{x.count} × {x.kind} ({x.platform})"
            + (f" with {amount(x.memory, 'B')}" if x.memory else "")
            for x in self.devices
        )
        text = f"{versions}.\nDevices: {devices}."
        if self.bandwidth:
            text += f"\nMemory: {amount(self.bandwidth, 'B/s')} (measured)."
        base = next((x.rate for x in self.formats if x.name == "f32" and x.rate), None)
        words = {True: "yes", False: "no", None: "?"}
        rows = [
            [
                x.name,
                words[x.native],
                "–" if x.rate is None else amount(x.rate, "FLOP/s"),
                "–" if x.rate is None or base is None else f"{x.rate / base:.2f}×",
                x.reason,
            ]
            for x in self.formats
        ]
        head = ("format", "native", "matmul", "vs f32", "")
        have = [f"{name} {version}" for name, version in self.extras.items() if version]
        lack = [
            f"{name} (mpx-jax[{EXTRAS[name]}])" if EXTRAS.get(name) else name
            for name, version in self.extras.items()
            if not version
        ]
        extras = f"Optional packages: {', '.join(have) or 'none'}."
        if lack:
            extras += f" Not installed: {', '.join(lack)}."
        tables = [Table.text(text), Table(head, rows, "Formats", frozenset({2, 3}))]
        tables += [Table.text(f"{self.policy}\n{self.reason}", "Recommended")]
        tables += [Table.text(problem, "Problem") for problem in self.problems]
        return [*tables, Table.text(extras)]


def doctor(*, measure: bool = True) -> Diagnosis:
    """Returns what this machine offers for mixed precision, and what to use on it.

    Args:
        measure: Whether to time matmuls and memory, which takes some seconds.

    Examples:
        >>> found = doctor(measure=False)
        >>> [x.name for x in found.formats]
        ['f32', 'tf32', 'bf16', 'f16', 'fp8', 'mx']
    """
    native = formats()
    rates = measure_rates(native) if measure else {}
    supports = tuple(
        FormatSupport(name, here, reason, rates.get(name))
        for name, (here, reason) in native.items()
    )
    policy, reason = recommend(native, rates)
    machine = platform.machine()
    return Diagnosis(
        versions={
            "mpx": __version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "Python": platform.python_version(),
            "on": machine,
        },
        devices=_devices(),
        formats=supports,
        bandwidth=measure_bandwidth() if measure else None,
        extras={name: _version(name) for name in EXTRAS},
        policy=policy,
        reason=reason,
        problems=tuple(problems(jaxlib.__version__, machine)),
    )


def recommend(
    native: Mapping[str, tuple[bool | None, str]], rates: Mapping[str, float]
) -> tuple[str, str]:
    """Returns the precision to use, as code, and why."""

    def gain(name: str) -> str:
        if name not in rates or "f32" not in rates:
            return ""
        return f" Measured: {rates[name] / rates['f32']:.1f}× the rate of f32."

    is_cpu = jax.default_backend() == "cpu"
    if native["bf16"][0] and not is_cpu:
        code = "loss = mpx.amp(loss)"
        reason = "bf16 runs natively and has the range of f32: no loss scaling."
        reason += gain("bf16")
        if native["fp8"][0]:
            reason += (
                " Large matmuls can run in fp8 as well: compare `mpx.fp8(loss)`."
                + gain("fp8")
            )
        return code, reason
    if native["f16"][0] and not is_cpu:
        code = 'loss = mpx.amp(loss, "f16"); scaling = mpx.DynamicLossScaling.pow2()'
        return code, "Only f16 runs natively, and it needs loss scaling." + gain("f16")
    if is_cpu:
        reason = "On a CPU half precision saves memory" + (
            f" and may save time ({native['bf16'][1]})."
            if native["bf16"][0]
            else ", not time: bf16 is computed in f32 and rounded."
        )
        reason += gain("bf16") + " Use bf16 to test what will run on an accelerator."
        return "loss = loss  # f32", reason
    return "loss = mpx.amp(loss)", "Measure bf16 first: mpx does not know this device."


def problems(jaxlib_version: str, machine: str) -> list[str]:
    """Returns what is wrong with an installation."""
    found = []
    if version_tuple(jaxlib_version) == (0, 10, 2):
        wrong = machine in ("aarch64", "arm64")
        found.append(
            "jaxlib 0.10.2 computes wrong numbers on aarch64 CPUs"
            + (", and this is one. " if wrong else ". ")
            + 'Run `pip install "jax!=0.10.2"`.'
        )
    capability = cuda_capability()
    if capability is not None and capability < (7, 0):
        version = ".".join(map(str, capability))
        found.append(
            f"GPUs of compute capability {version} have no fast half precision."
        )
    return found


def _devices() -> tuple[Device, ...]:
    devices = jax.devices()
    kinds = Counter((device.device_kind, device.platform) for device in devices)
    # Only a device of this process tells.
    stats: Any = jax.local_devices()[0].memory_stats() or {}
    memory = stats.get("bytes_limit")
    return tuple(Device(*kind, count, memory) for kind, count in kinds.items())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- python -m mpx doctor -------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--no-measure", action="store_true", help="do not time matmuls and memory"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the diagnosis; the exit status is 1 if there is a problem."""
    found = doctor(measure=not arguments.no_measure)
    show(found, as_json=arguments.json)
    return int(bool(found.problems))
