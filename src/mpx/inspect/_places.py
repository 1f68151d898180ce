"""Places of operations: the parameter that one reads, its scope and its source line."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import primitive_name, source_frames
from mpx._program._flow import Walk, moved, pull
from mpx._program._interpreter import Jaxpr, Scopes
from mpx._program._queries import (
    MATMULS,
    MOVES,
    OUTERMOST,
    Equation,
    Position,
    matmul_flops,
    names,
)
from mpx.inspect._result import Frames, source_of

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
    scopes: Scopes,
    frames: Frames,
    *,
    backward: bool,
) -> Place:
    """Returns the place of an equation.

    Args:
        eqn: The equation.
        names: The parameters among its operands.
        scopes: The named scopes around it, its own included.
        frames: The user's frames behind it.
        backward: Whether it belongs to a backward pass.
    """
    return Place(
        primitive_name(eqn),
        next(filter(None, names), ""),
        "/".join(scopes),
        source_of(frames),
        frames[0][0].rpartition(".")[2] if frames else "",
        backward,
    )


def frames_of(*eqns: Equation) -> Frames:
    """Returns the user's frames of the last equation that has some.

    Inside a jitted function of a library the equations have none: give those around them.
    """
    return next(filter(None, map(source_frames, reversed(eqns))), ())


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
    *,
    made: Sequence[Name] = (),
    largest: bool = False,
) -> list[Site]:
    """Returns the equations of a jaxpr and of all jaxprs inside it, with their places.

    An equation that holds jaxprs comes before what is inside it.

    Args:
        jaxpr: The jaxpr.
        names: The parameters among its inputs.
        made: The parameters whose gradients its results are.
        largest: Whether only that branch of a conditional counts which has most work.
    """
    found = _Sites(made, largest=largest)
    found.run(jaxpr, [_Label(name, name) for name in names])
    return found.sites


class _Sites(Walk[_Label]):
    unknown = _Label()

    def __init__(self, made: Sequence[Name], *, largest: bool) -> None:
        self.sites: list[Site] = []
        self._made, self._largest = made, largest
        self._grads: dict[Any, str] = {}  # by variable of the jaxpr that is walked

    def run(
        self, jaxpr: Jaxpr, labels: Sequence[_Label], around: Position = OUTERMOST
    ) -> list[_Label]:
        before, made = self._grads, self._made
        if around.callers:
            eqn = around.callers[-1]
            made = [] if primitive_name(eqn) == "while" else self._feeds(eqn)
        self._grads = pull(jaxpr, made, _PASSES)
        outs = super().run(jaxpr, labels, around)
        self._grads = before
        return outs

    def _feeds(self, eqn: Equation) -> list[Name]:
        """Returns the parameters whose gradients are made from an equation's results."""
        return [self._grads.get(var) for var in eqn.outvars]

    def equation(self, here: Position, labels: list[_Label]) -> list[_Label]:
        eqn, backward = here.eqn, here.backward
        operands = [label.name for label in labels]
        if primitive_name(eqn) in MATMULS:
            operands += [label.origin for label in labels[:2]]
        if backward:
            operands += self._feeds(eqn)
        frames = frames_of(*here.callers, eqn)
        place = place_of(eqn, operands, here.scopes, frames, backward=backward)
        self.sites.append(Site(eqn, place, here.times))
        return _results(eqn, labels)

    def bodies(
        self, eqn: Equation, labels: list[_Label]
    ) -> list[tuple[Jaxpr, list[_Label]]]:
        found = super().bodies(eqn, labels)
        if self._largest and primitive_name(eqn) == "cond":
            return [max(found, key=lambda x: matmul_flops(x[0], lambda _: "").total())]
        return found


def _results(eqn: Equation, labels: list[_Label]) -> list[_Label]:
    """Returns what is known of the results of an equation that holds no jaxpr."""
    name = moved(eqn, [label.name for label in labels])
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


# The gradient of a parameter passes through these unchanged, but for a sum.
_PASSES = MOVES.union(names("reduce_sum add_any neg psum psum_invariant mul div"))
