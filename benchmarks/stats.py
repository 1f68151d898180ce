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
from mpx.inspect._exponents import BINS

stats = mpx.inspect.exponent_stats
WAYS = {"finite": mpx.all_finite, "stats": lambda grads: stats(grads).counts}


@functools.cache  # drawing each leaf by itself compiles for longer than all else takes
def numbers(size):
    """Numbers of many magnitudes, like gradients, and their counts by NumPy."""
    rng = np.random.default_rng(0)
    x = (1e-5 * rng.standard_normal(size, np.float32) ** 3).astype(np.float32)
    exponents = np.clip(np.frexp(x[x != 0])[1] - 1, -64, 32)
    counts = np.bincount(exponents + 65, minlength=BINS)[:BINS]
    counts[0] = np.sum(x == 0)
    return x, counts


def main():
    options = measure.read_options(__doc__, "model=vit-base")
    measure.start_child()
    shapes = jax.tree.leaves(make_task(options.model, 1, shapes=True).params)
    drawn = [numbers(math.prod(x.shape)) for x in shapes]
    grads = [jax.device_put(x.reshape(like.shape))
             for (x, _), like in zip(drawn, shapes, strict=True)]  # fmt: skip
    size = sum(x.nbytes for x in grads)
    print(f"{measure.environment()}: {len(grads)} leaves, {size // 4} values\n")
    want, rows, base = np.stack([counts for _, counts in drawn]), [], None
    for name, way in WAYS.items():
        call, start = jax.jit(way), time.perf_counter()
        out = jax.block_until_ready(call(grads))
        compile_s, right = time.perf_counter() - start, "–"
        if name == "stats":
            found = np.asarray(out).astype(np.int64)
            found = found[..., 0] + (found[..., 1] << 16)
            right = "yes" if np.array_equal(found, want) else "NO"
        ms = measure.time_call(call, grads)
        base = base or ms
        cells = number(ms, 3), number(ms / base), number(size / ms / 1e9)
        rows.append([name, *cells, number(compile_s, 1), right])
    head = ["alone", "ms", "× finite", "TB/s", "compile s", "right"]
    print(measure.format_table(head, rows))
    return int(any("NO" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
