"""Places of operations: the parameter that one reads, its scope and its source line."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mpx._amp._report import short_source
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
from mpx._jaxpr._interpreter import Jaxpr, Scopes
from mpx._jaxpr._queries import MOVES, Equation, repetitions

Name = str | None
"""The parameter that a value is, possibly moved or cast; `None` for any other value."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation stands in a program.

    Attributes:
        primitive: The name of the operation.
        param: The parameter that it reads, such as `model/layers/0/weight`; "" for none.
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
    outer: Sequence[tuple[str, str, int]] = (),
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
    frames = source_frames(eqn) or outer
    function, file, line = frames[0] if frames else ("", "", 0)
    return Place(
        primitive_name(eqn),
        next(filter(None, names), ""),
        "/".join(scopes),
        f"{short_source(file)}:{line}" if frames else "unknown",
        function.rpartition(".")[2],
        backward or is_transposed(eqn),
    )


def name_of_results(eqn: Equation, names: Sequence[Name]) -> Name:
    """Returns the parameter that the results of an equation still are."""
    known = [name for name in names if name]
    moves = primitive_name(eqn) in MOVES
    return known[0] if moves and len(known) == 1 else None


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
    backward: bool = False,
    times: int = 1,
) -> Iterator[Site]:
    """Yields the equations of a jaxpr and of all jaxprs inside it, with their places.

    An equation that holds jaxprs comes before what is inside it.

    Args:
        jaxpr: The jaxpr.
        names: The parameters among its inputs.
        scopes: The named scopes around it.
        backward: Whether it belongs to a backward pass.
        times: How often it runs.
    """
    body, _ = open_jaxpr(jaxpr)
    env = dict(zip(body.invars, names, strict=True))
    for eqn in body.eqns:
        operands = [None if isinstance(x, Literal) else env.get(x) for x in eqn.invars]
        around = scopes + scopes_of(eqn)
        place = place_of(eqn, operands, around, backward=backward)
        yield Site(eqn, place, times)
        for inner, inside in _bodies(eqn, operands):
            yield from sites(
                inner,
                inside,
                around,
                backward=place.backward,
                times=times * repetitions(eqn),
            )
        env.update(dict.fromkeys(eqn.outvars, name_of_results(eqn, operands)))


def _bodies(eqn: Equation, names: list[Name]) -> Iterator[tuple[Any, list[Name]]]:
    """Yields the jaxprs of an equation and the parameters among the inputs of each."""
    kind = primitive_name(eqn)
    for inner in sub_jaxprs(eqn):
        inputs = open_jaxpr(inner)[0].invars
        known: list[Name] = [None] * len(inputs)
        if kind == "scan":
            consts, carry = scan_sizes(eqn.params)
            known = list(names)
            known[consts : consts + carry] = [None] * carry
        elif kind == "cond":
            known = names[1:]
        elif kind != "while" and len(inputs) == len(names):
            known = names
        yield inner, list(known)
