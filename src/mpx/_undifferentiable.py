"""Refuses derivatives where JAX would compute wrong ones without a word."""

from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree


def undifferentiable(message: str) -> Callable[[PyTree], Any]:
    """Returns a function that returns a tree as it is.

    If that is differentiated, forward or in reverse, a `NotImplementedError` with this
    message is raised.
    """

    @jax.custom_jvp
    def same(tree: PyTree) -> Any:
        return tree

    @same.defjvp
    def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> NoReturn:
        del primals, tangents
        raise NotImplementedError(message)

    return same
