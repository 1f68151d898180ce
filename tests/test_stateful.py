"""Running statistics: Equinox `State` and Linen `batch_stats` stay f32, and truthful."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import POLICIES, count_traces, normal
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal

BF16 = POLICIES["bf16"]
F32_EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(scope="module")
def batch():
    x = normal(1, 16, 4) + 1
    return x, jnp.sin(x.sum(axis=1))


# --- Equinox BatchNorm ----------------------------------------------------------------


def make_model(mode):
    def make():
        keys = jax.random.split(jax.random.key(0))
        return eqx.nn.Sequential(
            [
                eqx.nn.Linear(4, 8, key=keys[0]),
                eqx.nn.BatchNorm(8, "batch", mode=mode),
                eqx.nn.Lambda(jnp.tanh),
                eqx.nn.Linear(8, 1, key=keys[1]),
            ]
        )

    return eqx.nn.make_with_state(make)()


def apply(model, state, x):
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        x, state
    )


def loss_fn(model, state, x, y):
    pred, state = apply(model, state, x)
    return jnp.mean((pred[:, 0] - y) ** 2), (state, pred)


@eqx.filter_jit
def reference(model, state, x, y):
    return eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state, x, y)


@functools.cache
def make_step(**options):
    return eqx.filter_jit(mpx.value_and_grad(loss_fn, has_aux=True, **options))


WINDOWS = {
    "value_and_grad": lambda loss, batch: mpx.value_and_grad(loss, has_aux=True),
    "accumulate": lambda loss, batch: mpx.accumulate(
        loss, 2, batch_argnums=batch, has_aux=True
    ),
}


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS)
def window(request):
    return request.param


def assert_close(a, b, tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


@pytest.mark.some(1)
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_f32_state_is_that_of_equinox(mode, batch):
    model, state = make_model(mode)
    (value, (expected, _)), grads = reference(model, state, *batch)
    result = make_step(policy=POLICIES["f32"])(NoLossScaling(), model, state, *batch)
    # The same operations in f32, possibly fused differently: some ten roundings.
    assert_close(result.aux[0], expected, 10 * F32_EPS)
    assert_close(result.grads, grads, 10 * F32_EPS)
    np.testing.assert_allclose(result.value, value, rtol=10 * F32_EPS)


def test_mixed_state_stays_f32_and_is_near_that_of_f32(batch):
    model, state = make_model("batch")
    (_, (expected, _)), _ = reference(model, state, *batch)
    result = make_step(policy=BF16)(NoLossScaling(), model, state, *batch)
    new, pred = result.aux
    assert pred.dtype == jnp.bfloat16  # behind the norm, bf16 again
    # The norm is computed in f32, of an input that a bf16 product has rounded.
    assert_close(new, expected, 4 * float(jnp.finfo(jnp.bfloat16).eps))
    assert not np.array_equal(*(jax.tree.leaves(s)[1] for s in (new, state)))


def test_norm_is_computed_in_f32_of_bf16_inputs(batch):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    x = mpx.cast_to_bfloat16(batch[0])

    def loss(norm, state, x):
        out, state = apply(norm, state, x)
        assert out.dtype == jnp.bfloat16
        return jnp.mean(out), state

    step = eqx.filter_jit(mpx.value_and_grad(loss, has_aux=True, policy=BF16))
    new = step(NoLossScaling(), norm, state, x).aux
    mean = next(leaf for leaf in jax.tree.leaves(new) if leaf.shape == (4,))
    exact = 0.01 * np.asarray(x, np.float64).mean(axis=0)
    np.testing.assert_allclose(mean, exact, rtol=4 * F32_EPS)


def test_statistics_move_where_bf16_would_stand_still():
    # A moving average with momentum 0.99 near its limit moves by 1 % of a distance of
    # 1 %: 1e-4, far below half an ulp of bf16 at 1, which is 4e-3.
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="batch")

    def loss(norm, state, x):
        out, state = apply(norm, state, x)
        return jnp.mean(out), state

    @eqx.filter_jit
    def run(state, x):
        params, static = eqx.partition(norm, eqx.is_array)

        def body(state, _):
            result = mpx.value_and_grad(loss, has_aux=True, policy=BF16)(
                NoLossScaling(), eqx.combine(params, static), state, x
            )
            return result.aux, None

        return jax.lax.scan(body, state, length=1000)[0]

    new = run(state, jnp.array([[0.5], [1.5]]))
    mean = next(leaf for leaf in jax.tree.leaves(new) if leaf.shape == (1,))
    # 1000 steps, each rounding once; a bf16 average would stop at about 0.6.
    np.testing.assert_allclose(mean, 1 - 0.99**1000, rtol=0, atol=1000 * F32_EPS)


def test_spectral_norm_runs_in_f32_between_half_layers():
    def make():
        keys = jax.random.split(jax.random.key(0))
        linear = eqx.nn.Linear(4, 4, key=keys[0])
        return eqx.nn.SpectralNorm(linear, "weight", key=keys[1])

    norm, state = eqx.nn.make_with_state(make)()

    def loss(norm, state, x):
        y, state = norm(x, state)
        return jnp.sum(y.astype(jnp.float32) ** 2), (y, state)

    run = mpx.value_and_grad(loss, has_aux=True, policy=BF16)
    result = run(NoLossScaling(), norm, state, jnp.arange(4.0))
    y, after = result.aux
    assert y.dtype == jnp.bfloat16
    assert [x.dtype for x in jax.tree.leaves(after)] == [jnp.float32] * 2
    # Weights and power iteration are those of f32; the input is exact in bf16.
    expected, _ = norm(jnp.arange(4.0), state)
    np.testing.assert_array_equal(y, expected.astype(jnp.bfloat16))


def test_skipped_step_rolls_the_state_back(batch):
    model, state = make_model("batch")
    x, y = batch
    step = make_step(policy=BF16)
    state = step(NoLossScaling(), model, state, x, y).aux[0]
    result = step(NoLossScaling(), model, state, x.at[0, 0].set(jnp.inf), y)
    assert not result.finite
    assert_trees_equal(result.aux[0], state)


def test_state_can_be_used_again_after_a_step(batch):
    # Equinox forbids to use an old state twice; a retried step must be able to.
    model, state = make_model("batch")
    step = mpx.value_and_grad(loss_fn, has_aux=True, policy=BF16)
    first = eqx.filter_eval_shape(step, NoLossScaling(), model, state, *batch)
    second = eqx.filter_eval_shape(step, NoLossScaling(), model, state, *batch)
    assert jax.tree.structure(first) == jax.tree.structure(second)


class Counter(eqx.Module):
    """The smallest stateful layer: it counts its calls and adds up its inputs."""

    weight: jax.Array
    calls: eqx.nn.StateIndex
    total: eqx.nn.StateIndex

    def __init__(self):
        self.weight = jnp.float32(1.0)
        self.calls = eqx.nn.StateIndex(jnp.int32(0))
        self.total = eqx.nn.StateIndex(jnp.float32(0.0))

    def __call__(self, x, state):
        total = state.get(self.total)
        assert total.dtype == jnp.float32
        state = state.set(self.calls, state.get(self.calls) + 1)
        state = state.set(self.total, total + jnp.sum(x.astype(jnp.float32)))
        return jnp.sum(self.weight * x), state

    def read(self, state):
        return int(state.get(self.calls)), float(state.get(self.total))


def counter_loss(model, state, x):
    return model(x, state)


def half_state_loss(model, state, x):
    """Hands back a state in half precision, as a layer of someone else might."""
    value, state = model(x, state)
    return value, mpx.cast_to_bfloat16(state)


def test_retry_counts_as_one_step():
    model, state = eqx.nn.make_with_state(Counter)()
    step = eqx.filter_jit(mpx.value_and_grad(counter_loss, has_aux=True, retry=30))
    result = step(DynamicLossScaling.pow2(2.0**16), model, state, jnp.full(4, 100.0))
    assert result.finite
    assert int(result.scaling.skipped) > 0
    assert model.read(result.aux) == (1, 400.0)


def two_counters():
    """Returns a counter, and two states of one structure, the second a step ahead."""
    model, state = eqx.nn.make_with_state(Counter)()
    copy = functools.partial(jax.tree.map, lambda x: x)
    return model, state, model(jnp.ones(3), copy(state))[1]


@pytest.mark.parametrize("scale", [1.0, jnp.inf], ids=["finite", "skipped"])
def test_states_of_one_structure_are_found_by_the_names_of_their_arguments(
    scale, window
):
    model, state, ahead = two_counters()

    def loss(model, teacher, student, x):
        value, student = model(x, student)
        # Dictionaries are sorted: their order is not that of the arguments.
        return value, {"teacher": teacher, "student": student}

    take = window(loss, 3)
    result = take(NoLossScaling(), model, ahead, state, jnp.full(4, scale))
    assert bool(result.finite) is (scale == 1)
    parts = 2 if window is WINDOWS["accumulate"] else 1
    student = (parts, 4.0) if scale == 1 else (0, 0.0)
    assert model.read(result.aux["student"]) == student
    assert model.read(result.aux["teacher"]) == (1, 3.0)


@pytest.mark.parametrize(
    "put",
    [
        lambda student, teacher: (student, teacher),
        lambda student, teacher: {"new": student, "old": teacher},
        lambda student, teacher: student,
        lambda student, teacher: {"student": student, "copy": student, "new": teacher},
    ],
    ids=["by order", "other names", "one of two", "one name of two"],
)
def test_states_that_cannot_be_told_apart_are_refused(put, window):
    model, state, ahead = two_counters()

    def loss(model, teacher, student, x):
        value, student = model(x, student)
        return value, put(student, teacher)

    with pytest.raises(ValueError, match="may replace `teacher`.*under its name"):
        window(loss, 3)(NoLossScaling(), model, ahead, state, jnp.ones(4))


def test_function_that_changes_its_batch_gets_a_copy():
    def loss(w, batch):
        return jnp.sum(w * batch.pop("x"))

    batch = {"x": jnp.ones(3)}
    for _ in range(2):
        mpx.value_and_grad(loss)(NoLossScaling(), jnp.ones(3), batch)
    assert [*batch] == ["x"]


def test_state_that_comes_back_in_half_is_f32_again():
    model, state = eqx.nn.make_with_state(Counter)()
    step = eqx.filter_jit(
        mpx.value_and_grad(half_state_loss, has_aux=True, policy=BF16)
    )
    result = step(NoLossScaling(), model, state, jnp.ones(4))
    assert result.aux.get(model.total).dtype == jnp.float32
    assert model.read(result.aux) == (1, 4.0)


def test_accumulated_state_that_comes_back_in_half_is_f32_again():
    # Without it the loop over the parts would not even have one type.
    model, state = eqx.nn.make_with_state(Counter)()
    step = mpx.accumulate(half_state_loss, 4, batch_argnums=2, has_aux=True)
    result = eqx.filter_jit(step)(StaticLossScaling(8.0), model, state, jnp.ones(4))
    assert result.aux.get(model.total).dtype == jnp.float32
    assert model.read(result.aux) == (4, 4.0)


def test_paper_functions_keep_and_roll_back_the_state():
    model, state = eqx.nn.make_with_state(Counter)()

    @eqx.filter_jit
    def step(scaling, state, x):
        scaling, finite, _, state = mpx.filter_grad(counter_loss, scaling, True)(
            model, state, x
        )
        return scaling, finite, state

    scaling = DynamicLossScaling.pow2(8.0)
    scaling, finite, state = step(scaling, state, jnp.ones(4))
    assert model.read(state) == (1, 4.0)
    scaling, finite, state = step(scaling, state, jnp.full(4, 1e5))
    assert not finite
    assert model.read(state) == (1, 4.0)


def test_switched_off_the_state_is_simply_updated():
    model, state = eqx.nn.make_with_state(Counter)()
    *_, new = mpx.filter_grad(counter_loss, None, True, use_mixed_precision=False)(
        model, state, jnp.ones(4)
    )
    assert model.read(new) == (1, 4.0)


def test_state_may_be_a_keyword_and_part_of_a_larger_aux():
    model, state = eqx.nn.make_with_state(Counter)()

    def loss(model, x, *, extra):
        value, new = model(x, extra["state"])
        return value, {"name": "aux", "deep": [new, value]}

    step = eqx.filter_jit(mpx.value_and_grad(loss, has_aux=True, policy=BF16))
    result = step(NoLossScaling(), model, jnp.ones(4), extra={"state": state})
    assert model.read(result.aux["deep"][0]) == (1, 4.0)
    assert result.aux["name"] == "aux"
    result = step(NoLossScaling(), model, jnp.ones(4) * jnp.nan, extra={"state": state})
    assert model.read(result.aux["deep"][0]) == (0, 0.0)


def test_loss_that_does_not_return_the_state_is_fine():
    model, state = eqx.nn.make_with_state(Counter)()
    loss = lambda model, state, x: model(x, state)[0]  # noqa: E731
    result = mpx.value_and_grad(loss, policy=BF16)(
        NoLossScaling(), model, state, jnp.ones(4)
    )
    assert_trees_equal(result.grads.weight, jnp.float32(4.0))


def test_loop_is_traced_once_and_skips_what_it_must():
    model, state = eqx.nn.make_with_state(Counter)()
    loss, traces = count_traces(counter_loss)
    step = eqx.filter_jit(mpx.value_and_grad(loss, has_aux=True))
    scaling = DynamicLossScaling.pow2(2.0**4)
    for number in range(5):
        x = jnp.full(4, jnp.inf if number == 2 else 1.0)
        result = step(scaling, model, state, x)
        scaling, state = result.scaling, result.aux
    assert len(traces) == 1
    assert model.read(state) == (4, 16.0)
    assert int(scaling.skipped) == 1


def test_accumulation_hands_the_state_on():
    model, state = eqx.nn.make_with_state(Counter)()
    step = eqx.filter_jit(
        mpx.accumulate(counter_loss, 4, batch_argnums=2, has_aux=True)
    )
    scaling, x = StaticLossScaling(8.0), jnp.arange(8.0)
    result = step(scaling, model, state, x)
    assert model.read(result.aux) == (4, 28.0)
    bad = step(scaling, model, result.aux, x.at[3].set(jnp.nan))
    assert not bad.finite
    assert model.read(bad.aux) == (4, 28.0)


def test_accumulated_statistics_are_those_of_sequential_steps(batch):
    (x, y), steps = batch, 4
    model, state = make_model("batch")
    step = mpx.accumulate(
        loss_fn, steps, batch_argnums=(2, 3), has_aux=True, policy=POLICIES["f32"]
    )
    result = eqx.filter_jit(step)(NoLossScaling(), model, state, x, y)
    preds = []
    for i in range(steps):
        (_, (state, pred)), _ = reference(model, state, x[i::steps], y[i::steps])
        preds.append(pred)
    assert_close(result.aux[0], state, 10 * F32_EPS)
    assert_close(result.aux[1], jnp.stack(preds), 40 * F32_EPS)


# --- State that a finite gradient leaves spoilt ---------------------------------------


class Squares(eqx.Module):
    """Keeps a running second moment, squared in the dtype of the input."""

    index: eqx.nn.StateIndex

    def __init__(self, value=1.0):
        self.index = eqx.nn.StateIndex(jnp.float32(value))

    def __call__(self, x, state):
        square = jnp.mean(lax.stop_gradient(x) ** 2).astype(jnp.float32)
        return state.set(self.index, 0.9 * state.get(self.index) + 0.1 * square)


def squares_loss(w, layer, state, x):
    state = layer(x, state)
    return jnp.sum(mpx.cast_to_float32(w * x)), state


TOO_LARGE = jnp.full(4, 300.0)  # its square exceeds f16, its gradient does not


def test_state_that_becomes_infinite_skips_the_step_and_is_rolled_back(window):
    layer, state = eqx.nn.make_with_state(Squares)()
    take = window(squares_loss, 3)
    args = (DynamicLossScaling.pow2(8.0), jnp.float32(1.0), layer, state)
    result = take(*args, TOO_LARGE)
    assert mpx.all_finite((result.grads, result.value))
    assert not result.finite
    assert int(result.scaling.skipped) == 1
    assert_trees_equal(result.aux, state)
    assert take(*args, TOO_LARGE / 300).finite


def test_paper_functions_look_at_the_state_too():
    layer, state = eqx.nn.make_with_state(Squares)()
    scaling, finite, _, after = mpx.filter_grad(
        squares_loss, DynamicLossScaling.pow2(8.0), has_aux=True
    )(jnp.float32(1.0), layer, state, TOO_LARGE)
    assert not finite
    assert int(scaling.skipped) == 1
    assert_trees_equal(after, state)


def test_state_that_was_infinite_before_does_not_stop_the_training():
    layer, state = eqx.nn.make_with_state(Squares)(jnp.inf)
    result = mpx.value_and_grad(squares_loss, has_aux=True)(
        DynamicLossScaling.pow2(8.0), jnp.float32(1.0), layer, state, jnp.ones(4)
    )
    assert result.finite


def linen_squares(w, batch_stats, x):
    square = jnp.mean(lax.stop_gradient(x) ** 2).astype(jnp.float32)
    stats = {
        "norm": {"mean": jnp.zeros(()), "var": batch_stats["norm"]["var"] + square}
    }
    return jnp.sum(mpx.cast_to_float32(w * x)), stats


def linen_named(w, batch_stats, x):
    value, stats = linen_squares(w, batch_stats, x)
    return value, {"updates": {"batch_stats": stats}, "x": x}


def linen_in_a_state(w, state, x):
    return linen_squares(w, state["batch_stats"], x)


STATS = {"norm": {"mean": jnp.float32(0.5), "var": jnp.float32(1.0)}}
# How Linen's statistics go in and come back.
LINEN = {
    "bare": (linen_squares, STATS, lambda aux: aux),
    "named": (linen_named, STATS, lambda aux: aux["updates"]["batch_stats"]),
    "in a state": (linen_in_a_state, {"batch_stats": STATS}, lambda aux: aux),
}


@pytest.mark.parametrize(("loss", "given", "of"), LINEN.values(), ids=LINEN)
def test_linen_statistics_that_become_infinite_are_rolled_back(loss, given, of, window):
    take = functools.partial(
        window(loss, 2), DynamicLossScaling.pow2(8.0), jnp.float32(1.0), given
    )
    result = take(TOO_LARGE)
    assert mpx.all_finite((result.grads, result.value))
    assert not result.finite
    assert_trees_equal(of(result.aux), STATS)
    result = take(jnp.ones(4))
    assert result.finite
    # One is added in each part of a window.
    parts = 2 if window is WINDOWS["accumulate"] else 1
    assert_trees_equal(of(result.aux)["norm"]["var"], jnp.float32(1.0 + parts))


def average_loss(w, batch_stats, x):
    """Has a running average by itself for its state, and results that look like it."""
    value, square = jnp.sum(mpx.cast_to_float32(w * x)), jnp.mean(x * x)
    new = batch_stats + mpx.cast_to_float32(lax.stop_gradient(square))
    return value, {"batch_stats": new, "loss": value, "before": batch_stats}


def collection_loss(w, batch_stats, x):
    value, new = linen_squares(w, batch_stats, x)
    return value, {"batch_stats": new, "before": {"batch_stats": batch_stats}}


@pytest.mark.parametrize(
    ("loss", "given"),
    [(average_loss, jnp.float32(1.0)), (collection_loss, STATS)],
    ids=["an array", "a collection"],
)
def test_statistics_are_found_beside_results_that_are_alike(loss, given, window):
    take = functools.partial(
        window(loss, 2), DynamicLossScaling.pow2(8.0), jnp.float32(1.0), given
    )
    result = take(TOO_LARGE)
    assert not result.finite
    assert_trees_equal(result.aux["batch_stats"], given)
    result = take(jnp.ones(4))
    parts = 2 if window is WINDOWS["accumulate"] else 1
    new, old = (jax.tree.leaves(x)[-1] for x in (result.aux["batch_stats"], given))
    assert_trees_equal(new, old + parts)
    before = jax.tree.leaves(result.aux["before"])[-1]
    assert before.shape == (() if parts == 1 else (parts,))


def test_closed_over_linen_statistics_count_though_they_cannot_be_rolled_back():
    def loss(w, x):
        value, stats = linen_squares(w, STATS, x)
        return value, {"batch_stats": stats}

    result = mpx.value_and_grad(loss, has_aux=True)(
        DynamicLossScaling.pow2(8.0), jnp.float32(1.0), TOO_LARGE
    )
    assert not result.finite


def test_results_that_are_no_statistics_are_left_alone():
    def loss(w, batch_stats, x):
        value, _ = linen_squares(w, batch_stats, x)
        return value, {"mean": jnp.float32(jnp.inf), "norm": {"mean": jnp.zeros(())}}

    result = mpx.value_and_grad(loss, has_aux=True)(
        DynamicLossScaling.pow2(8.0), jnp.float32(1.0), STATS, jnp.ones(4)
    )
    assert result.finite
    assert jnp.isinf(result.aux["mean"])


# --- Flax Linen -----------------------------------------------------------------------


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=False)(x)
        return nn.Dense(1)(jnp.tanh(x))


def linen_loss(params, batch_stats, x, y):
    pred, updates = LinenModel().apply(
        {"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"]
    )
    value = jnp.mean((pred[:, 0] - y).astype(jnp.float32) ** 2)
    return value, (updates["batch_stats"], pred)


@pytest.fixture(scope="module")
def variables(batch):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(LinenModel().init)(jax.random.key(0), batch[0])


@pytest.mark.standard_promotion
def test_linen_statistics_stay_f32_while_the_rest_is_half(batch, variables):
    params = variables["params"]
    # No bf16 numbers; the moving average keeps 99 % of them.
    stats = jax.tree.map(lambda leaf: leaf + 100.1, variables["batch_stats"])
    step = jax.jit(mpx.value_and_grad(linen_loss, has_aux=True, policy=BF16))
    result = step(NoLossScaling(), params, stats, *batch)
    new, pred = result.aux
    assert pred.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {np.dtype(np.float32)}
    _, (expected, _) = jax.jit(linen_loss)(params, stats, *batch)
    # Only the 1 % that comes from the batch has seen bf16 numbers, of order one.
    assert_close(new, expected, 0.01 * 4 * float(jnp.finfo(jnp.bfloat16).eps))


@pytest.mark.standard_promotion
def test_linen_statistics_of_a_skipped_step_are_left_out_by_select(batch, variables):
    params, stats = variables["params"], variables["batch_stats"]

    @jax.jit
    def step(scaling, params, stats, x, y):
        result = mpx.value_and_grad(linen_loss, has_aux=True)(
            scaling, params, stats, x, y
        )
        return result, mpx.select_tree(result.finite, result.aux[0], stats)

    x, y = batch
    scaling = DynamicLossScaling.pow2(2.0**8)
    result, new = step(scaling, params, stats, x.at[0, 0].set(jnp.inf), y)
    assert not result.finite
    assert_trees_equal(new, stats)
    result, new = step(result.scaling, params, new, x, y)
    assert result.finite
    assert_trees_equal(new, result.aux[0])


@pytest.mark.standard_promotion
def test_linen_variables_may_come_in_one_dictionary(batch, variables):
    def loss(params, variables, x, y):
        stats = variables["batch_stats"]
        assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {np.dtype(np.float32)}
        return linen_loss(params, stats, x, y)

    step = mpx.value_and_grad(loss, has_aux=True, policy=BF16)
    params = variables["params"]
    result = jax.eval_shape(step, NoLossScaling(), params, variables, *batch)
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)


# --- Linen in parts -------------------------------------------------------------------


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        return nn.Dense(1)(x)[..., 0]


LINEN_NORMED = LinenNormed()


def normed_loss(params, batch_stats, x, y):
    variables = {"params": params, "batch_stats": batch_stats}
    pred, updates = LINEN_NORMED.apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((pred - y) ** 2), {"pred": pred, **updates}


def of_one_dictionary(variables, x, y):
    return normed_loss(variables["params"], variables["batch_stats"], x, y)


def in_turn(variables, x, y, steps):
    """Returns gradient, predictions and statistics of parts one after another, in f32."""
    params, stats = variables["params"], variables["batch_stats"]
    grads, preds = [], []
    for i in range(steps):
        grad, aux = jax.grad(normed_loss, has_aux=True)(
            params, stats, x[i::steps], y[i::steps]
        )
        stats = aux["batch_stats"]
        grads.append(grad)
        preds.append(aux["pred"])
    mean = jax.tree.map(lambda *g: np.mean(g, axis=0), *grads)
    return mean, np.stack(preds), stats


PLACES = {
    "two arguments": (
        normed_loss,
        (2, 3),
        lambda v: (v["params"], v["batch_stats"]),
        lambda grads: grads,
    ),
    "differentiated": (
        of_one_dictionary,
        (1, 2),
        lambda v: (v,),
        lambda grads: grads["params"],
    ),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("loss", "argnums", "put", "of"), PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("steps", [1, 4])
def test_linen_statistics_are_those_of_parts_in_turn(
    batch, steps, loss, argnums, put, of
):
    x, y = batch
    variables = LINEN_NORMED.init(jax.random.key(0), x)
    grads, preds, stats = in_turn(variables, x, y, steps)
    step = jax.jit(
        mpx.accumulate(loss, steps, batch_argnums=argnums, has_aux=True, policy="f32")
    )
    result = step(NoLossScaling(), *put(variables), x, y)
    # The same operations in f32, fused differently; predictions are of order 1.
    assert_close(result.aux["batch_stats"], stats, 10 * F32_EPS)
    assert_close(of(result.grads), grads, 100 * F32_EPS)
    np.testing.assert_allclose(result.aux["pred"], preds, rtol=0, atol=100 * F32_EPS)
    # What comes out goes in again.
    again = {"params": variables["params"], "batch_stats": result.aux["batch_stats"]}
    again = step(NoLossScaling(), *put(again), x, y)
    assert jax.tree.map(jnp.shape, again.aux) == jax.tree.map(jnp.shape, result.aux)


def test_statistics_of_two_models_are_told_apart_by_their_names(batch):
    x, y = batch
    variables = LINEN_NORMED.init(jax.random.key(0), x)
    teacher = jax.tree.map(lambda leaf: leaf + 1, variables)
    params, stats = variables["params"], variables["batch_stats"]

    def loss(params, teacher, student, x, y, key):
        value, aux = normed_loss(params, student["batch_stats"], x, y)
        value += 0 * normed_loss(**teacher, x=x, y=y)[0]
        return value, {key: {"batch_stats": aux["batch_stats"]}}

    step = mpx.accumulate(loss, 2, batch_argnums=(3, 4), has_aux=True, policy="f32")
    args = (NoLossScaling(), params, teacher, {"batch_stats": stats}, x, y)
    result = step(*args, "student")
    expected = in_turn(variables, x, y, 2)[2]
    assert_close(result.aux["student"]["batch_stats"], expected, 10 * F32_EPS)
    match = "`new/batch_stats`.*may replace `teacher/batch_stats` or `student/batch_sta"
    with pytest.raises(ValueError, match=match):
        step(*args, "new")
