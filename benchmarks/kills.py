"""Kills training processes at random moments, and compares what they end with.

    python benchmarks/kills.py                     # 100 kills, nine configurations
    python benchmarks/kills.py --kills 9 --steps 10

Each configuration trains once undisturbed. Then its workers are killed with SIGKILL at
random moments and started again; each resumes from the last checkpoint of
`mpx.checkpoint.Checkpointer`, which writes one after every step, in the background. A run is
good if it ends with the very bytes of the undisturbed one: parameters, optimizer state, loss
scaling, fp8 histories, PRNG key and step.
"""

import concurrent.futures
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint

import _measure as measure
import mpx

IN, HIDDEN, ROWS = 32, 64, 16
OPTIMIZERS = {
    "optax.adamw": lambda: optax.adamw(1e-2),
    "flash_adamw": lambda: mpx.optim.flash_adamw(1e-2, compression=_SMALL),
    "flash_lion": lambda: mpx.optim.flash_lion(1e-3, compression=_SMALL),
}
PRECISIONS = ("f16", "bf16", "fp8")
_SMALL = mpx.optim.Compression(min_size=0)


CONFIGS = list(itertools.product(OPTIMIZERS, PRECISIONS))


# --- the worker -----------------------------------------------------------------------


def loss(params, x):
    hidden = jnp.tanh(x @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - x).astype(jnp.float32) ** 2)


def make(config):
    """Returns jitted functions that make the first state, and that step."""
    name, precision = config
    optimizer = OPTIMIZERS[name]()
    dtype = jnp.bfloat16 if name.startswith("flash") else jnp.float32
    delayed = mpx.fp8(mpx.amp(loss), mpx.recipes.DelayedScaling(history=4), min_gain=0)
    half = jnp.float16 if precision == "f16" else jnp.bfloat16
    policy = mpx.Policy(dtype, half, jnp.float32)
    with_scales = precision == "fp8"
    take = mpx.value_and_grad(delayed if with_scales else loss,
                              policy=None if with_scales else policy)  # fmt: skip

    @jax.jit
    def init():
        keys = jax.random.split(jax.random.key(0), 3)
        params = {
            "w1": jax.random.normal(keys[0], (IN, HIDDEN), dtype) / 4,
            "w2": jax.random.normal(keys[1], (HIDDEN, IN), dtype) / 8,
        }
        # It grows until gradients overflow: some steps are skipped.
        start = jnp.float32(2.0**15)
        scaling = mpx.DynamicLossScaling(start, period=2, max_loss_scaling=2.0**24)
        state = {
            "params": params,
            "optimizer": optimizer.init(params),
            "scaling": scaling if half == jnp.float16 else mpx.NoLossScaling(),
            "key": keys[2],
        }
        if with_scales:
            state["fp8"] = delayed.init(params, jax.ShapeDtypeStruct((ROWS, IN), dtype))
        return state

    @jax.jit
    def advance(arrays):
        key, now = jax.random.split(arrays["key"])
        x = jax.random.normal(now, (ROWS, IN))
        args = (arrays["params"], x)
        args = (arrays["fp8"], *args) if with_scales else args
        result = take(arrays["scaling"], *args)
        grads, finite = result.grads, result.finite
        params, state = mpx.optimizer_update(
            arrays["params"], optimizer, arrays["optimizer"], grads, finite
        )
        new = {"params": params, "optimizer": state, "key": key}
        new |= {"fp8": result.fp8} if with_scales else {}
        return new | {"scaling": result.scaling}

    return init, advance


def work(folder, config, steps, cache, started):
    """Trains up to a step, from the last checkpoint if there is one; the worker."""
    logging.disable(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    init, advance = make(config)
    with mpx.checkpoint.Checkpointer(folder / "run", keep=2) as checkpoints:
        if checkpoints.latest() is None:
            state = {"arrays": init(), "step": 0}
        else:
            template = {"arrays": jax.eval_shape(init), "step": 0}
            state = checkpoints.restore(template)
        started.set()
        while state["step"] < steps:
            state = {"arrays": advance(state["arrays"]), "step": state["step"] + 1}
            checkpoints.save(state["step"], state)
    skipped = int(getattr(state["arrays"]["scaling"], "skipped", 0))
    done = {"digest": digest(state), "skipped": skipped}
    (folder / "part").write_text(json.dumps(done))
    (folder / "part").rename(folder / "done")


def digest(state):
    """Returns a checksum of all bytes of a state."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(getattr(leaf, "dtype", int), jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


# --- the driver -----------------------------------------------------------------------


class Killed(NamedTuple):
    """What became of a configuration."""

    kills: int = 0  # processes that were killed
    torn: int = 0  # of them, those that left a checkpoint half written
    runs: int = 0  # that were finished
    equal: int = 0  # of them, those that ended with the bytes of the undisturbed run
    skipped: int = 0  # steps that the undisturbed run skipped


def kill_runs(config, kills, steps, folder, draw):
    """Kills the workers of a configuration until there were enough kills."""
    context = multiprocessing.get_context("forkserver")
    cache = str(folder / "cache")

    def launch(where):
        where.mkdir(parents=True, exist_ok=True)
        started = context.Event()
        args = (where, config, steps, cache, started)
        worker = context.Process(target=work, args=args)
        worker.start()
        return worker, started

    calm = folder / "calm"
    worker, started = launch(calm)
    started.wait(120)
    began = time.perf_counter()
    worker.join()
    seconds = time.perf_counter() - began
    expected = json.loads((calm / "done").read_text())
    result = Killed(skipped=expected["skipped"])
    for number in itertools.count():
        where = folder / f"killed-{number}"
        while not (where / "done").exists():
            worker, started = launch(where)
            if result.kills < kills:
                # A part of a run: several kills are needed to get to its end.
                started.wait(120)
                worker.join(draw.uniform(0, seconds / 3))
                alive = worker.is_alive()
                worker.kill()
                worker.join()
                if alive and worker.exitcode == -9:
                    torn = result.torn + any(where.rglob("*tmp*"))
                    result = result._replace(kills=result.kills + 1, torn=torn)
            worker.join()
            if worker.exitcode not in (0, -9):
                raise RuntimeError(f"A worker ended with {worker.exitcode}.")
        equal = result.equal + (json.loads((where / "done").read_text()) == expected)
        result = result._replace(runs=result.runs + 1, equal=equal)
        if result.kills >= kills:
            return result
    raise AssertionError


def main():
    options = measure.read_options(__doc__, "kills=100 steps=20 jobs=2 seed=0 only=")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["kills"])
    configs = [x for x in CONFIGS if options.only in ", ".join(x)]
    versions = f"jax {jax.__version__}, orbax {orbax.checkpoint.__version__}"
    print(f"{versions}; seed {options.seed}")
    measure.print_head(
        "optimizer", "precision", "kills", "during a save", "runs", "bit-equal ends",
        "skipped steps",
    )  # fmt: skip
    began, total = time.perf_counter(), Killed()

    def run(index):
        share = len(range(index, options.kills, len(configs)))
        draw = random.Random(options.seed + index)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            return kill_runs(configs[index], share, options.steps, folder, draw)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        done = zip(configs, pool.map(run, range(len(configs))), strict=True)
        for config, found in done:
            total = Killed(*map(sum, zip(total, found, strict=True)))
            measure.print_row(*config, *found)
    measure.print_row("all", "", *total)
    return measure.print_end(total.runs == total.equal, began, f"{total.runs} runs")


if __name__ == "__main__":
    sys.exit(main())
