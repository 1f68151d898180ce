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
    changed,
    is_eligible,
    literal_survives,
    saturate,
    widest,
)
from mpx._amp._grouped import multiply
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
from mpx._jaxpr._interpreter import Op, Outcome, Values, arrays_of, as_array
from mpx._jaxpr._queries import Equation


def as_written(amp: Settings, op: Op) -> Outcome:
    """Runs an equation without f32 operands."""
    return eval_equation(op.eqn, op.values), [NEUTRAL] * len(op.eqn.outvars)


def ragged_as_written(amp: Settings, op: Op) -> Outcome:
    """Runs a ragged matmul that is written in 16 bits."""
    dtype = op.eqn.outvars[0].aval.dtype
    return multiply(op.eqn, arrays_of(op.values), dtype), [NEUTRAL]


def original(amp: Settings, op: Op) -> Outcome:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(op.eqn, changed(op, amp.widen)), opaque_facts(op)


def opaque_facts(op: Op) -> list[Origin]:
    """Returns what is known of results that came out of an f32 operation."""
    return [chain_of(op.facts, high=True)] * len(op.eqn.outvars)


def mark_low(amp: Settings, op: Op) -> Outcome:
    """Runs the marker of `amp_low`."""
    return bind(op.eqn, [cast(op.values[0], amp.dtype)]), [Origin(chain="low")]


def convert(amp: Settings, op: Op) -> Outcome:
    """Runs a cast as it is written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = op.eqn.invars, op.eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return op.values, op.facts
    fact = Origin(chain=op.facts[0].chain)
    if var.aval.dtype == np.bool_ and is_eligible(out.aval):
        fact = Origin(literal=1.0)  # zeros and ones are exact in every dtype
    return bind(op.eqn, [as_array(op.values[0])]), [fact]


def user_rule(rule: Callable[..., Any]) -> Run:
    """Returns a runner that lets a user's function choose operands and parameters.

    The function has the signature of jaxamp's `precision_fn`.
    """

    def run(amp: Settings, op: Op) -> Outcome:
        dtypes = [var.aval.dtype for var in op.eqn.invars]
        args = arrays_of(op.values)
        args, params = rule(amp.dtype, dtypes, *args, **op.eqn.params)
        outs = bind(op.eqn, list(args), **params)
        return outs, [chain_of(op.facts)] * len(outs)

    return run


def _low(amp: Settings, op: Op) -> Outcome:
    if op.eqn.primitive.name in MATMULS:
        return low_matmul(amp, op)
    outs = bind(op.eqn, changed(op, lambda x: cast(x, amp.dtype)))
    return outs, [Origin(chain="low")] * len(outs)


def _f32(amp: Settings, op: Op) -> Outcome:
    return bind(op.eqn, changed(op, amp.widen)), opaque_facts(op)


def _widest(amp: Settings, op: Op) -> Outcome:
    eqn, values, facts, _ = op
    shape = tuple(eqn.outvars[0].aval.shape)
    fast = amp.rules.base == "fast"
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

    args = [prepare(*x) for x in zip(eqn.invars, values, facts, follows, strict=True)]
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


def _follow(amp: Settings, op: Op) -> Outcome:
    eqn, name = op.eqn, op.eqn.primitive.name
    values = changed(op, as_array)
    if PRIMITIVES.get(name) != Rule.FOLLOW and _operands_differ(eqn, values):
        # A user's rule. The table has it only where operands need not agree, as in `sort`.
        return _widest(amp, op)
    if name in SPREADING and values[0].dtype != F32:
        given = values[0].dtype
        # As above: what goes to several places is summed in the backward pass, in f32.
        outs = bind(eqn, [amp.widen(values[0]), *values[1:]])
        outs = [cast(x, given) for x in outs]
    else:
        outs = bind(eqn, values)
    if name in SHAPE_ONLY:
        is_same = len(op.facts) == len(outs)
        return outs, op.facts if is_same else [op.facts[0]] * len(outs)
    return outs, [chain_of(op.facts)] * len(outs)


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
