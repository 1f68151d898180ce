"""Compressed optimizers: which trees they take, masks and groups."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from flash_cases import BF16, F16, F32, SHAPE, TINY, W, draw, kind, step_with, stepper
from mpx._quant._codecs import Quantized
from mpx.testing import assert_trees_equal

# --- trees ----------------------------------------------------------------------------


def test_leaves_that_are_no_parameters_come_back_as_they_are():
    tx = kind("adamw")
    params = {
        "ids": jnp.arange(3),
        "key": jax.random.key(0),
        "act": jax.nn.relu,
        "name": "model",
        "rate": 0.5,
        "nothing": None,
        "w": draw(0, dtype=BF16),
        "frozen": draw(1, dtype=BF16),
        "scalar": jnp.ones((), F16),
        "empty": jnp.ones((0, 32), BF16),
    }
    state = tx.init(params)
    given = {"w": draw(2), "scalar": jnp.ones(()), "empty": jnp.ones((0, 32))}
    float0 = np.zeros(3, jax.dtypes.float0)
    grads = dict.fromkeys(params) | given | {"ids": float0}
    new, after = tx.step(params, state, grads)
    for name in params.keys() - given.keys():
        assert new[name] is params[name]
        assert state.mu[name] is None or name == "frozen"
    assert not np.array_equal(new["w"], params["w"])
    assert float(new["scalar"]) == pytest.approx(0.99, abs=2.0**-11)
    assert new["empty"].shape == (0, 32)
    assert_trees_equal(after.mu["frozen"], state.mu["frozen"])
    assert int(after.count) == 1


@pytest.mark.parametrize("params", [{}, None, [], {"a": None}], ids=str)
def test_empty_trees_are_fine(params):
    tx = kind("adamw")
    stepped = tx.step(params, tx.init(params), params)
    assert_trees_equal(stepped.params, params)
    assert int(stepped.state.count) == 1


@pytest.mark.weekly
def test_a_whole_equinox_module_is_a_tree_of_parameters():
    model = eqx.nn.MLP(4, 1, 32, 1, key=jax.random.key(0), dtype=jnp.bfloat16)
    tx = kind("adamw")

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(4, BF16))))(model)
        return tx.step(model, state, grads)

    new, state = step(model, tx.init(model))
    assert new.activation is model.activation
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert not np.array_equal(new.layers[0].weight, model.layers[0].weight)
    filtered = tx.init(eqx.filter(model, eqx.is_inexact_array))
    assert_trees_equal(jax.tree.leaves(tx.init(model)), jax.tree.leaves(filtered))


@pytest.mark.weekly
def test_nnx_states_are_trees_of_parameters():
    model = nnx.Linear(4, 32, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    params, tx = nnx.state(model, nnx.Param), kind("adamw")
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    new, state = stepper(tx)(params, tx.init(params), grads)
    assert jax.tree.structure(new) == jax.tree.structure(params)
    plain = {"kernel": params["kernel"][...], "bias": params["bias"][...]}
    expected = stepper(tx)(plain, tx.init(plain), jax.tree.map(jnp.ones_like, plain))
    for name in plain:
        assert_trees_equal(new[name][...], expected.params[name])
        assert isinstance(state.mu[name], Quantized)
    master = mpx.optim.master_params(new, state)
    assert master["kernel"][...].dtype == F32


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.complex64, np.float64], ids=str
)
def test_floats_that_cannot_be_trained_are_refused_unless_they_are_frozen(dtype):
    params = {"layer": {"w": np.ones(SHAPE, dtype)}, "b": jnp.ones(3)}
    name = np.dtype(dtype).name
    tx = kind("adamw")
    with pytest.raises(
        TypeError, match=f"`layer/w` is {name}, but .* f32, bf16 or f16"
    ):
        tx.init(params)
    state = tx.init(params | {"layer": {"w": None}})
    grads = {"layer": {"w": jnp.ones(SHAPE)}, "b": jnp.ones(3)}
    with pytest.raises(TypeError, match=f"`layer/w` is {name}"):
        tx.step(params, state, grads)
    tx = mpx.optim.flash_adamw(
        0.01, groups=[mpx.optim.ParamGroup("layer", frozen=True)]
    )
    new, _ = tx.step(params, tx.init(params), grads)
    assert new["layer"]["w"] is params["layer"]["w"]


# --- masks and groups -----------------------------------------------------------------

TREE = {"layer": {"w": 0, "b": 0}, "head": {"w": 0}}
MASKS = {
    "tree": {"layer": {"w": True, "b": False}, "head": {"w": True}},
    "prefix": {"layer": True, "head": False},
    "callable": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "callable prefix": lambda params: {"layer": False, "head": True},
    "all": True,
}


@pytest.mark.parametrize(
    ("factory", "mask"),
    [
        (mpx.optim.flash_adamw, "tree"),
        (mpx.optim.flash_adam, "prefix"),
        (mpx.optim.flash_lion, "callable"),
        (mpx.optim.flash_sgdw, "callable prefix"),
        (mpx.optim.flash_adamw, "all"),
    ],
)
def test_only_masked_parameters_decay(factory, mask):
    mask = MASKS[mask]
    params = jax.tree.map(lambda _: jnp.ones((1, 32)), TREE)
    params["layer"]["b"] = jnp.ones(32)
    tx = factory(0.5, weight_decay=0.5, mask=mask)
    grads = jax.tree.map(jnp.zeros_like, params)
    new, _ = tx.step(params, tx.init(params), grads)
    full = mask(params) if callable(mask) else mask
    full = jax.tree.broadcast(full, params)
    moved = jax.tree.map(lambda x: bool(jnp.any(x != 1)), new)
    assert moved == full


@pytest.mark.parametrize("filtered", [False, True])
def test_a_module_of_booleans_is_a_mask_though_it_can_be_called(filtered):
    model = eqx.nn.MLP(4, 1, 32, 1, key=jax.random.key(0))
    arrays = eqx.filter(model, eqx.is_inexact_array)
    mask: Any = jax.tree.map(lambda x: x.ndim > 1, arrays)
    assert mask.activation is None  # the premise: nothing is there for a function
    assert callable(mask)
    params = arrays if filtered else model
    tx = mpx.optim.flash_sgdw(0.5, weight_decay=0.5, mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, arrays)
    new = tx.step(params, tx.init(params), zeros).params
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert_trees_equal(layer.weight, old.weight * 0.75)
        assert_trees_equal(layer.bias, old.bias)


def test_what_is_none_in_a_mask_does_not_decay():
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(2)}}
    tx = mpx.optim.flash_sgdw(0.5, weight_decay=0.5, mask={"a": True, "b": None})
    new = tx.step(params, tx.init(params), jax.tree.map(jnp.zeros_like, params)).params
    assert_trees_equal(new, {"a": jnp.full(2, 0.75), "b": params["b"]})


@pytest.mark.parametrize("yes", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_a_mask_holds_booleans_of_any_kind(yes):
    params = {"a": jnp.ones(2)}
    tx = mpx.optim.flash_sgdw(0.5, weight_decay=0.5, mask={"a": yes})
    new = tx.step(params, tx.init(params), {"a": jnp.zeros(2)}).params
    assert_trees_equal(new, {"a": jnp.full(2, 0.75)})


NO_BOOLEANS = {
    "string": ("no", "str"),
    "number": (0.0, "float"),
    "integer": (1, "int"),
    "float array": (jnp.zeros(()), "float32"),
    "two": (jnp.array([True, False]), "bool"),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("keep", "match"), NO_BOOLEANS.values(), ids=NO_BOOLEANS.keys()
)
def test_a_mask_of_anything_else_is_refused(keep, match, called):
    mask = {"layer": {"w": keep}}
    tx = mpx.optim.flash_adamw(1.0, mask=(lambda _: mask) if called else mask)
    with pytest.raises(TypeError, match="`mask` must be .*`layer/w`: " + match):
        step_with(tx=tx)


def test_a_mask_cannot_be_computed_from_values():
    mask = lambda params: jax.tree.map(lambda x: jnp.any(x > 0), params)  # noqa: E731
    tx = mpx.optim.flash_adamw(1.0, mask=mask)
    with pytest.raises(
        TypeError, match="`mask` must be .*`layer/w`: bool.* known when"
    ):
        jax.jit(lambda params: step_with(params=params, tx=tx))(W)


def test_functions_choose_groups_by_arrays_alone():
    model: Any = eqx.nn.MLP(4, 1, 32, 1, key=jax.random.key(0))
    seen = []

    def is_matrix(path, array):
        seen.append(path)
        return array.ndim > 1  # which neither functions nor None have

    groups = [mpx.optim.ParamGroup(is_matrix, frozen=True)]
    tx: Any = mpx.optim.flash_sgd(0.5, 0.9, groups=groups)
    params = {"model": model, "nothing": None, "rate": 0.5}
    grads = jax.tree.map(
        lambda x: jnp.ones_like(x) if eqx.is_array(x) else None, params
    )
    new = tx.step(params, tx.init(params), grads).params["model"]
    assert_trees_equal(new.layers[0].weight, model.layers[0].weight)
    assert_trees_equal(new.layers[0].bias, model.layers[0].bias - 0.5)
    assert all("layers" in path for path in seen)
    state = tx.init(eqx.filter_eval_shape(lambda: params))
    assert state.mu["model"].layers[0].weight is None
    assert state.mu["model"].layers[0].bias.shape == (32,)
    never = mpx.optim.flash_sgd(
        0.5, groups=[mpx.optim.ParamGroup(lambda path, x: x.ndim > 2)]
    )
    with pytest.raises(ValueError, match="selects nothing"):
        never.init(params)


def test_groups_set_hyperparameters_freeze_and_compress():
    params = {
        "norm": {"scale": draw(0, dtype=BF16)},
        "embed": draw(1, dtype=BF16),
        "w": draw(2, dtype=BF16),
        "complex": jnp.ones(2, jnp.complex64),
    }
    groups = [
        mpx.optim.ParamGroup(
            "^norm", {"learning_rate": lambda count: 0.5 * jnp.float32(count + 1)}
        ),
        mpx.optim.ParamGroup(
            "norm|embed|complex", frozen=True
        ),  # the first that matches holds
        mpx.optim.ParamGroup(
            lambda path, array: array.ndim == 2 and path == "w",
            {"weight_decay": 0.0},
            compression=mpx.optim.Compression(quantize=False, master_bits=32),
        ),
    ]
    tx: Any = mpx.optim.flash_sgdw(
        0.25, weight_decay=1.0, momentum=0.0, groups=groups, compression=TINY
    )
    state = tx.init(params)
    before = mpx.optim.master_params(params, state)
    assert state.mu["embed"] is None
    assert isinstance(state.mu["norm"]["scale"], Quantized)
    assert state.mu["w"].dtype == F32
    assert state.correction["w"].dtype == np.int16
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    new, state = tx.step(params, state, grads)
    assert new["embed"] is params["embed"]
    assert new["complex"] is params["complex"]
    after = mpx.optim.master_params(new, state)
    close = functools.partial(np.testing.assert_allclose, rtol=2.0**-14, atol=2.0**-14)
    close(after["norm"]["scale"], before["norm"]["scale"] * 0.5 - 0.5)
    close(after["w"], before["w"] - 0.25)
