"""Where a value comes from: the one table of what a parameter is followed through.

`amp` and `fp8` both select matmuls by the parameters that they read. A weight need not be
an argument itself: it may be cast, sliced in a loop, scaled, summed with an adapter or
normalised first. It counts as that parameter as long as nothing but parameters and numbers
of the program enter.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from mpx._program._queries import SHAPE_ONLY, Equation, names

# The result holds numbers of the first operand.
MOVES = SHAPE_ONLY.union(
    names(
        "convert_element_type reduce_precision copy_p dynamic_slice gather split unstack "
        "tile name stop_gradient device_put all_gather all_gather_invariant "
        "all_gather_reduced"
    )
)
# A result for each operand, which it equals.
BARRIERS = frozenset(names("optimization_barrier pvary pcast sharding_constraint"))


class Source(NamedTuple):
    """What a value is computed from.

    Attributes:
        kind: `constant` if only numbers of the program enter, `params` if parameters and
            such numbers do, else `data`.
        names: The names of these parameters. For `data`, the name of the argument whose
            numbers it holds, if it holds nothing else.
        leaf: The shape of the argument, if only operations that move numbers lie between.
    """

    kind: Literal["constant", "params", "data"] = "data"
    names: frozenset[str] = frozenset()
    leaf: tuple[int, ...] | None = None

    @property
    def is_param(self) -> bool:
        """Whether it is a parameter, or computed from parameters alone."""
        return self.kind == "params"

    @property
    def name(self) -> str | None:
        """One name for the value: that of its last parameter in alphabetical order."""
        return max(self.names) if self.names else None


DATA = Source()
CONSTANT = Source("constant")


def argument(name: str, value: Any, *, is_param: bool) -> Source:
    """Returns the source of an argument."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return CONSTANT
    kind = "params" if is_param else "data"
    return Source(kind, frozenset({name}), tuple(value.shape))


def closed_over(value: Any) -> Source:
    """Returns the source of an array that a function closes over.

    It may be a parameter or data: JAX does not tell without differentiating.
    """
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return CONSTANT if is_key else Source(leaf=tuple(value.shape))


def join(sources: Sequence[Source]) -> Source:
    """Returns the source of a value that is computed from others."""
    kinds = {source.kind for source in sources}
    if "data" in kinds:
        return DATA
    if "params" not in kinds:
        return CONSTANT
    return Source("params", frozenset().union(*(x.names for x in sources)))


def follow(eqn: Equation, sources: Sequence[Source]) -> list[Source]:
    """Returns the sources of the results of an equation that holds no jaxpr."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    if name in BARRIERS and len(sources) == count:
        return list(sources)
    if not sources or name == "random_wrap":
        found = CONSTANT  # an iota, a random key
    elif is_lookup(eqn, sources):
        found = DATA
    elif name in MOVES:
        found = sources[0]
    else:
        # Of a `cond`, whichever branch is taken.
        found = join(sources[1:] if name == "cond" else sources)
    # An effect may bring in anything.
    return [DATA if eqn.effects else found] * count


def is_lookup(eqn: Equation, sources: Sequence[Source]) -> bool:
    """Returns whether an equation reads many rows of a table, by indices that are data.

    That is what an embedding does. One row, as a layer of stacked weights, is a slice, and
    as many as there are, in one list, are the same weights in another order.
    """
    if eqn.primitive.name != "gather" or sources[1].kind != "data":
        return False
    table, indices = (var.aval.shape for var in eqn.invars[:2])
    positions = tuple(size for size in indices[:-1] if size != 1)
    axes = eqn.params["dimension_numbers"].start_index_map
    return bool(positions) and positions != tuple(table[axis] for axis in axes)
