"""The interpreter: evaluates a jaxpr again, with its matmuls in 8 bits.

It is autocast's interpreter with one rule. What it knows of a value is whether it comes
from the parameters alone, through operations that only move or cast numbers.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._apply import ATTENTION_MATMULS, flops, repetitions
from mpx._amp._calls import remember
from mpx._amp._interpreter import Autocast
from mpx._amp._rules import MATMULS
from mpx._amp._values import NEUTRAL, Meta, Role
from mpx._compat import (
    Literal,
    eval_equation,
    open_jaxpr,
    scopes_of,
    source_frames,
    sub_jaxprs,
)
from mpx._formats import short_name
from mpx._fp8._dot import fp8_dot
from mpx._fp8._mx import mx_dot
from mpx._fp8._operands import Plan
from mpx._fp8._recipes import MXFP8, DelayedScaling
from mpx._fp8._recursion import HANDLERS, States, typed
from mpx._fp8._sites import (
    Matmul,
    Selection,
    reason_to_keep,
    sizes,
)
from mpx._keep import was_called
from mpx._select import check_selectors


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


_CHANGED = frozenset({"dot_general"})
# What multiplies, though not in 8 bits: the report lists it.
_MULTIPLIES = frozenset({*MATMULS, *ATTENTION_MATMULS})


def has_any(jaxpr: Any, names: frozenset[str]) -> bool:
    """Whether a jaxpr holds one of these primitives, at any depth."""
    return any(
        eqn.primitive.name in names
        or any(has_any(inner, names) for inner in sub_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


@dataclasses.dataclass(eq=False)
class Walk(Autocast):
    """One call of a function under `fp8`.

    Attributes:
        chosen: What the user chose.
        param_names: The names of the arguments that hold parameters.
        matmuls: Where matmuls are recorded; `None` to record none.
        sites: Where the keys of delayed scales are recorded, with the lengths of the
            scans around them; `None` to record none.
        states: The delayed scales that the place where the walk is may need.
        missing: The keys of matmuls for which `states` has nothing that fits.
        used: The other keys.
        counts: How many matmuls with delayed scales were met, by parameter.
        facts: What was found: ("table", parameter), ("fp8", ""), ("f32", parameter).
    """

    chosen: Selection = dataclasses.field(kw_only=True)
    param_names: frozenset[str] = frozenset()
    matmuls: list[Matmul] | None = None
    sites: dict[str, tuple[int, ...]] | None = None
    states: States | None = None
    missing: set[str] = dataclasses.field(default_factory=set)
    used: set[str] = dataclasses.field(default_factory=set)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    facts: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    _lengths: tuple[int, ...] = ()
    _delayed: bool = True

    def start(self, named: list[tuple[str, Any]], places: Any) -> None:
        """Checks that the user's selectors select something."""
        if places is None or not (self.chosen.keep or self.chosen.include):
            return
        names = [*named, *((scope, None) for scope in places()[0])]
        for what in ("keep", "include"):
            # Predicates are asked about matmuls.
            chosen = [
                x for x in getattr(self.chosen, what) if isinstance(x, str | type)
            ]
            check_selectors(chosen, what, names, was_called)

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple(x for x in self.chosen.keep if isinstance(x, type))

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
        # A report looks for more than what is changed.
        wanted = _CHANGED if self.matmuls is None else _MULTIPLIES
        if name in HANDLERS and any(has_any(x, wanted) for x in sub_jaxprs(eqn)):
            return HANDLERS[name](self, eqn, values, metas, scopes)
        if self.matmuls is not None:
            self._record(eqn, metas, scopes)
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
        if self.matmuls is not None:
            self.matmuls.append(matmul)
        if matmul.reason:
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
        dtypes = dict.fromkeys(short_name(var.aval.dtype) for var in eqn.invars[:2])
        shape, count = sizes(eqn)
        times = math.prod(self._lengths)
        matmul = Matmul(
            param=origins[0] if len(origins) == 1 else "",
            scope="/".join(scopes),
            source=source,
            shape=shape,
            times=times * count,
            dtype="×".join(dtypes),
            reason="",
            flops=flops(eqn) * times,
            primitive=eqn.primitive.name,
        )
        tables = {name for kind, name in self.facts if kind == "table"}
        reason = reason_to_keep(eqn, metas, matmul, tables, self.chosen)
        return matmul._replace(reason=reason)

    def _record(self, eqn: Any, metas: list[Meta], scopes: tuple[str, ...]) -> None:
        """Records what multiplies in an equation that is run as it is written."""
        if self.matmuls is None:
            return
        if eqn.primitive.name in _MULTIPLIES:
            self.matmuls.append(self._describe(eqn, metas, scopes))
        reason = f"inside {eqn.primitive.name}, which runs as written"
        for jaxpr in sub_jaxprs(eqn):
            with self.inside(None, length=repetitions(eqn)):
                first = len(self.matmuls)
                for inner in jaxpr.eqns:
                    unknown = [NEUTRAL] * len(inner.invars)
                    self._record(inner, unknown, scopes + scopes_of(inner))
            for i in range(first, len(self.matmuls)):
                self.matmuls[i] = self.matmuls[i]._replace(reason=reason)

    # --- where the walk is, for delayed scales ----------------------------------------

    def _state(self, param: str) -> tuple[Any, Any]:
        if not isinstance(self.chosen.recipe, DelayedScaling) or not self._delayed:
            return None, None
        number = self.counts.get(param, 0)
        self.counts[param], key = number + 1, _key(param, number)
        if self.sites is not None:
            self.sites[key] = self._lengths
        if self.states is None:
            return None, None
        state = self.states.get(key)
        if state is None or state[1].ndim != 1:
            self.missing.add(key)
            return None, None
        self.used.add(key)
        return state

    def states_for(self, metas: Sequence[Meta], length: int | None = None) -> States:
        """Returns the delayed scales that an equation with these operands may need.

        They are those of the matmuls with these parameters that have not been met yet, of
        which some may come after the equation.

        Args:
            metas: What is known of the operands.
            length: The steps of a scan, which takes what has as many entries.
        """
        found: States = {}
        if self.states is None:
            return found
        for name in sorted(
            {meta.origin for meta in metas if meta.is_param and meta.origin}
        ):
            for number in itertools.count(self.counts.get(name, 0)):
                key = _key(name, number)
                state = self.states.get(key)
                if state is None:
                    break
                if length is not None and (
                    state[1].ndim < 2 or len(state[1]) != length
                ):
                    break
                found[key] = state
        return found

    @contextlib.contextmanager
    def inside(
        self,
        states: States | None,
        *,
        counts: Mapping[str, int] | None = None,
        length: int | None = None,
        delayed: bool = True,
    ) -> Iterator[None]:
        """Walks inside an equation.

        Args:
            states: The delayed scales that belong there, as values of its trace.
            counts: Where counting starts, if the equation may be walked again.
            length: How often the equation runs what is inside.
            delayed: Whether delayed scales can be used there.
        """
        before = self._lengths, self._delayed, self.states
        self._lengths += () if length is None else (length,)
        self._delayed &= delayed
        self.states = None if self.states is None else states
        if counts is not None:
            self.counts = dict(counts)
        try:
            yield
        finally:
            self._lengths, self._delayed, self.states = before

    def rewrite(
        self,
        jaxpr: Any,
        avals: Sequence[Any],
        metas: Sequence[Meta],
        scopes: tuple[str, ...],
        *,
        states: States,
    ) -> tuple[Any, list[Meta]]:
        """Returns the rewritten jaxpr, which also takes the leaves of `states`."""
        body, consts = open_jaxpr(jaxpr)
        leaves, structure = jax.tree.flatten(states)
        more = [jax.typeof(leaf) for leaf in leaves]
        tables = frozenset(fact for fact in self.facts if fact[0] == "table")
        # Delayed scales differ from one use of a parameter to the next: their keys are in
        # `structure`, and what was counted before says which of them come first.
        counts = tuple(self.counts.items()) if states else ()
        types = (*avals, *more)
        key = (id(jaxpr), types, structure, counts, tuple(metas), scopes, tables)
        key = (*key, self._delayed)
        records = self.matmuls is not None or self.sites is not None
        if key in self.cache and not records:
            new, known, facts, _ = self.cache[key]
            self.facts |= facts
            return new, known
        known: list[Meta] = []

        def run(*args: Any) -> list[Any]:
            inner = jax.tree.unflatten(structure, args[len(avals) :])
            with self.inside(inner):
                outs, found = self.run(body, consts, args[: len(avals)], metas, scopes)
            known[:] = found
            return typed(outs, body.outvars)

        new = jax.make_jaxpr(run)(*avals, *more)
        if not records:
            remember(self.cache, key, jaxpr, new, known, set(self.facts))
        return new, known


def _key(param: str, number: int) -> str:
    """Returns the key of the scales of one use of a parameter.

    It does not tell where in the program that is, so that another `jit` or `checkpoint`
    around a layer, or another JAX, leaves a saved state usable.
    """
    return f"{param}:{number}"


def _keeps_size(eqn: Any) -> bool:
    return math.prod(eqn.invars[0].aval.shape) == math.prod(eqn.outvars[0].aval.shape)
