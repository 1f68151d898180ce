"""What is known of the results of equations, in visited programs and in those that are not."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from mpx._amp._decide import table_rule
from mpx._amp._facts import (
    DATA,
    Held,
    Settings,
    Source,
    closed_over,
    either,
    follow,
    is_bias,
    is_eligible,
)
from mpx._amp._rules import Rule
from mpx._jax._formats import is_low
from mpx._program import HANDLERS
from mpx._program._flow import Flow
from mpx._program._primitives import that
from mpx._program._queries import LOOPS, Equation

_NEW, _SUMS, _BOUNDED = that("new"), that("sums"), that("bounded")


def held_in(value: PyTree, aval: Any, fact: Source) -> Held:
    """Returns what the numbers of an array are."""
    if is_low(value):
        return Held.LOW if is_eligible(aval) else Held.WIDE
    if fact.held != Held.WIDE or not is_eligible(aval):
        return fact.held
    if fact.literal == "outside":
        return Held.RANGE
    is_free = fact.literal is not None or is_bias(fact, aval)
    return Held.FREE if is_free else Held.WIDE


def in_f32(fact: Source) -> Source:
    """Returns what is known of a value that is held in f32, as it is asked to be."""
    return fact._replace(held=Held.WIDE)


def facts_after(
    amp: Settings, eqn: Equation, facts: Sequence[Source], rule: Rule | None = None
) -> list[Source]:
    """Returns what is known of the results of an equation that holds no jaxpr."""
    held = _held_after(amp, eqn, facts, rule)
    return [fact._replace(held=held) for fact in follow(eqn, facts)]


def _held_after(
    amp: Settings, eqn: Equation, facts: Sequence[Source], rule: Rule | None
) -> Held:
    name, literal = eqn.primitive.name, facts[0].literal if facts else None
    if name == "convert_element_type" and not is_eligible(eqn.invars[0].aval):
        return Held.FREE if literal is not None else Held.WIDE
    pairs = zip(eqn.invars, facts, strict=True)
    known = [x for var, x in pairs if is_eligible(var.aval)]
    found = max((x.held for x in known), default=Held.WIDE)
    rule = rule or table_rule(amp, eqn)
    if name == "convert_element_type":
        return found  # It only drops a weak type.
    if found == Held.WIDE or (rule == Rule.ORIGINAL and name not in _SUMS):
        return Held.WIDE
    if name in _SUMS:
        return Held.FREE
    if name in _BOUNDED:
        return min(found, Held.LOW)
    # The result of an exponential may leave the range of f16.
    is_far = rule == Rule.F32 and amp.dtype == np.float16
    # A bound, as 0.999 of a clip: 16 bits would make another one.
    is_cut = name not in _NEW and "rounded" in [x.literal for x in known]
    return Held.RANGE if found and (is_far or is_cut) else found


class Facts(Flow):
    """What is known of values, followed through a program and all that it calls."""

    amp: Settings

    def __init__(self, amp: Settings) -> None:
        super().__init__(lambda *_: DATA, join=either, constant=closed_over)
        object.__setattr__(self, "amp", amp)

    def literal(self, atom: Any) -> Source:
        fact = self.amp.literal_fact(atom)
        return fact._replace(held=held_in(None, atom.aval, fact))

    def entering(self, label: Source, var: Any) -> Source:
        return self.amp.fact_inside(label, var, "slice")

    def results(self, eqn: Equation, ins: list[Source]) -> Sequence[Source]:
        if eqn.primitive.name in HANDLERS:
            return [DATA] * len(eqn.outvars)
        return facts_after(self.amp, eqn, ins)

    def after(self, eqn: Equation, ins: list[Source]) -> Sequence[Source]:
        outs = super().after(eqn, ins)
        return [*map(in_f32, outs)] if eqn.primitive.name in LOOPS else outs
