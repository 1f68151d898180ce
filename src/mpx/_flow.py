"""Following values through a traced program: where does a parameter end up?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpx._compat import Literal, is_jaxpr, open_jaxpr, scan_sizes

MATMULS = frozenset(
    ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
)
# Operations that hand an array on: the same numbers in another dtype, order or place.
MOVES = frozenset(
    (
        "convert_element_type",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "slice",
        "dynamic_slice",
        "gather",
        "concatenate",
        "rev",
        "copy",
        "copy_p",
        "pvary",
        "pcast",
        "reduce_precision",
        "sharding_constraint",
        "mesh_cast",
        "reshard",
        "optimization_barrier",
        "name",
    )
)

Label = Any
"""What is known of a value; `None` where nothing is."""

Rule = Callable[[str, Any, list[Label]], Label]
"""From an operation's name, its equation and its operands' labels to its results'."""


def name_of(eqn: Any) -> str:
    """Returns the name of an equation's operation; JAX 0.12 wraps those of a vjp."""
    return eqn.primitive.name.removeprefix("vjp_node[").removesuffix("]")


def linear_program(vjp: Any, count: int) -> tuple[Any, list[Any]] | None:
    """Returns what `jax.vjp` will transpose, and the variables of its arguments.

    It is the derivative of a function as a linear program, which exists already: to
    look at it costs no trace.

    Args:
        vjp: The function that `jax.vjp` returned.
        count: How many arrays its arguments have.

    Returns:
        `None` if this JAX does not show it.
    """
    jaxpr = getattr(vjp, "jaxpr", None)
    if not is_jaxpr(jaxpr):
        return None
    body, _ = open_jaxpr(jaxpr)
    # Residuals come before the arguments or are constants; structured ones come after.
    end = len(body.invars) - len(
        jax.tree.leaves(getattr(vjp, "structured_residuals", ()))
    )
    return (body, body.invars[end - count : end]) if end >= count else None


class Flow:
    """Follows labels through a jaxpr and all jaxprs inside it.

    Attributes:
        rule: Labels the results of one operation.
        join: Which of two labels holds where a loop or a branch may bring either.
        constant: Labels the constants of jaxprs, by their values.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        join: Callable[[Label, Label], Label] = lambda a, b: b if a is None else a,
        constant: Callable[[Any], Label] | None = None,
    ) -> None:
        self.rule, self.join, self.constant = rule, join, constant

    def run(self, jaxpr: Any, labels: dict[Any, Label]) -> list[Label]:
        """Returns the labels of the results, from those of some variables."""
        body, consts = open_jaxpr(jaxpr)
        env = {var: label for var, label in labels.items() if label is not None}
        if self.constant is not None:
            for var, value in zip(body.constvars, consts, strict=False):
                env[var] = self.constant(value)

        def read(atom: Any) -> Label:
            return None if isinstance(atom, Literal) else env.get(atom)

        for eqn in body.eqns:
            ins = [read(atom) for atom in eqn.invars]
            if self.constant is None and all(label is None for label in ins):
                continue
            for var, label in zip(eqn.outvars, self._outs(eqn, ins), strict=True):
                if label is not None:
                    env[var] = label
        return [read(atom) for atom in body.outvars]

    def _outs(self, eqn: Any, ins: list[Label]) -> Sequence[Label]:
        name = name_of(eqn)
        label = self.rule(name, eqn, ins)
        if name == "scan":
            consts, carry = scan_sizes(eqn.params)
            return self._loop(eqn.params["jaxpr"], ins, slice(consts, consts + carry))
        if name == "while":
            start = eqn.params["cond_nconsts"]
            carry = slice(eqn.params["body_nconsts"], None)
            return self._loop(eqn.params["body_jaxpr"], ins[start:], carry)
        if name == "cond":
            outs = [self._call(x, ins[1:]) for x in eqn.params["branches"]]
            return [self._joined(labels) for labels in zip(*outs, strict=True)]
        inner = [x for x in eqn.params.values() if is_jaxpr(x)]
        if len(inner) == 1 and len(open_jaxpr(inner[0])[0].invars) == len(ins):
            outs = self._call(inner[0], ins)
            if len(outs) == len(eqn.outvars):
                return outs
        return [label] * len(eqn.outvars)

    def _call(self, jaxpr: Any, ins: Sequence[Label]) -> list[Label]:
        if self.constant is None and all(label is None for label in ins):
            return [None] * len(open_jaxpr(jaxpr)[0].outvars)
        return self.run(jaxpr, dict(zip(open_jaxpr(jaxpr)[0].invars, ins, strict=True)))

    def _loop(self, jaxpr: Any, ins: list[Label], carry: slice) -> list[Label]:
        """Runs a body until the labels of its carry stay."""
        count = len(ins[carry])
        while True:
            outs = self._call(jaxpr, ins)
            after = [self.join(*x) for x in zip(ins[carry], outs[:count], strict=True)]
            if after == ins[carry]:
                return [*after, *outs[count:]]
            ins = [*ins]
            ins[carry] = after

    def _joined(self, labels: Sequence[Label]) -> Label:
        first, *others = labels
        for other in others:
            first = self.join(first, other)
        return first
