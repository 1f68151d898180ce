"""What autocast knows of a value besides its dtype."""

import functools
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._compat import INLINE, convert_dtype
from mpx._formats import FORMATS, short_name

F32 = np.dtype(np.float32)

Role = Literal["own", "known", "likely", "bare"]
"""Why an array counts as a parameter.

`own`: a module holds it, the function itself or one among its arguments. `known`: it is in
a tree, or closed over, and is being differentiated. `likely`: it is in the first argument,
which is a tree. `bare`: it is an argument by itself that is being differentiated, as inputs
may be, too.
"""


class Meta(NamedTuple):
    """Where a value comes from.

    Attributes:
        literal: Its number, if it is a Python or literal constant, however broadcast.
        chain: `low` if it comes from a low matmul, `high` if an f32 operation has
            worked on such a value, else `neutral`.
        leaf: The shape of the argument it is, if only shape operations lie between.
        origin: The name of that argument, such as `model/head/weight`.
        role: Why that argument counts as a parameter, `None` if it does not.
    """

    literal: float | None = None
    chain: Literal["neutral", "low", "high"] = "neutral"
    leaf: tuple[int, ...] | None = None
    origin: str | None = None
    role: Role | None = None

    @property
    def is_param(self) -> bool:
        """Whether it is a parameter."""
        return self.role is not None


NEUTRAL = Meta()


def is_eligible(aval: Any) -> bool:
    """Whether a value of the traced function may be held in the compute dtype."""
    return getattr(aval, "dtype", None) == F32


def cast(x: Any, dtype: np.dtype) -> Any:
    """Casts a value; literals, which have no tracer, become arrays."""
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x, F32)
    return x if x.dtype == dtype else convert_dtype(x, dtype)


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)  # traced once for a shape
def saturate(x: Any, dtype: np.dtype) -> Any:
    """Returns f32 numbers such that those that are finite stay so in `dtype`.

    The derivative is that of the identity: nothing is kept for the backward pass.
    """
    return _saturate(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _saturate(x: Any, dtype: np.dtype) -> Any:
    largest = np.float32(FORMATS[short_name(dtype)].max)
    return lax.select(lax.is_finite(x), lax.clamp(-largest, x, largest), x)


@_saturate.defjvp
def _(dtype: np.dtype, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _saturate(*primals, dtype), tangents[0]


def widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Returns the dtype that holds all of these: f32, unless they are one.

    JAX's own promotion is the user's to forbid.
    """
    chosen = {np.dtype(dtype) for dtype in dtypes}
    return chosen.pop() if len(chosen) == 1 else F32


def as_array(x: Any) -> Any:
    """Returns an array that JAX primitives take: literals are not arrays."""
    return x if hasattr(x, "aval") else jnp.asarray(x)


def literal_survives(value: float, dtype: np.dtype) -> bool:
    """Whether a literal keeps its meaning in `dtype`: not overflown, not flushed."""
    if not np.isfinite(value) or value == 0:
        return True
    form = FORMATS[short_name(dtype)]
    return form.tiny <= abs(value) <= form.max


def chain_of(metas: list[Meta], *, high: bool = False) -> Meta:
    """Returns what is known of a result from what is known of its operands."""
    chains = {meta.chain for meta in metas}
    if "high" in chains or (high and "low" in chains):
        return Meta(chain="high")
    return Meta(chain="low") if "low" in chains else NEUTRAL
