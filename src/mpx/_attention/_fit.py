"""Padding operands to the sizes that cuDNN takes.

Heads have a multiple of 8 numbers, and with a bias or mask the lengths are even. Zeros that
are added to a head change no score; keys that are added are masked.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._attention._cudnn import Attention
from mpx._attention._primitive import bind_attention

_MASKED = -1e30
Shape = tuple[int, int, int, int]


class Sizes(NamedTuple):
    """The sizes of padded operands: queries, keys, and numbers of a head."""

    rows: int
    keys: int
    head: int


def padded_sizes(query: Shape, value: Shape, head: int, spec: Attention) -> Sizes:
    """Returns the sizes that the kernel takes, for operands with `head` numbers a head."""
    rows, keys = query[1], value[1]
    if {"bias", "mask"} & {*spec.extras}:
        rows, keys = rows + rows % 2, keys + keys % 2
    return Sizes(rows, keys, -(-max(head, value[-1]) // 8) * 8)


def padded_types(
    shapes: list[Shape], spec: Attention, dtype: np.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the operands after padding; those of extras as wide as may be."""
    query, key, value = shapes
    sizes = padded_sizes(query, value, query[-1], spec)
    types = [
        jax.ShapeDtypeStruct((batch, length, heads, sizes.head), dtype)
        for (batch, _, heads, _), length in zip(
            (query, key, value), (sizes.rows, sizes.keys, sizes.keys), strict=True
        )
    ]
    shape = (1, 1, sizes.rows, sizes.keys)
    kinds = {"bias": jnp.float32, "mask": jnp.bool_}
    types += [jax.ShapeDtypeStruct(shape, kinds[name]) for name in spec.extras]
    return tuple(types)


def fitted_attention(
    query: Array, key: Array, value: Array, extras: Mapping[str, Array], spec: Attention
) -> Array:
    """Runs attention on operands that are padded where the kernel needs it.

    Args:
        query: The queries (batch, length, heads, size).
        key: The keys.
        value: The values; their heads may have another size.
        extras: The bias and the mask, if the specification has them.
        spec: The call.
    """
    rows, size = query.shape[1], value.shape[-1]
    keys = key.shape[1]
    sizes = padded_sizes(query.shape, value.shape, query.shape[-1], spec)
    query = _padded(query, {1: sizes.rows, 3: sizes.head})
    key, value = (_padded(x, {1: sizes.keys, 3: sizes.head}) for x in (key, value))
    more = []
    for name in spec.extras:
        x, fill = extras[name], _MASKED if name == "bias" else False
        # One of them hides the keys that were added.
        is_first = name == spec.extras[0]
        if is_first and sizes.keys != keys and x.shape[3] == 1:
            x = jnp.broadcast_to(x, (*x.shape[:3], keys))
        x = _padded(x, {3: sizes.keys} if x.shape[3] == keys else {}, fill)
        more.append(_padded(x, {2: sizes.rows} if x.shape[2] == rows else {}))
    out, _ = bind_attention([query, key, value, *more], spec)
    return (
        out[:, :rows, :, :size]
        if out.shape[1:] != (rows, *out.shape[2:3], size)
        else out
    )


def _padded(x: Array, sizes: dict[int, int], fill: float = 0.0) -> Array:
    """Returns an array that is filled up to some sizes."""
    missing = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
    if not any(n for _, n in missing):
        return x
    return jnp.pad(x, missing, constant_values=fill)
