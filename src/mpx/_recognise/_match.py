"""Recognising attention: the product of a softmax over keys with values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._program._queries import Equation
from mpx._recognise._softmax import (
    SUMMED,
    Label,
    Labels,
    Meaning,
    Scores,
    Side,
    Softmaxes,
    operand_labels,
    product_labels,
)
from mpx._recognise._terms import Term

_WIDTH: Label = ("width", 0)


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
    operands: list[Term]  # Queries, keys and values
    labels: list[Labels]  # Those of the axes of the operands
    result: Labels  # Those of the axes of the result
    probs: Term  # The softmax
    meaning: Meaning
    axes: Axes  # The labels of its axes
    sizes: dict[Label, int]  # The size of each label

    @property
    def scores(self) -> Scores:
        """The scores of the softmax."""
        return self.meaning.scores

    def size(self, *labels: Label) -> int:
        """Returns the product of the sizes of labels."""
        return math.prod(self.sizes[label] for label in labels)

    @property
    def _orders(self) -> list[Labels]:
        """The labels of queries, keys, values and result: batch, length, heads, size."""
        batch, heads, groups, row, key = self.axes
        many = (*heads, *groups)
        return [
            (batch, (row,), many, (SUMMED,)),
            (batch, (key,), heads, (SUMMED,)),
            (batch, (key,), heads, (_WIDTH,)),
            (batch, (row,), many, (_WIDTH,)),
        ]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of queries, keys and values: batch, length, heads, size."""
        return [tuple(self.size(*x) for x in order) for order in self._orders[:3]]

    def laid_out(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns queries, keys and values with the axes batch, length, heads and size."""
        rows = zip(arrays, self.labels, self._orders, strict=False)
        return [jnp.asarray(self._arranged(*row)) for row in rows]

    def as_result(self, out: Array) -> Array:
        """Returns attention (batch, length, heads, size) in the layout of the equation."""
        return jnp.asarray(self._arranged(out, self._orders[3], self.result))

    def side(self, side: Side, x: Array | np.ndarray) -> Array | np.ndarray:
        """Returns a bias or mask with the axes batch, heads, rows and keys."""
        batch, heads, groups, row, key = self.axes
        return self._arranged(
            x, side.labels, (batch, (*heads, *groups), (row,), (key,))
        )

    def _arranged(
        self, x: Array | np.ndarray, labels: Labels, order: Labels
    ) -> Array | np.ndarray:
        """Splits, transposes and merges axes; a label that is missing has size 1."""
        sizes: dict[Label, int] = {}
        for size, here in zip(x.shape, labels, strict=True):
            sizes |= {label: 1 if size == 1 else self.size(label) for label in here}
        wanted = [label for group in order for label in group]
        places, there = list(sizes), [label for label in wanted if label in sizes]
        x = x.reshape(list(sizes.values()))
        x = x.transpose([places.index(label) for label in there])
        x = x.reshape([sizes.get(label, 1) for label in wanted])
        wide, shape = [], []
        for group in order:
            varies = any(sizes.get(label, 1) != 1 for label in group)
            wide += [self.size(label) if varies else 1 for label in group]
            shape.append(self.size(*group) if varies else 1)
        where = np if isinstance(x, np.ndarray) else jnp
        return where.broadcast_to(x, wide).reshape(shape)


def find_attention(softmaxes: Softmaxes, eqn: Equation) -> Match | None:
    """Returns the attention of which a matmul is the last operation, if it is one."""
    last = Term(softmaxes.level, eqn.outvars[0], eqn)
    known = [softmaxes.meaning(term) for term in last.operands]
    which = [i for i, x in enumerate(known) if x is not None and x.kind == "probs"]
    if len(which) != 1:
        return None
    (position,) = which
    meaning, value = known[position], last.operands[1 - position]
    assert meaning is not None
    summed, batch = eqn.params["dimension_numbers"]
    axes = _axes(meaning, summed[position], batch[position])
    # Without a bound it may overflow where the kernel does not.
    if axes is None or not meaning.is_bounded:
        return None
    places = {summed[1 - position][0]: (axes.key,)}
    for mine, other in zip(batch[position], batch[1 - position], strict=True):
        places[other] = meaning.labels[mine]
    free = [i for i, n in enumerate(value.shape) if i not in places and n != 1]
    if len(free) != 1:
        return None
    places[free[0]] = (_WIDTH,)
    labels = tuple(places.get(i, ()) for i in range(len(value.shape)))
    pair = (meaning.labels, labels)
    order = slice(None) if axes.key[0] == "rhs" else slice(None, None, -1)
    dot = meaning.scores.dot
    return Match(
        eqn,
        [*dot.operands[order], value],
        [*operand_labels(dot)[order], labels],
        product_labels(last, *(pair if position == 0 else pair[::-1])),
        last.operands[position],
        meaning,
        axes,
        {**meaning.scores.sizes, _WIDTH: value.shape[free[0]]},
    )


def _axes(meaning: Meaning, summed: list[int], batch: list[int]) -> Axes | None:
    """Returns the roles of the labels, if a product over these axes is attention."""
    scores, labels = meaning.scores, meaning.labels
    keys = {label for axis in summed for label in labels[axis]}
    if len(summed) != 1 or len(keys) != 1 or keys != meaning.summed:
        return None
    (key,) = keys
    side = {"lhs": "rhs", "rhs": "lhs"}.get(key[0])
    free = [x for x in scores.sizes if x[0] == side]
    shared = [x for x in scores.sizes if x[0] == "batch"]
    others = [x for x in scores.sizes if x[0] == key[0] and x != key]
    given = [labels[axis] for axis in batch]
    if not free or others or any(len(x) > 1 for x in given):
        return None
    if {x for here in given for x in here} != {*shared}:
        return None

    def is_row(label: Label) -> tuple[bool, bool, int]:
        size = scores.sizes[label]
        masked = any(_varies(mask, label) for mask in scores.masks)
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
    pairs = zip(side.labels, side.term.shape, strict=True)
    return any(label in here and size != 1 for here, size in pairs)


_RANDOM = {"random_bits", "threefry2x32", "random_wrap", "rng_bit_generator"}
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
        if meaning is None and term.name != "dot_general":
            names.add(term.name)
            waiting += [(operand, term.name) for operand in term.operands]
        elif meaning is not None and meaning.kind == "probs":
            if reader and reader not in _ROUTING:
                found = f"{reader} between softmax and values"
            elif not reader and not meaning.is_bounded:
                found = "softmax without the largest score of each row subtracted"
        elif meaning is not None and (reader, "exp" in names) == ("tanh", True):
            found = "a soft cap (tanh) of the scores"
    if found is not None and "between" in found and names & _RANDOM:
        return "dropout between softmax and values"
    return found
