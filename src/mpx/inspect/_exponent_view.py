"""Tables of exponent histograms, with bars of characters."""

import dataclasses
import math
from collections.abc import Sequence

from mpx.inspect._bins import LOWEST
from mpx.inspect._result import Result, Table, amount, percent

BARS = " ▁▂▃▄▅▆▇█"
SHOWN = ("f16", "bf16", "e5m2", "e4m3")


@dataclasses.dataclass(frozen=True)
class LeafExponents:
    """What the histogram of one leaf says; see `ExponentStats`.

    Attributes:
        name: The path of the leaf.
        dtype: Its dtype.
        size: The number of values that were counted.
        zeros: How many of them are zero.
        infs: How many are infinite.
        nans: How many are nan.
        range: The smallest and the largest exponent.
        norm: The Euclidean norm.
        flushed: By format, the share of the numbers that it rounds to zero.
        overflowing: By format, the share of the numbers beyond its largest one.
        best_scale: The largest loss scale at which nothing overflows in f16.
        counts: The number of values by exponent, from below -63 to above 31.
    """

    name: str
    dtype: str
    size: int
    zeros: int
    infs: int
    nans: int
    range: tuple[int, int] | None
    norm: float
    flushed: dict[str, float]
    overflowing: dict[str, float]
    best_scale: float
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ExponentView(Result):
    """A table of exponent histograms at one loss scale; made by `ExponentStats.view`.

    Attributes:
        scale: The loss scale.
        sample: Every how many rows were counted of large leaves.
        leaves: What each histogram says.
    """

    scale: float
    sample: int
    leaves: tuple[LeafExponents, ...]

    def tables(self) -> Sequence[Table]:
        """Returns one row for each leaf, with its histogram as bars."""
        if not self.leaves:
            return [Table.text("No floating leaf.")]
        formats = list(self.leaves[0].flushed)
        low, high = self._span()
        head = ["leaf", "dtype", "values", f"2^{low} … 2^{high}", "range", "zero"]
        head += [f"→0 {name}" for name in formats]
        head += ["inf, nan", "best scale"]
        rows = [self._row(leaf, low, high) for leaf in self.leaves]
        title = "Exponents"
        if self.scale != 1:
            title += f" at a loss scale of {_power(self.scale)}"
        if self.sample > 1:
            title += f" (one of {self.sample} rows of large leaves)"
        right = frozenset({2, *range(5, len(head))})
        lost = "→0: the share of the numbers that the format rounds to zero."
        over = [
            f"{percent(max(shares))} of a leaf overflows in {name}."
            for name in formats
            if max(shares := [leaf.overflowing[name] for leaf in self.leaves]) > 0
        ]
        text = " ".join([lost, *(f"Up to {sentence}" for sentence in over)])
        return [Table(head, rows, title, right), Table.text(text)]

    def _span(self) -> tuple[int, int]:
        found = [leaf.range for leaf in self.leaves if leaf.range is not None]
        if not found:
            return 0, 0
        return min(low for low, _ in found), max(high for _, high in found)

    def _row(self, leaf: LeafExponents, low: int, high: int) -> list[str]:
        numbers = leaf.size - leaf.zeros - leaf.infs - leaf.nans
        limits = "–" if leaf.range is None else "2^{} … 2^{}".format(*leaf.range)
        best = "–" if math.isnan(leaf.best_scale) else _power(leaf.best_scale)
        wrong = leaf.infs + leaf.nans
        return [
            leaf.name or "(leaf)",
            leaf.dtype,
            amount(leaf.size),
            sparkline(leaf.counts[low - LOWEST + 1 : high - LOWEST + 2]),
            limits,
            percent(leaf.zeros / leaf.size) if leaf.size else "–",
            *(percent(share) if numbers else "–" for share in leaf.flushed.values()),
            f"{leaf.infs}, {leaf.nans}" if wrong else "–",
            best,
        ]


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def sparkline(counts: Sequence[int]) -> str:
    """Returns bars whose height is the square root of the counts: tails stay visible."""
    top = max(counts, default=0)
    steps = len(BARS) - 1
    return "".join(
        BARS[math.ceil(steps * math.sqrt(x / top))] if x else BARS[0] for x in counts
    )
