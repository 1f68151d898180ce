"""Programs that are drawn, compared with the specification of `amp`: see `spec`."""

import argparse
import collections
import sys
import time

if __name__ == "__main__":  # as in pytest: eight devices, and no optimizations
    sys.path[:0] = ["."]
    import conftest  # noqa: F401

import jax
import numpy as np

import mpx
import programs
import spec


def kinds_of(case, program):
    """Returns what each array of the arguments is."""
    params, batch = case.args
    return ["param"] * len(jax.tree.leaves(params)) + ["data"] * len(jax.tree.leaves(batch))


def differentiated(func, dtype):
    """Returns a function like `jax.value_and_grad(func, has_aux=True)`."""
    if dtype == "bf16":
        return jax.value_and_grad(mpx.amp(func), has_aux=True)
    scaled = mpx.value_and_grad(mpx.amp(func, dtype), has_aux=True)

    def run(*args):
        result = scaled(mpx.StaticLossScaling(2.0**8), *args)
        return (result.value, result.aux), result.grads

    return run


def far(actual, bound):
    """Returns the results that are out of bounds: what each is, and by how much."""
    leaves = jax.tree.leaves(actual)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(bound.exact)]
    found = []
    for name, x, exact, within in zip(names, leaves, *map(jax.tree.leaves, bound), strict=True):
        off = np.linalg.norm(np.asarray(x, np.float64) - exact)
        if not off <= within:
            found.append(f"{name}: off by {off:.2e}, {within:.2e} is allowed, of {np.linalg.norm(exact):.2e}")
    return found


def check(program, dtype="bf16", draws=8):
    """Returns what is wrong with `amp` of a program, as texts."""
    case = programs.build(program)
    actual = jax.jit(differentiated(case.func, dtype))(*case.args)
    found = []
    for count in (draws, 16 * draws):  # a step, such as that of relu, may be met in few
        bound = spec.bounds(case.plain, case.args, kinds_of(case, program), dtype, count)
        found = far(actual, bound)
        if not found:
            break
    return found
