"""The maxima of delayed scaling on several devices: right, and reduced once a step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx._fp8._delayed import maxima_of
from mpx.inspect import collectives
from mpx.recipes import DelayedScaling

pytestmark = pytest.mark.standard_promotion

MESHES = {"data": {"data": 8}, "both": {"data": 4, "model": 2}}


def make_mesh(name, kind=AxisType.Auto):
    sizes = MESHES[name]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


# --- one array ------------------------------------------------------------------------

X = np.random.default_rng(0).standard_normal((64, 6, 32)).astype(np.float32)
X[-1, 0, 0], X[33, 2, 1] = 90.0, -70.0  # where the last rows are cut off, and where not
# By name: the mesh, how the array is sharded, and what is done to it.
ARRAYS = {
    "replicated": ("data", P(), lambda x: x),
    "rows": ("data", P("data"), lambda x: x),
    "columns": ("data", P(None, None, "data"), lambda x: x),
    "two axes": ("both", P("data", None, "model"), lambda x: x),
    "one of two axes": ("both", P("model"), lambda x: x),
    "an axis over both": ("both", P(("model", "data")), lambda x: x),
    # Eight shards of 60 rows would be padded.
    "cut off": ("data", P("data"), lambda x: x[:60]),
    "folded": ("data", P("data"), lambda x: x.reshape(-1, 48)[:-3] * -1),
    "of no axes": ("data", P("data"), lambda x: x[3, 2, 1]),
    "bf16": ("data", P("data"), lambda x: x.astype(jnp.bfloat16)),
    "of nan": ("data", P("data"), lambda x: x.at[7, 1].set(jnp.nan)),
    "of inf": ("data", P("data"), lambda x: x.at[7, 1].set(-jnp.inf)),
    "of zeros": ("data", P("data"), lambda x: x * 0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_maxima_of_devices_have_the_maximum_of_the_array(name):
    mesh, spec, change = ARRAYS[name]
    x = jax.device_put(X, NamedSharding(make_mesh(mesh), spec))
    found = jax.jit(lambda x: maxima_of(change(x), (8,)))(x)
    wanted = np.max(np.abs(np.asarray(change(jnp.asarray(X)), np.float64)))
    assert found.shape == (8,)
    np.testing.assert_array_equal(np.max(np.asarray(found, np.float64)), wanted)


def test_each_device_has_its_own_maximum():
    x = jax.device_put(X, NamedSharding(make_mesh("data"), P("data")))
    compiled = jax.jit(lambda x: maxima_of(x, (8,))).lower(x).compile()
    assert not collectives(compiled)
    np.testing.assert_array_equal(compiled(x), np.abs(X).reshape(8, -1).max(1))


def test_maxima_under_vmap_are_those_of_the_whole():
    x = jax.device_put(X, NamedSharding(make_mesh("data"), P("data")))
    found = jax.jit(jax.vmap(lambda x: maxima_of(x, (8,)), 1))(x)
    np.testing.assert_array_equal(found.max(1), np.abs(X).max((0, 2)))


# --- a step ---------------------------------------------------------------------------

LAYERS, WIDTH, HIDDEN, ROWS = 2, 32, 64, 64


def normal(seed, *shape):
    scale = shape[-2] ** -0.5
    draws = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(draws, jnp.bfloat16)


PARAMS = {
    "up": normal(0, LAYERS, WIDTH, HIDDEN),
    "down": normal(1, LAYERS, HIDDEN, WIDTH),
}
BATCH = normal(2, ROWS, WIDTH) * 8
SPECS = {
    "DP": ("data", P(), P()),
    "FSDP": ("data", P(None, "data"), P(None, None, "data")),
    "FSDP×TP": ("both", P(None, "data", "model"), P(None, "model", "data")),
}


def scanned(params, x):
    @jax.checkpoint
    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"]

    x, _ = lax.scan(lambda x, w: (block(x, w), None), x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def unrolled(params, x):
    for i in range(LAYERS):
        w = jax.tree.map(lambda w, i=i: w[i], params)
        # A branch that is not taken observes nothing.
        x = lax.cond(
            x[0, 0] < 1e9,
            lambda x, w=w: x + jnp.tanh(x @ w["up"]) @ w["down"],
            lambda x, w=w: x @ w["up"] @ w["down"],
            x,
        )
    return jnp.mean(x.astype(jnp.float32) ** 2)


def arguments(func, layout, kind=AxisType.Auto):
    """An empty state, parameters and batch; on one device without a layout."""
    state = func.init(*jax.eval_shape(lambda: (PARAMS, BATCH)))
    if layout is None:
        return state, PARAMS, BATCH
    name, up, down = SPECS[layout]
    mesh = make_mesh(name, kind)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    params = {"up": put(PARAMS["up"], up), "down": put(PARAMS["down"], down)}
    return put(state, P()), params, put(BATCH, P("data"))


@functools.cache
def on_one_device(loss):
    func = mpx.fp8(loss, DelayedScaling(history=2), min_gain=0)
    step = mpx.value_and_grad(func, policy="p=bf16,c=bf16,o=f32")
    return jax.jit(step)(mpx.NoLossScaling(), *arguments(func, None)).fp8


@pytest.mark.parametrize(
    ("loss", "layout", "steps"),
    [
        (scanned, "DP", 1),
        (scanned, "FSDP", 2),
        (unrolled, "FSDP×TP", 1),
    ],
)
def test_step_observes_the_same_maxima_and_reduces_them_once(loss, layout, steps):
    func = mpx.fp8(loss, DelayedScaling(history=2), min_gain=0)
    policy = "p=bf16,c=bf16,o=f32"
    step = mpx.value_and_grad(func, policy=policy)
    if steps > 1:
        step = mpx.accumulate(func, steps, policy=policy)
    args = arguments(func, layout)
    compiled = jax.jit(step).lower(mpx.NoLossScaling(), *args).compile()
    found = compiled(mpx.NoLossScaling(), *args).fp8.amaxes
    wanted = on_one_device(loss).amaxes
    assert found.keys() == wanted.keys()
    for key, amaxes in found.items():
        name = key.split("/")[-1].split(":")[0]
        newest, expected = (np.asarray(x)[..., 0, :] for x in (amaxes, wanted[key]))
        seen = expected[..., 1] > 0
        largest = np.abs(np.asarray(PARAMS[name], np.float32)).max((1, 2))
        if loss is scanned:
            np.testing.assert_array_equal(newest[..., 1], largest)
        elif seen:
            assert newest[..., 1] in largest
        # Sums in another order, rounded to bf16 and e4m3 in each of six matmuls; the
        # gradient of a part's mean is that of fewer rows.
        if steps == 1:
            np.testing.assert_allclose(newest, expected, rtol=2.0**-4)
        else:
            np.testing.assert_allclose(newest[..., :2], expected[..., :2], rtol=2.0**-4)
    sums = [x for x in collectives(compiled) if x.kind == "all-reduce"]
    maxima = [x for x in sums if 1 < math.prod(x.shape) <= 3 * len(found) * LAYERS]
    assert sum(x.runs for x in maxima) == steps
    # The others are those of loss and flags.
    scalars = [x for x in sums if not x.shape]
    assert len(scalars) <= 3
    assert all(x.runs <= steps for x in scalars)
