"""Checkpoints of every kind of state: bit for bit, on other meshes, or a clear error."""

import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import normal
from mpx.checkpoint import Checkpointer, from_f32, restore, save, to_f32
from mpx.testing import assert_trees_equal

pytestmark = [pytest.mark.standard_promotion]

SMALL = [
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3", "float8_e3m4",
    "float4_e2m1fn", "int4", "uint4", "int2", "uint2",
]  # fmt: skip
WIDE = ["bool", "uint8", "bfloat16", "float16", "float32", "int32", "complex64"]


class Net(eqx.Module):
    """A module with arrays, functions, strings, numbers and static fields."""

    mlp: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    name: str
    width: int = eqx.field(static=True)

    def __init__(self, seed):
        self.mlp = eqx.nn.MLP(32, 32, 128, 1, key=jax.random.key(seed))
        self.norm = eqx.nn.LayerNorm(32)
        self.dropout = eqx.nn.Dropout(0.5)
        self.name, self.width = "net", 32


def bf16_params(seed):
    weight = normal(seed, 64, 128, dtype=jnp.bfloat16)
    return {"w": weight, "b": jnp.full(3, seed, jnp.bfloat16)}


def flash_state(optimizer, seed):
    params = bf16_params(seed)
    state = optimizer.init(params)
    for _ in range(seed):
        params, state = optimizer.step(params, state, jax.tree.map(jnp.sin, params))
    return {"params": params, "state": state}


def make_state(seed):
    """Everything that mpx makes, and what else may be in a training state."""
    net = Net(seed)
    linear = linen.Dense(3)
    scaling = mpx.DynamicLossScaling.pow2(period=3)
    fp8 = mpx.fp8(lambda w, x: x @ w, mpx.recipes.DelayedScaling(history=4))
    scales = fp8.init(jnp.ones((32, 32)), jnp.ones((32, 32)))
    return {
        "model": net,
        "optimizer": optax.chain(
            optax.clip(1.0), mpx.optim.skip_nonfinite(optax.adamw(1e-3))
        ).init(eqx.filter(net, eqx.is_inexact_array)),
        "masters": mpx.optim.master_weights(optax.sgd(0.1)).init(bf16_params(seed)),
        "adamw": flash_state(mpx.optim.flash_adamw(1e-2), seed),
        "lion": flash_state(mpx.optim.flash_lion(1e-2), seed),
        "linen": linear.init(jax.random.key(seed), jnp.ones((1, 2))),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(seed))),
        "batch_norm": eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "b", mode="ema"),
        "scalings": [scaling.adjust(seed == 0), mpx.NoLossScaling()],
        "fp8": jax.tree.map(lambda x: x + np.float32(seed), scales),
        "dtypes": {name: jnp.arange(3).astype(name) + 0 for name in WIDE}
        | {name: (jnp.arange(3) % 2 + seed % 2).astype(name) for name in SMALL},
        "numpy": [np.arange(3) + seed, np.float64(seed), np.ones(2, jnp.int4) * 1],
        "numpy float8": np.full(3, seed).astype(ml_dtypes.float8_e4m3fn),
        "keys": [
            jax.random.key(seed),
            jax.random.split(jax.random.key(seed, impl="rbg")),
        ],
        "numbers": {"step": seed, "best": seed / 3, "done": seed > 0, "z": seed * 1j},
        "empty": [jnp.zeros((0, 3)), np.zeros((0,), np.int8), {}, (), None],
        "float0": np.zeros(2, jax.dtypes.float0),
        "odd names": {"a/b": jnp.full(1, seed), "a": {"b": -jnp.ones(1)}, "é .:": 1.5},
        "functions": [jnp.sin, "text"],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = make_state(1)
        save(folder, state, step=7)
        return folder, state, make_state(0)


# --- Bit for bit ----------------------------------------------------------------------


def structs(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree
    )


@pytest.mark.parametrize("template", [lambda x: x, structs], ids=["arrays", "structs"])
def test_every_state_comes_back_bit_for_bit(saved, template):
    folder, state, fresh = saved
    assert state["numbers"] != fresh["numbers"]
    restored = restore(folder, template(fresh))
    assert_trees_equal(restored, state)
    if template is not structs:
        assert [*map(type, restored["numpy"])] == [*map(type, state["numpy"])]
    types = [{k: type(v) for k, v in x["numbers"].items()} for x in (restored, state)]
    assert types[0] == types[1]


def test_restored_arrays_are_committed_only_where_the_template_is(saved):
    folder, state, fresh = saved
    device = jax.devices()[5]
    template = {
        "adamw": fresh["adamw"],
        "linen": jax.device_put(fresh["linen"], device),
    }
    restored = restore(folder, template, partial=True)
    assert_trees_equal(restored, {key: state[key] for key in template})
    assert not any(x.committed for x in jax.tree.leaves(restored["adamw"]))
    assert all(x.devices() == {device} for x in jax.tree.leaves(restored["linen"]))


def test_static_parts_come_from_the_template(saved):
    folder, state, fresh = saved
    template = eqx.tree_at(lambda t: t["model"].name, fresh, "other")
    assert restore(folder, template)["model"].name == "other"


def test_a_changed_field_of_a_module_is_heard_and_kept(saved):
    folder, _, fresh = saved
    template = {"model": eqx.nn.inference_mode(fresh["model"])}
    with pytest.warns(
        RuntimeWarning, match="`model/dropout/inference` is True in the t"
    ):
        restored = restore(folder, template, partial=True)
    assert restored["model"].dropout.inference is True


def test_nnx_modules_are_made_anew(tmp_path):
    def make(seed):
        rngs = nnx.Rngs(seed)
        model = nnx.Sequential(nnx.Linear(2, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        return {"model": model, "more": [optimizer, seed], "linear": model.layers[0]}

    state, template = make(1), make(0)
    before = nnx.state(template["model"])
    kernel = np.array(before["layers"][0]["kernel"][...])
    save(tmp_path, state)
    restored = restore(tmp_path, template)
    for key in ("model", "linear"):
        assert_trees_equal(nnx.state(restored[key]), nnx.state(state[key]))
    assert_trees_equal(nnx.state(restored["more"][0]), nnx.state(state["more"][0]))
    assert restored["more"][1] == 1
    assert restored["model"].layers[0] is restored["linear"]  # what is shared stays so
    assert np.array_equal(template["model"].layers[0].kernel[...], kernel)


# --- Other meshes ---------------------------------------------------------------------


def sharded(tree, mesh, spec):
    def put(x):
        fits = all(
            axis is None or size % mesh.shape[axis] == 0
            for axis, size in zip(spec, x.shape, strict=False)
        )
        here = P(*spec[: x.ndim]) if fits else P()
        return jax.device_put(x, NamedSharding(mesh, here))

    return jax.tree.map(put, tree)


def mesh_of(kind, devices, *sizes):
    names = ("x", "y")[: len(sizes)]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[devices])


MESHES = {
    "eight, other axis": (AxisType.Auto, slice(8), (8,), (None, "x")),
    "two by four": (AxisType.Auto, slice(8), (2, 4), ("y", "x")),
    "four explicit": (AxisType.Explicit, slice(4, 8), (4,), ("x",)),
    "one": (AxisType.Auto, slice(3, 4), (1,), ("x",)),
}


def wire_state(seed):
    key = jax.random.key(seed)
    x = normal(seed, 64, 128)
    return {
        **flash_state(mpx.optim.flash_adamw(1e-2), seed),
        "f8": x.astype(jnp.float8_e4m3fn),
        "i4": x.astype(jnp.int4),
        "keys": jax.random.split(key, 8),
        "scaling": mpx.DynamicLossScaling.pow2(2.0 ** (10 + seed)),
    }


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mesh")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = sharded(wire_state(1), mesh_of(AxisType.Auto, slice(8), 8), ("x",))
        save(folder, state)
        return folder, state


@pytest.mark.parametrize("shapes", [False, True], ids=["arrays", "shapes"])
@pytest.mark.parametrize("case", MESHES.values(), ids=MESHES)
def test_state_is_restored_to_another_mesh(on_eight, case, shapes):
    folder, state = on_eight
    kind, devices, sizes, spec = case
    template = sharded(wire_state(0), mesh_of(kind, devices, *sizes), spec)
    if shapes:
        template = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            template,
        )
    restored = restore(folder, template)
    assert_trees_equal(*map(jax.device_get, map(without_keys, (restored, state))))
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True)
    assert all(x.sharding == y.sharding for x, y in pairs)


def without_keys(state):
    return {**state, "keys": jax.random.key_data(state["keys"])}


# --- Runs that go on ------------------------------------------------------------------


def test_restored_run_is_the_same_run_and_compiles_nothing(tmp_path):
    optimizer = mpx.optim.flash_adamw(1e-2)
    traces = []

    @eqx.filter_jit(donate="all")
    def step(state, x):
        traces.append(0)

        def loss(params, x):
            hidden = jnp.tanh(x @ params["w"])
            return jnp.mean(hidden.astype(jnp.float32) ** 2)

        result = mpx.value_and_grad(loss)(state["scaling"], state["params"], x)
        params, inner = mpx.optimizer_update(
            state["params"], optimizer, state["state"], result.grads, result.finite
        )
        return {"params": params, "state": inner, "scaling": result.scaling}

    def init():
        scaling = mpx.DynamicLossScaling.pow2(period=2)
        return {**flash_state(optimizer, 0), "scaling": scaling}

    x = jnp.ones((4, 64))
    state = init()
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        for number in range(5):
            state = step(state, x)
            checkpoints.save(number, state)  # and donated to the next step at once
        assert checkpoints.latest() is not None
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [3, 4]
        resumed = checkpoints.restore(init(), step=3)
        assert_trees_equal(step(resumed, x), checkpoints.restore(init()))
    assert len(traces) == 1


WORKER = """
import itertools, sys
import numpy as np
import mpx

with mpx.checkpoint.Checkpointer(sys.argv[1], keep=2) as checkpoints:
    for step in itertools.count():
        state = {"w": np.full((64, 64), step, np.float32), "step": step}
        checkpoints.save(step, state)
        print(step, flush=True)
"""


def test_process_killed_while_it_writes_leaves_the_last_checkpoint(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if int(line) == 4:  # it is being written, and the last one before is not
                break
        worker.kill()
    state = {"w": np.zeros((64, 64), np.float32), "step": 0}
    restored = restore(tmp_path, state)
    assert restored["step"] >= 3
    assert np.all(restored["w"] == restored["step"])
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(restored["step"] + 1, state)


def test_what_a_killed_process_left_is_ignored_and_removed(tmp_path):
    save(tmp_path, {"a": 1})
    torn = tmp_path / "1.orbax-checkpoint-tmp-0"
    torn.mkdir()
    (torn / "mpx").mkdir()
    assert restore(tmp_path, {"a": 0}) == {"a": 1}
    assert torn.exists()  # reading removes nothing: it may be in the making
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [0]
        checkpoints.save(1, {"a": 2})
    assert not torn.exists()
    assert restore(tmp_path, {"a": 0}) == {"a": 2}


def test_steps_are_numbered_kept_and_deleted(tmp_path):
    numbers = [save(tmp_path, {"a": i}, keep=2) for i in range(3)]
    assert numbers == [0, 1, 2]
    assert save(tmp_path, {"a": 9}, step=9, keep=2) == 9
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2, 9]
        with pytest.raises(
            ValueError, match="checkpoint of step 9, so step 9 cannot be"
        ):
            checkpoints.save(9, {"a": 1})
        checkpoints.delete(9)
        checkpoints.save(3, {"a": 3})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    assert restore(tmp_path, {"a": 0}, step=2) == {"a": 2}
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 9.*\[2, 3\]"):
        restore(tmp_path, {"a": 0}, step=9)


def test_plain_orbax_reads_the_arrays(saved):
    folder, state, _ = saved
    warns = pytest.warns(UserWarning, match="Sharding info not provided")
    with ocp.PyTreeCheckpointer() as checkpointer, warns:
        arrays = checkpointer.restore(folder / "7" / "state")
    assert np.array_equal(
        arrays["linen/params/kernel"], state["linen"]["params"]["kernel"]
    )


# --- Mismatches -----------------------------------------------------------------------

BASE = {"w": jnp.ones((2, 3)), "n": 3, "key": jax.random.key(0)}


def base():
    optimizer = mpx.optim.flash_adamw(1e-2)
    return {
        **BASE,
        "scaling": mpx.DynamicLossScaling.pow2(),
        **flash_state(optimizer, 0),
    }


def with_optimizer(optimizer):
    return {**base(), **flash_state(optimizer, 0)}


Compression = mpx.optim.Compression
MISMATCHES = {
    "missing": (
        lambda: {**base(), "v": jnp.ones(2, jnp.int8)},
        ["`v` is missing: the template has int8[2]"],
    ),
    "extra": (
        lambda: {k: v for k, v in base().items() if k != "w"},
        ["`w` is not expected: it holds float32[2, 3]", "pass `partial=True`"],
    ),
    "shape": (
        lambda: {**base(), "w": jnp.ones((3, 2))},
        ["`w` is float32[2, 3], but the template has float32[3, 2]"],
    ),
    "dtype": (
        lambda: {**base(), "w": jnp.ones((2, 3), jnp.bfloat16)},
        [
            "`w` is float32[2, 3], but the template has bfloat16[2, 3]",
            "`mpx.cast_tree`",
        ],
    ),
    "kind of key": (
        lambda: {**base(), "key": jax.random.key(0, impl="rbg")},
        ["`key` is key<fry>[], but the template has key<rbg>[]"],
    ),
    "raw key": (
        lambda: {**base(), "key": jax.random.PRNGKey(0)},
        ["`key` is key<fry>[], but the template has uint32[2]"],
    ),
    "number": (
        lambda: {**base(), "n": 3.0},
        ["`n` is a Python int, but the template has a Python float"],
    ),
    "number and array": (
        lambda: {**base(), "n": jnp.int32(3)},
        ["`n` is a Python int, but the template has int32[]"],
    ),
    "no scaling": (
        lambda: {**base(), "scaling": mpx.NoLossScaling()},
        ["`scaling` is DynamicLossScaling, but the template has NoLossScaling"],
    ),
    "other scaling": (
        lambda: {**base(), "scaling": mpx.StaticLossScaling(2.0)},
        ["`scaling` is DynamicLossScaling, but the template has StaticLossScaling"],
    ),
    "another rule": (
        lambda: with_optimizer(mpx.optim.flash_lion(1e-2)),
        [
            "`state`, the state of a compressed optimizer, has",
            "'adam-mpx-",
            "'lion-mpx-",
        ],
    ),
    "other corrections": (
        lambda: with_optimizer(
            mpx.optim.flash_adamw(1e-2, compression=Compression(master_bits=32))
        ),
        ["`state`, the state of a compressed optimizer", "layout", "`from_f32`"],
    ),
    "other format": (
        lambda: with_optimizer(
            mpx.optim.flash_adamw(1e-2, compression=Compression(format="flashoptim"))
        ),
        ["format 'mpx' instead of 'flashoptim'"],
    ),
    "other groups": (
        lambda: with_optimizer(
            mpx.optim.flash_adamw(1e-2, compression=Compression(group_size=64))
        ),
        [
            "`state/packed/w/scales` is uint16[3, 64, 4], but the template has uint16[3, 64"
        ],
    ),
}


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    save(folder, base())
    return folder


@pytest.mark.parametrize(("template", "parts"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatch_names_the_leaf_and_the_remedy(base_folder, template, parts):
    with pytest.raises(ValueError, match="does not fit the template") as error:
        restore(base_folder, template())
    for part in parts:
        assert part in str(error.value)


def test_missing_scaling_is_an_error(tmp_path):
    save(tmp_path, {"w": jnp.ones(2)})
    with pytest.raises(
        ValueError, match="`scaling` is no loss scaling, but the template"
    ):
        restore(tmp_path, {"w": jnp.ones(2), "scaling": mpx.DynamicLossScaling()})


def test_changed_option_of_a_scaling_is_noted(base_folder):
    options = {"period": 10, "hysteresis": 2}
    template = {**base(), "scaling": mpx.DynamicLossScaling.pow2(**options)}
    noted = re.escape("period=10 (was 2000), hysteresis=2 (was 1)")
    with pytest.warns(RuntimeWarning, match=f"`scaling` goes on with .*{noted}"):
        restored = restore(base_folder, template)
    assert restored["scaling"].period == 10


def test_long_lists_of_differences_are_cut(base_folder):
    template = {**base(), "v": [jnp.ones(1)] * 20}
    with pytest.raises(ValueError, match="and 15 more like this, up to `v/19`"):
        restore(base_folder, template)


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path):
    deleted = jnp.ones(2)
    deleted.delete()
    faults = {
        "`a/w` is a ShapeDtypeStruct": jax.ShapeDtypeStruct((2,), jnp.float32),
        "`a/w` was deleted, probably donated": deleted,
    }
    for message, leaf in faults.items():
        with pytest.raises((TypeError, ValueError), match=message):
            save(tmp_path, {"a": {"w": leaf}})

    @jax.jit
    def inside(x):
        save(tmp_path, {"a": {"w": x}})
        return x

    with pytest.raises(TypeError, match="`a/w` is traced"):
        inside(jnp.ones(2))
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        restore(tmp_path, {})
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        restore(tmp_path / "nowhere", {})


def test_files_of_others_and_of_the_future_are_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path / "a") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="not written by `mpx.checkpoint`"):
        restore(tmp_path / "a", {"w": jnp.ones(2)})
    save(tmp_path / "b", {"n": 1})
    (record,) = (tmp_path / "b").rglob("mpx/metadata")
    text = record.read_text()
    assert '"format": 1' in text
    record.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="has the format 2, but mpx .* up to 1"):
        restore(tmp_path / "b", {"n": 1})


def test_without_orbax_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    for call in (save, restore):
        with pytest.raises(ImportError, match=r'pip install "mpx-jax\[checkpoint\]"'):
            call(tmp_path, {})


# --- To and from f32 ------------------------------------------------------------------

RULES = {
    "adamw": (mpx.optim.flash_adamw, optax.adamw(1e-2), ("mu", "nu")),
    "lion": (mpx.optim.flash_lion, optax.lion(1e-2), ("mu",)),
    "sgd": (
        lambda rate, **options: mpx.optim.flash_sgd(rate, momentum=0.5, **options),
        optax.sgd(1e-2, momentum=0.5),
        ("trace",),
    ),
}


def f32_run(optimizer, steps):
    params = {k: x.astype(jnp.float32) for k, x in bf16_params(1).items()}
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(jax.tree.map(jnp.sin, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def field(state, name):
    (value,) = {
        id(x): x for _, x in optax.tree_utils.tree_get_all_with_path(state, name)
    }.values()
    return value


@pytest.mark.parametrize(("flash", "plain", "moments"), RULES.values(), ids=RULES)
def test_uncompressed_states_go_to_f32_and_back_exactly(flash, plain, moments):
    params, state = f32_run(plain, 3)
    exact = flash(1e-2, compression=Compression(quantize=False, master_bits=32))
    bf16 = mpx.cast_to_bfloat16(params)
    packed = from_f32(params, state, like=(bf16, exact.init(bf16)))
    assert packed.params["w"].dtype == jnp.bfloat16
    back = to_f32(*packed)
    assert_trees_equal(back.params, params)
    for name in moments:
        assert_trees_equal(field(back.state, name), field(state, name))
    if "nu" in moments:
        assert int(back.state.count) == 3


@pytest.mark.parametrize(("flash", "plain", "moments"), RULES.values(), ids=RULES)
def test_compressed_run_goes_on_as_the_f32_run_would(flash, plain, moments):
    params: Any
    params, state = f32_run(plain, 3)
    optimizer = flash(1e-2, compression=Compression(min_size=0))
    bf16 = mpx.cast_to_bfloat16(params)
    packed = from_f32(params, state, like=(bf16, optimizer.init(bf16)))
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(packed.state))
    back = to_f32(*packed)
    # bf16 and 8 bits of correction: half a unit of 2**-15; codes of 8 bits.
    assert np.allclose(back.params["w"], params["w"], rtol=2.0**-16, atol=0)
    for name in moments:
        ours, theirs = (np.asarray(field(x, name)["w"]) for x in (back.state, state))
        ours, theirs = (np.sqrt(x) if name == "nu" else x for x in (ours, theirs))
        groups = np.abs(theirs).reshape(64, -1, 32).max(-1, keepdims=True)
        error = np.abs(ours - theirs).reshape(64, -1, 32) / groups
        assert error.max() < (1 / 127 if name != "nu" else 0.51 / 255)
        assert error.max() > 1e-4  # it is compressed


def test_f32_state_of_a_compressed_run_fits_optax():
    optimizer = mpx.optim.flash_adamw(1e-2)
    run = flash_state(optimizer, 3)
    weights: Any
    weights, adam = to_f32(run["params"], run["state"])
    assert_trees_equal(weights, mpx.optim.master_params(run["params"], run["state"]))
    plain = optax.adamw(1e-2)
    state = optax.tree_utils.tree_set(
        plain.init(weights), count=adam.count, mu=adam.mu, nu=adam.nu
    )
    grads = jax.tree.map(jnp.cos, weights)
    updates, _ = plain.update(grads, state, weights)
    expected: Any = optax.apply_updates(weights, updates)
    params, new = optimizer.step(run["params"], run["state"], grads)
    got = mpx.optim.master_params(params, new)
    # AdamW of optax decays after the step: η²λ apart.
    assert np.allclose(got["w"], expected["w"], rtol=2.0**-15, atol=1e-7)


def test_master_weights_are_taken_off_and_put_on():
    optimizer = optax.chain(optax.clip(1.0), mpx.optim.master_weights(optax.adam(1e-2)))
    params: Any = bf16_params(1)
    state: Any = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(jnp.sin, params), state, params)
    params = optax.apply_updates(params, updates)
    plain = to_f32(params, state)
    assert_trees_equal(plain.params, state[1].master)
    assert_trees_equal(plain.state[1], state[1].inner_state)
    fresh = bf16_params(0)
    back = from_f32(plain.params, plain.state[1], like=(fresh, optimizer.init(fresh)))
    assert_trees_equal(tuple(back), (params, state))


def test_conversion_keeps_shardings_and_refuses_what_does_not_fit():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    optimizer = mpx.optim.flash_adamw(1e-2)
    params = sharded(bf16_params(1), mesh, ("x",))
    state = optimizer.init(params)
    weights, adam = to_f32(params, state)
    back = from_f32(weights, adam, like=(params, state))
    for new, old in zip(*map(jax.tree.leaves, (back, (params, state))), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)
    assert to_f32(weights, adam) == (weights, adam)
    with pytest.raises(ValueError, match="keeps mu and nu and a count, but .* no `nu`"):
        from_f32(
            weights, optax.ScaleByLionState(adam.count, adam.mu), like=(params, state)
        )
    wrong = adam._replace(mu={**adam.mu, "w": adam.mu["w"].T})
    with pytest.raises(ValueError, match="`mu` of `w` has shape"):
        from_f32(weights, wrong, like=(params, state))
    with pytest.raises(
        ValueError, match="`mu` must have the structure of the parameters"
    ):
        from_f32(weights, adam._replace(mu={}), like=(params, state))
