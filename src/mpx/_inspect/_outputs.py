"""The results of a recorded run, and what they depend on."""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpx._inspect._dtypes import is_float
from mpx._inspect._record import Node
from mpx._inspect._shadow import widened
from mpx._jaxpr._run import Ref, Value


class Outputs(NamedTuple):
    """The results of a program: the loss and the gradients, with their names."""

    names: list[str]
    refs: list[Ref]
    own: list[np.ndarray]
    shadow: list[np.ndarray]


def outputs_of(values: Sequence[Value], labels: Sequence[str]) -> Outputs:
    """Returns the floating results of a recording."""
    pairs = zip(values, labels, strict=True)
    kept = [(x, name) for x, name in pairs if is_float(x.lanes[0])]
    arrays = [[np.asarray(widened(x.lanes[i])) for x, _ in kept] for i in (0, 1)]
    return Outputs([name for _, name in kept], [x.ref for x, _ in kept], *arrays)


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
