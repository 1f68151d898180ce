"""Recognising attention: the product of a softmax over keys with values."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._program._queries import Equation
from mpx._recognise._softmax import Label, Meaning, Scores, Side, Softmaxes
from mpx._recognise._terms import Term


class Axes(NamedTuple):
    """The labels of the scores, by what they are for attention."""

    batch: tuple[Label, ...]
    heads: tuple[Label, ...]  # Batch axes that are heads
    # The other free axes of the queries: more heads with the same keys
    groups: tuple[Label, ...]
    row: Label  # The free axis of the queries that is their position
    key: Label  # The free axis of the keys


class Match(NamedTuple):
    """Attention that was found in a program."""

    eqn: Equation  # The equation that multiplies with the values
    # The operands of the matmuls
    query: Term
    key: Term
    value: Term
    probs: Term  # The softmax
    position: int  # Which operand of the equation it is
    meaning: Meaning
    axes: Axes  # The labels of its axes

    @property
    def scores(self) -> Scores:
        """The scores of the softmax."""
        return self.meaning.scores

    def size(self, *labels: Label) -> int:
        """Returns the product of the sizes of labels."""
        return math.prod(self.scores.sizes[label] for label in labels)

    @property
    def shapes(self) -> list[tuple[int, int, int, int]]:
        """The shapes of queries, keys and values: batch, length, heads, size."""
        batch, heads, groups, row, key = self.axes
        n, s = self.size(*batch), self.size(key)
        depth = self.query.shape[self._summed(self._sides[0])]
        width = self.value.aval.size // (n * s * self.size(*heads))
        return [
            (n, self.size(row), self.size(*heads, *groups), depth),
            (n, s, self.size(*heads), depth),
            (n, s, self.size(*heads), width),
        ]

    # --- Layout -----------------------------------------------------------------------

    @property
    def _sides(self) -> tuple[int, int]:
        """Which operands of the first matmul are queries and keys."""
        return (0, 1) if self.axes.key[0] == "rhs" else (1, 0)

    def _summed(self, side: int) -> int:
        return self.scores.dot.params["dimension_numbers"][0][side][0]

    def _axis(self, side: int, label: Label) -> int:
        """Returns the axis of a query or key that has a label."""
        kind, index = label
        batch = self.scores.dot.params["dimension_numbers"][1]
        return batch[side][index] if kind == "batch" else index

    def laid_out(self, query: Array, key: Array, value: Array) -> list[Array]:
        """Returns the operands with the axes batch, length, heads and size."""
        batch, heads, groups, row, last = self.axes
        first, second = self._sides
        places = [
            [self._axis(first, x) for x in (*batch, row, *heads, *groups)],
            [self._axis(second, x) for x in (*batch, last, *heads)],
            [self._value_axis(x) for x in (*batch, last, *heads)],
        ]
        ends = [self._summed(first), self._summed(second), self._value_free()]
        arrays = (query, key, value)
        return [
            _ordered(x, [*axes, end]).reshape(shape)
            for x, axes, end, shape in zip(
                arrays, places, ends, self.shapes, strict=True
            )
        ]

    def _product(self) -> tuple[int, list[list[int]], list[list[int]]]:
        """Returns which operand the softmax is, and the summed and batch axes."""
        first = self.position
        summed, batch = self.eqn.params["dimension_numbers"]
        order = slice(None) if first == 0 else slice(None, None, -1)
        return first, list(map(list, summed))[order], list(map(list, batch))[order]

    def _value_axis(self, label: Label) -> int:
        _, (_, summed), (probs, values) = self._product()
        if label == self.axes.key:
            return summed[0]
        pairs = zip(probs, values, strict=True)
        return next(v for p, v in pairs if self.meaning.labels[p] == (label,))

    def _value_free(self) -> int:
        _, (_, summed), (_, batch) = self._product()
        free = [i for i in range(len(self.value.shape)) if i not in (*summed, *batch)]
        return max(free, key=lambda i: self.value.shape[i])

    def as_result(self, out: Array) -> Array:
        """Returns attention (batch, length, heads, size) in the layout of the equation."""
        batch, heads, groups, row, _ = self.axes
        have: list[Label | None] = [*batch, row, *heads, *groups, None]
        sizes = [self.size(x) if x is not None else out.shape[-1] for x in have]
        first, (summed, _), (shared, _) = self._product()
        labels = self.meaning.labels
        rest = [i for i in range(len(labels)) if i not in (*summed, *shared)]
        free = [x for i in rest for x in labels[i]]
        order = [x for i in shared for x in labels[i]]
        order += [*free, None] if first == 0 else [None, *free]
        out = jnp.transpose(out.reshape(sizes), [have.index(x) for x in order])
        return out.reshape(self.eqn.outvars[0].aval.shape)

    def side(self, side: Side, x: Array | np.ndarray) -> Array | np.ndarray:
        """Returns a bias or mask with the axes batch, heads, rows and keys."""
        batch, heads, groups, row, key = self.axes
        sizes, labels = [], []
        for size, here in zip(x.shape, side.labels, strict=True):
            labels += here
            sizes += [1 if size == 1 else self.size(label) for label in here]
        x = x.reshape(sizes)
        order = [batch, (*heads, *groups), (row,), (key,)]
        x = x.transpose(
            [labels.index(y) for group in order for y in group if y in labels]
        )
        found = dict(
            zip([y for g in order for y in g if y in labels], x.shape, strict=True)
        )
        wide, shape = [], []
        for group in order:
            varies = any(found.get(label, 1) != 1 for label in group)
            wide += [self.size(y) if varies else 1 for y in group]
            shape.append(self.size(*group) if varies else 1)
        x = x.reshape([found.get(y, 1) for group in order for y in group])
        where = np if isinstance(x, np.ndarray) else jnp
        return where.broadcast_to(x, wide).reshape(shape)


def _ordered(x: Array, axes: list[int]) -> Array:
    """Transposes an array; axes that are not named have size 1 and come first."""
    rest = [i for i in range(x.ndim) if i not in axes]
    return jnp.transpose(x, [*rest, *axes])


def find_attention(softmaxes: Softmaxes, eqn: Equation) -> Match | None:
    """Returns the attention of which a matmul is the last operation, if it is one."""
    terms = [softmaxes.level.term(atom) for atom in eqn.invars]
    known = [softmaxes.meaning(term) for term in terms]
    which = [i for i, x in enumerate(known) if x is not None and x.kind == "probs"]
    if len(which) != 1:
        return None
    (first,) = which
    meaning = known[first]
    assert meaning is not None
    if not meaning.is_bounded:
        return None  # it may overflow where the kernel does not
    summed, batch = eqn.params["dimension_numbers"]
    axes = _axes(meaning, summed[first], batch[first])
    if axes is None:
        return None
    value = terms[1 - first]
    taken = {*summed[1 - first], *batch[1 - first]}
    free = [n for i, n in enumerate(value.shape) if i not in taken and n != 1]
    if len(free) != 1:
        return None
    operands = meaning.scores.dot.operands
    query, key = operands if axes.key[0] == "rhs" else operands[::-1]
    return Match(eqn, query, key, value, terms[first], first, meaning, axes)


def _axes(meaning: Meaning, summed: list[int], batch: list[int]) -> Axes | None:
    """Returns the roles of the labels, if a product over these axes is attention."""
    scores, labels = meaning.scores, meaning.labels
    keys = {label for axis in summed for label in labels[axis]}
    if len(summed) != 1 or len(keys) != 1 or keys != meaning.summed:
        return None
    (key,) = keys
    if key[0] == "batch":
        return None
    side: Literal["lhs", "rhs"] = "lhs" if key[0] == "rhs" else "rhs"
    if any(x[0] == key[0] and x != key for x in scores.sizes):
        return None
    free = [x for x in scores.sizes if x[0] == side]
    shared = [x for x in scores.sizes if x[0] == "batch"]
    given = [labels[axis] for axis in batch]
    if not free or any(len(x) > 1 for x in given):
        return None
    if {x for here in given for x in here} != {*shared}:
        return None

    def is_row(label: Label) -> tuple[bool, bool, int]:
        size = scores.sizes[label]
        masked = any(_varies(x, label) for x in scores.sides if x.kind == "mask")
        return masked, size == scores.sizes[key], size

    row = max(free, key=is_row)
    # Heads come after the length in memory, or they are the last batch axis.
    _, places = scores.dot.params["dimension_numbers"]
    mine = places[0 if side == "lhs" else 1]
    after = [x for x in shared if mine[x[1]] > row[1]]
    heads = after or (shared[-1:] if len(shared) > 1 else [])
    return Axes(
        batch=tuple(x for x in shared if x not in heads),
        heads=tuple(heads),
        groups=tuple(x for x in free if x != row),
        row=row,
        key=key,
    )


def _varies(side: Side, label: Label) -> bool:
    pairs = zip(side.labels, side.term.varying, strict=True)
    return any(label in here and varies for here, varies in pairs)


_RANDOM = ("random_bits", "threefry2x32", "random_wrap", "rng_bit_generator")
# A softmax that is read by these chooses experts.
_ROUTING = ("top_k", "sort", "argmax", "gather")
_MOST_SEARCHED = 60


def reason_for_miss(softmaxes: Softmaxes, eqn: Equation) -> str | None:
    """Returns what keeps a matmul from being attention, if it is nearly one."""
    waiting = [(softmaxes.level.term(atom), "") for atom in eqn.invars]
    seen: dict[int, Term] = {}
    names: set[str] = set()
    found = None
    while waiting and len(seen) < _MOST_SEARCHED:
        term, reader = waiting.pop(0)
        if id(term) in seen or term.eqn is None:
            continue
        seen[id(term)] = term
        meaning = softmaxes.meaning(term)
        if meaning is not None:
            found = _reason_by_reader(meaning, reader) or found
        elif term.name != "dot_general":
            names.add(term.name)
            waiting += [(operand, term.name) for operand in term.operands]
    if found is not None and "between softmax" in found and names & {*_RANDOM}:
        return "dropout between softmax and values"
    if found is not None and "tanh" in found and "exp" not in names:
        return None
    return found


def _reason_by_reader(meaning: Meaning, reader: str) -> str | None:
    """Returns what is wrong with a part of a softmax that an operation reads.

    The operation is that with the values if it has no name here.
    """
    if meaning.kind == "scores" and reader == "tanh":
        return "a soft cap (tanh) of the scores"
    if meaning.kind != "probs" or reader in _ROUTING:
        return None
    if reader:
        return f"{reader} between softmax and values"
    if not meaning.is_bounded:
        return "softmax without the largest score of each row subtracted"
    return None
