"""One step in one pass over memory, as a Triton kernel through Pallas.

The kernel loads a block, calls the step it is given, and stores the block in place.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike
from jaxtyping import PyTree

from mpx._jax._compat import struct_like
from mpx._jax._private import private
from mpx._kernels._plain import Body
from mpx._kernels._step import (
    TRITON,
    WHOLE,
    Plane,
    Ref,
    Tuning,
    planes_of,
    step_block,
)
from mpx._quant import Block

pl = plgpu = private("kernels")
# For data that is not read again while it is cached: the kernel takes 147 instead of 156 µs
# for 4096 × 12288 parameters. With all loads and no store it takes 168.
_STREAM = "evict_first"


def can_address(leaf: PyTree, tuning: Tuning = TRITON) -> bool:
    """Returns whether a kernel reaches every element of a leaf.

    Pallas indexes arrays of up to 2³² bytes with signed 32 bits: one of bytes has elements
    out of reach if it has more than 2³¹. Larger arrays use 64 bits, but not the start of a
    block, which is why the blocks are an axis of their own.
    """
    full = leaf.param.size % tuning.block == 0
    return all(
        x.size <= 2**31 or (x.size * x.dtype.itemsize > 2**32 and full)
        for x in jax.tree.leaves(leaf)
    )


def can_step_layer(leaf: PyTree, tuning: Tuning = TRITON) -> bool:
    """Returns whether a kernel can step one layer of a leaf in place."""
    layers, size = leaf.param.shape[0], leaf.param.size
    return can_address(leaf, tuning) and size // layers % tuning.block == 0


def launch(
    body: Body,
    scalars: Array,
    grads: Sequence[Array],
    leaves: Sequence[PyTree],
    *,
    group_size: int,
    ahead: Array | None = None,
    like: Sequence[PyTree] | None = None,
    tuning: Tuning = TRITON,
    interpret: bool = False,
) -> list[PyTree]:
    """Steps leaves of equal shapes on one device, in place if they are donated.

    `scalars` has a row for each leaf: zero if the leaf must not change, then the numbers
    that `body` needs. `ahead` is for one layer of a leaf: the distance of each layer from
    it. The types of `like` tell over which mesh axes the results vary.
    """
    param = leaves[0].param
    view = _View(grads[0].size, tuning.block, group_size)
    layers = 1 if ahead is None else len(ahead)

    def flat(x: Array) -> Array:
        planes = 1 if x.ndim == param.ndim else len(x)
        grouped = x.shape[x.ndim - param.ndim :] != param.shape
        return x.reshape(view.shape(layers * planes, grouped=grouped))

    def typed(x: Array, like: PyTree) -> PyTree:
        return struct_like(like, x.shape)

    arrays = jax.tree.map(flat, list(leaves))
    shape = view.shape(1, grouped=False)
    inputs = (scalars, ahead, [grad.reshape(shape) for grad in grads], arrays)
    before = len(jax.tree.leaves(inputs[:-1]))
    block = _Block(tuning.block, group_size)
    (new,) = pl.pallas_call(
        functools.partial(
            _kernel,
            body=body,
            planes=planes_of(leaves[0]),
            block=block if interpret else _GpuBlock(tuning.block, group_size),
            view=view,
        ),
        out_shape=[jax.tree.map(typed, arrays, list(leaves if like is None else like))],
        grid=(view.blocks, len(leaves)),
        in_specs=jax.tree.map(lambda _: pl.no_block_spec, inputs),
        out_specs=[jax.tree.map(lambda _: pl.no_block_spec, arrays)],
        input_output_aliases={
            before + index: index for index in range(len(jax.tree.leaves(arrays)))
        },
        compiler_params=plgpu.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="mpx_step",
    )(*inputs)
    return jax.tree.map(lambda x, old: x.reshape(old.shape), new, list(leaves))


def _kernel(
    *refs: PyTree, body: Body, planes: PyTree, block: Block, view: "_View"
) -> None:
    program = pl.program_id(0), pl.program_id(1)
    step_block(program, refs, body=body, planes=planes, block=block, view=view)


class _View:
    """A leaf as blocks: `(blocks, elements)`, or flat if the last block is not full."""

    def __init__(self, size: int, block: int, group_size: int) -> None:
        self.blocks = -(-size // block)
        self._full = size % block == 0
        self._counts = {False: size, True: size // (group_size or 1)}
        self._widths = {False: block, True: block // (group_size or 1)}

    def shape(self, times: int, *, grouped: bool) -> tuple[int, ...]:
        """The shape of an array with some numbers per element, or per group."""
        if not self._full:
            return (times * self._counts[grouped],)
        return (times * self.blocks, self._widths[grouped])

    def load(
        self, ref: Ref, index: Array, plane: Plane = WHOLE, *, last: bool = False
    ) -> Array:
        part, mask = self._part(ref, index, plane)
        other = None if mask is None else jnp.zeros((), ref.dtype)
        policy = _STREAM if last else None
        return plgpu.load(part, mask=mask, other=other, eviction_policy=policy)

    def store(self, ref: Ref, index: Array, x: Array, plane: Plane = WHOLE) -> None:
        part, mask = self._part(ref, index, plane)
        plgpu.store(part, x, mask=mask, eviction_policy=_STREAM)

    def _part(self, ref: Ref, index: Array, plane: Plane) -> tuple[Ref, Array | None]:
        count = ref.shape[0] // plane.count
        first = plane.index * count
        if self._full:
            return ref.at[first + index, :], None
        width = self._widths[count != self._counts[False]]
        start = index * width
        mask = start + lax.iota(jnp.int32, width) < count
        return ref.at[pl.ds(first + start, width)], mask


class _Block(Block):
    """A flat block of elements, whose groups are next to each other."""

    in_registers = True

    def __init__(self, size: int, group_size: int) -> None:
        self._size = size
        self._group_size = group_size

    def peak(self, x: Array) -> Array:
        return super().peak(x.reshape(-1, self._group_size))

    def root_peak(self, x: Array, root: Array) -> Array:
        return self.peak(root)

    def spread(self, per_group: Array) -> Array:
        groups = self._size // self._group_size
        each = jnp.broadcast_to(per_group[:, None], (groups, self._group_size))
        return each.reshape(self._size)


class _GpuBlock(_Block):
    """Roots and reciprocals are one instruction, to about one ulp.

    Subnormal elements count as zero; subnormal scales, of which there are few, do not.
    """

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
