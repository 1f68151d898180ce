"""`advise`: which precision for which part of a function, emulated or measured."""

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import jax
from jaxtyping import PyTree

from mpx._amp import AmpRules, amp
from mpx._casting._context import gradient_function, is_amp
from mpx._casting._select import search
from mpx._fp8 import Fp8Function
from mpx._jax._arguments import check_value
from mpx._jax._warn import tell
from mpx._scaling._loss_scaling import StaticLossScaling
from mpx.inspect._emulation import Change, Emulation, Group, Rounded, change
from mpx.inspect._program import gradient, program
from mpx.inspect._result import Result, Table, percent

HALVES = ("bf16", "f16")
EIGHTS = ("e4m3", "e5m2")
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

    Examples:
        >>> print(PrecisionPolicy("bf16", keep=("^head/weight$",)))
        mpx.amp(loss, "bf16", keep=['^head/weight$'])
    """

    half: str = "bf16"
    keep: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()

    def apply(self, func: Callable[P, T]) -> Callable[P, T]:
        """Returns the function in this precision.

        Gradients of an f16 function need a loss scale: take them with
        `mpx.value_and_grad` and `mpx.DynamicLossScaling.pow2()`.
        """
        rules = AmpRules(functions=dict.fromkeys(self.functions, "original"))
        return amp(func, self.half, keep=list(self.keep), rules=rules)

    def __str__(self) -> str:
        """Returns the code for a function that is called `loss`."""
        code = f'mpx.amp(loss, "{self.half}"'
        if self.keep:
            code += f", keep={list(self.keep)!r}"
        if self.functions:
            rules = dict.fromkeys(self.functions, "original")
            code += f", rules=mpx.AmpRules(functions={rules!r})"
        return f"{code})"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A proposed policy.

    Attributes:
        policy: The policy; `policy.apply(loss)` applies it, and `str(policy)` is its code.
        error: The error of the gradient, relative to the gradient, emulated or measured. It
            is infinite if the gradient is not finite.
        default: The same without any keep-list.
        share: The share of the matmuls' operations that run in 16 bits.
        remark: What to know before it is used.
    """

    policy: PrecisionPolicy
    error: float
    default: float
    share: float
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
        self._call, self._changes = (func, args, kwargs), dict[Rounded, Change]()
        tell("advise: tracing the function")
        # In place of fused attention its equations, so that its parts are judged.
        forward = program(amp(func, "bf16", attention="keep"), args, kwargs)
        with_fp8 = not {*formats}.isdisjoint(EIGHTS)
        if any(not hasattr(x, "__array__") for x in forward.arrays):
            raise TypeError(
                "`advise` runs the function, but a `jax.ShapeDtypeStruct` was given. "
                "Pass arrays with real numbers."
            )
        self.emulation = Emulation(forward, with_fp8=with_fp8)
        self.groups, self.flops = self.emulation.groups, self.emulation.flops
        # The groups that `amp` runs in 16 bits, all and by label.
        self.active = self.emulation.groups_of()
        self.labels: dict[str, frozenset[int]] = {}
        for i in sorted(self.active):
            label = self.groups[i].label
            self.labels[label] = self.labels.get(label, frozenset()) | {i}
        if not math.isfinite(self.change(Rounded()).error):
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
        if not math.isfinite(self.change(Rounded("f16", self.active)).error):
            rounds = {
                k: Rounded("f16", x, is_alone=True) for k, x in self.labels.items()
            }
            bad = {k for k, x in rounds.items() if math.isinf(self.change(x).error)}
        rest = self.active.difference(*(self.labels[x] for x in bad))

        def fits(scale: float) -> bool:
            return math.isfinite(self.change(Rounded("f16", rest, scale=scale)).error)

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

    def keeping(self, half: str, label: str) -> PrecisionPolicy:
        """Returns what keeps the groups of a label in f32, with as few others as possible."""
        group = self.groups[min(self.labels[label])]
        pattern = f"{re.escape(label)}$"
        if group.param or group.scope:
            return PrecisionPolicy(half, keep=(f"^{pattern}",))
        return PrecisionPolicy(half, functions=(pattern,))

    def low(self, policy: PrecisionPolicy) -> frozenset[int]:
        """Returns the groups that a policy runs in 16 bits."""
        return frozenset(i for i in self.active if not _keeps(policy, self.groups[i]))

    def share(self, groups: Iterable[int]) -> float:
        """Returns the share of the matmuls' operations that some groups have."""
        return sum(self.flops[i] for i in groups) / (self.flops.total() or 1)

    def error(self, policy: PrecisionPolicy) -> float:
        """Returns the error of the emulated gradient."""
        rounds = Rounded(policy.half, self.low(policy), scale=self.scale)
        return self.change(rounds).error

    def measure(self, policy: PrecisionPolicy) -> float:
        """Returns the error of the real gradient."""
        tell(f"advise: measuring {policy}")
        func, args, kwargs = self._call
        scaling = StaticLossScaling(self.scale) if policy.half == "f16" else None
        with gradient_function():
            grad = gradient(program(policy.apply(func), args, kwargs), scaling)
        grads = jax.jit(grad.__call__)(*grad.arrays)[1:]
        return change(grads, self.emulation.exact).error


# --- The search -----------------------------------------------------------------------


def policies(known: Study, half: str) -> list[PrecisionPolicy]:
    """Returns policies, each with one more selector; the last keeps everything in f32.

    The first keeps only what f16 cannot hold. Then labels with much squared error for the
    work that their selectors keep come first. The work is the share of the matmuls'
    operations and the share of the groups. Selectors that select nothing new are left out.
    """
    scores, found = dict[PrecisionPolicy, float](), [PrecisionPolicy(half)]
    every = known.share(known.active) or 1
    for label in known.labels:
        one, change = known.keeping(half, label), known.alone(half, label)
        if half == "f16" and (label in known.overflowing or change.lost > MOST_LOST):
            found = [_both(found[0], one)]
        groups = known.active - known.low(one)
        work = known.share(groups) / every + len(groups) / len(known.active)
        scores[one] = change.error**2 / work
    for one in sorted(scores, key=scores.__getitem__, reverse=True):
        longer = _both(found[-1], one)
        if known.low(longer) < known.low(found[-1]):
            found.append(longer)
    return found


def _both(one: PrecisionPolicy, other: PrecisionPolicy) -> PrecisionPolicy:
    functions = one.functions + other.functions
    return PrecisionPolicy(one.half, one.keep + other.keep, functions)


def _keeps(policy: PrecisionPolicy, group: Group) -> bool:
    """Returns whether the operations of a group run as they are written."""
    paths = [group.param, *itertools.accumulate(group.scope.split("/"), "{}/{}".format)]
    pairs = itertools.product(policy.keep, filter(None, paths))
    others = itertools.product(policy.functions, group.functions)
    return any(search(*pair) for pair in (*pairs, *others))


def propose(known: Study, half: str, limit: float, measure: bool = False) -> Candidate:
    """Returns the policy with the shortest keep-list that is good enough.

    The search assumes that longer lists are more exact. It measures from the list on that is
    good enough in the emulation.
    """
    found, error = policies(known, half), known.error
    last = len(found) - 1

    def search(start: int) -> int:
        return bisect.bisect_left(
            found, True, start, last, key=lambda x: error(x) <= limit
        )

    first = search(0)
    if measure:
        error = functools.cache(known.measure)
        first = first if error(found[first]) <= limit else search(min(first + 1, last))
    policy, remark = found[first], ""
    if half == "f16":
        remark = "Take the gradient with `mpx.value_and_grad` and a loss scaling."
    if error(policy) > limit:
        remark = (
            f"No keep-list reaches {limit:g}: allow a larger error, or stay in f32."
        )
    elif known.active and not known.low(policy):
        remark = (
            "Nothing is left in 16 bits: the operations at fault have no name that is "
            "theirs alone. Put them into a `jax.named_scope`, or use another format."
        )
    errors = error(policy), error(PrecisionPolicy(half))
    return Candidate(policy, *errors, known.share(known.low(policy)), remark)


# --- The result -----------------------------------------------------------------------

_SHOWN = 30  # groups


@dataclasses.dataclass(frozen=True)
class GroupAdvice:
    """What rounding one group of operations does.

    Attributes:
        label: The path of a parameter, for its matmuls; else a scope or a function.
        selector: The expression that keeps it in f32.
        kind: `"keep"` if that is for `amp`'s `keep`, `"functions"` if for
            `AmpRules.functions`.
        flops: The operations of its matmuls, forward and backward.
        errors: By format: the norm of the change of the gradient over the norm of the
            gradient, if this group alone is rounded. Of 8-bit formats, only operands of
            matmuls with a parameter are rounded, with one scale for each.
        overflows: Whether f16 is excluded: a number of the forward pass is too large.
        vanishing: The largest share of a parameter's gradient that f16 makes zero.
    """

    label: str
    selector: str
    kind: str
    flops: float
    errors: Mapping[str, float]
    overflows: bool
    vanishing: float

    @property
    def note(self) -> str:
        """What to know besides the errors."""
        if self.overflows:
            return "f16 overflows"
        if self.vanishing > MOST_LOST:
            return f"f16 loses {percent(self.vanishing)} of a gradient"
        return ""


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """What rounding does to a function, and policies for it, made by `advise`.

    Attributes:
        groups: The groups of operations that `amp` runs in 16 bits, worst first.
        proposals: By bf16 and f16, as asked for: the policy with the shortest keep-list
            that is good enough.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
    """

    groups: tuple[GroupAdvice, ...]
    proposals: Mapping[str, Candidate]
    loss_scale: float
    opaque: tuple[str, ...]

    @property
    def policy(self) -> PrecisionPolicy:
        """The proposed policy with the most work in 16 bits; bf16 wins ties."""
        return max(self.proposals.values(), key=lambda x: x.share).policy

    def tables(self) -> Sequence[Table]:
        """Returns the groups, then the proposals."""
        formats = list(self.groups[0].errors) if self.groups else []
        total = sum(x.flops for x in self.groups) or 1
        rows = [
            (
                x.label,
                percent(x.flops / total) if x.flops else "–",
                *(_number(x.errors[name]) for name in formats),
                x.note,
            )
            for x in self.groups[:_SHOWN]
        ]
        title = "Gradient error if one group alone is rounded"
        right = frozenset(range(1, 2 + len(formats)))
        tables = [Table(("group", "flops", *formats, ""), rows, title, right)]
        texts, rest = list[str](), len(self.groups) - _SHOWN
        if rest > 0:
            texts.append(f"{rest} more groups have smaller errors.")
        if self.opaque:
            texts.append(f"Not looked into: {', '.join(self.opaque)}.")
        tables += [_described(*item) for item in self.proposals.items()]
        return [*tables, *map(Table.text, texts)]


def _number(value: float) -> str:
    return "–" if value == 0 else f"{value:.1e}"


def _described(name: str, proposal: Candidate) -> Table:
    policy = proposal.policy
    error = f"gradient error {_number(proposal.error)}"
    if policy.keep or policy.functions:
        error += f", instead of {_number(proposal.default)} without keep"
    lines = filter(None, (str(policy), error, proposal.remark))
    return Table.text("\n".join(lines), f"{name}:")


def advise(
    func: Callable[..., PyTree],
    /,
    *args: PyTree,
    formats: Sequence[str] = ("bf16", "f16", "e4m3", "e5m2"),
    max_grad_error: float = 0.05,
    measure: bool = False,
    **kwargs: PyTree,
) -> Advice:
    """Finds out what each part of a function does to the gradient in each format.

    The gradient is computed in f32, along the program that `amp` would run, once as it is
    and once for each group of operations and each format, with that group alone rounded
    wherever `amp` or `fp8` would round. A group is the matmuls of one parameter, or the
    other operations of one `jax.named_scope`, or of one function where there are no scopes.

    For bf16 and f16 it proposes the shortest keep-list with which the gradient is close
    enough to that in f32: groups that add much error for their work are kept first. f16 has
    its real range, with the loss scale at which `mpx.DynamicLossScaling` comes to rest;
    groups that overflow are kept. A small gradient error on one batch promises nothing about
    the accuracy after training.

    Args:
        func: The loss function in f32, without `amp` or `fp8`. Its first result is the
            loss, and its first argument, or the function itself, holds the parameters.
        *args: Its arguments, with real numbers: those of a batch.
        formats: The formats to judge: of bf16, f16, e4m3 and e5m2.
        max_grad_error: The largest gradient error of the proposed policies, relative to the
            gradient. The default is about what one 16-bit rounding of every operand does to
            the gradient of a healthy model.
        measure: Whether to run the proposals as well, and longer keep-lists where one is not
            good enough. The errors are then those of the real gradients.
        **kwargs: Its keyword arguments.

    Raises:
        TypeError: If the function is under `amp` or `fp8`, returns no scalar loss first, or
            gets shapes instead of numbers.
        ValueError: If a format is unknown, `max_grad_error` is not positive, or the gradient
            in f32 is not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> print(advise(loss, params, x, formats=["bf16"]).policy)
        mpx.amp(loss, "bf16")
    """
    known = (*HALVES, *EIGHTS)
    chosen = (formats,) if isinstance(formats, str) else formats
    is_known = bool(chosen) and {*chosen} <= {*known}
    check_value(is_known, "formats", f"some of {', '.join(known)}", formats)
    formats = tuple(name for name in known if name in chosen)
    positive = "a positive number such as 0.02"
    check_value(max_grad_error > 0, "max_grad_error", positive, max_grad_error)
    wanted = [x for x in HALVES if x in formats] or ["bf16"]
    study = Study(func, args, kwargs, formats)
    proposals = {x: propose(study, x, max_grad_error, measure) for x in wanted}
    groups = [_advice(study, label, formats) for label in study.labels]
    tell("")
    return Advice(
        groups=tuple(sorted(groups, key=lambda row: -row.errors[formats[0]])),
        proposals=proposals,
        loss_scale=study.scale,
        opaque=tuple(sorted(study.emulation.opaque)),
    )


def _advice(study: Study, label: str, formats: Sequence[str]) -> GroupAdvice:
    changes = {name: study.alone(name, label) for name in formats}
    policy = study.keeping("bf16", label)
    return GroupAdvice(
        label=label,
        selector=(*policy.keep, *policy.functions)[0],
        kind="keep" if policy.keep else "functions",
        flops=sum(study.flops[i] for i in study.labels[label]),
        errors={name: found.error for name, found in changes.items()},
        overflows=label in study.overflowing,
        vanishing=changes["f16"].lost if "f16" in formats else 0.0,
    )
