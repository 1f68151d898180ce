"""The loss scaler of jaxamp on top of mpx: `from mpx.compat import jaxamp`.

Where jaxamp is known to be wrong mpx is not: importing it starts no JAX backend, the
scale reaches neither 0 nor infinity, scaling happens in f32, and only the gradients
decide whether a step was finite.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mpx._formats import FORMATS
from mpx._loss_scaling import StaticLossScaling
from mpx._tree import all_finite


class DynamicScalerState(NamedTuple):
    """jaxamp's scaler: a named tuple of numbers or arrays.

    Attributes:
        patience: Finite steps before the step that grows the scale.
        adjust_factor: What growth multiplies and backoff divides by.
        scaler: The scale.
        count: Finite steps since the last change.
        total_resets: Non-finite steps in total.
    """

    patience: Any = 2000
    adjust_factor: Any = 2.0
    scaler: Any = 2.0**15
    count: Any = 0
    total_resets: Any = 0


def _as_arrays(state: DynamicScalerState) -> DynamicScalerState:
    return DynamicScalerState(
        jnp.asarray(state.patience, jnp.int32),
        jnp.asarray(state.adjust_factor, jnp.float32),
        jnp.asarray(state.scaler, jnp.float32),
        jnp.asarray(state.count, jnp.int32),
        jnp.asarray(state.total_resets, jnp.int32),
    )


def _adjust(state: DynamicScalerState, finite: Array) -> DynamicScalerState:
    grow = finite & (state.count >= state.patience)
    larger = jnp.minimum(state.scaler * state.adjust_factor, jnp.float32(2.0**127))
    smaller = jnp.maximum(
        state.scaler / state.adjust_factor, jnp.float32(FORMATS["f32"].tiny)
    )
    scaler = jnp.where(grow, larger, jnp.where(finite, state.scaler, smaller))
    return state._replace(
        scaler=scaler,
        count=jnp.where(finite & ~grow, state.count + 1, 0),
        total_resets=state.total_resets + (~finite).astype(jnp.int32),
    )


def default_scale_fn(result: Any, state: DynamicScalerState) -> Any:
    """Scales a loss, or the loss of a pair `(loss, aux)`, in f32."""
    scaling = StaticLossScaling(state.scaler)
    if isinstance(result, tuple):
        value, aux = result
        return scaling.scale(value), aux
    return scaling.scale(result)


def default_unscale_fn(results: Any, state: DynamicScalerState) -> Any:
    """Unscales every floating leaf of what a transformation returned, in f32."""
    return StaticLossScaling(state.scaler).unscale(results)


def dynamic_scale_tx(
    transform: Callable[..., Any],
    redo_on_nan: int = 0,
    unscale_fn: Callable[..., Any] = default_unscale_fn,
    scale_fn: Callable[..., Any] = default_scale_fn,
    *,
    check_fn: Callable[[Any], Any] = lambda results: results,
) -> Callable[..., Any]:
    """Gives a transformation such as `jax.grad` dynamic loss scaling.

    Args:
        transform: What to wrap.
        redo_on_nan: How often to repeat with a smaller scale.
        unscale_fn: `(results, state) -> results`, undoes the scaling.
        scale_fn: `(result, state) -> result`, scales what the function returned.
        check_fn: `results -> tree`, what must be finite.
    """

    def scaled_transform(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(fun)
        def scaled_fun(
            *fun_args: Any, _dynamic_scaler_state: DynamicScalerState, **fun_kwargs: Any
        ) -> Any:
            return scale_fn(fun(*fun_args, **fun_kwargs), _dynamic_scaler_state)

        transformed = transform(scaled_fun, *args, **kwargs)

        def scaled_call(
            *fun_args: Any, dynamic_scaler_state: DynamicScalerState, **fun_kwargs: Any
        ) -> tuple[DynamicScalerState, Any]:
            def attempt(state: DynamicScalerState) -> tuple[Any, Any, Array]:
                results = transformed(
                    *fun_args, _dynamic_scaler_state=state, **fun_kwargs
                )
                results = unscale_fn(results, state)
                finite = all_finite(check_fn(results))
                return _adjust(state, finite), results, finite

            first = attempt(_as_arrays(dynamic_scaler_state))
            if not redo_on_nan:
                return first[:2]
            arrays, static = eqx.partition(first, eqx.is_array_like)
            (state, results, _), _ = lax.while_loop(
                lambda carry: ~carry[0][2] & (carry[1] < redo_on_nan),
                lambda carry: (
                    eqx.filter(attempt(carry[0][0]), eqx.is_array_like),
                    carry[1] + 1,
                ),
                (jax.tree.map(jnp.asarray, arrays), 0),
            )
            return state, eqx.combine(results, static[1])

        return scaled_call

    return scaled_transform


def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns `fun`'s gradient with dynamic scaling: `state, grads` or `(grads, aux)`."""

    def unscale(results: Any, state: DynamicScalerState) -> Any:
        if has_aux:
            grads, aux = results
            return default_unscale_fn(grads, state), aux
        return default_unscale_fn(results, state)

    tx = dynamic_scale_tx(
        eqx.filter_grad if filter else jax.grad,
        redo_on_nan,
        unscale,
        check_fn=lambda results: results[0] if has_aux else results,
    )
    return tx(fun, has_aux=has_aux, **kwargs)


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 10,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Returns `state, (value, grads)`, with `(value, aux)` for the value if `has_aux`."""

    def unscale(results: Any, state: DynamicScalerState) -> Any:
        value, grads = results
        if has_aux:
            value = (default_unscale_fn(value[0], state), value[1])
        else:
            value = default_unscale_fn(value, state)
        return value, default_unscale_fn(grads, state)

    tx = dynamic_scale_tx(
        eqx.filter_value_and_grad if filter else jax.value_and_grad,
        redo_on_nan,
        unscale,
        check_fn=lambda results: results[1],
    )
    return tx(fun, has_aux=has_aux, **kwargs)
