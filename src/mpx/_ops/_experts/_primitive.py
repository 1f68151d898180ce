"""The grouped matmul as a JAX primitive, with rules for derivatives and `vmap`.

There are three kinds. With rows x (m, k), y (m, n), each in one of the groups g, and a
matrix w (groups, k, n) for each group, they are

    rows     x · w[g]           (m, n)
    turned   y · w[g]ᵀ          (m, k)
    sums     Σ xᵀ y over g      (groups, k, n)

Each is linear in both operands, and the derivatives of each are the other two. Rows behind
the last group have none: they give zeros, and are in no sum.

On CUDA it is a kernel, unless XLA would have to split that between devices; elsewhere it is
`plain`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._jax._compat import as_unvarying, convert_dtype
from mpx._jax._private import private
from mpx._ops._experts._plain import ROWS, SMALLEST, SUMS, Blocks, Kind, plain
from mpx._ops._primitives import define, run_each, varying_alike, zero_tangent
from mpx._program._queries import GROUPED

_jax = private("grouped")
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
    operands = varying_alike([a, b, sizes])
    return grouped_p.bind(*operands, kind=kind, dtype=np.dtype(dtype))


def _kernel(a: Array, b: Array, sizes: Array, *, kind: str, dtype: np.dtype) -> Array:
    from mpx._ops._experts import _mosaic

    a, b, sizes = (as_unvarying(x) for x in (a, b, sizes))
    if kind == "sums":
        rows, columns = a.shape[1], b.shape[1]
        blocks = _fitting(SUMS, rows, columns)
        return _mosaic.sum_rows(a, b, sizes, dtype=dtype, blocks=blocks)
    turned = kind == "turned"
    columns = b.shape[1] if turned else b.shape[2]
    blocks = _fitting(ROWS, ROWS.rows, columns)
    return _mosaic.multiply_rows(a, b, sizes, turned=turned, dtype=dtype, blocks=blocks)


def _fitting(blocks: Blocks, rows: int, columns: int) -> Blocks:
    """Returns blocks that divide a result."""
    return blocks._replace(
        rows=blocks.rows if rows % blocks.rows == 0 else SMALLEST,
        columns=blocks.columns if columns % blocks.columns == 0 else SMALLEST,
    )


# --- The primitive --------------------------------------------------------------------


def _type(a: PyTree, b: PyTree, sizes: PyTree, *, kind: str, dtype: np.dtype) -> PyTree:
    if kind == "sums":
        shape = (sizes.shape[0], a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], b.shape[2 if kind == "rows" else 1])
    sharding = NamedSharding(a.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return a.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[PyTree], **params: PyTree
) -> tuple[Array, PyTree]:
    a, b, sizes = primals
    out = grouped_p.bind(a, b, sizes, **params)
    parts = [
        grouped_p.bind(*pair, sizes, **params)
        for tangent, pair in (
            (tangents[0], (tangents[0], b)),
            (tangents[1], (a, tangents[1])),
        )
        if type(tangent) is not _jax.Zero
    ]
    if not parts:
        return out, zero_tangent(_jax, out)
    return out, functools.reduce(lax.add, parts)


def _transpose(
    cotangent: PyTree, a: PyTree, b: PyTree, sizes: Array, *, kind: str, dtype: np.dtype
) -> list[PyTree]:
    side = 0 if _jax.is_undefined_primal(a) else 1
    mine, other = (a, b) if side == 0 else (b, a)
    if type(cotangent) is _jax.Zero:
        return [None, None, None]
    other_kind, cotangent_first = _TRANSPOSED[kind][side]
    # In f32 only if the result was: then its operands are still of 16 bits.
    pair = convert_dtype(cotangent, other.dtype), other
    grad = grouped_p.bind(
        *(pair if cotangent_first else pair[::-1]),
        sizes,
        kind=other_kind,
        dtype=mine.aval.dtype,
    )
    return [grad, None, None] if side == 0 else [None, grad, None]


def _is_local(context: Any) -> bool:
    """Returns whether a program is lowered for one device, or for the shards of each."""
    axes = context.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is None:
        return getattr(axes, "num_devices", 1) == 1
    return axes.mesh.size == 1 or {*manual} == {*axes.mesh.axis_names}


_slow = _jax.lower_fun(plain, multiple_results=False)
_fast = _jax.lower_fun(_kernel, multiple_results=False)


def _on_cuda(context: Any, *operands: object, **params: object) -> object:
    lower = _fast if _is_local(context) else _slow
    return lower(context, *operands, **params)


grouped_p = define(_jax, GROUPED, _type, plain, multiple_results=False)
_jax.register_lowering(grouped_p, _on_cuda, platform="cuda")
_jax.primitive_jvps[grouped_p] = _jvp
_jax.primitive_transposes[grouped_p] = _transpose
_jax.primitive_batchers[grouped_p] = lambda operands, dims, **params: (
    run_each(grouped_p, operands, dims, **params),
    0,
)
