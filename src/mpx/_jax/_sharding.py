"""Shardings of arrays: zeros placed like a parameter, and local functions over shards."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import has_explicit_axes, is_tracer
from mpx._jax._private import private
from mpx._jax._tree import axis_names


def zeros_alike(
    like: PyTree,
    dtype: DTypeLike,
    *,
    group: int | None = None,
    planes: int | None = None,
) -> PyTree:
    """Returns zeros that are sharded like an array, a tracer or a `ShapeDtypeStruct`.

    With `group`, that many elements of the last axis share one zero; if shards end within
    a group, that axis is not sharded. `planes` is the size of a new first axis.
    """
    shape = tuple(like.shape)
    sharding = getattr(like, "sharding", None)
    if group is not None:
        sharding = uncut(sharding, shape, group)
        shape = (*shape[:-1], shape[-1] // group)
    if planes is not None:
        sharding = stacked(sharding)
        shape = (planes, *shape)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    if not is_tracer(like):
        # An uncommitted array must stay uncommitted: beside committed zeros the first
        # jitted step would commit it, and the second step would compile again.
        placed = getattr(like, "committed", True)
        return jnp.zeros(shape, dtype, device=sharding if placed else None)
    # Under jit a constant would be replicated; a value computed from an array is sharded
    # like it. No number is above infinity.
    zeros = (like > jnp.inf).astype(dtype)
    if group is not None:
        groups = (*zeros.shape[:-1], zeros.shape[-1] // group, group)
        zeros = whole_groups(zeros, group).reshape(groups)[..., 0]
    return zeros if planes is None else jnp.stack([zeros] * planes)


def stacked(sharding: PyTree) -> PyTree:
    """Returns the sharding of arrays that are stacked along a new first axis."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = [None, *sharding.spec]
    # As results of programs have it: a step must not compile again for its own results.
    while spec and spec[-1] is None:
        spec.pop()
    return _with_spec(sharding, PartitionSpec(*spec))


def unstacked(sharding: PyTree) -> PyTree:
    """Returns the sharding of the parts of an array along its first axis."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return _with_spec(sharding, PartitionSpec(*sharding.spec[1:]))


def _with_spec(sharding: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def zero_beside(leaves: Iterable[PyTree], dtype: DTypeLike) -> PyTree:
    """Returns a scalar zero that is replicated over the devices of some arrays."""
    leaves = [x for x in leaves if isinstance(x, jax.Array | jax.ShapeDtypeStruct)]
    shapes = [x for x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
    if any(map(is_tracer, leaves)):
        return jnp.zeros((), dtype)
    placed = shapes or [x for x in leaves if getattr(x, "committed", False)]
    shardings = {replicated(x.sharding) for x in placed} - {None}
    sharding = shardings.pop() if len(shardings) == 1 else None
    if shapes:
        return jax.ShapeDtypeStruct((), dtype, sharding=sharding)
    return jnp.zeros((), dtype, device=sharding)


def replicated(sharding: PyTree) -> PyTree:
    """Returns the sharding with a copy on each device, or `None` for an unknown kind."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        return SingleDeviceSharding(device)
    return None


# --- Fully sharded data parallelism ---------------------------------------------------

_GROUP = 32  # elements that share a scale in a compressed optimizer, by default


def fsdp_shardings(
    tree: PyTree,
    mesh: Mesh,
    axis: str | Sequence[str] = "data",
    *,
    min_size: int = 2**14,
) -> PyTree:
    """Returns a sharding for each leaf of a tree, for fully sharded data parallelism.

    An array is sharded along its largest axis that the devices divide evenly. Small arrays,
    and those without such an axis, are replicated. The last axis is only cut between the
    groups of 32 elements that share a scale in a compressed optimizer, unless no other can
    be cut. Apply it to the parameters: `optimizer.init` gives the state their shardings.

    Args:
        tree: The parameters: arrays or `ShapeDtypeStruct`s.
        mesh: The mesh.
        axis: The axis of the mesh that shards, or several of them.
        min_size: How many elements an array must have to be sharded.

    Examples:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> params = {"w": jnp.ones((512, 256)), "bias": jnp.ones(10)}
        >>> shardings = fsdp_shardings(params, mesh)
        >>> tuple(shardings["w"].spec), tuple(shardings["bias"].spec)
        (('data',), ())
        >>> params = jax.device_put(params, shardings)
    """
    if not hasattr(mesh, "axis_names"):
        raise TypeError(
            f"`mesh` must be a `jax.sharding.Mesh`, but {type(mesh).__name__} was given. "
            "The parameters come first: `fsdp_shardings(params, mesh)`."
        )
    names = axis_names(axis)
    unknown = [name for name in names if name not in mesh.shape]
    if unknown:
        raise ValueError(
            f"`axis` names {unknown}, but the mesh has the axes {list(mesh.shape)}."
        )
    count = math.prod(mesh.shape[name] for name in names)

    def spec(shape: tuple[int, ...]) -> PartitionSpec:
        cuttable = [i for i, size in enumerate(shape) if size % count == 0]
        last = len(shape) - 1
        whole = [i for i in cuttable if i < last or shape[i] // count % _GROUP == 0]
        if math.prod(shape) < min_size or not cuttable:
            return PartitionSpec()
        largest = max(whole or cuttable, key=lambda i: shape[i])
        return spec_of([()] * largest + [names])

    return jax.tree.map(
        lambda x: NamedSharding(mesh, spec(tuple(getattr(x, "shape", ())))), tree
    )


# --- Groups of the last axis ----------------------------------------------------------


def may_cut_groups(x: Array, group: int) -> bool:
    """Returns whether shards of the last axis may end within a group."""
    sharding = jax.typeof(x).sharding
    # With automatic axes JAX does not tell how `x` is sharded, only over which mesh.
    mesh, groups = sharding.mesh, x.shape[-1] // group
    automatic = math.prod(
        mesh.shape[name]
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    )
    return groups % automatic != 0 or uncut(sharding, x.shape, group) is not sharding


def whole_groups(x: Array, group: int) -> Array:
    """Reshards an array of explicit axes if its shards end within a group."""
    return _resharded(x, uncut(jax.typeof(x).sharding, x.shape, group))


def uncut(sharding: PyTree, shape: tuple[int, ...], group: int) -> PyTree:
    """Returns a sharding, with the last axis replicated if its shards cut a group."""
    if not isinstance(sharding, NamedSharding) or not group:
        return sharding
    entries = axes_of(sharding.spec, len(shape))
    shards = math.prod(sharding.mesh.shape[name] for name in entries[-1])
    if shape[-1] // group % shards == 0:
        return sharding
    return _with_spec(sharding, spec_of([*entries[:-1], ()]))


def axes_of(spec: Iterable[PyTree], rank: int = 0) -> list[tuple[str, ...]]:
    """Returns the axes of a mesh that shard each axis of an array."""
    found = [
        (entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec
    ]
    return found + [()] * (rank - len(found))


def spec_of(entries: Iterable[tuple[str, ...]]) -> PartitionSpec:
    """Returns the `PartitionSpec` of which `axes_of` returns the entries."""
    names = (entry[0] if len(entry) == 1 else entry or None for entry in entries)
    return PartitionSpec(*names)


def in_auto_axes(func: Callable[..., Array], sharding: Any) -> Callable[..., Array]:
    """Returns a function for which the explicit axes of a mesh are automatic.

    Its result has the given sharding.
    """
    axes = getattr(sharding.mesh, "explicit_axes", ())
    if not axes:
        return func
    run: Any = jax.sharding.auto_axes(func, axes=axes, out_sharding=sharding)
    return run


def sharded_as(x: Array, like: PyTree) -> Array:
    """Returns an array with the sharding that the type of another one has."""
    return _resharded(x, jax.typeof(like).sharding)


def _resharded(x: Array, sharding: PyTree) -> Array:
    if not has_explicit_axes(sharding.mesh) or jax.typeof(x).sharding == sharding:
        return x
    return jax.sharding.reshard(x, sharding)


# --- Local functions over shards ------------------------------------------------------


def reason_against_shards(x: Array, group: int = 0) -> str | None:
    """Returns why `over_shards` cannot take an array, or `None` if it can."""
    mesh = jax.typeof(x).sharding.mesh
    if len(set(mesh.axis_types or ())) > 1:
        return f"its mesh has axes of several kinds, {mesh.axis_types}"
    if group and may_cut_groups(x, group):
        return f"a shard of its last axis may end within a group of {group}"
    return None


def over_shards(
    local: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    *,
    like: Array,
    layout: Callable[..., tuple[Any, Any]],
    **options: Any,
) -> PyTree:
    """Calls a kernel, which XLA cannot partition, on each device with its shards."""
    if jax.typeof(like).sharding.mesh.are_all_axes_manual or not like.ndim:
        return local(*args)
    parts = lambda mesh, args, _: (local, *layout(*args))  # noqa: E731
    return partitioned(local, args, parts, **options)


Parts = tuple[Callable[..., PyTree], Any, Any]
"""The function of what one device has; the shardings of its arguments and results."""


def partitioned(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    parts: Callable[[Any, Any, Any], Parts],
    *,
    rule: str,
    whole: Sequence[str] = (),
    **sizes: int,
) -> PyTree:
    """Calls a function on each device, with the parts that it has of the arguments."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(args)]
    for mesh in filter(has_explicit_axes, meshes):
        local, *places = parts(mesh, jax.tree.map(jax.typeof, args), None)
        specs = jax.tree.map(lambda sharding: sharding.spec, places)
        call = jax.shard_map(
            local, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )
        return call(*jax.tree.map(_resharded, args, places[0]))

    # Only XLA knows automatic shardings.
    def partition(mesh: Any, args: PyTree, result: Any) -> tuple[PyTree, ...]:
        local, given, results = parts(mesh, args, result)
        return mesh, local, results, given

    # Shardy wants them in the order in which the rule names them.
    factors = sorted({*whole, *sizes}, key=re.findall(r"\w+", rule).index)
    call = private("kernels").custom_partitioning(func)
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda *types: parts(*types)[2],
        sharding_rule=rule,
        need_replication_factors=tuple(factors),
        **sizes,
    )
    return call(*args)


# --- Whole matrices on one device each --------------------------------------------------


def one_device_each(
    func: Callable[[Array], Array], arrays: Sequence[Array]
) -> list[Array]:
    """Applies a function to matrices, each on one device, however they are sharded.

    `func` takes a stack `(count, rows, columns)` and computes each matrix on its own. The
    arrays are such stacks, with equal rows and columns. Devices that have parts of a
    matrix, or the same ones, divide the matrices among them.
    """
    plain = functools.partial(one_stack, func)
    kinds = {kind for x in arrays for kind in jax.typeof(x).sharding.mesh.axis_types}
    if kinds - {AxisType.Explicit} and kinds - {AxisType.Auto}:
        return plain(arrays)  # inside a `shard_map`, which knows what it has

    def parts(mesh: Any, args: PyTree, _: PyTree) -> Parts:
        (types,) = args
        shardings = [_even(mesh, x) for x in types]
        return functools.partial(_exchanged, func, shardings), (shardings,), shardings

    axes = ", ".join(f"count{i} rows{i} columns{i}" for i in range(len(arrays)))
    return partitioned(plain, (list(arrays),), parts, rule=f"{axes} -> {axes}")


def _even(mesh: Any, x: Any) -> NamedSharding:
    """Returns the sharding of an array, without the axes that do not divide it evenly."""
    spec = getattr(x.sharding, "spec", ())
    entries = [
        axes if size % math.prod(mesh.shape[name] for name in axes) == 0 else ()
        for axes, size in zip(axes_of(spec, 3), x.shape, strict=True)
    ]
    return NamedSharding(mesh, spec_of(entries))


def one_stack(func: Callable[[Array], Array], arrays: Sequence[Array]) -> list[Array]:
    """Applies a function of a stack to several of them at once."""
    ends = np.cumsum([len(x) for x in arrays])[:-1]
    return jnp.split(func(jnp.concatenate(arrays)), ends)


def _exchanged(
    func: Callable[[Array], Array],
    shardings: Sequence[NamedSharding],
    arrays: Sequence[Array],
) -> list[Array]:
    """Applies a function of whole matrices to the shards of one device."""
    new = [*arrays]
    for sharding in dict.fromkeys(shardings):
        local = functools.partial(_exchange, func, sharding)
        alike = [i for i, x in enumerate(shardings) if x == sharding]
        for i, x in zip(
            alike, one_stack(local, [arrays[i] for i in alike]), strict=True
        ):
            new[i] = x
    return new


def _exchange(
    func: Callable[[Array], Array], sharding: NamedSharding, x: Array
) -> Array:
    """Gives each device some whole matrices for parts of all of them, and back."""
    sizes = sharding.mesh.shape
    split, *cut = axes_of(sharding.spec, 3)
    copies = tuple(name for name in sizes if name not in (*split, *cut[0], *cut[1]))
    copied = math.prod(sizes[name] for name in copies)
    devices = copied * math.prod(sizes[name] for axes in cut for name in axes)
    count, cuts = len(x), [(axis, axes) for axis, axes in enumerate(cut, 1) if axes]
    x = jnp.pad(x, ((0, -count % devices), (0, 0), (0, 0)))
    if copies:
        share = len(x) // copied
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(copies) * share, share)
    for axis, axes in cuts:
        x = lax.all_to_all(x, axes, 0, axis, tiled=True)
    x = func(x)
    for axis, axes in reversed(cuts):
        x = lax.all_to_all(x, axes, axis, 0, tiled=True)
    return (lax.all_gather(x, copies, tiled=True) if copies else x)[:count]
