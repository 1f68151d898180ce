"""The version of mpx, and the versions of JAX that it accepts."""

from importlib.metadata import PackageNotFoundError, version

import jax

try:
    __version__ = version("mpx-jax")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the leading integers of a version string: `0.12.0.1` -> (0, 12, 0, 1)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_version(installed: str) -> None:
    """Rejects a JAX that is too old, and one that is wrong on aarch64 CPUs: 0.10.2."""
    if version_tuple(installed) < (0, 10, 1) or version_tuple(installed) == (0, 10, 2):
        raise ImportError(
            f"mpx needs jax>=0.10.1,!=0.10.2, but jax {installed} is installed. "
            'Run `pip install -U "jax>=0.10.1,!=0.10.2"`.'
        )


check_version(jax.__version__)
