"""Recursion into equations that hold jaxprs: jit, loops, branches, custom derivatives.

Each is rebuilt around its rewritten body with all its other parameters: names,
shardings, donation, remat policies and derivative rules survive.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp import _flash
from mpx._amp._catch import caught_attention
from mpx._amp._rules import MATMULS
from mpx._amp._scopes import LOW_NAME
from mpx._amp._values import F32, NEUTRAL, Meta, as_array, cast, is_eligible, widest
from mpx._compat import (
    Literal,
    bind,
    constants_as_inputs,
    eval_equation,
    open_jaxpr,
    sub_jaxprs,
)

Outcome = tuple[list[Any], list[Meta]]
Dtypes = tuple[np.dtype | None, ...]
"""A dtype per value; `None` where a value keeps its own."""


def has_work(jaxpr: Any) -> bool:
    """Whether a jaxpr holds a matmul or a value marked low, at any depth."""
    return any(
        eqn.primitive.name in MATMULS
        or eqn.primitive.name in _flash.NAMES
        or eqn.params.get("name") == LOW_NAME
        or any(map(has_work, sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def rewrite(
    amp: Any,
    jaxpr: Any,
    avals: Sequence[Any],
    metas: Sequence[Meta],
    scopes: tuple[str, ...],
    *,
    out_dtypes: Dtypes | None = None,
) -> tuple[Any, tuple[Meta, ...]]:
    """Returns the rewritten jaxpr for inputs of these types.

    Results are cached, so that several calls of one jitted layer stay several calls of
    one function.
    """
    body, consts = open_jaxpr(jaxpr)
    key = (id(body), tuple(map(str, avals)), tuple(metas), scopes, out_dtypes)
    if key in amp.cache:
        return amp.cache[key][:2]
    known: list[Meta] = []

    def run(*args: Any) -> list[Any]:
        outs, out_metas = amp.run(body, consts, args, metas, scopes)
        known[:] = out_metas
        return cast_all(outs, out_dtypes) if out_dtypes is not None else outs

    new = jax.make_jaxpr(run)(*avals)
    # The old jaxpr is kept alive: its `id` is part of the key.
    amp.cache[key] = (new, tuple(known), jaxpr)
    return amp.cache[key][:2]


def trace(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what traces a user's function at its own dtypes, as `jax.make_jaxpr`.

    Attention becomes one operation, where that can help.
    """

    @functools.wraps(func)
    def traced(*args: Any) -> Any:
        with caught_attention(_flash.attend):
            return jax.make_jaxpr(func)(*args)

    return traced


def cast_all(values: Sequence[Any], dtypes: Dtypes) -> list[Any]:
    """Casts each value to its dtype; `None` leaves it alone."""
    return [
        value if dtype is None else cast(value, dtype)
        for value, dtype in zip(values, dtypes, strict=True)
    ]


def types_of(values: Sequence[Any]) -> list[Any]:
    """Returns the abstract values of arrays."""
    return [jax.typeof(value) for value in values]


def with_dtype(aval: Any, dtype: np.dtype | None) -> Any:
    """Returns an abstract value with another dtype."""
    if dtype is None or aval.dtype == dtype:
        return aval
    return aval.update(dtype=dtype, weak_type=False)


def metas_by_dtype(outs: Sequence[Any]) -> list[Meta]:
    """Returns what the dtype alone tells of the results of a loop or branch."""
    low = (jnp.bfloat16, jnp.float16)
    return [
        Meta(chain="low") if jnp.result_type(out) in low else NEUTRAL for out in outs
    ]


def without_literals(metas: Sequence[Meta]) -> list[Meta]:
    """Forgets numbers: inside of a call a constant is an argument."""
    return [meta._replace(literal=None) for meta in metas]


def _jit(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values = [as_array(value) for value in values]
    body, _ = open_jaxpr(eqn.params["jaxpr"])
    unchanged = all(
        not is_eligible(var.aval) or value.dtype == F32
        for var, value in zip(eqn.invars, values, strict=True)
    )
    if unchanged and amp.policy.is_plain and not has_work(body):
        # Nothing to do: random number generators, for one, stay the same programs.
        return eval_equation(eqn, values), [NEUTRAL] * len(eqn.outvars)
    jaxpr = eqn.params["jaxpr"]
    new, out_metas = rewrite(amp, jaxpr, types_of(values), metas, scopes)
    if any(wide := _read_in_f32_only(new)):
        # Cast outside, such a value shares its f32 version with the equations there.
        values = [
            amp.widen(value) if is_wide else value
            for value, is_wide in zip(values, wide, strict=True)
        ]
        new, out_metas = rewrite(amp, jaxpr, types_of(values), metas, scopes)
    # Not inlined: that would drop its name, shardings and donation.
    return bind(eqn, values, jaxpr=new), list(out_metas)


def _read_in_f32_only(jaxpr: Any) -> list[bool]:
    """Says for each input whether all that happens to it is one cast up to f32."""
    body, _ = open_jaxpr(jaxpr)
    readers: dict[Any, list[Any]] = {var: [] for var in body.invars}
    for eqn in body.eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in readers:
                readers[atom].append(eqn)
    returned = [atom for atom in body.outvars if not isinstance(atom, Literal)]
    return [
        len(equations) == 1
        and equations[0].primitive.name == "convert_element_type"
        and is_eligible(equations[0].outvars[0].aval)
        and var.aval.dtype != F32
        and var not in returned
        for var, equations in readers.items()
    ]


def _inline(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    jaxpr = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    return amp.run(*open_jaxpr(jaxpr), values, metas, scopes)


def _remat(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values = [as_array(value) for value in values]
    new, out_metas = rewrite(amp, eqn.params["jaxpr"], types_of(values), metas, scopes)
    body, consts = constants_as_inputs(new)
    # `policy`, `prevent_cse` and `differentiated` stay: wrapping the function in
    # `jax.checkpoint` anew would lose the last one inside of a gradient.
    return bind(eqn, [*consts, *values], jaxpr=body), list(out_metas)


def float_dtypes(variables: Sequence[Any], avals: Sequence[Any]) -> Dtypes:
    """Returns the dtypes of the values that autocast may change."""
    return tuple(
        np.dtype(aval.dtype) if is_eligible(var.aval) else None
        for var, aval in zip(variables, avals, strict=True)
    )


def _cond(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    index, *operands = [as_array(value) for value in values]
    avals, inner = types_of(operands), without_literals(metas[1:])
    branches = eqn.params["branches"]
    natural = [rewrite(amp, branch, avals, inner, scopes)[0] for branch in branches]
    # The branches must agree: each result has the widest dtype among them.
    dtypes = tuple(
        widest(branch.out_avals[i].dtype for branch in natural)
        if is_eligible(var.aval)
        else None
        for i, var in enumerate(eqn.outvars)
    )
    new = tuple(
        rewrite(amp, branch, avals, inner, scopes, out_dtypes=dtypes)[0]
        for branch in branches
    )
    outs = bind(eqn, [index, *operands], branches=new)
    return outs, metas_by_dtype(outs)


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
        self.variables = eqn.invars[count:]
        self.dtypes = _natural_dtypes(amp, eqn, values, metas, scopes)
        self.free = [
            i
            for i, var in enumerate(self.variables)
            if jnp.issubdtype(var.aval.dtype, jnp.inexact)
        ]

    def run(self, *args: Any) -> list[Any]:
        """Runs the function itself."""
        jaxpr = open_jaxpr(self.eqn.params["call_jaxpr"])
        args = (*self.closed_over, *args)
        outs, _ = self.amp.run(*jaxpr, args, self.metas, self.scopes)
        return cast_all(outs, self.dtypes)

    def rewritten(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Runs a jaxpr that was traced at the original dtypes."""
        metas = [NEUTRAL] * len(args)
        return self.amp.run(*open_jaxpr(jaxpr), args, metas, self.scopes)[0]

    def original_avals(self, args: Sequence[Any]) -> list[Any]:
        """Returns the types of values with the dtypes of the traced function."""
        return [
            with_dtype(jax.typeof(value), F32 if is_eligible(var.aval) else None)
            for var, value in zip(self.variables, args, strict=True)
        ]

    def partially(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Returns the original equation as a function of its differentiable operands."""
        closed_over = [
            cast(value, F32) if is_eligible(var.aval) else value
            for var, value in zip(self.eqn.invars, self.closed_over, strict=False)
        ]

        def call(*chosen: Any) -> list[Any]:
            full = list(args)
            for i, value in zip(self.free, chosen, strict=True):
                full[i] = value
            return eval_equation(self.eqn, [*closed_over, *full])

        return call


def _custom_jvp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    custom = _CustomCall(amp, eqn, values, metas, scopes)
    free, dtypes = custom.free, custom.dtypes
    call = jax.custom_jvp(custom.run)

    @call.defjvp
    def rule(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        avals = custom.original_avals(primals)

        def expanded(args: list[Any], chosen: list[Any]) -> Any:
            return jax.jvp(custom.partially(args), [args[i] for i in free], chosen)

        new = trace(expanded)(avals, [avals[i] for i in free])
        outs = custom.rewritten(new, [*primals, *(tangents[i] for i in free)])
        half = len(outs) // 2
        return cast_all(outs[:half], dtypes), cast_all(outs[half:], dtypes)

    outs = list(call(*custom.args))
    return outs, metas_by_dtype(outs)


def _custom_vjp(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    custom = _CustomCall(amp, eqn, values, metas, scopes)
    free = custom.free
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

        new = trace(expanded)(*custom.original_avals(args))
        outs = custom.rewritten(new, args)
        count = len(learnt["outs"])
        return cast_all(outs[:count], custom.dtypes), outs[count:]

    def backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        def expanded(residuals: list[Any], cotangents: list[Any]) -> Any:
            return jax.tree.unflatten(learnt["tree"], residuals)(list(cotangents))

        new = trace(expanded)(learnt["residuals"], learnt["outs"])
        outs = custom.rewritten(new, [*residuals, *cotangents])
        grads: list[Any] = [None] * len(given)
        for i, grad in zip(free, outs, strict=True):
            grads[i] = cast(grad, given[i])
        return tuple(grads)

    call = jax.custom_vjp(custom.run)
    call.defvjp(forward, backward)
    outs = list(call(*custom.args))
    return outs, metas_by_dtype(outs)


def _shard_map(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values = [as_array(value) for value in values]
    params = eqn.params
    body, _ = open_jaxpr(params["jaxpr"])
    metas = [
        # Inside, an argument has the shape of one device's part.
        meta if meta.leaf is None else meta._replace(leaf=tuple(var.aval.shape))
        for var, meta in zip(body.invars, without_literals(metas), strict=True)
    ]

    def call(*args: Any) -> tuple[Any, ...]:
        outs, _ = amp.run(*open_jaxpr(params["jaxpr"]), args, metas, scopes)
        return tuple(outs)

    outs = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params.get("newly_manual_axes", params.get("manual_axes")),
    )(*values)
    return list(outs), metas_by_dtype(outs)


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
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "shard_map": _shard_map,
}
