"""What a step of a compressed optimizer costs, in time and memory, beside optax in f32.

    python benchmarks/optim.py                       # four workloads on a GPU
    python benchmarks/optim.py --modes chain,chain-select --models gpt-1b --steps 10
    python benchmarks/optim.py --modes optax,mpx --models vit-base --group 30
    python benchmarks/optim.py --modes finite,stats --models vit-base
    python benchmarks/optim.py --models qwen3-layer --modes torch,optax,mpx --optimizer lion
    python benchmarks/optim.py --models qwen3-layer --modes optax,mpx,muon-fp8 \
        --optimizer muon --steps 10
    python benchmarks/optim.py --models tiny         # try the script on a CPU

Each implementation steps each workload in a process of its own, with the same parameters
and bf16 gradients. Many steps run inside one call, so that the device is measured and not
the host; "dispatched" has one call per step. See README.md.
"""

import functools
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
import mpx
from _measure import number, percent, ratio
from _models import cast, make_task

CHECKED = 20  # steps of the quadratic
# The moment of AdamW is off by 1/127 of the largest of its group at most, which is 2.5
# times the typical one of 32 normal numbers: 2 % of a step, if all errors had one sign.
AGREEMENT = 0.02
FIXED = {
    "one": [(4096, 12288)],
    "many": [(1024, 1024)] * 64,
    # A layer of Qwen3-8B without its norms.
    "qwen3-layer": [(4096, 4096)] * 2 + [(4096, 1024)] * 2 + [(4096, 12288)] * 3,
    "tiny-one": [(64, 96)],
    "tiny-many": [(64, 64)] * 4 + [(7,)],
}
# `--models tiny` stands for one leaf, some leaves and a whole tree, too.
TINY = ["tiny-one", "tiny-many", "tiny"]
PEERS = ("flashoptim-jax", "torch")


# --- workloads and optimizers -----------------------------------------------------------


def shapes_of(name):
    """Returns the shapes of a workload's parameters, as a tree."""
    if name in FIXED:
        make = lambda i, x: (f"{i:04d}", jax.ShapeDtypeStruct(x, jnp.float32))  # noqa: E731
        return dict(make(*pair) for pair in enumerate(FIXED[name]))
    return make_task(name, 1, shapes=True).params


def draw(shapes, seed, dtype):
    """Normal numbers, made on the host: the device's peak is to hold the step alone."""
    # One block is repeated; its size has no common divisor with the shapes.
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(2**20 - 3, np.float32).astype(ml_dtypes.bfloat16)
    block = block.astype(dtype)
    return jax.tree.map(lambda x: jax.device_put(np.resize(block, x.shape)), shapes)


class Built(NamedTuple):
    """A workload under an optimizer."""

    carry: Any  # parameters and state
    step: Any  # from carry and gradients to the next carry
    grads: Any  # in `chain` with the flag that says whether they are finite
    weights: Any = None  # the f32 weights of a carry; None if nothing is optimized


RATE = {"learning_rate": 1e-3}
# By optimizer: its options, with the names that optax and mpx share.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": RATE | {"weight_decay": 1e-2},
    "adam": RATE,
    "lion": RATE | {"weight_decay": 1e-2},
    "sgd": RATE | {"momentum": 0.9},
    "muon": RATE | {"weight_decay": 1e-2},
}


def build_optax(shapes, rule):
    """Parameters and state in f32; gradients in bf16, cast where they are used."""
    tx = getattr(optax.contrib if rule == "muon" else optax, rule)(**OPTIONS[rule])
    step = lambda carry, grads: apply(tx, carry, cast(grads, jnp.float32))  # noqa: E731
    params, grads = draw(shapes, 0, np.float32), draw(shapes, 1, ml_dtypes.bfloat16)
    return Built((params, tx.init(params)), step, grads, lambda carry: carry[0])


def apply(tx, carry, grads):
    updates, state = tx.update(grads, carry[1], carry[0])
    return optax.apply_updates(carry[0], updates), state


def build_chain(shapes, rule, skips=False):
    """The same with f32 gradients and clipping, and with updates that may be left out."""
    adamw = optax.adamw(1e-4, weight_decay=1e-2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def step(carry, inputs):
        (params, state), (grads, finite) = carry, inputs
        if not skips:
            return apply(tx, carry, grads)
        return tuple(mpx.optimizer_update(params, tx, state, grads, finite))

    params, grads = (draw(shapes, seed, np.float32) for seed in (0, 1))
    start = params, tx.init(params)
    return Built(start, step, (grads, jnp.array(True)), lambda carry: carry[0])


def build_flash(shapes, tx, weights):
    """bf16 parameters, compressed state."""
    params, grads = (draw(shapes, seed, ml_dtypes.bfloat16) for seed in (0, 1))
    step = lambda carry, grads: tuple(tx.step(*carry, grads))  # noqa: E731
    return Built((params, tx.init(params)), step, grads, weights)


def build_mpx(shapes, rule, **options):
    tx = getattr(mpx.optim, f"flash_{rule}")(**OPTIONS[rule], **options)
    return build_flash(shapes, tx, lambda carry: mpx.optim.master_params(*carry))


def build_flashoptim_jax(shapes, rule):
    """flashoptim-jax with its kernels; without them where there is no GPU."""
    import flashoptim_jax as peer  # pyright: ignore[reportMissingImports]

    fused = jax.default_backend() == "gpu"
    tx = getattr(peer, f"flash_{rule}")(**OPTIONS[rule], fused=fused)
    weights = lambda carry: peer.reconstruct_weights(carry[0], carry[1].ecc)  # noqa: E731
    return build_flash(shapes, tx, weights)


def build_add(shapes, rule):
    """`x + 1` in place, over as many bytes as mpx reads and writes for each parameter."""
    tx: Any = getattr(mpx.optim, f"flash_{rule}")(**OPTIONS[rule])
    arrays = []
    for leaf in jax.tree.leaves(shapes):
        param = {"x": jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)}
        stored = jax.tree.leaves((param, tx.init(param)))
        kept = sum(x.size * x.dtype.itemsize for x in stored if x.shape != ())
        moved = 2 * kept + 2 * param["x"].size
        arrays.append(jax.device_put(np.zeros(-(-moved // 8), np.float32)))
    step = lambda carry, _: jax.tree.map(lambda x: x + 1, carry)  # noqa: E731
    return Built((arrays,), step, {})


def build_seen(shapes, rule, look):
    """Sums of what is seen of f32 gradients, which are not used otherwise."""
    grads = draw(shapes, 1, np.float32)
    step = lambda carry, grads: (carry[0] + look(grads),)  # noqa: E731
    start = jax.eval_shape(look, grads)
    return Built((jnp.zeros(start.shape, jnp.float32),), step, grads)


# In the order in which they run and stand in the table.
MODES: dict[str, Any] = {
    "add": build_add,
    "optax": build_optax,
    "mpx": build_mpx,
    "mpx-plain": functools.partial(build_mpx, backend="jax"),
    "flashoptim-jax": build_flashoptim_jax,
}
DEFAULT = ",".join(["copy", *MODES])
MODES |= {
    "copy": None,
    "torch": None,
    "muon-fp8": functools.partial(build_mpx, ns_dtype=jnp.float8_e4m3fn),
    # f32 gradients, clipped; a step that is not finite is left out.
    "chain": build_chain,
    "chain-select": functools.partial(build_chain, skips=True),
    # What is looked at in a step, without an optimizer.
    "finite": functools.partial(build_seen, look=mpx.all_finite),
    "stats": functools.partial(
        build_seen, look=lambda grads: mpx.inspect.exponent_stats(grads).counts
    ),
}


# --- one mode on one workload, in its own process -----------------------------------------


def run_copy(options):
    """Returns the bytes a second of a copy on the device, read and written."""
    size = 2**20 if jax.default_backend() == "cpu" else 2**28
    array = jnp.zeros(size, jnp.float32)
    ms = measure.time_call(jax.jit(jnp.copy), array, runs=10, groups=options.calls)
    return {"ms": ms, "rate": 2 * array.nbytes / ms * 1e3}


def run_torch(shapes, options):
    """Times PyTorch's fused optimizer on f32 parameters, with f32 gradients."""
    import torch  # pyright: ignore[reportMissingImports]

    names = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
    if options.optimizer not in names:
        sys.exit(f"PyTorch has no {options.optimizer}.")
    renamed = {"learning_rate": "lr"}
    given = {renamed.get(k, k): v for k, v in OPTIONS[options.optimizer].items()}
    sizes = [x.shape for x in jax.tree.leaves(shapes)]
    params = [torch.nn.Parameter(torch.randn(x, device="cuda")) for x in sizes]
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer = getattr(torch.optim, names[options.optimizer])(
        params, fused=True, **given
    )
    times = []
    for _ in range(2 + options.calls):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(options.steps):
            optimizer.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / options.steps * 1e3)
    state = [x for each in optimizer.state.values() for x in each.values()]
    kept, read_only = (
        sum(x.nbytes for x in tensors if x.is_cuda)
        for tensors in ([*params, *filter(torch.is_tensor, state)],
                        [param.grad for param in params])
    )  # fmt: skip
    times = times[2:]
    return {
        "ms": statistics.median(times),
        "ms_low": min(times),
        "ms_high": max(times),
        "params": sum(x.numel() for x in params),
        "leaves": len(params),
        "arrays": len(params) + len(state),
        "bytes": 2 * kept + read_only,
        "resident_bytes": kept + read_only,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "trace_s": None,
        "compile_s": None,
        "unchanged": 0,
        "state_bytes": 0,
        "alias_bytes": 0,
    }


def run_mode(name, model, options):
    """Compiles, times and checks one implementation on one workload."""
    shapes = shapes_of(model)
    if name == "torch":
        return run_torch(shapes, options)
    build = functools.partial(MODES[name], shapes, options.optimizer)
    built = build()
    both = built.carry, built.grads
    kept, read_only = (sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in both)
    step, record = measure.compile_step(
        lambda carry, grads: (built.step(carry, grads), None), built.carry, built.grads
    )
    carry, timing = built.carry, {}
    for groups in (1, 4):  # the first compiles
        carry, _, timing = measure.time_steps(
            step,
            carry,
            [built.grads],
            steps=groups * options.group,
            group=options.group,
        )
    record["dispatched_ms"] = timing["ms"]
    carry, looped = time_loop(built, carry, built.grads, options)
    record |= looped | {
        "params": sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)),
        "leaves": len(jax.tree.leaves(shapes)),
        "arrays": len(jax.tree.leaves(built.carry)),
        "bytes": 2 * kept + read_only,
        "resident_bytes": kept + read_only,
        "peak_bytes": measure.peak_bytes(),
    }
    if name == "chain-select":
        old, skipped = jax.tree.map(jnp.copy, carry), (built.grads[0], jnp.array(False))
        carry, looped = time_loop(built, carry, skipped, options)
        record["skipped_ms"] = looped["ms"]
        record["spoilt"] = record["arrays"] - count_equal(old, carry)
        del old
    del carry
    # The checks start from the beginning; the buffers of the timed run are gone by now.
    return record | check(build(), step)


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
    return carry, {k: timing[k] / options.steps for k in ("ms", "ms_low", "ms_high")}


def count_equal(old, new):
    same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), old, new)
    return sum(jax.tree.leaves(same))


def check(built, step):
    """Steps down the quadratic |w|²/2, whose gradient is the parameter itself."""

    @jax.jit
    def loss(weights):
        return sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(weights)) / 2

    @jax.jit
    def gradients(params):
        if isinstance(built.grads, tuple):
            return jax.tree.map(jnp.copy, params), built.grads[1]
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) + 0, params)

    carry = built.carry
    weights = jax.jit(built.weights or (lambda carry: carry[0]))
    # A copy: the parameters of optax are its weights, and will be donated.
    old = jax.tree.map(jnp.copy, weights(carry))
    first = float(loss(old))
    for _ in range(CHECKED):
        grads = gradients(carry[0]) if built.weights else built.grads
        carry, _ = step(carry, grads)
    new = weights(carry)
    losses = {"losses": [first, float(loss(new))]} if built.weights else {}
    return {"unchanged": count_equal(old, new)} | losses


# --- all modes --------------------------------------------------------------------------


def print_table(model, rows, copy):
    first = next(iter(rows.values()))
    count = f"{first['params'] / 1e6:.1f}M parameters in {first['leaves']} arrays"
    print(f"\n{model}: {count}\n")
    base = "chain" if "chain" in rows else "optax"
    times = {name: r["ms"] for name, r in rows.items()}
    beside = lambda name: lambda r: number(ratio(r["ms"], times.get(name)), 3)  # noqa: E731
    us = lambda name: lambda r: number(ratio(r.get(name), 1e-3), 1)  # noqa: E731
    rate = lambda r: r["bytes"] / r["ms"] * 1e3  # noqa: E731
    each = lambda name: lambda r: number(ratio(r.get(name), r["params"]))  # noqa: E731
    measure.print_columns(
        rows.values(),
        ("mode", lambda r: r["case"].partition(":")[0]),
        ("µs", us("ms")),
        ("spread", measure.spread),
        ("TB/s", lambda r: number(rate(r) / 1e12)),
        ("of copy", lambda r: percent(ratio(rate(r), copy), 0)),
        ("× add", beside("add")),
        (f"× {base}", beside(base)),
        ("skipped µs", us("skipped_ms")),
        ("arrays", lambda r: str(r["arrays"])),
        ("dispatched µs", us("dispatched_ms")),
        ("B/param moved", each("bytes")),
        ("resident", each("resident_bytes")),
        ("peak", each("peak_bytes")),
        ("compiled", each("compiled_bytes")),
        ("trace s", lambda r: number(r["trace_s"], 1)),
        ("compile s", lambda r: number(r["compile_s"], 1)),
    )


def failures(rows):
    """Yields what is wrong with each mode."""
    for name, record in rows.items():
        base = rows.get("chain" if name.startswith("chain") else "optax", record)
        if record["unchanged"]:
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
        # Dithering rounds all masters with one threshold: at the end they may all be half a
        # code off, 2⁻¹⁶ of each weight.
        apart = max(0, abs(first - last - reference) - first * 2**-15) / reference
        # Newton-Schulz steps in fp8 make the singular values of small matrices larger.
        if not apart <= (0.2 if name == "muon-fp8" else AGREEMENT):
            yield name, f"its loss falls by {apart:.1%} more or less than optax's"


def main():
    options = measure.read_options(
        __doc__,
        f"models=one,many,vit-base,gpt2 modes={DEFAULT} steps=200 calls=7 group=10 "
        "optimizer=adamw peer=, timeout=300.0 json=str",
    )
    measure.pick(OPTIONS, [options.optimizer])
    if options.models == ["tiny"]:
        options.models = TINY
    if options.child is not None:
        measure.start_child()
        sys.path[:0] = [str(pathlib.Path(path).resolve()) for path in options.peer]
        mode, _, model = options.child.partition(":")
        run = functools.partial(run_mode, mode, model) if model else run_copy
        return measure.end_child(run(options))
    modes = measure.pick(MODES, options.modes)
    cases = [f"{mode}:{model}" for model in options.models for mode in modes]
    cases = ["copy"] * ("copy" in modes) + [x for x in cases if "copy" not in x]
    runs = measure.run_cases(cases, options, shared_cache=False)
    good = {case: run[0] for case, run in runs.items() if "error" not in run[0]}
    failed = {case.partition(":")[0] for case in runs.keys() - good.keys()}
    if not good:
        return 1
    what = f"{options.optimizer}, {options.steps} steps in one call, {options.calls} calls; "
    on_cpu, wrong = measure.print_machine(next(iter(good.values())), what), []
    copy = good.pop("copy", {}).get("rate")
    for model in options.models:
        rows = {mode: good[x] for mode in modes if (x := f"{mode}:{model}") in good}
        if rows:
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
