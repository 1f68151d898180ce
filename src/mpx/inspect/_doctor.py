"""`doctor`: what this machine offers for mixed precision, and what to use on it."""

import dataclasses
import functools
import importlib.metadata
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
from jax import Array, lax

from mpx._jax._devices import cuda_capability
from mpx._jax._version import __version__, version_tuple
from mpx.inspect._result import Result, Table, amount

EXTRAS = ("matplotlib", "tensorboardX", "wandb", "flax", "orbax-checkpoint")
CUDA_SINCE = {
    "f16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "mx": (10, 0),
}
CPU_FLAGS = {
    "bf16": ("amx_bf16", "avx512_bf16", "bf16"),
    "f16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
# JAX calls the seventh generation "TPU7x".
TPU_FP8 = re.compile(r"(?:v|tpu)([7-9]|\d\d)|ironwood", re.IGNORECASE)
_DTYPES = {
    "f32": jnp.float32,
    "tf32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "fp8": jnp.float8_e4m3fn,
}

Native = tuple[bool | None, str]
"""Whether matmuls run natively in a format, and why; `None` is unknown."""


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
        text = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        for x in self.devices:
            text += f"\n{x.count} × {x.kind} ({x.platform})"
            text += f" with {amount(x.memory, 'B')}" if x.memory else ""
        if self.bandwidth:
            text += f"\nMemory: {amount(self.bandwidth, 'B/s')} (measured)."
        rates = {x.name: x.rate for x in self.formats if x.rate}
        words = {True: "yes", False: "no", None: "?"}
        rows = []
        for x in self.formats:
            rate, share = "–", "–"
            if x.rate and "f32" in rates:
                rate, share = amount(x.rate, "FLOP/s"), f"{x.rate / rates['f32']:.2f}×"
            rows.append((x.name, words[x.native], rate, share, x.reason))
        head = ("format", "native", "matmul", "vs f32", "")
        extras = [f"{name} {x or '(missing)'}" for name, x in self.extras.items()]
        return [
            Table.text(text),
            Table(head, rows, "Formats", frozenset({2, 3})),
            Table.text(f"{self.policy}\n{self.reason}", "Recommended"),
            *(Table.text(problem, "Problem") for problem in self.problems),
            Table.text(f"Optional packages: {', '.join(extras)}."),
        ]


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
    policy, reason = recommend(native, rates)
    kinds = Counter((device.device_kind, device.platform) for device in jax.devices())
    # Only a device of this process tells.
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Diagnosis(
        versions=versions() | {"on": platform.machine()},
        devices=tuple(Device(*kind, count, memory) for kind, count in kinds.items()),
        formats=tuple(FormatSupport(k, *x, rates.get(k)) for k, x in native.items()),
        bandwidth=measure_bandwidth() if measure else None,
        extras={name: _version(name) for name in EXTRAS},
        policy=policy,
        reason=reason,
        problems=tuple(problems(jaxlib.__version__, platform.machine())),
    )


def recommend(
    native: Mapping[str, Native], rates: Mapping[str, float]
) -> tuple[str, str]:
    """Returns the precision to use, as code, and why."""

    def gain(name: str) -> str:
        if name not in rates or "f32" not in rates:
            return ""
        return f" Measured: {rates[name] / rates['f32']:.1f}× the rate of f32."

    if jax.default_backend() == "cpu":
        reason = (
            "On a CPU half precision saves memory, and time at most where it is native:"
        )
        reason += f" bf16 is {native['bf16'][1]}.{gain('bf16')}"
        return "loss = loss  # f32", f"{reason} Use bf16 to test for an accelerator."
    if native["bf16"][0]:
        reason = "bf16 runs natively and has the range of f32: no loss scaling."
        reason += gain("bf16")
        if native["fp8"][0]:
            reason += " Large matmuls can run in fp8 as well: compare `mpx.fp8(loss)`."
            reason += gain("fp8")
        return "loss = mpx.amp(loss)", reason
    if native["f16"][0]:
        code = 'loss = mpx.amp(loss, "f16"); scaling = mpx.DynamicLossScaling.pow2()'
        return code, "Only f16 runs natively, and it needs loss scaling." + gain("f16")
    return "loss = mpx.amp(loss)", "Measure bf16 first: mpx does not know this device."


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- Formats and rates ----------------------------------------------------------------


def formats() -> dict[str, Native]:
    """Returns by format whether matmuls run in it natively, and why."""
    names = ["f32", "tf32", "bf16", "f16", "fp8", "mx"]
    backend, capability = jax.default_backend(), cuda_capability()
    found: dict[str, Native] = {
        name: (None, f"mpx does not know {backend}") for name in names
    }
    if capability is not None:
        reason = f"compute capability {'.'.join(map(str, capability))}"
        found |= {name: (capability >= x, reason) for name, x in CUDA_SINCE.items()}
    elif backend == "cpu":
        found |= dict.fromkeys(names, (False, "not on a CPU"))
        flags = _cpu_flags()
        for name, wanted in CPU_FLAGS.items():
            here = next((x for x in wanted if x in flags), None)
            reason = here or "computed in f32 and rounded"
            found[name] = (here is not None if flags else None, reason)
    elif backend == "tpu":
        kind = jax.devices()[0].device_kind
        found |= dict.fromkeys(names, (False, "TPUs compute in bf16"))
        found |= {"bf16": (True, kind), "fp8": (bool(TPU_FP8.search(kind)), kind)}
    found["f32"] = (True, "in several passes of bf16" if backend == "tpu" else "")
    return found


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def measure_rates(native: Mapping[str, Native]) -> dict[str, float]:
    """Returns the rate of large matmuls by format, in FLOP/s; fp8 where it is native."""
    size, rates = 512 if jax.default_backend() == "cpu" else 8192, {}
    for name, dtype in _DTYPES.items():
        if name in ("tf32", "fp8") and not native[name][0]:
            continue
        try:
            seconds = _seconds(_matmul(name), jnp.ones((size, size), dtype))
        except Exception:  # this backend does not have the format
            continue
        rates[name] = 2 * size**3 / seconds
    return rates


def measure_bandwidth() -> float:
    """Returns the bytes per second that an addition reads and writes."""
    size = 2**22 if jax.default_backend() == "cpu" else 2**28
    x = jnp.zeros(size, jnp.float32)
    seconds = _seconds(jax.jit(lambda x: x + 1), x)
    return 2 * x.nbytes / seconds


def _matmul(name: str) -> Callable[[Array], Array]:
    precision = {
        "f32": lax.Precision.HIGHEST,
        "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
        "fp8": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
    }.get(name)
    wide = jnp.float32 if name == "fp8" else None
    return jax.jit(
        lambda x: lax.dot(x, x, precision=precision, preferred_element_type=wide)
    )


def _seconds(func: Callable[[Array], Array], x: Array) -> float:
    """Returns the time of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(func(x))
    times: list[float] = []
    while len(times) < 20 and sum(times) < 0.2:
        before = time.perf_counter()
        jax.block_until_ready(func(x))
        times.append(time.perf_counter() - before)
    return min(times)
