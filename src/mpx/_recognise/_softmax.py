"""Recognising a softmax of the result of a matmul, however it is written.

A term of the program may have a meaning: see `Meaning`. The axes of a meaning carry labels of
the matmul's axes, which follow transposes and reshapes, so that a softmax over another axis is
not taken for one over keys. Whatever has no rule here has no meaning.
"""

import math
from collections.abc import Callable

import numpy as np

from mpx._program._queries import Equation
from mpx._recognise._meanings import (
    NO_SHIFT,
    RELABEL,
    ROWS,
    Kind,
    Label,
    Meaning,
    Scores,
    Shift,
    of_product,
)
from mpx._recognise._scores import affine, negated, selected, with_parents
from mpx._recognise._terms import NUMPY, SAME, Level, Term

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


Rule = Callable[[Term, "list[Meaning | None]"], Meaning | None]
"""Returns the meaning of a term from those of its operands."""


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
            labels = of_product(term, source, position)
            parents = with_parents(term, known)
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


def _layout(term: Term, known: list[Meaning | None]) -> Meaning | None:
    (source,) = known
    if source is None:
        return None
    relabel = RELABEL.get(term.name)
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


# --- Softmax --------------------------------------------------------------------------


def _arithmetic(term: Term, known: list[Meaning | None]) -> Meaning | None:
    kinds = [None if x is None else x.kind for x in known]
    if kinds == ["scores", "scores"] and term.name in ("add", "sub"):
        known = _without_bias(known)
        kinds = [None if x is None else x.kind for x in known]
    if kinds in (["scores", None], [None, "scores"]):
        return affine(term, known)
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
    return found[0]._replace(parents=with_parents(term, known))


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
    same = first.scores.is_same(second.scores) and _aligned(first, second)
    if not same or term.operands[0].shape != term.shape:
        return None
    parents = with_parents(term, known)
    pair = term.name, first.kind, second.kind
    if pair == ("sub", "scores", "max") and first.shift == NO_SHIFT:
        return first._replace(shift=second.shift, parents=parents)
    if first.shift != second.shift:
        pass  # not parts of one softmax
    elif pair in _RATIOS:
        return second._replace(
            kind=_RATIOS[pair],
            labels=first.labels,
            parents=parents,
            late=first.late + second.late,
        )
    elif pair[0] == "add" and {*pair[1:]} == {"log_sum", "max"}:
        # The logsumexp of the scores themselves.
        row = first if first.kind == "log_sum" else second
        return row._replace(shift=NO_SHIFT, parents=parents)
    return None


_RATIOS: dict[tuple[str, str, str], Kind] = {
    ("sub", "scores", "log_sum"): "log_probs",
    ("div", "exp", "sum"): "probs",
}


def _aligned(first: Meaning, second: Meaning) -> bool:
    """Returns whether the axes that both values have are at the same places."""
    if not second.labels:
        return True  # one number for all
    if len(first.labels) != len(second.labels):
        return False
    pairs = zip(first.labels, second.labels, strict=True)
    return all(not y or x == y for x, y in pairs) or (
        first.kind in ROWS and first.labels == second.labels
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
            *RELABEL,
            *("convert_element_type", *SAME),
        ),
        _layout,
    ),
    "stop_gradient": _stop_gradient,
    **dict.fromkeys(("mul", "div", "add", "sub", "add_any"), _arithmetic),
    "neg": negated,
    "select_n": selected,
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
    "max": _max,
    "exp": _exp,
    "log": _log,
    "abs": _abs,
}
