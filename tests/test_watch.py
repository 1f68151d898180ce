"""The recorder: it names what went wrong in real runs."""

import logging
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpx
from mpx.inspect import observe, watch
from mpx.optim import flash_adamw, master_params

KEY = jax.random.key(0)
BAD = 5  # the step at which a gradient is made infinite


class Mlp(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self):
        self.up, self.down = (eqx.nn.Linear(4, 4, key=KEY) for _ in range(2))

    def __call__(self, x):
        return self.down(jax.nn.tanh(self.up(x)))


@jax.custom_vjp
def break_gradient(w, factor):
    """The identity, whose gradient is multiplied by a factor."""
    return w


break_gradient.defvjp(
    lambda w, factor: (w, factor),
    lambda factor, g: (g * factor, jnp.zeros_like(factor)),
)


def factors(step):
    return jnp.float32(np.inf if step == BAD else 1.0)


def train_equinox(recorder, steps=8, dtype="f16"):
    model, optimizer = Mlp(), optax.sgd(0.1)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    scaling = mpx.DynamicLossScaling.pow2(2.0**10)

    def loss(model, x, factor):
        weight = break_gradient(model.up.weight, factor)
        model = eqx.tree_at(lambda m: m.up.weight, model, weight)
        return jnp.mean(jax.vmap(model)(x) ** 2)

    @eqx.filter_jit
    def step(model, state, scaling, x, factor):
        result = mpx.value_and_grad(mpx.amp(loss, dtype))(scaling, model, x, factor)
        new, state = mpx.optimizer_update(
            model, optimizer, state, result.grads, result.finite
        )
        seen = observe(result, before=model, after=new, lr=0.1)
        return new, state, result.scaling, seen

    for i in range(steps):
        model, state, scaling, seen = step(
            model, state, scaling, jnp.ones((3, 4)), factors(i)
        )
        recorder.record(seen)


def train_nnx(recorder, steps=8):
    class Net(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.down = nnx.Linear(4, 4, rngs=nnx.Rngs(1))

    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    scaling = mpx.DynamicLossScaling.pow2(2.0**10)

    def loss(model, x, factor):
        h = x @ break_gradient(model.up.kernel[...], factor) + model.up.bias[...]
        return jnp.mean(model.down(jnp.tanh(h)) ** 2)

    @nnx.jit
    def step(model, optimizer, scaling, x, factor):
        result = mpx.value_and_grad(loss)(scaling, model, x, factor)
        mpx.optimizer_update(model, optimizer, None, result.grads, result.finite)
        return result.scaling, observe(result)

    for i in range(steps):
        scaling, seen = step(model, optimizer, scaling, jnp.ones((3, 4)), factors(i))
        recorder.record(seen)


TRAININGS = {
    "equinox": (train_equinox, "up/weight"),
    "nnx": (train_nnx, "up/kernel"),
}


class Curves:
    """A writer that keeps the values of each number by step."""

    def __init__(self):
        self.curves = {}

    def __call__(self, step, numbers):
        for name, value in numbers.items():
            self.curves.setdefault(name, {})[step] = value

    def values(self, name):
        return list(self.curves[name].values())


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", TRAININGS)
def test_the_gradient_that_caused_a_skipped_step_is_named(name):
    train, leaf = TRAININGS[name]
    written = Curves()
    recorder = watch(written, every=3)
    train(recorder)
    summary = recorder.summary()
    assert (summary.steps, summary.skipped) == (8, 1)
    (skip,) = summary.skips
    assert skip.step == BAD
    assert skip.leaf == leaf
    assert skip.leaves == 1
    assert skip.infs + skip.nans == 16
    assert skip.loss_scale == 2.0**10
    assert math.isfinite(skip.loss)
    assert leaf in str(summary)
    assert written.values("loss_scaling") == [2.0**10] * 6 + [2.0**9] * 2
    finite = [math.isfinite(x) for x in written.values("grad_norm/up")]
    assert finite == [True] * 5 + [False] + [True] * 2


def test_the_recorded_scale_is_that_of_the_step():
    scaling, written = mpx.DynamicLossScaling.pow2(2.0**10), Curves()
    recorder = watch(written)
    grads = {"w": jnp.array([jnp.inf])}
    for finite in (False, False, True):
        result = mpx.GradResult(
            jnp.float32(1), None, grads, scaling.adjust(finite), jnp.array(finite)
        )
        recorder.record(observe(result, scaling=scaling))
        scaling = result.scaling
    recorder.flush()
    assert written.values("loss_scaling") == [2.0**10, 2.0**9, 2.0**8]


@pytest.mark.standard_promotion
def test_numbers_of_a_step_agree_with_the_arrays():
    params = {"a": {"w": jnp.array([1.0, 2.0])}, "b": {"w": jnp.array([3.0])}}
    grads = {"a": {"w": jnp.array([3.0, 2.0**-30])}, "b": {"w": jnp.array([4.0])}}
    after = {"a": {"w": jnp.array([0.5, 2.0])}, "b": {"w": jnp.array([3.0])}}
    written = {}
    recorder = watch(lambda step, numbers: written.update({step: dict(numbers)}))
    seen = jax.jit(observe)(
        loss=2.0, grads=grads, before=params, after=after, lr=jnp.float32(0.5)
    )
    recorder.record(seen)
    assert not written  # nothing is fetched yet
    recorder.flush()
    numbers = written[0]
    assert numbers["loss"] == 2.0
    assert numbers["lr"] == 0.5
    assert numbers["grad_norm"] == pytest.approx(5.0)
    assert (numbers["grad_norm/a"], numbers["grad_norm/b"]) == (3.0, 4.0)
    assert numbers["underflow/f16"] == pytest.approx(1 / 3)
    assert numbers["stuck"] == pytest.approx(2 / 3)  # 2.0 of a, and 3.0 of b
    assert (numbers["stuck/a"], numbers["stuck/b"]) == (0.5, 1.0)
    assert "66.7 % of the weights" in recorder.notes["stuck"]
    assert "loss_scaling" not in numbers


@pytest.mark.standard_promotion
def test_updates_below_half_an_ulp_are_seen_in_bf16_and_not_in_their_masters():
    params = {"w": jnp.full((64,), 1.0, jnp.bfloat16)}
    grads = {"w": jnp.ones(64)}
    after = jax.tree.map(lambda p: p - jnp.bfloat16(1e-4), params)
    seen = observe(grads=grads, before=params, after=after)
    assert seen.stuck["w"].tolist() == [64, 64]
    optimizer = flash_adamw(1e-4)
    state = optimizer.init(params)
    new, new_state = optimizer.step(params, state, grads)
    before, after = master_params(params, state), master_params(new, new_state)
    seen = observe(grads=grads, before=before, after=after)
    assert seen.stuck["w"].tolist() == [0, 64]


def test_magnitudes_of_delayed_scaling_are_recorded():
    recipe = mpx.recipes.DelayedScaling(history=4)
    func = mpx.fp8(lambda p, x: jnp.sum((x @ p["w"]) ** 2), recipe, min_gain=0)
    params, x = {"w": jnp.full((32, 16), 0.5)}, jnp.full((16, 32), 2.0)
    scales = func.init(params, x)
    result = mpx.value_and_grad(func)(mpx.NoLossScaling(), scales, params, x)
    recorder = watch()
    recorder.record(observe(result))
    numbers = recorder.summary().numbers
    (activation,) = [v for k, v in numbers.items() if k.endswith("/activation")]
    (weight,) = [v for k, v in numbers.items() if k.endswith("/weight")]
    assert (activation, weight) == (2.0, 0.5)


def finite_step(step=0, **extra):
    return observe(loss=1.0 / (step + 1), grads={"w": jnp.ones(3) * step}, **extra)


def test_the_host_waits_every_few_steps_only(monkeypatch):
    fetched = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: fetched.append(len(x)) or get(x))
    recorder = watch(every=4)
    for step in range(10):
        recorder.record(finite_step(step))
    whole = [x for x in fetched if x > 1]
    assert whole[:2] == [4, 4]  # all but the newest, which may not be computed yet
    assert recorder.summary().steps == 10


def test_steps_of_a_scan_are_recorded_one_by_one():
    def body(carry, x):
        return carry, observe(
            loss=x, grads={"w": jnp.array([x, jnp.where(x > 2, jnp.inf, 0)])}
        )

    _, stacked = jax.lax.scan(body, 0, jnp.arange(4.0))
    written = Curves()
    recorder = watch(written)
    recorder.record(finite_step(0))
    recorder.record(stacked)
    recorder.record(finite_step(0))
    recorder.flush()
    assert list(written.curves["loss"]) == [0, 1, 2, 3, 4, 5]
    assert written.values("loss")[1:5] == [0, 1, 2, 3]
    assert [skip.step for skip in recorder.skips] == [4]
    assert written.values("zeros")[1:5] == [1, 0.5, 0.5, 0]


def test_exponents_can_be_left_out_of_some_steps():
    written = Curves()
    recorder = watch(written)
    grads = {"w": jnp.array([1.0, jnp.nan])}
    for step in range(4):
        recorder.record(observe(loss=1.0, grads=grads, exponents=step == 2))
    recorder.flush()
    assert [skip.leaf for skip in recorder.skips] == ["", "", "w", ""]
    assert list(written.curves["grad_norm"]) == [2]


def test_a_run_that_stands_still_is_heard():
    recorder = watch(every=1, stalled_after=3)
    bad = observe(loss=1.0, grads={"w": jnp.array([1.0, jnp.nan])})
    for _ in range(3):
        recorder.record(bad)
    with pytest.warns(RuntimeWarning, match="No step was taken for 3 steps.*`w`"):
        recorder.flush()
    for _ in range(4):  # said once
        recorder.record(bad)
    summary = recorder.summary()
    assert (summary.steps, summary.skipped) == (7, 7)
    assert "No step was taken" in str(summary)


def test_scale_of_a_repeated_step_is_not_that_of_the_step_before_in_time():
    written = Curves()
    recorder = watch(written)
    for step, scale in ((0, 8.0), (1, 8.0), (2, 2.0), (1, 8.0)):
        scaling = mpx.StaticLossScaling(scale)
        result = mpx.value_and_grad(lambda w: w * 1.0)(scaling, jnp.float32(1))
        recorder.record(observe(result), step=step)
    recorder.flush()
    assert written.curves["loss_scaling"] == {0: 8, 1: 8, 2: 8}


def test_writer_that_raises_once_loses_nothing_and_counts_nothing_twice():
    calls, seen = [], []

    def broken(step, numbers):
        calls.append(step)
        if step == 2:
            raise OSError("disk full")

    recorder = watch([broken, lambda step, numbers: seen.append(step)], every=2)
    heard = 0
    for step in range(8):
        try:
            recorder.record(finite_step(step))
        except OSError:
            heard += 1
    assert recorder.summary().steps == 8
    assert heard == 1
    assert calls == seen == [*range(8)]


class Board:
    """The interface of `tensorboardX.SummaryWriter` that is used."""

    def __init__(self):
        self.rows = []

    def add_scalar(self, tag, value, global_step=None):
        self.rows.append((tag, value, global_step))


class Run:
    """The interface of a run of W&B that is used."""

    def __init__(self):
        self.rows = []

    def log(self, numbers, step=None):
        self.rows.append((numbers, step))


def test_writers_get_the_numbers_of_each_step():
    board, run, calls = Board(), Run(), []
    recorder = watch([board, run, lambda step, numbers: calls.append(step)])
    recorder.record(finite_step(1), step=7)
    recorder.flush()
    assert ("loss", 0.5, 7) in board.rows
    assert run.rows[0][1] == 7
    assert run.rows[0][0]["loss"] == 0.5
    assert calls == [7]


@pytest.mark.slow
def test_tensorboard_files_are_written(tmp_path):
    tensorboard = pytest.importorskip("tensorboardX")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        recorder = watch(writer)
        recorder.record(finite_step(1))
        recorder.flush()
    assert any(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: watch(3), TypeError, "`writer` must be a `tensorboardX"),
        (
            lambda: watch(logging.getLogger("run")),
            TypeError,
            "but Logger was given. For a logger pass `lambda",
        ),
        (lambda: watch(every=0), ValueError, "`every` must be"),
        (lambda: observe(loss=1.0, before={}), ValueError, "given together"),
        (
            lambda: observe(loss=1.0, before={"a": jnp.ones(1)}, after={}),
            ValueError,
            "only in the first",
        ),
    ],
)
def test_wrong_arguments_are_reported(untyped, call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_observing_adds_no_callback_and_no_recompilation():
    def step(grads):
        return observe(loss=1.0, grads=grads)

    jitted = jax.jit(step)
    jitted({"w": jnp.ones(3)})
    jitted({"w": jnp.zeros(3)})
    assert jitted._cache_size() == 1  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    assert "callback" not in jitted.lower({"w": jnp.ones(3)}).as_text()


def test_gradient_without_a_name_is_a_leaf():
    recorder = watch()
    recorder.record(observe(loss=1.0, grads=jnp.array([1.0, jnp.nan])))
    assert "(leaf)" in str(recorder.summary())
    assert recorder.skips[0].leaf == "(leaf)"


@pytest.mark.parametrize("exponents", [True, False])
def test_step_is_not_taken_if_loss_or_a_complex_gradient_is_nan(exponents):
    bad = {"loss": jnp.nan}, {"grads": {"c": jnp.array(jnp.nan * 1j)}}
    for given in bad:
        given = {"loss": 1.0, "grads": {"w": jnp.ones(2)}} | given
        assert not observe(**given, exponents=exponents).finite
