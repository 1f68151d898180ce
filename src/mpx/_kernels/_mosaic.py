"""One step in one pass over memory, as a Mosaic GPU kernel through Pallas.

A program is a warpgroup, 128 threads. Each thread loads a few neighbours, and threads that
share a group lie in one warp. Loads, stores and single instructions are written in MLIR:
Pallas has none with masks here, nor roots that flush subnormal numbers to zero.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import as_unvarying, varying_like
from mpx._jax._private import private
from mpx._kernels._plain import Body
from mpx._kernels._step import (
    MOSAIC,
    WHOLE,
    Plane,
    Ref,
    Tuning,
    planes_of,
    step_block,
)
from mpx._quant import Block

pl = plgpu = fragments = utils = _mosaic = private("mosaic")
ir, arith, llvm = _mosaic.ir, _mosaic.arith, _mosaic.llvm
scf, vector = _mosaic.scf, _mosaic.vector
_WARPS = 4  # of a warpgroup
_VECTOR = 8
_Value = Any
"""A value, type or context of MLIR."""
_Operation = Callable[..., _Value]


def can_address(leaf: PyTree) -> bool:
    """Returns whether a kernel reaches all elements: 64 bits count elements, 31 blocks."""
    return leaf.param.size <= MOSAIC.block * (2**31 - 1)


def can_step_layer(leaf: PyTree) -> bool:
    """Returns false: this kernel steps whole leaves only."""
    del leaf
    return False


def launch(
    body: Body,
    scalars: Array,
    grads: Sequence[Array],
    leaves: Sequence[PyTree],
    *,
    group_size: int,
    like: Sequence[PyTree] | None = None,
    tuning: Tuning = MOSAIC,
) -> list[PyTree]:
    """Steps leaves of equal shapes on one device, in place if they are donated.

    The arguments are those of the Triton kernel's `launch`, without `interpret`: the
    interpreter of Pallas does not run MLIR.
    """
    view = _View(leaves[0].param.size, tuning.block, group_size)
    block = _Block(view)

    def kernel(scalars_ref: Ref, grad_refs: PyTree, leaf_refs: PyTree) -> None:
        step_block(
            (lax.axis_index("block"), lax.axis_index("leaf")),
            (scalars_ref, None, grad_refs, leaf_refs, leaf_refs),
            body=body,
            planes=planes_of(leaves[0]),
            block=block,
            view=view,
        )

    def flat(x: Array) -> Array:
        return as_unvarying(x).reshape(-1)

    kernel.__name__ = "mpx_step"
    # With `Lane` signed numbers are taken for unsigned ones (jax 0.11.2, 0.12.0).
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    step = plgpu.kernel(
        kernel,
        out_type=(),
        # The last axis may be long; the others end at 65535.
        grid=(len(leaves), view.blocks),
        grid_names=("leaf", "block"),
        compiler_params=params,
    )
    inputs = as_unvarying(scalars), [flat(grad) for grad in grads]
    arrays = jax.tree.map(flat, list(leaves))
    # A kernel changes references in place. Those of `jax.new_ref` would not do: they are
    # an effect, which `custom_partitioning` does not allow.
    new = pl.run_state(lambda refs: step(*inputs, refs))(arrays)
    return jax.tree.map(
        lambda x, old, like: varying_like(x.reshape(old.shape), like),
        new,
        list(leaves),
        list(leaves if like is None else like),
    )


class _View:
    """A leaf as blocks of `(rows, width)`: a row is a group, or the vector of a thread.

    Thread t holds the vectors t, t + 128, … of a block, so that each load of a warp is
    contiguous. If the last block is not full, what lies outside is loaded from the end of
    the array and not stored.
    """

    def __init__(self, size: int, block: int, group_size: int) -> None:
        # Without groups a row is as wide as a vector may be, for it must divide the size.
        width = group_size or next(w for w in (8, 4, 2, 1) if size % w == 0)
        self._vector = vector = min(width, max(_VECTOR, width // 32))
        per_warp = 32 * vector // width
        tiles = ((_WARPS * per_warp, width), (per_warp, width), (vector,))
        layout = fragments.TiledLayout(
            fragments.Tiling(tiles),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
            _check_canonical=False,
        ).canonicalize()
        self._layouts = {False: layout, True: layout.reduce([1])}
        self._repeats = max(1, block // (32 * _WARPS * vector))
        rows = _WARPS * per_warp * self._repeats
        self._shapes = {False: (rows, width), True: (rows,)}
        self._counts = {False: size, True: size // width}
        self.blocks = -(-size // (rows * width))
        self._full = size % (rows * width) == 0

    def struct(self, dtype: DTypeLike, *, grouped: bool) -> _Value:
        """The type of a block with a number per element, or per group."""
        x = self._layouts[grouped]
        layout = plgpu.Layout.TILED(x.tiling, x.warp_dims, x.lane_dims, x.vector_dim)
        return plgpu.ShapeDtypeStruct(self._shapes[grouped], dtype, layout=layout)

    def load(
        self, ref: Ref, index: Array, plane: Plane = WHOLE, *, last: bool = False
    ) -> Array:
        del last
        count = ref.shape[0] // plane.count
        grouped = count != self._counts[False]
        layout, dtype = self._layouts[grouped], ref.dtype
        types = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
        struct = self.struct(dtype, grouped=grouped)

        @plgpu.inline_mgpu(arg_types=types, return_type=struct)
        def load(context: _Value, ref: _Value, index: _Value) -> _Value:
            registers = np.empty(layout.registers_shape(self._shapes[grouped]), object)
            width = 1 if grouped else self._vector
            kind = ir.VectorType.get((width,), ir.MemRefType(ref.type).element_type)
            end, first = _number(count - width), _number(plane.index * count)
            for k, at in enumerate(self._places(index, grouped)):
                at = at if self._full else arith.minui(at, end)
                at = arith.addi(at, first) if plane.index else at
                registers.flat[k] = vector.load(kind, ref, [at])
            return fragments.FragmentedArray(
                _registers=registers, _layout=layout, _is_signed=utils.is_signed(dtype)
            )

        return load(ref, index)

    def store(self, ref: Ref, index: Array, x: Array, plane: Plane = WHOLE) -> None:
        count = ref.shape[0] // plane.count
        grouped = count != self._counts[False]
        layout = self.struct(x.dtype, grouped=grouped).layout
        types = plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), layout

        @plgpu.inline_mgpu(arg_types=types)
        def store(context: _Value, ref: _Value, index: _Value, x: _Value) -> None:
            first = _number(plane.index * count)
            for k, place in enumerate(self._places(index, grouped)):
                at = arith.addi(place, first) if plane.index else place
                if self._full:
                    vector.store(x.registers.flat[k], ref, [at])
                    continue
                less = arith.CmpIPredicate.ult
                inside = scf.IfOp(arith.cmpi(less, place, _number(count)))
                with ir.InsertionPoint(inside.then_block):
                    vector.store(x.registers.flat[k], ref, [at])
                    scf.yield_([])

        store(ref, index, x)

    def _places(self, index: _Value, grouped: bool) -> Iterator[_Value]:
        """Yields where the vectors of this thread start, or the groups that it shares."""
        to_index = functools.partial(arith.index_castui, ir.IndexType.get())
        thread, index = to_index(utils.thread_idx()), to_index(index.registers.item())
        rows, width = self._shapes[False]
        if grouped:
            total = rows
            first = arith.divui(thread, _number(width // self._vector))
        else:
            total = rows * width
            first = arith.muli(thread, _number(self._vector))
        first = arith.addi(first, arith.muli(index, _number(total)))
        for k in range(self._repeats):
            yield arith.addi(first, _number(k * total // self._repeats))


def _number(value: int) -> _Value:
    return utils.c(value, ir.IndexType.get())


class _Block(Block):
    """A block in registers. Roots and reciprocals are one instruction, to about one ulp.

    Subnormal elements count as zero; subnormal scales, of which there are few, do not.
    """

    in_registers = True

    def __init__(self, view: _View) -> None:
        self._view = view

    def root_peak(self, x: Array, root: Array) -> Array:
        return self.peak(root)

    def spread(self, per_group: Array) -> Array:
        struct = self._view.struct(per_group.dtype, grouped=False)
        each = lax.broadcast_in_dim(per_group, struct.shape, (0,))
        return plgpu.layout_cast(each, struct.layout)

    def sqrt(self, x: Array) -> Array:
        return self._approximate("sqrt", x)

    def reciprocal(self, x: Array) -> Array:
        return self._approximate("rcp", x)

    def multiply_add(self, x: ArrayLike, y: Array, z: ArrayLike) -> Array:
        return self._each(lambda y, x, z: llvm.intr_fma(x, y, z), y, x, z)

    def sign(self, x: Array) -> Array:
        # Mosaic's own is `copysign(1, x)` unless x is zero, also of nan (jax 0.11.2, 0.12.0).
        return jnp.where(x == x, jnp.sign(x), x)

    def rounded(self, x: Array, dtype: np.dtype) -> Array:
        return x.astype(dtype).astype(x.dtype)  # both casts are kept

    def _approximate(self, name: str, x: Array) -> Array:
        flush = ".ftz" if x.ndim == 2 else ""
        return self._each(_assembly(f"{name}.approx{flush}.f32 $0, $1;"), x)

    def _each(self, operation: _Operation, x: Array, *others: ArrayLike) -> Array:
        """Applies an operation of MLIR to vectors of f32 numbers, and to scalars."""
        struct = self._view.struct(jnp.float32, grouped=x.ndim == 1)
        scalar = plgpu.Layout.WG_SPLAT(())
        numbers = [jnp.asarray(other, jnp.float32) for other in others]
        layouts = [struct.layout if number.ndim else scalar for number in numbers]

        @plgpu.inline_mgpu(arg_types=(struct.layout, *layouts), return_type=struct)
        def call(context: _Value, x: _Value, *others: _Value) -> _Value:
            return x._pointwise(operation, *others)

        return call(x, *numbers)


def _assembly(instruction: str) -> _Operation:
    """Returns an operation on vectors that is one instruction for each number."""

    def apply(numbers: _Value) -> _Value:
        f32, i64 = ir.F32Type.get(), ir.IntegerType.get_signless(64)
        result: _Value = numbers
        for k in range(ir.VectorType(numbers.type).shape[0]):
            at = ir.DenseI64ArrayAttr.get([k])
            x = vector.extract(numbers, dynamic_position=[], static_position=at)
            x: _Value = llvm.inline_asm(f32, [x], instruction, "=f,f")
            result = llvm.insertelement(result, x, utils.c(k, i64))
        return result

    return apply
