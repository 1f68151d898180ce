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
from jaxtyping import Int, PyTree

from mpx._jax._sharding import zero_beside
from mpx._jax._tree import LeafName, check_shape, dtype_of, shape_of
from mpx._jax._warn import warn
from mpx._optim._options import F32, PARAM_DTYPES, FlatParams, StateFormat
from mpx._optim._packing import CORRECTION, Packed, PackedLeaf, Packing, is_packed

_INIT_AGAIN = "Make the state with `init(params)` of these parameters."


class FlashState(eqx.Module):
    """The state of a compressed optimizer: a pytree that any checkpointer can save.

    `mu`, `nu` and `correction` read what is packed, in the structure of the parameters.

    Attributes:
        count: The number of steps taken, int32; skipped ones do not count.
        packed: For each parameter at most two arrays, sharded like it, since every array
            costs time whenever a step is dispatched; `None` if it is frozen. `codes` holds
            the codes of the moments and the bytes of the correction as planes,
            `(planes, *shape)`, `scales` the words of `(planes, *shape[:-1], groups)`.
        layout: A zero under a name such as `adam-mpx-planes-12x24-25x32-1f0c93aa`, which
            tells the kind of rule, the format, and the dtypes of parameters and
            corrections.
        kind: The kind of rule.
        format: The format of scales and corrections.
        moments: The names of the moments.
    """

    # Read by `optimizer_update`.
    mpx_is_compressed: ClassVar[bool] = True
    mpx_holds_masters: ClassVar[bool] = True

    count: Int[Any, ""]
    layout: PyTree  # before other arrays: its name says what is wrong
    packed: PyTree
    kind: str = eqx.field(static=True)
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
        return self._view(CORRECTION)

    def _view(self, name: str) -> PyTree:
        if name not in (*self.moments, CORRECTION):
            return None
        read = lambda packed: packed.numbers().get(name)  # noqa: E731
        for _ in shape_of(self.count):  # states that `vmap` made have axes before
            read = jax.vmap(read)
        return jax.tree.map(read, self.packed, is_leaf=is_packed)


class Stepped(NamedTuple):
    """Parameters, in their own dtypes, and their state, at the start or after a step."""

    params: PyTree
    state: FlashState


def register_with_flax() -> None:
    """Tells `flax.serialization`, if it is in use, how to save the state."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def fields(node: PyTree) -> dict[str, PyTree]:
        found = [x.name for x in dataclasses.fields(node) if not x.metadata]  # static
        return {name: getattr(node, name) for name in found}

    def save(node: PyTree) -> dict[str, PyTree]:
        return serialization.to_state_dict(fields(node))

    def restore(node: PyTree, saved: dict[str, PyTree]) -> PyTree:
        new = serialization.from_state_dict(fields(node), saved)
        if "count" in new:
            new["count"] = jnp.asarray(new["count"])
        return dataclasses.replace(node, **new)

    for kind in (FlashState, Packed):
        serialization.register_serialization_state(kind, save, restore, override=True)


# The layout is the name of a scalar in the state, and with that a part of the tree's
# structure. So a checkpointer refuses to restore a state into a different one, where it
# would silently cast int8 corrections to int16.
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
        held = [x.packed.packing for x in leaves if x.has_correction]
        text = " ".join(f"{x.param}:{x.correction}" for x in held)
        small = sum(x.correction.itemsize == 1 for x in held)
        # In letters that are safe in file names.
        name = f"{small}x24-{len(held) - small}x32-{zlib.crc32(text.encode()):08x}"
        layout = {f"{kind}-{format}-planes-{name}": layout}
    packed, count = treedef.unflatten(x.packed for x in leaves), jnp.int32
    return FlashState(zero_beside(params, count), layout, packed, kind, format, moments)


def leaves_of(flat: FlatParams, state: FlashState) -> list[PackedLeaf]:
    """Returns each parameter with its state."""
    found = flat.like(state.packed, "The optimizer state")
    return list(map(PackedLeaf, flat.leaves, found))


def with_leaves(
    flat: FlatParams, state: FlashState, leaves: Iterable[PackedLeaf]
) -> Stepped:
    """Returns parameters and state with these leaves in the place of theirs."""
    params, packed = zip(*leaves, strict=True) if flat.leaves else ((), ())
    state = dataclasses.replace(state, packed=flat.bare.unflatten(packed))
    return Stepped(flat.treedef.unflatten(params), state)


def check_packed(name: LeafName, leaf: PackedLeaf, **expected: PyTree) -> Packing:
    """Returns how a parameter is stored; raises if its state does not fit.

    Expected are fields of `Packing` that another optimizer would have made otherwise.
    """
    param, packed = leaf
    if not is_packed(packed):
        raise ValueError(f"The optimizer state has nothing for `{name}`. {_INIT_AGAIN}")
    packing, dtype, shape = packed.packing, dtype_of(param), shape_of(param)
    if packing.param not in (None, dtype):
        raise ValueError(
            f"The state of `{name}` has a correction of {packing.correction}, but the "
            f"parameter is {dtype} instead of {packing.param}: dtypes were cast, so that "
            "the correction means something else. Did `eqx.apply_updates` make it f32? "
            "Updates are f32: apply them with `optax.apply_updates` or "
            "`mpx.optimizer_update`, which keep dtypes, or use `step`. Restore with a "
            "template from `init(params)` of the optimizer that saved the state. To change "
            "dtypes or `master_bits` take `master_params`, then `init` and `from_master`."
        )
    given = shape or (0,) * (packing.group_size > 0)  # a scalar has no groups
    fitting = packing._replace(**expected).zeros(jax.ShapeDtypeStruct(given, dtype))

    text = lambda x: f"{dtype_of(x) or type(x).__name__}{list(shape_of(x))}"  # noqa: E731
    needed, came = (jax.tree.map(text, x) for x in (fitting, packed))
    if needed != came:
        raise ValueError(
            f"The state of `{name}` must be {needed} for a parameter of shape {shape}, but "
            f"it is {came}. {_INIT_AGAIN}"
        )
    return packing


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
    return flat.treedef.unflatten(leaf.master() for leaf in leaves)


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
    for name, weight, leaf in zip(flat.names, given, leaves, strict=True):
        if leaf.has_correction and dtype_of(weight) in PARAM_DTYPES[1:]:
            warn(
                f"The weight of `{name}` was given in {dtype_of(weight)}, so its master "
                "starts in the middle of a rounding interval, where small steps change no "
                "parameter for a long time. Pass the f32 weights. For weights that exist "
                "in 16 bits alone, `init(params)` puts each master at random in its "
                "interval."
            )
            break
    weights = list(map(_as_weight, flat.names, given, flat.leaves))
    new_params, new_state = put_masters(flat, found, weights)
    return new_params, replaced(state, found, new_state)


def replaced(tree: PyTree, old: PyTree, new: PyTree) -> PyTree:
    """Returns a tree with another node in the place of one."""
    is_old = lambda x: x is old  # noqa: E731
    return jax.tree.map(lambda x: new if x is old else x, tree, is_leaf=is_old)


def put_masters(
    flat: FlatParams, state: FlashState, weights: Sequence[PyTree]
) -> Stepped:
    """Puts weights, or `None` to change nothing, into parameters of any dtype and state."""
    new = (
        leaf if weight is None else leaf.with_master(weight)
        for weight, leaf in zip(weights, leaves_of(flat, state), strict=True)
    )
    return with_leaves(flat, state, new)


def _found(
    params: PyTree, state: PyTree
) -> tuple[FlatParams, FlashState, list[PackedLeaf]]:
    """Returns flat parameters, the one state of an optax state, and each leaf with it."""
    is_state = lambda x: isinstance(x, FlashState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            "Expected the state of one compressed optimizer, by itself or in an optax "
            f"state, but {type(state).__name__} holds {len(found)} of them."
        )
    flat = FlatParams.of(params)
    leaves = leaves_of(flat, found[0])
    for name, leaf in zip(flat.names, leaves, strict=True):
        if leaf.has_correction:
            check_packed(name, leaf)
    return flat, found[0], leaves


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
