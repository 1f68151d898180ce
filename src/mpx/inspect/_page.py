"""The curves of a run, and a page that shows them: one HTML file without a server."""

import html
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpx.inspect._result import Table

Point = list[float]
"""How many finite values, their sum, smallest and largest; how many that are not finite."""
_MOST_CURVES = 12  # of one kind; the page says how many are left out
_FIRST = ("loss", "loss_scaling", "skipped", "grad_norm", "underflow", "stuck")


class Timeline:
    """Values by step and name, in at most `2 * points` buckets.

    While a run is short, a bucket is a step. When there are too many, two neighbours become
    one, which keeps mean, smallest and largest value, and how many were not finite.

    Attributes:
        starts: The first step of each bucket.
        ends: The last step of each bucket.
        curves: By name, the point of each bucket; `None` where there was no value.
    """

    def __init__(self, points: int = 200) -> None:
        self.points, self.width, self._filled = points, 1, 0
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.curves: dict[str, list[Point | None]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of one step."""
        if not self.starts or self._filled == self.width:
            if len(self.starts) >= 2 * self.points:
                self._halve()
            self.starts.append(step)
            self.ends.append(step)
            self._filled = 0
            for curve in self.curves.values():
                curve.append(None)
        self._filled += 1
        self.ends[-1] = step
        for name, value in values.items():
            curve = self.curves.setdefault(name, [None] * len(self.starts))
            curve[-1] = _joined(curve[-1], _point(value))

    def forget_from(self, step: int) -> None:
        """Drops the buckets that reach up to a step or beyond, for a run that went back."""
        keep = sum(end < step for end in self.ends)
        for column in (self.starts, self.ends, *self.curves.values()):
            del column[keep:]
        self._filled = self.width

    def _halve(self) -> None:
        self.starts, self.ends = self.starts[::2], self.ends[1::2]
        for name, curve in self.curves.items():
            self.curves[name] = [*map(_joined, curve[::2], curve[1::2])]
        self.width *= 2


def _point(value: float) -> Point:
    if not math.isfinite(value):
        return [0, 0.0, math.inf, -math.inf, 1]
    return [1, value, value, value, 0]


def _joined(a: Point | None, b: Point | None) -> Point | None:
    if a is None or b is None:
        return b if a is None else a
    return [a[0] + b[0], a[1] + b[1], min(a[2], b[2]), max(a[3], b[3]), a[4] + b[4]]


def write_page(path: Path, title: str, line: Timeline, tables: Sequence[Table]) -> Path:
    """Writes the page of a run; the first table is above the curves. Returns its path."""
    page = importlib.resources.files("mpx.inspect").joinpath("_page.html")
    lead, *others = (table.html() for table in tables)
    # `<` could end the script that holds the data.
    data = json.dumps(_charts(line), allow_nan=False).replace("<", "\\u003c")
    parts = page.read_text(encoding="utf-8").split("{{part}}")
    parts[0] = parts[0].replace("{{title}}", html.escape(title))
    given = (lead, "".join(others), data, "")
    text = "".join(x + y for x, y in zip(parts, given, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _charts(line: Timeline) -> list[dict[str, object]]:
    """Returns one chart for each kind of number: what is before the first slash."""
    kinds: dict[str, list[str]] = {kind: [] for kind in _FIRST}
    for name in line.curves:
        kinds.setdefault(name.partition("/")[0], []).append(name)
    return [
        {
            "name": kind,
            "left_out": len(names[_MOST_CURVES:]),
            "steps": line.starts,
            "curves": [
                {"name": name, **_curve(line.curves[name])}
                for name in names[:_MOST_CURVES]
            ],
        }
        for kind, names in kinds.items()
        if names
    ]


def _curve(points: Sequence[Point | None]) -> dict[str, list[float | None]]:
    known = [x or [0, 0, 0, 0, 0] for x in points]
    return {
        "mean": [_number(x[1] / x[0]) if x[0] else None for x in known],
        "low": [_number(x[2]) if x[0] else None for x in known],
        "high": [_number(x[3]) if x[0] else None for x in known],
        "bad": [x[4] for x in known],
    }


def _number(value: float) -> float | None:
    """Returns a number with six digits; `None` for one that JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
