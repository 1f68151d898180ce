"""How every test runs: on eight CPU devices, with strict promotion, from a clean state.

This file is at the root, so that it also holds for the docstring examples in `src`.
"""

import contextlib
import functools
import gc
import importlib.metadata
import os
import random
import sys
import zlib
from typing import Any

# Before JAX is imported: it reads these once. Subprocesses inherit them.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "agg")
# LLVM's optimizations, not those of XLA: what is computed stays the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Nobody reads which lines an operation of a program comes from. Measured, three files:
# 24.1 s of CPU time, without 23.2 s.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# NumPy's matrices are small here, and its idle threads wait by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
_FLAGS = ["--xla_force_host_platform_device_count=8"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Most of the time goes into compiling programs that run once. Measured, a compressed
    # AdamW step: 0.85 s, with these 0.51 s, without optimizations as well (below) 0.12 s.
    # Later versions do not know them.
    _FLAGS += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
_GIVEN = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_GIVEN, *(flag for flag in _FLAGS if flag.partition("=")[0] not in _GIVEN)]
).strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# An accidental upcast to f32 is the bug this library is about: make it an error.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _share_the_context_of_lowerings():
    """Makes JAX create the context of its MLIR modules once, not for each program.

    Measured, 55 tests with 257 programs: 16.1 s instead of 18.5 s of CPU time.
    """
    module: Any = sys.modules.get("jax._src.interpreters.mlir")
    if hasattr(module, "make_ir_context"):  # one that was renamed takes its time
        module.make_ir_context = functools.cache(module.make_ir_context)


_share_the_context_of_lowerings()

# JAX keeps many objects: to look through them took a sixth of the CPU time of five files.
gc.set_threshold(200_000, 20, 100)

# A deadline would measure compilation.
hypothesis.settings.register_profile(
    "mpx", deadline=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("mpx")


def pytest_collection_finish():
    gc.freeze()  # what is imported by now stays


def pytest_addoption(parser):
    help = "run one case in this many, and all that are marked `slow`"
    parser.addoption("--thin", type=int, default=1, help=help)
    help = "run all combinations of parameters, and more random cases"
    parser.addoption("--exhaustive", action="store_true", help=help)
    help = "run the files, and the tests of each, in the random order of this seed"
    parser.addoption("--shuffle", type=int, metavar="SEED", help=help)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            # Examples show what a user runs, and `optax.adam` needs promotion.
            item.add_marker("standard_promotion")
    result = yield  # what `-m` and `-k` select, of which the rest makes a choice
    if not config.getoption("exhaustive"):
        _keep(config, items, set(_sums(items)))
    _thin(config, items, config.getoption("thin"))
    _shuffle(items, config.getoption("shuffle"))
    return result


def _cases(items):
    """Returns the cases of each test, by the name of the test."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def _keep(config, items, kept):
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = [x for x in items if x in kept]


def _sums(items):
    """Yields cases in which every value of every parameter occurs, not every product.

    Stacked `parametrize` marks multiply. A defect usually shows with one value of one of
    them, seldom with one pair alone: `@pytest.mark.product` marks tests of such pairs,
    and `@pytest.mark.some(3)` costly ones, of which three cases run, on another version of
    JAX three others. `@pytest.mark.weekly` marks costly ones that have a cheaper neighbour.
    """
    for cases in _cases(items).values():
        first = cases[0]
        if first.get_closest_marker("weekly"):
            continue
        if not hasattr(first, "callspec") or first.get_closest_marker("product"):
            yield from cases
            continue
        # One entry for each mark. Without that private name, every case is its own.
        ids = {x: getattr(x.callspec, "_idlist", [x.callspec.id]) for x in cases}
        values = {item: set(enumerate(map(str, ids[item]))) for item in cases}
        left = set().union(*values.values())
        # Of equal ones not always the first: that is often the simplest.
        some = first.get_closest_marker("some")
        salt = "" if some is None else jax.__version__
        order = sorted(cases, key=lambda x: zlib.crc32((x.nodeid + salt).encode()))
        chosen = []
        while left:
            best = max(order, key=lambda item: len(values[item] & left))
            left -= values[best]
            chosen.append(best)
        yield from chosen if some is None else chosen[: some.args[0]]


def _thin(config, items, step):
    cases = [item for item in items if item.get_closest_marker("slow") is None]
    _keep(config, items, set(items) - (set(cases) - set(cases[::step])))


def _shuffle(items, seed):
    if seed is None:
        return
    rng = random.Random(seed)  # the same order in every process of xdist
    rng.shuffle(items)
    # Files stay together: the fixtures of a module are made once.
    place = {path: rng.random() for path in sorted({item.path for item in items})}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    # Around the whole test and not in a fixture, so that it holds for the fixtures too.
    if item.get_closest_marker("standard_promotion") is None:
        return (yield)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return (yield)


@contextlib.contextmanager
def _skipped_on_one_device():
    """Skips what needs the eight devices that a CPU plays, where there are less."""
    try:
        yield
    except (ValueError, AssertionError) as error:
        texts = "Number of devices", "device_count"
        if jax.device_count() < 8 and any(text in str(error) for text in texts):
            pytest.skip("needs eight devices")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("eight_devices") and jax.device_count() < 8:
        pytest.skip("needs eight devices")
    with _skipped_on_one_device():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    with _skipped_on_one_device():
        return (yield)


@pytest.fixture(autouse=True)
def _half_precision_is_not_chosen_again():
    import mpx  # here, because the hook that checks its types must come first

    yield
    mpx.set_half_precision_datatype(None)


@contextlib.contextmanager
def _optimized(is_optimized):
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    yield
    default = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    jax.config.update("jax_disable_most_optimizations", default)


@pytest.fixture
def optimized_programs():
    """Lets XLA optimize: for tests that read its programs, and for long runs."""
    with _optimized(True):
        yield


@pytest.fixture
def plain_programs():
    """Keeps XLA from optimizing: for tests that compare the bits of two programs."""
    with _optimized(False):
        yield


@pytest.fixture
def untyped(monkeypatch):
    """Checks no annotations, as for a user: for tests that pass wrong types."""
    import jaxtyping

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
