"""Gradient functions under amp, under every transformation, and tried again."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from grad_cases import (
    check_exact,
    of_value_and_grad,
)
from models import (
    POLICIES,
    count_traces,
    equations,
    mlp,
    mlp_batch,
    mlp_loss,
    squared_error,
)
from mpx import DynamicLossScaling, GradResult, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal

# --- Functions under amp --------------------------------------------------------------

WRAPPERS = {
    "nothing": lambda f: f,
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "checkpoint": jax.checkpoint,
    "filter_checkpoint": eqx.filter_checkpoint,
    "partial": functools.partial,
    "Partial": eqx.Partial,
    "partial with a keyword": lambda f: functools.partial(f, factor=1.0),
    "jit of a partial": lambda f: eqx.filter_jit(functools.partial(f)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_amp_inside_of_another_wrapper_casts_alone(grad_of, wrap):
    # The sum of the batch exceeds f16, to which the policy would cast the arguments.
    def loss(w, x, factor=1.0):
        return jnp.sum(x) * w * factor

    x = jnp.full(4, 2.0**15)
    low = mpx.amp(loss, dtype="bf16")
    result = grad_of(wrap(low), StaticLossScaling(1.0))(jnp.float32(1.0), x)
    assert_trees_equal(result.grads, jnp.float32(2.0**17))


ARGNUMS = [0, 1, -1, (0,), (1, 0), (0, -1), [0, 1, 2]]


@pytest.mark.parametrize("argnums", ARGNUMS, ids=str)
def test_argnums_mean_what_they_mean_in_jax(grad_of, argnums, problem):
    args = problem.w, problem.x, problem.y
    expected = jax.grad(squared_error, argnums=argnums)(*args)
    result = grad_of(
        squared_error, StaticLossScaling(8.0), argnums=argnums, policy=POLICIES["f32"]
    )(*args)
    assert_trees_equal(result.grads, jax.tree.map(jnp.asarray, expected))
    if isinstance(argnums, int):
        assert not isinstance(result.grads, tuple)
    else:
        assert isinstance(result.grads, tuple)


def test_decorators_work_with_and_without_arguments(problem):
    args = problem.w, problem.x, problem.y
    scaling = StaticLossScaling(8.0)
    plain = mpx.value_and_grad(squared_error)
    with_options = mpx.value_and_grad(policy=POLICIES["bf16"])(squared_error)
    check_exact(plain(scaling, *args), problem)
    check_exact(with_options(scaling, *args), problem)


TRANSFORMATIONS = {
    "value_and_grad": mpx.value_and_grad,
    "filter_grad": lambda f: mpx.filter_grad(f, StaticLossScaling(8.0)),
    "filter_value_and_grad": lambda f: mpx.filter_value_and_grad(
        f, StaticLossScaling(8.0)
    ),
    "calculate_scaled_grad": lambda f: mpx.calculate_scaled_grad(
        f, StaticLossScaling(8.0)
    ),
    "accumulate": lambda f: mpx.accumulate(f, 2),
}


@pytest.mark.parametrize(
    "transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys()
)
def test_name_and_docstring_of_the_loss_survive(transform):
    def my_loss(w):
        """Squares."""
        return w * w

    assert transform(my_loss).__name__ == "my_loss"
    assert transform(my_loss).__doc__ == "Squares."
    assert transform(my_loss).__module__ == __name__


def test_jit_counts_the_scaling_as_the_first_argument():
    # `jax.jit` reads the signature to check positions: here there are three.
    def loss(w, double):
        return w * w * (2.0 if double else 1.0)

    step = jax.jit(mpx.value_and_grad(loss), static_argnums=2)
    result = step(StaticLossScaling(8.0), jnp.float32(3.0), True)
    assert_trees_equal(result.grads, jnp.float32(12.0))


class Trainer:
    def __init__(self, weight):
        self.weight = weight

    def loss(self, w, x, y):
        return squared_error(w, x, y) * self.weight


def test_methods_partials_and_callable_modules_are_losses(problem):
    class Loss(eqx.Module):
        weight: float

        def __call__(self, w, x, y):
            return squared_error(w, x, y) * self.weight

    losses = [
        Trainer(1.0).loss,
        Loss(1.0),
        functools.partial(squared_error, y=problem.y.astype(np.float16)),
        jax.jit(squared_error),
        jax.checkpoint(squared_error),
    ]
    for loss in losses:
        args = [problem.w, problem.x]
        args += [] if isinstance(loss, functools.partial) else [problem.y]
        check_exact(of_value_and_grad(loss, StaticLossScaling(8.0))(*args), problem)


def test_method_of_a_module_is_differentiated_by_its_self(problem):
    class Model(eqx.Module):
        w: jax.Array

        def loss(self, x, y):
            return squared_error(self.w, x, y)

    result = mpx.value_and_grad(Model.loss)(
        StaticLossScaling(8.0), Model(jnp.asarray(problem.w)), problem.x, problem.y
    )
    assert isinstance(result.grads, Model)
    assert_trees_equal(result.grads.w, problem.grad)


def test_result_is_a_named_tuple_of_the_six_parts():
    names = ("value", "aux", "grads", "scaling", "finite", "fp8")
    assert GradResult._fields == names
    result = mpx.value_and_grad(lambda w: w)(NoLossScaling(), 1.0)
    assert tuple(result)[1] is None
    assert result.fp8 is None


# --- Under every transformation -------------------------------------------------------


def as_arrays(problem):
    return jax.tree.map(jnp.asarray, (problem.w, problem.x, problem.y))


WRAPPERS = {
    "jit": jax.jit,
    "filter_jit": eqx.filter_jit,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
}


@pytest.mark.parametrize(
    ("wrap", "name"),
    [("jit", "f32"), ("jit", "bf16"), ("jit", "f16")]
    + [(wrap, "bf16") for wrap in WRAPPERS if wrap != "jit"],
)
def test_result_is_the_same_under(wrap, name, problem):
    @WRAPPERS[wrap]
    def step(scaling, w, x, y):
        return mpx.value_and_grad(squared_error, policy=POLICIES[name])(
            scaling, w, x, y
        )

    result = step(DynamicLossScaling.pow2(2.0**8, period=1), *as_arrays(problem))
    check_exact(result, problem)
    assert float(result.scaling.loss_scaling) == 2.0**9


def test_checkpointed_loss_keeps_its_recomputation(problem):
    loss = jax.checkpoint(squared_error)
    w, x, y = as_arrays(problem)

    def step(w, x, y):
        result = mpx.value_and_grad(loss, policy=POLICIES["bf16"])(
            NoLossScaling(), w, x, y
        )
        return result.grads

    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(w, x, y))}
    assert names & {"remat2", "checkpoint"}
    assert_trees_equal(jax.jit(step)(w, x, y), problem.grad)


def test_vmap_over_samples_gives_per_sample_gradients(problem):
    w, x, y = as_arrays(problem)
    per_sample = jax.vmap(
        mpx.value_and_grad(squared_error, policy=POLICIES["bf16"]),
        in_axes=(None, None, 0, 0),
    )
    result = jax.jit(per_sample)(StaticLossScaling(2.0**8), w, x[:, None], y[:, None])
    residual = problem.x @ problem.w - problem.y
    assert_trees_equal(result.grads, 2 * problem.x * residual[:, None])
    assert_trees_equal(result.value, residual**2)
    assert result.finite.shape == (16,)


def test_vmap_over_scalings_lets_only_one_member_back_off(problem):
    w, x, y = as_arrays(problem)
    scales = jnp.array([2.0**8, 2.0**24, 2.0**4])

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None, None))
    def step(scale, w, x, y):
        scaling = DynamicLossScaling(scale, max_loss_scaling=2.0**24)
        return mpx.value_and_grad(squared_error)(scaling, w, x, y)

    result = step(scales, w, x, y)
    np.testing.assert_array_equal(result.finite, [True, False, True])
    np.testing.assert_array_equal(result.scaling.loss_scaling, [2**8, 2**23, 2**4])
    assert_trees_equal(result.grads[2], problem.grad)


def test_scaling_is_carried_through_a_scan(problem):
    w, x, y = as_arrays(problem)

    @jax.jit
    def run(scaling):
        def body(scaling, _):
            result = mpx.value_and_grad(squared_error)(scaling, w, x, y)
            return result.scaling, (result.grads, scaling.loss_scaling, result.finite)

        return lax.scan(body, scaling, length=8)

    scaling, (grads, scales, finite) = run(DynamicLossScaling.pow2(2.0**18, period=3))
    # The derivative of the loss by itself is the scale, in f16.
    largest = max(1.0, np.max(np.abs(problem.grad)))
    overflow = np.asarray(scales) * largest > 65504
    np.testing.assert_array_equal(finite, ~overflow)
    assert 0 < np.sum(finite) < 8
    for grad, good in zip(grads, finite, strict=True):
        assert not good or np.array_equal(grad, problem.grad)
    assert int(scaling.skipped) == np.sum(~np.asarray(finite))


def test_a_loop_is_traced_once(problem):
    loss, traces = count_traces(squared_error)
    step = jax.jit(mpx.value_and_grad(loss))
    scaling = DynamicLossScaling.pow2(2.0**16, period=1)
    args = as_arrays(problem)
    scales = set()
    for _ in range(6):
        result = step(scaling, *args)
        scaling = result.scaling
        scales.add(float(scaling.loss_scaling))
    assert len(scales) > 1  # it did grow and back off
    assert len(traces) == 1


def test_filter_grad_in_a_jitted_step_is_traced_once(problem):
    loss, traces = count_traces(squared_error)

    @eqx.filter_jit
    def step(scaling, *args):
        scaling, _, grads = mpx.filter_grad(loss, scaling)(*args)
        return scaling, grads

    scaling = DynamicLossScaling(mpx.FLOAT16_MAX, jnp.ones(()), period=1)
    for _ in range(4):
        scaling, _ = step(scaling, *as_arrays(problem))
    assert len(traces) == 1


def test_jitted_step_transfers_nothing(problem):
    step = jax.jit(mpx.value_and_grad(squared_error, retry=1))
    scaling, args = DynamicLossScaling.pow2(2.0**8), as_arrays(problem)
    step(scaling, *args)
    with jax.transfer_guard("disallow"):
        with pytest.raises(Exception, match="[Dd]isallowed.*transfer"):
            jnp.sin(np.ones(3))  # the guard is on
        scaling = step(scaling, *args).scaling
        result = step(scaling, *args)
    check_exact(result, problem)


def test_scaling_and_parameters_can_be_donated(problem):
    w, x, y = as_arrays(problem)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(scaling, w, x, y):
        result = mpx.value_and_grad(squared_error)(scaling, w, x, y)
        return result.scaling, w - result.grads

    scaling = DynamicLossScaling.pow2(2.0**8)
    for _ in range(3):
        before = scaling, w
        scaling, w = step(scaling, w, x, y)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


def test_shape_and_dtype_structs_are_enough_to_evaluate_shapes(problem):
    struct = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), as_arrays(problem)
    )
    scaling = jax.eval_shape(DynamicLossScaling.pow2)
    result = jax.eval_shape(mpx.value_and_grad(squared_error), scaling, *struct)
    assert result.grads.shape == problem.w.shape
    assert result.grads.dtype == result.value.dtype == jnp.float32


# --- The half-precision switch --------------------------------------------------------


def test_jitted_step_follows_the_half_precision_switch():
    @jax.jit
    @mpx.value_and_grad(has_aux=True)
    def step(w, x):
        return jnp.sum(w * x).astype(jnp.float32), w * x

    scaling, w, x = StaticLossScaling(1.0), jnp.float32(1.0), jnp.float32(1e5)
    assert step(scaling, w, x).aux.dtype == jnp.float16
    assert not step(scaling, w, x).finite  # 1e5 is no f16 number
    mpx.set_half_precision_datatype("bfloat16")
    assert step(scaling, w, x).aux.dtype == jnp.bfloat16
    assert step(scaling, w, x).finite
    with mpx.half_precision("f16"):
        assert step(scaling, w, x).aux.dtype == jnp.float16
    assert step(scaling, w, x).aux.dtype == jnp.bfloat16


def test_filter_grad_made_before_the_switch_follows_it():
    seen = []

    def loss(w):
        seen.append(w.dtype)
        return w * w

    grad = mpx.filter_grad(loss, StaticLossScaling(8.0))
    scaled = mpx.calculate_scaled_grad(loss, StaticLossScaling(8.0))
    for half in (jnp.float16, jnp.bfloat16):
        with mpx.half_precision(half):
            jax.eval_shape(grad, jnp.float32(1.0))
            assert jax.eval_shape(scaled, jnp.float32(1.0))[1].dtype == half
    assert seen == [jnp.float16] * 2 + [jnp.bfloat16] * 2


# --- Retry ----------------------------------------------------------------------------


def steep(w, x):
    return jnp.sum(w * x)


STEEP = jnp.float32(1.0), jnp.array([100.0, 200.0, 300.0])
# 600 times the scale must fit into f16, whose largest number is 65504: 2^6.
FIRST_FINITE = 2.0**6


def test_retry_reaches_the_first_finite_scale(grad_of):
    scaling = DynamicLossScaling.pow2(2.0**24, period=10, counter=7)
    result = grad_of(steep, scaling, retry=30)(*STEEP)
    assert result.finite
    assert_trees_equal(result.grads, jnp.float32(600.0))
    assert float(result.scaling.loss_scaling) == FIRST_FINITE
    assert int(result.scaling.skipped) == 18
    assert int(result.scaling.consecutive_skipped) == 0
    assert int(result.scaling.counter) == 1
    if result.value is not None:
        assert_trees_equal(result.value, jnp.float32(600.0))


def test_retry_gives_up_after_that_many_attempts(grad_of):
    scaling = DynamicLossScaling.pow2(2.0**24)
    result = grad_of(steep, scaling, retry=3)(*STEEP)
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 2.0**20
    assert int(result.scaling.skipped) == 4
    assert int(result.scaling.consecutive_skipped) == 4


def test_retry_changes_nothing_where_the_first_attempt_is_finite():
    scaling = DynamicLossScaling.pow2(FIRST_FINITE)
    expected = of_value_and_grad(steep, scaling)(*STEEP)
    result = of_value_and_grad(steep, scaling, retry=5)(*STEEP)
    assert_trees_equal(tuple(result), tuple(expected))


def test_retried_gradient_is_that_of_the_scale_it_reached():
    model, (x, y) = mlp(), mlp_batch()
    step = eqx.filter_jit(mpx.value_and_grad(mlp_loss, retry=30))
    result = step(DynamicLossScaling.pow2(2.0**24), model, x, y)
    assert result.finite
    assert int(result.scaling.skipped) > 0
    reached = StaticLossScaling(result.scaling.loss_scaling)
    expected = eqx.filter_jit(mpx.value_and_grad(mlp_loss))(reached, model, x, y)
    assert_trees_equal(result.grads, expected.grads)


def test_retry_returns_the_aux_of_the_last_attempt_with_its_static_parts():
    loss = lambda w, x: (steep(w, x), {"x": x, "name": "last"})  # noqa: E731
    result = mpx.value_and_grad(loss, has_aux=True, retry=30)(
        DynamicLossScaling.pow2(2.0**10), *STEEP
    )
    assert result.finite
    assert_trees_equal(result.aux, {"x": STEEP[1].astype(jnp.float16), "name": "last"})


def test_retry_works_under_jit_and_vmap():
    @jax.jit
    @jax.vmap
    def step(scale):
        scaling = DynamicLossScaling(scale)
        return mpx.value_and_grad(steep, retry=30)(scaling, *STEEP)

    result = step(jnp.array([2.0**3, 2.0**9]))
    np.testing.assert_array_equal(result.scaling.loss_scaling, [2.0**3, FIRST_FINITE])
    np.testing.assert_array_equal(result.scaling.skipped, [0, 3])
    np.testing.assert_array_equal(result.grads, [600.0, 600.0])


def test_retry_without_a_finite_scale_ends():
    result = mpx.value_and_grad(lambda w: w * jnp.nan, retry=5)(
        DynamicLossScaling.pow2(8.0), jnp.float32(1.0)
    )
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 1.0
    assert int(result.scaling.skipped) == 6
