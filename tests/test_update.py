"""`optimizer_update`: steps as plain optax, skipped steps that change nothing."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite
from update_cases import (
    MODELS,
    OPTIMIZERS,
    Model,
    all_ways,
    assert_close,
    gradients,
    make_nnx,
    make_train_state,
    momentum_case,
    optimizer_and_extras,
    plain,
    rounds_updates,
    trainable,
    update,
)

# `optax.adam` raises a Python float to an integer array.
pytestmark = [
    pytest.mark.standard_promotion,
]


@pytest.mark.some(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_taken_steps_are_those_of_plain_optax(name):
    optimizer, extras = optimizer_and_extras(name)
    model = Model()
    state = optimizer.init(trainable(model))
    for step in range(3):
        grads = gradients(model, step)
        expected, selected = all_ways(
            model, optimizer, state, grads, jnp.array(True), extras
        )
        assert_close(selected, expected)
        model, state = expected
    assert np.all(np.asarray(model.weight != Model().weight))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_not_a_bit(name):
    optimizer, extras = optimizer_and_extras(name)
    model = Model()
    grads = gradients(model, 0)
    state = optimizer.init(trainable(model))
    # From a state in which no moment is zero.
    before, _ = all_ways(model, optimizer, state, grads, jnp.array(True), extras)
    for leaf, value in (("weight", np.nan), ("bias", np.inf), ("weight", -np.inf)):
        bad = inject_nonfinite(grads, value, leaf=leaf, index=2)
        finite = mpx.all_finite(bad)
        assert not finite
        _, selected = all_ways(before[0], optimizer, before[1], bad, finite, extras)
        assert_trees_equal(selected, before)


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_it_works_in_and_outside_jit_on_any_tree(make, compiled):
    optimizer, _ = optimizer_and_extras("sgd")
    model = make()
    state = optimizer.init(trainable(model))
    grads = gradients(model, 0)
    call = update if compiled else mpx.optimizer_update
    step = functools.partial(call, model, optimizer, state, grads)
    assert_close(step(jnp.array(True)), plain(model, optimizer, state, grads))
    assert_trees_equal(step(jnp.array(False)), (model, state))


@pytest.mark.parametrize("finite", [True, np.True_, jnp.array(True)], ids=type)
def test_flag_may_be_any_boolean(finite):
    step = functools.partial(
        mpx.optimizer_update, jnp.ones(3), optax.sgd(0.5), (optax.EmptyState(),) * 2
    )
    assert_trees_equal(step(jnp.ones(3), finite)[0], jnp.full(3, 0.5))


def test_what_is_no_parameter_comes_back_as_it_is():
    optimizer, _ = optimizer_and_extras("sgd")
    model = Model()
    after, _ = mpx.optimizer_update(
        model, optimizer, optimizer.init(trainable(model)), gradients(model, 0), True
    )
    assert after.table is model.table
    assert after.key is model.key
    assert after.activation is model.activation
    assert (after.rate, after.name, after.nothing) == (0.1, "model", None)


def test_never_skipping_lets_the_update_through():
    optimizer, _ = optimizer_and_extras("sgd")
    model = Model()
    state = optimizer.init(trainable(model))
    grads = gradients(model, 0)
    after = update(model, optimizer, state, grads, jnp.array(False), skip="never")
    assert_close(after, plain(model, optimizer, state, grads))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "adafactor", "lion"])
def test_parameter_without_gradient_is_frozen(name):
    optimizer, _ = optimizer_and_extras(name)
    model = Model()
    frozen = eqx.tree_at(lambda m: m.bias, trainable(model), None)
    grads = eqx.tree_at(lambda m: m.bias, gradients(model, 0), None)
    after, _ = update(model, optimizer, optimizer.init(frozen), grads, jnp.array(True))
    assert_trees_equal(after.bias, model.bias)
    assert np.all(np.asarray(after.weight != model.weight))


# --- Steps that would overflow --------------------------------------------------------

# Finite gradients of finite parameters, whose step is not finite.
OVERFLOWS = {
    "second moment": (optax.adam(0.1), jnp.ones(3), 3e19),
    "nan from inf - inf": (optax.rmsprop(0.1, centered=True), jnp.ones(3), 1e25),
    "parameter": (optax.sgd(10.0), jnp.ones(3), 1e38),
    "f16 parameter": (optax.sgd(0.125), jnp.ones(3, jnp.float16), 1e6),
}


@rounds_updates
@pytest.mark.parametrize("case", OVERFLOWS.values(), ids=OVERFLOWS)
def test_a_step_that_would_overflow_changes_nothing(case):
    optimizer, params, value = case
    step = jax.jit(make_step(optimizer))
    before = step(params, optimizer.init(params), jnp.ones(3), True)
    assert np.all(np.asarray(before[0] != params))
    huge = jnp.ones(3).at[1].set(value)
    assert_trees_equal(step(*before, huge, mpx.all_finite(huge)), before)


@pytest.mark.parametrize("spoilt", ["a", "b", "c", "d"])
def test_parameters_of_one_shape_are_checked_together_on_one_device(
    monkeypatch, spoilt
):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    optimizer = optax.adam(0.1)
    params = {x: jnp.ones((2, 3)) for x in "abc"} | {"d": jnp.ones(3)}
    step, state = make_step(optimizer), optimizer.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    traced = str(jax.make_jaxpr(step)(params, state, grads, True))
    assert traced.count("reduce_and[") == 2  # with two moments, nine arrays and three
    assert np.all(np.asarray(step(params, state, grads, True)[0][spoilt]) != 1)
    grads[spoilt] = grads[spoilt].at[..., 1].set(3e19)  # its square overflows
    before = params, state
    assert_trees_equal(step(*before, grads, True), before)


@pytest.mark.parametrize("mask", [jnp.array([0.0, -jnp.inf]), np.array([0.0, -1e300])])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_numbers_that_were_not_finite_before_forbid_no_step(mask):
    params = {"w": jnp.ones(2), "mask": mask}
    optimizer = optax.sgd(0.5)
    step = make_step(optimizer)
    after, _ = step(
        params, optimizer.init(params), jax.tree.map(jnp.ones_like, params), True
    )
    np.testing.assert_array_equal(after["w"], 0.5)
    np.testing.assert_array_equal(after["mask"], [-0.5, -np.inf])


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_decide_together_whether_a_step_overflows(check_vma):
    two = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=two, axis_types=(AxisType.Auto,))
    optimizer = optax.adam(0.1)
    params = jnp.ones(4)
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)
    options = {} if check_vma else {"axis_name": "x"}

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), specs, P("x")),
        out_specs=(P("x"), specs),
        check_vma=check_vma,
    )
    def step(params, state, grads):
        finite = mpx.all_finite(grads, axis_name="x")
        return mpx.optimizer_update(params, optimizer, state, grads, finite, **options)

    grads = jnp.ones(4)
    good = step(params, state, grads)
    np.testing.assert_allclose(good[0], 0.9, rtol=1e-6)
    assert_trees_equal(step(*good, grads.at[3].set(3e19)), good)


@pytest.mark.parametrize("make", [optax.adam, mpx.optim.flash_adamw])
def test_devices_with_different_flags_skip_together(make):
    two = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=two, axis_types=(AxisType.Auto,))
    optimizer, params = make(0.1), jnp.ones((4, 64))
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: P("x") if jnp.ndim(x) else P(), state)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), specs, P("x")),
        out_specs=(P("x"), specs),
        check_vma=False,
    )
    def step(params, state, finite):
        grads = jnp.ones_like(params)
        return mpx.optimizer_update(
            params, optimizer, state, grads, finite[0], axis_name="x"
        )

    assert_trees_equal(step(params, state, jnp.array([True, False])), (params, state))
    after, _ = step(params, state, jnp.array([True, True]))
    assert jnp.all(after < params)


# --- Dtypes ---------------------------------------------------------------------------


@rounds_updates
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8"])
def test_update_is_added_in_f32_or_wider_and_rounded_once(dtype):
    # Updates with all bits of f32: rounded to 16 bits first, some sums would differ.
    random = np.random.default_rng(0)
    host = {"w": random.normal(size=999), "g": random.normal(size=999).astype("f4")}
    wide = "f8" if dtype == "f8" else "f4"
    with jax.enable_x64(dtype == "f8"):
        params = jnp.array(host["w"]).astype(dtype)
        optimizer = optax.sgd(0.125)
        after, _ = mpx.optimizer_update(
            params, optimizer, optimizer.init(params), host["g"], True
        )
    param = np.asarray(params)
    expected = (param.astype(wide) - host["g"].astype(wide) / 8).astype(param.dtype)
    assert_trees_equal(after, expected)
    if dtype in ("f2", "bfloat16"):
        rounded_early = param - (host["g"] / 8).astype(param.dtype)
        assert np.any(rounded_early != expected)


@rounds_updates
@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_parameters_and_state_keep_their_16_bit_dtypes(dtype):
    # Half of a 16-bit number is exact: no rounding before the sum in f32.
    optimizer: Any = optax.sgd(0.125, momentum=0.5)
    model = Model(dtype)
    state = optimizer.init(trainable(model))
    for step in range(2):
        grads = gradients(model, step)
        # Plain optax would hand back an f32 state.
        updates, wide_state = optimizer.update(grads, state, trainable(model))
        assert wide_state[0].trace.weight.dtype == np.float32
        expected = jax.tree.map(
            lambda p, u: (p.astype("f4") + u).astype(p.dtype), trainable(model), updates
        )
        expected_state = mpx.cast_tree(wide_state, np.dtype(dtype))
        model, state = mpx.optimizer_update(model, optimizer, state, grads, True)
        assert_trees_equal(trainable(model), expected)
        assert_trees_equal(state, expected_state)
    assert model.weight.dtype == dtype


# --- Compilation, donation, devices ---------------------------------------------------


@pytest.fixture
def momentum():
    return momentum_case()


def make_step(optimizer):
    def step(params, state, grads, finite):
        return mpx.optimizer_update(params, optimizer, state, grads, finite)

    return step


def test_a_step_compiles_to_no_branch(momentum):
    params, optimizer, state, grads = momentum
    lowered = jax.jit(make_step(optimizer)).lower(params, state, grads, True)
    assert lowered.compile().as_text().count(" conditional(") == 0


def test_step_loop_compiles_once_and_transfers_nothing(momentum):
    params, optimizer, state, grads = momentum
    traces = 0

    @jax.jit
    def step(params, state, grads):
        nonlocal traces
        traces += 1
        return make_step(optimizer)(params, state, grads, mpx.all_finite(grads))

    bad = inject_nonfinite(grads)
    params, state = step(params, state, grads)
    with jax.transfer_guard("disallow"):
        for given in (bad, grads, grads, bad, grads):
            params, state = step(params, state, given)
    assert traces == 1
    assert mpx.all_finite((params, state))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_donated_shards_keep_their_place(axis_type):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    optimizer, _ = optimizer_and_extras("sgd")
    random = np.random.default_rng(0)
    host = {name: random.normal(size=(8, 2)).astype("f4") for name in ("rows", "all")}
    specs = {"rows": P("data"), "all": P()}

    def put(tree):
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
        )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return make_step(optimizer)(params, state, grads, mpx.all_finite(grads))

    grads = jax.tree.map(lambda x: x + 1, host)
    for finite in (True, False):
        with jax.set_mesh(mesh):
            params, state = put(host), optimizer.init(put(host))
            assert state[0].trace["rows"].sharding == params["rows"].sharding
            shardings = jax.tree.map(lambda x: x.sharding, (params, state))
            given = grads if finite else inject_nonfinite(grads, leaf="rows", index=11)
            after = step(params, state, put(given))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
        before = jax.tree.map(jnp.array, (host, optimizer.init(host)))
        if finite:
            assert_close(after, plain(before[0], optimizer, before[1], grads))
        else:
            assert_trees_equal(after, before)
        for leaf, sharding in zip(
            *map(jax.tree.leaves, (after, shardings)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_vmap_decides_for_each_model_on_its_own(momentum):
    params, optimizer, _, grads = momentum
    both = jax.tree.map(lambda x: jnp.stack([x, x]), params)
    grads = jax.tree.map(lambda x: jnp.stack([x, x * jnp.nan]), grads)

    def step(params, grads):
        state = optimizer.init(params)
        finite = mpx.all_finite(grads)
        return mpx.optimizer_update(params, optimizer, state, grads, finite)[0]

    after = jax.jit(jax.vmap(step))(both, grads)
    assert_trees_equal(jax.tree.map(lambda x: x[1], after), params)
    assert np.all(np.asarray(after["w"][0] != params["w"]))


# --- Flax -----------------------------------------------------------------------------


def nnx_state(*args):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(args)))


def nnx_gradients(model, value):
    grads = nnx.state(model, nnx.Param)
    kernel = jnp.full((4, 3), 0.25).at[0, 0].set(value)
    return jax.tree.map(lambda _: kernel, grads)


@pytest.mark.some(2)
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_nnx_optimizer_is_updated_in_place_or_not_at_all(jit):
    @jit
    def step(model, optimizer, grads, finite):
        out = mpx.optimizer_update(model, optimizer, None, grads, finite)
        assert out[0] is model
        assert out[1] is None

    tx = optax.sgd(0.125, momentum=0.5)
    model, optimizer = make_nnx(tx)
    expected, expected_optimizer = make_nnx(tx)
    for value in (1.0, 2.0):
        grads = nnx_gradients(model, value)
        step(model, optimizer, grads, jnp.array(True))
        expected_optimizer.update(expected, grads)
    before = nnx_state(model, optimizer)
    # The arithmetic of this optimizer is exact, compiled or not.
    assert_trees_equal(before, nnx_state(expected, expected_optimizer))
    assert int(optimizer.step[...]) == 2

    step(model, optimizer, nnx_gradients(model, np.nan), jnp.array(False))
    assert_trees_equal(nnx_state(model, optimizer), before)
    # Half the momentum and a gradient are more than f32 can hold.
    step(model, optimizer, nnx_gradients(model, -3e38), jnp.array(True))
    before = nnx_state(model, optimizer)
    step(model, optimizer, nnx_gradients(model, -3e38), jnp.array(True))
    assert_trees_equal(nnx_state(model, optimizer), before)


def test_nnx_optimizer_may_be_told_never_to_skip():
    model, optimizer = make_nnx(optax.sgd(0.125))
    grads = nnx_gradients(model, np.nan)
    mpx.optimizer_update(model, optimizer, None, grads, False, skip="never")
    assert np.isnan(np.asarray(model.kernel[0, 0]))


def test_nnx_optimizer_passes_extra_arguments_on():
    tx, extras = optimizer_and_extras("reduce_on_plateau")
    model, optimizer = make_nnx(tx)
    grads = nnx_gradients(model, 1.0)
    mpx.optimizer_update(model, optimizer, None, grads, True, **extras)
    assert float(optimizer.opt_state[1].best_value[...]) == 1.5


@rounds_updates
@pytest.mark.parametrize(
    ("dtype", "jit"), [("f4", lambda f: f), ("bfloat16", jax.jit)], ids=["eager", "jit"]
)
def test_train_state_is_replaced_or_kept(dtype, jit):
    @jit
    def step(state, grads, finite):
        return mpx.optimizer_update(
            state,
            None,
            None,
            grads,
            finite,
            batch_stats={"mean": state.batch_stats["mean"] + 1},
        )

    state = make_train_state(dtype)
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.25), state.params)
    taken, nothing = step(state, grads, jnp.array(True))
    assert nothing is None
    assert int(taken.step) == 1
    assert_trees_equal(taken.batch_stats, {"mean": jnp.ones(3)})
    expected = state.apply_gradients(grads=grads)
    assert_trees_equal(taken.params, expected.params)
    # Flax hands back an f32 state for 16-bit parameters.
    assert_trees_equal(
        taken.opt_state, mpx.cast_tree(expected.opt_state, np.dtype(dtype))
    )

    for before in (state, taken):  # the `step` of a new state is a Python integer
        skipped, _ = step(before, inject_nonfinite(grads), jnp.array(False))
        assert int(skipped.step) == int(before.step)
        assert_trees_equal(skipped.replace(step=0), before.replace(step=0))
    huge = jax.tree.map(lambda x: jnp.full(x.shape, 3e38), state.params)
    first, _ = step(state, huge, jnp.array(True))
    second, _ = step(first, huge, jnp.array(True))
    assert_trees_equal(
        second, first
    )  # momentum and gradient are more than f32 can hold


def test_the_compiled_step_grows_with_the_number_of_arrays():
    def lines(count):
        params = {f"w{i}": jnp.ones((8 + i % 5, 16)) for i in range(count)}
        optimizer = optax.adam(1e-3)

        def step(params, state, grads):
            flag = mpx.all_finite(grads)
            return mpx.optimizer_update(params, optimizer, state, grads, flag)

        args = params, optimizer.init(params), params
        return jax.jit(step).lower(*args).compile().as_text().count("\n")

    # A flag that is computed again for each array would make it 2.6 times as long.
    assert lines(12) < 2.1 * lines(6)
