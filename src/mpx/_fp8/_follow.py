"""Following the parameters of a function through operations that move or cast numbers."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mpx._compat import Literal
from mpx._jaxpr import HANDLERS
from mpx._jaxpr._flow import Flow
from mpx._jaxpr._queries import MOVES, SHAPE_ONLY, Equation, names

Param = str | None
"""The name of the parameter that a value is; `None` if it is none."""
SLICE = "slice"
"""Stands among operations for the slice that one round of a scan takes."""
_REPEATED = SHAPE_ONLY.union(names("convert_element_type")).difference(
    names("pvary pcast sharding_constraint reshard mesh_cast")
)
# The result is a parameter if the first operand is one.
_MOVES = (MOVES - {"broadcast_in_dim"}).union(
    names("neg all_gather all_gather_invariant split unstack")
)
# The result is a parameter if all operands are parameters or numbers.
_COMBINES = names("add sub mul div max min concatenate stack dot_general")


class Weight(str):
    """The name of a parameter, with the operations from there to a value.

    Attributes:
        chain: The operations in order; `None` if they cannot be repeated elsewhere.
    """

    chain: Sequence[Any] | None

    def __new__(cls, name: str, chain: Sequence[Any] | None = ()) -> "Weight":
        """Makes the name of a value."""
        self = super().__new__(cls, name)
        self.chain = chain
        return self

    def after(self, step: Any) -> "Weight":
        """Returns the name of the value behind one more operation."""
        return Weight(self, None if self.chain is None else (*self.chain, step))


def moved(fact: Any, eqn: Equation) -> Any:
    """Returns the fact about a result of an operation on a parameter."""
    if not isinstance(fact, Weight):
        return fact
    operands = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
    simple = len(operands) == len(eqn.outvars) == 1
    if simple and eqn.primitive.name in _REPEATED:
        return fact.after(eqn)
    return Weight(fact, None)


def facts_after(eqn: Equation, facts: list[Param]) -> list[Param]:
    """Returns the facts of an equation's results."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name == "optimization_barrier":
        return facts
    if name in _MOVES or (name == "broadcast_in_dim" and _keeps_size(eqn)):
        return [moved(facts[0], eqn)] * count
    if name in _COMBINES:
        pairs = zip(eqn.invars, facts, strict=True)
        tensors = [fact for atom, fact in pairs if not isinstance(atom, Literal)]
        params = [fact for fact in tensors if fact is not None]
        if tensors and len(params) == len(tensors):
            return [moved(max(params), eqn)] * count
    return [None] * count


def _keeps_size(eqn: Equation) -> bool:
    return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)


def matmul_dtypes(
    jaxpr: Any, labels: Mapping[Any, str], primitives: Collection[str]
) -> set[str]:
    """Returns the dtypes of matmuls with one parameter, and of these parameters.

    Args:
        jaxpr: The program.
        labels: The dtypes of its parameters, by variable.
        primitives: Which primitives are such matmuls.
    """
    dtypes: set[str] = set()

    def rule(name: str, eqn: Equation, labels: list[Param]) -> Param:
        if name in primitives and labels[:2].count(None) == 1:
            dtypes.update(label for label in labels if label)
            dtypes.update(var.aval.dtype.name for var in eqn.invars[:2])
        after = () if name in HANDLERS else facts_after(eqn, labels)
        return next(iter(after), None)  # an effect has no results

    Flow(rule).run(jaxpr, dict(labels))
    return dtypes
