"""Versions: all that differs between those of JAX, or that JAX does not promise to keep.

`mpx._jax._private` looks names up; what is missing has a fallback here.
"""

import contextlib
import dis
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from mpx._jax._private import (
    ClosedJaxpr,
    Jaxpr,
    Tracer,
    concrete_or_error,
    current_name_stack,
    private,
    user_context,
)
from mpx._jax._private import Literal as Literal
from mpx._jax._private import Primitive as Primitive
from mpx._jax._private import Var as Var
from mpx._jax._private import eval_jaxpr as eval_jaxpr
from mpx._jax._warn import warn

try:
    __version__ = version("mpx-jax")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the leading integers of a version string: `0.12.0.1` -> (0, 12, 0, 1)."""
    digits = itertools.takewhile(str.isdigit, version.split("."))
    return tuple(map(int, digits))


def check_version(installed: str) -> None:
    """Rejects a JAX that is too old, and one that is wrong on aarch64 CPUs: 0.10.2."""
    if version_tuple(installed) < (0, 10, 1) or version_tuple(installed) == (0, 10, 2):
        raise ImportError(
            f"mpx needs jax>=0.10.1,!=0.10.2, but jax {installed} is installed. "
            'Run `pip install -U "jax>=0.10.1,!=0.10.2"`.'
        )


def check_neighbour(name: str = "mixed_precision_for_JAX") -> None:
    """Warns if the paper's own package, which has the same folder, is installed as well."""
    with contextlib.suppress(PackageNotFoundError):
        warn(
            f"{name} {version(name)} is installed beside mpx-jax, and both put their files "
            "into a folder called `mpx`. Run `pip uninstall -y mixed_precision_for_JAX "
            "mpx-jax`, then `pip install mpx-jax`: it has the functions of that package, too."
        )


check_version(jax.__version__)
check_neighbour()
# From then on Pallas takes the layouts of our grouped matmuls.
HAS_MOSAIC = version_tuple(jax.__version__) >= (0, 11)

# --- Tracers --------------------------------------------------------------------------

_ARGUMENT = jax.ShapeDtypeStruct((1,), np.float32)


@functools.cache
def tracer_type(transform: str) -> type:
    """Returns the type of the values that a function sees under a transformation."""
    seen: list[type] = []

    def see(x: jax.Array) -> jax.Array:
        seen.append(type(x))
        return x

    calls = {
        "grad": lambda x: jax.vjp(see, x)[0],
        "jvp": lambda x: jax.jvp(see, (x,), (x,))[0],
        "vmap": jax.vmap(see),
    }
    jax.eval_shape(calls[transform], _ARGUMENT)
    return seen[0]


@functools.cache
def unspecified_sharding() -> Any:
    """Returns what a jit equation holds for an argument without a sharding."""
    jaxpr = jax.make_jaxpr(jax.jit(lambda x: x))(_ARGUMENT)
    return jaxpr.eqns[0].params["in_shardings"][0]


def is_tracer(x: object) -> bool:
    """Returns whether `x` is an abstract value inside a JAX transformation."""
    return isinstance(x, Tracer)


def is_abstract(values: Sequence[PyTree]) -> bool:
    """Returns whether one of the values is known only when a traced program runs."""
    try:
        for x in filter(is_tracer, values):
            concrete_or_error(None, x)
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def variable_of(x: object) -> Any:
    """Returns the variable that a tracer of `jax.make_jaxpr` is in the jaxpr."""
    found = getattr(x, "val", None)
    is_variable = hasattr(found, "aval") and not isinstance(found, jax.Array)
    return found if is_variable else None


def is_batched(x: object) -> bool:
    """Returns whether `x` is a value inside a `jax.vmap`."""
    return isinstance(x, tracer_type("vmap"))


def is_differentiated(x: object) -> bool:
    """Returns whether `x` is seen to be differentiated: no `jax.jit` may lie between."""
    while isinstance(x, tracer_type("vmap")):
        x = getattr(x, "val", None)
    return isinstance(x, (tracer_type("grad"), tracer_type("jvp")))


def unpacking_targets() -> int | None:
    """Returns how many variables `a, b = object`, which calls `__iter__`, has."""
    frame = sys._getframe(2)
    operation, count = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return count if operation == dis.opmap["UNPACK_SEQUENCE"] else None


# A process-wide setting with a default that is part of the cache key of `jax.jit`.
make_jit_context = jax.make_user_context

# Those of modules that load when they are first used. `import mpx` makes them too: one made
# while a step is traced changes the key, and the next call would compile the step again.
amp_recording = make_jit_context(None)  # what `mpx.inspect` wants to know of a trace
assumed_gpu = make_jit_context(None)  # the compute capability to trace for

# --- Values that vary between devices -------------------------------------------------


def manual_axes() -> frozenset[str]:
    """Returns the names of axes of devices, as of `jax.shard_map`, not of a `jax.vmap`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which a value differs between devices."""
    if not manual_axes():
        return frozenset()
    axis_type = getattr(aval, "manual_axis_type", None)
    return getattr(axis_type, "varying", None) or frozenset()


def as_varying(x: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Marks `x` as differing between the devices of manual mesh axes.

    Under `jax.shard_map` the derivative with respect to a replicated value would be
    summed over the devices. For the axis of a `vmap` nothing is tracked.
    """
    names = manual_axes() - varying_axes(jax.typeof(x))
    missing = tuple(name for name in axis_names if name in names)
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_like(x: Any, struct: Any) -> Any:
    """Marks `x` as differing between devices where `struct` says its successor does."""
    return as_varying(x, sorted(varying_axes(struct)))


def as_unvarying(x: jax.Array) -> jax.Array:
    """Hides that `x` differs between devices: no Mosaic kernel takes such references."""
    return _as_unvarying().bind(x) if varying_axes(jax.typeof(x)) else x


@functools.cache
def _as_unvarying() -> Any:
    primitive = Primitive("as_unvarying")
    primitive.def_abstract_eval(
        lambda aval: aval.update(manual_axis_type=type(aval.manual_axis_type)())
    )
    private("grouped").register_lowering(primitive, lambda ctx, x: [x])
    return primitive


def struct_like(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of another shape that varies as `x` does."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    varies = {"manual_axis_type": aval.manual_axis_type} if varying_axes(aval) else {}
    return jax.ShapeDtypeStruct(shape, x.dtype, **varies)


def undifferentiable(message: str) -> Callable[[PyTree], PyTree]:
    """Returns an identity that raises where JAX would differentiate wrongly."""

    @jax.custom_jvp
    def same(tree: PyTree) -> PyTree:
        return tree

    @same.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> NoReturn:
        raise NotImplementedError(message)

    return same


# --- Jaxprs ---------------------------------------------------------------------------

JAXPRS = (Jaxpr, ClosedJaxpr)
"""The types of jaxprs, open or closed."""


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants; from JAX 0.11 on the two kinds are one."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def hi_jaxpr(eqn: Any) -> Any:
    """Returns the jaxpr of a high-level primitive of JAX 0.12; else `None`."""
    primitive = eqn.params.get("_prim")
    if eqn.primitive.name != "call_hi_primitive" or not hasattr(primitive, "expand"):
        return None
    return _expanded(primitive, tuple(var.aval for var in eqn.invars))


@functools.lru_cache(maxsize=1024)
def _expanded(primitive: Any, avals: tuple[Any, ...]) -> Any:
    expand, structure = primitive.expand, primitive.in_tree
    call = lambda *args: jax.tree.leaves(expand(*structure.unflatten(args)))  # noqa: E731
    return jax.make_jaxpr(call)(*avals)


def hi_remat(eqn: Any) -> dict[str, Any] | None:
    """Returns the options of `jax.checkpoint` if a high-level primitive is one."""
    params = eqn.params["_prim"].params
    names = ("policy", "prevent_cse")
    return {x: params[x] for x in names} if params.keys() >= {*names} else None


def hi_has_tangents(eqn: Any) -> bool:
    """Returns whether a high-level primitive has a forward-mode derivative."""
    primitive = eqn.params["_prim"]
    kind = type(primitive)
    return "bwd" not in primitive.params and kind.jvp is not kind.__mro__[-2].jvp


def has_linearization(eqn: Any) -> bool:
    """Returns whether JAX linearizes an equation: some high-level ones have a vjp only."""
    kind = type(eqn.params.get("_prim"))
    return not hasattr(kind, "lin") or kind.lin is not kind.__mro__[-2].lin


def constants_as_inputs(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr that takes its constants as leading inputs, and the constants."""
    body, consts = open_jaxpr(jaxpr)
    if not consts:
        return body, ()
    invars = [*body.constvars, *body.invars]
    info = body.debug_info.with_unknown_names()
    return Jaxpr((), invars, body.outvars, body.eqns, body.effects, info), consts


@functools.cache
def _no_debug_info() -> Any:
    """Returns the origin of a jaxpr that no user wrote; JAX warns of one without."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()


def as_function(jaxpr: Any) -> Any:
    """Returns a closed jaxpr as a function of flat arguments."""
    return functools.partial(eval_jaxpr, *open_jaxpr(jaxpr))


def eval_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Runs one equation unchanged, in the scopes of `source_context`.

    How its parameters turn into arguments of `bind` is private, and changes.
    """
    if _traced_once(eqn, eqn.params, args) is not None:
        return bind(eqn, args)
    pairs = zip(eqn.invars, args, strict=True)
    inputs = {var: arg for var, arg in pairs if not isinstance(var, Literal)}
    info = eqn.source_info
    # Or its scopes would count twice.
    eqn = eqn.replace(source_info=info.replace(name_stack=type(info.name_stack)()))
    jaxpr = jaxpr_of(list(inputs), list(eqn.outvars), [eqn])
    return eval_jaxpr(jaxpr, (), *inputs.values())


def jaxpr_of(invars: list[Any], outvars: list[Any], eqns: list[Any]) -> Any:
    """Returns a jaxpr of some equations of another one."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr((), invars, outvars, eqns, effects, _no_debug_info())


def bind(eqn: Any, args: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs an equation's primitive on other operands or with changed parameters."""
    params = {**eqn.params, **changes}
    call = _traced_once(eqn, params, args)
    out = eqn.primitive.bind(*args, **params) if call is None else call(*args)
    return list(out) if eqn.primitive.multiple_results else [out]


def convert_dtype(x: Any, dtype: Any) -> Any:
    """Casts an array by `lax.convert_element_type`, if it has another dtype."""
    if x.dtype == dtype:
        return x
    is_linearized = isinstance(x, tracer_type("grad"))
    return (_convert if is_linearized else lax.convert_element_type)(x, dtype)


def as_weak(x: jax.Array) -> jax.Array:
    """Returns an array whose dtype gives way to others, as that of a Python number."""
    return lax.convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=True, sharding=None
    )


# From JAX 0.11 on `True` leaves the call in the jaxpr.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
_convert = jax.jit(lax.convert_element_type, static_argnums=1, inline=INLINE)


def _traced_once(
    eqn: Any, params: dict[str, Any], args: Sequence[Any]
) -> Callable[..., Any] | None:
    """Returns a jitted function of a primitive, if JAX traces it faster.

    Under `jax.grad`, JAX linearizes each primitive anew, in 0.3 to 0.8 ms, but a jitted
    function, as `jnp.add` is one, only once for the same types. It is inlined.
    """
    # A jitted function cannot return a new reference, which is an effect.
    if tracer_type("grad") not in map(type, args) or eqn.effects:
        return None
    for name, value in params.items():
        if callable(value) or isinstance(value, JAXPRS) or name == "branches":
            return None  # it would be kept alive
    try:
        return _jitted(eqn.primitive, tuple(params.items()))
    except TypeError:  # a parameter cannot be hashed
        return None


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)), inline=INLINE)


def source_context(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """Gives new equations the source and the scopes of an old one."""
    stack = current_name_stack() + eqn.source_info.name_stack
    return user_context(eqn.source_info.traceback, name_stack=stack)


def shared_scopes(eqns: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the scopes that equations share, as a context, and the same without them."""
    stacks = [eqn.source_info.name_stack.stack for eqn in eqns]
    levels = itertools.takewhile(lambda x: len({*x}) == 1, zip(*stacks, strict=False))
    shared, info = len([*levels]), eqns[0].source_info
    make = type(info.name_stack)
    inner = [
        eqn.replace(source_info=eqn.source_info.replace(name_stack=make(x[shared:])))
        for eqn, x in zip(eqns, stacks, strict=True)
    ]
    stack = current_name_stack() + make(stacks[0][:shared])
    return user_context(info.traceback, name_stack=stack), inner


def scopes_of(eqn: Any) -> tuple[str, ...]:
    """Returns the `jax.named_scope`s of an equation, outermost first."""
    return _scopes(eqn.source_info.name_stack)


def ambient_scopes() -> tuple[str, ...]:
    """Returns the `jax.named_scope`s around the running code."""
    return _scopes(current_name_stack())


def _scopes(stack: Any) -> tuple[str, ...]:
    return tuple([x.name for x in stack.stack if type(x).__name__ == "Scope"])


def is_transposed(eqn: Any) -> bool:
    """Returns whether an equation is part of a backward pass; its body may not say so."""
    stack = eqn.source_info.name_stack.stack
    return any(getattr(item, "name", "") == "transpose" for item in stack)


def source_frames(eqn: Any) -> list[tuple[str, str, int]]:
    """Returns (function, file, line) of the user's frames behind an equation."""
    names = private("source")
    if names is None:
        return []
    own = str(pathlib.Path(__file__).parents[1])
    return [
        (frame.function_name, frame.file_name, frame.start_line)
        for frame in names.user_frames(eqn.source_info.traceback)
        if not frame.file_name.startswith(own)
    ]


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many constants and carries a scan has."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(group)) for group in params["ft_in"].unpack())
    return consts, carry


def scan_options(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `lax.scan` that made a scan equation."""
    names = ["length", "reverse", "unroll"]
    if params.get("_split_transpose"):  # private, but then the user has passed it
        names.append("_split_transpose")
    return {name: params[name] for name in names}


def primitive_name(eqn: Any) -> str:
    """Returns the name of an equation's primitive; JAX 0.12 wraps those of a vjp."""
    return eqn.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def default_matmul_precision() -> str | None:
    """Returns the precision that matmuls have where none is given."""
    return getattr(jax.config, "jax_default_matmul_precision", None)


def has_side_effects(eqn: Any) -> bool:
    """Returns whether an equation does more than to return results.

    A collective has an effect, too: that it names an axis of a mesh.
    """
    return any(type(x).__name__ != "NamedAxisEffect" for x in eqn.effects)


def asked_precisions(eqn: Any) -> list[Any]:
    """Returns the precisions that a matmul asks for, without that of all matmuls."""
    asked = eqn.params.get("precision")
    default = _precision_of(default_matmul_precision())
    return [x for x in _as_tuple(asked) if x not in (None, *_as_tuple(default))]


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


@functools.lru_cache(maxsize=64)
def _precision_of(default: str | None) -> Any:
    """Returns the precision of a matmul that asks for none, as its equation holds it."""
    one = jax.ShapeDtypeStruct((1, 1), np.float32)
    return jax.make_jaxpr(jnp.dot)(one, one).eqns[0].params["precision"]


def lowered_primitives() -> set[str]:
    """Returns the names of the primitives that JAX can compile."""
    names = private("primitive_names")
    if names is None:
        return {x.name for x in vars(lax).values() if isinstance(x, Primitive)}
    tables = [names._lowerings, *names._platform_specific_lowerings.values()]
    return {primitive.name for table in tables for primitive in table}


# The primitive of cuDNN's forward pass inside `jax.nn.dot_product_attention`.
CUDNN_KERNEL = "dot_product_attention_fwd_wrapper"
# The scope of what `jax.checkpoint` computes again in the backward pass.
REMAT_SCOPE = "rematted_computation"


# --- Shardings ------------------------------------------------------------------------


def bind_jit(
    eqn: Any, args: Sequence[Any], more: Sequence[Any], jaxpr: Any
) -> list[Any]:
    """Runs a jit equation with another jaxpr, which takes more inputs than before."""
    new = {"in_shardings": unspecified_sharding(), "in_layouts": None}
    new["donated_invars"] = False
    changes = {key: (*eqn.params[key], *[x] * len(more)) for key, x in new.items()}
    return bind(eqn, [*args, *more], jaxpr=jaxpr, **changes)


def has_shardings(params: dict[str, Any]) -> bool:
    """Returns whether a jit equation says how its arguments or its results are sharded."""
    given = (*params["in_shardings"], *params["out_shardings"])
    return any(sharding is not unspecified_sharding() for sharding in given)


def is_plain_call(eqn: Any) -> bool:
    """Returns whether an equation is a call that says nothing but what it computes."""
    # Such an effect is told by the position of an argument.
    if any(hasattr(effect, "input_index") for effect in eqn.effects):
        return False
    if eqn.primitive.name not in ("jit", "pjit"):
        return eqn.primitive.name in ("closed_call", "custom_jvp_call")
    return not (has_shardings(eqn.params) or eqn.params["compiler_options_kvs"])


def has_explicit_axes(mesh: Any) -> bool:
    """Returns whether a mesh has axes along which shardings are part of an array's type."""
    explicit = jax.sharding.AxisType.Explicit
    return any(kind == explicit for kind in mesh.axis_types or ())
