"""Trains a language model on real text in several modes, over several seeds.

    python benchmarks/text.py                      # a GPU with fp8 units
    python benchmarks/text.py --modes muon,flash-muon,flash-muon-fp8
    python benchmarks/text.py --modes bf16,int8,int8-forward,int8-nearest
    python benchmarks/text.py --size small --rate 1e-3 --modes bf16,nvfp4,no-2d
    python benchmarks/text.py --size tiny          # try the script on a CPU

The text is Python's own language reference, about half a megabyte of English prose and
code that comes with every Python (`pydoc_data.topics`). The model reads bytes. The last
tenth of each topic is held out; the loss on it is in nats per byte. Each mode must end
within the spread of the seeds of the first: `bf16`, and recipes of `mpx.fp8`, with AdamW;
`muon`, optax's in f32, `flash-muon`, in 8 bits with bf16 parameters, and the same with its
matmuls in fp8. NVFP4 is emulated, with and without its parts. `--json FILE` writes what was
measured.
"""

import functools
import statistics
import sys
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from _measure import (
    environment,
    format_table,
    number,
    own_small_buffers,
    pick,
    read_options,
    time_steps,
    write_json,
)
from _models import Decoder

POLICY = "p=f32,c=bf16,o=f32"
TINY = Decoder(2, 64, 128, 2, 2, 256, 4, 64, gated=False)
SIZES = {
    "large": Decoder(4, 2048, 8192, 16, 16, 256, 16, 1024, gated=False),
    "small": Decoder(4, 512, 2048, 8, 8, 256, 16, 512, gated=False),
    "tiny": TINY,
}
NVFP4 = functools.partial(mpx.recipes.NVFP4, emulate=True)
RECIPES = {
    "fp8": mpx.recipes.CurrentScaling(),
    "int8": mpx.recipes.Int8(),
    "int8-forward": mpx.recipes.Int8(backward=False),
    "int8-nearest": mpx.recipes.Int8(rounding="nearest"),
    "nvfp4": NVFP4(),
    "no-hadamard": NVFP4(hadamard=False),
    "no-stochastic": NVFP4(stochastic=False),
    "no-2d": NVFP4(weight_blocks="1d"),
}
MODES = ("bf16", *RECIPES, "muon", "flash-muon", "flash-muon-fp8")
EVERY, TESTS = 25, 4  # every so often the loss of some batches is taken


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


def axes_of(params):
    """Returns the axes of the matrices that Muon steps: those of the layers."""
    axes = optax.contrib.MuonDimensionNumbers(-2, -1)
    layers = {k: None if "norm" in k else axes for k in params["layers"]}
    return jax.tree.map(lambda _: None, params) | {"layers": layers}


def make_optimizer(mode, rate):
    """Returns what makes parameters and state of f32 weights, and what steps them."""
    if mode.startswith("flash"):
        dtype = jnp.float8_e4m3fn if mode.endswith("fp8") else jnp.bfloat16
        flash: Any = mpx.optim.flash_muon(
            rate, consistent_rms=0.2, matrices=axes_of, ns_dtype=dtype
        )
        return flash.init_from, lambda state, grads: tuple(flash.step(*state, grads))
    optimizer = optax.adamw(rate)
    if mode == "muon":
        optimizer = optax.contrib.muon(
            rate, consistent_rms=0.2, muon_weight_dimension_numbers=axes_of
        )

    def step(state, grads):
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), opt_state

    return lambda params: (params, optimizer.init(params)), step


def make_steps(mode, loss, options):
    """Returns the start, the jitted step, and the jitted evaluation."""
    warm = options.steps // 10 + 1
    rate = optax.warmup_cosine_decay_schedule(0.0, options.rate, warm, options.steps)
    start, apply = make_optimizer(mode, rate)
    # What is emulated gains nothing, and a forward pass alone may gain less than 1.1.
    every = 1.1 if mode == "fp8" and options.size == "large" else 0
    func = mpx.fp8(loss, RECIPES[mode], min_gain=every) if mode in RECIPES else loss
    gradient = mpx.value_and_grad(func, policy=POLICY)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, tokens):
        result = gradient(mpx.NoLossScaling(), state[0], tokens)
        clip = jnp.minimum(1.0, 1.0 / optax.global_norm(result.grads))
        grads = jax.tree.map(lambda x: (x * clip).astype(x.dtype), result.grads)
        return apply(state, grads), result.value

    @jax.jit
    def evaluate(params, tokens):
        # All are judged in bf16: what differs is how they were trained.
        return loss(mpx.cast_tree(params, jnp.bfloat16), tokens)

    return start, train, evaluate


def run(seed, size, steps, text, count):
    """Trains once; returns losses on held-out text, and the least time of a step in ms."""
    start, train, evaluate = steps
    state = start(jax.jit(size.init)(jax.random.key(seed)))
    state = own_small_buffers(state)
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
    """Trains all seeds in all modes; returns whether one ends elsewhere."""
    options = read_options(
        __doc__, "seeds=3 steps=300 modes=bf16,fp8 size=large rate=3e-4 json=str"
    )
    pick(dict.fromkeys(MODES), options.modes)
    (size,) = pick(SIZES, [options.size]).values()
    text, machine = read_text(), environment()
    kernel = "cudnn" if machine["backend"] == "gpu" else "xla"
    loss = functools.partial(size.loss, attention=kernel)
    print(
        f"{machine['device']}, jax {machine['jax']}; {len(text[0])} bytes to train on,"
        f" {len(text[1])} held out; {size}",
        flush=True,
    )
    if "fp8" in options.modes:
        key = jax.random.key(0)
        low = jax.eval_shape(lambda: mpx.cast_tree(size.init(key), "bf16"))
        tokens = jax.ShapeDtypeStruct((size.sequences, size.length + 1), jnp.int32)
        print(mpx.inspect.report(mpx.fp8(loss), low, tokens), flush=True)
    final, rows, means, runs = {}, [], [], {}
    for mode in options.modes:
        steps, times, curves = make_steps(mode, loss, options), [], {}
        for seed in range(options.seeds):
            curve, spent = run(seed, size, steps, text, options.steps)
            final.setdefault(mode, []).append(curve[options.steps])
            times.append(spent)
            curves[seed] = curve
            told = " ".join(f"{step}:{value:.4f}" for step, value in curve.items())
            print(f"{mode} seed {seed}, {spent:.2f} ms/step: {told}", flush=True)
        runs[mode] = [{"ms": min(times), "curves": curves, "environment": machine}]
        if options.json:
            write_json(options.json, runs)
        means.append(statistics.mean(final[mode]))
        ends = [number(x, 4) for x in (*final[mode], means[-1])]
        rows.append([mode, *ends, number(min(times))])
    seeds = [f"seed {i}" for i in range(options.seeds)]
    print(format_table(["held out, nats/byte", *seeds, "mean", "ms/step"], rows))
    base = options.modes[0]
    spread, outside = max(final[base]) - min(final[base]), 0
    for mode, mean in zip(options.modes[1:], means[1:], strict=True):
        apart = mean - means[0]
        outside += apart > spread
        print(
            f"{mode} ends {apart:+.4f} from {base}, whose seeds are {spread:.4f} apart: "
            f"{'within' if apart <= spread else 'OUTSIDE'} the spread"
        )
    return outside


if __name__ == "__main__":
    sys.exit(main())
