"""Recursion into functions with derivative rules of their own.

Forward and derivative are both rewritten, with what is known of the arguments.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpx._amp._calls import (
    Dtypes,
    Outcome,
    cast_all,
    float_dtypes,
    metas_by_dtype,
    rewrite,
    trace,
    types_of,
    with_dtype,
    without_literals,
)
from mpx._amp._values import F32, NEUTRAL, Meta, as_array, cast, is_eligible
from mpx._compat import eval_equation, open_jaxpr


def _natural_dtypes(
    amp: Any,
    eqn: Any,
    values: list[Any],
    metas: Sequence[Meta],
    scopes: tuple[str, ...],
) -> Dtypes:
    new, _ = rewrite(amp, eqn.params["call_jaxpr"], types_of(values), metas, scopes)
    return float_dtypes(eqn.outvars, new.out_avals)


class _CustomCall:
    """A call of a function with its own derivative rule.

    The rule is expanded at the dtypes it was written for, and then rewritten. Values
    that the function closed over are closed over again, so that JAX still refuses to
    differentiate with respect to them.
    """

    def __init__(
        self,
        amp: Any,
        eqn: Any,
        values: list[Any],
        metas: list[Meta],
        scopes: tuple[str, ...],
    ) -> None:
        values = [as_array(value) for value in values]
        metas = without_literals(metas)
        count = eqn.params.get("num_consts", 0)
        self.amp, self.eqn, self.metas, self.scopes = amp, eqn, metas, scopes
        self.closed_over, self.args = values[:count], values[count:]
        self.dtypes = _natural_dtypes(amp, eqn, values, metas, scopes)
        self.free = [
            i
            for i, var in enumerate(eqn.invars)
            if i >= count and jnp.issubdtype(var.aval.dtype, jnp.inexact)
        ]

    def run(self, *args: Any) -> list[Any]:
        """Runs the function itself."""
        jaxpr = self.eqn.params["call_jaxpr"]
        outs, _ = self.rewritten(jaxpr, (*self.closed_over, *args), self.metas)
        return cast_all(outs, self.dtypes)

    def rewritten(
        self, jaxpr: Any, args: Sequence[Any], metas: Sequence[Meta]
    ) -> Outcome:
        """Runs a jaxpr that was traced at the original dtypes."""
        return self.amp.run(*open_jaxpr(jaxpr), args, metas, self.scopes)

    def original_avals(self, values: Sequence[Any]) -> list[Any]:
        """Returns the types of operands with the dtypes of the traced function."""
        return [
            with_dtype(jax.typeof(value), F32 if is_eligible(var.aval) else None)
            for var, value in zip(self.eqn.invars, values, strict=True)
        ]

    def partially(self, values: Sequence[Any]) -> Callable[..., Any]:
        """Returns the original equation as a function of its differentiable operands."""

        def call(*chosen: Any) -> list[Any]:
            full = list(values)
            for i, value in zip(self.free, chosen, strict=True):
                full[i] = value
            return eval_equation(self.eqn, full)

        return call


def _custom_jvp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    if amp.f32_weight_grads:
        # Such a matmul has no tangent, and the rule is about tangents.
        amp = dataclasses.replace(amp, f32_weight_grads=False, cache={})
    custom = _CustomCall(amp, eqn, values, metas, scopes)
    free, dtypes = custom.free, custom.dtypes
    call = jax.custom_jvp(custom.run)

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        count = len(custom.closed_over)
        primals, tangents = (
            [*custom.closed_over, *primals],
            [None] * count + [*tangents],
        )
        avals = custom.original_avals(primals)

        def expanded(args: list[Any], chosen: list[Any]) -> Any:
            return jax.jvp(custom.partially(args), [args[i] for i in free], chosen)

        new = trace(expanded)(avals, [avals[i] for i in free])
        outs, _ = custom.rewritten(
            new,
            [*primals, *(tangents[i] for i in free)],
            # The rule of a parameter is that of its tangent.
            [*custom.metas, *(custom.metas[i] for i in free)],
        )
        half = len(outs) // 2
        return cast_all(outs[:half], dtypes), cast_all(outs[half:], dtypes)

    outs = list(call(*custom.args))
    return outs, metas_by_dtype(outs)


def _custom_vjp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    custom = _CustomCall(amp, eqn, values, metas, scopes)
    free, count = custom.free, len(custom.closed_over)
    given = [value.dtype for value in custom.args]
    # How the user's backward function is called, learnt while the forward one is traced.
    learnt: dict[str, Any] = {}

    def forward(*args: Any) -> tuple[list[Any], list[Any]]:
        def expanded(*args: Any) -> list[Any]:
            outs, backward = jax.vjp(custom.partially(args), *(args[i] for i in free))
            residuals, learnt["tree"] = jax.tree.flatten(backward)
            learnt["residuals"] = types_of(residuals)
            learnt["outs"] = types_of(outs)
            return [*outs, *residuals]

        args = (*custom.closed_over, *args)
        new = trace(expanded)(*custom.original_avals(args))
        outs, metas = custom.rewritten(new, args, custom.metas)
        n_outs = len(learnt["outs"])
        learnt["metas"] = without_literals(metas[n_outs:])
        return cast_all(outs[:n_outs], custom.dtypes), outs[n_outs:]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def expanded(residuals: list[Any], cotangents: list[Any]) -> Any:
            return jax.tree.unflatten(learnt["tree"], residuals)(list(cotangents))

        new = trace(expanded)(learnt["residuals"], learnt["outs"])
        metas = [*learnt["metas"], *[NEUTRAL] * len(cotangents)]
        outs, _ = custom.rewritten(new, [*residuals, *cotangents], metas)
        grads: list[Any] = [None] * len(given)
        for i, grad in zip(free, outs, strict=True):
            grads[i - count] = cast(grad, given[i - count])
        return tuple(grads)

    call = jax.custom_vjp(custom.run)
    call.defvjp(forward, backward)
    outs = list(call(*custom.args))
    return outs, metas_by_dtype(outs)


HANDLERS: dict[str, Callable[..., Outcome]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
