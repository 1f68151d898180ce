"""The grouped matmul as a JAX primitive, in Mosaic GPU kernels through Pallas for Hopper.

There are three kinds. With rows x (m, k), y (m, n), each in one of the groups g, and a
matrix w (groups, k, n) for each group, they are

    rows     x · w[g]           (m, n)
    turned   y · w[g]ᵀ          (m, k)
    sums     Σ xᵀ y over g      (groups, k, n)

Each is linear in both operands, and the derivatives of each are the other two. Rows behind
the last group have none: they give zeros, and are in no sum. Where XLA would have to split
the kernel between devices, and elsewhere than on CUDA, it is `plain`.

A program of a kernel is a warpgroup that computes block after block of the result, whose
operands the TMA unit loads ahead. Unlike in JAX's own kernels of this kind, blocks of rows
start at their group, rounded down to the 8 rows that the unit loads together, so that a
group of whole blocks needs no others; blocks without rows are skipped; and values of other
groups are never multiplied, for they may be nan.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._compat import as_unvarying, convert_dtype
from mpx._jax._private import private
from mpx._ops import _primitives as ops
from mpx._ops._experts._plain import ALIGNMENT, Kind, group_ends, plain, row_blocks
from mpx._program._queries import GROUPED

_Value = Any
"""A reference or a value inside a kernel of Pallas."""
_jax = pl = plgpu = private("grouped")


class Blocks(NamedTuple):
    """The part of a product that one warpgroup computes at a time."""

    rows: int  # Rows of the result
    columns: int  # Columns of the result
    summed: int  # Length of the sum that is loaded at a time
    steps: int  # How many such parts are loaded ahead
    width: int  # How many blocks of columns are computed before the next rows


# With these, 16384 rows times 32 matrices of 2048 × 1024 take 0.13 ms forward and 0.44 with
# both gradients in bf16 (H200, jax 0.11.2, `python benchmarks/experts.py`); one dense matmul
# of the same work takes 0.11 and 0.38.
BLOCKS = Blocks(128, 128, 64, 4, 8)
# Columns of a result, and rows of one that is a sum, are multiples of this.
SMALLEST = 64
# H100 and H200 have this many; a smaller GPU runs the rest after the first.
PROGRAMS = 132


def multiply_rows(
    x: Array,
    w: Array,
    sizes: Array,
    *,
    turned: bool,
    dtype: np.dtype,
    blocks: Blocks,
    **options: _Value,
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

                specs = [
                    _block((rows, summed), lambda k: (0, k)),
                    _block((columns, summed), lambda k: (j, k))
                    if turned
                    else _block((summed, columns), lambda k: (k, j)),
                ]

                def multiply(total: _Value) -> _Value:
                    @pl.when(group < groups)
                    def _() -> None:
                        plgpu.emit_pipeline(
                            lambda _, x, w: plgpu.wgmma(
                                total, x, w.transpose((1, 0)) if turned else w
                            ),
                            grid=(k // summed,),
                            in_specs=specs,
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
    return _kernel(body, out, **options)(*table, x, w)


def sum_rows(
    x: Array,
    y: Array,
    sizes: Array,
    *,
    dtype: np.dtype,
    blocks: Blocks,
    **options: _Value,
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
                            _block((summed, rows), lambda k: (k, i)),
                            _block((summed, columns), lambda k: (k, j)),
                        ],
                        max_concurrent_steps=steps,
                        # What lies behind the last row is not loaded, but zero.
                    )(x_ref.at[pl.ds(base, m)], y_ref.at[pl.ds(base, m)])

                return total[...]

            out = pl.run_scoped(multiply, plgpu.ACC((rows, columns)))
            down, across = pl.ds(i * rows, rows), pl.ds(j * columns, columns)
            _store(out, out_ref.at[group, down, across])

    out = jax.ShapeDtypeStruct((groups, k, n), dtype)
    return _kernel(body, out, **options)(group_ends(sizes, m), x, y)


_block = functools.partial(plgpu.BlockSpec, delay_release=1)


def _clear_rows(ref: _Value, begin: _Value, start: _Value, end: _Value) -> None:
    """Sets the rows of a block outside a group to zero; `begin` is its first row."""
    # A product with a mask would not do: the values there may be nan.
    row = lax.broadcasted_iota(jnp.int32, ref.shape, 0)
    row = begin + plgpu.layout_cast(row, plgpu.Layout.WGMMA)
    inside = (row >= start) & (row < end)
    ref[...] = jnp.where(inside, ref[...], jnp.zeros((), ref.dtype))


def _store(out: Array, ref: _Value, copy: _Value = None) -> None:
    """Writes a block to where `ref` is, or as `copy` does."""

    @functools.partial(pl.run_scoped, staged=plgpu.SMEM(out.shape, ref.dtype))
    def _(staged: _Value) -> None:
        staged[...] = out.astype(ref.dtype)
        plgpu.commit_smem()
        (copy or plgpu.copy_smem_to_gmem)(staged, ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _store_some(
    out: Array, ref: _Value, first: _Value, begin: _Value, count: _Value
) -> None:
    """Writes `count` rows of a block, from row `begin` on, in pieces of 1, 2, 4, … rows."""

    # The TMA unit needs to know the size of each piece when the kernel is compiled.
    def copy(staged: _Value, ref: _Value) -> None:
        at, length = begin, out.shape[0] // 2
        while length:

            @pl.when(count & length != 0)
            def _(at: _Value = at, length: int = length) -> None:
                piece = ref.at[pl.ds(first + at, length)]
                plgpu.copy_smem_to_gmem(staged.at[pl.ds(at, length)], piece)

            at += count & length
            length //= 2

    _store(out, ref, copy)


def _kernel(
    body: _Value, out: _Value, programs: int = PROGRAMS, interpret: _Value = False
) -> _Value:
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


# --- The primitive --------------------------------------------------------------------

# By kind: the kinds of the derivatives with respect to both operands, and which of
# (cotangent, other operand) comes first in each.
_TRANSPOSED: dict[str, tuple[tuple[Kind, bool], tuple[Kind, bool]]] = {
    "rows": (("turned", True), ("sums", False)),
    "turned": (("rows", True), ("sums", True)),
    "sums": (("turned", False), ("rows", False)),
}


def grouped_matmul(
    a: Array, b: Array, sizes: Array, *, kind: Kind, dtype: np.dtype
) -> Array:
    """Returns a grouped matmul; sums are f32."""
    operands = ops.varying_alike([a, b, sizes])
    return grouped_p.bind(*operands, kind=kind, dtype=np.dtype(dtype))


def _by_kernel(
    a: Array, b: Array, sizes: Array, *, kind: str, dtype: np.dtype
) -> Array:
    a, b, sizes = (as_unvarying(x) for x in (a, b, sizes))
    blocks = BLOCKS  # that divide the result
    if b.shape[2 if kind == "rows" else 1] % blocks.columns:
        blocks = blocks._replace(columns=SMALLEST)
    options = {"dtype": dtype, "blocks": blocks}
    if kind != "sums":
        return multiply_rows(a, b, sizes, turned=kind == "turned", **options)
    if a.shape[1] % blocks.rows:
        options["blocks"] = blocks._replace(rows=SMALLEST)
    return sum_rows(a, b, sizes, **options)


def _type(a: PyTree, b: PyTree, sizes: PyTree, *, kind: str, dtype: np.dtype) -> PyTree:
    columns = b.shape[2 if kind == "rows" else 1]
    rows = (*sizes.shape, a.shape[1]) if kind == "sums" else a.shape[:1]
    return ops.typed_like(a, (*rows, columns), dtype)


def _jvp(primals: PyTree, tangents: PyTree, **params: PyTree) -> tuple[Array, PyTree]:
    out = grouped_p.bind(*primals, **params)
    parts = [
        grouped_p.bind(*primals[:i], x, *primals[i + 1 :], **params)
        for i, x in enumerate(tangents[:2])
        if type(x) is not _jax.Zero
    ]
    zero = ops.zero_tangent(_jax, out)
    return out, functools.reduce(lax.add, parts) if parts else zero


def _transpose(
    cotangent: PyTree, a: PyTree, b: PyTree, sizes: Array, *, kind: str, dtype: np.dtype
) -> list[PyTree]:
    grads: list[PyTree] = [None, None, None]
    if type(cotangent) is not _jax.Zero:
        side = 0 if _jax.is_undefined_primal(a) else 1
        mine, other = (a, b) if side == 0 else (b, a)
        other_kind, cotangent_first = _TRANSPOSED[kind][side]
        # In f32 only if the result was: then its operands are still of 16 bits.
        pair = convert_dtype(cotangent, other.dtype), other
        operands = *(pair if cotangent_first else pair[::-1]), sizes
        options = {"kind": other_kind, "dtype": mine.aval.dtype}
        grads[side] = grouped_p.bind(*operands, **options)
    return grads


def _is_local(context: Any) -> bool:
    """Returns whether a program is lowered for one device, or for the shards of each."""
    axes = context.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is None:
        return getattr(axes, "num_devices", 1) == 1
    return axes.mesh.size == 1 or {*manual} == {*axes.mesh.axis_names}


def _on_cuda(context: Any, *operands: object, **params: object) -> object:
    run = _by_kernel if _is_local(context) else plain
    lower = _jax.lower_fun(run, multiple_results=False)
    return lower(context, *operands, **params)


grouped_p = ops.define(_jax, GROUPED, _type, plain, ops.run_each, several=False)
_jax.register_lowering(grouped_p, _on_cuda, platform="cuda")
_jax.primitive_jvps[grouped_p] = _jvp
_jax.primitive_transposes[grouped_p] = _transpose
