"""One model through the routes: what a process of the zoo does."""

import collections
import importlib
import re
import warnings
from typing import Any

import jax

import mpx
from _zoo import REGISTRY
from _zoo.routes import distance, f64_grads, from_rounded, run_of, share, train


def make(name):
    """Makes a model."""
    warnings.simplefilter("ignore")
    # Programs that run twenty times compile in two thirds of the time without.
    jax.config.update("jax_disable_most_optimizations", True)
    return REGISTRY[name].make()


def measure(name, routes):
    """Returns what each route found, f32 first, or the error that it raised."""
    cells: dict[str, dict[str, Any]] = {}
    case = attempt(cells, "make", lambda: made(name))
    if case is None:
        return cells | dict.fromkeys(routes, cells["make"])
    exact = attempt(cells, "f32", lambda: f32(case))
    for route in routes:
        if route != "f32":
            attempt(cells, route, lambda route=route: routed(route, case, exact))
    if exact is not None:
        error = lambda: (None, {"of_f32": distance(exact, f64_grads(case))})  # noqa: E731
        attempt(cells, "f64", error)
    return cells


def attempt(cells, key, work):
    """Returns the result of some work; its cell has what it found, or its error."""
    try:
        result, cells[key] = work()
    except Exception as error:  # of any package
        text = re.sub(r"\s+", " ", str(error).strip().partition("\n")[0])
        cells[key] = {"error": f"{type(error).__name__}: {text}"[:300]}
        return None
    return result


def made(name):
    """Makes the model, and counts its parameters."""
    case = make(name)
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


# --- recognised attention ---------------------------------------------------------------


def pretend_h200():
    """Lets mpx and JAX believe in an H200 with cuDNN 9.10, for attention of any size.

    Without a GPU the recognised attention runs in plain JAX.
    """
    from mpx._amp import _decide
    from mpx._amp import _recognition as found
    from mpx._ops import _attention

    for module in (_decide, _attention, found):
        setattr(module, "cuda_capability", lambda: (9, 0))  # noqa: B010
    # A private module, which no public function lets one reach.
    name = "jax._src.cudnn.fused_attention_stablehlo"
    jax_cudnn: Any = importlib.import_module(name)
    jax_cudnn.check_cudnn_version = lambda: 91000
    jax_cudnn.check_compute_capability = lambda _: True
    _attention.LEAST = {9: 0}


def measure_attention(name):
    """Returns how often attention is recognised, reasons if not, and errors of gradients.

    A layer that is jitted, scanned or called several times counts once. The errors of
    gradients under `amp` are with attention operation by operation, and recognised.
    """
    pretend_h200()
    case = make(name)
    losses = [
        mpx.amp(case.loss, params=case.holds, attention=x) for x in ("keep", "fuse")
    ]
    rows = mpx.inspect.report(losses[1], case.params, *case.args).recognised
    rows = [x for x in rows if x.what == "attention"]
    found = sum(x.found for x in rows)
    missed = collections.Counter(x.reason for x in rows if not x.found)
    if not found:
        return found, missed, []
    exact, *others = (
        jax.jit(jax.grad(func))(case.params, *case.args)
        for func in (case.loss, *losses)
    )
    return found, missed, [distance(grads, exact) for grads in others]
