"""Gradients that many terms reach add up in f32 under `amp`, whatever the dtypes are.

The gradient of a sum of bf16 numbers stands still at 256 terms of size 1. Each case has an
operation that uses a number of a parameter many times; its gradient is compared with that
of the function in f64.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from models import equations, normal
from mpx import amp
from mpx._jax._compat import lowered_primitives
from mpx._program._primitives import TABLE

N, D = 2048, 8
X = normal(0, N, D)
W = normal(1, D, D) / 2
OFFSET = jnp.ones((N, D)) + normal(2, N, D) / 4  # terms with one sign: sums grow
INDICES = jnp.arange(N) % 2


def low(p, x):
    """Returns an activation that is held in 16 bits."""
    return x @ p["w"]


def pooled(p, x, stride=1, dilation=1):
    grid = (low(p, x) * p["s"]).reshape(1, -1, D, 1)
    window, *steps = ((1, size, 1, 1) for size in (4, stride, dilation))
    options = {"window_strides": steps[0], "window_dilation": steps[1]}
    return jnp.sum(
        lax.reduce_window(grid, -jnp.inf, lax.max, window, padding="VALID", **options)
    )


def looped(p, x):
    def step(total, row):
        return total + jnp.sum(low(p, row[None]) * p["s"] * OFFSET[:1]), None

    return lax.scan(step, 0.0, x)[0]


CASES = {
    "table": lambda p, x: jnp.sum(p["table"][INDICES] * OFFSET),
    "table, take": lambda p, x: jnp.sum(jnp.take(p["table"], INDICES, axis=0) * OFFSET),
    "tied table": lambda p, x: (
        jnp.sum(p["table"][INDICES] * OFFSET) + jnp.sum(jnp.tanh(x @ p["table"].T) ** 2)
    ),
    "bias": lambda p, x: jnp.sum((low(p, x) + p["b"]) * OFFSET),
    "scale": lambda p, x: jnp.sum(jnp.abs(low(p, x)) * p["b"] * OFFSET),
    "gate": lambda p, x: jnp.sum((x + p["s"] * jnp.abs(low(p, x))) * OFFSET),
    "divisor": lambda p, x: jnp.sum(jnp.abs(low(p, x)) / p["s"] * OFFSET),
    "temperature": lambda p, x: jnp.sum(jax.nn.logsumexp(low(p, x) * p["s"], axis=-1)),
    "slope": lambda p, x: jnp.sum(
        jnp.where(low(p, x) > 0, low(p, x), p["s"] * low(p, x)) * OFFSET
    ),
    "maximum": lambda p, x: jnp.sum(jnp.maximum(low(p, x), p["s"]) * OFFSET),
    "clip": lambda p, x: jnp.sum(jnp.clip(low(p, x), p["s"], 9.0) * OFFSET),
    "token": lambda p, x: jnp.sum(
        jnp.concatenate(
            [low(p, x)[:, None], jnp.broadcast_to(p["b"][None], (N, 1, D))], axis=1
        )
        * OFFSET[:, None]
    ),
    "low activation of one row": lambda p, x: jnp.sum(
        low(p, x[:1]) * p["s"] * jnp.abs(low(p, x)) * OFFSET
    ),
    "max pool": pooled,
    "max pool, side by side": functools.partial(pooled, stride=4),
    "scan": looped,
    "cumulative maximum": lambda p, x: jnp.sum(
        lax.cummax(low(p, x) * p["s"], axis=0) * OFFSET
    ),
    "vmapped layer": lambda p, x: jnp.sum(
        jax.vmap(lambda x: (low(p, x[None])[0] + p["b"][0]) * p["s"])(x) * OFFSET
    ),
}
PARAMS = {
    "w": W,
    "b": 0.1 * jnp.ones((1, D)),
    "s": jnp.float32(0.7),
    "table": normal(3, 4, D),
}


def as_f64(func):
    def run(params, x):
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
            return jax.jit(jax.grad(func))(*wide)

    return run


def size(tree):
    return float(
        np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))
    )


def assert_close(grads, exact, params):
    for key in ("b", "s", "table"):
        wanted = np.float64(exact[key])
        if not np.any(wanted):
            continue
        assert grads[key].dtype == params[key].dtype
        error = np.linalg.norm(np.float64(grads[key]) - wanted) / np.linalg.norm(wanted)
        # Terms are rounded once or twice by 2^-9, independently; a gradient of 16 bits
        # once more. A sum in 16 bits is off by percents.
        assert error < 2.0**-8, (key, error)


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_a_parameter_that_many_terms_reach(name, dtype, optimized_programs):
    func, params = CASES[name], mpx.cast_tree(PARAMS, dtype)
    grads = jax.jit(jax.grad(amp(func)))(params, X)
    assert_close(grads, as_f64(func)(mpx.cast_tree(params, "f32"), X), params)


@pytest.mark.parametrize(
    ("stride", "dilation", "dtype"),
    [(4, 1, "bfloat16"), (9, 2, "bfloat16"), (3, 1, "float32"), (4, 4, "float32")],
)
def test_windows_that_share_no_number_are_pooled_in_16_bits(stride, dilation, dtype):
    func = functools.partial(pooled, stride=stride, dilation=dilation)
    traced = jax.make_jaxpr(amp(func))(PARAMS, X)
    (found,) = [x for x in equations(traced) if x.primitive.name == "reduce_window_max"]
    assert found.invars[0].aval.dtype == dtype


@pytest.mark.standard_promotion
def test_gradient_that_sums_over_the_examples_of_a_vmap(optimized_programs):
    def layer(p, x):
        token = jnp.concatenate([low(p, x[None]), p["b"]])
        return jnp.sum((token + p["b"]) * p["s"], axis=0)

    def loss(wrap):
        call = jax.vmap(wrap(layer), (None, 0))
        return lambda p, x: jnp.sum(call(p, x) * OFFSET)

    grads = jax.jit(jax.grad(loss(amp)))(PARAMS, X)
    assert_close(grads, as_f64(loss(lambda f: f))(PARAMS, X), PARAMS)


def bare(table):
    return jnp.sum(table[INDICES].astype(jnp.float32) * OFFSET)


@pytest.mark.filterwarnings("ignore:A function under `amp` in f16:RuntimeWarning")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_table_by_itself_has_one_scatter_in_f32(dtype):
    table = jnp.ones((4, D), dtype)
    for func, args in ((bare, table), (lambda p: bare(p["t"]), {"t": table})):
        traced = jax.make_jaxpr(jax.grad(amp(func)))(args)
        scatters = [e for e in equations(traced) if "scatter" in e.primitive.name]
        assert [str(eqn.outvars[0].aval.dtype) for eqn in scatters] == ["float32"]
        (grad,) = jax.tree.leaves(jax.grad(amp(func))(args))
        exact = jax.grad(bare)(table.astype(jnp.float32))
        np.testing.assert_array_equal(grad, exact.astype(dtype))


@pytest.mark.standard_promotion
def test_prelu_of_each_framework():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.PReLU()(nn.Dense(D)(x))

    linen = Linen()
    variables = linen.init(jax.random.key(0), X)

    class Equinox(eqx.Module):
        linear: eqx.nn.Linear
        act: eqx.nn.PReLU

        def __call__(self, x):
            return self.act(self.linear(x))

    equinox = Equinox(eqx.nn.Linear(D, D, key=jax.random.key(0)), eqx.nn.PReLU(0.25))

    def loss(model, x):
        if isinstance(model, Equinox):
            return jnp.mean((jax.vmap(model)(x) - 1) ** 2)
        return jnp.mean((jnp.asarray(linen.apply(model, x)) - 1) ** 2)

    for model in (variables, equinox):
        actual = eqx.filter_jit(eqx.filter_grad(amp(loss)))(model, X)
        wanted = eqx.filter_jit(eqx.filter_grad(loss))(model, X)
        pairs = zip(*map(jax.tree.leaves, (actual, wanted)), strict=True)
        for got, grad in pairs:
            assert abs(size(got) - size(grad)) < 2.0**-7 * size(grad)


# --- A table of primitives ------------------------------------------------------------

# What runs in 16 bits by itself, between regions. The transposes of these move numbers and
# put each in one place; all other operations compute in f32, backward as forward.
MOVES = {
    "name sharding_constraint layout_constraint reshard mesh_cast device_put",
    "optimization_barrier",
}
# Sums over devices, in the dtype of the value, as a model written in 16 bits makes them.
OVER_DEVICES = {
    "all_gather all_gather_invariant all_gather_reduced all_to_all ppermute psend precv",
    "psum psum2 psum_invariant unreduced_psum psum_scatter reduce_scatter",
    "unreduced_reduce_scatter pvary pcast pbroadcast vary_unreduced_cast",
    "reduced_vary_cast",
}
# In 16 bits only where no number is in two windows: a test below.
WINDOWS = {"reduce_window_max", "reduce_window_min"}


def words(texts):
    return {word for text in texts for word in text.split()}


def linear_primitives():
    """Returns the primitives with a transpose that JAX has."""
    from mpx._jax._private import private

    return {
        primitive.name for primitive in private("matmul_grads").primitive_transposes
    }


def test_every_operation_with_a_transpose_that_runs_in_16_bits_is_judged():
    """A new line of the table must be put into one of the lines."""
    stored = {name for row in TABLE if row.place == "stored" for name in row.names}
    known = words(MOVES) | words(OVER_DEVICES) | WINDOWS
    assert stored & linear_primitives() & lowered_primitives() <= known
    assert known <= stored


@pytest.mark.standard_promotion
def test_nnx_embedding_of_16_bits():
    embed = nnx.Embed(4, D, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))

    def loss(model):
        return jnp.sum(model(INDICES).astype(jnp.float32) * OFFSET)

    grads = nnx.grad(amp(loss))(embed)
    (grad,) = jax.tree.leaves(grads)
    wanted = jnp.zeros((4, D)).at[INDICES].add(OFFSET)
    np.testing.assert_allclose(grad.astype(jnp.float32), wanted, rtol=2.0**-8)
