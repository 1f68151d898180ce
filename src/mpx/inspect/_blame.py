"""Which equations of a recorded run are at fault.

A number that is not finite is traced to where it is born. A finite result is wrong if it
is further from the shadow than the format explains, and an equation is at fault if it
alone, with everything else in f32, makes a result wrong.
"""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from mpx._jax._formats import FORMATS, Format
from mpx._program._queries import SHAPE_ONLY, Equation, names
from mpx.inspect._births import Birth, births
from mpx.inspect._record import (
    Node,
    Outputs,
    Recording,
    Site,
    ancestors,
    before,
    classes_of,
    norm,
    site_of,
)
from mpx.inspect._shadow import only_moves

Numbers = Sequence[np.ndarray]
LOST_BITS = 5
"""A result that has lost this many bits of its format's significand is wrong."""
_COARSEST = 0.5
"""The largest relative error of any result that is not wrong, even with three bits."""
_NOTICEABLE = 0.1
"""Loss and gradients with a smaller relative error are not wrong in any format."""
_INACCURATE = 0.03
"""Loss and gradients with a larger relative error are inaccurate, in 16 bits."""
_INACCURATE_FP8 = 0.25
"""The same in 8 bits, where healthy gradients are 10 to 15 % off."""
_CONDITION = 4
"""How many times the error that one rounding of the parameters causes is allowed."""
_GARBAGE = 0.25
"""A result whose own error is larger is wrong even if little depends on it."""
_FELT = 0.03
"""The least relative error of loss or gradients that such a result must cause."""
_UNSTABLE = 0.25
"""A gradient that one rounding of the parameters changes by this much is not judged.

The gradient of a bias before a normalization, or of the keys' bias in attention, is zero but
for roundings, in f32 too.
"""
EPSILON = 1e-3
"""A number in the code that is smaller may be an epsilon that is too small."""
_MOST_SITES = 12
_MOST_FAULTS = 6
_MOST_LINES = 4
_CANCELS = frozenset(names("add add_any sub reduce_sum cumsum"))
_ACCUMULATES = frozenset(names("cumsum cumprod cumlogsumexp reduce_window_sum"))


def threshold(low: Format) -> float:
    """Returns the relative error beyond which a result in a format is wrong."""
    return min(2.0**LOST_BITS * low.eps, _COARSEST)


class Verdict(NamedTuple):
    """A node at fault.

    Attributes:
        node: The position of the node.
        cause: `"birth"` if it makes numbers that are not finite, `"constant"` if a number
            in the code does, `"error"` if its own error is large, `"sum"` if only many
            small errors together are, `"decision"` if it compares numbers and the result
            is another one in f32, `"loop"` if a loop does not end because of it.
        birth: Where the numbers that are not finite appear, if there are any.
        influence: By how much this place alone changes the worst result, relative to
            that result; `None` if this was not measured.
        result: The name of that result.
        with_nodes: The nodes that must be in f32 together with this one to mend it.
        is_mended: Whether f32 at these nodes mends it.
        steps: The steps that a loop takes in f32, and those after which it has not ended.
    """

    node: int
    cause: str
    birth: Birth | None = None
    influence: float | None = None
    result: str = ""
    with_nodes: tuple[int, ...] = ()
    is_mended: bool = True
    steps: tuple[int, int] = (0, 0)


class Blame:
    """Looks for what is at fault in a recorded run.

    Args:
        recording: The run.
        outputs: Its results.
        mixed: Runs the program in f32 again, with some sites in their own precision and the
            options of `Mixed`.
        disturbed: Runs the function in f32 with its parameters disturbed by one rounding
            to a format.
    """

    def __init__(
        self,
        recording: Recording,
        outputs: Outputs,
        mixed: Callable[..., list[np.ndarray]],
        disturbed: Callable[[Format], list[np.ndarray]],
    ) -> None:
        self.nodes, self.outputs = recording.nodes, outputs
        self._recording, self._mixed, self._disturbed = recording, mixed, disturbed
        self._live = ancestors(self.nodes, outputs.refs)
        self.forward = ancestors(self.nodes, outputs.refs[:1])
        used = [
            x.format for i, x in enumerate(self.nodes) if i in self._live and x.format
        ]
        self.format = max(used, key=lambda x: x.eps, default=None)
        self._sizes = outputs.sizes()
        self.errors, self.own_errors = (
            [
                error if np.isfinite(x).all() else math.inf
                for x, error in zip(
                    outs, self._errors(outs, outputs.exact), strict=True
                )
            ]
            for outs in (outputs.actual, outputs.own)
        )
        self._base: list[float] | None = None
        self._known: dict[frozenset[Site], list[float]] = {}
        self.reruns = 0

    @property
    def stable(self) -> list[bool]:
        """Whether each result is judged: see `_UNSTABLE`."""
        base = self._base or [0.0] * len(self.errors)
        is_grad = self.outputs.is_grad
        return [x < _UNSTABLE or not y for x, y in zip(base, is_grad, strict=True)]

    @property
    def judgement(self) -> Literal["ok", "inaccurate", "wrong"]:
        """How bad it is."""
        broken = not all(map(math.isfinite, (*self.errors, *self.own_errors)))
        limit = max(threshold(self.format), _NOTICEABLE) if self.format else 0.0
        decided = any(x.cause in ("decision", "loop") for x in self.verdicts)
        if broken or decided or self._bad_results(self.measured, limit):
            return "wrong"
        is_bad = bool(self.verdicts or self._bad_results(self.measured))
        return "inaccurate" if is_bad else "ok"

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to know."""
        if self._recording.endless:
            return ("the compiled function was not run: its loop may not end",)
        bad = self._bad_results(self.measured)
        if not bad and max(self.errors, default=0.0) > self._limit >= max(
            self.measured
        ):
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
        for index in self._live - self.forward:
            node = self.nodes[index]
            if node.format is not None:
                sizes = [x.largest for x in node.findings if x.largest > 0]
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
        seen = {self._site(x.node) for x in found}
        for node, *steps in self._recording.endless:
            if self._site(node) not in seen:
                seen.add(self._site(node))
                found.append(Verdict(node, "loop", steps=(steps[0], steps[1])))
        return found

    def _beside(self, found: list[Verdict]) -> list[Verdict]:
        """Adds what else is wrong where numbers are not finite: large local errors."""
        seen = {self._site(x.node) for x in found}
        for site, index in self._suspects():
            if len(found) >= _MOST_FAULTS or self.reruns >= _MOST_SITES:
                break
            parents = self.nodes[index].parents
            is_finite = all(classes_of(self.nodes, x) is None for x in parents)
            if site not in seen and is_finite:
                verdict = self._alone([site], index, "error")
                found = [*found, verdict] if verdict else found
        return found

    # --- Numbers that are not finite --------------------------------------------------

    def _not_finite(self) -> list[Verdict]:
        finite = [np.isfinite(x).all() for x in self.outputs.shadow]
        broken = [
            ref for ref in self.outputs.refs if classes_of(self.nodes, ref) is not None
        ]
        if not broken:
            return []
        origins = births(self.nodes, broken)
        fresh = [x for x in origins if not self._shadow_has(x)]
        shared = [x for x in origins if self._shadow_has(x)]
        # An infinity that a mask means comes last.
        shared.sort(key=lambda x: (x.constant is not None, x.node))
        ordered = [*fresh, *shared] if all(finite) else [*shared, *fresh]
        found: dict[Site, Verdict] = {}
        for birth in ordered:
            index, cause = self._origin(birth)
            found.setdefault(self._site(index), Verdict(index, cause, birth))
        first = list(found.values())
        if all(finite) and fresh:
            first = [x for x in first if x.birth in fresh]
        return first[:_MOST_FAULTS]

    def _epsilon(self, found: list[Verdict]) -> list[Verdict]:
        """Looks for a small number in the code that makes everything finite if larger.

        The reciprocal of an epsilon of 1e-8 does not fit into f16, and is met wherever
        gradients are cast.
        """
        starts, tried = [x.birth.node for x in found if x.birth], list[Equation]()
        for index in before(self.nodes, starts):
            node = self.nodes[index]
            if node.primitive not in ("add", "max") or not _is_epsilon(node):
                continue
            if len(tried) < _MOST_LINES and not any(x is node.eqn for x in tried):
                tried.append(node.eqn)
                outs = self._mixed(lambda _: True, constant=(node.eqn, 0.1))
                if all(np.isfinite(x).all() for x in outs):
                    return [Verdict(index, "constant", found[0].birth)]
        return []

    def _shadow_has(self, birth: Birth) -> bool:
        """Returns whether the shadow is not finite there either."""
        classes = self.nodes[birth.node].findings[birth.out].shadow_classes
        if classes is None:
            return False
        where = birth.where if birth.where.shape == classes.shape else ...
        return bool((classes[where] != 0).any())

    def _origin(self, birth: Birth) -> tuple[int, str]:
        """Returns the node that is to blame for a birth, and the cause.

        If the same operation on the operands of the shadow gives finite numbers, its
        operands were wrong already, and what made them wrong is to blame.
        """
        index, node = birth.node, self.nodes[birth.node]
        if node.eqn is None:
            return index, "birth"
        if birth.constant is not None:
            return index, "constant"
        if self._shadow_has(birth):
            lost = self._lost_constant(index)
            return (index, "birth") if lost is None else (lost, "constant")
        if not node.findings[birth.out].local_is_finite:
            return index, "birth"
        earlier = self._upstream(index)
        return (index, "birth") if earlier is None else (earlier, "error")

    def _lost_constant(self, index: int) -> int | None:
        """Returns the sum with a constant that was flushed to zero, if one led here."""
        queue, seen = [index], set[int]()
        while queue and len(seen) < 20:
            current = queue.pop(0)
            if current < 0 or current in seen:
                continue
            seen.add(current)
            node = self.nodes[current]
            if node.eqn is None:
                queue += [ref[0] for ref in node.parents]
                continue
            if 0 in node.written and node.format and node.primitive in ("add", "max"):
                return current
            if current == index or node.primitive in _PASSES:
                queue += [ref[0] for ref in node.parents]
        return None

    def _upstream(self, index: int) -> int | None:
        """Returns the nearest operation before another one whose own error is large."""

        def deviates(node: Node) -> bool:
            return any(x.deviation > 0 for x in node.findings)

        starts = [ref[0] for ref in self.nodes[index].parents]
        for current in itertools.islice(before(self.nodes, starts, deviates), 400):
            if self._is_wrong(self.nodes[current], single=True):
                return self._first_of_chain(current)
        return None

    def _first_of_chain(self, index: int) -> int:
        """Follows operands that are wrong back to the first operation with an error."""
        limit = threshold(self.nodes[index].format or FORMATS["f32"])
        first, queue, seen = index, [index], set[int]()
        while queue:
            current = queue.pop()
            for parent, out in self.nodes[current].parents:
                if parent < 0 or parent in seen:
                    continue
                seen.add(parent)
                node = self.nodes[parent]
                if node.findings[out].deviation > limit:
                    queue.append(parent)
                    if parent < first and self._is_wrong(node):
                        first = parent
        return first

    def _is_wrong(self, node: Node, single: bool = False) -> bool:
        """Returns whether the error that an operation itself makes is large.

        Args:
            node: The operation.
            single: Whether one number that has lost its digits by cancellation suffices.
        """
        if node.format is None:
            return False
        limit = threshold(node.format)
        return node.error > limit or (
            single and node.primitive in _CANCELS and node.worst > limit
        )

    # --- Finite results ---------------------------------------------------------------

    @functools.cached_property
    def measured(self) -> list[float]:
        """The error of each result, compiled or operation by operation.

        Where a comparison of nearly equal numbers falls differently than in f32, gradients
        jump in any format: see `_ties`. The smaller distance counts, that from f32 or that
        from f32 with the same decisions.
        """
        outputs, found = self.outputs, []
        tied = [self._errors(x, outputs.shadow) for x in (outputs.own, outputs.actual)]
        free = self.own_errors, self.errors
        for i, is_grad in enumerate(outputs.is_grad):
            errors = [x[i] for x in free]
            if is_grad:
                errors = [min(x, y[i]) for x, y in zip(errors, tied, strict=True)]
            found.append(max(errors))
        return found

    def _wrong(self) -> list[Verdict]:
        bad = self._bad_results(self.measured)
        found: list[Verdict] = []
        for site, index in self._suspects():
            if len(found) >= _MOST_FAULTS or self.reruns >= _MOST_SITES:
                break
            if bad or self.nodes[index].error > _GARBAGE:
                verdict = self._alone([site], index, "error")
                found += [verdict] if verdict else []
        found = found or (self._search(bad) if bad else [])
        return self._mended(found)

    def _mended(self, found: list[Verdict]) -> list[Verdict]:
        """Adds to each verdict what else must be in f32, and names sums that came before.

        A difference in f32 of numbers that were rounded before is as wrong as in 16 bits.
        """
        sites = {self._site(x.node) for x in found}
        own = self._errors(self.outputs.own, self.outputs.shadow)
        result = []
        for verdict in found:
            i = self.outputs.names.index(verdict.result)

            def error(sites: set[Site], i: int = i) -> float:
                return self._without(sites)[i]

            limit = max(own[i] / 4, _FELT)
            verdict = self._companions(verdict, sites, error, limit)
            result.append(self._first_cause(verdict))
        return result

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
        for others in (self._makers(verdict.node), self._readers(verdict.node)):
            more, seen = list[int](), set(sites)
            for node in others:
                if self._site(node) in seen:
                    continue
                if len(more) == _MOST_LINES:
                    break
                more.append(node)
                seen.add(self._site(node))
                if error(seen) <= limit:
                    return verdict._replace(with_nodes=tuple(sorted(more)))
        return verdict._replace(is_mended=False)

    def _makers(self, index: int) -> Iterator[int]:
        """Yields the nodes before another one that round what it is made from."""
        return filter(self._rounds, before(self.nodes, [index]))

    def _readers(self, index: int) -> Iterator[int]:
        """Yields the nodes after another one that round what is made from it."""
        reached = {index}
        for i in range(index + 1, len(self.nodes)):
            if any(ref[0] in reached for ref in self.nodes[i].parents):
                reached.add(i)
                if self._rounds(i):
                    yield i

    def _rounds(self, index: int) -> bool:
        node = self.nodes[index]
        is_eqn = node.eqn is not None and node.format is not None
        return is_eqn and not only_moves(node.eqn)

    def _first_cause(self, verdict: Verdict) -> Verdict:
        """Returns the verdict, about the running sum that a difference takes apart."""
        more = verdict.with_nodes
        for index in more:
            if self.nodes[index].primitive in _ACCUMULATES:
                earlier = self._alone([self._site(index)], index, "sum")
                if earlier is not None:
                    others = {verdict.node, *more} - {index}
                    return earlier._replace(with_nodes=tuple(sorted(others)))
        return verdict

    def _decided(self) -> list[Verdict]:
        """Looks for a comparison that changes the loss by falling differently in f32."""
        outputs = self.outputs
        if not outputs.names or outputs.is_grad[0]:
            return []
        jump = self._errors(outputs.shadow, outputs.exact)[0]
        if not jump > max(threshold(self.format or FORMATS["f32"]), _NOTICEABLE):
            return []
        for index in sorted(self._recording.turned & self.forward)[:_MOST_SITES]:
            site = self._site(index)
            free = self._mixed(lambda _: False, recording=self._recording, free=site)
            change = self._errors(free, outputs.shadow)[0]
            if change > jump / 2:
                found = Verdict(index, "decision", None, change, outputs.names[0])
                return [self._companions(found, {site}, self._decides, jump / 4)]
        return []

    def _decides(self, sites: set[Site]) -> float:
        """Returns the error of the loss if some sites are in f32, and all decide."""
        outs = self._mixed(lambda site: site not in sites)
        return self._errors(outs, self.outputs.exact)[0]

    def _suspects(self) -> list[tuple[Site, int]]:
        """Returns the sites whose own error is large, each with its first such node."""
        found: dict[Site, int] = {}
        for index in sorted(self._live):
            node = self.nodes[index]
            if node.eqn is not None and self._is_wrong(node):
                first = self._first_of_chain(index)
                found.setdefault(self._site(first), first)
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
                order.setdefault(self._site(index), index)
                is_cast = node.primitive == "convert_element_type"
                if not (is_cast or only_moves(node.eqn)):
                    last[self._site(index)] = index
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

    def _alone(self, sites: list[Site], index: int, cause: str) -> Verdict | None:
        """Returns a verdict if some sites alone make a result wrong."""
        errors = self._with(sites)
        bad = self._bad_results(
            errors, _FELT if self.nodes[index].error > _GARBAGE else None
        )
        if not bad and cause == "error" and all(map(math.isfinite, self.errors)):
            # Or one of several that make them wrong together, and at least half of it.
            wrong = self._bad_results(self.errors)
            bad = [i for i in wrong if errors[i] > self.errors[i] / 2]
        if not bad:
            return None
        largest = max(errors[i] for i in bad)
        worst = next(i for i in bad if errors[i] >= 0.9 * largest)
        share = (self.errors if self._in_turn else errors)[worst]
        return Verdict(index, cause, None, share, self.outputs.names[worst])

    def _with(self, sites: Sequence[Site]) -> list[float]:
        """Returns the errors of the results with only some sites in low precision."""
        self.reruns += 1
        low = set(sites).__contains__
        outs = self._mixed(low, recording=self._recording, in_turn=self._in_turn)
        return self._errors(outs, self.outputs.shadow)

    def _without(self, sites: Collection[Site]) -> list[float]:
        """Returns the errors of the results with only some sites in f32."""
        key = frozenset(sites)
        if key not in self._known:
            low = lambda site: site not in key  # noqa: E731
            outs = self._mixed(low, recording=self._recording, in_turn=self._in_turn)
            self._known[key] = self._errors(outs, self.outputs.shadow)
        return self._known[key]

    @functools.cached_property
    def _in_turn(self) -> bool:
        """Whether only the compiled program is wrong: its sums round after each term."""
        is_bad = [bool(self._bad_results(x)) for x in (self.errors, self.own_errors)]
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
            outs = self._disturbed(self.format)
            self._base = self._errors(outs, self.outputs.exact)
        return [
            i
            for i, (x, base) in enumerate(zip(errors, self._base, strict=True))
            if self.stable[i] and x > max(limit, _CONDITION * base)
        ]

    def _errors(self, outs: Numbers, wanted: Numbers) -> list[float]:
        """Returns the norms of the errors relative to those of the results in f32."""
        return [
            norm(x[np.isfinite(y)] - y[np.isfinite(y)]) / size
            for x, y, size in zip(outs, wanted, self._sizes, strict=True)
        ]

    def _site(self, index: int) -> Site:
        node = self.nodes[index]
        if node.eqn is None:
            return f"input {index}", False
        return site_of(node.eqn, node.around)


# Zero goes in, zero comes out.
_PASSES = SHAPE_ONLY.union(names("sqrt mul convert_element_type square select_n abs"))


def _is_epsilon(node: Node) -> bool:
    """Returns whether a small number in the code is what keeps a result from zero."""
    small = [abs(x) for x in node.written if abs(x) < EPSILON]
    low, high = node.findings[0].shadow
    least = 0.0 if low <= 0 <= high else min(abs(low), abs(high))
    return bool(small) and least <= 4 * max(small)
