"""What `optimizer_update` and `cond_update` refuse or warn of."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpx
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite
from update_cases import (
    Model,
    gradients,
    make_nnx,
    make_train_state,
    momentum_case,
    optimizer_and_extras,
)

# `optax.adam` raises a Python float to an integer array.
pytestmark = [
    pytest.mark.standard_promotion,
]


# --- Errors ---------------------------------------------------------------------------


@pytest.fixture
def momentum():
    return momentum_case()


def wrong_shape(grads):
    return {**grads, "layers": [{"b": jnp.ones(4)}]}


def without_layers(grads):
    return {"w": grads["w"]}


def with_more(grads):
    return {**grads, "extra": jnp.ones(2)}


def with_subtree(grads):
    return {**grads, "w": {"q": grads["w"]}}


GRADIENT_ERRORS = [
    (wrong_shape, r"`layers/0/b` has shape \(4,\), but the parameter has shape \(3,\)"),
    (without_layers, r"`optimizer_update`.*only in the model: \['layers/0/b'\]"),
    (with_more, r"`optimizer_update`.*only in the gradients: \['extra'\]"),
    (with_subtree, r"`optimizer_update`.*only in the gradients: \['w/q'\]"),
]


@pytest.mark.parametrize("skip", ["select", "never"])
@pytest.mark.parametrize(
    ("change", "match"), GRADIENT_ERRORS, ids=lambda x: getattr(x, "__name__", "")
)
def test_gradients_that_do_not_fit_are_named(change, match, skip, momentum):
    params, optimizer, state, grads = momentum
    with pytest.raises(ValueError, match=match):
        mpx.optimizer_update(params, optimizer, state, change(grads), True, skip=skip)


@pytest.mark.parametrize("make", [optax.sgd, mpx.optim.flash_sgd])
def test_a_whole_result_is_no_gradients(make):
    params, optimizer = jnp.ones(4), make(0.1)
    state = optimizer.init(params)
    loss = mpx.value_and_grad(lambda w: jnp.sum(w * w))
    result = loss(mpx.NoLossScaling(), params)
    for take in (
        lambda: mpx.optimizer_update(params, optimizer, state, result, result.finite),
        lambda: mpx.optim.flash_sgd(0.1).step(params, state, result),
    ):
        with pytest.raises(TypeError, match="whole `GradResult`.*`result.grads`"):
            take()


@pytest.mark.parametrize(
    "flag", [1, 0.0, None, "yes", jnp.ones(2, bool), jnp.ones(()), [True]], ids=str
)
def test_flag_that_is_no_boolean_scalar_is_refused(flag, momentum):
    params, optimizer, state, grads = momentum
    with pytest.raises(TypeError, match="`grads_finite` must be a boolean scalar"):
        mpx.optimizer_update(params, optimizer, state, grads, flag)


def test_unknown_skip_is_refused(momentum, monkeypatch):
    params, optimizer, state, grads = momentum
    match = "`skip` must be one of 'select', 'never', but 'maybe'"
    # A user has no type checker at run time.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for given in ((params, optimizer, state), (*make_nnx(optimizer), None)):
        with pytest.raises(ValueError, match=match):
            mpx.optimizer_update(*given, grads, True, skip="maybe")


@pytest.mark.parametrize(
    "optimizer",
    [None, 3, optax.adam, dict, {}],
    ids=["None", "3", "adam", "dict", "{}"],
)
def test_what_is_no_optimizer_is_refused(optimizer, momentum):
    params, _, state, grads = momentum
    with pytest.raises(TypeError, match="must be an optax transformation.*was given"):
        mpx.optimizer_update(params, optimizer, state, grads, True)


def test_flax_models_beside_a_plain_optimizer_are_told_how_to_pass_it(momentum):
    params, optimizer, state, grads = momentum
    module = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    taken, new = nnx.state(module), optimizer.init(nnx.state(module, nnx.Param))
    with pytest.raises(TypeError, match=r"NNX module. Pass `nnx.Optimizer\(model, "):
        mpx.optimizer_update(module, optimizer, new, taken, True)
    train_state = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    with pytest.raises(TypeError, match=r"holds its optimizer and state\. Pass `None`"):
        mpx.optimizer_update(train_state, optimizer, state, grads, True)


@pytest.mark.some(1)
@pytest.mark.parametrize("skip", ["select", "never"])
@pytest.mark.parametrize("name", ["adamw", "clip and schedule", "MultiSteps", "sgd"])
def test_state_made_for_integer_leaves_takes_the_step_of_the_others(name, skip):
    optimizer, _ = optimizer_and_extras(name)
    floats: Any = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    model: Any = {**floats, "n": jnp.arange(2), "mask": jnp.array([True, False])}
    grads = {"w": jnp.full((2, 2), 0.5), "b": jnp.ones(2), "n": None, "mask": None}
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    expected_state = optimizer.init(floats)
    for _ in range(2):
        model, state = mpx.optimizer_update(
            model, optimizer, state, grads, True, skip=skip
        )
        floats, expected_state = mpx.optimizer_update(
            *(floats, optimizer, expected_state),
            {"w": grads["w"], "b": grads["b"]},
            *(True,),
            skip=skip,
        )
    assert_trees_equal({"w": model["w"], "b": model["b"]}, floats)
    assert model["n"].tolist() == [0, 1]
    assert model["mask"].tolist() == [True, False]


WRONG_STATES = {
    "None": lambda params: None,
    "of another optimizer": lambda params: optax.sgd(0.1).init(params),
    "of another model": lambda params: optax.adam(0.1).init({"v": jnp.ones(2)}),
    "of one link": lambda params: optax.scale_by_adam().init(params),
}


@pytest.mark.parametrize("make", WRONG_STATES.values(), ids=WRONG_STATES)
def test_state_that_does_not_fit_the_optimizer_is_an_error(make):
    params = {"w": jnp.ones(2)}
    match = (
        "`optimizer_state` does not fit the optimizer .* it should be .*ScaleByAdamState"
        r".* was given. Make it with `optimizer.init\(eqx.filter\(model"
    )
    with pytest.raises(ValueError, match=match):
        mpx.optimizer_update(params, optax.adam(0.1), make(params), params, True)


@pytest.mark.parametrize(
    ("param", "grad"),
    [("f4", "i4"), ("f4", "bool"), ("f4", "c8"), ("c8", "i4")],
)
@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), mpx.optim.flash_sgd(0.1)], ids=type
)
def test_gradient_that_is_not_floating_is_named(param, grad, optimizer):
    params, grads = {"w": jnp.ones(2, param)}, {"w": jnp.ones(2, grad)}
    state = optimizer.init({"w": jnp.ones(2)})
    match = f"The gradient of `w` is {np.dtype(grad)}, but the parameter is"
    with pytest.raises(TypeError, match=match):
        mpx.optimizer_update(params, optimizer, state, grads, True)


def test_complex_parameter_takes_a_complex_gradient():
    params = jnp.ones(2, "c8")
    optimizer = optax.sgd(0.5)
    after, _ = mpx.optimizer_update(
        params, optimizer, optimizer.init(params), params, True
    )
    assert after.tolist() == [0.5, 0.5]


# --- Arguments for the optimizer ------------------------------------------------------


UNKNOWN_ARGUMENTS = [
    (optax.adam, "grad_scale", "Only the compressed optimizers"),
    (
        lambda _: mpx.optim.skip_nonfinite(optax.adam(0.1)),
        "grad_scale",
        "Only the compressed",
    ),
    (optax.adam, "vlaue", "Did you mean `value`"),
    (optax.adam, "grads_scale", "Did you mean `grad_scale`"),
    (optax.adam, "finite", "Pass it as `grads_finite`"),
    (mpx.optim.flash_adamw, "gradscale", "Did you mean `grad_scale`"),
    (mpx.optim.flash_adamw, "loss_scale", "It takes `grad_scale`"),
]


@pytest.mark.parametrize(("make", "name", "hint"), UNKNOWN_ARGUMENTS)
def test_argument_that_the_optimizer_would_ignore_is_an_error(make, name, hint):
    params, optimizer = {"w": jnp.ones(2)}, make(0.1)
    match = f"The optimizer does not take the argument `{name}`. {hint}"
    with pytest.raises(TypeError, match=match):
        mpx.optimizer_update(
            *(params, optimizer, optimizer.init(params), params, True), **{name: 0.5}
        )


def test_nnx_optimizer_refuses_an_argument_that_it_would_ignore():
    model, optimizer = make_nnx(optax.sgd(0.1))
    grads = nnx.state(model, nnx.Param)
    with pytest.raises(TypeError, match="does not take the argument `grad_scale`"):
        mpx.optimizer_update(model, optimizer, None, grads, True, grad_scale=0.5)


@pytest.mark.parametrize("chained", [False, True])
def test_compressed_optimizer_takes_a_gradient_scale(chained):
    params, grads = jnp.ones(2), jnp.full(2, 8.0)
    optimizer = mpx.optim.flash_sgd(1.0)
    optimizer = optax.chain(optax.identity(), optimizer) if chained else optimizer
    after, _ = mpx.optimizer_update(
        *(params, optimizer, optimizer.init(params), grads, True), grad_scale=1 / 16
    )
    assert after.tolist() == [0.5, 0.5]


def test_value_of_the_loss_does_not_keep_a_compressed_optimizer_from_its_own_step():
    params = {"w": jnp.ones((8, 32), jnp.bfloat16)}
    optimizer = mpx.optim.flash_adamw(0.1)

    def program(**extra):
        def update(params, state, grads):
            return mpx.optimizer_update(params, optimizer, state, grads, True, **extra)

        args = params, optimizer.init(params), mpx.cast_to_float32(params)
        return str(jax.make_jaxpr(update)(*args))

    assert program(value=jnp.float32(1.0), grad=params) == program()


# --- 16-bit parameters ----------------------------------------------------------------


def bf16_params():
    return {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2)}


def step_with(optimizer, params, grads=None):
    grads = mpx.cast_to_float32(params) if grads is None else grads
    trained = {name: None if grads[name] is None else params[name] for name in grads}
    return jax.jit(lambda p, s, g: mpx.optimizer_update(p, optimizer, s, g, True))(
        params, optimizer.init(trained), grads
    )


def test_plain_optimizer_of_16_bit_parameters_warns_once_with_the_remedies():
    match = (
        "`w` is stored in bfloat16, and the optimizer keeps no master weights: an update "
        "of less than 0.2 % .*f32.*mpx.optim.master_weights.*mpx.optim.flash_adamw"
    )
    with pytest.warns(RuntimeWarning, match=match) as caught:
        step_with(optax.adam(0.1), bf16_params())
    (warning,) = caught
    assert warning.filename == __file__


def test_flax_optimizers_of_16_bit_parameters_warn_too():
    state = make_train_state("bfloat16")
    with pytest.warns(RuntimeWarning, match="`bias` is stored in bfloat16"):
        mpx.optimizer_update(state, None, None, state.params, True)
    model = nnx.Linear(2, 2, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.state(model, nnx.Param)
    with pytest.warns(RuntimeWarning, match="`bias` is stored in float16.*0.02 %"):
        mpx.optimizer_update(model, optimizer, None, grads, True)


@pytest.mark.parametrize(
    "optimizer",
    [
        mpx.optim.master_weights(optax.adam(0.1)),
        mpx.optim.skip_nonfinite(mpx.optim.master_weights(optax.adam(0.1))),
        optax.chain(optax.clip(1.0), mpx.optim.flash_adamw(0.1)),
        mpx.optim.flash_adamw(0.1),
    ],
    ids=["masters", "wrapped masters", "chained flash", "flash"],
)
def test_optimizer_with_masters_does_not_warn(optimizer):
    step_with(optimizer, bf16_params())


def test_frozen_16_bit_parameters_do_not_warn():
    step_with(optax.adam(0.1), bf16_params(), {"w": None, "b": jnp.ones(2)})


# --- cond_update ----------------------------------------------------------------------


def test_cond_update_works_as_a_plain_decorator():
    @mpx.cond_update
    def descend(params, grads, *, rate=1.0):
        """Goes downhill."""
        return jax.tree.map(lambda p, g: p - rate * g, params, grads)

    params, grads = {"w": jnp.ones(2)}, {"w": jnp.full(2, 0.25)}
    assert_trees_equal(descend(True, params, grads), {"w": jnp.full(2, 0.75)})
    assert_trees_equal(descend(True, params, grads, rate=2.0), {"w": jnp.full(2, 0.5)})
    assert_trees_equal(descend(False, params, inject_nonfinite(grads)), params)
    assert (descend.__name__, descend.__doc__) == ("descend", "Goes downhill.")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_cond_update_replaces_the_first_arguments(compiled):
    @mpx.cond_update()
    def step(params, state, count, grads):
        return params - grads.astype(params.dtype), {"m": state["m"] + grads}, count + 1

    step = jax.jit(step) if compiled else step
    params, state = jnp.ones(2, jnp.bfloat16), {"m": jnp.zeros(2)}
    grads = jnp.full(2, 0.25)
    taken = step(True, params, state, 7, grads)
    assert_trees_equal(taken[:2], (jnp.full(2, 0.75, jnp.bfloat16), {"m": grads}))
    assert int(taken[2]) == 8
    skipped = step(jnp.array(False), params, state, 7, grads * jnp.nan)
    assert_trees_equal(skipped[:2], (params, state))
    assert int(skipped[2]) == 7


def test_cond_update_takes_modules_and_leaves_the_rest_of_them_alone():
    model = Model()

    @mpx.cond_update
    def step(model, grads):
        return eqx.apply_updates(model, grads)

    grads = gradients(model, 0)
    assert_trees_equal(step(False, model, inject_nonfinite(grads)), model)
    taken = step(True, model, grads)
    assert_trees_equal(taken.weight, model.weight + grads.weight)
    assert (taken.activation, taken.name) == (jax.nn.relu, "model")
    assert isinstance(taken.rate, float)


def test_cond_update_skips_a_result_that_overflows():
    @mpx.cond_update
    def update(params, momentum, grads):
        return params - grads, momentum + grads * grads

    before = jnp.ones(2), jnp.zeros(2)
    assert_trees_equal(update(True, *before, jnp.array([1.0, 3e19])), before)
    taken = update(True, *before, jnp.array([1.0, 2.0]))
    assert_trees_equal(taken, (jnp.array([0.0, -1.0]), jnp.array([1.0, 4.0])))
    # The result is infinite in the dtype of the argument.
    half = jnp.ones(2, jnp.float16)
    same, _ = update(True, half, jnp.zeros(2), jnp.array([1.0, 1e6]))
    assert_trees_equal(same, half)


def test_functions_that_assign_to_what_they_get_can_be_skipped():
    @mpx.cond_update
    def descend(params, grads):
        params["w"] = params["w"] - grads["w"]
        return params

    params, bad = {"w": jnp.ones(2)}, {"w": jnp.full(2, jnp.nan)}
    assert_trees_equal(descend(False, params, bad), {"w": jnp.ones(2)})
    assert_trees_equal(descend(True, params, {"w": jnp.ones(2)})["w"], jnp.zeros(2))
    assert_trees_equal(params, {"w": jnp.ones(2)})

    def count(updates, state, params=None):
        state["n"] = state["n"] + 1
        return updates, state

    counting = optax.GradientTransformation(lambda _: {"n": jnp.zeros(())}, count)
    _, state = mpx.optimizer_update(params, counting, counting.init(0), bad, False)
    assert state == {"n": 0.0}
    skipping: Any = mpx.optim.skip_nonfinite(counting)
    _, state = skipping.update(bad, skipping.init(params), params)
    assert state.inner_state == {"n": 0.0}


def test_cond_update_counts_a_namedtuple_as_one_value():
    state = optax.TraceState(jnp.zeros(2))
    step = mpx.cond_update(lambda state, grads: state._replace(trace=grads))
    assert_trees_equal(step(False, state, jnp.ones(2)), state)
    assert_trees_equal(step(True, state, jnp.ones(2)).trace, jnp.ones(2))


CONDUPDATE_ERRORS = [
    (lambda p: (p, p), "returned 2 values for 1 arguments.*first arguments"),
    (lambda p: {"w": p["w"], "v": 1}, r"only in the first: \['0/v'\]"),
    (lambda p: {"w": jnp.ones(3)}, r"`0/w` is \(3,\).*\(2,\) in the second"),
]


@pytest.mark.parametrize(("function", "match"), CONDUPDATE_ERRORS, ids=range(3))
def test_cond_update_refuses_results_that_do_not_fit(function, match):
    with pytest.raises(ValueError, match=match):
        mpx.cond_update(function)(True, {"w": jnp.ones(2)})


def test_cond_update_leaves_its_own_name_to_the_function():
    update = mpx.cond_update(lambda p, grads_finite: p * grads_finite)
    assert_trees_equal(update(True, jnp.ones(2), grads_finite=3.0), jnp.full(2, 3.0))


def test_cond_update_refuses_a_wrong_flag():
    with pytest.raises(TypeError, match="`grads_finite` must be a boolean scalar"):
        mpx.cond_update(lambda p: p)(jnp.ones(2), jnp.ones(2))
