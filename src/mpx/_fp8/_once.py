"""Gradients in fp8 are not differentiated again: that raises.

An 8-bit code is a constant to JAX, so the second derivatives would be 0; and those of MX
blocks would be rounded with scales that were made for other numbers.
"""

from typing import Any, NoReturn

import jax
from jaxtyping import PyTree


@jax.custom_jvp
def differentiable_once(tree: PyTree) -> Any:
    """Returns what the rules of a derivative get or return, as it is.

    JAX evaluates these rules on values: differentiating them is a second derivative.

    Raises:
        NotImplementedError: If it is differentiated, forward or in reverse.
    """
    return tree


@differentiable_once.defjvp
def _refuse(primals: tuple[PyTree], tangents: tuple[PyTree]) -> NoReturn:
    del primals, tangents
    raise NotImplementedError(
        "fp8 has no second derivatives; take them of the function without fp8. If the "
        "gradient is a constant here, pass its arguments through `lax.stop_gradient`."
    )
