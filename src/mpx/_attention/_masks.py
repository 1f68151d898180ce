"""What the biases and masks of recognised scores are for the kernel.

A mask that depends on no argument is computed while tracing and may be causal, a window, or no
mask at all. Rows in which everything is masked are the same as in the function as written:
the mean of the values if masked scores become a finite number, nan if they become -inf.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._attention._match import Match
from mpx._jaxpr._meanings import MASKED, Side
from mpx._jaxpr._terms import Term, compact

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


def masks_of(match: Match) -> Masks | str:
    """Returns what the kernel is told of masks and biases, or why it cannot be told."""
    keep, fills = np.ones((1, 1, 1, 1), bool), set()
    bias, biases, masks = None, [], []
    is_added = is_late = False
    for side in match.scores.sides:
        side = _as_mask(side)
        value = side.term.constant
        if value is not None:
            value = np.asarray(match.side(side, compact(value)))
        if side.kind == "mask":
            fills.add(side.fill)
            if value is None:
                masks.append(side)
            else:
                keep = keep & (value == side.keeps)
        elif value is None:
            is_late = is_late or bool(masks)
            biases.append(side)
        else:
            value = value.astype(np.float32) * np.float32(side.factor)
            if not np.all((value == 0) | (value <= MASKED)):
                is_late = is_late or bool(masks)
                bias = value if bias is None else bias + value
            elif not np.all(value == 0):
                fills.add(float(value[value < 0].max()))
                is_added = is_added or float(value[value < 0].max()) > _ALL
                keep = keep & (value == 0)
    length = match.size(match.axes.key)
    full = np.broadcast_to(keep, (*keep.shape[:3], length))
    may_be_empty = bool(masks) or not full.any(-1).all()
    if may_be_empty:
        if is_late:
            return "a bias is added to scores that are masked"
        if is_added or len(fills) > 1:
            return "masks with different fills, and rows that may be masked entirely"
    found = Masks(
        *_pattern(keep, match.size(match.axes.row), length),
        tuple(biases),
        bias,
        tuple(masks),
    )
    if not found.is_causal and not keep.all():
        found = found._replace(mask=keep)
    if may_be_empty:
        found = found._replace(empty=_empty_rows(match, fills))
    return found


def _empty_rows(match: Match, fills: set[float]) -> Literal["mean", "nan", "zero"]:
    if match.meaning.zeroed:
        return "zero"
    return "nan" if -math.inf in fills else "mean"


def _pattern(
    keep: np.ndarray, rows: int, keys: int
) -> tuple[bool, tuple[int, int] | None]:
    """Returns whether a mask is causal, and its window."""
    if keep.shape != (1, 1, rows, keys):
        return False, None
    mask, here = keep[0, 0], np.tril(np.ones((rows, keys), bool))
    if np.array_equal(mask, here):
        return True, None
    left = int(mask[-1].sum()) - 1
    if rows != keys or left < 0:
        return False, None
    if np.array_equal(mask, here & ~np.tril(here, -left - 1)):
        return True, (left, 0)
    return False, None


def _as_mask(side: Side) -> Side:
    """Returns a bias of 0 and a large negative number as a mask; others as they are."""
    if side.kind == "mask":
        return side
    term, labels = side.term, side.labels
    while term.name in ("broadcast_in_dim", "convert_element_type"):
        if term.name == "broadcast_in_dim":
            dims = term.eqn.params["broadcast_dimensions"]
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
        found["bias"] = sum(parts[1:], parts[0])
    parts = [small(x) if x.keeps else ~small(x) for x in masks.masks]
    parts += [] if masks.mask is None else [jnp.asarray(masks.mask)]
    if parts:
        mask = parts[0]
        for part in parts[1:]:
            mask = mask & part
        found["mask"] = mask
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
        mask = mask & (here & ~np.tril(here, -left - 1))
    seen = jnp.swapaxes(jnp.any(mask, axis=-1), 1, 2)[..., None]
    if masks.empty == "mean":
        mean = jnp.mean(value.astype(jnp.float32), axis=1, keepdims=True)
        other = jnp.repeat(mean, out.shape[2] // value.shape[2], axis=2)
        other = other.astype(out.dtype)
    else:
        other = jnp.asarray(jnp.nan if masks.empty == "nan" else 0.0, out.dtype)
    return jnp.where(seen, out, other)
