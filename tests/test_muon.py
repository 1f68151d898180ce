"""Muon in 8 bits: beside optax, beside f64, on eight devices, with release and in checkpoints."""

import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200
import mpx
import mpx.compat.flashoptim
from flash_cases import assert_same_step_of
from kernel_cases import (
    ODD,
    assert_kernel_equals_plain,
    make_case,
    make_plan,
    moments_of,
    plain,
)
from models import normal
from mpx._optim._muon import newton_schulz
from mpx._optim._update_rules import Muon
from mpx.optim import Compression, ParamGroup, flash_adamw, flash_lion, flash_muon
from mpx.testing import assert_trees_equal
from test_flash_sharded import AXES, COLLECTIVE

F32, BF16, E4M3 = (np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn))
STANDARD = ((3.4445, -4.7750, 2.0315),) * 5
PLAIN = Compression(quantize=False, master_bits=None)
Axes = optax.contrib.MuonDimensionNumbers


def draw(shapes, seed=0, dtype=F32) -> Any:
    """Returns an array for each shape, all different."""
    names = enumerate(shapes.items(), start=100 * seed)
    return {name: normal(i, *shape, dtype=dtype) for i, (name, shape) in names}


SHAPES = {"wide": (32, 96), "also wide": (32, 96), "tall": (96, 64), "bias": (96,)}


def trained(optimizer, params, grads, step=None) -> Any:
    """Returns parameters and state after a step for each tree of gradients."""
    init = jax.jit(optimizer.init) if step is None else optimizer.init
    step, state = step or jax.jit(optimizer.step), init(params)
    for each in grads:
        params, state = step(params, state, each)
    return params, state


# One program for the tests that only need some step.
MIXED = flash_muon(0.02, compression=Compression(min_size=64), ns_steps=2)
mixed_step = cast(Any, jax.jit(MIXED.step))


def by_optax(peer, params, grads) -> Any:
    update, state = jax.jit(peer.update), peer.init(params)
    for each in grads:
        updates, state = update(each, state, params)
        params = optax.apply_updates(params, updates)
    return params


# --- the rule ---------------------------------------------------------------------------


def orthogonalised(x, coefficients=STANDARD):
    """Returns in f64 what Newton-Schulz steps make of a matrix."""
    x = np.asarray(x, np.float64)
    if np.any(x):
        x = x / np.linalg.norm(x)
    for a, b, c in coefficients:
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


def off(found, true):
    """Returns the norm of a difference, as a share of the norm."""
    true = np.asarray(true, np.float64)
    return np.linalg.norm(np.asarray(found, np.float64) - true) / np.linalg.norm(true)


def spread_out(rows, columns):
    """Returns a matrix whose singular values lie between 1 and 10⁻³."""
    left, _ = np.linalg.qr(np.asarray(normal(1, rows, rows), np.float64))
    right, _ = np.linalg.qr(np.asarray(normal(2, columns, rows), np.float64))
    return (left * np.logspace(0, -3, rows)) @ right.T


@functools.cache
def spread_out_problem():
    """Returns a matrix, what becomes of it in f64, and how far from that optax is.

    The steps amplify small singular values, and with them what is rounded: the measure
    is optax, with a matrix of bf16.
    """
    matrix = spread_out(64, 160)
    peer: Any = optax.contrib.muon(-1.0, nesterov=False)
    low = jnp.asarray(matrix, BF16)
    update, _ = jax.jit(lambda x: peer.update(x, peer.init(x), x))(low)
    exact = orthogonalised(matrix)
    return matrix, exact, off(np.asarray(update, np.float32) / np.sqrt(160 / 64), exact)


jitted = jax.jit(newton_schulz, static_argnums=1)


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    ("dtype", "times"), [(F32, 1e-4), (BF16, 0.8), (E4M3, 2.0)], ids=str
)
def test_newton_schulz_follows_f64(dtype, times):
    matrix, exact, unit = spread_out_problem()
    limit = times * unit
    options = Muon(True, STANDARD, dtype, 1e-8)
    stack = jnp.asarray(np.stack([matrix, 2 * matrix]), F32)
    found = jitted(stack, options)
    assert found.dtype == (F32 if dtype == F32 else BF16)
    for one in np.asarray(found):
        assert off(one, exact) < limit
    turned = np.asarray(jitted(stack.mT, options))
    assert off(turned[0].T, exact) < limit


@pytest.mark.parametrize("dtype", [F32, BF16, E4M3], ids=str)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_huge_and_tiny_matrices_have_the_same_direction(dtype, scale):
    x, none = normal(0, 1, 32, 64), 1e-37
    options = Muon(True, STANDARD, dtype, none)
    assert_trees_equal(jitted(x * scale, options), jitted(x, options))


def test_zeros_and_nonfinite_matrices_stay_what_they_are():
    x = jnp.stack([normal(0, 8, 16), jnp.zeros((8, 16)), normal(1, 8, 16)])
    found = jitted(x.at[2, 3, 4].set(jnp.nan), Muon(True, STANDARD, BF16, 1e-8))
    found = np.asarray(found)
    assert np.isfinite(np.asarray(found[0], np.float32)).all()
    assert np.any(found[0])
    assert not np.any(found[1])
    assert np.isnan(np.asarray(found[2], np.float32)).all()
    assert newton_schulz(x[:0], Muon(True, STANDARD, BF16, 1e-8)).shape == (0, 8, 16)


# Each step is compiled: where their number is no matter, one is enough.
OPTIONS = {
    "default": {},
    "no Nesterov": {"nesterov": False, "ns_steps": 1},
    "decay": {"weight_decay": 0.1, "ns_steps": 1},
    "three steps": {"ns_steps": 3},
    "consistent": {"consistent_rms": 0.2, "ns_steps": 1},
    "large eps": {"eps": 3.0, "ns_steps": 1},
    "schedule": {
        "learning_rate": optax.linear_schedule(0.1, 0.0, 4),
        "ns_steps": 1,
    },
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_of_matrices_are_those_of_optax(name):
    options = {"learning_rate": 0.02} | OPTIONS[name]
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
    params = draw(shapes)
    grads = [draw(shapes, seed) for seed in (1, 2, 3)]
    optimizer = flash_muon(compression=PLAIN, ns_dtype=F32, **options)
    peer = optax.contrib.muon(**options)
    found, _ = trained(optimizer, params, grads)
    true = by_optax(peer, params, grads)
    for key in shapes:
        moved = np.abs(true[key] - params[key]).max()
        np.testing.assert_allclose(found[key], true[key], atol=1e-4 * moved, rtol=0)


@pytest.mark.standard_promotion
def test_axes_of_matrices_are_those_of_optax():
    shapes = {"heads": (32, 4, 16), "layers": (3, 32, 48), "kernel": (3, 3, 8, 16)}
    axes = {
        "heads": Axes(0, (1, 2)),
        "layers": Axes(-2, -1),
        "kernel": Axes((0, 1, 2), 3),
    }
    params, grads = draw(shapes), [draw(shapes, 1), draw(shapes, 2)]
    optimizer = flash_muon(
        0.02,
        compression=PLAIN,
        ns_dtype=F32,
        ns_steps=1,
        matrices=lambda params: axes,
    )
    peer = optax.contrib.muon(0.02, ns_steps=1, muon_weight_dimension_numbers=axes)
    found, _ = trained(optimizer, params, grads)
    true = by_optax(peer, params, grads)
    for key in shapes:
        np.testing.assert_allclose(found[key], true[key], atol=2e-6, rtol=0)


def test_variables_of_nnx_may_hold_the_axes():
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.Linear(32, 64, rngs=nnx.Rngs(0)))

    def axes(params):
        return jax.tree.map(lambda x: Axes(0, 1) if x.ndim == 2 else None, params)

    state: Any = flash_muon(0.02, matrices=axes).init(params)
    assert state.nu["kernel"] is None
    assert state.nu["bias"] is not None


# --- what is no matrix --------------------------------------------------------------------


def test_vectors_and_groups_step_as_with_their_own_optimizer():
    shapes = {"wide": (32, 96), "embed": (64, 64), "head": (64, 64)}
    shapes |= {"bias": (64,), "gain": (64,)}
    params = draw(shapes, dtype=BF16)
    grads = draw(shapes, 1, BF16)
    small = Compression(min_size=64)
    groups = [
        ParamGroup("embed", optimizer=flash_adamw(3e-3, b2=0.9)),
        ParamGroup("head", optimizer=flash_lion(1e-3)),
        ParamGroup("gain", {"learning_rate": 0.5}),
    ]
    muon = flash_muon(0.02, groups=groups, compression=small, ns_steps=1)
    found, state = trained(muon, params, [grads])
    peers = {
        "embed": flash_adamw(3e-3, b2=0.9, compression=small),
        "head": flash_lion(1e-3, compression=small),
        "gain": flash_adamw(0.5, weight_decay=0.0, compression=small),
        "bias": flash_adamw(0.02, weight_decay=0.0, compression=small),
    }
    for name, peer in peers.items():
        part = lambda tree, name=name: {name: tree[name]}  # noqa: E731
        peer_step = trained(peer, part(params), [part(grads)])
        assert_same_step_of(name, (found, state), peer_step)
    second = jax.eval_shape(lambda: state.nu)
    has_second = {name for name in shapes if second[name] is not None}
    assert has_second == {"embed", "bias", "gain"}
    assert not np.array_equal(found["wide"], params["wide"])


def test_a_group_of_adamw_fits_any_optimizer():
    shapes = {"w": (64, 64), "embed": (64, 64)}
    params, grads = draw(shapes, dtype=BF16), [draw(shapes, 1, BF16)]
    groups = [ParamGroup("embed", optimizer=flash_adamw(3e-3))]
    found, state = trained(flash_lion(1e-3, groups=groups), params, grads)
    true = trained(flash_adamw(3e-3), params, grads)
    assert_same_step_of("embed", (found, state), true)
    assert state.nu["w"] is None
    assert state.moments == ("mu", "nu")


def test_state_takes_four_bytes_a_parameter():
    params = {"w": jnp.ones((256, 512)), "v": jnp.ones((512, 256))}
    made = flash_muon(0.02).init_from(params)
    count = sum(x.size for x in jax.tree.leaves(params))
    assert sum(x.nbytes for x in jax.tree.leaves(made)) / count <= 4.1


def test_compressed_steps_follow_f32():
    shapes = {"w": (64, 128), "v": (64, 128)}
    weights = draw(shapes)
    signal = draw(shapes, 9)
    grads = [
        jax.tree.map(lambda x, y: x + y, signal, draw(shapes, seed))
        for seed in range(1, 31)
    ]
    plain = flash_muon(0.05, compression=PLAIN, ns_dtype=F32)
    true, _ = trained(plain, weights, grads)
    optimizer = flash_muon(0.05, ns_dtype=F32)
    step = jax.jit(optimizer.step)
    params, state = optimizer.init_from(weights)
    for each in grads:
        params, state = step(params, state, each)
    master = mpx.optim.master_params(params, state)
    for name in shapes:
        path = off(master[name] - weights[name], true[name] - weights[name])
        assert path < 0.03


# --- skipping -------------------------------------------------------------------------------


def test_a_skipped_step_changes_nothing():
    params = draw(SHAPES, dtype=BF16)
    params, state = trained(MIXED, params, [draw(SHAPES, 1, BF16)], mixed_step)
    bad = draw(SHAPES, 2, BF16)
    bad["wide"] = bad["wide"].at[0, 0].set(jnp.nan)
    after = mixed_step(params, state, bad, finite=jnp.array(False))
    assert_trees_equal(tuple(after), (params, state))


def test_a_nan_that_nobody_looks_for_is_seen_in_its_weight_only():
    params = draw(SHAPES, dtype=BF16)
    grads = draw(SHAPES, 1, BF16)
    grads["wide"] = grads["wide"].at[2, 3].set(jnp.nan)
    found, _ = trained(MIXED, params, [grads], mixed_step)
    bad = np.isnan(np.asarray(found["wide"], np.float32))
    assert np.argwhere(bad).tolist() == [[2, 3]]
    moved, _ = trained(MIXED, params, [draw(SHAPES, 1, BF16)], mixed_step)
    assert_trees_equal(found["also wide"], moved["also wide"])


# --- on several devices ---------------------------------------------------------------------

# Eight devices do not divide three matrices.
MANY = {"w0": (64, 256), "w1": (64, 256), "w2": (64, 256)}
MANY |= {"layers": (4, 64, 64), "bias": (64,)}
# By name: the layout of an array, and what is sent for the two shapes of matrices.
LAYOUTS = {
    "replicated": (lambda _, rank: P(), {"all-gather": 2}),
    "rows": (
        lambda _, rank: P(*[None] * (rank - 2), "x"),
        {"all-to-all": 4, "all-gather": 2},
    ),
    "2-D": (lambda _, rank: P(*[None] * (rank - 2), "x", "y"), {"all-to-all": 8}),
    "both in one": (
        lambda _, rank: P(*[None] * (rank - 2), ("x", "y")),
        {"all-to-all": 4},
    ),
    "layers": (
        lambda _, rank: P("x", None, "y") if rank == 3 else P(None, ("x", "y")),
        {"all-to-all": 4},
    ),
    "not all alike": (
        lambda name, rank: P(None, ("x", "y")) if name in "w0 w1" else P(),
        {"all-to-all": 2, "all-gather": 2},
    ),
}


def axes_of(params):
    ranks = {1: None, 2: Axes(), 3: Axes(1, 2)}
    return jax.tree.map(lambda x: ranks[x.ndim], params)


# In f32: the roundings of bf16, which differ between programs, are amplified.
MUON = flash_muon(0.05, matrices=axes_of, ns_dtype=F32, ns_steps=2)


@functools.cache
def on_one_device():
    grads = [draw(MANY, 1, BF16), draw(MANY, 2, BF16)]
    return jax.device_get(trained(MUON, draw(MANY, dtype=BF16), grads)[0])


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_matrix_is_orthogonalised_on_one_device(layout, kind):
    spec, expected = LAYOUTS[layout]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AXES[kind],) * 2)

    def put(tree):
        specs = {
            name: spec(name, x.ndim) if x.ndim > 1 else P() for name, x in tree.items()
        }
        if kind == "explicit":  # results of programs name every axis there
            specs = {
                name: P(*each, *[None] * (tree[name].ndim - len(each)))
                for name, each in specs.items()
            }
        return {
            name: jax.device_put(x, NamedSharding(mesh, specs[name]))
            for name, x in tree.items()
        }

    params, step = put(draw(MANY, dtype=BF16)), cast(Any, jax.jit(MUON.step))
    grads = [put(draw(MANY, seed, BF16)) for seed in (1, 2)]
    program = step.lower(params, MUON.init(params), grads[0]).compile().as_text()
    found = [
        text.split("-start")[0].rstrip("(") for text in COLLECTIVE.findall(program)
    ]
    assert {name: found.count(name) for name in found} == expected
    got, _ = trained(MUON, params, grads, step)
    assert step._cache_size() == 1
    for name, true in on_one_device().items():
        assert got[name].sharding.is_equivalent_to(params[name].sharding, true.ndim)
        before = np.asarray(params[name], np.float32)
        path = np.asarray(got[name], np.float32) - before
        assert off(path, np.asarray(true, np.float32) - before) < 0.02


def test_inside_shard_map_each_device_has_matrices_of_its_own():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    params, grads = normal(0, 8, 32, 64), normal(1, 8, 32, 64)
    optimizer = flash_muon(0.05, compression=PLAIN, ns_dtype=F32, ns_steps=2)

    @jax.jit
    def step(param, grad):
        return optimizer.step(param[0], optimizer.init(param[0]), grad[0]).params[None]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    found = jax.jit(mapped)(params, grads)
    for index in range(8):
        true = step(params[index : index + 1], grads[index : index + 1])
        np.testing.assert_allclose(found[index], true[0], atol=1e-5)


def test_states_of_several_models_step_under_vmap():
    params, grads = draw({"w": (3, 32, 64)}), draw({"w": (3, 32, 64)}, 1)
    states, step = jax.vmap(MIXED.init)(params), jax.jit(MIXED.step)
    found = jax.jit(jax.vmap(MIXED.step))(params, states, grads).params
    for index in range(3):
        one, grad = ({"w": x["w"][index]} for x in (params, grads))
        true = step(one, MIXED.init(one), grad).params
        np.testing.assert_allclose(found["w"][index], true["w"], atol=1e-3)


# --- the kernel -----------------------------------------------------------------------------


def test_the_kernel_takes_gradient_and_direction():
    plan = make_plan(Muon(True, STANDARD[:1], BF16, 1e-8))
    scalars, grad, leaf = make_case(plan, ODD)
    _, towards, _ = make_case(plan, ODD, seed=1)
    assert_kernel_equals_plain(plan, (scalars, (grad, towards), leaf))
    # The momentum follows the gradient, and the weight the direction.
    steps = [
        plain(plan, scalars, pair, leaf) for pair in [(grad, grad), (grad, towards)]
    ]
    assert_trees_equal(*(moments_of(plan, step) for step in steps))
    assert not np.array_equal(steps[0].param, steps[1].param)


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_fsdp_on_eight_h200s_sends_two_all_to_alls_in_bf16(dtype):
    mesh = Mesh(np.array(h200.devices()), ("x",), axis_types=(AxisType.Auto,))
    sharding, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    params = {
        f"w{i}": jax.ShapeDtypeStruct((1024, 2048), BF16, sharding=sharding)
        for i in range(6)
    }
    optimizer = flash_muon(0.02, ns_dtype=dtype)
    state, step = optimizer.init(params), jax.jit(optimizer.step, donate_argnums=(0, 1))
    finite = jax.ShapeDtypeStruct((), bool, sharding=everywhere)
    with jax.set_mesh(mesh):
        lowered = step.lower(params, state, params, finite=finite)
        program = lowered.compile(h200.compiler_options())
    text = str(program.as_text())
    sent = re.findall(r"= \(?(\w+)\[[^=]*? ([a-z-]+)-start\(", text)
    sent += re.findall(r"= \(?(\w+)\[[^=]*? (all-to-all|all-gather|all-reduce)\(", text)
    assert sorted(sent) == [("bf16", "all-to-all")] * 2
    # Eight matrices, of which two are zeros, in one stack; one launch steps all leaves.
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
    # Without a preset XLA would try kernels of its own for minutes.
    steps = 5 * 3 if dtype == E4M3 else 0
    assert text.count('custom_call_target="__cublas$lt$matmul$f8"') == steps
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes


# --- release, checkpoints ---------------------------------------------------------------------


def scanned_loss(params, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])
    return jnp.mean((h @ params["head"]).astype(jnp.float32) ** 2)


def test_release_gives_what_step_gives():
    params = draw({"layers": (3, 64, 64), "head": (64, 32)})
    axes = {"layers": Axes(1, 2), "head": Axes()}
    small = Compression(min_size=64)
    optimizer = flash_muon(
        0.05, matrices=axes, compression=small, ns_dtype=F32, ns_steps=2
    )
    x, state = normal(5, 96, 64), optimizer.init(params)
    released = jax.jit(mpx.optim.release(scanned_loss, optimizer))(params, state, x)
    grads = jax.jit(jax.grad(scanned_loss))(params, x)
    true = jax.jit(optimizer.step)(params, state, grads)
    for name in params:
        before = np.asarray(params[name], np.float32)
        paths = [
            np.asarray(t[name], np.float32) - before
            for t in (released.params, true.params)
        ]
        assert off(*paths) < 0.02
    assert int(released.state.count) == 1


def test_conversion_to_f32_and_back_keeps_moments():
    params = draw(SHAPES, dtype=BF16)
    params, state = trained(MIXED, params, [draw(SHAPES, 1, BF16)], mixed_step)
    weights, plain = cast(Any, mpx.checkpoint.to_f32(params, state))
    assert plain.nu["wide"] is None
    assert plain.nu["bias"].dtype == F32
    like = params, MIXED.init(params)
    back = mpx.checkpoint.from_f32(weights, plain, like=like)
    assert_trees_equal(back.params, params)
    assert_trees_equal(back.state.mu, state.mu)
    assert_trees_equal(back.state.correction, state.correction)
    assert_trees_equal(back.state.nu["bias"].codes, state.nu["bias"].codes)
    full = plain._replace(nu=plain.mu)
    with pytest.raises(ValueError, match="`nu` beside the parameters"):
        mpx.checkpoint.from_f32(weights, full, like=like)


def test_resume_is_exact(tmp_path):
    params = draw(SHAPES, dtype=BF16)
    grads = [draw(SHAPES, seed, BF16) for seed in (1, 2, 3)]
    state = MIXED.init(params)
    for number, each in enumerate(grads):
        if number == 2:
            with mpx.checkpoint.Checkpointer(tmp_path) as checkpoints:
                checkpoints.save(number, (params, state))
        params, state = mixed_step(params, state, each)
    fresh = draw(SHAPES, 7, BF16)
    with mpx.checkpoint.Checkpointer(tmp_path) as checkpoints:
        restored = checkpoints.restore((fresh, MIXED.init(fresh)))
    assert_trees_equal(tuple(mixed_step(*restored, grads[2])), (params, state))


# --- what is refused ------------------------------------------------------------------------

WRONG = {
    "axes": (
        lambda: flash_muon(0.1, matrices={"w": Axes(0, 2)}).init(
            {"w": jnp.ones((4, 4))}
        ),
        "`matrices` gives the axes",
    ),
    "one axis": (
        lambda: flash_muon(0.1, matrices={"w": Axes(0, 0)}).init(
            {"w": jnp.ones((4, 4))}
        ),
        "which is another",
    ),
    "tree": (
        lambda: flash_muon(0.1, matrices={"v": Axes()}).init({"w": jnp.ones((4, 4))}),
        "structure of the parameters",
    ),
    "dtype": (lambda: flash_muon(0.1, ns_dtype="float16"), "ns_dtype"),
    "coefficients": (lambda: flash_muon(0.1, ns_coeffs=(1.0, 2.0)), "three numbers"),
    "steps": (lambda: flash_muon(0.1, ns_steps=0), "at least 1"),
    "eps": (lambda: flash_muon(0.1, eps=0.0), "eps"),
    "rms": (lambda: flash_muon(0.1, consistent_rms=-1.0), "consistent_rms"),
    "beta": (lambda: flash_muon(0.1, beta=1.0), "beta"),
    "both": (
        lambda: flash_muon(
            0.1, groups=[ParamGroup("w", {"beta": 0.5}, optimizer=flash_adamw(1e-3))]
        ),
        "Give the hyperparameters to that optimizer",
    ),
    "group in group": (
        lambda: flash_muon(
            0.1, groups=[ParamGroup("w", optimizer=flash_adamw(1e-3, mask={"w": True}))]
        ),
        "must have no `mask`",
    ),
    "hyperparameter": (
        lambda: flash_muon(0.1, groups=[ParamGroup("w", {"momentum": 0.5})]),
        "has only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(name):
    make, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_is_no_axes_is_refused():
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(TypeError, match=r"`w` has 'wide'"):
        flash_muon(0.1, matrices={"w": "wide"}).init(params)


def test_an_optax_optimizer_is_no_optimizer_of_a_group():
    with pytest.raises(TypeError, match="must be a compressed one"):
        flash_muon(0.1, groups=[ParamGroup("w", optimizer=optax.adam(1e-3))])


def test_a_state_of_other_groups_is_refused():
    params = draw({"w": (64, 64), "embed": (64, 64)}, dtype=BF16)
    groups = [ParamGroup("embed", optimizer=flash_adamw(1e-3))]
    state = flash_muon(0.1, groups=groups).init(params)
    with pytest.raises(ValueError, match="The state of `embed` must be"):
        flash_muon(0.1).step(params, state, params)


def test_flashoptim_has_no_state_of_muon():
    params = draw({"w": (64, 64), "bias": (64,)}, dtype=BF16)
    optimizer = flash_muon(0.1, compression=Compression(format="flashoptim"))
    with pytest.raises(ValueError, match="moments of several kinds"):
        mpx.compat.flashoptim.from_mpx(params, optimizer.init(params))
