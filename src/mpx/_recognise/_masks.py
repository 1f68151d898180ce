"""What the biases and masks of recognised scores are for the kernel.

A mask that depends on no argument is computed while tracing and may be causal, a window, or no
mask at all. Rows in which everything is masked are the same as in the function as written:
all their probabilities are one number, `Meaning.empty`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._ops._attention import causal
from mpx._recognise._match import Match
from mpx._recognise._softmax import MASKED, Side
from mpx._recognise._terms import RULES, SAME, Term, compact

_BIASES = 1e8
"""No bias is taken to be larger than this: masked scores must be lower."""
_MOST_SEARCHED = 60


class Masks(NamedTuple):
    """Biases and masks of one attention."""

    is_causal: bool = False  # Whether a query sees the keys up to its own position only
    # The number of keys that it sees to the left and to the right
    window: tuple[int, int] | None = None
    biases: tuple[Side, ...] = ()  # The biases that are no constants
    # The sum of those that are, with the axes batch, heads, rows and keys
    bias: np.ndarray | None = None
    masks: tuple[Side, ...] = ()  # The masks that are no constants
    mask: np.ndarray | None = None  # Those that are, `True` for keys that are seen
    # The probability of each key in a row in which all is masked; `None` if there is no
    # such row
    empty: float | None = None
    is_added: bool = False  # Whether scores have a gradient in such rows

    @property
    def terms(self) -> list[Term]:
        """The terms whose values are needed."""
        return [side.term for side in (*self.biases, *self.masks)]

    @property
    def extras(self) -> tuple[str, ...]:
        """The names of the kernel's further operands."""
        has_bias = self.biases or self.bias is not None
        has_mask = self.masks or self.mask is not None
        return ("bias",) * bool(has_bias) + ("mask",) * bool(has_mask)


class _Parts:
    """Masks and biases by what they are: constants, or not.

    Attributes:
        keep: The constant masks, `True` for what all of them keep.
        masks: The other masks.
        bias: The sum of the constant biases that are more than a mask.
        biases: The other biases.
        fills: What the masks make of scores.
        added: Whether a constant bias is a mask.
    """

    def __init__(self, match: Match, sides: Sequence[Side]) -> None:
        self.keep = np.ones((1, 1, 1, 1), bool)
        self.masks: list[Side] = []
        self.bias: np.ndarray | None = None
        self.biases: list[Side] = []
        self.fills: list[float] = []
        self.added = False
        for side in (part for x in sides for part in _parts(x)):
            value = _laid_out(match, side)
            if side.kind == "mask":
                self.fills.append(side.fill)
            if value is None:
                (self.masks if side.kind == "mask" else self.biases).append(side)
            elif side.kind == "mask":
                self._keep(value)
            else:
                self._add(value)

    def _keep(self, value: np.ndarray) -> None:
        # Not copied if it is the only one: then it is remembered.
        is_first = self.keep.size == 1 and self.keep.all()
        self.keep = value if is_first else self.keep & value

    def _add(self, value: np.ndarray) -> None:
        if not np.all((value == 0) | (value <= MASKED)):
            self.bias = value if self.bias is None else self.bias + value
        elif np.any(value):
            self.fills.append(float(value[value < 0].max()))
            self.added = True
            self._keep(value == 0)

    def is_same(self, other: "_Parts") -> bool:
        """Returns whether other masks mask the same."""
        one, two = ({x.origin() for x in parts.masks} for parts in (self, other))
        shapes = np.broadcast_shapes(self.keep.shape, other.keep.shape)
        first, second = (np.broadcast_to(x.keep, shapes) for x in (self, other))
        return one == two and np.array_equal(first, second)


def masks_of(match: Match) -> Masks | str:
    """Returns what the kernel is told of masks and biases, or why it cannot be told."""
    parts = _Parts(match, match.scores.sides)
    pattern = _pattern(match, parts.keep)
    found = Masks(
        pattern.is_causal,
        pattern.window,
        biases=tuple(parts.biases),
        bias=parts.bias,
        masks=tuple(parts.masks),
        mask=None if pattern.is_causal or pattern.keeps_all else parts.keep,
    )
    if len(match.scores.sides) > 1 and any(_may_mask(x.term) for x in parts.biases):
        return "a bias that seems to be a mask, beside others"
    largest = 0.0 if parts.bias is None else 2 * float(np.abs(parts.bias).max())
    largest = max(largest, _BIASES) if parts.biases else largest
    if any(fill > -largest for fill in parts.fills):
        return "a bias may be as large as what masks make of the scores"
    if not parts.masks and not pattern.has_empty_rows:
        return found
    return _with_empty_rows(match, parts, found)


def _may_mask(term: Term) -> bool:
    """Returns whether a bias is computed with numbers as large as those of masks."""
    waiting, seen = [term], set()
    while waiting and len(seen) < _MOST_SEARCHED:
        term = waiting.pop()
        value = term.constant
        if value is not None and value.size:
            numbers = compact(value)
            is_float = jnp.issubdtype(numbers.dtype, jnp.floating)
            if is_float and not np.abs(numbers).max() < -MASKED:
                return True
        elif term.name in RULES and id(term) not in seen:
            seen.add(id(term))
            waiting.extend(term.operands)
    return False


def _with_empty_rows(match: Match, parts: _Parts, found: Masks) -> Masks | str:
    """Returns masks with what rows become in which everything is masked."""
    empty, masks = match.meaning.empty, match.scores.masks
    is_added = any(side.is_added for side in masks)
    late = [_Parts(match, [side]) for side in match.meaning.late]
    if (
        empty is None
        or np.isinf(empty)  # times values of both signs
        or parts.added
        or (is_added and (len(masks) > 1 or parts.biases))
        or not all(map(parts.is_same, late))
    ):
        return "rows may be masked entirely, by masks of different kinds"
    return found._replace(empty=empty, is_added=is_added)


def _laid_out(match: Match, side: Side) -> np.ndarray | None:
    """Returns a constant with the axes batch, heads, rows and keys.

    A mask is `True` for what is kept, a bias is multiplied by its factor.
    """
    value = side.term.constant
    if value is None:
        return None
    memo = match.probs.level.root.memo
    key = id(value), side.kind, side.keeps, side.factor, side.labels, match.axes
    if key not in memo:
        x = smallest(np.asarray(match.side(side, compact(value))))
        is_mask = side.kind == "mask"
        x = x == side.keeps if is_mask else x.astype(np.float32) * side.factor
        memo[key] = value, x if is_mask else x.astype(np.float32)
    return memo[key][1]


def smallest(x: np.ndarray) -> np.ndarray:
    """Returns a constant with size 1 along the batch and the heads if they are alike."""
    if (x == x[:1]).all():
        x = x[:1]
    return x[:, :1] if (x == x[:, :1]).all() else x


class _Pattern(NamedTuple):
    is_causal: bool
    window: tuple[int, int] | None
    keeps_all: bool
    has_empty_rows: bool


def _pattern(match: Match, keep: np.ndarray) -> _Pattern:
    """Returns what a constant mask is."""
    memo, key = match.probs.level.root.memo, (id(keep), match.axes)
    if key not in memo:  # the array is kept with it: its `id` is not taken again
        rows, keys = match.size(match.axes.row), match.size(match.axes.key)
        seen = np.broadcast_to(keep, (*keep.shape[:3], keys)).any(-1)
        is_causal, window = form_of(keep, rows, keys) or (False, None)
        empty = not bool(seen.all())
        memo[key] = keep, _Pattern(is_causal, window, bool(keep.all()), empty)
    return memo[key][1]


def form_of(
    mask: np.ndarray, rows: int, keys: int
) -> tuple[bool, tuple[int, int] | None] | None:
    """Returns whether a mask is causal, and its window; `None` if it is neither."""
    if mask.shape != (1, 1, rows, keys):
        return None
    mask = mask[0, 0]
    here = np.tril(np.ones((rows, keys), bool))
    if np.array_equal(mask, here):
        return True, None
    left = int(mask[-1].sum()) - 1
    if rows != keys or left < 0:
        return None
    if np.array_equal(mask, here & ~np.tril(here, -left - 1)):
        return True, (left, 0)
    return None


def _parts(side: Side) -> Iterator[Side]:
    """Yields the masks that a mask is made of: one of them may be a constant."""
    if side.kind == "bias" or side.term.constant is not None:
        yield side
        return
    term, labels = side.term, side.labels
    name, operands = term.name, term.operands
    if name in SAME:
        yield from _parts(dataclasses.replace(side, term=operands[0]))
    elif name == "broadcast_in_dim" and operands[0].shape:
        dims = term.params["broadcast_dimensions"]
        labels = tuple(labels[d] for d in dims)
        yield from _parts(dataclasses.replace(side, term=operands[0], labels=labels))
    elif name == "not":
        yield from _parts(
            dataclasses.replace(side, term=operands[0], keeps=not side.keeps)
        )
    elif name in ("ne", "gt", "eq") and (inner := _truth(operands)) is not None:
        keeps = side.keeps == (name != "eq")
        yield from _parts(dataclasses.replace(side, term=inner, keeps=keeps))
    elif name == ("and" if side.keeps else "or") and all(x.shape for x in operands):
        for operand in operands:
            yield from _parts(dataclasses.replace(side, term=operand))
    else:
        yield side


def _truth(operands: list[Term]) -> Term | None:
    """Returns the booleans that are compared with 0 as numbers."""
    if operands[1].scalar != 0.0 or operands[0].name != "convert_element_type":
        return None
    source = operands[0].operands[0]
    return source if source.aval.dtype == np.bool_ else None


# --- While the function runs ----------------------------------------------------------


def arrays_of(
    match: Match, masks: Masks, value_of: Callable[[Term], Array]
) -> dict[str, Array]:
    """Returns the kernel's further operands."""

    def small(side: Side) -> Array:
        x = value_of(side.term)
        for axis, varies in enumerate(side.term.varying):
            if not varies and x.shape[axis] != 1:
                x = lax.slice_in_dim(x, 0, 1, axis=axis)
        return jnp.asarray(match.side(side, x))

    found: dict[str, Array] = {}
    parts: list[PyTree] = [
        small(x).astype(jnp.float32) * x.factor for x in masks.biases
    ]
    parts += [] if masks.bias is None else [jnp.asarray(masks.bias)]
    if parts:
        found["bias"] = functools.reduce(operator.add, parts)
    parts = [small(x) if x.keeps else ~small(x) for x in masks.masks]
    parts += [] if masks.mask is None else [jnp.asarray(masks.mask)]
    if parts:
        found["mask"] = functools.reduce(operator.and_, parts)
    return found


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
