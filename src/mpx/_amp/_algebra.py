"""Which products reach linear algebra, such as a Cholesky decomposition: they stay in f32.

A matrix that 16 bits round may have no decomposition, and the error of a solution is that of
the matrix times its condition number. So a product stays in f32 if it reaches linear algebra
through any operations but other products, and if it reaches such a product through linear
operations, as the factors of `F @ P @ F.T` do. The layers of a network before that run low.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import Literal, open_jaxpr, primitive_name, scan_sizes
from mpx._program._queries import (
    MATMULS,
    MOVES,
    Equation,
    called,
    holds,
    names,
    sub_jaxprs,
)

SOLVERS = frozenset(
    names(
        "cholesky cholesky_update lu qr geqrf geqp3 householder_product ormqr svd eig"
    )
    + names("eigh schur hessenberg tridiagonal tridiagonal_solve triangular_solve")
    + names("custom_linear_solve linear_solve")
)
_LINEAR = MOVES.union(
    names("add sub neg mul div add_any reduce_sum cumsum concatenate pad gather split")
    + names("dynamic_update_slice scatter scatter-add scatter_add select_n tile stack")
    + names("unstack triu tril while scan cond")
)


class Reached(NamedTuple):
    """That a value reaches linear algebra."""

    is_near: bool  # whether no product lies between
    name: str  # of the primitive


def reach(jaxpr: Any, wanted: Sequence[Reached | None] = ()) -> dict[Any, Reached]:
    """Returns what the variables of an open jaxpr reach, given its results'."""
    if not any(wanted) and not holds(jaxpr, SOLVERS):
        return {}
    found: dict[Any, Reached] = {}

    def add(atoms: Sequence[Any], known: Sequence[Reached | None]) -> None:
        for atom, new in zip(atoms, known, strict=False):
            if new is not None and not isinstance(atom, Literal):
                old = found.get(atom)
                found[atom] = new if old is None or new.is_near else old

    add(jaxpr.outvars, wanted)
    for eqn in reversed(jaxpr.eqns):
        outs = [found.get(var) for var in eqn.outvars]
        add(eqn.invars, _operands(eqn, outs))
    return found


def _operands(eqn: Equation, outs: list[Reached | None]) -> Sequence[Reached | None]:
    """Returns what the operands of an equation reach."""
    name, count = primitive_name(eqn), len(eqn.invars)
    known = [x for x in outs if x is not None]
    best = max(known, default=None)
    if name in SOLVERS:
        return [Reached(True, name)] * count
    if any(True for _ in sub_jaxprs(eqn)):
        return _through(eqn, outs)
    if best is None:
        return ()
    if name in MATMULS:
        return [best._replace(is_near=False)] * count
    return [best if best.is_near or name in _LINEAR else None] * count


def _through(eqn: Equation, outs: list[Reached | None]) -> Sequence[Reached | None]:
    """Returns the same of an equation that holds jaxprs."""
    inside = reached_inside(eqn, outs)
    if (body := called(eqn)) is not None:
        return _inputs(body, inside)
    name, params = primitive_name(eqn), eqn.params
    if name == "cond":
        parts = [_inputs(x, inside) for x in params["branches"]]
        return [
            None,
            *(max(filter(None, x), default=None) for x in zip(*parts, strict=True)),
        ]
    if name == "scan":
        return _inputs(params["jaxpr"], inside)
    if name == "while":
        count = params["cond_nconsts"]
        return [None] * count + [*_inputs(params["body_jaxpr"], inside)]
    inner = [x for body in sub_jaxprs(eqn) for x in _inputs(body, ()) if x]
    return [max(inner)] * len(eqn.invars) if inner else ()


def reached_inside(
    eqn: Equation, outs: Sequence[Reached | None]
) -> tuple[Reached | None, ...]:
    """Returns what the results of the body of an equation reach; of a loop, in any step."""
    name, params, known = primitive_name(eqn), eqn.params, list(outs)
    if name not in ("scan", "while"):
        return tuple(known)
    start, count = params.get("body_nconsts", 0), len(known)
    if name == "scan":
        start, count = scan_sizes(params)
    body = params["jaxpr" if name == "scan" else "body_jaxpr"]
    while True:
        inputs = _inputs(body, known)[start : start + count]
        pairs = zip(known[:count], inputs, strict=True)
        after = [max(filter(None, pair), default=None) for pair in pairs]
        if after == known[:count]:
            return tuple(known)
        known[:count] = after


def _inputs(jaxpr: Any, wanted: Sequence[Reached | None]) -> list[Reached | None]:
    body, _ = open_jaxpr(jaxpr)
    found = reach(body, wanted)
    return [found.get(var) for var in body.invars]
