"""Running a jaxpr on concrete values, step by step.

Unlike a `Visitor`, which rebuilds loops and branches, a run goes through each step of a loop
and takes one branch, so that what happens in a step can be named.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from mpx._compat import (
    is_jaxpr,
    is_transposed,
    open_jaxpr,
    primitive_name,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._jaxpr._flow import propagate
from mpx._jaxpr._queries import Equation, last_uses

V = TypeVar("V")
Line = tuple[str, str, int]
"""A line of the user's code: function, file, line."""
Axes = tuple[tuple[str, int], ...]
"""Names and sizes of the axes of a mesh."""


class Around(NamedTuple):
    """What is around an equation.

    Attributes:
        scopes: The named scopes.
        steps: The steps of the loops: (number of the step, how many there are).
        backward: Whether it belongs to a backward pass.
        frames: The user's lines behind it, the innermost first.
        axes: The axes of the `shard_map`; they are leading axes of each value in it.
    """

    scopes: tuple[str, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    backward: bool = False
    frames: tuple[Line, ...] = ()
    axes: Axes = ()

    def in_step(self, step: int, length: int = 0) -> "Around":
        """Returns what is around the body of a loop in one of its steps."""
        return self._replace(steps=(*self.steps, (step, length)))


NOTHING = Around()


class Steps(Generic[V]):
    """A run of a jaxpr; a subclass says what a value is and what happens to it.

    Which branches are taken, and how many steps of each loop, is noted in `choices`; a later
    run can be given them.
    """

    def __init__(self, choices: Sequence[int] | None = None) -> None:
        self.choices: list[int] = list(choices or ())
        self._given: Iterator[int] | None = None if choices is None else iter(choices)
        self._ends: dict[int, list[list[Any]]] = {}
        self._known: dict[int, Any] = {}

    def leaf(self, eqn: Equation, operands: list[V], around: Around) -> list[V]:
        """Runs an equation without jaxprs inside."""
        raise NotImplementedError

    def literal(self, atom: Any) -> V:
        """Returns a number that is written into a jaxpr."""
        raise NotImplementedError

    def constant(self, x: Any) -> V:
        """Returns an array that the function closes over."""
        raise NotImplementedError

    def carried(self, x: V) -> V:
        """Returns a value as the carry of a loop."""
        return x

    def chosen(self, x: V) -> int:
        """Returns the branch that a value chooses."""
        raise NotImplementedError

    def goes_on(self, x: V) -> bool:
        """Returns whether a loop goes on, given the result of its condition."""
        raise NotImplementedError

    def part(self, x: V, step: int, around: Around) -> V:
        """Returns the slice of a value that a step of a scan gets."""
        raise NotImplementedError

    def stacked(self, values: list[V], var: Any, around: Around) -> V:
        """Returns what a scan makes of the results of its steps."""
        raise NotImplementedError

    def split(self, eqn: Equation, operands: list[V]) -> tuple[Axes, list[V]]:
        """Returns the axes of a `shard_map`, and its operands as shards."""
        raise NotImplementedError

    def joined(self, eqn: Equation, outs: list[V], axes: Axes) -> list[V]:
        """Returns the results of a `shard_map` from their shards."""
        raise NotImplementedError

    def __call__(
        self, jaxpr: Any, args: Sequence[V], around: Around = NOTHING
    ) -> list[V]:
        """Runs a jaxpr; values are forgotten when nothing reads them any more."""
        body, consts = open_jaxpr(jaxpr)
        known = dict(zip(body.constvars, map(self.constant, consts), strict=True))
        known.update(zip(body.invars, args, strict=True))
        if id(body) not in self._ends:
            self._ends[id(body)] = last_uses(body)

        def rule(eqn: Equation, operands: list[V]) -> list[V]:
            return self._equation(eqn, operands, self._inside(eqn, around))

        return propagate(body, known, rule, self.literal, self._ends[id(body)])

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

    def _equation(self, eqn: Equation, operands: list[V], around: Around) -> list[V]:
        name = primitive_name(eqn)
        if name in ("scan", "while", "cond"):
            handler = {"scan": self._scan, "while": self._while, "cond": self._cond}
            return handler[name](eqn, operands, around)
        if name == "shard_map" and not around.axes:
            axes, inputs = self.split(eqn, operands)
            outs = self(eqn.params["jaxpr"], inputs, around._replace(axes=axes))
            return self.joined(eqn, outs, axes)
        body = _called(eqn)
        if body is not None:
            return self(body, operands, around)
        # Without results it is a print, say.
        return self.leaf(eqn, operands, around) if eqn.outvars else []

    def _choose(self, decide: Callable[[], int]) -> int:
        if self._given is not None:
            return next(self._given)
        self.choices.append(decide())
        return self.choices[-1]

    def _cond(self, eqn: Equation, operands: list[V], around: Around) -> list[V]:
        index, *rest = operands
        branches = eqn.params["branches"]
        chosen = self._choose(
            lambda: min(max(self.chosen(index), 0), len(branches) - 1)
        )
        return self(branches[chosen], rest, around)

    def _while(self, eqn: Equation, operands: list[V], around: Around) -> list[V]:
        params = eqn.params
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        tests, consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
        carry = [self.carried(x) for x in operands[n_cond + n_body :]]
        step = 0

        def goes_on() -> int:
            (test,) = self(params["cond_jaxpr"], [*tests, *carry], around)
            return int(self.goes_on(test))

        while self._choose(goes_on):
            inputs = [*consts, *carry]
            carry = self(params["body_jaxpr"], inputs, around.in_step(step))
            step += 1
        return carry

    def _scan(self, eqn: Equation, operands: list[V], around: Around) -> list[V]:
        n_consts, n_carry = scan_sizes(eqn.params)
        length, is_reversed = eqn.params["length"], eqn.params["reverse"]
        consts, xs = operands[:n_consts], operands[n_consts + n_carry :]
        carry = [self.carried(x) for x in operands[n_consts : n_consts + n_carry]]
        collected: list[list[V]] = [[] for _ in eqn.outvars[n_carry:]]
        for step in range(length)[:: -1 if is_reversed else 1]:
            slices = [self.part(x, step, around) for x in xs]
            inputs = [*consts, *carry, *slices]
            outs = self(eqn.params["jaxpr"], inputs, around.in_step(step, length))
            carry = outs[:n_carry]
            for kept, out in zip(collected, outs[n_carry:], strict=True):
                kept.append(out)
        if is_reversed:
            collected = [kept[::-1] for kept in collected]
        pairs = zip(collected, eqn.outvars[n_carry:], strict=True)
        return [*carry, *(self.stacked(kept, var, around) for kept, var in pairs)]


def _called(eqn: Equation) -> Any:
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
