"""What `amp` asks of XLA on GPUs changes no numbers, and is asked where it is meant.

tests/test_amp_gpu.py reads the compiled programs.
"""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

import mpx
from models import equations, normal
from mpx import amp, fp8, recipes
from mpx._amp._hints import run_region
from mpx._ops._erfc import erfc

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
    for module in ("_hints", "_regions"):
        monkeypatch.setattr(f"mpx._amp.{module}.cuda_capability", lambda: (9, 0))
    jax.clear_caches()  # what was traced for a CPU
    yield
    jax.clear_caches()


def barriers(func, wrap=lambda f: f):
    """Returns how many there are around means where the function reads a 16-bit array."""
    whole = wrap(amp(lambda x: func(x @ W)))
    found = [
        eqn.invars[0].aval.size
        for eqn in equations(jax.make_jaxpr(whole)(X))
        if eqn.primitive.name == "optimization_barrier"
    ]
    # Those around whole arrays keep a cotangent in 16 bits.
    return sum(size < (X @ W).size for size in found)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CASES)
def test_means_of_rows_are_apart_in_both_passes(name):
    func, count = CASES[name]
    assert barriers(func) == count
    gradient = lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2))  # noqa: E731
    # Also where the backward pass computes the region again, from the mean that it kept.
    assert barriers(func, gradient) == 3 * count


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
    np.testing.assert_allclose(run(), expected, rtol=1e-5, atol=1e-5)


# --- Products -------------------------------------------------------------------------


def distance(found, exact):
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def mapped_layer(params, x):
    """Returns `W @ x` of each token of each example."""
    return jax.vmap(jax.vmap(lambda x: params["w"] @ x))(x)


def order_of_matmuls(func, *args):
    """Returns the ranks of the operands of each matmul."""
    found = equations(jax.make_jaxpr(func)(*args))
    return [
        tuple(x.aval.ndim for x in eqn.invars)
        for eqn in found
        if eqn.primitive.name == "dot_general"
    ]


# With the largest relative distance.
RECIPES = {
    "amp": (None, 2.0**-8),
    "current": (recipes.CurrentScaling(), 2.0**-4),
    "row": (recipes.CurrentScaling(granularity="row"), 2.0**-4),
    "int8": (recipes.Int8(), 2.0**-5),
    "mxfp8": (recipes.MXFP8(emulate=True), 2.0**-4),
    "nvfp4": (recipes.NVFP4(emulate=True), 2.0**-2),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("length", [16, 5, 4])  # 16 is the number of examples, too
def test_outputs_of_a_mapped_layer_come_last(name, length):
    recipe, unit = RECIPES[name]
    wrap = lambda f: fp8(amp(f), recipe, min_gain=0) if recipe else amp(f)  # noqa: E731
    params, x = {"w": normal(0, 32, 32)}, normal(1, 16, length, 32)
    first, *_ = order_of_matmuls(wrap(mapped_layer), params, x)
    assert first == (3, 2) or recipe in (RECIPES["mxfp8"][0], RECIPES["nvfp4"][0])
    found = wrap(mapped_layer)(params, x)
    wide = [np.asarray(a, np.float64) for a in (params["w"], x)]
    exact = np.einsum("od,btd->bto", *wide)
    assert found.shape == exact.shape
    assert distance(found, exact) < unit

    def square(params, x):
        return jnp.sum(wrap(mapped_layer)(params, x) ** 2)

    slopes = jax.tree.leaves(jax.grad(square, argnums=(0, 1))(params, x))
    expected = (
        2 * np.einsum("bto,btd->od", exact, wide[1]),
        2 * np.einsum("bto,od->btd", exact, wide[0]),
    )
    for slope, right in zip(slopes, expected, strict=True):
        assert distance(slope, right) < 2 * unit


@pytest.mark.usefixtures("gpu")
def test_other_products_stay_as_they_are():
    params, x = {"w": normal(0, 8, 32)}, normal(1, 4, 16, 32)
    heads = lambda p, x: jnp.tensordot(x[0], p["w"].T.reshape(32, 2, 4), 1)  # noqa: E731
    for func, expected in {
        lambda p, x: x @ p["w"].T: (3, 2),
        lambda p, x: p["w"] @ x[0].T: (2, 2),
        heads: (2, 3),  # the data come first as it is written
        lambda p, x: jax.vmap(jnp.matmul)(x, x.mT): (3, 3),
    }.items():
        assert order_of_matmuls(amp(func), params, x) == [expected]


def test_operands_are_not_exchanged_without_a_gpu():
    params, x = {"w": normal(0, 8, 32)}, normal(1, 4, 16, 32)
    assert order_of_matmuls(amp(mapped_layer), params, x) == [(2, 3)]


# --- erfc -----------------------------------------------------------------------------


def relative_error(found, exact):
    return np.max(np.abs(np.asarray(found, np.float64) / exact - 1))


@pytest.mark.parametrize("func", [erfc, jax.lax.erfc], ids=["mpx", "XLA"])
def test_errors_of_erfc_are_roundings_as_those_of_xla(func):
    x = np.linspace(-10, 9, 400_001, dtype=np.float32)
    wide = x.astype(np.float64)
    found = np.asarray(jax.jit(func)(x), np.float64)
    # Half a unit of x², which exp makes relative, and some roundings; near 2 a few.
    limit = np.where(wide < -1, 1, 8 + wide**2) * 2.0**-23
    assert np.all(np.abs(found / scipy.special.erfc(wide) - 1) < limit)


def test_derivatives_of_erfc_and_its_limits():
    x = jnp.array([jnp.inf, -jnp.inf, 1e38, -1e38, 0.0, 1e-40, jnp.nan])
    assert np.array_equal(erfc(x), [0, 2, 0, 2, 1, 1, np.nan], equal_nan=True)
    x = np.linspace(-5, 5, 1001, dtype=np.float32)
    wide = x.astype(np.float64)
    exact = -2 / np.sqrt(np.pi) * np.exp(-(wide**2))
    assert relative_error(jax.vmap(jax.grad(erfc))(x), exact) < 3e-6
    second = jax.vmap(jax.grad(jax.grad(erfc)))(x)
    np.testing.assert_allclose(second, -2 * wide * exact, rtol=3e-6, atol=1e-12)


def normal_density(x):
    return np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)


def angle(x):
    return np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)


# By name: whether it is approximate, an operation and how often it is there without a GPU and
# on one, and the exact value and slope.
GELUS = {
    "erfc": (
        False,
        "erfc ",
        (1, 0),
        lambda x: x * scipy.special.ndtr(x),
        lambda x: scipy.special.ndtr(x) + x * normal_density(x),
    ),
    "tanh": (
        True,
        "logistic ",
        (0, 1),
        lambda x: x * scipy.special.expit(2 * angle(x)),
        lambda x: (
            (s := scipy.special.expit(2 * angle(x)))
            + x * s * (1 - s) * np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2)
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:A function under `amp` in f16:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", GELUS)
def test_gelus_are_shorter_on_gpus(name, dtype, request):
    approximate, operation, counts, exact, exact_slope = GELUS[name]
    eye = jnp.eye(32)
    run = amp(lambda x: jax.nn.gelu(x @ eye, approximate=approximate), dtype=dtype)
    count = lambda: str(jax.make_jaxpr(run)(X)).count(operation)  # noqa: E731
    assert count() == counts[0]
    request.getfixturevalue("gpu")
    assert count() == counts[1]
    unit = 2.0**-8 if dtype == "bf16" else 2.0**-11
    x = 2 * mpx.cast_tree(X, dtype)  # The matmul rounds nothing.
    wide, x = np.asarray(x, np.float64), x.astype(jnp.float32)
    least = 2.0**-25  # half of the smallest number of f16
    value, slope = jax.jit(run)(x), jax.jit(jax.grad(lambda x: jnp.sum(run(x))))(x)
    np.testing.assert_allclose(value, exact(wide), rtol=1.01 * unit, atol=least)
    np.testing.assert_allclose(slope, exact_slope(wide), rtol=1.01 * unit, atol=1e-6)


# --- tanh -----------------------------------------------------------------------------


def as_on_gpus(func):
    """Returns a function of numbers as regions of `amp` compute it."""
    return lambda x: run_region(jax.make_jaxpr(func)(x).jaxpr, [x])[0]


@pytest.mark.usefixtures("gpu")
def test_one_plus_tanh_has_the_errors_of_a_few_roundings():
    x = np.linspace(-40, 12, 400_001, dtype=np.float32)
    func, wide = as_on_gpus(lambda x: 1 + jnp.tanh(x)), x.astype(np.float64)
    exact = 2 / (1 + np.exp(-2 * wide))
    # XLA's tanh is -1 from -9 on. The exponential makes half a unit of 2x relative.
    limit = (4 + np.abs(wide)) * 2.0**-23
    assert np.all(np.abs(np.asarray(jax.jit(func)(x), np.float64) / exact - 1) < limit)
    slope = np.asarray(jax.vmap(jax.grad(func))(x), np.float64)
    np.testing.assert_allclose(slope, exact * (2 - exact), rtol=1e-5, atol=4e-7)
    ends = jnp.array([jnp.inf, -jnp.inf, 3e38, -3e38, 0.0, 1e-40, jnp.nan])
    expected = [2, 0, 2, 0, 1, 1, np.nan]
    assert np.array_equal(func(ends), expected, equal_nan=True)
    assert np.array_equal(jax.vmap(jax.grad(func))(ends)[:6], [0, 0, 0, 0, 1, 1])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "func",
    [
        lambda m, x: m.tanh(x),
        lambda m, x: 2 + m.tanh(x),
        lambda m, x: x + m.tanh(x),
        lambda m, x: (1 + m.tanh(x)) * m.tanh(x),
        lambda m, x: 1.0 + (1.0 + m.tanh(m.tanh(x))),
        lambda m, x: 1 + (jax.jit(m.tanh) if m is jnp else m.tanh)(x),
    ],
)
def test_other_uses_of_tanh_stay_right(func):
    x = np.linspace(-3, 3, 1001, dtype=np.float32)
    found, wide = as_on_gpus(lambda x: func(jnp, x)), x.astype(np.float64)
    np.testing.assert_allclose(found(x), func(np, wide), rtol=1e-6, atol=3e-7)
    slope = (func(np, wide + 1e-5) - func(np, wide - 1e-5)) / 2e-5
    np.testing.assert_allclose(jax.vmap(jax.grad(found))(x), slope, atol=1e-6)
