"""State that a step changes and must not spoil: found, replaced, checked, rolled back.

Equinox `State` and NNX variables are recognised by their types. The `batch_stats` of Flax
Linen are ordinary arrays in arguments and results, recognised by their names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from mpx._cast import cast_like
from mpx._tree import is_array, is_inexact, map_with_name, named_leaves, shape_of


class State(NamedTuple):
    """State that a call changes.

    Attributes:
        equinox: The `eqx.nn.State` objects among the arguments, in order.
        nnx: The NNX state that is not differentiated, or `None`.
    """

    equinox: list[Any]
    nnx: PyTree


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

_COLLECTION = re.compile(r"((?:^|.*/)batch_stats)/(.+)")


def linen_collections(arguments: PyTree) -> list[dict[str, Any]]:
    """Returns each `batch_stats` among the arguments, as arrays by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, leaf in named_leaves(arguments):
        match = _COLLECTION.fullmatch(name)
        if match and is_array(leaf):
            found.setdefault(match[1], {})[match[2]] = leaf
    return list(found.values())


def replaced_statistics(
    aux: PyTree, collections: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the arrays that `batch_stats` in a result replace, by names in the result.

    A collection is found anywhere in the result if all its arrays are there under their
    names; they may have a further leading axis. Arrays under `batch_stats` that replace
    no known collection have the value `None`.
    """
    leaves: dict[str, Any] = {n: x for n, x in named_leaves(aux) if is_array(x)}
    found: dict[str, Any] = {
        name: None for name in leaves if _COLLECTION.fullmatch(name)
    }
    for collection in collections:
        first = next(iter(collection))
        for name in leaves:
            if name != first and not name.endswith(f"/{first}"):
                continue
            prefix = name.removesuffix(first)
            olds = {prefix + inside: old for inside, old in collection.items()}
            if all(_follows(leaves.get(new), old) for new, old in olds.items()):
                found.update(olds)
    return found


def _follows(new: Any, old: Any) -> bool:
    shape = shape_of(old)
    return (
        new is not None and shape_of(new)[-len(shape) or len(shape_of(new)) :] == shape
    )


def roll_back(finite: Bool[Array, ""], aux: PyTree, before: Mapping[str, Any]) -> Any:
    """Returns a result with the old statistics if the step is not finite."""

    def select(name: str, new: Any) -> Any:
        old = before.get(name)
        if old is None:
            return new
        old = jnp.asarray(old).astype(new.dtype)
        return jnp.where(finite, new, jnp.broadcast_to(old, new.shape))

    return map_with_name(select, aux) if before else aux


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
