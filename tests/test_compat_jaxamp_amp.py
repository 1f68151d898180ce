"""`mpx.compat.jaxamp.amp`: what the README of jaxamp promises."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from models import equations
from mpx.compat import jaxamp
from mpx.testing import assert_trees_equal

F32, F16, BF16 = jnp.float32, jnp.float16, jnp.bfloat16
X = jnp.linspace(-1.0, 2.0, 12, dtype=F32).reshape(3, 4)
W = jnp.linspace(0.3, 1.7, 20, dtype=F32).reshape(4, 5)
B = jnp.linspace(-0.1, 0.1, 5, dtype=F32)


def dtypes_in(func, name, *args):
    """Returns the dtypes of the operands of one primitive."""
    return {
        var.aval.dtype.type
        for eqn in equations(jax.make_jaxpr(func)(*args))
        if eqn.primitive.name == name
        for var in eqn.invars
    }


def affine(x):
    return x @ W + jnp.broadcast_to(B, (3, 5))


def half_affine(x, dtype):
    x, w, b = (y.astype(dtype) for y in (x, W, B))
    return (x @ w + jnp.broadcast_to(b, (3, 5))).astype(F32)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_amp_is_a_cast_by_hand(dtype):
    expected = half_affine(X, dtype)
    assert not np.array_equal(expected, affine(X))
    decorated = jaxamp.amp(compute_dtype=dtype)(affine)
    for f in (jaxamp.amp(affine, compute_dtype=dtype), decorated):
        assert_trees_equal(f(X), expected)


def test_default_dtype_is_f16():
    assert_trees_equal(jaxamp.amp(affine)(X), half_affine(X, F16))


# One representative for each rule of the default policy.
PRIMITIVES = {
    "add": (lambda x: x + x, F16),
    "sub": (lambda x: x - 2 * x, F16),
    "dot_general": (lambda x: x @ x.T, F16),
    "exp": (lambda x: jnp.exp(x @ x.T), F32),
    "log": (lambda x: jnp.log(x @ x.T), F32),
    "mul": (lambda x: (x @ x.T) * (x @ x.T), F32),
    "div": (lambda x: (x @ x.T) / (x @ x.T), F32),
    "tanh": (lambda x: jnp.tanh(x @ x.T), F32),  # not listed
    "max": (lambda x: jnp.maximum(x @ x.T, x @ x.T), F32),  # not listed
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_default_policy_runs_a_primitive_in(name):
    f, dtype = PRIMITIVES[name]
    assert dtypes_in(jaxamp.amp(f), name, X) == {dtype}


def test_amp_reaches_into_jit_scan_and_remat():
    def f(x):
        def body(carry, _):
            return jax.checkpoint(jax.jit(lambda c: c @ c))(carry), None

        return lax.scan(body, x, None, length=2)[0]

    assert dtypes_in(jaxamp.amp(f), "dot_general", X[:, :3]) == {F16}


STOPS = {
    "context manager": jaxamp.amp_stop,
    "named scope": lambda: jax.named_scope("amp_stop"),
    # Its README says so in one place.
    "misprinted scope": lambda: jax.named_scope("amp_step"),
    "default scope": lambda: jax.named_scope("amp_default"),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_stopped_region_runs_as_written(stop):
    def f(x):
        y = x @ W
        with stop():
            return y, x @ W

    low, high = jaxamp.amp(f)(X)
    assert_trees_equal(high, X @ W)
    assert not np.array_equal(low, high)


def test_stopped_function_runs_as_written():
    assert_trees_equal(jaxamp.amp(jaxamp.amp_stop(affine))(X), affine(X))


def test_scope_of_a_layer_can_be_listed():
    layer = eqx.nn.Linear(4, 5, key=jax.random.key(0))
    policy = jaxamp.default_amp_policy | {
        "eqx.nn.Linear": jaxamp.use_original_precision
    }
    assert_trees_equal(jaxamp.amp(layer, amp_policy=policy)(X[0]), layer(X[0]))
    assert not np.array_equal(jaxamp.amp(layer)(X[0]), layer(X[0]))


def test_listed_scope_that_does_not_exist_warns():
    policy = {"blokc": jaxamp.use_compute_precision}
    with pytest.warns(RuntimeWarning, match="in `scopes` selects nothing") as caught:
        jaxamp.amp(affine, amp_policy=jaxamp.default_amp_policy | policy)(X)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("outer", ["low", "high"])
def test_outermost_scope_wins(outer):
    inner = {"low": "high", "high": "low"}[outer]
    policy = {
        "low": jaxamp.use_compute_precision,
        "high": jaxamp.use_original_precision,
        lax.dot_general_p: jaxamp.use_precision(BF16),
    }

    def f(x):
        with jax.named_scope(outer), jax.named_scope("between"), jax.named_scope(inner):
            return x @ W

    expected = {F16} if outer == "low" else {F32}
    amp = jaxamp.amp(f, amp_policy=policy)
    assert dtypes_in(amp, "dot_general", X) == expected


@pytest.mark.parametrize("name", ["a/b", "layer[0]", "dot_general"])
def test_scope_is_matched_literally(name):
    def f(x):
        with jax.named_scope(name):
            y = x @ W
        return y, x @ W

    amp = jaxamp.amp(f, amp_policy={name: jaxamp.use_compute_precision})
    inside, outside = amp(X)
    assert_trees_equal(outside, X @ W)
    assert not np.array_equal(inside, outside)


def test_dictionary_without_a_primitive_runs_it_as_written():
    policy = {lax.dot_general_p: jaxamp.use_compute_precision}
    amp = jaxamp.amp(affine, amp_policy=policy)
    assert dtypes_in(amp, "dot_general", X) == {F16}
    assert dtypes_in(amp, "add", X) == {F32}


def test_default_of_a_dictionary_is_its_own():
    policy = {"amp_default": jaxamp.use_compute_precision, lax.tanh_p: in_f32}
    amp = jaxamp.amp(lambda x: jnp.sin(jnp.tanh(x)), amp_policy=policy)
    assert dtypes_in(amp, "sin", X) == {F16}
    assert dtypes_in(amp, "tanh", X) == {F32}


def in_f32(compute_dtype, original_dtypes, *invars, **params):
    return [x.astype(F32) for x in invars], params


def test_precision_function_gets_what_is_documented():
    seen = []

    def precision_fn(compute_dtype, original_dtypes, *invars, **params):
        seen.append((compute_dtype, original_dtypes, [x.dtype for x in invars]))
        params["preferred_element_type"] = BF16
        return [x.astype(BF16) for x in invars], params

    policy = jaxamp.default_amp_policy | {lax.dot_general_p: precision_fn}
    amp = jaxamp.amp(lambda x: (x + 0.0) @ W, amp_policy=policy)
    assert dtypes_in(amp, "dot_general", X) == {BF16}
    compute_dtype, original_dtypes, given = seen[0]
    assert compute_dtype == F16
    assert list(original_dtypes) == [F32, F32]
    assert given == [F16, F32]  # the sum before has run low


# What each precision function makes of operands (f16, f32) that were (f32, f32).
CHANGES = {
    "original": (jaxamp.use_original_precision, [F32, F32]),
    "compute": (jaxamp.use_compute_precision, [BF16, BF16]),
    "widest": (jaxamp.use_widest_precision, [F32, F32]),
    "chosen": (jaxamp.use_precision(F16), [F16, F16]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_precision_function_casts_to(name):
    precision_fn, expected = CHANGES[name]
    operands = [jnp.ones(2, F16), jnp.ones(2, F32)]
    outs, params = precision_fn(
        BF16, [F32, F32], *operands, preferred_element_type=np.dtype(F32), axis=0
    )
    assert [x.dtype for x in outs] == expected
    assert params["axis"] == 0
    wanted = F32 if name == "original" else expected[0]
    assert params["preferred_element_type"] == wanted


def test_compute_precision_leaves_other_kinds_of_numbers_alone():
    operands = [jnp.ones(2, jnp.complex64), jnp.ones(2, F16), jnp.arange(2)]
    outs, _ = jaxamp.use_compute_precision(
        F16, [jnp.complex64, F32, jnp.int32], *operands
    )
    assert [x.dtype for x in outs] == [jnp.complex64, F32, jnp.int32]


def test_gradients_are_f32_and_those_of_the_example():
    params = {"w": W, "b": B}

    def loss(params, x):
        return jnp.sum((x @ params["w"] + jnp.broadcast_to(params["b"], (3, 5))) ** 2)

    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(loss))
    state, grads = jax.jit(grad_fn)(
        params, X, dynamic_scaler_state=jaxamp.DynamicLossScaler(scaler=2.0**6)
    )
    expected = jax.grad(loss)(params, X)
    assert int(state.total_resets) == 0
    for grad, truth in zip(*map(jax.tree.leaves, (grads, expected)), strict=True):
        assert grad.dtype == F32
        # Three sums of f16 numbers in a row, each right to 2**-11 of its largest term.
        np.testing.assert_allclose(grad, truth, atol=2.0**-9 * np.abs(truth).max())


def test_training_loop_of_its_readme_trains():
    optimizer = optax.sgd(0.05)
    truth = jnp.array([1.0, -2.0, 0.5, 3.0])
    data = jax.random.normal(jax.random.key(0), (32, 4))

    def loss_fn(model_state, minibatch):
        x, y = minibatch
        error = x @ model_state - y
        return jnp.mean(error**2), jnp.max(jnp.abs(error))

    def train_step(model_state, opt_state, minibatch, optimizer, dynamic_scaler_state):
        amp_loss_fn = jaxamp.amp(loss_fn)
        value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(
            amp_loss_fn, has_aux=True
        )
        dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
            model_state, minibatch, dynamic_scaler_state=dynamic_scaler_state
        )
        updates, opt_state = optimizer.update(grads, opt_state, model_state)
        model_state = optax.apply_updates(model_state, updates)
        return model_state, opt_state, dynamic_scaler_state, loss, accuracy

    train_step_jit = jax.jit(train_step, static_argnums=3)
    model_state, state = jnp.zeros(4), jaxamp.DynamicScalerState()
    opt_state = optimizer.init(model_state)
    for _ in range(150):
        model_state, opt_state, state, *metrics = train_step_jit(
            model_state, opt_state, (data, data @ truth), optimizer, state
        )
        assert {x.dtype for x in (model_state, *metrics)} == {np.dtype(F32)}
    # Sums of products up to 10 in f16, whose numbers there are 2**-7 apart.
    np.testing.assert_allclose(model_state, truth, atol=2.0**-6)
