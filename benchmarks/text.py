"""Trains a language model on real text in bf16 and in fp8, over several seeds.

    python benchmarks/text.py                      # a GPU with fp8 units
    python benchmarks/text.py --tiny               # try the script on a CPU

The text is Python's own language reference, about half a megabyte of English prose and
code that comes with every Python (`pydoc_data.topics`). The model reads bytes. The last
tenth of each topic is held out; the loss on it is in nats per byte. fp8 must end within
the spread of the seeds of bf16.
"""

import functools
import statistics
import sys
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _measure import environment, format_table, number, read_options, time_steps
from _models import Decoder

POLICY = "p=f32,c=bf16,o=f32"
LARGE = Decoder(4, 2048, 8192, 16, 16, 256, 16, 1024, gated=False)
TINY = Decoder(2, 64, 128, 2, 2, 256, 4, 64, gated=False)
RATE, EVERY, TESTS = 3e-4, 25, 4  # every so often the loss of some batches is taken


def read_text():
    """Bytes to train on, and bytes that were held out."""
    texts = [text.encode() for _, text in sorted(topics.topics.items())]
    parts = zip(*((x[: (n := len(x) * 9 // 10)], x[n:]) for x in texts), strict=True)
    return [np.frombuffer(b"\n".join(part), np.uint8) for part in parts]


def batches(data, size, seed):
    """Random pieces of the text, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - size.length - 1, size.sequences)
        yield np.stack([data[i : i + size.length + 1] for i in starts]).astype(np.int32)


def make_steps(func, loss, count):
    """Returns the optimizer, the jitted step, and the jitted evaluation.

    `func` is the loss as it is trained.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, count // 10 + 1, count)
    optimizer = optax.adamw(rate)
    gradient = mpx.value_and_grad(func, policy=POLICY)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, tokens):
        params, opt_state = state
        result = gradient(mpx.NoLossScaling(), params, tokens)
        clip = jnp.minimum(1.0, 1.0 / optax.global_norm(result.grads))
        grads = jax.tree.map(lambda x: x * clip, result.grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), result.value

    @jax.jit
    def evaluate(params, tokens):
        # All are judged in bf16: what differs is how they were trained.
        return loss(mpx.cast_tree(params, jnp.bfloat16), tokens)

    return optimizer, train, evaluate


def run(seed, size, steps, text, count):
    """Trains once; returns losses on held-out text, and the least time of a step in ms."""
    optimizer, train, evaluate = steps
    params = jax.jit(size.init)(jax.random.key(seed))
    state = params, jax.jit(optimizer.init)(params)
    del params
    source, held_out = batches(text[0], size, seed), batches(text[1], size, 0)
    tests = [next(held_out) for _ in range(TESTS)]
    curve, times = {}, []
    for first in range(0, count, EVERY):
        group = min(EVERY, count - first)
        tokens = [jnp.asarray(next(source)) for _ in range(group)]
        jax.block_until_ready(tokens)
        state, _, timing = time_steps(train, state, tokens, steps=group, group=group)
        times.append(timing["ms"])
        values = [float(evaluate(state[0], test)) for test in tests]
        curve[first + group] = statistics.mean(values)
    return curve, min(times)


def main():
    """Trains all seeds in both modes; returns whether fp8 ends elsewhere."""
    options = read_options(__doc__, "seeds=3 steps=300 tiny")
    size, text, machine = TINY if options.tiny else LARGE, read_text(), environment()
    kernel = "cudnn" if machine["backend"] == "gpu" else "xla"
    loss = functools.partial(size.loss, attention=kernel)
    print(
        f"{machine['device']}, jax {machine['jax']}; {len(text[0])} bytes to train on,"
        f" {len(text[1])} held out; {size}",
        flush=True,
    )
    params = jax.eval_shape(lambda: mpx.cast_tree(size.init(jax.random.key(0)), "bf16"))
    tokens = jax.ShapeDtypeStruct((size.sequences, size.length + 1), jnp.int32)
    print(mpx.inspect.report(mpx.fp8(loss), params, tokens), flush=True)
    final, rows, means = {}, [], []
    low = mpx.fp8(loss, min_gain=0 if options.tiny else 1.1)
    for mode, func in (("bf16", loss), ("fp8", low)):
        steps, times = make_steps(func, loss, options.steps), []
        for seed in range(options.seeds):
            curve, spent = run(seed, size, steps, text, options.steps)
            final.setdefault(mode, []).append(curve[options.steps])
            times.append(spent)
            told = " ".join(f"{step}:{value:.4f}" for step, value in curve.items())
            print(f"{mode} seed {seed}, {spent:.2f} ms/step: {told}", flush=True)
        means.append(statistics.mean(final[mode]))
        ends = [number(x, 4) for x in (*final[mode], means[-1])]
        rows.append([mode, *ends, number(min(times))])
    seeds = [f"seed {i}" for i in range(options.seeds)]
    print(format_table(["held out, nats/byte", *seeds, "mean", "ms/step"], rows))
    apart, spread = means[1] - means[0], max(final["bf16"]) - min(final["bf16"])
    print(
        f"fp8 ends {apart:+.4f} from bf16, whose seeds are {spread:.4f} apart: "
        f"{'within' if apart <= spread else 'OUTSIDE'} the spread"
    )
    return int(apart > spread)


if __name__ == "__main__":
    sys.exit(main())
