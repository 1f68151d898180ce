"""The program that all kernels share: it loads a block, steps it and stores it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from mpx._kernels._plain import Body
from mpx._quant import Block


@dataclasses.dataclass(frozen=True)
class Plane:
    """One of the `count` planes of an array along its first axis."""

    index: int
    count: int


Ref = Any
"""A reference of Pallas."""
WHOLE = Plane(0, 1)


@runtime_checkable
class BlockView(Protocol):
    """Loads and stores blocks of an array; a gradient has so many `blocks`."""

    blocks: int

    def load(
        self, ref: Ref, index: Array, plane: Plane = WHOLE, *, last: bool = False
    ) -> Array:
        """Loads a block of a plane; `last` if nothing will read it again."""
        ...

    def store(self, ref: Ref, index: Array, x: Array, plane: Plane = WHOLE) -> None:
        """Stores a block of a plane."""
        ...


def planes_of(leaf: PyTree) -> PyTree:
    """Returns the planes of each array of a leaf, or `WHOLE`.

    Arrays with an axis more than the parameter have planes along their first axis.
    """

    def planes(x: Array) -> PyTree:
        if x.ndim == leaf.param.ndim:
            return WHOLE
        return [Plane(index, len(x)) for index in range(len(x))]

    return jax.tree.map(planes, leaf)


def step_block(
    program: tuple[Array, Array],
    refs: tuple[Ref, Ref | None, Sequence[PyTree], Sequence[PyTree], Sequence[PyTree]],
    *,
    body: Body,
    planes: PyTree,
    block: Block,
    view: BlockView,
) -> None:
    """Steps a block of one of the leaves, unless its flag is zero.

    `program` is the index of the block and that of the leaf. `refs` are the scalars, a row
    for each leaf with its flag first; the distance of each layer from the one to step, or
    `None`; the gradients; the leaves; the outputs.
    """
    index, which = program
    scalars_ref, ahead_ref, grad_refs, leaf_refs, out_refs = refs
    place, is_here = index, True
    if ahead_ref is not None:
        (layers,) = ahead_ref.shape
        layer = -ahead_ref[0]
        is_here = (layer >= 0) & (layer < layers)
        place = index + view.blocks * jnp.clip(layer, 0, layers - 1)

    def load_planes(place: Array, ref: Ref, planes: PyTree) -> PyTree:
        if isinstance(planes, Plane):
            return view.load(ref, place)
        return tuple(view.load(ref, place, plane) for plane in planes)

    def store_planes(place: Array, ref: Ref, planes: PyTree, x: PyTree) -> None:
        if isinstance(planes, Plane):
            return view.store(ref, place, x)
        for plane, part in zip(planes, x, strict=True):
            view.store(ref, place, part, plane)

    def load(grad_ref: Ref, leaf_ref: Ref) -> tuple[Array, PyTree]:
        leaf = jax.tree.map(functools.partial(load_planes, place), leaf_ref, planes)
        return view.load(grad_ref, index, last=True), leaf

    pairs = zip(grad_refs, leaf_refs, strict=True)
    loads = [functools.partial(load, *pair) for pair in pairs]
    # Loaded before the flag is known, so that no step waits for it.
    grad, leaf = lax.switch(which, loads) if len(loads) > 1 else loads[0]()
    finite, *scalars = (scalars_ref[which, i] for i in range(scalars_ref.shape[1]))
    new = body(tuple(scalars), grad, leaf, block, None)
    for number, each in enumerate(out_refs):

        def store(each: PyTree = each) -> None:
            jax.tree.map(functools.partial(store_planes, place), each, planes, new)

        lax.cond((which == number) & (finite != 0) & is_here, store, lambda: None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Division of the work into programs.

    Attributes:
        block: Elements of a program, a power of two.
        warps: Warps of 32 threads that share a block. A group must lie in one of them.
        batch: How many leaves of equal shape share one launch.
        batch_size: Leaves with more elements have a launch of their own.
    """

    block: int = 512
    warps: int = 1
    batch: int = 8
    batch_size: int = 2**23


# One warp needs no barrier to share the scales of its groups.
TRITON = Tuning()
# A program of Mosaic is a warpgroup, and each of its threads holds vectors of 8.
MOSAIC = Tuning(block=1024, warps=4)
