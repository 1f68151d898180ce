"""Rounding: samples of the values of a program, and what a format does to them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._jax._formats import FORMATS, parse_float_dtype
from mpx._jax._sharding import unsharded
from mpx.inspect._keys import Site
from mpx.inspect._pieces import apart

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

Seen = tuple[Any, ...]
"""What was looked at: a value, then operands, then the derivative for the value."""

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


@apart
def look(x: Any) -> Any:
    """Returns the largest magnitude of an array, then a sample of its numbers."""
    x = unsharded(x)
    flat = x.reshape(-1)
    if x.size > SAMPLE:
        places = flat.at[_positions(x.size)]
        flat = places.get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.concatenate([jnp.max(jnp.abs(x), initial=0.0).reshape(1), flat])


@jax.custom_vjp
def _tapped(x: Any, z: Seen, seen: Seen) -> Any:
    return x


def _backward(seen: Seen, cotangent: Any) -> Any:
    zeros = jax.tree.map(jnp.zeros_like, seen)
    return cotangent, (*seen, look(cotangent)), zeros


_tapped.defvjp(lambda x, z, seen: (x, seen), _backward)


def tap(x: Any, z: Seen, operands: tuple[Any, ...] = ()) -> Any:
    """Returns `x`; the "derivatives" for `z` are samples, see `Samples`."""
    # Taken here: the backward pass need not hold on to the arrays.
    seen = tuple(look(lax.stop_gradient(y)) for y in (x, *operands))
    return _tapped(x, z, seen)


def nothing_seen(site: Site) -> Seen:
    """Returns the `z` of a site."""
    shape = (*site.lengths, 1 + sample_size(site.size))
    return (jnp.zeros(shape),) * (2 + site.operands)


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
    def read(cls, seen: Seen, size: int) -> "Samples":
        """Splits what is in place of derivatives."""
        count = sample_size(size)
        rows = [np.asarray(x, np.float32).reshape(-1, 1 + count) for x in seen]
        values, *operands, cotangents = (x[:, 1:] for x in rows)
        return cls(rows[0][:, :1], values, cotangents, operands, size / count)

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
