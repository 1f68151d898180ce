"""Recursion into equations that hold jaxprs: jit, remat, branches, shard_map.

Each is rebuilt around its rewritten body with all its other parameters: names,
shardings, donation, remat policies and derivative rules survive.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._rules import MATMULS
from mpx._amp._scopes import LOW_NAME
from mpx._amp._values import F32, NEUTRAL, Meta, as_array, cast, is_eligible, widest
from mpx._compat import (
    Literal,
    bind,
    constants_as_inputs,
    eval_equation,
    open_jaxpr,
)
from mpx._jaxpr._queries import ATTENTION, equations

Outcome = tuple[list[Any], list[Meta]]
Dtypes = tuple[np.dtype | None, ...]
"""A dtype per value; `None` where a value keeps its own."""


def has_work(jaxpr: Any) -> bool:
    """Returns whether a jaxpr holds a matmul or a value marked low, at any depth."""
    return any(
        eqn.primitive.name in MATMULS
        or eqn.primitive.name in ATTENTION
        or eqn.params.get("name") == LOW_NAME
        for eqn in equations(jaxpr)
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
    one function. They are forgotten with the jaxpr that they were made from: both hold
    the arrays that the layer closes over.
    """
    body, consts = open_jaxpr(jaxpr)
    key = (id(jaxpr), tuple(map(str, avals)), tuple(metas), scopes, out_dtypes)
    if key in amp.cache:
        return amp.cache[key][:2]
    known: list[Meta] = []

    def run(*args: Any) -> list[Any]:
        outs, out_metas = amp.run(body, consts, args, metas, scopes)
        known[:] = out_metas
        return cast_all(outs, out_dtypes) if out_dtypes is not None else outs

    new = jax.make_jaxpr(run)(*avals)
    remember(amp.cache, key, jaxpr, new, tuple(known))
    return new, tuple(known)


def remember(cache: dict[Any, Any], key: Any, jaxpr: Any, *made: Any) -> None:
    """Stores what was made from a jaxpr, for as long as the jaxpr lives.

    Args:
        cache: Where it is stored.
        key: Under which key, which holds the jaxpr's `id`.
        jaxpr: The jaxpr.
        *made: What was made from it.
    """
    cache[key] = (*made, weakref.ref(jaxpr, lambda _: cache.pop(key, None)))


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
    if unchanged and amp.rules.is_plain and not has_work(body):
        # Nothing to do: random number generators, for one, stay the same programs.
        return eval_equation(eqn, values), [NEUTRAL] * len(eqn.outvars)
    jaxpr = eqn.params["jaxpr"]
    new, out_metas = rewrite(amp, jaxpr, types_of(values), metas, scopes)
    if any(wide := _read_in_f32_only(new, body.invars)):
        # Cast outside, such a value shares its f32 version with the equations there.
        values = [
            amp.widen(value) if is_wide else value
            for value, is_wide in zip(values, wide, strict=True)
        ]
        new, out_metas = rewrite(amp, jaxpr, types_of(values), metas, scopes)
    # Not inlined: that would drop its name, shardings and donation.
    return bind(eqn, values, jaxpr=new), list(out_metas)


def _read_in_f32_only(jaxpr: Any, before: Sequence[Any]) -> list[bool]:
    """Says for each input whether all that happens to it is one cast back to f32.

    Args:
        jaxpr: The rewritten jaxpr.
        before: The inputs of the original one. What is not f32 there, such as an integer
            that the function itself casts, must stay as it is.
    """
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
        and is_eligible(old.aval)
        and var.aval.dtype != F32
        and var not in returned
        for old, (var, equations) in zip(before, readers.items(), strict=True)
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
    "shard_map": _shard_map,
}
