"""Questions about jaxprs: which equations they hold, how often these run, and their cost."""

import collections
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar
from typing import Literal as OneOf

from jaxtyping import PyTree

from mpx._jax._compat import (
    JAXPRS,
    Literal,
    Var,
    hi_jaxpr,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scopes_of,
    source_frames,
)
from mpx._program._primitives import TABLE, that

T = TypeVar("T")

Equation = Any
"""An equation of a jaxpr; JAX has no public type for it."""


def names(text: str) -> tuple[str, ...]:
    """Returns the words of a text, for tables of primitives."""
    return tuple(text.split())


MATMULS = next(row.names for row in TABLE if row.rule == "low")
ATTENTION = {
    "cudnn_attention": 2,
    "cudnn_attention_backward": 5,
    "cudnn_attention_tangent": 6,
}
"""The primitives of `mpx._ops._attention`, and the number of matmuls in each."""
CROSS_ENTROPY = names(
    "linear_cross_entropy linear_cross_entropy_tangent linear_cross_entropy_backward"
)
"""The primitives of `mpx._ops._cross_entropy`."""
GROUPED = "grouped_matmul"
"""The primitive of `mpx._ops._experts`."""
MULTIPLIES = frozenset((*MATMULS, *ATTENTION, *CROSS_ENTROPY, GROUPED))

SHAPE_ONLY = that("same")
"""The same numbers in another shape, order or place."""
MOVES = that("same", "moves")
"""The same numbers, or some of them, possibly rounded."""
HI_PRIMITIVE = "call_hi_primitive"
"""High-level operations of JAX 0.12, which say themselves what they compute."""
REMAT = names("checkpoint remat2 remat")
LOOPS = ("scan", "while")
CALLS = ("jit", "pjit", "closed_call", *REMAT)
CUSTOM = names("custom_jvp_call custom_vjp_call")


def sub_jaxprs(eqn: Equation) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters, for this package alone."""
    if eqn.primitive.name == HI_PRIMITIVE and (found := hi_jaxpr(eqn)) is not None:
        yield open_jaxpr(found)[0]
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, JAXPRS):
                yield open_jaxpr(item)[0]


def variables(jaxpr: Any) -> Iterator[Any]:
    """Yields the variables of an open jaxpr and of those inside it, without constants."""
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for inner in sub_jaxprs(eqn):
            yield from variables(inner)


def called(eqn: Equation) -> PyTree:
    """Returns the jaxpr that an equation calls with its operands as they are, if any."""
    inner = [x for x in eqn.params.values() if isinstance(x, JAXPRS)]
    if eqn.primitive.name == HI_PRIMITIVE:
        return hi_jaxpr(eqn)
    if len(inner) == 1 and primitive_name(eqn) not in LOOPS:
        body = open_jaxpr(inner[0])[0]
        sizes = len(body.invars), len(body.outvars)
        return inner[0] if sizes == (len(eqn.invars), len(eqn.outvars)) else None
    return None


def inlined(jaxpr: Any, is_chosen: Callable[[Equation], bool]) -> Any:
    """Returns an open jaxpr with what the chosen equations call as a part of it.

    What closes over arrays of its own stays a call.
    """
    if not any(map(is_chosen, jaxpr.eqns)):
        return jaxpr
    eqns: list[Any] = []

    def add(inner: Any, env: dict[Any, Any], around: Any = None) -> list[Any]:
        known = lambda x: x if isinstance(x, Literal) else env.get(x, x)  # noqa: E731
        for eqn in inner.eqns:
            changes: dict[str, Any] = {"invars": [*map(known, eqn.invars)]}
            info = eqn.source_info
            if around is not None:  # Another call may be of the same jaxpr.
                # JAX's own helpers do not know from where they are called.
                named = info if source_frames(eqn) else around
                stack = around.name_stack + info.name_stack
                info = named.replace(name_stack=stack)
                outs = [Var(x.aval) for x in eqn.outvars]
                changes |= {"outvars": outs, "source_info": info}
            is_same = around is None and changes["invars"] == eqn.invars
            new = eqn if is_same else eqn.replace(**changes)
            results: list[Any] = new.outvars
            body, consts = open_jaxpr(called(eqn)) if is_chosen(new) else (None, ())
            if body is not None and not (consts or body.constvars):
                ins = dict(zip(body.invars, new.invars, strict=True))
                results = add(body, ins, info)
            else:
                eqns.append(new)
            env.update(zip(eqn.outvars, results, strict=True))
        return [*map(known, inner.outvars)]

    return jaxpr.replace(outvars=add(jaxpr, {}), eqns=eqns)


def has_body(eqn: Equation) -> bool:
    """Returns whether an equation holds a jaxpr."""
    return any(True for _ in sub_jaxprs(eqn))


class Position(NamedTuple):
    """An equation and what is around it."""

    eqn: Equation = None  # The equation; `None` stands for any equation of a jaxpr
    # The `jax.named_scope`s around it and its own, outermost first
    scopes: tuple[str, ...] = ()
    times: int = 1  # How often it runs: see `repetitions`
    callers: tuple[Equation, ...] = ()  # The equations that hold it, outermost first

    @property
    def backward(self) -> bool:
        """Whether it belongs to a backward pass; equations of a body do not say so."""
        return any(map(is_transposed, (self.eqn, *self.callers)))

    def at(self, eqn: Equation) -> "Position":
        """Returns the position of an equation of this jaxpr."""
        return self._replace(eqn=eqn, scopes=self.scopes + scopes_of(eqn))

    def inside(self) -> "Position":
        """Returns the position of the jaxprs that the equation holds."""
        times = self.times * repetitions(self.eqn)
        return Position(None, self.scopes, times, (*self.callers, self.eqn))


OUTERMOST = Position()


def walk(jaxpr: Any, around: Position = OUTERMOST) -> Iterator[Position]:
    """Yields the positions of the equations of a jaxpr, each before what is inside it."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        here = around.at(eqn)
        yield here
        yield from walk_inside(here)


def walk_inside(here: Position) -> Iterator[Position]:
    """Yields the positions of the equations inside an equation."""
    for body in sub_jaxprs(here.eqn):
        yield from walk(body, here.inside())


def equations(source: Any) -> Iterator[Equation]:
    """Yields the equations of a jaxpr, or inside an equation, and of all jaxprs in them."""
    is_equation = hasattr(source, "primitive")
    for body in sub_jaxprs(source) if is_equation else [open_jaxpr(source)[0]]:
        for eqn in body.eqns:
            yield eqn
            yield from equations(eqn)


def leaves(eqns: Iterable[Equation]) -> Iterator[Equation]:
    """Yields equations, with those inside calls in place of the calls."""
    for eqn in eqns:
        if eqn.primitive.name in CALLS:
            for body in sub_jaxprs(eqn):
                yield from leaves(body.eqns)
        else:
            yield eqn


def holds(source: Any, names: Collection[str]) -> bool:
    """Returns whether a jaxpr, or one inside an equation, holds one of these primitives."""
    return any(eqn.primitive.name in names for eqn in equations(source))


def fold(jaxpr: Any, func: Callable[[Any, Callable[[Equation], list[T]]], T]) -> T:
    """Computes something of a jaxpr from the same inside; `func` gets what tells that."""
    body, _ = open_jaxpr(jaxpr)
    return func(body, lambda eqn: [fold(inner, func) for inner in sub_jaxprs(eqn)])


def readers(eqns: Iterable[Equation]) -> dict[Any, list[tuple[Equation, int]]]:
    """Returns, by variable, the equations that read it and the position of the operand."""
    found: dict[Any, list[tuple[Equation, int]]] = {}
    for eqn in eqns:
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                found.setdefault(atom, []).append((eqn, position))
    return found


def last_uses(jaxpr: Any) -> list[list[PyTree]]:
    """Returns, for each equation, the variables that nothing reads after it."""
    seen = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    found: list[list[PyTree]] = []
    for eqn in reversed(jaxpr.eqns):
        atoms = [x for x in eqn.invars if not isinstance(x, Literal)]
        ending = {x for x in (*atoms, *eqn.outvars) if x not in seen}
        seen |= ending
        found.append(list(ending))
    return found[::-1]


Verdict = bool | OneOf["result", "inside"]
"""Whether a use of a value passes, or what decides: the uses of the result or inside."""


def every_use(
    jaxpr: Any,
    var: Any,
    judge: Callable[[Equation, int, tuple[str, ...]], Verdict],
    scopes: tuple[str, ...] = (),
    *,
    once: bool = False,
) -> bool:
    """Returns whether a value is used, is not returned, and each of its uses passes."""
    uses = readers(jaxpr.eqns).get(var, [])
    for eqn, position in uses:
        around = scopes + scopes_of(eqn)
        passes = judge(eqn, position, around)
        if passes == "result":
            passes = every_use(jaxpr, eqn.outvars[0], judge, scopes, once=once)
        elif passes == "inside":
            body = next(sub_jaxprs(eqn))
            passes = every_use(body, body.invars[position], judge, around, once=once)
        if not passes:
            return False
    is_read = len(uses) == 1 if once else bool(uses)
    return is_read and all(atom is not var for atom in jaxpr.outvars)


def repetitions(eqn: Equation) -> int:
    """Returns how often an equation runs its jaxprs; a loop of unknown length counts once."""
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    known = [size for size in grid if isinstance(size, int)]
    return eqn.params.get("length", 1) * math.prod(known)


class Sizes(NamedTuple):
    """Those of matmuls (rows, summed) · (summed, columns); they may be symbols."""

    rows: PyTree
    summed: PyTree
    columns: PyTree
    count: PyTree = 1  # How many of these there are


def matmul_sizes(eqn: Equation) -> Sizes:
    """Returns the sizes of one of `MULTIPLIES`, masked parts included."""
    name, params, out = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
    first, second = (var.aval.shape for var in eqn.invars[:2])
    if name in ATTENTION:
        batch, rows, heads, size = first
        return Sizes(rows, size, second[1], ATTENTION[name] * batch * heads)
    if name in CROSS_ENTROPY:
        head, wrt = params["head"], {*params.get("wrt", ())} & {0, 1}
        # The logits, if they are not kept, and one product for each derivative.
        count = len(wrt) + (head.kept is None or not wrt)
        return Sizes(count * math.prod(first[:-1]), first[-1], second[head.vocab_axis])
    if name == GROUPED:
        # Each row is multiplied with one matrix, or added to one.
        summed, rows = first if params["kind"] == "sums" else first[::-1]
        return Sizes(rows, summed, out[-1])
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = params["dimension_numbers"] if ragged is None else ragged
    if name == "conv_general_dilated":
        results, kernel = list(out), list(second)
        columns = results.pop(numbers.out_spec[1])
        del kernel[numbers.rhs_spec[0]]
        return Sizes(math.prod(results), math.prod(kernel), columns)
    axes, batch = getattr(numbers, "dot_dimension_numbers", numbers)
    summed = math.prod([first[axis] for axis in axes[0]])
    if name != "dot_general":
        # Each row belongs to one group; a sum over rows has a result for each group.
        is_sum = ragged is not None and {*ragged.lhs_ragged_dimensions} & {*axes[0]}
        return Sizes(math.prod(out[1:-1] if is_sum else out[:-1]), summed, out[-1])
    rows, columns = [
        math.prod([size for i, size in enumerate(shape) if i not in (*one, *same)])
        for shape, one, same in zip((first, second), axes, batch, strict=True)
    ]
    return Sizes(rows, summed, columns, math.prod([first[axis] for axis in batch[0]]))


def flops(eqn: Equation) -> int:
    """Returns two operations per multiplication, also of masked parts; 0 without matmuls."""
    return 2 * math.prod(matmul_sizes(eqn)) if eqn.primitive.name in MULTIPLIES else 0


def matmul_flops(
    jaxpr: Any, kind: Callable[[Equation], str]
) -> collections.Counter[str]:
    """Counts the operations of the matmuls of a jaxpr, as often as they run, by kind."""
    total: collections.Counter[str] = collections.Counter()
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in MULTIPLIES:
            total[kind(eqn)] += flops(eqn)
        inner = [matmul_flops(body, kind) for body in sub_jaxprs(eqn)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=collections.Counter.total)]
        for counts in inner:
            for key, number in counts.items():
                total[key] += number * repetitions(eqn)
    return total
