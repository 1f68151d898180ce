"""`mpx.compat.jaxamp`: its loss scaler, without its faults."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import mpx
from mpx.compat import jaxamp
from mpx.testing import assert_trees_equal

TRANSFORMS = {
    "grad": jaxamp.dynamic_scale_grad,
    "value_and_grad": jaxamp.dynamic_scale_value_and_grad,
}


def unpack(name, has_aux, results):
    """Returns `(value, aux, grads)`, `None` for what there is not."""
    if name == "grad":
        grads, aux = results if has_aux else (results, None)
        return None, aux, grads
    value, grads = results
    value, aux = value if has_aux else (value, None)
    return value, aux, grads


def numbers(state):
    return float(state.scaler), int(state.count), int(state.total_resets)


@pytest.fixture(params=TRANSFORMS, ids=str)
def name(request):
    return request.param


# --- The example: x**3 in f16 ---------------------------------------------------------

# The gradient 12 times the scale must fit into f16: 2**12 is the largest that does.
X = jnp.float16(2.0)


@pytest.mark.parametrize(
    ("name", "has_aux", "filter"),
    [
        ("grad", False, True),
        ("grad", True, False),
        ("value_and_grad", False, False),
        ("value_and_grad", True, True),
    ],
)
def test_scale_settles_at_the_largest_that_works(name, has_aux, filter):
    def cube(x):
        return (x**3, 7.0) if has_aux else x**3

    grad_fn = jax.jit(
        TRANSFORMS[name](cube, has_aux=has_aux, filter=filter, redo_on_nan=100)
    )
    state = jaxamp.DynamicScalerState(scaler=2**15, patience=3)
    seen = []
    for _ in range(6):
        state, results = grad_fn(X, dynamic_scaler_state=state)
        value, aux, grads = unpack(name, has_aux, results)
        assert_trees_equal(grads, jnp.float32(12.0))
        if name == "value_and_grad":
            assert_trees_equal(value, jnp.float32(8.0))
        assert float(aux) == 7.0 if has_aux else aux is None
        seen.append(numbers(state))
    # Three resets at once; growth comes with the step after `patience` good ones, and
    # the step after that has to go back again.
    assert seen == [
        (2.0**12, 1, 3),
        (2.0**12, 2, 3),
        (2.0**12, 3, 3),
        (2.0**13, 0, 3),
        (2.0**12, 1, 4),
        (2.0**12, 2, 4),
    ]


def test_without_redo_each_call_halves_the_scale_once(name):
    grad_fn = jax.jit(TRANSFORMS[name](lambda x: x**3, redo_on_nan=0))
    state = jaxamp.DynamicScalerState()
    seen = []
    for _ in range(4):
        state, results = grad_fn(X, dynamic_scaler_state=state)
        _, _, grads = unpack(name, False, results)
        seen.append((*numbers(state), float(grads)))
    assert seen == [
        (2.0**14, 0, 1, np.inf),
        (2.0**13, 0, 2, np.inf),
        (2.0**12, 0, 3, np.inf),
        (2.0**12, 1, 3, 12.0),
    ]


def test_redo_gives_up_after_so_many_times(name):
    grad_fn = jax.jit(TRANSFORMS[name](lambda x: x**3, redo_on_nan=2))
    state = jaxamp.DynamicScalerState()
    state, results = grad_fn(X, dynamic_scaler_state=state)
    # The first try and two more.
    assert numbers(state) == (2.0**12, 0, 3)
    assert not np.isfinite(unpack(name, False, results)[2])


def test_defaults_of_redo_are_those_of_the_code():
    state = jaxamp.DynamicScalerState()
    after, _ = jaxamp.dynamic_scale_grad(lambda x: x**3)(X, dynamic_scaler_state=state)
    assert numbers(after) == (2.0**14, 0, 1)
    after, (value, grads) = jaxamp.dynamic_scale_value_and_grad(lambda x: x**3)(
        X, dynamic_scaler_state=state
    )
    assert numbers(after) == (2.0**12, 1, 3)
    assert (float(value), float(grads)) == (8.0, 12.0)


# --- What decides ---------------------------------------------------------------------


def test_infinite_value_with_finite_gradients_is_no_overflow():
    def loss(x):
        return x * 3.0 + jnp.float32(np.inf)

    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)
    state, (value, grads) = grad_fn(
        jnp.float32(1.0), dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    assert numbers(state) == (2.0**15, 1, 0)
    assert (float(value), float(grads)) == (np.inf, 3.0)


def test_nan_in_aux_is_no_overflow(name):
    def loss(x):
        return x * 3.0, {"diagnostics": jnp.float32(np.nan)}

    grad_fn = TRANSFORMS[name](loss, has_aux=True, redo_on_nan=3)
    state, results = grad_fn(
        jnp.float32(1.0), dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    assert numbers(state) == (2.0**15, 1, 0)
    _, aux, grads = unpack(name, True, results)
    assert np.isnan(float(aux["diagnostics"]))
    assert float(grads) == 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_gradient_among_many_is_an_overflow(name, bad):
    def loss(params):
        return jnp.sum(params["a"] * 2.0) + jnp.sum(params["b"] * jnp.array([1.0, bad]))

    grad_fn = TRANSFORMS[name](loss, redo_on_nan=0)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state, _ = grad_fn(params, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert numbers(state) == (2.0**14, 0, 1)


AUX = {
    "string": "a name",
    "function": jnp.tanh,
    "none": None,
    "python number": 3,
    "mixed": {
        "text": "hello",
        "array": jnp.arange(3),
        "half": jnp.ones(2, jnp.float16),
    },
}


@pytest.mark.parametrize("redo", [0, 5])
@pytest.mark.parametrize("aux", AUX.values(), ids=AUX.keys())
def test_aux_may_be_anything_and_comes_back_as_it_is(name, aux, redo):
    grad_fn = TRANSFORMS[name](lambda x: (x**3, aux), has_aux=True, redo_on_nan=redo)
    state = jaxamp.DynamicScalerState(scaler=2.0**13)
    state, results = grad_fn(X, dynamic_scaler_state=state)
    assert float(state.scaler) == 2.0**12
    _, returned, grads = unpack(name, True, results)
    assert float(grads) == (12.0 if redo else np.inf)
    if isinstance(aux, int) and redo:
        assert int(returned) == aux  # it has been through a loop
    else:
        assert_trees_equal(returned, aux)


# --- Bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [np.nan, 2.0**-50], ids=str)
def test_scale_reaches_neither_zero_nor_infinity(factor):
    weights = jnp.arange(1.0, 5.0)

    def loss(x, factor):
        return jnp.sum(x * weights * factor)

    grad_fn = jaxamp.dynamic_scale_grad(loss, redo_on_nan=0)

    @jax.jit
    def run(state, x, factor):
        def step(state, _):
            return grad_fn(x, factor, dynamic_scaler_state=state)

        return lax.scan(step, state, length=300)

    start = jaxamp.DynamicScalerState(patience=0)
    state, grads = run(start, jnp.ones(4), jnp.float32(factor))
    # Beyond, the scale or its reciprocal is subnormal: processors flush it to zero.
    assert 2.0**-126 <= float(state.scaler) <= 2.0**126
    np.testing.assert_array_equal(grads[-1], np.asarray(weights) * np.float32(factor))
    # And it finds back: of two steps one may be that which finds the limit.
    _, grads = run(state, jnp.ones(4), jnp.float32(2.0))
    assert_trees_equal(grads[-2:].min(axis=0), 2 * weights)


# --- The state ------------------------------------------------------------------------


def test_state_is_a_tuple_of_numbers_with_jaxamps_defaults():
    state = jaxamp.DynamicScalerState()
    assert state == (2000, 2.0, 2.0**15, 0, 0)
    assert state._fields == (
        "patience",
        "adjust_factor",
        "scaler",
        "count",
        "total_resets",
    )


def test_step_returns_arrays_and_compiles_at_most_twice():
    traces = 0

    def loss(x):
        nonlocal traces
        traces += 1
        return x**2

    grad_fn = jax.jit(jaxamp.dynamic_scale_grad(loss, redo_on_nan=0))
    state = jaxamp.DynamicScalerState()
    for _ in range(4):
        state, _ = grad_fn(jnp.float32(1.0), dynamic_scaler_state=state)
    dtypes = [leaf.dtype for leaf in state]
    assert dtypes == ["int32", "float32", "float32", "int32", "int32"]
    assert traces == 2  # for Python numbers, and for arrays ever after


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scale_given_in_16_bits_is_used_in_f32(dtype):
    state = jaxamp.DynamicScalerState(scaler=jnp.asarray(2.0**15, dtype), patience=0)
    grad_fn = jaxamp.dynamic_scale_grad(lambda x: x * 3.0)
    for power in (16, 17):
        state, grads = grad_fn(jnp.float32(1.0), dynamic_scaler_state=state)
        assert_trees_equal(state.scaler, jnp.float32(2.0**power))
        assert float(grads) == 3.0


def test_adjust_factor_is_used_both_ways():
    state = jaxamp.DynamicScalerState(patience=0, adjust_factor=4.0, scaler=16.0)
    grad_fn = jaxamp.dynamic_scale_grad(lambda x, factor: x * factor)
    for factor, expected in ((1.0, 64.0), (np.inf, 16.0), (np.nan, 4.0)):
        state, _ = grad_fn(
            jnp.float32(1.0), jnp.float32(factor), dynamic_scaler_state=state
        )
        assert float(state.scaler) == expected


# --- Arguments ------------------------------------------------------------------------


def test_modules_are_differentiated_with_filter(name):
    class Model(eqx.Module):
        weight: jax.Array
        table: jax.Array
        activation: object

    model = Model(jnp.array([1.0, -2.0]), jnp.arange(2), jax.nn.relu)

    def loss(model, x, *, factor):
        return factor * jnp.sum(model.activation(model.weight) * x)

    grad_fn = TRANSFORMS[name](loss, redo_on_nan=0)
    _, results = grad_fn(
        model,
        jnp.array([3.0, 5.0]),
        factor=2.0,
        dynamic_scaler_state=jaxamp.DynamicScalerState(),
    )
    _, _, grads = unpack(name, False, results)
    assert_trees_equal(grads, Model(jnp.array([6.0, 0.0]), None, None))


def test_arguments_of_the_transformation_are_passed_on():
    grad_fn = jaxamp.dynamic_scale_grad(
        lambda a, b: a * b, filter=False, argnums=(0, 1)
    )
    _, grads = grad_fn(
        jnp.float32(2.0),
        jnp.float32(5.0),
        dynamic_scaler_state=jaxamp.DynamicScalerState(),
    )
    assert_trees_equal(grads, (jnp.float32(5.0), jnp.float32(2.0)))


def test_any_transformation_can_be_scaled():
    scaled_jacobian = jax.jit(jaxamp.dynamic_scale_tx(jax.jacrev)(lambda x: x * x))
    state, jacobian = scaled_jacobian(
        jnp.arange(3.0), dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    assert_trees_equal(jacobian, 2 * jnp.diag(jnp.arange(3.0)))
    assert numbers(state) == (2.0**15, 1, 0)


def test_scaling_of_a_transformation_can_be_chosen():
    def scale(result, state):
        return result["loss"] * state.scaler, result["name"]

    def unscale(results, state):
        return {"grads": results[0] / state.scaler, "name": results[1]}

    tx = jaxamp.dynamic_scale_tx(
        eqx.filter_grad, 2, unscale, scale, check_fn=lambda results: results["grads"]
    )
    grad_fn = tx(lambda x: {"loss": x * x, "name": "square"}, has_aux=True)
    _, results = grad_fn(
        jnp.float32(3.0), dynamic_scaler_state=jaxamp.DynamicScalerState()
    )
    assert results["name"] == "square"
    assert float(results["grads"]) == 6.0


# --- As a whole -----------------------------------------------------------------------


@pytest.mark.standard_promotion
def test_training_loop_converges_through_overflows():
    random = np.random.default_rng(0)
    data = jnp.array(random.normal(size=(32, 4)), jnp.float16)
    true = jnp.array([1.0, -2.0, 0.5, 3.0])
    target = data.astype(jnp.float32) @ true
    optimizer = mpx.optim.skip_nonfinite(optax.sgd(0.1))

    def loss_fn(params, x, y):
        prediction = (x @ params.astype(jnp.float16)).astype(jnp.float32)
        loss = jnp.mean((prediction - y) ** 2)
        return loss, {"residual": jnp.max(jnp.abs(prediction - y))}

    value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def train_step(params, opt_state, scaler_state, x, y):
        scaler_state, ((loss, aux), grads) = value_and_grad_fn(
            params, x, y, dynamic_scaler_state=scaler_state
        )
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, scaler_state, loss, aux

    params = jnp.zeros(4)
    state = (
        optimizer.init(params),
        jaxamp.DynamicScalerState(scaler=2.0**20, patience=5),
    )
    for _ in range(60):
        params, *state, loss, aux = train_step(params, *state, data, target)
        assert mpx.all_finite((params, loss, aux))
    assert int(state[1].total_resets) > 0
    # f16 weights and products: some 2**-11 of numbers up to about 10.
    np.testing.assert_allclose(params, true, atol=0.02)
