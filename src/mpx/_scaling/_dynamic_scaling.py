"""Dynamic loss scaling: a scale that grows, and backs off when gradients overflow."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from mpx._casting._context import half_precision_datatype
from mpx._jax._arguments import as_count, as_real, check_value
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype
from mpx._jax._tree import AxisName, all_devices, as_flag
from mpx._scaling._loss_scaling import (
    LossScaling,
    NoLossScaling,
    check_scale,
    f32_scalar,
)


class DynamicLossScaling(LossScaling):
    """A loss scale that grows while gradients are finite and backs off when not.

    After `period` finite steps in a row the scale is multiplied by `factor`; a step
    with non-finite gradients multiplies it by `backoff`. `adjust` always returns a
    scale within `[min_loss_scaling, max_loss_scaling]`.

    The constructor follows the paper, with a ceiling of exactly 65504, the largest f16
    number, at which the scale stops being a power of two. Prefer
    `DynamicLossScaling.pow2()`: powers of two only, so that scaling is exact.

    Attributes:
        loss_scaling: The scale, f32[], at first between the floor and the ceiling. A JAX
            array, from a restored state, is not checked; `adjust` clips it.
        min_loss_scaling: The floor, f32[].
        counter: Finite steps since the last change, i32[].
        skipped: Non-finite steps in total, i32[].
        consecutive_skipped: Non-finite steps in a row, i32[].
        tolerance: Non-finite steps left before the next backoff, i32[]; at first
            `hysteresis`.
        factor: The factor of growth, more than 1; static.
        period: Finite steps per growth; static.
        max_loss_scaling: The ceiling; static.
        backoff: The factor of backoff, between 0 and 1; `None` is 1/factor; static.
        hysteresis: Non-finite steps that one backoff needs; growth refills the tolerance;
            static.
        consecutive_hysteresis: Whether every finite step refills the tolerance; static.

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
    consecutive_hysteresis: bool = eqx.field(static=True)

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
        consecutive_hysteresis: bool = False,
        skipped: Any = 0,
        consecutive_skipped: Any = 0,
        tolerance: Any = None,
    ) -> None:
        """Checks the values that are concrete and stores them as f32 and i32.

        Raises:
            TypeError: If a value is not a number, or a count not an integer.
            ValueError: If a value is out of its range.
        """
        max_loss_scaling = as_real(max_loss_scaling, "max_loss_scaling")
        scales = {
            "loss_scaling": loss_scaling,
            "min_loss_scaling": min_loss_scaling,
            "max_loss_scaling": max_loss_scaling,
        }
        for name, value in scales.items():
            check_scale(value, name)
        grows = 1 < as_real(factor, "factor") < math.inf
        check_value(grows, "factor", "more than 1", factor)
        hysteresis = as_count(hysteresis, "hysteresis", at_least=1)
        backoff = 1 / factor if backoff is None else as_real(backoff, "backoff")
        check_value(0 < backoff < 1, "backoff", "between 0 and 1", backoff)
        if not is_tracer(min_loss_scaling):
            check_value(
                float(min_loss_scaling) <= max_loss_scaling,
                "min_loss_scaling",
                f"at most `max_loss_scaling` ({max_loss_scaling})",
                float(min_loss_scaling),
            )
            # A JAX array may be out of range, as in MPX's own suite: `adjust` clips it.
            if not isinstance(loss_scaling, jax.Array):
                _check_range(
                    float(loss_scaling), float(min_loss_scaling), max_loss_scaling
                )
        self.loss_scaling = f32_scalar(loss_scaling)
        self.min_loss_scaling = f32_scalar(min_loss_scaling)
        counts = {
            "counter": (0 if counter is None else counter, 0),
            "skipped": (skipped, 0),
            "consecutive_skipped": (consecutive_skipped, 0),
            "tolerance": (hysteresis if tolerance is None else tolerance, 1),
        }
        for name, (value, least) in counts.items():
            setattr(self, name, _i32_scalar(value, name, least))
        self.factor = factor
        self.period = as_count(period, "period", at_least=1)
        self.max_loss_scaling = max_loss_scaling
        self.backoff = backoff
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
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
                loss that is itself f16 overflows there, which costs one skipped step
                per growth.
            factor: The factor of growth.
            **options: Further arguments of `DynamicLossScaling`.

        Raises:
            ValueError: If one of them is not a power of two.

        Examples:
            >>> float(DynamicLossScaling.pow2(2.0**10).loss_scaling)
            1024.0
        """
        scaling = cls(init, min, factor, max_loss_scaling=max, **options)
        powers = {"init": init, "min": min, "max": max, "factor": factor}
        for name, value in {**powers, "backoff": scaling.backoff}.items():
            power = math.frexp(value)[0] == 0.5
            check_value(power, name, "a power of two", value)
        return scaling

    def adjust(
        self, grads_finite: PyTree, *, axis_name: AxisName | None = None
    ) -> "DynamicLossScaling":
        """Returns the scaling for the next step.

        Args:
            grads_finite: Whether the gradients of this step were finite: a boolean
                scalar, Python or array.
            axis_name: Combines the flag over `shard_map`, `pmap` or `vmap` axes first,
                so that the devices agree. Not needed if the flag already agrees.

        Raises:
            TypeError: If `grads_finite` is not a boolean scalar.
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
        refill = finite if self.consecutive_hysteresis else grow
        # Used up, the tolerance stays at one: every further overflow backs off.
        tolerance = jnp.where(refill, self.hysteresis, jnp.maximum(tolerance, 1))
        new = {
            # `fmax` takes the floor for a scale that is nan.
            "loss_scaling": jnp.fmax(scale, self.min_loss_scaling),
            "counter": jnp.where(finite & ~grow, self.counter + 1, 0),
            "skipped": jnp.where(finite, self.skipped, _next(self.skipped)),
            "consecutive_skipped": jnp.where(
                finite, 0, _next(self.consecutive_skipped)
            ),
            "tolerance": tolerance,
        }
        return eqx.tree_at(
            lambda s: [getattr(s, name) for name in new], self, list(new.values())
        )

    def metrics(self) -> dict[str, Array]:
        """Returns values to log, as arrays: nothing is read back to the host."""
        names = ("loss_scaling", "counter", "skipped", "consecutive_skipped")
        return {name: getattr(self, name) for name in names}

    def raise_if_stuck(self, max_consecutive: int = 20) -> None:
        """Raises if the last steps were all skipped with the scale at its floor.

        Call it on the host, outside jit, as often as a wait for the step is affordable.

        Args:
            max_consecutive: How many skipped steps in a row are too many.

        Raises:
            FloatingPointError: If this many steps were skipped in a row at the floor, or
                if the scale is nan.
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


def _check_range(first: float, floor: float, ceiling: float) -> None:
    check_value(
        first >= floor,
        "loss_scaling",
        f"at least `min_loss_scaling` ({floor})",
        f"{first}, which the next `adjust` would raise,",
    )
    if first > ceiling:
        raise ValueError(
            f"`loss_scaling` must be at most `max_loss_scaling` ({ceiling}), but {first} "
            "was given, which the next `adjust` would lower. Use "
            "`mpx.DynamicLossScaling.pow2()`, whose ceiling is 2**24, or pass a larger "
            "`max_loss_scaling`."
        )


def _i32_scalar(value: PyTree, what: str, at_least: int) -> Int[Array, ""]:
    """Returns a count as i32; raises if it is known and out of range."""
    if not is_tracer(value):
        value = as_count(value, what, at_least=at_least)
        most = np.iinfo(np.int32).max
        check_value(value <= most, what, f"at most {most}, the largest i32", value)
    return jnp.array(value, dtype=jnp.int32)


def _next(count: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Returns the count plus one; the largest i32 stays."""
    return jnp.where(count == np.iinfo(np.int32).max, count, count + 1)


def default_loss_scaling(dtype: DTypeLike | None = None) -> LossScaling:
    """Returns the loss scaling that a compute dtype needs.

    Args:
        dtype: The compute dtype; `None` is the configured half precision.

    Returns:
        `DynamicLossScaling.pow2()` for f16, whose smallest normal number is 6e-5;
        `NoLossScaling()` for bf16, f32 and f64.

    Examples:
        >>> default_loss_scaling("bf16")
        NoLossScaling()
    """
    half = half_precision_datatype() if dtype is None else parse_float_dtype(dtype)
    return DynamicLossScaling.pow2() if half == np.float16 else NoLossScaling()
