"""Which equations of a recorded run are at fault.

A number that is not finite is traced to where it is born. A finite result is wrong if it
is further from the shadow than the format explains, and an equation is at fault if it
alone, with everything else in f32, makes a result wrong.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mpx._formats import FORMATS, Format
from mpx._inspect._births import Birth, births
from mpx._inspect._record import (
    Mixed,
    Node,
    Outputs,
    Recording,
    Site,
    ancestors,
    before,
    classes_of,
    site_of,
)
from mpx._inspect._shadow import relative_norm
from mpx._jaxpr._queries import SHAPE_ONLY, names

LOST_BITS = 5
"""A result that has lost so many bits of its format's significand counts as wrong."""
_COARSEST = 0.5
"""The most that any result may be off, also in a format of three bits."""
_CONDITION = 4
"""A result may be off by so many times what one rounding of the parameters causes."""
_NOTICEABLE = 0.1
"""Loss and gradients that are off by less are not wrong in any format."""
_GARBAGE = 0.25
"""A result whose own error is so large is wrong even if little depends on it."""
_FELT = 0.03
"""What must depend on such a result at least."""
_UNSTABLE = 0.25
"""A result that one rounding of the parameters changes by so much is not judged.

The gradient of a bias before a normalization, or of the keys' bias in attention, is zero but
for roundings, in f32 too.
"""
_MOST_SITES = 12
_MOST_FAULTS = 6
_CANCELS = frozenset(names("add add_any sub reduce_sum cumsum"))


def threshold(low: Format) -> float:
    """Returns the relative error beyond which a result in a format is wrong."""
    return min(2.0**LOST_BITS * low.eps, _COARSEST)


class Verdict(NamedTuple):
    """A node at fault.

    Attributes:
        node: The position of the node.
        cause: `"birth"` if it makes numbers that are not finite, `"constant"` if a number
            in the code does, `"error"` if its own error is large, `"sum"` if only many
            small errors together are.
        birth: Where the numbers that are not finite appear, if there are any.
        influence: By how much this place alone changes the worst result, relative to
            that result; `None` if this was not measured.
        result: The name of that result.
    """

    node: int
    cause: str
    birth: Birth | None = None
    influence: float | None = None
    result: str = ""


class Blame:
    """Looks for what is at fault in a recorded run.

    Args:
        recording: The run.
        outputs: Its results.
        rerun: Runs the program again in f32, given how to run it and whether the
            parameters are disturbed by one rounding to a format.
    """

    def __init__(
        self,
        recording: Recording,
        outputs: Outputs,
        rerun: Callable[[Mixed, Format | None], list[np.ndarray]],
        tick: Callable[[], None],
    ) -> None:
        self.nodes, self.outputs = recording.nodes, outputs
        self._recording, self._rerun, self._tick = recording, rerun, tick
        self._live = ancestors(self.nodes, outputs.refs)
        self.forward = ancestors(self.nodes, outputs.refs[:1])
        used = [
            x.format for i, x in enumerate(self.nodes) if i in self._live and x.format
        ]
        self.format = max(used, key=lambda x: x.eps, default=None)
        self.errors = self._errors(outputs.own)
        self._base: list[float] | None = None
        self.reruns = 0

    @property
    def stable(self) -> list[bool]:
        """Whether each result is judged: see `_UNSTABLE`."""
        base = self._base or [0.0] * len(self.errors)
        return [x < _UNSTABLE for x in base]

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

    def verdicts(self) -> list[Verdict]:
        """Returns what is at fault, the first in the order of execution first."""
        found = self._not_finite()
        seen = {self._site(x.node) for x in found}
        if self.format is None:
            return found
        if not found:
            return self._wrong()
        # What else is there: the numbers after it say nothing, the local errors do.
        for site, index in self._suspects():
            if len(found) >= _MOST_FAULTS or self.reruns >= _MOST_SITES:
                break
            if site not in seen:
                verdict = self._alone([site], index, "error")
                found += [verdict] if verdict else []
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

    def _wrong(self) -> list[Verdict]:
        is_wrong = bool(self._bad_results(self.errors))
        found: list[Verdict] = []
        for site, index in self._suspects():
            if len(found) >= _MOST_FAULTS or self.reruns >= _MOST_SITES:
                break
            if is_wrong or self.nodes[index].error > _GARBAGE:
                verdict = self._alone([site], index, "error")
                found += [verdict] if verdict else []
        return found or (self._search() if is_wrong else [])

    def _suspects(self) -> list[tuple[Site, int]]:
        """Returns the sites whose own error is large, each with its first such node."""
        found: dict[Site, int] = {}
        for index in sorted(self._live):
            node = self.nodes[index]
            if node.eqn is not None and self._is_wrong(node):
                first = self._first_of_chain(index)
                found.setdefault(self._site(first), first)
        return sorted(found.items(), key=lambda x: x[1])

    def _search(self) -> list[Verdict]:
        """Looks for the first site with which the results become wrong.

        No error of a single operation is large, but sums over many steps may have lost
        what they add up.
        """
        first: dict[Site, int] = {}
        last: dict[Site, int] = {}
        for index in sorted(self._live):
            node = self.nodes[index]
            if node.eqn is not None and node.format:
                first.setdefault(self._site(index), index)
                last[self._site(index)] = index
        sites = list(first)
        low, high = 0, len(sites)
        while high - low > 1:
            middle = (low + high) // 2
            if self._bad_results(self._with(sites[:middle])):
                high = middle
            else:
                low = middle
        if not sites:
            return []
        verdict = self._alone([sites[high - 1]], last[sites[high - 1]], "sum")
        return [verdict] if verdict else []

    def _alone(self, sites: list[Site], index: int, cause: str) -> Verdict | None:
        """Returns a verdict if some sites alone make a result wrong."""
        errors = self._with(sites)
        is_garbage = self.nodes[index].error > _GARBAGE
        bad = self._bad_results(errors, _FELT if is_garbage else _NOTICEABLE)
        if not bad and cause == "error" and all(map(math.isfinite, self.errors)):
            # Or one of several that make them wrong together, and at least half of it.
            wrong = self._bad_results(self.errors)
            bad = [i for i in wrong if errors[i] > self.errors[i] / 2]
        if not bad:
            return None
        worst = max(bad, key=lambda i: errors[i])
        return Verdict(index, cause, None, errors[worst], self.outputs.names[worst])

    def _with(self, sites: Sequence[Site]) -> list[float]:
        """Returns the errors of the results with only some sites in low precision."""
        self.reruns += 1
        run = Mixed(self._recording, set(sites).__contains__, self._tick)
        return self._errors(self._rerun(run, None))

    def _bad_results(
        self, errors: Sequence[float], least: float = _NOTICEABLE
    ) -> list[int]:
        """Returns which results are further from the shadow than the format explains."""
        if self.format is None:
            return []
        limit = _FELT if least == _FELT else max(threshold(self.format), least)
        if max(errors, default=0.0) <= limit:
            return []
        if self._base is None:
            run = Mixed(self._recording, lambda *_: False, self._tick)
            self._base = self._errors(self._rerun(run, self.format))
        pairs = enumerate(zip(errors, self._base, strict=True))
        return [
            i
            for i, (x, base) in pairs
            if base < _UNSTABLE and x > max(limit, _CONDITION * base)
        ]

    def _errors(self, outs: Sequence[np.ndarray]) -> list[float]:
        return [_error(x, s) for x, s in zip(outs, self.outputs.shadow, strict=True)]

    def _site(self, index: int) -> Site:
        node = self.nodes[index]
        if node.eqn is None:
            return f"input {index}", False
        return site_of(node.eqn, node.around)


# Zero goes in, zero comes out.
_PASSES = SHAPE_ONLY.union(names("sqrt mul convert_element_type square select_n abs"))


def _error(x: np.ndarray, shadow: np.ndarray) -> float:
    """Returns the error of a result relative to its norm; a result of zeros has none."""
    good = np.isfinite(shadow)
    x, shadow = x[good], shadow[good]
    if not np.isfinite(x).all():
        return math.inf
    return relative_norm(x - shadow, shadow) if np.any(shadow) else 0.0
