"""The gradient functions: `value_and_grad`, and those of the MPX paper, thin layers."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from mpx._casting._cast import cast_tree
from mpx._casting._context import has_scales, hide_signature
from mpx._casting._policy import Policy, get_policy
from mpx._gradients._call import GradOptions
from mpx._gradients._step import GradResult, Scaling, Step
from mpx._jax._arguments import (
    as_count,
    check_axis_name,
    check_bool,
    check_function,
)
from mpx._jax._compat import is_tracer
from mpx._jax._formats import parse_float_dtype
from mpx._jax._nnx import DiffState
from mpx._jax._tree import AxisName
from mpx._jax._warn import warn
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling

P = ParamSpec("P")
Params = TypeVar("Params", bound=Any)
Taking = Callable[Concatenate[Scaling, P], GradResult[Any, Scaling]]
"""A function of a loss scaling and the arguments of the loss."""


Argnums = int | DiffState | Sequence[int | DiffState]


class GradKeywords(TypedDict, total=False):
    """Options that all gradient functions pass on; see `value_and_grad`."""

    policy: Policy | str | None
    grad_dtype: DTypeLike | None
    axis_name: AxisName | None
    retry: int


class ArgnumKeywords(GradKeywords, total=False):
    """The same, and which arguments to differentiate."""

    argnums: Argnums


@overload
def value_and_grad(
    func: Callable[Concatenate[Params, P], object],
    *,
    has_aux: bool = False,
    **options: Unpack[GradKeywords],
) -> Callable[Concatenate[Scaling, Params, P], GradResult[Params, Scaling]]: ...
@overload
def value_and_grad(
    func: Callable[P, object],
    *,
    has_aux: bool = False,
    **options: Unpack[ArgnumKeywords],
) -> Taking[Scaling, P]: ...
@overload
def value_and_grad(
    func: None = None, *, has_aux: bool = False, **options: Unpack[ArgnumKeywords]
) -> Callable[[Callable[P, object]], Taking[Scaling, P]]: ...
def value_and_grad(
    func: Callable[..., PyTree] | None = None,
    *misplaced: object,
    argnums: Argnums = 0,
    has_aux: bool = False,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> Callable[..., PyTree]:
    """Returns a function that computes loss and gradients in mixed precision.

    The returned function takes the loss scaling first and then the arguments of `func`;
    it returns a `GradResult`. It casts the arguments to the compute dtype, multiplies the
    loss by the scale in f32, differentiates, averages over devices, divides by the scale
    that was used, and checks that the result is finite.

    Floating arrays inside the differentiated arguments get a gradient, everything else
    `None`. NNX modules are updated in place as by `nnx.value_and_grad`: BatchNorm
    statistics and dropout counters advance. They, and an Equinox `State` or Linen's
    `batch_stats` returned in `aux`, stay f32. A step is skipped, and they are rolled back,
    if the gradients, the loss or they themselves become infinite or nan.

    A function under `amp` casts by itself; a policy beside it may set `grad_dtype` and
    `reduce_dtype`.

    Args:
        func: The loss function. Leave it out to use `value_and_grad` as a decorator.
        *misplaced: Nothing: options are passed by keyword, the scaling at the call.
        argnums: Which positional arguments of `func` to differentiate: one number, or a
            sequence for a tuple of gradients. An `nnx.DiffState` chooses variables of an
            NNX module, such as `nnx.DiffState(0, nnx.LoRAParam)`.
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        policy: Dtypes and exceptions; `None` computes in the configured half precision.
            If none was configured, that is f16, or bf16 with `NoLossScaling`.
        grad_dtype: The dtype of the gradients; overrides the policy. By default f32, or
            f64 for f64 parameters.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which loss and
            gradients are averaged before the check, so that all devices agree.
        retry: How often to try again at once with the adjusted scale when gradients are
            not finite. The function is compiled twice.

    Raises:
        TypeError: If the loss is no real floating scalar, or no scaling was passed.
        ValueError: If a differentiated argument holds no floating array, if the policy
            contradicts `amp`, or if f16 is used with `NoLossScaling`.

    Warns:
        RuntimeWarning: While tracing: of a policy under which all matmuls run in f32; of
            a parameter whose gradient a long loop adds up in 16 bits; and of a dynamic
            scaling that is a constant of the jitted function.

    Examples:
        >>> import jax
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
    refuse_positional(misplaced, "value_and_grad")
    options = grad_options(
        has_aux,
        argnums=argnums,
        policy=policy,
        grad_dtype=grad_dtype,
        axis_name=axis_name,
        retry=retry,
    )
    return transformed(func, options)


def transformed(
    func: Callable[..., PyTree] | None,
    options: GradOptions,
    make_step: Callable[..., Step] = Step,
) -> Callable[..., PyTree]:
    """Returns a function of scaling and arguments that makes and runs a step of `func`."""
    if func is None:
        return functools.partial(transformed, options=options, make_step=make_step)
    check_function(func)

    @functools.wraps(func)
    def wrapper(scaling: LossScaling, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        check_scaling(scaling)
        warn_of_constant_scaling(scaling)
        step = make_step(func, options.for_call(func, scaling), args, kwargs)
        return step.result(scaling)

    hide_signature(wrapper)  # the scaling comes first
    return wrapper


# --- The functions of the paper -------------------------------------------------------


def filter_grad(
    func: Callable[P, object],
    scaling: LossScaling | None = None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[ArgnumKeywords],
) -> Callable[P, Any]:
    """Computes gradients in mixed precision; the counterpart of `eqx.filter_grad`.

    The returned function takes the arguments of `func` and returns the tuple
    `(scaling, grads_finite, grads)`, with `aux` as a fourth entry if `has_aux`. It works
    as described for `value_and_grad`, and raises the same errors.

    The scaling is part of the transformation, as in the paper: call `filter_grad`
    inside the jitted step with the scaling that the step got as an argument. Outside
    jit it would be compiled in as a constant: new code should use `value_and_grad`.

    Args:
        func: The loss function.
        scaling: The loss scaling. It may be left out where none is needed (bf16, f32).
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        use_mixed_precision: If false, nothing is cast, scaled or checked:
            `grads_finite` is true and `scaling` comes back as it is.
        **options: Options of `value_and_grad`.

    Examples:
        >>> from mpx import DynamicLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> scaling, grads_finite, grads = filter_grad(loss, DynamicLossScaling.pow2())(
        ...     jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> grads, bool(grads_finite)
        (Array([1., 1.], dtype=float32), True)
    """
    take = filter_value_and_grad(func, scaling, has_aux, use_mixed_precision, **options)

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, ...]:
        value, *found = take(*args, **kwargs)
        return (*found, value[1]) if has_aux else tuple(found)

    return wrapper


def filter_value_and_grad(
    func: Callable[P, object],
    scaling: LossScaling | None = None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Unpack[ArgnumKeywords],
) -> Callable[P, Any]:
    """Computes the loss too; the counterpart of `eqx.filter_value_and_grad`.

    The returned function returns `(value, scaling, grads_finite, grads)`, where `value`
    is the loss that `func` returned, as in `GradResult`, or `(loss, aux)` if `has_aux`.
    For arguments see `filter_grad`.

    Examples:
        >>> from mpx import DynamicLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> value, scaling, grads_finite, grads = filter_value_and_grad(
        ...     loss, DynamicLossScaling.pow2())(jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> value, grads
        (Array(1., dtype=float32), Array([1., 1.], dtype=float32))
    """

    def answer(step: Step, used: LossScaling) -> tuple[PyTree, ...]:
        value, aux, grads, after, finite, _ = step.result(used)
        value = (value, aux) if has_aux else value
        return value, after if step.options.mixed else scaling, finite, grads

    options_of_call = grad_options(has_aux, use_mixed_precision, **options)
    return _with_scaling(func, scaling, options_of_call, answer)


def calculate_scaled_grad(
    func: Callable[Concatenate[Params, P], object],
    scaling: LossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[Concatenate[Params, P], tuple[Any, Params]]:
    """Computes loss and gradients that are still scaled, in half precision.

    It is the inner half of `filter_value_and_grad`, for loops that unscale, check and
    adjust by themselves. The returned function returns `(value, grads)`, with
    `(value, aux)` for the first if `has_aux`; `value` is the scaled loss in f32. For
    arguments see `filter_grad`.

    Examples:
        >>> from mpx import StaticLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> calculate_scaled_grad(loss, StaticLossScaling(8.0))(
        ...     jnp.ones(2), jnp.full((4, 2), 0.5))
        (Array(8., dtype=float32), Array([8., 8.], dtype=float16))
    """

    def answer(step: Step, scaling: LossScaling) -> tuple[PyTree, PyTree]:
        result = step.run(scaling)
        value, grads = scaling.scale(result.value), result.grads
        if step.options.mixed:
            grads = cast_tree(grads, step.options.policy.resolved_compute_dtype())
        aux = step.commit(result.aux, result.state)
        return ((value, aux) if has_aux else value), step.call.trees(grads)[0]

    check_scaling(scaling)
    options = grad_options(has_aux, use_mixed_precision)
    return _with_scaling(func, scaling, options, answer)


def _with_scaling(
    func: Callable[..., PyTree],
    scaling: LossScaling | None,
    options: GradOptions,
    answer: Callable[[Step, LossScaling], PyTree],
) -> Callable[..., PyTree]:
    """Returns a function of the arguments of `func` that answers by a step of it."""
    if scaling is not None:
        check_scaling(scaling)
    check_function(func)
    if has_scales(func):
        raise TypeError(
            "`func` is under `fp8` with `DelayedScaling`, whose state has no place in the "
            "paper's tuples. Use `mpx.value_and_grad` or `mpx.accumulate`, or the recipe "
            "`CurrentScaling`, which has no state."
        )

    @functools.wraps(func)
    def wrapper(*args: PyTree, **kwargs: PyTree) -> PyTree:
        step = Step(func, options.for_call(func, scaling), args, kwargs)
        used = NoLossScaling() if scaling is None or not options.mixed else scaling
        warn_of_constant_scaling(used)
        return answer(step, used)

    return wrapper


# --- Checks of what users pass --------------------------------------------------------


def grad_options(
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    *,
    argnums: Argnums = 0,
    policy: Policy | str | None = None,
    grad_dtype: DTypeLike | None = None,
    axis_name: AxisName | None = None,
    retry: int = 0,
) -> GradOptions:
    """Checks the options of a gradient function."""
    check_axis_name(axis_name)
    check_bool(has_aux, "`has_aux`")
    check_bool(use_mixed_precision, "`use_mixed_precision`")
    policy = Policy() if policy is None else get_policy(policy)
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    given = [*argnums] if isinstance(argnums, Sequence) and several else [argnums]
    dtype = policy.grad_dtype if grad_dtype is None else grad_dtype
    return GradOptions(
        argnums=tuple(as_count(getattr(x, "argnum", x), "argnums") for x in given),
        filters=tuple(getattr(x, "filter", None) for x in given),
        several=several,
        has_aux=bool(has_aux),
        policy=policy,
        grad_dtype=None if dtype is None else parse_float_dtype(dtype, "grad_dtype"),
        axis_name=axis_name,
        retry=as_count(retry, "retry", at_least=0),
        mixed=bool(use_mixed_precision),
    )


def refuse_positional(misplaced: Sequence[object], name: str) -> None:
    """Raises a `TypeError` if options, or the loss scaling, were passed by position."""
    if misplaced:
        raise TypeError(
            f"`{name}` takes its options by keyword, such as `argnums=`, but "
            f"{type(misplaced[0]).__name__} was given by position. The loss scaling "
            f"comes after: `mpx.{name}(loss)(scaling, params, batch)`."
        )


def check_scaling(scaling: object) -> None:
    """Raises a `TypeError` unless `scaling` can scale, unscale and adjust."""
    methods = ("scale", "unscale", "adjust")
    found = f"{type(scaling).__name__} was given"
    if isinstance(scaling, type):
        found = f"the class `{scaling.__name__}` was given, not an instance of it"
    elif all(hasattr(scaling, name) for name in methods):
        return
    raise TypeError(
        "`scaling` must be a loss scaling such as `mpx.DynamicLossScaling.pow2()`, "
        f"but {found}. For bf16 pass `mpx.NoLossScaling()`. (`value_and_grad` and "
        "`accumulate` take it as the first argument of the transformed function.)"
    )


def warn_of_constant_scaling(scaling: object) -> None:
    """Warns of an adaptive scaling that is a constant of the function being compiled."""
    is_fixed = getattr(type(scaling), "adjust", None) is LossScaling.adjust
    if not isinstance(scaling, LossScaling) or is_fixed:
        return
    known = scaling.made_of_constants or not is_tracer(scaling.loss_scaling)
    # While JAX compiles, every computed value is a tracer.
    if known and is_tracer(jnp.zeros(())):
        warn(
            "The loss scaling is not an argument of the function that is being "
            "compiled, so its scale is compiled in as a constant: every step uses the "
            "first one, and once that overflows all steps are skipped. Make the "
            "scaling an argument and a result of the jitted function: "
            "`step(scaling, params, batch) -> (result.scaling, …)`."
        )
