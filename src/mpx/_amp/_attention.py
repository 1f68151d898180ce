"""Attention as one operation under autocast: in cuDNN, or op by op."""

from collections.abc import Callable
from typing import Any

import jax

from mpx._amp import _flash
from mpx._amp._casts import opaque_facts, original
from mpx._amp._cudnn import Attention, reason_against
from mpx._amp._facts import Chosen, Origin, Settings, cast, changed, is_eligible
from mpx._amp._rules import Rule
from mpx._compat import bind, eval_equation, eval_jaxpr, open_jaxpr
from mpx._jaxpr._interpreter import Op, Outcome, Values
from mpx._jaxpr._queries import Equation

_PLAIN: dict[str, Callable[..., Any]] = {
    _flash.attention_p.name: _flash.plain,
    _flash.attention_backward_p.name: _flash.plain_backward,
    _flash.attention_tangent_p.name: _flash.plain_tangent,
}


def choose(amp: Settings, op: Op) -> Chosen:
    """Returns how attention runs: in cuDNN, or by the operations that JAX runs by default."""
    eqn = op.eqn
    if not is_eligible(eqn.invars[0].aval):  # an `amp` inside this one has been here
        return Chosen(_already_low)
    region = amp.region_rule(eqn, op.scopes)
    rule, reason = region or amp.rule("dot_general", {}, op.facts[:3])
    if rule == Rule.LOW:
        against = _reason_against(amp, eqn)
        if against is None:
            return Chosen(_run_low, Rule.LOW, reason)
        return Chosen(_op_by_op, Rule.ORIGINAL, against)
    # As JAX: it refuses.
    return Chosen(original if eqn.params["spec"].required else _op_by_op)


def _already_low(amp: Settings, op: Op) -> Outcome:
    outs = eval_equation(op.eqn, op.values)
    return outs, [Origin(chain="low")] * len(outs)


def _run_low(amp: Settings, op: Op) -> Outcome:
    outs = bind(op.eqn, _low(amp, op))
    known = [Origin(chain="low" if x.dtype == amp.dtype else "high") for x in outs]
    return outs, known


def _op_by_op(amp: Settings, op: Op) -> Outcome:
    """Runs the operations that JAX runs by default, each by its own rule."""
    return amp.run(*_plain_jaxpr(op.eqn), op.values, op.facts, op.scopes)


def original_attention(amp: Settings, op: Op) -> Outcome:
    """Runs attention as it is written, by the operations that JAX runs by default."""
    if op.eqn.params["spec"].required:
        return original(amp, op)
    body, consts = _plain_jaxpr(op.eqn)
    return eval_jaxpr(body, consts, *changed(op, amp.widen)), opaque_facts(op)


def _plain_jaxpr(eqn: Equation) -> tuple[Any, Any]:
    def plain(*operands: Any) -> list[Any]:
        return list(_PLAIN[eqn.primitive.name](*operands, **eqn.params))

    return open_jaxpr(jax.make_jaxpr(plain)(*(var.aval for var in eqn.invars)))


def _reason_against(amp: Settings, eqn: Equation) -> str | None:
    if eqn.primitive is _flash.attention_tangent_p:
        return "cuDNN has no forward-mode derivative"
    spec: Attention = eqn.params["spec"]
    if spec.required:
        return None
    avals = [
        jax.ShapeDtypeStruct(var.aval.shape, amp.dtype if i < 3 else var.aval.dtype)
        for i, var in enumerate(eqn.invars[: spec.operands])
    ]
    return reason_against(spec, tuple(avals))


def _low(amp: Settings, op: Op) -> Values:
    """Casts the operands: in 16 bits what cuDNN multiplies, in f32 the rest."""
    low = {0, 1, 2}
    if op.eqn.primitive is _flash.attention_backward_p:
        *_, out, _, cotangent = range(len(op.values))
        low |= {out, cotangent}
    pairs = zip(op.values, changed(op, amp.widen), strict=True)
    return [
        cast(value, amp.dtype) if i in low else wide
        for i, (value, wide) in enumerate(pairs)
    ]
