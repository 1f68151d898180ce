"""A Triton kernel that counts the exponents of an array in one pass.

Each program keeps the counts of its values in registers, four bins packed into the bytes
of an int32, so that one comparison and one addition serve four bins. At its end it adds
them to those of the others: one atomic addition a bin, not one a value.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from mpx._compat import struct_like, varying_like
from mpx._inspect._bins import BINS, ZERO, bin_of
from mpx._private import private

WORDS = -(-BINS // 4)
WIDTH = 1 << (BINS - 1).bit_length()


class Tuning(NamedTuple):
    """How values are cut into programs.

    Attributes:
        lanes: Values that a program loads at once, a power of two.
        turns: How often it does so, at most 255.
        warps: Groups of 32 threads in a program.
    """

    lanes: int = 128
    turns: int = 16
    warps: int = 1

    @property
    def chunk(self) -> int:
        """The number of values of a program."""
        return self.lanes * self.turns


TUNING = Tuning()


def fits_kernel(x: Array) -> bool:
    """Returns whether the kernel can count an array: it indexes with 31 bits."""
    kinds = (jnp.float32, jnp.bfloat16, jnp.float16)
    return x.size < 2**31 and any(x.dtype == kind for kind in kinds)


def count_local(
    leaves: Sequence[Array], tuning: Tuning = TUNING, *, interpret: bool = False
) -> tuple[Array, Array]:
    """Returns the counts of arrays of one device, int32[leaves, BINS], and squares, f32."""
    programs = [-(-x.size // tuning.chunk) for x in leaves]
    like = struct_like(leaves[0], (len(leaves), WIDTH)).update(dtype=jnp.int32)
    counts = varying_like(jnp.zeros(like.shape, like.dtype), like)
    like = like.update(shape=(len(leaves), max(programs)), dtype=jnp.float32)
    squares = varying_like(jnp.zeros(like.shape, like.dtype), like)
    for row, x in enumerate(leaves):
        # An operand, not a constant of the kernel: leaves of one size share a program.
        index = jnp.full((1,), row, jnp.int32)
        totals = counts, squares
        counts, squares = _launch(
            index, x.reshape(-1), totals, tuning=tuning, interpret=interpret
        )
    # Programs count as zeros what lies behind the end of their array.
    behind = [p * tuning.chunk - x.size for p, x in zip(programs, leaves, strict=True)]
    counts = counts.at[:, ZERO].add(-jnp.stack([jnp.int32(x) for x in behind]))
    return counts[:, :BINS], jnp.sum(squares, axis=1)


# Under jit, so that leaves of equal sizes are traced and lowered once: each takes 0.3 s.
@functools.partial(jax.jit, static_argnames=("tuning", "interpret"))
def _launch(
    row: Array, x: Array, totals: Sequence[Array], *, tuning: Tuning, interpret: bool
) -> Any:
    pl = private("kernels")
    types = [struct_like(total, total.shape) for total in totals]
    return pl.pallas_call(
        functools.partial(_kernel, size=x.size, tuning=tuning),
        out_shape=types,
        grid=(-(-x.size // tuning.chunk),),
        in_specs=[pl.no_block_spec] * 4,
        out_specs=[pl.no_block_spec] * 2,
        input_output_aliases={2: 0, 3: 1},
        compiler_params=pl.CompilerParams(num_warps=tuning.warps, num_stages=1),
        interpret=interpret,
        name="mpx_count_exponents",
    )(row, x, *totals)


def _kernel(*refs: Any, size: int, tuning: Tuning) -> None:
    row_ref, x_ref, _, _, counts_ref, squares_ref = refs
    pl = private("kernels")
    lanes, program = tuning.lanes, pl.program_id(0)
    lane = lax.iota(jnp.int32, lanes)

    def turn(i: Array, carry: Any) -> Any:
        words, squares = carry
        start = program * tuning.chunk + i * lanes
        part = x_ref.at[pl.ds(start, lanes)]
        if size % tuning.chunk:
            zero = jnp.zeros((), x_ref.dtype)
            x = pl.load(part, mask=start + lane < size, other=zero)
        else:
            x = pl.load(part)
        index = bin_of(x)
        place, one = index >> 2, jnp.left_shift(1, (index & 3) * 8)
        words = tuple(
            word + jnp.where(place == k, one, 0) for k, word in enumerate(words)
        )
        wide = x.astype(jnp.float32)
        return words, squares + wide * wide

    zeros = jnp.zeros(lanes, jnp.int32)
    start = (zeros,) * WORDS, jnp.zeros(lanes, jnp.float32)
    words, squares = lax.fori_loop(0, tuning.turns, turn, start)
    counts, bins = jnp.zeros(WIDTH, jnp.int32), lax.iota(jnp.int32, WIDTH)
    for k, word in enumerate(words):
        for odd in (0, 1):
            # Two counts of 16 bits each: a program has fewer than 2¹⁵ values.
            both = jnp.sum((word >> (8 * odd)) & 0x00FF00FF)
            counts = jnp.where(bins == 4 * k + odd, both & 0xFFFF, counts)
            counts = jnp.where(bins == 4 * k + odd + 2, both >> 16, counts)
    row = row_ref[0]
    pl.atomic_add(counts_ref, (row, pl.ds(0, WIDTH)), counts)
    pl.store(squares_ref.at[row, program], jnp.sum(squares))
