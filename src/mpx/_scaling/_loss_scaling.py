"""Loss scaling: none, static, dynamic."""

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from mpx._casting._context import half_precision_datatype
from mpx._jax._arguments import as_count, as_real, check_value
from mpx._jax._compat import is_tracer
from mpx._jax._formats import at_least_f32, parse_float_dtype
from mpx._jax._tree import AxisName, all_devices, as_flag, is_inexact, shape_of

P = ParamSpec("P")
R = TypeVar("R")

LARGEST_SCALE = 2.0**126
"""The largest power of two whose reciprocal is a normal f32 number."""


class LossScaling(eqx.Module):
    """The base of all loss scalings: `scale`, `unscale`, `adjust` and `metrics`.

    It is a pytree, and casts leave its f32 alone. Invariant: `unscale(scale(x)) == x` within
    three roundings of f32, and bit for bit while the scale is a power of two and neither
    `x` nor the product overflows or falls below the normal numbers of f32.
    """

    loss_scaling: eqx.AbstractVar[Float[Array, "*batch"]]

    mpx_keeps_dtypes = True

    # Set if a scaling is made from Python numbers while JAX traces. Not a field: a scaling
    # that comes out of a transformation does not have it.
    made_of_constants = False

    def scale(self, tree: PyTree) -> PyTree:
        """Multiplies floating and complex leaves by the scale, in f32 or wider."""
        return _map_wide(lambda x: x * self.loss_scaling.astype(x.dtype), tree)

    def unscale(self, tree: PyTree) -> PyTree:
        """Divides floating and complex leaves by the scale, in f32 or wider."""
        # XLA turns it into a product with the reciprocal, which must therefore be a
        # normal number too: see `_scale`.
        return _map_wide(lambda x: x / self.loss_scaling.astype(x.dtype), tree)

    def adjust(
        self, grads_finite: PyTree, *, axis_name: AxisName | None = None
    ) -> "LossScaling":
        """Returns the scaling for the next step."""
        return self

    def metrics(self) -> dict[str, Array]:
        """Returns values to log, as arrays: nothing is read back to the host."""
        names = ("loss_scaling", "counter", "skipped", "consecutive_skipped")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def raise_if_stuck(self, max_consecutive: int = 20) -> None:
        """Does nothing: a scaling that does not adapt counts no skipped steps."""
        as_count(max_consecutive, "max_consecutive", at_least=1)


class StaticLossScaling(LossScaling):
    """A loss scale that never changes.

    Attributes:
        loss_scaling: The scale, positive and finite; a power of two makes scaling exact.

    Examples:
        >>> StaticLossScaling(1024.0).scale(jnp.float16(100.0))
        Array(102400., dtype=float32)
    """

    loss_scaling: Float[Array, "*batch"]

    def __init__(self, loss_scaling: PyTree) -> None:
        """Stores the scale as f32."""
        self.loss_scaling = _scale(loss_scaling, "loss_scaling")


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


class DynamicLossScaling(LossScaling):
    """A loss scale that grows while gradients are finite and backs off when not.

    The constructor follows the paper, with a ceiling of exactly 65504, the largest f16
    number, at which the scale stops being a power of two. Prefer
    `DynamicLossScaling.pow2()`: powers of two only, so that scaling is exact.

    Attributes:
        loss_scaling: The scale, f32[]. A JAX array, from a restored state, may be outside
            the limits; `adjust` clips it.
        min_loss_scaling: The floor, f32[].
        counter: Finite steps since the last change, i32[].
        skipped: Non-finite steps in total, i32[].
        consecutive_skipped: Non-finite steps in a row, i32[].
        tolerance: Non-finite steps left before the next backoff, i32[].
        factor: What growth multiplies by, more than 1; static, as are the others.
        period: Finite steps in a row per growth.
        max_loss_scaling: The ceiling.
        backoff: What a non-finite step multiplies by; `None` is 1/factor.
        hysteresis: Non-finite steps that one backoff needs; growth refills the tolerance.

    Examples:
        >>> scaling = DynamicLossScaling.pow2(2.0**15, period=2)
        >>> scaling = scaling.adjust(True).adjust(True)
        >>> float(scaling.loss_scaling), float(scaling.adjust(False).loss_scaling)
        (65536.0, 32768.0)
    """

    loss_scaling: Float[Array, "*batch"]
    min_loss_scaling: Float[Array, "*batch"]
    counter: Int[Array, "*batch"]
    skipped: Int[Array, "*batch"]
    consecutive_skipped: Int[Array, "*batch"]
    tolerance: Int[Array, "*batch"]
    factor: float = eqx.field(static=True)
    period: int = eqx.field(static=True)
    max_loss_scaling: float = eqx.field(static=True)
    backoff: float = eqx.field(static=True)
    hysteresis: int = eqx.field(static=True)

    def __init__(  # noqa: PLR0913 - `dataclasses.replace` passes every field
        self,
        loss_scaling: Any = 2.0**15,
        min_loss_scaling: Any = 1.0,
        factor: float = 2,
        period: int = 2000,
        counter: Any = None,
        *,
        max_loss_scaling: float = 65504.0,
        backoff: float | None = None,
        hysteresis: int = 1,
        skipped: Any = 0,
        consecutive_skipped: Any = 0,
        tolerance: Any = None,
    ) -> None:
        """Checks the values that are concrete and stores them as f32 and i32."""
        ceiling = as_real(max_loss_scaling, "max_loss_scaling")
        self.loss_scaling = _scale(loss_scaling, "loss_scaling")
        self.min_loss_scaling = _scale(min_loss_scaling, "min_loss_scaling")
        _scale(ceiling, "max_loss_scaling")
        grows = 1 < as_real(factor, "factor") < math.inf
        check_value(grows, "factor", "more than 1", factor)
        backoff = 1 / factor if backoff is None else as_real(backoff, "backoff")
        check_value(0 < backoff < 1, "backoff", "between 0 and 1", backoff)
        if not is_tracer(min_loss_scaling):
            floor, most = float(min_loss_scaling), f"`max_loss_scaling` ({ceiling})"
            check_value(floor <= ceiling, "min_loss_scaling", f"at most {most}", floor)
            # A JAX array may be out of range, as in MPX's own suite: `adjust` clips it.
            is_array = isinstance(loss_scaling, jax.Array)
            if not is_array and not floor <= float(loss_scaling) <= ceiling:
                raise ValueError(
                    f"`loss_scaling` must be at least `min_loss_scaling` ({floor}) and at "
                    f"most {most}, to which the next `adjust` would bring it, but "
                    f"{float(loss_scaling)} was given. Pass other limits, or use "
                    "`mpx.DynamicLossScaling.pow2()`, whose ceiling is 2**24."
                )
        self.factor, self.backoff, self.max_loss_scaling = factor, backoff, ceiling
        self.period = as_count(period, "period", at_least=1)
        self.hysteresis = as_count(hysteresis, "hysteresis", at_least=1)
        self.counter = _count(0 if counter is None else counter, "counter")
        self.skipped = _count(skipped, "skipped")
        self.consecutive_skipped = _count(consecutive_skipped, "consecutive_skipped")
        tolerance = self.hysteresis if tolerance is None else tolerance
        self.tolerance = _count(tolerance, "tolerance", at_least=1)
        if is_tracer(self.loss_scaling) and not is_tracer(loss_scaling):
            object.__setattr__(self, "made_of_constants", True)

    @classmethod
    def pow2(
        cls,
        init: float = 2.0**15,
        *,
        min: float = 1.0,  # the natural name beside `max`
        max: float = 2.0**24,
        factor: float = 2,
        **options: Any,
    ) -> "DynamicLossScaling":
        """Returns a scaling that is a power of two at every step: scaling is exact.

        Args:
            init: The first scale.
            min: The floor.
            max: The ceiling. The scale may pass 65504 because it is applied in f32; a
                loss that is itself f16 overflows there: one skipped step per growth.
            factor: The factor of growth.
            **options: Further arguments of `DynamicLossScaling`.

        Raises:
            ValueError: If one of them is not a power of two.
        """
        scaling = cls(init, min, factor, max_loss_scaling=max, **options)
        powers = dict(
            init=init, min=min, max=max, factor=factor, backoff=scaling.backoff
        )
        for name, value in powers.items():
            check_value(math.frexp(value)[0] == 0.5, name, "a power of two", value)
        return scaling

    def adjust(
        self, grads_finite: PyTree, *, axis_name: AxisName | None = None
    ) -> "DynamicLossScaling":
        """Returns the scaling for the next step.

        Args:
            grads_finite: Whether the gradients of this step were finite, bool[].
            axis_name: Mapped axes over which to combine the flag, unless devices agree.
        """
        finite = as_flag(grads_finite, "grads_finite")
        if axis_name is not None:
            finite = all_devices(finite, axis_name)
        grow = finite & (self.counter >= self.period - 1)
        tolerance = jnp.where(finite, self.tolerance, self.tolerance - 1)
        back_off = ~finite & (tolerance <= 0)
        scale = self.loss_scaling
        scale = jnp.where(grow, scale * jnp.float32(self.factor), scale)
        scale = jnp.where(back_off, scale * jnp.float32(self.backoff), scale)
        scale = jnp.minimum(scale, jnp.float32(self.max_loss_scaling))
        # Used up, the tolerance stays at one: every further overflow backs off.
        tolerance = jnp.where(grow, self.hysteresis, jnp.maximum(tolerance, 1))
        # The largest int32 plus one would be negative.
        more = lambda count: jnp.maximum(count, count + 1)  # noqa: E731
        new = {
            # `fmax` takes the floor for a scale that is nan.
            "loss_scaling": jnp.fmax(scale, self.min_loss_scaling),
            "counter": jnp.where(finite & ~grow, self.counter + 1, 0),
            "skipped": jnp.where(finite, self.skipped, more(self.skipped)),
            "consecutive_skipped": jnp.where(finite, 0, more(self.consecutive_skipped)),
            "tolerance": tolerance,
        }
        where = lambda scaling: [getattr(scaling, name) for name in new]  # noqa: E731
        return eqx.tree_at(where, self, list(new.values()))

    def raise_if_stuck(self, max_consecutive: int = 20) -> None:
        """Raises if the last steps were all skipped with the scale at its floor.

        Call it on the host, outside jit, as often as a wait for the step is affordable.

        Raises:
            FloatingPointError: If `max_consecutive` steps were skipped in a row at the
                floor, or if the scale is nan.
        """
        max_consecutive = as_count(max_consecutive, "max_consecutive", at_least=1)
        skipped, scale = int(self.consecutive_skipped), float(self.loss_scaling)
        if math.isnan(scale):
            raise FloatingPointError(
                "The loss scale is nan, so every gradient is. `adjust` never makes one: "
                "look where the scaling was restored or written to, and make a new one "
                "with `mpx.DynamicLossScaling.pow2()`."
            )
        if skipped >= max_consecutive and scale <= float(self.min_loss_scaling):
            raise FloatingPointError(
                f"The gradients were not finite in the last {skipped} steps although "
                f"the loss scale is at its floor of {scale}. The overflow does not come "
                "from the scale: look for an inf or nan in the data, the loss or the "
                "parameters, or use bf16, which has the range of f32."
            )


def default_loss_scaling(dtype: DTypeLike | None = None) -> LossScaling:
    """Returns the loss scaling that a compute dtype needs.

    It is `DynamicLossScaling.pow2()` for f16, and `NoLossScaling()` for bf16, f32 and f64.

    Args:
        dtype: The compute dtype; `None` is the configured half precision.

    Examples:
        >>> default_loss_scaling("bf16")
        NoLossScaling()
    """
    half = half_precision_datatype() if dtype is None else parse_float_dtype(dtype)
    return DynamicLossScaling.pow2() if half == np.float16 else NoLossScaling()


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


def _scale(value: PyTree, what: str) -> Float[Array, ""]:
    """Returns a scale as f32; raises unless a known one is a positive finite scalar.

    An infinite JAX array passes: MPX's own suite builds one to show that an unused scale
    is harmless, and the first `adjust` brings it back below the ceiling.
    """
    check_value(shape_of(value) == (), what, "a scalar", f"shape {shape_of(value)}")
    is_array = isinstance(value, jax.Array)
    if not is_tracer(value):
        number = as_real(value, what)
        if not (number > 0 and (is_array or math.isfinite(number))):
            raise ValueError(
                f"`{what}` must be positive and finite, but {number} was given. "
                "A usual value is 2.0**15."
            )
        # Beyond, the scale or its reciprocal is subnormal, and processors flush that to 0.
        fits = 2.0**-126 <= number <= LARGEST_SCALE or number == math.inf
        check_value(fits, what, "in [2**-126, 2**126]", number)
    # With a buffer of its own: donation refuses shared ones.
    return jnp.array(value if is_array else np.float32(value), jnp.float32)


def _count(value: PyTree, what: str, at_least: int = 0) -> Int[Array, ""]:
    """Returns a count as i32; raises if it is known and out of range."""
    if not is_tracer(value):
        value, most = as_count(value, what, at_least=at_least), np.iinfo(np.int32).max
        check_value(value <= most, what, f"at most {most}, the largest i32", value)
    return jnp.array(value, dtype=jnp.int32)
