"""Following values through a traced program: where a parameter ends up."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jaxtyping import PyTree

from mpx._jax._compat import Literal, open_jaxpr, primitive_name, scan_sizes
from mpx._program._queries import (
    LOOPS,
    MOVES,
    OUTERMOST,
    Equation,
    Position,
    called,
    sub_jaxprs,
)

T = TypeVar("T")

Label = Any  # a name, a number, the value itself; `None` if nothing is known
Rule = Callable[[str, Equation, list[Label]], Label]
"""Labels results: called with a primitive's name, its equation, its operands' labels."""


def propagate(
    jaxpr: Any,
    labels: Mapping[Any, T],
    rule: Callable[[Equation, list[T]], Sequence[T]],
    literal: Callable[[Any], T] = lambda atom: None,
    ends: Iterable[Sequence[PyTree]] = itertools.repeat(()),
) -> list[T]:
    """Returns the labels of the results of a jaxpr, given those of its other variables."""
    env: dict[Any, Any] = dict(labels)

    def read(atom: Any) -> PyTree:
        return literal(atom) if isinstance(atom, Literal) else env.get(atom)

    for eqn, dead in zip(jaxpr.eqns, ends, strict=False):
        found = rule(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, found, strict=True))
        for var in dead:
            env.pop(var, None)
    return [read(atom) for atom in jaxpr.outvars]


def moved(eqn: Equation, labels: Sequence[Label]) -> Label:
    """Returns the only label of an equation's operands, if it does no more than move."""
    known = [label for label in labels if label]
    return known[0] if primitive_name(eqn) in MOVES and len(known) == 1 else None


def pull(
    jaxpr: Any,
    labels: Sequence[T | None],
    rule: Callable[[Equation, list[T | None]], Sequence[T | None]],
    join: Callable[[T, T], T] = lambda one, other: one,
) -> dict[Any, T]:
    """Returns the labels of variables, given those of the results of a jaxpr.

    `rule` labels the operands of an equation, given its results' labels.
    """
    body, _ = open_jaxpr(jaxpr)
    known: dict[Any, T] = {}

    def add(atoms: Sequence[Any], found: Sequence[T | None]) -> None:
        for atom, label in zip(atoms, found, strict=False):
            if label is not None and not isinstance(atom, Literal):
                known[atom] = join(known[atom], label) if atom in known else label

    add(body.outvars, labels)
    for eqn in reversed(body.eqns):
        outs = [known.get(var) for var in eqn.outvars]
        inside = pull_inside(eqn, outs, rule, join)
        bodies, start = _entered(eqn)
        for inner in bodies:
            found = pull(inner, inside, rule, join)
            add(eqn.invars[start:], [*map(found.get, open_jaxpr(inner)[0].invars)])
        if not bodies:
            add(eqn.invars, rule(eqn, outs))
    return known


def pull_inside(
    eqn: Equation,
    outs: Sequence[T | None],
    rule: Callable[[Equation, list[T | None]], Sequence[T | None]],
    join: Callable[[T, T], T],
) -> list[T | None]:
    """Returns the labels of the results of the bodies of an equation; of a loop, in any step."""
    labels = list(outs)
    if primitive_name(eqn) not in LOOPS:
        return labels
    (carry, _), ((body,), _) = loop_carry(eqn), _entered(eqn)
    while True:
        found = pull(body, labels, rule, join)
        inputs = [*map(found.get, open_jaxpr(body)[0].invars[carry])]
        pairs = zip(labels, inputs, strict=False)
        known = [y if x is None else x if y is None else join(x, y) for x, y in pairs]
        if known == labels[: len(known)]:
            return labels
        labels[: len(known)] = known


def _entered(eqn: Equation) -> tuple[Sequence[Any], int]:
    """Returns the jaxprs that an equation runs, and the first operand that these get."""
    name, params = primitive_name(eqn), eqn.params
    if name in LOOPS:
        return [params.get("jaxpr", params.get("body_jaxpr"))], loop_carry(eqn)[1]
    if name == "cond":
        return params["branches"], 1
    body = called(eqn)
    return ([] if body is None else [body]), 0


class Walk(Generic[T]):
    """Goes once through a jaxpr and the jaxprs inside it, with a label for each value.

    A subclass defines `equation` and `unknown`, the label of a value of which nothing is
    known: a literal, the carry inside a loop, an input of a kernel.
    """

    unknown: T

    def equation(self, here: Position, labels: list[T]) -> list[T]:
        """Returns the labels of the results of an equation, before its jaxprs are entered.

        The results of a call or a branch get those of its body instead.
        """
        raise NotImplementedError

    def constant(self, var: Any) -> T:
        """Returns the label of a constant of a jaxpr."""
        return self.unknown

    def bodies(self, eqn: Equation, labels: list[T]) -> list[tuple[Any, list[T]]]:
        """Returns the jaxprs of an equation that are entered, and their inputs' labels."""
        bodies, name, known = list(sub_jaxprs(eqn)), primitive_name(eqn), list(labels)
        if name == "scan":
            consts, carry = scan_sizes(eqn.params)
            known[consts : consts + carry] = [self.unknown] * carry
        elif name == "cond":
            del known[0]
        elif called(eqn) is None:
            return [(body, [self.unknown] * len(body.invars)) for body in bodies]
        return [(body, known) for body in bodies]

    def run(
        self, jaxpr: Any, labels: Sequence[T], around: Position = OUTERMOST
    ) -> list[T]:
        """Returns the labels of the results of a jaxpr, given those of its inputs."""
        body, _ = open_jaxpr(jaxpr)
        known = {var: self.constant(var) for var in body.constvars}
        known.update(zip(body.invars, labels, strict=True))

        def rule(eqn: Equation, labels: list[T]) -> list[T]:
            here = around.at(eqn)
            found = self.equation(here, labels)
            for inner, inputs in self.bodies(eqn, labels):
                outs = self.run(inner, inputs, here.inside())
                if primitive_name(eqn) not in LOOPS and len(outs) == len(eqn.outvars):
                    found = outs
            return found

        return propagate(body, known, rule, lambda _: self.unknown)


@dataclasses.dataclass(frozen=True)
class Flow:
    """Follows labels through a jaxpr and all jaxprs inside it."""

    rule: Rule  # labels the results of one operation
    # Combines the labels of a value that comes from either of two branches, or from
    # outside a loop and from its last step
    join: Callable[[Label, Label], Label] = lambda a, b: b if a is None else a
    constant: Callable[[Any], Label] | None = None  # labels a constant, given its value

    def run(self, jaxpr: Any, labels: Mapping[Any, Label]) -> list[Label]:
        """Returns the labels of the results, given those of some variables."""
        body, consts = open_jaxpr(jaxpr)
        if self.constant is not None:
            pairs = zip(body.constvars, consts, strict=False)
            labels = {**labels, **{var: self.constant(value) for var, value in pairs}}
        return propagate(body, labels, self.after, self.literal)

    def literal(self, atom: Any) -> Label:
        """Labels a number that is written into a jaxpr."""
        return None

    def entering(self, label: Label, var: Any) -> Label:
        """Returns the label of an input of a body, from that of the operand."""
        return label

    def results(self, eqn: Equation, ins: list[Label]) -> Sequence[Label]:
        """Labels the results of one operation."""
        label = self.rule(primitive_name(eqn), eqn, ins)
        return [label] * len(eqn.outvars)

    def after(self, eqn: Equation, ins: list[Label]) -> Sequence[Label]:
        """Returns the labels of the results of an equation; of a call, those of its body."""
        if self.constant is None and all(label is None for label in ins):
            return [None] * len(eqn.outvars)
        outs, (bodies, start) = self.results(eqn, ins), _entered(eqn)
        is_loop = primitive_name(eqn) in LOOPS
        inside = self.inside_loop(eqn, ins) if is_loop else ins[start:]
        if bodies:
            found = [self._call(body, inside) for body in bodies]
            outs = [functools.reduce(self.join, x) for x in zip(*found, strict=True)]
        if is_loop:  # It may not run at all.
            before = inside[loop_carry(eqn)[0]]
            outs = [*map(self.join, before, outs), *outs[len(before) :]]
        return outs

    def inside_loop(self, eqn: Equation, ins: list[Label]) -> list[Label]:
        """Returns the labels of the inputs of a loop's body, which hold in each step."""
        carry, ((body,), start) = loop_carry(eqn)[0], _entered(eqn)
        ins = ins[start:]
        count = len(ins[carry])
        while True:
            outs = self._call(body, ins)
            after = [self.join(*x) for x in zip(ins[carry], outs[:count], strict=True)]
            if after == ins[carry]:
                return ins
            ins = [*ins]
            ins[carry] = after

    def _call(self, jaxpr: Any, ins: Sequence[Label]) -> list[Label]:
        variables = open_jaxpr(jaxpr)[0].invars
        pairs = zip(ins, variables, strict=True)
        inside = [self.entering(label, var) for label, var in pairs]
        return self.run(jaxpr, dict(zip(variables, inside, strict=True)))


def loop_carry(eqn: Equation) -> tuple[slice, int]:
    """Returns which inputs of the body of a loop are carried, and which operand is first."""
    if primitive_name(eqn) == "scan":
        consts, carry = scan_sizes(eqn.params)
        return slice(consts, consts + carry), 0
    return slice(eqn.params["body_nconsts"], None), eqn.params["cond_nconsts"]
