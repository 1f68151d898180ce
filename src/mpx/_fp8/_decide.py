"""Which matmuls run in a narrow format, and why others do not."""

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax

from mpx._amp._facts import MOVES, Settings, Source, is_lookup
from mpx._amp._follow import Facts
from mpx._casting._keep import KEPT_SCOPE, STOP_SCOPE
from mpx._casting._select import Selector, matches, search, shown
from mpx._fp8._recipes import Int8, Recipe
from mpx._jax._compat import asked_precisions
from mpx._jax._devices import H200
from mpx._ops._experts._ragged import RAGGED
from mpx._program._flow import pull, pull_inside
from mpx._program._interpreter import Op, Traced
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    GROUPED,
    MATMULS,
    Equation,
    holds,
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
_LARGE = 2**14
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


def reasons_to_keep(  # noqa: C901, PLR0912 (a list of reasons)
    chosen: Selection,
    op: Op,
    matmul: Matmul,
    dtypes: Sequence[str],
    *,
    purposes: Collection[str],
    kept: str,
) -> Iterator[str]:
    """Yields why a product stays as it is written; nothing if it becomes fp8.

    `dtypes` are those of both operands and of the result, `purposes` what the parameter is
    for, and `kept` is why `amp` keeps the product as it is written.
    """
    eqn, recipe, shape = op.eqn, chosen.recipe, matmul.shape
    if eqn.primitive.name != "dot_general":
        yield reason_by_kind(eqn.primitive.name, chosen)
    weights = [fact for fact in op.facts[:2] if fact.is_weight]
    if len(weights) != 1:
        yield "both operands are parameters" if weights else "no operand is a parameter"
    if recipe.in_blocks and eqn.params["dimension_numbers"][1][0]:
        name = type(recipe).__name__
        yield f"it has batch dimensions, for which there are no {name} blocks"
    for scope in matmul.scope.split("/"):
        if scope == STOP_SCOPE:
            yield "scope amp_stop"
        if scope.startswith(KEPT_SCOPE):
            yield f"keep {scope.removeprefix(KEPT_SCOPE)}"
    for item in asked_precisions(eqn):
        if item != lax.Precision.DEFAULT:
            yield f"{item} was asked for"
    for name in dtypes[:2]:
        if name not in ("bf16", "f16"):
            yield f"an operand is {name}" + f" ({kept})" * bool(kept)
    if len({*dtypes}) > 1:
        yield f"its result was asked for in {dtypes[2]}"
    selects = functools.partial(_selects, matmul, weights[0].names)
    yield from (f"keep {shown(x)}" for x in chosen.keep if selects(x))
    against = [x for x in (TABLE, HEAD, ROUTER) if x in purposes]
    if against and not any(map(selects, chosen.include)):
        yield against[0]
    for size in shape:
        rest = size % recipe.multiple
        if not isinstance(rest, int):
            yield f"{size} is a symbol, and not always a multiple of {recipe.multiple}"
        elif rest or (isinstance(size, int) and size == 0):
            yield f"{size} is not a multiple of {recipe.multiple}"
    # The products of the backward pass sum over rows and columns.
    summed = slice(None) if recipe.form("grad", backward=True) else slice(1, 2)
    for size in shape[summed] if recipe.longest else ():
        if not isinstance(size, int) or size > recipe.longest:
            yield f"a sum of {size} products may exceed s32 (at most {recipe.longest})"
    if recipe.is_dithered("grad") and not all(isinstance(x, int) for x in shape):
        yield "gradients are rounded stochastically, and a size is a symbol"
    # A size that is a symbol counts as large.
    m, k, n, count = (x if isinstance(x, int) else _LARGE for x in matmul_sizes(eqn))
    gain = predicted_gain(m, k, n, count=count, recipe=recipe)
    if gain < chosen.min_gain:
        yield f"too small to gain (predicted {gain:.2f}×)"


def reason_by_kind(primitive: str, chosen: Selection) -> str:
    """Returns why what multiplies, and is no plain matmul, stays as it is."""
    what = _KINDS.get(primitive, "a fused attention")
    return f"it is {what}; {chosen.recipe.kind} is for matmuls with one weight"


_KINDS = {
    **dict.fromkeys((*RAGGED, GROUPED), "a ragged matmul"),
    "conv_general_dilated": "a convolution",
    **dict.fromkeys(CROSS_ENTROPY, "the head of a loss"),
}


def _selects(matmul: Matmul, names: Collection[str], selector: Selector) -> bool:
    if isinstance(selector, str) and matmul.scope and search(selector, matmul.scope):
        return True
    if isinstance(selector, str | type):
        return any(matches(selector, name, None) for name in names if name)
    return bool(selector(matmul))


TABLE = "its parameter is an embedding table"
HEAD = "its result goes into a softmax"
ROUTER = "its result is sorted or selects"
_SUMMED = "summed"
_SUMS = frozenset(names("reduce_sum cumsum reduce_window_sum reduce_window"))
_SELECTS = frozenset(names("top_k approx_top_k argmax argmin sort"))
# What lies between the exponential of a softmax and its sum.
_BETWEEN = MOVES.union(names("mul select_n"))
_PRODUCTS = frozenset((*MATMULS, *ATTENTION, GROUPED))
Uses = frozenset[str]


def tables_of(amp: Settings, traced: Traced) -> frozenset[str]:
    """Returns the parameters that are read by indices: embedding tables."""
    found = set[str]()

    class Tables(Facts):
        def results(self, eqn: Equation, ins: list[Source]) -> Sequence[Source]:
            if ins and is_lookup(eqn, ins) and ins[0].is_param:
                found.update(ins[0].names)
            return super().results(eqn, ins)

    if holds(traced.jaxpr, ("gather",)):
        named = zip(traced.named, traced.arrays, strict=True)
        facts = [*map(amp.constant_fact, traced.consts)]
        facts += [amp.argument_fact(*name, leaf) for name, leaf in named]
        variables = (*traced.jaxpr.constvars, *traced.jaxpr.invars)
        Tables(amp).run(traced.jaxpr, dict(zip(variables, facts, strict=True)))
    return frozenset(found)


def _uses_of_operands(eqn: Equation, outs: list[Uses | None]) -> list[Uses | None]:
    name, uses = eqn.primitive.name, frozenset[str]().union(*filter(None, outs))
    if name in _PRODUCTS:
        uses = frozenset[str]()
    elif name in _SUMS:
        uses |= {_SUMMED}
    elif name in ("exp", "exp2") and _SUMMED in uses:
        uses = uses - {_SUMMED} | {HEAD}
    elif name not in _BETWEEN:
        uses -= {_SUMMED}
    uses |= {ROUTER} if name in _SELECTS else set()
    return [uses or None] * len(eqn.invars)


_following: Any = {"rule": _uses_of_operands, "join": frozenset.union}
uses_of = functools.partial(pull, **_following)
"""Returns what reads the values of a jaxpr, given what reads its results.

A head, and a router of experts, is a matmul whose result goes into a softmax, or is sorted,
with only element-wise operations between: an error there changes which class or which expert
comes first, or all probabilities at once. Names play no part in it.
"""
uses_inside = functools.partial(pull_inside, **_following)
"""Returns what reads the results of a body, given what reads those of its equation."""
