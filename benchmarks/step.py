"""What a mixed-precision training step costs beside the same step cast by hand.

    python benchmarks/step.py                            # ViT-Base/16, 224², batch 128
    python benchmarks/step.py --modes cudnn-hand,amp-bf16 --optimizer adamw
    python benchmarks/step.py --modes f32,amp-bf16,flash --optimizer adamw --predict
    python benchmarks/step.py --modes mpx-bf16,stats-bf16 --repeat 4
    python benchmarks/step.py --model tiny --steps 40    # try the script on a CPU

Every mode trains the same f32 model on the same data with the same optimizer, in a
process of its own. See README.md beside this file for the modes, the options and the
method.
"""

import math
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import _measure as measure
import mpx
from _measure import giga, number, percent, ratio
from _models import BATCH, SIZES, cast, make_task

HALF = {"bf16": "bfloat16", "f16": "float16"}
EPS = {"bf16": 2.0**-7, "f16": 2.0**-10}
# f16: the static scale by hand and the first one of mpx. They are equal so that both
# steps see the same numbers; whether the scale changes the time is not known.
SCALE = 2.0**10
TAIL = 10  # number of steps whose mean is the last loss
AGREEMENT = 0.02  # distance of two loss curves, as a share of the decrease by hand
FEW = 3  # steps that dynamic scaling may skip while it finds its scale
OPTIMIZERS = {
    "clip": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=1e-2)
    ),
    "adamw": lambda: optax.adamw(1e-4),
}
PREDICTED = {
    "f32": "f32",
    "amp-bf16": "amp bf16",
    "amp-f16": "amp f16",
    "residuals": "amp, int8 residuals",
    "flash": "bf16 parameters, flash",
}


class Mode(NamedTuple):
    """One way to take a training step; `more` has statistics or options of `amp`."""

    dtype: str
    library: str = "hand"
    skip: str = "never"
    more: str = ""

    @property
    def hand(self):
        """The mode this one is compared with."""
        return f"{self.dtype}-hand"


# In the order in which they run: modes that are compared stand close together.
MODES = {
    "bf16-hand": Mode("bf16"),
    "mpx-bf16": Mode("bf16", "mpx", "select"),
    "bf16-hand-check": Mode("bf16", skip="select"),
    "mpx-bf16-never": Mode("bf16", "mpx"),
    "f16-hand": Mode("f16"),
    "mpx-f16": Mode("f16", "mpx", "select"),
    "f16-hand-check": Mode("f16", skip="select"),
    "f32": Mode("f32"),
}
DEFAULT = ",".join(MODES)
MODES |= {
    # The model as it is, cast operation by operation.
    "amp-bf16": Mode("bf16", "amp"),
    "amp-bf16-check": Mode("bf16", "amp", "select"),
    "amp-f16": Mode("f16", "amp"),
    "amp-f16-check": Mode("f16", "amp", "select"),
    # Attention one operation after the other, 8-bit residuals, bf16 parameters, and fp8.
    "amp-keep": Mode("bf16", "amp", more="keep"),
    "residuals": Mode("bf16", "amp", more="int8"),
    "residuals-e4m3": Mode("bf16", "amp", more="e4m3"),
    "flash": Mode("bf16", "flash"),
    "all": Mode("bf16", "flash", more="fp8"),
    "cudnn-hand": Mode("bf16", more="cudnn"),
    "stats-bf16": Mode("bf16", "mpx", "select", "stats"),
}


# --- the steps --------------------------------------------------------------------------
# A builder returns the initial state and `step(state, batch) -> state, (loss, finite)`,
# where the second may have more parts.


def build_by_hand(mode, task, optimizer):
    """Casts parameters and batch inside the loss; f32 master weights; plain optax."""
    scale = SCALE if mode.dtype == "f16" else None

    def loss(params, batch):
        if mode.dtype != "f32":
            params, batch = cast((params, batch), HALF[mode.dtype])
        loss = task.loss(params, batch)
        return loss if scale is None else loss * scale

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        if scale is not None:
            value = value / scale
            grads = jax.tree.map(lambda g: g / scale, grads)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        if mode.skip == "never":
            return new, (value, True)
        flags = [jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]
        finite = jnp.all(jnp.stack(flags))
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return new, (value, finite)

    return (task.params, jax.jit(optimizer.init)(task.params)), step


def build_with_mpx(mode, task, optimizer):
    """`mpx.value_and_grad` and `mpx.optimizer_update`."""
    loss, policy = task.loss, mpx.Policy(compute_dtype=HALF[mode.dtype])
    if mode.library == "amp":
        attention = "keep" if mode.more == "keep" else "fuse"
        kept = mode.more if mode.more in ("int8", "e4m3") else None
        dtype = HALF[mode.dtype]
        loss = mpx.amp(loss, dtype=dtype, attention=attention, residuals=kept)
        policy = None
    value_and_grad = mpx.value_and_grad(loss, policy=policy)
    bf16 = mode.dtype == "bf16"
    scaling = mpx.NoLossScaling() if bf16 else mpx.DynamicLossScaling.pow2(SCALE)

    def step(state, batch):
        params, opt_state, scaling = state
        result = value_and_grad(scaling, params, batch)
        more = ()
        if mode.more.startswith("stats"):
            more = (mpx.inspect.exponent_stats(result.grads),)
        params, opt_state = mpx.optimizer_update(
            params, optimizer, opt_state, result.grads, result.finite, skip=mode.skip
        )
        # A flag that nobody reads costs nothing, so "never" must not return it.
        finite = True if mode.skip == "never" else result.finite
        return (params, opt_state, result.scaling), (result.value, finite, *more)

    return (task.params, jax.jit(optimizer.init)(task.params), scaling), step


def build_compressed(mode, task, optimizer):
    """`mpx.amp` on bf16 parameters with `flash_adamw`, and perhaps `mpx.fp8`."""
    flash: Any = mpx.optim.flash_adamw(1e-4, weight_decay=1e-4)
    loss = mpx.amp(task.loss, dtype="bf16")
    loss = mpx.fp8(loss) if mode.more == "fp8" else loss

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        return tuple(flash.step(*state, grads)), (value, True)

    return tuple(jax.jit(flash.init_from)(task.params)), step


def run_mode(mode, options):
    """Builds, compiles and times one mode."""
    measure.start_child(options.child_cache)
    by_hand = mode.more == "cudnn"
    task = make_task(options.model, options.batch, by_hand=by_hand)
    builders = {"hand": build_by_hand, "flash": build_compressed}
    build = builders.get(mode.library, build_with_mpx)
    state, step = build(mode, task, OPTIMIZERS[options.optimizer]())
    is_flash = mode.library == "flash"
    batches = cast(task.batches, "bfloat16") if is_flash else task.batches
    state = measure.own_small_buffers(state)
    del task
    run, record = measure.compile_step(step, state, batches[0])
    losses, finite, timing = [], [], {}
    for steps in (options.warmup, options.steps):
        state, outputs, timing = measure.time_steps(
            run, state, batches, steps=steps, group=options.group
        )
        values = jax.device_get([x[:2] for x in outputs])
        losses += [float(x) for x, _ in values]
        finite += [bool(x) for _, x in values]
    seen = {"losses": losses, "skipped": finite.count(False)}
    return record | timing | seen | {"peak_bytes": measure.peak_bytes()}


def predict(options):
    """Returns the peak of each mode that `mpx.inspect.memory` predicts, in bytes."""
    task = make_task(options.model, options.batch, shapes=True)
    found = mpx.inspect.memory(task.loss, task.params, task.batches[0])
    return {mode: found[name].peak for mode, name in PREDICTED.items()}


# --- does every mode do the work? -------------------------------------------------------


def last_loss(record):
    return float(np.mean(record["losses"][-TAIL:]))


def distance(record, hand):
    """Mean distance of two loss curves over the decrease of the second.

    One update left out of n shifts a curve by one step: a distance of about 1/n.
    """
    apart = np.abs(np.subtract(record["losses"], hand["losses"])).mean()
    return apart / abs(hand["losses"][0] - last_loss(hand))


def failures(best):
    """Yields what is wrong with the modes."""
    for name, record in best.items():
        mode, losses = MODES[name], record["losses"]
        if not all(map(math.isfinite, losses)):
            yield f"{name}: some losses are not finite"
        elif not last_loss(record) < losses[0]:
            yield f"{name}: the loss rose: {losses[0]:.4f} → {last_loss(record):.4f}"
        outside = record["state_bytes"] - record.get("alias_bytes", math.inf)
        if outside > 0:
            yield f"{name}: {outside} bytes of the state are not updated in place"
        hand = best.get(mode.hand, record)
        # Another optimizer, or attention that rounds elsewhere.
        if hand is record or mode.library == "flash" or mode.more == "cudnn":
            continue
        first, first_hand = losses[0], hand["losses"][0]
        if not abs(first - first_hand) <= EPS[mode.dtype] * first_hand:
            yield f"{name}: the first loss is {first:.5f}, by hand {first_hand:.5f}"
        # An update that was left out, and counted, shifts the curve by one step.
        apart = distance(record, hand)
        if not apart <= AGREEMENT + record["skipped"] / len(losses):
            yield f"{name}: the losses are {apart:.1%} of their decrease from by hand"
        if record["skipped"] > FEW:
            yield f"{name}: {record['skipped']} steps were skipped"
        if not record["fused"] and record["dots"] != hand["dots"]:
            yield f"{name}: matmuls are {record['dots']}, by hand {hand['dots']}"


def print_table(best):
    base = {x: best.get(x, {}) for x in ("f32", "cudnn-hand")}
    hand = lambda r: best.get(MODES[r["case"]].hand, base["cudnn-hand"])  # noqa: E731
    check = lambda r: best.get(f"{MODES[r['case']].hand}-check", {})  # noqa: E731
    peak = lambda r: measure.memory(r) if r else None  # noqa: E731
    predicted = ("predicted GB", lambda r: giga(r.get("predicted")))
    measure.print_columns(
        best.values(),
        ("step", lambda r: r["case"]),
        ("ms", lambda r: number(r["ms"])),
        ("spread", measure.spread),
        ("passes", lambda r: percent(r["between"])),
        ("× hand", lambda r: number(ratio(r["ms"], hand(r).get("ms")), 3)),
        ("× checked", lambda r: number(ratio(r["ms"], check(r).get("ms")), 3)),
        ("vs f32", lambda r: number(ratio(base["f32"].get("ms"), r["ms"]))),
        ("peak GB", lambda r: giga(r["peak_bytes"])),
        ("× hand", lambda r: number(ratio(peak(r), peak(hand(r))), 3)),
        ("compiled GB", lambda r: giga(r.get("compiled_bytes"))),
        *[predicted] * any("predicted" in record for record in best.values()),
        ("fused", lambda r: str(r["fused"])),
        ("trace s", lambda r: number(r["trace_s"], 1)),
        ("compile s", lambda r: number(r["compile_s"], 1)),
        ("loss", lambda r: f"{r['losses'][0]:.3f} → {last_loss(r):.3f}"),
        ("skipped", lambda r: str(r["skipped"])),
    )


def main():
    options = measure.read_options(
        __doc__,
        f"model=vit-base batch=int optimizer=clip modes={DEFAULT} steps=120 warmup=20 "
        "group=10 repeat=2 budget=300.0 timeout=300.0 json=str predict",
    )
    measure.pick(SIZES, [options.model])
    options.batch = options.batch or BATCH.get(options.model, 16)
    if options.child == "predict":
        return measure.end_child(predict(options))
    if options.child is not None:
        return measure.end_child(run_mode(MODES[options.child], options))
    runs = measure.run_cases(measure.pick(MODES, options.modes), options)
    best = measure.best_runs(runs)
    if not best:
        return 1
    if options.predict:
        found = measure.run_child("predict", timeout=options.timeout)
        for name in best.keys() & found.keys():
            best[name]["predicted"] = found[name]
    what = f"{options.model}, batch {options.batch}, {options.steps} steps; "
    on_cpu = measure.print_machine(next(iter(best.values())), what)
    print_table(best)
    failed = measure.print_verdict(
        list(failures(best)),
        "losses finite and falling, state updated in place; beside the step by hand the "
        "same matmuls, the first loss within one ulp of the half dtype, the loss curves "
        f"within {AGREEMENT:.0%} of the decrease.",
        on_cpu,
    )
    return int(failed or len(best) < len(runs))


if __name__ == "__main__":
    sys.exit(main())
