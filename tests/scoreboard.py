"""Does `mpx.inspect.explain` name planted faults, and stay silent about healthy models?

    python tests/scoreboard.py                          # all
    python tests/scoreboard.py --only rope,equinox      # those whose names contain this

A fault counts as named if the source line is the marked one, and the parameter, scope or
function is the expected one. The script fails if fewer than 48 of 50 are named, in
proportion, or if a healthy model raises an alarm.
"""

import argparse
import sys
import time
import traceback
from functools import partial

import jax

import mpx
from planted import HEALTHY, PLANTED

SHARE = 48 / 50


def explained(case):
    return mpx.inspect.explain(case.func, *case.args, scaling=case.scaling)


def mistakes(planted, found):
    """Returns what is wrong with an explanation."""
    fault = found.fault
    if fault is None:
        return ["not found"]
    place = fault.place
    if "input" in planted.kinds:
        right = fault.kind == "input" and place.param == planted.path
        return [] if right else ["another place"]
    file, lines = planted.place
    wanted = {f"{file}:{line}" for line in lines}
    wrong = []
    if not any(x.endswith(y) for x in {place.source, fault.caller} for y in wanted):
        wrong.append(f"line {place.source} instead of {', '.join(wanted)}")
    names = (place.param, place.scope, fault.near, place.function)
    if not any(planted.path in x for x in names):
        wrong.append(f"path {fault.label} instead of {planted.path}")
    if planted.kinds and fault.kind not in planted.kinds:
        wrong.append(f"kind {fault.kind} instead of {' or '.join(planted.kinds)}")
    if place.backward != planted.backward:
        wrong.append(f"way: {'back' if place.backward else 'for'}ward")
    return wrong


def faults_of(name, make, judge):
    """Explains a case, says what is wrong with the explanation, and returns that."""
    start, found = time.monotonic(), None
    try:
        found = explained(make())
        wrong = judge(found)
    except Exception as error:
        traceback.print_exc()
        wrong = [f"{type(error).__name__}: {error}"]
    took, mark = time.monotonic() - start, "FAIL" if wrong else "ok"
    print(f"{mark:5} {name:45} {took:5.1f} s  {'; '.join(wrong)}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME,NAME")
    only = parser.parse_args().only.split(",")
    wanted = lambda name: any(x in name for x in only)  # noqa: E731
    faults = [planted for name, planted in PLANTED.items() if wanted(name)]
    models, named, alarms = list(filter(wanted, HEALTHY)), 0, 0
    for planted in faults:
        wrong = faults_of(planted.name, planted.make, partial(mistakes, planted))
        named += all(x.startswith(("kind", "way")) for x in wrong)
    for name in models:
        judge = lambda found: [] if found.ok else [str(found)]  # noqa: E731
        alarms += bool(faults_of(name, HEALTHY[name], judge))
    print(
        f"jax {jax.__version__}: {named} of {len(faults)} faults named, "
        f"{alarms} false alarms in {len(models)} healthy models"
    )
    return int(named < SHARE * len(faults) or alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
