"""Trains in 2 and 4 processes with faults on one of them.

    python benchmarks/processes.py                 # 10,000 steps in all
    python benchmarks/processes.py --steps 600 --only f16

`jax.distributed` joins the processes, each with one CPU device. Every fifth step or so has a
fault in the shard or the copy of one process, drawn as in faults.py. After each chunk of
steps, which is one program, each process writes down what it saw: which steps were skipped,
the loss scale after each step, and a hash of all bits of parameters, optimizer state and
scaling, gathered from the others where they are sharded. The driver compares these records.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import socket
import sys
import tempfile
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAG = "--xla_force_host_platform_device_count=1"
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import _measure as measure  # noqa: E402
import faults as model  # noqa: E402
import mpx  # noqa: E402
from mpx.testing import Fault  # noqa: E402

CHUNK = 100  # steps in one program
SHARE = 0.2  # of the steps have a fault
CONFIGS = ("flash_adamw, sharded, f16", "flash_adamw, copies, bf16")
SPAWN = multiprocessing.get_context("spawn")


def library(config):
    """Returns the way to train that has this name."""
    layout = "jit" if "sharded" in config else "shard_map"
    half = jnp.float16 if config.endswith(" f16") else jnp.bfloat16
    flash = mpx.optim.flash_adamw(model.RATE, compression=model.SMALL)
    return model.ours(config, flash, layout=layout, dtype=jnp.bfloat16, compute=half)


# --- the worker -----------------------------------------------------------------------


def make_job(config, seed):
    """Returns a function that makes the first state, and one that runs a chunk of steps."""
    chosen = library(config)
    things, mesh = model.targets(chosen.layout), model.shardings("jit")["x"].mesh
    everywhere, along = (NamedSharding(mesh, x) for x in (P(), P("data")))

    def init():
        return jax.tree.map(jnp.asarray, chosen.init(model.make_params()))

    def place(leaf):
        has_rows = leaf.ndim >= 2 and leaf.shape[-2] % mesh.size == 0
        is_cut = chosen.layout == "jit" and has_rows
        spec = P(*[None] * (leaf.ndim - 2), "data") if is_cut else P()
        return NamedSharding(mesh, spec)

    where = jax.tree.map(place, jax.eval_shape(init))
    gather = jax.jit(lambda x: x, out_shardings=everywhere)

    @functools.partial(jax.jit, out_shardings=(where, everywhere))
    def steps(training, numbers, faults):
        def body(old, inputs):
            number, fault = inputs
            x, y = lax.with_sharding_constraint(model.make_batch(number), along)
            new, grads, scale, loss = chosen.step(old, x, y, fault, number)
            new = jax.tree.map(
                lambda a, b: jnp.asarray(a).astype(b.dtype), new, training
            )
            finite = [jnp.isfinite(x).all() for x in jax.tree.leaves((grads, loss))]
            seen = {
                "skipped": new.rest.skipped - old.rest.skipped,
                "finite": jnp.stack(finite).all(),
                "same": same_bits(old[:2], new[:2]),
                "scale": scale,
            }
            return new, seen

        return lax.scan(body, training, (numbers, faults))

    def run(training, chunk):
        """Returns the state after a chunk, and what this process saw."""
        draw = np.random.default_rng([seed, chunk])
        numbers = [chunk * CHUNK + i for i in range(CHUNK)]
        drawn = [
            model.draw_fault(draw, things, number)
            if draw.random() < SHARE
            else Fault(things, step=-1)
            for number in numbers
        ]
        faults = jax.tree.map(lambda *x: np.stack(jax.device_get(x)), *drawn)
        training, seen = steps(training, np.array(numbers, np.int32), faults)
        mine = lambda x: np.asarray(x.addressable_data(0))  # noqa: E731
        record = {name: mine(x).tolist() for name, x in seen.items()}
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(gather(training)):
            digest.update(mine(leaf).tobytes())
        record |= {"faults": int(np.sum(faults.step >= 0)), "chunk": chunk}
        return training, record | {"hash": digest.hexdigest()[:16]}

    return jax.jit(init, out_shardings=where), run


def same_bits(a, b):
    def same(x, y):
        word = np.dtype(f"u{x.dtype.itemsize}")
        x, y = (lax.bitcast_convert_type(z, word) for z in (x, y))
        return (x == y).all()

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))).all()


def work(folder, config, chunks, seed):
    """Trains, and records every chunk."""
    start, run = make_job(config, seed)
    training = start()
    with pathlib.Path(folder, f"process-{jax.process_index()}.jsonl").open("w") as file:
        for chunk in range(chunks):
            training, record = run(training, chunk)
            file.write(json.dumps(record) + "\n")


def join(place, runs):
    """Joins a job and does the work of its runs, one after the other."""
    jax.distributed.initialize(*place)
    mpx.check_processes(place[1])
    # Gloo gives up if a process comes 30 s late to the first collective, and only process
    # 0 finds its programs in the cache: connect before they are compiled.
    multihost_utils.sync_global_devices("start")
    for run in runs:
        work(*run)


# --- the driver -----------------------------------------------------------------------


class Found(NamedTuple):
    """What the records of a run say."""

    steps: int = 0  # that all processes recorded
    faults: int = 0
    skipped: int = 0
    divergent: int = 0  # steps on which processes disagree: skipped, or the scale
    # Steps skipped with finite gradients and loss, or the reverse; or skipped steps that
    # changed a bit of parameters or optimizer, or the reverse.
    wrong: int = 0
    hashes: int = 0  # compared between the processes
    different: int = 0


def run_job(count, *runs):
    """Runs the processes of a job, each with the arguments of `work` for each run."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    workers = [
        SPAWN.Process(target=join, args=((f"localhost:{port}", count, number), runs))
        for number in range(count)
    ]
    for worker in workers:
        worker.start()
    try:
        while any(x.is_alive() for x in workers):
            if any(x.exitcode for x in workers):
                raise RuntimeError("A process failed.")
            time.sleep(0.02)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def compare(folder, count):
    """Compares what the processes saw, chunk by chunk."""
    files = [(folder / f"process-{i}.jsonl").read_text() for i in range(count)]
    runs = [[json.loads(line) for line in file.splitlines()] for file in files]
    found = Found()
    for rows in zip(*runs, strict=True):
        decisions = [list(zip(x["skipped"], x["scale"], strict=True)) for x in rows]
        kinds = ("skipped", "finite", "same")
        seen = [step for x in rows for step in zip(*(x[k] for k in kinds), strict=True)]
        hashes = [x["hash"] for x in rows]
        new = (
            len(decisions[0]),
            rows[0]["faults"],
            sum(rows[0]["skipped"]),
            sum(len({*step}) > 1 for step in zip(*decisions, strict=True)),
            sum(not bool(skip) == (not finite) == same for skip, finite, same in seen),
            len(hashes),
            sum(x != hashes[0] for x in hashes),
        )
        found = Found(*map(sum, zip(found, new, strict=True)))
    return found


def check(count, configs, chunks, seed, folder):
    """Runs all configurations; returns whether nothing is wrong."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    pairs = [(folder / str(i), x) for i, x in enumerate(configs)]
    for path, _ in pairs:
        path.mkdir()
    run_job(count, *((str(path), x, chunks, seed) for path, x in pairs))
    fine = True
    for path, config in pairs:
        found = compare(path, count)
        hashes = f"{found.different} of {found.hashes}"
        measure.print_row(
            count, config, *found[:3], found.wrong, found.divergent, hashes
        )
        fine &= not (found.wrong or found.divergent or found.different)
        fine &= found.steps == chunks * CHUNK and found.skipped > 0
    return fine


def main():
    options = measure.read_options(__doc__, "steps=10000 processes=2,4 only= seed=0")
    configs = [x for x in CONFIGS if options.only in x]
    share = CHUNK * len(configs) * len(options.processes)
    chunks = max(-(-options.steps // share), 4)
    print(f"jax {jax.__version__}; seed {options.seed}; chunks of {CHUNK} steps\n")
    measure.print_head(
        "processes", "", "steps", "faults", "skipped", "wrong", "divergent decisions",
        "different hashes",
    )  # fmt: skip
    began, fine = time.perf_counter(), True
    for count in options.processes:
        with tempfile.TemporaryDirectory() as name:
            fine &= check(count, configs, chunks, options.seed, pathlib.Path(name))
    return measure.print_end(fine, began, f"{chunks * share} steps")


if __name__ == "__main__":
    sys.exit(main())
