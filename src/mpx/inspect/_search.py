"""The search for policies: from the fastest on, with what is predicted for each."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from jax import Array

from mpx._amp import AmpRules, amp
from mpx._amp._call import flat_call
from mpx._casting._wrapped import is_amp
from mpx._fp8 import Fp8Function, fp8
from mpx._jax._compat import primitive_name
from mpx._jax._devices import H200
from mpx._jax._progress import Tell, silent
from mpx._program._queries import MATMULS, flops, walk
from mpx.inspect._buffers import traffic
from mpx.inspect._groups import Group, Keep, token_of
from mpx.inspect._predictions import Predictions, Study, predictions, study
from mpx.inspect._program import Program, program

LIMITS = {"bf16": 0.05, "f16": 0.05, "fp8": 0.25}
"""The gradient errors that are left without a remark. They are a judgement: about what one
16-bit or 8-bit rounding of every operand does to the gradient of a healthy model."""
MOST_VANISHING = 0.5
"""The share of numbers that f16 may make zero."""
_LONGEST = 13  # options of a format or of fp8 that take part in the frontier
_BASES = 4  # keep-lists of bf16 that are tried with fp8

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """A precision for a function, as a transformation and as code.

    Attributes:
        half: `"bf16"` or `"f16"`; `"f32"` changes nothing.
        keep: Expressions for what runs as it is written: see `mpx.amp`.
        functions: Expressions for functions whose operations run as they are written.
        fp8: Whether linear layers run in fp8.
        keep_fp8: Expressions for what does not run in fp8, but in 16 bits.

    Examples:
        >>> print(PrecisionPolicy("bf16", keep=("^head/weight$",)))
        mpx.amp(loss, "bf16", keep=['^head/weight$'])
    """

    half: str = "bf16"
    keep: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    fp8: bool = False
    keep_fp8: tuple[str, ...] = ()

    def apply(self, func: Callable[P, T]) -> Callable[P, T]:
        """Returns the function in this precision.

        Gradients of an f16 function need a loss scale: take them with
        `mpx.value_and_grad` and `mpx.DynamicLossScaling.pow2()`.
        """
        if self.half == "f32":
            return func
        rules = None
        if self.functions:
            rules = AmpRules(functions=dict.fromkeys(self.functions, "original"))
        func = amp(func, self.half, keep=list(self.keep), rules=rules)
        return fp8(func, keep=list(self.keep_fp8)) if self.fp8 else func

    def text(self, name: str = "loss") -> str:
        """Returns the code that makes the function `name` one in this precision."""
        if self.half == "f32":
            return name
        code = f'mpx.amp({name}, "{self.half}"'
        if self.keep:
            code += f", keep={list(self.keep)!r}"
        if self.functions:
            rules = dict.fromkeys(self.functions, "original")
            code += f", rules=mpx.AmpRules(functions={rules!r})"
        code += ")"
        if self.fp8:
            more = f", keep={list(self.keep_fp8)!r}" if self.keep_fp8 else ""
            code = f"mpx.fp8({code}{more})"
        return code

    def __str__(self) -> str:
        """Returns the code for a function that is called `loss`."""
        return self.text()


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy with its predictions, and its measurements if there are any.

    Attributes:
        policy: The policy; `policy.apply(loss)` applies it, and `str(policy)` is its code.
        predicted_error: The predicted error of the gradient, relative to the gradient.
        predicted_time: The predicted time of what the policy can change, in seconds on the
            GPU of the cost table.
        error: The measured error, `None` if it was not measured. It is infinite if the
            gradient is not finite.
        time: The measured seconds of a gradient; `None` without a GPU.
        spread: How far that time varied between runs, in seconds.
        memory: The bytes that the compiled gradient needs besides its arguments and results.
        kept: The labels of the groups that stay in f32, or of fp8 in 16 bits.
        default: The predicted error without any keep-list.
        remark: What to know before it is used.
    """

    policy: PrecisionPolicy
    predicted_error: float
    predicted_time: float
    error: float | None = None
    time: float | None = None
    spread: float | None = None
    memory: int | None = None
    kept: tuple[str, ...] = ()
    default: float = 0.0
    remark: str = ""


# --- Costs ----------------------------------------------------------------------------


class Cost(NamedTuple):
    """The work of a group: operations of matmuls, and numbers moved (see `traffic`)."""

    flops: float
    numbers: float

    def seconds(self, precision: str) -> float:
        """Returns the time on the GPU of the table."""
        size = 4 if precision == "f32" else 2
        return self.flops / H200[precision] + self.numbers * size / H200["memory"]


def _costs(grad: Program, count: int) -> list[Cost]:
    """Returns the work of each group of a labelled gradient program."""
    operations: collections.Counter[int | None] = collections.Counter()
    for eqn, scopes, times, _ in walk(grad.jaxpr):
        if primitive_name(eqn) in MATMULS:
            operations[token_of(scopes).group] += flops(eqn) * times
    numbers = traffic(grad.jaxpr, lambda scopes: token_of(scopes).group)
    return [Cost(operations[i], numbers[i]) for i in range(max(count, 1))]


# --- A judged function ----------------------------------------------------------------


class Judged(NamedTuple):
    """A function with its predictions, the cost of each group, and its arguments.

    `fp8` has the groups whose matmuls `mpx.fp8` would change.
    """

    study: Study
    predicted: Predictions
    work: list[Cost]
    fp8: frozenset[int]
    arrays: list[Array]

    @property
    def groups(self) -> list[Group]:
        """The groups."""
        return self.study.groups

    @property
    def active(self) -> set[int]:
        """The groups that `amp` runs in 16 bits."""
        kinds = ("out", "entry")
        return {x.key.group for x in self.study.sites if x.key.kind in kinds}

    def selected(self, selectors: Sequence[Keep]) -> set[int]:
        """Returns the groups that run as they are written."""
        pairs = enumerate(self.groups)
        return {i for i, group in pairs if any(x.selects(group) for x in selectors)}

    def seconds(
        self, half: str, low: Collection[int], fp8: Collection[int] = ()
    ) -> float:
        """Returns the predicted time of the operations that a policy can change."""
        return sum(
            cost.seconds("fp8" if i in fp8 else half if i in low else "f32")
            for i, cost in enumerate(self.work)
        )


def judge(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Sequence[Any] = (),
    tell: Tell = silent,
) -> Judged:
    """Traces a function and runs the passes."""
    if is_amp(func) or isinstance(func, Fp8Function):
        raise TypeError(
            "The function is under `amp` or `fp8`, but what they would do is what is "
            "predicted. Pass the function that you gave to them."
        )
    tell("tracing the function")
    found = study(func, args, kwargs)
    calls = [found.program.arrays]
    names = [found.program.names[i] for i in found.program.params]
    first = args[:1] if any(name.argument for name in names) else ()
    for i, batch in enumerate(batches):
        rest = batch if isinstance(batch, tuple) else (batch,)
        if len(first) + len(rest) != len(args):
            after = " after the first, which holds the parameters" if first else ""
            raise ValueError(
                f"`batches[{i}]` must have {len(args) - len(first)} arguments{after}, but "
                f"it has {len(rest)}. Pass a tuple."
            )
        calls.append(flat_call(func, (*first, *rest), kwargs)[0])
    if any(not hasattr(x, "__array__") for call in calls for x in call):
        raise TypeError(
            "`advise` runs the function, but a `jax.ShapeDtypeStruct` was given. "
            "Pass arrays with real numbers."
        )
    _check_shapes(calls)
    predicted = predictions(found, calls, tell)
    tell("tracing fp8")
    work = _costs(found.program, len(found.groups))
    matmuls = program(fp8(func), args, kwargs).recording.matmuls
    changed = {matmul.param for matmul in matmuls if not matmul.reason}
    in_fp8 = frozenset(i for i, x in enumerate(found.groups) if x.param in changed)
    return Judged(found, predicted, work, in_fp8, calls[0])


def _check_shapes(calls: Sequence[Sequence[Array]]) -> None:
    first, *others = ([(x.shape, x.dtype) for x in call] for call in calls)
    for i, other in enumerate(others):
        if other != first:
            pairs = zip(first, other, strict=False)
            a, b = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
            raise ValueError(
                f"`batches[{i}]` must have the shapes and dtypes of the other arguments, "
                f"but one array is {b} instead of {a}. Pass batches of one size."
            )


# --- The search -----------------------------------------------------------------------


class Option(NamedTuple):
    """A policy as groups, with its predictions.

    Attributes:
        half: The 16-bit format.
        kept: Selectors of what stays in f32.
        low: The groups in 16 bits.
        fp8: The groups whose matmuls run in fp8.
        kept_fp8: Selectors of what does not.
        error: See `Candidate.predicted_error`.
        time: See `Candidate.predicted_time`.
    """

    half: str
    kept: tuple[Keep, ...]
    low: frozenset[int]
    fp8: frozenset[int]
    kept_fp8: tuple[Keep, ...]
    error: float
    time: float

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy."""
        return PrecisionPolicy(
            self.half,
            tuple(x.pattern for x in self.kept if x.kind == "keep"),
            tuple(x.pattern for x in self.kept if x.kind == "functions"),
            bool(self.fp8),
            tuple(x.pattern for x in self.kept_fp8) if self.fp8 else (),
        )


def option(
    known: Judged,
    half: str,
    kept: Sequence[Keep] = (),
    kept_fp8: Sequence[Keep] | None = None,
) -> Option:
    """Returns the option with some selectors; without fp8 if there are none for it."""
    low = known.active - known.selected(kept)
    chosen = set[int]()
    if kept_fp8 is not None:
        chosen = (known.fp8 & low) - known.selected(kept_fp8)
    return Option(
        half,
        tuple(kept),
        frozenset(low),
        frozenset(chosen),
        tuple(kept_fp8 or ()),
        math.sqrt(known.predicted.square(half, low, chosen)),
        known.seconds(half, low, chosen),
    )


def options(known: Judged, half: str) -> Iterator[Option]:
    """Yields options of one format, from the fastest on, each with one more selector.

    The first keeps only what f16 cannot hold. The sum of squares makes the greedy order
    good: against an exhaustive search it is within a few percent at equal cost.
    """
    predicted, kept = known.predicted, list[Keep]()
    if half == "f16":
        bad = [
            known.groups[i].selector
            for i in sorted(known.active)
            if predicted.overflows(i) or predicted.vanishing(i) > MOST_VANISHING
        ]
        kept = list(dict.fromkeys(bad))
    while True:
        found = option(known, half, kept)
        yield found
        best = _best_keep(known, found)
        if best is None:
            return
        kept.append(best)


def options_fp8(known: Judged, base: Option) -> Iterator[Option]:
    """Yields options with fp8, each with one more linear layer in 16 bits."""

    def loss(i: int) -> float:
        cost = known.work[i]
        saved = cost.seconds("bf16") - cost.seconds("fp8")
        return known.predicted.fp8(i) / (saved + 1e-15)

    kept = list[Keep]()
    while True:
        found = option(known, base.half, base.kept, kept)
        if not found.fp8:
            return
        yield found
        kept.append(known.groups[max(sorted(found.fp8), key=loss)].selector)


def _best_keep(known: Judged, option: Option) -> Keep | None:
    """Returns the selector with the largest decrease of the squared error for its time."""
    half, low = option.half, option.low
    every = known.seconds(half, ()) - known.seconds(half, known.active)
    scores: dict[Keep, float] = {}
    for selector in dict.fromkeys(known.groups[i].selector for i in sorted(low)):
        rest = low - known.selected([selector])
        gain = option.error**2 - known.predicted.square(half, rest)
        slower = known.seconds(half, rest) - known.seconds(half, low)
        if gain > 0 and (len(rest) > 0 or len(low) == 1):
            scores[selector] = gain / (slower + 0.01 * every + 1e-15)
    return max(scores, key=scores.__getitem__, default=None)


def front(known: Judged, halves: Sequence[str], *, with_fp8: bool) -> list[Option]:
    """Returns the options that no other beats in both time and error, fastest first."""
    found = list[Option]()
    for half in halves:
        found += itertools.islice(options(known, half), _LONGEST)
    if with_fp8:
        for base in [x for x in found if x.half == "bf16"][:_BASES]:
            found += itertools.islice(options_fp8(known, base), _LONGEST)
    best, kept = math.inf, []
    for x in sorted(found, key=lambda x: (x.time, x.error)):
        if x.error < best:
            best = x.error
            kept.append(x)
    return kept


# --- Proposals ------------------------------------------------------------------------


def propose(known: Judged, name: str, limit: float) -> Candidate:
    """Returns the policy with the shortest keep-list that is predicted to be good enough.

    Args:
        known: The function.
        name: bf16, f16 or fp8.
        limit: The largest predicted error.
    """
    if name != "fp8":
        found = _first_within(options(known, name), limit)
        remarks = []
        if name == "f16":
            remarks.append(
                "Take the gradient with `mpx.value_and_grad` and a loss scaling."
            )
        if found.error > limit:
            remarks.append(f"No keep-list reaches {limit:g}.")
        if known.active and not found.low:
            remarks.append(
                "Nothing is left in 16 bits: the operations at fault have no name that is "
                "theirs alone. Put them into a `jax.named_scope`, or use another format."
            )
        return candidate(known, found, " ".join(remarks))
    base = _first_within(options(known, "bf16"), min(limit, LIMITS["bf16"]))
    found = _first_within([*options_fp8(known, base), base], limit)
    remark = ""
    if not known.fp8:
        remark = (
            "fp8 changes nothing here: no matmul with a parameter is large enough to "
            "gain. `mpx.inspect.report(mpx.fp8(loss), ...)` says why."
        )
    elif not found.fp8:
        remark = "No linear layer is left in fp8: use bf16."
    default = option(known, "bf16", (), ()).error
    kept = _labels(known, known.active - base.low)
    kept += _labels(known, (known.fp8 & base.low) - found.fp8)
    return dataclasses.replace(
        candidate(known, found, remark), kept=kept, default=default
    )


def _first_within(found: Iterable[Option], limit: float) -> Option:
    """Returns the first option whose predicted error is small enough, else the last."""
    last = None
    for last in found:
        if last.error <= limit:
            break
    assert last is not None
    return last


def candidate(known: Judged, found: Option, remark: str = "") -> Candidate:
    """Returns the policy of an option with its predictions."""
    return Candidate(
        found.policy,
        found.error,
        found.time,
        kept=_labels(known, known.active - found.low),
        default=option(known, found.half, (), () if found.fp8 else None).error,
        remark=remark,
    )


def _labels(known: Judged, groups: Collection[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known.groups[i].label for i in sorted(groups)))
