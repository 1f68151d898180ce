"""Whole training loops: in every framework mixed precision reaches the loss of f32.

Each loop trains a small classifier of handwritten digits from several seeds, in f32 by
the framework's own means and in bf16 and f16 by mpx. A mixed run may differ from the f32
run of the same seed by no more than f32 runs differ between seeds.
"""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.compat import jmp

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.slow,
]

SAMPLES, BATCH, STEPS = 512, 32, 200
# The range of few losses is a poor measure of noise; but a loop in Python is slow.
SEEDS, SEEDS_IN_PYTHON, MIXED_SEEDS_IN_PYTHON = 8, 3, 1
HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}

# Not Adam, which hides a gradient that is wrong by a factor. The learning rate falls to
# zero, so that the last loss is no accident of the last batches.
optimizer = optax.sgd(optax.cosine_decay_schedule(0.2, STEPS), momentum=0.9)


@functools.cache
def digits():
    from sklearn.datasets import load_digits  # takes a second, in every process

    images, labels = load_digits(return_X_y=True)
    images, labels = images[:SAMPLES], labels[:SAMPLES]
    return (images / 16).astype(np.float32), labels.astype(np.int32)


@functools.cache
def make_batches(seeds):
    """Returns the batches of many runs as arrays [seed, step, sample, …]."""
    images, labels = digits()
    shape = (STEPS, BATCH)
    rows = [np.random.default_rng(s).integers(0, SAMPLES, shape) for s in range(seeds)]
    return {"x": images[np.stack(rows)], "y": labels[np.stack(rows)]}


def make_scaling(dtype):
    if dtype == jnp.float16:
        # So large at first, and growing so often, that some steps overflow.
        return mpx.DynamicLossScaling.pow2(2.0**20, period=100)
    return mpx.NoLossScaling()


def make_policy(dtype):
    return mpx.Policy(compute_dtype=dtype)


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


# --- The judge ------------------------------------------------------------------------


class Runs:
    """Final losses of one loop by seed, in f32 and in mixed precisions."""

    def __init__(self, train, halves=("bf16", "f16")):
        self.full, _ = train(jnp.float32)
        self.mixed, self.scalings = {}, {}
        for name in halves:
            self.mixed[name], self.scalings[name] = train(HALVES[name])

    def check(self):
        untrained = np.log(10)  # the loss of guessing
        noise = np.ptp(self.full)
        # The premises: it learns, and the noise would not hide that it does not.
        assert np.all(self.full < untrained / 20)
        assert 0 < noise < untrained / 50
        for name, losses in self.mixed.items():
            full = self.full[: len(losses)]
            assert np.all(losses != full), f"{name} was no mixed precision"
            np.testing.assert_allclose(losses, full, rtol=0, atol=noise)

    def check_skipping(self):
        """The f16 run has skipped some steps, but not many."""
        skipped = np.asarray(self.scalings["f16"].skipped)
        assert np.all(skipped > 0)
        assert np.all(skipped < STEPS / 20)


@functools.cache
def initial_params(init):
    """Returns the parameters of `init(key)` for all seeds, stacked."""
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in range(SEEDS)]
    return jax.jit(jax.vmap(init))(jnp.stack(keys))  # a generator that compiles quickly


def run_scanned(init, start, step):
    """Trains from all seeds at once: `start(params)`, then `step(carry, batch)`."""

    @jax.jit
    @jax.vmap
    def train(params, batches):
        return lax.scan(lambda *args: (step(*args), None), start(params), batches)[0]

    return train(initial_params(init), make_batches(SEEDS))


@functools.partial(jax.jit, static_argnums=0)
def _final_losses(apply, params):
    x, y = digits()
    return jax.vmap(lambda params: cross_entropy(apply(params, x), y))(params)


def final_losses(apply, params):
    return np.asarray(_final_losses(apply, params))


# --- The paper's Example 1 ------------------------------------------------------------


def init_equinox(key):
    return eqx.filter(eqx.nn.MLP(64, 10, 32, 1, key=key), eqx.is_array)


@functools.cache
def static_part():
    model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 10, 32, 1, key=jax.random.key(0))
    return eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))[1]


def apply_equinox(params, x):
    return jax.vmap(eqx.combine(params, static_part()))(x)


def equinox_loss(model, batch):
    logits = jax.vmap(model)(batch["x"])
    return mpx.force_full_precision(cross_entropy, jnp.float32)(logits, batch["y"])


def train_paper_example(dtype):
    def loss(model, batch):
        assert model.layers[0].weight.dtype == dtype
        return equinox_loss(model, batch)

    def start(params):
        return params, optimizer.init(params), make_scaling(jnp.float16)

    def full(carry, batch):
        params, optimizer_state, loss_scaling = carry
        model = eqx.combine(params, static_part())
        grads = eqx.filter_grad(loss)(model, batch)
        updates, optimizer_state = optimizer.update(
            grads, optimizer_state, eqx.filter(model, eqx.is_array)
        )
        model = eqx.apply_updates(model, updates)
        return eqx.filter(model, eqx.is_array), optimizer_state, loss_scaling

    def mixed(carry, batch):
        params, optimizer_state, loss_scaling = carry
        model = eqx.combine(params, static_part())
        loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(
            model, batch
        )
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
        return eqx.filter(model, eqx.is_array), optimizer_state, loss_scaling

    if dtype == jnp.float32:
        params, _, loss_scaling = run_scanned(init_equinox, start, full)
    else:
        with mpx.half_precision(dtype):
            params, _, loss_scaling = run_scanned(init_equinox, start, mixed)
    return final_losses(apply_equinox, params), loss_scaling


def test_example_1_of_the_paper_trains():
    runs = Runs(train_paper_example)
    runs.check()
    runs.check_skipping()


# --- The training step of MPX's README ------------------------------------------------


def regularized_loss(model, batch, batch_sharding, weight_regularization):
    batch = eqx.filter_shard(batch, batch_sharding)
    logits = jax.vmap(model)(batch["x"])
    accuracy = jnp.mean(jnp.argmax(logits, axis=1) == batch["y"])
    weights = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    norm = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in weights)
    return cross_entropy(logits, batch["y"]) + weight_regularization * norm, accuracy


@eqx.filter_jit
def make_step(
    model,
    optimizer_state,
    batch,
    batch_sharding,
    replicated_sharding,
    loss_scaling,
    train_mixed_precision,
    weight_regularization,
):
    batch = eqx.filter_shard(batch, batch_sharding)
    model = eqx.filter_shard(model, replicated_sharding)
    optimizer_state = eqx.filter_shard(optimizer_state, replicated_sharding)
    args = batch, batch_sharding, weight_regularization
    if train_mixed_precision:
        (loss_value, _), loss_scaling, grads_finite, grads = mpx.filter_value_and_grad(
            regularized_loss, scaling=loss_scaling, has_aux=True
        )(model, *args)
        model, optimizer_state = mpx.optimizer_update(
            model, optimizer, optimizer_state, grads, grads_finite
        )
    else:
        (loss_value, _), grads = eqx.filter_value_and_grad(
            regularized_loss, has_aux=True
        )(model, *args)
        updates, optimizer_state = optimizer.update(
            grads, optimizer_state, eqx.filter(model, eqx.is_array)
        )
        model = eqx.apply_updates(model, updates)
    model = eqx.filter_shard(model, replicated_sharding)
    optimizer_state = eqx.filter_shard(optimizer_state, replicated_sharding)
    loss_scaling = eqx.filter_shard(loss_scaling, replicated_sharding)
    return model, optimizer_state, loss_scaling, loss_value


def run_in_python(dtype, step):
    """Runs `step(seed, batches)` for a few seeds; it returns parameters and scaling."""
    params, scalings = [], []
    seeds = SEEDS_IN_PYTHON if dtype == jnp.float32 else MIXED_SEEDS_IN_PYTHON
    for seed in range(seeds):
        batches = jax.tree.map(lambda leaf: leaf[seed], make_batches(SEEDS))  # noqa: B023
        batches = [
            jax.tree.map(lambda leaf: leaf[number], batches)  # noqa: B023
            for number in range(STEPS)
        ]
        trained, scaling = step(seed, batches)
        params.append(trained)
        scalings.append(scaling)
    stack = lambda *leaves: np.stack(leaves)  # noqa: E731
    return jax.tree.map(stack, *params), jax.tree.map(stack, *scalings)


def train_readme_of_mpx(dtype):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))
    shardings = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    train_mixed_precision = dtype != jnp.float32

    def run(seed, batches):
        params = jax.tree.map(lambda leaf: leaf[seed], initial_params(init_equinox))
        model = eqx.combine(params, static_part())
        optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
        loss_scaling = mpx.DynamicLossScaling(
            loss_scaling=mpx.FLOAT16_MAX,
            min_loss_scaling=jnp.ones((), dtype=jnp.float32),
            period=20,
        )
        for batch in batches:
            model, optimizer_state, loss_scaling, loss_value = make_step(
                model,
                optimizer_state,
                batch,
                *shardings,
                loss_scaling,
                train_mixed_precision,
                1e-4,
            )
            assert loss_value.dtype == jnp.float32
        return eqx.filter(model, eqx.is_array), loss_scaling

    with mpx.half_precision(dtype if train_mixed_precision else "f16"):
        params, loss_scaling = run_in_python(dtype, run)
    return final_losses(apply_equinox, params), loss_scaling


def test_readme_of_mpx_trains():
    runs = Runs(train_readme_of_mpx)
    runs.check()
    # The ceiling of the paper's constructor, where this loss does not overflow.
    assert np.all(runs.scalings["f16"].loss_scaling == 65504.0)
    assert np.all(runs.scalings["f16"].skipped == 0)


# --- Pure functions of parameters: dictionaries, Linen, Haiku -------------------------


def init_dict(key):
    keys = jax.random.split(key)
    normal = jax.random.normal
    return {
        "hidden": {"w": normal(keys[0], (64, 32)) / 8, "b": jnp.zeros(32)},
        "out": {"w": normal(keys[1], (32, 10)) / 6, "b": jnp.zeros(10)},
    }


def apply_dict(params, x):
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))


EXAMPLE = np.zeros((1, 64), np.float32)
LINEN_MLP = LinenMLP()
HAIKU_MLP = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 10])(x)))


def init_linen(key):
    return LINEN_MLP.init(key, EXAMPLE)


def apply_linen(variables, x):
    return LINEN_MLP.apply(variables, x)


PURE_MODELS = {
    "dictionary": (init_dict, apply_dict),
    "Linen": (init_linen, apply_linen),
    "Haiku": (lambda key: HAIKU_MLP.init(key, EXAMPLE), HAIKU_MLP.apply),
}


def classifier_loss(apply, dtype):
    def loss(params, batch):
        logits = apply(params, batch["x"])
        assert logits.dtype == dtype
        return cross_entropy(logits, batch["y"])

    return loss


def train_pure(model, dtype):
    init, apply = PURE_MODELS[model]
    loss = classifier_loss(apply, dtype)

    def start(params):
        return params, optimizer.init(params), make_scaling(dtype)

    def full(carry, batch):
        params, state, scaling = carry
        grads = jax.grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, scaling

    def mixed(carry, batch):
        params, state, scaling = carry
        result = mpx.value_and_grad(loss, policy=make_policy(dtype))(
            scaling, params, batch
        )
        params, state = mpx.optimizer_update(
            params, optimizer, state, result.grads, result.finite
        )
        return params, state, result.scaling

    step = full if dtype == jnp.float32 else mixed
    params, _, scaling = run_scanned(init, start, step)
    return final_losses(apply, params), scaling


@pytest.mark.some(1)
@pytest.mark.parametrize("model", PURE_MODELS)
def test_pure_functions_of_parameters_train(model):
    runs = Runs(functools.partial(train_pure, model))
    runs.check()
    runs.check_skipping()


# --- Flax Linen with a TrainState -----------------------------------------------------


def train_train_state(dtype):
    def start(variables):
        state = TrainState.create(
            apply_fn=apply_linen, params=variables["params"], tx=optimizer
        )
        # A loop carry needs an array for the number of steps.
        return state.replace(step=jnp.int32(0)), make_scaling(dtype)

    def loss_of(state):
        return classifier_loss(lambda p, x: state.apply_fn({"params": p}, x), dtype)

    def full(carry, batch):
        state, scaling = carry
        grads = jax.grad(loss_of(state))(state.params, batch)
        return state.apply_gradients(grads=grads), scaling

    def mixed(carry, batch):
        state, scaling = carry
        result = mpx.value_and_grad(loss_of(state), policy=make_policy(dtype))(
            scaling, state.params, batch
        )
        state, _ = mpx.optimizer_update(state, None, None, result.grads, result.finite)
        return state, result.scaling

    step = full if dtype == jnp.float32 else mixed
    state, scaling = run_scanned(init_linen, start, step)
    skipped = scaling.skipped if dtype == jnp.float16 else 0
    np.testing.assert_array_equal(state.step + skipped, STEPS)
    return final_losses(apply_linen, {"params": state.params}), scaling


def test_linen_train_state_trains():
    # In f16, where steps are skipped; in bf16 it is the loop without a TrainState.
    runs = Runs(train_train_state, ["f16"])
    runs.check()
    runs.check_skipping()


# --- Flax NNX -------------------------------------------------------------------------


class NnxMLP(nnx.Module):
    def __init__(self, seed):
        rngs = nnx.Rngs(seed)
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def apply_nnx(params, x):
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: NnxMLP(0)))
    return nnx.merge(graphdef, params)(x)


def train_nnx(dtype):
    loss = classifier_loss(lambda model, x: model(x), dtype)

    @nnx.jit
    def full(model, optimizer, scaling, batch):
        grads = nnx.grad(loss)(model, batch)
        optimizer.update(model, grads)
        return scaling

    @nnx.jit
    def mixed(model, optimizer, scaling, batch):
        result = mpx.value_and_grad(loss, policy=make_policy(dtype))(
            scaling, model, batch
        )
        mpx.optimizer_update(model, optimizer, None, result.grads, result.finite)
        return result.scaling

    step = full if dtype == jnp.float32 else mixed

    def run(seed, batches):
        model, scaling = NnxMLP(seed), make_scaling(dtype)
        nnx_optimizer = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        for batch in batches:
            scaling = step(model, nnx_optimizer, scaling, batch)
        return nnx.state(model), scaling

    params, scaling = run_in_python(dtype, run)
    return final_losses(apply_nnx, params), scaling


def test_nnx_modules_train():
    runs = Runs(train_nnx)
    runs.check()
    runs.check_skipping()


# --- The loop of jmp's README, through mpx.compat.jmp ---------------------------------


def train_readme_of_jmp(dtype):
    policy = jmp.Policy(jnp.float32, dtype, jnp.float32)

    def my_loss_fn(params, loss_scale, batch):
        params, x = policy.cast_to_compute((params, batch["x"]))
        logits = apply_dict(params, x)
        assert logits.dtype == dtype
        loss = cross_entropy(policy.cast_to_output(logits), batch["y"])
        return loss_scale.scale(loss)

    def apply_optimizer(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def train_step(carry, batch):
        params, state, loss_scale = carry
        grads = jax.grad(my_loss_fn)(params, loss_scale, batch)
        grads = loss_scale.unscale(grads)
        new = apply_optimizer(params, state, grads)
        if isinstance(loss_scale, jmp.DynamicLossScale):
            grads_finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(grads_finite)
            new = jmp.select_tree(grads_finite, new, (params, state))
        return (*new, loss_scale)

    def start(params):
        loss_scale = jmp.NoOpLossScale()
        if dtype == jnp.float16:
            loss_scale = jmp.DynamicLossScale(
                jnp.float32(2.0**20), jnp.zeros([], jnp.int32), period=100
            )
        return params, optimizer.init(params), loss_scale

    params, _, loss_scale = run_scanned(init_dict, start, train_step)
    return final_losses(apply_dict, params), loss_scale


def test_readme_of_jmp_trains():
    runs = Runs(train_readme_of_jmp)
    runs.check()
    assert np.all(runs.scalings["f16"].loss_scale < 2.0**20)
