"""Chains of operations on single numbers in f16, such as `jax.nn.gelu`.

A power in them overflows f16, so they are computed in f32. To keep no f32 values for the
backward pass, they keep their 16-bit operand and are computed again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpx._amp._facts import (
    F32,
    NEUTRAL,
    Chosen,
    Origin,
    Run,
    Settings,
    cast,
    is_eligible,
)
from mpx._amp._rules import Rule, rule_for
from mpx._compat import Literal, eval_jaxpr, jaxpr_of, scopes_of
from mpx._formats import FORMATS
from mpx._jaxpr._interpreter import Jaxpr, Op, Outcome, Values, as_array
from mpx._jaxpr._queries import Equation

_REASON = "overflows f16: in f32, and again in the backward pass"

_BOUNDED = frozenset(("tanh", "logistic", "erf", "sin", "cos"))
_SAME = frozenset(
    (
        *("neg", "abs", "copy", "reshape", "squeeze", "expand_dims", "transpose"),
        *("broadcast_in_dim", "stop_gradient"),
    )
)
_POINTWISE = _BOUNDED | _SAME | {"add", "sub", "mul", "max", "min", "integer_pow"}


class Chain(NamedTuple):
    """Equations whose operands are one f32 value and each other's results.

    Attributes:
        source: The value from which all of them are computed.
        equations: The equations, the first of which is a power.
        outvars: The results that others read.
        is_low: Which of these fit into f16, whatever f16 number the source is.
    """

    source: Any
    equations: list[Equation]
    outvars: list[Any]
    is_low: list[bool]


def choose(amp: Settings, op: Op) -> Chosen | None:
    """Returns how an equation runs that is part of a chain in f16; `None` if it is not.

    There are no chains under rules that change the rule of an operation.
    """
    if amp.dtype != np.float16 or not amp.rules.is_plain:
        return None
    eqn = op.eqn
    if eqn.outvars and eqn.outvars[0] in amp.frame.made:
        return Chosen(_computed)
    if eqn.primitive.name != "integer_pow" or as_array(op.values[0]).dtype != amp.dtype:
        return None
    jaxpr = amp.frame.jaxpr
    start = next(i for i, other in enumerate(jaxpr.eqns) if other is eqn)
    members = _chain_from(jaxpr.eqns[start:])
    outer = op.scopes[: len(op.scopes) - len(scopes_of(eqn))]
    rules = [amp.region_rule(x, outer + scopes_of(x)) for x in members]
    if not members or any(rule is not None for rule in rules):
        return None
    return Chosen(_running(_as_chain(jaxpr, members)), Rule.F32, _REASON)


def _computed(amp: Settings, op: Op) -> Outcome:
    """Returns what the first equation of the chain has computed."""
    out, fact = amp.frame.made[op.eqn.outvars[0]]
    return [out], [fact]


def _chain_from(equations: Sequence[Equation]) -> list[Equation]:
    """Returns the first equation and those that need nothing but it and its operand."""
    first, *rest = equations
    if not _is_pointwise(first) or isinstance(first.invars[0], Literal):
        return []
    source, made, members = first.invars[0], {first.outvars[0]}, [first]
    for eqn in rest:
        read = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        if read & made and read <= made | {source} and _is_pointwise(eqn):
            made.add(eqn.outvars[0])
            members.append(eqn)
    return members


def _is_pointwise(eqn: Equation) -> bool:
    """Returns whether an equation works on single f32 numbers and stays low in bf16."""
    name = eqn.primitive.name
    rule = rule_for(name, eqn.params, compute_is_f16=False)
    is_f32 = all(is_eligible(var.aval) for var in (*eqn.invars, *eqn.outvars))
    return name in _POINTWISE and is_f32 and rule in (Rule.FOLLOW, Rule.WIDEST)


def _as_chain(jaxpr: Jaxpr, members: list[Equation]) -> Chain:
    inside = set(map(id, members))
    outside = [eqn.invars for eqn in jaxpr.eqns if id(eqn) not in inside]
    read = {
        atom
        for atoms in (*outside, jaxpr.outvars)
        for atom in atoms
        if not isinstance(atom, Literal)
    }
    bounds = _bounds(members)
    outvars = [eqn.outvars[0] for eqn in members if eqn.outvars[0] in read]
    fits = [bounds[var] <= FORMATS["f16"].max for var in outvars]
    return Chain(members[0].invars[0], members, outvars, fits)


def _bounds(members: list[Equation]) -> dict[Any, float]:
    """Returns the largest absolute values of what is computed from an f16 number."""
    found: dict[Any, float] = {members[0].invars[0]: FORMATS["f16"].max}

    def read(atom: Any) -> float:
        if not isinstance(atom, Literal):
            return found[atom]
        return float(np.max(np.abs(np.asarray(atom.val, np.float64))))

    for eqn in members:
        sizes = [read(atom) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in _BOUNDED:
            size = 1.0
        elif name in ("add", "sub"):
            size = sum(sizes)
        elif name == "mul":
            size = math.prod(sizes)
        elif name == "integer_pow":
            size = _power(sizes[0], eqn.params["y"])
        else:
            size = max(sizes)
        found[eqn.outvars[0]] = size
    return found


def _power(size: float, exponent: int) -> float:
    try:
        return size**exponent
    except OverflowError:
        return math.inf


def _running(chain: Chain) -> Run:
    """Returns what computes a chain in f32 from an f16 value, at its first equation."""
    jaxpr = jaxpr_of([chain.source], chain.outvars, chain.equations)

    def run(amp: Settings, op: Op) -> Outcome:
        @jax.checkpoint
        def compute(low: Any) -> Values:
            outs = eval_jaxpr(jaxpr, (), cast(low, F32))
            pairs = zip(outs, chain.is_low, strict=True)
            return [cast(out, amp.dtype) if is_low else out for out, is_low in pairs]

        known = [Origin(chain="low" if is_low else "high") for is_low in chain.is_low]
        results = zip(compute(op.values[0]), known, strict=True)
        # What only the chain itself reads has no value outside.
        made = dict.fromkeys((x.outvars[0] for x in chain.equations), (None, NEUTRAL))
        made.update(zip(chain.outvars, results, strict=True))
        amp.frame.made.update(made)
        return _computed(amp, op)

    return run
