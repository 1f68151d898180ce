"""What counting exponents becomes on a GPU: compiled for it, not run.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs these.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200
from mpx.inspect import exponent_stats

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
KERNEL = "__gpu$xla.gpu.triton"
LEAVES = [((512, 256), "float32"), ((333, 321), "bfloat16"), ((512, 256), "float32")]
SMALL = [((64,), "float32"), ((64,), "float32")]


@pytest.fixture(scope="module")
def gpus():
    return h200.devices()


def compiled(func, mesh, specs, leaves):
    structs = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(leaves, specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        lowered = jax.jit(func).lower(structs)
        return lowered.compile(compiler_options=h200.compiler_options()).as_text() or ""


def collectives(text):
    kinds = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"
    return re.findall(rf"= [^\n]*? ({kinds})(?:-start)?\(", text)


def test_large_leaves_of_one_size_share_a_kernel(gpus):
    mesh = Mesh(np.array(gpus[:1]), ("x",), axis_types=(AxisType.Auto,))
    text = compiled(exponent_stats, mesh, [P()] * 5, LEAVES + SMALL)
    assert text.count(KERNEL) == 2  # the small ones are counted by XLA
    assert collectives(text) == []
    assert "callback" not in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_are_counted_where_they_are(gpus, kind):
    mesh = Mesh(np.array(gpus).reshape(4, 2), ("x", "y"), axis_types=(kind,) * 2)
    specs = [P("x", "y"), P(), P(None, "y")]
    text = compiled(exponent_stats, mesh, specs, LEAVES)
    assert text.count(KERNEL) == 3
    assert set(collectives(text)) == {"all-reduce"}


def test_devices_of_shard_map_run_the_kernel(gpus):
    mesh = Mesh(np.array(gpus), ("x",), axis_types=(AxisType.Auto,))
    func = jax.shard_map(
        functools.partial(exponent_stats, axis_name="x"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(),
    )
    leaves = [((4096, 256), "float32")] * 2
    text = compiled(func, mesh, [P("x")] * 2, leaves)
    assert text.count(KERNEL) == 1
    assert set(collectives(text)) == {"all-reduce"}


def test_vmap_takes_plain_jax(gpus):
    mesh = Mesh(np.array(gpus[:1]), ("x",), axis_types=(AxisType.Auto,))
    leaves = [((2, 256, 256), "float32")]
    text = compiled(jax.vmap(exponent_stats), mesh, [P()], leaves)
    assert KERNEL not in text


def test_f8_and_scanned_layers_compile(gpus):
    mesh = Mesh(np.array(gpus[:1]), ("x",), axis_types=(AxisType.Auto,))

    def scanned(leaves):
        stats = jax.lax.scan(lambda c, x: (c, exponent_stats(x)), 0, leaves[0])[1]
        return stats.sum(), exponent_stats(leaves[1])

    leaves = [((4, 256, 256), "float32"), ((256, 512), jnp.float8_e4m3fn)]
    text = compiled(scanned, mesh, [P()] * 2, leaves)
    assert text.count(KERNEL) >= 1
