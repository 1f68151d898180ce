"""Recursion into loops: the dtypes of carries, and weights that a scan consumes."""

from collections.abc import Callable
from typing import Any

from mpx._amp._calls import (
    Dtypes,
    Outcome,
    cast_all,
    float_dtypes,
    metas_by_dtype,
    rewrite,
    types_of,
    with_dtype,
    without_literals,
)
from mpx._amp._rules import MATMULS, SHAPE_ONLY
from mpx._amp._values import NEUTRAL, Meta, as_array, cast, is_eligible, widest
from mpx._compat import bind, open_jaxpr, scan_sizes, scopes_of, sub_jaxprs


def _carry_dtypes(
    amp: Any, given: Dtypes, original: Dtypes, step: Callable[[Dtypes], Dtypes]
) -> Dtypes:
    """Returns dtypes that a loop body maps to themselves.

    Accumulators stay f32 unless the user lets carries be narrow; then the widest of
    what goes in and what comes out is taken, until nothing changes.
    """
    if not amp.narrow_carry:
        return original
    current = given
    while True:
        after = tuple(
            None if old is None or new is None else widest((old, new))
            for old, new in zip(current, step(current), strict=True)
        )
        if after == current:
            return current
        current = after  # each round widens one at least, so the loop ends


def _scan(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values = [as_array(value) for value in values]
    jaxpr = eqn.params["jaxpr"]
    body, _ = open_jaxpr(jaxpr)
    n_consts, n_carry = scan_sizes(eqn.params)
    first_x = n_consts + n_carry
    for i, var in enumerate(body.invars[first_x:], start=first_x):
        # A weight per layer: cast once before the loop, or the forward pass would save
        # a low copy of each. Nothing is summed over iterations, so nothing is lost.
        if amp.f32_weight_grads or not is_eligible(var.aval):
            continue
        if used_only_low(amp, body, var, metas[i], scopes):
            values[i] = cast(values[i], amp.dtype)
    # The cotangents of a constant add up over the iterations: in f32.
    consts = [
        amp.widen(x) if is_eligible(v.aval) else x
        for x, v in zip(values[:n_consts], body.invars[:n_consts], strict=True)
    ]
    carry = values[n_consts:first_x]
    carry_vars = body.invars[n_consts:first_x]
    inner_metas = without_literals(metas)
    inner_metas[n_consts:first_x] = [NEUTRAL] * n_carry
    for i in range(first_x, len(values)):
        leaf = tuple(body.invars[i].aval.shape)
        shape = None if metas[i].leaf is None else leaf
        inner_metas[i] = inner_metas[i]._replace(leaf=shape)
    x_avals = [
        with_dtype(var.aval, value.dtype if is_eligible(var.aval) else None)
        for var, value in zip(body.invars[first_x:], values[first_x:], strict=True)
    ]

    def body_for(dtypes: Dtypes, outs: Dtypes | None) -> Any:
        avals = [with_dtype(v.aval, d) for v, d in zip(carry_vars, dtypes, strict=True)]
        avals = [*types_of(consts), *avals, *x_avals]
        return rewrite(amp, jaxpr, avals, inner_metas, scopes, out_dtypes=outs)[0]

    original = float_dtypes(carry_vars, [var.aval for var in carry_vars])
    dtypes = _carry_dtypes(
        amp,
        float_dtypes(carry_vars, types_of(carry)),
        original,
        lambda d: float_dtypes(carry_vars, body_for(d, None).out_avals[:n_carry]),
    )
    n_ys = len(eqn.outvars) - n_carry
    new = body_for(dtypes, dtypes + (None,) * n_ys)
    args = [*consts, *cast_all(carry, dtypes), *values[first_x:]]
    outs = bind(eqn, args, jaxpr=new)
    return outs, metas_by_dtype(outs)


def used_only_low(
    amp: Any, jaxpr: Any, var: Any, meta: Meta, scopes: tuple[str, ...]
) -> bool:
    """Whether a value is used, and only as an operand of low matmuls."""
    uses = 0
    for eqn in jaxpr.eqns:
        positions = [i for i, atom in enumerate(eqn.invars) if atom is var]
        if not positions:
            continue
        uses += 1
        name = eqn.primitive.name
        if name in MATMULS and amp.runs_low(eqn, meta, scopes):
            continue
        if name in SHAPE_ONLY and name not in ("broadcast_in_dim", "pvary", "pcast"):
            if used_only_low(amp, jaxpr, eqn.outvars[0], meta, scopes):
                continue
        elif name in ("jit", "remat2", "checkpoint", "closed_call"):
            inner, inside = next(sub_jaxprs(eqn)), scopes + scopes_of(eqn)
            if all(
                used_only_low(amp, inner, inner.invars[i], meta, inside)
                for i in positions
            ):
                continue
        return False
    return uses > 0 and all(atom is not var for atom in jaxpr.outvars)


def _while(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    values, metas = [as_array(value) for value in values], without_literals(metas)
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    n_consts = n_cond + n_body
    carry = values[n_consts:]
    body, _ = open_jaxpr(params["body_jaxpr"])
    carry_vars = body.invars[n_body:]

    def carry_avals(dtypes: Dtypes) -> list[Any]:
        return [with_dtype(v.aval, d) for v, d in zip(carry_vars, dtypes, strict=True)]

    def part(name: str, dtypes: Dtypes, outs: Dtypes | None) -> Any:
        chosen = slice(n_cond) if name == "cond_jaxpr" else slice(n_cond, n_consts)
        avals = [*types_of(values[chosen]), *carry_avals(dtypes)]
        known = [*metas[chosen], *[NEUTRAL] * len(dtypes)]
        return rewrite(amp, params[name], avals, known, scopes, out_dtypes=outs)[0]

    original = float_dtypes(carry_vars, [var.aval for var in carry_vars])
    dtypes = _carry_dtypes(
        amp,
        float_dtypes(carry_vars, types_of(carry)),
        original,
        lambda d: float_dtypes(carry_vars, part("body_jaxpr", d, None).out_avals),
    )
    outs = bind(
        eqn,
        [*values[:n_consts], *cast_all(carry, dtypes)],
        cond_jaxpr=part("cond_jaxpr", dtypes, None),
        body_jaxpr=part("body_jaxpr", dtypes, dtypes),
    )
    return outs, metas_by_dtype(outs)


HANDLERS: dict[str, Callable[..., Outcome]] = {"scan": _scan, "while": _while}
