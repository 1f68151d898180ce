"""`advise`: which precision for which part of a function."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpx._jax._progress import progress
from mpx.inspect._judged import Judged, judge, steps
from mpx.inspect._predictions import Range
from mpx.inspect._proposals import LIMITS, MOST_VANISHING, Proposal, propose
from mpx.inspect._result import Result, Table, percent
from mpx.inspect._rounding import EIGHTS, HALVES

DOUBT = 0.1
"""The share of a prediction from sums that cancel above which it is doubtful."""
_SHOWN = 30


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
        if self.vanishing > MOST_VANISHING:
            notes.append(f"f16 loses {percent(self.vanishing)} to zero")
        doubtful = [name for name, share in self.doubt.items() if share > DOUBT]
        if doubtful:
            notes.append(f"doubtful in {', '.join(doubtful)}: a sum cancels")
        return "; ".join(notes)


@dataclasses.dataclass(frozen=True)
class Advice(Result):
    """Predictions for a function, made by `advise`.

    Attributes:
        groups: The groups of operations that `amp` runs in 16 bits, worst first.
        proposals: A policy for each of bf16, f16 and fp8 that was asked for.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
        steps: At most so many operations are steps, such as those of relu; 0 if none is.
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
                    "The function has steps, such as those of relu: rounding "
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
            a tuple, or the argument itself if there is one. If the function itself holds the
            parameters, as a module does, a batch has all arguments.
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
    formats = check_formats(formats, (*HALVES, *EIGHTS))
    with progress(steps(batches), "advise") as tell:
        known = judge(func, args, kwargs, batches, tell)
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


def check_formats(formats: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the formats; raises if one is unknown."""
    chosen = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"`formats` must be some of {', '.join(known)}, but {name!r} was given."
            )
    return tuple(name for name in known if name in chosen)


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
