"""A program and its f32 shadow, side by side: what each equation does to its values.

For each equation that computes in fewer than 32 bits three results are compared: that of
the program; that of the shadow, in which everything is f32; and the local one, which the
equation gives for the operands of the shadow. An error of the local result is made by
this equation alone, whatever went wrong before it.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpx._jax._compat import Literal, primitive_name
from mpx._jax._formats import Format
from mpx._program._queries import Equation
from mpx._program._run import (
    NO_REF,
    Around,
    Array,
    Lanes,
    Loop,
    Ref,
    Run,
    Value,
    on_host,
)
from mpx.inspect._dtypes import is_float
from mpx.inspect._places import Name, Place, place_of
from mpx.inspect._shadow import (
    as_operand,
    low_format,
    only_moves,
    relative_norm,
    run_as_written,
    run_in_f32,
    to_host,
    widened,
)
from mpx.inspect._ties import is_decision, settled

NAN, PLUS, MINUS = 1, 2, 3
"""Classes of numbers that are not finite; 0 stands for a finite one."""


@dataclasses.dataclass(slots=True)
class Finding:
    """What is known of one result.

    Attributes:
        classes: The class of each number of the program; `None` if all are finite.
        shadow_classes: The same of the shadow.
        shadow: The smallest and the largest finite number of the shadow.
        own: The same of the program.
        largest: The largest magnitude in the shadow, that is finite.
        smallest: The smallest magnitude in the shadow that is not zero.
        zeros: Whether the program has a zero.
        deviation: The norm of program minus shadow, relative to the shadow.
        error: The norm of the local error, relative to the shadow; infinite if a number
            is not finite that is finite in the shadow.
        worst: The largest local error of a number relative to that number.
        flushed: The share of the shadow's nonzero numbers that are zero in the local
            result.
        local_is_finite: Whether the local result is finite where the shadow is.
    """

    classes: np.ndarray | None = None
    shadow_classes: np.ndarray | None = None
    shadow: tuple[float, float] = (math.nan, math.nan)
    own: tuple[float, float] = (math.nan, math.nan)
    largest: float = 0.0
    smallest: float = 0.0
    zeros: bool = False
    deviation: float = 0.0
    error: float = 0.0
    worst: float = 0.0
    flushed: float = 0.0
    local_is_finite: bool = True


@dataclasses.dataclass(slots=True)
class Node:
    """An equation that was run, or a value that none has made.

    Attributes:
        eqn: The equation; `None` for an input, a constant, or a part of another value.
        around: The scopes and loops around it.
        names: The parameters among its operands; the name of an input.
        parents: The operands.
        findings: One for each result.
        format: The coarsest format below f32 that it uses.
        part: Which part of its parent it is; `None` if it is stacked from its parents.
        written: The numbers among its operands that are written in the code.
    """

    eqn: Equation
    around: Around
    names: tuple[Name, ...]
    parents: tuple[Ref, ...]
    findings: list[Finding]
    format: Format | None = None
    part: int | None = None
    written: tuple[float, ...] = ()

    @property
    def primitive(self) -> str:
        """The name of the primitive; "" for no equation."""
        return "" if self.eqn is None else primitive_name(self.eqn)

    @property
    def error(self) -> float:
        """The largest local error of a result."""
        return max((x.error for x in self.findings), default=0.0)

    @property
    def worst(self) -> float:
        """The largest local error of a number."""
        return max((x.worst for x in self.findings), default=0.0)

    def place(self, backward: bool) -> Place:
        """Returns where it stands."""
        scopes, _, inside, frames, _ = self.around
        backward = backward or inside
        return place_of(self.eqn, self.names, scopes, frames, backward=backward)


def classes_of(nodes: Sequence[Node], ref: Ref) -> np.ndarray | None:
    """Returns the class of each number of a value; `None` if all are finite."""
    return None if ref[0] < 0 else nodes[ref[0]].findings[ref[1]].classes


Site = tuple[str, bool]
"""The equations that one source line has made: the line, and whether it is backward."""


def site_of(eqn: Equation, around: Around) -> Site:
    """Returns the site of an equation."""
    line = "{1}:{2}".format(*around.frames[0]) if around.frames else ""
    return line or primitive_name(eqn), around.backward


class Recording(Run):
    """Runs a program in its own precision and in f32, and notes what it finds.

    Attributes:
        nodes: The equations in the order of their execution.
        decisions: What the shadow decided in each comparison, as bits.
        eps: The distance of numbers in the coarsest format met so far.
        turned: The nodes that compare nearly equal numbers with another result in f32.
        endless: For each loop that ends in f32 but not in its own precision: the node that
            compares, the steps in f32, and those that were not enough.
    """

    def __init__(self, tick: Callable[[], None]) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.decisions: list[np.ndarray] = []
        self.eps = 0.0
        self.turned: set[int] = set()
        self.endless: list[tuple[int, int, int]] = []
        self._tick = tick

    def lanes_part(self, loop: Loop, goes_on: Sequence[bool], test: Ref) -> None:
        """Looks whether a loop that has ended in f32 ends in its own precision, too."""
        if not goes_on[0]:
            return
        most = 4 * loop.step + 16
        own = Mixed(self._tick, lambda _: True, most_steps=most)
        if not own.goes_beyond(loop):
            return
        compares = (
            i
            for i in before(self.nodes, [test[0]])
            if self.nodes[i].eqn is not None and is_decision(self.nodes[i].eqn)
        )
        index = next(compares, test[0])
        self.endless.append((index, loop.step, loop.step + most))

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant as it is, and in f32."""
        x = to_host(x)
        return x, widened(x)

    def source(
        self, lanes: Lanes, parts: Sequence[Ref] = (), part: int | None = None
    ) -> Ref:
        """Notes a value that no equation has made."""
        finding = _range(*lanes) if is_float(lanes[0]) else Finding()
        node = Node(None, Around(), (), tuple(parts), [finding], part=part)
        self.nodes.append(node)
        return len(self.nodes) - 1, 0

    def input(self, x: Array, name: Name, is_param: bool) -> Value:
        """Returns an argument of the program."""
        lanes = self.lanes_of(x)
        ref = self.source(lanes)
        self.nodes[-1].names = (name,)
        return Value(lanes, ref, name if is_param else None)

    def leaf(self, eqn: Equation, operands: list[Value], around: Around) -> list[Value]:
        """Runs an equation in both lanes and measures its results."""
        self._tick()
        own = [x.lanes[0] for x in operands]
        wide = [x.lanes[1] for x in operands]
        low = low_format(eqn)
        same = all(a is b for a, b in zip(own, wide, strict=True))
        outs = run_as_written(eqn, own, around.axes)
        if same and low is None:
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
                other = np.asarray(outs[0])
                free = shadow[0]
                shadow = local = [settled(eqn, wide, free, other, self.eps)]
                if not np.array_equal(shadow[0], free):
                    self.turned.add(len(self.nodes))
            self.decisions.append(np.asarray(shadow[0]))
        findings = [_compare(*x) for x in zip(outs, shadow, local, strict=True)]
        names, parents = tuple(x.name for x in operands), tuple(x.ref for x in operands)
        written = tuple(_written(operands))
        node = Node(eqn, around, names, parents, findings, low, written=written)
        self.nodes.append(node)
        index = len(self.nodes) - 1
        lanes = zip(outs, shadow, strict=True)
        return [Value(pair, (index, i)) for i, pair in enumerate(lanes)]


def _written(operands: Sequence[Value]) -> Iterator[float]:
    for x in operands:
        if x.ref == NO_REF and is_float(x.lanes[0]) and np.ndim(x.lanes[0]) == 0:
            yield float(x.lanes[0])


def _agree(eqn: Equation, own: Sequence[Array], wide: Sequence[Array]) -> bool:
    """Returns whether the operands of program and shadow are the same when rounded."""
    for x, y, atom in zip(own, wide, eqn.invars, strict=True):
        if x is y:
            continue
        a, b = on_host(x), on_host(as_operand(y, atom.aval))
        if not np.array_equal(a, b, equal_nan=is_float(a)):
            return False
    return True


def _classes(x: np.ndarray) -> np.ndarray | None:
    finite = np.isfinite(x)
    if finite.all():
        return None
    kinds = np.where(np.isnan(x), NAN, np.where(x > 0, PLUS, MINUS))
    return np.asarray(np.where(finite, 0, kinds), np.int8)


def _numbers(x: Array) -> np.ndarray:
    return np.asarray(widened(x))


def _ends(x: np.ndarray, classes: np.ndarray | None) -> tuple[float, float]:
    x = x if classes is None else x[classes == 0]
    return (float(x.min()), float(x.max())) if x.size else (math.nan, math.nan)


def _range(own: Array, shadow: Array) -> Finding:
    """Returns what is known of a value without its local error."""
    a = _numbers(own)
    b = a if own is shadow else _numbers(shadow)
    finding = Finding(_classes(a))
    finding.shadow_classes = finding.classes if b is a else _classes(b)
    finding.own = _ends(a, finding.classes)
    finding.shadow = finding.own if b is a else _ends(b, finding.shadow_classes)
    ends = [abs(x) for x in finding.shadow if math.isfinite(x)]
    finding.largest = max(ends, default=0.0)
    finding.zeros = bool(np.any(a == 0))
    return finding


def _compare(own: Array, shadow: Array, local: Array) -> Finding:
    """Returns what is known of a result."""
    if not is_float(own):
        return Finding()
    finding = _range(own, shadow)
    if own is shadow:
        return finding
    with np.errstate(all="ignore"):
        a, s = _numbers(own), _numbers(shadow)
        good = np.isfinite(s)
        both = good & np.isfinite(a)
        finding.deviation = relative_norm(
            np.where(both, a - s, 0), np.where(good, s, 0)
        )
        if local is shadow:
            return finding
        t = _numbers(local)
        magnitudes = np.abs(s[good & (s != 0)])
        finding.smallest = float(magnitudes.min()) if magnitudes.size else 0.0
        finite = np.isfinite(t) | ~good
        finding.local_is_finite = bool(finite.all())
        error = np.where(good & np.isfinite(t), t - s, 0)
        nonzero = good & (s != 0)
        if not finding.local_is_finite:
            finding.error = math.inf
        else:
            finding.error = relative_norm(error, np.where(good, s, 0))
        if nonzero.any():
            relative = np.abs(error[nonzero]) / np.abs(s[nonzero])
            finding.worst = float(relative.max())
            finding.flushed = float(np.mean(t[nonzero] == 0))
    return finding


class Mixed(Run):
    """Runs a program in f32, with the equations of some sites in their own precision.

    Args:
        tick: Is called for each equation.
        low: Which sites those are.
        recording: A run whose branches and steps are taken, and whose decisions between
            nearly equal numbers are. Without it, the run decides for itself.
        free: A site that decides for itself.
        in_turn: See `run_as_written`.
        constant: An equation, and the number that takes the place of those written in it.
    """

    def __init__(
        self,
        tick: Callable[[], None],
        low: Callable[[Site], bool] = lambda _: False,
        *,
        recording: "Recording | None" = None,
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

    def leaf(self, eqn: Equation, operands: list[Value], around: Around) -> list[Value]:
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


# --- Results --------------------------------------------------------------------------


class Outputs(NamedTuple):
    """The floating results of a program: the loss and the gradients.

    Attributes:
        names: Their names.
        refs: The nodes that made them.
        own: The results of the program, equation by equation.
        shadow: Those in f32, with the branches, steps and decisions of the program.
        exact: Those of the function in f32.
        actual: Those of the compiled program.
    """

    names: list[str]
    refs: list[Ref]
    own: list[np.ndarray]
    shadow: list[np.ndarray]
    exact: list[np.ndarray]
    actual: list[np.ndarray]

    @property
    def is_grad(self) -> list[bool]:
        """Whether each is a gradient."""
        return [name.startswith("gradient") for name in self.names]

    def sizes(self) -> list[float]:
        """Returns what errors are relative to: the norms of the results in f32.

        A gradient of zeros is measured against the other gradients. Beside a loss of zero,
        any error is large.
        """
        sizes = [norm(x[np.isfinite(x)]) for x in self.exact]
        pairs = list(zip(self.exact, self.is_grad, sizes, strict=True))
        grads = [(x.size, size) for x, is_grad, size in pairs if is_grad]
        count = sum(n for n, _ in grads)
        usual = math.hypot(*(size for _, size in grads)) / math.sqrt(max(count, 1))
        return [
            size or (usual * math.sqrt(x.size) if is_grad else 0.0) or _TINY
            for x, is_grad, size in pairs
        ]


_TINY = 1e-45


def norm(x: np.ndarray) -> float:
    """Returns the 2-norm; infinite if a number is not finite."""
    x = x.astype(np.float64)
    return float(np.linalg.norm(x)) if np.isfinite(x).all() else math.inf


def arrays_of(outs: Iterable[Array]) -> list[np.ndarray]:
    """Returns the floating arrays among some, in f32."""
    return [_numbers(x) for x in outs if is_float(x)]


def ancestors(nodes: Sequence[Node], refs: Sequence[Ref]) -> set[int]:
    """Returns the nodes that some values depend on."""
    return set(before(nodes, [ref[0] for ref in refs]))


def before(
    nodes: Sequence[Node],
    starts: Iterable[int],
    passes: Callable[[Node], bool] = lambda node: True,
) -> Iterator[int]:
    """Yields nodes and what they are made from, the latest first.

    Args:
        nodes: The nodes of a run.
        starts: The positions of those to start from.
        passes: Whether what a node is made from is looked at.
    """
    queue, seen = [-start for start in starts], set[int]()
    heapq.heapify(queue)
    while queue:
        index = -heapq.heappop(queue)
        if index >= 0 and index not in seen:
            seen.add(index)
            yield index
            if passes(nodes[index]):
                for ref in nodes[index].parents:
                    heapq.heappush(queue, -ref[0])


def nearest_param(nodes: Sequence[Node], index: int) -> str:
    """Returns the parameter that was read last before a node, on the way to it."""
    found = (nodes[i] for i in before(nodes, [index]))
    names = (name for node in found if node.eqn is not None for name in node.names)
    return next(filter(None, names), "")
