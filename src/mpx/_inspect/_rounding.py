"""Rounding: samples of the values of a program, and what a format does to them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._formats import FORMATS, parse_float_dtype

HALVES = ("bf16", "f16")
EIGHTS = ("e4m3", "e5m2")
SAMPLE = 4096
"""The most numbers that are looked at in one array."""
_LOST = 0.25  # a sum whose operands' errors exceed this share of it is no longer known
_DTYPES = {
    **{name: parse_float_dtype(name) for name in HALVES},
    "e4m3": np.dtype(jnp.float8_e4m3fn),
    "e5m2": np.dtype(jnp.float8_e5m2),
}

# --- inside a program -----------------------------------------------------------------


def _power(x: Any) -> Any:
    """Returns the largest power of two that is at most |x|; 0 for zeros."""
    bits = lax.bitcast_convert_type(x, np.int32) & np.int32(0x7F800000)
    return lax.bitcast_convert_type(bits, np.float32)


def rounded(x: Any, name: str) -> Any:
    """Returns f32 numbers rounded to a format, inside a program.

    The 16-bit formats have the range of f32 here: range is judged apart. Those of 8 bits
    have one scale for the array, the smallest power of two with which all numbers fit, as
    in `mpx.recipes.CurrentScaling`.
    """
    form = FORMATS[name]
    if name in HALVES:
        return lax.reduce_precision(x, 8, form.mantissa)
    least = jnp.max(jnp.abs(x), initial=0.0) * np.float32(1 / form.max)
    scale = _power(least)
    scale = jnp.where(least > scale, 2 * scale, scale)
    tiny = jnp.maximum(scale * np.float32(form.tiny), np.float32(2.0**-90))
    # So large that the sum with it has the spacing of the format.
    c = jnp.maximum(_power(x), tiny) * np.float32(1.5 * 2.0 ** (23 - form.mantissa))
    return jnp.where(jnp.isfinite(x), (x + c) - c, x)


def sample_size(size: int) -> int:
    """Returns how many numbers of an array are looked at."""
    return min(size, SAMPLE)


def _positions(size: int) -> np.ndarray:
    """Returns the positions of the sample: a random one in each of equal parts."""
    count = sample_size(size)
    if count == size:
        return np.arange(size)
    edges = np.linspace(0, size, count + 1)
    shift = np.random.default_rng(size).random(count)
    return np.minimum(edges[:-1] + shift * np.diff(edges), size - 1).astype(np.int32)


def _sample(x: Any) -> Any:
    flat = x.reshape(-1)
    return flat if x.size <= SAMPLE else flat[_positions(x.size)]


@jax.custom_vjp
def tap(x: Any, z: Any, operands: tuple[Any, ...]) -> Any:
    """Returns `x`; the "derivative" for `z` are samples, see `Samples`."""
    return x


def _backward(kept: Any, cotangent: Any) -> Any:
    x, operands = kept
    largest = jnp.max(jnp.abs(x), initial=0.0).reshape(1)
    parts = [_sample(y) for y in (x, cotangent, *operands)]
    zeros = jax.tree.map(jnp.zeros_like, operands)
    return cotangent, jnp.concatenate([largest, *parts]), zeros


tap.defvjp(lambda x, z, operands: (x, (x, operands)), _backward)


def width(size: int, operands: int) -> int:
    """Returns the length of `z` for an array of this size and a number of operands."""
    return 1 + sample_size(size) * (2 + operands)


# --- on the host ----------------------------------------------------------------------


class Samples(NamedTuple):
    """What a tap has seen; arrays have one row for each run of a loop's body.

    Attributes:
        largest: The largest magnitude of the whole array.
        values: A sample of its numbers.
        cotangents: The derivatives there.
        operands: For a sum, what was added.
        weight: How many numbers each sample stands for.
    """

    largest: np.ndarray
    values: np.ndarray
    cotangents: np.ndarray
    operands: list[np.ndarray]
    weight: float

    @classmethod
    def read(cls, z: Any, size: int) -> "Samples":
        """Splits what is in place of a derivative."""
        rows = np.asarray(z, np.float32)
        rows, count = rows.reshape(-1, rows.shape[-1]), sample_size(size)
        parts = np.split(rows[:, 1:], (rows.shape[1] - 1) // count, axis=1)
        return cls(rows[:, :1], parts[0], parts[1], parts[2:], size / count)

    def disturbance(self, name: str, scale: float = 1.0) -> float:
        """Returns the expected square of what rounding does to the result.

        That is the sum of (cotangent * error)², if the errors of different numbers have
        nothing to do with each other.

        Args:
            name: The format.
            scale: The loss scale, for cotangents in f16.
        """
        error = self._error(name, self.values, scale)
        return self.weight * float(np.sum(np.square(self.cotangents * error)))

    def cancellation(self, name: str) -> float:
        """Returns the part of the disturbance by operands that a sum cancels.

        Where their errors exceed a quarter of the sum, the derivative at the exact value
        says little about the result.
        """
        errors = [np.square(self._error(name, x, 1.0)) for x in self.operands]
        total = np.sum(errors, axis=0)
        lost = total > _LOST**2 * np.square(self.values)
        return self.weight * float(np.sum(np.square(self.cotangents) * total * lost))

    def _error(self, name: str, x: np.ndarray, scale: float) -> np.ndarray:
        form = FORMATS[name]
        with np.errstate(over="ignore", invalid="ignore"):
            if name in EIGHTS:
                least = np.where(self.largest > 0, self.largest, 1) / form.max
                part, exponent = np.frexp(least)
                factor = np.ldexp(np.float32(1), (part == 0.5) - exponent)
            else:
                factor = np.float32(scale if name == "f16" else 1.0)
            y = np.clip(x * factor, -form.max, form.max)
            error = y.astype(_DTYPES[name]).astype(np.float32) / factor - x
        return np.where(np.isfinite(error) & (np.abs(x * factor) < form.max), error, 0)
