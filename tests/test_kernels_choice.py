"""Where steps run: the choice of a backend, batches, layers and shards."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from kernel_cases import (
    BLOCK,
    RULES,
    Unfused,
    make_case,
    make_model,
    make_plan,
)
from models import equations
from mpx._kernels import _dispatch, _triton
from mpx._optim._packing import LeafStep
from mpx._optim._update_rules import Adam
from mpx.testing import assert_trees_equal

# --- the choice -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported_interpreter():
    """Imports the interpreter: with an option of its own, it makes JAX trace again."""

    def copy(x, out):
        out[...] = x[...]

    x = jnp.zeros(8)
    pl.pallas_call(copy, out_shape=x, interpret=True)(x)


@pytest.fixture
def kernel_on_cpus(imported_interpreter, monkeypatch):
    """Takes CPUs for GPUs, with the kernel in the interpreter."""
    calls = []
    launch = _triton.launch

    def interpreted(*args, **kwargs):
        calls.append(len(args[2]))
        return launch(*args, **{**kwargs, "block": BLOCK}, interpret=True)

    monkeypatch.setattr(_dispatch, "_PLATFORM", "cpu")
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(_triton, "launch", interpreted)
    monkeypatch.setattr(_dispatch, "_BATCH", 2)
    update = LeafStep.__call__
    monkeypatch.setattr(LeafStep, "__call__", lambda *a, **k: Unfused(update)(*a, **k))
    monkeypatch.setattr(Adam, "coefficients", _without_arithmetic)
    _forget_steps()
    yield calls
    _forget_steps()


def _forget_steps():
    """Clears what was traced with or without the patches.

    `jax.clear_caches` would clear every operation of the other tests, too.
    """
    jitted: Any = _dispatch._launch, _dispatch._plain_leaf
    for function in jitted:
        function.clear_cache()


def _without_arithmetic(self, hyper, step):
    """Coefficients that are equal in all programs: those of Adam are computed in each."""
    numbers = [0.9, 0.1, 0.99, 0.01, hyper["learning_rate"], 0.999, 1e-8]
    return tuple(jnp.asarray(number, jnp.float32) for number in numbers)


def take_steps(optimizer, params, grads, count=2, **options):
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, grads, grad_scale):  # an input: `Unfused` needs an unknown
        return optimizer.step(params, state, grads, grad_scale=grad_scale, **options)

    for _ in range(count):
        params, state = step(params, state, grads, 0.5)
    return params, state


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("dtype", "launches"),
    [(jnp.bfloat16, 2), (jnp.float32, 1)],  # no block divides 15 elements
    ids=["bf16", "f32"],
)
def test_the_kernel_is_taken_for_leaves_with_planes_only(
    kernel_on_cpus, dtype, launches
):
    params, grads = make_model(dtype=dtype)
    params |= {"small": params["0"][:3, :5], "odd": params["0"][:, :63]}
    grads |= {"small": grads["0"][:3, :5], "odd": grads["0"][:, :63]}
    optimizer, plain = (
        mpx.optim.flash_adamw(
            0.01, backend=backend, compression=mpx.optim.Compression(min_size=32)
        )
        for backend in ("auto", "jax")
    )
    got = take_steps(optimizer, params, grads)
    assert kernel_on_cpus == [1] * launches
    assert_trees_equal(got, take_steps(plain, params, grads))


def test_leaves_of_equal_types_share_launches(kernel_on_cpus):
    params, grads = make_model(leaves=3)
    grads["1"] = grads["1"].astype(jnp.float32)
    take_steps(mpx.optim.flash_adamw(0.01), params, grads)
    assert sorted(kernel_on_cpus) == [1, 2]


def test_equal_batches_are_traced_once(kernel_on_cpus):
    params, grads = make_model(leaves=6)
    take_steps(mpx.optim.flash_adamw(0.01), params, grads)
    assert kernel_on_cpus == [2]


@pytest.mark.some(1)
@pytest.mark.parametrize("finite", [True, False])
def test_the_kernel_gives_the_steps_of_plain_jax(kernel_on_cpus, finite):
    params, grads = make_model(leaves=3)
    groups = [mpx.optim.ParamGroup("1", {"learning_rate": 0.5})]
    flag = {"finite": jnp.array(finite)}
    auto = take_steps(mpx.optim.flash_adamw(0.01, groups=groups), params, grads, **flag)
    assert kernel_on_cpus
    plain = mpx.optim.flash_adamw(0.01, groups=groups, backend="jax")
    assert_trees_equal(auto, take_steps(plain, params, grads, **flag))


def test_vmap_takes_plain_jax(kernel_on_cpus):
    optimizer = mpx.optim.flash_adamw(0.01)
    params, grads = make_model((2, 64, 64))
    state = jax.vmap(optimizer.init)(params)
    mapped = jax.jit(jax.vmap(optimizer.step))(params, state, grads)
    plain = mpx.optim.flash_adamw(0.01, backend="jax")
    want = jax.jit(jax.vmap(plain.step))(params, state, grads)
    assert_trees_equal(mapped, want)
    text = str(jax.make_jaxpr(jax.vmap(optimizer.step))(params, state, grads))
    assert "pallas_call" not in text
    assert "pallas_call" in str(
        jax.make_jaxpr(optimizer.step)(
            *jax.tree.map(lambda x: x[0], (params, state, grads))
        )
    )


def test_vmap_over_gradients_alone(kernel_on_cpus):
    optimizer = mpx.optim.flash_adamw(0.01)
    params, _ = make_model()
    _, grads = make_model((2, 64, 64))
    state = optimizer.init(params)
    step = functools.partial(optimizer.step, params, state)
    new = jax.jit(jax.vmap(step))(grads)
    assert new.params["0"].shape == (2, 64, 64)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 16, 128), P(None, "x", "y")),
        ((4, 16, 128), P("x", None, "y")),
        ((4, 3, 128), P("x")),  # layers that are no whole blocks
    ],
    ids=str,
)
def test_layers_step_on_the_devices_that_have_them(kernel_on_cpus, shape, spec):
    plan = make_plan(RULES["adamw"])
    scalars, grads, leaf = make_case(plan, shape)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    shardings = _dispatch._shardings(NamedSharding(mesh, spec), leaf)

    @functools.partial(jax.jit, static_argnums=4)
    def step(leaf, grad, scalars, layer, backend):
        job = _dispatch.Job("w", plan, scalars, grad, leaf, layer)
        return _dispatch.run([job], backend=backend)[0]

    for layer in (0, 3):
        args = grads[1], scalars, jnp.int32(layer)
        want = step(leaf, *args, "jax")
        got = step(jax.device_put(leaf, shardings), *args, "auto")
        assert_trees_equal(got, want)
        for x, sharding in zip(*map(jax.tree.leaves, (got, shardings)), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        pairs = zip(want.param, leaf.param, strict=True)
        same = [np.array_equal(new, old) for new, old in pairs]
        assert same == [number != layer for number in range(4)]
    assert set(kernel_on_cpus) == {1}


def test_without_a_gpu_auto_is_plain_jax():
    params, grads = make_model((256, 256))
    optimizer = mpx.optim.flash_adamw(0.01)
    text = (
        jax.jit(optimizer.step).lower(params, optimizer.init(params), grads).as_text()
    )
    assert "triton" not in text
    plain = mpx.optim.flash_adamw(0.01, backend="jax")
    assert_trees_equal(
        take_steps(optimizer, params, grads), take_steps(plain, params, grads)
    )


def test_without_a_gpu_nothing_is_traced_for_one():
    params, grads = make_model((256, 256))
    step = {
        backend: jax.make_jaxpr(mpx.optim.flash_adamw(0.01, backend=backend).step)(
            params, mpx.optim.flash_adamw(0.01).init(params), grads
        )
        for backend in ("auto", "jax")
    }
    has_kernel = {
        backend: any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr))
        for backend, jaxpr in step.items()
    }
    assert has_kernel == {"auto": False, "jax": False}


def test_a_step_is_exported_for_gpus_that_are_not_here():
    params, grads = make_model((256, 256))
    optimizer = mpx.optim.flash_adamw(0.01)
    step = jax.jit(lambda *args: jax.tree.leaves(optimizer.step(*args)))
    args = params, optimizer.init(params), grads
    export = jax.export.export(step, platforms=("cpu", "cuda"))(*args)
    assert [x.shape for x in export.call(*args)] == [x.shape for x in step(*args)]


@pytest.mark.parametrize(
    ("shape", "compression"),
    [
        ((0, 64), mpx.optim.Compression()),
        ((2, 4096), mpx.optim.Compression(group_size=2048)),
    ],
    ids=["empty", "large groups"],
)
def test_what_the_kernel_cannot_do_takes_plain_jax(kernel_on_cpus, shape, compression):
    params, grads = make_model(shape)
    take_steps(mpx.optim.flash_adamw(0.01, compression=compression), params, grads)
    assert not kernel_on_cpus


# --- shards ---------------------------------------------------------------------------

LAYOUTS = {
    "auto, replicated": (AxisType.Auto, P()),
    "auto, column": (AxisType.Auto, P(None, "x")),
    "auto, 2-D": (AxisType.Auto, P("x", "y")),
    "explicit, row": (AxisType.Explicit, P("x", None)),
    "explicit, all in the last": (AxisType.Explicit, P(None, ("x", "y"))),
}


@functools.cache
def steps_on_one_device():
    plain = mpx.optim.flash_adamw(0.01, backend="jax")
    return take_steps(plain, *make_model((16, 512), leaves=2), finite=jnp.array(True))


@pytest.mark.some(1)
@pytest.mark.parametrize(("axis_type", "spec"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_device_steps_its_shards(kernel_on_cpus, axis_type, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    params, grads = make_model((16, 512), leaves=2)
    want = steps_on_one_device()
    sharding = NamedSharding(mesh, spec)
    params, grads = jax.device_put((params, grads), sharding)
    got = take_steps(mpx.optim.flash_adamw(0.01), params, grads, finite=jnp.array(True))
    assert kernel_on_cpus
    assert_trees_equal(jax.device_get(got), jax.device_get(want))
    planes = NamedSharding(mesh, P(None, *spec))
    sharded = [x for x in jax.tree.leaves(got) if x.ndim]
    assert len(sharded) == 2 * 3
    for x in sharded:
        expected = sharding if x.ndim == 2 else planes
        assert x.sharding.is_equivalent_to(expected, x.ndim)


def test_leaves_of_one_launch_may_be_sharded_differently(kernel_on_cpus):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    params, grads = make_model((16, 512), leaves=2)
    want = steps_on_one_device()
    shardings = {
        "0": NamedSharding(mesh, P("x")),
        "1": NamedSharding(mesh, P(None, "y")),
    }
    params, grads = jax.device_put((params, grads), (shardings, shardings))
    got = take_steps(mpx.optim.flash_adamw(0.01), params, grads)
    assert 2 in kernel_on_cpus
    assert_trees_equal(jax.device_get(got), jax.device_get(want))
    for name, x in got[0].items():
        assert x.sharding.is_equivalent_to(shardings[name], 2)


def test_shard_map_steps_what_each_device_has(kernel_on_cpus):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params, grads = make_model((64, 512))
    optimizer = mpx.optim.flash_adamw(0.01)
    state = optimizer.init(params)
    scale = jnp.float32(0.5)  # an input: `Unfused` needs an unknown

    def step(optimizer, params, state, grads, scale):
        return tuple(optimizer.step(params, state, grads, grad_scale=scale))

    plain = functools.partial(step, mpx.optim.flash_adamw(0.01, backend="jax"))
    want = jax.jit(plain)(params, state, grads, scale)
    specs = jax.tree.map(lambda x: P(None, "x") if x.ndim else P(), state)
    mapped = jax.shard_map(
        functools.partial(step, optimizer),
        mesh=mesh,
        in_specs=(P("x"), specs, P("x"), P()),
        out_specs=(P("x"), specs),
        check_vma=False,  # the interpreter does not know what varies
    )
    got = jax.jit(mapped)(params, state, grads, scale)
    assert kernel_on_cpus
    assert_trees_equal(got, want)


def test_groups_that_shards_cut_take_plain_jax(kernel_on_cpus):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    params, grads = make_model((64, 96))
    sharding = NamedSharding(mesh, P(None, "x"))
    params, grads = jax.device_put((params, grads), sharding)
    take_steps(mpx.optim.flash_adamw(0.01), params, grads)
    assert not kernel_on_cpus
