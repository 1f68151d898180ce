"""`optimizer_update` and `cond_update`: the optimizer's own step, or nothing at all."""

import functools
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.testing import assert_trees_equal, inject_nonfinite

# `optax.adam` raises a Python float to an integer array.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.usefixtures("small_programs"),
]

SKIPS = ["select", "cond"]

# For tests that round parameters to 16 bits on purpose.
rounds_updates = pytest.mark.filterwarnings("ignore:.*keeps no master weights")


# --- One table of optimizers: a new row inherits every test that takes `name` ---------


def decay_mask(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def labels(tree):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "vector", tree)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(0.1, mask=decay_mask),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lamb": lambda: optax.lamb(0.1),
    "clip and schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.2, 3)),
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.2, 3)
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), every_k_schedule=2),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "MultiSteps of reduce_on_plateau": lambda: optax.MultiSteps(
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)), 2
    ),
    "masked": lambda: optax.masked(optax.adam(0.1), decay_mask),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adam(0.1), "vector": optax.sgd(0.1)}, labels
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
}


@functools.cache  # one object for all tests, so that each is compiled once
def optimizer_and_extras(name):
    extras = {"value": jnp.float32(1.5)} if "plateau" in name else {}
    return OPTIMIZERS[name](), extras


class Model(eqx.Module):
    """Everything that a model may hold besides floating arrays."""

    weight: jax.Array
    bias: jax.Array
    table: jax.Array
    key: jax.Array
    activation: object
    rate: float
    name: str
    nothing: None

    def __init__(self, dtype=jnp.float32):
        random = np.random.default_rng(0)
        self.weight = jnp.array(random.normal(size=(4, 3)), dtype)
        self.bias = jnp.array(random.normal(size=3), dtype)
        self.table = jnp.arange(3)
        self.key = jax.random.key(0)
        self.activation = jax.nn.relu
        self.rate = 0.1
        self.name = "model"
        self.nothing = None


MODELS = {
    "equinox": Model,
    "dict": lambda: {"w": Model().weight, "layers": [{"b": Model().bias}]},
}


def trainable(model):
    return eqx.filter(model, eqx.is_inexact_array)


def gradients(model, step):
    """Returns f32 gradients with few bits, none of them zero: times 1/8 is exact."""
    random = np.random.default_rng(step)

    def draw(leaf):
        sign = random.choice([-1, 1], leaf.shape)
        return jnp.array(sign * random.integers(1, 64, leaf.shape) / 32, jnp.float32)

    return jax.tree.map(draw, trainable(model))


def plain(model, optimizer, state, grads, **extras):
    """What a user writes who has never heard of mpx."""
    updates, state = optimizer.update(grads, state, trainable(model), **extras)
    return eqx.apply_updates(model, updates), state


def assert_close(tree, expected):
    """Compares two compilations of the same step; everything but floats exactly.

    The compiler fuses products with sums, so that one of the some ten roundings on the
    way to a parameter is left out here and there; all numbers are below 4.
    """
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (tree, expected)), strict=True):
        if not eqx.is_inexact_array(one):
            assert_trees_equal(one, other)
            continue
        assert one.dtype == other.dtype
        x, y = np.asarray(one, "f8"), np.asarray(other, "f8")
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        difference = np.abs(x[finite] - y[finite])
        assert np.all(difference <= 10 * float(jnp.finfo(one.dtype).eps))


update = eqx.filter_jit(mpx.optimizer_update)


@eqx.filter_jit
def all_ways(model, optimizer, state, grads, finite, extras):
    """Returns plain optax, select and cond from one compilation per optimizer."""
    args = model, optimizer, state, grads
    return (
        plain(*args, **extras),
        mpx.optimizer_update(*args, finite, skip="select", **extras),
        mpx.optimizer_update(*args, finite, skip="cond", **extras),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_taken_steps_are_those_of_plain_optax(name):
    optimizer, extras = optimizer_and_extras(name)
    model = Model()
    state = optimizer.init(trainable(model))
    for step in range(3):
        grads = gradients(model, step)
        expected, selected, branched = all_ways(
            model, optimizer, state, grads, jnp.array(True), extras
        )
        assert_close(selected, expected)
        assert_close(branched, expected)
        model, state = expected
    assert np.all(np.asarray(model.weight != Model().weight))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_changes_not_a_bit(name):
    optimizer, extras = optimizer_and_extras(name)
    model = Model()
    grads = gradients(model, 0)
    state = optimizer.init(trainable(model))
    # From a state in which no moment is zero.
    before, _, _ = all_ways(model, optimizer, state, grads, jnp.array(True), extras)
    for leaf, value in (("weight", np.nan), ("bias", np.inf), ("weight", -np.inf)):
        bad = inject_nonfinite(grads, value, leaf=leaf, index=2)
        finite = mpx.all_finite(bad)
        assert not finite
        _, selected, branched = all_ways(
            before[0], optimizer, before[1], bad, finite, extras
        )
        assert_trees_equal(selected, before)
        assert_trees_equal(branched, before)


@pytest.mark.parametrize(
    ("skip", "compiled"), [("select", True), ("cond", False)], ids=["jit", "eager cond"]
)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_it_works_in_and_outside_jit_on_any_tree(make, skip, compiled):
    optimizer, _ = optimizer_and_extras("sgd")
    model = make()
    state = optimizer.init(trainable(model))
    grads = gradients(model, 0)
    call = update if compiled else mpx.optimizer_update
    step = functools.partial(call, model, optimizer, state, grads, skip=skip)
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


# --- Dtypes ---------------------------------------------------------------------------


@rounds_updates
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8"])
def test_update_is_added_in_f32_or_wider_and_rounded_once(dtype, skip):
    # Updates with all bits of f32: rounded to 16 bits first, some sums would differ.
    random = np.random.default_rng(0)
    host = {"w": random.normal(size=999), "g": random.normal(size=999).astype("f4")}
    wide = "f8" if dtype == "f8" else "f4"
    with jax.enable_x64(dtype == "f8"):
        params = jnp.array(host["w"]).astype(dtype)
        optimizer = optax.sgd(0.125)
        after, _ = mpx.optimizer_update(
            params, optimizer, optimizer.init(params), host["g"], True, skip=skip
        )
    param = np.asarray(params)
    expected = (param.astype(wide) - host["g"].astype(wide) / 8).astype(param.dtype)
    assert_trees_equal(after, expected)
    if dtype in ("f2", "bfloat16"):
        rounded_early = param - (host["g"] / 8).astype(param.dtype)
        assert np.any(rounded_early != expected)


@rounds_updates
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_parameters_and_state_keep_their_16_bit_dtypes(dtype, skip):
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
        model, state = mpx.optimizer_update(
            model, optimizer, state, grads, True, skip=skip
        )
        assert_trees_equal(trainable(model), expected)
        assert_trees_equal(state, expected_state)
    assert model.weight.dtype == dtype


# --- Compilation, donation, devices ---------------------------------------------------


@pytest.fixture
def momentum():
    """Returns parameters, optimizer, state and gradients."""
    params = MODELS["dict"]()
    optimizer, _ = optimizer_and_extras("sgd")
    return params, optimizer, optimizer.init(params), gradients(params, 0)


def make_step(optimizer, skip):
    def step(params, state, grads, finite):
        return mpx.optimizer_update(params, optimizer, state, grads, finite, skip=skip)

    return step


@pytest.mark.parametrize(("skip", "branches"), [("select", 0), ("cond", 1)])
def test_only_cond_compiles_to_a_branch(skip, branches, momentum):
    params, optimizer, state, grads = momentum
    lowered = jax.jit(make_step(optimizer, skip)).lower(params, state, grads, True)
    assert lowered.compile().as_text().count(" conditional(") == branches


@pytest.mark.parametrize("skip", SKIPS)
def test_step_loop_compiles_once_and_transfers_nothing(skip, momentum):
    params, optimizer, state, grads = momentum
    traces = 0

    @jax.jit
    def step(params, state, grads):
        nonlocal traces
        traces += 1
        return make_step(optimizer, skip)(params, state, grads, mpx.all_finite(grads))

    bad = inject_nonfinite(grads)
    params, state = step(params, state, grads)
    with jax.transfer_guard("disallow"):
        for given in (bad, grads, grads, bad, grads):
            params, state = step(params, state, given)
    assert traces == 1
    assert mpx.all_finite((params, state))


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_donated_shards_keep_their_place(axis_type, skip):
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
        return make_step(optimizer, skip)(params, state, grads, mpx.all_finite(grads))

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


class Network(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.full((4, 3), 2.0))
        self.mean = nnx.BatchStat(jnp.zeros(3))
        self.calls = nnx.Variable(jnp.array(3))


def make_nnx(tx):
    model = Network()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def nnx_state(*args):
    return jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(args)))


def nnx_gradients(model, value):
    grads = nnx.state(model, nnx.Param)
    kernel = jnp.full((4, 3), 0.25).at[0, 0].set(value)
    return jax.tree.map(lambda _: kernel, grads)


@pytest.mark.parametrize(
    ("skip", "jit"),
    [("select", lambda f: f), ("cond", lambda f: f), ("select", nnx.jit)],
    ids=["select", "cond", "nnx.jit"],
)
def test_nnx_optimizer_is_updated_in_place_or_not_at_all(skip, jit):
    @jit
    def step(model, optimizer, grads, finite):
        out = mpx.optimizer_update(model, optimizer, None, grads, finite, skip=skip)
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


class StateWithStatistics(TrainState):
    batch_stats: dict


def make_train_state(dtype):
    module = flax.linen.Dense(3)
    params = {"kernel": jnp.ones((4, 3), dtype), "bias": jnp.ones(3, dtype)}
    return StateWithStatistics.create(
        apply_fn=module.apply,
        params=params,
        tx=optax.sgd(0.125, momentum=0.5),
        batch_stats={"mean": jnp.zeros(3)},
    )


@rounds_updates
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(
    ("dtype", "jit"), [("f4", lambda f: f), ("bfloat16", jax.jit)], ids=["eager", "jit"]
)
def test_train_state_is_replaced_or_kept(dtype, skip, jit):
    @jit
    def step(state, grads, finite):
        return mpx.optimizer_update(
            state,
            None,
            None,
            grads,
            finite,
            skip=skip,
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


# --- Errors ---------------------------------------------------------------------------


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
    (without_layers, r"`optimizer_update`.*only the first has \['layers/0/b'\]"),
    (with_more, r"`optimizer_update`.*only the second has \['extra'\]"),
    (with_subtree, r"`optimizer_update`.*only the second has \['w/q'\]"),
]


@pytest.mark.parametrize("skip", [*SKIPS, "never"])
@pytest.mark.parametrize(
    ("change", "match"), GRADIENT_ERRORS, ids=lambda x: getattr(x, "__name__", "")
)
def test_gradients_that_do_not_fit_are_named(change, match, skip, momentum):
    params, optimizer, state, grads = momentum
    with pytest.raises(ValueError, match=match):
        mpx.optimizer_update(params, optimizer, state, change(grads), True, skip=skip)


@pytest.mark.parametrize(
    "flag", [1, 0.0, None, "yes", jnp.ones(2, bool), jnp.ones(()), [True]], ids=str
)
def test_flag_that_is_no_boolean_scalar_is_refused(flag, momentum):
    params, optimizer, state, grads = momentum
    with pytest.raises(TypeError, match="`grads_finite` must be a boolean scalar"):
        mpx.optimizer_update(params, optimizer, state, grads, flag)


def test_unknown_skip_is_refused(momentum, monkeypatch):
    params, optimizer, state, grads = momentum
    match = "`skip` must be one of 'select', 'cond', 'never', but 'maybe'"
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


@pytest.mark.parametrize("skip", [*SKIPS, "never"])
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
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), mpx.flash_sgd(0.1)], ids=type)
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
        lambda _: mpx.skip_nonfinite(optax.adam(0.1)),
        "grad_scale",
        "Only the compressed",
    ),
    (optax.adam, "vlaue", "Did you mean `value`"),
    (optax.adam, "grads_scale", "Did you mean `grad_scale`"),
    (optax.adam, "finite", "Pass it as `grads_finite`"),
    (mpx.flash_adamw, "gradscale", "Did you mean `grad_scale`"),
    (mpx.flash_adamw, "loss_scale", "It takes `grad_scale`"),
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
    optimizer = mpx.flash_sgd(1.0)
    optimizer = optax.chain(optax.identity(), optimizer) if chained else optimizer
    after, _ = mpx.optimizer_update(
        *(params, optimizer, optimizer.init(params), grads, True), grad_scale=1 / 16
    )
    assert after.tolist() == [0.5, 0.5]


def test_value_of_the_loss_does_not_keep_a_compressed_optimizer_from_its_own_step():
    params = {"w": jnp.ones((8, 32), jnp.bfloat16)}
    optimizer = mpx.flash_adamw(0.1)

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
        "of less than 0.2 % .*f32.*mpx.master_weights.*mpx.flash_adamw"
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
        mpx.master_weights(optax.adam(0.1)),
        mpx.skip_nonfinite(mpx.master_weights(optax.adam(0.1))),
        optax.chain(optax.clip(1.0), mpx.flash_adamw(0.1)),
        mpx.flash_adamw(0.1),
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
@pytest.mark.parametrize("skip", SKIPS)
def test_cond_update_replaces_the_first_arguments(skip, compiled):
    @mpx.cond_update(skip=skip)
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


@pytest.mark.parametrize("skip", SKIPS)
def test_cond_update_takes_modules_and_leaves_the_rest_of_them_alone(skip):
    model = Model()

    @mpx.cond_update(skip=skip)
    def step(model, grads):
        return eqx.apply_updates(model, grads)

    grads = gradients(model, 0)
    assert_trees_equal(step(False, model, inject_nonfinite(grads)), model)
    taken = step(True, model, grads)
    assert_trees_equal(taken.weight, model.weight + grads.weight)
    assert (taken.activation, taken.name) == (jax.nn.relu, "model")
    assert isinstance(taken.rate, float)


def test_cond_update_counts_a_namedtuple_as_one_value():
    state = optax.TraceState(jnp.zeros(2))
    step = mpx.cond_update(lambda state, grads: state._replace(trace=grads))
    assert_trees_equal(step(False, state, jnp.ones(2)), state)
    assert_trees_equal(step(True, state, jnp.ones(2)).trace, jnp.ones(2))


CONDUPDATE_ERRORS = [
    (lambda p: (p, p), "returned 2 values for 1 arguments.*first arguments"),
    (lambda p: {"w": p["w"], "v": 1}, r"only the first has \['0/v'\]"),
    (lambda p: {"w": jnp.ones(3)}, r"`0/w` is \(3,\).*\(2,\) in the second"),
]


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(("function", "match"), CONDUPDATE_ERRORS, ids=range(3))
def test_cond_update_refuses_results_that_do_not_fit(function, match, skip):
    with pytest.raises(ValueError, match=match):
        mpx.cond_update(function, skip=skip)(True, {"w": jnp.ones(2)})


def test_cond_update_leaves_its_own_name_to_the_function():
    update = mpx.cond_update(lambda p, grads_finite: p * grads_finite)
    assert_trees_equal(update(True, jnp.ones(2), grads_finite=3.0), jnp.full(2, 3.0))


def test_cond_update_refuses_a_wrong_flag():
    with pytest.raises(TypeError, match="`grads_finite` must be a boolean scalar"):
        mpx.cond_update(lambda p: p)(jnp.ones(2), jnp.ones(2))
