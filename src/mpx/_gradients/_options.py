"""Options of the gradient functions, and checks of what users pass to them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._context import Reduce, autocast_of, chosen_half_precision
from mpx._casting._policy import Policy, as_policy, dtype_under_amp
from mpx._jax._arguments import as_count, as_counts, check_axis_name, check_bool
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype, short_name
from mpx._jax._tree import AxisName
from mpx._jax._warn import warn
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling


class GradKeywords(TypedDict, total=False):
    """Options that all gradient functions pass on; see `value_and_grad`."""

    policy: Policy | str | None
    grad_dtype: DTypeLike | None
    axis_name: AxisName | None
    retry: int


class ArgnumKeywords(GradKeywords, total=False):
    """The same, and which arguments to differentiate."""

    argnums: int | Sequence[int]


class WindowKeywords(ArgnumKeywords, total=False):
    """The options of `accumulate`."""

    batch_argnums: int | Sequence[int]
    mean: bool
    has_aux: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradOptions:
    """Options of a gradient function, checked; see `value_and_grad`.

    If `mixed` is false, nothing is cast, scaled or checked.
    """

    argnums: int | tuple[int, ...]
    has_aux: bool
    policy: Policy
    grad_dtype: np.dtype | None
    axis_name: AxisName | None
    retry: int
    mixed: bool

    def for_call(
        self, func: Callable[..., PyTree], scaling: LossScaling | None
    ) -> "GradOptions":
        """Returns the options of one call, in which the policy names a compute dtype.

        Under `amp` that is the dtype of `amp`. Without a scale, a policy that leaves the
        dtype open computes in bf16.
        """
        policy, low = self.policy, dtype_under_amp(func, self.policy)
        if not self.mixed:
            if low is not None:
                raise ValueError(
                    "`use_mixed_precision=False` switches nothing off in a function "
                    "under `amp`, which computes in 16 bits by itself. Pass the function "
                    "without `amp`."
                )
            return self
        own = autocast_of(func)
        if own is not None and self.axis_name is None:
            _check_reduce(policy.reduce_dtype, own().reduce)
        has_none = isinstance(scaling, NoLossScaling)
        default = np.dtype(jnp.bfloat16 if has_none else np.float16)
        dtype = low or policy.compute_dtype or chosen_half_precision() or default
        if dtype == np.float16 and (scaling is None or has_none):
            raise ValueError(
                "f16 gradients need a loss scaling: without one, those below 6e-8 become "
                "0. Pass `mpx.DynamicLossScaling.pow2()` as the scaling; or compute in "
                'bf16, with `policy="p=f32,c=bf16,o=f32"` or `amp(func, "bf16")`. '
                "`mpx.StaticLossScaling(1.0)` is f16 with a scale of 1."
            )
        policy = dataclasses.replace(policy, compute_dtype=dtype)
        return dataclasses.replace(self, policy=policy)

    def argnum_tuple(self) -> tuple[int, ...]:
        """Returns the differentiated positions as a tuple."""
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums


def grad_options(
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
    mixed: bool = True,
) -> GradOptions:
    """Checks the options of a gradient function."""
    check_axis_name(axis_name)
    check_bool(has_aux, "`has_aux`")
    policy = as_policy(policy)
    dtype = policy.grad_dtype if grad_dtype is None else grad_dtype
    return GradOptions(
        argnums=as_counts(argnums, "argnums"),
        has_aux=bool(has_aux),
        policy=policy,
        grad_dtype=None if dtype is None else parse_float_dtype(dtype, "grad_dtype"),
        axis_name=axis_name,
        retry=as_count(retry, "retry", at_least=0),
        mixed=mixed,
    )


def _check_reduce(of_policy: Reduce, of_amp: Reduce) -> None:
    if None not in (of_policy, of_amp) and of_policy != of_amp:
        policy, amp = (
            choice if isinstance(choice, str) else short_name(np.dtype(choice))
            for choice in (of_policy, of_amp)
        )
        raise ValueError(
            f"`reduce_dtype` is {policy} in the policy and {amp} in `amp`. Leave one out."
        )


def check_function(func: object) -> None:
    """Raises a `TypeError` unless `func` can be called."""
    if not callable(func):
        raise TypeError(
            f"`func` must be a function, but {type(func).__name__} was given. Pass the "
            "loss function itself, without calling it."
        )


def refuse_positional(misplaced: Sequence[object], name: str) -> None:
    """Raises a `TypeError` if options, or the loss scaling, were passed by position."""
    if misplaced:
        raise TypeError(
            f"`{name}` takes its options by keyword, such as `argnums=`, but "
            f"{type(misplaced[0]).__name__} was given by position. The loss scaling is "
            "the first argument of the function that it returns: "
            f"`mpx.{name}(loss)(scaling, params, batch)`."
        )


def check_scaling(scaling: object) -> None:
    """Raises a `TypeError` unless `scaling` can scale, unscale and adjust."""
    methods = ("scale", "unscale", "adjust")
    found = f"{type(scaling).__name__} was given"
    if isinstance(scaling, type):
        found = f"the class `{scaling.__name__}` was given, not an instance of it"
    elif all(hasattr(scaling, name) for name in methods):
        return
    raise TypeError(
        "`scaling` must be a loss scaling such as `mpx.DynamicLossScaling.pow2()`, "
        f"but {found}. For bf16 pass `mpx.NoLossScaling()`. (`value_and_grad` and "
        "`accumulate` take it as the first argument of the transformed function.)"
    )


def warn_of_constant_scaling(scaling: object) -> None:
    """Warns of an adaptive scaling that is a constant of the function being compiled."""
    if not isinstance(scaling, LossScaling) or not scaling.adapts:
        return
    known = scaling.made_of_constants or not is_tracer(scaling.loss_scaling)
    # While JAX compiles, every computed value is a tracer.
    if known and is_tracer(jnp.zeros(())):
        warn(
            "The loss scaling is not an argument of the function that is being "
            "compiled, so its scale is compiled in as a constant: every step uses the "
            "first one, and once that overflows all steps are skipped. Make the "
            "scaling an argument and a result of the jitted function: "
            "`step(scaling, params, batch) -> (result.scaling, …)`."
        )
