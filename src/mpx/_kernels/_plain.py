"""Plain JAX: the specification, and the path on CPUs, TPUs and under `vmap`."""

import functools
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._sharding import may_cut_groups, sharded_as, whole_groups
from mpx._quant._codecs import Block


@runtime_checkable
class Body(Protocol):
    """One step of a block; hashable, and equal ones compile once.

    Attributes:
        group_size: Elements of the last axis that share a scale; 0 if there is none.
    """

    @property
    def group_size(self) -> int: ...

    def __call__(
        self, scalars: tuple[Array, ...], grad: Array, leaf: PyTree, block: Block
    ) -> PyTree: ...


# From this size on the maxima are found in a pass of their own: otherwise XLA computes most
# of the step inside the reduction, at a third of the speed
# (benchmarks/optim.py, jax 0.11.2, H200).
_TWO_PASSES = 2**20
_NEIGHBOURS = 8


def run_plain(
    body: Body,
    scalars: Array,
    grad: Array,
    leaf: PyTree,
    *,
    finite: Array | None,
) -> PyTree:
    """Runs a step on whole arrays, grouped along their last axis.

    Arrays with an axis more than the parameter are passed to `body` as tuples of planes.
    """
    shape, group_size = leaf.param.shape, body.group_size
    cut = bool(group_size) and may_cut_groups(leaf.param, group_size)

    def planes(x: Array) -> PyTree:
        if x.ndim == len(shape):
            return group(x)
        parts = (lax.index_in_dim(x, i, keepdims=False) for i in range(len(x)))
        return tuple(map(group, parts))

    def group(x: Array) -> Array:
        if cut or not group_size or x.shape != shape:
            return x
        return x.reshape(*shape[:-1], shape[-1] // group_size, group_size)

    step = functools.partial(body, tuple(scalars))
    old, grad = jax.tree.map(planes, leaf), group(sharded_as(grad, leaf.param))
    if cut:
        new = step(grad, old, block=_CutBlock(group_size))
    elif group_size and leaf.param.size >= _TWO_PASSES:
        first = _FirstPass()
        step(grad, old, block=first)
        # Without the barrier XLA merges what it can of the second pass into the first.
        grad, peaks = lax.optimization_barrier((grad, first.peaks))
        new = step(grad, old, block=_SecondPass(peaks))
    else:
        new = step(grad, old, block=Block())
    if finite is not None:
        # Before the reshape: after it XLA would write the f32 weights to memory first.
        new = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new, old)
    return jax.tree.map(_like, leaf, new)


def _like(old: Array, new: PyTree) -> Array:
    """Returns an array, or one with new planes, in the shape and sharding of the old one."""
    if not isinstance(new, tuple):
        return sharded_as(new.reshape(old.shape), old)
    # Else XLA would compute the step once more for each plane.
    for index, plane in enumerate(lax.optimization_barrier(new)):
        plane = sharded_as(plane.reshape(old.shape[1:]), old[index])
        old = lax.dynamic_update_index_in_dim(old, plane, index, 0)
    return old


class _FirstPass(Block):
    """Finds the maxima; all other results are discarded.

    In a reduction over 32 neighbours XLA's GPU threads spend their time exchanging numbers.
    If each thread first takes the maximum of a few, there is less to exchange.
    """

    def __init__(self) -> None:
        self.peaks: list[Array] = []

    def peak(self, x: Array) -> Array:
        *rows, width = x.shape
        few = math.gcd(width, _NEIGHBOURS)
        x = x.reshape(*rows, width // few, few)
        x = functools.reduce(jnp.maximum, (x[..., index] for index in range(few)))
        self.peaks.append(super().peak(x))
        return self.peaks[-1]


class _SecondPass(Block):
    """Replays the maxima in the order in which they were found."""

    def __init__(self, peaks: Sequence[Array]) -> None:
        self._peaks = iter(peaks)

    def peak(self, x: Array) -> Array:
        return next(self._peaks)


class _CutBlock(Block):
    """A whole array whose shards may end within a group. It keeps its shape.

    Results are then computed element by element and sharded like the inputs; only the
    moments are gathered, to take the maxima of the groups.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def peak(self, x: Array) -> Array:
        x = whole_groups(x, self._group_size)
        return super().peak(x.reshape(*x.shape[:-1], -1, self._group_size))

    def spread(self, per_group: Array) -> Array:
        *rows, groups = per_group.shape
        each = jnp.broadcast_to(per_group[..., None], (*rows, groups, self._group_size))
        return each.reshape(*rows, groups * self._group_size)
