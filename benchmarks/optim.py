"""What a step of a compressed optimizer costs, in time and memory, beside optax in f32.

    python benchmarks/optim.py                       # four workloads on a GPU
    python benchmarks/optim.py --modes chain,chain-select --models gpt-1b --steps 10
    python benchmarks/optim.py --modes optax,mpx --models vit-base --group 30
    python benchmarks/optim.py --models tiny         # try the script on a CPU

Each implementation runs in a process of its own, on the same parameters and bf16
gradients. Many steps run inside one call, so that the device is measured and not the
host; "dispatched" has one call per step, "sent" the time until such a call returns to the
host, and "arrays" the time of a call that only passes the arrays. See README.md.
"""

import functools
import math
import pathlib
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax import lax

import _measure as measure
import mpx
from _measure import number, percent, ratio
from _models import make_task

CHECKED = 20  # steps of the quadratic
# The moment of Adam or Lion is off by 1/127 of the largest of its group at most, which is
# 2.5 times the typical one of 32 normal numbers: 2 % of a step, if all errors had one sign.
AGREEMENT = 0.02
RATES = {"adamw": 1e-3, "lion": 1e-3, "sgd": 1e-2}
FIXED = {
    "one": [(4096, 12288)],
    "many": [(1024, 1024)] * 64,
    "tiny-one": [(64, 96)],
    "tiny-many": [(64, 64)] * 4 + [(7,)],
}
# `--models tiny` stands for one leaf, some leaves and a whole tree, too.
TINY = ["tiny-one", "tiny-many", "tiny"]
# By mode: who steps, and options of the optimizer or of the skip; in the order in which
# they run and stand in the table.
MODES: dict[str, tuple[str, Any]] = {
    "copy": ("copy", None),
    "add": ("add", None),
    "optax": ("optax", None),
    "mpx": ("mpx", {}),
    "mpx-plain": ("mpx", {"backend": "jax"}),
    "flashoptim-jax": ("flashoptim_jax", None),
}
DEFAULT = ",".join(MODES)
MODES |= {
    # f32 gradients, clipped; a step that is not finite is left out.
    "chain": ("chain", None),
    "chain-select": ("chain", "select"),
}
PEERS = ("flashoptim-jax",)


# --- workloads and optimizers -----------------------------------------------------------


def shapes_of(name):
    """Returns the shapes of a workload's parameters, as a tree."""
    if name in FIXED:
        make = lambda i, x: (f"{i:04d}", jax.ShapeDtypeStruct(x, jnp.float32))  # noqa: E731
        return dict(make(*pair) for pair in enumerate(FIXED[name]))
    return make_task(name, 1, shapes=True).params


def count_of(shapes):
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def draw(shapes, seed, dtype):
    """Normal numbers, made on the host: the device's peak is to hold the step alone.

    One block of numbers is repeated; it has no common divisor with the shapes.
    """
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(2**20 - 3, np.float32).astype(ml_dtypes.bfloat16)
    block = block.astype(dtype)
    return jax.tree.map(lambda x: jax.device_put(np.resize(block, x.shape)), shapes)


class Built(NamedTuple):
    """A workload under an optimizer."""

    carry: Any  # parameters and state
    step: Any  # from carry and gradients to the next carry
    grads: Any  # in `chain` with the flag that says whether they are finite
    weights: Any = lambda carry: carry[0]  # the f32 weights of a carry


def choose(optimizer, package, prefix=""):
    """Returns an optimizer of a package with its hyperparameters."""
    options = {"momentum": 0.9} if optimizer == "sgd" else {"weight_decay": 1e-2}
    make = getattr(package, prefix + optimizer)
    return functools.partial(make, RATES[optimizer], **options)


def build_optax(shapes, optimizer, options):
    """Parameters and state in f32; gradients in bf16, cast where they are used."""
    tx = choose(optimizer, optax)()

    def step(carry, grads):
        params, state = carry
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = draw(shapes, 0, np.float32), draw(shapes, 1, ml_dtypes.bfloat16)
    return Built((params, tx.init(params)), step, grads)


def build_chain(shapes, optimizer, skip):
    """The same with f32 gradients and clipping, and with updates that may be left out."""
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2)
    )

    def step(carry, inputs):
        (params, state), (grads, finite) = carry, inputs
        if skip:
            new = mpx.optimizer_update(params, tx, state, grads, finite, skip=skip)
            return tuple(new)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = draw(shapes, 0, np.float32), draw(shapes, 1, np.float32)
    return Built((params, tx.init(params)), step, (grads, jnp.array(True)))


def build_mpx(shapes, optimizer, options):
    """bf16 parameters, compressed state."""
    tx = choose(optimizer, mpx.optim, "flash_")(**options)
    params, grads = (draw(shapes, seed, ml_dtypes.bfloat16) for seed in (0, 1))
    step = lambda carry, grads: tuple(tx.step(*carry, grads))  # noqa: E731
    weights = lambda carry: mpx.optim.master_params(*carry)  # noqa: E731
    return Built((params, tx.init(params)), step, grads, weights)


def build_flashoptim_jax(shapes, optimizer, options):
    """flashoptim-jax with its kernels; without them where there is no GPU."""
    import flashoptim_jax as peer  # pyright: ignore[reportMissingImports]

    tx = choose(optimizer, peer, "flash_")(fused=jax.default_backend() == "gpu")
    params, grads = (draw(shapes, seed, ml_dtypes.bfloat16) for seed in (0, 1))
    step = lambda carry, grads: tx.step(*carry, grads)  # noqa: E731
    weights = lambda carry: peer.reconstruct_weights(carry[0], carry[1].ecc)  # noqa: E731
    return Built((params, tx.init(params)), step, grads, weights)


def build_add(shapes, optimizer, options):
    """`x + 1` in place over as many bytes as the step of mpx reads and writes.

    Half of them are read and half written. One array per parameter; it may be a little
    larger than a byte count that is no multiple of eight.
    """
    tx, arrays = choose(optimizer, mpx.optim, "flash_")(), []
    for leaf in jax.tree.leaves(shapes):
        param = {"x": jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)}
        stored = jax.tree.leaves((param, tx.init(param)))
        kept = sum(x.size * x.dtype.itemsize for x in stored if x.shape != ())
        moved = 2 * kept + 2 * param["x"].size
        arrays.append(jax.device_put(np.zeros(-(-moved // 8), np.float32)))
    step = lambda carry, _: jax.tree.map(lambda x: x + 1, carry)  # noqa: E731
    return Built((arrays,), step, {})


BUILDERS = {
    "optax": build_optax,
    "chain": build_chain,
    "mpx": build_mpx,
    "flashoptim_jax": build_flashoptim_jax,
    "add": build_add,
}


# --- one mode, in its own process -------------------------------------------------------


def run_mode(name, options):
    """Measures one implementation on all workloads, the smallest first."""
    sys.path[:0] = options.peer
    measure.start_child()
    records, start = [], time.perf_counter()
    if name == "copy":
        size = 2**20 if jax.default_backend() == "cpu" else 2**28
        array = jnp.zeros(size, jnp.float32)
        ms = measure.time_call(jax.jit(jnp.copy), array, runs=10, groups=options.calls)
        return [{"copy": 2 * array.nbytes / ms * 1e3}]
    for model in sorted(options.models, key=lambda m: count_of(shapes_of(m))):
        if records and time.perf_counter() - start > options.budget:
            records.append({"model": model, "error": "skipped: no time left"})
        else:
            records.append({"model": model} | run_workload(name, model, options))
    return records


def run_workload(name, model, options):
    """Compiles, times and checks one implementation on one workload."""
    library, chosen = MODES[name]
    shapes, before = shapes_of(model), measure.peak_bytes() or 0
    build = functools.partial(BUILDERS[library], shapes, options.optimizer, chosen)
    built = build()
    both = built.carry, built.grads
    kept, read_only = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in both)
    step, _, record = measure.compile_step(
        lambda carry, grads: (built.step(carry, grads), None), built.carry, built.grads
    )
    carry, timing = dispatched(step, built.carry, built.grads, options)
    record |= {"dispatched_us": timing["ms"] * 1e3, "sent_us": timing["host_ms"] * 1e3}
    bare = jax.jit(
        lambda carry, _: (lax.optimization_barrier(carry), None), donate_argnums=0
    )
    carry, timing = dispatched(bare, carry, None, options)
    record["arrays_us"] = timing["ms"] * 1e3
    old = fingerprint(carry)
    carry, looped = time_loop(built, carry, built.grads, options)
    record |= looped
    if library == "chain" and chosen:
        new = fingerprint(carry)
        skipped = built.grads[0], jnp.array(False)
        carry, looped = time_loop(built, carry, skipped, options)
        record["skipped_us"] = looped["us"]
        record["still"] = sum(a == b for a, b in zip(old, new, strict=True))
        record["spoilt"] = int(new != fingerprint(carry))
    peak = measure.peak_bytes()
    record |= {
        "params": count_of(shapes),
        "arrays": len(jax.tree.leaves(built.carry)),
        "bytes": 2 * kept + read_only,
        "resident_bytes": kept + read_only,
        # An earlier workload may have needed more: then this one's peak is not known.
        "peak_bytes": peak if peak and peak > before else None,
    }
    del carry
    # The checks start from the beginning; the buffers of the timed run are gone by now.
    return record | check(build(), step, library)


def dispatched(step, carry, grads, options):
    timing = {}
    for groups in (1, 4):  # the first compiles
        carry, _, timing = measure.time_steps(
            step, carry, [grads], steps=groups * options.group, group=options.group
        )
    return carry, timing


def time_loop(built, carry, grads, options):
    """Times many steps inside one call."""

    def loop(carry, grads):
        def body(index, carry):
            # Else XLA would take what depends on the gradients alone out of the loop.
            return built.step(carry, lax.optimization_barrier((grads, index))[0])

        return lax.fori_loop(0, options.steps, body, carry), None

    jitted, timing = jax.jit(loop, donate_argnums=0), {}
    for calls in (2, options.calls):  # the second may find arguments placed otherwise
        carry, _, timing = measure.time_steps(
            jitted, carry, [grads], steps=calls, group=1
        )
    names = {"us": "ms", "us_low": "ms_low", "us_high": "ms_high"}
    return carry, {k: timing[x] * 1e3 / options.steps for k, x in names.items()}


@jax.jit
def sum_of_bits(x):
    word = np.dtype(f"u{x.dtype.itemsize}")
    return jnp.sum(lax.bitcast_convert_type(x, word), dtype=jnp.uint32)


def fingerprint(carry):
    """Returns the sum of the bits of each array."""
    return [int(sum_of_bits(x)) for x in jax.tree.leaves(carry)]


def check(built, step, library):
    """Steps down the quadratic |w|²/2, whose gradient is the parameter itself."""

    @jax.jit
    def loss(weights):
        return sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(weights)) / 2

    dtype = jnp.float32 if library == "chain" else jnp.bfloat16
    gradients = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(dtype) + 0, p))
    carry, weights = built.carry, jax.jit(built.weights)
    # A copy: the parameters of optax are its weights, and will be donated.
    old = jax.tree.map(jnp.copy, weights(carry))
    first = float(loss(old))
    for _ in range(CHECKED):
        grads = built.grads and gradients(carry[0])
        flagged = (grads, jnp.array(True)) if library == "chain" else grads
        carry, _ = step(carry, flagged)
    new = weights(carry)
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), old, new)
    losses = {} if library == "add" else {"losses": [first, float(loss(new))]}
    return {"unchanged": sum(jax.tree.leaves(same))} | losses


# --- all modes --------------------------------------------------------------------------


def by_model(runs):
    """Returns good records by workload and mode, the rate of a copy, and what failed."""
    tables, copy, failed = {}, None, set()
    for name, (run, *_) in runs.items():
        records = run.get("records", ())
        if "error" in run or any("error" in record for record in records):
            failed.add(name)
        for record in records:
            copy = record.get("copy", copy)
            if "model" in record and "error" not in record:
                tables.setdefault(record["model"], {})[name] = record | {"mode": name}
    return tables, copy, failed


def print_table(model, rows, copy):
    first = next(iter(rows.values()))
    leaves = len(jax.tree.leaves(shapes_of(model)))
    print(f"\n{model}: {first['params'] / 1e6:.1f}M parameters in {leaves} arrays\n")
    base = "chain" if "chain" in rows else "optax"
    times = {name: r["us"] for name, r in rows.items()}
    beside = lambda name: lambda r: number(ratio(r["us"], times.get(name)), 3)  # noqa: E731
    us = lambda name: lambda r: number(r.get(name), 1)  # noqa: E731
    rate = lambda r: r["bytes"] / r["us"] * 1e6  # noqa: E731
    each = lambda name: lambda r: number(ratio(r.get(name), r["params"]))  # noqa: E731
    measure.print_columns(
        rows.values(),
        ("mode", lambda r: r["mode"]),
        ("µs", us("us")),
        ("spread", lambda r: percent((r["us_high"] - r["us_low"]) / r["us"])),
        ("TB/s", lambda r: number(rate(r) / 1e12)),
        ("of copy", lambda r: percent(ratio(rate(r), copy), 0)),
        ("× add", beside("add")),
        (f"× {base}", beside(base)),
        ("skipped µs", us("skipped_us")),
        ("arrays", lambda r: str(r["arrays"])),
        ("arrays µs", us("arrays_us")),
        ("sent µs", us("sent_us")),
        ("dispatched µs", us("dispatched_us")),
        ("B/param moved", each("bytes")),
        ("resident", each("resident_bytes")),
        ("peak", each("peak_bytes")),
        ("compiled", each("compiled_bytes")),
        ("trace s", us("trace_s")),
        ("compile s", us("compile_s")),
    )


def failures(rows):
    """Yields what is wrong with each mode."""
    for name, record in rows.items():
        base = rows.get("chain" if name.startswith("chain") else "optax", record)
        if record["unchanged"] or record.get("still"):
            yield name, f"{record['unchanged']} arrays did not change"
        if record.get("spoilt"):
            yield name, "skipped steps changed the state"
        outside = record["state_bytes"] - record.get("alias_bytes", math.inf)
        if outside > 0 and name not in PEERS:
            yield name, f"{outside} bytes are not in place"
        if "losses" not in record:
            continue
        first, last = record["losses"]
        if not (math.isfinite(last) and last < first):
            yield name, f"the loss did not go down: {first:.6g} → {last:.6g}"
        reference = base["losses"][0] - base["losses"][1]
        apart = abs(first - last - reference) / reference
        if not apart <= AGREEMENT:
            yield name, f"its loss falls by {apart:.1%} more or less than optax's"


def main():
    options = measure.read_options(
        __doc__,
        f"models=one,many,vit-base,gpt2 optimizer=adamw modes={DEFAULT} steps=200 "
        "calls=7 group=10 peer=, budget=300.0 timeout=300.0",
    )
    if options.models == ["tiny"]:
        options.models = TINY
    options.peer = [str(pathlib.Path(path).resolve()) for path in options.peer]
    if options.child is not None:
        return measure.end_child({"records": run_mode(options.child, options)})
    runs = measure.run_cases(
        measure.pick(MODES, options.modes), options, shared_cache=False
    )
    tables, copy, failed = by_model(runs)
    if not tables:
        return 1
    good = next(run[0] for run in runs.values() if "records" in run[0])
    what = f"{options.optimizer}, {options.steps} steps in one call, {options.calls} calls; "
    on_cpu, wrong = measure.print_machine(good, what), []
    for model, rows in tables.items():
        print_table(model, rows, copy)
        wrong += failures(rows)
    measure.print_verdict(
        [f"{name}: {text}" for name, text in wrong],
        "every array changed, in place; the loss of a quadratic fell, within "
        f"{AGREEMENT:.0%} of the decrease of optax; skipped steps changed no bit.",
        on_cpu,
    )
    # The peers' own errors are reported but are not ours.
    return int(bool({*failed, *(name for name, _ in wrong)} - {*PEERS}))


if __name__ == "__main__":
    sys.exit(main())
