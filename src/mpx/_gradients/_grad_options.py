"""Options of the gradient functions, and what is wrong with them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._casting._half import chosen_half_precision
from mpx._casting._policy import as_policy, dtype_under_amp
from mpx._casting._reduction import EIGHT_BITS, Reduce
from mpx._casting._wrapped import autocast_of
from mpx._jax._arguments import as_count, as_counts, check_axis_name, check_bool
from mpx._jax._formats import parse_float_dtype, short_name
from mpx._jax._tree import AxisName
from mpx._scaling._loss_scaling import NoLossScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradOptions:
    """Options of a gradient function; see `value_and_grad`.

    If `mixed` is false, nothing is cast, scaled or checked.

    Raises:
        ValueError: If `retry` is negative or a dtype is not floating.
        TypeError: If `policy` is neither a policy nor a string, a number no integer, or
            `axis_name` no name.
    """

    argnums: Any = 0
    has_aux: bool = False
    policy: Any = None
    grad_dtype: Any = None
    axis_name: AxisName | None = None
    retry: int = 0
    mixed: bool = True

    def __post_init__(self) -> None:
        """Checks the options: `policy` becomes a `Policy`, `grad_dtype` a dtype."""
        check_axis_name(self.axis_name)
        check_bool(self.has_aux, "`has_aux`")
        policy = as_policy(self.policy)
        if policy.reduce_dtype == EIGHT_BITS and self.axis_name is None:
            raise ValueError(
                'A policy with `reduce_dtype="e4m3"` needs `axis_name`, the axis of a '
                "`shard_map` or, in `mpx.accumulate`, of the mesh: mpx must sum itself."
            )
        dtype = policy.grad_dtype if self.grad_dtype is None else self.grad_dtype
        dtype = None if dtype is None else parse_float_dtype(dtype, "grad_dtype")
        checked = {
            "argnums": as_counts(self.argnums, "argnums"),
            "policy": policy,
            "grad_dtype": dtype,
            "retry": as_count(self.retry, "retry", at_least=0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def settled(self, func: Callable[..., Any], scaling: Any) -> "GradOptions":
        """Returns the options of one call, in which the policy names a compute dtype.

        Args:
            func: The function: under `amp` it computes in the dtype of that.
            scaling: The loss scaling, `None` if none was given. Without a scale a policy
                that leaves the dtype open computes in bf16.

        Raises:
            ValueError: If the policy contradicts `amp`, or if f16 has no loss scale.
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


def _check_reduce(of_policy: Reduce, of_amp: Reduce) -> None:
    if None not in (of_policy, of_amp) and of_policy != of_amp:
        policy, amp = (
            choice if isinstance(choice, str) else short_name(np.dtype(choice))
            for choice in (of_policy, of_amp)
        )
        raise ValueError(
            f"`reduce_dtype` is {policy} in the policy and {amp} in `amp`. Leave one out."
        )


def check_function(func: Any) -> None:
    """Raises unless `func` can be called.

    Raises:
        TypeError: If it cannot.
    """
    if not callable(func):
        raise TypeError(
            f"`func` must be a function, but {type(func).__name__} was given. Pass the "
            "loss function itself, without calling it."
        )


def refuse_positional(misplaced: Sequence[Any], name: str) -> None:
    """Raises if options, or the loss scaling, were passed by position.

    Raises:
        TypeError: If so.
    """
    if misplaced:
        raise TypeError(
            f"`{name}` takes its options by keyword, such as `argnums=`, but "
            f"{type(misplaced[0]).__name__} was given by position. The loss scaling is "
            "the first argument of the function that it returns: "
            f"`mpx.{name}(loss)(scaling, params, batch)`."
        )


def check_scaling(scaling: Any) -> None:
    """Raises unless `scaling` can scale, unscale and adjust.

    Raises:
        TypeError: If it cannot.
    """
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
