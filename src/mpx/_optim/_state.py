"""The state of a compressed optimizer, its layout, and whether it fits."""

import dataclasses
import sys
import zlib
from collections.abc import Iterable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int, PyTree

from mpx._optim._options import Compression, StateFormat
from mpx._optim._params import F32, PARAM_DTYPES, FlatParams
from mpx._optim._update_rules import Leaf, Rule
from mpx._quant import MomentCodec, Quantized
from mpx._sharding import zero_beside
from mpx._tree import dtype_of, shape_of

MOMENTS = ("mu", "nu")
Pairs = Iterable[tuple[Any, Any]]
"""Each parameter with its correction, or with `None`."""
_INT8, _INT16 = np.dtype(np.int8), np.dtype(np.int16)
_INIT_AGAIN = "Make the state with `init(params)` of these parameters."


class FlashState(eqx.Module):
    """The state of a compressed optimizer: a pytree that any checkpointer can save.

    `mu`, `nu` and `correction` have the structure of the parameters. Their arrays have
    the shape of the parameter, scales that of its groups, `shape[:-1] + (groups,)`: each
    can be sharded like the parameter. For parameters that are `ShapeDtypeStruct`s, every
    leaf is one.

    Attributes:
        count: The number of steps taken, int32; skipped ones do not count.
        mu: First moments: `Quantized` (int8 codes) or f32, `None` for frozen leaves.
        nu: Second moments: `Quantized` (uint8 codes) or f32; `None` if the rule has none.
        correction: int8 or int16, the bits that 16-bit parameters lack, or `None`.
        layout: A zero under a name such as `adam-mpx-12x24-25x32-1f0c93aa`, which tells
            the kind of rule, the format, and the dtypes of parameters and corrections.
        format: The format of scales and corrections.
    """

    # Read by `optimizer_update`.
    mpx_is_compressed: ClassVar[bool] = True
    mpx_holds_masters: ClassVar[bool] = True

    count: Int[Any, ""]
    mu: PyTree
    nu: PyTree
    correction: PyTree
    layout: PyTree
    format: StateFormat = eqx.field(static=True)


def register_with_flax() -> None:
    """Tells `flax.serialization`, if it is in use, how to save the state."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    names = ("count", "mu", "nu", "correction", "layout")

    def save(state: FlashState) -> dict[str, Any]:
        to_dict = serialization.to_state_dict
        return {name: to_dict(getattr(state, name)) for name in names}

    def restore(state: FlashState, saved: dict[str, Any]) -> FlashState:
        from_dict = serialization.from_state_dict
        fields = {n: from_dict(getattr(state, n), saved[n], name=n) for n in names}
        fields["count"] = jnp.asarray(fields["count"])
        return dataclasses.replace(state, **fields)

    serialization.register_serialization_state(FlashState, save, restore, override=True)


def leaves_of(
    flat: FlatParams, state: FlashState, moments: tuple[str, ...]
) -> list[Leaf]:
    """Returns each parameter with its state."""
    what = "The optimizer state"
    columns = [flat.like(getattr(state, name), what) for name in moments]
    corrections = flat.like(state.correction, what)
    rows = zip(*columns, strict=True) if columns else [()] * len(flat.leaves)
    return [
        Leaf(param, correction, tuple(row))
        for param, correction, row in zip(flat.leaves, corrections, rows, strict=True)
    ]


# --- layout ---------------------------------------------------------------------------
# The layout is the name of a scalar in the state, and with that a part of the tree's
# structure. So a checkpointer refuses to restore a state into a different one, where it
# would silently cast int8 corrections to int16; and a step compares it while tracing.


def make_layout(kind: str, format: str, pairs: Pairs) -> PyTree:
    """Returns a scalar under the name of a layout.

    Args:
        kind: The kind of the rule.
        format: The format of the state.
        pairs: The parameters and their corrections.

    Returns:
        A dict of one scalar. Without parameters, as for the placeholder of
        `optax.tree_map_params`, only the scalar.
    """
    pairs = list(pairs)
    zero = zero_beside((param for param, _ in pairs), jnp.int8)
    return {_layout_name(kind, format, pairs): zero} if pairs else zero


def _name_of(layout: PyTree) -> str | None:
    """Returns the name of a layout; `None` if the state has no parameters."""
    return next(iter(layout)) if isinstance(layout, dict) and layout else None


def check_layout(layout: PyTree, pairs: Pairs) -> None:
    """Raises if parameters or corrections are not those that the layout names."""
    name = _name_of(layout)
    # Corrections beside f32 parameters are refused elsewhere.
    pairs = [pair for pair in pairs if not is_missing(pair[1])]
    if name is None or any(dtype_of(param) == F32 for param, _ in pairs):
        return
    kind, format, *_ = name.split("-")
    found = _layout_name(kind, format, pairs)
    if found != name:
        raise ValueError(
            f"The state was made as `{name}`, but it holds, or is used with parameters "
            f"of, `{found}`: how many master weights have 24 and 32 bits, and a checksum "
            "of the dtypes of parameters and corrections. They were cast, so that the "
            "corrections mean something else. Restore with a template from "
            "`init(params)` of the optimizer that saved it. To change dtypes or "
            "`master_bits` take `master_params`, then `init` and `from_master`."
        )


def _layout_name(kind: str, format: str, pairs: Pairs) -> str:
    """Names a layout, in letters that are safe in file names."""
    dtypes = [
        (np.dtype(dtype_of(param)), np.dtype(dtype_of(correction)))
        for param, correction in pairs
        if not is_missing(correction)
    ]
    small = sum(correction == _INT8 for _, correction in dtypes)
    text = " ".join(f"{param}:{correction}" for param, correction in dtypes)
    checksum = zlib.crc32(text.encode())
    return f"{kind}-{format}-{small}x24-{len(dtypes) - small}x32-{checksum:08x}"


def is_missing(correction: Any) -> bool:
    """Returns whether a parameter has no correction, or `optax.masked` no state."""
    return correction is None or isinstance(correction, optax.MaskedNode)


# --- checks ---------------------------------------------------------------------------


def check_state(state: Any, rule: Rule, compression: Compression) -> None:
    """Raises if a state is none, or that of another optimizer."""
    if not isinstance(state, FlashState):
        raise TypeError(
            "A compressed optimizer expected the FlashState from `init(params)` or from "
            f"its last step; got {type(state).__name__}. In a larger optax state it is "
            "one of the members."
        )
    if state.format != compression.format:
        raise ValueError(
            f"`state.format` is {state.format!r}, but the optimizer has the format "
            f"{compression.format!r}. Give it `Compression(format={state.format!r})`, or "
            "make the state with its own `init(params)`."
        )
    name = _name_of(state.layout)
    if name is not None and not name.startswith(f"{rule.kind}-"):
        raise ValueError(
            f"The state was made as `{name}`, but this optimizer is of the kind "
            f"{rule.kind!r}, whose moments mean something else. Make the state with its "
            "own `init(params)`."
        )
    for moment in MOMENTS:
        if moment not in rule.moments and jax.tree.leaves(getattr(state, moment)):
            raise ValueError(
                f"`state.{moment}` was expected to be None, because this optimizer keeps "
                f"{' and '.join(rule.moments) or 'no moments'}, but it holds moments: "
                "the state is that of another optimizer. Make it with `init(params)` of "
                "this one."
            )


def check_moment(
    name: str, param: Any, moment: str, stored: Any, codec: MomentCodec
) -> None:
    """Raises if a moment of the state does not fit its parameter."""
    if stored is None:
        raise ValueError(
            f"The optimizer state has no {moment} for `{name}`. {_INIT_AGAIN}"
        )
    codes = stored
    if isinstance(stored, Quantized):
        codes = stored.codes
        if dtype_of(stored.scale) != codec.scale_dtype:
            raise ValueError(
                f"The scales of `{name}` are {dtype_of(stored.scale)}, but the format of "
                f"the state has {codec.scale_dtype}: it was written in another format."
            )
        *rows, groups = shape_of(stored.scale) or (0,)
        *outer, last = shape_of(param) or (0,)
        # A scale for each element would look like the codes.
        if rows != outer or not 1 <= groups < last or last % groups:
            raise ValueError(
                f"The scales of `state.{moment}` for `{name}` have shape "
                f"{shape_of(stored.scale)}, but they must divide the last axis of the "
                f"parameter, of shape {shape_of(param)}, into groups. {_INIT_AGAIN}"
            )
    if (shape_of(codes), dtype_of(codes)) != (shape_of(param), codec.code_dtype):
        raise ValueError(
            f"`state.{moment}` for `{name}` must be {codec.code_dtype} of the parameter's "
            f"shape {shape_of(param)}, but it is {dtype_of(codes) or type(codes).__name__}"
            f" of shape {shape_of(codes)}. {_INIT_AGAIN}"
        )


def check_correction(name: str, param: Any, correction: Any) -> None:
    """Raises if a correction does not fit its parameter.

    Its bits are read off the state, as `group_size` is: restored states may have been made
    with others.
    """
    dtype, shape = dtype_of(param), shape_of(param)
    if (
        dtype in PARAM_DTYPES[1:]
        and dtype_of(correction) in (_INT8, _INT16)
        and shape_of(correction) == shape
    ):
        return
    hint = ""
    if dtype == F32:
        hint = (
            "Did `eqx.apply_updates` make it f32? Updates are f32: apply them with "
            "`optax.apply_updates` or `mpx.optimizer_update`, which keep dtypes, or use "
            "`step`. "
        )
    raise ValueError(
        f"`state.correction` for `{name}` is {dtype_of(correction)} of shape "
        f"{shape_of(correction)}, but the parameter is {dtype} of shape {shape}. Only bf16 "
        "and f16 parameters have corrections: int8 or int16 of the same shape. "
        f"{hint}{_INIT_AGAIN}"
    )
