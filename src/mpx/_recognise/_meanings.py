"""The meaning of a value: scores of a matmul, or a part of the softmax of such scores.

    scores = scale · lhs rhs + bias, where mask, else fill
    exp = exp(scores - shift)       sum = Σ exp       log_sum = log sum
    probs = exp / sum               log_probs = scores - shift - log_sum

A row in which everything is masked has one score, the fill. What its other parts are depends
on how the softmax is written: a mean, nan or 0. Each meaning carries that number along.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from mpx._recognise._terms import Term

Label = tuple[Literal["batch", "lhs", "rhs"], int]
"""An axis of the matmul that makes the scores: a batch axis by its position among these, or a
free axis of an operand. Axes of size 1 have none."""
Labels = tuple[tuple[Label, ...], ...]
"""The labels of each axis of a value; several where axes were merged."""
Kind = Literal["scores", "max", "exp", "sum", "log_sum", "log_probs", "probs"]
MASKED = -1e4
"""Scores that are replaced by this or less count as masked."""
ABSORBING = -1e20
"""Adding this or less to a score leaves nothing of the score in f32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """What was added to scores, or which of them were kept.

    Attributes:
        kind: `bias` or `mask`.
        term: The array; for a mask, of booleans.
        labels: The labels of its axes, as of the scores that it met.
        factor: By what a bias is multiplied.
        keeps: Whether `True` in a mask keeps the score.
        fill: What masked scores become.
        is_added: Whether the fill was added to the scores, so that they have a gradient
            where they are masked, too.
    """

    kind: Literal["bias", "mask"]
    term: Term
    labels: Labels
    factor: float = 1.0
    keeps: bool = True
    fill: float = -math.inf
    is_added: bool = False

    def is_same(self, other: "Side") -> bool:
        """Returns whether another one has the same array; the fill may differ."""
        return self.origin() == other.origin()

    def origin(self) -> tuple[Any, ...]:
        """Returns what identifies it: the array it was broadcast from, and its labels."""
        term, labels = self.term, self.labels
        while term.name == "broadcast_in_dim" and term.operands[0].eqn is not None:
            dims = term.params["broadcast_dimensions"]
            labels, term = tuple(labels[d] for d in dims), term.operands[0]
        return self.kind, self.factor, self.keeps, id(term), labels


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scaled products of a matmul with biases and masks.

    Attributes:
        dot: The term of the matmul.
        sizes: The size of each label.
        scale: The factor of the products.
        sides: Biases and masks in the order in which they were applied.
    """

    dot: Term
    sizes: dict[Label, int]
    scale: float = 1.0
    sides: tuple[Side, ...] = ()

    @property
    def masks(self) -> tuple[Side, ...]:
        """The masks."""
        return tuple(side for side in self.sides if side.kind == "mask")

    def is_same(self, other: "Scores") -> bool:
        """Returns whether these are the same numbers, perhaps in another layout."""
        if self is other:
            return True
        if self.dot is not other.dot or self.scale != other.scale:
            return False
        if len(self.sides) != len(other.sides):
            return False
        pairs = zip(self.sides, other.sides, strict=True)
        return all(one.is_same(two) and one.fill == two.fill for one, two in pairs)


class Shift(NamedTuple):
    """A maximum: the labels over which it was taken, and whether it has no gradient."""

    labels: frozenset[Label]
    is_stopped: bool = False


NO_SHIFT = Shift(frozenset())


class Meaning(NamedTuple):
    """The meaning of a term.

    Attributes:
        kind: Which part of a softmax it is.
        scores: The scores of that softmax.
        labels: The labels of each axis.
        parents: The terms with a meaning that it is made from.
        shift: The labels over which the maximum was taken that was subtracted, and
            whether its gradient was stopped.
        summed: The labels over which exponentials were summed.
        is_bounded: Whether no exponential can overflow, and not all of a sum underflow.
        late: The masks, also ones of the scores, by which exponentials or probabilities
            became 0.
        empty: What it is in a row in which everything is masked, if all masks count there
            that are `late`; `None` if that is not one known number.
    """

    kind: Kind
    scores: Scores
    labels: Labels
    parents: tuple[Term, ...] = ()
    shift: Shift = NO_SHIFT
    summed: frozenset[Label] = frozenset()
    is_bounded: bool = False
    late: tuple[Side, ...] = ()
    empty: float | None = None


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
