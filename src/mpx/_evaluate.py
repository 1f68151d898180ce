"""One forward and backward pass of a call, and what can be told of it while tracing."""

import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, PyTree

from mpx._call import Call, as_loss, unpack
from mpx._compat import as_varying, varying_axes
from mpx._formats import at_least_f32
from mpx._grad_checks import (
    uses_of,
    warn_of_closed_over,
    warn_of_long_loops,
    warn_of_useless_policy,
)
from mpx._half import gradient_function
from mpx._loss_scaling import LossScaling
from mpx._state import State, is_spoilt, replaced_statistics, state_pairs
from mpx._tree import AxisName, cast_leaf, dtype_of, is_floating, named_leaves
from mpx._wire._masters import with_masters
from mpx._wire._options import Reduce, reducing_in
from mpx._wrapped import CallsAmpError


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


class Recorder:
    """Keeps the part of `aux` that is not an array while JAX traces the rest."""

    static: PyTree = None

    def split(self, aux: Any) -> PyTree:
        """Stores what is no array and returns the arrays."""
        arrays, self.static = eqx.partition(aux, eqx.is_array)
        return arrays

    def merge(self, arrays: PyTree) -> Any:
        """Returns `aux` as the function returned it."""
        return eqx.combine(arrays, self.static)


def evaluate(
    call: Call,
    diff: tuple[PyTree, ...],
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

    def attempt(call: Call) -> tuple[Evaluation, Any]:
        def scaled_loss(diff: tuple[PyTree, ...], scales: Any) -> tuple[Array, Any]:
            out, after = call.run(diff, state, scales)
            value, aux = unpack(out, has_aux)
            loss = as_loss(value, has_aux)
            return scaling.scale(loss), (loss, recorder.split(aux), after)

        scales = as_local(call.scales, axis_name)
        wide = call.widened(diff)
        loss_of = scaled_loss
        if axis_name is None and call.policy is not None:
            # XLA sums the gradients over devices, if there are several.
            loss_of = functools.partial(with_masters, scaled_loss, choice=reduce)
        with gradient_function(), reducing_in(reduce):
            total, vjp, (loss, aux, after) = jax.vjp(
                loss_of, wide, scales, has_aux=True
            )
            # The gradient of fp8 scales is what they have observed: see `Fp8State`.
            grads, observed = vjp(lax.full_like(total, 1))
        if wide is not diff:
            grads = jax.tree.map(functools.partial(_narrow, grad_dtype), grads, diff)
        spoilt = is_spoilt([*state_pairs(state, after), *_statistics_of(call, aux)])
        return Evaluation(loss, aux, grads, after, spoilt, observed), vjp

    try:
        result, vjp = attempt(call)
    except CallsAmpError as error:
        if error.call is not call:
            raise
    else:
        _warn_of_uses(call, vjp, state, has_aux)
        return result
    # `amp` wants the parameters as they are.
    result, vjp = attempt(call.without_casts())
    uses = uses_of(vjp, *_sizes(call))
    if uses.wide and not uses.narrowed and not uses.hidden:
        # It was not for them but, say, for a teacher: cast them as always.
        result, _ = attempt(call.with_amp_in_casts())
    return result


def _sizes(call: Call) -> tuple[int, int]:
    """Returns how many arrays are differentiated: parameters, and scales of fp8."""
    return len(jax.tree.leaves(call.diff)), len(jax.tree.leaves(call.scales))


def _statistics_of(call: Call, aux: PyTree) -> list[tuple[Any, Any]]:
    """Returns the `batch_stats` of Linen before and after a call."""
    if not jax.tree.leaves(aux):
        return []
    before = replaced_statistics(aux, call.linen_statistics())
    leaves: dict[str, Any] = dict(named_leaves(aux))
    return [(old, leaves[name]) for name, old in before.items()]


def _warn_of_uses(call: Call, vjp: Any, state: State, has_aux: bool) -> None:
    """Warns of parameters that are not used as the policy means it."""
    if call.policy is None or call.policy.resolved_compute_dtype().itemsize > 2:
        return
    dtype, uses = call.policy.resolved_compute_dtype(), uses_of(vjp, *_sizes(call))
    if uses.loops:
        warn_of_long_loops(uses, call.diff_names(), dtype)
    if uses.widened:

        def loss(diff: tuple[PyTree, ...]) -> Any:
            return unpack(call.run(diff, state, call.scales)[0], has_aux)[0]

        known = warn_of_closed_over(call.func, loss, call.diff, dtype)
        if not known and not uses.low and not uses.hidden:
            warn_of_useless_policy(call.diff_names()[min(uses.widened)], dtype)


def _narrow(grad_dtype: Any, grad: Array, param: Any) -> Array:
    """Returns a gradient no wider than its parameter, f32 and what was asked for."""
    if not is_floating(grad):
        return grad
    dtype = at_least_f32(dtype_of(param))
    if grad_dtype is not None and grad_dtype.itemsize > dtype.itemsize:
        dtype = grad_dtype
    return cast_leaf(grad, dtype)


def local_parameters(
    diff: tuple[PyTree, ...], axis_name: AxisName | None
) -> tuple[PyTree, ...]:
    """Returns the differentiated arguments, each device its own copy of them.

    The derivative with respect to a value shared by the devices of a `shard_map` would be
    summed in the compute dtype before mpx sees it.

    Raises:
        ValueError: If a parameter is known to differ between the devices.
    """
    if axis_name is None:
        return diff
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name, leaf in named_leaves(diff):
        sharded = varying_axes(jax.typeof(jnp.asarray(leaf))) & set(names)
        if sharded:
            raise ValueError(
                f"The parameter `{name}` differs between the devices of "
                f"{sorted(sharded)}, so its gradients must not be averaged over "
                "them. Pass it replicated (`in_specs=P()`), or use jit with a "
                "NamedSharding, which needs no `axis_name`, for sharded parameters."
            )
    return as_local(diff, axis_name)


def as_local(tree: PyTree, axis_name: AxisName | None) -> Any:
    """Marks arrays as each device's own."""
    if axis_name is None:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return jax.tree.map(lambda x: as_varying(jnp.asarray(x), names), tree)
