"""Calls, branches, loops, `shard_map` and derivative rules, rebuilt around visited bodies.

All other parameters stay: names, shardings, donation, remat policies.

Of a function with a derivative rule of its own, forward and derivative are both visited, with
what is known of the arguments. A rule learns of each argument whether it is perturbed, and
the rule that it replaces is told the same. Rules are kept by the jaxprs that they become part
of, so they hold types, never values: a value would be a leaked tracer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import PyTree

from mpx._jax._compat import (
    Literal,
    as_function,
    bind,
    bind_jit,
    constants_as_inputs,
    eval_equation,
    has_linearization,
    hi_has_tangents,
    hi_jaxpr,
    hi_remat,
    is_abstract,
    is_tracer,
    open_jaxpr,
    scan_options,
    scan_sizes,
    variable_of,
)
from mpx._jax._sharding import unstacked
from mpx._program._interpreter import (
    Aval,
    Dtypes,
    Facts,
    Jaxpr,
    Op,
    Outcome,
    Values,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
    function_of,
    rewrite,
    types_of,
    visit,
    with_dtype,
)
from mpx._program._queries import HI_PRIMITIVE, REMAT, Equation, names, variables


def _body(visitor: Visitor, op: Op) -> tuple[Jaxpr, Facts, Values, Values]:
    """Returns the body of a call after the visit, its facts, its operands and others."""
    values, more = arrays_of(op.values), visitor.more_inputs(op)
    jaxpr, avals = op.eqn.params["jaxpr"], types_of(values)
    new, known = rewrite(visitor, op, jaxpr, avals, op.facts, more=more)
    return new, known, values, jax.tree.leaves(more)


def _jit(visitor: Visitor, op: Op) -> Outcome:
    new, known, values, more = _body(visitor, op)
    # Not inlined: that would drop its name, shardings and donation.
    return bind_jit(op.eqn, values, more, new), known


def _inline(visitor: Visitor, op: Op) -> Outcome:
    params = op.eqn.params
    found = (params.get(x) for x in ("call_jaxpr", "jaxpr", "fwd_jaxpr"))
    return visit(visitor, op, next(filter(None, found)), op.values, op.facts)


def _remat(visitor: Visitor, op: Op) -> Outcome:
    new, known, values, more = _body(visitor, op)
    body, consts = constants_as_inputs(new)
    # `policy`, `prevent_cse` and `differentiated` stay: wrapping the function in
    # `jax.checkpoint` anew would lose the last one inside a gradient.
    return bind(op.eqn, [*consts, *values, *more], jaxpr=body), known


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
    more = visitor.more_inputs(op)
    visited = [rewrite(visitor, op, x, avals, facts, more=more) for x in branches]
    new, found = zip(*visited, strict=True)
    dtypes = [dtypes_of(branch.out_avals) for branch in new]
    if len(set(dtypes)) > 1:
        # The branches must agree: where they differ, each has the dtype of the original.
        common = tuple(
            seen[0] if len(set(seen)) == 1 else var.aval.dtype
            for *seen, var in zip(*dtypes, op.eqn.outvars, strict=True)
        )

        def alike(branch: Jaxpr) -> Jaxpr:
            call = lambda *args: cast_all(as_function(branch)(*args), common)  # noqa: E731
            return jax.make_jaxpr(call)(*branch.in_avals)

        new = map(alike, new)
    operands += jax.tree.leaves(more)
    outs = bind(op.eqn, [index, *operands], branches=tuple(new))
    known = [visitor.join_facts(list(facts)) for facts in zip(*found, strict=True)]
    return outs, visitor.result_facts(outs, known)


def _shard_map(visitor: Visitor, op: Op) -> Outcome:
    params, known = op.eqn.params, list[PyTree]()
    invars = open_jaxpr(params["jaxpr"])[0].invars
    facts = visitor.facts_inside(op.facts, invars, "slice")

    def call(*args: PyTree) -> tuple[PyTree, ...]:
        outs, known[:] = visit(visitor, op, params["jaxpr"], args, facts)
        return tuple(outs)

    values = arrays_of(op.values)
    mapped = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
    )
    # Run at once, it can hold neither `jax.checkpoint` nor derivative rules.
    outs = (mapped if is_abstract(values) else jax.jit(mapped))(*values)
    return list(outs), visitor.result_facts(outs, known)


def _carry_dtypes(
    visitor: Visitor,
    variables: Sequence[PyTree],
    values: Values,
    body_for: Callable[[Dtypes, None], tuple[Jaxpr, Facts]],
) -> Dtypes:
    """Returns dtypes that a loop body maps to themselves.

    A carry may be an accumulator: it keeps its dtype unless the visitor lets it be narrow.
    Then it has the dtype that goes in if the body returns the same, else its own.
    """
    original = dtypes_of([var.aval for var in variables])
    if not visitor.narrow_carry:
        return original
    current = dtypes_of(values)
    while True:
        found = dtypes_of(body_for(current, None)[0].out_avals)[: len(current)]
        given = zip(current, found, original, strict=True)
        after = tuple(old if old == new else own for old, new, own in given)
        if after == current:
            return current
        current = after  # each round restores one at least, so the loop ends


def _types_with(variables: Sequence[PyTree], dtypes: Sequence[PyTree]) -> list[Aval]:
    pairs = zip(variables, dtypes, strict=True)
    return [with_dtype(var.aval, dtype) for var, dtype in pairs]


def _scan(visitor: Visitor, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    jaxpr = eqn.params["jaxpr"]
    body, _ = open_jaxpr(jaxpr)
    n_consts, n_carry = scan_sizes(eqn.params)
    start = n_consts + n_carry
    consts, carry, xs = values[:n_consts], values[n_consts:start], values[start:]
    carry_vars, x_vars = body.invars[n_consts:start], body.invars[start:]
    known = scan_facts(visitor, op)
    more = visitor.more_inputs(op)
    part = lambda x: x.update(shape=x.shape[1:], sharding=unstacked(x.sharding))  # noqa: E731
    sliced = jax.tree.map(lambda x: part(jax.typeof(x)), more)
    x_types = _types_with(x_vars, dtypes_of(xs))

    def body_for(carry: Dtypes, outs: Dtypes | None) -> tuple[Jaxpr, Facts]:
        types = [*types_of(consts), *_types_with(carry_vars, carry), *x_types]
        return rewrite(visitor, op, jaxpr, types, known, more=sliced, dtypes=outs)

    dtypes = _carry_dtypes(visitor, carry_vars, carry, body_for)
    new, found = body_for(dtypes, dtypes + (None,) * (len(eqn.outvars) - n_carry))
    carry = cast_all(carry, dtypes)
    leaves = jax.tree.leaves(more)
    if not leaves:
        outs = bind(eqn, [*consts, *carry, *xs], jaxpr=new)
        return outs, visitor.result_facts(outs, found)
    run = as_function(new)

    def call(carry: Sequence[PyTree], xs: Sequence[PyTree]) -> tuple[PyTree, PyTree]:
        outs = run(*consts, *carry, *xs)
        return outs[:n_carry], outs[n_carry:]

    outs = scan_with(eqn, call, carry, [*xs, *leaves])
    return outs, visitor.result_facts(outs, found)


def scan_facts(visitor: Visitor, op: Op) -> Facts:
    """Returns what is known of the inputs of the body of a scan."""
    body, _ = open_jaxpr(op.eqn.params["jaxpr"])
    n_consts, n_carry = scan_sizes(op.eqn.params)
    start = n_consts + n_carry
    return [
        *visitor.facts_inside(op.facts[:n_consts], body.invars[:n_consts], "operand"),
        *visitor.carried_facts(op.eqn, op.facts),
        *visitor.facts_inside(op.facts[start:], body.invars[start:], "slice"),
    ]


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
    carry = values[n_cond + n_body :]
    body, _ = open_jaxpr(params["body_jaxpr"])
    carry_vars = body.invars[n_body:]
    carried = visitor.carried_facts(op.eqn, op.facts)

    def part(name: str, dtypes: Dtypes, outs: Dtypes | None) -> tuple[Jaxpr, Facts]:
        start, count = (0, n_cond) if name == "cond_jaxpr" else (n_cond, n_body)
        chosen, inputs = slice(start, start + count), open_jaxpr(params[name])[0].invars
        known = visitor.facts_inside(op.facts[chosen], inputs[:count], "operand")
        types = [*types_of(values[chosen]), *_types_with(carry_vars, dtypes)]
        known += carried
        return rewrite(visitor, op, params[name], types, known, dtypes=outs)

    body_for = functools.partial(part, "body_jaxpr")
    dtypes = _carry_dtypes(visitor, carry_vars, carry, body_for)
    new, known = body_for(dtypes, dtypes)
    outs = bind(
        op.eqn,
        [*values[: n_cond + n_body], *cast_all(carry, dtypes)],
        cond_jaxpr=part("cond_jaxpr", dtypes, None)[0],
        body_jaxpr=new,
    )
    return outs, visitor.result_facts(outs, known)


# --- Derivative rules -----------------------------------------------------------------


class _CustomCall:
    """A call of a function whose derivative rule is expanded at its dtypes and visited."""

    def __init__(self, visitor: Visitor, op: Op) -> None:
        self.visitor, self.eqn, self.around = visitor, op.eqn, visitor.around
        self.op = op._replace(values=[], facts=[])
        found = (op.eqn.params.get(name) for name in ("call_jaxpr", "call"))
        self.jaxpr = next(filter(None, found), None) or hi_jaxpr(op.eqn)
        self.facts = visitor.facts_inside(op.facts, op.eqn.invars, "operand")
        avals = types_of(arrays_of(op.values))
        new, self.known = rewrite(visitor, op, self.jaxpr, avals, self.facts)
        self.dtypes = dtypes_of(new.out_avals)
        self.smooth = [i for i, var in enumerate(op.eqn.outvars) if _smooth(var)]

    def run(self, *args: PyTree) -> Values:
        """Runs the function itself."""
        outs, _ = self.visited(self.jaxpr, args, self.facts)
        return cast_all(outs, self.dtypes)

    def outcome(self, call: Callable[..., PyTree], op: Op) -> Outcome:
        """Returns the results of what replaces the function."""
        outs = list(call(*arrays_of(op.values)))
        return outs, self.visitor.result_facts(outs, self.known)

    def trace(self, func: Callable[..., PyTree], *avals: PyTree) -> Jaxpr:
        """Traces a derivative rule at its own dtypes."""
        with self.visitor.tracing():
            new = jax.make_jaxpr(func)(*avals)
        closed_over = {variable_of(x) for x in open_jaxpr(new)[1] if is_tracer(x)}
        if not closed_over.isdisjoint(self.around):
            raise NotImplementedError(
                "The rule of a function under `jax.custom_vjp` or `jax.custom_jvp` closes "
                "over an array that is an argument of a function under `amp` or `fp8`, or "
                "computed in it, but runs when that has been traced. Pass the array as an "
                "argument."
            )
        return new

    def visited(self, jaxpr: Jaxpr, args: Sequence[PyTree], facts: Facts) -> Outcome:
        """Runs a jaxpr that was traced at the original dtypes."""
        visitor, outer = self.visitor, self.visitor.around
        visitor.around = self.around | {*variables(open_jaxpr(jaxpr)[0])}
        try:
            return visit(visitor, self.op, jaxpr, args, facts)
        finally:
            visitor.around = outer

    def differentiable(
        self, values: Sequence[PyTree], perturbed: Sequence[bool]
    ) -> tuple[list[int], list[Aval]]:
        """Returns for which operands a derivative is asked, and the original types."""
        pairs = enumerate(zip(self.eqn.invars, perturbed, strict=True))
        free = [i for i, (var, asked) in pairs if asked and _smooth(var)]
        if any(i < self.eqn.params.get("num_consts", 0) for i in free):
            raise NotImplementedError(
                "The rule of a function under `jax.custom_vjp` or `jax.custom_jvp` closes "
                "over a value that is differentiated, but it is told of arguments only. Pass "
                "the value as an argument."
            )
        dtypes = [var.aval.dtype for var in self.eqn.invars]
        return free, [*map(with_dtype, types_of(values), dtypes)]

    def original(self, *args: PyTree) -> Values:
        """Runs the equation as it is written."""
        return eval_equation(self.eqn, args)


def _smooth(var: Any) -> bool:
    """Returns whether a value has a derivative: a reference is written to instead."""
    is_reference = hasattr(var.aval, "inner_aval")
    return not is_reference and jnp.issubdtype(var.aval.dtype, jnp.inexact)


def _is_zero(tangent: PyTree) -> bool:
    return isinstance(tangent, SymbolicZero)


def _are_zeros(jaxpr: Jaxpr) -> list[bool]:
    """Returns which results are written as zeros: JAX fills in those that a rule omits."""
    body, _ = open_jaxpr(jaxpr)
    fills = [eqn for eqn in body.eqns if eqn.primitive.name == "broadcast_in_dim"]
    filled = {eqn.outvars[0]: eqn.invars[0] for eqn in fills}
    atoms = [x if isinstance(x, Literal) else filled.get(x) for x in body.outvars]
    return [isinstance(x, Literal) and not np.any(x.val) for x in atoms]


def _custom_jvp(visitor: Visitor, op: Op) -> Outcome:
    eqn, custom, count = op.eqn, _CustomCall(visitor, op), len(op.eqn.outvars)

    def rule(primals: PyTree, tangents: PyTree) -> tuple[Values, Values]:
        asked = [not _is_zero(tangent) for tangent in tangents]
        free, avals = custom.differentiable(primals, asked)

        def expanded(args: Values, chosen: Values) -> tuple[Values, Values]:
            outs, pushed = jax.jvp(*function_of(custom.original, args, free), chosen)
            return outs, [pushed[i] for i in custom.smooth]

        new = custom.trace(expanded, avals, [avals[i] for i in free])
        known = [
            visitor.fact_inside(custom.facts[i], eqn.invars[i], "tangent") for i in free
        ]
        args = [*primals, *(tangents[i] for i in free)]
        outs, _ = custom.visited(new, args, [*custom.facts, *known])
        results = cast_all(outs[:count], custom.dtypes)
        pushed = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in results]
        found = zip(custom.smooth, outs[count:], _are_zeros(new)[count:], strict=True)
        for i, tangent, is_zero in found:
            if not is_zero:
                (pushed[i],) = cast_all([tangent], (results[i].dtype,))
        return results, pushed

    call = jax.custom_jvp(custom.run)
    call.defjvp(rule, symbolic_zeros=True)
    return custom.outcome(call, op)


def _custom_vjp(visitor: Visitor, op: Op) -> Outcome:
    custom, count = _CustomCall(visitor, op), len(op.eqn.outvars)
    derive = jax.linearize if has_linearization(op.eqn) else jax.vjp

    def forward(*primals: PyTree) -> tuple[Values, Callable[..., PyTree]]:
        args = [primal.value for primal in primals]
        free, avals = custom.differentiable(args, [x.perturbed for x in primals])
        given, inputs = dtypes_of(args), [avals[i] for i in free]
        found = dict[str, PyTree]()

        def expanded(*args: PyTree) -> Values:
            call, chosen = function_of(custom.original, args, free)
            outs, derivative = derive(call, *chosen)
            residuals, found["tree"] = jax.tree.flatten(derivative)
            found["residuals"], found["outs"] = types_of(residuals), types_of(outs)
            # What is an argument is not returned: a reference cannot be.
            places = {id(x): i for i, x in enumerate(args)}
            found["places"] = [places.get(id(x)) for x in residuals]
            return [*outs, *(x for x in residuals if id(x) not in places)]

        new = custom.trace(expanded, *avals)
        outs, known = custom.visited(new, args, custom.facts)
        variables = open_jaxpr(new)[0].outvars[count:]
        others = visitor.facts_inside(known[count:], variables, "operand")
        own, made = [args, custom.facts], [iter(outs[count:]), iter(others)]
        residuals, kept = (
            [next(new) if i is None else given[i] for i in found["places"]]
            for new, given in zip(made, own, strict=True)
        )

        # It travels with the residuals: there is one for each set of perturbed arguments.
        def backward(residuals: Values, cotangents: Values) -> tuple[PyTree, ...]:
            chosen = [i for i in custom.smooth if not _is_zero(cotangents[i])]

            def expanded(residuals: Values, cotangents: Values) -> PyTree:
                derivative = jax.tree.unflatten(found["tree"], residuals)
                if derive is jax.vjp:
                    known = dict(zip(chosen, cotangents, strict=True))
                    zeros = (jnp.zeros(x.shape, x.dtype) for x in found["outs"])
                    return derivative([known.get(*x) for x in enumerate(zeros)])
                # The user's rule is told that the others are zero.
                linear = lambda *x: [derivative(*x)[i] for i in chosen]  # noqa: E731
                return jax.linear_transpose(linear, *inputs)(cotangents)

            types = [found["outs"][i] for i in chosen]
            new = custom.trace(expanded, found["residuals"], types)
            args = [*residuals, *(cotangents[i] for i in chosen)]
            facts = [*kept, *[visitor.unknown] * len(chosen)]
            outs, _ = custom.visited(new, args, facts)
            grads: Values = [None] * len(given)
            for i, grad, is_zero in zip(free, outs, _are_zeros(new), strict=True):
                if not is_zero:
                    (grads[i],) = cast_all([grad], (given[i],))
            return tuple(grads)

        results = cast_all(outs[:count], custom.dtypes)
        return results, jax.tree_util.Partial(backward, residuals)

    call = jax.custom_vjp(custom.run)
    call.defvjp(forward, lambda kept, cotangents: kept(cotangents), symbolic_zeros=True)
    return custom.outcome(call, op)


def _custom_vmap(visitor: Visitor, op: Op) -> Outcome:
    custom = _CustomCall(visitor, op)
    call = jax.custom_batching.custom_vmap(lambda *args: custom.run(*args))

    @call.def_vmap
    def _(size: int, batched: list[bool], *args: PyTree) -> tuple[Values, list[bool]]:
        axes = tuple(0 if is_batched else None for is_batched in batched)
        mapped = jax.vmap(custom.original, axes, axis_size=size)
        dtypes = [var.aval.dtype for var in op.eqn.invars]
        new = custom.trace(mapped, *map(with_dtype, types_of(args), dtypes))
        outs, _ = custom.visited(new, args, custom.facts)
        return cast_all(outs, custom.dtypes), [True] * len(outs)

    return custom.outcome(call, op)


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


HANDLERS: dict[str, Callable[[Visitor, Op], Outcome]] = {
    "jit": _jit,
    "pjit": _jit,
    **dict.fromkeys(names("closed_call core_call call eval_jaxpr remat_opt"), _inline),
    **dict.fromkeys(REMAT, _remat),
    "cond": _cond,
    "shard_map": _shard_map,
    "scan": _scan,
    "while": _while,
    HI_PRIMITIVE: _hi_primitive,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "custom_vmap_call": _custom_vmap,
}
"""By primitive: how an equation that holds jaxprs is rebuilt around visited bodies."""
