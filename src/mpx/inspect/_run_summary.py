"""What a recorder has seen: the skipped steps, and the last numbers."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from mpx.inspect._observation import Observation
from mpx.inspect._result import Result, Table, percent


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


def skip_of(step: int, seen: Observation, scale: float) -> Skip:
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
