"""The visitor: runs the matmuls with a parameter in 8 bits, and all else as written.

Beside a value it keeps its source: which parameters it is computed from, if only they are.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._amp._call import run_traced
from mpx._amp._decide import Choice
from mpx._amp._decide import is_low_ragged as is_low
from mpx._amp._emit import Autocast, low_operands, multiply
from mpx._amp._facts import CONSTANT, DATA, Source, argument, closed_over, follow, join
from mpx._amp._hints import exchanged, outputs_first
from mpx._amp._rules import AmpRules
from mpx._casting._context import COMPUTE, Reduce, plain_matmuls, weight_grad_dtype
from mpx._casting._keep import FP8_SCOPE, KEPT_SCOPE
from mpx._casting._select import check_selectors
from mpx._fp8._blocks import block_dot
from mpx._fp8._decide import (
    LINEAR,
    Matmul,
    Selection,
    Study,
    reason_to_keep,
    sizes,
    study,
)
from mpx._fp8._delayed import Scales
from mpx._fp8._dot import fp8_dot
from mpx._fp8._operands import MatmulSpec
from mpx._fp8._recipes import DelayedScaling
from mpx._jax._compat import (
    eval_equation,
    has_explicit_axes,
    hi_remat,
    is_transposed,
    open_jaxpr,
    source_frames,
)
from mpx._jax._formats import short_name
from mpx._program import HANDLERS
from mpx._program._flow import after
from mpx._program._interpreter import (
    Frame,
    Kind,
    Op,
    Outcome,
    Scopes,
    Traced,
    Transformation,
    Values,
    arrays_of,
)
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    GROUPED,
    HI_PRIMITIVE,
    MATMULS,
    Equation,
    Position,
    equations,
    flops,
    holds,
    walk_inside,
)
from mpx._wire._product import multiply_for

# `dot_general` is changed, the others are listed in the report.
_MULTIPLIES = frozenset((*MATMULS, *ATTENTION, *CROSS_ENTROPY, GROUPED))
_ENTERED = HANDLERS.keys() - {"while", "custom_jvp_call", "custom_vjp_call"}


@dataclasses.dataclass(eq=False, kw_only=True)
class Fp8(Transformation):
    """One call of a function under `fp8`.

    `found` holds ("fp8", "") and ("f32", parameter) for what was met.

    Attributes:
        purposes: Parameters that stay as they are, and why: see `study`.
        reduce: In which dtype weight gradients leave their matmuls.
        may_cast: Whether a function whose matmuls are f32 is run in bf16.
        is_cast: Whether it was.
        matmuls: Where matmuls are recorded, for a report.
        scales: The delayed scales that the running body may need; `None` to find out.
        wanted: The keys of delayed scales, with the lengths of the scans around them.
        counts: How many matmuls with delayed scales were met, by parameter.
    """

    unknown: ClassVar[Source] = DATA
    takes_bare_params: ClassVar[bool] = True

    chosen: Selection
    purposes: dict[str, str] = dataclasses.field(default_factory=dict)
    reduce: Reduce = None
    may_cast: bool = True
    is_cast: bool = False
    matmuls: list[Matmul] | None = None
    scales: Scales | None = None
    wanted: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    lengths: tuple[int, ...] = ()  # of the scans around the running body
    _delayed: bool = True

    # --- the function -----------------------------------------------------------------

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple(x for x in self.chosen.keep if isinstance(x, type))

    def tracing(self) -> contextlib.AbstractContextManager[object]:
        return plain_matmuls()

    def argument_fact(self, name: str, is_param: bool, leaf: PyTree) -> Source:
        return argument(name, leaf, is_param=is_param)

    def literal_fact(self, atom: PyTree) -> Source:
        return CONSTANT

    def constant_fact(self, value: PyTree) -> Source:
        return closed_over(value)

    def start(self, traced: Traced) -> Traced:
        """Returns the function, cast by `amp` to bf16 if it was written in f32."""
        found, pairs = (
            self.look_at(traced),
            zip(traced.named, traced.arrays, strict=True),
        )
        stored = {leaf.dtype for (name, _), leaf in pairs if name in found.layers}
        if not self.may_cast or stored | found.dtypes != {np.dtype(np.float32)}:
            return traced
        self.is_cast = True
        bf16 = np.dtype(jnp.bfloat16)
        amp = Autocast(dtype=bf16, rules=AmpRules(), cache=self.cache, reduce=COMPUTE)

        def run(*arrays: Any) -> Values:
            return run_traced(amp, traced._replace(arrays=list(arrays)))

        jaxpr, consts = open_jaxpr(jax.make_jaxpr(run)(*traced.arrays))
        return traced._replace(jaxpr=jaxpr, consts=consts)

    def look_at(self, traced: Traced) -> Study:
        """Finds what the parameters of a function are for, and what the user selects."""
        self._check_selectors(traced)
        pairs = [*zip(traced.named, traced.arrays, strict=True)]
        facts = [self.argument_fact(*named, leaf) for named, leaf in pairs]
        found = study(traced.jaxpr, dict(zip(traced.jaxpr.invars, facts, strict=True)))
        self.purposes = found.purposes
        # Of a gradient the results have the shapes of the parameters, too.
        shapes = {x.shape for (name, _), x in pairs if name in found.layers}
        returned = shapes and shapes <= {x.aval.shape for x in traced.jaxpr.outvars}
        if returned and any(map(is_transposed, equations(traced.jaxpr))):
            self.found.add(("gradient", ""))
        return found

    def _check_selectors(self, traced: Traced) -> None:
        """Raises for strings and types of the user that select nothing."""
        if not traced.has_params or not (self.chosen.keep or self.chosen.include):
            return
        scopes = traced.places()[0]
        called = {scope.rpartition("/")[2] for scope in scopes}
        was_called = lambda kind: KEPT_SCOPE + kind.__name__ in called  # noqa: E731
        named = [*traced.named_arrays(), *((scope, None) for scope in scopes)]
        chosen = {"keep": self.chosen.keep, "include": self.chosen.include}
        for what, selectors in chosen.items():
            # Predicates are asked about matmuls.
            found = [x for x in selectors if isinstance(x, str | type)]
            check_selectors(found, what, named, was_called)

    # --- equations --------------------------------------------------------------------

    def equation(self, op: Op) -> Outcome:
        """Runs one equation; a matmul in 8 bits if it may."""
        eqn, name = op.eqn, op.eqn.primitive.name
        if name in LINEAR:
            return self._dot(op), self._after(eqn, op.facts)
        # A report looks for more than what is changed.
        wanted = LINEAR if self.matmuls is None else _MULTIPLIES
        if _may_enter(eqn) and holds(eqn, wanted):
            return HANDLERS[name](self, op)
        if self.matmuls is not None:
            self._record(op)
        return eval_equation(eqn, op.values), self._after(eqn, op.facts)

    def _after(self, eqn: Equation, facts: list[Source]) -> list[Source]:
        """Returns the sources of the results of an equation that runs as written."""
        return list(after(eqn, facts, follow, self.literal_fact, DATA))

    def _dot(self, op: Op) -> Values:
        matmul = self.judge(op)
        if matmul.reason:
            return self._kept(op)
        return self.multiply(op, op.values, matmul.param, self.frame)

    def judge(self, op: Op, low: np.dtype | None = None) -> Matmul:
        """Decides about a matmul, whose operands may be cast to a dtype before."""
        times = math.prod(self.lengths)
        matmul = self._describe(op.eqn, op.facts, op.scopes, times, low)
        if self.matmuls is not None:
            self.matmuls.append(matmul)
        if not matmul.reason:
            self.found.add(("fp8", ""))
        elif matmul.param and matmul.dtype == "f32":
            self.found.add(("f32", matmul.param))
        return matmul

    def multiply(self, op: Op, values: Values, param: str, frame: Frame) -> Values:
        """Runs a matmul of 16-bit operands in 8 bits."""
        eqn = op.eqn
        lhs, rhs = (jnp.asarray(value) for value in values)
        side, numbers = int(op.facts[1].is_weight), eqn.params["dimension_numbers"]
        if turned := exchanged(op, lhs, rhs):
            ((lhs, rhs), numbers), side = turned, 1 - side
        weight = (lhs, rhs)[side]
        shardings = (jax.typeof(x).sharding for x in (lhs, rhs))
        spec = MatmulSpec(
            numbers,
            weight.dtype,
            side,
            self.chosen.recipe,
            out_sharding=eqn.params.get("out_sharding"),
            weight_grad=weight_grad_dtype(self.reduce, weight, weight.dtype),
            shardings=tuple(
                x if has_explicit_axes(x.mesh) else None for x in shardings
            ),
            place=() if self.matmuls is None else (param, *source_frames(eqn)),
        )
        with jax.named_scope(FP8_SCOPE):
            if self.chosen.recipe.in_blocks:
                out = block_dot(spec, lhs, rhs)
            else:
                seen, probe = self._next_scale(param)
                out = fp8_dot(spec, lhs, rhs, seen, probe, shared=frame.made)
            return [outputs_first(out) if turned else out]

    def _kept(self, op: Op) -> Values:
        """Runs a matmul as it is written."""
        eqn, values = op.eqn, arrays_of(op.values)
        low = values[0].dtype
        dtypes = {values[1].dtype, eqn.outvars[0].aval.dtype, low}
        sides = [i for i, fact in enumerate(op.facts[:2]) if fact.is_weight]
        if dtypes in ({np.dtype(jnp.bfloat16)}, {np.dtype(np.float16)}) and sides:
            grads = {i: weight_grad_dtype(self.reduce, values[i], low) for i in sides}
            wide = {i: (values[i], x) for i, x in grads.items() if x != low}
            if wide:
                return [multiply_for(eqn, values, wide)]
        if is_low(eqn):
            return multiply(eqn, values, eqn.outvars[0].aval.dtype)
        return eval_equation(eqn, values)

    def _describe(
        self,
        eqn: Equation,
        facts: Sequence[Source],
        scopes: Scopes,
        times: int,
        low: np.dtype | None = None,
    ) -> Matmul:
        weights = [fact for fact in facts[:2] if fact.is_weight]
        frames = () if self.matmuls is None else source_frames(eqn)
        atoms = (*eqn.invars[:2], eqn.outvars[0])
        dtypes = [low or np.dtype(var.aval.dtype) for var in atoms]
        shape, count = sizes(eqn)
        matmul = Matmul(
            param=(weights[0].name or "") if len(weights) == 1 else "",
            scope="/".join(scopes),
            source=f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown",
            shape=shape,
            times=times * count,
            dtype="×".join(dict.fromkeys(map(short_name, dtypes[:2]))),
            reason="",
            flops=flops(eqn) * times,
            primitive=eqn.primitive.name,
            format=self.chosen.recipe.kind,
        )
        read = set().union(*(fact.names for fact in weights)) & self.purposes.keys()
        purpose = self.purposes[min(read)] if read else ""
        are_params = [fact.is_weight for fact in facts[:2]]
        reason = reason_to_keep(
            eqn, dtypes, are_params, matmul, purpose=purpose, chosen=self.chosen
        )
        return matmul._replace(reason=reason)

    def _record(self, op: Op) -> None:
        """Records the matmuls in an equation that runs as written."""
        assert self.matmuls is not None
        eqn, count = op.eqn, math.prod(self.lengths)
        if eqn.primitive.name in _MULTIPLIES:
            self.matmuls.append(self._describe(eqn, op.facts, op.scopes, count))
        reason = f"inside {eqn.primitive.name}, which runs as written"
        for inner, scopes, times, _ in walk_inside(Position(eqn, op.scopes, count)):
            if inner.primitive.name in _MULTIPLIES:
                unknown = [self.unknown] * len(inner.invars)
                found = self._describe(inner, unknown, scopes, times)
                self.matmuls.append(found._replace(reason=reason))

    # --- bodies -----------------------------------------------------------------------

    def fact_inside(self, fact: Source, var: PyTree, kind: Kind) -> Source:
        return DATA if kind in ("carry", "tangent") else fact

    def result_facts(
        self, outs: Sequence[Any], known: Sequence[Source]
    ) -> list[Source]:
        return list(known)

    def join_facts(self, facts: Sequence[Source]) -> Source:
        return join(facts)

    def more_inputs(self, op: Op) -> Scales:
        """Returns the delayed scales that an equation's body may need.

        They are those of all further matmuls with its parameters. A scan takes those of its
        own length.
        """
        found: Scales = {}
        length = op.eqn.params["length"] if op.eqn.primitive.name == "scan" else None
        for name in sorted({x.name for x in op.facts if x.is_weight and x.name}):
            for number in itertools.count(self.counts.get(name, 0)):
                item = (self.scales or {}).get(_key(name, number))
                # The last axis of a probe is for three tensors.
                if item is None or length not in (None, *item[1].shape[:-1][:1]):
                    break
                found[_key(name, number)] = item
        return found

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: Scales | None) -> Iterator[None]:
        """Enters a body with the delayed scales that belong there."""
        before = self.lengths, self._delayed, self.scales
        name = eqn.primitive.name
        if name == "scan":
            self.lengths += (eqn.params["length"],)
        # Each device scales what it holds: delayed scales would need a maximum over
        # devices, where the gradient of a shared value is a sum.
        self._delayed &= name != "shard_map"
        self.scales = None if self.scales is None else more or {}
        try:
            yield
        finally:
            self.lengths, self._delayed, self.scales = before

    def cache_key(self, more: Scales | None) -> tuple[PyTree, ...] | None:
        is_delayed = isinstance(self.chosen.recipe, DelayedScaling)
        if self.matmuls is not None or (is_delayed and self.scales is None):
            return None  # what is cached is not visited
        # Delayed scales differ from one use of a parameter to the next: what was counted
        # before says which of them come first.
        return tuple(self.counts.items()) if more else (), self._delayed

    def _next_scale(self, param: str) -> tuple[Any, Any]:
        """Returns maxima seen before and probe of the next matmul with a parameter."""
        if not isinstance(self.chosen.recipe, DelayedScaling) or not self._delayed:
            return None, None
        number = self.counts.get(param, 0)
        self.counts[param], key = number + 1, _key(param, number)
        self.wanted[key] = self.lengths
        found = (self.scales or {}).get(key)
        return found if found is not None and found[1].ndim == 1 else (None, None)


@dataclasses.dataclass(eq=False, kw_only=True)
class Fp8InAmp(Autocast):
    """`fp8` and `amp` in one pass; otherwise `fp8` reads what `amp` wrote, in another."""

    layers: Fp8
    _is_open: bool = True  # Whether matmuls that are met may run in 8 bits

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return self.layers.kept_types

    def start(self, traced: Traced) -> Traced:
        """Finds what the parameters are for."""
        self.layers.look_at(traced)
        return super().start(traced)

    def emit(self, op: Op, choice: Choice) -> Values | Outcome:
        """Runs an equation as it was decided, or in 8 bits."""
        if op.eqn.primitive.name == "dot_general" and self._is_open:
            is_cast = choice.how == "matmul"
            matmul = self.layers.judge(op, self.dtype if is_cast else None)
            if not matmul.reason:
                values = low_operands(self, op)[0] if is_cast else op.values
                return self.layers.multiply(op, values, matmul.param, self.frame)
        return super().emit(op, choice)

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: object) -> Iterator[None]:
        outer = self._is_open
        self._is_open &= _may_enter(eqn)
        try:
            with self.layers.inside(eqn, None), super().inside(eqn, more):
                yield
        finally:
            self._is_open = outer

    def cache_key(self, more: object) -> tuple[PyTree, ...]:
        return (*super().cache_key(more), self._is_open, self.layers.lengths)


def _may_enter(eqn: Equation) -> bool:
    """Returns whether matmuls inside an equation may run in 8 bits."""
    name = eqn.primitive.name
    return name in _ENTERED and (name != HI_PRIMITIVE or hi_remat(eqn) is not None)


def _key(param: str, number: int) -> str:
    """Returns the key of the scales of one use of a parameter.

    It does not tell where in the program that is, so that another `jit` or `checkpoint`
    around a layer, or another JAX, leaves a saved state usable.
    """
    return f"{param}:{number}"
