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
from jax import Array, lax

from mpx._jax._devices import cuda_capability
from mpx._jax._version import __version__, version_tuple
from mpx.inspect._result import Result, Table, amount

CUDA_SINCE = {
    "f16": (7, 0),
    "bf16": (8, 0),
    "tf32": (8, 0),
    "fp8": (8, 9),
    "mx": (10, 0),
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
_PRECISIONS = {
    "f32": lax.Precision.HIGHEST,
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "fp8": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
}


class FormatSupport(NamedTuple):
    """How a number format runs here.

    Attributes:
        native: Whether matmuls run in it natively; `None` if that is not known.
        reason: Why.
        rate: The measured rate of a large matmul in FLOP/s; `None` if not measured.
    """

    native: bool | None
    reason: str
    rate: float | None = None


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """What a machine offers; made by `doctor`.

    Attributes:
        versions: The versions of mpx, jax, jaxlib, Python, and the processor.
        platform: The default backend: "cpu", "gpu", "tpu".
        devices: How many devices of each kind there are, on all hosts.
        memory: The bytes of memory of a device; `None` if JAX does not tell.
        formats: By number format whether it is native, why, and its measured rate.
        bandwidth: The measured memory bandwidth in bytes per second, or `None`.
        policy: The recommended precision, as code.
        reason: Why.
        problems: What is wrong with this installation.
    """

    versions: Mapping[str, str]
    platform: str
    devices: Mapping[str, int]
    memory: int | None
    formats: Mapping[str, FormatSupport]
    bandwidth: float | None
    policy: str
    reason: str
    problems: tuple[str, ...]

    def tables(self) -> Sequence[Table]:
        """Returns versions, devices, formats, the recommendation and problems."""
        text = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        for kind, count in self.devices.items():
            text += f"\n{count} × {kind} ({self.platform})"
            text += f" with {amount(self.memory, 'B')}" if self.memory else ""
        if self.bandwidth:
            text += f"\nMemory: {amount(self.bandwidth, 'B/s')} (measured)."
        words = {True: "yes", False: "no", None: "?"}
        rows = []
        for name, (native, reason, rate) in self.formats.items():
            rated, share = "–", self.formats["f32"].rate
            if rate and share:
                rated = f"{amount(rate, 'FLOP/s')} ({rate / share:.2f}× f32)"
            rows.append((name, words[native], rated, reason))
        return [
            Table.text(text),
            Table(("format", "native", "matmul", ""), rows, "Formats", frozenset({2})),
            Table.text(f"{self.policy}\n{self.reason}", "Recommended"),
            *(Table.text(problem, "Problem") for problem in self.problems),
        ]


def doctor(*, measure: bool = True) -> Diagnosis:
    """Returns what this machine offers for mixed precision, and what to use on it.

    Args:
        measure: Whether to time matmuls and memory, which takes some seconds.

    Examples:
        >>> list(doctor(measure=False).formats)
        ['f32', 'tf32', 'bf16', 'f16', 'fp8', 'mx']
    """
    found, bandwidth = formats(), None
    if measure:
        found = {k: x._replace(rate=_rate(k, x)) for k, x in found.items()}
        x = jnp.zeros(2**22 if jax.default_backend() == "cpu" else 2**28)
        bandwidth = 2 * x.nbytes / _seconds(jax.jit(lambda x: x + 1), x)
    policy, reason = recommend(found)
    # Only a device of this process tells.
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return Diagnosis(
        versions=versions() | {"on": platform.machine()},
        platform=jax.default_backend(),
        devices=dict(Counter(device.device_kind for device in jax.devices())),
        memory=memory,
        formats=found,
        bandwidth=bandwidth,
        policy=policy,
        reason=reason,
        problems=tuple(problems(jaxlib.__version__, platform.machine())),
    )


def recommend(found: Mapping[str, FormatSupport]) -> tuple[str, str]:
    """Returns the precision to use, as code, and why."""

    def gain(name: str) -> str:
        rate, usual = found[name].rate, found["f32"].rate
        if not rate or not usual:
            return ""
        return f" Measured: {rate / usual:.1f}× the rate of f32."

    if jax.default_backend() == "cpu":
        reason = "On a CPU half precision saves memory, and rarely time."
        reason += f"{gain('bf16')} Use bf16 to test for an accelerator."
        return "loss = loss  # f32", reason
    if found["bf16"].native:
        reason = "bf16 runs natively and has the range of f32: no loss scaling."
        reason += gain("bf16")
        if found["fp8"].native:
            reason += " Large matmuls can run in fp8 as well: compare `mpx.fp8(loss)`."
            reason += gain("fp8")
        return "loss = mpx.amp(loss)", reason
    if found["f16"].native:
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


def formats() -> dict[str, FormatSupport]:
    """Returns by format whether matmuls run in it natively, and why."""
    backend, capability = jax.default_backend(), cuda_capability()
    names = ["f32", "tf32", "bf16", "f16", "fp8", "mx"]
    default = FormatSupport(None, f"mpx does not know {backend}")
    if backend == "tpu":
        default = FormatSupport(False, "TPUs compute in bf16")
    elif backend == "cpu":
        default = FormatSupport(False, "computed in f32 and rounded")
    found = dict.fromkeys(names, default)
    if capability is not None:
        reason = f"compute capability {'.'.join(map(str, capability))}"
        for name, since in CUDA_SINCE.items():
            found[name] = FormatSupport(capability >= since, reason)
    elif backend == "tpu":
        kind = jax.devices()[0].device_kind
        found["bf16"] = FormatSupport(True, kind)
        found["fp8"] = FormatSupport(bool(TPU_FP8.search(kind)), kind)
    several = "in several passes of bf16" if backend == "tpu" else ""
    return found | {"f32": FormatSupport(True, several)}


def _rate(name: str, support: FormatSupport) -> float | None:
    """Returns the rate of large matmuls in FLOP/s; tf32 and fp8 only where native."""
    if name not in _DTYPES or (name in ("tf32", "fp8") and not support.native):
        return None
    size = 512 if jax.default_backend() == "cpu" else 8192
    options = {"preferred_element_type": jnp.float32} if name == "fp8" else {}
    matmul = jax.jit(
        lambda x: lax.dot(x, x, precision=_PRECISIONS.get(name), **options)
    )
    try:
        seconds = _seconds(matmul, jnp.ones((size, size), _DTYPES[name]))
    except Exception:  # this backend does not have the format
        return None
    return 2 * size**3 / seconds


def _seconds(func: Callable[[Array], Array], x: Array) -> float:
    """Returns the time of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(func(x))
    times: list[float] = []
    while len(times) < 20 and sum(times) < 0.2:
        before = time.perf_counter()
        jax.block_until_ready(func(x))
        times.append(time.perf_counter() - before)
    return min(times)
