"""Gradients in which chosen groups of operations are rounded, emulated in f32.

The program is the gradient of the function as `amp` runs it, with every value of 16 bits held
in f32. Where `amp` or `fp8` would round, it rounds to a format that is an argument: one
compiled program serves all groups and formats.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._amp._facts import is_eligible as is_f32
from mpx._fp8._operands import power_of_two_scale
from mpx._jax._compat import (
    REMAT_SCOPE,
    Literal,
    bind,
    eval_equation,
    is_transposed,
    open_jaxpr,
    primitive_name,
    source_frames,
)
from mpx._jax._formats import FORMATS
from mpx._jax._formats import is_low as is_half
from mpx._program import HANDLERS
from mpx._program._interpreter import (
    Facts,
    Kind,
    Op,
    Outcome,
    Visitor,
    arrays_of,
    cast_all,
    dtypes_of,
)
from mpx._program._primitives import CASTS
from mpx._program._queries import (
    CUSTOM,
    MATMULS,
    MOVES,
    REMAT,
    Equation,
    Position,
    equations,
    flops,
    has_body,
    names,
)
from mpx._wire._product import LINEAR
from mpx.inspect._buffers import KERNELS
from mpx.inspect._equations import PICKS, f32_params
from mpx.inspect._program import Place, Program, gradient, path, sites

# --- Groups of operations that a policy can keep in f32 -------------------------------


class Group(NamedTuple):
    """Operations that a policy treats alike."""

    param: str  # of which they are the matmuls; "" for other operations
    scope: str  # joined by `/`
    functions: tuple[str, ...]  # that wrote them, innermost first

    @property
    def label(self) -> str:
        """The name by which readers know it: the parameter, else scope, else function."""
        own = getattr(self.param, "path", "") or self.param or self.scope
        return own or next(iter(self.functions), "other")


def _group_of(here: Position, place: Place, weights: set[str]) -> Group:
    # A scope inside itself counts once, and what is computed again is the same.
    scopes = itertools.groupby(x for x in here.scopes if x != REMAT_SCOPE)
    path = "/".join(name for name, _ in scopes)
    eqns = here.eqn, *reversed(here.callers)
    functions = dict.fromkeys(name for eqn in eqns for name, _, _ in source_frames(eqn))
    is_matmul = place.primitive in (*MATMULS, LINEAR) and place.param in weights
    return Group(place.param if is_matmul else "", path, tuple(functions))


# --- Rounding to a format that is an argument -----------------------------------------

_F32 = (0.0, 1.0, math.inf)


def _format(name: str, scale: float | None = 1.0) -> tuple[float, float, float]:
    """Returns spread, smallest normal number and limit of a format, for numbers times `scale`.

    With `None` it has the exponents of bf16.
    """
    form = FORMATS[name]
    spread = 1.5 * 2.0 ** (23 - form.mantissa)
    if scale is None or name == "bf16":
        return spread, FORMATS["bf16"].tiny, math.inf
    limit = 2.0 ** (1 + math.floor(math.log2(form.max)))
    return spread, form.tiny / scale, limit / scale


@functools.partial(jax.jit, static_argnames="is_scaled")
def rounded(x: Array, form: Array, *, is_scaled: bool = False) -> Array:
    """Rounds f32 numbers to a format of `_format`, or with a scale as `CurrentScaling` does.

    Numbers from its limit on are nan: a function that saturates would hide an infinity.
    """
    spread, tiny, limit = form[0], form[1], form[2]
    if is_scaled:
        # The largest number of both 8-bit formats is 1.75 times a power of two.
        above = 512 * power_of_two_scale(jnp.max(jnp.abs(x), initial=0.0), "e4m3")
        tiny, limit = tiny * (above / limit), np.inf
    size = _power(lax.clamp(tiny, jnp.abs(x), np.float32(2.0**100)))
    # A unit in the last place of this number is the spacing of the format around x: the sum
    # rounds to nearest, ties to even.
    shift = size * spread
    y = (x + shift) - shift
    fits = (jnp.abs(y) < limit) | jnp.isinf(x)
    return jnp.where(fits, y, np.float32(np.nan))


def _power(x: Array) -> Array:
    """Returns the largest powers of two that are not above some positive numbers."""
    bits = lax.bitcast_convert_type(x, np.int32) & 0x7F800000
    return lax.bitcast_convert_type(bits, np.float32)


# --- The program ----------------------------------------------------------------------

_NESTED = (*names("jit pjit closed_call core_call scan cond"), *REMAT)
# The results can be represented where the operands can.
_EXACT = PICKS.union(MOVES, names("neg abs sign"))


class Fact(NamedTuple):
    """What is known of a value."""

    # The groups of the matmuls from which it is computed: if one of them runs in f32, so
    # does what follows up to the next matmul
    sources: tuple[int, ...] = ()
    is_pending: bool = False  # cast to 16 bits for whoever reads it
    is_cotangent: bool = False  # part of the backward pass


class Key(NamedTuple):
    """What decides to which format a value is rounded; see `Fact`."""

    group: int  # that rounds
    sources: tuple[int, ...]
    is_cotangent: bool
    is_eight: bool = False  # an operand that fp8 may quantise


@dataclasses.dataclass(eq=False, kw_only=True)
class _Rounding(Visitor):
    """Runs a gradient program in f32 and rounds by a table of formats."""

    unknown: ClassVar[Fact] = Fact()
    narrow_carry: bool = True  # held in f32, whatever it was

    emulation: "Emulation"
    table: Array  # the formats, one row for each key
    with_fp8: bool  # whether operands of matmuls with a parameter may be quantised
    callers: tuple[Equation, ...] = ()  # the equations around the running body

    def equation(self, op: Op) -> Outcome:
        eqn, name = op.eqn, primitive_name(op.eqn)
        by_platform = bool(eqn.params.get("branches_platforms"))
        if name in _NESTED and not by_platform:
            return HANDLERS[name](self, op)
        if name in CUSTOM or by_platform:
            return self._inline(op)
        touched = any(is_half(x.aval) for x in (*eqn.invars, *eqn.outvars))
        # The kernels have no code for f32, or another one.
        if name in HANDLERS or has_body(eqn) or (touched and name in KERNELS):
            return self._as_written(op)
        if name in CASTS:
            return self._convert(op)
        if touched and name not in MOVES:
            return self._half(op, name)
        is_wide = touched or name in MATMULS
        outs = (_bind_wide if is_wide else eval_equation)(eqn, op.values)
        known = op.facts[0] if name in MOVES else Fact(_sources(op))
        return outs, [known._replace(is_cotangent=_is_cotangent(op))] * len(outs)

    def _inline(self, op: Op) -> Outcome:
        """Runs the body of a call; by platform, the code for those without their own."""
        params, start = op.eqn.params, int("branches" in op.eqn.params)
        body, consts = open_jaxpr(params.get("call_jaxpr") or params["branches"][-1])
        with self.inside(op.eqn, self.table):
            values, facts = op.values[start:], op.facts[start:]
            return self.run(body, consts, values, facts, op.scopes)

    def _as_written(self, op: Op) -> Outcome:
        """Runs an equation at its own dtypes, on f32 values."""
        inner = equations(op.eqn)
        if any(is_half(x.aval) for eqn in (op.eqn, *inner) for x in eqn.invars):
            self.emulation.opaque.add(primitive_name(op.eqn))
        own = dtypes_of([x.aval for x in op.eqn.invars])
        outs = eval_equation(op.eqn, cast_all(arrays_of(op.values), own))
        outs = [x.astype(np.float32) if is_half(x) else x for x in outs]
        return outs, [Fact(is_cotangent=_is_cotangent(op))] * len(outs)

    def read(self, atom: object) -> tuple[object, Fact]:
        """Returns a value, in f32 if it is of 16 bits."""
        value, fact = super().read(atom)
        if is_half(getattr(value, "aval", value)):
            value = jnp.asarray(value, np.float32)
        return value, fact

    def _convert(self, op: Op) -> Outcome:
        (var,), (out,), (x,), (fact,) = op.eqn.invars, op.eqn.outvars, *op[1:3]
        group, is_param = self._group(op)
        narrows = is_half(out.aval) and is_f32(var.aval)
        # What is cast for whoever reads it: a parameter, a cotangent, and what `amp` gave the
        # source of the operation that reads it. It also casts what a chain has computed.
        is_back = fact.is_cotangent or is_transposed(op.eqn)
        if narrows and (is_param or is_back or self._is_input(op.eqn)):
            return [x], [fact._replace(is_pending=True)]
        if narrows or (fact.is_pending and is_f32(out.aval)):
            sources = fact.sources or (group,)
            fact = Fact(sources, is_cotangent=fact.is_cotangent)
            return [self._round(x, Key(group, sources, fact.is_cotangent))], [fact]
        if is_half(var.aval) and (is_half(out.aval) or is_f32(out.aval)):
            return [x], [fact]
        return _bind_wide(op.eqn, [x]), [Fact(is_cotangent=fact.is_cotangent)]

    def _half(self, op: Op, name: str) -> Outcome:
        """Runs an operation with operands or results of 16 bits."""
        (group, _), values = self._group(op), list(op.values)
        is_matmul = name in MATMULS
        takes_eight = self.with_fp8 and is_matmul and self.emulation.groups[group].param
        sources = (group,) if is_matmul else _sources(op)
        for i, (var, fact) in enumerate(zip(op.eqn.invars, op.facts, strict=True)):
            if not is_half(var.aval) or isinstance(var, Literal):
                continue
            key = Key(group, sources, fact.is_cotangent)
            if is_matmul or fact.is_pending:
                values[i] = self._round(values[i], key)
            if takes_eight and i < 2:
                values[i] = self._round(values[i], key._replace(is_eight=True))
        outs, is_cotangent = _bind_wide(op.eqn, values), _is_cotangent(op)
        if name not in _EXACT:
            key = Key(group, sources, is_cotangent)
            pairs = zip(outs, op.eqn.outvars, strict=True)
            outs = [self._round(x, key) if is_half(v.aval) else x for x, v in pairs]
        return outs, [Fact(sources, is_cotangent=is_cotangent)] * len(outs)

    def _group(self, op: Op) -> tuple[int, bool]:
        """Returns the group of an equation, and whether it moves a parameter."""
        return self.emulation.places[path(op.eqn, self.callers)]

    def _is_input(self, cast: Equation) -> bool:
        trace, readers = cast.source_info.traceback, self.frame.readers
        reading = readers.get(cast.outvars[0], ())
        return any(eqn.source_info.traceback is trace for eqn, _ in reading)

    def _round(self, x: Array, key: Key) -> Array:
        if not is_f32(x) or x.size == 0:
            return x
        rows = self.emulation.rows
        form = self.table[rows.setdefault(key, len(rows))]
        return rounded(x, form, is_scaled=key.is_eight)

    # The table is one more input of each body; a scan slices its inputs.

    def more_inputs(self, op: Op) -> Array:
        if primitive_name(op.eqn) != "scan":
            return self.table
        length = op.eqn.params["length"]
        return jnp.broadcast_to(self.table, (length, *self.table.shape))

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: Array) -> Iterator[None]:
        before = self.table, self.callers
        self.table, self.callers = more, (*self.callers, eqn)
        try:
            yield
        finally:
            self.table, self.callers = before

    def cache_key(self, eqn: Equation, more: Array) -> tuple[int, ...]:
        return path(eqn, self.callers)

    def literal_fact(self, atom: object) -> Fact:
        # The cotangent of the loss is a number. Equations inside do not say what they are.
        eqn = self.frame.eqn
        return Fact(is_cotangent=eqn is not None and is_transposed(eqn))

    def fact_inside(self, fact: Fact, var: Hashable, kind: Kind) -> Fact:
        if kind != "carry":
            return fact
        return Fact(is_cotangent=fact.is_cotangent or is_transposed(self.frame.eqn))

    def result_facts(self, outs: Sequence[Array], known: Facts) -> Facts:
        return known


def _bind_wide(eqn: Equation, values: Sequence[Array]) -> list[Array]:
    """Runs an equation with f32 in place of 16 bits."""
    return bind(eqn, arrays_of(values), **f32_params(eqn, is_half))


def _is_cotangent(op: Op) -> bool:
    """Returns whether the results of an operation belong to the backward pass."""
    return is_transposed(op.eqn) or any(fact.is_cotangent for fact in op.facts)


def _sources(op: Op) -> tuple[int, ...]:
    """Returns the matmuls that make an operation, or its forward one, run in 16 bits."""
    # An operand that was cast for it is no reason.
    known = [fact for fact in op.facts if fact.sources and not fact.is_pending]
    forward = [fact for fact in known if not fact.is_cotangent]
    return tuple(sorted({x for fact in forward or known for x in fact.sources}))


# --- Emulated policies ----------------------------------------------------------------


class Rounded(NamedTuple):
    """What is rounded, and to which formats."""

    half: str = "bf16"
    low: frozenset[int] = frozenset()  # the groups that run in it
    eight: frozenset[int] = frozenset()  # the groups whose matmuls run in 8 bits
    eights: tuple[str, str] = ("e4m3", "e5m2")  # of values and of gradients
    scale: float | None = None  # for f16, of the loss; `None` for one that always fits
    # Whether `low` rounds even where `amp` would hold operands in f32, because the matmul
    # before them is in f32
    is_alone: bool = False

    def row(self, key: Key) -> tuple[float, float, float]:
        """Returns the format of a row of the table."""
        if key.is_eight and key.group in self.eight:
            return _format(self.eights[key.is_cotangent])
        needed = {key.group} if self.is_alone else {key.group, *key.sources}
        if key.is_eight or not needed <= self.low:
            return _F32
        return _format(self.half, self.scale if key.is_cotangent else 1.0)


class Change(NamedTuple):
    """How far gradients are from those in f32."""

    # The norm of the change over that of the gradient; infinite if that is not finite
    error: float
    lost: float  # the largest share that one parameter's gradient lost of its norm


class Emulation:
    """The gradient of a function under `amp`, with any groups rounded."""

    def __init__(self, forward: Program, *, with_fp8: bool = True) -> None:
        # And what runs as written.
        self.program, self.opaque = gradient(forward), set[str]()
        # The groups, the operations of their matmuls, and by equation the position of its
        # group and whether it moves a parameter.
        self.places: dict[tuple[int, ...], tuple[int, bool]] = {}
        self.flops: collections.Counter[int] = collections.Counter()
        numbers: dict[Group, int] = {}
        found = sites(self.program, every=True)
        # What matmuls read. A gradient may also be summed to that of a bias.
        read = (x for _, x in found if x.primitive in MATMULS and not x.backward)
        weights = {x.param for x in read}
        for here, place in found:
            number = numbers.setdefault(_group_of(here, place, weights), len(numbers))
            self.places[path(here.eqn, here.callers)] = number, bool(place.param)
            if place.primitive in MATMULS:
                self.flops[number] += flops(here.eqn) * here.times
        self.groups = list(numbers)
        self.rows: dict[Key, int] = {}

        def run(arrays: Sequence[Array], table: Array) -> list[Array]:
            visitor = _Rounding(emulation=self, table=table, with_fp8=with_fp8)
            body, consts = open_jaxpr(self.program.jaxpr)
            outs, _ = visitor.run(body, consts, arrays, [Fact()] * len(arrays), ())
            return [jnp.asarray(x, np.float32) for x in outs[1:]]

        self._run = jax.jit(run)
        most = 4 * sum(1 for _ in equations(self.program.jaxpr))
        shape = jax.ShapeDtypeStruct((most, 3), np.float32)
        jax.eval_shape(run, self.program.arrays, shape)  # fills the rows
        self.exact = self.gradient(Rounded())  # in f32

    def gradient(self, rounds: Rounded) -> list[Array]:
        """Returns the gradient with groups rounded."""
        rows = [rounds.row(key) for key in self.rows] or [_F32]
        return self._run(self.program.arrays, np.array(rows, np.float32))

    def groups_of(self, *, eight: bool = False) -> frozenset[int]:
        """Returns the groups that round, or those that fp8 may quantise."""
        return frozenset(key.group for key in self.rows if key.is_eight == eight)


def change(grads: Sequence[Array], exact: Sequence[Array]) -> Change:
    """Returns how far gradients are from exact ones."""
    rows = [(x - y, x, y) for x, y in zip(grads, exact, strict=True)]
    sums = [[jnp.sum(jnp.square(x.astype(np.float32))) for x in row] for row in rows]
    found = np.array(jax.device_get(sums), np.float64).reshape(-1, 3)
    if not np.all(np.isfinite(found)):
        return Change(math.inf, 1.0)
    off, _, whole = found.sum(0)
    kept = np.sqrt(found[:, 1] / np.maximum(found[:, 2], 1e-300))
    lost = np.max(1 - np.where(found[:, 2] > 0, kept, 1), initial=0.0)
    return Change(math.sqrt(off / whole) if whole else 0.0, float(lost))
