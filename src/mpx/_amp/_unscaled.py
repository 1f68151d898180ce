"""Warns where f16 gradients are taken without a loss scale."""

import pathlib
import sys
import warnings
from types import FrameType
from typing import Any

import equinox as eqx
import jax

from mpx._half import in_gradient_function
from mpx._tree import is_array, is_floating

_MESSAGE = (
    "A function under `amp` with `compute_dtype` f16 is differentiated outside of mpx's "
    "gradient functions: without a loss scale, gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    'use `compute_dtype="bf16"`, which needs no scale. If you scale the loss yourself, '
    "filter this warning."
)
_LIBRARIES = tuple(
    str(pathlib.Path(path).parent)
    for path in (jax.__file__, eqx.__file__, pathlib.Path(__file__).parent)
)


def warn_if_unscaled(tree: Any) -> Any:
    """Returns a tree of results as it is; differentiating them may warn.

    The derivative rule runs when JAX takes the derivative, also that of a jitted
    function, and not before: a function that is only called has no rule to run.
    """
    return jax.tree.map(
        lambda x: _watched(x) if is_array(x) and is_floating(x) else x, tree
    )


@jax.custom_jvp
def _watched(x: Any) -> Any:
    return x


@_watched.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not in_gradient_function():
        warnings.warn(_MESSAGE, UserWarning, stacklevel=_depth_of_user())
    return _watched(*primals), tangents[0]


def _depth_of_user() -> int:
    """Returns the `stacklevel` of the code that called JAX or Equinox."""
    frame: FrameType | None = sys._getframe(1)
    depth = 1
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, depth = frame.f_back, depth + 1
    return depth
