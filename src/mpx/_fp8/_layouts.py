"""A tensor in 8 bits, in both orders of its axes, from one pass over memory.

GPUs before Blackwell multiply 8-bit matrices only if the axis that is summed over comes
last in both. Each tensor of a linear layer is summed over one half of its axes in the
forward pass and over the other half in the backward pass, so it is needed twice. XLA can
write both from one read, but at half the speed of memory: for 16384 × 16384 on an H200 it
took 0.53 ms and this kernel 0.30 (jax 0.11.2, timed by a script of its own).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._fp8._scales import DTYPES, cast_scaled, inverse
from mpx._jax._compat import struct_like
from mpx._jax._devices import gpu_capability
from mpx._jax._private import private
from mpx._jax._sharding import (
    Parts,
    axes_of,
    over_shards,
    partitioned,
    reason_against_shards,
    replicated,
    spec_of,
)
from mpx._kernels import plain_under_vmap

# A program's part: rows and columns. The best of eight on an H200.
_TILE = (64, 128)
_WARPS = 4
# Pallas counts elements in 32 bits, signed.
_LARGEST = 2**31


def turning_pays() -> bool:
    """Returns whether the GPU needs the axis that is summed over to come last."""
    capability = gpu_capability()
    pays = isinstance(capability, tuple) and (8, 9) <= capability < (10, 0)
    return pays and private("kernels") is not None


def turn(x: Array, leading: int) -> Array:
    """Returns an array whose first axes are moved behind the others."""
    return lax.transpose(x, (*range(leading, x.ndim), *range(leading)))


def quantize_both(
    x: Array, scale: Array, form: str, *, leading: int, clip: bool
) -> tuple[Array, Array]:
    """Returns the codes of a tensor, and the same with `leading` axes moved to the end.

    Args:
        x: The tensor.
        scale: A power of two, a scalar.
        form: `e4m3` or `e5m2`.
        leading: How many axes are moved.
        clip: See `quantize`.
    """

    def plain(x: Array, factor: Array) -> tuple[Array, Array]:
        codes = cast_scaled(x, factor[0], form, clip=clip)
        return codes, turn(codes, leading)

    def local(x: Array, factor: Array) -> tuple[Array, Array]:
        shape, rows = x.shape, math.prod(x.shape[:leading])
        x = x.reshape(rows, -1)
        if x.size > _LARGEST or any(
            n % tile for n, tile in zip(x.shape, _TILE, strict=True)
        ):
            return plain(x.reshape(shape), factor)
        codes, turned = cast_and_turn(x, factor, form, clip=clip)
        return codes.reshape(shape), turned.reshape(shape[leading:] + shape[:leading])

    factor = inverse(scale)[None]
    if reason_against_shards(x) is not None:
        return plain(x, factor)
    kernel = functools.partial(_over_shards, local, leading=leading)
    return lax.platform_dependent(
        x, factor, cuda=plain_under_vmap(kernel, plain), default=plain
    )


def cast_and_turn(
    x: Array, factor: Array, form: str, *, clip: bool, interpret: bool = False
) -> tuple[Array, Array]:
    """Returns the codes of a matrix of whole tiles, and their transpose."""
    # Not before it is needed: importing Pallas takes as long as importing mpx.
    pl = plgpu = private("kernels")
    rows, columns = _TILE

    def kernel(x_ref: Any, factor_ref: Any, codes_ref: Any, turned_ref: Any) -> None:
        down = pl.ds(pl.program_id(0) * rows, rows)
        across = pl.ds(pl.program_id(1) * columns, columns)
        codes = cast_scaled(
            plgpu.load(x_ref.at[down, across]), factor_ref[0], form, clip=clip
        )
        plgpu.store(codes_ref.at[down, across], codes)
        plgpu.store(turned_ref.at[across, down], codes.T)

    like = x.astype(DTYPES[form])  # for what the results vary over in a shard_map
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=[struct_like(like, x.shape), struct_like(like, x.shape[::-1])],
            grid=(x.shape[0] // rows, x.shape[1] // columns),
            in_specs=[pl.no_block_spec] * 2,
            out_specs=[pl.no_block_spec] * 2,
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
            name="mpx_cast_and_turn",
        )(x, factor)
    )


def _over_shards(
    local: Callable[..., Any], x: Array, factor: Array, *, leading: int
) -> Any:
    """Calls `local` on each device with its shard of `x`."""

    def layout(x: Any, factor: Any) -> tuple[Any, Any]:
        axes = (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
        turned = PartitionSpec(*axes[leading:], *axes[:leading])
        results = x.sharding, NamedSharding(x.sharding.mesh, turned)
        return (x.sharding, replicated(x.sharding)), results

    axes = [f"axis{axis}" for axis in range(x.ndim)]
    kept, turned = " ".join(axes), " ".join(axes[leading:] + axes[:leading])
    rule = f"{kept}, one -> {kept}, {turned}"
    return over_shards(
        local, (x, factor), like=x, layout=layout, rule=rule, whole=("one",)
    )


# --- after a gather -------------------------------------------------------------------


def turned_for(
    codes: Array, other: Array, leading: int, summed: Sequence[int]
) -> Array:
    """Returns codes with `leading` axes moved to the end, turned after they are gathered.

    Under FSDP each matmul gathers its weight. Codes that are turned before are another array
    than those of the matmul that needs them as they are, and would be gathered apart.

    Args:
        codes: The codes of a weight, sharded over automatic axes.
        other: The other operand of the matmul: the weight is gathered over the axes that
            shard what is left of it.
        leading: How many axes are moved.
        summed: The axes of `other` that are summed over.
    """

    def plain(codes: Array, other: Array) -> Array:
        # XLA would take a bare transpose into the matmul, and not call cuBLASLt for it.
        return lax.optimization_barrier(turn(codes, leading))

    def parts(mesh: Any, args: Any, _: Any) -> Parts:
        entries, others = (axes_of(x.sharding.spec, len(x.shape)) for x in args)
        taken = {x for i, names in enumerate(others) if i not in summed for x in names}
        kept = [tuple(x for x in names if x not in taken) for names in entries]
        given = NamedSharding(mesh, spec_of(kept))
        turned = NamedSharding(mesh, spec_of(kept[leading:] + kept[:leading]))
        return Parts(plain, (given, args[1].sharding), turned)

    def kernel(codes: Array, other: Array) -> Array:
        axes = [f"axis{i}" for i in range(codes.ndim)]
        turned = " ".join(axes[leading:] + axes[:leading])
        others = " ".join(f"other{i}" for i in range(other.ndim))
        rule = f"{' '.join(axes)}, {others} -> {turned}"
        return partitioned(plain, (codes, other), parts, rule=rule)

    mappable = jax.custom_batching.custom_vmap(kernel)

    @mappable.def_vmap
    def _(size: int, batched: Any, codes: Array, other: Array) -> tuple[Array, bool]:
        if batched[0]:
            return jax.vmap(lambda x: plain(x, other), axis_size=size)(codes), True
        # The other operand has one more axis that is not summed over.
        return turned_for(codes, other, leading, [i + 1 for i in summed]), False

    return mappable(codes, other)
