"""The bytes of parameters and optimizer states, by their formats."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpx._casting._cast import cast_tree
from mpx._optim import flash_adamw
from mpx.inspect._buffers import nbytes


class StateBytes(NamedTuple):
    """What parameters and the state of an optimizer occupy.

    Attributes:
        code: The optimizer, as code.
        params: The format of the parameters.
        bytes: The bytes of both together, master weights included.
    """

    code: str
    params: str
    bytes: int


def state_bytes(params: Mapping[str, Any]) -> tuple[StateBytes, ...]:
    """Returns the bytes of AdamW with its states in f32, bf16 and 8 bits.

    The optimizers initialise the shapes of the parameters. The gradient depends on none of
    these choices: a policy and a state can be chosen apart.

    Args:
        params: Arrays or their shapes, by name.
    """
    shapes = {k: jax.ShapeDtypeStruct(x.shape, jnp.float32) for k, x in params.items()}
    adamw, first = optax.adamw(1e-3), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)
    choices = [
        ("optax.adamw(...)", "f32", adamw),
        ('optax.adamw(..., mu_dtype="bfloat16")', "f32", first),
        ("mpx.optim.flash_adamw(...)", "f32", flash_adamw(1e-3)),
        ("mpx.optim.flash_adamw(...)", "bf16", flash_adamw(1e-3)),
    ]
    found = []
    for code, dtype, optimizer in choices:
        held = cast_tree(shapes, jnp.bfloat16) if dtype == "bf16" else shapes
        state = jax.eval_shape(optimizer.init, held)
        total = sum(map(nbytes, (*held.values(), *jax.tree.leaves(state))))
        found.append(StateBytes(code, dtype, total))
    return tuple(found)
