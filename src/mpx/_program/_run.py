"""Runs of a program on concrete arrays, equation by equation.

Unlike a `Visitor`, which rebuilds loops and branches, a run goes through each step of a loop
and takes one branch, so that what happens in a step can be named.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpx._jax._compat import (
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._program._flow import moved, propagate
from mpx._program._interpreter import Jaxpr
from mpx._program._queries import Equation, called, last_uses
from mpx._program._shards import Axes, axes_of, join, split

Array = Any
"""An array of NumPy or of JAX."""
Lanes = tuple[Array, ...]
"""The same value in several runs that go side by side."""
Ref = tuple[int, int]
"""A value of a run: the number of the node that made it, and which result it is."""
NO_REF: Ref = (-1, 0)
SHARDS = -1
"""Stands for the part of a value that is all of it, in other shards."""


class Value(NamedTuple):
    """A value in each lane, where it comes from, and which parameter it is."""

    lanes: Lanes
    ref: Ref
    name: str | None = None


class Around(NamedTuple):
    """What is around an equation.

    Attributes:
        scopes: The named scopes.
        steps: The steps of the loops: (number of the step, how many there are).
        backward: Whether it belongs to a backward pass.
        frames: The user's lines behind it, the innermost first: (function, file, line).
        axes: The axes of the `shard_map`; they are leading axes of each value in it.
    """

    scopes: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    backward: bool = False
    frames: tuple[tuple[str, str, int], ...] = ()
    axes: Axes = ()

    def in_step(self, step: int, length: int = 0) -> "Around":
        """Returns what is around the body of a loop in one of its steps."""
        return self._replace(steps=(*self.steps, (step, length)))


NOTHING = Around()


class Loop(NamedTuple):
    """A `while` loop after some steps, with what its condition and its body read."""

    eqn: Equation
    tests: list[Value]
    consts: list[Value]
    carry: list[Value]
    step: int


class Run:
    """A run of a program in one or several lanes; a subclass defines `leaf`.

    All lanes take the same branches and as many steps of each loop. The first run decides
    and notes that in `choices`; a later run is given them.

    Attributes:
        choices: The branches and loop tests, in the order of execution.
        most_steps: A `while` loop is left after this many steps.
        is_cut: Whether one was.
    """

    most_steps: float = math.inf

    def __init__(self, choices: Sequence[int] | None = None) -> None:
        self.choices: list[int] = list(choices or ())
        self._given: Iterator[int] | None = None if choices is None else iter(choices)
        self.is_cut = False
        self._ends: dict[int, list[list[Any]]] = {}
        self._known: dict[int, Any] = {}

    def leaf(self, eqn: Equation, operands: list[Value], around: Around) -> list[Value]:
        """Runs an equation without jaxprs inside."""
        raise NotImplementedError

    def source(
        self, lanes: Lanes, parts: Sequence[Ref] = (), part: int | None = None
    ) -> Ref:
        """Returns the reference of a value that no equation made.

        Args:
            lanes: The value.
            parts: The values that it is stacked from, or the one that it is a part of.
            part: Which part of that value.
        """
        return NO_REF

    def lanes_of(self, x: Array) -> Lanes:
        """Returns a constant in each lane."""
        raise NotImplementedError

    def lanes_part(self, loop: "Loop", goes_on: Sequence[bool], test: Ref) -> None:
        """Is told that a `while` loop has ended in some lanes and not in others.

        Args:
            loop: The loop after the steps so far.
            goes_on: Whether each lane would take another step.
            test: The value of the loop's condition.
        """

    def goes_beyond(self, loop: "Loop") -> bool:
        """Returns whether the first lane of a loop takes more than `most_steps` more."""
        parts = (*loop.tests, *loop.consts, *loop.carry)
        operands = [Value(x.lanes[:1], NO_REF) for x in parts]
        self._while(loop.eqn, operands, NOTHING)
        return self.is_cut

    def _constant(self, x: Array) -> Value:
        lanes = self.lanes_of(x)
        return Value(lanes, self.source(lanes))

    def _literal(self, atom: Any) -> Value:
        return Value(self.lanes_of(np.asarray(atom.val, atom.aval.dtype)), NO_REF)

    def __call__(
        self, jaxpr: Jaxpr, args: Sequence[Value], around: Around = NOTHING
    ) -> list[Value]:
        """Runs a jaxpr; values are forgotten when nothing reads them any more."""
        body, consts = open_jaxpr(jaxpr)
        known = dict(zip(body.constvars, map(self._constant, consts), strict=True))
        known.update(zip(body.invars, args, strict=True))
        if id(body) not in self._ends:
            self._ends[id(body)] = last_uses(body)

        def rule(eqn: Equation, operands: list[Value]) -> list[Value]:
            return self._equation(eqn, operands, self._inside(eqn, around))

        return propagate(body, known, rule, self._literal, self._ends[id(body)])

    def _inside(self, eqn: Equation, around: Around) -> Around:
        """Returns what is around the body of an equation."""
        if id(eqn) not in self._known:
            frames = tuple(source_frames(eqn))
            self._known[id(eqn)] = scopes_of(eqn), is_transposed(eqn), frames
        scopes, backward, frames = self._known[id(eqn)]
        # The lines inside a jitted function end there, those inside a scan do not.
        rest = () if frames[-1:] == around.frames[-1:] else around.frames
        return Around(
            around.scopes + scopes,
            around.steps,
            around.backward or backward,
            frames + rest,
            around.axes,
        )

    def _equation(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        name = primitive_name(eqn)
        if name in ("scan", "while", "cond"):
            handler = {"scan": self._scan, "while": self._while, "cond": self._cond}
            return handler[name](eqn, operands, around)
        if name == "shard_map" and not around.axes:
            return self._shard_map(eqn, operands, around)
        body = None if name in ("pallas_call", "shard_map") else called(eqn)
        if body is not None:
            return self(body, operands, around)
        if not eqn.outvars:  # a print, say
            return []
        outs = self.leaf(eqn, operands, around)
        known = moved(eqn, [x.name for x in operands])
        return [x._replace(name=known) for x in outs]

    def _choose(self, decide: Callable[[], int]) -> int:
        if self._given is not None:
            return next(self._given)
        self.choices.append(decide())
        return self.choices[-1]

    def _cond(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        index, *rest = operands
        branches = eqn.params["branches"]

        def decide() -> int:
            chosen = int(np.asarray(index.lanes[0]).reshape(-1)[0])
            return int(np.clip(chosen, 0, len(branches) - 1))

        return self(branches[self._choose(decide)], rest, around)

    def _while(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
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
                self.lanes_part(Loop(eqn, tests, consts, carry, step), lanes, test.ref)
            self.is_cut |= all(lanes) and step >= self.most_steps
            return int(all(lanes) and step < self.most_steps)

        while self._choose(goes_on):
            carry = self(params["body_jaxpr"], [*consts, *carry], around.in_step(step))
            step += 1
        return carry

    def _scan(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        n_consts, n_carry = scan_sizes(eqn.params)
        length, order = eqn.params["length"], -1 if eqn.params["reverse"] else 1
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = [x._replace(name=None) for x in operands[n_consts : n_consts + n_carry]]
        collected: list[list[Value]] = [[] for _ in eqn.outvars[n_carry:]]
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

    def _shard_map(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        axes, params = axes_of(eqn), eqn.params

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
        lanes = _each(lambda lane: on_host(lane)[place], x.lanes)
        return Value(lanes, self.source(lanes, [x.ref], step), x.name)

    def _stack(self, values: list[Value], var: Any, depth: int) -> Value:
        if not values:
            return self._constant(np.zeros(var.aval.shape, var.aval.dtype))
        lanes = tuple(
            _stacked([x.lanes[i] for x in values], depth)
            for i in range(len(values[0].lanes))
        )
        if all(all(lane is x.lanes[0] for lane in x.lanes) for x in values):
            lanes = lanes[:1] * len(lanes)
        return Value(lanes, self.source(lanes, [x.ref for x in values]))


def _each(func: Callable[[Array], Array], lanes: Lanes) -> Lanes:
    """Applies a function to each lane; lanes that are one array stay one."""
    done = {id(lane): lane for lane in lanes}
    results = {key: func(lane) for key, lane in done.items()}
    return tuple(results[id(lane)] for lane in lanes)


def _stacked(arrays: Sequence[Array], axis: int) -> Array:
    """Stacks arrays; PRNG keys too."""
    arrays = [on_host(x) for x in arrays]
    is_numpy = isinstance(arrays[0], np.ndarray | np.generic)
    return np.stack(arrays, axis) if is_numpy else jnp.stack(arrays, axis)


def on_host(x: Array) -> Array:
    """Returns an array as one of NumPy, unless a device other than the CPU holds it.

    Small operations are faster in NumPy, which does not compile them.
    """
    if isinstance(x, np.ndarray | np.generic):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    on_cpu = all(device.platform == "cpu" for device in x.devices())
    return np.asarray(x) if on_cpu else x
