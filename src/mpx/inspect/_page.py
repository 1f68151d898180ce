"""A page about a training run: one HTML file that needs no server and no network."""

import html
import importlib.resources
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpx._jax._formats import FORMATS
from mpx.inspect._counting import LOWEST
from mpx.inspect._exponents import SHOWN

if TYPE_CHECKING:
    from mpx.inspect._timeline import Point, Timeline
    from mpx.inspect._watch import Watch

MOST_CURVES = 12  # of one kind; the page says how many are left out


def write_page(watch: "Watch", path: Path) -> Path:
    """Writes the page of a run and returns its path."""
    template = importlib.resources.files("mpx.inspect").joinpath("_page.html")
    # `<` could end the script that holds the data.
    data = json.dumps(_data(watch), allow_nan=False).replace("<", "\\u003c")
    before, after = template.read_text(encoding="utf-8").split("{{data}}")
    before = before.replace("{{title}}", html.escape(watch.title))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before + data + after, encoding="utf-8")
    return path


def _data(watch: "Watch") -> dict[str, Any]:
    line = watch.timeline
    charts: dict[str, list[str]] = {}
    for name in line.curves:
        charts.setdefault(name.partition("/")[0], []).append(name)
    order = ["loss", "loss_scaling", "skipped", "grad_norm", "underflow", "stuck"]
    kinds = [x for x in order if x in charts] + [x for x in charts if x not in order]
    return {
        "title": watch.title,
        "steps": watch.steps,
        "skipped": watch.skipped,
        "last": line.last,
        "notes": list(watch.notes.values()),
        "charts": [_chart(line, kind, charts[kind]) for kind in kinds],
        "skips": [
            {k: getattr(x, k) for k in ("step", "leaf", "leaves", "infs", "nans")}
            | {"scale": _number(x.loss_scale)}
            for x in watch.skips[-200:]
        ],
        "heat": _heat(line),
        "formats": [_format(name) for name in SHOWN],
        "table": _table(watch),
    }


def _chart(line: "Timeline", kind: str, names: list[str]) -> dict[str, Any]:
    return {
        "name": kind,
        "left_out": len(names[MOST_CURVES:]),
        "steps": line.starts,
        "curves": [{"name": x, **_curve(line.curves[x])} for x in names[:MOST_CURVES]],
    }


def _curve(points: "Sequence[Point | None]") -> dict[str, list[float | None]]:
    known = [x or (0, 0, 0, 0, 0) for x in points]
    return {
        "mean": [_number(x[1] / x[0]) if x[0] else None for x in known],
        "low": [_number(x[2]) if x[0] else None for x in known],
        "high": [_number(x[3]) if x[0] else None for x in known],
        "bad": [int(x[4]) for x in known],
    }


def _heat(line: "Timeline") -> dict[str, Any]:
    """Returns the histograms over the steps, for all gradients and for groups."""
    names = sorted(line.counts, key=lambda name: name != "all")[: MOST_CURVES + 1]
    used = [row for name in names for row in line.counts[name] if row]
    bins = [i for row in used for i, x in enumerate(row) if x]
    first, last = (min(bins), max(bins) + 1) if bins else (0, 0)

    def shares(row: Sequence[int] | None) -> list[float | None] | None:
        whole = sum(row or ())
        return [_number(x / whole) for x in row[first:last]] if row and whole else None

    scales = line.curves.get("loss_scaling") or [None] * len(line.starts)
    return {
        "scales": [
            _number(math.log2(x[3])) if x and x[0] and x[3] > 0 else 0 for x in scales
        ],
        "lowest": LOWEST - 1 + first,
        "bins": last - first,
        "steps": line.starts,
        "groups": [
            {"name": name, "columns": [shares(row) for row in line.counts[name]]}
            for name in names
        ],
    }


def _format(name: str) -> dict[str, Any]:
    form = FORMATS[name]
    ends = {"smallest": form.smallest, "tiny": form.tiny, "max": form.max}
    return {"name": name, **{key: math.log2(x) for key, x in ends.items()}}


def _table(watch: "Watch") -> dict[str, Any] | None:
    if watch.exponents is None:
        return None
    scale = watch.timeline.curves.get("loss_scaling")
    last = scale[-1] if scale else None
    used = last[3] if last and last[0] else 1.0
    table, note = watch.exponents.view(scale=used).tables()
    return {
        "title": table.title,
        "head": list(table.head),
        "rows": [list(row) for row in table.rows],
        "note": str(note),
    }


def _number(value: float) -> float | None:
    """Returns a number with six digits; `None` for one that JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
