"""Autocast: evaluates a jaxpr again, each equation as it was decided: the step "emit".

A function is traced at its own dtypes, so that whatever it checks and assumes holds; then its
equations are run one by one. Values that it holds in f32 may be held in the compute dtype
between them.

A sum in the backward pass is made in f32. It is the transpose of an operation that uses one
number several times, so such operations run in f32 where their operand is held in 16 bits,
and their result is rounded after: see `SUMMED`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mpx._amp._chains import CURVED, run_chain
from mpx._amp._decide import (
    HIGHEST,
    RAGGED,
    Choice,
    can_fuse,
    decide,
    highest_is_the_default,
    kind_of,
    no_grouped_kernel,
    reason_against,
)
from mpx._amp._facts import (
    F32,
    Settings,
    Source,
    cast,
    changed,
    follow,
    is_eligible,
    is_low,
    saturate,
)
from mpx._amp._hints import (
    exchanged,
    in_order_back,
    is_spread,
    mean_apart,
    outputs_first,
)
from mpx._amp._rules import (
    BROADCASTING,
    COMPARED,
    LINEAR,
    LOW_NAME,
    PRIMITIVES,
    SUMMED,
    Rule,
    as_compute_dtype,
)
from mpx._amp._sums import only_summed, run_sum
from mpx._casting._context import COMPUTE, Reduce, amp_reduce, in_gradient_function
from mpx._jax._compat import (
    INLINE,
    Literal,
    bind,
    eval_equation,
    open_jaxpr,
    scan_sizes,
    source_frames,
)
from mpx._jax._devices import cuda_capability
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
    as_array,
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
        return traced

    def finish(self, outs: Values) -> Values:
        """Warns of what was asked for and not done; f16 results warn if differentiated."""
        if "low" in self.found and highest_is_the_default():
            warn(_HIGHEST_BY_DEFAULT)
        if "highest" in self.found and "low" not in self.found:
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

    @contextlib.contextmanager
    def inside(self, eqn: Equation, more: object) -> Iterator[None]:
        outer = self.in_loop, self.caller
        self.in_loop |= eqn.primitive.name == "scan"
        if self.decisions is not None and source_frames(eqn):
            self.caller = eqn
        try:
            yield
        finally:
            self.in_loop, self.caller = outer

    def cache_key(self, more: object) -> tuple[PyTree, ...]:
        return (self.in_loop,)

    def emit(self, op: Op, choice: Choice) -> Values | Outcome:
        """Runs an equation as it was decided."""
        if choice.how in (Rule.WIDEST, Rule.FOLLOW):
            op, outs = run_sum(self, op)
            if outs is not None:
                return outs
        return _EMITTERS[choice.how](self, op, choice.rule)

    def equation(self, op: Op) -> Outcome:
        """Decides how an equation runs, runs it so, and follows what is known."""
        # Equations that are run out of turn, for recognised ones, are in no chain.
        in_turn = self.is_plain and self.frame.eqn is op.eqn
        has_chains = in_turn and not CURVED.isdisjoint(self.frame.primitives)
        if has_chains and (found := run_chain(self, op)) is not None:
            choice, result = found
        else:
            choice = decide(self, op)
            result = self.emit(op, choice)
        is_told = isinstance(result, tuple)
        outs, known = result if is_told else (result, follow(op.eqn, op.facts))
        outs = mean_apart(self.frame, op.eqn, outs)
        if choice.rule == Rule.LOW and op.eqn.primitive.name in MATMULS:
            # For the warnings of `finish`.
            is_low, is_kept = choice.how == "matmul", choice.reason == HIGHEST
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


def autocast_for(dtype: np.dtype | None, reduce: Reduce, **options: Any) -> Autocast:
    """Returns the visitor for one call, by what is set around it."""
    chosen = as_compute_dtype(dtype)
    return Autocast(dtype=chosen, reduce=amp_reduce(reduce), **options)


# --- Single equations -----------------------------------------------------------------


def _as_written(amp: Settings, op: Op, rule: Any = None) -> Values:
    """Runs an equation without f32 operands."""
    if any(map(is_low, op.values)):
        return _summed_in_f32(amp, op, op.values)
    return eval_equation(op.eqn, op.values)


def _summed_in_f32(amp: Settings, op: Op, values: Values) -> Values:
    """Runs an equation that moves or selects 16-bit numbers; its transpose sums in f32."""
    eqn, name = op.eqn, op.eqn.primitive.name
    low = next((x.dtype for x in values if is_low(x)), None)
    if low is None:
        return bind(eqn, arrays_of(values))
    if name in BROADCASTING:
        shape = tuple(eqn.outvars[0].aval.shape)

        def whole(x: PyTree, fact: Source) -> PyTree:
            if not is_low(x) or fact.literal is not None or x.shape == shape:
                return x
            return cast(jnp.broadcast_to(amp.widen(x), shape), x.dtype)

        values = [whole(*x) for x in zip(values, op.facts, strict=True)]
    elif _has_sum(eqn) or (name == "pad" and op.facts[1].literal is None):
        wide = [amp.widen(x) if is_low(x) else x for x in values]
        return [cast(x, low) if x.dtype == F32 else x for x in bind(eqn, wide)]
    return bind(eqn, arrays_of(values))


def _has_sum(eqn: Equation) -> bool:
    """Returns whether a number may be used twice; in windows side by side none is."""
    if eqn.primitive.name not in SUMMED:
        return False
    names = ("window_dimensions", "window_dilation", "window_strides")
    axes = zip(*(eqn.params.get(x, ()) for x in names), strict=True)
    overlaps = [(size - 1) * dilation >= stride for size, dilation, stride in axes]
    return any(overlaps) or not overlaps


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


def _widest(amp: Settings, op: Op, rule: Any = None) -> Values:
    eqn, facts = op.eqn, op.facts
    soft = [fact.literal is not None or _is_bias(fact) for fact in facts]
    dtypes = {
        value.dtype
        for var, value, follows in zip(eqn.invars, op.values, soft, strict=True)
        if is_eligible(var.aval) and not follows
    }
    dtype = dtypes.pop() if len(dtypes) == 1 else F32
    literals = [fact.literal for fact in facts if fact.literal is not None]
    name = eqn.primitive.name
    is_rounded = "rounded" in literals and name in COMPARED
    # A user's rule may have chosen another dtype than that which literals fit.
    fits = "outside" not in literals if dtype == amp.dtype else not literals
    # Of a bound, as 0.999 of a clip, 16 bits would make another one, which guards nothing.
    if dtype == F32 or not fits or is_rounded:
        return bind(eqn, changed(op, amp.widen))
    values = [
        cast(x, dtype) if is_eligible(var.aval) and fact.literal is not None else x
        for var, x, fact in zip(eqn.invars, op.values, facts, strict=True)
    ]
    is_summed = name == "mul" and only_summed(amp.frame, eqn.outvars[0])
    if is_summed or any(getattr(x, "dtype", None) == F32 for x in values):
        dtype = F32 if is_summed else dtype
        # A user's rule may be for a primitive that holds a function: it is not kept.
        is_known = PRIMITIVES.get(name) == Rule.WIDEST
        make = _rounded_once if is_known else _rounded_once.__wrapped__
        may_spread = name in BROADCASTING and cuda_capability() is not None
        run = make(eqn.primitive, tuple(eqn.params.items()), dtype, may_spread)
        return list(run(*arrays_of(values)))
    return _summed_in_f32(amp, op, values)


@functools.lru_cache(maxsize=1024)  # JAX linearizes each once for the same types
def _rounded_once(
    primitive: Any,
    params: tuple[tuple[str, Any], ...],
    dtype: np.dtype,
    may_spread: bool,
) -> Callable[..., Values]:
    """Returns an operation that computes in f32 and rounds once.

    In the backward pass a parameter's gradient is a sum over all examples, also over those
    of a `jax.vmap` around the call, and that sum is f32.
    """

    def compute(*values: PyTree) -> Values:
        wide = [saturate(x, dtype) if x.dtype == F32 else x for x in values]
        wide = [cast(x, F32) if is_low(x) else x for x in wide]
        outs = primitive.bind(*wide, **dict(params))
        outs = outs if primitive.multiple_results else [outs]
        if may_spread and any(is_spread(x, outs[0].shape) for x in values):
            outs = [in_order_back(x) for x in outs]
        return [cast(x, dtype) if x.dtype == F32 else x for x in outs]

    if primitive.name not in LINEAR:
        # A product keeps its operands for the backward pass: those of 16 bits.
        compute = jax.checkpoint(compute, prevent_cse=False)
    return jax.jit(compute, inline=INLINE)


def _is_bias(source: Source) -> bool:
    """Returns whether an operand is a bias or a scale, which takes the others' dtype.

    Without this each `x @ W + b` would fall back to f32. It is for parameters: masks,
    targets and coordinates stay f32, since 16 bits would round or overflow them.
    """
    if not source.is_param or source.leaf is None:
        return False
    sizes = tuple(size for size in source.leaf if size != 1)
    # Not a mask or bias of attention, which a module may hold.
    return len(sizes) < 2 or sizes[-1] != sizes[-2]


def _follow(amp: Settings, op: Op, rule: Any = None) -> Values:
    values = changed(op, as_array)
    if PRIMITIVES.get(op.eqn.primitive.name) != Rule.FOLLOW:
        # A user's rule. The table has it only where operands need not agree, as in `sort`.
        pairs = zip(op.eqn.invars, values, strict=True)
        if len({x.dtype for var, x in pairs if is_eligible(var.aval)}) > 1:
            return _widest(amp, op)
    return _summed_in_f32(amp, op, values)


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
        # they are sums over devices, an all-reduce each.
        if not op.facts[side].may_be_param:
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


def _has_work(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr holds a matmul or a value of 16 bits, at any depth."""
    return any(
        eqn.primitive.name in _MULTIPLIES
        or eqn.params.get("name") == LOW_NAME
        or any(is_low(var.aval) for var in eqn.invars)
        for eqn in equations(jaxpr)
    )


_MULTIPLIES = frozenset((*MATMULS, *ATTENTION, *CROSS_ENTROPY))


def _jit(amp: Autocast, op: Op) -> Outcome:
    eqn, values = op.eqn, arrays_of(op.values)
    body, _ = open_jaxpr(eqn.params["jaxpr"])
    unchanged = all(
        not is_eligible(var.aval) or value.dtype == F32
        for var, value in zip(eqn.invars, values, strict=True)
    )
    if unchanged and amp.rules.is_plain and not _has_work(body):
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


def _used_only_low(
    amp: Autocast, jaxpr: Jaxpr, var: Any, fact: Source, scopes: Scopes
) -> bool:
    """Returns whether a value is used, and only as an operand of low matmuls."""

    def judge(eqn: Equation, position: int, scopes: Scopes) -> Verdict:
        name = eqn.primitive.name
        if name in MATMULS:
            rule, _ = amp.region_rule(eqn, scopes) or amp.rule(name, eqn.params, [fact])
            return rule == Rule.LOW and reason_against(eqn) is None
        if name in SHAPE_ONLY and name not in ("broadcast_in_dim", "pvary", "pcast"):
            return "result"
        return "inside" if name in CALLS else False

    return every_use(jaxpr, var, judge, scopes)


def _custom_jvp(amp: Autocast, op: Op) -> Outcome:
    if amp.reduce != COMPUTE:
        # The rule is about tangents, which JAX may transpose: only plain matmuls.
        amp = dataclasses.replace(amp, reduce=COMPUTE, cache={})
    return HANDLERS["custom_jvp_call"](amp, op)


def _body(amp: Autocast, op: Op, rule: None) -> Outcome:
    name = op.eqn.primitive.name
    return _BODIES.get(name, HANDLERS[name])(amp, op)


_BODIES: dict[str, Callable[[Autocast, Op], Outcome]] = {
    "jit": _jit,
    "pjit": _jit,
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
    Rule.WIDEST: _widest,
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
    "`amp` changed no matmul: all of them ask for `precision=HIGHEST`, which is honoured. "
    "Remove the argument, or give a rule: "
    '`amp(func, rules=mpx.AmpRules(primitives={"dot_general": "f32"}))` to stay in f32.'
)
_UNSCALED = (
    "A function under `amp` in f16, or with parameters stored in f16, is differentiated "
    "without a loss scale that mpx knows of: gradients below 6e-8 become 0. Take the "
    "gradient with `mpx.value_and_grad(func)(mpx.DynamicLossScaling.pow2(), ...)`, or "
    "use bf16 for both, which needs no scale. If you scale the loss yourself, "
    "filter this warning."
)


@jax.custom_jvp
def warn_if_unscaled(x: PyTree) -> PyTree:
    """Returns a parameter or a result as it is; if it is differentiated, that may warn.

    The derivative rule runs when JAX takes the derivative, also of a jitted function.
    """
    return x


@warn_if_unscaled.defjvp
def _(primals: tuple[PyTree], tangents: tuple[PyTree]) -> tuple[PyTree, PyTree]:
    is_trained = jnp.issubdtype(tangents[0].dtype, jnp.floating)
    if is_trained and not in_gradient_function.value:
        warn(_UNSCALED)
    return warn_if_unscaled(*primals), tangents[0]
