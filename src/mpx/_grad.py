"""Gradients in mixed precision: cast, scale, differentiate, reduce, unscale, check."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, PyTree

from mpx._call import Call, State
from mpx._cast import cast_leaf
from mpx._compat import varying_axes
from mpx._evaluate import Evaluation, Recorder, as_local, evaluate
from mpx._formats import at_least_f32
from mpx._grad_checks import warn_of_constant_scaling
from mpx._grad_options import GradOptions, check_scaling
from mpx._loss_scaling import LossScaling
from mpx._policy import Policy
from mpx._statistics import replaced_statistics, roll_back
from mpx._tree import (
    AxisName,
    all_devices,
    all_finite,
    is_floating,
    named_leaves,
    select_tree,
)
from mpx._wrapped import hide_signature, take_scales


class GradResult(NamedTuple):
    """What `value_and_grad` and `accumulate` return.

    Attributes:
        value: The loss that the function returned, unscaled and widened to f32. It has
            the precision in which the function computed it: a loss returned in 16 bits
            was rounded to 16 bits, to 3 significant digits in bf16. Cast the logits to
            f32 in the function, or use `amp`, for a loss in full precision.
        aux: What the function returned besides, `None` without `has_aux`.
        grads: The unscaled gradients; `None` for leaves without one.
        scaling: The loss scaling for the next step.
        finite: Whether the gradients and the loss are finite, and no state became
            infinite or nan that was finite before, bool[]. If not, skip the update.
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
    return as_local(call.diff, axis_name)


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
    an Equinox `State` or Linen's `batch_stats` returned in `aux`, stay f32. A step is
    skipped, and they are rolled back, if the gradients, the loss or they themselves
    become infinite or nan.

    A function under `amp`, or one that calls `amp`, gets its arguments uncast.

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

    Warns:
        RuntimeWarning: While tracing: of a closed-over f32 batch that brings the model
            back to f32; of a parameter whose gradient a long loop adds up in 16 bits;
            and of a dynamic scaling that is a constant of the jitted function.

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
