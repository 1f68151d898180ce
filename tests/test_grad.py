"""Gradients: the right numbers and dtypes, whatever the scale and the transformation."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from models import (
    POLICIES,
    count_traces,
    equations,
    exact_problem,
    mlp,
    mlp_batch,
    mlp_loss,
    operand_dtypes,
    squared_error,
)
from mpx import DynamicLossScaling, GradResult, NoLossScaling, StaticLossScaling
from mpx._filter_grad import _check_switch
from mpx._policy import as_policy
from mpx.testing import assert_trees_equal

HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


# --- One table of functions: a new row inherits every test that takes `grad_of` -------


def of_value_and_grad(loss, scaling, **options):
    return functools.partial(mpx.value_and_grad(loss, **options), scaling)


def of_filter_grad(loss, scaling, **options):
    def run(*args, **kwargs):
        out = mpx.filter_grad(loss, scaling, **options)(*args, **kwargs)
        scaling_after, finite, grads = out[:3]
        aux = out[3] if options.get("has_aux") else None
        return GradResult(None, aux, grads, scaling_after, finite)

    return run


def of_filter_value_and_grad(loss, scaling, **options):
    def run(*args, **kwargs):
        value, scaling_after, finite, grads = mpx.filter_value_and_grad(
            loss, scaling, **options
        )(*args, **kwargs)
        value, aux = value if options.get("has_aux") else (value, None)
        return GradResult(value, aux, grads, scaling_after, finite)

    return run


GRAD_FUNCTIONS = {
    "value_and_grad": of_value_and_grad,
    "filter_grad": of_filter_grad,
    "filter_value_and_grad": of_filter_value_and_grad,
}


@pytest.fixture(params=GRAD_FUNCTIONS.values(), ids=GRAD_FUNCTIONS.keys())
def grad_of(request):
    return request.param


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request):
    return request.param


@pytest.fixture
def problem():
    return exact_problem()


def check_exact(result, problem, *, finite=True):
    if result.value is not None:
        assert_trees_equal(result.value, np.float32(problem.value))
    assert_trees_equal(result.grads, problem.grad)
    assert bool(result.finite) is finite
    assert result.finite.dtype == bool


# --- The scale does not show ----------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", "bf16"])
def test_gradients_are_bit_equal_for_every_power_of_two(name):
    model, (x, y) = mlp(), mlp_batch()
    step = eqx.filter_jit(mpx.value_and_grad(mlp_loss, policy=POLICIES[name]))
    expected = step(StaticLossScaling(1.0), model, x, y)
    full = eqx.filter_jit(eqx.filter_grad(mlp_loss))(model, x, y)
    equal = [
        bool(jnp.all(a == b))
        for a, b in zip(
            jax.tree.leaves(expected.grads), jax.tree.leaves(full), strict=True
        )
    ]
    assert all(equal) if name == "f32" else not any(equal)  # it is computed in `name`
    for exponent in range(-10, 25):
        result = step(StaticLossScaling(2.0**exponent), model, x, y)
        assert_trees_equal(result.grads, expected.grads)
        assert_trees_equal(result.value, expected.value)
        assert result.finite


def test_f16_gradients_are_bit_equal_within_its_range():
    model, (x, y) = mlp(), mlp_batch()
    step = eqx.filter_jit(mpx.value_and_grad(mlp_loss, policy=POLICIES["f16"]))
    # From 2^10 on no gradient of this model is subnormal, so that no bit is lost.
    expected = step(StaticLossScaling(2.0**10), model, x, y)
    smallest = min(float(jnp.min(jnp.abs(g))) for g in jax.tree.leaves(expected.grads))
    assert smallest * 2**10 > jnp.finfo(jnp.float16).smallest_normal
    for exponent in range(11, 15):
        result = step(StaticLossScaling(2.0**exponent), model, x, y)
        assert result.finite
        assert_trees_equal(result.grads, expected.grads)


def test_small_f16_gradients_survive_thanks_to_the_scale():
    loss = lambda w, x: jnp.sum(w * x) * 2.0**-12  # noqa: E731
    w, x = (
        jnp.ones(3),
        jnp.full(3, 2.0**-13),
    )  # the gradient is 2^-25, f16 ends at 2^-24
    step = mpx.value_and_grad(loss, policy=POLICIES["f16"])
    assert_trees_equal(step(NoLossScaling(), w, x).grads, jnp.zeros(3))
    result = step(StaticLossScaling(2.0**10), w, x)
    assert_trees_equal(result.grads, jnp.full(3, 2.0**-25))


@pytest.mark.parametrize("scale", [3000.7, 65504.0, 1e-3])
def test_other_scales_cost_one_rounding_each_way(scale, problem):
    result = mpx.value_and_grad(squared_error, policy=POLICIES["f32"])(
        StaticLossScaling(scale), problem.w, problem.x, problem.y
    )
    eps = float(np.finfo(np.float32).eps)
    # The scale rounds each of the products on the way and the division rounds once.
    np.testing.assert_allclose(result.grads, problem.grad, rtol=4 * eps)


def test_growth_step_returns_the_same_gradient(grad_of, problem):
    scaling = DynamicLossScaling.pow2(2.0**8, period=1)
    result = grad_of(squared_error, scaling)(problem.w, problem.x, problem.y)
    check_exact(result, problem)
    assert float(result.scaling.loss_scaling) == 2.0**9


@pytest.mark.parametrize("scale", [2.0**20, 2.0**-8])
def test_gradient_is_unscaled_before_the_scale_is_clipped(scale, problem):
    scaling = DynamicLossScaling(scale, 2.0**-4)
    result = of_value_and_grad(squared_error, scaling, policy=POLICIES["bf16"])(
        problem.w, problem.x, problem.y
    )
    check_exact(result, problem)
    assert float(result.scaling.loss_scaling) == np.clip(scale, 2.0**-4, 65504.0)


def test_skipped_step_reports_the_true_loss(grad_of):
    loss = lambda w, x: jnp.sum(w * x)  # noqa: E731
    scaling = DynamicLossScaling.pow2(2.0**16)
    result = grad_of(loss, scaling)(jnp.full(2, 0.5), jnp.array([2.0, 4.0]))
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 2.0**15
    assert int(result.scaling.skipped) == 1
    if result.value is not None:
        assert_trees_equal(result.value, jnp.float32(3.0))


def test_f16_loss_is_reported_though_the_scaled_one_exceeds_f16():
    loss = lambda w: w  # noqa: E731
    result = of_value_and_grad(loss, DynamicLossScaling(mpx.FLOAT16_MAX))(
        jnp.float32(2.0)
    )
    assert result.finite
    assert_trees_equal(result.grads, jnp.float32(1.0))
    if result.value is not None:
        assert_trees_equal(result.value, jnp.float32(2.0))


def test_f32_loss_is_reported_though_the_scaled_one_is_infinite():
    loss = lambda w: jnp.float32(1e35) + w.astype(jnp.float32)  # noqa: E731
    scaling = DynamicLossScaling.pow2(2.0**15)
    assert jnp.isinf(scaling.scale(jnp.float32(1e35)))
    result = mpx.value_and_grad(loss)(scaling, jnp.float32(1.0))
    assert result.finite
    assert_trees_equal(result.value, jnp.float32(1e35))
    assert_trees_equal(result.grads, jnp.float32(1.0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_are_found(policy, bad, problem):
    x = problem.x.copy()
    x[3, 1] = bad
    scaling = DynamicLossScaling.pow2(2.0**8)
    result = of_value_and_grad(squared_error, scaling, policy=policy)(
        problem.w, x, problem.y
    )
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 2.0**7


def test_one_non_finite_leaf_among_many_is_enough():
    loss = lambda p: p["a"] + p["b"] * jnp.inf + p["c"]  # noqa: E731
    params = {name: jnp.float32(0.0) for name in "abc"}
    result = mpx.value_and_grad(loss, policy=POLICIES["f32"])(NoLossScaling(), params)
    assert not result.finite
    assert_trees_equal(result.grads["a"], jnp.float32(1.0))


# --- The numbers are those of code cast by hand ---------------------------------------


def test_exact_problem_has_its_exact_gradient(grad_of, policy, problem):
    result = grad_of(squared_error, DynamicLossScaling.pow2(2.0**8), policy=policy)(
        problem.w, problem.x, problem.y
    )
    check_exact(result, problem)


@pytest.mark.parametrize("name", HALVES)
def test_gradient_is_that_of_code_cast_by_hand(name):
    model, (x, y) = mlp(), mlp_batch()
    dtype, scale = HALVES[name], 2.0**10

    def by_hand(params):
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        value = mlp_loss(eqx.combine(low, static), x.astype(dtype), y.astype(dtype))
        return value.astype(jnp.float32) * scale

    params, static = eqx.partition(model, eqx.is_inexact_array)
    value, grads = jax.value_and_grad(by_hand)(params)
    # Without jit: each operation rounds, so that the comparison is bit for bit.
    result = mpx.value_and_grad(mlp_loss, policy=POLICIES[name])(
        StaticLossScaling(scale), model, x, y
    )
    assert_trees_equal(result.grads, jax.tree.map(lambda g: g / scale, grads))
    assert_trees_equal(result.value, value / scale)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.cache
def gradient_in_f64():
    model, (x, y) = mlp(), mlp_batch()
    with jax.enable_x64(True):
        args = mpx.cast_tree((model, x, y), "f64")
        value, grads = eqx.filter_jit(eqx.filter_value_and_grad(mlp_loss))(*args)
        assert value.dtype == jnp.float64
        return float(value), flat(grads)


@pytest.mark.parametrize("name", POLICIES)
def test_gradient_is_near_that_in_f64(name):
    value, grads = gradient_in_f64()
    model, (x, y) = mlp(), mlp_batch()
    step = eqx.filter_jit(mpx.value_and_grad(mlp_loss, policy=POLICIES[name]))
    result = step(StaticLossScaling(2.0**10), model, x, y)
    error = np.linalg.norm(flat(result.grads) - grads)
    eps = float(jnp.finfo(mpx.get_policy(POLICIES[name]).compute_dtype).eps)
    # Errors of independent roundings add up like a random walk; a number passes some
    # ten layers and sums forward and backward.
    assert error <= np.sqrt(10) * eps * np.linalg.norm(grads)
    assert abs(float(result.value) - value) <= np.sqrt(10) * eps * abs(value)


def test_shared_use_in_a_loop_is_summed_like_by_hand():
    # Cotangents of a half-precision copy add up in half precision: the same as by hand.
    def loss(w, x):
        return lax.fori_loop(0, 8, lambda _, h: h * w, x)

    result = mpx.value_and_grad(loss, policy=POLICIES["bf16"])(
        NoLossScaling(), jnp.float32(0.5), jnp.float32(256.0)
    )
    assert_trees_equal(result.value, jnp.float32(1.0))
    assert_trees_equal(result.grads, jnp.float32(16.0))


# --- Dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gradients_are_f32_for_parameters_of_up_to_32_bits(dtype, problem):
    w = jnp.asarray(problem.w, dtype)
    result = of_value_and_grad(squared_error, DynamicLossScaling.pow2(2.0**8))(
        w, problem.x, problem.y
    )
    check_exact(result, problem)


# A gradient that is no bf16 number.
FINE = np.float32(1 + 2.0**-12)


def fine_loss(params):
    leaves = [x for x in jax.tree.leaves(params) if eqx.is_inexact_array(x)]
    return sum(jnp.sum(x.astype(jnp.float32) * FINE) for x in leaves)


def test_gradients_of_16_bit_parameters_are_not_rounded_to_their_dtype(grad_of):
    params = {"w": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(1), "f": jnp.ones(2)}
    params["h"] = np.ones((), np.float16)
    result = grad_of(fine_loss, NoLossScaling(), policy="p=bf16,c=f32")(params)
    expected = {"w": jnp.full(3, FINE), "n": None, "f": jnp.full(2, FINE)}
    assert_trees_equal(result.grads, expected | {"h": jnp.float32(FINE)})


def test_each_of_several_arguments_has_the_gradient_that_is_its_own():
    def loss(b, a):
        return jnp.sum(b.astype(jnp.float32)) * FINE + jnp.sum(a) * 2

    step = mpx.value_and_grad(loss, argnums=(1, 0), policy="p=bf16,c=f32")
    result = step(NoLossScaling(), jnp.ones(3, jnp.bfloat16), jnp.ones(2))
    assert_trees_equal(result.grads, (jnp.full(2, 2.0), jnp.full(3, FINE)))


def test_kept_16_bit_parameters_are_left_as_they_are():
    seen = {}

    def loss(params):
        seen.update({name: x.dtype for name, x in params.items()})
        return fine_loss(params)

    params = {"kept": jnp.ones(2, jnp.bfloat16), "w": jnp.ones(2, jnp.bfloat16)}
    policy = mpx.Policy("bf16", "f32", keep="kept")
    result = mpx.value_and_grad(loss, policy=policy)(NoLossScaling(), params)
    assert seen == {"kept": jnp.bfloat16, "w": jnp.float32}
    assert_trees_equal(result.grads, {"kept": jnp.ones(2), "w": jnp.full(2, FINE)})


def test_kept_module_among_16_bit_parameters_keeps_its_class():
    to_half = functools.partial(mpx.cast_tree, dtype="bf16")
    keys = jax.random.split(jax.random.key(0))
    model = to_half([eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 4, key=keys[0])])
    x = jax.random.normal(keys[1], (4,))
    policy = mpx.Policy("bf16", "f32", keep=eqx.nn.LayerNorm)

    def loss(model, x):
        return jnp.sum(model[1](model[0](x)) * FINE)

    result = mpx.value_and_grad(loss, policy=policy)(NoLossScaling(), model, x)
    assert jax.tree.structure(result.grads) == jax.tree.structure(model)
    assert_trees_equal(result.grads[1].bias, jnp.full(4, FINE))


def test_nnx_parameters_in_16_bits_have_unrounded_gradients():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    norm = nnx.LayerNorm(3, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    policy = mpx.Policy("bf16", "f32", keep=nnx.LayerNorm)

    def loss(models):
        return fine_loss([nnx.state(model, nnx.Param) for model in models.values()])

    result = mpx.value_and_grad(loss, policy=policy)(
        NoLossScaling(), {"b": model, "a": norm}
    )
    grads = jax.tree.leaves(result.grads["b"])
    assert_trees_equal(grads, [jnp.full(3, FINE), jnp.full((2, 3), FINE)])
    assert_trees_equal(jax.tree.leaves(result.grads["a"]), [jnp.ones(3)] * 2)
    assert model.kernel[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("grad_dtype", [None, "f64"])
def test_f32_parameters_computed_in_f64_have_f32_gradients(grad_of, grad_dtype):
    with jax.enable_x64(True):
        step = grad_of(
            lambda w: jnp.sum(w * (1 + 2.0**-40)),
            NoLossScaling(),
            policy="p=f32,c=f64",
            grad_dtype=grad_dtype,
        )
        grads = step(jnp.ones(2, jnp.float32)).grads
        expected = np.full(2, 1 + 2.0**-40, jnp.float64 if grad_dtype else jnp.float32)
        assert_trees_equal(grads, jnp.asarray(expected))


def test_gradients_of_f64_parameters_are_f64(problem):
    with jax.enable_x64(True):
        args = mpx.cast_tree((problem.w, problem.x, problem.y), "f64")
        for policy in (POLICIES["bf16"], "f64"):
            step = jax.jit(mpx.value_and_grad(squared_error, policy=policy))
            result = step(StaticLossScaling(8.0), *args)
            assert_trees_equal(result.grads, problem.grad.astype(np.float64))
        assert_trees_equal(result.value, np.float64(problem.value))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_grad_dtype_is_honoured(dtype, problem):
    expected = problem.grad.astype(mpx.get_policy(dtype).param_dtype)
    scaling = DynamicLossScaling.pow2(2.0**8)
    args = problem.w, problem.x, problem.y
    for options in ({"grad_dtype": dtype}, {"policy": f"c=f16,g={dtype}"}):
        result = of_value_and_grad(squared_error, scaling, **options)(*args)
        assert_trees_equal(result.grads, expected)
        assert result.finite
    # The argument wins over the policy.
    result = of_value_and_grad(
        squared_error, scaling, grad_dtype=dtype, policy="c=f16,g=f64"
    )(*args)
    assert_trees_equal(result.grads, expected)


def test_gradients_that_overflow_their_dtype_are_not_finite():
    loss = lambda w: w.astype(jnp.float32) * 1e5  # noqa: E731
    step = mpx.value_and_grad(loss, policy="c=bf16,g=f16")
    assert not step(NoLossScaling(), jnp.float32(1.0)).finite


def test_numpy_parameters_and_python_floats_get_gradients():
    loss = lambda p: p["array"].sum() * p["scalar"] * p["generic"]  # noqa: E731
    params = {
        "array": np.ones(2, np.float32),
        "scalar": np.float32(3.0),
        "generic": np.float64(2.0),
    }
    result = of_value_and_grad(loss, DynamicLossScaling.pow2(2.0**8))(params)
    expected = {
        "array": np.full(2, 6.0, np.float32),
        "scalar": np.float32(4.0),
        "generic": np.float32(6.0),
    }
    assert_trees_equal(result.grads, jax.tree.map(jnp.asarray, expected))
    result = of_value_and_grad(lambda w: w * w, DynamicLossScaling.pow2(2.0**8))(3.0)
    assert_trees_equal(result.grads, jnp.float32(6.0))


@pytest.mark.parametrize("name", HALVES)
def test_f64_numpy_batch_is_computed_in_half(name, problem):
    seen = []

    def loss(w, batch, *, y):
        seen.extend([w.dtype, batch["x"].dtype, y.dtype])
        return squared_error(w, batch["x"], y)

    w, x, y = (leaf.astype(np.float64) for leaf in (problem.w, problem.x, problem.y))
    step = mpx.value_and_grad(loss, policy=POLICIES[name])
    result = step(DynamicLossScaling.pow2(2.0**8), w, {"x": x}, y=y)
    check_exact(result, problem)
    assert seen == [HALVES[name]] * 3


@pytest.mark.parametrize("name", POLICIES)
def test_every_matrix_product_has_the_compute_dtype(name):
    model, (x, y) = mlp(), mlp_batch()
    params, static = eqx.partition(model, eqx.is_array)

    def step(params, x, y):
        model = eqx.combine(params, static)
        result = mpx.value_and_grad(mlp_loss, policy=POLICIES[name])(
            StaticLossScaling(8.0), model, x, y
        )
        return result.value, result.grads

    dtypes = operand_dtypes(step, params, x, y, primitive="dot_general")
    assert dtypes == {str(mpx.get_policy(POLICIES[name]).compute_dtype)}


def test_leaves_without_a_gradient_get_none(grad_of):
    params = {
        "w": jnp.ones(2),
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "key": jax.random.key(0),
        "float8": jnp.ones(2, jnp.float8_e4m3fn),
        "function": jnp.tanh,
        "name": "a string",
        "none": None,
        "number": 2,
        "nested": [np.arange(3), (jnp.ones(()), "b")],
    }

    def loss(params, x):
        assert params["name"] == "a string"
        assert params["function"] is jnp.tanh
        assert params["number"] == 2
        assert params["int"].dtype == jnp.int32
        assert params["float8"].dtype == jnp.float8_e4m3fn
        assert jax.random.key_data(params["key"]).shape == (2,)
        return jnp.sum(params["w"] * x) * params["number"] + params["nested"][1][0]

    result = grad_of(loss, DynamicLossScaling.pow2(2.0**8))(params, jnp.ones(2))
    expected = dict.fromkeys(params)
    expected |= {"w": jnp.full(2, 2.0), "nested": [None, (jnp.float32(1.0), None)]}
    assert_trees_equal(result.grads, expected)


def test_complex_parameters_have_the_gradient_of_jax():
    def loss(c, x):
        # Strict promotion: complex numbers are not cast, their parts are.
        parts = jnp.abs(c * (1 + 2j)) ** 2
        return jnp.sum(parts.astype(x.dtype) * x)

    c, x = jnp.array([1 + 2j, -3j], jnp.complex64), jnp.array([1.0, 2.0])
    result = of_value_and_grad(loss, DynamicLossScaling.pow2(2.0**4))(c, x)
    assert result.grads.dtype == jnp.complex64
    # c and x are whole numbers: the parts are exact in f16.
    np.testing.assert_allclose(result.grads, jax.grad(loss)(c, x), rtol=4e-7)


# --- What goes in and what comes out --------------------------------------------------


def test_aux_comes_back_untouched(grad_of, problem):
    key = jax.random.key(3)
    marker = object()

    def loss(w, x, y):
        pred = x @ w
        aux = {
            "pred": pred,
            "numpy": np.arange(3),
            "name": "step",
            "function": jnp.tanh,
            "none": None,
            "number": 1.5,
            "marker": marker,
            "key": key,
        }
        return jnp.mean((pred - y) ** 2), aux

    scaling = DynamicLossScaling.pow2(2.0**8)
    result = grad_of(loss, scaling, has_aux=True)(problem.w, problem.x, problem.y)
    check_exact(result, problem)
    pred = (problem.x @ problem.w).astype(np.float16)
    assert_trees_equal(result.aux.pop("pred"), pred)
    assert result.aux.pop("marker") is marker
    assert_trees_equal(
        result.aux,
        {
            "numpy": np.arange(3),
            "name": "step",
            "function": jnp.tanh,
            "none": None,
            "number": 1.5,
            "key": key,
        },
    )


@pytest.mark.parametrize("aux", [None, (), "text", 3])
def test_aux_may_hold_no_array_at_all(aux):
    loss = lambda w: (w * w, aux)  # noqa: E731
    result = of_value_and_grad(loss, StaticLossScaling(8.0), has_aux=True, retry=1)(3.0)
    assert result.aux == aux


@pytest.mark.parametrize("pair", [tuple, list])
def test_loss_and_aux_may_come_as_a_tuple_or_a_list(pair):
    loss = lambda w: pair((w * w, w))  # noqa: E731
    result = of_value_and_grad(loss, StaticLossScaling(8.0), has_aux=True)(
        jnp.float32(3.0)
    )
    assert_trees_equal(result.grads, jnp.float32(6.0))


def test_keyword_arguments_are_cast_and_passed_on(grad_of, problem):
    def loss(w, *, x, y, mode="train"):
        assert x.dtype == y.dtype == jnp.float16
        assert mode == "test"
        return squared_error(w, x, y)

    scaling = DynamicLossScaling.pow2(2.0**8)
    result = grad_of(loss, scaling)(problem.w, x=problem.x, y=problem.y, mode="test")
    check_exact(result, problem)


def test_names_of_keywords_do_not_clash_with_parameters():
    def loss(w, /, *rest, **options):
        return w * rest[0] * options["w"] * options["arg1"]

    args = [jnp.float32(value) for value in (3.0, 2.0)]
    result = of_value_and_grad(loss, StaticLossScaling(8.0))(
        *args, w=jnp.float32(4.0), arg1=jnp.float32(0.5)
    )
    assert_trees_equal(result.grads, jnp.float32(4.0))


def test_names_of_starred_arguments_do_not_clash_with_parameters(grad_of):
    def loss(arg2, *rest, arg1=None):
        assert arg1 is None
        return arg2 * rest[0] * rest[1]

    args = [jnp.float32(value) for value in (3.0, 2.0, 5.0)]
    result = grad_of(loss, StaticLossScaling(8.0))(*args)
    assert_trees_equal(result.grads, jnp.float32(10.0))


def test_loss_may_have_a_keyword_called_scaling():
    loss = lambda w, x, scaling: jnp.sum(w * x) * scaling  # noqa: E731
    args = (StaticLossScaling(8.0), jnp.float32(3.0), jnp.ones(4))
    for step in (mpx.value_and_grad(loss), mpx.accumulate(loss, 2, mean=False)):
        result = step(*args, scaling=jnp.float32(2.0))
        assert_trees_equal(result.grads, jnp.float32(8.0))


# --- Functions under amp --------------------------------------------------------------

WRAPPERS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "checkpoint": jax.checkpoint,
    "filter_checkpoint": eqx.filter_checkpoint,
    "partial": functools.partial,
    "Partial": eqx.Partial,
    "partial with a keyword": lambda f: functools.partial(f, factor=1.0),
    "jit of a partial": lambda f: eqx.filter_jit(functools.partial(f)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_amp_inside_of_another_wrapper_casts_alone(grad_of, wrap):
    # The sum of the batch exceeds f16, to which the policy would cast the arguments.
    def loss(w, x, factor=1.0):
        return jnp.sum(x) * w * factor

    x = jnp.full(4, 2.0**15)
    low = mpx.amp(loss, dtype="bf16")
    result = grad_of(wrap(low), StaticLossScaling(1.0))(jnp.float32(1.0), x)
    assert_trees_equal(result.grads, jnp.float32(2.0**17))


ARGNUMS = [0, 1, -1, (0,), (1, 0), (0, -1), [0, 1, 2]]


@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
def test_argnums_mean_what_they_mean_in_jax(grad_of, argnums, problem):
    args = problem.w, problem.x, problem.y
    expected = jax.grad(squared_error, argnums=argnums)(*args)
    result = grad_of(
        squared_error, StaticLossScaling(8.0), argnums=argnums, policy=POLICIES["f32"]
    )(*args)
    assert_trees_equal(result.grads, jax.tree.map(jnp.asarray, expected))
    if isinstance(argnums, int):
        assert not isinstance(result.grads, tuple)
    else:
        assert isinstance(result.grads, tuple)


def test_decorators_work_with_and_without_arguments(problem):
    args = problem.w, problem.x, problem.y
    scaling = StaticLossScaling(8.0)
    plain = mpx.value_and_grad(squared_error)
    with_options = mpx.value_and_grad(policy=POLICIES["bf16"])(squared_error)
    check_exact(plain(scaling, *args), problem)
    check_exact(with_options(scaling, *args), problem)

    @mpx.filter_grad(scaling=scaling, has_aux=True)
    def filtered(w, x, y):
        return squared_error(w, x, y), "aux"

    @mpx.filter_value_and_grad(scaling=scaling)
    def filtered_value(w, x, y):
        return squared_error(w, x, y)

    assert_trees_equal(filtered(*args)[2], problem.grad)
    assert filtered(*args)[3] == "aux"
    assert_trees_equal(filtered_value(*args)[3], problem.grad)


TRANSFORMATIONS = {
    "value_and_grad": mpx.value_and_grad,
    "filter_grad": lambda f: mpx.filter_grad(f, StaticLossScaling(8.0)),
    "filter_value_and_grad": lambda f: mpx.filter_value_and_grad(
        f, StaticLossScaling(8.0)
    ),
    "calculate_scaled_grad": lambda f: mpx.calculate_scaled_grad(
        f, StaticLossScaling(8.0)
    ),
    "accumulate": lambda f: mpx.accumulate(f, 2),
}


@pytest.mark.parametrize(
    "transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys()
)
def test_name_and_docstring_of_the_loss_survive(transform):
    def my_loss(w):
        """Squares."""
        return w * w

    assert transform(my_loss).__name__ == "my_loss"
    assert transform(my_loss).__doc__ == "Squares."
    assert transform(my_loss).__module__ == __name__


def test_jit_counts_the_scaling_as_the_first_argument():
    # `jax.jit` reads the signature to check positions: here there are three.
    def loss(w, double):
        return w * w * (2.0 if double else 1.0)

    step = jax.jit(mpx.value_and_grad(loss), static_argnums=2)
    result = step(StaticLossScaling(8.0), jnp.float32(3.0), True)
    assert_trees_equal(result.grads, jnp.float32(12.0))


class Trainer:
    def __init__(self, weight):
        self.weight = weight

    def loss(self, w, x, y):
        return squared_error(w, x, y) * self.weight


def test_methods_partials_and_callable_modules_are_losses(problem):
    class Loss(eqx.Module):
        weight: float

        def __call__(self, w, x, y):
            return squared_error(w, x, y) * self.weight

    losses = [
        Trainer(1.0).loss,
        Loss(1.0),
        functools.partial(squared_error, y=problem.y.astype(np.float16)),
        jax.jit(squared_error),
        jax.checkpoint(squared_error),
    ]
    for loss in losses:
        args = [problem.w, problem.x]
        args += [] if isinstance(loss, functools.partial) else [problem.y]
        check_exact(of_value_and_grad(loss, StaticLossScaling(8.0))(*args), problem)


def test_method_of_a_module_is_differentiated_by_its_self(problem):
    class Model(eqx.Module):
        w: jax.Array

        def loss(self, x, y):
            return squared_error(self.w, x, y)

    result = mpx.value_and_grad(Model.loss)(
        StaticLossScaling(8.0), Model(jnp.asarray(problem.w)), problem.x, problem.y
    )
    assert isinstance(result.grads, Model)
    assert_trees_equal(result.grads.w, problem.grad)


def test_result_is_a_named_tuple_of_the_six_parts():
    assert GradResult._fields == ("value", "aux", "grads", "scaling", "finite", "fp8")
    result = mpx.value_and_grad(lambda w: w)(NoLossScaling(), 1.0)
    assert tuple(result)[1] is None
    assert result.fp8 is None


# --- Under every transformation -------------------------------------------------------


def as_arrays(problem):
    return jax.tree.map(jnp.asarray, (problem.w, problem.x, problem.y))


WRAPPERS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}


@pytest.mark.parametrize(
    ("wrap", "name"),
    [("jit", "f32"), ("jit", "bf16"), ("jit", "f16")]
    + [(wrap, "bf16") for wrap in WRAPPERS if wrap != "jit"],
)
def test_result_is_the_same_under(wrap, name, problem):
    @WRAPPERS[wrap]
    def step(scaling, w, x, y):
        return mpx.value_and_grad(squared_error, policy=POLICIES[name])(
            scaling, w, x, y
        )

    result = step(DynamicLossScaling.pow2(2.0**8, period=1), *as_arrays(problem))
    check_exact(result, problem)
    assert float(result.scaling.loss_scaling) == 2.0**9


def test_checkpointed_loss_keeps_its_recomputation(problem):
    loss = jax.checkpoint(squared_error)
    w, x, y = as_arrays(problem)

    def step(w, x, y):
        result = mpx.value_and_grad(loss, policy=POLICIES["bf16"])(
            NoLossScaling(), w, x, y
        )
        return result.grads

    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(w, x, y))}
    assert names & {"remat2", "checkpoint"}
    assert_trees_equal(jax.jit(step)(w, x, y), problem.grad)


def test_vmap_over_samples_gives_per_sample_gradients(problem):
    w, x, y = as_arrays(problem)
    per_sample = jax.vmap(
        mpx.value_and_grad(squared_error, policy=POLICIES["bf16"]),
        in_axes=(None, None, 0, 0),
    )
    result = jax.jit(per_sample)(StaticLossScaling(2.0**8), w, x[:, None], y[:, None])
    residual = problem.x @ problem.w - problem.y
    assert_trees_equal(result.grads, 2 * problem.x * residual[:, None])
    assert_trees_equal(result.value, residual**2)
    assert result.finite.shape == (16,)


def test_vmap_over_scalings_lets_only_one_member_back_off(problem):
    w, x, y = as_arrays(problem)
    scales = jnp.array([2.0**8, 2.0**24, 2.0**4])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None, None))
    def step(scale, w, x, y):
        scaling = DynamicLossScaling(scale, max_loss_scaling=2.0**24)
        return mpx.value_and_grad(squared_error)(scaling, w, x, y)

    result = step(scales, w, x, y)
    np.testing.assert_array_equal(result.finite, [True, False, True])
    np.testing.assert_array_equal(result.scaling.loss_scaling, [2**8, 2**23, 2**4])
    assert_trees_equal(result.grads[2], problem.grad)


def test_scaling_is_carried_through_a_scan(problem):
    w, x, y = as_arrays(problem)

    @jax.jit
    def run(scaling):
        def body(scaling, _):
            result = mpx.value_and_grad(squared_error)(scaling, w, x, y)
            return result.scaling, (result.grads, scaling.loss_scaling, result.finite)

        return lax.scan(body, scaling, length=8)

    scaling, (grads, scales, finite) = run(DynamicLossScaling.pow2(2.0**18, period=3))
    # The derivative of the loss by itself is the scale, in f16.
    largest = max(1.0, np.max(np.abs(problem.grad)))
    overflow = np.asarray(scales) * largest > 65504
    np.testing.assert_array_equal(finite, ~overflow)
    assert 0 < np.sum(finite) < 8
    for grad, good in zip(grads, finite, strict=True):
        assert not good or np.array_equal(grad, problem.grad)
    assert int(scaling.skipped) == np.sum(~np.asarray(finite))


def test_a_loop_is_traced_once(problem):
    loss, traces = count_traces(squared_error)
    step = jax.jit(mpx.value_and_grad(loss))
    scaling = DynamicLossScaling.pow2(2.0**16, period=1)
    args = as_arrays(problem)
    scales = set()
    for _ in range(6):
        result = step(scaling, *args)
        scaling = result.scaling
        scales.add(float(scaling.loss_scaling))
    assert len(scales) > 1  # it did grow and back off
    assert len(traces) == 1


def test_filter_grad_in_a_jitted_step_is_traced_once(problem):
    loss, traces = count_traces(squared_error)

    @eqx.filter_jit
    def step(scaling, *args):
        scaling, _, grads = mpx.filter_grad(loss, scaling)(*args)
        return scaling, grads

    scaling = DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones(()), period=1)
    for _ in range(4):
        scaling, _ = step(scaling, *as_arrays(problem))
    assert len(traces) == 1


def test_jitted_step_transfers_nothing(problem):
    step = jax.jit(mpx.value_and_grad(squared_error, retry=1))
    scaling, args = DynamicLossScaling.pow2(2.0**8), as_arrays(problem)
    step(scaling, *args)
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="[Dd]isallowed.*transfer"):
            jnp.sin(np.ones(3))  # the guard is on
        scaling = step(scaling, *args).scaling
        result = step(scaling, *args)
    check_exact(result, problem)


def test_scaling_and_parameters_can_be_donated(problem):
    w, x, y = as_arrays(problem)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(scaling, w, x, y):
        result = mpx.value_and_grad(squared_error)(scaling, w, x, y)
        return result.scaling, w - result.grads

    scaling = DynamicLossScaling.pow2(2.0**8)
    for _ in range(3):
        before = scaling, w
        scaling, w = step(scaling, w, x, y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_shape_and_dtype_structs_are_enough_to_evaluate_shapes(problem):
    struct = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), as_arrays(problem)
    )
    scaling = jax.eval_shape(DynamicLossScaling.pow2)
    result = jax.eval_shape(mpx.value_and_grad(squared_error), scaling, *struct)
    assert result.grads.shape == problem.w.shape
    assert result.grads.dtype == result.value.dtype == jnp.float32


# --- The half-precision switch --------------------------------------------------------


def test_jitted_step_follows_the_half_precision_switch():
    @jax.jit
    @mpx.value_and_grad(has_aux=True)
    def step(w, x):
        return jnp.sum(w * x).astype(jnp.float32), w * x

    scaling, w, x = StaticLossScaling(1.0), jnp.float32(1.0), jnp.float32(1e5)
    assert step(scaling, w, x).aux.dtype == jnp.float16
    assert not step(scaling, w, x).finite  # 1e5 is no f16 number
    mpx.set_half_precision_datatype("bfloat16")
    assert step(scaling, w, x).aux.dtype == jnp.bfloat16
    assert step(scaling, w, x).finite
    with mpx.half_precision("f16"):
        assert step(scaling, w, x).aux.dtype == jnp.float16
    assert step(scaling, w, x).aux.dtype == jnp.bfloat16


def test_filter_grad_made_before_the_switch_follows_it():
    seen = []

    def loss(w):
        seen.append(w.dtype)
        return w * w

    grad = mpx.filter_grad(loss, StaticLossScaling(8.0))
    scaled = mpx.calculate_scaled_grad(loss, StaticLossScaling(8.0))
    for half in (jnp.float16, jnp.bfloat16):
        with mpx.half_precision(half):
            jax.eval_shape(grad, jnp.float32(1.0))
            assert jax.eval_shape(scaled, jnp.float32(1.0))[1].dtype == half
    assert seen == [jnp.float16] * 2 + [jnp.bfloat16] * 2


# --- Without mixed precision, without scaling -----------------------------------------

SWITCHED = {key: GRAD_FUNCTIONS[key] for key in GRAD_FUNCTIONS if "filter" in key}


@pytest.fixture(params=SWITCHED.values(), ids=SWITCHED.keys())
def paper_grad(request):
    return request.param


@pytest.mark.parametrize("has_aux", [False, True])
def test_switched_off_nothing_is_cast_scaled_or_checked(paper_grad, has_aux):
    seen = []

    def loss(w, x):
        seen.append((w.dtype, x.dtype))
        value = jnp.sum(w * x) * 2.0**100 * 2.0**100
        return (value, w) if has_aux else value

    scaling = DynamicLossScaling.pow2(2.0**8, period=1)
    w, x = jnp.ones(2), np.ones(2, np.float32)
    result = paper_grad(loss, scaling, has_aux=has_aux, use_mixed_precision=False)(w, x)
    assert seen == [(jnp.float32, np.float32)]
    assert result.scaling is scaling
    assert result.finite.dtype == bool
    assert result.finite
    assert_trees_equal(result.grads, jnp.full(2, jnp.inf))
    if has_aux:
        assert_trees_equal(result.aux, w)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_switched_off_gradients_are_f32_too(paper_grad, dtype):
    for options in ({}, {"has_aux": True}):
        loss = lambda w: (w * w, None) if options else w * w  # noqa: B023, E731
        result = paper_grad(loss, None, use_mixed_precision=False, **options)(
            dtype(3.0)
        )
        assert_trees_equal(result.grads, jnp.float32(6.0))
        assert result.scaling is None


def test_switched_off_it_is_the_gradient_of_jax(paper_grad, problem):
    result = paper_grad(
        squared_error, StaticLossScaling(8.0), use_mixed_precision=False, argnums=(0, 1)
    )(problem.w, problem.x, problem.y)
    expected = jax.grad(squared_error, argnums=(0, 1))(problem.w, problem.x, problem.y)
    assert_trees_equal(result.grads, jax.tree.map(jnp.asarray, expected))


def test_no_scaling_is_needed_where_the_range_is_that_of_f32(paper_grad, problem):
    args = problem.w, problem.x, problem.y
    for policy in (POLICIES["bf16"], POLICIES["f32"]):
        result = paper_grad(squared_error, None, policy=policy)(*args)
        check_exact(result, problem)
        assert isinstance(result.scaling, NoLossScaling)
    with mpx.half_precision("bf16"):
        step = paper_grad(squared_error, None)
        assert isinstance(eqx.filter_eval_shape(step, *args).scaling, NoLossScaling)


def test_f16_without_scaling_is_refused(paper_grad, problem):
    args = problem.w, problem.x, problem.y
    for options in ({}, {"policy": POLICIES["f16"]}):
        with pytest.raises(
            ValueError, match=r"f16 gradients need a loss scaling.*pow2"
        ):
            paper_grad(squared_error, None, **options)(*args)


def test_no_scaling_still_checks(paper_grad):
    loss = lambda w: w * jnp.inf  # noqa: E731
    assert not paper_grad(loss, None, policy=POLICIES["bf16"])(jnp.float32(1.0)).finite


# --- calculate_scaled_grad ------------------------------------------------------------


@pytest.mark.parametrize("name", HALVES)
def test_scaled_gradients_are_half_and_scaled(name, problem):
    args = problem.w, problem.x, problem.y
    scaling = StaticLossScaling(64.0)
    loss_with_aux = lambda *args: (squared_error(*args), "aux")  # noqa: E731
    with mpx.half_precision(name):
        step = eqx.filter_jit(mpx.calculate_scaled_grad(squared_error, scaling))
        value, grads = step(*args)
        step = eqx.filter_jit(mpx.calculate_scaled_grad(loss_with_aux, scaling, True))
        (value_2, aux), grads_2 = step(*args)
    assert_trees_equal(value, np.float32(64 * problem.value))
    assert_trees_equal(grads, (64 * problem.grad).astype(HALVES[name]))
    assert_trees_equal((value_2, grads_2), (value, grads))
    assert aux == "aux"


def test_scaled_gradients_overflow_as_half_does():
    loss = lambda w: w * 4.0  # noqa: E731
    _, grads = mpx.calculate_scaled_grad(loss, StaticLossScaling(2.0**15))(jnp.ones(()))
    assert_trees_equal(grads, jnp.float16(jnp.inf))


def test_scaled_gradients_unscaled_by_hand_are_those_of_filter_grad():
    model, (x, y) = mlp(), mlp_batch()
    scaling = DynamicLossScaling.pow2(2.0**10)
    value, grads = mpx.calculate_scaled_grad(mlp_loss, scaling)(model, x, y)
    expected = mpx.value_and_grad(mlp_loss)(scaling, model, x, y)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float16)}
    assert_trees_equal(scaling.unscale(grads), expected.grads)
    assert_trees_equal(scaling.unscale(value), expected.value)


def test_scaled_gradients_switched_off_are_neither_cast_nor_scaled(problem):
    value, grads = mpx.calculate_scaled_grad(
        squared_error, StaticLossScaling(64.0), use_mixed_precision=False
    )(problem.w, problem.x, problem.y)
    assert_trees_equal(value, np.float32(problem.value))
    assert_trees_equal(grads, problem.grad)


# --- Retry ----------------------------------------------------------------------------


def steep(w, x):
    return jnp.sum(w * x)


STEEP = jnp.float32(1.0), jnp.array([100.0, 200.0, 300.0])
# 600 times the scale must fit into f16, whose largest number is 65504: 2^6.
FIRST_FINITE = 2.0**6


def test_retry_reaches_the_first_finite_scale(grad_of):
    scaling = DynamicLossScaling.pow2(2.0**24, period=10, counter=7)
    result = grad_of(steep, scaling, retry=30)(*STEEP)
    assert result.finite
    assert_trees_equal(result.grads, jnp.float32(600.0))
    assert float(result.scaling.loss_scaling) == FIRST_FINITE
    assert int(result.scaling.skipped) == 18
    assert int(result.scaling.consecutive_skipped) == 0
    assert int(result.scaling.counter) == 1
    if result.value is not None:
        assert_trees_equal(result.value, jnp.float32(600.0))


def test_retry_gives_up_after_that_many_attempts(grad_of):
    scaling = DynamicLossScaling.pow2(2.0**24)
    result = grad_of(steep, scaling, retry=3)(*STEEP)
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 2.0**20
    assert int(result.scaling.skipped) == 4
    assert int(result.scaling.consecutive_skipped) == 4


def test_retry_changes_nothing_where_the_first_attempt_is_finite():
    scaling = DynamicLossScaling.pow2(FIRST_FINITE)
    expected = of_value_and_grad(steep, scaling)(*STEEP)
    result = of_value_and_grad(steep, scaling, retry=5)(*STEEP)
    assert_trees_equal(tuple(result), tuple(expected))


def test_retried_gradient_is_that_of_the_scale_it_reached():
    model, (x, y) = mlp(), mlp_batch()
    step = eqx.filter_jit(mpx.value_and_grad(mlp_loss, retry=30))
    result = step(DynamicLossScaling.pow2(2.0**24), model, x, y)
    assert result.finite
    assert int(result.scaling.skipped) > 0
    reached = StaticLossScaling(result.scaling.loss_scaling)
    expected = eqx.filter_jit(mpx.value_and_grad(mlp_loss))(reached, model, x, y)
    assert_trees_equal(result.grads, expected.grads)


def test_retry_returns_the_aux_of_the_last_attempt_with_its_static_parts():
    loss = lambda w, x: (steep(w, x), {"x": x, "name": "last"})  # noqa: E731
    result = mpx.value_and_grad(loss, has_aux=True, retry=30)(
        DynamicLossScaling.pow2(2.0**10), *STEEP
    )
    assert result.finite
    assert_trees_equal(result.aux, {"x": STEEP[1].astype(jnp.float16), "name": "last"})


def test_retry_works_under_jit_and_vmap():
    @jax.jit
    @jax.vmap
    def step(scale):
        scaling = DynamicLossScaling(scale)
        return mpx.value_and_grad(steep, retry=30)(scaling, *STEEP)

    result = step(jnp.array([2.0**3, 2.0**9]))
    np.testing.assert_array_equal(result.scaling.loss_scaling, [2.0**3, FIRST_FINITE])
    np.testing.assert_array_equal(result.scaling.skipped, [0, 3])
    np.testing.assert_array_equal(result.grads, [600.0, 600.0])


def test_retry_without_a_finite_scale_ends():
    result = mpx.value_and_grad(lambda w: w * jnp.nan, retry=5)(
        DynamicLossScaling.pow2(8.0), jnp.float32(1.0)
    )
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 1.0
    assert int(result.scaling.skipped) == 6


# --- Policies: what stays in f32 ------------------------------------------------------


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.linear = eqx.nn.Linear(4, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.head = eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x):
        hidden = self.norm(self.linear(x))
        return self.head(hidden), hidden


def normed_loss(model, x, y):
    pred, hidden = jax.vmap(model)(x)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, eqx.filter(model, eqx.is_array))
    error = (pred[:, 0].astype(jnp.float32) - y.astype(jnp.float32)) ** 2
    return jnp.mean(error), (dtypes, hidden.dtype.name, y.dtype.name)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), set()),
        (eqx.nn.LayerNorm, {"norm"}),
        ([eqx.nn.LayerNorm, "^y$"], {"norm", "y"}),
        ("^y$", {"y"}),
        (lambda name, leaf: name == "" and leaf.ndim == 1, {"y"}),
    ],
    ids=["nothing", "type", "type and name", "name", "predicate"],
)
def test_what_is_kept_stays_f32(keep, kept):
    model, (x, y) = Normed(), mlp_batch()
    policy = mpx.Policy(compute_dtype="bf16", keep=keep)
    step = mpx.value_and_grad(normed_loss, has_aux=True, policy=policy)
    result = eqx.filter_eval_shape(step, NoLossScaling(), model, x, y)
    dtypes, hidden, target = result.aux
    full = lambda name: "float32" if name in kept else "bfloat16"  # noqa: E731
    assert dtypes.linear.weight == dtypes.head.weight == "bfloat16"
    assert dtypes.norm.weight == dtypes.norm.bias == full("norm")
    assert hidden == "bfloat16"  # a kept norm returns the dtype it was given
    assert target == full("y")
    assert {g.dtype for g in jax.tree.leaves(result.grads)} == {np.dtype(np.float32)}


def test_kept_norm_has_the_gradient_of_code_written_by_hand():
    model, (x, y) = Normed(), mlp_batch()
    low = lambda tree: mpx.cast_tree(tree, "bf16")  # noqa: E731

    def by_hand(model, x, y):
        hidden = jax.vmap(low(model.linear))(low(x)).astype(jnp.float32)
        hidden = jax.vmap(model.norm)(hidden)
        pred = jax.vmap(low(model.head))(low(hidden))[:, 0].astype(jnp.float32)
        return jnp.mean((pred - low(y).astype(jnp.float32)) ** 2)

    policy = mpx.Policy(compute_dtype="bf16", keep=eqx.nn.LayerNorm)
    result = mpx.value_and_grad(normed_loss, has_aux=True, policy=policy)(
        NoLossScaling(), model, x, y
    )
    value, grads = eqx.filter_value_and_grad(by_hand)(model, x, y)
    assert_trees_equal(result.value, value)
    assert_trees_equal(jax.tree.leaves(result.grads), jax.tree.leaves(grads))
    assert isinstance(result.grads.norm, eqx.nn.LayerNorm)


def test_rules_see_paths_without_the_names_of_arguments():
    names = []

    def rule(name, leaf):
        names.append(name)
        return name == "layers/0"

    def loss(model, batch, *rest, scale):
        return jnp.sum(model["layers"][1] * batch["x"] * rest[0]) * scale

    ones = jnp.ones(2)
    policy = mpx.Policy(compute_dtype="bf16", keep=rule)
    eqx.filter_eval_shape(
        mpx.value_and_grad(loss, policy=policy),
        NoLossScaling(),
        {"layers": [ones, ones]},
        {"x": ones, "index": jnp.arange(2)},
        ones,
        scale=jnp.float32(2.0),
    )
    assert sorted(names) == ["", "", "layers/0", "layers/1", "x"]


def test_regular_expression_keeps_one_layer_of_many():
    seen = []

    def loss(model, x):
        seen.extend(layer.weight.dtype.name for layer in model.layers)
        return jnp.sum(x)

    policy = mpx.Policy(compute_dtype="bf16", keep=r"^layers/1/")
    model, (x, _) = mlp(), mlp_batch()
    step = mpx.value_and_grad(loss, policy=policy)
    eqx.filter_eval_shape(step, NoLossScaling(), model, x)
    assert seen == ["bfloat16", "float32"]


def test_large_target_kept_by_its_name_does_not_overflow_f16():
    def loss(w, x, y):
        return jnp.mean((x * w).astype(jnp.float32) - y.astype(jnp.float32))

    w, x, y = jnp.float32(1.0), jnp.ones(4), jnp.full(4, 1e5)
    scaling = StaticLossScaling(8.0)
    without = mpx.value_and_grad(loss)(scaling, w, x, y)
    assert jnp.isinf(without.value)
    policy = mpx.Policy(compute_dtype="f16", keep="^y$")
    result = mpx.value_and_grad(loss, policy=policy)(scaling, w, x, y)
    assert_trees_equal(result.value, jnp.float32(1.0) - jnp.float32(1e5))
    assert_trees_equal(result.grads, jnp.float32(1.0))


def test_loss_scaling_inside_an_argument_stays_f32():
    def loss(state, x):
        assert state["scaling"].loss_scaling.dtype == jnp.float32
        return jnp.sum(state["w"] * x)

    state = {"w": jnp.ones(2), "scaling": DynamicLossScaling.pow2(2.0**20)}
    mpx.value_and_grad(loss)(StaticLossScaling(8.0), state, jnp.ones(2))


# --- Errors ---------------------------------------------------------------------------


def call(loss, *args, has_aux=False, kwargs=None, **options):
    """Returns calls of all functions: an error must not depend on which is used."""
    scaling = StaticLossScaling(8.0)
    return [
        lambda grad_of=grad_of: grad_of(loss, scaling, has_aux=has_aux, **options)(
            *args, **(kwargs or {})
        )
        for grad_of in GRAD_FUNCTIONS.values()
    ]


ONE = jnp.float32(1.0)
LOSS_ERROR = r"must return a real floating scalar"
ERRORS = {
    "vector": (
        call(lambda w: w * jnp.ones(3, w.dtype), ONE),
        TypeError,
        LOSS_ERROR + r".*float16 of shape \(3,\).*jnp.mean",
    ),
    "integer": (call(lambda w: 3, ONE), TypeError, LOSS_ERROR + r".*int of shape \(\)"),
    "integer array": (
        call(lambda w: jnp.int32(3), ONE),
        TypeError,
        LOSS_ERROR + ".*int32",
    ),
    "complex": (
        call(lambda w: lax.complex(*[w.astype(jnp.float32)] * 2), ONE),
        TypeError,
        LOSS_ERROR + ".*complex64",
    ),
    "none": (call(lambda w: None, ONE), TypeError, LOSS_ERROR + ".*NoneType"),
    "pair without has_aux": (
        call(lambda w: (w, w), ONE),
        TypeError,
        LOSS_ERROR + ".*tuple.*pass `has_aux=True`",
    ),
    "no pair with has_aux": (
        call(lambda w: w, ONE, has_aux=True),
        TypeError,
        r"With `has_aux=True`.*pair `\(loss, aux\)`",
    ),
    "triple with has_aux": (
        call(lambda w: (w, 1, 2), ONE, has_aux=True),
        TypeError,
        r"With `has_aux=True`.*pair.*tuple",
    ),
    "vector with has_aux": (
        call(lambda w: (w * jnp.ones(2, w.dtype), 1), ONE, has_aux=True),
        TypeError,
        LOSS_ERROR + r".*\(2,\)",
    ),
    "nothing to differentiate": (
        call(lambda model, x: x, {"step": 3, "index": jnp.arange(3)}, ONE),
        ValueError,
        "`model` is to be differentiated, but it holds no floating array.*argnums",
    ),
    "a batch instead of the model": (
        call(lambda model, x: x, ONE, jnp.arange(3), argnums=(0, 1)),
        ValueError,
        "`x` is to be differentiated, but it holds no floating array",
    ),
    "keyword": (
        call(lambda w: w, kwargs={"w": ONE}),
        TypeError,
        "Argument 0 is to be differentiated, but only 0 were passed.*not by keyword",
    ),
    "argnums": (
        call(lambda w: w, ONE, argnums=1),
        TypeError,
        "Argument 1 is to be differentiated, but only 1 were passed",
    ),
    "argnums twice": (
        call(lambda w, x: w, ONE, ONE, argnums=(0, -2)),
        ValueError,
        r"`argnums` \(0, -2\) names an argument twice",
    ),
    "argument twice": (
        call(lambda w, x: w * x, ONE, ONE, kwargs={"x": ONE}),
        TypeError,
        "multiple values for argument 'x'",
    ),
    "retry": (
        call(lambda w: w, ONE, retry=-1),
        ValueError,
        "`retry` must be 0 or more, but -1",
    ),
    "policy string": (
        call(lambda w: w, ONE, policy="c=int8"),
        ValueError,
        "Unknown dtype 'int8' in the policy",
    ),
    "grad_dtype": (
        call(lambda w: w, ONE, grad_dtype="int32"),
        ValueError,
        "`grad_dtype` must be a floating dtype",
    ),
}


@pytest.mark.parametrize(
    ("calls", "error", "match"), ERRORS.values(), ids=ERRORS.keys()
)
def test_mistake_is_explained(calls, error, match):
    for mistake in calls:
        with pytest.raises(error, match=f"(?s){match}"):
            mistake()


@pytest.mark.parametrize("scaling", [None, 8.0, jnp.ones(3), "dynamic", dict])
def test_wrong_scaling_is_refused(scaling):
    match = r"must be a loss scaling such as.*but .* was given"
    with pytest.raises(TypeError, match=match):
        mpx.value_and_grad(squared_error)(scaling, jnp.ones(3))
    with pytest.raises(TypeError, match=match):
        mpx.accumulate(squared_error, 2)(scaling, jnp.ones(3))


# The type checker of the tests is quicker than these two messages: go around it.


def test_traced_switch_is_refused():
    with pytest.raises(TypeError, match=r"`use_mixed_precision`.*Python bool.*static"):
        jax.jit(_check_switch)(True)


def test_wrong_policy_object_is_refused():
    unchecked = getattr(as_policy, "__wrapped__", as_policy)
    with pytest.raises(TypeError, match="`policy` must be an `mpx.Policy` or a string"):
        unchecked(3.0)


def test_error_inside_the_loss_is_not_swallowed():
    def loss(w):
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        of_value_and_grad(loss, StaticLossScaling(8.0))(jnp.ones(()))
