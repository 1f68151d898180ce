"""Loops, rebuilt around bodies that were visited; the dtypes of their carries."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from mpx._compat import as_function, bind, open_jaxpr, scan_sizes
from mpx._jaxpr._interpreter import (
    Dtypes,
    Facts,
    Handler,
    Jaxpr,
    Kind,
    Outcome,
    Scopes,
    Values,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
    rewrite,
    types_of,
    with_dtype,
)
from mpx._jaxpr._queries import Equation


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


def _scan(
    visitor: Visitor, eqn: Equation, values: Values, facts: Facts, scopes: Scopes
) -> Outcome:
    values, jaxpr = arrays_of(values), eqn.params["jaxpr"]
    body, _ = open_jaxpr(jaxpr)
    n_consts, n_carry = scan_sizes(eqn.params)
    consts, carry = values[:n_consts], values[n_consts : n_consts + n_carry]
    xs = values[n_consts + n_carry :]
    carry_vars = body.invars[n_consts : n_consts + n_carry]
    x_vars = body.invars[n_consts + n_carry :]
    kinds: list[Kind] = [
        *["operand"] * n_consts,
        *[
            "constant" if before is after else "carry"
            for before, after in zip(carry_vars, body.outvars, strict=False)
        ],
        *["slice"] * len(xs),
    ]
    known = [
        visitor.fact_inside(*x) for x in zip(facts, body.invars, kinds, strict=True)
    ]
    more = visitor.more_inputs(eqn, facts)
    sliced = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), more)
    x_types = [with_dtype(v.aval, x.dtype) for v, x in zip(x_vars, xs, strict=True)]

    def body_for(carry: Dtypes, outs: Dtypes | None) -> Jaxpr:
        types = [with_dtype(v.aval, d) for v, d in zip(carry_vars, carry, strict=True)]
        types = [*types_of(consts), *types, *x_types]
        return rewrite(
            visitor, eqn, jaxpr, types, known, scopes=scopes, more=sliced, dtypes=outs
        )[0]

    dtypes = _carry_dtypes(
        visitor,
        dtypes_of([var.aval for var in carry_vars]),
        dtypes_of(carry),
        lambda dtypes: dtypes_of(body_for(dtypes, None).out_avals[:n_carry]),
    )
    new = body_for(dtypes, dtypes + (None,) * (len(eqn.outvars) - n_carry))
    carry = cast_all(carry, dtypes)
    leaves = jax.tree.leaves(more)
    if not leaves:
        outs = bind(eqn, [*consts, *carry, *xs], jaxpr=new)
        return outs, visitor.result_facts(outs)
    run = as_function(new)

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
        outs = run(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    outs = scan_with(eqn, step, carry, [*xs, *leaves])
    return outs, visitor.result_facts(outs)


def scan_with(
    eqn: Equation,
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Sequence[Any],
    xs: PyTree,
) -> list[Any]:
    """Runs a function over the steps of a scan equation, which may slice more inputs."""
    params = eqn.params
    carry, ys = lax.scan(
        step,
        list(carry),
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _while(
    visitor: Visitor, eqn: Equation, values: Values, facts: Facts, scopes: Scopes
) -> Outcome:
    values, params = arrays_of(values), eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n_consts = n_cond + n_body
    carry_vars = open_jaxpr(params["body_jaxpr"])[0].invars[n_body:]

    def part(name: str, carry: Dtypes, outs: Dtypes | None) -> Jaxpr:
        chosen = slice(n_cond) if name == "cond_jaxpr" else slice(n_cond, n_consts)
        inputs = open_jaxpr(params[name])[0].invars
        types = [with_dtype(v.aval, d) for v, d in zip(carry_vars, carry, strict=True)]
        types = [*types_of(values[chosen]), *types]
        kinds: list[Kind] = ["operand"] * len(facts[chosen])
        kinds += ["carry"] * len(carry_vars)
        given = [*facts[chosen], *facts[n_consts:]]
        known = [
            visitor.fact_inside(*x) for x in zip(given, inputs, kinds, strict=True)
        ]
        return rewrite(
            visitor, eqn, params[name], types, known, scopes=scopes, dtypes=outs
        )[0]

    carry = values[n_consts:]
    dtypes = _carry_dtypes(
        visitor,
        dtypes_of([var.aval for var in carry_vars]),
        dtypes_of(carry),
        lambda dtypes: dtypes_of(part("body_jaxpr", dtypes, None).out_avals),
    )
    outs = bind(
        eqn,
        [*values[:n_consts], *cast_all(carry, dtypes)],
        cond_jaxpr=part("cond_jaxpr", dtypes, None),
        body_jaxpr=part("body_jaxpr", dtypes, dtypes),
    )
    return outs, visitor.result_facts(outs)


HANDLERS: dict[str, Handler] = {"scan": _scan, "while": _while}
