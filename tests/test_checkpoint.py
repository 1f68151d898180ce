"""Checkpoints of every kind of state: bit for bit, on other meshes, or a clear error."""

import contextlib
import itertools
import json
import os
import re
import resource
import shutil
import socket
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
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import normal
from mpx.checkpoint import Checkpointer, _leaves, from_f32, restore, save, to_f32
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
    recipe = mpx.recipes.DelayedScaling(history=4)
    fp8 = mpx.fp8(lambda w, x: x @ w, recipe, min_gain=0)
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


@pytest.mark.slow
@pytest.mark.some(1)
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


@pytest.mark.eight_devices
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


@pytest.mark.parametrize(
    "state", [{}, None, {"w": None, "name": "a"}, mpx.NoLossScaling()], ids=str
)
def test_state_without_arrays_comes_back(tmp_path, state):
    save(tmp_path / "x", state)
    assert jax.tree.structure(restore(tmp_path / "x", state)) == jax.tree.structure(
        state
    )
    with pytest.raises(
        ValueError, match=r"`w` is nothing, but the template has float32"
    ):
        restore(tmp_path / "x", {"w": jnp.ones(2)})


def test_static_parts_come_from_the_template(saved):
    folder, state, fresh = saved
    template = eqx.tree_at(lambda t: t["model"].name, fresh, "other")
    assert restore(folder, template)["model"].name == "other"


class Progress(eqx.Module):
    """A state whose numbers may be options of the code or numbers of the run."""

    weight: Any
    step: int = 0
    best: float = float("inf")
    inference: bool = False


@pytest.mark.usefixtures("untyped")
def test_changed_fields_of_modules_are_an_error_unless_you_choose(tmp_path):
    state = Progress(jnp.ones(2), step=500, best=0.25)
    save(tmp_path, state)
    template = Progress(jnp.zeros(2), inference=True)
    with pytest.raises(ValueError, match="does not fit the template") as error:
        restore(tmp_path, template)
    for part in (
        "`step` was 500, but is 0 in the template",
        "`best` was 0.25, but is inf in the template",
        "`inference` was False, but is True in the template",
        'pass `fields="template"`',
    ):
        assert part in str(error.value)
    assert_trees_equal(restore(tmp_path, template, fields="saved"), state)
    kept = restore(tmp_path, template, fields="template")
    assert (kept.step, kept.best, kept.inference) == (0, float("inf"), True)
    assert_trees_equal(kept.weight, state.weight)
    with pytest.raises(ValueError, match="`fields` must be one of 'saved', 'template'"):
        restore(tmp_path, template, fields="both")  # pyright: ignore[reportArgumentType]
    same = Progress(jnp.zeros(2), step=500, best=0.25)
    assert_trees_equal(restore(tmp_path, same), state)


def test_step_of_a_linen_train_state_is_restored(tmp_path):
    model, tx = linen.Dense(3), optax.adam(0.1)
    apply = model.apply

    def create():
        params = model.init(jax.random.key(0), jnp.ones((1, 2)))
        return TrainState.create(apply_fn=apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))

    start, state = create(), step(step(create()))
    assert (type(start.step), state.step.dtype) == (int, jnp.int32)
    save(tmp_path, state, step=2)
    restored = restore(tmp_path, create())
    assert_trees_equal(restored, state)
    assert_trees_equal(step(restored), step(state))
    # And the other way: what was saved before the first step, into shapes.
    save(tmp_path, start, step=3)
    restored = restore(tmp_path, jax.eval_shape(create))
    assert_trees_equal(restored.params, start.params)
    assert (restored.step.dtype, int(restored.step)) == (jnp.int32, 0)


NUMBERS = {
    "array for a number": (jnp.int32(7), 0, jnp.int32(7)),
    "NumPy for a number": (np.int64(2**40), 0, np.array(2**40)),
    "bf16 for a number": (jnp.bfloat16(0.5), 0.0, jnp.bfloat16(0.5)),
    "number for an array": (7, jnp.int32(0), jnp.int32(7)),
    "number for NumPy": (2**40, np.int64(0), np.int64(2**40)),
    "boolean": (True, jnp.bool_(False), jnp.bool_(True)),
    "complex": (1 + 2j, jnp.complex64(0), jnp.complex64(1 + 2j)),
    "NaN": (float("nan"), jnp.float32(0), jnp.float32(jnp.nan)),
}


def test_numbers_and_scalar_arrays_stand_for_each_other(tmp_path):
    save(tmp_path, {name: saved for name, (saved, _, _) in NUMBERS.items()})
    template = {name: template for name, (_, template, _) in NUMBERS.items()}
    for name, leaf in restore(tmp_path, template).items():
        expected = NUMBERS[name][2]
        assert type(leaf) is type(expected), name
        assert leaf.dtype == expected.dtype
        assert np.array_equal(leaf, expected, equal_nan=name == "NaN")


def test_number_becomes_an_array_on_the_devices_of_the_template(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    template = jax.device_put(jnp.int32(0), NamedSharding(mesh, P()))
    save(tmp_path, {"n": 3})
    restored = restore(tmp_path, {"n": template})["n"]
    assert restored.sharding == template.sharding
    assert int(restored) == 3


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


@pytest.mark.some(1)
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

with mpx.checkpoint.Checkpointer(sys.argv[1], keep=1) as checkpoints:
    for step in itertools.count():
        state = {"w": np.full((64, 64), step, np.float32), "step": step}
        checkpoints.save(step, state)
        print(step, flush=True)
"""


@pytest.mark.slow
def test_others_read_while_a_process_writes_and_write_when_it_is_killed(tmp_path):
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    worker = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    state = {"w": np.zeros((64, 64), np.float32), "step": 0}
    with worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if int(line) == 4:  # it is being written, and the one before is complete
                break
        with Checkpointer(tmp_path) as checkpoints:
            seen = []
            for _ in range(10):  # each checkpoint is soon removed
                for found in (checkpoints.restore(state), restore(tmp_path, state)):
                    assert np.all(found["w"] == found["step"])
                    seen.append(found["step"])
            assert seen == sorted(seen)
            assert seen[0] >= 3
            assert seen[-1] > seen[0]  # the reader did not stop the writer
            writes = f"Another process .pid {worker.pid} on .* writes checkpoints to"
            with pytest.raises(RuntimeError, match=writes):
                checkpoints.save(10**6, state)
            with pytest.raises(RuntimeError, match=writes):
                checkpoints.delete(seen[-1])
        assert worker.poll() is None
        worker.kill()
    restored = restore(tmp_path, state)
    assert np.all(restored["w"] == restored["step"])
    assert restored["step"] >= seen[-1]
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.save(10**6, state)
    assert restore(tmp_path, state)["step"] == 0


def test_checkpointers_that_are_not_closed_lose_nothing(tmp_path):
    state = {"w": np.zeros(2**18, np.float32)}
    for step in range(3):
        Checkpointer(tmp_path).save(step, state)  # written when the next one begins
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        assert checkpoints.steps() == [0, 1, 2, 3]


def test_what_a_killed_process_left_is_ignored_and_removed(tmp_path):
    save(tmp_path, {"a": 1})
    torn = tmp_path / "1.orbax-checkpoint-tmp-0"
    torn.mkdir()
    (torn / "mpx").mkdir()
    assert restore(tmp_path, {"a": 0}) == {"a": 1}
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [0]
        assert checkpoints.restore({"a": 0}) == {"a": 1}
        assert torn.exists()  # reading removes nothing: it may be in the making
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


# --- Options of Orbax -----------------------------------------------------------------


def test_options_of_orbax_decide_what_is_saved_and_kept(tmp_path):
    options = {"save_interval_steps": 2, "keep_period": 4}
    with Checkpointer(tmp_path, keep=1, **options) as checkpoints:
        saved = [checkpoints.save(step, {"a": step}) for step in range(8)]
        assert saved == [True, False] * 4
        assert checkpoints.steps() == [0, 4, 6]
        assert checkpoints.save(7, {"a": 7}, force=True)
        assert checkpoints.steps() == [0, 4, 7]
    assert restore(tmp_path, {"a": 0}) == {"a": 7}


def test_best_checkpoints_are_kept(tmp_path):
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min"}
    with Checkpointer(tmp_path, keep=2, **options) as checkpoints:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            checkpoints.save(step, {"a": step}, metrics={"loss": jnp.float32(loss)})
        with pytest.raises(ValueError, match="`best_fn` of the Checkpointer compares"):
            checkpoints.save(9, {"a": 9})
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.best() == 1
    with Checkpointer(tmp_path, read_only=True, **options) as checkpoints:
        assert checkpoints.best() == 1
        assert checkpoints.metrics(2) == {"loss": 2.0}
        assert checkpoints.metrics(3) is None
        assert checkpoints.restore({"a": 0}, step=checkpoints.best()) == {"a": 1}
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="make the Checkpointer with `best_fn`"):
            checkpoints.best()
        with pytest.raises(ValueError, match="`metrics` .* pass both, or neither"):
            checkpoints.save(9, {"a": 9}, metrics={"loss": 1.0})


def test_read_only_checkpointer_sees_new_checkpoints_and_writes_nothing(tmp_path):
    with Checkpointer(tmp_path / "run", read_only=True) as reader:
        assert reader.latest() is None
        assert not (tmp_path / "run").exists()
        save(tmp_path / "run", {"a": 1})
        assert reader.steps() == [0]
        assert reader.restore({"a": 0}) == {"a": 1}
        save(tmp_path / "run", {"a": 2})
        assert reader.restore({"a": 0}) == {"a": 2}
        for call in (lambda: reader.save(2, {"a": 2}), lambda: reader.delete(0)):
            with pytest.raises(ValueError, match="Nothing can be .* `read_only=True`"):
                call()
        assert reader.steps() == [0, 1]


def test_options_that_mpx_sets_are_refused(tmp_path):
    for name in ("max_to_keep", "step_prefix"):
        with pytest.raises(TypeError, match=f"`{name}` cannot be chosen: pass `keep`"):
            Checkpointer(tmp_path, **{name: 3})
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        Checkpointer(tmp_path, typo=3)


# --- Damage ---------------------------------------------------------------------------


def flipped(data):
    """Returns copies with one bit changed: at the start, the end and in between."""
    for place in {0, len(data) // 3, len(data) // 2, len(data) - 1}:
        yield data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]


DAMAGES = {
    "flipped": flipped,
    "truncated": lambda data: [data[: len(data) // 2], b""],
    "missing": lambda data: [None],
}


# What TensorStore reads after a first error finds the event loop of Orbax closed.
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_file_is_found_or_changes_nothing(tmp_path, damage):
    state = {
        "w": normal(1, 64, 64),  # a file of its own
        "small": jnp.arange(3),  # beside the metadata
        "step": 7,
    }
    template = jax.tree.map(lambda x: x * 0 + 1, state)
    save(tmp_path, state)
    (step,) = (x for x in tmp_path.iterdir() if x.is_dir())
    errors = {}
    for path in sorted(x for x in step.rglob("*") if x.is_file()):
        data = path.read_bytes()
        for damaged in damage(data):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            try:
                assert_trees_equal(restore(tmp_path, template), state)
            except (ValueError, FileNotFoundError) as error:
                errors.setdefault(path.relative_to(step).as_posix(), []).append(
                    str(error)
                )
            path.write_bytes(data)
    for error in itertools.chain.from_iterable(errors.values()):
        assert re.search(rf"{step} (is damaged|has the format)", error)
    assert "its record, `mpx/metadata`" in errors["mpx/metadata"][-1]
    largest = max(step.rglob("ocdbt.process_0/d/*"), key=lambda x: x.stat().st_size)
    of_data = errors[largest.relative_to(step).as_posix()]
    assert all("`w`" in error or '"w/' in error for error in of_data), of_data
    assert_trees_equal(restore(tmp_path, template), state)


def test_changed_number_in_the_record_is_found(tmp_path):
    save(tmp_path, {"step": 7})
    (path,) = tmp_path.rglob("mpx/metadata")
    text = path.read_text()
    assert '"value": 7' in text
    path.write_text(text.replace('"value": 7', '"value": 5'))
    with pytest.raises(ValueError, match="its record, `mpx/metadata`, was changed"):
        restore(tmp_path, {"step": 0})


def test_arrays_of_another_checkpoint_are_found_by_their_checksum(tmp_path):
    # Files that Orbax reads without an error: only the checksums tell.
    for name, w in (("one", 1.0), ("other", 2.0)):
        save(tmp_path / name, {"v": jnp.ones(4), "w": jnp.full(4, w)})
    (arrays,) = (tmp_path / "one").glob("*/state")
    (others,) = (tmp_path / "other").glob("*/state")
    shutil.rmtree(arrays)
    shutil.copytree(others, arrays)
    with pytest.raises(ValueError, match="what was read for `w` is not what was saved"):
        restore(tmp_path / "one", {"v": jnp.zeros(4), "w": jnp.zeros(4)})


def test_array_that_orbax_does_not_return_is_an_error_and_not_zeros(tmp_path):
    save(tmp_path, {"w": jnp.ones(4), "v": jnp.ones(4)})
    (path,) = tmp_path.rglob("state/_METADATA")
    path.write_text(path.read_text().replace('"w"', '"u"').replace("'w'", "'u'"))
    with pytest.raises(ValueError, match="is damaged: .*state.*w"):
        restore(tmp_path, {"w": jnp.zeros(4), "v": jnp.zeros(4)})


@contextlib.contextmanager
def files_of_at_most(size):
    """Lets every write beyond a size fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk_is_heard_and_the_checkpoint_before_stays(tmp_path, asynchronous):
    states = [{"w": np.asarray(normal(i, 2**17)), "i": i} for i in range(3)]
    heard = pytest.raises(ValueError, match="File too large")
    options = {"keep": 1, "asynchronous": asynchronous}
    with Checkpointer(tmp_path, **options, save_interval_steps=2) as checkpoints:
        checkpoints.save(0, states[0])
        checkpoints.wait()
        with files_of_at_most(2**16), heard as error:
            checkpoints.save(2, states[1]) and checkpoints.wait()
        (note,) = error.value.__notes__
        assert "was not written to" in note
        assert "steps [0]" in note
        assert checkpoints.steps() == [0]
        assert_trees_equal(checkpoints.restore(states[2]), states[0])
        checkpoints.save(2, states[2])  # there is space again
        assert checkpoints.steps() == [2]
        assert_trees_equal(checkpoints.restore(states[0]), states[2])
        assert [x.name for x in tmp_path.iterdir() if x.is_dir()] == ["2"]


def test_closing_after_a_failed_write_raises_and_ends_everything(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    with files_of_at_most(2**16):
        checkpoints.save(0, {"w": np.asarray(normal(0, 2**17))})
        with pytest.raises(ValueError, match="File too large"):
            checkpoints.close()
    assert checkpoints.steps() == []
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        restore(tmp_path, {"w": 0})


def test_failed_write_is_heard_at_a_step_that_is_not_saved(tmp_path):
    with Checkpointer(tmp_path, save_interval_steps=9) as checkpoints:
        with files_of_at_most(2**16):
            checkpoints.save(0, {"w": np.asarray(normal(0, 2**17))})
            while checkpoints._manager.is_saving_in_progress():
                pass
        with pytest.raises(ValueError, match="File too large"):
            checkpoints.save(1, {"w": 0})


def test_reader_takes_the_next_checkpoint_if_its_own_is_removed(tmp_path, monkeypatch):
    save(tmp_path, {"w": jnp.ones(4), "step": 0})
    read = Checkpointer._read_arrays

    def removed_meanwhile(*args):
        monkeypatch.setattr(Checkpointer, "_read_arrays", read)
        save(tmp_path, {"w": 2 * jnp.ones(4), "step": 1}, keep=1)
        return read(*args)

    monkeypatch.setattr(Checkpointer, "_read_arrays", removed_meanwhile)
    restored = restore(tmp_path, {"w": jnp.zeros(4), "step": 9})
    assert_trees_equal(restored, {"w": 2 * jnp.ones(4), "step": 1})


# --- Checksums ------------------------------------------------------------------------


SUMMED = {
    "host": ["bool", "uint8", "bfloat16", "float32", "complex64", "float64"],
    "device": ["bool", "bfloat16"],
}


@pytest.mark.parametrize(
    ("place", "dtype"), [(place, x) for place, types in SUMMED.items() for x in types]
)
def test_checksum_is_the_same_for_every_sharding(monkeypatch, place, dtype):
    if place == "device":
        monkeypatch.setattr(
            _leaves, "_is_summed_on_device", lambda x: isinstance(x, jax.Array)
        )
    monkeypatch.setattr(_leaves, "_BLOCK", 64)
    array = np.random.default_rng(0).normal(size=(8, 4, 6)).astype(jnp.dtype(dtype))
    expected = reference_checksum(array)
    mesh = mesh_of(AxisType.Explicit, slice(8), 2, 4)
    with jax.enable_x64(dtype == "float64"), jax.set_mesh(mesh):
        arrays = [
            jax.device_put(array, NamedSharding(mesh, spec))
            for spec in (P(), P(("x", "y")), P("y", None, "x"))
        ]
        found = _leaves.checksums([array, *arrays])
    assert found == [expected] * 4


def reference_checksum(array):
    """The checksum word by word, in Python's integers."""
    data, size = array.tobytes(), min(array.itemsize, 4)
    total = 0
    for place in range(len(data) // size):
        word = int.from_bytes(data[place * size : (place + 1) * size], "little")
        x = word ^ (place * 0x9E3779B1 % 2**32)
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        total += x ^ x >> 16
    return total % 2**32


def test_checksum_sees_what_sums_and_parities_miss():
    array = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    signs, swapped, moved = array.copy(), array.copy(), np.roll(array, 1)
    signs[:2, 0] *= -1
    swapped[[3, 5]] = swapped[[5, 3]]
    zeroed = array * (np.arange(64) != 7)
    found = _leaves.checksums([array, signs, swapped, moved, zeroed, array.T])
    assert len({*found}) == 6


# --- Several processes ----------------------------------------------------------------

JOB = """
import json, os, pathlib, signal, sys, time
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

folder, port, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, number)
from mpx._jax._processes import gather
from mpx.checkpoint import Checkpointer, restore, save

gather("connect before compiling")
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


def make(seed, *spec):
    whole = np.random.default_rng(seed).normal(size=(8, 512)).astype(np.float32)
    where = NamedSharding(mesh, P(*spec))
    return {
        "w": jax.make_array_from_callback(whole.shape, where, lambda i: whole[i]),
        "same": np.arange(3) + seed,
        "step": seed,
        "position": np.int64(2**40 * seed),
        "key": jax.random.key(seed),
        "f8": jnp.full((2, 3), seed, jnp.float8_e4m3fn),
    }


def equal(a, b):
    def bits(x):
        if isinstance(x, jax.Array) and not isinstance(x.dtype, np.dtype):
            x = jax.random.key_data(x)
        parts = [s.data for s in x.addressable_shards] if hasattr(x, "sharding") else [x]
        return [np.asarray(part).tobytes() for part in parts]

    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return all(type(x) is type(y) and bits(x) == bits(y) for x, y in pairs)


def error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def flip():
    files = (folder / "run").rglob("ocdbt.process_0/d/*")
    path = max(files, key=lambda x: x.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


found = {}
save(folder / "run", make(1, "x"))
for spec in (("x",), (None, "x"), ()):
    restored = restore(folder / "run", make(0, *spec))
    found[f"equal {spec}"] = equal(restored, make(1, *spec))
struct = jax.ShapeDtypeStruct((), np.float32)
found["other structure"] = error(lambda: save(folder / "a", {"w": 1, f"n{number}": 1}))
found["other kind"] = error(lambda: save(folder / "a", {"w": [1, struct][number]}))
found["own value"] = error(lambda: save(folder / "a", {"key": jax.random.key(number)}))
gather("before the damage")
if number == 0:
    flip()
gather("after the damage")
found["damage"] = error(lambda: restore(folder / "run", make(0, "x")))
with Checkpointer(folder / "ends", save_interval_steps=1000) as checkpoints:
    for step in range(1000):
        checkpoints.save(step, {"w": make(step, "x")["w"], "step": step})
        if step == 2 and number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if checkpoints.reached_preemption(step):
            break
        time.sleep(0.02)
    found["preempted"], found["steps"] = step, checkpoints.steps()
    last = checkpoints.restore({"w": make(0)["w"], "step": 0})
    found["last"] = equal(last, {"w": make(step)["w"], "step": step})
print("found", json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What two processes with two devices each find, and the folder they wrote."""
    folder = tmp_path_factory.mktemp("job")
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    flags = re.sub(r"(device_count)=\d+", r"\1=2", os.environ["XLA_FLAGS"])
    paths = os.pathsep.join(sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, str(folder), str(port), str(number)],
            env=os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [re.findall("^found (.*)$", out, re.MULTILINE) for out, _ in outputs]
    return folder, [json.loads(line) for (line,) in lines]


@pytest.mark.slow
def test_each_process_gets_the_state_back(job):
    for found in job[1]:
        values = {key: value for key, value in found.items() if key.startswith("equal")}
        assert len(values) == 3
        assert all(values.values()), values


@pytest.mark.slow
def test_processes_fail_together(job):
    first, second = job[1]
    for found in (first, second):
        assert (
            "process 1 has ['n1', 'a Python int'] where process 0 has ['n0', 'a Python"
            in (found["other structure"])
        )
        assert "`key` differs between processes" in found["own value"]
        assert "what was read for `w` is not what was saved" in found["damage"]
    assert first["other kind"].startswith(
        "RuntimeError: Process 1 failed, so all of them stop: TypeError: `w` is a Shape"
    )
    assert second["other kind"].startswith("TypeError: `w` is a ShapeDtypeStruct")


@pytest.mark.slow
def test_job_that_is_to_end_saves_its_last_step_on_all_processes(job):
    first, second = job[1]
    assert first["preempted"] == second["preempted"] >= 2
    assert first["steps"] == second["steps"] == [0, first["preempted"]]
    assert first["last"]
    assert second["last"]


# --- Mismatches -----------------------------------------------------------------------

BASE = {
    "w": jnp.ones((2, 3)),
    "n": 3,
    "large": 2**40,
    "third": 1 / 3,
    "key": jax.random.key(0),
}


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
        ["`v` is nothing, but the template has int8[2]"],
    ),
    "extra": (
        lambda: {k: v for k, v in base().items() if k != "w"},
        ["`w` is float32[2, 3], but the template has nothing", "pass `partial=True`"],
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
        lambda: {**base(), "n": jnp.float32(3)},
        ["`n` is a Python int, but the template has float32[]"],
    ),
    "number that is too large": (
        lambda: {**base(), "large": jnp.int32(3)},
        ["`large` is a Python int, but the template has int32[]"],
    ),
    "number that is not exact": (
        lambda: {**base(), "third": jnp.float32(3)},
        ["`third` is a Python float, but the template has float32[]"],
    ),
    "number and vector": (
        lambda: {**base(), "n": jnp.ones(1, jnp.int32)},
        ["`n` is a Python int, but the template has int32[1]"],
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
            "`state` is FlashState mpx mu-nu adam-mpx-",
            "has FlashState mpx mu lion-mpx-",
        ],
    ),
    "other corrections": (
        lambda: with_optimizer(
            mpx.optim.flash_adamw(1e-2, compression=Compression(master_bits=32))
        ),
        ["`state` is FlashState mpx mu-nu adam-mpx-planes-1x24", "`from_f32`"],
    ),
    "other format": (
        lambda: with_optimizer(
            mpx.optim.flash_adamw(1e-2, compression=Compression(format="flashoptim"))
        ),
        ["`state` is FlashState mpx", "the template has FlashState flashoptim"],
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


def test_other_names_at_the_top_are_said_first(tmp_path):
    save(tmp_path, {"params": jnp.ones(2), "state": jnp.ones(2)})
    match = (
        "template:\n  - it holds `params`, `state`, but the template `model`, `opt`\n"
    )
    with pytest.raises(ValueError, match=match):
        restore(tmp_path, {"model": jnp.ones(2), "opt": jnp.ones(2)})


def test_two_writers_of_one_process_see_what_the_other_wrote(tmp_path):
    state = lambda x: {"x": jnp.full(2, x)}  # noqa: E731
    with Checkpointer(tmp_path) as run, Checkpointer(tmp_path) as other:
        run.save(0, state(0.0))
        other.save(1, state(1.0))
        other.wait()
        assert run.steps() == [0, 1]
        assert_trees_equal(run.restore(state(9.0)), state(1.0))
        with pytest.raises(ValueError, match="checkpoint of step 1, so step 1 cannot"):
            run.save(1, state(77.0))
        run.save(2, state(2.0))
        run.wait()
        save(tmp_path, state(3.0))  # which takes over, and gives the folder up again
        with pytest.raises(ValueError, match="checkpoint of step 3, so step 2 cannot"):
            other.save(2, state(77.0))
        run.save(4, state(4.0))
        run.wait()
        assert run.steps() == other.steps() == [0, 1, 2, 3, 4]
        for step in run.steps():
            assert_trees_equal(
                restore(tmp_path, state(9.0), step=step), state(step * 1.0)
            )


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("sharded", [False, True])
def test_weak_types_come_back(tmp_path, shape, sharded):
    decay = jnp.broadcast_to(jnp.asarray(0.999), shape)
    where = NamedSharding(jax.make_mesh((8,), ("data",)), P())
    if sharded:
        decay = jax.device_put(decay, where)
    assert decay.weak_type
    save(tmp_path, {"decay": decay, "strong": jnp.ones(shape)})
    template = {"decay": decay * 0, "strong": jnp.zeros(shape)}
    types = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type
        ),
        template,
    )
    for given in (template, types):
        found = restore(tmp_path, given)
        assert found["decay"].weak_type
        assert not found["strong"].weak_type
        assert_trees_equal(found["decay"], decay)
    assert not sharded or restore(tmp_path, template)["decay"].sharding == where


def test_a_state_in_the_place_of_the_path_is_refused():
    with pytest.raises(TypeError, match=r"dict was given.*`save\(path, state\)`"):
        save({"w": jnp.ones(2)}, "folder")


def test_missing_scaling_is_an_error(tmp_path):
    save(tmp_path, {"w": jnp.ones(2)})
    with pytest.raises(
        ValueError, match="`scaling` is nothing, but the template has Dynamic"
    ):
        restore(tmp_path, {"w": jnp.ones(2), "scaling": mpx.DynamicLossScaling()})


def test_options_of_a_scaling_are_those_of_the_template(base_folder):
    template = {**base(), "scaling": mpx.DynamicLossScaling.pow2(period=10)}
    assert restore(base_folder, template)["scaling"].period == 10


def test_long_lists_of_differences_are_cut(base_folder):
    template = {**base(), "v": [jnp.ones(1)] * 20}
    with pytest.raises(ValueError, match="and 15 more"):
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
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint in {folder}\\."):
            restore(folder, {})
    assert not (tmp_path / "nowhere").exists()


def test_files_of_others_and_of_the_future_are_refused(tmp_path):
    with ocp.CheckpointManager(tmp_path / "a") as manager:
        manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="not written by `mpx.checkpoint`"):
        restore(tmp_path / "a", {"w": jnp.ones(2)})
    save(tmp_path / "b", {"n": 1})
    (record,) = (tmp_path / "b").rglob("mpx/metadata")
    text = record.read_text()
    assert '"format": 3' in text
    record.write_text(text.replace('"format": 3', '"format": 4'))
    with pytest.raises(ValueError, match="has the format 4, but mpx .* the format 3"):
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


def test_template_keeps_numbers_but_not_for_arrays(tmp_path):
    class Run(eqx.Module):
        weight: jax.Array
        step: int | jax.Array
        rate: float

    save(tmp_path, Run(jnp.ones(2), jnp.int32(500), 0.1))
    found = restore(tmp_path, Run(jnp.zeros(2), 0, 0.2), fields="template")
    assert (int(found.step), found.rate) == (500, 0.2)


def test_nnx_models_go_to_f32_and_back():
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = mpx.optim.flash_adam(1e-3)
    low = mpx.cast_to_bfloat16(model)
    wide = to_f32(low, optax.EmptyState()).params
    assert {x.dtype for x in jax.tree.leaves(wide)} == {np.dtype("float32")}
    params = nnx.state(model, nnx.Param)
    adam = jax.tree.map(jnp.ones_like, optax.scale_by_adam().init(params))
    small = nnx.state(low, nnx.Param)
    _, state = mpx.checkpoint.from_f32(
        params, adam, like=(small, optimizer.init(small))
    )
    moments = jax.tree.leaves(to_f32(small, state).state.mu)
    assert all(np.allclose(x, 1.0, rtol=0.01) for x in moments)


@pytest.mark.some(1)
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


@pytest.mark.some(1)
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
    assert_trees_equal(plain.state[1], state[1].inner_state)  # pyright: ignore[reportIndexIssue]
    fresh = bf16_params(0)
    back = from_f32(plain.params, plain.state[1], like=(fresh, optimizer.init(fresh)))  # pyright: ignore[reportIndexIssue]
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
    with pytest.raises(ValueError, match="keeps mu and nu, but 0 parts"):
        from_f32(
            weights, optax.ScaleByLionState(adam.count, adam.mu), like=(params, state)
        )
    wrong = adam._replace(mu={**adam.mu, "w": adam.mu["w"].T})  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="`mu` of `w` has shape"):
        from_f32(weights, wrong, like=(params, state))
    with pytest.raises(
        ValueError, match=r"`mu` beside the parameters of `like` .*first: \['b', 'w'\]"
    ):
        from_f32(weights, adam._replace(mu={}), like=(params, state))  # pyright: ignore[reportAttributeAccessIssue]


def test_plain_states_get_the_dtypes_and_devices_of_the_template():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    low = optax.adam(1e-2, mu_dtype=jnp.bfloat16)
    state: Any
    params, state = f32_run(optax.adam(1e-2), 3)
    like = sharded((bf16_params(1), low.init(bf16_params(1))), mesh, ("x",))
    new = from_f32(params, state, like=like)
    for found, old in zip(*map(jax.tree.leaves, (tuple(new), like)), strict=True):
        assert found.dtype == old.dtype
        assert found.sharding == old.sharding
    assert int(new.state[0].count) == 3  # pyright: ignore[reportIndexIssue]
    nu = state[0].nu["w"].astype(jnp.bfloat16)
    assert np.array_equal(new.state[0].nu["w"], nu)  # pyright: ignore[reportIndexIssue]
    wrong = jax.tree.map(lambda x: x.T, state)
    with pytest.raises(ValueError, match="`0/mu/w` has shape"):
        from_f32(params, wrong, like=like)
    with pytest.raises(ValueError, match="`from_f32` needs two trees of the same"):
        from_f32(params, state[0], like=like)


def test_count_is_that_beside_the_moments():
    optimizer = mpx.optim.flash_adamw(1e-2)
    state: Any
    params, state = f32_run(optax.adam(1e-2), 3)
    like = (bf16_params(1), optimizer.init(bf16_params(1)))
    averaged = (optax.EmaState(jnp.int32(9), params), *state)
    assert int(from_f32(params, averaged, like=like).state.count) == 3
    with pytest.raises(ValueError, match="keeps mu.*, but 2 parts of the state"):
        from_f32(params, (*state, *state), like=like)
