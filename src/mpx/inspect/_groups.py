"""Groups of operations that a policy can keep in f32, and programs labelled with them."""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import PyTree

from mpx._amp import amp
from mpx._casting._select import search
from mpx._jax._compat import (
    eval_equation,
    open_jaxpr,
    primitive_name,
    source_frames,
)
from mpx._program import HANDLERS
from mpx._program._flow import moved
from mpx._program._interpreter import Kind, Op, Outcome, Scopes, Visitor
from mpx._program._queries import MATMULS, Equation
from mpx._wire._product import LINEAR
from mpx.inspect._program import Name, Program, program


class Group(NamedTuple):
    """Operations that a policy treats alike.

    They are the matmuls of a parameter ("" for other operations), in scopes that are joined
    by `/`, written by functions, innermost first.
    """

    param: str
    scope: str
    functions: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name by which readers know it: the parameter, else scope, else function."""
        own = getattr(self.param, "path", "") or self.param
        return own or self.scope or (self.functions or ("other",))[0]

    @property
    def selector(self) -> "Keep":
        """What keeps these operations in f32, with as few others as possible."""
        if self.param or self.scope:
            return Keep("keep", f"^{re.escape(self.label)}$")
        return Keep("functions", f"{re.escape(self.label)}$")


class Keep(NamedTuple):
    """A selector of `amp`: an expression for `keep`, or for `AmpRules.functions`."""

    kind: str
    pattern: str

    def selects(self, group: Group) -> bool:
        """Returns whether the operations of a group run in f32."""
        if self.kind == "functions":
            return any(search(self.pattern, name) for name in group.functions)
        if group.param and search(self.pattern, group.param):
            return True
        paths = itertools.accumulate(group.scope.split("/"), "{}/{}".format)
        return bool(group.scope) and any(search(self.pattern, x) for x in paths)


_LABEL = re.compile(r"^mpx-group-(\d+)(-input)?$")


def label_of(scopes: Scopes) -> tuple[int | None, bool]:
    """Returns the group of an equation, and whether it is an input.

    An input is a cast of an operand, made for the operation that reads it. The innermost
    label in the scopes counts; without one the group is `None`.
    """
    found = next(filter(None, map(_LABEL.match, reversed(scopes))), None)
    return (int(found[1]), found[2] is not None) if found else (None, False)


@dataclasses.dataclass(eq=False, kw_only=True)
class _Labels(Visitor):
    """Runs each equation in a scope that names its group.

    Differentiation carries the scopes over to the backward pass.
    """

    groups: dict[Group, int] = dataclasses.field(default_factory=dict)
    _around: tuple[str, ...] = ()

    def equation(self, op: Op) -> Outcome:
        name = primitive_name(op.eqn)
        if name in HANDLERS:
            return HANDLERS[name](self, op)
        number = self.groups.setdefault(self._group(op), len(self.groups))
        suffix = "-input" if self._is_input(op.eqn) else ""
        with jax.named_scope(f"mpx-group-{number}{suffix}"):
            outs = eval_equation(op.eqn, op.values)
        return outs, [moved(op.eqn, op.facts)] * len(outs)

    def fact_inside(self, fact: Name, var: Hashable, kind: Kind) -> Name:
        return None if kind == "carry" else fact

    def _group(self, op: Op) -> Group:
        known = [name for name in op.facts if name]
        is_matmul = primitive_name(op.eqn) in (*MATMULS, LINEAR) and len(known) > 0
        functions = _functions(op.eqn) or self._around
        # A scope inside itself counts once.
        path = "/".join(name for name, _ in itertools.groupby(op.scopes))
        return Group(known[0] if is_matmul else "", path, functions)

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: PyTree) -> Iterator[None]:
        before = self._around
        self._around = _functions(eqn) or before
        try:
            yield
        finally:
            self._around = before

    def cache_key(self, more: PyTree) -> tuple[str, ...]:
        return self._around

    def _is_input(self, eqn: Equation) -> bool:
        """Returns whether a cast to 16 bits belongs to the operation that reads it.

        `amp` gives both the same source; it also casts what a chain has computed.
        """
        if primitive_name(eqn) != "convert_element_type":
            return False
        trace = eqn.source_info.traceback
        found = self.frame.readers.get(eqn.outvars[0], ())
        return any(other.source_info.traceback is trace for other, _ in found)


def _functions(eqn: Equation) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _, _ in source_frames(eqn)))


def labelled(
    func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Program, list[Group]]:
    """Traces a function as `amp` runs it, with the group of each operation in its scopes."""
    # In place of fused attention its equations, so that its parts are judged.
    forward = program(amp(func, "bf16", attention="keep"), args, kwargs)
    visitor = _Labels()
    body, consts = open_jaxpr(forward.jaxpr)

    def run(*arrays: Array) -> list[Array]:
        return visitor.run(body, consts, arrays, forward.known, ())[0]

    jaxpr = jax.make_jaxpr(run)(*forward.arrays)
    return forward._replace(jaxpr=jaxpr), list(visitor.groups)
