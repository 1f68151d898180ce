"""How arrays are sharded: zeros that lie like a parameter, and groups that shards cut."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from mpx._compat import has_explicit_axes, is_tracer


def zeros_alike(like: Any, dtype: Any, *, group: int | None = None) -> Any:
    """Returns zeros that are sharded like an array.

    Args:
        like: An array, a tracer or a `ShapeDtypeStruct`.
        dtype: The dtype of the zeros.
        group: If given, one zero for so many elements of the last axis. Where shards of
            that axis end within a group, the axis of the groups is not sharded.
    """
    shape = tuple(like.shape)
    sharding = getattr(like, "sharding", None)
    if group is not None:
        sharding = _uncut(sharding, shape, group)
        shape = (*shape[:-1], shape[-1] // group)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if not is_tracer(like):
        # An array that was not put anywhere must stay so: beside committed zeros it
        # would be committed by the first jitted step, and the second compile again.
        placed = getattr(like, "committed", True)
        return jnp.zeros(shape, dtype, device=sharding if placed else None)
    # Under jit a constant would be put on every device; what is computed from an array
    # is sharded like it. No number is above infinity.
    zeros = (like > jnp.inf).astype(dtype)
    if group is not None:
        zeros = whole_groups(zeros, group).reshape(*shape, group)[..., 0]
    return zeros


def zero_beside(leaves: Iterable[Any], dtype: Any) -> Any:
    """Returns one zero that lies on every device on which arrays lie.

    If it lay elsewhere, a restored copy of it could not be used beside the arrays: what
    was restored has been put where it lies.

    Args:
        leaves: Arrays, tracers, shapes, and anything else. If one of them is a
            `ShapeDtypeStruct`, so is the result.
        dtype: The dtype of the zero.
    """
    leaves = [x for x in leaves if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    shapes = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    if any(map(is_tracer, leaves)):
        return jnp.zeros((), dtype)
    placed = shapes or [x for x in leaves if x.committed]
    everywhere = {_everywhere(x.sharding) for x in placed} - {None}
    sharding = everywhere.pop() if len(everywhere) == 1 else None
    if shapes:
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding)
    return jnp.zeros((), dtype, device=sharding)


def _everywhere(sharding: Any) -> Any:
    """Returns the sharding of a scalar that has a copy on each device, if it is known."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(device)
    return None


def may_cut_groups(x: Array, group: int) -> bool:
    """Whether shards of the last axis may end within a group.

    With automatic axes JAX does not tell how `x` is sharded, only over which mesh.
    """
    sharding = jax.typeof(x).sharding
    mesh, groups = sharding.mesh, x.shape[-1] // group
    automatic = math.prod(
        mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    )
    return groups % automatic != 0 or _uncut(sharding, x.shape, group) is not sharding


def whole_groups(x: Array, group: int) -> Array:
    """Returns an array no shard of which ends within a group of the last axis.

    With automatic axes the compiler sees to that. With explicit ones the sharding is
    part of the type, and an axis cannot be split into groups that are cut.
    """
    sharding = jax.typeof(x).sharding
    uncut = _uncut(sharding, x.shape, group)
    return x if uncut is sharding else jax.sharding.reshard(x, uncut)


def sharded_as(x: Array, like: Any) -> Array:
    """Returns an array with the sharding that the type of another one has."""
    sharding = jax.typeof(like).sharding
    if not has_explicit_axes(sharding.mesh) or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


def _uncut(sharding: Any, shape: tuple[int, ...], group: int) -> Any:
    """Returns the sharding without that of the last axis if it would cut a group."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    shards = math.prod(sharding.mesh.shape.get(axis, 1) for axis in axes)
    if shape[-1] // group % shards == 0:
        return sharding
    return NamedSharding(
        sharding.mesh,
        PartitionSpec(*spec[:-1], None),
        memory_kind=sharding.memory_kind,
    )
