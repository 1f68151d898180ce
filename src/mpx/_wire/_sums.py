"""Sums over devices of gradients that each device has of its own part of a batch.

Under automatic sharding such gradients are stacked along a first axis that is sharded over
the axes of the batch. How a parameter is sharded only XLA knows; it tells while it partitions
the program, and so the sum is written there, by `custom_partitioning`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._casting._reduction import EIGHT_BITS, F32, Shards
from mpx._jax._formats import FORMATS
from mpx._jax._private import private
from mpx._jax._sharding import Parts, axes_of, partitioned, spec_of, unpadded

_BLOCK = 128
_SMALL = 2**12
_E4M3 = jnp.float8_e4m3fn


# --- on one device, with the others ---------------------------------------------------


def local_sum(
    x: Array, axes: Sequence[str], dtype: np.dtype | str, scatter: int | None = None
) -> Array:
    """Returns the sum over devices of their arrays, f32, sent in another dtype.

    `dtype` is sent; `"e4m3"` sends blocks and sums them in f32. `scatter` is the axis of
    which each device gets its own part of the sum.
    """
    axes = tuple(axes)
    if dtype == EIGHT_BITS:
        return sum_8_bits(x, axes, scatter)[0]
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


def sum_8_bits(
    x: Array, axes: tuple[str, ...], scatter: int | None = None
) -> tuple[Array, Array]:
    """Sums blocks of 128 numbers that are sent as e4m3 codes, each with an f32 scale.

    The error of each device's number is half an ulp of e4m3 relative to the largest of its
    block; the sum itself is f32. Without `scatter` the sums go back in bf16, which rounds
    once more: 8 bits again would double the error.

    The second result is what the roundings have taken: over the devices, the sum and these
    rests add up to the sum of `x`, up to roundings of f32.
    """
    count = lax.axis_size(axes)
    moved = x.reshape(-1) if scatter is None else jnp.moveaxis(x, scatter, 0)
    # One part for each device, made whole blocks by zeros.
    if scatter is None:
        parts = _padded(moved[None], count * _BLOCK).reshape(count, -1)
        sizes = (parts.shape[1],)
    else:
        sizes = (moved.shape[0] // count, *moved.shape[1:])
        parts = _padded(moved.reshape(count, -1), _BLOCK)
    blocks = parts.reshape(count, -1, _BLOCK)
    codes, scales = _to_blocks(blocks)
    rest = (blocks - codes.astype(F32) * scales).reshape(parts.shape)
    codes, scales = (lax.all_to_all(a, axes, 0, 0, tiled=True) for a in (codes, scales))
    total = jnp.sum(codes.astype(F32) * scales, axis=0).reshape(-1)
    total = total[: math.prod(sizes)].reshape(sizes)
    if scatter is not None:
        rest = rest[:, : math.prod(sizes)].reshape(moved.shape)
        return jnp.moveaxis(total, 0, scatter), jnp.moveaxis(rest, 0, scatter)
    low = total.astype(jnp.bfloat16)
    # The device that has summed a part knows what its last rounding takes.
    rest = rest.at[lax.axis_index(axes)].add(total - low.astype(F32))
    total = lax.all_gather(low, axes, tiled=True).astype(F32)
    total, rest = (a.reshape(-1)[: x.size].reshape(x.shape) for a in (total, rest))
    return total, rest


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
    """Returns the sum over the first axis of an array, sharded as whatever reads it."""
    if _is_small(x):
        return jnp.sum(x, axis=0)

    def local(x: Array, axes: tuple[str, ...], scatter: int | None) -> Array:
        return local_sum(x[0], axes, dtype, scatter)

    return _over_axes(x, shards, local, lambda x: jnp.sum(x, axis=0), has_rest=False)


def sum_and_rest_of_shards(x: Array, shards: Shards) -> tuple[Array, Array]:
    """Returns the sum as 8-bit blocks, and what each device's roundings took, stacked.

    See `sum_8_bits`. Small arrays are summed in f32.
    """

    def plain(x: Array) -> tuple[Array, Array]:
        return jnp.sum(x, axis=0), jnp.zeros_like(x)

    def local(x: Array, axes: tuple[str, ...], scatter: int | None) -> PyTree:
        total, rest = sum_8_bits(x[0], axes, scatter)
        return total, rest[None]

    if _is_small(x):
        return plain(x)
    return _over_axes(x, shards, local, plain, has_rest=True)


def _is_small(x: Array) -> bool:
    """Returns whether a stacked array is not worth a sum of its own making."""
    return x.size < _SMALL * x.shape[0] or private("kernels") is None


def _over_axes(
    x: Array, shards: Shards, local: PyTree, plain: PyTree, *, has_rest: bool
) -> PyTree:
    """Sums a stacked array by a function that runs on each device.

    `local` gets the part of one device, the axes, and the axis to scatter; `plain` is the
    same on one device. With `has_rest` both return a pair, the second stacked as `x` is.
    """
    axes, rank = shards.axes, x.ndim - 1

    def parts(mesh: PyTree, args: PyTree, result: PyTree) -> Parts:
        total = result[0] if has_rest else result
        spec = unpadded(axes_of(total.sharding.spec, rank), args[0].shape[1:], mesh)
        whole = [entry == axes for entry in spec]
        scatter = whole.index(True) if any(whole) else None
        # What is sharded over other axes stays so.
        full = [tuple(name for name in entry if name not in axes) for entry in spec]
        out = NamedSharding(mesh, spec_of(spec if scatter is not None else full))
        given = NamedSharding(mesh, spec_of([axes, *full]))

        def run(x: Array) -> PyTree:
            return local(x, axes, scatter)

        return Parts(run, (given,), (out, given) if has_rest else out)

    def inferred(mesh: PyTree, args: PyTree, result: PyTree) -> PyTree:
        total = NamedSharding(mesh, PartitionSpec(*[None] * rank))
        stacked = NamedSharding(mesh, spec_of([axes, *[()] * rank]))
        return (total, stacked) if has_rest else total

    letters = " ".join(f"d{i}" for i in range(rank))
    rule = f"n {letters} -> {letters}" + (f", n {letters}" if has_rest else "")
    return partitioned(plain, (x,), parts, rule=rule, inferred=inferred)


def sharded_alike(x: Array, like: PyTree) -> Array:
    """Returns an array that XLA shards as another one of its shape.

    Shardings spread through operations on elements. No number is above infinity.
    """
    return lax.select(like > jnp.inf, jnp.zeros_like(x), x)


def pin_shards(tree: PyTree, shards: Shards) -> PyTree:
    """Returns stacked arrays with the first axis sharded, and the others as they are."""

    def pin(x: Array) -> Array:
        rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
        sharding = NamedSharding(shards.mesh, PartitionSpec(shards.axes, *rest))
        return lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(pin, tree)


def largest_of_shards(tree: PyTree) -> PyTree:
    """Returns the maxima over the first axis of all arrays, by one reduction."""
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return tree
    flat = jnp.concatenate([x.reshape(x.shape[0], -1) for x in leaves], axis=1)
    ends = np.cumsum([math.prod(x.shape[1:]) for x in leaves])
    parts = jnp.split(jnp.max(flat, axis=0), ends[:-1])
    shapes = [x.shape[1:] for x in leaves]
    return structure.unflatten(map(jnp.reshape, parts, shapes))
