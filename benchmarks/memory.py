"""Predicted memory of a training step beside what the GPU measures.

    python benchmarks/memory.py                              # ViT-Base, batch 32, 64, 128
    python benchmarks/memory.py --model tiny --batches 8     # try the script on a CPU

The predictions of `mpx.inspect.memory` are made on the host. Each step is then compiled and
run in a process of its own; on a CPU, where there is no peak to measure, it is not.
"""

import argparse
import json
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import _measure as measure
from _measure import Record, number
from _models import (
    SIZES,
    Gpt,
    GptSize,
    Vit,
    gpt_batch,
    gpt_loss,
    make_task,
    vit_batch,
    vit_loss,
)

STEPS = 3
LIMIT = 0.10
NAMES = {
    "f32": "f32",
    "amp-bf16": "amp bf16",
    "amp-f16": "amp f16",
    "flash": "bf16 parameters, flash",
}


def shapes(name: str, batch: int) -> tuple[Any, Any, Any]:
    """Returns the loss, and the shapes of its model and its batch."""
    size, key = SIZES[name], jax.random.key(0)
    if isinstance(size, GptSize):
        model = eqx.filter_eval_shape(Gpt, size, key)
        length = size.context
        make = lambda key: gpt_batch(size, batch, length, key)  # noqa: E731
        return gpt_loss, model, jax.eval_shape(make, key)
    model = eqx.filter_eval_shape(Vit, size, key)
    make = lambda key: vit_batch(size, batch, key)  # noqa: E731
    return vit_loss, model, jax.eval_shape(make, key)


def predict(options: argparse.Namespace, batch: int) -> Record:
    """Returns the predicted peak of each mode, in bytes."""
    import mpx

    loss, model, data = shapes(options.model, batch)
    found = mpx.inspect.memory(loss, model, data)
    return {mode: found[name].peak for mode, name in NAMES.items()}


def run_mode(mode: str, options: argparse.Namespace) -> Record:
    """Runs a few steps; returns the peak of the allocator and that of the compiler."""
    import mpx

    measure.start_child(options.cache)
    task = make_task(options.model, options.batch, batches=1)
    model, batch = task.model, task.batches[0]
    loss = {"f32": task.loss, "amp-f16": mpx.amp(task.loss, "f16")}.get(
        mode, mpx.amp(task.loss, "bf16")
    )
    flash = mpx.optim.flash_adamw(1e-4, weight_decay=1e-2)
    adamw = optax.adamw(1e-4, weight_decay=1e-2)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    if mode == "flash":
        batch = mpx.cast_to_bfloat16(batch)
        params, state = jax.jit(flash.init_from)(params)
    else:
        state = adamw.init(params)

    def step(carry: Any, batch: Any) -> tuple[Any, Any]:
        params, state = carry
        value, grads = jax.value_and_grad(
            lambda params: loss(eqx.combine(params, static), batch).astype(jnp.float32)
        )(params)
        if mode == "flash":
            return tuple(flash.step(params, state, grads)), value
        updates, state = adamw.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), value

    carry = measure.own_small_buffers((params, state))
    del params, state, model, task
    before = measure.peak_bytes()
    jitted, record = measure.compile_step(step, carry, batch)
    for _ in range(STEPS):
        carry, _ = jitted(carry, batch)
    jax.block_until_ready(carry)
    return record | {"peak_bytes": measure.peak_bytes(), "before_bytes": before}


def main() -> int:
    """Prints predictions beside measurements; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="vit-base", choices=SIZES)
    add("--batches", default="32,64,128", help="batch sizes")
    add("--modes", default="f32,amp-bf16,flash", help=f"of {', '.join(NAMES)}")
    add("--timeout", type=float, default=300, help="seconds for one process")
    add("--json", help="append the records to this file, one JSON object a line")
    add("--child", choices=NAMES, help=argparse.SUPPRESS)
    add("--predict", action="store_true", help=argparse.SUPPRESS)
    add("--backend", action="store_true", help=argparse.SUPPRESS)
    add("--batch", type=int, help=argparse.SUPPRESS)
    add("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.backend:
        print(json.dumps({"backend": jax.default_backend()}))
        return 0
    if options.predict:
        print(json.dumps(predict(options, options.batch)))
        return 0
    if options.child:
        print(json.dumps(run_mode(options.child, options)))
        return 0
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    """Runs everything in processes of their own, and prints the table."""
    log, rows, worst = measure.Log(options.json), [], 0.0
    common = ["--model", options.model]
    child = lambda *more: measure.run_child(  # noqa: E731
        __file__, [*common, *more], timeout=options.timeout
    )
    has_gpu = child("--backend").get("backend") == "gpu"
    for batch in map(int, options.batches.split(",")):
        predicted = child("--predict", "--batch", str(batch))
        if "error" in predicted:
            print(predicted["error"])
            return 1
        for mode in options.modes.split(","):
            record: Record = {"peak_bytes": None}
            if has_gpu:
                record = child("--child", mode, "--batch", str(batch))
            if "error" in record:
                print(f"{mode}, batch {batch}: {record['error']}")
                worst = float("inf")
                continue
            measured, expected = record["peak_bytes"], predicted[mode]
            error = None if measured is None else expected / measured - 1
            worst = max(worst, abs(error or 0.0))
            log.write(record | {"mode": mode, "batch": batch, "predicted": expected})
            cells = [expected, measured, record.get("compiled_bytes")]
            cells = [number(None if x is None else x / 1e9) for x in cells]
            off = number(None if error is None else 100 * error, 1, " %")
            rows.append([mode, str(batch), *cells, off])
    header = ["step", "batch", "predicted GB", "measured GB", "compiled GB", "off by"]
    print(measure.format_table(header, rows))
    if not has_gpu:
        print("\nWithout a GPU there is nothing to measure.")
    elif worst > LIMIT:
        print(f"\nA prediction is off by {worst:.1%}; the limit is {LIMIT:.0%}.")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
