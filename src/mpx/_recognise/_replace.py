"""Running something else in the place of recognised equations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpx._jax._compat import Literal, equation_context, scopes_of
from mpx._program._interpreter import (
    Fact,
    Jaxpr,
    Op,
    Outcome,
    Plan,
    Replacement,
    Scopes,
    Visitor,
)
from mpx._recognise._terms import Level, Term, live_equations

Value = tuple[Any, Fact]
Run = Callable[[Any, Op, Callable[[Term], Value]], Outcome]
"""Takes the visitor, the equation and a function from a term to its value and its fact."""


def replacement(level: Level, terms: Sequence[Term], run: Run) -> Replacement:
    """Returns what replaces an equation, from a function of the values of terms.

    Args:
        level: The outermost level.
        terms: The terms that `run` reads. Those inside calls are computed when they are
            read, by the visitor; those of the level itself are there already.
        run: Computes the results of the equation.
    """
    atoms: dict[Any, None] = {}
    waiting, seen = list(terms), set()
    while waiting:
        term = waiting.pop()
        if id(term) in seen or isinstance(term.atom, Literal):
            continue
        seen.add(id(term))
        if term.level is level:
            atoms[term.atom] = None
        else:
            waiting.extend(term.operands)

    def call(visitor: Visitor, op: Op) -> Outcome:
        pairs = zip(op.values, op.facts, strict=True)
        known: dict[Any, Value] = dict(zip(atoms, pairs, strict=True))
        scopes = op.scopes[: len(op.scopes) - len(scopes_of(op.eqn))]
        return run(visitor, op, lambda term: value_of(visitor, scopes, term, known))

    return Replacement(list(atoms), call)


def value_of(
    visitor: Visitor, scopes: Scopes, term: Term, known: dict[Any, Value]
) -> Value:
    """Returns the value of a term and its fact, computed from those that are known.

    What is computed is added to `known`: by variable at the outermost level, by the `id` of
    the term inside calls.
    """
    atom = term.atom
    if isinstance(atom, Literal):
        return atom.val, visitor.literal_fact(atom)
    key = atom if term.level.caller is None else id(term)
    if key not in known:
        if term.eqn is None:
            const = term.level.consts[atom]
            known[key] = const, visitor.constant_fact(const)
        else:
            pairs = [value_of(visitor, scopes, x, known) for x in term.operands]
            values, facts = [x for x, _ in pairs], [x for _, x in pairs]
            with equation_context(term.eqn):
                op = Op(term.eqn, values, facts, scopes_inside(term, scopes))
                outs, facts = visitor.equation(op)
            place = next(i for i, x in enumerate(term.eqn.outvars) if x is atom)
            known[key] = outs[place], facts[place]
    return known[key]


def scopes_inside(term: Term, scopes: Scopes) -> Scopes:
    """Returns the named scopes around the equation of a term.

    Args:
        term: The term.
        scopes: The named scopes around the outermost level.
    """
    found: Scopes = () if term.eqn is None else scopes_of(term.eqn)
    caller = term.level.caller
    while caller is not None:
        level, call = caller
        found, caller = scopes_of(call) + found, level.caller
    return scopes + found


def plan_with(jaxpr: Jaxpr, replaced: Mapping[int, Replacement]) -> Plan | None:
    """Returns a plan with these replacements, in which nothing runs that nobody reads."""
    if not replaced:
        return None

    def atoms(index: int) -> Sequence[Any] | None:
        found = replaced.get(index)
        return None if found is None else found.atoms

    live = set(map(id, live_equations(jaxpr, atoms)))
    dead = (i for i, eqn in enumerate(jaxpr.eqns) if id(eqn) not in live)
    return Plan(dict(replaced), frozenset(dead))
