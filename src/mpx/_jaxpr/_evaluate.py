"""Running a jaxpr equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any

from mpx._compat import Literal
from mpx._jaxpr._queries import Equation


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    run: Callable[[Equation, list[Any]], Sequence[Any]],
) -> list[Any]:
    """Returns the results of a jaxpr, whose equations are run by a function.

    Args:
        jaxpr: The jaxpr, open.
        consts: Its constants.
        args: Its arguments.
        run: From an equation and the values of its operands to its results.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = run(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
