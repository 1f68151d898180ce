"""`explain` names planted faults, and finds none in healthy models."""

import json
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import layout
from jax.sharding import PartitionSpec as P

import mpx
import planted as faults
import scoreboard
from models import normal
from mpx.inspect import explain
from mpx.inspect._equations import join, run_in_f32, split

# `python tests/scoreboard.py` has them all; here those that run in a second or less.
FAST_FAULTS = (
    "activation_beyond_f16_under_amp",
    "additive_mask_beyond_f16",
    "attention_logits_beyond_f16",
    "comparison_of_equal_numbers",
    "constant_beyond_f16",
    "counter_at_256_of_300",
    "counter_in_a_while",
    "difference_of_a_running_sum",
    "difference_of_large_activations_under_amp",
    "epsilon_with_a_huge_reciprocal",
    "epsilon_lost_in_f16",
    "exp_in_a_jit",
    "exp_in_a_scan",
    "finite_difference_in_bf16",
    "fourier_features_in_bf16",
    "gradient_of_a_gain_summed_in_bf16",
    "log_of_one_minus_sigmoid",
    "log_of_underflowed_probability",
    "loss_scale_too_large",
    "nan_in_the_batch",
    "no_loss_scale_under_amp",
    "norm_at_zero",
    "norm_of_small_numbers",
    "overflow_in_a_branch",
    "overflow_in_a_custom_vjp",
    "overflow_in_a_shard_map",
    "overflow_in_a_vmapped_scan",
    "overflow_in_nested_scans",
    "result_of_zero_in_f32",
    "row_masked_completely",
    "scale_too_large_under_amp",
    "softmax_without_shift_in_f32",
    "sqrt_at_zero",
    "std_of_equal_numbers",
    "tiny_gradients_in_f16",
    "tolerance_below_the_format",
    "variance_from_squares",
    "variance_in_a_remat",
    "where_after_the_pole",
)
FAST_MODELS = (
    "converged_regression_with_relu_bf16",
    "deep_relu_amp_f16",
    "deep_relu_policy_bf16",
    "equinox_attention_f16",
    "fixed_point_with_a_coarse_tolerance_bf16",
    "layers_in_a_shard_map_bf16",
    "log_of_zero_under_where_f32",
    "masks_of_minus_infinity_bf16",
    "mlp_amp_bf16",
    "mlp_fp8",
    "mlp_policy_f16",
    "straight_through_estimator_bf16",
    "trained_regression_amp_bf16",
)
pytestmark = pytest.mark.standard_promotion


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FAST_FAULTS)
def test_planted_fault_is_named_with_its_place_and_kind(name):
    planted = faults.PLANTED[name]
    found = scoreboard.explained(planted.make())
    assert scoreboard.mistakes(planted, found) == []
    assert not found.ok
    assert found.fault.remedy


@pytest.mark.some(1)
@pytest.mark.parametrize("name", FAST_MODELS)
def test_healthy_model_raises_no_alarm(name):
    found = scoreboard.explained(faults.HEALTHY[name]())
    assert found.ok, str(found)
    assert found.fault is None
    assert found.others == ()


def test_scope_of_what_is_computed_again_is_told_once():
    @mpx.amp
    def loss(w, x):
        with jax.named_scope("outer"):
            h = x @ w
            with jax.named_scope("inner"):
                h = jax.nn.silu(h) * jnp.tanh(h)
                return jnp.sum(jnp.sqrt(h - 9))

    fault = explain(loss, normal(0, 16, 16), normal(1, 8, 16)).fault
    assert (fault.place.primitive, fault.place.scope) == ("sqrt", "outer/inner")


def test_table_has_fifty_faults_and_twenty_models():
    assert len(faults.PLANTED) >= 50
    assert len(faults.HEALTHY) >= 20
    assert {*FAST_FAULTS} <= {*faults.PLANTED}
    assert {*FAST_MODELS} <= {*faults.HEALTHY}


def test_order_in_memory_changes_no_number():
    """mpx asks GPUs for it, and `explain` computes with NumPy's arrays."""
    rows = layout.Layout((0, 1))
    params, x = {"w": normal(0, 16, 8)}, normal(1, 4, 16)

    def loss(p, x):
        return jnp.sum(layout.with_layout_constraint(x @ p["w"], rows) ** 2)

    found = explain(mpx.amp(loss), params, x)
    assert found.loss_in_f32 == pytest.approx(float(loss(params, x)), rel=1e-6)


def test_shards_compute_what_devices_do():
    case = faults.HEALTHY["layers_in_a_shard_map_bf16"]()
    found = explain(case.func, *case.args)
    assert jax.device_count() == 8
    exact = jax.jit(case.func)(*case.args)
    assert found.loss == pytest.approx(float(exact), rel=1e-2)


def by_branch(i, h):
    return jax.lax.cond(i == 1, lambda h: h, lambda h: -3 * h, h)


def by_steps(i, h):
    step = lambda state: (state[0] + 1, state[1] * jnp.bfloat16(1.5))  # noqa: E731
    start = 0, jax.lax.stop_gradient(h)
    return h + jax.lax.while_loop(lambda state: state[0] < i, step, start)[1]


@pytest.mark.parametrize("differs", [by_branch, by_steps])
def test_shards_may_take_other_branches_and_steps(differs):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def in_shards(x, w):
        h = jnp.dot(*(y.astype(jnp.bfloat16) for y in (x, w)))
        h = differs(jax.lax.axis_index("a"), h).astype(jnp.float32)
        return jax.lax.psum(jnp.sum(h**2), "a")

    specs = {"mesh": mesh, "in_specs": (P("a"), P()), "out_specs": P()}
    func, args = jax.shard_map(in_shards, **specs), (normal(0, 8, 16), normal(1, 16, 4))
    found = explain(func, *args)
    assert found.ok, str(found)
    assert found.loss_in_f32 == pytest.approx(float(jax.jit(func)(*args)), rel=0.02)


@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))]
)
def test_shards_are_split_and_joined(spec):
    x, axes = np.arange(96).reshape(8, 12), (("a", 2), ("b", 4))
    shards = split(x, spec, axes)
    assert shards.shape[:2] == (2, 4)
    np.testing.assert_array_equal(join(shards, spec, axes), x)
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    placed = jax.device_put(x, jax.NamedSharding(mesh, spec))
    for shard in placed.addressable_shards:
        where = tuple(int(i[0]) for i in np.where(mesh.devices == shard.device))
        np.testing.assert_array_equal(shards[where], shard.data)


def test_scatter_of_the_shadow_is_in_f32():
    add = lambda x, i, y: x.at[i].add(y)  # noqa: E731
    args = jnp.zeros(2, jnp.bfloat16), jnp.zeros(600, int), jnp.ones(600, jnp.bfloat16)
    (eqn,) = [
        x for x in jax.make_jaxpr(add)(*args).eqns if "scatter" in str(x.primitive)
    ]
    # The numbers before it make the indices two-dimensional.
    (out,) = run_in_f32(eqn, [args[0], np.zeros((600, 1), np.int32), args[2] * 1.5])
    assert out.dtype == jnp.float32
    assert out[0] == 900


def two_layers(params, x):
    return jnp.mean(jnp.square(jax.nn.relu(x @ params["a"]) @ params["b"]))


# `explain` runs operation by operation, and each is compiled once a shape: one shape here.
SQUARE = 32, 32
TWO_LAYERS = (
    {"a": normal(0, *SQUARE) / 6, "b": normal(1, *SQUARE) / 6},
    normal(2, *SQUARE),
)
AS_THEY_RUN = {
    "amp": lambda: (mpx.amp(two_layers), two_layers, TWO_LAYERS),
    "fp8": lambda: (mpx.fp8(two_layers, min_gain=0), two_layers, TWO_LAYERS),
    "sum": lambda: planted_call("gradient_of_a_gain_summed_in_bf16"),
    "tie": lambda: planted_call("comparison_of_equal_numbers"),
}


def planted_call(name):
    """Returns a planted fault, its loss in f32, and its arguments."""
    case = faults.PLANTED[name].make()
    in_f32 = {
        "gradient_of_a_gain_summed_in_bf16": lambda p, x: jnp.mean(x * p["gain"]),
        "comparison_of_equal_numbers": lambda p, x: jnp.mean(x * p["w"] > 1) * p["w"],
    }
    return case.func, in_f32[name], case.args


@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:.*fp8")
@pytest.mark.parametrize("name", AS_THEY_RUN)
def test_loss_and_errors_are_those_of_the_compiled_function_and_of_f32(name):
    func, in_f32, args = AS_THEY_RUN[name]()
    loss, grads = jax.jit(jax.value_and_grad(func))(*args)
    exact, wanted = jax.value_and_grad(in_f32)(*args)
    found = explain(func, *args)
    assert found.loss == pytest.approx(float(loss), rel=1e-6)
    assert found.loss_in_f32 == pytest.approx(float(exact), rel=1e-5)
    for path, grad in grads.items():
        error = np.linalg.norm(grad - wanted[path]) / np.linalg.norm(wanted[path])
        assert found.grad_errors[f"params/{path}"] == pytest.approx(error, rel=0.01)


def test_result_that_is_15_percent_off_is_inaccurate():
    case = faults.PLANTED["counter_at_256_of_300"].make()
    found = explain(case.func, *case.args)
    assert found.verdict == "inaccurate"
    assert not found.ok
    assert found.loss_error == pytest.approx(300 / 256 - 1, rel=1e-3)
    text = str(found)
    assert "Inaccurate: accumulation" in text
    assert "(off by 17 %)" in text
    assert re.search(r"formulas\.py:\d+ in `step`", text)


def test_loop_that_does_not_end_is_reported_and_not_compiled():
    case = faults.PLANTED["tolerance_below_the_format"].make()
    found = explain(case.func, *case.args)
    assert found.fault.place.primitive == "gt"
    assert not found.fault.place.backward
    assert "the loop ends after" in found.fault.effect
    assert "choose one above" in found.fault.remedy
    assert "not run: its loop may not end" in str(found)


def test_gradient_that_jumps_at_a_relu_is_noted():
    def loss(w, x):
        return jnp.mean(jax.nn.relu((x * w).astype(jnp.bfloat16) - 1) + x * w)

    # A relu at one in bf16, and slightly above it in f32.
    w, x = jnp.ones(4), jnp.array([1.001, 2.0, 0.5, 0.25])
    found = explain(loss, w, x)
    assert found.ok
    assert found.grad_errors["w"] > 0.1
    assert "fall differently than in f32" in str(found)


def test_infinite_operands_are_no_reason_for_a_larger_loss_scale():
    def loss(params, x):
        h = x @ params["w"]
        return jnp.mean(jnp.tanh(1e-4 * h @ params["head"]))

    params = {"w": jnp.full((8, 8), 4e4), "head": jnp.full((8, 2), 1e-3)}
    found = explain(mpx.amp(loss, "f16"), params, jnp.ones((2, 8)), scaling=1024.0)
    faulty = (found.fault, *found.others)
    assert found.fault.kind == "overflow"
    assert not any("larger loss scale" in x.remedy for x in faulty)
    assert math.isfinite(found.loss_in_f32)


def test_arrays_on_explicit_axes_are_explained_as_on_one_device():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    params, x = TWO_LAYERS
    placed = (
        jax.device_put(params, jax.NamedSharding(mesh, P())),
        jax.device_put(x, jax.NamedSharding(mesh, P("data"))),
    )
    found, alone = (
        explain(mpx.amp(two_layers), *placed),
        explain(mpx.amp(two_layers), params, x),
    )
    assert found.ok
    assert found.loss_in_f32 == pytest.approx(alone.loss_in_f32, rel=1e-6)
    assert found.equations >= alone.equations


def test_state_of_fp8_is_no_parameter():
    func = mpx.fp8(two_layers, mpx.recipes.DelayedScaling(), min_gain=0)
    state = func.init(*TWO_LAYERS)
    found = explain(func, state, *TWO_LAYERS)
    assert list(found.grad_errors) == ["params/a", "params/b"]
    exact = float(two_layers(*TWO_LAYERS))
    assert found.loss_in_f32 == pytest.approx(exact, rel=1e-5)


TIGHT = {"activation_max": 8.0, "weight_max": 8.0, "grad_max": 8.0}
CLIPPED = {  # of two matmuls of one line, by the parameter and what is clipped of it
    "weight": ("layers/1", "weight", {"weight_max": 0.5}, False),
    "activation": ("layers/0", "activation", {"activation_max": 0.5}, False),
    "gradient": ("layers/1", "gradient", {"grad_max": 2.0**-20}, True),
}


def in_turn(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w) / 8
    return jnp.mean(jnp.square(x))


SMALL, LARGE = normal(0, *SQUARE) / 10, normal(1, *SQUARE)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CLIPPED)
def test_layer_is_named_where_a_fixed_scale_clips(name):
    param, what, tight, backward = CLIPPED[name]
    params, x = {"layers": [SMALL, LARGE]}, normal(2, *SQUARE)
    recipe = mpx.recipes.StaticScaling(**{**TIGHT, **tight})
    found = explain(mpx.fp8(in_turn, recipe, min_gain=0), params, x)
    fault, (wanted,) = found.fault, tight.values()
    assert (fault.kind, fault.place.param) == ("clipping", f"params/{param}")
    assert (fault.place.primitive, fault.place.backward) == ("dot_general", backward)
    assert wanted <= fault.limit < 2 * wanted  # the next power of two
    assert max(map(abs, fault.operands[0])) > fault.limit
    assert f"clips the {what} to {fault.limit:.3g}, which changes the" in str(found)
    assert "`CurrentScaling()`" in fault.remedy
    assert f'mpx.fp8(fn, keep="{param}")' in fault.remedy
    kept = explain(mpx.fp8(in_turn, recipe, min_gain=0, keep=param), params, x)
    assert kept.fault is None or kept.fault.place.param != fault.place.param
    assert explain(mpx.fp8(in_turn, min_gain=0), params, x).ok


def wide_layer(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["a"] / 6) @ params["b"]))


UP_TO_3 = {"a": jnp.clip(LARGE, -3, 3), "b": normal(3, 32, 32) / 6}
UP_TO_2 = jnp.clip(normal(2, 64, 32), -2.5, 2.5)
HOLDS = {"activation_max": 3.0, "weight_max": 3.0, "grad_max": 2.0**-8}
MODERATE = {  # clips that change gradients by less than roundings to 8 bits may
    "weight": ("a", 1.0, False),
    "activation": ("a", 1.0, False),
    "grad": ("b", 2.0**-11, True),
}


@pytest.mark.weekly
@pytest.mark.some(1)
@pytest.mark.parametrize("role", MODERATE)
def test_scale_that_clips_is_a_fault_although_roundings_may_change_as_much(role):
    param, most, backward = MODERATE[role]
    recipe = mpx.recipes.StaticScaling(**{**HOLDS, f"{role}_max": most})
    found = explain(mpx.fp8(wide_layer, recipe, min_gain=0), UP_TO_3, UP_TO_2)
    assert 0.05 < max(found.grad_errors.values()) < 0.25
    assert found.verdict == "inaccurate"
    fault, rest = found.fault, found.others
    assert (fault.kind, fault.place.param) == ("clipping", f"params/{param}")
    assert (fault.place.backward, rest) == (backward, ())
    assert fault.limit == pytest.approx(1.75 * most, rel=0.01)
    assert f"a larger `{role}_max` in `StaticScaling`" in fault.remedy
    recipe = mpx.recipes.StaticScaling(**HOLDS)
    found = explain(mpx.fp8(wide_layer, recipe, min_gain=0), UP_TO_3, UP_TO_2)
    assert found.ok
    assert "clips" not in str(found)


@pytest.mark.weekly
def test_worst_of_the_steps_that_clip_is_named():
    def scanned(params, x):
        step = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jnp.square(jax.lax.scan(step, x, params["layers"])[0]))

    recipe = mpx.recipes.StaticScaling(**{**TIGHT, "weight_max": 0.25})
    params = {"layers": jnp.stack([LARGE / 6, LARGE.T, LARGE / 5]) / 4}
    fault = explain(
        mpx.fp8(scanned, recipe, min_gain=0), params, normal(2, 16, 32)
    ).fault
    assert (fault.kind, fault.step) == ("clipping", ((1, 3),))
    assert fault.operands[0][1] == pytest.approx(float(LARGE.max() / 4), rel=0.01)


@pytest.mark.weekly
def test_layers_that_clip_a_little_are_named_if_together_they_change_much():
    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(x @ w)
        return jnp.mean(jnp.square(x))

    layers = [jnp.clip(normal(i, 32, 32) / 6, -0.47, 0.47) for i in range(6)]
    recipe = mpx.recipes.StaticScaling(**{**HOLDS, "weight_max": 0.4})
    func = mpx.fp8(loss, recipe, min_gain=0)
    found = explain(func, {"layers": layers}, normal(9, 64, 32))
    faults = (found.fault, *found.others)
    assert {x.kind for x in faults} == {"clipping"}
    assert len({x.place.param for x in faults}) > 3
    shares = [float(re.search(r"by ([\d.]+) %", x.effect)[1]) for x in faults]
    assert max(shares) < 3 < sum(shares)


def test_number_that_is_rounded_to_the_largest_is_not_clipped():
    # The scale holds 1.75, and the next number would be 1.875.
    params = {**UP_TO_3, "a": jnp.clip(UP_TO_3["a"], -1.8, 1.8)}
    recipe = mpx.recipes.StaticScaling(**{**HOLDS, "weight_max": 1.0})
    found = explain(mpx.fp8(wide_layer, recipe, min_gain=0), params, UP_TO_2)
    assert found.ok
    assert "clips" not in str(found)


def test_clip_of_no_consequence_is_noted():
    params = {**UP_TO_3, "a": UP_TO_3["a"].at[0, 0].set(4.0)}
    recipe = mpx.recipes.StaticScaling(**HOLDS)
    found = explain(mpx.fp8(wide_layer, recipe, min_gain=0), params, UP_TO_2)
    assert found.ok
    assert re.search(r"clips numbers at \S*test_explain.py:\d+", str(found))


@pytest.mark.weekly
@pytest.mark.some(1)
@pytest.mark.parametrize("tight", [{"weight_max": 0.03}, {"grad_max": 2.0**-20}])
def test_scanned_layers_are_named_where_a_scale_clips(tight):
    def scanned(params, x):
        step = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jnp.mean(jnp.square(jax.lax.scan(step, x, params["layers"])[0]))

    recipe = mpx.recipes.StaticScaling(**{**TIGHT, **tight})
    params = {"layers": jnp.stack([LARGE, LARGE.T]) / 4}
    found = explain(
        mpx.fp8(scanned, recipe, min_gain=0), params, normal(2, *SQUARE)
    ).fault
    assert (found.kind, found.place.param) == ("clipping", "params/layers")
    assert found.step == ((0, 2),)  # the worst, and the first of equal ones


@pytest.mark.weekly
def test_layer_is_named_where_a_scale_of_earlier_steps_clips():
    func = mpx.fp8(in_turn, mpx.recipes.DelayedScaling(), min_gain=0)
    params, x = {"layers": [SMALL, LARGE]}, normal(2, 16, 32)
    state = func.init(params, x)
    assert explain(func, state, params, x).ok
    fault = explain(func, state, params, 30 * x).fault
    assert (fault.kind, fault.place.param) == ("clipping", "params/layers/0")
    assert fault.operands[0][1] == pytest.approx(30 * float(x.max()), rel=0.01)


@pytest.mark.weekly
@pytest.mark.some(1)
@pytest.mark.parametrize("outer", [lambda f: f, mpx.amp])
def test_layer_that_int8_does_not_resolve_can_be_kept(outer):
    # A large column that meets zeros leaves one level for all others.
    params, x = {"layers": [SMALL.at[0].set(0), SMALL]}, normal(2, *SQUARE)
    x = x.at[:, 0].set(3e4)
    fault = explain(mpx.fp8(outer(in_turn), "int8", min_gain=0), params, x).fault
    assert (fault.kind, fault.format) == ("precision", "int8")
    assert (fault.place.param, fault.place.backward) == ("params/layers/0", False)
    assert fault.remedy == 'keep it in 16 bits: `mpx.fp8(fn, keep="layers/0")`'
    kept = mpx.fp8(outer(in_turn), "int8", min_gain=0, keep="layers/0")
    assert explain(kept, params, x).ok


def naive(params, x):
    with jax.named_scope("softmax"):
        e = jnp.exp((x @ params["w"]).astype(jnp.float16))
        return jnp.mean(e / e.sum(-1, keepdims=True)).astype(jnp.float32)


NAIVE = ({"w": jnp.full((4, 4), 5.0)}, jnp.ones((2, 4)))


def test_fault_says_what_where_and_what_to_do():
    found = explain(naive, *NAIVE)
    fault = found.fault
    assert (fault.kind, fault.format, fault.limit) == ("overflow", "f16", 65504.0)
    assert fault.place.primitive == "exp"
    assert fault.place.scope == "softmax"
    assert fault.near == "params/w"
    assert not fault.place.backward
    assert fault.operands == ((20.0, 20.0),)
    assert fault.result == pytest.approx((math.exp(20),) * 2)
    assert math.isnan(found.loss)
    assert found.loss_in_f32 == pytest.approx(0.25)
    text = str(found)
    for part in (
        "overflow in the forward pass",
        "`exp`",
        "65504",
        "subtract the maximum",
    ):
        assert part in text


def test_result_exports_and_renders():
    found = explain(naive, *NAIVE)
    fields = json.loads(found.to_json())
    assert fields["fault"]["place"]["primitive"] == "exp"
    assert fields["loss"] == "nan"
    assert "overflow" in found._repr_html_()
    assert eqx.tree_equal(found.to_dict()["ok"], False)


def test_nothing_wrong_says_what_was_looked_at():
    found = explain(
        mpx.amp(lambda w, x: jnp.mean(x @ w)), jnp.ones((8, 2)), jnp.ones((3, 8))
    )
    text = str(found)
    assert "Nothing is wrong" in text
    assert "loss and gradient" in text
    assert "bf16" in text


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: f])
def test_fault_is_found_through_a_wrapped_loss(wrap):
    assert explain(wrap(naive), *NAIVE).fault.place.primitive == "exp"


def test_step_of_a_loop_is_named():
    def loss(w, x):
        def layer(h, w):
            return jnp.exp(h * w).astype(jnp.float16), None

        return jax.lax.scan(layer, x, w)[0].sum().astype(jnp.float32)

    w = jnp.array([1.0, 1.0, 9.0, 0.0], jnp.float16)
    fault = explain(loss, w, jnp.ones(3, jnp.float16) / 2).fault
    assert fault.step == ((2, 4),)
    assert fault.near == "w"


def test_amp_gets_a_selector_that_cures_the_fault():
    def loss(params, x):
        h = x @ params["big"]["w"]
        return jnp.mean(jnp.square(h * 1e-5))

    params, x = {"big": {"w": jnp.full((8, 8), 3e4)}}, jnp.ones((2, 8))
    fault = explain(mpx.amp(loss, "f16"), params, x, scaling=2.0).fault
    assert 'mpx.amp(fn, keep="big/w")' in fault.remedy
    assert explain(mpx.amp(loss, "f16", keep="big/w"), params, x, scaling=2.0).ok


def test_loss_scale_that_would_fit_is_named_and_does():
    def loss(w, x):
        return jnp.sum(jnp.square((x @ w.astype(jnp.float16)).astype(jnp.float32)))

    w, x = jnp.ones((4, 4)), jnp.ones((2, 4), jnp.float16)
    remedy = explain(loss, w, x, scaling=mpx.StaticLossScaling(2.0**20)).fault.remedy
    fits = float(remedy.partition("here, ")[2].split()[0])
    assert explain(loss, w, x, scaling=fits).ok


def test_function_without_a_scalar_is_looked_at_forward_only():
    found = explain(
        lambda w, x: jnp.exp(x @ w), jnp.full((2, 2), 99.0), jnp.ones((1, 2))
    )
    assert found.fault.place.primitive == "exp"
    assert found.grad_errors == {}
    assert "forward pass only" in str(found)


def test_unjudged_gradients_are_named():
    def loss(params, x):
        h = x @ params["w"] + params["bias"]
        h = h - h.mean(0)
        return jnp.mean(jnp.square(h / jnp.sqrt(jnp.mean(h**2, 0) + 1e-5)) * x[:, :4])

    params = {"w": normal(0, 8, 4), "bias": jnp.ones(4)}
    x = normal(1, 16, 8)
    found = explain(mpx.amp(loss), params, x)
    assert found.ok
    assert found.unstable == ("params/bias",)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: explain(
                naive, {"w": jax.ShapeDtypeStruct((4, 4), "float32")}, NAIVE[1]
            ),
            "needs arrays, but a `jax.ShapeDtypeStruct` was given",
        ),
        (
            lambda: explain(naive, *NAIVE, scaling={"scale": 2.0}),
            "`scaling` must be a loss scaling .* but dict was given",
        ),
        (lambda: explain(naive, *NAIVE, scaling=-1.0), "must be a loss scaling"),
        (
            lambda: explain(naive, *NAIVE, policy="bf16"),
            "`naive` takes no argument `policy`.*`mpx.amp",
        ),
        (
            lambda: mpx.inspect.report(naive, *NAIVE, precision="bf16"),
            "`naive` takes no argument `precision`.*It has params, x",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message, untyped):
    with pytest.raises(TypeError, match=message):
        call()


def test_process_without_the_cpu_is_told_how_to_get_it(monkeypatch):
    def devices(backend=None):
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", devices)
    with pytest.raises(RuntimeError, match="JAX_PLATFORMS=cuda,cpu"):
        mpx.inspect.explain(lambda x: jnp.sum(x * x), jnp.ones(3))


@pytest.mark.parametrize("wrap", [mpx.amp, jax.checkpoint])
def test_operation_that_is_computed_again_is_told_once(wrap):
    def loss(w, x):
        return jnp.mean(jax.nn.gelu(jnp.log(x @ w - 3.0)) ** 2)

    w, x = jnp.array([[4.0, 1.0], [3.0, 1.0]]), jnp.ones((3, 2))
    found = mpx.inspect.explain(wrap(loss), w, x)
    assert found.fault.place.primitive == "log"
    assert not found.fault.place.backward
    assert found.others == ()


def test_zero_over_zero_is_a_fault_of_the_forward_pass():
    def unit(w, x):
        h = x @ w
        return jnp.sum(h / jnp.sqrt(jnp.sum(h * h)))

    found = mpx.inspect.explain(unit, jnp.ones((2, 2)), jnp.zeros((1, 2)))
    assert found.fault.kind == "nan"
    assert not found.fault.place.backward


@pytest.mark.parametrize("wrap", [lambda f: f, mpx.amp])
def test_zero_of_a_relu_is_no_epsilon(wrap):
    def normalised(w, x):
        h = jax.nn.relu(x @ w - 1e3)  # all units are dead
        return jnp.mean(h / h.sum(-1, keepdims=True))

    found = mpx.inspect.explain(wrap(normalised), jnp.ones((2, 2)), jnp.ones((1, 2)))
    assert (found.fault.kind, found.fault.place.primitive) == ("nan", "div")


def test_a_rounded_product_is_no_sum():
    def rotary(params, positions, frequencies):
        angles = positions.astype(jnp.bfloat16) * frequencies.astype(jnp.bfloat16)
        return jnp.mean((jnp.sin(angles.astype(jnp.float32)) * params["w"]) ** 3)

    positions, frequencies = jnp.arange(4000.0, 4064)[:, None], 0.1 ** jnp.arange(8.0)
    given = {"w": jnp.ones((1, 8))}, positions, frequencies[None]
    fault = mpx.inspect.explain(rotary, *given).fault
    assert (fault.kind, fault.place.primitive) == ("precision", "mul")
    assert "positions and angles in f32" in fault.remedy
