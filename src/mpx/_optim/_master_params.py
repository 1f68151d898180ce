"""The f32 weights behind 16-bit parameters: read from a state, and put into one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._tree import check_shape, dtype_of
from mpx._optim._options import master_codec
from mpx._optim._packing import PackedLeaf, Packing, put_master
from mpx._optim._params import F32, PARAM_DTYPES, FlatParams, flatten_params
from mpx._optim._state import FlashState, check_packed, leaves_of, packed_tree
from mpx._quant import Block


def master_params(params: PyTree, state: PyTree) -> PyTree:
    """Returns the f32 weights behind 16-bit parameters.

    f32 parameters, integers, functions and other leaves come back as they are, and so
    do frozen parameters and 16-bit parameters without master weights.

    Args:
        params: The parameters, or a whole model.
        state: The optimizer's state, or an optax state that holds it.

    Raises:
        ValueError: If `state` does not hold one state that fits the parameters.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> params = {"w": jnp.ones((8,), jnp.bfloat16)}
        >>> state = flash_adamw(1e-3).init(params)
        >>> master_params(params, state)["w"].dtype
        dtype('float32')
    """
    flat, state, leaves, packings = _with_packings(params, state)

    def decode(leaf: PackedLeaf, packing: Packing) -> Any:
        if packing.correction is None:
            return leaf.param
        codec = master_codec(leaf.param.dtype, packing.correction, state.format)
        correction = packing.view(leaf.packed).correction
        return codec.decode(jnp.asarray(leaf.param), correction, Block())

    return flat.treedef.unflatten(map(decode, leaves, packings))


def from_master(master: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Puts f32 weights into parameters and state, for example to start from f32 weights.

    Leaves that are not parameters, such as integers and functions, come from `master`, in
    the dtype that they have in `params`, or from `params` where `master` has `None`.

    Args:
        master: The weights: a tree like `params`.
        params: Parameters whose dtypes are kept.
        state: The state made by `init(params)`, or an optax state that holds it; its
            moments and count are kept.

    Returns:
        Parameters and state that hold `master`, as exactly as their format can.

    Raises:
        TypeError: If a weight is not a real array.
        ValueError: If the trees or shapes differ, or `state` does not hold one state that
            fits the parameters.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> weights = {"w": jnp.full((8,), 0.1)}
        >>> params = {"w": weights["w"].astype(jnp.bfloat16)}
        >>> state = flash_adamw(1e-3).init(params)
        >>> params, state = from_master(weights, params, state)
        >>> abs(float(master_params(params, state)["w"][0]) - 0.1) < 1e-8
        True
    """
    flat, found, leaves, _ = _with_packings(params, state)
    weights = [
        _as_weight(name, weight, leaf.param)
        for name, weight, leaf in zip(
            flat.names, flat.like(master, "`master`"), leaves, strict=True
        )
    ]
    new_params, new_state = put_masters(flat, found, weights)
    return new_params, jax.tree.map(
        lambda x: new_state if x is found else x, state, is_leaf=lambda x: x is found
    )


def put_masters(
    flat: FlatParams, state: FlashState, weights: Sequence[Any]
) -> tuple[PyTree, FlashState]:
    """Puts weights into parameters and state; where there is none, nothing changes.

    Args:
        flat: The parameters, whose dtypes are kept.
        state: Their state.
        weights: For each leaf the weight in f32, another value if the leaf is no parameter,
            or `None`.
    """
    leaves, packings = leaves_of(flat, state)
    new = [
        leaf if weight is None else put_master(weight, leaf, packing, state.format)
        for weight, leaf, packing in zip(weights, leaves, packings, strict=True)
    ]
    return (
        flat.treedef.unflatten([leaf.param for leaf in new]),
        dataclasses.replace(state, packed=packed_tree(flat, new)),
    )


def _with_packings(
    params: PyTree, state: PyTree
) -> tuple[FlatParams, FlashState, list[PackedLeaf], list[Packing]]:
    """Returns flat parameters, the one state of an optax state, and each leaf with it.

    Raises:
        ValueError: If there is not exactly one state, or it does not fit the parameters.
    """
    is_state = lambda x: isinstance(x, FlashState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            "Expected the state of one compressed optimizer, by itself or in an optax "
            f"state, but {type(state).__name__} holds {len(found)} of them."
        )
    flat = flatten_params(params)
    leaves, packings = leaves_of(flat, found[0])
    for name, leaf, packing in zip(flat.names, leaves, packings, strict=True):
        if packing.correction is not None:
            check_packed(name, leaf, packing)
    return flat, found[0], leaves, packings


def _as_weight(name: str, weight: Any, param: Any) -> Any:
    """Returns the new value of a leaf; raises if it does not fit."""
    dtype = dtype_of(param)
    if dtype is None:
        return param if weight is None else weight
    if dtype not in PARAM_DTYPES:
        if weight is None:
            return param
        if dtype_of(weight) == dtype:
            return weight
    if isinstance(weight, int | float):
        weight = np.asarray(weight)
    came = dtype_of(weight)
    if came is None or jnp.issubdtype(came, jnp.complexfloating):
        raise TypeError(
            f"The weight of `{name}` must be a real array like the parameter, which is "
            f"{dtype}, but {came or type(weight).__name__} was given."
        )
    check_shape(f"The weight of `{name}`", weight, param)
    if isinstance(weight, jax.ShapeDtypeStruct):
        return weight
    return jnp.asarray(weight).astype(dtype if dtype not in PARAM_DTYPES else F32)
