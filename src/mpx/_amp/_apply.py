"""How each rule runs an equation: which casts it makes, and what is known after."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._rules import (
    BROADCASTING,
    MATMULS,
    PRIMITIVES,
    SHAPE_ONLY,
    SPREADING,
    Rule,
)
from mpx._amp._values import (
    F32,
    Meta,
    as_array,
    cast,
    chain_of,
    is_eligible,
    literal_survives,
    saturate,
    widest,
)
from mpx._amp._weights import matmul, weights_of
from mpx._compat import bind, default_matmul_precision, eval_equation
from mpx._jaxpr._queries import matmul_sizes


def run_original(amp: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(eqn, in_f32(amp, eqn, values))


def in_f32(amp: Any, eqn: Any, values: list[Any]) -> list[Any]:
    """Casts the operands that the function holds in f32 back to f32."""
    return [
        amp.widen(value) if is_eligible(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]


def opaque_metas(eqn: Any, metas: list[Meta]) -> list[Meta]:
    """Returns what is known of results that came out of an f32 operation."""
    return [chain_of(metas, high=True)] * len(eqn.outvars)


Applied = tuple[list[Any], list[Meta], str]


def _low(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], reason: str
) -> Applied:
    is_cast = is_eligible
    if eqn.primitive.name in MATMULS:
        is_cast = _is_matmul_operand
        kept = reason_to_keep(eqn) or reason_for_f32(eqn)
        if kept is not None:
            return run_original(amp, eqn, values), opaque_metas(eqn, metas), kept
        weights = weights_of(values, metas) if amp.f32_weight_grads else ()
        if weights:
            return [matmul(amp, eqn, values, weights)], [Meta(chain="low")], reason
    args = [
        cast(value, amp.dtype) if is_cast(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]
    changes = {}
    if "preferred_element_type" in eqn.params:
        if amp.f32_results:
            return _with_f32_result(eqn, args), [Meta(chain="high")], reason
        changes["preferred_element_type"] = amp.dtype
    outs = bind(eqn, args, **changes)
    return outs, [Meta(chain="low")] * len(outs), reason


def _with_f32_result(eqn: Any, args: list[Any]) -> list[Any]:
    """Runs a matmul of low operands that gives its f32 sums unrounded."""

    def on_cpu(*args: Any) -> list[Any]:
        # XLA has no such matmul on CPUs for all shapes. The products are the same.
        wide = [cast(x, F32) for x in args[:2]]
        return bind(eqn, [*wide, *args[2:]], preferred_element_type=F32)

    def elsewhere(*args: Any) -> list[Any]:
        return bind(eqn, args, preferred_element_type=F32)

    return lax.platform_dependent(*args, cpu=on_cpu, default=elsewhere)


def reason_to_keep(eqn: Any) -> str | None:
    """Says why a matmul must stay as it is written, if it must."""
    avals = [var.aval for var in eqn.invars[:2]]
    # f32 activations times 16-bit parameters are an f32 matmul, to be run low, too.
    if not any(map(is_eligible, avals)) or not all(map(_is_matmul_operand, avals)):
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


def _is_matmul_operand(aval: Any) -> bool:
    return getattr(aval, "dtype", None) in (F32, jnp.bfloat16, jnp.float16)


def reason_for_f32(eqn: Any) -> str | None:
    """Says why 16 bits cost a matmul its numbers and gain it no time, if they do.

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


def _f32(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], reason: str
) -> Applied:
    outs = bind(eqn, in_f32(amp, eqn, values))
    return outs, opaque_metas(eqn, metas), reason


def _widest(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], reason: str
) -> Applied:
    shape = tuple(eqn.outvars[0].aval.shape)
    fast = amp.rules.base == "fast"
    follows = [
        meta.literal is not None
        or (meta.chain == "neutral" and (fast or _is_bias(meta, var.aval.shape, shape)))
        for var, meta in zip(eqn.invars, metas, strict=True)
    ]
    dtype = widest(
        value.dtype
        for var, value, soft in zip(eqn.invars, values, follows, strict=True)
        if is_eligible(var.aval) and not soft
    )
    literals = [meta.literal for meta in metas if meta.literal is not None]
    if not all(literal_survives(value, dtype) for value in literals):
        dtype = F32

    def prepare(var: Any, value: Any, meta: Meta, soft: bool) -> Any:
        if not is_eligible(var.aval):
            return value
        value = as_array(value)
        if dtype == F32:
            return amp.widen(value)
        if soft and meta.literal is None and value.dtype == F32:
            value = saturate(value, dtype)
        if _is_broadcast(eqn, value, shape):
            # A broadcast becomes a sum in the backward pass: it must be one in f32.
            value = jnp.broadcast_to(amp.widen(value), shape)
        return cast(value, dtype)

    args = [
        prepare(*known)
        for known in zip(eqn.invars, values, metas, follows, strict=True)
    ]
    outs = bind(eqn, args)
    return outs, [chain_of(metas)] * len(outs), reason


def _is_bias(meta: Meta, given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an operand is a bias or a scale, which takes on the dtype of the others.

    Without this each `x @ W + b` would fall back to f32. It is for parameters that are
    broadcast: biases, scales, embeddings of positions. Masks, targets and coordinates
    stay f32: if 16 bits round or overflow them, the result is another one.

    Args:
        meta: What is known of the operand.
        given: Its shape.
        shape: The shape of the result.
    """
    if meta.role is None or meta.leaf is None:
        return False
    sizes = tuple(size for size in meta.leaf if size != 1)
    if len(sizes) > 1 and sizes[-1] == sizes[-2]:
        return False  # a mask or bias of attention, which a module may hold
    if meta.role == "own":
        return True
    if meta.leaf == shape:
        return False
    if meta.role == "known":
        return True
    # Less is known of these: they must have the last axes, as a bias for channels has.
    is_last = given[len(given) - len(sizes) :] == sizes
    return is_last and (meta.role == "likely" or len(sizes) <= 1)


def _is_broadcast(eqn: Any, value: Any, shape: tuple[int, ...]) -> bool:
    return (
        eqn.primitive.name in BROADCASTING
        and value.ndim == len(shape)
        and value.shape != shape
    )


def _follow(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], reason: str
) -> Applied:
    name = eqn.primitive.name
    if PRIMITIVES.get(name) != Rule.FOLLOW and _operands_differ(eqn, values):
        # A user's rule. The table has it only where operands need not agree, as in `sort`.
        return _widest(amp, eqn, values, metas, reason)
    values = [
        as_array(value) if is_eligible(var.aval) else value
        for var, value in zip(eqn.invars, values, strict=True)
    ]
    if name in SPREADING and values[0].dtype != F32:
        given = values[0].dtype
        # As above: what goes to several places is summed in the backward pass, in f32.
        outs = bind(eqn, [amp.widen(values[0]), *values[1:]])
        outs = [cast(x, given) for x in outs]
    else:
        outs = bind(eqn, values)
    if name in SHAPE_ONLY:
        kept = metas if len(metas) == len(outs) else [metas[0]] * len(outs)
        return outs, kept, reason
    return outs, [chain_of(metas)] * len(outs), reason


def _operands_differ(eqn: Any, values: list[Any]) -> bool:
    pairs = zip(eqn.invars, values, strict=True)
    return len({as_array(x).dtype for var, x in pairs if is_eligible(var.aval)}) > 1


def _original(
    amp: Any, eqn: Any, values: list[Any], metas: list[Meta], reason: str
) -> Applied:
    return run_original(amp, eqn, values), opaque_metas(eqn, metas), reason


_PRESETS = {
    Rule.TF32: lax.DotAlgorithmPreset.TF32_TF32_F32,
    Rule.BF16_F32: lax.DotAlgorithmPreset.BF16_BF16_F32,
    Rule.TRUE_F32: lax.DotAlgorithmPreset.F32_F32_F32,
}


def _by_algorithm(
    amp: Any,
    eqn: Any,
    values: list[Any],
    metas: list[Meta],
    reason: str,
    *,
    rule: Rule,
) -> Applied:
    kept = reason_to_keep(eqn) if eqn.primitive.name in MATMULS else "not a matmul"
    if kept is None and rule != Rule.TRUE_F32:
        kept = reason_for_f32(eqn)
    if kept is None and eqn.primitive.name != "dot_general":
        # Convolutions know precisions but no algorithms.
        kept = "algorithms exist for dot_general only"
    args = in_f32(amp, eqn, values)
    metas = opaque_metas(eqn, metas)
    if kept is not None:
        return eval_equation(eqn, args), metas, kept
    args = [cast(x, F32) for x in args]  # one may be a 16-bit parameter
    chosen = functools.partial(bind, eqn, precision=_PRESETS[rule])
    if rule == Rule.TF32:
        # Only CUDA has it; elsewhere the plain f32 product is at least as exact.
        outs = lax.platform_dependent(
            *args,
            cuda=lambda *x: chosen(x),
            default=lambda *x: bind(eqn, x),
        )
        return outs, metas, reason
    return chosen(args), metas, reason


APPLY = {
    Rule.LOW: _low,
    Rule.F32: _f32,
    Rule.WIDEST: _widest,
    Rule.FOLLOW: _follow,
    Rule.ORIGINAL: _original,
    Rule.TF32: functools.partial(_by_algorithm, rule=Rule.TF32),
    Rule.BF16_F32: functools.partial(_by_algorithm, rule=Rule.BF16_F32),
    Rule.TRUE_F32: functools.partial(_by_algorithm, rule=Rule.TRUE_F32),
}


def convert(
    eqn: Any, values: list[Any], metas: list[Meta]
) -> tuple[list[Any], list[Meta]]:
    """A cast is honoured as written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = eqn.invars, eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return values, metas
    meta = Meta(chain=metas[0].chain)
    if var.aval.dtype == np.bool_ and is_eligible(out.aval):
        meta = Meta(literal=1.0)  # zeros and ones are exact in every dtype
    return bind(eqn, [as_array(values[0])]), [meta]
