"""The values of terms that depend on no input, computed by NumPy while tracing.

An axis along which an array was only broadcast has stride 0 and takes no memory.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import Literal
from mpx._program._queries import names

if TYPE_CHECKING:
    from mpx._program._terms import Term

SAME = names("stop_gradient copy copy_p pvary pcast")
"""Operations that return their operand."""
_LARGEST = 2**28
"""The most bytes that a computed constant may have: a mask of 16384 × 16384."""


def value_of(term: "Term") -> np.ndarray | None:
    """Returns the value of a term, if it is a constant and easy to compute."""
    dtype = getattr(term.aval, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
        return None
    if term.eqn is None:
        return _given(term, dtype)
    if len(term.eqn.outvars) != 1 or (term.name == "iota" and term.operands):
        return None
    rule = _RULES.get(term.name)
    operands = [x.constant for x in term.operands] if rule is not None else [None]
    if rule is None or any(x is None for x in operands):
        return None
    try:
        with np.errstate(all="ignore"):
            return rule(term, *operands)
    except (ValueError, TypeError):  # a negative power of an integer
        return None


def _given(term: "Term", dtype: Any) -> np.ndarray | None:
    if isinstance(term.atom, Literal):
        return np.asarray(term.atom.val, dtype)
    value = term.level.consts.get(term.atom)
    is_here = getattr(value, "is_fully_addressable", True)
    if value is None or term.atom not in term.level.fixed or not is_here:
        return None
    return np.asarray(value, dtype) if value.nbytes <= _LARGEST else None


def only_number(value: np.ndarray) -> float | None:
    """Returns the number that all elements of an array are, if there is one."""
    if value.dtype == bool or not value.size:
        return None
    small = compact(value)
    if np.issubdtype(small.dtype, np.complexfloating):
        return None
    first = small.reshape(-1)[0]
    return float(first) if np.all(small == first) else None


def compact(x: np.ndarray) -> np.ndarray:
    """Returns an array with size 1 along the axes where its stride is 0."""
    return x[tuple(slice(1) if s == 0 else slice(None) for s in x.strides)]


# --- Elementwise ----------------------------------------------------------------------


def _divide(x: Any, y: Any) -> Any:
    if not np.issubdtype(x.dtype, np.integer):
        return np.divide(x, y)
    return None if np.any(y == 0) else np.trunc(x / y).astype(x.dtype)


def _choose(which: Any, *cases: Any) -> Any:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else None


COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "exp2": np.exp2,
    "pow": np.power,
    "integer_pow": np.power,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    **COMPARISONS,
    **dict.fromkeys((*SAME, "convert_element_type"), lambda x: x),
    "select_n": _choose,
}


def _elementwise(term: "Term", *operands: np.ndarray) -> np.ndarray | None:
    small = [compact(x) for x in operands]
    sizes = np.broadcast_shapes(*(x.shape for x in small))
    if np.prod(sizes, dtype=float) * term.aval.dtype.itemsize > _LARGEST:
        return None
    if term.name == "integer_pow":
        small.append(np.asarray(term.params["y"], np.int32))
    out = NUMPY[term.name](*small)
    if out is None:
        return None
    return np.broadcast_to(np.asarray(out).astype(term.aval.dtype), term.shape)


# --- Layout ---------------------------------------------------------------------------


def _iota(term: "Term") -> np.ndarray:
    shape, axis = term.shape, term.params["dimension"]
    line = np.arange(shape[axis]).astype(term.aval.dtype)
    line = line.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    return np.broadcast_to(line, shape)


def _broadcast(term: "Term", x: np.ndarray) -> np.ndarray | None:
    sizes = [1] * len(term.shape)
    for dim, size in zip(term.params["broadcast_dimensions"], x.shape, strict=True):
        sizes[dim] = size
    return np.broadcast_to(_with_shape(x, tuple(sizes)), term.shape)


def _reshaped(term: "Term", x: np.ndarray) -> np.ndarray | None:
    if term.params.get("dimensions") is not None and term.name == "reshape":
        return None
    is_small = x.nbytes <= _LARGEST or _same_axes(x.shape, term.shape)
    return _with_shape(x, term.shape) if is_small else None


def _same_axes(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether two shapes differ by axes of size 1 only."""
    return [n for n in one if n != 1] == [n for n in other if n != 1]


def _with_shape(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a reshaped array; if only axes of size 1 differ, without a copy."""
    if not _same_axes(x.shape, shape):
        return x.reshape(shape)
    small = compact(x)
    rest = (m for m, n in zip(small.shape, x.shape, strict=True) if n != 1)
    sizes = [next(rest) if n != 1 else 1 for n in shape]
    return np.broadcast_to(small.reshape(sizes), shape)


def _sliced(term: "Term", x: np.ndarray) -> np.ndarray:
    params = term.params
    steps = params["strides"] or (1,) * x.ndim
    parts = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return x[tuple(slice(*part) for part in parts)]


_RULES: dict[str, Callable[..., np.ndarray | None]] = {
    **dict.fromkeys(NUMPY, _elementwise),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "transpose": lambda term, x: x.transpose(term.params["permutation"]),
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "slice": _sliced,
}


# --- Along which axes a value varies --------------------------------------------------

Axes = tuple[bool, ...] | None


def _varying_broadcast(term: "Term") -> Axes:
    found = [False] * len(term.shape)
    dims = term.params["broadcast_dimensions"]
    for dim, varies in zip(dims, term.operands[0].varying, strict=True):
        found[dim] = varies
    return tuple(found)


def _varying_reshape(term: "Term") -> Axes:
    source, shape = term.operands[0], term.shape
    if not _same_axes(source.shape, shape):
        return None
    pairs = zip(source.varying, source.shape, strict=True)
    rest = iter([varies for varies, size in pairs if size != 1])
    return tuple(size != 1 and next(rest) for size in shape)


def _varying_elementwise(term: "Term") -> Axes:
    # Scalars are broadcast, and so are axes of size 1.
    inner = [x.varying for x in term.operands if x.shape]
    return tuple(any(x) for x in zip(*inner, strict=True)) if inner else None


VARYING: dict[str, Callable[["Term"], Axes]] = {
    **dict.fromkeys(
        (*NUMPY, "tanh", "sign", "floor", "logistic"), _varying_elementwise
    ),
    "iota": lambda term: tuple(
        i == term.params["dimension"] for i in range(len(term.shape))
    ),
    "broadcast_in_dim": _varying_broadcast,
    "transpose": lambda term: tuple(
        term.operands[0].varying[i] for i in term.params["permutation"]
    ),
    **dict.fromkeys(("reshape", "squeeze"), _varying_reshape),
}
"""By primitive: for each axis whether the result may differ along it; `None` for all."""
