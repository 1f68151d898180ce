"""`advise`: which precision for which part of a function, predicted or measured."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpx._jax._progress import progress
from mpx.inspect._measured import Bench, choose, measure_frontier
from mpx.inspect._predictions import DOUBT, EIGHTS, HALVES, Range, count_steps
from mpx.inspect._result import Result, Table, amount, percent
from mpx.inspect._search import (
    LIMITS,
    MOST_VANISHING,
    Candidate,
    Judged,
    PrecisionPolicy,
    judge,
    propose,
)

_MEASURED_LIMIT = 0.02
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
    """Predictions for a function, and measurements of policies, made by `advise`.

    Attributes:
        groups: The groups of operations that `amp` runs in 16 bits, worst first.
        proposals: By bf16, f16 and fp8, as asked for: the policy with the shortest
            keep-list that is predicted to be good enough.
        candidates: The policies on the frontier of predicted error and time, and the
            default of `amp`; fastest first. Empty without `measure`.
        policy: The fastest measured policy that is good enough; `None` without `measure`.
        repaired: The groups whose predictions were replaced by measurements.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
        steps: Upper bound on the number of step functions (such as ReLU).
        remark: The result of the measurements in one sentence.
    """

    groups: tuple[GroupAdvice, ...]
    proposals: Mapping[str, Candidate]
    candidates: tuple[Candidate, ...]
    policy: PrecisionPolicy | None
    repaired: tuple[str, ...]
    loss_scale: float
    opaque: tuple[str, ...]
    steps: int
    remark: str

    def proposal(self, name: str) -> Candidate:
        """Returns the proposal for bf16, f16 or fp8."""
        if name not in self.proposals:
            known = ", ".join(self.proposals)
            raise ValueError(f"There is a proposal for {known}, but not for {name!r}.")
        return self.proposals[name]

    def tables(self) -> Sequence[Table]:
        """Returns the groups, then the measured policies or else the proposals."""
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
        tables = [Table(("group", "flops", *formats, ""), rows, title, right)]
        texts = []
        if len(self.groups) > _SHOWN:
            rest = len(self.groups) - _SHOWN
            texts.append(f"{rest} more groups have smaller errors.")
        if self.opaque:
            texts.append(f"Not looked into: {', '.join(self.opaque)}.")
        if self.repaired:
            names = ", ".join(self.repaired)
            texts.append(f"Predictions replaced by measurements: {names}.")
        if self.policy is None:
            tables += [_described(*item) for item in self.proposals.items()]
            if self.steps:
                texts.append(
                    "The function has steps, such as those of relu: rounding before them "
                    "flips signs, which no derivative predicts. Errors before them are "
                    "larger than shown; `measure=True` measures."
                )
        else:
            tables.append(_measured(self.candidates))
            texts.append(f"{self.remark}\n{self.policy}")
        return [*tables, *map(Table.text, texts)]


def _error(value: float) -> str:
    return "–" if value == 0 else f"{value:.1e}"


def _described(name: str, proposal: Candidate) -> Table:
    error = f"predicted gradient error {_error(proposal.predicted_error)}"
    if proposal.kept:
        error += f", instead of {_error(proposal.default)} without keep"
    remark = [proposal.remark] if proposal.remark else []
    return Table.text("\n".join([str(proposal.policy), error, *remark]), f"{name}:")


def _measured(candidates: Sequence[Candidate]) -> Table:
    def timed(x: Candidate) -> str:
        if x.time is None:
            return "–"
        return f"{1e3 * x.time:.3g} ± {1e3 * (x.spread or 0.0) / 2:.1g} ms"

    rows = [
        (
            str(x.policy),
            f"{x.predicted_error:.1e}",
            f"{x.error:.1e}",
            f"{1e3 * x.predicted_time:.3g} ms",
            timed(x),
            "–" if x.memory is None else amount(x.memory, "B"),
        )
        for x in candidates
        if x.error is not None
    ]
    head = ("policy", "predicted", "measured", "cost table", "time", "memory")
    title = "Error of the gradient, and time"
    return Table(head, rows, title, frozenset(range(1, 6)))


# --- advise ---------------------------------------------------------------------------


def advise(
    func: Callable[..., Any],
    /,
    *args: Any,
    formats: Sequence[str] = ("bf16", "f16", "e4m3", "e5m2"),
    batches: Sequence[Any] = (),
    max_grad_error: float | None = None,
    measure: bool = False,
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
    fails at steps: rounding before a relu flips signs.

    `measure=True` finds the fastest policy whose gradient is close enough to that in f32.
    From the predictions and the cost of each group of operations it computes the frontier of
    gradient error against time, over bf16 and f16 with keep-lists, and fp8 with keep-lists
    of its own. The fastest policies of the frontier are measured: their gradient is compared
    with that in f32. If a prediction is off by more than a factor of 2, those of the worst
    groups are replaced by measurements, and the frontier is computed again. If none of the
    measured policies is good enough, the others are measured, too. On a GPU the measured
    policies are timed in turn; `amp`'s default wins ties, unless another one needs less
    memory. Elsewhere they are ranked by a table of the rates of an H200.

    A small gradient error on one batch promises nothing about the accuracy after training.

    Args:
        func: The loss function in f32, without `amp` or `fp8`. Its first result is the
            loss, and its first argument, or the function itself, holds the parameters.
        *args: Its arguments, with real numbers: those of one batch.
        formats: The formats to judge: of bf16, f16, e4m3 and e5m2.
        batches: Further batches to average over: for each, the arguments after the first, as
            a tuple, or the argument itself if there is one. If the function itself holds the
            parameters, as a module does, a batch has all arguments.
        max_grad_error: The largest gradient error of the proposed policies, relative to the
            gradient. By default 0.05 for 16 bits and 0.25 for fp8, and 0.02 if measured.
        measure: Whether to measure policies and to choose the fastest.
        **kwargs: Its keyword arguments.

    Returns:
        The advice, which prints as tables with policies to paste.

    Raises:
        TypeError: If the function is under `amp` or `fp8`, returns no scalar loss first, or
            gets shapes instead of numbers.
        ValueError: If a format is unknown or `max_grad_error` is not positive.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> print(advise(loss, params, x).proposal("bf16").policy)
        mpx.amp(loss, "bf16")
        >>> print(advise(loss, params, x, formats=["bf16"], measure=True).policy)
        mpx.amp(loss, "bf16")
    """
    formats = _check_formats(formats)
    if max_grad_error is not None and not max_grad_error > 0:
        raise ValueError(
            "`max_grad_error` must be a positive number such as 0.02, but it is "
            f"{max_grad_error}."
        )
    wanted = [x for x in HALVES if x in formats]
    halves, with_fp8 = wanted or ["bf16"], any(x in formats for x in EIGHTS)
    steps = 4 + 2 * (1 + len(batches)) + 2 * measure
    with progress(steps, "advise") as tell:
        known = judge(func, args, kwargs, batches, tell)
        candidates, policy, repaired, remark = [], None, set[str](), ""
        if measure:
            limit = max_grad_error or _MEASURED_LIMIT
            bench = Bench(func, args, kwargs, known.predicted.scale)
            candidates, repaired = measure_frontier(
                known, bench, halves, limit, with_fp8=with_fp8, tell=tell
            )
            policy, remark = choose(candidates, halves[0], limit, bench.has_gpu)
    return Advice(
        groups=_rows(known, formats),
        proposals={
            name: propose(known, name, max_grad_error or LIMITS[name])
            for name in (*wanted, *(["fp8"] if with_fp8 else []))
        },
        candidates=tuple(candidates),
        policy=policy,
        repaired=tuple(sorted(repaired)),
        loss_scale=known.predicted.scale,
        opaque=tuple(sorted(known.study.found.opaque)),
        steps=count_steps(known.study.program.jaxpr),
        remark=remark,
    )


def _check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    known, chosen = (*HALVES, *EIGHTS), formats
    if isinstance(formats, str):
        chosen = (formats,)
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"`formats` must be some of {', '.join(known)}, but {name!r} was given."
            )
    return tuple(name for name in known if name in chosen)


def _rows(known: Judged, formats: tuple[str, ...]) -> tuple[GroupAdvice, ...]:
    """Returns one row for each label: what one selector selects together."""
    predicted, rows = known.predicted, []
    labels: dict[str, list[int]] = {}
    for i in sorted(known.active):
        labels.setdefault(known.groups[i].label, []).append(i)
    for label, members in labels.items():
        largest = max(members, key=lambda i: predicted.error("bf16", [i]))
        selector = known.groups[members[0]].selector
        doubts = [name for name in formats if name in HALVES]
        row = GroupAdvice(
            label=label,
            selector=selector.pattern,
            kind=selector.kind,
            flops=sum(known.work[i].flops for i in members),
            errors={name: predicted.error(name, members) for name in formats},
            doubt={x: predicted.share_of_doubt(x, largest) for x in doubts},
            forward=predicted.ranges.get((largest, False)),
            backward=predicted.ranges.get((largest, True)),
            overflows=any(map(predicted.overflows, members)),
            vanishing=max(map(predicted.vanishing, members)),
        )
        rows.append(row)
    first = formats[0] if formats else "bf16"
    return tuple(sorted(rows, key=lambda row: -row.errors[first]))
