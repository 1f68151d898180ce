"""Grouped matmuls in plain JAX: what the kernel computes, and what runs elsewhere."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._jax._compat import convert_dtype

Kind = Literal["rows", "turned", "sums"]
"""What is multiplied; see `mpx._ops._experts._mosaic`."""

# The summed axes of both operands, and the axis of the groups of the second.
FORMS: dict[Kind, tuple[int, int, tuple[int, ...]]] = {
    "rows": (1, 1, (0,)),
    "turned": (1, 2, (0,)),
    "sums": (0, 0, ()),
}


def plain(a: Array, b: Array, sizes: Array, *, kind: Kind, dtype: np.dtype) -> Array:
    """Returns a grouped matmul in plain JAX, which multiplies each row with each group."""
    first, second, groups = FORMS[kind]
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((first,), (second,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )
    wide = dtype if dtype == jnp.float32 else a.dtype
    out = lax.ragged_dot_general(
        convert_dtype(a, wide),
        convert_dtype(b, wide),
        sizes,
        numbers,
        preferred_element_type=wide,
    )
    return convert_dtype(out, dtype)


# The kernel loads this many rows together.
ALIGNMENT = 8


def group_ends(sizes: Array, rows: int) -> Array:
    """Returns the first row behind each group."""
    return jnp.minimum(_running_sum(sizes.astype(jnp.int32)), np.int32(rows))


def row_blocks(sizes: Array, rows: int, block: int) -> tuple[Array, ...]:
    """Returns the blocks of rows that cover all groups, and then the rows behind these.

    There are at least `block` rows, a multiple of 8. Each block has a group, `len(sizes)`
    for the rows behind all groups; a first row, a multiple of 8; where in the block the rows
    of the group begin; and their number. Blocks of 0 rows come last.
    """
    ends = group_ends(sizes, rows)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), ends])
    ends = jnp.append(ends, np.int32(rows))
    bases = starts // ALIGNMENT * ALIGNMENT
    counts = jnp.where(ends > starts, -((bases - ends) // block), 0)
    last = _running_sum(counts)
    number = (rows + ends.size * (block + ALIGNMENT - 2)) // block
    index = lax.iota(jnp.int32, number)
    group = jnp.sum(index[:, None] >= last[None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, np.int32(last.size - 1))
    first = bases[group] + (index - last[group] + counts[group]) * block
    begin = jnp.maximum(starts[group], first)
    end = jnp.minimum(ends[group], first + block)
    first = jnp.minimum(first, np.int32(rows - block))
    return group, first, begin - first, jnp.maximum(end - begin, 0)


def _running_sum(x: Array) -> Array:
    # One small kernel on a GPU, as the sum above; `cumsum` and `searchsorted` are several.
    index = lax.iota(jnp.int32, x.size)
    before = index[:, None] >= index[None]
    return jnp.sum(jnp.where(before, x[None], 0), axis=1, dtype=jnp.int32)
