"""Single equations on concrete arrays: as written, in f32, and on shards.

The f32 version of an equation, its shadow, computes the same thing with every floating
type narrower than f32 replaced by f32. As written, an equation rounds the operands and the
results of its shadow; only sums in fewer than 32 bits are left to XLA.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mpx._jax._compat import bind, eval_equation, primitive_name
from mpx._jax._formats import FORMATS, Format, short_name
from mpx._jax._sharding import axes_of
from mpx._program._primitives import CASTS
from mpx._program._queries import MATMULS, SHAPE_ONLY, Equation, has_body, names
from mpx.inspect._dtypes import is_float, is_low

if TYPE_CHECKING:
    Numbers = np.ndarray
else:  # NumPy makes scalars of arrays without axes
    Numbers = np.ndarray | np.generic

Array = Any
"""An array of NumPy or of JAX."""
Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""
F32 = np.dtype(np.float32)
# They change only what JAX knows of a value.
_MARKS = names("pvary pcast sharding_constraint layout_constraint reshard mesh_cast")
# They read the bits of their operands, or hand them to code that expects their dtypes.
_OPAQUE = names("bitcast_convert_type nextafter pallas_call ffi_call custom_call")
_SUMS = names(
    "reduce_sum reduce_prod cumsum cumprod cumlogsumexp scatter-add scatter-mul "
    "reduce_window_sum select_and_scatter_add"
)
# Their results are numbers of their operands.
PICKS = SHAPE_ONLY.union(
    names(
        "select_n gather dynamic_slice dynamic_update_slice concatenate pad stop_gradient "
        "copy_p optimization_barrier name sort max min reduce_max reduce_min clamp cummax "
        "cummin split unstack reduce_window_max select_and_gather_add"
    )
)
_COMPARISONS = names("eq ne lt le gt ge")
_ROUNDINGS = 16
"""Numbers are nearly equal if they differ by this many roundings of their tensors."""
# Fixed point: seven significant bits below the largest number.
_INT8 = Format("int8", 8, 0, 6, 127.0, 1.0, 1.0, np.dtype(np.int8))


def low_format(eqn: Equation) -> Format | None:
    """Returns the coarsest format narrower than f32 among operands and results."""
    if is_rounding(eqn):
        return FORMATS.get(short_name(np.dtype(eqn.outvars[0].aval.dtype)), _INT8)
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    found = [_format_of(aval) for aval in avals if is_low(aval)]
    if primitive_name(eqn) in MATMULS and avals[0].dtype == np.int8:
        found.append(_INT8)
    return max(found, key=lambda x: x.eps, default=None)


def is_rounding(eqn: Equation) -> bool:
    """Returns whether `fp8` rounds to a format of few bits here, by a named function."""
    # JAX splits off the constants of a call in a scan, into one without operands.
    return eqn.params.get("name") in ("mpx_round", "mpx_clip") and bool(eqn.invars)


def _is_bytes(eqn: Equation) -> bool:
    """Returns whether numbers of few bits become bytes, as between the passes of `fp8`."""
    if primitive_name(eqn) != "bitcast_convert_type":
        return False
    avals = eqn.invars[0].aval, eqn.outvars[0].aval
    return any(is_low(x) and x.dtype.itemsize == 1 for x in avals)


def _format_of(x: Array) -> Format:
    return FORMATS.get(short_name(np.dtype(x.dtype)), FORMATS["f32"])


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


def as_operand(x: Array, aval: Any) -> Array:
    """Rounds a floating array to the dtype of a variable."""
    if not (is_float(aval) and is_float(x)) or x.dtype == aval.dtype:
        return x
    with np.errstate(all="ignore"):
        return np.asarray(to_host(x)).astype(aval.dtype)


def widened(x: Array) -> Array:
    """Returns an array in f32, if it is floating and narrower."""
    return np.asarray(to_host(x)).astype(F32) if is_low(x) else x


# --- Equations ------------------------------------------------------------------------


def run_as_written(
    eqn: Equation, args: Sequence[Array], axes: Axes = (), *, in_turn: bool = False
) -> list[Array]:
    """Runs an equation on arrays, cast to its own dtypes.

    `in_turn` rounds a sum in low precision after each term, as XLA does in some fusions.
    """
    name, pairs = primitive_name(eqn), zip(args, eqn.invars, strict=True)
    operands = [as_operand(x, atom.aval) for x, atom in pairs]
    if name in MATMULS and eqn.invars[0].aval.dtype.itemsize == 1:
        operands = list(args)  # codes, which are rounded where they are made
    if in_turn and name == "reduce_sum" and is_low(operands[0]):
        return [_added_in_turn(operands[0], eqn.params["axes"])]
    if name in _SUMS and is_low(eqn.outvars[0].aval):
        # In which order and with how many digits it adds up depends on the device.
        with jax.default_device(jax.local_devices()[0]):
            return _bind(eqn, operands, axes)
    if _is_opaque(eqn):
        outs = _bind(eqn, operands, axes) if axes else eval_equation(eqn, operands)
        return [to_host(x) for x in outs]
    outs = _wide(eqn, [widened(x) for x in operands], axes)
    return [as_operand(x, y.aval) for x, y in zip(outs, eqn.outvars, strict=True)]


def run_in_f32(eqn: Equation, args: Sequence[Array], axes: Axes = ()) -> list[Array]:
    """Runs the shadow of an equation on arrays; its results are f32 or wider."""
    is_same = _is_bytes(eqn) and is_float(args[0])
    if is_same or primitive_name(eqn) == "reduce_precision" or is_rounding(eqn):
        return [widened(args[0])]
    if _is_opaque(eqn):
        return [widened(x) for x in run_as_written(eqn, args, axes)]
    return _wide(eqn, [widened(x) for x in args], axes)


def _is_opaque(eqn: Equation) -> bool:
    name = primitive_name(eqn)
    known = name.startswith("scatter")  # its jaxpr only combines numbers
    return name in _OPAQUE or "callback" in name or (has_body(eqn) and not known)


def _wide(eqn: Equation, args: Sequence[Array], axes: Axes) -> list[Array]:
    """Runs an equation on arrays of f32 or wider, with such results."""
    name = primitive_name(eqn)
    if name in _MARKS:
        return list(args)
    if not axes and (part := _sliced(eqn, args)) is not None:
        return [part]
    changes = f32_params(eqn)
    is_integer = name == "dot_general" and not is_float(eqn.outvars[0].aval)
    if is_integer and any(map(is_float, args)):
        # A product of int8 numbers, which are not rounded in f32.
        args = [np.asarray(x, F32) for x in args]
        changes["preferred_element_type"] = F32
    try:
        return [widened(x) for x in _bind(eqn, args, axes, **changes)]
    except (TypeError, ValueError, NotImplementedError):
        # A primitive of someone else that takes only the dtypes it was traced with.
        pairs = zip(args, eqn.invars, strict=True)
        operands = [as_operand(x, atom.aval) for x, atom in pairs]
        return [widened(x) for x in _bind(eqn, operands, axes)]


def f32_params(
    eqn: Equation, is_narrow: Callable[[object], bool] = is_low
) -> dict[str, Any]:
    """Returns the parameters that change for an equation to compute in f32."""
    changes: dict[str, Any] = {
        key: F32
        for key, x in eqn.params.items()
        if isinstance(x, np.dtype) and is_narrow(np.empty((), x))
    }
    if primitive_name(eqn) in MATMULS and "precision" in eqn.params:
        changes["precision"] = lax.Precision.HIGHEST  # or GPUs round to TF32
    return changes


def _sliced(eqn: Equation, args: Sequence[Array]) -> Array | None:
    """Slices and pads on the host: JAX would compile one for each step of a Python loop."""
    name, params = primitive_name(eqn), eqn.params
    if name == "slice":
        strides = params["strides"] or (1,) * len(params["start_indices"])
        ends = params["start_indices"], params["limit_indices"], strides
        return args[0][tuple(slice(*bounds) for bounds in zip(*ends, strict=True))]
    config = params.get("padding_config", ())
    if name == "pad" and all(a >= 0 and b >= 0 and not c for a, b, c in config):
        widths = [(before, after) for before, after, _ in config]
        return np.pad(args[0], widths, constant_values=args[1]) if widths else args[0]
    return None


def _bind(
    eqn: Equation, args: Sequence[Array], axes: Axes, **changes: Any
) -> list[Array]:
    """Runs an equation by JAX; each axis of the mesh is a leading axis of the operands."""
    name = primitive_name(eqn)
    places = ("sharding", "out_sharding")
    changes |= {key: None for key in places if key in eqn.params}

    def call(_: Array, *xs: Array) -> list[Array]:
        if name == "psum_invariant":
            return [lax.psum(x, eqn.params["axes"]) for x in xs]
        if name.startswith("scatter"):  # its jaxpr has fixed dtypes
            keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            func = getattr(lax, name.replace("-", "_"))
            return [func(*map(jnp.asarray, xs), **{k: eqn.params[k] for k in keys})]
        return bind(eqn, xs, **changes)

    # Constants have no shards. The first operand is there for equations without any.
    pairs = zip(args, eqn.invars, strict=True)
    mapped = [0 if np.ndim(x) > atom.aval.ndim else None for x, atom in pairs]
    for axis, size in reversed(axes):
        call = jax.vmap(call, (0, *mapped), axis_name=axis, axis_size=size)
    outs = call(np.zeros([size for _, size in axes]), *args)
    return [to_host(x) for x in outs]


def _added_in_turn(x: Array, axes: Sequence[int]) -> np.ndarray:
    x = jnp.moveaxis(jnp.asarray(x), axes, range(len(axes)))
    rows = x.reshape(-1, *x.shape[len(axes) :])
    total = jnp.zeros(rows.shape[1:], x.dtype)
    return np.asarray(lax.scan(lambda a, row: (a + row, None), total, rows)[0])


def only_moves(eqn: Equation) -> bool:
    """Returns whether an equation returns numbers of its operands, none of them rounded."""
    if primitive_name(eqn) not in CASTS:
        return primitive_name(eqn) in PICKS or _is_bytes(eqn)
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if not is_float(before) or not is_float(after):
        return False
    old, new = _format_of(before), _format_of(after)
    return new.mantissa >= old.mantissa and new.exponent >= old.exponent


# --- Comparisons of nearly equal numbers ----------------------------------------------
#
# Each rounding turns over a few decisions, as of a rectifier, and each of them changes the
# gradient by much more than the rounding. The shadow decides such ties as the program does,
# and so do the runs that are compared with the shadow.


def is_decision(eqn: Equation) -> bool:
    """Returns whether an equation compares floating numbers."""
    return primitive_name(eqn) in _COMPARISONS and is_float(eqn.invars[0].aval)


def settled(
    args: Sequence[Array], own: Array, other: np.ndarray, eps: float
) -> np.ndarray:
    """Returns a decision, with that of another run where the numbers are nearly equal."""
    x, y = (np.asarray(to_host(x)).astype(np.float32) for x in args)
    if all(np.array_equal(z, np.round(z)) for z in (x, y)):
        return np.asarray(own)  # they are counted or masks, and exact
    sizes = [z[np.isfinite(z)].astype(np.float64) for z in (x, y)]  # root mean squares
    margin = _ROUNDINGS * eps * sum(np.sqrt(np.mean(z**2)) for z in sizes if z.size)
    with np.errstate(all="ignore"):
        return np.where(np.abs(x - y) <= margin, other, own)


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
    x, sizes, shape, places = np.asarray(x), dict(axes), list[int](), dict[str, int]()
    for size, named in zip(x.shape, axes_of(spec, x.ndim), strict=True):
        for name in named:
            places[name] = len(shape)
            shape.append(sizes[name])
            size //= sizes[name]
        shape.append(size)
    sharded = [places[name] for name in sizes if name in places]
    x = np.moveaxis(x.reshape(shape), sharded, range(len(sharded)))
    x = np.expand_dims(x, [i for i, name in enumerate(sizes) if name not in places])
    return np.broadcast_to(x, (*sizes.values(), *x.shape[len(sizes) :]))


def join(x: Array, spec: PartitionSpec, axes: Axes) -> np.ndarray:
    """Returns the array that has some shards."""
    x, sizes = np.asarray(x), dict(axes)
    pairs = zip(x.shape[len(axes) :], axes_of(spec, x.ndim - len(axes)), strict=True)
    shape = [n * math.prod(sizes[axis] for axis in named) for n, named in pairs]
    whole = np.empty(shape, x.dtype)
    whole.reshape(-1)[split(np.arange(whole.size).reshape(shape), spec, axes)] = x
    return whole
