"""Does `mpx.inspect.explain` name planted faults, and stay silent about healthy models?

    python benchmarks/explain.py                          # all
    python benchmarks/explain.py --only rope,equinox      # those whose names contain this
    python benchmarks/explain.py --verbose                # prints each explanation
    python benchmarks/explain.py --zoo                    # the models of `make zoo` as well

A fault counts as named if the source line is the marked one, and the parameter, scope or
function is the expected one. The script fails if fewer than 48 of 50 are named, in
proportion, or if a healthy model raises an alarm.
"""

import functools
import sys
import time
import traceback

import jax

import mpx
from _faults import HEALTHY, PLANTED, Case
from _measure import read_options

SHARE = 48 / 50


def explained(case):
    return mpx.inspect.explain(case.func, *case.args, scaling=case.scaling)


def mistakes(planted, found):
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
        wrong.append(f"way: {'back' if fault.place.backward else 'for'}ward")
    return wrong


def main():
    args = read_options(__doc__, "only=str verbose zoo")

    def wanted(name):
        return not args.only or any(x in name for x in args.only.split(","))

    faults = [planted for name, planted in PLANTED.items() if wanted(name)]
    named = sum(is_named(planted, args.verbose) for planted in faults)
    models = [name for name in HEALTHY if wanted(name)]
    alarms = sum(is_alarmed(name, HEALTHY[name], args.verbose) for name in models)
    if args.zoo:
        from _zoo import REGISTRY

        for name in filter(wanted, REGISTRY):
            for route in ("amp bf16", "amp f16", "fp8"):
                models.append(name)
                make = functools.partial(zoo_case, name, route)
                alarms += is_alarmed(f"{name}, {route}", make, args.verbose)
    print(
        f"jax {jax.__version__}: {named} of {len(faults)} faults named, "
        f"{alarms} false alarms in {len(models)} healthy models"
    )
    return int(named < SHARE * len(faults) or alarms > 0)


def is_named(planted, verbose):
    """Explains a planted fault; returns whether its place is named."""
    start = time.monotonic()
    found = None
    try:
        found = explained(planted.make())
        wrong = mistakes(planted, found)
    except Exception as error:
        traceback.print_exc()
        wrong = [f"{type(error).__name__}: {error}"]
    took = time.monotonic() - start
    misplaced = any(not x.startswith(("kind", "way")) for x in wrong)
    mark = "FAIL" if misplaced else "ok?" if wrong else "ok"
    print(f"{mark:5} {planted.name:45} {took:5.1f} s  {'; '.join(wrong)}", flush=True)
    if found and (verbose or misplaced):
        print(found, "\n")
    return not misplaced


def is_alarmed(name, make, verbose):
    """Explains a healthy model; returns whether a fault is found in it."""
    start = time.monotonic()
    try:
        found = explained(make())
    except Exception:
        traceback.print_exc()
        print(f"FAIL  {name}", flush=True)
        return True
    errors = [x for k, x in found.grad_errors.items() if k not in found.unstable]
    worst = max(errors, default=0.0)
    mark, took = "ok" if found.ok else "ALARM", time.monotonic() - start
    print(f"{mark:5} {name:45} {took:5.1f} s  off by {100 * worst:.2g} %", flush=True)
    if not found.ok or verbose:
        print(found, "\n")
    return not found.ok


def zoo_case(name, route):
    """Returns a model of the zoo under a route."""
    from _zoo import REGISTRY

    model = REGISTRY[name].make()
    args = model.params, *model.args
    if route == "fp8":
        return Case(mpx.fp8(model.loss, params=model.holds, min_gain=0), args)
    dtype = "f16" if route == "amp f16" else "bf16"
    scaling = mpx.DynamicLossScaling.pow2() if route == "amp f16" else None
    return Case(mpx.amp(model.loss, dtype, params=model.holds), args, scaling)


if __name__ == "__main__":
    sys.exit(main())
