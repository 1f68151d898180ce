"""Pictures of exponent histograms."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpx._jax._formats import FORMATS
from mpx.inspect._bins import BELOW, INF, LOWEST
from mpx.inspect._exponent_view import SHOWN
from mpx.inspect._exponents import ExponentStats
from mpx.inspect._extras import extra

RIDGES = 10
"""Up to so many leaves are drawn as histograms; more as rows of a heat map."""


def plot_exponents(
    stats: ExponentStats,
    *,
    scale: float = 1.0,
    formats: Sequence[str] = SHOWN,
    title: str = "",
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

    Returns:
        A `matplotlib.figure.Figure`: save it with `.savefig(path)`.

    Raises:
        ImportError: If matplotlib is not installed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from mpx.inspect import exponent_stats
        >>> figure = plot_exponents(exponent_stats({"w": jnp.ones(3)}), scale=2.0**10)
        >>> [label.get_text() for label in figure.axes[1].get_yticklabels()]
        ['w']
    """
    figures = extra("matplotlib.figure", "plot_exponents")
    counts = stats.histogram()[:, BELOW:INF]
    low, high = _span(stats, scale, formats)
    rows = max(1, len(stats.names))
    height = 1.2 + 0.25 * len(formats) + min(0.45 * rows, 2 + 0.16 * rows)
    figure = figures.Figure(figsize=(8, min(height, 16)), layout="constrained")
    ratio = [max(1.0, 0.25 * len(formats)), min(0.45 * rows, 2 + 0.16 * rows)]
    top, main = figure.subplots(2, 1, sharex=True, height_ratios=ratio)
    _draw_formats(top, scale, formats)
    shares = counts / np.maximum(counts.sum(-1, keepdims=True), 1)
    if len(stats.names) <= RIDGES:
        _draw_ridges(main, shares, stats.names)
    else:
        _draw_heat(main, shares, stats.names)
    main.set(xlim=(low, high + 1), xlabel="exponent: values from 2^e to 2^(e+1)")
    if scale != 1:
        title = f"{title} at a loss scale of 2^{math.log2(scale):g}".strip()
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
