"""Recognising attention in a function under `amp`, and running it in one kernel."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._facts import (
    F32,
    NEUTRAL,
    Decision,
    Origin,
    Settings,
    cast,
    is_eligible,
)
from mpx._amp._matmuls import reason_against
from mpx._amp._rules import SHAPE_ONLY, Rule
from mpx._compat import has_explicit_axes, source_frames, sub_jaxprs
from mpx._devices import cuda_capability
from mpx._jaxpr._interpreter import Jaxpr, Op, Outcome, Plan, Replacement, Scopes
from mpx._jaxpr._queries import ATTENTION, Equation
from mpx._jaxpr._replace import plan_with, replacement, scopes_inside
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term
from mpx._private import private

if TYPE_CHECKING:
    from mpx._attention import Attention, Masks, Match

_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_NATURAL = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.Precision.DEFAULT,
    None,
)


def plan_for(
    amp: Settings,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    facts: Sequence[Origin],
    scopes: Scopes,
) -> Plan | None:
    """Returns what is recognised in a jaxpr; see `Visitor.plan`."""
    if cuda_capability() is None or not _may_hold_attention(jaxpr):
        return None
    if private("attention") is None:
        return None
    if has_explicit_axes(jax.sharding.get_abstract_mesh()):
        return None
    from mpx._attention import find_attention

    level = Level(jaxpr, consts)
    softmaxes = Softmaxes(level)
    known = dict(zip(jaxpr.invars, facts, strict=True))
    replaced: dict[int, Replacement] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "dot_general":
            continue
        match = find_attention(softmaxes, eqn)
        if match is not None:
            found = _replacement(amp, softmaxes, match, known, scopes)
            if not isinstance(found, str):
                replaced[index] = found
                continue
            _record(amp, eqn, scopes, found)
    return plan_with(jaxpr, replaced)


def _may_hold_attention(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr has two matmuls and an exponential, cheaply."""
    matmuls = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    return matmuls > 0 and any(_has_exp(eqn) for eqn in jaxpr.eqns)


def _has_exp(eqn: Equation) -> bool:
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call"):
        return any(_has_exp(x) for body in sub_jaxprs(eqn) for x in body.eqns)
    return name == "exp"


# --- Whether it may be fused ----------------------------------------------------------


def _replacement(
    amp: Settings,
    softmaxes: Softmaxes,
    match: "Match",
    known: dict[Any, Origin],
    scopes: Scopes,
) -> Replacement | str:
    """Returns the replacement of recognised attention, or the reason against it."""
    from mpx import _attention

    inside = softmaxes.history((match.probs,)).values()
    against = _reason_by_rules(amp, match, inside, known, scopes)
    if against is not None:
        return against
    dtypes = {_dtype(amp, x) for x in (match.query, match.key, match.value)}
    if len(dtypes) > 1 or not dtypes <= {*_LOW}:
        return f"operands in {' and '.join(sorted(map(str, dtypes)))}"
    if not softmaxes.is_private((match.probs,), match.eqn):
        return "the attention weights or scores are used elsewhere"
    masks = _attention.masks_of(match)
    if isinstance(masks, str):
        return masks
    (dtype,), (query, key, _) = dtypes, match.shapes
    against = _attention.reason_not_paying(cuda_capability(), query[1], key[1])
    if against is not None:
        return against
    spec = _attention.Attention(
        scale=match.scores.scale,
        is_causal=masks.is_causal,
        window=masks.window,
        extras=masks.extras,
        required=False,
    )
    types = _attention.padded_types(match.shapes, spec, dtype)
    against = _attention.reason_against(spec, types)
    if against is not None:
        return against

    def run(amp: Any, op: Op, value_of: Any) -> Outcome:
        return _run(amp, op, value_of, match, masks, spec, dtype)

    terms = [match.query, match.key, match.value, *masks.terms]
    return replacement(softmaxes.level, terms, run)


def _dtype(amp: Settings, term: Term) -> np.dtype:
    return amp.dtype if is_eligible(term.aval) else term.aval.dtype


def _reason_by_rules(
    amp: Settings,
    match: "Match",
    inside: Any,
    known: dict[Any, Origin],
    scopes: Scopes,
) -> str | None:
    """Returns which rule or precision asks for the operations as they are written."""
    compute_is_f16 = amp.dtype == np.float16
    for term in inside:
        region = amp.region_rule(term.eqn, scopes_inside(term, scopes))
        name = term.name
        rule = (
            region
            or (
                amp.rules.primitive_rule(
                    name, term.eqn.params, compute_is_f16=compute_is_f16
                ),
                "",
            )
        )[0]
        if callable(rule) and not isinstance(rule, Rule):
            return f"the rule of {name} is a function"
        if region is not None and region[0] == Rule.ORIGINAL:
            return region[1]
    dot = match.scores.dot
    last = Term(softmax_level(match), match.eqn.outvars[0], match.eqn)
    for term, operands in ((dot, dot.operands), (last, [match.value])):
        facts = [_fact(x, known) for x in operands]
        region = amp.region_rule(term.eqn, scopes_inside(term, scopes))
        rule, reason = region or amp.rule("dot_general", term.eqn.params, facts)
        if rule != Rule.LOW:
            return reason
        against = _reason_by_precision(term.eqn)
        if against is not None:
            return against
    return None


def softmax_level(match: "Match") -> Level:
    level = match.probs.level
    while level.caller is not None:
        level = level.caller[0]
    return level


def _reason_by_precision(eqn: Equation) -> str | None:
    if any(is_eligible(var.aval) for var in eqn.invars):
        return reason_against(eqn, Rule.LOW)
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    for item in asked:
        if item not in _NATURAL:
            return f"precision={item} was asked for"
    return None


def _fact(term: Term, known: dict[Any, Origin]) -> Origin:
    """Returns what is known of the argument that a value is, in another shape."""
    while term.eqn is not None and term.name in SHAPE_ONLY:
        term = term.operands[0]
    return NEUTRAL if term.eqn is not None else known.get(term.atom, NEUTRAL)


# --- Running it -----------------------------------------------------------------------


def _run(
    amp: Settings,
    op: Op,
    value_of: Any,
    match: "Match",
    masks: "Masks",
    spec: "Attention",
    dtype: np.dtype,
) -> Outcome:
    from mpx import _attention

    operands = [value_of(x) for x in (match.query, match.key, match.value)]
    low = [cast(value, dtype) for value, _ in operands]
    query, key, value = match.laid_out(*low)

    def wide(term: Term) -> Any:
        found = value_of(term)[0]
        return amp.widen(found) if is_eligible(term.aval) else jnp.asarray(found)

    extras = _attention.arrays_of(match, masks, wide)
    out = _attention.fitted_attention(query, key, value, extras, spec)
    if masks.empty is not None:
        out = _attention.fill_empty_rows(match, masks, extras["mask"], value, out)
    out = match.as_result(out)
    wanted = op.eqn.outvars[0].aval.dtype
    is_explicit = not is_eligible(match.value.aval)
    out = cast(out, wanted) if is_explicit or wanted != F32 else out
    names = [fact.name for _, fact in operands if fact.name]
    _record(amp, op.eqn, op.scopes, "", match, tuple(names), out)
    return [out], [Origin(chain="low" if out.dtype == amp.dtype else "high")]


def _record(
    amp: Settings,
    eqn: Equation,
    scopes: Scopes,
    reason: str,
    match: "Match | None" = None,
    params: tuple[str, ...] = (),
    out: Any = None,
) -> None:
    """Records that attention was recognised, and either run as one or kept."""
    if amp.decisions is None:
        return
    frames = source_frames(eqn)
    shapes = match.shapes if match is not None else []
    count = 0
    if match is not None:
        (batch, rows, heads, size), (_, keys, _, _), _ = shapes
        count = 4 * batch * heads * rows * keys * size
    amp.decisions.append(
        Decision(
            primitive=next(iter(ATTENTION)) if match is not None else "attention",
            rule=str(Rule.LOW if match is not None else Rule.ORIGINAL),
            reason=reason or "recognised",
            scope="/".join(scopes),
            source=f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown",
            params=params,
            before=tuple(str(var.aval.dtype) for var in eqn.invars),
            after=tuple(str(x.aval.dtype) for x in eqn.outvars)
            if out is None
            else (str(out.dtype),),
            shapes=tuple(map(tuple, shapes)),
            flops=count,
        )
    )
