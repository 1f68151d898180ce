"""The gradient functions of the MPX paper, with its arguments and its tuples.

They are thin layers over `value_and_grad`, which new code should use: it takes the scaling
as an argument, so that it can be made once and jitted.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from mpx._casting._wrapped import has_scales
from mpx._gradients._grad import GradResult, Step
from mpx._gradients._grad_checks import warn_of_constant_scaling
from mpx._gradients._grad_options import GradOptions, check_function, check_scaling
from mpx._jax._tree import cast_floating
from mpx._scaling._loss_scaling import LossScaling, NoLossScaling


def filter_grad(
    func: Callable[..., Any] | None = None,
    scaling: LossScaling | None = None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Computes gradients in mixed precision; the counterpart of `eqx.filter_grad`.

    The returned function takes the arguments of `func` and returns the tuple
    `(scaling, grads_finite, grads)`, with `aux` as a fourth entry if `has_aux`. It works
    as described for `value_and_grad`.

    The scaling is part of the transformation, as in the paper: call `filter_grad`
    inside the jitted step with the scaling that the step got as an argument. Outside
    jit it would be compiled in as a constant; `value_and_grad` takes it at each call.

    Args:
        func: The loss function. Leave it out to use `filter_grad` as a decorator.
        scaling: The loss scaling. It may be left out where none is needed (bf16, f32).
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        use_mixed_precision: If false, nothing is cast, scaled or checked:
            `grads_finite` is true and `scaling` comes back as it is.
        **options: `policy`, `grad_dtype`, `axis_name`, `argnums` and `retry`, as in
            `value_and_grad`.

    Raises:
        TypeError: If the loss is no real floating scalar.
        ValueError: If the first argument holds no floating array, or if f16 is used
            without a scaling.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import DynamicLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> scaling, grads_finite, grads = filter_grad(loss, DynamicLossScaling.pow2())(
        ...     jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> grads, bool(grads_finite)
        (Array([1., 1.], dtype=float32), True)
    """

    def as_tuple(result: GradResult) -> tuple[Any, ...]:
        answer = (result.scaling, result.finite, result.grads)
        return (*answer, result.aux) if has_aux else answer

    mixed = _as_switch(use_mixed_precision)
    checked = GradOptions(has_aux=has_aux, mixed=mixed, **options)
    return _transform(func, scaling, checked, as_tuple)


def filter_value_and_grad(
    func: Callable[..., Any] | None = None,
    scaling: LossScaling | None = None,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Computes the loss too; the counterpart of `eqx.filter_value_and_grad`.

    The returned function returns `(value, scaling, grads_finite, grads)`, where `value`
    is the pair `(loss, aux)` if `has_aux`. The loss is the one that `func` returned,
    unscaled and widened to f32; see `GradResult` for its precision.

    Args:
        func: The loss function. This and the others are as in `filter_grad`.
        scaling: The loss scaling.
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        use_mixed_precision: If false, nothing is cast, scaled or checked.
        **options: Options of `value_and_grad`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import DynamicLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> value, scaling, grads_finite, grads = filter_value_and_grad(
        ...     loss, DynamicLossScaling.pow2())(jnp.ones(2), jnp.full((4, 2), 0.5))
        >>> value, grads
        (Array(1., dtype=float32), Array([1., 1.], dtype=float32))
    """

    def as_tuple(result: GradResult) -> tuple[Any, ...]:
        value = (result.value, result.aux) if has_aux else result.value
        return value, result.scaling, result.finite, result.grads

    mixed = _as_switch(use_mixed_precision)
    checked = GradOptions(has_aux=has_aux, mixed=mixed, **options)
    return _transform(func, scaling, checked, as_tuple)


def _transform(
    func: Callable[..., Any] | None,
    scaling: LossScaling | None,
    options: GradOptions,
    as_tuple: Callable[[GradResult], tuple[Any, ...]],
) -> Callable[..., Any]:
    if scaling is not None:
        check_scaling(scaling)

    def transform(func: Callable[..., Any]) -> Callable[..., Any]:
        check_function(func)
        _refuse_scales(func)

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            settled = options.settled(func, scaling)
            used = _scaling_for(scaling, options)
            result = Step(func, settled, args, kwargs).result(used)
            return as_tuple(
                result if options.mixed else result._replace(scaling=scaling)
            )

        return wrapper

    return transform if func is None else transform(func)


def _scaling_for(scaling: LossScaling | None, options: GradOptions) -> LossScaling:
    """Returns the scaling of a step: that of the user, or none where none is needed."""
    if scaling is None or not options.mixed:
        return NoLossScaling()
    warn_of_constant_scaling(scaling)
    return scaling


def _refuse_scales(func: Callable[..., Any]) -> None:
    if has_scales(func):
        raise TypeError(
            "`func` is under `fp8` with `DelayedScaling`, whose state has no place in the "
            "paper's tuples. Use `mpx.value_and_grad` or `mpx.accumulate`, or the recipe "
            "`CurrentScaling`, which has no state."
        )


def _as_switch(use_mixed_precision: Any) -> bool:
    if not isinstance(use_mixed_precision, bool | np.bool_):
        raise TypeError(
            "`use_mixed_precision` decides what is compiled and must be a Python bool, "
            f"but {type(use_mixed_precision).__name__} was given. Make it a static "
            "argument of the jitted function."
        )
    return bool(use_mixed_precision)


def calculate_scaled_grad(
    func: Callable[..., Any],
    scaling: LossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., Any]:
    """Computes loss and gradients that are still scaled, in half precision.

    It is the inner half of `filter_value_and_grad`, for loops that unscale, check and
    adjust by themselves. The returned function returns `(value, grads)`, with
    `(value, aux)` for the first if `has_aux`; `value` is the scaled loss in f32.

    Args:
        func: The loss function.
        scaling: The loss scaling.
        has_aux: Whether `func` returns a pair `(loss, aux)`.
        use_mixed_precision: If false, nothing is cast or scaled.

    Raises:
        TypeError: If the loss is no real floating scalar.
        ValueError: If the first argument holds no floating array.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import StaticLossScaling
        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> calculate_scaled_grad(loss, StaticLossScaling(8.0))(
        ...     jnp.ones(2), jnp.full((4, 2), 0.5))
        (Array(8., dtype=float32), Array([8., 8.], dtype=float16))
    """
    check_scaling(scaling)
    options = GradOptions(has_aux=has_aux, mixed=_as_switch(use_mixed_precision))
    check_function(func)
    _refuse_scales(func)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        settled = options.settled(func, scaling)
        used = _scaling_for(scaling, options)
        step = Step(func, settled, args, kwargs)
        result = step.run(used)
        value, grads = used.scale(result.value), result.grads[0]
        if options.mixed:
            grads = cast_floating(grads, settled.policy.compute_dtype)
        aux = step.commit(result.aux, result.state)
        return ((value, aux) if has_aux else value), grads

    return wrapper
