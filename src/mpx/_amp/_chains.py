"""Chains of operations on single numbers, such as `jax.nn.gelu`.

The backward pass of gelu needs its operand, its tanh or erf, and its result: three arrays
that are kept. A chain keeps its 16-bit operand and its result, and is computed again.
Inside it computes in f32, where a power that overflows f16 does not.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from mpx._amp._decide import Choice
from mpx._amp._facts import DATA, F32, LOW_DTYPES, Settings, cast, is_eligible
from mpx._amp._hints import run_pointwise
from mpx._amp._rules import COMPARED, Rule, rule_for
from mpx._jax._compat import Literal, eval_jaxpr, jaxpr_of, scoped_inside, scopes_of
from mpx._jax._formats import FORMATS
from mpx._program._flow import Flow, after, propagate
from mpx._program._interpreter import Frame, Op, Outcome, Scopes, Values
from mpx._program._queries import CALLS, Equation, Position, leaves, names, walk_inside

_IN_F32 = "in f32, and again in the backward pass"
_AGAIN = "computed again in the backward pass, which keeps its operand only"
# The largest absolute value of their results.
_BOUNDED = {**dict.fromkeys(names("tanh logistic erf sin cos"), 1.0), "erfc": 2.0}
# What XLA holds too expensive to compute a second time by itself.
_EXPENSIVE = frozenset(names("tanh erf erfc log1p expm1 atan cbrt"))
_SAME = frozenset(
    names("neg abs copy reshape squeeze expand_dims transpose broadcast_in_dim")
    + names("stop_gradient convert_element_type")
)
_POINTWISE = frozenset(
    names("integer_pow exp log sqrt rsqrt mul div add sub max min")
).union(_BOUNDED, _EXPENSIVE, _SAME)
CURVED = _EXPENSIVE | {"integer_pow"}
_FLOATS = frozenset((F32, *LOW_DTYPES))
_CHAINS = object()  # where a frame keeps the chains of its jaxpr


class Chain(NamedTuple):
    """Equations whose operands are one value and each other's results."""

    source: Any  # The value from which all of them are computed
    equations: list[Equation]
    outvars: list[Any]  # The results that others read
    leaves: list[Equation]  # The same, with those inside calls in place of the calls

    def has_region(self, amp: Settings, scopes: Scopes) -> bool:
        """Returns whether a scope has a rule for one of the equations or inside them."""
        around = Position(scopes=scopes)
        places = [around.at(eqn) for eqn in self.equations]
        inner = (x for here in places for x in (here, *walk_inside(here)))
        return any(amp.region_rule(x.eqn, x.scopes) for x in inner)


def run_chain(amp: Settings, op: Op) -> tuple[Choice, Outcome] | None:
    """Runs an equation that is part of a chain; returns `None` if it is not.

    The first equation computes the whole chain, for the others to find.
    """
    eqn, made, choice = op.eqn, amp.frame.made, Choice("chain")
    if _CHAINS not in made:
        made[_CHAINS] = _find_chains(amp.frame), None
    if not eqn.outvars or eqn.outvars[0] not in made:
        chain: Chain | None = made[_CHAINS][0].get(id(eqn))
        if chain is None or not _pays(amp, op, chain):
            return None
        if chain.has_region(amp, op.scopes[: len(op.scopes) - len(scopes_of(eqn))]):
            return None
        is_low = _held_low(amp, chain) if is_eligible(chain.source.aval) else None
        choice = Choice("chain", Rule.FOLLOW, _AGAIN)
        if is_low is not None and _overflows(amp, chain):
            choice = Choice("chain", Rule.F32, f"overflows f16: {_IN_F32}")
        elif is_low is not None and not all(is_low):
            choice = Choice("chain", Rule.F32, _IN_F32)
        _compute(amp, op, chain, is_low)
    out, fact = made[eqn.outvars[0]]
    return choice, ([out], [fact])


def _find_chains(frame: Frame) -> dict[int, Chain]:
    """Returns the chains of a jaxpr by the `id` of their first equation."""
    source_of: dict[Any, Any] = {}
    members: dict[Any, list[Equation]] = {}
    for eqn in frame.jaxpr.eqns:
        dtypes = _dtypes(eqn)
        if dtypes is None:
            continue
        read = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        sources = {source_of.get(atom, atom) for atom in read}
        if len(sources) != 1:
            continue
        source = sources.pop()
        # What is f32 as it is written is held in 16 bits; casts are for 16-bit values.
        if is_eligible(source.aval) and dtypes - {F32}:
            continue
        source_of[eqn.outvars[0]] = source
        members.setdefault(source, []).append(eqn)
    # What is run in the place of equations may read other values than these.
    replaced = frame.plan.replaced.values() if frame.plan is not None else ()
    kept = {x for x in frame.jaxpr.outvars if not isinstance(x, Literal)}
    kept.update(atom for x in replaced for atom in x.atoms)
    chains = {}
    for source, chain in members.items():
        inner, inside = [*leaves(chain)], set(map(id, chain))
        if CURVED.isdisjoint(eqn.primitive.name for eqn in inner):
            continue
        outvars = [
            var
            for eqn in chain
            for var in eqn.outvars
            if var in kept
            or any(id(reader) not in inside for reader, _ in frame.readers.get(var, ()))
        ]
        chains[id(chain[0])] = Chain(source, chain, outvars, inner)
    return chains


def _dtypes(eqn: Equation) -> set[np.dtype] | None:
    """Returns the dtypes in an equation on single float numbers, one by one, else `None`."""
    found: set[np.dtype] = set()
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or (name not in _POINTWISE and name not in CALLS):
        return None
    for leaf in leaves([eqn]):
        if leaf.primitive.name not in _POINTWISE:
            return None
        found.update(x.aval.dtype for x in (*leaf.invars, *leaf.outvars))
    return found if found <= _FLOATS else None


def _pays(amp: Settings, op: Op, chain: Chain) -> bool:
    """Returns whether a chain is needed, or keeps fewer values than its equations do.

    Where its result is kept as well, for a product with another value, the two keep the
    same. Who reads the result does not decide: a jitted function does not know.
    """
    value = op.values[op.eqn.invars.index(chain.source)]
    if getattr(value, "dtype", None) not in LOW_DTYPES:
        return False
    if is_eligible(chain.source.aval) and _overflows(amp, chain):
        return True
    found = {eqn.primitive.name for eqn in chain.leaves}
    is_expensive = len(found - _SAME) > 1 and not _EXPENSIVE.isdisjoint(found)
    return is_expensive and len(chain.outvars) == 1


def _overflows(amp: Settings, chain: Chain) -> bool:
    return amp.dtype == np.float16 and any(
        eqn.primitive.name == "integer_pow" and eqn.params["y"] > 2
        for eqn in chain.leaves
    )


def _held_low(amp: Settings, chain: Chain) -> list[bool]:
    """Returns which results are held in 16 bits: by their rules, and if they fit there."""
    for eqn in chain.leaves:
        rule = rule_for(eqn.primitive.name, eqn.params, compute_is_f16=False)
        is_low = rule in (Rule.FOLLOW, Rule.WIDEST)
        if eqn.primitive.name not in _BOUNDED and not is_low:
            return [False] * len(chain.outvars)
    jaxpr = jaxpr_of([chain.source], chain.outvars, chain.equations)
    held = [not x for x in _guarded(amp, chain, jaxpr)]
    if amp.dtype != np.float16:
        return held
    largest = FORMATS["f16"].max
    sizes = Flow(_bound).run(jaxpr, {chain.source: largest})
    return [x and size <= largest for x, size in zip(held, sizes, strict=True)]


def _guarded(amp: Settings, chain: Chain, jaxpr: Any) -> list[bool]:
    """Returns which results are cut off at a number that 16 bits would make another one."""
    literal = lambda atom: amp.literal_fact(atom).literal  # noqa: E731

    def rule(eqn: Equation, known: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        is_cut = name in COMPARED and "rounded" in known
        return [is_cut or (True in known and name in _SAME | COMPARED)]

    def each(eqn: Equation, known: list[Any]) -> Sequence[Any]:
        return after(eqn, known, rule, literal)

    labels: dict[Any, Any] = {chain.source: False}
    return propagate(jaxpr, labels, each, literal)


def _bound(name: str, eqn: Equation, known: list[Any]) -> float:
    """Returns the largest absolute value of a result, from those of the operands."""
    sizes = [math.inf if size is None else size for size in known]
    for i, atom in enumerate(eqn.invars):
        sizes[i] = abs(float(atom.val)) if isinstance(atom, Literal) else sizes[i]
    if name in _BOUNDED:
        return _BOUNDED[name]
    if name in ("add", "sub"):
        return sum(sizes)
    if name == "mul":
        return math.prod(sizes)
    if name == "integer_pow" and eqn.params["y"] > 0:
        try:
            return sizes[0] ** eqn.params["y"]
        except OverflowError:
            return math.inf
    return max(sizes) if name in _SAME or name in ("max", "min") else math.inf


def _compute(amp: Settings, op: Op, chain: Chain, is_low: list[bool] | None) -> None:
    """Computes a chain from a 16-bit value; `is_low` is `None` if it is f32 nowhere."""
    made, key = amp.frame.made, (_signature(chain), amp.dtype)
    if key not in made:
        # Layers that are alike share a function, which JAX traces once.
        made[key] = _function_of(chain, is_low, amp.dtype), None
    place = op.eqn.invars.index(chain.source)
    outs = made[key][0](op.values[place])
    fact = op.facts[place]._replace(leaf=None, literal=None)
    # What only the chain itself reads has no value outside.
    made.update((x.outvars[0], (None, DATA)) for x in chain.equations)
    made.update((x, (out, fact)) for x, out in zip(chain.outvars, outs, strict=True))


def _signature(chain: Chain) -> Hashable:
    """Returns something that is equal for chains that compute the same."""
    made = [chain.source, *(eqn.outvars[0] for eqn in chain.equations)]
    number = {var: i for i, var in enumerate(made)}

    def wire(atom: Any) -> Hashable:
        is_literal = isinstance(atom, Literal)
        return (str(atom.val), str(atom.aval)) if is_literal else number[atom]

    steps = [
        (eqn.primitive, *eqn.params.items(), *map(wire, eqn.invars))
        for eqn in chain.equations
    ]
    return (str(chain.source.aval), *steps, *map(wire, chain.outvars))


def _function_of(
    chain: Chain, is_low: list[bool] | None, dtype: np.dtype
) -> Callable[[Any], Values]:
    # It runs in the scopes of its first equation, which would count twice.
    equations = [scoped_inside(eqn, chain.equations[0]) for eqn in chain.equations]
    jaxpr = jaxpr_of([chain.source], chain.outvars, equations)

    @jax.checkpoint
    def compute(low: Any) -> Values:
        low = _rounding_cotangents(low)
        if is_low is None:
            return eval_jaxpr(jaxpr, (), low)
        outs = run_pointwise(jaxpr, cast(low, F32))
        pairs = zip(outs, is_low, strict=True)
        return [cast(out, dtype) if fits else out for out, fits in pairs]

    return compute


@jax.custom_jvp
def _rounding_cotangents(low: Any) -> Any:
    """Returns a 16-bit value, whose cotangent is made as an array of 16 bits.

    A bias sums that cotangent in f32. XLA would leave out the rounding between, write the
    cotangent in f32 for the sum, read that, and write it once more in 16 bits for the
    matmuls: on ViT-Base 5.6 GB of traffic a step.
    """
    return low


@_rounding_cotangents.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return primals[0], lax.optimization_barrier(tangents[0])
