"""Codecs of master weights: what is kept, within which bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from models import equations
from mpx._quant._codecs import BitDelta, RoundedMaster, UlpFraction, place, random_bits
from mpx.testing import assert_trees_equal
from quant_cases import (
    BF16,
    BLOCK,
    F16,
    F32,
    INT8,
    INT16,
    MASTERS,
    check_master,
    compiled,
    floats,
    half_ulp,
    masters,
    patterns_of,
    round_trip,
)

# --- master weights -------------------------------------------------------------------


@masters
def test_every_mantissa_at_both_ends_of_a_binade_is_kept_within_the_bound(codec, dtype):
    # All bits that parameters lack, and of the others those at both ends of the binade.
    lowest, highest = np.arange(4 << 16) + (127 << 23), np.arange(-4 << 16, 0)
    weight = floats(np.concatenate([lowest, highest + (128 << 23)]))
    _, correction, decoded = check_master(codec, dtype, weight)
    distance = np.abs(patterns_of(decoded) - patterns_of(weight))
    worst = {(INT8, BF16): 258, (INT16, BF16): 1, (INT8, F16): 32, (INT16, F16): 0}
    if isinstance(codec, BitDelta):
        worst |= {(INT8, BF16): 128, (INT16, BF16): 0}
    assert distance.max() == worst[codec.dtype, dtype]  # what the docstrings say
    assert np.mean(correction != 0) > 0.98  # they survive the compiler


@masters
@pytest.mark.parametrize("sign", [0, 1])
def test_every_exponent_is_kept_within_the_bound(codec, dtype, sign):
    random = np.random.default_rng(0)
    if isinstance(codec, BitDelta):
        exponents = np.arange(0, 255)  # subnormal numbers and all others
    elif dtype == BF16:
        # Below, what is left of a weight is no normal f32 number and may be lost.
        lowest = 17 if codec.dtype == INT8 else 24  # 2⁻¹¹⁰ or 2⁻¹⁰³
        exponents = np.arange(lowest, 254)
    else:
        exponents = np.arange(60, 142)  # far below 2⁻²⁴ … 2¹⁵
    mantissa = random.integers(0, 2**23, (exponents.size, 1 << 11))
    edges = np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x18000, 0x7F8000, 0x7FFFFF]
    )
    mantissa[:, : edges.size] = edges
    weight = floats((sign << 31) | (exponents[:, None] << 23) | mantissa)
    if isinstance(codec, BitDelta):
        weight = weight[np.isfinite(weight.astype(BF16).astype(F32))]
    check_master(codec, dtype, weight.ravel())


@pytest.mark.some(3)
@masters
def test_encoding_what_was_decoded_changes_nothing(codec, dtype):
    weight = floats(np.arange(127 << 23, 128 << 23))
    param, correction, decoded = map(np.asarray, compiled(codec, dtype)(weight))
    again = [np.asarray(x) for x in compiled(codec, dtype)(decoded)]
    if isinstance(codec, BitDelta):
        assert_trees_equal(again, [param, correction, decoded])
        return
    # A weight at a tie has two names: the parameter below it and that above it. Below a
    # power of two the second has twice the unit.
    top = np.iinfo(codec.dtype).max
    moved = decoded != again[2]
    assert np.all(np.abs(correction[moved]) == top)
    assert np.mean(moved) < (2.0**-15 if codec.dtype == INT8 else 2.0**-23)
    third = compiled(codec, dtype)(again[2])
    assert np.array_equal(np.asarray(third[2]), again[2])


@masters
def test_special_weights_are_kept(codec, dtype):
    weight = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])
    # The first and the last nan there are, of either sign; GPUs compute the last one.
    nans = floats([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
    weight = np.concatenate([weight, nans])
    param, _, decoded = map(np.asarray, compiled(codec, dtype)(weight))
    for stored in (param.astype(np.float32), decoded):
        assert_trees_equal(np.isnan(stored), np.isnan(weight))
        np.testing.assert_array_equal(stored, weight)
    if isinstance(codec, BitDelta):
        assert np.signbit(decoded[1])


@pytest.mark.some(2)
@masters
def test_weights_are_placed_all_over_the_rounding_interval(codec, dtype):
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    every = every[~np.isnan(every.astype(F32))]
    params = np.repeat(every[None], 64, axis=0)

    @jax.jit
    def placed_with(params, seed):
        correction = place(codec, params, random_bits(params.shape, seed))
        decoded = codec.decode(params, correction, BLOCK)
        return correction, decoded, codec.encode(decoded, dtype, BLOCK)[0]

    correction, decoded, again = map(np.asarray, placed_with(params, jnp.uint32(3)))
    assert correction.dtype == codec.dtype
    size, tiny = np.abs(every.astype(np.float64)), float(jnp.finfo(dtype).tiny)
    placed = np.isfinite(size) & (size >= tiny)
    assert not np.any(correction[:, ~placed])
    # No parameter changes, not even in a step that does nothing.
    rounded = np.asarray(jnp.asarray(decoded).astype(dtype))
    for new in (again, rounded):
        assert_trees_equal(new.view("u2")[:, placed], params.view("u2")[:, placed])
    if not isinstance(codec, BitDelta) and dtype == BF16:
        placed &= size > 2.0**-100  # below, corrections may be lost
    # Intervals end half-way to the neighbours: at half the distance below a power of two.
    every, size, half = every[placed], size[placed], half_ulp(every[placed])
    away = np.abs(decoded[:, placed].astype(np.float64)) - size
    is_power = (np.frexp(size)[0] == 0.5) & (size > tiny)
    share = away / np.where((away < 0) & is_power, half / 2, half)
    assert np.max(np.abs(share)) <= 1
    # Evenly from -1 to 1, over all parameters and for each of them.
    for end in np.linspace(-0.98, 0.98, 9):
        assert np.mean(share < end) == pytest.approx((1 + end) / 2, abs=1 / 128)
    assert np.all(np.abs(np.std(share, axis=0) - np.sqrt(1 / 3)) < 0.2)
    other = np.asarray(placed_with(params, jnp.uint32(4))[0])[:, placed]
    assert np.mean(other == correction[:, placed]) < 1 / 60


def test_bit_deltas_reach_beyond_the_largest_bf16():
    largest, end = 0x7F7F8000, 0x7F7FFFFF  # the first that is inf in bf16, the last f32
    weight = floats(np.arange(largest, end + 1))
    for dtype in (INT8, INT16):
        param, _, decoded = map(np.asarray, compiled(BitDelta(dtype), BF16)(weight))
        assert np.all(np.isinf(param.astype(np.float32)))
        distance = np.abs(patterns_of(decoded) - patterns_of(weight))
        assert distance.max() == (128 if dtype == INT8 else 0)
        # Rounded to units of 256 the last 128 numbers are inf.
        lost = np.isinf(decoded)
        assert lost.sum() == (128 if dtype == INT8 else 0)
        assert np.all(lost[-lost.sum() or len(lost) :])


@pytest.mark.parametrize(
    ("codec", "unit"),
    [(BitDelta(), 2**8), (RoundedMaster(), 2**16)],
    ids=["24 bits", "16 bits"],
)
def test_small_updates_add_up(codec, unit):
    """None is held back, not even where the weight is a tie between two parameters."""
    update, steps, start = np.int32(unit * 0.75), 4000, jnp.ones(256)

    def step(stored, _):
        pattern = lax.bitcast_convert_type(codec.decode(*stored, BLOCK), jnp.int32)
        weight = lax.bitcast_convert_type(pattern + update, jnp.float32)
        return codec.encode(weight, BF16, BLOCK), None

    first = codec.encode(start, BF16, BLOCK)
    stored, _ = jax.jit(lambda: lax.scan(step, first, jnp.arange(steps)))()
    units = (patterns_of(codec.decode(*stored, BLOCK)) - patterns_of(start)) / unit
    assert np.all(units == steps)  # each update is rounded up to a unit


def test_weights_beyond_f16_become_infinite():
    weight = np.float32([65519.0, 65520.0, -1e30])
    param, _, decoded = compiled(UlpFraction(), F16)(weight)
    assert param.tolist() == [65504.0, np.inf, -np.inf]
    np.testing.assert_allclose(decoded, [65519.0, np.inf, -np.inf], rtol=2.0**-12)


@pytest.mark.parametrize("correction", [-127, -1, 0, 1, 127])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_parameter_that_was_set_to_zero_is_zero(correction, zero):
    # As a user does who prunes weights: the correction is that of the old parameter.
    for codec, dtype in MASTERS.values():
        old = jnp.asarray([correction], codec.dtype)
        weight = codec.decode(jnp.asarray([zero], dtype), old, BLOCK)
        assert abs(float(weight[0])) <= 2.0**-25  # half an ulp of zero in f16


@pytest.mark.some(3)
@masters
def test_compiled_and_not_is_the_same(codec, dtype):
    random = np.random.default_rng(1)
    weight = random.normal(size=4096).astype(np.float32) * 0.02
    one = [np.asarray(x) for x in compiled(codec, dtype)(weight)]
    other = [np.asarray(x) for x in round_trip(codec, dtype, jnp.asarray(weight))]
    if codec.dtype == INT16 and isinstance(codec, UlpFraction):
        # A compiler may fuse a product and a sum, which then are rounded once: a code
        # that was within 2⁻⁸ of a tie falls to the other side.
        apart = np.abs(one[1].astype(int) - other[1])
        assert apart.max() <= 1
        assert np.mean(apart) < 2.0**-7
        one, other = one[:1], other[:1]
    assert_trees_equal(one, other)


@masters
def test_no_rounded_number_is_cast_up_again(codec, dtype):
    # XLA removes such a pair of casts (on GPUs), and with it what is left of a weight.
    jaxpr = jax.make_jaxpr(lambda w: codec.encode(w, dtype, BLOCK))(jnp.ones((2, 32)))
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert casts
    assert not [e for e in casts if e.invars[0].aval.dtype == dtype]


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_without_corrections_a_parameter_is_the_rounded_weight(dtype):
    weight = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    param, correction = RoundedMaster().encode(jnp.asarray(weight), dtype, BLOCK)
    assert correction is None
    assert_trees_equal(param, jnp.asarray(weight.astype(dtype)))
    decoded = RoundedMaster().decode(param, None, BLOCK)
    assert_trees_equal(decoded, jnp.asarray(weight.astype(dtype).astype(np.float32)))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_block_rounds_as_numpy_does_under_jit_too(dtype):
    random = np.random.default_rng(0)
    lowest = 20 if dtype == BF16 else 80  # below the subnormal numbers of f16
    pattern = random.integers(lowest << 23, 255 << 23, 1 << 20)
    weight = floats(pattern | (random.integers(0, 2, pattern.size) << 31))
    rounded = jax.jit(lambda x: BLOCK.rounded(x, dtype))(weight)
    with np.errstate(over="ignore"):
        expected = weight.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(rounded, expected)
