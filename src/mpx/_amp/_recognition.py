"""Which attention `amp` runs in one kernel, by its rules; what it casts and reports."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._decide import reason_against
from mpx._amp._facts import NEUTRAL, Decision, Origin, Settings, cast, is_eligible
from mpx._amp._rules import Rule
from mpx._jax._compat import scopes_of
from mpx._jax._warn import warn
from mpx._program._interpreter import Jaxpr, Op, Outcome, Plan, Scopes
from mpx._program._queries import ATTENTION, SHAPE_ONLY, Equation, leaves
from mpx._recognise._replace import Value, plan_with, scopes_inside
from mpx._recognise._terms import Term

if TYPE_CHECKING:
    from mpx._recognise import Call

_CALL = next(iter(ATTENTION))
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
    if not _may_hold_attention(jaxpr):
        return None
    from mpx._recognise import recognise

    known = dict(zip(jaxpr.invars, facts, strict=True))
    try:
        found = recognise(jaxpr, consts, _Rules(amp, known, scopes))
    except Exception as error:
        warn(_FAILED.format(error=repr(error)))
        return None
    return plan_with(jaxpr, found)


_FAILED = (
    "mpx failed to look for attention in a function under `amp`, which runs as it is "
    'written: {error}. Pass `attention="keep"` to `amp` to silence this, and report it.'
)


def _may_hold_attention(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr has a matmul and an exponential; cheaply."""
    names = {eqn.primitive.name for eqn in jaxpr.eqns}
    has_exp = any(eqn.primitive.name == "exp" for eqn in leaves(jaxpr.eqns))
    return "dot_general" in names and has_exp


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The settings of the search in one jaxpr.

    Attributes:
        amp: The settings of `amp`.
        known: What is known of the arguments of the jaxpr.
        scopes: The named scopes around it.
    """

    amp: Settings
    known: Mapping[Any, Origin]
    scopes: Scopes

    @property
    def is_told(self) -> bool:
        """Whether a report is made."""
        return self.amp.decisions is not None

    def dtype_of(self, term: Term) -> np.dtype:
        """Returns the dtype in which a matmul multiplies a value: f32 becomes low."""
        return self.amp.dtype if is_eligible(term.aval) else term.aval.dtype

    def reason_to_keep(
        self, inside: Iterable[Term], products: Mapping[Term, Sequence[Term]]
    ) -> str | None:
        """Returns which rule or precision asks for the operations as they are written."""
        amp = self.amp
        for term in inside:
            region = amp.region_rule(term.eqn, scopes_inside(term, self.scopes))
            rule, reason = region or amp.rule(term.name, term.eqn.params, ())
            if callable(rule) and not isinstance(rule, Rule):
                return f"the rule of {term.name} is a function"
            if region is not None and rule == Rule.ORIGINAL:
                return reason
        for term, operands in products.items():
            facts = [self._fact_of(x) for x in operands]
            region = amp.region_rule(term.eqn, scopes_inside(term, self.scopes))
            rule, reason = region or amp.rule("dot_general", term.eqn.params, facts)
            if rule == Rule.LOW:
                reason = _reason_by_precision(term.eqn)
            if reason is not None:
                return reason
        return None

    def _fact_of(self, term: Term) -> Origin:
        """Returns what is known of the argument that a value is, in another shape."""
        while term.eqn is not None and term.name in SHAPE_ONLY:
            term = term.operands[0]
        return NEUTRAL if term.eqn is not None else self.known.get(term.atom, NEUTRAL)

    def keep(self, eqn: Equation, reason: str) -> None:
        """Tells the report that attention was recognised but is run as written."""
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

    def run(
        self, visitor: Any, op: Op, value_of: Callable[[Term], Value], call: "Call"
    ) -> Outcome:
        """Runs attention in 16 bits, and tells the report."""
        operands = [value_of(x) for x in call.operands]

        def wide(term: Term) -> Any:
            found = value_of(term)[0]
            return (
                visitor.widen(found) if is_eligible(term.aval) else jnp.asarray(found)
            )

        out = call.run([cast(x, call.dtype) for x, _ in operands], wide)
        asked = op.eqn.outvars[0].aval
        if not is_eligible(asked) or not is_eligible(call.match.value.aval):
            out = cast(out, asked.dtype)  # as it was asked for
        if visitor.decisions is not None:
            shapes = call.match.shapes
            (batch, rows, heads, size), (_, keys, _, _), _ = shapes
            row = Decision.about(
                op.eqn,
                op.scopes,
                primitive=_CALL,
                rule=str(Rule.LOW),
                reason="recognised",
                params=tuple(fact.name for _, fact in operands if fact.name),
                after=(str(out.dtype),),
                shapes=tuple(shapes),
                flops=4 * batch * heads * rows * keys * size,
            )
            visitor.decisions.append(row)
        return [out], [Origin(touched=True)]


def _reason_by_precision(eqn: Equation) -> str | None:
    if any(is_eligible(var.aval) for var in eqn.invars):
        return reason_against(eqn, Rule.LOW)
    asked = eqn.params.get("precision")
    asked = asked if isinstance(asked, tuple) else (asked,)
    for item in asked:
        if item not in _NATURAL:
            return f"precision={item} was asked for"
    return None
