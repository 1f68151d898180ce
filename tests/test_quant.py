"""Codecs of moments; rounding with a dither."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpx._jax._compat import Literal
from mpx._optim._packing import encode_moment, split
from mpx._quant._codecs import (
    BitDelta,
    Block,
    Quantized,
    RoundedMaster,
    SoftsignInt8,
    SqrtUint8,
    UlpFraction,
    _element_index,
    dither_of,
    random_bits,
)
from mpx._residuals._codes import encode
from mpx.testing import assert_trees_equal
from quant_cases import (
    BF16,
    BLOCK,
    F16,
    F32,
    floats,
    moments,
)

# --- moments --------------------------------------------------------------------------


def groups(scale, count=512, size=32):
    """Returns groups of many shapes: normal, sparse, with an outlier, constant, zero."""
    x = np.random.default_rng(0).normal(size=(count, size))
    x[1::5, 3:] *= 1e-3
    x[2::5, ::2] = 0.0
    x[3::5] = x[3::5, :1]
    x[4::5] *= 1e-2
    x[-1] = 0.0
    return (x / np.abs(x).max() * scale).astype(np.float32)


def moment_input(codec, scale):
    x = groups(scale)
    return np.abs(x) if isinstance(codec, SqrtUint8) else x


# One program a codec and shape.
@functools.partial(jax.jit, static_argnums=(0, 2))
def encoded(codec, x, block=BLOCK, rounding=None):
    return codec.encode(x, block, rounding)


@functools.partial(jax.jit, static_argnums=0)
def decoded_of(codec, stored):
    return codec.decode(stored, BLOCK)


def stored_of(codec, x):
    stored = encoded(codec, x)
    decoded = decoded_of(codec, stored)
    codes, scale = np.asarray(stored.codes), np.asarray(stored.scale)
    assert (codes.shape, scale.shape) == (x.shape, x.shape[:-1])
    return codes, scale, np.asarray(decoded)


# The largest number of a group; f16 scales hold 6e-5 … 65504 to 11 bits.
RANGES = [1e30, 1e6, 1.0, 1e-4, 1e-12, 1e-30]


@pytest.mark.parametrize("peak", RANGES)
def test_first_moments_are_off_by_half_a_code_at_most(peak):
    x = groups(peak)
    codes, scale, decoded = stored_of(SoftsignInt8(), x)
    assert (codes.dtype, scale.dtype) == (np.int8, BF16)
    largest = np.abs(x).max(-1)
    assert np.array_equal(scale.view("u2"), largest.astype(BF16).view("u2"))
    q = np.abs(codes.astype(np.float64))
    assert np.all(q.max(-1)[largest > 0] == 127)
    # Half a code, and less than 2⁻¹⁴ of one for six roundings of numbers up to 127.
    above = q + 0.5 + 2.0**-14
    width = above / (254 - above) - q / (254 - q)
    error = np.abs(decoded.astype(np.float64) - x)
    s = scale.astype(np.float64)[:, None]
    assert np.all(error <= s * width)
    assert np.all(error <= s / 127 * (1 + 2.0**-7))  # what the docstring says
    near = q <= 1
    assert np.all((error <= s / 500)[near])


@pytest.mark.parametrize("peak", [*RANGES, np.finfo(np.float32).max])
def test_roots_of_second_moments_are_off_by_half_a_code_at_most(peak):
    x = np.abs(groups(peak))
    codes, scale, decoded = stored_of(SqrtUint8(), x)
    assert (codes.dtype, scale.dtype) == (np.uint8, F32)
    np.testing.assert_allclose(scale, np.sqrt(x.max(-1)), rtol=2.0**-23)
    assert np.all(codes >= 1)  # nothing becomes zero beside a number above zero
    roots = np.sqrt(x.astype(np.float64))
    error = np.abs(np.sqrt(decoded.astype(np.float64)) - roots)
    unit = scale.astype(np.float64)[:, None] / 255
    rounding = 2.0**-20  # of the root, in units of the scale: a few f32 roundings
    tiny = roots < unit / 2
    assert np.all((error <= unit * (0.5 + 255 * rounding))[~tiny])
    assert np.all((error <= unit * (1 + rounding))[tiny])
    assert np.all(np.isfinite(decoded))


@moments
@pytest.mark.parametrize("peak", [1.0, 1e-3])
def test_scales_of_both_formats_decode_to_the_same_numbers(codec, peak):
    x = moment_input(codec, peak)
    *_, decoded = stored_of(codec, x)
    *_, reference = stored_of(type(codec)(), x)
    largest = np.abs(x).max(-1, keepdims=True)
    # Two neighbouring codes at most, and a scale that is rounded to 8 or 11 bits.
    assert np.all(np.abs(decoded - reference) <= largest * (2 / 63.5 + 2.0**-8))


@pytest.mark.parametrize("peak", [1e5, 1e30])
def test_f16_scales_saturate_with_the_right_sign(peak):
    mu = groups(peak)
    codes, scale, decoded = stored_of(SoftsignInt8(F16), mu)
    assert np.all(np.isfinite(decoded))
    assert np.all(np.sign(codes) == np.sign(mu) * (codes != 0))
    beyond = np.abs(mu) > 65504
    assert np.all(np.abs(codes[beyond]) == 127)
    assert np.all(scale[beyond.any(-1)] == 65504)
    nu = np.abs(mu) ** 2 if peak < 1e18 else np.abs(mu)
    codes, _, decoded = stored_of(SqrtUint8(F16), nu)
    assert np.all(np.isfinite(decoded))
    assert np.all(codes[nu > 65504.0**2] == 255)


@pytest.mark.parametrize("codec", [SoftsignInt8(F16), SqrtUint8(F16)])
def test_groups_below_f16_scales_are_zeros(codec):
    small = np.float32(1e-8 if isinstance(codec, SoftsignInt8) else 1e-16)
    *_, decoded = stored_of(codec, np.full((1, 32), small))
    assert not decoded.any()


@moments
@pytest.mark.parametrize("peak", [1.0, 3e4, 1e-3])
def test_encoding_decoded_moments_changes_no_code(codec, peak):
    x = moment_input(codec, peak)
    codes, scale, decoded = stored_of(codec, x)
    again, scale_again, decoded_again = stored_of(codec, decoded)
    assert np.array_equal(again, codes)
    if codec.scale_dtype == F32:  # is the root of a square of a product, in f32
        np.testing.assert_allclose(scale_again, scale, rtol=4 * 2.0**-24)
        np.testing.assert_allclose(decoded_again, decoded, rtol=12 * 2.0**-24)
    else:
        assert np.array_equal(scale_again.view("u2"), scale.view("u2"))
        assert np.array_equal(decoded_again, decoded)


@moments
def test_what_is_not_finite_is_stored_as_zero_and_its_group_lives_on(codec):
    x = moment_input(codec, 1.0)
    clean = x.copy()
    for place, value in enumerate([np.inf, -np.inf, np.nan]):
        if value < 0 and isinstance(codec, SqrtUint8):
            continue
        x[place, 7], clean[place, 7] = value, 0.0
    name = "nu" if isinstance(codec, SqrtUint8) else "mu"
    format = "flashoptim" if codec.scale_dtype == F16 else "mpx"
    got, expected = (
        encode_moment(name, jnp.asarray(x), format, 32) for x in (x, clean)
    )
    assert_trees_equal(got, expected)
    assert_trees_equal(got.scale[:, 0], stored_of(codec, clean)[1])


@moments
def test_zeros_are_stored_as_zeros(codec):
    codes, scale, decoded = stored_of(codec, np.zeros((3, 32), np.float32))
    assert not codes.any() or isinstance(codec, SqrtUint8)
    assert not scale.astype(np.float32).any()
    assert not decoded.any()


@pytest.mark.some(2)
@moments
def test_moments_are_the_same_compiled_and_not(codec):
    x = moment_input(codec, 1e-3)
    codes, scale, _ = stored_of(codec, x)
    eager = codec.encode(jnp.asarray(x), BLOCK)
    assert_trees_equal(np.asarray(eager.scale), scale)
    # A compiler may fuse a product and a sum, so that codes differ at ties; above it is
    # derived that they are computed to 2⁻¹⁴.
    apart = np.abs(np.asarray(eager.codes).astype(int) - codes)
    assert apart.max() <= 1
    s = np.maximum(scale.astype(np.float64), 1e-30)[:, None]
    if codec.scale_dtype == F16:
        s = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30)
        s = np.sqrt(s) if isinstance(codec, SqrtUint8) else s
    if isinstance(codec, SqrtUint8):
        exact = 255 * np.sqrt(x.astype(np.float64)) / s
    else:
        exact = 254 * (x / s) / (1 + np.abs(x / s))
    assert np.all(np.abs(exact % 1 - 0.5)[apart > 0] < 2.0**-14)


def test_a_first_moment_above_the_reciprocals_of_f32_is_lost():
    # 1 / 2¹²⁷ is subnormal, which hardware takes for zero; the docstring says so.
    for peak, kept in ((2.0**125, True), (2.0**126, False)):
        x = np.linspace(-peak, peak, 32, dtype=np.float32)[None]
        codes, *_ = stored_of(SoftsignInt8(), x)
        assert bool(codes.any()) is kept


# --- dithered -------------------------------------------------------------------------

LARGEST = 0.5 - 2.0**-12
dithers = pytest.mark.parametrize("dither", [-LARGEST, -0.25, 0.0, 0.25, LARGEST])
dithered = pytest.mark.parametrize(
    "codec", [SoftsignInt8(), SqrtUint8()], ids=["mu", "nu"]
)


class Off(Block):
    """Roots and reciprocals that are off by so many ulps, as those of a GPU."""

    def __init__(self, ulps):
        self._factor = np.float32(1 + ulps * 2.0**-23)

    def sqrt(self, x):
        return super().sqrt(x) * self._factor

    def reciprocal(self, x):
        return super().reciprocal(x) * self._factor


def dithered_of(codec, x, dither, block=BLOCK):
    return jax.tree.map(np.asarray, encoded(codec, x, block, jnp.float32(dither)))


def test_dithers_are_small_enough_and_spread_evenly():
    moments, masters = map(np.asarray, dither_of(jnp.arange(1, 2**16)))
    assert np.max(np.abs(moments)) <= LARGEST
    assert masters.min() >= 0
    assert masters.max() < 1
    # N numbers of such a sequence are at most about log₂ N / N from even.
    for numbers, start in ((moments, -0.5), (masters, 0.0)):
        for part in (numbers[:100], numbers[5000:6000], numbers):
            even = (np.arange(len(part)) + 0.5) / len(part) + start
            apart = np.max(np.abs(np.sort(part) - even))
            assert apart < np.log2(len(part)) / len(part) + 2.0**-11


def test_dithers_of_moments_and_masters_do_not_fall_together():
    # A moment that is stored as one code in a part of the steps, and an update that its
    # next step rounds up in a part of them: both happen in the product of the parts.
    steps = 20000
    moments, masters = map(np.asarray, dither_of(jnp.arange(1, steps + 2)))
    for lag in (0, 1):
        before, now = moments[: steps - lag] + 0.5, masters[lag:steps]
        for one in (0.02, 0.3, 0.8):
            for two in (0.02, 0.3, 0.8):
                both = np.sum((before >= 1 - one) & (now >= 1 - two))
                # 20 in all: random numbers would be off by √(steps · part), up to 100.
                assert abs(both - one * two * steps) < 20


@dithers
@dithered
@pytest.mark.parametrize("block", [Off(-2), BLOCK, Off(2)], ids=["-2", "0", "2"])
def test_no_dither_carries_the_largest_code_over(codec, dither, block):
    """128 would be stored as -128, and 256 as 0."""
    peak = floats(0x3F800000 + np.arange(0, 2**23, 2**7))  # 128 for each bf16 number
    x = np.stack([peak, peak if isinstance(codec, SqrtUint8) else -peak, 0 * peak], -1)
    codes, _ = dithered_of(codec, x, dither, block)
    assert np.all(
        codes == ([255, 255, 1] if isinstance(codec, SqrtUint8) else [127, -127, 0])
    )


@dithers
@dithered
@pytest.mark.parametrize("peak", [1e30, 1.0, 1e-12, 1e-30])
def test_dithered_codes_are_off_by_one_at_most(codec, dither, peak):
    x = moment_input(codec, peak)
    codes, scale = dithered_of(codec, x, dither)
    s = np.maximum(scale.astype(np.float64), 1e-40)[:, None]
    if isinstance(codec, SqrtUint8):
        exact = np.maximum(255 * np.sqrt(x.astype(np.float64)) / s, 1)
    else:
        exact = 254 * (x / s) / (1 + np.abs(x / s))
    # Half a code for rounding, and at most as much for the dither.
    assert np.max(np.abs(codes - exact)) <= 0.5 + abs(dither) + 2.0**-12


@dithers
@dithered
def test_what_was_decoded_is_encoded_as_it_was(codec, dither):
    top = 255 if isinstance(codec, SqrtUint8) else 127
    lowest = 1 if isinstance(codec, SqrtUint8) else -127
    every = np.arange(lowest, top + 1)
    codes = np.stack([every, np.full_like(every, top)], -1).astype(codec.code_dtype)
    scale = np.linspace(1, 2, len(every)).astype(codec.scale_dtype)
    x = codec.decode(Quantized(jnp.asarray(codes), jnp.asarray(scale)), BLOCK)
    again, same = dithered_of(codec, x, dither)
    np.testing.assert_array_equal(again, codes)
    if isinstance(codec, SoftsignInt8):
        np.testing.assert_array_equal(same, scale)


@dithered
def test_dithered_codes_are_right_on_average(codec):
    x = moment_input(codec, 1.0)
    steps = dither_of(jnp.arange(1, 1025)).moments

    @jax.jit
    def decoded(dither):
        stored = codec.encode(jnp.asarray(x), BLOCK, dither)
        return codec.decode(stored, BLOCK)

    mean = np.mean(np.asarray(lax.map(decoded, steps), np.float64), axis=0)
    if isinstance(codec, SqrtUint8):
        # The square of a root that is off by half a code at most is a little more.
        small = np.sqrt(x / np.maximum(x.max(-1, keepdims=True), 1e-30)) < 1 / 255
        allowed = 2 * np.sqrt(x * x.max(-1, keepdims=True)) / 255 * 0.02
        allowed += x.max(-1, keepdims=True) / 255**2
        assert np.all((np.abs(mean - x) <= allowed)[~small])
    else:
        # 1024 thresholds are 0.01 from even. The largest number is as exact as its scale.
        error, peak = np.abs(mean - x), np.abs(x).max(-1, keepdims=True)
        largest = np.abs(x) == peak
        assert np.all((error <= peak * 2.0**-7 * 0.02)[largest])
        # For other numbers codes and scale are not independent: a part f of the steps
        # has the larger scale, which shifts a code by δ < 1/2, and the mean by at most
        # f δ or min(f, δ) (1 - max(f, δ)): a quarter of a code.
        q = 254 * np.abs(x) / (np.maximum(peak, 1e-30) + np.abs(x))
        code = 254 * peak / np.square(253 - q)
        assert np.all(error <= code * (0.25 + 0.02))


@dithered
def test_zeros_are_stored_as_zeros_with_any_dither(codec):
    zeros = dithered_of(codec, np.zeros((1, 32), np.float32), LARGEST)
    assert not zeros.scale.astype(np.float32).any()


THRESHOLDS = [0.0, 0.25, 0.5, 1 - 2.0**-24]
# With the unit that is stored, for a weight of 1 and above, and how far a decoded weight
# is off, in units: no f32 number is 1/127 of a power of two.
SMALL_MASTERS = {
    "24 bits": (BitDelta(), BF16, 2.0**-15, 0.0),
    "f16 with 8 bits": (UlpFraction(), F16, 2.0**-11 / 127, 1 / 64),
    "bf16 alone": (RoundedMaster(), BF16, 2.0**-7, 0.0),
    "f16 alone": (RoundedMaster(), F16, 2.0**-10, 0.0),
}
small_masters = pytest.mark.parametrize(
    ("codec", "dtype", "unit", "off"), SMALL_MASTERS.values(), ids=SMALL_MASTERS
)


@functools.cache
def walker(codec, dtype):
    """Adds updates to weights of 1.25 in turn, each rounded as its step says."""

    @jax.jit
    def walk(updates):
        def step(stored, x):
            count, update = x
            weight = codec.decode(*stored, BLOCK) + update
            up = dither_of(count).masters
            return codec.encode(weight, dtype, BLOCK, up), None

        first = codec.encode(jnp.full(updates.shape[1:], 1.25), dtype, BLOCK)
        steps = jnp.arange(1, len(updates) + 1)
        stored, _ = lax.scan(step, first, (steps, updates))
        return codec.decode(*stored, BLOCK) - 1.25

    return walk


PARTS = np.float32([1, 0.76, 0.5, 0.1, 0.01, 0, -0.004, -0.3, -0.9])


def in_ulps(update):
    """Rounds updates of weights around 1.25 such that f32 sums are exact."""
    return np.float32(np.sign(update) * np.ceil(np.abs(update) * 2.0**23) * 2.0**-23)


@small_masters
def test_a_constant_update_of_a_master_is_kept_however_small(codec, dtype, unit, off):
    steps = 4000
    # The weight stays within a power of two.
    update = in_ulps(min(unit / 16, 0.2 / steps) * PARTS)
    moved = np.asarray(walker(codec, dtype)(np.tile(update, (steps, 1))), np.float64)
    error = np.abs(moved - steps * update.astype(np.float64)) / unit
    assert np.all(error < np.log2(steps) / 2 + off * steps)


@small_masters
@pytest.mark.parametrize("period", [2, 3, 8, 100])
def test_updates_that_add_up_to_nothing_leave_a_master_where_it_was(
    codec, dtype, unit, off, period
):
    """Rounded at random it would be off by the root of the number of steps, 63, or so."""
    steps = 4000
    signs = np.where(np.arange(steps) % period < period // 2, 1, -1)
    signs[np.arange(steps) % period == 2 * (period // 2)] = 0
    updates = signs[:, None] * in_ulps(unit * np.abs(PARTS) / 2)
    moved = np.asarray(walker(codec, dtype)(updates)) / unit
    assert np.all(np.abs(moved) < 10 + off * steps)


@functools.partial(jax.jit, static_argnums=(0, 1))
def nearest_master(codec, dtype, weight):
    stored = codec.encode(weight, dtype, BLOCK)
    return stored, codec.decode(*stored, BLOCK)


@functools.partial(jax.jit, static_argnums=(0, 1))
def dithered_master(codec, dtype, weight, dither):
    return codec.encode(weight, dtype, BLOCK, dither)


@functools.partial(jax.jit, static_argnums=0)
def decoded_master(codec, stored):
    return codec.decode(*stored, BLOCK)


@pytest.mark.parametrize("dither", THRESHOLDS)
@small_masters
def test_no_threshold_moves_a_master_that_was_stored(codec, dtype, unit, off, dither):
    random = np.random.default_rng(0)
    weight = np.float32(random.normal(size=4096))
    first, weight = nearest_master(codec, dtype, weight)
    again = dithered_master(codec, dtype, weight, jnp.float32(dither))
    if not off:
        assert_trees_equal(again, first)
        return
    # With a chance of `off` it moves by one, if it is not half-way between parameters.
    tie = np.abs(np.asarray(first[1])) == 127
    codes = np.asarray(again[1]).astype(int) - np.asarray(first[1])
    assert np.max(np.abs(codes[~tie])) <= (dither not in (0.25, 0.5))


@pytest.mark.parametrize("dither", THRESHOLDS)
@small_masters
def test_dithered_masters_are_off_by_less_than_a_unit(codec, dtype, unit, off, dither):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38], np.float32)
    weight = np.float32(np.random.default_rng(0).uniform(1, 2, size=4096))
    encode = functools.partial(
        dithered_master, codec, dtype, dither=jnp.float32(dither)
    )
    decoded = np.asarray(decoded_master(codec, encode(weight)))
    assert np.max(np.abs(decoded.astype(np.float64) - weight)) < unit * (1 + 16 * off)
    kept = np.asarray(decoded_master(codec, encode(special)))
    np.testing.assert_array_equal(kept[:5], special[:5])
    if not off:
        assert np.signbit(kept[1])
    if dtype == BF16:
        np.testing.assert_allclose(kept[5], special[5], rtol=2.0**-7)


# --- the assembler of GPUs ------------------------------------------------------------

# They leave the lowest bits as they are, or LLVM knows that they do.
LEAVE_LOW_BITS = {
    *("and", "or", "xor", "add", "sub", "convert_element_type", "reshape", "squeeze"),
    *("broadcast_in_dim", "concatenate", "slice", "transpose", "shift_right_logical"),
    *("shift_right_arithmetic", "expand_dims"),
}


def stored_bits_of_floats(func, *args):
    """Returns the casts that store the lowest bits of what a float operation made."""
    found = []

    def search(jaxpr, are_bits):
        """Returns which results have the low bits of floats, given which operands have."""
        of = dict(zip(jaxpr.invars, are_bits, strict=True))
        known = lambda x: not isinstance(x, Literal) and of.get(x, False)  # noqa: E731
        for eqn in jaxpr.eqns:
            name, read = eqn.primitive.name, [*map(known, eqn.invars)]
            if "jaxpr" in eqn.params:
                inner = search(eqn.params["jaxpr"].jaxpr, read)
                of |= zip(eqn.outvars, inner, strict=True)
                continue
            (out,) = eqn.outvars
            from_float = (
                name == "bitcast_convert_type" and eqn.invars[0].aval.dtype == F32
            )
            is_moved = name.startswith("shift") and eqn.invars[1].val != 0
            of[out] = from_float or (
                name in LEAVE_LOW_BITS and any(read) and not is_moved
            )
            if (
                name == "convert_element_type"
                and of[out]
                and out.aval.dtype.itemsize < 4
            ):
                found.append(eqn)
        return [*map(known, jaxpr.outvars)]

    traced = jax.make_jaxpr(func)(*args).jaxpr
    search(traced, [False] * len(traced.invars))
    return found


def test_no_low_bits_of_a_float_are_stored():
    """NVIDIA's assembler up to CUDA 13.0 converts the float instead."""
    x, unit = jnp.ones((64, 32)), jnp.float32(0.5)
    assert stored_bits_of_floats(
        lambda x: lax.bitcast_convert_type(x + 1, jnp.int32).astype(jnp.int8), x
    )
    for codec in (SoftsignInt8(), SoftsignInt8(F16), SqrtUint8(), SqrtUint8(F16)):
        for rounding in (None, unit):
            stored = functools.partial(codec.encode, block=BLOCK, rounding=rounding)
            assert not stored_bits_of_floats(stored, x)
    for codec, dtype in ((UlpFraction(), F16), (BitDelta(), BF16)):
        for size in (np.int8, np.int16):
            codec = dataclasses.replace(codec, dtype=np.dtype(size))
            stored = functools.partial(codec.encode, dtype=dtype, block=BLOCK)
            assert not stored_bits_of_floats(stored, x)
    scales = jnp.ones(8, jnp.bfloat16), jnp.ones(8)
    assert not stored_bits_of_floats(lambda *x: split([2 * y for y in x]), *scales)
    assert not stored_bits_of_floats(lambda x: encode(x, "int8"), x)


# --- pseudo-random bits ---------------------------------------------------------------

DRAWS = 1 << 16


def assert_mean(samples, expected, spread):
    """Compares with six standard errors: a chance of 2e-9, were the draws random."""
    error = np.abs(np.mean(samples, dtype=np.float64) - expected)
    assert error <= 6 * spread / np.sqrt(len(samples))


def test_random_bits_are_uniform_and_depend_on_the_seed():
    first, other = (np.asarray(random_bits((DRAWS,), jnp.uint32(i))) for i in (3, 4))
    for bit in range(32):
        assert_mean((first >> bit) & 1, 0.5, 0.5)
    one, two = first / 2.0**32 - 0.5, other / 2.0**32 - 0.5
    for product in (one[1:] * one[:-1], one * two):  # neighbours and seeds
        assert_mean(product, 0.0, 1 / 12)
    again = jax.jit(lambda: random_bits((DRAWS,), jnp.uint32(3)))()
    assert np.array_equal(first, np.asarray(again))


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 0, 3), (2, 3, 4)])
def test_elements_are_numbered_in_their_order(shape):
    expected = np.arange(int(np.prod(shape)), dtype=np.uint32).reshape(shape)
    assert_trees_equal(_element_index(shape), jnp.asarray(expected))
