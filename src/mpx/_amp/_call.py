"""Calls of a user's function through a visitor, whatever framework holds its parameters.

The function is traced as a pure one of its arrays, which may be inside modules: those of
NNX and Linen have their variables taken out before and written back after. Neither
library is imported here: if it is not loaded, none of its models can be running.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._amp._emit import Autocast, warn_if_unscaled
from mpx._amp._facts import F32, current_recording, is_low
from mpx._casting._context import argument_names, refuse_cast_arguments
from mpx._casting._keep import calls_marked, is_state
from mpx._jax import _nnx
from mpx._jax._arguments import as_count
from mpx._jax._compat import (
    Literal,
    ambient_scopes,
    convert_dtype,
    nothing_is_traced,
    open_jaxpr,
)
from mpx._jax._frameworks import (
    Named,
    call_linen,
    linen_call,
    linen_is_not_written,
    linen_name,
    refuse_haiku,
)
from mpx._jax._tree import LeafName, flatten_with_names, is_array, is_floating
from mpx._jax._warn import warn
from mpx._program._interpreter import (
    Rewritten,
    Traced,
    Transformation,
    as_results,
    dtypes_of,
)

_FUNC = "the function"  # beside its arguments, whose names hold no spaces
_MOST_REMEMBERED = 1000
Remembered = dict[Any, Rewritten]
"""Rewritten jaxprs of earlier calls outside all transformations."""


def under_amp(
    func: Callable[..., PyTree],
    autocast: Callable[[], Autocast],
    eager: dict[tuple[Any, Any], Remembered] | None = None,
) -> Callable[..., PyTree]:
    """Returns a function that runs in mixed precision, given what makes its visitors."""
    eager = {} if eager is None else eager

    @functools.wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        refuse_cast_arguments()
        visitor = autocast()
        recording = current_recording()
        if recording is not None:
            visitor.decisions = recording.decisions
            recording.casts.append((visitor.dtype, visitor.rules))
        remembered = eager.setdefault((visitor.dtype, visitor.reduce), {})
        return call_through(visitor, func, args, kwargs, eager=remembered)

    # The gradient functions and inspection ask for it.
    setattr(wrapper, "mpx_autocast", autocast)  # noqa: B010
    # With itself: what wraps it in turn has its attributes, by `functools.wraps`.
    setattr(wrapper, "mpx_under_amp", (wrapper, func))  # noqa: B010
    return wrapper


_MODULES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False, frozen=True)  # `jax.jit` takes it: it has a hash
class ModuleUnderAmp:
    """An Equinox module under `amp`: its parameters are still there to be trained."""

    func: Callable[..., PyTree]
    mpx_autocast: Callable[[], Autocast] = dataclasses.field(
        metadata={"static": True}, repr=False
    )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # The module may be another object at each call, but not what was asked for.
        eager = _MODULES.setdefault(self.mpx_autocast, {})
        return under_amp(self.func, self.mpx_autocast, eager)(*args, **kwargs)

    @property
    def mpx_under_amp(self) -> tuple[PyTree, PyTree]:
        return self, self.func

    @property
    def __wrapped__(self) -> PyTree:
        return self.func


def _take_arrays(
    tree: PyTree, is_taken: Callable[[Any], bool] = is_array
) -> tuple[list[PyTree], Callable[[Sequence[PyTree]], PyTree]]:
    """Returns the arrays of a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    taken = [i for i, leaf in enumerate(leaves) if is_taken(leaf)]
    arrays = [leaves[i] for i in taken]
    for i in taken:
        leaves[i] = None

    def put_back(arrays: Sequence[PyTree]) -> PyTree:
        full = list(leaves)
        for i, array in zip(taken, arrays, strict=True):
            full[i] = array
        return structure.unflatten(full)

    return arrays, put_back


class _Call(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]


Describe = Callable[[LeafName, bool], Named]
"""Tells what the name of an array, and whether it is a parameter, are for the user."""


def call_through(
    visitor: Transformation,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    *,
    eager: Remembered | None = None,
    describe: Describe | None = None,
) -> PyTree:
    """Calls a function through a visitor."""
    if isinstance(func, functools.partial) or inspect.ismethod(func):
        func, args, kwargs = _unbound(visitor, _Call(func, args, kwargs))
    if "flax.nnx" in sys.modules:
        names = argument_names(func, len(args))
        arguments = {_FUNC: func, **dict(zip(names, args, strict=True)), **kwargs}
        plain, objects = {}, {}
        for name, tree in arguments.items():
            plain[name], taken = _nnx.take_out(tree, name)
            objects.update(taken)
        if objects:
            return _call_with_nnx(visitor, names, plain, objects)

    def pure(func: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> PyTree:
        return _call_pure(visitor, _Call(func, args, kwargs), eager, describe)

    if "haiku" in sys.modules:
        refuse_haiku()
    if "flax.linen" not in sys.modules:
        return pure(func, *args, **kwargs)
    found = linen_call(func, args)
    if found is not None:
        describe = linen_name
        return call_linen(found, kwargs, pure)
    with linen_is_not_written():
        return pure(func, *args, **kwargs)


def _unbound(visitor: Transformation, call: _Call) -> _Call:
    """Returns a call with the arrays of a method or `partial` as named arguments."""
    func, args, kwargs = call
    bound, inner = (), func
    if isinstance(func, functools.partial):
        bound, kwargs, inner = func.args, {**func.keywords, **kwargs}, func.func
    elif inspect.ismethod(func) and not isinstance(func.__self__, type):
        bound, inner = (func.__self__,), func.__func__
    if not any(is_array(x) or _nnx.is_nnx(x) for x in jax.tree.leaves(bound)):
        return call
    if visitor.params is not None:
        moved = [x + len(bound) if isinstance(x, int) else x for x in visitor.params]
        visitor.params = (*moved, *range(len(bound)))
    return _unbound(visitor, _Call(inner, (*bound, *args), kwargs))


def _call_pure(
    visitor: Transformation,
    call: _Call,
    eager: Remembered | None,
    describe: Describe | None,
) -> PyTree:
    """Calls a function that changes nothing but its results; arguments as above."""
    arrays, put_back = _take_arrays(call)
    # NumPy's f64 is JAX's f32, unless x64 is on.
    arrays = [
        jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in arrays
    ]
    named = _names_and_params(visitor, call)
    if describe is not None:
        named = [describe(*pair) for pair in named]
    merge = lambda outs: outs  # noqa: E731 - made while the function is traced

    def flat(*arrays: PyTree) -> list[PyTree]:
        nonlocal merge
        func, args, kwargs = put_back(arrays)
        outs, merge = _take_arrays(func(*args, **kwargs))
        return outs

    kept_types = visitor.kept_types
    kept = calls_marked(kept_types) if kept_types else contextlib.nullcontext()
    # What a type selects is not part of the names by which programs are remembered.
    if eager is not None and nothing_is_traced() and not kept_types:
        # The function is traced anew, since what it closes over may have changed; but
        # the jitted functions inside it, once rewritten, stay the same programs.
        visitor.cache = eager
        if len(eager) > _MOST_REMEMBERED:
            eager.clear()
    with visitor.tracing(), kept:
        (body, consts), widened = _trace(visitor, flat, arrays, named)
    if (recording := current_recording()) is not None:
        for name, array in zip(named, arrays, strict=True):
            recording.names.setdefault(id(array), name)  # the first name counts
    is_owner = any([is_param for _, is_param in named])
    has_params = is_owner or describe is not linen_name
    wide, visitor.stored = list(arrays), {}
    for i in widened:
        # The gradient of an f16 parameter is rounded to f16, whatever computes it.
        is_f16 = recording is None and arrays[i].dtype == np.float16
        stored = warn_if_unscaled(arrays[i]) if is_f16 else arrays[i]
        wide[i] = convert_dtype(stored, F32)
        visitor.stored[id(wide[i])] = wide[i], stored
    traced = visitor.start(Traced(body, consts, wide, named, has_params))
    outs = visitor.finish(run_traced(visitor, traced))
    visitor.stored.clear()  # derivative rules, which JAX keeps, refer to the visitor
    if not widened:
        return merge(outs)
    # What is returned as it came is that very array.
    given = dict(zip(body.invars, arrays, strict=True))
    outs = [
        given.get(var, out) if not isinstance(var, Literal) else out
        for var, out in zip(body.outvars, outs, strict=True)
    ]
    return _as_stored(merge(outs), (call.func, *call.args, *call.kwargs.values()))


def _trace(
    visitor: Transformation,
    flat: Callable[..., PyTree],
    arrays: Sequence[PyTree],
    named: Sequence[Named],
) -> tuple[tuple[Any, Sequence[PyTree]], set[int]]:
    """Traces a function; parameters of 16 bits as if they were f32, where `amp` asks.

    Such a parameter is storage. A function that multiplies it with 16-bit inputs may insist
    on equal dtypes: then inputs are read as f32, too. If it casts by itself to what it takes
    for the dtype of its parameters, everything is left as it is written.
    """
    low = [i for i, x in enumerate(arrays) if is_low(x) and visitor.widens_params]
    params = [i for i in low if named[i][1]]
    choices = [params, low] if params and len(low) > len(params) else [params]
    refused: Exception | None = None
    for chosen in choices if params else ():
        types = [
            x.update(dtype=F32, weak_type=False) if i in chosen else x
            for i, x in enumerate(map(jax.typeof, arrays))
        ]
        try:
            # Mixed dtypes that were equal in the user's program must not be refused.
            with jax.numpy_dtype_promotion("standard"):
                return open_jaxpr(jax.make_jaxpr(flat)(*types)), set(chosen)
        except (TypeError, ValueError, NotImplementedError) as error:
            refused = error
    if refused is not None:
        warn(
            "A function under `amp` has parameters of 16 bits, which `amp` reads as f32, "
            "but it needs 16 bits itself, as by casts of its own. It runs as it is "
            f"written, in 16 bits throughout: {str(refused).strip().splitlines()[0]} "
            "Remove the casts, or cast to the dtype of the parameters."
        )
    return open_jaxpr(jax.make_jaxpr(flat)(*arrays)), set()


def _as_stored(result: PyTree, given: Sequence[PyTree]) -> PyTree:
    """Casts what has the structure of 16-bit parameters, as gradients, to their dtypes."""

    def is_alike(node: PyTree) -> bool:
        return _kind(node) == kind

    def restored(node: PyTree) -> PyTree:
        return jax.tree.map(_cast_like, node, tree) if is_alike(node) else node

    for tree in given:
        kind = _kind(tree)
        if any(map(is_low, jax.tree.leaves(tree))) and not is_low(tree):
            result = jax.tree.map(restored, result, is_leaf=is_alike)
    return result


def _kind(tree: PyTree) -> tuple[PyTree, list[PyTree]]:
    """Returns the structure of a tree, and the shapes of its arrays."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [getattr(x, "shape", None) for x in leaves]


def _cast_like(new: PyTree, old: PyTree) -> PyTree:
    is_cast = is_floating(new) and is_floating(old)
    return convert_dtype(new, old.dtype) if is_cast else new


def run_traced(visitor: Transformation, traced: Traced) -> list[PyTree]:
    """Runs a traced function through a visitor; its results have their own dtypes."""
    facts = [
        visitor.argument_fact(*named, leaf)
        for named, leaf in zip(traced.named, traced.arrays, strict=True)
    ]
    jaxpr, consts, arrays, *_ = traced
    dtypes = dtypes_of([var.aval for var in jaxpr.outvars])
    given = jaxpr, consts, arrays, facts, ambient_scopes()
    form: str | None = getattr(visitor, "residuals", None)
    if form is None:
        return as_results(visitor.run(*given)[0], jaxpr.outvars, dtypes)
    # It is loaded where it is asked for.
    from mpx._amp._residuals import run_coded

    pairs = zip(arrays, traced.named, strict=True)
    params = [x for x, (_, is_param) in pairs if is_param]
    run = lambda: as_results(visitor.run(*given)[0], jaxpr.outvars, dtypes)  # noqa: E731
    return run_coded(run, params, form)


def parse_params(params: Any) -> tuple[int | str, ...] | None:
    """Returns what a user may pass for `params`: a position, a name, or several."""
    if params is None:
        return None
    single = isinstance(params, str) or not isinstance(params, Iterable)
    found = (params,) if single else tuple(params)
    try:
        return tuple(x if isinstance(x, str) else as_count(x, "params") for x in found)
    except TypeError as error:
        raise TypeError(
            "`params` must be the position or the name of the argument that holds the "
            f"parameters, or several, but {params!r} was given."
        ) from error


def param_arguments(
    names: Sequence[str], given: Sequence[str], params: tuple[int | str, ...]
) -> list[str]:
    """Returns the names of the arguments that the user says hold parameters."""
    found = []
    for param in params:
        if isinstance(param, int):
            is_given = -len(names) <= param < len(names)
            param = names[param] if is_given else f"argument {param}"
        if param not in given:
            raise ValueError(
                f"`params` names `{param}`, but the function was called with {[*given]}. "
                "Pass the position or the name of the argument that holds the parameters."
            )
        found.append(param)
    return found


def _names_and_params(visitor: Transformation, call: _Call) -> list[Named]:
    """Returns the names of the arrays of a call, and which of them are parameters.

    Without a choice of the user's these are the arrays that the function itself holds;
    else the first argument that is a container, and the other parts of a partitioned model.
    An array by itself may be an input.
    """
    func, args, kwargs = call
    names = argument_names(func, len(args))
    trees = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    if not isinstance(func, types.FunctionType):
        trees.insert(0, ("", func))
    named = [
        name
        for argument, tree in trees
        for name, leaf in flatten_with_names(tree, argument)[0]
        if is_array(leaf)
    ]
    given = dict(trees)
    if visitor.params is not None:
        params = param_arguments(names, [*names, *kwargs], visitor.params)
    elif any([not name.argument for name in named]):
        params = []
    else:
        params = [name.argument for name in named if name.path]
        if kwargs:
            order = argument_names(func, len(args) + len(kwargs))
            place = {name: i for i, name in enumerate([*order, *sorted(kwargs)][::-1])}
            params.sort(key=lambda x: -place[x])
        params = (params or (names if visitor.takes_bare_params else []))[:1]
        params += [
            x for x, tree in trees if params and completes(tree, given[params[0]])
        ]
    held = ("", *params)
    return [(name, name.argument in held and not is_state(name)) for name in named]


def completes(tree: PyTree, other: PyTree) -> bool:
    """Returns whether two trees are parts of one, as those of `eqx.partition`."""
    if is_array(tree) or is_array(other):
        return False
    one, two = (jax.tree.flatten(x, is_leaf=lambda x: x is None) for x in (tree, other))
    if one[1] != two[1]:
        return False
    pairs = [*zip(one[0], two[0], strict=True)]
    is_part = all(x is None or y is None for x, y in pairs)
    return is_part and all(any(is_array(x[i]) for x in pairs) for i in (0, 1))


def _call_with_nnx(
    visitor: Transformation,
    names: list[str],
    plain: dict[str, PyTree],
    objects: dict[LeafName, Any],
) -> PyTree:
    """Calls a function of NNX objects as a pure one and writes their state back.

    `plain` holds the function and all arguments, with slots for the objects.
    """
    split = _nnx.split(objects, {})

    def pure(state: PyTree, plain: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        merged = _nnx.merge(split._replace(rest=state))
        everything = _nnx.put_back(plain, merged.objects)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), _nnx.state_after(merged)[1]

    variables = {
        "/".join(map(str, path)): name
        for path, name in _nnx.variable_names(objects).items()
    }
    chosen = None
    if visitor.params is not None:
        given = [*names, *(x for x in plain if x not in (_FUNC, *names))]
        chosen = param_arguments(names, given, visitor.params)

    def describe(name: LeafName, is_param: bool) -> Named:
        if name.argument == "state":
            name = variables[name.path.removesuffix("/value")]
            is_param = not is_state(name)
        else:
            argument, _, path = name.path.partition("/")
            name, is_param = LeafName(path, name.types[1:], argument), False
        if chosen is not None:
            is_held = name.argument in (*chosen, _FUNC)
            is_param = is_held and not is_state(name)
        if name.argument == _FUNC:
            name = LeafName(name.path, name.types)
        return name, is_param

    out, state = call_through(visitor, pure, (split.rest, plain), {}, describe=describe)
    # A parameter that the function changes in place keeps its dtype.
    state = jax.tree.map(_cast_like, state, split.rest)
    _nnx.update(objects, state, before=split.rest)
    return out


def flat_call(
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    wrap: Callable[[Callable[..., PyTree]], Callable[..., PyTree]] | None = None,
) -> tuple[list[PyTree], Callable[[Transformation, Sequence[PyTree]], list[PyTree]]]:
    """Returns the arrays of a call, and what makes the call of a visitor and such arrays."""
    # NNX objects are copied, or they would hold tracers afterwards.
    plain, objects = _nnx.take_out((func, args, kwargs))
    split = _nnx.split(objects, {}) if objects else None
    state = split.rest if split is not None else None
    arrays, put_back = _take_arrays(
        (plain, state), lambda x: is_array(x) or isinstance(x, jax.ShapeDtypeStruct)
    )

    def call(visitor: Transformation, arrays: Sequence[PyTree]) -> list[PyTree]:
        plain, state = put_back(arrays)
        if split is not None:
            merged = _nnx.merge(split._replace(rest=state))
            plain = _nnx.put_back(plain, merged.objects)
        func, args, kwargs = plain
        if wrap is None:
            return _take_arrays(call_through(visitor, func, args, kwargs))[0]
        return _take_arrays(wrap(func)(*args, **kwargs))[0]

    return arrays, call


def trace(
    visitor: Transformation,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Returns the jaxpr of a call through a visitor."""
    arrays, call = flat_call(func, args, kwargs)
    return jax.make_jaxpr(functools.partial(call, visitor))(arrays)
