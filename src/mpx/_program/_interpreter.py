"""The interpreter: evaluates a jaxpr again, equation by equation.

A `Visitor` decides what becomes of each equation. Beside each value it keeps a fact: what it
knows of that value.
"""

import contextlib
import dataclasses
import functools
import typing
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._casting._context import AMP_SCOPE
from mpx._casting._keep import scopes_around
from mpx._jax._compat import (
    Literal,
    ambient_scopes,
    convert_dtype,
    open_jaxpr,
    scopes_of,
    source_context,
    source_frames,
)
from mpx._jax._frameworks import Named
from mpx._jax._tree import LeafName
from mpx._program._flow import loop_carry
from mpx._program._queries import (
    Equation,
    Position,
    leaves,
    readers,
    variables,
    walk,
)

Jaxpr = Any  # open or closed
Aval = Any  # the type of a value: shape, dtype, sharding
Scopes = tuple[str, ...]  # names of `jax.named_scope`s, outermost first
Dtypes = tuple[PyTree, ...]  # a dtype per value; `None` where a value keeps its own
Fact = Any  # the knowledge of a visitor about a value: hashable, of any type
Values = list[PyTree]
Facts = list[Fact]
Outcome = tuple[Values, Facts]  # the results of an equation, and what is known of each
Kind = typing.Literal["operand", "slice", "carry", "tangent"]
"""How a nested jaxpr gets a value: as it is (also as a carry that a loop returns unchanged),
one slice or shard of it, as a loop carry that changes, or as a tangent of it."""


class Op(NamedTuple):
    """An equation, the values of its operands, what is known of these, and its scopes."""

    eqn: Equation
    values: Values
    facts: Facts
    scopes: Scopes


class Replacement(NamedTuple):
    """What is run instead of an equation and of those that only it needs."""

    atoms: Sequence[PyTree]  # The variables whose values it needs
    # Takes the visitor and the equation with these values as its operands; returns the
    # results of the equation
    run: Callable[["Visitor", Op], Outcome]


class Plan(NamedTuple):
    """Which equations of a jaxpr are replaced and which are not run, by position."""

    replaced: dict[int, Replacement]
    dead: frozenset[int]


@dataclasses.dataclass(eq=False)
class Frame:
    """One evaluation of a jaxpr: the value and the fact of each variable in `env`.

    In `made` a visitor keeps what it derived from these values, by their `id`, beside the
    value: as long as that is kept, so is its `id`. Values of another jaxpr belong to another
    trace and must not be found here.
    """

    jaxpr: Jaxpr = None
    plan: Plan | None = None
    eqn: Equation = None  # whose turn it is
    layout: Any = None  # what a visitor plans before it starts
    env: dict[Any, tuple[PyTree, PyTree]] = dataclasses.field(default_factory=dict)
    made: dict[Any, tuple[PyTree, PyTree]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def primitives(self) -> frozenset[str]:
        """The names of the primitives in the jaxpr and in what it calls, without calls."""
        return frozenset([eqn.primitive.name for eqn in leaves(self.jaxpr.eqns)])

    @functools.cached_property
    def readers(self) -> dict[Any, list[tuple[Equation, int]]]:
        """The equations that read a variable, and the position of the operand."""
        return readers(self.jaxpr.eqns)


@dataclasses.dataclass(eq=False, kw_only=True)
class Visitor:
    """One evaluation of a function, and what is done with its equations.

    A subclass defines `equation`. For an equation that holds jaxprs it may call the handler
    of that primitive in `mpx._program.HANDLERS`, which rebuilds it around bodies that were
    visited in turn. The other methods tell the handlers what they need to know.
    """

    unknown: ClassVar[Fact] = None  # The fact of a value of which nothing is known

    # Rewritten jaxprs with their results' facts, by what they were made from, with the
    # notes in `found` and a weak reference to the original
    cache: dict[Any, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Hashable notes about the whole function; a cached body restores its own
    found: set[Any] = dataclasses.field(default_factory=set)
    # The variables of what is visited, of which the frames are parts
    around: frozenset[Any] = dataclasses.field(default=frozenset(), init=False)
    # The evaluation that is running
    frame: Frame = dataclasses.field(default_factory=Frame, init=False)
    # Whether a loop carry may have another dtype than in the original
    narrow_carry: bool = False

    def equation(self, op: Op) -> Outcome:
        """Runs one equation; returns its results and what is known of them."""
        raise NotImplementedError

    def literal_fact(self, atom: Any) -> Fact:
        """Returns what is known of a number that is written into a jaxpr."""
        return self.unknown

    def constant_fact(self, value: PyTree) -> Fact:
        """Returns what is known of an array that the function closes over."""
        return self.unknown

    def fact_inside(self, fact: Fact, var: Any, kind: Kind) -> Fact:
        """Returns what is known of an input of a nested jaxpr, from that of the operand."""
        return self.unknown

    def facts_inside(
        self, facts: Sequence[Fact], variables: Sequence[PyTree], kind: Kind
    ) -> Facts:
        """Returns what is known of several inputs of a nested jaxpr."""
        pairs = zip(facts, variables, strict=True)
        return [self.fact_inside(fact, var, kind) for fact, var in pairs]

    def carried_facts(self, eqn: Equation, facts: Facts) -> Facts:
        """Returns what is known, in each step of a loop, of what it carries."""
        body = open_jaxpr(eqn.params.get("jaxpr", eqn.params.get("body_jaxpr")))[0]
        carry, start = loop_carry(eqn)
        triples = zip(
            facts[start:][carry], body.invars[carry], body.outvars, strict=False
        )
        return [
            self.fact_inside(fact, var, "operand" if out is var else "carry")
            for fact, var, out in triples
        ]

    def result_facts(self, outs: Sequence[PyTree], known: Facts) -> Facts:
        """Returns what is known of the results of a loop, a branch or another body."""
        return [self.unknown] * len(outs)

    def join_facts(self, facts: Facts) -> Fact:
        """Returns what is known of a value that is one of several."""
        return facts[0] if len(set(facts)) == 1 else self.unknown

    def scopes_inside(self, eqn: Equation, scopes: Scopes) -> Scopes:
        """Returns the scopes of the jaxprs that an equation holds, given its own."""
        return scopes

    def more_inputs(self, op: Op) -> PyTree:
        """Returns arrays that the body of an equation needs besides its operands.

        Those of a scan are sliced, like its operands.
        """
        return None

    def inside(
        self, eqn: Equation, more: PyTree
    ) -> contextlib.AbstractContextManager[None]:
        """Enters the body of an equation with the values of `more_inputs` in its trace."""
        return contextlib.nullcontext()

    def cache_key(self, eqn: Equation, more: PyTree) -> Hashable | None:
        """Returns what else a rewritten body depends on; `None` to rewrite it anew."""
        return ()

    def tracing(self) -> contextlib.AbstractContextManager[object]:
        """Enters the context in which the user's derivative rules are traced."""
        return contextlib.nullcontext()

    def prepared(self, jaxpr: Jaxpr, scopes: Scopes) -> Jaxpr:
        """Returns what is evaluated instead of an open jaxpr."""
        return jaxpr

    def plan(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[PyTree],
        facts: Sequence[Fact],
        scopes: Scopes,
    ) -> Plan | None:
        """Returns what is recognised in a jaxpr and run in another way, if anything is."""
        return None

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[PyTree],
        args: Sequence[PyTree],
        facts: Sequence[Fact],
        scopes: Scopes,
    ) -> Outcome:
        """Evaluates a jaxpr; returns its results and what is known of them."""
        self.around = self.around or frozenset(variables(jaxpr))
        outer, self.frame = self.frame, Frame(self.prepared(jaxpr, scopes))
        jaxpr = self.frame.jaxpr
        try:
            self.frame.plan = self.plan(jaxpr, consts, facts, scopes)
            env = self.frame.env
            for var, const in zip(jaxpr.constvars, consts, strict=True):
                env[var] = const, self.constant_fact(const)
            env.update(zip(jaxpr.invars, zip(args, facts, strict=True), strict=True))
            self.run_equations(scopes)
            results = [self.read(atom) for atom in jaxpr.outvars]
            return [value for value, _ in results], [fact for _, fact in results]
        finally:
            self.frame = outer

    def run_equations(self, scopes: Scopes) -> None:
        """Runs the equations of the running evaluation, in which `scopes` are around it."""
        dead = self.frame.plan.dead if self.frame.plan is not None else ()
        for index in range(len(self.frame.jaxpr.eqns)):
            if index not in dead:
                self.run_equation(index, scopes)

    def run_equation(self, index: int, scopes: Scopes) -> None:
        """Runs an equation, or what replaces it, and keeps its results in the frame."""
        eqn = self.frame.eqn = self.frame.jaxpr.eqns[index]
        other = self.frame.plan and self.frame.plan.replaced.get(index)
        pairs = [self.read(x) for x in (other.atoms if other else eqn.invars)]
        values, facts = [x for x, _ in pairs], [x for _, x in pairs]
        op = Op(eqn, values, facts, scopes + scopes_of(eqn))
        with source_context(eqn), eqn.ctx.manager:
            outs, known = other.run(self, op) if other else self.equation(op)
        results = zip(outs, known, strict=True)
        self.frame.env.update(zip(eqn.outvars, results, strict=True))

    def read(self, atom: Any) -> tuple[Any, Fact]:
        """Returns a value of the running evaluation, and what is known of it."""
        if isinstance(atom, Literal):
            return atom.val, self.literal_fact(atom)
        return self.frame.env[atom]


def visit(
    visitor: Visitor,
    op: Op,
    jaxpr: Jaxpr,
    args: Sequence[PyTree],
    facts: Sequence[Fact],
    *,
    more: PyTree = None,
) -> Outcome:
    """Runs a nested jaxpr in the trace that is running; returns arrays and their facts."""
    body, consts = open_jaxpr(jaxpr)
    scopes = visitor.scopes_inside(op.eqn, op.scopes)
    with visitor.inside(op.eqn, more):
        outs, known = visitor.run(body, consts, args, facts, scopes)
    return as_results(outs, body.outvars), known


def rewrite(
    visitor: Visitor,
    op: Op,
    jaxpr: Jaxpr,
    avals: Sequence[Aval],
    facts: Sequence[Fact],
    *,
    more: PyTree = None,
    dtypes: Dtypes | None = None,
) -> tuple[Jaxpr, Facts]:
    """Returns a nested jaxpr after the visitor has been through it, and its results' facts.

    It is cached, so that several calls of one layer stay calls of one function, and
    forgotten with the jaxpr that it was made from: both hold arrays that were closed over.
    """
    cache, scopes = visitor.cache, visitor.scopes_inside(op.eqn, op.scopes)
    arrays, structure = jax.tree.flatten(more)
    more_types = [jax.typeof(x) if isinstance(x, jax.Array) else x for x in arrays]
    types = (*avals, *more_types)
    local = visitor.cache_key(op.eqn, more)
    key = (id(jaxpr), types, structure, tuple(facts), scopes, dtypes, local)
    if local is not None and key in cache:
        result, found, _ = cache[key]
        visitor.found |= found
        return result
    known: Facts = []

    def run(*args: PyTree) -> Values:
        args, rest = args[: len(avals)], args[len(avals) :]
        more = jax.tree.unflatten(structure, rest)
        outs, known[:] = visit(visitor, op, jaxpr, args, facts, more=more)
        return outs if dtypes is None else cast_all(outs, dtypes)

    new = jax.make_jaxpr(run)(*types)
    if local is not None:
        source = weakref.ref(jaxpr, lambda _: cache.pop(key, None))
        cache[key] = (new, known), frozenset(visitor.found), source
    return new, known


def as_results(
    outs: Sequence[PyTree], variables: Sequence[PyTree], dtypes: Dtypes | None = None
) -> list[PyTree]:
    """Returns results as arrays, also those that are literals, in the given dtypes."""
    pairs = zip(outs, [var.aval for var in variables], strict=True)
    arrays = [
        x if isinstance(x, jax.Array) else _constant(x, aval) for x, aval in pairs
    ]
    return arrays if dtypes is None else cast_all(arrays, dtypes)


def _constant(value: PyTree, aval: Aval) -> PyTree:
    """Returns a literal as an array of its type; a weak one only a Python number makes."""
    if getattr(aval, "weak_type", False):
        return jnp.asarray(np.asarray(value).item())
    return jnp.asarray(value, aval.dtype)


def function_of(
    func: Callable[..., PyTree], args: Sequence[PyTree], free: Sequence[int]
) -> tuple[Callable[..., PyTree], Values]:
    """Returns a function of some of its arguments, with the others fixed, and the former."""

    def call(*chosen: PyTree) -> PyTree:
        replaced = dict(zip(free, chosen, strict=True))
        return func(*[replaced.get(i, x) for i, x in enumerate(args)])

    return call, [args[i] for i in free]


def cast_all(values: Sequence[PyTree], dtypes: Dtypes) -> list[PyTree]:
    """Casts each value to its dtype; `None` leaves it alone."""
    return [
        x if dtype is None or x.dtype == dtype else convert_dtype(x, dtype)
        for x, dtype in zip(values, dtypes, strict=True)
    ]


def as_array(x: PyTree) -> PyTree:
    """Returns an array that JAX primitives take: literals are not arrays."""
    return x if hasattr(x, "aval") else jnp.asarray(x)


def arrays_of(values: Sequence[PyTree]) -> list[PyTree]:
    """Returns values as arrays."""
    return [as_array(value) for value in values]


def types_of(values: Sequence[PyTree]) -> list[Aval]:
    """Returns the types of arrays."""
    return [jax.typeof(value) for value in values]


def dtypes_of(avals: Sequence[Aval]) -> Dtypes:
    """Returns dtypes; `None` for what has none, such as a reference."""
    return tuple([getattr(aval, "dtype", None) for aval in avals])


def with_dtype(aval: Aval, dtype: np.dtype | None) -> Aval:
    """Returns a type with another dtype."""
    if dtype is None or aval.dtype == dtype:
        return aval
    return aval.update(dtype=dtype, weak_type=False)


class Traced(NamedTuple):
    """A function of arrays that has been traced."""

    jaxpr: Jaxpr  # The jaxpr, open
    consts: Sequence[PyTree]  # Its constants
    arrays: list[PyTree]  # Its arguments
    named: list[Named]  # Their names, and which of them are parameters
    has_params: bool  # Not while Linen initialises a model

    def named_arrays(self) -> list[tuple[LeafName, PyTree]]:
        """Returns the arguments with their names."""
        pairs = zip(self.named, self.arrays, strict=True)
        return [(name, array) for (name, _), array in pairs]

    def places(self) -> tuple[set[str], set[str]]:
        """Returns the paths of its scopes, and the names of the functions that wrote it."""
        scopes: set[str] = set()
        functions: set[str] = set()
        for here in walk(self.jaxpr, Position(scopes=ambient_scopes())):
            inner = here.scopes
            scopes.update("/".join(inner[:n]) for n in range(1, len(inner) + 1))
            functions.update(name for name, _, _ in source_frames(here.eqn))
        return scopes, functions


@dataclasses.dataclass(eq=False, kw_only=True)
class Transformation(Visitor):
    """A visitor that functions are called through."""

    # The positions or names of the arguments that hold parameters; `None` to find them
    params: tuple[int | str, ...] | None = None
    # By `id`: an f32 array that was widened for the call, and the one of 16 bits
    stored: dict[int, tuple[PyTree, PyTree]] = dataclasses.field(default_factory=dict)
    # Whether parameters of 16 bits are read as f32
    widens_params: ClassVar[bool] = False
    # Whether an array is the parameters if it comes first and there is no container
    takes_bare_params: ClassVar[bool] = False

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return ()

    def argument_fact(self, name: LeafName, is_param: bool, leaf: PyTree) -> Fact:
        """Returns what is known of an argument's array."""
        return self.unknown

    def start(self, traced: Traced) -> Traced:
        """Looks at the function before it is run; may return another one to run."""
        return traced

    def run_traced(self, traced: Traced) -> list[PyTree]:
        """Runs a traced function; its results have their own dtypes."""
        jaxpr, consts, arrays, named, _ = traced
        facts = [
            self.argument_fact(*x, leaf) for x, leaf in zip(named, arrays, strict=True)
        ]
        scopes = tuple(x for x in scopes_around() if x != AMP_SCOPE)  # its own
        outs, _ = self.run(jaxpr, consts, arrays, facts, scopes)
        dtypes = dtypes_of([var.aval for var in jaxpr.outvars])
        return as_results(outs, jaxpr.outvars, dtypes)

    def finish(self, outs: list[PyTree]) -> list[PyTree]:
        """Returns the results for the user."""
        return outs
