"""Conversion of optimizer states between flashoptim-jax and mpx."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._jax._sharding import zeros_alike
from mpx._jax._tree import is_floating, named_leaves, shape_of
from mpx._optim._optimizers import Stepped
from mpx._optim._packing import PackedLeaf, Unpacked, decode_moment
from mpx._optim._state import FlashState, make_state
from mpx._quant._codecs import Quantized
from mpx.compat.flashoptim import quantization
from mpx.compat.flashoptim.compression import is_state, no_state


class FlashAdamState(NamedTuple):
    """The state of Adam and AdamW.

    Attributes:
        count: The number of steps taken, int32.
        mu: First moments: `QuantizedArray` or f32.
        nu: Second moments: `QuantizedArray` or f32.
        ecc: Corrections, int8 or int16; a scalar int32 where there is none.
    """

    count: PyTree
    mu: PyTree
    nu: PyTree
    ecc: PyTree


class FlashLionState(NamedTuple):
    """The state of Lion: `FlashAdamState` without second moments."""

    count: PyTree
    mu: PyTree
    ecc: PyTree


class FlashSGDState(NamedTuple):
    """The state of gradient descent; without momentum, `mu` holds scalars of int32."""

    count: PyTree
    mu: PyTree
    ecc: PyTree


def to_mpx(params: PyTree, state: PyTree, *, group_size: int = 32) -> Stepped:
    """Converts a state of flashoptim-jax for `mpx.optim.flash_adamw` and the others.

    Nothing is lost: codes and scales are taken over where the last axis of a parameter
    consists of whole groups, other moments become f32. The optimizer that continues needs
    `Compression(format="flashoptim")`. To go on in the default format, put the result of
    `mpx.checkpoint.to_f32` into `mpx.checkpoint.from_f32`.

    Args:
        params: The parameters.
        state: Their state, made here or by flashoptim-jax itself.
        group_size: The one that the state was made with.

    Returns:
        The parameters and an `mpx.optim.FlashState`.
    """
    leaves, treedef = jax.tree.flatten(params)
    kind = "lion" if "Lion" in type(state).__name__ else "sgd"
    kind = "adam" if "nu" in state._fields else kind
    moments = {
        name: [
            _moment_to_mpx(name, x, group_size)
            for x in treedef.flatten_up_to(getattr(state, name))
        ]
        for name in ("mu", "nu")
        if name in state._fields
    }
    if kind == "sgd" and all(x is None for x in moments["mu"]):
        moments = {}  # without momentum
    eccs = treedef.flatten_up_to(state.ecc)
    packed = []
    for param, ecc, *stored in zip(leaves, eccs, *moments.values(), strict=True):
        leaf = Unpacked(tuple(stored), jnp.asarray(ecc) if is_state(ecc) else None)
        packed.append(PackedLeaf(param, leaf.pack() if is_floating(param) else None))
    new = make_state(kind, "flashoptim", tuple(moments), packed, treedef)
    count = jnp.asarray(state.count, jnp.int32)
    return Stepped(params, dataclasses.replace(new, count=count))


def _moment_to_mpx(name: str, x: PyTree, group_size: int) -> PyTree:
    if not quantization.is_quantized(x):
        return jnp.asarray(x, jnp.float32) if is_state(x) else None
    quantization.check_scales(x, group_size)
    shape = shape_of(x.values)
    if shape == () or 0 in shape or shape[-1] % group_size:
        return quantization.dequantize(name, x, group_size)
    scales = jnp.asarray(x.scales, jnp.float16)
    return Quantized(jnp.asarray(x.values), scales.reshape(*shape[:-1], -1))


def from_mpx(
    params: PyTree,
    state: FlashState,
    state_type: type | None = None,
    *,
    quantize: bool | Callable[[str, PyTree], bool] = True,
    group_size: int = 32,
) -> Stepped:
    """Converts a state of mpx to the layout of flashoptim-jax.

    Corrections, and moments in groups of `group_size`, are taken over bit for bit; other
    moments are encoded anew.

    Args:
        params: The parameters.
        state: Their state, in the format `"flashoptim"`.
        state_type: `FlashAdamState`, `FlashLionState` or `FlashSGDState`; by default the
            first if there are second moments, else the second.
        quantize: The option of the optimizer that continues, or a function that returns
            it for the path of a parameter and the parameter.
        group_size: The option of the optimizer that continues.

    Returns:
        The parameters and their state.

    Raises:
        ValueError: If the state has another format.
    """
    if state.format != "flashoptim":
        raise ValueError(
            f"The state has the format {state.format!r}, but flashoptim-jax needs that of "
            '`Compression(format="flashoptim")`. Convert it with `mpx.checkpoint.to_f32` '
            "and `from_f32`."
        )
    cls: PyTree = state_type or (FlashLionState if state.nu is None else FlashAdamState)
    treedef, named = jax.tree.structure(params), named_leaves(params)
    eccs = treedef.flatten_up_to(state.correction)
    trees = {"ecc": treedef.unflatten(no_state() if x is None else x for x in eccs)}
    for moment in {"mu", "nu"} & {*cls._fields}:
        tree, new = getattr(state, moment), []
        stored = named if tree is None else treedef.flatten_up_to(tree)
        for (name, param), x in zip(named, stored, strict=True):
            if tree is None or not is_floating(param):
                new.append(no_state())
                continue
            codes = quantize(name, param) if callable(quantize) else quantize
            size = group_size if codes else None
            new.append(_moment_from_mpx(moment, param, x, size))
        trees[moment] = treedef.unflatten(new)
    return Stepped(params, cls(count=state.count, **trees))


def _moment_from_mpx(
    name: str, param: PyTree, x: PyTree, group_size: int | None
) -> PyTree:
    """Returns a moment in groups of `group_size`, or in f32 if that is `None`."""
    if isinstance(x, Quantized):
        if x.codes.shape[-1] // x.scale.shape[-1] == group_size:
            return quantization.QuantizedArray(x.codes, x.scale.reshape(-1))
        x = decode_moment(name, x, "flashoptim")
    elif x is None:  # frozen in mpx
        x = zeros_alike(param, np.dtype(np.float32))
    return x if group_size is None else quantization.quantize(name, x, group_size)
