"""Nothing outlives a call: no tracer of it, and no array that a function closed over."""

import functools
import gc
import weakref

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from models import mlp, mlp_batch, mlp_loss
from mpx import amp, fp8

bf16 = functools.partial(amp, dtype="bf16")
BF16 = jnp.bfloat16
X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
W = jnp.linspace(-0.5, 0.6, 64).reshape(8, 8)
PARAMS = {"w": W, "b": jnp.linspace(0.0, 1.0, 8)}
LAYERS = jax.tree.map(lambda x: jnp.stack([x, -x]), PARAMS)
SIZES = jnp.array([1, 3], jnp.int32)


@pytest.fixture(autouse=True)
def _only_new_objects_are_collected():
    # JAX collects garbage to look for leaks, among all that other tests have left.
    gc.freeze()
    yield
    gc.unfreeze()


# --- Tracers --------------------------------------------------------------------------


def layer(p, x):
    return jax.nn.relu(x @ p["w"] + p["b"][None])


def loss(p, x):
    return jnp.sum(layer(p, x) ** 2)


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct),
)


@jax.custom_jvp
def with_jvp(x, w):
    return x @ w


with_jvp.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


@eqx.filter_custom_vjp
def filtered(w, x):
    return x @ w


filtered.def_fwd(lambda perturbed, w, x: (x @ w, None))
filtered.def_bwd(lambda kept, ct, perturbed, w, x: x.T @ ct)


def scanned(p, x):
    return jnp.sum(lax.scan(lambda x, p: (layer(p, x), None), x, p)[0])


def looped(p, x):
    return jnp.sum(lax.fori_loop(0, 2, lambda _, x: layer(p, x), x))


def endless(p, x):
    return jnp.sum(lax.while_loop(lambda x: jnp.sum(x) > 9, lambda x: layer(p, x), x))


def branched(p, x):
    return jnp.sum(lax.cond(x[0, 0] > 0, layer, lambda p, x: x, p, x))


def sharded(p, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda p, x: lax.psum(loss(p, x), "d"),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P(),
    )(p, x)


def attention(p, x):
    q = (x @ p["w"]).reshape(1, 4, 2, 4)
    return jnp.sum(jax.nn.dot_product_attention(q, q, q, is_causal=True))


def ragged(p, x):
    stack = jnp.stack([p["w"], p["w"]])
    return jnp.sum(lax.ragged_dot(x, stack, SIZES + jnp.int32(0)))


# By what is inside: a loss and its parameters.
LOSSES = {
    "plain": (loss, PARAMS),
    "jit": (jax.jit(loss), PARAMS),
    "scan": (scanned, LAYERS),
    "fori": (looped, PARAMS),
    "cond": (branched, PARAMS),
    "remat": (jax.checkpoint(loss), PARAMS),
    "vmap": (lambda p, x: jnp.sum(jax.vmap(lambda x: loss(p, x[None]))(x)), PARAMS),
    "custom_vjp": (lambda p, x: jnp.sum(with_vjp(x, p["w"])), PARAMS),
    "custom_jvp": (lambda p, x: jnp.sum(with_jvp(x, p["w"])), PARAMS),
    "eqx.filter_custom_vjp": (lambda p, x: jnp.sum(filtered(p["w"], x)), PARAMS),
    "attention": (attention, PARAMS),
    "ragged_dot": (ragged, PARAMS),
    "grad": (lambda p, x: jnp.sum(jax.grad(loss)(p, x)["w"] ** 2), PARAMS),
}


def bf16_problem(count=1):
    params = {"w": jnp.ones((count, 32, 32), BF16)}
    return params, jnp.ones((16, 32), BF16)


def stacked_loss(p, x):
    return jnp.sum(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, p["w"])[0])


def accumulated():
    step = mpx.accumulate(bf16(loss), 2)
    return step, (mpx.DynamicLossScaling.pow2(), PARAMS, X)


def retried():
    step = mpx.value_and_grad(amp(loss, dtype="f16"), retry=2)
    return step, (mpx.DynamicLossScaling.pow2(), PARAMS, X)


def by_policy():
    step = mpx.value_and_grad(loss, policy="p=f32,c=bf16,o=f32", has_aux=False)
    return step, (mpx.StaticLossScaling(8.0), PARAMS, X)


def filter_gradient():
    def step(scaling, model, batch):
        return mpx.filter_value_and_grad(mlp_loss, scaling)(model, *batch)

    return step, (mpx.DynamicLossScaling.pow2(), mlp(), mlp_batch())


def equinox():
    def step(scaling, model, batch):
        return mpx.value_and_grad(bf16(mlp_loss))(scaling, model, *batch)

    return step, (mpx.DynamicLossScaling.pow2(), mlp(), mlp_batch())


def fp8_current():
    step = jax.value_and_grad(fp8(stacked_loss, min_gain=0))
    return step, bf16_problem(2)


def fp8_delayed():
    f8 = fp8(stacked_loss, mpx.recipes.DelayedScaling(history=2), min_gain=0)
    args = bf16_problem(2)
    state = f8.init(*jax.eval_shape(lambda: args))
    return jax.value_and_grad(f8, argnums=(0, 1)), (state, *args)


def fp8_of_amp():
    params = {"w": jnp.ones((32, 32))}

    def func(p, x):
        return jnp.sum(jax.nn.relu(x @ p["w"]))

    return jax.grad(fp8(bf16(func), min_gain=0)), (params, jnp.ones((16, 32)))


def updated(make):
    def build():
        params, x = bf16_problem()
        optimizer = make()

        def step(params, state, x):
            grads = jax.grad(stacked_loss)(params, x)
            finite = mpx.all_finite(grads)
            return mpx.optimizer_update(params, optimizer, state, grads, finite)

        return step, (params, optimizer.init(params), x)

    return build


def released(func, count=1):
    def build():
        params, x = bf16_problem(count)
        compression = mpx.optim.Compression(min_size=1)
        optimizer = mpx.optim.flash_adamw(1e-3, compression=compression)
        step = mpx.optim.release(func, optimizer, skip_nonfinite=True, with_norm=True)
        return step, (params, optimizer.init(params), x)

    return build


def one_layer(p, x):
    return jnp.sum(jax.nn.relu(x @ p["w"][0]).astype(jnp.float32))


def widened(p, x):
    return one_layer(*jax.tree.map(lambda x: x.astype(jnp.float32), (p, x)))


def nnx_model():
    model = nnx.Sequential(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)), nnx.relu
    )
    graph, state = nnx.split(model)

    def step(scaling, state, x):
        model = nnx.merge(graph, state)
        result = mpx.value_and_grad(bf16(lambda model, x: jnp.sum(model(x))))(
            scaling, model, x
        )
        return result, nnx.state(model)

    return step, (mpx.DynamicLossScaling.pow2(), state, X)


class Linen(nn.Module):
    @nn.compact
    @bf16
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.Dense(4)(x)))


def linen():
    model = Linen()

    def func(variables, x):
        return jnp.sum(model.apply(variables, x))

    return jax.grad(func), (model.init(jax.random.key(0), X), X)


# By what is outside: each returns a function and its arguments.
STEPS = {
    "value_and_grad": by_policy,
    "retry": retried,
    "accumulate": accumulated,
    "filter_value_and_grad": filter_gradient,
    "Equinox": equinox,
    "fp8": fp8_current,
    "fp8 delayed": fp8_delayed,
    "fp8 of amp": fp8_of_amp,
    "optimizer_update": updated(lambda: optax.adam(1e-3)),
    "master_weights": updated(lambda: mpx.optim.master_weights(optax.adam(1e-3))),
    "skip_nonfinite": updated(lambda: mpx.optim.skip_nonfinite(optax.adam(1e-3))),
    "flash_adamw": updated(lambda: mpx.optim.flash_adamw(1e-3)),
    "flash_lion": updated(lambda: mpx.optim.flash_lion(1e-3)),
    "flash_muon": updated(lambda: mpx.optim.flash_muon(1e-3)),
    "flash_sgd": updated(lambda: mpx.optim.flash_sgd(1e-3, momentum=0.9)),
    "release": released(one_layer),
    "release of amp": released(bf16(widened)),
    "NNX": nnx_model,
    "Linen": linen,
}
# With weight gradients in f32 only the matmuls are other ones.
WIDE = ["scan", "remat", "vmap", "custom_jvp", "ragged_dot"]


def trace_and_check(step, args):
    """Traces a function; JAX raises if a tracer is still referred to afterwards."""
    arrays, static = eqx.partition(args, eqx.is_array)

    def flat(arrays):
        out = step(*eqx.combine(arrays, static))
        return jax.tree.leaves(eqx.filter(out, eqx.is_array))

    with jax.checking_leaks():
        return jax.jit(flat).trace(arrays)


def test_leak_is_found():
    kept = []
    with pytest.raises(Exception, match="Leaked"):
        trace_and_check(lambda x: kept.append(x) or x, (X,))


@pytest.mark.parametrize("name", LOSSES)
def test_tracers_do_not_outlive_a_gradient_under_amp(name):
    func, params = LOSSES[name]
    trace_and_check(jax.grad(bf16(func)), (params, X))


@pytest.mark.parametrize("name", WIDE)
def test_tracers_do_not_outlive_f32_weight_gradients(name):
    func, params = LOSSES[name]
    trace_and_check(jax.grad(bf16(func, reduce_dtype="f32")), (params, X))


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.filterwarnings("ignore:.*the optimizer keeps no master weights")
@pytest.mark.parametrize("name", STEPS)
def test_tracers_do_not_outlive_a_training_step(name):
    trace_and_check(*STEPS[name]())


def test_tracers_do_not_outlive_a_released_scan():
    def reads_in_a_scan(w):
        """What any gradient of a scan that reads a reference is."""
        ref = jax.new_ref(w)

        def total(scale):
            def add(total, i):
                return total + scale * jnp.sum(ref[i]), None

            return lax.scan(add, 0.0, jnp.arange(2))[0]

        return jax.grad(total)(1.0)

    try:
        trace_and_check(reads_in_a_scan, (X,))
    except Exception:
        pytest.skip("JAX leaks the references of a scan without mpx, too")
    trace_and_check(*released(stacked_loss, 2)())


# In the gradient of a shard_map JAX leaks by itself; a while loop has none; and what is
# not differentiated keeps its derivative rules.
FORWARD = {
    "shard_map": sharded,
    "while": endless,
    "jit": jax.jit(loss),
    "custom_vjp": LOSSES["custom_vjp"][0],
    "custom_jvp": LOSSES["custom_jvp"][0],
}


@pytest.mark.parametrize("name", FORWARD)
def test_tracers_do_not_outlive_a_function_under_amp(name):
    trace_and_check(jax.jit(bf16(FORWARD[name])), (PARAMS, X))


# --- Arrays ---------------------------------------------------------------------------


def closing_over(kind, dtype):
    """Returns a function that closes over an array, and a weak reference to that."""
    w = jnp.asarray(np.linspace(0.0, 1.0, 64).reshape(8, 8), dtype)

    def times(x):
        return jax.nn.relu(x @ w)

    within = {
        "nothing": times,
        "jit": jax.jit(times),
        "scan": lambda x: lax.scan(lambda x, _: (times(x), None), x, None, length=2)[0],
        "cond": lambda x: lax.cond(x[0, 0] > 0, times, lambda x: x, x),
        "remat": jax.checkpoint(times),
        "custom_jvp": lambda x: jax.jit(lambda x: with_jvp(x, w))(x),
    }
    return within[kind], weakref.ref(w)


@pytest.mark.filterwarnings("ignore:`fp8` changed nothing")
@pytest.mark.parametrize("wrap", ["amp", "fp8"])
@pytest.mark.parametrize(
    "within", ["nothing", "jit", "scan", "cond", "remat", "custom_jvp"]
)
def test_array_that_a_function_closed_over_is_freed_with_it(within, wrap):
    x = X.astype(BF16 if wrap == "fp8" else jnp.float32)
    func, closed_over = closing_over(within, x.dtype)
    holder = [func]
    transform = bf16 if wrap == "amp" else functools.partial(fp8, min_gain=0)
    step = transform(lambda x: holder[0](x))
    step(x)
    step(x)
    assert closed_over() is not None  # the premise
    holder.clear()
    del func
    gc.collect()
    assert closed_over() is None
