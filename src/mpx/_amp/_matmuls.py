"""Matmuls in 16 bits or by an algorithm, and why some run as written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from mpx._amp._facts import (
    F32,
    LOW_DTYPES,
    Origin,
    Run,
    Settings,
    cast,
    changed,
    is_eligible,
)
from mpx._amp._grouped import RAGGED, multiply
from mpx._amp._grouped import reason_against as no_kernel
from mpx._amp._rules import MATMULS, Rule
from mpx._jax._compat import bind, default_matmul_precision
from mpx._program._interpreter import Op, Values
from mpx._program._queries import Equation, matmul_sizes
from mpx._wire._product import multiply_for, plain_multiply

PRESETS = {
    Rule.TF32: lax.DotAlgorithmPreset.TF32_TF32_F32,
    Rule.BF16_F32: lax.DotAlgorithmPreset.BF16_BF16_F32,
    Rule.TRUE_F32: lax.DotAlgorithmPreset.F32_F32_F32,
}

# --- reasons to run a matmul as it is written -----------------------------------------


def reason_against(
    eqn: Equation, rule: Rule, facts: Sequence[Origin] = ()
) -> str | None:
    """Returns why an equation runs as written though its rule is another, if it does.

    Args:
        eqn: The equation.
        rule: Its rule.
        facts: What is known of its operands.
    """
    name = eqn.primitive.name
    if name not in MATMULS:
        return "not a matmul" if rule in PRESETS else None
    if rule != Rule.LOW and rule not in PRESETS:
        return None
    kept = _reason_as_asked(eqn)
    if kept is None and rule != Rule.TRUE_F32:
        kept = _reason_for_f32(eqn, _count_weights(facts[:2]))
    if kept is None and rule in PRESETS and name != "dot_general":
        # Convolutions know precisions but no algorithms.
        kept = "algorithms exist for dot_general only"
    return kept


def _count_weights(facts: Sequence[Origin]) -> int:
    """Returns how many operands are made of parameters.

    If none is, the function may close over its weights.
    """
    sources = [fact.source for fact in facts]
    closed_over = [x.leaf is not None and not x.names for x in sources]
    return sum(x.is_param for x in sources) or sum(closed_over)


def _reason_as_asked(eqn: Equation) -> str | None:
    """Returns what was asked for that forbids to change a matmul, if anything was."""
    avals = [var.aval for var in eqn.invars[:2]]
    # f32 activations times 16-bit numbers or a mask are an f32 matmul, to be run low, too.
    if not any(map(is_eligible, avals)) or not all(map(_is_operand, avals)):
        return "an operand is not f32"
    wanted = eqn.params.get("preferred_element_type")
    if wanted is not None and np.dtype(wanted) != F32:
        return f"its result was asked for in {np.dtype(wanted).name}"
    if asks_for_highest(eqn) and not highest_is_the_default():
        return HIGHEST
    precision = eqn.params.get("precision")
    for item in precision if isinstance(precision, tuple) else (precision,):
        if isinstance(item, lax.DotAlgorithm | lax.DotAlgorithmPreset):
            return f"the algorithm {item} was asked for"
    return None


HIGHEST = "precision=HIGHEST was asked for"


def asks_for_highest(eqn: Equation) -> bool:
    """Returns whether a matmul has the highest precision, by itself or by default."""
    precision = eqn.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision,)
    return any(item == lax.Precision.HIGHEST for item in pair)


def highest_is_the_default() -> bool:
    """Returns whether every matmul has the highest precision, also one that asks for none."""
    return default_matmul_precision() in ("highest", "float32")


def _is_operand(aval: Any) -> bool:
    dtype = np.dtype(getattr(aval, "dtype", np.void))
    return dtype in (F32, *LOW_DTYPES) or dtype.kind in "biu"


def _reason_for_f32(eqn: Equation, weights: int) -> str | None:
    """Returns why 16 bits cost a matmul accuracy and gain it no time, if they do.

    Without a sum, as in the angles of rotary embeddings, the operands are rounded and no
    matrix unit has anything to add up. A product with a vector is an inner product, as in a
    norm or a penalty, or several of them: matrix units have nothing to gain there, and the
    result may leave the range of f16, as may that of `reduce_sum`. With one weight it is a
    layer that gets one example, or has one output.
    """
    summed, free = matmul_sizes(eqn)
    if is_at_most_one(summed):
        return "a product without a sum gains nothing in 16 bits"
    has_vector = any(map(is_at_most_one, free))
    if eqn.primitive.name != "dot_general" or not has_vector or weights == 1:
        return None
    return "a product with a vector is a sum, which 16 bits make neither fast nor exact"


def is_at_most_one(size: Any) -> bool:
    """Returns whether a size is 0 or 1; one that is a symbol counts as larger."""
    return isinstance(size, int) and size <= 1


# --- running them ---------------------------------------------------------------------


def low_matmul(amp: Settings, op: Op) -> Values:
    """Runs a matmul in the compute dtype."""
    weights = {}
    for side, value in enumerate(op.values[:2]):
        dtype = amp.grad_dtype(value, op.facts[side])
        if dtype != amp.dtype:
            # Its gradient leaves the backward matmul in f32.
            weights[side] = value, dtype
    pairs = zip(op.values[:2], op.facts[:2], strict=True)
    args = [*(amp.narrow(*pair) for pair in pairs), *op.values[2:]]
    if not weights:
        return multiply(op.eqn, args, amp.dtype)
    for side in weights:
        args[side] = amp.copies.get(op.eqn.invars[side], args[side])
    return [multiply_for(op.eqn, args, weights, _multiply)]


def _multiply(eqn: Equation, args: Values, dtype: np.dtype) -> Values:
    """Runs a matmul of low operands, whose result may be f32."""
    if eqn.primitive.name in RAGGED and no_kernel(eqn) is None:
        return multiply(eqn, args, dtype)
    return plain_multiply(eqn, args, dtype)


def by_algorithm(rule: Rule) -> Run:
    """Returns how a matmul of f32 operands runs by an algorithm of the hardware."""

    def run(amp: Settings, op: Op) -> Values:
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

    return run
