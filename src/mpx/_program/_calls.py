"""Calls, branches and `shard_map`, rebuilt around bodies that were visited.

All other parameters stay: names, shardings, donation, remat policies, derivative rules.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpx._jax._compat import (
    as_function,
    bind,
    bind_jit,
    constants_as_inputs,
    open_jaxpr,
)
from mpx._program._interpreter import (
    Aval,
    Handler,
    Jaxpr,
    Op,
    Outcome,
    Visitor,
    arrays_of,
    as_results,
    dtypes_of,
    rewrite,
    types_of,
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
    eqn: Equation, body: Callable[..., list[Any]], args: Sequence[Any]
) -> list[Any]:
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
    branch: Jaxpr, avals: list[Aval], groups: list[list[Any]], position: int
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
    scopes, known = visitor.scopes_inside(op.eqn, op.scopes), list[Any]()

    def call(*args: Any) -> tuple[Any, ...]:
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


HANDLERS: dict[str, Handler] = {
    "jit": _jit,
    "pjit": _jit,
    **dict.fromkeys(INLINED, _inline),
    **dict.fromkeys(REMAT, _remat),
    "cond": _cond,
    "shard_map": _shard_map,
}
