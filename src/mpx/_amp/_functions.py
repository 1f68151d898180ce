"""Calls of a user's function through a visitor, whatever framework holds its parameters.

The function is traced as a pure one of its arrays, which may be inside modules: those of
NNX, Linen and Haiku have their variables taken out before and written back after.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from mpx import _nnx
from mpx._amp._catch import caught_attention
from mpx._amp._flash import attend
from mpx._amp._frameworks import (
    Role,
    call_haiku,
    call_linen,
    haiku_name,
    in_haiku,
    linen_call,
    linen_is_not_written,
    linen_name,
)
from mpx._call import argument_names
from mpx._compat import (
    ambient_scopes,
    is_differentiated,
    nothing_is_traced,
    open_jaxpr,
)
from mpx._jaxpr._interpreter import (
    Fact,
    Jaxpr,
    Outcome,
    Scopes,
    as_results,
    dtypes_of,
)
from mpx._tree import is_array, named_leaves

Named = tuple[str, Role | None]
"""The name of an argument's array, and why it counts as a parameter."""


class Traced(NamedTuple):
    """A function of arrays that has been traced.

    Attributes:
        jaxpr: The jaxpr, open.
        consts: Its constants.
        arrays: Its arguments.
        named: Their names and roles.
        has_params: Whether its parameters are known. While Linen or Haiku initialise a
            model it has none yet.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    arrays: list[Any]
    named: list[Named]
    has_params: bool


@runtime_checkable  # the tests check types
class Transformation(Protocol):
    """A visitor that functions can be called through."""

    cache: dict[Any, Any]

    def argument_fact(self, name: str, role: Role | None, leaf: Any) -> Fact:
        """Returns what is known of an argument's array."""
        ...

    def start(self, traced: Traced) -> Traced:
        """Looks at the function before it is run; may return another one to run."""
        ...

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        facts: Sequence[Fact],
        scopes: Scopes,
    ) -> Outcome:
        """Evaluates a jaxpr."""
        ...

    def finish(self, outs: list[Any]) -> list[Any]:
        """Returns the results for the user."""
        ...


class _Static:
    """The part of a result that is no array, carried in the structure of the rest."""

    def __init__(self, structure: Any, leaves: list[Any]) -> None:
        self.structure, self.leaves = structure, leaves

    def merge(self, arrays: list[Any]) -> Any:
        """Returns the result as the function returned it."""
        remaining = iter(arrays)
        leaves = [next(remaining) if x is _ARRAY else x for x in self.leaves]
        return jax.tree.unflatten(self.structure, leaves)


_ARRAY = object()
_FUNC = "the function"  # beside its arguments, whose names hold no spaces
_MOST_REMEMBERED = 1000
jax.tree_util.register_static(_Static)


def call_through(
    visitor: Transformation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None = None,
    describe: Callable[[str, Role | None], Named] = lambda *x: x,
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
    plain, objects = _nnx.take_out(arguments)
    if objects:
        return _call_with_nnx(visitor, names, plain, objects)
    pure = functools.partial(_call_pure, visitor, eager=eager)
    found = linen_call(func, args)
    if found is not None:
        return call_linen(
            found, kwargs, lambda f, *args: pure(f, args, {}, describe=linen_name)
        )
    if in_haiku():
        return call_haiku(
            func,
            args,
            kwargs,
            lambda f, *args: pure(f, args, {}, describe=haiku_name),
        )
    with linen_is_not_written():
        return pure(func, args, kwargs, describe=describe)


def _call_pure(
    visitor: Transformation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    eager: dict[Any, Any] | None,
    describe: Callable[[str, Role | None], Named],
) -> Any:
    """Calls a function that changes nothing but its results; arguments as above."""
    names = argument_names(func, len(args))
    leaves, structure = jax.tree.flatten((func, args, kwargs))
    # NumPy's f64 is JAX's f32, unless x64 is on.
    leaves = [jnp.asarray(x) if _is_numpy(x) else x for x in leaves]
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    static = [_ARRAY if is_array(leaf) else leaf for leaf in leaves]

    def flat(*arrays: Any) -> tuple[list[Any], _Static]:
        remaining = iter(arrays)
        full = [next(remaining) if leaf is _ARRAY else leaf for leaf in static]
        func, args, kwargs = jax.tree.unflatten(structure, full)
        outs, out_structure = jax.tree.flatten(func(*args, **kwargs))
        return [x for x in outs if is_array(x)], _Static(
            out_structure, [_ARRAY if is_array(x) else x for x in outs]
        )

    if eager is not None and nothing_is_traced():
        # The function is traced anew, since what it closes over may have changed; but
        # the jitted functions inside it, once rewritten, stay the same programs.
        visitor.cache = eager
        if len(eager) > _MOST_REMEMBERED:
            eager.clear()
    with caught_attention(attend):
        jaxpr, (_, out_static) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    body, consts = open_jaxpr(jaxpr)
    named = [
        describe(*pair) for pair in _names_and_roles(func, names, args, kwargs, consts)
    ]
    is_owner = any(role == "own" for _, role in named)
    has_params = is_owner or describe not in (linen_name, haiku_name)
    traced = visitor.start(Traced(body, consts, arrays, named, has_params))
    return out_static.merge(visitor.finish(run_traced(visitor, traced)))


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


def _is_numpy(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic)


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
        (f"{name}/{path}" if path else name, leaf, tree)
        for name, tree in (*zip(names, args, strict=True), *sorted(kwargs.items()))
        for path, leaf in named_leaves(tree)
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
    objects: dict[str, Any],
) -> Any:
    """Calls a function of NNX objects as a pure one and writes their state back.

    Args:
        visitor: The visitor.
        names: The names of the positional arguments.
        plain: The function and all arguments, with slots for NNX objects.
        objects: These objects by name.
    """
    split = _nnx.split(objects, ())

    def pure(state: Any, plain: dict[str, Any]) -> tuple[Any, Any]:
        merged = _nnx.merge(split._replace(rest=state), None)
        everything = _nnx.put_back(plain, merged.objects)
        func = everything.pop(_FUNC)
        args = [everything.pop(name) for name in names]
        return func(*args, **everything), _nnx.rest_of(merged)

    def describe(name: str, role: Role | None) -> Named:
        place, _, name = name.partition("/")
        if place == "state":
            position, _, path = name.partition("/")
            name = f"{split.names[int(position)]}/{path.removesuffix('/value')}"
            role = "own"
        elif role == "known" and "/" not in name:
            role = "bare"
        return name.removeprefix(f"{_FUNC}/"), role

    out, state = call_through(visitor, pure, (split.rest, plain), {}, describe=describe)
    _nnx.update(objects, state, before=split.rest)
    return out


def trace(
    visitor: Transformation,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Returns the jaxpr of a call through a visitor."""
    # NNX objects are copied, or they would hold tracers afterwards.
    plain, objects = _nnx.take_out((func, args, kwargs))
    split = _nnx.split(objects, ()) if objects else None
    state = split.rest if split is not None else None
    leaves, structure = jax.tree.flatten((plain, state))
    dynamic = [i for i, leaf in enumerate(leaves) if _is_abstract(leaf)]

    def call(arrays: list[Any]) -> list[Any]:
        full = list(leaves)
        for i, array in zip(dynamic, arrays, strict=True):
            full[i] = array
        plain, state = jax.tree.unflatten(structure, full)
        if split is not None:
            merged = _nnx.merge(split._replace(rest=state), None)
            plain = _nnx.put_back(plain, merged.objects)
        func, args, kwargs = plain
        outs = call_through(visitor, func, args, kwargs)
        return [out for out in jax.tree.leaves(outs) if is_array(out)]

    return jax.make_jaxpr(call)([leaves[i] for i in dynamic])


def _is_abstract(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
