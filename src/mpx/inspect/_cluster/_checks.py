"""The checks of a conformance run. Each gives the same verdict on every process."""

import dataclasses
import math
import os
import platform
from collections import Counter
from typing import Any

import jax
import jaxlib
from jaxtyping import PyTree

from mpx._jax._version import __version__
from mpx.inspect._cluster._exchange import digests, gather, outliers
from mpx.inspect._cluster._training import STEPS, Training, half
from mpx.inspect._collectives import Collective, collectives
from mpx.inspect._result import amount

# What changes the programs or the numbers of a process. Where it dumps them does not.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a conformance run.

    Attributes:
        name: What was checked.
        passed: Whether all is well; `None` if it was not run.
        figures: What was found, or why it was not run, or what to do.
    """

    name: str
    passed: bool | None
    figures: str


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
        "XLA_FLAGS": " ".join(sorted(x for x in flags if "xla_dump" not in x)),
    }
    return found | {name: str(getattr(jax.config, name)) for name in _SETTINGS}


def check_devices() -> Check:
    """Checks that each process has as many devices as the others."""
    counts = Counter(device.process_index for device in jax.devices())
    processes = jax.process_count()
    held = [counts[number] for number in range(processes)]
    if len({*held}) == 1:
        text = f"{counted(processes, 'process', 'es')} with {counted(held[0], 'device')} each"
        return Check("devices", True, text)
    rows = ", ".join(f"process {i} has {held[i]}" for i in outliers(held))
    usual = Counter(held).most_common(1)[0][0]
    return Check(
        "devices", False, f"most processes have {counted(usual, 'device')}, but {rows}"
    )


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
    if different:
        return Check("versions and settings", False, "; ".join(different))
    text = f"{len(everywhere[0])} equal on {counted(len(everywhere), 'process', 'es')}"
    return Check("versions and settings", True, text)


def check_faults(training: Training) -> list[Check]:
    """Checks that faults on one device at a time are skipped by all, and by all alike."""
    devices, count = training.mesh.size, STEPS // 2
    faults = training.calm(STEPS)
    for fault in range(count):  # spread over all devices; every other step is healthy
        step = 2 * fault + fault // 2 % 2
        faults[step] = training.fault(step, fault * devices // count % devices)
    wanted = [int(x.step) >= 0 for x in faults]
    state, skipped = training.run(training.start(), 0, faults)
    return [
        judge_skips(f"skips, {training.layout}", wanted, gather(skipped)),
        judge_hashes(
            f"hash of the state, {training.layout}",
            gather(digests(state, training.mesh)),
        ),
    ]


def judge_skips(
    name: str, wanted: list[bool], everywhere: list[list[list[bool]]]
) -> Check:
    """Compares the decisions of all devices with each other and with the faults."""
    places = [(i, j) for i, row in enumerate(everywhere) for j in range(len(row))]
    rows = [everywhere[i][j] for i, j in places]
    divergent = sum(len({*step}) > 1 for step in zip(*rows, strict=True))
    wrong = [
        f"device {j} of process {i}: step {step} "
        + ("with a fault, not skipped" if bad else "skipped without a fault")
        for (i, j), row in zip(places, rows, strict=True)
        for step, (bad, skipped) in enumerate(zip(wanted, row, strict=True))
        if bad != skipped
    ]
    text = (
        f"{len(wanted)} steps, {sum(wanted)} faults on one device each: "
        f"{sum(rows[0])} skipped, {divergent} divergent decisions"
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
        return Check(name, True, f"{values[0]} on {counted(len(values), 'device')}")
    usual = next(x for i, x in enumerate(values) if i not in odd)
    rows = ", ".join(
        f"{values[i]} on device {places[i][1]} of process {places[i][0]}"
        for i in odd[:3]
    )
    text = f"{usual} on {len(values) - len(odd)} of {len(values)} devices, but {rows}"
    return Check(name, False, text + (" …" if len(odd) > 3 else ""))


def check_wire(training: Training, **options: Any) -> Check:
    """Checks the dtypes that one FSDP step sends.

    Args:
        training: The training run.
        **options: The options of the compiler.
    """
    sizes = {math.prod(x.shape) for x in matrices(training.template()["params"])}
    found = collectives(training.compile_step(**options))
    return judge_wire(gather([_plain(x) for x in found]), sizes, training.mesh.size)


def judge_wire(everywhere: list[Any], sizes: set[int], devices: int) -> Check:
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


def matrices(params: PyTree) -> list[Any]:
    """Returns the weights that FSDP cuts."""
    return [x for x in jax.tree.leaves(params) if len(x.shape) >= 2]


def _plain(found: Collective) -> list[Any]:
    return [list(x) if isinstance(x, tuple) else x for x in found]


def counted(number: int, word: str, plural: str = "s") -> str:
    """Returns a number with its noun."""
    return f"{number} {word}{'' if number == 1 else plural}"
