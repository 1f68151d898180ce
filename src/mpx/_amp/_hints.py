"""What `amp` asks of XLA on GPUs: choices that it makes badly where it is free.

Errors stay those of a few roundings. All were found in profiles and in what XLA compiles for
an H200.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PyTree

from mpx._amp._facts import cast
from mpx._jax._compat import Literal, bind, eval_equation, open_jaxpr, source_context
from mpx._jax._devices import cuda_capability, in_order
from mpx._jax._formats import F32, is_low
from mpx._ops._erfc import erfc
from mpx._program._flow import propagate
from mpx._program._interpreter import Frame, Jaxpr, Op, Values
from mpx._program._primitives import that
from mpx._program._queries import CALLS, SHAPE_ONLY, Equation

_REUSED = that("reused")


def mean_apart(frame: Frame, eqn: Equation, outs: Values) -> Values:
    """Keeps XLA from joining the means of rows, as a norm takes them, with what reads them.

    Its kernels that do both hold whole rows in registers, and are slow in the backward pass
    of a LayerNorm of Equinox: on an H200 ViT-Base took 40.8 ms a step with them, 37.4 without.
    """
    if eqn.primitive.name != "reduce_sum":
        return outs
    rows, (out,) = eqn.invars[0].aval, eqn.outvars
    is_last = rows.ndim - 1 in eqn.params["axes"] and out.aval.ndim > 0
    if not is_last or not _is_divided(frame, out):
        return outs
    return lax.optimization_barrier(outs)


def _is_divided(frame: Frame, var: Any) -> bool:
    """Returns whether an array, maybe with axes of length 1, is divided by one number."""
    for reader, position in frame.readers.get(var, ()):
        name, (out, *_) = reader.primitive.name, reader.outvars
        is_same = name in SHAPE_ONLY and out.aval.size == var.aval.size
        if is_same and _is_divided(frame, out):
            return True
        if name == "div" and position == 0 and reader.invars[1].aval.size == 1:
            return True
    return False


def is_spread(x: PyTree, shape: tuple[int, ...]) -> bool:
    """Returns whether an operand is a parameter of several axes that is broadcast.

    Its gradient is a sum. XLA would store what is summed with the summed axis last, and then
    all that depends on it: for the positions of a ViT, it transposed the input of each norm.
    """
    has_axes = sum([size != 1 for size in x.shape]) > 1
    return x.dtype == F32 and has_axes and x.shape != shape


@jax.custom_jvp
def in_order_back(x: PyTree) -> PyTree:
    """Returns an array whose cotangent is stored in row-major order."""
    return x


@in_order_back.defjvp
def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    return primals[0], in_order(tangents[0])


def exchanged(op: Op, lhs: Array, rhs: Array) -> tuple[Values, Any] | None:
    """Returns the operands of a product and its dimension numbers in a better order.

    `jax.vmap` of `W @ x` puts the outputs of a layer before its examples, and XLA stores them
    so. Then 197 tokens make rows of an odd length, and kernels that take maxima as well, for
    fp8 or 8-bit residuals, read number by number. In the product of x and W the outputs come
    last, as does in x what is summed over. `None` if there is nothing to gain.
    """
    eqn, facts = op.eqn, op.facts
    is_mapped = facts[0].is_weight and not facts[1].is_param
    if not is_mapped or eqn.primitive.name != "dot_general":
        return None
    (left, right), batch = eqn.params["dimension_numbers"]
    rows = [axis for axis in range(rhs.ndim) if axis not in right]
    has_outputs = lhs.ndim - len(left) == 1 and not eqn.params.get("out_sharding")
    if batch[0] or not has_outputs or len(rows) < 2 or cuda_capability() is None:
        return None
    x = lax.transpose(rhs, (*rows, *right))
    return [x, lhs], ((tuple(range(len(rows), x.ndim)), left), batch)


def outputs_first(x: Array) -> Array:
    """Returns an exchanged product with its axes as they were asked for."""
    return jnp.moveaxis(x, -1, 0)


def run_region(
    jaxpr: Jaxpr,
    args: Sequence[Array],
    back: Callable[[Equation, Values, Values], Values] = lambda eqn, ins, outs: outs,
) -> Values:
    """Runs the f32 operations of a region; `back` may ask for something of cotangents.

    XLA's gelus, of tanh or erfc, are limited by instructions on an H200 instead of by memory.
    Here they have fewer of them.
    """
    angles: dict[Any, Array] = {}  # the arguments of tanh, by its results
    frame, on_gpu = Frame(jaxpr), cuda_capability() is not None

    def run(eqn: Equation, values: Values) -> Sequence[Any]:
        if eqn.primitive.name in CALLS:
            body, consts = open_jaxpr(eqn.params["jaxpr"])
            return run_region(body, [*consts, *values], back)
        with source_context(eqn), eqn.ctx.manager:
            if on_gpu and values and values[0].dtype == F32:
                if eqn.primitive.name == "erfc":
                    return [erfc(*values)]
                if eqn.primitive.name == "tanh":
                    angles[eqn.outvars[0]] = values[0]
                if (angle := _angle_of_sum(eqn, angles)) is not None:
                    # Shorter, and 1 does not cancel most of a tanh near -1.
                    return [2 * lax.logistic(2 * angle)]
            outs = back(eqn, values, run_alone(eqn, values))
            return mean_apart(frame, eqn, outs) if on_gpu else outs

    inputs = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(inputs, args, strict=True))
    return propagate(jaxpr, known, run, lambda atom: atom.val)


def run_alone(eqn: Equation, values: Values) -> Values:
    """Runs an equation of a region; what is written in 16 bits sums in f32 in its transpose."""
    if not sums_low(eqn):
        return eval_equation(eqn, values)
    wide = [cast(x, F32) if is_low(x) else x for x in values]
    pairs = zip(bind(eqn, wide), eqn.outvars, strict=True)
    return [cast(x, var.aval.dtype) for x, var in pairs]


def sums_low(eqn: Equation) -> bool:
    """Returns whether a 16-bit number, as it is written, is used several times."""
    is_candidate = eqn.primitive.name in _REUSED
    return (
        is_candidate
        and not isinstance(eqn.invars[0], Literal)
        and is_low(eqn.invars[0].aval)
    )


def _angle_of_sum(eqn: Equation, angles: Mapping[Any, Array]) -> Array | None:
    """Returns the x of an equation that computes 1 + tanh(x)."""
    if eqn.primitive.name != "add":
        return None
    numbers = [x.val for x in eqn.invars if isinstance(x, Literal)]
    found = [angles.get(x) for x in eqn.invars if not isinstance(x, Literal)]
    return found[0] if numbers == [1] else None
