"""Attention under autocast: one operation while tracing, then cuDNN or op by op."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mpx._amp._apply import in_f32, opaque_metas, run_original
from mpx._amp._calls import Outcome
from mpx._amp._rules import Rule
from mpx._amp._values import Meta, cast, is_eligible
from mpx._compat import (
    bind,
    eval_equation,
    eval_jaxpr,
    make_jit_context,
    open_jaxpr,
)
from mpx._jaxpr._queries import ATTENTION, Equation
from mpx._private import private

# Part of the cache key of `jax.jit`: functions traced before are traced anew, and those
# traced here are not found elsewhere. JAX allows no new context while it traces, so it is
# made here and not in `mpx._attention`, which is loaded on first use.
_is_captured = make_jit_context(False)


@contextlib.contextmanager
def captured_attention() -> Iterator[None]:
    """Makes calls of `jax.nn.dot_product_attention` one operation, where that can help.

    If JAX lacks a private name that this needs, attention stays as it is written.
    """
    if private("attention") is None:
        yield
        return
    from mpx._attention import attend, captured

    with captured(attend), _is_captured(True):
        yield


def trace(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `jax.make_jaxpr` of a user's function, with attention as one operation."""

    @functools.wraps(func)
    def traced(*args: Any) -> Any:
        with captured_attention():
            return jax.make_jaxpr(func)(*args)

    return traced


def _attention(
    amp: Any,
    eqn: Equation,
    values: list[Any],
    metas: list[Meta],
    scopes: tuple[str, ...],
) -> Outcome:
    if not is_eligible(eqn.invars[0].aval):  # an `amp` inside this one was here before
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
    elif eqn.params["spec"].required:  # JAX itself refuses cuDNN in f32
        return run_original(amp, eqn, values), opaque_metas(eqn, metas)
    # The operations that JAX runs by default, each by its own rule.
    return amp.run(*_plain_jaxpr(eqn), values, metas, scopes)


def run_original_attention(amp: Any, eqn: Equation, values: list[Any]) -> list[Any]:
    """Runs attention as it is written, by the operations that JAX runs by default."""
    if eqn.params["spec"].required:
        return run_original(amp, eqn, values)
    body, consts = _plain_jaxpr(eqn)
    return eval_jaxpr(body, consts, *in_f32(amp, eqn, values))


def _plain_jaxpr(eqn: Equation) -> tuple[Any, Any]:
    from mpx._attention import PLAIN

    plain = functools.partial(PLAIN[eqn.primitive.name], **eqn.params)
    return open_jaxpr(
        jax.make_jaxpr(lambda *operands: list(plain(*operands)))(
            *(var.aval for var in eqn.invars)
        )
    )


def _reason_against(amp: Any, eqn: Equation) -> str | None:
    from mpx._attention import attention_tangent_p, reason_against

    if eqn.primitive is attention_tangent_p:
        return "cuDNN has no forward-mode derivative"
    spec = eqn.params["spec"]
    if spec.required:
        return None
    avals = [
        jax.ShapeDtypeStruct(var.aval.shape, amp.dtype if i < 3 else var.aval.dtype)
        for i, var in enumerate(eqn.invars[: spec.operands])
    ]
    return reason_against(spec, tuple(avals))


def _low(amp: Any, eqn: Equation, values: list[Any]) -> list[Any]:
    """Casts the operands that cuDNN multiplies to 16 bits, and the others to f32."""
    low = {0, 1, 2}
    if eqn.primitive.name == "cudnn_attention_backward":
        *_, out, _, cotangent = range(len(values))
        low |= {out, cotangent}
    wide = in_f32(amp, eqn, values)
    return [
        cast(value, amp.dtype) if i in low else wide[i]
        for i, value in enumerate(values)
    ]


HANDLERS: dict[str, Callable[..., Outcome]] = dict.fromkeys(ATTENTION, _attention)
