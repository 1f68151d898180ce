"""Sums over devices of gradients that each device has of its own part of a batch.

Under automatic sharding such gradients are stacked along a first axis that is sharded over
the axes of the batch. How a parameter is sharded only XLA knows; it tells while it partitions
the program, and so the sum is written there, by `custom_partitioning`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._formats import FORMATS
from mpx._private import private
from mpx._wire._options import EIGHT_BITS, F32, Shards

_BLOCK = 128
_SMALL = 2**12
_E4M3 = jnp.float8_e4m3fn


# --- on one device, with the others ---------------------------------------------------


def local_sum(
    x: Array, axes: Sequence[str], dtype: np.dtype | str, scatter: int | None = None
) -> Array:
    """Returns the sum over devices of their arrays, f32, sent in another dtype.

    Args:
        x: The array of one device, f32.
        axes: The axes of the devices, whose names are bound.
        dtype: The dtype that is sent; `"e4m3"` sends blocks and sums them in f32.
        scatter: If given, the axis of which each device gets its own part of the sum.
    """
    axes = tuple(axes)
    if dtype == EIGHT_BITS:
        return _sum_8_bits(x, axes, scatter)
    dtype = np.dtype(dtype)

    def total(x: Array) -> Array:
        if scatter is None:
            return lax.psum(x, axes)
        return lax.psum_scatter(x, axes, scatter_dimension=scatter, tiled=True)

    if dtype.itemsize >= x.dtype.itemsize:
        return total(x)
    low = x.astype(dtype)
    # CPUs have no sums of 16 bits.
    out = lax.platform_dependent(
        low,
        cpu=lambda x: total(x.astype(F32)).astype(dtype),
        default=total,
    )
    return out.astype(F32)


def mean_8_bits(x: Array, axis_name: str | tuple[str, ...]) -> Array:
    """Returns the mean over devices, f32, of arrays that are sent as 8-bit blocks."""
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    return local_sum(x.astype(F32), axes, EIGHT_BITS) / lax.axis_size(axes)


def _sum_8_bits(x: Array, axes: tuple[str, ...], scatter: int | None) -> Array:
    """Sums blocks of 128 numbers that are sent as e4m3 codes, each with an f32 scale.

    The error of each device's number is half an ulp of e4m3 relative to the largest of its
    block; the sum itself is f32. Without `scatter` the sums go back in bf16, which rounds
    once more: 8 bits again would double the error.
    """
    count = lax.axis_size(axes)
    parts = x.reshape(1, -1) if scatter is None else jnp.moveaxis(x, scatter, 0)
    # One part for each device, made whole blocks by zeros.
    if scatter is None:
        parts = _padded(parts, count * _BLOCK).reshape(count, -1)
        sizes = (parts.shape[1],)
    else:
        sizes = (parts.shape[0] // count, *parts.shape[1:])
        parts = _padded(parts.reshape(count, -1), _BLOCK)
    blocks = parts.reshape(count, -1, _BLOCK)
    codes, scales = (
        lax.all_to_all(a, axes, 0, 0, tiled=True) for a in _to_blocks(blocks)
    )
    total = jnp.sum(codes.astype(F32) * scales, axis=0).reshape(-1)
    total = total[: math.prod(sizes)].reshape(sizes)
    if scatter is not None:
        return jnp.moveaxis(total, 0, scatter)
    total = lax.all_gather(total.astype(jnp.bfloat16), axes, tiled=True)
    return total[: x.size].reshape(x.shape).astype(F32)


def _padded(x: Array, multiple: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)))


def _to_blocks(blocks: Array) -> tuple[Array, Array]:
    """Returns codes and scales; a block with an inf or a nan becomes nan."""
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = jnp.maximum(largest, np.float32(1e-30)) / np.float32(FORMATS["e4m3"].max)
    scale = jnp.where(largest < jnp.inf, scale, jnp.nan)
    return (blocks / scale).astype(_E4M3), scale


# --- of stacked arrays ----------------------------------------------------------------


def sum_of_shards(x: Array, shards: Shards, dtype: np.dtype | str) -> Array:
    """Returns the sum over the first axis of an array, sharded as whatever reads it.

    Args:
        x: What each device has, stacked, f32.
        shards: The axes over which its first axis is sharded.
        dtype: The dtype that is sent.
    """
    axes, rank = shards.axes, x.ndim - 1
    names = private("kernels")
    if x.size < _SMALL * x.shape[0] or names is None:
        return jnp.sum(x, axis=0)

    def partition(mesh: Any, args: Any, result: Any) -> tuple[Any, ...]:
        spec = [_names(entry) for entry in result.sharding.spec]
        spec += [()] * (rank - len(spec))
        shape = args[0].shape[1:]
        whole = [
            s == axes and n % shards.size == 0 for s, n in zip(spec, shape, strict=True)
        ]
        scatter = whole.index(True) if any(whole) else None
        # What is sharded over other axes stays so.
        full = [tuple(name for name in entry if name not in axes) for entry in spec]
        out = spec if scatter is not None else full
        given = NamedSharding(mesh, _spec([axes, *full]))

        def run(x: Array) -> Array:
            return local_sum(x[0], axes, dtype, scatter)

        return mesh, run, NamedSharding(mesh, _spec(out)), (given,)

    letters = " ".join(f"d{i}" for i in range(rank))
    call = names.custom_partitioning(lambda x: jnp.sum(x, axis=0))
    call.def_partition(
        partition,
        infer_sharding_from_operands=lambda mesh, args, result: NamedSharding(
            mesh, PartitionSpec(*[None] * rank)
        ),
        sharding_rule=f"n {letters} -> {letters}",
    )
    return call(x)


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


def _spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in entries))


def sharded_alike(x: Array, like: Any) -> Array:
    """Returns an array that XLA shards as another one of its shape.

    Shardings spread through operations on elements. No number is above infinity.
    """
    return lax.select(like > jnp.inf, jnp.zeros_like(x), x)


def pin_shards(tree: PyTree, shards: Shards) -> Any:
    """Returns stacked arrays with the first axis sharded, and the others as they are."""

    def pin(x: Array) -> Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        sharding = NamedSharding(shards.mesh, PartitionSpec(shards.axes, *rest))
        return lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(pin, tree)


def largest_of_shards(tree: PyTree) -> Any:
    """Returns the maxima over the first axis of all arrays, by one reduction."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    flat = jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)
    ends = np.cumsum([math.prod(x.shape[1:]) for x in leaves])
    parts = jnp.split(jnp.max(flat, axis=0), ends[:-1])
    shapes = [x.shape[1:] for x in leaves]
    return structure.unflatten(map(jnp.reshape, parts, shapes))
