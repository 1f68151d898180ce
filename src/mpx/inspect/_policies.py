"""Precision policies, and the search for the one with the shortest keep-list."""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from jaxtyping import PyTree

from mpx._amp import AmpRules, amp
from mpx._casting._context import is_amp
from mpx._fp8 import Fp8Function, fp8
from mpx._jax._compat import primitive_name
from mpx._jax._devices import H200
from mpx._jax._warn import tell
from mpx._program._queries import MATMULS, flops, walk
from mpx.inspect._emulation import (
    Change,
    Emulation,
    Keep,
    Rounded,
    change,
    label_of,
)
from mpx.inspect._program import program

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

    def __str__(self) -> str:
        """Returns the code for a function that is called `loss`."""
        code = f'mpx.amp(loss, "{self.half}"'
        if self.keep:
            code += f", keep={list(self.keep)!r}"
        if self.functions:
            rules = dict.fromkeys(self.functions, "original")
            code += f", rules=mpx.AmpRules(functions={rules!r})"
        if not self.fp8:
            return f"{code})"
        more = f", keep={list(self.keep_fp8)!r}" if self.keep_fp8 else ""
        return f"mpx.fp8({code}){more})"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A policy with its predictions, and its measurements if there are any.

    Attributes:
        policy: The policy; `policy.apply(loss)` applies it, and `str(policy)` is its code.
        predicted_error: The error of the emulated gradient, relative to the gradient.
        predicted_time: The seconds of its matmuls at the rates of an H200.
        error: The measured error, `None` if it was not measured. It is infinite if the
            gradient is not finite.
        time: The measured seconds of a gradient; `None` without a GPU.
        spread: How far that time varied between runs, in seconds.
        default: The predicted error without any keep-list.
        remark: What to know before it is used.
    """

    policy: PrecisionPolicy
    predicted_error: float
    predicted_time: float
    error: float | None = None
    time: float | None = None
    spread: float | None = None
    default: float = 0.0
    remark: str = ""


# --- A function under study -----------------------------------------------------------


class Study:
    """A function, what rounding does to its gradient, and the work of each group."""

    def __init__(
        self,
        func: Callable[..., PyTree],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        formats: Sequence[str] = (*HALVES, *EIGHTS),
    ) -> None:
        if is_amp(func) or isinstance(func, Fp8Function):
            raise TypeError(
                "The function is under `amp` or `fp8`, but what they would do is what is "
                "predicted. Pass the function that you gave to them."
            )
        self.call, self._changes = (func, args, kwargs), dict[Rounded, Change]()
        with_fp8 = any(x in formats for x in EIGHTS)
        tell("advise: tracing the function")
        self.emulation = Emulation(func, args, kwargs, with_fp8=with_fp8)
        self.groups, traced = self.emulation.groups, self.emulation.program
        if any(not hasattr(x, "__array__") for x in traced.arrays):
            raise TypeError(
                "`advise` runs the function, but a `jax.ShapeDtypeStruct` was given. "
                "Pass arrays with real numbers."
            )
        # The groups that `amp` runs in 16 bits, all and by label.
        self.active = self.emulation.groups_of()
        self.labels: dict[str, frozenset[int]] = {}
        for i in sorted(self.active):
            label = self.groups[i].label
            self.labels[label] = self.labels.get(label, frozenset()) | {i}
        # The operations of the matmuls of each group.
        self.flops: collections.Counter[int | None] = collections.Counter()
        for eqn, scopes, times, _ in walk(traced.jaxpr):
            if primitive_name(eqn) in MATMULS:
                self.flops[label_of(scopes)[0]] += flops(eqn) * times
        # The groups whose matmuls `mpx.fp8` would change.
        self.fp8 = frozenset[int]()
        if with_fp8:
            matmuls = program(fp8(func), args, kwargs).recording.matmuls
            changed = {matmul.param for matmul in matmuls if not matmul.reason}
            pairs = enumerate(self.groups)
            self.fp8 = frozenset(i for i, x in pairs if x.param in changed)
        if not self.change(Rounded()).is_finite:
            raise ValueError(
                "The gradient in f32 is not finite: there is nothing to compare with. "
                "`mpx.inspect.explain` names the operation that is at fault."
            )
        # The loss scale for f16, and the labels of groups that do not fit into it.
        self.scale, self.overflowing = 1.0, set[str]()
        if "f16" in formats:
            self.scale, self.overflowing = self._range()

    def change(self, rounds: Rounded) -> Change:
        """Returns what some rounding does to the gradient; runs it once."""
        if rounds not in self._changes:
            tell(f"advise: gradient {len(self._changes) + 1}")
            grads = self.emulation.gradient(rounds)
            self._changes[rounds] = change(grads, self.emulation.exact)
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

    def parts(self, policy: PrecisionPolicy) -> tuple[frozenset[int], frozenset[int]]:
        """Returns the groups that a policy runs in 16 bits, and those of them in fp8."""
        kept = [Keep("keep", x) for x in policy.keep]
        kept += [Keep("functions", x) for x in policy.functions]
        low = self.active - self.selected(kept)
        if not policy.fp8:
            return low, frozenset()
        wide = self.selected(Keep("keep", x) for x in policy.keep_fp8)
        return low, (self.fp8 & low) - wide

    def error(self, policy: PrecisionPolicy) -> float:
        """Returns the error of the emulated gradient."""
        low, eight = self.parts(policy)
        return self.change(Rounded(policy.half, low, eight, scale=self.scale)).error

    def candidate(self, policy: PrecisionPolicy, remark: str = "") -> Candidate:
        """Returns a policy with its predictions."""
        low, eight = self.parts(policy)
        seconds = sum(
            self.flops[i]
            / H200["fp8" if i in eight else policy.half if i in low else "f32"]
            for i in range(len(self.groups))
        )
        default = self.error(PrecisionPolicy(policy.half, fp8=policy.fp8))
        error = self.error(policy)
        return Candidate(policy, error, seconds, default=default, remark=remark)


# --- The search -----------------------------------------------------------------------


def policies(known: Study, half: str) -> list[PrecisionPolicy]:
    """Returns policies in 16 bits, each with one more selector.

    The first keeps only what f16 cannot hold.
    """
    kept = list[Keep]()
    if half == "f16":
        kept = [
            known.selector(label)
            for label in known.labels
            if label in known.overflowing or known.alone("f16", label).lost > MOST_LOST
        ]
    return [
        PrecisionPolicy(
            half,
            tuple(x.pattern for x in selectors if x.kind == "keep"),
            tuple(x.pattern for x in selectors if x.kind == "functions"),
        )
        for selectors in _lists(known, kept, known.labels, [half])
    ]


def policies_fp8(known: Study, base: PrecisionPolicy) -> list[PrecisionPolicy]:
    """Returns policies with fp8, each with one more linear layer in 16 bits; last `base`."""
    chosen = sorted(known.fp8 & known.parts(base)[0])
    labels = dict.fromkeys(known.groups[i].label for i in chosen)
    lists = _lists(known, (), labels, EIGHTS)[:-1]
    keeps = [tuple(x.pattern for x in kept) for kept in lists]
    return [
        *(dataclasses.replace(base, fp8=True, keep_fp8=keep) for keep in keeps),
        base,
    ]


def _lists(
    known: Study, first: Sequence[Keep], labels: Iterable[str], formats: Sequence[str]
) -> list[tuple[Keep, ...]]:
    """Returns growing lists of selectors, without those in vain.

    Labels with much squared error for the work that their selectors keep come first. The
    work is the share of the matmuls' operations and the share of the groups.
    """
    flops = sum(known.flops[i] for i in known.active) or 1
    scores = dict[Keep, float]()
    for label in labels:
        selector = known.selector(label)
        groups = known.selected([selector]) & known.active
        work = sum(known.flops[i] for i in groups) / flops
        square = sum(known.alone(x, label).error ** 2 for x in formats)
        scores[selector] = square / (work + len(groups) / len(known.active))
    lists, done = [tuple(first)], known.selected(first)
    for selector in sorted(scores, key=scores.__getitem__, reverse=True):
        new = known.selected([selector]) & known.active
        if not new <= done:
            done |= new
            lists.append((*lists[-1], selector))
    return lists


def within(known: Study, name: str, limit: float) -> list[PrecisionPolicy]:
    """Returns the policies for bf16, f16 or fp8 from the first that is good enough on.

    There always is one: the last keeps everything in f32, or for fp8 everything in bf16.
    """
    if name == "fp8":
        base = within(known, "bf16", min(limit, LIMITS["bf16"]))[0]
        found = policies_fp8(known, base)
    else:
        found = policies(known, name)
    first = bisect.bisect_left(found, True, key=lambda x: known.error(x) <= limit)
    return found[min(first, len(found) - 1) :]


def propose(known: Study, name: str, limit: float) -> Candidate:
    """Returns the policy with the shortest keep-list whose emulation is good enough."""
    found, remark = within(known, name, limit)[0], ""
    if name == "f16":
        remark = "Take the gradient with `mpx.value_and_grad` and a loss scaling."
    if name == "fp8" and not known.fp8:
        remark = (
            "fp8 changes nothing here: no matmul with a parameter is large enough to "
            "gain. `mpx.inspect.report(mpx.fp8(loss), ...)` says why."
        )
    elif name == "fp8" and not found.fp8:
        remark = "No linear layer is left in fp8: use bf16."
    elif known.active and not known.parts(found)[0]:
        remark = (
            "Nothing is left in 16 bits: the operations at fault have no name that is "
            "theirs alone. Put them into a `jax.named_scope`, or use another format."
        )
    return known.candidate(found, remark)
