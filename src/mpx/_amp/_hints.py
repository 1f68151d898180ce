"""What `amp` asks of XLA on GPUs: choices that it makes badly where it is free.

Numbers stay the same. Both were found in profiles of an Equinox ViT on an H200, and tests
read them in compiled programs.
"""

from typing import Any

import jax
from jax import lax
from jaxtyping import PyTree

from mpx._amp._facts import F32
from mpx._jax._devices import cuda_capability, in_order
from mpx._program._interpreter import Frame, Values
from mpx._program._queries import SHAPE_ONLY, Equation


def mean_apart(frame: Frame, eqn: Equation, outs: Values) -> Values:
    """Keeps XLA from joining the means of rows, as a norm takes them, with what reads them.

    Its kernels that do both hold whole rows in registers, and are slow in the backward pass
    of a LayerNorm of Equinox: on an H200 ViT-Base took 40.8 ms a step with them, 37.4 without.
    """
    if eqn.primitive.name != "reduce_sum" or cuda_capability() is None:
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
