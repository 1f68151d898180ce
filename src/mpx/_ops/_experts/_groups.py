"""Which rows belong to which group, in plain JAX."""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# The kernel loads so many rows together.
ALIGNMENT = 8


def group_ends(sizes: Array, rows: int) -> Array:
    """Returns the first row behind each group."""
    return jnp.minimum(_running_sum(sizes.astype(jnp.int32)), np.int32(rows))


def group_of_rows(sizes: Array, rows: int) -> Array:
    """Returns the group of each row; the last one for rows behind all groups."""
    return _count_below(group_ends(sizes, rows), rows)


def row_blocks(sizes: Array, rows: int, block: int) -> tuple[Array, ...]:
    """Returns the blocks of rows that cover all groups, and then the rows behind these.

    Args:
        sizes: The number of rows of each group.
        rows: The number of all rows, at least `block` and a multiple of 8.
        block: The number of rows of a block.

    Returns:
        Of each block: the group, which is `len(sizes)` for the rows behind all groups; the
        first row, a multiple of 8; where in the block the rows of the group begin; and
        their number. Blocks of 0 rows come last.
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
