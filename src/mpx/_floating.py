"""The floating leaves of pytrees and of the NNX objects in them: cast and mapped."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from mpx._objects import clone, is_nnx_state, put_back, take_out, update_variables
from mpx._tree import is_floating, map_with_name


def keeps_its_dtypes(node: object) -> bool:
    """Whether casts pass a pytree node by as a whole.

    A class says so with the attribute `mpx_keeps_dtypes = True`: a loss scaling inside
    a training state stays f32 when the state is cast.
    """
    return getattr(type(node), "mpx_keeps_dtypes", False) is True


def cast_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Casts one floating leaf: JAX and NumPy arrays and `ShapeDtypeStruct`s alike."""
    if leaf.dtype == dtype:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        # Like an array, which is no longer weakly typed once it has been cast.
        return leaf.update(dtype=dtype, weak_type=False)
    # NumPy would warn about overflow to infinity and about signalling NaNs; JAX does not.
    with np.errstate(over="ignore", invalid="ignore"):
        return leaf.astype(dtype)


def cast_state_leaf(leaf: Any, dtype: np.dtype) -> Any:
    """Casts a leaf of running statistics, which is never narrowed.

    An average that moves by less than half an ulp per step stands still.
    """
    return cast_leaf(leaf, dtype) if dtype.itemsize > leaf.dtype.itemsize else leaf


def map_floating(
    fn: Callable[[str, Any, bool], Any],
    tree: PyTree,
    *,
    whole: Callable[[Any], bool] = keeps_its_dtypes,
    state: Callable[[Any], bool] = is_nnx_state,
) -> PyTree:
    """Maps the floating leaves of a pytree, and of the NNX objects in it.

    Args:
        fn: Maps a leaf's name, the leaf, and whether it is state to the new leaf.
        tree: Any pytree. NNX objects come back as fresh ones that share what the given
            ones share.
        whole: Whether a node is passed by, with everything it holds.
        state: Whether a node holds state, such as running statistics.
    """
    plain, objects = take_out(tree)

    def at(name: str, node: Any) -> Any:
        if whole(node):
            return node
        if state(node):
            return _map_leaves(functools.partial(fn, name), node, True)
        return fn(name, node, False) if is_floating(node) else node

    plain = map_with_name(at, plain, is_leaf=lambda node: whole(node) or state(node))
    if not objects:
        return plain
    fresh = clone(objects)
    map_variables(fn, fresh, whole=whole)
    return put_back(plain, fresh)


def map_variables(
    fn: Callable[[str, Any, bool], Any],
    objects: Mapping[str, Any],
    *,
    whole: Callable[[Any], bool],
) -> None:
    """Maps the floating arrays of NNX objects in place; see `map_floating`."""

    def new(name: str, variable: Any) -> Any:
        return _map_leaves(
            functools.partial(fn, name), variable, is_nnx_state(variable)
        )

    update_variables(objects, new, whole=whole)


def _map_leaves(fn: Callable[[Any, bool], Any], tree: PyTree, is_state: bool) -> PyTree:
    return jax.tree.map(
        lambda leaf: fn(leaf, is_state) if is_floating(leaf) else leaf, tree
    )
