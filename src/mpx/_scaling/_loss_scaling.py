"""The base of all loss scalings, and those that do not adapt.

Gradients that would vanish in f16 survive when the loss is multiplied by a scale before
differentiation and the gradients are divided by it afterwards.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from mpx._jax._arguments import as_count, as_real, check_value
from mpx._jax._compat import is_tracer
from mpx._jax._formats import at_least_f32, short_name
from mpx._jax._tree import AxisName, is_inexact, shape_of

P = ParamSpec("P")
R = TypeVar("R")

LARGEST_SCALE = 2.0**126
"""The largest power of two whose reciprocal is a normal f32 number."""


class LossScaling(eqx.Module):
    """The base of all loss scalings: `scale`, `unscale`, `adjust` and `metrics`.

    A loss scaling is a pytree: it goes through jit, scan, vmap, donation, sharding and
    checkpoints like any other state. Casts leave its f32 alone.

    Invariant: `unscale(scale(x)) == x` within three roundings of f32, and bit for bit
    while the scale is a power of two and neither `x` nor the product overflows or
    falls below the normal numbers of f32.
    """

    loss_scaling: eqx.AbstractVar[Float[Array, "*batch"]]

    mpx_keeps_dtypes = True

    # Set if a scaling is made from Python numbers while JAX traces. Not a field: a scaling
    # that comes out of a transformation does not have it.
    made_of_constants = False

    @property
    def adapts(self) -> bool:
        """Returns whether `adjust` may return another scale."""
        return type(self).adjust is not LossScaling.adjust

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating and complex leaves by the scale, in f32 or wider.

        16-bit leaves come back as f32, since the product may not fit into 16 bits.
        Integers, keys, strings, functions and `None` come back as they are.
        """
        return _map_wide(lambda x: x * self.loss_scaling.astype(x.dtype), tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the scale, in f32 or wider."""
        # XLA turns it into a product with the reciprocal, which must therefore be a
        # normal number too: see `check_scale`.
        return _map_wide(lambda x: x / self.loss_scaling.astype(x.dtype), tree)

    def adjust(
        self, grads_finite: PyTree, *, axis_name: AxisName | None = None
    ) -> "LossScaling":
        """Returns the scaling for the next step."""
        del grads_finite, axis_name
        return self

    def metrics(self) -> dict[str, Array]:
        """Returns values to log, as arrays: nothing is read back to the host."""
        return {"loss_scaling": self.loss_scaling}

    def raise_if_stuck(self, max_consecutive: int = 20) -> None:
        """Does nothing: a scaling that does not adapt counts no skipped steps.

        It exists so that a training loop need not know which scaling it uses.
        """
        as_count(max_consecutive, "max_consecutive", at_least=1)

    def __repr__(self) -> str:
        """Shows values, or types for traced arrays and arrays of other hosts."""
        fields = (field.name for field in dataclasses.fields(self))
        shown = (f"{name}={_shown(getattr(self, name))}" for name in fields)
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: PyTree) -> str:
    if not isinstance(value, jax.Array):
        return repr(value)
    if is_tracer(value) or value.is_deleted() or not value.is_fully_addressable:
        return f"{short_name(value.dtype)}{list(value.shape)}"
    return repr(value.tolist())


class StaticLossScaling(LossScaling):
    """A loss scale that never changes.

    Attributes:
        loss_scaling: The scale, f32[].

    Examples:
        >>> StaticLossScaling(1024.0).scale(jnp.float16(100.0))
        Array(102400., dtype=float32)
    """

    loss_scaling: Float[Array, "*batch"]

    def __init__(self, loss_scaling: PyTree) -> None:
        """Stores the scale as f32.

        Args:
            loss_scaling: The scale; a power of two makes scaling exact.

        Raises:
            ValueError: If it is not a positive finite scalar.
        """
        check_scale(loss_scaling, "loss_scaling")
        self.loss_scaling = f32_scalar(loss_scaling)


class NoLossScaling(LossScaling):
    """No scaling, for bf16, f32 and f64, whose range needs none.

    Examples:
        >>> NoLossScaling().scale({"loss": jnp.float32(2.0)})
        {'loss': Array(2., dtype=float32)}
    """

    def __init__(self) -> None:
        """Takes no arguments."""

    @property
    def loss_scaling(self) -> Float[Array, ""]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The scale: one."""
        return jnp.float32(1)

    def scale(self, tree: PyTree) -> PyTree:
        """Returns the tree with 16-bit floating leaves widened to f32."""
        return _map_wide(lambda x: x, tree)

    unscale = scale


def scaled(
    func: Callable[P, R], scaling: LossScaling, has_aux: bool = False
) -> Callable[P, R]:
    """Returns `func` with its result multiplied by the loss scale.

    Args:
        func: A function whose result is a loss, or any pytree.
        scaling: A loss scaling.
        has_aux: Whether `func` returns a pair of which only the first is scaled.

    Examples:
        >>> scaled(lambda x: x, StaticLossScaling(8.0))(jnp.float32(2.0))
        Array(16., dtype=float32)
    """

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        out: PyTree = func(*args, **kwargs)
        return (scaling.scale(out[0]), out[1]) if has_aux else scaling.scale(out)

    return wrapper


def _map_wide(fn: Callable[[Array], Array], tree: PyTree) -> PyTree:
    """Applies `fn` to the floating and complex leaves, in f32 or wider."""

    def apply(leaf: PyTree) -> PyTree:
        if not is_inexact(leaf) and not isinstance(leaf, float | complex):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(dtype=at_least_f32(leaf.dtype), weak_type=False)
        x = jnp.asarray(leaf)
        return fn(x.astype(at_least_f32(x.dtype)))

    return jax.tree.map(apply, tree)


def check_scale(value: PyTree, what: str) -> None:
    """Raises unless a concrete value is a positive finite scalar; tracers pass.

    An infinite JAX array passes too: MPX's own suite builds one to show that an unused
    scale is harmless, and the first `adjust` brings it back below the ceiling.
    """
    check_value(shape_of(value) == (), what, "a scalar", f"shape {shape_of(value)}")
    if is_tracer(value):
        return
    number = as_real(value, what)
    if isinstance(value, jax.Array) and number == math.inf:
        return
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(
            f"`{what}` must be positive and finite, but {number} was given. "
            "A usual value is 2.0**15."
        )
    # Beyond, the scale or its reciprocal is subnormal, and processors flush that to 0.
    check_value(
        2.0**-126 <= number <= LARGEST_SCALE, what, "in [2**-126, 2**126]", number
    )


def f32_scalar(value: PyTree) -> Float[Array, ""]:
    """Returns an f32 array with a buffer of its own: donation refuses shared ones."""
    if is_tracer(value) or isinstance(value, jax.Array):
        return jnp.array(value, dtype=jnp.float32, copy=True)
    return jnp.array(np.float32(value))
