"""Single equations on concrete arrays: as written, and in f32.

The f32 version of an equation, its shadow, computes the same thing with every floating
type narrower than f32 replaced by f32.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpx._jax._compat import bind, eval_equation, primitive_name
from mpx._jax._formats import FORMATS, Format, short_name
from mpx._program._queries import MATMULS, SHAPE_ONLY, Equation, has_body, names
from mpx._program._run import Array, on_host
from mpx._program._shards import MARKS, Axes, run_on_shards
from mpx.inspect._dtypes import is_float, is_low
from mpx.inspect._host import run_on_host

F32 = np.dtype(np.float32)
# They read the bits of their operands, or hand them to code that expects their dtypes.
_OPAQUE = (
    "bitcast_convert_type",
    "nextafter",
    "pallas_call",
    "ffi_call",
    "custom_call",
)
_SUMS = frozenset(
    names(
        "reduce_sum reduce_prod cumsum cumprod cumlogsumexp scatter-add scatter-mul "
        "reduce_window_sum select_and_scatter_add"
    )
)


def format_of(x: Any) -> Format:
    """Returns the format of a floating array or type; f32 for one without a name."""
    return FORMATS.get(short_name(np.dtype(x.dtype)), FORMATS["f32"])


def low_format(eqn: Equation) -> Format | None:
    """Returns the coarsest format narrower than f32 among operands and results."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    found = [format_of(aval) for aval in avals if is_low(aval)]
    return max(found, key=lambda x: x.eps, default=None)


def cast(x: Array, dtype: np.dtype) -> Array:
    """Rounds an array to a dtype; beyond the range it becomes infinite or nan."""
    if x.dtype == dtype:
        return x
    x = on_host(x)
    if isinstance(x, np.ndarray | np.generic):
        with np.errstate(all="ignore"):
            return np.asarray(x).astype(dtype)
    return lax.convert_element_type(x, dtype)


def to_host(x: Array) -> Array:
    """Copies an array to the CPU, as one of NumPy if it can be one."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        # Other processes hold parts of it; each of them is here, too.
        if not x.is_fully_replicated:
            whole = NamedSharding(getattr(x.sharding, "mesh"), P())  # noqa: B009
            x = jax.jit(lambda x: x, out_shardings=whole)(x)
        x = x.addressable_data(0)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.device_put(x, jax.local_devices(backend="cpu")[0])
    return np.asarray(x)


def widened(x: Array) -> Array:
    """Returns an array in f32, if it is floating and narrower."""
    return cast(x, F32) if is_low(x) else x


def as_operand(x: Array, aval: Any) -> Array:
    """Returns a floating array in the dtype that an equation takes."""
    return cast(x, np.dtype(aval.dtype)) if is_float(aval) and is_float(x) else x


def run_as_written(
    eqn: Equation, args: Sequence[Array], axes: Axes = (), *, in_turn: bool = False
) -> list[Array]:
    """Runs an equation on arrays, cast to its own dtypes.

    Args:
        eqn: The equation.
        args: The operands.
        axes: The axes of the `shard_map` around it.
        in_turn: Whether a sum in low precision is rounded after each term. XLA does that
            or not, depending on the shape and on what it fuses the sum with.
    """
    pairs = zip(args, eqn.invars, strict=True)
    operands = [as_operand(x, atom.aval) for x, atom in pairs]
    if primitive_name(eqn) in MARKS:
        return operands
    if in_turn and primitive_name(eqn) == "reduce_sum" and is_low(operands[0]):
        return [_added_in_turn(operands[0], eqn.params["axes"])]
    if primitive_name(eqn) in _SUMS and is_low(eqn.outvars[0].aval) and not axes:
        # In which order and with how many digits it adds up depends on the device.
        with jax.default_device(jax.local_devices()[0]):
            is_scatter = primitive_name(eqn).startswith("scatter")
            run = _scatter if is_scatter else functools.partial(bind, **_local(eqn))
            return [to_host(x) for x in run(eqn, operands)]
    if any(callable(value) for value in eqn.params.values()):
        return eval_equation(eqn, operands)
    return _run(eqn, operands, eqn.outvars[0].aval.dtype, {}, axes)


def _local(eqn: Equation) -> dict[str, Any]:
    """Returns the parameters that place a result on devices, without a place."""
    return {key: None for key in ("sharding", "out_sharding") if key in eqn.params}


def _added_in_turn(x: Array, axes: Sequence[int]) -> np.ndarray:
    x = jnp.moveaxis(jnp.asarray(x), axes, range(len(axes)))
    rows = x.reshape(-1, *x.shape[len(axes) :])
    total = jnp.zeros(rows.shape[1:], x.dtype)
    return np.asarray(lax.scan(lambda a, row: (a + row, None), total, rows)[0])


def _run(
    eqn: Equation,
    args: Sequence[Array],
    dtype: Any,
    changes: dict[str, Any],
    axes: Axes,
) -> list[Array]:
    """Runs an equation whose first result has a given dtype."""
    if axes:
        return run_on_shards(eqn, args, changes, axes)
    hosted = [on_host(x) for x in args]
    if all(isinstance(x, np.ndarray | np.generic) for x in hosted):
        result = run_on_host(eqn, hosted, dtype)
        if result is not None:
            return [np.asarray(result)]
    return bind(eqn, args, **_local(eqn), **changes)


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


def _scatter(eqn: Equation, args: Sequence[Array]) -> list[Array]:
    """Runs a scatter on other dtypes: its jaxpr, which combines numbers, has fixed ones."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    func = getattr(lax, primitive_name(eqn).replace("-", "_"))
    return [func(*map(jnp.asarray, args), **{key: eqn.params[key] for key in names})]


def only_moves(eqn: Equation) -> bool:
    """Returns whether an equation returns numbers of its operands, none of them rounded."""
    if primitive_name(eqn) != "convert_element_type":
        return primitive_name(eqn) in SHAPE_ONLY or primitive_name(eqn) in _PICKS
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if not is_float(before) or not is_float(after):
        return False
    old, new = format_of(before), format_of(after)
    return new.mantissa >= old.mantissa and new.exponent >= old.exponent


_PICKS = frozenset(
    names(
        "select_n gather dynamic_slice dynamic_update_slice concatenate pad stop_gradient "
        "copy_p optimization_barrier name sort reduce_max reduce_min max min"
    )
)


def relative_norm(error: np.ndarray, value: np.ndarray) -> float:
    """Returns the 2-norm of an error relative to that of a value."""
    scale = float(np.max(np.abs(value), initial=0.0))
    if scale == 0:
        return 0.0 if not np.any(error) else math.inf
    # Scaled first: squares of small numbers vanish, those of large ones overflow.
    a, b = error.astype(np.float64) / scale, value.astype(np.float64) / scale
    return float(np.linalg.norm(a) / np.linalg.norm(b))
