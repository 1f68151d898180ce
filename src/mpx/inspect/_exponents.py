"""Statistics of exponents: a histogram for each leaf, its table and its picture.

A value `x` with `2**e <= |x| < 2**(e+1)` has the exponent `e`. There is one bin for each
exponent from `LOWEST` to `HIGHEST`, and one each for zeros, for smaller and larger values,
for infinities and for nans. A count is two int32 numbers, `high * 2**16 + low`: a leaf, or
the sum over many steps, may have more than 2³¹ values.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, PyTree

from mpx._jax._arguments import check_axis_name, check_choice
from mpx._jax._formats import FORMATS, Format, short_name
from mpx._jax._nnx import without_variables
from mpx._jax._sharding import in_auto_axes
from mpx._jax._tree import AxisName, dtype_of, named_leaves
from mpx.inspect._dtypes import is_float
from mpx.inspect._result import Result, Table, amount, percent

LOWEST, HIGHEST = -63, 31
BINS = HIGHEST - LOWEST + 6
ZERO, BELOW, FIRST = 0, 1, 2
ABOVE, INF, NAN = BINS - 3, BINS - 2, BINS - 1
SHOWN = ("f16", "bf16", "e5m2", "e4m3")
_BARS = " ▁▂▃▄▅▆▇█"
_RIDGES = 10  # up to this many leaves are drawn as histograms, more as a heat map
LIMIT = 2**31  # the number of values whose count may not fit into one int32
# Leaves of up to this many values are stacked with others of their type: a pass for each
# costs more than its values.
SMALL = 2**15

# --- Counting, where the arrays are ---------------------------------------------------


def bin_of(x: Array) -> Array:
    """Returns the bin of each value, int32. Works on bits: nothing is flushed to zero."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    elif x.dtype.itemsize == 8:
        bits = lax.bitcast_convert_type(x, jnp.uint64)
    else:  # f32 holds every number of the narrower formats, as a normal one
        bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    mantissa, bias = (52, 1023) if x.dtype.itemsize == 8 else (23, 127)
    magnitude = bits << 1 >> 1
    field = (magnitude >> mantissa).astype(jnp.int32)
    index = jnp.clip(field - (bias + LOWEST) + FIRST, BELOW, ABOVE)
    index = jnp.where(magnitude == 0, ZERO, index)
    infinity = np.asarray((2 * bias + 1) << mantissa, bits.dtype)
    special = jnp.where(magnitude == infinity, INF, NAN)
    return jnp.where(magnitude >= infinity, special, index)


def carried(pairs: Array) -> Array:
    """Returns pairs whose low numbers have less than 16 bits again."""
    low, high = pairs[..., 0], pairs[..., 1]
    low, carry = low & 0xFFFF, low >> 16
    return jnp.stack([low, high + carry], axis=-1)


def count(leaves: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the counts of each leaf, int32[leaves, BINS, 2], and its sum of squares, f32."""
    groups: dict[Hashable, list[int]] = {}
    for index, x in enumerate(leaves):
        kind = (x.shape, x.dtype, jax.typeof(x).sharding)
        groups.setdefault(kind if x.size <= SMALL else index, []).append(index)
    if not groups:
        return jnp.zeros((0, BINS, 2), jnp.int32), jnp.zeros(0, jnp.float32)
    parts = []
    for indices in groups.values():
        if len(indices) > 1:
            parts.append(jax.vmap(_count_leaf)(jnp.stack([leaves[i] for i in indices])))
        else:
            parts.append([x[None] for x in _count_leaf(leaves[indices[0]])])
    counts, squares = map(jnp.concatenate, zip(*parts, strict=True))
    order = np.argsort([i for group in groups.values() for i in group])
    return counts[order], squares[order]


# Under jit, so that leaves of equal types are traced and lowered once.
@jax.jit
def _count_leaf(x: Array) -> tuple[Array, Array]:
    """Counts one leaf where it is: counts of shards are added over devices."""
    wide = x.astype(jnp.float32)
    # JAX cannot type a scatter of explicitly sharded arrays.
    whole = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec())
    return in_auto_axes(_counts, whole)(x), jnp.sum(wide * wide)


def _counts(x: Array) -> Array:
    """Counts as pairs; in parts if a count may not fit into int32."""
    bins, parts = bin_of(x), max(1, -(-x.size // LIMIT))
    if parts > 1:  # each with its own bins, by the position along the longest axis
        axis = int(np.argmax(x.shape))
        length = -(-x.shape[axis] // parts)
        bins += BINS * (lax.broadcasted_iota(jnp.int32, x.shape, axis) // length)
    size = BINS * parts
    counts = lax.platform_dependent(
        bins,
        # On a CPU 12 ns a value, instead of 280 ns.
        cpu=lambda bins: (
            jnp.zeros(size, jnp.int32).at[bins].add(1, mode="promise_in_bounds")
        ),
        default=functools.partial(count_by_comparing, size=size),
    )
    counts = counts.reshape(parts, BINS)
    return carried(jnp.sum(jnp.stack([counts & 0xFFFF, counts >> 16], axis=-1), axis=0))


def count_by_comparing(bins: Array, *, size: int) -> Array:
    """Returns how many values are in each bin, without a scatter, in one pass."""
    every = lax.iota(jnp.int32, size).reshape(*[1] * bins.ndim, size)
    is_in = lax.expand_dims(bins, (bins.ndim,)) == every
    return jnp.sum(is_in, tuple(range(bins.ndim)), jnp.int32)


# --- Statistics -----------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("counts", "squares"),
    meta_fields=("names", "dtypes"),
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class ExponentStats(Result):
    """One histogram of exponents for each floating leaf of a pytree.

    Made by `exponent_stats`. It is a pytree: return it from jit, carry it through a scan,
    stack it over layers. `a + b` counts the values of both. All else is computed on the
    host, once you ask for it, over all leading axes that `scan` and `vmap` have added.

    Attributes:
        counts: How many values are in each bin, int32[*batch, leaves, 100, 2]: pairs (low,
            high) for `high * 2**16 + low`. `histogram()` has them as integers.
        squares: The sum of the squares of each leaf, f32[*batch, leaves].
        names: The path of each leaf.
        dtypes: The dtype of each leaf, such as "bf16".
    """

    # JAX puts other objects in their place when it rebuilds trees.
    counts: PyTree
    squares: PyTree
    names: tuple[str, ...]
    dtypes: tuple[str, ...]

    def __add__(self, other: "ExponentStats") -> "ExponentStats":
        """Returns the statistics of the values of both; their leaves must be the same."""
        if not isinstance(other, ExponentStats):
            return NotImplemented
        if self.names != other.names:
            different = sorted({*self.names} ^ {*other.names})
            raise ValueError(
                "Statistics of different trees cannot be merged: only one of them has "
                f"{', '.join(f'`{name}`' for name in different[:3])}."
            )
        counts, squares = self.counts + other.counts, self.squares + other.squares
        return dataclasses.replace(self, counts=carried(counts), squares=squares)

    def all_finite(self) -> Bool[Array, "*batch"]:
        """Returns whether no value is infinite or nan, without another pass over them."""
        return jnp.all(self.counts[..., INF:, :] == 0, axis=(-3, -2, -1))

    @functools.cached_property
    def _host(self) -> np.ndarray:
        pairs = np.asarray(jax.device_get(self.counts)).astype(np.int64)
        counts = (pairs[..., 1] << 16) + pairs[..., 0]
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
    def norms(self) -> np.ndarray:
        """The Euclidean norm of each leaf, by squares in f32: 0 below 1e-19, inf from 1e19."""
        squares = np.asarray(jax.device_get(self.squares), np.float64)
        return np.sqrt(squares.sum(tuple(range(squares.ndim - 1))))

    def ranges(self) -> list[tuple[int, int] | None]:
        """Returns the smallest and the largest exponent of each leaf, from -64 to 32.

        `None` stands for a leaf without a finite number other than zero.
        """
        found = [np.flatnonzero(row[BELOW:INF]) for row in self._host]
        low = LOWEST - 1
        return [(int(x[0]) + low, int(x[-1]) + low) if len(x) else None for x in found]

    def flushed(self, dtype: str, scale: float = 1.0) -> np.ndarray:
        """Returns the share of the values that a format rounds to zero, by leaf.

        The share is one of the finite values other than zero. It is exact, but for ties,
        for a power of two as `scale`. Values below 2^-63 count if all of them are flushed.

        Args:
            dtype: The format: "f16", "bf16", "e5m2", "e4m3".
            scale: The loss scale, by which the values are multiplied first.
        """
        return _share(self._host, _format(dtype).smallest / 2 / scale, upwards=False)

    def overflowing(self, dtype: str, scale: float = 1.0) -> np.ndarray:
        """Returns about which share lies beyond the largest number; see `flushed`."""
        return _share(self._host, _format(dtype).max / scale, upwards=True)

    def best_scale(self, dtype: str = "f16") -> list[float]:
        """Returns the largest power of two by which each leaf can be scaled, by leaf.

        It leaves a factor of two to the overflow. It is nan for a leaf of zeros.
        """
        top = math.floor(math.log2(_format(dtype).max))
        return [2.0 ** (top - 1 - x[1]) if x else math.nan for x in self.ranges()]

    def to_dict(self) -> dict[str, list]:
        """Returns the names, dtypes, norms and histograms of the leaves as lists."""
        return {
            "names": list(self.names),
            "dtypes": list(self.dtypes),
            "norms": self.norms.tolist(),
            "counts": self._host.tolist(),
        }

    def tables(self, *, scale: float = 1.0) -> Sequence[Table]:
        """Returns one row for each leaf, with the shares at a loss scale."""
        if not self.names:
            return [Table.text("No floating leaf.")]
        ranges, best = self.ranges(), self.best_scale()
        flushed = [self.flushed(name, scale) for name in SHOWN]
        found = [x for x in ranges if x is not None] or [(0, 0)]
        low, high = min(x for x, _ in found), max(x for _, x in found)
        shown = self._host[:, low - LOWEST + FIRST : high - LOWEST + FIRST + 1]
        rows = []
        for i, size in enumerate(self.sizes.tolist()):
            infs, nans, ends = int(self.infs[i]), int(self.nans[i]), ranges[i]
            # Bars are as high as the square root of the counts: tails stay visible.
            heights = np.sqrt(shown[i] / max(1, shown[i].max())) * (len(_BARS) - 1)
            row = [self.names[i] or "(leaf)", self.dtypes[i], amount(size)]
            row += ["".join(_BARS[math.ceil(x)] for x in heights)]
            row += ["2^{} … 2^{}".format(*ends) if ends else "–"]
            row += [percent(self.zeros[i] / size) if size else "–"]
            row += [percent(x[i]) if ends else "–" for x in flushed]
            row += [f"{infs}, {nans}" if infs + nans else "–"]
            rows.append([*row, _power(best[i]) if ends else "–"])
        head = ["leaf", "dtype", "values", f"2^{low} … 2^{high}", "range", "zero"]
        head += [*(f"→0 {name}" for name in SHOWN), "inf, nan", "best scale"]
        text = "→0: the share of the numbers that the format rounds to zero."
        for name in SHOWN:
            most = self.overflowing(name, scale).max()
            if most > 0:
                text += f" Up to {percent(most)} of a leaf overflows in {name}."
        right = frozenset({2, *range(5, len(head))})
        return [Table(head, rows, "Exponents" + _at(scale), right), Table.text(text)]

    def __repr__(self) -> str:
        """Shows how many leaves there are; `str` and `print` show the table."""
        return f"ExponentStats({len(self.names)} leaves)"


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def _at(scale: float) -> str:
    return "" if scale == 1 else f" at a loss scale of {_power(scale)}"


def _share(counts: np.ndarray, threshold: float, *, upwards: bool) -> np.ndarray:
    """Returns the share of the numbers above or below a threshold, by leaf.

    Numbers are evenly spread within a bin; what is not known of the open ones is no loss.
    """
    numbers, position = counts[:, BELOW:INF], math.log2(threshold)
    exponents = np.arange(LOWEST, HIGHEST + 1)
    within = 2.0 ** np.clip(position - exponents, 0, 1) - 1
    last = upwards and position > HIGHEST + 1
    below = np.array([position >= LOWEST or upwards, *within, last], np.float64)
    shares = numbers @ (1 - below if upwards else below)
    return shares / np.maximum(numbers.sum(-1), 1)


def _format(name: str) -> Format:
    check_choice(name, "dtype", [*FORMATS])
    return FORMATS[name]


def exponent_stats(tree: PyTree, *, axis_name: AxisName | None = None) -> ExponentStats:
    """Counts the exponents of the floating leaves of a pytree, inside or outside jit.

    It takes one pass over the values, and no callback. Leaves may be of 8 to 64 bits.

    Args:
        tree: Any pytree, for example gradients. Leaves that are not floating are left out.
        axis_name: A `shard_map`, `pmap` or `vmap` axis (or several) over which the counts
            are added. Not needed for sharded arrays under jit.

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
    leaves = named_leaves(without_variables(tree))
    found = [(name, x) for name, x in leaves if dtype_of(x) is not None and is_float(x)]
    counts, squares = count([lax.stop_gradient(jnp.asarray(x)) for _, x in found])
    if axis_name is not None:
        counts, squares = lax.psum((counts, squares), axis_name)
        counts = carried(counts)
    return ExponentStats(
        counts,
        squares,
        names=tuple(str(name) for name, _ in found),
        dtypes=tuple(short_name(np.dtype(dtype_of(x))) for _, x in found),
    )


# --- Pictures -------------------------------------------------------------------------


def plot_exponents(
    stats: ExponentStats, *, scale: float = 1.0, title: str = "", ax: Any = None
) -> Any:
    """Draws the histograms, and above them what each format can represent.

    A bar spans the normal numbers of a format and its thin end the subnormal ones. At a
    loss scale the bars are where the unscaled values must be: what is left of all of a
    bar is rounded to zero, and what is right of it overflows.

    Args:
        stats: The histograms. Up to ten are drawn as such, more as a heat map.
        scale: The loss scale.
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'plot_exponents needs matplotlib: `pip install "mpx-jax[inspect]"`.'
        ) from error
    counts, rows = stats.histogram()[:, BELOW:INF], max(1, len(stats.names))
    if ax is None:
        ratio = [1.0, min(0.45 * rows, 2 + 0.16 * rows)]
        figure = Figure(figsize=(8, min(2.2 + ratio[1], 16)), layout="constrained")
        top, main = figure.subplots(2, 1, sharex=True, height_ratios=ratio)
    else:
        figure, main = ax.figure, ax
        top = ax.inset_axes((0, 1.03, 1, 0.25), sharex=ax)
    _draw_formats(top, scale)
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    draw = _draw_ridges if len(stats.names) <= _RIDGES else _draw_heat
    draw(main, np.sqrt(shares), stats.names)
    # The values, and the ends of formats that are near.
    ends = [x for name in SHOWN for x in (FORMATS[name].smallest, FORMATS[name].max)]
    shown = [x for x in np.log2(np.array(ends) / scale) if LOWEST < x < HIGHEST + 3]
    shown += [x for pair in stats.ranges() for x in pair or (-20, 4)] or [-20, 4]
    span = max(math.floor(min(shown)) - 2, LOWEST - 1), math.ceil(max(shown)) + 3
    main.set(xlim=span, xlabel="exponent: values from 2^e to 2^(e+1)")
    top.set_title((title + _at(scale)).strip(), loc="left")
    return figure


def _draw_formats(ax: Any, scale: float) -> None:
    for row, name in enumerate(SHOWN):
        form, color = FORMATS[name], f"C{row}"
        ends = form.smallest, form.tiny, form.max
        low, tiny, high = (math.log2(x / scale) for x in ends)
        ax.barh(row, tiny - low, left=low, height=0.25, color=color, alpha=0.5)
        ax.barh(row, high - tiny, left=tiny, height=0.6, color=color)
    ax.set_yticks(range(len(SHOWN)), SHOWN)
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelbottom=False)
    ax.grid(axis="x", alpha=0.3)


def _draw_ridges(ax: Any, heights: np.ndarray, names: Sequence[str]) -> None:
    edges = np.arange(LOWEST - 1, LOWEST + heights.shape[1])
    for row, each in enumerate(heights):
        each = 0.9 * each / max(each.max(), 1e-15)
        ax.stairs(each - row, edges, baseline=-row, fill=True, color="C0", alpha=0.6)
    ax.set_yticks([-row for row in range(len(names))], names)
    ax.set_ylim(-len(names) + 0.9, 1)
    ax.grid(axis="x", alpha=0.3)


def _draw_heat(ax: Any, heights: np.ndarray, names: Sequence[str]) -> None:
    edges = np.arange(LOWEST - 1, LOWEST + heights.shape[1])
    rows = np.arange(len(names) + 1) - 0.5
    ax.pcolormesh(edges, rows, np.ma.masked_equal(heights, 0), cmap="viridis")
    ax.invert_yaxis()
    every = -(-len(names) // 60)
    ax.set_yticks(range(0, len(names), every), names[::every], fontsize=6)
