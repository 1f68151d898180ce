"""How the labels of a value's axes follow operations that only move it."""

from collections.abc import Callable

from mpx._program._terms import Term
from mpx._recognise._meanings import Label, Labels, Meaning


def _transposed(term: Term, source: Meaning) -> Labels:
    return tuple(source.labels[i] for i in term.params["permutation"])


def _squeezed(term: Term, source: Meaning) -> Labels:
    dims = {d % len(source.labels) for d in term.params["dimensions"]}
    return tuple(x for i, x in enumerate(source.labels) if i not in dims)


def _broadcast(term: Term, source: Meaning) -> Labels | None:
    """Returns the labels if axes of size 1 are added, or one is expanded back.

    Along the axis of a reduced row a broadcast changes nothing: `sub` and `div` would have
    done the same.
    """
    labels: list[tuple[Label, ...]] = [()] * len(term.shape)
    given = term.operands[0].shape
    dims = [int(d) for d in term.params["broadcast_dimensions"]]
    for label, size, dim in zip(source.labels, given, dims, strict=True):
        if size != term.shape[dim] and source.kind not in ROWS:
            return None
        labels[dim] = label
    grown = [
        n for n, label in zip(term.shape, labels, strict=True) if n != 1 and not label
    ]
    return None if grown and source.kind not in ROWS else tuple(labels)


def _reshaped(term: Term, source: Meaning) -> Labels | None:
    if term.params.get("dimensions") is not None:
        return None
    sizes = source.scores.sizes
    given = term.operands[0].shape
    if any(n != 1 and not x for n, x in zip(given, source.labels, strict=True)):
        return None  # a row that was broadcast
    rest = [label for labels in source.labels for label in labels]
    found = []
    for size in term.shape:
        taken, got = [], 1
        while got < size and rest:
            taken.append(rest.pop(0))
            got *= sizes[taken[-1]]
        if got != size:
            return None
        found.append(tuple(taken))
    return None if rest else tuple(found)


ROWS = ("max", "sum", "log_sum")
RELABEL: dict[str, Callable[[Term, Meaning], Labels | None]] = {
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
}


def of_product(term: Term, source: Meaning, position: int) -> Labels | None:
    """Returns the labels of a value times ones, in a matmul that sums over nothing.

    Args:
        term: The matmul.
        source: The meaning of the value.
        position: Which operand it is.
    """
    summed, batch = term.params["dimension_numbers"]
    ones = term.operands[1 - position]
    if summed[0] or ones.scalar != 1.0 or len(ones.shape) != len(batch[0]):
        return None
    mine = batch[position]
    rest = [i for i in range(len(source.labels)) if i not in mine]
    return tuple(source.labels[i] for i in (*mine, *rest))
