"""Chains of operations on single numbers in f16, such as `jax.nn.gelu`.

A power in them overflows f16, so they are computed in f32. What they keep for the backward
pass would be f32, too; instead they keep their 16-bit operand and are computed again.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpx._amp._rules import Rule, rule_for
from mpx._amp._values import F32, Meta, cast, is_eligible
from mpx._compat import Literal, equation_context, eval_jaxpr, jaxpr_of, scopes_of
from mpx._formats import FORMATS

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
    """Equations that need nothing but one f32 value and each other.

    Attributes:
        source: The value from which all of them are computed.
        equations: The equations, the first of which is a power.
        outvars: The results that others read.
        is_low: Which of these fit into f16, whatever f16 number the source is.
    """

    source: Any
    equations: list[Any]
    outvars: list[Any]
    is_low: list[bool]


def chains(amp: Any, jaxpr: Any, scopes: tuple[str, ...]) -> dict[int, Chain]:
    """Returns the chains of a jaxpr in f16, by the `id` of their first equation.

    There are none under a policy that changes the rule of an operation.
    """
    if amp.dtype != np.float16 or not amp.rules.is_plain:
        return {}
    found: dict[int, Chain] = {}
    taken: set[int] = set()
    for start, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name != "integer_pow" or id(eqn) in taken:
            continue
        members = _chain_from(jaxpr.eqns[start:])
        rules = [amp.region_rule(x, scopes + scopes_of(x)) for x in members]
        if members and all(rule is None for rule in rules):
            found[id(eqn)] = _as_chain(jaxpr, members)
            taken.update(map(id, members))
    return found


def _chain_from(equations: Sequence[Any]) -> list[Any]:
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


def _is_pointwise(eqn: Any) -> bool:
    """Whether an equation works on single f32 numbers, and in bf16 would stay low."""
    name = eqn.primitive.name
    rule = rule_for(name, eqn.params, compute_is_f16=False)
    is_f32 = all(is_eligible(var.aval) for var in (*eqn.invars, *eqn.outvars))
    return name in _POINTWISE and is_f32 and rule in (Rule.FOLLOW, Rule.WIDEST)


def _as_chain(jaxpr: Any, members: list[Any]) -> Chain:
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


def _bounds(members: list[Any]) -> dict[Any, float]:
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


def run(
    amp: Any, chain: Chain, value: Any, scopes: tuple[str, ...]
) -> dict[Any, tuple[Any, Meta]]:
    """Computes a chain in f32 from an f16 value; returns its results by variable."""
    jaxpr = jaxpr_of([chain.source], chain.outvars, chain.equations)

    @jax.checkpoint
    def compute(low: Any) -> list[Any]:
        outs = eval_jaxpr(jaxpr, (), cast(low, F32))
        pairs = zip(outs, chain.is_low, strict=True)
        return [cast(out, amp.dtype) if is_low else out for out, is_low in pairs]

    first = chain.equations[0]
    amp.record(first, Rule.F32, _REASON, metas=[], scopes=scopes + scopes_of(first))
    with equation_context(first):
        outs = compute(value)
    metas = [Meta(chain="low" if is_low else "high") for is_low in chain.is_low]
    return dict(zip(chain.outvars, zip(outs, metas, strict=True), strict=True))
