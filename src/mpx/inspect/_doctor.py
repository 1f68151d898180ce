"""`doctor`: what this machine offers, and whether the processes of a job agree."""

import dataclasses
import functools
import math
import os
import platform
import re
import timeit
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
from mpx._jax._compat import __version__
from mpx._jax._devices import cuda_capability
from mpx._jax._processes import gather
from mpx._scaling._loss_scaling import DynamicLossScaling
from mpx.inspect._collectives import Collective, collectives
from mpx.inspect._result import Result, Table, amount

# The compute capability since which matmuls run in a format.
CUDA_SINCE = dict(
    f16=(7, 0), int8=(7, 5), bf16=(8, 0), tf32=(8, 0), fp8=(8, 9), mx=(10, 0)
)
# JAX calls the seventh generation "TPU7x".
TPU_FP8 = re.compile(r"(?:v|tpu)([7-9]|\d\d)|ironwood", re.IGNORECASE)


class Check(NamedTuple):
    """One check; `passed` is `None` if it was not run, and `figures` says why."""

    name: str
    passed: bool | None
    figures: str


@dataclasses.dataclass(frozen=True)
class Diagnosis(Result):
    """What a machine or a cluster offers; made by `doctor`.

    Attributes:
        versions: The versions of mpx, jax, jaxlib, Python, and the processor.
        processes: The number of processes of the job.
        platform: The default backend: "cpu", "gpu", "tpu".
        devices: How many devices of each kind there are, on all hosts.
        memory: The bytes of memory of a device; `None` if JAX does not tell.
        bandwidth: The bytes a second that a device reads and writes, measured.
        formats: The formats in which matmuls run natively; `None` if that is not known.
        policy: The recommended precision, as code.
        reason: Why.
        checks: Whether processes agree, by `python -m mpx doctor --cluster`.
        links: The bytes a second that each device sends in an all-reduce over all of them,
            as in a ring, measured by the same; `None` if there is one device.
    """

    versions: Mapping[str, str]
    processes: int
    platform: str
    devices: Mapping[str, int]
    memory: int | None
    bandwidth: float
    formats: tuple[str, ...] | None
    policy: str
    reason: str
    checks: tuple[Check, ...] = ()
    links: float | None = None

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(x.passed is not False for x in self.checks)

    def tables(self) -> Sequence[Table]:
        """Returns versions, devices, the recommendation and checks."""
        text = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        for kind, count in self.devices.items():
            text += f"\n{count} × {kind} ({self.platform})"
            text += f" with {amount(self.memory, 'B')}" if self.memory else ""
        text += f"\nMemory: {amount(self.bandwidth, 'B/s')} (measured)."
        if self.links is not None:
            text += f"\nLinks: {amount(self.links, 'B/s')} (measured, an all-reduce)."
        if self.formats is not None:
            text += f"\nNative matmuls: {', '.join(self.formats)}."
        found = [Table.text(text)]
        found.append(Table.text(f"{self.policy}\n{self.reason}", "Recommended"))
        if self.checks:
            words = {True: "pass", False: "FAIL", None: "–"}
            rows = [(x.name, words[x.passed], x.figures) for x in self.checks]
            title = f"Processes: {self.processes}"
            found.append(Table(("check", "result", ""), rows, title))
            text = "No check failed." if self.passed else "A check FAILED."
            found.append(Table.text(text))
        return found


def doctor() -> Diagnosis:
    """Returns what this machine offers for mixed precision, and what to use on it.

    Examples:
        >>> doctor().versions["jax"] == jax.__version__
        True
    """
    policy, reason = recommend(found := formats())
    x = jnp.zeros(_numbers(), jnp.float32)
    return Diagnosis(
        versions=versions() | {"on": platform.machine()},
        processes=jax.process_count(),
        platform=jax.default_backend(),
        devices=dict(Counter(device.device_kind for device in jax.devices())),
        # Only a device of this process tells.
        memory=(jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        bandwidth=2 * x.nbytes / _fastest(jax.jit(lambda x: x + 1), x),
        formats=found,
        policy=policy,
        reason=reason,
    )


def formats() -> tuple[str, ...] | None:
    """Returns the formats in which matmuls run natively; `None` if that is not known."""
    backend, capability = jax.default_backend(), cuda_capability()
    if capability is not None:
        return ("f32", *(x for x, since in CUDA_SINCE.items() if capability >= since))
    if backend == "tpu":
        has_fp8 = TPU_FP8.search(jax.devices()[0].device_kind)
        return ("bf16", "fp8") if has_fp8 else ("bf16",)
    return ("f32",) if backend == "cpu" else None


def recommend(native: Sequence[str] | None) -> tuple[str, str]:
    """Returns the precision to use, as code, and why."""
    if native is None:
        reason = "Measure bf16 first: mpx does not know this device."
        return "loss = mpx.amp(loss)", reason
    if "bf16" in native:
        reason = "bf16 runs natively and has the range of f32: no loss scaling."
        if "fp8" in native:
            reason += " Large matmuls can run in fp8 as well: compare `mpx.fp8(loss)`."
        elif "int8" in native:
            reason += ' Large matmuls can run in int8: compare `mpx.fp8(loss, "int8")`.'
        return "loss = mpx.amp(loss)", reason
    if "f16" in native:
        code = 'loss = mpx.amp(loss, "f16"); scaling = mpx.DynamicLossScaling.pow2()'
        return code, "Only f16 runs natively, and it needs loss scaling."
    reason = "Only f32 is native: half precision saves memory, and rarely time."
    return "loss = loss  # f32", f"{reason} Use bf16 to test for an accelerator."


def versions() -> dict[str, str]:
    """Returns the versions of mpx, JAX and Python."""
    found = {"mpx": __version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return found | {"Python": platform.python_version()}


def _fastest(call: Callable[[Array], Array], x: Array) -> float:
    """Returns the seconds of the fastest of ten calls, after one that compiles."""
    # As many on every process: a collective waits for all of them.
    run = lambda: jax.block_until_ready(call(x))  # noqa: E731
    return min(timeit.repeat(run, number=1, repeat=11)[1:])


def _numbers() -> int:
    return 2**21 if jax.default_backend() == "cpu" else 2**26


def _link_bandwidth(mesh: Mesh) -> float | None:
    count, place = mesh.size, NamedSharding(mesh, P("data"))
    if count == 1:
        return None
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    make = jax.jit(jnp.ones, static_argnums=0, out_shardings=place)
    x = make((count, _numbers()))
    seconds = max(gather(_fastest(total, x)))  # of the slowest process
    return 2 * (count - 1) / count * (x.nbytes / count) / seconds


# --- A cluster: each check gives the same verdict on every process --------------------

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

T = TypeVar("T")
Options = dict[str, str | bool] | None


def conformance() -> Diagnosis:
    """Runs all checks; every process of the job must call it."""
    checks, links = [check_devices()], None
    if checks[0].passed:
        checks.append(check_versions(gather(describe())))
    # Processes of different versions may run different programs, and then they hang.
    if all(check.passed for check in checks):
        trial = Trial(make_mesh())
        checks += [check_decisions(trial), check_wire(trial)]
        links = _link_bandwidth(trial.mesh)
    else:
        checks.append(Check("all others", None, "not run: see above"))
    return dataclasses.replace(doctor(), checks=tuple(checks), links=links)


def judge(name: str, rows: Sequence[tuple[str, T]], usual: T | None = None) -> Check:
    """Compares values, each with its place, with the usual one or the most common one."""
    if usual is None:
        usual = Counter(value for _, value in rows).most_common(1)[0][0]
    odd = [f"{value} on {place}" for place, value in rows if value != usual]
    text = f"{usual} on {len(rows) - len(odd)} of {len(rows)}"
    if odd:
        text += f", but {', '.join(odd[:3])}{', …' if odd[3:] else ''}"
    return Check(name, not odd, text)


def _by_process(values: Sequence[T]) -> list[tuple[str, T]]:
    return [(f"process {i}", value) for i, value in enumerate(values)]


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
    held = [f"devices: {counts[i]}" for i in range(jax.process_count())]
    return judge("devices", _by_process(held))


def check_versions(everywhere: list[dict[str, str]]) -> Check:
    """Checks that versions and settings agree."""
    keys, count = everywhere[0], len(everywhere)
    rows = ([f"{key} {x.get(key)}" for x in everywhere] for key in keys)
    checks = [judge("", _by_process(row)) for row in rows]
    different = [check.figures for check in checks if not check.passed]
    text = "; ".join(different) or f"{len(keys)} equal on {count} of {count}"
    return Check("versions and settings", not different, text)


# --- A few training steps -------------------------------------------------------------


def make_mesh() -> Mesh:
    """Returns the mesh of all devices of all processes."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def half() -> str:
    """Returns the compute dtype: CPUs widen bf16 collectives, so they take f16."""
    return "f16" if jax.default_backend() == "cpu" else "bf16"


class Trial:
    """A few steps of a small model under `jit`, with FSDP and dynamic loss scaling.

    The rows of each matrix and of the batch are cut over all devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.width = mesh, mesh.size * -(-64 // mesh.size)
        self._cut, everywhere = (NamedSharding(mesh, x) for x in (P("data"), P()))
        where = {"params": self._cut, "scaling": everywhere}
        self._start = jax.jit(self._init, out_shardings=where)
        self._jitted = jax.jit(self._step, out_shardings=(where, everywhere))

    def run(self, devices: Sequence[int]) -> list[list[bool]]:
        """Returns for each local device which steps it skipped.

        There is one step for each number: the device with a NaN in its batch; -1 for none.
        """
        state, found = self._start(), list[list[bool]]()
        for number, device in enumerate(devices):
            state, finite = self._jitted(state, np.int32(number), np.int32(device))
            shards = sorted(finite.addressable_shards, key=lambda x: x.device.id)
            found.append([not np.asarray(shard.data) for shard in shards])
        return [list(row) for row in zip(*found, strict=True)]

    def collectives(self, options: Options = None) -> Sequence[Collective]:
        """Returns the collectives of one step, compiled with some options."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        state = jax.eval_shape(self._start)  # with its shardings
        return collectives(self._jitted.lower(state, number, number).compile(options))

    def _init(self) -> PyTree:
        width, (up, down) = self.width, jax.random.split(jax.random.key(0))
        params = {
            "up": jax.random.normal(up, (width, 4 * width)) * width**-0.5,
            "down": jax.random.normal(down, (4 * width, width)) * 0.5 * width**-0.5,
        }
        return {"params": params, "scaling": DynamicLossScaling.pow2(2.0**10)}

    def _step(
        self, state: PyTree, number: Array, device: Array
    ) -> tuple[PyTree, Array]:
        along = functools.partial(lax.with_sharding_constraint, shardings=self._cut)

        def loss(params: dict[str, Array], x: Array) -> Array:
            hidden = jax.nn.relu(along(x @ params["up"]))
            out = along(hidden @ params["down"])
            return jnp.mean(cast_to_float32(out - x) ** 2)

        size, params = self.mesh.size, state["params"]
        key = jax.random.fold_in(jax.random.key(1), number)
        x = jax.random.normal(key, (_ROWS * size, self.width))
        is_bad = jnp.repeat(np.arange(size) == device, _ROWS)
        x = along(jnp.where(is_bad[:, None], jnp.nan, x))
        result = value_and_grad(amp(loss, half()))(state["scaling"], params, x)
        params = jax.tree.map(
            lambda p, g: jnp.where(result.finite, p - 0.1 * g, p), params, result.grads
        )
        return {"params": params, "scaling": result.scaling}, result.finite


def check_decisions(trial: Trial) -> Check:
    """Checks that all devices skip the steps with a NaN on one of them, and no others."""
    size, count = trial.mesh.size, _STEPS // 2
    devices = [-1] * _STEPS
    for fault in range(count):  # spread over all devices; every other step is healthy
        devices[2 * fault + fault // 2 % 2] = fault * size // count % size

    def told(skipped: Sequence[bool]) -> str:
        return "skipped " + " ".join(str(i) for i, bad in enumerate(skipped) if bad)

    rows = [
        (f"device {j} of process {i}", told(skipped))
        for i, process in enumerate(gather(trial.run(devices)))
        for j, skipped in enumerate(process)
    ]
    return judge("skips", rows, told([device >= 0 for device in devices]))


def check_wire(trial: Trial, options: Options = None) -> Check:
    """Compares the dtypes of weights and gradients with what was asked for."""
    name, devices = "wire of an FSDP step", trial.mesh.size
    if devices == 1:
        return Check(name, None, "not run: there is one device")
    size = 4 * trial.width**2
    sizes = {"all-gather": size, "all-reduce": size, "reduce-scatter": size // devices}
    weights, sums = list[Collective](), list[Collective]()
    for x in trial.collectives(options):
        if math.prod(x.shape) == sizes.get(x.kind):
            (weights if x.kind == "all-gather" else sums).append(x)

    def told(chosen: Sequence[Collective]) -> str:
        dtypes = ", ".join(sorted({x.dtype for x in chosen})) or "no collective"
        return f"{dtypes} ({amount(sum(x.bytes for x in chosen), 'B')})"

    text = f"weights gathered in {told(weights)}, gradients reduced in {told(sums)}"
    here = judge(name, _by_process(gather(text)))
    dtypes = {x.dtype for x in weights}, {x.dtype for x in sums}
    right = dtypes == ({half()}, {"f32"})
    wanted = "" if right else f"; asked for {half()} and f32"
    return Check(name, here.passed and right, here.figures + wanted)
