"""The state of a compressed optimizer: layout, checks, and the f32 weights behind it."""

import dataclasses
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from mpx._jax._sharding import zero_beside
from mpx._jax._tree import check_shape, dtype_of, shape_of
from mpx._optim._options import Compression, StateFormat
from mpx._optim._packing import (
    INT8,
    PackedLeaf,
    Packing,
    Unpacked,
    is_missing,
    put_master,
)
from mpx._optim._params import F32, PARAM_DTYPES, FlatParams, flatten_params
from mpx._optim._update_rules import Rule
from mpx._quant import Block, Packed

Pairs = Iterable[tuple[PyTree, np.dtype | None]]
"""Each parameter with the dtype of its correction, or with `None`."""
_INIT_AGAIN = "Make the state with `init(params)` of these parameters."


class FlashState(eqx.Module):
    """The state of a compressed optimizer: a pytree that any checkpointer can save.

    `packed` has the structure of the parameters, and at most two arrays for each, since
    every array costs time whenever a step is dispatched. Their last axes are those of the
    parameter, and those of its groups, `shape[:-1] + (groups,)`: each can be sharded like
    the parameter. For parameters that are `ShapeDtypeStruct`s, every leaf is one.

    `mu`, `nu` and `correction` read what is packed. They, too, have the structure of the
    parameters, with `None` for frozen ones:

    - `mu`: First moments: `Quantized` (int8 codes) or f32.
    - `nu`: Second moments: `Quantized` (uint8 codes) or f32; `None` if the rule has none.
    - `correction`: int8 or int16, the bits that 16-bit parameters lack, or `None`.

    Attributes:
        count: The number of steps taken, int32; skipped ones do not count.
        packed: For each parameter a `Packed`, or `None` if it is frozen. `codes` holds the
            codes of the moments and the bytes of the correction as planes,
            `(planes, *shape)` of uint8, `scales` the 16-bit words of their scales,
            `(planes, *shape[:-1], groups)` of uint16. Moments that are not quantised are
            f32 arrays in `codes`, or words of the width of the correction beside it.
        layout: A zero under a name such as `adam-mpx-planes-12x24-25x32-1f0c93aa`, which
            tells the kind of rule, the format, and the dtypes of parameters and
            corrections.
        format: The format of scales and corrections.
        moments: The names of the moments.
    """

    # Read by `optimizer_update`.
    mpx_is_compressed: ClassVar[bool] = True
    mpx_holds_masters: ClassVar[bool] = True

    count: Int[Any, ""]
    packed: PyTree
    layout: PyTree
    format: StateFormat = eqx.field(static=True)
    moments: tuple[str, ...] = eqx.field(static=True)

    @property
    def mu(self) -> PyTree:
        """First moments."""
        return self._moment("mu")

    @property
    def nu(self) -> PyTree:
        """Second moments."""
        return self._moment("nu")

    @property
    def correction(self) -> PyTree:
        """The bits that 16-bit parameters lack."""
        return self._view(lambda leaf: leaf.correction)

    def _moment(self, name: str) -> PyTree:
        if name not in self.moments:
            return None
        return self._view(lambda leaf: leaf.moments[self.moments.index(name)])

    def _view(self, part: Callable[[Unpacked], PyTree]) -> PyTree:
        def read(packed: Packed) -> PyTree:
            packing = Packing.read(packed, self.moments, self.format)
            return part(packing.view(packed))

        for _ in shape_of(self.count):  # states that `vmap` made have axes before
            read = jax.vmap(read)
        is_packed = lambda x: isinstance(x, Packed)  # noqa: E731
        return jax.tree.map(read, self.packed, is_leaf=is_packed)


def register_with_flax() -> None:
    """Tells `flax.serialization`, if it is in use, how to save the state."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return
    # The layout first: its name says what is wrong.
    names = ("count", "layout", "packed")

    def save(state: FlashState) -> dict[str, PyTree]:
        to_dict = serialization.to_state_dict
        return {name: to_dict(getattr(state, name)) for name in names}

    def restore(state: FlashState, saved: dict[str, PyTree]) -> FlashState:
        from_dict = serialization.from_state_dict
        if {*names} - {*saved}:
            raise ValueError(
                f"The saved state has {sorted(saved)}, but that of a compressed optimizer "
                f"has {sorted(names)}."
            )
        fields = {n: from_dict(getattr(state, n), saved[n], name=n) for n in names}
        fields["count"] = jnp.asarray(fields["count"])
        return dataclasses.replace(state, **fields)

    serialization.register_serialization_state(FlashState, save, restore, override=True)


def leaves_of(
    flat: FlatParams, state: FlashState
) -> tuple[list[PackedLeaf], list[Packing]]:
    """Returns each parameter with its state, and how that is packed."""
    found = flat.like(state.packed, "The optimizer state")
    # Where there is no state, `codes` is what stands in its place.
    packed = [x if isinstance(x, Packed) else Packed(x, None) for x in found]
    packings = [Packing.read(x, state.moments, state.format) for x in packed]
    corrections = (packing.correction for packing in packings)
    check_layout(state.layout, zip(flat.leaves, corrections, strict=True))
    pairs = zip(flat.leaves, packed, strict=True)
    return [PackedLeaf(param, *x) for param, x in pairs], packings


def packed_tree(flat: FlatParams, leaves: Sequence[PackedLeaf]) -> PyTree:
    """Returns `FlashState.packed`."""
    return flat.bare.unflatten(
        leaf.codes if is_missing(leaf.codes) else leaf.packed for leaf in leaves
    )


# --- layout ---------------------------------------------------------------------------
# The layout is the name of a scalar in the state, and with that a part of the tree's
# structure. So a checkpointer refuses to restore a state into a different one, where it
# would silently cast int8 corrections to int16; and a step compares it while tracing.


def make_layout(kind: str, format: str, pairs: Pairs) -> PyTree:
    """Returns a dict of one scalar under the name of a layout.

    Without parameters, as for the placeholder of `optax.tree_map_params`, it is only the
    scalar.
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
    pairs = [pair for pair in pairs if pair[1] is not None]
    if name is None or any(dtype_of(param) == F32 for param, _ in pairs):
        return
    kind, format, *_ = name.split("-")
    found = _layout_name(kind, format, pairs)
    if found != name:
        raise ValueError(
            f"The state was made as `{name}`, but it holds, or is used with parameters "
            f"of, `{found}`: dtypes were cast, so that the corrections mean something "
            "else. Restore with a template from `init(params)` of the optimizer that saved "
            "it. To change dtypes or `master_bits` take `master_params`, then `init` and "
            "`from_master`."
        )


def _layout_name(kind: str, format: str, pairs: Pairs) -> str:
    """Names a layout, in letters that are safe in file names."""
    dtypes = [
        (np.dtype(dtype_of(param)), correction)
        for param, correction in pairs
        if correction is not None
    ]
    small = sum(correction == INT8 for _, correction in dtypes)
    text = " ".join(f"{param}:{correction}" for param, correction in dtypes)
    checksum = zlib.crc32(text.encode())
    large = len(dtypes) - small
    return f"{kind}-{format}-planes-{small}x24-{large}x32-{checksum:08x}"


# --- checks ---------------------------------------------------------------------------


def check_state(state: object, rule: Rule, compression: Compression) -> None:
    """Raises if a state is none, or that of another optimizer."""
    if not isinstance(state, FlashState):
        raise TypeError(
            "A compressed optimizer expected the FlashState from `init(params)` or from "
            f"its last step; got {type(state).__name__}. In a larger optax state it is "
            "one of the members."
        )
    kind, *_ = (_name_of(state.layout) or rule.kind).split("-")
    made = kind, state.format, state.moments
    needed = rule.kind, compression.format, rule.moments
    if made != needed:
        raise ValueError(
            f"The state is that of another optimizer: {_described(*made)}, but this one "
            f"is {_described(*needed)}. Make the state with its own `init(params)`; the "
            "format is an option of `Compression`."
        )


def _described(kind: str, format: str, moments: Sequence[str]) -> str:
    kept = " and ".join(moments) or "no moments"
    return f"of the kind {kind!r}, in the format {format!r}, with {kept}"


def check_packed(name: str, leaf: PackedLeaf, packing: Packing) -> int:
    """Returns the group size of a parameter, 0 without groups; raises if its state does not fit.

    What is stored is read off the state: one that was restored may have been made with
    other options.
    """
    dtype, shape = dtype_of(leaf.param), shape_of(leaf.param)
    if packing.correction is not None and dtype not in PARAM_DTYPES[1:]:
        raise ValueError(
            f"The state of `{name}` has a correction of {packing.correction}, but the "
            f"parameter is {dtype}. Only bf16 and f16 parameters have corrections. Did "
            "`eqx.apply_updates` make it f32? Updates are f32: apply them with "
            "`optax.apply_updates` or `mpx.optimizer_update`, which keep dtypes, or use "
            f"`step`. {_INIT_AGAIN}"
        )
    if is_missing(leaf.codes):
        raise ValueError(f"The optimizer state has nothing for `{name}`. {_INIT_AGAIN}")
    size = 0
    if packing.scales:
        groups = (shape_of(leaf.scales) or (0,))[-1]
        last = (shape or (0,))[-1]
        # A scale for each element would look like the codes.
        size = last // groups if 1 <= groups < last and last % groups == 0 else 2
    given = shape if shape or not packing.scales else (0,)
    expected = packing.zeros(jax.ShapeDtypeStruct(given, dtype), size)
    if _types(expected) != _types(leaf.packed):
        raise ValueError(
            f"The state of `{name}` must be {_types(expected)} for a parameter of shape "
            f"{shape}, but it is {_types(leaf.packed)}. {_INIT_AGAIN}"
        )
    return size


def _types(packed: Packed) -> PyTree:
    """Returns codes and scales with dtypes and shapes in the place of arrays."""

    def type_of(x: object) -> str:
        return f"{dtype_of(x) or type(x).__name__}{list(shape_of(x))}"

    return jax.tree.map(type_of, packed)


# --- master weights -------------------------------------------------------------------


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

    def decode(leaf: PackedLeaf, packing: Packing) -> PyTree:
        if packing.correction is None:
            return leaf.param
        correction = packing.view(leaf.packed).correction
        codec = packing.master(leaf.param.dtype)
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
    flat: FlatParams, state: FlashState, weights: Sequence[PyTree]
) -> tuple[PyTree, FlashState]:
    """Puts weights into parameters, whose dtypes are kept, and state.

    `weights` has for each leaf the weight in f32, another value if the leaf is no
    parameter, or `None` to change nothing.
    """
    leaves, packings = leaves_of(flat, state)
    new = [
        leaf if weight is None else put_master(weight, leaf, packing)
        for weight, leaf, packing in zip(weights, leaves, packings, strict=True)
    ]
    return (
        flat.treedef.unflatten([leaf.param for leaf in new]),
        dataclasses.replace(state, packed=packed_tree(flat, new)),
    )


def _with_packings(
    params: PyTree, state: PyTree
) -> tuple[FlatParams, FlashState, list[PackedLeaf], list[Packing]]:
    """Returns flat parameters, the one state of an optax state, and each leaf with it."""
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


def _as_weight(name: str, weight: PyTree, param: PyTree) -> PyTree:
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
