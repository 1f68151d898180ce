"""What gradient release saves in memory, and what it costs in time.

    python benchmarks/release.py                     # 24 layers, 51M parameters
    python benchmarks/release.py --layers 4 --width 64 --tokens 32 --steps 3    # on a CPU

Both steps start from the same parameters. The script fails if they do not end at the same
losses. `--json FILE` writes what was measured. See README.md beside this file.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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


def run(step, options, optimizer) -> Any:
    """Compiles a step, times it, and returns what it needs."""
    state = tuple(jax.jit(lambda: optimizer.init_from(make_params(options)))())
    count = sum(x.size for x in jax.tree.leaves(state[0]))
    shape = (options.tokens,)
    words = jax.random.randint(jax.random.key(1), shape, 0, options.words, jnp.int32)
    batch = [(words, jnp.roll(words, 1))]
    program, record = measure.compile_step(step, state, batch[0])
    losses, timing, time_steps = [], {}, measure.time_steps
    for steps in (2, options.steps):
        state, values, timing = time_steps(program, state, batch, steps=steps, group=1)
        losses += map(float, values)
    found = {"bytes": record["temp_bytes"] / count, "losses": losses}
    return timing | found | {"environment": measure.environment()}


def main():
    """Runs both steps for both kinds of layers; returns the exit status."""
    options = measure.read_options(
        __doc__, "layers=24 width=512 words=1024 tokens=256 steps=20 json=str"
    )
    optimizer: Any = mpx.optim.flash_adamw(1e-3)
    rows, wrong, runs = [], [], {}
    for name, wrap in (("scan and remat", jax.checkpoint), ("scan", lambda f: f)):
        func = functools.partial(loss, wrap)

        def ordinary(state, batch, func=func):
            value, grads = jax.value_and_grad(func)(state[0], *batch)
            return tuple(optimizer.step(*state, grads)), value

        def released(state, batch, func=func):
            result = mpx.optim.release(func, optimizer)(*state, *batch)
            return (result.params, result.state), result.value

        old, new = (run(step, options, optimizer) for step in (ordinary, released))
        runs |= {f"{name}: ordinary": [old], f"{name}: released": [new]}
        cells = [f"{x[key]:.2f}" for key in ("bytes", "ms") for x in (old, new)]
        rows.append([name, *cells, f"{new['ms'] / old['ms']:.3f}"])
        apart = np.mean(np.abs(np.subtract(old["losses"], new["losses"])))
        if not apart <= AGREEMENT * (new["losses"][0] - new["losses"][-1]):
            wrong.append(f"{name}: {old['losses']} and {new['losses']}")
    if options.json:
        measure.write_json(options.json, runs)
    print(f"{measure.environment()}; bytes a parameter beside what is donated\n")
    header = ["layers", "bytes", "released", "ms", "released ms", "× time"]
    print(measure.format_table(header, rows))
    return measure.print_verdict(wrong, "the losses fell, and were the same in both.")


if __name__ == "__main__":
    sys.exit(main())
