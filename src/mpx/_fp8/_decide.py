"""Which matmuls run in a narrow format, and why others do not."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from mpx._amp._decide import RAGGED
from mpx._amp._facts import (
    CONSTANT,
    DATA,
    MOVES,
    Source,
    closed_over,
    follow,
    is_lookup,
    join,
)
from mpx._casting._keep import KEPT_SCOPE, STOP_SCOPE
from mpx._casting._select import Selector, matches, search, shown
from mpx._fp8._recipes import Int8, Recipe
from mpx._jax._compat import Literal
from mpx._jax._devices import H200
from mpx._jax._formats import short_name
from mpx._program import HANDLERS
from mpx._program._flow import Flow
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    Equation,
    flops,
    matmul_sizes,
    names,
)

_BF16, _FP8, _BANDWIDTH = H200["bf16"], H200["fp8"], H200["memory"]
# Each tensor is read for its maximum, read again, and written in two layouts.
_BYTES = 2 + 2 + 1 + 1
# The same where XLA writes the other layout, at half the speed.
_BYTES_TRANSPOSED = 2 + 2 * (2 + 1 + 1)
# In int8 each direction has scales and codes of its own, and a result in s32 is written and
# read. Counted, not measured: the units are taken to be as fast as those of fp8.
_BYTES_INT8 = 2 * (2 + 2 + 1) + 4 + 4
# The sum of this many products of int8 numbers is below 2³¹.
_LONGEST = (2**31 - 1) // 127**2
# Per matmul, forward and backward. Single matmuls are met with 5 µs, but that takes those
# of a GPT-2 124M to fp8, too, and in the whole model they gain nothing.
_LAUNCHES = 20e-6


class Matmul(NamedTuple):
    """One matmul of a function, for predicates; `Fp8View` describes the fields."""

    param: str
    scope: str
    source: str
    shape: tuple[int, int, int]
    times: int
    dtype: str
    reason: str
    flops: int
    primitive: str = "dot_general"
    format: str = "fp8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The arguments of `fp8`, checked, except for the function."""

    recipe: Recipe
    params: tuple[int | str, ...] | None
    keep: tuple[Selector, ...]
    include: tuple[Selector, ...]
    min_gain: float


def sizes(eqn: Equation) -> tuple[tuple[int, int, int], int]:
    """Returns (rows, summed length, columns) of what multiplies, and how many of these."""
    first, second = (var.aval.shape for var in eqn.invars[:2])
    name, count = eqn.primitive.name, 1
    if name in ATTENTION:
        # A product with the keys and one with the values; more of them in derivatives.
        summed, columns = first[-1], second[1]
        count = ATTENTION[name] * first[0] * first[2]
    elif name in CROSS_ENTROPY:
        summed, columns = first[-1], second[eqn.params["head"].vocab_axis]
    else:
        summed, (_, columns) = matmul_sizes(eqn)
        if name == "dot_general":
            count = math.prod(
                first[axis] for axis in eqn.params["dimension_numbers"][1][0]
            )
        elif name != "conv_general_dilated":
            # Each row of the first operand of a ragged matmul belongs to one group.
            columns = eqn.outvars[0].aval.shape[-1]
    return (flops(eqn) // max(2 * summed * columns * count, 1), summed, columns), count


def predicted_gain(
    m: int, k: int, n: int, *, count: int = 1, recipe: Recipe | None = None
) -> float:
    """Predicts how much faster `count` matmuls are in fp8, their gradients included."""
    # Time is operations over the measured peak; fp8 adds the traffic and the launches of
    # quantising both operands and the gradient.
    work = 3 * 2.0 * m * k * n * count
    each, share = _BYTES if count == 1 else _BYTES_TRANSPOSED, 1.0
    if isinstance(recipe, Int8):
        share = 1.0 if recipe.backward else 1 / 3
        each = _BYTES_INT8 * share
    traffic = each * (m * k + k * n + m * n) * count
    rest = (1 - share) * work / _BF16
    low = share * (work / _FP8 + _LAUNCHES) + traffic / _BANDWIDTH
    return (work / _BF16) / (low + rest)


def reason_to_keep(
    eqn: Equation,
    dtypes: Sequence[np.dtype],
    are_params: Sequence[bool],
    matmul: Matmul,
    *,
    purpose: str,
    chosen: Selection,
) -> str:
    """Returns why a product stays as it is written; "" if it becomes fp8.

    `dtypes` are those of both operands and of the result, `are_params` tells which operands
    are parameters; `purpose` is what they are for, if that speaks against 8 bits.
    """
    name = eqn.primitive.name
    if name != "dot_general":
        kind = _KINDS.get(name, "a fused attention")
        return f"it is {kind}; {chosen.recipe.kind} is for matmuls with one weight"
    return (
        _by_structure(eqn, dtypes, are_params, chosen)
        or _by_rule(matmul, purpose, chosen)
        or _by_size(eqn, matmul, chosen)
    )


_KINDS = {
    **dict.fromkeys((*RAGGED, GROUPED), "a ragged matmul"),
    "conv_general_dilated": "a convolution",
    **dict.fromkeys(CROSS_ENTROPY, "the head of a loss"),
}


def _by_structure(
    eqn: Equation,
    dtypes: Sequence[np.dtype],
    weights: Sequence[bool],
    chosen: Selection,
) -> str:
    if len({*weights}) == 1:
        both = "both operands are parameters"
        return both if weights[0] else "no operand is a parameter"
    if chosen.recipe.in_blocks and eqn.params["dimension_numbers"][1][0]:
        kind = type(chosen.recipe).__name__
        return f"it has batch dimensions, for which there are no {kind} blocks"
    wide = [x for x in map(short_name, dtypes[:2]) if x not in ("bf16", "f16")]
    if wide:
        return f"an operand is {wide[0]}"
    if len({*dtypes}) > 1:
        return f"its result was asked for in {short_name(dtypes[2])}"
    precision = eqn.params.get("precision")
    for item in precision if isinstance(precision, tuple) else (precision,):
        if item not in (None, lax.Precision.DEFAULT):
            return f"{item} was asked for"
    return ""


def _by_rule(matmul: Matmul, purpose: str, chosen: Selection) -> str:
    for scope in matmul.scope.split("/"):
        if scope == STOP_SCOPE:
            return "scope amp_stop"
        if scope.startswith(KEPT_SCOPE):
            return f"keep {scope.removeprefix(KEPT_SCOPE)}"
    for selector in chosen.keep:
        if _selects(selector, matmul):
            return f"keep {shown(selector)}"
    if any(_selects(selector, matmul) for selector in chosen.include):
        return ""
    return purpose


def _selects(selector: Selector, matmul: Matmul) -> bool:
    if not isinstance(selector, str | type):
        return bool(selector(matmul))
    if matmul.param and matches(selector, matmul.param, None):
        return True
    scope = matmul.scope
    return isinstance(selector, str) and bool(scope) and search(selector, scope)


def _by_size(eqn: Equation, matmul: Matmul, chosen: Selection) -> str:
    recipe, multiple = chosen.recipe, chosen.recipe.multiple
    for size in matmul.shape:
        if size == 0 or size % multiple:
            return f"{size} is not a multiple of {multiple}"
    if isinstance(recipe, Int8):
        # The products of the backward pass sum over rows and columns.
        summed = max(matmul.shape) if recipe.backward else matmul.shape[1]
        if summed > _LONGEST:
            return f"a sum of {summed} products may exceed s32 (at most {_LONGEST})"
    gain = predicted_gain(*matmul.shape, count=sizes(eqn)[1], recipe=recipe)
    if gain < chosen.min_gain:
        return f"too small to gain (predicted {gain:.2f}×)"
    return ""


TABLE = "its parameter is an embedding table"
HEAD = "its result goes into a softmax"
ROUTER = "its result is sorted or selects"
_SUMS = frozenset(names("reduce_sum cumsum reduce_window_sum reduce_window"))
_SELECTS = frozenset(names("top_k approx_top_k argmax argmin sort"))
# What lies between the exponential of a softmax and its sum.
_BETWEEN = MOVES.union(names("mul select_n"))
LINEAR = frozenset((*MATMULS, GROUPED)) - {"conv_general_dilated"}
_PRODUCTS = frozenset((*MATMULS, *ATTENTION, GROUPED))


class _Seen(NamedTuple):
    """What is known of a value."""

    source: Source  # what it is computed from
    # The parameters of matmuls behind it, with only element-wise operations and sums between
    layers: frozenset[str] = frozenset()
    powers: frozenset[str] = frozenset()  # those of which it is the exponential


def _either(a: _Seen | None, b: _Seen | None) -> _Seen | None:
    if a is None or b is None:
        return a or b
    return _Seen(join([a.source, b.source]), a.layers | b.layers, a.powers & b.powers)


class Study(NamedTuple):
    """What the parameters of a program are for."""

    purposes: dict[str, str]  # the parameters that 8 bits would harm, and why
    layers: set[str]  # the parameters of matmuls that have one
    dtypes: set[np.dtype]  # those of the operands of these matmuls


def study(jaxpr: Any, sources: Mapping[Any, Source]) -> Study:
    """Returns what the parameters of a program are for.

    Embedding tables are read by indices. A head, and a router of experts, is a layer whose
    result goes into a softmax, or is sorted: an error there changes which class or which
    expert comes first, or all probabilities at once. Names play no part in it.
    """
    result = Study({}, set(), set())
    found = result.purposes

    def rule(name: str, eqn: Equation, labels: list[Any]) -> _Seen:
        seen = [
            _Seen(CONSTANT if isinstance(atom, Literal) else DATA)
            if label is None
            else label
            for atom, label in zip(eqn.invars, labels, strict=True)
        ]
        given = [x.source for x in seen]
        layers = frozenset().union(*(x.layers for x in seen))
        powers = frozenset().union(*(x.powers for x in seen))
        if name in _PRODUCTS:
            params = [x for x in given[:2] if x.is_param]
            if len(params) != 1:
                return _Seen(join(given))
            if name in LINEAR:
                result.layers.update(params[0].names)
                result.dtypes.update(var.aval.dtype for var in eqn.invars[:2])
            return _Seen(DATA, params[0].names)
        if given and is_lookup(eqn, given) and given[0].is_param:
            found.update(dict.fromkeys(given[0].names, TABLE))
        if name in _SUMS:
            found.update(dict.fromkeys(powers, HEAD))
        if name in _SELECTS:
            found.update(dict.fromkeys(layers, ROUTER))
        source = DATA if name in HANDLERS else next(iter(follow(eqn, given)), DATA)
        if name in ("exp", "exp2"):
            return _Seen(source, layers, layers)
        return _Seen(source, layers, powers if name in _BETWEEN else frozenset())

    labels = {var: _Seen(source) for var, source in sources.items()}
    constant = lambda value: _Seen(closed_over(value))  # noqa: E731
    Flow(rule, join=_either, constant=constant).run(jaxpr, labels)
    return result
