"""The results of a recorded run, and what they depend on."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpx._inspect._dtypes import is_float
from mpx._inspect._record import Node
from mpx._inspect._shadow import widened
from mpx._inspect._tape import Ref, Value


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
    found, queue = set[int](), [ref[0] for ref in refs]
    while queue:
        index = queue.pop()
        if index >= 0 and index not in found:
            found.add(index)
            queue += [ref[0] for ref in nodes[index].parents]
    return found


def nearest_param(nodes: Sequence[Node], index: int) -> str:
    """Returns the parameter that was read last before a node, on the way to it."""
    queue, seen = [-index], set[int]()
    while queue:
        current = -heapq.heappop(queue)
        if current < 0 or current in seen:
            continue
        seen.add(current)
        node = nodes[current]
        known = [name for name in node.names if name]
        if known and node.eqn is not None:
            return known[0]
        for ref in node.parents:
            heapq.heappush(queue, -ref[0])
    return ""
