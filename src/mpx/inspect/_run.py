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
from mpx._jax._compat import Literal, open_jaxpr, primitive_name, scan_sizes
from mpx._jax._formats import Format
from mpx._program._flow import propagate
from mpx._program._queries import OUTERMOST, Equation, Position, called, last_uses
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
from mpx.inspect._program import Place, Program, path, sites

NAN, PLUS, MINUS = 1, 2, 3
"""Kinds of numbers that are not finite."""
Kinds = frozenset[int]
Lanes = tuple[Array, ...]
"""A value in f32; in a recording, that of the program and that of its shadow."""
Site = tuple[str, bool]
"""The equations that one source line has made: the line, and whether it is backward."""
_INPUT = Place("input", "a constant", "", "unknown", "", backward=False)


class Value(NamedTuple):
    """A value in each lane; in a recording, what is known of it if it is no literal."""

    lanes: Lanes
    node: "Node | None" = None


Values = list[Value]


class Around(NamedTuple):
    """What is around an equation."""

    callers: tuple[Equation, ...] = ()  # that hold it, outermost first
    steps: tuple[tuple[int, int], ...] = ()  # of its loops: (step, how many there are)
    axes: Axes = ()  # of the `shard_map`; leading axes of each value in it

    def in_step(self, step: int, length: int = 0) -> "Around":
        return self._replace(steps=(*self.steps, (step, length)))


OUTSIDE = Around()


class Run:
    """Runs a program in f32, with the equations of some sites in their own precision.

    With a recording, the run takes its branches, its steps and its decisions between nearly
    equal numbers, except at the site `free`. In the equation of `constant` the number takes
    the place of those that are written in it. The equations with an `id` in `clips` clip to
    the range of their format, and do not round.
    """

    def __init__(
        self,
        low: Callable[[Site | None], bool] = lambda _: False,
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
        # The branches and steps that were taken, by each device of a `shard_map`
        self.choices: list[np.ndarray] = []
        self.is_cut = False  # whether a loop was left after `most_steps`
        # Loops that end in f32 only: what compares, the steps, and those not enough
        self.endless: list[tuple[Node, int, int]] = []

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant in each lane."""
        return (widened(to_host(x)),)

    def source(self, lanes: Lanes, values: Sequence[Value] = ()) -> Value:
        """Returns a value that no equation has made: an input, or a part or stack of some."""
        return Value(lanes)

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation without jaxprs inside, in the precision that its site has."""
        args, axes, site = [x.lanes[0] for x in operands], around.axes, None
        if self._recording is not None:
            site = site_of(self._recording.places[path(eqn, around.callers)][1])
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
        self, jaxpr: Any, args: Sequence[Value], around: Around = OUTSIDE
    ) -> Values:
        """Runs a jaxpr; values are forgotten when nothing reads them any more."""
        body, consts = open_jaxpr(jaxpr)
        known = [self.source(self.lanes_of(x)) for x in consts]
        env = dict(zip((*body.constvars, *body.invars), (*known, *args), strict=True))

        def literal(atom: Any) -> Value:
            return Value(self.lanes_of(np.asarray(atom.val, atom.aval.dtype)))

        rule = functools.partial(self._equation, around)
        return propagate(body, env, rule, literal, last_uses(body))

    def _equation(self, around: Around, eqn: Equation, operands: Values) -> Values:
        name = primitive_name(eqn)
        inside = around._replace(callers=(*around.callers, eqn))
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, inside)
        if name == "shard_map" and not around.axes:
            return self._shard_map(eqn, operands, inside)
        is_whole = name in ("pallas_call", "shard_map") or is_rounding(eqn)
        body = None if is_whole else called(eqn)
        if body is not None:
            return self(body, operands, inside)
        # No results: a print, say.
        return self.leaf(eqn, operands, around) if eqn.outvars else []

    def _choose(self, decide: Callable[[], np.ndarray]) -> np.ndarray:
        if self._given is not None:
            return next(self._given)
        self.choices.append(decide())
        return self.choices[-1]

    def _merged(self, index: np.ndarray, values: Values, var: Any) -> Value:
        """Returns for each device of a `shard_map` its own of some values."""
        at = index.reshape(index.shape + (1,) * var.aval.ndim)

        def merged(x: Array, *others: Array) -> Array:
            for i, other in enumerate(others, 1):
                x = to_host(jnp.where(at == i, other, x))
            return x

        return self.source(_in_lanes(merged, values), values)

    def _cond(self, eqn: Equation, operands: Values, around: Around) -> Values:
        index, branches = operands[0].lanes[0], eqn.params["branches"]
        index = self._choose(lambda: np.clip(index, 0, len(branches) - 1))
        taken = np.unique(index)
        found = [self(branches[i], operands[1:], around) for i in taken]
        if len(found) == 1:
            return found[0]
        places, rows = np.searchsorted(taken, index), zip(*found, strict=True)
        pairs = zip(rows, eqn.outvars, strict=True)
        return [self._merged(places, [*values], var) for values, var in pairs]

    def _while(self, eqn: Equation, operands: Values, around: Around) -> Values:
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
        carry, step, goes_on = operands[n_cond + n_body :], 0, np.array(True)

        def decide() -> np.ndarray:
            # Until the first lane ends: a counter that stands still would run forever.
            (test,) = self(params["cond_jaxpr"], [*tests, *carry], around)
            own, both = (x & goes_on for x in (test.lanes[0], np.all(test.lanes, 0)))
            if (own != both).any() and test.node is not None:
                most = 4 * step + 16
                alone = Run(lambda _: True, most_steps=most)
                values = (Value(x.lanes[:1]) for x in (*tests, *consts, *carry))
                alone._while(eqn, [*values], OUTSIDE)
                nodes = (x for x in before([test.node]) if x.eqn and is_decision(x.eqn))
                found = next(nodes, test.node), step, step + most
                self.endless += [found] if alone.is_cut else []
            self.is_cut |= bool(both.any()) and step >= self._most_steps
            return both & (step < self._most_steps)

        while (goes_on := self._choose(decide)).any():
            inside = around.in_step(step)
            outs = self(params["body_jaxpr"], [*consts, *carry], inside)
            if not goes_on.all():
                rows = zip(carry, outs, eqn.outvars, strict=True)
                outs = [self._merged(goes_on, [x, y], var) for x, y, var in rows]
            carry, step = outs, step + 1
        return carry

    def _scan(self, eqn: Equation, operands: Values, around: Around) -> Values:
        n_consts, n_carry = scan_sizes(eqn.params)
        length, order = eqn.params["length"], -1 if eqn.params["reverse"] else 1
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = operands[n_consts : n_consts + n_carry]
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
        return self.source(lanes, values)

    def _shard_map(self, eqn: Equation, operands: Values, around: Around) -> Values:
        axes, params = mapped_axes(eqn), eqn.params
        pairs = zip(operands, params["in_specs"], strict=True)
        inputs = [self._moved(x, lambda y, s=s: split(y, s, axes)) for x, s in pairs]
        outs = self(params["jaxpr"], inputs, around._replace(axes=axes))
        pairs = zip(outs, params["out_specs"], strict=True)
        return [self._moved(x, lambda y, s=s: join(y, s, axes)) for x, s in pairs]

    def _moved(self, x: Value, func: Callable[[Array], Array]) -> Value:
        return self.source(_in_lanes(func, [x]), [x])


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


class Node:
    """A value of a recorded run: a result of an equation, or what none has made.

    Errors are 2-norms relative to the shadow; the local error is infinite if a number is
    not finite that is finite in the shadow.
    """

    kinds: Kinds = frozenset()  # of the program's numbers that are not finite
    shadow_kinds: Kinds = frozenset()
    shadow: tuple[float, float] = _NONE  # smallest and largest, if finite
    own: tuple[float, float] = _NONE
    largest: float = 0.0  # magnitude in the shadow that is finite
    smallest: float = 0.0  # magnitude in the shadow that is not zero
    zeros: bool = False  # whether the program has one
    deviation: float = 0.0  # of the program from the shadow
    error: float = 0.0  # of the local result
    local_is_finite: bool = True  # where the shadow is

    def __init__(
        self,
        index: int,
        where: tuple[Position, Place],
        values: Sequence[Value],
        around: Around = OUTSIDE,
        low: Format | None = None,
    ) -> None:
        self.index = index  # in the order of execution
        here, place = self.here, self.place = where
        self.steps = around.steps  # of the loops around it
        self.eqn = here.eqn  # `None` for an input, a constant, a part of another value
        self.format = low  # the coarsest below f32 that the equation uses
        is_made = self.eqn is not None
        self.primitive = place.primitive if is_made else ""
        self.param = place.param if is_made else ""  # that the equation reads
        self.site = site_of(place) if is_made else (f"input {index}", False)
        # Whether it is part of what `fp8` makes of a matmul, and clips by a scale
        self.in_fp8 = FP8_SCOPE in here.scopes
        self.clips = is_made and self.eqn.params.get("name") == "mpx_clip"
        self.operands = [x.node for x in values if x.node is not None]
        literals = (x.lanes[0] for x in values if x.node is None)
        self.written = [float(x) for x in literals if is_float(x) and not np.ndim(x)]

    def compare(self, lanes: Lanes, local: Array | None) -> None:
        """Notes what is known of its numbers; without a local result, their range."""
        own, shadow = lanes
        if not is_float(shadow) or own.dtype.kind == "u":  # bytes
            return
        a = np.asarray(widened(own) if is_float(own) else np.float32(own))  # int8 codes
        s = np.asarray(widened(shadow))
        good = np.isfinite(s)
        sizes = np.abs(s[good & (s != 0)])
        self.kinds, self.shadow_kinds = _kinds(a), _kinds(s)
        self.shadow, self.own, self.zeros = _ends(s), _ends(a), bool(np.any(a == 0))
        if sizes.size:
            self.largest, self.smallest = float(sizes.max()), float(sizes.min())
        if local is not None and local is not own:
            t = np.asarray(widened(local))
            self.deviation, self.error = (_distance(x, s, good) for x in (a, t))
            if not (np.isfinite(t) | ~good).all():
                self.local_is_finite, self.error = False, math.inf

    @property
    def excess(self) -> float:
        """What `fp8` clips here over what a scale holds that was chosen before; else 0."""
        if not self.clips or self.format is None or self.largest <= _edge(self.format):
            return 0.0
        return self.largest / self.format.max


class Recording(Run):
    """Runs a program in its own precision and in f32, and measures each result."""

    def __init__(self, program: Program) -> None:
        super().__init__(most_steps=math.inf)
        self.nodes: list[Node] = []
        self.equations = 0  # that were run
        self.decisions: list[np.ndarray] = []  # of the shadow, in each comparison
        self.turned: list[Node] = []  # the decisions that are others in f32
        self.eps = 0.0  # of the coarsest format met so far
        found = sites(program, every=True, with_grads=False)
        self.places = {path(x.eqn, x.callers): (x, place) for x, place in found}
        pairs = zip(program.arrays, program.names, strict=True)
        inputs = [
            self.source(self.lanes_of(x), (), dataclasses.replace(_INPUT, param=name))
            for x, name in pairs
        ]
        self.results = self(program.jaxpr, inputs)

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant as it is, and in f32."""
        x = to_host(x)
        return x, widened(x)

    def source(
        self, lanes: Lanes, values: Sequence[Value] = (), place: Place = _INPUT
    ) -> Value:
        """Notes a value that no equation has made."""
        return self._noted(lanes, None, (OUTERMOST, place), values)

    def _noted(self, lanes: Lanes, local: Array | None, *known: Any) -> Value:
        node = Node(len(self.nodes), *known)
        node.compare(lanes, local)
        self.nodes.append(node)
        return Value(lanes, node)

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
        is_turned = False
        if is_decision(eqn) and not around.axes:
            free = shadow[0]
            if shadow is not outs:
                shadow = local = [settled(wide, free, np.asarray(outs[0]), self.eps)]
                is_turned = not np.array_equal(shadow[0], free)
            self.decisions.append(np.asarray(shadow[0]))
        self.equations += 1
        known = self.places[path(eqn, around.callers)], operands, around, low
        pairs = zip(zip(outs, shadow, strict=True), local, strict=True)
        values = [self._noted(*pair, *known) for pair in pairs]
        self.turned += self.nodes[-1:] if is_turned else []
        return values


def before(
    starts: Iterable[Node], passes: Callable[[Node], bool] = lambda _: True
) -> Iterator[Node]:
    """Yields nodes and, back through those that pass, what they are made from."""
    seen = {x.index: x for x in starts}
    first, queue = {*seen}, [-index for index in seen]
    heapq.heapify(queue)
    while queue:
        node = seen[-heapq.heappop(queue)]
        yield node
        for x in node.operands if node.index in first or passes(node) else ():
            if x.index not in seen:
                seen[x.index] = x
                heapq.heappush(queue, -x.index)


def site_of(place: Place) -> Site:
    """Returns the site of an equation."""
    named = place.primitive if place.source == "unknown" else place.source
    return named, place.backward


def _kinds(x: Numbers) -> Kinds:
    if np.isfinite(x).all():
        return frozenset()
    tests = (np.isnan, NAN), (np.isposinf, PLUS), (np.isneginf, MINUS)
    return frozenset(kind for test, kind in tests if test(x).any())


def _ends(x: np.ndarray) -> tuple[float, float]:
    x = x[np.isfinite(x)]
    return (float(x.min()), float(x.max())) if x.size else _NONE


@np.errstate(all="ignore")
def _distance(x: Numbers, shadow: Numbers, good: Numbers) -> float:
    """Returns the 2-norm of an error, relative to the numbers that are `good`."""
    parts = np.where(good, shadow, 0), np.where(good & np.isfinite(x), x - shadow, 0)
    size, off = (float(np.linalg.norm(x.astype(np.float64))) for x in parts)
    return off / size if size else math.inf if off else 0.0
