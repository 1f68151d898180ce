"""The meaning of a value: scores of a matmul, or a part of the softmax of such scores.

    scores = scale · lhs rhs + bias, where mask, else fill
    exp = exp(scores - shift)       sum = Σ exp       log_sum = log sum
    probs = exp / sum               log_probs = scores - shift - log_sum

A row in which everything is masked has one score, the fill. What its other parts are depends
on how the softmax is written: a mean, nan or 0. Each meaning carries that number along.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from mpx._program._terms import Term

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
