"""A recorder for training loops: what steps say about themselves, kept and shown."""

import dataclasses
import inspect
import json
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpx._jax._arguments import as_count
from mpx._jax._warn import warn
from mpx.inspect._counting import BELOW, INF, as_pairs
from mpx.inspect._exponents import ExponentStats
from mpx.inspect._observation import AMAXES, FORMATS_LOST, Observation, observe
from mpx.inspect._result import Result, Table, percent
from mpx.inspect._timeline import Timeline

Groups = Callable[[str], str]
Write = Callable[[int, Mapping[str, float]], object]


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
            values = zip(AMAXES, np.asarray(amaxes).tolist(), strict=True)
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
        for name in FORMATS_LOST:
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
