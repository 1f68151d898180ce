"""What the biases and masks of recognised scores are for the kernel.

A mask that depends on no argument is computed while tracing and may be causal, a window, or no
mask at all. Rows in which everything is masked are the same as in the function as written:
the mean of the values if masked scores become a finite number, nan if they become -inf.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._attention._match import Match
from mpx._jaxpr._constants import SAME, compact
from mpx._jaxpr._meanings import MASKED, Side
from mpx._jaxpr._terms import Term

_ALL = -1e20
"""Adding this or less to a score leaves nothing of the score in f32."""


class Masks(NamedTuple):
    """Biases and masks of one attention.

    Attributes:
        is_causal: Whether a query sees the keys up to its own position only.
        window: The number of keys that it sees to the left and to the right.
        biases: The biases that are no constants.
        bias: The sum of those that are, with the axes batch, heads, rows and keys.
        masks: The masks that are no constants.
        mask: Those that are, `True` for keys that are seen.
        empty: What a row becomes in which all is masked; `None` if there is no such row,
            or the kernel does the same.
    """

    is_causal: bool = False
    window: tuple[int, int] | None = None
    biases: tuple[Side, ...] = ()
    bias: np.ndarray | None = None
    masks: tuple[Side, ...] = ()
    mask: np.ndarray | None = None
    empty: Literal["mean", "nan", "zero"] | None = None

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


class _Constants:
    """The constant parts of masks and biases, and the fills of all masks."""

    def __init__(self) -> None:
        self.keep = np.ones((1, 1, 1, 1), bool)
        self.bias: np.ndarray | None = None
        self.fills: set[float] = set()
        self.has_small_fill = False

    def add_mask(self, keep: np.ndarray) -> None:
        """Adds a mask, `True` for what is kept."""
        # Not copied if it is the only one: then it is remembered.
        self.keep = (
            keep if self.keep.size == 1 and self.keep.all() else self.keep & keep
        )

    def add_bias(self, value: np.ndarray) -> bool:
        """Adds a bias; returns whether it is more than a mask."""
        if not np.all((value == 0) | (value <= MASKED)):
            self.bias = value if self.bias is None else self.bias + value
            return True
        if np.any(value):
            fill = float(value[value < 0].max())
            self.fills.add(fill)
            self.has_small_fill = self.has_small_fill or fill > _ALL
            self.add_mask(value == 0)
        return False


def masks_of(match: Match) -> Masks | str:
    """Returns what the kernel is told of masks and biases, or why it cannot be told."""
    constants, is_late = _Constants(), False
    biases, masks = [], []
    for side in (part for x in match.scores.sides for part in _parts(_as_mask(x))):
        value = _laid_out(match, side)
        if side.kind == "mask":
            constants.fills.add(side.fill)
            if value is None:
                masks.append(side)
            else:
                constants.add_mask(value)
        elif value is None:
            is_late = is_late or bool(masks)
            biases.append(side)
        else:
            is_late = (constants.add_bias(value) and bool(masks)) or is_late
    keep = constants.keep
    pattern = _pattern(match, keep)
    found = Masks(
        pattern.is_causal,
        pattern.window,
        biases=tuple(biases),
        bias=constants.bias,
        masks=tuple(masks),
        mask=None if pattern.is_causal or pattern.keeps_all else keep,
    )
    if not masks and not pattern.has_empty_rows:
        return found
    if is_late:
        return "a bias is added to scores that are masked"
    if constants.has_small_fill or len(constants.fills) > 1:
        return "masks with different fills, and rows that may be masked entirely"
    return found._replace(empty=_empty_rows(match, constants.fills))


def _empty_rows(match: Match, fills: set[float]) -> Literal["mean", "nan", "zero"]:
    if match.meaning.zeroed:
        return "zero"
    return "nan" if -math.inf in fills else "mean"


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


def _as_mask(side: Side) -> Side:
    """Returns a bias of 0 and a large negative number as a mask; others as they are."""
    if side.kind == "mask":
        return side
    term, labels = side.term, side.labels
    while term.name in ("broadcast_in_dim", "convert_element_type"):
        if term.name == "broadcast_in_dim":
            dims = term.params["broadcast_dimensions"]
            labels = tuple(labels[d] for d in dims)
        term = term.operands[0]
    if term.name != "select_n" or len(term.operands) != 3:
        return side
    which, *cases = term.operands
    numbers = [x.scalar for x in cases]
    if which.shape != term.shape or 0.0 not in numbers or None in numbers:
        return side
    keeps = numbers[1] == 0.0
    fill = (numbers[0 if keeps else 1] or 0.0) * side.factor
    if fill > _ALL:
        return side
    return Side("mask", which, labels, keeps=keeps, fill=fill)


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
    """Returns the kernel's further operands.

    Args:
        match: The attention.
        masks: Its masks.
        value_of: Returns the value of a term.
    """

    def small(side: Side) -> Array:
        x = value_of(side.term)
        for axis, varies in enumerate(side.term.varying):
            if not varies and x.shape[axis] != 1:
                x = lax.slice_in_dim(x, 0, 1, axis=axis)
        return jnp.asarray(match.side(side, x))

    found: dict[str, Array] = {}
    parts: list[Any] = [small(x).astype(jnp.float32) * x.factor for x in masks.biases]
    parts += [] if masks.bias is None else [jnp.asarray(masks.bias)]
    if parts:
        found["bias"] = functools.reduce(operator.add, parts)
    parts = [small(x) if x.keeps else ~small(x) for x in masks.masks]
    parts += [] if masks.mask is None else [jnp.asarray(masks.mask)]
    if parts:
        found["mask"] = functools.reduce(operator.and_, parts)
    return found


def fill_empty_rows(
    match: Match, masks: Masks, mask: Array, value: Array, out: Array
) -> Array:
    """Returns attention with what rows become in which everything is masked.

    Args:
        match: The attention.
        masks: Its masks.
        mask: The mask of the kernel.
        value: The values (batch, keys, heads, size).
        out: The result of the kernel (batch, rows, heads, size).
    """
    rows, keys = match.size(match.axes.row), match.size(match.axes.key)
    if masks.is_causal:
        left = keys if masks.window is None else masks.window[0]
        here = np.tril(np.ones((rows, keys), bool))
        mask = mask & (here & ~np.tril(here, -left - 1))[None, None]
    seen = jnp.swapaxes(jnp.any(mask, axis=-1), 1, 2)[..., None]
    if masks.empty == "mean":
        mean = jnp.mean(value.astype(jnp.float32), axis=1, keepdims=True)
        other = jnp.repeat(mean, out.shape[2] // value.shape[2], axis=2)
        other = other.astype(out.dtype)
    else:
        other = jnp.asarray(jnp.nan if masks.empty == "nan" else 0.0, out.dtype)
    return jnp.where(seen, out, other)
