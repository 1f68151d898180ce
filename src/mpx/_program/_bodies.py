"""Calls, branches, loops and `shard_map`, rebuilt around bodies that were visited.

All other parameters stay: names, shardings, donation, remat policies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from mpx._jax._compat import (
    as_function,
    bind,
    bind_jit,
    constants_as_inputs,
    open_jaxpr,
    scan_options,
    scan_sizes,
)
from mpx._jax._sharding import unstacked
from mpx._program import _derivatives
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
    as_results,
    cast_all,
    dtypes_of,
    rewrite,
    types_of,
    with_dtype,
)
from mpx._program._queries import REMAT, Equation

INLINED = ("closed_call", "core_call", "call", "eval_jaxpr")


def _jit(visitor: Visitor, op: Op) -> Outcome:
    values, more = arrays_of(op.values), visitor.more_inputs(op)
    jaxpr, avals = op.eqn.params["jaxpr"], types_of(values)
    new, known = rewrite(visitor, op, jaxpr, avals, op.facts, more=more)
    # Not inlined: that would drop its name, shardings and donation.
    return bind_jit(op.eqn, values, jax.tree.leaves(more), new), known


def _inline(visitor: Visitor, op: Op) -> Outcome:
    params = op.eqn.params
    jaxpr, consts = open_jaxpr(params.get("call_jaxpr", params.get("jaxpr")))
    scopes = visitor.scopes_inside(op.eqn, op.scopes)
    return visitor.run(jaxpr, consts, op.values, op.facts, scopes)


def _remat(visitor: Visitor, op: Op) -> Outcome:
    values, more = arrays_of(op.values), visitor.more_inputs(op)
    jaxpr, avals = op.eqn.params["jaxpr"], types_of(values)
    new, known = rewrite(visitor, op, jaxpr, avals, op.facts, more=more)
    body, consts = constants_as_inputs(new)
    # `policy`, `prevent_cse` and `differentiated` stay: wrapping the function in
    # `jax.checkpoint` anew would lose the last one inside a gradient.
    args = [*consts, *values, *jax.tree.leaves(more)]
    return bind(op.eqn, args, jaxpr=body), known


def remat_with(
    eqn: Equation, body: Callable[..., list[PyTree]], args: Sequence[PyTree]
) -> list[PyTree]:
    """Runs a function under `jax.checkpoint` with the policy of an equation."""
    prevent_cse = eqn.params["prevent_cse"]
    if not isinstance(prevent_cse, bool):  # one for each operand
        prevent_cse = any(prevent_cse)
    policy = eqn.params["policy"]
    return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)(*args)


def _cond(visitor: Visitor, op: Op) -> Outcome:
    index, *operands = arrays_of(op.values)
    avals, branches = types_of(operands), op.eqn.params["branches"]
    invars = open_jaxpr(branches[0])[0].invars
    facts = visitor.facts_inside(op.facts[1:], invars, "operand")
    inputs, new, found = [], [], []
    for branch in branches:
        inputs.append(visitor.more_inputs(op))
        jaxpr, known = rewrite(visitor, op, branch, avals, facts, more=inputs[-1])
        new.append(jaxpr)
        found.append(known)
    dtypes = [dtypes_of(branch.out_avals) for branch in new]
    if len(set(dtypes)) > 1:
        # The branches must agree: where they differ, each has the dtype of the original.
        common = tuple(
            seen[0] if len(set(seen)) == 1 else var.aval.dtype
            for *seen, var in zip(*dtypes, op.eqn.outvars, strict=True)
        )
        new = [
            rewrite(visitor, op, branch, avals, facts, more=more, dtypes=common)[0]
            for branch, more in zip(branches, inputs, strict=True)
        ]
    groups = [jax.tree.leaves(more) for more in inputs]
    if any(groups):
        new = [_with_all_inputs(x, avals, groups, i) for i, x in enumerate(new)]
    more = [leaf for group in groups for leaf in group]
    outs = bind(op.eqn, [index, *operands, *more], branches=tuple(new))
    known = [visitor.join_facts(list(facts)) for facts in zip(*found, strict=True)]
    return outs, visitor.result_facts(outs, known)


def _with_all_inputs(
    branch: Jaxpr, avals: list[Aval], groups: list[list[PyTree]], position: int
) -> Jaxpr:
    """Gives a branch the further inputs of all branches: they are called alike."""
    start = len(avals) + sum(map(len, groups[:position]))
    stop = start + len(groups[position])
    run = as_function(branch)
    more = types_of([leaf for group in groups for leaf in group])
    return jax.make_jaxpr(lambda *args: run(*args[: len(avals)], *args[start:stop]))(
        *avals, *more
    )


def _shard_map(visitor: Visitor, op: Op) -> Outcome:
    params = op.eqn.params
    body, consts = open_jaxpr(params["jaxpr"])
    facts = visitor.facts_inside(op.facts, body.invars, "slice")
    scopes, known = visitor.scopes_inside(op.eqn, op.scopes), list[PyTree]()

    def call(*args: PyTree) -> tuple[PyTree, ...]:
        with visitor.inside(op.eqn, None):
            outs, known[:] = visitor.run(body, consts, args, facts, scopes)
        return tuple(as_results(outs, body.outvars))

    outs = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
    )(*arrays_of(op.values))
    return list(outs), visitor.result_facts(outs, known)


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

    def step(carry: Sequence[PyTree], xs: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        outs = run(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    outs = scan_with(eqn, step, carry, [*xs, *leaves])
    return outs, visitor.result_facts(outs, found)


def _slice_type(x: PyTree) -> Aval:
    aval = jax.typeof(x)
    return aval.update(shape=aval.shape[1:], sharding=unstacked(aval.sharding))


def scan_with(
    eqn: Equation,
    step: Callable[[Any, Any], tuple[PyTree, PyTree]],
    carry: Sequence[PyTree],
    xs: PyTree,
) -> list[PyTree]:
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


HANDLERS: dict[str, Handler] = {
    "jit": _jit,
    "pjit": _jit,
    **dict.fromkeys(INLINED, _inline),
    **dict.fromkeys(REMAT, _remat),
    "cond": _cond,
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    **_derivatives.HANDLERS,
}
"""By primitive: how an equation that holds jaxprs is rebuilt around visited bodies."""
