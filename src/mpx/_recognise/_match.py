"""Recognising attention: the product of a softmax over keys with values.

A mask that depends on no argument is computed while tracing and may be causal, a window, or no
mask at all. Rows in which everything is masked are the same as in the function as written:
all their probabilities are one number, `Meaning.empty`.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._ops._attention import causal
from mpx._program._queries import MATMULS, has_body
from mpx._recognise._constants import SAME
from mpx._recognise._softmax import (
    MASKED,
    SUMMED,
    Label,
    Labels,
    Meaning,
    Side,
    Term,
    before_broadcast,
    operand_labels,
    product_labels,
    reach,
)

_WIDTH: Label = ("width", 0)
_BIASES = 1e8  # no bias is taken to be larger: masked scores must be lower
_MOST_SEARCHED = 60


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

    last: Term  # The product with the values
    operands: list[Term]  # Queries, keys and values
    labels: list[Labels]  # Those of the axes of the operands
    result: Labels  # Those of the axes of the result
    probs: Term  # The softmax
    scores: Meaning  # What it is made of
    axes: Axes  # The labels of its axes
    sizes: dict[Label, int]  # The size of each label

    def size(self, *labels: Label) -> int:
        """Returns the product of the sizes of labels."""
        return math.prod(self.sizes[label] for label in labels)

    @property
    def _orders(self) -> list[Labels]:
        """The labels of queries, keys, values and result: batch, length, heads, size.

        The last are those of a bias or mask: batch, heads, rows and keys.
        """
        batch, heads, groups, row, key = self.axes
        many = (*heads, *groups)
        return [
            (batch, (row,), many, (SUMMED,)),
            (batch, (key,), heads, (SUMMED,)),
            (batch, (key,), heads, (_WIDTH,)),
            (batch, (row,), many, (_WIDTH,)),
            (batch, many, (row,), (key,)),
        ]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of queries, keys and values: batch, length, heads, size."""
        return [tuple(self.size(*x) for x in order) for order in self._orders[:3]]

    def laid_out(self, arrays: Sequence[Array]) -> list[Array]:
        """Returns queries, keys and values with the axes batch, length, heads and size."""
        rows = zip(arrays, self.labels, self._orders, strict=False)
        return [self._arranged(*row) for row in rows]

    def as_result(self, out: Array) -> Array:
        """Returns attention (batch, length, heads, size) in the layout of the equation."""
        return self._arranged(out, self._orders[3], self.result)

    def side(self, side: Side, x: PyTree) -> PyTree:
        """Returns a bias or mask with the axes batch, heads, rows and keys."""
        return self._arranged(x, side.labels, self._orders[4])

    def _arranged(self, x: PyTree, labels: Labels, order: Labels) -> PyTree:
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


def find_attention(last: Term) -> Match | None:
    """Returns the attention of which a matmul is the last operation, if it is one."""
    known = [(x.meaning, i) for i, x in enumerate(last.operands) if x.meaning]
    parts = [pair for pair in known if pair[0].kind == "probs"]
    if len(parts) != 1:
        return None
    ((meaning, position),) = parts
    value = last.operands[1 - position]
    summed, batch = last.params["dimension_numbers"]
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
    dot = meaning.dot
    return Match(
        last,
        [*dot.operands[order], value],
        [*operand_labels(dot)[order], labels],
        product_labels(last, *(pair if position == 0 else pair[::-1])),
        last.operands[position],
        meaning,
        axes,
        {**meaning.sizes, _WIDTH: value.shape[free[0]]},
    )


def _axes(meaning: Meaning, summed: Sequence[int], batch: Sequence[int]) -> Axes | None:
    """Returns the roles of the labels, if a product over these axes is attention."""
    sizes, labels = meaning.sizes, meaning.labels
    keys = {label for axis in summed for label in labels[axis]}
    if len(summed) != 1 or len(keys) != 1 or keys != meaning.summed:
        return None
    (key,) = keys
    side = {"lhs": "rhs", "rhs": "lhs"}.get(key[0])
    free = [x for x in sizes if x[0] == side]
    shared = [x for x in sizes if x[0] == "batch"]
    others = [x for x in sizes if x[0] == key[0] and x != key]
    given = [labels[axis] for axis in batch]
    if not free or others or any(len(x) > 1 for x in given):
        return None
    if {x for here in given for x in here} != {*shared}:
        return None

    def is_row(label: Label) -> tuple[bool, bool, int]:
        pairs = [zip(x.labels, x.term.shape, strict=True) for x in meaning.masks]
        masked = any(label in x and n != 1 for pair in pairs for x, n in pair)
        return masked, sizes[label] == sizes[key], sizes[label]

    row = max(free, key=is_row)
    # Heads come after the length in memory, or they are the last batch axis.
    _, places = meaning.dot.params["dimension_numbers"]
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


_RANDOM = {"random_bits", "threefry2x32", "random_wrap", "rng_bit_generator"}
# A softmax that is read by these chooses experts.
_ROUTING = ("top_k", "sort", "argmax", "gather")


def reason_for_miss(last: Term) -> str | None:
    """Returns what keeps a matmul from being attention, if it is nearly one."""
    probs = [
        x.meaning for x in last.operands if x.meaning and x.meaning.kind == "probs"
    ]
    if probs:
        return None if all(x.is_bounded for x in probs) else _NO_SHIFT
    is_other = lambda x: x.meaning is None and x.name not in ("", "dot_general")  # noqa: E731
    terms = [*itertools.islice(reach(last.operands, is_other), _MOST_SEARCHED)]
    readers = [x for x in terms if is_other(x)]
    names = {x.name for x in readers}
    for term in readers:
        kinds = {x.meaning.kind for x in term.operands if x.meaning}
        if "probs" in kinds and term.name not in _ROUTING:
            what = "dropout" if names & _RANDOM else term.name
            return f"{what} between softmax and values"
        if term.name == "tanh" and kinds and "exp" in names:
            return "a soft cap (tanh) of the scores"
    return None


_NO_SHIFT = "softmax without the largest score of each row subtracted"


# --- Biases and masks -----------------------------------------------------------------


class Masks(NamedTuple):
    """Biases and masks of one attention.

    Constants are arrays with the axes batch, heads, rows and keys.
    """

    is_causal: bool  # Whether a query sees the keys up to its own position only
    window: tuple[int, int] | None  # How many it sees to the left and to the right
    biases: Sequence[Side | np.ndarray]
    masks: Sequence[Side | np.ndarray]  # `True` for keys that are seen
    # The probability of each key in a row in which all is masked; `None` if there is no
    # such row
    empty: float | None = None
    is_added: bool = False  # Whether scores have a gradient in such rows

    @property
    def terms(self) -> list[Term]:
        """The terms whose values are needed."""
        sides = (*self.biases, *self.masks)
        return [side.term for side in sides if isinstance(side, Side)]

    def arrays(
        self, match: "Match", value_of: Callable[[Term], Array]
    ) -> dict[str, Array]:
        """Returns the kernel's further operands."""

        def array(side: Side | np.ndarray) -> Array:
            if isinstance(side, np.ndarray):
                return jnp.asarray(side)
            x = jnp.asarray(match.side(side, value_of(side.term)))
            if side.kind == "bias":
                return x.astype(jnp.float32) * side.factor
            return x if side.keeps else ~x

        found: dict[str, Array] = {}
        if self.biases:
            found["bias"] = functools.reduce(operator.add, map(array, self.biases))
        if self.masks:
            found["mask"] = functools.reduce(operator.and_, map(array, self.masks))
        return found


def masks_of(match: Match) -> Masks | str:
    """Returns what the kernel is told of masks and biases, or why it cannot be told."""
    sides, given = match.scores.sides, match.scores.masks
    masks, biases, constants = [], [], []
    bias: np.ndarray | None = None  # the sum of constants that are no masks
    fills = [side.fill for side in given]
    for side in (part for x in sides for part in _parts(x)):
        value = _laid_out(match, side)
        if value is None:
            (masks if side.kind == "mask" else biases).append(side)
        elif side.kind == "mask":
            constants.append(value)
        elif not np.all((value == 0) | (value <= MASKED)):
            bias = value if bias is None else bias + value
        elif np.any(value):
            constants.append(value)
            fills.append(float(value[value < 0].max()))
    mask, form, has_empty_rows = _pattern(match, constants)
    used = (x.constant for side in biases for x in origins(side.term))
    if len(sides) > 1 and any(map(is_low, used)):
        return "a bias that seems to be a mask, beside others"
    largest = 0.0 if bias is None else 2 * float(np.abs(bias).max())
    largest = max(largest, _BIASES) if biases else largest
    if any(fill > -largest for fill in fills):
        return "a bias may be as large as what masks make of the scores"
    known = [*biases, *([] if bias is None else [bias])]
    found = Masks(*(form or (False, None)), known, [*masks, *([] if form else [mask])])
    if not masks and not has_empty_rows:
        return found
    # What rows become in which everything is masked.
    empty, is_added = match.scores.empty, any(side.is_added for side in given)
    if (
        empty is None
        or np.isinf(empty)  # times values of both signs
        or any(x.dtype != bool for x in constants)
        or (is_added and (len(given) > 1 or biases))
    ):
        return "rows may be masked entirely, by masks of different kinds"
    return found._replace(empty=empty, is_added=is_added)


def origins(bias: Term) -> Iterator[Term]:
    """Yields the constants, arguments, matmuls and loops from which a bias is computed."""
    is_plain = lambda x: x.eqn and not (x.name in MATMULS or has_body(x.eqn))  # noqa: E731
    enters = lambda x: x.constant is None and is_plain(x) and x.aval.dtype != bool  # noqa: E731
    found = (x for x in reach([bias], enters) if not enters(x))
    return (x for x in found if jnp.issubdtype(x.aval.dtype, np.number))


def is_low(value: np.ndarray | None) -> bool:
    """Returns whether a constant has numbers as low as those of masks, or as large."""
    return value is not None and not np.all(np.abs(value) < -MASKED)


def _laid_out(match: Match, side: Side) -> np.ndarray | None:
    """Returns a constant with the axes batch, heads, rows and keys, as small as it can be.

    A mask is `True` for what is kept, a bias is multiplied by its factor.
    """
    if side.term.constant is None:
        return None
    memo, key = match.last.program.memo, (side, match.axes)
    if key not in memo:
        x = np.asarray(match.side(side, side.term.constant))
        x = x[:1] if (x == x[:1]).all() else x
        x = x[:, :1] if (x == x[:, :1]).all() else x
        is_mask, factor = side.kind == "mask", np.float32(side.factor)
        memo[key] = x == side.keeps if is_mask else x.astype(np.float32) * factor
    return memo[key]


Form = tuple[bool, tuple[int, int] | None]
"""Whether a mask is causal, and its window."""


def _pattern(
    match: Match, constants: Sequence[np.ndarray]
) -> tuple[np.ndarray, Form | None, bool]:
    """Returns constant masks as one, its form, and whether it masks a row entirely."""
    memo, key = match.last.program.memo, (match.axes, *map(id, constants))
    if key not in memo:
        parts = [x if x.dtype == bool else x == 0 for x in constants]
        mask = functools.reduce(np.logical_and, parts, np.ones((1, 1, 1, 1), bool))
        rows, keys = match.size(match.axes.row), match.size(match.axes.key)
        form = (False, None) if mask.all() else _form(mask, rows, keys)
        memo[key] = mask, form, not mask.any(axis=-1).all()
    return memo[key]


def _form(mask: np.ndarray, rows: int, keys: int) -> Form | None:
    if mask.shape != (1, 1, rows, keys):
        return None
    here, left = np.tril(np.ones((rows, keys), bool)), int(mask[0, 0, -1].sum()) - 1
    if np.array_equal(mask[0, 0], here):
        return True, None
    if rows != keys or left < 0:
        return None
    is_window = np.array_equal(mask[0, 0], here & ~np.tril(here, -left - 1))
    return (True, (left, 0)) if is_window else None


def _parts(side: Side) -> Iterator[Side]:
    """Yields the masks that a mask is made of: one of them may be a constant."""
    term, labels = before_broadcast(side.term, side.labels)
    side = side._replace(term=term, labels=labels)
    name, operands = term.name, term.operands
    if side.kind == "bias" or term.constant is not None:
        yield side
    elif name in SAME:
        yield from _parts(side._replace(term=operands[0]))
    elif name == "not":
        yield from _parts(side._replace(term=operands[0], keeps=not side.keeps))
    elif name in ("ne", "gt", "eq") and (inner := _truth(operands)) is not None:
        keeps = side.keeps == (name != "eq")
        yield from _parts(side._replace(term=inner, keeps=keeps))
    elif name == ("and" if side.keeps else "or") and all(x.shape for x in operands):
        for operand in operands:
            yield from _parts(side._replace(term=operand))
    else:
        yield side


def _truth(operands: Sequence[Term]) -> Term | None:
    """Returns the booleans that are compared with 0 as numbers."""
    is_cast = operands[0].name == "convert_element_type" and operands[1].scalar == 0.0
    source = operands[0].operands[0] if is_cast else None
    return source if source and source.aval.dtype == np.bool_ else None


def fill_empty_rows(
    match: Match, masks: Masks, mask: Array, operands: Sequence[Array], out: Array
) -> Array:
    """Returns attention with what rows become in which everything is masked."""
    rows, keys = match.size(match.axes.row), match.size(match.axes.key)
    if masks.is_causal:
        mask = mask & causal(rows, keys, masks.window)
    seen = jnp.swapaxes(jnp.any(mask, axis=-1), 1, 2)[..., None]
    query, key, value = operands
    groups = query.shape[2] // value.shape[2]
    total = jnp.sum(value, axis=1, keepdims=True, dtype=jnp.float32)
    other = jnp.repeat(total, groups, axis=2)
    if masks.is_added:
        # Σ v softmax(s) at equal scores s = scale · q k, with its derivative:
        # p · Σ v + p · Σ (v - mean v) ds.
        mean = (total / keys).astype(value.dtype)
        apart = lax.stop_gradient(value - mean) * match.scores.scale
        slopes = jnp.repeat(jnp.einsum("bshd,bshe->bhde", key, apart), groups, axis=1)
        slope = jnp.einsum("bthd,bhde->bthe", query, slopes)
        other = other + (slope - lax.stop_gradient(slope)).astype(jnp.float32)
    assert masks.empty is not None
    # Not nan times something where there are keys: its gradient would be nan, too.
    other = jnp.where(seen, 0.0, np.float32(masks.empty)) * other
    return jnp.where(seen, out, other.astype(out.dtype))
