"""Updating parameters only when the gradients, and the results, are finite.

By default a step is skipped by a select between old and new values. `lax.cond` avoids
computing the update, at the price of a branch. The guide page "Skipping steps" has the
numbers behind the default.
"""

import functools
from collections.abc import Callable
from typing import Concatenate, Literal, ParamSpec, TypeVar, get_args, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, PyTree

from mpx._casting._context import hide_signature
from mpx._jax import _nnx
from mpx._jax._arguments import check_choice
from mpx._jax._compat import varying_axes
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    all_devices,
    all_finite,
    as_flag,
    check_same_structure,
    check_shape,
    dtype_of,
    is_array,
    is_floating,
    is_inexact,
    is_none,
    map_with_name,
    select_tree,
    shape_of,
)
from mpx._updates._optax_checks import (
    OPTAX_ARGS,
    check_extra_args,
    check_transformation,
    warn_of_lost_updates,
)

Skip = Literal["select", "cond", "never"]
Flag = bool | np.bool_ | Bool[Array, ""]
P = ParamSpec("P")
R = TypeVar("R")


def optimizer_update(
    model: PyTree,
    optimizer: PyTree,
    optimizer_state: PyTree,
    grads: PyTree,
    grads_finite: PyTree,
    *,
    skip: Skip = "select",
    axis_name: AxisName | None = None,
    **extra_args: PyTree,
) -> tuple[PyTree, PyTree]:
    """Applies an optimizer if the gradients are finite; otherwise changes nothing.

    Nothing changes either if the step would make a finite number of the model or of the
    state infinite or nan: the square of a finite gradient of 1e20 is infinite, and a
    second moment that is infinite stays so. (A compressed optimizer decides this for each
    element.) Model and state keep their dtypes: the update is added in f32 or wider and
    rounded once.

    Args:
        model: The model or the parameters: any pytree. Also an NNX module, or a Flax
            `TrainState` (pass `None` for `optimizer` and `optimizer_state`).
        optimizer: An optax transformation, initialised with
            `optimizer.init(eqx.filter(model, eqx.is_inexact_array))`; or an
            `nnx.Optimizer` (pass `None` for `optimizer_state`), which is updated in
            place together with the module.
        optimizer_state: The state of an optax optimizer.
        grads: The gradients, `None` where there is none.
        grads_finite: Whether to update, a boolean scalar.
        skip: How to skip: `"select"` computes the update and chooses, `"cond"` branches,
            `"never"` always updates.
        axis_name: Mesh axes of a `shard_map` without `check_vma` over which parameters or
            state are sharded: the devices then decide together. Where JAX knows that a
            value differs between devices, they always do.
        **extra_args: Passed to the optimizer, for example `value=loss`. `grad_scale` is
            for compressed optimizers.

    Returns:
        The model and the optimizer state after the step.

    Raises:
        ValueError: If gradients, state and model do not fit; the leaf is named.
        TypeError: If `grads_finite` is not a boolean scalar, a gradient is not floating,
            or the optimizer does not take an argument.

    Warns:
        RuntimeWarning: If parameters of 16 bits are updated by an optimizer that keeps no
            master weights: updates below half an ulp are lost.

    Examples:
        >>> import optax
        >>> params, optimizer = jnp.ones(2), optax.sgd(0.5)
        >>> state, grads = optimizer.init(params), jnp.ones(2)
        >>> optimizer_update(params, optimizer, state, grads, True)[0]
        Array([0.5, 0.5], dtype=float32)
        >>> optimizer_update(params, optimizer, state, grads * jnp.inf, False)[0]
        Array([1., 1.], dtype=float32)
    """
    if optimizer is None and hasattr(model, "apply_gradients"):
        warn_of_lost_updates(getattr(model, "params", None), grads, model)

        def step_train_state(state: PyTree) -> tuple[PyTree]:
            return (state.apply_gradients(grads=grads, **extra_args),)

        (new,) = _skip(skip, step_train_state, (model,), grads_finite, axis_name)
        return new, optimizer_state
    if _nnx.is_nnx(optimizer):
        check_extra_args(extra_args, optimizer)
        params = _nnx.without_variables(_nnx.params_of(model))
        warn_of_lost_updates(params, _nnx.without_variables(grads), optimizer)

        def update_nnx(model: PyTree, optimizer: PyTree) -> None:
            optimizer.update(model, grads, **extra_args)

        args = {"model": model, "optimizer": optimizer}
        step_nnx, before = _nnx.as_pure(update_nnx, args)
        (after,) = _skip(skip, step_nnx, (before,), grads_finite, axis_name)
        _nnx.update(args, after)
        return model, optimizer_state
    check_transformation(
        optimizer,
        "`optimizer` must be an optax transformation or an `nnx.Optimizer`",
        " (For a Flax `TrainState` pass it as `model`, with `None` for `optimizer`.)",
    )
    _check_grads(model, grads)
    own_step = getattr(optimizer, "step", None)
    check_extra_args(extra_args, optimizer_state, is_compressed=own_step is not None)
    if own_step is None:
        warn_of_lost_updates(model, grads, optimizer_state)
    else:  # it needs none of the values that line searches and schedules use
        extra_args = {k: v for k, v in extra_args.items() if k not in OPTAX_ARGS}
    if skip == "select" and own_step is not None:
        # It selects while it writes: no copy, and no second pass over memory.
        flag = as_flag(grads_finite, "grads_finite")
        return tuple(own_step(model, optimizer_state, grads, finite=flag, **extra_args))

    def step(model: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        if own_step is not None:
            return tuple(own_step(model, state, grads, **extra_args))
        params = _params_with_grads(model, grads)
        args = _with_integers(optimizer, model, params, grads, state)
        updates, state = _run(optimizer, state, *args, extra_args)
        return apply_updates(model, updates), state

    before = model, optimizer_state
    checks = own_step is None  # a compressed optimizer does so while it writes
    return _skip(skip, step, before, grads_finite, axis_name, checks=checks)


def _run(
    optimizer: PyTree,
    state: PyTree,
    params: PyTree,
    grads: PyTree,
    extra: dict[str, PyTree],
) -> tuple[PyTree, PyTree]:
    if not isinstance(optimizer, optax.MultiSteps):  # it passes them on, as it is
        optimizer = optax.with_extra_args_support(optimizer)
    try:
        return optimizer.update(grads, state, params, **extra)
    except Exception as error:
        expected, given = _expected(optimizer, params), jax.tree.structure(state)
        if expected == given:
            raise
        needed, came = (
            text if len(text) <= 200 else f"{text[:200]}…"
            for text in (str(x)[len("PyTreeDef(") : -1] for x in (expected, given))
        )
        raise ValueError(
            "`optimizer_state` does not fit the optimizer and the parameters that have "
            f"gradients: it should be {needed}, but {came} was given. Make it with "
            "`optimizer.init(eqx.filter(model, eqx.is_inexact_array))`, or of the trained "
            "part if some are frozen."
        ) from error


def _with_integers(
    optimizer: PyTree, model: PyTree, params: PyTree, grads: PyTree, state: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns parameters and gradients, with integers if the state was made for them.

    `optimizer.init(eqx.filter(model, eqx.is_array))` makes moments for integers, too.
    They get zeros for gradients, and their updates are not applied.
    """
    integers, given = eqx.filter(model, _is_integer), jax.tree.structure(state)
    if not jax.tree.leaves(integers) or _expected(optimizer, params) == given:
        return params, grads
    everything = eqx.combine(params, integers)
    if _expected(optimizer, everything) != given:
        return params, grads
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), integers)
    return everything, eqx.combine(grads, zeros)


def _is_integer(leaf: PyTree) -> bool:
    # A typed PRNG key has no NumPy dtype, and no optimizer takes it.
    return is_array(leaf) and isinstance(leaf.dtype, np.dtype) and not is_inexact(leaf)


def _expected(optimizer: PyTree, params: PyTree) -> PyTree:
    """Returns the structure of the state for these parameters."""
    return jax.tree.structure(eqx.filter_eval_shape(optimizer.init, params))


def _params_with_grads(model: PyTree, grads: PyTree) -> PyTree:
    """Returns the floating parameters, without the frozen ones that have no gradient."""
    params = eqx.filter(model, lambda leaf: is_array(leaf) and is_inexact(leaf))
    try:
        return jax.tree.map(
            lambda p, g: None if g is None else p, params, grads, is_leaf=is_none
        )
    except ValueError:  # the trees differ in more than that
        return params


def _check_grads(model: PyTree, grads: PyTree) -> None:
    """Raises if a gradient does not fit its parameter, or the trees differ."""
    params = _params_with_grads(model, grads)
    check_same_structure(params, grads, "`optimizer_update`")

    def check(name: str, param: PyTree, grad: PyTree) -> None:
        complex_param = jnp.issubdtype(dtype_of(param), jnp.complexfloating)
        fits = is_floating(grad) or isinstance(grad, float)
        if not fits and not (complex_param and is_inexact(grad)):
            given = dtype_of(grad) or type(grad).__name__
            raise TypeError(
                f"The gradient of `{name}` is {given}, but the parameter is "
                f"{dtype_of(param)} and needs a real floating gradient. Pass `None` "
                "where a parameter has none."
            )
        check_shape(f"The gradient of `{name}`", grad, param)

    map_with_name(check, params, grads)


def apply_updates(model: PyTree, updates: PyTree) -> PyTree:
    """Adds updates to parameters in f32 or wider; the parameters keep their dtype."""

    def add(update: PyTree, param: PyTree) -> PyTree:
        if update is None or _is_integer(param):
            return param
        param = jnp.asarray(param)
        wide = at_least_f32(param.dtype)
        total = param.astype(wide) + jnp.asarray(update).astype(wide)
        return total.astype(param.dtype)

    return jax.tree.map(add, updates, model, is_leaf=is_none)


def _skip(
    skip: Skip,
    step: Callable[..., PyTree],
    before: tuple[PyTree, ...],
    finite: PyTree,
    axis_name: AxisName | None = None,
    *,
    checks: bool = True,
) -> PyTree:
    """Returns `step(*before)` if all is finite and `before` if not."""
    flag = as_flag(finite, "grads_finite")
    check_choice(skip, "skip", get_args(Skip))
    if skip == "never":
        return step(*before)
    flag = together(flag, flag, axis_name)

    def chosen(flag: PyTree, before: tuple[PyTree, ...], after: PyTree) -> PyTree:
        if checks:
            flag &= together(stays_finite(before, after), flag, axis_name)
        # It checks structure and shapes and gives back the dtypes of `before`.
        return select_tree(flag, after, before)

    if skip == "select":
        after = step(*before)
        return chosen(flag, _with_array_counters(before, after), after)
    if any(_is_number(leaf) for leaf in jax.tree.leaves(before)):
        before = _with_array_counters(before, eqx.filter_eval_shape(step, *before))
    arrays, static = eqx.partition(before, eqx.is_array)

    def run(arrays: PyTree) -> PyTree:
        before = eqx.combine(arrays, static)
        after = chosen(jnp.array(True), before, step(*before))
        return eqx.filter(after, eqx.is_array)

    return eqx.combine(lax.cond(flag, run, lambda arrays: arrays, arrays), static)


def stays_finite(before: PyTree, after: PyTree) -> Bool[Array, ""]:
    """Returns whether every number that was finite still is, in its old dtype.

    States may hold others on purpose: the best loss so far starts as infinity.
    """
    check_same_structure(after, before, "An update")

    def of_finite(old: PyTree, new: PyTree) -> PyTree:
        # `select_tree` refuses other shapes.
        if new is old or not is_inexact(old) or shape_of(old) != shape_of(new):
            return None
        new = jnp.asarray(new).astype(jnp.result_type(old))
        return jnp.where(jnp.isfinite(old), new, jnp.zeros_like(new))

    return all_finite(jax.tree.map(of_finite, before, after))


def together(
    flag: Bool[Array, ""], like: PyTree, axis_name: AxisName | None = None
) -> Bool[Array, ""]:
    """Returns whether a flag holds on all devices between which the decision is shared.

    These are the devices of `axis_name`, and those between which the flag differs while
    `like` does not.
    """
    names = () if axis_name is None else axis_name
    names = {names} if isinstance(names, str) else {*names}
    names |= varying_axes(jax.typeof(flag)) - varying_axes(jax.typeof(like))
    return all_devices(flag, tuple(sorted(names))) if names else flag


def _with_array_counters(before: PyTree, after: PyTree) -> PyTree:
    """Converts the Python numbers that a step changes to arrays, which can be selected.

    The `step` of a new Flax `TrainState` is such a number.
    """
    check_same_structure(after, before, "An update")

    def convert(old: PyTree, new: PyTree) -> PyTree:
        same = new is old or (_is_number(new) and new == old)
        return jnp.asarray(old) if _is_number(old) and not same else old

    return jax.tree.map(convert, before, after)


def _is_number(leaf: PyTree) -> bool:
    return isinstance(leaf, int | float | complex)


@overload
def cond_update(
    update_fn: Callable[P, R],
    *,
    skip: Skip = "select",
    axis_name: AxisName | None = None,
) -> Callable[Concatenate[Flag, P], R]: ...
@overload
def cond_update(
    update_fn: None = None, *, skip: Skip = "select", axis_name: AxisName | None = None
) -> Callable[[Callable[P, R]], Callable[Concatenate[Flag, P], R]]: ...
def cond_update(
    update_fn: Callable[..., PyTree] | None = None,
    *,
    skip: Skip = "select",
    axis_name: AxisName | None = None,
) -> Callable[..., PyTree]:
    """Makes an update function run only when the gradients are finite.

    The decorated function takes `grads_finite` first. The result of `update_fn` replaces
    its first arguments: one value the first argument, a tuple of n values the first n.
    When the gradients are not finite, or the result is not where the arguments were, these
    arguments come back unchanged.

    Args:
        update_fn: The function, for example `(params, state, grads) -> params, state`.
            Leave it out to use `cond_update` as a decorator with arguments.
        skip: This and `axis_name` are as in `optimizer_update`.
        axis_name: Mesh axes over which to decide together.

    Raises:
        ValueError: If a result does not have the structure and shapes of the argument
            that it replaces.

    Examples:
        >>> @cond_update
        ... def update(params, grads):
        ...     return params - grads
        >>> update(False, jnp.ones(2), jnp.full(2, jnp.nan))
        Array([1., 1.], dtype=float32)
    """
    if update_fn is None:
        return functools.partial(cond_update, skip=skip, axis_name=axis_name)

    @functools.wraps(update_fn)
    def wrapper(grads_finite: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        result = eqx.filter_eval_shape(update_fn, *args, **kwargs)
        several = type(result) is tuple
        count = len(result) if several else 1
        if count > len(args):
            raise ValueError(
                f"`update_fn` returned {count} values for {len(args)} arguments. It "
                "must return new values for its first arguments, in their order."
            )

        def step(*before: PyTree) -> tuple[PyTree, ...]:
            after = update_fn(*before, *args[count:], **kwargs)
            return after if several else (after,)

        after = _skip(skip, step, args[:count], grads_finite, axis_name)
        return after if several else after[0]

    hide_signature(wrapper)  # the flag comes first
    return wrapper
