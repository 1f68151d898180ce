"""Gradients in mixed precision: cast, scale, differentiate, reduce, unscale, check."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, PyTree

from mpx._call import Call, State, as_loss, unpack
from mpx._cast import cast_leaf
from mpx._compat import as_varying, varying_axes
from mpx._formats import at_least_f32
from mpx._grad_checks import (
    Uses,
    uses_of,
    warn_of_closed_over,
    warn_of_constant_scaling,
    warn_of_long_loops,
)
from mpx._grad_options import GradOptions, check_scaling
from mpx._loss_scaling import LossScaling
from mpx._policy import Policy
from mpx._statistics import is_spoilt, replaced_statistics, roll_back, state_pairs
from mpx._tree import (
    AxisName,
    all_devices,
    all_finite,
    dtype_of,
    is_floating,
    named_leaves,
    select_tree,
)
from mpx._wrapped import CallsAmpError, hide_signature, take_scales


class GradResult(NamedTuple):
    """What `value_and_grad` and `accumulate` return.

    Attributes:
        value: The loss as the function computed it, unscaled, f32 or wider.
        aux: What the function returned besides, `None` without `has_aux`.
        grads: The unscaled gradients; `None` for leaves without one.
        scaling: The loss scaling for the next step.
        finite: Whether all gradients are finite, bool[]. If not, skip the update.
        fp8: The `Fp8State` for the next step, for functions under `fp8` with
            `DelayedScaling`; else `None`.

    Examples:
        >>> from mpx import NoLossScaling, value_and_grad
        >>> result = value_and_grad(lambda w: w * w)(NoLossScaling(), jnp.float32(3.0))
        >>> float(result.value), float(result.grads), bool(result.finite)
        (9.0, 6.0, True)
    """

    value: Array
    aux: Any
    grads: PyTree
    scaling: Any
    finite: Bool[Array, ""]
    fp8: Any = None


class Evaluation(NamedTuple):
    """One forward and backward pass: everything in it is an array or a pytree of them.

    Attributes:
        value: The unscaled loss.
        aux: The arrays among what the function returned besides.
        grads: The gradients of the scaled loss, one tree per differentiated argument.
        state: The state after the call.
        spoilt: Whether the call has made finite state infinite or nan, bool[].
        observed: What delayed fp8 scales have seen, `None` without them.
    """

    value: Array
    aux: PyTree
    grads: tuple[PyTree, ...]
    state: State
    spoilt: Bool[Array, ""]
    observed: PyTree = None


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
) -> Evaluation:
    """Runs a call forward and backward on the scaled loss."""

    def attempt(call: Call) -> tuple[Evaluation, Uses]:
        def scaled_loss(diff: tuple[PyTree, ...], scales: Any) -> tuple[Array, Any]:
            out, after = call.run(diff, state, scales)
            value, aux = unpack(out, has_aux)
            loss = as_loss(value, has_aux)
            return scaling.scale(loss), (loss, recorder.split(aux), after)

        scales = _local(call.scales, axis_name)
        wide = call.widened(diff)
        total, vjp, (loss, aux, after) = jax.vjp(
            scaled_loss, wide, scales, has_aux=True
        )
        # The gradient of fp8 scales is what they have observed: see `Fp8State`.
        grads, observed = vjp(lax.full_like(total, 1))
        if wide is not diff:
            grads = jax.tree.map(functools.partial(_narrow, grad_dtype), grads, diff)
        spoilt = is_spoilt([*state_pairs(state, after), *_statistics_of(call, aux)])
        uses = uses_of(vjp, len(jax.tree.leaves(wide)), len(jax.tree.leaves(scales)))
        return Evaluation(loss, aux, grads, after, spoilt, observed), uses

    try:
        result, uses = attempt(call)
    except CallsAmpError as error:
        if error.call is not call:
            raise
    else:
        _warn_of_uses(call, uses, diff, state, has_aux)
        return result
    # `amp` wants the parameters as they are.
    result, uses = attempt(call.without_casts())
    if uses.wide and not uses.narrowed and not uses.hidden:
        # It was not for them: a teacher, say. Everything else is cast as always.
        result, _ = attempt(call.with_amp_in_casts())
    return result


def _statistics_of(call: Call, aux: PyTree) -> list[tuple[Any, Any]]:
    """Returns the `batch_stats` of Linen before and after a call."""
    if not jax.tree.leaves(aux):
        return []
    before = replaced_statistics(aux, call.linen_statistics())
    leaves = dict(named_leaves(aux))
    return [(old, leaves[name]) for name, old in before.items()]


def _warn_of_uses(
    call: Call, uses: Uses, diff: tuple[PyTree, ...], state: State, has_aux: bool
) -> None:
    if call.policy is None:
        return
    dtype = call.policy.resolved_compute_dtype()
    warn_of_long_loops(uses, call.diff_names(), dtype)
    if uses.widened:

        def loss(diff: tuple[PyTree, ...]) -> Any:
            return unpack(call.run(diff, state, call.scales)[0], has_aux)[0]

        warn_of_closed_over(call.func, loss, diff, dtype)


def _narrow(grad_dtype: Any, grad: Array, param: Any) -> Array:
    """Returns a gradient no wider than its parameter, f32 and what was asked for."""
    if not is_floating(grad):
        return grad
    dtype = at_least_f32(dtype_of(param))
    if grad_dtype is not None and grad_dtype.itemsize > dtype.itemsize:
        dtype = grad_dtype
    return cast_leaf(grad, dtype)


def differentiate(
    run: Callable[[LossScaling], Evaluation],
    before: State,
    scaling: LossScaling,
    options: GradOptions,
) -> tuple[Evaluation, LossScaling, Bool[Array, ""]]:
    """Evaluates, reduces over devices, unscales and checks; again if asked to.

    Returns:
        The evaluation with unscaled gradients and the state that is to be kept, the
        next scaling, and whether gradients, loss and state are finite.
    """

    def attempt(
        scaling: LossScaling,
    ) -> tuple[Evaluation, LossScaling, Bool[Array, ""]]:
        result = reduce_over_devices(run(scaling), options)
        # Undo with the scale that scaled: after a growth step the new one is larger.
        grads = finish_grads(scaling.unscale(result.grads), options.grad_dtype)
        finite = all_finite((grads, result.value)) & ~result.spoilt
        return result._replace(grads=grads), scaling.adjust(finite), finite

    result, scaling, finite = attempt(scaling)
    if options.retry:
        (result, scaling, finite), _ = lax.while_loop(
            lambda carry: ~carry[0][2] & (carry[1] < options.retry),
            lambda carry: (attempt(carry[0][1]), carry[1] + 1),
            ((result, scaling, finite), 0),
        )
    # A skipped step leaves no trace: running statistics of an overflow are overflow.
    state = select_tree(finite, result.state, before)
    return result._replace(state=state), scaling, finite


def reduce_over_devices(result: Evaluation, options: GradOptions) -> Evaluation:
    """Averages loss and gradients over devices, in the policy's `reduce_dtype`."""
    if options.axis_name is None:
        return result
    dtype = options.policy.reduce_dtype

    def mean(x: Array) -> Array:
        if is_floating(x):
            x = cast_leaf(x, at_least_f32(x.dtype) if dtype is None else dtype)
        return lax.pmean(x, options.axis_name)

    return result._replace(
        value=lax.pmean(result.value, options.axis_name),
        grads=jax.tree.map(mean, result.grads),
        spoilt=~all_devices(~result.spoilt, options.axis_name),
        observed=jax.tree.map(
            lambda x: lax.pmax(x, options.axis_name), result.observed
        ),
    )


def finish_grads(grads: PyTree, dtype: Any) -> PyTree:
    """Casts gradients to the dtype that was asked for."""
    if dtype is None:
        return grads
    return jax.tree.map(lambda g: cast_leaf(g, dtype) if is_floating(g) else g, grads)


def local_parameters(call: Call, axis_name: AxisName | None) -> tuple[PyTree, ...]:
    """Returns the differentiated arguments, each device its own copy of them.

    The derivative with respect to a value shared by the devices of a `shard_map` would
    be summed in the compute dtype before mpx sees it.

    Raises:
        ValueError: If a parameter is known to differ between the devices.
    """
    if axis_name is None:
        return call.diff
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    for name, leaf in named_leaves(call.diff):
        sharded = varying_axes(jax.typeof(jnp.asarray(leaf))) & set(names)
        if sharded:
            raise ValueError(
                f"The parameter `{name}` differs between the devices of "
                f"{sorted(sharded)}, so its gradients must not be averaged over them. "
                "Pass it replicated (`in_specs=P()`), or use jit with a NamedSharding, "
                "which needs no `axis_name`, for sharded parameters."
            )
    return _local(call.diff, axis_name)


def _local(tree: PyTree, axis_name: AxisName | None) -> Any:
    """Marks arrays as each device's own."""
    if axis_name is None:
        return tree
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    return jax.tree.map(lambda x: as_varying(jnp.asarray(x), names), tree)


def value_and_grad(
    func: Callable[..., Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> Callable[..., Any]:
    """Returns a function that computes loss and gradients in mixed precision.

    The returned function takes the loss scaling first and then the arguments of `func`;
    it returns a `GradResult`. Because the scaling is an argument, the transformed
    function can be made once and jitted. It casts the arguments to the compute dtype,
    multiplies the loss by the scale in f32, differentiates, averages over devices,
    divides by the scale that was used, and checks that the result is finite.

    Floating arrays inside the differentiated arguments get a gradient, everything else
    (integers, keys, functions, strings) `None`. NNX modules are updated in place as by
    `nnx.value_and_grad`: BatchNorm statistics and dropout counters advance. They, and
    an Equinox `State` returned in `aux`, stay f32 and are rolled back when the
    gradients are not finite.

    Args:
        func: The loss function, returning a scalar or `(scalar, aux)`. Leave it out to
            use `value_and_grad` as a decorator with arguments.
        argnums: Which positional arguments of `func` to differentiate: one number, or a
            sequence for a tuple of gradients.
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        policy: Dtypes and exceptions; `None` computes in the configured half precision.
        grad_dtype: The dtype of the gradients; overrides the policy. By default f32, or
            f64 for f64 parameters.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which loss and
            gradients are averaged before the check, so that all devices agree.
        retry: How often to try again at once with the adjusted scale when gradients are
            not finite, before giving up on the step. The function is compiled twice.

    Raises:
        TypeError: If the loss is no real floating scalar, or no scaling was passed.
        ValueError: If a differentiated argument holds no floating array.

    Examples:
        >>> from mpx import DynamicLossScaling
        >>> @jax.jit
        ... @value_and_grad(policy="p=f32,c=f16,o=f32")
        ... def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> scaling = DynamicLossScaling.pow2()
        >>> result = loss(scaling, jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> result.value, result.grads
        (Array(1., dtype=float32), Array([1., 1.], dtype=float32))
    """
    options = GradOptions.checked(
        argnums=argnums,
        has_aux=has_aux,
        policy=policy,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        retry=retry,
    )
    if func is None:
        return functools.partial(_bind, options)
    return _bind(options, func)


def _bind(options: GradOptions, func: Callable[..., Any]) -> Callable[..., GradResult]:
    @functools.wraps(func)
    def wrapper(scaling: Any, /, *args: Any, **kwargs: Any) -> GradResult:
        return grad_result(func, options, scaling, args, kwargs)

    hide_signature(wrapper)  # the scaling comes first
    return wrapper


def grad_result(
    func: Callable[..., Any],
    options: GradOptions,
    scaling: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> GradResult:
    """Computes loss and gradients of one call."""
    check_scaling(scaling)
    warn_of_constant_scaling(scaling)
    scales, args = take_scales(func, args)
    argnums = options.argnum_tuple()
    call = Call(func, args, kwargs, argnums, options.policy, scales=scales)
    recorder = Recorder()
    run = functools.partial(
        evaluate,
        call,
        local_parameters(call, options.axis_name),
        call.state,
        recorder=recorder,
        has_aux=options.has_aux,
        grad_dtype=options.grad_dtype,
        axis_name=options.axis_name,
    )
    outcome = differentiate(run, call.state, scaling, options)
    return package(call, recorder, outcome, options)


def package(
    call: Call,
    recorder: Recorder,
    outcome: tuple[Evaluation, LossScaling, Bool[Array, ""]],
    options: GradOptions,
) -> GradResult:
    """Puts the state into effect and returns the result in its public form."""
    result, scaling, finite = outcome
    before = replaced_statistics(result.aux, call.linen_statistics())
    aux = roll_back(finite, result.aux, before)
    aux = call.commit(recorder.merge(aux), result.state)
    grads = result.grads[0] if isinstance(options.argnums, int) else result.grads
    fp8 = None
    if call.scales is not None:
        fp8 = select_tree(finite, call.scales.update(result.observed), call.scales)
    return GradResult(result.value, aux, grads, scaling, finite, fp8)
