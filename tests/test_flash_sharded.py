"""Compressed optimizers on eight devices: sharded like the parameters, the same numbers.

A step is local. What shards hold is decoded, updated and encoded where it lies, so that
the compiled step has no collective, and its results are those of one device up to
roundings: programs of different shapes are fused differently.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from flash_cases import assert_same_step
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite

AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
LAYOUTS = {
    "replicated": P(),
    "row": P("x", None),
    "column": P(None, "x"),
    "2-D": P("x", "y"),
    "all in the last": P(None, ("x", "y")),
    "all in the first": P(("x", "y"), None),
}
# 16 groups of 32: no layout cuts one. 4 groups: fewer than devices, still not cut by
# "column", which has four shards. 3 groups: cut wherever the last axis is sharded.
SHAPE, FEW, CUT = (16, 512), (64, 128), (64, 96)
LARGE = (1024, 1024)  # so large that the maxima are found in a pass of their own
OPTIMIZERS = {
    "adamw": mpx.optim.flash_adamw(1e-2),
    "adam": mpx.optim.flash_adam(1e-2, weight_decay=1e-2),
    "lion": mpx.optim.flash_lion(1e-3),
    "sgd": mpx.optim.flash_sgd(1e-2, momentum=0.9, nesterov=True),
    "sgdw": mpx.optim.flash_sgdw(1e-2),
    "flashoptim": mpx.optim.flash_adamw(
        1e-2, compression=mpx.optim.Compression(format="flashoptim")
    ),
    "f32 moments": mpx.optim.flash_adamw(
        1e-2, compression=mpx.optim.Compression(quantize=False)
    ),
}

each_axis_type = pytest.mark.parametrize("axis_type", AXES.values(), ids=AXES)
each_layout = pytest.mark.parametrize("spec", LAYOUTS.values(), ids=LAYOUTS)


def make_mesh(axis_type):
    assert jax.device_count() == 8
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)


@functools.cache
def numbers(shape):
    rng = np.random.default_rng(0)
    draw = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return draw(), [draw(), draw()]


def problem(shape, mesh=None, spec=None):
    """Returns bf16 parameters and two gradients, on one device or sharded."""

    def put(x):
        leaf = jnp.asarray(x.astype(jnp.bfloat16))
        return {"w": leaf if mesh is None else jax.device_put(leaf, sharding)}

    sharding = None if mesh is None else NamedSharding(mesh, spec)
    weights, grads = numbers(shape)
    return put(weights), [put(grad) for grad in grads]


def shape_with_sharding(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def is_sharded_like(x, mesh, spec):
    """Tells whether an array, or each of its planes, is sharded so."""
    spec = P(None, *spec) if x.ndim > len(spec) else spec
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


def unlike(tree, mesh, spec):
    """Returns the paths of the arrays that are not sharded so."""
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if leaf.ndim and not is_sharded_like(leaf, mesh, spec)
    ]


COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-\w+|"
    r"ragged-all-to-all)[\w-]*\("
)


def compiled(jitted: Any, *args: Any) -> tuple[Any, list[str]]:
    """Returns a compiled function, and what it sends between devices."""
    result = jitted.lower(*args).compile()
    return result, COLLECTIVE.findall(result.as_text())


@functools.cache
def on_one_device(name, shape):
    """Returns parameters and state on one device after one step, and after two."""
    optimizer = OPTIMIZERS[name]
    params, grads = problem(shape)
    step = jax.jit(optimizer.step)
    first = step(params, jax.jit(optimizer.init)(params), grads[0])
    return jax.device_get((tuple(first), tuple(step(*first, grads[1]))))


def second_step(step, name, shape, mesh, spec):
    """Takes the second step on eight devices and compares it with that of one device.

    From the same start: an integer that differs by one is a rounding in the first step,
    and more in the second.

    Args:
        step: A function of parameters, state and gradients, to be jitted.

    Returns:
        What the compiled step sends between devices.
    """
    params, grads = problem(shape, mesh, spec)
    # Those of a template, which the tests of `init` compare with those of a state.
    shapes = jax.tree.map(shape_with_sharding, params)
    shardings = jax.tree.map(
        lambda x: x.sharding if x.ndim else NamedSharding(mesh, P()),
        (shapes, OPTIMIZERS[name].init(shapes)),
    )
    start, expected = on_one_device(name, shape)
    args = (*jax.device_put(start, shardings), grads[1])
    # Donated: a buffer that could not be reused would be a warning, and so an error.
    jitted, found = compiled(jax.jit(step, donate_argnums=(0, 1)), *args)
    result = tuple(jitted(*args))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[:2]) if leaf.ndim)
    for leaf, sharding in zip(
        jax.tree.leaves(result), jax.tree.leaves(shardings), strict=True
    ):
        assert leaf.ndim == 0 or leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_same_step(result, expected)
    return found


# --- init -----------------------------------------------------------------------------


@pytest.mark.some(3)
@each_axis_type
@each_layout
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_every_array_of_the_state_is_sharded_like_its_parameter(axis_type, spec, jit):
    mesh = make_mesh(axis_type)
    params, _ = problem(SHAPE, mesh, spec)
    optimizer = OPTIMIZERS["adamw"]
    init, found = optimizer.init, []
    if jit:
        init, found = compiled(jax.jit(init), params)
    state = init(params)
    arrays = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert arrays == {(), (3, *SHAPE), (3, 16, 16)}  # the premise: there are scales
    assert not unlike(state, mesh, spec)
    assert_trees_equal(jax.device_get(state), optimizer.init(problem(SHAPE)[0]))
    assert found == []
    # That of f32 weights, which need no correction, is not made in one program.
    wide = {"w": params["w"].astype(jnp.float32)}
    assert not unlike(optimizer.init(wide), mesh, spec)


@each_axis_type
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_a_start_from_f32_weights_is_sharded_like_them(axis_type, jit):
    mesh, spec = make_mesh(axis_type), P("x", "y")
    weights, _ = numbers(SHAPE)
    given = {"w": jax.device_put(weights, NamedSharding(mesh, spec))}
    start, found = OPTIMIZERS["adamw"].init_from, []
    if jit:
        start, found = compiled(jax.jit(start), given)
    got = start(given)
    assert found == []
    assert not unlike(got, mesh, spec)
    expected = OPTIMIZERS["adamw"].init_from({"w": jnp.asarray(weights)})
    assert_trees_equal(jax.device_get(got), jax.device_get(expected))


def test_shapes_with_shardings_give_a_template_with_shardings():
    mesh = make_mesh(AxisType.Auto)
    params, _ = problem(SHAPE, mesh, P("x", "y"))
    optimizer = OPTIMIZERS["adamw"]
    shapes = jax.tree.map(shape_with_sharding, params)
    template, state = optimizer.init(shapes), optimizer.init(params)
    assert not unlike(template, mesh, P("x", "y"))
    assert jax.tree.structure(template) == jax.tree.structure(state)
    for leaf, made in zip(
        jax.tree.leaves(template), jax.tree.leaves(state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (made.shape, made.dtype)


# --- step -----------------------------------------------------------------------------


def check_steps(name, shape, mesh, spec, *, finite=None):
    """Takes a step on eight devices; returns what it sends between them."""
    optimizer = OPTIMIZERS[name]

    def step(params, state, grads):
        return optimizer.step(params, state, grads, finite=finite)

    return second_step(step, name, shape, mesh, spec)


@pytest.mark.some(2)
@each_axis_type
@each_layout
def test_sharded_step_is_local_in_place_and_that_of_one_device(axis_type, spec):
    mesh = make_mesh(axis_type)
    assert check_steps("adamw", SHAPE, mesh, spec) == []


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_every_optimizer_steps_locally(name):
    assert check_steps(name, SHAPE, make_mesh(AxisType.Auto), P("x", "y")) == []


@pytest.mark.some(1)
@each_axis_type
@pytest.mark.parametrize("layout", ["row", "column", "all in the first"])
def test_fewer_groups_than_devices_step_locally_if_none_is_cut(axis_type, layout):
    assert check_steps("adamw", FEW, make_mesh(axis_type), LAYOUTS[layout]) == []


@pytest.mark.some(1)
@each_axis_type
@pytest.mark.parametrize("layout", ["2-D", "all in the last"])
def test_large_parameters_step_locally(axis_type, layout):
    assert check_steps("adamw", LARGE, make_mesh(axis_type), LAYOUTS[layout]) == []


@each_axis_type
def test_a_flag_keeps_the_step_local(axis_type):
    mesh = make_mesh(axis_type)
    assert check_steps("adamw", SHAPE, mesh, P("x", "y"), finite=True) == []


@pytest.mark.weekly
@pytest.mark.some(1)
@each_axis_type
def test_a_skipped_step_changes_nothing_on_any_device(axis_type):
    mesh, spec = make_mesh(axis_type), P("x", "y")
    optimizer = OPTIMIZERS["adamw"]
    params, (grad, bad) = problem(SHAPE, mesh, spec)
    params, state = jax.jit(optimizer.step)(params, optimizer.init(params), grad)
    bad = inject_nonfinite(bad, jnp.nan, index=37)
    step = jax.jit(lambda *args, finite: optimizer.step(*args, finite=finite))
    skipped = step(params, state, bad, finite=mpx.all_finite(bad))
    assert not unlike(skipped, mesh, spec)
    assert_trees_equal(tuple(skipped), (params, state))


@pytest.mark.some(1)
@each_axis_type
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("column", "adamw"),
        ("2-D", "adamw"),
        ("all in the last", "adamw"),
    ],
)
def test_shards_that_cut_a_group_give_the_numbers_of_one_device(
    axis_type, layout, name
):
    found = check_steps(name, CUT, make_mesh(axis_type), LAYOUTS[layout])
    # The premise: a group lies on several devices. The two moments are gathered, no more.
    assert 0 < len(found) <= 2


@pytest.mark.some(1)
@each_axis_type
@pytest.mark.parametrize("layout", ["column", "2-D", "all in the last"])
def test_scales_of_groups_that_are_cut_lie_on_every_device(axis_type, layout):
    mesh, spec = make_mesh(axis_type), LAYOUTS[layout]
    params, _ = problem(CUT, mesh, spec)
    for init in (OPTIMIZERS["adamw"].init, jax.jit(OPTIMIZERS["adamw"].init)):
        state: Any = init(params)
        rest = (state.mu["w"].codes, state.nu["w"].codes, state.correction)
        assert not unlike(rest, mesh, spec)
        scales = (state.mu["w"].scale, state.nu["w"].scale)
        assert not unlike(scales, mesh, P(spec[0], None))


def test_groups_are_cut_only_in_the_layouts_that_say_so():
    # Of the check above: "row" has the same shape and needs no collective.
    assert check_steps("adamw", CUT, make_mesh(AxisType.Auto), P("x", None)) == []


@pytest.mark.weekly
@pytest.mark.some(1)
@pytest.mark.standard_promotion  # for `optax.apply_updates`
@each_axis_type
def test_optax_update_and_f32_weights_are_sharded_like_the_parameters(axis_type):
    mesh, spec = make_mesh(axis_type), P("x", "y")
    optimizer = OPTIMIZERS["adamw"]

    def run(params, grad):
        state = optimizer.init(params)
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)
        master = mpx.optim.master_params(params, state)
        return master, mpx.optim.from_master(master, params, state)

    params, grads = problem(SHAPE, mesh, spec)
    jitted = jax.jit(run)
    sharded, found = compiled(jitted, params, grads[0])
    assert found == []
    result = sharded(params, grads[0])
    assert not unlike(result, mesh, spec)
    alone, alone_grads = problem(SHAPE)
    master, stored = jitted(alone, alone_grads[0])
    assert_same_step(tuple(result[1]), tuple(stored))
    # And the f32 weights are those that the other two hold, whatever was rounded how.
    assert_trees_equal(
        jax.device_get(result[0]), jax.device_get(mpx.optim.master_params(*result[1]))
    )
    assert master["w"].dtype == jnp.float32


@pytest.mark.weekly
@pytest.mark.some(1)
@each_axis_type
def test_small_and_f32_parameters_step_locally(axis_type):
    mesh = make_mesh(axis_type)
    optimizer = OPTIMIZERS["adamw"]
    weights, grads = numbers(SHAPE)

    def tree(x):
        low = x.astype(jnp.bfloat16)
        return {
            "bias": jnp.asarray(low[0]),  # small: f32 moments
            "f32": jnp.asarray(x),  # no correction
            "odd": jnp.asarray(low[:, :40]),  # 40 is no multiple of 32
        }

    specs = {"bias": P("x"), "f32": P("x", "y"), "odd": P("y", "x")}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    step = jax.jit(lambda p, g: optimizer.step(p, optimizer.init(p), g))
    args = jax.device_put((tree(weights), tree(grads[0])), (shardings, shardings))
    sharded, found = compiled(step, *args)
    assert found == []
    params, state = sharded(*args)
    parts = state.mu, state.nu, state.correction
    for name, spec in specs.items():
        assert is_sharded_like(params[name], mesh, spec)
        assert not unlike([part[name] for part in parts], mesh, spec)
    alone = step(tree(weights), tree(grads[0]))
    assert_same_step((params, state), tuple(alone))


def test_explicit_result_keeps_the_sharding_of_the_parameter_not_of_the_gradient():
    mesh = make_mesh(AxisType.Explicit)
    params, _ = problem(SHAPE, mesh, P())
    _, grads = problem(SHAPE, mesh, P("x", None))
    optimizer = OPTIMIZERS["adamw"]
    result = jax.jit(optimizer.step)(params, optimizer.init(params), grads[0])
    assert not unlike(result, mesh, P())


# --- shard_map ------------------------------------------------------------------------


def specs_of(optimizer, shape, mesh, spec):
    """Returns the specs of parameters and state, as the guide takes them."""
    sharding = NamedSharding(mesh, spec)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)}
    return jax.tree.map(lambda x: x.sharding.spec, (params, optimizer.init(params)))


@pytest.mark.parametrize("name", ["adamw", "f32 moments"])
def test_moments_of_shapes_are_sharded_like_the_parameters(name):
    mesh, spec = make_mesh(AxisType.Auto), LAYOUTS["2-D"]
    params, _ = problem(SHAPE, mesh, spec)
    shapes = jax.tree.map(shape_with_sharding, params)
    state: Any = OPTIMIZERS[name].init(shapes)
    moments = state.mu, state.nu, state.correction
    assert len(jax.tree.leaves(moments)) > 2
    assert not unlike(moments, mesh, spec)


@pytest.mark.some(2)
@each_axis_type
@pytest.mark.parametrize(
    ("layout", "check_vma"),
    [
        ("row", True),
        ("column", True),
        ("2-D", True),
        ("replicated", True),
        ("2-D", False),
    ],
)
def test_step_in_shard_map_is_that_of_one_device(axis_type, layout, check_vma):
    mesh, spec = make_mesh(axis_type), LAYOUTS[layout]
    specs = specs_of(OPTIMIZERS["adamw"], SHAPE, mesh, spec)
    step = jax.shard_map(
        lambda *args: tuple(OPTIMIZERS["adamw"].step(*args)),
        mesh=mesh,
        in_specs=(*specs, {"w": spec}),
        out_specs=specs,
        check_vma=check_vma,
    )
    assert second_step(step, "adamw", SHAPE, mesh, spec) == []


@pytest.mark.parametrize("check_vma", [True, False])
def test_init_in_shard_map_makes_the_state_of_each_shard(check_vma):
    mesh, spec = make_mesh(AxisType.Auto), P(None, "x")
    # Each device sees a quarter, which alone would be too small for 8 bits.
    compression = mpx.optim.Compression(min_size=0, jitter=False)
    optimizer = mpx.optim.flash_adamw(1e-2, compression=compression)
    params, _ = problem(SHAPE, mesh, spec)
    expected = optimizer.init(params)
    specs = specs_of(optimizer, SHAPE, mesh, spec)
    init = jax.shard_map(
        optimizer.init,
        mesh=mesh,
        in_specs=specs[:1],
        out_specs=specs[1],
        check_vma=check_vma,
    )
    state = jax.jit(init)(params)
    assert not unlike(state, mesh, spec)
    assert_trees_equal(jax.device_get(state), jax.device_get(expected))
