"""Compressed optimizers as optax transformations, and inside others."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from flash_cases import (
    SMALL,
    apply,
    make_grads,
    make_params,
    optimizer,
    stepper,
    train,
    updater,
)
from models import count_traces
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

# `optax.apply_updates` adds an f32 update to a bf16 parameter.
pytestmark = [
    pytest.mark.standard_promotion,
]


def flash_state(tree) -> Any:
    """Returns the state of the compressed optimizer inside an optax state."""
    is_state = lambda x: isinstance(x, mpx.optim.FlashState)  # noqa: E731
    (state,) = filter(is_state, jax.tree.leaves(tree, is_leaf=is_state))
    return state


# --- update and step ------------------------------------------------------------------


# With two moments, one and none; the update does not depend on the rule.
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("adamw", jnp.bfloat16),
        ("lion", jnp.float16),
        ("sgd without momentum", jnp.bfloat16),
    ],
    ids=str,
)
def test_update_gives_the_parameters_of_step(name, dtype):
    tx, params = optimizer(name), make_params(dtype)
    one = two = params, tx.init(params)
    step, update = stepper(tx), updater(tx)
    for number in range(3):
        grads = make_grads(number)
        one, two = tuple(step(*one, grads)), update(*two, grads)
        assert_trees_equal(one[0], two[0])
        assert_trees_equal(one[1].count, two[1].count)
    # Two programs, in which a sum may be fused: the rest agrees to a code.
    for a, b in zip(*map(jax.tree.leaves, (one[1], two[1])), strict=True):
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() <= 1


def test_updates_of_f32_parameters_are_those_of_step_to_a_rounding():
    tx = optimizer()
    params = make_params(jnp.float32)
    state = tx.init(params)
    stepped = stepper(tx)(params, state, make_grads(0)).params
    applied, _ = updater(tx)(params, state, make_grads(0))
    for a, b in zip(*map(jax.tree.leaves, (stepped, applied)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-22, atol=2.0**-24)


def test_updates_are_f32_and_none_where_there_is_no_gradient():
    tx, params = optimizer(), make_params()
    grads = make_grads(0) | {"w": None}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["w"] is None
    assert updates["layers"][0]["b"].dtype == jnp.float32
    assert_trees_equal(state.mu["w"], tx.init(params).mu["w"])


def test_ok_and_grad_scale_pass_through_update():
    tx = optimizer()
    params = make_params()
    before = params, tx.init(params)
    update = updater(tx)
    after = update(*before, inject_nonfinite(make_grads(0)), finite=jnp.array(False))
    assert_trees_equal(after, before)
    scaled = jax.tree.map(lambda g: g * 8, make_grads(0))
    assert_trees_equal(
        update(*before, scaled, grad_scale=0.125), update(*before, make_grads(0))
    )


def test_parameters_that_equinox_made_f32_are_refused():
    tx, params = optimizer(), make_params()
    updates, state = tx.update(make_grads(0), tx.init(params), params)
    promoted = eqx.apply_updates(params, updates)
    assert promoted["w"].dtype == jnp.float32  # the premise
    for call in (
        lambda: tx.update(make_grads(1), state, promoted),
        lambda: tx.step(promoted, state, make_grads(1)),
        lambda: mpx.optim.master_params(promoted, state),
    ):
        with pytest.raises(ValueError, match="Did `eqx.apply_updates` make it f32"):
            call()


# --- inside optax ------------------------------------------------------------------


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


WRAPPED = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1e9), tx),
    "named_chain": lambda tx: optax.named_chain(("clip", optax.clip(1e9)), ("tx", tx)),
    "skip_nonfinite": mpx.optim.skip_nonfinite,
    "masked by all": lambda tx: optax.masked(tx, True),
    "MultiSteps of one": lambda tx: optax.MultiSteps(tx, 1),
}
# Those that put zeros of the gradients' dtype in the place of updates, which are f32.
WRAPPED_F32 = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda _: True),
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, lambda _: True
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", [*WRAPPED, *WRAPPED_F32])
def test_a_wrapper_that_does_nothing_changes_nothing(name):
    wrap = (WRAPPED | WRAPPED_F32)[name]
    dtype = jnp.float32 if name in WRAPPED_F32 else jnp.bfloat16
    grads = functools.partial(make_grads, dtype=dtype)
    tx = optimizer()
    wrapped, params = wrap(tx), make_params()
    step = updater(wrapped)
    carry = params, wrapped.init(params)
    params, state = train(step, carry, range(2), grads)
    carry = make_params(), tx.init(make_params())
    expected = train(updater(tx), carry, range(2), grads)
    assert_trees_equal(params, expected[0])
    assert int(flash_state(state).count) == 2


@pytest.mark.parametrize("name", WRAPPED_F32)
def test_wrappers_that_choose_between_updates_need_f32_gradients(name):
    tx = WRAPPED_F32[name](optimizer())
    with pytest.raises(TypeError, match="must have equal (output )?types"):
        tx.update(make_grads(0), tx.init(make_params()), make_params())


# What would change the updates of a compressed optimizer, and how it is called.
AFTER = {
    "scale": lambda tx: optax.chain(tx, optax.scale(0.5)),
    "scale_by_schedule": lambda tx: optax.chain(
        optax.clip(1.0), tx, optax.scale_by_schedule(lambda _: 0.1)
    ),
    "add_decayed_weights": lambda tx: optax.named_chain(
        ("tx", tx), ("decay", optax.add_decayed_weights(0.1))
    ),
    "clip": lambda tx: optax.chain(
        optax.chain(optax.identity(), optax.masked(tx, True)), optax.clip(0.1)
    ),
    "scale_by_sign": lambda tx: optax.MultiSteps(
        optax.chain(mpx.optim.skip_nonfinite(tx), optax.scale_by_sign()), 2
    ),
    "masked(scale)": lambda tx: optax.chain(
        optax.multi_transform({"all": tx}, "all"),
        optax.masked(optax.scale(0.5), True),
    ),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("name", AFTER)
def test_nothing_may_come_after_in_a_chain(name, jit):
    tx, params = AFTER[name](optimizer("sgd without momentum")), make_params()
    state = tx.init(params)
    match = rf"last of a chain, but after it come {re.escape(name)}\."
    with pytest.raises(ValueError, match=match):
        jit(tx.update)(make_grads(0), state, params)


def test_updates_of_f32_parameters_may_be_changed():
    params = make_params(jnp.float32)
    half = optax.chain(mpx.optim.flash_sgd(1.0), optax.scale(0.5))
    updates, _ = half.update(
        make_grads(0, dtype=jnp.float32), half.init(params), params
    )
    whole = mpx.optim.flash_sgd(1.0)
    expected, _ = whole.update(
        make_grads(0, dtype=jnp.float32), whole.init(params), params
    )
    assert_trees_equal(updates, jax.tree.map(lambda x: x * 0.5, expected))


def test_what_changes_no_update_may_come_behind():
    params = make_params()
    one, other = {"w": True, "layers": False}, {"w": False, "layers": True}
    two = optax.chain(
        optax.masked(optimizer("adamw"), one),
        optax.masked(optimizer("sgd"), other),
        optax.identity(),
        optax.masked(optax.set_to_zero(), other),
    )
    after, _ = apply(two, params, two.init(params), make_grads(0))
    tx = optimizer("adamw")
    alone: Any = apply(tx, params, tx.init(params), make_grads(0))[0]
    assert_trees_equal(after, params | {"w": alone["w"]})


def test_clipping_comes_before():
    tx, params = optimizer(rate=0.5), make_params()
    chained = optax.chain(optax.clip(0.01), tx)
    after, _ = updater(chained)(params, chained.init(params), make_grads(0))
    clipped, _ = optax.clip(0.01).update(make_grads(0), optax.EmptyState())
    expected, _ = updater(tx)(params, tx.init(params), clipped)
    assert_trees_equal(after, expected)


def test_a_mask_leaves_the_others_without_state():
    tx = optax.masked(optimizer(), is_matrix)
    params = make_params()
    state = tx.init(params)
    assert len(jax.tree.leaves(flash_state(state).mu)) == 2  # codes and scale of w
    updates, state = jax.jit(tx.update)(make_grads(0), state, params)
    # Masked gradients pass through, as in optax.
    assert_trees_equal(updates["layers"], make_grads(0)["layers"])
    plain = optimizer()
    expected = stepper(plain)(params, plain.init(params), make_grads(0)).params
    applied = optax.apply_updates(params["w"], updates["w"])
    assert_trees_equal(applied, expected["w"])


def test_multi_transform_gives_each_part_its_optimizer():
    parts = {"matrix": optimizer(), "vector": optimizer("sgd", 0.5)}
    tx, params = optax.multi_transform(parts, labels), make_params()
    after, _ = updater(tx)(params, tx.init(params), make_grads(0))
    steps = {
        name: stepper(part)(params, part.init(params), make_grads(0)).params
        for name, part in parts.items()
    }
    expected = {"w": steps["matrix"]["w"], "layers": steps["vector"]["layers"]}
    assert_trees_equal(after, expected)


def test_multi_steps_takes_the_mean_gradient():
    tx, params = optimizer(rate=0.5), make_params()
    several = optax.MultiSteps(tx, 2)
    grads = [jax.tree.map(jnp.round, make_grads(k, dtype="f4")) for k in range(2)]
    step = updater(several)
    half_way, state = step(params, several.init(params), grads[0])
    assert_trees_equal(half_way, params)
    after, state = step(half_way, state, grads[1])
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    expected = stepper(tx)(params, tx.init(params), mean)
    assert_trees_equal(after, expected.params)
    assert int(state.inner_opt_state.count) == 1


@pytest.mark.parametrize(
    "wrap",
    [mpx.optim.skip_nonfinite, WRAPPED_F32["apply_if_finite"]],
    ids=["mpx", "optax"],
)
def test_gradients_that_are_not_finite_change_no_byte(wrap):
    wrapped, params = wrap(optimizer()), make_params()
    step = updater(wrapped)
    before = step(params, wrapped.init(params), make_grads(0, dtype=jnp.float32))
    bad = inject_nonfinite(make_grads(1, dtype=jnp.float32), jnp.inf)
    after = step(*before, bad)
    assert_trees_equal(
        (after[0], flash_state(after[1])), (before[0], flash_state(before[1]))
    )


# --- hyperparameters without recompilation --------------------------------------------


INJECTED = {
    "adamw": lambda inject: inject(mpx.optim.flash_adamw)(1e-2, compression=SMALL),
    "sgdw": lambda inject: inject(mpx.optim.flash_sgdw)(
        1e-2,
        momentum=0.9,
        compression=SMALL,
        groups=(mpx.optim.ParamGroup("b", {"weight_decay": 0.0}),),
    ),
}


@pytest.mark.parametrize("name", INJECTED)
def test_injected_hyperparameters_need_no_static_args(name):
    inject = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    tx, params = INJECTED[name](inject), make_params()
    step, traces = count_traces(functools.partial(apply, tx))
    step = jax.jit(step)
    carry = step(params, tx.init(params), make_grads(0))
    plain = INJECTED[name](lambda factory: factory)
    expected = stepper(plain)(params, plain.init(params), make_grads(0))
    assert_trees_equal(carry[0], expected.params)
    carry[1].hyperparams["learning_rate"] = jnp.float32(0.0)
    carry[1].hyperparams["weight_decay"] = jnp.float32(0.5)
    after, _ = step(*carry, make_grads(1))
    assert_trees_equal(after, carry[0])  # a rate of zero, and no second compilation
    assert len(traces) == 1


def test_hyperparameters_of_16_bits_are_refused():
    # What `inject_hyperparams` does by itself when the parameters are bf16: b2 is 1.
    tx = optax.inject_hyperparams(mpx.optim.flash_adamw)(1e-2, compression=SMALL)
    with pytest.raises(ValueError, match="is bfloat16.*hyperparam_dtype=jnp.float32"):
        tx.init(make_params())


def test_a_schedule_in_injected_hyperparameters():
    inject = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    schedule = optax.linear_schedule(0.0, 1e-1, 4)
    tx = inject(mpx.optim.flash_adamw)(schedule, compression=SMALL)
    plain = mpx.optim.flash_adamw(schedule, compression=SMALL)
    params = make_params()
    step = updater(tx)
    after, _ = train(step, (params, tx.init(params)), range(4))
    expected, _ = train(stepper(plain), (params, plain.init(params)), range(4))
    assert_trees_equal(after, expected)
