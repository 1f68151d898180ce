"""Do models that other people wrote train in mixed precision as they do in f32?

    make zoo                                           # installs their packages and runs
    python benchmarks/zoo.py --only GPT-2,KAN          # some of the models
    python benchmarks/zoo.py --routes "amp bf16,fp8"   # some of the routes
    python benchmarks/zoo.py --write                   # and writes docs/zoo.md
    python benchmarks/zoo.py --seeds 3                 # newer recipes, over several seeds
    python benchmarks/zoo.py --attention               # whose attention amp recognises

Every model is a class of its package, with a tiny configuration and random weights, and is
trained for 20 steps on one random batch, in a process of its own. The script fails if a
route fails, or ends elsewhere than f32, and no note of the model says why. With `--seeds`
some models are trained for longer, on new batches, in routes of their own, and `--write`
replaces that part of the page alone.
"""

import concurrent.futures
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}

from _measure import end_child, pick, read_options, run_child
from _zoo import REGISTRY, seeds
from _zoo.page import (
    Row,
    SeedsRow,
    count,
    seeds_table,
    tables,
    unexplained,
    write,
    write_seeds,
)
from _zoo.routes import ROUTES

WORSE = 1.1  # errors of roundings differ by chance
LIMIT = 1800  # seconds of a model
PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"


def main():
    """Runs the models and prints the tables."""
    args = read_options(
        __doc__, f"only= routes=str jobs={os.cpu_count() or 1} seeds=0 write attention"
    )
    known = seeds.ROUTES if args.seeds else dict.fromkeys(ROUTES, "f32")
    routes = pick(known, args.routes.split(",") if args.routes else known)
    routes = [x for x in known if x in routes or x in known.values()]
    if args.child and args.seeds:
        return end_child({"cells": seeds.measure(args.child, routes, args.seeds)})
    if args.child:
        from _zoo.measure import measure

        return end_child({"cells": measure(args.child, routes)})
    if args.write and (args.only or args.routes):
        sys.exit("--write needs all models and routes")
    parts = args.only.lower().split(",")
    listed, kind = (seeds.TASKS, SeedsRow) if args.seeds else (REGISTRY, Row)
    names = [x for x in listed if any(part in x.lower() for part in parts)]
    if args.attention:
        return attention(names)
    rows, start = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        started = [pool.submit(run_model, name, routes, kind) for name in names]
        for future in concurrent.futures.as_completed(started):
            rows.append(future.result())
            took = time.monotonic() - start
            print(f"[{took:4.0f} s] {rows[-1].progress()}", flush=True)
    rows.sort(key=lambda row: names.index(row.name))
    if args.seeds:
        print(f"\n{seeds_table(rows)}")
        if args.write:
            write_seeds(PAGE, rows)
        return int(any("error" in cell for row in rows for cell in row.cells.values()))
    print("", *tables(rows), count(rows), sep="\n")
    if args.write:
        write(PAGE, rows)
    missing = unexplained(rows)
    for line in missing:
        print(f"not explained: {line}")
    return int(bool(missing))


def attention(names):
    """Prints whose attention is recognised; returns 1 if gradients become worse."""
    import jax

    from _zoo.measure import measure_attention

    worse = 0
    for name in names:
        found, missed, errors = measure_attention(name)
        jax.clear_caches()
        text = [f"{found} recognised" if found or missed else "no attention"]
        if errors:
            text.append("error of gradients {1:.4f}, op by op {0:.4f}".format(*errors))
            worse += errors[1] > WORSE * errors[0]
        text += [f"not {n}: {reason}" for reason, n in missed.items()]
        print(f"{name}: {'; '.join(text)}", flush=True)
    return int(worse > 0)


def run_model(name, routes, kind):
    """Measures one model in a process of its own."""
    record: Any = run_child(name, timeout=LIMIT)
    if "error" in record:  # in one line of the table
        error = {"error": " ".join(record["error"].split())[-300:]}
        return kind(name, dict.fromkeys(routes, error), LIMIT)
    return kind(name, record["cells"], record["wall_s"])


if __name__ == "__main__":
    sys.exit(main())
