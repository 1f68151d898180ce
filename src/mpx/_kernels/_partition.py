"""A kernel over the shards of parameters: no communication, no change of sharding.

A kernel sees the arrays of one device. Groups run along the last axis, and the scales
have the axes of the parameter, so that each device can step its own shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from mpx._compat import has_explicit_axes
from mpx._private import private
from mpx._sharding import may_cut_groups

Local = Callable[[Array, Array | None, Sequence[Array], Sequence[Any]], list[Any]]
"""`local(scalars, ahead, grads, leaves) -> leaves`, for the arrays of one device.

If `ahead` is given, one layer of the only leaf is to step: `ahead` says for each layer how
far it is ahead of that one.
"""


def cannot_shard(param: Array, group_size: int) -> str | None:
    """Says why a parameter cannot be stepped shard by shard, or returns `None`."""
    mesh = jax.typeof(param).sharding.mesh
    if len(set(mesh.axis_types or ())) > 1:
        return f"its mesh has axes of several kinds, {mesh.axis_types}"
    if group_size and may_cut_groups(param, group_size):
        return f"a shard of its last axis may end within a group of {group_size}"
    return None


def over_shards(
    local: Local,
    scalars: Array,
    ahead: Array | None,
    grads: Sequence[Array],
    leaves: Sequence[Any],
    *,
    group_size: int,
) -> list[Any]:
    """Calls `local` on each device with its shards of `ahead`, `grads` and `leaves`.

    With explicit axes all parameters must be sharded alike; see `cannot_shard`.
    """
    param = leaves[0].param
    sharding = jax.typeof(param).sharding
    if sharding.mesh.are_all_axes_manual or not param.ndim:
        return local(scalars, ahead, grads, leaves)
    if has_explicit_axes(sharding.mesh):
        assert ahead is None, "layers of explicit shardings do not step one by one"
        return jax.shard_map(
            lambda scalars, *args: local(scalars, None, *args),
            mesh=sharding.mesh,
            in_specs=(PartitionSpec(), sharding.spec, sharding.spec),
            out_specs=sharding.spec,
            check_vma=False,
        )(scalars, [jax.sharding.reshard(x, sharding) for x in grads], leaves)
    return _by_compiler(local, scalars, ahead, grads, leaves, group_size=group_size)


def _by_compiler(
    local: Local,
    scalars: Array,
    ahead: Array | None,
    grads: Sequence[Array],
    leaves: Sequence[Any],
    *,
    group_size: int,
) -> list[Any]:
    """Lets XLA, which alone knows automatic shardings, cut arrays into shards."""

    def like_params(leaves: Sequence[Any]) -> list[Any]:
        shardings = [_uncut(leaf.param, group_size) for leaf in leaves]
        return [
            jax.tree.map(lambda _, sharding=sharding: sharding, leaf)
            for sharding, leaf in zip(shardings, leaves, strict=True)
        ]

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        scalars, ahead, _, leaves = args
        results = like_params(leaves)
        like = [leaf.param for leaf in results]
        layers = None
        if ahead is not None:
            (whole,) = like
            first, *rest = (*whole.spec, None)
            layers = NamedSharding(whole.mesh, PartitionSpec(first))
            like = [NamedSharding(whole.mesh, PartitionSpec(*rest[:-1]))]
        return mesh, local, results, (scalars.sharding, layers, like, results)

    def infer(mesh: Any, args: Any, result: Any) -> Any:
        return like_params(args[3])

    call = private("kernels").custom_partitioning(local)
    sizes: Any = {"group": group_size} if group_size else {}
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_rule(leaves, group_size, by_layer=ahead is not None),
        need_replication_factors=("rows", "numbers", *sizes),
        **sizes,
    )
    return call(scalars, ahead, list(grads), list(leaves))


def _rule(leaves: Sequence[Any], group_size: int, *, by_layer: bool) -> str:
    """Says which axes of the arrays belong together, in the notation of Shardy.

    A matrix with groups is `a0 (a1 group)`, its scales are `a0 a1`. By layer, the gradient
    lacks the first axis, which `ahead` has.
    """

    def name(leaf: int, axis: int) -> str:
        return f"leaf{leaf}axis{axis}"

    def of(number: int, x: Array, first: int = 0) -> str:
        axes = [name(number, axis) for axis in range(x.ndim)]
        if group_size and x.shape == leaves[number].param.shape:
            axes[-1] = f"({axes[-1]} group)"
        return " ".join(axes[first:])

    ahead = [name(0, 0)] if by_layer else []
    grads = [
        of(number, leaf.param, int(by_layer)) for number, leaf in enumerate(leaves)
    ]
    results = [
        of(number, x)
        for number, leaf in enumerate(leaves)
        for x in jax.tree.leaves(leaf)
    ]
    operands = ["rows numbers", *ahead, *grads, *results]
    return f"{', '.join(operands)} -> {', '.join(results)}"


def _uncut(param: Any, group_size: int) -> Any:
    """Returns the sharding of a parameter, or one that cuts no group."""
    sharding, shape = param.sharding, param.shape
    if not group_size or sharding.shard_shape(shape)[-1] % group_size == 0:
        return sharding
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1], None))
