"""A kernel over the shards of parameters: no communication, no change of sharding.

A kernel sees the arrays of one device. Groups run along the last axis, and the scales
have the axes of the parameter, so that each device can step its own shards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from mpx._jax._sharding import over_shards, replicated, stacked, uncut

Local = Callable[[Array, Array | None, Sequence[Array], Sequence[Any]], list[Any]]
"""`local(scalars, ahead, grads, leaves) -> leaves`, for the arrays of one device.

If `ahead` is given, only one layer of the single leaf is stepped: `ahead` holds the
distance of each layer from that one.
"""


def step_shards(
    local: Local,
    scalars: Array,
    ahead: Array | None,
    grads: Sequence[Array],
    leaves: Sequence[Any],
    *,
    group_size: int,
) -> list[Any]:
    """Calls `local` on each device with its shards of `ahead`, `grads` and `leaves`."""

    def layout(scalars: Any, ahead: Any, grads: Any, leaves: Any) -> tuple[Any, Any]:
        params = [
            uncut(leaf.param.sharding, leaf.param.shape, group_size) for leaf in leaves
        ]
        results = [
            _shardings(sharding, leaf)
            for sharding, leaf in zip(params, leaves, strict=True)
        ]
        everywhere, layers = replicated(params[0]), None
        if ahead is not None:
            ((mesh, spec),) = [(sharding.mesh, sharding.spec) for sharding in params]
            layers = NamedSharding(mesh, PartitionSpec(*spec[:1]))
            params = [NamedSharding(mesh, PartitionSpec(*spec[1:]))]
        return (everywhere, layers, params, results), results

    rule, planes = _rule(leaves, group_size, by_layer=ahead is not None)
    sizes = {"group": group_size} if group_size else {}
    return over_shards(
        local,
        (scalars, ahead, list(grads), list(leaves)),
        like=leaves[0].param,
        layout=layout,
        rule=rule,
        whole=("rows", "numbers", *planes),
        **sizes,
    )


def _shardings(sharding: Any, leaf: Any) -> Any:
    """Returns the sharding of each array of a leaf, given that of the parameter."""
    rank = len(leaf.param.shape)
    return jax.tree.map(
        lambda x: sharding if len(x.shape) == rank else stacked(sharding), leaf
    )


def _rule(
    leaves: Sequence[Any], group_size: int, *, by_layer: bool
) -> tuple[str, set[str]]:
    """Returns which axes of the arrays belong together, in the notation of Shardy.

    A matrix with groups is `a0 (a1 group)`, its scales are `a0 a1`, and either may have
    planes before. By layer, the gradient lacks the first axis, which `ahead` has.

    Returns:
        The rule, and the names of the axes of planes.
    """
    planes: set[str] = set()

    def axes_of(number: int, x: Array, first: int = 0) -> str:
        param = leaves[number].param
        axes = [f"leaf{number}axis{axis}" for axis in range(param.ndim)]
        if group_size and x.shape[x.ndim - param.ndim :] == param.shape:
            axes[-1] = f"({axes[-1]} group)"
        if x.ndim > param.ndim:
            # A size has one name.
            planes.add(f"planes{len(x)}")
            axes.insert(0, f"planes{len(x)}")
        return " ".join(axes[first:])

    ahead = ["leaf0axis0"] if by_layer else []
    grads = [axes_of(i, leaf.param, int(by_layer)) for i, leaf in enumerate(leaves)]
    results = [
        axes_of(i, x) for i, leaf in enumerate(leaves) for x in jax.tree.leaves(leaf)
    ]
    operands = ["rows numbers", *ahead, *grads, *results]
    return f"{', '.join(operands)} -> {', '.join(results)}", planes
