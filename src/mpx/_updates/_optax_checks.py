"""Checks of optax optimizers: their type, arguments and states."""

import difflib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mpx._jax._tree import dtype_of, is_floating, named_leaves
from mpx._jax._warn import warn

OPTAX_ARGS = ("value", "grad", "value_fn")  # of optax's own transformations


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
