"""Numbers that a step reads: hyperparameters, their checks, and clipping."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, PyTree

from mpx._jax._compat import is_tracer
from mpx._jax._tree import dtype_of, shape_of
from mpx._optim._options import ParamGroup
from mpx._optim._update_rules import Rule
from mpx._quant import dither_of

Hyper = float | Array | Callable[[Array], ArrayLike]
"""A number, an array, or a schedule: a function of the step count."""


@dataclasses.dataclass(eq=False)
class StepScalars:
    """Coefficients for each combination of group and decay, computed once."""

    rule: Rule
    hyper: Mapping[str, Hyper]
    count: Array
    scale: Array
    known: dict[tuple[int, bool], Array] = dataclasses.field(default_factory=dict)

    def of(self, group: ParamGroup | None, decays: bool) -> Array:
        """Returns the scalars of a `LeafStep` in one f32 array."""
        key = (id(group), decays)
        if key not in self.known:
            merged = {**self.hyper, **(group.hyper if group else {})}
            if not decays:
                merged["weight_decay"] = 0.0
            values = {name: self._value(name, merged[name]) for name in self.rule.hyper}
            # As in the state: the largest int32 plus one would be negative.
            step = jnp.asarray(optax.safe_increment(self.count))
            numbers = self.rule.coefficients(values, step.astype(jnp.float32))
            self.known[key] = jnp.stack([self.scale, *dither_of(step), *numbers])
        return self.known[key]

    def _value(self, name: str, value: Hyper) -> Array:
        return as_scalar(name, value(self.count) if callable(value) else value)


# --- checks ---------------------------------------------------------------------------

_Range = tuple[Callable[[float], bool], str]
_BELOW_ONE: _Range = (lambda x: 0 <= x < 1), "lie in [0, 1)"
_ANY_RATE: _Range = (lambda x: 0 <= x < np.inf), "lie in [0, ∞)"
_RANGES: dict[str, _Range] = {
    "b1": _BELOW_ONE,
    "b2": _BELOW_ONE,
    "momentum": _BELOW_ONE,
    "dampening": ((lambda x: 0 <= x <= 1), "lie in [0, 1]"),
    "eps": ((lambda x: 0 < x < np.inf), "lie in (0, ∞)"),
}


def check_hyper(values: Mapping[str, Any]) -> None:
    """Raises for hyperparameters that are out of range or too coarse.

    Traced values and schedules are not known yet.
    """
    for name, value in values.items():
        if callable(value):
            continue
        _check_scalar(name, value)
        dtype = getattr(value, "dtype", np.dtype(np.float32))
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
            raise ValueError(
                f"`{name}` is {dtype}, in which 0.999 would be 1; f32 is needed. "
                "`optax.inject_hyperparams` gives hyperparameters the dtype of the "
                "parameters unless it is called with `hyperparam_dtype=jnp.float32`."
            )
        _check_range(name, value, *_RANGES.get(name, _ANY_RATE))


def _check_scalar(name: str, value: Any) -> None:
    """Raises if a value is not one number."""
    dtype = getattr(value, "dtype", None)
    is_real = isinstance(value, int | float) or (
        dtype is not None
        and any(jnp.issubdtype(dtype, t) for t in (jnp.floating, jnp.integer, np.bool_))
    )
    if not is_real:
        raise TypeError(
            f"`{name}` must be a number or a scalar array, but "
            f"{dtype or type(value).__name__} was given."
        )
    if shape_of(value) != ():
        raise ValueError(
            f"`{name}` must be a scalar, but its shape is {shape_of(value)}. Take one of "
            "its elements."
        )


def _check_range(
    name: str, value: Any, fits: Callable[[float], bool], range_: str
) -> None:
    """Raises if a known number is out of its range in f32, in which it is used."""
    if is_tracer(value):
        return
    with np.errstate(over="ignore"):
        used = float(np.float32(value))
    if not fits(used):
        given = f"{value!r} was given"
        if fits(float(value)):
            given += f", which is {used} in f32"
        raise ValueError(f"`{name}` must {range_}, but {given}.")


def as_scalar(name: str, value: Any) -> Array:
    """Returns a number as f32; raises if it is not one."""
    _check_scalar(name, value)
    return jnp.asarray(value, jnp.float32)


def as_grad_scale(value: Any) -> Array:
    """Returns `grad_scale` as f32; raises if it is not a number, or is inf or nan.

    Only Python and NumPy numbers are checked: an array may still be being computed.
    """
    scale = as_scalar("grad_scale", value)
    if isinstance(value, int | float | np.ndarray | np.generic):
        _check_range("grad_scale", value, np.isfinite, "be finite")
    return scale


# --- clipping -------------------------------------------------------------------------


class Clip(NamedTuple):
    """The result of `clip_scale`.

    Attributes:
        grad_scale: For `step`: undoes the loss scale and clips.
        norm: The norm of the unscaled gradients before clipping.
        finite: Whether that norm is finite, for `step(finite=...)`.
    """

    grad_scale: Float[Array, ""]
    norm: Float[Array, ""]
    finite: Bool[Array, ""]


def clip_scale(
    grads: PyTree, max_norm: ArrayLike, *, grad_scale: ArrayLike = 1.0
) -> Clip:
    """Returns the factor that clips gradients to a global norm.

    The gradients are read once and not copied: pass the result to the `step` of a
    compressed optimizer, which applies it. The rule is that of
    `optax.clip_by_global_norm`; squares are summed in f32.

    Args:
        grads: The gradients, possibly still scaled, in any floating or complex dtype.
            Other leaves, such as `None` and integers, are ignored.
        max_norm: The largest norm allowed, a scalar; inf only computes the norm.
        grad_scale: The factor that unscales the gradients, a scalar: one over the loss
            scale.

    Raises:
        TypeError: If `max_norm` or `grad_scale` is not a number.
        ValueError: If one of them is not a scalar, or `max_norm` is not positive.

    Examples:
        >>> clip = clip_scale({"w": jnp.full(4, 8.0)}, 1.0, grad_scale=0.5)
        >>> float(clip.norm), float(clip.grad_scale)
        (8.0, 0.0625)
    """
    limit = as_scalar("max_norm", max_norm)
    _check_range("max_norm", max_norm, lambda x: x > 0, "be positive")
    scale = as_grad_scale(grad_scale)
    one, zero = jnp.ones((), jnp.float32), jnp.zeros((), jnp.float32)
    norm = jnp.sqrt(sum((_squares(g, scale) for g in jax.tree.leaves(grads)), zero))
    # Not `limit / max(norm, limit)`, which is nan if there is no limit: inf.
    factor = jnp.where(norm > limit, limit / norm, one)
    return Clip(scale * factor, norm, jnp.isfinite(norm))


def _squares(grad: Any, scale: Array) -> Array:
    """Returns the sum of the squares of a gradient; zero for other leaves."""
    dtype = dtype_of(grad)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros((), jnp.float32)
    grad = jnp.asarray(grad)
    parts = (grad.real, grad.imag) if jnp.iscomplexobj(grad) else (grad,)
    squares = [jnp.sum(jnp.square(part.astype(jnp.float32) * scale)) for part in parts]
    return sum(squares[1:], squares[0])
