"""A tensor in 8 bits, in both orders of its axes, out of one pass over memory.

GPUs before Blackwell multiply 8-bit matrices only if the axis that is summed over comes
last in both. Each tensor of a linear layer is summed over one half of its axes in the
forward pass and over the other half in the backward pass, so it is needed twice. XLA can
write both from one read, but at half the speed of memory: for 16384 × 16384 on an H200 it
took 0.53 ms and this kernel 0.30 (jax 0.11.2, timed by a script of its own).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._compat import struct_like
from mpx._devices import gpu_capability
from mpx._fp8._scales import DTYPES, cast_scaled, inverse
from mpx._kernels import plain_under_vmap
from mpx._private import private
from mpx._sharding import over_shards, reason_against_shards, replicated

# A program's part: rows and columns. The best of eight on an H200.
_TILE = (64, 128)
_WARPS = 4
# Pallas counts elements in 32 bits, signed.
_LARGEST = 2**31


def turning_pays() -> bool:
    """Returns whether the GPU wants the axis that is summed over to come last."""
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
