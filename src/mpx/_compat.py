"""The only file that knows which JAX is installed.

Everything that is not covered by JAX's stability promise, or that differs between the
supported versions, is reached through here.
"""

import contextlib
import functools
import pathlib
import pkgutil
import platform
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
from jax import lax
from jax.core import Tracer
from jax.core import eval_jaxpr as eval_jaxpr
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.interpreters import batching, mlir

from mpx._warn import warn

OLDEST = (0, 10, 1)


def version_tuple(version: str) -> tuple[int, ...]:
    """Returns the leading integers of a version string: `0.12.0.1` -> (0, 12, 0, 1)."""
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def check_versions(jax_version: str, jaxlib_version: str, machine: str) -> None:
    """Refuses a JAX that is too old and warns of a build known to compute wrongly.

    Raises:
        ImportError: If JAX is older than the oldest supported version.
    """
    if version_tuple(jax_version) < OLDEST:
        raise ImportError(
            f"mpx needs jax>=0.10.1,!=0.10.2,<0.13, but jax {jax_version} is installed. "
            'Run `pip install -U "jax>=0.10.1,!=0.10.2,<0.13"`.'
        )
    # jaxlib 0.10.2 fuses a broadcast product with its reduction wrongly on aarch64
    # CPUs (100 % error at shape (128, 256)); every other supported build is right.
    if jaxlib_version.startswith("0.10.2") and machine in ("aarch64", "arm64"):
        warnings.warn(
            "jaxlib 0.10.2 computes wrong numbers on aarch64 CPUs. Install another "
            "version, or set XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= .",
            RuntimeWarning,
            stacklevel=2,
        )


check_versions(jax.__version__, jaxlib.__version__, platform.machine())


# Whether Pallas can write our kernel with Mosaic, which takes the layouts from then on.
HAS_MOSAIC = version_tuple(jax.__version__) >= (0, 11)


def is_tracer(x: object) -> bool:
    """Whether `x` is an abstract value inside a JAX transformation."""
    return isinstance(x, Tracer)


def make_jit_context(default: Any) -> Any:
    """Returns a process-wide setting that is part of the cache key of `jax.jit`."""
    return jax.make_user_context(default)


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which a value differs between devices."""
    axis_type = getattr(aval, "manual_axis_type", None)
    return getattr(axis_type, "varying", None) or frozenset()


def as_varying(x: jax.Array, axis_names: Sequence[str]) -> jax.Array:
    """Marks `x` as differing between the devices of manual mesh axes.

    Under `jax.shard_map` the derivative with respect to a replicated value is summed
    over the devices behind the caller's back. A varying value keeps its derivative
    local. For the axis of a `vmap` nothing is tracked and `x` comes back.
    """
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    tracked = varying_axes(jax.typeof(x))
    missing = tuple(
        name for name in axis_names if name in mapped and name not in tracked
    )
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_like(x: Any, struct: Any) -> Any:
    """Marks `x` as differing between devices where `struct` says its successor does."""
    names = varying_axes(struct)
    return as_varying(x, tuple(sorted(names))) if names else x


def as_unvarying(x: jax.Array) -> jax.Array:
    """Hides that `x` differs between devices: no Mosaic kernel takes such references."""
    return _as_unvarying.bind(x) if varying_axes(jax.typeof(x)) else x


_as_unvarying = jex_core.Primitive("as_unvarying")
_as_unvarying.def_abstract_eval(
    lambda aval: aval.update(manual_axis_type=type(aval.manual_axis_type)())
)
mlir.register_lowering(_as_unvarying, lambda ctx, x: [x])


def struct_like(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Returns the type of an array of another shape that varies as `x` does."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return jax.ShapeDtypeStruct(
        shape, x.dtype, manual_axis_type=getattr(aval, "manual_axis_type", None)
    )


def zeros_of(struct: Any) -> jax.Array:
    """Returns zeros for the result of `jax.eval_shape`."""
    return varying_like(jnp.zeros(struct.shape, struct.dtype), struct)


# --- Jaxprs ---------------------------------------------------------------------------

Literal = jex_core.Literal
Primitive = jex_core.Primitive


def is_jaxpr(x: object) -> bool:
    """Whether `x` is a jaxpr, open or closed."""
    return isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr and its constants; from JAX 0.11 on the two kinds are one."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def constants_as_inputs(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr that takes its constants as leading inputs, and the constants."""
    body, consts = open_jaxpr(jaxpr)
    if not consts:
        return body, ()
    return jex_core.Jaxpr(
        constvars=(),
        invars=[*body.constvars, *body.invars],
        outvars=body.outvars,
        eqns=body.eqns,
        effects=body.effects,
        debug_info=body.debug_info.with_unknown_names(),
    ), consts


@functools.cache
def _no_debug_info() -> Any:
    """Returns the origin of a jaxpr that no user wrote; JAX warns of one without."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info.with_unknown_names()


def as_function(jaxpr: Any) -> Any:
    """Returns a closed jaxpr as a function of flat arguments."""
    return jex_core.jaxpr_as_fun(jaxpr)


def sub_jaxprs(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield open_jaxpr(item)[0]


def eval_equation(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Runs one equation unchanged.

    It goes through a jaxpr of one equation, because how parameters turn into arguments
    of `bind` is private and changes.
    """
    if _traced_once(eqn.primitive, eqn.params, args) is not None:
        return bind(eqn, args)
    inputs: dict[Any, Any] = {}
    for var, arg in zip(eqn.invars, args, strict=True):
        if not isinstance(var, Literal):
            inputs[var] = arg
    jaxpr = jaxpr_of(list(inputs), list(eqn.outvars), [eqn])
    return eval_jaxpr(jaxpr, (), *inputs.values())


def jaxpr_of(invars: list[Any], outvars: list[Any], eqns: list[Any]) -> Any:
    """Returns a jaxpr of some equations of another one."""
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return jex_core.Jaxpr((), invars, outvars, eqns, effects, _no_debug_info())


def bind(eqn: Any, args: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs an equation's primitive on other operands or with changed parameters."""
    params = {**eqn.params, **changes}
    call = _traced_once(eqn.primitive, params, args)
    out = eqn.primitive.bind(*args, **params) if call is None else call(*args)
    return list(out) if eqn.primitive.multiple_results else [out]


def convert_dtype(x: Any, dtype: Any) -> Any:
    """Casts an array by `lax.convert_element_type`."""
    return (_convert if _is_linearized(x) else lax.convert_element_type)(x, dtype)


# From JAX 0.11 on `True` leaves the call in the jaxpr.
INLINE: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
_convert = jax.jit(lax.convert_element_type, static_argnums=1, inline=INLINE)


def _traced_once(
    primitive: Any, params: dict[str, Any], args: Sequence[Any]
) -> Callable[..., Any] | None:
    """Returns a jitted function of one primitive, if JAX traces it faster.

    Under `jax.grad`, JAX linearizes each primitive anew, in 0.3 to 0.8 ms, but a jitted
    function, as `jnp.add` is one, only once for the same types. It is inlined.
    """
    if not any(map(_is_linearized, args)) or "branches" in params:
        return None
    if any(callable(value) or is_jaxpr(value) for value in params.values()):
        return None  # it would be kept alive
    try:
        return _jitted(primitive, tuple(params.items()))
    except TypeError:  # a parameter cannot be hashed
        return None


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(primitive.bind, **dict(params)), inline=INLINE)


def _is_linearized(x: object) -> bool:
    from jax._src.interpreters import ad as private

    return isinstance(x, getattr(private, "LinearizeTracer", ()))


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Gives new equations the source, the scopes and the context of an old one."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    info = eqn.source_info.traceback
    with source_info_util.user_context(info, name_stack=stack), eqn.ctx.manager:
        yield


def scopes_of(eqn: Any) -> tuple[str, ...]:
    """Returns the `jax.named_scope`s of an equation, outermost first."""
    stack = eqn.source_info.name_stack.stack
    return tuple(item.name for item in stack if type(item).__name__ == "Scope")


def ambient_scopes() -> tuple[str, ...]:
    """Returns the `jax.named_scope`s around the running code."""
    stack = source_info_util.current_name_stack().stack
    return tuple(item.name for item in stack if type(item).__name__ == "Scope")


def source_frames(eqn: Any) -> list[tuple[str, str, int]]:
    """Returns (function, file, line) of the user's frames behind an equation."""
    from jax._src import source_info_util as private

    own = str(pathlib.Path(__file__).parent)
    return [
        (frame.function_name, frame.file_name, frame.start_line)
        for frame in private.user_frames(eqn.source_info.traceback)
        if not frame.file_name.startswith(own)
    ]


def scan_sizes(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many constants and carries a scan has."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(group)) for group in params["ft_in"].unpack())
    return consts, carry


def primitive_name(eqn: Any) -> str:
    """Returns the name of an equation's primitive; JAX 0.12 wraps those of a vjp."""
    return eqn.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def linear_program(vjp: Any, count: int) -> tuple[Any, list[Any]] | None:
    """Returns the jaxpr that a function of `jax.vjp` transposes, and its arguments.

    It is the derivative as a linear program, which exists already and costs no trace.

    Args:
        vjp: The function that `jax.vjp` returned.
        count: The number of arrays in its arguments.

    Returns:
        The jaxpr and its variables, or `None` if this JAX does not show them.
    """
    jaxpr = getattr(vjp, "jaxpr", None)
    if not is_jaxpr(jaxpr):
        return None
    body, _ = open_jaxpr(jaxpr)
    # Residuals come before the arguments or are constants; structured ones come after.
    structured = jax.tree.leaves(getattr(vjp, "structured_residuals", ()))
    end = len(body.invars) - len(structured)
    return (body, body.invars[end - count : end]) if end >= count else None


def default_matmul_precision() -> str | None:
    """Returns the precision that matmuls have where none is given."""
    return getattr(jax.config, "jax_default_matmul_precision", None)


def nothing_is_traced() -> bool:
    """Whether no JAX transformation is running."""
    from jax._src import core as private

    return private.trace_state_clean()


def lowered_primitives() -> set[str]:
    """Returns the names of all primitives that JAX can compile."""
    from jax._src.interpreters import mlir as private

    tables = [private._lowerings, *private._platform_specific_lowerings.values()]
    return {primitive.name for table in tables for primitive in table}


# --- Attention ------------------------------------------------------------------------


def attention_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that `jax.nn.dot_product_attention` calls: XLA's and cuDNN's.

    It looks them up on each call, so that replacing them reaches every call of it, however
    it was imported.
    """
    from jax._src.nn import functions as private

    return private._dot_product_attention_xla, private.cudnn_dot_product_attention


def set_attention_functions(
    plain: Callable[..., Any], cudnn: Callable[..., Any]
) -> None:
    """Replaces the functions that `jax.nn.dot_product_attention` calls."""
    from jax._src.nn import functions as private

    private._dot_product_attention_xla = plain
    private.cudnn_dot_product_attention = cudnn


# The primitive of cuDNN's forward pass inside `jax.nn.dot_product_attention`.
CUDNN_KERNEL = "dot_product_attention_fwd_wrapper"
_ATTENTION_NAMES = """
    _src.nn.functions:_dot_product_attention_xla
    _src.nn.functions:cudnn_dot_product_attention
    _src.dispatch:prim_requires_devices_during_lowering
    interpreters.ad:Zero
    interpreters.ad:instantiate_zeros
    interpreters.ad:primitive_jvps
    interpreters.ad:primitive_transposes
    interpreters.batching:primitive_batchers
    interpreters.mlir:lower_fun
    interpreters.mlir:register_lowering
"""


@functools.cache
def attention_names() -> Any:
    """Returns the names of JAX that `mpx._attention` needs, or `None` if one is missing.

    A missing name warns once per process.
    """
    found = {}
    for name in _ATTENTION_NAMES.split():
        try:
            found[name.rpartition(":")[2]] = pkgutil.resolve_name(f"jax.{name}")
        except (ImportError, AttributeError):
            warn(
                f"jax {jax.__version__} has no `jax.{name.replace(':', '.')}`, which mpx "
                "relies on. Without it attention under `amp` runs operation by operation "
                "instead of in cuDNN's kernel. Upgrade mpx, or install an older JAX."
            )
            return None
    return types.SimpleNamespace(**found)


def is_batched(x: object) -> bool:
    """Whether `x` is a value inside of a `jax.vmap`."""
    from jax._src.interpreters.batching import BatchTracer

    return isinstance(x, BatchTracer)


def is_differentiated(x: Any) -> bool:
    """Whether a derivative with respect to `x` is taken, where no `jit` hides it."""
    from jax._src.interpreters import ad as private

    while is_batched(x):
        x = x.val
    return isinstance(x, private.JVPTracer | private.LinearizeTracer)


def bind_jit(
    eqn: Any, args: Sequence[Any], more: Sequence[Any], jaxpr: Any
) -> list[Any]:
    """Runs a jit equation with another jaxpr, which takes more inputs than before."""
    from jax._src.sharding_impls import UNSPECIFIED

    count = len(more)
    changes = {
        "in_shardings": (*eqn.params["in_shardings"], *[UNSPECIFIED] * count),
        "in_layouts": (*eqn.params["in_layouts"], *[None] * count),
        "donated_invars": (*eqn.params["donated_invars"], *[False] * count),
    }
    return bind(eqn, [*args, *more], jaxpr=jaxpr, **changes)


def has_shardings(params: dict[str, Any]) -> bool:
    """Whether a jit equation says how its arguments or its results are sharded."""
    from jax._src.sharding_impls import UNSPECIFIED

    given = (*params["in_shardings"], *params["out_shardings"])
    return any(sharding is not UNSPECIFIED for sharding in given)


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a mesh has axes along which shardings are part of an array's type."""
    explicit = jax.sharding.AxisType.Explicit
    return any(kind == explicit for kind in mesh.axis_types or ())


def refused(message: str, tree: Any) -> Any:
    """Returns a tree of arrays that raise `NotImplementedError` when they are lowered."""
    return jax.tree.map(lambda x: _refused.bind(x, message=message), tree)


def _refuse(ctx: Any, x: Any, *, message: str) -> Any:
    raise NotImplementedError(message)


_refused = jex_core.Primitive("refused")
_refused.def_abstract_eval(lambda aval, *, message: aval)
mlir.register_lowering(_refused, _refuse)
batching.defvectorized(_refused)
