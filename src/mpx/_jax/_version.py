"""The version of mpx, and the versions of JAX that it accepts."""

import platform
from importlib.metadata import PackageNotFoundError, version

import jax
import jaxlib

from mpx._jax._warn import warn

try:
    __version__ = version("mpx-jax")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

OLDEST = (0, 10, 1)


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the leading integers of a version string: `0.12.0.1` -> (0, 12, 0, 1)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_versions(jax_version: str, jaxlib_version: str, machine: str) -> None:
    """Rejects a JAX that is too old, and warns of a build that is wrong."""
    if version_tuple(jax_version) < OLDEST:
        raise ImportError(
            f"mpx needs jax>=0.10.1,!=0.10.2, but jax {jax_version} is installed. "
            'Run `pip install -U "jax>=0.10.1,!=0.10.2"`.'
        )
    # jaxlib 0.10.2 fuses a broadcast product with its reduction wrongly on aarch64
    # CPUs (100 % error at shape (128, 256)); every other tested build is right.
    if version_tuple(jaxlib_version) == (0, 10, 2) and machine in ("aarch64", "arm64"):
        warn(
            "jaxlib 0.10.2 computes wrong numbers on aarch64 CPUs. Install another "
            "version, or set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= ."
        )


check_versions(jax.__version__, jaxlib.__version__, platform.machine())
