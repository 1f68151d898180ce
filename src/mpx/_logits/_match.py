"""Recognising cross entropy: a softmax over the rows of a weight matrix, read at labels.

What is read of the logits must be their logsumexp, or one logit or log-probability for each
token: by a gather or by a sum with a one-hot array. Whatever else reads them keeps them.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

from mpx._jaxpr._meanings import Label, Meaning, Scores
from mpx._jaxpr._queries import Equation
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term, compact
from mpx._logits._labels import Labels, gathered_labels, one_hot_of


class Exit(NamedTuple):
    """A value that is computed from logits and read by something else.

    Attributes:
        term: The value.
        kind: `logsumexp`, or how the labels are read.
        labels: The labels that are read.
        is_log_prob: Whether log-probabilities are read and not logits.
        on: By what a label's entry of a one-hot array multiplies.
        off: By what other entries multiply.
    """

    term: Term
    kind: Literal["logsumexp", "gather", "one_hot"]
    labels: Labels | None = None
    is_log_prob: bool = False
    on: float = 1.0
    off: float = 0.0


@dataclasses.dataclass(eq=False)
class Site:
    """Logits of which nothing but the cross entropy is read.

    Attributes:
        scores: The logits.
        vocab: The label of their axis of the vocabulary.
        exits: The values that are computed from them.
        inside: The terms between the matmul and the exits, by their `id`.
    """

    scores: Scores
    vocab: Label
    exits: list[Exit] = dataclasses.field(default_factory=list)
    inside: dict[int, Term] = dataclasses.field(default_factory=dict)

    @property
    def eqn(self) -> Equation:
        """The matmul."""
        return self.scores.dot.eqn

    @property
    def hidden(self) -> Term:
        """The hidden states: any axes, one of which is summed over."""
        return self.scores.dot.operands[0 if self.vocab[0] == "rhs" else 1]

    @property
    def summed(self) -> int:
        """The axis of the hidden states that is summed over."""
        side = 0 if self.vocab[0] == "rhs" else 1
        return self.eqn.params["dimension_numbers"][0][side][0]

    @property
    def tokens(self) -> list[Label]:
        """The labels of the other axes of the hidden states, in their order."""
        return [label for label in self.scores.sizes if label != self.vocab]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the axes of the tokens."""
        return tuple(self.scores.sizes[label] for label in self.tokens)

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary."""
        return self.scores.sizes[self.vocab]

    @property
    def weight(self) -> tuple[Term, bool]:
        """The weights, and whether the vocabulary is their first axis."""
        side = 1 if self.vocab[0] == "rhs" else 0
        term, first = self.scores.dot.operands[side], self.vocab[1] == 0
        while term.name == "transpose":
            term, first = term.operands[0], not first
        return term, first

    @property
    def labels(self) -> Labels | None:
        """The labels that are read."""
        return next((x.labels for x in self.exits if x.labels is not None), None)


def find_sites(
    softmaxes: Softmaxes, smallest: int
) -> Iterator[tuple[Term, Site | str]]:
    """Yields large logits, and what is read of them or why they are kept.

    Args:
        softmaxes: The program.
        smallest: The least number of logits that count as large.
    """
    for term in _matmuls(softmaxes.level):
        if math.prod(term.shape) < smallest or term.eqn.params["dimension_numbers"][1][0]:
            continue
        found = _site(softmaxes, term)
        if found is not None:
            yield term, found


def _matmuls(level: Level) -> Iterator[Term]:
    for eqn in level.jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield level.term(eqn.outvars[0])
        body = level.body(eqn)
        if body is not None:
            yield from _matmuls(body)


def _site(softmaxes: Softmaxes, dot: Term) -> Site | str | None:
    """Returns logits with what is read of them, or why they are kept if they are large."""
    inside, exits, others = _followed(softmaxes, dot)
    summed = {
        meaning.summed
        for meaning in map(softmaxes.meaning, inside.values())
        if meaning is not None and meaning.summed
    }
    if len(summed) != 1 or not exits or len(next(iter(summed))) != 1:
        return None  # no softmax of which one entry is read
    ((vocab,),) = summed
    start = softmaxes.meaning(dot)
    assert start is not None
    side = 1 if vocab[0] == "rhs" else 0
    if vocab[0] == "batch" or len(dot.operands[side].shape) != 2:
        return None
    if others:
        return others[0]
    ...
