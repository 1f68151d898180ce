"""The interpreter: evaluates a jaxpr again, with its matmuls in 8 bits.

It is autocast's interpreter with one rule. What it knows of a value is whether it comes
from the parameters alone, through operations that only move or cast numbers.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._apply import flops
from mpx._amp._calls import remember
from mpx._amp._interpreter import Autocast
from mpx._amp._values import NEUTRAL, Meta, Role
from mpx._compat import (
    Literal,
    eval_equation,
    open_jaxpr,
    source_frames,
    sub_jaxprs,
)
from mpx._formats import short_name
from mpx._fp8._dot import fp8_dot
from mpx._fp8._mx import mx_dot
from mpx._fp8._operands import Plan
from mpx._fp8._recipes import MXFP8, DelayedScaling
from mpx._fp8._recursion import HANDLERS, States, typed
from mpx._fp8._sites import Matmul, Selection, reason_to_keep, sizes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What these return is a parameter if what they get first is one.
_MOVES = _names(
    "convert_element_type reshape squeeze expand_dims transpose slice dynamic_slice rev "
    "copy copy_p neg name optimization_barrier reduce_precision sharding_constraint "
    "reshard mesh_cast pvary pcast all_gather all_gather_invariant split unstack"
)
# What these return is a parameter if all that they get are parameters or numbers.
_COMBINES = _names("add sub mul div max min concatenate stack dot_general")


def has_matmul(jaxpr: Any) -> bool:
    """Whether a jaxpr holds a `dot_general`, at any depth."""
    return any(
        eqn.primitive.name == "dot_general" or any(map(has_matmul, sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


@dataclasses.dataclass(eq=False)
class Walk(Autocast):
    """One call of a function under `fp8`.

    Attributes:
        chosen: What the user chose.
        param_names: The names of the arguments that hold parameters.
        matmuls: Where matmuls are recorded; `None` to record none.
        sites: Where the paths of delayed scales are recorded, with the lengths of the
            scans around them; `None` to record none.
        states: The delayed scales below the place where the walk is, by relative path.
        facts: What was found: ("table", parameter), ("fp8", ""), ("f32", parameter).
    """

    chosen: Selection = dataclasses.field(kw_only=True)
    param_names: frozenset[str] = frozenset()
    matmuls: list[Matmul] | None = None
    sites: dict[str, tuple[int, ...]] | None = None
    states: States | None = None
    facts: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    _path: str = ""
    _lengths: tuple[int, ...] = ()
    _count: int = 0
    _delayed: bool = True

    def argument_meta(self, name: str, role: Role | None, leaf: Any) -> Meta:
        """Returns whether an argument is a parameter."""
        if role == "own" or name.partition("/")[0] in self.param_names:
            return Meta(origin=name, role="own")
        return NEUTRAL

    def constant_meta(self, value: Any) -> Meta:
        """Returns that nothing is known of what the function closes over."""
        return NEUTRAL

    def equation(
        self, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
    ) -> tuple[list[Any], list[Meta]]:
        """Runs one equation; a matmul in 8 bits if it may."""
        name = eqn.primitive.name
        if name == "dot_general":
            return self._dot(eqn, values, metas, scopes), self.known(eqn, metas)
        if name in HANDLERS and any(map(has_matmul, sub_jaxprs(eqn))):
            return HANDLERS[name](self, eqn, values, metas, scopes)
        self._note_hidden(eqn, scopes)
        return eval_equation(eqn, values), self.known(eqn, metas)

    def known(self, eqn: Any, metas: list[Meta]) -> list[Meta]:
        """Returns what is known of an equation's results."""
        name = eqn.primitive.name
        if name in ("jit", "pjit", "closed_call", "remat2", "checkpoint"):
            inner = next(sub_jaxprs(eqn))
            return self._known_inside(inner, metas)
        if name == "gather" and metas[0].origin is not None:
            self.facts.add(("table", metas[0].origin))
        if name == "optimization_barrier":
            return metas
        count = len(eqn.outvars)
        if name in _MOVES or (name == "broadcast_in_dim" and _keeps_size(eqn)):
            return [metas[0]] * count
        if name in _COMBINES:
            tensors = [
                meta
                for atom, meta in zip(eqn.invars, metas, strict=True)
                if not isinstance(atom, Literal)
            ]
            if tensors and all(meta.is_param for meta in tensors):
                return [max(tensors, key=lambda meta: meta.origin or "")] * count
        return [NEUTRAL] * count

    def _known_inside(self, jaxpr: Any, metas: Sequence[Meta]) -> list[Meta]:
        env = dict(zip(jaxpr.invars, metas, strict=True))

        def read(atom: Any) -> Meta:
            return NEUTRAL if isinstance(atom, Literal) else env.get(atom, NEUTRAL)

        for eqn in jaxpr.eqns:
            found = self.known(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    # --- matmuls ----------------------------------------------------------------------

    def _dot(
        self, eqn: Any, values: list[Any], metas: list[Meta], scopes: tuple[str, ...]
    ) -> list[Any]:
        matmul = self._describe(eqn, metas, scopes)
        tables = {name for kind, name in self.facts if kind == "table"}
        reason = reason_to_keep(eqn, metas, matmul, tables, self.chosen)
        if self.matmuls is not None:
            self.matmuls.append(matmul._replace(reason=reason))
        if reason:
            if matmul.param and matmul.dtype == "f32":
                self.facts.add(("f32", matmul.param))
            return eval_equation(eqn, values)
        self.facts.add(("fp8", ""))
        recipe = self.chosen.recipe
        (lhs_axes, rhs_axes), _ = eqn.params["dimension_numbers"]
        lhs, rhs = (jnp.asarray(value) for value in values)
        plan = Plan(
            dimensions=((tuple(lhs_axes), tuple(rhs_axes)), ((), ())),
            dtypes=(lhs.dtype, rhs.dtype),
            out_dtype=np.dtype(eqn.outvars[0].aval.dtype),
            weight_side=int(metas[1].is_param),
            recipe=recipe,
            out_sharding=eqn.params.get("out_sharding"),
        )
        if isinstance(recipe, MXFP8):
            return [mx_dot(plan, lhs, rhs)]
        seen, probe = self._state(matmul.param)
        return [fp8_dot(plan, lhs, rhs, seen, probe, shared=self.made)]

    def _describe(self, eqn: Any, metas: list[Meta], scopes: tuple[str, ...]) -> Matmul:
        origins = [meta.origin for meta in metas if meta.is_param and meta.origin]
        source = ""
        if self.matmuls is not None:
            frames = source_frames(eqn)
            source = f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown"
        dtypes = dict.fromkeys(short_name(var.aval.dtype) for var in eqn.invars)
        times = math.prod(self._lengths)
        return Matmul(
            param=origins[0] if len(origins) == 1 else "",
            scope="/".join(scopes),
            source=source,
            shape=sizes(eqn),
            times=times,
            dtype="×".join(dtypes),
            reason="",
            flops=flops(eqn) * times,
        )

    def _note_hidden(self, eqn: Any, scopes: tuple[str, ...]) -> None:
        """Records the matmuls of an equation that is run as it is written."""
        if self.matmuls is None:
            return
        for jaxpr in sub_jaxprs(eqn):
            for inner in jaxpr.eqns:
                if inner.primitive.name == "dot_general":
                    matmul = self._describe(inner, [NEUTRAL, NEUTRAL], scopes)
                    reason = f"inside of {eqn.primitive.name}, which runs as written"
                    self.matmuls.append(matmul._replace(reason=reason))
                self._note_hidden(inner, scopes)

    # --- where the walk is, for delayed scales ----------------------------------------

    def place(self, name: str) -> str:
        """Returns a name for the next place in this jaxpr, the same in every walk."""
        self._count += 1
        return f"{self._count}:{name}"

    def _state(self, param: str) -> tuple[Any, Any]:
        if not isinstance(self.chosen.recipe, DelayedScaling) or not self._delayed:
            return None, None
        place = self.place(param)
        if self.sites is not None:
            self.sites[self._path + place] = self._lengths
            return None, None
        if self.states is None:
            return None, None
        if place not in self.states:
            raise ValueError(
                f"The scales have no entry for the matmul `{self._path}{place}`: they "
                "were made for other arguments or another function. Make them anew with "
                "`.init(*args)`."
            )
        return self.states[place]

    def states_below(self, place: str) -> States:
        """Returns the delayed scales that belong to an equation's jaxprs."""
        start = place + "/"
        return {
            path.removeprefix(start): state
            for path, state in (self.states or {}).items()
            if path.startswith(start)
        }

    @contextlib.contextmanager
    def inside(
        self,
        place: str,
        states: States,
        *,
        length: int | None = None,
        delayed: bool = True,
    ) -> Iterator[None]:
        """Walks inside of an equation, with the scales that belong there."""
        names = ("_path", "_lengths", "_count", "_delayed", "states")
        before = {name: getattr(self, name) for name in names}
        self._path, self._count = f"{self._path}{place}/", 0
        self._lengths += () if length is None else (length,)
        self._delayed &= delayed
        self.states = None if self.states is None else states
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def rewrite(
        self,
        jaxpr: Any,
        avals: Sequence[Any],
        metas: Sequence[Meta],
        scopes: tuple[str, ...],
        *,
        place: str,
        states: States,
    ) -> tuple[Any, list[Meta]]:
        """Returns the rewritten jaxpr, which also takes the leaves of `states`."""
        body, consts = open_jaxpr(jaxpr)
        leaves, structure = jax.tree.flatten(states)
        more = [jax.typeof(leaf) for leaf in leaves]
        tables = frozenset(fact for fact in self.facts if fact[0] == "table")
        types = tuple(map(str, (*avals, *more)))
        key = (id(jaxpr), types, structure, tuple(metas), scopes, tables, self._delayed)
        records = self.matmuls is not None or self.sites is not None
        if key in self.cache and not records:
            new, known, facts, _ = self.cache[key]
            self.facts |= facts
            return new, known
        known: list[Meta] = []

        def run(*args: Any) -> list[Any]:
            inner = jax.tree.unflatten(structure, args[len(avals) :])
            with self.inside(place, inner):
                outs, found = self.run(body, consts, args[: len(avals)], metas, scopes)
            known[:] = found
            return typed(outs, body.outvars)

        new = jax.make_jaxpr(run)(*avals, *more)
        if not records:
            remember(self.cache, key, jaxpr, new, known, set(self.facts))
        return new, known


def _keeps_size(eqn: Any) -> bool:
    return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
