"""Scores: products of a matmul that are scaled, biased and masked."""

import dataclasses
import math

import numpy as np

from mpx._recognise._meanings import ABSORBING, MASKED, NO_SHIFT, Meaning, Scores, Side
from mpx._recognise._terms import Term


def with_parents(term: Term, known: list[Meaning | None]) -> tuple[Term, ...]:
    pairs = zip(term.operands, known, strict=True)
    return tuple(operand for operand, meaning in pairs if meaning is not None)


def _scaled(scores: Scores, factor: float) -> Scores | None:
    sides = []
    for side in scores.sides:
        if side.kind == "bias":
            side = dataclasses.replace(side, factor=side.factor * factor)
        elif factor <= 0 or side.fill * factor > MASKED:
            return None
        else:
            side = dataclasses.replace(side, fill=_in_f32(side.fill * factor))
        sides.append(side)
    return dataclasses.replace(scores, scale=scores.scale * factor, sides=tuple(sides))


def _in_f32(x: float) -> float:
    """Returns a number as f32, in which twice the lowest number is -inf."""
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def _with_side(scores: Scores, side: Side) -> Scores:
    return dataclasses.replace(scores, sides=(*scores.sides, side))


def affine(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of scores with a number multiplied, or a value added."""
    (position,) = (i for i, x in enumerate(known) if x is not None)
    source, other = known[position], term.operands[1 - position]
    assert source is not None
    if source.shift != NO_SHIFT or term.operands[position].shape != term.shape:
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
        side = Side("bias", other, source.labels, factor)
        mask = _as_mask(side)
        found = _as_scores(term, known, _with_side(scores, mask or side), source)
        is_first = mask is not None and not source.scores.masks
        return found._replace(empty=mask.fill) if mask and found and is_first else found
    elif term.name == "sub" and position == 1:
        scores = _scaled(source.scores, -1.0)
    return _as_scores(term, known, scores, source)


def _as_mask(side: Side) -> Side | None:
    """Returns a bias of 0 and a very large negative number as a mask, if it is that."""
    term, labels = side.term, side.labels
    while term.name in ("broadcast_in_dim", "convert_element_type"):
        if term.name == "broadcast_in_dim":
            dims = term.params["broadcast_dimensions"]
            labels = tuple(labels[d] for d in dims)
        term = term.operands[0]
    if term.name != "select_n" or len(term.operands) != 3:
        return None
    which, *cases = term.operands
    numbers = [x.scalar for x in cases]
    if which.shape != term.shape or 0.0 not in numbers or None in numbers:
        return None
    keeps = numbers[1] == 0.0
    fill = _in_f32((numbers[0 if keeps else 1] or 0.0) * side.factor)
    if fill > ABSORBING:
        return None
    return Side("mask", which, labels, keeps=keeps, fill=fill, is_added=True)


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
    return Meaning("scores", scores, source.labels, with_parents(term, known))


def negated(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None or source.kind != "scores":
        return None
    return _as_scores(term, known, _scaled(source.scores, -1.0), source)


def selected(term: Term, known: list[Meaning | None]) -> Meaning | None:
    found = [i for i, x in enumerate(known) if x is not None]
    if len(known) != 3 or found not in ([1], [2]):
        return None
    (position,) = found
    source, which = known[position], term.operands[0]
    fill = term.operands[3 - position].scalar
    if source is None or fill is None or which.aval.dtype != np.bool_:
        return None
    parents = (term.operands[position],)
    if source.kind == "max" and fill == 0.0 and which.name == "is_finite":
        # `logsumexp` does not subtract an infinite maximum.
        same = which.operands[0] is term.operands[position]
        empty = source.empty
        empty = 0.0 if empty is not None and not math.isfinite(empty) else empty
        found = source._replace(parents=(*parents, which), empty=empty)
        return found if same else None
    if which.shape != term.shape:
        return None
    side = Side("mask", which, source.labels, keeps=position == 2, fill=fill)
    masked = _masked(source, side)
    return None if masked is None else masked._replace(parents=parents)


def _masked(source: Meaning, side: Side) -> Meaning | None:
    """Returns the meaning of a part of a softmax of which some elements are replaced."""
    scores, fill = source.scores, side.fill
    if source.kind == "scores" and fill <= MASKED and source.shift == NO_SHIFT:
        is_one = not scores.masks or source.empty == fill
        empty = fill if is_one else None
        return source._replace(scores=_with_side(scores, side), empty=empty)
    # A mask of the exponentials alone is no mask of the scores: the largest score, which
    # is subtracted, may be a masked one.
    same = any(side.is_same(x) for x in scores.masks)
    if source.kind in ("exp", "probs") and fill == 0.0 and same:
        return source._replace(late=(*source.late, side), empty=0.0)
    return None
