"""Which products reach linear algebra, such as a Cholesky decomposition: they stay in f32.

A matrix that 16 bits round may have no decomposition, and the error of a solution is that of
the matrix times its condition number. So a product stays in f32 if it reaches linear algebra
through any operations but other products, and if it reaches such a product through linear
operations, as the factors of `F @ P @ F.T` do. The layers of a network before that run low.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import primitive_name
from mpx._program._flow import pull, pull_inside
from mpx._program._primitives import that
from mpx._program._queries import MATMULS, Equation, Position, holds, walk_inside

SOLVERS = that("solves")
_LINEAR = that("same", "moves", "picks", "linear", "scales")


class Reached(NamedTuple):
    """That a value reaches linear algebra."""

    is_near: bool  # whether no product lies between
    name: str  # of the primitive


def reach(jaxpr: Any, wanted: Sequence[Reached | None] = ()) -> dict[Any, Reached]:
    """Returns what the variables of an open jaxpr reach, given its results'; one for all."""
    if len(wanted) == 1:
        wanted = [*wanted] * len(jaxpr.outvars)
    if not any(wanted) and not holds(jaxpr, SOLVERS):
        return {}
    return pull(jaxpr, wanted, _operands, max)


def reached_inside(
    eqn: Equation, outs: Sequence[Reached | None]
) -> tuple[Reached | None, ...]:
    """Returns what the results of the body of an equation reach; of a loop, in any step."""
    return tuple(pull_inside(eqn, outs, _operands, max))


def _operands(eqn: Equation, outs: list[Reached | None]) -> list[Reached | None]:
    """Returns what the operands of an equation reach."""
    name, count = primitive_name(eqn), len(eqn.invars)
    inside = [x.eqn.primitive.name for x in walk_inside(Position(eqn))]
    solvers = [x for x in (name, *inside) if x in SOLVERS]
    if solvers:
        return [Reached(True, solvers[0])] * count
    best = max(filter(None, outs), default=None)
    if best is not None and name in MATMULS:
        return [best._replace(is_near=False)] * count
    passes = best is not None and (best.is_near or name in _LINEAR)
    return [best if passes else None] * count
