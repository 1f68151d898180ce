"""The recipe `NVFP4`: 4-bit numbers, their scales and products beside NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.linalg import hadamard

import mpx
from fp8_cases import (
    BF16,
    as_f64,
    assert_scan_is_the_unrolled_loop,
    assert_training_ends_near_bf16,
    everywhere,
    explained,
    one_layer,
    one_layer_problem,
)
from models import normal
from mpx import fp8
from mpx._fp8 import _dot
from mpx._fp8._dot import from_blocks, rotated, to_blocks
from mpx._fp8._operands import Operand
from mpx._fp8._rounding import mpx_round, noise_of, to_e4m3
from mpx.recipes import NVFP4
from mpx.testing import assert_trees_equal
from test_fp8_int8 import uniform
from test_fp8_scales import plan_for, problem, run

FULL = NVFP4(emulate=True)
OPTIONS = {
    "full": FULL,
    "no rotation": NVFP4(emulate=True, hadamard=False),
    "nearest": NVFP4(emulate=True, stochastic=False),
    "1d": NVFP4(emulate=True, weight_blocks="1d"),
    "plain": NVFP4(emulate=True, hadamard=False, stochastic=False, weight_blocks="1d"),
}
E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = ml_dtypes.float4_e2m1fn
E2M1_NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


# --- NumPy's own computation ----------------------------------------------------------


def four_bits(x, noise=None):
    """The e2m1 numbers beside x, of which one is taken; beyond 6 there is none."""
    size = np.minimum(np.abs(x), 6.0)
    if noise is None:
        return size.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * np.sign(x)
    below = np.searchsorted(E2M1_NUMBERS, size, side="right") - 1
    above = np.minimum(below + 1, 7)
    gap = np.maximum(E2M1_NUMBERS[above] - E2M1_NUMBERS[below], 0.5)
    share = (size - E2M1_NUMBERS[below]) / gap
    # The higher of the two is taken if the noise is large.
    is_above = np.where(x < 0, noise < share, share + noise >= 1)
    return np.where(is_above, E2M1_NUMBERS[above], E2M1_NUMBERS[below]) * np.sign(x)


def quantized(x, tall=1, noise=None):
    """A matrix as NVFP4 has it: codes, scales of blocks, and the scale of all.

    Scales are rounded in f32 on the way, which decides ties.
    """
    f32 = np.float32
    rows, columns = x.shape
    tiles = x.reshape(rows // tall, tall, columns // 16, 16).astype(f32)
    peaks = np.abs(tiles).max(axis=(1, 3), keepdims=True)
    whole = f32(np.abs(x).max()) * f32(1 / 2688)
    ratio = np.minimum(peaks * (f32(1) / whole) * f32(1 / 6), f32(448))
    if noise is None:
        scale = ratio.astype(ml_dtypes.float8_e4m3fn).astype(f32)
    else:
        scale = E4M3[np.searchsorted(E4M3, ratio)].astype(f32)  # the next one
        noise = noise.reshape(tiles.shape)
    with np.errstate(divide="ignore"):
        factor = np.where(scale == 0, f32(0), f32(1) / scale)
    codes = four_bits((tiles * (f32(1) / whole) * factor).astype(np.float64), noise)
    scale = np.broadcast_to(scale[..., 0], (*tiles.shape[:2], columns // 16))
    return codes.reshape(x.shape), scale.reshape(rows, -1).astype(np.float64), whole


def numbers(codes, scale, whole):
    return codes * np.repeat(scale, 16, axis=1) * float(whole)


def role_of(recipe, role, x):
    tall = 16 if role == "weight" and recipe.weight_blocks == "2d" else 1
    noise = uniform(x) if role == "grad" and recipe.stochastic else None
    return quantized(x, tall, noise)


def turn(recipe, x):
    """What the product for the weight's gradient sums over, last."""
    if not recipe.hadamard:
        return x.T
    signs = np.diag(_dot._SIGNS)
    return (x.T.reshape(-1, 16) @ signs @ hadamard(16) / 4).reshape(x.T.shape)


def coarse(seed, *shape, dtype=BF16):
    """Multiples of 1/64: sums of 16 of them are exact in f32, in whatever order."""
    return on_a_grid(normal(seed, *shape), dtype)


def on_a_grid(x, dtype):
    # In NumPy: an operation of JAX would be compiled for each shape.
    rounded = np.round(np.asarray(x) * 64).astype(dtype) / np.asarray(64, dtype)
    return jnp.asarray(rounded)


def spread(x):
    """Rows of very different sizes, with an empty one and one below all scales."""
    rows = 2.0 ** np.linspace(0, -7, x.shape[0]).round()
    rows[3], rows[5] = 0, 2.0**-30
    return jnp.asarray(np.asarray(x) * rows.astype(x.dtype)[:, None])


# One program instead of one for each of its operations.
jitted_blocks = jax.jit(to_blocks, static_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def through_blocks(recipe, role, x):
    """Returns the numbers that blocks hold, and the scale of all."""
    blocks = to_blocks(recipe, role, x)
    return from_blocks(blocks, np.dtype(np.float32)), blocks.whole


# --- numbers --------------------------------------------------------------------------


def test_rounding_to_nearest_is_that_of_the_format():
    x = jnp.concatenate([jnp.arange(-40.0, 41.0) / 4.0, normal(0, 1000) * 3])
    codes = mpx_round(x, None, "e2m1")
    assert codes.dtype == E2M1
    want = np.clip(np.asarray(x), -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert np.array_equal(np.asarray(codes, np.float32), want.astype(np.float32))


@pytest.mark.parametrize("value", [0.1, 0.5, 1.3, -1.9, 2.7, 3.999, -4.4, 5.99, 6.0])
def test_stochastic_rounding_is_right_on_average(value):
    count = 2**16
    x = jnp.full((count,), value, jnp.float32)
    codes = np.asarray(mpx_round(x, noise_of(x), "e2m1"), np.float64)
    size = abs(value)
    beside = [E2M1_NUMBERS[E2M1_NUMBERS <= size].max()]
    beside.append(E2M1_NUMBERS[E2M1_NUMBERS >= size].min())
    assert {*np.unique(np.abs(codes))} == {*beside}
    gap = beside[1] - beside[0]
    share = (size - beside[0]) / gap if gap else 0
    bound = gap * (5 * math.sqrt(share * (1 - share) / count) + 2.0**-17)
    assert abs(codes.mean() - value) <= bound + 2.0**-22 * size


@pytest.mark.parametrize("up", [False, True])
def test_scales_are_e4m3_numbers(up):
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    x = np.concatenate(
        [E4M3, middles, np.linspace(0, 448, 5000), 2.0 ** -np.arange(30)]
    )
    x = x.astype(np.float32)
    found = np.asarray(to_e4m3(jnp.asarray(x), up=up), np.float64)
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    if up:
        want = E4M3[np.searchsorted(E4M3, x)]
    assert np.array_equal(found, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_numbers_of_a_block_are_exact(dtype):
    codes = jnp.asarray(np.tile(E2M1_NUMBERS, 2), jnp.float32).astype(E2M1)
    scale = jnp.asarray(E4M3, jnp.float32).astype(jnp.float8_e4m3fn)
    blocks = Operand(jnp.tile(codes, (127, 1)), scale[:, None], (1,))
    found = from_blocks(blocks, np.dtype(dtype))
    assert found.dtype == dtype
    assert np.array_equal(as_f64(found), E4M3[:, None] * np.tile(E2M1_NUMBERS, 2))


@pytest.mark.parametrize("role", ["activation", "weight", "grad"])
@pytest.mark.parametrize("name", OPTIONS)
def test_codes_and_scales_are_those_of_numpy(name, role):
    x = spread(coarse(0, 64, 48))
    found = jitted_blocks(OPTIONS[name], role, x)
    codes, scale, whole = role_of(OPTIONS[name], role, as_f64(x))
    assert float(found.whole) == whole
    assert found.scale.dtype == jnp.float8_e4m3fn
    assert np.array_equal(as_f64(found.scale), scale)
    assert found.codes.dtype == E2M1
    assert np.array_equal(as_f64(found.codes), codes)
    assert scale.max() == 448
    assert np.abs(codes).max() == 6


LAYOUTS = ("x @ w", "w @ x (Equinox)", "batch and time", "heads, crossed", "first axis")


@pytest.mark.some(6)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_three_products_are_those_of_numpy(layout, name, dtype):
    a, b, g, dimensions, side = problem(layout)
    a, b, g = (on_a_grid(x, dtype) for x in (a, b, g))
    recipe = OPTIONS[name]
    got = run(plan_for(a, b, dimensions, side, recipe), a, b, g)
    contracted, _ = dimensions
    flat, free = [], []
    for x, axes in zip((a, b), contracted, strict=True):
        free.append([i for i in range(x.ndim) if i not in axes])
        ordered = as_f64(x).transpose(*free[-1], *axes)
        flat.append(ordered.reshape(math.prod(x.shape[i] for i in free[-1]), -1))
    # As a layer: rows of x and g are examples, those of w outputs.
    order = (0, 1) if side == 1 else (1, 0)
    x, w = (flat[i] for i in order)
    grad = as_f64(g).reshape(flat[0].shape[0], -1)
    grad = grad if side == 1 else grad.T
    parts = functools.partial(role_of, recipe)
    y = numbers(*parts("activation", x)) @ numbers(*parts("weight", w)).T
    dx = numbers(*parts("grad", grad)) @ numbers(*parts("weight", w.T)).T
    dw = (
        numbers(*parts("grad", turn(recipe, grad)))
        @ numbers(*parts("activation", turn(recipe, x))).T
    )
    want = [(y if side == 1 else y.T).reshape(g.shape)]
    for i, found in zip((0, 1), (dx, dw) if side == 1 else (dw, dx), strict=True):
        tensor = (a, b)[i]
        axes = [*free[i], *contracted[i]]
        shape = [tensor.shape[j] for j in axes]
        want.append(found.reshape(shape).transpose(np.argsort(axes)))
    ulp = float(jnp.finfo(dtype).eps)
    for found, true in zip(got, want, strict=True):
        assert found.dtype == dtype
        assert found.shape == true.shape
        # Sums of at most 96 products in f32, and one rounding.
        size = np.abs(true).max()
        np.testing.assert_allclose(
            as_f64(found), true, rtol=ulp, atol=96 * 2.0**-24 * size
        )


# --- what the parts of the recipe are for ---------------------------------------------


def test_both_passes_see_the_same_weight_if_blocks_are_square():
    w = spread(coarse(0, 48, 64))
    for name, same in (("full", True), ("1d", False)):
        one, other = (through_blocks(OPTIONS[name], "weight", x)[0] for x in (w, w.T))
        assert np.array_equal(one, other.T) == same


def test_rotation_cancels_out_and_spreads_outliers():
    x, g = coarse(0, 64, 32), coarse(1, 64, 48)
    turned = [np.asarray(jax.jit(rotated)(y.T), np.float64) for y in (g, x)]
    np.testing.assert_allclose(
        turned[0] @ turned[1].T, as_f64(g).T @ as_f64(x), rtol=2.0**-22, atol=2.0**-20
    )
    peak = jnp.zeros((1, 16), BF16).at[0, 3].set(4)
    assert np.array_equal(np.abs(rotated(peak)), np.ones((1, 16)))


def test_gradients_are_right_on_average():
    # Different numbers in each block, so that scales are rounded, too.
    g = normal(0, 4096, 64, dtype=BF16)
    found, whole = through_blocks(FULL, "grad", g)
    found = as_f64(found) * float(whole)
    error, wide = found - as_f64(g), as_f64(g)
    peaks = np.abs(wide.reshape(4096, 4, 16)).max(-1, keepdims=True)
    largest = (np.abs(wide.reshape(4096, 4, 16)) == peaks).reshape(wide.shape)
    for chosen in (wide > 0, wide < 0, largest & (wide > 0), np.abs(wide) < 0.1):
        part = error[chosen]
        assert part.size > 5000
        assert abs(part.mean()) <= 5 * part.std() / math.sqrt(part.size)
    # To nearest the largest of a block are clipped as often as they are not.
    blocks = jitted_blocks(OPTIONS["nearest"], "grad", g)
    assert np.any(np.abs(as_f64(blocks.codes)) == 6)


# --- zeros, extremes, inf and nan -----------------------------------------------------


@pytest.mark.parametrize("exponent", [-100, -40, 40, 100])
def test_scale_of_a_tensor_is_no_matter(exponent):
    x, w = coarse(0, 32, 32), coarse(1, 32, 32)
    layer = jax.jit(everywhere(lambda w, x: x @ w, FULL))
    factor = jnp.asarray(2.0**exponent, BF16)
    assert_trees_equal(layer(w, x * factor), layer(w, x) * factor)


@pytest.mark.parametrize("value", [0.0, 2.0**-133])
def test_zeros_and_what_is_below_the_range_give_zeros(value):
    x, w = jnp.full((16, 32), value, BF16), jnp.ones((32, 16), BF16)
    loss = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    step = jax.jit(
        jax.value_and_grad(everywhere(loss, FULL, params="w"), argnums=(0, 1))
    )
    out, (dw, dx) = step(w, x)
    assert float(out) == 0
    assert not np.any(as_f64(dw))
    assert np.all(as_f64(dx) == 16)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["full", "plain"])
def test_inf_and_nan_reach_the_results(which, bad, name):
    tensors = [coarse(i, 32, 32) for i in range(3)]
    tensors[which] = tensors[which].at[3, 5].set(bad)
    a, b, _ = tensors
    plan = plan_for(a, b, (((1,), (0,)), ((), ())), 1, OPTIONS[name])
    results = run(plan, *tensors)
    for i, found in enumerate(results):
        is_touched = i in {0: (0, 2), 1: (0, 1), 2: (1, 2)}[which]
        assert np.all(np.isfinite(as_f64(found))) != is_touched


# --- which matmuls, and where ---------------------------------------------------------


def reasons(func, *shapes):
    args = [jax.ShapeDtypeStruct(shape, BF16) for shape in shapes]
    found = mpx.inspect.report(everywhere(func, FULL), *args).fp8.matmuls
    return [x.reason for x in found]


@pytest.mark.parametrize("sizes", [(24, 32, 32), (32, 24, 32), (32, 32, 24)])
def test_matmul_of_other_sizes_is_kept(sizes):
    m, k, n = sizes
    layer = lambda w, x: x @ w  # noqa: E731
    assert reasons(layer, (k, n), (m, k)) == ["24 is not a multiple of 16"]
    x, w = normal(0, m, k, dtype=BF16), normal(1, k, n, dtype=BF16)
    with pytest.warns(RuntimeWarning, match="`w` stay .*24 is not a multiple"):
        got = everywhere(layer, FULL)(w, x)
    assert_trees_equal(got, layer(w, x))


def test_batch_dimensions_of_a_parameter_are_kept():
    experts = lambda w, x: jnp.einsum("ebi,eio->ebo", x, w)  # noqa: E731
    found = reasons(experts, (2, 32, 32), (2, 16, 32))
    assert found == ["it has batch dimensions, for which there are no NVFP4 blocks"]


def test_named_layers_stay_in_16_bits():
    def loss(p, x):
        return x @ p["first"] @ p["last"]

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, BF16)  # noqa: E731
    params = {"first": shape(32, 32), "last": shape(32, 32)}
    func = everywhere(loss, FULL, keep="last")
    found = mpx.inspect.report(func, params, shape(16, 32)).fp8
    assert [(x.param, x.reason) for x in found.matmuls] == [
        ("p/first", ""),
        ("p/last", "keep last"),
    ]


def test_refused_without_blackwell_unless_emulated():
    x = jnp.ones((16, 16), BF16)
    with pytest.raises(
        NotImplementedError, match=r"NVFP4 needs .* Blackwell .*emulate"
    ):
        fp8(lambda p, x: x @ p, "nvfp4")(x, x)
    out = jax.jit(everywhere(lambda p, x: x @ p, FULL))(x, x)
    assert np.array_equal(as_f64(out), np.full((16, 16), 16))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_emulation_warns_of_no_hardware(monkeypatch, capability):
    monkeypatch.setattr(mpx._fp8._transform, "gpu_capability", lambda: capability)
    x = jnp.ones((16, 16), BF16)
    jax.eval_shape(everywhere(lambda p, x: x @ p, FULL), x, x)


def test_blackwell_multiplies_blocks_itself(monkeypatch):
    """The call that JAX offers, with a plain product in its place."""
    calls = []

    def scaled_matmul(a, b, a_scale, b_scale, *, preferred_element_type):
        calls.append((a.dtype, a_scale.dtype, a.shape, a_scale.shape))
        assert preferred_element_type == np.float32
        wide = [
            (x.astype(jnp.float32).reshape(*s.shape, 16) * s.astype(jnp.float32)[..., None])
            .reshape(x.shape)
            for x, s in ((a, a_scale), (b, b_scale))
        ]  # fmt: skip
        return jnp.einsum("bmk,bnk->bmn", *wide)

    x, w = coarse(0, 32, 48), coarse(1, 48, 64)
    layer = lambda w, x: x @ w  # noqa: E731
    want = jax.jit(everywhere(layer, FULL))(w, x)
    monkeypatch.setattr(_dot, "is_native", lambda: True)
    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    got = jax.jit(everywhere(layer, "nvfp4"))(w, x)
    assert calls == [(E2M1, jnp.float8_e4m3fn, (1, 32, 48), (1, 32, 3))]
    # Sums in another order, and one rounding to bf16.
    np.testing.assert_allclose(as_f64(got), as_f64(want), rtol=2.0**-7)


# --- transformations ------------------------------------------------------------------


def assert_same_products(found, true):
    """Compares the products of two programs, whose codes are the same.

    The order of their sums in f32, of at most 96 numbers, may differ, and so may the one
    rounding to bf16 after it. Losses are linear here: a gradient that differs by an ulp
    has other random bits, and codes that are one apart.
    """
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        assert one.dtype == other.dtype
        size = np.abs(as_f64(other)).max()
        np.testing.assert_allclose(
            as_f64(one), as_f64(other), rtol=2.0**-7, atol=96 * 2.0**-24 * size
        )


def test_scan_and_remat_are_the_unrolled_loop_eager_or_jitted():
    # Without the rotation, whose numbers are rounded.
    assert_scan_is_the_unrolled_loop(OPTIONS["no rotation"])


def test_remat_changes_no_gradient():
    p, x, g = coarse(0, 32, 64), coarse(1, 64, 32), coarse(2, 64, 64)
    plain = lambda p, x: jnp.sum((x @ p) * g)  # noqa: E731
    step = lambda f: jax.jit(jax.grad(everywhere(f, FULL)))(p, x)  # noqa: E731
    assert_same_products(step(jax.checkpoint(plain)), step(plain))


def test_vmap_inside_is_one_matmul():
    p, x = coarse(0, 32, 32), coarse(1, 4, 16, 32)
    mapped = everywhere(lambda p, x: jax.vmap(lambda x: x @ p)(x), FULL)
    flat = everywhere(lambda p, x: (x.reshape(64, 32) @ p).reshape(4, 16, 32), FULL)
    assert_same_products(jax.jit(mapped)(p, x), jax.jit(flat)(p, x))


@pytest.mark.filterwarnings("ignore:`fp8` inside `jax.vmap`:RuntimeWarning")
def test_vmap_outside_is_a_loop():
    p, x, g = coarse(0, 32, 32), coarse(1, 3, 16, 32), coarse(2, 16, 32)
    grad = jax.grad(everywhere(lambda p, x: jnp.sum((x @ p) * g), FULL))
    got = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(p, x)
    alone = jax.jit(grad)
    assert_same_products(got, jnp.stack([alone(p, row) for row in x]))


@pytest.mark.some(2)
@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
@pytest.mark.parametrize("name", ["full", "plain"])
def test_two_devices_compute_what_one_does(spec, name):
    p, x, g = coarse(0, 32, 64), coarse(1, 64, 32), coarse(2, 64, 64)
    loss = lambda p, x, g: jnp.sum((x @ p) * g)  # noqa: E731
    step = jax.grad(everywhere(loss, OPTIONS[name], params="p"), argnums=(0, 1))
    want = jax.jit(step)(p, x, g)
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    place = lambda y, spec: jax.device_put(y, NamedSharding(mesh, spec))  # noqa: E731
    got = jax.jit(step)(place(p, spec), place(x, P("x")), place(g, P("x")))
    assert_same_products(jax.device_get(got), want)


def test_shard_map_computes_what_one_device_does():
    # Each device has a scale of its own: rows that are alike have the same one.
    p, x = coarse(0, 32, 64), jnp.tile(coarse(1, 32, 32), (2, 1))
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    layer = everywhere(lambda p, x: x @ p, FULL)
    parts = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    assert_same_products(jax.jit(parts)(p, x), jax.jit(layer)(p, x))


def test_second_derivatives_are_refused():
    p, x = coarse(0, 32, 32), coarse(1, 32, 32)
    grad = jax.grad(everywhere(lambda p, x: jnp.sum(jnp.sin(x @ p)), FULL))
    with pytest.raises(NotImplementedError, match="fp8 has no second derivatives"):
        jax.grad(lambda p: jnp.sum(grad(p, x)))(p)


def test_what_is_saved_has_four_bits():
    p, x = coarse(0, 32, 64), coarse(1, 48, 32)
    layer = everywhere(lambda p, x: x @ p, FULL, params="p")
    back = jax.eval_shape(lambda p, x: jax.vjp(layer, p, x)[1], p, x)
    kept = [y for y in jax.tree.leaves(back) if getattr(y, "size", 0) > 512]
    assert sorted(y.shape for y in kept) == [(32, 48), (32, 64)]
    assert {str(y.dtype) for y in kept} == {"uint4"}


# --- inspect --------------------------------------------------------------------------


def test_report_calls_it_nvfp4():
    report = mpx.inspect.report(everywhere(one_layer, FULL), *one_layer_problem())
    assert report.fp8.recipe == "NVFP4"
    lines = str(report.fp8).splitlines()
    assert lines[0] == "100.0 % of the forward matmul operations run in nvfp4."
    assert lines[3].split()[-1] == "nvfp4"


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OPTIONS)
def test_explain_knows_the_format_and_finds_nothing_wrong(name):
    assert "e2m1" in explained(OPTIONS[name]).formats


def test_check_sees_the_rounding():
    step = jax.jit(jax.grad(everywhere(one_layer, FULL)))
    compiled = step.lower(*one_layer_problem()).compile()
    assert mpx.inspect.fp8_check(compiled).quantized


# --- training -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.usefixtures("optimized_programs")
def test_training_ends_near_bf16():
    # Inputs, weights and hidden numbers are off by about a tenth in the forward pass: each
    # of the four roundings leaves a hundredth of the variance.
    assert_training_ends_near_bf16(FULL, 0.04)
