"""How compressed optimizers start: from f32 weights, or from 16-bit parameters alone."""

import functools
from typing import Any

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpx
from flash_cases import BF16, F16, F32, TINY, draw
from mpx.testing import assert_trees_equal
from numerics import ulp_distance

# `optax.apply_updates` adds an f32 update to a bf16 parameter.
pytestmark = pytest.mark.standard_promotion

master_params = jax.jit(mpx.optim.master_params)


def adamw(rate=1e-3, **options) -> Any:
    compression = mpx.optim.Compression(min_size=64, **options)
    return mpx.optim.flash_adamw(rate, weight_decay=0.0, compression=compression)


# --- from 16-bit parameters ---------------------------------------------------------------


STORED = [
    ({}, BF16),
    ({"master_bits": 32}, BF16),
    ({"format": "flashoptim"}, BF16),
    ({}, F16),
    ({"master_bits": 32}, F16),
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("options", "dtype"), STORED, ids=str)
def test_masters_of_parameters_start_anywhere_between_the_neighbours(options, dtype):
    params = {"w": jnp.full((64, 64), 0.05, dtype), "b": draw(1, (40,), dtype)}
    tx = adamw(**options)
    state = tx.init(params)
    half = float(jnp.finfo(dtype).eps) * 2.0**-5 / 2  # of an ulp from 1/32 to 1/16
    masters = master_params(params, state)
    assert_trees_equal(mpx.cast_tree(masters, dtype), params)
    left = np.asarray(masters["w"] - params["w"].astype(F32)) / half
    # A uniform distribution over ±1.
    assert np.std(left) == pytest.approx(np.sqrt(1 / 3), rel=0.05)
    assert abs(np.mean(left)) < 0.05
    assert np.all(masters["b"] != params["b"].astype(F32))
    # A step without a gradient changes no parameter.
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert_trees_equal(jax.jit(tx.step)(params, state, zeros).params, params)


def test_jitter_depends_on_the_path_and_on_nothing_else():
    params = {"a": jnp.ones((64, 64), BF16), "b": jnp.ones((64, 64), BF16)}
    state = adamw().init(params)
    assert_trees_equal(jax.jit(adamw().init)(params), state)
    alone = adamw().init({"b": params["b"]})
    assert_trees_equal(alone.packed["b"], state.packed["b"])
    assert np.mean(state.correction["a"] == state.correction["b"]) < 0.02
    # The moments are zeros, with and without.
    grid = adamw(jitter=False).init(params)
    assert_trees_equal(master_params(params, grid), mpx.cast_to_float32(params))
    assert_trees_equal((state.mu, state.nu), (grid.mu, grid.nu))


def test_weights_without_neighbours_of_their_size_start_where_they_are():
    for dtype in (BF16, F16):
        tiny = float(jnp.finfo(dtype).smallest_subnormal)
        numbers = [0.0, -0.0, tiny, -tiny, np.inf, -np.inf, np.nan]
        params = {"w": jnp.asarray(np.array(numbers * 64).astype(dtype))}
        state = adamw().init(params)
        assert not np.any(state.correction["w"])


def test_what_has_no_masters_starts_as_before():
    params = {"f32": jnp.ones((64, 64)), "w": jnp.ones((64, 64), BF16), "n": 3}
    for tx in (
        adamw(master_bits=None),
        mpx.optim.flash_sgd(
            1e-3, groups=[mpx.optim.ParamGroup("w", frozen=True)], compression=TINY
        ),
    ):
        assert_trees_equal(mpx.optim.master_params(params, tx.init(params)), params)


@functools.cache
def mover(rate, jitter):
    """Takes steps with a constant gradient; returns the mean of the bf16 weights."""
    tx = adamw(rate, jitter=jitter)

    @jax.jit
    def run(steps):
        params = jnp.full((256, 256), 0.05, BF16)
        step = lambda _, carry: tuple(tx.step(*carry, jnp.ones((256, 256))))  # noqa: E731
        params, _ = jax.lax.fori_loop(0, steps, step, (params, tx.init(params)))
        return jnp.mean(params.astype(F32))

    return run


@pytest.mark.some(2)
@pytest.mark.parametrize("steps", [10, 50, 100, 300])
def test_rounded_weights_move_from_the_first_steps_on(steps):
    # The gradient is constant: Adam moves by its rate.
    start = float(jnp.bfloat16(0.05))
    moved = (start - float(mover(1e-6, True)(steps))) / (1e-6 * steps)
    # 65,536 weights, of which a share of `steps` / 244 has moved by a unit, at random.
    noise = 1 / np.sqrt(65536 * min(steps / 244, 1))
    assert moved == pytest.approx(1, abs=3 * noise)
    assert 3 * noise < 0.06
    if steps <= 100:
        assert mover(1e-6, False)(steps) == start  # what jitter is for


# --- fine-tuning ------------------------------------------------------------------------


def regression():
    """A problem in bf16 weights, whose loss is computed in f32."""
    x, y = draw(0, (32, 128)), draw(1, (32, 128))
    weights = {"w": draw(2, (128, 128)) * 0.05, "b": jnp.zeros(128)}

    def loss(params):
        params = mpx.cast_to_float32(params)
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"] + params["b"]) - y))

    return weights, loss


def curve(loss, step, carry, steps=500):
    def body(carry, _):
        value, grads = jax.value_and_grad(loss)(carry[0])
        return step(*carry, grads), value

    carry, values = jax.jit(lambda carry: jax.lax.scan(body, carry, length=steps))(
        carry
    )
    return np.append(values, loss(carry[0]))


def assert_follows(got, want):
    """No point is off by more than 2 % of what the f32 loss falls by in all."""
    fall = want[0] - want[-1]
    assert fall > 0
    return np.max(np.abs((got[0] - got) - (want[0] - want))) / fall


def f32_curve(loss, weights):
    tx = optax.adamw(1e-6, weight_decay=0.0)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return curve(loss, step, (weights, tx.init(weights)))


def flash_step(tx):
    return lambda *carry: tuple(tx.step(*carry))


@pytest.mark.slow
def test_fine_tuning_of_bf16_weights_follows_f32():
    weights, loss = regression()
    low = mpx.cast_to_bfloat16(weights)
    want = f32_curve(loss, mpx.cast_to_float32(low))
    got = curve(loss, flash_step(adamw(1e-6)), (low, adamw(1e-6).init(low)))
    assert got[0] == want[0]
    assert assert_follows(got, want) < 0.02
    grid = adamw(1e-6, jitter=False)
    stuck = curve(loss, flash_step(grid), (low, grid.init(low)))
    assert assert_follows(stuck, want) > 0.1


@pytest.mark.slow
def test_fine_tuning_from_f32_weights_follows_f32():
    weights, loss = regression()
    want = f32_curve(loss, weights)
    got = curve(loss, flash_step(adamw(1e-6)), tuple(adamw(1e-6).init_from(weights)))
    assert assert_follows(got, want) < 0.02


# --- from f32 weights -------------------------------------------------------------------


def model_of(kind):
    """Returns an f32 model, and its parameters as a list."""
    if kind == "equinox":
        model = eqx.nn.MLP(64, 10, 128, 1, key=jax.random.key(0))
        return model, lambda model: jax.tree.leaves(eqx.filter(model, eqx.is_array))
    if kind == "nnx":
        model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
        return model, lambda model: [model.bias[...], model.kernel[...]]
    if kind == "nnx state":
        state = nnx.state(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Param)
        return state, lambda state: [state["bias"][...], state["kernel"][...]]
    variables = flax.linen.Dense(128).init(jax.random.key(0), jnp.ones((1, 64)))
    return variables, jax.tree.leaves


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kind", ["equinox", "nnx", "nnx state", "linen"])
def test_masters_hold_the_f32_weights(kind, dtype):
    model, leaves = model_of(kind)
    params, state = adamw().init_from(model, dtype)
    assert type(params) is type(model)
    masters = mpx.optim.master_params(params, state)
    for weight, param, master in zip(
        *map(leaves, (model, params, masters)), strict=True
    ):
        assert weight.dtype == master.dtype == F32
        assert param.dtype == (BF16 if dtype == "bf16" else F16)
        assert param.sharding == weight.sharding
        # 128 f32 ulps for bf16 of 24 bits; 8 bits of half an ulp for f16.
        assert np.max(ulp_distance(master, weight)) <= 128
        rounded = np.abs(np.asarray(param.astype(F32) - master))
        assert np.all(rounded <= 2.0**-8 * np.abs(weight) + 2.0**-25)
    assert int(state.count) == 0


def test_a_start_under_jit_is_the_same():
    weights = {"w": draw(0, (64, 64)), "b": draw(1, (5,)), "low": draw(2, (8,), BF16)}
    start = adamw().init_from(weights)
    assert_trees_equal(jax.jit(adamw().init_from)(weights), start)
    # What has 16 bits already starts as with `init`.
    alone = adamw().init(weights)
    assert_trees_equal(start.state.packed["low"], alone.packed["low"])
    shapes = jax.eval_shape(lambda: weights)
    expected = jax.eval_shape(lambda: tuple(start))
    got = tuple(adamw().init_from(shapes))
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert isinstance(one, jax.ShapeDtypeStruct)
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_options_of_a_start():
    weights = {
        "norm": draw(0, (64,)),
        "frozen": draw(1, (64, 64)),
        "alone": draw(2, (64, 64)),
        "w": draw(3, (64, 64)),
        "host": np.ones((64, 64), np.float32) / 3,
        "ids": jnp.arange(3),
        "act": jax.nn.relu,
        "none": None,
    }
    groups = [
        mpx.optim.ParamGroup("frozen", frozen=True),
        mpx.optim.ParamGroup(
            "alone", compression=mpx.optim.Compression(master_bits=None)
        ),
    ]
    tx: Any = mpx.optim.flash_adamw(1e-3, groups=groups, compression=TINY)
    params, state = tx.init_from(weights, keep="norm")
    assert params["norm"] is weights["norm"]
    assert params["act"] is weights["act"]
    for name in ("frozen", "alone"):
        assert_trees_equal(params[name], weights[name].astype(BF16))
        assert state.correction[name] is None
    assert state.mu["frozen"] is None
    masters = mpx.optim.master_params(params, state)
    for name in ("w", "host"):
        assert np.max(ulp_distance(masters[name], weights[name])) <= 128
    new = tx.step(
        params,
        state,
        jax.tree.map(jnp.ones_like, eqx.filter(params, eqx.is_inexact_array)),
    )
    assert_trees_equal(new.params["frozen"], params["frozen"])
    moved = mpx.optim.master_params(*new)["w"] - masters["w"]
    np.testing.assert_allclose(moved, -1e-3, atol=255 * 2.0**-22)  # for weights below 4
    with pytest.raises(ValueError, match="'none' in `keep` selects nothing"):
        tx.init_from({"w": weights["w"]}, keep="none")
    with pytest.raises(
        ValueError, match="`dtype` must be a floating dtype of at least 16"
    ):
        tx.init_from({"w": weights["w"]}, "int8")


def test_running_statistics_stay_f32():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)

    tx = mpx.optim.flash_adamw(1e-3, compression=TINY)
    net, _ = tx.init_from(Net(nnx.Rngs(0)))
    assert net.linear.kernel.dtype == net.norm.scale.dtype == BF16
    assert net.norm.mean.dtype == net.norm.var.dtype == F32
    variables = {"params": {"w": jnp.ones((4, 32))}, "batch_stats": {"m": jnp.ones(4)}}
    params, state = tx.init_from(variables)
    assert params["batch_stats"]["m"].dtype == F32
    # They do not decay, even if somebody differentiates them.
    grads = jax.tree.map(jnp.ones_like, params)
    after, _ = mpx.optim.flash_adamw(1e-1, weight_decay=0.5, compression=TINY).step(
        params, state, grads
    )
    assert_trees_equal(after["batch_stats"], params["batch_stats"])
    assert jnp.all(after["params"]["w"] < 1)


def test_an_f32_start_in_flax():
    """What the guide tells users of NNX and Linen."""
    tx = adamw()
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs))
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    model, state = tx.init_from(model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    nnx.update(optimizer.opt_state, nnx.state(state))
    grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, grads)

    params, state = tx.init_from(weights)
    train_state = TrainState.create(apply_fn=None, params=params, tx=tx)
    train_state = train_state.replace(opt_state=state)
    train_state = train_state.apply_gradients(grads=nnx.to_pure_dict(grads))
    expected = jax.jit(tx.step)(params, state, nnx.to_pure_dict(grads))
    got = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    for name in weights:
        assert_trees_equal(train_state.params[name], expected.params[name])
        assert_trees_equal(got[name], expected.params[name])
    held = mpx.optim.master_params(train_state.params, train_state.opt_state)
    # Rounded to nearest at the start, and up or down in the step.
    bound = (128 + 255) * 2.0**-23
    np.testing.assert_allclose(
        held["layers"][0]["kernel"],
        weights["layers"][0]["kernel"] - 1e-3,
        rtol=bound,
        atol=1e-3 * bound,
    )


def test_rounded_weights_are_no_masters():
    weights = {"w": draw((4, 64))}
    params, state = mpx.optim.flash_adamw(1e-3).init_from(weights)
    with pytest.warns(RuntimeWarning, match="`w` was given in bfloat16.*f32 weights"):
        mpx.optim.from_master(params, params, state)
    with pytest.raises(TypeError, match="`like` must be a pair.*FlashState was given"):
        mpx.checkpoint.from_f32(weights, optax.adam(1e-3).init(weights), like=state)
