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

import argparse
import concurrent.futures
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

from _zoo import REGISTRY
from _zoo.page import Row, summary, unexplained, write
from _zoo.routes import ROUTES

WORSE = 1.1  # errors of roundings differ by chance
PAGE = Path(__file__).parents[1] / "docs" / "zoo.md"


def main():
    """Runs the models and prints the tables."""
    parser = argparse.ArgumentParser(description="Trains models of other packages.")
    parser.add_argument("--only", help="names of models, by commas; parts are enough")
    parser.add_argument("--routes", help=f"of {', '.join(ROUTES)}")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a cell")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument(
        "--attention", action="store_true", help="recognise attention, train nothing"
    )
    parser.add_argument("--json", type=Path, help="a file for the results, by line")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what that file has"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write and (args.only or args.routes) and not args.child:
        parser.error("--write needs all models and routes")
    routes = tuple(args.routes.split(",")) if args.routes else ROUTES
    if unknown := set(routes) - set(ROUTES):
        parser.error(f"no such routes: {', '.join(sorted(unknown))}")
    routes = tuple(x for x in ROUTES if x in routes or x == "f32")
    if args.attention:
        return attention([x for x in REGISTRY if wanted(x, args.only)])
    if args.child:
        from _zoo.measure import measure

        measure(args.child, routes)
        return 0
    names = [x for x in REGISTRY if wanted(x, args.only)]
    start = time.monotonic()
    rows = []
    if args.resume and args.json and args.json.exists():
        saved = [Row(**json.loads(x)) for x in args.json.read_text().splitlines()]
        rows = [row for row in saved if row.name in names and {*routes} <= {*row.cells}]
    todo = [x for x in names if x not in {row.name for row in rows}]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        started = [pool.submit(run_child, name, routes, args.limit) for name in todo]
        for future in concurrent.futures.as_completed(started):
            rows.append(future.result())
            took = time.monotonic() - start
            print(f"[{took:4.0f} s] {rows[-1].progress()}", flush=True)
            if args.json:
                with args.json.open("a") as file:
                    file.write(json.dumps(rows[-1]._asdict()) + "\n")
    rows.sort(key=lambda row: names.index(row.name))
    print("\n" + summary(rows))
    if args.write:
        write(PAGE, rows)
    missing = unexplained(rows)
    for line in missing:
        print(f"not explained: {line}")
    return int(bool(missing))


def attention(names):
    """Prints whose attention is recognised; returns 1 if gradients become worse."""
    import jax

    from _zoo.attention import measure

    worse = 0
    for name in names:
        found = measure(name)
        jax.clear_caches()
        if not found["recognised"] and not found["missed"]:
            print(f"{name}: no attention", flush=True)
            continue
        text = [f"{found['recognised']} recognised"]
        if "error_fused" in found:
            kept, fused = found["error_kept"], found["error_fused"]
            text.append(f"error of gradients {fused:.4f}, op by op {kept:.4f}")
            worse += fused > WORSE * kept
        text += [f"not {n}: {reason}" for reason, n in found["missed"].items()]
        print(f"{name}: {'; '.join(text)}", flush=True)
    return int(worse > 0)


def wanted(name, only):
    """Says whether a part of the name is among those asked for."""
    return only is None or any(part.lower() in name.lower() for part in only.split(","))


def run_child(name, routes, limit):
    """Measures one model in a process of its own, and ends it where a route takes long."""
    started = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, __file__, "--child", name, "--routes", ",".join(routes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    cells = {}
    said = []
    reason = ""
    lines = read_lines(child)
    while not reason:
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            child.kill()
            reason = f"no result in {limit:.0f} s"
            break
        if line is None:
            reason = f"the process ended with {child.wait()}: {' '.join(said[-3:])}"
        elif line.startswith('{"cell"'):
            cell = json.loads(line)
            cells[cell.pop("cell")] = cell
        else:
            said.append(line.strip())
    reason = cells.get("make", {}).get("error", reason)
    for route in routes:
        cells.setdefault(route, {"error": reason})
    return Row(name, cells, round(time.monotonic() - started, 1))


def read_lines(child):
    """Returns a queue of the lines that a process prints; `None` is the end."""
    lines = queue.Queue()

    def read():
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


if __name__ == "__main__":
    sys.exit(main())
