"""Which equations of a recorded run are at fault.

A number that is not finite is traced to where it first appears. A finite result is wrong if
it is further from the shadow than the format explains, and an equation is at fault if it
alone, with everything else in f32, makes a result wrong.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from mpx._jax._formats import FORMATS, Format
from mpx._program._queries import names
from mpx.inspect._dtypes import is_float
from mpx.inspect._equations import only_moves, to_host, widened
from mpx.inspect._origins import KEEPS_ZERO, Origin, Trace
from mpx.inspect._program import Program
from mpx.inspect._record import Mixed, Node, Recording, Site, numbers
from mpx.inspect._run import NO_REF, Value

Arrays = Sequence[np.ndarray]
# Relative errors: the first in bits of a format's significand, the others as they are.
_LOST_BITS = 5  # a result that has lost so many is wrong
_COARSEST = 0.5  # the largest error of a result that is not wrong, even with three bits
_NOTICEABLE = 0.1  # loss and gradients with less are not wrong in any format
_INACCURATE = 0.03  # loss and gradients with more are inaccurate, in 16 bits
_INACCURATE_FP8 = 0.25  # in 8 bits, where healthy gradients are 10 to 15 % off
_CONDITION = 4  # times the error that one rounding of the parameters causes is allowed
_GARBAGE = (
    0.25  # an operation whose own error is larger is wrong if little depends on it
)
_FELT = 0.03  # the least error of loss or gradients that it must cause
# A gradient that one rounding of the parameters changes by this much is not judged: that of a
# bias before a normalization, or of the keys' bias in attention, is zero but for roundings.
_UNSTABLE = 0.25
EPSILON = 1e-3  # a smaller number in the code may be an epsilon that is too small
_MOST_SITES = 12
_MOST_FOUND = 6
_MOST_LINES = 4
_TINY = 1e-45
_CANCELS = names("add add_any sub reduce_sum cumsum")
_ACCUMULATES = names("cumsum cumprod cumlogsumexp reduce_window_sum")


def _threshold(low: Format | None) -> float:
    """Returns the relative error beyond which a result in a format is wrong."""
    return min(2.0**_LOST_BITS * (low or FORMATS["f32"]).eps, _COARSEST)


Cause = Literal["origin", "constant", "error", "sum", "decision", "loop"]
"""Why a node is at fault.

It makes numbers that are not finite; a number in the code does; its own error is large; only
many small errors together are; it compares numbers with another result in f32; a loop does
not end because of it.
"""


class Verdict(NamedTuple):
    """A node at fault."""

    node: int
    cause: Cause
    origin: Origin | None = None  # of the numbers that are not finite
    influence: float | None = None  # of this place alone on the worst result, relative
    result: str = ""  # the name of that result
    with_nodes: tuple[int, ...] = ()  # that must be in f32 together with this one
    is_mended: bool = True  # by f32 at these nodes
    steps: tuple[int, int] = (0, 0)  # of a loop in f32, and those that were not enough


class Blame:
    """Records a program and looks for what is at fault in it.

    `exact` is the program without `amp` and `fp8`, to be run in f32, and `labels` are the
    names of the results. The floating ones, loss and gradients, are there in four versions:
    `own` equation by equation, `shadow` in f32 with the branches, steps and decisions of the
    program, `exact` in f32, and `actual` compiled. `errors` are the distances of `actual`
    from `exact`, relative to `exact`.
    """

    def __init__(
        self,
        whole: Program,
        exact: Program,
        labels: Sequence[str],
        compiled: Callable[[], Sequence[Any]],
        tick: Callable[[], None],
    ) -> None:
        self._whole, self._exact, self._tick = whole, exact, tick
        self.recording = Recording(tick)
        self.nodes = self.recording.nodes
        inputs = [
            self.recording.input(to_host(x), name, i in whole.params)
            for i, (x, name) in enumerate(zip(whole.arrays, whole.names, strict=True))
        ]
        values = self.recording(whole.jaxpr, inputs)
        self.own, self.shadow = (_floats(x.lanes[i] for x in values) for i in (0, 1))
        # A compiled loop that does not end would not return.
        self.actual = self.own if self.recording.endless else _floats(compiled())
        is_low = any(x.format for x in self.nodes)
        self.exact = self._run(Mixed(tick), exact) if is_low else self.actual
        kept = [
            (name, x.ref)
            for name, x in zip(labels, values, strict=True)
            if is_float(x.lanes[0])
        ]
        self.names, self._refs = [name for name, _ in kept], [ref for _, ref in kept]
        self.is_grad = [name.startswith("gradient") for name in self.names]
        starts = [ref[0] for ref in self._refs]
        self._live = set(self.recording.before(starts))
        self.forward = set(self.recording.before(starts[:1]))  # that the loss needs
        used = [self.nodes[i].format for i in self._live]
        self.format = max(filter(None, used), key=lambda x: x.eps, default=None)
        self._sizes = self._norms()
        self.errors, self._own_errors = (
            [
                error if np.isfinite(x).all() else math.inf
                for x, error in zip(outs, self._errors(outs, self.exact), strict=True)
            ]
            for outs in (self.actual, self.own)
        )
        self._base: list[float] | None = None
        self._known: dict[frozenset[Site], list[float]] = {}
        self._reruns = 0

    def _run(
        self, run: Mixed, program: Program, disturbed: Format | None = None
    ) -> list[np.ndarray]:
        """Runs a program in f32, with its parameters rounded at random if asked to."""
        random, inputs = np.random.default_rng(0), []
        for i, x in enumerate(program.arrays):
            x = widened(to_host(x))
            if disturbed is not None and i in program.params:
                noise = random.uniform(-0.5, 0.5, x.shape) * disturbed.eps
                x = (np.asarray(x) * (1 + noise)).astype(x.dtype)
            inputs.append(Value((x,), NO_REF))
        return _floats(x.lanes[0] for x in run(program.jaxpr, inputs))

    def _mixed(self, low: Callable[[Site], bool], **options: Any) -> list[np.ndarray]:
        """Runs the program in f32 again, with some sites in their own precision."""
        return self._run(Mixed(self._tick, low, **options), self._whole)

    def _norms(self) -> list[float]:
        """Returns what errors are relative to: the norms of the results in f32.

        A gradient of zeros is measured against the other gradients. Beside a loss of zero,
        any error is large.
        """
        sizes = [_norm(x[np.isfinite(x)]) for x in self.exact]
        rows = list(zip(self.exact, self.is_grad, sizes, strict=True))
        count = sum(x.size for x, is_grad, _ in rows if is_grad)
        norm = math.hypot(*(size for _, is_grad, size in rows if is_grad))
        usual = norm / math.sqrt(max(count, 1))
        return [
            size or (usual * math.sqrt(x.size) if is_grad else 0.0) or _TINY
            for x, is_grad, size in rows
        ]

    # --- the judgement ----------------------------------------------------------------

    @property
    def stable(self) -> list[bool]:
        """Whether each result is judged: see `_UNSTABLE`."""
        base = self._base or [0.0] * len(self.errors)
        return [x < _UNSTABLE or not y for x, y in zip(base, self.is_grad, strict=True)]

    @property
    def judgement(self) -> Literal["ok", "inaccurate", "wrong"]:
        """How bad it is."""
        broken = not all(map(math.isfinite, (*self.errors, *self._own_errors)))
        limit = max(_threshold(self.format), _NOTICEABLE) if self.format else 0.0
        decided = any(x.cause in ("decision", "loop") for x in self.verdicts)
        if broken or decided or self._bad_results(self._measured, limit):
            return "wrong"
        is_bad = bool(self.verdicts or self._bad_results(self._measured))
        return "inaccurate" if is_bad else "ok"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know."""
        if self.recording.endless:
            return ("the compiled function was not run: its loop may not end",)
        bad, largest = self._bad_results(self._measured), max(self.errors, default=0.0)
        if not bad and largest > self._limit >= max(self._measured):
            return (
                "gradients differ because comparisons of nearly equal numbers, as in a relu, "
                "fall differently than in f32; with the same decisions they agree",
            )
        if not bad or any(self.errors[i] > self._limit for i in bad):
            return ()
        return (
            "compiled, the error does not show here: XLA keeps more digits than the program "
            "asks for, which depends on the device and on what it fuses",
        )

    @property
    def headroom(self) -> float:
        """The factor by which all gradients may grow before one overflows."""
        found = [math.inf]
        for node in (self.nodes[i] for i in self._live - self.forward):
            if node.format is not None:
                sizes = [x.largest for x in node.stats if x.largest > 0]
                found += [node.format.max / size for size in sizes]
        return min(found)

    @functools.cached_property
    def verdicts(self) -> list[Verdict]:
        """What is at fault, the first in the order of execution first."""
        found = self._not_finite()
        if self.format is None:
            return found
        if found:
            found = self._epsilon(found) or self._beside(found)
        else:
            found = self._wrong() or self._decided()
        seen = {self.recording.site(x.node) for x in found}
        for node, *steps in self.recording.endless:
            site = self.recording.site(node)
            if site not in seen:
                seen.add(site)
                found.append(Verdict(node, "loop", steps=(steps[0], steps[1])))
        return found

    def _beside(self, found: list[Verdict]) -> list[Verdict]:
        """Adds what else is wrong where numbers are not finite: large local errors."""
        seen = {self.recording.site(x.node) for x in found}
        for site, index in self._suspects():
            if len(found) >= _MOST_FOUND or self._reruns >= _MOST_SITES:
                break
            operands = self.recording.operands(self.nodes[index])
            if site not in seen and all(x.classes is None for x in operands):
                verdict = self._alone([site], index, "error")
                found = [*found, verdict] if verdict else found
        return found

    # --- numbers that are not finite --------------------------------------------------

    def _not_finite(self) -> list[Verdict]:
        is_finite = all(np.isfinite(x).all() for x in self.shadow)
        origins = Trace(self.recording).origins(self._refs)
        fresh = [x for x in origins if not self._shadow_has(x)]
        shared = [x for x in origins if self._shadow_has(x)]
        # An infinity that a mask means comes last.
        shared.sort(key=lambda x: (x.constant is not None, x.node))
        found: dict[Site, Verdict] = {}
        for origin in [*fresh, *shared] if is_finite else [*shared, *fresh]:
            index, cause = self._blamed(origin)
            verdict = Verdict(index, cause, origin)
            found.setdefault(self.recording.site(index), verdict)
        first = list(found.values())
        if is_finite and fresh:
            first = [x for x in first if x.origin in fresh]
        return first[:_MOST_FOUND]

    def _epsilon(self, found: list[Verdict]) -> list[Verdict]:
        """Looks for a small number in the code that makes everything finite if larger.

        The reciprocal of an epsilon of 1e-8 does not fit into f16, and is met wherever
        gradients are cast.
        """
        starts, tried = [x.origin.node for x in found if x.origin], list[Any]()
        for index in self.recording.before(starts):
            node = self.nodes[index]
            if node.primitive not in ("add", "max") or not _is_epsilon(node):
                continue
            if len(tried) < _MOST_LINES and not any(x is node.eqn for x in tried):
                tried.append(node.eqn)
                outs = self._mixed(lambda _: True, constant=(node.eqn, 0.1))
                if all(np.isfinite(x).all() for x in outs):
                    return [Verdict(index, "constant", found[0].origin)]
        return []

    def _shadow_has(self, origin: Origin) -> bool:
        """Returns whether the shadow is not finite there either."""
        classes = self.nodes[origin.node].stats[origin.out].shadow_classes
        if classes is None:
            return False
        where = origin.where if origin.where.shape == classes.shape else ...
        return bool((classes[where] != 0).any())

    def _blamed(self, origin: Origin) -> tuple[int, Cause]:
        """Returns the node that is to blame for an origin, and the cause.

        If the same operation on the operands of the shadow gives finite numbers, its
        operands were wrong already, and what made them wrong is to blame.
        """
        index, node = origin.node, self.nodes[origin.node]
        if node.eqn is None:
            return index, "origin"
        if origin.constant is not None:
            return index, "constant"
        if self._shadow_has(origin):
            lost = self._lost_constant(index)
            return (index, "origin") if lost is None else (lost, "constant")
        if not node.stats[origin.out].local_is_finite:
            return index, "origin"
        earlier = self._upstream(index)
        return (index, "origin") if earlier is None else (earlier, "error")

    def _lost_constant(self, index: int) -> int | None:
        """Returns the sum with a constant that was flushed to zero, if one led here."""
        start = self.nodes[index]

        def passes(node: Node) -> bool:
            return node is start or node.eqn is None or node.primitive in KEEPS_ZERO

        for current in itertools.islice(self.recording.before([index], passes), 20):
            node = self.nodes[current]
            if 0 in node.written and node.format and node.primitive in ("add", "max"):
                return current
        return None

    def _upstream(self, index: int) -> int | None:
        """Returns the nearest operation before another one whose own error is large."""
        starts = [ref[0] for ref in self.nodes[index].parents]
        before = self.recording.before(starts, lambda node: _deviates(node, 0))
        for current in itertools.islice(before, 400):
            if self._is_wrong(self.nodes[current], single=True):
                return self._first_of_chain(current)
        return None

    def _first_of_chain(self, index: int) -> int:
        """Follows operands that are wrong back to the first operation with an error."""
        start = self.nodes[index]
        limit = _threshold(start.format)
        chain = self.recording.before(
            [index], lambda node: node is start or _deviates(node, limit)
        )
        wrong = (i for i in chain if _deviates(self.nodes[i], limit))
        return min((i for i in wrong if self._is_wrong(self.nodes[i])), default=index)

    def _is_wrong(self, node: Node, single: bool = False) -> bool:
        """Returns whether the error that an operation itself makes is large.

        If `single`, one number that has lost its digits by cancellation suffices.
        """
        if node.format is None:
            return False
        limit = _threshold(node.format)
        cancels = single and node.primitive in _CANCELS
        return node.error > limit or (
            cancels and any(x.worst > limit for x in node.stats)
        )

    # --- finite results ---------------------------------------------------------------

    @functools.cached_property
    def _measured(self) -> list[float]:
        """The error of each result, compiled or operation by operation.

        Where a comparison of nearly equal numbers falls differently than in f32, gradients
        jump in any format. The smaller distance counts, that from f32 or that from f32 with
        the same decisions.
        """
        tied = [self._errors(x, self.shadow) for x in (self.own, self.actual)]
        found = []
        for i, is_grad in enumerate(self.is_grad):
            errors = [x[i] for x in (self._own_errors, self.errors)]
            if is_grad:
                errors = [min(x, y[i]) for x, y in zip(errors, tied, strict=True)]
            found.append(max(errors))
        return found

    def _wrong(self) -> list[Verdict]:
        bad = self._bad_results(self._measured)
        found: list[Verdict] = []
        for site, index in self._suspects():
            if len(found) >= _MOST_FOUND or self._reruns >= _MOST_SITES:
                break
            if bad or self.nodes[index].error > _GARBAGE:
                verdict = self._alone([site], index, "error")
                found += [verdict] if verdict else []
        found = found or (self._search(bad) if bad else [])
        sites = {self.recording.site(x.node) for x in found}
        own = self._errors(self.own, self.shadow)
        return [self._mended(x, sites, own) for x in found]

    def _mended(
        self, verdict: Verdict, sites: set[Site], own: Sequence[float]
    ) -> Verdict:
        """Adds to a verdict what else must be in f32; names a running sum before it.

        A difference in f32 of numbers that were rounded before is as wrong as in 16 bits.
        """
        i = self.names.index(verdict.result)
        limit = max(own[i] / 4, _FELT)
        verdict = self._companions(
            verdict, sites, lambda sites: self._without(sites)[i], limit
        )
        for index in verdict.with_nodes:
            if self.nodes[index].primitive in _ACCUMULATES:
                earlier = self._alone([self.recording.site(index)], index, "sum")
                if earlier is not None:
                    others = {verdict.node, *verdict.with_nodes} - {index}
                    return earlier._replace(with_nodes=tuple(sorted(others)))
        return verdict

    def _companions(
        self,
        verdict: Verdict,
        sites: set[Site],
        error: Callable[[set[Site]], float],
        limit: float,
    ) -> Verdict:
        """Returns a verdict with the nodes that must be in f32 together with it."""
        if error(sites) <= limit:
            return verdict
        makers = self.recording.before([verdict.node])
        for others in (makers, self._readers(verdict.node)):
            more, seen = list[int](), set(sites)
            for node in others:
                site = self.recording.site(node)
                if site in seen or not self.nodes[node].rounds:
                    continue
                if len(more) == _MOST_LINES:
                    break
                more.append(node)
                seen.add(site)
                if error(seen) <= limit:
                    return verdict._replace(with_nodes=tuple(sorted(more)))
        return verdict._replace(is_mended=False)

    def _readers(self, index: int) -> Iterator[int]:
        """Yields the nodes that are made from another one."""
        reached = {index}
        for i in range(index + 1, len(self.nodes)):
            if any(ref[0] in reached for ref in self.nodes[i].parents):
                reached.add(i)
                yield i

    def _decided(self) -> list[Verdict]:
        """Looks for a comparison that changes the loss by falling differently in f32."""
        if not self.names or self.is_grad[0]:
            return []
        jump = self._errors(self.shadow, self.exact)[0]
        if not jump > max(_threshold(self.format), _NOTICEABLE):
            return []

        def error(sites: set[Site]) -> float:
            """Returns the error of the loss if some sites are in f32, and all decide."""
            outs = self._mixed(lambda site: site not in sites)
            return self._errors(outs, self.exact)[0]

        for index in sorted(self.recording.turned & self.forward)[:_MOST_SITES]:
            site = self.recording.site(index)
            free = self._mixed(lambda _: False, recording=self.recording, free=site)
            change = self._errors(free, self.shadow)[0]
            if change > jump / 2:
                found = Verdict(index, "decision", None, change, self.names[0])
                return [self._companions(found, {site}, error, jump / 4)]
        return []

    def _suspects(self) -> list[tuple[Site, int]]:
        """Returns the sites whose own error is large, each with its first such node."""
        found: dict[Site, int] = {}
        for index in sorted(self._live):
            node = self.nodes[index]
            if node.eqn is not None and self._is_wrong(node):
                first = self._first_of_chain(index)
                found.setdefault(self.recording.site(first), first)
        return sorted(found.items(), key=lambda x: x[1])

    def _search(self, bad: Sequence[int]) -> list[Verdict]:
        """Looks for the site that contributes most to the errors of some results.

        No error of a single operation is large, but sums over many steps may have lost
        what they add up.
        """
        last: dict[Site, int] = {}
        order: dict[Site, int] = {}
        for index in sorted(self._live):
            node = self.nodes[index]
            if node.eqn is not None and node.format:
                order.setdefault(self.recording.site(index), index)
                is_cast = node.primitive == "convert_element_type"
                if not (is_cast or only_moves(node.eqn)):
                    last[self.recording.site(index)] = index
        sites = list(order)
        if not sites:
            return []

        def share(part: Sequence[Site]) -> float:
            errors = self._with(part)
            return max(errors[i] for i in bad)

        limit = max(share(sites) / 2, self._limit)
        while len(sites) > 1:
            middle = len(sites) // 2
            first, second = sites[:middle], sites[middle:]
            enough = share(first)
            sites = first if enough > limit or enough >= share(second) else second
        verdict = self._alone(sites, {**order, **last}[sites[0]], "sum")
        return [verdict] if verdict else []

    def _alone(self, sites: list[Site], index: int, cause: Cause) -> Verdict | None:
        """Returns a verdict if some sites alone make a result wrong."""
        errors = self._with(sites)
        limit = _FELT if self.nodes[index].error > _GARBAGE else None
        bad = self._bad_results(errors, limit)
        if not bad and cause == "error" and all(map(math.isfinite, self.errors)):
            # Or one of several that make them wrong together, and at least half of it.
            wrong = self._bad_results(self.errors)
            bad = [i for i in wrong if errors[i] > self.errors[i] / 2]
        if not bad:
            return None
        largest = max(errors[i] for i in bad)
        worst = next(i for i in bad if errors[i] >= 0.9 * largest)
        share = (self.errors if self._in_turn else errors)[worst]
        return Verdict(index, cause, None, share, self.names[worst])

    def _with(self, sites: Sequence[Site]) -> list[float]:
        """Returns the errors of the results with only some sites in low precision."""
        self._reruns += 1
        return self._rerun(set(sites).__contains__)

    def _without(self, sites: Collection[Site]) -> list[float]:
        """Returns the errors of the results with only some sites in f32."""
        key = frozenset(sites)
        if key not in self._known:
            self._known[key] = self._rerun(lambda site: site not in key)
        return self._known[key]

    def _rerun(self, low: Callable[[Site], bool]) -> list[float]:
        options = {"recording": self.recording, "in_turn": self._in_turn}
        return self._errors(self._mixed(low, **options), self.shadow)

    @functools.cached_property
    def _in_turn(self) -> bool:
        """Whether only the compiled program is wrong: its sums round after each term."""
        is_bad = [bool(self._bad_results(x)) for x in (self.errors, self._own_errors)]
        return is_bad == [True, False]

    @property
    def _limit(self) -> float:
        """The relative error beyond which a result is inaccurate."""
        is_fp8 = self.format is not None and self.format.bits == 8
        return _INACCURATE_FP8 if is_fp8 else _INACCURATE

    def _bad_results(
        self, errors: Sequence[float], limit: float | None = None
    ) -> list[int]:
        """Returns which results are further from f32 than the format explains."""
        if self.format is None:
            return []
        limit = self._limit if limit is None else limit
        if max(errors, default=0.0) <= limit:
            return []
        if self._base is None:
            outs = self._run(Mixed(self._tick), self._exact, self.format)
            self._base = self._errors(outs, self.exact)
        return [
            i
            for i, (x, base) in enumerate(zip(errors, self._base, strict=True))
            if self.stable[i] and x > max(limit, _CONDITION * base)
        ]

    def _errors(self, outs: Arrays, wanted: Arrays) -> list[float]:
        """Returns the norms of the errors relative to those of the results in f32."""
        return [
            _norm(x[np.isfinite(y)] - y[np.isfinite(y)]) / size
            for x, y, size in zip(outs, wanted, self._sizes, strict=True)
        ]


def _floats(outs: Iterable[Any]) -> list[np.ndarray]:
    """Returns the floating arrays among some, in f32."""
    return [numbers(x) for x in outs if is_float(x)]


def _norm(x: np.ndarray) -> float:
    """Returns the 2-norm; infinite if a number is not finite."""
    x = x.astype(np.float64)
    return float(np.linalg.norm(x)) if np.isfinite(x).all() else math.inf


def _deviates(node: Node, limit: float) -> bool:
    return any(x.deviation > limit for x in node.stats)


def _is_epsilon(node: Node) -> bool:
    """Returns whether a small number in the code is what keeps a result from zero."""
    small = [abs(x) for x in node.written if abs(x) < EPSILON]
    low, high = node.stats[0].shadow
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return bool(small) and least <= 4 * max(small)
