"""Attention in a function under `amp`: which runs in one kernel, by the rules, and how.

It is imported when a function is traced for a GPU with a fused kernel.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._amp._decide import reason_against
from mpx._amp._facts import (
    DATA,
    LOW_DTYPES,
    Decision,
    Settings,
    Source,
    cast,
    is_eligible,
)
from mpx._amp._rules import Rule
from mpx._jax._compat import Literal, scopes_of, source_context
from mpx._jax._devices import cuda_capability
from mpx._jax._warn import warn
from mpx._ops import _attention as kernel
from mpx._program._interpreter import Jaxpr, Op, Outcome, Plan, Replacement, Scopes
from mpx._program._queries import ATTENTION, SHAPE_ONLY, Equation
from mpx._recognise._match import (
    Masks,
    Match,
    fill_empty_rows,
    find_attention,
    masks_of,
    reason_for_miss,
)
from mpx._recognise._softmax import Softmaxes
from mpx._recognise._terms import Level, Term, live_equations, outermost

_CALL = next(iter(ATTENTION))
_NATURAL = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.Precision.DEFAULT,
    None,
)
Value = tuple[Any, Source]
Values = dict[Any, Value]
"""Values and facts by variable at the outermost level, by the `id` of the term inside calls."""


def plan_for(
    amp: Settings,
    jaxpr: Jaxpr,
    consts: Sequence[PyTree],
    facts: Sequence[Source],
    scopes: Scopes,
) -> Plan | None:
    """Returns what is recognised in a jaxpr; see `Visitor.plan`."""
    known = dict(zip(jaxpr.invars, facts, strict=True))
    search = _Search(amp, Softmaxes(Level(jaxpr, consts)), known, scopes)
    level = search.softmaxes.level
    replaced, inside = {}, {}
    try:
        for index, eqn in enumerate(jaxpr.eqns):
            call = search.call_at(eqn) if eqn.primitive.name == "dot_general" else None
            if call is not None:
                terms = search.softmaxes.history(call.match.probs)
                replaced[index] = _replacement(level, call)
                inside[index] = {id(outermost(term)) for term in terms}
    except Exception as error:
        warn(_FAILED.format(error=repr(error)))
        return None
    while replaced:
        # Nothing runs that nobody reads; what is read all the same is not replaced.
        atoms = {index: found.atoms for index, found in replaced.items()}
        live = live_equations(jaxpr, atoms)
        used = [index for index in replaced if inside[index] & live]
        if not used:
            dead = (i for i, eqn in enumerate(jaxpr.eqns) if id(eqn) not in live)
            return Plan(replaced, frozenset(dead))
        for index in used:
            search.tell(jaxpr.eqns[index], _USED_ELSEWHERE)
            del replaced[index]
    return None


_FAILED = (
    "mpx failed to look for attention in a function under `amp`, which runs as it is "
    'written: {error}. Pass `attention="keep"` to `amp` to silence this, and report it.'
)
_USED_ELSEWHERE = (
    "the weights or scores are used elsewhere, perhaps by a gradient inside"
)


class _Call(NamedTuple):
    """Recognised attention, its masks, the call of the kernel, and its dtype."""

    match: Match
    masks: Masks
    spec: kernel.Attention
    dtype: np.dtype

    def run(self, amp: Any, op: Op, value_of: Callable[[Term], Value]) -> Outcome:
        """Runs attention in 16 bits, and tells the report."""
        match, masks, spec, dtype = self
        operands = [value_of(x) for x in match.operands]

        def wide(term: Term) -> Array:
            found = value_of(term)[0]
            return amp.widen(found) if is_eligible(term.aval) else jnp.asarray(found)

        arrays = match.laid_out([cast(x, dtype) for x, _ in operands])
        extras = masks.arrays(match, wide)
        out = kernel.attention(arrays, extras, spec)
        if masks.empty is not None:
            out = fill_empty_rows(match, masks, extras["mask"], arrays, out)
        out = match.as_result(out)
        asked = op.eqn.outvars[0].aval
        if not is_eligible(asked) or not is_eligible(match.operands[2].aval):
            out = cast(out, asked.dtype)  # as it was asked for
        if amp.decisions is not None:
            (batch, rows, heads, size), (_, keys, _, _), _ = match.shapes
            row = Decision.about(
                op.eqn,
                op.scopes,
                primitive=_CALL,
                rule=str(Rule.LOW),
                reason="recognised",
                params=tuple(fact.name for _, fact in operands if fact.name),
                after=(str(out.dtype),),
                shapes=tuple(match.shapes),
                flops=4 * batch * heads * rows * keys * size,
            )
            amp.decisions.append(row)
        return [out], [DATA]


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search in one jaxpr; `known` are the facts of its arguments."""

    amp: Settings
    softmaxes: Softmaxes
    known: Mapping[Any, Source]
    scopes: Scopes

    def call_at(self, eqn: Equation) -> _Call | None:
        """Returns the attention of which a matmul is the last operation, if it may run."""
        match = find_attention(self.softmaxes, eqn)
        if match is not None:
            found = self._call_of(match)
        else:
            is_told = self.amp.decisions is not None
            found = reason_for_miss(self.softmaxes, eqn) if is_told else None
        if isinstance(found, str):
            return self.tell(eqn, found)
        return found

    def tell(self, eqn: Equation, reason: str) -> None:
        """Tells the report why attention is kept."""
        if self.amp.decisions is not None:
            row = Decision.about(
                eqn,
                self.scopes + scopes_of(eqn),
                primitive="attention",
                rule=str(Rule.ORIGINAL),
                reason=reason,
                flops=0,
            )
            self.amp.decisions.append(row)

    def _call_of(self, match: Match) -> _Call | str:
        """Returns how recognised attention runs in one kernel, or the reason against it."""
        # A matmul multiplies f32 in the compute dtype.
        dtypes = {
            self.amp.dtype if is_eligible(x.aval) else x.aval.dtype
            for x in match.operands
        }
        against = self._reason_to_keep(match)
        if against is None and not (len(dtypes) == 1 and dtypes <= {*LOW_DTYPES}):
            against = f"operands in {' and '.join(sorted(map(str, dtypes)))}"
        (_, rows, *_), (_, keys, *_), _ = match.shapes
        against = against or kernel.reason_not_paying(cuda_capability(), rows, keys)
        masks = masks_of(match) if against is None else against
        if isinstance(masks, str):
            return masks
        zeros = lambda x: jnp.zeros(x.shape, x.aval.dtype)  # noqa: E731
        extras = jax.eval_shape(lambda: masks.arrays(match, zeros))
        spec = kernel.Attention(
            match.scores.scale, masks.is_causal, masks.window, tuple(extras)
        )
        (dtype,) = dtypes
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in match.shapes]
        against = kernel.reason_against(spec, arrays, extras)
        return against or _Call(match, masks, spec, dtype)

    def _reason_to_keep(self, match: Match) -> str | None:
        """Returns which rule or precision asks for the operations as they are written."""
        amp, dot = self.amp, match.scores.dot
        for term in self.softmaxes.history(match.probs):
            region = amp.region_rule(term.eqn, _scopes_inside(term, self.scopes))
            rule, reason = region or amp.rule(term.name, term.eqn.params, ())
            if callable(rule) and not isinstance(rule, Rule):
                return f"the rule of {term.name} is a function"
            if region is not None and rule == Rule.ORIGINAL:
                return reason
        last = Term(self.softmaxes.level, match.eqn.outvars[0], match.eqn)
        for term, operands in ((dot, dot.operands), (last, match.operands[2:])):
            facts = [self._fact_of(x) for x in operands]
            region = amp.region_rule(term.eqn, _scopes_inside(term, self.scopes))
            rule, reason = region or amp.rule("dot_general", term.eqn.params, facts)
            if rule == Rule.LOW:
                reason = _reason_by_precision(term.eqn)
            if reason is not None:
                return reason
        return None

    def _fact_of(self, term: Term) -> Source:
        """Returns what is known of the argument that a value is, in another shape."""
        while term.eqn is not None and term.name in SHAPE_ONLY:
            term = term.operands[0]
        return DATA if term.eqn is not None else self.known.get(term.atom, DATA)


def _reason_by_precision(eqn: Equation) -> str | None:
    if any(is_eligible(var.aval) for var in eqn.invars):
        return reason_against(eqn, Rule.LOW)
    asked = eqn.params.get("precision")
    for item in asked if isinstance(asked, tuple) else (asked,):
        if item not in _NATURAL:
            return f"precision={item} was asked for"
    return None


# --- While the function runs ----------------------------------------------------------


def _replacement(level: Level, call: _Call) -> Replacement:
    """Returns what replaces the last equation of attention.

    Terms of the outermost level have been computed; those inside calls are computed when
    they are read, by the visitor.
    """
    atoms: dict[Any, None] = {}
    waiting, seen = [*call.match.operands, *call.masks.terms], set()
    while waiting:
        term = waiting.pop()
        if id(term) in seen or isinstance(term.atom, Literal):
            continue
        seen.add(id(term))
        if term.level is level:
            atoms[term.atom] = None
        else:
            waiting.extend(term.operands)

    def run(amp: Any, op: Op) -> Outcome:
        pairs = zip(op.values, op.facts, strict=True)
        known: Values = dict(zip(atoms, pairs, strict=True))
        scopes = op.scopes[: len(op.scopes) - len(scopes_of(op.eqn))]
        return call.run(amp, op, lambda term: _value_of(amp, scopes, term, known))

    return Replacement(list(atoms), run)


def _value_of(amp: Any, scopes: Scopes, term: Term, known: Values) -> Value:
    """Returns the value of a term and its fact, and adds what it computes to `known`."""
    atom = term.atom
    if isinstance(atom, Literal):
        return atom.val, amp.literal_fact(atom)
    key = atom if term.level.caller is None else id(term)
    if key not in known:
        if term.eqn is None:
            const = term.level.consts[atom]
            known[key] = const, amp.constant_fact(const)
        else:
            pairs = [_value_of(amp, scopes, x, known) for x in term.operands]
            values, facts = [x for x, _ in pairs], [x for _, x in pairs]
            with source_context(term.eqn), term.eqn.ctx.manager:
                op = Op(term.eqn, values, facts, _scopes_inside(term, scopes))
                outs, facts = amp.equation(op)
            place = next(i for i, x in enumerate(term.eqn.outvars) if x is atom)
            known[key] = outs[place], facts[place]
    return known[key]


def _scopes_inside(term: Term, scopes: Scopes) -> Scopes:
    """Returns the named scopes around the equation of a term, given the outermost ones."""
    found: Scopes = () if term.eqn is None else scopes_of(term.eqn)
    caller = term.level.caller
    while caller is not None:
        level, call = caller
        found, caller = scopes_of(call) + found, level.caller
    return scopes + found
