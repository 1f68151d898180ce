"""Flax NNX: what `nnx.value_and_grad` does, in mixed precision and undone on overflow."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import mpx
from models import POLICIES, count_traces, equations, normal, operand_dtypes
from mpx import DynamicLossScaling, NoLossScaling
from mpx.testing import assert_trees_equal

pytestmark = [
    pytest.mark.standard_promotion,
]

BF16 = POLICIES["bf16"]


class Model(nnx.Module):
    def __init__(self, seed=0):
        # A generator that compiles quickly.
        rngs = nnx.Rngs(seed, dropout=jax.random.key(seed, impl="unsafe_rbg"))
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        hidden = self.norm(self.linear(x))
        return self.head(self.dropout(jnp.tanh(hidden)))


def loss_fn(model, x, y):
    pred = model(x)
    return jnp.mean((pred[:, 0] - y).astype(jnp.float32) ** 2), pred


def plain_loss(model, x, y):
    return loss_fn(model, x, y)[0]


@pytest.fixture(scope="module")
def batch():
    x = normal(1, 16, 4)
    return x, jnp.sin(x.sum(axis=1))


def state_of(model):
    """Returns a copy of everything in a module: parameters, statistics, counters."""
    return jax.tree.map(lambda leaf: leaf, nnx.state(model))


def rest_of(model):
    return jax.tree.map(lambda leaf: leaf, nnx.state(model, nnx.Not(nnx.Param)))


@functools.cache
def make_step(loss, **options):
    @nnx.jit
    def step(model, scaling, *args):
        return mpx.value_and_grad(loss, **options)(scaling, model, *args)

    return step


def run(model, *args, loss=loss_fn, has_aux=True, scaling=None, **options):
    """Takes one step of `value_and_grad` under jit; the model is updated in place."""
    step = make_step(loss, has_aux=has_aux, **options)
    return step(model, NoLossScaling() if scaling is None else scaling, *args)


# --- The same as nnx.value_and_grad ---------------------------------------------------


def test_f32_step_is_that_of_nnx(batch):
    # Without jit, which may fuse the two programs differently: bit for bit.
    ours, theirs = Model(), Model()
    before = state_of(theirs)
    for _ in range(2):
        (value, pred), grads = nnx.value_and_grad(loss_fn, has_aux=True)(theirs, *batch)
        result = mpx.value_and_grad(loss_fn, has_aux=True, policy=POLICIES["f32"])(
            NoLossScaling(), ours, *batch
        )
        assert_trees_equal((result.value, result.aux), (value, pred))
        assert_trees_equal(result.grads, grads)
        assert_trees_equal(state_of(ours), state_of(theirs))
    # The premise: there was something to update.
    assert int(theirs.dropout.rngs.count[...]) == 2
    assert not np.array_equal(theirs.norm.mean[...], before["norm"]["mean"][...])


@pytest.mark.parametrize("mixed", [True, False])
def test_paper_functions_update_the_module_too(mixed, batch):
    ours, theirs = Model(), Model()
    expected = nnx.grad(plain_loss)(theirs, *batch)
    _, finite, grads = mpx.filter_grad(
        plain_loss, NoLossScaling(), policy=POLICIES["f32"], use_mixed_precision=mixed
    )(ours, *batch)
    assert finite
    assert_trees_equal(grads, expected)
    assert_trees_equal(state_of(ours), state_of(theirs))


def test_gradients_are_a_state_of_parameters_only(batch):
    result = run(Model(), *batch, policy=BF16)
    assert isinstance(result.grads, nnx.State)
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(result.grads)]
    assert sorted(names) == [
        *("head/bias", "head/kernel", "linear/bias", "linear/kernel"),
        *("norm/bias", "norm/scale"),
    ]
    assert {leaf.dtype for leaf in jax.tree.leaves(result.grads)} == {np.dtype("f4")}


def test_container_of_modules_is_differentiated_like_by_nnx(batch):
    def loss(models, x, y):
        pred = models["b"](jnp.tanh(models["a"](x)) * models["gain"])
        return jnp.mean((pred[:, 0] - y) ** 2)

    def make():
        rngs = nnx.Rngs(0)
        return {
            "a": nnx.Linear(4, 8, rngs=rngs),
            "b": nnx.Linear(8, 1, rngs=rngs),
            "gain": jnp.float32(2.0),
        }

    expected = nnx.grad(loss)(make(), *batch)
    result = mpx.value_and_grad(loss, policy=POLICIES["f32"])(
        NoLossScaling(), make(), *batch
    )
    assert_trees_equal(result.grads, expected)


# --- Mixed precision ------------------------------------------------------------------


def test_products_are_bf16_also_behind_a_batch_norm(batch):
    model = Model()
    graphdef, state = nnx.split(model)

    def step(state, x, y):
        model = nnx.merge(graphdef, state)
        result = mpx.value_and_grad(loss_fn, has_aux=True, policy=BF16)(
            NoLossScaling(), model, x, y
        )
        return result.value, result.grads, result.aux

    assert operand_dtypes(step, state, *batch, primitive="dot_general") == {"bfloat16"}
    _, _, pred = jax.eval_shape(step, state, *batch)
    assert pred.dtype == jnp.bfloat16


def test_statistics_stay_f32_and_are_computed_in_f32(batch):
    x = mpx.cast_to_bfloat16(batch[0])
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    run(norm, x, loss=loss, has_aux=False, policy=BF16)
    exact = np.asarray(x, np.float64)
    # A mean over 16 numbers and a moving average: some four roundings of f32. Those of
    # bf16 would be 65536 times as large.
    eps = 4 * float(np.finfo(np.float32).eps)
    mean, var = 0.01 * exact.mean(axis=0), 0.99 + 0.01 * exact.var(axis=0)
    np.testing.assert_allclose(norm.mean[...], mean, rtol=0, atol=eps)
    np.testing.assert_allclose(norm.var[...], var, rtol=eps)
    assert norm.mean[...].dtype == norm.var[...].dtype == jnp.float32


def test_module_is_otherwise_left_as_it_was(batch):
    model = Model()
    graphdef, params = nnx.graphdef(model), nnx.state(model, nnx.Param)
    params = jax.tree.map(lambda leaf: leaf, params)
    run(model, *batch, policy=BF16)
    assert nnx.graphdef(model) == graphdef
    assert_trees_equal(nnx.state(model, nnx.Param), params)
    assert type(model.norm) is nnx.BatchNorm  # it is run by a class of our own
    assert model.norm.dtype is None


def test_bf16_step_differs_from_f32_only_by_rounding(batch):
    exact, _ = nnx.value_and_grad(plain_loss)(Model(), *batch)
    result = run(Model(), *batch, policy=BF16)
    # Some ten roundings on the way, adding up like a random walk.
    assert result.value != exact
    assert abs(result.value - exact) <= np.sqrt(10) * float(jnp.finfo(jnp.bfloat16).eps)


# --- A skipped step -------------------------------------------------------------------


def test_skipped_step_rolls_back_statistics_and_counters(batch):
    model, (x, y) = Model(), batch
    run(model, x, y, policy=BF16)  # from a state that is not the initial one
    before = state_of(model)
    result = run(model, x.at[0, 0].set(jnp.nan), y, policy=BF16)
    assert not result.finite
    assert_trees_equal(state_of(model), before)
    result = run(model, x, y, policy=BF16)
    assert result.finite
    assert int(model.dropout.rngs.count[...]) == 2


class Counting(nnx.Module):
    """The smallest module with a state that every call changes."""

    def __init__(self):
        self.w = nnx.Param(jnp.float32(1.0))
        self.calls = nnx.Variable(jnp.int32(0))
        self.total = nnx.BatchStat(jnp.float32(0.0))

    def __call__(self, x):
        self.calls[...] += 1
        self.total[...] += jnp.sum(x.astype(jnp.float32))
        return jnp.sum(self.w * x)


def counting_loss(model, x):
    return model(x)


def test_retry_counts_as_one_step():
    model = Counting()
    options = {"loss": counting_loss, "has_aux": False, "policy": POLICIES["f16"]}
    scaling = DynamicLossScaling.pow2(2.0**16)
    result = run(model, jnp.full(4, 100.0), scaling=scaling, retry=30, **options)
    assert result.finite
    assert_trees_equal(result.grads["w"][...], jnp.float32(400.0))
    assert float(result.scaling.loss_scaling) == 2.0**7
    assert int(model.calls[...]) == 1
    assert float(model.total[...]) == 400.0


class Squaring(Counting):
    """Squares its input in the dtype of the input, as a norm written by hand may."""

    def __call__(self, x):
        square = jnp.mean(jax.lax.stop_gradient(x) ** 2)
        self.total[...] += square.astype(jnp.float32)
        self.calls[...] += 1
        return jnp.sum(self.w * x).astype(jnp.float32)


@pytest.mark.parametrize("steps", [None, 2])
def test_statistic_that_becomes_infinite_skips_the_step(steps):
    model, x = Squaring(), jnp.full(4, 300.0)  # f16 holds the gradient, not the square
    options = {"loss": counting_loss, "has_aux": False, "policy": POLICIES["f16"]}
    scaling = DynamicLossScaling.pow2(8.0)
    before = state_of(model)
    if steps is None:
        result = run(model, x, scaling=scaling, **options)
    else:
        result = mpx.accumulate(counting_loss, steps)(scaling, model, x)
    assert mpx.all_finite((result.grads, result.value))
    assert not result.finite
    assert_trees_equal(state_of(model), before)
    result = run(model, jnp.ones(4), scaling=scaling, **options)
    assert result.finite
    assert float(model.total[...]) == 1.0


def test_untouched_variables_cost_no_check():
    # Frozen weights may be most of a model.
    def loss(model, x):
        return jnp.sum(model.w[...] * x) + jnp.sum(model.frozen[...])

    def step(x, frozen):
        model = nnx.Dict(w=nnx.Param(x), frozen=nnx.Variable(frozen))
        return mpx.value_and_grad(loss, policy="f32")(NoLossScaling(), model, x).finite

    jaxpr = jax.make_jaxpr(step)(jnp.ones(3), jnp.ones(7))
    checked = [
        eqn.invars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "is_finite"
    ]
    assert sorted(checked) == [(), (3,)]  # the loss and the gradient


# --- Rngs, sharing, frozen modules ----------------------------------------------------


def test_rngs_given_as_an_argument_advance_and_are_rolled_back(batch):
    def loss(model, rngs, scale):
        noise = jax.random.normal(rngs.noise(), (4,))
        return jnp.sum(model.kernel[...] * scale) + jnp.sum(noise)

    model, rngs = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.Rngs(noise=3)
    options = {"loss": loss, "has_aux": False, "policy": BF16}
    values = [run(model, rngs, jnp.ones(()), **options).value for _ in range(2)]
    assert values[0] != values[1]
    assert int(rngs.noise.count[...]) == 2
    assert not run(model, rngs, jnp.full((), jnp.inf), **options).finite
    assert int(rngs.noise.count[...]) == 2


def test_arrays_beside_nnx_objects_are_cast(batch):
    seen = []

    def loss(model, batch):
        (x, y), rngs = batch["data"], batch["rngs"]
        seen.extend([x.dtype, y.dtype])
        rngs.noise()
        return jnp.mean((model(x)[:, 0] - y) ** 2)

    model, rngs = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.Rngs(noise=3)
    mpx.value_and_grad(loss, policy=BF16)(
        NoLossScaling(), model, {"data": batch, "rngs": rngs}
    )
    assert seen == [jnp.bfloat16] * 2
    assert int(rngs.noise.count[...]) == 1


class Tied(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(4, 4, rngs=rngs)
        self.decoder = nnx.Linear(4, 4, rngs=rngs)
        self.decoder.kernel = self.encoder.kernel
        self.again = self.encoder

    def __call__(self, x):
        return self.again(jnp.tanh(self.decoder(jnp.tanh(self.encoder(x)))))


def tied_loss(model, x, y):
    return jnp.mean((model(x).sum(axis=1) - y) ** 2)


def test_shared_parameters_and_modules_get_one_gradient(batch):
    expected = nnx.grad(tied_loss)(Tied(), *batch)
    step = mpx.value_and_grad(tied_loss, policy=POLICIES["f32"])
    result = step(NoLossScaling(), Tied(), *batch)
    assert_trees_equal(result.grads, expected)
    assert len(jax.tree.leaves(result.grads)) == 3


def test_parameters_shared_by_two_differentiated_modules_get_one_gradient(batch):
    def loss(zeta, alpha, x):
        return jnp.mean(zeta(jnp.tanh(alpha(x))) ** 2)

    def make():
        modules = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
        modules[1].kernel = modules[0].kernel
        return modules

    expected = nnx.grad(loss, argnums=(0, 1))(*make(), batch[0])
    step = mpx.value_and_grad(loss, argnums=(0, 1), policy=POLICIES["f32"])
    result = step(NoLossScaling(), *make(), batch[0])  # pyright: ignore[reportCallIssue]
    assert_trees_equal(result.grads, expected)


# --- Chosen variables -----------------------------------------------------------------


def adapted(dtype=jnp.float32):
    """A linear layer that is frozen, with an adapter of low rank that is trained."""
    rngs = nnx.Rngs(0)
    model = nnx.LoRALinear(
        4, 2, lora_rank=3, rngs=rngs, param_dtype=dtype, lora_param_dtype=jnp.float32
    )
    model.lora.lora_b[...] = normal(2, 3, 2)
    return model


def squared(model, x):
    return jnp.mean(model(x) ** 2)


ADAPTER = nnx.DiffState(0, nnx.LoRAParam)


@pytest.mark.parametrize("argnums", [ADAPTER, (ADAPTER, 1)])
def test_diff_state_chooses_what_is_differentiated(argnums, batch):
    expected = nnx.value_and_grad(squared, argnums=argnums)(adapted(), batch[0])
    step = mpx.value_and_grad(squared, argnums=argnums, policy=POLICIES["f32"])
    result = step(NoLossScaling(), adapted(), batch[0])  # pyright: ignore[reportCallIssue]
    assert_trees_equal((result.value, result.grads), expected)
    assert len(jax.tree.leaves(result.grads)) == 2 + isinstance(argnums, tuple)


def test_adapter_of_16_bit_weights_is_trained_alone_and_without_a_warning(batch):
    model, before = adapted(jnp.bfloat16), state_of(adapted(jnp.bfloat16))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    take = mpx.accumulate(mpx.amp(squared, "f16"), 2, argnums=ADAPTER)
    result = take(DynamicLossScaling.pow2(2.0**8), model, batch[0])  # pyright: ignore[reportCallIssue]
    mpx.optimizer_update(model, optimizer, None, result.grads, result.finite)
    changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), state_of(model), before)
    names = {
        "/".join(map(str, p)) for p, x in nnx.to_flat_state(changed) if x.get_value()
    }
    assert names == {"lora/lora_a", "lora/lora_b"}


def test_diff_state_of_something_else_is_refused(batch):
    step = mpx.value_and_grad(
        lambda w, x: jnp.sum(x @ w), argnums=ADAPTER, policy="bf16"
    )
    with pytest.raises(TypeError, match="DiffState.*`w` holds none"):
        step(NoLossScaling(), jnp.ones((4, 2)), batch[0])  # pyright: ignore[reportCallIssue]


def test_parameter_that_is_also_in_a_frozen_module_is_refused(batch):
    def loss(model, encoder, x):
        return jnp.mean(model(x) ** 2) + jnp.mean(encoder(x) ** 2)

    model = Tied()
    match = "(?s)shared by `model` and `encoder`.*only one is differentiated.*nnx.clone"
    with pytest.raises(ValueError, match=match):
        mpx.value_and_grad(loss)(NoLossScaling(), model, model.encoder, batch[0])


def test_frozen_module_runs_in_half_and_keeps_every_bit(batch):
    seen = []

    def loss(model, teacher, x):
        target = teacher(x)
        seen.append(target.dtype)
        return jnp.mean((model(x) - target) ** 2)

    student, teacher = nnx.Linear(4, 8, rngs=nnx.Rngs(0)), Model(1)
    expected = state_of(teacher)
    before = rest_of(teacher)
    result = run(student, teacher, batch[0], loss=loss, has_aux=False, policy=BF16)
    assert seen == [jnp.bfloat16]
    assert result.finite
    assert set(result.grads) == {"kernel", "bias"}
    # Its weights are no bf16 numbers, and were not rounded to any.
    assert_trees_equal(
        nnx.state(teacher, nnx.Param), nnx.filter_state(expected, nnx.Param)
    )
    kernel = teacher.linear.kernel[...]
    assert np.any(kernel != kernel.astype(jnp.bfloat16).astype(jnp.float32))
    assert int(teacher.dropout.rngs.count[...]) == 1
    assert not np.array_equal(teacher.norm.mean[...], before["norm"]["mean"][...])


def test_variables_of_a_frozen_module_may_be_written_in_the_loss(batch):
    class Counter(nnx.Module):
        def __init__(self):
            self.calls = nnx.Variable(jnp.int32(0))
            self.average = nnx.Param(jnp.float32(0.1))

    def loss(model, counter, x):
        counter.calls[...] += 1
        counter.average[...] = counter.average[...] * 2
        return jnp.mean(model(x) ** 2)

    model, counter = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), Counter()
    run(model, counter, batch[0], loss=loss, has_aux=False, policy=BF16)
    assert int(counter.calls[...]) == 1
    assert counter.average[...].dtype == jnp.float32
    assert float(counter.average[...]) == float(jnp.bfloat16(0.1) * 2)


def test_variables_made_by_the_loss_are_refused(batch):
    def loss(model, x, y):
        model.seen = nnx.Intermediate(x)
        return plain_loss(model, x, y)

    with pytest.raises(ValueError, match=r"(?s)made or removed NNX variables.*nnx.pop"):
        mpx.value_and_grad(loss, policy=BF16)(NoLossScaling(), Model(), *batch)

    def tidy(model, x, y):
        model.seen = nnx.Intermediate(x)
        value = plain_loss(model, x, y)
        return value, nnx.pop(model, nnx.Intermediate)

    result = run(Model(), *batch, loss=tidy, policy=BF16)
    assert result.aux["seen"][...].dtype == jnp.bfloat16


# --- Policies -------------------------------------------------------------------------


class Head(nnx.Linear):
    pass


class Normed(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.head = Head(8, 2, rngs=rngs)
        self.last = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        self.linear(x)
        return self.last(self.head(self.norm(self.linear(x))))


def product_dtypes(policy, x):
    """Returns the dtypes of the products, forward only, and of the result."""
    graphdef, state = nnx.split(Normed())

    def step(state, x):
        model = nnx.merge(graphdef, state)
        loss = lambda model, x: (jnp.sum(x), model(x))  # noqa: E731
        step = mpx.value_and_grad(loss, has_aux=True, policy=policy)
        return step(NoLossScaling(), model, x).aux

    dtypes = operand_dtypes(step, state, x, primitive="dot_general")
    return dtypes, jax.eval_shape(step, state, x).dtype


@pytest.mark.parametrize(
    ("keep", "products", "result"),
    [
        ((), {"bfloat16"}, "bfloat16"),
        (nnx.LayerNorm, {"bfloat16"}, "bfloat16"),
        (Head, {"bfloat16", "float32"}, "bfloat16"),
        (nnx.Linear, {"float32"}, "bfloat16"),
        ("^linear/", {"float32"}, "float32"),
    ],
    ids=["nothing", "norm", "head", "all linear layers", "name"],
)
def test_kept_modules_run_in_f32_and_return_what_they_were_given(
    keep, products, result, batch
):
    policy = mpx.Policy(compute_dtype="bf16", keep=keep)
    # A weight kept by its name promotes what comes after it, as Flax does.
    promotes = result == "float32"
    warned = pytest.warns(RuntimeWarning, match="all their matmuls run in f32")
    with warned if promotes else contextlib.nullcontext():
        dtypes, out = product_dtypes(policy, batch[0])
    assert dtypes == products
    assert out == result


def test_kept_norm_has_the_numbers_of_f32(batch):
    x = batch[0].astype(jnp.bfloat16).astype(jnp.float32)
    norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.array([0.1, 0.2, 0.3, 0.4])
    loss = lambda model, x: (jnp.sum(x), model(x))  # noqa: E731
    policy = mpx.Policy(compute_dtype="bf16", keep=nnx.LayerNorm)
    step = mpx.value_and_grad(loss, has_aux=True, policy=policy)
    result = step(NoLossScaling(), norm, x)
    assert_trees_equal(result.aux, norm(x).astype(jnp.bfloat16))


def test_kept_module_may_take_rngs_and_advances_them(batch):
    class Noisy(nnx.Module):
        def __init__(self):
            self.dropout = nnx.Dropout(0.5)
            self.weight = nnx.Param(jnp.ones(4))

        def __call__(self, x, rngs):
            assert x.dtype == jnp.float32
            return self.dropout(x * self.weight, rngs=rngs)

    def loss(model, x, rngs):
        out = model(x, rngs)
        assert out.dtype == jnp.bfloat16
        return jnp.sum(out)

    rngs = nnx.Rngs(dropout=0)
    policy = mpx.Policy(compute_dtype="bf16", keep=Noisy)
    step = mpx.value_and_grad(loss, policy=policy)
    step(NoLossScaling(), Noisy(), batch[0], rngs)
    assert int(rngs.dropout.count[...]) == 1


def test_kept_kind_of_parameter_stays_f32(batch):
    class Special(nnx.Param):
        pass

    class Two(nnx.Module):
        def __init__(self):
            self.a = Special(jnp.ones(4))
            self.b = nnx.Param(jnp.ones(4))

    def loss(model, x):
        assert model.a[...].dtype == jnp.float32
        assert model.b[...].dtype == jnp.bfloat16
        return jnp.sum(model.a[...]) + jnp.sum(model.b[...])

    policy = mpx.Policy(compute_dtype="bf16", keep=Special)
    result = mpx.value_and_grad(loss, policy=policy)(NoLossScaling(), Two(), batch[0])
    assert {leaf.dtype for leaf in jax.tree.leaves(result.grads)} == {np.dtype("f4")}


def test_rules_see_the_names_of_attributes(batch):
    names = set()

    def rule(name, leaf):
        names.add(name)
        return name == "head/bias"

    policy = mpx.Policy(compute_dtype="bf16", keep=rule)
    mpx.value_and_grad(plain_loss, policy=policy)(NoLossScaling(), Model(), *batch)
    params = {"linear/kernel", "linear/bias", "head/kernel", "head/bias"}
    norm = {"norm/scale", "norm/bias", "norm/mean", "norm/var"}
    assert names == params | norm | {""}
    names.clear()
    low = policy.cast_to_compute({"net": Model()})["net"]
    assert names == {f"net/{name}" for name in params | norm}
    assert low.linear.kernel[...].dtype == jnp.bfloat16
    assert low.norm.scale[...].dtype == low.norm.mean[...].dtype == jnp.float32


# --- Pure functions of states, as in `nnx.split` and `nnx.merge` ----------------------


def test_states_are_parameters_like_any_pytree(batch):
    graphdef, params, rest = nnx.split(Model(), nnx.Param, ...)

    def loss(params, rest, x, y):
        model = nnx.merge(graphdef, params, rest)
        assert model.linear.kernel[...].dtype == jnp.bfloat16
        assert model.norm.mean[...].dtype == jnp.float32
        value = plain_loss(model, x, y)
        return value, nnx.state(model, nnx.Not(nnx.Param))

    step = mpx.value_and_grad(loss, has_aux=True, policy=BF16)
    result = jax.eval_shape(step, NoLossScaling(), params, rest, *batch)
    assert jax.tree.structure(result.grads) == jax.tree.structure(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(result.grads)} == {np.dtype("f4")}
    assert result.aux["norm"]["mean"].get_value().dtype == jnp.float32


# --- Accumulation ---------------------------------------------------------------------


def accumulated(loss, **options):
    @nnx.jit
    def step(model, *args):
        return mpx.accumulate(loss, **options)(NoLossScaling(), model, *args)

    return step


def test_accumulation_hands_state_on_from_part_to_part(batch):
    (x, y), steps = batch, 4
    ours, theirs = Model(), Model()
    step = accumulated(
        plain_loss, steps=steps, batch_argnums=(1, 2), policy=POLICIES["f32"]
    )
    result = step(ours, x, y)
    reference = nnx.jit(lambda *args: nnx.value_and_grad(plain_loss)(*args))
    parts = [reference(theirs, x[i::steps], y[i::steps]) for i in range(steps)]
    assert int(ours.dropout.rngs.count[...]) == steps
    assert int(theirs.dropout.rngs.count[...]) == steps
    # Numbers of order one, some ten roundings each, a few sums.
    bound = {"rtol": 0, "atol": 10 * steps * np.finfo(np.float32).eps}
    np.testing.assert_allclose(result.value, sum(v for v, _ in parts) / steps, **bound)
    expected = jax.tree.map(lambda *grads: sum(grads) / steps, *(g for _, g in parts))
    pairs = (result.grads, expected), (rest_of(ours)["norm"], rest_of(theirs)["norm"])
    for a, b in pairs:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **bound), a, b)


def test_accumulation_counts_calls_and_undoes_them_all():
    model, x = Counting(), jnp.arange(8.0)
    step = accumulated(counting_loss, steps=4, policy=BF16)
    assert step(model, x).finite
    assert int(model.calls[...]) == 4
    assert float(model.total[...]) == 28.0
    assert not step(model, x.at[5].set(jnp.inf)).finite
    assert int(model.calls[...]) == 4
    assert float(model.total[...]) == 28.0


def test_statistics_written_in_half_are_f32_again():
    # Without it the loop over the parts would not even have one type.
    def loss(model, x):
        value = model(x)
        model.total.set_value(model.total[...].astype(jnp.bfloat16))
        return value

    model = Counting()
    step = accumulated(loss, steps=4, policy=BF16)
    assert step(model, jnp.arange(8.0)).finite
    assert model.total[...].dtype == jnp.float32
    assert float(model.total[...]) == 28.0


# --- A whole loop ---------------------------------------------------------------------


def test_loop_with_an_nnx_optimizer_skips_and_is_traced_once(batch):
    loss, traces = count_traces(plain_loss)
    model, (x, y) = Model(), batch
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, scaling, x, y):
        result = mpx.value_and_grad(loss)(scaling, model, x, y)
        mpx.optimizer_update(model, optimizer, None, result.grads, result.finite)
        return result.scaling, result.value, result.finite

    scaling = DynamicLossScaling.pow2(2.0**12)
    values = []
    for number in range(6):
        before = state_of((model, optimizer))
        inputs = x * jnp.inf if number == 2 else x
        scaling, value, finite = step(model, optimizer, scaling, inputs, y)
        assert bool(finite) is (number != 2)
        if number == 2:
            assert_trees_equal(state_of((model, optimizer)), before)
        values.append(float(value))
    assert len(traces) == 1
    assert int(optimizer.step[...]) == 5
    assert int(scaling.skipped) == 1
    assert int(model.dropout.rngs.count[...]) == 5


# --- Parameters that the function assigns to ------------------------------------------


class Rescaled(nnx.Module):
    """Divides its own weights in place, as `nnx.WeightNorm` does."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(4, 1, use_bias=False, rngs=rngs)

    def __call__(self, x):
        kernel = self.linear.kernel
        norm = jnp.linalg.norm(kernel[...].astype(jnp.float32))
        kernel[...] = kernel[...] / norm.astype(kernel[...].dtype)
        return self.head(self.linear(x))


def assigning_models():
    def wrapped(kind):
        def make():
            rngs = nnx.Rngs(0)
            return nnx.Sequential(
                kind(nnx.Linear(4, 4, rngs=rngs), rngs=rngs),
                nnx.Linear(4, 1, rngs=rngs),
            )

        return make

    return {
        "weight norm": wrapped(nnx.WeightNorm),
        "spectral norm": wrapped(nnx.SpectralNorm),
        "own": lambda: Rescaled(nnx.Rngs(0)),
    }


ASSIGNING = assigning_models()


def assigning_loss(model, x, y):
    return jnp.mean((mpx.cast_to_float32(model(x))[:, 0] - y.astype(jnp.float32)) ** 2)


def everything(model):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))


@pytest.mark.some(1)
@pytest.mark.parametrize("make", ASSIGNING.values(), ids=ASSIGNING)
@pytest.mark.parametrize("steps", [None, 2])
def test_parameters_that_the_function_assigns_to_are_those_of_nnx(make, steps, batch):
    x, y = batch
    expected, model, before = make(), make(), everything(make())
    grads = []
    for i in range(steps or 1):
        part = (x[i :: steps or 1], y[i :: steps or 1])
        grads.append(nnx.grad(assigning_loss)(expected, *part))
    grads = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
    take = functools.partial(mpx.value_and_grad, assigning_loss)
    if steps is not None:
        take = functools.partial(
            mpx.accumulate, assigning_loss, steps, batch_argnums=(1, 2)
        )
    result = take(policy="f32")(NoLossScaling(), model, x, y)
    eps = 20 * float(np.finfo(np.float32).eps)  # numbers below 2, some ten operations
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=eps)
    jax.tree.map(close, everything(model), everything(expected))
    jax.tree.map(close, result.grads, grads)
    changed = jax.tree.map(np.array_equal, everything(model), before)
    assert not all(jax.tree.leaves(changed))  # the premise


def test_assigned_parameters_are_rolled_back_with_a_skipped_step(batch):
    model, before = Rescaled(nnx.Rngs(0)), everything(Rescaled(nnx.Rngs(0)))
    x, y = batch
    take = mpx.value_and_grad(assigning_loss, policy="f32")
    result = take(NoLossScaling(), model, x * jnp.inf, y)
    assert not result.finite
    assert_trees_equal(everything(model), before)


def test_parameter_that_becomes_infinite_skips_the_step(batch):
    def loss(model, x, y):
        value = assigning_loss(model, x, y)
        model.kernel[...] = model.kernel[...] * jnp.inf
        return value

    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    before = everything(model)
    result = mpx.value_and_grad(loss, policy="f32")(NoLossScaling(), model, *batch)
    assert mpx.all_finite(result.grads)
    assert not result.finite
    assert_trees_equal(everything(model), before)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["weight norm", "spectral norm"])
def test_assigned_parameters_of_known_layers_are_not_rounded(name, batch):
    model, expected = ASSIGNING[name](), ASSIGNING[name]()
    assigning_loss(expected, *batch)
    mpx.value_and_grad(assigning_loss, policy=POLICIES["bf16"])(
        NoLossScaling(), model, *batch
    )
    eps = 20 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(
        model.layers[0].layer_instance.kernel[...],
        expected.layers[0].layer_instance.kernel[...],
        rtol=0,
        atol=eps,
    )


@pytest.mark.some(1)
@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_masters_are_not_rounded_where_all_variables_are_assigned_to(transform, batch):
    model, frozen = (
        nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        nnx.Linear(4, 1, rngs=nnx.Rngs(1)),
    )
    before = everything((model, frozen))

    @transform
    def inner(model, frozen, x, y):
        return jnp.mean((frozen(model(x))[:, 0] - y).astype(jnp.float32) ** 2)

    def loss(model, frozen, x, y):
        return inner(model, frozen, x, y)

    mpx.value_and_grad(loss, policy=BF16)(NoLossScaling(), model, frozen, *batch)
    assert_trees_equal(everything((model, frozen)), before)


def test_parameters_that_are_assigned_in_16_bits_are_reported(batch):
    model = Rescaled(nnx.Rngs(0))
    with pytest.warns(
        RuntimeWarning, match="assigns to .*linear/kernel.*bfloat16.*keep"
    ):
        mpx.value_and_grad(assigning_loss, policy=BF16)(NoLossScaling(), model, *batch)


def test_assigned_parameters_stay_the_same_on_all_devices(batch):
    model, expected = Rescaled(nnx.Rngs(0)), Rescaled(nnx.Rngs(0))
    assigning_loss(expected, *batch)
    graphdef, state = nnx.split(model)
    take = mpx.value_and_grad(assigning_loss, policy="f32", axis_name="data")

    def step(state, x, y):
        model = nnx.merge(graphdef, state)
        take(NoLossScaling(), model, x, y)
        return nnx.state(model)

    rows, same = jax.P("data"), jax.P()
    step = jax.shard_map(
        step,
        mesh=jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=(same, rows, rows),
        out_specs=same,
    )
    after = jax.jit(step)(state, *batch)
    kernel = after["linear"]["kernel"][...]
    np.testing.assert_allclose(kernel, expected.linear.kernel[...], rtol=1e-6)


def test_amp_keeps_assigned_parameters_too(batch):
    model, expected = Rescaled(nnx.Rngs(0)), Rescaled(nnx.Rngs(0))
    nnx.value_and_grad(mpx.amp(assigning_loss))(expected, *batch)
    mpx.value_and_grad(mpx.amp(assigning_loss))(NoLossScaling(), model, *batch)
    eps = 20 * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(
        model.linear.kernel[...], expected.linear.kernel[...], rtol=0, atol=eps
    )
    norm = np.linalg.norm(np.asarray(model.linear.kernel[...], np.float64))
    assert abs(norm - 1) < eps
