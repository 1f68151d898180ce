"""What a compiler makes of a program, for devices that need not be there."""

import collections
import contextlib
import dataclasses
import importlib.util
import math
import os
import pathlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from mpx._fp8._check import Fp8Check, fp8_check
from mpx._jax._compat import as_function
from mpx._jax._devices import assumed_gpu
from mpx._jax._private import assumed_cudnn, private
from mpx.inspect._program import Program
from mpx.inspect._result import Result, Table, amount, total

# --- Collectives ----------------------------------------------------------------------

_KINDS = (
    "all-gather|all-reduce|reduce-scatter|ragged-all-to-all|all-to-all|"
    "collective-permute|collective-broadcast"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-$]+) (?:\(.*)?\{$")
_CALLED = re.compile(r"(?:body|calls|to_apply|condition)=%?([\w.\-$]+)")
_CALLED_LISTS = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_COLLECTIVE = re.compile(rf" = (\(.*?\)|\S+) ({_KINDS})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[sufc]\d+\w*)\[([\d,]*)\]")
_SHORT = {"f8e4m3fn": "e4m3", "f8e5m2": "e5m2", "pred": "bool"}


class Collective(NamedTuple):
    """One collective operation of a compiled program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or another.
        dtype: The dtype that is sent, such as `f32` or `e4m3`.
        shape: The shape of its result on one device.
        devices: Over how many devices each of its groups extends.
        runs: How often it runs in one call of the program. A loop whose length the
            compiler does not know counts once.
        in_loop: Whether it is inside a loop.
        bytes: How many bytes one device sends in one call, in all these runs, by the
            usual ring algorithms.

    Examples:
        >>> text = '''
        ... ENTRY %main (x: f32[8]) -> f32[8] {
        ...   %y = f32[8]{0} all-reduce(%x), replica_groups={{0,1,2,3}}
        ... }'''
        >>> collectives(text)[0].bytes
        48
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    devices: int
    runs: int
    in_loop: bool
    bytes: int


class Collectives(Result, list[Collective]):
    """A list of collectives that prints as a table."""

    def tables(self) -> Sequence[Table]:
        """Returns the sums by kind and dtype."""
        if not self:
            return [Table.text("No collectives.")]
        runs = total(((x.kind, x.dtype), x.runs) for x in self)
        sent = total(((x.kind, x.dtype), x.bytes) for x in self)
        rows = [(*x, str(runs[x]), amount(sent[x], "B")) for x in sorted(runs)]
        head = ("collective", "dtype", "runs", "sent by each device")
        return [Table(head, rows, "", frozenset({2, 3}))]


def collectives(compiled: jax.stages.Compiled | str) -> Collectives:
    """Lists the collectives of a compiled program; the list prints as a table.

    With n devices in a group and a result of b bytes on each, a device sends b·(n-1)/n in
    an all-gather and an all-to-all, b·(n-1) in a reduce-scatter, 2·b·(n-1)/n in an
    all-reduce, and b in a permutation. CPUs promote 16-bit sums to f32: read the program
    that was compiled for the hardware that you mean.

    Args:
        compiled: What `jax.jit(func).lower(...).compile()` returns, or its text.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> collectives(jax.jit(jnp.sum).lower(jnp.ones(8)).compile())
        No collectives.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text() or ""
    return Collectives(found for _, found in located(text))


def located(text: str) -> Iterator[tuple[str, Collective]]:
    """Yields the collectives of a program's text, each with its line."""
    entry, bodies = computations(text)
    runs, devices = runs_of(entry, bodies), _number(r"num_partitions=(\d+)", text)
    for name, lines in bodies.items():
        times, in_loop = runs.get(name, (0, False))
        for match in filter(None, map(_COLLECTIVE.search, lines if times else ())):
            line = match.string
            types, kind, is_started = match.groups()
            found, group = arrays(types), _group(line, devices)
            if is_started and (kind != "all-reduce" or types.startswith("((")):
                # ((operands), (results)), and for some a context, an integer scalar.
                found = [x for x in found if x != ("u32", ())]
                found = found[len(found) // 2 :]
            for dtype, shape in found:
                sent = times * _sent(kind, bits(dtype) * math.prod(shape) / 8, group)
                what = kind, _SHORT.get(dtype, dtype), shape, group, times, in_loop
                yield line, Collective(*what, round(sent))


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Returns the name of the entry, and the lines of each computation by its name."""
    found: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        if not line.startswith((" ", "\t")):
            match = _COMPUTATION.match(line.strip())
            lines = None
            if match:
                lines = found.setdefault(match.group(2), [])
                entry = match.group(2) if match.group(1) else entry
        elif lines is not None:
            lines.append(line)
    return entry, found


def runs_of(entry: str, bodies: dict[str, list[str]]) -> dict[str, tuple[int, bool]]:
    """Returns how often each computation runs, and whether in a loop."""
    runs: dict[str, tuple[int, bool]] = collections.defaultdict(lambda: (0, False))
    stack = [(entry, 1, False)]
    while stack:
        name, times, in_loop = stack.pop()
        runs[name] = runs[name][0] + times, runs[name][1] or in_loop
        for line in bodies.get(name, ()):
            if "async-done(" in line or "async-update(" in line:
                continue  # they name the computation of their start again
            called = _CALLED.findall(line)
            for names in _CALLED_LISTS.findall(line):
                called += [x.strip(" %") for x in names.split(",")]
            is_loop = " while(" in line
            inner = times * _number(
                r"known_trip_count\D*(\d+)", line if is_loop else ""
            )
            stack += [(x, inner, in_loop or is_loop) for x in called if x in bodies]
    return dict(runs)


def _number(pattern: str, text: str, default: int = 1) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else default


def arrays(types: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array in the text of a type."""
    return [
        (dtype, tuple(int(size) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(types)
    ]


def bits(dtype: str) -> int:
    """Returns the bits of one element."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits.group(1)) if digits else 8  # pred


def _group(line: str, devices: int) -> int:
    """Returns the size of the groups in which a collective communicates."""
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", line)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh.group(2))
        return math.prod(int(part or sizes[name]) for name, part in parts)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed.group(1).split(","))
    return _number(r"replica_groups=\[\d+,(\d+)\]", line, devices)


def _sent(kind: str, size: float, group: int) -> float:
    """Returns how many bytes a device sends for a result of `size` bytes."""
    others = group - 1
    if kind == "reduce-scatter":
        return size * others
    if kind in ("all-gather", "all-to-all"):
        return size * others / group
    return 2 * size * others / group if kind == "all-reduce" else size


# --- Memory, kernels and calls --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compiled(Result):
    """What the compiler made of a program.

    Attributes:
        target: What it was compiled for.
        peak_bytes: The memory that it needs, arguments included.
        argument_bytes: The memory of its arguments.
        kernels: How many kernels and library calls it has; a loop counts its body once.
        matmuls: Which of its matmuls are fp8; see `mpx.inspect.fp8_check`.
        attention: How many calls of cuDNN's attention it has.
    """

    target: str
    peak_bytes: int
    argument_bytes: int
    kernels: int
    matmuls: Fp8Check
    attention: int

    def tables(self) -> Sequence[Table]:
        """Returns a paragraph."""
        text = (
            f"Compiled for {self.target}: {amount(self.peak_bytes, 'B')} at the peak, of "
            f"which arguments are {amount(self.argument_bytes, 'B')}; {self.kernels} "
            f"kernels; {self.matmuls}; {self.attention} calls of cuDNN's attention."
        )
        return [Table.text(text)]


def read_compiled(compiled: jax.stages.Compiled, target: str) -> Compiled:
    """Reads the program that a compiler made."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Compiled(
        target=target,
        # What the allocator of a GPU measures: temporary buffers are one allocation.
        peak_bytes=needed + memory.temp_size_in_bytes - memory.alias_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        kernels=len(re.findall(r" = [^=]* (?:fusion|custom-call)\(", text)),
        matmuls=fp8_check(text),
        attention=len(re.findall(r'custom_call_target="[^"]*fmha', text)),
    )


# --- Targets --------------------------------------------------------------------------

H200, HERE = "h200", "here"
"""The targets: a GPU that need not be there, and the default device."""


def as_target(target: str | None) -> str | None:
    """Returns the name of a target as it is listed; upper case is accepted."""
    name = target.lower() if isinstance(target, str) else target
    if name not in (None, H200, HERE):
        raise ValueError(
            f'`target` must be one of "{H200}", "{HERE}", but it is {target!r}.'
        )
    return name


@contextlib.contextmanager
def described(target: str | None) -> Iterator[None]:
    """Traces the code inside for a target, with the kernels that it has."""
    with contextlib.ExitStack() as stack:
        if target == H200:
            stack.enter_context(assumed_gpu((9, 0)))
            stack.enter_context(assumed_cudnn(91000))
        yield


def h200_devices(count: int) -> list[PyTree]:
    """Returns descriptions of H200s that one can compile for."""
    jax.local_devices()  # so that JAX has looked for devices as it does without mpx
    file = pathlib.Path(__file__).with_name("h200.txtpb")
    options = {"target_config": file.read_text(), "topology": f"1x1x{count}"}

    def describe() -> list[PyTree]:
        found = private("topology").get_topology_desc(platform="cuda", **options)
        return list(found.devices)

    # The plugin must not look for the libraries of a GPU that is not there.
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        try:
            return describe()
        except NotImplementedError:
            # Where there is no GPU, JAX did not register the plugin.
            _initialize_plugin()
            return describe()
    except Exception as error:
        raise ImportError(_MISSING.format(version=jax.__version__)) from error
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def _initialize_plugin() -> None:
    for _, name, _ in pkgutil.iter_modules(
        importlib.import_module("jax_plugins").__path__
    ):
        if name.startswith("xla_cuda"):
            importlib.import_module(f"jax_plugins.{name}").initialize()


_MISSING = (
    "To compile for a GPU that is not here, JAX needs its CUDA plugin and NVIDIA's "
    'compiler. Install them: `pip install "jax[cuda13]=={version}"`. Without them leave '
    "`target` out."
)


def compiler_options(target: str) -> dict[str, PyTree]:
    """Returns where NVIDIA's compiler is; without a GPU it can time nothing."""
    if target == HERE:
        return {}
    spec = importlib.util.find_spec("nvidia")
    roots = map(pathlib.Path, spec.submodule_search_locations or () if spec else ())
    folders = [path.parent for root in roots for path in root.glob("cu*/bin")]
    if not folders:
        raise ImportError(_MISSING.format(version=jax.__version__))
    return {"xla_gpu_cuda_data_dir": str(folders[0]), "xla_gpu_autotune_level": 0}


@contextlib.contextmanager
def on_target(target: str | None) -> Iterator[None]:
    """Traces and compiles the code inside for a target, in a mesh of one such device."""
    with described(target), contextlib.ExitStack() as stack:
        if target is not None:
            devices = jax.devices()[:1] if target == HERE else h200_devices(1)
            # Pallas asks the mesh for the kind of its GPUs.
            stack.enter_context(jax.set_mesh(Mesh(np.array(devices), "devices")))
        yield


def compile_for(full: Program, target: str) -> Compiled:
    """Compiles a program inside `on_target`."""
    options = compiler_options(target)
    if target != HERE:
        # Without timing, XLA finds no tiles for some odd shapes of Triton's matmuls.
        options["xla_gpu_enable_triton_gemm"] = False
    place = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in full.arrays
    ]
    lowered = jax.jit(as_function(full.jaxpr)).lower(*shapes)
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
    return read_compiled(compiled, target)
