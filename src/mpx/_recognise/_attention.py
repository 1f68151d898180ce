"""Attention in a jaxpr, and what replaces it: one operation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpx._jax._devices import cuda_capability
from mpx._ops._attention import (
    Attention,
    fitted_attention,
    padded_call,
    reason_against,
    reason_by_shapes,
    reason_not_paying,
)
from mpx._program._interpreter import Jaxpr, Op, Outcome, Replacement
from mpx._program._queries import Equation
from mpx._recognise._masks import (
    Masks,
    arrays_of,
    fill_empty_rows,
    masks_of,
)
from mpx._recognise._match import Match, find_attention, reason_for_miss
from mpx._recognise._replace import Value, replacement
from mpx._recognise._softmax import Softmaxes
from mpx._recognise._terms import Level, Term

_LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


class Call(NamedTuple):
    """Recognised attention, its masks, the call of the kernel, and its dtype."""

    match: Match
    masks: Masks
    spec: Attention
    dtype: np.dtype

    @property
    def operands(self) -> tuple[Term, Term, Term]:
        """Queries, keys and values."""
        return self.match.query, self.match.key, self.match.value

    def run(
        self, operands: Sequence[Array], value_of: Callable[[Term], Array]
    ) -> Array:
        """Runs the operation; returns the result in the layout of the equation.

        Args:
            operands: Queries, keys and values in the dtype of the call.
            value_of: Returns the value of a bias or mask.
        """
        match, masks, spec, _ = self
        query, key, value = arrays = match.laid_out(*operands)
        extras = arrays_of(match, masks, value_of)
        out = fitted_attention(query, key, value, extras, spec)
        if masks.empty is not None:
            out = fill_empty_rows(match, masks, extras["mask"], arrays, out)
        return match.as_result(out)


@runtime_checkable
class Settings(Protocol):
    """What the search asks for, and whom it tells."""

    @property
    def is_told(self) -> bool:
        """Whether somebody wants to know what is kept."""
        ...

    def dtype_of(self, term: Term) -> np.dtype:
        """Returns the dtype in which a matmul multiplies a value."""
        ...

    def reason_to_keep(
        self, inside: Iterable[Term], products: Mapping[Term, Sequence[Term]]
    ) -> str | None:
        """Returns which rule asks for operations as they are written, if one does.

        Args:
            inside: The operations between the two matmuls.
            products: The matmuls, with those of their operands that may have rules.
        """
        ...

    def keep(self, eqn: Equation, reason: str) -> None:
        """Takes note of attention that was found but is run as written."""
        ...

    def run(
        self, visitor: Any, op: Op, value_of: Callable[[Term], Value], call: Call
    ) -> Outcome:
        """Runs a call in the place of an equation."""
        ...


def recognise(
    jaxpr: Jaxpr, consts: Sequence[Any], settings: Settings
) -> dict[int, Replacement]:
    """Returns what replaces equations of a jaxpr, by their position."""
    softmaxes = Softmaxes(Level(jaxpr, consts))
    found = {}
    for index, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "dot_general":
            new = _attention_at(softmaxes, eqn, settings)
            if new is not None:
                found[index] = new
    return found


def _attention_at(
    softmaxes: Softmaxes, eqn: Equation, settings: Settings
) -> Replacement | None:
    """Returns what replaces attention of which an equation is the last, if it is that."""
    match = find_attention(softmaxes, eqn)
    call = _call_of(softmaxes, match, settings) if match is not None else None
    if match is None and settings.is_told:
        call = reason_for_miss(softmaxes, eqn)
    if isinstance(call, str):
        settings.keep(eqn, call)
    if not isinstance(call, Call):
        return None

    def run(visitor: Any, op: Op, value_of: Callable[[Term], Value]) -> Outcome:
        return settings.run(visitor, op, value_of, call)

    terms = [*call.operands, *call.masks.terms]
    return replacement(softmaxes.level, terms, run)


def _call_of(softmaxes: Softmaxes, match: Match, settings: Settings) -> Call | str:
    """Returns how recognised attention runs in one kernel, or the reason against it."""
    operands = [match.query, match.key, match.value]
    inside = softmaxes.history((match.probs,)).values()
    dot = match.scores.dot
    last = Term(softmaxes.level, match.eqn.outvars[0], match.eqn)
    products = {dot: dot.operands, last: [match.value]}
    against = settings.reason_to_keep(inside, products)
    dtypes = {settings.dtype_of(x) for x in operands}
    if against is None and not (len(dtypes) == 1 and dtypes <= {*_LOW}):
        against = f"operands in {' and '.join(sorted(map(str, dtypes)))}"
    if against is None and not softmaxes.is_private((match.probs,), match.eqn):
        against = (
            "the weights or scores are used elsewhere, perhaps by a gradient inside"
        )
    (_, rows, *_), (_, keys, *_), _ = match.shapes
    against = against or reason_not_paying(cuda_capability(), rows, keys)
    masks = masks_of(match) if against is None else against
    if isinstance(masks, str):
        return masks
    spec = Attention(
        scale=match.scores.scale,
        is_causal=masks.is_causal,
        window=masks.window,
        extras=masks.extras,
    )
    (dtype,) = dtypes
    against = _reason_by_shapes(match, masks)
    against = against or reason_against(*padded_call(match.shapes, spec, dtype))
    return against or Call(match, masks, spec, dtype)


def _reason_by_shapes(match: Match, masks: Masks) -> str | None:
    if masks.extras != ("bias", "mask"):
        return None
    zeros = lambda x: jnp.zeros(x.shape, x.aval.dtype)  # noqa: E731
    arrays = jax.eval_shape(lambda: arrays_of(match, masks, zeros))
    return reason_by_shapes(arrays["bias"].shape, arrays["mask"].shape)
