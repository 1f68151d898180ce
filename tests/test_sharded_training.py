"""Training on eight devices is training on one: same skips, same numbers up to summation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.recipes import DelayedScaling

pytestmark = pytest.mark.standard_promotion

WIDTH, HIDDEN, ROWS, STEPS = 32, 128, 64, 6
LAYOUTS = {
    "DP": ((8,), ("data",), P(), P()),
    "FSDP": ((8,), ("data",), P("data"), P(None, "data")),
    "TP": ((8,), ("model",), P(None, "model"), P("model")),
    "FSDP×TP": ((4, 2), ("data", "model"), P("data", "model"), P("model", "data")),
}


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


PARAMS = {"up": normal(0, WIDTH, HIDDEN) / 6, "down": normal(1, HIDDEN, WIDTH) / 11}
# A number on the last device that overflows, in the third step.
BATCHES = [(x := normal(2 + i, ROWS, WIDTH), np.sin(x)) for i in range(STEPS)]
BATCHES[2] = (
    np.where(np.arange(ROWS)[:, None] == ROWS - 1, np.inf, BATCHES[2][0]),
    BATCHES[2][1],
)


def loss(params, x, y):
    out = jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean((out.astype(jnp.float32) - y) ** 2)


class Recipe:
    """A way to train: what is carried from step to step, and the step."""

    def __init__(self, optimizer, grad, scaling=None, fp8=None, param="f32"):
        self.optimizer, self.grad, self.fp8, self.param = optimizer, grad, fp8, param
        self.scaling = scaling or mpx.NoLossScaling()

    def init(self, params):
        fp8 = ()
        if self.fp8 is not None:
            x, y = BATCHES[0]
            low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (params, x))
            fp8 = (jax.device_get(self.fp8.init(*low, y)),)
        return params, self.optimizer.init(params), self.scaling, fp8

    def step(self, carry, x, y):
        params, state, scaling, fp8 = carry
        result = self.grad(scaling, *fp8, params, x, y)
        params, state = mpx.optimizer_update(
            params, self.optimizer, state, result.grads, result.finite
        )
        carry = params, state, result.scaling, (result.fp8,) if fp8 else ()
        return carry, result.value, result.finite


class Released:
    """Gradient release, which steps inside the backward pass."""

    param = "bf16"

    def __init__(self):
        self.optimizer = mpx.optim.flash_adamw(1e-2)
        self.release = mpx.optim.release(
            mpx.amp(loss), self.optimizer, skip_nonfinite=True
        )

    def init(self, params):
        return params, self.optimizer.init(params)

    def step(self, carry, x, y):
        result = self.release(*carry, x, y)
        return (result.params, result.state), result.value, result.finite


def recipe(name):
    bf16 = functools.partial(mpx.value_and_grad, policy="p=f32,c=bf16,o=f32")
    if name == "optax":
        return Recipe(optax.adamw(1e-2), bf16(mpx.amp(loss)))
    if name == "flash":
        return Recipe(mpx.optim.flash_adamw(1e-2), bf16(loss), param="bf16")
    if name == "release":
        return Released()
    if name == "fp8":
        func = mpx.fp8(loss, DelayedScaling(history=2), min_gain=0)
        return Recipe(optax.sgd(1e-1), bf16(func), fp8=func)
    scaling = mpx.DynamicLossScaling.pow2(2.0**10, period=2)
    f16 = mpx.value_and_grad(loss, policy="p=f32,c=f16,o=f32")
    return Recipe(optax.adamw(1e-2), f16, scaling)


# Every layout and every way to train, and fp8 where both axes are sharded.
CASES = [
    ("DP", "optax", AxisType.Auto),
    ("DP", "f16", AxisType.Explicit),
    ("FSDP", "flash", AxisType.Auto),
    ("FSDP", "release", AxisType.Auto),
    ("TP", "fp8", AxisType.Auto),
    ("FSDP×TP", "f16", AxisType.Auto),
    ("FSDP×TP", "fp8", AxisType.Auto),
]


def train(name, layout=None, kind=AxisType.Auto):
    """Returns the skips, the losses and the parameters after some steps."""
    way = recipe(name)
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[way.param]
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), PARAMS)
    rows = None
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,), devices=jax.devices()[:1])
    if layout is not None:
        sizes, names, up, down = LAYOUTS[layout]
        mesh = jax.make_mesh(sizes, names, axis_types=(kind,) * len(names))
        specs = {"up": NamedSharding(mesh, up), "down": NamedSharding(mesh, down)}
        params = jax.device_put(params, specs)
        rows = NamedSharding(mesh, P("data" if "data" in names else None))
    with jax.set_mesh(mesh):
        carry = way.init(params)
        if layout is not None:
            everywhere = NamedSharding(mesh, P())
            carry = jax.tree.map(
                lambda x: (
                    x
                    if isinstance(x, jax.Array) and len(x.devices()) > 1
                    else jax.device_put(x, everywhere)
                ),
                carry,
            )
        step, skips, values = jax.jit(way.step), [], []
        for batch in BATCHES:
            batch = jax.device_put(batch, rows)
            carry, value, finite = step(carry, *batch)
            skips.append(not bool(finite))
            values.append(float(value))
    return skips, values, jax.device_get(carry[0])


@functools.cache
def on_one_device(name):
    return train(name)


@pytest.mark.some(1)
@pytest.mark.parametrize(("layout", "name", "kind"), CASES, ids=str)
def test_eight_devices_train_like_one(layout, name, kind):
    skips, values, params = train(name, layout, kind)
    expected = on_one_device(name)
    assert skips == expected[0]
    assert skips[2]
    assert sum(skips) < STEPS / 2
    good = [i for i in range(STEPS) if not skips[i]]
    # Roundings of 16 bits, and of 8, which a sum in another order turns; over six steps.
    close = 2.0**-4 if name == "fp8" else 2.0**-6
    np.testing.assert_allclose(
        np.array(values)[good], np.array(expected[1])[good], rtol=close
    )
    for actual, wanted in zip(
        *map(jax.tree.leaves, (params, expected[2])), strict=True
    ):
        actual, wanted = (np.asarray(x, np.float32) for x in (actual, wanted))
        start = np.linalg.norm(wanted)
        assert np.linalg.norm(actual - wanted) <= close * start


# --- Nothing is compiled again, nothing waits for the host ----------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["flash", "f16", "fp8"])
def test_a_thousand_steps_compile_once_and_never_wait_for_the_host(name):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    way: Any = recipe(name)
    everywhere = NamedSharding(mesh, P())
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[way.param]
    params = jax.tree.map(lambda x: jnp.asarray(x[:16, :16], dtype), PARAMS)
    x = jax.device_put(
        jnp.asarray(BATCHES[0][0][:16, :16]), NamedSharding(mesh, P("data"))
    )
    bad = x.at[15, 0].set(jnp.inf)
    traced = 0

    def run(carry, x):
        nonlocal traced
        traced += 1
        return way.step(carry, x, jnp.sin(jnp.nan_to_num(x)))[0]

    carry = params, way.optimizer.init(params), way.scaling, ()
    if way.fp8 is not None:
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, x))
        carry = (*carry[:3], (way.fp8.init(*low, x),))
    carry = jax.device_put(carry, everywhere)
    step: Any = jax.jit(run, donate_argnums=0)
    for i in range(3):  # what the first results are sharded like may differ
        carry = step(carry, bad if i == 1 else x)
    # A guard does not see what a CPU reads from its own memory.
    assert "callback" not in step.lower(carry, x).as_text()
    compiled, before = step._cache_size(), traced
    with jax.transfer_guard("disallow"):
        for i in range(1000):
            carry = step(carry, bad if i % 100 == 7 else x)
            if i % 25 == 0:
                # Devices of a CPU are threads: with many steps in flight they starve.
                jax.block_until_ready(carry)
    assert (step._cache_size(), traced) == (compiled, before)
    assert compiled == 1
    assert all(
        np.all(np.isfinite(np.asarray(x, np.float32)))
        for x in jax.tree.leaves(carry[0])
    )


# --- The sharding of each leaf --------------------------------------------------------

SPECS = {
    (512, 256): P("data"),
    (256, 512): P(None, "data"),
    (256, 256): P("data"),
    (4, 64, 512): P(None, None, "data"),
    (512, 60): P("data"),
    (160, 192): P("data"),  # shards of the last axis would have 24 elements
    (1001, 192): P(None, "data"),  # and here nothing else can be cut
    (1001, 90): P(),
    (8, 10): P(),
    (10,): P(),
    (): P(),
}


def test_each_leaf_is_cut_along_its_largest_axis_that_divides():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shapes = {str(shape): jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SPECS}
    found = mpx.fsdp_shardings(shapes, mesh)
    assert {name: x.spec for name, x in found.items()} == {
        str(shape): spec for shape, spec in SPECS.items()
    }
    jax.device_put(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), found)
    tiny = mpx.fsdp_shardings(jnp.zeros((8, 10)), mesh, min_size=0)
    assert tiny.spec == P("data")
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    both = mpx.fsdp_shardings(jnp.zeros((512, 64)), mesh, ("data", "model"))
    assert both.spec == P(("data", "model"))
    with pytest.raises(
        ValueError, match=r"`axis` names \['x'\], but the mesh has the axes"
    ):
        mpx.fsdp_shardings(shapes, mesh, "x")
    with pytest.raises(
        TypeError, match=r"dict was given.*`fsdp_shardings\(params, mesh"
    ):
        mpx.fsdp_shardings(mesh, {"w": shapes})


@pytest.mark.some(1)
@pytest.mark.parametrize("way", ["eager", "jit", "shapes"])
def test_compressed_states_follow_their_parameters(way):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {
        "rows": jnp.asarray(normal(0, 512, 60), jnp.bfloat16),
        "columns": jnp.asarray(normal(0, 64, 512), jnp.bfloat16),
        "bias": jnp.zeros(10, jnp.bfloat16),
    }
    shardings = mpx.fsdp_shardings(params, mesh)
    params = jax.device_put(params, shardings)
    optimizer = mpx.optim.flash_adamw(1e-2)
    if way == "shapes":
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            params,
        )
        state = optimizer.init(like)
    else:
        state = (jax.jit if way == "jit" else lambda x: x)(optimizer.init)(params)
    assert_follows(state, shardings)
    if way == "jit":
        step = jax.jit(optimizer.step).lower(params, state, params).compile()
        assert not mpx.inspect.collectives(step)
        new = step(params, state, params)
        assert_follows(new[1], shardings)
        for name, leaf in new[0].items():
            assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim)


def assert_follows(state, shardings):
    for name, sharding in shardings.items():
        for moment in (state.mu[name], state.nu[name]):
            for leaf in jax.tree.leaves(moment):
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
