"""Whether the processes of a job found each other."""

import jax

from mpx._arguments import as_count


def check_processes(expected: int) -> None:
    """Checks that JAX runs in as many processes as the job was given.

    Processes that did not join each other each train a model of their own: every log
    looks healthy, and all of them write to the same checkpoints. Call it before the first
    step, with the number that was asked for: the argument of your launcher, Slurm's
    `SLURM_NTASKS`, Ray's `get_world_size()`. It starts the JAX backend, so it must come
    after `jax.distributed.initialize`.

    Args:
        expected: The number of processes of the job.

    Raises:
        RuntimeError: If JAX runs in another number of processes.

    Examples:
        >>> check_processes(1)
    """
    expected = as_count(expected, "expected", at_least=1)
    found = jax.process_count()
    if found == expected:
        return
    if found == 1 and not jax.distributed.is_initialized():
        why = (
            "`jax.distributed.initialize` was not called, so each process would train "
            "alone. Call it before anything else uses JAX. Slurm and Open MPI need no "
            "arguments; elsewhere pass `coordinator_address`, `num_processes` and "
            "`process_id`. Ray's JaxTrainer calls it for GPUs and TPUs only, not for CPUs."
        )
    else:
        why = (
            "The launcher and `jax.distributed.initialize` were given different numbers: "
            "compare `num_processes` with what the job asks for, and start the script "
            "once per process (under Slurm with `srun`)."
        )
    raise RuntimeError(
        f"Expected {_count(expected, 'process', 'processes')}, but JAX runs in "
        f"{_count(found, 'process', 'processes')} with "
        f"{_count(jax.device_count(), 'device', 'devices')}. {why}"
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
