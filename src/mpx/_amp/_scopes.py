"""Marking regions and values for autocast: `amp_stop` and `amp_low`."""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from mpx._casting._keep import STOP_SCOPE
from mpx._jax._tree import is_array, is_floating

LOW_NAME = "mpx:low"


def amp_stop(func: Callable[..., Any] | None = None) -> Any:
    """Keeps autocast out of a region: operations run as they are written.

    Args:
        func: A function to keep out of. Leave it out to get a context manager.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import amp
        >>> @amp
        ... def f(x):
        ...     with amp_stop():
        ...         return x @ x
        >>> float(f(jnp.full((1, 1), 1.001))[0, 0])
        1.0020010471343994
    """
    scope = jax.named_scope(STOP_SCOPE)
    return scope if func is None else scope(func)


def amp_low(x: PyTree) -> PyTree:
    """Marks values as fit for the compute dtype, where `amp` would keep f32.

    Outside `amp` it changes nothing. It is meant for a residual stream that starts in
    f32, such as the sum of embeddings.

    Args:
        x: An array or a pytree of them.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx import amp
        >>> f = lambda x: amp_low(x) + 0.0
        >>> float(f(jnp.float32(1.001))), float(amp(f)(jnp.float32(1.001)))
        (1.0010000467300415, 1.0)
    """
    return jax.tree.map(
        lambda leaf: (
            checkpoint_name(leaf, LOW_NAME)
            if is_array(leaf) and is_floating(leaf)
            else leaf
        ),
        x,
    )
