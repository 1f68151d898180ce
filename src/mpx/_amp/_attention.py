"""What autocast does with attention that is one operation: cuDNN, or op by op."""

from collections.abc import Callable
from typing import Any

import jax

from mpx._amp import _flash
from mpx._amp._apply import in_f32, opaque_metas, run_original
from mpx._amp._calls import Outcome
from mpx._amp._cudnn import Attention, reason_against
from mpx._amp._rules import Rule
from mpx._amp._values import Meta, cast, is_eligible
from mpx._compat import bind, eval_equation, eval_jaxpr, open_jaxpr

_PLAIN: dict[str, Callable[..., Any]] = {
    _flash.attention_p.name: _flash.plain,
    _flash.attention_backward_p.name: _flash.plain_backward,
    _flash.attention_tangent_p.name: _flash.plain_tangent,
}


def _attention(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
) -> Outcome:
    if not is_eligible(eqn.invars[0].aval):  # an amp inside of this one has been here
        return eval_equation(eqn, values), [Meta(chain="low")] * len(eqn.outvars)
    rule, reason = amp.region_rule(eqn, scopes) or amp.rule(
        "dot_general", {}, metas[:3]
    )
    if rule == Rule.LOW:
        against = _reason_against(amp, eqn)
        if against is None:
            outs = bind(eqn, _low(amp, eqn, values))
            amp.record(eqn, Rule.LOW, reason, metas=metas, scopes=scopes, outs=outs[:1])
            low = [Meta(chain="low" if x.dtype == amp.dtype else "high") for x in outs]
            return outs, low
        amp.record(eqn, Rule.ORIGINAL, against, metas=metas, scopes=scopes)
    elif eqn.params["spec"].required:
        return run_original(amp, eqn, values), opaque_metas(
            eqn, metas
        )  # as JAX: it refuses
    # The operations that JAX runs by default, each by its own rule.
    return amp.run(*_plain_jaxpr(eqn), values, metas, scopes)


def run_original_attention(amp: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Runs attention as it is written, by the operations that JAX runs by default."""
    if eqn.params["spec"].required:
        return run_original(amp, eqn, values)
    body, consts = _plain_jaxpr(eqn)
    return eval_jaxpr(body, consts, *in_f32(amp, eqn, values))


def _plain_jaxpr(eqn: Any) -> tuple[Any, Any]:
    def plain(*operands: Any) -> list[Any]:
        return list(_PLAIN[eqn.primitive.name](*operands, **eqn.params))

    return open_jaxpr(jax.make_jaxpr(plain)(*(var.aval for var in eqn.invars)))


def _reason_against(amp: Any, eqn: Any) -> str | None:
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


def _low(amp: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Casts the operands: in 16 bits what cuDNN multiplies, in f32 the rest."""
    low = {0, 1, 2}
    if eqn.primitive is _flash.attention_backward_p:
        *_, out, _, cotangent = range(len(values))
        low |= {out, cotangent}
    return [
        cast(value, amp.dtype) if i in low else wide
        for i, (value, wide) in enumerate(
            zip(values, in_f32(amp, eqn, values), strict=True)
        )
    ]


HANDLERS: dict[str, Callable[..., Outcome]] = dict.fromkeys(_flash.NAMES, _attention)
