"""Does the kernel do what plain JAX does? All rules and formats, compared on the device.

    python benchmarks/kernel_check.py                # on a GPU, within a minute
    python benchmarks/kernel_check.py --huge         # and up to 2³² elements; 40 GB
    python benchmarks/kernel_check.py --backend mosaic
    python benchmarks/kernel_check.py --tiny         # on a CPU, the kernel interpreted

Each step starts from the same state on both paths, and what they leave is compared. They
compute the same numbers with other roundings: products that are fused with a sum or not,
roots and reciprocals to one ulp. What that explains, and no more, is allowed; see
README.md beside this file. Exit status 1 if something differs by more.
"""

import concurrent.futures
import dataclasses
import functools
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mpx
from _kernel_compare import Found, differences, found_of
from _measure import read_options
from mpx._kernels import _dispatch, _triton
from mpx._optim._packing import PackedLeaf, pack
from mpx._optim._update_rules import Leaf
from mpx._quant import Noise, Quantized

RATE, DECAY = 0.01, 0.1
RULES: dict[str, Any] = {
    "adamw": functools.partial(mpx.optim.flash_adamw, RATE, weight_decay=DECAY),
    "adam": functools.partial(mpx.optim.flash_adam, RATE, weight_decay=DECAY),
    "lion": functools.partial(mpx.optim.flash_lion, RATE, weight_decay=DECAY),
    "sgd": functools.partial(mpx.optim.flash_sgd, RATE, weight_decay=DECAY),
    "sgd momentum": functools.partial(mpx.optim.flash_sgd, RATE, 0.9, dampening=0.1),
    "sgd nesterov": functools.partial(mpx.optim.flash_sgd, RATE, 0.9, nesterov=True),
    "sgdw": functools.partial(mpx.optim.flash_sgdw, RATE, 0.9, weight_decay=DECAY),
}
FORMATS: dict[str, dict[str, Any]] = {
    "24 bits": {},
    "32 bits": {"master_bits": 32},
    "no master": {"master_bits": None},
    "f32 moments": {"quantize": False},
    "flashoptim 24": {"format": "flashoptim"},
    "flashoptim 32": {"format": "flashoptim", "master_bits": 32},
}
# With one rule: how the groups lie in a block, none knows.
GROUPS: dict[str, dict[str, Any]] = {
    f"groups of {size}": {"group_size": size} for size in (2, 8, 256)
}
# All others are dithered.
NEAREST: dict[str, dict[str, Any]] = {
    "nearest": {"rounding": "nearest"},
    "no master, nearest": {"rounding": "nearest", "master_bits": None},
}
# By backend: how a kernel shows in a compiled program.
KERNELS = {
    "triton": 'custom_call_target="__gpu$xla.gpu.triton"',
    "mosaic": 'custom_call_target="mosaic_gpu',
}
FIRST_RULE, FIRST_FORMAT = "adamw", "24 bits"
# Three equal leaves share a launch; odd sizes leave a last block that is not full.
LEAVES = (*[("bf16", "odd")] * 3, ("bf16", "full"), ("f16", "odd"), ("f32", "odd"))
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
# Stepped one by one, by `mpx.optim.release`.
LAYERS = (("bf16", "layers"), ("bf16", "odd layers"), ("f32", "layers"))
# From 2²⁰ elements on plain JAX takes two passes.
SHAPES = {
    "odd": (1001, 96),
    "full": (1024, 1024),
    "layers": (8, 512, 512),
    "odd layers": (8, 1001, 96),
}
TINY_SHAPES = {
    "odd": (23, 96),
    "full": (4, 512),
    "layers": (4, 96, 64),
    "odd layers": (4, 97, 32),
}
# Rows of one leaf, whose codes take three bytes an element: the kernel up to 2³¹ and above
# 2³² bytes, between them plain JAX. The last has more than 2³² elements.
WIDTH, CHUNK, ROWS = 2**15, 2**11, (10 * 2**11, 2**15, 2**16, 2**17 + 2**11)
TINY_WIDTH, TINY_CHUNK, TINY_ROWS = 256, 4, (8,)
UNUSUAL = (np.inf, -np.inf, np.nan, 1e20, -1e20, 1e-25, 3e-39, 0.0)


# --- the cases -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, and the leaves that it steps."""

    rule: str
    format: str
    leaves: tuple[tuple[str, str], ...]
    by_layer: bool = False

    @property
    def name(self):
        return f"{self.rule}, {'by layer' if self.by_layer else self.format}"

    def optimizer(self, backend):
        compression = mpx.optim.Compression(
            min_size=0, **(FORMATS | GROUPS | NEAREST)[self.format]
        )
        return RULES[self.rule](compression=compression, backend=backend)


def all_cases():
    """Yields all rules with all formats, dtypes where one of the two is the first."""
    for rule in RULES:
        for format in FORMATS:
            few = rule != FIRST_RULE and format != FIRST_FORMAT
            yield Case(rule, format, LEAVES[:1] if few else LEAVES)
    for format in (*GROUPS, *NEAREST):
        yield Case(FIRST_RULE, format, LEAVES)
    for rule in ("adamw", "lion", "sgd"):
        yield Case(rule, FIRST_FORMAT, LAYERS, by_layer=True)


@dataclasses.dataclass
class Program:
    """A case, compiled: both paths, and the comparison."""

    case: Case
    steps: dict[str, Any]
    compare: Any


def draw(case, seed, shapes, spread):
    """Returns one array for each leaf, with magnitudes far apart."""
    made = []
    for number, (dtype, kind) in enumerate(case.leaves):
        rng = np.random.default_rng((seed, number))
        x = rng.standard_normal(shapes[kind])
        x *= spread * np.exp(2 * rng.standard_normal(shapes[kind]))
        x[0, :32] = 0  # a group of zeros
        made.append(jnp.asarray(x, DTYPES[dtype]))
    return made


def with_unusual(grads):
    """Plants what is not finite, very large and very small, each in its own group."""
    places = 32 * np.arange(len(UNUSUAL)) + 7

    def plant(x):
        with np.errstate(over="ignore"):
            values = np.asarray(UNUSUAL).astype(x.dtype)
        # Not in the first row, part of which is zero.
        return x.reshape(-1).at[x.shape[-1] + places].set(values).reshape(x.shape)

    return jax.tree.map(plant, grads)


def prepare(cases, shapes, pool, kernel):
    """Traces one after another, and compiles meanwhile."""
    programs = []
    for case in cases:
        params = draw(case, 0, shapes, 0.05)
        state = case.optimizer("jax").init(params)
        flag, scale = jnp.ones((), bool), jnp.ones(())
        steps = {}
        for path, backend in (("plain", "jax"), ("kernel", kernel)):
            by_layer = case.by_layer and path == "kernel"
            take = step_by_layer if by_layer else take_step
            step = functools.partial(take, case.optimizer(backend))
            lowered = jax.jit(step).lower(params, state, params, flag, scale)
            steps[path] = pool.submit(lowered.compile)
        results = (params, state)
        with jax.enable_x64(True):
            compare = jax.jit(functools.partial(differences, case.optimizer("jax")))
            lowered = compare.lower(results, params, scale, results, results)
        programs.append(Program(case, steps, pool.submit(lowered.compile)))
    return programs


def take_step(optimizer, params, state, grads, finite, grad_scale):
    return tuple(
        optimizer.step(params, state, grads, finite=finite, grad_scale=grad_scale)
    )


def step_by_layer(optimizer, params, state, grads, finite, grad_scale):
    """The same by gradient release, of a function that has these gradients."""

    def product(total, layer):
        weights, grads = (x.astype(jnp.float32) for x in layer)
        return total + jnp.sum(weights * grads), None

    def loss(params):
        total = jnp.zeros(())
        for pair in zip(params, grads, strict=True):
            total, _ = lax.scan(product, total, pair)
        return total

    # The sum is not finite where a gradient is not, and `step` skips nothing either.
    step = mpx.optim.release(loss, optimizer, skip_nonfinite=False)
    result = step(params, state, finite=finite, grad_scale=grad_scale)
    return result.params, result.state


def run_case(program, shapes):
    """Takes steps from the same states on both paths.

    Returns:
        What differed, by leaf, and what else is wrong.
    """
    case = program.case
    paths = {name: future.result() for name, future in program.steps.items()}
    compare = program.compare.result()
    launches = {"plain": 0, "kernel": len(set(case.leaves))}
    problems = [kernel_problem(paths[path], path, launches[path]) for path in paths]
    params = draw(case, 0, shapes, 0.05)
    carry = params, case.optimizer("jax").init(params)
    total = {" ".join(leaf): Found() for leaf in case.leaves}
    gradients = [draw(case, seed, shapes, 1.0) for seed in (1, 2, 3)]
    gradients.append(with_unusual(gradients[0]))
    for grads, number in zip(gradients, (1.0, 0.25, 1.0, 1.0), strict=True):
        scale = jnp.float32(number)
        bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), grads)
        for name, path in paths.items():
            if count := changed(carry, path(*carry, bad, jnp.array(False), scale)):
                problems.append(f"{name}: {count} arrays changed in a skipped step")
        plain, kernel = (
            paths[path](*carry, grads, jnp.array(True), scale)
            for path in ("plain", "kernel")
        )
        found = compare(carry, grads, scale, plain, kernel)
        for leaf, x, fields in zip(case.leaves, params, found, strict=True):
            total[" ".join(leaf)] += found_of(x.size, fields)
        carry = kernel
    return total, [problem for problem in problems if problem]


def kernel_problem(program, path, expected):
    """Says if a program has not the kernels it should have; equal leaves share one."""
    if jax.default_backend() == "cpu":
        return None  # the interpreter leaves no trace
    text = program.as_text()
    found = sum(text.count(target) for target in KERNELS.values())
    return None if found == expected else f"{path}: {found} kernels, not {expected}"


def changed(before, after):
    """Counts the arrays of which a byte has changed."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


# --- more than 2³¹ elements ----------------------------------------------------------


def huge_inputs(rows, width, first=0):
    """Returns parameters, state and gradients in the middle of a training.

    Each number is a function of its row and column, so that the same rows can be made
    again. Rows that are 2³² elements apart differ: a wrong address shows.
    """

    def noise(columns, stream):
        shape = (rows, columns)
        row = lax.broadcasted_iota(jnp.uint32, shape, 0) + jnp.asarray(
            first, jnp.uint32
        )
        column = lax.broadcasted_iota(jnp.uint32, shape, 1)
        return Noise(row * np.uint32(0x9E3779B1) + column, jnp.uint32(1), stream)

    def integers(stream, lowest, highest):
        top = (noise(width, stream).bits() >> np.uint32(24)).astype(jnp.int32)
        return jnp.clip(top + lowest, lowest, highest)

    mu = Quantized(
        jnp.maximum(integers(1, -128, 127), -127).astype(jnp.int8),
        (1 + noise(width // 32, 2).centred()).astype(jnp.bfloat16),
    )
    nu = Quantized(
        jnp.maximum(integers(3, 0, 255), 1).astype(jnp.uint8),
        2 + noise(width // 32, 4).centred(),
    )
    correction = jnp.maximum(integers(5, -128, 127), -127).astype(jnp.int8)
    params = {"w": noise(width, 6).centred().astype(jnp.bfloat16)}
    any_size = mpx.optim.Compression(min_size=0)
    small = mpx.optim.flash_adamw(RATE, compression=any_size).init(
        {"w": params["w"][:1, :32]}
    )
    packed = pack(Leaf(params["w"], correction, (mu, nu)))
    state = dataclasses.replace(
        small, count=jnp.asarray(5, jnp.int32), packed={"w": packed}
    )
    return params, state, {"w": noise(width, 7).centred().astype(jnp.bfloat16)}


@functools.cache
def huge_comparison():
    optimizer = Case(FIRST_RULE, FIRST_FORMAT, ()).optimizer("jax")
    return jax.jit(functools.partial(differences, optimizer))


def run_huge(rows, width, chunk, kernel):
    """Steps one huge leaf in place, then compares it with plain JAX part by part."""
    case = Case(FIRST_RULE, FIRST_FORMAT, ())
    yes, scale = jnp.array(True), jnp.ones(())
    inputs = jax.jit(functools.partial(huge_inputs, rows, width))()
    step = functools.partial(take_step, case.optimizer(kernel))
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*inputs, yes, scale).compile()
    # Mosaic's kernel has 64-bit addresses throughout.
    leaf = PackedLeaf(inputs[0]["w"], *inputs[1].packed["w"])
    launches = int(kernel == "mosaic" or _triton.can_address(leaf))
    problem = kernel_problem(program, "kernel", launches)
    result = program(*inputs, yes, scale)
    del inputs, leaf

    def rows_of(x, first):
        # The rows are the first axis, or behind the planes.
        return (
            x if not x.ndim else lax.dynamic_slice_in_dim(x, first, chunk, x.ndim - 2)
        )

    @jax.jit
    def part(first, result):
        mine = jax.tree.map(lambda x: rows_of(x, first), result)
        return huge_inputs(chunk, width, first), mine

    # A program of its own: together with `part` XLA would not round what it makes to bf16.
    plain = jax.jit(functools.partial(take_step, case.optimizer("jax")))
    compare = huge_comparison()
    total = Found()
    for first in range(0, rows, chunk):
        (params, state, grads), got = part(jnp.int32(first), result)
        want = plain(params, state, grads, yes, scale)
        with jax.enable_x64(True):
            (fields,) = compare((params, state), grads, scale, want, got)
        total += found_of(chunk * width, fields)
    return total, [problem] if problem else []


# --- command line --------------------------------------------------------------------


def interpret_kernel():
    """Takes CPUs for GPUs, with the kernel in Pallas's interpreter."""
    run = functools.partial(_triton.launch, interpret=True)
    setattr(_triton, "launch", run)  # noqa: B010
    setattr(_dispatch, "_PLATFORM", "cpu")  # noqa: B010


def report(name, found, problems):
    """Prints one line; returns whether the case passed."""
    if found.wrong:
        problems = [f"{found.wrong} differ by more than is allowed", *problems]
    print(
        f"{name:34} {found.elements:>11} {found.codes:>9} {found.code:>4} "
        f"{found.scales:>8} {found.params:>8} {found.ulp:>4} {found.used:>6.2f}"
        f"{'   WRONG: ' if problems else ''}{'; '.join(problems)}",
        flush=True,
    )
    return not problems


def main():
    """Runs the cases; returns the exit status."""
    options = read_options(__doc__, "backend=triton only= huge tiny")
    start = time.perf_counter()
    device = jax.devices()[0]
    if options.tiny and options.backend == "mosaic":
        sys.exit("--tiny needs the interpreter of Pallas, which has none for Mosaic.")
    if options.tiny:
        interpret_kernel()
    elif jax.default_backend() != "gpu":
        sys.exit(f"The kernel needs a GPU, but here is {device}: --tiny interprets it.")
    shapes = TINY_SHAPES if options.tiny else SHAPES
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    print(f"{options.backend}, {device.device_kind}, jax {jax.__version__}\n")
    print(
        f"{'case':34} {'elements':>11} {'codes ≠':>9} {'by':>4} {'scales ≠':>8} "
        f"{'params ≠':>8} {'ulps':>4} {'weight':>6}"
    )
    passed = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for program in prepare(cases, shapes, pool, options.backend):
            leaves, problems = run_case(program, shapes)
            for leaf, found in leaves.items():
                passed.append(report(f"{program.case.name}, {leaf}", found, problems))
    if options.huge:
        sizes = (TINY_WIDTH, TINY_CHUNK) if options.tiny else (WIDTH, CHUNK)
        for rows in TINY_ROWS if options.tiny else ROWS:
            found = run_huge(rows, *sizes, options.backend)
            passed.append(report(f"adamw, {rows} × {sizes[0]}", *found))
    print(
        f"\n{sum(passed)} of {len(passed)} lines passed, {time.perf_counter() - start:.0f} s."
        " Allowed: codes and 16-bit scales differ by one, weights by what roundings and one"
        " code explain (`weight`: the largest as a fraction of that); skipped steps"
        " change no byte."
    )
    return int(not all(passed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
