"""Matmuls in 16 bits or by an algorithm, and why some run as written."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._facts import (
    F32,
    Origin,
    Run,
    Settings,
    cast,
    chain_of,
    changed,
    is_eligible,
)
from mpx._amp._grouped import RAGGED, multiply
from mpx._amp._grouped import reason_against as no_kernel
from mpx._amp._rules import MATMULS, Rule
from mpx._compat import bind, default_matmul_precision
from mpx._jaxpr._interpreter import Op, Outcome, Values
from mpx._jaxpr._queries import Equation, matmul_sizes
from mpx._wire._product import multiply_for, plain_multiply

PRESETS = {
    Rule.TF32: lax.DotAlgorithmPreset.TF32_TF32_F32,
    Rule.BF16_F32: lax.DotAlgorithmPreset.BF16_BF16_F32,
    Rule.TRUE_F32: lax.DotAlgorithmPreset.F32_F32_F32,
}

# --- reasons to run a matmul as it is written -----------------------------------------


def reason_against(eqn: Equation, rule: Rule) -> str | None:
    """Returns why an equation runs as written though its rule is another, if it does."""
    name = eqn.primitive.name
    if name not in MATMULS:
        return "not a matmul" if rule in PRESETS else None
    if rule != Rule.LOW and rule not in PRESETS:
        return None
    kept = _reason_as_asked(eqn)
    if kept is None and rule != Rule.TRUE_F32:
        kept = _reason_for_f32(eqn)
    if kept is None and rule in PRESETS and name != "dot_general":
        # Convolutions know precisions but no algorithms.
        kept = "algorithms exist for dot_general only"
    return kept


def _reason_as_asked(eqn: Equation) -> str | None:
    """Returns what was asked for that forbids to change a matmul, if anything was."""
    avals = [var.aval for var in eqn.invars[:2]]
    # f32 activations times 16-bit parameters are an f32 matmul, to be run low, too.
    if not any(map(is_eligible, avals)) or not all(map(_is_operand, avals)):
        return "an operand is not f32"
    wanted = eqn.params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted) != F32:
        return f"its result was asked for in {np.dtype(wanted).name}"
    precision = eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    ambient = default_matmul_precision()
    for item in pair:
        if item == lax.Precision.HIGHEST and ambient not in ("highest", "float32"):
            return "precision=HIGHEST was asked for"
        if isinstance(item, lax.DotAlgorithm | lax.DotAlgorithmPreset):
            return f"the algorithm {item} was asked for"
    return None


def _is_operand(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (F32, jnp.bfloat16, jnp.float16)


def _reason_for_f32(eqn: Equation) -> str | None:
    """Returns why 16 bits cost a matmul accuracy and gain it no time, if they do.

    Without a sum, as in the angles of rotary embeddings, the operands are rounded and no
    matrix unit has anything to add up. With nothing but a sum, as in a norm or a penalty,
    the result may leave the range of f16, as may that of `reduce_sum`.
    """
    summed, free = matmul_sizes(eqn)
    if summed <= 1:
        return "a product without a sum gains nothing in 16 bits"
    if max(free) <= 1:
        return "an inner product is a sum: sums of many terms stand still in 16 bits"
    return None


# --- running them ---------------------------------------------------------------------


def low_matmul(amp: Settings, op: Op) -> Outcome:
    """Runs a matmul in the compute dtype."""
    weights = {}
    for side, value in enumerate(op.values[:2]):
        dtype = amp.grad_dtype(value, op.facts[side])
        if dtype != amp.dtype:
            # Its gradient leaves the backward matmul in f32.
            weights[side] = value, dtype
    args = [
        amp.narrow(value, fact) if _is_operand(var.aval) else value
        for var, value, fact in zip(op.eqn.invars, op.values, op.facts, strict=True)
    ]
    if not weights:
        return multiply(op.eqn, args, amp.dtype), [Origin(chain="low")]
    for side in weights:
        args[side] = amp.copies.get(op.eqn.invars[side], args[side])
    return [multiply_for(op.eqn, args, weights, _multiply)], [Origin(chain="low")]


def _multiply(eqn: Equation, args: Values, dtype: np.dtype) -> Values:
    """Runs a matmul of low operands, whose result may be f32."""
    if eqn.primitive.name in RAGGED and no_kernel(eqn) is None:
        return multiply(eqn, args, dtype)
    return plain_multiply(eqn, args, dtype)


def by_algorithm(rule: Rule) -> Run:
    """Returns how a matmul of f32 operands runs by an algorithm of the hardware."""

    def run(amp: Settings, op: Op) -> Outcome:
        # One may be a 16-bit parameter.
        args = [cast(x, F32) for x in changed(op, amp.widen)]

        def chosen(*args: Any) -> Values:
            return bind(op.eqn, args, precision=PRESETS[rule])

        if rule == Rule.TF32:
            # Only CUDA has it; elsewhere the plain f32 product is at least as exact.
            outs = lax.platform_dependent(
                *args, cuda=chosen, default=lambda *x: bind(op.eqn, x)
            )
        else:
            outs = chosen(*args)
        return outs, [chain_of(op.facts, high=True)]

    return run
