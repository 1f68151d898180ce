"""Following values through a traced program: where a parameter ends up."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpx._compat import Literal, is_jaxpr, open_jaxpr, primitive_name, scan_sizes
from mpx._jaxpr._queries import Equation

Label = Any
"""The knowledge about a value; `None` stands for none."""

Rule = Callable[[str, Equation, list[Label]], Label]
"""Labels results: called with a primitive's name, its equation, its operands' labels."""


def propagate(
    jaxpr: Any,
    labels: Mapping[Any, Label],
    rule: Callable[[Equation, list[Label]], Sequence[Label]],
) -> list[Label]:
    """Returns the labels of the results of a jaxpr, given those of some variables.

    The rule returns the labels of the results of one equation. Literals have none.
    """
    env = dict(labels)

    def read(atom: Any) -> Label:
        return None if isinstance(atom, Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        found = rule(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class Flow:
    """Follows labels through a jaxpr and all jaxprs inside it.

    Attributes:
        rule: Labels the results of one operation.
        join: Combines the labels of a value that comes from either of two branches, or
            from outside a loop and from its last step.
        constant: Labels a constant of a jaxpr, given its value.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        join: Callable[[Label, Label], Label] = lambda a, b: b if a is None else a,
        constant: Callable[[Any], Label] | None = None,
    ) -> None:
        self.rule, self.join, self.constant = rule, join, constant

    def run(self, jaxpr: Any, labels: Mapping[Any, Label]) -> list[Label]:
        """Returns the labels of the results, given those of some variables."""
        body, consts = open_jaxpr(jaxpr)
        if self.constant is not None:
            pairs = zip(body.constvars, consts, strict=False)
            labels = {**labels, **{var: self.constant(value) for var, value in pairs}}
        return propagate(body, labels, self._outs)

    def _outs(self, eqn: Equation, ins: list[Label]) -> Sequence[Label]:
        if self.constant is None and all(label is None for label in ins):
            return [None] * len(eqn.outvars)
        name = primitive_name(eqn)
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
            return [functools.reduce(self.join, x) for x in zip(*outs, strict=True)]
        inner = [x for x in eqn.params.values() if is_jaxpr(x)]
        if len(inner) == 1 and len(open_jaxpr(inner[0])[0].invars) == len(ins):
            outs = self._call(inner[0], ins)
            if len(outs) == len(eqn.outvars):
                return outs
        return [label] * len(eqn.outvars)

    def _call(self, jaxpr: Any, ins: Sequence[Label]) -> list[Label]:
        return self.run(jaxpr, dict(zip(open_jaxpr(jaxpr)[0].invars, ins, strict=True)))

    def _loop(self, jaxpr: Any, ins: list[Label], carry: slice) -> list[Label]:
        """Runs a body until the labels of its carry no longer change."""
        count = len(ins[carry])
        while True:
            outs = self._call(jaxpr, ins)
            after = [self.join(*x) for x in zip(ins[carry], outs[:count], strict=True)]
            if after == ins[carry]:
                return [*after, *outs[count:]]
            ins = [*ins]
            ins[carry] = after
