"""Conversion of optimizer states between flashoptim-jax and mpx."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, PyTree

from mpx._optim import FlashState
from mpx._optim._options import StateFormat, master_codec, moment_codec
from mpx._optim._state import make_layout
from mpx._quant import Block, Quantized
from mpx._tree import is_floating, shape_of
from mpx.compat._flashoptim_codecs import (
    F32,
    MasterBits,
    View,
    correction_dtype,
    dequantize_momentum,
    dequantize_variance,
    has_correction,
    init_correction,
    is_quantized,
    is_state,
    no_state,
    quantize_momentum,
    quantize_variance,
    split_leaf,
)
from mpx.compat._flashoptim_steps import flatten

_BLOCK = Block()
_QUANTIZE = {"mu": quantize_momentum, "nu": quantize_variance}
_DEQUANTIZE = {"mu": dequantize_momentum, "nu": dequantize_variance}


class FlashAdamState(NamedTuple):
    """The state of Adam and AdamW.

    Attributes:
        count: The number of steps taken, int32.
        mu: First moments: `QuantizedArray` or f32.
        nu: Second moments: `QuantizedArray` or f32.
        ecc: Corrections, int8 or int16; a scalar int32 where there is none.
    """

    count: Any
    mu: Any
    nu: Any
    ecc: Any


class FlashLionState(NamedTuple):
    """The state of Lion, as `FlashAdamState` without second moments.

    Attributes:
        count: The number of steps taken, int32.
        mu: Moments: `QuantizedArray` or f32.
        ecc: Corrections.
    """

    count: Any
    mu: Any
    ecc: Any


class FlashSGDState(NamedTuple):
    """The state of gradient descent, as `FlashLionState`.

    Attributes:
        count: The number of steps taken, int32.
        mu: Moments; a scalar int32 without momentum.
        ecc: Corrections.
    """

    count: Any
    mu: Any
    ecc: Any


State = FlashAdamState | FlashLionState | FlashSGDState


class Converted(NamedTuple):
    """Parameters and state after a conversion."""

    params: PyTree
    state: Any


def to_mpx(
    params: PyTree,
    state: Any,
    *,
    format: StateFormat = "flashoptim",
    group_size: int = 32,
) -> Converted:
    """Converts a state of flashoptim-jax for `mpx.optim.flash_adamw` and the others.

    In the format `"flashoptim"` nothing is lost, and the parameters stay as they are:
    codes and scales are taken over where the last axis of a parameter consists of whole
    groups, other moments become f32. The format `"mpx"` encodes everything anew.

    Args:
        params: The parameters.
        state: Their state, made here or by flashoptim-jax itself.
        format: That of `mpx.optim.Compression` of the optimizer which is to go on.
        group_size: The one that the state was made with.

    Returns:
        The parameters and an `mpx.optim.FlashState`.
    """
    flat = flatten(params)
    columns = {
        name: flat.like(getattr(state, name), f"`state.{name}`")
        for name in ("mu", "nu", "ecc")
        if hasattr(state, name)
    }
    new: dict[str, list[Any]] = {name: [] for name in ("params", "mu", "nu", "ecc")}
    for i, (name, leaf) in enumerate(zip(flat.names, flat.leaves, strict=True)):
        row = {column: values[i] for column, values in columns.items()}
        param, ecc = _correction_to_mpx(leaf, row["ecc"], format)
        new["params"].append(param)
        new["ecc"].append(ecc)
        for moment in ("mu", "nu"):
            stored = row.get(moment)
            if stored is not None:
                stored = _moment_to_mpx(moment, stored, format, group_size, name)
            new[moment].append(stored)
    trees = {name: flat.treedef.unflatten(column) for name, column in new.items()}
    has_any = {name: any(x is not None for x in new[name]) for name in ("mu", "nu")}
    kind = "lion" if "Lion" in type(state).__name__ else "sgd"
    pairs = zip(new["params"], new["ecc"], strict=True)
    return Converted(
        trees["params"],
        FlashState(
            count=jnp.asarray(state.count, jnp.int32),
            mu=trees["mu"] if has_any["mu"] else None,
            nu=trees["nu"] if has_any["nu"] else None,
            correction=trees["ecc"],
            layout=make_layout("adam" if "nu" in columns else kind, format, pairs),
            format=format,
        ),
    )


def _moment_to_mpx(
    moment: str, stored: Any, format: StateFormat, group_size: int, name: str
) -> Any:
    if not is_state(stored):
        return None
    if not is_quantized(stored):
        return jnp.asarray(stored, F32)
    view = View(shape_of(stored.values), group_size)
    grouped = view.quantized(stored, name)  # checks the number of scales
    if view.grouped and view.groups and format == "flashoptim":
        return grouped
    x = _DEQUANTIZE[moment](stored, group_size)
    if not view.grouped or not view.groups:
        return x
    codec = moment_codec(moment, quantized=True, format=format)
    codes, scale = codec.encode(x.reshape(*grouped.scale.shape, group_size), _BLOCK)
    return Quantized(codes.reshape(x.shape), scale)


def _correction_to_mpx(
    param: Any, ecc: Any, format: StateFormat
) -> tuple[Any, Array | None]:
    if not is_floating(param) or not has_correction(param, ecc):
        return param, None
    ecc = jnp.asarray(ecc)
    if format == "flashoptim":
        return param, ecc
    weight = master_codec(param.dtype, ecc.dtype, "flashoptim").decode(
        param, ecc, _BLOCK
    )
    return master_codec(param.dtype, ecc.dtype, format).encode(
        weight, param.dtype, _BLOCK
    )


def from_mpx(
    params: PyTree,
    state: FlashState,
    state_type: type | None = None,
    *,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
) -> Converted:
    """Converts a state of mpx to the layout of flashoptim-jax.

    What has this layout already is taken over bit for bit: states of the format
    `"flashoptim"` in groups of `group_size`. Anything else is encoded anew.

    Args:
        params: The parameters.
        state: Their state, in any format.
        state_type: `FlashAdamState`, `FlashLionState` or `FlashSGDState`; by default the
            first if there are second moments, else the second.
        quantize: The option of the optimizer which is to go on.
        master_weight_bits: Likewise.
        group_size: Likewise.

    Returns:
        The parameters and their state.
    """
    cls: Any = state_type or (FlashLionState if state.nu is None else FlashAdamState)
    flat = flatten(params)
    what = "The optimizer state"
    new: dict[str, list[Any]] = {"params": [], "ecc": []}
    for param, ecc in zip(flat.leaves, flat.like(state.correction, what), strict=True):
        pair = _correction_from_mpx(param, ecc, state.format, master_weight_bits)
        new["params"].append(pair[0])
        new["ecc"].append(pair[1])
    for moment in ("mu", "nu"):
        if moment not in cls._fields:
            continue
        tree = getattr(state, moment)
        column = [None] * len(flat.leaves) if tree is None else flat.like(tree, what)
        new[moment] = [
            no_state()
            if tree is None or not is_floating(param)
            else _moment_from_mpx(
                moment,
                param,
                x,
                state.format,
                quantize=quantize,
                group_size=group_size,
            )
            for param, x in zip(flat.leaves, column, strict=True)
        ]
    trees = {name: flat.treedef.unflatten(column) for name, column in new.items()}
    new_params = trees.pop("params")
    return Converted(new_params, cls(count=state.count, **trees))


def _moment_from_mpx(
    moment: str,
    param: Any,
    stored: Any,
    format: StateFormat,
    *,
    quantize: bool,
    group_size: int,
) -> Any:
    if isinstance(stored, Quantized):
        size = stored.codes.shape[-1] // stored.scale.shape[-1]
        if quantize and format == "flashoptim" and size == group_size:
            return View(stored.codes.shape, size).undo_quantized(stored)
        codec = moment_codec(moment, quantized=True, format=format)
        codes = stored.codes.reshape(*stored.scale.shape, size)
        stored = codec.decode(Quantized(codes, stored.scale), _BLOCK)
    elif stored is None:  # frozen in mpx
        stored = jnp.zeros(param.shape, F32)
    x = stored.reshape(param.shape)
    return _QUANTIZE[moment](x, group_size) if quantize else x


def _correction_from_mpx(
    param: Any, ecc: Any, format: StateFormat, bits: MasterBits
) -> tuple[Any, Array]:
    if not is_floating(param):
        return param, no_state()
    if ecc is None:
        return param, init_correction(param, bits)
    if format == "flashoptim" and ecc.dtype == correction_dtype(param.dtype, bits):
        return param, ecc
    weight = master_codec(param.dtype, ecc.dtype, format).decode(param, ecc, _BLOCK)
    return split_leaf(weight, param.dtype, bits)
