"""What a state says about itself: of which rule it is, and how its arrays are to be read.

It is the name of a scalar in the state, and with that a part of the tree's structure. So
a checkpointer refuses to restore a state into another one, where it would cast int8
corrections to int16 without a word; and a step compares it while it is traced.
"""

import zlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from mpx._sharding import zero_beside
from mpx._tree import dtype_of

Pairs = Iterable[tuple[Any, Any]]
"""Each parameter with its correction, or with `None`."""
_INT8 = np.dtype(np.int8)


def make_layout(kind: str, format: str, pairs: Pairs) -> PyTree:
    """Returns a scalar under the name of a layout.

    Args:
        kind: The kind of the rule.
        format: The format of the state.
        pairs: The parameters and their corrections.

    Returns:
        A dict of one scalar. If there are no parameters, as for the placeholder of
        `optax.tree_map_params`, only the scalar.
    """
    pairs = list(pairs)
    zero = zero_beside((param for param, _ in pairs), jnp.int8)
    return {_name(kind, format, pairs): zero} if pairs else zero


def layout_name(layout: PyTree) -> str | None:
    """Returns the name of a layout; `None` of a state without parameters."""
    return next(iter(layout)) if isinstance(layout, dict) and layout else None


def check_layout(layout: PyTree, pairs: Pairs) -> None:
    """Raises if parameters or corrections are not those that the layout names."""
    name = layout_name(layout)
    # Corrections beside f32 parameters are refused elsewhere.
    pairs = [pair for pair in pairs if not is_missing(pair[1])]
    if name is None or any(dtype_of(param) == jnp.float32 for param, _ in pairs):
        return
    kind, format, *_ = name.split("-")
    found = _name(kind, format, pairs)
    if found != name:
        raise ValueError(
            f"The state was made as `{name}`, but it holds, or stands beside parameters "
            f"of, `{found}`: how many master weights have 24 and 32 bits, and a checksum "
            "of the dtypes of parameters and corrections. They were cast, so that the "
            "corrections mean something else. Restore with a template from "
            "`init(params)` of the optimizer that saved it. To change dtypes or "
            "`master_bits` take `master_params`, then `init` and `from_master`."
        )


def _name(kind: str, format: str, pairs: Pairs) -> str:
    """Names a layout, in letters that are safe in the name of a file."""
    dtypes = [
        (np.dtype(dtype_of(param)), np.dtype(dtype_of(correction)))
        for param, correction in pairs
        if not is_missing(correction)
    ]
    small = sum(correction == _INT8 for _, correction in dtypes)
    text = " ".join(f"{param}:{correction}" for param, correction in dtypes)
    checksum = zlib.crc32(text.encode())
    return f"{kind}-{format}-{small}x24-{len(dtypes) - small}x32-{checksum:08x}"


def is_missing(correction: Any) -> bool:
    """Whether a state has no correction for a parameter, or `optax.masked` no state."""
    return correction is None or isinstance(correction, optax.MaskedNode)
