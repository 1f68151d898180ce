"""Trains a language model on real text in bf16 and in fp8, over several seeds.

    python benchmarks/fp8_text.py                  # an NVIDIA GPU with fp8 units
    python benchmarks/fp8_text.py --tiny           # try the script on a CPU

The text is Python's own language reference, about half a megabyte of English prose and
code that comes with every Python (`pydoc_data.topics`). The model reads bytes. The last
tenth of each topic is held out; the loss on it is in nats per byte.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _fp8 import Size, lm_loss, lm_params
from _measure import environment, format_table, number

POLICY = "p=f32,c=bf16,o=f32"
LARGE = Size(2048, 8192, layers=4, heads=16, vocab=256, batch=16, length=1024)
TINY = Size(64, 128, layers=2, heads=2, vocab=256, batch=4, length=64)


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes that were held out."""
    train, held_out = [], []
    for _, text in sorted(topics.topics.items()):
        data = text.encode()
        cut = len(data) * 9 // 10
        train.append(data[:cut])
        held_out.append(data[cut:])
    read = lambda parts: np.frombuffer(b"\n".join(parts), np.uint8)  # noqa: E731
    return read(train), read(held_out)


def batches(data: np.ndarray, size: Size, seed: int) -> Any:
    """Random pieces of the text, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - size.length - 1, size.batch)
        yield np.stack([data[i : i + size.length + 1] for i in starts]).astype(np.int32)


def make_steps(mode: str, size: Size, options: Any) -> tuple[Any, Any, Any, float]:
    """The jitted training step and evaluation, the optimizer, and the share in fp8."""
    loss = functools.partial(lm_loss, heads=size.heads)
    func: Any = lambda params, tokens: loss(params, tokens)  # noqa: E731
    share = 0.0
    if mode == "fp8":
        every_size: Any = {"min_gain": 0} if options.tiny else {}
        func = mpx.fp8(func, **every_size)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10 + 1, options.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    gradient = mpx.value_and_grad(func, policy=POLICY)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state: Any, tokens: Any) -> Any:
        params, opt_state = state
        result = gradient(mpx.NoLossScaling(), params, tokens)
        updates, opt_state = optimizer.update(result.grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), result.value

    @jax.jit
    def evaluate(params: Any, tokens: Any) -> Any:
        # Both are judged in bf16: what differs is how they were trained.
        return loss(mpx.cast_tree(params, jnp.bfloat16), tokens)

    if mode == "fp8":
        low = jax.eval_shape(
            lambda: mpx.cast_tree(lm_params(size, jax.random.key(0)), jnp.bfloat16)
        )
        shape = (size.batch, size.length + 1)
        report = mpx.inspect.report(func, low, jax.ShapeDtypeStruct(shape, jnp.int32))
        print(report, flush=True)
        share = report.fp8.share if report.fp8 is not None else 0.0
    return train, evaluate, optimizer, share


def run(seed: int, steps: Any, size: Size, text: Any, options: Any) -> Any:
    """Trains once; returns the losses on the training and on the held-out text."""
    train, evaluate, optimizer, _ = steps
    params = lm_params(size, jax.random.key(seed))
    state = (params, optimizer.init(params))
    source = batches(text[0], size, seed)
    held_out = batches(text[1], size, 0)
    tests = [next(held_out) for _ in range(options.tests)]
    losses, curve = [], []
    for step in range(1, options.steps + 1):
        state, loss = train(state, next(source))
        losses.append(loss)
        if step % options.every == 0 or step == options.steps:
            values = [float(evaluate(state[0], test)) for test in tests]
            curve.append([step, statistics.mean(values)])
    return [float(x) for x in jax.device_get(losses)], curve


def report(final: dict[str, list[float]], best: dict[str, list[float]]) -> bool:
    """Prints the table and whether fp8 ends within the spread of bf16."""
    rows = [
        [
            mode,
            *(number(x, 4) for x in final[mode]),
            number(statistics.mean(final[mode]), 4),
            number(statistics.mean(best[mode]), 4),
        ]
        for mode in final
    ]
    seeds = [f"seed {i}" for i in range(len(final["bf16"]))]
    print(format_table(["held out, nats/byte", *seeds, "mean", "mean of best"], rows))
    if len(final) < 2:
        return True
    spread = max(final["bf16"]) - min(final["bf16"])
    apart = statistics.mean(final["fp8"]) - statistics.mean(final["bf16"])
    good = apart <= spread
    print(
        f"fp8 ends {apart:+.4f} from bf16; the bf16 seeds are {spread:.4f} apart:"
        f" {'within the spread' if good else 'OUTSIDE the spread'}"
    )
    return good


def main() -> int:
    """Trains all seeds in both precisions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--modes", default="bf16,fp8")
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=300)
    add("--every", type=int, default=25, help="steps between two evaluations")
    add("--tests", type=int, default=4, help="held-out batches")
    add("--rate", type=float, default=3e-4)
    add("--tiny", action="store_true")
    add("--json", help="write the curves to this file")
    options = parser.parse_args()
    size = TINY if options.tiny else LARGE
    text = read_text()
    machine = environment()
    print(
        f"{machine['device']}, jax {machine['jax']}; {len(text[0])} bytes to train on,"
        f" {len(text[1])} held out; {size}",
        flush=True,
    )
    curves, final, best = {}, {}, {}
    for mode in options.modes.split(","):
        steps = make_steps(mode, size, options)
        for seed in range(options.seeds):
            start = time.perf_counter()
            losses, curve = run(seed, steps, size, text, options)
            seconds = time.perf_counter() - start
            curves[f"{mode}-{seed}"] = {"train": losses, "held_out": curve}
            final.setdefault(mode, []).append(curve[-1][1])
            best.setdefault(mode, []).append(min(value for _, value in curve))
            told = " ".join(f"{step}:{value:.4f}" for step, value in curve)
            print(f"{mode} seed {seed}, {seconds:.1f} s: {told}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "size": str(size), "curves": curves}, file)
    return int(not report(final, best))


if __name__ == "__main__":
    sys.exit(main())
