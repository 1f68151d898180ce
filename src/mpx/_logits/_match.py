"""Recognising cross entropy: a softmax over the rows of a weight matrix, read at labels.

What is read of the logits must be their logsumexp, or one logit or log-probability for each
token: by a gather or by a sum with a one-hot array. Whatever else reads them keeps them.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from mpx._jaxpr._meanings import NO_SHIFT, Label, Meaning, Scores, Shift
from mpx._jaxpr._meanings import Labels as Axes
from mpx._jaxpr._queries import Equation
from mpx._jaxpr._softmax import Softmaxes
from mpx._jaxpr._terms import Level, Term
from mpx._logits import _sizes
from mpx._logits._labels import Labels, axis_of, gathered_labels, multiplied_by


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
        is_shifted: Whether the highest logit of the token was subtracted.
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
    is_shifted: bool = False


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
    for term in softmaxes.level.made_by("dot_general"):
        (summed, _), (batch, _) = term.eqn.params["dimension_numbers"]
        if math.prod(term.shape) <= _sizes.CHUNK or batch or len(summed) != 1:
            continue
        found = _site(softmaxes, term)
        if found is not None:
            yield term, found


def _site(softmaxes: Softmaxes, dot: Term) -> Site | str | None:
    """Returns logits with what is read of them, or why they are kept.

    It is `None` for what is no cross entropy.
    """
    inside = _with_meaning(softmaxes, dot)
    known = [_meaning(softmaxes, term) for term in inside.values()]
    summed = {label for x in known for label in x.summed}
    if len(summed) != 1:
        return None
    (vocab,) = summed
    side = 1 if vocab[0] == "rhs" else 0
    if vocab[0] == "batch" or len(dot.operands[side].shape) != 2:
        return None
    site = Site(known[0].scores, vocab, inside=inside)
    others: list[str] = []
    for term in inside.values():
        for use in term.level.readers(term.atom):
            found = _use(softmaxes, site, term, use)
            if isinstance(found, str):
                others.append(found)
                continue
            have = {id(x.term) for x in site.exits}
            site.exits += [x for x in found if id(x.term) not in have]
    if others or site.labels is None:
        return others[0] if others else None
    return _checked(softmaxes, site)


def _checked(softmaxes: Softmaxes, site: Site) -> Site | str:
    """Returns the site if all its exits read the same logits at the same labels."""
    read = [_meaning(softmaxes, x.source).scores for x in site.exits]
    if not all(read[0].is_same(x) for x in read):
        return "labels and softmax read different ones"
    labels = [(x.labels.term, x.labels.mode) for x in site.exits if x.labels]
    if any(x != labels[0] for x in labels):
        return "they are read at several labels"
    site.scores = read[0]
    if site.vocab in dict(site.scores.slices):
        return "they are a part of the vocabulary"
    return site


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
    site: Site,
    term: Term,
    use: tuple[Level, Equation] | None,
) -> list[Exit] | str:
    """Returns what is read of logits by one equation, or why they are kept."""
    meaning = _meaning(softmaxes, term)
    out = None if use is None else use[0].term(use[1].outvars[0])
    if out is not None and (id(out) in site.inside or _is_checked(site, meaning, out)):
        return []
    shifted = meaning.shift != NO_SHIFT and meaning.kind != "log_probs"
    # A maximum with a gradient has one that the statistics do not have.
    may_leave = not shifted or meaning.shift == Shift(frozenset({site.vocab}), True)
    if may_leave and meaning.kind == "log_sum":
        row = Exit(term, term, "logsumexp", meaning.labels, is_shifted=shifted)
        return [row]
    if out is None:
        return "they are returned"
    if may_leave and meaning.kind in ("log_probs", "scores"):
        exits = _label_exits(term, meaning, site.vocab, out)
        if exits:
            return [x._replace(is_shifted=shifted) for x in exits]
    return f"{out.name} reads them, too"


def _is_checked(site: Site, meaning: Meaning, out: Term) -> bool:
    """Returns whether an equation asks if a maximum is finite, for the softmax only."""
    if out.name != "is_finite" or meaning.kind != "max":
        return False
    uses = [x and x[0].term(x[1].outvars[0]) for x in out.level.readers(out.atom)]
    return all(x is not None and id(x) in site.inside for x in uses)


def _label_exits(term: Term, meaning: Meaning, vocab: Label, out: Term) -> list[Exit]:
    """Returns the values at labels that an equation reads of logits."""
    is_log_prob = meaning.kind == "log_probs"
    if out.name == "gather" and out.operands[0] is term:
        found = gathered_labels(out, meaning, vocab)
        if found is None:
            return []
        labels, axes = found
        return [Exit(out, term, "gather", axes, labels, is_log_prob)]
    axis = axis_of(meaning, vocab)
    one_hot = None if axis is None else multiplied_by(term, out, axis)
    if one_hot is None:
        return []
    labels = Labels(one_hot.labels, meaning.labels, "drop")
    exits = []
    for use in out.level.readers(out.atom):
        if use is None or use[1].primitive.name != "reduce_sum":
            return []
        level, eqn = use
        axes = tuple(sorted(int(x) for x in eqn.params["axes"]))
        if axis not in axes:
            return []
        exits.append(
            Exit(
                level.term(eqn.outvars[0]),
                term,
                "one_hot",
                meaning.labels,
                labels,
                is_log_prob,
                one_hot.on,
                one_hot.off,
                axes,
            )
        )
    return exits
