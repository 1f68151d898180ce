"""Which entry of each row is read: by a gather, or by a one-hot array."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._jaxpr._constants import compact
from mpx._jaxpr._meanings import Label, Meaning
from mpx._jaxpr._meanings import Labels as Axes
from mpx._jaxpr._terms import Term

_MODES: dict[Any, Literal["clip", "fill"]] = {
    lax.GatherScatterMode.CLIP: "clip",
    lax.GatherScatterMode.PROMISE_IN_BOUNDS: "clip",
    lax.GatherScatterMode.FILL_OR_DROP: "fill",
}


class Labels(NamedTuple):
    """An array of labels.

    Attributes:
        term: The array, of integers.
        axes: For each of its axes, the axes of the tokens that it runs over.
        mode: What a label outside the vocabulary chooses: the nearest entry, the number
            `fill`, or 0.
        fill: That number.
    """

    term: Term
    axes: Axes
    mode: Literal["clip", "fill", "drop"]
    fill: float = 0.0


def axis_of(meaning: Meaning, label: Label) -> int | None:
    """Returns the axis of a value that is exactly that of a label."""
    axes = [i for i, labels in enumerate(meaning.labels) if label in labels]
    return axes[0] if axes and meaning.labels[axes[0]] == (label,) else None


# --- Gathers --------------------------------------------------------------------------


def gathered_labels(
    term: Term, meaning: Meaning, vocab: Label
) -> tuple[Labels, Axes] | None:
    """Returns the labels of a gather of one entry per token, and the axes of its result.

    Args:
        term: The result of the gather.
        meaning: The meaning of the array that it reads.
        vocab: The axis of the vocabulary.
    """
    params, where = term.eqn.params, term.operands[1]
    numbers, mode = params["dimension_numbers"], _MODES.get(params["mode"])
    axis = axis_of(meaning, vocab)
    if mode is None or axis is None or any(n != 1 for n in params["slice_sizes"]):
        return None
    axes: list[tuple[Label, ...]] = [()] * len(where.shape)
    pairs = zip(
        numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True
    )
    for dim, source in pairs:
        axes[dim] = meaning.labels[source]
    parts = _parts(where, len(numbers.start_index_map))
    if parts is None:
        return None
    labels = None
    for part, source in zip(parts, numbers.start_index_map, strict=True):
        if source == axis:
            labels = part
        elif meaning.labels[source]:
            dim = _counted(part, term.operands[0].shape[source])
            if dim is None or axes[dim]:
                return None
            axes[dim] = meaning.labels[source]
    if labels is None or not _covers(axes, meaning, vocab):
        return None
    if any(n != 1 and not x for n, x in zip(where.shape[:-1], axes[:-1], strict=True)):
        return None  # several labels for one token
    rest = iter(axes[:-1])
    outer = [
        () if i in numbers.offset_dims else next(rest) for i in range(len(term.shape))
    ]
    fill = params["fill_value"]
    fill = float("nan") if fill is None else float(fill)
    return Labels(labels, tuple(axes), mode, fill), tuple(outer)


def _parts(where: Term, count: int) -> list[Term] | None:
    """Returns the terms of the indices along each axis that is indexed."""
    if count == 1:
        return [where]
    last = len(where.shape) - 1
    if where.name != "concatenate" or where.eqn.params["dimension"] != last:
        return None
    parts = where.operands
    return parts if all(x.shape[-1] == 1 for x in parts) else None


def _counted(part: Term, size: int) -> int | None:
    """Returns the axis along which an array counts from 0, if it is constant else."""
    value = part.constant
    if value is None:
        return None
    for axis, here in enumerate(value.shape):
        line = np.arange(size).reshape(
            [-1 if i == axis else 1 for i in range(value.ndim)]
        )
        if here == size and np.array_equal(np.broadcast_to(line, value.shape), value):
            return axis
    return None


def _covers(axes: Sequence[Any], meaning: Meaning, vocab: Label) -> bool:
    """Returns whether axes are all those of the tokens, each once."""
    given = [label for labels in axes for label in labels]
    wanted = [x for labels in meaning.labels for x in labels if x != vocab]
    return sorted(given) == sorted(wanted)


# --- One-hot arrays -------------------------------------------------------------------


class OneHot(NamedTuple):
    """An array that is `on` at the label of each token, and else `off`."""

    labels: Term
    on: float
    off: float


def multiplied_by(term: Term, out: Term, axis: int) -> OneHot | None:
    """Returns the one-hot array with which a value is multiplied, or by which selected."""
    if out.shape != term.shape:
        return None
    if out.name == "mul":
        others = [x for x in out.operands if x is not term]
        return one_hot_of(others[0], axis) if len(others) == 1 else None
    if out.name == "select_n" and out.operands[-1] is term:
        which, zero, _ = out.operands
        return one_hot_of(which, axis) if zero.scalar == 0.0 else None
    return None


def one_hot_of(term: Term, axis: int) -> OneHot | None:
    """Returns what an array is if it is one-hot along an axis, or affine of such a one."""
    name, operands = term.name, term.operands
    if name == "eq":
        return _compared(term, axis)
    if name in ("convert_element_type", "stop_gradient", "copy", "copy_p"):
        return one_hot_of(operands[0], axis)
    if name == "select_n" and len(operands) == 3:
        return _selected(term, axis)
    if name in ("add", "sub", "mul", "div", "neg"):
        return _affine(term, axis)
    return None


def _selected(term: Term, axis: int) -> OneHot | None:
    which, *numbers = term.operands
    off, on = (x.scalar for x in numbers)
    found = one_hot_of(which, axis)
    if found is None or (found.on, found.off) != (1, 0) or on is None or off is None:
        return None
    return found._replace(on=on, off=off)


def _affine(term: Term, axis: int) -> OneHot | None:
    """Returns a one-hot array after arithmetic with a number."""
    numbers = [x.scalar for x in term.operands]
    places = [i for i, x in enumerate(numbers) if x is None]
    if len(places) != 1:
        return None
    source = term.operands[places[0]]
    found = one_hot_of(source, axis) if source.shape == term.shape else None
    if found is None:
        return None

    def change(entry: float) -> float:
        given = [np.float64(entry if x is None else x) for x in numbers]
        with np.errstate(all="ignore"):
            return float(_ARITHMETIC[term.name](*given))

    on, off = change(found.on), change(found.off)
    is_finite = np.isfinite(on) and np.isfinite(off)
    return found._replace(on=on, off=off) if is_finite else None


_ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
}


def _compared(term: Term, axis: int) -> OneHot | None:
    for labels, entries in (term.operands, term.operands[::-1]):
        size = term.shape[axis]
        value = entries.constant
        if value is None or not jnp.issubdtype(labels.aval.dtype, jnp.integer):
            continue
        if len(labels.shape) != len(term.shape) or labels.varying[axis]:
            continue
        line = compact(value)
        if line.size != size or value.ndim != len(term.shape):
            continue
        if line.shape[axis] == size and np.array_equal(
            line.reshape(-1), np.arange(size)
        ):
            return OneHot(labels, 1.0, 0.0)
    return None
