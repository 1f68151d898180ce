"""Number formats: their constants, their names, and which dtypes count as floating."""

import inspect
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpx._jax._formats import (
    FORMATS,
    at_least_f32,
    is_float_dtype,
    parse_float_dtype,
    short_name,
)

# bits, exponent bits, mantissa bits, largest, smallest normal, smallest subnormal number
CONSTANTS = {
    "f64": (64, 11, 52, (2 - 2.0**-52) * 2.0**1023, 2.0**-1022, 5e-324),
    "f32": (32, 8, 23, (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149),
    "tf32": (19, 8, 10, (2 - 2.0**-10) * 2.0**127, 2.0**-126, 2.0**-136),
    "bf16": (16, 8, 7, (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-133),
    "f16": (16, 5, 10, 65504.0, 2.0**-14, 2.0**-24),
    "e4m3": (8, 4, 3, 448.0, 2.0**-6, 2.0**-9),
    "e5m2": (8, 5, 2, 57344.0, 2.0**-14, 2.0**-16),
    "e2m1": (4, 2, 1, 6.0, 1.0, 0.5),
    "e8m0": (8, 8, 0, 2.0**127, 2.0**-127, 2.0**-127),
}
DTYPES = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


def test_every_format_has_a_row_in_the_table():
    assert FORMATS.keys() == CONSTANTS.keys()


@pytest.mark.parametrize("name", CONSTANTS)
def test_format_has_the_constants_of_its_standard(name):
    form = FORMATS[name]
    assert form.name == name
    assert (
        form.bits,
        form.exponent,
        form.mantissa,
        form.max,
        form.tiny,
        form.smallest,
    ) == CONSTANTS[name]


@pytest.mark.parametrize("name", DTYPES)
def test_constants_agree_with_the_bits_of_the_dtype(name):
    form, dtype = FORMATS[name], DTYPES[name]

    def from_bits(bits):
        return float(np.array(bits, f"u{dtype.itemsize}").view(dtype))

    assert form.bits == 8 * dtype.itemsize == 1 + form.exponent + form.mantissa
    assert from_bits(1) == form.smallest
    assert from_bits(1 << form.mantissa) == form.tiny
    assert float(np.array(form.max).astype(dtype)) == form.max
    one = int(np.array(1, dtype).view(f"u{dtype.itemsize}"))
    assert from_bits(one + 1) - 1 == form.eps == 2.0**-form.mantissa


PARSED = {
    "f16": ["f16", "float16", "fp16", np.float16, jnp.float16, np.dtype("float16")],
    "bf16": ["bf16", "bfloat16", jnp.bfloat16, ml_dtypes.bfloat16],
    "f32": [
        "f32",
        "float32",
        "fp32",
        "full",
        np.float32,
        jnp.float32,
        jnp.dtype("float32"),
    ],
    "f64": ["f64", "float64", "fp64", np.float64, jnp.float64, float],
}


@pytest.mark.parametrize(
    ("name", "given"),
    [(name, given) for name, all_given in PARSED.items() for given in all_given],
    ids=str,
)
def test_dtype_is_understood_by_name_and_by_object(name, given):
    parsed = parse_float_dtype(given)
    assert isinstance(parsed, np.dtype)
    assert parsed == DTYPES[name]
    assert short_name(parsed) == name
    assert parse_float_dtype(short_name(parsed)) == parsed


# What NumPy would take for f64 ("f8", `None`), for f16 ("half") or for something that
# JAX does not have, and what is no floating dtype at all.
REFUSED = [
    None,
    "half",
    "f8",
    "f2",
    "double",
    "",
    "F16",
    "e4m3",
    "float8_e5m2",
    "int32",
    "nonsense",
    jnp.float8_e4m3fn,
    jnp.int32,
    jnp.complex64,
    jnp.bool_,
    np.dtype(">f4"),
    np.dtype("U3"),
    np.dtype([("a", "f4")]),
    object,
    int,
    3,
    [1],
]


@pytest.mark.parametrize("given", REFUSED, ids=repr)
def test_error_names_what_is_no_floating_dtype_and_what_to_pass(given):
    # Without the type checks of the test run, which would refuse some of them earlier.
    parse = inspect.unwrap(parse_float_dtype)
    message = (
        "`grad_dtype` must be a floating dtype of at least 16 bits (f16, bf16, f32 or "
        f"f64), but {given!r} was given. Pass a dtype such as `jnp.bfloat16` or a name "
        'such as "bf16".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse(given, "grad_dtype")


IS_FLOAT = {
    "float16": True,
    "bfloat16": True,
    "float32": True,
    "float64": True,
    "float8_e4m3fn": False,
    "float8_e5m2": False,
    "float8_e8m0fnu": False,
    "float4_e2m1fn": False,
    "int4": False,
    "int8": False,
    "uint16": False,
    "int32": False,
    "int64": False,
    "bool": False,
    "complex64": False,
    "complex128": False,
    "object": False,
    "str": False,
}


@pytest.mark.parametrize("name", IS_FLOAT)
def test_only_real_floats_of_16_bits_or_more_are_floating(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert is_float_dtype(dtype) is IS_FLOAT[name]


@pytest.mark.parametrize(
    ("name", "wide"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("complex64", "complex64"),
        ("complex128", "complex128"),
    ],
)
def test_only_16_bit_dtypes_are_widened(name, wide):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    assert at_least_f32(dtype) == np.dtype(wide)


def test_dtype_without_a_short_name_keeps_its_name():
    assert short_name(np.dtype("int32")) == "int32"
