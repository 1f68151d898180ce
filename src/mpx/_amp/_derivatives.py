"""Recursion into functions with derivative rules of their own.

Forward and derivative are both rewritten, with what is known of the arguments. A rule
learns of each argument whether it is perturbed, and the rule that it replaces is told
the same. Rules are kept by the jaxprs that they become part of, so they hold types, never
values: a value would be a leaked tracer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from mpx._amp._attention import trace
from mpx._amp._calls import (
    Outcome,
    cast_all,
    float_dtypes,
    metas_by_dtype,
    rewrite,
    types_of,
    with_dtype,
    without_literals,
)
from mpx._amp._values import F32, NEUTRAL, Meta, as_array, cast, is_eligible
from mpx._compat import eval_equation, open_jaxpr


class _CustomCall:
    """A call of a function with its own derivative rule.

    The rule is expanded at the dtypes it was written for, and then rewritten.
    """

    def __init__(
        self,
        amp: Any,
        eqn: Any,
        avals: Sequence[Any],
        metas: list[Meta],
        scopes: tuple[str, ...],
    ) -> None:
        self.amp, self.eqn, self.metas, self.scopes = amp, eqn, metas, scopes
        jaxpr = eqn.params["call_jaxpr"]
        new, _ = rewrite(amp, jaxpr, avals, metas, scopes)
        self.dtypes = float_dtypes(eqn.outvars, new.out_avals)

    def run(self, *args: Any) -> list[Any]:
        """Runs the function itself."""
        outs, _ = self.rewritten(self.eqn.params["call_jaxpr"], args, self.metas)
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

    def differentiable(self, perturbed: Sequence[bool]) -> tuple[int, ...]:
        """Returns the operands for which a derivative is asked."""
        pairs = zip(self.eqn.invars, perturbed, strict=True)
        return tuple(
            i for i, (var, asked) in enumerate(pairs) if asked and _smooth(var)
        )

    def partially(self, args: Sequence[Any], free: Sequence[int]) -> Callable[..., Any]:
        """Returns the original equation as a function of some of its operands."""

        def call(*chosen: Any) -> list[Any]:
            full = list(args)
            for i, value in zip(free, chosen, strict=True):
                full[i] = value
            return eval_equation(self.eqn, full)

        return call


def _smooth(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


# --- custom_jvp -----------------------------------------------------------------------


def _custom_jvp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    if amp.f32_weight_grads:
        # Such a matmul has no tangent, and the rule is about tangents.
        amp = dataclasses.replace(amp, f32_weight_grads=False, cache={}, made={})
    values = [as_array(value) for value in values]
    custom = _CustomCall(amp, eqn, types_of(values), without_literals(metas), scopes)
    call = jax.custom_jvp(custom.run)

    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        free = custom.differentiable([not _is_zero(tangent) for tangent in tangents])
        if any(i < eqn.params["num_consts"] for i in free):
            raise NotImplementedError(
                "A value that a function under `jax.custom_jvp` closes over is "
                "differentiated, but the rule of the function knows its arguments only. "
                "Pass the value as an argument."
            )
        smooth = [i for i, var in enumerate(eqn.outvars) if _smooth(var)]
        live: set[int] = set()

        def expanded(args: list[Any], chosen: list[Any]) -> tuple[list[Any], list[Any]]:
            live.clear()

            def call(*chosen: Any) -> list[Any]:
                outs = custom.partially(args, free)(*chosen)
                if not eqn.params["symbolic_zeros"]:
                    live.update(smooth)
                    return outs
                return [
                    _watch_tangent(out, i, live) if i in smooth else out
                    for i, out in enumerate(outs)
                ]

            outs, pushed = jax.jvp(call, [args[i] for i in free], chosen)
            return outs, [pushed[i] for i in sorted(live)]

        avals = custom.original_avals(primals)
        new = trace(expanded)(avals, [avals[i] for i in free])
        outs, _ = custom.rewritten(
            new,
            [*primals, *(tangents[i] for i in free)],
            # The rule of a parameter is that of its tangent; but a tangent must stay
            # linear, and what follows as a parameter saturates.
            [*custom.metas, *(custom.metas[i]._replace(role=None) for i in free)],
        )
        count = len(eqn.outvars)
        pushed = dict(zip(sorted(live), outs[count:], strict=True))
        outs = cast_all(outs[:count], custom.dtypes)
        return outs, [
            cast(pushed[i], out.dtype) if i in pushed else _zero(out)
            for i, out in enumerate(outs)
        ]

    call.defjvp(rule, symbolic_zeros=True)
    outs = list(call(*values))
    return outs, metas_by_dtype(outs)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _zero(primal: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(primal).to_tangent_aval())


def _watch_tangent(x: Any, index: int, live: set[int]) -> Any:
    """Returns `x`; if its tangent is not known to be zero, notes the index."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        if not _is_zero(tangents[0]):
            live.add(index)
        return primals[0], tangents[0]

    same.defjvp(rule, symbolic_zeros=True)
    return same(x)


# --- custom_vjp -----------------------------------------------------------------------


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Pullback:
    """How the user's backward function is called, learnt while the forward one is traced.

    It travels with the residuals: the forward function is traced once for each set of
    perturbed arguments.

    Attributes:
        free: The operands for which a derivative is asked.
        tangents: Their types in the traced function.
        tree: The structure of the residuals, which holds the linear function.
        residuals: Their types in the traced function.
        metas: What is known of them.
        outs: The types of the results in the traced function.
        live: Filled while the backward function is traced: the operands whose cotangent
            it does not leave out.
    """

    free: tuple[int, ...]
    tangents: list[Any]
    tree: Any
    residuals: list[Any]
    metas: list[Meta]
    outs: list[Any]
    live: set[int]


def _custom_vjp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values = [as_array(value) for value in values]
    given = [value.dtype for value in values]
    custom = _CustomCall(amp, eqn, types_of(values), without_literals(metas), scopes)

    def forward(*primals: Any) -> tuple[list[Any], tuple[_Pullback, list[Any]]]:
        args = [primal.value for primal in primals]
        # Differentiating for a value that the function closed over is refused by JAX.
        free = custom.differentiable([primal.perturbed for primal in primals])
        avals, live = custom.original_avals(args), set[int]()
        found: dict[str, Any] = {}

        def expanded(*args: Any) -> list[Any]:
            def call(*chosen: Any) -> list[Any]:
                pairs = zip(free, chosen, strict=True)
                watched = [_watch_cotangent(x, i, live) for i, x in pairs]
                return custom.partially(args, free)(*watched)

            outs, pushforward = jax.linearize(call, *(args[i] for i in free))
            residuals, found["tree"] = jax.tree.flatten(pushforward)
            found["residuals"], found["outs"] = types_of(residuals), types_of(outs)
            return [*outs, *residuals]

        new = trace(expanded)(*avals)
        outs, metas = custom.rewritten(new, args, custom.metas)
        count = len(eqn.outvars)
        pullback = _Pullback(
            free=free,
            tangents=[avals[i] for i in free],
            metas=without_literals(metas[count:]),
            live=live,
            **found,
        )
        return cast_all(outs[:count], custom.dtypes), (pullback, outs[count:])

    def backward(
        kept: tuple[_Pullback, list[Any]], cotangents: list[Any]
    ) -> tuple[Any, ...]:
        pullback, residuals = kept
        chosen = [
            i
            for i, var in enumerate(eqn.outvars)
            if _smooth(var) and not _is_zero(cotangents[i])
        ]

        def expanded(residuals: list[Any], cotangents: list[Any]) -> Any:
            pullback.live.clear()
            pushforward = jax.tree.unflatten(pullback.tree, residuals)

            def linear(*tangents: Any) -> list[Any]:
                outs = pushforward(*tangents)
                # Of the others the user's function is told that they are zero.
                return [outs[i] for i in chosen]

            return jax.linear_transpose(linear, *pullback.tangents)(cotangents)

        new = trace(expanded)(pullback.residuals, [pullback.outs[i] for i in chosen])
        outs, _ = custom.rewritten(
            new,
            [*residuals, *(cotangents[i] for i in chosen)],
            [*pullback.metas, *[NEUTRAL] * len(chosen)],
        )
        grads: list[Any] = [None] * len(given)
        for i, grad in zip(pullback.free, outs, strict=True):
            if i in pullback.live:
                grads[i] = cast(grad, given[i])
        return tuple(grads)

    call = jax.custom_vjp(custom.run)
    call.defvjp(forward, backward, symbolic_zeros=True)
    outs = list(call(*values))
    return outs, metas_by_dtype(outs)


def _watch_cotangent(x: Any, index: int, live: set[int]) -> Any:
    """Returns `x`; if its cotangent is not known to be zero, notes the index."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        if not _is_zero(cotangent):
            live.add(index)
        return (cotangent,)

    same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return same(x)


HANDLERS: dict[str, Callable[..., Outcome]] = {
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
