"""Runs of a program on concrete arrays, equation by equation.

Unlike `mpx._jaxpr`, which rebuilds loops and branches, a run goes through each step of a
loop and takes one branch, so that what happens in a step can be named.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._compat import (
    Literal,
    is_jaxpr,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._inspect._places import Name, name_of_results
from mpx._inspect._shadow import Array, literal, on_host
from mpx._inspect._shards import Axes, axes_of, join, split
from mpx._jaxpr._queries import Equation

Lanes = tuple[Array, ...]
"""The same value in several runs that go side by side."""
Ref = tuple[int, int]
"""A value of a run: the number of the node that made it, and which result it is."""


NO_REF: Ref = (-1, 0)
SHARDS = -1
"""Stands for the part of a value that is all of it, in other shards."""


Frame = tuple[str, str, int]
"""A line of the user's code: function, file, line."""


class Value(NamedTuple):
    """A value in each lane, where it comes from, and which parameter it is."""

    lanes: Lanes
    ref: Ref
    name: Name = None


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
    frames: tuple[Frame, ...] = ()
    axes: Axes = ()


NOTHING = Around()


class Run:
    """A run of a program in one or several lanes; a subclass defines `leaf`.

    All lanes take the same branches and as many steps of each loop. The first run decides
    and notes that in `choices`; a later run is given them.
    """

    def __init__(self, choices: Sequence[int] | None = None) -> None:
        self.choices: list[int] = list(choices or ())
        self._given: Iterator[int] | None = None if choices is None else iter(choices)
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

    def constant(self, x: Array) -> Value:
        """Returns a constant."""
        lanes = self.lanes_of(x)
        return Value(lanes, self.source(lanes))

    def __call__(
        self, jaxpr: Any, args: Sequence[Value], around: Around = NOTHING
    ) -> list[Value]:
        """Runs a jaxpr."""
        body, consts = open_jaxpr(jaxpr)
        env: dict[Any, Value] = {}
        env.update(zip(body.constvars, map(self.constant, consts), strict=True))
        env.update(zip(body.invars, args, strict=True))
        if id(body) not in self._ends:
            self._ends[id(body)] = _last_uses(body)
        last = self._ends[id(body)]

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return Value(self.lanes_of(literal(atom)), NO_REF)
            return env[atom]

        for eqn, dead in zip(body.eqns, last, strict=True):
            operands = [read(atom) for atom in eqn.invars]
            outs = self._equation(eqn, operands, self._inside(eqn, around))
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in dead:
                env.pop(var, None)
        return [read(atom) for atom in body.outvars]

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
        body = called(eqn)
        if body is not None:
            return self(body, operands, around)
        if not eqn.outvars:  # a print, say
            return []
        outs = self.leaf(eqn, operands, around)
        known = name_of_results(eqn, [x.name for x in operands])
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
            return int(all(bool(np.all(x)) for x in test.lanes))

        while self._choose(goes_on):
            inside = around._replace(steps=(*around.steps, (step, 0)))
            carry = self(params["body_jaxpr"], [*consts, *carry], inside)
            step += 1
        return carry

    def _scan(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        n_consts, n_carry = scan_sizes(eqn.params)
        length = eqn.params["length"]
        consts = operands[:n_consts]
        carry = [x._replace(name=None) for x in operands[n_consts : n_consts + n_carry]]
        xs = operands[n_consts + n_carry :]
        steps = range(length)
        collected: list[list[Value]] = [[] for _ in eqn.outvars[n_carry:]]
        for step in reversed(steps) if eqn.params["reverse"] else steps:
            inside = around._replace(steps=(*around.steps, (step, length)))
            depth = len(around.axes)
            slices = [self._slice(x, step, depth) for x in xs]
            outs = self(eqn.params["jaxpr"], [*consts, *carry, *slices], inside)
            carry = outs[:n_carry]
            for kept, out in zip(collected, outs[n_carry:], strict=True):
                kept.append(out)
        if eqn.params["reverse"]:
            collected = [kept[::-1] for kept in collected]
        pairs = zip(collected, eqn.outvars[n_carry:], strict=True)
        depth = len(around.axes)
        return [*carry, *(self._stack(kept, var, depth) for kept, var in pairs)]

    def _shard_map(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
        axes, params = axes_of(eqn), eqn.params
        inputs = []
        for x, spec in zip(operands, params["in_specs"], strict=True):
            lanes = _each(lambda lane, spec=spec: split(lane, spec, axes), x.lanes)
            inputs.append(Value(lanes, self.source(lanes, [x.ref], SHARDS), x.name))
        outs = self(params["jaxpr"], inputs, around._replace(axes=axes))
        results = []
        for x, spec in zip(outs, params["out_specs"], strict=True):
            lanes = _each(lambda lane, spec=spec: join(lane, spec, axes), x.lanes)
            results.append(Value(lanes, self.source(lanes, [x.ref], SHARDS)))
        return results

    def _slice(self, x: Value, step: int, depth: int) -> Value:
        place = (slice(None),) * depth + (step,)
        lanes = _each(lambda lane: on_host(lane)[place], x.lanes)
        return Value(lanes, self.source(lanes, [x.ref], step), x.name)

    def _stack(self, values: list[Value], var: Any, depth: int) -> Value:
        if not values:
            return self.constant(np.zeros(var.aval.shape, var.aval.dtype))
        lanes = tuple(
            stack([x.lanes[i] for x in values], depth)
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


def stack(arrays: Sequence[Array], axis: int) -> Array:
    """Stacks arrays; PRNG keys too."""
    arrays = [on_host(x) for x in arrays]
    is_numpy = isinstance(arrays[0], np.ndarray | np.generic)
    return np.stack(arrays, axis) if is_numpy else jnp.stack(arrays, axis)


def called(eqn: Equation) -> Any:
    """Returns the jaxpr that an equation calls with its operands as they are, if any."""
    if primitive_name(eqn) in ("pallas_call", "shard_map"):
        return None
    for key in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
        jaxpr = eqn.params.get(key)
        if is_jaxpr(jaxpr):
            body = open_jaxpr(jaxpr)[0]
            same = len(body.invars) == len(eqn.invars)
            if same and len(body.outvars) == len(eqn.outvars):
                return jaxpr
    return None


def _last_uses(body: Any) -> list[list[Any]]:
    """Returns, for each equation, the variables that nothing reads after it."""
    seen = {atom for atom in body.outvars if not isinstance(atom, Literal)}
    found: list[list[Any]] = []
    for eqn in reversed(body.eqns):
        atoms = [x for x in eqn.invars if not isinstance(x, Literal)]
        ending = {x for x in (*atoms, *eqn.outvars) if x not in seen}
        seen |= ending
        found.append(list(ending))
    return found[::-1]
