"""Power-of-two scales, casts to 8 bits, and the derivative of the 8-bit matmul."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from models import normal
from mpx._fp8 import _operands
from mpx._fp8._dot import fp8_dot, from_blocks, to_blocks
from mpx._fp8._operands import (
    MatmulSpec,
    cast_scaled,
    inverse,
    largest_magnitude,
    power_of_two_scale,
)
from mpx._jax._formats import FORMATS
from mpx.recipes import (
    MXFP8,
    NVFP4,
    CurrentScaling,
    DelayedScaling,
    Int8,
    StaticScaling,
)

FORMS = ["e4m3", "e5m2"]
HALF_ULP = {form: 2.0 ** -(FORMATS[form].mantissa + 1) for form in FORMS}
TINY = float(np.finfo(np.float32).tiny)
HUGE = float(np.finfo(np.float32).max)


def scale_of(amax, form):
    return float(jax.jit(power_of_two_scale, static_argnums=1)(np.float32(amax), form))


# --- scales ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@given(amax=st.floats(2.0**-100, HUGE, width=32))
def test_scale_is_the_smallest_power_of_two_that_fits(form, amax):
    scale = scale_of(amax, form)
    assert math.frexp(scale)[0] == 0.5
    assert amax / scale <= FORMATS[form].max < amax / (scale / 2)


@pytest.mark.parametrize("form", FORMS)
def test_scale_of_every_power_of_two_is_exact(form):
    exponents = np.arange(-100, 127)
    amax = jnp.asarray(
        FORMATS[form].max * 2.0 ** exponents.clip(-100, 110), jnp.float32
    )
    want = 2.0 ** exponents.clip(-100, 110)
    assert np.array_equal(power_of_two_scale(amax, form), want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("amax", [0.0, -0.0, math.inf, math.nan])
def test_scale_of_what_cannot_be_scaled_is_one(form, amax):
    assert scale_of(amax, form) == 1.0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("amax", [TINY, TINY * 2**10, HUGE])
def test_scale_of_an_extreme_number_has_a_normal_inverse(form, amax):
    scale = jnp.float32(scale_of(amax, form))
    product = scale * inverse(scale)
    assert product == 1.0
    assert np.float32(amax) * inverse(scale) <= FORMATS[form].max


@given(exponent=st.integers(-126, 126))
def test_inverse_is_exact(exponent):
    assert float(inverse(jnp.float32(2.0**exponent))) == 2.0**-exponent


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (np.zeros((0,)), 0.0),
        (np.zeros((3, 0)), 0.0),
        (np.float32(-3.0), 3.0),
        (np.array([1.0, -5.0]), 5.0),
        (np.array([1.0, -np.inf]), 1.0),
        (np.array([np.nan, 1.0]), 1.0),
        (np.array([np.nan, np.inf]), 0.0),
    ],
    ids=["empty", "empty rows", "scalar", "vector", "inf", "nan", "nothing finite"],
)
def test_largest_magnitude_of(x, want):
    found = largest_magnitude(jnp.asarray(x, jnp.float32))
    assert found.shape == ()
    np.testing.assert_equal(float(found), want)


# By format: what a rounding loses of a number at most, down to which part of the largest
# number, and below which part all is lost.
LOSSES = {"e4m3": (1 / 16, 7e-5, 2e-6), "e5m2": (1 / 8, 2.2e-9, 1.3e-10)}


@pytest.mark.parametrize("form", LOSSES)
def test_losses_are_those_that_the_guide_promises(form):
    share, normal_from, lost_below = LOSSES[form]
    parts = np.geomspace(lost_below / 8, 1, 4001, dtype=np.float32)
    x = lost = parts
    for largest in np.linspace(1, 2, 17, dtype=np.float32)[:-1]:
        x = np.append(parts, np.float32(1)) * largest
        codes, scale = quantized(jnp.asarray(x), form)
        lost = np.abs(np.asarray(codes, np.float64) * float(scale) - x) / x
        x = x / largest
        assert lost[x >= normal_from].max() <= share * (1 + 1e-6)
        assert np.all(lost[x < lost_below] == 1)
    assert lost[x < normal_from].max() == 1 > lost[x >= lost_below * 2.5].max()


SPOILT = {
    "tensor": CurrentScaling(),
    "row": CurrentScaling(granularity="row"),
    "blocks": MXFP8(emulate=True),
}


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", SPOILT)
def test_one_bad_example_leaves_the_others_alone(name, bad):
    # Small numbers, which a scale of 1 would make zeros.
    a, b, g = (normal(i, 32, 32, dtype="bfloat16") * 2.0**-20 for i in range(3))
    plan = plan_for(a, b, (((1,), (0,)), ((), ())), 1, SPOILT[name])
    others = np.arange(32) != 3
    out, da, _ = run(plan, a, b, g)
    spoilt, da_too, _ = run(plan, a.at[3, 5].set(bad), b, g.at[3, 5].set(bad))
    assert np.array_equal(*(np.asarray(x, np.float32)[others] for x in (out, spoilt)))
    assert np.array_equal(*(np.asarray(x, np.float32)[others] for x in (da, da_too)))
    assert np.any(np.asarray(out, np.float32)[others])
    for x in (spoilt, da_too):
        assert not np.any(np.isfinite(np.asarray(x, np.float32)[3]))


def test_largest_magnitude_keeps_the_axes_it_reduces():
    x = jnp.asarray([[1.0, -4.0], [2.0, 3.0]], jnp.bfloat16)
    found = largest_magnitude(x, (1,))
    assert found.dtype == jnp.float32
    assert np.array_equal(found, [[4.0], [3.0]])


# --- casts ----------------------------------------------------------------------------


def quantized(x, form, *, clip=False):
    scale = power_of_two_scale(largest_magnitude(x), form)
    return cast_scaled(x, inverse(scale), form, clip=clip), scale


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [-100, -20, 0, 20, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantising_is_off_by_half_an_ulp_at_most(form, exponent, dtype):
    x = normal(0, 1000) * 2.0**exponent
    x = x.astype(dtype)
    codes, scale = quantized(x, form)
    assert codes.dtype == FORMATS[form].dtype
    wide = np.asarray(x.astype(jnp.float32), np.float64)
    error = np.abs(
        np.asarray(codes.astype(jnp.float32), np.float64) * float(scale) - wide
    )
    smallest = FORMATS[form].smallest * float(scale)
    assert np.all(error <= np.maximum(HALF_ULP[form] * np.abs(wide), smallest / 2))
    assert np.any(error > 0)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_of_the_format_survive(form):
    codes = np.arange(256, dtype=np.uint8).view(FORMATS[form].dtype)
    finite = codes[np.isfinite(codes.astype(np.float32))]
    x = jnp.asarray(finite.astype(np.float32) * 2.0**-7)
    found, scale = quantized(x, form)
    assert float(scale) == 2.0**-7
    assert np.array_equal(found.astype(jnp.float32) * scale, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("clip", [False, True])
def test_inf_and_nan_stay_visible(form, bad, clip):
    x = jnp.asarray([1.0, bad], jnp.bfloat16)
    codes, _ = quantized(x, form, clip=clip)
    assert not np.isfinite(np.asarray(codes[1].astype(jnp.float32)))


@pytest.mark.parametrize("form", FORMS)
def test_clip_saturates_what_a_given_scale_cannot_hold(form):
    x = jnp.asarray([1e6, -1e6, 0.5], jnp.float32)
    one = jnp.float32(1.0)
    largest = FORMATS[form].max
    codes = cast_scaled(x, one, form, clip=True).astype(jnp.float32)
    assert np.array_equal(codes, [largest, -largest, 0.5])
    loose = cast_scaled(x, one, form, clip=False).astype(jnp.float32)
    assert not np.isfinite(np.asarray(loose[0]))


def test_zeros_stay_zeros():
    codes, scale = quantized(jnp.zeros((4, 4), jnp.bfloat16), "e4m3")
    assert float(scale) == 1.0
    assert not np.any(codes.astype(jnp.float32))


# --- recipes --------------------------------------------------------------------------


def static(**changes):
    return StaticScaling(
        **{"activation_max": 1.0, "weight_max": 1.0, "grad_max": 1.0} | changes
    )


REFUSED = {
    "a format": (lambda: CurrentScaling(grad="e3m4"), "`grad` must be one of 'e4m3'"),
    "a list": (lambda: MXFP8(grad=["e4m3"]), "`grad` must be one of 'e4m3'"),
    "granularity": (
        lambda: CurrentScaling(granularity="block"),
        "must be one of 'tensor', 'row'",
    ),
    "no history": (lambda: DelayedScaling(history=0), "`history` must be at least 1"),
    "margin 99": (
        lambda: DelayedScaling(margin=99),
        "`margin` must be a number of powers of two",
    ),
    "rounding": (
        lambda: Int8(rounding="up"),
        "`rounding` must be one of 'stochastic', 'nearest'",
    ),
    "weight_blocks": (
        lambda: NVFP4(weight_blocks="3d"),
        "`weight_blocks` must be one of '2d', '1d'",
    ),
    "max 0": (lambda: static(activation_max=0.0), "`activation_max` must be positive"),
    "max inf": (lambda: static(weight_max=np.inf), "`weight_max` must be positive"),
    "max nan": (
        lambda: static(grad_max=np.nan),
        "`grad_max` must be positive and finite, but nan",
    ),
}
MISTYPED = {
    "history a": (
        lambda: DelayedScaling(history="a"),
        "`history` must be an integer, but 'a' of type str was given",
    ),
    "history nan": (
        lambda: DelayedScaling(history=np.nan),
        "`history` must be an integer, but nan of type float",
    ),
    "history 2.5": (
        lambda: DelayedScaling(history=2.5),
        "`history` must be an integer",
    ),
    "margin 0.5": (lambda: DelayedScaling(margin=0.5), "`margin` must be an integer"),
    "max text": (lambda: static(weight_max="1"), "`weight_max` must be a number"),
    "backward": (lambda: Int8(backward=1), "`backward` must be True or False"),
    "hadamard": (lambda: NVFP4(hadamard=1), "`hadamard` must be True or False"),
    "stochastic": (lambda: NVFP4(stochastic="no"), "`stochastic` must be True or"),
    "emulate": (lambda: MXFP8(emulate="yes"), "`emulate` must be True or False"),
}


@pytest.mark.parametrize("name", [*REFUSED, *MISTYPED])
def test_recipe_refuses(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    make, message = (REFUSED | MISTYPED)[name]
    with pytest.raises(TypeError if name in MISTYPED else ValueError, match=message):
        make()


def test_recipe_takes_numbers_of_numpy_and_stays_hashable(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    assert DelayedScaling(history=np.int64(4)) == DelayedScaling(history=4)
    assert hash(static(grad_max=np.float32(2))) == hash(static(grad_max=2))


# --- the matmul and its derivative ----------------------------------------------------

# Dimension numbers of `dot_general`, with shapes and the side of the weight.
LAYOUTS = {
    "x @ w": ((32, 64), (64, 96), ((1,), (0,)), 1),
    "x @ w.T": ((32, 64), (96, 64), ((1,), (1,)), 1),
    "w @ x (Equinox)": ((96, 64), (32, 64), ((1,), (1,)), 0),
    "batch and time": ((4, 8, 64), (64, 96), ((2,), (0,)), 1),
    "heads": ((4, 8, 2, 32), (2, 32, 96), ((2, 3), (0, 1)), 1),
    "heads, crossed": ((4, 8, 32, 2), (2, 32, 96), ((3, 2), (0, 1)), 1),
    "first axis": ((64, 32), (64, 96), ((0,), (0,)), 1),
}
# The same, with batch dimensions: a matrix for each of several experts.
EXPERTS = {
    "experts": ((3, 32, 64), (3, 64, 96), ((2,), (1,)), 1, ((0,), (0,))),
    "w first": ((3, 96, 64), (32, 3, 64), ((2,), (2,)), 0, ((0,), (1,))),
    "two batch axes": (
        (4, 3, 8, 2, 32), (2, 32, 3, 48), ((4,), (1,)), 1, ((3, 1), (0, 2)),
    ),
}  # fmt: skip
ALL = LAYOUTS | EXPERTS
RECIPES = {
    "current": CurrentScaling(),
    "current e4m3": CurrentScaling(grad="e4m3"),
    "row": CurrentScaling(granularity="row"),
    "row e5m2": CurrentScaling(granularity="row", grad="e5m2"),
    "static": StaticScaling(activation_max=8.0, weight_max=8.0, grad_max=8.0),
    "mx": MXFP8(emulate=True),
    "int8": Int8(),
}


def problem(layout, dtype="bfloat16", key=0):
    lhs, rhs, contracted, side, *batch = ALL[layout]
    a = normal((key, 0), *lhs, dtype=dtype)
    b = normal((key, 1), *rhs, dtype=dtype)
    dimensions = (contracted, *batch) if batch else (contracted, ((), ()))
    out = jax.eval_shape(lambda a, b: lax.dot_general(a, b, dimensions), a, b)
    g = normal((key, 2), *out.shape, dtype=dtype)
    return a, b, g, dimensions, side


def plan_for(a, b, dimensions, side, recipe):
    return MatmulSpec(dimensions, a.dtype, side, recipe)


@functools.partial(jax.jit, static_argnums=0)
def run(plan, a, b, g):
    out, back = jax.vjp(lambda a, b: fp8_dot(plan, a, b, None, None), a, b)
    return out, *back(g)


def exact(a, b, g, dimensions, transform=lambda x: x):
    """Output and gradients in f64, of operands after a transformation."""
    wide = [np.asarray(x.astype(jnp.float32), np.float64) for x in (a, b, g)]
    return products([transform(x) for x in wide], dimensions)


def products(arrays, dimensions):
    """The same, of NumPy's arrays in f64."""
    a, b, g = arrays
    contracted, batches = dimensions
    shapes, orders, flat = [], [], []
    for x, axes, batch in zip((a, b), contracted, batches, strict=True):
        free = [i for i in range(x.ndim) if i not in (*axes, *batch)]
        order = [*batch, *free, *axes]
        orders.append(np.argsort(order))
        shapes.append(x.transpose(order).shape)
        sizes = (math.prod(x.shape[i] for i in part) for part in (batch, free, axes))
        flat.append(x.transpose(order).reshape(*sizes))
    flat_a, flat_b = flat
    flat_g = g.reshape(-1, flat_a.shape[1], flat_b.shape[1])
    return [
        (flat_a @ flat_b.mT).reshape(g.shape),
        (flat_g @ flat_b).reshape(shapes[0]).transpose(orders[0]),
        (flat_g.mT @ flat_a).reshape(shapes[1]).transpose(orders[1]),
    ]


# Every layout with the two ways to scale, every recipe with the two hardest layouts.
CASES = [(layout, name) for layout in ALL for name in ("current", "row")] + [
    (layout, name)
    for layout in ("w @ x (Equinox)", "heads, crossed", "two batch axes")
    for name in RECIPES
    if name not in ("current", "row", "int8") and (layout in LAYOUTS or name != "mx")
]


def below_normal(form):
    """The error of a number below the normal range, over the tensor's largest one.

    It is half the smallest number times the scale, which is at most 2 · amax / max.
    """
    return FORMATS[form].smallest / FORMATS[form].max


@pytest.mark.some(6)
@pytest.mark.parametrize(("layout", "name"), CASES)
def test_product_and_gradients_are_off_by_the_rounding_of_the_formats(layout, name):
    a, b, g, dimensions, side = problem(layout)
    recipe = RECIPES[name]
    got = run(plan_for(a, b, dimensions, side, recipe), a, b, g)
    want = exact(a, b, g, dimensions)
    sizes = exact(a, b, g, dimensions, np.abs)
    forms = [("e4m3", "e4m3"), (recipe.grad, "e4m3"), (recipe.grad, "e4m3")]
    for found, true, size, pair in zip(got, want, sizes, forms, strict=True):
        assert found.dtype == jnp.bfloat16
        assert found.shape == true.shape
        # |Σ x̂ŵ - Σ xw| ≤ ((1 + u_x)(1 + u_w) - 1) Σ |x||w| for normal numbers; others
        # are off by a share of the largest (< 8), 96 times at most; and one ulp of bf16.
        bound = (1 + HALF_ULP[pair[0]]) * (1 + HALF_ULP[pair[1]]) - 1
        small = 2.0**-8 * np.abs(true) + 96 * 8 * 8 * sum(map(below_normal, pair))
        error = np.abs(np.asarray(found.astype(jnp.float32), np.float64) - true)
        assert np.all(error <= bound * size + small), (error / size).max()


def rounded(x, form, axes=None):
    """What a tensor is in fp8, by NumPy alone: scale, cast, scale back."""
    largest = np.max(np.abs(x), axis=axes, keepdims=axes is not None)
    scale = 2.0 ** np.ceil(np.log2(largest / FORMATS[form].max))
    return (x / scale).astype(FORMATS[form].dtype).astype(np.float64) * scale


@pytest.mark.parametrize("name", ["current", "current e4m3", "row", "row e5m2"])
def test_products_are_those_of_the_rounded_tensors(name):
    a, b, g, dimensions, side = problem("x @ w")
    recipe = RECIPES[name]
    got = run(plan_for(a, b, dimensions, side, recipe), a, b, g)
    x, w, g = (np.asarray(t.astype(jnp.float32), np.float64) for t in (a, b, g))
    by_row = recipe.granularity == "row"
    rows, columns = (1, 0) if by_row else (None, None)
    form, grad = "e4m3", recipe.grad
    want = [
        rounded(x, form, rows) @ rounded(w, form, columns),
        rounded(g, grad, rows) @ rounded(w, form, rows).T,
        rounded(x, form, columns).T @ rounded(g, grad, columns),
    ]
    for found, true in zip(got, want, strict=True):
        # Sums in f32 and one rounding to bf16, in the worst case at a tie.
        np.testing.assert_allclose(
            np.asarray(found, np.float64), true, rtol=2.0**-8, atol=2.0**-18
        )


@pytest.mark.some(5)
@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("name", ["current", "row", "static", "int8"])
def test_product_is_exact_for_numbers_of_the_formats(layout, name):
    a, b, g, dimensions, side = problem(layout)
    # 0 and ±1 are exact in both formats, and sums of fewer than 256 of them in bf16.
    a, b, g = (jnp.clip(jnp.round(x), -1, 1) for x in (a, b, g))
    got = run(plan_for(a, b, dimensions, side, RECIPES[name]), a, b, g)
    for found, true in zip(got, exact(a, b, g, dimensions), strict=True):
        assert np.array_equal(found.astype(jnp.float32), true)


@pytest.mark.parametrize("name", ["current", "row"])
def test_gradients_do_not_depend_on_a_power_of_two(name):
    a, b, g, dimensions, side = problem("x @ w")
    plan = plan_for(a, b, dimensions, side, RECIPES[name])
    _, da, db = run(plan, a, b, g)
    _, da2, db2 = run(plan, a, b, g * 2**-30)
    assert np.array_equal(da.astype(jnp.float32) * 2.0**-30, da2.astype(jnp.float32))
    assert np.array_equal(db.astype(jnp.float32) * 2.0**-30, db2.astype(jnp.float32))


def test_rows_of_very_different_size_need_scales_of_their_own():
    a, b, g, dimensions, side = problem("x @ w")
    # From row to row a factor of 2**-1; e4m3 spans 2**18 from its largest number down.
    sizes = jnp.asarray(2.0 ** -np.arange(32.0), jnp.bfloat16)[:, None]
    per_row = run(plan_for(a, b, dimensions, side, RECIPES["row"]), a * sizes, b, g)[0]
    tensor = run(plan_for(a, b, dimensions, side, RECIPES["current"]), a * sizes, b, g)[
        0
    ]
    assert np.all(np.any(np.asarray(per_row.astype(jnp.float32)), axis=1))
    assert not np.any(np.asarray(tensor.astype(jnp.float32))[-1])


def test_f16_result_does_not_overflow_before_it_is_scaled():
    a, b, g, dimensions, side = problem("x @ w", "float16")
    # Codes reach 256² · 64 = 4.2e6, the product itself only 64.
    a, b = jnp.ones_like(a), jnp.ones_like(b)
    out, *_ = run(plan_for(a, b, dimensions, side, CurrentScaling()), a, b, g)
    assert out.dtype == jnp.float16
    assert np.array_equal(out, np.full(out.shape, 64.0))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["current", "row", "static", "mx", "int8"])
def test_inf_and_nan_reach_the_results(which, bad, name):
    tensors = [jnp.ones((32, 32), jnp.bfloat16) for _ in range(3)]
    tensors[which] = tensors[which].at[3, 5].set(bad)
    a, b, _ = tensors
    plan = plan_for(a, b, (((1,), (0,)), ((), ())), 1, RECIPES[name])
    results = run(plan, *tensors)
    touched = {0: (0, 2), 1: (0, 1), 2: (1, 2)}[which]
    for i in touched:
        assert not np.all(np.isfinite(np.asarray(results[i].astype(jnp.float32)))), i


@pytest.mark.parametrize("transposed", [False, True])
def test_residuals_are_eight_bits_wide(monkeypatch, transposed):
    monkeypatch.setattr(_operands, "transposing_pays", lambda: transposed)
    a, b, g, dimensions, side = problem("x @ w")
    plan = plan_for(a, b, dimensions, side, CurrentScaling())
    _, back = jax.vjp(lambda a, b: fp8_dot(plan, a, b, None, None), a, b)
    saved = [x for x in jax.tree.leaves(back) if getattr(x, "ndim", 0)]
    # Each operand once, in the order in which the backward pass sums over it.
    assert {x.shape for x in saved} == {
        a.shape[::-1] if transposed else a.shape,
        b.shape,
    }
    assert len(saved) == 2
    assert all(x.dtype == jnp.uint8 for x in saved)  # the bytes of 8-bit numbers


def test_probe_brings_back_the_largest_magnitudes():
    a, b, g, dimensions, side = problem("w @ x (Equinox)")
    plan = plan_for(a, b, dimensions, side, DelayedScaling())
    seen = jnp.full(3, 4.0)
    _, back = jax.vjp(lambda p: fp8_dot(plan, a, b, seen, p), jnp.zeros(3))
    (observed,) = back(g)
    want = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (b, a, g)]
    assert np.array_equal(observed, want)


def test_forward_mode_is_an_error():
    a, b, g, dimensions, side = problem("x @ w")
    plan = plan_for(a, b, dimensions, side, CurrentScaling())
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda a: fp8_dot(plan, a, b, None, None), (a,), (a,))


# --- MX blocks ------------------------------------------------------------------------


def test_blocks_have_scales_of_their_own_rounded_up():
    x = jnp.concatenate([jnp.full((1, 32), 449.0), jnp.full((1, 32), 2.0**-40)], axis=1)
    blocks = to_blocks(MXFP8(), "weight", x)
    assert blocks.scale.shape == (1, 2)
    assert np.array_equal(blocks.scale.astype(jnp.float32), [[2.0, 2.0**-48]])
    assert np.array_equal(from_blocks(blocks, np.dtype(np.float32))[0, 32:], x[0, 32:])
