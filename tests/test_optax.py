"""`skip_nonfinite` and `master_weights`: wrappers for any optax optimizer."""

import functools
import inspect
import io
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

# `optax.adam` raises a Python float to an integer array, and `optax.apply_updates` adds
# an f32 update to a bf16 parameter.
pytestmark = [
    pytest.mark.standard_promotion,
]

# Their states have names; optax types a state as any tree.
skip_nonfinite: Any = mpx.optim.skip_nonfinite
master_weights: Any = mpx.optim.master_weights

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.125, momentum=0.5),
    "adam": lambda: optax.adam(0.1),
    "clip and decay": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.lion(0.1, weight_decay=0.1)
    ),
}
WRAPPERS = [skip_nonfinite, master_weights]


@pytest.fixture(params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def tx(request):
    return request.param()


def make_params(dtype=jnp.float32):
    random = np.random.default_rng(0)
    return {
        "w": jnp.array(random.normal(size=(8, 3)), dtype),
        "layers": [{"b": jnp.array(random.normal(size=3), dtype)}, None],
    }


def make_grads(step):
    random = np.random.default_rng(step + 1)
    draw = lambda x: jnp.array(random.integers(1, 64, x.shape) / 32, "f4")  # noqa: E731
    return jax.tree.map(draw, make_params())


def compiled(tx):
    """Returns one jitted training step."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_extra_arguments_reach_the_inner_optimizer(wrap):
    tx = wrap(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    state = tx.init(jnp.ones(3))
    _, state = jax.jit(tx.update)(jnp.ones(3), state, jnp.ones(3), value=1.5)
    assert float(state.inner_state[1].best_value) == 1.5


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_extra_arguments_are_kept_from_those_that_do_not_know_them(wrap):
    tx = wrap(optax.GradientTransformation(*optax.sgd(0.5)))
    updates, _ = tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3), value=1.5)
    assert_trees_equal(updates, jnp.full(3, -0.5))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    "tx",
    [None, dict, {}, 3, optax.adam],
    ids=["None", "type", "dict", "int", "function"],
)
def test_what_is_no_transformation_is_refused(wrap, tx):
    match = rf"`{wrap.__name__}` needs an optax transformation, but \w+ was given"
    with pytest.raises(TypeError, match=match):
        inspect.unwrap(wrap)(tx)


# --- skip_nonfinite -------------------------------------------------------------------


def test_finite_gradients_pass_as_if_nothing_were_there(tx):
    wrapped = skip_nonfinite(tx)
    params = make_params()
    state, expected_state = wrapped.init(params), tx.init(params)
    for step in range(2):
        updates, state = wrapped.update(make_grads(step), state, params)
        expected, expected_state = tx.update(make_grads(step), expected_state, params)
        assert_trees_equal(updates, expected)
        assert_trees_equal(state.inner_state, expected_state)
    assert (int(state.skipped), bool(state.last_finite)) == (0, True)


def test_nan_never_gets_in_however_many_there_are(tx):
    step = compiled(skip_nonfinite(tx))
    params = make_params()
    params, state = step(params, skip_nonfinite(tx).init(params), make_grads(0))
    before = params, state.inner_state
    for number in range(12):
        value = (np.nan, np.inf, -np.inf)[number % 3]
        bad = inject_nonfinite(make_grads(1), value, leaf="w", index=number)
        params, state = step(params, state, bad)
        assert_trees_equal((params, state.inner_state), before)
        assert int(state.skipped) == int(state.consecutive_skipped) == number + 1
    params, state = step(params, state, make_grads(2))
    expected = compiled(tx)(*before, make_grads(2))
    for one, other in zip(*map(jax.tree.leaves, (params, expected[0])), strict=True):
        # Two compilations: a handful of roundings of numbers below 4.
        np.testing.assert_allclose(one, other, rtol=0, atol=10 * 2.0**-23)


# Each with a gradient whose square, or sum with the momentum, is infinite.
OVERFLOWS = {
    "centred rmsprop": (optax.rmsprop(0.1, centered=True), 1e25),
    "adam": (optax.adam(0.1), 3e19),
    "momentum": (optax.sgd(0.1, momentum=1.0), 3e38),
    "update alone": (optax.scale(100.0), 3e37),
}


@pytest.mark.some(2)
@pytest.mark.parametrize(("tx", "value"), OVERFLOWS.values(), ids=OVERFLOWS)
def test_an_update_that_overflows_where_the_gradient_did_not_is_skipped(tx, value):
    params, huge = make_params(), jax.tree.map(lambda g: g + value, make_grads(0))
    wrapped = skip_nonfinite(tx)
    state = wrapped.init(params)
    for grads in (make_grads(0), huge, huge):
        before, state_before = params, state
        params, state = compiled(wrapped)(params, state, grads)
        assert mpx.all_finite((params, state))
    assert_trees_equal((params, state.inner_state), (before, state_before.inner_state))
    assert int(state.skipped) == int(state.consecutive_skipped) > 0
    assert not state.last_finite


def test_infinity_that_is_meant_is_no_overflow():
    tx = skip_nonfinite(optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau()))
    state = tx.init(jnp.ones(2))
    assert np.isinf(state.inner_state[1].best_value)
    for _ in range(2):
        updates, state = tx.update(jnp.ones(2), state, value=jnp.float32(1.5))
        np.testing.assert_array_equal(updates, -0.5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_skip_together(check_vma):
    two = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("x",), devices=two, axis_types=(AxisType.Auto,))
    tx = skip_nonfinite(optax.adam(0.1), axis_name=None if check_vma else "x")
    params = jnp.ones(4)
    state = tx.init(params)
    specs = jax.tree.map(lambda x: P("x") if x.ndim else P(), state)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), specs, P("x")),
        out_specs=(P("x"), specs),
        check_vma=check_vma,
    )
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return params + updates, state

    params, state = step(params, state, jnp.ones(4))
    for number, value in enumerate((jnp.nan, 3e19), start=1):
        grads = jnp.ones(4).at[0].set(value)
        after, skipped = step(params, state, grads)
        assert_trees_equal((after, skipped.inner_state), (params, state.inner_state))
        assert [int(x.data) for x in skipped.skipped.addressable_shards] == [number] * 2
        state = skipped


@pytest.mark.parametrize(
    ("wrap", "name"),
    [(skip_nonfinite, "SkipNonfinite"), (master_weights, "MasterWeights")],
)
def test_states_of_others_are_refused(wrap, name):
    tx, params = wrap(optax.adam(0.1)), jnp.ones(2)
    match = rf"expected the {name}State from its own `init\(params\)`.*; got tuple"
    with pytest.raises(TypeError, match=match):
        tx.update(params, optax.adam(0.1).init(params), params)


def test_apply_if_finite_would_have_let_it_in():
    # What the wrapper is there for: optax gives up after some errors in a row.
    step = compiled(optax.apply_if_finite(optax.sgd(0.1), 3))
    params = make_params()
    state = optax.apply_if_finite(optax.sgd(0.1), 3).init(params)
    for _ in range(5):
        params, state = step(params, state, inject_nonfinite(make_grads(0)))
    assert not mpx.all_finite(params)


def test_updates_of_a_skipped_step_are_zeros_of_the_same_dtype():
    wrapped = skip_nonfinite(optax.sgd(0.1))
    grads = {"half": jnp.full(2, jnp.nan, jnp.bfloat16), "full": jnp.ones(2)}
    updates, _ = wrapped.update(grads, wrapped.init(grads), grads)
    zeros = {"half": jnp.zeros(2, jnp.bfloat16), "full": jnp.zeros(2)}
    assert_trees_equal(updates, zeros)


def test_counters_follow_the_gradients():
    wrapped = skip_nonfinite(optax.sgd(0.1))
    state = wrapped.init(jnp.ones(2))
    flags = np.random.default_rng(0).random(200) < 0.6

    def step(state, finite):
        grads = jnp.where(finite, jnp.ones(2), jnp.array([1.0, jnp.inf]))
        state = wrapped.update(grads, state)[1]
        return state, state

    _, states = jax.lax.scan(step, state, flags)
    run = total = 0
    for index, finite in enumerate(flags):
        run, total = (0, total) if finite else (run + 1, total + 1)
        assert int(states.consecutive_skipped[index]) == run
        assert int(states.skipped[index]) == total
        assert bool(states.last_finite[index]) == finite
    assert total > 50


def test_it_can_be_one_link_of_a_chain():
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),  # makes all of them NaN if one is
        skip_nonfinite(optax.adam(0.1)),
        optax.scale(0.5),
    )
    params = make_params()
    state, step = tx.init(params), compiled(tx)
    for bad in (True, False):
        grads = inject_nonfinite(make_grads(0)) if bad else make_grads(0)
        after, state = step(params, state, grads)
        assert int(state[1].skipped) == 1
        assert bool(mpx.all_finite((after, state)))
        assert bool(np.all(np.asarray(after["w"] == params["w"]))) is bad


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (2, 3)])
def test_gradient_that_would_be_broadcast_is_refused(shape):
    tx = skip_nonfinite(optax.sgd(0.1))
    params = {"w": jnp.ones(3)}
    match = rf"The gradient of `w` has shape {re.escape(str(shape))}, but the parameter"
    with pytest.raises(ValueError, match=match):
        tx.update({"w": jnp.ones(shape)}, tx.init(params), params)


def test_new_state_of_skip_nonfinite_can_be_donated():
    wrapped = skip_nonfinite(optax.sgd(0.1, momentum=0.9))
    params = make_params()
    update = jax.jit(lambda g, s: wrapped.update(g, s), donate_argnums=1)
    state = wrapped.init(params)
    for _ in range(2):
        _, state = update(inject_nonfinite(make_grads(0)), state)
    assert int(state.skipped) == 2


# --- master_weights -------------------------------------------------------------------


def test_a_hundred_small_updates_add_up():
    grads = jnp.float32(6e-4)

    def train(tx):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = jnp.ones((), jnp.bfloat16)
        return jax.lax.scan(step, (params, tx.init(params)), length=100)[0]

    plain, _ = train(optax.sgd(1.0))
    assert float(plain) == 1.0  # each update is below half an ulp of bf16
    params, state = train(master_weights(optax.sgd(1.0)))
    # A hundred roundings of f32, each at most half an ulp below 1.
    assert abs(float(state.master) - 0.94) <= 100 * 2.0**-25
    assert_trees_equal(params, jnp.bfloat16(0.94))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_are_those_of_an_f32_run_rounded(tx, dtype):
    wrapped = master_weights(tx)
    params = make_params(dtype)
    state = wrapped.init(params)
    expected = mpx.cast_to_float32(params)
    expected_state = tx.init(expected)
    for step in range(3):
        updates, state = wrapped.update(make_grads(step), state, params)
        params = optax.apply_updates(params, updates)
        updates, expected_state = tx.update(make_grads(step), expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        # The very same operations: bit for bit.
        assert_trees_equal(state.master, expected)
        assert_trees_equal(state.inner_state, expected_state)
        assert_trees_equal(params, mpx.cast_tree(expected, dtype))


def test_parameters_stay_the_rounded_masters_under_jit():
    tx = master_weights(optax.adam(0.1))
    step = compiled(tx)
    params = make_params(jnp.bfloat16)
    state = tx.init(params)
    for number in range(5):
        params, state = step(params, state, make_grads(number))
        assert_trees_equal(params, mpx.cast_to_bfloat16(state.master))


def test_a_jump_over_many_powers_of_two_is_made_good_by_the_next_step():
    tx = master_weights(optax.sgd(1.0))
    params = jnp.bfloat16(2.0**30)
    updates, state = tx.update(jnp.float32(2.0**30 - 128), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    assert float(state.master) == 128.0
    assert abs(float(params) - 128.0) <= 2.0**30 * 2.0**-24
    updates, _ = tx.update(jnp.float32(0.0), state, params)
    assert float(optax.apply_updates(params, updates)) == 128.0


def test_rounding_to_the_parameter_does_not_depend_on_where_it_was():
    # Just above the middle of 1 and 1 + 2**-7; a difference from 4096 in f32 would
    # lose the last bit, and the sum fall to 1.
    tx = master_weights(optax.sgd(1.0))
    params = jnp.bfloat16(4096.0)
    state = tx.init(params)._replace(master=jnp.float32(1 + 2.0**-8 + 2.0**-20))
    updates, _ = tx.update(jnp.float32(0.0), state, params)
    assert float(optax.apply_updates(params, updates)) == 1 + 2.0**-7


def test_masters_and_moments_are_f32_and_the_rest_is_left_alone():
    params = {"w": jnp.ones(2, jnp.float16), "n": jnp.arange(2), "none": None}
    tx = master_weights(optax.sgd(0.5, momentum=0.5))
    state = tx.init(params)
    assert_trees_equal(
        state.master, {"w": jnp.ones(2), "n": jnp.arange(2), "none": None}
    )
    assert state.inner_state[0].trace["w"].dtype == np.float32
    grads = {"w": jnp.ones(2), "n": jnp.zeros(2, jnp.int32), "none": None}
    updates, state = tx.update(grads, state, params)
    after = optax.apply_updates(params, updates)
    assert_trees_equal(after, {**params, "w": jnp.full(2, 0.5, jnp.float16)})


def test_masters_may_be_f64():
    with jax.enable_x64(True):
        tx = master_weights(optax.sgd(1.0), "f64")
        params = jnp.ones((), jnp.float32)
        state = tx.init(params)
        for _ in range(8):
            updates, state = tx.update(jnp.float32(2.0**-26), state, params)
            params = optax.apply_updates(params, updates)
        assert_trees_equal(state.master, jnp.float64(1 - 2.0**-23))
        assert_trees_equal(params, jnp.float32(1 - 2.0**-23))


def test_parameters_of_f64_keep_their_masters_in_f64():
    with jax.enable_x64(True):
        tx = master_weights(optax.sgd(1.0))
        params = {"w": jnp.ones(()), "b": jnp.ones((), jnp.bfloat16)}
        assert params["w"].dtype == np.float64
        state, start = tx.init(params), params
        grads = {"w": jnp.float64(2.0**-40), "b": jnp.bfloat16(2.0**-20)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_trees_equal(params, start | {"w": jnp.float64(1 - 2.0**-40)})
        assert_trees_equal(state.master["b"], jnp.float32(1 - 2.0**-20))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_masters_start_from_f32_weights(dtype):
    weights = make_params() | {"low": jnp.ones(3, dtype), "n": jnp.arange(2)}
    tx = master_weights(optax.adam(0.1))
    params, state = tx.init_from(weights, dtype, keep="layers")
    assert_trees_equal(state.master, weights | {"low": jnp.ones(3)})
    expected = {"w": weights["w"].astype(dtype), "layers": weights["layers"]}
    assert_trees_equal(params, weights | expected)
    assert state.inner_state[0].mu["w"].dtype == np.float32
    with pytest.raises(ValueError, match="`keep` .*nothing"):
        tx.init_from(weights, keep="nothing")


def test_half_precision_gradients_are_widened_before_the_optimizer():
    tx = master_weights(optax.sgd(0.1))
    params = jnp.ones(2, jnp.float16)
    grads = jnp.full(2, 3.0, jnp.float16)
    _, state = tx.update(grads, tx.init(params), params)
    expected = np.float32(1) - np.float32(0.1) * np.float32(3)
    np.testing.assert_allclose(state.master, expected, rtol=2.0**-23)


def test_master_weights_needs_the_parameters():
    tx = master_weights(optax.sgd(0.1))
    state = tx.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"needs the parameters: call `update\("):
        tx.update(jnp.ones(2), state)


@pytest.mark.parametrize("dtype", ["int32", "f8", jnp.float8_e4m3fn], ids=str)
def test_master_weights_needs_a_floating_dtype(dtype):
    with pytest.raises(
        ValueError, match="must be a floating dtype of at least 16 bits"
    ):
        master_weights(optax.sgd(0.1), dtype)


# --- Together, saved, sharded ---------------------------------------------------------

NESTED = {
    "skip outside": lambda tx: skip_nonfinite(master_weights(tx)),
    "skip inside": lambda tx: master_weights(skip_nonfinite(tx)),
    "optimizer_update": master_weights,
}


@pytest.mark.parametrize("nest", NESTED.values(), ids=NESTED.keys())
def test_a_skipped_step_leaves_the_masters_alone(nest):
    tx = nest(optax.sgd(0.125, momentum=0.5))
    only_mpx = nest is master_weights

    @jax.jit
    def step(params, state, grads):
        finite = mpx.all_finite(grads)
        if not only_mpx:
            finite |= True  # the wrapper alone has to notice
        return mpx.optimizer_update(params, tx, state, grads, finite)

    params, state = make_params(jnp.bfloat16), tx.init(make_params(jnp.bfloat16))
    plain = master_weights(optax.sgd(0.125, momentum=0.5))
    expected = make_params(jnp.bfloat16)
    expected_state = plain.init(expected)
    for number in range(3):
        before = params
        params, state = step(params, state, inject_nonfinite(make_grads(number)))
        assert_trees_equal(params, before)
        params, state = step(params, state, make_grads(number))
        updates, expected_state = plain.update(
            make_grads(number), expected_state, expected
        )
        expected = optax.apply_updates(expected, updates)
        # All products are with powers of two: exact, however they are compiled.
        assert_trees_equal(params, expected)


def test_resumed_training_is_the_same_bit_for_bit(tmp_path):
    tx = skip_nonfinite(master_weights(optax.adam(0.1)))
    step = compiled(tx)

    def train(state, numbers):
        for number in numbers:
            state = step(*state, make_grads(number))
        return state

    params = make_params(jnp.bfloat16)
    half_way = train((params, tx.init(params)), range(3))
    expected = train(half_way, range(3, 6))

    template = jax.tree.map(jnp.zeros_like, half_way)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, half_way)
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, template)
    assert_trees_equal(train(restored, range(3, 6)), expected)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half_way)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    assert_trees_equal(restored, half_way)
    assert_trees_equal(train(restored, range(3, 6)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_masters_lie_where_the_parameters_lie_and_can_be_donated(axis_type, dtype):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    tx = master_weights(optax.sgd(0.125, momentum=0.5))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        return mpx.optimizer_update(params, tx, state, grads, mpx.all_finite(grads))

    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        params = jax.device_put(make_params(dtype)["w"], rows)
        grads = jax.device_put(make_grads(0)["w"], rows)
        state = tx.init(params)
        assert state.master.sharding.is_equivalent_to(rows, 2)
        after, after_state = step(params, state, grads)
    assert params.is_deleted()
    assert state.master.is_deleted()
    for leaf in (after, after_state.master, after_state.inner_state[0].trace):
        assert leaf.sharding.is_equivalent_to(rows, 2)
    expected = make_params(dtype)["w"].astype("f4") - make_grads(0)["w"] / 8
    assert_trees_equal(after_state.master, expected)
    assert after.dtype == dtype


def test_states_can_be_made_abstractly():
    tx = skip_nonfinite(master_weights(optax.adam(0.1)))
    params = make_params(jnp.bfloat16)
    abstract = jax.eval_shape(tx.init, params)
    concrete = tx.init(params)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for one, other in zip(*map(jax.tree.leaves, (abstract, concrete)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_a_parameter_beyond_its_range_comes_back_with_its_master():
    tx = master_weights(optax.sgd(1.0))
    params: Any
    params, state = tx.init_from({"w": jnp.full(2, 65000.0)}, "f16")
    seen = []
    for grad in (-1000.0, 2000.0, 0.0):
        updates, state = tx.update({"w": jnp.full(2, grad)}, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(float(params["w"][0]))
    assert seen == [65504.0, 64000.0, 64000.0]
    # What is infinite in the master is not hidden.
    updates, _ = tx.update({"w": jnp.array([jnp.inf, 0.0])}, state, params)
    params = optax.apply_updates(params, updates)
    assert not jnp.isfinite(params["w"][0])


def test_counts_of_skipped_updates_end_at_the_largest_integer():
    optimizer, most = skip_nonfinite(optax.sgd(1.0)), jnp.int32(2**31 - 1)
    state = optimizer.init(jnp.ones(2))
    state = state._replace(skipped=most, consecutive_skipped=most)
    _, state = optimizer.update(jnp.full(2, jnp.nan), state, jnp.ones(2))
    assert int(state.skipped) == int(state.consecutive_skipped) == most
