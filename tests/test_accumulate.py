"""Accumulation: many small batches are worth one large batch, and are one step."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import (
    POLICIES,
    count_traces,
    exact_problem,
    mlp,
    mlp_batch,
    mlp_loss,
    squared_error,
)
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

BATCH = (1, 2)


@pytest.fixture
def problem():
    return exact_problem()


def args_of(problem):
    return jax.tree.map(jnp.asarray, (problem.w, problem.x, problem.y))


# --- The numbers are those of the large batch -----------------------------------------


@pytest.mark.parametrize(
    ("name", "steps"),
    [("f32", 4), ("f16", 4), ("bf16", 1), ("bf16", 4), ("bf16", 16)],
)
def test_result_is_that_of_the_large_batch(name, steps, problem):
    step = jax.jit(
        mpx.accumulate(squared_error, steps, batch_argnums=BATCH, policy=POLICIES[name])
    )
    result = step(DynamicLossScaling.pow2(2.0**8, period=1), *args_of(problem))
    assert_trees_equal(result.value, np.float32(problem.value))
    assert_trees_equal(result.grads, problem.grad)
    assert result.finite
    assert result.aux is None
    # One adjustment for the window, not one for each part.
    assert float(result.scaling.loss_scaling) == 2.0**9


def test_f32_gradient_differs_only_by_the_rounding_of_the_sums():
    samples, (x, y), model = 32, mlp_batch(32), mlp()

    @eqx.filter_jit
    def compare(model, x, y):
        step = mpx.accumulate(mlp_loss, 8, batch_argnums=BATCH, policy=POLICIES["f32"])
        per_sample = jax.vmap(eqx.filter_grad(mlp_loss), in_axes=(None, 0, 0))
        size = per_sample(model, x[:, None], y[:, None])
        size = jax.tree.map(lambda g: jnp.mean(jnp.abs(g), axis=0), size)
        expected = eqx.filter_grad(mlp_loss)(model, x, y)
        return step(NoLossScaling(), model, x, y).grads, expected, size

    eps = float(np.finfo(np.float32).eps)
    leaves = map(jax.tree.leaves, compare(model, x, y))
    for grad, expected, size in zip(*leaves, strict=True):
        assert grad.dtype == jnp.float32
        # Two orders of summing n numbers differ by at most n roundings of the largest
        # sum there can be.
        assert np.all(np.abs(grad - expected) <= samples * eps * size)


def test_parts_can_be_added_up_instead_of_averaged(problem):
    loss = lambda w, x, y: jnp.sum((x @ w - y) ** 2)  # noqa: E731
    step = mpx.accumulate(loss, 4, batch_argnums=BATCH, mean=False)
    result = jax.jit(step)(DynamicLossScaling.pow2(8.0), *args_of(problem))
    assert_trees_equal(result.value, np.float32(problem.value * 16))
    assert_trees_equal(result.grads, problem.grad * 16)


def test_parts_take_every_nth_row():
    seen = mpx.accumulate(
        lambda w, x: (jnp.sum(x * w), x), 3, has_aux=True, policy=POLICIES["f32"]
    )(NoLossScaling(), jnp.float32(1.0), jnp.arange(6.0)).aux
    np.testing.assert_array_equal(seen, [[0, 3], [1, 4], [2, 5]])


def test_sum_does_not_stand_still():
    # Gradients 256, 1, 1, …: from 256 on bf16 counts in twos, so a bf16 sum stays 256.
    steps = 65
    x = jnp.ones(steps).at[0].set(256.0)
    total = lax.fori_loop(
        0, steps, lambda i, s: s + x[i].astype(jnp.bfloat16), jnp.bfloat16(0)
    )
    assert total == 256.0
    step = mpx.accumulate(
        lambda w, x: jnp.sum(w * x), steps, mean=False, policy=POLICIES["bf16"]
    )
    result = step(NoLossScaling(), jnp.float32(1.0), x)
    assert_trees_equal(result.grads, jnp.float32(256 + 64))
    assert_trees_equal(result.value, jnp.float32(256 + 64))


def test_sum_is_wide_though_parameters_and_gradients_are_half():
    steps = 65
    x = jnp.ones(steps).at[0].set(256.0)
    step = mpx.accumulate(
        lambda w, x: jnp.sum(w * x), steps, mean=False, policy="bf16", grad_dtype="bf16"
    )
    result = step(NoLossScaling(), jnp.bfloat16(1.0), x)
    assert_trees_equal(result.grads, jnp.bfloat16(256 + 64))


def test_parts_of_16_bit_parameters_are_summed_unrounded():
    # Each part is rounded to 1 in bf16.
    x = jnp.full(8, 1 + 2.0**-12)
    step = mpx.accumulate(lambda w, x: jnp.mean(w * x), 4, policy="p=bf16,c=f32")
    result = step(NoLossScaling(), jnp.bfloat16(1.0), x)
    assert_trees_equal(result.grads, jnp.float32(1 + 2.0**-12))


def test_scaled_sum_may_exceed_f16():
    # Each part fits into f16 with the scale; their sum, 16 * 49152, does not.
    step = mpx.accumulate(lambda w, x: jnp.sum(w * x), 16, mean=False)
    result = step(StaticLossScaling(2.0**14), jnp.float32(1.0), jnp.full(16, 3.0))
    assert result.finite
    assert_trees_equal(result.grads, jnp.float32(48.0))


def test_accumulated_training_is_that_of_large_batches(problem):
    optimizer = optax.sgd(0.125)
    transforms = (
        mpx.value_and_grad(squared_error),
        mpx.accumulate(squared_error, 8, batch_argnums=BATCH),
    )
    results = []
    for transform in transforms:

        @jax.jit
        def run(scaling, w, x, y, transform=transform):
            def body(carry, _):
                scaling, w = carry
                result = transform(scaling, w, x, y)
                w, _ = mpx.optimizer_update(
                    w, optimizer, optimizer.init(w), result.grads, result.finite
                )
                return (result.scaling, w), result.value

            return lax.scan(body, (scaling, w), length=3)

        results.append(run(DynamicLossScaling.pow2(2.0**18), *args_of(problem)))
    # The first steps overflow and are skipped, by both alike; then the first update of
    # the exact problem is exact.
    assert_trees_equal(results[0], results[1])
    assert int(results[0][0][0].skipped) > 0


# --- One window is one step -----------------------------------------------------------


def test_one_bad_part_spoils_the_window(problem):
    w, x, y = args_of(problem)
    x = inject_nonfinite(x, jnp.inf, index=21)
    step = jax.jit(mpx.accumulate(squared_error, 8, batch_argnums=BATCH))
    result = step(DynamicLossScaling.pow2(2.0**8), w, x, y)
    assert not result.finite
    assert float(result.scaling.loss_scaling) == 2.0**7
    assert int(result.scaling.skipped) == 1


def test_opposite_infinities_do_not_cancel():
    x = jnp.array([jnp.inf, -jnp.inf])
    step = mpx.accumulate(lambda w, x: jnp.sum(w * x), 2, policy=POLICIES["f32"])
    assert not step(NoLossScaling(), jnp.float32(1.0), x).finite


def test_whole_window_is_retried_at_one_scale():
    # Only the part that holds 3.0 overflows at 2^15; all are repeated.
    x = jnp.array([1.0, 1.0, 3.0, 1.0])
    step = mpx.accumulate(lambda w, x: jnp.sum(w * x), 4, retry=5)
    result = step(DynamicLossScaling.pow2(2.0**16), jnp.float32(1.0), x)
    assert result.finite
    assert_trees_equal(result.grads, jnp.float32(1.5))
    assert float(result.scaling.loss_scaling) == 2.0**14
    assert int(result.scaling.skipped) == 2
    assert int(result.scaling.counter) == 1


def test_loop_is_traced_once_and_the_loss_a_fixed_number_of_times(problem):
    loss, traces = count_traces(squared_error)
    step = jax.jit(mpx.accumulate(loss, 4, batch_argnums=BATCH))
    scaling = DynamicLossScaling.pow2(2.0**8, period=1)
    counts = set()
    for _ in range(3):
        scaling = step(scaling, *args_of(problem)).scaling
        counts.add(len(traces))
    assert len(counts) == 1
    assert len(traces) <= 3  # not once for each part


# --- What goes in and what comes out --------------------------------------------------


def test_aux_is_stacked_and_static_parts_stay(problem):
    def loss(w, x, y):
        aux = {"pred": x @ w, "name": "part", "none": None, "count": 3}
        return squared_error(w, x, y), aux

    step = mpx.accumulate(loss, 4, batch_argnums=BATCH, has_aux=True)
    result = step(DynamicLossScaling.pow2(2.0**8), *args_of(problem))
    pred = (problem.x @ problem.w).astype(np.float16)
    expected = np.stack([pred[i::4] for i in range(4)])
    assert_trees_equal(
        result.aux, {"pred": expected, "name": "part", "none": None, "count": 3}
    )


def test_batch_may_be_any_pytree_with_static_leaves(problem):
    def loss(w, batch, power):
        assert batch["mode"] == "train"
        assert batch["labels"].dtype == jnp.int32
        assert batch["extra"] is None
        error = batch["x"] @ w - batch["labels"].astype(w.dtype)
        return jnp.mean(error**power)

    w, x, y = args_of(problem)
    batch = {"x": x, "labels": y.astype(jnp.int32), "mode": "train", "extra": None}
    result = mpx.accumulate(loss, 4)(DynamicLossScaling.pow2(2.0**8), w, batch, 2)
    assert_trees_equal(result.grads, problem.grad)


def test_arrays_of_other_sizes_and_closed_over_ones_go_to_every_part(problem):
    w, x, y = args_of(problem)
    table = jnp.arange(16.0)  # as many rows as the batch, but no part of it

    def loss(w, x, y, factors):
        return squared_error(w, x, y) * factors[1] * table[1]

    step = mpx.accumulate(loss, 4, batch_argnums=BATCH, policy="f32")
    result = step(NoLossScaling(), w, x, y, jnp.ones(3))
    assert_trees_equal(result.grads, problem.grad)


def test_one_part_may_have_arguments_of_any_size(problem):
    step = mpx.accumulate(squared_error, 1, policy="f32")
    assert_trees_equal(step(NoLossScaling(), *args_of(problem)).grads, problem.grad)


def test_keyword_arguments_go_to_every_part(problem):
    def loss(w, x, y, *, weight):
        assert weight.dtype == jnp.float16
        return squared_error(w, x, y) * weight

    step = mpx.accumulate(loss, 4, batch_argnums=BATCH)
    result = step(
        DynamicLossScaling.pow2(2.0**8), *args_of(problem), weight=jnp.ones(())
    )
    assert_trees_equal(result.grads, problem.grad)


def test_several_arguments_can_be_differentiated():
    loss = lambda a, x, b: jnp.mean(a["w"] * x) + b  # noqa: E731
    step = mpx.accumulate(loss, 2, argnums=(2, 0))
    result = step(
        StaticLossScaling(8.0),
        {"w": jnp.float32(1.0)},
        jnp.arange(4.0),
        jnp.float32(2.0),
    )
    assert_trees_equal(result.grads, (jnp.float32(1.0), {"w": jnp.float32(1.5)}))


def test_decorator_takes_its_options(problem):
    @mpx.accumulate(steps=4, batch_argnums=BATCH, policy=POLICIES["bf16"])
    def loss(w, x, y):
        """The loss."""
        assert w.dtype == jnp.bfloat16
        return squared_error(w, x, y)

    result = loss(NoLossScaling(), *args_of(problem))
    assert_trees_equal(result.grads, problem.grad)
    assert loss.__doc__ == "The loss."


# --- Keys -----------------------------------------------------------------------------


def masked(w, x, key):
    key = key["dropout"] if isinstance(key, dict) else key
    mask = jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)
    return jnp.sum(mask * x * w), mask


KEYS = {
    "typed": jax.random.key(7),
    "raw": jax.random.PRNGKey(7),
    "numpy": np.asarray(jax.random.PRNGKey(7)),
    "other algorithm": jax.random.key(7, impl="rbg"),
    "in a dictionary": {"dropout": jax.random.key(7), "train": True},
}


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("typed", "argument"),
        ("raw", "argument"),
        ("numpy", "keyword"),
        ("raw", "batch"),
        ("in a dictionary", "batch"),
        ("other algorithm", "with parameters"),
    ],
)
def test_each_part_gets_its_own_key(name, where):
    key, x, steps = KEYS[name], jnp.ones((6, 5)), 3
    plain = key["dropout"] if isinstance(key, dict) else key
    expected = [
        jax.random.bernoulli(jax.random.fold_in(plain, i), 0.5, (2, 5))
        for i in range(steps)
    ]
    assert not np.array_equal(expected[0], expected[1])  # the premise
    options = {"has_aux": True, "policy": "f32", "mean": False}
    w = jnp.float32(2.0)
    calls = {
        "argument": lambda take: take(masked)(NoLossScaling(), w, x, key),
        "keyword": lambda take: take(masked)(NoLossScaling(), w, x, key=key),
        "batch": lambda take: take(lambda w, batch: masked(w, *batch))(
            NoLossScaling(), w, (x, key)
        ),
        "with parameters": lambda take: take(lambda p, x: masked(p[0], x, p[1]))(
            NoLossScaling(), (w, key), x
        ),
    }
    take = functools.partial(mpx.accumulate, steps=steps, **options)
    result = calls[where](take)
    np.testing.assert_array_equal(result.aux, np.float32(expected))
    grads = result.grads[0] if where == "with parameters" else result.grads
    assert float(grads) == float(np.sum(expected))
    # The same key gives the same masks, and one part the key itself.
    np.testing.assert_array_equal(calls[where](take).aux, result.aux)
    alone = calls[where](functools.partial(mpx.accumulate, steps=1, **options))
    whole = jax.random.bernoulli(plain, 0.5, x.shape)
    np.testing.assert_array_equal(alone.aux[0], np.float32(whole))


def test_several_keys_in_one_array_are_folded_one_by_one():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    loss = lambda w, x, keys: (w * jnp.sum(x), jax.random.key_data(keys))  # noqa: E731
    step = mpx.accumulate(loss, 4, has_aux=True, policy="f32")
    seen = step(NoLossScaling(), jnp.float32(1.0), jnp.ones(4), keys).aux
    for i in range(4):
        one = jax.random.key_data(jax.random.fold_in(keys[1, 2], i))
        np.testing.assert_array_equal(seen[i, 1, 2], one)


def test_shards_of_a_part_draw_different_numbers():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(jnp.ones((8, 5)), NamedSharding(mesh, P("data")))
    step = mpx.accumulate(masked, 2, has_aux=True, policy="f32", axis_name="data")
    masks = jax.jit(step)(NoLossScaling(), jnp.float32(1.0), x, KEYS["typed"]).aux
    assert masks.shape == (2, 2, 2, 5)
    for i in range(4):
        key = jax.random.fold_in(KEYS["typed"], i)
        expected = jax.random.bernoulli(key, 0.5, (2, 5))
        np.testing.assert_array_equal(masks[i // 2, i % 2], np.float32(expected))


def test_random_keys_can_be_split_like_the_batch():
    keys = jax.random.split(jax.random.key(0), 4)
    loss = lambda w, key: (w * w, jax.random.key_data(key))  # noqa: E731
    step = mpx.accumulate(loss, 4, has_aux=True, policy=POLICIES["bf16"])
    result = step(NoLossScaling(), jnp.float32(3.0), keys)
    np.testing.assert_array_equal(result.aux[:, 0], jax.random.key_data(keys))
    assert_trees_equal(result.grads, jnp.float32(6.0))


# --- Several devices ------------------------------------------------------------------


@pytest.mark.parametrize("reduce_dtype", [None, "compute"])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("count", [2, 1])
def test_result_is_the_same_under_jit_shard_map_and_alone(count, mean, reduce_dtype):
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), (AxisType.Auto,), devices=devices)
    # Whole numbers, exact in each format and in any order.
    w, x = jnp.full(4096, 2.0), jnp.tile(jnp.arange(8.0)[:, None], (1, 4096))
    reduced = jnp.mean if mean else jnp.sum

    def loss(w, x):
        return reduced(x @ w)

    policy = mpx.Policy(compute_dtype="bf16", reduce_dtype=reduce_dtype)
    step = mpx.accumulate(loss, 2, mean=mean, policy=policy, axis_name="data")
    mapped = jax.shard_map(
        lambda w, x: step(NoLossScaling(), w, x)[:3],
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    under_jit = jax.jit(step)(NoLossScaling(), w, rows)
    value, _, grads = jax.jit(mapped)(w, rows)
    expected, grad = jax.value_and_grad(loss)(w, x)
    for result in ((under_jit.value, under_jit.grads), (value, grads)):
        assert_trees_equal(result, (expected, grad))


def test_sum_over_a_vmapped_axis_is_a_sum():
    step = mpx.accumulate(
        lambda w, x: jnp.sum(w * x), 2, mean=False, policy="f32", axis_name="data"
    )
    mapped = jax.vmap(step, in_axes=(None, None, 0), axis_name="data")
    result = mapped(NoLossScaling(), jnp.float32(1.0), jnp.arange(12.0).reshape(3, 4))
    np.testing.assert_array_equal(result.grads, np.full(3, 66.0))
    np.testing.assert_array_equal(result.value, np.full(3, 66.0))


# --- Sharded batches stay where they are ----------------------------------------------


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_batch_is_not_moved(axis_type):
    problem = exact_problem(samples=32, features=4)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    rows = NamedSharding(mesh, P("data"))
    w = jax.device_put(problem.w, NamedSharding(mesh, P()))
    x, y = jax.device_put((problem.x, problem.y), rows)
    step = jax.jit(
        mpx.accumulate(squared_error, 4, batch_argnums=BATCH, policy=POLICIES["bf16"])
    )
    with jax.set_mesh(mesh):
        compiled = step.lower(NoLossScaling(), w, x, y).compile()
        result = compiled(NoLossScaling(), w, x, y)
    text = compiled.as_text() or ""
    assert "all-reduce" in text  # the premise: collectives would be seen
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    assert_trees_equal(result.grads, problem.grad)


# --- Errors ---------------------------------------------------------------------------

ONES = jnp.ones(8)
ERRORS = {
    "steps": (
        lambda: mpx.accumulate(squared_error, 0),
        ValueError,
        "`steps` must be at least 1, but 0",
    ),
    "not divisible": (
        lambda: mpx.accumulate(squared_error, 3)(NoLossScaling(), ONES, ONES),  # pyright: ignore[reportCallIssue]
        ValueError,
        r"batch \(`x`\) has shape \(8,\).*3 equal parts.*multiple of 3",
    ),
    "leaf of a batch": (
        lambda: mpx.accumulate(squared_error, 4)(  # pyright: ignore[reportCallIssue]
            NoLossScaling(), ONES, {"x": [ONES, jnp.ones((6, 2))]}
        ),
        ValueError,
        r"batch \(`x/x/1`\) has shape \(6, 2\)",
    ),
    "scalar leaf": (
        lambda: mpx.accumulate(squared_error, 2)(NoLossScaling(), ONES, jnp.ones(())),  # pyright: ignore[reportCallIssue]
        ValueError,
        r"`x`\) has shape \(\)",
    ),
    "batch by keyword": (
        lambda: mpx.accumulate(squared_error, 2)(NoLossScaling(), ONES, x=ONES),  # pyright: ignore[reportCallIssue]
        TypeError,
        "Argument 1 is the batch, but only 1 arguments were passed by position",
    ),
    "batch differentiated": (
        lambda: mpx.accumulate(squared_error, 2, argnums=(0, 1))(  # pyright: ignore[reportCallIssue]
            NoLossScaling(), ONES, ONES
        ),
        ValueError,
        "both a batch and differentiated.*`batch_argnums`",
    ),
    "batch differentiated, counted from the end": (
        lambda: mpx.accumulate(squared_error, 2, argnums=-1)(  # pyright: ignore[reportCallIssue]
            NoLossScaling(), ONES, ONES
        ),
        ValueError,
        "both a batch and differentiated",
    ),
    "batch counted from the end": (
        lambda: mpx.accumulate(squared_error, 2, batch_argnums=-1),
        ValueError,
        "`batch_argnums` must be 0 or more, but -1",
    ),
    "second batch": (
        lambda: mpx.accumulate(squared_error, 8)(NoLossScaling(), ONES, ONES, ONES),
        ValueError,
        r"`y` has 8 rows, as the batch has, but it is not split.*"
        r"`batch_argnums=\(1, 2\)`.*close over it",
    ),
    "second batch, named": (
        lambda: mpx.accumulate(squared_error, 8, batch_argnums=1)(
            NoLossScaling(), ONES, ONES, {"labels": ONES, "weights": jnp.ones(3)}
        ),
        ValueError,
        "`y/labels` has 8 rows",
    ),
    "second batch by keyword": (
        lambda: mpx.accumulate(squared_error, 2)(NoLossScaling(), ONES, ONES, y=ONES),
        ValueError,
        "`y` has 8 rows.*by position, and add that to `batch_argnums`",
    ),
    "sizes that differ": (
        lambda: mpx.accumulate(squared_error, 4)(  # pyright: ignore[reportCallIssue]
            NoLossScaling(), ONES, {"x": ONES, "y": ONES[:4]}
        ),
        ValueError,
        r"8 rows in one array \(`x/x`\) and 4 in another \(`x/y`\).*one leading size",
    ),
    "raw keys or rows": (
        lambda: mpx.accumulate(squared_error, 2)(
            NoLossScaling(), ONES, ONES[:2], jax.random.PRNGKey(0)
        ),
        ValueError,
        r"`y` is a uint32 array of shape \(2,\).*may hold raw PRNG keys",
    ),
    "raw key in a model": (  # it may be any array: nothing is guessed
        lambda: mpx.accumulate(squared_error, 2)(  # pyright: ignore[reportCallIssue]
            NoLossScaling(), {"w": ONES, "seed": jax.random.PRNGKey(0)}, ONES
        ),
        ValueError,
        r"`w/seed` is a uint32 array.*wrap_key_data",
    ),
    "stack of raw keys": (
        lambda: mpx.accumulate(squared_error, 2)(
            NoLossScaling(), ONES, ONES, jax.random.split(jax.random.PRNGKey(0), 3)
        ),
        ValueError,
        r"uint32 array of shape \(3, 2\).*wrap_key_data",
    ),
    "no scalar loss": (
        lambda: mpx.accumulate(lambda w, x: w * x, 2)(NoLossScaling(), ONES[:4], ONES),
        TypeError,
        r"must return a real floating scalar.*\(4,\)",
    ),
    "retry": (
        lambda: mpx.accumulate(squared_error, 2, retry=-2),
        ValueError,
        "`retry` must be 0 or more, but -2",
    ),
}


@pytest.mark.parametrize(
    ("mistake", "error", "match"), ERRORS.values(), ids=ERRORS.keys()
)
def test_mistake_is_explained(mistake, error, match):
    with pytest.raises(error, match=f"(?s){match}"):
        mistake()
