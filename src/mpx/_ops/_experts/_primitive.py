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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._jax._compat import (
    Primitive,
    as_unvarying,
    as_varying,
    convert_dtype,
    varying_axes,
)
from mpx._jax._private import private
from mpx._ops._experts._plain import ROWS, ROWS_FP8, SMALLEST, SUMS, Blocks, Kind, plain
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
    operands = [a, b, sizes]
    names = sorted(frozenset().union(*(varying_axes(jax.typeof(x)) for x in operands)))
    # Marked here, so that the transpose of the mark sums gradients over devices.
    operands = [as_varying(x, names) for x in operands] if names else operands
    return grouped_p.bind(*operands, kind=kind, dtype=np.dtype(dtype))


def _kernel(a: Array, b: Array, sizes: Array, *, kind: str, dtype: np.dtype) -> Array:
    from mpx._ops._experts import _mosaic

    a, b, sizes = (as_unvarying(x) for x in (a, b, sizes))
    if kind == "sums":
        rows, columns = a.shape[1], b.shape[1]
        blocks = _fitting(SUMS, rows, columns)
        return _mosaic.sum_rows(a, b, sizes, dtype=dtype, blocks=blocks)
    turned = kind == "turned"
    tuned = ROWS_FP8 if a.dtype.itemsize == 1 else ROWS
    columns = b.shape[1] if turned else b.shape[2]
    blocks = _fitting(tuned, tuned.rows, columns)
    return _mosaic.multiply_rows(a, b, sizes, turned=turned, dtype=dtype, blocks=blocks)


def _fitting(blocks: Blocks, rows: int, columns: int) -> Blocks:
    """Returns blocks that divide a result."""
    return blocks._replace(
        rows=blocks.rows if rows % blocks.rows == 0 else SMALLEST,
        columns=blocks.columns if columns % blocks.columns == 0 else SMALLEST,
    )


# --- The primitive --------------------------------------------------------------------


def _type(a: Any, b: Any, sizes: Any, *, kind: str, dtype: np.dtype) -> Any:
    if kind == "sums":
        shape = (sizes.shape[0], a.shape[1], b.shape[1])
    else:
        shape = (a.shape[0], b.shape[2 if kind == "rows" else 1])
    sharding = NamedSharding(a.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return a.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[Array, Any]:
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
        return out, _jax.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, parts)


def _transpose(
    cotangent: Any, a: Any, b: Any, sizes: Array, *, kind: str, dtype: np.dtype
) -> list[Any]:
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


def _batched(
    operands: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Array, int]:
    """Maps the operation by running it once for each element."""
    mapped = [
        jnp.moveaxis(x, d, 0)
        for x, d in zip(operands, dims, strict=True)
        if d is not None
    ]

    def each(slices: list[Array]) -> Array:
        given = iter(slices)
        args = [
            x if d is None else next(given) for x, d in zip(operands, dims, strict=True)
        ]
        return grouped_p.bind(*args, **params)

    return lax.map(each, mapped), 0


def _is_local(context: Any) -> bool:
    """Returns whether a program is lowered for one device, or for the shards of each."""
    axes = context.module_context.axis_context
    manual = getattr(axes, "manual_axes", None)
    if manual is None:
        return getattr(axes, "num_devices", 1) == 1
    return axes.mesh.size == 1 or {*manual} == {*axes.mesh.axis_names}


def _define() -> Primitive:
    primitive = Primitive(GROUPED)

    @functools.lru_cache(maxsize=256)
    def compiled(**params: Any) -> Callable[..., Any]:
        return jax.jit(functools.partial(primitive.bind, **params))

    slow = _jax.lower_fun(plain, multiple_results=False)
    fast = _jax.lower_fun(_kernel, multiple_results=False)

    def on_cuda(context: Any, *operands: Any, **params: Any) -> Any:
        lower = fast if _is_local(context) else slow
        return lower(context, *operands, **params)

    primitive.def_impl(lambda *operands, **params: compiled(**params)(*operands))
    primitive.def_abstract_eval(_type)
    _jax.primitive_jvps[primitive] = _jvp
    _jax.primitive_transposes[primitive] = _transpose
    _jax.primitive_batchers[primitive] = _batched
    _jax.register_lowering(primitive, slow)
    _jax.register_lowering(primitive, on_cuda, platform="cuda")
    return primitive


grouped_p = _define()
