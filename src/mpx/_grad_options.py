"""What a user may say about a gradient, checked before anything is traced."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from mpx._arguments import as_count, as_counts, check_axis_name
from mpx._formats import parse_float_dtype
from mpx._policy import Policy, as_policy
from mpx._tree import AxisName


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradOptions:
    """How a gradient is taken; see `value_and_grad` for the meaning of each."""

    argnums: int | tuple[int, ...]
    has_aux: bool
    policy: Policy
    grad_dtype: np.dtype | None
    axis_name: AxisName | None
    retry: int

    @classmethod
    def checked(
        cls,
        *,
        argnums: int | Sequence[int],
        has_aux: bool,
        policy: Policy | str | None,
        grad_dtype: DTypeLike | None,
        axis_name: AxisName | None,
        retry: int,
    ) -> "GradOptions":
        """Returns options from what the user gave.

        Raises:
            ValueError: If `retry` is negative or a dtype is not floating.
            TypeError: If `policy` is neither a policy nor a string, a number no integer,
                or `axis_name` no name.
        """
        check_axis_name(axis_name)
        policy = as_policy(policy)
        dtype = policy.grad_dtype if grad_dtype is None else grad_dtype
        return cls(
            argnums=as_counts(argnums, "argnums"),
            has_aux=has_aux,
            policy=policy,
            grad_dtype=None
            if dtype is None
            else parse_float_dtype(dtype, "grad_dtype"),
            axis_name=axis_name,
            retry=as_count(retry, "retry", at_least=0),
        )

    def argnum_tuple(self) -> tuple[int, ...]:
        """Returns the differentiated positions as a tuple."""
        return (self.argnums,) if isinstance(self.argnums, int) else self.argnums


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
