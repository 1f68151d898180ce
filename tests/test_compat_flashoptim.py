"""`mpx.compat.flashoptim`: programs and checkpoints of flashoptim-jax go on.

What a checkpoint of the original holds is computed here in NumPy from the formulas of
the FlashOptim paper, not with the code under test.
"""

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from mpx.compat import flashoptim
from mpx.testing import assert_trees_equal

BF16 = np.dtype(jnp.bfloat16)
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
MANTISSA_AND_BIAS = {BF16: (7, 127), F16: (10, 15)}
RNG = np.random.default_rng(0)


# --- The original's formulas, in NumPy ------------------------------------------------


def in_groups(x, size=32):
    flat = np.asarray(x).reshape(-1)
    return np.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def out_of_groups(groups, shape):
    return groups.reshape(-1)[: np.prod(shape, dtype=int)].reshape(shape)


def original_momentum(m):
    """Codes and scales; the codes before rounding, too."""
    groups = in_groups(m).astype(np.float64)
    peak = np.maximum(np.abs(groups).max(1, keepdims=True), 1e-12)
    n = groups / peak
    exact = 127 * 2 * n / (1 + np.abs(n))
    codes = np.floor(exact + 0.5).astype(np.int8)
    return codes, peak[:, 0].astype(F16), exact


def original_variance(v):
    groups = np.sqrt(in_groups(v).astype(np.float64))
    peak = np.maximum(groups.max(1, keepdims=True), 1e-12)
    exact = 255 * groups / peak
    return np.floor(exact + 0.5).astype(np.uint8), peak[:, 0].astype(F16), exact


def original_momentum_back(codes, scales):
    y = in_groups(codes).astype(np.float64) / 127
    return out_of_groups(
        y / (2 - np.abs(y)) * scales[:, None].astype(float), codes.shape
    )


def original_variance_back(codes, scales):
    root = in_groups(codes).astype(np.float64) / 255 * scales[:, None].astype(float)
    return out_of_groups(root**2, codes.shape)


def half_ulp(param):
    mantissa, bias = MANTISSA_AND_BIAS[param.dtype]
    exponent = (np.abs(param).view(np.uint16).astype(int) >> mantissa) - bias
    exponent = np.maximum(exponent, 1 - bias)
    return np.ldexp(1.0, exponent - mantissa - 1)


def original_split(w, dtype, errors):
    param = np.asarray(w, F32).astype(dtype)
    left = (np.asarray(w, np.float64) - param.astype(np.float64)) / half_ulp(param)
    top = np.iinfo(errors).max
    exact = np.clip(left, -1, 1) * top
    return param, np.copysign(np.floor(np.abs(exact) + 0.5), exact).astype(errors)


def original_weight(param, ecc):
    top = np.iinfo(ecc.dtype).max
    return param.astype(np.float64) + ecc / top * half_ulp(param)


def original_leaf(shape, dtype, errors, seed):
    """A parameter with a state as the original would hold it, and what it stands for."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=shape).astype(F32)
    m = (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 1, shape)).astype(F32)
    v = np.square(rng.normal(size=shape)).astype(F32)
    if errors is None:
        param, ecc = weight.astype(dtype), np.zeros((), np.int32)
    else:
        param, ecc = original_split(weight, dtype, errors)
    codes, scales, _ = original_momentum(m)
    mu = flashoptim.QuantizedArray(out_of_groups(codes, shape), scales)
    codes, scales, _ = original_variance(v)
    nu = flashoptim.QuantizedArray(out_of_groups(codes, shape), scales)
    return param, mu, nu, ecc


LEAVES = {  # name: (shape, dtype, correction)
    "rows": ((4, 64), BF16, np.int8),
    "cube": ((2, 3, 32), BF16, np.int16),
    "half": ((2, 32), F16, np.int8),
    "full": ((64,), F32, None),
    "bare": ((64,), BF16, None),
    "narrow": ((32, 4), BF16, np.int8),  # 128 elements, but no groups in a row
    "tail": ((65,), BF16, np.int8),
    "tiny": ((3,), F32, None),
    "scalar": ((), BF16, np.int8),
}
GROUPED = ["rows", "cube", "half", "full", "bare"]


def original_checkpoint():
    columns = {
        name: original_leaf(*leaf, seed=seed)
        for seed, (name, leaf) in enumerate(LEAVES.items())
    }
    params, mu, nu, ecc = (
        {name: jax.tree.map(jnp.asarray, row[i]) for name, row in columns.items()}
        for i in range(4)
    )
    return params, flashoptim.FlashAdamState(jnp.int32(7), mu, nu, ecc)


# --- Codecs ---------------------------------------------------------------------------

SHAPES = [(64,), (65,), (3, 40), (4, 64), (), (32, 4)]
# f32 rounds each of about six operations by 2**-24 of a number below 255.
NEAR_TIE = 255 * 6 * 2.0**-24


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["momentum", "variance"])
def test_codes_and_scales_are_those_of_the_original(kind, shape):
    x = np.asarray(RNG.normal(size=shape), F32)
    x = x if kind == "momentum" else x * x
    original = original_momentum if kind == "momentum" else original_variance
    codes, scales, exact = original(x)
    values, ours = jax.jit(getattr(flashoptim, f"quantize_{kind}"))(x)
    assert values.shape == shape
    assert ours.shape == scales.shape == (-(-x.size // 32),)
    assert values.dtype == codes.dtype
    np.testing.assert_array_equal(ours, scales)
    # Ties go to even here and up there; a number that is not zero never becomes zero.
    tie = np.abs(exact - np.floor(exact) - 0.5) < NEAR_TIE
    kept = (exact > 0) & (exact < 0.5) if kind == "variance" else np.zeros_like(tie)
    same = out_of_groups(~tie & ~kept, shape)
    assert np.mean(same) > 0.9
    np.testing.assert_array_equal(
        np.asarray(values)[same], out_of_groups(codes, shape)[same]
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_of_the_original_are_read(shape):
    _, mu, nu, _ = original_leaf(shape, F32, None, 1)
    read = jax.jit(
        lambda mu, nu: (
            flashoptim.dequantize_momentum(mu),
            flashoptim.dequantize_variance(nu),
        )
    )(mu, nu)
    expected = [original_momentum_back(*mu), original_variance_back(*nu)]
    for ours, theirs in zip(read, expected, strict=True):
        assert ours.dtype == F32
        np.testing.assert_allclose(ours, theirs, rtol=6 * 2.0**-24)


@pytest.mark.parametrize("errors", [np.int8, np.int16])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_weights_split_as_in_the_original(dtype, errors):
    bits = 24 if errors == np.int8 else 32
    weights = RNG.normal(size=4096).astype(F32)
    param, ecc = original_split(weights, dtype, errors)
    our_param, our_ecc = flashoptim.split_leaf(jnp.asarray(weights), dtype, bits)
    np.testing.assert_array_equal(our_param, param)
    assert our_ecc.dtype == errors
    # One code at a tie; with 16 bits f32 cannot tell the two codes beside it apart.
    apart = np.abs(np.asarray(our_ecc, int) - ecc.astype(int))
    assert apart.max() <= 1
    assert np.mean(apart == 0) > 0.99
    read = flashoptim.reconstruct_leaf(jnp.asarray(param), jnp.asarray(ecc))
    np.testing.assert_allclose(read, original_weight(param, ecc), rtol=2.0**-23)
    # Half a code of half an ulp.
    bound = half_ulp(param) / np.iinfo(errors).max / 2 + np.abs(weights) * 2.0**-23
    assert np.all(np.abs(np.asarray(read, float) - weights) <= bound)


# --- Checkpoints ----------------------------------------------------------------------


def test_state_of_the_original_becomes_one_of_mpx_and_comes_back():
    params, state = original_checkpoint()
    same_params, ours = jax.jit(flashoptim.to_mpx)(params, state)
    assert_trees_equal(same_params, params)
    assert ours.format == "flashoptim"
    assert int(ours.count) == 7
    for name, (shape, _, errors) in LEAVES.items():
        if name in GROUPED:
            scale = ours.mu[name].scale
            assert scale.shape == (*shape[:-1], shape[-1] // 32)
            np.testing.assert_array_equal(scale.reshape(-1), state.mu[name].scales)
            np.testing.assert_array_equal(ours.mu[name].codes, state.mu[name].values)
            np.testing.assert_array_equal(ours.nu[name].codes, state.nu[name].values)
        else:
            expected = original_momentum_back(*map(np.asarray, state.mu[name]))
            assert ours.mu[name].shape == shape
            np.testing.assert_allclose(ours.mu[name], expected, rtol=6 * 2.0**-24)
        if errors is None:
            assert ours.correction[name] is None
        else:
            np.testing.assert_array_equal(ours.correction[name], state.ecc[name])
    back_params, back = jax.jit(flashoptim.from_mpx)(params, ours)
    assert_trees_equal(back_params, params)
    assert isinstance(back, flashoptim.FlashAdamState)
    assert int(back.count) == 7
    for name in LEAVES:
        np.testing.assert_array_equal(back.mu[name].values, state.mu[name].values)
        np.testing.assert_array_equal(back.mu[name].scales, state.mu[name].scales)
        np.testing.assert_array_equal(back.nu[name].values, state.nu[name].values)
        np.testing.assert_array_equal(back.nu[name].scales, state.nu[name].scales)
        np.testing.assert_array_equal(back.ecc[name], state.ecc[name])


@jax.jit
def weights_of(params, state):
    if isinstance(state, mpx.optim.FlashState):
        return mpx.optim.master_params(params, state)
    return flashoptim.reconstruct_weights(params, state.ecc)


def test_converted_state_holds_the_weights_of_the_original():
    params, state = original_checkpoint()
    params, ours = jax.jit(flashoptim.to_mpx)(params, state)
    weights = weights_of(params, ours)
    for name, (_, _, errors) in LEAVES.items():
        if errors is not None:
            exact = original_weight(
                np.asarray(params[name]), np.asarray(state.ecc[name])
            )
            np.testing.assert_allclose(weights[name], exact, rtol=2.0**-23)


# One program for both formats.
step_of_the_original = jax.jit(
    flashoptim.flash_adamw(1e-2, b2=0.99, master_weight_bits=None).step
)


@pytest.mark.some(1)
@pytest.mark.parametrize("format", ["flashoptim", "mpx"])
def test_training_goes_on_in_mpx(format):
    params, state = original_checkpoint()
    compression = mpx.optim.Compression(format=format)
    without = dataclasses.replace(compression, master_bits=None)
    optimizer = mpx.optim.flash_adamw(
        1e-2,
        b2=0.99,
        weight_decay=1e-2,
        groups=[mpx.optim.ParamGroup("bare", compression=without)],
        compression=compression,
    )
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.1, BF16), params)
    after, _ = step_of_the_original(params, state, grads)
    new_params, new_state = jax.jit(flashoptim.to_mpx)(params, state)
    if format == "mpx":
        like = params, optimizer.init(params)
        exact = mpx.checkpoint.to_f32(new_params, new_state)
        new_params, new_state = mpx.checkpoint.from_f32(*exact, like=like)
    assert new_state.format == format
    weights, others = weights_of(params, state), weights_of(new_params, new_state)
    for name, (_, dtype, errors) in LEAVES.items():
        if errors is not None:
            # At most one code of half an ulp, and only if codes are chosen anew.
            anew = format == "mpx" and dtype == BF16
            bound = half_ulp(np.asarray(params[name])) / np.iinfo(errors).max * anew
            apart = np.asarray(weights[name], float) - np.asarray(others[name], float)
            assert np.all(np.abs(apart) <= bound), name
    new_params, new_state = jax.jit(optimizer.step)(new_params, new_state, grads)
    assert int(new_state.count) == 8
    for name, (_, dtype, _) in LEAVES.items():
        ours = np.asarray(new_params[name], float)
        theirs = np.asarray(after[name], float)
        # A moment that is encoded anew is off by half a code at most, which moves a step
        # of about the learning rate by a share of it; then comes the rounding.
        ulp = float(jnp.finfo(dtype).eps) * np.abs(theirs)
        slack = ulp if format == "flashoptim" else ulp + 1e-2
        assert np.all(np.abs(ours - theirs) <= slack), name


def test_state_of_mpx_can_be_exported():
    params = {"w": jnp.asarray(RNG.normal(size=(64, 64)), BF16), "b": jnp.ones(3, F32)}
    compression = mpx.optim.Compression(format="flashoptim", group_size=64)
    optimizer = mpx.optim.flash_adamw(1e-2, compression=compression)
    state: Any = optimizer.init(params)
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(F32) * 9), params)
    step = jax.jit(optimizer.step)
    for _ in range(3):
        params, state = step(params, state, grads)
    old_params, old = jax.jit(flashoptim.from_mpx)(params, state)
    assert old.mu["w"].scales.shape == (128,)
    assert old.mu["b"].scales.shape == (1,)
    assert old.ecc["w"].dtype == np.int8
    assert int(old.count) == 3
    assert_trees_equal(weights_of(params, state)["w"], weights_of(old_params, old)["w"])
    mu = flashoptim.dequantize_momentum(old.mu["b"])
    # Half a code, and f16 for the scale.
    peak = float(jnp.max(jnp.abs(state.mu["b"])))
    np.testing.assert_allclose(mu, state.mu["b"], atol=peak * (1 / 127 + 2.0**-11))
    full = functools.partial(flashoptim.from_mpx, quantize=False)
    assert jax.eval_shape(full, params, state).state.mu["w"].dtype == F32
    state = mpx.optim.flash_adamw(1e-2).init(params)
    with pytest.raises(ValueError, match=r"the format 'mpx', but.*`mpx.checkpoint"):
        flashoptim.from_mpx(params, state)


@pytest.mark.parametrize(
    ("make", "state_type"),
    [
        (functools.partial(mpx.optim.flash_lion, 1e-3), flashoptim.FlashLionState),
        (functools.partial(mpx.optim.flash_sgd, 1e-3, 0.9), flashoptim.FlashSGDState),
        (functools.partial(mpx.optim.flash_sgd, 1e-3), flashoptim.FlashSGDState),
    ],
    ids=["lion", "momentum", "sgd"],
)
def test_state_with_fewer_moments_goes_there_and_back(make, state_type):
    params = {"w": jnp.ones((64, 64), BF16), "step": jnp.arange(3)}
    compression = mpx.optim.Compression(format="flashoptim")
    state = make(compression=compression).init(params)
    _, old = flashoptim.from_mpx(params, state, state_type)
    assert type(old) is state_type
    assert old.ecc["step"].dtype == np.int32  # pyright: ignore[reportAttributeAccessIssue]
    assert_trees_equal(flashoptim.to_mpx(params, old).state, state)


def test_scales_of_another_group_size_are_refused():
    params = {"w": jnp.ones((4, 64), BF16)}
    state = flashoptim.flash_adamw(group_size=16).init(params)
    with pytest.raises(ValueError, match="has 16 scales, but groups of 32 have 8"):
        flashoptim.to_mpx(params, state)
    flashoptim.to_mpx(params, state, group_size=16)


# --- Its README -----------------------------------------------------------------------

FACTORIES = {
    "adam": flashoptim.flash_adam,
    "adamw": flashoptim.flash_adamw,
    "lion": flashoptim.flash_lion,
    "sgd": functools.partial(flashoptim.flash_sgd, momentum=0.9),
    "sgdw": functools.partial(flashoptim.flash_sgdw, momentum=0.9),
}
EVERY = pytest.mark.parametrize("make", FACTORIES.values(), ids=FACTORIES)
STATE_DICTS = {
    "adamw": (
        flashoptim.flash_adamw_state_dict,
        flashoptim.load_flash_adamw_state_dict,
    ),
    "lion": (flashoptim.flash_lion_state_dict, flashoptim.load_flash_lion_state_dict),
    "sgd": (flashoptim.flash_sgd_state_dict, flashoptim.load_flash_sgd_state_dict),
}


def readme_params():
    params = {"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.zeros((8,), jnp.float32)}
    return params, jax.tree.map(jnp.ones_like, params)


@pytest.mark.some(1)
@EVERY
def test_usage_example_runs(make):
    params, grads = readme_params()
    tx = make(learning_rate=1e-3, weight_decay=1e-2)
    opt_state = tx.init(params)
    new_params, opt_state = tx.step(params, opt_state, grads)
    assert int(opt_state.count) == 1
    assert jax.tree.map(jnp.shape, new_params) == jax.tree.map(jnp.shape, params)
    weights = flashoptim.reconstruct_weights(new_params, opt_state.ecc)
    assert np.all(np.asarray(weights["w"]) < 1)
    assert np.all(np.asarray(new_params["b"]) < 0)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", STATE_DICTS)
def test_checkpoint_example_runs(name):
    save, load = STATE_DICTS[name]
    params, grads = readme_params()
    tx = FACTORIES[name](learning_rate=1e-3)
    _, opt_state = tx.step(params, tx.init(params), grads)
    state_dict = save(opt_state)
    assert sorted(state_dict["mu"]) == ["leaves", "treedef"]
    assert sorted(state_dict["mu"]["leaves"][1]) == ["kind", "scales", "values"]
    assert_trees_equal(load(state_dict), opt_state)


def test_state_dict_of_another_optimizer_is_refused():
    params, _ = readme_params()
    state_dict = flashoptim.flash_lion_state_dict(flashoptim.flash_lion().init(params))
    with pytest.raises(ValueError, match=r"FlashAdamState.*\['nu'\] are missing"):
        flashoptim.load_flash_adamw_state_dict(state_dict)


def test_master_weight_example_runs():
    params, grads = readme_params()
    tx = flashoptim.flash_adamw(1e-3, weight_decay=1e-2, master_weight_bits=24)
    opt_state = tx.init(params)
    params, opt_state = tx.step(params, opt_state, grads)
    checkpoint = {
        "params_fp32": flashoptim.reconstruct_weights(params, opt_state.ecc),
        "opt_state": flashoptim.flash_adamw_state_dict(opt_state),
    }
    restored = flashoptim.load_flash_adamw_state_dict(checkpoint["opt_state"])
    restored_params, restored_ecc = flashoptim.set_fp32_params(
        checkpoint["params_fp32"], param_template=params, master_weight_bits=24
    )
    restored = restored._replace(ecc=restored_ecc)
    assert_trees_equal(restored_params, params)
    assert_trees_equal(restored, opt_state)


def test_weights_of_another_shape_are_refused():
    template = {"w": jnp.ones((2, 3), BF16)}
    with pytest.raises(ValueError, match=r"`w` has shape \(3, 2\).*\(2, 3\)"):
        flashoptim.set_fp32_params({"w": jnp.ones((3, 2))}, template)
    with pytest.raises(ValueError, match="same structure"):
        flashoptim.set_fp32_params({"v": jnp.ones((2, 3))}, template)


def test_empty_trees_of_weights_are_fine():
    assert flashoptim.set_fp32_params({}, {}) == ({}, {})


def test_leaves_are_cast_to_bf16():
    cast = flashoptim.cast_tree_bf16({"w": np.ones(2), "n": 3})
    assert {x.dtype for x in jax.tree.leaves(cast)} == {BF16}


# --- Steps ----------------------------------------------------------------------------


@pytest.mark.standard_promotion  # for optax
@pytest.mark.parametrize(
    ("make", "reference"),
    [
        # 1 - 0.999 in f32 would have an error of its own, in optax.
        (
            functools.partial(flashoptim.flash_adamw, b2=0.9),
            optax.adamw(1e-2, b2=0.9, weight_decay=1e-2),
        ),
        (flashoptim.flash_lion, optax.lion(1e-2, b2=0.99, weight_decay=1e-2)),
        (
            functools.partial(flashoptim.flash_sgdw, momentum=0.9, nesterov=True),
            optax.chain(
                optax.trace(0.9, nesterov=True),
                optax.add_decayed_weights(1e-2),
                optax.scale(-1e-2),
            ),
        ),
    ],
    ids=["adamw", "lion", "sgdw"],
)
def test_f32_step_is_that_of_optax(make, reference):
    params = {"w": jnp.asarray(RNG.normal(size=(5, 7)), F32)}
    grads = {"w": jnp.asarray(RNG.normal(size=(5, 7)), F32)}
    tx = make(1e-2, weight_decay=1e-2, quantize=False)
    state, reference_state = tx.init(params), reference.init(params)
    expected: Any = params

    @jax.jit
    def step(params, state, expected, reference_state):
        updates, reference_state = reference.update(grads, reference_state, expected)
        expected = optax.apply_updates(expected, updates)
        return *tx.step(params, state, grads), expected, reference_state

    for _ in range(3):
        params, state, expected, reference_state = step(
            params, state, expected, reference_state
        )
    # A few roundings of an update of about the learning rate, and of the weight, a step.
    np.testing.assert_allclose(
        params["w"], expected["w"], rtol=3 * 2.0**-23, atol=1e-2 * 2.0**-18
    )


def test_step_follows_the_formulas_of_the_original():
    """One step of AdamW in f64, from a checkpoint of the original."""
    params, state = original_checkpoint()
    tx = flashoptim.flash_adamw(
        1e-2, b1=0.8, b2=0.9, eps=1e-4, weight_decay=0.1, master_weight_bits=None
    )
    grads = {
        name: jnp.asarray(np.random.default_rng(5).normal(size=shape), BF16)
        for name, (shape, _, _) in LEAVES.items()
    }
    new_params, new = jax.jit(tx.step)(params, state, grads)
    masters = weights_of(new_params, new)
    for name, (_, dtype, errors) in LEAVES.items():
        g = np.asarray(grads[name], float)
        mu = 0.8 * original_momentum_back(*map(np.asarray, state.mu[name])) + 0.2 * g
        nu = 0.9 * original_variance_back(*map(np.asarray, state.nu[name])) + 0.1 * g**2
        w = np.asarray(params[name])
        w = w.astype(float) if errors is None else original_weight(w, state.ecc[name])
        w = w * (1 - 1e-3)
        w = w - 1e-2 * (mu / (1 - 0.8**8)) / (np.sqrt(nu / (1 - 0.9**8)) + 1e-4)
        master = np.asarray(masters[name], float)
        stored = np.asarray(new_params[name])
        unit = np.zeros(w.shape)
        if dtype != F32:
            parts = 0.5 if errors is None else 1 / np.iinfo(errors).max / 2
            unit = half_ulp(stored) * (2 * parts if errors is None else parts)
        # Half a code of the correction, and about ten roundings in f32.
        assert np.all(np.abs(master - w) <= unit + 10 * 2.0**-24 * (1 + np.abs(w))), (
            name
        )
        codes, scales, exact = original_momentum(mu)
        np.testing.assert_allclose(
            np.asarray(new.mu[name].scales, float), scales.astype(float), rtol=2.0**-10
        )
        ours = in_groups(np.asarray(new.mu[name].values, float))
        assert np.all(np.abs(ours - exact) <= 0.5 + 0.01)
        assert np.mean(ours == codes) > 0.99 or exact.size < 100


@pytest.mark.some(1)
@EVERY
def test_step_can_be_compiled_and_donated(make):
    params = {
        "x": jnp.linspace(-2, 2, 65, dtype=F32).astype(BF16),
        "s": jnp.ones((), BF16),
    }
    grads = jax.tree.map(lambda p: jnp.cos(p.astype(F32)), params)
    tx = make(1e-2)
    expected = tx.step(params, tx.init(params), grads)
    step = jax.jit(tx.step, donate_argnums=(0, 1))
    params, state = step(params, jax.jit(tx.init)(params), grads)
    for name, weight in weights_of(params, state).items():
        other = weights_of(*expected)[name]
        bound = half_ulp(np.asarray(params[name])) / 127
        assert np.all(np.abs(np.asarray(weight - other)) <= bound)
    assert state.ecc["s"].dtype == np.int8  # the original loses it


@pytest.mark.parametrize("library", [flashoptim, mpx.optim], ids=["flashoptim", "mpx"])
def test_second_step_finds_the_compiled_first(library):
    params = {"w": jnp.ones((64, 64), BF16), "b": jnp.ones(3)}
    tx = library.flash_adamw(1e-2)
    step = jax.jit(lambda *args: tuple(tx.step(*args)))
    step(*step(params, tx.init(params), params), params)
    assert step._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]


def test_gradient_that_is_none_leaves_the_parameter():
    params, grads = readme_params()
    tx = flashoptim.flash_adamw(1e-1)
    grads["b"] = None
    new_params, state = tx.step(params, tx.init(params), grads)
    np.testing.assert_array_equal(new_params["b"], params["b"])
    assert np.any(np.asarray(new_params["w"] != params["w"]))
    assert state.mu["b"].scales.dtype == F16


def test_integer_and_empty_leaves_are_left_alone():
    params = {"n": jnp.arange(3), "e": jnp.ones((0, 32), BF16), "w": jnp.ones(4)}
    tx = flashoptim.flash_adamw(1e-1, fused=False)
    state = tx.init(params)
    new_params, new_state = tx.step(params, state, jax.tree.map(jnp.ones_like, params))
    np.testing.assert_array_equal(new_params["n"], params["n"])
    assert new_params["e"].shape == (0, 32)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    converted = flashoptim.to_mpx(new_params, new_state)
    grads = {"n": None, "e": params["e"], "w": params["w"]}
    mpx.optim.flash_adamw(
        1e-1, compression=mpx.optim.Compression(format="flashoptim")
    ).step(*converted, grads)


def test_inf_costs_one_element_only():
    params = {"w": jnp.ones(64, BF16)}
    tx = flashoptim.flash_adamw(1e-2)
    grads = {"w": jnp.ones(64, BF16).at[3].set(jnp.inf)}
    params, state = tx.step(params, tx.init(params), grads)
    params, state = tx.step(params, state, jax.tree.map(jnp.ones_like, params))
    assert int(jnp.sum(~jnp.isfinite(params["w"]))) == 1


# --- Groups ---------------------------------------------------------------------------

SELECTORS = {
    "name": "head",
    "path": "head/w",
    "tuple": ("head", "w"),
    "function": lambda path, leaf: path[0] == "head" and leaf.ndim == 1,
    "list": ["nothing", "head"],
}


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_group_is_selected(selector):
    params = {"trunk": {"w": jnp.ones(32)}, "head": {"w": jnp.ones(32)}}
    grads = jax.tree.map(jnp.ones_like, params)
    group = {"params": selector, "learning_rate": 0.5, "quantize": False}
    tx = flashoptim.flash_adamw(0.25, weight_decay=0.0, param_groups=[group])
    state = tx.init(params)
    assert isinstance(state.mu["trunk"]["w"], flashoptim.QuantizedArray)
    assert state.mu["head"]["w"].dtype == F32
    new, state = tx.step(params, state, grads)
    # The first step of Adam has the length of the learning rate.
    np.testing.assert_allclose(new["head"]["w"], 0.5, rtol=1e-6)
    np.testing.assert_allclose(new["trunk"]["w"], 0.75, rtol=1e-6)
    assert state.mu["head"]["w"].dtype == F32


def test_first_group_that_matches_holds():
    params = {"a": {"w": jnp.ones(2)}, "b": {"w": jnp.ones(2)}}
    groups = [{"params": "a", "learning_rate": 0.5}, {"params": "w"}]
    tx = flashoptim.flash_sgd(0.25, param_groups=groups)
    new, _ = tx.step(params, tx.init(params), params)
    assert float(new["a"]["w"][0]) == 0.5
    assert float(new["b"]["w"][0]) == 0.75


WRONG_OPTIONS = {
    "group size": (dict(group_size=40), "group_size must divide BLOCK_SIZE"),
    "typo": (dict(param_groups=[{"params": "w", "lr": 1.0}]), "'lr'"),
    "no params": (dict(param_groups=[{"b1": 0.5}]), r"'params' matcher.*\['b1'\]"),
    "b1": (dict(b1=1.0), "`b1` must lie in"),
    "bits": (
        dict(master_weight_bits=16),
        "`master_bits` must be one of 24, 32, None",
    ),
    "bits of a group": (
        dict(param_groups=[{"params": "w", "master_weight_bits": 16}]),
        "`master_bits` must be one of 24, 32, None",
    ),
}


@pytest.mark.parametrize(
    ("options", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS
)
def test_wrong_option_is_refused(options, message, untyped):
    with pytest.raises(ValueError, match=message):
        flashoptim.flash_adamw(**options)


WRONG_PARAMS = {
    "unmatched": (
        dict(param_groups=[{"params": "head"}]),
        jnp.ones(2, BF16),
        "selects nothing",
    ),
    "integers alone": (
        dict(fused=False),
        jnp.arange(2),
        "floating arrays, but the tree has none.*w: int32",
    ),
}


@pytest.mark.parametrize(
    ("options", "param", "message"), WRONG_PARAMS.values(), ids=WRONG_PARAMS
)
def test_wrong_parameters_are_refused(options, param, message):
    with pytest.raises(ValueError, match=message):
        flashoptim.flash_adamw(**options).init({"w": param})


def test_bits_that_some_parameter_has_are_accepted():
    params = {"w": jnp.ones(2, BF16), "head": {"w": jnp.ones(2)}}
    group = {"params": "head", "learning_rate": 0.5}
    tx = flashoptim.flash_adamw(master_weight_bits=32, param_groups=[group])
    state = tx.init(params)
    assert (state.ecc["w"].dtype, state.ecc["head"]["w"].dtype) == ("int16", "int32")


def test_trees_that_do_not_fit_are_refused():
    params, grads = readme_params()
    tx = flashoptim.flash_adamw()
    state = tx.init(params)
    with pytest.raises(ValueError, match="The gradients must have the structure"):
        tx.step(params, state, {"w": grads["w"]})
    with pytest.raises(ValueError, match="gradient of `w` has shape"):
        tx.step(params, state, {**grads, "w": grads["b"]})


def test_options_have_the_names_and_order_of_the_original():
    adam = "learning_rate b1 b2 eps weight_decay quantize master_weight_bits group_size"
    sgd = "learning_rate momentum dampening weight_decay nesterov quantize"
    lion = "learning_rate b1 b2 weight_decay quantize master_weight_bits group_size"
    expected = {
        flashoptim.flash_adam: f"{adam} fused param_groups",
        flashoptim.flash_adamw: f"{adam} fused param_groups",
        flashoptim.flash_lion: f"{lion} fused param_groups",
        flashoptim.flash_sgd: f"{sgd} master_weight_bits group_size fused param_groups",
        flashoptim.flash_sgdw: f"{sgd} master_weight_bits group_size fused param_groups",
    }
    for make, names in expected.items():
        assert list(inspect.signature(make).parameters) == names.split()


def test_keys_with_slashes_do_not_collide():
    params = {"a": {"b": jnp.ones(32)}, "a/b": jnp.ones(32)}
    grads = {"a": {"b": jnp.ones(32)}, "a/b": -jnp.ones(32)}
    tx = flashoptim.flash_sgd(0.5)
    new, _ = tx.step(params, tx.init(params), grads)
    assert float(new["a"]["b"][0]) == 0.5
    assert float(new["a/b"][0]) == 1.5


# What the README and the package of flashoptim-jax 0.1.0 import, by submodule.
SUBMODULES = {
    "compression": "cast_tree_bf16 reconstruct_leaf reconstruct_weights set_fp32_params "
    "split_leaf",
    "quantization": "QuantizedArray dequantize_momentum dequantize_variance "
    "quantize_momentum quantize_variance",
}


@pytest.mark.parametrize(("submodule", "names"), SUBMODULES.items(), ids=SUBMODULES)
def test_submodules_have_the_names_of_the_package(submodule, names):
    module = importlib.import_module(f"mpx.compat.flashoptim.{submodule}")
    for name in names.split():
        assert getattr(module, name) is getattr(flashoptim, name)
