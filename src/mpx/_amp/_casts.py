"""How each rule runs an equation: which casts it makes, and what is known after."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._amp._facts import (
    F32,
    NEUTRAL,
    Origin,
    Run,
    Settings,
    cast,
    chain_of,
    is_eligible,
    literal_survives,
    saturate,
    widest,
)
from mpx._amp._matmuls import by_algorithm, low_matmul
from mpx._amp._rules import (
    BROADCASTING,
    MATMULS,
    PRIMITIVES,
    SHAPE_ONLY,
    SPREADING,
    Rule,
)
from mpx._compat import bind, eval_equation
from mpx._jaxpr._interpreter import Outcome, Scopes, Values, arrays_of, as_array
from mpx._jaxpr._queries import Equation


def as_written(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    """Runs an equation without f32 operands."""
    return eval_equation(eqn, values), [NEUTRAL] * len(eqn.outvars)


def original(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(eqn, amp.in_f32(eqn, values)), opaque_facts(eqn, facts)


def opaque_facts(eqn: Equation, facts: list[Origin]) -> list[Origin]:
    """Returns what is known of results that came out of an f32 operation."""
    return [chain_of(facts, high=True)] * len(eqn.outvars)


def mark_low(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    """Runs the marker of `amp_low`."""
    return bind(eqn, [cast(values[0], amp.dtype)]), [Origin(chain="low")]


def convert(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    """Runs a cast as it is written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = eqn.invars, eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return values, facts
    fact = Origin(chain=facts[0].chain)
    if var.aval.dtype == np.bool_ and is_eligible(out.aval):
        fact = Origin(literal=1.0)  # zeros and ones are exact in every dtype
    return bind(eqn, [as_array(values[0])]), [fact]


def user_rule(rule: Callable[..., Any]) -> Run:
    """Returns how an equation runs whose operands and parameters a user's function chooses.

    The function has the signature of jaxamp's `precision_fn`.
    """

    def run(
        amp: Settings,
        eqn: Equation,
        values: Values,
        facts: list[Origin],
        scopes: Scopes,
    ) -> Outcome:
        dtypes = [var.aval.dtype for var in eqn.invars]
        args, params = rule(amp.dtype, dtypes, *arrays_of(values), **eqn.params)
        outs = bind(eqn, list(args), **params)
        return outs, [chain_of(facts)] * len(outs)

    return run


def _low(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    if eqn.primitive.name in MATMULS:
        return low_matmul(amp, eqn, values, facts)
    args = [
        cast(value, amp.dtype) if is_eligible(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]
    outs = bind(eqn, args)
    return outs, [Origin(chain="low")] * len(outs)


def _f32(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    return bind(eqn, amp.in_f32(eqn, values)), opaque_facts(eqn, facts)


def _widest(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    shape = tuple(eqn.outvars[0].aval.shape)
    fast = amp.policy.base == "fast"
    follows = [
        fact.literal is not None
        or (fact.chain == "neutral" and (fast or _is_bias(fact, var.aval.shape, shape)))
        for var, fact in zip(eqn.invars, facts, strict=True)
    ]
    dtype = widest(
        value.dtype
        for var, value, soft in zip(eqn.invars, values, follows, strict=True)
        if is_eligible(var.aval) and not soft
    )
    literals = [fact.literal for fact in facts if fact.literal is not None]
    if not all(literal_survives(value, dtype) for value in literals):
        dtype = F32

    def prepare(var: Any, value: Any, fact: Origin, soft: bool) -> Any:
        if not is_eligible(var.aval):
            return value
        value = as_array(value)
        if dtype == F32:
            return amp.widen(value)
        if soft and fact.literal is None and value.dtype == F32:
            value = saturate(value, dtype)
        if _is_broadcast(eqn, value, shape):
            # A broadcast becomes a sum in the backward pass: it must be one in f32.
            value = jnp.broadcast_to(amp.widen(value), shape)
        return cast(value, dtype)

    args = [
        prepare(*known)
        for known in zip(eqn.invars, values, facts, follows, strict=True)
    ]
    outs = bind(eqn, args)
    return outs, [chain_of(facts)] * len(outs)


def _is_bias(fact: Origin, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether an operand is a bias or a scale, which takes the others' dtype.

    Without this each `x @ W + b` would fall back to f32. It is for parameters that are
    broadcast: biases, scales, embeddings of positions. Masks, targets and coordinates
    stay f32: 16 bits would round or overflow them and change the result.

    Args:
        fact: What is known of the operand.
        given: Its shape.
        shape: The shape of the result.
    """
    if fact.role is None or fact.leaf is None:
        return False
    sizes = tuple(size for size in fact.leaf if size != 1)
    if len(sizes) > 1 and sizes[-1] == sizes[-2]:
        return False  # a mask or bias of attention, which a module may hold
    if fact.role == "own":
        return True
    if fact.leaf == shape:
        return False
    if fact.role == "known":
        return True
    # Less is known of these: they must have the last axes, as a bias for channels has.
    is_last = given[len(given) - len(sizes) :] == sizes
    return is_last and (fact.role == "likely" or len(sizes) <= 1)


def _is_broadcast(eqn: Equation, value: Any, shape: tuple[int, ...]) -> bool:
    return (
        eqn.primitive.name in BROADCASTING
        and value.ndim == len(shape)
        and value.shape != shape
    )


def _follow(
    amp: Settings, eqn: Equation, values: Values, facts: list[Origin], scopes: Scopes
) -> Outcome:
    name = eqn.primitive.name
    values = [
        as_array(value) if is_eligible(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]
    if PRIMITIVES.get(name) != Rule.FOLLOW and _operands_differ(eqn, values):
        # A user's rule. The table has it only where operands need not agree, as in `sort`.
        return _widest(amp, eqn, values, facts, scopes)
    if name in SPREADING and values[0].dtype != F32:
        given = values[0].dtype
        # As above: what goes to several places is summed in the backward pass, in f32.
        outs = bind(eqn, [amp.widen(values[0]), *values[1:]])
        outs = [cast(x, given) for x in outs]
    else:
        outs = bind(eqn, values)
    if name in SHAPE_ONLY:
        kept = facts if len(facts) == len(outs) else [facts[0]] * len(outs)
        return outs, kept
    return outs, [chain_of(facts)] * len(outs)


def _operands_differ(eqn: Equation, values: Values) -> bool:
    pairs = zip(eqn.invars, values, strict=True)
    return len({x.dtype for var, x in pairs if is_eligible(var.aval)}) > 1


APPLY: dict[Rule, Run] = {
    Rule.LOW: _low,
    Rule.F32: _f32,
    Rule.WIDEST: _widest,
    Rule.FOLLOW: _follow,
    Rule.ORIGINAL: original,
    Rule.TF32: by_algorithm(Rule.TF32),
    Rule.BF16_F32: by_algorithm(Rule.BF16_F32),
    Rule.TRUE_F32: by_algorithm(Rule.TRUE_F32),
}
