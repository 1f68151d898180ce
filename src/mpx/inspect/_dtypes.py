"""Questions about the dtype of an array, or of a type of arrays."""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._jax._formats import short_name


def is_float(x: object) -> bool:
    """Returns whether it holds real floating numbers."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.floating)


def is_low(x: object) -> bool:
    """Returns whether it is floating and narrower than f32."""
    return is_float(x) and getattr(x, "dtype").itemsize < 4  # noqa: B009


def short_dtypes(names: Iterable[Any]) -> str:
    """Returns `f32`, or `f32×bf16` if the dtypes differ."""
    return "×".join(dict.fromkeys(short_name(np.dtype(name)) for name in names))
