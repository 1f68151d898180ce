"""One small f16 training step, by mpx and by others, with a fault planted into it.

Weights and batch are small multiples of powers of two, so that the first gradient is exact
and the same at every loss scale that is one.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.testing import inject

ROWS, IN, HIDDEN, OUT = 64, 16, 32, 4
RATE = 2.0**-9
SCALE = 2.0**12  # gradients of each device, eight rows, do not overflow


class Training(NamedTuple):
    """What a step must not spoil, and what it may change.

    Attributes:
        params: The parameters.
        optimizer: The optimizer state.
        rest: The loss scaling, and counters of skipped steps.
    """

    params: Any
    optimizer: Any
    rest: Any


class Stepped(NamedTuple):
    """The result of a step.

    Attributes:
        training: The new state.
        grads: The unscaled gradients.
        scale: The loss scale after the step.
        loss: The loss, which mpx checks too; `None` for others.
    """

    training: Training
    grads: Any
    scale: Any
    loss: Any = None


class Library(NamedTuple):
    """One way to train.

    Attributes:
        name: Its name in the table.
        init: Makes the state from parameters.
        step: Steps: `(training, x, y, fault, number) -> Stepped`.
        bounds: The least and the largest loss scale.
        layout: The shardings of parameters by name, and of the batch.
    """

    name: str
    init: Callable[[Any], Training]
    step: Callable[..., Stepped]
    bounds: tuple[float, float]
    layout: str = "jit"


# --- the model ------------------------------------------------------------------------


def make_params(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(IN, HIDDEN), (HIDDEN, OUT)]
    w1, w2 = (
        jax.random.randint(key, shape, -2, 3) / 4
        for key, shape in zip(keys[:2], shapes, strict=True)
    )
    b1 = jax.random.randint(keys[2], (HIDDEN,), -2, 3) / 4
    params = {"w1": w1, "b1": b1, "w2": w2, "b2": jnp.zeros(OUT)}
    return jax.tree.map(lambda x: x.astype(dtype), params)


def make_batch(seed):
    x, y = jax.random.split(jax.random.key(1000 + seed))
    return (
        jax.random.randint(x, (ROWS, IN), -1, 2).astype(jnp.float32),
        jax.random.randint(y, (ROWS, OUT), -2, 3) / 2,
    )


def loss(params, x, y, fault, number, axis_name=None):
    def hit(**tree):
        return inject(tree, fault, number, axis_name=axis_name)

    params = hit(params=params)["params"]
    x = hit(x=x)["x"]
    hidden = jax.nn.relu(x @ params["w1"] + params["b1"])
    hidden = hit(hidden=hidden)["hidden"]
    out = hidden @ params["w2"] + params["b2"]
    return jnp.mean((out - y).astype(jnp.float32) ** 2)


def loss_f16(params, x, y, fault, number):
    """Casts by hand, for libraries that leave it to the user."""
    params, x, y = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x, y))
    return loss(params, x, y, fault, number)


# --- layouts over all devices, eight in faults.py -------------------------------------


def shardings(layout):
    """Returns where parameters and activations lie: sharded weights, or copies of them."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    specs = {"w1": P("data"), "b1": P("data"), "w2": P("data"), "b2": P()}
    if layout == "shard_map":
        specs = dict.fromkeys(specs, P())
    specs |= {"x": P("data"), "y": P("data"), "hidden": P("data")}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def targets(layout):
    """Returns what faults can hit: shapes in f16, with their shardings."""
    where = shardings(layout)

    def struct(name, shape):
        return jax.ShapeDtypeStruct(shape, jnp.float16, sharding=where[name])

    params = {name: struct(name, x.shape) for name, x in make_params().items()}
    others = {"x": struct("x", (ROWS, IN)), "hidden": struct("hidden", (ROWS, HIDDEN))}
    return {"params": params, **others}


def placed(tree, layout):
    where = shardings(layout)
    return {name: jax.device_put(x, where[name]) for name, x in tree.items()}


def start(library):
    """Returns the first state over eight devices, and a step that keeps its shardings."""
    training = library.init(placed(make_params(), library.layout))
    everywhere = shardings("shard_map")["b2"]

    def spread(x):
        x = jnp.asarray(x)
        return x if len(x.devices()) > 1 else jax.device_put(x, everywhere)

    training = jax.tree.map(spread, training)
    where = jax.tree.map(lambda x: x.sharding, training)
    return training, jax.jit(library.step, out_shardings=Stepped(where, None, None))


# --- mpx ------------------------------------------------------------------------------


def ours(name, optimizer, *, layout, dtype=jnp.float32, compute=jnp.float16):
    axis = "data" if layout == "shard_map" else None
    policy = mpx.Policy(dtype, compute, jnp.float32)
    take = mpx.value_and_grad(loss, policy=policy, axis_name=axis)

    def init(params):
        scaling = mpx.DynamicLossScaling.pow2(SCALE)
        if dtype == jnp.float32:
            return Training(params, optimizer.init(params), scaling)
        params, state = optimizer.init_from(params, dtype)
        return Training(params, state, scaling)

    def step(training, x, y, fault, number):
        params, state, scaling = training
        result = take(scaling, params, x, y, fault, number, axis)
        params, state = mpx.optimizer_update(
            params, optimizer, state, result.grads, result.finite
        )
        new = Training(params, state, result.scaling)
        scale = result.scaling.loss_scaling
        return Stepped(new, result.grads, scale, result.value)

    if layout == "shard_map":
        mesh = shardings(layout)["x"].mesh
        specs = (P(), P("data"), P("data"), P(), P())
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
        )
    return Library(name, init, step, (1.0, 2.0**24), layout)


def all_ours():
    bf16 = jnp.bfloat16
    return [
        ours("mpx, optax.adamw, sharded", optax.adamw(RATE), layout="jit"),
        ours("mpx, optax.adamw, copies", optax.adamw(RATE), layout="shard_map"),
        ours(
            "mpx, flash_adamw, sharded",
            mpx.optim.flash_adamw(RATE, compression=_SMALL),
            layout="jit",
            dtype=bf16,
        ),
        ours(
            "mpx, flash_lion, copies",
            mpx.optim.flash_lion(RATE, compression=_SMALL),
            layout="shard_map",
            dtype=bf16,
        ),
    ]


_SMALL = mpx.optim.Compression(min_size=0, group_size=4)  # compresses small weights too


# --- others ---------------------------------------------------------------------------


def flax():
    from flax.training.dynamic_scale import DynamicScale

    optimizer = optax.adamw(RATE)

    def init(params):
        scale = DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(SCALE))
        return Training(params, optimizer.init(params), scale)

    def step(training, x, y, fault, number):
        params, state, scale = training
        scale, finite, _, grads = scale.value_and_grad(loss_f16)(
            params, x, y, fault, number
        )
        updates, new_state = optimizer.update(grads, state, params)
        new = optax.apply_updates(params, updates), new_state
        # As the example of its documentation does.
        params, state = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), new, (params, state)
        )
        return Stepped(Training(params, state, scale), grads, scale.scale)

    tiny = float(jnp.finfo(jnp.float32).tiny)
    bounds = (tiny, float(jnp.finfo(jnp.float32).max))
    return Library("Flax DynamicScale", init, step, bounds)


def apply_if_finite():
    inner = optax.adamw(RATE)
    optimizer = optax.apply_if_finite(inner, max_consecutive_errors=5)

    def init(params):
        state = optimizer.init(params)
        return Training(params, state.inner_state, state._replace(inner_state=None))

    def step(training, x, y, fault, number):
        params, inner, counters = training
        state = counters._replace(inner_state=inner)
        # It has no scaling: a fixed one.
        grads = jax.grad(lambda *args: SCALE * loss_f16(*args))(
            params, x, y, fault, number
        )
        grads = jax.tree.map(lambda g: g / SCALE, grads)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        new = Training(params, state.inner_state, state._replace(inner_state=None))
        return Stepped(new, grads, jnp.float32(SCALE))

    return Library("optax.apply_if_finite", init, step, (SCALE, SCALE))


def paper(folder):
    """Returns mixed-precision-for-JAX, whose package has the name of ours."""
    if folder is None:
        return None
    ours = {k: sys.modules.pop(k) for k in list(sys.modules) if _is_mpx(k)}
    sys.path.insert(0, folder)
    try:
        theirs = importlib.import_module("mpx")
        theirs_grad = importlib.import_module("mpx._grad_tools")
    except ImportError:
        return None
    finally:
        sys.path.remove(folder)
        for name in [k for k in sys.modules if _is_mpx(k)]:
            del sys.modules[name]
        sys.modules.update(ours)
    optimizer = optax.adamw(RATE)

    def init(params):
        scaling = theirs.DynamicLossScaling(jnp.float32(SCALE), jnp.float32(1.0))
        return Training(params, optimizer.init(params), scaling)

    def step(training, x, y, fault, number):
        params, state, scaling = training
        take = theirs_grad.filter_value_and_grad(loss, scaling)
        _, scaling, finite, grads = take(params, x, y, fault, number)
        params, state = theirs_grad.optimizer_update(
            params, optimizer, state, grads, finite
        )
        new = Training(params, state, scaling)
        return Stepped(new, grads, scaling.loss_scaling)

    bounds = (1.0, 65504.0)
    return Library("mixed-precision-for-JAX", init, step, bounds)


def _is_mpx(name):
    return name == "mpx" or name.startswith("mpx.")


def jaxamp(folder):
    if folder is not None:
        sys.path.append(folder)
    try:
        jaxamp = importlib.import_module("jaxamp")
    except Exception:  # it reads private parts of JAX, which other versions lack
        return None
    optimizer = optax.adamw(RATE)

    def init(params):
        state = jaxamp.DynamicScalerState(scaler=jnp.float32(SCALE))
        return Training(params, optimizer.init(params), state)

    def step(training, x, y, fault, number):
        params, state, scaler = training
        take = jaxamp.dynamic_scale_value_and_grad(loss_f16)
        scaler, (_, grads) = take(
            params, x, y, fault, number, dynamic_scaler_state=scaler
        )
        # As its documentation does: gradients are taken again up to ten times, then used.
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return Stepped(Training(params, state, scaler), grads, scaler.scaler)

    tiny, largest = (
        float(jnp.finfo(jnp.float32).tiny),
        float(jnp.finfo(jnp.float32).max),
    )
    return Library("jaxamp", init, step, (tiny, largest))
