"""The curves of a run, with a bounded number of points."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")
Point = list[float]
"""How many finite values, their sum, smallest and largest; how many that are not finite."""


class Timeline:
    """Values by step and name, in at most `2 * points` buckets.

    While a run is short, a bucket is a step. When there are too many, two neighbours become
    one, which keeps mean, smallest and largest value, and how many were not finite.

    Attributes:
        starts: The first step of each bucket.
        curves: By name, the point of each bucket; `None` where there was no value.
        counts: By name, the sum of each bucket of lists of integers.
    """

    def __init__(self, points: int = 200) -> None:
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
