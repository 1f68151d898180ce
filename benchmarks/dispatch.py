"""What the host pays to dispatch a step of an optimizer, beside optax in f32.

    python benchmarks/dispatch.py                    # ViT-Base, and the same tree of small arrays
    python benchmarks/dispatch.py --models narrow    # try the script on a CPU

The host flattens the arguments of a jitted step, passes every array to the program and
wraps every result. All ways run in one process in turns, on the tree of an Equinox model
and bf16 gradients, with parameters and state donated:

- "arrays" is a call of a program without kernels: what the arrays alone cost;
- "sent" is the time until a step returns to the host, while others are still running;
- "step" is the time of a step from end to end, many in a row.

For the same state with an array for each moment, scale and correction ("apart"), only the
arrays are timed. Two checks: a step changes every parameter and array of the state, and the
state that the step packs holds the bits that NumPy packs.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import _measure as measure
import mpx
from _measure import number
from _models import SIZES, Vit, VitSize

# The leaves of ViT-Base, so small that the device has nothing to do.
NARROW = VitSize(image=32, patch=8, features=64, hidden=128, heads=4, classes=64)
MODELS = {"vit-base": SIZES["vit-base"], "narrow": NARROW}
RATE = 1e-3


@dataclasses.dataclass
class Way:
    """One way to keep parameters and state.

    Attributes:
        carry: Parameters and state.
        step: `step(carry, grads) -> carry`; `None` if only the arrays are timed.
    """

    carry: Any
    step: Callable[[Any, Any], Any] | None


def build(size: Any) -> tuple[dict[str, Way], Any]:
    """Returns the ways by name, and gradients."""
    model = eqx.filter(eqx.filter_jit(Vit)(size, jax.random.key(0)), eqx.is_array)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    grads = jax.tree.map(lambda x: x + 1, half)
    plain, ours = optax.adamw(RATE), mpx.optim.flash_adamw(RATE)

    def optax_step(carry: Any, grads: Any) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def mpx_step(carry: Any, grads: Any) -> Any:
        params, state = carry
        return tuple(ours.step(params, state, grads))

    state: Any = ours.init(half)
    apart = (state.count, state.mu, state.nu, state.correction, state.layout)
    ways = {
        "optax": Way((model, plain.init(model)), optax_step),
        "apart": Way((half, apart), None),
        "mpx": Way((half, state), mpx_step),
    }
    for way in ways.values():  # donated arrays must not be shared
        way.carry = jax.tree.map(jnp.copy, way.carry)
    return ways, grads


def time_calls(
    call: Callable[[Any], Any], carry: Any, calls: int
) -> tuple[Any, float, float]:
    """Returns the last result, and µs per call: to send it, and until all are done."""
    jax.block_until_ready(carry)
    start = time.perf_counter()
    for _ in range(calls):
        carry = call(carry)
    sent = time.perf_counter()
    jax.block_until_ready(carry)
    done = time.perf_counter()
    return carry, (sent - start) / calls * 1e6, (done - start) / calls * 1e6


def run_model(size: Any, calls: int, repeat: int) -> dict[str, dict[str, float]]:
    """Times all ways in turns; returns medians by way."""
    ways, grads = build(size)
    bare = jax.jit(lax.optimization_barrier, donate_argnums=0)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    jitted = {
        name: jax.jit(way.step, donate_argnums=0)
        for name, way in ways.items()
        if way.step is not None
    }
    for turn in range(repeat + 1):  # the first one compiles
        for name, way in ways.items():
            found = {}
            way.carry, _, found["arrays"] = time_calls(bare, way.carry, calls)
            if name in jitted:
                step = jitted[name]
                way.carry, found["sent"], found["step"] = time_calls(
                    lambda carry, step=step: step(carry, grads), way.carry, calls
                )
            for key, value in found.items():
                if turn:
                    samples[name].setdefault(key, []).append(value)
    medians = {
        name: {key: statistics.median(values) for key, values in found.items()}
        for name, found in samples.items()
    }
    for name, way in ways.items():
        medians[name]["count"] = len(jax.tree.leaves(way.carry))
    return medians


def print_model(name: str, rows: dict[str, dict[str, float]]) -> bool:
    """Prints a table; returns whether mpx is dispatched at least as fast as optax."""
    print(f"\n{name}\n")
    columns = ("arrays", "sent", "step")
    header = ["", "count", *(f"{c}, µs" for c in columns), *(f"× {c}" for c in columns)]
    base, table = rows["optax"], []
    for way, row in rows.items():
        ratios = [row[c] / base[c] if c in row else None for c in columns]
        table.append(
            [way, f"{row['count']:.0f}"]
            + [number(row.get(c), 0) for c in columns]
            + [number(r, 3) for r in ratios]
        )
    print(measure.format_table(header, table))
    # A CPU takes longer for the step than the host does to send it.
    counted = columns if jax.default_backend() != "cpu" else columns[:1]
    met = all(rows["mpx"][c] <= base[c] for c in counted)
    print(
        f"mpx: at most the time of optax in {', '.join(counted)}: "
        f"{'met' if met else 'MISSED'}"
    )
    return met


def problems() -> list[str]:
    """Checks steps of a small model, in every backend that runs here."""
    found = []
    params = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(64, 96)), jnp.bfloat16),
        "odd": jnp.linspace(-1, 1, 70 * 70, dtype=jnp.bfloat16).reshape(70, 70),
        "bias": jnp.linspace(-1, 1, 33, dtype=jnp.bfloat16),
    }
    for backend in ("auto", "jax"):
        optimizer = mpx.optim.flash_adamw(RATE, backend=backend)
        before: Any = optimizer.init(params)
        after: Any = jax.jit(optimizer.step)(params, before, params)
        arrays = zip(
            jax.tree.leaves((params, before.packed)),
            jax.tree.leaves((after.params, after.state.packed)),
            strict=True,
        )
        if any(bool(jnp.all(x == y)) for x, y in arrays):
            found.append(f"{backend}: an array did not change")
        state = jax.device_get(after.state)
        views = jax.device_get((after.state.mu, after.state.nu, after.state.correction))
        for name in params:
            mu, nu, correction = (tree[name] for tree in views)
            packed = state.packed[name]
            rows = [(packed.codes, [mu, nu, correction])]
            if packed.scales is not None:
                rows = [(packed.codes, [mu.codes, nu.codes, correction])]
                rows.append((packed.scales, [mu.scale, nu.scale]))
            for planes, parts in rows:
                if not np.array_equal(planes, numpy_planes(parts)):
                    found.append(f"{backend}: `{name}` is not packed as it reads")
    return found


def numpy_planes(parts: list[np.ndarray]) -> np.ndarray:
    """Packs arrays into words of the narrowest, high words first."""
    width = min(part.dtype.itemsize for part in parts)
    planes = []
    for part in parts:
        words = np.ascontiguousarray(part)[..., None].view(f"u{width}")
        planes += [words[..., i] for i in reversed(range(words.shape[-1]))]
    return np.stack(planes)


def main() -> int:
    """Checks and times; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--models", default=",".join(MODELS), help="of " + str([*MODELS])
    )
    parser.add_argument("--calls", type=int, default=30, help="calls in a row")
    parser.add_argument(
        "--repeat", type=int, default=9, help="turns; the median counts"
    )
    parser.add_argument("--strict", action="store_true", help="a missed target fails")
    options = parser.parse_args()
    measure.start_child(None)
    wrong = problems()
    machine = measure.environment()
    print(f"{machine['device']}, jax {machine['jax']}, Python {machine['python']}")
    met = [
        print_model(name, run_model(MODELS[name], options.calls, options.repeat))
        for name in options.models.split(",")
    ]
    for problem in wrong:
        print(f"CHECK FAILED {problem}")
    if not wrong:
        print(
            "\nChecks passed: every array changes, and the planes hold what they should."
        )
    return int(bool(wrong) or (options.strict and not all(met)))


if __name__ == "__main__":
    sys.exit(main())
