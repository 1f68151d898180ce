"""`advise`: which precision for which part of a function, emulated or measured."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from mpx._casting._context import gradient_function
from mpx._jax._progress import Tell, progress, silent
from mpx._scaling._loss_scaling import StaticLossScaling
from mpx.inspect._emulation import change
from mpx.inspect._policies import (
    EIGHTS,
    HALVES,
    LIMITS,
    MOST_LOST,
    Candidate,
    Option,
    PrecisionPolicy,
    Study,
    propose,
    within,
)
from mpx.inspect._program import gradient, program
from mpx.inspect._result import Result, Table, amount, percent

_MEASURED_LIMIT = 0.02
_SHOWN = 30


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
        proposals: By bf16, f16 and fp8, as asked for: the policy with the shortest
            keep-list that is good enough in the emulation.
        candidates: The measured policies, fastest first: the default of `amp` and the
            fastest good one of each format. Empty without `measure`.
        policy: The fastest measured policy that is good enough; `None` without `measure`.
        loss_scale: The loss scale that was assumed for f16.
        opaque: Operations that were run as written, and whose inside is not judged.
        remark: The result of the measurements in one sentence.
    """

    groups: tuple[GroupAdvice, ...]
    proposals: Mapping[str, Candidate]
    candidates: tuple[Candidate, ...]
    policy: PrecisionPolicy | None
    loss_scale: float
    opaque: tuple[str, ...]
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
                *(_number(x.errors[name]) for name in formats),
                x.note,
            )
            for x in self.groups[:_SHOWN]
        ]
        title = "Gradient error if one group alone is rounded"
        right = frozenset(range(1, 2 + len(formats)))
        tables = [Table(("group", "flops", *formats, ""), rows, title, right)]
        texts = []
        if len(self.groups) > _SHOWN:
            rest = len(self.groups) - _SHOWN
            texts.append(f"{rest} more groups have smaller errors.")
        if self.opaque:
            texts.append(f"Not looked into: {', '.join(self.opaque)}.")
        if self.policy is None:
            tables += [_described(*item) for item in self.proposals.items()]
        else:
            tables.append(_measured(self.candidates))
            texts.append(f"{self.remark}\n{self.policy}")
        return [*tables, *map(Table.text, texts)]


def _number(value: float) -> str:
    return "–" if value == 0 else f"{value:.1e}"


def _described(name: str, proposal: Candidate) -> Table:
    error = f"gradient error {_number(proposal.predicted_error)}"
    if proposal.kept:
        error += f", instead of {_number(proposal.default)} without keep"
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
            f"{x.error or 0:.1e}",
            f"{1e3 * x.predicted_time:.3g} ms",
            timed(x),
            "–" if x.memory is None else amount(x.memory, "B"),
        )
        for x in candidates
    ]
    head = ("policy", "predicted", "measured", "cost table", "time", "memory")
    title = "Error of the gradient, and time"
    return Table(head, rows, title, frozenset(range(1, 6)))


# --- Measuring ------------------------------------------------------------------------

_TRIES = 4  # keep-lists of one format that are measured until one is good enough
_NEAR = 1.02  # policies within this factor of the fastest are about as fast
_LEANER = 0.95
_TURNS = 9
_LEAST_TIME = 0.02  # seconds of calls, so that one measurement is longer than its noise


class Bench:
    """Measures the gradients of policies against the gradient in f32.

    Attributes:
        has_gpu: Whether policies are timed.
        done: The measurements of each policy, as fields of `Candidate`.
    """

    def __init__(
        self,
        func: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scale: float,
    ) -> None:
        self._call, self._scale = (func, args, kwargs), scale
        self.has_gpu = jax.default_backend() == "gpu"
        self.done: dict[PrecisionPolicy, dict[str, Any]] = {}
        self._runs: dict[PrecisionPolicy, Callable[[], list[Array]]] = {}

    @functools.cached_property
    def _exact(self) -> list[Array]:
        """The gradient in f32, multiplied in full f32."""
        func, args, kwargs = self._call
        with jax.default_matmul_precision("highest"):
            grad = gradient(program(func, args, kwargs))
            return jax.jit(grad.__call__)(*grad.arrays)[1:]

    def error(self, policy: PrecisionPolicy) -> float:
        """Returns the error of the gradient under a policy."""
        if policy not in self.done:
            func, args, kwargs = self._call
            scaling = StaticLossScaling(self._scale) if policy.half == "f16" else None
            with gradient_function():
                forward = program(policy.apply(func), args, kwargs)
                grad = gradient(forward, scaling)
            compiled = jax.jit(grad.__call__).lower(*grad.arrays).compile()
            run = functools.partial(compiled, *grad.arrays)
            analysis = compiled.memory_analysis()
            self._runs[policy] = run
            self.done[policy] = {
                "error": change(run()[1:], self._exact).error,
                "memory": getattr(analysis, "temp_size_in_bytes", None),
            }
        return self.done[policy]["error"]

    def time(self) -> None:
        """Times the measured policies in turn, and adds how far times spread."""
        counts = {
            policy: math.ceil(_LEAST_TIME / max(_seconds(call, 2), 1e-9))
            for policy, call in self._runs.items()
        }
        found: dict[PrecisionPolicy, list[float]] = {x: [] for x in counts}
        for _ in range(_TURNS):
            for policy, call in self._runs.items():
                found[policy].append(_seconds(call, counts[policy]))
        for policy, times in found.items():
            low, middle, high = np.quantile(times, (0.1, 0.5, 0.9))
            self.done[policy] |= {"time": float(middle), "spread": float(high - low)}


def _seconds(call: Callable[[], list[Array]], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times - 1):
        call()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / times


def measure_all(
    known: Study,
    bench: Bench,
    wanted: Sequence[str],
    limit: float,
    tell: Tell = silent,
) -> list[Candidate]:
    """Returns measured policies: the default, then the fastest good one of each format.

    The formats are bf16, f16 and fp8. Where an emulation was too hopeful, the next longer
    keep-lists are measured.
    """
    found = dict[PrecisionPolicy, Option]()

    def error(option: Option) -> float:
        policy = known.policy(option)
        found.setdefault(policy, option)
        tell(f"measuring {policy}")
        return bench.error(policy)

    error(Option("bf16" if wanted[0] == "fp8" else wanted[0]))
    for name in wanted:
        for option in within(known, name, limit)[:_TRIES]:
            if error(option) <= limit:
                break
    if bench.has_gpu:
        tell("timing")
        bench.time()
    return [
        dataclasses.replace(known.candidate(option), **bench.done[policy])
        for policy, option in found.items()
    ]


def choose(
    candidates: Sequence[Candidate], limit: float, has_gpu: bool
) -> tuple[PrecisionPolicy, str]:
    """Returns the fastest policy within the limit, and why; the first is the default."""
    usual = candidates[0]
    good = [x for x in candidates if _error(x) <= limit]
    if not good:
        best = min(candidates, key=_error)
        return best.policy, (
            f"No measured policy reaches {limit:g}: this is the most exact, with "
            f"{_error(best):.1e}. Pass a larger `max_grad_error`, or stay in f32."
        )
    best = _fastest(good, usual, has_gpu)
    what = "The default of `amp` is best" if best is usual else "The fastest policy"
    by = "as timed on this GPU"
    if not has_gpu:
        by = "by the cost table of an H200; not timed"
    remark = f"{what} within {limit:g}, {by}."
    if usual not in good:
        remark += f" The default of `amp` has an error of {_error(usual):.1e}."
    return best.policy, remark


def _error(candidate: Candidate) -> float:
    return math.inf if candidate.error is None else candidate.error


def _clock(candidate: Candidate, has_gpu: bool) -> float:
    return (candidate.time or 0.0) if has_gpu else candidate.predicted_time


def _is_tie(slower: Candidate, faster: Candidate, has_gpu: bool) -> bool:
    """Returns whether two times differ by no more than they vary from run to run."""
    noise = (slower.spread or 0.0) + (faster.spread or 0.0)
    least = _clock(faster, has_gpu)
    return _clock(slower, has_gpu) <= max(_NEAR * least, least + noise)


def _fastest(good: Sequence[Candidate], usual: Candidate, has_gpu: bool) -> Candidate:
    """Returns the fastest candidate; the default or the leanest of those about as fast."""
    fastest = min(good, key=lambda x: _clock(x, has_gpu))
    near = [x for x in good if _is_tie(x, fastest, has_gpu)]
    if not has_gpu:  # what a program needs on a CPU says nothing about a GPU
        return usual if usual in near else fastest
    lean = min(near, key=lambda x: x.memory or math.inf)
    if usual not in near or (lean.memory or math.inf) < _LEANER * (usual.memory or 0):
        return lean
    return usual


# --- advise ---------------------------------------------------------------------------


def advise(
    func: Callable[..., object],
    /,
    *args: Any,
    formats: Sequence[str] = ("bf16", "f16", "e4m3", "e5m2"),
    batches: Sequence[Any] = (),
    max_grad_error: float | None = None,
    measure: bool = False,
    **kwargs: Any,
) -> Advice:
    """Finds out what each part of a function does to the gradient in each format.

    The gradient is computed in f32, along the program that `amp` would run, once as it is
    and once for each group of operations and each format, with that group alone rounded
    wherever `amp` or `fp8` would round. A group is the matmuls of one parameter, or the
    other operations of one `jax.named_scope`, or of one function where there are no scopes.
    The program is compiled once.

    For each format it proposes the shortest keep-list with which the gradient is close
    enough to that in f32: groups that add much error for their time are kept first, and each
    proposal is emulated as a whole. f16 has its real range, with the loss scale at which
    `mpx.DynamicLossScaling` comes to rest; groups that overflow are kept.

    `measure=True` also runs the proposals, and compares their real gradients with that in
    f32. Where one is not good enough, longer keep-lists are run. On a GPU they are timed in
    turn; `amp`'s default wins ties, unless another one needs less memory. Elsewhere they are
    ranked by a table of the rates of an H200.

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
        ValueError: If a format is unknown, `max_grad_error` is not positive, or the gradient
            in f32 is not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def loss(params, x):
        ...     return jnp.mean(jnp.tanh(x @ params["a"]) @ params["b"])
        >>> params = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.3)}
        >>> x = jnp.linspace(0, 1, 32).reshape(4, 8)
        >>> print(advise(loss, params, x, formats=["bf16"]).proposal("bf16").policy)
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
    wanted += ["fp8"] if {*formats} & {*EIGHTS} else []
    with progress("advise") as tell:
        known = Study(func, args, kwargs, batches, formats, tell=tell)
        proposals = {
            name: propose(known, name, max_grad_error or LIMITS[name])
            for name in wanted
        }
        groups = _rows(known, formats)
        candidates, policy, remark = list[Candidate](), None, ""
        if measure:
            limit = max_grad_error or _MEASURED_LIMIT
            bench = Bench(func, args, kwargs, known.scale)
            candidates = measure_all(known, bench, wanted, limit, tell)
            policy, remark = choose(candidates, limit, bench.has_gpu)
    return Advice(
        groups=groups,
        proposals=proposals,
        candidates=tuple(sorted(candidates, key=lambda x: x.predicted_time)),
        policy=policy,
        loss_scale=known.scale,
        opaque=tuple(sorted(known.emulation.opaque)),
        remark=remark,
    )


def _check_formats(formats: Sequence[str]) -> tuple[str, ...]:
    known, chosen = (*HALVES, *EIGHTS), formats
    if isinstance(formats, str):
        chosen = (formats,)
    if not chosen or not {*chosen} <= {*known}:
        raise ValueError(
            f"`formats` must be some of {', '.join(known)}, but {formats!r} was given."
        )
    return tuple(name for name in known if name in chosen)


def _rows(known: Study, formats: tuple[str, ...]) -> tuple[GroupAdvice, ...]:
    """Returns one row for each label."""
    rows = []
    for label, members in known.labels.items():
        changes = {name: known.alone(name, label) for name in formats}
        selector = known.selector(label)
        row = GroupAdvice(
            label=label,
            selector=selector.pattern,
            kind=selector.kind,
            flops=sum(known.work[i].flops for i in members),
            errors={name: found.error for name, found in changes.items()},
            overflows=label in known.overflowing,
            vanishing=changes["f16"].lost if "f16" in formats else 0.0,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.errors[formats[0]]))
