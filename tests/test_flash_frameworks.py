"""Compressed optimizers with `optimizer_update`, Flax, checkpoints and transforms."""

import functools
import io
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import mpx
from flash_cases import (
    BF16,
    F16,
    OPTIMIZERS,
    SMALL,
    make_grads,
    make_params,
    masters,
    optimizer,
    stepper,
    train,
)
from models import count_traces, mlp, mlp_batch, mlp_loss
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

# `optax.apply_updates` adds an f32 update to a bf16 parameter.
pytestmark = [
    pytest.mark.standard_promotion,
]


# States with two moments, one and none.
@pytest.fixture(params=["adamw", "lion", "sgd without momentum"])
def tx(request) -> Any:
    return optimizer(request.param)


# --- optimizer_update and value_and_grad ----------------------------------------------


def recording():
    """Returns an optimizer that steps by itself, and a list of how it was called."""
    calls = []

    class Recording(optax.GradientTransformationExtraArgs):
        def step(self, params, state, grads, *, finite=None, grad_scale=1.0):
            calls.append(
                ("step", finite if finite is None else bool(finite), grad_scale)
            )
            return jax.tree.map(jnp.add, params, grads), state + 1

    def update(updates, state, params=None, **extra):
        calls.append(("update", extra))
        return updates, state + 1

    return Recording(lambda params: jnp.zeros((), jnp.int32), update), calls


CALLS = [
    ({"skip": "select"}, ("step", True, 1.0)),
    ({"skip": "never"}, ("step", None, 1.0)),
    ({"grad_scale": 0.5}, ("step", True, 0.5)),
    # `step` is not given what line searches and schedules of optax ask for.
    ({"value": 1.0}, ("step", True, 1.0)),
]


@pytest.mark.parametrize(("options", "call"), CALLS, ids=str)
def test_optimizer_update_lets_an_optimizer_step_by_itself(options, call):
    ones = jnp.ones(2)
    tx, calls = recording()
    after = mpx.optimizer_update(ones, tx, tx.init(ones), ones, True, **options)
    assert_trees_equal(after, (ones * 2, jnp.int32(1)))
    assert calls == [call]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("skip", "finite"),
    [("select", True), ("select", False), ("never", False)],
)
def test_optimizer_update_is_step_or_nothing(skip, finite):
    tx = optimizer("lion")
    model = {"params": make_params(), "act": jax.nn.relu, "ids": jnp.arange(3)}
    grads = {"params": make_grads(0), "act": None, "ids": None}
    if not finite and skip != "never":
        grads = inject_nonfinite(grads)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def update(model, state, grads, finite):
        return mpx.optimizer_update(model, tx, state, grads, finite, skip=skip)

    after = update(model, state, grads, jnp.array(finite))
    expected = (model, state)
    if finite or skip == "never":
        expected = tuple(eqx.filter_jit(tx.step)(model, state, grads))
    assert_trees_equal(after[0], expected[0])
    assert_trees_equal(after[1], expected[1])
    assert type(after) is tuple


def test_optimizer_update_checks_before_it_steps():
    tx, params = optimizer(), make_params()
    grads = make_grads(0) | {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="gradient of `w` has shape"):
        mpx.optimizer_update(params, tx, tx.init(params), grads, True)
    with pytest.raises(TypeError, match="`grads_finite` must be a boolean scalar"):
        mpx.optimizer_update(params, tx, tx.init(params), make_grads(0), 1.0)


@pytest.mark.weekly
def test_scaled_gradients_with_grad_scale_are_unscaled_gradients():
    model = jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x, F16)) if eqx.is_inexact_array(x) else x,
        mlp(features=8, width=64),
    )
    tx = mpx.optim.flash_adamw(1e-2, compression=SMALL)
    batch = mlp_batch(features=8)

    @eqx.filter_jit
    def unscaled(model, state, scaling):
        result = mpx.value_and_grad(mlp_loss, policy="p=f16,c=f16,o=f32")(
            scaling, model, *batch
        )
        new = tx.step(model, state, result.grads, finite=result.finite)
        return *new, result.scaling

    @eqx.filter_jit
    def scaled(model, state, scaling):
        def loss(model):
            half = jax.tree.map(lambda x: x.astype(jnp.float16), batch)
            return scaling.scale(mlp_loss(model, *half).astype(jnp.float32))

        grads = eqx.filter_grad(loss)(model)
        finite = mpx.all_finite(grads)
        new = tx.step(
            model, state, grads, finite=finite, grad_scale=1 / scaling.loss_scaling
        )
        return *new, scaling.adjust(finite)

    # The first scale overflows f16, so that a step is skipped.
    one: Any = (model, tx.init(model), mpx.DynamicLossScaling.pow2(2.0**24))
    two: Any = one
    for _ in range(12):
        one, two = unscaled(*one), scaled(*two)
    assert int(one[1].count) not in (0, 12)
    assert_trees_equal(one[2].loss_scaling, two[2].loss_scaling)
    assert_trees_equal(one[1].count, two[1].count)
    for a, b in zip(*map(jax.tree.leaves, (one[0], two[0])), strict=True):
        if eqx.is_array(a):
            # Two programs: a handful of f16 roundings of numbers around one.
            np.testing.assert_allclose(a, b, rtol=0, atol=8 * 2.0**-11)


# --- frameworks -----------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 64, rngs=rngs, param_dtype=jnp.bfloat16)
        self.outer = nnx.Linear(64, 1, rngs=rngs, param_dtype=jnp.bfloat16)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


def net_loss(model, x, y):
    return jnp.mean((model(x)[:, 0].astype(jnp.float32) - y) ** 2)


@nnx.jit
def mpx_update(model, optimizer, grads):
    mpx.optimizer_update(model, optimizer, None, grads, jnp.array(True))


@nnx.jit
def nnx_update(model, optimizer, grads):
    optimizer.update(model, grads)


@pytest.mark.some(1)
@pytest.mark.parametrize("through_mpx", [False, True])
def test_nnx_optimizer(through_mpx):
    tx = optimizer()
    model = Net(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    nnx_optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x, y = mlp_batch()
    gradient = nnx.jit(nnx.grad(net_loss))
    state = tx.init(params)
    for _ in range(2):
        grads = gradient(model, x, y)
        params, state = stepper(tx)(params, state, grads)
        if through_mpx:
            mpx_update(model, nnx_optimizer, grads)
        else:
            nnx_update(model, nnx_optimizer, grads)
        assert_trees_equal(
            jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(params)
        )
    assert int(state.count) == 2


def test_linen_train_state():
    tx = optimizer()
    module = flax.linen.Dense(64, param_dtype=jnp.bfloat16)
    params = module.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    train_state = TrainState.create(apply_fn=module.apply, params=params, tx=tx)
    grads = make_grads(0, params)
    expected = stepper(tx)(params, tx.init(params), grads).params

    @jax.jit
    def step(train_state, grads, finite):
        return mpx.optimizer_update(train_state, None, None, grads, finite)[0]

    after = step(train_state, grads, jnp.array(True))
    assert_trees_equal(after.params, expected)
    skipped = step(after, inject_nonfinite(grads), jnp.array(False))
    assert_trees_equal(skipped.params, after.params)
    assert_trees_equal(skipped.opt_state, after.opt_state)


# --- checkpoints ----------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "options", [{}, {"format": "flashoptim"}, {"rounding": "nearest"}], ids=str
)
def test_training_resumes_bit_for_bit(options, tmp_path):
    tx, params = optimizer(**options), make_params()
    step = stepper(tx)
    half_way = train(step, (params, tx.init(params)), range(3))
    expected = train(step, half_way, range(3, 6))
    template = params, tx.init(params)

    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, half_way)
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, template)
    assert_trees_equal(restored, half_way)
    assert_trees_equal(train(step, restored, range(3, 6)), expected)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half_way)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", template)
    assert_trees_equal(restored, half_way)
    assert_trees_equal(train(step, restored, range(3, 6)), expected)


# Of what is saved, and into what it is restored: rule, options, dtype.
ELSEWHERE = {
    "more bits": (("adamw", {}, BF16), ("adamw", {"master_bits": 32}, BF16)),
    "fewer bits": (("adamw", {"master_bits": 32}, BF16), ("adamw", {}, BF16)),
    "no masters": (("adamw", {}, BF16), ("adamw", {"master_bits": None}, BF16)),
    "format": (("lion", {}, BF16), ("lion", {"format": "flashoptim"}, BF16)),
    "min_size": (("adamw", {}, BF16), ("adamw", {"min_size": 1}, BF16)),
    "f16": (("adamw", {}, BF16), ("adamw", {}, F16)),
    "momentum of another rule": (("lion", {}, BF16), ("sgd", {}, BF16)),
}


def made(rule, options, dtype):
    compression = mpx.optim.Compression(**{"min_size": 64} | options)
    tx: Any = OPTIMIZERS[rule](1e-2, compression=compression)
    params = make_params(dtype)
    return tx, params, tx.init(params)


@pytest.mark.parametrize(("saved", "like"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_state_is_not_restored_into_one_of_another_layout(saved, like, tmp_path):
    _, *source = made(*saved)
    _, *template = made(*like)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", source)
        checkpointer.wait_until_finished()
        # The first form is that of Orbax 0.11.20, which lists both layouts.
        match = r"('layout': \{.*'|layout\.)\w+-mpx-planes-1x24"
        with pytest.raises(ValueError, match=match):
            checkpointer.restore(tmp_path / "state", template)
    saved_bytes = serialization.to_bytes(source[1])
    with pytest.raises(ValueError, match="keys do not match"):
        serialization.from_bytes(template[1], saved_bytes)


@pytest.mark.parametrize(
    ("part", "dtype", "jit", "match"),
    [
        (0, F16, jax.jit, "dtypes were cast.*`from_master`"),
        (0, F16, lambda f: f, "dtypes were cast.*`from_master`"),
        (1, np.int16, jax.jit, "must be .*codes=.u?int.* but it is .*codes=.int16"),
    ],
    ids=["parameters", "parameters, eager", "state"],
)
def test_arrays_that_were_cast_are_refused(part, dtype, jit, match):
    tx, *pair = made("adamw", {}, BF16)
    pair[part] = jax.tree.map(lambda x: x.astype(dtype) if x.ndim else x, pair[part])
    params, state = pair
    grads = make_grads(0)
    for call in (
        lambda params, state: tx.step(params, state, grads),
        lambda params, state: tx.update(grads, state, params),
        mpx.optim.master_params,
        lambda params, state: mpx.optim.from_master(params, params, state),
        lambda params, state: mpx.optim.release(lambda p: jnp.sum(p["w"]), tx)(
            params, state
        ),
    ):
        with pytest.raises(ValueError, match=match):
            jit(call)(params, state)


def test_states_may_be_traversed_by_optax(tx):
    params = make_params()
    state = tx.init(params)
    assert_trees_equal(optax.tree_map_params(tx, lambda x: x, state), state)


# Made where they are asked for: on one device, as on a GPU, the other tests run.
@functools.cache
def mesh_of(kind):
    shape, devices = {
        "old": ((8,), None),
        "of eight": ((2, 4), None),
        "of four": ((2, 2), jax.devices()[4:]),
    }[kind]
    names = ("x",) if kind == "old" else ("a", "b")
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


# What a run that resumes elsewhere may give Orbax to say what to restore, and where.
TEMPLATES = {
    "shapes": lambda tx, params, shapes: tx.init(shapes),
    "arrays": lambda tx, params, shapes: tx.init(params),
    "shapes of arrays": lambda tx, params, shapes: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        tx.init(params),
    ),
}


@pytest.mark.eight_devices
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("mesh", "template", "steps"),
    [
        ("of eight", "shapes", 1),
        ("of four", "shapes", 0),
        ("of four", "arrays", 1),
        ("of eight", "shapes of arrays", 0),
    ],
)
def test_training_resumes_on_another_mesh(mesh, template, steps, tmp_path):
    mesh, template = mesh_of(mesh), TEMPLATES[template]
    tx, params = optimizer("lion"), make_params()
    step = stepper(tx)

    def put(tree, sharding):
        return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)

    def moved(tree):
        tree = put(tree, NamedSharding(mesh, P()))
        sharding = NamedSharding(mesh, P("a", "b"))
        return tree | {"w": jax.device_put(tree["w"], sharding)}

    first = put(params, NamedSharding(mesh_of("old"), P()))
    saved = train(step, (first, tx.init(first)), range(steps))
    like = moved(params)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", (shapes, template(tx, like, shapes))
        )
    assert_trees_equal(jax.device_get(tuple(restored)), jax.device_get(tuple(saved)))
    after = step(*restored, moved(make_grads(steps)))
    expected = step(*saved, make_grads(steps))
    assert_trees_equal(jax.device_get(after.params), jax.device_get(expected.params))
    for leaf in (after.params["w"], after.state.mu["w"].codes):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)
    assert after.state.count.sharding.device_set == set(mesh.devices.flat)


# Where two parameters lie, and where the count then lies: on all of their devices, or,
# if they are not together, nowhere in particular.
PLACES = {
    "on a mesh": ("old", "old", "all"),
    "one of them": ("old", None, "all"),
    "on a device": ("last", "last", "last"),
    "anywhere": (None, None, None),
    "apart": ("old", "new", None),
}


@pytest.mark.eight_devices
@pytest.mark.parametrize("kinds", PLACES.values(), ids=PLACES.keys())
def test_the_count_lies_where_the_parameters_lie(kinds):
    places = {
        "old": NamedSharding(mesh_of("old"), P("x")),
        "all": NamedSharding(mesh_of("old"), P()),
        "new": NamedSharding(mesh_of("of four"), P("a")),
        "last": SingleDeviceSharding(jax.devices()[7]),
    }
    *places, count = map(places.get, kinds)
    tx = optimizer()
    put = [
        x if s is None else jax.device_put(x, s) for s in places for x in [jnp.ones(8)]
    ]
    made = tx.init(put).count
    assert made.committed == (count is not None)
    if count is not None:
        assert made.sharding == count
    shapes = [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=s) for s in places]
    template = tx.init(shapes).count
    assert isinstance(template, jax.ShapeDtypeStruct)
    assert (template.shape, template.dtype) == ((), jnp.int32)
    assert template.sharding == count


def test_a_sharded_step_is_compiled_once():
    tx, params = (
        optimizer(),
        jax.device_put(make_params(), NamedSharding(mesh_of("old"), P())),
    )
    step = jax.jit(tx.step)
    carry = params, tx.init(params)
    for number in range(3):
        carry = tuple(step(*carry, make_grads(number)))
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


# --- JAX's transforms -----------------------------------------------------------------


@pytest.mark.some(2)
def test_flax_saves_and_restores_the_state(tx):
    params, grads = make_params(), make_grads(0)
    fresh = TrainState.create(apply_fn=None, params=params, tx=tx)
    trained = fresh.apply_gradients(grads=grads)
    restored: Any = serialization.from_bytes(fresh, serialization.to_bytes(trained))
    saved, got = ((x.params, x.opt_state, x.step) for x in (trained, restored))
    assert_trees_equal(jax.tree.map(jnp.asarray, got), jax.tree.map(jnp.asarray, saved))


def test_weights_are_found_inside_of_an_optax_state():
    tx = optimizer("adamw")
    params = make_params()
    chain = optax.chain(optax.clip_by_global_norm(1.0), tx)
    state = chain.init(params)
    expected = masters(params, tx.init(params))
    assert_trees_equal(masters(params, state), expected)
    for wrong, count in ((optax.adam(1e-3).init(params), 0), ((state, state), 2)):
        with pytest.raises(ValueError, match=f"tuple holds {count} of them"):
            mpx.optim.master_params(params, wrong)
        with pytest.raises(ValueError, match=f"tuple holds {count} of them"):
            mpx.optim.from_master(params, params, wrong)


def test_weights_are_put_into_an_optax_state():
    tx = optimizer("adamw")
    params = make_params()
    weights = jax.tree.map(lambda x: x.astype(jnp.float32) / 3, params)
    expected = mpx.optim.from_master(weights, params, tx.init(params))
    chain: Any = optax.chain(optax.trace(0.5), tx)
    new, state = mpx.optim.from_master(weights, params, chain.init(params))
    assert_trees_equal((new, state[1]), expected)
    assert_trees_equal(state[0], chain.init(params)[0])
    held = mpx.optim.master_params(new, state)["w"]
    np.testing.assert_allclose(held, weights["w"], rtol=2.0**-16)  # 128 ulps of f32
    # What `masked` leaves out has no master weights, and only the parameter is set.
    masked = optax.masked(tx, jax.tree.map(lambda x: x.ndim > 1, params))
    new, state = mpx.optim.from_master(weights, params, masked.init(params))
    assert_trees_equal(new, expected[0])
    assert jax.tree.structure(state) == jax.tree.structure(masked.init(params))
    again = mpx.optim.master_params(new, state)
    assert_trees_equal(again["w"], mpx.optim.master_params(*expected)["w"])
    assert_trees_equal(again["layers"], new["layers"])


def test_only_weights_are_put_where_parameters_are():
    params = {
        "w": jnp.ones(4, jnp.bfloat16),
        "scalar": jnp.ones((), jnp.float16),
        "ids": jnp.arange(3),
        "key": jax.random.key(0),
        "act": jax.nn.relu,
        "step": 1,
    }
    tx = mpx.optim.flash_adamw(1e-3)
    state = tx.init(params)
    key = jax.random.key(1)
    full = {"w": np.full(4, 0.1), "scalar": 0.1, "act": jax.nn.gelu, "step": 2}
    master = full | {"ids": jnp.array([2.0, 3.0, 4.0]), "key": key}
    new, after = mpx.optim.from_master(master, params, state)
    assert new["ids"].dtype == params["ids"].dtype
    assert new["ids"].tolist() == [2, 3, 4]
    assert new["key"] is key
    assert (new["act"], new["step"]) == (jax.nn.gelu, 2)
    assert (new["w"].dtype, new["scalar"].dtype) == (jnp.bfloat16, jnp.float16)
    for name in ("w", "scalar"):
        weight = mpx.optim.master_params(new, after)[name]
        np.testing.assert_allclose(weight, 0.1, rtol=2.0**-22)
    filtered = dict.fromkeys(params) | {"w": full["w"], "scalar": full["scalar"]}
    new, _ = mpx.optim.from_master(filtered, params, state)
    for name in ("ids", "key", "act", "step"):
        assert new[name] is params[name]


def test_weights_of_other_parameters_are_refused():
    params = {"w": jnp.ones((4,), jnp.bfloat16)}
    state = mpx.optim.flash_adamw(1e-3).init(params)
    for wrong in (jnp.ones((1,), jnp.bfloat16), jnp.ones((4,), jnp.float32)):
        with pytest.raises(
            ValueError,
            match=r"state of `w` (must be .*uint16|has a correction of int16)",
        ):
            mpx.optim.master_params({"w": wrong}, state)
        with pytest.raises(
            ValueError,
            match=r"state of `w` (must be .*uint16|has a correction of int16)",
        ):
            mpx.optim.from_master({"w": wrong}, {"w": wrong}, state)


def test_a_skipped_update_keeps_infinite_parameters():
    params = {"w": jnp.array([jnp.inf, 1.0, -jnp.inf, 2.0], jnp.bfloat16)}
    tx: Any = mpx.optim.flash_adamw(1e-2)
    updates, _ = tx.update(params, tx.init(params), params, finite=False)
    assert_trees_equal(optax.apply_updates(params, updates), params)


def test_a_loop_over_steps_is_steps():
    tx = optimizer()
    params = make_params()
    grads = [make_grads(k) for k in range(4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *grads)

    @jax.jit
    def loop(params, state):
        body = lambda carry, g: (tuple(tx.step(*carry, g)), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), stacked)[0]

    carry = params, tx.init(params)
    looped = loop(*carry)
    expected = train(stepper(tx), carry, range(4))
    assert_trees_equal(looped[0], expected[0])
    assert_trees_equal(looped[1].count, expected[1].count)


def test_members_of_an_ensemble_train_as_if_alone():
    tx = optimizer()
    members = [make_params(), jax.tree.map(lambda x: x * 2, make_params())]
    stack = lambda trees: jax.tree.map(  # noqa: E731
        lambda *x: jnp.asarray(np.stack(x)), *trees
    )
    params, grads = stack(members), stack([make_grads(0), make_grads(1)])
    finite = jnp.array([True, False])
    state = jax.jit(jax.vmap(tx.init))(params)
    step = jax.jit(jax.vmap(lambda p, s, g, finite: tx.step(p, s, g, finite=finite)))
    after = step(params, state, grads, finite)
    first = stepper(tx)(members[0], tx.init(members[0]), make_grads(0))
    pick = lambda tree, k: jax.tree.map(  # noqa: E731
        lambda x: jnp.asarray(np.asarray(x)[k]), tree
    )
    assert_trees_equal(pick(after.params, 0), first.params)
    assert_trees_equal(pick(after.params, 1), members[1])
    assert_trees_equal(pick(after.state, 1), tx.init(members[1]))


def test_everything_can_be_donated():
    tx = optimizer()
    params = make_params()
    state = tx.init(params)
    expected = stepper(tx)(params, state, make_grads(0))
    grads = make_grads(0)
    after = jax.jit(tx.step, donate_argnums=(0, 1))(params, state, grads)
    assert_trees_equal(after, expected)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_state_of_shapes_is_the_shape_of_the_state(tx):
    params = make_params()
    state = tx.init(params)
    expected = jax.eval_shape(lambda: state)
    assert_trees_equal(jax.eval_shape(tx.init, params), expected)
    shapes = jax.eval_shape(lambda: params)
    assert_trees_equal(jax.eval_shape(tx.init, shapes), expected)
    assert_trees_equal(tx.init(shapes), expected)
    assert_trees_equal(jax.jit(tx.init)(params), state)


def test_the_next_steps_are_not_compiled_again(tx):
    step, traces = count_traces(tx.step)
    step = jax.jit(step)
    carry = make_params(), tx.init(make_params())
    for number in range(3):
        carry = tuple(
            step(
                *carry,
                make_grads(number),
                finite=jnp.array(True),
                grad_scale=number + 1.0,
            )
        )
    assert len(traces) == 1
