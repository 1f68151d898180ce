"""One forward and backward pass of a call, and what can be told of it while tracing."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from mpx._casting._half import gradient_function
from mpx._casting._reduction import Reduce, reducing_in
from mpx._gradients._call import Call, as_loss, unpack
from mpx._gradients._grad_checks import (
    uses_of,
    warn_of_long_loops,
    warn_of_rounded_parameter,
    warn_of_useless_policy,
)
from mpx._gradients._state import State, is_spoilt, is_statistic, state_pairs
from mpx._jax._compat import as_varying, open_jaxpr, primitive_name, varying_axes
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    cast_leaf,
    dtype_of,
    is_floating,
    map_with_name,
    named_leaves,
)
from mpx._program._flow import Flow
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling
from mpx._wire._masters import with_masters


class Evaluation(NamedTuple):
    """One forward and backward pass: everything in it is an array or a pytree of them.

    Attributes:
        value: The unscaled loss.
        aux: The arrays among what the function returned besides.
        grads: The gradients of the scaled loss, one tree per differentiated argument.
        state: The state after the call.
        spoilt: Whether the call has made finite state infinite or nan, bool[].
        observed: What delayed fp8 scales have seen, `None` without them.
        feedback: The residuals of sums over devices, `None` without them.
    """

    value: Array
    aux: PyTree
    grads: tuple[PyTree, ...]
    state: State
    spoilt: Bool[Array, ""]
    observed: PyTree = None
    feedback: Any = None


@dataclasses.dataclass(frozen=True)
class _InState:
    """Leaf that stands in `aux` for an array of the state, by its name there."""

    name: str


class Recorder:
    """Keeps what is no array while JAX traces the rest.

    Attributes:
        static: The part of `aux` that is none.
        changed: The names of the NNX parameters that the function changes, if any.
    """

    static: PyTree = None
    changed: set[str] | None = None

    def split(self, aux: Any, successors: Mapping[str, str]) -> PyTree:
        """Stores what is no array, or is part of the state, and returns the arrays."""
        if successors:
            aux = map_with_name(
                lambda name, x: _InState(successors[name]) if name in successors else x,
                aux,
            )
        arrays, self.static = eqx.partition(aux, eqx.is_array)
        return arrays

    def merge(self, arrays: PyTree, state: State) -> Any:
        """Returns `aux` as the function returned it, with the arrays of a state."""
        return jax.tree.map(
            lambda x: state.arrays[x.name] if isinstance(x, _InState) else x,
            eqx.combine(arrays, self.static),
        )


def evaluate(
    call: Call,
    state: State,
    scaling: LossScaling,
    recorder: Recorder,
    *,
    has_aux: bool,
    grad_dtype: Any = None,
    axis_name: AxisName | None = None,
    reduce: Reduce = None,
) -> Evaluation:
    """Runs a call forward and backward on the scaled loss.

    Without an axis to average over, `reduce` is the dtype in which weight gradients leave
    their matmuls.
    """

    def scaled_loss(diff: tuple[PyTree, ...], scales: Any) -> tuple[Array, Any]:
        out, after = call.run(diff, state, scales)
        value, aux = unpack(out, has_aux)
        loss = as_loss(value, has_aux)
        arrays = recorder.split(aux, call.successors(aux))
        return scaling.scale(loss), (loss, arrays, after)

    diff, scales = as_local((call.diff_in(state), call.scales), axis_name)
    wide = call.widened(diff)
    loss_of = scaled_loss
    if call.low is not None:
        loss_of = functools.partial(
            with_masters, scaled_loss, choice=reduce, is_mapped=axis_name is not None
        )
    # Without a scale, `amp` in f16 inside the function warns.
    is_scaled = not isinstance(scaling, NoLossScaling)
    with (
        gradient_function() if is_scaled else contextlib.nullcontext(),
        reducing_in(reduce),
    ):
        total, vjp, (loss, aux, after) = jax.vjp(loss_of, wide, scales, has_aux=True)
        # The gradient of fp8 scales is what they have observed: see `Fp8State`.
        grads, observed = vjp(lax.full_like(total, 1))
    if wide is not diff:
        grads = jax.tree.map(functools.partial(_narrow, grad_dtype), grads, diff)
    assigned = call.assigned(after)
    if assigned and recorder.changed is None:
        recorder.changed = _changed_params(call, state, wide)
    if assigned:
        after = call.without(after, assigned - (recorder.changed or set()))
    before = call.comparable(state, after)
    pairs = [*state_pairs(before, after), *_unknown_statistics(aux)]
    _warn_of_uses(call, vjp)
    return Evaluation(loss, aux, grads, after, is_spoilt(pairs), observed)


def _changed_params(call: Call, state: State, diff: tuple[PyTree, ...]) -> set[str]:
    """Returns the names of the NNX parameters that a call leaves with other numbers.

    `nnx.jit` and `nnx.remat` assign to all of them. The call is traced once more.
    """

    def arrays_after(diff: tuple[PyTree, ...]) -> dict[str, Any]:
        return call.run(diff, state, call.scales)[1].arrays

    def rule(name: str, eqn: Any, ins: list[Any]) -> Any:
        if name != "convert_element_type":
            return None
        param, casts = ins[0]
        return param, casts + 1

    jaxpr, after = jax.make_jaxpr(arrays_after, return_shape=True)(diff)
    body, _ = open_jaxpr(jaxpr)
    labels = [(name, 0) for name in call.diff_names()]
    flow = Flow(rule, join=lambda a, b: a if a == b else None)
    found = flow.run(jaxpr, dict(zip(body.invars, labels, strict=True)))
    # The policy casts to 16 bits and back.
    casts = (0,) if call.low is None else (0, 2)
    outs = zip(sorted(after), found, body.outvars, strict=True)
    changed = {
        name: var
        for name, label, var in outs
        if label not in [(name, count) for count in casts]
    }
    for eqn in body.eqns:
        if primitive_name(eqn) == "convert_element_type":
            rounded = [x for x, var in changed.items() if var is eqn.outvars[0]]
            if rounded and (dtype := eqn.invars[0].aval.dtype).itemsize == 2:
                warn_of_rounded_parameter(rounded[0], dtype)
    return set(changed)


def _unknown_statistics(aux: PyTree) -> list[tuple[None, Any]]:
    """Returns `batch_stats` in a result that replace none among the arguments."""
    return [(None, x) for name, x in named_leaves(aux) if is_statistic(name)]


def _warn_of_uses(call: Call, vjp: Any) -> None:
    """Warns of parameters that are not used as the policy means it."""
    if call.low is None:
        return
    params, names = jax.tree.leaves(call.diff), call.diff_names()
    uses = uses_of(vjp, len(params), len(jax.tree.leaves(call.scales)))
    if uses.loops:
        warn_of_long_loops(uses, names, call.low)
    if uses.widened and not uses.low and not uses.hidden:
        warn_of_useless_policy(names[min(uses.widened)], call.low)


def _narrow(grad_dtype: Any, grad: Array, param: Any) -> Array:
    """Returns a gradient no wider than its parameter, f32 and what was asked for."""
    if not is_floating(grad):
        return grad
    dtype = at_least_f32(dtype_of(param))
    if grad_dtype is not None and grad_dtype.itemsize > dtype.itemsize:
        dtype = grad_dtype
    return cast_leaf(grad, dtype)


def check_replicated(diff: tuple[PyTree, ...], axis_name: AxisName | None) -> None:
    """Raises if a parameter is known to differ between the devices of an axis.

    Raises:
        ValueError: If so.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    for name, leaf in named_leaves(diff) if names else ():
        sharded = varying_axes(jax.typeof(jnp.asarray(leaf))) & set(names)
        if sharded:
            raise ValueError(
                f"The parameter `{name}` differs between the devices of "
                f"{sorted(sharded)}, so its gradients must not be averaged over "
                "them. Pass it replicated (`in_specs=P()`), or use jit with a "
                "NamedSharding, which needs no `axis_name`, for sharded parameters."
            )


def as_local(tree: PyTree, axis_name: AxisName | None) -> Any:
    """Marks arrays as each device's own.

    The derivative with respect to a value shared by the devices of a `shard_map` would be
    summed in the compute dtype before mpx sees it.
    """
    if axis_name is None:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return jax.tree.map(lambda x: as_varying(jnp.asarray(x), names), tree)
