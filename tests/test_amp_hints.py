"""What `amp` asks of XLA on GPUs changes no numbers, and is asked where it is meant.

tests/test_amp_gpu.py reads the compiled programs.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import equations, normal
from mpx import amp

X, W = normal(0, 4, 16, 32), normal(1, 32, 32)
LINEN = nn.LayerNorm(), {"params": {"scale": jnp.ones(32), "bias": jnp.zeros(32)}}


def equinox_norm(x):
    return jax.vmap(jax.vmap(eqx.nn.LayerNorm(32)))(x)


def linen_norm(x):
    return LINEN[0].apply(LINEN[1], x)


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


# The number of means over the last axis; `jnp.var` takes one by itself.
CASES = {
    "Equinox": (equinox_norm, 3),
    "Linen": (linen_norm, 2),
    "RMS": (rms_norm, 1),
    "softmax": (jax.nn.softmax, 0),
    "over the examples": (lambda x: x - jnp.mean(x, 0, keepdims=True), 0),
    "of all": (lambda x: x - jnp.mean(x), 0),
    "a sum": (lambda x: x / jnp.sum(x, -1, keepdims=True), 0),
}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("mpx._amp._hints.cuda_capability", lambda: (9, 0))


def barriers(func, wrap=lambda f: f):
    """Returns how many there are where the function reads a 16-bit array."""
    whole = wrap(amp(lambda x: func(x @ W)))
    names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(whole)(X))]
    return names.count("optimization_barrier")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CASES)
def test_means_of_rows_are_apart_in_both_passes(name):
    func, count = CASES[name]
    assert barriers(func) == count
    gradient = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))  # noqa: E731
    assert barriers(func, gradient) == 2 * count


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_asked_without_a_gpu(name):
    assert barriers(CASES[name][0]) == 0


TRANSFORMS = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "tangent": lambda f: lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1],
    "second derivative": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
    "vmap of the gradient": lambda f: jax.vmap(jax.grad(f)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["Equinox", "RMS"])
def test_numbers_stay_the_same(name, transform, request):
    def loss(x):
        x = x if x.ndim == 3 else x[None]
        return jnp.sum(jnp.sin(amp(lambda x: CASES[name][0](x @ W))(x)))

    run = lambda: jax.jit(TRANSFORMS[transform](loss))(X)  # noqa: E731
    expected = run()
    request.getfixturevalue("gpu")
    jax.clear_caches()
    np.testing.assert_allclose(run(), expected, rtol=1e-5, atol=1e-5)
