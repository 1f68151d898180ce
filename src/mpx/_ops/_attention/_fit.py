"""Padding operands to the sizes that cuDNN takes.

Heads have a multiple of 8 numbers, and lengths are even. Zeros that are added to a head change
no score; keys that are added are masked.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._ops._attention._cudnn import Attention
from mpx._ops._attention._primitive import bind_attention

_MASKED = -1e30
Shape = tuple[int, ...]


class Fit(NamedTuple):
    """How operands are padded.

    Attributes:
        rows: The number of queries after padding.
        keys: The number of keys.
        head: The numbers of a head.
        lengths: Whether the kernel is told the number of keys before padding.
    """

    rows: int
    keys: int
    head: int
    lengths: bool

    @classmethod
    def of(cls, query: Shape, value: Shape, spec: Attention) -> "Fit":
        """Returns the padding of operands of these shapes."""
        rows, keys = query[1], value[1]
        odd = bool(keys % 2)
        # Causal queries see no later keys, and a bias or mask is padded itself.
        hidden = bool(spec.extras) or (spec.is_causal and rows <= keys)
        head = max(query[-1], value[-1])
        return cls(
            rows + rows % 2, keys + odd, -(-head // 8) * 8, lengths=odd and not hidden
        )

    def spec(self, spec: Attention) -> Attention:
        """Returns the call on padded operands."""
        if not self.lengths:
            return spec
        return spec._replace(extras=(*spec.extras, "kv_seqlen"))


def padded_call(
    shapes: list[Shape], spec: Attention, dtype: np.dtype
) -> tuple[Attention, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the call on padded operands, and their types.

    Args:
        shapes: Those of queries, keys and values: batch, length, heads, size.
        spec: The call.
        dtype: The dtype of the three.
    """
    query, _, value = shapes
    fit = Fit.of(query, value, spec)
    spec = fit.spec(spec)
    lengths = fit.rows, fit.keys, fit.keys
    types = [
        jax.ShapeDtypeStruct((x[0], length, x[2], fit.head), dtype)
        for x, length in zip(shapes, lengths, strict=True)
    ]
    full = (1, 1, fit.rows, fit.keys)
    kinds = {
        "bias": jax.ShapeDtypeStruct(full, jnp.float32),
        "mask": jax.ShapeDtypeStruct(full, jnp.bool_),
        "kv_seqlen": jax.ShapeDtypeStruct(query[:1], jnp.int32),
    }
    return spec, (*types, *(kinds[name] for name in spec.extras))


def fitted_attention(
    query: Array, key: Array, value: Array, extras: Mapping[str, Array], spec: Attention
) -> Array:
    """Runs attention on operands that are padded where the kernel needs it.

    Args:
        query: The queries (batch, length, heads, size).
        key: The keys.
        value: The values; their heads may have another size.
        extras: The bias and the mask, if the call has them.
        spec: The call.
    """
    rows, keys, size = query.shape[1], key.shape[1], value.shape[-1]
    fit = Fit.of(query.shape, value.shape, spec)
    query = _padded(query, {1: fit.rows, 3: fit.head})
    key, value = (_padded(x, {1: fit.keys, 3: fit.head}) for x in (key, value))
    more = []
    for name in spec.extras:
        x, fill = extras[name], _MASKED if name == "bias" else False
        if name == spec.extras[0] and fit.keys != keys and x.shape[3] == 1:
            x = jnp.broadcast_to(x, (*x.shape[:3], keys))  # it hides the new keys
        x = _padded(x, {3: fit.keys} if x.shape[3] == keys else {}, fill)
        more.append(_padded(x, {2: fit.rows} if x.shape[2] == rows else {}))
    if fit.lengths:
        more.append(jnp.full(query.shape[:1], keys, jnp.int32))
    out, _ = bind_attention([query, key, value, *more], fit.spec(spec))
    return out[:, :rows, :, :size]


def _padded(x: Array, sizes: dict[int, int], fill: float = 0.0) -> Array:
    """Returns an array that is filled up to some sizes."""
    missing = [(0, sizes.get(i, n) - n) for i, n in enumerate(x.shape)]
    if not any(n for _, n in missing):
        return x
    return jnp.pad(x, missing, constant_values=fill)
