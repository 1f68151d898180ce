"""Do models that other people wrote train in mixed precision as they do in f32?

    make zoo                                           # installs their packages and runs
    python benchmarks/zoo.py --only GPT-2,KAN          # some of the models
    python benchmarks/zoo.py --routes "amp bf16,fp8"   # some of the routes
    python benchmarks/zoo.py --write                   # and writes docs/zoo.md
    python benchmarks/zoo.py --attention               # whose attention amp recognises

Every model is a class of its package, with a tiny configuration and random weights, and is
trained for 20 steps on one random batch, in a process of its own. The script fails if a
route fails, or ends elsewhere than f32, and no note of the model says why.
"""

import concurrent.futures
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}

from _measure import end_child, pick, read_options, run_child
from _zoo import REGISTRY
from _zoo.page import Row, count, tables, unexplained, write
from _zoo.routes import ROUTES

WORSE = 1.1  # errors of roundings differ by chance
LIMIT = 1800  # seconds of a model
PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"


def main():
    """Runs the models and prints the tables."""
    args = read_options(
        __doc__, f"only= routes=str jobs={os.cpu_count() or 1} write attention"
    )
    routes = args.routes.split(",") if args.routes else ROUTES
    routes = [
        x for x in ROUTES if x in pick(dict.fromkeys(ROUTES), routes) or x == "f32"
    ]
    if args.child:
        from _zoo.measure import measure

        return end_child({"cells": measure(args.child, routes)})
    if args.write and (args.only or args.routes):
        sys.exit("--write needs all models and routes")
    parts = args.only.lower().split(",")
    names = [x for x in REGISTRY if any(part in x.lower() for part in parts)]
    if args.attention:
        return attention(names)
    rows, start = [], time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        started = [pool.submit(run_model, name, routes) for name in names]
        for future in concurrent.futures.as_completed(started):
            rows.append(future.result())
            took = time.monotonic() - start
            print(f"[{took:4.0f} s] {rows[-1].progress()}", flush=True)
    rows.sort(key=lambda row: names.index(row.name))
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


def run_model(name, routes):
    """Measures one model in a process of its own."""
    record: Any = run_child(name, timeout=LIMIT)
    if "error" in record:  # in one line of the table
        error = {"error": " ".join(record["error"].split())[-300:]}
        return Row(name, dict.fromkeys(routes, error), LIMIT)
    return Row(name, record["cells"], record["wall_s"])


if __name__ == "__main__":
    sys.exit(main())
