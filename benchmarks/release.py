"""What gradient release saves in memory, and what it costs in time.

    python benchmarks/release.py                     # 24 layers, 51M parameters
    python benchmarks/release.py --layers 4 --width 64 --tokens 32 --steps 3    # on a CPU
    .venv-gpu/bin/python benchmarks/release.py --h200     # only compiled, after `make gpu-compile`

Both steps start from the same parameters. The script fails if they do not end at the same
losses. See README.md beside this file.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import _measure as measure
import mpx

# How far two curves may be apart on average, as a part of the decrease: the formulas are
# the same, but two programs round differently in bf16.
AGREEMENT = 0.02


def make_params(options: argparse.Namespace) -> dict[str, Any]:
    """Returns an embedding and a stack of layers, in f32."""
    layers, width, hidden = options.layers, options.width, 4 * options.width
    keys = jax.random.split(jax.random.key(0), 3)

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    return {
        "table": normal(keys[0], options.words, width),
        "up": normal(keys[1], layers, width, hidden),
        "down": normal(keys[2], layers, hidden, width) / 4,
    }


def loss(wrap: Callable[..., Any], params: Any, words: Any, after: Any) -> Any:
    """A language model without attention: each word predicts the next."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        return x + jax.nn.gelu(jax.nn.standardize(x) @ up) @ down, None

    x = params["table"][words]
    x, _ = lax.scan(wrap(layer), x, (params["up"], params["down"]))
    logits = (jax.nn.standardize(x) @ params["table"].T).astype(jnp.float32)
    each = jnp.take_along_axis(jax.nn.log_softmax(logits), after[:, None], 1)
    return -jnp.mean(each)


def compile_for_h200(
    step: Any, options: argparse.Namespace, optimizer: Any
) -> dict[str, Any]:
    """Compiles a step for a GPU that need not be there, and returns what it needs."""
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
    import h200  # pyright: ignore[reportMissingImports]

    mesh = Mesh(np.array(h200.devices()[:1]), ("x",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    start = jax.eval_shape(lambda: optimizer.init_from(make_params(options)))
    count = sum(x.size for x in jax.tree.leaves(start.params))
    words = jax.ShapeDtypeStruct((options.tokens,), jnp.int32)
    args = *start, words, words
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*args)
        program: Any = lowered.compile(h200.compiler_options())
    return {"bytes": program.memory_analysis().temp_size_in_bytes / count}


def run(step: Any, options: argparse.Namespace, optimizer: Any) -> dict[str, Any]:
    """Compiles a step, times it, and returns what it needs."""
    params, state = jax.jit(lambda: optimizer.init_from(make_params(options)))()
    count = sum(x.size for x in jax.tree.leaves(params))
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


def parse() -> argparse.Namespace:
    """Reads the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, default in (
        ("layers", 24), ("width", 512), ("words", 1024), ("tokens", 256), ("steps", 20),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--h200", action="store_true", help="compile for one, do not run"
    )
    return parser.parse_args()


def main() -> int:
    """Runs both steps for both kinds of layers; returns the exit status."""
    options = parse()
    optimizer = mpx.optim.flash_adamw(1e-3)
    rows, wrong = [], []
    measured = compile_for_h200 if options.h200 else run
    if options.h200:
        jax.config.update("jax_platforms", "cpu")  # no GPU is looked for
    for name, wrap in (("scan and remat", jax.checkpoint), ("scan", lambda f: f)):
        func = functools.partial(loss, wrap)

        def ordinary(params: Any, state: Any, *batch: Any, func: Any = func) -> Any:
            value, grads = jax.value_and_grad(func)(params, *batch)
            return value, *optimizer.step(params, state, grads)

        def released(params: Any, state: Any, *batch: Any, func: Any = func) -> Any:
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
    for text in wrong:
        print(f"CHECK FAILED {text}")
    if not wrong:
        print("\nChecks passed: the losses fell, and were the same with both steps.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
