"""What a device can do: which formats it computes in, and how fast it is."""

import functools
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpx._jax._devices import cuda_capability

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
LEAST_SECONDS = 0.02
"""A measurement shorter than this is repeated with larger matrices."""


def formats() -> dict[str, tuple[bool | None, str]]:
    """Returns by format whether matmuls run in it natively, and why; `None` is unknown."""
    names = ["f32", "tf32", "bf16", "f16", "fp8", "mx"]
    platform = jax.default_backend()
    capability = cuda_capability()
    found: dict[str, tuple[bool | None, str]]
    if capability is not None:
        version = ".".join(map(str, capability))
        found = {
            name: (capability >= since, f"compute capability {version}")
            for name, since in CUDA_SINCE.items()
        }
    elif platform == "cpu":
        found = _cpu_formats()
    elif platform == "tpu":
        kind = jax.devices()[0].device_kind
        found = {x: (False, "TPUs compute in bf16") for x in ("tf32", "f16", "mx")}
        found |= {"bf16": (True, kind), "fp8": (bool(TPU_FP8.search(kind)), kind)}
    else:
        found = {name: (None, f"mpx does not know {platform}") for name in names}
    found["f32"] = (True, "in several passes of bf16" if platform == "tpu" else "")
    return {name: found[name] for name in names}


def _cpu_formats() -> dict[str, tuple[bool | None, str]]:
    flags = _cpu_flags()
    found: dict[str, tuple[bool | None, str]] = {}
    for name, wanted in CPU_FLAGS.items():
        here = [flag for flag in wanted if flag in flags]
        reason = here[0] if here else "computed in f32 and rounded"
        found[name] = (bool(here) if flags else None, reason)
    return found | dict.fromkeys(("tf32", "fp8", "mx"), (False, "not on a CPU"))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def measure_rates(
    native: Mapping[str, tuple[bool | None, str]], budget: float = 10.0
) -> dict[str, float]:
    """Returns the rate of large matmuls by format, in FLOP/s.

    Args:
        native: What `formats` returned: fp8 is measured where it is native only.
        budget: No further measurement starts after so many seconds.
    """
    rates, start = {}, time.perf_counter()
    for name in ("f32", "tf32", "bf16", "f16", "fp8"):
        skip = name in ("tf32", "fp8") and not native[name][0]
        if skip or time.perf_counter() - start > budget:
            continue
        rate = _matmul_rate(name)
        if rate is not None:
            rates[name] = rate
    return rates


def measure_bandwidth() -> float:
    """Returns the bytes per second that an addition reads and writes."""
    size = 2**22 if jax.default_backend() == "cpu" else 2**28
    x = jnp.zeros(size, jnp.float32)
    seconds = _seconds(jax.jit(lambda x: x + 1), x)
    return 2 * x.nbytes / seconds


def _matmul_rate(name: str) -> float | None:
    sizes = (256, 512, 1024) if jax.default_backend() == "cpu" else (1024, 8192)
    rate = None
    for size in sizes:
        try:
            seconds = _seconds(_matmul(name), *_operands(name, size))
        except Exception:  # this backend does not have the format
            return rate
        rate = 2 * size**3 / seconds
        if seconds > LEAST_SECONDS:
            break
    return rate


def _operands(name: str, size: int) -> tuple[Any, Any]:
    dtypes = {"bf16": jnp.bfloat16, "f16": jnp.float16, "fp8": jnp.float8_e4m3fn}
    x = jnp.ones((size, size), dtypes.get(name, jnp.float32))
    return x, x


def _matmul(name: str) -> Callable[..., Any]:
    presets = lax.DotAlgorithmPreset
    precisions: dict[str, Any] = {
        "f32": lax.Precision.HIGHEST,
        "tf32": presets.TF32_TF32_F32,
        "fp8": presets.ANY_F8_ANY_F8_F32,
    }
    wide = jnp.float32 if name == "fp8" else None
    return jax.jit(
        lambda x, y: lax.dot(
            x, y, precision=precisions.get(name), preferred_element_type=wide
        )
    )


def _seconds(func: Callable[..., Any], *args: Any) -> float:
    """Returns the time of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(func(*args))
    best, start = math.inf, time.perf_counter()
    for _ in range(20):
        before = time.perf_counter()
        jax.block_until_ready(func(*args))
        after = time.perf_counter()
        best = min(best, after - before)
        if after - start > 10 * LEAST_SECONDS:
            break
    return best
