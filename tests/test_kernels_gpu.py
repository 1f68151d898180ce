"""What the steps of compressed optimizers become on a GPU: compiled for it, not run.

Needs no GPU but XLA's compiler for one: `make gpu-compile` installs it and runs these.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200
import mpx

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
SHAPE = (512, 1024)
SIZE = SHAPE[0] * SHAPE[1]
AXES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
LAYOUTS = {
    "replicated": ((8,), P()),
    "row": ((8,), P("x", None)),
    "column": ((8,), P(None, "x")),
    "2-D": ((4, 2), P("x", "y")),
    "all in the last": ((4, 2), P(None, ("x", "y"))),
}
PARAMS = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
FLASHOPTIM = mpx.optim.Compression(format="flashoptim")
OPTIMIZERS = {
    "adamw": functools.partial(mpx.optim.flash_adamw, 1e-3),
    "adam": functools.partial(mpx.optim.flash_adam, 1e-3, weight_decay=0.1),
    "lion": functools.partial(mpx.optim.flash_lion, 1e-3),
    "sgd": functools.partial(mpx.optim.flash_sgd, 1e-3, momentum=0.9, nesterov=True),
    "sgdw": functools.partial(mpx.optim.flash_sgdw, 1e-3, momentum=0.9),
    "flashoptim": functools.partial(
        mpx.optim.flash_adamw, 1e-3, compression=FLASHOPTIM
    ),
}
TARGET = "__gpu$xla.gpu.triton"


@pytest.fixture(scope="module")
def gpus():
    return h200.devices()


def make_mesh(gpus, sizes=(1,), axis_type=AxisType.Auto):
    devices = np.array(gpus[: np.prod(sizes)]).reshape(sizes)
    names = ("x", "y")[: len(sizes)]
    return Mesh(devices, names, axis_types=(axis_type,) * len(sizes))


def structs(tree, sharding):
    """Types of arrays, sharded; scalars are replicated."""
    replicated = NamedSharding(sharding.mesh, P())
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if x.ndim else replicated
        ),
        tree,
    )


def compile_step(optimizer, params, sharding, wrap=lambda step: step):
    """Compiles a step that donates parameters and state."""
    params = structs(params, sharding)
    state = optimizer.init(params)
    finite = structs(jax.ShapeDtypeStruct((), bool), sharding)

    def step(params, state, grads, finite):
        return tuple(optimizer.step(params, state, grads, finite=finite))

    program = jax.jit(wrap(step), donate_argnums=(0, 1))
    # Pallas asks the mesh for the kind of its GPUs.
    with jax.set_mesh(sharding.mesh):
        return program.lower(params, state, params, finite).compile(
            h200.compiler_options()
        )


def operations(program):
    """Counts the operations of a compiled program by name, the kernel as `triton`."""
    text = program.as_text()
    entry = text[text.index("ENTRY") :]
    found = re.findall(
        r"= .*? ([\w-]+)\(.*?(?:custom_call_target=\"([^\"]*)\")?", entry
    )
    counts = collections.Counter(name for name, _ in found)
    counts["triton"] = entry.count(f'custom_call_target="{TARGET}"')
    return counts


def assert_lean(program, kernels, size):
    """A step in place, in so many kernels, without communication or temporaries."""
    counts = operations(program)
    assert counts["triton"] == kernels
    copied = re.findall(r"= (\w+\[\d\S*) copy\(", program.as_text())
    assert not copied  # scalars may be
    collectives = [
        name for name in counts if re.match(r"all-|collective|reduce-scatter", name)
    ]
    assert not collectives
    memory = program.memory_analysis()
    outputs = memory.output_size_in_bytes
    tuples = 8 * 64  # the table of the results is no array
    assert outputs - memory.alias_size_in_bytes <= tuples
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < 8192  # scalars alone


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", PARAMS.values(), ids=PARAMS)
def test_a_large_leaf_is_stepped_by_one_kernel_in_place(gpus, dtype, optimizer):
    params = {"w": jax.ShapeDtypeStruct(SHAPE, dtype)}
    sharding = NamedSharding(make_mesh(gpus), P())
    program = compile_step(optimizer(), params, sharding)
    assert_lean(program, 1, SIZE)


@pytest.mark.parametrize("shape", [(1000, 96), (4, 100, 256), (2**20 + 32,)], ids=str)
def test_sizes_that_do_not_divide_the_block_compile(gpus, shape):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    optimizer = OPTIMIZERS["adamw"]()
    program = compile_step(optimizer, params, NamedSharding(make_mesh(gpus), P()))
    assert_lean(program, 1, np.prod(shape))


@pytest.mark.parametrize("group_size", [2, 4, 16, 128, 256])
@pytest.mark.parametrize("shape", [SHAPE, (131, 768)], ids=["full", "odd"])
def test_any_group_size_compiles(gpus, shape, group_size):
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    compression = mpx.optim.Compression(group_size=group_size)
    optimizer = OPTIMIZERS["adamw"](compression=compression)
    program = compile_step(optimizer, params, NamedSharding(make_mesh(gpus), P()))
    assert_lean(program, 1, np.prod(shape))


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [(2**17 + 64, 1), (2**15 + 64, 0)],
    ids=["64-bit addresses", "out of reach"],
)
def test_beyond_two_billion_codes(gpus, rows, kernels):
    params = {"w": jax.ShapeDtypeStruct((rows, 2**15), jnp.bfloat16)}
    optimizer = OPTIMIZERS["adamw"]()
    program = compile_step(optimizer, params, NamedSharding(make_mesh(gpus), P()))
    assert operations(program)["triton"] == kernels


def test_leaves_of_equal_shape_share_launches(gpus):
    params = {str(i): jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16) for i in range(9)}
    optimizer = OPTIMIZERS["adamw"]()
    program = compile_step(optimizer, params, NamedSharding(make_mesh(gpus), P()))
    assert_lean(program, 2, 9 * SIZE)


@pytest.mark.parametrize("dtype", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("shape", [(1000,), (3, 8), (100, 70)], ids=str)
def test_leaves_without_groups_are_stepped_in_place(gpus, shape, dtype):
    optimizer = mpx.optim.flash_adamw(1e-3)
    params = {"bias": jax.ShapeDtypeStruct(shape, dtype)}
    program = compile_step(optimizer, params, NamedSharding(make_mesh(gpus), P()))
    # In f32 XLA updates them as well as the kernel would.
    count = int(dtype != jnp.float32)
    assert_lean(program, count, np.prod(shape))


@pytest.mark.parametrize(("sizes", "spec"), LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("axis_type", AXES.values(), ids=AXES)
def test_each_gpu_steps_its_shards_without_communication(gpus, axis_type, sizes, spec):
    sharding = NamedSharding(make_mesh(gpus, sizes, axis_type), spec)
    params = {str(i): jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16) for i in range(2)}
    optimizer = OPTIMIZERS["adamw"]()
    program = compile_step(optimizer, params, sharding)
    local = np.prod(sharding.shard_shape(SHAPE))
    assert_lean(program, 1, 2 * local)
    params = structs(params, sharding)
    for got, x in zip(
        jax.tree.leaves(program.output_shardings),
        jax.tree.leaves((params, optimizer.init(params))),
        strict=True,
    ):
        assert got.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_shard_map_steps_what_each_gpu_has(gpus, check):
    mesh = make_mesh(gpus, (4, 2))
    params = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)}
    optimizer = OPTIMIZERS["adamw"]()
    spec = P("x", "y")
    state = optimizer.init(structs(params, NamedSharding(mesh, spec)))
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def wrap(step):
        return jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(spec, specs, spec, P()),
            out_specs=(spec, specs),
            check_vma=check,
        )

    program = compile_step(optimizer, params, NamedSharding(mesh, spec), wrap)
    assert_lean(program, 1, SIZE // 8)


@pytest.mark.parametrize(
    ("wrap", "sizes", "spec"),
    [
        (jax.checkpoint, (1,), P()),
        (lambda f: f, (1,), P()),
        (jax.checkpoint, (2,), P(None, "x")),
    ],
    ids=["remat", "kept", "sharded"],
)
def test_gradients_that_are_released_take_no_memory(gpus, wrap, sizes, spec):
    layers, width, hidden, tokens = 16, 256, 1024, 64

    def loss(params, x):
        def layer(x, weights):
            return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

        x, _ = jax.lax.scan(wrap(layer), x, params)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    optimizer = mpx.optim.flash_adamw(1e-3)

    def ordinary(params, state, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, *optimizer.step(params, state, grads)

    def released(params, state, x):
        result = mpx.optim.release(loss, optimizer)(params, state, x)
        return result.value, result.params, result.state

    shapes = {"up": (layers, width, hidden), "down": (layers, hidden, width)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    mesh = make_mesh(gpus, sizes)
    params = structs(params, NamedSharding(mesh, spec))
    args = (params, optimizer.init(params), structs(x, NamedSharding(mesh, P())))
    with jax.set_mesh(mesh):
        before, after = (
            jax.jit(step, donate_argnums=(0, 1))
            .lower(*args)
            .compile(h200.compiler_options())
            for step in (ordinary, released)
        )
    count = sum(np.prod(shape) for shape in shapes.values()) / len(mesh.devices)
    old, new = before.memory_analysis(), after.memory_analysis()
    # Without the gradients, but for those of one layer; nothing else is copied.
    least = 2 * count - 2 * count / layers
    assert old.temp_size_in_bytes - new.temp_size_in_bytes >= least
    assert new.alias_size_in_bytes == old.alias_size_in_bytes
    assert after.as_text().count(f'"{TARGET}"') == 2  # one kernel for each array
