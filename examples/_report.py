"""Progress, the closing table, its verdict and the figure."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

Runs = dict[str, list["Run"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The results of one training run.

    Attributes:
        losses: The training loss of each step.
        scales: The loss scale, sampled at equal distances from before the first step.
        skipped: How many steps were skipped.
        accuracy: On the test images.
        state_bytes: The size of weights and optimizer state.
        stuck: The share of weights that a step of one learning rate does not change.
    """

    losses: NDArray[np.float32]
    scales: NDArray[np.float64]
    skipped: int
    accuracy: float
    state_bytes: int
    stuck: float

    @property
    def loss(self) -> float:
        """The mean training loss of the last tenth of the steps."""
        return float(np.mean(self.losses[-math.ceil(len(self.losses) / 10) :]))


class Live:
    """One progress bar per mode; where there is no terminal, one line per mode."""

    def __init__(self, modes: Sequence[str], steps: int, seeds: int) -> None:
        self.console = Console()
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
        )
        self._steps = steps
        self._tasks = {
            m: self._progress.add_task(m, total=steps * seeds, note="") for m in modes
        }
        self._done = dict.fromkeys(modes, 0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(
        self, mode: str, step: int, loss: float, scale: float, skipped: int
    ) -> None:
        """Shows where the current run of a mode stands."""
        self._progress.update(
            self._tasks[mode],
            completed=self._done[mode] + step,
            note=f"loss {loss:.3f}  scale {_scale(scale)}  skipped {skipped}",
        )
        if step == self._steps:
            self._done[mode] += step

    def finish(self, mode: str, runs: list[Run]) -> None:
        """Writes a line for the log if there are no bars."""
        if self._progress.disable:
            accuracy = np.mean([r.accuracy for r in runs])
            loss = np.mean([r.loss for r in runs])
            self.print(f"{mode}: test accuracy {accuracy:.3f}, train loss {loss:.3f}")

    def print(self, text: str) -> None:
        """Prints above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _scale(value: float) -> str:
    exponent = math.log2(value)
    return "1" if value == 1 else f"2^{exponent:g}"


COLUMNS = ("mode", "accuracy", "loss", "scale", "skipped", "state bytes", "stuck")
MARKERS = ("<!-- demo: written by examples/digits.py --page -->", "<!-- /demo -->")


def _rows(runs: Runs) -> list[tuple[str, ...]]:
    """Returns one row per mode: means over the seeds, the sum of the skipped steps."""
    return [
        (
            mode,
            f"{_mean_accuracy(rs):.3f}",
            f"{np.mean([r.loss for r in rs]):.3f}",
            _scale(float(rs[-1].scales[-1])),
            str(sum(r.skipped for r in rs)),
            f"{rs[-1].state_bytes:,}",
            f"{np.mean([r.stuck for r in rs]):.0%}" if _finite(rs) else "-",
        )
        for mode, rs in runs.items()
    ]


def show_table(console: Console, runs: Runs) -> None:
    """Prints the rows as a table."""
    table = Table(box=box.SIMPLE)
    table.add_column(COLUMNS[0], no_wrap=True)
    for title in COLUMNS[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    for row in _rows(runs):
        table.add_row(*row)
    console.print(table)


def write_page(path: Path, intro: str, runs: Runs, lines: Sequence[str]) -> None:
    """Replaces what a Markdown page holds between the markers.

    Raises:
        ValueError: If the page has no markers.
    """
    before, start, rest = path.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not (start and end):
        raise ValueError(f"{path} has no lines {MARKERS[0]!r} and {MARKERS[1]!r}.")
    table = [COLUMNS, ("---",) * len(COLUMNS), *_rows(runs)]
    rows = [f"| {' | '.join(row)} |" for row in table]
    findings = [f"- {line}" for line in lines]
    block = "\n".join([start, intro, "", *rows, "", *findings, end])
    path.write_text(before + block + after, encoding="utf-8")


def verdict(runs: Runs, test_images: int, lr: float) -> tuple[list[str], bool]:
    """Prints what the table shows; returns whether a mixed mode is worse than f32."""
    if "f32" not in runs:
        return ["No comparison: the mode f32 was not run."], False
    reference = _mean_accuracy(runs["f32"])
    spread = float(np.ptp([r.accuracy for r in runs["f32"]]))
    noise = max(spread, 3 * math.sqrt(reference * (1 - reference) / test_images))
    lines = [
        f"Noise of a test accuracy: ±{noise:.3f}, the larger of the range of f32 over "
        f"its seeds and three sampling errors of {test_images:,} images."
    ]
    failed = False
    for mode, rs in runs.items():
        if mode == "f32":
            continue
        gap = reference - _mean_accuracy(rs)
        worse = not _finite(rs) or gap > noise
        failed |= worse and mode.startswith("mixed")
        lines.append(f"{mode}: {_judgement(mode, rs, gap, noise, lr)}")
    return lines, failed


def _judgement(mode: str, rs: list[Run], gap: float, noise: float, lr: float) -> str:
    if not _finite(rs):
        finite = np.all([np.isfinite(r.losses) for r in rs], axis=0)
        text = f"broken, the loss is not finite from step {np.argmin(finite) + 1} on"
        if mode == "plain-f16" and np.float16(1e-8) == 0:
            text += (
                "; in f16 Adam's epsilon, 1e-8, is 0 and so are the squares of small "
                "gradients: it divides by 0"
            )
        return text + "."
    if gap <= noise:
        text = "as good as f32" if gap > -noise else "better than f32"
        text = f"{text} ({round(-gap, 3) + 0.0:+.3f})"
    else:
        text = f"worse than f32 by {gap:.3f}"
    stuck = float(np.mean([r.stuck for r in rs]))
    if stuck > 0.01:
        text += (
            f"; {stuck:.0%} of its weights are stuck: a step of lr = {lr:g} is rounded "
            "away"
        )
    return text + "."


def _mean_accuracy(rs: list[Run]) -> float:
    return float(np.mean([r.accuracy for r in rs]))


def _finite(rs: list[Run]) -> bool:
    return all(bool(np.isfinite(r.losses).all()) for r in rs)


TICKS = (0.1, 0.2, 0.5, 1, 2)
PANELS = {
    "mixed": "With mpx: 16-bit compute, f32 weights",
    "plain": "Without: the weights themselves in 16 bits",
}


def save_figure(runs: Runs, path: Path) -> Path:
    """Draws the training losses, mixed modes left and plain ones right.

    Returns:
        The path of the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle("What mixed precision keeps, and what plain half weights lose")
    axes = figure.subplots(1, len(PANELS), sharey=True)
    for ax, (kind, title) in zip(axes, PANELS.items(), strict=True):
        for mode, rs in runs.items():
            if mode == "f32" or mode.startswith(kind):
                _draw(ax, mode, rs, color=f"C{list(runs).index(mode)}")
        ax.set(title=title, xlabel="step", yscale="log")
        ax.set_yticks(TICKS, map(str, TICKS))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(loc="lower left")
    axes[0].set_ylabel("training loss")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw(ax: Any, mode: str, rs: list[Run], color: str) -> None:
    """Draws the mean over the seeds, smoothed; a cross where it stops being finite."""
    losses = np.mean([r.losses for r in rs], axis=0)
    if not _finite(rs):
        step = int(np.argmin(np.isfinite(losses)))
        label = f"{mode}: nan from step {step + 1} on"
        ax.plot(step, losses[max(0, step - 1)], "X", color=color, ms=12, label=label)
        return
    window = max(1, len(losses) // 40)
    smooth = np.convolve(losses, np.full(window, 1 / window), "valid")
    ax.plot(
        np.arange(len(smooth)) + window,
        smooth,
        color=color,
        label=f"{mode}: {_mean_accuracy(rs):.1%} of the test images right",
        # Wide below the others, which cover it where they are as good.
        linewidth=6 if mode == "f32" else 1.5,
        alpha=0.35 if mode == "f32" else 1,
    )
