"""`python -m mpx doctor --cluster`: whether the processes and devices of a job agree.

Each check gives the same verdict on every process.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mpx._amp import amp
from mpx._casting._cast import cast_to_float32
from mpx._gradients._grad import value_and_grad
from mpx._jax._processes import gather
from mpx._jax._version import __version__
from mpx._scaling._dynamic_scaling import DynamicLossScaling
from mpx.inspect._collectives import Collective, collectives
from mpx.inspect._result import Result, Table, amount

# What changes the programs or the numbers of a process.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_ROWS = 4  # of the batch, on each device
_STEPS = 16
_CALLS = 10  # the same on every process: a call waits for all of them


@dataclasses.dataclass(frozen=True)
class Check:
    """One check; `passed` is `None` if it was not run, and `figures` says why."""

    name: str
    passed: bool | None
    figures: str


@dataclasses.dataclass(frozen=True)
class Rate:
    """The measured speed of a collective.

    Attributes:
        kind: `all-reduce`, `all-gather` or `reduce-scatter`.
        bytes: The size of the whole array: what an all-reduce and a reduce-scatter read
            and an all-gather returns on each device.
        seconds: The time of the fastest of some calls, on the slowest process.
        algorithmic: Bytes of the array per second.
        bus: Bytes per second that each device sends, by the usual ring algorithms. It
            does not depend on the number of devices, so compare it with the hardware.
        exact: Whether the result is right, on every process.
    """

    kind: str
    bytes: int
    seconds: float
    algorithmic: float
    bus: float
    exact: bool


@dataclasses.dataclass(frozen=True)
class Conformance(Result):
    """The result of all checks, the same on every process.

    Attributes:
        processes: The number of processes.
        devices: The number of devices of all processes.
        versions: Versions and settings of process 0.
        checks: The checks, in order.
        rates: The speed of the collectives; empty if not measured.
    """

    processes: int
    devices: int
    versions: dict[str, str]
    checks: tuple[Check, ...]
    rates: tuple[Rate, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def tables(self) -> Sequence[Table]:
        """Returns versions, checks and the speed of collectives."""
        names = ("mpx", "jax", "jaxlib", "Python")
        text = ", ".join(f"{name} {self.versions[name]}" for name in names)
        text += f"; {_counted(self.processes, 'process', 'es')}, "
        text += f"{_counted(self.devices, 'device')}: {self.versions['devices']}"
        words = {True: "pass", False: "FAIL", None: "–"}
        checks = [[x.name, words[x.passed], x.figures] for x in self.checks]
        tables = [Table.text(text), Table(("check", "result", ""), checks)]
        rates = [
            [
                x.kind,
                f"{x.bytes / 2**20:.4g} MiB",
                f"{1e6 * x.seconds:.0f} µs",
                amount(x.algorithmic, "B/s"),
                amount(x.bus, "B/s"),
            ]
            for x in self.rates
        ]
        if rates:
            head = ("collective", "array", "time", "algorithmic", "bus")
            title = f"f32 collectives over {self.devices} devices"
            tables.append(Table(head, rates, title, frozenset({1, 2, 3, 4})))
        skipped = sum(check.passed is None for check in self.checks)
        verdict = "No check failed." if self.passed else "A check FAILED."
        if skipped:
            verdict = f"{verdict[:-1]}; {skipped} not run."
        return [*tables, Table.text(verdict)]


def conformance(*, measure: bool = True) -> Conformance:
    """Runs all checks, and times the collectives; every process of the job must call it."""
    versions = describe()
    checks, rates = [check_devices()], ()
    if checks[0].passed:
        checks.append(check_versions(gather(versions)))
    # Processes of different versions may run different programs, and then they hang.
    if all(check.passed for check in checks):
        mesh = make_mesh()
        sharded = Trial(mesh, "sharded")
        checks += check_decisions(sharded)
        checks += check_decisions(Trial(mesh, "copies"))
        checks.append(check_wire(sharded))
        if measure and mesh.size > 1:
            rates = measure_rates(mesh)
            wrong = sorted({x.kind for x in rates if not x.exact})
            text = f"wrong: {', '.join(wrong)}" if wrong else f"{len(rates)} exact"
            checks.append(Check("results of collectives", not wrong, text))
    else:
        checks.append(Check("all others", None, "not run: see above"))
    return Conformance(
        jax.process_count(), jax.device_count(), versions, tuple(checks), rates
    )


def _counted(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


def outliers(values: Sequence[object]) -> list[int]:
    """Returns the positions of the values that are not the most frequent one."""
    texts = [json.dumps(value, sort_keys=True) for value in values]
    usual, _ = Counter(texts).most_common(1)[0]
    return [number for number, text in enumerate(texts) if text != usual]


# --- Versions and devices -------------------------------------------------------------


def describe() -> dict[str, str]:
    """Returns what must be the same on all processes of a job."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    found = {
        "mpx": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "Python": platform.python_version(),
        "devices": ", ".join(kinds),
        # Where a process dumps its programs changes none of them.
        "XLA_FLAGS": " ".join(sorted(x for x in flags if "xla_dump" not in x)),
    }
    return found | {name: str(getattr(jax.config, name)) for name in _SETTINGS}


def check_devices() -> Check:
    """Checks that each process has as many devices as the others."""
    counts = Counter(device.process_index for device in jax.devices())
    processes = jax.process_count()
    held = [counts[number] for number in range(processes)]
    if len({*held}) == 1:
        text = f"{_counted(processes, 'process', 'es')} with {_counted(held[0], 'device')} each"
        return Check("devices", True, text)
    rows = ", ".join(f"process {i} has {held[i]}" for i in outliers(held))
    usual = _counted(Counter(held).most_common(1)[0][0], "device")
    return Check("devices", False, f"most processes have {usual}, but {rows}")


def check_versions(everywhere: list[dict[str, str]]) -> Check:
    """Checks that versions and settings agree."""
    different = []
    for name in everywhere[0]:
        values = [row.get(name, "") for row in everywhere]
        odd = outliers(values)
        if odd:
            usual = next(x for i, x in enumerate(values) if i not in odd)
            rows = ", ".join(f"{values[i]!r} on process {i}" for i in odd[:3])
            more = f" and {len(odd) - 3} others" if len(odd) > 3 else ""
            different.append(f"{name}: {usual!r}, but {rows}{more}")
    text = f"{len(everywhere[0])} equal on {_counted(len(everywhere), 'process', 'es')}"
    return Check("versions and settings", not different, "; ".join(different) or text)


# --- A few training steps -------------------------------------------------------------


def make_mesh() -> Mesh:
    """Returns the mesh of all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def half() -> str:
    """Returns the compute dtype: CPUs widen bf16 collectives, so they take f16."""
    return "f16" if jax.default_backend() == "cpu" else "bf16"


class Trial:
    """A few steps of a small model with dynamic loss scaling, on all devices.

    `sharded` cuts the rows of each matrix over all devices and trains under `jit` (FSDP).
    `copies` keeps everything on every device and trains under `shard_map`, where a NaN is
    in the batch of one device alone.
    """

    def __init__(
        self, mesh: Mesh, layout: Literal["sharded", "copies"] = "sharded"
    ) -> None:
        self.mesh, self.layout = mesh, layout
        self._width = mesh.size * -(-64 // mesh.size)
        self._where = jax.tree.map(self._place, jax.eval_shape(self._init))

    def start(self) -> PyTree:
        """Returns the state before the first step."""
        return jax.jit(self._init, out_shardings=self._where)()

    def run(
        self, state: PyTree, devices: Sequence[int]
    ) -> tuple[PyTree, list[list[bool]]]:
        """Runs a step for each given device, which has a NaN in its batch; -1 for none.

        Returns the new state, and for each local device which steps it skipped.
        """

        def steps(state: PyTree, devices: Array) -> tuple[PyTree, Array]:
            numbers = jnp.arange(len(devices), dtype=jnp.int32)
            return lax.scan(lambda c, x: self._step(c, *x), state, (numbers, devices))

        if self.layout == "copies":
            steps = jax.shard_map(
                steps, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False
            )
        places = self._where, NamedSharding(self.mesh, P())
        run = jax.jit(steps, out_shardings=places)
        state, finite = run(state, np.array(devices, np.int32))
        shards = sorted(finite.addressable_shards, key=lambda x: x.device.id)
        return state, [(~np.asarray(shard.data)).tolist() for shard in shards]

    def compile_step(
        self, options: dict[str, str | bool] | None = None
    ) -> jax.stages.Compiled:
        """Compiles one step, with options of the compiler."""
        state = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            jax.eval_shape(self._init),
            self._where,
        )
        number = jax.ShapeDtypeStruct((), jnp.int32)
        step = jax.jit(self._step, out_shardings=(self._where, None))
        return step.lower(state, number, number).compile(options)

    @property
    def matrices(self) -> set[int]:
        """The numbers of elements of the weights that are cut."""
        return {4 * self._width**2}

    def _init(self) -> PyTree:
        width = self._width
        up, down = jax.random.split(jax.random.key(0))
        params = {
            "up": jax.random.normal(up, (width, 4 * width)) * width**-0.5,
            "bias": jnp.zeros(4 * width),
            "down": jax.random.normal(down, (4 * width, width)) * 0.5 * width**-0.5,
        }
        return {"params": params, "scaling": DynamicLossScaling.pow2(2.0**10)}

    def _place(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        is_cut = self.layout == "sharded" and leaf.ndim == 2
        return NamedSharding(self.mesh, P("data") if is_cut else P())

    def _step(
        self, state: PyTree, number: Array, device: Array
    ) -> tuple[PyTree, Array]:
        axis = "data" if self.layout == "copies" else None
        key = jax.random.fold_in(jax.random.key(1), number)
        rows, owners = _ROWS * self.mesh.size, np.arange(self.mesh.size)
        if axis is not None:
            rows, owners = _ROWS, lax.axis_index(axis)
            key = jax.random.fold_in(key, owners)

        def along(x: Array) -> Array:
            if axis is not None:
                return x
            return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data")))

        def loss(params: dict[str, Array], x: Array) -> Array:
            hidden = jax.nn.relu(along(x @ params["up"]) + params["bias"])
            out = along(hidden @ params["down"])
            return jnp.mean(cast_to_float32(out - x) ** 2)

        x = jax.random.normal(key, (rows, self._width))
        is_bad = jnp.repeat(owners == device, _ROWS)
        x = along(jnp.where(is_bad[:, None], jnp.nan, x))
        take = value_and_grad(amp(loss, half()), axis_name=axis)
        result = take(state["scaling"], state["params"], x)
        params = jax.tree.map(
            lambda p, g: jnp.where(result.finite, p - 0.1 * g, p),
            state["params"],
            result.grads,
        )
        return {"params": params, "scaling": result.scaling}, result.finite


def check_decisions(trial: Trial) -> list[Check]:
    """Checks that all devices skip the steps with a NaN on one of them, and no others."""
    size, count = trial.mesh.size, _STEPS // 2
    devices = [-1] * _STEPS
    for fault in range(count):  # spread over all devices; every other step is healthy
        devices[2 * fault + fault // 2 % 2] = fault * size // count % size
    state, skipped = trial.run(trial.start(), devices)
    wanted = [device >= 0 for device in devices]
    hashes = gather(digests(state, trial.mesh))
    return [
        judge_skips(f"skips, {trial.layout}", wanted, gather(skipped)),
        judge_hashes(f"hash of the state, {trial.layout}", hashes),
    ]


def digests(tree: PyTree, mesh: Mesh) -> list[str]:
    """Returns a hash of all bits of a tree for each local device.

    Sharded leaves are gathered first. Of a leaf that every device holds, the copy of each
    device is hashed, so that copies that have drifted apart are seen.
    """
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(tree)
    found = defaultdict(hashlib.sha256)
    for leaf in jax.tree.leaves(whole):
        for shard in leaf.addressable_shards:
            array = np.asarray(shard.data)
            found[shard.device.id].update(f"{array.dtype}{array.shape}".encode())
            found[shard.device.id].update(array.tobytes())
    return [found[number].hexdigest()[:16] for number in sorted(found)]


def judge_skips(
    name: str, wanted: list[bool], everywhere: list[list[list[bool]]]
) -> Check:
    """Compares the decisions of all devices with each other and with the faults."""
    rows = [
        (f"device {j} of process {i}", row)
        for i, process in enumerate(everywhere)
        for j, row in enumerate(process)
    ]
    divergent = sum(
        len({*step}) > 1 for step in zip(*(x for _, x in rows), strict=True)
    )
    wrong = [
        f"{place}: step {step} "
        + ("with a fault, not skipped" if bad else "skipped without a fault")
        for place, row in rows
        for step, (bad, skipped) in enumerate(zip(wanted, row, strict=True))
        if bad != skipped
    ]
    text = (
        f"{len(wanted)} steps, {sum(wanted)} faults on one device each: "
        f"{sum(rows[0][1])} skipped, {divergent} divergent decisions"
    )
    if wrong:
        text += f"; {'; '.join(wrong[:3])}" + (" …" if len(wrong) > 3 else "")
    return Check(name, not wrong and not divergent, text)


def judge_hashes(name: str, everywhere: list[list[str]]) -> Check:
    """Compares the hashes of all devices of all processes."""
    places = [(i, j) for i, row in enumerate(everywhere) for j in range(len(row))]
    values = [everywhere[i][j] for i, j in places]
    odd = outliers(values)
    if not odd:
        return Check(name, True, f"{values[0]} on {_counted(len(values), 'device')}")
    usual = next(x for i, x in enumerate(values) if i not in odd)
    rows = ", ".join(
        f"{values[i]} on device {places[i][1]} of process {places[i][0]}"
        for i in odd[:3]
    )
    text = f"{usual} on {len(values) - len(odd)} of {len(values)} devices, but {rows}"
    return Check(name, False, text + (" …" if len(odd) > 3 else ""))


# --- The wire -------------------------------------------------------------------------


def check_wire(trial: Trial, options: dict[str, str | bool] | None = None) -> Check:
    """Checks the dtypes that one FSDP step sends."""
    found = collectives(trial.compile_step(options))
    rows = [[list(x) if isinstance(x, tuple) else x for x in row] for row in found]
    return judge_wire(gather(rows), trial.matrices, trial.mesh.size)


def judge_wire(everywhere: list[list[list]], sizes: set[int], devices: int) -> Check:
    """Compares the collectives of weights and gradients with what was asked for.

    Args:
        everywhere: The collectives of each process.
        sizes: The numbers of elements of the weights.
        devices: The number of devices.
    """
    name = "wire of an FSDP step"
    if devices == 1:
        return Check(name, None, "not run: there is one device")
    odd = outliers(everywhere)
    if odd:
        text = f"the programs of the processes {odd} have other collectives"
        return Check(name, False, text)
    found = [Collective(*row) for row in everywhere[0]]
    parts = {size // devices for size in sizes}
    results = {"all-gather": sizes, "all-reduce": sizes, "reduce-scatter": parts}
    heavy = [x for x in found if math.prod(x.shape) in results.get(x.kind, ())]
    weights = [x for x in heavy if x.kind == "all-gather"]
    grads = [x for x in heavy if x.kind != "all-gather"]
    texts, passed = [], True
    for what, wanted, chosen in (
        ("weights gathered", half(), weights),
        ("gradients reduced", "f32", grads),
    ):
        dtypes = sorted({x.dtype for x in chosen})
        text = f"{what} in {', '.join(dtypes) or 'no collective'} ({_sent(chosen)})"
        if dtypes != [wanted]:
            passed, text = False, f"{text}, asked for {wanted}"
        texts.append(text)
    rest = [x for x in found if x not in heavy]
    return Check(name, passed, f"{', '.join(texts)}, {_sent(rest)} else; per device")


def _sent(chosen: list[Collective]) -> str:
    return amount(sum(x.bytes for x in chosen), "B")


# --- Bandwidth ------------------------------------------------------------------------

# For each kind the function, whether it reads a part of the array, and whether it returns
# one.
_KINDS: dict[str, tuple[Callable[[Array], Array], bool, bool]] = {
    "all-reduce": (lambda x: lax.psum(x, "data"), False, False),
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), True, False),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "data", tiled=True),
        False,
        True,
    ),
}


def measure_rates(mesh: Mesh, sizes: tuple[int, ...] | None = None) -> tuple[Rate, ...]:
    """Times the collectives over all devices, for arrays of at least these bytes."""
    if sizes is None:
        is_cpu = jax.default_backend() == "cpu"
        sizes = (2**16, 2**20, 2**23) if is_cpu else (2**20, 2**24, 2**28)
    return tuple(_rate(mesh, kind, size) for kind in _KINDS for size in sizes)


def _rate(mesh: Mesh, kind: str, size: int) -> Rate:
    func, reads_part, returns_part = _KINDS[kind]
    count = mesh.size
    part = -(-size // (4 * count))
    length = part if reads_part else part * count

    def numbers() -> Array:  # device i holds i + 1, a small integer: sums are exact
        return jnp.full(length, (lax.axis_index("data") + 1) % 8, jnp.float32)

    on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    x = jax.jit(on_mesh(numbers, in_specs=(), out_specs=P("data")))()
    result = P("data") if returns_part else P()
    call = jax.jit(on_mesh(func, in_specs=P("data"), out_specs=result))
    found = jax.block_until_ready(call(x))
    best = math.inf
    for _ in range(_CALLS):
        before = time.perf_counter()
        jax.block_until_ready(call(x))
        best = min(best, time.perf_counter() - before)
    values = (np.arange(count) + 1) % 8
    wanted = np.repeat(values, part) if kind == "all-gather" else values.sum()
    exact = all(np.all(np.asarray(y.data) == wanted) for y in found.addressable_shards)
    everywhere = gather([best, bool(exact)])
    seconds = max(row[0] for row in everywhere)
    total = 4 * part * count
    share = (count - 1) / count * (2 if kind == "all-reduce" else 1)
    return Rate(
        kind,
        total,
        seconds,
        total / seconds,
        share * total / seconds,
        all(row[1] for row in everywhere),
    )
