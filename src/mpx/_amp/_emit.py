"""How a decision is carried out: casts, matmuls and kernels: the step "emit".

A sum in the backward pass is made in f32. It is the transpose of an operation that uses one
number several times, so such operations run in f32 where their operand is held in 16 bits,
and their result is rounded after: see `SUMMED`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._activations import run_activation
from mpx._amp._decide import PRESETS, RAGGED, Choice, kind_of, no_grouped_kernel
from mpx._amp._facts import (
    F32,
    Origin,
    Settings,
    cast,
    changed,
    is_eligible,
    is_low,
    may_be_param,
    saturate,
    widest,
)
from mpx._amp._rules import BROADCASTING, LINEAR, PRIMITIVES, SUMMED, Rule, RuleLike
from mpx._jax._compat import (
    bind,
    eval_equation,
)
from mpx._jax._formats import short_name
from mpx._program._interpreter import Op, Outcome, Values, arrays_of, as_array
from mpx._program._queries import Equation
from mpx._wire._product import multiply_for, plain_multiply


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


def _ragged_as_written(amp: Settings, op: Op) -> Values:
    """Runs a ragged matmul that is written in 16 bits."""
    return multiply(op.eqn, arrays_of(op.values), op.eqn.outvars[0].aval.dtype)


def original(amp: Settings, op: Op) -> Values:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(op.eqn, changed(op, amp.widen))


def _mark_low(amp: Settings, op: Op) -> Values:
    """Runs the marker of `amp_low`."""
    return bind(op.eqn, [cast(op.values[0], amp.dtype)])


def _convert(amp: Settings, op: Op) -> Values:
    """Runs a cast as it is written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = op.eqn.invars, op.eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return op.values
    return bind(op.eqn, [as_array(op.values[0])])


def _by_user(amp: Settings, op: Op, rule: Callable[..., Any]) -> Values:
    """Lets a user's function, as jaxamp's `precision_fn`, choose operands and parameters."""
    dtypes = [var.aval.dtype for var in op.eqn.invars]
    args = arrays_of(op.values)
    args, params = rule(amp.dtype, dtypes, *args, **op.eqn.params)
    return bind(op.eqn, list(args), **params)


def _low(amp: Settings, op: Op) -> Values:
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


def low_matmul(amp: Settings, op: Op) -> Values:
    """Runs a matmul in the compute dtype."""
    weights, args = {}, list(op.values)
    for side, value in enumerate(op.values[:2]):
        # Parameters are cast for each matmul: their cotangents add up in f32. An activation
        # is cast once: its cotangents add up in the matmuls that make them, as in a model
        # written in 16 bits. Each in an array of its own costs memory traffic and, where
        # they are sums over devices, an all-reduce each.
        if not may_be_param(op.facts[side]):
            is_f32 = getattr(value, "dtype", None) == F32
            args[side] = (amp.once if is_f32 else cast)(value, amp.dtype)
            continue
        args[side] = cast(value, amp.dtype)
        dtype = amp.grad_dtype(value)
        if dtype != amp.dtype:
            weights[side] = value, dtype  # its gradient leaves the matmul in f32
    if not weights and op.eqn.primitive.name not in RAGGED:
        return bind(op.eqn, args, preferred_element_type=amp.dtype)
    if not weights:
        return multiply(op.eqn, args, amp.dtype)
    return [multiply_for(op.eqn, args, weights, _multiply)]


def _multiply(eqn: Equation, args: Values, dtype: np.dtype) -> Values:
    """Runs a matmul of low operands, whose result may be f32."""
    if eqn.primitive.name in RAGGED and no_grouped_kernel(eqn) is None:
        return multiply(eqn, args, dtype)
    return plain_multiply(eqn, args, dtype)


def _by_algorithm(rule: Rule, amp: Settings, op: Op) -> Values:
    """Runs a matmul of f32 operands by an algorithm of the hardware."""
    # One may be a 16-bit parameter.
    args = [cast(x, F32) for x in changed(op, amp.widen)]

    def chosen(*args: Any) -> Values:
        return bind(op.eqn, args, precision=PRESETS[rule])

    if rule == Rule.TF32:
        # Only CUDA has it; elsewhere the plain f32 product is at least as exact.
        return lax.platform_dependent(
            *args, cuda=chosen, default=lambda *x: bind(op.eqn, x)
        )
    return chosen(*args)


def multiply(eqn: Equation, args: Any, dtype: np.dtype) -> list[Any]:
    """Runs a matmul of 16-bit operands; a ragged one in a grouped kernel if there is one."""
    if eqn.primitive.name not in RAGGED or no_grouped_kernel(eqn) is not None:
        return bind(eqn, args, preferred_element_type=dtype)
    from mpx._ops._experts._primitive import grouped_matmul

    kind = kind_of(eqn)
    assert kind is not None
    return [grouped_matmul(*args, kind=kind, dtype=dtype)]


def _cross_entropy(amp: Settings, op: Op, rule: RuleLike) -> Values:
    dtype, precision = amp.dtype, None
    if rule in PRESETS:
        dtype, precision = F32, PRESETS[Rule(rule)]
    head = dataclasses.replace(op.eqn.params["head"], dtype=dtype, precision=precision)
    # The hidden states and the weight, which come first, may be held in 16 bits.
    values = [*op.values[:2], *changed(op, amp.widen)[2:]]
    return bind(op.eqn, arrays_of(values), head=head)


Emitter = Callable[[Any, Op], Values | Outcome]
"""Runs one equation; the first argument is an `Autocast`. It may tell more of the results
than `Settings.facts_after`."""

EMITTERS: dict[str, Emitter] = {
    "as written": as_written,
    "original": original,
    "convert": _convert,
    "mark": _mark_low,
    "matmul": low_matmul,
    "ragged as written": _ragged_as_written,
    Rule.LOW: _low,
    Rule.F32: _f32,
    Rule.WIDEST: _widest,
    Rule.FOLLOW: _follow,
    Rule.ORIGINAL: original,
    **{rule: functools.partial(_by_algorithm, rule) for rule in PRESETS},
}


def emit(amp: Settings, op: Op, choice: Choice) -> Values | Outcome:
    """Runs an equation as it was decided."""
    if choice.how == "user":
        return _by_user(amp, op, choice.rule)  # pyright: ignore[reportArgumentType]
    if choice.how == "cross entropy":
        assert choice.rule is not None
        return _cross_entropy(amp, op, choice.rule)
    if choice.how == "activation":
        return run_activation(amp, op, Rule(choice.rule))
    return EMITTERS[choice.how](amp, op)
