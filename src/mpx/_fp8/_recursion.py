"""Recursion into equations that hold jaxprs, with the delayed scales that belong there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mpx._amp._values import NEUTRAL, Meta, as_array
from mpx._compat import (
    Literal,
    as_function,
    bind,
    bind_jit,
    constants_as_inputs,
    open_jaxpr,
    scan_options,
    scan_sizes,
)

Outcome = tuple[list[Any], list[Meta]]
States = dict[str, tuple[Any, Any]]
"""By the key of a matmul: the maxima that were seen before, and the probe."""
Scopes = tuple[str, ...]


def _jit(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    values, states = _arrays(values), walk.states_for(metas)
    new, known = walk.rewrite(
        eqn.params["jaxpr"], _types(values), metas, scopes, states=states
    )
    return bind_jit(eqn, values, jax.tree.leaves(states), new), known


def _inline(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    jaxpr = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    return walk.run(*open_jaxpr(jaxpr), values, metas, scopes)


def _remat(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    values, states = _arrays(values), walk.states_for(metas)
    new, known = walk.rewrite(
        eqn.params["jaxpr"], _types(values), metas, scopes, states=states
    )
    body, consts = constants_as_inputs(new)
    args = [*consts, *values, *jax.tree.leaves(states)]
    return bind(eqn, args, jaxpr=body), known


def _cond(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    index, *operands = _arrays(values)
    types, bodies, leaves = _types(operands), [], []
    for branch in eqn.params["branches"]:
        # Each branch counts on from the one before.
        states = walk.states_for(metas)
        body, _ = walk.rewrite(branch, types, metas[1:], scopes, states=states)
        bodies.append(body)
        leaves.append(jax.tree.leaves(states))
    new = [_with_all_states(body, types, leaves, i) for i, body in enumerate(bodies)]
    everything = [leaf for group in leaves for leaf in group]
    outs = bind(eqn, [index, *operands, *everything], branches=tuple(new))
    return outs, [NEUTRAL] * len(outs)


def _with_all_states(
    body: Any, avals: list[Any], leaves: list[list[Any]], branch: int
) -> Any:
    """Gives a branch the inputs of all branches, since they must be called alike."""
    if not any(leaves):
        return body
    start = len(avals) + sum(len(group) for group in leaves[:branch])
    stop = start + len(leaves[branch])
    run = as_function(body)
    more = _types([leaf for group in leaves for leaf in group])
    return jax.make_jaxpr(lambda *args: run(*args[: len(avals)], *args[start:stop]))(
        *avals, *more
    )


def _scan(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    values, params = _arrays(values), eqn.params
    body, body_consts = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_sizes(params)
    first_x = n_consts + n_carry
    inner_metas = list(metas)
    for i in range(n_consts, first_x):
        # A carry that comes back as it went in is a constant.
        if body.outvars[i - n_consts] is not body.invars[i]:
            inner_metas[i] = NEUTRAL
    length, counts = params["length"], dict(walk.counts)

    def step(carry: tuple[Any, ...], x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        xs, states = x
        args = [*values[:n_consts], *carry, *xs]
        # JAX may trace this more than once: each time it counts from the start.
        with walk.inside(states, counts=counts, length=length):
            outs, _ = walk.run(body, body_consts, args, inner_metas, scopes)
        outs = typed(outs, body.outvars)
        return tuple(outs[:n_carry]), tuple(outs[n_carry:])

    carry, ys = lax.scan(
        step,
        tuple(values[n_consts:first_x]),
        (tuple(values[first_x:]), walk.states_for(metas, length)),
        **scan_options(params),
    )
    outs = [*carry, *ys]
    return outs, [NEUTRAL] * len(outs)


def _shard_map(
    walk: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: Scopes
) -> Outcome:
    values, params = _arrays(values), eqn.params
    body, consts = open_jaxpr(params["jaxpr"])

    def call(*args: Any) -> tuple[Any, ...]:
        # Each device scales what it holds: delayed scales would need a maximum over
        # devices, where the gradient of a shared value is a sum.
        with walk.inside({}, delayed=False):
            outs, _ = walk.run(body, consts, args, metas, scopes)
        return tuple(typed(outs, body.outvars))

    outs = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
    )(*values)
    return list(outs), [NEUTRAL] * len(outs)


def typed(outs: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns results as arrays: a literal among them is a Python number."""
    avals: list[Any] = [var.aval for var in variables]
    return [
        jnp.asarray(out, aval.dtype) if isinstance(var, Literal) else out
        for out, var, aval in zip(outs, variables, avals, strict=True)
    ]


def _arrays(values: list[Any]) -> list[Any]:
    return [as_array(value) for value in values]


def _types(values: list[Any]) -> list[Any]:
    return [jax.typeof(value) for value in values]


HANDLERS: dict[str, Callable[..., Outcome]] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _inline,
    "core_call": _inline,
    "call": _inline,
    "eval_jaxpr": _inline,
    "remat2": _remat,
    "checkpoint": _remat,
    "remat": _remat,
    "cond": _cond,
    "scan": _scan,
    "shard_map": _shard_map,
}
