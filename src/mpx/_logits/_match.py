"""Recognising cross entropy: a softmax over the rows of a weight matrix, read at labels.

What is read of the logits must be their logsumexp, or one logit or log-probability for each
token: by a gather or by a sum with a one-hot array. Whatever else reads them keeps them.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mpx._jaxpr._meanings import Label, Meaning, Scores
from mpx._jaxpr._meanings import Labels as Axes
from mpx._jaxpr._queries import Equation
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term
from mpx._logits import _sizes
from mpx._logits._labels import Labels, axis_of, gathered_labels, one_hot_of


class Exit(NamedTuple):
    """A value that is computed from logits and read by something else.

    Attributes:
        term: The value.
        source: The logits, log-probabilities or logsumexp that it is computed from.
        kind: `logsumexp`, or how the labels are read.
        axes: The labels of the axes of the value; for a sum, of what is summed.
        labels: The labels that are read.
        is_log_prob: Whether log-probabilities are read and not logits.
        on: By what a label's entry of a one-hot array multiplies.
        off: By what other entries multiply.
        summed: The axes of a sum.
    """

    term: Term
    source: Term
    kind: Literal["logsumexp", "gather", "one_hot"]
    axes: Axes
    labels: Labels | None = None
    is_log_prob: bool = False
    on: float = 1.0
    off: float = 0.0
    summed: tuple[int, ...] = ()


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


def find_sites(softmaxes: Softmaxes) -> Iterator[tuple[Term, Site | str]]:
    """Yields logits of more than one chunk: what is read of them, or why they are kept."""
    for term in _matmuls(softmaxes.level):
        (summed, _), (batch, _) = term.eqn.params["dimension_numbers"]
        if math.prod(term.shape) <= _sizes.CHUNK or batch or len(summed) != 1:
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
    """Returns logits with what is read of them, or why they are kept.

    It is `None` for what is no cross entropy.
    """
    inside = _with_meaning(softmaxes, dot)
    known = {key: _meaning(softmaxes, term) for key, term in inside.items()}
    summed = {label for x in known.values() for label in x.summed}
    if len(summed) != 1:
        return None
    (vocab,) = summed
    if vocab[0] == "batch" or len(dot.operands[_side(vocab)].shape) != 2:
        return None
    exits: list[Exit] = []
    kept: str | None = None
    for key, term in list(inside.items()):
        for use in term.level.readers(term.atom):
            found = _use(softmaxes, term, known[key], vocab, inside, use)
            if isinstance(found, str):
                kept = kept or found
            else:
                exits += [x for x in found if all(x.term is not y.term for y in exits)]
    if all(x.kind == "logsumexp" for x in exits):
        return None
    if kept is not None:
        return kept
    all_scores = [known[id(x.source)].scores for x in exits]
    if not all(all_scores[0].is_same(x) for x in all_scores):
        return "labels and softmax read different logits"
    read = [x.labels for x in exits if x.labels is not None]
    if any((x.term, x.mode) != (read[0].term, read[0].mode) for x in read):
        return "the logits are read at several labels"
    return Site(all_scores[0], vocab, exits, inside)


def _side(vocab: Label) -> int:
    return 1 if vocab[0] == "rhs" else 0


def _meaning(softmaxes: Softmaxes, term: Term) -> Meaning:
    found = softmaxes.meaning(term)
    assert found is not None
    return found


def _with_meaning(softmaxes: Softmaxes, dot: Term) -> dict[int, Term]:
    """Returns the terms that are parts of a softmax of a matmul's result."""
    found, waiting = {id(dot): dot}, [dot]
    while waiting:
        term = waiting.pop()
        for use in term.level.readers(term.atom):
            if use is None:
                continue
            level, eqn = use
            out = level.term(eqn.outvars[0])
            meaning = softmaxes.meaning(out)
            is_new = id(out) not in found
            if is_new and meaning is not None and meaning.scores.dot is dot:
                found[id(out)] = out
                waiting.append(out)
    return found


def _use(
    softmaxes: Softmaxes,
    term: Term,
    meaning: Meaning,
    vocab: Label,
    inside: dict[int, Term],
    use: tuple[Level, Equation] | None,
) -> list[Exit] | str:
    """Returns what is read of logits by one equation, or why they are kept."""
    is_row = meaning.kind == "log_sum" and not meaning.shift
    row = Exit(term, term, "logsumexp", meaning.labels)
    if use is None:
        return [row] if is_row else "the logits are returned"
    level, eqn = use
    out = level.term(eqn.outvars[0])
    if id(out) in inside:
        return []
    if is_row:
        return [row]
    name = eqn.primitive.name
    if name == "is_finite" and meaning.kind == "max":
        uses = [x and x[0].term(x[1].outvars[0]) for x in level.readers(out.atom)]
        if all(x is not None and id(x) in inside for x in uses):
            return []
    is_log_prob = meaning.kind == "log_probs"
    if is_log_prob or (meaning.kind == "scores" and not meaning.shift):
        if name == "gather" and out.operands[0] is term:
            found = gathered_labels(out, meaning, vocab)
            if found is not None:
                labels, axes = found
                return [Exit(out, term, "gather", axes, labels, is_log_prob)]
        exits = _one_hot_exits(term, meaning, vocab, out, is_log_prob)
        if exits:
            return exits
    what = "probabilities" if meaning.kind in ("probs", "exp") else "logits"
    return f"the {what} are used elsewhere, by {name}"


def _one_hot_exits(
    term: Term, meaning: Meaning, vocab: Label, out: Term, is_log_prob: bool
) -> list[Exit]:
    """Returns the sums over the vocabulary of a product with a one-hot array."""
    axis = axis_of(meaning, vocab)
    if axis is None or out.shape != term.shape:
        return []
    if out.name == "mul":
        others = [x for x in out.operands if x is not term]
        found = one_hot_of(others[0], axis) if len(others) == 1 else None
    elif out.name == "select_n" and out.operands[2] is term:
        found = one_hot_of(out.operands[0], axis)
        found = found if out.operands[1].scalar == 0.0 else None
    else:
        found = None
    if found is None:
        return []
    exits = []
    for use in out.level.readers(out.atom):
        if use is None or use[1].primitive.name != "reduce_sum":
            return []
        level, eqn = use
        axes = {int(x) for x in eqn.params["axes"]}
        if axis not in axes:
            return []
        labels = Labels(found.labels, meaning.labels, "drop")
        exits.append(
            Exit(
                level.term(eqn.outvars[0]),
                term,
                "one_hot",
                meaning.labels,
                labels,
                is_log_prob,
                found.on,
                found.off,
                tuple(sorted(axes)),
            )
        )
    return exits
