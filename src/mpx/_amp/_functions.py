"""Calls of a user's function through a visitor, whatever framework holds its parameters.

The function is traced as a pure one of its arrays, which may be inside modules: those of
NNX, Linen and Haiku have their variables taken out before and written back after.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx import _nnx
from mpx._amp._attention import captured_attention
from mpx._amp._frameworks import (
    Named,
    Role,
    Traced,
    Transformation,
    call_haiku,
    call_linen,
    haiku_name,
    in_haiku,
    linen_call,
    linen_is_not_written,
    linen_name,
)
from mpx._amp._recording import current_recording
from mpx._call import argument_names
from mpx._compat import (
    ambient_scopes,
    is_differentiated,
    nothing_is_traced,
    open_jaxpr,
)
from mpx._jaxpr._interpreter import as_results, dtypes_of
from mpx._keep import run_in_scopes
from mpx._tree import LeafName, is_array, named_leaves

_FUNC = "the function"  # beside its arguments, whose names hold no spaces
_MOST_REMEMBERED = 1000


def _take_arrays(
    tree: PyTree, is_taken: Callable[[Any], bool] = is_array
) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """Returns the arrays of a tree, and a function that puts others in their place."""
    leaves, structure = jax.tree.flatten(tree)
    taken = [is_taken(leaf) for leaf in leaves]
    arrays = [leaf for leaf, is_array in zip(leaves, taken, strict=True) if is_array]
    static = [
        None if is_array else leaf for leaf, is_array in zip(leaves, taken, strict=True)
    ]

    def put_back(arrays: Sequence[Any]) -> PyTree:
        rest = iter(arrays)
        pairs = zip(static, taken, strict=True)
        return structure.unflatten(
            next(rest) if is_array else x for x, is_array in pairs
        )

    return arrays, put_back


def call_through(
    visitor: Transformation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None = None,
    describe: Callable[[LeafName, Role | None], Named] = lambda *x: x,
) -> Any:
    """Calls a function through a visitor.

    Args:
        visitor: The visitor.
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        eager: Rewritten jaxprs of earlier calls outside all transformations.
        describe: From the name and role of a leaf to what they are for the user.
    """
    names = argument_names(func, len(args))
    arguments = {_FUNC: func, **dict(zip(names, args, strict=True)), **kwargs}
    plain, objects = {}, {}
    for name, tree in arguments.items():
        plain[name], taken = _nnx.take_out(tree, name)
        objects.update(taken)
    if objects:
        return _call_with_nnx(visitor, names, plain, objects)
    pure = functools.partial(_call_pure, visitor, eager=eager)
    found = linen_call(func, args)
    if found is not None:
        run = lambda f, *args: pure(f, args, {}, describe=linen_name)  # noqa: E731
        return call_linen(found, kwargs, run)
    if in_haiku():
        run = lambda f, *args: pure(f, args, {}, describe=haiku_name)  # noqa: E731
        return call_haiku(func, args, kwargs, run)
    with linen_is_not_written():
        return pure(func, args, kwargs, describe=describe)


def _call_pure(
    visitor: Transformation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None,
    describe: Callable[[LeafName, Role | None], Named],
) -> Any:
    """Calls a function that changes nothing but its results; arguments as above."""
    names = argument_names(func, len(args))
    arrays, put_back = _take_arrays((func, args, kwargs))
    # NumPy's f64 is JAX's f32, unless x64 is on.
    arrays = [
        jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in arrays
    ]
    merge = lambda outs: outs  # noqa: E731 - made while the function is traced

    def flat(*arrays: Any) -> list[Any]:
        nonlocal merge
        func, args, kwargs = put_back(arrays)
        outs, merge = _take_arrays(func(*args, **kwargs))
        return outs

    # What a type selects is not part of the names by which programs are remembered.
    if eager is not None and nothing_is_traced() and not visitor.kept_types:
        # The function is traced anew, since what it closes over may have changed; but
        # the jitted functions inside it, once rewritten, stay the same programs.
        visitor.cache = eager
        if len(eager) > _MOST_REMEMBERED:
            eager.clear()
    with captured_attention(), visitor.tracing(), run_in_scopes(visitor.kept_types):
        body, consts = open_jaxpr(jax.make_jaxpr(flat)(*arrays))
    named = [
        describe(*pair) for pair in _names_and_roles(func, names, args, kwargs, consts)
    ]
    recording = current_recording()
    if recording is not None:
        recording.name(named, arrays)
    is_owner = any(role == "own" for _, role in named)
    has_params = is_owner or describe not in (linen_name, haiku_name)
    traced = visitor.start(Traced(body, consts, arrays, named, has_params))
    return merge(visitor.finish(run_traced(visitor, traced)))


def run_traced(visitor: Transformation, traced: Traced) -> list[Any]:
    """Runs a traced function through a visitor; its results have their own dtypes."""
    facts = [
        visitor.argument_fact(*named, leaf)
        for named, leaf in zip(traced.named, traced.arrays, strict=True)
    ]
    outs, _ = visitor.run(
        traced.jaxpr, traced.consts, traced.arrays, facts, ambient_scopes()
    )
    variables = traced.jaxpr.outvars
    return as_results(outs, variables, dtypes_of([var.aval for var in variables]))


def _names_and_roles(
    func: Callable[..., Any],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    consts: Sequence[Any],
) -> list[Named]:
    """Returns the names of the arrays of a call, and why each counts as a parameter."""
    own = [(name, leaf) for name, leaf in named_leaves(func) if is_array(leaf)]
    named = [
        (path, leaf, tree)
        for name, tree in (*zip(names, args, strict=True), *sorted(kwargs.items()))
        for path, leaf in named_leaves(tree, name)
        if is_array(leaf)
    ]
    leaves = [*(leaf for _, leaf in own), *(leaf for _, leaf, _ in named), *consts]
    # If JAX shows what is differentiated, nothing needs to be guessed. Through a `jit`
    # or a `checkpoint` it does not.
    may_guess = not own and not any(map(is_differentiated, leaves))

    def role(leaf: Any, tree: Any) -> Role | None:
        if isinstance(tree, eqx.Module):
            return "own"
        if is_differentiated(leaf):
            return "bare" if leaf is tree else "known"
        is_first = may_guess and bool(args) and tree is args[0] and leaf is not tree
        return "likely" if is_first else None

    return [
        *((name, "own") for name, _ in own),
        *((name, role(leaf, tree)) for name, leaf, tree in named),
    ]


def _call_with_nnx(
    visitor: Transformation,
    names: list[str],
    plain: dict[str, Any],
    objects: dict[LeafName, Any],
) -> Any:
    """Calls a function of NNX objects as a pure one and writes their state back.

    `plain` holds the function and all arguments, with slots for the objects; `names` are
    those of the positional arguments.
    """
    split = _nnx.split(objects, ())

    def pure(state: Any, plain: dict[str, Any]) -> tuple[Any, Any]:
        merged = _nnx.merge(split._replace(rest=state))
        everything = _nnx.put_back(plain, merged.objects)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), _nnx.rest_of(merged)

    variables = {
        "/".join(map(str, path)): name
        for path, name in _nnx.variable_names(objects).items()
    }

    def describe(name: LeafName, role: Role | None) -> Named:
        if name.argument == "state":
            name, role = variables[name.path.removesuffix("/value")], "own"
        else:
            argument, _, path = name.path.partition("/")
            name = LeafName(path, name.types[1:], argument)
            role = "bare" if role == "known" and not path else role
        if name.argument == _FUNC:
            name = LeafName(name.path, name.types)
        return name, role

    out, state = call_through(visitor, pure, (split.rest, plain), {}, describe=describe)
    _nnx.update(objects, state, before=split.rest)
    return out


def flat_call(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> tuple[list[Any], Callable[[Transformation, Sequence[Any]], list[Any]]]:
    """Returns the arrays of a call, and a function of a visitor and such arrays.

    That function makes the call through the visitor and returns the arrays of the result.

    Args:
        func: The function, or a module that holds arrays of its own.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        wrap: Makes another function of it, which is called by itself: `amp` or `fp8`.
    """
    # NNX objects are copied, or they would hold tracers afterwards.
    plain, objects = _nnx.take_out((func, args, kwargs))
    split = _nnx.split(objects, ()) if objects else None
    state = split.rest if split is not None else None
    arrays, put_back = _take_arrays((plain, state), _is_abstract)

    def call(visitor: Transformation, arrays: Sequence[Any]) -> list[Any]:
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
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns the jaxpr of a call through a visitor."""
    arrays, call = flat_call(func, args, kwargs)
    return jax.make_jaxpr(functools.partial(call, visitor))(arrays)


def _is_abstract(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
