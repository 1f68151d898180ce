"""The parameters of a function in its program: which value is one, and what it is for."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpx._jax._compat import Literal
from mpx._program import HANDLERS
from mpx._program._flow import Flow
from mpx._program._provenance import (
    CONSTANT,
    DATA,
    MOVES,
    Source,
    closed_over,
    follow,
    is_lookup,
    join,
)
from mpx._program._queries import (
    ATTENTION,
    GROUPED,
    MATMULS,
    Equation,
    names,
)


def follow_weights(eqn: Equation, sources: Sequence[Source]) -> list[Source]:
    """Returns the sources of an equation's results."""
    if eqn.primitive.name == "broadcast_in_dim" and _grows(eqn):
        return [DATA]  # a parameter for each example is an activation: a learnt query
    return follow(eqn, sources)


def _grows(eqn: Equation) -> bool:
    return math.prod(eqn.invars[0].aval.shape) != math.prod(eqn.outvars[0].aval.shape)


def matmul_dtypes(jaxpr: Any, labels: Mapping[Any, str]) -> set[str]:
    """Returns the dtypes of matmuls with one parameter, and of these parameters.

    Args:
        jaxpr: The program.
        labels: The dtypes of its parameters, by variable.
    """
    dtypes: set[str] = set()

    def rule(name: str, eqn: Equation, labels: list[Any]) -> str | None:
        sources = [
            Source("params", frozenset({x})) if x else _source_of(atom)
            for atom, x in zip(eqn.invars, labels, strict=True)
        ]
        if name in LINEAR and sum(x.is_param for x in sources[:2]) == 1:
            dtypes.update(label for label in labels if label)
            dtypes.update(var.aval.dtype.name for var in eqn.invars[:2])
        after = () if name in HANDLERS else follow(eqn, sources)
        found = next(iter(after), DATA)  # an effect has no results
        return found.name if found.is_param else None

    Flow(rule).run(jaxpr, dict(labels))
    return dtypes


def _source_of(atom: Any) -> Source:
    return CONSTANT if isinstance(atom, Literal) else DATA


# --- What a parameter is for ----------------------------------------------------------

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
    """What is known of a value: its source, and the layers whose results it is made of.

    Attributes:
        source: What it is computed from.
        layers: The parameters of matmuls behind it, with nothing but element-wise
            operations and sums between.
        powers: Those of which it is the exponential.
    """

    source: Source = DATA
    layers: frozenset[str] = frozenset()
    powers: frozenset[str] = frozenset()


def purposes(jaxpr: Any, sources: Mapping[Any, Source]) -> dict[str, str]:
    """Returns the parameters that 8 bits would harm, and what each is for.

    Embedding tables are read by indices. A head, and a router of experts, is a layer whose
    result goes into a softmax, or is sorted: an error there changes which class or which
    expert comes first, or all probabilities at once. Names play no part in it.

    Args:
        jaxpr: The program.
        sources: The sources of its inputs.
    """
    found: dict[str, str] = {}

    def rule(name: str, eqn: Equation, labels: list[Any]) -> _Seen:
        seen = [
            label if isinstance(label, _Seen) else _Seen(_source_of(atom))
            for atom, label in zip(eqn.invars, labels, strict=True)
        ]
        given = [x.source for x in seen]
        layers = frozenset().union(*(x.layers for x in seen))
        powers = frozenset().union(*(x.powers for x in seen))
        if name in _PRODUCTS:
            params = [x for x in given[:2] if x.is_param]
            if len(params) == 1:
                return _Seen(DATA, params[0].names)
            return _Seen(join(given))
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

    def either(a: Any, b: Any) -> Any:
        if not (isinstance(a, _Seen) and isinstance(b, _Seen)):
            return a if b is None else b
        return _Seen(
            join([a.source, b.source]), a.layers | b.layers, a.powers & b.powers
        )

    labels = {var: _Seen(source) for var, source in sources.items()}
    constant = lambda value: _Seen(closed_over(value))  # noqa: E731
    Flow(rule, join=either, constant=constant).run(jaxpr, labels)
    return found
