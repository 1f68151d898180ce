"""Constants of a program, computed in NumPy while it is traced: masks, positions, scales.

Axes along which a constant was only broadcast have size 1.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._program._queries import Equation, names

SAME = names("stop_gradient copy copy_p pvary pcast")
"""Operations that return their operand."""
_LARGEST = 2**28
"""The most bytes that a computed constant may have: a mask of 16384 × 16384."""


def as_constant(value: PyTree, dtype: np.dtype | None) -> np.ndarray | None:
    """Returns a number or an array of the program, unless it is far away or large."""
    is_number = dtype == np.bool_ or (dtype and jnp.issubdtype(dtype, np.number))
    is_here = getattr(value, "is_fully_addressable", True)
    is_small = getattr(value, "nbytes", 0) <= _LARGEST
    return np.asarray(value, dtype) if is_number and is_here and is_small else None


def compute(eqn: Equation, operands: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Returns the result of an equation, if it is easy to compute."""
    rule, out = RULES[eqn.primitive.name], eqn.outvars[0].aval
    if 0 in out.shape or any(x is None for x in operands):
        return None
    try:
        with np.errstate(all="ignore"):
            return rule(eqn, out, *operands)
    except (ValueError, TypeError):  # a negative power of an integer
        return None


def _divide(x: PyTree, y: PyTree) -> PyTree:
    if np.issubdtype(x.dtype, np.integer):
        return None if np.any(y == 0) else np.trunc(x / y)
    return x / y


# The names of operations in JAX and in NumPy.
_PAIRS = names(
    "add:add sub:subtract mul:multiply neg:negative abs:abs max:maximum min:minimum "
    "sqrt:sqrt exp:exp log:log exp2:exp2 pow:power integer_pow:power and:bitwise_and "
    "or:bitwise_or xor:bitwise_xor not:bitwise_not eq:equal ne:not_equal lt:less "
    "le:less_equal gt:greater ge:greater_equal"
)
_NUMPY: dict[str, Callable[..., PyTree]] = {
    **{name: getattr(np, other) for name, other in (x.split(":") for x in _PAIRS)},
    **dict.fromkeys((*SAME, "convert_element_type"), lambda x: x),
    "div": _divide,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *x: np.where(which, *x[::-1]) if len(x) == 2 else None,
}


def _elementwise(
    func: Callable[..., PyTree], eqn: Equation, out: PyTree, *operands: np.ndarray
) -> np.ndarray | None:
    sizes = np.broadcast_shapes(*(x.shape for x in operands))
    if np.prod(sizes, dtype=float) * out.dtype.itemsize > _LARGEST:
        return None
    more = [np.int32(eqn.params["y"])] if "y" in eqn.params else []  # an integer power
    result = func(*operands, *more)
    return None if result is None else np.asarray(result).astype(out.dtype)


def _iota(eqn: Equation, out: PyTree) -> np.ndarray:
    axis = eqn.params["dimension"]
    line = np.arange(out.shape[axis]).astype(out.dtype)
    return line.reshape([-1 if i == axis else 1 for i in range(len(out.shape))])


def _broadcast(eqn: Equation, out: PyTree, x: np.ndarray) -> np.ndarray:
    sizes = dict(zip(eqn.params["broadcast_dimensions"], x.shape, strict=True))
    return x.reshape([sizes.get(i, 1) for i in range(len(out.shape))])


def _reshaped(eqn: Equation, out: PyTree, x: np.ndarray) -> np.ndarray | None:
    is_small = math.prod(out.shape) * x.dtype.itemsize <= _LARGEST
    if eqn.params.get("dimensions") is not None or not is_small:
        return None
    return np.broadcast_to(x, eqn.invars[0].aval.shape).reshape(out.shape)


def _sliced(eqn: Equation, out: PyTree, x: np.ndarray) -> np.ndarray:
    params = eqn.params
    steps = params["strides"] or (1,) * x.ndim
    parts = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    some = zip(x.shape, parts, strict=True)
    return x[tuple(slice(None) if n == 1 else slice(*part) for n, part in some)]


RULES: dict[str, Callable[..., np.ndarray | None]] = {
    **{name: functools.partial(_elementwise, func) for name, func in _NUMPY.items()},
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda eqn, out, x: x.transpose(eqn.params["permutation"]),
    "reshape": _reshaped,
    "squeeze": lambda eqn, out, x: x.squeeze(tuple(eqn.params["dimensions"])),
    "slice": _sliced,
}
