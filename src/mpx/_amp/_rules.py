"""The rule table: in which precision each primitive runs, and why.

This is data. The interpreter looks a primitive up here by name; what is not listed runs
unchanged at its own dtypes, and the report says so.
"""

import enum

from mpx._program import HANDLERS
from mpx._program._queries import ATTENTION, CROSS_ENTROPY, names
from mpx._program._queries import MATMULS as MATMULS
from mpx._program._queries import SHAPE_ONLY as SHAPE_ONLY


class Rule(enum.StrEnum):
    """In which precision an equation runs.

    Only values that the traced function holds in f32 are ever changed; f64, complex
    numbers, integers, PRNG keys and explicit 16-bit dtypes stay as written.
    """

    LOW = "low"
    """Operands are cast to the compute dtype and so is the result."""
    F32 = "f32"
    """Operands are cast to f32; the result is f32."""
    WIDEST = "widest"
    """Operands are cast to the widest among them. Literals, and biases and scales that
    are broadcast from an argument, follow the others."""
    FOLLOW = "follow"
    """Runs in whatever dtype its operand has."""
    ORIGINAL = "original"
    """Operands are cast back to the dtypes of the traced function."""
    TF32 = "tf32"
    """A matmul of f32 operands, multiplied in TF32 where the hardware has it."""
    BF16_F32 = "bf16_f32"
    """A matmul of f32 operands, multiplied in bf16 and summed in f32."""
    TRUE_F32 = "true_f32"
    """A matmul multiplied in full f32; GPUs from Ampere on use TF32 otherwise."""


# (rule, reason, primitives). A name stands in one line only; a test checks that.
TABLE: tuple[tuple[Rule, str, tuple[str, ...]], ...] = (
    (
        Rule.LOW,
        "tensor cores multiply 16-bit numbers and add in f32",
        MATMULS,
    ),
    (
        Rule.F32,
        "small errors of the argument become large ones, or the range is wide",
        names(
            "exp exp2 expm1 log log1p log2 pow rsqrt sqrt cbrt reciprocal rem square "
            "sinh cosh tan asin acos atan atan2 asinh acosh atanh erf_inv erfc lgamma "
            "digamma polygamma zeta igamma igammac igamma_grad_a "
            "regularized_incomplete_beta bessel_i0e bessel_i1e random_gamma_grad"
        ),
    ),
    (
        Rule.F32,
        "sums of many terms stand still in 16 bits",
        names(
            "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum "
            "add_any select_and_scatter_add select_and_gather_add"
        ),
    ),
    (
        Rule.F32,
        "exact in any dtype; in f32 the shift of a softmax stays in f32",
        names("reduce_max reduce_min"),
    ),
    (
        Rule.WIDEST,
        "several operands must agree",
        names(
            "add sub mul div max min select_n clamp concatenate stack pad "
            "dynamic_update_slice eq ne lt le gt ge eq_to le_to lt_to polynomial"
        ),
    ),
    (
        Rule.FOLLOW,
        "exact in any dtype",
        names("neg abs sign floor ceil round is_finite"),
    ),
    (
        Rule.FOLLOW,
        "bounded and rounded once; a small distance from 1 is lost",
        names("tanh logistic erf sin cos one_minus_square"),
    ),
    (
        Rule.FOLLOW,
        "moves numbers without changing them",
        names(
            "reshape transpose broadcast_in_dim slice gather dynamic_slice rev squeeze "
            "expand_dims split unstack tile copy copy_p argmax argmin sort top_k cummax "
            "cummin reduce_window_max reduce_window_min stop_gradient name "
            "sharding_constraint reshard mesh_cast optimization_barrier device_put "
            "debug_callback debug_print"
        ),
    ),
    (
        Rule.FOLLOW,
        "communication in the dtype of the value",
        names(
            "all_gather all_gather_invariant all_gather_reduced all_to_all ppermute "
            "psum psum_invariant psum2 psend precv pmax pmin psum_scatter "
            "reduce_scatter unreduced_psum unreduced_reduce_scatter pvary pcast "
            "pbroadcast vary_unreduced_cast reduced_vary_cast"
        ),
    ),
    (
        Rule.ORIGINAL,
        "works on the bits or the format of a number",
        names("bitcast_convert_type nextafter reduce_precision complex real imag conj"),
    ),
    (
        Rule.ORIGINAL,
        "linear algebra and transforms have no 16-bit implementation",
        names(
            "cholesky cholesky_update lu lu_pivots_to_permutation qr geqrf geqp3 "
            "householder_product ormqr svd eig eigh schur hessenberg tridiagonal "
            "tridiagonal_solve triangular_solve fft custom_linear_solve linear_solve"
        ),
    ),
    (
        Rule.ORIGINAL,
        "carries a function that was traced at its own dtypes",
        names(
            "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max "
            "scatter_add scatter_sub scatter_mul scatter_min scatter_max reduce "
            "reduce_window select_and_scatter reduce_and reduce_or reduce_xor"
        ),
    ),
    (
        Rule.ORIGINAL,
        "somebody's own kernel or host code",
        names(
            "pallas_call ffi_call pure_callback io_callback custom_vmap_call "
            "custom_partitioning composite triton_kernel_call tpu_custom_call "
            "dot_product_attention_fwd dot_product_attention_bwd "
            "dot_product_attention_fp8_fwd dot_product_attention_fp8_bwd "
            "scaled_matmul scaled_dot get swap addupdate ref_new"
        ),
    ),
)

PRIMITIVES: dict[str, Rule] = {name: rule for rule, _, found in TABLE for name in found}
REASONS: dict[str, str] = {name: reason for _, reason, found in TABLE for name in found}
UNKNOWN = "not in the rule table"

# They hold operations that have rules of their own, or are casts, which are honoured.
WITHOUT_RULES = frozenset(
    {*HANDLERS, *ATTENTION, *CROSS_ENTROPY, "convert_element_type"}
)

# Operations that broadcast operands of equal rank, and scalars, by themselves.
BROADCASTING = frozenset(names("add sub mul div max min select_n clamp polynomial"))
# Operations that use one number of their operand several times, or may: their transposes
# sum, which must be in f32.
SUMMED = frozenset(
    names(
        "broadcast_in_dim gather tile reduce_window_max reduce_window_min cummax cummin"
    )
)
# Linear in all operands together: nothing is kept for the backward pass but booleans.
LINEAR = frozenset(names("add sub concatenate stack pad select_n dynamic_update_slice"))


def rule_for(name: str, params: dict, compute_is_f16: bool) -> Rule:
    """Returns the rule of a primitive under the default policy."""
    if name == "integer_pow":
        # x² feeds the statistics of norms and 1/xⁿ has a wide range; x³ is gelu's.
        power = params["y"]
        return Rule.F32 if power == 2 or power < 0 or compute_is_f16 else Rule.FOLLOW
    return PRIMITIVES.get(name, Rule.ORIGINAL)
