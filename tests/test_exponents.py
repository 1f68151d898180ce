"""Histograms of exponents agree with NumPy, under every transformation and on devices."""

import functools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mpx.inspect import ExponentStats, _exponents, exponent_stats, plot_exponents
from mpx.inspect._exponents import BINS, bin_of, carried, count_by_comparing

RNG = np.random.default_rng(0)
KINDS = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
}
SPECIALS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.0**-63, 2.0**-64, 2.0**31]
SPECIALS += [2.0**32, 1e-45, 2.0**-126, 2.0**-127, 3e38, 65504.0, 2.0**-24, 448.0]


def values(shape, kind="f32", spread=8.0):
    """Numbers of many magnitudes, with zeros, infinities, nans and subnormals."""
    size = math.prod(shape)
    x = RNG.normal(size=size) * 2.0 ** RNG.normal(size=size, scale=spread)
    special = RNG.random(size) < 0.1
    x[special] = RNG.choice(SPECIALS, size=special.sum())
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(np.float32).astype(KINDS[kind]).reshape(shape)


def expected(x):
    """The histogram by `np.frexp` in f64, which holds all these numbers as normal ones."""
    x = np.asarray(x).astype(np.float64).ravel()
    counts = np.zeros(BINS, np.int64)
    counts[0], counts[-2], counts[-1] = (
        np.sum(x == 0), np.sum(np.isinf(x)), np.sum(np.isnan(x)),
    )  # fmt: skip
    exponents = np.frexp(x[np.isfinite(x) & (x != 0)])[1] - 1
    np.add.at(counts, np.clip(exponents, -64, 32) + 65, 1)
    return counts


TREE = {
    "odd": values((33, 7)),
    "empty": values((0, 5)),
    "scalar": values(()),
    "long": values((3, 257, 51)),
    "twins": [values((11,)), values((11,)), values((11,), "bf16")],
    **{kind: values((19, 5), kind) for kind in KINDS},
    "count": np.arange(3),
    "text": "not an array",
}


def arrays(tree):
    is_array = lambda x: isinstance(x, np.ndarray)  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, tree)


def check(stats, tree):
    leaves = [
        x
        for x in jax.tree.leaves(tree)
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert len(stats.names) == len(leaves)
    np.testing.assert_array_equal(stats.histogram(), [expected(x) for x in leaves])


def test_counts_agree_with_numpy():
    tree = arrays(TREE)
    stats = exponent_stats(tree)
    check(stats, TREE)
    assert stats.names[:2] == ("bf16", "e4m3")
    assert "twins/1" in stats.names
    names = dict(zip(stats.names, stats.dtypes, strict=True))
    assert (names["e4m3"], names["f16"], names["odd"]) == ("e4m3", "f16", "f32")


def test_counts_inside_jit_agree_with_numpy():
    tree = arrays({k: v for k, v in TREE.items() if k != "text"})
    stats = jax.jit(exponent_stats)(tree)
    check(stats, tree)
    text = jax.jit(exponent_stats).lower(tree).as_text()
    assert "callback" not in text


def test_f64_leaves_are_counted():
    with jax.enable_x64(True):
        x = jnp.asarray([1e-300, 0.0, 1e300, 1.5, np.nan, -np.inf, 5e-324])
        assert x.dtype == np.float64
        np.testing.assert_array_equal(exponent_stats(x).histogram()[0], expected(x))


def test_a_tree_without_floating_leaves_has_no_histograms():
    stats = exponent_stats({"n": jnp.arange(3), "f": print, "none": None})
    assert stats.names == ()
    assert str(stats) == "No floating leaf."
    assert bool(stats.all_finite())


def test_finite_flags_agree_with_the_counts():
    tree = {"a": jnp.ones(3), "b": jnp.array([1.0, jnp.nan]), "c": jnp.array(jnp.inf)}
    stats = exponent_stats(tree)
    assert not stats.all_finite()
    assert exponent_stats(jnp.zeros(3)).all_finite()
    assert (stats.nans.tolist(), stats.infs.tolist()) == ([0, 1, 0], [0, 0, 1])


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [(), (0, 64), (33,), (7, 96), (3, 5, 256), (2, 640)])
def test_accelerators_count_as_numpy_does(shape):
    x = values(shape)
    count = jax.jit(functools.partial(count_by_comparing, size=BINS))
    assert count(bin_of(jnp.asarray(x))).tolist() == expected(x).tolist()
    assert count(jnp.full((4, 128), 3)).tolist()[3] == 512


# --- Transformations ------------------------------------------------------------------


def test_layers_of_a_scan_can_be_stacked_and_carried():
    layers = jnp.asarray(values((5, 6, 7)))
    start = exponent_stats(layers[0])
    zero = jax.tree.map(jnp.zeros_like, start)

    def body(carry, x):
        stats = exponent_stats(x)
        return carry + stats, stats

    total, stacked = jax.jit(lambda: lax.scan(body, zero, layers))()
    assert stacked.counts.shape == (5, 1, BINS, 2)
    check(total, layers)
    check(stacked, layers)  # the host merges leading axes


def test_vmap_counts_each_row_apart():
    rows = jnp.asarray(values((4, 9, 5)))
    stats = jax.vmap(exponent_stats)(rows)
    for i, row in enumerate(rows):
        check(jax.tree.map(lambda x, i=i: x[i], stats), row)
    check(jax.vmap(functools.partial(exponent_stats, axis_name="i"), axis_name="i",
                   out_axes=None)(rows), rows)  # fmt: skip


def test_statistics_have_no_gradient():
    def loss(w):
        return jnp.sum(w * w), exponent_stats(w)

    grads, stats = jax.grad(loss, has_aux=True)(jnp.ones(3))
    assert grads.tolist() == [2, 2, 2]
    assert stats.sizes.tolist() == [3]


def collectives(text):
    kinds = ("all-reduce", "all-gather", "collective-permute", "all-to-all")
    found = re.findall(rf"= .*? ({'|'.join(kinds)})(?:-start)?\(", text)
    return {kind: found.count(kind) for kind in kinds if kind in found}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y"), P()])
def test_sharded_leaves_are_counted_where_they_are(kind, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    x = values((16, 6, 5))
    tree = jax.device_put([jnp.asarray(x), jnp.asarray(-x)], NamedSharding(mesh, spec))
    compiled = jax.jit(exponent_stats).lower(tree).compile()
    stats = compiled(tree)
    check(stats, [x, x])
    found = collectives(compiled.as_text())
    assert set(found) <= {"all-reduce"}
    # Counts and squares; XLA adds over one axis of the mesh after the other.
    axes = [name for name in spec if name is not None]
    assert found.get("all-reduce", 0) <= 2 * len(axes)


@pytest.mark.parametrize("spec", [P("x"), P(None, "y"), P("x", "y")])
@pytest.mark.parametrize("width", [2048, 256, 30])
def test_accelerators_count_shards_where_they_are(spec, width):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    x = jax.device_put(values((16, width)), NamedSharding(mesh, spec))

    def count(x):
        return count_by_comparing(bin_of(x), size=BINS)

    with jax.set_mesh(mesh):
        compiled = jax.jit(count, out_shardings=P()).lower(x).compile()
    assert compiled(x).tolist() == expected(x).tolist()
    assert set(collectives(compiled.as_text())) == {"all-reduce"}


def test_counts_of_devices_are_added_over_an_axis_name():
    mesh = jax.make_mesh((8,), ("d",))
    x = jnp.asarray(values((16, 37)))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P())
    def count(x):
        return exponent_stats(x, axis_name="d")

    x = jax.device_put(x, NamedSharding(mesh, P("d")))
    compiled = jax.jit(count).lower(x).compile()
    check(compiled(x), x)
    assert set(collectives(compiled.as_text())) == {"all-reduce"}


# --- Counts of more than 31 bits ------------------------------------------------------


def as_integers(pairs):
    """Returns pairs (low, high) as integers of 64 bits."""
    pairs = np.asarray(pairs).astype(np.int64)
    return (pairs[..., 1] << 16) + pairs[..., 0]


def test_large_counts_are_exact():
    big = jnp.array([0, 1, 65535, 65536, 2**31 - 1], jnp.int32)
    pairs = jnp.stack([big & 0xFFFF, big >> 16], axis=-1)
    many = carried(jnp.sum(jnp.broadcast_to(pairs, (3000, *pairs.shape)), 0))
    assert as_integers(many).tolist() == [3000 * int(x) for x in big]
    assert as_integers(carried(pairs + pairs)).tolist() == [2 * int(x) for x in big]


@pytest.mark.some(1)
@pytest.mark.parametrize("shape", [(2000,), (3, 700), (700, 2, 1)])
def test_leaves_beyond_int32_are_counted_in_parts(monkeypatch, shape):
    monkeypatch.setattr(_exponents, "LIMIT", 500)
    x = values(shape)
    # The jitted function would be taken from its cache, made with the true limit.
    count = _exponents._counts(jnp.asarray(x))
    assert as_integers(count).tolist() == expected(x).tolist()


def test_a_leaf_of_more_than_2_to_the_32_values_is_traced_in_parts():
    huge = jax.ShapeDtypeStruct((2**17, 2**16), jnp.bfloat16)
    text = str(jax.make_jaxpr(exponent_stats)(huge))
    assert f"i32[{4 * BINS}]" in text  # four parts, each with its bins


def test_statistics_of_different_trees_are_not_merged():
    one, other = exponent_stats({"a": jnp.ones(2)}), exponent_stats({"b": jnp.ones(2)})
    with pytest.raises(ValueError, match="only one of them has `a`, `b`"):
        one + other
    with pytest.raises(ValueError, match="only one of them has `c`"):
        one + exponent_stats({"a": jnp.ones(2), "c": jnp.ones(2)})
    assert (one + one + one).sizes.tolist() == [6]


# --- What follows from a histogram ----------------------------------------------------


@pytest.mark.parametrize("name", ["f16", "bf16", "e5m2", "e4m3"])
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**24])
def test_the_flushed_share_is_that_of_a_cast(name, scale):
    x = (RNG.normal(size=3000) * 2.0 ** RNG.normal(size=3000, scale=12)).astype("f4")
    x = x[np.abs(x) > 2.0**-60]
    stats = exponent_stats(jnp.asarray(x))
    with np.errstate(over="ignore"):
        cast = (x * np.float32(scale)).astype(KINDS[name]).astype(np.float32)
    assert stats.flushed(name, scale)[0] == np.mean(cast == 0)
    limit = float(ml_dtypes.finfo(KINDS[name]).max)
    over = np.mean(np.abs(x) * scale > limit)
    assert stats.overflowing(name, scale)[0] == pytest.approx(over, abs=0.005)


def test_the_best_scale_overflows_nothing_and_twice_that_may():
    x = jnp.asarray(RNG.normal(size=1000) * 1e-4, jnp.float32)
    (best,) = exponent_stats(x).best_scale("f16")
    assert jnp.all(jnp.isfinite((x * best).astype(jnp.float16)))
    assert not jnp.all(jnp.isfinite((x * best * 4).astype(jnp.float16)))
    assert math.isnan(exponent_stats(jnp.zeros(3)).best_scale()[0])


def test_ranges_and_norms():
    stats = exponent_stats([jnp.array([3.0, 0.25]), jnp.zeros(2), jnp.float32(2e-20)])
    assert stats.ranges() == [(-2, 1), None, (-64, -64)]
    # The square of the last one is below the numbers of f32.
    np.testing.assert_allclose(stats.norms, [np.hypot(3, 0.25), 0, 0], rtol=1e-6)


def test_the_table_shows_what_is_lost():
    tree = {"w": jnp.array([2.0**-30, 1.0]), "b": jnp.array([jnp.inf, jnp.nan, 0.0])}
    stats = exponent_stats(tree)
    text = str(stats)
    assert "2^-30 … 2^0" in text
    row = next(line for line in text.splitlines() if line.startswith("w "))
    assert row.split()[:3] == ["w", "f32", "2"]
    assert row.count("50.0 %") == 3  # f16, e5m2 and e4m3, not bf16
    assert "1, 1" in text
    scaled = str(stats.tables(scale=2.0**10)[0])
    assert "at a loss scale of 2^10" in scaled
    row = next(line for line in scaled.splitlines() if line.startswith("w "))
    assert row.count("50.0 %") == 2  # f16 holds 2^-20
    assert row.endswith("2^14")
    assert json.loads(stats.to_json())["names"] == ["b", "w"]
    assert "<pre" in stats._repr_html_()
    assert isinstance(stats, ExponentStats)


def test_unknown_format_is_reported(untyped):
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        exponent_stats(jnp.ones(1)).flushed("f8")


# --- Pictures -------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize("count", [0, 1, 12])
@pytest.mark.parametrize("scale", [1.0, 2.0**15])
def test_histograms_are_drawn_below_the_formats(count, scale):
    tree = [jnp.asarray(values((50,))) for _ in range(count)]
    figure = plot_exponents(exponent_stats(tree), scale=scale, title="Gradients")
    top, main = figure.axes
    names = [label.get_text() for label in top.get_yticklabels()]
    assert names == ["f16", "bf16", "e5m2", "e4m3"]
    bars = [bar for bar in top.patches if bar.get_height() == 0.6]
    ends = bars[0].get_x(), bars[0].get_x() + bars[0].get_width()
    shift = math.log2(scale)
    assert ends == pytest.approx((-14 - shift, math.log2(65504) - shift))
    assert len(main.collections) + len(main.patches) == (0 if not count else 1)
    assert ("loss scale of 2^15" in top.get_title(loc="left")) is (scale != 1)
    figure.canvas.draw()


def test_histograms_are_drawn_into_axes_that_exist():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    left, right = figure.subplots(1, 2)
    stats = exponent_stats([jnp.asarray(values((50,)))])
    assert plot_exponents(stats, ax=right) is figure
    assert right.patches
    assert not left.patches
    (top,) = right.child_axes
    names = [label.get_text() for label in top.get_yticklabels()]
    assert names == ["f16", "bf16", "e5m2", "e4m3"]
    figure.canvas.draw()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r'needs matplotlib: `pip install "mpx-jax\[in'
    ):
        plot_exponents(exponent_stats(jnp.ones(2)))
