"""Options of the gradient functions, and checks of what users pass to them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypedDict

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._context import autocast_of, chosen_half_precision
from mpx._casting._policy import Policy, as_policy, dtype_under_amp
from mpx._jax._arguments import as_count, as_counts, check_axis_name, check_bool
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype
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
    """Options of a gradient function, checked. Unless `mixed`, all runs as written."""

    argnums: tuple[int, ...]
    several: bool  # whether the gradients are a tuple
    has_aux: bool
    policy: Policy
    grad_dtype: np.dtype | None
    axis_name: AxisName | None
    retry: int
    mixed: bool
    # Of `accumulate`: the parts, the arguments that are split, and whether to average
    steps: int = 1
    batches: tuple[int, ...] = ()
    mean: bool = True

    def for_call(
        self, func: Callable[..., PyTree], scaling: LossScaling | None
    ) -> "GradOptions":
        """Returns the options of one call, in which the policy names a compute dtype."""
        policy, low = self.policy, dtype_under_amp(func, self.policy)
        if not self.mixed:
            if low is not None:
                raise ValueError(
                    "`use_mixed_precision=False` switches nothing off in a function "
                    "under `amp`, which computes in 16 bits by itself. Pass the function "
                    "without `amp`."
                )
            return self
        own = None if self.axis_name is not None else autocast_of(func)
        reduces = (policy.reduce_dtype, None if own is None else own().reduce)
        if None not in reduces and reduces[0] != reduces[1]:
            raise ValueError(
                f"`reduce_dtype` is {reduces[0]} in the policy and {reduces[1]} in `amp`. "
                "Leave one out."
            )
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


def grad_options(
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    argnums: int | Sequence[int] = 0,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> GradOptions:
    """Checks the options of a gradient function."""
    check_axis_name(axis_name)
    check_bool(has_aux, "`has_aux`")
    check_bool(use_mixed_precision, "`use_mixed_precision`")
    policy, argnums = as_policy(policy), as_counts(argnums, "argnums")
    dtype = policy.grad_dtype if grad_dtype is None else grad_dtype
    return GradOptions(
        argnums=(argnums,) if isinstance(argnums, int) else argnums,
        several=not isinstance(argnums, int),
        has_aux=bool(has_aux),
        policy=policy,
        grad_dtype=None if dtype is None else parse_float_dtype(dtype, "grad_dtype"),
        axis_name=axis_name,
        retry=as_count(retry, "retry", at_least=0),
        mixed=bool(use_mixed_precision),
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
    is_fixed = getattr(type(scaling), "adjust", None) is LossScaling.adjust
    if not isinstance(scaling, LossScaling) or is_fixed:
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
