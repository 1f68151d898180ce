"""The command line: `python -m mpx doctor`."""

import argparse
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what the machine or cluster offers; returns 1 if a check failed."""
    arguments = _parser().parse_args(argv)
    import jax

    from mpx._jax._processes import check_processes
    from mpx.inspect._doctor import conformance, doctor

    if arguments.cluster:
        if arguments.processes > 1 and not jax.distributed.is_initialized():
            # Slurm and others describe the job, so that no arguments are needed.
            place = arguments.coordinator, arguments.processes, arguments.process_id
            jax.distributed.initialize(*(place if arguments.coordinator else ()))
        check_processes(arguments.processes)
    found = (conformance if arguments.cluster else doctor)()
    is_first = jax.process_index() == 0  # pyright: ignore[reportUnknownMemberType]
    if is_first or not arguments.cluster:
        print(found.to_json(indent=2) if arguments.json else found)
    return int(not found.passed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpx", description="Mixed-precision training for JAX."
    )
    env, add = os.environ, parser.add_argument  # as in examples/cluster/train.py
    size = env.get("JAX_NUM_PROCESSES") or env.get("SLURM_NTASKS") or 1
    rank, host = env.get("JAX_PROCESS_ID"), env.get("JAX_COORDINATOR_ADDRESS")
    add("command", choices=["doctor"], help="what is here, and which precision to use")
    add("--json", action="store_true", help="print JSON")
    add("--cluster", action="store_true", help="check a job; each process runs this")
    add("--coordinator", default=host, metavar="HOST:PORT", help="of process 0")
    add("--processes", type=int, default=size, metavar="N", help="that should run")
    add("--process-id", type=int, default=rank, metavar="I", help="of this process")
    return parser


if __name__ == "__main__":
    sys.exit(main())
