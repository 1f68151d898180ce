"""Gradients: the right numbers and dtypes, whatever the scale."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from grad_cases import (
    GRAD_FUNCTIONS,
    HALVES,
    check_exact,
    of_value_and_grad,
)
from models import (
    POLICIES,
    equations,
    mlp,
    mlp_batch,
    mlp_loss,
    operand_dtypes,
    squared_error,
)
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal

# --- The scale does not show ----------------------------------------------------------


@pytest.mark.some(1)
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
    assert_trees_equal(step(StaticLossScaling(1.0), w, x).grads, jnp.zeros(3))
    result = step(StaticLossScaling(2.0**10), w, x)
    assert_trees_equal(result.grads, jnp.full(3, 2.0**-25))


def reads_rows(table, tokens):
    return mpx.cast_to_float32(table[tokens])


def reads_by_a_layer(table, tokens):
    layer = eqx.nn.Embedding(weight=table)
    return mpx.cast_to_float32(jax.vmap(layer)(tokens))


def reads_in_remat(table, tokens):
    return jax.checkpoint(lambda table: jnp.take(table.T, tokens, axis=1).T)(table)


def take_alone(loss, policy, *args):
    return mpx.value_and_grad(loss, policy=policy)(NoLossScaling(), *args).grads


def take_in_parts(loss, policy, *args):
    step = mpx.accumulate(loss, 2, mean=False, policy=policy)
    return step(NoLossScaling(), *args).grads


def take_mapped(loss, policy, table, tokens):
    step = mpx.value_and_grad(loss, policy=policy, axis_name="data")
    mapped = jax.vmap(step, in_axes=(None, None, 0), axis_name="data")
    return mapped(NoLossScaling(), table, tokens[None]).grads[0]


@pytest.mark.parametrize(
    ("stored", "reads", "take"),
    [
        ("f32", reads_rows, take_alone),
        ("bf16", reads_rows, take_alone),
        ("f32", reads_by_a_layer, take_alone),
        ("bf16", reads_in_remat, take_alone),
        ("bf16", reads_rows, take_in_parts),
        ("bf16", reads_rows, take_mapped),
    ],
)
def test_gradient_of_a_table_is_summed_in_f32(stored, reads, take):
    table = jnp.ones((4, 2)).astype(mpx.get_policy(stored).param_dtype)
    tokens = jnp.arange(4096) % 2  # a sum of ones stands still at 256 in bf16

    def loss(table, tokens):
        return jnp.sum(reads(table, tokens), dtype=jnp.float32)

    step = jax.jit(functools.partial(take, loss, f"p={stored},c=bf16,o=f32"))
    expected = np.zeros((4, 2), np.float32)
    np.add.at(expected, np.asarray(tokens), 1)
    np.testing.assert_array_equal(step(table, tokens), expected)
    scatters = [
        eqn.outvars[0].aval.dtype.name
        for eqn in equations(jax.make_jaxpr(step)(table, tokens))
        if eqn.primitive.name == "scatter-add"
    ]
    assert scatters == ["float32"]


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
    scaling = DynamicLossScaling(jnp.float32(scale), 2.0**-4)
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


@pytest.mark.parametrize(
    ("name", "bad"), [("f32", np.nan), ("bf16", np.inf), ("f16", -np.inf)]
)
def test_non_finite_gradients_are_found(name, bad, problem):
    x = problem.x.copy()
    x[3, 1] = bad
    scaling = DynamicLossScaling.pow2(2.0**8)
    result = of_value_and_grad(squared_error, scaling, policy=POLICIES[name])(
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


@pytest.mark.parametrize(
    ("name", "of"), list(zip(POLICIES, GRAD_FUNCTIONS, strict=True))
)
def test_exact_problem_has_its_exact_gradient(name, of, problem):
    scaling = DynamicLossScaling.pow2(2.0**8)
    step = GRAD_FUNCTIONS[of](squared_error, scaling, policy=POLICIES[name])
    result = step(problem.w, problem.x, problem.y)
    check_exact(result, problem)


def test_gradient_is_that_of_code_cast_by_hand():
    model, (x, y) = mlp(), mlp_batch()
    dtype, scale = jnp.float16, 2.0**10

    def by_hand(params):
        low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        value = mlp_loss(eqx.combine(low, static), x.astype(dtype), y.astype(dtype))
        return value.astype(jnp.float32) * scale

    params, static = eqx.partition(model, eqx.is_inexact_array)
    value, grads = jax.value_and_grad(by_hand)(params)
    # Without jit: each operation rounds, so that the comparison is bit for bit.
    result = mpx.value_and_grad(mlp_loss, policy=POLICIES["f16"])(
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


@pytest.mark.some(2)
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


def test_infinite_loss_with_finite_gradients_skips_the_step():
    scaling = mpx.DynamicLossScaling.pow2(8.0)
    result = mpx.value_and_grad(lambda w: jnp.sum(w) + jnp.inf)(scaling, jnp.ones(3))
    assert np.all(np.isfinite(result.grads))
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 4.0
