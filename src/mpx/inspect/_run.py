"""Programs that are run equation by equation on the host: in f32, or beside it.

`Run` runs a program in f32 with some equations in their own precision. `Recording` compares
three results of each equation that computes in fewer than 32 bits: that of the program; that
of the shadow, in which everything is f32; and the local one, which the equation gives for
the operands of the shadow. An error of the local result is made by this equation alone,
whatever went wrong before it.
"""

import dataclasses
import functools
import heapq
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._casting._keep import FP8_SCOPE
from mpx._jax._compat import (
    Literal,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._jax._formats import Format
from mpx._program._flow import moved, propagate
from mpx._program._queries import Equation, called, last_uses
from mpx.inspect._dtypes import is_float
from mpx.inspect._equations import (
    Array,
    Axes,
    Numbers,
    is_decision,
    is_rounding,
    join,
    low_format,
    mapped_axes,
    only_moves,
    run_as_written,
    run_in_f32,
    settled,
    split,
    to_host,
    widened,
)
from mpx.inspect._program import Name

NAN, PLUS, MINUS = 1, 2, 3
"""Classes of numbers that are not finite."""
Classes = np.ndarray | None
"""Those among some numbers; `None` if all are finite."""
Lanes = tuple[Array, ...]
"""A value in f32; in a recording, that of the program and that of its shadow."""
Ref = tuple[int, int]
"""A value of a run: the number of the node that made it, and which result it is."""
NO_REF: Ref = (-1, 0)
Site = tuple[str, bool]
"""The equations that one source line has made: the line, and whether it is backward."""


class Value(NamedTuple):
    """A value in each lane, where it comes from, and which parameter it is."""

    lanes: Lanes
    ref: Ref = NO_REF
    name: Name = None


Values = list[Value]


class Around(NamedTuple):
    """What is around an equation."""

    scopes: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()  # of its loops: (step, how many there are)
    backward: bool = False
    frames: tuple[tuple[str, str, int], ...] = ()  # (function, file, line), from inside
    axes: Axes = ()  # of the `shard_map`; leading axes of each value in it

    def in_step(self, step: int, length: int = 0) -> "Around":
        return self._replace(steps=(*self.steps, (step, length)))

    def site(self, eqn: Equation) -> Site:
        """Returns the site of an equation."""
        line = "{1}:{2}".format(*self.frames[0]) if self.frames else ""
        return line or primitive_name(eqn), self.backward


class Run:
    """Runs a program in f32, with the equations of some sites in their own precision.

    With a recording, the run takes its branches, its steps and its decisions between nearly
    equal numbers, except at the site `free`. In the equation of `constant` the number takes
    the place of those that are written in it. The equations with an `id` in `clips` clip to
    the range of their format, and do not round.
    """

    def __init__(
        self,
        low: Callable[[Site], bool] = lambda _: False,
        *,
        recording: "Recording | None" = None,
        free: Site | None = None,
        in_turn: bool = False,
        constant: tuple[Equation, float] | None = None,
        clips: Collection[int] = (),
        most_steps: float = 10_000,
    ) -> None:
        self._low, self._in_turn, self._most_steps = low, in_turn, most_steps
        self._recording, self._free, self._constant = recording, free, constant
        self._clips = clips
        self._given = None if recording is None else iter(recording.choices)
        self._decisions = iter(() if recording is None else recording.decisions)
        self.choices: list[int] = []  # the branches and steps that were taken
        self.is_cut = False  # whether a loop was left after `most_steps`
        # Loops that have ended in f32 only, what they then held, the step and the test
        self.parted: list[tuple[Equation, Values, int, Value]] = []
        self._ends: dict[int, list[list[Any]]] = {}
        self._known: dict[int, tuple[Any, ...]] = {}

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant in each lane."""
        return (widened(to_host(x)),)

    def source(self, lanes: Lanes, parents: Sequence[Ref] = ()) -> Value:
        """Returns a value that no equation has made: an input, a part, or a stack."""
        return Value(lanes)

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation without jaxprs inside, in the precision that its site has."""
        args, axes, site = [x.lanes[0] for x in operands], around.axes, around.site(eqn)
        if self._constant is not None and eqn is self._constant[0]:
            number = np.float32(self._constant[1])
            pairs = zip(args, eqn.invars, strict=True)
            args = [number if isinstance(atom, Literal) else x for x, atom in pairs]
        low = low_format(eqn)
        if low and id(eqn) in self._clips:
            x = np.asarray(args[0])
            outs = [np.where(np.abs(x) > _edge(low), np.sign(x) * low.max, x)]
        elif low and (only_moves(eqn) or not self._low(site)):
            outs = run_in_f32(eqn, args, axes)
        else:
            outs = run_as_written(eqn, args, axes, in_turn=bool(low) and self._in_turn)
            outs = [widened(x) for x in outs]
        if self._recording is not None and is_decision(eqn) and not axes:
            other, eps = next(self._decisions), self._recording.eps
            if site != self._free:
                outs = [settled(args, outs[0], other, eps)]
        return [Value((x,)) for x in outs]

    def __call__(
        self, jaxpr: Any, args: Sequence[Value], around: Around | None = None
    ) -> Values:
        """Runs a jaxpr; values are forgotten when nothing reads them any more."""
        body, consts = open_jaxpr(jaxpr)
        known = [self.source(self.lanes_of(x)) for x in consts]
        env = dict(zip((*body.constvars, *body.invars), (*known, *args), strict=True))
        if id(body) not in self._ends:
            self._ends[id(body)] = last_uses(body)

        def rule(eqn: Equation, operands: Values) -> Values:
            return self._equation(eqn, operands, self._inside(eqn, around or Around()))

        def literal(atom: Any) -> Value:
            return Value(self.lanes_of(np.asarray(atom.val, atom.aval.dtype)))

        return propagate(body, env, rule, literal, self._ends[id(body)])

    def _inside(self, eqn: Equation, around: Around) -> Around:
        """Returns what is around the body of an equation."""
        if id(eqn) not in self._known:
            frames = tuple(source_frames(eqn))
            self._known[id(eqn)] = scopes_of(eqn), is_transposed(eqn), frames
        scopes, backward, frames = self._known[id(eqn)]
        # The lines inside a jitted function end there, those inside a scan do not.
        rest = () if frames[-1:] == around.frames[-1:] else around.frames
        return around._replace(
            scopes=around.scopes + scopes,
            backward=around.backward or backward,
            frames=frames + rest,
        )

    def _equation(self, eqn: Equation, operands: Values, around: Around) -> Values:
        name = primitive_name(eqn)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, around)
        if name == "shard_map" and not around.axes:
            return self._shard_map(eqn, operands, around)
        is_whole = name in ("pallas_call", "shard_map") or is_rounding(eqn)
        body = None if is_whole else called(eqn)
        if body is not None:
            return self(body, operands, around)
        if not eqn.outvars:  # a print, say
            return []
        param = moved(eqn, [x.name for x in operands])
        return [x._replace(name=param) for x in self.leaf(eqn, operands, around)]

    def _choose(self, decide: Callable[[], int]) -> int:
        if self._given is not None:
            return next(self._given)
        self.choices.append(decide())
        return self.choices[-1]

    def _cond(self, eqn: Equation, operands: Values, around: Around) -> Values:
        index, branches = operands[0].lanes[0], eqn.params["branches"]
        last = len(branches) - 1
        chosen = self._choose(lambda: int(np.clip(np.ravel(index)[0], 0, last)))
        return self(branches[chosen], operands[1:], around)

    def _while(self, eqn: Equation, operands: Values, around: Around) -> Values:
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
        carry = [x._replace(name=None) for x in operands[n_cond + n_body :]]
        step = 0

        def goes_on() -> int:
            # Until the first lane ends: a counter that stands still would run forever.
            (test,) = self(params["cond_jaxpr"], [*tests, *carry], around)
            lanes = [bool(np.all(x)) for x in test.lanes]
            if lanes[0] and not all(lanes):
                self.parted.append((eqn, [*tests, *consts, *carry], step, test))
            self.is_cut |= all(lanes) and step >= self._most_steps
            return int(all(lanes) and step < self._most_steps)

        while self._choose(goes_on):
            carry = self(params["body_jaxpr"], [*consts, *carry], around.in_step(step))
            step += 1
        return carry

    def _scan(self, eqn: Equation, operands: Values, around: Around) -> Values:
        n_consts, n_carry = scan_sizes(eqn.params)
        length, order = eqn.params["length"], -1 if eqn.params["reverse"] else 1
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = [x._replace(name=None) for x in operands[n_consts : n_consts + n_carry]]
        rows, depth = list[Values](), len(around.axes)
        for step in range(length)[::order]:
            at = (slice(None),) * depth + (step,)
            parts = [self._moved(x, operator.itemgetter(at)) for x in xs]
            inside = around.in_step(step, length)
            outs = self(eqn.params["jaxpr"], [*consts, *carry, *parts], inside)
            carry = outs[:n_carry]
            rows.append(outs[n_carry:])
        stacked = [
            self._stack([row[i] for row in rows[::order]], var, depth)
            for i, var in enumerate(eqn.outvars[n_carry:])
        ]
        return [*carry, *stacked]

    def _stack(self, values: Values, var: Any, depth: int) -> Value:
        if not values:
            return self.source(self.lanes_of(np.zeros(var.aval.shape, var.aval.dtype)))
        is_numpy = isinstance(values[0].lanes[0], np.ndarray | np.generic)
        stack = np.stack if is_numpy else jnp.stack  # of PRNG keys
        lanes = _in_lanes(lambda *xs: stack(xs, depth), values)
        return self.source(lanes, [x.ref for x in values])

    def _shard_map(self, eqn: Equation, operands: Values, around: Around) -> Values:
        axes, params = mapped_axes(eqn), eqn.params
        pairs = zip(operands, params["in_specs"], strict=True)
        inputs = [self._moved(x, lambda y, s=s: split(y, s, axes)) for x, s in pairs]
        outs = self(params["jaxpr"], inputs, around._replace(axes=axes))
        pairs = zip(outs, params["out_specs"], strict=True)
        return [self._moved(x, lambda y, s=s: join(y, s, axes)) for x, s in pairs]

    def _moved(self, x: Value, func: Callable[[Array], Array]) -> Value:
        return self.source(_in_lanes(func, [x]), [x.ref])._replace(name=x.name)


def _in_lanes(func: Callable[..., Array], values: Values) -> Lanes:
    """Applies a function to each lane; lanes that are one array stay one."""
    first, *others = zip(*(x.lanes for x in values), strict=True)
    result = func(*first)
    same = [all(map(operator.is_, lane, first)) for lane in others]
    pairs = zip(others, same, strict=True)
    return (result, *(result if is_same else func(*lane) for lane, is_same in pairs))


# --- A recorded run -------------------------------------------------------------------

_NONE = (math.nan, math.nan)


def _edge(low: Format) -> float:
    """Returns the number above which clipping changes more than rounding to nearest."""
    return low.max * (1 + low.eps / 4)  # about half a unit in the last place


@dataclasses.dataclass(slots=True)
class Stats:
    """What is known of one value of a recording.

    Errors are 2-norms relative to the shadow; the local error is infinite if a number is
    not finite that is finite in the shadow.
    """

    classes: Classes = None  # of the program's numbers
    shadow_classes: Classes = None
    shadow: tuple[float, float] = _NONE  # smallest and largest, if finite
    own: tuple[float, float] = _NONE
    largest: float = 0.0  # magnitude in the shadow that is finite
    smallest: float = 0.0  # magnitude in the shadow that is not zero
    zeros: bool = False  # whether the program has one
    deviation: float = 0.0  # of the program from the shadow
    error: float = 0.0  # of the local result
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
    written: tuple[float, ...] = ()  # operands that are numbers in the code

    @property
    def primitive(self) -> str:
        """The name of the primitive; "" for no equation."""
        return "" if self.eqn is None else primitive_name(self.eqn)

    @property
    def in_fp8(self) -> bool:
        """Whether it is part of what `fp8` makes of a matmul."""
        return FP8_SCOPE in self.around.scopes

    @property
    def excess(self) -> float:
        """What `fp8` clips here over what a scale holds that was chosen before; else 0."""
        if self.format is None or self.eqn.params.get("name") != "mpx_clip":
            return 0.0
        largest = self.stats[0].largest
        return largest / self.format.max if largest > _edge(self.format) else 0.0

    @property
    def error(self) -> float:
        """The largest local error of a result."""
        return max((x.error for x in self.stats), default=0.0)

    @property
    def deviation(self) -> float:
        """The largest distance of a result from the shadow."""
        return max((x.deviation for x in self.stats), default=0.0)


class Recording(Run):
    """Runs a program in its own precision and in f32, and measures each result."""

    def __init__(self) -> None:
        super().__init__(most_steps=math.inf)
        self.nodes: list[Node] = []
        self.decisions: list[np.ndarray] = []  # of the shadow, in each comparison
        self.eps = 0.0  # of the coarsest format met so far
        self.turned: set[int] = set()  # nodes that compare with another result in f32

    @functools.cached_property
    def endless(self) -> list[tuple[int, int, int]]:
        """Loops that end in f32 only: what compares, the steps, and those not enough."""
        found = []
        for eqn, operands, step, test in self.parted:
            most = 4 * step + 16
            own = Run(lambda _: True, most_steps=most)
            own._while(eqn, [Value(x.lanes[:1]) for x in operands], Around())
            if own.is_cut:
                before = ((i, self.nodes[i].eqn) for i in self.before([test.ref[0]]))
                compares = (i for i, x in before if x is not None and is_decision(x))
                found.append((next(compares, test.ref[0]), step, step + most))
        return found

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant as it is, and in f32."""
        x = to_host(x)
        return x, widened(x)

    def source(self, lanes: Lanes, parents: Sequence[Ref] = ()) -> Value:
        """Notes a value that no equation has made."""
        self.nodes.append(Node(None, Around(), (), tuple(parents), [_compare(*lanes)]))
        return Value(lanes, (len(self.nodes) - 1, 0))

    def input(self, x: Array, name: Name, is_param: bool) -> Value:
        """Returns an argument of the program."""
        value = self.source(self.lanes_of(x))
        self.nodes[-1].names = (name,)
        return value._replace(name=name if is_param else None)

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation in both lanes and measures its results."""
        own, wide = ([x.lanes[i] for x in operands] for i in (0, 1))
        low = low_format(eqn)
        outs = run_as_written(eqn, own, around.axes)
        if low is None and all(a is b for a, b in zip(own, wide, strict=True)):
            shadow = local = outs
        else:
            shadow = local = run_in_f32(eqn, wide, around.axes)
            if low is not None and not only_moves(eqn):
                local = run_as_written(eqn, wide, around.axes)
        self.eps = max(self.eps, low.eps if low else 0.0)
        if is_decision(eqn) and not around.axes:
            if shadow is not outs:
                free = shadow[0]
                shadow = local = [settled(wide, free, np.asarray(outs[0]), self.eps)]
                if not np.array_equal(shadow[0], free):
                    self.turned.add(len(self.nodes))
            self.decisions.append(np.asarray(shadow[0]))
        written = [x.lanes[0] for x in operands if x.ref == NO_REF]
        node = Node(
            eqn,
            around,
            names=tuple(x.name for x in operands),
            parents=tuple(x.ref for x in operands),
            stats=[_compare(*x) for x in zip(outs, shadow, local, strict=True)],
            format=low,
            written=tuple(float(x) for x in written if is_float(x) and not np.ndim(x)),
        )
        self.nodes.append(node)
        lanes, index = zip(outs, shadow, strict=True), len(self.nodes) - 1
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
        """Yields nodes and what those that pass are made from, the latest first."""
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
        return node.around.site(node.eqn)


def _classes(x: Numbers) -> Classes:
    tests = (np.isnan, NAN), (np.isposinf, PLUS), (np.isneginf, MINUS)
    found = [kind for test, kind in tests if test(x).any()]
    return np.array(found) if found else None


def _ends(x: np.ndarray) -> tuple[float, float]:
    x = x[np.isfinite(x)]
    return (float(x.min()), float(x.max())) if x.size else _NONE


def _compare(own: Array, shadow: Array, local: Array | None = None) -> Stats:
    """Returns what is known of a result; of a value without a local one, its range."""
    if not is_float(shadow) or own.dtype.kind == "u":  # bytes
        return Stats()
    a = np.asarray(widened(own) if is_float(own) else np.float32(own))  # int8 codes
    s = a if own is shadow else np.asarray(widened(shadow))
    stats = Stats(_classes(a), own=_ends(a), zeros=bool(np.any(a == 0)))
    stats.shadow_classes = stats.classes if s is a else _classes(s)
    stats.shadow = stats.own if s is a else _ends(s)
    stats.largest = float(np.nanmax(np.abs([0.0, *stats.shadow])))
    if s is a or local is None:
        return stats
    with np.errstate(all="ignore"):
        good = np.isfinite(s)
        wanted, both = np.where(good, s, 0), good & np.isfinite(a)
        stats.deviation = _relative_norm(np.where(both, a - s, 0), wanted)
        if local is shadow:
            return stats
        t, nonzero = np.asarray(widened(local)), good & (s != 0)
        stats.local_is_finite = bool((np.isfinite(t) | ~good).all())
        error = np.where(good & np.isfinite(t), t - s, 0)
        stats.error = _relative_norm(error, wanted)
        if not stats.local_is_finite:
            stats.error = math.inf
        if nonzero.any():
            stats.smallest = float(np.abs(s[nonzero]).min())
    return stats


def _relative_norm(error: Numbers, value: Numbers) -> float:
    """Returns the 2-norm of an error relative to that of a value."""
    size, off = (float(np.linalg.norm(x.astype(np.float64))) for x in (value, error))
    return off / size if size else math.inf if off else 0.0
