"""`advise`: which precision for which part of a function."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpx._amp._functions import flat_call
from mpx._fp8 import Fp8Function, fp8
from mpx._inspect._groups import Group, Keep
from mpx._inspect._policies import (
    Cost,
    PrecisionPolicy,
    costs,
    policy_for,
    seconds,
    selected,
)
from mpx._inspect._predictions import Predictions, Range, predictions
from mpx._inspect._program import program
from mpx._inspect._result import Result, Table, percent
from mpx._inspect._rounding import EIGHTS, HALVES
from mpx._inspect._sensitivity import Study, study
from mpx._wrapped import is_amp

LIMITS = {"bf16": 0.05, "f16": 0.05, "fp8": 0.25}
"""The gradient errors that are left without a remark: training tolerates more than these
from the choice of a batch."""
DOUBT = 0.1
"""The share of a prediction from sums that cancel above which it is doubtful."""
_MOST_VANISHING = 0.5
_SHOWN = 30
_ROUNDING = ("out", "entry")


@dataclasses.dataclass(frozen=True)
class GroupAdvice:
    """What is predicted for one group of operations.

    Attributes:
        label: The path of a parameter, for its matmuls; else a scope or a function.
        selector: The expression that keeps it in f32.
        kind: `"keep"` if that is for `amp`'s `keep`, `"functions"` if for
            `AmpRules.functions`.
        flops: The operations of its matmuls, forward and backward.
        errors: By format: the norm of the change of the gradient over the norm of the
            gradient, if this group alone is rounded. Of 8-bit formats, only operands of
            matmuls with a parameter are rounded, with one scale for each.
        doubt: By 16-bit format: the share of the prediction that passes through sums in
            which the rounding errors are no longer small. Above 0.1, measure.
        forward: The magnitudes of the forward pass.
        backward: Those of the backward pass, without a loss scale.
        overflows: Whether f16 is excluded: a number of the forward pass is too large.
        vanishing: The larger share of its numbers, by direction, that f16 makes zero.
    """

    label: str
    selector: str
    kind: str
    flops: float
    errors: Mapping[str, float]
    doubt: Mapping[str, float]
    forward: Range | None
    backward: Range | None
    overflows: bool
    vanishing: float

    @property
    def note(self) -> str:
        """What to know besides the errors."""
        notes = []
        if self.overflows and self.forward is not None:
            notes.append(f"f16 overflows: {self.forward.largest:.3g}")
        if self.vanishing > _MOST_VANISHING:
            notes.append(f"f16 loses {percent(self.vanishing)} to zero")
        doubtful = [name for name, share in self.doubt.items() if share > DOUBT]
        if doubtful:
            notes.append(f"doubtful in {', '.join(doubtful)}: a sum cancels")
        return "; ".join(notes)


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A policy, and what is predicted for it.

    Attributes:
        name: `"bf16"`, `"f16"` or `"fp8"`.
        policy: The policy; `policy.apply(loss)` applies it, and `str(policy)` is its code.
        error: The predicted relative error of the gradient.
        default: The same without any keep-list.
        kept: The labels of the groups that stay in f32, or of fp8 in 16 bits.
        remark: What to know before it is used.
    """

    name: str
    policy: PrecisionPolicy
    error: float
    default: float
    kept: tuple[str, ...]
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """Predictions for a function, made by `advise`.

    Attributes:
        groups: The groups of operations that `amp` runs in 16 bits, worst first.
        proposals: A policy for each of bf16, f16 and fp8 that was asked for.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
        steps: How many operations are steps, such as those of relu: see `advise`.
    """

    groups: tuple[GroupAdvice, ...]
    proposals: tuple[Proposal, ...]
    loss_scale: float
    opaque: tuple[str, ...]
    steps: int

    def proposal(self, name: str) -> Proposal:
        """Returns the proposal for bf16, f16 or fp8."""
        for found in self.proposals:
            if found.name == name:
                return found
        known = ", ".join(x.name for x in self.proposals)
        raise ValueError(f"There is a proposal for {known}, but not for {name!r}.")

    def tables(self) -> Sequence[Table]:
        """Returns the groups, the proposals and the remarks."""
        formats = list(self.groups[0].errors) if self.groups else []
        total = sum(x.flops for x in self.groups) or 1
        rows = [
            (
                x.label,
                percent(x.flops / total) if x.flops else "–",
                *(_error(x.errors[name]) for name in formats),
                x.note,
            )
            for x in self.groups[:_SHOWN]
        ]
        title = "Predicted gradient error if one group alone is rounded"
        right = frozenset(range(1, 2 + len(formats)))
        head = ("group", "flops", *formats, "")
        tables = [Table(head, rows, title, right)]
        if len(self.groups) > _SHOWN:
            rest = len(self.groups) - _SHOWN
            tables.append(Table.text(f"{rest} more groups have smaller errors."))
        tables += [_described(x) for x in self.proposals]
        if self.opaque:
            names = ", ".join(self.opaque)
            tables.append(Table.text(f"Not looked into: {names}."))
        if self.steps:
            tables.append(
                Table.text(
                    f"{self.steps} operations are steps, such as those of relu: rounding "
                    "before them flips signs, which no derivative predicts. Errors before "
                    "them are larger than shown; `mpx.inspect.tune` measures."
                )
            )
        return tables


def _error(value: float) -> str:
    return "–" if value == 0 else f"{value:.1e}"


def _described(proposal: Proposal) -> Table:
    lines = [str(proposal.policy), f"predicted gradient error {_error(proposal.error)}"]
    if proposal.kept:
        lines[1] += f", instead of {_error(proposal.default)} without keep"
    if proposal.remark:
        lines.append(proposal.remark)
    return Table.text("\n".join(lines), f"{proposal.name}:")


# --- advise ---------------------------------------------------------------------------


def advise(
    func: Callable[..., Any],
    /,
    *args: Any,
    formats: Sequence[str] = ("bf16", "f16", "e4m3", "e5m2"),
    batches: Sequence[Any] = (),
    max_grad_error: float | None = None,
    **kwargs: Any,
) -> Advice:
    """Predicts what each part of a function would do to the gradient in each format.

    The gradient is computed in f32, along the program that `amp` would run, and pulled back
    twice with random signs. At each place where `amp` or `fp8` would round, the derivatives
    tell how much of the rounding arrives in the gradient: for all groups of operations
    and all formats at once. A group is the matmuls of one parameter, or the other operations
    of one `jax.named_scope`, or of one function where there are no scopes.

    Whether numbers fit into f16 is judged apart, from the exponents of both passes, and
    excludes f16 for a group outright. For the backward pass a loss scale is assumed.

    Rounding is predicted to first order. That fails where rounding errors are no longer
    small, as in a difference of nearly equal numbers: such predictions are marked. It also
    fails at steps: rounding before a relu flips signs. `mpx.inspect.tune` measures what it
    proposes. Neither says anything about the accuracy after training.

    Args:
        func: The loss function in f32, without `amp` or `fp8`. Its first result is the
            loss, and its first argument, or the function itself, holds the parameters.
        *args: Its arguments, with real numbers: those of one batch.
        formats: The formats to judge: of bf16, f16, e4m3 and e5m2.
        batches: Further batches to average over: for each, the arguments after the first, as
            a tuple, or the argument itself if there is one.
        max_grad_error: The largest predicted gradient error of the proposed policies,
            relative to the gradient. By default 0.05 for 16 bits and 0.25 for fp8.
        **kwargs: Its keyword arguments.

    Returns:
        The advice, which prints as tables with policies to paste.

    Raises:
        TypeError: If the function is under `amp` or `fp8`, returns no scalar loss first, or
            gets shapes instead of numbers.
        ValueError: If a format is unknown.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> found = advise(loss, params, jnp.linspace(0, 1, 32).reshape(4, 8))
        >>> print(found.proposal("bf16").policy)
        mpx.amp(loss, "bf16")
    """
    formats = check_formats(formats)
    known = judge(func, args, kwargs, batches)
    names = [*(x for x in HALVES if x in formats)]
    if any(x in formats for x in EIGHTS):
        names.append("fp8")
    proposals = [
        propose(known, name, LIMITS[name] if max_grad_error is None else max_grad_error)
        for name in names
    ]
    return Advice(
        groups=_rows(known, formats),
        proposals=tuple(proposals),
        loss_scale=known.predicted.scale,
        opaque=tuple(sorted(known.study.found.opaque)),
        steps=known.study.steps,
    )


class Judged(NamedTuple):
    """A function, its predictions and its costs.

    Attributes:
        study: The program and its sites.
        predicted: The predictions.
        work: The cost of each group.
        fp8: The groups whose matmuls `fp8` would change.
        arrays: The arguments.
    """

    study: Study
    predicted: Predictions
    work: list[Cost]
    fp8: frozenset[int]
    arrays: list[Any]

    @property
    def groups(self) -> list[Group]:
        """The groups."""
        return self.study.groups

    @property
    def active(self) -> set[int]:
        """The groups that `amp` runs in 16 bits."""
        return {x.key.group for x in self.study.sites if x.key.kind in _ROUNDING}


def check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns the formats; raises if one is unknown."""
    known = (*HALVES, *EIGHTS)
    chosen = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"`formats` must be some of {', '.join(known)}, but {name!r} was given."
            )
    return tuple(name for name in known if name in chosen)


def judge(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batches: Sequence[Any] = (),
) -> Judged:
    """Traces a function and runs the passes."""
    if is_amp(func) or isinstance(func, Fp8Function):
        raise TypeError(
            "The function is under `amp` or `fp8`, but what they would do is what is "
            "predicted. Pass the function that you gave to them."
        )
    found = study(func, args, kwargs)
    calls = [found.program.arrays]
    for batch in batches:
        rest = batch if isinstance(batch, tuple) else (batch,)
        calls.append(flat_call(func, (*args[:1], *rest), kwargs)[0])
    if any(not hasattr(x, "__array__") for call in calls for x in call):
        raise TypeError(
            "`advise` and `tune` run the function, but a `jax.ShapeDtypeStruct` was given. "
            "Pass arrays with real numbers."
        )
    predicted = predictions(found, calls)
    work = costs(found.program, len(found.groups))
    return Judged(found, predicted, work, _in_fp8(func, args, kwargs, found), calls[0])


def _in_fp8(
    func: Callable[..., Any], args: Any, kwargs: Any, found: Study
) -> frozenset[int]:
    matmuls = program(fp8(func), args, kwargs).recording.matmuls
    names = {matmul.param for matmul in matmuls if not matmul.reason}
    return frozenset(i for i, x in enumerate(found.groups) if x.param in names)


def _rows(known: Judged, formats: tuple[str, ...]) -> tuple[GroupAdvice, ...]:
    """Returns one row for each label: what one selector selects together."""
    labels: dict[str, list[int]] = {}
    for i in sorted(known.active):
        labels.setdefault(known.groups[i].label, []).append(i)
    rows = [_row(known, label, members, formats) for label, members in labels.items()]
    first = formats[0] if formats else "bf16"
    rows.sort(key=lambda row: -row.errors[first])
    return tuple(rows)


def _row(
    known: Judged, label: str, members: list[int], formats: tuple[str, ...]
) -> GroupAdvice:
    predicted = known.predicted
    errors = {name: predicted.error(name, members) for name in formats}
    halves = [name for name in formats if name in HALVES]
    largest = max(members, key=lambda i: predicted.error("bf16", [i]))
    selector = known.groups[members[0]].selector
    return GroupAdvice(
        label=label,
        selector=selector.pattern,
        kind=selector.kind,
        flops=sum(known.work[i].flops for i in members),
        errors=errors,
        doubt={x: predicted.share_of_doubt(x, largest) for x in halves},
        forward=predicted.ranges.get((largest, False)),
        backward=predicted.ranges.get((largest, True)),
        overflows=any(map(predicted.overflows, members)),
        vanishing=max(map(predicted.vanishing, members)),
    )


# --- proposals ------------------------------------------------------------------------


def propose(known: Judged, name: str, limit: float) -> Proposal:
    """Returns the policy with the shortest keep-list that is predicted to be good enough."""
    if name == "fp8":
        return _propose_fp8(known, limit)
    predicted, active = known.predicted, known.active
    kept = forced(known, name)
    kept += keep_list(known, name, limit, kept)
    low = active - selected(known.groups, kept)
    error = math.sqrt(predicted.square(name, low))
    remarks = []
    if name == "f16":
        remarks.append(
            "Take the gradient with `mpx.value_and_grad` and a loss scaling."
        )
    if error > limit:
        remarks.append(f"No keep-list reaches {limit:g}.")
    if active and not low:
        remarks.append(
            "Nothing is left in 16 bits: the operations at fault have no name that is "
            "theirs alone. Put them into a `jax.named_scope`, or use another format."
        )
    return Proposal(
        name,
        policy_for(name, kept),
        error,
        math.sqrt(predicted.square(name, active)),
        _labels(known, active - low),
        " ".join(remarks),
    )


def forced(known: Judged, name: str) -> list[Keep]:
    """Returns selectors of the groups whose numbers f16 cannot hold."""
    if name != "f16":
        return []
    predicted = known.predicted
    bad = [
        i
        for i in sorted(known.active)
        if predicted.overflows(i) or predicted.vanishing(i) > _MOST_VANISHING
    ]
    return list(dict.fromkeys(known.groups[i].selector for i in bad))


def keep_list(
    known: Judged, half: str, limit: float, kept: Sequence[Keep] = ()
) -> list[Keep]:
    """Returns selectors that bring the predicted error below a limit, greedily.

    Each one is that with the largest decrease of the squared error for the time it costs.
    """
    found: list[Keep] = []
    while True:
        low = known.active - selected(known.groups, [*kept, *found])
        if known.predicted.square(half, low) <= limit**2:
            return found
        best = best_keep(known, half, low)
        if best is None:
            return found
        found.append(best)


def best_keep(known: Judged, half: str, low: set[int]) -> Keep | None:
    """Returns the selector that pays most if it is added; `None` if none does."""
    square = known.predicted.square(half, low)
    time = seconds(known.work, half, low)
    everything = seconds(known.work, half, ()) - seconds(known.work, half, known.active)
    scores: dict[Keep, float] = {}
    for selector in dict.fromkeys(known.groups[i].selector for i in sorted(low)):
        rest = low - selected(known.groups, [selector])
        gain = square - known.predicted.square(half, rest)
        slower = seconds(known.work, half, rest) - time
        if gain > 0 and (len(rest) > 0 or len(low) == 1):
            scores[selector] = gain / (slower + 0.01 * everything + 1e-15)
    return max(scores, key=scores.__getitem__, default=None)


def _propose_fp8(known: Judged, limit: float) -> Proposal:
    base = propose(known, "bf16", min(limit, LIMITS["bf16"]))
    kept = [Keep("keep", x) for x in base.policy.keep]
    kept += [Keep("functions", x) for x in base.policy.functions]
    low = known.active - selected(known.groups, kept)
    chosen, kept_fp8 = set(known.fp8 & low), list[Keep]()
    default = math.sqrt(known.predicted.square("bf16", known.active, known.fp8))
    while known.predicted.square("bf16", low, chosen) > limit**2 and chosen:
        worst = max(chosen, key=lambda i: known.predicted.recipe.get(i, 0.0))
        kept_fp8.append(known.groups[worst].selector)
        chosen -= selected(known.groups, kept_fp8)
    left = known.fp8 & low
    remark = ""
    if not known.fp8:
        remark = (
            "fp8 changes nothing here: no matmul with a parameter is large enough to "
            "gain. `mpx.inspect.report(mpx.fp8(loss), ...)` says why."
        )
    elif not chosen:
        remark = "No linear layer is left in fp8: use bf16."
    is_fp8 = bool(chosen)
    return Proposal(
        "fp8",
        policy_for("bf16", kept, is_fp8=is_fp8, kept_fp8=kept_fp8 if is_fp8 else ()),
        math.sqrt(known.predicted.square("bf16", low, chosen)),
        default,
        (*base.kept, *_labels(known, left - chosen)),
        remark,
    )


def _labels(known: Judged, groups: set[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known.groups[i].label for i in sorted(groups)))
