"""What users pass that cannot be right: an error says what, where, and what to do."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx import _kernels
from mpx._optim._options import Compression, ParamGroup
from mpx._optim._rules import Rule
from mpx._optim._state import PARAM_DTYPES
from mpx._tree import dtype_of, is_inexact, shape_of


def is_trainable(name: str, param: Any) -> bool:
    """Whether a leaf is a parameter; raises for floating leaves that cannot be one."""
    dtype = dtype_of(param)
    if dtype in PARAM_DTYPES:
        return True
    if is_inexact(param):
        raise TypeError(
            f"`{name}` is {dtype}, but compressed optimizers hold weights in f32, bf16 or "
            "f16. Cast it, or freeze it with `ParamGroup(path, frozen=True)`."
        )
    return False


def check_grad(name: str, param: Any, grad: Any) -> None:
    """Raises if a gradient does not fit its parameter."""
    if shape_of(grad) != shape_of(param):
        raise ValueError(
            f"The gradient of `{name}` has shape {shape_of(grad)}, but the parameter "
            f"has shape {shape_of(param)}."
        )
    dtype = dtype_of(grad)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The gradient of `{name}` is {dtype or type(grad).__name__}, but a floating "
            "array was expected. Give `None` for parameters that are not to change."
        )


def check_backend(backend: str) -> None:
    """Raises if there is no such backend."""
    if backend not in _kernels.BACKENDS:
        raise ValueError(
            f"`backend` must be one of {', '.join(map(repr, _kernels.BACKENDS))}, but "
            f"{backend!r} was given."
        )


def check_groups(
    groups: Sequence[ParamGroup], rule: Rule, compression: Compression
) -> None:
    """Raises if groups set what the optimizer does not have."""
    for group in groups:
        if unknown := sorted(set(group.hyper) - set(rule.hyper)):
            raise ValueError(
                f"The group {group.where!r} sets {unknown}, but this optimizer has only "
                f"{sorted(rule.hyper)}."
            )
        if group.compression and group.compression.format != compression.format:
            raise ValueError(
                f"The group {group.where!r} has the format {group.compression.format!r}, "
                f"but the others have {compression.format!r}; there is one for all."
            )


def check_hyper(values: Mapping[str, Any]) -> None:
    """Raises for hyperparameters that are out of range or too coarse.

    What is traced or scheduled cannot be looked at.
    """
    for name, value in values.items():
        _check_value(name, value)


def _check_value(name: str, value: Any) -> None:
    dtype = getattr(value, "dtype", np.dtype(np.float32))
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        raise ValueError(
            f"`{name}` is {dtype}, in which 0.999 would be 1; f32 is needed. "
            "`optax.inject_hyperparams` gives hyperparameters the dtype of the "
            "parameters unless it is called with `hyperparam_dtype=jnp.float32`."
        )
    if not isinstance(value, int | float):
        return
    if name in ("b1", "b2", "momentum", "dampening"):
        fits, range_ = 0 <= value < 1 or (name == "dampening" and value == 1), "[0, 1)"
    elif name == "eps":
        fits, range_ = 0 < value < np.inf, "(0, ∞)"
    else:
        fits, range_ = 0 <= value < np.inf, "[0, ∞)"
    if not fits:
        raise ValueError(f"`{name}` must lie in {range_}, but {value!r} was given.")
