"""Number formats: bits, range, spacing, and the names by which users choose them."""

import contextlib
import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    A value is `(-1)**sign * 2**e * (1 + m / 2**mantissa)`; the spacing of the numbers
    in `[1, 2)` is `eps = 2**-mantissa`.
    """

    name: str
    bits: int  # significant ones: 19 for tf32, which is stored in 32
    exponent: int  # the number of exponent bits
    mantissa: int  # the number of explicitly stored mantissa bits
    max: float  # the largest finite number
    tiny: float  # the smallest positive normal number
    smallest: float  # the smallest positive subnormal number
    dtype: np.dtype  # in which it is stored

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa


def _from_dtype(name: str, dtype: DTypeLike) -> Format:
    info = ml_dtypes.finfo(dtype)
    numbers = map(float, (info.max, info.smallest_normal, info.smallest_subnormal))
    sizes = info.bits, info.nexp, info.nmant
    return Format(name, *sizes, *numbers, dtype=np.dtype(dtype))


_DTYPES: dict[str, type] = {
    "f64": jnp.float64,
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
    "e2m1": jnp.float4_e2m1fn,
}

F32 = np.dtype(jnp.float32)
LOW_DTYPES = (np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


def is_low(x: object) -> bool:
    """Returns whether a value is held in 16 bits."""
    return getattr(x, "dtype", None) in LOW_DTYPES


FORMATS: dict[str, Format] = {
    name: _from_dtype(name, dtype) for name, dtype in _DTYPES.items()
}
# tf32 is how tensor cores read f32: f32's exponent with f16's mantissa. It has no
# dtype of its own. e8m0 holds the power-of-two scale of an MX block: no sign, no zero.
FORMATS["tf32"] = Format(
    *("tf32", 19, 8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136),
    dtype=np.dtype(jnp.float32),
)
FORMATS["e8m0"] = _from_dtype("e8m0", jnp.float8_e8m0fnu)

_NAMES: dict[str, np.dtype] = {
    **{name: np.dtype(dtype) for name, dtype in _DTYPES.items()},
    **{np.dtype(dtype).name: np.dtype(dtype) for dtype in _DTYPES.values()},
    "full": np.dtype(jnp.float32),
    "fp16": np.dtype(jnp.float16),
    "fp32": np.dtype(jnp.float32),
    "fp64": np.dtype(jnp.float64),
}

# Names of other frameworks for a whole precision: the dtypes of parameters and outputs,
# and of the computation.
PRECISIONS: dict[str, tuple[str, str]] = {
    "bf16-mixed": ("f32", "bf16"),
    "mixed_bfloat16": ("f32", "bf16"),
    "16-mixed": ("f32", "f16"),
    "fp16-mixed": ("f32", "f16"),
    "mixed_float16": ("f32", "f16"),
    "bf16-true": ("bf16", "bf16"),
    "16-true": ("f16", "f16"),
    "fp16-true": ("f16", "f16"),
    "32-true": ("f32", "f32"),
    "64-true": ("f64", "f64"),
}
_SHORT_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}


def short_name(dtype: np.dtype) -> str:
    """Returns `bf16` for bfloat16 and so on; dtypes without one keep their name."""
    return _SHORT_NAMES.get(dtype, dtype.name)


def parse_float_dtype(dtype: DTypeLike, what: str = "dtype") -> np.dtype:
    """Returns the NumPy dtype for a floating dtype of at least 16 bits or its name."""
    # Names are ours alone: NumPy reads "f8" as f64, "half" as f16 and `None` as f64.
    parsed = None
    with contextlib.suppress(TypeError, ValueError):  # NumPy's for a dict of arrays
        by_name = isinstance(dtype, str) or dtype is None
        parsed = _NAMES.get(str(dtype)) if by_name else np.dtype(dtype)
    if parsed is None or parsed not in _SHORT_NAMES or not is_float_dtype(parsed):
        raise ValueError(
            f"`{what}` must be a floating dtype of at least 16 bits (f16, bf16, f32 or "
            f"f64), but {dtype!r:.99} was given. Pass a dtype such as `jnp.bfloat16` or a "
            'name such as "bf16".'
        )
    return parsed


def is_float_dtype(dtype: np.dtype) -> bool:
    """Returns whether mpx casts numbers of this dtype; narrower ones have a scale elsewhere."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2


def at_least_f32(dtype: np.dtype) -> np.dtype:
    """Returns f32 for 16-bit dtypes and wider dtypes as they are (complex too)."""
    return np.dtype(jnp.float32) if dtype.itemsize == 2 else dtype
