"""The error that 8-bit residuals add to each gradient."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mpx._amp._transform import under_amp
from mpx.inspect._program import amp_layer, gradient, program


def residual_errors(
    func: Callable[..., PyTree], /, *args: PyTree, **kwargs: PyTree
) -> dict[str, float]:
    """Returns how much 8-bit residuals change the gradient of each parameter.

    The gradient of the loss is computed twice on the given arrays: by the function, and by
    `amp` with the same options but `residuals`. The result is, by parameter, the norm of the
    difference over the norm of the second.

    Args:
        func: A function under `mpx.amp(..., residuals=...)` that returns a scalar loss
            first.
        *args: Its positional arguments; the first one holds the parameters.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: If the function is not under `amp(residuals=...)`, or its first result
            is no scalar loss.

    Examples:
        >>> import jax.numpy as jnp
        >>> import mpx
        >>> @mpx.amp(residuals="int8")
        ... def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
        >>> x = jnp.linspace(-1, 1, 128 * 64).reshape(128, 64)
        >>> residual_errors(loss, {"w": jnp.eye(64)}, x)["params/w"] < 0.01
        True
    """
    inner, autocast = amp_layer(func)
    if getattr(autocast, "residuals", None) is None:
        raise TypeError(
            "`residual_errors` needs a loss function under 8-bit residuals. Pass "
            '`mpx.amp(loss_fn, residuals="int8")`, with the arguments of `loss_fn`.'
        )
    plain = under_amp(inner, dataclasses.replace(autocast, residuals=None))
    coded, exact = (gradient(program(f, args, kwargs)) for f in (func, plain))
    grads = [jax.jit(x.__call__)(*x.arrays)[1:] for x in (coded, exact)]
    norm = lambda x: float(jnp.linalg.norm(jnp.ravel(x)))  # noqa: E731
    errors = {}
    for i, *pair in zip(coded.params, *grads, strict=True):
        found, wanted = (x.astype(jnp.float32) for x in pair)
        errors[str(coded.names[i])] = norm(found - wanted) / (norm(wanted) or 1.0)
    return errors
