"""What statistics of exponents cost beside a finite check; in a step: step.py.

    python benchmarks/stats.py                  # the gradients of ViT-Base/16
    python benchmarks/stats.py --model tiny     # try the script on a CPU
    python benchmarks/step.py --modes mpx-bf16,stats-bf16 --repeat 4

Numbers like those of gradients are counted; the counts must be NumPy's.
"""

import functools
import math
import sys
import time

import jax
import numpy as np

import _measure as measure
import mpx
from _measure import number
from _models import make_task
from mpx.inspect._counting import BINS

stats = mpx.inspect.exponent_stats
WAYS = {
    "finite": mpx.all_finite,
    "stats": lambda grads: stats(grads).counts,
}


# One row of random numbers, cut into leaves: to draw each leaf by itself compiles for
# longer than all else takes.
@functools.cache
def numbers(size):
    """Numbers of many magnitudes, like gradients."""
    rng = np.random.default_rng(0)
    return (1e-5 * rng.standard_normal(size, np.float32) ** 3).astype(np.float32)


@functools.cache
def expected(size):
    """The counts of `numbers` by NumPy."""
    x = numbers(size)
    exponents = np.clip(np.frexp(x[x != 0])[1] - 1, -64, 32)
    counts = np.bincount(exponents + 65, minlength=BINS)[:BINS]
    counts[0] = np.sum(x == 0)
    return counts


def main():
    options = measure.read_options(__doc__, "model=vit-base repeat=20")
    measure.start_child()
    print(measure.environment())
    shapes = jax.tree.leaves(make_task(options.model, 1, shapes=True).params)
    grads = [
        jax.device_put(numbers(math.prod(x.shape)).reshape(x.shape)) for x in shapes
    ]
    size = sum(x.nbytes for x in grads)
    print(f"{len(grads)} leaves, {size // 4} values", flush=True)
    want, rows, base = np.stack([expected(x.size) for x in grads]), [], None
    for name, way in WAYS.items():
        call, start = jax.jit(way), time.perf_counter()
        out = jax.block_until_ready(call(grads))
        compile_s, right = time.perf_counter() - start, "–"
        if name == "stats":
            found = np.asarray(out).astype(np.int64)
            found = found[..., 0] + (found[..., 1] << 16)
            right = "yes" if np.array_equal(found, want) else "NO"
            for leaf, bin_ in np.argwhere(found != want)[:8]:
                counts = f"{found[leaf, bin_]} instead of {want[leaf, bin_]}"
                print(f"leaf {leaf} {grads[leaf].shape}, bin {bin_}: {counts}")
        ms = measure.time_call(call, grads, runs=options.repeat)
        base = base or ms
        rate = number(size / ms / 1e9)
        rows.append([name, number(ms, 3), number(ms / base), rate])
        rows[-1] += [number(compile_s, 1), right]
    head = ["alone", "ms", "× finite", "TB/s", "compile s", "right"]
    print("\n" + measure.format_table(head, rows))
    return int(any("NO" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
