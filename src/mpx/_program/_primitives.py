"""What the primitives of JAX do: one table, and the sets of those with one answer."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

# Rule, place and reason, then lines of primitives, which may start with answers. A name stands
# in one row only; a test checks that. The place says how an operation takes part in regions:
#   inside: it is computed with its neighbours in one region, and again in the backward pass
#   stored: it runs by itself, on arrays as they are stored
#   alone: it runs by itself, on f32 numbers that were not rounded to be stored
# What is not listed runs alone, as it is written.
# The answers:
#   same: the result holds the same numbers, in another shape, order or place
#   moves: it holds the same numbers or some of them, possibly rounded
#   picks: it holds some of the numbers of the first operand
#   linear: it is linear in all operands together; nothing is kept for the backward pass
#       but indices and booleans
#   scales: it is linear in each operand
#   steps: it has no slope
#   pieces: it is linear between steps
#   reused: it uses one number several times, so that its transpose sums
#   sums: the result is a sum, or a product, of many numbers
#   bounded: 16 bits hold the result, whatever the operand is
#   new: the result is a new number, so that a literal need not be one of 16 bits
#   solves: it is linear algebra, which may be singular
_TABLE = """
low | alone | tensor cores multiply 16-bit numbers and add in f32
  dot_general conv_general_dilated ragged_dot ragged_dot_general
f32 | inside | small errors of the argument become large ones, or the range is wide
  exp exp2 expm1 log log1p log2 rsqrt sqrt cbrt reciprocal rem square sinh cosh tan asin
    acos atan atan2 asinh acosh atanh erf_inv erfc lgamma digamma polygamma integer_pow
    zeta igamma igammac igamma_grad_a regularized_incomplete_beta bessel_i0e bessel_i1e
  new: pow
f32 | inside | sums of many terms stand still in 16 bits
  linear sums: reduce_sum add_any
  sums: reduce_prod
f32 | alone | sums of many terms stand still in 16 bits
  select_and_gather_add random_gamma_grad
  linear sums: cumsum reduce_window_sum select_and_scatter_add
  sums: cumprod cumlogsumexp
f32 | inside | exact in any dtype; in f32 the shift of a softmax stays in f32
  reduce_max reduce_min
widest | inside | several operands must agree
  polynomial
  linear new: add sub
  scales new: mul div
  pieces: max min clamp
  linear: select_n concatenate stack pad dynamic_update_slice
  steps: eq ne lt le gt ge eq_to le_to lt_to
follow | inside | exact in any dtype
  floor ceil round
  linear: neg
  pieces: abs sign
  steps: is_finite
follow | inside | bounded and rounded once; a small distance from 1 is lost
  one_minus_square
  bounded: tanh logistic erf sin cos
follow | inside | moves numbers without changing them
  argmax argmin
  same linear: reshape transpose slice rev squeeze expand_dims copy
  same linear reused: broadcast_in_dim tile
  picks linear reused: gather
  moves linear: dynamic_slice copy_p
  picks linear: split unstack stop_gradient
original | inside | works on integers and booleans
  iota and or not xor shift_left shift_right_logical shift_right_arithmetic
follow | stored | moves numbers without changing them
  reduce_window_max reduce_window_min
  moves linear: name
  same linear: sharding_constraint reshard layout_constraint mesh_cast
  moves: optimization_barrier
  picks linear: device_put
follow | alone | moves numbers without changing them
  sort top_k cummax cummin debug_callback debug_print
follow | stored | communication in the dtype of the value
  all_to_all ppermute psum psum_invariant psum2 psend precv pmax pmin psum_scatter
    reduce_scatter unreduced_psum unreduced_reduce_scatter pbroadcast
    vary_unreduced_cast reduced_vary_cast
  picks: all_gather all_gather_invariant all_gather_reduced
  same linear: pvary pcast
original | alone | works on the bits or the format of a number
  bitcast_convert_type nextafter complex real imag conj
  moves: reduce_precision
original | alone | linear algebra and transforms have no 16-bit implementation
  lu_pivots_to_permutation fft
  solves: cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig
    eigh schur hessenberg tridiagonal tridiagonal_solve triangular_solve
    custom_linear_solve linear_solve
original | alone | carries a function that was traced at its own dtypes
  scatter-sub scatter-mul scatter-min scatter-max scatter_sub scatter_mul scatter_min
    scatter_max reduce reduce_window select_and_scatter reduce_and reduce_or reduce_xor
  linear: scatter
  linear sums: scatter-add scatter_add
original | alone | somebody's own kernel or host code
  pallas_call ffi_call pure_callback io_callback custom_partitioning composite
    triton_kernel_call tpu_custom_call dot_product_attention_fwd
    dot_product_attention_bwd dot_product_attention_fp8_fwd
    dot_product_attention_fp8_bwd scaled_matmul scaled_dot get swap addupdate ref_new
- | - | a cast is honoured
  moves linear: convert_element_type load store
  linear new: add_stored
"""


class Row(NamedTuple):
    """Primitives that run by one rule."""

    rule: str
    place: Literal["inside", "stored", "alone"]
    reason: str
    names: tuple[str, ...]
    answers: dict[str, frozenset[str]]  # By name


def _rows() -> Iterator[Row]:
    lines = _TABLE.replace("\n    ", " ").strip().splitlines()
    starts = [i for i, line in enumerate(lines) if line[0] != " "]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        answers: dict[str, frozenset[str]] = {}
        for line in lines[start + 1 : stop]:
            known, _, found = line.rpartition(":")
            answers |= dict.fromkeys(found.split(), frozenset(known.split()))
        rule, place, reason = lines[start].split(" | ")
        yield Row(rule, cast(Any, place), reason, (*answers,), answers)


_ALL = [*_rows()]
TABLE, CASTS = tuple(_ALL[:-1]), _ALL[-1].names[:3]
"""Without the casts and what `amp` adds itself, which have no rule."""
ROWS = {name: row for row in TABLE for name in row.names}
REASONS = {name: row.reason for name, row in ROWS.items()}


def that(*answers: str) -> frozenset[str]:
    """Returns the primitives of which one of these answers holds."""
    found = ((x, known) for row in _ALL for x, known in row.answers.items())
    return frozenset(x for x, known in found if not known.isdisjoint(answers))
