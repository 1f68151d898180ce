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
from mpx._recognise._softmax import MASKED, Side, before_broadcast
from mpx._recognise._terms import RULES, SAME, Term

_BIASES = 1e8
"""No bias is taken to be larger than this: masked scores must be lower."""
_MOST_SEARCHED = 60


class Masks(NamedTuple):
    """Biases and masks of one attention."""

    is_causal: bool = False  # Whether a query sees the keys up to its own position only
    # The number of keys that it sees to the left and to the right
    window: tuple[int, int] | None = None
    biases: Sequence[Side] = ()  # The biases that are no constants
    # The sum of those that are, with the axes batch, heads, rows and keys
    bias: np.ndarray | None = None
    masks: Sequence[Side] = ()  # The masks that are no constants
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


def masks_of(match: Match) -> Masks | str:
    """Returns what the kernel is told of masks and biases, or why it cannot be told."""
    constants: list[np.ndarray] = []  # masks, or biases that are masks
    masks, biases, bias = [], [], None
    sides = match.scores.sides
    fills = [side.fill for side in match.scores.masks]
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
    is_causal, window = form or (False, None)
    found = Masks(is_causal, window, biases, bias, masks, None if form else mask)
    if len(sides) > 1 and any(_may_mask(x.term) for x in biases):
        return "a bias that seems to be a mask, beside others"
    largest = 0.0 if bias is None else 2 * float(np.abs(bias).max())
    largest = max(largest, _BIASES) if biases else largest
    if any(fill > -largest for fill in fills):
        return "a bias may be as large as what masks make of the scores"
    if not masks and not has_empty_rows:
        return found
    # What rows become in which everything is masked.
    empty = match.meaning.empty
    is_added = any(side.is_added for side in match.scores.masks)
    if (
        empty is None
        or np.isinf(empty)  # times values of both signs
        or any(x.dtype != bool for x in constants)
        or (is_added and (len(match.scores.masks) > 1 or biases))
    ):
        return "rows may be masked entirely, by masks of different kinds"
    return found._replace(empty=empty, is_added=is_added)


def _may_mask(term: Term) -> bool:
    """Returns whether a bias is computed with numbers as large as those of masks."""
    waiting, seen = [term], set()
    while waiting and len(seen) < _MOST_SEARCHED:
        term = waiting.pop()
        value = term.constant
        if value is not None and value.size:
            is_float = jnp.issubdtype(value.dtype, jnp.floating)
            if is_float and not np.abs(value).max() < -MASKED:
                return True
        elif term.name in RULES and id(term) not in seen:
            seen.add(id(term))
            waiting.extend(term.operands)
    return False


def _laid_out(match: Match, side: Side) -> np.ndarray | None:
    """Returns a constant with the axes batch, heads, rows and keys, as small as it can be.

    A mask is `True` for what is kept, a bias is multiplied by its factor.
    """
    value = side.term.constant
    if value is None:
        return None
    memo = match.probs.level.root.memo
    key = id(value), side.kind, side.keeps, side.factor, side.labels, match.axes
    if key not in memo:
        x = np.asarray(match.side(side, value))
        x = x[:1] if (x == x[:1]).all() else x
        x = x[:, :1] if (x == x[:, :1]).all() else x
        if side.kind == "mask":
            x = x == side.keeps
        else:
            x = (x.astype(np.float32) * side.factor).astype(np.float32)
        memo[key] = x
    return memo[key]


Form = tuple[bool, tuple[int, int] | None]
"""Whether a mask is causal, and its window."""


def _pattern(
    match: Match, constants: Sequence[np.ndarray]
) -> tuple[np.ndarray, Form | None, bool]:
    """Returns constant masks as one, its form, and whether it masks a row entirely."""
    memo, key = match.probs.level.root.memo, (match.axes, *map(id, constants))
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
    mask = mask[0, 0]
    here = np.tril(np.ones((rows, keys), bool))
    if np.array_equal(mask, here):
        return True, None
    left = int(mask[-1].sum()) - 1
    is_window = rows == keys and left >= 0
    if is_window and np.array_equal(mask, here & ~np.tril(here, -left - 1)):
        return True, (left, 0)
    return None


def _parts(side: Side) -> Iterator[Side]:
    """Yields the masks that a mask is made of: one of them may be a constant."""
    term, labels = before_broadcast(side.term, side.labels)
    side = dataclasses.replace(side, term=term, labels=labels)
    name, operands = term.name, term.operands
    if side.kind == "bias" or term.constant is not None:
        yield side
    elif name in SAME:
        yield from _parts(dataclasses.replace(side, term=operands[0]))
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
        return jnp.asarray(match.side(side, value_of(side.term)))

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
