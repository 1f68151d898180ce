"""Compressed optimizers: what they refuse, and what the errors say."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze

import mpx
from flash_cases import BF16, SHAPE, TINY, W, kind, step_with
from mpx.testing import assert_trees_equal

# --- errors ---------------------------------------------------------------------------

ERRORS = {
    "shape": (
        lambda: step_with({"layer": {"w": jnp.ones(3)}}),
        ValueError,
        r"gradient of `layer/w` has shape \(3,\), but the parameter has shape \(2, 64\)",
    ),
    "integer gradient": (
        lambda: step_with({"layer": {"w": jnp.ones(SHAPE, int)}}),
        TypeError,
        "gradient of `layer/w` is int32.*needs a real floating gradient",
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
        "state is that of another optimizer: of the kind 'lion'.*this one is of the kind 'adam'",
    ),
    "Adam's state for SGD": (
        lambda: step_with(state=kind("adamw").init(W), tx=kind("sgd")),
        ValueError,
        r"of the kind 'adam'.*this one is of the kind 'sgd'.*its own `init\(params\)`",
    ),
    "Lion's state for SGD": (
        lambda: step_with(state=kind("lion").init(W), tx=kind("sgd")),
        ValueError,
        "of the kind 'lion'.*this one is of the kind 'sgd'",
    ),
    "init without floating arrays": (
        lambda: kind("adamw").init({"ids": jnp.arange(3), "name": "x"}),
        ValueError,
        r"floating arrays, but the tree has none: it holds \['ids: int32', 'name: str'\]",
    ),
    "step without floating arrays": (
        lambda: kind("adamw").step({"n": 3}, kind("adamw").init({}), {"n": 3}),
        ValueError,
        r"floating arrays, but the tree has none: it holds \['n: int'\]",
    ),
    "step without gradients": (
        lambda: step_with(grads=None),
        ValueError,
        "None of the parameters has a gradient, so the step would move nothing, but count",
    ),
    "update with a gradient for nothing": (
        lambda: kind("adamw").update(leaf(None), kind("adamw").init(W), W),
        ValueError,
        "None of the parameters has a gradient, so the step would move nothing, but count",
    ),
    "a state given to optax through mpx": (
        lambda: mpx.optimizer_update(
            W, mpx.optim.master_weights(optax.adam(1.0)), kind("adamw").init(W), W, True
        ),
        ValueError,
        "`optimizer_state` does not fit the optimizer .*FlashState",
    ),
    "grad_scale is nan": (
        lambda: kind("adamw").step(W, kind("adamw").init(W), W, grad_scale=np.nan),
        ValueError,
        "`grad_scale` must be finite, but nan was given",
    ),
    "grad_scale is infinite": (
        lambda: mpx.optim.clip_scale(W, 1.0, grad_scale=np.float32(np.inf)),
        ValueError,
        "`grad_scale` must be finite, but .*inf.* was given",
    ),
    "a group that is shadowed": (
        lambda: mpx.optim.flash_sgd(
            1.0,
            groups=[
                mpx.optim.ParamGroup("w"),
                mpx.optim.ParamGroup("layer", frozen=True),
            ],
        ).init(W),
        ValueError,
        "group 'layer' holds for no parameter: `layer/w` .* and "
        "the first .* holds. Put it before",
    ),
    "a function that chooses by traced values": (
        lambda: jax.jit(
            mpx.optim.flash_sgd(
                1.0, groups=[mpx.optim.ParamGroup(lambda _, x: x[0, 0] > 0)]
            ).init
        )(W),
        TypeError,
        r"for `layer/w` .* bool of shape \(\), traced. Use the path",
    ),
    "complex parameter": (
        lambda: kind("adamw").init({"c": jnp.ones(3, jnp.complex64)}),
        TypeError,
        "`c` is complex64, but .* f32, bf16 or f16. Hold it in .* as two, .* freeze it",
    ),
    "finite is no flag": (
        lambda: kind("adamw").step(W, kind("adamw").init(W), W, finite=1.0),
        TypeError,
        "`finite` must be a boolean scalar",
    ),
    "no parameters": (
        lambda: kind("adamw").update(W, kind("adamw").init(W)),
        ValueError,
        r"needs the parameters: call `update\(grads, state, params\)`",
    ),
    "momentum of a group": (
        lambda: mpx.optim.flash_sgd(
            1.0, groups=[mpx.optim.ParamGroup("w", {"momentum": 0.9})]
        ),
        ValueError,
        r"group 'w' sets \['momentum'\], but this optimizer has only",
    ),
    "dampening of a group": (
        lambda: mpx.optim.flash_sgdw(
            1.0, groups=[mpx.optim.ParamGroup("w", {"dampening": 0.9})]
        ),
        ValueError,
        r"group 'w' sets \['dampening'\], but this optimizer has only",
    ),
    "groups are one group": (
        lambda: mpx.optim.flash_sgd(1.0, groups=cast(Any, mpx.optim.ParamGroup("w"))),
        TypeError,
        "`groups` must be a sequence of `ParamGroup`s.* but ParamGroup was given",
    ),
    "groups are others": (
        lambda: mpx.optim.flash_sgd(1.0, groups=cast(Any, [{"where": "w"}])),
        TypeError,
        "`groups` must be a sequence of `ParamGroup`s.* but dict was given",
    ),
    "no compression": (
        lambda: mpx.optim.flash_sgd(1.0, compression=cast(Any, None)),
        TypeError,
        "`compression` must be an `mpx.optim.Compression`, but NoneType was given",
    ),
    "compression of a group": (
        lambda: mpx.optim.flash_sgd(
            1.0, groups=[mpx.optim.ParamGroup("w", compression=cast(Any, {"seed": 1}))]
        ),
        TypeError,
        "`compression` of the group 'w' must be an `mpx.optim.Compression`, but dict",
    ),
    "group without hyperparameters": (
        lambda: mpx.optim.ParamGroup("w", cast(Any, None)),
        TypeError,
        "`hyper` of the group 'w' must be a mapping such as .* but NoneType was given",
    ),
    "frozen by a string": (
        lambda: mpx.optim.ParamGroup("w", frozen=cast(Any, "no")),
        TypeError,
        "`frozen` of the group 'w' must be True or False, but 'no' was given",
    ),
    "quantize by a string": (
        lambda: mpx.optim.Compression(quantize=cast(Any, "no")),
        TypeError,
        "`quantize` must be True or False, but 'no' was given",
    ),
    "group size that is no integer": (
        lambda: mpx.optim.Compression(group_size=cast(Any, 32.0)),
        TypeError,
        "`group_size` must be an integer, but 32.0 of type float was given",
    ),
    "min size that is a string": (
        lambda: mpx.optim.Compression(min_size=cast(Any, "a")),
        TypeError,
        "`min_size` must be an integer, but 'a' of type str was given",
    ),
    "negative rate of NumPy": (
        lambda: mpx.optim.flash_adam(cast(Any, np.float32(-0.5))),
        ValueError,
        r"`learning_rate` must lie in \[0, ∞\), but .*-0.5.* was given",
    ),
    "negative rate of JAX": (
        lambda: mpx.optim.flash_adam(jnp.float32(-0.5)),
        ValueError,
        r"`learning_rate` must lie in \[0, ∞\)",
    ),
    "b1 of JAX": (
        lambda: mpx.optim.flash_adam(1.0, b1=jnp.float32(1.0)),
        ValueError,
        r"`b1` must lie in \[0, 1\)",
    ),
    "b2 that is one in f32": (
        lambda: mpx.optim.flash_adam(1.0, b2=1 - 1e-9),
        ValueError,
        r"`b2` must lie in \[0, 1\), but 0.999999999 was given, which is 1.0 in f32",
    ),
    "eps that is zero in f32": (
        lambda: mpx.optim.flash_adam(1.0, eps=1e-60),
        ValueError,
        r"`eps` must lie in \(0, ∞\), but 1e-60 was given, which is 0.0 in f32",
    ),
    "rate that is infinite in f32": (
        lambda: mpx.optim.flash_adam(1e39),
        ValueError,
        r"`learning_rate` must lie in \[0, ∞\), but 1e\+39 was given, which is inf",
    ),
    "complex rate": (
        lambda: mpx.optim.flash_adam(jnp.ones((), jnp.complex64)),
        TypeError,
        "`learning_rate` must be a number or a scalar array, but complex64 was given",
    ),
    "no learning rate": (
        lambda: mpx.optim.flash_adam(cast(Any, None)),
        TypeError,
        "`learning_rate` must be a number or a scalar array, but NoneType was given",
    ),
    "learning rate of a group": (
        lambda: mpx.optim.flash_adam(
            1.0, groups=[mpx.optim.ParamGroup("w", {"eps": [1e-8]})]
        ),
        TypeError,
        "`eps` must be a number or a scalar array, but list was given",
    ),
    "array of rates": (
        lambda: mpx.optim.flash_adam(jnp.ones(1)),
        TypeError,
        r"`learning_rate` must be .* scalar array, but float32 of shape \(1,\)",
    ),
    "schedule of arrays": (
        lambda: step_with(tx=mpx.optim.flash_adamw(1.0, b1=lambda count: jnp.ones(2))),
        TypeError,
        r"`b1` must be .* scalar array, but float32 of shape \(2,\)",
    ),
    "schedule of nothing": (
        lambda: step_with(tx=mpx.optim.flash_adamw(lambda count: None)),
        TypeError,
        "`learning_rate` must be a number .* NoneType was given",
    ),
    "grad_scale is an array": (
        lambda: kind("adamw").step(W, kind("adamw").init(W), W, grad_scale=jnp.ones(1)),
        TypeError,
        r"`grad_scale` must be .* scalar array, but float32 of shape \(1,\)",
    ),
    "grad_scale is nothing": (
        lambda: kind("adamw").update(W, kind("adamw").init(W), W, grad_scale=None),
        TypeError,
        "`grad_scale` must be a number .* NoneType was given",
    ),
    "dampening": (
        lambda: mpx.optim.flash_sgd(1.0, 0.9, dampening=1.1),
        ValueError,
        r"`dampening` must lie in \[0, 1\], but 1.1",
    ),
    "mask that forgets to return": (
        lambda: step_with(tx=mpx.optim.flash_adamw(1.0, mask=lambda params: None)),
        TypeError,
        "`mask` must be a tree of True and False, or a function .* it holds None",
    ),
    "nobody in the group": (
        lambda: mpx.optim.flash_sgd(1.0, groups=[mpx.optim.ParamGroup("bias")]).init(W),
        ValueError,
        "'bias' in `where` selects nothing. Names: 'layer/w'",
    ),
    "unknown hyperparameter": (
        lambda: mpx.optim.flash_sgd(
            1.0, groups=[mpx.optim.ParamGroup("w", {"b1": 0.9})]
        ),
        ValueError,
        r"The group 'w' sets \['b1'\], but this optimizer has only",
    ),
    "two formats": (
        lambda: mpx.optim.flash_sgd(
            1.0,
            groups=[
                mpx.optim.ParamGroup(
                    "w", compression=mpx.optim.Compression(format="flashoptim")
                )
            ],
        ),
        ValueError,
        "has the format 'flashoptim', but the others have 'mpx'",
    ),
    "mask of another structure": (
        lambda: step_with(tx=mpx.optim.flash_adamw(1.0, mask={"v": True})),
        ValueError,
        "`mask` must have the structure of the parameters",
    ),
    "nesterov without momentum": (
        lambda: mpx.optim.flash_sgd(1.0, nesterov=True),
        ValueError,
        "`nesterov=True` needs a momentum",
    ),
    "b1": (
        lambda: mpx.optim.flash_adam(1.0, b1=1.0),
        ValueError,
        r"`b1` must lie in \[0, 1\)",
    ),
    "b2": (
        lambda: mpx.optim.flash_lion(1.0, b2=-0.1),
        ValueError,
        r"`b2` must lie in \[0, 1\)",
    ),
    "eps": (
        lambda: mpx.optim.flash_adamw(1.0, eps=0.0),
        ValueError,
        r"`eps` must lie in \(0",
    ),
    "rate": (
        lambda: mpx.optim.flash_sgd(-1.0),
        ValueError,
        r"`learning_rate` must lie in \[0, ∞\), but -1.0",
    ),
    "decay": (
        lambda: mpx.optim.flash_sgd(
            1.0, groups=[mpx.optim.ParamGroup("w", {"weight_decay": -1.0})]
        ),
        ValueError,
        "`weight_decay` must lie in",
    ),
    "16 bits": (
        lambda: mpx.optim.flash_adam(jnp.ones((), BF16)),
        ValueError,
        "`learning_rate` is bfloat16.*f32 is needed",
    ),
    "group size": (
        lambda: mpx.optim.Compression(group_size=24),
        ValueError,
        "`group_size` must be a power of two such as 32, but 24 was given",
    ),
    "min size": (
        lambda: mpx.optim.Compression(min_size=-1),
        ValueError,
        "`min_size` must be 0 or more, but -1",
    ),
    "no master": (
        lambda: mpx.optim.from_master(leaf(None), W, kind("adamw").init(W)),
        TypeError,
        "weight of `layer/w` must be a real array .* bfloat16, but NoneType was given",
    ),
    "no master of a scalar": (
        lambda: mpx.optim.from_master(
            {"z": None}, {"z": jnp.ones(())}, kind("adamw").init({"z": jnp.ones(())})
        ),
        TypeError,
        "weight of `z` must be a real array .* float32, but NoneType was given",
    ),
    "complex master": (
        lambda: mpx.optim.from_master(
            leaf(jnp.ones(SHAPE, jnp.complex64)), W, kind("adamw").init(W)
        ),
        TypeError,
        "weight of `layer/w` must be a real array .* but complex64 was given",
    ),
    "state of another library": (
        lambda: mpx.optim.from_master(W, W, optax.adam(1.0).init(W)),
        ValueError,
        "Expected the state of one compressed optimizer",
    ),
    "shape of master": (
        lambda: mpx.optim.from_master(
            {"layer": {"w": jnp.ones(3)}}, W, kind("adamw").init(W)
        ),
        ValueError,
        r"weight of `layer/w` has shape \(3,\)",
    ),
}


# Another tree, what the error says of it. There is no word about the arrays, which fill
# the screen.
TREES = {
    "gradients": (
        lambda: step_with({"layer": freeze({"w": jnp.ones(SHAPE)})}),
        "The gradients must have the structure of the parameters, but some of its nodes",
    ),
    "parameters": (
        lambda: step_with(params=freeze(W)),
        "The optimizer state must have the structure of the parameters, but some of its",
    ),
    "mask": (
        lambda: step_with(tx=mpx.optim.flash_adamw(1.0, mask=freeze(leaf(True)))),
        "`mask` must have the structure .* but some of its nodes",
    ),
    "keys of a mask": (
        lambda: step_with(tx=mpx.optim.flash_adamw(1.0, mask={"layer": {"v": True}})),
        "`mask` must have the structure .* but some of its nodes",
    ),
    "list": (
        lambda: step_with({"layer": {"w": [jnp.ones(SHAPE)]}}),
        r"gradient of `layer/w` has shape \(\)",
    ),
    "module": (
        lambda: kind("adamw").step(
            LINEAR, kind("adamw").init(LINEAR), eqx.nn.Linear(2, 4, key=KEY)
        ),
        "The gradients must have .* but some of its nodes are of another type or size",
    ),
}
KEY = jax.random.key(0)
LINEAR = eqx.nn.Linear(2, 3, key=KEY)


@pytest.mark.some(2)
@pytest.mark.parametrize(("call", "match"), TREES.values(), ids=TREES.keys())
@pytest.mark.usefixtures("untyped")
def test_trees_of_other_types_are_described_without_their_arrays(call, match):
    with pytest.raises(ValueError, match=match) as caught:
        call()
    assert "Array" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("call", "error", "match"), ERRORS.values(), ids=ERRORS.keys())
@pytest.mark.usefixtures("untyped")
def test_errors_say_what_came_and_where(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_groups_can_be_keys():
    rate = {"learning_rate": jnp.ones(())}
    one, same = mpx.optim.ParamGroup("w", rate), mpx.optim.ParamGroup("w", rate)
    other = mpx.optim.ParamGroup("w", rate, frozen=True)
    assert {one: 1, other: 2} == {same: 1, other: 2}


@pytest.mark.usefixtures("untyped")
def test_integers_of_numpy_are_integers():
    options = {"group_size": np.int64(64), "min_size": np.int32(1)}
    made = mpx.optim.Compression(**options)
    plain = mpx.optim.Compression(group_size=64, min_size=1)
    assert made == plain
    assert all(type(getattr(made, name)) is int for name in options)
    steps = [mpx.optim.flash_adamw(0.01, compression=c) for c in (made, plain)]
    assert_trees_equal(*(tx.step(W, tx.init(W), W) for tx in steps))


def test_hyperparameters_that_are_traced_are_not_looked_at():
    @jax.jit
    def step(rate, b1):
        return step_with(tx=mpx.optim.flash_adamw(rate, b1=b1, compression=TINY)).params

    assert_trees_equal(step(0.01, 0.9), step_with().params)


def test_state_of_another_format_is_refused():
    state = kind("adamw", format="flashoptim").init(W)
    wrong = put(kind("adamw").init(W), packed=state.packed)
    with pytest.raises(
        ValueError,
        match=r"`layer/w` must be .*scales='uint16\[3, .* it is .*scales='float16",
    ):
        step_with(state=wrong)
    with pytest.raises(
        ValueError, match="in the format 'flashoptim'.*in the format 'mpx'"
    ):
        step_with(state=state)


# --- states that do not belong to the parameters ---------------------------------------


def put(state, **fields):
    return dataclasses.replace(state, **fields)


def leaf(x):
    return {"layer": {"w": x}}


def with_scales(state, scales):
    packed = dataclasses.replace(state.packed["layer"]["w"], scales=scales)
    return put(state, packed=leaf(packed))


ADAM, W32 = kind("adamw").init(W), leaf(jnp.ones(SHAPE))
ADAM32 = kind("adamw").init(W32)
# Optimizer, parameters, state, what the error says. Gradients are like the parameters.
STRANGERS = {
    "optax": ("adamw", W, (optax.EmptyState(),), "FlashState from `init.*; got tuple"),
    "dict": ("adamw", W, {"mu": W}, "FlashState from `init.*; got dict"),
    "None": ("adamw", W, None, "FlashState from `init.*; got NoneType"),
    "nu for lion": (
        "lion",
        W,
        ADAM,
        r"of the kind 'adam'.*this one is of the kind 'lion'.*`init\(params\)`",
    ),
    "mu for sgd": (
        "sgd without momentum",
        W,
        kind("sgd").init(W),
        "with mu, but this one is .* with no moments",
    ),
    "cast after init": (
        "adamw",
        W,
        kind("adamw").init(W32),
        "`layer/w` is bfloat16, but `state.correction` has nothing for it.*"
        "`master_bits=24`.*init after casting the model, or use "
        r"`Compression\(master_bits=None\)`",
    ),
    "cast back": (
        "adamw",
        W32,
        ADAM,
        "`layer/w` has a correction of int8, but the parameter is float32",
    ),
    "shape of codes": (
        "lion",
        leaf(jnp.ones((2, 128), BF16)),
        kind("lion").init(W),
        r"`layer/w` must be .*int8\[2, 2, 128\].*, but .*int8\[2, 2, 64\]",
    ),
    "shape of scales": (
        "lion",
        W,
        with_scales(kind("lion").init(W), jnp.zeros((1, 2, 3), BF16)),
        r"`layer/w` must be .*\(2, 64\), but .*scales='bfloat16\[1, 2, 3\]",
    ),
    "scales like codes": (
        "lion",
        W32,
        with_scales(kind("lion").init(W32), jnp.zeros((1, *SHAPE), BF16)),
        r"`layer/w` must be .*, but .*scales='bfloat16\[1, 2, 64\]",
    ),
    "one more axis": (
        "lion",
        leaf(jnp.ones((1, *SHAPE))),
        kind("lion").init(W32),
        r"`layer/w` must be .*int8\[1, 1, 2, 64\].*, but .*int8\[1, 2, 64\]",
    ),
    "shape of f32 moments": (
        "adamw",
        leaf(jnp.ones(4)),
        kind("adamw").init(leaf(jnp.ones(1))),
        r"`layer/w` must be .*float32\[4\].*, but .*float32\[1\]",
    ),
    "moments that were cast": (
        "sgd",
        leaf(jnp.ones(4)),
        jax.tree.map(
            lambda x: x.astype(BF16) if x.ndim else x,
            kind("sgd").init(leaf(jnp.ones(4))),
        ),
        r"`layer/w` must be .*float32\[4\].* it is .*bfloat16",
    ),
    "shape of the correction": (
        "sgd without momentum",
        leaf(jnp.ones(4, BF16)),
        kind("sgd without momentum").init(leaf(jnp.ones(1, BF16))),
        r"`layer/w` must be .*int8\[1, 4\].*, but .*int8\[1, 1\]",
    ),
    "planes of another rule": (
        "adamw",
        W32,
        put(ADAM32, packed=kind("lion").init(W32).packed),
        r"`layer/w` must be .*uint8\[2, 2, 64\].* it is .*int8",
    ),
    "f32 moments of another rule": (
        "adamw",
        leaf(jnp.ones(4)),
        put(ADAM32, packed=kind("lion").init(leaf(jnp.ones(4))).packed),
        r"`layer/w` must be .*\('float32\[4\]', 'float32\[4\]'\)",
    ),
    "no state": (
        "adamw",
        W32,
        put(ADAM32, packed=leaf(None)),
        "The optimizer state has nothing for `layer/w`",
    ),
}


@pytest.mark.parametrize(
    ("name", "params", "state", "match"), STRANGERS.values(), ids=STRANGERS.keys()
)
@pytest.mark.usefixtures("untyped")
def test_a_state_that_does_not_belong_here_is_refused(name, params, state, match):
    error = TypeError if "FlashState" in match else ValueError
    with pytest.raises(error, match=match):
        kind(name).step(params, state, params)
    with pytest.raises(error, match=match):
        kind(name).update(params, state, params)


def test_a_group_that_keeps_no_masters_needs_no_corrections():
    state = kind("adamw").init(W32)
    groups = [
        mpx.optim.ParamGroup("w", compression=mpx.optim.Compression(master_bits=None))
    ]
    mpx.optim.flash_adamw(0.01, groups=groups).step(W, state, W)
    groups = [
        mpx.optim.ParamGroup("w", compression=mpx.optim.Compression(master_bits=32))
    ]
    tx: Any = mpx.optim.flash_adamw(
        0.01, groups=groups, compression=mpx.optim.Compression(master_bits=None)
    )
    with pytest.raises(ValueError, match="`layer/w` is bfloat16.*`master_bits=32`"):
        tx.step(W, state, W)


@pytest.mark.parametrize(
    "made",
    [
        {"master_bits": 32},
        {"group_size": 64},
        {"quantize": False},
        {"min_size": 10**6},
    ],
    ids=str,
)
def test_a_state_goes_on_in_the_layout_in_which_it_was_made(made):
    maker = mpx.optim.flash_adamw(
        0.01, compression=mpx.optim.Compression(**{"min_size": 1} | made)
    )
    state = maker.init(W)
    expected = maker.step(W, state, W)
    assert_trees_equal(kind("adamw", master_bits=None).step(W, state, W), expected)
