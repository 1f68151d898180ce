"""The interpreter: evaluates a jaxpr again, with casts.

A function is traced at its own dtypes, so that whatever it checks and assumes holds;
then its equations are run one by one, each in the precision that the policy chooses.
Values that the function holds in f32 may be held in the compute dtype between them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpx._amp import _attention, _calls, _derivatives, _loops, _pointwise
from mpx._amp._apply import (
    APPLY,
    convert,
    flops,
    opaque_metas,
    reason_for_f32,
    reason_to_keep,
    run_original,
)
from mpx._amp._policy import AmpRules, Choice
from mpx._amp._rules import MATMULS, PRIMITIVES, REASONS, Rule
from mpx._amp._scopes import LOW_NAME
from mpx._amp._values import (
    F32,
    NEUTRAL,
    Meta,
    Role,
    as_array,
    cast,
    chain_of,
    is_eligible,
)
from mpx._compat import (
    Literal,
    bind,
    equation_context,
    eval_equation,
    is_differentiated,
    is_tracer,
    scopes_of,
    source_frames,
)

_MAY_BE_LOW = (Rule.LOW, Rule.WIDEST, Rule.FOLLOW)
HANDLERS = {
    **_calls.HANDLERS,
    **_derivatives.HANDLERS,
    **_loops.HANDLERS,
    **_attention.HANDLERS,
}


class Decision(NamedTuple):
    """What was done with one equation, for the report.

    Attributes:
        primitive: The name of the primitive.
        rule: The rule that was applied.
        reason: Why.
        scope: The named scopes, joined by `/`.
        source: File and line.
        params: The parameters that it reads.
        before: The dtypes of the operands in the function as written.
        after: The dtypes in which it runs.
        shapes: The shapes of the operands.
        flops: Twice the multiplications of a matmul, else 0.
    """

    primitive: str
    rule: str
    reason: str
    scope: str
    source: str
    params: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flops: int


@dataclasses.dataclass(eq=False)
class Autocast:
    """The settings of one `amp` call and what it has built so far.

    Attributes:
        dtype: The compute dtype.
        rules: The rules.
        narrow_carry: Whether loop carries may be held in the compute dtype.
        f32_weight_grads: Whether the gradients of arguments that matmuls read come out
            of their matmul in f32.
        f32_results: Whether low matmuls give f32 results; for those gradients.
        cache: Rewritten jaxprs, by what they were made from.
        made: What was made of values of the jaxpr that is being run, beside them: as long
            as they are kept, so are their ids.
        decisions: Where decisions are recorded, `None` to record none.
    """

    dtype: np.dtype
    rules: AmpRules
    narrow_carry: bool = False
    f32_weight_grads: bool = False
    f32_results: bool = False
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict)
    made: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    decisions: list[Decision] | None = None

    def start(
        self,
        named: list[tuple[str, Any]],
        places: Callable[[], tuple[Iterable[str], Iterable[str]]] | None,
    ) -> None:
        """Looks at the arrays of a call and at its places; see `AmpRules.for_call`."""
        self.rules = self.rules.for_call(named, places)

    @property
    def kept_types(self) -> tuple[type, ...]:
        """The types whose calls run as they are written."""
        return tuple(x for x in self.rules.keep if isinstance(x, type))

    def argument_meta(self, name: str, role: Role | None, leaf: Any) -> Meta:
        """Returns what is known of an argument's array."""
        if leaf.dtype != F32:
            return NEUTRAL
        return Meta(leaf=tuple(leaf.shape), origin=name, role=role)

    def constant_meta(self, value: Any) -> Meta:
        """Returns what is known of an array that the function closes over."""
        if value.dtype != F32:
            return NEUTRAL
        if is_differentiated(value):
            return Meta(leaf=tuple(value.shape), role="known")
        if value.ndim == 0 and not is_tracer(value) and value.is_fully_addressable:
            return Meta(literal=float(value))
        return Meta(leaf=tuple(value.shape))

    def run(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        metas: Sequence[Meta],
        scopes: tuple[str, ...],
    ) -> tuple[list[Any], list[Meta]]:
        """Evaluates a jaxpr; returns its results and what is known of them."""
        # Values of another jaxpr belong to another trace and must not be found here.
        outer, self.made = self.made, {}
        try:
            return self._evaluate(jaxpr, consts, args, metas, scopes)
        finally:
            self.made = outer

    def _evaluate(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        metas: Sequence[Meta],
        scopes: tuple[str, ...],
    ) -> tuple[list[Any], list[Meta]]:
        env: dict[Any, tuple[Any, Meta]] = {}

        def read(atom: Any) -> tuple[Any, Meta]:
            if isinstance(atom, Literal):
                if is_eligible(atom.aval):
                    return atom.val, Meta(literal=float(np.asarray(atom.val)))
                return atom.val, NEUTRAL
            return env[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = const, self.constant_meta(const)
        for var, arg, meta in zip(jaxpr.invars, args, metas, strict=True):
            env[var] = arg, meta
        chains, done = _pointwise.chains(self, jaxpr, scopes), set()
        for eqn in jaxpr.eqns:
            if id(eqn) in done:
                continue
            pairs = [read(atom) for atom in eqn.invars]
            chain = chains.get(id(eqn))
            if chain is not None and as_array(pairs[0][0]).dtype == self.dtype:
                env.update(_pointwise.run(self, chain, pairs[0][0], scopes))
                done.update(map(id, chain.equations))
                continue
            values, known = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            with equation_context(eqn):
                outs, out_metas = self.equation(
                    eqn, values, known, scopes + scopes_of(eqn)
                )
            for var, out, meta in zip(eqn.outvars, outs, out_metas, strict=True):
                env[var] = out, meta
        results = [read(atom) for atom in jaxpr.outvars]
        return [value for value, _ in results], [meta for _, meta in results]

    def widen(self, value: Any) -> Any:
        """Returns a value in f32, the same array for every equation that asks.

        The cotangents of a shared f32 version add up in f32; those of one cast an
        equation would be rounded first and add up in the compute dtype.
        """
        if getattr(value, "dtype", F32) == F32:
            return cast(value, F32)
        if id(value) not in self.made:
            self.made[id(value)] = value, cast(value, F32)
        return self.made[id(value)][1]

    def equation(
        self,
        eqn: Any,
        values: list[Any],
        metas: list[Meta],
        scopes: tuple[str, ...],
    ) -> tuple[list[Any], list[Meta]]:
        """Runs one equation in the precision that the policy chooses."""
        name = eqn.primitive.name
        stopped = self.region_rule(eqn, scopes)
        if stopped is not None and stopped[0] == Rule.ORIGINAL:
            self.record(eqn, Rule.ORIGINAL, stopped[1], metas=metas, scopes=scopes)
            is_attention = name in _attention.HANDLERS
            run = _attention.run_original_attention if is_attention else run_original
            return run(self, eqn, values), opaque_metas(eqn, metas)
        if name in HANDLERS:
            return HANDLERS[name](self, eqn, values, metas, scopes)
        if name == "convert_element_type":
            return convert(eqn, values, metas)
        if not any(is_eligible(var.aval) for var in eqn.invars):
            return eval_equation(eqn, values), [NEUTRAL] * len(eqn.outvars)
        rule, reason = stopped or self.rule(name, eqn.params, metas)
        if name == "name" and eqn.params["name"] == LOW_NAME:
            rule, values = Rule.FOLLOW, [cast(value, self.dtype) for value in values]
            metas = [Meta(chain="low")]
        if stopped and rule in _MAY_BE_LOW and PRIMITIVES.get(name) == Rule.ORIGINAL:
            # A scatter or a solver has no version in the compute dtype.
            rule, reason = Rule.ORIGINAL, REASONS[name]
        if callable(rule) and not isinstance(rule, str):
            return self._custom(rule, eqn, values, metas, scopes)
        apply = APPLY[Rule(rule)]
        outs, out_metas, reason = apply(self, eqn, values, metas, reason)
        self.record(eqn, rule, reason, metas=metas, scopes=scopes, outs=outs)
        return outs, out_metas

    def region_rule(
        self, eqn: Any, scopes: tuple[str, ...]
    ) -> tuple[Choice, str] | None:
        """Returns the rule of the scope or function around an equation, and why."""
        found = self.rules.scope_rule(scopes)
        if found is None and self.rules.functions:
            rules = (self.rules.function_rule(x) for x, _, _ in source_frames(eqn))
            found = next(filter(None, rules), None)
        return found

    def rule(
        self, name: str, params: Mapping[str, Any], metas: list[Meta]
    ) -> tuple[Choice, str]:
        """Returns the rule of a primitive where no region has one, and why."""
        if name in MATMULS:
            for meta in metas:
                found = self.rules.param_rule(meta.origin)
                if found is not None:
                    return found
        rule = self.rules.primitive_rule(
            name, params, compute_is_f16=self.dtype == np.float16
        )
        return rule, self.rules.primitive_reason(name)

    def runs_low(self, eqn: Any, meta: Meta, scopes: tuple[str, ...]) -> bool:
        """Whether a matmul runs in the compute dtype, by what is known beforehand."""
        region = self.region_rule(eqn, scopes + scopes_of(eqn))
        rule, _ = region or self.rule(eqn.primitive.name, eqn.params, [meta])
        kept = reason_to_keep(eqn) or reason_for_f32(eqn)
        return rule == Rule.LOW and kept is None

    def _custom(
        self,
        rule: Any,
        eqn: Any,
        values: list[Any],
        metas: list[Meta],
        scopes: tuple[str, ...],
    ) -> tuple[list[Any], list[Meta]]:
        """Lets a user's function choose operands and parameters, as jaxamp does."""
        dtypes = [var.aval.dtype for var in eqn.invars]
        args = [as_array(value) for value in values]
        args, params = rule(self.dtype, dtypes, *args, **eqn.params)
        outs = bind(eqn, list(args), **params)
        name = getattr(rule, "__name__", "custom")
        self.record(eqn, name, "", metas=metas, scopes=scopes, outs=outs)
        return outs, [chain_of(metas)] * len(outs)

    def record(
        self,
        eqn: Any,
        rule: Any,
        reason: str,
        *,
        metas: list[Meta],
        scopes: tuple[str, ...],
        outs: list[Any] | None = None,
    ) -> None:
        """Notes a decision, if somebody asked for a report."""
        if self.decisions is None:
            return
        frames = source_frames(eqn)
        source = f"{frames[0][1]}:{frames[0][2]}" if frames else "unknown"
        dtypes = [str(var.aval.dtype) for var in eqn.invars]
        after = dtypes if outs is None else [str(jnp.result_type(x)) for x in outs]
        self.decisions.append(
            Decision(
                primitive=eqn.primitive.name,
                rule=str(rule),
                reason=reason,
                scope="/".join(scopes),
                source=source,
                params=tuple(meta.origin for meta in metas if meta.origin),
                before=tuple(dtypes),
                after=tuple(after),
                shapes=tuple(tuple(var.aval.shape) for var in eqn.invars),
                flops=flops(eqn),
            )
        )
