"""The table of the demo, what it says, and the figure."""

import math
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

COLUMNS = ("mode", "accuracy", "loss", "scale", "skipped", "state bytes", "stuck")
MARKERS = ("<!-- demo: written by examples/digits.py --page -->", "<!-- /demo -->")


class Run(NamedTuple):
    """The results of one training run."""

    losses: np.ndarray
    scale: float
    skipped: int
    accuracy: float
    state_bytes: int
    stuck: float  # the share of weights that a step of one learning rate leaves

    @property
    def loss(self):  # of the last tenth of the steps
        return float(np.mean(self.losses[-math.ceil(len(self.losses) / 10) :]))

    @property
    def broken(self):  # the first step whose loss is not finite, or 0
        finite = np.isfinite(self.losses)
        return 0 if finite.all() else int(np.argmin(finite)) + 1


def table(runs):
    """Returns the lines of a Markdown table."""
    rows = [COLUMNS, ["---"] * len(COLUMNS)]
    for mode, run in runs.items():
        scale = "1" if run.scale == 1 else f"2^{math.log2(run.scale):g}"
        stuck = "-" if run.broken else f"{run.stuck:.0%}"
        numbers = (f"{run.accuracy:.3f}", f"{run.loss:.3f}", scale, str(run.skipped))
        rows.append((mode, *numbers, f"{run.state_bytes:,}", stuck))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]


def findings(runs, test_images, lr):
    """Returns lines that compare each mode with f32."""
    reference = runs["f32"].accuracy
    noise = 3 * math.sqrt(reference * (1 - reference) / test_images)
    lines = [f"- Noise of a test accuracy: ±{noise:.3f}, three sampling errors."]
    for mode, run in list(runs.items())[1:]:
        gap = run.accuracy - reference
        if run.broken:
            text = f"broken, the loss is not finite from step {run.broken} on"
        else:
            worse = f"worse than f32 by {-gap:.3f}"
            text = worse if gap < -noise else f"as good as f32 ({gap:+.3f})"
            if run.stuck > 0.01:
                text += f"; a step of lr = {lr:g} is lost on {run.stuck:.0%} of weights"
        lines.append(f"- {mode}: {text}.")
    return lines


def write_page(path, text):
    """Replaces what a Markdown page holds between the markers."""
    before, start, rest = path.read_text(encoding="utf-8").partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not end:
        raise ValueError(f"{path} has no lines {MARKERS[0]!r} and {MARKERS[1]!r}.")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def save_figure(runs, path):
    """Draws the smoothed losses, mixed modes left and plain ones right."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle("What mixed precision keeps, and what plain half weights lose")
    left, right = figure.subplots(1, 2, sharey=True)
    left.set(ylabel="training loss", title="With mpx: 16-bit compute, f32 weights")
    right.set(title="Without: the weights themselves in 16 bits")
    for number, (mode, run) in enumerate(runs.items()):
        window = max(1, len(run.losses) // 40)
        y = np.convolve(run.losses, np.full(window, 1 / window), "valid")
        x = np.arange(len(y)) + window
        label = f"{run.accuracy:.1%} of the test images right"
        # f32 is wide, below the others, which cover it if they are as good.
        style = {"linewidth": 6, "alpha": 0.35} if mode == "f32" else {}
        if run.broken:
            x, y = run.broken - 1, run.losses[max(0, run.broken - 2)]
            style, label = {"marker": "X", "ms": 12}, f"nan from step {run.broken} on"
        for kind, ax in (("mixed", left), ("plain", right)):
            if mode == "f32" or mode.startswith(kind):
                ax.plot(x, y, color=f"C{number}", label=f"{mode}: {label}", **style)
    for ax in (left, right):
        ax.set(xlabel="step", yscale="log")
        ax.set_yticks((0.1, 0.2, 0.5, 1, 2), ("0.1", "0.2", "0.5", "1", "2"))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
