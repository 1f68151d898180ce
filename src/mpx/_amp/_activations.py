"""Activations that are jitted functions, such as `jax.nn.gelu`.

The backward pass of gelu needs its operand, its tanh or erf, and its result: three arrays
that are kept. Here its 16-bit operand is kept, and the rest is computed again. Inside it
computes in f32, where a power that overflows f16 does not.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._amp._facts import F32, Origin, Settings, cast, is_eligible, is_low
from mpx._amp._rules import Rule, rule_for
from mpx._jax._compat import eval_jaxpr, open_jaxpr
from mpx._program._interpreter import Jaxpr, Op, Outcome
from mpx._program._queries import Equation, Position, leaves, names, walk_inside

_AGAIN = "computed again in the backward pass, which keeps its operand only"
_IN_F32 = "in f32, and again in the backward pass"
# What XLA holds too expensive to compute a second time by itself.
_EXPENSIVE = frozenset(names("tanh erf erfc log1p expm1 atan cbrt"))
_LINEAR = frozenset(
    names(
        "neg abs copy reshape squeeze expand_dims transpose broadcast_in_dim "
        "stop_gradient convert_element_type"
    )
)
_POINTWISE = (_EXPENSIVE | _LINEAR).union(
    names("logistic sin cos integer_pow exp log sqrt rsqrt mul div add sub max min")
)
_FLOATS = frozenset(names("float32 bfloat16 float16"))


def decide_activation(amp: Settings, op: Op) -> tuple[Rule, str] | None:
    """Returns the rule of a jitted activation of a 16-bit value; `None` if it is none.

    There are none under rules that change the rule of an operation.
    """
    eqn = op.eqn
    if len(eqn.invars) != 1 or not amp.is_plain or not is_low(op.values[0]):
        return None
    (var,), (body, consts) = eqn.invars, open_jaxpr(eqn.params["jaxpr"])
    inside = [*leaves(body.eqns)]
    used = {x.primitive.name for x in inside}
    if (
        consts
        or len(eqn.outvars) != 1
        or not used <= _POINTWISE
        or len(used - _LINEAR) < 2
        or used.isdisjoint(_EXPENSIVE)
    ):
        return None
    atoms = [atom for x in inside for atom in (*x.invars, *x.outvars)]
    is_f32 = is_eligible(var.aval)
    if not all(
        is_eligible(x.aval) if is_f32 else str(x.aval.dtype) in _FLOATS for x in atoms
    ):
        return None
    if any(
        amp.region_rule(x.eqn, x.scopes) for x in walk_inside(Position(eqn, op.scopes))
    ):
        return None
    if is_f32 and (amp.dtype == np.float16 or not all(map(_is_low_alone, inside))):
        return Rule.F32, _IN_F32
    return Rule.FOLLOW, _AGAIN


def _is_low_alone(eqn: Equation) -> bool:
    """Returns whether an operation may be held in 16 bits; `erfc` is rounded at the end."""
    rule = rule_for(eqn.primitive.name, eqn.params, compute_is_f16=False)
    return eqn.primitive.name == "erfc" or rule in (Rule.FOLLOW, Rule.WIDEST)


def run_activation(amp: Settings, op: Op, rule: Rule) -> Outcome:
    """Runs an activation from its 16-bit operand."""
    jaxpr, made = op.eqn.params["jaxpr"], amp.frame.made
    if id(jaxpr) not in made:
        # Layers that are alike share a function, which JAX traces once.
        dtype = None
        if is_eligible(op.eqn.invars[0].aval):
            dtype = F32 if rule == Rule.F32 else amp.dtype
        made[id(jaxpr)] = _function_of(jaxpr, dtype), jaxpr
    source = op.facts[0].source._replace(leaf=None)
    return made[id(jaxpr)][0](op.values[0]), [Origin(source, touched=True)]


def _function_of(
    jaxpr: Jaxpr, dtype: np.dtype | None
) -> Callable[[Array], list[Array]]:
    """Returns an activation in f32 with a result of `dtype`; as it is written if `None`."""
    body, _ = open_jaxpr(jaxpr)

    @jax.checkpoint
    def compute(low: Array) -> list[Array]:
        low = _rounding_cotangents(low)
        if dtype is None:
            return eval_jaxpr(body, (), low)
        return [cast(x, dtype) for x in eval_jaxpr(body, (), cast(low, F32))]

    return compute


@jax.custom_jvp
def _rounding_cotangents(low: Array) -> Array:
    """Returns a 16-bit value, whose cotangent is made as an array of 16 bits.

    A bias sums that cotangent in f32. XLA would leave out the rounding between, write the
    cotangent in f32 for the sum, read that, and write it once more in 16 bits for the
    matmuls: on ViT-Base 5.6 GB of traffic a step.
    """
    return low


@_rounding_cotangents.defjvp
def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    return primals[0], lax.optimization_barrier(tangents[0])
