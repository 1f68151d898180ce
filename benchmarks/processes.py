"""Trains in 2 and 4 processes with faults on one of them, and kills one.

    python benchmarks/processes.py                 # 10,000 steps in all
    python benchmarks/processes.py --steps 600 --only f16

`jax.distributed` joins the processes, each with one CPU device. Every fifth step or so has a
fault in the shard or the copy of one process, drawn as in faults.py. After each chunk of
steps, which is one program, each process writes down what it saw: which steps were skipped,
the loss scale after each step, and a hash of all bits of parameters, optimizer state and
scaling, gathered from the others where they are sharded. The driver compares these records.

Then a process of another job is killed with SIGKILL at a random moment, the others are ended
as an engine does, and the job is started again. It resumes from its latest checkpoint, and
its hash at the end must be that of the undisturbed run.
"""

import hashlib
import json
import os
import pathlib
import platform
import random
import socket
import subprocess
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
import mpx  # noqa: E402
from faults import (  # noqa: E402
    RATE,
    draw_fault,
    make_batch,
    make_params,
    ours,
    shardings,
    targets,
)
from mpx.testing import Fault  # noqa: E402

CHUNK = 100  # steps in one program
SHARE = 0.2  # of the steps have a fault
_SMALL = mpx.optim.Compression(min_size=0, group_size=4)
CONFIGS = ("flash_adamw, sharded, f16", "flash_adamw, copies, bf16")


def library(config):
    """Returns the way to train that has this name."""
    _, layout, half = config.split(", ")
    return ours(
        config,
        mpx.optim.flash_adamw(RATE, compression=_SMALL),
        layout="jit" if layout == "sharded" else "shard_map",
        dtype=jnp.bfloat16,
        compute=jnp.float16 if half == "f16" else jnp.bfloat16,
    )


# --- the worker -----------------------------------------------------------------------


class Job:
    """The programs of one configuration on all processes."""

    def __init__(self, config, seed):
        self._library, self._seed = library(config), seed
        self._things = targets(self._library.layout)
        self._mesh = shardings("jit")["x"].mesh
        self._everywhere = NamedSharding(self._mesh, P())
        shapes = jax.eval_shape(self._init)
        self._where = jax.tree.map(self._place, shapes)
        self.template = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            self._where,
        )
        self.start = jax.jit(self._init, out_shardings=self._where)
        self._chunk = jax.jit(
            self._steps, out_shardings=(self._where, self._everywhere)
        )
        self._whole = jax.jit(lambda x: x, out_shardings=self._everywhere)

    def run(self, training, chunk):
        """Runs one chunk; returns the state and what this process saw."""
        draw = np.random.default_rng([self._seed, chunk])
        numbers = [chunk * CHUNK + i for i in range(CHUNK)]
        drawn = [
            draw_fault(draw, self._things, number)
            if draw.random() < SHARE
            else Fault(self._things, step=-1)
            for number in numbers
        ]
        faults = jax.tree.map(lambda *x: np.stack(jax.device_get(x)), *drawn)
        training, seen = self._chunk(training, np.array(numbers, np.int32), faults)
        record = {
            name: np.asarray(x.addressable_data(0)).tolist() for name, x in seen.items()
        }
        record["faults"] = int(np.sum(faults.step >= 0))
        return training, record | {"chunk": chunk, "hash": self._digest(training)}

    def _init(self):
        training = self._library.init(make_params())
        return jax.tree.map(jnp.asarray, training)

    def _place(self, leaf):
        has_rows = leaf.ndim >= 2 and leaf.shape[-2] % self._mesh.size == 0
        is_cut = self._library.layout == "jit" and has_rows
        spec = P(*[None] * (leaf.ndim - 2), "data") if is_cut else P()
        return NamedSharding(self._mesh, spec)

    def _steps(self, training, numbers, faults):
        along = NamedSharding(self._mesh, P("data"))

        def body(old, inputs):
            number, fault = inputs
            x, y = lax.with_sharding_constraint(make_batch(number), along)
            new, grads, scale, loss = self._library.step(old, x, y, fault, number)
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

    def _digest(self, training):
        found = hashlib.sha256()
        for leaf in jax.tree.leaves(self._whole(training)):
            found.update(np.asarray(leaf.addressable_data(0)).tobytes())
        return found.hexdigest()[:16]


def same_bits(a, b):
    def same(x, y):
        word = np.dtype(f"u{x.dtype.itemsize}")
        x, y = (lax.bitcast_convert_type(z, word) for z in (x, y))
        return (x == y).all()

    return jnp.stack(jax.tree.leaves(jax.tree.map(same, a, b))).all()


def work(folder, config, chunks, seed, checkpoints):
    """Trains, from the latest checkpoint if there is one, and records every chunk."""
    job = Job(config, seed)
    log = pathlib.Path(folder) / f"process-{jax.process_index()}.jsonl"

    def note(record):
        with log.open("a") as file:
            file.write(json.dumps(record) + "\n")

    training, done, keeper = None, 0, None
    if checkpoints:
        keeper = mpx.checkpoint.Checkpointer(pathlib.Path(folder) / "run", keep=2)
        done = keeper.latest() or 0
    if keeper is not None and done:
        training = keeper.restore(job.template)
        note({"resumed": done})
    training = job.start() if training is None else training
    for chunk in range(done, chunks):
        training, record = job.run(training, chunk)
        note(record)
        if keeper is not None:
            keeper.save(chunk + 1, training)  # returns before it is written
    if keeper is not None:
        keeper.close()


# --- the driver -----------------------------------------------------------------------


class Found(NamedTuple):
    """What the records of a run say."""

    steps: int = 0  # that all processes recorded
    faults: int = 0
    skipped: int = 0
    divergent: int = (
        0  # steps on which processes disagree: skipped or not, or the scale
    )
    # Steps skipped with finite gradients and loss, or the reverse; or skipped steps that
    # changed a bit of parameters or optimizer, or the reverse.
    wrong: int = 0
    hashes: int = 0  # compared between the processes
    different: int = 0
    end: str = ""  # the last hash


def launch(count, folder, *runs):
    """Starts the processes of a job, as one would by hand.

    Args:
        count: How many.
        folder: Where their output goes.
        runs: The arguments of `work`, for one run after the other.
    """
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    workers = []
    for number in range(count):
        place = f"localhost:{port}", count, number
        call = json.dumps([place, runs], default=str)
        with open(folder / f"output-{number}.txt", "a") as output:
            workers.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--work", call],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return workers


def finish(workers, folder):
    """Waits for a job, and ends it if a process fails."""
    try:
        failed = None
        while failed is None and any(worker.poll() is None for worker in workers):
            time.sleep(0.1)
            failed = next((i for i, x in enumerate(workers) if x.poll()), None)
        if failed is not None:
            text = (folder / f"output-{failed}.txt").read_text()
            raise RuntimeError(f"Process {failed} failed:\n{text[-3000:]}")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def records(folder, number):
    path = folder / f"process-{number}.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:  # the process was killed, or is writing it
            return


def compare(folder, count):
    """Compares what the processes saw, chunk by chunk."""
    runs = [[x for x in records(folder, i) if "hash" in x] for i in range(count)]
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
        found = Found(*map(sum, zip(found[:-1], new, strict=True)), hashes[0])
    return found


def kill_one(count, folder, run, draw):
    """Kills a process of a job and starts the job again.

    Returns:
        The chunk during which it was killed, and the chunk after which it resumed.
    """
    workers, seen = launch(count, folder, run), []
    try:
        while len(seen) < 2:  # there is a checkpoint, or it is being written
            if any(worker.poll() for worker in workers):
                finish(workers, folder)
            seen = list(records(folder, 0))
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        workers[draw.randrange(count)].kill()
    finally:
        for worker in workers:  # as an engine does
            worker.kill()
            worker.wait()
    last = len(list(records(folder, 0))) + 1
    finish(launch(count, folder, run), folder)
    resumed = next((x["resumed"] for x in records(folder, 0) if "resumed" in x), None)
    return last, resumed


def check(count, configs, chunks, seed, folder):
    """Runs all configurations undisturbed, and a part of one with a kill."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    folders = [folder / str(number) for number in range(len(configs))]
    killed = folder / "killed"
    for path in (*folders, killed):
        path.mkdir()
    pairs = list(zip(folders, configs, strict=True))
    runs = [(path, config, chunks, seed, False) for path, config in pairs]
    finish(launch(count, folder, *runs), folder)
    fine, steps = True, 0
    for path, config in pairs:
        found = compare(path, count)
        print(
            f"| {count} | {config} | {found.steps} | {found.faults} | {found.skipped} "
            f"| {found.wrong} | {found.divergent} | {found.different} of {found.hashes} |",
            flush=True,
        )
        fine &= not (found.wrong or found.divergent or found.different)
        fine &= found.steps == chunks * CHUNK and found.skipped > 0
        steps += found.steps
    path, config = pairs[count // 2 % len(pairs)]  # another one for each count
    length = min(chunks, 6)
    draw = random.Random(f"{seed} {count}")
    run = (killed, config, length, seed, True)
    last, resumed = kill_one(count, killed, run, draw)
    wanted = {x["chunk"]: x["hash"] for x in records(path, 0)}[length - 1]
    ends = [
        [x["hash"] for x in records(killed, i) if "hash" in x] for i in range(count)
    ]
    same = resumed is not None and all(end[-1] == wanted for end in ends)
    print(
        f"| {count}, one killed | {config} | in chunk {last} of {length}, resumed after "
        f"{resumed}: {'same end' if same else 'ANOTHER END'} | | | | | |",
        flush=True,
    )
    return fine and same, steps


def main():
    options = measure.read_options(
        __doc__, "steps=10000 processes=2,4 only= seed=0 work=str"
    )
    if options.work:
        place, runs = json.loads(options.work)
        jax.distributed.initialize(*place)
        mpx.check_processes(place[1])
        # Gloo gives up if a process comes 30 s late to the first collective, and only
        # process 0 finds its programs in the cache: connect before they are compiled.
        multihost_utils.sync_global_devices("start")
        for run in runs:
            work(*run)
        return 0
    configs = [x for x in CONFIGS if options.only in x]
    share = CHUNK * len(configs) * len(options.processes)
    chunks = max(-(-options.steps // share), 4)
    print(
        f"jax {jax.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}; seed {options.seed}; chunks of {CHUNK} steps\n"
    )
    print("| processes | | steps | faults | skipped | wrong | divergent decisions "
          "| different hashes |\n|--:|---|--:|--:|--:|--:|--:|--:|")  # fmt: skip
    began, fine, total = time.perf_counter(), True, 0
    for count in options.processes:
        with tempfile.TemporaryDirectory() as name:
            good, steps = check(
                count, configs, chunks, options.seed, pathlib.Path(name)
            )
        fine, total = fine and good, total + steps
    seconds = time.perf_counter() - began
    print(f"\n{'passed' if fine else 'FAILED'}: {total} steps in {seconds:.0f} s")
    return not fine


if __name__ == "__main__":
    sys.exit(main())
