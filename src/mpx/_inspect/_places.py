"""Places of operations: the parameter that one reads, its scope and its source line."""

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple

from mpx._compat import (
    Literal,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
    sub_jaxprs,
)
from mpx._inspect._result import short_source
from mpx._jaxpr._interpreter import Jaxpr, Scopes
from mpx._jaxpr._queries import (
    MATMULS,
    MOVES,
    Equation,
    matmul_flops,
    names,
    repetitions,
)

Frames = Sequence[tuple[str, str, int]]
"""Function, file and line of the code that wrote an equation, from the inside out."""
Name = str | None
"""The parameter that a value is, possibly moved or cast; `None` for any other value."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands in a program.

    Attributes:
        primitive: The name of the operation.
        param: The parameter that it reads, such as `model/layers/0/weight`, or whose
            gradient it computes; "" for none.
        scope: Its `jax.named_scope`s, joined by `/`.
        source: File and line of the code that wrote it.
        function: The name of the function that holds this line.
        backward: Whether it belongs to the backward pass. Its line is then that of the
            operation whose derivative it computes.
    """

    primitive: str
    param: str
    scope: str
    source: str
    function: str
    backward: bool

    @property
    def label(self) -> str:
        """The name by which readers know it: the parameter, else scope, else line."""
        return self.param or self.scope or f"{self.function} ({self.source})"


def place_of(
    eqn: Equation,
    names: Sequence[Name],
    scopes: Scopes = (),
    *,
    backward: bool = False,
    outer: Frames = (),
) -> Place:
    """Returns the place of an equation.

    Args:
        eqn: The equation.
        names: The parameters among its operands.
        scopes: The named scopes around it, its own included.
        backward: Whether the equations around it belong to a backward pass.
        outer: The frames of the equation around it. Inside a jitted function of a library
            JAX has none of the user's.
    """
    frames = frames_of([eqn]) or outer
    function, file, line = frames[0] if frames else ("", "", 0)
    return Place(
        primitive_name(eqn),
        next(filter(None, names), ""),
        "/".join(scopes),
        f"{short_source(file)}:{line}" if frames else "unknown",
        function.rpartition(".")[2],
        backward or is_transposed(eqn),
    )


def frames_of(eqns: Sequence[Equation]) -> Frames:
    """Returns the user's frames of the innermost equation that has some."""
    return next(filter(None, map(source_frames, reversed(eqns))), ())


def name_of_results(eqn: Equation, names: Sequence[Name]) -> Name:
    """Returns the parameter that the results of an equation still are."""
    known = [name for name in names if name]
    moves = primitive_name(eqn) in MOVES
    return known[0] if moves and len(known) == 1 else None


class _Label(NamedTuple):
    """What is known of a value.

    Attributes:
        name: The parameter that it is.
        origin: The parameter from which it is computed number by number, with nothing
            else of its size, as the codes of a quantised weight are.
        is_spread: Whether it is a smaller array that was broadcast, as a scale is.
    """

    name: Name = None
    origin: Name = None
    is_spread: bool = False


class Site(NamedTuple):
    """An equation, its place, and how often it runs: see `repetitions`."""

    eqn: Equation
    place: Place
    times: int


def sites(
    jaxpr: Jaxpr,
    names: Sequence[Name],
    scopes: Scopes = (),
    *,
    made: Sequence[Name] = (),
    backward: bool = False,
    times: int = 1,
    largest: bool = False,
) -> Generator[Site, None, list[Name]]:
    """Yields the equations of a jaxpr and of all jaxprs inside it, with their places.

    An equation that holds jaxprs comes before what is inside it.

    Args:
        jaxpr: The jaxpr.
        names: The parameters among its inputs.
        scopes: The named scopes around it.
        made: The parameters whose gradients its results are.
        backward: Whether it belongs to a backward pass.
        times: How often it runs.
        largest: Whether only that branch of a conditional counts which has most work.

    Returns:
        The parameters among its results.
    """
    labels = [_Label(name, name) for name in names]
    found = yield from _walk(
        jaxpr,
        labels,
        scopes,
        outer=(),
        made=made,
        backward=backward,
        times=times,
        largest=largest,
    )
    return [label.name for label in found]


def _walk(
    jaxpr: Jaxpr,
    labels: Sequence[_Label],
    scopes: Scopes,
    *,
    outer: Frames,
    made: Sequence[Name],
    backward: bool,
    times: int,
    largest: bool,
) -> Generator[Site, None, list[_Label]]:
    body, _ = open_jaxpr(jaxpr)
    env = dict(zip(body.invars, labels, strict=True))
    grads = _gradients(body, made)

    def read(atom: Any) -> _Label:
        return _Label() if isinstance(atom, Literal) else env.get(atom, _Label())

    for eqn in body.eqns:
        known = [read(atom) for atom in eqn.invars]
        operands = [label.name for label in known]
        if primitive_name(eqn) in MATMULS:
            operands += [label.origin for label in known[:2]]
        feeds = [grads.get(var) for var in eqn.outvars]
        around = scopes + scopes_of(eqn)
        place = place_of(eqn, operands, around, backward=backward, outer=outer)
        if place.backward and not place.param:
            place = dataclasses.replace(place, param=next(filter(None, feeds), ""))
        yield Site(eqn, place, times)
        found = _results(eqn, known)
        for inner, inside in _bodies(eqn, known, largest=largest):
            out = yield from _walk(
                inner,
                inside,
                around,
                outer=frames_of([eqn]) or outer,
                made=_made_inside(eqn, feeds),
                backward=place.backward,
                times=times * repetitions(eqn),
                largest=largest,
            )
            if len(out) == len(found) and primitive_name(eqn) not in _LOOPS:
                found = out
        env.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in body.outvars]


def _results(eqn: Equation, labels: list[_Label]) -> list[_Label]:
    """Returns what is known of the results of an equation that holds no jaxpr."""
    name = name_of_results(eqn, [label.name for label in labels])
    if primitive_name(eqn) in MATMULS:
        return [_Label(name)] * len(eqn.outvars)
    sizes = [getattr(atom.aval, "size", 0) for atom in eqn.invars]
    found = []
    for var in eqn.outvars:
        size = getattr(var.aval, "size", 0)
        whole = [
            label
            for label, each in zip(labels, sizes, strict=True)
            if each == size and not label.is_spread
        ]
        origins = {label.origin for label in whole}
        is_spread = size > 1 and not whole
        found.append(
            _Label(name, origins.pop() if len(origins) == 1 else None, is_spread)
        )
    return found


_LOOPS = ("scan", "while")
# The gradient of a parameter passes through these unchanged, but for a sum.
_PASSES = MOVES.union(names("reduce_sum add_any neg psum psum_invariant mul div"))


def _gradients(body: Any, made: Sequence[Name]) -> dict[Any, str]:
    """Returns which values of a jaxpr become the gradient of which parameter."""
    known = {
        var: name
        for var, name in zip(body.outvars, made, strict=False)
        if name and not isinstance(var, Literal)
    }
    for eqn in reversed(body.eqns) if known else ():
        feeds = [known.get(var) for var in eqn.outvars]
        name = next(filter(None, feeds), None)
        if name is None:
            continue
        inner = list(sub_jaxprs(eqn))
        if len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
            if primitive_name(eqn) not in _LOOPS:
                inside = _gradients(inner[0], feeds)
                pairs = zip(eqn.invars, inner[0].invars, strict=True)
                known.update((x, inside[y]) for x, y in pairs if y in inside)
            continue
        if primitive_name(eqn) not in _PASSES:
            continue
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom.aval.shape != ():
                known.setdefault(atom, name)
    return known


def _made_inside(eqn: Equation, feeds: list[Name]) -> list[Name]:
    """Returns the parameters whose gradients the results of an equation's body are."""
    return [] if primitive_name(eqn) == "while" else feeds


def _bodies(
    eqn: Equation, labels: list[_Label], *, largest: bool
) -> Iterator[tuple[Any, list[_Label]]]:
    """Yields the jaxprs of an equation and what is known of the inputs of each."""
    kind, bodies = primitive_name(eqn), list(sub_jaxprs(eqn))
    if kind == "cond" and largest:
        bodies = [max(bodies, key=_work)]
    for inner in bodies:
        inputs = open_jaxpr(inner)[0].invars
        known = [_Label()] * len(inputs)
        if kind == "scan":
            consts, carry = scan_sizes(eqn.params)
            known = list(labels)
            known[consts : consts + carry] = [_Label()] * carry
        elif kind == "cond":
            known = labels[1:]
        elif kind != "while" and len(inputs) == len(labels):
            known = labels
        yield inner, list(known)


def _work(jaxpr: Any) -> int:
    return matmul_flops(jaxpr, lambda _: "").total()
