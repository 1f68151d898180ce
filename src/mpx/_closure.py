"""Arrays that a function reads without having them as arguments."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx

from mpx._tree import is_array, is_floating, named_leaves, shape_of

_MOST_OBJECTS = 10_000


def closed_over_floats(func: Callable[..., Any]) -> dict[str, Any]:
    """Returns the non-scalar floating arrays that a function may read, by name.

    It searches closures, defaults, partials, bound objects and the global variables that
    the code names, and those of functions found there. The function need not use them.

    Args:
        func: Any callable.

    Returns:
        Arrays of 32 bits or more. `batch["image"]` is called `batch/image`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    pending = [("", func)]
    while pending and len(seen) < _MOST_OBJECTS:
        name, value = pending.pop()
        if id(value) in seen or isinstance(value, types.ModuleType | type):
            continue
        seen.add(id(value))
        try:
            parts, floats = list(_parts(value)), list(_floats(value))
        except Exception:
            # Any object may be closed over, even one whose attributes raise, or a
            # dictionary whose keys JAX cannot sort. A warning must not end a run.
            continue
        pending.extend(parts)
        for path, leaf in () if parts else floats:
            found.setdefault("/".join(filter(None, (name, path))), leaf)
    return found


def _floats(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the wide floating arrays of a value, and their names in it."""
    if isinstance(value, str | int | float):
        return
    for path, leaf in _leaves(value):
        if is_floating(leaf) and leaf.dtype.itemsize >= 4 and shape_of(leaf):
            yield path, leaf


def _leaves(value: Any) -> Sequence[tuple[str, Any]]:
    leaves = named_leaves(value)
    is_leaf = len(leaves) == 1 and leaves[0][1] is value
    if is_leaf and not is_array(value) and hasattr(value, "__dict__"):
        return named_leaves(dict(vars(value)))  # an object that is no pytree
    return leaves


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the objects that a callable holds, with the user's names for them."""
    if isinstance(value, functools.partial | eqx.Partial):
        yield "", value.func
        yield from ((f"argument {i}", x) for i, x in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "", value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _variables(value)
    elif callable(value):
        wrapped = getattr(value, "__wrapped__", None)  # jit, checkpoint
        if wrapped is not None:
            yield "", wrapped


def _variables(func: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names, cells = func.__code__.co_freevars, func.__closure__ or ()
    for name, cell in zip(names, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    parameters = inspect.signature(func, follow_wrapped=False).parameters.values()
    for item in parameters:
        if item.default is not inspect.Parameter.empty:
            yield item.name, item.default
    for name in _global_names(func.__code__):
        value = func.__globals__.get(name)
        own = isinstance(value, types.FunctionType)
        # Functions of other modules belong to libraries, and so do their arrays.
        if own and value.__globals__ is not func.__globals__:
            continue
        yield name, value


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that code, and functions defined in it, may look up."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _global_names(const)
