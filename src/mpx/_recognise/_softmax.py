"""Recognising a softmax of the result of a matmul, however it is written.

A term is a value of a jaxpr together with the equation that makes it. Calls of jitted
functions are looked through: the result of a call is the term of the value inside that
becomes it. A term may have a meaning:

    scores = scale · lhs rhs + bias, where mask, else fill
    exp = exp(scores - shift)       sum = Σ exp       probs = exp / sum

The axes of a meaning carry labels of the matmul's axes, which follow transposes and reshapes,
so that a softmax over another axis is not taken for one over keys. Whatever has no rule here
has no meaning.

A row in which everything is masked has one score, the fill. What its other parts are depends
on how the softmax is written: a mean, nan or 0. Each meaning carries that number along.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import PyTree

from mpx._jax._compat import is_tracer
from mpx._program._flow import propagate
from mpx._program._interpreter import Jaxpr
from mpx._program._queries import Equation
from mpx._recognise._constants import RULES, SAME, as_constant, compute

_F32 = np.dtype(np.float32)
_FLOATS = ("float32", "bfloat16", "float16")
Label = tuple[Literal["batch", "lhs", "rhs", "summed", "width"], int]
"""An axis of the matmul that makes the scores: a batch axis by its position among these, a
free axis of an operand, or the summed one; or the free axis of the values. Free and batch
axes of size 1 have none."""
Labels = tuple[tuple[Label, ...], ...]
"""The labels of each axis of a value; several where axes were merged."""
SUMMED: Label = ("summed", 0)
Kind = Literal["scores", "max", "exp", "sum", "probs"]
MASKED = -1e4
"""Scores that are replaced by this or less count as masked."""
ABSORBING = -1e20
"""Adding this or less to a score leaves nothing of the score in f32."""


@dataclasses.dataclass(eq=False, repr=False)
class Term:
    """A value of a jaxpr, and what is known of it; inputs and numbers have no equation.

    Constants that are computed in the same way are one term.
    """

    program: "Program"
    atom: Any
    eqn: Any = None
    operands: "Sequence[Term]" = ()
    value: PyTree = None

    def __post_init__(self) -> None:
        eqn, self.aval = self.eqn, self.atom.aval
        self.shape: tuple[int, ...] = tuple(getattr(self.aval, "shape", ()))
        self.params: dict[str, PyTree] = {} if eqn is None else eqn.params
        self.name: str = "" if eqn is None else eqn.primitive.name
        if eqn is None:
            self.is_fixed = self.value is not None and not is_tracer(self.value)
        else:
            self.is_fixed = not eqn.effects and all([x.is_fixed for x in self.operands])
        self.meaning = _meaning(self)

    @functools.cached_property
    def constant(self) -> np.ndarray | None:
        """Its value if it depends on no input and is easy to compute."""
        if not self.is_fixed or not (self.eqn is None or self.name in RULES):
            return None
        if self.eqn is None:
            return as_constant(self.value, getattr(self.aval, "dtype", None))
        return compute(self.eqn, [x.constant for x in self.operands])

    @property
    def scalar(self) -> float | None:
        """The number that all elements of a constant are, if there is one."""
        is_array = self.eqn is None and math.prod(self.shape) > 1
        # An array that the function closes over is not fetched for this.
        value = None if is_array else self.constant
        if value is None or value.dtype.kind in "bc" or not value.size:
            return None
        first = value.reshape(-1)[0]
        return float(first) if np.all(value == first) else None


class Side(NamedTuple):
    """What was added to scores, or which of them were kept."""

    kind: Literal["bias", "mask"]
    term: Term  # The array, before it was broadcast; for a mask, of booleans
    labels: Labels  # The labels of its axes, as of the scores that it met
    factor: float = 1.0  # By what a bias is multiplied
    keeps: bool = True  # Whether `True` in a mask keeps the score
    fill: float = -math.inf  # What masked scores become
    # Whether the fill was added to the scores, so that they have a gradient where they
    # are masked, too
    is_added: bool = False


class Meaning(NamedTuple):
    """The meaning of a term: a part of a softmax of scaled products with biases and masks."""

    kind: Kind  # Which part it is
    labels: Labels  # The labels of each axis
    dot: Term  # The term of the matmul
    sizes: dict[Label, int]  # The size of each label
    scale: float = 1.0  # The factor of the products
    # Biases and masks in the order in which they were applied
    sides: tuple[Side, ...] = ()
    # The labels over which the maximum was taken that was subtracted, or that it is
    shift: frozenset[Label] | None = None
    exp: Term | None = None  # The exponentials that it is made from
    summed: frozenset[Label] = frozenset()  # The labels over which these were summed
    # What it is in a row in which everything is masked; `None` if that is not one known
    # number
    empty: float | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether no exponential can overflow, and not all of a sum underflow."""
        return bool(self.summed) and self.shift == self.summed

    @property
    def masks(self) -> list[Side]:
        return [side for side in self.sides if side.kind == "mask"]


class Program:
    """A jaxpr as terms; nothing is run or changed by looking."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[PyTree]) -> None:
        self.memo: dict[Any, Any] = {}  # layers have masks in common
        self.products: list[Term] = []  # in their order
        terms = {x: Term(self, x) for x in jaxpr.invars}
        pairs = zip(jaxpr.constvars, consts, strict=True)
        terms |= {x: self._shared(Term(self, x, value=y), id(y)) for x, y in pairs}

        def rule(eqn: Equation, operands: list[Term]) -> Sequence[Term]:
            outs = [Term(self, x, eqn, operands) for x in eqn.outvars]
            self.products += outs if eqn.primitive.name == "dot_general" else []
            if eqn.primitive.name not in RULES or not outs[0].is_fixed:
                return outs
            return [self._shared(outs[0], eqn.primitive, str(eqn.params), *operands)]

        def number(atom: Any) -> Term:
            return self._shared(Term(self, atom, value=atom.val), str(atom.val))

        propagate(jaxpr, terms, rule, number)

    def _shared(self, term: Term, *how: object) -> Term:
        """Returns a constant, or that which was computed before in the same way."""
        return self.memo.setdefault((str(term.aval), *how), term)


def _meaning(term: Term) -> Meaning | None:
    rule = _RULES.get(term.name)
    if rule is None or str(getattr(term.aval, "dtype", "")) not in _FLOATS:
        return None
    if term.name == "dot_general" and term.params["dimension_numbers"][0][0]:
        return _scores(term)
    known = [(x.meaning, i) for i, x in enumerate(term.operands) if x.meaning]
    if len(known) == 2 and len(term.operands) == 2:
        return _joined(term, known[0][0], known[1][0])
    return rule(term, *known[0]) if len(known) == 1 else None


def reach(starts: Sequence[Term], enters: Callable[[Term], bool]) -> Iterator[Term]:
    """Yields terms, and the operands of those that are entered, each once, near ones first."""
    waiting, seen = list(starts), set()
    while waiting:
        term = waiting.pop(0)
        if id(term) not in seen:
            seen.add(id(term))
            yield term
            waiting.extend(term.operands if enters(term) else ())


def history(probs: Term) -> list[Term]:
    """Returns the terms from the matmul of the scores to a part of their softmax."""
    assert probs.meaning is not None
    dot = probs.meaning.dot
    is_part = lambda x: x.meaning is not None and x.meaning.dot is dot  # noqa: E731
    found = reach([probs], lambda x: is_part(x) and x is not dot)
    return [x for x in found if is_part(x)]


# --- Labels ---------------------------------------------------------------------------


def operand_labels(dot: Term) -> list[Labels]:
    """Returns the labels of the operands of the matmul that makes scores."""
    summed, batch = dot.params["dimension_numbers"]
    found = []
    for side, name in enumerate(("lhs", "rhs")):
        shape = dot.operands[side].shape
        labels: list[Label] = [(name, i) for i in range(len(shape))]
        for i, axis in enumerate(batch[side]):
            labels[axis] = ("batch", i)
        labels[summed[side][0]] = SUMMED
        pairs = zip(labels, shape, strict=True)
        found.append(tuple((x,) if n != 1 or x == SUMMED else () for x, n in pairs))
    return found


def product_labels(term: Term, left: Labels, right: Labels) -> Labels:
    """Returns the labels of the result of a matmul from those of its operands."""
    summed, batch = term.params["dimension_numbers"]
    found = [left[i] or right[j] for i, j in zip(*batch, strict=True)]
    for labels, *taken in ((left, summed[0], batch[0]), (right, summed[1], batch[1])):
        gone = {axis for axes in taken for axis in axes}
        found += [x for i, x in enumerate(labels) if i not in gone]
    return tuple(found)


def _scores(term: Term) -> Meaning | None:
    if len(term.params["dimension_numbers"][0][0]) != 1:
        return None
    sides = operand_labels(term)
    sizes = {
        label: size
        for labels, x in zip(sides, term.operands, strict=True)
        for here, size in zip(labels, x.shape, strict=True)
        for label in here
    }
    return Meaning("scores", product_labels(term, *sides), term, sizes)


def _times_ones(term: Term, source: Meaning, position: int) -> Meaning | None:
    """Returns the meaning of a product without a sum: Hugging Face has a mask of heads."""
    ones, (_, batch) = term.operands[1 - position], term.params["dimension_numbers"]
    if ones.scalar != 1.0 or len(ones.shape) != len(batch[0]):
        return None
    pair = [source.labels, ((),) * len(ones.shape)]
    labels = product_labels(term, *(pair if position == 0 else pair[::-1]))
    return source._replace(labels=labels)


def _broadcast(term: Term, source: Meaning) -> Labels | None:
    """Returns the labels if axes of size 1 are added, or one is expanded back.

    Along the axis of a reduced row a broadcast changes nothing: `sub` and `div` would have
    done the same.
    """
    labels: list[tuple[Label, ...]] = [()] * len(term.shape)
    dims = term.params["broadcast_dimensions"]
    for label, dim in zip(source.labels, dims, strict=True):
        labels[dim] = label
    grown = any(n != 1 and not x for n, x in zip(term.shape, labels, strict=True))
    return None if grown and source.kind not in ("max", "sum") else tuple(labels)


def _reshaped(term: Term, source: Meaning) -> Labels | None:
    sizes, given = source.sizes, term.operands[0].shape
    is_row = any(n != 1 and not x for n, x in zip(given, source.labels, strict=True))
    if is_row or term.params.get("dimensions") is not None:
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


_RELABEL: dict[str, Callable[[Term, Meaning], Labels | None]] = {
    "transpose": lambda term, x: tuple(x.labels[i] for i in term.params["permutation"]),
    "squeeze": lambda term, x: tuple(
        label for i, label in enumerate(x.labels) if i not in term.params["dimensions"]
    ),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
}


def _layout(term: Term, source: Meaning, _: int) -> Meaning | None:
    if term.name == "stop_gradient" and source.kind != "max":
        return None  # other parts need their gradient
    relabel = _RELABEL.get(term.name)
    labels = source.labels if relabel is None else relabel(term, source)
    if labels is None:
        return None
    empty = _number(np.positive, source.empty, dtype=term.aval.dtype)
    return source._replace(labels=labels, empty=empty)


def _number(
    func: Callable[..., np.ndarray], *numbers: float | None, dtype: np.dtype = _F32
) -> float | None:
    """Returns a function of f32 numbers, rounded to a dtype; `None` if one is unknown."""
    if None in numbers:
        return None
    with np.errstate(all="ignore"):
        return float(np.asarray(func(*map(np.float32, numbers))).astype(dtype))


# --- Scores ---------------------------------------------------------------------------


def _scaled(source: Meaning, factor: float) -> Meaning | None:
    sides = []
    for side in source.sides:
        if side.kind == "bias":
            side = side._replace(factor=side.factor * factor)
        else:
            fill = _number(np.multiply, side.fill, factor)
            if factor <= 0 or fill is None or fill > MASKED:
                return None
            side = side._replace(fill=fill)
        sides.append(side)
    scale, empty = source.scale * factor, _number(np.multiply, source.empty, factor)
    return source._replace(scale=scale, sides=tuple(sides), empty=empty)


def _affine(term: Term, source: Meaning, position: int) -> Meaning | None:
    """Returns the meaning of scores with a number multiplied, or a value added."""
    other, is_sum = term.operands[1 - position], term.name not in ("mul", "div")
    is_reversed = term.name in ("sub", "div") and position != 0
    is_broadcast = term.operands[position].shape != term.shape
    is_scores = source.kind == "scores" and source.shift is None
    if not is_scores or is_reversed or is_broadcast:
        return None
    number = other.scalar
    if not is_sum:
        if number is None or not math.isfinite(number) or number == 0:
            return None
        return _scaled(source, number if term.name == "mul" else 1 / number)
    if number == 0.0:
        return source
    if len(other.shape) != len(term.shape):  # axes of size 1 are broadcast
        return None
    origin = before_broadcast(other, source.labels)
    side = Side("bias", *origin, factor=-1.0 if term.name == "sub" else 1.0)
    mask = _as_mask(side)
    empty = mask.fill if mask is not None and not source.masks else None
    return source._replace(sides=(*source.sides, mask or side), empty=empty)


def before_broadcast(term: Term, labels: Labels) -> tuple[Term, Labels]:
    """Returns what a term is broadcast from, and its labels."""
    while term.name == "broadcast_in_dim":
        labels = tuple(labels[d] for d in term.params["broadcast_dimensions"])
        term = term.operands[0]
    return term, labels


def _as_mask(bias: Side) -> Side | None:
    """Returns a bias of 0 and a very large negative number as a mask, if it is that."""
    term, labels = bias.term, bias.labels
    while term.name == "convert_element_type":
        term, labels = before_broadcast(term.operands[0], labels)
    if term.name != "select_n" or len(term.operands) != 3:
        return None
    which, *cases = term.operands
    numbers = [x.scalar for x in cases]
    if which.shape != term.shape or 0.0 not in numbers or None in numbers:
        return None
    keeps = numbers[1] == 0.0
    fill = _number(np.multiply, numbers[0 if keeps else 1], bias.factor)
    if fill is None or fill > ABSORBING:
        return None
    which, labels = before_broadcast(which, labels)
    return Side("mask", which, labels, keeps=keeps, fill=fill, is_added=True)


def _selected(term: Term, source: Meaning, position: int) -> Meaning | None:
    """Returns the meaning of a part of a softmax of which some elements are replaced."""
    which, *cases = term.operands
    if len(cases) != 2 or which.aval.dtype != np.bool_ or which.shape != term.shape:
        return None
    fill = cases[2 - position].scalar
    if fill is None:
        return None
    origin = before_broadcast(which, source.labels)
    side = Side("mask", *origin, keeps=position == 2, fill=fill)
    if source.kind == "scores" and fill <= MASKED and source.shift is None:
        empty = fill if not source.masks or source.empty == fill else None
        return source._replace(sides=(*source.sides, side), empty=empty)
    # A mask of the exponentials alone is no mask of the scores: the largest score, which
    # is subtracted, may be a masked one.
    before = [x._replace(fill=0.0, is_added=False) for x in source.masks]
    is_same = source.kind in ("exp", "probs") and fill == 0.0 and before == [side]
    return source._replace(empty=0.0) if is_same else None


# --- Softmax --------------------------------------------------------------------------


def _joined(term: Term, first: Meaning, second: Meaning) -> Meaning | None:
    """Returns the meaning of a value that is computed from two parts of a softmax."""
    if first.kind == second.kind == "scores" and term.name in ("add", "sub"):
        # A bias that comes out of a matmul, as one of pairs or positions, has fewer batch
        # axes.
        one, other = (sum(x[0] == "batch" for x in y.sizes) for y in (first, second))
        scores = (first, 0) if one > other else (second, 1)
        return _affine(term, *scores) if one != other else None
    if term.operands[0].shape != term.shape or not _aligned(first, second):
        return None
    parts = term.name, first.kind, second.kind
    same = first.dot, first.scale, first.sides
    if parts == ("sub", "scores", "max") and first.shift is None:
        empty = _number(np.subtract, first.empty, second.empty)
        is_own = same == (second.dot, second.scale, second.sides)
        return first._replace(shift=second.shift, empty=empty) if is_own else None
    if parts == ("div", "exp", "sum") and first.exp is second.exp:
        empty = _number(np.divide, first.empty, second.empty)
        return second._replace(kind="probs", labels=first.labels, empty=empty)
    return None


def _aligned(first: Meaning, second: Meaning) -> bool:
    """Returns whether the axes that both values have are at the same places."""
    if not second.labels:
        return True  # one number for all
    if len(first.labels) != len(second.labels):
        return False
    pairs = zip(first.labels, second.labels, strict=True)
    return all(not y or x == y for x, y in pairs)


def _reduced(term: Term, source: Meaning, _: int) -> Meaning | None:
    axes = {int(axis) for axis in term.params["axes"]}
    gone = frozenset(label for axis in axes for label in source.labels[axis])
    labels = tuple(x for i, x in enumerate(source.labels) if i not in axes)
    if (term.name, source.kind) == ("reduce_sum", "exp"):
        empty = _number(
            np.multiply, source.empty, math.prod(source.sizes[x] for x in gone)
        )
        return source._replace(kind="sum", labels=labels, summed=gone, empty=empty)
    if (term.name, source.kind, source.shift) == ("reduce_max", "scores", None):
        return source._replace(kind="max", labels=labels, shift=gone)
    return None


def _max(term: Term, source: Meaning, position: int) -> Meaning | None:
    """Returns the meaning of `max(-inf, row)`, which `jnp.max(initial=)` writes."""
    is_lowest = term.operands[1 - position].scalar == -math.inf
    return source if source.kind == "max" and is_lowest else None


def _exp(term: Term, source: Meaning, _: int) -> Meaning | None:
    if source.kind != "scores":
        return None
    return source._replace(kind="exp", exp=term, empty=_number(np.exp, source.empty))


_RULES: dict[str, Callable[[Term, Meaning, int], Meaning | None]] = {
    "dot_general": _times_ones,
    **dict.fromkeys((*_RELABEL, "convert_element_type", *SAME), _layout),
    **dict.fromkeys(("mul", "div", "add", "sub", "add_any"), _affine),
    "select_n": _selected,
    "reduce_max": _reduced,
    "reduce_sum": _reduced,
    "max": _max,
    "exp": _exp,
}
"""Returns the meaning of a term from that of its only operand with one, at a position."""
