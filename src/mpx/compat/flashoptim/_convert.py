"""Conversion of optimizer states between flashoptim-jax and mpx."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from mpx._jax._sharding import zeros_alike
from mpx._jax._tree import is_floating, named_leaves, shape_of
from mpx._optim import FlashState, Stepped
from mpx._optim._options import StateFormat
from mpx._optim._packing import (
    PackedLeaf,
    Unpacked,
    decode_moment,
    encode_moment,
    master_codec,
)
from mpx._optim._state import make_state
from mpx._quant import Block, Quantized
from mpx.compat.flashoptim import compression, quantization
from mpx.compat.flashoptim.compression import MasterBits, is_state, no_state

_BLOCK = Block()


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


def to_mpx(
    params: PyTree,
    state: PyTree,
    *,
    format: StateFormat = "flashoptim",
    group_size: int = 32,
) -> Stepped:
    """Converts a state of flashoptim-jax for `mpx.optim.flash_adamw` and the others.

    In the format `"flashoptim"` nothing is lost, and the parameters stay as they are:
    codes and scales are taken over where the last axis of a parameter consists of whole
    groups, other moments become f32. The format `"mpx"` encodes everything anew.

    Args:
        params: The parameters.
        state: Their state, made here or by flashoptim-jax itself.
        format: That of `mpx.optim.Compression` of the optimizer that continues.
        group_size: The one that the state was made with.

    Returns:
        The parameters and an `mpx.optim.FlashState`.
    """
    leaves, treedef = jax.tree.flatten(params)
    eccs = treedef.flatten_up_to(state.ecc)
    pairs = [
        _correction_to_mpx(*pair, format) for pair in zip(leaves, eccs, strict=True)
    ]
    kind = "lion" if "Lion" in type(state).__name__ else "sgd"
    kind = "adam" if "nu" in state._fields else kind
    moments: dict[str, list[PyTree]] = {}
    for name in [name for name in ("mu", "nu") if name in state._fields]:
        stored = treedef.flatten_up_to(getattr(state, name))
        new = [_moment_to_mpx(name, x, format, group_size) for x in stored]
        # Gradient descent may have no momentum.
        if kind != "sgd" or any(x is not None for x in new):
            moments[name] = new
    packed = []
    for index, (param, ecc) in enumerate(pairs):
        leaf = Unpacked(tuple(column[index] for column in moments.values()), ecc)
        packed.append(PackedLeaf(param, leaf.pack() if is_floating(param) else None))
    new = make_state(kind, format, tuple(moments), packed, treedef)
    return Stepped(
        treedef.unflatten([param for param, _ in pairs]),
        dataclasses.replace(new, count=jnp.asarray(state.count, jnp.int32)),
    )


def _moment_to_mpx(
    name: str, x: PyTree, format: StateFormat, group_size: int
) -> PyTree:
    if not quantization.is_quantized(x):
        return jnp.asarray(x, jnp.float32) if is_state(x) else None
    quantization.check_scales(x, group_size)
    shape = shape_of(x.values)
    grouped = shape != () and 0 not in shape and shape[-1] % group_size == 0
    if grouped and format == "flashoptim":
        scales = jnp.asarray(x.scales, jnp.float16)
        return Quantized(jnp.asarray(x.values), scales.reshape(*shape[:-1], -1))
    moment = quantization.dequantize(name, x, group_size)
    return encode_moment(name, moment, format, group_size) if grouped else moment


def _correction_to_mpx(
    param: PyTree, ecc: PyTree, format: StateFormat
) -> tuple[PyTree, Array | None]:
    if not is_floating(param) or not is_state(ecc):
        return param, None
    ecc = jnp.asarray(ecc)
    if format == "flashoptim":
        return param, ecc
    weight = compression.reconstruct_leaf(param, ecc)
    return master_codec(param.dtype, ecc.dtype, format).encode(
        weight, param.dtype, _BLOCK
    )


def from_mpx(
    params: PyTree,
    state: FlashState,
    state_type: type | None = None,
    *,
    quantize: bool | Callable[[str, PyTree], bool] = True,
    master_weight_bits: MasterBits | Literal["keep"] = 24,
    group_size: int = 32,
) -> Stepped:
    """Converts a state of mpx to the layout of flashoptim-jax.

    States of the format `"flashoptim"` in groups of `group_size` are taken over bit for
    bit; anything else is encoded anew.

    Args:
        params: The parameters.
        state: Their state, in any format.
        state_type: `FlashAdamState`, `FlashLionState` or `FlashSGDState`; by default the
            first if there are second moments, else the second.
        quantize: The option of the optimizer that continues, or a function that returns
            it for the path of a parameter and the parameter.
        master_weight_bits: The option of the optimizer that continues, or `"keep"` for
            those that the state has.
        group_size: The option of the optimizer that continues.

    Returns:
        The parameters and their state.
    """
    cls: PyTree = state_type or (FlashLionState if state.nu is None else FlashAdamState)
    treedef, named = jax.tree.structure(params), named_leaves(params)
    pairs = [
        _correction_from_mpx(param, ecc, state.format, master_weight_bits)
        for (_, param), ecc in zip(
            named, treedef.flatten_up_to(state.correction), strict=True
        )
    ]
    trees = {"ecc": treedef.unflatten([ecc for _, ecc in pairs])}
    for moment in {"mu", "nu"} & {*cls._fields}:
        tree, new = getattr(state, moment), []
        stored = named if tree is None else treedef.flatten_up_to(tree)
        for (name, param), x in zip(named, stored, strict=True):
            if tree is None or not is_floating(param):
                new.append(no_state())
                continue
            codes = quantize(name, param) if callable(quantize) else quantize
            size = group_size if codes else None
            new.append(_moment_from_mpx(moment, param, x, state.format, size))
        trees[moment] = treedef.unflatten(new)
    new_params = treedef.unflatten([param for param, _ in pairs])
    return Stepped(new_params, cls(count=state.count, **trees))


def _moment_from_mpx(
    name: str, param: PyTree, x: PyTree, format: StateFormat, group_size: int | None
) -> PyTree:
    """Returns a moment in groups of `group_size`, or in f32 if that is `None`."""
    if isinstance(x, Quantized):
        size = x.codes.shape[-1] // x.scale.shape[-1]
        if format == "flashoptim" and size == group_size:
            return quantization.QuantizedArray(x.codes, x.scale.reshape(-1))
        x = decode_moment(name, x, format)
    elif x is None:  # frozen in mpx
        x = zeros_alike(param, np.dtype(np.float32))
    return x if group_size is None else quantization.quantize(name, x, group_size)


def _correction_from_mpx(
    param: PyTree, ecc: PyTree, format: StateFormat, bits: PyTree
) -> tuple[PyTree, Array]:
    if bits == "keep":
        bits = None if ecc is None else 16 + 8 * ecc.dtype.itemsize
    dtype = compression.correction_dtype(param.dtype, bits)
    if ecc is None:
        return param, no_state() if dtype is None else zeros_alike(param, dtype)
    if format == "flashoptim" and ecc.dtype == dtype:
        return param, ecc
    weight = master_codec(param.dtype, ecc.dtype, format).decode(param, ecc, _BLOCK)
    return compression.split_leaf(weight, param.dtype, bits)
