"""`amp` under what few use: explicit meshes, exported programs, prints, pmap, f16."""

import functools
import importlib.util

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError
from jax import export, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from models import (
    equations,
    mlp,
    mlp_batch,
    mlp_loss,
    multiplied,
    normal,
    trace_together,
)
from mpx import AmpRules, amp

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number
MATMULS = ("dot_general", "conv_general_dilated")

bf16 = functools.partial(amp, dtype="bf16")


X = normal(0, 16, 8)
PARAMS = {"w1": normal(1, 8, 16) / 3, "b": normal(2, 16), "w2": normal(3, 16, 8) / 4}
LAYERS = jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS)


def net(p, x):
    return jnp.tanh(x @ p["w1"] + p["b"][None]) @ p["w2"]


def norm(p, x):
    y = x + net(p, x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)


def scanned(p, x):
    return lax.scan(lambda x, layer: (jax.checkpoint(norm)(layer, x), None), x, p)[0]


def branched(p, x):
    return lax.cond(x.shape[0] > 3, net, lambda p, x: x, p, x)


CASES = {
    "mlp": (net, PARAMS),
    "norm": (norm, PARAMS),
    "jit": (jax.jit(net), PARAMS),
    "scan and remat": (scanned, LAYERS),
    "cond": (branched, PARAMS),
}


def loss_of(func):
    def loss(p, x):
        out = func(p, x)
        return jnp.sum(out * jnp.sin(jnp.arange(1.0, 9.0))[None]) / out.shape[0]

    return loss


def matmuls(jaxpr):
    return multiplied(jaxpr, MATMULS)


def assert_close(actual, wanted, bound):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for got, exact in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        assert (got.shape, got.dtype) == (exact.shape, exact.dtype)
        error = np.linalg.norm(np.asarray(got) - np.asarray(exact))
        assert 0 < error <= bound * np.linalg.norm(np.asarray(exact))


# Up to four matmuls one behind the other, forward and backward, of three roundings each.
BOUND = 4 * 2 * 3 * UNIT


def in_parallel(p, x):
    """Columns of one weight and rows of the next on different devices."""
    hidden = jnp.tanh(x @ p["w1"] + p["b"][None])
    return jnp.matmul(hidden, p["w2"], out_sharding=P("d"))


REPLICATED = {"w1": P(), "b": P(), "w2": P()}
SHARDED = {
    **{name: (*case, REPLICATED) for name, case in CASES.items()},
    "tensor parallel": (
        in_parallel,
        PARAMS,
        {"w1": P(None, "e"), "b": P("e"), "w2": P("e", None)},
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SHARDED)
def test_gradient_on_an_explicit_mesh_is_sharded_as_without_amp(name):
    func, params, specs = SHARDED[name]
    mesh = jax.make_mesh((4, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2)

    def step(wrap):
        return jax.value_and_grad(wrap(loss_of(func)))

    with jax.set_mesh(mesh):
        args = (jax.device_put(params, specs), jax.device_put(X, P("d")))
        traced, (jaxpr, _) = trace_together((step(bf16), step(lambda f: f)), *args)
        assert matmuls(jaxpr) == {"bfloat16"}
        actual, wanted = traced.lower().compile()(*args)
    for got, exact in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        assert got.sharding.is_equivalent_to(exact.sharding, got.ndim)
    assert_close(actual, wanted, BOUND)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_exported_program_is_the_same(name):
    func, params = CASES[name]
    step = jax.jit(jax.value_and_grad(bf16(loss_of(func))))
    stored = export.export(step, platforms=["cpu", "cuda", "tpu"])(params, X)
    assert "bf16" in stored.mlir_module()
    if importlib.util.find_spec("flatbuffers"):  # what JAX needs to write it to a file
        stored = export.deserialize(stored.serialize())
    actual, wanted = jax.jit(stored.call)(params, X), step(params, X)
    for got, exact in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        np.testing.assert_allclose(got, exact, rtol=3 * UNIT, atol=UNIT)


def test_exported_function_inside_runs_as_written():
    stored = export.export(jax.jit(net))(PARAMS, X)

    def func(p, x):
        return stored.call(p, x) @ p["w1"]

    np.testing.assert_array_equal(
        jax.jit(bf16(lambda p, x: stored.call(p, x)))(PARAMS, X), stored.call(PARAMS, X)
    )
    assert matmuls(jax.make_jaxpr(bf16(func))(PARAMS, X)) >= {"bfloat16"}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_print_inside_shows_the_value_that_is_held(wrap, capfd):
    def func(p, x):
        y = x @ p["w1"]
        jax.debug.print(f"dtype {y.dtype}")
        jax.debug.print("mean {m:.3f}", m=jnp.mean(y))
        jax.debug.print("whole {y}", y=y[0, 0])
        return jnp.sum(y)

    value = jax.jit(bf16(wrap(func)))(PARAMS, X)
    jax.effects_barrier()
    out = capfd.readouterr().out
    # What the function sees is f32; what is printed are the numbers that it computes.
    assert "dtype float32" in out
    mean = float(out.split("mean ")[1].split()[0])
    assert abs(mean - float(value) / 256) <= 1e-3
    whole = float(out.split("whole ")[1].split()[0])
    np.testing.assert_allclose(
        whole, (X @ PARAMS["w1"])[0, 0], rtol=3 * UNIT, atol=UNIT
    )


@pytest.mark.eight_devices
@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_gradient_under_pmap_is_the_same_as_on_one_device(name):
    func, params = CASES[name]
    grad = jax.value_and_grad(bf16(loss_of(func)))
    xs = jnp.stack([X, -X])

    def mean(p, x):
        return lax.pmean(grad(p, x), "d")

    devices = jax.devices()[:2]
    mapped = jax.pmap(mean, axis_name="d", in_axes=(None, 0), devices=devices)
    actual = jax.tree.map(lambda x: x[0], mapped(params, xs))
    parts = [jax.jit(grad)(params, x) for x in xs]
    wanted = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    for got, exact in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        # Compiled apart, and rounded to bf16 in other places.
        error = np.linalg.norm(got - exact)
        assert error <= 3 * UNIT * np.linalg.norm(exact)


@pytest.mark.eight_devices
def test_pmap_inside_runs_low():
    func = jax.pmap(net, in_axes=(None, 0), devices=jax.devices()[:2])
    xs = jnp.stack([X, -X])
    actual, wanted = bf16(func)(PARAMS, xs), func(PARAMS, xs)
    error = np.linalg.norm(actual - wanted) / np.linalg.norm(wanted)
    assert error <= 2 * 3 * UNIT
    report = mpx.inspect.report(mpx.amp(func, "bf16"), PARAMS, xs)
    assert report.shares == {"bf16": 1.0}


# --- f16 ------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_f16_gradient_is_more_exact_than_bf16(name):
    func, params = CASES[name]
    dtypes = ("float16", "bfloat16")
    scaled = [mpx.value_and_grad(amp(loss_of(func), dtype=dtype)) for dtype in dtypes]
    plain = jax.grad(loss_of(func))
    args = (mpx.StaticLossScaling(2.0**8), params, X)
    traced, jaxprs = trace_together([*scaled, lambda _, p, x: plain(p, x)], *args)
    assert [matmuls(jaxpr) for jaxpr in jaxprs] == [{x} for x in (*dtypes, "float32")]
    *results, wanted = traced.lower().compile()(*args)

    def error(result):
        assert bool(result.finite)
        pairs = zip(*map(jax.tree.leaves, (result.grads, wanted)), strict=True)
        return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)

    f16, low = map(error, results)
    assert 0 < f16 <= BOUND / 8  # three more bits
    assert f16 < low


def test_f16_training_step_of_a_model_learns():
    model, (x, y) = mlp(), mlp_batch()
    scaled = mpx.value_and_grad(amp(mlp_loss, dtype="f16"))

    @eqx.filter_jit
    def step(model, scaling):
        result = scaled(scaling, model, x, y)
        model = eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, result.grads))
        return model, result.scaling, result.value

    scaling, values = mpx.DynamicLossScaling.pow2(), []
    for _ in range(20):
        model, scaling, value = step(model, scaling)
        values.append(float(value))
    assert values[-1] < 0.7 * values[0]


# --- Methods of models, and functions inside them ----------------------------------


def as_is(func):
    return func


def linen_compact(wrap):
    class Model(nn.Module):
        @nn.compact
        @wrap
        def __call__(self, x):
            x = nn.Dense(16)(x)
            x = nn.BatchNorm(use_running_average=False)(x)
            return nn.Dense(8)(nn.Dropout(0.5, deterministic=False)(x))

    return Model()


def linen_around_compact(wrap):
    class Model(nn.Module):
        @wrap
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(nn.Dense(16)(x))

    return Model()


def linen_setup(wrap):
    class Model(nn.Module):
        def setup(self):
            self.first, self.last = nn.Dense(16), nn.Dense(8)

        @wrap
        def hidden(self, x):
            return self.first(x)

        def __call__(self, x):
            return self.last(self.hidden(x))

    return Model()


def linen_submodule(wrap):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = wrap(nn.Dense(16))(x)
            return wrap(nn.Dense(8).__call__)(hidden)

    return Model()


class Linen:
    def __init__(self, make, wrap):
        self.model = make(wrap)

    def init(self, x):
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        return self.model.init(keys, x)

    def apply(self, variables, x):
        keys = {"dropout": jax.random.key(2)}
        return self.model.apply(variables, x, rngs=keys, mutable=["batch_stats"])


RUNNING = {
    "method of a compact Linen module": (Linen, linen_compact),
    "compact method": (Linen, linen_around_compact),
    "method of a Linen module with setup": (Linen, linen_setup),
    "Linen submodule": (Linen, linen_submodule),
}


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", RUNNING)
def test_variables_of_a_running_model_are_written_as_without_amp(name):
    library, make = RUNNING[name]
    low, plain = library(make, bf16), library(make, as_is)
    variables = low.init(X)
    wanted = plain.init(X)
    assert jax.tree.structure(variables) == jax.tree.structure(wanted)
    for got, exact in zip(*map(jax.tree.leaves, (variables, wanted)), strict=True):
        # A tracer would raise. Statistics come out of a low matmul; what is random is the same.
        np.testing.assert_allclose(got, exact, rtol=3 * UNIT, atol=3 * UNIT)

    def loss(model):
        def of(params, x):
            out, state = model.apply({**wanted, "params": params}, x)
            return jnp.sum(jnp.exp(out / 4)), state

        return jax.value_and_grad(of, has_aux=True)

    params = wanted["params"]
    assert "bfloat16" in matmuls(jax.make_jaxpr(loss(low))(params, X))
    both = jax.jit(lambda *args: [loss(model)(*args) for model in (low, plain)])
    actual, exact = both(params, X)
    assert jax.tree.structure(actual) == jax.tree.structure(exact)
    for got, other in zip(*map(jax.tree.leaves, (actual, exact)), strict=True):
        scale = max(1.0, np.linalg.norm(other))
        assert np.linalg.norm(np.asarray(got) - other) <= BOUND * scale
    low.apply(wanted, X)  # without jit, too


def test_parameters_of_a_running_linen_model_have_names():
    keep = AmpRules(params={"Dense_1": "f32"})
    model = Linen(linen_around_compact, functools.partial(bf16, rules=keep))
    variables = model.init(X)
    found = matmuls(jax.make_jaxpr(model.apply)(variables, X))
    assert found == {"bfloat16", "float32"}


def test_writing_to_a_linen_module_that_is_closed_over_is_refused():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4)
            return bf16(lambda x: dense(x))(x)

    with pytest.raises(TypeError, match="Wrap the loss, or `model.apply`, instead"):
        Model().init(jax.random.key(0), X)
    variables = {"params": {"Dense_0": {"kernel": X[:8, :4], "bias": X[0, :4]}}}
    assert jnp.shape(Model().apply(variables, X)) == (16, 4)  # nothing is written


@pytest.mark.filterwarnings("ignore:`fp8` changed nothing")
@pytest.mark.parametrize("wrap", [bf16, mpx.fp8], ids=["amp", "fp8"])
def test_use_inside_a_haiku_function_is_refused(wrap):
    model = hk.transform(lambda x: wrap(hk.nets.MLP([4, 4]))(x))
    with pytest.raises(TypeError, match="Wrap the loss, or the `apply` of"):
        model.init(jax.random.key(0), X)
    whole = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 4])(x)))
    params = whole.init(jax.random.key(0), X)
    assert jnp.shape(wrap(whole.apply)(params, X)) == (16, 4)


def test_writing_to_an_nnx_module_that_is_closed_over_is_refused():
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    with pytest.raises(TraceContextError, match="different trace level"):
        bf16(lambda x: norm(x))(X)


def test_method_of_an_equinox_module_runs_low():
    class Model(eqx.Module):
        weight: jax.Array

        @bf16
        def __call__(self, x):
            return x @ self.weight

    model = Model(X[:8])
    grad = eqx.filter_grad(lambda model: jnp.sum(model(X) ** 2))
    assert matmuls(jax.make_jaxpr(lambda x: model(x))(X)) == {"bfloat16"}
    exact = 2 * X.T @ (X @ X[:8])
    assert_close(grad(model).weight, exact, BOUND)


def test_an_outer_amp_leaves_what_an_inner_one_chose():
    params = {"a": jnp.eye(16), "b": jnp.eye(16)}
    inner = amp(lambda p, x: jnp.tanh(x @ p["a"]) @ p["b"], keep="a$")
    jaxpr = jax.make_jaxpr(amp(lambda p, x: inner(p, x)))(params, jnp.ones((8, 16)))
    matmuls = [x for x in equations(jaxpr) if x.primitive.name == "dot_general"]
    assert [x.invars[0].aval.dtype for x in matmuls] == [jnp.float32, jnp.bfloat16]
