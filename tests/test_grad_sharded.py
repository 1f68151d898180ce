"""Gradients on eight devices are those of one, and all devices decide alike."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import POLICIES, equations, exact_problem, squared_error
from mpx import DynamicLossScaling, GradResult, NoLossScaling
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

SCALE = 2.0**6


@pytest.fixture(scope="module")
def problem():
    return exact_problem(samples=16, features=8)


def make_mesh(axis_type=AxisType.Auto):
    assert jax.device_count() == 8
    return jax.make_mesh((8,), ("data",), axis_types=(axis_type,))


REPLICATED = P()


def put(problem, mesh, spec_w=REPLICATED):
    """Returns the problem on a mesh: samples sharded, parameters as `spec_w` says."""
    specs = (spec_w, P("data"), P("data"))
    args = (problem.w, problem.x, problem.y)
    return tuple(
        jax.device_put(leaf, NamedSharding(mesh, spec))
        for leaf, spec in zip(args, specs, strict=True)
    )


def is_sharded_like(x, mesh, spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


# --- jit with shardings ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis_type", "name"),
    [(AxisType.Auto, "bf16"), (AxisType.Explicit, "f16")],
    ids=str,
)
def test_data_parallel_gradient_is_that_of_one_device(axis_type, name, problem):
    mesh = make_mesh(axis_type)
    w, x, y = put(problem, mesh)
    assert len({shard.device for shard in x.addressable_shards}) == 8
    assert x.addressable_shards[0].data.shape == (2, 8)
    step = jax.jit(mpx.value_and_grad(squared_error, policy=POLICIES[name]))
    with jax.set_mesh(mesh):
        result = step(DynamicLossScaling.pow2(SCALE), w, x, y)
    assert_trees_equal(result.value, np.float32(problem.value))
    assert_trees_equal(result.grads, problem.grad)
    assert is_sharded_like(result.grads, mesh, P())
    for leaf in jax.tree.leaves((result.value, result.finite, result.scaling)):
        assert leaf.sharding.is_fully_replicated
    assert result.finite


def gathered_error(w, x, y):
    """The loss of fully sharded parameters: they are gathered where they are used."""
    return squared_error(jax.sharding.reshard(w, P()), x, y)


@pytest.mark.parametrize(
    ("axis_type", "loss"),
    [(AxisType.Auto, squared_error), (AxisType.Explicit, gathered_error)],
    ids=["auto", "explicit"],
)
def test_gradient_of_sharded_parameters_is_sharded_like_them(axis_type, loss, problem):
    mesh = make_mesh(axis_type)
    w, x, y = put(problem, mesh, P("data"))
    assert w.addressable_shards[0].data.shape == (1,)

    @jax.jit
    def step(scaling, w, x, y):
        result = mpx.value_and_grad(loss)(scaling, w, x, y)
        if axis_type == AxisType.Auto:  # in explicit mode the type says so
            grads = jax.lax.with_sharding_constraint(result.grads, P("data"))
            result = result._replace(grads=grads)
        return result

    with jax.set_mesh(mesh):
        result = step(DynamicLossScaling.pow2(SCALE), w, x, y)
    assert_trees_equal(result.grads, problem.grad)
    assert is_sharded_like(result.grads, mesh, P("data"))
    assert is_sharded_like(w, mesh, P("data"))
    assert result.scaling.loss_scaling.sharding.is_fully_replicated


def test_overflow_on_one_device_is_seen_by_all_under_jit(problem):
    mesh = make_mesh()
    w, x, y = put(problem, mesh)
    x = inject_nonfinite(x, jnp.inf, index=37)
    step = jax.jit(mpx.value_and_grad(squared_error))
    result = step(DynamicLossScaling.pow2(SCALE), w, x, y)
    flags = [bool(shard.data) for shard in result.finite.addressable_shards]
    scales = [float(s.data) for s in result.scaling.loss_scaling.addressable_shards]
    assert flags == [False] * 8
    assert scales == [SCALE / 2] * 8


# --- shard_map ------------------------------------------------------------------------


def shard_mapped(func, mesh, *, check_vma, out_specs, axes="data"):
    return jax.jit(
        jax.shard_map(
            func,
            mesh=mesh,
            in_specs=(P(), P(), P(axes), P(axes)),
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


REPLICATED = GradResult(*[P()] * 5)


def per_device(result):
    """Gives each leaf a leading axis, so that every device's own value is seen."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], result)


TRANSFORMS = {
    "value_and_grad": mpx.value_and_grad,
    "accumulate": functools.partial(mpx.accumulate, steps=2, batch_argnums=(1, 2)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@pytest.mark.parametrize(("check_vma", "name"), [(True, "bf16"), (False, "f16")])
def test_mapped_gradient_is_the_global_one(transform, check_vma, name, problem):
    step = transform(squared_error, policy=POLICIES[name], axis_name="data")
    # With `check_vma` the specification P() is a proof that the devices agree.
    run = shard_mapped(step, make_mesh(), check_vma=check_vma, out_specs=REPLICATED)
    result = run(DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y)
    assert_trees_equal(result.value, np.float32(problem.value))
    assert_trees_equal(result.grads, problem.grad)
    assert result.finite


@pytest.mark.parametrize(("check_vma", "mixed"), [(True, True), (False, False)])
def test_paper_function_averages_over_devices_switched_on_or_off(
    check_vma, mixed, problem
):
    def step(scaling, *args):
        value, scaling, finite, grads = mpx.filter_value_and_grad(
            squared_error, scaling, use_mixed_precision=mixed, axis_name="data"
        )(*args)
        return value, grads, finite

    run = shard_mapped(
        step, make_mesh(), check_vma=check_vma, out_specs=(P(), P(), P())
    )
    value, grads, finite = run(
        DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y
    )
    assert_trees_equal(value, np.float32(problem.value))
    assert_trees_equal(grads, problem.grad)
    assert finite


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_nan_in_one_shard_makes_every_device_skip(transform, problem):
    mesh = make_mesh()
    x = inject_nonfinite(problem.x, index=5)  # in the shard of one device
    scaling = DynamicLossScaling.pow2(SCALE)

    def finite_and_scale(axis_name):
        def step(*args):
            result = transform(squared_error, axis_name=axis_name)(*args)
            return per_device((result.finite, result.scaling.metrics()))

        specs = (P("data"), P("data"))
        run = shard_mapped(step, mesh, check_vma=False, out_specs=specs)
        return run(scaling, problem.w, x, problem.y)

    # The premise: without `axis_name` each device decides for itself.
    finite, metrics = finite_and_scale(None)
    np.testing.assert_array_equal(finite, [False] + [True] * 7)
    finite, metrics = finite_and_scale("data")
    np.testing.assert_array_equal(finite, [False] * 8)
    np.testing.assert_array_equal(metrics["loss_scaling"], [SCALE / 2] * 8)
    np.testing.assert_array_equal(metrics["skipped"], [1] * 8)


@pytest.mark.parametrize(
    ("transform", "check_vma"),
    list(zip(TRANSFORMS.values(), [True, False], strict=True)),
    ids=TRANSFORMS,
)
def test_state_spoilt_on_one_device_makes_every_device_skip(
    transform, check_vma, problem
):
    def loss(w, x, y):
        # The statistic of one shard is infinite; nothing else is.
        stats = {"batch_stats": {"sum": jnp.sum(mpx.cast_to_float32(y)) * jnp.inf}}
        return squared_error(w, x, y), jax.tree.map(
            lambda s: jnp.where(jnp.isnan(s), 0, s), stats
        )

    def step(*args):
        result = transform(loss, axis_name="data", has_aux=True)(*args)
        assert result.aux is not None
        return result.finite, result.scaling.metrics(), result.grads

    y = jnp.zeros_like(problem.y).at[0].set(1)
    run = shard_mapped(
        step, make_mesh(), check_vma=check_vma, out_specs=(P(), P(), P())
    )
    scaling = DynamicLossScaling.pow2(SCALE)
    finite, metrics, grads = run(scaling, problem.w, problem.x, y)
    assert mpx.all_finite(grads)
    assert not finite
    assert int(metrics["skipped"]) == 1
    assert run(scaling, problem.w, problem.x, jnp.zeros_like(y))[0]


def test_overflow_in_one_shard_is_retried_by_every_device(problem):
    # A device that went its own way would wait for the others for ever.
    x, y = problem.x.copy(), problem.y.copy()
    x[0], y[0] = 0, 0
    x[0, 0] = 16.0
    scaling = DynamicLossScaling.pow2(2.0**15)
    step = mpx.value_and_grad(squared_error, axis_name="data", retry=20)

    def metrics(*args):
        result = step(*args)
        return per_device((result.finite, result.scaling.loss_scaling, result.grads))

    run = shard_mapped(
        metrics, make_mesh(), check_vma=False, out_specs=(P("data"),) * 3
    )
    w = np.abs(problem.w) + 1
    finite, scales, grads = run(scaling, w, x, y)
    assert np.all(finite)
    assert len(set(np.asarray(scales).tolist())) == 1
    assert scales[0] < 2.0**15
    expected = jax.grad(squared_error)(w, x, y)
    for grad in grads:
        np.testing.assert_allclose(grad, expected, rtol=2.0**-10)


def test_several_axes_are_averaged_together(problem):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    axes = ("data", "model")
    step = mpx.value_and_grad(squared_error, axis_name=axes)
    for check_vma in (True, False):
        run = shard_mapped(
            step, mesh, check_vma=check_vma, out_specs=REPLICATED, axes=axes
        )
        result = run(DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y)
        assert_trees_equal(result.grads, problem.grad)
        assert_trees_equal(result.value, np.float32(problem.value))


def test_aux_stays_with_its_device(problem):
    def loss(w, x, y):
        return squared_error(w, x, y), x @ w

    specs = GradResult(P(), P("data"), P(), P(), P())
    for check_vma in (True, False):
        step = mpx.value_and_grad(loss, has_aux=True, axis_name="data")
        run = shard_mapped(step, make_mesh(), check_vma=check_vma, out_specs=specs)
        result = run(DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y)
        pred = (problem.x @ problem.w).astype(np.float16)
        assert_trees_equal(result.aux, pred)


def test_vmapped_axis_is_averaged_too(problem):
    step = mpx.value_and_grad(squared_error, axis_name="data")
    x, y = problem.x.reshape(8, 2, 8), problem.y.reshape(8, 2)
    run = jax.jit(jax.vmap(step, axis_name="data", in_axes=(None, None, 0, 0)))
    result = run(DynamicLossScaling.pow2(SCALE), problem.w, x, y)
    assert_trees_equal(result.grads, np.tile(problem.grad, (8, 1)))
    result = run(
        DynamicLossScaling.pow2(SCALE),
        problem.w,
        inject_nonfinite(x, index=3),
        y,
    )
    np.testing.assert_array_equal(result.finite, [False] * 8)
    np.testing.assert_array_equal(result.scaling.loss_scaling, [SCALE / 2] * 8)


def test_equinox_model_is_trained_alike_on_one_and_on_eight_devices(problem):
    model = eqx.nn.Linear(8, 1, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, jnp.asarray(problem.w[None]))
    params, static = eqx.partition(model, eqx.is_array)

    def loss(params, x, y):
        pred = jax.vmap(eqx.combine(params, static))(x)[:, 0]
        return jnp.mean((pred - y) ** 2)

    step = mpx.value_and_grad(loss, axis_name="data", policy=POLICIES["bf16"])
    run = shard_mapped(step, make_mesh(), check_vma=True, out_specs=REPLICATED)
    result = run(NoLossScaling(), params, problem.x, problem.y)
    assert_trees_equal(result.grads.weight, problem.grad[None])


# --- In which dtype gradients are summed over devices ---------------------------------


def reduction_dtypes(policy, check_vma, transform=mpx.value_and_grad):
    problem = exact_problem(samples=16, features=8)
    step = transform(squared_error, policy=policy, axis_name="data")
    run = shard_mapped(step, make_mesh(), check_vma=check_vma, out_specs=REPLICATED)
    # Traced, not run: a bf16 sum is not possible on every CPU backend.
    jaxpr = jax.make_jaxpr(run)(
        DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y
    )
    return [
        var.aval.dtype.name
        for eqn in equations(jaxpr)
        if eqn.primitive.name.startswith("psum")
        for var in eqn.invars
        if var.aval.shape  # the gradient; the loss is a scalar
    ]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("p=f32,c=bf16,o=f32", "float32"),
        ("p=f32,c=f16,o=f32", "float32"),
        ("p=f32,c=bf16,o=f32,r=bf16", "bfloat16"),
        ("p=f32,c=bf16,o=f32,r=f16", "float16"),
        ("p=f32,c=f32,o=f32,r=bf16", "bfloat16"),
    ],
)
def test_gradients_are_summed_once_in_the_reduce_dtype(policy, expected, check_vma):
    assert reduction_dtypes(policy, check_vma) == [expected]


@pytest.mark.parametrize("check_vma", [True, False])
def test_accumulated_gradients_are_summed_over_devices_once(check_vma):
    transform = TRANSFORMS["accumulate"]
    assert reduction_dtypes("p=f32,c=bf16,o=f32", check_vma, transform) == ["float32"]


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_reduced_gradients_are_f32_whatever_the_reduce_dtype(dtype, problem):
    step = mpx.value_and_grad(
        squared_error, policy=f"p=f32,c=f32,o=f32,r={dtype}", axis_name="data"
    )
    run = shard_mapped(step, make_mesh(), check_vma=True, out_specs=REPLICATED)
    result = run(DynamicLossScaling.pow2(SCALE), problem.w, problem.x, problem.y)
    assert_trees_equal(result.grads, problem.grad)


def test_parameters_that_differ_between_devices_are_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(w, x):
        def loss(params):
            return jnp.sum(jax.lax.all_gather(params["w"], "data", tiled=True) * x)

        return mpx.value_and_grad(loss, axis_name="data")(
            mpx.NoLossScaling(), {"w": w}
        ).grads["w"]

    run = jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    match = (
        r"parameter `params/w` differs between the devices of \['data'\].*replicated"
    )
    with pytest.raises(ValueError, match=match):
        run(jnp.ones(8), jnp.ones(8))
