"""Loops, rebuilt around bodies that were visited; the dtypes of their carries."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from mpx._jax._compat import as_function, bind, open_jaxpr, scan_options, scan_sizes
from mpx._jax._sharding import unstacked
from mpx._program._interpreter import (
    Aval,
    Dtypes,
    Facts,
    Handler,
    Jaxpr,
    Op,
    Outcome,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
    rewrite,
    types_of,
    with_dtype,
)
from mpx._program._queries import Equation


def _carry_dtypes(
    visitor: Visitor,
    original: Dtypes,
    given: Dtypes,
    step: Callable[[Dtypes], Dtypes],
) -> Dtypes:
    """Returns dtypes that a loop body maps to themselves.

    A carry may be an accumulator: it keeps its dtype unless the visitor lets it be narrow.
    Then it has the dtype that goes in if the body returns the same, else its own.
    """
    if not visitor.narrow_carry:
        return original
    current = given
    while True:
        after = tuple(
            old if old == new else own
            for old, new, own in zip(current, step(current), original, strict=True)
        )
        if after == current:
            return current
        current = after  # each round restores one at least, so the loop ends


def _scan(visitor: Visitor, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    jaxpr = eqn.params["jaxpr"]
    body, _ = open_jaxpr(jaxpr)
    n_consts, n_carry = scan_sizes(eqn.params)
    consts, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
    xs = values[n_consts + n_carry :]
    carry_vars = body.invars[n_consts : n_consts + n_carry]
    x_vars = body.invars[n_consts + n_carry :]
    known = [
        *visitor.facts_inside(op.facts[:n_consts], body.invars[:n_consts], "operand"),
        *(
            visitor.fact_inside(fact, var, "operand" if out is var else "carry")
            for fact, var, out in zip(
                op.facts[n_consts:], carry_vars, body.outvars, strict=False
            )
        ),
        *visitor.facts_inside(op.facts[n_consts + n_carry :], x_vars, "slice"),
    ]
    more = visitor.more_inputs(op)
    sliced = jax.tree.map(_slice_type, more)
    x_types = [with_dtype(v.aval, x.dtype) for v, x in zip(x_vars, xs, strict=True)]

    def body_for(carry: Dtypes, outs: Dtypes | None) -> tuple[Jaxpr, Facts]:
        types = [with_dtype(v.aval, d) for v, d in zip(carry_vars, carry, strict=True)]
        types = [*types_of(consts), *types, *x_types]
        return rewrite(visitor, op, jaxpr, types, known, more=sliced, dtypes=outs)

    dtypes = _carry_dtypes(
        visitor,
        dtypes_of([var.aval for var in carry_vars]),
        dtypes_of(carry),
        lambda dtypes: dtypes_of(body_for(dtypes, None)[0].out_avals[:n_carry]),
    )
    new, found = body_for(dtypes, dtypes + (None,) * (len(eqn.outvars) - n_carry))
    carry = cast_all(carry, dtypes)
    leaves = jax.tree.leaves(more)
    if not leaves:
        outs = bind(eqn, [*consts, *carry, *xs], jaxpr=new)
        return outs, visitor.result_facts(outs, found)
    run = as_function(new)

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
        outs = run(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    outs = scan_with(eqn, step, carry, [*xs, *leaves])
    return outs, visitor.result_facts(outs, found)


def _slice_type(x: Any) -> Aval:
    aval = jax.typeof(x)
    return aval.update(shape=aval.shape[1:], sharding=unstacked(aval.sharding))


def scan_with(
    eqn: Equation,
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Sequence[Any],
    xs: PyTree,
) -> list[Any]:
    """Runs a function over the steps of a scan equation, which may slice more inputs."""
    carry, ys = lax.scan(step, list(carry), xs, **scan_options(eqn.params))
    return [*carry, *ys]


def _while(visitor: Visitor, op: Op) -> Outcome:
    values, params = arrays_of(op.values), op.eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n_consts = n_cond + n_body
    carry_vars = open_jaxpr(params["body_jaxpr"])[0].invars[n_body:]

    kept = open_jaxpr(params["body_jaxpr"])[0].outvars
    carried = [
        visitor.fact_inside(fact, var, "operand" if out is var else "carry")
        for fact, var, out in zip(op.facts[n_consts:], carry_vars, kept, strict=True)
    ]

    def part(name: str, carry: Dtypes, outs: Dtypes | None) -> tuple[Jaxpr, Facts]:
        chosen = slice(n_cond) if name == "cond_jaxpr" else slice(n_cond, n_consts)
        inputs = open_jaxpr(params[name])[0].invars
        types = [with_dtype(v.aval, d) for v, d in zip(carry_vars, carry, strict=True)]
        types = [*types_of(values[chosen]), *types]
        count = len(inputs) - len(carry_vars)
        known = visitor.facts_inside(op.facts[chosen], inputs[:count], "operand")
        facts = [*known, *carried]
        return rewrite(visitor, op, params[name], types, facts, dtypes=outs)

    carry = values[n_consts:]
    dtypes = _carry_dtypes(
        visitor,
        dtypes_of([var.aval for var in carry_vars]),
        dtypes_of(carry),
        lambda dtypes: dtypes_of(part("body_jaxpr", dtypes, None)[0].out_avals),
    )
    body, known = part("body_jaxpr", dtypes, dtypes)
    outs = bind(
        op.eqn,
        [*values[:n_consts], *cast_all(carry, dtypes)],
        cond_jaxpr=part("cond_jaxpr", dtypes, None)[0],
        body_jaxpr=body,
    )
    return outs, visitor.result_facts(outs, known)


HANDLERS: dict[str, Handler] = {"scan": _scan, "while": _while}
