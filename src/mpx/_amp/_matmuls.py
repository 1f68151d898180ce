"""Matmuls in 16 bits or by an algorithm, why some run as written, and f32 weight gradients."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
)
from mpx._amp._grouped import RAGGED, multiply
from mpx._amp._grouped import reason_against as no_kernel
from mpx._amp._policy import AmpRules
from mpx._amp._rules import MATMULS, Rule
from mpx._compat import bind, default_matmul_precision, open_jaxpr
from mpx._jaxpr._interpreter import Op, Outcome, Values, arrays_of
from mpx._jaxpr._queries import Equation, matmul_sizes

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
    if amp.f32_weight_grads:
        weights = [
            i
            for i, value, fact in zip((0, 1), op.values, op.facts, strict=False)
            if fact.leaf is not None and value.dtype == F32
        ]
        if weights:
            out = _with_f32_grads(amp, op.eqn, arrays_of(op.values), weights)
            return [out], [Origin(chain="low")]
    args = [
        amp.narrow(value, fact) if _is_operand(var.aval) else value
        for var, value, fact in zip(op.eqn.invars, op.values, op.facts, strict=True)
    ]
    if amp.f32_results:
        return _with_f32_result(op.eqn, args), [Origin(chain="high")]
    return multiply(op.eqn, args, amp.dtype), [Origin(chain="low")]


def _with_f32_result(eqn: Equation, args: Values) -> Values:
    """Runs a matmul of low operands that gives its f32 sums unrounded."""
    if eqn.primitive.name in RAGGED and no_kernel(eqn) is None:
        return multiply(eqn, args, F32)

    def on_cpu(*args: Any) -> Values:
        # XLA has no such matmul on CPUs for all shapes. The products are the same.
        wide = [cast(x, F32) for x in args[:2]]
        return bind(eqn, [*wide, *args[2:]], preferred_element_type=F32)

    def elsewhere(*args: Any) -> Values:
        return bind(eqn, args, preferred_element_type=F32)

    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


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


def _with_f32_grads(
    amp: Settings, eqn: Equation, args: Values, weights: Sequence[int]
) -> Any:
    """Runs a low matmul; the gradients with respect to `weights` are f32 matmul results.

    In the backward pass the gradient of a weight is a matmul over the whole batch. By
    default its result is 16 bits, like that of the forward matmul, and then cast to the f32
    of the weight. Here the accumulator itself is the result: nothing is rounded.

    Args:
        amp: The settings.
        eqn: A matmul that has no reason to stay as it is written.
        args: Its operands.
        weights: Which of the first two are f32 and want a gradient in f32.
    """
    given = [value.dtype for value in args]
    exact = dataclasses.replace(
        amp,
        rules=AmpRules(),
        cache={},
        decisions=None,
        f32_weight_grads=False,
        f32_results=True,
    )
    rounded = dataclasses.replace(exact, f32_results=False)

    # The group sizes of a ragged matmul are arguments too: held by the functions here,
    # they would be tracers of another trace where the backward one is run.
    def forward(lhs: Any, rhs: Any, *rest: Any) -> tuple[Any, tuple[Any, ...]]:
        low = cast(lhs, amp.dtype), cast(rhs, amp.dtype)
        (out,) = multiply(eqn, [*low, *rest], amp.dtype)
        return out, (*low, *rest)

    def backward(kept: tuple[Any, ...], cotangent: Any) -> tuple[Any, ...]:
        lhs, rhs, *rest = kept
        operands = [lhs, rhs, cotangent, *rest]
        types = [jax.typeof(x).update(dtype=F32) for x in operands[:3]]
        types += [jax.typeof(x) for x in rest]

        def grad(i: int) -> Any:
            def transposed(lhs: Any, rhs: Any, cotangent: Any, *rest: Any) -> Any:
                def call(x: Any) -> Any:
                    return bind(eqn, [x, rhs, *rest] if i == 0 else [lhs, x, *rest])[0]

                return jax.linear_transpose(call, (lhs, rhs)[i])(cotangent)[0]

            # JAX transposes the matmul in f32, and its only matmul is run low.
            body, consts = open_jaxpr(jax.make_jaxpr(transposed)(*types))
            run = exact.run if i in weights else rounded.run
            (out,), _ = run(body, consts, operands, [NEUTRAL] * len(operands), ())
            return cast(out, given[i])

        return grad(0), grad(1), *[None] * len(rest)

    call = jax.custom_vjp(lambda *args: forward(*args)[0])
    call.defvjp(forward, backward)
    return call(*args)
