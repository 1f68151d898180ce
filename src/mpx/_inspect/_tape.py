"""Runs of a program on concrete arrays, in several lanes that go side by side."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._inspect._places import Name
from mpx._inspect._shadow import Array, on_host
from mpx._inspect._shards import axes_of, join, split
from mpx._jaxpr._flow import moved
from mpx._jaxpr._queries import Equation
from mpx._jaxpr._steps import Around, Axes, Steps

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
    name: Name = None


class Run(Steps[Value]):
    """A run of a program in one or several lanes; a subclass defines `run_leaf`.

    All lanes take the same branches and as many steps of each loop.
    """

    def run_leaf(
        self, eqn: Equation, operands: list[Value], around: Around
    ) -> list[Value]:
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

    def leaf(self, eqn: Equation, operands: list[Value], around: Around) -> list[Value]:
        """Runs an equation; what only moves a parameter is still this parameter."""
        outs = self.run_leaf(eqn, operands, around)
        known = moved(eqn, [x.name for x in operands])
        return [x._replace(name=known) for x in outs]

    def literal(self, atom: Any) -> Value:
        """Returns a literal as an array of its dtype."""
        return Value(self.lanes_of(np.asarray(atom.val, atom.aval.dtype)), NO_REF)

    def constant(self, x: Array) -> Value:
        """Returns a constant."""
        lanes = self.lanes_of(x)
        return Value(lanes, self.source(lanes))

    def carried(self, x: Value) -> Value:
        """Returns a value without its name: the next step has another."""
        return x._replace(name=None)

    def chosen(self, x: Value) -> int:
        """Returns the branch that the first lane takes."""
        return int(np.asarray(x.lanes[0]).reshape(-1)[0])

    def goes_on(self, x: Value) -> bool:
        """Returns whether no lane has ended: a counter that stands still never would."""
        return all(bool(np.all(lane)) for lane in x.lanes)

    def part(self, x: Value, step: int, around: Around) -> Value:
        """Returns one slice of a value."""
        place = (slice(None),) * len(around.axes) + (step,)
        lanes = _each(lambda lane: on_host(lane)[place], x.lanes)
        return Value(lanes, self.source(lanes, [x.ref], step), x.name)

    def stacked(self, values: list[Value], var: Any, around: Around) -> Value:
        """Returns slices as one value."""
        if not values:
            return self.constant(np.zeros(var.aval.shape, var.aval.dtype))
        lanes = tuple(
            stack([x.lanes[i] for x in values], len(around.axes))
            for i in range(len(values[0].lanes))
        )
        if all(all(lane is x.lanes[0] for lane in x.lanes) for x in values):
            lanes = lanes[:1] * len(lanes)
        return Value(lanes, self.source(lanes, [x.ref for x in values]))

    def split(self, eqn: Equation, operands: list[Value]) -> tuple[Axes, list[Value]]:
        """Returns the axes of a `shard_map`, and its operands as shards."""
        axes, specs = axes_of(eqn), eqn.params["in_specs"]
        return axes, [
            self._resharded(x, split, spec, axes)._replace(name=x.name)
            for x, spec in zip(operands, specs, strict=True)
        ]

    def joined(self, eqn: Equation, outs: list[Value], axes: Axes) -> list[Value]:
        """Returns the results of a `shard_map` from their shards."""
        pairs = zip(outs, eqn.params["out_specs"], strict=True)
        return [self._resharded(x, join, spec, axes) for x, spec in pairs]

    def _resharded(
        self, x: Value, func: Callable[..., Array], spec: Any, axes: Axes
    ) -> Value:
        lanes = _each(lambda lane: func(lane, spec, axes), x.lanes)
        return Value(lanes, self.source(lanes, [x.ref], SHARDS))


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
