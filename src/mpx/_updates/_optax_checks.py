"""Checks of optax optimizers: their type, arguments, states and chains."""

import difflib
import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from mpx._jax._tree import dtype_of, is_floating, named_leaves
from mpx._jax._warn import warn

OPTAX_ARGS = ("value", "grad", "value_fn")  # of optax's own transformations
# A compressed optimizer after another one has other parameters, and updates that are set
# to zero have no effect.
_HARMLESS = ("identity", "masked(Core.update)", "masked(set_to_zero)")


def check_transformation(optimizer: object, expected: str, hint: str = "") -> None:
    """Raises if `optimizer` is no optax transformation: a dict has an `update`, too."""
    is_one = callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")
    if not is_one:
        given = optimizer if isinstance(optimizer, type) else type(optimizer)
        raise TypeError(f"{expected}, but {given.__name__} was given.{hint}")


def check_extra_args(
    extra: Mapping[str, object], state: PyTree, *, is_compressed: bool = False
) -> None:
    """Raises for arguments that the optimizer is known not to take.

    Most optax transformations accept anything and ignore what they do not know.
    """
    known = (*OPTAX_ARGS, "grad_scale")
    for name in extra:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name == "finite":
            hint = "Pass it as `grads_finite`."
        elif name == "grad_scale":
            if is_compressed or _holds(state, "mpx_is_compressed"):
                continue
            hint = (
                "Only the compressed optimizers such as `mpx.optim.flash_adamw` take it. "
                "Multiply the gradients, or let `mpx.value_and_grad` unscale them."
            )
        elif name in known or not (close or is_compressed):
            continue
        else:
            hint = f"Did you mean `{close[0]}`?" if close else "It takes `grad_scale`."
        raise TypeError(f"The optimizer does not take the argument `{name}`. {hint}")


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

    Optax does not tell a transformation its place. But a chain calls its members in a
    loop, and that loop is on the stack while one of them is called or traced, at any
    depth: `chain(masked(optimizer), scale(0.5))`. The variables of the `update_fn` of
    `optax.chain` and `optax.named_chain` hold the members, and the states of those that
    are done. If optax writes its loops differently, nothing is found or refused.
    """
    names: list[str] = []
    frame = inspect.currentframe()
    while frame is not None:
        of_optax = str(frame.f_globals.get("__name__")).startswith("optax.")
        loop: Mapping[str, PyTree] = frame.f_locals
        done = loop.get("new_state") if of_optax else None
        if frame.f_code.co_name == "update_fn" and isinstance(done, list | dict):
            updates = loop.get("update_fns", ())
            if "transforms" in loop:
                updates = [transform.update for _, transform in loop["transforms"]]
            names += [_name(update) for update in updates[len(done) + 1 :]]
        frame = frame.f_back
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
