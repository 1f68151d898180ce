"""Precision policies, and the search for the one with the shortest keep-list."""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from jax import Array

from mpx._amp import AmpRules, amp
from mpx._amp._call import flat_call
from mpx._casting._context import is_amp
from mpx._fp8 import Fp8Function, fp8
from mpx._jax._compat import primitive_name
from mpx._jax._devices import H200
from mpx._jax._progress import Tell, silent
from mpx._program._queries import MATMULS, flops, walk
from mpx.inspect._buffers import traffic
from mpx.inspect._emulation import Change, Emulation, Rounded
from mpx.inspect._groups import Group, Keep, label_of
from mpx.inspect._program import Program, program

HALVES = ("bf16", "f16")
EIGHTS = ("e4m3", "e5m2")
LIMITS = {"bf16": 0.05, "f16": 0.05, "fp8": 0.25}
"""The gradient errors that are left without a remark. They are a judgement: about what one
16-bit or 8-bit rounding of every operand does to the gradient of a healthy model."""
MOST_LOST = 0.5
"""The share of a parameter's gradient that f16 may make zero."""
_SCALES = [2.0**x for x in range(24, -25, -1)]
"""Loss scales, from the ceiling of `mpx.DynamicLossScaling.pow2()` on."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """A precision for a function, as a transformation and as code.

    Attributes:
        half: `"bf16"` or `"f16"`.
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
        rules = None
        if self.functions:
            rules = AmpRules(functions=dict.fromkeys(self.functions, "original"))
        func = amp(func, self.half, keep=list(self.keep), rules=rules)
        return fp8(func, keep=list(self.keep_fp8)) if self.fp8 else func

    def text(self, name: str = "loss") -> str:
        """Returns the code that makes the function `name` one in this precision."""
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
        predicted_error: The error of the emulated gradient, relative to the gradient.
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


class Option(NamedTuple):
    """A policy as selectors: of what stays in f32, and of what does not run in fp8.

    Without fp8, `kept_fp8` is `None`.
    """

    half: str
    kept: tuple[Keep, ...] = ()
    kept_fp8: tuple[Keep, ...] | None = None


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
            operations[label_of(scopes)[0]] += flops(eqn) * times
    numbers = traffic(grad.jaxpr, lambda scopes: label_of(scopes)[0])
    return [Cost(operations[i], numbers[i]) for i in range(count)]


# --- A function under study -----------------------------------------------------------


class Study:
    """A function, what rounding does to its gradient, and the cost of each group.

    Attributes:
        emulation: Emulates policies.
        active: The groups that `amp` runs in 16 bits.
        labels: The active groups by label.
        work: The cost of each group.
        fp8: The groups whose matmuls `mpx.fp8` would change.
        scale: The loss scale for f16.
        overflowing: The labels of groups whose values do not fit into f16.
    """

    def __init__(
        self,
        func: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batches: Sequence[object] = (),
        formats: Sequence[str] = (*HALVES, *EIGHTS),
        *,
        tell: Tell = silent,
    ) -> None:
        if is_amp(func) or isinstance(func, Fp8Function):
            raise TypeError(
                "The function is under `amp` or `fp8`, but what they would do is what is "
                "predicted. Pass the function that you gave to them."
            )
        self._tell, self._changes = tell, dict[Rounded, Change]()
        tell("tracing the function")
        with_fp8 = any(x in formats for x in EIGHTS)
        self.emulation = Emulation(func, args, kwargs, with_fp8=with_fp8)
        calls = _calls(func, args, kwargs, batches, self.emulation.program)
        self.active = self.emulation.groups_of()
        self.labels: dict[str, frozenset[int]] = {}
        for i in sorted(self.active):
            label = self.groups[i].label
            self.labels[label] = self.labels.get(label, frozenset()) | {i}
        self.work = _costs(self.emulation.program, len(self.groups))
        self.fp8 = frozenset[int]()
        if with_fp8:
            matmuls = program(fp8(func), args, kwargs).recording.matmuls
            changed = {matmul.param for matmul in matmuls if not matmul.reason}
            pairs = enumerate(self.groups)
            self.fp8 = frozenset(i for i, x in pairs if x.param in changed)
        tell("compiling the emulation")
        self.emulation.prepare(calls)
        if not self.change(Rounded()).is_finite:
            raise ValueError(
                "The gradient in f32 is not finite: there is nothing to compare with. "
                "`mpx.inspect.explain` names the operation that is at fault."
            )
        self.scale, self.overflowing = 1.0, set[str]()
        if "f16" in formats:
            self.scale, self.overflowing = self._range()

    @property
    def groups(self) -> list[Group]:
        """The groups."""
        return self.emulation.groups

    def change(self, rounds: Rounded) -> Change:
        """Returns what some rounding does to the gradient; runs it once."""
        if rounds not in self._changes:
            self._tell(f"gradient {len(self._changes) + 1}")
            self._changes[rounds] = self.emulation.change(rounds)
        return self._changes[rounds]

    def _range(self) -> tuple[float, set[str]]:
        """Returns the loss scale at which f16 comes to rest, and what overflows with any."""
        bad = set[str]()
        if not self.change(Rounded("f16", self.active)).is_finite:
            bad = {
                label
                for label, groups in self.labels.items()
                if not self.change(Rounded("f16", groups, is_alone=True)).is_finite
            }
        rest = self.active.difference(*(self.labels[x] for x in bad))

        def fits(scale: float) -> bool:
            return self.change(Rounded("f16", rest, scale=scale)).is_finite

        first = bisect.bisect_left(_SCALES, True, key=fits)
        return _SCALES[min(first, len(_SCALES) - 1)], bad

    def alone(self, name: str, label: str) -> Change:
        """Returns what rounding the groups of one label does, in one format."""
        groups = self.labels[label]
        if name in EIGHTS:
            eight = groups & self.emulation.groups_of(eight=True)
            found = Rounded(eight=eight, eights=(name, name))
            return self.change(found) if eight else Change(0.0, 0.0)
        return self.change(Rounded(name, groups, scale=self.scale, is_alone=True))

    def selector(self, label: str) -> Keep:
        """Returns what keeps the groups of a label in f32."""
        return self.groups[min(self.labels[label])].selector

    def selected(self, selectors: Iterable[Keep]) -> frozenset[int]:
        """Returns the groups that run as they are written."""
        chosen, pairs = list(selectors), enumerate(self.groups)
        return frozenset(i for i, x in pairs if any(y.selects(x) for y in chosen))

    def parts(self, option: Option) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the groups that an option runs in 16 bits, and those of them in fp8."""
        low = self.active - self.selected(option.kept)
        if option.kept_fp8 is None:
            return low, frozenset()
        return low, (self.fp8 & low) - self.selected(option.kept_fp8)

    def error(self, option: Option) -> float:
        """Returns the error of the emulated gradient."""
        low, eight = self.parts(option)
        return self.change(Rounded(option.half, low, eight, scale=self.scale)).error

    def seconds(
        self, half: str, low: Collection[int], fp8: Collection[int] = ()
    ) -> float:
        """Returns the predicted time of the operations that a policy can change."""
        return sum(
            cost.seconds("fp8" if i in fp8 else half if i in low else "f32")
            for i, cost in enumerate(self.work)
        )

    def policy(self, option: Option) -> PrecisionPolicy:
        """Returns an option as a policy."""
        has_fp8 = bool(self.parts(option)[1])
        return PrecisionPolicy(
            option.half,
            tuple(x.pattern for x in option.kept if x.kind == "keep"),
            tuple(x.pattern for x in option.kept if x.kind == "functions"),
            has_fp8,
            tuple(x.pattern for x in option.kept_fp8 or ()) if has_fp8 else (),
        )

    def candidate(self, option: Option, remark: str = "") -> Candidate:
        """Returns an option with its predictions."""
        low, eight = self.parts(option)
        wide = self.active - low
        if option.kept_fp8 is not None:
            wide |= self.fp8 - eight
        default = Option(option.half, (), None if option.kept_fp8 is None else ())
        return Candidate(
            self.policy(option),
            self.error(option),
            self.seconds(option.half, low, eight),
            kept=tuple(dict.fromkeys(self.groups[i].label for i in sorted(wide))),
            default=self.error(default),
            remark=remark,
        )


def _calls(
    func: Callable[..., object],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Sequence[object],
    traced: Program,
) -> list[list[Array]]:
    """Returns the arrays of each batch, checked."""
    calls = [traced.arrays]
    first = args[:1] if any(traced.names[i].argument for i in traced.params) else ()
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
    types, *others = ([(x.shape, x.dtype) for x in call] for call in calls)
    for i, other in enumerate(others):
        if other != types:
            pairs = zip(types, other, strict=False)
            a, b = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
            raise ValueError(
                f"`batches[{i}]` must have the shapes and dtypes of the other arguments, "
                f"but one array is {b} instead of {a}. Pass batches of one size."
            )
    return calls


# --- The search -----------------------------------------------------------------------


def options(known: Study, half: str) -> list[Option]:
    """Returns options of one format, from the fastest on, each with one more selector.

    The first keeps only what f16 cannot hold. Selectors that remove more squared error for
    their time come first: squares of errors add up over groups.
    """
    kept, chosen = list[Keep](), dict[Keep, float]()
    if half == "f16":
        kept = [
            known.selector(label)
            for label in known.labels
            if label in known.overflowing or known.alone("f16", label).lost > MOST_LOST
        ]
    every = known.seconds(half, ()) - known.seconds(half, known.active)
    for label in known.labels:
        selector = known.selector(label)
        groups = known.selected([selector])
        gain = sum(
            known.alone(half, other).error ** 2
            for other, members in known.labels.items()
            if members <= groups
        )
        rest = known.active - groups
        slower = known.seconds(half, rest) - known.seconds(half, known.active)
        chosen[selector] = gain / (slower + 0.01 * every + 1e-15)
    return [Option(half, x) for x in _lists(known, kept, chosen)]


def options_fp8(known: Study, base: Option) -> list[Option]:
    """Returns options with fp8, each with one more linear layer in 16 bits."""
    chosen = dict[Keep, float]()
    for i in sorted(known.fp8 & known.parts(base)[0]):
        cost, label = known.work[i], known.groups[i].label
        saved = cost.seconds("bf16") - cost.seconds("fp8")
        square = sum(known.alone(x, label).error ** 2 for x in EIGHTS)
        chosen[known.groups[i].selector] = square / (saved + 1e-15)
    return [base._replace(kept_fp8=x) for x in _lists(known, (), chosen)]


def _lists(
    known: Study, first: Sequence[Keep], scores: dict[Keep, float]
) -> list[tuple[Keep, ...]]:
    """Returns growing lists of selectors, by falling scores, without those in vain."""
    lists, done = [tuple(first)], known.selected(first)
    for selector in sorted(scores, key=scores.__getitem__, reverse=True):
        new = known.selected([selector]) & known.active
        if not new <= done:
            done |= new
            lists.append((*lists[-1], selector))
    return lists


def within(known: Study, name: str, limit: float) -> list[Option]:
    """Returns the options for bf16, f16 or fp8 from the first that is good enough on.

    There always is one: the last keeps everything in f32, or for fp8 everything in bf16.
    """
    if name == "fp8":
        base = within(known, "bf16", min(limit, LIMITS["bf16"]))[0]
        found = options_fp8(known, base)
    else:
        found = options(known, name)
    first = bisect.bisect_left(found, True, key=lambda x: known.error(x) <= limit)
    return found[min(first, len(found) - 1) :]


def propose(known: Study, name: str, limit: float) -> Candidate:
    """Returns the policy with the shortest keep-list whose emulation is good enough."""
    found, remark = within(known, name, limit)[0], ""
    low, eight = known.parts(found)
    if name == "f16":
        remark = "Take the gradient with `mpx.value_and_grad` and a loss scaling."
    if name == "fp8" and not known.fp8:
        remark = (
            "fp8 changes nothing here: no matmul with a parameter is large enough to "
            "gain. `mpx.inspect.report(mpx.fp8(loss), ...)` says why."
        )
    elif name == "fp8" and not eight:
        remark = "No linear layer is left in fp8: use bf16."
    elif known.active and not low:
        remark = (
            "Nothing is left in 16 bits: the operations at fault have no name that is "
            "theirs alone. Put them into a `jax.named_scope`, or use another format."
        )
    return known.candidate(found, remark)
