"""A recorder for training loops: what steps say about themselves, kept and shown."""

import dataclasses
import inspect
import itertools
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from mpx._fp8 import Fp8State
from mpx._gradients._grad import GradResult
from mpx._jax._arguments import as_count
from mpx._jax._nnx import without_variables
from mpx._jax._tree import (
    all_finite,
    check_same_structure,
    is_floating,
    map_with_name,
    named_leaves,
)
from mpx._jax._warn import warn
from mpx.inspect._counting import BELOW, INF, as_pairs
from mpx.inspect._exponents import ExponentStats, exponent_stats
from mpx.inspect._result import Result, Table, percent

T = TypeVar("T")
Groups = Callable[[str], str]
Write = Callable[[int, Mapping[str, float]], object]
Point = list[float]
"""How many finite values, their sum, smallest and largest; how many that are not finite."""
_AMAXES = ("activation", "weight", "gradient")
_FORMATS_LOST = ("f16", "e5m2", "e4m3")

# --- Inside the step ------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The numbers of one step, as arrays on the device; made by `observe`.

    Attributes:
        loss: The loss, f32[], or `None`.
        finite: Whether the step was taken, bool[].
        scale: The loss scale of the step, f32[], or `None` if that is not known.
        scaling: The metrics of the loss scaling for the next step, by name.
        grads: The exponents of the gradients, an `ExponentStats`, or `None`.
        stuck: By parameter, the share of its numbers that have a gradient and that the
            step did not change.
        amaxes: By matmul in fp8, the newest magnitudes of activation, weight, gradient.
        extra: Other scalars.
    """

    # JAX puts other objects in their place when it rebuilds trees.
    loss: Any
    finite: Any
    scale: Any
    scaling: Any
    grads: Any
    stuck: Any
    amaxes: Any
    extra: Any


def observe(
    result: GradResult | None = None,
    *,
    loss: ArrayLike | None = None,
    grads: PyTree = None,
    finite: ArrayLike | None = None,
    scaling: object = None,
    fp8: Fp8State | None = None,
    before: PyTree = None,
    after: PyTree = None,
    exponents: bool = True,
    **extra: ArrayLike,
) -> Observation:
    """Returns what there is to record about a step. Call it inside the jitted step.

    It adds one pass over the gradients, and one over the parameters if they are given.
    Nothing is read back to the host.

    Args:
        result: What `mpx.value_and_grad` or `mpx.accumulate` returned. Without it, pass
            `loss` and `grads`.
        loss: The loss, if there is no `result`.
        grads: The gradients, if there is no `result`.
        finite: Whether the step was taken; by default, whether the gradients are finite.
        scaling: The loss scaling with which the step was taken. A `result` holds that of
            the next step, from which the recorder knows the scale of all steps but the
            first.
        fp8: The state of delayed scaling, if there is no `result`.
        before: The parameters before the step, to find those that do not move. For a
            compressed optimizer these are `mpx.optim.master_params(params, state)`.
        after: The parameters after it.
        exponents: Whether to count the exponents of the gradients; a Python value. Without
            them there are no norms, and skipped steps come without the gradient's name.
        **extra: Further scalars to record, such as the learning rate.

    Raises:
        ValueError: If only one of `before` and `after` is given, or they differ in
            structure.

    Examples:
        >>> seen = observe(loss=0.5, grads={"w": jnp.array([1.0, jnp.inf])})
        >>> bool(seen.finite), seen.grads.infs
        (False, array([1]))
    """
    if result is not None:
        loss, grads = result.value, result.grads
        finite, fp8 = result.finite, result.fp8
    if (before is None) != (after is None):
        raise ValueError(
            "`before` and `after` must be given together: the parameters before and after "
            "the step."
        )
    stats = exponent_stats(grads) if exponents and grads is not None else None
    if finite is None:
        finite = all_finite((loss, grads)) if stats is None else stats.all_finite()
    following = scaling if result is None else result.scaling
    metrics = getattr(following, "metrics", dict)
    newest = {} if fp8 is None else {k: _newest(x) for k, x in fp8.amaxes.items()}
    return Observation(
        loss=None if loss is None else jnp.asarray(loss, jnp.float32),
        finite=jnp.asarray(finite),
        scale=getattr(scaling, "loss_scaling", None),
        scaling=metrics(),
        grads=stats,
        stuck={} if before is None else _stuck(before, after, grads),
        amaxes=newest,
        extra={name: jnp.asarray(x) for name, x in extra.items()},
    )


def _newest(amaxes: Array) -> Array:
    """Returns the last magnitudes of a matmul, the largest over the layers of a scan."""
    newest = amaxes[..., 0, :]
    return jnp.max(newest.reshape(-1, newest.shape[-1]), axis=0)


def _stuck(before: PyTree, after: PyTree, grads: PyTree) -> dict[str, Array]:
    before, after, grads = map(without_variables, (before, after, grads))
    check_same_structure(before, after, "`before` and `after`")
    slopes = {str(name): leaf for name, leaf in named_leaves(grads)}
    found: dict[str, Array] = {}

    def compare(name: str, old: object, new: object) -> None:
        if not is_floating(old) or not is_floating(new) or not jnp.size(old):
            return
        still = jnp.asarray(old) == jnp.asarray(new)
        slope = slopes.get(str(name))
        if slope is not None and jnp.shape(slope) == jnp.shape(old):
            still = still & (jnp.asarray(slope) != 0)
        found[str(name)] = jnp.mean(still, dtype=jnp.float32)

    map_with_name(compare, before, after)
    return found


# --- On the host ----------------------------------------------------------------------


class Timeline:
    """Values by step and name, in at most `2 * points` buckets.

    While a run is short, a bucket is a step. When there are too many, two neighbours become
    one, which keeps mean, smallest and largest value, and how many were not finite.

    Attributes:
        starts: The first step of each bucket.
        curves: By name, the point of each bucket; `None` where there was no value.
        counts: By name, the sum of each bucket of lists of integers.
    """

    def __init__(self, points: int = 1000) -> None:
        self.points, self.width, self._filled = points, 1, 0
        self.starts: list[int] = []
        self.curves: dict[str, list[Point | None]] = {}
        self.counts: dict[str, list[list[int] | None]] = {}
        self.last: int | None = None

    def add(
        self,
        step: int,
        values: Mapping[str, float],
        counts: Mapping[str, list[int]] | None = None,
    ) -> None:
        """Adds the values of one step."""
        if not self.starts or self._filled == self.width:
            if len(self.starts) >= 2 * self.points:
                self._halve()
            self.starts.append(step)
            self._filled = 0
            for column in (*self.curves.values(), *self.counts.values()):
                column.append(None)
        self._filled += 1
        self.last = step
        empty = [None] * len(self.starts)
        for name, value in values.items():
            curve = self.curves.setdefault(name, [*empty])
            curve[-1] = _joined(curve[-1], _point(float(value)))
        for name, row in (counts or {}).items():
            rows = self.counts.setdefault(name, [*empty])
            rows[-1] = _added(rows[-1], row)

    def forget_from(self, step: int) -> tuple[int, int] | None:
        """Drops the values at a step or later, for a run that went back.

        Where steps before and after it are merged in one bucket, its values are dropped:
        they cannot be told apart. Returns the first step of this bucket and how many steps
        before `step` it had; `None` if there is no such bucket.
        """
        keep = sum(start < step for start in self.starts)
        ends = [*self.starts, (self.last if self.last is not None else step) + 1]
        is_cut = keep > 0 and ends[keep] > step and self.width > 1
        del self.starts[keep:]
        for column in (*self.curves.values(), *self.counts.values()):
            del column[keep:]
            if is_cut:
                column[-1] = None
        self.last = None if not keep else min(self.last or 0, step - 1)
        filled, self._filled = self._filled, self.width
        if not is_cut:
            return None
        start, width = self.starts[-1], ends[keep] - self.starts[-1]
        steps = self.width if ends[keep:][1:] else filled
        return start, round(steps * (step - start) / width)

    def _halve(self) -> None:
        self.starts = self.starts[::2]
        for name, column in self.curves.items():
            self.curves[name] = [_joined(*pair) for pair in _pairs(column)]
        for name, column in self.counts.items():
            self.counts[name] = [_added(*pair) for pair in _pairs(column)]
        self.width *= 2


def _pairs(column: list[T | None]) -> Iterator[tuple[T | None, T | None]]:
    """Yields neighbours; the last one of an odd number has none."""
    return itertools.zip_longest(column[::2], column[1::2])


def _point(value: float) -> Point:
    if not math.isfinite(value):
        return [0, 0.0, math.inf, -math.inf, 1]
    return [1, value, value, value, 0]


def _joined(a: Point | None, b: Point | None) -> Point | None:
    if a is None or b is None:
        return b if a is None else a
    return [a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3]), a[4] + b[4]]


def _added(a: list[int] | None, b: list[int] | None) -> list[int] | None:
    if a is None or b is None:
        return b if a is None else a
    return [x + y for x, y in zip(a, b, strict=True)]


@dataclasses.dataclass(frozen=True)
class Skip:
    """A step that was not taken.

    Attributes:
        step: Its number.
        leaf: The gradient to look at first: of those with an infinity or a nan, the one
            with the smallest share of them, which lies nearest to the cause. "" if all
            gradients are finite, or were not counted.
        leaves: How many gradients have one.
        infs: The infinities in `leaf`.
        nans: The nans in `leaf`.
        loss: The loss.
        loss_scale: The loss scale; nan if there is none.
    """

    step: int
    leaf: str
    leaves: int
    infs: int
    nans: int
    loss: float
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class RunSummary(Result):
    """What a recorder has seen; made by `Watch.summary`.

    Attributes:
        steps: The number of recorded steps.
        skipped: How many of them were not taken.
        skips: The skipped steps, the latest 1000 of them.
        numbers: The last value of each recorded number.
        notes: What you should know.
    """

    steps: int
    skipped: int
    skips: tuple[Skip, ...]
    numbers: dict[str, float]
    notes: tuple[str, ...]

    def tables(self) -> Sequence[Table]:
        """Returns the numbers, the skipped steps and the notes."""
        if not self.steps:
            return [Table.text("No step has been recorded.")]
        share = percent(self.skipped / self.steps)
        text = f"{self.steps} steps, {self.skipped} of them skipped ({share})."
        tables = [Table.text(" ".join([text, *self.notes]))]
        rows = [[name, f"{value:.4g}"] for name, value in self.numbers.items()]
        tables.append(Table(("number", "last"), rows, right=frozenset({1})))
        if self.skips:
            head = ("step", "loss scale", "leaf", "inf", "nan", "leaves")
            unknown = "(not known, or the loss or a state)"
            rows = [
                [str(x.step), f"{x.loss_scale:g}", x.leaf or unknown]
                + [str(count) for count in (x.infs, x.nans, x.leaves)]
                for x in self.skips[-10:]
            ]
            title = "The last skipped steps"
            tables.append(Table(head, rows, title, frozenset({0, 1, 3, 4, 5})))
        return tables


def _skip_of(step: int, seen: Observation, scale: float) -> Skip:
    """Returns what is known about a step that was not taken."""
    loss = math.nan if seen.loss is None else float(seen.loss)
    stats = seen.grads
    if stats is None or not stats.nonfinite.any():
        return Skip(step, "", 0, 0, 0, loss, scale)
    share = stats.nonfinite / np.maximum(stats.sizes, 1)
    first = int(np.argmin(np.where(share > 0, share, np.inf)))
    return Skip(
        step=step,
        leaf=stats.names[first],
        leaves=int((share > 0).sum()),
        infs=int(stats.infs[first]),
        nans=int(stats.nans[first]),
        loss=loss,
        loss_scale=scale,
    )


def _as_writers(writer: Any) -> list[Write]:
    """Returns functions of a step and its numbers; `watch` says what a writer may be."""
    if writer is None:
        return []
    if isinstance(writer, list | tuple):
        return [write for one in writer for write in _as_writers(one)]
    if hasattr(writer, "add_scalar"):

        def write(step: int, numbers: Mapping[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)

        return [write]
    if _is_run(writer):
        return [lambda step, numbers: writer.log(dict(numbers), step=step)]
    if callable(writer) and not isinstance(writer, type):
        return [writer]
    raise TypeError(
        "`writer` must be a `tensorboardX.SummaryWriter`, a run of W&B, or a function of "
        f"the step and a dict of numbers, but {type(writer).__name__} was given. For a "
        "logger pass `lambda step, numbers: logger.info(...)`."
    )


def _is_run(writer: object) -> bool:
    """Returns whether it has W&B's `log(data, step=...)`; loggers have another one."""
    log = getattr(writer, "log", None)
    if isinstance(writer, type | logging.Logger | logging.LoggerAdapter) or log is None:
        return False
    parameters = inspect.signature(log).parameters
    return "step" in parameters or any(
        x.kind is x.VAR_KEYWORD for x in parameters.values()
    )


class Watch:
    """Records the steps of a training loop; `watch` is another name for it.

    It records the loss, the loss scale, skipped steps and the gradient that caused each,
    gradient norms, the share of gradients that would be flushed to zero, weights that do
    not move, and the magnitudes of delayed scaling.

    `observe` belongs inside the jitted step and `record` into the loop. `record` keeps
    arrays that may not be computed yet, and fetches them every few steps, so that the
    host does not wait for the device at each.

    Args:
        writer: Gets the numbers of each step, when they are fetched: a
            `tensorboardX.SummaryWriter`, a run of W&B, a function of the step and a dict,
            or a list of them.
        every: How many steps are kept before they are fetched from the device.
        groups: How many parts of a parameter's path make its group, or a function from
            the path to the name of the group.
        stalled_after: Warns if no step was taken for so many steps.
        title: The title of the page.

    Raises:
        TypeError: If `writer` is none of these.
        ValueError: If a number is not positive.

    Examples:
        >>> import mpx
        >>> recorder = watch()
        >>> @jax.jit
        ... def step(w, scaling, x):
        ...     result = mpx.value_and_grad(lambda w, x: (w * x).sum())(scaling, w, x)
        ...     new = w - 0.1 * result.grads
        ...     return new, recorder.observe(result, before=w, after=new)
        >>> w = np.ones(2, np.float32)
        >>> for _ in range(3):
        ...     w, seen = step(w, mpx.NoLossScaling(), np.float32(1))
        ...     recorder.record(seen)
        >>> recorder.summary().steps
        3
    """

    observe = staticmethod(observe)

    def __init__(
        self,
        writer: object = None,
        *,
        every: int = 50,
        groups: int | Groups = 2,
        stalled_after: int = 100,
        title: str = "Training run",
    ) -> None:
        self._writers = _as_writers(writer)
        self._every = as_count(every, "every", at_least=1)
        self._stalled_after = as_count(stalled_after, "stalled_after", at_least=1)
        self._groups = groups
        self._pending: list[tuple[int, Observation]] = []
        self.timeline = Timeline()
        self.title = title
        self.skips: list[Skip] = []
        self.notes: dict[str, str] = {}
        self._idle = self._next = 0
        self._scale = math.nan
        self._latest: dict[str, float] = {}
        self.exponents: ExponentStats | None = None

    def record(self, observation: Observation, step: int | None = None) -> None:
        """Records a step. Does not wait for it, except every `every` steps.

        Args:
            observation: What `observe` returned; or the observations of several steps,
                as `lax.scan` stacks them.
            step: The number of the step; by default, one more than the last. If it is not
                beyond the last, as after a restart from a checkpoint, what was recorded
                from there on is replaced.
        """
        step = self._next if step is None else int(step)
        if step < self._next:
            self.flush()
            self._forget_from(step)
        self._next = step + math.prod(observation.finite.shape)
        self._pending.append((step, observation))
        if len(self._pending) > self._every:
            # All but the newest, which the device may still be computing.
            pending, self._pending = self._pending[:-1], self._pending[-1:]
            self._fetch(pending)

    def flush(self) -> None:
        """Fetches what has been recorded, and waits for it.

        Raises:
            Exception: What a writer raised first. Everything has been recorded then.
        """
        pending, self._pending = self._pending, []
        self._fetch(pending)

    def _forget_from(self, step: int) -> None:
        """Drops what was recorded at a step or later, for a run that went back."""
        self.skips = [skip for skip in self.skips if skip.step < step]
        self._idle, self._scale = 0, math.nan
        cut = self.timeline.forget_from(step)
        if cut is not None:
            start, count = cut
            skipped = sum(start <= skip.step for skip in self.skips)
            self.timeline.curves["skipped"][-1] = [count, skipped, 0, 1, 0]

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()

    def _fetch(self, pending: Sequence[tuple[int, Observation]]) -> None:
        found = jax.device_get([observation for _, observation in pending])
        starts = [step for step, _ in pending]
        taken: list[ExponentStats] = []
        errors: list[Exception] = []
        for step, observation in _single_steps(starts, found):
            numbers = self._take(step, observation)
            for write in self._writers:
                try:
                    write(step, numbers)
                except Exception as error:  # a full disk must not lose the other steps
                    errors.append(error)
            if observation.grads is not None and bool(observation.finite):
                taken.append(observation.grads)
        alike = [stats for stats in taken if stats.names == taken[-1].names]
        if alike:
            self.exponents = dataclasses.replace(
                alike[-1],
                counts=as_pairs(np.sum([x.histogram() for x in alike], axis=0)),
                squares=np.float32(np.sum([x.norms**2 for x in alike], axis=0)),
            )
        if errors:
            raise errors[0]

    def _take(self, step: int, seen: Observation) -> dict[str, float]:
        """Records the numbers of a step, and returns them."""
        finite = bool(seen.finite)
        numbers: dict[str, float] = {"skipped": float(not finite)}
        if seen.loss is not None:
            numbers["loss"] = float(seen.loss)
        used = self._scale_of(seen)
        if not math.isnan(used):
            numbers["loss_scaling"] = used
        counts: dict[str, list[int]] = {}
        if seen.grads is not None:
            more, counts = self._gradients(
                seen.grads, 1.0 if math.isnan(used) else used
            )
            numbers |= more
        if finite:
            numbers |= self._parameters(seen)
        for key, amaxes in seen.amaxes.items():
            values = zip(_AMAXES, np.asarray(amaxes).tolist(), strict=True)
            numbers |= {f"amax/{key}/{kind}": value for kind, value in values}
        numbers |= {name: float(np.mean(x)) for name, x in seen.extra.items()}
        self.timeline.add(step, numbers, counts)
        self._latest |= numbers
        self._judge(step, seen, finite, used)
        return numbers

    def _group(self, name: str) -> str:
        """Returns the group of a leaf: the first parts of its path, without the last."""
        if not isinstance(self._groups, int):
            return self._groups(name)
        parts = name.split("/")
        return "/".join(parts[: max(1, min(self._groups, len(parts) - 1))])

    def _scale_of(self, seen: Observation) -> float:
        """Returns the loss scale of a step; nan if there is none."""
        following = float(seen.scaling.get("loss_scaling", math.nan))
        before, self._scale = self._scale, following
        if seen.scale is not None:
            return float(seen.scale)
        return following if math.isnan(before) else before

    def _gradients(
        self, stats: ExponentStats, scale: float
    ) -> tuple[dict[str, float], dict[str, list[int]]]:
        """Returns norms and underflow, and the histograms of groups."""
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(stats.names):
            groups.setdefault(self._group(name), []).append(index)
        squares, bins = stats.norms**2, stats.histogram()[:, BELOW:INF]
        numbers = {"grad_norm": float(np.sqrt(squares.sum()))}
        for group, rows in groups.items():
            numbers[f"grad_norm/{group}"] = float(np.sqrt(squares[rows].sum()))
        sizes = bins.sum(-1)
        for name in _FORMATS_LOST:
            lost = stats.flushed(name, scale) @ sizes
            numbers[f"underflow/{name}"] = float(lost / max(sizes.sum(), 1))
        numbers["zeros"] = float(stats.zeros.sum() / max(stats.sizes.sum(), 1))
        counts = {group: bins[rows].sum(0).tolist() for group, rows in groups.items()}
        return numbers, counts | {"all": bins.sum(0).tolist()}

    def _parameters(self, seen: Observation) -> dict[str, float]:
        sizes = {}
        if seen.grads is not None:
            sizes = dict(zip(seen.grads.names, seen.grads.sizes.tolist(), strict=True))
        groups: dict[str, list[tuple[float, float]]] = {}
        for name, share in seen.stuck.items():
            pair = float(share), max(sizes.get(name, 1), 1)
            for group in (self._group(name), ""):
                groups.setdefault(group, []).append(pair)
        return {
            f"stuck/{group}".rstrip("/"): sum(share * size for share, size in pairs)
            / sum(size for _, size in pairs)
            for group, pairs in groups.items()
        }

    def _judge(self, step: int, seen: Observation, finite: bool, scale: float) -> None:
        """Notes a step that was skipped, and a run that stands still."""
        if finite:
            self._idle = 0
        else:
            self._idle += 1
            self.skips.append(_skip_of(step, seen, scale))
            del self.skips[:-1000]
        if self._idle == self._stalled_after:
            known = [skip.leaf for skip in self.skips[-self._idle :] if skip.leaf]
            leaf = known[-1] if known else ""
            why = (
                f"the gradient of `{leaf}` is not finite, at a loss scale of {scale:g}"
                if leaf
                else "no gradient was found that is not finite; the loss or a state is "
                "not, or the exponents were not counted"
            )
            message = (
                f"No step was taken for {self._idle} steps, up to step {step}: {why}. "
                "Look for an inf or nan in the data, the loss or the parameters."
            )
            self.notes["stalled"] = message
            warn(message)
        stuck = self._latest.get("stuck", 0.0)
        if stuck > 0.5:
            self.notes["stuck"] = (
                f"{percent(stuck)} of the weights that have a gradient did not move in "
                f"step {step}: their updates are below half an ulp. Keep f32 weights, or "
                "use `mpx.optim.master_weights` or a compressed optimizer."
            )
        else:
            self.notes.pop("stuck", None)

    @property
    def steps(self) -> int:
        """The number of steps that were recorded and fetched."""
        return sum(int(x[0]) for x in self.timeline.curves.get("skipped", []) if x)

    @property
    def skipped(self) -> int:
        """How many of them were not taken."""
        return sum(int(x[1]) for x in self.timeline.curves.get("skipped", []) if x)

    def summary(self) -> RunSummary:
        """Returns what has been seen so far; waits for the steps that were recorded."""
        self.flush()
        return RunSummary(
            steps=self.steps,
            skipped=self.skipped,
            skips=tuple(self.skips),
            numbers=dict(self._latest),
            notes=tuple(self.notes.values()),
        )

    def page(self, path: str | os.PathLike[str]) -> Path:
        """Writes a page with the curves and the exponents, and returns its path.

        It is one file, which needs no server and no network.
        """
        from mpx.inspect._page import write_page

        self.flush()
        return write_page(self, Path(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves what has been recorded as JSON, beside a checkpoint; see `load`.

        The file is replaced at once: it is the old or the new one, also after a crash.
        """
        self.flush()
        fields = {name: getattr(self, name) for name in _SAVED}
        fields |= {"timeline": vars(self.timeline)}
        fields |= {"skips": [dataclasses.asdict(skip) for skip in self.skips]}
        path = Path(path)
        # A file that was cut off by a crash would hide the one before it.
        new = path.with_name(f"{path.name}.{os.getpid()}.new")
        try:
            new.write_text(json.dumps(fields), encoding="utf-8")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    def load(self, path: str | os.PathLike[str]) -> "Watch":
        """Goes on where a saved recorder ended. Returns the recorder itself."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        for name in _SAVED:
            setattr(self, name, fields[name])
        vars(self.timeline).update(fields["timeline"])
        self.skips = [Skip(**skip) for skip in fields["skips"]]
        return self


def _single_steps(
    starts: Sequence[int], found: Sequence[Observation]
) -> Iterator[tuple[int, Observation]]:
    """Yields each step, also of observations that a scan has stacked."""
    for start, observation in zip(starts, found, strict=True):
        if not np.ndim(observation.finite):
            yield start, observation
            continue
        for i in range(len(observation.finite)):
            yield start + i, jax.tree.map(operator.itemgetter(i), observation)


_SAVED = ("title", "notes", "_idle", "_next", "_scale", "_latest")


watch = Watch
