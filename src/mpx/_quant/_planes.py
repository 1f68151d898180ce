"""Several arrays of one shape in a single array, whose first axis counts words of equal size.

The host pays for every array in every call of a jitted step, so a state in fewer arrays is
dispatched faster. Planes along the first axis keep each kind of number contiguous, and the
other axes are sharded like those of a parameter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._quant._rounding import bits, from_bits

Dtypes = Sequence[np.dtype]
_UNSIGNED = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


class Packed(NamedTuple):
    """The state of one parameter, in at most two arrays.

    Attributes:
        codes: The numbers per element: the code of each moment, or the moment itself if it
            is not quantised, then the correction. An array `(planes, *shape)`; if all of
            them are f32, a tuple with an array of the parameter's shape for each.
        scales: The numbers per group: the scale of each moment, an array
            `(planes, *shape[:-1], groups)`; `None` if no moment is quantised.
    """

    codes: PyTree
    scales: PyTree


def word_of(dtypes: Dtypes) -> np.dtype:
    """Returns the dtype of the words: the common dtype, or unsigned of the least width."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    return _UNSIGNED[min((dtype.itemsize for dtype in dtypes), default=1)]


def count_words(dtypes: Dtypes) -> int:
    """Returns how many words numbers of these dtypes take together."""
    return sum(dtype.itemsize for dtype in dtypes) // word_of(dtypes).itemsize


def split(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Returns the words of arrays, one after the other, high words first."""
    word = word_of([np.dtype(x.dtype) for x in arrays])
    return tuple(part for x in arrays for part in words_of(x, word))


def words_of(x: Array, word: np.dtype) -> list[Array]:
    """Returns the words of an array, high ones first."""
    if x.dtype == word:
        return [x]
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    if x.dtype.itemsize == word.itemsize:
        return [lax.bitcast_convert_type(x, word) if is_float else x.astype(word)]
    pattern = bits(x) if is_float else x.astype(jnp.int32)
    width = 8 * word.itemsize
    return [
        ((pattern >> shift) & (2**width - 1)).astype(word)
        for shift in reversed(range(0, 8 * x.dtype.itemsize, width))
    ]


def join(words: Sequence[Array], dtypes: Dtypes) -> tuple[Array, ...]:
    """Returns the arrays of these dtypes whose words `split` gave."""
    rest, size = iter(words), word_of(dtypes).itemsize
    return tuple(
        _joined([next(rest) for _ in range(dtype.itemsize // size)], dtype)
        for dtype in dtypes
    )


def _joined(words: Sequence[Array], dtype: np.dtype) -> Array:
    first = words[0]
    if first.dtype == dtype:
        return first
    is_float = jnp.issubdtype(dtype, jnp.floating)
    if len(words) == 1:
        return (
            lax.bitcast_convert_type(first, dtype) if is_float else first.astype(dtype)
        )
    width = np.uint32(8 * first.dtype.itemsize)
    total = first.astype(jnp.uint32)
    for word in words[1:]:
        total = (total << width) | word.astype(jnp.uint32)
    pattern = lax.bitcast_convert_type(total, jnp.int32)
    return from_bits(pattern) if is_float else pattern.astype(dtype)
