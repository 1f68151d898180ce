"""The state of a compressed optimizer: layout, checks, and the f32 weights behind it."""

import dataclasses
import sys
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int, PyTree

from mpx._jax._sharding import zero_beside
from mpx._jax._tree import LeafName, check_shape, dtype_of, shape_of
from mpx._jax._warn import warn
from mpx._optim._options import (
    F32,
    PARAM_DTYPES,
    Compression,
    FlatParams,
    StateFormat,
    flatten_params,
)
from mpx._optim._packing import INT8, Packed, PackedLeaf, Packing, put_master
from mpx._quant._codecs import Block

_INIT_AGAIN = "Make the state with `init(params)` of these parameters."


class FlashState(eqx.Module):
    """The state of a compressed optimizer: a pytree that any checkpointer can save.

    `mu`, `nu` and `correction` read what is packed, in the structure of the parameters.

    Attributes:
        count: The number of steps taken, int32; skipped ones do not count.
        packed: For each parameter a `Packed`, or `None` if it is frozen: at most two
            arrays, sharded like the parameter, since every array costs time whenever a
            step is dispatched. `codes` holds the codes of the moments and the bytes of
            the correction as planes, `(planes, *shape)` of uint8, `scales` the 16-bit
            words of their scales, `(planes, *shape[:-1], groups)` of uint16.
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
        """First moments: `Quantized` (int8 codes) or f32; `None` if the rule has none."""
        return self._view("mu")

    @property
    def nu(self) -> PyTree:
        """Second moments: `Quantized` (uint8 codes) or f32; `None` if the rule has none."""
        return self._view("nu")

    @property
    def correction(self) -> PyTree:
        """The bits that 16-bit parameters lack, int8 or int16; `None` for others."""
        return self._view("correction")

    def _view(self, name: str) -> PyTree:
        if name not in (*self.moments, "correction"):
            return None

        def read(packed: Packed) -> PyTree:
            leaf = Packing.read(packed, self.moments, self.format).view(packed)
            found = dict(zip(self.moments, leaf.moments, strict=False))
            return (found | {"correction": leaf.correction}).get(name)

        for _ in shape_of(self.count):  # states that `vmap` made have axes before
            read = jax.vmap(read)
        is_packed = lambda x: isinstance(x, Packed)  # noqa: E731
        return jax.tree.map(read, self.packed, is_leaf=is_packed)


class Stepped(NamedTuple):
    """Parameters, in their own dtypes, and their state, at the start or after a step."""

    params: PyTree
    state: FlashState


class Leaf(NamedTuple):
    """A leaf of the parameters with its path and state, and how that is packed."""

    name: LeafName
    stored: PackedLeaf
    packing: Packing


def register_with_flax() -> None:
    """Tells `flax.serialization`, if it is in use, how to save the state."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def fields(state: FlashState) -> dict[str, PyTree]:
        # The layout before the arrays: its name says what is wrong.
        return {name: getattr(state, name) for name in ("count", "layout", "packed")}

    def save(state: FlashState) -> dict[str, PyTree]:
        return serialization.to_state_dict(fields(state))

    def restore(state: FlashState, saved: dict[str, PyTree]) -> FlashState:
        new = serialization.from_state_dict(fields(state), saved)
        return dataclasses.replace(state, **new | {"count": jnp.asarray(new["count"])})

    serialization.register_serialization_state(FlashState, save, restore, override=True)


def make_state(
    kind: str,
    format: StateFormat,
    moments: tuple[str, ...],
    leaves: Sequence[PackedLeaf],
    treedef: PyTree,
) -> FlashState:
    """Returns a state without any step, given each parameter with what is packed."""
    params = [x.param for x in leaves]
    layout: PyTree = zero_beside(params, jnp.int8)
    if params:  # the placeholder of `optax.tree_map_params` has none
        named = [
            Leaf(LeafName(""), x, Packing.read(x.packed, moments, format))
            for x in leaves
        ]
        layout = {_layout_name(kind, format, named): layout}
    packed = treedef.unflatten(x.packed for x in leaves)
    return FlashState(zero_beside(params, jnp.int32), packed, layout, format, moments)


def leaves_of(flat: FlatParams, state: FlashState) -> list[Leaf]:
    """Returns each parameter with its state; raises if dtypes are not those of the layout."""
    found = flat.like(state.packed, "The optimizer state")
    stored = map(PackedLeaf, flat.leaves, found)
    packings = (Packing.read(x, state.moments, state.format) for x in found)
    leaves = list(map(Leaf, flat.names, stored, packings))
    name = _name_of(state)
    # Corrections beside f32 parameters are refused by `check_packed`.
    is_known = not any(
        x.packing.correction and dtype_of(x.stored.param) == F32 for x in leaves
    )
    if name is not None and is_known:
        kind, format, *_ = name.split("-")
        found = _layout_name(kind, format, leaves)
        if found != name:
            raise ValueError(
                f"The state was made as `{name}`, but it holds, or is used with parameters "
                f"of, `{found}`: dtypes were cast, so that the corrections mean something "
                "else. Restore with a template from `init(params)` of the optimizer that "
                "saved it. To change dtypes or `master_bits` take `master_params`, then "
                "`init` and `from_master`."
            )
    return leaves


def with_leaves(
    flat: FlatParams, state: FlashState, leaves: Iterable[PackedLeaf]
) -> Stepped:
    """Returns parameters and state with these leaves in the place of theirs."""
    params, packed = zip(*leaves, strict=True) if flat.leaves else ((), ())
    state = dataclasses.replace(state, packed=flat.bare.unflatten(packed))
    return Stepped(flat.treedef.unflatten(params), state)


# The layout is the name of a scalar in the state, and with that a part of the tree's
# structure. So a checkpointer refuses to restore a state into a different one, where it
# would silently cast int8 corrections to int16; and a step compares it while tracing.
def _layout_name(kind: str, format: str, leaves: Sequence[Leaf]) -> str:
    """Names a layout, in letters that are safe in file names."""
    dtypes = [
        (np.dtype(dtype_of(leaf.stored.param)), leaf.packing.correction)
        for leaf in leaves
        if leaf.packing.correction is not None
    ]
    small = sum(correction == INT8 for _, correction in dtypes)
    text = " ".join(f"{param}:{correction}" for param, correction in dtypes)
    checksum, large = zlib.crc32(text.encode()), len(dtypes) - small
    return f"{kind}-{format}-planes-{small}x24-{large}x32-{checksum:08x}"


def _name_of(state: FlashState) -> str | None:
    """Returns the name of the layout; `None` if the state has no parameters."""
    return next(iter(state.layout), None) if isinstance(state.layout, dict) else None


def check_state(
    state: object, kind: str, moments: tuple[str, ...], compression: Compression
) -> None:
    """Raises if a state is none, or that of another optimizer."""
    if not isinstance(state, FlashState):
        raise TypeError(
            "A compressed optimizer expected the FlashState from `init(params)` or from "
            f"its last step; got {type(state).__name__}. In a larger optax state it is "
            "one of the members."
        )
    found, *_ = (_name_of(state) or kind).split("-")
    made = found, state.format, " and ".join(state.moments) or "no moments"
    needed = kind, compression.format, " and ".join(moments) or "no moments"
    if made != needed:
        text = "of the kind {!r}, in the format {!r}, with {}"
        raise ValueError(
            f"The state is that of another optimizer: {text.format(*made)}, but this one "
            f"is {text.format(*needed)}. Make the state with its own `init(params)`; the "
            "format is an option of `Compression`."
        )


def check_packed(leaf: Leaf, moments: tuple[str, ...]) -> int:
    """Returns the group size of a parameter, 0 without groups; raises if its state does not fit."""
    name, (param, packed), packing = leaf
    packing = dataclasses.replace(packing, moments=moments)
    dtype, shape = dtype_of(param), shape_of(param)
    if packing.correction is not None and dtype not in PARAM_DTYPES[1:]:
        raise ValueError(
            f"The state of `{name}` has a correction of {packing.correction}, but the "
            f"parameter is {dtype}. Only bf16 and f16 parameters have corrections. Did "
            "`eqx.apply_updates` make it f32? Updates are f32: apply them with "
            "`optax.apply_updates` or `mpx.optimizer_update`, which keep dtypes, or use "
            f"`step`. {_INIT_AGAIN}"
        )
    if packed is None or isinstance(packed, optax.MaskedNode):
        raise ValueError(f"The optimizer state has nothing for `{name}`. {_INIT_AGAIN}")
    size = 0
    if packing.quantized:
        groups, last = ((shape_of(x) or (0,))[-1] for x in (packed.scales, param))
        # A scale for each element would look like the codes.
        size = last // groups if 1 <= groups < last and last % groups == 0 else 2
    given = shape if shape or not packing.quantized else (0,)
    expected = packing.zeros(jax.ShapeDtypeStruct(given, dtype), size)

    text = lambda x: f"{dtype_of(x) or type(x).__name__}{list(shape_of(x))}"  # noqa: E731
    needed, came = (jax.tree.map(text, x) for x in (expected, packed))
    if needed != came:
        raise ValueError(
            f"The state of `{name}` must be {needed} for a parameter of shape {shape}, but "
            f"it is {came}. {_INIT_AGAIN}"
        )
    return size


def master_params(params: PyTree, state: PyTree) -> PyTree:
    """Returns the f32 weights behind 16-bit parameters, and other leaves as they are.

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
    flat, _, leaves = _found(params, state)

    def decode(leaf: Leaf) -> PyTree:
        _, (param, packed), packing = leaf
        if packing.correction is None:
            return param
        correction, codec = packing.view(packed).correction, packing.master(param.dtype)
        return codec.decode(jnp.asarray(param), correction, Block())

    return flat.treedef.unflatten(map(decode, leaves))


def from_master(master: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Puts f32 weights into parameters and state, for example to start from f32 weights.

    Args:
        master: The weights: a tree like `params`. Leaves that are not parameters come from
            here, in the dtype that they have in `params`, unless they are `None`.
        params: Parameters whose dtypes are kept.
        state: The state made by `init(params)`, or an optax state that holds it; its
            moments and count are kept.

    Returns:
        Parameters and state that hold `master`, as exactly as their format can.

    Raises:
        ValueError: If weights, parameters and state do not fit.

    Warns:
        RuntimeWarning: If weights of 16 bits are given.

    Examples:
        >>> from mpx.optim import flash_adamw
        >>> weights = {"w": jnp.full((8,), 0.1)}
        >>> params = {"w": weights["w"].astype(jnp.bfloat16)}
        >>> state = flash_adamw(1e-3).init(params)
        >>> params, state = from_master(weights, params, state)
        >>> abs(float(master_params(params, state)["w"][0]) - 0.1) < 1e-8
        True
    """
    flat, found, leaves = _found(params, state)
    given = flat.like(master, "`master`")
    _warn_of_rounded(flat.names, given, leaves)
    weights = list(map(_as_weight, flat.names, given, flat.leaves))
    new_params, new_state = put_masters(flat, found, weights)
    return new_params, jax.tree.map(
        lambda x: new_state if x is found else x, state, is_leaf=lambda x: x is found
    )


def put_masters(
    flat: FlatParams, state: FlashState, weights: Sequence[PyTree]
) -> Stepped:
    """Puts weights, or `None` to change nothing, into parameters of any dtype and state."""
    new = (
        leaf.stored if weight is None else put_master(weight, leaf.stored, leaf.packing)
        for weight, leaf in zip(weights, leaves_of(flat, state), strict=True)
    )
    return with_leaves(flat, state, new)


def _found(params: PyTree, state: PyTree) -> tuple[FlatParams, FlashState, list[Leaf]]:
    """Returns flat parameters, the one state of an optax state, and each leaf with it."""
    is_state = lambda x: isinstance(x, FlashState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            "Expected the state of one compressed optimizer, by itself or in an optax "
            f"state, but {type(state).__name__} holds {len(found)} of them."
        )
    flat = flatten_params(params)
    leaves = leaves_of(flat, found[0])
    for leaf in leaves:
        if leaf.packing.correction is not None:
            check_packed(leaf, leaf.packing.moments)
    return flat, found[0], leaves


def _warn_of_rounded(
    names: Sequence[str], weights: Sequence[PyTree], leaves: Sequence[Leaf]
) -> None:
    for name, weight, leaf in zip(names, weights, leaves, strict=True):
        dtype = dtype_of(weight)
        if leaf.packing.correction is None or dtype not in PARAM_DTYPES or dtype == F32:
            continue
        warn(
            f"The weight of `{name}` was given in {dtype}, so its master starts in the "
            "middle of a rounding interval, where small steps change no parameter for a "
            "long time. Pass the f32 weights. For weights that exist in 16 bits alone, "
            "`init(params)` puts each master at random in its interval."
        )
        return


def _as_weight(name: str, weight: PyTree, param: PyTree) -> PyTree:
    """Returns the new value of a leaf; raises if it does not fit."""
    dtype, is_param = dtype_of(param), dtype_of(param) in PARAM_DTYPES
    if not is_param and (weight is None or dtype_of(weight) == dtype or dtype is None):
        return param if weight is None else weight
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
    return jnp.asarray(weight).astype(F32 if is_param else dtype)
