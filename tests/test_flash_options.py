"""Compressed optimizers: which trees they take, masks, groups, and errors."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpx
from flash_cases import BF16, F16, F32, SHAPE, TINY, draw, kind, stepper
from mpx._quant import Quantized
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
    master = mpx.master_params(new, state)
    assert master["kernel"][...].dtype == F32


# --- masks and groups -----------------------------------------------------------------

TREE = {"layer": {"w": 0, "b": 0}, "head": {"w": 0}}
MASKS = {
    "tree": {"layer": {"w": True, "b": False}, "head": {"w": True}},
    "prefix": {"layer": True, "head": False},
    "callable": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "callable prefix": lambda params: {"layer": False, "head": True},
    "all": True,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(
    "factory", [mpx.flash_adamw, mpx.flash_adam, mpx.flash_lion, mpx.flash_sgdw]
)
def test_only_masked_parameters_decay(factory, mask):
    params = jax.tree.map(lambda _: jnp.ones((1, 32)), TREE)
    params["layer"]["b"] = jnp.ones(32)
    tx = factory(0.5, weight_decay=0.5, mask=mask)
    grads = jax.tree.map(jnp.zeros_like, params)
    new, _ = tx.step(params, tx.init(params), grads)
    full = mask(params) if callable(mask) else mask
    full = jax.tree.broadcast(full, params)
    moved = jax.tree.map(lambda x: bool(jnp.any(x != 1)), new)
    assert moved == full


def test_groups_set_hyperparameters_freeze_and_compress():
    params = {
        "norm": {"scale": draw(0, dtype=BF16)},
        "embed": draw(1, dtype=BF16),
        "w": draw(2, dtype=BF16),
        "complex": jnp.ones(2, jnp.complex64),
    }
    groups = [
        mpx.ParamGroup(
            "^norm", {"learning_rate": lambda count: 0.5 * jnp.float32(count + 1)}
        ),
        mpx.ParamGroup(
            "norm|embed|complex", frozen=True
        ),  # the first that matches holds
        mpx.ParamGroup(
            lambda path, leaf: leaf is not None and path == "w",
            {"weight_decay": 0.0},
            compression=mpx.Compression(quantize=False, master_bits=32),
        ),
    ]
    tx: Any = mpx.flash_sgdw(
        0.25, weight_decay=1.0, momentum=0.0, groups=groups, compression=TINY
    )
    state = tx.init(params)
    assert state.mu["embed"] is None
    assert isinstance(state.mu["norm"]["scale"], Quantized)
    assert state.mu["w"].dtype == F32
    assert state.correction["w"].dtype == np.int16
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    new, state = tx.step(params, state, grads)
    assert new["embed"] is params["embed"]
    assert new["complex"] is params["complex"]
    before, after = params, mpx.master_params(new, state)
    close = functools.partial(np.testing.assert_allclose, rtol=2.0**-14, atol=2.0**-14)
    close(after["norm"]["scale"], before["norm"]["scale"].astype(F32) * 0.5 - 0.5)
    close(after["w"], before["w"].astype(F32) - 0.25)


# --- errors ---------------------------------------------------------------------------

W = {"layer": {"w": jnp.ones(SHAPE, BF16)}}


def step_with(grads=W, params=W, state=None, tx=None):
    tx = kind("adamw") if tx is None else tx
    return tx.step(params, tx.init(W) if state is None else state, grads)


ERRORS = {
    "shape": (
        lambda: step_with({"layer": {"w": jnp.ones(3)}}),
        ValueError,
        r"gradient of `layer/w` has shape \(3,\), but the parameter has shape \(2, 64\)",
    ),
    "integer gradient": (
        lambda: step_with({"layer": {"w": jnp.ones(SHAPE, int)}}),
        TypeError,
        "gradient of `layer/w` is int32, but a floating array was expected",
    ),
    "other gradient": (
        lambda: step_with({"layer": {"w": "no"}}),
        (TypeError, ValueError),
        "gradient of `layer/w`",
    ),
    "structure": (
        lambda: step_with({"layer": {"v": jnp.ones(3)}}),
        ValueError,
        r"gradients must have the structure.*\['layer/w'\] are missing and \['layer/v'\]",
    ),
    "state of other parameters": (
        lambda: step_with(state=kind("adamw").init({"v": jnp.ones(3)})),
        ValueError,
        "The optimizer state must have the structure of the parameters",
    ),
    "state of another rule": (
        lambda: step_with(state=kind("lion").init(W)),
        ValueError,
        "state has no nu for `layer/w`",
    ),
    "complex parameter": (
        lambda: kind("adamw").init({"c": jnp.ones(3, jnp.complex64)}),
        TypeError,
        "`c` is complex64, but .* f32, bf16 or f16. Cast it, or freeze it",
    ),
    "ok is no flag": (
        lambda: kind("adamw").step(W, kind("adamw").init(W), W, ok=1.0),
        TypeError,
        "`ok` must be a boolean scalar",
    ),
    "no parameters": (
        lambda: kind("adamw").update(W, kind("adamw").init(W)),
        ValueError,
        r"needs the parameters: call `update\(grads, state, params\)`",
    ),
    "nobody in the group": (
        lambda: mpx.flash_sgd(1.0, groups=[mpx.ParamGroup("bias")]).init(W),
        ValueError,
        r"No parameter belongs to the group 'bias'. The paths are \['layer/w'\]",
    ),
    "unknown hyperparameter": (
        lambda: mpx.flash_sgd(1.0, groups=[mpx.ParamGroup("w", {"b1": 0.9})]),
        ValueError,
        r"The group 'w' sets \['b1'\], but this optimizer has only",
    ),
    "two formats": (
        lambda: mpx.flash_sgd(
            1.0,
            groups=[
                mpx.ParamGroup("w", compression=mpx.Compression(format="flashoptim"))
            ],
        ),
        ValueError,
        "has the format 'flashoptim', but the others have 'mpx'",
    ),
    "mask of another structure": (
        lambda: step_with(tx=mpx.flash_adamw(1.0, mask={"v": True})),
        ValueError,
        "`mask` must have the structure of the parameters",
    ),
    "nesterov without momentum": (
        lambda: mpx.flash_sgd(1.0, nesterov=True),
        ValueError,
        "`nesterov=True` needs a momentum",
    ),
    "b1": (
        lambda: mpx.flash_adam(1.0, b1=1.0),
        ValueError,
        r"`b1` must lie in \[0, 1\)",
    ),
    "b2": (
        lambda: mpx.flash_lion(1.0, b2=-0.1),
        ValueError,
        r"`b2` must lie in \[0, 1\)",
    ),
    "eps": (
        lambda: mpx.flash_adamw(1.0, eps=0.0),
        ValueError,
        r"`eps` must lie in \(0",
    ),
    "rate": (
        lambda: mpx.flash_sgd(-1.0),
        ValueError,
        r"`learning_rate` must lie in \[0, ∞\), but -1.0",
    ),
    "decay": (
        lambda: mpx.flash_sgd(
            1.0, groups=[mpx.ParamGroup("w", {"weight_decay": -1.0})]
        ),
        ValueError,
        "`weight_decay` must lie in",
    ),
    "16 bits": (
        lambda: mpx.flash_adam(jnp.ones((), BF16)),
        ValueError,
        "`learning_rate` is bfloat16.*f32 is needed",
    ),
    "group size": (
        lambda: mpx.Compression(group_size=24),
        ValueError,
        "`group_size` must be a power of two such as 32, but 24 was given",
    ),
    "min size": (
        lambda: mpx.Compression(min_size=-1),
        ValueError,
        "`min_size` must not be negative, but -1",
    ),
    "shape of master": (
        lambda: mpx.from_master(
            {"layer": {"w": jnp.ones(3)}}, W, kind("adamw").init(W)
        ),
        ValueError,
        r"weight of `layer/w` has shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_say_what_came_and_where(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_state_of_another_format_is_refused():
    state = kind("adamw", format="flashoptim").init(W)
    wrong = eqx.tree_at(lambda s: s.mu, kind("adamw").init(W), state.mu)
    with pytest.raises(ValueError, match="scales of `layer/w` are float16.*'mpx' has"):
        step_with(state=wrong)
    # The format belongs to the state: an optimizer goes on with what it finds.
    assert kind("adamw").step(W, state, W).state.format == "flashoptim"
