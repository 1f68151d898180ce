"""Planted faults hit what they name, when they are due; short versions of the long runs."""

import importlib
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from mpx.testing import Fault, assert_trees_equal, inject

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DTYPES = ["float16", "bfloat16", "float32"]


def make_tree(dtype="float32"):
    x = (jnp.arange(6) + 1).astype(dtype).reshape(2, 3)
    return {"a": x, "b": [x[0], jnp.arange(4)], "s": "text", "key": jax.random.key(0)}


VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": None}


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", VALUES)
def test_one_number_is_wrong_at_one_step(kind, dtype):
    tree = make_tree(dtype)
    fault = Fault(tree, kind, leaf="a", index=4, step=3, steps=2)
    value = VALUES[kind] or float(jnp.finfo(dtype).max)
    expected = {**tree, "a": tree["a"].at[1, 1].set(value)}
    hit = jax.jit(lambda arrays, step: inject({**tree, **arrays}, fault, step)["a"])
    for step in range(7):
        wanted = expected if step in (3, 4) else tree
        assert_trees_equal(inject(tree, fault, step), wanted)
        assert_trees_equal(hit({"a": tree["a"]}, step), wanted["a"])


@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "uint32"])
def test_one_bit_flips(dtype):
    x = jnp.arange(1, 7).astype(dtype)
    fault = Fault({"x": x}, "flip", index=2)
    # The highest of the exponent, or of the integer.
    bit = 8 * x.dtype.itemsize - (2 if jnp.issubdtype(dtype, jnp.floating) else 1)
    word = np.asarray(x).view(f"u{x.dtype.itemsize}").copy()
    word[2] ^= np.array(1 << bit, word.dtype)
    expected = jnp.asarray(word.view(x.dtype))
    assert_trees_equal(inject({"x": x}, fault, 0)["x"], expected)


def test_backward_fault_hits_the_cotangent_alone():
    tree = {"w": jnp.ones((2, 3)), "v": jnp.ones(3)}
    fault = Fault(tree, "-inf", leaf="v", index=2, step=1, backward=True)

    def loss(tree, step):
        tree = inject(tree, fault, step)
        return jnp.sum(tree["w"] @ tree["v"])

    for step in (0, 1):
        value, grads = jax.jit(jax.value_and_grad(loss))(tree, step)
        assert float(value) == 6.0
        assert_trees_equal(grads["w"], jnp.ones((2, 3)))
        last = -np.inf if step else 2.0
        assert np.array_equal(grads["v"], [2.0, 2.0, last])


def test_faults_are_data_and_compile_nothing():
    tree, traces = make_tree(), []

    @jax.jit
    def step(fault, number):
        traces.append(0)
        hit = inject({k: tree[k] for k in ("a", "b")}, fault, number)
        return hit["a"], *hit["b"]

    found = []
    for kind, leaf, index in [("nan", "a", 5), ("inf", "b/0", 1), ("flip", "b/1", 0)]:
        out = step(Fault(tree, kind, leaf=leaf, index=index, step=2), 2)
        found.append([np.array(x) for x in out])
    assert len(traces) == 1
    assert np.isnan(found[0][0][1, 2])
    assert np.isinf(found[1][1][1])
    assert found[2][2][0] != 0


def test_stacked_faults_go_through_scan_and_vmap():
    x = jnp.ones(4)
    faults = [Fault({"x": x}, "nan", index=i, step=i) for i in range(4)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *faults)

    def body(carry, fault_and_step):
        return carry, inject({"x": x}, *fault_and_step)["x"]

    _, scanned = lax.scan(body, 0, (stacked, jnp.arange(4)))
    mapped = jax.vmap(lambda f, i: inject({"x": x}, f, i)["x"])(stacked, jnp.arange(4))
    assert np.array_equal(np.isnan(scanned), np.eye(4))
    assert np.array_equal(np.isnan(mapped), np.eye(4))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_device_chooses_a_number_of_its_shard(axis_type):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, P("b", "a"))
    x = jax.device_put(jnp.ones((8, 4)), sharding)
    for device in range(8):
        fault = Fault({"x": x}, device=device, index=3)
        hit = jax.jit(lambda x, f: inject({"x": x}, f, 0)["x"])(x, fault)
        assert hit.sharding.is_equivalent_to(sharding, 2)
        shards = {s.device: np.isnan(s.data).ravel() for s in hit.addressable_shards}
        chosen = shards.pop(mesh.devices.flatten()[device])
        assert chosen.tolist() == [False] * 3 + [True]
        assert not np.any(list(shards.values()))


@pytest.mark.some(1)
@pytest.mark.parametrize("backward", [False, True])
def test_one_copy_of_a_leaf_is_hit_in_shard_map(backward):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    w = jax.device_put(jnp.ones(3), NamedSharding(mesh, P()))
    fault = Fault({"w": w}, device=5, index=1, backward=backward)

    def local(w, fault):
        hit = lambda w: jnp.sum(inject({"w": w}, fault, 0, axis_name="x")["w"])  # noqa: E731
        value, grad = jax.value_and_grad(hit)(w)
        return jnp.concatenate([value[None], grad])[None]

    out = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P()), out_specs=P("x"), check_vma=False
    )(w, fault)
    expected = np.zeros((8, 4), bool)
    expected[5, 2 if backward else 0] = True
    assert np.array_equal(np.isnan(out), expected)


@pytest.mark.parametrize("wrap", [mpx.amp, lambda f: f, jax.checkpoint])
@pytest.mark.parametrize("backward", [False, True])
def test_step_with_a_fault_is_skipped(wrap, backward):
    params, x = {"w": jnp.full((4, 4), 0.5)}, jnp.ones((2, 4))
    fault = Fault(params, "inf", step=1, backward=backward)

    def loss(params, x, step):
        params = inject(params, fault, step)
        return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)

    take = jax.jit(mpx.value_and_grad(wrap(loss)))
    scaling = mpx.DynamicLossScaling.pow2(2.0**8)
    finite = [bool(take(scaling, params, x, step).finite) for step in range(3)]
    assert finite == [True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "bad"}, "`kind` must be one of 'nan', 'inf', '-inf', 'huge', 'flip'"),
        (
            {"leaf": "c"},
            "There is no leaf `c` that a fault of the kind 'nan' can hit for",
        ),
        ({"leaf": "b/1"}, "no leaf `b/1` .* the tree has ['a', 'b/0']"),
        (
            {"leaf": "b/1", "kind": "flip", "backward": True},
            "kind 'flip' can hit backward; the tree has ['a', 'b/0']",
        ),
        ({"index": 6}, "`index` must be less than 6, the size of `a`, but 6 was given"),
        ({"steps": 0}, "`steps` must be at least 1, but 0 was given"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_fault_that_cannot_happen_is_refused(options, message):
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern):
        Fault(make_tree(), **options)


def test_place_beyond_a_shard_is_refused():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    tree = {"x": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding)}
    Fault(tree, device=7, index=1)
    with pytest.raises(
        ValueError, match="`index` must be less than 2, the size of a sh"
    ):
        Fault(tree, device=7, index=2)
    with pytest.raises(ValueError, match="`device` must be less than 8, the devices"):
        Fault(tree, device=8)


# --- Short versions of the long runs --------------------------------------------------


@pytest.fixture(scope="module")
def faults():
    """The benchmark, and its ways to step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        benchmark = importlib.import_module("faults")
    return benchmark, benchmark.all_ours()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("which", [1, 2], ids=["optax, copies", "flash, sharded"])
def test_every_fault_is_skipped_exactly(faults, which):
    benchmark, ours = faults
    found = benchmark.count_faults(ours[which], 12, seed=1)
    assert found.exact
    assert found.faults == found.skipped == found.healthy == 12


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_burst_of_faults_leaves_the_next_step_as_it_was(faults):
    benchmark, ours = faults
    found = benchmark.burst(ours[0], 300)
    assert found.exact
    assert found.low == 1.0  # at the floor


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_the_count_sees_a_library_that_does_not_skip(faults):
    benchmark, ours = faults
    library = ours[0]

    def careless(training, *args):
        stepped = library.step(training, *args)
        spoilt = jax.tree.map(lambda p, g: p + 0 * g, training.params, stepped.grads)
        new = stepped.training._replace(params=spoilt)
        return stepped._replace(training=new)

    found = benchmark.count_faults(library._replace(step=careless), 3, seed=0)
    assert not found.exact
    assert found.skipped == 0
    assert found.corrupted > 0


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_records_of_processes_are_compared_step_by_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("processes")
    monkeypatch.setattr(benchmark, "CHUNK", 20)
    calm, other = tmp_path / "calm", tmp_path / "other"
    config = benchmark.CONFIGS[0]
    calm.mkdir()
    benchmark.work(calm, config, 2, seed=1)
    found = benchmark.compare(calm, 1)
    assert (found.steps, found.hashes) == (40, 2)
    assert 3 <= found.skipped <= found.faults
    assert (found.divergent, found.wrong, found.different) == (0, 0, 0)

    # A second process that decides otherwise once, and holds other parameters at the end.
    first = (calm / "process-0.jsonl").read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    rows[0]["skipped"][3] = 1 - rows[0]["skipped"][3]
    rows[1]["hash"] = "0"
    other.mkdir()
    (other / "process-0.jsonl").write_text(first)
    (other / "process-1.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = benchmark.compare(other, 2)
    assert (found.divergent, found.wrong, found.different) == (1, 1, 1)
