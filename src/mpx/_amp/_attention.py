"""Attention under autocast: one operation while tracing, then cuDNN or op by op."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mpx._amp._casts import original
from mpx._amp._facts import (
    NEUTRAL,
    Chosen,
    Settings,
    cast,
    changed,
    is_eligible,
)
from mpx._amp._rules import Rule
from mpx._jax._compat import (
    bind,
    eval_equation,
    eval_jaxpr,
    make_jit_context,
    open_jaxpr,
)
from mpx._jax._devices import cuda_capability
from mpx._jax._private import private
from mpx._program._interpreter import Op, Outcome, Values
from mpx._program._queries import ATTENTION, Equation

# Part of the cache key of `jax.jit`: functions traced before are traced anew, and those
# traced here are not found elsewhere. JAX allows no new context while it traces, so it is
# made here and not in `mpx._ops._attention`, which is loaded on first use.
_is_captured = make_jit_context(False)


@contextlib.contextmanager
def captured_attention() -> Iterator[None]:
    """Makes calls of `jax.nn.dot_product_attention` one operation, where that can help.

    If JAX lacks a private name that this needs, attention stays as it is written.
    """
    if private("attention") is None:
        yield
        return
    from mpx._ops._attention import attend, captured

    with captured(attend), _is_captured(True):
        yield


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
        if eqn.primitive.name == next(iter(ATTENTION)):
            # Its operations are recognised again, and perhaps padded.
            return Chosen(_op_by_op)
        return Chosen(_op_by_op, Rule.ORIGINAL, against)
    # JAX itself refuses cuDNN in f32.
    return Chosen(original if eqn.params["spec"].required else _op_by_op)


def _already_low(amp: Settings, op: Op) -> Values:
    return eval_equation(op.eqn, op.values)


def _run_low(amp: Settings, op: Op) -> Values:
    return bind(op.eqn, _low(amp, op))


def _op_by_op(amp: Settings, op: Op) -> Outcome:
    """Runs the operations that JAX runs by default, each by its own rule."""
    outvars = op.eqn.outvars
    is_forward = op.eqn.primitive.name == next(iter(ATTENTION))
    if not is_forward or _is_read(amp.frame.jaxpr, outvars[1]):
        return amp.run(*_plain_jaxpr(op.eqn), op.values, op.facts, op.scopes)
    # Without the logsumexp, which would keep the scores from being recognised.
    plain = _plain_jaxpr(op.eqn, outputs=1)
    outs, known = amp.run(*plain, op.values, op.facts, op.scopes)
    unread = jnp.zeros(outvars[1].aval.shape, outvars[1].aval.dtype)
    return [*outs, unread], [*known, NEUTRAL]


def _is_read(jaxpr: Any, var: Any) -> bool:
    atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
    return any(atom is var for atom in atoms)


def original_attention(amp: Settings, op: Op) -> Values:
    """Runs attention as it is written, by the operations that JAX runs by default."""
    if op.eqn.params["spec"].required:
        return original(amp, op)
    body, consts = _plain_jaxpr(op.eqn)
    return eval_jaxpr(body, consts, *changed(op, amp.widen))


def _plain_jaxpr(eqn: Equation, outputs: int | None = None) -> tuple[Any, Any]:
    from mpx._ops._attention import PLAIN

    plain = functools.partial(PLAIN[eqn.primitive.name], **eqn.params)
    return open_jaxpr(
        jax.make_jaxpr(lambda *operands: list(plain(*operands))[:outputs])(
            *(var.aval for var in eqn.invars)
        )
    )


def _reason_against(amp: Settings, eqn: Equation) -> str | None:
    from mpx._ops._attention import (
        attention_tangent_p,
        reason_against,
        reason_not_paying,
    )

    if eqn.primitive is attention_tangent_p:
        return "cuDNN has no forward-mode derivative"
    spec = eqn.params["spec"]
    if spec.required:
        return None
    if amp.attention == "keep":
        return "attention is kept"
    rows, keys = (var.aval.shape[1] for var in eqn.invars[:2])
    against = reason_not_paying(cuda_capability(), rows, keys)
    if against is not None:
        return against
    avals = [
        jax.ShapeDtypeStruct(var.aval.shape, amp.dtype if i < 3 else var.aval.dtype)
        for i, var in enumerate(eqn.invars[: spec.operands])
    ]
    return reason_against(spec, tuple(avals))


def _low(amp: Settings, op: Op) -> Values:
    """Casts the operands that cuDNN multiplies to 16 bits, and the others to f32."""
    low = {0, 1, 2}
    if op.eqn.primitive.name == "cudnn_attention_backward":
        *_, out, _, cotangent = range(len(op.values))
        low |= {out, cotangent}
    pairs = zip(op.values, changed(op, amp.widen), strict=True)
    return [
        cast(value, amp.dtype) if i in low else wide
        for i, (value, wide) in enumerate(pairs)
    ]
