"""Losses and models that several tests share."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import mpx

POLICIES = {
    "f32": "p=f32,c=f32,o=f32",
    "bf16": "p=f32,c=bf16,o=f32",
    "f16": "p=f32,c=f16,o=f32",
}


class Problem(NamedTuple):
    """A least-squares problem whose every intermediate result is a small number.

    Loss and gradient are exact in bf16, f16 and f32, whatever the order of the sums:
    they can be compared bit for bit, on one device or on eight.
    """

    w: np.ndarray
    x: np.ndarray
    y: np.ndarray
    value: float
    grad: np.ndarray


def placed(numbers):
    """Copies to a device. `jnp.asarray` compiles a program for each shape, 0.02 s."""
    return jax.device_put(numbers, may_alias=False)


def normal(seed, *shape, dtype=np.float32):
    """Draws with NumPy: `jax.random.normal` compiles a program for each shape, 0.1 s."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return placed(numbers.astype(dtype))


def squared_error(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@functools.cache
def exact_problem(samples=16, features=4):
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (samples, features)).astype(np.float32)
    w = rng.integers(-1, 2, features).astype(np.float32)
    y = rng.integers(-1, 2, samples).astype(np.float32)
    residual = x.astype(np.float64) @ w - y
    value = np.mean(residual**2)
    grad = 2 * x.T.astype(np.float64) @ residual / samples
    # The premise: bf16 has 8 significant bits, so that every multiple of 1/samples
    # below 256/samples is a bf16 number.
    numbers = np.abs([value, *grad, *np.cumsum(np.abs(residual)) * 2 / samples])
    assert np.all(numbers * samples == np.round(numbers * samples))
    assert np.all(numbers * samples <= 256)
    assert np.any(grad != 0)
    return Problem(w, x, y, float(value), grad.astype(np.float32))


def mlp(key=0, features=4, width=8):
    return eqx.nn.MLP(
        features, 1, width, 1, activation=jnp.tanh, key=jax.random.key(key)
    )


def mlp_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def mlp_batch(samples=16, features=4):
    x = jax.random.normal(jax.random.key(1), (samples, features))
    return x, jnp.sin(x.sum(axis=1))


def count_traces(func):
    """Returns `func` and a list that grows by one entry at each trace."""
    traces = []

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        traces.append(None)
        return func(*args, **kwargs)

    return wrapper, traces


def equations(jaxpr):
    """Yields the equations of a jaxpr and of the jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                    yield from equations(item)


def store(x):
    """Returns an array as it is. It is stored for that: a name is a border of regions."""
    return checkpoint_name(x, "stored")


def stored(jaxpr):
    """Returns the dtypes in which a program stores what `store` is given."""
    return [
        str(eqn.invars[0].aval.dtype)
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "name" and eqn.params["name"] == "stored"
    ]


def stored_result(func, *args, **options):
    """Returns the dtype in which `amp` stores the result of a function."""
    low = mpx.amp(lambda *args: store(func(*args)), **options)
    (dtype,) = stored(jax.make_jaxpr(low)(*args))
    return dtype


def multiplied(jaxpr, names=("dot_general",)):
    """Returns the dtypes of the numbers that matmuls multiply.

    The gradients of weights on several devices leave their matmuls in f32. XLA has no such
    matmul for CPUs: there 16-bit operands are widened first, which changes no product.
    """
    eqns = list(equations(jaxpr))
    narrow = {
        eqn.outvars[0]: eqn.invars[0]
        for eqn in eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype.itemsize == 2
        and eqn.outvars[0].aval.dtype == np.float32
    }
    return {
        str((var if hasattr(var, "val") else narrow.get(var, var)).aval.dtype)
        for eqn in eqns
        if eqn.primitive.name in names
        for var in eqn.invars[:2]
    }


def trace_together(funcs, *args):
    """Traces functions of the same arguments as one program.

    It is compiled in less time than one program each, and XLA computes what they share
    once.

    Returns:
        The traced program, which returns a list; and the jaxpr of each function.
    """
    calls = [jax.jit(func) for func in funcs]
    traced = jax.jit(lambda *args: [call(*args) for call in calls]).trace(*args)
    jaxprs = [eqn.params["jaxpr"] for eqn in traced.jaxpr.eqns if "jaxpr" in eqn.params]
    assert len(jaxprs) == len(calls)
    return traced, jaxprs


def operand_dtypes(func, *args, primitive):
    """Returns the dtypes of the floating operands of all equations of one primitive."""
    jaxpr = jax.make_jaxpr(func)(*args)
    return {
        str(var.aval.dtype)
        for eqn in equations(jaxpr)
        if eqn.primitive.name.startswith(primitive)
        for var in eqn.invars
        if jnp.issubdtype(var.aval.dtype, jnp.floating)
    }
