"""The configured half precision: which 16-bit dtype "half" stands for.

The setting is part of the cache key of `jax.jit`: a function that was compiled for f16
is compiled again after the switch to bf16.
"""

import contextlib

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mpx._jax._compat import make_jit_context
from mpx._jax._formats import FORMATS, parse_float_dtype

# What the user chose. Until then the paper's functions take f16, and `amp`, which has no
# loss scale of its own, bf16.
_half = make_jit_context(None)
_DEFAULT = np.dtype(np.float16)
# Part of the key, too: what a derivative rule does depends on it, and JAX keeps rules.
_in_gradient_function = make_jit_context(False)


def _parse_half(datatype: DTypeLike) -> np.dtype:
    try:
        dtype = parse_float_dtype(datatype)
    except ValueError:
        dtype = None
    if dtype is None or dtype.itemsize != 2:
        raise ValueError(
            f"Half precision is float16 or bfloat16, but {datatype!r} was given. Pass "
            '`jnp.float16`, `jnp.bfloat16`, "float16" or "bfloat16".'
        )
    return dtype


def set_half_precision_datatype(datatype: DTypeLike | None) -> None:
    """Sets the dtype that "half precision" stands for, everywhere in this process.

    Functions that were already compiled follow: they are traced anew when called.
    Prefer a `Policy`, which travels with the code that needs it.

    Args:
        datatype: f16 or bf16, as a dtype or as a name; `None` restores the default.

    Raises:
        ValueError: If it is anything else.

    Examples:
        >>> set_half_precision_datatype("bfloat16")
        >>> half_precision_datatype()
        dtype(bfloat16)
        >>> set_half_precision_datatype(None)
    """
    _half.set_global(None if datatype is None else _parse_half(datatype))


def half_precision_datatype() -> np.dtype:
    """Returns the dtype that "half precision" stands for; float16 unless changed.

    Examples:
        >>> half_precision_datatype() == jnp.float16
        True
    """
    return _half.value or _DEFAULT


def chosen_half_precision() -> np.dtype | None:
    """Returns the half-precision dtype that the user chose, `None` if none was."""
    return _half.value


def half_precision(datatype: DTypeLike) -> contextlib.AbstractContextManager[object]:
    """Sets the half-precision dtype inside a `with` block, in this thread only.

    Args:
        datatype: f16 or bf16, as a dtype or as a name.

    Raises:
        ValueError: If it is anything else.

    Examples:
        >>> with half_precision("bf16"):
        ...     print(half_precision_datatype())
        bfloat16
    """
    return _half(_parse_half(datatype))


def gradient_function() -> contextlib.AbstractContextManager[object]:
    """Marks the code inside as a gradient that mpx takes, with a loss scaling."""
    return _in_gradient_function(True)


def in_gradient_function() -> bool:
    """Returns whether the gradient that is being traced is taken by mpx."""
    return _in_gradient_function.value


CONSTANTS = ("BFLOAT16_MAX", "FLOAT16_MAX", "HALF_PRECISION_DATATYPE")


def constant(name: str) -> Array | np.dtype:
    """Returns a constant of the paper, computed when it is read so that it is not stale.

    The two maxima are f32 scalars; making them at import would start a JAX backend.
    """
    if name == "HALF_PRECISION_DATATYPE":
        return half_precision_datatype()
    if name == "FLOAT16_MAX":
        return jnp.float32(FORMATS["f16"].max)
    if name == "BFLOAT16_MAX":
        return jnp.float32(FORMATS["bf16"].max)
    raise AttributeError(f"module 'mpx' has no attribute {name!r}")
