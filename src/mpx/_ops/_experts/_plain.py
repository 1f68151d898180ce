"""Grouped matmuls in plain JAX: what the kernel computes, and what runs elsewhere."""

from typing import Literal, NamedTuple

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
    """Returns a grouped matmul in plain JAX, which multiplies each row with each group.

    The arguments are those of `grouped_matmul`.
    """
    first, second, groups = FORMS[kind]
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((first,), (second,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=groups,
    )
    wide = np.dtype(jnp.float32)
    wide = wide if dtype == wide else a.dtype
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
    index, group = lax.iota(jnp.int32, number), _count_below(last, number)
    first = bases[group] + (index - last[group] + counts[group]) * block
    begin = jnp.maximum(starts[group], first)
    end = jnp.minimum(ends[group], first + block)
    first = jnp.minimum(first, np.int32(rows - block))
    return group, first, begin - first, jnp.maximum(end - begin, 0)


# Each is one small kernel on a GPU; `cumsum` and `searchsorted` are several.
def _running_sum(x: Array) -> Array:
    index = lax.iota(jnp.int32, x.size)
    before = index[:, None] >= index[None]
    return jnp.sum(jnp.where(before, x[None], 0), axis=1, dtype=jnp.int32)


def _count_below(ends: Array, number: int) -> Array:
    """Returns how many of `ends` are at most i, for each i, and one less than all at most."""
    index = lax.iota(jnp.int32, number)
    found = jnp.sum(index[:, None] >= ends[None], axis=1, dtype=jnp.int32)
    return jnp.minimum(found, np.int32(ends.size - 1))


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
