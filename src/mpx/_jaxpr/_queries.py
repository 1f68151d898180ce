"""Questions about jaxprs: which equations they hold, how often these run, and their cost."""

import collections
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal

from mpx._compat import open_jaxpr, scopes_of, sub_jaxprs

Equation = Any
"""An equation of a jaxpr; JAX has no public type for it."""


def names(text: str) -> tuple[str, ...]:
    """Returns the words of a text, for tables of primitives."""
    return tuple(text.split())


MATMULS = names("dot_general conv_general_dilated ragged_dot ragged_dot_general")
ATTENTION = {
    "cudnn_attention": 2,
    "cudnn_attention_backward": 5,
    "cudnn_attention_tangent": 6,
}
"""The primitives of `mpx._attention`, and the number of matmuls in each."""
GROUPED = "grouped_matmul"
"""The primitive of `mpx._experts`."""

# The same numbers in another shape, order or place.
SHAPE_ONLY = frozenset(
    names(
        "broadcast_in_dim reshape squeeze transpose expand_dims copy slice rev pvary "
        "pcast sharding_constraint reshard mesh_cast"
    )
)
# The same numbers, or some of them, possibly rounded.
MOVES = SHAPE_ONLY.union(
    names(
        "convert_element_type dynamic_slice copy_p reduce_precision "
        "optimization_barrier name"
    )
)
REMAT = names("checkpoint remat2 remat")
CALLS = ("jit", "pjit", "closed_call", *REMAT)


def places(
    jaxpr: Any, scopes: tuple[str, ...] = (), times: int = 1
) -> Iterator[tuple[Equation, tuple[str, ...], int]]:
    """Yields the equations of a jaxpr and of all jaxprs inside it, with their places.

    The place is given by the `jax.named_scope`s around the equation, outermost first, and
    how often it runs: see `repetitions`.
    """
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        inside = scopes + scopes_of(eqn)
        yield eqn, inside, times
        for inner in sub_jaxprs(eqn):
            yield from places(inner, inside, times * repetitions(eqn))


def equations(jaxpr: Any) -> Iterator[Equation]:
    """Yields the equations of a jaxpr and of all jaxprs inside it."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for inner in sub_jaxprs(eqn):
            yield from equations(inner)


def leaves(eqns: Iterable[Equation]) -> Iterator[Equation]:
    """Yields equations, with those inside calls in place of the calls."""
    for eqn in eqns:
        if eqn.primitive.name in CALLS:
            for body in sub_jaxprs(eqn):
                yield from leaves(body.eqns)
        else:
            yield eqn


def contains(jaxpr: Any, names: Collection[str]) -> bool:
    """Returns whether a jaxpr holds one of these primitives, at any depth."""
    return any(eqn.primitive.name in names for eqn in equations(jaxpr))


Verdict = bool | Literal["result", "inside"]
"""Whether a use of a value passes, or what decides: the uses of the result or inside."""


def every_use(
    jaxpr: Any,
    var: Any,
    judge: Callable[[Equation, int, tuple[str, ...]], Verdict],
    scopes: tuple[str, ...] = (),
    *,
    once: bool = False,
) -> bool:
    """Returns whether a value is used, is not returned, and each of its uses passes.

    Args:
        jaxpr: The jaxpr that holds the value.
        var: Its variable.
        judge: Takes an equation that reads it, the position of the operand and the named
            scopes of the equation.
        scopes: The named scopes around the jaxpr.
        once: Whether more than one use fails.
    """
    uses = [
        (eqn, position)
        for eqn in jaxpr.eqns
        for position, atom in enumerate(eqn.invars)
        if atom is var
    ]
    for eqn, position in uses:
        around = scopes + scopes_of(eqn)
        passes = judge(eqn, position, around)
        if passes == "result":
            passes = every_use(jaxpr, eqn.outvars[0], judge, scopes, once=once)
        elif passes == "inside":
            body = next(sub_jaxprs(eqn))
            passes = every_use(body, body.invars[position], judge, around, once=once)
        if not passes:
            return False
    is_read = len(uses) == 1 if once else bool(uses)
    return is_read and all(atom is not var for atom in jaxpr.outvars)


def repetitions(eqn: Equation) -> int:
    """Returns how often an equation runs its jaxprs: a scan, or a kernel over a grid.

    A loop of unknown length counts once.
    """
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    known = [size for size in grid if isinstance(size, int)]
    return eqn.params.get("length", 1) * math.prod(known)


def matmul_sizes(eqn: Equation) -> tuple[int, tuple[int, int]]:
    """Returns how many products each result of a matmul adds up, and the free sizes.

    The free size of an operand is that of all its axes which are neither summed over nor
    batch axes.
    """
    shapes = [var.aval.shape for var in eqn.invars[:2]]
    if eqn.primitive.name == "conv_general_dilated":
        kernel = list(shapes[1])
        channels = kernel.pop(eqn.params["dimension_numbers"].rhs_spec[0])
        return math.prod(kernel), (math.prod(shapes[0]), channels)
    if eqn.primitive.name == GROUPED:
        summed, free = shapes[0] if eqn.params["kind"] == "sums" else shapes[0][::-1]
        return summed, (free, eqn.outvars[0].aval.shape[-1])
    summed, batch = _axes(eqn)
    first, second = (
        math.prod(size for i, size in enumerate(shape) if i not in (*axes, *same))
        for shape, axes, same in zip(shapes, summed, batch, strict=True)
    )
    return math.prod(shapes[0][axis] for axis in summed[0]), (first, second)


def _axes(eqn: Equation) -> Any:
    """Returns the summed and the batch axes of a matmul, for both operands each."""
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is not None:
        return ragged.dot_dimension_numbers
    return eqn.params["dimension_numbers"]


def flops(eqn: Equation) -> int:
    """Returns two operations per multiplication of a matmul, 0 for anything else.

    Attention counts as its matmuls, with the parts that a mask discards.
    """
    name = eqn.primitive.name
    if name in ATTENTION:
        batch, queries, heads, size = eqn.invars[0].aval.shape
        keys = eqn.invars[1].aval.shape[1]
        return ATTENTION[name] * 2 * batch * heads * queries * keys * size
    if name == GROUPED:
        # Each row is multiplied with one matrix, or added to one.
        columns = eqn.outvars[0].aval.shape[-1]
        return 2 * math.prod(eqn.invars[0].aval.shape) * columns
    if name not in MATMULS:
        return 0
    count = 2 * math.prod(eqn.outvars[0].aval.shape) * matmul_sizes(eqn)[0]
    if name == "ragged_dot_general":
        # Each row belongs to one group; a sum over rows has a result for each group.
        rows = eqn.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
        if {*rows} & {*_axes(eqn)[0][0]}:
            return count // eqn.invars[2].aval.shape[-1]
    return count


def matmul_flops(
    jaxpr: Any, kind: Callable[[Equation], str]
) -> collections.Counter[str]:
    """Counts the operations of the matmuls of a jaxpr, as often as they run, by kind.

    Of a conditional, the branch with the most operations counts.
    """
    total: collections.Counter[str] = collections.Counter()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in (*MATMULS, *ATTENTION, GROUPED):
            total[kind(eqn)] += flops(eqn)
        inner = [matmul_flops(body, kind) for body in sub_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=collections.Counter.total)]
        for counts in inner:
            for key, number in counts.items():
                total[key] += number * repetitions(eqn)
    return total
