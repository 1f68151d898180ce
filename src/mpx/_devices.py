"""Which GPU programs run on."""

import jax

from mpx._version import version_tuple


def cuda_capability() -> tuple[int, ...] | None:
    """Returns the compute capability of the default device, if it is a CUDA GPU."""
    chosen = getattr(jax.config, "jax_default_device", None)
    if chosen is not None and getattr(chosen, "platform", chosen) not in (
        "gpu",
        "cuda",
    ):
        return None
    if jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    if "cuda" not in device.client.platform_version.lower():
        return None
    return version_tuple(device.compute_capability)


_CAPABILITIES = {
    **dict.fromkeys(("A100", "A100-SXM4-80GB"), (8, 0)),
    **dict.fromkeys(("L4", "L40", "L40S"), (8, 9)),
    **dict.fromkeys(("H100", "H200", "GH200"), (9, 0)),
    **dict.fromkeys(("B200", "GB200"), (10, 0)),
}


def gpu_capability() -> tuple[int, int] | str | None:
    """Returns the compute capability of the default device.

    It is `(9, 0)` for an H200, the name of the architecture on GPUs of other makers,
    and `None` where the default device is no GPU. There it is that of the mesh in use,
    if one compiles for GPUs that are elsewhere.
    """
    if jax.default_backend() not in ("gpu", "cuda", "rocm"):
        device = jax.sharding.get_abstract_mesh().abstract_device
        kind = "" if device is None else device.device_kind
        return next(
            (_CAPABILITIES[x] for x in kind.split() if x in _CAPABILITIES), None
        )
    found = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    major, _, minor = found.partition(".")
    if not (major.isdigit() and minor[:1].isdigit()):
        return found
    return int(major), int(minor[:1])
