"""State that a skipped step must not change: finding it, checking it, rolling it back.

Equinox `State` and NNX variables are recognised by their types. The `batch_stats` of Flax
Linen are ordinary arrays in arguments and results, recognised by their names.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from mpx._tree import is_array, is_inexact, map_with_name, named_leaves, shape_of

_COLLECTION = re.compile(r"((?:^|.*/)batch_stats)/(.+)")


def is_spoilt(pairs: Iterable[tuple[Any, Any]]) -> Bool[Array, ""]:
    """Returns whether a finite number became infinite or nan.

    Args:
        pairs: Arrays before and after the step; `None` for before counts as finite. An
            array that was not replaced costs nothing.
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
    """Returns the arrays that `batch_stats` in a result replace, by name in the result.

    A collection is found anywhere in the result if all its arrays are there under their
    names; they may have a further leading axis. Arrays under `batch_stats` that replace
    no known collection have the value `None`.
    """
    leaves = {name: leaf for name, leaf in named_leaves(aux) if is_array(leaf)}
    found = {name: None for name in leaves if _COLLECTION.fullmatch(name)}
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
