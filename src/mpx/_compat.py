"""The only file that knows which JAX is installed.

Everything that is not covered by JAX's stability promise, or that differs between the
supported versions, is reached through here.
"""

import platform
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax

OLDEST, NEWEST = (0, 10, 1), (0, 13)


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the leading integers of a version string: `0.12.0.1` -> (0, 12, 0, 1)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_versions(jax_version: str, jaxlib_version: str, machine: str) -> None:
    """Refuses a JAX that is too old and warns of a build known to compute wrongly.

    Raises:
        ImportError: If JAX is older than the oldest supported version.
    """
    if version_tuple(jax_version) < OLDEST:
        raise ImportError(
            f"mpx needs jax>=0.10.1,!=0.10.2,<0.13, but jax {jax_version} is installed. "
            'Run `pip install -U "jax>=0.10.1,!=0.10.2,<0.13"`.'
        )
    # jaxlib 0.10.2 fuses a broadcast product with its reduction wrongly on aarch64
    # CPUs (100 % error at shape (128, 256)); every other supported build is right.
    if jaxlib_version.startswith("0.10.2") and machine in ("aarch64", "arm64"):
        warnings.warn(
            "jaxlib 0.10.2 computes wrong numbers on aarch64 CPUs. Install another "
            "version, or set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= .",
            RuntimeWarning,
            stacklevel=2,
        )


check_versions(jax.__version__, jaxlib.__version__, platform.machine())


def is_tracer(x: object) -> bool:
    """Whether `x` is an abstract value inside a JAX transformation."""
    return isinstance(x, jax.core.Tracer)


def make_jit_context(default: Any) -> Any:
    """Returns a process-wide setting that is part of the cache key of `jax.jit`."""
    return jax.make_user_context(default)


def as_varying(x: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Marks `x` as differing between the devices of manual mesh axes.

    Under `jax.shard_map` the derivative with respect to a replicated value is summed
    over the devices behind the caller's back. A varying value keeps its derivative
    local. Outside `shard_map` (vmap, pmap) nothing is tracked and `x` comes back.
    """
    tracked = getattr(jax.typeof(x), "vma", frozenset())
    missing = tuple(name for name in axis_names if name not in tracked)
    if not missing:
        return x
    try:
        return lax.pcast(x, missing, to="varying")
    except ValueError:  # not under shard_map: there is nothing to mark
        return x


def varying_like(x: Any, struct: Any) -> Any:
    """Marks `x` as differing between devices where `struct` says its successor does."""
    names = tuple(getattr(struct, "vma", None) or ())
    return as_varying(x, names) if names else x


def zeros_of(struct: Any) -> jax.Array:
    """Returns zeros for the result of `jax.eval_shape`."""
    return varying_like(jnp.zeros(struct.shape, struct.dtype), struct)
