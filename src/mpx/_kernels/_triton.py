"""One step in one pass over memory, as a Triton kernel through Pallas.

The kernel loads a block, calls the step it is given, and stores the block in place.
"""

import functools
import math
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
# For data that is not read again while it is cached: the kernel takes 147 instead of 156 µs
# for 4096 × 12288 parameters. With all loads and no store it takes 168.
_STREAM = "evict_first"
_WARPS = 1  # one warp needs no barrier to share the scales of its groups


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
    that `body` needs. A program of the kernel steps the most elements that divide a leaf,
    up to `block`, a power of two. `ahead` is for one layer of a leaf: the distance of each
    layer from it. The types of `like` tell over which mesh axes the results vary.
    """
    param, group_size = leaves[0].param, body.group_size
    size = jax.tree.leaves(grads)[0].size
    block = math.gcd(size, block)

    def planes_of(x: Array) -> int:
        return 0 if x.ndim == param.ndim else len(x)

    def blocks(x: Array) -> Array:
        grouped = x.shape[x.ndim - param.ndim :] != param.shape
        return x.reshape(-1, block // group_size if grouped else block)

    arrays = jax.tree.map(blocks, list(leaves))
    grads = jax.tree.map(lambda x: x.reshape(-1, block), list(grads))
    inputs = (scalars, ahead, grads, arrays)
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
            block=(FlatBlock if interpret else _GpuBlock)(group_size),
        ),
        out_shape=[types],
        grid=(size // block, len(leaves)),
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
) -> None:
    """Steps a block of one of the leaves, unless its flag is zero."""
    index, which = pl.program_id(0), pl.program_id(1)
    place, is_here = index, True
    if ahead_ref is not None:
        (layers,) = ahead_ref.shape
        layer = -ahead_ref[0]
        is_here = (layer >= 0) & (layer < layers)
        blocks = jax.tree.leaves(grad_refs)[0].shape[0]
        place = index + blocks * jnp.clip(layer, 0, layers - 1)

    def rows(ref: Ref, planes: int) -> list[Ref]:
        """Returns where the block lies in each plane."""
        count = ref.shape[0] // (planes or 1)
        return [ref.at[count * i + place, :] for i in range(planes or 1)]

    def load_planes(ref: Ref, planes: int) -> PyTree:
        found = tuple(map(plgpu.load, rows(ref, planes)))
        return found if planes else found[0]

    def store_planes(ref: Ref, planes: int, x: PyTree) -> None:
        for row, part in zip(rows(ref, planes), x if planes else [x], strict=True):
            plgpu.store(row, part, eviction_policy=_STREAM)

    def load(grad_ref: PyTree, leaf_ref: PyTree) -> tuple[PyTree, PyTree]:
        last = functools.partial(plgpu.load, eviction_policy=_STREAM)
        grad = jax.tree.map(lambda ref: last(ref.at[index, :]), grad_ref)
        return grad, jax.tree.map(load_planes, leaf_ref, planes)

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


class _GpuBlock(FlatBlock):
    """Roots and reciprocals are one instruction, to about one ulp.

    Subnormal numbers count as zero.
    """

    def sqrt(self, x: Array) -> Array:
        return _assembly("sqrt.approx.ftz.f32 $0, $1;", x)

    def reciprocal(self, x: Array) -> Array:
        return _assembly("rcp.approx.ftz.f32 $0, $1;", x)

    def multiply_add(self, x: ArrayLike, y: Array, z: ArrayLike) -> Array:
        return _assembly("fma.rn.f32 $0, $1, $2, $3;", x, y, z)

    def rounded(self, x: Array, dtype: np.dtype) -> Array:
        # Triton keeps both casts, and knows no reduce_precision.
        return x.astype(dtype).astype(x.dtype)


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
