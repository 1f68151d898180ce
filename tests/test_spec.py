"""Programs that are drawn, compared with the specification of `amp`: see `spec`.

    python tests/test_spec.py --programs 20000 --seed 0

runs more of them, and shrinks those that fail.
"""

import argparse
import collections
import functools
import pathlib
import sys
import time

if __name__ == "__main__":  # as in the tests: eight devices, and no optimizations
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpx
import programs
import spec

PROGRAMS, EXHAUSTIVE, FEW = 300, 20_000, 10
CODED = {
    "residuals": ("int8", lambda func: mpx.amp(func, residuals="int8")),
    "current": ("fp8", lambda func: mpx.fp8(func, min_gain=0)),
    "row": ("fp8", lambda func: mpx.fp8(func, ROW, min_gain=0)),
    "mx": ("fp8", lambda func: mpx.fp8(func, mpx.recipes.MXFP8(emulate=True), min_gain=0)),
    "int8": ("int8", lambda func: mpx.fp8(func, "int8", min_gain=0)),
    "fp4": ("fp4", lambda func: mpx.fp8(func, mpx.recipes.NVFP4(emulate=True), min_gain=0)),
}
ROW = mpx.recipes.CurrentScaling(granularity="row")
# What amp does not do, and says so.
REFUSED = (
    "The rule of a function under `jax.custom_vjp` or `jax.custom_jvp` closes over"
)


def gradient(func, wrap):
    """Returns a function like `jax.value_and_grad(func, has_aux=True)`."""
    if wrap in CODED:
        return jax.value_and_grad(CODED[wrap][1](func), has_aux=True)
    if wrap == "bf16":
        return jax.value_and_grad(mpx.amp(func), has_aux=True)
    scaled = mpx.value_and_grad(mpx.amp(func, wrap), has_aux=True)

    def run(*args):
        result = scaled(mpx.StaticLossScaling(2.0**8), *args)
        return (result.value, result.aux), result.grads

    return run


def far(actual, bound):
    """Returns which results are out of bounds, and how far."""
    paths = jax.tree_util.tree_leaves_with_path(bound.exact)
    rows = zip(paths, jax.tree.leaves(actual), jax.tree.leaves(bound.within), strict=True)
    found = []
    for (path, exact), x, within in rows:
        off, size = (float(np.linalg.norm(y)) for y in (np.asarray(x) - exact, exact))
        if not off <= within:
            name = jax.tree_util.keystr(path)
            found.append(f"{name} of norm {size:.2e} is {off:.2e} off, not {within:.1e}")
    return found


def check(program, wrap="bf16"):
    """Returns what is wrong with `amp` of a program."""
    case = programs.build(program)
    kinds = [
        kind
        for kind, tree in zip(("param", "data"), case.args, strict=True)
        for _ in jax.tree.leaves(tree)
    ]
    dtype, codes = ("bf16", CODED[wrap][0]) if wrap in CODED else (wrap, None)
    run = jax.jit(gradient(case.func, wrap))
    try:
        results = {"jitted": run(*case.args)}
    except NotImplementedError as error:
        if REFUSED in str(error):
            return []
        raise
    if wrap == "bf16":
        results |= others(program, case, run)
    # A step, such as that of relu, may be met in few draws.
    for draws in (DRAWS, 10 * DRAWS):
        bound = spec.bounds(case.plain, case.args, kinds, dtype, draws, codes)
        found = [f"{how}: {x}" for how, y in results.items() for x in far(y, bound)]
        if not found:
            break
    return found + (reported(case) if program.seed % 10 == 3 and wrap == "bf16" else [])


DRAWS = 6


def others(program, case, run):
    """Returns the same results in other ways, for some programs."""
    found, way = {}, program.seed % 20
    if way == 0:
        found["eagerly"] = gradient(case.func, "bf16")(*case.args)
    if way == 1 and "prints" not in str(program):
        found["exported"] = exported(run, case.args)
    if way == 2:
        inner = jax.value_and_grad(lambda *args: mpx.amp(case.func)(*args), has_aux=True)
        found["of a jitted function"] = jax.jit(inner)(*case.args)
    return found


def exported(run, args):
    leaves, tree = jax.tree.flatten(args)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(run(*tree.unflatten(leaves))))
    outs = jax.export.export(flat)(*leaves).call(*leaves)
    return jax.tree.structure(jax.eval_shape(run, *args)).unflatten(outs)


def reported(case):
    """Returns matmuls that the report does not list as they run."""
    func = mpx.amp(case.func)
    loss = lambda *args: func(*args)[0]
    report = mpx.inspect.report(mpx.amp(lambda *args: case.func(*args)[0]), *case.args)
    listed = {(row.dtype, frozenset(row.shapes)) for row in report.matmuls}
    ran = loss if report.passes != "forward and backward" else jax.value_and_grad(loss)
    ran = set(matmuls(jax.make_jaxpr(ran)(*case.args).jaxpr))
    return [f"report: {x} is not listed" for x in ran - listed]


def matmuls(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in spec.MATMULS:
            dtypes = {str(v.aval.dtype) for v in eqn.invars[:2]}
            names = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
            shapes = frozenset(v.aval.shape for v in eqn.invars[:2])
            yield "/".join(names[x] for x in sorted(dtypes)), shapes
        for body in spec.bodies(eqn):
            yield from matmuls(body)


def shrunk(program, wrap, is_bad):
    """Returns a small program that fails, too."""
    while True:
        smaller = programs.smaller(program)
        program, before = next((x for x in smaller if is_bad(x, wrap)), program), program
        if program is before:
            return program


def failure(program, wrap):
    """Returns what is wrong, also if it is an error of any kind."""
    try:
        return check(program, wrap)
    except Exception as error:  # any error of a program that JAX can run
        return [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]


# --- Tests ------------------------------------------------------------------------------

PARTS = 12


def test_spec_itself_says_what_jax_says():
    for seed in range(20):
        case = programs.build(programs.draw(seed)._replace(shards=0))
        if "written" not in str(programs.draw(seed)):
            plain = jax.jit(jax.value_and_grad(case.func, has_aux=True))(*case.args)
            kinds = ["data"] * len(jax.tree.leaves(case.args))
            exact = spec.bounds(case.plain, case.args, kinds, draws=0).exact
            for x, y in zip(*map(jax.tree.leaves, (plain, exact)), strict=True):
                assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y) + 1e-6, seed


def run_all(seeds, wrap):
    for seed in seeds:
        program = programs.draw(seed)
        found = failure(program, wrap)
        assert not found, (wrap, program, found)


@pytest.mark.parametrize("part", range(PARTS))
def test_amp_is_within_the_specification(part, pytestconfig):
    count = EXHAUSTIVE if pytestconfig.getoption("exhaustive") else PROGRAMS
    run_all(range(part, count, PARTS), "bf16")


@pytest.mark.parametrize("wrap", ["f16", *CODED])
def test_other_formats_are_within_theirs(wrap, pytestconfig):
    count = EXHAUSTIVE // 20 if pytestconfig.getoption("exhaustive") else FEW
    run_all(range(count), wrap)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wrap", default="bf16", help=f"bf16, f16, {', '.join(CODED)}")
    parser.add_argument("--no-shrink", action="store_true")
    given = parser.parse_args()
    start, kinds = time.time(), collections.Counter()
    for i, seed in enumerate(range(given.seed, given.seed + given.programs), 1):
        program = programs.draw(seed)
        found = failure(program, given.wrap)
        if found:
            kinds[found[0].split(":")[0]] += 1
            if not given.no_shrink:
                is_alike = lambda x, wrap: any(y[:8] == found[0][:8] for y in failure(x, wrap))
                program = shrunk(program, given.wrap, is_alike)
                found = failure(program, given.wrap)
            print(f"\nseed {seed}: {found[0]}\n  {program}", flush=True)
        if i % 10 == 0:
            print(f"\r{i} programs, {kinds.total()} fail, {time.time() - start:.0f} s", end="", flush=True)
        if i % 200 == 0:
            jax.clear_caches()
    print(f"\n{given.programs} programs: {dict(kinds) or 'all are within bounds'}")


if __name__ == "__main__":
    main()
