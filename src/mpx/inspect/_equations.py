"""Single equations on concrete arrays: as written, in f32, and on shards.

The f32 version of an equation, its shadow, computes the same thing with every floating
type narrower than f32 replaced by f32.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._jax._compat import bind, eval_equation, primitive_name
from mpx._jax._formats import FORMATS, Format, short_name
from mpx._jax._sharding import axes_of as axes_by_dimension
from mpx._program._queries import MATMULS, SHAPE_ONLY, Equation, has_body, names
from mpx.inspect._dtypes import is_float, is_low

Array = Any
"""An array of NumPy or of JAX."""
Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""
Params = Mapping[str, Any]
F32 = np.dtype(np.float32)
# They change only what JAX knows of a value.
MARKS = ("pvary", "pcast", "sharding_constraint", "reshard", "mesh_cast")
# They read the bits of their operands, or hand them to code that expects their dtypes.
_OPAQUE = names("bitcast_convert_type nextafter pallas_call ffi_call custom_call")
_SUMS = names(
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp scatter-add scatter-mul "
    "reduce_window_sum select_and_scatter_add"
)
_PICKS = names(
    "select_n gather dynamic_slice dynamic_update_slice concatenate pad stop_gradient "
    "copy_p optimization_barrier name sort reduce_max reduce_min max min"
)
_COMPARISONS = names("eq ne lt le gt ge")
_ROUNDINGS = 16
"""Numbers are nearly equal if they differ by so many roundings of their tensors."""


# --- Arrays ---------------------------------------------------------------------------


def format_of(x: Array) -> Format:
    """Returns the format of a floating array or type; f32 for one without a name."""
    return FORMATS.get(short_name(np.dtype(x.dtype)), FORMATS["f32"])


def low_format(eqn: Equation) -> Format | None:
    """Returns the coarsest format narrower than f32 among operands and results."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    found = [format_of(aval) for aval in avals if is_low(aval)]
    return max(found, key=lambda x: x.eps, default=None)


def to_host(x: Array) -> Array:
    """Returns an array as one of NumPy, which need not compile operations; PRNG keys not."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # Other processes hold parts of it; each of them is here, too.
        if not x.is_fully_replicated:
            mesh = getattr(x.sharding, "mesh")  # noqa: B009
            whole = NamedSharding(mesh, PartitionSpec())
            x = jax.jit(lambda x: x, out_shardings=whole)(x)
        x = x.addressable_data(0)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return np.asarray(x)


def _cast(x: Array, dtype: np.dtype) -> Array:
    """Rounds an array to a dtype; beyond the range it becomes infinite or nan."""
    if x.dtype == dtype:
        return x
    x = to_host(x)
    if isinstance(x, np.ndarray | np.generic):
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype)
    return lax.convert_element_type(x, dtype)


def widened(x: Array) -> Array:
    """Returns an array in f32, if it is floating and narrower."""
    return _cast(x, F32) if is_low(x) else x


def as_operand(x: Array, aval: Any) -> Array:
    """Returns a floating array in the dtype that an equation takes."""
    return _cast(x, np.dtype(aval.dtype)) if is_float(aval) and is_float(x) else x


# --- Equations ------------------------------------------------------------------------


def run_as_written(
    eqn: Equation, args: Sequence[Array], axes: Axes = (), *, in_turn: bool = False
) -> list[Array]:
    """Runs an equation on arrays, cast to its own dtypes.

    `in_turn` rounds a sum in low precision after each term. XLA does that or not, depending
    on the shape and on what it fuses the sum with.
    """
    name, pairs = primitive_name(eqn), zip(args, eqn.invars, strict=True)
    operands = [as_operand(x, atom.aval) for x, atom in pairs]
    if name in MARKS:
        return operands
    if in_turn and name == "reduce_sum" and is_low(operands[0]):
        return [_added_in_turn(operands[0], eqn.params["axes"])]
    if name in _SUMS and is_low(eqn.outvars[0].aval) and not axes:
        # In which order and with how many digits it adds up depends on the device.
        with jax.default_device(jax.local_devices()[0]):
            scatters = name.startswith("scatter")
            run = _scatter if scatters else functools.partial(bind, **_local(eqn))
            return [to_host(x) for x in run(eqn, operands)]
    if any(callable(value) for value in eqn.params.values()):
        return eval_equation(eqn, operands)
    return _run(eqn, operands, eqn.outvars[0].aval.dtype, {}, axes)


def run_in_f32(eqn: Equation, args: Sequence[Array], axes: Axes = ()) -> list[Array]:
    """Runs the shadow of an equation on arrays; its results are f32 or wider."""
    name = primitive_name(eqn)
    if name == "reduce_precision":
        return [widened(args[0])]
    if name.startswith("scatter") and not axes:
        return _scatter(eqn, [widened(x) for x in args])
    if name in _OPAQUE or "callback" in name or has_body(eqn):
        return [widened(x) for x in run_as_written(eqn, args, axes)]
    changes: dict[str, Any] = {
        key: F32
        for key in ("preferred_element_type", "new_dtype", "dtype", "out_dtype")
        if eqn.params.get(key) is not None and is_low(jnp.zeros((), eqn.params[key]))
    }
    if name in MATMULS and "precision" in eqn.params:
        changes["precision"] = lax.Precision.HIGHEST
    operands = [widened(np.asarray(x) if np.isscalar(x) else x) for x in args]
    try:
        out = eqn.outvars[0].aval
        dtype = F32 if is_low(out) else out.dtype
        return [widened(x) for x in _run(eqn, operands, dtype, changes, axes)]
    except (TypeError, ValueError, NotImplementedError):
        # A primitive of someone else that takes only the dtypes it was traced with.
        return [widened(x) for x in run_as_written(eqn, args, axes)]


def _run(
    eqn: Equation, args: Sequence[Array], dtype: np.dtype, changes: Params, axes: Axes
) -> list[Array]:
    """Runs an equation whose first result has a given dtype."""
    if axes:
        return _run_on_shards(eqn, args, changes, axes)
    hosted = [to_host(x) for x in args]
    if all(isinstance(x, np.ndarray | np.generic) for x in hosted):
        result = run_in_numpy(eqn, hosted, dtype)
        if result is not None:
            return [np.asarray(result)]
    return bind(eqn, args, **_local(eqn), **changes)


def _local(eqn: Equation) -> dict[str, None]:
    """Returns the parameters that place a result on devices, without a place."""
    return {key: None for key in ("sharding", "out_sharding") if key in eqn.params}


def _added_in_turn(x: Array, axes: Sequence[int]) -> np.ndarray:
    x = jnp.moveaxis(jnp.asarray(x), axes, range(len(axes)))
    rows = x.reshape(-1, *x.shape[len(axes) :])
    total = jnp.zeros(rows.shape[1:], x.dtype)
    return np.asarray(lax.scan(lambda a, row: (a + row, None), total, rows)[0])


def _scatter(eqn: Equation, args: Sequence[Array]) -> list[Array]:
    """Runs a scatter on other dtypes: its jaxpr, which combines numbers, has fixed ones."""
    keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    func = getattr(lax, primitive_name(eqn).replace("-", "_"))
    return [func(*map(jnp.asarray, args), **{key: eqn.params[key] for key in keys})]


def only_moves(eqn: Equation) -> bool:
    """Returns whether an equation returns numbers of its operands, none of them rounded."""
    if primitive_name(eqn) != "convert_element_type":
        return primitive_name(eqn) in SHAPE_ONLY or primitive_name(eqn) in _PICKS
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if not is_float(before) or not is_float(after):
        return False
    old, new = format_of(before), format_of(after)
    return new.mantissa >= old.mantissa and new.exponent >= old.exponent


# --- Comparisons of nearly equal numbers ----------------------------------------------
#
# A rectifier passes a number or not, a maximum is one of two almost equal numbers: each
# rounding turns over a few such decisions, and each changes the gradient by much more than
# the rounding. The shadow decides such ties as the program does, and so do the runs that
# are compared with the shadow.


def is_decision(eqn: Equation) -> bool:
    """Returns whether an equation compares floating numbers."""
    known = (*_COMPARISONS, "argmax", "argmin")
    return primitive_name(eqn) in known and is_float(eqn.invars[0].aval)


def settled(
    eqn: Equation, args: Sequence[Array], result: Array, other: np.ndarray, eps: float
) -> np.ndarray:
    """Returns a decision, with that of another run where the numbers are nearly equal.

    `eps` is the distance of numbers in the coarsest format of the program.
    """
    numbers = [np.asarray(to_host(x)).astype(np.float32) for x in args]
    own = np.asarray(result)
    with np.errstate(all="ignore"):
        margin = _ROUNDINGS * eps * sum(map(_root_mean_square, numbers))
        if primitive_name(eqn) in _COMPARISONS:
            if all(np.array_equal(x, np.round(x)) for x in numbers):
                return own  # they are counted or masks, and exact
            near = np.abs(numbers[0] - numbers[1]) <= margin
            return np.where(near, other, own)
        (axis,) = eqn.params["axes"]
        first, second = (
            np.take_along_axis(numbers[0], np.expand_dims(x, axis), axis).squeeze(axis)
            for x in (own, other)
        )
        return np.where(np.abs(first - second) <= margin, other, own).astype(own.dtype)


def _root_mean_square(x: np.ndarray) -> float:
    x = x[np.isfinite(x)]
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest and largest * float(np.sqrt(np.mean((x / largest) ** 2)))


# --- Shards ---------------------------------------------------------------------------
#
# A `shard_map` runs without devices: the shards are leading axes of each value, and its
# body runs under `jax.vmap` with one named axis for each axis of the mesh.


def mapped_axes(eqn: Equation) -> Axes:
    """Returns the axes that a `shard_map` maps over."""
    params = eqn.params
    manual = params.get("newly_manual_axes", params.get("manual_axes"))
    sizes = dict(params["mesh"].shape)
    return tuple((name, sizes[name]) for name in sizes if not manual or name in manual)


def split(x: Array, spec: PartitionSpec, axes: Axes) -> np.ndarray:
    """Returns an array as its shards, with one leading axis for each axis of the mesh."""
    sizes, shape, front = dict(axes), [], {}
    named = axes_by_dimension(spec, np.ndim(x))
    for size, its_axes in zip(np.shape(x), named, strict=True):
        for name in its_axes:
            front[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    x = np.reshape(x, shape)
    order = [front[name] for name, _ in axes if name in front]
    rest = [i for i in range(len(shape)) if i not in order]
    x = np.transpose(x, [*order, *rest])
    for i, (name, size) in enumerate(axes):
        if name not in front:
            x = np.repeat(np.expand_dims(x, i), size, axis=i)
    return x


def join(x: Array, spec: PartitionSpec, axes: Axes) -> np.ndarray:
    """Returns the array that has some shards."""
    used = {name for names in axes_by_dimension(spec) for name in names}
    x = np.asarray(x)[tuple(slice(None) if name in used else 0 for name, _ in axes)]
    leading = [name for name, _ in axes if name in used]
    order, shape, dims = [], [], x.ndim - len(leading)
    for i, its_axes in enumerate(axes_by_dimension(spec, dims)):
        fronts = [leading.index(name) for name in its_axes]
        order += [*fronts, len(leading) + i]
        count = math.prod(x.shape[front] for front in fronts)
        shape.append(count * x.shape[len(leading) + i])
    return np.reshape(np.transpose(x, order), shape)


def _run_on_shards(
    eqn: Equation, args: Sequence[Array], changes: Params, axes: Axes
) -> list[Array]:
    name = primitive_name(eqn)
    if name in MARKS:
        return [args[0]]

    def call(_: Array, *xs: Array) -> list[Array]:
        if name == "psum_invariant":
            return [lax.psum(x, eqn.params["axes"]) for x in xs]
        return bind(eqn, xs, **changes)

    # Constants have no shards. The first operand is there for equations without any.
    pairs = zip(args, eqn.invars, strict=True)
    mapped = [0 if np.ndim(x) > atom.aval.ndim else None for x, atom in pairs]
    for axis, size in reversed(axes):
        call = jax.vmap(call, (0, *mapped), axis_name=axis, axis_size=size)
    return list(call(np.zeros([size for _, size in axes]), *args))


# --- NumPy ----------------------------------------------------------------------------
#
# JAX compiles each primitive anew for each shape and dtype, which takes 30 ms or more; a
# run equation by equation would spend nearly all of its time there. Floating numbers are
# computed in f32 and rounded once, as XLA's CPU compiler does it. Sums in fewer than 32
# bits, which XLA rounds in between, are left to JAX.


def run_in_numpy(eqn: Equation, args: Sequence[np.ndarray], dtype: np.dtype) -> Array:
    """Returns the result of an equation, or `None` if JAX must compute it."""
    name, params = primitive_name(eqn), eqn.params
    with np.errstate(all="ignore"):
        if name in _MOVES:
            # A dynamic shape adds operands.
            return _MOVES[name](args[0], params) if len(args) == 1 else None
        if name in _OTHERS:
            return _OTHERS[name](args, params, dtype)
        if any(x.dtype.kind == "c" for x in args):
            return None
        floats = bool(args) and _is_float(args[0].dtype)
        wide = [_wide(x) for x in args]
        rule = _ARITHMETIC.get(name) or (_FLOATING.get(name) if floats else None)
        if rule is not None:
            result = rule(*wide)
        elif name == "integer_pow" and floats:
            result = np.power(wide[0], np.asarray(params["y"], wide[0].dtype))
        elif name in ("reduce_max", "reduce_min") and wide[0].size:
            result = getattr(np, name[-3:])(wide[0], axis=params["axes"])
        elif name == "reduce_sum" and floats and dtype.itemsize >= 4:
            result = np.sum(wide[0], axis=params["axes"])
        else:
            return None
        return np.asarray(result).astype(dtype)


def _is_float(dtype: np.dtype) -> bool:
    # The formats of `ml_dtypes` are of kind "V" or "f".
    return dtype.kind in "fV" and dtype.names is None


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if _is_float(x.dtype) and x.dtype.itemsize < 4 else x


# Of real floating numbers.
_FLOATING: dict[str, Callable[..., np.ndarray]] = {
    **{
        name: getattr(np, name)
        for name in names(
            "abs ceil cos exp exp2 expm1 floor log log1p sign sin sqrt square tanh"
        )
    },
    "div": np.divide,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "neg": np.negative,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
# Of integers and truth values too.
_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _along(
    x: np.ndarray, shape: Sequence[int], axes: Sequence[SupportsIndex]
) -> np.ndarray:
    """Broadcasts an array whose axes are some axes of the result."""
    sizes = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


def _slice(x: np.ndarray, params: Params) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _reshape(x: np.ndarray, params: Params) -> np.ndarray:
    dims = params.get("dimensions")
    return (x if dims is None else x.transpose(dims)).reshape(params["new_sizes"])


_MOVES: dict[str, Callable[[np.ndarray, Params], np.ndarray]] = {
    "broadcast_in_dim": lambda x, params: _along(
        x, params["shape"], params["broadcast_dimensions"]
    ),
    "copy": lambda x, _: x,
    "expand_dims": lambda x, params: np.expand_dims(x, params["dimensions"]),
    "reshape": _reshape,
    "rev": lambda x, params: np.flip(x, params["dimensions"]),
    "slice": _slice,
    "squeeze": lambda x, params: np.squeeze(x, tuple(params["dimensions"])),
    "stop_gradient": lambda x, _: x,
    "transpose": lambda x, params: np.transpose(x, params["permutation"]),
}
Arrays = Sequence[np.ndarray]


def _convert(args: Arrays, _: Params, dtype: np.dtype) -> np.ndarray | None:
    (x,) = args
    # NumPy and XLA differ where a number does not fit into an integer.
    if _is_float(dtype) or not _is_float(x.dtype):
        return x != 0 if dtype.kind == "b" else x.astype(dtype)
    return None


def _select(args: Arrays, _: Params, __: np.dtype) -> np.ndarray | None:
    which, *cases = args
    if which.dtype != bool or len(cases) != 2:
        return None
    return np.where(which, cases[1], cases[0])


def _pad(args: Arrays, params: Params, _: np.dtype) -> np.ndarray | None:
    (x, value), config = args, params["padding_config"]
    if any(low < 0 or high < 0 or inside for low, high, inside in config):
        return None
    widths = [(low, high) for low, high, _ in config]
    return np.pad(x, widths, constant_values=value) if widths else x


def _dynamic_slice(args: Arrays, params: Params, _: np.dtype) -> np.ndarray:
    (x, *starts), sizes = args, params["slice_sizes"]
    # A start beyond the end is moved back, as in `lax.dynamic_slice`.
    ends = [n - size for n, size in zip(x.shape, sizes, strict=True)]
    firsts = [int(np.clip(i, 0, n)) for i, n in zip(starts, ends, strict=True)]
    return x[tuple(slice(i, i + n) for i, n in zip(firsts, sizes, strict=True))]


def _iota(_: Arrays, params: Params, dtype: np.dtype) -> np.ndarray:
    shape, axis = params["shape"], params["dimension"]
    return _along(np.arange(shape[axis]).astype(dtype), shape, [axis])


def _dot_general(args: Arrays, params: Params, dtype: np.dtype) -> np.ndarray | None:
    """Multiplies matrices with sums in f32, as tensor cores do."""
    if not all(_is_float(x.dtype) for x in args):
        return None
    x, y = map(_wide, args)
    ((sum_x, sum_y), (batch_x, batch_y)) = params["dimension_numbers"]
    free_x = [i for i in range(x.ndim) if i not in (*sum_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*sum_y, *batch_y)]
    rows, columns = [x.shape[i] for i in free_x], [y.shape[i] for i in free_y]
    batch, count = [x.shape[i] for i in batch_x], math.prod(x.shape[i] for i in sum_x)
    left = x.transpose(*batch_x, *free_x, *sum_x)
    right = y.transpose(*batch_y, *sum_y, *free_y)
    left = left.reshape(*batch, math.prod(rows), count)
    right = right.reshape(*batch, count, math.prod(columns))
    return np.matmul(left, right).reshape(*batch, *rows, *columns).astype(dtype)


_OTHERS: dict[str, Callable[[Arrays, Params, np.dtype], np.ndarray | None]] = {
    "concatenate": lambda args, params, _: np.concatenate(args, params["dimension"]),
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "iota": _iota,
    "pad": _pad,
    "select_n": _select,
}
