"""`mpx.compat.jmp`: a training loop written for jmp runs, with one import changed."""

import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from mpx.compat import jmp
from mpx.testing import assert_trees_equal

NAMES = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name):
    assert getattr(jmp, name) is not None


# --- Policies -------------------------------------------------------------------------

F16, BF16, F32, F64 = map(np.dtype, ("f2", jnp.bfloat16, "f4", "f8"))
GRAMMAR = {
    # What is not given: parameters are f32, computation follows them, output follows it.
    "float16": (F16, F16, F16),
    "bf16": (BF16, BF16, BF16),
    "full": (F32, F32, F32),
    "half": (F16, F16, F16),
    "f64": (F64, F64, F64),
    "c=f16": (F32, F16, F16),
    "p=f16": (F16, F16, F16),
    "o=f16": (F32, F32, F16),
    "p=f16,c=bf16": (F16, BF16, BF16),
    "c=half,o=full": (F32, F16, F32),
    "params=float32,compute=float16,output=float32": (F32, F16, F32),
    "output=f32,compute=bfloat16,params=f64": (F64, BF16, F32),
    "p=f32, c=bf16, o=f32": (F32, BF16, F32),  # jmp refuses the spaces
}


def dtypes_of(policy):
    return policy.param_dtype, policy.compute_dtype, policy.output_dtype


@pytest.mark.parametrize(("text", "dtypes"), GRAMMAR.items(), ids=GRAMMAR.keys())
def test_policy_is_parsed(text, dtypes):
    policy = jmp.get_policy(text)
    assert dtypes_of(policy) == dtypes
    assert policy == jmp.Policy(*dtypes)
    assert hash(policy) == hash(jmp.Policy(*dtypes))
    assert jmp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (jmp.Policy(jnp.float32, jnp.float16, jnp.float16), "p=full,c=f16,o=f16"),
        (jmp.Policy(F64, BF16, F32), "p=f64,c=bf16,o=full"),
    ],
)
def test_policy_is_spelled_as_in_jmp(policy, text):
    assert str(policy) == text


@pytest.mark.parametrize(
    "text", ["p=int8", "float15", "x=f16", "c=", "p=f16;c=f32", ""]
)
def test_unknown_policy_is_refused(text):
    with pytest.raises(ValueError, match=r"[Pp]olicy|dtype"):
        jmp.get_policy(text)


def test_half_is_f16_here_whatever_mpx_is_set_to():
    assert jmp.half_dtype() is jnp.float16
    with mpx.half_precision("bf16"):
        assert jmp.half_dtype() is jnp.float16
        assert dtypes_of(jmp.get_policy("half")) == (F16, F16, F16)
        assert jmp.cast_to_half(jnp.ones(2)).dtype == F16


class Module(eqx.Module):
    weight: jax.Array
    activation: object


def everything(dtype):
    return {
        "jax": jnp.ones(2, dtype),
        "numpy": np.ones(2, dtype),
        "int": jnp.arange(2),
        "key": jax.random.key(0),
        "function": jnp.tanh,
        "none": None,
        "module": Module(jnp.ones(2, dtype), jnp.tanh),
    }


POLICY = jmp.Policy(compute_dtype=F16, param_dtype=F32, output_dtype=BF16)
CASTS = {
    "param": (POLICY.cast_to_param, F32),
    "compute": (POLICY.cast_to_compute, F16),
    "output": (POLICY.cast_to_output, BF16),
    "other output": (POLICY.with_output_dtype(jnp.float16).cast_to_output, F16),
    "full": (jmp.cast_to_full, F32),
    "half": (jmp.cast_to_half, F16),
}


@pytest.mark.parametrize("given", [F16, BF16, F32])
@pytest.mark.parametrize(("cast", "dtype"), CASTS.values(), ids=CASTS.keys())
def test_floating_leaves_are_cast_and_the_others_are_not(cast, dtype, given):
    tree = everything(given)
    result = cast(tree)
    assert result["jax"].dtype == result["numpy"].dtype == dtype
    assert isinstance(result["numpy"], np.ndarray)
    assert result["module"].weight.dtype == dtype
    for name in ("int", "key", "function", "none"):
        assert result[name] is tree[name]


def test_with_output_dtype_changes_only_that():
    policy = POLICY.with_output_dtype(jnp.float32)
    assert dtypes_of(policy) == (F32, F16, F32)
    assert isinstance(policy, jmp.Policy)


# --- Fixed loss scales ----------------------------------------------------------------


def test_no_op_does_nothing_at_all():
    scale, tree = jmp.NoOpLossScale(), {"a": jnp.ones(2, jnp.float16)}
    assert scale.scale(tree) is tree
    assert scale.unscale(tree) is tree
    assert scale.adjust(jnp.array(False)) is scale
    assert scale.loss_scale == 1
    assert isinstance(scale, jmp.LossScale)


@pytest.mark.parametrize("value", [2, 3.0, np.float32(4), jnp.float16(8)], ids=str)
@pytest.mark.parametrize("cls", [jmp.StaticLossScale, jmp.DynamicLossScale])
@pytest.mark.filterwarnings("ignore:Expected floating type")
def test_scale_multiplies_and_unscale_divides(cls, value):
    scale, tree = cls(value), {"a": jnp.array([1.0, -2.5])}
    expected = {"a": tree["a"] * jnp.float32(value)}
    assert_trees_equal(scale.scale(tree), expected)
    assert_trees_equal(scale.unscale(expected), tree)
    assert isinstance(scale, jmp.LossScale)


@pytest.mark.parametrize(
    "make", [jmp.NoOpLossScale, lambda: jmp.StaticLossScale(2**15)]
)
def test_fixed_scales_are_static_in_a_tree(make):
    scale = make()
    assert jax.tree.leaves(scale) == []
    assert jax.jit(lambda s: s)(scale) == scale
    assert scale.adjust(jnp.array(True)) is scale
    assert float(jax.jit(lambda s, x: s.unscale(s.scale(x)))(scale, 3.0)) == 3.0


@pytest.mark.parametrize("cls", [jmp.StaticLossScale, jmp.DynamicLossScale])
def test_scaling_happens_in_f32(cls):
    # In jmp a Python number keeps an f16 loss f16: 2 * 2**15 is infinite there.
    scale = cls(2.0**15)
    assert_trees_equal(scale.scale(jnp.float16(2.0)), jnp.float32(2.0**16))
    tiny = scale.unscale(jnp.float16(2.0**-14))
    assert_trees_equal(tiny, jnp.float32(2.0**-29))


# --- The dynamic loss scale -----------------------------------------------------------


def test_leaves_are_scale_and_counter():
    scale, counter = jnp.float32(8), jnp.int32(3)
    loss_scale = jmp.DynamicLossScale(scale, counter, 2000, 2)
    assert jax.tree.leaves(loss_scale) == [scale, counter]
    assert jax.tree.map(lambda x: x, loss_scale) == loss_scale
    assert (loss_scale.period, loss_scale.factor) == (2000, 2)


def reference(scale, counter, flags, period, factor, floor):
    """The algorithm that jmp's documentation gives, in f64."""
    for finite in flags:
        if finite:
            counter += 1
            if counter == period:
                counter = 0
                larger = scale * factor
                scale = larger if np.isfinite(np.float32(larger)) else scale
        else:
            counter = 0
            scale = max(floor, scale / factor)
        yield scale, counter


@pytest.mark.parametrize(
    ("period", "factor", "floor"),
    [(1, 2, 1.0), (3, 2, 1.0), (20, 4, 0.3125), (2, 3, 0.37), (5, 2, 0.0)],
)
@pytest.mark.parametrize("share", [0.4, 0.95])
def test_adjust_follows_the_documented_algorithm(period, factor, floor, share):
    flags = np.random.default_rng(0).random(100) < share
    start = jmp.DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor, floor)

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter)

    end, (scales, counters) = lax.scan(step, start, flags)
    expected = zip(*reference(10.0, 0, flags, period, factor, floor), strict=True)
    expected_scales, expected_counters = map(np.array, expected)
    np.testing.assert_array_equal(counters, expected_counters)
    # Exact for powers of two; else two roundings a step.
    rtol = 0 if factor != 3 else 100 * 2 * 2.0**-24
    np.testing.assert_allclose(scales, expected_scales, rtol=rtol)
    assert (end.period, end.factor, end.min_loss_scale) == (period, factor, floor)


def test_min_loss_scale_survives_jit():
    loss_scale = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=4.0)
    adjust = jax.jit(lambda s: s.adjust(jnp.array(False)))
    for _ in range(5):
        loss_scale = adjust(loss_scale)
    assert float(loss_scale.loss_scale) == 4.0


def test_min_loss_scale_may_be_an_array_made_inside_of_jit():
    @jax.jit
    def run(floor, flags):
        loss_scale = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=floor * 2)
        step = lambda s, finite: (s.adjust(finite), s.scale(jnp.ones(())))  # noqa: E731
        return lax.scan(step, loss_scale, flags)

    end, scales = run(jnp.float32(1.0), np.zeros(4, bool))
    assert np.array_equal(scales, [8.0, 4.0, 2.0, 2.0])
    assert float(end.min_loss_scale) == 2.0
    assert float(jax.jit(lambda s: s.adjust(jnp.array(False)))(end).loss_scale) == 2.0


def test_known_floor_is_no_leaf():
    loss_scale = jmp.DynamicLossScale(jnp.float32(8.0), min_loss_scale=jnp.ones(()))
    assert len(jax.tree.leaves(loss_scale)) == 2
    assert jax.tree.structure(loss_scale) == jax.tree.structure(
        jmp.DynamicLossScale(jnp.float32(4.0))
    )


def test_fields_of_a_policy_can_be_replaced():
    policy = dataclasses.replace(jmp.get_policy("f16"), output_dtype=jnp.float32)
    assert type(policy) is jmp.Policy
    assert str(policy) == "p=f16,c=f16,o=full"
    assert str(policy.with_output_dtype(jnp.bfloat16)) == "p=f16,c=f16,o=bf16"


def test_scale_reaches_neither_infinity_nor_zero():
    loss_scale = jmp.DynamicLossScale(2.0**15, period=1, min_loss_scale=0.0)
    step = jax.jit(
        lambda s, flags: lax.scan(lambda s, f: (s.adjust(f), None), s, flags)[0]
    )
    for flag in (True, False):
        end = step(loss_scale, np.full(300, flag))
        # Beyond, the scale or its reciprocal is subnormal and flushed to zero.
        assert 2.0**-126 <= float(end.loss_scale) <= 2.0**126
        assert_trees_equal(end.unscale(end.scale(jnp.ones(4))), jnp.ones(4))


def test_scale_may_be_f16_and_is_kept_in_f32():
    # In jmp `adjust` breaks on it, although the README makes one.
    loss_scale = jmp.DynamicLossScale(jmp.half_dtype()(2**15), period=1)
    end, _ = lax.scan(lambda s, f: (s.adjust(f), None), loss_scale, np.ones(4, bool))
    assert_trees_equal(end.loss_scale, jnp.float32(2.0**19))


def test_integers_get_a_warning_and_floats_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.DynamicLossScale(2.0**15)
        jmp.DynamicLossScale(jnp.float32(1))
    for value in (1, np.int32(1), jnp.int32(1)):
        with pytest.warns(Warning, match="Expected floating type for loss_scale"):
            jmp.DynamicLossScale(value)
        with pytest.warns(Warning, match="Expected floating type for min_loss_scale"):
            jmp.DynamicLossScale(1.0, min_loss_scale=value)


# --- Trees ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_all_finite_looks_at_every_leaf(bad):
    good = {"a": jnp.ones(2), "b": {"c": np.ones(3), "n": jnp.arange(3)}}
    assert jmp.all_finite(good)
    assert jmp.all_finite(None)
    assert jmp.all_finite({})
    assert not jmp.all_finite({**good, "a": jnp.array([1.0, bad])})
    assert not jmp.all_finite({**good, "b": {"c": np.array([bad])}})


def test_select_tree_chooses_a_tree():
    a, b = {"x": jnp.ones(2), "y": None}, {"x": jnp.zeros(2), "y": None}
    assert_trees_equal(jmp.select_tree(jnp.array(True), a, b), a)
    assert_trees_equal(jmp.select_tree(jnp.array(False), a, b), b)
    assert jmp.select_tree(jnp.array(True), None, None) is None


@pytest.mark.parametrize("pred", [jnp.ones(1, bool), jnp.ones(()), 1], ids=str)
def test_select_tree_asserts_a_boolean_scalar(pred):
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        jmp.select_tree(pred, jnp.ones(2), jnp.zeros(2))


# --- The loops of the README ----------------------------------------------------------

HALF, FULL = jnp.float16, jnp.float32
DATA = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
TARGET = DATA @ np.array([1.0, -2.0, 0.5, 3.0], np.float32) + 1


def make_params(policy):
    dtype = policy.param_dtype
    return {"w": jnp.zeros(4, dtype=dtype), "b": jnp.zeros((), dtype=dtype)}


def my_loss_fn(params, loss_scale: jmp.LossScale, policy, x, y):
    params, x = policy.cast_to_compute((params, x))
    prediction = policy.cast_to_output(x @ params["w"] + params["b"])
    loss = jnp.mean((prediction - y) ** 2)
    loss = loss_scale.scale(loss)
    return loss


def apply_optimizer(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def train_step(params, loss_scale: jmp.LossScale, policy, x, y):
    grads = jax.grad(my_loss_fn)(params, loss_scale, policy, x, y)
    grads = loss_scale.unscale(grads)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        grads_finite = jmp.all_finite(grads)
        loss_scale = loss_scale.adjust(grads_finite)
        params = jmp.select_tree(grads_finite, apply_optimizer(params, grads), params)
    else:
        params = apply_optimizer(params, grads)
    return params, loss_scale


@pytest.mark.parametrize(
    "loss_scale",
    [
        jmp.NoOpLossScale(),
        jmp.StaticLossScale(2**10),
        jmp.DynamicLossScale(jmp.half_dtype()(2**15), period=10),
    ],
    ids=lambda scale: type(scale).__name__,
)
def test_readme_loop_trains(loss_scale):
    policy = jmp.Policy(compute_dtype=HALF, param_dtype=FULL, output_dtype=HALF)
    policy = policy.with_output_dtype(FULL)
    step = jax.jit(train_step, static_argnums=2)
    params = make_params(policy)
    for _ in range(60):
        params, loss_scale = step(params, loss_scale, policy, DATA, TARGET)
    assert_trees_equal(
        jax.tree.map(jnp.shape, params), jax.tree.map(jnp.shape, make_params(policy))
    )
    # f16 data and predictions: some 2**-11 of numbers up to about 10.
    np.testing.assert_allclose(params["w"], [1.0, -2.0, 0.5, 3.0], atol=0.02)
    np.testing.assert_allclose(params["b"], 1.0, atol=0.02)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        assert 2.0 <= float(loss_scale.loss_scale) < np.inf


def test_readme_loop_skips_an_overflow():
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    params, loss_scale = make_params(policy), jmp.DynamicLossScale(2.0**15)
    step = jax.jit(train_step, static_argnums=2)
    after, adjusted = step(params, loss_scale, policy, DATA, TARGET * 1e4)
    assert_trees_equal(after, params)
    assert float(adjusted.loss_scale) == 2.0**14
