"""Grouped matmuls in plain JAX: what the kernel computes, and what runs elsewhere."""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._jax._compat import convert_dtype

Kind = Literal["rows", "turned", "sums"]
"""What is multiplied; see `mpx._ops._experts._primitive`."""

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
    if dtype != wide:
        # 8-bit numbers are exact in 16 bits.
        wide = dtype if a.dtype.itemsize == 1 else a.dtype
    out = lax.ragged_dot_general(
        convert_dtype(a, wide),
        convert_dtype(b, wide),
        sizes,
        numbers,
        preferred_element_type=wide,
    )
    return convert_dtype(out, dtype)
