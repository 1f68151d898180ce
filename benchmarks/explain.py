"""Does `mpx.inspect.explain` name planted faults, and stay silent about healthy models?

    python benchmarks/explain.py                          # all
    python benchmarks/explain.py --only rope,equinox      # those whose names contain this
    python benchmarks/explain.py --verbose                # prints each explanation
    python benchmarks/explain.py --zoo                    # the models of `make zoo` as well

A fault counts as named if the source line is the marked one, and the parameter, scope or
function is the expected one. The script fails if fewer than 48 of 50 are named, in
proportion, or if a healthy model raises an alarm.
"""

import argparse
import sys
import time
import traceback

import jax

import mpx
from _faults import HEALTHY, PLANTED, Case, Planted

SHARE = 48 / 50


def explained(case: Case) -> mpx.inspect.Explanation:
    return mpx.inspect.explain(case.func, *case.args, scaling=case.scaling)


def mistakes(planted: Planted, found: mpx.inspect.Explanation) -> list[str]:
    """Returns what is wrong with an explanation."""
    fault = found.fault
    if fault is None:
        return ["not found"]
    if "input" in planted.kinds:
        right = fault.kind == "input" and fault.place.param == planted.path
        return [] if right else ["another place"]
    file, lines = planted.place
    sources = {fault.place.source, fault.caller}
    wanted = {f"{file}:{line}" for line in lines}
    wrong = []
    if not any(x.endswith(y) for x in sources for y in wanted):
        wrong.append(f"line {fault.place.source} instead of {', '.join(wanted)}")
    place = fault.place
    if not any(
        planted.path in x
        for x in (place.param, place.scope, fault.near, place.function)
    ):
        wrong.append(f"path {fault.label} instead of {planted.path}")
    if planted.kinds and fault.kind not in planted.kinds:
        wrong.append(f"kind {fault.kind} instead of {' or '.join(planted.kinds)}")
    if fault.place.backward != planted.backward:
        wrong.append("backward" if fault.place.backward else "forward")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Explains planted faults.")
    parser.add_argument("--only", help="parts of names, by commas")
    parser.add_argument("--verbose", action="store_true", help="print explanations")
    parser.add_argument("--zoo", action="store_true", help="the models of the zoo too")
    args = parser.parse_args()

    def wanted(name: str) -> bool:
        return not args.only or any(x in name for x in args.only.split(","))

    named, faults, alarms, models = 0, 0, 0, 0
    for name, planted in PLANTED.items():
        if not wanted(name):
            continue
        faults += 1
        start = time.monotonic()
        try:
            found = explained(planted.make())
            wrong = mistakes(planted, found)
        except Exception as error:
            traceback.print_exc()
            found, wrong = None, [f"{type(error).__name__}: {error}"]
        took = time.monotonic() - start
        place = [x for x in wrong if not x.startswith(("kind", "forward", "backward"))]
        named += not place
        print(
            f"{'FAIL' if place else 'ok' if not wrong else 'ok?':5} {name:45} {took:5.1f} s  {'; '.join(wrong)}",
            flush=True,
        )
        if found and (args.verbose or place):
            print(found, "\n")
    for name, make in HEALTHY.items():
        if not wanted(name):
            continue
        models += 1
        start = time.monotonic()
        found = explained(make())
        alarms += not found.ok
        worst = max(found.grad_errors.values(), default=0.0)
        print(
            f"{'ok' if found.ok else 'ALARM':5} {name:45} {time.monotonic() - start:5.1f} s  gradient off by {100 * worst:.2g} %",
            flush=True,
        )
        if not found.ok or args.verbose:
            print(found, "\n")
    print(
        f"jax {jax.__version__}: {named} of {faults} faults named, {alarms} false alarms in {models} healthy models"
    )
    return int(named < SHARE * faults or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
