"""Selectors: one way to name layers, parameters and operations.

A selector is a predicate `(path, leaf) -> bool`; a type, which selects what its nodes hold
and, where functions run, what their `__call__` computes; or a regular expression. That is
searched in the path of a parameter inside its argument, such as `layers/0/norm/weight`, and in
`amp` and `fp8` also in the path of `jax.named_scope`s. An argument that is an array has no
path: its whole name must match. An expression or type that selects nothing is an error.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.tree_util import all_leaves
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer
from mpx._jax._tree import dtype_of, shape_of

Selector = str | type | Callable[..., Any]
Selectors = Selector | Iterable[Selector]


PREDICATE = "`(path, leaf) -> bool`"


def parse_selectors(
    given: PyTree, what: str, predicate: str = PREDICATE
) -> tuple[Selector, ...]:
    """Returns the selectors that a user gave: one, or several."""
    single = callable(given) or isinstance(given, str | Mapping)
    found: Any = (given,) if single or not isinstance(given, Iterable) else given
    selectors = tuple(found)
    for selector in selectors:
        # A module that can be called, and not its type, is no predicate.
        if not callable(selector) or not all_leaves([selector]):
            check_pattern(selector, what, predicate)
    return selectors


def check_pattern(pattern: object, what: str, predicate: str = PREDICATE) -> None:
    """Raises unless a selector is a regular expression."""
    if not isinstance(pattern, str):
        raise TypeError(
            f"`{what}` takes a regular expression for paths such as "
            f"`layers/0/norm/weight`, a module type, a predicate {predicate}, "
            f"or a list of these, but {pattern!r} was given."
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} in `{what}` is not a regular expression: {error}. Escape "
            "special characters with `re.escape`."
        ) from error


def search(pattern: str, name: str) -> bool:
    """Returns whether a regular expression selects a leaf, a scope or a function."""
    path = getattr(name, "path", name)
    # An input that happens to be called `norm_x` is not what "norm" means.
    return bool(re.search(pattern, path) if path else re.fullmatch(pattern, name))


def matches(selector: Selector, name: str, leaf: PyTree) -> bool:
    """Returns whether a selector selects a leaf with this name."""
    if isinstance(selector, str):
        return search(selector, name)
    if isinstance(selector, type):
        held = any(issubclass(kind, selector) for kind in getattr(name, "types", ()))
        return held or isinstance(leaf, selector)
    found = selector(str(getattr(name, "path", name)), leaf)
    dtype, shape, traced = dtype_of(found), shape_of(found), is_tracer(found)
    if dtype is not None and (dtype != np.dtype(bool) or shape != () or traced):
        raise TypeError(
            f"The predicate {selector!r} must return True or False, but for `{name}` it "
            f"returned an array: {dtype} of shape {shape}{', traced' * traced}. Use the "
            "path, the shape or the dtype of a leaf, not its values."
        )
    return bool(found)


def shown(selector: Selector) -> str:
    """Returns how reports and messages call a selector."""
    if isinstance(selector, str):
        return selector
    return getattr(selector, "__name__", type(selector).__name__)


class Matcher:
    """Selectors at work in one call, which note what they select."""

    def __init__(self, selectors: Sequence[Selector], what: str) -> None:
        """Prepares selectors that the user gave as the option `what`."""
        self.selectors = tuple(selectors)
        self._what, self._names = what, dict[str, None]()
        self.kinds = dict[type, None]()  # of the nodes around the leaves asked about
        self._idle = [s for s in selectors if isinstance(s, str | type)]

    def find(self, name: str, leaf: PyTree = None) -> Selector | None:
        """Returns the first selector that selects a leaf, or a path of named scopes."""
        if not self.selectors:
            return None
        self._names.setdefault(getattr(name, "path", name) or name)
        self.kinds.update(dict.fromkeys(getattr(name, "types", ())))
        asked = self.selectors  # all of them: those that select nothing are an error
        if leaf is None:
            asked = [s for s in asked if isinstance(s, str | type)]
        found = [s for s in asked if matches(s, name, leaf)]
        self._idle = [s for s in self._idle if s not in found]
        return found[0] if found else None

    def check(self, was_called: Callable[[type], bool] = lambda _: False) -> None:
        """Raises for strings and types that have selected nothing."""
        for selector in self._idle:
            names = self._names
            if isinstance(selector, type):
                names = [kind.__name__ for kind in self.kinds]
            if isinstance(selector, str) or not was_called(selector):
                raise selects_nothing(selector, self._what, names)


def check_selectors(
    selectors: Iterable[Selector],
    what: str,
    named: Iterable[tuple[str, PyTree]],
    was_called: Callable[[type], bool] = lambda _: False,
) -> None:
    """Raises for strings and types that select none of these leaves and scopes."""
    matcher = Matcher(tuple(selectors), what)
    for name, leaf in named:
        matcher.find(name, leaf)
    matcher.check(was_called)


def selects_nothing(selector: Selector, what: str, names: Iterable[str]) -> ValueError:
    """Returns the error for a selector that selects nothing, with near names."""
    names = list(dict.fromkeys(names))
    parts = {part: name for name in reversed(names) for part in name.split("/")}
    parts.update((name, name) for name in names)
    wanted = re.sub(r"[^\w/.]", "", shown(selector))
    found = difflib.get_close_matches(wanted, parts, n=3)
    near = list(dict.fromkeys(parts[part] for part in found))
    if isinstance(selector, str):
        meant = (
            "Paths start inside the argument that holds a parameter, such as "
            "`layers/0/norm/weight`, without the name of the argument."
        )
    elif isinstance(selector, type):
        meant = (
            "No argument holds a node of this type, and none was called. Parameters in a "
            "dictionary, as in Linen and Haiku, are selected by their paths."
        )
    else:
        near, meant = [], "The predicate is false for all of them."
    listed = f"Near names: {', '.join(map(repr, near))}."
    if not near:
        more = " …" if len(names) > 8 else ""
        listed = f"Names: {', '.join(map(repr, names[:8])) or 'none'}{more}."
    return ValueError(f"{selector!r} in `{what}` selects nothing. {listed} {meant}")
