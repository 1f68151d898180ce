"""What a layer of experts costs: `lax.ragged_dot` by XLA and in a grouped kernel.

    python benchmarks/experts.py               # a Hopper GPU; about 3 minutes
    python benchmarks/experts.py --sizes large --kinds uneven
    python benchmarks/experts.py --sizes tiny  # try the script on a CPU

Each result is compared with f32 products of each expert alone before it is timed. A time is
that of many calls in a row, which do not wait for each other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import _measure as measure
import mpx

BF16, F32 = jnp.bfloat16, jnp.float32


class Size(NamedTuple):
    """Tokens, their width, and the outputs and number of experts."""

    tokens: int
    width: int
    outputs: int
    experts: int


SIZES = {
    "many": Size(16384, 2048, 1024, 32),
    "large": Size(32768, 4096, 8192, 8),
    "tiny": Size(256, 128, 128, 4),
}


def group_sizes(size, kind):
    """Returns the number of tokens of each expert."""
    if kind == "even":
        return np.full(size.experts, size.tokens // size.experts, np.int32)
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(size.experts, 0.3))
    shares[1] = 0  # an expert without tokens; and there are tokens without an expert
    return np.floor(shares / shares.sum() * size.tokens * 0.97).astype(np.int32)


def ragged(p, x, sizes):
    """Returns each token times the matrix of its expert."""
    return lax.ragged_dot(x, p, sizes)


def batched(p, x, sizes):
    """The same for experts with equally many tokens."""
    each = x.reshape(len(p), -1, x.shape[1])
    return jnp.einsum("ecd,edf->ecf", each, p).reshape(len(x), -1)


MODES: dict[str, Callable[..., Any]] = {
    "dense, bf16": lambda p, x, sizes: x @ p[0],  # the same useful work
    "ragged_dot, XLA": ragged,
    "amp": mpx.amp(ragged),
    "einsum, bf16": batched,
    "einsum, fp8": mpx.fp8(batched, min_gain=0),
}


def forward_and_backward(func):
    """Returns a function of the result and of both gradients."""

    def run(p, x, sizes, grad):
        out, pull = jax.vjp(lambda p, x: func(p, x, sizes), p, x)
        return out, *pull(grad)

    return run


def by_expert(p, x, sizes):
    """Returns the products in f32, each expert alone."""
    ends, rows = jnp.cumsum(sizes), jnp.arange(len(x))

    @jax.checkpoint
    def one(out, each):
        w, start, end = each
        inside = ((rows >= start) & (rows < end))[:, None]
        return out + jnp.dot(jnp.where(inside, x, 0), w, precision="highest"), None

    zeros = jnp.zeros((len(x), p.shape[-1]), F32)
    return lax.scan(one, zeros, (p, ends - sizes, ends))[0]


# Half a unit in the last place is 2⁻⁹ in bf16, 2⁻⁴ in e4m3 and 2⁻³ in e5m2. Sums of many
# products have errors like those of one.
BOUNDS = {"einsum, fp8": (0.06, 0.12, 0.12)}


def draw(size, kind):
    keys = jax.random.split(jax.random.key(0), 3)
    p = jax.random.normal(keys[0], (size.experts, size.width, size.outputs), BF16)
    x = jax.random.normal(keys[1], (size.tokens, size.width), BF16)
    grad = jax.random.normal(keys[2], (size.tokens, size.outputs), BF16)
    return p, x, jnp.asarray(group_sizes(size, kind)), grad


def compare(name, size, kind, repeats):
    """Checks and times all modes; returns whether all numbers are right, and the times."""
    args = draw(size, kind)
    p, x, sizes, grad = args
    exact = jax.jit(forward_and_backward(by_expert))
    expected = exact(p.astype(F32), x.astype(F32), sizes, grad.astype(F32))
    right, times, rows = True, {}, []
    work = 2 * size.tokens * size.width * size.outputs
    for mode, func in MODES.items():
        if mode.startswith("einsum") and kind != "even":
            continue
        both, note = jax.jit(forward_and_backward(func)), ""
        if mode != "dense, bf16":
            pairs = list(zip(both(*args), expected, strict=True))
            found = [float(measure.relative_error(*pair)) for pair in pairs]
            bounds = BOUNDS.get(mode, (0.004,) * 3)
            good = all(e < b for e, b in zip(found, bounds, strict=True))
            right &= good
            note = ", ".join(f"{e:.1e}" for e in found) + ("" if good else " WRONG")
        forward = measure.time_call(jax.jit(func), *args[:3], runs=repeats)
        times[mode] = forward, measure.time_call(both, *args, runs=repeats)
        rows.append([mode])
        for ms, base in zip(times[mode], times["dense, bf16"], strict=True):
            rows[-1] += [f"{ms:.3f}", f"{ms / base:.2f}×"]
        rows[-1] += [f"{3 * work / times[mode][1] / 1e9:.0f}", note]
    print(f"\n{name}, {kind}: {size}")
    head = ["mode", "forward ms", "of dense", "with backward ms", "of dense"]
    head += ["TFLOP/s", "errors: out, dw, dx"]
    print(measure.format_table(head, rows), flush=True)
    records = {
        f"{name}, {kind}: {mode}": [
            {"forward_ms": forward, "ms": both, "environment": measure.environment()}
        ]
        for mode, (forward, both) in times.items()
    }
    return right, records


def main():
    options = measure.read_options(
        __doc__, "sizes=many,large kinds=even,uneven json=str"
    )
    print(measure.environment())
    right, runs = True, {}
    for name, size in measure.pick(SIZES, options.sizes).items():
        for kind in options.kinds:
            repeats = 2 if name == "tiny" else 50
            good, records = compare(f"{name} experts", size, kind, repeats)
            right, runs = right and good, runs | records
            if options.json:
                measure.write_json(options.json, runs)
    print("\nAll numbers are right." if right else "\nSome numbers are WRONG.")
    return int(not right)


if __name__ == "__main__":
    raise SystemExit(main())
