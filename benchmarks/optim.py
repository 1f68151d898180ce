"""What a step of a compressed optimizer costs, in time and memory, beside optax in f32.

    python benchmarks/optim.py                       # four workloads on a GPU
    python benchmarks/optim.py --modes chain,chain-select,chain-cond --models gpt-1b --steps 10
    python benchmarks/optim.py --modes optax,mpx --models vit-base,narrow --group 30
    python benchmarks/optim.py --sweep               # blocks and warps of the kernel
    python benchmarks/optim.py --models tiny         # try the script on a CPU

Each implementation runs in a process of its own, on the same parameters and bf16
gradients. Many steps run inside one call, so that the device is measured and not the
host; "dispatched" has one call per step, "sent" the time until such a call returns to the
host, and "arrays" the time of a call that only passes the arrays. See README.md.
"""

import dataclasses
import functools
import importlib.util
import math
import pathlib
import statistics
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
from _measure import number, percent, ratio
from _models import make_task

CHECKED = 20  # steps of the quadratic
# The moment of Adam or Lion is off by 1/127 of the largest of its group at most, which is
# 2.5 times the typical one of 32 normal numbers: 2 % of a step, if all errors had one sign.
AGREEMENT = 0.02
TARGET_ADD, TARGET_BYTES, TARGET_PEAK = 1.08, 7.2, 1.02
RATES = {"adamw": 1e-3, "lion": 1e-3, "sgd": 1e-2}
DECAY, MOMENTUM = 1e-2, 0.9
FIXED = {
    "one": [(4096, 12288)],
    "many": [(1024, 1024)] * 64,
    "tiny-one": [(64, 96)],
    "tiny-many": [(64, 64)] * 4 + [(7,)],
}
# `--models tiny` stands for one leaf, some leaves and a whole tree, too.
TINY = ["tiny-one", "tiny-many", "tiny"]


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to step: who steps, and options of the optimizer or of the skip."""

    library: str
    options: Any = None
    peer: bool = False


# In the order in which they run and stand in the table.
MODES = {
    "copy": Mode("copy"),
    "add": Mode("add"),
    "optax": Mode("optax"),
    "mpx": Mode("mpx"),
    "mpx-plain": Mode("mpx", {"backend": "jax"}),
    "flashoptim-jax": Mode("flashoptim_jax", peer=True),
    "flashoptim-torch": Mode("torch", peer=True),
}
DEFAULT = ",".join(MODES)
MODES |= {
    # f32 gradients, clipped; a step that is not finite is left out in several ways.
    "chain": Mode("chain"),
    "chain-hand": Mode("chain", "hand"),
    "chain-select": Mode("chain", "select"),
    "chain-cond": Mode("chain", "cond"),
}


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
    """A workload under an optimizer.

    Attributes:
        carry: What a step changes: parameters and state.
        step: `step(carry, grads) -> carry`.
        grads: Gradients, in `chain` with the flag that says whether they are finite.
        weights: `weights(carry)`, the f32 weights.
    """

    carry: Any
    step: Any
    grads: Any
    weights: Any = lambda carry: carry[0]


def choose(optimizer, adamw, lion, sgd):
    """Returns an optimizer with its hyperparameters, from three functions."""
    options = {"momentum": MOMENTUM} if optimizer == "sgd" else {"weight_decay": DECAY}
    make = {"adamw": adamw, "lion": lion, "sgd": sgd}[optimizer]
    return functools.partial(make, RATES[optimizer], **options)


def mpx_optimizer(optimizer, options=None):
    from mpx import optim

    make = choose(optimizer, optim.flash_adamw, optim.flash_lion, optim.flash_sgd)
    return make(**(options or {}))


def build_optax(shapes, optimizer, options):
    """Parameters and state in f32; gradients in bf16, cast where they are used."""
    tx = choose(optimizer, optax.adamw, optax.lion, optax.sgd)()

    def step(carry, grads):
        params, state = carry
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, grads = draw(shapes, 0, np.float32), draw(shapes, 1, ml_dtypes.bfloat16)
    return Built((params, tx.init(params)), step, grads)


def build_chain(shapes, optimizer, skip):
    """The same with f32 gradients and clipping, and with updates that may be left out."""
    import mpx

    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2)
    )

    def step(carry, inputs):
        params, state = carry
        grads, finite = inputs
        if skip in ("select", "cond"):
            return tuple(
                mpx.optimizer_update(params, tx, state, grads, finite, skip=skip)
            )
        updates, state = tx.update(grads, state, params)
        new = optax.apply_updates(params, updates), state
        if skip == "hand":
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, carry)
        return new

    params, grads = draw(shapes, 0, np.float32), draw(shapes, 1, np.float32)
    return Built((params, tx.init(params)), step, (grads, jnp.array(True)))


def build_mpx(shapes, optimizer, options):
    """bf16 parameters, compressed state."""
    import mpx

    tx = mpx_optimizer(optimizer, options)
    params, grads = (draw(shapes, seed, ml_dtypes.bfloat16) for seed in (0, 1))
    step = lambda carry, grads: tuple(tx.step(*carry, grads))  # noqa: E731
    weights = lambda carry: mpx.optim.master_params(*carry)  # noqa: E731
    return Built((params, tx.init(params)), step, grads, weights)


def build_flashoptim_jax(shapes, optimizer, options):
    """flashoptim-jax with its kernels; without them where there is no GPU."""
    import flashoptim_jax as peer  # pyright: ignore[reportMissingImports]

    make = choose(optimizer, peer.flash_adamw, peer.flash_lion, peer.flash_sgd)
    tx = make(fused=jax.default_backend() == "gpu")
    params, grads = (draw(shapes, seed, ml_dtypes.bfloat16) for seed in (0, 1))
    step = lambda carry, grads: tx.step(*carry, grads)  # noqa: E731
    weights = lambda carry: peer.reconstruct_weights(carry[0], carry[1].ecc)  # noqa: E731
    return Built((params, tx.init(params)), step, grads, weights)


def build_add(shapes, optimizer, options):
    """`x + 1` in place over as many bytes as the step of mpx reads and writes.

    Half of them are read and half written. One array per parameter; it may be a little
    larger than a byte count that is no multiple of eight.
    """
    tx, arrays = mpx_optimizer(optimizer), []
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
    mode, records, start = MODES[name], [], time.perf_counter()
    if mode.library != "torch":
        measure.start_child()
    if mode.library == "copy":
        array = jnp.zeros(
            2**20 if jax.default_backend() == "cpu" else 2**28, jnp.float32
        )
        ms = measure.time_call(jax.jit(jnp.copy), array, runs=10, groups=options.calls)
        return [{"copy": 2 * array.nbytes / ms * 1e3}]
    run = run_torch if mode.library == "torch" else run_workload
    models = options.peer_models if mode.peer else options.models
    for model in sorted(models, key=lambda m: count_of(shapes_of(m))):
        if records and time.perf_counter() - start > options.budget:
            records.append({"model": model, "error": "skipped: no time left"})
        else:
            records.append({"model": model} | run(mode, model, options))
    return records


def run_workload(mode, model, options):
    """Compiles, times and checks one implementation on one workload."""
    shapes = shapes_of(model)
    before = measure.peak_bytes() or 0
    build = functools.partial(BUILDERS[mode.library], shapes, options.optimizer)
    built = build(mode.options)
    kept, read_only = (
        sum(x.nbytes for x in jax.tree.leaves(tree))
        for tree in (built.carry, built.grads)
    )
    record = {
        "params": count_of(shapes),
        "arrays": len(jax.tree.leaves(built.carry)),
        "bytes": 2 * kept + read_only,
        "resident_bytes": kept + read_only,
    }
    step, _, compiled = measure.compile_step(
        lambda carry, grads: (built.step(carry, grads), None), built.carry, built.grads
    )
    record |= compiled
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
    if mode.library == "chain" and mode.options:
        new = fingerprint(carry)
        skipped = built.grads[0], jnp.array(False)
        carry, looped = time_loop(built, carry, skipped, options)
        record["skipped_us"] = looped["us"]
        record["still"] = sum(a == b for a, b in zip(old, new, strict=True))
        record["spoilt"] = int(new != fingerprint(carry))
    peak = measure.peak_bytes()
    # An earlier workload may have needed more: then this one's peak is not known.
    record["peak_bytes"] = peak if peak and peak > before else None
    del carry
    # The checks start from the beginning; the buffers of the timed run are gone by now.
    return record | check(build(mode.options), step, mode)


def dispatched(step, carry, grads, options):
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

    jitted = jax.jit(loop, donate_argnums=0)
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


def check(built, step, mode):
    """Steps down the quadratic |w|²/2, whose gradient is the parameter itself."""

    @jax.jit
    def loss(weights):
        return sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(weights)) / 2

    dtype = jnp.float32 if mode.library == "chain" else jnp.bfloat16
    gradients = jax.jit(lambda p: jax.tree.map(lambda x: x.astype(dtype) + 0, p))
    carry, weights = built.carry, jax.jit(built.weights)
    # A copy: the parameters of optax are its weights, and will be donated.
    old = jax.tree.map(jnp.copy, weights(carry))
    first = float(loss(old))
    for _ in range(CHECKED):
        grads = built.grads and gradients(carry[0])
        flagged = (grads, jnp.array(True)) if mode.library == "chain" else grads
        carry, _ = step(carry, flagged)
    new = weights(carry)
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), old, new)
    record = {"unchanged": sum(jax.tree.leaves(same))}
    losses = {} if mode.library == "add" else {"losses": [first, float(loss(new))]}
    return record | losses


# --- FlashOptim's original, in PyTorch --------------------------------------------------


def run_torch(mode, model, options):
    """Times and checks one workload. Every step is dispatched: there is no loop."""
    import flashoptim  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    make = choose(
        options.optimizer,
        flashoptim.FlashAdamW,
        flashoptim.FlashLion,
        flashoptim.FlashSGD,
    )
    # It takes the parameters first.
    make = functools.partial(make.func, lr=make.args[0], **make.keywords)

    def build():
        leaves = jax.tree.leaves(shapes_of(model))
        draw = functools.partial(torch.randn, dtype=torch.bfloat16, device="cuda")
        params = [torch.nn.Parameter(draw(x.shape)) for x in leaves]
        for param in params:
            param.grad = torch.randn_like(param)
        return params, make(params)

    torch.manual_seed(0)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    params, optimizer = build()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    resident = torch.cuda.memory_allocated() - before
    grads = sum(p.grad.nbytes for p in params)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.calls):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(options.steps):
            optimizer.step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / options.steps * 1e3)
    record = {
        "params": sum(p.numel() for p in params),
        "bytes": 2 * (resident - grads) + grads,
        "resident_bytes": resident,
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "us": statistics.median(times),
        "us_low": min(times),
        "us_high": max(times),
        "dispatched_us": statistics.median(times),
        "compile_s": compile_s,
    }
    params, optimizer = build()
    old = [p.detach().clone() for p in params]
    for _ in range(CHECKED):
        for param in params:
            param.grad = param.detach().clone()
        optimizer.step()
    loss = lambda ws: sum(float(w.detach().float().square().sum()) / 2 for w in ws)  # noqa: E731
    same = sum(bool((a == b).all()) for a, b in zip(old, params, strict=True))
    return record | {"unchanged": same, "losses": [loss(old), loss(params)]}


# --- the launch of the kernel -----------------------------------------------------------


def sweep(options):
    """Times the kernel of mpx for blocks and warps, on the first workload."""
    from mpx._kernels import _dispatch, _triton

    measure.start_child()
    shapes, rows = shapes_of(options.models[0]), []
    for block in options.blocks:
        rows.append([str(block)])
        for warps in options.warps:
            setattr(_dispatch, "_BLOCK", block)  # noqa: B010
            setattr(_triton, "_WARPS", warps)  # noqa: B010
            jax.clear_caches()
            built = build_mpx(shapes, options.optimizer, None)
            try:
                us = time_loop(built, built.carry, built.grads, options)[1]["us"]
            except jax.errors.JaxRuntimeError:  # a block may need too much
                us = None
            rows[-1].append(number(us, 1))
    header = ["block", *(f"{w} warps, µs" for w in options.warps)]
    print(measure.format_table(header, rows))


# --- all modes --------------------------------------------------------------------------


def missing(name, options):
    """Says what a peer lacks, if anything."""
    wanted = {
        "flashoptim-jax": ["flashoptim_jax"],
        "flashoptim-torch": ["torch", "flashoptim"],
    }
    sys.path[:0] = options.peer
    names = [n for n in wanted.get(name, ()) if importlib.util.find_spec(n) is None]
    del sys.path[: len(options.peer)]
    return f"{' and '.join(names)} not installed" if names else ""


def by_model(runs):
    """Returns good records by workload and mode, the rate of a copy, and what failed."""
    tables, copy, failed = {}, None, set()
    for name, (run, *_) in runs.items():
        if "error" in run and "skip" not in run:
            failed.add(name)
        for record in run.get("records", ()):
            copy = record.get("copy", copy)
            if "error" in record:
                failed.add(name)
            elif "model" in record:
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
        ("arrays", lambda r: str(r.get("arrays", "–"))),
        ("arrays µs", us("arrays_us")),
        ("sent µs", us("sent_us")),
        ("dispatched µs", us("dispatched_us")),
        ("B/param moved", each("bytes")),
        ("resident", each("resident_bytes")),
        ("peak", each("peak_bytes")),
        ("compiled", each("compiled_bytes")),
        ("trace s", lambda r: number(r.get("trace_s"), 1)),
        ("compile s", lambda r: number(r.get("compile_s"), 1)),
    )


def failures(rows):
    """Yields what is wrong with each mode."""
    for name, record in rows.items():
        base = rows.get("chain" if MODES[name].library == "chain" else "optax", record)
        if record["unchanged"] or record.get("still"):
            yield name, f"{record['unchanged']} arrays did not change"
        if record.get("spoilt"):
            yield name, "skipped steps changed the state"
        in_place = record.get("alias_bytes", math.inf)
        if in_place < record.get("state_bytes", 0) and not MODES[name].peer:
            yield name, f"{record['state_bytes'] - in_place} bytes are not in place"
        if "losses" not in record:
            continue
        first, last = record["losses"]
        if not (math.isfinite(last) and last < first):
            yield name, f"the loss did not go down: {first:.6g} → {last:.6g}"
        reference = base["losses"][0] - base["losses"][1]
        apart = abs(first - last - reference) / reference
        if not apart <= AGREEMENT:
            yield name, f"its loss falls by {apart:.1%} more or less than optax's"


def targets(rows, optimizer):
    """Yields what was aimed at and whether it was reached."""
    ours, add, base = (rows.get(name) for name in ("mpx", "add", "optax"))
    if ours is None:
        return
    if add is not None and "one" in ours["model"]:
        value = ours["us"] / add["us"]
        text = f"{value:.3f}× the in-place add, at most {TARGET_ADD}"
        yield text, value <= TARGET_ADD
    if base is not None:
        value = ours["us"] / base["us"]
        yield f"{value:.3f}× the time of optax in f32, below 1", value < 1
    resident = ours["resident_bytes"] / ours["params"]
    if optimizer == "adamw":
        text = f"{resident:.2f} resident bytes a parameter, at most {TARGET_BYTES}"
        yield text, resident <= TARGET_BYTES
    if (peak := measure.memory(ours)) is not None:
        value = peak / ours["resident_bytes"]
        yield f"peak {value:.3f}× resident, at most {TARGET_PEAK}", value <= TARGET_PEAK


def main():
    options = measure.read_options(
        __doc__,
        "models=one,many,vit-base,gpt2 peer_models=one,many optimizer=adamw "
        f"modes={DEFAULT} steps=200 calls=7 group=10 peer=, budget=300.0 "
        "timeout=300.0 json=str strict sweep blocks=512,1024,2048,4096,8192 "
        "warps=2,4,8",
    )
    if options.models == ["tiny"]:
        options.models = options.peer_models = TINY
    options.peer = [str(pathlib.Path(path).resolve()) for path in options.peer]
    if options.sweep:
        return sweep(options)
    if options.child is not None:
        return measure.end_child({"records": run_mode(options.child, options)})
    modes = measure.pick(MODES, options.modes)
    runs = measure.run_cases(
        modes, options, skip=lambda name: missing(name, options), shared_cache=False
    )
    tables, copy, failed = by_model(runs)
    if not tables:
        return 1
    good = next(run[0] for run in runs.values() if "records" in run[0])
    what = f"{options.optimizer}, {options.steps} steps in one call, {options.calls} calls; "
    on_cpu = measure.print_machine(good, what)
    wrong, missed = [], []
    for model, rows in tables.items():
        print_table(model, rows, copy)
        wrong += failures(rows)
        for text, met in () if on_cpu else targets(rows, options.optimizer):
            print(f"mpx: {text}: {'met' if met else 'MISSED'}")
            missed += [] if met else [text]
    measure.print_verdict(
        [f"{name}: {text}" for name, text in wrong],
        "every array changed, in place; the loss of a quadratic fell, within "
        f"{AGREEMENT:.0%} of the decrease of optax; skipped steps changed no bit.",
        on_cpu,
    )
    # The peers' own errors are reported but are not ours.
    ours = [x for x in {*failed, *(name for name, _ in wrong)} if not MODES[x].peer]
    return int(bool(ours or (options.strict and missed)))


if __name__ == "__main__":
    sys.exit(main())
