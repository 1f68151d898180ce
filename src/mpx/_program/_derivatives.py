"""Functions with derivative rules of their own, rebuilt with rules that were visited.

Forward and derivative are both visited, with what is known of the arguments. A rule learns
of each argument whether it is perturbed, and the rule that it replaces is told the same.
Rules are kept by the jaxprs that they become part of, so they hold types, never values: a
value would be a leaked tracer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree

from mpx._jax._compat import (
    as_function,
    eval_equation,
    hi_has_tangents,
    hi_jaxpr,
    hi_remat,
    open_jaxpr,
)
from mpx._program._interpreter import (
    Aval,
    Facts,
    Handler,
    Jaxpr,
    Op,
    Outcome,
    Values,
    Visitor,
    arrays_of,
    as_results,
    cast_all,
    dtypes_of,
    rewrite,
    types_of,
    with_dtype,
)
from mpx._program._queries import HI_PRIMITIVE


class _CustomCall:
    """A call of a function with its own derivative rule.

    The rule is expanded at the dtypes it was written for, and then visited.
    """

    def __init__(self, visitor: Visitor, op: Op, values: Values) -> None:
        self.visitor, self.eqn = visitor, op.eqn
        self.scopes = visitor.scopes_inside(op.eqn, op.scopes)
        self.jaxpr = op.eqn.params.get("call_jaxpr") or hi_jaxpr(op.eqn)
        self.facts = visitor.facts_inside(op.facts, op.eqn.invars, "operand")
        avals = types_of(values)
        new, self.known = rewrite(visitor, op, self.jaxpr, avals, self.facts)
        self.dtypes = dtypes_of(new.out_avals)
        self.smooth = [i for i, var in enumerate(op.eqn.outvars) if _smooth(var)]

    def run(self, *args: PyTree) -> Values:
        """Runs the function itself."""
        outs, _ = self.visited(self.jaxpr, args, self.facts)
        return cast_all(outs, self.dtypes)

    def trace(self, func: Callable[..., PyTree], *avals: PyTree) -> Jaxpr:
        """Traces a derivative rule at its own dtypes."""
        with self.visitor.tracing():
            return jax.make_jaxpr(func)(*avals)

    def visited(self, jaxpr: Jaxpr, args: Sequence[PyTree], facts: Facts) -> Outcome:
        """Runs a jaxpr that was traced at the original dtypes."""
        body, consts = open_jaxpr(jaxpr)
        outs, known = self.visitor.run(body, consts, args, facts, self.scopes)
        return as_results(outs, body.outvars), known

    def original_avals(self, values: Sequence[PyTree]) -> list[Aval]:
        """Returns the types of operands with the dtypes of the traced function."""
        pairs = zip(self.eqn.invars, types_of(values), strict=True)
        return [with_dtype(aval, var.aval.dtype) for var, aval in pairs]

    def differentiable(self, perturbed: Sequence[bool]) -> tuple[int, ...]:
        """Returns the operands for which a derivative is asked."""
        pairs = enumerate(zip(self.eqn.invars, perturbed, strict=True))
        return tuple(i for i, (var, asked) in pairs if asked and _smooth(var))

    def partially(
        self, args: Sequence[PyTree], free: Sequence[int]
    ) -> Callable[..., Values]:
        """Returns the original equation as a function of some of its operands."""

        def call(*chosen: PyTree) -> Values:
            full = dict(enumerate(args)) | dict(zip(free, chosen, strict=True))
            return eval_equation(self.eqn, list(full.values()))

        return call


def _smooth(var: Any) -> bool:
    return jnp.issubdtype(var.aval.dtype, jnp.inexact)


# --- custom_jvp -----------------------------------------------------------------------


def _custom_jvp(visitor: Visitor, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    custom = _CustomCall(visitor, op, values)
    call = jax.custom_jvp(custom.run)

    def rule(primals: PyTree, tangents: PyTree) -> tuple[Values, Values]:
        free = custom.differentiable([not _is_zero(tangent) for tangent in tangents])
        if any(i < eqn.params.get("num_consts", 0) for i in free):
            raise NotImplementedError(
                "A value that a function under `jax.custom_jvp` closes over is "
                "differentiated, but the rule of the function knows its arguments only. "
                "Pass the value as an argument."
            )
        live: set[int] = set()

        def expanded(args: Values, chosen: Values) -> tuple[Values, Values]:
            live.clear()

            def call(*chosen: PyTree) -> Values:
                outs = custom.partially(args, free)(*chosen)
                if not eqn.params.get("symbolic_zeros"):
                    live.update(custom.smooth)
                    return outs
                for i in custom.smooth:
                    outs[i] = _watch_tangent(outs[i], i, live)
                return outs

            outs, pushed = jax.jvp(call, [args[i] for i in free], chosen)
            return outs, [pushed[i] for i in sorted(live)]

        avals = custom.original_avals(primals)
        new = custom.trace(expanded, avals, [avals[i] for i in free])
        known = [
            visitor.fact_inside(custom.facts[i], eqn.invars[i], "tangent") for i in free
        ]
        args = [*primals, *(tangents[i] for i in free)]
        outs, _ = custom.visited(new, args, [*custom.facts, *known])
        count = len(eqn.outvars)
        pushed = dict(zip(sorted(live), outs[count:], strict=True))
        outs = cast_all(outs[:count], custom.dtypes)
        return outs, [
            cast_all([pushed[i]], (out.dtype,))[0] if i in pushed else _zero(out)
            for i, out in enumerate(outs)
        ]

    call.defjvp(rule, symbolic_zeros=True)
    outs = list(call(*values))
    return outs, visitor.result_facts(outs, custom.known)


def _is_zero(tangent: PyTree) -> bool:
    return isinstance(tangent, SymbolicZero)


def _zero(primal: PyTree) -> SymbolicZero:
    return SymbolicZero(jax.typeof(primal).to_tangent_aval())


def _watch_tangent(x: PyTree, index: int, live: set[int]) -> PyTree:
    """Returns `x`; if its tangent is not known to be zero, adds the index to `live`."""

    @jax.custom_jvp
    def same(x: PyTree) -> PyTree:
        return x

    def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
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
    """

    free: tuple[int, ...]  # The operands for which a derivative is asked
    tangents: list[Aval]  # Their types in the traced function
    tree: PyTree  # The structure of the residuals, which holds the linear function
    residuals: list[Aval]  # Their variables in the traced function
    facts: Facts  # What is known of them
    outs: list[Aval]  # The types of the results in the traced function
    # Filled while the backward function is traced: the operands whose cotangent it does
    # not leave out
    live: set[int]


def _custom_vjp(visitor: Visitor, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    given = dtypes_of(values)
    custom = _CustomCall(visitor, op, values)

    def forward(*primals: PyTree) -> tuple[Values, tuple[_Pullback, Values]]:
        args = [primal.value for primal in primals]
        # Differentiating for a value that the function closed over is refused by JAX.
        free = custom.differentiable([primal.perturbed for primal in primals])
        avals, live = custom.original_avals(args), set[int]()
        found: dict[str, PyTree] = {}

        def expanded(*args: PyTree) -> Values:
            def call(*chosen: PyTree) -> Values:
                pairs = zip(free, chosen, strict=True)
                watched = [_watch_cotangent(x, i, live) for i, x in pairs]
                return custom.partially(args, free)(*watched)

            outs, pushforward = jax.linearize(call, *(args[i] for i in free))
            residuals, found["tree"] = jax.tree.flatten(pushforward)
            found["residuals"], found["outs"] = types_of(residuals), types_of(outs)
            return [*outs, *residuals]

        new = custom.trace(expanded, *avals)
        outs, known = custom.visited(new, args, custom.facts)
        count = len(eqn.outvars)
        variables = open_jaxpr(new)[0].outvars
        pullback = _Pullback(
            free=free,
            tangents=[avals[i] for i in free],
            facts=visitor.facts_inside(known[count:], variables[count:], "operand"),
            live=live,
            **found,
        )
        return cast_all(outs[:count], custom.dtypes), (pullback, outs[count:])

    def backward(
        kept: tuple[_Pullback, Values], cotangents: Values
    ) -> tuple[PyTree, ...]:
        pullback, residuals = kept
        chosen = [i for i in custom.smooth if not _is_zero(cotangents[i])]

        def expanded(residuals: Values, cotangents: Values) -> PyTree:
            pullback.live.clear()
            pushforward = jax.tree.unflatten(pullback.tree, residuals)

            def linear(*tangents: PyTree) -> Values:
                outs = pushforward(*tangents)
                # The user's function is told that the others are zero.
                return [outs[i] for i in chosen]

            return jax.linear_transpose(linear, *pullback.tangents)(cotangents)

        types = [pullback.outs[i] for i in chosen]
        new = custom.trace(expanded, pullback.residuals, types)
        args = [*residuals, *(cotangents[i] for i in chosen)]
        known = [*pullback.facts, *[visitor.unknown] * len(chosen)]
        outs, _ = custom.visited(new, args, known)
        grads: Values = [None] * len(given)
        for i, grad in zip(pullback.free, outs, strict=True):
            if i in pullback.live:
                (grads[i],) = cast_all([grad], (given[i],))
        return tuple(grads)

    call = jax.custom_vjp(custom.run)
    call.defvjp(forward, backward, symbolic_zeros=True)
    outs = list(call(*values))
    return outs, visitor.result_facts(outs, custom.known)


def _watch_cotangent(x: PyTree, index: int, live: set[int]) -> PyTree:
    """Returns `x`; if its cotangent is not known to be zero, adds the index to `live`."""

    @jax.custom_vjp
    def same(x: PyTree) -> PyTree:
        return x

    def backward(_: None, cotangent: PyTree) -> tuple[PyTree]:
        if not _is_zero(cotangent):
            live.add(index)
        return (cotangent,)

    same.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
    return same(x)


def _hi_primitive(visitor: Visitor, op: Op) -> Outcome:
    jaxpr = hi_jaxpr(op.eqn)
    if jaxpr is None:
        return eval_equation(op.eqn, op.values), [visitor.unknown] * len(op.eqn.outvars)
    options = hi_remat(op.eqn)
    if options is None:
        return (_custom_jvp if hi_has_tangents(op.eqn) else _custom_vjp)(visitor, op)
    values = arrays_of(op.values)
    new, known = rewrite(visitor, op, jaxpr, types_of(values), op.facts)
    return jax.checkpoint(as_function(new), **options)(*values), known


HANDLERS: dict[str, Handler] = {
    HI_PRIMITIVE: _hi_primitive,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
