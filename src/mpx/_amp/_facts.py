"""What is known of values, and the settings of one call of `amp`: the step "follow".

`amp` and `fp8` both select matmuls by the parameters that they read. A weight need not be
an argument itself: it may be cast, sliced in a loop, scaled, summed with an adapter or
normalised first. It counts as that parameter as long as nothing but parameters and numbers
of the program enter.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._amp._rules import FUNCTION_SCOPE, AmpRules, Rule, RuleLike
from mpx._casting._context import Reduce, weight_grad_dtype
from mpx._jax._compat import (
    convert_dtype,
    has_side_effects,
    source_frames,
)
from mpx._jax._formats import F32, FORMATS, LOW_DTYPES, is_low, short_name
from mpx._ops._stored import load, store
from mpx._program._interpreter import Kind, Op, Scopes, Transformation, Values
from mpx._program._primitives import that
from mpx._program._queries import MATMULS, SHAPE_ONLY, Equation, flops, names
from mpx._program._recording import Decision

# The result holds numbers of the first operand.
MOVES = that("same", "moves", "picks")
# A result for each operand, which it equals.
_BARRIERS = frozenset(
    names("optimization_barrier pvary pcast sharding_constraint layout_constraint")
)


class Held(enum.IntEnum):
    """What the numbers of a value were, which decides how it is held where it is stored.

    A result is the largest of its operands: only `LOW` is rounded to 16 bits.
    """

    FREE = (
        0  # Literals, parameters that are biases or scales, and sums of 16-bit numbers
    )
    LOW = 1  # Numbers of 16 bits, or computed from such
    RANGE = 2  # The same, but cut off at a number, or beyond a range, that 16 bits lack
    WIDE = 3  # Numbers of more bits


class Source(NamedTuple):
    """What a value is computed from."""

    # `constant` if only numbers of the program enter, `params` if parameters and such
    # numbers do, else `data`
    kind: Literal["constant", "params", "data"] = "data"
    # The names of these parameters. For `data`, the name of the argument whose numbers
    # it holds, if it holds nothing else.
    names: frozenset[str] = frozenset()
    # The shape of the argument, if only operations that move numbers lie between
    leaf: tuple[int, ...] | None = None
    # For a number that is written into the program, however broadcast: what the compute
    # dtype makes of it, where `outside` is an overflow or underflow. Not the number itself:
    # two calls of a jitted function with other numbers are one program.
    literal: Literal["exact", "rounded", "outside"] | None = None

    # Whether parameters were repeated, as for each example: a learnt query
    repeated: bool = False
    # Whether only integers, booleans and numbers of the program enter, as in a mask
    is_count: bool = False
    # What its numbers were; a parameter may be `FREE` all the same: see `held_in`
    held: Held = Held.WIDE

    @property
    def is_param(self) -> bool:
        """Whether it is a parameter, or computed from parameters alone."""
        return self.kind == "params"

    @property
    def is_weight(self) -> bool:
        """Whether it is one parameter for all examples."""
        return self.kind == "params" and not self.repeated

    @property
    def may_be_param(self) -> bool:
        """Whether it is an argument, closed over or made from parameters alone.

        Such a value may be differentiated for. Its cotangents add up in f32.
        """
        return self.leaf is not None or self.kind == "params"

    @property
    def name(self) -> str | None:
        """One name for the value: that of its last parameter in alphabetical order."""
        return max(self.names) if self.names else None


DATA = Source()
COUNT = Source(is_count=True)
CONSTANT = Source("constant", is_count=True)


def argument(name: str, value: PyTree, *, is_param: bool) -> Source:
    """Returns the source of an argument."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return CONSTANT
    kind = "params" if is_param else "data"
    return Source(kind, frozenset({name}), tuple(value.shape))


def closed_over(value: PyTree) -> Source:
    """Returns the source of an array that a function closes over: parameter or data."""
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return CONSTANT if is_key else Source(leaf=tuple(value.shape))


def join(sources: Sequence[Source]) -> Source:
    """Returns the source of a value that is computed from others."""
    kinds = {source.kind for source in sources}
    held = max((x.held for x in sources), default=Held.WIDE)
    if "data" in kinds:
        return Source(is_count=all([x.is_count for x in sources]), held=held)
    if "params" not in kinds:
        return CONSTANT
    names = frozenset().union(*(x.names for x in sources))
    repeated = any([x.repeated for x in sources])
    return Source("params", names, repeated=repeated, held=held)


def either(one: Source, other: Source) -> Source:
    """Returns the source of a value that is one of two."""
    return one if one == other else join([one, other])


def follow(eqn: Equation, sources: Sequence[Source]) -> list[Source]:
    """Returns the sources of the results of an equation that holds no jaxpr."""
    name, count = eqn.primitive.name, len(eqn.outvars)
    pairs = zip(eqn.invars, sources, strict=True)
    sources = [y._replace(is_count=True) if _is_whole(x.aval) else y for x, y in pairs]
    if name in _BARRIERS and len(sources) == count:
        if name in SHAPE_ONLY:
            return list(sources)
        return [source._replace(literal=None) for source in sources]
    if not sources or name == "random_wrap":
        found = CONSTANT  # an iota, a random key
    elif name == "gather" and is_lookup(eqn, sources):
        found = COUNT if sources[0].is_count else DATA
    elif name in MOVES:
        found = sources[0]
        if name == "broadcast_in_dim" and found.kind == "params":
            before, after = eqn.invars[0].aval, eqn.outvars[0].aval
            if before.size != after.size:
                found = found._replace(repeated=True)
        elif name == "convert_element_type":
            found = found._replace(literal=_converted(eqn, found))
        elif found.literal is not None and name not in SHAPE_ONLY:
            found = found._replace(literal=None)
    else:
        # Of a `cond`, whichever branch is taken.
        found = join(sources[1:] if name == "cond" else sources)
    # An effect may bring in anything.
    return [DATA if has_side_effects(eqn) else found] * count


def _converted(
    eqn: Equation, source: Source
) -> Literal["exact", "rounded", "outside"] | None:
    if not is_eligible(eqn.outvars[0].aval):
        return None
    # Zeros and ones are exact in every dtype.
    return "exact" if eqn.invars[0].aval.dtype == np.bool_ else source.literal


def is_lookup(eqn: Equation, sources: Sequence[Source]) -> bool:
    """Returns whether an equation reads many rows of a table, by indices that are data.

    One row, as a layer of stacked weights, is a slice; as many as there are, in one list, are
    the same weights in another order.
    """
    if eqn.primitive.name != "gather" or sources[1].kind != "data":
        return False
    table, indices = (var.aval.shape for var in eqn.invars[:2])
    positions = tuple(size for size in indices[:-1] if size != 1)
    axes = eqn.params["dimension_numbers"].start_index_map
    return bool(positions) and positions != tuple(table[axis] for axis in axes)


def is_bias(source: Source, aval: Any) -> bool:
    """Returns whether an operand is a bias or a scale, which takes the others' dtype.

    Without this each `x @ W + b` would fall back to f32. It is for parameters: masks,
    targets and coordinates stay f32, since 16 bits would round or overflow them.
    """
    if not source.is_param:
        return False
    shape = aval.shape if source.leaf is None else source.leaf
    sizes = tuple(size for size in shape if size != 1)
    # Not a mask or bias of attention, which a module may hold.
    return len(sizes) < 2 or sizes[-1] != sizes[-2]


def is_eligible(aval: Any) -> bool:
    """Returns whether autocast may hold a value in the compute dtype: it is f32."""
    return getattr(aval, "dtype", None) == F32


def _is_whole(aval: Any) -> bool:
    """Returns whether a value is an integer or a boolean."""
    return getattr(getattr(aval, "dtype", None), "kind", "V") in "biu"


def cast(x: PyTree, dtype: np.dtype) -> PyTree:
    """Casts a value; literals, which have no tracer, become arrays."""
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x, F32)
    return x if x.dtype == dtype else convert_dtype(x, dtype)


def stored_as(x: PyTree, dtype: np.dtype) -> PyTree:
    """Casts between f32 and the 16 bits in which a number is stored."""
    if is_low(x) and dtype == F32:
        return load(x)
    return (
        store(x, dtype) if getattr(x, "dtype", None) == F32 != dtype else cast(x, dtype)
    )


def changed(op: Op, change: Callable[[Any], PyTree]) -> Values:
    """Returns the operands of an equation, changed where they are f32 as written."""
    return [
        change(value) if is_eligible(var.aval) else value
        for var, value in zip(op.eqn.invars, op.values, strict=True)
    ]


@dataclasses.dataclass(eq=False, kw_only=True)
class Settings(Transformation):
    """The settings of one `amp` call and what it knows of values."""

    unknown: ClassVar[Source] = DATA
    widens_params: ClassVar[bool] = True

    dtype: np.dtype
    rules: AmpRules
    # In which dtype the gradients of arguments that matmuls read leave their matmuls:
    # see `weight_grad_dtype`
    reduce: Reduce = None
    # Whether attention that is recognised runs in one kernel, or is kept
    attention: Literal["fuse", "keep"] = "fuse"
    # The format in which activations are kept for the backward pass; `None` for their own
    residuals: str | None = None
    # The equation with a line of the user's whose body is visited
    caller: Equation = None
    in_loop: bool = False  # Whether the body of a scan is visited
    is_plain: bool = False
    is_abstract: bool = False  # Whether it is a part of a program that is traced
    # Whether results of the running body may be rounded to be returned: all, none, or each
    may_round: bool | tuple[bool, ...] = False
    # Which linear algebra the results of the running body reach
    wanted: tuple[Any, ...] = ()
    # What holds in the bodies of an equation, by its `id`
    entered: dict[int, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # Which equations with bodies hold matmuls, and functions of regions, by what they compute
    works: dict[Any, tuple[Equation, bool]] = dataclasses.field(default_factory=dict)
    parts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # Follows what is known of values through what is not visited
    flow: Any = dataclasses.field(default=None, init=False)
    # Where decisions are recorded, `None` to record none
    decisions: list[Decision] | None = None

    def tell(self, eqn: Equation, scopes: Scopes, **fields: Any) -> None:
        """Records a decision about an equation, with fields that it does not tell."""
        if self.decisions is None:
            return
        frames = source_frames(eqn) or (self.caller and source_frames(self.caller))
        told = {
            "primitive": eqn.primitive.name,
            "scope": "/".join(x for x in scopes if not x.startswith(FUNCTION_SCOPE)),
            "source": f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown",
            "params": (),
            "before": tuple(str(var.aval.dtype) for var in eqn.invars),
            "after": tuple(str(var.aval.dtype) for var in eqn.outvars),
            "shapes": tuple(tuple(var.aval.shape) for var in eqn.invars),
            "flops": flops(eqn),
        }
        self.decisions.append(Decision(**{**told, **fields}))

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple([x for x in self.rules.keep if isinstance(x, type)])

    def argument_fact(self, name: str, is_param: bool, leaf: PyTree) -> Source:
        return argument(name, leaf, is_param=is_param)

    def constant_fact(self, value: PyTree) -> Source:
        return closed_over(value)

    def literal_fact(self, atom: Any) -> Source:
        if not (is_eligible(atom.aval) or _is_whole(atom.aval)):
            return CONSTANT
        number, form = float(atom.val), FORMATS[short_name(self.dtype)]
        if not np.isfinite(number) or number == 0:
            return CONSTANT._replace(literal="exact")
        if not form.tiny <= abs(number) <= form.max:
            return CONSTANT._replace(literal="outside")
        is_exact = float(np.asarray(number).astype(self.dtype)) == number
        return CONSTANT._replace(literal="exact" if is_exact else "rounded")

    def fact_inside(self, fact: Source, var: Any, kind: Kind) -> Source:
        if kind == "carry":
            return DATA
        if kind == "tangent":
            # It has the rule of its parameter, but it is none.
            return fact._replace(leaf=None)
        if kind == "slice" and fact.leaf is not None:
            return fact._replace(leaf=tuple(var.aval.shape))
        return fact

    def result_facts(
        self, outs: Sequence[PyTree], known: Sequence[Source]
    ) -> list[Source]:
        return [fact._replace(leaf=None, literal=None) for fact in known]

    def join_facts(self, facts: Sequence[Source]) -> Source:
        return functools.reduce(either, facts)

    def widen(self, value: PyTree) -> PyTree:
        """Returns a value in f32, the same array for every equation that asks.

        The cotangents of a shared f32 version add up in f32; those of one cast per
        equation would be rounded first and add up in the compute dtype.
        """
        if getattr(value, "dtype", F32) == F32:
            return cast(value, F32)
        return self.once(value, F32)

    def once(self, value: PyTree, dtype: np.dtype) -> PyTree:
        """Returns a value cast to a dtype, the same array for every equation that asks."""
        made = self.frame.made
        if (id(value), dtype) not in made:
            made[id(value), dtype] = value, stored_as(value, dtype)
        return made[id(value), dtype][1]

    def grad_dtype(self, value: PyTree) -> np.dtype:
        """Returns in which dtype the gradient of a parameter leaves its matmul."""
        if getattr(value, "dtype", None) not in (F32, *LOW_DTYPES):
            return self.dtype
        return weight_grad_dtype(self.reduce, value, self.dtype)

    def region_rule(self, eqn: Equation, scopes: Scopes) -> tuple[RuleLike, str] | None:
        """Returns the rule of the scope or function around an equation, and why."""
        return self.rules.scope_rule(self.scopes_inside(eqn, scopes))

    def keeps(self, eqn: Equation, scopes: Scopes) -> bool:
        """Returns whether an equation that `amp` made was kept out of 16 bits."""
        region = self.rules.scope_rule(scopes) if scopes else None
        if region is not None:
            return region[0] == Rule.ORIGINAL
        is_wide = eqn.primitive.name in MATMULS and eqn.invars[0].aval.dtype == F32
        return is_wide and self.rules.base != "original"

    def scopes_inside(self, eqn: Equation, scopes: Scopes) -> Scopes:
        """Returns the scopes of a body, with one for the selected function that calls it."""
        if self.rules.functions:
            pattern = self.rules.function_of(x for x, _, _ in source_frames(eqn))
            if pattern is not None:
                return (*scopes, FUNCTION_SCOPE + pattern)
        return scopes

    def rule(
        self, name: str, params: Mapping[str, PyTree], facts: Sequence[Source]
    ) -> tuple[RuleLike, str]:
        """Returns the rule of a primitive where no region has one, and why."""
        if name in MATMULS and (self.rules.keep or self.rules.params):
            for param in sorted(set().union(*[fact.names for fact in facts])):
                found = self.rules.param_rule(param)
                if found is not None:
                    return found
        is_f16 = self.dtype == np.float16
        return self.rules.primitive_rule(name, params, compute_is_f16=is_f16)
