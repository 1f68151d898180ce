"""Whether the processes of a job found each other, and what they tell each other."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mpx._jax._arguments import as_count
from mpx._jax._private import private

_BLOCK = 1024


def check_processes(expected: int) -> None:
    """Checks that JAX runs in as many processes as the job was given.

    Processes that did not join each other each train a model of their own, and every log
    looks healthy. Call it after `jax.distributed.initialize` and before the first step.

    Args:
        expected: The number of processes that the job asked for: the argument of your
            launcher, Slurm's `SLURM_NTASKS`, Ray's `get_world_size()`.

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
        f"Expected {expected} process{'es' * (expected != 1)}, but JAX runs in {found} "
        f"process{'es' * (found != 1)} with {(count := jax.device_count())} "
        f"device{'s' * (count != 1)}. {why}"
    )


def gather(value: Any) -> list[Any]:
    """Returns the values of all processes, in their order, on every process."""
    if jax.process_count() == 1:
        return [value]
    names = private("exchange")
    if names is None:
        raise NotImplementedError("The processes cannot be compared: see the warning.")
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = names.process_allgather(np.int32(data.size)).ravel()
    # Rounded up, so that few programs are compiled.
    padded = np.zeros(-(-int(sizes.max()) // _BLOCK) * _BLOCK, np.uint8)
    padded[: data.size] = data
    rows = names.process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def gather_results(call: Callable[[], Any]) -> list[Any]:
    """Returns what a call returns on each process, or raises on all: none waits alone."""
    value, error = None, None
    try:
        value = call()
    except Exception as caught:
        error = caught
    found = gather([value, error and f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for process, (_, text) in enumerate(found):
        if text is not None:
            raise RuntimeError(f"Process {process} failed, so all of them stop: {text}")
    return [value for value, _ in found]
