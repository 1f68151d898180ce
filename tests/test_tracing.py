"""What `amp` and `fp8` cost while a function is traced: Python, and nothing twice."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import equations
from mpx import amp, fp8
from mpx._fp8 import _dot

SOURCE = str(Path(jax.__file__).parent)
F32, BF16 = jnp.float32, jnp.bfloat16


def norm(x):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def loss(params, x):
    for p in params:
        x = x + jax.nn.gelu(norm(x) @ p["up"] + p["bias"][None]) @ p["down"]
    return jnp.mean(x.astype(F32) ** 2)


def arguments(dtype, layers=4, width=32):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    one = {
        "up": array(width, 64),
        "bias": array(64),
        "down": array(64, width),
    }
    return [one] * layers, array(16, width)


def trace(transform, dtype, **sizes):
    # A function that no cache knows.
    func = transform(lambda params, x: loss(params, x))
    return jax.jit(jax.value_and_grad(func)).trace(*arguments(dtype, **sizes)).jaxpr


def count_calls(transform, dtype):
    """Returns how many functions of JAX are called while tracing."""
    count = 0

    def look(frame, event, _):
        nonlocal count
        count += event == "call" and SOURCE in frame.f_code.co_filename

    trace(transform, dtype)  # JAX's own functions are traced once in a process
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        trace(transform, dtype)
    finally:
        sys.setprofile(before)
    return count


def in_bf16(func):
    return amp(func, dtype="bf16")


# Calls are what tracing takes, and unlike seconds do not depend on the machine.
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("transform", "dtype", "most"),
    [
        (in_bf16, F32, 2.0),
        (lambda func: fp8(func, min_gain=0), BF16, 2.4),
        (lambda func: fp8(in_bf16(func), min_gain=0), F32, 2.1),
    ],
    ids=["amp", "fp8", "fp8(amp)"],
)
def test_tracing_takes_about_twice_the_calls_of_the_plain_function(
    transform, dtype, most
):
    ratio = count_calls(transform, dtype) / count_calls(lambda func: func, F32)
    assert ratio < most


def test_fp8_layers_of_one_shape_are_traced_once(monkeypatch):
    calls, original = [], _dot._multiply

    def counting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(_dot, "_multiply", counting)
    # A width of its own, so that nothing is known from other tests.
    trace(lambda func: fp8(func, min_gain=0), BF16, layers=10, width=176)
    # Two matmuls of three products, of which JAX asks for some again with its derivative;
    # not twenty matmuls.
    assert len(calls) <= 2 * 3 * 2


def test_amp_leaves_no_call_but_those_of_regions():
    def calls(jaxpr):
        names = ("jit", "pjit", "closed_call")
        return [
            eqn.params["name"]
            for eqn in equations(jaxpr)
            if eqn.primitive.name in names
        ]

    plain = calls(trace(lambda func: func, F32))
    assert set(calls(trace(in_bf16, F32))) <= {*plain, "region"}


def test_number_that_a_jitted_layer_gets_outside_jit_compiles_nothing():
    compiled = []

    def listen(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    layer = jax.jit(lambda x, factor: jnp.tanh(x @ x.T * factor))
    func = amp(lambda x, factor: layer(x, factor))
    x = jnp.eye(4) + 0.25
    func(x, 0.5)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        outs = [func(x, 0.25 + i / 16) for i in range(5)]
        assert not compiled
        wanted = [jnp.tanh(x @ x.T * (0.25 + i / 16)) for i in range(5)]
        assert compiled  # the listener works
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for out, exact in zip(outs, wanted, strict=True):
        np.testing.assert_allclose(out, exact, rtol=2.0**-7)
    # A number that 16 bits cannot hold is another program, and right.
    assert bool(jnp.all(jnp.isfinite(func(x, 1e-39))))
