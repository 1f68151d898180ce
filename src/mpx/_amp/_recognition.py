"""Attention in a function under `amp`: which runs in one kernel, by the rules, and how.

It is imported when a function is traced for a GPU with a fused kernel.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._amp._decide import reason_against
from mpx._amp._facts import DATA, Settings, Source, cast, is_eligible
from mpx._amp._rules import Rule
from mpx._jax._compat import Literal, scopes_of
from mpx._jax._devices import cuda_capability
from mpx._jax._formats import LOW_DTYPES
from mpx._jax._warn import warn
from mpx._ops import _attention as kernel
from mpx._program._interpreter import Jaxpr, Op, Outcome, Plan, Replacement, Scopes
from mpx._program._queries import MATMULS, SHAPE_ONLY, Equation
from mpx._recognise._match import (
    Masks,
    Match,
    fill_empty_rows,
    find_attention,
    is_low,
    masks_of,
    origins,
    reason_for_miss,
)
from mpx._recognise._softmax import Program, Side, Term, history

_NATURAL = (
    lax.DotAlgorithmPreset.BF16_BF16_F32,
    lax.DotAlgorithmPreset.F16_F16_F32,
    lax.Precision.DEFAULT,
    None,
)
Value = tuple[Any, Source]


def plan_for(
    amp: Settings,
    jaxpr: Jaxpr,
    consts: Sequence[PyTree],
    facts: Sequence[Source],
    scopes: Scopes,
) -> Plan | None:
    """Returns what is recognised in a jaxpr; see `Visitor.plan`."""
    search = _Search(amp, dict(zip(jaxpr.invars, facts, strict=True)), scopes)
    replaced, inside = {}, {}
    try:
        dots = [
            i for i, x in enumerate(jaxpr.eqns) if x.primitive.name == "dot_general"
        ]
        for index, last in zip(dots, Program(jaxpr, consts).products, strict=True):
            match = find_attention(last)
            found = search.replacement(last, match)
            if match is not None and isinstance(found, Replacement):
                inner = {id(x.eqn) for x in history(match.probs)}
                replaced[index], inside[index] = found, inner
            elif isinstance(found, str):
                search.tell(last.eqn, found)
    except Exception as error:
        warn(_FAILED.format(error=repr(error)))
        return None
    while replaced:
        # Nothing runs that nobody reads; what is read all the same is not replaced.
        live = _live(jaxpr, replaced)
        used = [index for index in replaced if inside[index] & live]
        if not used:
            dead = (i for i, eqn in enumerate(jaxpr.eqns) if id(eqn) not in live)
            return Plan(replaced, frozenset(dead))
        for index in used:
            search.tell(jaxpr.eqns[index], _USED_ELSEWHERE)
            del replaced[index]
    return None


def _live(jaxpr: Jaxpr, replaced: Mapping[int, Replacement]) -> set[int]:
    """Returns the `id`s of the equations whose results are read or that have effects."""
    read = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    live = set()
    for index, eqn in reversed(list(enumerate(jaxpr.eqns))):
        if eqn.effects or any(var in read for var in eqn.outvars):
            atoms = replaced[index].atoms if index in replaced else eqn.invars
            read.update(atom for atom in atoms if not isinstance(atom, Literal))
            live.add(id(eqn))
    return live


_FAILED = (
    "mpx failed to look for attention in a function under `amp`, which runs as it is "
    'written: {error}. Pass `attention="keep"` to `amp` to silence this, and report it.'
)
_USED_ELSEWHERE = (
    "the weights or scores are used elsewhere, perhaps by a gradient inside"
)


@dataclasses.dataclass(frozen=True)
class _Search:
    """The search in one jaxpr; `known` are the facts of its arguments."""

    amp: Settings
    known: Mapping[Any, Source]
    scopes: Scopes

    def tell(self, eqn: Equation, reason: str) -> None:
        """Tells the report why attention is kept."""
        what = {"primitive": "attention", "rule": "original", "flops": 0}
        self.amp.tell(eqn, self.scopes + scopes_of(eqn), reason=reason, **what)

    def replacement(self, last: Term, match: Match | None) -> Replacement | str | None:
        """Returns how attention runs in one kernel, or the reason against it."""
        if match is None:
            return reason_for_miss(last) if self.amp.decisions is not None else None
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
        is_trained, may_hide = self._biases(masks)
        if is_trained and extras["bias"].shape[0] > 1:
            return "cuDNN has no gradient of a bias for each example"
        spec = kernel.Attention(
            match.scores.scale, masks.is_causal, masks.window, tuple(extras), may_hide
        )
        (dtype,) = dtypes
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in match.shapes]
        against = kernel.reason_against(spec, arrays, extras)
        return against or _replacement(match, masks, spec, dtype)

    def _biases(self, masks: Masks) -> tuple[bool, bool]:
        """Returns whether biases are trained, and whether they may hide whole rows."""
        values = [x for x in masks.biases if isinstance(x, np.ndarray)]
        sides = [x for x in masks.biases if isinstance(x, Side)]
        terms = [term for side in sides for term in origins(side.term)]
        values += [x.constant for x in terms]
        # Made by the model; data, or what a loop or a branch gives, may be a mask.
        is_made = [
            x.name in MATMULS or self._fact_of(x).is_param
            for x in terms
            if x.constant is None
        ]
        return any(is_made), any(map(is_low, values)) or not all(is_made)

    def _reason_to_keep(self, match: Match) -> str | None:
        """Returns which rule or precision asks for the operations as they are written."""
        for term in (*history(match.probs), match.last):
            is_dot = term in (match.scores.dot, match.last)
            facts = [self._fact_of(x) for x in term.operands if is_dot]
            region = self.amp.region_rule(term.eqn, self.scopes + scopes_of(term.eqn))
            rule, reason = region or self.amp.rule(term.name, term.params, facts)
            if callable(rule) and not isinstance(rule, Rule):
                return f"the rule of {term.name} is a function"
            if is_dot and rule == Rule.LOW:
                reason = _reason_by_precision(term.eqn)
            is_kept = region is not None and rule == Rule.ORIGINAL
            if (is_dot or is_kept) and reason is not None:
                return reason
        return None

    def _fact_of(self, term: Term) -> Source:
        """Returns what is known of the argument that a value is, in another shape."""
        while term.eqn is not None and term.name in SHAPE_ONLY:
            term = term.operands[0]
        return DATA if term.eqn is not None else self.known.get(term.atom, DATA)


def _reason_by_precision(eqn: Equation) -> str | None:
    if any(is_eligible(var.aval) for var in eqn.invars):
        return reason_against(eqn)
    asked = eqn.params.get("precision")
    for item in asked if isinstance(asked, tuple) else (asked,):
        if item not in _NATURAL:
            return f"precision={item} was asked for"
    return None


# --- While the function runs ----------------------------------------------------------


def _replacement(
    match: Match, masks: Masks, spec: kernel.Attention, dtype: np.dtype
) -> Replacement:
    """Returns what replaces the last equation of attention."""
    terms = [*match.operands, *masks.terms]
    read = {id(x): x for x in terms if not isinstance(x.atom, Literal)}

    def run(amp: Any, op: Op) -> Outcome:
        """Runs attention in 16 bits, and tells the report."""
        pairs = zip(op.values, op.facts, strict=True)
        known = dict(zip(read, pairs, strict=True))

        def value_of(term: Term) -> Value:
            number = isinstance(term.atom, Literal)
            return (
                (term.value, amp.literal_fact(term.atom)) if number else known[id(term)]
            )

        def wide(term: Term) -> Array:
            found = value_of(term)[0]
            return amp.widen(found) if is_eligible(term.aval) else jnp.asarray(found)

        operands = [value_of(x) for x in match.operands]
        arrays = match.laid_out([cast(x, dtype) for x, _ in operands])
        extras = masks.arrays(match, wide)
        out = kernel.attention(arrays, extras, spec)
        if masks.empty is not None:
            out = fill_empty_rows(match, masks, extras["mask"], arrays, out)
        out = match.as_result(out)
        asked = op.eqn.outvars[0].aval
        if not is_eligible(asked) or not is_eligible(match.operands[2].aval):
            out = cast(out, asked.dtype)  # as it was asked for
        (batch, rows, heads, size), (_, keys, _, _), _ = match.shapes
        amp.tell(
            op.eqn,
            op.scopes,
            primitive="cudnn_attention",
            rule=str(Rule.LOW),
            reason="recognised",
            params=tuple(fact.name for _, fact in operands if fact.name),
            after=(str(out.dtype),),
            shapes=tuple(match.shapes),
            flops=4 * batch * heads * rows * keys * size,
        )
        return [out], [DATA]

    return Replacement([x.atom for x in read.values()], run)
