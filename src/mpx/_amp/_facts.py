"""Facts about values, casts of values, and the settings of autocast."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._amp._frameworks import Role, Transformation
from mpx._amp._policy import AmpRules, Choice
from mpx._amp._rules import MATMULS
from mpx._compat import (
    INLINE,
    convert_dtype,
    is_differentiated,
    is_tracer,
    source_frames,
)
from mpx._formats import FORMATS, short_name
from mpx._jaxpr._interpreter import Kind, Op, Outcome, Scopes, Values
from mpx._jaxpr._queries import Equation, flops
from mpx._wire._options import Reduce, weight_grad_dtype

F32 = np.dtype(np.float32)


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
        literal: Its number, if it is a Python or literal constant, however broadcast.
        chain: `low` if it comes from a low matmul, `high` if an f32 operation has
            worked on such a value, else `neutral`.
        leaf: The shape of the argument it is, if only shape operations lie between.
        name: The name of that argument, such as `model/head/weight`.
        role: Why that argument counts as a parameter, `None` if it does not.
    """

    literal: float | None = None
    chain: Literal["neutral", "low", "high"] = "neutral"
    leaf: tuple[int, ...] | None = None
    name: str | None = None
    role: Role | None = None


NEUTRAL = Origin()


def is_eligible(aval: Any) -> bool:
    """Returns whether autocast may hold a value in the compute dtype: it is f32."""
    return getattr(aval, "dtype", None) == F32


def cast(x: Any, dtype: np.dtype) -> Any:
    """Casts a value; literals, which have no tracer, become arrays."""
    if not hasattr(x, "dtype"):
        x = jnp.asarray(x, F32)
    return x if x.dtype == dtype else convert_dtype(x, dtype)


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)  # traced once for a shape
def saturate(x: Any, dtype: np.dtype) -> Any:
    """Returns f32 numbers such that those that are finite stay so in `dtype`.

    The derivative is that of the identity: nothing is kept for the backward pass.
    """
    return _saturate(x, dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _saturate(x: Any, dtype: np.dtype) -> Any:
    largest = np.float32(FORMATS[short_name(dtype)].max)
    return lax.select(lax.is_finite(x), lax.clamp(-largest, x, largest), x)


@_saturate.defjvp
def _(dtype: np.dtype, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    return _saturate(*primals, dtype), tangents[0]


def widest(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Returns the dtype that holds all of these: f32, unless they are one.

    JAX's own promotion is not used: the user may have forbidden it.
    """
    chosen = {np.dtype(dtype) for dtype in dtypes}
    return chosen.pop() if len(chosen) == 1 else F32


def literal_survives(value: float, dtype: np.dtype) -> bool:
    """Returns whether a literal neither overflows nor becomes 0 in `dtype`."""
    if not np.isfinite(value) or value == 0:
        return True
    form = FORMATS[short_name(dtype)]
    return form.tiny <= abs(value) <= form.max


def changed(
    op: Op,
    change: Callable[[Any], Any],
    where: Callable[[Any], bool] = is_eligible,
) -> Values:
    """Returns the operands of an equation, changed where their types say so."""
    return [
        change(value) if where(var.aval) else value
        for var, value in zip(op.eqn.invars, op.values, strict=True)
    ]


def chain_of(origins: list[Origin], *, high: bool = False) -> Origin:
    """Returns what is known of a result from what is known of its operands."""
    chains = {origin.chain for origin in origins}
    if "high" in chains or (high and "low" in chains):
        return Origin(chain="high")
    return Origin(chain="low") if "low" in chains else NEUTRAL


class Decision(NamedTuple):
    """One equation and the precision in which it runs; `AmpView` describes the fields."""

    primitive: str
    rule: str
    reason: str
    scope: str
    source: str
    params: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flops: int

    @classmethod
    def about(
        cls, eqn: Equation, scopes: Scopes, caller: Equation = None, **fields: Any
    ) -> "Decision":
        """Returns a decision about an equation, with fields that it does not tell.

        If it is part of a function of JAX, its line is that of the caller.
        """
        frames = source_frames(eqn) or (source_frames(caller) if caller else [])
        told = {
            "primitive": eqn.primitive.name,
            "scope": "/".join(scopes),
            "source": f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown",
            "params": (),
            "before": tuple(str(var.aval.dtype) for var in eqn.invars),
            "after": tuple(str(var.aval.dtype) for var in eqn.outvars),
            "shapes": tuple(tuple(var.aval.shape) for var in eqn.invars),
            "flops": flops(eqn),
        }
        return cls(**{**told, **fields})


@dataclasses.dataclass(eq=False, kw_only=True)
class Settings(Transformation):
    """The settings of one `amp` call and what it knows of values.

    Attributes:
        dtype: The compute dtype.
        rules: The rules.
        reduce: In which dtype the gradients of arguments that matmuls read leave their
            matmuls: see `weight_grad_dtype`.
        attention: Whether attention that is recognised runs in one kernel, or is kept.
        caller: The equation with a line of the user's whose body is visited.
        copies: Low copies of weights that were made outside the running body, by variable.
        in_loop: Whether the body of a scan is visited.
        is_mapped: Whether the function runs inside a `jax.vmap`.
        decisions: Where decisions are recorded, `None` to record none.
    """

    unknown: ClassVar[Origin] = NEUTRAL

    dtype: np.dtype
    rules: AmpRules
    reduce: Reduce = None
    attention: Literal["fuse", "keep"] = "fuse"
    caller: Equation = None
    copies: dict[Any, Any] = dataclasses.field(default_factory=dict)
    in_loop: bool = False
    is_mapped: bool = False
    decisions: list[Decision] | None = None

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple(x for x in self.rules.keep if isinstance(x, type))

    def argument_fact(self, name: str, role: Role | None, leaf: Any) -> Origin:
        """Returns what is known of an argument's array."""
        if leaf.dtype != F32:
            return NEUTRAL
        return Origin(leaf=tuple(leaf.shape), name=name, role=role)

    def constant_fact(self, value: Any) -> Origin:
        if value.dtype != F32:
            return NEUTRAL
        if is_differentiated(value):
            return Origin(leaf=tuple(value.shape), role="known")
        if value.ndim == 0 and not is_tracer(value) and value.is_fully_addressable:
            return Origin(literal=float(value))
        return Origin(leaf=tuple(value.shape))

    def literal_fact(self, atom: Any) -> Origin:
        if is_eligible(atom.aval):
            return Origin(literal=float(np.asarray(atom.val)))
        return NEUTRAL

    def fact_inside(self, fact: Origin, var: Any, kind: Kind) -> Origin:
        if kind in ("carry", "constant"):
            return NEUTRAL
        if kind == "tangent":
            # A tangent has the rule of its parameter; but it must stay linear, and what
            # follows as a parameter saturates.
            fact = fact._replace(role=None)
        if kind == "slice" and fact.leaf is not None:
            fact = fact._replace(leaf=tuple(var.aval.shape))
        return fact._replace(literal=None)  # inside, a constant is an argument

    def result_facts(self, outs: Sequence[Any]) -> list[Origin]:
        low = (jnp.bfloat16, jnp.float16)
        return [
            Origin(chain="low") if jnp.result_type(out) in low else NEUTRAL
            for out in outs
        ]

    def widen(self, value: Any) -> Any:
        """Returns a value in f32, the same array for every equation that asks.

        The cotangents of a shared f32 version add up in f32; those of one cast per
        equation would be rounded first and add up in the compute dtype.
        """
        if getattr(value, "dtype", F32) == F32:
            return cast(value, F32)
        return self._once(value, F32)

    def narrow(self, value: Any, fact: Origin) -> Any:
        """Returns a value in the compute dtype, an activation the same for every matmul.

        Then its cotangents add up in the matmuls that make them, as in a model written in
        16 bits: each in an array of its own costs memory traffic and, where they are sums
        over devices, an all-reduce each. Parameters are cast for each matmul: their
        cotangents add up in f32.
        """
        if fact.leaf is not None or getattr(value, "dtype", None) != F32:
            return cast(value, self.dtype)
        return self._once(value, self.dtype)

    def _once(self, value: Any, dtype: np.dtype) -> Any:
        made = self.frame.made
        if (id(value), dtype) not in made:
            made[id(value), dtype] = value, cast(value, dtype)
        return made[id(value), dtype][1]

    def grad_dtype(self, value: Any, fact: Origin) -> np.dtype:
        """Returns in which dtype the gradient of an operand leaves its matmul."""
        if fact.leaf is None or getattr(value, "dtype", None) != F32:
            return self.dtype
        return weight_grad_dtype(self.reduce, value, self.dtype)

    def region_rule(self, eqn: Equation, scopes: Scopes) -> tuple[Choice, str] | None:
        """Returns the rule of the scope or function around an equation, and why."""
        found = self.rules.scope_rule(scopes)
        if found is None and self.rules.functions:
            rules = (self.rules.function_rule(x) for x, _, _ in source_frames(eqn))
            found = next(filter(None, rules), None)
        return found

    def rule(
        self, name: str, params: Mapping[str, Any], facts: Sequence[Origin]
    ) -> tuple[Choice, str]:
        """Returns the rule of a primitive where no region has one, and why."""
        if name in MATMULS:
            for fact in facts:
                found = self.rules.param_rule(fact.name)
                if found is not None:
                    return found
        rule = self.rules.primitive_rule(
            name, params, compute_is_f16=self.dtype == np.float16
        )
        return rule, self.rules.primitive_reason(name)


Run = Callable[[Any, Op], Outcome]
"""Runs one equation; the first argument is an `Autocast`."""


class Chosen(NamedTuple):
    """How an equation runs; the rule, `None` if there was nothing to decide; and why."""

    run: Run
    rule: Choice | None = None
    reason: str = ""
