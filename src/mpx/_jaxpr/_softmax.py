"""Recognising a softmax of the result of a matmul, however it is written.

A term of the program may have a meaning: see `Meaning`. The axes of a meaning carry labels of
the matmul's axes, which follow transposes and reshapes, so that a softmax over another axis is
not taken for one over keys. Whatever has no rule here has no meaning.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from mpx._jaxpr._meanings import MASKED, Kind, Label, Labels, Meaning, Scores, Side
from mpx._jaxpr._queries import Equation
from mpx._jaxpr._slices import sliced
from mpx._jaxpr._terms import SAME, Level, Term

_FLOATS = ("float32", "bfloat16", "float16")


class Softmaxes:
    """The meanings of the terms of a program."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._known: dict[int, tuple[Term, Meaning | None]] = {}

    def meaning(self, term: Term) -> Meaning | None:
        """Returns the meaning of a term, if it has one."""
        if term.eqn is None or id(term) in self._known:
            return self._known.get(id(term), (term, None))[1]
        # Without recursion: chains of operations may be longer than Python's stack.
        waiting = [term]
        while waiting:
            last = waiting[-1]
            rule = _RULES.get(last.name)
            needs = [] if rule is None or last.name == "dot_general" else last.operands
            new = [x for x in needs if x.eqn is not None and id(x) not in self._known]
            if new:
                waiting.extend(new)
                continue
            waiting.pop()
            found = None
            if rule is not None and str(last.aval.dtype) in _FLOATS:
                found = rule(last, [self.meaning(x) for x in needs])
            self._known[id(last)] = last, found
        return self._known[id(term)][1]

    def history(self, terms: tuple[Term, ...]) -> dict[int, Term]:
        """Returns all terms with a meaning from which these are made, with them."""
        found: dict[int, Term] = {}
        waiting = list(terms)
        while waiting:
            term = waiting.pop()
            if id(term) in found:
                continue
            found[id(term)] = term
            known = self.meaning(term)
            waiting.extend(known.parents if known is not None else ())
        return found

    def is_private(self, terms: tuple[Term, ...], reader: Equation) -> bool:
        """Returns whether a value and what it is made from is read by nothing else.

        Args:
            terms: The value, as one or several terms.
            reader: The equation that reads it.
        """
        inside = self.history(terms)
        equations = {id(term.eqn) for term in inside.values()} | {id(reader)}
        return all(
            use is not None and id(use[1]) in equations
            for term in inside.values()
            for use in term.level.readers(term.atom)
        )


Rule = Callable[[Term, "list[Meaning | None]"], Meaning | None]
"""Returns the meaning of a term from those of its operands."""


def _dot(term: Term, _: list[Meaning | None]) -> Meaning | None:
    lhs, rhs = term.operands
    (lhs_sum, _), (lhs_batch, rhs_batch) = term.eqn.params["dimension_numbers"]
    if len(lhs_sum) != 1:
        return None
    axes: list[tuple[Label, int]] = [
        (("batch", i), lhs.shape[axis]) for i, axis in enumerate(lhs_batch)
    ]
    for side, operand, batch, summed in zip(
        ("lhs", "rhs"),
        (lhs, rhs),
        (lhs_batch, rhs_batch),
        term.eqn.params["dimension_numbers"][0],
        strict=True,
    ):
        axes += [
            ((side, i), size)
            for i, size in enumerate(operand.shape)
            if i not in batch and i not in summed
        ]
    labels = tuple((label,) if size != 1 else () for label, size in axes)
    sizes = {label: size for label, size in axes if size != 1}
    return Meaning("scores", Scores(term, sizes), labels)


def _with_parents(term: Term, known: list[Meaning | None]) -> tuple[Term, ...]:
    pairs = zip(term.operands, known, strict=True)
    return tuple(operand for operand, meaning in pairs if meaning is not None)


# --- Layout ---------------------------------------------------------------------------


def _layout(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None:
        return None
    relabel = _RELABEL.get(term.name)
    labels = source.labels
    if relabel is not None:
        labels = relabel(term, source)
    if labels is None:
        return None
    return source._replace(labels=labels, parents=(term.operands[0],))


def _transposed(term: Term, source: Meaning) -> Labels:
    return tuple(source.labels[i] for i in term.eqn.params["permutation"])


def _squeezed(term: Term, source: Meaning) -> Labels:
    dims = {d % len(source.labels) for d in term.eqn.params["dimensions"]}
    return tuple(x for i, x in enumerate(source.labels) if i not in dims)


def _broadcast(term: Term, source: Meaning) -> Labels | None:
    """Returns the labels if axes of size 1 are added, or one is expanded back.

    Along the axis of a reduced row a broadcast changes nothing: `sub` and `div` would have
    done the same.
    """
    labels: list[tuple[Label, ...]] = [()] * len(term.shape)
    given = term.operands[0].shape
    dims = [int(d) for d in term.eqn.params["broadcast_dimensions"]]
    for label, size, dim in zip(source.labels, given, dims, strict=True):
        if size != term.shape[dim] and source.kind not in _ROWS:
            return None
        labels[dim] = label
    grown = [
        n for n, label in zip(term.shape, labels, strict=True) if n != 1 and not label
    ]
    return None if grown and source.kind not in _ROWS else tuple(labels)


def _reshaped(term: Term, source: Meaning) -> Labels | None:
    if term.eqn.params.get("dimensions") is not None:
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


_ROWS = ("max", "sum", "log_sum")
_RELABEL: dict[str, Callable[[Term, Meaning], Labels | None]] = {
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
}


# --- Scale, bias and mask -------------------------------------------------------------


def _scaled(scores: Scores, factor: float) -> Scores | None:
    sides = []
    for side in scores.sides:
        if side.kind == "bias":
            side = dataclasses.replace(side, factor=side.factor * factor)
        elif factor <= 0 or side.fill * factor > MASKED:
            return None
        else:
            side = dataclasses.replace(side, fill=side.fill * factor)
        sides.append(side)
    return dataclasses.replace(scores, scale=scores.scale * factor, sides=tuple(sides))


def _with_side(scores: Scores, side: Side) -> Scores:
    return dataclasses.replace(scores, sides=(*scores.sides, side))


def _affine(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of scores with a number multiplied, or a value added."""
    (position,) = (i for i, x in enumerate(known) if x is not None)
    source, other = known[position], term.operands[1 - position]
    assert source is not None
    if source.shift or term.operands[position].shape != term.shape:
        return None
    number = other.scalar
    scores: Scores | None = source.scores
    if term.name in ("mul", "div"):
        if number is None or not math.isfinite(number) or number == 0:
            return None
        if term.name == "div":
            if position != 0:
                return None
            number = 1 / number
        scores = _scaled(source.scores, number)
    elif number != 0.0:
        factor = 1.0
        if term.name == "sub":
            factor = -1.0 if position == 0 else 1.0
            scores = source.scores if position == 0 else _scaled(source.scores, -1.0)
        if scores is None or not _fits(other, term):
            return None
        scores = _with_side(scores, Side("bias", other, source.labels, factor))
    elif term.name == "sub" and position == 1:
        scores = _scaled(source.scores, -1.0)
    return _as_scores(term, known, scores, source)


def _fits(side: Term, term: Term) -> bool:
    """Returns whether a side has the axes of scores, with size 1 where it is broadcast."""
    if len(side.shape) != len(term.shape):
        return False
    pairs = zip(side.shape, term.shape, strict=True)
    return all(size in (1, full) for size, full in pairs)


def _as_scores(
    term: Term,
    known: list[Meaning | None],
    scores: Scores | None,
    source: Meaning,
) -> Meaning | None:
    if scores is None:
        return None
    return Meaning("scores", scores, source.labels, _with_parents(term, known))


def _arithmetic(term: Term, known: list[Meaning | None]) -> Meaning | None:
    kinds = [None if x is None else x.kind for x in known]
    if kinds == ["scores", "scores"] and term.name in ("add", "sub"):
        known = _without_bias(known)
        kinds = [None if x is None else x.kind for x in known]
    if kinds in (["scores", None], [None, "scores"]):
        return _affine(term, known)
    return _two_parts(term, known) if None not in kinds else None


def _without_bias(known: list[Meaning | None]) -> list[Meaning | None]:
    """Returns the meanings of two matmuls' results without that of the bias.

    A bias that comes out of a matmul, as one of pairs or positions, has fewer batch axes.
    """
    counts = [sum(label[0] == "batch" for label in x.scores.sizes) for x in known if x]
    if counts[0] == counts[1]:
        return known
    return [known[0], None] if counts[0] > counts[1] else [None, known[1]]


def _neg(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None or source.kind != "scores":
        return None
    return _as_scores(term, known, _scaled(source.scores, -1.0), source)


def _select(term: Term, known: list[Meaning | None]) -> Meaning | None:
    if (
        len(known) != 3
        or known[0] is not None
        or (known[1] is None) == (known[2] is None)
    ):
        return None
    position = 1 if known[1] is not None else 2
    source, which = known[position], term.operands[0]
    fill = term.operands[3 - position].scalar
    if source is None or fill is None or which.aval.dtype != np.bool_:
        return None
    parents = _with_parents(term, known)
    if source.kind == "max" and fill == 0.0 and which.name == "is_finite":
        # `logsumexp` does not subtract an infinite maximum.
        same = which.operands[0] is term.operands[position]
        return source._replace(parents=(*parents, which)) if same else None
    if which.shape != term.shape:
        return None
    side = Side("mask", which, source.labels, keeps=position == 2, fill=fill)
    if source.kind == "scores" and fill <= MASKED and not source.shift:
        return source._replace(scores=_with_side(source.scores, side), parents=parents)
    if fill != 0.0:
        return None
    # What is 0 after the exponential was -inf before; the shift may be any number.
    same = any(side.is_same(x) for x in source.scores.sides)
    if source.kind == "exp":
        scores = source.scores
        if not same:
            side = dataclasses.replace(side, fill=-math.inf)
            scores = _with_side(scores, side)
        return source._replace(scores=scores, parents=parents)
    if source.kind == "probs" and same:
        return source._replace(parents=parents, zeroed=True)
    return None


# --- Softmax --------------------------------------------------------------------------


def _reduced(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    wanted = {"reduce_max": "scores", "reduce_sum": "exp"}[term.name]
    if source is None or source.kind != wanted:
        return None
    if wanted == "scores" and source.shift:
        return None
    axes = {int(axis) for axis in term.eqn.params["axes"]}
    gone = frozenset(label for axis in axes for label in source.labels[axis])
    labels = tuple(x for i, x in enumerate(source.labels) if i not in axes)
    parents = (term.operands[0],)
    if wanted == "scores":
        return Meaning("max", source.scores, labels, parents, shift=gone)
    return Meaning("sum", source.scores, labels, parents, source.shift, gone)


def _max(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of `max(-inf, row)`, which `jnp.max(initial=)` writes."""
    found = [x for x in known if x is not None]
    if len(found) != 1 or found[0].kind != "max":
        return None
    number = term.operands[0 if known[0] is None else 1].scalar
    if number != -math.inf:
        return None
    return found[0]._replace(parents=_with_parents(term, known))


def _exp(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    kinds: dict[str, Kind] = {"scores": "exp", "log_probs": "probs"}
    if source is None or source.kind not in kinds:
        return None
    return source._replace(kind=kinds[source.kind], parents=(term.operands[0],))


def _log(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None or source.kind != "sum":
        return None
    return source._replace(kind="log_sum", parents=(term.operands[0],))


def _two_parts(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of a difference or ratio of two parts of one softmax."""
    first, second = known
    assert first is not None
    assert second is not None
    if not first.scores.is_same(second.scores) or not _aligned(first, second):
        return None
    if term.operands[0].shape != term.shape:
        return None
    parents = _with_parents(term, known)
    pair = term.name, first.kind, second.kind
    if pair == ("sub", "scores", "max") and not first.shift:
        return first._replace(shift=second.shift, parents=parents)
    is_row = first.shift == second.shift
    summed = {"parents": parents, "summed": second.summed}
    if pair == ("sub", "scores", "log_sum") and is_row:
        return first._replace(kind="log_probs", **summed)
    if pair == ("div", "exp", "sum") and is_row:
        return first._replace(kind="probs", **summed)
    if pair == ("add", "log_sum", "max") and second.shift == first.shift:
        # The logsumexp of the scores themselves.
        return first._replace(shift=frozenset(), parents=parents)
    if pair == ("add", "max", "log_sum") and first.shift == second.shift:
        return second._replace(shift=frozenset(), parents=parents)
    return None


def _aligned(first: Meaning, second: Meaning) -> bool:
    """Returns whether the axes that both values have are at the same places."""
    if not second.labels:
        return True  # one number for all
    if len(first.labels) != len(second.labels):
        return False
    pairs = zip(first.labels, second.labels, strict=True)
    return all(not y or x == y for x, y in pairs) or (
        first.kind in _ROWS and first.labels == second.labels
    )


def _abs(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of the absolute value of a sum of exponentials: the same."""
    (source,) = known
    if source is None or source.kind != "sum":
        return None
    return source._replace(parents=(term.operands[0],))


_RULES: dict[str, Rule] = {
    "dot_general": _dot,
    **dict.fromkeys(
        (
            *_RELABEL,
            *("convert_element_type", *SAME),
        ),
        _layout,
    ),
    **dict.fromkeys(("mul", "div", "add", "sub", "add_any"), _arithmetic),
    "slice": sliced,
    "neg": _neg,
    "select_n": _select,
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
    "max": _max,
    "exp": _exp,
    "log": _log,
    "abs": _abs,
}
