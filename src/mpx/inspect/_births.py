"""Where numbers that are not finite come from: a walk back through a recorded run."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpx._program._queries import SHAPE_ONLY, names
from mpx._program._run import SHARDS, Ref
from mpx.inspect._record import NAN, Node, classes_of

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


_Want = Callable[[Ref, np.ndarray, int], None]
"""Asks for some numbers of a value, on behalf of a node."""

Where = Any
"""Which numbers of an array: booleans in its shape, a scalar of NumPy for a scalar."""


class Birth(NamedTuple):
    """A result that is not finite although its operands are.

    Attributes:
        node: The position of the node.
        out: The result.
        where: The numbers concerned.
        constant: The infinite number or nan that is written into the equation, if one is.
    """

    node: int
    out: int
    where: Where
    constant: float | None = None


def births(nodes: Sequence[Node], starts: Iterable[Ref]) -> list[Birth]:
    """Returns where the numbers in some results that are not finite come from.

    Each is followed back through the operands that are not finite either, number by
    number where the operation is element-wise. What does not reach the results, such as
    the minus infinity of a mask that a softmax removes, is not found.
    """
    wanted: dict[int, dict[int, np.ndarray]] = {}
    queue: list[int] = []
    readers: dict[int, int] = {}

    def want(ref: Ref, where: Where, reader: int) -> None:
        index, out = ref
        if index not in wanted:
            wanted[index] = {}
            heapq.heappush(queue, -index)
            readers[index] = reader
        seen = wanted[index].get(out)
        wanted[index][out] = np.asarray(where if seen is None else seen | where)

    for ref in starts:
        classes = classes_of(nodes, ref)
        if classes is not None:
            want(ref, classes != 0, -1)
    found = []
    while queue:
        index = -heapq.heappop(queue)
        for out, where in wanted[index].items():
            left = _follow(nodes, index, out, where, want)
            if left.any():
                found.append(_birth(nodes, index, out, left, readers))
    return sorted(found, key=lambda x: x.node)


def _birth(
    nodes: Sequence[Node],
    index: int,
    out: int,
    where: Where,
    readers: dict[int, int],
) -> Birth:
    """Returns a birth; that of a constant is where it is first computed with."""
    constant, reader = None, index
    while reader >= 0 and nodes[reader].eqn is not None:
        node = nodes[reader]
        rounded = node.primitive == "convert_element_type"
        written = [x for x in node.written if rounded or not np.isfinite(x)]
        if written:
            constant = written[0]
        if constant is None or not (rounded or node.primitive in SHAPE_ONLY):
            break
        reader = readers[reader]
    if constant is not None and reader >= 0:
        index, out = reader, 0
        classes = nodes[index].findings[0].classes
        where = np.ones((), bool) if classes is None else classes != 0
    return Birth(index, out, where, constant)


def _follow(
    nodes: Sequence[Node], index: int, out: int, where: Where, want: _Want
) -> np.ndarray:
    """Asks for the operands that explain some numbers; returns those that none does."""
    node = nodes[index]
    classes = node.findings[out].classes
    assert classes is not None
    if node.eqn is None:
        return _follow_parts(nodes, index, where, want)
    exact = node.primitive in _ELEMENTWISE
    keeps = node.primitive in _KEEPS_CLASS
    here = set(np.unique(classes[where]).tolist())
    left = np.array(where)
    for ref in node.parents:
        theirs = classes_of(nodes, ref)
        if theirs is None:
            continue
        if exact and theirs.shape == classes.shape:
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
            want(ref, hit, index)
    return left


def _follow_parts(
    nodes: Sequence[Node], index: int, where: Where, want: _Want
) -> np.ndarray:
    """Follows a part of another value, or a value that was stacked."""
    node = nodes[index]
    known = [ref for ref in node.parents if ref[0] >= 0]
    if not known:
        return where
    if node.part is not None:
        theirs = classes_of(nodes, known[0])
        if theirs is None:
            return where
        hit = np.zeros(theirs.shape, bool)
        if node.part == SHARDS or hit[node.part].shape != where.shape:
            hit = theirs != 0
        else:
            hit[node.part] = where
        want(known[0], hit & (theirs != 0), index)
        return np.zeros_like(where)
    for i, ref in enumerate(node.parents):
        theirs = classes_of(nodes, ref)
        if theirs is not None and theirs.shape != where[i].shape:
            want(ref, theirs != 0, index)  # stacked inside a `shard_map`
        elif theirs is not None and where[i].any():
            want(ref, where[i], index)
    return np.zeros_like(where)
