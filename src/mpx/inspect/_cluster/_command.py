"""`python -m mpx doctor`, on one machine and, with `--cluster`, on all hosts of a job."""

import argparse
import dataclasses
import os
from collections.abc import Sequence

import jax

from mpx._jax._processes import check_processes
from mpx.inspect import _doctor
from mpx.inspect._cluster import _bandwidth
from mpx.inspect._cluster._checks import (
    Check,
    check_devices,
    check_faults,
    check_versions,
    check_wire,
    counted,
    describe,
)
from mpx.inspect._cluster._exchange import gather
from mpx.inspect._cluster._restart import RESTARTED, Restart
from mpx.inspect._cluster._training import Training, make_mesh
from mpx.inspect._result import Result, Table, amount


@dataclasses.dataclass(frozen=True)
class Conformance(Result):
    """What a conformance run found, the same on every process.

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
    rates: tuple[_bandwidth.Rate, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def tables(self) -> Sequence[Table]:
        """Returns versions, checks and the speed of collectives."""
        names = ("mpx", "jax", "jaxlib", "Python")
        text = ", ".join(f"{name} {self.versions[name]}" for name in names)
        text += f"; {counted(self.processes, 'process', 'es')}, "
        text += f"{counted(self.devices, 'device')}: {self.versions['devices']}"
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


def conformance(
    *, directory: str | None = None, kill: int | None = None, measure: bool = True
) -> tuple[Conformance, Restart | None]:
    """Runs all checks; every process of the job must call it.

    Args:
        directory: A folder that all processes see, for checkpoints.
        kill: The process that is to be killed, if this is the first start.
        measure: Whether to time the collectives.

    Returns:
        What was found; and what is to be killed, `None` if nothing is.
    """
    versions = describe()
    checks, rates = [check_devices()], ()
    restart = None
    if checks[0].passed:
        checks.append(check_versions(gather(versions)))
    # Processes of different versions may run different programs, and then they hang.
    if all(check.passed for check in checks):
        mesh = make_mesh()
        sharded = Training(mesh, "sharded")
        checks += check_faults(sharded)
        checks += check_faults(Training(mesh, "copies"))
        checks.append(check_wire(sharded))
        restart = Restart(sharded, directory)
        checks += restart.check()
        if measure and mesh.size > 1:
            rates = _bandwidth.measure(mesh)
            wrong = sorted({x.kind for x in rates if not x.exact})
            text = f"wrong: {', '.join(wrong)}" if wrong else f"{len(rates)} exact"
            checks.append(Check("results of collectives", not wrong, text))
    else:
        checks.append(Check("all others", None, "not run: see above"))
    is_fine = all(check.passed is not False for check in checks)
    if restart is not None and kill is not None and restart.can_kill and is_fine:
        text = f"process {kill} is killed now: start the job again, as it was"
        checks = [
            Check(RESTARTED, None, text) if x.name == RESTARTED else x for x in checks
        ]
    elif restart is not None:
        restart.end(keep=not is_fine)
        restart = None
    found = Conformance(
        jax.process_count(), jax.device_count(), versions, tuple(checks), rates
    )
    return found, restart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    _doctor.add_arguments(parser)
    env = os.environ  # as in examples/cluster/train.py
    size = env.get("JAX_NUM_PROCESSES") or env.get("SLURM_NTASKS") or 1
    rank, host = env.get("JAX_PROCESS_ID"), env.get("JAX_COORDINATOR_ADDRESS")
    group = parser.add_argument_group(
        "on a cluster", "Start the same command in every process of a job."
    )
    add = group.add_argument
    add("--cluster", action="store_true", help="check all processes of a job")
    add("--coordinator", default=host, metavar="HOST:PORT", help="of process 0")
    add("--processes", type=int, default=size, metavar="N", help="that should run")
    add("--process-id", type=int, default=rank, metavar="I", help="of this process")
    add("--directory", help="a folder that all processes see, for checkpoints")
    add(
        "--kill",
        type=int,
        metavar="N",
        help="kill this process after a checkpoint; the next start resumes and compares",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found; the exit status is 1 if there is a problem."""
    if not arguments.cluster:
        return _doctor.run(arguments)
    join(arguments)
    kill, directory = arguments.kill, arguments.directory
    if kill is not None and not 0 <= kill < jax.process_count():
        raise SystemExit(
            f"--kill {kill}: there are the processes 0 to {jax.process_count() - 1}."
        )
    if kill is not None and directory is None:
        raise SystemExit(
            "--kill needs --directory, a folder that all processes see: the next start "
            "finds the checkpoint there."
        )
    found, restart = conformance(
        directory=directory, kill=kill, measure=not arguments.no_measure
    )
    if jax.process_index() == 0:
        if arguments.json:
            print(found.to_json(indent=2), flush=True)
        else:
            found.show()
    if restart is not None and kill is not None:
        gather(None)  # process 0 has printed
        restart.kill(kill)
    return int(not found.passed)


def join(arguments: argparse.Namespace) -> None:
    """Joins the other processes, unless the launcher has done it, and counts them."""
    if arguments.processes > 1 and not jax.distributed.is_initialized():
        if arguments.coordinator:
            jax.distributed.initialize(
                arguments.coordinator, arguments.processes, arguments.process_id
            )
        else:
            jax.distributed.initialize()  # Slurm and others describe the job
    check_processes(arguments.processes)
