"""Which parameters decay."""

from typing import Any

import jax
import numpy as np

from mpx._compat import is_tracer
from mpx._optim._state import Flat, describe_difference
from mpx._tree import dtype_of, map_with_name, shape_of


def decays(mask: Any, flat: Flat) -> list[bool]:
    """Returns for each parameter whether it decays.

    Args:
        mask: A tree of booleans, or what makes one of the parameters; `None` means all.
        flat: The parameters.

    Raises:
        TypeError: If the mask holds something else; the leaf is named.
        ValueError: If it is not like the parameters.
    """
    if mask is None:
        return [True] * len(flat.leaves)
    params = flat.treedef.unflatten(flat.leaves)
    if callable(mask) and not _is_mask(mask):
        mask = mask(params)
    if mask is None:
        raise ValueError(
            "`mask` is a function that returned None, but it must return a tree of "
            "booleans."
        )
    mask = map_with_name(_as_bool, mask, is_leaf=_is_none)
    try:
        # A boolean may stand for a whole part of the tree, and so may `None`: what
        # a filter left out does not decay.
        full = jax.tree.map(
            lambda keep, part: jax.tree.map(lambda _: keep, part, is_leaf=_is_none),
            mask,
            params,
        )
    except ValueError as error:
        theirs = jax.tree.structure(mask)
        raise ValueError(
            "`mask` must have the structure of the parameters or be the beginning of it, "
            f"but {describe_difference(theirs, flat.treedef, flat.names)}."
        ) from error
    return [bool(keep) for keep in flat.like(full, "`mask`")]


def _as_bool(name: str, keep: Any) -> bool:
    """Returns whether a leaf of a mask says yes."""
    if keep is None:
        return False
    is_bool = isinstance(keep, bool) or dtype_of(keep) == np.dtype(bool)
    if not is_bool or shape_of(keep) != ():
        came = type(keep).__name__ if dtype_of(keep) is None else _described(keep)
        raise TypeError(
            f"`mask` for `{name}` must be True or False, but {came} was given."
        )
    if is_tracer(keep):
        raise TypeError(
            f"`mask` for `{name}` must be known when the step is traced, but it was "
            "computed from values. Use shapes, dtypes or paths."
        )
    return bool(keep)


def _described(array: Any) -> str:
    return f"{dtype_of(array)} of shape {shape_of(array)}"


def _is_mask(tree: Any) -> bool:
    """Whether this is a tree of booleans, which a module of them is beside a function."""
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(
        isinstance(leaf, bool) or dtype_of(leaf) == np.dtype(bool) for leaf in leaves
    )


def _is_none(leaf: Any) -> bool:
    return leaf is None
