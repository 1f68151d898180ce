"""Grouped matmuls as Mosaic GPU kernels through Pallas, for Hopper.

A program is a warpgroup that computes block after block of the result. As in JAX's own
kernels of this kind, blocks of operands are loaded ahead by the TMA unit. Unlike there,
blocks of rows start at their group, rounded down to the 8 rows that the unit loads
together, so that a group of whole blocks needs no others; blocks without rows are
skipped; rows behind the last group become zeros; and values of other groups are never
multiplied, for they may be nan.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._jax._private import private
from mpx._ops._experts._plain import ALIGNMENT, PROGRAMS, Blocks, group_ends, row_blocks

_Value = Any
"""A reference or a value inside a kernel of Pallas."""
pl = plgpu = private("grouped")


def multiply_rows(
    x: Array,
    w: Array,
    sizes: Array,
    *,
    turned: bool,
    dtype: np.dtype,
    blocks: Blocks,
    programs: int = PROGRAMS,
    interpret: _Value = False,
) -> Array:
    """Returns each row times the matrix of its group, and zeros for rows without one."""
    (m, k), groups = x.shape, len(w)
    n = w.shape[1] if turned else w.shape[2]
    rows, columns, summed, steps, width = blocks
    table = row_blocks(sizes, m, rows)
    grid = table[0].size, n // columns

    def body(*refs: _Value) -> None:
        groups_ref, firsts_ref, begins_ref, counts_ref, x_ref, w_ref, out_ref = refs

        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="program")
        def _(loop: _Value) -> None:
            i, j = plgpu.planar_snake(loop.index[0], grid, 1, width)
            count = counts_ref[i]

            @pl.when(count > 0)
            def _() -> None:
                group = groups_ref[i]
                first = pl.multiple_of(firsts_ref[i], ALIGNMENT)

                def multiply(total: _Value) -> _Value:
                    @pl.when(group < groups)
                    def _() -> None:
                        plgpu.emit_pipeline(
                            lambda _, x, w: plgpu.wgmma(
                                total, x, w.transpose((1, 0)) if turned else w
                            ),
                            grid=(k // summed,),
                            in_specs=[
                                plgpu.BlockSpec(
                                    (rows, summed), lambda k: (0, k), delay_release=1
                                ),
                                plgpu.BlockSpec(
                                    (columns, summed), lambda k: (j, k), delay_release=1
                                )
                                if turned
                                else plgpu.BlockSpec(
                                    (summed, columns), lambda k: (k, j), delay_release=1
                                ),
                            ],
                            max_concurrent_steps=steps,
                        )(x_ref.at[pl.ds(first, rows)], w_ref.at[group])

                    return total[...]

                out = pl.run_scoped(multiply, plgpu.ACC((rows, columns)))
                at = out_ref.at[:, pl.ds(j * columns, columns)]

                @pl.when(count == rows)
                def _() -> None:
                    _store(out, at.at[pl.ds(first, rows)])

                @pl.when(count < rows)
                def _() -> None:
                    _store_some(out, at, first, begins_ref[i], count)

    out = jax.ShapeDtypeStruct((m, n), dtype)
    return _kernel(body, out, programs, interpret)(*table, x, w)


def sum_rows(
    x: Array,
    y: Array,
    sizes: Array,
    *,
    dtype: np.dtype,
    blocks: Blocks,
    programs: int = PROGRAMS,
    interpret: _Value = False,
) -> Array:
    """Returns the sum of the outer products of the rows of each group."""
    (m, k), n, groups = x.shape, y.shape[1], sizes.size
    rows, columns, summed, steps, width = blocks
    grid = k // rows, n // columns

    def body(*refs: _Value) -> None:
        ends_ref, x_ref, y_ref, out_ref = refs

        @plgpu.nd_loop((groups, grid[0] * grid[1]), collective_axes="program")
        def _(loop: _Value) -> None:
            group = loop.index[0]
            i, j = plgpu.planar_snake(loop.index[1], grid, 1, width)
            before = ends_ref[jnp.maximum(group - 1, 0)]
            start, end = jnp.where(group == 0, 0, before), ends_ref[group]
            base = pl.multiple_of(start // ALIGNMENT * ALIGNMENT, ALIGNMENT)

            def multiply(total: _Value) -> _Value:
                def step(index: _Value, x: _Value, y: _Value) -> None:
                    begin = base + index[0] * summed

                    @pl.when((begin < start) | (begin + summed > end))
                    def _() -> None:
                        _clear_rows(x, begin, start, end)
                        _clear_rows(y, begin, start, end)
                        plgpu.commit_smem()

                    plgpu.wgmma(total, x.transpose((1, 0)), y)

                @pl.when(end > start)
                def _() -> None:
                    plgpu.emit_pipeline(
                        step,
                        grid=(lax.div(end - base + (summed - 1), summed),),
                        in_specs=[
                            plgpu.BlockSpec(
                                (summed, rows), lambda k: (k, i), delay_release=1
                            ),
                            plgpu.BlockSpec(
                                (summed, columns), lambda k: (k, j), delay_release=1
                            ),
                        ],
                        max_concurrent_steps=steps,
                        # What lies behind the last row is not loaded, but zero.
                    )(x_ref.at[pl.ds(base, m)], y_ref.at[pl.ds(base, m)])

                return total[...]

            out = pl.run_scoped(multiply, plgpu.ACC((rows, columns)))
            down, across = pl.ds(i * rows, rows), pl.ds(j * columns, columns)
            _store(out, out_ref.at[group, down, across])

    out = jax.ShapeDtypeStruct((groups, k, n), dtype)
    return _kernel(body, out, programs, interpret)(group_ends(sizes, m), x, y)


def _clear_rows(ref: _Value, begin: _Value, start: _Value, end: _Value) -> None:
    """Sets the rows of a block outside a group to zero; `begin` is its first row.

    A product with a mask would not do: the values there may be nan.
    """
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    row = begin + plgpu.layout_cast(row, plgpu.Layout.WGMMA)
    inside = (row >= start) & (row < end)
    ref[...] = jnp.where(inside, ref[...], jnp.zeros((), ref.dtype))


def _store(out: Array, ref: _Value) -> None:
    """Writes a whole block."""

    @functools.partial(pl.run_scoped, staged=plgpu.SMEM(out.shape, ref.dtype))
    def _(staged: _Value) -> None:
        staged[...] = out.astype(ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_some(
    out: Array, ref: _Value, first: _Value, begin: _Value, count: _Value
) -> None:
    """Writes `count` rows of a block, from row `begin` on, in pieces of 1, 2, 4, … rows.

    The TMA unit needs to know the size of each piece when the kernel is compiled.
    """

    @functools.partial(pl.run_scoped, staged=plgpu.SMEM(out.shape, ref.dtype))
    def _(staged: _Value) -> None:
        staged[...] = out.astype(ref.dtype)
        plgpu.commit_smem()
        at, length = begin, out.shape[0] // 2
        while length:

            @pl.when(count & length != 0)
            def _(at: _Value = at, length: int = length) -> None:
                piece = ref.at[pl.ds(first + at, length)]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(at, length)], piece)

            at += count & length
            length //= 2
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _kernel(body: _Value, out: _Value, programs: int, interpret: _Value) -> _Value:
    body.__name__ = "mpx_grouped_matmul"
    semantics = plgpu.LoweringSemantics.Warpgroup
    return plgpu.kernel(
        body,
        out_type=out,
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        interpret=interpret,
    )
