"""A program that is run equation by equation on the host."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import (
    Literal,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._program._queries import MOVES, Equation, called, last_uses
from mpx.inspect._equations import Array, Axes, join, mapped_axes, split, to_host
from mpx.inspect._program import Name

Lanes = tuple[Array, ...]
"""The same value in several runs that go side by side."""
Ref = tuple[int, int]
"""A value of a run: the number of the node that made it, and which result it is."""
NO_REF: Ref = (-1, 0)
SHARDS = -1
"""Marks a value that is replicated across shards."""


class Value(NamedTuple):
    """A value in each lane, where it comes from, and which parameter it is."""

    lanes: Lanes
    ref: Ref
    name: Name = None


Values = list[Value]


class Around(NamedTuple):
    """What is around an equation."""

    scopes: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()  # of its loops: (step, how many there are)
    backward: bool = False
    frames: tuple[tuple[str, str, int], ...] = ()  # (function, file, line), from inside
    axes: Axes = ()  # of the `shard_map`; leading axes of each value in it

    def in_step(self, step: int, length: int = 0) -> "Around":
        """Returns what is around the body of a loop in one of its steps."""
        return self._replace(steps=(*self.steps, (step, length)))


class Run:
    """Runs a program on arrays in one or several lanes; a subclass defines `leaf`.

    A run goes through each step of a loop and takes one branch. All lanes take the same
    branches and as many steps of each loop. The first run decides and notes that in
    `choices`; a later run is given them. A `while` loop is left after `most_steps`;
    `is_cut` tells that one was.
    """

    most_steps: float = math.inf

    def __init__(self, choices: Sequence[int] | None = None) -> None:
        self.choices: list[int] = list(choices or ())
        self._given = None if choices is None else iter(choices)
        self.is_cut = False
        self._ends: dict[int, list[list[Any]]] = {}
        self._known: dict[int, Any] = {}

    def leaf(self, eqn: Equation, operands: Values, around: Around) -> Values:
        """Runs an equation without jaxprs inside."""
        raise NotImplementedError

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant in each lane."""
        raise NotImplementedError

    def source(
        self, lanes: Lanes, parts: Sequence[Ref] = (), part: int | None = None
    ) -> Ref:
        """Returns the reference of a value stacked from others, or of a part of one."""
        return NO_REF

    def lanes_part(
        self, eqn: Equation, operands: Values, step: int, test: Value
    ) -> None:
        """Is told that a `while` loop has ended in some lanes and not in others."""

    def __call__(
        self, jaxpr: Any, args: Sequence[Value], around: Around | None = None
    ) -> Values:
        """Runs a jaxpr; values are forgotten when nothing reads them any more."""
        body, consts = open_jaxpr(jaxpr)
        env = dict(zip(body.constvars, map(self._constant, consts), strict=True))
        env.update(zip(body.invars, args, strict=True))
        if id(body) not in self._ends:
            self._ends[id(body)] = last_uses(body)

        def read(atom: Any) -> Value:
            if not isinstance(atom, Literal):
                return env[atom]
            value = np.asarray(atom.val, getattr(atom.aval, "dtype"))  # noqa: B009
            return Value(self.lanes_of(value), NO_REF)

        for eqn, dead in zip(body.eqns, self._ends[id(body)], strict=True):
            operands = [read(atom) for atom in eqn.invars]
            inside = self._inside(eqn, around or Around())
            outs = self._equation(eqn, operands, inside)
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in dead:
                env.pop(var, None)
        return [read(atom) for atom in body.outvars]

    def _constant(self, x: Array) -> Value:
        lanes = self.lanes_of(x)
        return Value(lanes, self.source(lanes))

    def _inside(self, eqn: Equation, around: Around) -> Around:
        """Returns what is around the body of an equation."""
        if id(eqn) not in self._known:
            frames = tuple(source_frames(eqn))
            self._known[id(eqn)] = scopes_of(eqn), is_transposed(eqn), frames
        scopes, backward, frames = self._known[id(eqn)]
        # The lines inside a jitted function end there, those inside a scan do not.
        rest = () if frames[-1:] == around.frames[-1:] else around.frames
        return around._replace(
            scopes=around.scopes + scopes,
            backward=around.backward or backward,
            frames=frames + rest,
        )

    def _equation(self, eqn: Equation, operands: Values, around: Around) -> Values:
        name = primitive_name(eqn)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, operands, around)
        if name == "shard_map" and not around.axes:
            return self._shard_map(eqn, operands, around)
        body = None if name in ("pallas_call", "shard_map") else called(eqn)
        if body is not None:
            return self(body, operands, around)
        if not eqn.outvars:  # a print, say
            return []
        outs = self.leaf(eqn, operands, around)
        known = [x.name for x in operands if x.name]
        moved = known[0] if name in MOVES and len(known) == 1 else None
        return [x._replace(name=moved) for x in outs]

    def _choose(self, decide: Callable[[], int]) -> int:
        if self._given is not None:
            return next(self._given)
        self.choices.append(decide())
        return self.choices[-1]

    def _cond(self, eqn: Equation, operands: Values, around: Around) -> Values:
        index, *rest = operands
        branches = eqn.params["branches"]

        def decide() -> int:
            chosen = int(np.asarray(index.lanes[0]).reshape(-1)[0])
            return int(np.clip(chosen, 0, len(branches) - 1))

        return self(branches[self._choose(decide)], rest, around)

    def _while(self, eqn: Equation, operands: Values, around: Around) -> Values:
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
        carry = [x._replace(name=None) for x in operands[n_cond + n_body :]]
        step = 0

        def goes_on() -> int:
            # Until the first lane ends: a counter that stands still would run forever.
            (test,) = self(params["cond_jaxpr"], [*tests, *carry], around)
            lanes = [bool(np.all(x)) for x in test.lanes]
            if any(lanes) and not all(lanes):
                self.lanes_part(eqn, [*tests, *consts, *carry], step, test)
            self.is_cut |= all(lanes) and step >= self.most_steps
            return int(all(lanes) and step < self.most_steps)

        while self._choose(goes_on):
            carry = self(params["body_jaxpr"], [*consts, *carry], around.in_step(step))
            step += 1
        return carry

    def _scan(self, eqn: Equation, operands: Values, around: Around) -> Values:
        n_consts, n_carry = scan_sizes(eqn.params)
        length, order = eqn.params["length"], -1 if eqn.params["reverse"] else 1
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = [x._replace(name=None) for x in operands[n_consts : n_consts + n_carry]]
        collected: list[Values] = [[] for _ in eqn.outvars[n_carry:]]
        depth = len(around.axes)
        for step in range(length)[::order]:
            inputs = [*consts, *carry, *(self._slice(x, step, depth) for x in xs)]
            outs = self(eqn.params["jaxpr"], inputs, around.in_step(step, length))
            carry = outs[:n_carry]
            for kept, out in zip(collected, outs[n_carry:], strict=True):
                kept.append(out)
        pairs = zip(collected, eqn.outvars[n_carry:], strict=True)
        stacked = [self._stack(kept[::order], var, depth) for kept, var in pairs]
        return [*carry, *stacked]

    def _shard_map(self, eqn: Equation, operands: Values, around: Around) -> Values:
        axes, params = mapped_axes(eqn), eqn.params

        def resharded(x: Value, func: Callable[..., Array], spec: Any) -> Value:
            lanes = _each(lambda lane: func(lane, spec, axes), x.lanes)
            return Value(lanes, self.source(lanes, [x.ref], SHARDS), x.name)

        pairs = zip(operands, params["in_specs"], strict=True)
        inputs = [resharded(x, split, spec) for x, spec in pairs]
        outs = self(params["jaxpr"], inputs, around._replace(axes=axes))
        pairs = zip(outs, params["out_specs"], strict=True)
        return [resharded(x, join, spec)._replace(name=None) for x, spec in pairs]

    def _slice(self, x: Value, step: int, depth: int) -> Value:
        place = (slice(None),) * depth + (step,)
        lanes = _each(lambda lane: to_host(lane)[place], x.lanes)
        return Value(lanes, self.source(lanes, [x.ref], step), x.name)

    def _stack(self, values: Values, var: Any, depth: int) -> Value:
        if not values:
            return self._constant(np.zeros(var.aval.shape, var.aval.dtype))
        lanes = tuple(
            _stacked([to_host(x) for x in column], depth)
            for column in zip(*(x.lanes for x in values), strict=True)
        )
        if all(all(lane is x.lanes[0] for lane in x.lanes) for x in values):
            lanes = lanes[:1] * len(lanes)
        return Value(lanes, self.source(lanes, [x.ref for x in values]))


def _each(func: Callable[[Array], Array], lanes: Lanes) -> Lanes:
    """Applies a function to each lane; lanes that are one array stay one."""
    results = {id(lane): func(lane) for lane in {id(x): x for x in lanes}.values()}
    return tuple(results[id(lane)] for lane in lanes)


def _stacked(arrays: Sequence[Array], axis: int) -> Array:
    """Stacks arrays; PRNG keys too."""
    is_numpy = isinstance(arrays[0], np.ndarray | np.generic)
    return np.stack(arrays, axis) if is_numpy else jnp.stack(arrays, axis)
