"""What is around a call: settings of the user, marks of mpx, and wrappers of the function.

The half precision is what "half" stands for. Like the marks it is part of the cache key of
`jax.jit`: a function that was compiled for f16 is compiled again after the switch to bf16.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._jax._compat import make_jit_context
from mpx._jax._formats import FORMATS, parse_float_dtype, short_name
from mpx._jax._tree import AxisName, axis_names

# What the user chose. Until then the paper's functions take f16, and `amp`, which has no
# loss scale of its own, bf16.
_half = make_jit_context(None)
# Part of the key, too: what a derivative rule does depends on it, and JAX keeps rules.
in_gradient_function = make_jit_context(False)
gradient_function = functools.partial(in_gradient_function, True)
"""Marks the code inside as a gradient that mpx takes, with a loss scaling."""


def _parse_half(datatype: DTypeLike) -> np.dtype:
    with contextlib.suppress(ValueError):
        if (dtype := parse_float_dtype(datatype)).itemsize == 2:
            return dtype
    raise ValueError(
        f"Half precision is float16 or bfloat16, but {datatype!r} was given. Pass "
        '`jnp.float16`, `jnp.bfloat16`, "float16" or "bfloat16".'
    )


def set_half_precision_datatype(datatype: DTypeLike | None) -> None:
    """Sets the dtype that "half precision" stands for, everywhere in this process.

    Functions that were already compiled follow: they are traced anew when called.
    Prefer a `Policy`, which travels with the code that needs it.

    Args:
        datatype: f16 or bf16, as a dtype or as a name; `None` restores the default.

    Examples:
        >>> set_half_precision_datatype("bfloat16")
        >>> half_precision_datatype()
        dtype(bfloat16)
        >>> set_half_precision_datatype(None)
    """
    _half.set_global(None if datatype is None else _parse_half(datatype))


def half_precision_datatype() -> np.dtype:
    """Returns the dtype that "half precision" stands for; float16 unless changed.

    Examples:
        >>> half_precision_datatype() == jnp.float16
        True
    """
    return _half.value or np.dtype(np.float16)


def chosen_half_precision() -> np.dtype | None:
    """Returns the half-precision dtype that the user chose, `None` if none was."""
    return _half.value


def half_precision(datatype: DTypeLike) -> contextlib.AbstractContextManager[object]:
    """Sets the half-precision dtype inside a `with` block, in this thread only.

    Args:
        datatype: f16 or bf16, as a dtype or as a name.

    Examples:
        >>> with half_precision("bf16"):
        ...     print(half_precision_datatype())
        bfloat16
    """
    return _half(_parse_half(datatype))


CONSTANTS: dict[str, float | None] = {
    "BFLOAT16_MAX": FORMATS["bf16"].max,
    "FLOAT16_MAX": FORMATS["f16"].max,
    "HALF_PRECISION_DATATYPE": None,
}


def constant(name: str) -> Array | np.dtype:
    """Returns a constant of the paper: made at import, it would start a JAX backend."""
    if name not in CONSTANTS:
        raise AttributeError(f"module 'mpx' has no attribute {name!r}")
    number = CONSTANTS[name]
    return half_precision_datatype() if number is None else jnp.float32(number)


# --- The dtype in which gradients are summed over devices -----------------------------

COMPUTE = "compute"
"""Sums gradients in the dtype of the matmul that makes them."""
F32 = np.dtype(np.float32)
Reduce = np.dtype | str | None

reducing_in = make_jit_context(None)
"""What `amp` without an option of its own does in the code inside: a `Reduce`."""
_plain = make_jit_context(False)
plain_matmuls = functools.partial(_plain, True)
"""Makes `amp` write its matmuls as plain ones, for a transformation around it."""
_around = make_jit_context(False)
under_amp = functools.partial(_around, True)
"""Says that what is traced is a function under `amp`."""
AMP_SCOPE = "mpx.amp"


def scope_of_amp() -> contextlib.AbstractContextManager[object]:
    """Marks what `amp` writes, for a transformation around it: it is decided."""
    is_inside = _plain.value or _around.value
    return jax.named_scope(AMP_SCOPE) if is_inside else contextlib.nullcontext()


in_shards = make_jit_context(False)
over_shards = functools.partial(in_shards, True)
"""Marks a `jax.vmap` over the shards of a batch, each on its own devices."""


def parse_reduce(dtype: DTypeLike | None) -> Reduce:
    """Returns what a user may pass for `reduce_dtype`: a dtype, "compute" or `None`."""
    if dtype is None or (isinstance(dtype, str) and dtype == COMPUTE):
        return dtype
    return parse_float_dtype(dtype, "reduce_dtype")


def amp_reduce(own: Reduce) -> Reduce:
    """Returns what `amp` does, whose own option comes before that of the gradient."""
    if _plain.value:
        return COMPUTE
    return reducing_in.value if own is None else own


def weight_grad_dtype(choice: Reduce, weight: Array, compute: np.dtype) -> np.dtype:
    """Returns the dtype in which the matmul for a weight's gradient gives its result.

    XLA sums over devices what that matmul returns, before any cast. `None` is f32 if the
    weight is on several devices, else the compute dtype: nothing is summed over devices.
    """
    if choice is None:
        return F32 if on_several_devices(weight) else compute
    return compute if choice == COMPUTE else np.dtype(choice)


def shards_of(axis_name: AxisName | None, tree: PyTree) -> NamedSharding | None:
    """Returns how a batch is sharded over an axis of a mesh, if that is what is named."""
    axes = axis_names(axis_name)
    if not axes:
        return None
    with contextlib.suppress(NameError):
        lax.axis_size(axes)
        return None  # a transformation has bound them
    meshes = [jax.sharding.get_abstract_mesh()]
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    meshes += [jax.typeof(x).sharding.mesh for x in arrays]
    found = [mesh for mesh in meshes if {*axes} <= {*mesh.axis_names}]
    if not found:
        raise ValueError(
            f"`axis_name={axis_name!r}` names no axis: neither a `jax.shard_map` or "
            "`jax.vmap` around the call nor the mesh of the arguments has it. Use the name "
            "of an axis of the mesh over which the batch is sharded, and put the arguments "
            "on that mesh or call inside `with jax.set_mesh(mesh):`."
        )
    kinds = dict(zip(found[0].axis_names, found[0].axis_types, strict=True))
    if any(kinds[name] != AxisType.Auto for name in axes):
        raise ValueError(
            f"`axis_name={axis_name!r}` is an explicit axis of the mesh, for which the "
            "batch cannot be split without changing the function. Call it inside "
            "`jax.shard_map`, or make the axis automatic: "
            "`jax.make_mesh(..., axis_types=(AxisType.Auto,))`."
        )
    return NamedSharding(found[0], PartitionSpec(axes))


def on_several_devices(x: Array) -> bool:
    """Returns whether XLA may sum gradients of an array over devices."""
    mesh = jax.typeof(x).sharding.mesh
    return mesh.size > 1 and not mesh.are_all_axes_manual


def automatic_size(x: Array) -> int:
    """Returns the number of devices over which XLA may shard an array; else 1."""
    mesh = jax.typeof(x).sharding.mesh
    automatic = all(kind == AxisType.Auto for kind in mesh.axis_types or ())
    return mesh.size if automatic and mesh.axis_names else 1


# --- Wrapped functions and their signatures -------------------------------------------


def layers(func: PyTree) -> Iterator[PyTree]:
    """Yields a function and what it wraps (jit, checkpoint, partial), inwards."""
    seen: set[int] = set()
    while func is not None and id(func) not in seen:
        seen.add(id(func))
        yield func
        is_partial = isinstance(func, functools.partial | eqx.Partial)
        func = func.func if is_partial else getattr(func, "__wrapped__", None)


def is_amp(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `amp`, and so casts by itself."""
    return autocast_of(func) is not None


def autocast_of(func: Callable[..., PyTree]) -> Callable[[], PyTree] | None:
    """Returns what makes the visitor of a function under `amp`, `None` of others."""
    found = (getattr(layer, "mpx_autocast", None) for layer in layers(func))
    return next(filter(None, found), None)


def is_fp8(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `fp8`."""
    return any(hasattr(layer, "mpx_has_scales") for layer in layers(func))


arguments_cast_to = make_jit_context(F32)
"""Marks the time in which a function runs on arguments that a policy has cast."""


def refuse_cast_arguments() -> None:
    """Raises if `amp` is called where a policy has cast the arguments to 16 bits."""
    if (dtype := arguments_cast_to.value).itemsize == 2:
        raise ValueError(
            "`amp` was called inside a function whose arguments a policy casts to "
            f"{short_name(dtype)}, so that both would round them. Put the whole loss under "
            "`amp`, `mpx.value_and_grad(mpx.amp(loss))`; or pass "
            '`policy="f32"`, so that only `amp` casts.'
        )


def has_scales(func: Callable[..., PyTree]) -> bool:
    """Returns whether a function is under `fp8` with delays: an `Fp8State` comes first."""
    return any(getattr(layer, "mpx_has_scales", False) for layer in layers(func))


def take_scales(
    func: Callable[..., PyTree], args: Sequence[PyTree]
) -> tuple[PyTree, Sequence[PyTree], Callable[..., PyTree]]:
    """Splits off the `Fp8State` that a function with delayed scaling takes first.

    The function that is returned takes the other arguments.
    """
    delayed = [x for x in layers(func) if getattr(x, "mpx_has_scales", False)]
    if not delayed:
        return None, args, func
    if not args or not hasattr(args[0], "amaxes"):
        found = type(args[0]).__name__ if args else "nothing"
        raise TypeError(
            "A function under `fp8` with `DelayedScaling` takes an `Fp8State` after the "
            f"loss scaling, but {found} was given. Make one with `.init(*args)`."
        )
    return args[0], args[1:], delayed[-1].func


def argument_names(func: Callable[..., PyTree], count: int) -> list[str]:
    """Returns the names of the positional parameters, for paths in rules and errors."""
    parameters = _parameters(func)
    taken = {item.name for item in parameters}
    positional = ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
    names = [item.name for item in parameters if item.kind.name in positional][:count]
    return names + [_unused(f"arg{i}", taken) for i in range(len(names), count)]


def _parameters(func: Callable[..., PyTree]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return []


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def signature_after(first: str, func: Callable[..., PyTree]) -> inspect.Signature:
    """Returns the signature of `func` with one more argument before the others."""
    parameters = _parameters(func) or [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
    name = _unused(first, {item.name for item in parameters})
    before = inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)
    return inspect.Signature([before, *parameters])


def hide_signature(wrapper: Callable[..., PyTree]) -> None:
    """Undoes `functools.wraps` where the wrapper takes one argument more."""
    for name in ("__wrapped__", "__signature__"):
        vars(wrapper).pop(name, None)
