"""The optimizers of flashoptim-jax, with its signatures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from mpx import _optim
from mpx.compat._flashoptim_codecs import MasterBits, QuantizedArray, is_quantized
from mpx.compat._flashoptim_convert import FlashAdamState, FlashLionState, FlashSGDState
from mpx.compat._flashoptim_steps import Steps

# The signatures below are those of flashoptim-jax, positions included.
Rate = float | Array | Callable[[Array], Any]
Groups = Sequence[Mapping[str, Any]] | None


class FlashOptimizer(NamedTuple):
    """An optimizer.

    Attributes:
        init: `init(params)`, returns the state.
        step: `step(params, state, grads)`, returns `(params, state)`.
    """

    init: Callable[[PyTree], Any]
    step: Callable[[PyTree, Any, PyTree], tuple[PyTree, Any]]


def flash_adam(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Adam; weight decay is added to the gradient. See `flash_adamw`."""
    options = dict(
        learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay,
        quantize=quantize, master_weight_bits=master_weight_bits, group_size=group_size,
        fused=fused,
    )  # fmt: skip
    return _build(
        "flash_adam", _optim.flash_adam, FlashAdamState, options, param_groups
    )


def flash_adamw(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """AdamW.

    Args:
        learning_rate: A number, or a schedule: a function of the step count.
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Multiplied by the learning rate.
        quantize: Whether moments are stored in 8 bits; else in f32.
        master_weight_bits: 24, 32 or `None`, the bits of the master weights of 16-bit
            parameters.
        group_size: How many elements share a scale: a power of two up to 1024, or
            any number from 2 on with `fused=False`.
        fused: `False` runs the step in plain JAX, `True` lets mpx choose.
        param_groups: Dictionaries with the key `params` and options that differ. `params`
            is a name that occurs in the path, a whole path (`"head/w"` or a tuple), a
            function of path and leaf, or a list of these; the first match holds.

    Raises:
        ValueError: If an option is unknown or out of its range.
    """
    options = dict(
        learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay,
        quantize=quantize, master_weight_bits=master_weight_bits, group_size=group_size,
        fused=fused,
    )  # fmt: skip
    make = _optim.flash_adamw
    return _build("flash_adamw", make, FlashAdamState, options, param_groups)


def flash_lion(  # noqa: PLR0917
    learning_rate: Rate = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Lion. See `flash_adamw` for the options."""
    options = dict(
        learning_rate=learning_rate, b1=b1, b2=b2, weight_decay=weight_decay,
        quantize=quantize, master_weight_bits=master_weight_bits, group_size=group_size,
        fused=fused,
    )  # fmt: skip
    return _build(
        "flash_lion", _optim.flash_lion, FlashLionState, options, param_groups
    )


def flash_sgd(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Gradient descent; weight decay is added to the gradient. See `flash_adamw`."""
    options = dict(
        learning_rate=learning_rate, momentum=momentum, dampening=dampening,
        weight_decay=weight_decay, nesterov=nesterov, quantize=quantize,
        master_weight_bits=master_weight_bits, group_size=group_size, fused=fused,
    )  # fmt: skip
    return _build("flash_sgd", _optim.flash_sgd, FlashSGDState, options, param_groups)


def flash_sgdw(  # noqa: PLR0917
    learning_rate: Rate = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: MasterBits = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Groups = None,
) -> FlashOptimizer:
    """Gradient descent with decoupled weight decay. See `flash_adamw`."""
    options = dict(
        learning_rate=learning_rate, momentum=momentum, dampening=dampening,
        weight_decay=weight_decay, nesterov=nesterov, quantize=quantize,
        master_weight_bits=master_weight_bits, group_size=group_size, fused=fused,
    )  # fmt: skip
    return _build("flash_sgdw", _optim.flash_sgdw, FlashSGDState, options, param_groups)


def _build(
    name: str,
    make: Callable[..., Any],
    state_type: type,
    options: dict[str, Any],
    param_groups: Groups,
) -> FlashOptimizer:
    steps = Steps.build(name, make, state_type, options, tuple(param_groups or ()))
    return FlashOptimizer(steps.init, steps.step)


# --- state dictionaries ---------------------------------------------------------------


def flash_adamw_state_dict(state: Any) -> dict[str, Any]:
    """Returns the state of Adam or AdamW as a dictionary."""
    return _state_dict(state)


def flash_lion_state_dict(state: Any) -> dict[str, Any]:
    """Returns the state of Lion as a dictionary."""
    return _state_dict(state)


def flash_sgd_state_dict(state: Any) -> dict[str, Any]:
    """Returns the state of gradient descent as a dictionary."""
    return _state_dict(state)


def load_flash_adamw_state_dict(state_dict: Mapping[str, Any]) -> FlashAdamState:
    """Returns the state that `flash_adamw_state_dict` was given."""
    return _load_state_dict(FlashAdamState, state_dict)


def load_flash_lion_state_dict(state_dict: Mapping[str, Any]) -> FlashLionState:
    """Returns the state that `flash_lion_state_dict` was given."""
    return _load_state_dict(FlashLionState, state_dict)


def load_flash_sgd_state_dict(state_dict: Mapping[str, Any]) -> FlashSGDState:
    """Returns the state that `flash_sgd_state_dict` was given."""
    return _load_state_dict(FlashSGDState, state_dict)


def _state_dict(state: Any) -> dict[str, Any]:
    trees = {name: getattr(state, name) for name in state._fields if name != "count"}
    return {"count": jnp.asarray(state.count)} | {
        name: _tree_dict(tree) for name, tree in trees.items()
    }


def _tree_dict(tree: PyTree) -> dict[str, Any]:
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_quantized)
    return {"treedef": treedef, "leaves": [_leaf_dict(leaf) for leaf in leaves]}


def _leaf_dict(leaf: Any) -> dict[str, Any]:
    if is_quantized(leaf):
        values, scales = map(jnp.asarray, leaf)
        return {"kind": "quantized", "values": values, "scales": scales}
    return {"kind": "array", "value": jnp.asarray(leaf)}


def _load_state_dict(state_type: Any, state_dict: Mapping[str, Any]) -> Any:
    names = state_type._fields
    if missing := [name for name in names if name not in state_dict]:
        raise ValueError(
            f"A state dictionary for {state_type.__name__} has the keys {list(names)}, but "
            f"{missing} are missing: it comes from another optimizer."
        )
    trees = {name: _load_tree(state_dict[name]) for name in names if name != "count"}
    return state_type(count=jnp.asarray(state_dict["count"], jnp.int32), **trees)


def _load_tree(tree: Mapping[str, Any]) -> PyTree:
    return tree["treedef"].unflatten([_load_leaf(leaf) for leaf in tree["leaves"]])


def _load_leaf(leaf: Mapping[str, Any]) -> Any:
    kind = leaf["kind"]
    if kind == "quantized":
        return QuantizedArray(jnp.asarray(leaf["values"]), jnp.asarray(leaf["scales"]))
    if kind == "array":
        return jnp.asarray(leaf["value"])
    raise ValueError(
        f"A leaf of a state dictionary is 'quantized' or 'array', but {kind!r} came."
    )
