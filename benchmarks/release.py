"""What gradient release saves in memory, and what it costs in time.

    python benchmarks/release.py                     # 24 layers, 51M parameters
    python benchmarks/release.py --layers 4 --width 64 --tokens 32 --steps 3    # on a CPU
    .venv-gpu/bin/python benchmarks/release.py --h200     # only compiled, after `make gpu-compile`

Both steps start from the same parameters. The script fails if they do not end at the same
losses. See README.md beside this file.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import _h200 as h200
import _measure as measure
import mpx

# How far two curves may be apart on average, as a part of the decrease: the formulas are
# the same, but two programs round differently in bf16.
AGREEMENT = 0.02


def make_params(options):
    """Returns an embedding and a stack of layers, in f32."""
    layers, width, hidden = options.layers, options.width, 4 * options.width
    keys = jax.random.split(jax.random.key(0), 3)

    def normal(key, *shape):
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    return {
        "table": normal(keys[0], options.words, width),
        "up": normal(keys[1], layers, width, hidden),
        "down": normal(keys[2], layers, hidden, width) / 4,
    }


def loss(wrap, params, words, after):
    """A language model without attention: each word predicts the next."""

    def layer(x, weights):
        up, down = weights
        return x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down, None

    x = params["table"][words]
    x, _ = lax.scan(wrap(layer), x, (params["up"], params["down"]))
    logits = (jax.nn.standardize(x) @ params["table"].T).astype(jnp.float32)
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), after[:, None], 1)
    return -jnp.mean(each)


def compile_for_h200(step, options, optimizer):
    """Compiles a step for a GPU that need not be there, and returns what it needs."""
    start = jax.eval_shape(lambda: optimizer.init_from(make_params(options)))
    count = sum(x.size for x in jax.tree.leaves(start.params))
    words = jax.ShapeDtypeStruct((options.tokens,), jnp.int32)
    step = lambda state, batch, step=step: step(*state, *batch)  # noqa: E731
    program = h200.compile_for_one(step, tuple(start), (words, words))
    return {"bytes": measure.planned_memory(program)["temp_bytes"] / count}


def run(step, options, optimizer):
    """Compiles a step, times it, and returns what it needs."""
    state = tuple(jax.jit(lambda: optimizer.init_from(make_params(options)))())
    count = sum(x.size for x in jax.tree.leaves(state[0]))
    shape = (options.tokens,)
    words = jax.random.randint(jax.random.key(1), shape, 0, options.words, jnp.int32)

    def take(state, batch):
        value, params, new = step(*state, *batch)
        return (params, new), value

    batch = [(words, jnp.roll(words, 1))]
    jitted, _, record = measure.compile_step(take, state, batch[0])
    state, warm, _ = measure.time_steps(jitted, state, batch, steps=2, group=1)
    _, values, timing = measure.time_steps(
        jitted, state, batch, steps=options.steps, group=1
    )
    losses = [float(x) for x in warm + values]
    return timing | {"bytes": record["temp_bytes"] / count, "losses": losses}


def main():
    """Runs both steps for both kinds of layers; returns the exit status."""
    options = measure.read_options(
        __doc__, "layers=24 width=512 words=1024 tokens=256 steps=20 h200"
    )
    optimizer = mpx.optim.flash_adamw(1e-3)
    rows, wrong = [], []
    measured = compile_for_h200 if options.h200 else run
    if options.h200:
        jax.config.update("jax_platforms", "cpu")  # no GPU is looked for
    for name, wrap in (("scan and remat", jax.checkpoint), ("scan", lambda f: f)):
        func = functools.partial(loss, wrap)

        def ordinary(params, state, *batch, func=func):
            value, grads = jax.value_and_grad(func)(params, *batch)
            return value, *optimizer.step(params, state, grads)

        def released(params, state, *batch, func=func):
            result = mpx.optim.release(func, optimizer)(params, state, *batch)
            return result.value, result.params, result.state

        old, new = (measured(step, options, optimizer) for step in (ordinary, released))
        rows.append([name, *(f"{x['bytes']:.2f}" for x in (old, new))])
        if options.h200:
            continue
        rows[-1] += [f"{x['ms']:.2f}" for x in (old, new)]
        rows[-1].append(f"{new['ms'] / old['ms']:.3f}")
        apart = np.mean(np.abs(np.subtract(old["losses"], new["losses"])))
        if not apart <= AGREEMENT * (new["losses"][0] - new["losses"][-1]):
            wrong.append(f"{name}: {old['losses']} and {new['losses']}")
    device = "for an H200" if options.h200 else jax.devices()[0].device_kind
    print(
        f"{device}, jax {jax.__version__}; bytes a parameter beside what is donated\n"
    )
    header = ["layers", "bytes", "released", "ms", "released ms", "× time"]
    print(measure.format_table(header[: len(rows[0])], rows))
    if options.h200:
        return 0
    return measure.print_verdict(wrong, "the losses fell, and were the same in both.")


if __name__ == "__main__":
    sys.exit(main())
