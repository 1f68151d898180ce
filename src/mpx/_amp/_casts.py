"""How each rule runs an equation: which casts it makes.

A sum in the backward pass is made in f32. It is the transpose of an operation that uses one
number several times, so such operations run in f32 where their operand is held in 16 bits,
and their result is rounded after: see `SUMMED`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._facts import (
    F32,
    Origin,
    Run,
    Settings,
    cast,
    changed,
    is_eligible,
    is_low,
    saturate,
    widest,
)
from mpx._amp._grouped import multiply
from mpx._amp._matmuls import by_algorithm, low_matmul
from mpx._amp._rules import BROADCASTING, LINEAR, MATMULS, PRIMITIVES, SUMMED, Rule
from mpx._jax._compat import bind, eval_equation
from mpx._jax._formats import short_name
from mpx._program._interpreter import Op, Values, arrays_of, as_array
from mpx._program._queries import Equation


def as_written(amp: Settings, op: Op) -> Values:
    """Runs an equation without f32 operands."""
    if any(map(is_low, op.values)):
        return summed_in_f32(amp, op, op.values)
    return eval_equation(op.eqn, op.values)


def summed_in_f32(amp: Settings, op: Op, values: Values) -> Values:
    """Runs an equation of 16-bit operands such that its transpose sums in f32.

    The results are the same: what is done in f32 only moves or selects numbers.
    """
    eqn, name = op.eqn, op.eqn.primitive.name
    low = next((x.dtype for x in values if is_low(x)), None)
    if low is None:
        return bind(eqn, arrays_of(values))
    if name in BROADCASTING:
        shape = tuple(eqn.outvars[0].aval.shape)

        def whole(x: Any, fact: Origin) -> Any:
            if not is_low(x) or fact.literal is not None or x.shape == shape:
                return x
            return cast(jnp.broadcast_to(amp.widen(x), shape), x.dtype)

        values = [whole(*x) for x in zip(values, op.facts, strict=True)]
    elif name in SUMMED or (name == "pad" and op.facts[1].literal is None):
        wide = [amp.widen(x) if is_low(x) else x for x in values]
        return [cast(x, low) if x.dtype == F32 else x for x in bind(eqn, wide)]
    return bind(eqn, arrays_of(values))


def ragged_as_written(amp: Settings, op: Op) -> Values:
    """Runs a ragged matmul that is written in 16 bits."""
    return multiply(op.eqn, arrays_of(op.values), op.eqn.outvars[0].aval.dtype)


def original(amp: Settings, op: Op) -> Values:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(op.eqn, changed(op, amp.widen))


def mark_low(amp: Settings, op: Op) -> Values:
    """Runs the marker of `amp_low`."""
    return bind(op.eqn, [cast(op.values[0], amp.dtype)])


def convert(amp: Settings, op: Op) -> Values:
    """Runs a cast as it is written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = op.eqn.invars, op.eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return op.values
    return bind(op.eqn, [as_array(op.values[0])])


def user_rule(rule: Callable[..., Any]) -> Run:
    """Returns a runner that lets a user's function choose operands and parameters.

    The function has the signature of jaxamp's `precision_fn`.
    """

    def run(amp: Settings, op: Op) -> Values:
        dtypes = [var.aval.dtype for var in op.eqn.invars]
        args = arrays_of(op.values)
        args, params = rule(amp.dtype, dtypes, *args, **op.eqn.params)
        return bind(op.eqn, list(args), **params)

    return run


def _low(amp: Settings, op: Op) -> Values:
    if op.eqn.primitive.name in MATMULS:
        return low_matmul(amp, op)
    return bind(op.eqn, changed(op, lambda x: cast(x, amp.dtype)))


def _f32(amp: Settings, op: Op) -> Values:
    return bind(op.eqn, changed(op, amp.widen))


def _widest(amp: Settings, op: Op) -> Values:
    eqn, facts = op.eqn, op.facts
    soft = [
        fact.literal is not None
        or _is_bias(fact)
        or (amp.rules.base == "fast" and not fact.touched)
        for fact in facts
    ]
    dtype = widest(
        value.dtype
        for var, value, follows in zip(eqn.invars, op.values, soft, strict=True)
        if is_eligible(var.aval) and not follows
    )
    literals = [fact.literal for fact in facts if fact.literal is not None]
    if dtype == F32 or not all(short_name(dtype) in x for x in literals):
        return bind(eqn, changed(op, amp.widen))
    values = [
        cast(x, dtype) if is_eligible(var.aval) and fact.literal is not None else x
        for var, x, fact in zip(eqn.invars, op.values, facts, strict=True)
    ]
    if any(getattr(x, "dtype", None) == F32 for x in values):
        return _with_params(eqn, arrays_of(values), dtype)
    return summed_in_f32(amp, op, values)


def _with_params(eqn: Equation, values: Values, dtype: np.dtype) -> Values:
    """Runs an operation on activations of 16 bits and f32 parameters.

    It computes in f32 and rounds once. In the backward pass a parameter's gradient is a sum
    over all examples, also over those of a `jax.vmap` around the call, and that sum is f32.
    """

    def compute(*values: Any) -> Values:
        wide = [saturate(x, dtype) if x.dtype == F32 else x for x in values]
        outs = bind(eqn, [cast(x, F32) if is_low(x) else x for x in wide])
        return [cast(x, dtype) if x.dtype == F32 else x for x in outs]

    if eqn.primitive.name in LINEAR:
        return compute(*values)
    # A product keeps its operands for the backward pass: those of 16 bits.
    return jax.checkpoint(compute, prevent_cse=False)(*values)


def _is_bias(fact: Origin) -> bool:
    """Returns whether an operand is a bias or a scale, which takes the others' dtype.

    Without this each `x @ W + b` would fall back to f32. It is for parameters: biases,
    scales, embeddings of positions. Masks, targets and coordinates are arguments of another
    kind and stay f32: 16 bits would round or overflow them and change the result.
    """
    source = fact.source
    if not source.is_param or source.leaf is None:
        return False
    sizes = tuple(size for size in source.leaf if size != 1)
    # Not a mask or bias of attention, which a module may hold.
    return len(sizes) < 2 or sizes[-1] != sizes[-2]


def _follow(amp: Settings, op: Op) -> Values:
    eqn, values = op.eqn, changed(op, as_array)
    if PRIMITIVES.get(eqn.primitive.name) != Rule.FOLLOW and _operands_differ(
        eqn, values
    ):
        # A user's rule. The table has it only where operands need not agree, as in `sort`.
        return _widest(amp, op)
    return summed_in_f32(amp, op, values)


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
