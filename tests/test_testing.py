"""The tools for tests: ulp distances, and exact comparison of trees."""

from typing import NamedTuple

import hypothesis
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpx.testing import assert_trees_equal
from numerics import ulp_distance

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
FAR = np.iinfo(np.int64).max


# --- ulp_distance ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_distance_counts_the_numbers_in_between(dtype):
    unsigned = f"u{np.dtype(dtype).itemsize}"
    bits = np.arange(5).astype(unsigned)
    small = bits.view(dtype)  # 0 and the smallest subnormal numbers
    assert ulp_distance(small, np.zeros(5, dtype)).tolist() == [0, 1, 2, 3, 4]
    assert ulp_distance(small, -small).tolist() == [0, 2, 4, 6, 8]
    one = np.ones(5, dtype)
    above = (one.view(unsigned) + bits).view(dtype)
    assert ulp_distance(above, one).tolist() == [0, 1, 2, 3, 4]
    assert ulp_distance(-one, -above).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_largest_number_and_infinity_are_neighbours(dtype):
    largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
    assert ulp_distance(largest, np.array(np.inf, dtype)) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_far_from_every_number_and_near_to_nan(dtype):
    nan, one = np.array([np.nan], dtype), np.ones(1, dtype)
    assert ulp_distance(nan, -nan).tolist() == [0]
    assert ulp_distance(nan, one).tolist() == [FAR]
    assert ulp_distance(one, nan).tolist() == [FAR]


def test_distances_beyond_63_bits_are_the_largest_there_is():
    for shape in [(), (1,), (2, 1)]:
        low, high = np.full(shape, -1e308), np.full(shape, 1e308)
        distance = ulp_distance(low, high)
        assert (distance.dtype, distance.shape) == (np.int64, shape)
        assert np.all(distance == FAR)


def test_distance_takes_scalars_jax_arrays_and_strides():
    assert ulp_distance(np.float32(1), np.nextafter(np.float32(1), np.float32(2))) == 1
    x = jnp.ones((2, 3), jnp.bfloat16)
    assert ulp_distance(x, x + jnp.bfloat16(2**-7)).tolist() == [[1] * 3] * 2
    y = np.arange(6, dtype=np.float32)[::2]
    assert ulp_distance(y, y.copy()).tolist() == [0, 0, 0]
    assert ulp_distance(np.ones((0, 2)), np.ones((0, 2))).shape == (0, 2)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    *(hnp.arrays(np.float32, 8, elements={"allow_nan": False}) for _ in range(3))
)
def test_distance_is_a_metric(x, y, z):
    assert np.array_equal(ulp_distance(x, y), ulp_distance(y, x))
    assert np.array_equal(ulp_distance(x, y) == 0, x == y)
    assert np.all(ulp_distance(x, z) <= ulp_distance(x, y) + ulp_distance(y, z))


# --- assert_trees_equal ----------------------------------------------------------------


class Pair(NamedTuple):
    first: object
    second: object


quiet_nan = np.array(0x7FC00001, np.uint32).view(np.float32)
EQUAL = {
    "nothing": (None, None),
    "floats": (jnp.ones(2), jnp.ones(2)),
    "jax_and_numpy": (jnp.ones(2), np.ones(2, np.float32)),
    "same_nan": (np.array([quiet_nan]), np.array([quiet_nan])),
    "keys": (jax.random.key(0), jax.random.key(0)),
    "int4": (jnp.ones(3, jnp.int4), jnp.ones(3, jnp.int4)),
    "zero_size": (jnp.ones((0, 2)), jnp.zeros((0, 2))),
    "static": (["a", 1, jnp.sin], ["a", 1, jnp.sin]),
    "structs": (
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.float32),
    ),
}
DIFFERENT = {
    "value": (jnp.ones(2), jnp.array([1.0, 1.0000001])),
    "zero_sign": (jnp.zeros(1), -jnp.zeros(1)),
    "nan_bits": (np.array(quiet_nan), np.array(np.nan, np.float32)),
    "dtype": (jnp.ones(2), jnp.ones(2, jnp.bfloat16)),
    "dtype_of_zero_size": (jnp.ones((0, 2)), jnp.ones((0, 2), jnp.int32)),
    "same_bits": (np.zeros(1, np.int32), np.zeros(1, np.float32)),
    "shape": (jnp.ones((2, 1)), jnp.ones(2)),
    "shape_of_zero_size": (jnp.ones((0, 2)), jnp.ones((0, 3))),
    "key": (jax.random.key(0), jax.random.key(1)),
    "key_kind": (jax.random.key(0), jax.random.PRNGKey(0)),
    "key_impl": (jax.random.key(0), jax.random.key(0, impl="rbg")),
    "static": ("a", "b"),
    "array_and_float": (np.float32(1), 1.0),
    "string_and_array": ("a", jnp.ones(())),
    "struct": (
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.float16),
    ),
    "struct_and_array": (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(2)),
}


@pytest.mark.parametrize(("a", "b"), EQUAL.values(), ids=EQUAL)
def test_equal_trees_pass(a, b):
    assert_trees_equal(a, b)
    assert_trees_equal({"x": Pair(a, 1)}, {"x": Pair(b, 1)})


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT)
def test_first_different_leaf_is_named(a, b):
    with pytest.raises(AssertionError, match="^`x/second` differs: "):
        assert_trees_equal({"x": Pair(1, a), "y": 1}, {"x": Pair(1, b), "y": 2})
    with pytest.raises(AssertionError, match="^`` differs: "):
        assert_trees_equal(b, a)


@pytest.mark.parametrize("other", [{"y": 1}, {"x": None}, {"x": [1]}, [1], None])
def test_different_structures_are_shown(other):
    with pytest.raises(AssertionError, match="^structures differ: .* against "):
        assert_trees_equal({"x": 1}, other)
