"""`tune`: the fastest policy with a small enough gradient error, predicted and measured."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpx._jax._progress import Tell, progress
from mpx.inspect._advice import check_formats
from mpx.inspect._candidates import Candidate, Option, front, options
from mpx.inspect._judged import Judged, judge, steps
from mpx.inspect._laboratory import Laboratory, repaired
from mpx.inspect._policies import PrecisionPolicy
from mpx.inspect._result import Result, Table, amount, extra, percent
from mpx.inspect._states import StateBytes, state_bytes

_OFF = 2.0  # predictions that are off by more are replaced
_ROUNDS = 3
_NEAR = 1.02  # policies within this factor of the fastest are about as fast
_LEANER = 0.95


@dataclasses.dataclass(frozen=True)
class Tuning(Result):
    """What `tune` found.

    Attributes:
        policy: The proposed policy: `policy.apply(loss)` applies it, and `str(policy)` is
            its code.
        candidates: The candidates on the frontier of predicted error and time, and the
            default of `amp`; fastest first.
        max_grad_error: The limit.
        repaired: The groups whose predictions were replaced by measurements.
        states: The bytes of parameters and AdamW's state, by their formats. They change
            no gradient, so they are chosen apart from the policy.
        device: Where the measurements were made.
        remark: The result in one sentence.
    """

    policy: PrecisionPolicy
    candidates: tuple[Candidate, ...]
    max_grad_error: float
    repaired: tuple[str, ...]
    states: tuple[StateBytes, ...]
    device: str
    remark: str

    def tables(self) -> Sequence[Table]:
        """Returns the measured candidates, the memory of optimizers, and the result."""
        seen = [x for x in self.candidates if x.error is not None]
        rows = [
            (
                str(x.policy),
                f"{x.predicted_error:.1e}",
                f"{x.error:.1e}",
                f"{1e3 * x.predicted_time:.3g} ms",
                _milliseconds(x),
                "–" if x.memory is None else amount(x.memory, "B"),
            )
            for x in seen
        ]
        head = ("policy", "predicted", "measured", "cost table", "time", "memory")
        right = frozenset(range(1, 6))
        most = max((x.bytes for x in self.states), default=0) or 1
        states = [
            (x.code, x.params, amount(x.bytes, "B"), percent(1 - x.bytes / most))
            for x in self.states
        ]
        tables = [
            Table(head, rows, "Error of the gradient, and time", right),
            Table(
                ("optimizer", "parameters", "bytes", "saved"),
                states,
                "Parameters and optimizer state, whatever the policy",
                frozenset({2, 3}),
            ),
        ]
        if self.repaired:
            names = ", ".join(self.repaired)
            tables.append(Table.text(f"Predictions replaced by measurements: {names}."))
        tables.append(Table.text(f"{self.remark}\n{self.policy}"))
        return tables

    def plot(self, ax: Any = None) -> Any:
        """Draws error against time for all candidates; returns matplotlib's axes.

        Args:
            ax: Axes to draw into; by default those of a new figure.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        if ax is None:
            plt = extra("matplotlib.pyplot", "Tuning.plot")
            _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
        for half, colour in (("bf16", "tab:blue"), ("f16", "tab:orange")):
            for is_fp8, marker in ((False, "o"), (True, "s")):
                chosen = [
                    x
                    for x in self.candidates
                    if (x.policy.half, x.policy.fp8) == (half, is_fp8)
                ]
                if not chosen:
                    continue
                times = [1e3 * x.predicted_time for x in chosen]
                errors = [x.predicted_error for x in chosen]
                name = f"{'fp8 and ' if is_fp8 else ''}{half}"
                ax.plot(times, errors, marker, color=colour, mfc="none", label=name)
                pairs = [(t, x.error) for t, x in zip(times, chosen, strict=True)]
                seen = [(t, e) for t, e in pairs if e is not None and np.isfinite(e)]
                ax.plot(
                    *zip(*seen, strict=True), marker, color=colour
                ) if seen else None
        ax.axhline(self.max_grad_error, color="grey", linestyle=":")
        ax.set(
            xlabel="time by the cost table (ms)",
            ylabel="relative error of the gradient",
            yscale="log",
            title="open: predicted; filled: measured",
        )
        ax.legend()
        return ax


def _milliseconds(x: Candidate) -> str:
    if x.time is None:
        return "–"
    return f"{1e3 * x.time:.3g} ± {1e3 * (x.spread or 0.0) / 2:.1g} ms"


# --- tune -----------------------------------------------------------------------------


def tune(
    func: Callable[..., Any],
    /,
    *args: Any,
    max_grad_error: float = 0.02,
    formats: Sequence[str] = ("bf16", "f16", "fp8"),
    batches: Sequence[Any] = (),
    proposals: int = 3,
    **kwargs: Any,
) -> Tuning:
    """Finds the fastest policy whose gradient is close enough to that in f32.

    From the predictions of `advise` and the cost of each group of operations it computes the
    frontier of gradient error against time, over bf16 and f16 with keep-lists, and fp8 with
    keep-lists of its own, without a run for each candidate. The policies that it
    proposes are always measured: their real gradient is compared with that in f32, and
    the prediction is shown beside it. If a prediction is off by more than a factor of 2, those of
    the worst groups are replaced by measurements, and the frontier is computed again. If none
    of the measured policies is good enough, the others of the frontier are measured, too.

    On a GPU the measured policies are timed in turn, and the fastest is returned; `amp`'s
    default wins ties, unless another one needs less memory. Elsewhere they are
    ranked by a table of the rates of an H200. A small gradient error on one batch promises
    nothing about the accuracy after training.

    Args:
        func: The loss function in f32: see `advise`.
        *args: Its arguments, with real numbers.
        max_grad_error: The largest norm of the gradient's error, relative to the gradient.
        formats: What to try: of bf16, f16 and fp8.
        batches: Further batches for the predictions: see `advise`.
        proposals: How many policies of the frontier to measure, besides `amp`'s default;
            more only if none of them is good enough.
        **kwargs: Its keyword arguments.

    Returns:
        The policy and the candidates; it prints as tables, and `plot` draws them.

    Raises:
        TypeError: As `advise`.
        ValueError: If a format is unknown or `max_grad_error` is not positive.

    Examples:
        >>> import jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> print(tune(loss, params, x, formats=["bf16"]).policy)
        mpx.amp(loss, "bf16")
    """
    halves, with_fp8 = _check(formats, max_grad_error)
    with progress(steps(batches) + 2, "tune") as tell:
        known = judge(func, args, kwargs, batches, tell)
        lab = Laboratory(func, args, kwargs, known.predicted.scale)
        default = Option("bf16" if "bf16" in halves else halves[0])
        names: set[str] = set()
        best: list[Option] = []
        for _ in range(_ROUNDS):
            best = front(options(known, halves, with_fp8), known)
            chosen = _proposed(best, known, max_grad_error, proposals)
            found = lab.measure([x.policy for x in (default, *chosen)], tell)
            off = [
                option
                for option, seen in zip(chosen, found[1:], strict=True)
                if _is_off(option.candidate(known).predicted_error, seen["error"])
            ]
            if not off:
                break
            tell("measuring single groups", part=True)
            predicted = repaired(known, off[0], names)
            if predicted is known.predicted:
                break
            known = known._replace(predicted=predicted)
        _walk_down(lab, best, max_grad_error, proposals, tell)
        lab.time(tell)
    candidates = []
    for option in dict.fromkeys((*best, default)):
        found = option.candidate(known)
        seen = lab.done.get(option.policy, {})
        candidates.append(dataclasses.replace(found, **seen))
    candidates.sort(key=lambda x: x.predicted_time)
    policy, remark = _choose(candidates, default.policy, max_grad_error, lab.has_gpu)
    grad = known.study.program
    return Tuning(
        policy=policy,
        candidates=tuple(candidates),
        max_grad_error=max_grad_error,
        repaired=tuple(sorted(names)),
        states=state_bytes({grad.names[i]: grad.arrays[i] for i in grad.params}),
        device=jax.devices()[0].device_kind,
        remark=remark,
    )


def _check(formats: Sequence[str], limit: float) -> tuple[list[str], bool]:
    chosen = check_formats(formats, ("bf16", "f16", "fp8"))
    if not limit > 0:
        raise ValueError(
            f"`max_grad_error` must be a positive number such as 0.02, but it is {limit}."
        )
    halves = [x for x in ("bf16", "f16") if x in chosen] or ["bf16"]
    return halves, "fp8" in chosen


def _is_off(predicted: float, measured: float) -> bool:
    if predicted == 0 or not math.isfinite(measured):
        return False
    return not 1 / _OFF <= measured / predicted <= _OFF


def _proposed(
    front: Sequence[Option], known: Judged, limit: float, count: int
) -> list[Option]:
    """Returns the fastest options within the limit; the most exact one if none is."""
    good = [x for x in front if x.candidate(known).predicted_error <= limit]
    return good[:count] or list(front[-1:])


def _walk_down(
    lab: Laboratory, front: Sequence[Option], limit: float, count: int, tell: Tell
) -> None:
    """Measures the rest of the frontier, some at a time, until a policy is good enough.

    Those after the measured ones come first: they are slower and more exact.
    """
    done = [i for i, x in enumerate(front) if x.policy in lab.done]
    last = max(done, default=-1)
    left = [x for x in (*front[last + 1 :], *front[:last]) if x.policy not in lab.done]
    while left and not any(x["error"] <= limit for x in lab.done.values()):
        some, left = left[: max(count, 1)], left[max(count, 1) :]
        lab.measure([x.policy for x in some], tell)


def _choose(
    candidates: Sequence[Candidate],
    default: PrecisionPolicy,
    limit: float,
    has_gpu: bool,
) -> tuple[PrecisionPolicy, str]:
    seen = [x for x in candidates if x.error is not None]
    good = [x for x in seen if x.error is not None and x.error <= limit]
    if not good:
        best = min(seen, key=lambda x: x.error if x.error is not None else math.inf)
        return best.policy, (
            f"No policy of the frontier reaches {limit:g}: this is the most exact, with "
            f"{best.error:.1e}. Pass a larger `max_grad_error`, or stay in f32."
        )
    usual = next((x for x in seen if x.policy == default), None)
    best = _fastest(good, usual, has_gpu)
    by = (
        "as timed on this GPU" if has_gpu else "by the cost table of an H200; not timed"
    )
    if usual is best:
        return best.policy, f"The default of `amp` is best within {limit:g}, {by}."
    remark = f"The fastest policy within {limit:g}, {by}."
    if usual is None or usual.error is None:
        return best.policy, remark
    if usual.error > limit:
        return best.policy, (
            f"{remark} The default of `amp` has an error of {usual.error:.1e}."
        )
    times = _clock(best, has_gpu), _clock(usual, has_gpu)
    slower, faster = (usual, best) if times[0] < times[1] else (best, usual)
    same = _is_tie(slower, faster, has_gpu)
    changes = ["the same time within its spread" if same else _change("time", *times)]
    if best.memory is not None and usual.memory:
        changes.append(_change("memory", best.memory, usual.memory))
    return (
        best.policy,
        f"{remark} Compared with the default of `amp`: {', '.join(changes)}.",
    )


def _change(what: str, new: float, old: float) -> str:
    share = 1 - new / max(old, 1e-30)
    return f"{percent(abs(share))} {'less' if share >= 0 else 'more'} {what}"


def _clock(candidate: Candidate, has_gpu: bool) -> float:
    return (candidate.time or 0.0) if has_gpu else candidate.predicted_time


def _is_tie(slower: Candidate, faster: Candidate, has_gpu: bool) -> bool:
    """Returns whether two times differ by no more than they vary from run to run."""
    noise = (slower.spread or 0.0) + (faster.spread or 0.0)
    least = _clock(faster, has_gpu)
    return _clock(slower, has_gpu) <= max(_NEAR * least, least + noise)


def _fastest(
    good: Sequence[Candidate], usual: Candidate | None, has_gpu: bool
) -> Candidate:
    """Returns the fastest candidate; the default or the leanest of those about as fast."""
    fastest = min(good, key=lambda x: _clock(x, has_gpu))
    near = [x for x in good if _is_tie(x, fastest, has_gpu)]
    # What a program needs on a CPU says nothing about a GPU.
    sizes = {id(x): x.memory for x in near if has_gpu and x.memory}
    lean = min(near, key=lambda x: sizes.get(id(x), math.inf))
    if usual is None or usual not in near:
        return lean if sizes else fastest
    is_leaner = sizes.get(id(lean), math.inf) < _LEANER * sizes.get(id(usual), 0)
    return lean if is_leaner else usual
