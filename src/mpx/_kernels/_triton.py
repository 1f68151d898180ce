"""One step in one pass over memory, as a Triton kernel through Pallas.

The kernel loads a block, calls the step it is given, and stores the block in place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx._jax._compat import struct_like
from mpx._jax._private import private
from mpx._kernels._dispatch import Body, FlatBlock
from mpx._quant._codecs import Block

pl = plgpu = private("kernels")
Ref = Any  # a reference of Pallas
_Plane = tuple[
    int, int
]  # one of the planes of an array along its first axis, their number
# For data that is not read again while it is cached: the kernel takes 147 instead of 156 µs
# for 4096 × 12288 parameters. With all loads and no store it takes 168.
_STREAM = "evict_first"
_WARPS = 1  # one warp needs no barrier to share the scales of its groups


def can_address(leaf: PyTree, block: int) -> bool:
    """Returns whether a kernel reaches every element of a leaf.

    Pallas indexes arrays of up to 2³² bytes with signed 32 bits: one of bytes has elements
    out of reach if it has more than 2³¹. Larger arrays use 64 bits, but not the start of a
    block, which is why the blocks are an axis of their own.
    """
    full = leaf.param.size % block == 0
    return all(
        x.size <= 2**31 or (x.size * x.dtype.itemsize > 2**32 and full)
        for x in jax.tree.leaves(leaf)
    )


def launch(
    body: Body,
    scalars: Array,
    grads: Sequence[PyTree],
    leaves: Sequence[PyTree],
    *,
    block: int,
    ahead: Array | None = None,
    like: Sequence[PyTree] | None = None,
    interpret: bool = False,
) -> list[PyTree]:
    """Steps leaves of equal shapes on one device, in place if they are donated.

    `scalars` has a row for each leaf: zero if the leaf must not change, then the numbers
    that `body` needs. `ahead` is for one layer of a leaf: the distance of each layer from
    it. The types of `like` tell over which mesh axes the results vary.
    """
    param, group_size = leaves[0].param, body.group_size
    view = _View(jax.tree.leaves(grads)[0].size, block, group_size)
    layers = 1 if ahead is None else len(ahead)

    def planes_of(x: Array) -> int:
        return 0 if x.ndim == param.ndim else len(x)

    def flat(x: Array) -> Array:
        grouped = x.shape[x.ndim - param.ndim :] != param.shape
        return x.reshape(view.shape(layers * (planes_of(x) or 1), grouped=grouped))

    arrays = jax.tree.map(flat, list(leaves))
    shape = view.shape(1, grouped=False)
    inputs = (
        scalars, ahead, jax.tree.map(lambda x: x.reshape(shape), list(grads)), arrays,
    )  # fmt: skip
    before = len(jax.tree.leaves(inputs[:-1]))
    types = jax.tree.map(
        lambda x, like: struct_like(like, x.shape),
        arrays,
        list(leaves if like is None else like),
    )
    (new,) = pl.pallas_call(
        functools.partial(
            _kernel,
            body=body,
            planes=jax.tree.map(planes_of, leaves[0]),
            block=FlatBlock(group_size) if interpret else _GpuBlock(block, group_size),
            view=view,
        ),
        out_shape=[types],
        grid=(view.blocks, len(leaves)),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, inputs),
        out_specs=[jax.tree.map(lambda _: pl.no_block_spec, arrays)],
        input_output_aliases={
            before + index: index for index in range(len(jax.tree.leaves(arrays)))
        },
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="mpx_step",
    )(*inputs)
    return jax.tree.map(lambda x, old: x.reshape(old.shape), new, list(leaves))


def _kernel(
    scalars_ref: Ref,
    ahead_ref: Ref | None,
    grad_refs: Sequence[PyTree],
    leaf_refs: Sequence[PyTree],
    out_refs: Sequence[PyTree],
    *,
    body: Body,
    planes: PyTree,
    block: Block,
    view: "_View",
) -> None:
    """Steps a block of one of the leaves, unless its flag is zero."""
    index, which = pl.program_id(0), pl.program_id(1)
    place, is_here = index, True
    if ahead_ref is not None:
        (layers,) = ahead_ref.shape
        layer = -ahead_ref[0]
        is_here = (layer >= 0) & (layer < layers)
        place = index + view.blocks * jnp.clip(layer, 0, layers - 1)

    def load_planes(ref: Ref, planes: int) -> PyTree:
        if not planes:
            return view.load(ref, place)
        return tuple(view.load(ref, place, (i, planes)) for i in range(planes))

    def store_planes(ref: Ref, planes: int, x: PyTree) -> None:
        for i, part in enumerate(x if planes else [x]):
            view.store(ref, place, part, (i, planes or 1))

    def load(grad_ref: PyTree, leaf_ref: PyTree) -> tuple[PyTree, PyTree]:
        leaf = jax.tree.map(load_planes, leaf_ref, planes)
        return jax.tree.map(
            lambda ref: view.load(ref, index, last=True), grad_ref
        ), leaf

    pairs = zip(grad_refs, leaf_refs, strict=True)
    loads = [functools.partial(load, *pair) for pair in pairs]
    # Loaded before the flag is known, so that no step waits for it.
    grad, leaf = lax.switch(which, loads) if len(loads) > 1 else loads[0]()
    finite, *scalars = (scalars_ref[which, i] for i in range(scalars_ref.shape[1]))
    new = body(tuple(scalars), grad, leaf, block)
    for number, out_ref in enumerate(out_refs):

        def store(out_ref: PyTree = out_ref) -> None:
            jax.tree.map(store_planes, out_ref, planes, new)

        lax.cond((which == number) & (finite != 0) & is_here, store, lambda: None)


class _View:
    """A leaf as blocks: `(blocks, elements)`, or flat if the last block is not full."""

    def __init__(self, size: int, block: int, group_size: int) -> None:
        self.blocks, self._full = -(-size // block), size % block == 0
        self._counts = {False: size, True: size // (group_size or 1)}
        self._widths = {False: block, True: block // (group_size or 1)}

    def shape(self, times: int, *, grouped: bool) -> tuple[int, ...]:
        """The shape of an array with some numbers per element, or per group."""
        if not self._full:
            return (times * self._counts[grouped],)
        return (times * self.blocks, self._widths[grouped])

    def load(
        self, ref: Ref, index: Array, plane: _Plane = (0, 1), *, last: bool = False
    ) -> Array:
        part, mask = self._part(ref, index, plane)
        other = None if mask is None else jnp.zeros((), ref.dtype)
        policy = _STREAM if last else None
        return plgpu.load(part, mask=mask, other=other, eviction_policy=policy)

    def store(self, ref: Ref, index: Array, x: Array, plane: _Plane) -> None:
        part, mask = self._part(ref, index, plane)
        plgpu.store(part, x, mask=mask, eviction_policy=_STREAM)

    def _part(self, ref: Ref, index: Array, plane: _Plane) -> tuple[Ref, Array | None]:
        number, planes = plane
        count = ref.shape[0] // planes
        first = number * count
        if self._full:
            return ref.at[first + index, :], None
        width = self._widths[count != self._counts[False]]
        start = index * width
        mask = start + lax.iota(jnp.int32, width) < count
        return ref.at[pl.ds(first + start, width)], mask


class _GpuBlock(FlatBlock):
    """Roots and reciprocals are one instruction, to about one ulp.

    Subnormal elements count as zero; the few subnormal scales do not.
    """

    def __init__(self, size: int, group_size: int) -> None:
        super().__init__(group_size)
        self._size = size

    def sqrt(self, x: Array) -> Array:
        return self._approximate("sqrt", x)

    def reciprocal(self, x: Array) -> Array:
        return self._approximate("rcp", x)

    def multiply_add(self, x: ArrayLike, y: Array, z: ArrayLike) -> Array:
        return _assembly("fma.rn.f32 $0, $1, $2, $3;", x, y, z)

    def rounded(self, x: Array, dtype: np.dtype) -> Array:
        # Triton keeps both casts, and knows no reduce_precision.
        if dtype != jnp.bfloat16:
            return x.astype(dtype).astype(x.dtype)
        # Two at once: one instruction, and they are packed as they will be stored.
        (low,) = plgpu.elementwise_inline_asm(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            args=[x],
            constraints="=r,f,f",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
        )
        return low.astype(x.dtype)

    def _approximate(self, name: str, x: Array) -> Array:
        flush = ".ftz" if x.size == self._size else ""
        return _assembly(f"{name}.approx{flush}.f32 $0, $1;", x)


def _assembly(instruction: str, *args: ArrayLike) -> Array:
    """Applies one instruction to f32 numbers."""
    shape = jnp.broadcast_shapes(*map(jnp.shape, args))
    (result,) = plgpu.elementwise_inline_asm(
        instruction,
        args=[jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in args],
        constraints=",".join(["=f", *["f"] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result
