"""One model through the routes: what a process of the zoo does."""

import json
import re
import time
import traceback
import warnings
from typing import Any

import jax

from _zoo import REGISTRY
from _zoo.routes import distance, f64_grads, from_rounded, run_of, share, train

Cell = dict[str, Any]


def measure(name, routes):
    """Prints one line of JSON for each route, f32 first."""
    warnings.simplefilter("ignore")
    # Programs that run twenty times compile in two thirds of the time without.
    jax.config.update("jax_disable_most_optimizations", True)
    case, _ = print_cell("make", lambda: make(name))
    if case is None:
        return
    exact, _ = print_cell("f32", lambda: f32(case))
    for route in routes:
        if route != "f32":
            print_cell(route, lambda route=route: routed(route, case, exact))
    if exact is not None:
        print_cell("f64", lambda: (None, {"of_f32": distance(exact, f64_grads(case))}))


def print_cell(name, work):
    """Does the work, and prints what it found or the error that it raised."""
    start = time.monotonic()
    try:
        result, found = work()
    except Exception as error:  # of any package
        result, found = None, {"error": short(error), "where": where(error)}
    seconds = round(time.monotonic() - start, 2)
    print(json.dumps({"cell": name, "seconds": seconds, **found}), flush=True)
    return result, found


def make(name):
    """Makes the model."""
    case = REGISTRY[name].make()
    sizes = [x.size for x in jax.tree.leaves(case.params)]
    return case, {"params": sum(sizes), "own": case.own is not None}


def f32(case):
    """Trains in f32, also from rounded parameters, and returns the first gradients."""
    run = run_of("f32", case)
    trained = train(run, case.args)
    rounded = train(from_rounded(run), case.args)
    return trained.grads, {"losses": trained.losses, "rounded": rounded.losses}


def routed(route, case, exact):
    """Trains on a route."""
    found = {"share": share(route, case)}
    if route == "fp8" and not found["share"]:
        return None, found  # the same program as amp
    trained = train(run_of(route, case), case.args)
    found |= {"losses": trained.losses, "skipped": trained.skipped}
    if trained.grads is not None and exact is not None:
        found["grad_error"] = distance(trained.grads, exact)
    return None, found


def short(error):
    """Returns the type and the first line of an error."""
    text = re.sub(r"\s+", " ", str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text}"[:300]


def where(error):
    """Returns the last frames, to look an error up."""
    return "".join(traceback.format_tb(error.__traceback__)[-6:])
