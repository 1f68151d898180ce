"""Which arrays of a call are parameters, and how they are called."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from mpx._casting._context import argument_names
from mpx._casting._keep import is_state
from mpx._jax import _nnx
from mpx._jax._arguments import as_count
from mpx._jax._compat import is_differentiated
from mpx._jax._frameworks import Named
from mpx._jax._tree import LeafName, flatten_with_names, is_array, is_inexact
from mpx._program._interpreter import Transformation


class Call(NamedTuple):
    """A function and its arguments."""

    func: Callable[..., PyTree]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    # The names of the arguments that a method or a partial holds
    held: frozenset[str] = frozenset()


Describe = Callable[[LeafName, bool], Named]
"""Tells what the name of an array, and whether it is a parameter, are for the user."""


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


def as_positions(
    params: tuple[int | str, ...] | None,
    func: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> tuple[int | str, ...] | None:
    """Returns which arguments the user named, with positions from the front."""
    if params is None:
        return None
    names = argument_names(func, len(args))
    param_arguments(names, [*names, *kwargs, *_keywords(func)], params)  # may raise
    return tuple([x % len(args) if isinstance(x, int) else x for x in params])


def _keywords(func: Callable[..., PyTree]) -> dict[str, PyTree]:
    """Returns what a `functools.partial` passes by keyword."""
    return func.keywords if isinstance(func, functools.partial) else {}


def unbound(visitor: Transformation, call: Call) -> Call:
    """Returns a call with what a method or a `partial` holds as named arguments."""
    func, args, kwargs, held = call
    bound, inner = (), func
    if isinstance(func, functools.partial):
        bound, inner = func.args, func.func
    elif inspect.ismethod(func) and not isinstance(func.__self__, type):
        bound, inner = (func.__self__,), func.__func__
    own = {key: x for key, x in _keywords(func).items() if key not in kwargs}
    leaves = jax.tree.leaves((bound, own))
    if not any(is_array(x) or _nnx.is_nnx(x) for x in leaves):
        return call
    args = (*bound, *args)
    names = argument_names(inner, len(args))
    if visitor.params is not None:
        visitor.params = tuple(
            [x + len(bound) if isinstance(x, int) else x for x in visitor.params]
        )
    held |= {*names[: len(bound)], *own}
    return unbound(visitor, Call(inner, args, {**own, **kwargs}, held))


class Roles(NamedTuple):
    """What the arrays of a call are."""

    named: list[Named]  # Their names, and which of them are parameters
    asked: list[bool]  # Which of them are differentiated
    # The container that is taken for the parameters where nothing says which they are, and
    # there are others
    guess: str


def roles_of(visitor: Transformation, call: Call, describe: Describe | None) -> Roles:
    """Returns what the arrays of a call are.

    Parameters are the arguments that the user names, else the containers that are
    differentiated; and what the function itself holds. If nothing of this is known, it is
    the first container of floating arrays, which says so in the report, or else the arrays
    that are differentiated. Other parts of a partitioned model are parameters, too.
    """
    func, args, kwargs, held = call
    names = argument_names(func, len(args))
    trees = [*zip(names, args, strict=True), *sorted(kwargs.items())]
    if not isinstance(func, types.FunctionType):
        trees.insert(0, ("", func))
    leaves = [
        (name, leaf)
        for argument, tree in trees
        for name, leaf in flatten_with_names(tree, argument)[0]
        if is_array(leaf)
    ]
    asked = [is_inexact(leaf) and is_differentiated(leaf) for _, leaf in leaves]
    if describe is not None:
        pairs = zip(leaves, asked, strict=True)
        return Roles([describe(name, x) for (name, _), x in pairs], asked, "")
    guess = ""
    trained = {name.argument for (name, _), x in zip(leaves, asked, strict=True) if x}
    containers = {x.argument for x, leaf in leaves if x.path and is_inexact(leaf)}
    is_own = not containers.isdisjoint({"", *held})
    if visitor.params is not None:
        params = param_arguments(names, [*names, *kwargs], visitor.params)
    else:
        order = argument_names(func, len(args) + len(kwargs))
        order = list(dict.fromkeys([*order, *sorted(kwargs)]))
        params = [x for x in order if x in trained & containers]
        if not params and not is_own:
            # One that holds scalars only is a loss scale or a schedule.
            axes = {x.argument for x, leaf in leaves if is_inexact(leaf) and leaf.ndim}
            found = (containers & axes) or containers
            params = [x for x in order if x in found][:1]
            guess = params[0] if params and len(trees) > 1 else ""
            params = params or [x for x in order if x in trained]
            if visitor.takes_bare_params:
                params = params or names[:1]
        given = dict(trees)
        params += [
            x for x, tree in trees if params and completes(tree, given[params[0]])
        ]
    params = {"", *held, *params}
    named = [(x, x.argument in params and not is_state(x)) for x, _ in leaves]
    return Roles(named, asked, guess)


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
