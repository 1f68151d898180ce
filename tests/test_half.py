"""The half-precision switch: process-wide, per thread, and seen by compiled functions."""

import importlib
import re
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx

F16, BF16 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16)

NAMED = [
    ("float16", F16),
    ("f16", F16),
    (jnp.float16, F16),
    (np.float16, F16),
    (np.dtype("float16"), F16),
    ("bfloat16", BF16),
    ("bf16", BF16),
    (jnp.bfloat16, BF16),
    (jnp.dtype("bfloat16"), BF16),
]


def test_half_precision_is_float16_unless_changed():
    assert mpx.half_precision_datatype() == F16


@pytest.mark.parametrize(("given", "dtype"), NAMED, ids=str)
def test_switch_takes_names_and_dtypes(given, dtype):
    other = BF16 if dtype == F16 else F16
    mpx.set_half_precision_datatype(other)
    mpx.set_half_precision_datatype(given)
    assert mpx.half_precision_datatype() == dtype
    assert isinstance(mpx.half_precision_datatype(), np.dtype)
    assert mpx.cast_to_half_precision(jnp.ones(2)).dtype == dtype


@pytest.mark.parametrize(("given", "dtype"), NAMED, ids=str)
def test_context_manager_takes_names_and_dtypes(given, dtype):
    other = BF16 if dtype == F16 else F16
    mpx.set_half_precision_datatype(other)
    with mpx.half_precision(given):
        assert mpx.half_precision_datatype() == dtype
    assert mpx.half_precision_datatype() == other


@pytest.mark.parametrize(
    "switch", [mpx.set_half_precision_datatype, mpx.half_precision]
)
@pytest.mark.parametrize(
    "given", ["float32", "half", "f8", "nonsense", jnp.float32, jnp.int16, np.uint16]
)
def test_anything_but_the_two_half_dtypes_is_refused(switch, given):
    message = (
        f"Half precision is float16 or bfloat16, but {given!r} was given. Pass "
        '`jnp.float16`, `jnp.bfloat16`, "float16" or "bfloat16".'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        switch(given)
    assert mpx.half_precision_datatype() == F16


def test_context_managers_nest_and_end_with_an_error():
    with mpx.half_precision("bf16"):
        with mpx.half_precision("f16"):
            assert mpx.half_precision_datatype() == F16
        assert mpx.half_precision_datatype() == BF16
        with pytest.raises(KeyError), mpx.half_precision("f16"):
            raise KeyError
        assert mpx.half_precision_datatype() == BF16
    assert mpx.half_precision_datatype() == F16


def in_another_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_context_manager_holds_in_its_thread_only():
    with mpx.half_precision("bf16"):
        assert in_another_thread(mpx.half_precision_datatype) == F16
        assert mpx.half_precision_datatype() == BF16


def test_context_manager_of_another_thread_is_not_seen_here():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with mpx.half_precision("bf16"):
            entered.set()
            leave.wait(timeout=60)

    thread = threading.Thread(target=other)
    thread.start()
    assert entered.wait(timeout=60)
    try:
        assert mpx.half_precision_datatype() == F16
    finally:
        leave.set()
        thread.join()


def test_switch_holds_in_every_thread():
    mpx.set_half_precision_datatype("bf16")
    assert in_another_thread(mpx.half_precision_datatype) == BF16
    in_another_thread(lambda: mpx.set_half_precision_datatype("f16"))
    assert mpx.half_precision_datatype() == F16


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_compiled_function_follows_the_switch(jit):
    traces = []

    @jit
    def low(x):
        traces.append(mpx.half_precision_datatype())
        return mpx.cast_to_half_precision(x)

    x = jnp.ones(2)
    mpx.set_half_precision_datatype("f16")
    assert low(x).dtype == F16
    mpx.set_half_precision_datatype("bf16")
    assert low(x).dtype == BF16
    mpx.set_half_precision_datatype("f16")
    assert low(x).dtype == F16
    with mpx.half_precision("bf16"):
        assert low(x).dtype == BF16
        assert in_another_thread(lambda: low(x).dtype) == F16
    assert low(x).dtype == F16
    # Each dtype is compiled once: going back finds the old program.
    assert traces == [F16, BF16]


FOLLOWERS = {
    "cast_function": mpx.cast_function(lambda x: x),
    "cast_function_decorator": mpx.cast_function()(lambda x: x),
    "policy": mpx.Policy().cast_to_compute,
    "policy_string": mpx.get_policy("p=f32,c=half,o=f32").cast_to_compute,
}


@pytest.mark.parametrize("follower", FOLLOWERS.values(), ids=FOLLOWERS)
def test_what_was_made_before_the_switch_follows_it(follower):
    compiled = jax.jit(follower)
    for function in (follower, compiled):
        assert function(jnp.ones(2)).dtype == F16
        with mpx.half_precision("bf16"):
            assert function(jnp.ones(2)).dtype == BF16


def test_context_manager_inside_a_compiled_function_holds_for_its_block():
    @jax.jit
    def both(x):
        with mpx.half_precision("bf16"):
            inner = mpx.cast_to_half_precision(x)
        return inner, mpx.cast_to_half_precision(x)

    inner, outer = both(jnp.ones(2))
    assert (inner.dtype, outer.dtype) == (BF16, F16)


def test_default_loss_scaling_follows_the_switch():
    assert isinstance(mpx.default_loss_scaling(), mpx.DynamicLossScaling)
    with mpx.half_precision("bf16"):
        assert isinstance(mpx.default_loss_scaling(), mpx.NoLossScaling)


def test_exported_constant_is_live():
    assert mpx.HALF_PRECISION_DATATYPE == jnp.float16
    mpx.set_half_precision_datatype("bfloat16")
    assert mpx.HALF_PRECISION_DATATYPE == jnp.bfloat16
    with mpx.half_precision("f16"):
        assert mpx.HALF_PRECISION_DATATYPE == jnp.float16


def test_constant_can_be_imported_by_name():
    from mpx import HALF_PRECISION_DATATYPE

    assert HALF_PRECISION_DATATYPE == jnp.float16
    with mpx.half_precision("bf16"):
        from mpx import HALF_PRECISION_DATATYPE as again

        assert again == jnp.bfloat16
    assert importlib.import_module("mpx").HALF_PRECISION_DATATYPE == jnp.float16


@pytest.mark.parametrize(
    ("name", "value"),
    [("FLOAT16_MAX", 65504.0), ("BFLOAT16_MAX", (2 - 2.0**-7) * 2.0**127)],
)
def test_largest_half_numbers_are_f32_scalars(name, value):
    constant = getattr(mpx, name)
    assert isinstance(constant, jax.Array)
    assert (constant.dtype, constant.shape) == (jnp.float32, ())
    assert float(constant) == value
    assert float(jnp.finfo(name.removesuffix("_MAX").lower()).max) == value


def test_unknown_attribute_names_the_module():
    with pytest.raises(AttributeError, match="^module 'mpx' has no attribute 'MAX'$"):
        _ = mpx.MAX  # pyright: ignore[reportAttributeAccessIssue]
