"""Trains language models on real text in several precisions, over several seeds.

    python benchmarks/text.py                      # bf16 and fp8: a GPU with fp8 units
    python benchmarks/text.py --model decoder --modes f32,amp,amp16
    python benchmarks/text.py --tiny               # try the script on a CPU

The text is Python's own language reference, about half a megabyte of English prose and
code that comes with every Python (`pydoc_data.topics`). The models read bytes. The last
tenth of each topic is held out; the loss on it is in nats per byte. The first mode is the
one that others are compared with: they must end within the spread of its seeds.

Modes:
    f32: f32 with `optax.adamw`; matmuls may run in TF32.
    bf16, fp8: f32 parameters by a policy, with `optax.adamw`.
    amp, amp16: `mpx.amp` with f32 and with bf16 parameters, both with `flash_adamw`.
"""

import functools
import json
import statistics
import sys
import time
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _measure import environment, format_table, number, read_options
from _models import Decoder

POLICY = "p=f32,c=bf16,o=f32"
LARGE = Decoder(4, 2048, 8192, 16, 16, 256, 16, 1024, gated=False)
TINY = Decoder(2, 64, 128, 2, 2, 256, 4, 64, gated=False)


def language_model(tiny):
    """Returns the size, the loss and the first parameters of the model of `fp8.py`."""
    size = TINY if tiny else LARGE
    kernel = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return size, functools.partial(size.loss, attention=kernel), size.init


def decoder(tiny):
    """Returns the same of the decoder of the zoo."""
    from _zoo.decoder import SIZES, decoder
    from _zoo.model import next_token

    size = SIZES["tiny" if tiny else "43M"]
    module = decoder(size)

    def loss(params, ids):
        return next_token(module.apply(params, ids[:, :-1]), ids[:, :-1])

    def init(key):
        return module.init(key, jnp.zeros((1, size.length), jnp.int32))

    return size, loss, init


MODELS = {"lm": language_model, "decoder": decoder}


def read_text():
    """Bytes to train on, and bytes that were held out."""
    train, held_out = [], []
    for _, text in sorted(topics.topics.items()):
        data = text.encode()
        cut = len(data) * 9 // 10
        train.append(data[:cut])
        held_out.append(data[cut:])
    read = lambda parts: np.frombuffer(b"\n".join(parts), np.uint8)  # noqa: E731
    return read(train), read(held_out)


def batches(data, size, seed):
    """Random pieces of the text, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - size.length - 1, size.sequences)
        yield np.stack([data[i : i + size.length + 1] for i in starts]).astype(np.int32)


def make_steps(mode, loss, options):
    """Returns how training starts, the jitted step, and the jitted evaluation."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10 + 1, options.steps
    )
    is_amp = mode.startswith("amp")
    optimizer = mpx.optim.flash_adamw(schedule) if is_amp else optax.adamw(schedule)
    func = loss
    if mode == "fp8":
        every_size = {"min_gain": 0} if options.tiny else {}
        func = mpx.fp8(loss, **every_size)
    policy = None if is_amp else "f32" if mode == "f32" else POLICY
    gradient = mpx.value_and_grad(mpx.amp(func) if is_amp else func, policy=policy)

    @jax.jit
    def start(params):
        if mode == "amp16":
            return tuple(optimizer.init_from(params))
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, tokens):
        params, opt_state = state
        result = gradient(mpx.NoLossScaling(), params, tokens)
        clip = jnp.minimum(1.0, 1.0 / optax.global_norm(result.grads))
        if is_amp:
            state = optimizer.step(params, opt_state, result.grads, grad_scale=clip)
            return tuple(state), result.value
        grads = jax.tree.map(lambda x: x * clip, result.grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), result.value

    @jax.jit
    def evaluate(params, tokens):
        # All are judged in bf16: what differs is how they were trained.
        return loss(mpx.cast_tree(params, jnp.bfloat16), tokens)

    return start, train, evaluate


def show_share(loss, size, init):
    """Prints which matmuls run in fp8."""
    low = jax.eval_shape(lambda: mpx.cast_tree(init(jax.random.key(0)), jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((size.sequences, size.length + 1), jnp.int32)
    print(mpx.inspect.report(mpx.fp8(loss), low, tokens), flush=True)


def run(seed, model, steps, text, options):
    """Trains once.

    Returns:
        The losses on the training text, those on the held-out text, and the time of a step
        in ms: the smallest mean of the steps between two evaluations.
    """
    size, _, init = model
    start, train, evaluate = steps
    state = start(jax.jit(init)(jax.random.key(seed)))
    source, held_out = batches(text[0], size, seed), batches(text[1], size, 0)
    tests = [next(held_out) for _ in range(options.tests)]
    losses, curve, times = [], [], []
    for first in range(0, options.steps, options.every):
        count = min(options.every, options.steps - first)
        tokens = [jnp.asarray(next(source)) for _ in range(count)]
        jax.block_until_ready((state, tokens))
        before = time.perf_counter()
        for batch in tokens:
            state, loss = train(state, batch)
            losses.append(loss)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - before) / count * 1e3)
        values = [float(evaluate(state[0], test)) for test in tests]
        curve.append([first + count, statistics.mean(values)])
    return [float(x) for x in jax.device_get(losses)], curve, min(times)


def report(final, best, times):
    """Prints the table, and whether all end within the spread of the first mode."""
    base, *others = final
    rows = [
        [
            mode,
            *(number(x, 4) for x in final[mode]),
            number(statistics.mean(final[mode]), 4),
            number(statistics.mean(best[mode]), 4),
            number(min(times[mode])),
        ]
        for mode in final
    ]
    seeds = [f"seed {i}" for i in range(len(final[base]))]
    header = ["held out, nats/byte", *seeds, "mean", "mean of best", "ms/step"]
    print(format_table(header, rows))
    spread, good = max(final[base]) - min(final[base]), True
    for mode in others:
        apart = statistics.mean(final[mode]) - statistics.mean(final[base])
        good &= apart <= spread
        print(
            f"{mode} ends {apart:+.4f} from {base}, whose seeds are {spread:.4f} apart:"
            f" {'within the spread' if apart <= spread else 'OUTSIDE the spread'};"
            f" {min(times[mode]) / min(times[base]):.3f}x of its time"
        )
    if {"amp", "amp16"} <= {*times}:
        parts = min(times["amp16"]) / min(times["amp"])
        print(f"bf16 parameters take {parts:.3f}x of the time of f32 parameters")
    return good


def main():
    """Trains all seeds in all modes."""
    options = read_options(
        __doc__,
        "model=lm modes=bf16,fp8 seeds=3 steps=300 every=25 tests=4 rate=0.0003 "
        "tiny json=str",
    )
    model = MODELS[options.model](options.tiny)
    size, loss, init = model
    text, machine = read_text(), environment()
    print(
        f"{machine['device']}, jax {machine['jax']}; {len(text[0])} bytes to train on,"
        f" {len(text[1])} held out; {size}",
        flush=True,
    )
    curves = {}
    final, best, times = {}, {}, {}
    for mode in options.modes:
        if mode == "fp8":
            show_share(loss, size, init)
        steps = make_steps(mode, loss, options)
        for seed in range(options.seeds):
            losses, curve, spent = run(seed, model, steps, text, options)
            curves[f"{mode}-{seed}"] = {"train": losses, "held_out": curve}
            final.setdefault(mode, []).append(curve[-1][1])
            best.setdefault(mode, []).append(min(value for _, value in curve))
            times.setdefault(mode, []).append(spent)
            told = " ".join(f"{step}:{value:.4f}" for step, value in curve)
            print(f"{mode} seed {seed}, {spent:.2f} ms/step: {told}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine, "size": str(size), "curves": curves}, file)
    return int(not report(final, best, times))


if __name__ == "__main__":
    sys.exit(main())
