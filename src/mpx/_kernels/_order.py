"""Ordering of independent computations on a GPU.

XLA removes barriers before it schedules a program. It may then postpone work that nothing
waits for, such as the gradients of biases, and keep its operands in memory until the end.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding

from mpx._jax._compat import struct_like
from mpx._jax._private import private
from mpx._jax._sharding import Parts, partitioned, spec_of
from mpx._kernels._dispatch import plain_under_vmap


def after(x: Array, others: Sequence[Array]) -> Array:
    """Returns `x`; on a GPU, its readers run after the other arrays are computed.

    `x` is multiplied by 1, which is the result of a kernel that takes the others as arguments.
    On several devices and inside `shard_map` nothing waits: the others may be sums over
    devices, which XLA overlaps with other work.
    """
    is_complex = lambda x: jnp.issubdtype(x.dtype, jnp.complexfloating)  # noqa: E731
    others = [x for x in others if x.ndim and x.size and not is_complex(x)]
    meshes = [jax.typeof(x).sharding.mesh for x in others]
    is_local = all(x.empty or (x.size == 1 and not x.manual_axes) for x in meshes)
    if not others or is_complex(x) or not is_local or private("kernels") is None:
        return x

    def plain(*others: Array) -> Array:
        return jnp.ones((), jnp.float32)

    def parts(mesh: Any, args: Any, _: Any) -> Parts:
        return plain, tuple(x.sharding for x in args), NamedSharding(mesh, spec_of([]))

    def kernel(*others: Array) -> Array:
        if not meshes[0].empty:
            return _one(*others)
        axes = [
            " ".join(f"axis{i}of{j}" for i in range(x.ndim))
            for j, x in enumerate(others)
        ]
        one = lambda *others: _one(*others)  # noqa: E731 (which has no keywords)
        return partitioned(one, others, parts, rule=f"{', '.join(axes)} ->")

    call = plain_under_vmap(kernel, plain)
    one = lax.platform_dependent(*others, cuda=call, default=plain)
    return x * one.astype(x.dtype)


def _one(*others: Array, interpret: bool = False) -> Array:
    pl: Any = private("kernels")

    def kernel(*refs: Any) -> None:
        refs[-1][...] = jnp.ones((), jnp.float32)

    return pl.pallas_call(
        kernel,
        out_shape=struct_like(jnp.zeros((), jnp.float32), ()),
        in_specs=[pl.no_block_spec] * len(others),
        out_specs=pl.no_block_spec,
        compiler_params=pl.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="mpx_after",
    )(*others)
