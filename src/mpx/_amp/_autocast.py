"""Autocast: evaluates a jaxpr again, with casts.

A function is traced at its own dtypes, so that whatever it checks and assumes holds;
then its equations are run one by one, each in the precision that the rules choose.
Values that the function holds in f32 may be held in the compute dtype between them.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpx._amp._decide import (
    HIGHEST,
    Choice,
    can_fuse,
    decide,
    highest_is_the_default,
    reason_against,
)
from mpx._amp._emit import emit
from mpx._amp._facts import (
    F32,
    Decision,
    Origin,
    Settings,
    cast,
    is_eligible,
    is_low,
    may_be_param,
)
from mpx._amp._rules import LOW_NAME, Rule
from mpx._casting._half import in_gradient_function
from mpx._casting._reduction import COMPUTE
from mpx._jax._compat import (
    Literal,
    eval_equation,
    open_jaxpr,
    scan_sizes,
    source_frames,
)
from mpx._jax._warn import warn
from mpx._program import HANDLERS
from mpx._program._interpreter import (
    Jaxpr,
    Op,
    Outcome,
    Plan,
    Scopes,
    Traced,
    Values,
    arrays_of,
    rewrite,
    types_of,
)
from mpx._program._queries import (
    ATTENTION,
    CALLS,
    CROSS_ENTROPY,
    MATMULS,
    SHAPE_ONLY,
    Equation,
    Verdict,
    equations,
    every_use,
    readers,
)


@dataclasses.dataclass(eq=False, kw_only=True)
class Autocast(Settings):
    """One call of a function under `amp`."""

    def start(self, traced: Traced) -> Traced:
        """Finds what the rules select among the arrays; raises if that is nothing."""
        rules = self.rules
        if rules.keep or rules.params or rules.scopes or rules.functions:
            places = traced.places if traced.has_params else None
            self.rules = rules.for_call(traced.named_arrays(), places)
        self.is_plain = rules.is_plain
        return traced

    def finish(self, outs: Values) -> Values:
        """Warns of what was asked for and not done, or returns results that may warn.

        They do if f16 gradients are taken without a loss scale.
        """
        if "low" in self.found and highest_is_the_default():
            warn(_HIGHEST_BY_DEFAULT)
        if "highest" in self.found and "low" not in self.found:
            warn(_ALL_HIGHEST)
        if self.dtype != np.float16 or in_gradient_function():
            return outs
        return [_warn_if_unscaled(out) for out in outs]

    def plan(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        facts: Sequence[Origin],
        scopes: Scopes,
    ) -> Plan | None:
        # Without these there is no attention to recognise.
        if not self.frame.primitives >= {"exp", "dot_general"} or not can_fuse(self):
            return None
        # It is loaded where there is a fused kernel.
        from mpx._amp._recognition import plan_for

        return plan_for(self, jaxpr, consts, facts, scopes)

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: object) -> Iterator[None]:
        outer = self.caller
        if self.decisions is not None and source_frames(eqn):
            self.caller = eqn
        try:
            yield
        finally:
            self.caller = outer

    def equation(self, op: Op) -> Outcome:
        """Decides how an equation runs, runs it so, and follows what is known."""
        name = op.eqn.primitive.name
        choice = decide(self, op)
        if choice.how == "body":
            result = _BODIES.get(name, HANDLERS[name])(self, op)
        else:
            result = emit(self, op, choice)
        if isinstance(result, tuple):
            outs, known = result
        else:
            outs, known = result, self.facts_after(op, result)
        if name in MATMULS and choice.rule == Rule.LOW:
            # For the warnings of `finish`.
            is_low, is_kept = choice.how == "matmul", choice.reason == HIGHEST
            self.found.add("low" if is_low else "highest" if is_kept else "")
        if self.decisions is not None and choice.rule is not None:
            self.decisions.append(_decision(op, choice, outs, self.caller))
        return outs, known


def _decision(op: Op, choice: Choice, outs: Values, caller: Equation) -> Decision:
    is_user = choice.how == "user"
    return Decision.about(
        op.eqn,
        op.scopes,
        caller,
        rule=choice.reason if is_user else str(choice.rule),
        reason="" if is_user else choice.reason,
        params=tuple(fact.name for fact in op.facts if fact.name),
        after=tuple(str(jnp.result_type(out)) for out in outs),
    )


def has_work(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr holds a matmul or a value of 16 bits, at any depth."""
    return any(
        eqn.primitive.name in MATMULS
        or eqn.primitive.name in ATTENTION
        or eqn.primitive.name in CROSS_ENTROPY
        or eqn.params.get("name") == LOW_NAME
        or any(is_low(var.aval) for var in eqn.invars)
        for eqn in equations(jaxpr)
    )


def _jit(amp: Autocast, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    body, _ = open_jaxpr(eqn.params["jaxpr"])
    unchanged = all(
        not is_eligible(var.aval) or value.dtype == F32
        for var, value in zip(eqn.invars, values, strict=True)
    )
    if unchanged and amp.rules.is_plain and not has_work(body):
        # Nothing to do: random number generators, for one, stay the same programs.
        return eval_equation(eqn, values), amp.facts_of_body(op)
    new, _ = rewrite(amp, op, eqn.params["jaxpr"], types_of(values), op.facts)
    # Cast outside, such a value shares its f32 version with the equations there.
    values = [
        amp.widen(value) if is_wide else value
        for value, is_wide in zip(values, _read_in_f32_only(new, body), strict=True)
    ]
    return HANDLERS["jit"](amp, op._replace(values=values))


def _read_in_f32_only(jaxpr: Jaxpr, before: Jaxpr) -> list[bool]:
    """Returns for each input whether all that happens to it is one cast back to f32."""
    body, _ = open_jaxpr(jaxpr)
    found = readers(body.eqns)
    reading = [[eqn for eqn, _ in found.get(var, ())] for var in body.invars]
    returned = [atom for atom in body.outvars if not isinstance(atom, Literal)]
    return [
        len(equations) == 1
        and equations[0].primitive.name == "convert_element_type"
        and is_eligible(equations[0].outvars[0].aval)
        and is_eligible(old.aval)
        and var.aval.dtype != F32
        and var not in returned
        for old, var, equations in zip(
            before.invars, body.invars, reading, strict=False
        )
    ]


def _scan(amp: Autocast, op: Op) -> Outcome:
    values, params = arrays_of(op.values), op.eqn.params
    body, _ = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_sizes(params)
    for i, var in enumerate(body.invars):
        if not is_eligible(var.aval):
            continue
        if i < n_consts:
            # The cotangents of a constant add up over the iterations: in f32.
            values[i] = amp.widen(values[i])
        elif i >= n_consts + n_carry and _used_only_low(
            amp, body, var, op.facts[i], op.scopes
        ):
            values[i] = _low_stack(amp, op, i)
    return HANDLERS["scan"](amp, op._replace(values=values))


def _low_stack(amp: Autocast, op: Op, position: int) -> Any:
    """Returns a weight per layer in the compute dtype, if that costs no accuracy.

    Cast inside the loop, the forward pass would save a low copy of each. As it is stored,
    the scan consumes the parameter itself, unless it has other readers: their gradients add
    up in the f32 version.
    """
    value, atom = op.values[position], op.eqn.invars[position]
    stored = amp.stored.get(id(value), (None, value))[1]
    if stored.dtype == amp.dtype and len(amp.frame.readers[atom]) == 1:
        return stored
    # A gradient that is to leave its matmul in f32 is not rounded in the loop.
    is_f32 = may_be_param(op.facts[position]) and amp.grad_dtype(value) != amp.dtype
    return value if is_f32 else cast(value, amp.dtype)


def _used_only_low(
    amp: Autocast, jaxpr: Jaxpr, var: Any, fact: Origin, scopes: Scopes
) -> bool:
    """Returns whether a value is used, and only as an operand of low matmuls."""

    def judge(eqn: Equation, position: int, scopes: Scopes) -> Verdict:
        name = eqn.primitive.name
        if name in MATMULS:
            rule, _ = amp.region_rule(eqn, scopes) or amp.rule(name, eqn.params, [fact])
            return rule == Rule.LOW and reason_against(eqn, Rule.LOW) is None
        if name in SHAPE_ONLY and name not in ("broadcast_in_dim", "pvary", "pcast"):
            return "result"
        return "inside" if name in CALLS else False

    return every_use(jaxpr, var, judge, scopes)


def _custom_jvp(amp: Autocast, op: Op) -> Outcome:
    if amp.reduce != COMPUTE:
        # The rule is about tangents, which JAX may transpose: only plain matmuls.
        amp = dataclasses.replace(amp, reduce=COMPUTE, cache={})
    return HANDLERS["custom_jvp_call"](amp, op)


_BODIES: dict[str, Callable[[Autocast, Op], Outcome]] = {
    "jit": _jit,
    "pjit": _jit,
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
}
_HIGHEST_BY_DEFAULT = (
    'The default precision of matmuls is "highest", but `amp` runs them in 16 bits, also '
    "those that ask for it themselves, since JAX does not tell them apart. Reset "
    "`jax_default_matmul_precision`, or select what must stay f32 by `amp(..., keep=...)`."
)
_ALL_HIGHEST = (
    "`amp` changed no matmul: all of them ask for `precision=HIGHEST`, which is honoured. "
    "Remove the argument, or give a rule: "
    '`amp(func, rules=mpx.AmpRules(primitives={"dot_general": "f32"}))` to stay in f32.'
)
_UNSCALED = (
    "A function under `amp` in f16 is differentiated without a loss scale that mpx "
    "knows of: gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    "use bf16, which needs no scale. If you scale the loss yourself, "
    "filter this warning."
)


@jax.custom_jvp
def _warn_if_unscaled(x: Any) -> Any:
    """Returns a result as it is; if it is differentiated, that may warn.

    The derivative rule runs when JAX takes the derivative, also that of a jitted
    function, and not before: a function that is only called has no rule to run.
    """
    return x


@_warn_if_unscaled.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    is_trained = jnp.issubdtype(tangents[0].dtype, jnp.floating)
    if is_trained and not in_gradient_function():
        warn(_UNSCALED)
    return _warn_if_unscaled(*primals), tangents[0]
