"""Recognising a softmax of the result of a matmul, however it is written.

A term of the program may have a meaning:

    scores = scale · lhs rhs + bias, where mask, else fill
    exp = exp(scores - shift)       sum = Σ exp       probs = exp / sum

The axes of a meaning carry labels of the matmul's axes, which follow transposes and reshapes,
so that a softmax over another axis is not taken for one over keys. Whatever has no rule here
has no meaning.

A row in which everything is masked has one score, the fill. What its other parts are depends
on how the softmax is written: a mean, nan or 0. Each meaning carries that number along.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._program._queries import Equation
from mpx._recognise._terms import NUMPY, SAME, Level, Term

_FLOATS = ("float32", "bfloat16", "float16")
Label = tuple[Literal["batch", "lhs", "rhs"], int]
"""An axis of the matmul that makes the scores: a batch axis by its position among these, or a
free axis of an operand. Axes of size 1 have none."""
Labels = tuple[tuple[Label, ...], ...]
"""The labels of each axis of a value; several where axes were merged."""
Kind = Literal["scores", "max", "exp", "sum", "probs"]
MASKED = -1e4
"""Scores that are replaced by this or less count as masked."""
ABSORBING = -1e20
"""Adding this or less to a score leaves nothing of the score in f32."""


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """What was added to scores, or which of them were kept."""

    kind: Literal["bias", "mask"]
    term: Term  # The array; for a mask, of booleans
    labels: Labels  # The labels of its axes, as of the scores that it met
    factor: float = 1.0  # By what a bias is multiplied
    keeps: bool = True  # Whether `True` in a mask keeps the score
    fill: float = -math.inf  # What masked scores become
    # Whether the fill was added to the scores, so that they have a gradient where they
    # are masked, too
    is_added: bool = False

    def is_same(self, other: "Side") -> bool:
        """Returns whether another one has the same array; the fill may differ."""
        return self.origin() == other.origin()

    def origin(self) -> tuple[PyTree, ...]:
        """Returns what identifies it: the array it was broadcast from, and its labels."""
        term, labels = self.term, self.labels
        while term.name == "broadcast_in_dim" and term.operands[0].eqn is not None:
            dims = term.params["broadcast_dimensions"]
            labels, term = tuple(labels[d] for d in dims), term.operands[0]
        return self.kind, self.factor, self.keeps, id(term), labels


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Scaled products of a matmul with biases and masks."""

    dot: Term  # The term of the matmul
    sizes: dict[Label, int]  # The size of each label
    scale: float = 1.0  # The factor of the products
    # Biases and masks in the order in which they were applied
    sides: tuple[Side, ...] = ()

    @property
    def masks(self) -> tuple[Side, ...]:
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
    """The meaning of a term."""

    kind: Kind  # Which part of a softmax it is
    scores: Scores  # The scores of that softmax
    labels: Labels  # The labels of each axis
    parents: tuple[Term, ...] = ()  # The terms with a meaning that it is made from
    shift: Shift = NO_SHIFT  # The maximum that was subtracted
    # The labels over which exponentials were summed
    summed: frozenset[Label] = frozenset()
    # Whether no exponential can overflow, and not all of a sum underflow
    is_bounded: bool = False
    # The masks, also ones of the scores, by which exponentials or probabilities became
    # 0
    late: tuple[Side, ...] = ()
    # What it is in a row in which everything is masked, if all masks count there that
    # are `late`; `None` if that is not one known number
    empty: float | None = None


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
            needs = [] if rule is None or _sums(last) else last.operands
            new = [x for x in needs if x.eqn is not None and id(x) not in self._known]
            if new:
                waiting.extend(new)
                continue
            waiting.pop()
            found = None
            if rule is not None and str(getattr(last.aval, "dtype", "")) in _FLOATS:
                known = [self.meaning(x) for x in needs]
                found = rule(last, known)
                if found is not None and not _is_mask(last, known, found):
                    found = found._replace(empty=_in_empty_row(last, known))
            self._known[id(last)] = last, found
        return self._known[id(term)][1]

    def history(self, term: Term) -> dict[int, Term]:
        """Returns all terms with a meaning from which one is made, with it."""
        found: dict[int, Term] = {}
        waiting = [term]
        while waiting:
            term = waiting.pop()
            if id(term) in found:
                continue
            found[id(term)] = term
            known = self.meaning(term)
            waiting.extend(known.parents if known is not None else ())
        return found

    def is_private(self, term: Term, reader: Equation) -> bool:
        """Returns whether a value and what it is made from is read by nothing else."""
        inside = self.history(term).values()
        # A function that is called twice is two levels of the same equations.
        equations = {(id(term.level), id(term.eqn)) for term in inside}
        equations.add((id(self.level), id(reader)))
        return all(
            use is not None and (id(use[0]), id(use[1])) in equations
            for term in inside
            for use in term.level.readers(term.atom)
        )


_MORE = {
    "reduce_sum": np.multiply,
    "dot_general": np.multiply,
    "add_any": np.add,
}


def _is_mask(term: Term, known: list[Meaning | None], found: Meaning) -> bool:
    """Returns whether a term is a masked version of what it is made from."""
    counts = [len(x.scores.masks) for x in known if x is not None]
    return term.name == "select_n" or len(found.scores.masks) > max(counts, default=0)


def _in_empty_row(term: Term, known: list[Meaning | None]) -> float | None:
    """Returns what a term is in a row in which everything is masked, if that is known."""
    name, operands = term.name, term.operands
    numbers = [
        x.scalar if meaning is None else meaning.empty
        for x, meaning in zip(operands, known, strict=False)
    ]
    if not numbers or None in numbers:
        return None
    if name == "reduce_sum":
        terms = math.prod(operands[0].shape[axis] for axis in term.params["axes"])
        numbers.append(terms)
    compute = {**NUMPY, **_MORE}.get(name)
    with np.errstate(all="ignore"):
        given = [np.float32(x) for x in numbers]
        value = given[0] if compute is None else compute(*given)
        return float(np.asarray(value).astype(term.aval.dtype))


def _sums(term: Term) -> bool:
    """Returns whether a term is a matmul: then its operands need no meaning."""
    return term.name == "dot_general" and bool(term.params["dimension_numbers"][0][0])


def _dot(term: Term, known: list[Meaning | None]) -> Meaning | None:
    summed, batch = term.params["dimension_numbers"]
    for position, source in enumerate(known):
        if source is not None:  # Hugging Face multiplies weights by a mask of heads
            labels = _of_product(term, source, position)
            parents = _with_parents(term, known)
            return source._replace(labels=labels, parents=parents) if labels else None
    if len(summed[0]) != 1:
        return None
    lhs, rhs = term.operands
    axes: list[tuple[Label, int]] = [
        (("batch", i), lhs.shape[axis]) for i, axis in enumerate(batch[0])
    ]
    for i, size in enumerate(lhs.shape):
        if i not in (*batch[0], *summed[0]):
            axes.append((("lhs", i), size))
    for i, size in enumerate(rhs.shape):
        if i not in (*batch[1], *summed[1]):
            axes.append((("rhs", i), size))
    labels = tuple((label,) if size != 1 else () for label, size in axes)
    sizes = {label: size for label, size in axes if size != 1}
    return Meaning("scores", Scores(term, sizes), labels)


# --- Layout ---------------------------------------------------------------------------


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


ROWS = ("max", "sum")
_RELABEL: dict[str, Callable[[Term, Meaning], Labels | None]] = {
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
}


def _of_product(term: Term, source: Meaning, position: int) -> Labels | None:
    """Returns the labels of a value times ones, in a matmul that sums over nothing."""
    summed, batch = term.params["dimension_numbers"]
    ones = term.operands[1 - position]
    if summed[0] or ones.scalar != 1.0 or len(ones.shape) != len(batch[0]):
        return None
    mine = batch[position]
    rest = [i for i in range(len(source.labels)) if i not in mine]
    return tuple(source.labels[i] for i in (*mine, *rest))


def _layout(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None:
        return None
    relabel = _RELABEL.get(term.name)
    labels = source.labels if relabel is None else relabel(term, source)
    if labels is None:
        return None
    return source._replace(labels=labels, parents=(term.operands[0],))


def _stop_gradient(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of a maximum without gradient; other parts need theirs."""
    (source,) = known
    if source is None or source.kind != "max":
        return None
    shift = source.shift._replace(is_stopped=True)
    return source._replace(shift=shift, parents=(term.operands[0],))


# --- Scores ---------------------------------------------------------------------------


def _with_parents(term: Term, known: list[Meaning | None]) -> tuple[Term, ...]:
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


def _affine(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of scores with a number multiplied, or a value added."""
    (position,) = (i for i, x in enumerate(known) if x is not None)
    source, other = known[position], term.operands[1 - position]
    assert source is not None
    is_shifted = source.shift != NO_SHIFT
    is_reversed = term.name in ("sub", "div") and position != 0
    if is_shifted or is_reversed or term.operands[position].shape != term.shape:
        return None
    number, empty = other.scalar, None
    scores: Scores | None = source.scores
    if term.name in ("mul", "div"):
        scores = None
        if number is not None and math.isfinite(number) and number != 0:
            factor = number if term.name == "mul" else 1 / number
            scores = _scaled(source.scores, factor)
    elif number != 0.0:
        side = Side("bias", other, source.labels, -1.0 if term.name == "sub" else 1.0)
        mask = _as_mask(side)
        if mask is not None and not source.scores.masks:
            empty = mask.fill
        fits = _fits(other, term)
        scores = _with_side(source.scores, mask or side) if fits else None
    if scores is None:
        return None
    parents = (term.operands[position],)
    return Meaning("scores", scores, source.labels, parents, empty=empty)


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


def _selected(term: Term, known: list[Meaning | None]) -> Meaning | None:
    found = [i for i, x in enumerate(known) if x is not None]
    if len(known) != 3 or found not in ([1], [2]):
        return None
    (position,) = found
    source, which = known[position], term.operands[0]
    fill = term.operands[3 - position].scalar
    if source is None or fill is None or which.aval.dtype != np.bool_:
        return None
    parents = (term.operands[position],)
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


# --- Softmax --------------------------------------------------------------------------


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


def _reduced(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    wanted = {"reduce_max": "scores", "reduce_sum": "exp"}[term.name]
    if source is None or source.kind != wanted:
        return None
    if wanted == "scores" and source.shift != NO_SHIFT:
        return None
    axes = {int(axis) for axis in term.params["axes"]}
    gone = frozenset(label for axis in axes for label in source.labels[axis])
    labels = tuple(x for i, x in enumerate(source.labels) if i not in axes)
    parents = (term.operands[0],)
    if wanted == "scores":
        return Meaning("max", source.scores, labels, parents, Shift(gone))
    is_bounded = bool(gone) and source.shift.labels == gone
    found = Meaning("sum", source.scores, labels, parents, source.shift, gone)
    return found._replace(is_bounded=is_bounded, late=source.late)


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
    if source is None or source.kind != "scores":
        return None
    return source._replace(kind="exp", parents=(term.operands[0],))


def _two_parts(term: Term, known: list[Meaning | None]) -> Meaning | None:
    """Returns the meaning of a difference or ratio of two parts of one softmax."""
    first, second = known
    assert first is not None
    assert second is not None
    same = first.scores.is_same(second.scores) and _aligned(first, second)
    if not same or term.operands[0].shape != term.shape:
        return None
    parents = _with_parents(term, known)
    parts = term.name, first.kind, second.kind
    if parts == ("sub", "scores", "max") and first.shift == NO_SHIFT:
        return first._replace(shift=second.shift, parents=parents)
    if parts == ("div", "exp", "sum") and first.shift == second.shift:
        late = first.late + second.late
        return second._replace(
            kind="probs", labels=first.labels, parents=parents, late=late
        )
    return None


def _aligned(first: Meaning, second: Meaning) -> bool:
    """Returns whether the axes that both values have are at the same places."""
    if not second.labels:
        return True  # one number for all
    if len(first.labels) != len(second.labels):
        return False
    pairs = zip(first.labels, second.labels, strict=True)
    return all(not y or x == y for x, y in pairs)


Rule = Callable[[Term, list[Meaning | None]], Meaning | None]
"""Returns the meaning of a term from those of its operands."""
_RULES: dict[str, Rule] = {
    "dot_general": _dot,
    **dict.fromkeys((*_RELABEL, "convert_element_type", *SAME), _layout),
    "stop_gradient": _stop_gradient,
    **dict.fromkeys(("mul", "div", "add", "sub", "add_any"), _arithmetic),
    "select_n": _selected,
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
    "max": _max,
    "exp": _exp,
}
