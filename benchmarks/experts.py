"""What a layer of experts costs: `lax.ragged_dot` by XLA, in bf16 and in fp8.

    python benchmarks/experts.py              # a Hopper GPU; about 2 minutes
    python benchmarks/experts.py --tune       # times of the kernels by block sizes
    python benchmarks/experts.py --tiny       # try the script on a CPU

Each result is compared with f32 products of each expert alone before it is timed. A time is
that of many calls in a row, which do not wait for each other.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import mpx
from _measure import format_table

BF16, F32 = jnp.bfloat16, jnp.float32


class Size(NamedTuple):
    """Tokens of some width, and experts with so many outputs."""

    tokens: int
    width: int
    outputs: int
    experts: int


SIZES = {
    "many experts": Size(16384, 2048, 1024, 32),
    "large experts": Size(32768, 4096, 8192, 8),
}
TINY = {"tiny": Size(256, 128, 128, 4)}


def group_sizes(size: Size, kind: str) -> np.ndarray:
    """Returns the number of tokens of each expert."""
    if kind == "even":
        return np.full(size.experts, size.tokens // size.experts, np.int32)
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(size.experts, 0.3))
    shares[1] = 0  # an expert without tokens
    counts = np.floor(shares / shares.sum() * size.tokens * 0.97).astype(np.int32)
    return counts  # and tokens without an expert


# --- What is timed --------------------------------------------------------------------


def ragged(p: Array, x: Array, sizes: Array) -> Array:
    """Returns each token times the matrix of its expert."""
    return lax.ragged_dot(x, p, sizes)


def dense(p: Array, x: Array, sizes: Array) -> Array:
    """Returns all tokens times one matrix, which is the same useful work."""
    return x @ p[0]


def batched(p: Array, x: Array, sizes: Array) -> Array:
    """Returns the same for experts with equally many tokens."""
    each = x.reshape(len(p), -1, x.shape[1])
    return jnp.einsum("ecd,edf->ecf", each, p).reshape(len(x), -1)


MODES: dict[str, Callable[..., Any]] = {
    "dense, bf16": dense,
    "ragged_dot, XLA": ragged,
    "amp": mpx.amp(ragged),
    "fp8": mpx.fp8(ragged, min_gain=0),
    "einsum, bf16": batched,
    "einsum, fp8": mpx.fp8(batched, min_gain=0),
}


def forward_and_backward(func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the result and of both gradients."""

    def run(p: Array, x: Array, sizes: Array, grad: Array) -> tuple[Array, ...]:
        out, pull = jax.vjp(lambda p, x: func(p, x, sizes), p, x)
        return out, *pull(grad)

    return run


def seconds(func: Callable[..., Any], args: Sequence[Any], repeats: int) -> float:
    """Returns the median time of a call over five runs of many."""
    out, found = jax.block_until_ready(func(*args)), []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            out = func(*args)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - start) / repeats)
    return statistics.median(found)


# --- What it is compared with ---------------------------------------------------------


@jax.jit
def exact(p: Array, x: Array, sizes: Array, grad: Array) -> tuple[Array, ...]:
    """Returns the result and both gradients in f32, expert by expert."""
    ends = jnp.cumsum(sizes)
    rows = jnp.arange(len(x))
    dot = functools.partial(jnp.dot, precision="highest")

    def one(carry: Any, each: Any) -> tuple[Any, Array]:
        out, dx = carry
        w, start, end = each
        inside = ((rows >= start) & (rows < end))[:, None]
        mine, pulled = jnp.where(inside, x, 0), jnp.where(inside, grad, 0)
        mine, pulled, w = (a.astype(F32) for a in (mine, pulled, w))
        return (out + dot(mine, w), dx + dot(pulled, w.T)), dot(mine.T, pulled)

    zeros = jnp.zeros(grad.shape, F32), jnp.zeros(x.shape, F32)
    (out, dx), dp = lax.scan(one, zeros, (p, ends - sizes, ends))
    return out, dp, dx


@jax.jit
def errors(got: Any, expected: Any) -> list[Array]:
    """Returns the relative errors of some arrays, by their norms."""
    return [
        jnp.linalg.norm(a.astype(F32) - b) / jnp.linalg.norm(b)
        for a, b in zip(got, expected, strict=True)
    ]


# Half a unit in the last place is 2⁻⁹ in bf16, 2⁻⁴ in e4m3 and 2⁻³ in e5m2. Sums of many
# products have errors like those of one.
BOUNDS = {"fp8": (0.06, 0.01, 0.12), "einsum, fp8": (0.06, 0.12, 0.12)}


def draw(size: Size, kind: str) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    p = jax.random.normal(keys[0], (size.experts, size.width, size.outputs), BF16)
    x = jax.random.normal(keys[1], (size.tokens, size.width), BF16)
    grad = jax.random.normal(keys[2], (size.tokens, size.outputs), BF16)
    return p, x, jnp.asarray(group_sizes(size, kind)), grad


def compare(name: str, size: Size, kind: str, repeats: int) -> bool:
    """Checks and times all modes; returns whether all numbers are right."""
    args = draw(size, kind)
    expected, right, times = exact(*args), True, {}
    rows = []
    for mode, func in MODES.items():
        if mode.startswith("einsum") and kind != "even":
            continue
        both = jax.jit(forward_and_backward(func))
        note = ""
        if func is not dense:
            found = [float(e) for e in errors(both(*args), expected)]
            good = all(
                e < b
                for e, b in zip(found, BOUNDS.get(mode, (0.004,) * 3), strict=True)
            )
            right &= good
            note = ", ".join(f"{e:.1e}" for e in found) + ("" if good else " WRONG")
        times[mode] = (
            seconds(jax.jit(func), args[:3], repeats),
            seconds(both, args, repeats),
        )
        rows.append((mode, times[mode], note))
    work = 2 * size.tokens * size.width * size.outputs
    print(f"\n{name}, {kind}: {size}")
    first = times["dense, bf16"]
    table = [
        (
            mode,
            f"{1e3 * t[0]:.3f}",
            f"{t[0] / first[0]:.2f}×",
            f"{1e3 * t[1]:.3f}",
            f"{t[1] / first[1]:.2f}×",
            f"{3 * work / t[1] / 1e12:.0f}",
            note,
        )
        for mode, t, note in rows
    ]
    head = ("mode", "forward ms", "of dense", "with backward ms", "of dense")
    print(format_table((*head, "TFLOP/s", "errors: out, dw, dx"), table), flush=True)
    return right


# --- Block sizes ----------------------------------------------------------------------


# How many programs, and block sizes. The first of each is in use. Each takes seconds to
# compile.
_TUNED: list[tuple[int, tuple[int, ...]]] = [
    (132, (128, 128, 64, 4, 8)),
    (264, (128, 128, 64, 3, 8)),
]
CANDIDATES = {
    "rows": _TUNED,
    "turned": _TUNED,
    "sums": _TUNED,
    "fp8 rows": [(132, (128, 128, 128, 4, 8)), (132, (128, 128, 128, 3, 4))],
}


def tune(size: Size, repeats: int) -> None:
    """Prints the times of the kernels by block sizes."""
    from mpx._ops._experts import _mosaic
    from mpx._ops._experts._plain import Blocks

    p, x, _, grad = draw(size, "even")
    e4m3 = jnp.float8_e4m3fn
    cases: dict[str, tuple[Array, Array]] = {
        "rows": (x, p),
        "turned": (grad, p),
        "sums": (x, grad),
        "fp8 rows": (x.astype(e4m3), p.swapaxes(1, 2).astype(e4m3)),
    }
    sizes = [jnp.asarray(group_sizes(size, kind)) for kind in ("even", "uneven")]
    print("kernel: ms even, uneven, difference from the first, programs, blocks")
    for name, (a, b) in cases.items():
        first = None
        for programs, block in CANDIDATES[name]:
            options: Any = {"dtype": np.dtype(BF16), "blocks": Blocks(*block)}
            options["programs"] = programs
            run = functools.partial(_mosaic.sum_rows, **options)
            if name != "sums":
                options["turned"] = name != "rows"
                run = functools.partial(_mosaic.multiply_rows, **options)
            call = jax.jit(run)
            out = call(a, b, sizes[1]).astype(F32)
            times = [seconds(call, (a, b, each), repeats) for each in sizes]
            first = out if first is None else first
            (error,) = errors([out], [first])
            shown = " ".join(f"{1e3 * t:.4f}" for t in times)
            print(f"{name}: {shown} {error:.1e}", programs, block, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--repeats", type=int, default=50)
    chosen = parser.parse_args()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, mpx {mpx.__version__}")
    if chosen.tune:
        tune(SIZES["many experts"], 20)
        return 0
    repeats = 2 if chosen.tiny else chosen.repeats
    right = True
    for name, size in (TINY if chosen.tiny else SIZES).items():
        for kind in ("even", "uneven"):
            right &= compare(name, size, kind, repeats)
    print("\nAll numbers are right." if right else "\nSome numbers are WRONG.")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
