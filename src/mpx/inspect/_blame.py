"""Which equations of a recorded run are at fault.

A number that is not finite is traced to where it first appears. A finite result is wrong if
it is further from the shadow than the format explains, and an equation is at fault if it
alone, with everything else in f32, makes a result wrong.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mpx._jax._formats import FORMATS, Format
from mpx._program._primitives import CASTS
from mpx._program._queries import MATMULS, SHAPE_ONLY, names
from mpx.inspect._dtypes import is_float
from mpx.inspect._equations import PICKS, Numbers, only_moves, to_host, widened
from mpx.inspect._program import Program
from mpx.inspect._result import and_more, rough, short_source
from mpx.inspect._run import (
    NAN,
    Kinds,
    Node,
    Recording,
    Run,
    Site,
    Value,
    before,
)

Arrays = Sequence[Numbers]
# Relative errors: the first in bits of a format's significand, the others as they are.
_LOST_BITS = 5  # a result that has lost this many is wrong
_COARSEST = 0.5  # the largest error of a result that is not wrong, even with three bits
_NOTICEABLE = 0.1  # loss and gradients with less are not wrong in any format
_INACCURATE = 0.03  # loss and gradients with more are inaccurate, in 16 bits
_INACCURATE_FP8 = 0.25  # in 8 bits, where healthy gradients are 10 to 15 % off
_INACCURATE_FP4 = 0.5  # in 4 bits, where they are 18 to 23 % off
_CONDITION = 4  # times the error that one rounding of the parameters causes is allowed
# A gradient that one rounding of the parameters changes by this much is not judged: that of a
# bias before a normalization, or of the keys' bias in attention, is zero but for roundings.
_UNSTABLE = 0.25
EPSILON = 1e-3  # a smaller number in the code may be an epsilon that is too small
_MOST_SITES = 12  # that are tried
_MOST_FOUND = 6
_SINGULAR = names("div log log1p rsqrt pow integer_pow atanh rem digamma tan")
_ADDS = names("add add_any sub reduce_sum cumsum dot_general scatter-add")
_DIFFERENCES = names("add add_any sub reduce_sum cumsum dot_general")
_TOTALS = names("reduce_sum cumsum scatter-add reduce_window_sum")
_ACCUMULATES = names("cumsum cumprod cumlogsumexp reduce_window_sum")


def _threshold(low: Format | None) -> float:
    """Returns the relative error beyond which a result in a format is wrong."""
    return min(2.0**_LOST_BITS * (low or FORMATS["f32"]).eps, _COARSEST)


class Origin(NamedTuple):
    """A result that is not finite although its operands are."""

    node: Node
    kinds: Kinds  # of its numbers that reach the results
    constant: float | None = None  # infinite or nan, written into the equation


class Verdict(NamedTuple):
    """A node at fault."""

    node: Node
    kind: str  # see the guide "My loss is nan"
    effect: str  # what it leads to
    origin: Origin | None = None  # of the numbers that are not finite


class Blame:
    """Records a program and looks for what is at fault in it.

    Its floating results, loss and gradients, are there in four versions: `own` equation by
    equation, `shadow` in f32 with the branches, steps and decisions of the program, `exact`
    in f32 without `amp` and `fp8`, and `actual` compiled. `errors` are the distances of
    `actual` from `exact`, relative to `exact`.
    """

    def __init__(
        self,
        whole: Program,
        exact: Program,
        labels: Sequence[str],
        compiled: Callable[[], Sequence[Any]],
    ) -> None:
        self._whole, self._exact = whole, exact
        self.recording = Recording(whole)
        self.nodes, values = self.recording.nodes, self.recording.results
        self.own, self.shadow = (_floats(x.lanes[i] for x in values) for i in (0, 1))
        # A compiled loop that does not end would not return.
        self.actual = self.own if self.recording.endless else _floats(compiled())
        is_low = any(x.format for x in self.nodes)
        self.exact = self._run(Run(), exact) if is_low else self.actual
        pairs = zip(labels, values, strict=True)
        kept = [(name, x) for name, x in pairs if is_float(x.lanes[0])]
        self.names = [name for name, _ in kept]
        is_grad = [name.startswith("gradient") for name in self.names]
        self.is_grad = np.array(is_grad, bool)
        made = [x.node for _, x in kept]
        self._results = list(filter(None, made))  # without literals
        self._live = [*before(self._results)][::-1]
        self.forward = {*before(filter(None, made[:1]))}  # what the loss needs
        used = [x.format for x in self._live]
        self.format = max(filter(None, used), key=lambda x: x.eps, default=None)
        # The relative error beyond which a result is inaccurate
        limits = {8: _INACCURATE_FP8, 4: _INACCURATE_FP4}
        self._limit = limits.get(self.format.bits if self.format else 0, _INACCURATE)
        # What errors are relative to: the norms of the results in f32. A gradient of zeros is
        # measured against the others; beside a loss of zero, any error is large.
        sizes = np.array([_norm(x[np.isfinite(x)]) for x in self.exact], np.float64)
        every = np.linalg.norm(sizes[self.is_grad])
        sizes = np.where((sizes == 0) & self.is_grad, every, sizes)
        self._sizes = np.where(sizes == 0, 1e-45, sizes)
        self.errors = self._errors(self.actual, self.exact)
        self._own_errors = self._errors(self.own, self.exact)

    def _run(
        self, run: Run, program: Program, disturbed: Format | None = None
    ) -> list[Numbers]:
        """Runs a program in f32, with its parameters rounded at random if asked to."""
        random, inputs = np.random.default_rng(0), []
        for i, x in enumerate(program.arrays):
            x = widened(to_host(x))
            if disturbed is not None and i in program.params:
                noise = random.uniform(-0.5, 0.5, x.shape) * disturbed.eps
                x = (np.asarray(x) * (1 + noise)).astype(x.dtype)
            inputs.append(Value((x,)))
        return _floats(x.lanes[0] for x in run(program.jaxpr, inputs))

    # --- the judgement ----------------------------------------------------------------

    @functools.cached_property
    def _base(self) -> np.ndarray:
        """The change of each result that one rounding of the parameters causes."""
        return self._errors(self._run(Run(), self._exact, self.format), self.exact)

    @functools.cached_property
    def _unstable(self) -> np.ndarray:
        """Whether each result is not judged: see `_UNSTABLE`."""
        return self.is_grad & (self._base >= _UNSTABLE)

    @property
    def unstable(self) -> list[bool]:
        """Whether each gradient is not judged, although errors are large."""
        if not self.format or not self._limit < self.errors.max(initial=0) < math.inf:
            return []
        return self._unstable[self.is_grad].tolist()

    @property
    def judgement(self) -> Literal["ok", "inaccurate", "wrong"]:
        """How bad it is."""
        broken = not np.isfinite([self.errors, self._own_errors]).all()
        limit = max(_threshold(self.format), _NOTICEABLE) if self.format else 0.0
        decided = any(x.kind in ("decision", "convergence") for x in self.verdicts)
        if broken or decided or self._bad_results(self._measured, limit):
            return "wrong"
        bad = self.verdicts or self._bad_results(self._measured)
        return "inaccurate" if bad else "ok"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know."""
        if self.recording.endless:
            return ("the compiled function was not run: its loop may not end",)
        bad, compiled = self._bad_results(self._measured), self.errors.max(initial=0)
        found = list[str]()
        if self._clipped and not self.verdicts:
            lines = {short_source(x.site[0]) for x in self._clipped}
            found.append(
                f"a scale of fp8 clips numbers at {', '.join(sorted(lines))}, which changes "
                f"no result by more than {100 * _INACCURATE:g} % here"
            )
        if not bad and compiled > self._limit >= self._measured.max():
            found.append(
                "gradients differ because comparisons of nearly equal numbers, as in a relu, "
                "fall differently than in f32; with the same decisions they agree"
            )
        if bad and all(self.errors[i] <= self._limit for i in bad):
            found.append(
                "compiled, the error does not show here: XLA keeps more digits than the "
                "program asks for, which depends on the device and on what it fuses"
            )
        return tuple(found)

    @property
    def headroom(self) -> float:
        """The factor by which all gradients may grow before one overflows."""
        rows = [x for x in self._live if x not in self.forward and x.largest > 0]
        rooms = (x.format.max / x.largest for x in rows if x.format)
        return min(rooms, default=math.inf)

    @functools.cached_property
    def verdicts(self) -> list[Verdict]:
        """What is at fault, the first in the order of execution first."""
        found = self._not_finite()
        if self.format is None:
            return found
        found = (self._epsilon(found) or found) if found else self._wrong()
        found = found or self._decided()
        for node, n, more in self.recording.endless[:1]:
            text = f"the loop ends after {n} steps in f32, but not after {more} here"
            found = [*found, Verdict(node, "convergence", text)]
        return found

    # --- numbers that are not finite --------------------------------------------------

    def _not_finite(self) -> list[Verdict]:
        """Returns what makes numbers that are not finite; last infinities that masks mean."""
        is_finite = all(np.isfinite(x).all() for x in self.shadow)
        rows = [(_in_shadow(x), x) for x in _origins(self.nodes, self._results)]
        if is_finite and not all(has for has, _ in rows):
            rows = [row for row in rows if not row[0]]
        # A derivative may run before what the loss needs, and on the same line.
        rank = lambda x: (x.constant is not None, x.node not in self.forward)  # noqa: E731
        rows.sort(key=lambda x: (not x[0], *(rank(x[1]) if x[0] else ())))
        found: dict[Site, Verdict] = {}
        for _, origin in rows:
            node, kind = self._blamed(origin)
            verdict = Verdict(node, kind, self._reach(origin, node), origin)
            found.setdefault(node.site, verdict)
        return list(found.values())[:_MOST_FOUND]

    def _epsilon(self, found: list[Verdict]) -> list[Verdict]:
        """Looks for a small number in the code that makes everything finite if larger.

        The reciprocal of an epsilon of 1e-8 does not fit into f16.
        """
        sums: dict[int, Node] = {}
        for node in before([x.origin.node for x in found if x.origin]):
            kind = node.primitive
            # `max(x, 0)` is a relu. An epsilon that is added may have become 0 in f16.
            written = (abs(x) for x in node.written if x or kind == "add")
            small = max((x for x in written if x < EPSILON), default=-1.0)
            if kind in ("add", "max"):
                low, high = node.shadow
                least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
                if least <= 4 * small:  # it is what keeps the result from zero
                    sums.setdefault(id(node.eqn), node)
        for node in list(sums.values())[:_MOST_FOUND]:
            run = Run(lambda _: True, constant=(node.eqn, 0.1))
            if all(np.isfinite(x).all() for x in self._run(run, self._whole)):
                first = next(x.origin for x in found if x.origin)
                return [Verdict(node, "constant", self._reach(first, node))]
        return []

    def _reach(self, origin: Origin, blamed: Node) -> str:
        """Returns what numbers that are not finite come to."""
        node, what = (
            origin.node,
            "nan" if origin.node.kinds == {NAN} else "infinite numbers",
        )
        if node is not blamed and node.eqn is not None:
            return f"`{node.primitive}` at {node.place.source} makes {what} of it"
        pairs = zip(self.names, self.own, strict=True)
        reached = and_more([name for name, x in pairs if not np.isfinite(x).all()])
        return f"{what}, which reach the {reached}"

    def _blamed(self, origin: Origin) -> tuple[Node, str]:
        """Returns what is to blame for an origin, and for what.

        If the same operation on the operands of the shadow gives finite numbers, what made
        its operands wrong is to blame: the nearest operation with a large error of its own.
        """
        node = origin.node
        if node.eqn is None or origin.constant is not None:
            return node, "input" if node.eqn is None else "constant"
        if node.local_is_finite and not _in_shadow(origin):
            made = before([node], lambda x: x.deviation > 0)
            wrong = filter(_is_wrong, itertools.islice(made, 1, 400))
            if (nearest := next(wrong, None)) is not None:
                first = _first_of_chain(nearest)
                return first, _kind_of_error(first)
        in_shadow, kind = bool(node.shadow_kinds), "overflow"
        zero = any(x.zeros for x in node.operands) or 0 in node.written
        if in_shadow or not node.format or node.largest <= node.format.max:
            if origin.kinds == {NAN}:
                kind = "nan"
            elif node.primitive in _SINGULAR and (zero or not in_shadow):
                kind = "singularity" if in_shadow or zero else "underflow"
        return node, kind

    # --- finite results ---------------------------------------------------------------

    @functools.cached_property
    def _measured(self) -> np.ndarray:
        """The error of each result, compiled or operation by operation.

        Gradients jump where a comparison of nearly equal numbers falls differently than in
        f32: the distance from f32 with the same decisions counts, if it is smaller.
        """
        outs, far = [self.own, self.actual], [self._own_errors, self.errors]
        near = np.minimum([self._errors(x, self.shadow) for x in outs], far)
        return np.where(self.is_grad, near, far).max(0)

    def _wrong(self) -> list[Verdict]:
        """Looks for what makes finite results wrong."""
        found, bad = self._clipping(), self._bad_results(self._measured)
        first: dict[Site, Node] = {}  # the first node of each site with a large error
        for start in map(_first_of_chain, filter(_is_wrong, self._live if bad else ())):
            if not start.excess:
                first.setdefault(start.site, start)
        nodes = sorted(first.values(), key=lambda x: x.index)[:_MOST_SITES]
        for node in nodes:
            verdict = self._alone([node.site], node, _kind_of_error(node))
            found += [self._running_sum(verdict) or verdict] if verdict else []
        found.sort(key=lambda x: x.node.index)
        return found[:_MOST_FOUND] or (self._search(bad) if bad else [])

    @functools.cached_property
    def _clipped(self) -> list[Node]:
        """The nodes that clip, the worst first; of the steps of a loop, the worst."""
        worst = dict[int, Node]()
        for node in sorted(self._live, key=lambda x: -x.excess):
            if node.excess:
                worst.setdefault(id(node.eqn), node)
        return list(worst.values())

    def _clipping(self) -> list[Verdict]:
        """Returns the scales that clip, if that makes results inaccurate without roundings.

        No format explains it: the limit is that of 16 bits.
        """
        if not self._clipped:
            return []

        def without_rounding(nodes: Iterable[Node]) -> np.ndarray:
            clips = {id(x.eqn) for x in nodes}
            run = Run(recording=self.recording, clips=clips)
            errors = self._errors(self._run(run, self._whole), self.shadow)
            return np.where(self._unstable, 0, errors)

        if without_rounding(self._clipped).max() <= _INACCURATE:
            return []
        errors = [(x, without_rounding([x])) for x in self._clipped[:_MOST_SITES]]
        # Many layers may do together what none of them does alone.
        least = min(_INACCURATE, max(x.max() for _, x in errors) / 2)
        return [
            Verdict(node, "clipping", self._change(x.max(), int(x.argmax())))
            for node, x in errors
            if x.max() >= least
        ]

    def _running_sum(self, verdict: Verdict) -> Verdict | None:
        """Returns the verdict on a running sum whose differences have lost their digits."""
        for node in before([verdict.node], lambda x: not x.eqn or only_moves(x.eqn)):
            if node.primitive in _ACCUMULATES and node is not verdict.node:
                return self._alone([node.site], node)
        return None

    def _decided(self) -> list[Verdict]:
        """Looks for a comparison that changes the loss by falling differently in f32."""
        if not self.names or self.is_grad[0]:
            return []
        jump = self._errors(self.shadow, self.exact)[0]
        if not jump > max(_threshold(self.format), _NOTICEABLE):
            return []
        turned = (x for x in self.recording.turned if x in self.forward)
        for node in itertools.islice(turned, _MOST_SITES):
            run = Run(recording=self.recording, free=node.site)
            change = self._errors(self._run(run, self._whole), self.shadow)[0]
            if change > jump / 2:
                return [Verdict(node, "decision", self._change(change, 0))]
        return []

    def _search(self, bad: Sequence[int]) -> list[Verdict]:
        """Looks for the site, such as a sum over many steps, that contributes most."""
        last: dict[Site, Node] = {}  # the last node of each that rounds, if one does
        products: dict[Site, Node] = {}  # of `fp8`, the first of each that is wrong
        for node in self._live:
            is_product = node.in_fp8 and node.primitive in MATMULS
            if is_product and node.deviation > self._limit:
                products.setdefault(node.site, node)
            if node.eqn is not None and node.format:
                is_cast = node.primitive in CASTS
                if node.site not in last or not (is_cast or only_moves(node.eqn)):
                    last[node.site] = node
        sites = list(last)

        def share(part: Sequence[Site]) -> float:
            return float(self._with(part)[bad].max())

        limit = max(share(sites) / 2, self._limit)
        while len(sites) > 1:
            middle = len(sites) // 2
            first, second = sites[:middle], sites[middle:]
            enough = share(first)
            sites = first if enough > limit or enough >= share(second) else second
        verdict = self._alone(sites, (last | products)[sites[0]]) if sites else None
        return [verdict] if verdict else []

    def _alone(self, sites: list[Site], node: Node, kind: str = "") -> Verdict | None:
        """Returns a verdict if some sites alone make a result wrong; "" for a sum."""
        errors = self._with(sites)
        bad = self._bad_results(errors)
        if not bad:
            return None
        worst = next(i for i in bad if errors[i] >= 0.9 * errors[bad].max())
        share = float((self.errors if self._in_turn else errors)[worst])
        adds = node.primitive in _ADDS and not node.in_fp8
        kind = kind or ("accumulation" if adds else "precision")
        return Verdict(node, kind, self._change(share, worst))

    def _change(self, share: float, result: int) -> str:
        name = self.names[result]
        return f"changes the {name} by {rough(share)}, with all else in f32"

    def _with(self, sites: Sequence[Site]) -> np.ndarray:
        """Returns the errors of the results with only some sites in low precision."""
        low = set(sites).__contains__
        run = Run(low, recording=self.recording, in_turn=self._in_turn)
        return self._errors(self._run(run, self._whole), self.shadow)

    @functools.cached_property
    def _in_turn(self) -> bool:
        """Whether only the compiled program is wrong: its sums round after each term."""
        is_bad = [bool(self._bad_results(x)) for x in (self.errors, self._own_errors)]
        return is_bad == [True, False]

    def _bad_results(self, errors: np.ndarray, limit: float | None = None) -> list[int]:
        """Returns which results are further from f32 than the format explains."""
        limit = self._limit if limit is None else limit
        if self.format is None or errors.max(initial=0) <= limit:
            return []
        is_bad = errors > np.maximum(limit, _CONDITION * self._base)
        return np.flatnonzero(is_bad & ~self._unstable).tolist()

    def _errors(self, outs: Arrays, wanted: Arrays) -> np.ndarray:
        """Returns the norms of the errors relative to those of the results in f32."""
        pairs = zip(outs, wanted, strict=True)
        norms = [_norm(x - np.where(np.isfinite(y), y, x)) for x, y in pairs]
        return np.array(norms, np.float64) / self._sizes


def _floats(outs: Iterable[Any]) -> list[Numbers]:
    """Returns the floating arrays among some, in f32."""
    return [np.asarray(widened(x)) for x in outs if is_float(x)]


def _norm(x: Numbers) -> float:
    """Returns the 2-norm; infinite if a number is not finite."""
    x = x.astype(np.float64)
    return float(np.linalg.norm(x)) if np.isfinite(x).all() else math.inf


def _is_wrong(node: Node) -> bool:
    """Returns whether the error that an operation itself makes is large."""
    return node.format is not None and node.error > _threshold(node.format)


def _kind_of_error(node: Node) -> str:
    """Returns what is wrong with an operation whose own error is large."""
    assert node.format is not None
    if not node.local_is_finite:
        return "overflow"
    if node.excess:
        return "clipping"
    is_small = node.largest < max((x.largest for x in node.operands), default=0.0) / 8
    tiny, subtracts = node.format.tiny, node.primitive in _DIFFERENCES
    if subtracts and is_small and node.largest > tiny:
        return "cancellation"
    if node.largest < tiny or node.smallest < tiny / 8:
        return "underflow"
    if node.primitive in _TOTALS:
        return "accumulation"
    return "cancellation" if subtracts else "precision"


def _first_of_chain(node: Node) -> Node:
    """Follows operands that are wrong back to the first operation with an error."""
    limit = _threshold(node.format)
    chain = before([node], lambda x: x.deviation > limit)
    wrong = [x for x in chain if x.deviation > limit and _is_wrong(x)]
    return wrong[-1] if wrong else node


def in_fp8(node: Node) -> list[Node]:
    """Returns a node and what `fp8` makes it of, back to other matmuls."""
    ends = lambda x: x.eqn and (not x.in_fp8 or x.primitive in MATMULS)  # noqa: E731
    return [x for x in before([node], lambda x: not ends(x)) if x.in_fp8]


def matmul_of(node: Node, nodes: Sequence[Node]) -> list[Node]:
    """Returns the matmul for which `fp8` runs a node, and what it is made of."""
    after = nodes[node.index :] if node.in_fp8 else ()
    made = (in_fp8(x) for x in after if x.primitive in MATMULS)
    found = [parts for parts in made if node in parts] or [[node]]
    # A gradient is an operand of two, of which one has the parameter.
    return max(found, key=lambda parts: any(x.param for x in parts))


# --- Origins of numbers that are not finite -------------------------------------------


def _in_shadow(origin: Origin) -> bool:
    """Returns whether the shadow is not finite there either."""
    return bool(origin.kinds & origin.node.shadow_kinds)


def _origins(nodes: Sequence[Node], results: Iterable[Node]) -> list[Origin]:
    """Returns where the numbers of some results that are not finite come from.

    They are followed back through operands that are not finite either. The minus infinity
    of a mask that a softmax removes does not reach the results, and is not found.
    """
    # The kinds that reach the results, and the last node that reads each on the way.
    wanted, found = {x: x.kinds for x in results if x.kinds}, list[Origin]()
    readers: dict[Node, Node | None] = dict.fromkeys(wanted)
    for node in reversed(nodes):
        # What no equation has made is a part of another value, or stacked from some.
        keeps = node.primitive in ("", *CASTS, *PICKS)
        here, is_explained = wanted.get(node, frozenset()), False
        for y in node.operands if here else ():
            same = y.kinds & ({NAN} if NAN in here and not keeps else here)
            hit = same if keeps or same else y.kinds
            is_explained |= bool(hit)
            if hit:
                readers.setdefault(y, node)
                wanted[y] = wanted.get(y, hit) | hit
        if here and not is_explained:
            found.append(_origin(node, here, readers))
    return sorted(found, key=lambda x: x.node.index)


def _origin(start: Node, kinds: Kinds, readers: dict[Node, Node | None]) -> Origin:
    """Returns an origin; that of a constant is where it is first computed with."""
    constant, node = None, start
    while node is not None and node.eqn is not None:
        rounded = node.primitive in CASTS
        written = (x for x in node.written if rounded or not np.isfinite(x))
        constant = next(written, constant)
        if constant is None or not (rounded or node.primitive in SHAPE_ONLY):
            break
        node = readers.get(node)
    if constant is None or node is None:
        return Origin(start, kinds, constant)
    return Origin(node, node.kinds, constant)
