"""Where numbers that are not finite come from."""

import heapq
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mpx._program._queries import SHAPE_ONLY, names
from mpx.inspect._record import NAN, Recording
from mpx.inspect._run import SHARDS, Ref

_Where = Any
"""Which numbers of an array: booleans in its shape, a scalar of NumPy for a scalar."""
# Zero goes in, zero comes out.
KEEPS_ZERO = SHAPE_ONLY.union(
    names("sqrt mul convert_element_type square select_n abs")
)
_ELEMENTWISE = frozenset(
    names(
        "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp "
        "convert_element_type copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 "
        "floor integer_pow is_finite lgamma log log1p logistic max min mul name neg "
        "nextafter optimization_barrier pow reduce_precision rem round rsqrt select_n "
        "sign sin sinh sqrt square stop_gradient sub tan tanh"
    )
)
# Their results are numbers of their operands.
_KEEPS_CLASS = SHAPE_ONLY.union(
    names(
        "convert_element_type select_n max min reduce_max reduce_min concatenate gather "
        "dynamic_slice pad stop_gradient clamp cummax cummin argmax argmin"
    )
)


class Origin(NamedTuple):
    """A result that is not finite although its operands are."""

    node: int
    out: int
    where: _Where
    constant: float | None = None  # infinite or nan, written into the equation


class Trace:
    """A walk back from results that are not finite.

    Each number is followed through the operands that are not finite either, one by one where
    the operation is element-wise. What does not reach the results, such as the minus
    infinity of a mask that a softmax removes, is not found.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording, self._nodes = recording, recording.nodes
        self._wanted: dict[int, dict[int, np.ndarray]] = {}
        self._queue: list[int] = []
        self._readers: dict[int, int] = {}

    def origins(self, starts: Iterable[Ref]) -> list[Origin]:
        """Returns where the numbers of some results that are not finite come from."""
        for ref in starts:
            classes = self._recording.stats(ref).classes
            if classes is not None:
                self._want(ref, classes != 0, -1)
        found = []
        while self._queue:
            index = -heapq.heappop(self._queue)
            for out, where in self._wanted[index].items():
                left = self._follow(index, out, where)
                if left.any():
                    found.append(self._origin(index, out, left))
        return sorted(found, key=lambda x: x.node)

    def _want(self, ref: Ref, where: _Where, reader: int) -> None:
        """Asks for some numbers of a value, on behalf of a node."""
        index, out = ref
        if index not in self._wanted:
            self._wanted[index] = {}
            heapq.heappush(self._queue, -index)
            self._readers[index] = reader
        seen = self._wanted[index].get(out)
        self._wanted[index][out] = np.asarray(where if seen is None else seen | where)

    def _origin(self, index: int, out: int, where: _Where) -> Origin:
        """Returns an origin; that of a constant is where it is first computed with."""
        constant, reader = None, index
        while reader >= 0 and self._nodes[reader].eqn is not None:
            node = self._nodes[reader]
            rounded = node.primitive == "convert_element_type"
            written = [x for x in node.written if rounded or not np.isfinite(x)]
            if written:
                constant = written[0]
            if constant is None or not (rounded or node.primitive in SHAPE_ONLY):
                break
            reader = self._readers[reader]
        if constant is not None and reader >= 0:
            index, out = reader, 0
            classes = self._nodes[index].stats[0].classes
            where = np.ones((), bool) if classes is None else classes != 0
        return Origin(index, out, where, constant)

    def _follow(self, index: int, out: int, where: _Where) -> np.ndarray:
        """Asks for operands that explain some numbers; returns those that none does."""
        node = self._nodes[index]
        classes = node.stats[out].classes
        assert classes is not None
        if node.eqn is None:
            return self._follow_parts(index, where)
        keeps = node.primitive in _KEEPS_CLASS
        here = set(np.unique(classes[where]).tolist())
        left = np.array(where)
        for ref in node.parents:
            theirs = self._recording.stats(ref).classes
            if theirs is None:
                continue
            if node.primitive in _ELEMENTWISE and theirs.shape == classes.shape:
                hit = where & (theirs != 0)
                if keeps:
                    hit &= theirs == classes
                left = np.asarray(left & ~hit)
            else:
                hit = theirs != 0
                if keeps or NAN not in here:
                    same = np.isin(theirs, list(here))
                    hit = hit & same if same.any() or keeps else hit
                elif (theirs == NAN).any():
                    hit = theirs == NAN
                if hit.any():
                    left = np.zeros_like(left)
            if hit.any():
                self._want(ref, hit, index)
        return left

    def _follow_parts(self, index: int, where: _Where) -> np.ndarray:
        """Follows a part of another value, or a value that was stacked."""
        node = self._nodes[index]
        known = [ref for ref in node.parents if ref[0] >= 0]
        if not known:
            return where
        if node.part is not None:
            theirs = self._recording.stats(known[0]).classes
            if theirs is None:
                return where
            hit = np.zeros(theirs.shape, bool)
            if node.part == SHARDS or hit[node.part].shape != where.shape:
                hit = theirs != 0
            else:
                hit[node.part] = where
            self._want(known[0], hit & (theirs != 0), index)
            return np.zeros_like(where)
        for i, ref in enumerate(node.parents):
            theirs = self._recording.stats(ref).classes
            if theirs is not None and theirs.shape != where[i].shape:
                self._want(ref, theirs != 0, index)  # stacked inside a `shard_map`
            elif theirs is not None and where[i].any():
                self._want(ref, where[i], index)
        return np.zeros_like(where)
