"""What gradient release saves in memory, and what it costs in time.

    python benchmarks/release.py                     # 24 layers, 51M parameters
    python benchmarks/release.py --layers 4 --width 64 --tokens 32 --steps 3    # on a CPU

Both steps start from the same parameters. The script fails if they do not end at the same
losses. See README.md beside this file.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import _measure as measure
import mpx

# Losses in f32 of the same formulas, which two programs may round otherwise.
AGREEMENT = 1e-3


def make_params(options: argparse.Namespace) -> dict[str, Any]:
    """Returns an embedding and a stack of layers, in bf16."""
    layers, width, hidden = options.layers, options.width, 4 * options.width
    keys = jax.random.split(jax.random.key(0), 3)

    def normal(key: Any, *shape: int) -> Any:
        weights = jax.random.normal(key, shape, jnp.bfloat16)
        return weights * jnp.bfloat16(shape[-2] ** -0.5)

    return {
        "table": normal(keys[0], options.words, width),
        "up": normal(keys[1], layers, width, hidden),
        "down": normal(keys[2], layers, hidden, width) / 4,
    }


def loss(wrap: Callable[..., Any], params: Any, words: Any, after: Any) -> Any:
    """A language model without attention: each word predicts the next."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + jax.nn.gelu(x @ up) @ down, None

    x = params["table"][words]
    x, _ = lax.scan(wrap(layer), x, (params["up"], params["down"]))
    logits = (x @ params["table"].T).astype(jnp.float32)
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), after[:, None], 1)
    return -jnp.mean(each)


def run(step: Any, options: argparse.Namespace, optimizer: Any) -> dict[str, Any]:
    """Compiles a step, times it, and returns what it needs."""
    params = make_params(options)
    count = sum(x.size for x in jax.tree.leaves(params))
    state = jax.jit(optimizer.init)(params)
    words = jax.random.randint(
        jax.random.key(1), (options.tokens,), 0, options.words, jnp.int32
    )
    batch = words, jnp.roll(words, 1)
    jitted = jax.jit(step, donate_argnums=(0, 1))
    memory: Any = jitted.lower(params, state, *batch).compile().memory_analysis()
    losses, times = [], []
    for _ in range(options.steps + 2):
        start = time.perf_counter()
        value, params, state = jax.block_until_ready(jitted(params, state, *batch))
        times.append(time.perf_counter() - start)
        losses.append(float(value))
    return {
        "bytes": memory.temp_size_in_bytes / count,
        "ms": statistics.median(times[2:]) * 1e3,
        "losses": losses,
    }


def main() -> int:
    """Runs both steps for both kinds of layers; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in (
        ("layers", 24), ("width", 512), ("words", 1024), ("tokens", 256), ("steps", 20),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    optimizer = mpx.flash_adamw(1e-3)
    rows, wrong = [], []
    for name, wrap in (("scan and remat", jax.checkpoint), ("scan", lambda f: f)):
        func = functools.partial(loss, wrap)

        def ordinary(params: Any, state: Any, *batch: Any, func: Any = func) -> Any:
            value, grads = jax.value_and_grad(func)(params, *batch)
            return value, *optimizer.step(params, state, grads)

        def released(params: Any, state: Any, *batch: Any, func: Any = func) -> Any:
            result = mpx.release(func, optimizer)(params, state, *batch)
            return result.value, result.params, result.state

        old, new = (run(step, options, optimizer) for step in (ordinary, released))
        rows.append(
            [
                name,
                *(f"{x['bytes']:.2f}" for x in (old, new)),
                *(f"{x['ms']:.2f}" for x in (old, new)),
                f"{new['ms'] / old['ms']:.3f}",
            ]
        )
        apart = np.max(np.abs(np.subtract(old["losses"], new["losses"])))
        if not (apart <= AGREEMENT and new["losses"][-1] < new["losses"][0]):
            wrong.append(f"{name}: {old['losses']} and {new['losses']}")
    device = jax.devices()[0].device_kind
    print(
        f"{device}, jax {jax.__version__}; bytes a parameter beside what is donated\n"
    )
    header = ["layers", "bytes", "released", "ms", "released ms", "× time"]
    print(measure.format_table(header, rows))
    for text in wrong:
        print(f"CHECK FAILED {text}")
    if not wrong:
        print("\nChecks passed: the losses fell, and were the same with both steps.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
