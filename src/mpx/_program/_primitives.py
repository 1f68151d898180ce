"""What the primitives of JAX do: one table, and the sets of those with one answer."""

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
reshape squeeze transpose expand_dims copy slice rev | same linear
broadcast_in_dim tile | same linear reused
pvary pcast sharding_constraint layout_constraint reshard mesh_cast | same linear
convert_element_type dynamic_slice copy_p name | moves linear
optimization_barrier reduce_precision | moves
gather | picks linear reused
split unstack stop_gradient device_put | picks linear
all_gather all_gather_invariant all_gather_reduced | picks
neg select_n concatenate stack pad dynamic_update_slice | linear
scatter triu tril | linear
add sub | linear new
add_any | linear sums
mul div | scales new
pow | new
reduce_sum cumsum scatter-add scatter_add reduce_window_sum | linear sums
select_and_scatter_add | linear sums
reduce_prod cumprod cumlogsumexp | sums
max min clamp abs sign | pieces
eq ne lt le gt ge is_finite eq_to le_to lt_to | steps
tanh logistic erf sin cos | bounded
cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig | solves
eigh schur hessenberg tridiagonal tridiagonal_solve triangular_solve | solves
custom_linear_solve linear_solve | solves
"""


ANSWERS = {
    name: frozenset(answers.split())
    for line in _TABLE.strip().splitlines()
    for found, answers in [line.split(" | ")]
    for name in found.split()
}
"""By primitive: the answers that hold of it."""


def that(*answers: str) -> frozenset[str]:
    """Returns the primitives of which one of these answers holds."""
    return frozenset(x for x, known in ANSWERS.items() if not known.isdisjoint(answers))
