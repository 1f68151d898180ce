"""Parameters as a flat list with names; which of them are cast, train and decay."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._cast import cast_state_leaf, map_floating
from mpx._casting._keep import is_state
from mpx._casting._select import Matcher, Selectors, parse_selectors
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype
from mpx._jax._nnx import without_variables
from mpx._jax._tree import (
    LeafName,
    cast_leaf,
    dtype_of,
    flatten_with_names,
    is_none,
    named_leaves,
    path_name,
    shape_of,
)

Mask = PyTree | Callable[[PyTree], PyTree] | None
"""Which parameters decay: a tree of booleans, or a function of the parameters."""
TreeDef = Any
"""`jax.tree_util.PyTreeDef`, which type checkers take for a variable."""
F32 = np.dtype(jnp.float32)
PARAM_DTYPES = (F32, np.dtype(jnp.bfloat16), np.dtype(jnp.float16))


class FlatParams(NamedTuple):
    """A tree of parameters, flattened; `None` counts as a leaf.

    `bare` is the structure without NNX variables, which is that of the state: one variable
    would hold both codes and scales, which NNX would separate.
    """

    names: Sequence[str]
    leaves: list[PyTree]
    treedef: TreeDef
    bare: TreeDef

    def like(self, tree: PyTree, what: str) -> list[PyTree]:
        """Returns what another tree holds in the place of each parameter."""
        if tree is None:
            return [None] * len(self.leaves)
        tree = without_variables(tree)
        try:
            return self.bare.flatten_up_to(tree)
        except ValueError as error:
            # The state of a parameter is a `Packed`.
            flat, _ = jax.tree_util.tree_flatten_with_path(
                tree, is_leaf=lambda x: x is None or hasattr(x, "codes")
            )
            theirs = [path_name(path) for path, _ in flat]
            missing = [name for name in self.names if name not in theirs][:3]
            extra = [name for name in theirs if name not in self.names][:3]
            difference = f"{missing} are missing and {extra} are not expected"
            if not missing and not extra:
                difference = "some of its nodes are of another type or size"
            raise ValueError(
                f"{what} must have the structure of the parameters, but {difference}."
            ) from error


def flatten_params(params: PyTree) -> FlatParams:
    """Flattens parameters, with the path of each."""
    treedef = jax.tree.structure(params, is_leaf=is_none)
    named, bare = flatten_with_names(without_variables(params), is_leaf=is_none)
    names, leaves = [name for name, _ in named], [leaf for _, leaf in named]
    return FlatParams(names, leaves, treedef, bare)


def cast_params(params: PyTree, dtype: DTypeLike, keep: Selectors) -> PyTree:
    """Casts the parameters of a model, except what `keep` selects and running statistics."""
    kept = Matcher(parse_selectors(keep, "keep"), "keep")
    target = parse_float_dtype(dtype)

    def cast(name: LeafName, leaf: PyTree) -> PyTree:
        if kept.find(name, leaf) is not None:
            return leaf
        return (cast_state_leaf if is_state(name) else cast_leaf)(leaf, target)

    low = map_floating(cast, params)
    kept.check()
    return low


# --- checks ---------------------------------------------------------------------------


def is_trainable(name: str, param: PyTree) -> bool:
    """Returns whether a leaf is a parameter."""
    dtype = dtype_of(param)
    if dtype in PARAM_DTYPES:
        return True
    if _is_inexact(param):
        raise TypeError(
            f"`{name}` is {dtype}, but compressed optimizers hold weights in f32, bf16 or "
            "f16. Cast it, or freeze it with `ParamGroup(path, frozen=True)`."
        )
    return False


def check_has_params(flat: FlatParams) -> None:
    """Raises if a tree has leaves, but none that could train."""
    leaves = [x for x in flat.leaves if x is not None]
    if leaves and not any(map(_is_inexact, leaves)):
        came = [
            f"{name}: {dtype_of(leaf) or type(leaf).__name__}"
            for name, leaf in zip(flat.names, flat.leaves, strict=True)
        ]
        raise ValueError(
            "A compressed optimizer expected parameters, which are floating arrays, but "
            f"the tree has none: it holds {came[:8]}{' …' if len(came) > 8 else ''}. Was "
            "the wrong part of the model passed?"
        )


def _is_inexact(leaf: object) -> bool:
    """Returns whether a leaf is floating, also in 8 bits, or complex."""
    dtype = dtype_of(leaf)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


# --- weight decay ---------------------------------------------------------------------


def decays(mask: Mask, flat: FlatParams) -> list[bool]:
    """Returns for each parameter whether it decays; all do if `mask` is `None`.

    A boolean may stand for a whole part of the tree, and so may `None`: what a filter left
    out does not decay.
    """
    if mask is None:
        return [True] * len(flat.leaves)
    params = flat.treedef.unflatten(flat.leaves)
    leaves = jax.tree.leaves(mask)
    # A module of booleans may be callable.
    if callable(mask) and not (leaves and all(map(_is_flag, leaves))):
        mask = mask(params)
    wrong = [
        f"`{name}`: {dtype_of(leaf) or type(leaf).__name__}"
        for name, leaf in named_leaves(mask)
        if not _is_flag(leaf)
    ]
    if wrong or mask is None:
        raise TypeError(
            "`mask` must be a tree of True and False, or a function of the parameters "
            f"that returns one, but it holds {', '.join(wrong[:3]) or None}. Use shapes, "
            "dtypes or paths, which are known when the step is traced."
        )
    try:
        full = jax.tree.map(
            lambda keep, part: jax.tree.map(lambda _: keep, part, is_leaf=is_none),
            mask,
            params,
            is_leaf=is_none,
        )
    except ValueError as error:
        raise ValueError(
            "`mask` must have the structure of the parameters or be the beginning of it, "
            "but some of its nodes are of another type or size."
        ) from error
    return [bool(keep) for keep in flat.like(full, "`mask`")]


def _is_flag(leaf: object) -> bool:
    is_bool = isinstance(leaf, bool) or dtype_of(leaf) == np.dtype(bool)
    return is_bool and shape_of(leaf) == () and not is_tracer(leaf)
