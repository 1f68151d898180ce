"""The names of jaxamp on top of mpx: `from mpx.compat import jaxamp`.

`amp` is `mpx.amp` with jaxamp's policy: additions, subtractions, matmuls and
convolutions low; exponentials, logarithms, products and quotients in f32; everything
else at its original precision. `mpx.amp` itself has better rules. The page "Coming from
another library" lists the differences.

Examples:
    >>> amp(lambda x: x + 1.0, compute_dtype=jnp.bfloat16)(jnp.float32(256.0))
    Array(256., dtype=float32)
    >>> grad_fn = dynamic_scale_grad(lambda w: w**2)
    >>> state, grad = grad_fn(jnp.float32(3.0), dynamic_scaler_state=DynamicScalerState())
    >>> float(grad), float(state.scaler)
    (6.0, 32768.0)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mpx._amp import AmpRules
from mpx._amp import amp as _amp
from mpx._amp import amp_stop as amp_stop
from mpx._amp._rules import PRIMITIVES, Rule, rules_by_name
from mpx._casting._context import gradient_function
from mpx._jax._formats import FORMATS
from mpx._jax._tree import all_finite
from mpx._scaling._loss_scaling import LARGEST_SCALE, StaticLossScaling

Func = Callable[..., PyTree]


class DynamicScalerState(NamedTuple):
    """jaxamp's scaler: a named tuple of numbers or arrays."""

    patience: PyTree = 2000  # finite steps before the step that grows the scale
    adjust_factor: PyTree = 2.0  # what growth multiplies and backoff divides by
    scaler: PyTree = 2.0**15
    count: PyTree = 0  # finite steps since the last change
    total_resets: PyTree = 0  # non-finite steps


# One example in the README of jaxamp calls it so.
DynamicLossScaler = DynamicScalerState
_DTYPES = (jnp.int32, jnp.float32, jnp.float32, jnp.int32, jnp.int32)


def _adjust(state: DynamicScalerState, finite: Array) -> DynamicScalerState:
    grow = finite & (state.count >= state.patience)
    larger = jnp.minimum(state.scaler * state.adjust_factor, LARGEST_SCALE)
    smaller = jnp.maximum(state.scaler / state.adjust_factor, FORMATS["f32"].tiny)
    return state._replace(
        scaler=jnp.where(grow, larger, jnp.where(finite, state.scaler, smaller)),
        count=jnp.where(finite & ~grow, state.count + 1, 0),
        total_resets=state.total_resets + (~finite).astype(jnp.int32),
    )


def default_scale_fn(result: PyTree, state: DynamicScalerState) -> PyTree:
    """Scales a loss, or the loss of a pair `(loss, aux)`, in f32."""
    scaling = StaticLossScaling(state.scaler)
    if isinstance(result, tuple):
        value, aux = result
        return scaling.scale(value), aux
    return scaling.scale(result)


def default_unscale_fn(results: PyTree, state: DynamicScalerState) -> PyTree:
    """Unscales every floating leaf of what a transformation returned, in f32."""
    return StaticLossScaling(state.scaler).unscale(results)


def dynamic_scale_tx(
    transform: Func,
    redo_on_nan: int = 0,
    unscale_fn: Func = default_unscale_fn,
    scale_fn: Func = default_scale_fn,
    *,
    check_fn: Callable[[PyTree], PyTree] = lambda results: results,
) -> Func:
    """Gives a transformation such as `jax.grad` dynamic loss scaling.

    It is repeated up to `redo_on_nan` times, each with a smaller scale, until what
    `check_fn` returns of the results is finite.
    """

    def scaled_transform(fun: Func, *args: object, **kwargs: object) -> PyTree:
        @functools.wraps(fun)
        def scaled_fun(
            *args: object, _state: DynamicScalerState, **kwargs: object
        ) -> PyTree:
            return scale_fn(fun(*args, **kwargs), _state)

        transformed = transform(scaled_fun, *args, **kwargs)

        def scaled_call(
            *args: object, dynamic_scaler_state: DynamicScalerState, **kwargs: object
        ) -> tuple[DynamicScalerState, PyTree]:
            def attempt(state: DynamicScalerState) -> tuple[PyTree, PyTree, Array]:
                with gradient_function():
                    results = transformed(*args, _state=state, **kwargs)
                results = unscale_fn(results, state)
                finite = all_finite(check_fn(results))
                return _adjust(state, finite), results, finite

            state = map(jnp.asarray, dynamic_scaler_state, _DTYPES)
            first = attempt(DynamicScalerState(*state))
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


def dynamic_scale_value_and_grad(
    fun: Func,
    *,
    has_aux: bool = False,
    redo_on_nan: int = 10,
    filter: bool = True,
    **kwargs: PyTree,
) -> Func:
    """Returns `state, (value, grads)`, with `(value, aux)` for the value if `has_aux`."""

    def unscale(results: PyTree, state: DynamicScalerState) -> PyTree:
        value, grads = results
        (loss, *aux) = value if has_aux else (value,)
        loss = default_unscale_fn(loss, state)
        return (loss, *aux) if has_aux else loss, default_unscale_fn(grads, state)

    tx = dynamic_scale_tx(
        eqx.filter_value_and_grad if filter else jax.value_and_grad,
        redo_on_nan,
        unscale,
        check_fn=lambda results: results[1],
    )
    return tx(fun, has_aux=has_aux, **kwargs)


def dynamic_scale_grad(
    fun: Func, *, has_aux: bool = False, redo_on_nan: int = 0, **kwargs: PyTree
) -> Func:
    """Returns `state, grads`, with `(grads, aux)` for the gradients if `has_aux`."""
    call = dynamic_scale_value_and_grad(
        fun, has_aux=has_aux, redo_on_nan=redo_on_nan, **kwargs
    )

    def scaled_grad(
        *args: object, **kwargs: object
    ) -> tuple[DynamicScalerState, PyTree]:
        state, (value, grads) = call(*args, **kwargs)
        return state, (grads, value[1]) if has_aux else grads

    return scaled_grad


# --- amp ------------------------------------------------------------------------------

DTypes = Sequence[DTypeLike]
Changed = tuple[list[PyTree], dict[str, PyTree]]


def _is_castable(x: PyTree) -> bool:
    return jnp.result_type(x) in (np.float32, np.float16, jnp.bfloat16)


def use_original_precision(
    compute_dtype: DTypeLike, original_dtypes: DTypes, *invars: PyTree, **params: PyTree
) -> Changed:
    """Casts operands back to the dtypes that they have in the function as written."""
    del compute_dtype
    return [
        lax.convert_element_type(x, dtype) if _is_castable(x) else x
        for x, dtype in zip(invars, original_dtypes, strict=True)
    ], params


def use_compute_precision(
    compute_dtype: DTypeLike, original_dtypes: DTypes, *invars: PyTree, **params: PyTree
) -> Changed:
    """Casts operands to the compute dtype, unless one of them is no 16 or 32-bit float."""
    if not all(map(_is_castable, invars)):
        return use_original_precision(compute_dtype, original_dtypes, *invars, **params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = np.dtype(compute_dtype)
    return [lax.convert_element_type(x, compute_dtype) for x in invars], params


def use_precision(dtype: DTypeLike) -> Callable[..., Changed]:
    """Returns a precision function that casts operands to a dtype of its own."""
    return lambda compute_dtype, *args, **params: use_compute_precision(
        dtype, *args, **params
    )


def use_widest_precision(
    compute_dtype: DTypeLike, original_dtypes: DTypes, *invars: PyTree, **params: PyTree
) -> Changed:
    """Casts operands to the widest dtype that they have in the function as written."""
    del compute_dtype
    widest = functools.reduce(jnp.promote_types, original_dtypes)
    return use_compute_precision(widest, original_dtypes, *invars, **params)


_use_f32 = use_precision(jnp.float32)

default_amp_policy: dict[object, Callable[..., Changed]] = {
    lax.add_p: use_compute_precision,
    lax.sub_p: use_compute_precision,
    lax.dot_general_p: use_compute_precision,
    lax.conv_general_dilated_p: use_compute_precision,
    lax.exp_p: _use_f32,
    lax.log_p: _use_f32,
    lax.mul_p: _use_f32,
    lax.div_p: _use_f32,
    "amp_default": use_original_precision,
    "amp_stop": use_original_precision,
}

# These three are rules of mpx. A rule knows more than a function of operands: it takes
# an equation that holds a whole jaxpr, and the report can name it.
_RULES = {
    use_original_precision: Rule.ORIGINAL,
    use_compute_precision: Rule.LOW,
    _use_f32: Rule.F32,
}


def _as_policy(amp_policy: Mapping[PyTree, Callable[..., Changed]]) -> AmpRules:
    rules = {key: _RULES.get(value, value) for key, value in amp_policy.items()}
    scopes = {key: rule for key, rule in rules.items() if type(key) is str}
    if "amp_stop" in scopes:  # jaxamp's README prints it as `amp_step`
        scopes.setdefault("amp_step", scopes["amp_stop"])
    listed = {key.name: rule for key, rule in rules.items() if type(key) is not str}
    # Besides being a scope, it is the rule of what is not listed.
    default = rules.get("amp_default", Rule.ORIGINAL)
    if default != Rule.ORIGINAL:
        listed = {name: default for name in PRIMITIVES} | listed
    return rules_by_name(listed, scopes)


def amp(
    fn: Func | None = None,
    *,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: Mapping[PyTree, Callable[..., Changed]] = default_amp_policy,
) -> Func:
    """Runs a function in mixed precision by a dictionary of precision functions.

    `amp_policy` leads from primitives such as `jax.lax.add_p`, and from names of
    `jax.named_scope`, to functions `(compute_dtype, original_dtypes, *invars,
    **bind_params) -> invars, bind_params`. The outermost scope that is listed wins, before
    all primitives; what is not listed runs at its original precision.
    """
    return _amp(fn, compute_dtype, rules=_as_policy(amp_policy))
