"""Statistics of exponents: a histogram for each leaf, its table and its picture."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, PyTree

from mpx._jax._arguments import as_count, check_axis_name
from mpx._jax._formats import FORMATS, Format, short_name
from mpx._jax._nnx import without_variables
from mpx._jax._tree import AxisName, dtype_of, named_leaves
from mpx.inspect._counting import (
    BELOW,
    HIGHEST,
    INF,
    LOWEST,
    NAN,
    ZERO,
    add_up,
    as_integers,
    carried,
    count,
)
from mpx.inspect._result import Result, Table, amount, extra, percent

SHOWN = ("f16", "bf16", "e5m2", "e4m3")
_BARS = " ▁▂▃▄▅▆▇█"
_RIDGES = 10  # up to so many leaves are drawn as histograms, more as a heat map
SAMPLED = 2**14
"""Leaves of fewer values are counted whole, also if a sample is asked for."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("counts", "squares"),
    meta_fields=("names", "dtypes", "sample"),
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ExponentStats(Result):
    """One histogram of exponents for each floating leaf of a pytree.

    Made by `exponent_stats`. It is a pytree: return it from jit, carry it through a scan,
    stack it over layers. `a + b` counts the values of both, and `sum` merges the leading
    axes that `scan` and `vmap` add. What the histograms say is computed on the host, once
    you ask for it.

    A value `x` with `2**e <= |x| < 2**(e+1)` has the exponent `e`. Exponents from -63 to 31
    have a bin each; smaller and larger values share one bin on each side.

    Attributes:
        counts: How many values are in each bin, int32[*batch, leaves, 100, 2]: pairs (low,
            high) for `high * 2**16 + low`. `histogram()` has them as integers.
        squares: The sum of the squares of each leaf, f32[*batch, leaves].
        names: The path of each leaf.
        dtypes: The dtype of each leaf, such as "bf16".
        sample: Of so many rows of large leaves one was counted; 1 for all.
    """

    # JAX puts other objects in their place when it rebuilds trees.
    counts: Any
    squares: Any
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    sample: int = 1

    # --- Inside or outside jit --------------------------------------------------------

    def __add__(self, other: "ExponentStats") -> "ExponentStats":
        """Returns the statistics of the values of both.

        Raises:
            ValueError: If they are those of different leaves.
        """
        if not isinstance(other, ExponentStats):
            return NotImplemented
        for mine, theirs in zip(self.names, other.names, strict=False):
            if mine != theirs:
                raise ValueError(
                    f"Statistics of different trees cannot be merged: one has `{mine}` "
                    f"where the other has `{theirs}`."
                )
        if len(self.names) != len(other.names):
            raise ValueError(
                f"Statistics of {len(self.names)} and of {len(other.names)} leaves "
                "cannot be merged."
            )
        return dataclasses.replace(
            self,
            counts=carried(self.counts + other.counts),
            squares=self.squares + other.squares,
        )

    def sum(self) -> "ExponentStats":
        """Merges leading axes: the layers of a scan, the steps, the lanes of a vmap."""
        batch = self.counts.ndim - 3
        over = tuple(range(batch))
        return dataclasses.replace(
            self,
            counts=add_up(self.counts, batch),
            squares=jnp.sum(self.squares, axis=over),
        )

    def all_finite(self) -> Bool[Array, "*batch"]:
        """Returns whether no value is infinite or nan, without another pass over them."""
        return jnp.all(self.counts[..., INF:, :] == 0, axis=(-3, -2, -1))

    # --- On the host ------------------------------------------------------------------

    @functools.cached_property
    def _host(self) -> np.ndarray:
        counts = as_integers(jax.device_get(self.counts))
        return counts.sum(tuple(range(counts.ndim - 2)))

    def histogram(self) -> np.ndarray:
        """Returns the number of values by leaf and bin, int64[leaves, 100].

        The bins are, in order: zeros, values below 2^-63, one for each exponent from -63
        to 31, values of 2^32 and more, infinities, nans.
        """
        return self._host

    @property
    def sizes(self) -> np.ndarray:
        """The number of values that were counted, by leaf."""
        return self._host.sum(-1)

    @property
    def zeros(self) -> np.ndarray:
        """The number of zeros, by leaf."""
        return self._host[:, ZERO]

    @property
    def infs(self) -> np.ndarray:
        """The number of infinities, by leaf."""
        return self._host[:, INF]

    @property
    def nans(self) -> np.ndarray:
        """The number of nans, by leaf."""
        return self._host[:, NAN]

    @property
    def nonfinite(self) -> np.ndarray:
        """The number of infinities and nans, by leaf."""
        return self._host[:, INF:].sum(-1)

    @property
    def norms(self) -> np.ndarray:
        """The Euclidean norm of each leaf, by squares in f32; of the sample, if one was taken.

        Values below 1e-19 do not enter, since their squares are zero in f32.
        """
        squares = np.asarray(jax.device_get(self.squares), np.float64)
        return np.sqrt(squares.sum(tuple(range(squares.ndim - 1))))

    def ranges(self) -> list[tuple[int, int] | None]:
        """Returns the smallest and the largest exponent of each leaf.

        -64 stands for every exponent below -63, and 32 for every exponent above 31. `None`
        stands for a leaf without a finite number other than zero.
        """
        found = [np.flatnonzero(row[BELOW:INF]) for row in self._host]
        low = LOWEST - 1
        return [(int(x[0]) + low, int(x[-1]) + low) if len(x) else None for x in found]

    def flushed(self, dtype: str, scale: float = 1.0) -> np.ndarray:
        """Returns the share of the values that a format rounds to zero, by leaf.

        The share is one of the finite values other than zero. It is exact, but for ties
        (half of the smallest number of the format rounds to zero), for a power of two.
        Values below 2^-63 count as flushed if all of them are.

        Args:
            dtype: The format: "f16", "bf16", "e5m2", "e4m3".
            scale: The loss scale, by which the values are multiplied first.
        """
        threshold = _format(dtype).smallest / 2 / scale
        return _share(self._host, math.log2(threshold), upwards=False)

    def overflowing(self, dtype: str, scale: float = 1.0) -> np.ndarray:
        """Returns the share of the values beyond the largest number of a format.

        The values around the largest number are in one bin with smaller ones: it counts in
        proportion. See `flushed` for the arguments.
        """
        threshold = _format(dtype).max / scale
        return _share(self._host, math.log2(threshold), upwards=True)

    def best_scale(self, dtype: str = "f16") -> list[float]:
        """Returns the largest power of two by which each leaf can be scaled, by leaf.

        The largest value stays below half of the largest power of two of the format, so
        that nothing overflows. nan for a leaf without a number other than zero.
        """
        top = math.floor(math.log2(_format(dtype).max))
        found = self.ranges()
        return [math.nan if x is None else 2.0 ** (top - 1 - x[1]) for x in found]

    def select(self, choose: str | Callable[[str], bool]) -> "ExponentStats":
        """Returns the statistics of some leaves.

        Args:
            choose: A regular expression to find in the names, or a function of a name.
        """
        chosen = choose if callable(choose) else re.compile(choose).search
        rows = np.array([i for i, name in enumerate(self.names) if chosen(name)], int)
        return dataclasses.replace(
            self,
            counts=self.counts[..., rows, :, :],
            squares=self.squares[..., rows],
            names=tuple(self.names[i] for i in rows),
            dtypes=tuple(self.dtypes[i] for i in rows),
        )

    def view(
        self, *, scale: float = 1.0, formats: Sequence[str] = SHOWN
    ) -> "ExponentView":
        """Returns a table of these histograms.

        Args:
            scale: The loss scale at which the shares are computed.
            formats: The formats for which they are.
        """
        return ExponentView(self, float(scale), tuple(formats))

    def tables(self) -> Sequence[Table]:
        """Returns the table of `view()`."""
        return self.view().tables()

    def to_dict(self) -> dict[str, Any]:
        """Returns the table of `view()` as plain values."""
        return self.view().to_dict()

    def __repr__(self) -> str:
        """Shows how many leaves there are; `str` and `print` show the table."""
        return f"ExponentStats({len(self.names)} leaves)"


@dataclasses.dataclass(frozen=True)
class ExponentView(Result):
    """A table of exponent histograms at one loss scale; made by `ExponentStats.view`."""

    stats: ExponentStats
    scale: float
    formats: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers of each leaf: counts, range, norm, shares, best scale."""
        stats, scale = self.stats, self.scale
        columns = {
            "name": stats.names,
            "dtype": stats.dtypes,
            "size": stats.sizes.tolist(),
            "zeros": stats.zeros.tolist(),
            "infs": stats.infs.tolist(),
            "nans": stats.nans.tolist(),
            "range": stats.ranges(),
            "norm": stats.norms.tolist(),
            "flushed": self._by_format(stats.flushed),
            "overflowing": self._by_format(stats.overflowing),
            "best_scale": stats.best_scale(),
            "counts": stats.histogram()[:, BELOW:INF].tolist(),
        }
        rows = zip(*columns.values(), strict=True)
        leaves = [dict(zip(columns, row, strict=True)) for row in rows]
        return {"scale": scale, "sample": stats.sample, "leaves": leaves}

    def _by_format(
        self, share: Callable[[str, float], np.ndarray]
    ) -> list[dict[str, float]]:
        """Returns the share of each leaf in each format."""
        found = {name: share(name, self.scale).tolist() for name in self.formats}
        return [
            {name: shares[i] for name, shares in found.items()}
            for i in range(len(self.stats.names))
        ]

    def tables(self) -> Sequence[Table]:
        """Returns one row for each leaf, with its histogram as bars."""
        stats, leaves = self.stats, self.to_dict()["leaves"]
        if not leaves:
            return [Table.text("No floating leaf.")]
        found = [x for x in stats.ranges() if x is not None] or [(0, 0)]
        low, high = min(x for x, _ in found), max(x for _, x in found)
        head = ["leaf", "dtype", "values", f"2^{low} … 2^{high}", "range", "zero"]
        head += [f"→0 {name}" for name in self.formats]
        head += ["inf, nan", "best scale"]
        title = "Exponents"
        if self.scale != 1:
            title += f" at a loss scale of {_power(self.scale)}"
        if stats.sample > 1:
            title += f" (one of {stats.sample} rows of large leaves)"
        text = "→0: the share of the numbers that the format rounds to zero."
        for name in self.formats:
            most = max(leaf["overflowing"][name] for leaf in leaves)
            if most > 0:
                text += f" Up to {percent(most)} of a leaf overflows in {name}."
        rows = [_row(leaf, low - LOWEST + 1, high - LOWEST + 2) for leaf in leaves]
        right = frozenset({2, *range(5, len(head))})
        return [Table(head, rows, title, right), Table.text(text)]


def _row(leaf: dict[str, Any], start: int, stop: int) -> list[str]:
    size, infs, nans = leaf["size"], leaf["infs"], leaf["nans"]
    numbers, best = size - leaf["zeros"] - infs - nans, leaf["best_scale"]
    return [
        leaf["name"] or "(leaf)",
        leaf["dtype"],
        amount(size),
        _sparkline(leaf["counts"][start:stop]),
        "2^{} … 2^{}".format(*leaf["range"]) if leaf["range"] else "–",
        percent(leaf["zeros"] / size) if size else "–",
        *(percent(x) if numbers else "–" for x in leaf["flushed"].values()),
        f"{infs}, {nans}" if infs + nans else "–",
        "–" if math.isnan(best) else _power(best),
    ]


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def _sparkline(counts: Sequence[int]) -> str:
    """Returns bars whose height is the square root of the counts: tails stay visible."""
    top, steps = max(counts, default=0), len(_BARS) - 1
    return "".join(
        _BARS[math.ceil(steps * math.sqrt(x / top)) if x else 0] for x in counts
    )


def _share(counts: np.ndarray, position: float, *, upwards: bool) -> np.ndarray:
    """Returns the share of the numbers above or below `2**position`, by leaf."""
    numbers = counts[:, BELOW:INF]
    below = np.array(_parts_below(position, upwards))
    shares = numbers @ (1 - below if upwards else below)
    return shares / np.maximum(numbers.sum(-1), 1)


@functools.lru_cache(maxsize=256)
def _parts_below(position: float, upwards: bool) -> tuple[float, ...]:
    """Returns which part of each bin is below `2**position`.

    The first and the last bin are open: what is not known of them counts neither as too
    small nor, `upwards`, as too large.
    """
    parts = [1.0 if position >= LOWEST else float(upwards)]
    for exponent in range(LOWEST, HIGHEST + 1):  # evenly spread within a bin
        within = 2.0 ** min(max(position - exponent, 0.0), 1.0) - 1
        parts.append(within)
    return (*parts, 1.0 if upwards and position > HIGHEST + 1 else 0.0)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(
            f"`dtype` must be one of {', '.join(FORMATS)}, but {name!r} was given."
        )
    return FORMATS[name]


def exponent_stats(
    tree: PyTree, *, axis_name: AxisName | None = None, sample: int = 1
) -> ExponentStats:
    """Counts the exponents of the floating leaves of a pytree, inside or outside jit.

    One histogram for each leaf answers, later and on the host: how many values are zero,
    infinite or nan, between which powers of two the others lie, which share of them any
    format would round to zero or overflow at any loss scale, and which scale is best. It
    takes one pass over the values, and no callback. Leaves may be of 8 to 64 bits.

    Args:
        tree: Any pytree, for example gradients. Leaves that are not floating are left out.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which the counts
            are added. Not needed for sharded arrays under jit.
        sample: Counts one of so many rows of large leaves, along their longest axis.

    Returns:
        The histograms. Print them for a table, or pass them to `plot_exponents`.

    Examples:
        >>> stats = exponent_stats({"w": jnp.array([0.5, 1e-6, 0.0, jnp.inf])})
        >>> stats.ranges(), stats.zeros, stats.infs
        ([(-20, -1)], array([1]), array([1]))
        >>> stats.flushed("e4m3"), stats.flushed("e4m3", scale=2.0**15)
        (array([0.5]), array([0.]))
    """
    check_axis_name(axis_name)
    sample = as_count(sample, "sample", at_least=1)
    leaves = named_leaves(without_variables(tree))
    found = [(name, x) for name, x in leaves if _has_exponents(x)]
    arrays = [_sampled(lax.stop_gradient(jnp.asarray(x)), sample) for _, x in found]
    counts, squares = count(arrays)
    if axis_name is not None:
        counts, squares = lax.psum((counts, squares), axis_name)
        counts = carried(counts)
    return ExponentStats(
        counts,
        squares,
        names=tuple(str(name) for name, _ in found),
        dtypes=tuple(short_name(np.dtype(dtype_of(x))) for _, x in found),
        sample=sample,
    )


def _has_exponents(leaf: Any) -> bool:
    dtype = dtype_of(leaf)
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)


def _sampled(x: Array, sample: int) -> Array:
    """Returns one of so many rows of a large array along its longest axis.

    Of each block of `sample` rows it is the next one: a fixed one may be the same channel
    of every head. In `sample` such blocks that is every `sample + 1`-th row, and a slice
    that leaves sharded arrays where they are.
    """
    if sample == 1 or x.size < SAMPLED:
        return x
    x = jnp.moveaxis(x, int(np.argmax(x.shape)), 0)
    rows, block = len(x), sample * sample
    whole = rows - rows % block
    blocks = x[:whole].reshape(-1, block, *x.shape[1:])[:, :: sample + 1]
    rest = x[whole::sample]
    return jnp.concatenate([blocks.reshape(-1), rest.reshape(-1)])


# --- Pictures -------------------------------------------------------------------------


def plot_exponents(
    stats: ExponentStats,
    *,
    scale: float = 1.0,
    formats: Sequence[str] = SHOWN,
    title: str = "",
    ax: Any = None,
) -> Any:
    """Draws the histograms, and above them what each format can represent.

    A bar spans the normal numbers of a format and its thin end the subnormal ones. At a
    loss scale the bars are where the unscaled values must be: what is left of all of a
    bar is rounded to zero, and what is right of it overflows.

    Args:
        stats: The histograms. Up to ten are drawn as such, more as a heat map.
        scale: The loss scale.
        formats: The formats to compare with.
        title: A line above the picture.
        ax: The `matplotlib.axes.Axes` to draw the histograms in, with the formats right
            above it; by default those of a new figure.

    Returns:
        A `matplotlib.figure.Figure`: save it with `.savefig(path)`.

    Raises:
        ImportError: If matplotlib is not installed.

    Examples:
        >>> import jax.numpy as jnp
        >>> figure = plot_exponents(exponent_stats({"w": jnp.ones(3)}), scale=2.0**10)
        >>> [label.get_text() for label in figure.axes[1].get_yticklabels()]
        ['w']
    """
    figures = extra("matplotlib.figure", "plot_exponents")
    counts = stats.histogram()[:, BELOW:INF]
    low, high = _span(stats, scale, formats)
    rows = max(1, len(stats.names))
    if ax is None:
        ratio = [max(1.0, 0.25 * len(formats)), min(0.45 * rows, 2 + 0.16 * rows)]
        height = min(1.2 + 0.25 * len(formats) + ratio[1], 16)
        figure = figures.Figure(figsize=(8, height), layout="constrained")
        top, main = figure.subplots(2, 1, sharex=True, height_ratios=ratio)
    else:
        figure, main = ax.figure, ax
        top = ax.inset_axes((0, 1.03, 1, 0.25), sharex=ax)
    _draw_formats(top, scale, formats)
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    if len(stats.names) <= _RIDGES:
        _draw_ridges(main, shares, stats.names)
    else:
        _draw_heat(main, shares, stats.names)
    main.set(xlim=(low, high + 1), xlabel="exponent: values from 2^e to 2^(e+1)")
    if scale != 1:
        title = f"{title} at a loss scale of {_power(scale)}".strip()
    top.set_title(title, loc="left")
    return figure


def _span(
    stats: ExponentStats, scale: float, formats: Sequence[str]
) -> tuple[int, int]:
    found = [x for x in stats.ranges() if x is not None]
    shift = math.log2(scale)
    low = min([x[0] for x in found], default=-20)
    high = max([x[1] for x in found], default=4)
    # So much of the formats that their ends can be seen, where that is near.
    ends = [math.log2(FORMATS[name].smallest) - shift for name in formats]
    tops = [math.log2(FORMATS[name].max) - shift for name in formats]
    low = min([low, *(math.floor(x) for x in ends if x > -60)]) - 2
    high = max([high, *(math.ceil(x) for x in tops if x < 34)]) + 2
    return max(low, LOWEST - 1), high


def _draw_formats(ax: Any, scale: float, formats: Sequence[str]) -> None:
    shift = math.log2(scale)
    for row, name in enumerate(formats):
        form = FORMATS[name]
        smallest, tiny, most = (
            math.log2(x) - shift for x in (form.smallest, form.tiny, form.max)
        )
        color = f"C{row}"
        ax.barh(
            row, tiny - smallest, left=smallest, height=0.25, color=color, alpha=0.5
        )
        ax.barh(row, most - tiny, left=tiny, height=0.6, color=color)
    ax.set_yticks(range(len(formats)), formats)
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelbottom=False)
    ax.grid(axis="x", alpha=0.3)


def _draw_ridges(ax: Any, shares: np.ndarray, names: Sequence[str]) -> None:
    edges = np.arange(LOWEST - 1, LOWEST + shares.shape[1])
    for row, share in enumerate(shares):
        heights = np.sqrt(share / max(share.max(), 1e-30)) * 0.9
        ax.stairs(
            heights + -row, edges, baseline=-row, fill=True, color="C0", alpha=0.6
        )
    ax.set_yticks([-row for row in range(len(names))], names)
    ax.set_ylim(-len(names) + 0.9, 1)
    ax.grid(axis="x", alpha=0.3)


def _draw_heat(ax: Any, shares: np.ndarray, names: Sequence[str]) -> None:
    edges = np.arange(LOWEST - 1, LOWEST + shares.shape[1])
    masked = np.ma.masked_equal(np.sqrt(shares), 0)
    rows = np.arange(len(names) + 1) - 0.5
    ax.pcolormesh(edges, rows, masked, cmap="viridis")
    ax.invert_yaxis()
    every = -(-len(names) // 60)
    ax.set_yticks(range(0, len(names), every), names[::every], fontsize=6)
