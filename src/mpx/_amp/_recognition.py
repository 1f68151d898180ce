"""Recognising attention in a function under `amp`, and running it in one kernel."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._facts import (
    NEUTRAL,
    Decision,
    Origin,
    Settings,
    cast,
    is_eligible,
)
from mpx._amp._matmuls import reason_against
from mpx._amp._rules import SHAPE_ONLY, Rule
from mpx._compat import has_explicit_axes, scopes_of
from mpx._devices import cuda_capability
from mpx._jaxpr._constants import compact
from mpx._jaxpr._interpreter import Jaxpr, Op, Outcome, Plan, Replacement, Scopes
from mpx._jaxpr._queries import ATTENTION, Equation, leaves
from mpx._jaxpr._replace import plan_with, replacement, scopes_inside
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term
from mpx._private import private
from mpx._warn import warn

if TYPE_CHECKING:
    from mpx._attention import Attention, Masks, Match

_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_NATURAL = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.Precision.DEFAULT,
    None,
)


class Site(NamedTuple):
    """An equation that may be the last one of something to recognise.

    Attributes:
        amp: The settings.
        softmaxes: The meanings of the values of the jaxpr.
        eqn: The equation.
        facts: What is known of the arguments of the jaxpr.
        scopes: The named scopes around the jaxpr.
    """

    amp: Settings
    softmaxes: Softmaxes
    eqn: Equation
    facts: Mapping[Any, Origin]
    scopes: Scopes

    def keep(self, what: str, reason: str) -> None:
        """Tells the report that something was recognised but is run as written."""
        amp, eqn = self.amp, self.eqn
        if amp.decisions is not None:
            row = Decision.about(
                eqn,
                self.scopes + scopes_of(eqn),
                primitive=what,
                rule=str(Rule.ORIGINAL),
                reason=reason,
                flops=0,
            )
            amp.decisions.append(row)


def plan_for(
    amp: Settings,
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    facts: Sequence[Origin],
    scopes: Scopes,
) -> Plan | None:
    """Returns what is recognised in a jaxpr; see `Visitor.plan`."""
    if not _can_fuse(amp) or not _may_hold_attention(jaxpr):
        return None
    softmaxes = Softmaxes(Level(jaxpr, consts))
    known = dict(zip(jaxpr.invars, facts, strict=True))
    replaced: dict[int, Replacement] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        find = _FINDERS.get(eqn.primitive.name)
        if find is not None:
            try:
                found = find(Site(amp, softmaxes, eqn, known, scopes))
            except Exception as error:
                warn(_FAILED.format(error=repr(error)))
                return None
            if found is not None:
                replaced[index] = found
    return plan_with(jaxpr, replaced)


_FAILED = (
    "mpx failed to look for attention in a function under `amp`, which runs as it is "
    'written: {error}. Pass `attention="keep"` to `amp` to silence this, and report it.'
)


def _can_fuse(amp: Settings) -> bool:
    return (
        amp.attention == "fuse"
        and cuda_capability() is not None
        and private("attention") is not None
        and not has_explicit_axes(jax.sharding.get_abstract_mesh())
    )


def _may_hold_attention(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr has a matmul and an exponential, or a call; cheaply."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    has_exp = any(eqn.primitive.name == "exp" for eqn in leaves(jaxpr.eqns))
    return ("dot_general" in names and has_exp) or _CALL in names


# --- Whether attention may be fused ---------------------------------------------------


def _attention_at(site: Site) -> Replacement | None:
    """Returns what replaces attention of which an equation is the last, if it is that."""
    from mpx import _attention

    match = _attention.find_attention(site.softmaxes, site.eqn)
    if match is None:
        if site.amp.decisions is not None:
            reason = _attention.reason_for_miss(site.softmaxes, site.eqn)
            if reason is not None:
                site.keep("attention", reason)
        return None
    found = _call_of(site, match)
    if isinstance(found, str):
        site.keep("attention", found)
        return None

    def run(amp: Any, op: Op, value_of: Any) -> Outcome:
        return _run(amp, op, value_of, found)

    terms = [match.query, match.key, match.value, *found.masks.terms]
    return replacement(site.softmaxes.level, terms, run)


def _mask_at(site: Site) -> Replacement | None:
    """Returns what replaces a call of JAX's attention with a mask that the kernel knows."""
    from mpx._attention import form_of, smallest

    eqn, level = site.eqn, site.softmaxes.level
    spec, (rows, keys) = eqn.params["spec"], (x.aval.shape[1] for x in eqn.invars[:2])
    if "mask" not in spec.extras or spec.is_causal or spec.window is not None:
        return None
    place = 3 + spec.extras.index("mask")
    value = level.term(eqn.invars[place]).constant
    form = None if value is None else form_of(smallest(compact(value)), rows, keys)
    if form is None:
        return None
    extras = tuple(name for name in spec.extras if name != "mask")
    spec = spec._replace(is_causal=form[0], window=form[1], extras=extras)
    atoms = [atom for i, atom in enumerate(eqn.invars) if i != place]
    new = eqn.replace(invars=atoms, params={**eqn.params, "spec": spec})

    def run(amp: Any, op: Op, value_of: Any) -> Outcome:
        pairs = [value_of(level.term(atom)) for atom in atoms]
        values, facts = [x for x, _ in pairs], [x for _, x in pairs]
        return amp.equation(Op(new, values, facts, op.scopes))

    return replacement(level, [level.term(atom) for atom in atoms], run)


_CALL = next(iter(ATTENTION))
_FINDERS: dict[str, Callable[[Site], Replacement | None]] = {
    "dot_general": _attention_at,
    _CALL: _mask_at,
}


class _Call(NamedTuple):
    """Recognised attention, its masks, the call of the kernel, and its dtype."""

    match: "Match"
    masks: "Masks"
    spec: "Attention"
    dtype: np.dtype


def _call_of(site: Site, match: "Match") -> _Call | str:
    """Returns how recognised attention runs in one kernel, or the reason against it."""
    from mpx import _attention

    amp, softmaxes = site.amp, site.softmaxes
    against = _reason_by_rules(site, match)
    operands = [match.query, match.key, match.value]
    against = against or reason_by_dtypes(amp, operands)
    if against is None and not softmaxes.is_private((match.probs,), match.eqn):
        against = (
            "the weights or scores are used elsewhere, perhaps by a gradient inside"
        )
    (_, rows, *_), (_, keys, *_), _ = match.shapes
    against = against or _attention.reason_not_paying(cuda_capability(), rows, keys)
    masks = _attention.masks_of(match) if against is None else against
    if isinstance(masks, str):
        return masks
    if masks.extras == ("bias", "mask"):
        zeros = lambda x: jnp.zeros(x.shape, x.aval.dtype)  # noqa: E731
        arrays = jax.eval_shape(lambda: _attention.arrays_of(match, masks, zeros))
        against = _attention.reason_by_shapes({k: x.shape for k, x in arrays.items()})
        if against is not None:
            return against
    dtype = dtype_of_operand(amp, match.query)
    spec = _attention.Attention(
        scale=match.scores.scale,
        is_causal=masks.is_causal,
        window=masks.window,
        extras=masks.extras,
        required=False,
    )
    padded = _attention.padded_call(match.shapes, spec, dtype)
    return _attention.reason_against(*padded) or _Call(match, masks, spec, dtype)


def dtype_of_operand(amp: Settings, term: Term) -> np.dtype:
    """Returns the dtype in which a matmul multiplies a value: f32 becomes low."""
    return amp.dtype if is_eligible(term.aval) else term.aval.dtype


def _reason_by_rules(site: Site, match: "Match") -> str | None:
    """Returns which rule or precision asks for the operations as they are written."""
    amp, scopes = site.amp, site.scopes
    inside = site.softmaxes.history((match.probs,)).values()
    for term in inside:
        region = amp.region_rule(term.eqn, scopes_inside(term, scopes))
        rule, reason = region or amp.rule(term.name, term.eqn.params, ())
        if callable(rule) and not isinstance(rule, Rule):
            return f"the rule of {term.name} is a function"
        if region is not None and rule == Rule.ORIGINAL:
            return reason
    dot = match.scores.dot
    last = Term(site.softmaxes.level, match.eqn.outvars[0], match.eqn)
    for term, operands in ((dot, dot.operands), (last, [match.value])):
        against = reason_by_rule(amp, term, operands, site.facts, scopes)
        if against is not None:
            return against
    return None


def reason_by_dtypes(amp: Settings, operands: Sequence[Term]) -> str | None:
    """Returns why values are not multiplied in one 16-bit dtype, if they are not."""
    dtypes = {dtype_of_operand(amp, x) for x in operands}
    if len(dtypes) == 1 and dtypes <= {*_LOW}:
        return None
    return f"operands in {' and '.join(sorted(map(str, dtypes)))}"


def reason_by_rule(
    amp: Settings,
    term: Term,
    operands: Sequence[Term],
    known: Mapping[Any, Origin],
    scopes: Scopes,
) -> str | None:
    """Returns which rule or precision keeps a matmul from running low, if one does.

    Args:
        amp: The settings.
        term: The result of the matmul.
        operands: Those of its operands whose parameters may have rules.
        known: What is known of the arguments of the jaxpr.
        scopes: The named scopes around the jaxpr.
    """
    facts = [_fact_of(x, known) for x in operands]
    region = amp.region_rule(term.eqn, scopes_inside(term, scopes))
    rule, reason = region or amp.rule("dot_general", term.eqn.params, facts)
    return reason if rule != Rule.LOW else _reason_by_precision(term.eqn)


def _reason_by_precision(eqn: Equation) -> str | None:
    if any(is_eligible(var.aval) for var in eqn.invars):
        return reason_against(eqn, Rule.LOW)
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    for item in asked:
        if item not in _NATURAL:
            return f"precision={item} was asked for"
    return None


def _fact_of(term: Term, known: Mapping[Any, Origin]) -> Origin:
    """Returns what is known of the argument that a value is, in another shape."""
    while term.eqn is not None and term.name in SHAPE_ONLY:
        term = term.operands[0]
    return NEUTRAL if term.eqn is not None else known.get(term.atom, NEUTRAL)


# --- Running it -----------------------------------------------------------------------


def _run(
    amp: Settings, op: Op, value_of: Callable[[Term], tuple[Any, Origin]], call: _Call
) -> Outcome:
    from mpx import _attention

    match, masks, spec, dtype = call
    operands = [value_of(x) for x in (match.query, match.key, match.value)]
    query, key, value = match.laid_out(*(cast(x, dtype) for x, _ in operands))

    def wide(term: Term) -> Any:
        found = value_of(term)[0]
        return amp.widen(found) if is_eligible(term.aval) else jnp.asarray(found)

    extras = _attention.arrays_of(match, masks, wide)
    out = _attention.fitted_attention(query, key, value, extras, spec)
    if masks.empty is not None:
        arrays = query, key, value
        out = _attention.fill_empty_rows(match, masks, extras["mask"], arrays, out)
    out = match.as_result(out)
    if not is_eligible(op.eqn.outvars[0].aval) or not is_eligible(match.value.aval):
        out = cast(out, op.eqn.outvars[0].aval.dtype)  # as it was asked for
    if amp.decisions is not None:
        shapes = match.shapes
        (batch, rows, heads, size), (_, keys, _, _), _ = shapes
        row = Decision.about(
            op.eqn,
            op.scopes,
            primitive=next(iter(ATTENTION)),
            rule=str(Rule.LOW),
            reason="recognised",
            params=tuple(fact.name for _, fact in operands if fact.name),
            after=(str(out.dtype),),
            shapes=tuple(shapes),
            flops=4 * batch * heads * rows * keys * size,
        )
        amp.decisions.append(row)
    return [out], [Origin(chain="low" if out.dtype == amp.dtype else "high")]
