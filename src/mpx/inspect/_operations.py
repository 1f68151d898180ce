"""Which operations round, and what their operands say about their results."""

from mpx._jax._compat import is_transposed
from mpx._program._interpreter import Op
from mpx._program._queries import MATMULS, MOVES, names

# The results can be represented where the operands can.
EXACT = MOVES.union(
    names(
        "gather max min neg abs sign select_n concatenate pad clamp reduce_max reduce_min "
        "stop_gradient sort dynamic_update_slice argmax argmin split iota rev eq ne lt le "
        "gt ge is_finite reduce_window_max select_and_gather_add cummax cummin unstack"
    )
)
FOLLOWED = MOVES.union(names("gather split neg unstack"))
COMMON = frozenset(
    (
        *EXACT,
        *MATMULS,
        *names(
            "add sub mul div add_any exp log log1p expm1 tanh logistic erf sqrt rsqrt "
            "integer_pow pow reduce_sum square sin cos cumsum custom_jvp_call"
        ),
    )
)


def is_cotangent_of(op: Op) -> bool:
    """Returns whether the results of an operation belong to the backward pass."""
    return is_transposed(op.eqn) or any(fact.is_cotangent for fact in op.facts)


def sources_of(op: Op) -> tuple[int, ...]:
    """Returns the matmuls because of which an operation runs in 16 bits.

    In the backward pass it does if its forward operation did.
    """
    known = [fact for fact in op.facts if fact.owner >= 0]
    forward = [fact for fact in known if not fact.is_cotangent]
    return tuple(sorted({x for fact in forward or known for x in fact.sources}))


def floats_of(op: Op) -> list[int]:
    """Returns the positions of the floating operands."""
    wanted = ("float32", "bfloat16", "float16")
    return [i for i, x in enumerate(op.eqn.invars) if str(x.aval.dtype) in wanted]
