"""The visitor: that of `amp`, which runs the matmuls with a parameter in 8 bits."""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from mpx._amp._decide import Choice
from mpx._amp._emit import Autocast, low_operands
from mpx._amp._facts import DATA
from mpx._amp._hints import exchanged, outputs_first
from mpx._amp._rules import Rule
from mpx._casting._context import AMP_SCOPE, plain_matmuls, weight_grad_dtype
from mpx._casting._keep import FP8_SCOPE, KEPT_SCOPE
from mpx._casting._select import check_selectors
from mpx._fp8._decide import (
    TABLE,
    Matmul,
    Selection,
    Uses,
    reason_by_kind,
    reasons_to_keep,
    tables_of,
    uses_inside,
    uses_of,
)
from mpx._fp8._delayed import Scales
from mpx._fp8._dot import fp8_dot
from mpx._fp8._operands import MatmulSpec
from mpx._jax._compat import (
    has_explicit_axes,
    hi_remat,
    is_transposed,
    source_frames,
)
from mpx._jax._formats import short_name
from mpx._jax._sharding import in_auto_axes
from mpx._jax._warn import warn
from mpx._program import HANDLERS
from mpx._program._interpreter import Op, Outcome, Scopes, Traced, Values
from mpx._program._queries import (
    ATTENTION,
    HI_PRIMITIVE,
    MULTIPLIES,
    Equation,
    Position,
    equations,
    flops,
    holds,
    matmul_sizes,
    walk_inside,
)

# `dot_general` is changed, the others of `MULTIPLIES` are listed in the report.
_ENTERED = HANDLERS.keys() - {"while", "custom_jvp_call", "custom_vjp_call"}


@dataclasses.dataclass(eq=False, kw_only=True)
class Fp8Autocast(Autocast):
    """One call of a function under `fp8`: that of `amp`, with some matmuls in 8 bits.

    `found` also holds (reason, parameter) for each matmul with one; the reason of those in 8
    bits is "".
    """

    takes_bare_params: ClassVar[bool] = True

    chosen: Selection
    # Those that were met; what `amp` decides is recorded if these are
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)
    # The delayed scales that the running body may need; `None` to find out
    scales: Scales | None = None
    # The keys of delayed scales, with the lengths of the scans around them
    places: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    # How many matmuls with delayed scales were met, by parameter
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    tables: frozenset[str] = frozenset()  # The parameters that are embedding tables
    lengths: tuple[int, ...] = ()  # of the scans around the running body
    # By the `id` of an equation, what was counted and met before it: `amp` may visit its
    # body several times, and the last one holds
    _starts: dict[int, tuple[dict[str, int], int]] = dataclasses.field(
        default_factory=dict
    )
    # Until it has run: a copy of this visitor, which a derivative rule keeps, holds no arrays
    _traced: Traced | None = dataclasses.field(default=None, init=False)
    _delayed: bool = True
    _is_open: bool = True  # Whether matmuls that are met may run in 8 bits
    # What reads the values of the running body, and those that it returns
    _uses: dict[Any, Uses] = dataclasses.field(default_factory=dict)
    _results: Sequence[Uses | None] = ()

    # --- the function -----------------------------------------------------------------

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        own = tuple(x for x in self.chosen.keep if isinstance(x, type))
        return (*own, *super().kept_types)

    def tracing(self) -> contextlib.AbstractContextManager[object]:
        return plain_matmuls()

    def start(self, traced: Traced) -> Traced:
        """Finds the embedding tables, and what the user selects."""
        self._check_selectors(traced)
        self._traced = traced = super().start(traced)
        self.tables = tables_of(self, traced)
        return traced

    def finish(self, outs: Values) -> Values:
        """Warns if nothing was changed, and around a gradient."""
        traced, self._traced = self._traced, None
        assert traced is not None
        notes = [x for x in self.found if isinstance(x, tuple)]  # `amp` has others
        # Of a gradient the results have the shapes of the parameters, too.
        names = {name for _, name in notes}
        shapes = {x.shape for name, x in traced.named_arrays() if name in names}
        is_gradient = shapes and shapes <= {x.aval.shape for x in traced.jaxpr.outvars}
        if is_gradient and any(map(is_transposed, equations(traced.jaxpr))):
            warn(_GRADIENT)
        elif traced.has_params and self.decisions is None and "" not in dict(notes):
            notes = [x for x in notes if x[1]] or notes
            reasons = collections.Counter(reason for reason, _ in notes)
            often = max(reasons, key=lambda x: (reasons[x], x), default="there is none")
            such = min((name for reason, name in notes if reason == often), default="")
            what = f"matmuls such as that with `{such}`" if such else "all matmuls"
            warn(_NOTHING.format(what=what, reason=often))
            self.found.discard("highest")  # of which `amp` would warn
        return super().finish(outs)

    def _check_selectors(self, traced: Traced) -> None:
        """Raises for strings and types of the user that select nothing."""
        if not traced.has_params or not (self.chosen.keep or self.chosen.include):
            return
        scopes = [(scope, None) for scope in traced.places()[0]]
        called = {scope.rpartition("/")[2] for scope, _ in scopes}
        was_called = lambda kind: KEPT_SCOPE + kind.__name__ in called  # noqa: E731
        chosen = {"keep": self.chosen.keep, "include": self.chosen.include}
        for what, selectors in chosen.items():
            # Predicates are asked about matmuls.
            found = [x for x in selectors if isinstance(x, str | type)]
            named = [*traced.named_arrays(), *scopes]
            check_selectors(found, what, named, was_called)

    # --- equations --------------------------------------------------------------------

    def run_equations(self, scopes: Scopes) -> None:
        outer = self._uses
        self._uses = uses_of(self.frame.jaxpr, self._results) if self._is_open else {}
        try:
            super().run_equations(scopes)
        finally:
            self._uses = outer

    def emit(self, op: Op, choice: Choice) -> Values | Outcome:
        """Runs an equation as it was decided, or in 8 bits."""
        eqn, name = op.eqn, op.eqn.primitive.name
        if not self._is_open:
            return super().emit(op, choice)
        if name == "dot_general":
            return self._dot(op, choice)
        if _may_enter(eqn):
            if name != "cond":
                self._starts[id(eqn)] = dict(self.counts), len(self.matmuls)
            if choice.how == "original" and holds(eqn, MULTIPLIES):
                return HANDLERS[name](self, op)  # whose equations are decided in turn
        else:
            self._record(op)
        return super().emit(op, choice)

    def _dot(self, op: Op, choice: Choice) -> Values | Outcome:
        """Runs a matmul of 16-bit operands in 8 bits, or as it was decided."""
        eqn, is_cast, is_inner = op.eqn, choice.how == "matmul", AMP_SCOPE in op.scopes
        dtypes = [short_name(self.dtype)] * 3 if is_cast else _dtypes_of(eqn)
        kept = choice.reason if choice.how == "original" and not is_inner else ""
        matmul = self._describe(op, dtypes, math.prod(self.lengths), kept)
        if matmul.reason:
            if is_inner and {*dtypes} == {short_name(self.dtype)}:
                choice = Choice("matmul", Rule.LOW)  # its gradient may leave it in f32
            return super().emit(op, choice)
        values = low_operands(self, op)[0] if is_cast else op.values
        lhs, rhs = (jnp.asarray(value) for value in values)
        side, numbers = int(op.facts[1].is_weight), eqn.params["dimension_numbers"]
        if turned := exchanged(op, lhs, rhs):
            ((lhs, rhs), numbers), side = turned, 1 - side
        weight, param = (lhs, rhs)[side], matmul.param
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
            place=() if self.decisions is None else (param, *source_frames(eqn)),
        )
        sharding = eqn.outvars[0].aval.sharding

        def product(lhs: Array, rhs: Array) -> Array:
            seen, probe = self._next_scale(param)
            out = fp8_dot(spec, lhs, rhs, seen, probe, shared=self.frame.made)
            return outputs_first(out) if turned else out

        # Blocks are other axes than those of a mesh: XLA finds out how they are sharded. But
        # what a derivative saves there cannot leave a `shard_map`.
        if spec.recipe.in_blocks and not sharding.mesh.manual_axes:
            product = in_auto_axes(product, sharding)
        with jax.named_scope(FP8_SCOPE):
            return [product(lhs, rhs)]

    def _describe(
        self,
        op: Op,
        dtypes: Sequence[str],
        times: int,
        kept: str = "",
        reason: str = "",
    ) -> Matmul:
        """Returns a matmul with the reason against 8 bits, and adds it to `matmuls`."""
        eqn, chosen = op.eqn, self.chosen
        weights = [fact for fact in op.facts[:2] if fact.is_weight]
        frames = () if self.decisions is None else source_frames(eqn)
        *shape, count = matmul_sizes(eqn)
        matmul = Matmul(
            param=(weights[0].name or "") if len(weights) == 1 else "",
            scope="/".join(scope for scope in op.scopes if scope != AMP_SCOPE),
            source=f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown",
            shape=tuple(shape),
            times=times * count,
            dtype="×".join(dict.fromkeys(dtypes[:2])),
            reason=reason,
            flops=flops(eqn) * times,
            primitive=eqn.primitive.name,
            format=chosen.recipe.kind,
        )
        if not reason:
            uses = self._uses.get(eqn.outvars[0], frozenset())
            if any(fact.names & self.tables for fact in weights):
                uses |= {TABLE}
            why = {"purposes": uses, "kept": kept}
            reasons = reasons_to_keep(chosen, op, matmul, dtypes, **why)
            matmul = matmul._replace(reason=next(reasons, ""))
        is_dot = eqn.primitive.name == "dot_general" and not reason
        self.found.add((matmul.reason, matmul.param if is_dot else ""))
        self.matmuls.append(matmul)
        return matmul

    def _record(self, op: Op) -> None:
        """Records the matmuls in an equation that runs as `amp` decides."""
        here = Position(op.eqn, op.scopes, math.prod(self.lengths))
        if op.eqn.primitive.name in MULTIPLIES:
            self._describe(op, _dtypes_of(op.eqn), here.times)
        reason = _INSIDE.format(name=op.eqn.primitive.name)
        for inner, scopes, times, _ in walk_inside(here):
            if inner.primitive.name in MULTIPLIES:
                unknown = Op(inner, [], [DATA] * len(inner.invars), scopes)
                self._describe(unknown, _dtypes_of(inner), times, reason=reason)

    def tell(self, eqn: Equation, scopes: Scopes, **fields: Any) -> None:
        super().tell(eqn, scopes, **fields)
        if self.decisions is None or fields.get("primitive") not in ATTENTION:
            return
        # Attention that was recognised: it has no equation.
        told, times = self.decisions[-1], math.prod(self.lengths)
        (batch, rows, heads, size), (_, keys, *_), _ = told.shapes
        count = ATTENTION[told.primitive] * batch * heads * times
        kind, dtype = self.chosen.recipe.kind, short_name(self.dtype)
        reason = reason_by_kind(told.primitive, self.chosen)
        place = ("", told.scope, told.source, (rows, size, keys), count, dtype)
        flops = told.flops * times
        self.matmuls.append(Matmul(*place, reason, flops, told.primitive, kind))

    # --- bodies -----------------------------------------------------------------------

    def more_inputs(self, op: Op) -> Scales | None:
        """Returns the delayed scales that an equation's body may need.

        They are those of its parameters. A scan takes those of its own length.
        """
        if not self.chosen.recipe.has_state:
            return None
        names = {x.name for x in op.facts if x.is_weight}
        length = op.eqn.params["length"] if op.eqn.primitive.name == "scan" else None
        return {
            key: (seen, probe)
            for key, (seen, probe) in (self.scales or {}).items()
            # The last axis of a probe is for three tensors.
            if key.rpartition(":")[0] in names
            and length in (None, *probe.shape[:-1][:1])
        }

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: Scales | None) -> Iterator[None]:
        """Enters a body with what belongs there."""
        names = ("lengths", "scales", "_delayed", "_is_open", "_results")
        before = {name: getattr(self, name) for name in names}
        name = eqn.primitive.name
        if id(eqn) in self._starts:
            counts, met = self._starts[id(eqn)]
            self.counts = dict(counts)
            del self.matmuls[met:]
        if name == "scan":
            self.lengths += (eqn.params["length"],)
        # Each device scales what it holds: delayed scales would need a maximum over
        # devices, where the gradient of a shared value is a sum.
        self._delayed &= name != "shard_map"
        self.scales = None if self.scales is None else more or {}
        self._results = self._uses_inside(eqn)
        self._is_open &= _may_enter(eqn)
        try:
            with super().inside(eqn, more):
                yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _uses_inside(self, eqn: Equation) -> tuple[Uses | None, ...]:
        """Returns what reads the results of a body."""
        found = [self._uses.get(var) for var in eqn.outvars]
        return tuple(uses_inside(eqn, found)) if self._is_open else ()

    def cache_key(
        self, eqn: Equation, more: Scales | None
    ) -> tuple[PyTree, ...] | None:
        is_first = self.chosen.recipe.has_state and self.scales is None
        if self.decisions is not None or is_first:
            return None  # what is cached is not visited
        # Delayed scales differ from one use of a parameter to the next: what was counted
        # before says which of them come first.
        counts = tuple(self.counts.items()) if more else ()
        own = (self._is_open, self._delayed, self.lengths, self.tables)
        return (super().cache_key(eqn, more), *own, self._uses_inside(eqn), counts)

    def _next_scale(self, param: str) -> tuple[Any, Any]:
        """Returns maxima seen before and probe of the next matmul with a parameter."""
        if not self.chosen.recipe.has_state or not self._delayed:
            return None, None
        # The key does not tell where in the program a matmul is, so that another `jit` or
        # `checkpoint` around a layer, or another JAX, leaves a saved state usable.
        number = self.counts.get(param, 0)
        self.counts[param], key = number + 1, f"{param}:{number}"
        self.places[key] = self.lengths
        found = (self.scales or {}).get(key)
        return found if found is not None and found[1].ndim == 1 else (None, None)


def _may_enter(eqn: Equation) -> bool:
    """Returns whether matmuls inside an equation may run in 8 bits."""
    name = eqn.primitive.name
    return name in _ENTERED and (name != HI_PRIMITIVE or hi_remat(eqn) is not None)


def _dtypes_of(eqn: Equation) -> list[str]:
    """Returns the dtypes of both operands of a product and of its result."""
    atoms = (*eqn.invars[:2], eqn.outvars[0])
    return [short_name(x.aval.dtype) for x in atoms]


_INSIDE = "inside {name}, which fp8 does not enter"
_GRADIENT = (
    "`fp8` is around a gradient, and sees only a part of its matmuls: those that make the "
    "gradients of parameters stay in 16 bits, and the formats are those of a forward pass. "
    "Take the gradient of its result: `jax.grad(fp8(loss))`."
)
_NOTHING = (
    "`fp8` changed nothing: {what} stay as they are ({reason}). `mpx.inspect.report` gives "
    "the reason for each. Change the model or the options, such as `params` (the arguments "
    "that hold the weights) or `min_gain`, or leave `fp8` out."
)
