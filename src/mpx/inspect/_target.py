"""Compilation for a GPU that need not be there, and what the compiler made of a program."""

import collections
import contextlib
import dataclasses
import importlib.util
import os
import pathlib
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._fp8._check import Fp8Check, fp8_check
from mpx._jax._compat import as_function
from mpx._jax._devices import assumed_gpu
from mpx._jax._private import assumed_cudnn, private
from mpx.inspect._collectives import Collectives, collectives
from mpx.inspect._program import Program
from mpx.inspect._result import Result, Table, amount

# By name the description for XLA, the compute capability and the version of cuDNN.
_TARGETS = {"h200": ("h200.txtpb", (9, 0), 91000)}
HERE = "here"
"""The target that is the default device."""


@dataclasses.dataclass(frozen=True)
class Compiled(Result):
    """What the compiler made of a program.

    Attributes:
        target: What it was compiled for.
        devices: For how many of these.
        peak_bytes: The memory that it needs on each device, arguments included.
        argument_bytes: The memory of its arguments on each device.
        kernels: How many kernels and library calls it has; a loop counts its body once.
        calls: The calls of libraries and of written kernels, by name.
        matmuls: Which of its matmuls are fp8; see `mpx.inspect.fp8_check`.
        attention: How many calls of cuDNN's attention it has.
        collectives: The communication between devices; see `mpx.inspect.collectives`.
    """

    target: str
    devices: int
    peak_bytes: int
    argument_bytes: int
    kernels: int
    calls: Mapping[str, int]
    matmuls: Fp8Check
    attention: int
    collectives: Collectives

    def tables(self) -> Sequence[Table]:
        """Returns a paragraph, and a table of the collectives if there are any."""
        where = f"{self.devices} × {self.target}" if self.devices > 1 else self.target
        text = (
            f"Compiled for {where}: {amount(self.peak_bytes, 'B')} at the peak"
            f"{' on each device' if self.devices > 1 else ''}, of which arguments are "
            f"{amount(self.argument_bytes, 'B')}; {self.kernels} kernels; {self.matmuls}; "
            f"{self.attention} calls of cuDNN's attention."
        )
        return [
            Table.text(text),
            *(self.collectives.tables() if self.collectives else ()),
        ]


def as_target(target: str | None) -> str | None:
    """Returns the name of a target as it is listed; upper case is accepted.

    Raises:
        ValueError: If it is unknown.
    """
    name = target.lower() if isinstance(target, str) else target
    if name is not None and name not in (*_TARGETS, HERE):
        known = ", ".join(f'"{name}"' for name in (*_TARGETS, HERE))
        raise ValueError(f"`target` must be one of {known}, but it is {target!r}.")
    return name


@contextlib.contextmanager
def described(target: str | None) -> Iterator[None]:
    """Traces the code inside for a target, with the kernels that it has."""
    if target is None or target == HERE:
        yield
        return
    _, capability, cudnn = _TARGETS[target]
    with assumed_gpu(capability), assumed_cudnn(cudnn):
        yield


def target_devices(target: str, count: int = 8) -> list[PyTree]:
    """Returns devices that one can compile for.

    Raises:
        ValueError: If the target is unknown, or fewer devices are here.
        ImportError: If JAX's CUDA plugin is not installed.
    """
    if target == HERE:
        if jax.device_count() < count:
            raise ValueError(
                f"`devices` is {count}, but {jax.device_count()} are here. Pass fewer, or "
                'compile for others, `target="h200"`.'
            )
        return jax.devices()[:count]
    jax.local_devices()  # so that JAX has looked for devices as it does without mpx
    file = pathlib.Path(__file__).with_name(_TARGETS[target][0])
    options = {"target_config": file.read_text(), "topology": f"1x1x{count}"}

    def describe() -> list[PyTree]:
        found = private("topology").get_topology_desc(platform="cuda", **options)
        return list(found.devices)

    try:
        with _without_checks():
            try:
                return describe()
            except NotImplementedError:
                # Where there is no GPU, JAX did not register the plugin.
                _initialize_plugin()
                return describe()
    except Exception as error:
        raise ImportError(_MISSING.format(version=jax.__version__)) from error


@contextlib.contextmanager
def _without_checks() -> Iterator[None]:
    """Stops the plugin from looking for the libraries of a GPU that is not there."""
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _initialize_plugin() -> None:
    plugins = importlib.import_module("jax_plugins")
    for _, name, _ in pkgutil.iter_modules(plugins.__path__):
        if name.startswith("xla_cuda"):
            importlib.import_module(f"jax_plugins.{name}").initialize()


_MISSING = (
    "To compile for a GPU that is not here, JAX needs its CUDA plugin and NVIDIA's "
    'compiler. Install them: `pip install "jax[cuda13]=={version}"`. Without them leave '
    "`target` out."
)


def compiler_options(target: str) -> dict[str, PyTree]:
    """Returns where NVIDIA's compiler is; nothing can be timed without a GPU.

    Raises:
        ImportError: If it is not installed.
    """
    if target == HERE:
        return {}
    spec = importlib.util.find_spec("nvidia")
    roots = map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
    folders = [path.parent for root in roots for path in root.glob("cu*/bin")]
    if not folders:
        raise ImportError(_MISSING.format(version=jax.__version__))
    return {"xla_gpu_cuda_data_dir": str(folders[0]), "xla_gpu_autotune_level": 0}


@contextlib.contextmanager
def on_target(
    target: str | None, devices: int, arguments: PyTree
) -> Iterator[Mesh | None]:
    """Traces and compiles the code inside for devices of a target, in a mesh of them.

    If arguments are sharded over a mesh of as many devices, it has the same axes.
    """
    if target is None:
        yield None
        return
    array = np.array(target_devices(target, devices))
    mesh = Mesh(array, "devices")
    for x in jax.tree.leaves(arguments):
        given = getattr(getattr(x, "sharding", None), "mesh", None)
        if given is not None and given.size == devices > 1:
            sizes = given.shape
            mesh = Mesh(array.reshape(tuple(sizes.values())), tuple(sizes))
            break
    # Pallas asks the mesh for the kind of its GPUs.
    with described(target), jax.set_mesh(mesh):
        yield mesh


def compile_for(full: Program, target: str, mesh: Mesh) -> Compiled:
    """Compiles a program inside `on_target`; `report` says how arguments are sharded."""
    options = compiler_options(target)
    if target != HERE:
        # Without timing, XLA finds no tiles for some odd shapes of Triton's matmuls.
        options["xla_gpu_enable_triton_gemm"] = False
    lowered = jax.jit(as_function(full.jaxpr)).lower(*placed(full, mesh))
    try:
        compiled = lowered.compile(options)
    except Exception as error:
        if "serialize StableHLO" not in str(error):
            raise
        raise NotImplementedError(
            f"The CUDA plugin of jax {jax.__version__} does not take an operation of this "
            "program when no GPU is here; matmuls in fp8 are known to be one. Pass "
            '`target="here"` on a machine with the GPU, or leave `target` out.'
        ) from error
    return read_compiled(compiled, target, mesh.size)


def placed(full: Program, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the arguments of a program, sharded over a mesh."""
    found = []
    for i, x in enumerate(full.arrays):
        given, spec = getattr(x, "sharding", None), PartitionSpec()
        if isinstance(given, NamedSharding) and given.mesh.shape == mesh.shape:
            spec = given.spec
        elif mesh.axis_names == ("devices",) and i not in full.params and x.shape:
            is_split = mesh.size > 1 and x.shape[0] % mesh.size == 0
            spec = PartitionSpec("devices") if is_split else spec
        place = NamedSharding(mesh, spec)
        found.append(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
    return found


def read_compiled(
    compiled: jax.stages.Compiled, target: str = HERE, devices: int = 1
) -> Compiled:
    """Reads the program that a compiler made."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    # What the allocator of a GPU measures: temporary buffers are one allocation.
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Compiled(
        target=target,
        devices=devices,
        peak_bytes=peak,
        argument_bytes=memory.argument_size_in_bytes,
        kernels=len(re.findall(r" = [^=]* (?:fusion|custom-call)\(", text)),
        calls=dict(sorted(calls.items())),
        matmuls=fp8_check(text),
        attention=sum(n for name, n in calls.items() if "fmha" in name),
        collectives=collectives(text),
    )
