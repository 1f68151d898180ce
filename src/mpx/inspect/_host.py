"""Common primitives in NumPy, for arrays on the CPU.

JAX compiles each primitive anew for each shape and dtype, which takes 30 ms or more; a run
of a program equation by equation would spend nearly all of its time there. Floating numbers
are computed in f32 and rounded once, as XLA's CPU compiler does it. Sums in fewer than 32
bits, which XLA rounds in between, are left to JAX.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpx._jax._compat import primitive_name
from mpx._program._constants import COMPARISONS
from mpx._program._queries import Equation

_Rule = Callable[..., Any]


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


# Of real floating numbers.
_FLOATING: dict[str, _Rule] = {
    "abs": np.abs,
    "cos": np.cos,
    "div": np.divide,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ceil": np.ceil,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": _logistic,
    "neg": np.negative,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "tanh": np.tanh,
}
# Of integers and truth values too.
_ARITHMETIC: dict[str, _Rule] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
_SUMS: dict[str, _Rule] = {"reduce_max": np.max, "reduce_min": np.min}


def _power(x: Any, params: dict[str, Any]) -> Any:
    return np.power(x, np.asarray(params["y"], x.dtype))


def _broadcast(x: Any, params: dict[str, Any]) -> Any:
    shape, dims = params["shape"], params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for axis, size in zip(dims, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: Any, params: dict[str, Any]) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _reshape(x: Any, params: dict[str, Any]) -> Any:
    dims = params.get("dimensions")
    return (x if dims is None else x.transpose(dims)).reshape(params["new_sizes"])


_MOVES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "broadcast_in_dim": _broadcast,
    "copy": lambda x, _: x,
    "expand_dims": lambda x, params: np.expand_dims(x, params["dimensions"]),
    "reshape": _reshape,
    "rev": lambda x, params: np.flip(x, params["dimensions"]),
    "slice": _slice,
    "squeeze": lambda x, params: np.squeeze(x, tuple(params["dimensions"])),
    "stop_gradient": lambda x, _: x,
    "transpose": lambda x, params: np.transpose(x, params["permutation"]),
}


def run_on_host(eqn: Equation, args: Sequence[Any], dtype: Any) -> Any:
    """Returns the result of an equation, or `None` if JAX must compute it.

    Args:
        eqn: The equation.
        args: Its operands, arrays of NumPy.
        dtype: The dtype of its result.
    """
    name = primitive_name(eqn)
    with np.errstate(all="ignore"):
        if name in _MOVES:
            # A dynamic shape adds operands.
            return _MOVES[name](args[0], eqn.params) if len(args) == 1 else None
        if name in _OTHERS:
            return _OTHERS[name](args, eqn.params, dtype)
        return _computed(name, eqn, args, dtype)


def _converted(args: Sequence[Any], _: dict[str, Any], dtype: Any) -> Any:
    (x,) = args
    # NumPy and XLA differ where a number does not fit into an integer.
    if _is_float(dtype) or not _is_float(x.dtype):
        return x != 0 if dtype.kind == "b" else x.astype(dtype)
    return None


def _selected(args: Sequence[Any], _: dict[str, Any], __: Any) -> Any:
    which, *cases = args
    if which.dtype != bool or len(cases) != 2:
        return None
    return np.where(which, cases[1], cases[0])


def _padded(args: Sequence[Any], params: dict[str, Any], _: Any) -> Any:
    (x, value), config = args, params["padding_config"]
    if any(low < 0 or high < 0 or inside for low, high, inside in config):
        return None
    shape = [n + low + high for n, (low, high, _) in zip(x.shape, config, strict=True)]
    result = np.full(shape, value, x.dtype)
    pairs = zip(x.shape, config, strict=True)
    result[tuple(slice(low, low + n) for n, (low, _, _) in pairs)] = x
    return result


def _sliced(args: Sequence[Any], params: dict[str, Any], _: Any) -> Any:
    (x, *starts), sizes = args, params["slice_sizes"]
    # A start beyond the end is moved back, as in `lax.dynamic_slice`.
    ends = [n - size for n, size in zip(x.shape, sizes, strict=True)]
    firsts = [int(np.clip(i, 0, n)) for i, n in zip(starts, ends, strict=True)]
    return x[tuple(slice(i, i + n) for i, n in zip(firsts, sizes, strict=True))]


def _counted(_: Sequence[Any], params: dict[str, Any], dtype: Any) -> Any:
    shape, axis = params["shape"], params["dimension"]
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return np.broadcast_to(np.arange(shape[axis]).astype(dtype).reshape(sizes), shape)


def _product(args: Sequence[Any], params: dict[str, Any], dtype: Any) -> Any:
    """Multiplies matrices with sums in f32, as tensor cores do."""
    x, y = args
    if not (_is_float(x.dtype) and _is_float(y.dtype)):
        return None
    ((sum_x, sum_y), (batch_x, batch_y)) = params["dimension_numbers"]
    x, y = _wide(x), _wide(y)
    free_x = [i for i in range(x.ndim) if i not in (*sum_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*sum_y, *batch_y)]
    shape = [x.shape[i] for i in (*batch_x, *free_x)] + [y.shape[i] for i in free_y]
    batch, count = [x.shape[i] for i in batch_x], math.prod(x.shape[i] for i in sum_x)
    rows, columns = (
        math.prod(x.shape[i] for i in free_x),
        math.prod(y.shape[i] for i in free_y),
    )
    left = x.transpose(*batch_x, *free_x, *sum_x).reshape(*batch, rows, count)
    right = y.transpose(*batch_y, *sum_y, *free_y).reshape(*batch, count, columns)
    return np.matmul(left, right).reshape(shape).astype(dtype)


def _joined(args: Sequence[Any], params: dict[str, Any], _: Any) -> Any:
    return np.concatenate(args, axis=params["dimension"])


_OTHERS: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], Any]] = {
    "concatenate": _joined,
    "convert_element_type": _converted,
    "dot_general": _product,
    "dynamic_slice": _sliced,
    "iota": _counted,
    "pad": _padded,
    "select_n": _selected,
}


def _computed(name: str, eqn: Equation, args: Sequence[Any], dtype: Any) -> Any:
    if any(x.dtype.kind == "c" for x in args):
        return None
    floats = _is_float(args[0].dtype) if args else False
    wide = [_wide(x) for x in args]
    rule = COMPARISONS.get(name) or _ARITHMETIC.get(name)
    if rule is None and floats:
        rule = _FLOATING.get(name)
    if rule is not None:
        return np.asarray(rule(*wide)).astype(dtype)
    if name == "integer_pow" and floats:
        return _power(wide[0], eqn.params).astype(dtype)
    if name in _SUMS and wide[0].size:
        return np.asarray(_SUMS[name](wide[0], axis=eqn.params["axes"])).astype(dtype)
    if name == "reduce_sum" and floats and dtype.itemsize >= 4:
        return np.asarray(np.sum(wide[0], axis=eqn.params["axes"])).astype(dtype)
    return None


def _is_float(dtype: Any) -> bool:
    # The formats of `ml_dtypes` are of kind "V" or "f".
    return dtype.kind in "fV" and dtype.names is None


def _wide(x: Any) -> Any:
    return x.astype(np.float32) if _is_float(x.dtype) and x.dtype.itemsize < 4 else x
