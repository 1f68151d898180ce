"""`python -m mpx doctor --cluster`: whether the processes and devices of a job agree.

Each check gives the same verdict on every process.
"""

import dataclasses
import functools
import hashlib
import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from mpx._amp import amp
from mpx._casting._cast import cast_to_float32
from mpx._gradients._grad import value_and_grad
from mpx._jax._processes import gather
from mpx._scaling._dynamic_scaling import DynamicLossScaling
from mpx.inspect._collectives import Collective, collectives
from mpx.inspect._doctor import versions
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

T = TypeVar("T")


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
        bytes: The size of the whole array.
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
    described = describe()
    checks, rates = [check_devices()], ()
    if checks[0].passed:
        checks.append(check_versions(gather(described)))
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
        jax.process_count(), jax.device_count(), described, tuple(checks), rates
    )


def _counted(number: int, word: str, plural: str = "s") -> str:
    return f"{number} {word}{'' if number == 1 else plural}"


# --- Versions and devices -------------------------------------------------------------


def describe() -> dict[str, str]:
    """Returns what must be the same on all processes of a job."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    found = versions() | {
        "devices": ", ".join(kinds),
        # Where a process dumps its programs changes none of them.
        "XLA_FLAGS": " ".join(sorted(x for x in flags if "xla_dump" not in x)),
    }
    return found | {name: str(getattr(jax.config, name)) for name in _SETTINGS}


def check_devices() -> Check:
    """Checks that each process has as many devices as the others."""
    counts = Counter(device.process_index for device in jax.devices())
    held = [counts[number] for number in range(jax.process_count())]
    usual = Counter(held).most_common(1)[0][0]
    odd = [f"process {i} has {n}" for i, n in enumerate(held) if n != usual]
    every, each = _counted(len(held), "process", "es"), _counted(usual, "device")
    text = f"{every} with {each} each"
    if odd:
        text = f"most processes have {each}, but {', '.join(odd)}"
    return Check("devices", not odd, text)


def check_versions(everywhere: list[dict[str, str]]) -> Check:
    """Checks that versions and settings agree."""
    different = []
    for name in everywhere[0]:
        values = [row.get(name, "") for row in everywhere]
        usual = Counter(values).most_common(1)[0][0]
        odd = [f"{x!r} on process {i}" for i, x in enumerate(values) if x != usual]
        if odd:
            different.append(f"{name}: {usual!r}, but {', '.join(_first(odd))}")
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
        self.width = mesh.size * -(-64 // mesh.size)
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

    def _init(self) -> PyTree:
        width = self.width
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

        x = jax.random.normal(key, (rows, self.width))
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


def _by_device(everywhere: list[list[T]]) -> list[tuple[str, T]]:
    """Returns the values of all devices of all processes, each with its place."""
    return [
        (f"device {j} of process {i}", value)
        for i, process in enumerate(everywhere)
        for j, value in enumerate(process)
    ]


def judge_skips(
    name: str, wanted: list[bool], everywhere: list[list[list[bool]]]
) -> Check:
    """Compares the decisions of all devices with each other and with the faults."""
    rows = _by_device(everywhere)
    steps = zip(*(row for _, row in rows), strict=True)
    divergent = sum(len({*step}) > 1 for step in steps)
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
    return Check(name, not wrong, "; ".join([text, *_first(wrong)]))


def judge_hashes(name: str, everywhere: list[list[str]]) -> Check:
    """Compares the hashes of all devices of all processes."""
    rows = _by_device(everywhere)
    usual, count = Counter(value for _, value in rows).most_common(1)[0]
    odd = [f"{value} on {place}" for place, value in rows if value != usual]
    text = f"{usual} on {_counted(count, 'device')}"
    if odd:
        text = f"{usual} on {count} of {len(rows)} devices, but "
    return Check(name, not odd, text + ", ".join(_first(odd)))


def _first(texts: list[str]) -> list[str]:
    return [*texts[:3], "…"] if len(texts) > 3 else texts


# --- The wire -------------------------------------------------------------------------


def check_wire(trial: Trial, options: dict[str, str | bool] | None = None) -> Check:
    """Checks the dtypes that one FSDP step sends."""
    found = collectives(trial.compile_step(options))
    rows = [[list(x) if isinstance(x, tuple) else x for x in row] for row in found]
    return judge_wire(gather(rows), 4 * trial.width**2, trial.mesh.size)


def judge_wire(everywhere: list[list[list]], size: int, devices: int) -> Check:
    """Compares the dtypes of weights and gradients with what was asked for.

    `everywhere` has the collectives of each process, `size` is that of each weight.
    """
    name = "wire of an FSDP step"
    if devices == 1:
        return Check(name, None, "not run: there is one device")
    odd = [i for i, row in enumerate(everywhere) if row != everywhere[0]]
    if odd:
        text = f"the programs of the processes {odd} have other collectives"
        return Check(name, False, text)
    found = [Collective(*row) for row in everywhere[0]]
    results = {
        "all-gather": size,
        "all-reduce": size,
        "reduce-scatter": size // devices,
    }
    heavy = [x for x in found if math.prod(x.shape) == results.get(x.kind)]
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

# For each kind the function, and whether it reads and returns a part of the array.
_KINDS: dict[str, tuple[Callable[[Array], Array], bool, bool]] = {
    "all-reduce": (lambda x: lax.psum(x, "data"), False, False),
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), True, False),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), False, True),
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
