"""State that a step changes and must not spoil: found, replaced, checked.

Equinox `State` and NNX variables are recognised by their types. The `batch_stats` of Flax
Linen are ordinary arrays in arguments and results, recognised by their names.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from mpx._casting._cast import cast_like
from mpx._jax._tree import is_array, is_inexact, named_leaves, shape_of


class State(NamedTuple):
    """State that a call changes.

    Attributes:
        equinox: The `eqx.nn.State` objects among the arguments, in order.
        nnx: The NNX state that is not differentiated, or `None`.
        arrays: Arrays among the arguments that a call replaces, by name: the
            `batch_stats` of Linen, and differentiated NNX parameters once the function
            has assigned to them.
    """

    equinox: list[Any]
    nnx: PyTree
    arrays: dict[str, Any]


# --- Equinox --------------------------------------------------------------------------


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)


def equinox_states(tree: PyTree) -> list[Any]:
    """Returns the `eqx.nn.State`s of a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(x)]


def with_states(tree: PyTree, states: Sequence[Any]) -> Any:
    """Replaces the `eqx.nn.State`s of a tree, in order."""
    remaining = iter(states)
    return jax.tree.map(
        lambda node: next(remaining) if _is_state(node) else node,
        tree,
        is_leaf=_is_state,
    )


def holds_states(out: Any, states: Sequence[Any]) -> bool:
    """Returns whether a result holds the successors of `states`, in order."""
    found = [jax.tree.structure(state) for state in equinox_states(out)]
    return found == [jax.tree.structure(state) for state in states]


def changed_states(out: Any, before: list[Any]) -> list[Any]:
    """Returns the states that a result hands back, in the dtypes they came in."""
    if not before or not holds_states(out, before):
        return before
    pairs = zip(equinox_states(out), before, strict=True)
    return [cast_like(new, old) for new, old in pairs]


# --- Linen ----------------------------------------------------------------------------

_COLLECTION = "/batch_stats/"


def linen_statistics(arguments: Mapping[str, PyTree]) -> dict[str, Any]:
    """Returns the arrays of each `batch_stats` among the arguments, by name."""
    leaves = (named_leaves(tree, name) for name, tree in arguments.items())
    return {
        name: leaf
        for name, leaf in itertools.chain.from_iterable(leaves)
        if is_statistic(name) and is_array(leaf)
    }


def successors(result: PyTree, statistics: Mapping[str, Any]) -> dict[str, str]:
    """Returns, by name, which arrays of a result replace which statistics.

    A collection is found anywhere in the result if all its arrays are there under their
    names and with their shapes.

    Args:
        result: What the function returned.
        statistics: What `linen_statistics` returned.

    Raises:
        ValueError: If a collection in the result may replace several: none has more of
            its name than the others.
    """
    arrays = [(str(name), x) for name, x in named_leaves(result) if is_array(x)]
    shapes = {name: shape_of(x) for name, x in arrays}
    collections: dict[str, dict[str, str]] = {}
    for name in statistics:
        prefix, _, inside = f"/{name}".rpartition(_COLLECTION)
        collections.setdefault(prefix, {})[inside] = name
    places: dict[str, list[str]] = {}
    for prefix, names in collections.items():
        first = next(iter(names))
        for found in [name for name in shapes if f"/{name}".endswith(f"/{first}")]:
            place = found.removesuffix(first)
            new = (shapes.get(place + inside) for inside in names)
            if all(map(eq, new, (shape_of(statistics[x]) for x in names.values()))):
                places.setdefault(place, []).append(prefix)
    replaced: dict[str, str] = {}
    for place, fitting in places.items():
        names = collections[_nearest(place, fitting)]
        replaced |= {place + inside: name for inside, name in names.items()}
    return replaced


def _nearest(place: str, collections: list[str]) -> str:
    """Returns the collection whose name has the most in common with a place."""
    words = {*place.split("/")}
    shared = [len(words & {*name.split("/")}) for name in collections]
    best = [x for x, n in zip(collections, shared, strict=True) if n == max(shared)]
    if len(best) > 1:
        arguments = " or ".join(f"`{name[1:]}`" for name in best)
        raise ValueError(
            f"The function returned `batch_stats` that may replace those of {arguments}, "
            "whose arrays have the same names. Return them under the name of their "
            'argument, such as `{"student": updates}`.'
        )
    return best[0]


def is_statistic(name: str) -> bool:
    """Returns whether a name is that of an array in `batch_stats`."""
    return _COLLECTION in f"/{name}"


# --- Checks ---------------------------------------------------------------------------


def is_spoilt(pairs: Iterable[tuple[Any, Any]]) -> Bool[Array, ""]:
    """Returns whether a number became infinite or nan that was finite.

    Args:
        pairs: Arrays before and after; `None` for before counts as finite. An array that
            was not replaced costs nothing.
    """
    checks = []
    for before, after in pairs:
        if after is before or not is_inexact(after):
            continue
        spoilt = ~jnp.isfinite(after)
        if before is not None and shape_of(before) == shape_of(after):
            spoilt &= jnp.isfinite(before)
        checks.append(jnp.any(spoilt))
    return jnp.stack(checks).any() if checks else jnp.array(False)


def state_pairs(before: PyTree, after: PyTree) -> list[tuple[Any, Any]]:
    """Returns the arrays of two states in pairs."""
    return list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
