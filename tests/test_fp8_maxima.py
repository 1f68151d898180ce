"""The maxima of delayed scaling on several devices are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.recipes import DelayedScaling

pytestmark = pytest.mark.standard_promotion

MESHES = {"data": {"data": 8}, "both": {"data": 4, "model": 2}}


def make_mesh(name, kind=AxisType.Auto):
    sizes = MESHES[name]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


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


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("loss", "layout", "steps"),
    [
        (scanned, "DP", 1),
        (scanned, "FSDP", 2),
        (unrolled, "FSDP×TP", 1),
    ],
)
def test_step_observes_the_same_maxima(loss, layout, steps):
    func = mpx.fp8(loss, DelayedScaling(history=2), min_gain=0)
    policy = "p=bf16,c=bf16,o=f32"
    step = mpx.value_and_grad(func, policy=policy)
    if steps > 1:
        step = mpx.accumulate(func, steps, policy=policy)
    args = arguments(func, layout)
    found = jax.jit(step)(mpx.NoLossScaling(), *args).fp8.amaxes
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
