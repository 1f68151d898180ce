"""A recorded run of a program, equation by equation, beside its f32 shadow.

For each equation that computes in fewer than 32 bits three results are compared: that of
the program; that of the shadow, in which everything is f32; and the local one, which the
equation gives for the operands of the shadow. An error of the local result is made by
this equation alone, whatever went wrong before it.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from mpx._jax._compat import Literal, primitive_name
from mpx._jax._formats import Format
from mpx._program._queries import Equation
from mpx.inspect._dtypes import is_float
from mpx.inspect._equations import (
    Array,
    as_operand,
    is_decision,
    low_format,
    only_moves,
    run_as_written,
    run_in_f32,
    settled,
    to_host,
    widened,
)
from mpx.inspect._program import Name, Place, place_of
from mpx.inspect._run import NO_REF, Around, Lanes, Ref, Run, Value, Values

NAN, PLUS, MINUS = 1, 2, 3
"""Classes of numbers that are not finite; 0 stands for a finite one."""


@dataclasses.dataclass(slots=True)
class Stats:
    """What is known of one value of a recording.

    Errors are 2-norms relative to the shadow; the local error is infinite if a number is
    not finite that is finite in the shadow.
    """

    classes: np.ndarray | None = None  # of the program's numbers; `None`: all finite
    shadow_classes: np.ndarray | None = None
    shadow: tuple[float, float] = (
        math.nan,
        math.nan,
    )  # smallest and largest, if finite
    own: tuple[float, float] = (math.nan, math.nan)
    largest: float = 0.0  # magnitude in the shadow that is finite
    smallest: float = 0.0  # magnitude in the shadow that is not zero
    zeros: bool = False  # whether the program has one
    deviation: float = 0.0  # of the program from the shadow
    error: float = 0.0  # of the local result
    worst: float = 0.0  # local error of a number, relative to that number
    flushed: float = 0.0  # share of nonzero numbers that are zero in the local result
    local_is_finite: bool = True  # where the shadow is


@dataclasses.dataclass(slots=True)
class Node:
    """An equation that was run, or a value that none has made."""

    eqn: Equation  # `None` for an input, a constant, or a part of another value
    around: Around
    names: tuple[Name, ...]  # the parameters among its operands; the name of an input
    parents: tuple[Ref, ...]
    stats: list[Stats]  # of each result
    format: Format | None = None  # the coarsest below f32 that it uses
    part: int | None = None  # of its parent; `None` if it is stacked from its parents
    written: tuple[float, ...] = ()  # operands that are numbers in the code

    @property
    def primitive(self) -> str:
        """The name of the primitive; "" for no equation."""
        return "" if self.eqn is None else primitive_name(self.eqn)

    @property
    def error(self) -> float:
        """The largest local error of a result."""
        return max((x.error for x in self.stats), default=0.0)

    @property
    def rounds(self) -> bool:
        """Whether it is an equation that rounds its results to a format below f32."""
        low = self.eqn is not None and self.format is not None
        return low and not only_moves(self.eqn)

    def place(self, backward: bool) -> Place:
        """Returns where it stands."""
        around, backward = self.around, backward or self.around.backward
        return place_of(
            self.eqn, self.names, around.scopes, around.frames, backward=backward
        )


Site = tuple[str, bool]
"""The equations that one source line has made: the line, and whether it is backward."""


def site_of(eqn: Equation, around: Around) -> Site:
    """Returns the site of an equation."""
    line = "{1}:{2}".format(*around.frames[0]) if around.frames else ""
    return line or primitive_name(eqn), around.backward


class Recording(Run):
    """Runs a program in its own precision and in f32, and measures each result.

    `endless` has a row for each loop that ends in f32 but not in its own precision: the node
    that compares, the steps in f32, and those that were not enough.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.decisions: list[np.ndarray] = []  # of the shadow, in each comparison
        self.eps = 0.0  # of the coarsest format met so far
        self.turned: set[int] = set()  # nodes that compare with another result in f32
        self.endless: list[tuple[int, int, int]] = []
        self._tick = tick

    def lanes_part(
        self, eqn: Equation, operands: Values, step: int, test: Value
    ) -> None:
        """Looks whether a loop that has ended in f32 ends in its own precision, too."""
        if not np.all(test.lanes[0]):
            return
        most = 4 * step + 16
        own = Mixed(self._tick, lambda _: True, most_steps=most)
        own._while(eqn, [Value(x.lanes[:1], NO_REF) for x in operands], Around())
        if not own.is_cut:
            return
        compares = (
            i
            for i in self.before([test.ref[0]])
            if self.nodes[i].eqn is not None and is_decision(self.nodes[i].eqn)
        )
        self.endless.append((next(compares, test.ref[0]), step, step + most))

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant as it is, and in f32."""
        x = to_host(x)
        return x, widened(x)

    def source(
        self, lanes: Lanes, parts: Sequence[Ref] = (), part: int | None = None
    ) -> Ref:
        """Notes a value that no equation has made."""
        stats = _compare(*lanes)
        node = Node(None, Around(), (), tuple(parts), [stats], part=part)
        self.nodes.append(node)
        return len(self.nodes) - 1, 0

    def input(self, x: Array, name: Name, is_param: bool) -> Value:
        """Returns an argument of the program."""
        lanes = self.lanes_of(x)
        ref = self.source(lanes)
        self.nodes[-1].names = (name,)
        return Value(lanes, ref, name if is_param else None)

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation in both lanes and measures its results."""
        self._tick()
        own, wide = ([x.lanes[i] for x in operands] for i in (0, 1))
        low = low_format(eqn)
        outs = run_as_written(eqn, own, around.axes)
        if low is None and all(a is b for a, b in zip(own, wide, strict=True)):
            shadow = local = outs
        else:
            shadow = local = run_in_f32(eqn, wide, around.axes)
            if low is not None and not only_moves(eqn):
                agree = _agree(eqn, own, wide)
                local = outs if agree else run_as_written(eqn, wide, around.axes)
        if low is not None:
            self.eps = max(self.eps, low.eps)
        if is_decision(eqn) and not around.axes:
            if shadow is not outs:
                free = shadow[0]
                other = np.asarray(outs[0])
                shadow = local = [settled(eqn, wide, free, other, self.eps)]
                if not np.array_equal(shadow[0], free):
                    self.turned.add(len(self.nodes))
            self.decisions.append(np.asarray(shadow[0]))
        index, written = len(self.nodes), tuple(_written(operands))
        names, parents = tuple(x.name for x in operands), tuple(x.ref for x in operands)
        stats = [_compare(*x) for x in zip(outs, shadow, local, strict=True)]
        node = Node(eqn, around, names, parents, stats, low, written=written)
        self.nodes.append(node)
        lanes = zip(outs, shadow, strict=True)
        return [Value(pair, (index, i)) for i, pair in enumerate(lanes)]

    def stats(self, ref: Ref) -> Stats:
        """Returns what is known of a value; nothing for a literal."""
        return Stats() if ref[0] < 0 else self.nodes[ref[0]].stats[ref[1]]

    def operands(self, node: Node) -> list[Stats]:
        """Returns what is known of the operands of a node that are no literals."""
        return [self.stats(ref) for ref in node.parents if ref[0] >= 0]

    def before(
        self, starts: Iterable[int], passes: Callable[[Node], bool] = lambda _: True
    ) -> Iterator[int]:
        """Yields nodes and what they are made from, the latest first.

        What a node is made from is looked at only if `passes` says so.
        """
        queue, seen = [-start for start in starts], set[int]()
        heapq.heapify(queue)
        while queue:
            index = -heapq.heappop(queue)
            if index >= 0 and index not in seen:
                seen.add(index)
                yield index
                if passes(self.nodes[index]):
                    for ref in self.nodes[index].parents:
                        heapq.heappush(queue, -ref[0])

    def site(self, index: int) -> Site:
        """Returns the site of a node."""
        node = self.nodes[index]
        if node.eqn is None:
            return f"input {index}", False
        return site_of(node.eqn, node.around)


def _written(operands: Sequence[Value]) -> Iterator[float]:
    for x in operands:
        if x.ref == NO_REF and is_float(x.lanes[0]) and np.ndim(x.lanes[0]) == 0:
            yield float(x.lanes[0])


def _agree(eqn: Equation, own: Sequence[Array], wide: Sequence[Array]) -> bool:
    """Returns whether the operands of program and shadow are the same when rounded."""
    for x, y, atom in zip(own, wide, eqn.invars, strict=True):
        if x is y:
            continue
        a, b = to_host(x), to_host(as_operand(y, atom.aval))
        if not np.array_equal(a, b, equal_nan=is_float(a)):
            return False
    return True


def numbers(x: Array) -> np.ndarray:
    """Returns a floating array in f32, on the host."""
    return np.asarray(widened(x))


def _classes(x: np.ndarray) -> np.ndarray | None:
    finite = np.isfinite(x)
    if finite.all():
        return None
    kinds = np.where(np.isnan(x), NAN, np.where(x > 0, PLUS, MINUS))
    return np.asarray(np.where(finite, 0, kinds), np.int8)


def _ends(x: np.ndarray, classes: np.ndarray | None) -> tuple[float, float]:
    x = x if classes is None else x[classes == 0]
    return (float(x.min()), float(x.max())) if x.size else (math.nan, math.nan)


def _compare(own: Array, shadow: Array, local: Array | None = None) -> Stats:
    """Returns what is known of a result; of a value without a local one, its range."""
    if not is_float(own):
        return Stats()
    a = numbers(own)
    s = a if own is shadow else numbers(shadow)
    stats = Stats(_classes(a), zeros=bool(np.any(a == 0)))
    stats.shadow_classes = stats.classes if s is a else _classes(s)
    stats.own = _ends(a, stats.classes)
    stats.shadow = stats.own if s is a else _ends(s, stats.shadow_classes)
    ends = [abs(x) for x in stats.shadow if math.isfinite(x)]
    stats.largest = max(ends, default=0.0)
    if s is a or local is None:
        return stats
    with np.errstate(all="ignore"):
        good = np.isfinite(s)
        wanted, both = np.where(good, s, 0), good & np.isfinite(a)
        stats.deviation = _relative_norm(np.where(both, a - s, 0), wanted)
        if local is shadow:
            return stats
        t, nonzero = numbers(local), good & (s != 0)
        stats.local_is_finite = bool((np.isfinite(t) | ~good).all())
        error = np.where(good & np.isfinite(t), t - s, 0)
        stats.error = math.inf
        if stats.local_is_finite:
            stats.error = _relative_norm(error, wanted)
        if nonzero.any():
            magnitudes = np.abs(s[nonzero])
            stats.smallest = float(magnitudes.min())
            stats.worst = float((np.abs(error[nonzero]) / magnitudes).max())
            stats.flushed = float(np.mean(t[nonzero] == 0))
    return stats


def _relative_norm(error: np.ndarray, value: np.ndarray) -> float:
    """Returns the 2-norm of an error relative to that of a value."""
    scale = float(np.max(np.abs(value), initial=0.0))
    if scale == 0:
        return 0.0 if not np.any(error) else math.inf
    # Scaled first: squares of small numbers vanish, those of large ones overflow.
    a, b = error.astype(np.float64) / scale, value.astype(np.float64) / scale
    return float(np.linalg.norm(a) / np.linalg.norm(b))


class Mixed(Run):
    """Runs a program in f32, with the equations of some sites in their own precision.

    With a recording, the run takes its branches, its steps and its decisions between nearly
    equal numbers, except at the site `free`; without one it decides for itself. In the
    equation of `constant` the number takes the place of those that are written in it.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        low: Callable[[Site], bool] = lambda _: False,
        *,
        recording: Recording | None = None,
        free: Site | None = None,
        in_turn: bool = False,
        constant: tuple[Equation, float] | None = None,
        most_steps: float = 10_000,
    ) -> None:
        super().__init__(None if recording is None else recording.choices)
        self.most_steps, self._low, self._tick = most_steps, low, tick
        self._in_turn = in_turn
        self._recording, self._free, self._constant_in = recording, free, constant
        self._decisions = iter(() if recording is None else recording.decisions)

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant in f32."""
        return (widened(to_host(x)),)

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation in the precision that its site has."""
        self._tick()
        args = [x.lanes[0] for x in operands]
        if self._constant_in is not None and eqn is self._constant_in[0]:
            number = np.float32(self._constant_in[1])
            pairs = zip(args, eqn.invars, strict=True)
            args = [number if isinstance(y, Literal) else x for x, y in pairs]
        if low_format(eqn) is None:
            outs = run_as_written(eqn, args, around.axes)
        elif self._low(site_of(eqn, around)) and not only_moves(eqn):
            outs = run_as_written(eqn, args, around.axes, in_turn=self._in_turn)
            outs = [widened(x) for x in outs]
        else:
            outs = run_in_f32(eqn, args, around.axes)
        if self._recording is not None and is_decision(eqn) and not around.axes:
            other, eps = next(self._decisions), self._recording.eps
            if site_of(eqn, around) != self._free:
                outs = [settled(eqn, args, outs[0], other, eps)]
        return [Value((x,), NO_REF) for x in outs]
