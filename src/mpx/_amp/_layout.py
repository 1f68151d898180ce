"""The layout of a jaxpr: which equations form regions, and which values are stored."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpx._amp._decide import Place, place_of
from mpx._amp._facts import Settings, is_eligible
from mpx._jax._compat import Literal, scopes_of
from mpx._program import HANDLERS
from mpx._program._interpreter import Jaxpr, Plan, Scopes
from mpx._program._primitives import that

_MOVES = that("same") | {"convert_element_type"}
_SCALAR = 8  # bytes


class Layout:
    """The regions and borders of one jaxpr."""

    def __init__(
        self,
        amp: Settings,
        jaxpr: Jaxpr,
        scopes: Scopes,
        plan: Plan | None,
        may_round: Sequence[bool],
    ) -> None:
        """Finds them; `may_round` says which results may be rounded to be returned."""
        self.jaxpr, self.scopes = jaxpr, scopes
        self.replaced, dead = plan or ({}, frozenset())
        self.places: dict[int, Place] = {
            i: "stored"
            if i in self.replaced
            else place_of(amp, eqn, scopes + scopes_of(eqn))
            for i, eqn in enumerate(jaxpr.eqns)
            if i not in dead
        }
        self.maker = {
            var: i
            for i in self.places
            for var in jaxpr.eqns[i].outvars
            if is_variable(var)
        }
        self.readers: dict[Any, list[int]] = {}
        for i in self.places:
            for var in dict.fromkeys(self.atoms(i)):
                self.readers.setdefault(var, []).append(i)
        pairs = zip(jaxpr.outvars, may_round, strict=True)
        self.returned = {var: may for var, may in pairs if is_variable(var)}
        effects = [i for i in self.places if jaxpr.eqns[i].effects]
        # For an effect, the one before.
        self.earlier = dict(zip(effects[1:], effects, strict=False))
        self.reached: dict[Any, Any] = {}  # Values that reach linear algebra
        self.free = self._find_free()
        self.live = self._find_live()
        self._find_stored()

    def atoms(self, index: int) -> list[Any]:
        """Returns the variables that an equation reads."""
        other = self.replaced.get(index)
        atoms = self.jaxpr.eqns[index].invars if other is None else other.atoms
        return [x for x in atoms if is_variable(x)]

    def reading(self, atom: Any) -> Sequence[int]:
        """Returns the equations that read a value."""
        return self.readers.get(atom, ()) if is_variable(atom) else ()

    def _find_free(self) -> set[int]:
        """Finds what each region that reads it makes by itself, since that costs less than reading.

        Such are biases, broadcast over examples, and masks of positions.
        """
        free, base = set[int](), {v: nbytes(v) for v in self.jaxpr.invars}
        base |= {v: nbytes(v) for v in self.jaxpr.constvars}
        for i in self.places:
            eqn, atoms = self.jaxpr.eqns[i], self.atoms(i)
            is_cheap = eqn.primitive.name in _MOVES or not _has_floats(eqn.outvars)
            is_cheap |= all(nbytes(v) <= _SCALAR for v in eqn.outvars)
            if is_cheap and self._is_inside(i) and base.keys() >= {*atoms}:
                size = sum(base[v] for v in atoms)
                if all(nbytes(v) >= size for v in eqn.outvars):
                    free.add(i)
                    base |= dict.fromkeys(eqn.outvars, size)
        return free

    def _find_stored(self) -> None:
        """Finds which values are stored, and the equations that form a region.

        The level of an equation is the number of borders and stored values that lie between
        it and regions behind it. What does not depend on floats may run before all others.
        """
        eqns = self.jaxpr.eqns
        inside = [i for i in self.places if self._is_inside(i) and i not in self.free]
        calls = [i for i in self.places if eqns[i].primitive.name in HANDLERS]
        made = [
            v for i in inside + calls for v in eqns[i].outvars if is_eligible(v.aval)
        ]
        self.stored = {
            v
            for v in made
            if self.returned.get(v)
            or any(self.places[i] == "stored" for i in self.readers.get(v, ()))
        }
        # What runs alone, on f32 numbers, parts regions, and has nothing rounded.
        self.stored |= self._crossing(made, self.stored, ("inside", "alone"))[0]
        _, at = self._crossing(made, self.stored, ("inside",))
        found = joined(
            inside,
            lambda i: (
                j
                for v in eqns[i].outvars
                for j in self.readers.get(v, ())
                if self._is_inside(j) and j not in self.free
                # What has no derivative is a region of its own: masks of random numbers are
                # kept for the backward pass, and these numbers are not.
                if at[j] == at[i] and (i in self.live) == (j in self.live)
            ),
        )
        self.regions = {i: part for part in found for i in part}
        # What is free is of its own where borders read it, too.
        self.regions |= {i: [i] for i in self.free}

    def _find_live(self) -> set[int]:
        """Returns the equations that depend on floats which the jaxpr is given, or on effects."""
        live, found = set[int](), set[Any]()
        found.update(v for v in self.jaxpr.invars if _has_floats([v]))
        found.update(v for v in self.jaxpr.constvars if _has_floats([v]))
        for i in self.places:
            if self.jaxpr.eqns[i].effects or not found.isdisjoint(self.atoms(i)):
                live.add(i)
                found.update(self.jaxpr.eqns[i].outvars)
        return live

    def with_free(self, members: Sequence[int]) -> list[int]:
        """Returns the equations of a region, and what is free and read by them."""
        found, stack = {*members}, [*members]
        while stack:
            makers = (self.maker.get(v) for v in self.atoms(stack.pop()))
            more = {i for i in makers if i in self.free} - found
            found |= more
            stack += more
        return sorted(found)

    def _crossing(
        self, made: Sequence[Any], stored: Set[Any], inside: Sequence[Place]
    ) -> tuple[set[Any], dict[int, int]]:
        """Returns what is read in other regions than its own, and the levels of equations."""
        found = {*stored}
        while True:
            at, level = self._levels(found, inside)
            later = {
                v
                for v in made
                if any(
                    self.places[i] in inside and at[i] != level[v]
                    for i in self.readers.get(v, ())
                )
            } - found
            if not later:
                return found, at
            found |= later

    def _levels(
        self, stored: Set[Any], inside: Sequence[Place]
    ) -> tuple[dict[int, int], dict[Any, int]]:
        """Returns the levels of the equations and of their results."""
        at, level, last = {}, dict[Any, int](), 0
        fresh: set[Any] = set()  # Made inside a region of that very level
        for i in self.places:
            eqn = self.jaxpr.eqns[i]
            atoms = self.atoms(i)
            if i in self.live:
                atoms = [v for v in atoms if self.maker.get(v) in self.live]
            read = [(level.get(v, 0), v in fresh) for v in atoms]
            at[i], is_fresh = max(read, default=(0, False))
            if eqn.effects:
                at[i], is_fresh = max((at[i], is_fresh), (last, False))
                last = at[i] + is_fresh
            is_inside = self.places[i] in inside
            for v in eqn.outvars:
                is_step = not is_inside or v in stored
                level[v] = at[i] + (is_step and (is_fresh or is_inside))
                if not is_step and i not in self.free:
                    fresh.add(v)
        return at, level

    def is_stored(self, var: Any) -> bool:
        """Returns whether a result of a call may be rounded: it is stored, or multiplied."""
        readers = {self.places[i] for i in self.readers.get(var, ())}
        return var in self.stored or readers == {"matmul"}

    def _is_inside(self, index: int) -> bool:
        return self.places[index] == "inside"

    def units(self) -> Iterator[list[int]]:
        """Yields the borders in the order of the program, and each region before its readers.

        A region that nothing reads is left out.
        """
        borders = [i for i in self.places if not self._is_inside(i)]
        outs = [self.maker[v] for v in self.returned if v in self.maker]
        entered, done = set[int](), set[int]()
        for root in (*borders, *outs):
            stack = [root]
            while stack:
                members = self.regions.get(stack[-1], stack[-1:])
                first = members[0]
                if first not in entered:
                    entered.add(first)
                    before = self._before(members)
                    stack += [i for i in reversed(before) if i not in entered]
                    continue
                stack.pop()
                if first not in done:
                    done.add(first)
                    yield members

    def _before(self, members: list[int]) -> list[int]:
        """Returns what has to run before a unit."""
        found = [self.earlier[i] for i in members if i in self.earlier]
        is_region = members[0] in self.regions
        inside = self.with_free(members) if is_region else members
        made = [self.maker[v] for i in inside for v in self.atoms(i) if v in self.maker]
        return found + [i for i in made if i not in inside]


def is_variable(atom: Any) -> bool:
    """Returns whether an atom of a jaxpr is no number that is written into it."""
    return not isinstance(atom, Literal)


def nbytes(var: Any) -> int:
    """Returns how many bytes a value takes; those of a symbol count as very many."""
    size = getattr(var.aval, "size", 0)
    return size * var.aval.dtype.itemsize if isinstance(size, int) else 1 << 60


def _has_floats(variables: Iterable[Any]) -> bool:
    """Returns whether one of some values holds real or complex numbers."""
    dtypes = (getattr(v.aval, "dtype", np.dtype(bool)) for v in variables)
    return any(jnp.issubdtype(x, jnp.inexact) for x in dtypes)


def joined(
    items: Iterable[int], neighbours: Callable[[int], Iterable[int]]
) -> list[list[int]]:
    """Returns the connected parts of a graph of numbers, each in order."""
    parent = {i: i for i in items}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i in parent:
        for j in neighbours(i):
            parent[root(j)] = root(i)
    parts: dict[int, list[int]] = {}
    for i in parent:
        parts.setdefault(root(i), []).append(i)
    return [sorted(part) for part in parts.values()]
