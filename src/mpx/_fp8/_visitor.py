"""The visitor: runs the matmuls with a parameter in 8 bits, and all else as written.

The fact that it keeps beside a value is the name of the parameter that the value is, if
only operations that move or cast numbers lie between.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._autocast import Autocast
from mpx._amp._frameworks import Traced, Transformation
from mpx._amp._functions import run_traced
from mpx._amp._grouped import is_low, multiply, reason_by_device
from mpx._amp._policy import AmpRules
from mpx._casting._keep import KEPT_SCOPE
from mpx._casting._reduction import COMPUTE, Reduce, plain_matmuls, weight_grad_dtype
from mpx._casting._select import check_selectors
from mpx._fp8._codes import Codes, Encoding, More
from mpx._fp8._dot import fp8_dot
from mpx._fp8._follow import (
    SLICE,
    UNKNOWN,
    Weight,
    facts_after,
    matmul_dtypes,
    purposes,
)
from mpx._fp8._maxima import Scales
from mpx._fp8._mx import mx_dot
from mpx._fp8._operands import MatmulSpec, matmul_spec
from mpx._fp8._ragged import RaggedSpec, fp8_ragged_dot
from mpx._fp8._recipes import MXFP8, DelayedScaling
from mpx._fp8._selection import RAGGED, Matmul, Selection, reason_to_keep, sizes
from mpx._jax._compat import (
    eval_equation,
    hi_remat,
    open_jaxpr,
    source_frames,
)
from mpx._jax._formats import short_name
from mpx._program import HANDLERS
from mpx._program._flow import after
from mpx._program._interpreter import (
    Kind,
    Op,
    Outcome,
    Scopes,
    Values,
    arrays_of,
)
from mpx._program._provenance import CONSTANT, argument, closed_over, join
from mpx._program._queries import (
    ATTENTION,
    CROSS_ENTROPY,
    HI_PRIMITIVE,
    MATMULS,
    Equation,
    Position,
    flops,
    holds,
    walk_inside,
)
from mpx._wire._product import multiply_for

_CHANGED = RAGGED | {"dot_general"}
# The others are not changed, but listed in the report.
_MULTIPLIES = _CHANGED.union(MATMULS, ATTENTION, CROSS_ENTROPY)
_ENTERED = HANDLERS.keys() - {"while", "custom_jvp_call", "custom_vjp_call"}


@dataclasses.dataclass(eq=False, kw_only=True)
class Fp8(Transformation):
    """One call of a function under `fp8`.

    `found` holds ("fp8", "") and ("f32", parameter) for what was met.

    Attributes:
        chosen: The user's choices.
        purposes: Parameters that stay as they are, and why: see `purposes`.
        reduce: In which dtype weight gradients leave their matmuls.
        may_cast: Whether a function whose matmuls are f32 is run in bf16.
        is_cast: Whether it was.
        matmuls: Where matmuls are recorded; `None` to record none.
        keys: Where the keys of delayed scales are recorded, with the lengths of the scans
            around them; `None` to record none.
        scales: The delayed scales that the running body may need.
        probe_axes: The number of axes of the probe of one matmul.
        codes: Weights in 8 bits that it may need, `None` if none were made before.
        encodings: Where it is recorded how weights become operands; `None` to record none.
        missing: The keys of matmuls for which `scales` has nothing that fits.
        used: The other keys.
        counts: How many matmuls with delayed scales were met, by parameter.
    """

    unknown: ClassVar[Weight] = UNKNOWN
    takes_bare_params: ClassVar[bool] = True

    chosen: Selection
    purposes: dict[str, str] = dataclasses.field(default_factory=dict)
    reduce: Reduce = None
    may_cast: bool = True
    is_cast: bool = False
    matmuls: list[Matmul] | None = None
    keys: dict[str, tuple[int, ...]] | None = None
    scales: Scales | None = None
    probe_axes: int = 1
    codes: dict[str, Codes] | None = None
    encodings: dict[str, Encoding] | None = None
    missing: set[str] = dataclasses.field(default_factory=set)
    used: set[str] = dataclasses.field(default_factory=set)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    _lengths: tuple[int, ...] = ()
    _delayed: bool = True

    # --- the function -----------------------------------------------------------------

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple(x for x in self.chosen.keep if isinstance(x, type))

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        return plain_matmuls()

    def argument_fact(self, name: str, is_param: bool, leaf: Any) -> Weight:
        """Returns what is known of an argument's array."""
        source = argument(name, leaf, is_param=is_param)
        return Weight(source, None if self.encodings is None else ())

    def literal_fact(self, atom: Any) -> Weight:
        return Weight(CONSTANT)

    def constant_fact(self, value: Any) -> Weight:
        return Weight(closed_over(value))

    def start(self, traced: Traced) -> Traced:
        """Returns the function, cast by `amp` to bf16 if it was written in f32."""
        self._check_selectors(traced)
        facts = map(
            lambda x, leaf: self.argument_fact(*x, leaf).source,
            traced.named,
            traced.arrays,
        )
        sources = dict(zip(traced.jaxpr.invars, facts, strict=True))
        self.purposes = purposes(traced.jaxpr, sources)
        if not self.may_cast or not self._is_f32(traced):
            return traced
        self.is_cast = True
        amp = Autocast(
            dtype=np.dtype(jnp.bfloat16),
            rules=AmpRules(),
            cache=self.cache,
            reduce=COMPUTE,
        )

        def run(*arrays: Any) -> Values:
            return run_traced(amp, traced._replace(arrays=list(arrays)))

        jaxpr, consts = open_jaxpr(jax.make_jaxpr(run)(*traced.arrays))
        return traced._replace(jaxpr=jaxpr, consts=consts)

    def _check_selectors(self, traced: Traced) -> None:
        """Raises for strings and types of the user that select nothing."""
        if not traced.has_params or not (self.chosen.keep or self.chosen.include):
            return
        scopes = traced.places()[0]
        called = {scope.rpartition("/")[2] for scope in scopes}
        was_called = lambda kind: KEPT_SCOPE + kind.__name__ in called  # noqa: E731
        named = [*traced.named_arrays(), *((scope, None) for scope in scopes)]
        for what in ("keep", "include"):
            # Predicates are asked about matmuls.
            chosen = [
                x for x in getattr(self.chosen, what) if isinstance(x, str | type)
            ]
            check_selectors(chosen, what, named, was_called)

    def _is_f32(self, traced: Traced) -> bool:
        """Returns whether all matmuls with a parameter are f32, and the parameters, too."""
        # A parameter's label is its dtype.
        labels = {
            var: leaf.dtype.name
            for var, leaf, named in zip(
                traced.jaxpr.invars, traced.arrays, traced.named, strict=True
            )
            if named[1]
        }
        return matmul_dtypes(traced.jaxpr, labels, _CHANGED) == {"float32"}

    # --- equations --------------------------------------------------------------------

    def equation(self, op: Op) -> Outcome:
        """Runs one equation; a matmul in 8 bits if it may."""
        eqn, name = op.eqn, op.eqn.primitive.name
        if name in _CHANGED:
            return self._dot(op), self._after(eqn, op.facts)
        # A report looks for more than what is changed.
        wanted = _CHANGED if self.matmuls is None else _MULTIPLIES
        is_custom = name == HI_PRIMITIVE and hi_remat(eqn) is None
        if name in _ENTERED and not is_custom and holds(eqn, wanted):
            return HANDLERS[name](self, op)
        if self.matmuls is not None:
            self._record(op)
        return eval_equation(eqn, op.values), self._after(eqn, op.facts)

    def _after(self, eqn: Equation, facts: list[Weight]) -> list[Weight]:
        """Returns the facts of the results of an equation that runs as written."""
        return list(after(eqn, facts, facts_after, self.literal_fact, self.unknown))

    def _dot(self, op: Op) -> Values:
        eqn, values, facts, _ = op
        matmul = self._describe(eqn, facts, op.scopes, math.prod(self._lengths))
        if self.matmuls is not None:
            self.matmuls.append(matmul)
        if matmul.reason:
            if matmul.param and matmul.dtype == "f32":
                self.found.add(("f32", matmul.param))
            return self._kept(op)
        self.found.add(("fp8", ""))
        if eqn.primitive.name in RAGGED:
            return [self._ragged(op)]
        lhs, rhs = (jnp.asarray(value) for value in values)
        side = int(facts[1].name is not None)
        spec = matmul_spec(eqn, (lhs, rhs), side, self.chosen.recipe, self.reduce)
        if isinstance(self.chosen.recipe, MXFP8):
            return [mx_dot(spec, lhs, rhs)]
        key = self._next_key(matmul.param)
        seen, probe = self._scale(key)
        self._record_weight(key, facts[side], spec)
        codes = (self.codes or {}).get(key)
        made = self.frame.made
        return [fp8_dot(spec, lhs, rhs, seen, probe, shared=made, codes=codes)]

    def _kept(self, op: Op) -> Values:
        """Runs a matmul as it is written."""
        eqn, values = op.eqn, arrays_of(op.values)
        low = values[0].dtype
        dtypes = {values[1].dtype, eqn.outvars[0].aval.dtype, low}
        sides = [i for i, fact in enumerate(op.facts[:2]) if fact.name is not None]
        if dtypes in ({np.dtype(jnp.bfloat16)}, {np.dtype(np.float16)}) and sides:
            grads = {i: weight_grad_dtype(self.reduce, values[i], low) for i in sides}
            wide = {i: (values[i], x) for i, x in grads.items() if x != low}
            if wide:
                return [multiply_for(eqn, values, wide)]
        if is_low(eqn):
            return multiply(eqn, values, eqn.outvars[0].aval.dtype)
        return eval_equation(eqn, values)

    def _ragged(self, op: Op) -> Any:
        x, w, sizes = (jnp.asarray(value) for value in op.values)
        # Selected without a GPU, or with one that has the kernel.
        in_kernel = reason_by_device() is None
        spec = RaggedSpec(self.chosen.recipe, x.dtype, in_kernel)
        return fp8_ragged_dot(spec, x, w, sizes)

    def _describe(
        self, eqn: Equation, facts: Sequence[Weight], scopes: Scopes, times: int
    ) -> Matmul:
        params = [fact.name for fact in facts[:2] if fact.name]
        source = ""
        if self.matmuls is not None:
            frames = source_frames(eqn)
            source = f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown"
        dtypes = dict.fromkeys(short_name(var.aval.dtype) for var in eqn.invars[:2])
        shape, count = sizes(eqn)
        matmul = Matmul(
            param=params[0] if len(params) == 1 else "",
            scope="/".join(scopes),
            source=source,
            shape=shape,
            times=times * count,
            dtype="×".join(dtypes),
            reason="",
            flops=flops(eqn) * times,
            primitive=eqn.primitive.name,
        )
        read = set().union(*(fact.source.names for fact in facts[:2] if fact.name))
        purpose = next(
            (self.purposes[x] for x in sorted(read) if x in self.purposes), ""
        )
        names = [fact.name for fact in facts]
        reason = reason_to_keep(eqn, names, matmul, purpose, self.chosen)
        return matmul._replace(reason=reason)

    def _record(self, op: Op) -> None:
        """Records the matmuls in an equation that runs as written."""
        assert self.matmuls is not None
        eqn, count = op.eqn, math.prod(self._lengths)
        if eqn.primitive.name in _MULTIPLIES:
            self.matmuls.append(self._describe(eqn, op.facts, op.scopes, count))
        reason = f"inside {eqn.primitive.name}, which runs as written"
        for inner, scopes, times, _ in walk_inside(Position(eqn, op.scopes, count)):
            if inner.primitive.name in _MULTIPLIES:
                unknown = [self.unknown] * len(inner.invars)
                found = self._describe(inner, unknown, scopes, times)
                self.matmuls.append(found._replace(reason=reason))

    # --- bodies -----------------------------------------------------------------------

    def fact_inside(self, fact: Weight, var: Any, kind: Kind) -> Weight:
        if kind == "slice":
            return fact.after(SLICE)
        return self.unknown if kind in ("carry", "tangent") else fact

    def result_facts(
        self, outs: Sequence[Any], known: Sequence[Weight]
    ) -> list[Weight]:
        return [Weight(fact.source) for fact in known]

    def join_facts(self, facts: Sequence[Weight]) -> Weight:
        return Weight(join([fact.source for fact in facts]))

    def more_inputs(self, op: Op) -> More:
        """Returns the delayed scales and codes that an equation's body may need.

        They are those of the matmuls with these parameters that have not been met yet, of
        which some may come after the equation. A scan takes those of its own length.
        """
        # The last axis of a probe is for three tensors, another may be for devices.
        return More(
            self._next_of(self.scales, op, lambda x: x[1].shape[: -self.probe_axes]),
            self._next_of(self.codes, op, lambda x: x.largest.shape),
        )

    def _next_of(
        self, known: dict[str, Any] | None, op: Op, lengths_of: Callable[[Any], Any]
    ) -> dict[str, Any]:
        found = {}
        is_scan = op.eqn.primitive.name == "scan"
        for name in sorted({fact.name for fact in op.facts if fact.name and known}):
            for number in itertools.count(self.counts.get(name, 0)):
                item = (known or {}).get(_key(name, number))
                if item is None:
                    break
                if is_scan and lengths_of(item)[:1] != (op.eqn.params["length"],):
                    break
                found[_key(name, number)] = item
        return found

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: More | None) -> Iterator[None]:
        """Enters a body with the delayed scales and codes that belong there."""
        before = self._lengths, self._delayed, self.scales, self.codes
        name = eqn.primitive.name
        if name == "scan":
            self._lengths += (eqn.params["length"],)
        # Each device scales what it holds: delayed scales would need a maximum over
        # devices, where the gradient of a shared value is a sum.
        self._delayed &= name != "shard_map"
        scales, codes = more or More({}, {})
        self.scales = None if self.scales is None else scales
        self.codes = None if self.codes is None else codes
        try:
            yield
        finally:
            self._lengths, self._delayed, self.scales, self.codes = before

    def cache_key(self, more: More | None) -> tuple[Any, ...] | None:
        recorders = self.matmuls, self.keys, self.encodings
        if any(recorder is not None for recorder in recorders):
            return None
        # Delayed scales differ from one use of a parameter to the next: what was counted
        # before says which of them come first.
        counts = tuple(self.counts.items()) if more and any(more) else ()
        return counts, self._delayed

    def _next_key(self, param: str) -> str:
        """Returns the key of the next matmul with a parameter."""
        number = self.counts.get(param, 0)
        if self._delayed:
            self.counts[param] = number + 1
        return _key(param, number)

    def _record_weight(self, key: str, weight: Weight, spec: MatmulSpec) -> None:
        """Records how a parameter becomes the operand of a matmul, if it can be repeated."""
        chain, name = weight.chain, weight.name
        if self.encodings is None or chain is None or not self._delayed or spec.by_row:
            return
        # A weight that a scan does not slice is the same in all its rounds.
        if sum(step is SLICE for step in chain) == len(self._lengths):
            assert name is not None
            self.encodings[key] = Encoding(name, chain, spec)

    def _scale(self, key: str) -> tuple[Any, Any]:
        """Returns the maxima seen before and the probe of a matmul; `None` without."""
        if not isinstance(self.chosen.recipe, DelayedScaling) or not self._delayed:
            return None, None
        if self.keys is not None:
            self.keys[key] = self._lengths
        if self.scales is None:
            return None, None
        found = self.scales.get(key)
        if found is None or found[1].ndim != self.probe_axes:
            self.missing.add(key)
            return None, None
        self.used.add(key)
        return found


def _key(param: str, number: int) -> str:
    """Returns the key of the scales of one use of a parameter.

    It does not tell where in the program that is, so that another `jit` or `checkpoint`
    around a layer, or another JAX, leaves a saved state usable.
    """
    return f"{param}:{number}"
