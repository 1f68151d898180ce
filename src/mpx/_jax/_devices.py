"""The compute capability of the GPU that programs run on, and the rates of an H200."""

import jax

from mpx._jax._compat import assumed_gpu
from mpx._jax._private import private

H200 = {"f32": 337e12, "bf16": 667e12, "f16": 667e12, "fp8": 1220e12, "memory": 4.02e12}
"""Operations per second of large matmuls and bytes per second of large element-wise kernels.

Measured on an H200 by `benchmarks/fp8.py --sections rates`; f32 is TF32. Decisions depend on
their ratios, which are similar on all GPUs that have the units.
"""

_CAPABILITIES = {
    **dict.fromkeys(("A100", "A100-SXM4-80GB"), (8, 0)),
    **dict.fromkeys(("L4", "L40", "L40S"), (8, 9)),
    **dict.fromkeys(("H100", "H200", "GH200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)),
}


def _local_gpu() -> tuple[int, int] | str | None:
    """Returns the capability of the first local GPU, or the name of another maker's."""
    if jax.default_backend() not in ("gpu", "cuda", "rocm"):
        return None
    found = str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))
    major, _, minor = found.partition(".")
    if not (major.isdigit() and minor[:1].isdigit()):
        return found
    return int(major), int(minor[:1])


def cuda_capability() -> tuple[int, int] | None:
    """Returns the compute capability of the default device, if it is a CUDA GPU."""
    if assumed_gpu.value is not None:
        return assumed_gpu.value
    chosen = getattr(jax.config, "jax_default_device", None)
    if getattr(chosen, "platform", chosen) not in (None, "gpu", "cuda"):
        return None
    found = _local_gpu()
    return found if isinstance(found, tuple) else None


def gpu_capability() -> tuple[int, int] | str | None:
    """Returns the compute capability of the GPU here, or of that which the mesh describes.

    It is `(9, 0)` for an H200, and the name of the architecture on GPUs of other makers.
    """
    if assumed_gpu.value is not None:
        return assumed_gpu.value
    if (found := _local_gpu()) is not None:
        return found
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = "" if device is None else device.device_kind
    return next((_CAPABILITIES[x] for x in kind.split() if x in _CAPABILITIES), None)


def in_order(x: jax.Array) -> jax.Array:
    """Returns an array that a GPU stores in row-major order."""
    layouts = private("layouts")
    if layouts is None or not isinstance(gpu_capability(), tuple):
        return x
    return layouts.with_layout_constraint(x, layouts.Layout(tuple(range(x.ndim))))
