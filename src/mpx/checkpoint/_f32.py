"""Conversion of compressed optimizer states, and of master weights, to and from f32."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from mpx._jax._formats import at_least_f32
from mpx._jax._nnx import without_variables
from mpx._jax._tree import (
    cast_leaf,
    check_same_structure,
    check_shape,
    is_floating,
    map_with_name,
)
from mpx._optim._optax import MasterWeightsState
from mpx._optim._packing import Packed, decode_moment, encode_moment, is_packed
from mpx._optim._state import FlashState, Stepped, from_master, master_params, replaced
from mpx._quant._codecs import Quantized


def to_f32(params: PyTree, state: PyTree) -> Stepped:
    """Returns the f32 weights and the optimizer state of a plain f32 run.

    The weights are the master weights. The state of a compressed optimizer becomes what
    optax keeps for the same rule: `ScaleByAdamState` (for Muon with `nu` of what AdamW
    steps), `ScaleByLionState`, or `TraceState` and `ScaleByScheduleState` for gradient
    descent. `master_weights` is taken off the optimizer that it wraps. Everything else
    comes back as it is.

    Args:
        params: The parameters, or a whole model.
        state: Their optimizer state, or an optax state that holds it.

    Returns:
        Named tuple `(params, state)`.

    Raises:
        ValueError: If the state does not fit the parameters.

    Examples:
        >>> import optax
        >>> from mpx.optim import flash_adamw
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> weights, adam = to_f32(params, flash_adamw(1e-3).init(params))
        >>> weights["w"].dtype, type(adam).__name__, adam.nu["w"].dtype
        (dtype('float32'), 'ScaleByAdamState', dtype('float32'))
        >>> start = optax.adamw(1e-3).init(weights)  # to go on with optax
        >>> start = optax.tree_utils.tree_set(
        ...     start, count=adam.count, mu=adam.mu, nu=adam.nu
        ... )
    """
    kept = _kept(state)
    if isinstance(kept, FlashState):
        weights, new = master_params(params, state), _optax_state(kept)
    elif kept is not None:
        check_same_structure(params, kept.master, "`to_f32`")
        weights, new = kept.master, kept.inner_state
    else:
        return Stepped(_widened(params), state)
    return Stepped(_widened(weights), replaced(state, kept, new))


def _widened(tree: PyTree) -> PyTree:
    """Casts all leaves of 16 bits to f32, also those inside modules and states."""
    wide = lambda x: cast_leaf(x, at_least_f32(x.dtype)) if is_floating(x) else x  # noqa: E731
    return jax.tree.map(wide, tree)


def from_f32(params: PyTree, state: PyTree, *, like: tuple[PyTree, PyTree]) -> Stepped:
    """Puts f32 weights and moments into parameters and state of another kind.

    It undoes `to_f32`, and lets a run that began in f32 go on with compressed states.
    Moments are rounded to the nearest code: an error of at most half a step of their format.

    Args:
        params: The f32 weights: a tree like the parameters.
        state: An optax state with moments, as `optax.adam` or `to_f32` makes it.
        like: Parameters and their optimizer state, freshly made by `init(params)`: they
            give dtypes, formats and shardings.

    Returns:
        Named tuple `(params, state)` that holds the weights, the moments and the count.

    Raises:
        ValueError: If the trees or shapes differ, or `state` lacks moments that the
            optimizer keeps.

    Examples:
        >>> import optax
        >>> from mpx.optim import flash_adamw
        >>> weights = {"w": jnp.full((64, 64), 0.1)}
        >>> adam = optax.adam(1e-3).init(weights)
        >>> params = {"w": weights["w"].astype(jnp.bfloat16)}
        >>> new = from_f32(weights, adam, like=(params, flash_adamw(1e-3).init(params)))
        >>> new.params["w"].dtype, type(new.state).__name__
        (dtype(bfloat16), 'FlashState')
    """
    if not (isinstance(like, tuple) and len(like) == 2):
        raise TypeError(
            "`like` must be a pair of parameters and their optimizer state, but "
            f"{type(like).__name__} was given: `like=(params, optimizer.init(params))`."
        )
    old_params, old = like
    kept = _kept(old)
    if isinstance(kept, FlashState):
        filled = jax.tree.map(_placed, _with_moments(kept, state), kept)
        filled = replaced(old, kept, filled)
        return Stepped(*from_master(params, old_params, filled))
    rounded = _cast_like(old_params, params)
    if kept is None:
        return Stepped(rounded, _cast_like(old, state))
    new = _cast_like(kept, MasterWeightsState(state, params))
    return Stepped(rounded, replaced(old, kept, new))


# --- Parts of states ------------------------------------------------------------------


def _kept(state: PyTree) -> FlashState | MasterWeightsState | None:
    """Returns the part of a state that holds master weights, if there is one."""
    is_kept = lambda x: isinstance(x, FlashState | MasterWeightsState)  # noqa: E731
    found = [x for x in jax.tree.leaves(state, is_leaf=is_kept) if is_kept(x)]
    if len(found) > 1:
        raise ValueError(
            f"Expected at most one {type(found[0]).__name__} in an optimizer state, but "
            f"there are {len(found)}. Convert the parts of the state one by one."
        )
    return found[0] if found else None


def _cast_like(old: PyTree, new: PyTree) -> PyTree:
    """Returns a tree with the dtypes and shardings of the one that it replaces."""
    check_same_structure(old, new, "`from_f32`")

    def cast(name: str, old: PyTree, new: PyTree) -> PyTree:
        check_shape(f"`{name}`", new, old)
        new = jnp.asarray(new).astype(old.dtype) if is_floating(old) else new
        return _placed(new, old)

    return map_with_name(cast, old, new)


def _placed(new: PyTree, old: PyTree) -> PyTree:
    """Returns an array where another one lies, unless that is not committed."""
    committed = getattr(old, "committed", False)
    return jax.device_put(new, old.sharding) if committed else new


# --- Moments --------------------------------------------------------------------------


@jax.jit
def _optax_state(state: FlashState) -> PyTree:
    """Returns what optax keeps for the rule of a compressed state."""
    moments = {
        name: jax.tree.map(
            lambda x, name=name: decode_moment(name, x, state.format),
            getattr(state, name),
            is_leaf=lambda x: isinstance(x, Quantized),
        )
        for name in state.moments
    }
    if "nu" in moments:
        return optax.ScaleByAdamState(state.count, moments["mu"], moments["nu"])
    if state.kind == "lion":
        return optax.ScaleByLionState(state.count, moments["mu"])
    trace = optax.TraceState(moments["mu"]) if moments else optax.EmptyState()
    return (trace, optax.ScaleByScheduleState(state.count))


@jax.jit
def _with_moments(state: FlashState, source: PyTree) -> FlashState:
    """Returns a compressed state that holds the moments and the count of another one."""
    trees, count = _moments_of(source, state)
    trees = [without_variables(tree) for tree in trees]
    for kind, tree in zip(state.moments, trees, strict=True):
        has = lambda x, kind=kind: 0 if kind in x.packing.moments else None  # noqa: E731
        params = jax.tree.map(has, state.packed, is_leaf=is_packed)
        check_same_structure(params, tree, f"`{kind}` beside the parameters of `like`")

    def pack(name: str, packed: Packed, *moments: PyTree) -> Packed:
        packing, numbers = packed.packing, packed.numbers()
        for kind, x in zip(packing.moments, moments, strict=False):
            like = numbers[kind].codes if packing.group_size else numbers[kind]
            check_shape(f"`{kind}` of `{name}`", x, like)
            moment = jnp.asarray(x, jnp.float32)
            if packing.group_size:
                moment = encode_moment(kind, moment, state.format, packing.group_size)
            numbers[kind] = moment
        return packing.pack(numbers)

    packed = map_with_name(pack, state.packed, *trees, is_leaf=is_packed)
    count = jnp.asarray(count, jnp.int32)
    return dataclasses.replace(state, count=count, packed=packed)


def _moments_of(source: PyTree, state: FlashState) -> tuple[list[PyTree], PyTree]:
    """Returns the moments that a compressed state needs, and the count beside them."""

    def parts(*names: str) -> list[dict[str, PyTree]]:
        has = lambda x: {*names} <= {*getattr(x, "_fields", ())}  # noqa: E731
        found = jax.tree.leaves(source, is_leaf=has)
        return [x._asdict() for x in found if has(x)]

    names = state.moments
    holders = parts(*names) if names else []
    if names == ("mu",):  # gradient descent calls it so
        holders += [{**x, "mu": x["trace"]} for x in parts("trace")]
    if names and len(holders) != 1:
        raise ValueError(
            f"The optimizer keeps {' and '.join(names)}, but {len(holders)} parts of the "
            f"state, which is {type(source).__name__}, have that. Pass one that "
            "`optax.adam`, `optax.lion`, `optax.sgd` with momentum, or `to_f32` made."
        )
    counts = [x["count"] for x in (*holders, *parts("count")) if "count" in x]
    # Gradient descent with a constant rate has no count in optax.
    return [holders[0][x] for x in names], counts[0] if counts else state.count
