"""Autocast: evaluates a jaxpr again, each equation as it was decided: the step "emit".

A function is traced at its own dtypes, so that whatever it checks and assumes holds. Then
borders run one by one, here, and regions as one function each: see `_layout` and `_regions`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._amp._algebra import Reached, reach, reached_inside
from mpx._amp._decide import (
    PRECISION,
    Choice,
    can_fuse,
    decide,
    highest_is_the_default,
    stays_f32,
)
from mpx._amp._facts import (
    Held,
    Settings,
    Source,
    cast,
    changed,
    is_eligible,
    stored_as,
)
from mpx._amp._follow import Facts, facts_after, held_in, in_f32
from mpx._amp._hints import (
    exchanged,
    outputs_first,
)
from mpx._amp._layout import Layout
from mpx._amp._regions import Region, again, keeps_nothing, run_part
from mpx._amp._rules import (
    PRIMITIVES,
    Rule,
)
from mpx._casting._context import COMPUTE, in_gradient_function, under_amp
from mpx._casting._unscaled import warn_if_unscaled
from mpx._jax._compat import (
    bind,
    eval_equation,
    is_abstract,
    is_plain_call,
    open_jaxpr,
    scan_sizes,
    scopes_of,
    source_frames,
)
from mpx._jax._formats import F32, is_low
from mpx._jax._warn import warn
from mpx._ops._experts._ragged import RAGGED, kind_of, no_grouped_kernel
from mpx._program import HANDLERS
from mpx._program._bodies import scan_facts
from mpx._program._flow import loop_carry
from mpx._program._interpreter import (
    Frame,
    Jaxpr,
    Op,
    Outcome,
    Plan,
    Scopes,
    Traced,
    Values,
    arrays_of,
    as_array,
    rewrite,
)
from mpx._program._primitives import that
from mpx._program._queries import (
    CALLS,
    CUSTOM,
    MATMULS,
    Equation,
    Verdict,
    every_use,
    inlined,
)
from mpx._wire._product import Multiply, multiply_for, plain_multiply


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
        self.is_abstract = is_abstract([*traced.arrays, *traced.consts])
        return traced

    def tracing(self) -> contextlib.AbstractContextManager[object]:
        return under_amp()

    def run_traced(self, traced: Traced) -> Values:
        run = functools.partial(super().run_traced, traced)
        if self.residuals is None:
            return run()
        # It is loaded where it is asked for.
        from mpx._residuals._run import run_coded

        pairs = zip(traced.arrays, traced.named, strict=True)
        params = [x for x, (_, is_param) in pairs if is_param]
        return run_coded(run, params, traced.arrays, self.residuals, self.keeps)

    def finish(self, outs: Values) -> Values:
        """Warns of what was asked for and not done; f16 results warn if differentiated."""
        # Derivative rules, which JAX keeps, refer to the visitor, and equations to arrays.
        self.works.clear()
        self.parts.clear()
        if "low" in self.found and highest_is_the_default():
            warn(_HIGHEST_BY_DEFAULT)
        if "highest" in self.found and self.found.isdisjoint(("low", "")):
            warn(_ALL_HIGHEST)
        if self.dtype != np.float16 or in_gradient_function.value:
            return outs
        return [warn_if_unscaled(out) for out in outs]

    def plan(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[PyTree],
        facts: Sequence[Source],
        scopes: Scopes,
    ) -> Plan | None:
        # Without these there is no attention to recognise.
        if not self.frame.primitives >= {"exp", "dot_general"} or not can_fuse(self):
            return None
        # It is loaded where there is a fused kernel.
        from mpx._amp._recognition import plan_for

        return plan_for(self, jaxpr, consts, facts, scopes)

    def __post_init__(self) -> None:
        self.flow = Facts(self)

    def read(self, atom: Any) -> tuple[Any, Source]:
        value, fact = super().read(atom)
        return value, fact._replace(held=held_in(value, atom.aval, fact))

    def carried_facts(self, eqn: Equation, facts: Values) -> Values:
        # A carry is f32: it may be an accumulator.
        carry, _ = loop_carry(eqn)
        return [*map(in_f32, self.flow.inside_loop(eqn, facts)[carry])]

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: PyTree) -> Iterator[None]:
        outer = self.in_loop, self.caller, self.may_round, self.wanted
        self.in_loop, self.may_round, self.wanted = self._entered(eqn)
        self.in_loop |= eqn.primitive.name == "scan"
        if self.decisions is not None and source_frames(eqn):
            self.caller = eqn
        try:
            yield
        finally:
            self.in_loop, self.caller, self.may_round, self.wanted = outer

    def _entered(self, eqn: Equation) -> tuple[PyTree, ...]:
        """Returns what holds in the bodies of an equation.

        A derivative rule may run when the function around it has been visited.
        """
        if self.frame.eqn is eqn or id(eqn) not in self.entered:
            self.entered[id(eqn)] = (
                self.in_loop,
                self._may_round(eqn),
                self._wanted(eqn),
            )
        return self.entered[id(eqn)]

    def _may_round(self, eqn: Equation) -> bool | tuple[bool, ...]:
        """Returns which results of a body may be rounded to be returned.

        Not a carry, and not what only its neighbours behind the call read in f32.
        """
        name = eqn.primitive.name
        if name == "scan" and not self.narrow_carry:
            carry = scan_sizes(eqn.params)[1]
            return (False,) * carry + (True,) * (len(eqn.outvars) - carry)
        if name == "while":
            return self.narrow_carry
        if name in (*CALLS, "cond", "shard_map"):
            return tuple(map(self.frame.layout.is_stored, eqn.outvars))
        return True

    def cache_key(self, eqn: Equation, more: PyTree) -> tuple[PyTree, ...] | None:
        return self._entered(eqn)

    def _wanted(self, eqn: Equation) -> tuple[Reached | None, ...]:
        """Returns which linear algebra the results of a body reach."""
        layout = self.frame.layout
        if layout is None or not layout.reached:
            return ()
        found = [layout.reached.get(x) for x in eqn.outvars]
        if eqn.primitive.name in CUSTOM:  # Also what the rule computes, all of it
            return tuple(x for x in [max(filter(None, found), default=None)] if x)
        return reached_inside(eqn, found)

    def prepared(self, jaxpr: Jaxpr, scopes: Scopes) -> Jaxpr:
        # A jitted function stores nothing: regions reach into it. A rule is a border.
        def is_inlined(eqn: Equation) -> bool:
            around = scopes + scopes_of(eqn)
            is_call = eqn.primitive.name != "custom_jvp_call" and is_plain_call(eqn)
            return is_call and self.region_rule(eqn, around) is None

        return inlined(jaxpr, is_inlined)

    def run_equations(self, scopes: Scopes) -> None:
        """Runs regions and borders."""
        frame, may_round = self.frame, self.may_round
        if not isinstance(may_round, tuple):
            may_round = (may_round,) * len(frame.jaxpr.outvars)
        layout = frame.layout = Layout(self, frame.jaxpr, scopes, frame.plan, may_round)
        layout.reached = reach(frame.jaxpr, self.wanted)

        for members in layout.units():
            if members[0] in layout.regions:
                run_part(self, layout, members)
            else:
                self.run_equation(members[0], scopes)

    def emit(self, op: Op, choice: Choice) -> Values | Outcome:
        """Runs an equation as it was decided."""
        return _EMITTERS[choice.how](self, op, choice.rule)

    def equation(self, op: Op) -> Outcome:
        """Decides how an equation runs, runs it so, and follows what is known."""
        choice = decide(self, op)
        result = self.emit(op, choice)
        if not isinstance(result, tuple):
            result = result, [*self.flow.after(op.eqn, op.facts)]
        outs, known = result
        if stays_f32(self, op, choice):
            known = [*map(in_f32, known)]
        if choice.rule == Rule.LOW and op.eqn.primitive.name in MATMULS:
            # For the warnings of `finish`.
            is_low, is_kept = (
                choice.how == "matmul",
                choice.reason.startswith(PRECISION),
            )
            self.found.add("low" if is_low else "highest" if is_kept else "")
        if self.decisions is not None and choice.rule is not None:
            is_user = choice.how == "user"
            self.tell(
                op.eqn,
                op.scopes,
                rule=choice.reason if is_user else str(choice.rule),
                reason="" if is_user else choice.reason,
                params=tuple(fact.name for fact in op.facts if fact.name),
                after=tuple(str(jnp.result_type(out)) for out in outs),
            )
        return outs, known


# --- Single equations -----------------------------------------------------------------


def _as_written(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs an equation without f32 operands."""
    return eval_equation(op.eqn, op.values)


def _original(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs an equation as it is written, on operands cast back to f32."""
    return eval_equation(op.eqn, changed(op, amp.widen))


def _convert(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs a cast as it is written; one from f32 to f32 only drops a weak type."""
    (var,), (out,) = op.eqn.invars, op.eqn.outvars
    if is_eligible(var.aval) and is_eligible(out.aval):
        return op.values
    return bind(op.eqn, [as_array(op.values[0])])


def _by_user(amp: Settings, op: Op, rule: Any) -> Values:
    """Lets a user's function, as jaxamp's `precision_fn`, choose operands and parameters."""
    dtypes = [var.aval.dtype for var in op.eqn.invars]
    args = arrays_of(op.values)
    args, params = rule(amp.dtype, dtypes, *args, **op.eqn.params)
    return bind(op.eqn, list(args), **params)


def _in_f32(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs an equation in f32; its results are rounded if its operands were of 16 bits."""
    known = facts_after(amp, op.eqn, op.facts, rule)

    def compute(_: Values, values: Values) -> Values:
        pairs = zip(bind(op.eqn, [*values]), known, strict=True)
        return [stored_as(x, amp.dtype) if y.held == Held.LOW else x for x, y in pairs]

    region, eqns = Region(compute, keeps_nothing), amp.frame.jaxpr.eqns
    inside = [i for i, eqn in enumerate(eqns) if eqn is op.eqn]
    return again(amp, region, arrays_of(op.values), op.eqn.invars, inside)


def _follow(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs an equation that moves numbers, in the dtype in which they are stored."""
    if PRIMITIVES.get(op.eqn.primitive.name) != Rule.FOLLOW or _overlaps(op.eqn):
        return _in_f32(amp, op, rule)
    return bind(op.eqn, arrays_of(op.values))


def _overlaps(eqn: Equation) -> bool:
    """Returns whether an equation has windows that share numbers: its transpose sums."""
    keys = ("window_dimensions", "window_dilation", "window_strides")
    axes = zip(*(eqn.params.get(key, ()) for key in keys), strict=True)
    return any((size - 1) * dilation >= stride for size, dilation, stride in axes)


_MANY = 8


def low_operands(
    amp: Settings, op: Op
) -> tuple[Values, dict[int, tuple[PyTree, np.dtype]]]:
    """Returns the operands of a matmul in the compute dtype.

    Also those whose gradients leave it in another dtype, by position, with that dtype.
    """
    weights, args = {}, list(op.values)
    for side, value in enumerate(op.values[:2]):
        # Parameters are cast for each matmul: their cotangents add up in f32. An activation
        # is cast once: its cotangents add up in the matmuls that make them, as in a model
        # written in 16 bits. Each in an array of its own costs memory traffic and, where
        # they are sums over devices, an all-reduce each. Of many, a sum may stand still.
        if len(amp.frame.layout.reading(op.eqn.invars[side])) > _MANY:
            value = amp.widen(value)
        elif not op.facts[side].may_be_param:
            is_f32 = getattr(value, "dtype", None) == F32
            args[side] = (amp.once if is_f32 else cast)(value, amp.dtype)
            continue
        args[side] = cast(value, amp.dtype)
        dtype = amp.grad_dtype(value)
        if dtype != amp.dtype:
            weights[side] = value, dtype  # its gradient leaves the matmul in f32
    return args, weights


def _low_matmul(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs a matmul in the compute dtype."""
    args, weights = low_operands(amp, op)
    if weights:
        return [multiply_for(op.eqn, args, weights, _multiply_wide)]
    if better := exchanged(op, *args[:2]):
        args, numbers = better
        options = {"preferred_element_type": amp.dtype, "dimension_numbers": numbers}
        return [*map(outputs_first, bind(op.eqn, args, **options))]
    return multiply(op.eqn, args, amp.dtype)


def multiply(
    eqn: Equation, args: Values, dtype: np.dtype, otherwise: Multiply | None = None
) -> Values:
    """Runs a matmul of 16-bit operands; a ragged one in a grouped kernel if there is one."""
    if eqn.primitive.name in RAGGED and no_grouped_kernel(eqn) is None:
        from mpx._ops._experts._mosaic import grouped_matmul

        kind = kind_of(eqn)
        assert kind is not None
        return [grouped_matmul(*args, kind=kind, dtype=dtype)]
    if otherwise is not None:
        return otherwise(eqn, args, dtype)
    return bind(eqn, args, preferred_element_type=dtype)


_multiply_wide = functools.partial(multiply, otherwise=plain_multiply)


def _cross_entropy(amp: Settings, op: Op, rule: Rule) -> Values:
    head = op.eqn.params["head"]
    # The hidden states and the weight, which come first, may be held in 16 bits. But logits
    # that are kept are in an array of the weight's dtype as it was written.
    free = 2 if head.kept is None else 1
    values = [*op.values[:free], *changed(op, amp.widen)[free:]]
    # In a loop, what is kept would be stacked over the iterations.
    may_keep = head.may_keep and not amp.in_loop
    head = dataclasses.replace(head, dtype=amp.dtype, precision=None, may_keep=may_keep)
    return bind(op.eqn, arrays_of(values), head=head)


# --- Bodies ---------------------------------------------------------------------------


def _scan(amp: Autocast, op: Op) -> Outcome:
    values, params = arrays_of(op.values), op.eqn.params
    body, _ = open_jaxpr(params["jaxpr"])
    n_consts, n_carry = scan_sizes(params)
    start = n_consts + n_carry
    for i, var in enumerate(body.invars[:n_consts]):
        # The cotangents of a constant add up over the iterations: in f32.
        if is_eligible(var.aval):
            values[i] = amp.widen(values[i])
    stacks = [
        i
        for i, var in enumerate(body.invars[start:], start)
        if is_eligible(var.aval) and not is_low(values[i])
    ]
    if stacks:
        # What the body casts, if it is given slices in f32, is cast before the loop.
        types = [var.aval for var in body.invars]
        new, _ = rewrite(amp, op, params["jaxpr"], types, scan_facts(amp, op))
        inner, _ = open_jaxpr(new)
        for i in stacks:
            if every_use(inner, inner.invars[i], functools.partial(_is_cast, amp)):
                values[i] = _low_stack(amp, op, i)
    return HANDLERS["scan"](amp, op._replace(values=values))


# Of the same numbers, each once: the transpose is no sum, over devices neither.
_ONCE = that("same") - that("reused") - {"pvary", "pcast"}


def _is_cast(amp: Autocast, eqn: Equation, position: int, scopes: Scopes) -> Verdict:
    """Returns whether a use of a value is a cast to the compute dtype."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        return eqn.outvars[0].aval.dtype == amp.dtype
    if name in _ONCE:
        return "result"
    return "inside" if name in CALLS else False


def _low_stack(amp: Autocast, op: Op, position: int) -> PyTree:
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
    is_f32 = op.facts[position].may_be_param and amp.grad_dtype(value) != amp.dtype
    return value if is_f32 else cast(value, amp.dtype)


def _custom_jvp(amp: Autocast, op: Op) -> Outcome:
    if amp.reduce != COMPUTE:
        # The rule is about tangents, which JAX may transpose: only plain matmuls.
        plain = dataclasses.replace(amp, reduce=COMPUTE, cache={})
        plain.frame, plain.around = amp.frame, amp.around
        found = HANDLERS["custom_jvp_call"](plain, op)
        plain.frame = Frame()  # rules, which refer to the visitor, hold no values
        return found
    return HANDLERS["custom_jvp_call"](amp, op)


def _body(amp: Autocast, op: Op, rule: None) -> Outcome:
    name = op.eqn.primitive.name
    return _BODIES.get(name, HANDLERS[name])(amp, op)


_BODIES: dict[str, Callable[[Autocast, Op], Outcome]] = {
    "scan": _scan,
    "custom_jvp_call": _custom_jvp,
}
_EMITTERS: dict[str, Callable[..., Values | Outcome]] = {
    "as written": _as_written,
    "original": _original,
    "convert": _convert,
    "mark": lambda amp, op, _: bind(op.eqn, [cast(op.values[0], amp.dtype)]),
    "matmul": _low_matmul,
    "ragged as written": lambda amp, op, _: multiply(
        op.eqn, arrays_of(op.values), op.eqn.outvars[0].aval.dtype
    ),
    "cross entropy": _cross_entropy,
    "user": _by_user,
    "body": _body,
    Rule.LOW: lambda amp, op, _: bind(
        op.eqn, changed(op, lambda x: cast(x, amp.dtype))
    ),
    Rule.F32: lambda amp, op, _: bind(op.eqn, changed(op, amp.widen)),
    Rule.WIDEST: _in_f32,
    Rule.FOLLOW: _follow,
    Rule.ORIGINAL: _original,
}
"""By `Choice.how`: runs one equation by a rule. What is known of the results may be told, or
follows from the operands."""
_HIGHEST_BY_DEFAULT = (
    'The default precision of matmuls is "highest", but `amp` runs them in 16 bits, also '
    "those that ask for it themselves, since JAX does not tell them apart. Reset "
    "`jax_default_matmul_precision`, or select what must stay f32 by `amp(..., keep=...)`."
)
_ALL_HIGHEST = (
    "`amp` changed no matmul: all of them ask for `precision=HIGHEST` or HIGH, which is honoured. "
    "Remove the argument, or give a rule: "
    '`amp(func, rules=mpx.AmpRules(primitives={"dot_general": "f32"}))` to stay in f32.'
)
