"""Updating parameters only when the gradients, and the results, are finite.

A step is skipped by a select between old and new values, which costs nothing that can be
measured; a branch makes every other step slower.
"""

import contextlib
import difflib
import functools
import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, get_args, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, PyTree

from mpx._casting._context import hide_signature
from mpx._jax import _nnx
from mpx._jax._arguments import check_choice, check_function, refuse_result
from mpx._jax._compat import varying_axes
from mpx._jax._formats import at_least_f32
from mpx._jax._tree import (
    AxisName,
    LeafName,
    all_devices,
    all_true,
    as_flag,
    check_same_structure,
    check_shape,
    dtype_of,
    is_array,
    is_finite,
    is_floating,
    is_inexact,
    is_none,
    map_with_name,
    named_leaves,
    select_tree,
    shape_of,
)
from mpx._jax._warn import warn

Skip = Literal["select", "never"]
Flag = bool | np.bool_ | Bool[Array, ""]
OPTAX_ARGS = ("value", "grad", "value_fn")  # of optax's own transformations
# A compressed optimizer after another one has other parameters, and updates that are set
# to zero have no effect.
_HARMLESS = ("identity", "masked(Core.update)", "masked(set_to_zero)")
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
    state infinite or nan, as the square of a gradient of 1e20 is. (A compressed optimizer
    decides this for each element.) Model and state keep their dtypes: the update is added
    in f32 or wider and rounded once.

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
        skip: `"select"` computes the update and chooses, `"never"` always updates.
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
        RuntimeWarning: If 16-bit parameters are updated without master weights.

    Examples:
        >>> import optax
        >>> params, optimizer = jnp.ones(2), optax.sgd(0.5)
        >>> state, grads = optimizer.init(params), jnp.ones(2)
        >>> optimizer_update(params, optimizer, state, grads * jnp.inf, False)[0]
        Array([1., 1.], dtype=float32)
    """
    refuse_result(grads)
    flag = as_flag(grads_finite, "grads_finite")
    check_choice(skip, "skip", get_args(Skip))
    flag = None if skip == "never" else together(flag, flag, axis_name)
    if optimizer is None and hasattr(model, "apply_gradients"):
        warn_of_lost_updates(getattr(model, "params", None), grads, model)
        apply = lambda state: (state.apply_gradients(grads=grads, **extra_args),)  # noqa: E731
        (new,) = _skip(flag, apply, (model,), axis_name)
        return new, optimizer_state
    if _nnx.is_nnx(optimizer):
        check_extra_args(extra_args, optimizer)
        params = _nnx.without_variables(_nnx.params_of(model, optimizer))
        warn_of_lost_updates(params, _nnx.without_variables(grads), optimizer)
        _update_nnx(
            model,
            optimizer,
            lambda model, optimizer: optimizer.update(model, grads, **extra_args),
            lambda step, *before: _skip(flag, step, before, axis_name),
        )
        return model, optimizer_state
    if hasattr(model, "apply_gradients"):
        raise TypeError(
            "A Flax `TrainState` holds its optimizer and state. Pass `None` for both: "
            "`optimizer_update(train_state, None, None, grads, grads_finite)`."
        )
    expected = "`optimizer` must be an optax transformation or an `nnx.Optimizer`"
    check_transformation(optimizer, expected)
    own_step = getattr(optimizer, "step", None)
    if own_step is None and _nnx.is_nnx(model) and type(grads) is not type(model):
        raise TypeError(
            "`optimizer` is an optax transformation, but the model is an NNX module. Pass "
            "`nnx.Optimizer(model, optimizer, wrt=nnx.Param)`, made once, and `None` for "
            "`optimizer_state`."
        )
    params = eqx.filter(model, lambda leaf: is_array(leaf) and is_inexact(leaf))
    with contextlib.suppress(ValueError):  # the trees differ in more than frozen leaves
        trained = lambda x, grad: None if grad is None else x  # noqa: E731
        params = jax.tree.map(trained, params, grads, is_leaf=is_none)
    names = "model", "gradients"
    check_same_structure(params, grads, "`optimizer_update`", names)
    map_with_name(check_grad, params, grads)
    check_extra_args(extra_args, optimizer_state, is_compressed=own_step is not None)
    if own_step is not None:
        # It needs none of the values that line searches and schedules use, and selects
        # while it writes: no copy, and no second pass over memory.
        given = {k: v for k, v in extra_args.items() if k not in OPTAX_ARGS}
        return tuple(own_step(model, optimizer_state, grads, finite=flag, **given))
    warn_of_lost_updates(model, grads, optimizer_state)

    def step(model: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        args = model, params, grads, state
        updates, state = _run(optimizer, *args, **extra_args)
        return apply_updates(model, updates), state

    return _skip(flag, step, (model, optimizer_state), axis_name)


def _run(
    optimizer: PyTree,
    model: PyTree,
    params: PyTree,
    grads: PyTree,
    state: PyTree,
    **extra: PyTree,
) -> tuple[PyTree, PyTree]:
    integers, given = eqx.filter(model, _is_integer), jax.tree.structure(state)
    if jax.tree.leaves(integers) and _expected(optimizer, params) != given:
        # `optimizer.init(eqx.filter(model, eqx.is_array))` makes moments for integers, too.
        # They get zeros for gradients, and their updates are not applied.
        everything = eqx.combine(params, integers)
        if _expected(optimizer, everything) == given:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), integers)
            params, grads = everything, eqx.combine(grads, zeros)
    if not isinstance(optimizer, optax.MultiSteps):  # it passes them on, as it is
        optimizer = optax.with_extra_args_support(optimizer)
    try:
        return optimizer.update(grads, state, params, **extra)
    except Exception as error:
        expected = _expected(optimizer, params)
        if expected == given:
            raise
        texts = (str(x)[len("PyTreeDef(") : -1] for x in (expected, given))
        needed, came = (x if len(x) <= 99 else f"{x[:99]}…" for x in texts)
        raise ValueError(
            "`optimizer_state` does not fit the optimizer and the parameters that have "
            f"gradients: it should be {needed}, but {came} was given. Make it with "
            "`optimizer.init(eqx.filter(model, eqx.is_inexact_array))`, or of the trained "
            "part if some are frozen; or pass an `nnx.Optimizer`, which holds it."
        ) from error


def _is_integer(leaf: PyTree) -> bool:
    # A typed PRNG key has no NumPy dtype, and no optimizer takes it.
    return is_array(leaf) and isinstance(leaf.dtype, np.dtype) and not is_inexact(leaf)


def _expected(optimizer: PyTree, params: PyTree) -> PyTree:
    return jax.tree.structure(eqx.filter_eval_shape(optimizer.init, params))


def check_grad(name: str, param: PyTree, grad: PyTree) -> None:
    """Raises if a gradient does not fit its parameter."""
    complex_param = jnp.issubdtype(dtype_of(param), jnp.complexfloating)
    fits = is_floating(grad) or isinstance(grad, float)
    if not fits and not (complex_param and is_inexact(grad)):
        given = dtype_of(grad) or type(grad).__name__
        raise TypeError(
            f"The gradient of `{name}` is {given}, but the parameter is {dtype_of(param)} "
            "and needs a real floating gradient. Pass `None` where a parameter has none."
        )
    check_shape(f"The gradient of `{name}`", grad, param)


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


def _update_nnx(
    model: PyTree,
    optimizer: PyTree,
    update: Callable[[PyTree, PyTree], None],
    skip: Callable[..., PyTree],
) -> None:
    """Updates an NNX model and its optimizer in place."""
    apart = _nnx.Objects({LeafName("model"): model, LeafName("optimizer"): optimizer})

    def step(leaves: list[PyTree]) -> tuple[list[PyTree]]:
        objects = apart.merged(leaves)
        update(*objects.values())
        return (apart.after(objects, leaves, leaves),)

    apart.write(*skip(step, apart.leaves))


def _skip(
    flag: Bool[Array, ""] | None,
    step: Callable[..., PyTree],
    before: tuple[PyTree, ...],
    axis_name: AxisName | None,
) -> PyTree:
    """Returns `step(*before)` if all is finite, or there is no flag, else `before`."""
    if flag is None:
        return step(*before)
    after = step(*rebuilt(before))
    before = _with_array_counters(before, after)
    flag &= together(stays_finite(before, after, before[0]), flag, axis_name)
    # It checks structure and shapes and gives back the dtypes of `before`.
    return select_tree(flag, after, before)


def rebuilt(tree: PyTree) -> PyTree:
    """Returns another tree of the same leaves, for functions that assign to what they get."""
    return jax.tree.map(lambda x: x, tree)


def stays_finite(before: PyTree, after: PyTree, like: PyTree) -> Bool[Array, ""]:
    """Returns whether every number that was finite still is, in its old dtype.

    A parameter of `like` is followed by the state's arrays of its shape, which XLA computes
    together with it.
    """
    check_same_structure(after, before, "An update")
    groups: dict[Any, list[Array]] = {}
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        # `select_tree` refuses other shapes.
        if new is old or not is_inexact(old) or shape_of(old) != shape_of(new):
            continue
        # Of a NumPy array of f64 JAX has what f32 holds.
        old, new = jnp.asarray(old), jnp.asarray(new).astype(jnp.result_type(old))
        stays = is_finite(new) | ~is_finite(old)
        groups.setdefault(stays.shape, []).append(stays)
    shapes, flags = [shape_of(x) for x in jax.tree.leaves(like)], []
    for group in groups.values():
        # So many parameters have this shape; their arrays come in the order of `like`.
        each = shapes.count(group[0].shape) or 1
        flags += [x for i in range(each) for x in group[i::each]]
    return all_true(flags)


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
    """Converts Python numbers that change, as a `TrainState`'s step, to arrays to select."""
    check_same_structure(after, before, "An update")
    numbers = int | float | complex

    def convert(old: PyTree, new: PyTree) -> PyTree:
        same = new is old or (isinstance(new, numbers) and new == old)
        return jnp.asarray(old) if isinstance(old, numbers) and not same else old

    return jax.tree.map(convert, before, after)


@overload
def cond_update(
    update_fn: Callable[P, R], *, axis_name: AxisName | None = None
) -> Callable[Concatenate[Flag, P], R]: ...
@overload
def cond_update(
    update_fn: None = None, *, axis_name: AxisName | None = None
) -> Callable[[Callable[P, R]], Callable[Concatenate[Flag, P], R]]: ...
def cond_update(
    update_fn: Callable[..., PyTree] | None = None, *, axis_name: AxisName | None = None
) -> Callable[..., PyTree]:
    """Makes an update function run only when the gradients are finite.

    The decorated function takes `grads_finite` first. The result of `update_fn` replaces
    its first arguments: one value the first argument, a tuple of n values the first n.
    When the gradients are not finite, or the result is not where the arguments were, these
    arguments come back unchanged.

    Args:
        update_fn: The function, for example `(params, state, grads) -> params, state`.
            Leave it out to use `cond_update` as a decorator with arguments.
        axis_name: As in `optimizer_update`.

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
        return functools.partial(cond_update, axis_name=axis_name)
    check_function(update_fn)

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

        flag = as_flag(grads_finite, "grads_finite")
        flag = together(flag, flag, axis_name)
        after = _skip(flag, step, args[:count], axis_name)
        return after if several else after[0]

    hide_signature(wrapper)  # the flag comes first
    return wrapper


# --- checks of optax optimizers ---------------------------------------------------------


def check_transformation(optimizer: object, expected: str) -> None:
    """Raises if `optimizer` is no optax transformation: a dict has an `update`, too."""
    is_one = callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")
    if not is_one:
        given = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(f"{expected}, but {given.__name__} was given.")


def check_extra_args(
    extra: Mapping[str, object], state: PyTree, *, is_compressed: bool = False
) -> None:
    """Raises for arguments that the optimizer is known not to take.

    Most optax transformations accept anything and ignore what they do not know.
    """
    takes_scale = is_compressed or _holds(state, "mpx_is_compressed")
    known = (*OPTAX_ARGS, "grad_scale")
    taken = known if takes_scale else OPTAX_ARGS
    hints = {
        "finite": "Pass it as `grads_finite`.",
        "grad_scale": "Only the compressed optimizers such as `mpx.optim.flash_adamw` take "
        "it. Multiply the gradients, or let `mpx.value_and_grad` unscale them.",
    }
    for name in extra:
        close = difflib.get_close_matches(name, known, cutoff=0.8)
        hint = "It takes `grad_scale`." if is_compressed else ""
        hint = hints.get(name, f"Did you mean `{close[0]}`?" if close else hint)
        if hint and name not in taken:
            raise TypeError(
                f"The optimizer does not take the argument `{name}`. {hint}"
            )


def _holds(state: PyTree, mark: str) -> bool:
    """Returns whether a node of an optimizer state is of a class with this mark."""

    def marked(node: object) -> bool:
        return getattr(type(node), mark, False) is True

    return any(map(marked, jax.tree.leaves(state, is_leaf=marked)))


def warn_of_lost_updates(params: PyTree, grads: PyTree, state: PyTree) -> None:
    """Warns if 16-bit parameters are updated without master weights."""
    trained = {name for name, grad in named_leaves(grads) if is_floating(grad)}
    lost = [
        (name, dtype_of(leaf))
        for name, leaf in named_leaves(params)
        if name in trained and is_floating(leaf) and dtype_of(leaf).itemsize == 2
    ]
    if not lost or _holds(state, "mpx_holds_masters"):
        return
    name, dtype = lost[0]
    lost_below = "0.2 %" if dtype == jnp.bfloat16 else "0.02 %"
    warn(
        f"`{name}` is stored in {dtype}, and the optimizer keeps no master weights: an "
        f"update of less than {lost_below} of a weight is rounded away, and training may "
        "stand still. Store the parameters in f32 and let a policy or `mpx.amp` cast "
        "them, wrap the optimizer as `mpx.optim.master_weights(optimizer)`, or use "
        "`mpx.optim.flash_adamw`."
    )


def transforms_after() -> list[str]:
    """Returns the names of the transformations that a chain applies after the caller.

    Optax does not tell a transformation its place. But the loop of a chain is on the stack
    while a member is called or traced, at any depth: the variables of the `update_fn` of
    `optax.chain` and `optax.named_chain` hold the members, and the states of those that
    are done. If optax writes its loops differently, nothing is found or refused.
    """
    names: list[str] = []
    # Of `None` it would skip frames: as many as `traceback` itself has.
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        of_optax = str(frame.f_globals.get("__name__")).startswith("optax.")
        loop: Mapping[str, PyTree] = frame.f_locals if of_optax else {}
        done = loop.get("new_state")
        if frame.f_code.co_name == "update_fn" and isinstance(done, list | dict):
            updates = loop.get("update_fns", ())
            if "transforms" in loop:
                updates = [transform.update for _, transform in loop["transforms"]]
            names += [_name(update) for update in updates[len(done) + 1 :]]
    return [name for name in names if name not in _HARMLESS]


def _name(update: PyTree) -> str:
    """Returns the name of the function that made a transformation, such as `scale`."""
    name = getattr(update, "__qualname__", repr(update)).split(".<locals>")[0]
    cells = getattr(update, "__closure__", None) or ()
    inner = [
        _name(cell.cell_contents.update)
        for cell in cells
        if isinstance(cell.cell_contents, optax.GradientTransformation)
    ]
    if not inner:
        return name
    return inner[0] if name == "with_extra_args_support" else f"{name}({inner[0]})"
