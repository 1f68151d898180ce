"""Weights in 8 bits, made before the loop over microbatches that multiplies with them.

The visitor runs inside that loop. So a call is traced once before it, to find which
parameters become operands of 8-bit matmuls and by which operations; these are applied to the
parameters outside, layer by layer, and the result is given to the calls in the loop.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from mpx._fp8._dot import quantize_operand
from mpx._fp8._follow import SLICE
from mpx._fp8._maxima import automatic_devices, maxima_of
from mpx._fp8._operands import Fp8Tensor, MatmulSpec
from mpx._jax._compat import bind
from mpx._wire._sums import largest_of_shards


class Codes(NamedTuple):
    """A weight in 8 bits, and its largest magnitude; each slice of a scan has its own."""

    tensor: Fp8Tensor
    largest: Array


class More(NamedTuple):
    """Further inputs of a body, by the keys of matmuls: delayed scales and codes."""

    scales: dict[str, tuple[Any, Any]]
    codes: dict[str, Codes]


class Encoding(NamedTuple):
    """How a parameter becomes the operand of an 8-bit matmul."""

    param: str
    chain: tuple[Any, ...]
    spec: MatmulSpec

    def apply(
        self, leaf: Array, seen: Array | None, shape: tuple[int, ...] = ()
    ) -> Codes:
        """Returns the operand, for a parameter and the maxima seen in earlier steps.

        Its largest magnitude has this shape: see `maxima_of`.
        """
        return self._apply(shape, self.chain, leaf, seen)

    def _apply(
        self,
        shape: tuple[int, ...],
        chain: tuple[Any, ...],
        x: Array,
        seen: Array | None,
    ) -> Codes:
        count = chain.index(SLICE) if SLICE in chain else len(chain)
        for step in chain[:count]:
            (x,) = bind(step, [x])
        if count < len(chain):
            rest = chain[count + 1 :]
            return lax.map(lambda args: self._apply(shape, rest, *args), (x, seen))
        side = self.spec.weight_side
        tensor = quantize_operand(self.spec, side, lax.stop_gradient(x), seen)
        return Codes(tensor, maxima_of(x, shape))


def encode_all(
    encodings: Mapping[str, Encoding],
    arrays: Mapping[str, Any],
    scales: Mapping[str, tuple[Any, Any]] | None,
) -> dict[str, Codes]:
    """Returns the operands of matmuls by their keys.

    Args:
        encodings: How each is made.
        arrays: Parameters by name. One that is not here is left out.
        scales: The delayed scales by key.
    """
    devices = 1 if scales is None else automatic_devices(list(arrays.values()))
    shape = () if devices == 1 else (devices,)
    made = {
        key: found.apply(
            arrays[found.param], (scales or {}).get(key, (None, None))[0], shape
        )
        for key, found in encodings.items()
        if found.param in arrays
    }
    if devices == 1:
        return made
    # One reduction for all weights.
    apart = {key: jnp.moveaxis(codes.largest, -1, 0) for key, codes in made.items()}
    largest = largest_of_shards(apart)
    return {key: codes._replace(largest=largest[key]) for key, codes in made.items()}
