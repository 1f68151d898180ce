"""`doctor`: what this machine offers for mixed precision, and what to use on it."""

import dataclasses
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jaxlib

from mpx._jax._devices import cuda_capability
from mpx._jax._version import __version__
from mpx.inspect._result import Result, Table, amount

# The compute capability since which matmuls run in a format.
CUDA_SINCE = dict(f16=(7, 0), bf16=(8, 0), tf32=(8, 0), fp8=(8, 9), mx=(10, 0))
# JAX calls the seventh generation "TPU7x".
TPU_FP8 = re.compile(r"(?:v|tpu)([7-9]|\d\d)|ironwood", re.IGNORECASE)


class Check(NamedTuple):
    """One check; `passed` is `None` if it was not run, and `figures` says why."""

    name: str
    passed: bool | None
    figures: str


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """What a machine or a cluster offers; made by `doctor`.

    Attributes:
        versions: The versions of mpx, jax, jaxlib, Python, and the processor.
        processes: The number of processes of the job.
        platform: The default backend: "cpu", "gpu", "tpu".
        devices: How many devices of each kind there are, on all hosts.
        memory: The bytes of memory of a device; `None` if JAX does not tell.
        formats: The formats in which matmuls run natively; `None` if that is not known.
        policy: The recommended precision, as code.
        reason: Why.
        checks: Whether processes agree, by `python -m mpx doctor --cluster`.
    """

    versions: Mapping[str, str]
    processes: int
    platform: str
    devices: Mapping[str, int]
    memory: int | None
    formats: tuple[str, ...] | None
    policy: str
    reason: str
    checks: tuple[Check, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(x.passed is not False for x in self.checks)

    def tables(self) -> Sequence[Table]:
        """Returns versions, devices, the recommendation and checks."""
        text = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        for kind, count in self.devices.items():
            text += f"\n{count} × {kind} ({self.platform})"
            text += f" with {amount(self.memory, 'B')}" if self.memory else ""
        if self.formats is not None:
            text += f"\nNative matmuls: {', '.join(self.formats)}."
        found = [Table.text(text)]
        found.append(Table.text(f"{self.policy}\n{self.reason}", "Recommended"))
        if self.checks:
            words = {True: "pass", False: "FAIL", None: "–"}
            rows = [(x.name, words[x.passed], x.figures) for x in self.checks]
            title = f"Processes: {self.processes}"
            found.append(Table(("check", "result", ""), rows, title))
            text = "No check failed." if self.passed else "A check FAILED."
            found.append(Table.text(text))
        return found


def doctor() -> Diagnosis:
    """Returns what this machine offers for mixed precision, and what to use on it.

    Examples:
        >>> doctor().versions["jax"] == jax.__version__
        True
    """
    policy, reason = recommend(found := formats())
    return Diagnosis(
        versions=versions() | {"on": platform.machine()},
        processes=jax.process_count(),
        platform=jax.default_backend(),
        devices=dict(Counter(device.device_kind for device in jax.devices())),
        # Only a device of this process tells.
        memory=(jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        formats=found,
        policy=policy,
        reason=reason,
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


def versions() -> dict[str, str]:
    """Returns the versions of mpx, JAX and Python."""
    found = {"mpx": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return found | {"Python": platform.python_version()}
