"""Does the kernel do what plain JAX does? All rules and formats, compared on the device.

    python benchmarks/kernel_check.py                # on a GPU, within a minute
    python benchmarks/kernel_check.py --huge         # and up to 2³² elements; 40 GB
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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import _measure as measure
import mpx
from mpx._kernels import _dispatch, _triton
from mpx._optim._engine import Step
from mpx._optim._options import FlatParams
from mpx._optim._packing import CORRECTION, PackedLeaf, Packing, moment_codec
from mpx._optim._state import leaves_of
from mpx._quant._codecs import Block, Dither, Quantized
from mpx._quant._codecs import _mix as mix

RATE, DECAY = 0.01, {"weight_decay": 0.1}
# By name: the optimizer, its arguments, and its options.
RULES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "adamw": (mpx.optim.flash_adamw, (), DECAY),
    "adam": (mpx.optim.flash_adam, (), DECAY),
    "lion": (mpx.optim.flash_lion, (), DECAY),
    "sgd": (mpx.optim.flash_sgd, (), DECAY),
    "sgd momentum": (mpx.optim.flash_sgd, (0.9,), {"dampening": 0.1}),
    "sgd nesterov": (mpx.optim.flash_sgd, (0.9,), {"nesterov": True}),
    "sgdw": (mpx.optim.flash_sgdw, (0.9,), DECAY),
}
FORMATS: dict[str, dict[str, Any]] = {
    "24 bits": {},
    "32 bits": {"master_bits": 32},
    "no master": {"master_bits": None},
    "f32 moments": {"quantize": False},
    "flashoptim 24": {"format": "flashoptim"},
    "flashoptim 32": {"format": "flashoptim", "master_bits": 32},
}
# With the first rule alone: rules do not know how groups lie in a block, or of dithering.
MORE: dict[str, dict[str, Any]] = {
    "groups of 2": {"group_size": 2},
    "groups of 8": {"group_size": 8},
    "groups of 256": {"group_size": 256},
    "nearest": {"rounding": "nearest"},
    "no master, nearest": {"rounding": "nearest", "master_bits": None},
}
# How the kernel shows in a compiled program.
KERNEL = 'custom_call_target="__gpu$xla.gpu.triton"'
FIRST = "adamw", "24 bits"
# Three equal leaves share a launch; odd sizes leave a last block that is not full.
LEAVES = (*[("bf16", "odd")] * 3, ("bf16", "full"), ("f16", "odd"), ("f32", "odd"))
DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
# Stepped one by one, by `mpx.optim.release`.
LAYERS = (("bf16", "layers"), ("bf16", "odd layers"), ("f32", "layers"))
# From 2²⁰ elements on plain JAX takes two passes. The second shapes are for --tiny.
KINDS = {
    "odd": ((1001, 96), (23, 96)),
    "full": ((1024, 1024), (4, 512)),
    "layers": ((8, 512, 512), (4, 96, 64)),
    "odd layers": ((8, 1001, 96), (4, 97, 32)),
}
SHAPES, TINY_SHAPES = ({k: x[i] for k, x in KINDS.items()} for i in (0, 1))
# Width, rows compared at once, and rows of one leaf, whose codes take three bytes an
# element: the kernel up to 2³¹ and above
# 2³² bytes, between them plain JAX. The last has more than 2³² elements.
HUGE = 2**15, 2**11, (10 * 2**11, 2**15, 2**16, 2**17 + 2**11)
TINY = 256, 4, (8,)
UNUSUAL = (np.inf, -np.inf, np.nan, 1e20, -1e20, 1e-25, 3e-39, 0.0)


# --- the comparison ---------------------------------------------------------------------
# Why what is allowed is what roundings explain, and no more: README.md beside this file. If
# a bf16 scale moves by an ulp of at most 2⁻⁷, the softsign code 254 x / (s + |x|) moves by
# at most 254 / 4 · 2⁻⁷, which is half a code: still one.

# In f32 a rounding is 2⁻²⁴. No number takes part in more than eight of them on its way
# to a result (`nesterov` is the longest), on either path: 16 · 2⁻²⁴.
ROUNDINGS = 2.0**-20
# How far a stored weight is from the f32 one, in ulps of the parameter, by the bits of the
# correction: the bounds that the codecs of `mpx._quant` state.
CODE = {0: 1 / 2, 8: 2.0**-8, 16: 2.0**-16}


@dataclasses.dataclass
class Found:
    """How two results differ: counts of elements, and the largest distances."""

    elements: int = 0  # weights that were compared
    codes: int = 0  # of moments that differ
    code: int = 0  # by how much at most
    scales: int = 0  # of groups that differ
    params: int = 0  # that differ
    ulp: int = 0  # by how many of their ulps at most
    used: float = 0.0  # the largest difference, as a fraction of what is allowed
    wrong: int = 0  # what differs by more than is allowed

    def __add__(self, other):
        both = ((x.name, getattr(self, x.name), getattr(other, x.name))
                for x in dataclasses.fields(Found))  # fmt: skip
        largest = ("code", "ulp", "used")
        return Found(**{k: max(a, b) if k in largest else a + b for k, a, b in both})


@functools.partial(jax.jit, static_argnames="rule")
def rounding_errors(rule, scalars, grad, weight, moments):
    """By how much roundings may change the new weight and moments; runs in f64.

    Every input and coefficient is moved by all the roundings it can meet, and what that
    changes is added up. So it holds for sums that cancel, and for Lion's signs, too.
    """
    inputs = jax.tree.map(lambda x: x.astype(float), (scalars, grad, weight, moments))
    flat, treedef = jax.tree.flatten(inputs)

    def step(factors):
        moved = [x * factor for x, factor in zip(flat, factors, strict=True)]
        (scale, *rest), grad, weight, moments = treedef.unflatten(moved)
        given = tuple(rest), grad * scale, weight, Block()
        new = rule.average(given, moments)
        return (rule.move(given, moments, new), *new)

    exact = step(jnp.ones(len(flat)))

    def add(total, unit):
        both = zip(step(1 + ROUNDINGS * unit), step(1 - ROUNDINGS * unit), strict=True)
        changes = [
            jnp.maximum(jnp.abs(up - x), jnp.abs(down - x))
            for (up, down), x in zip(both, exact, strict=True)
        ]
        return tuple(t + c for t, c in zip(total, changes, strict=True)), None

    zeros = tuple(jnp.zeros_like(x) for x in exact)
    return lax.scan(add, zeros, jnp.eye(len(flat)))[0]


def differences(optimizer, before, grads, grad_scale, plain, kernel):
    """Returns fields of a `Found` for each leaf of what two paths made of it, in f64."""
    core = optimizer.init.__self__
    old, want, got = (stored_leaves(*tree) for tree in (before, plain, kernel))
    step = Step(core, FlatParams.of(before[0]), before[1], grad_scale)
    scale, *rest = step.scalars(core.rule, core.hyper)
    coefficients = rest[len(Dither._fields) :]
    decode = functools.partial(decoded, core, before[1])
    grads = FlatParams.of(grads).leaves

    def compare(grad, start, a, b):
        given = jax.tree.map(jnp.ravel, (grad.astype(jnp.float32), *decode(start)))
        room = rounding_errors(core.rule, (scale, *coefficients), *given)
        return compare_leaf(room, a, b, decode(a), decode(b))

    return [compare(*leaf) for leaf in zip(grads, old, want, got, strict=True)]


def found_of(elements, fields):
    """Takes the result of `differences` for one leaf from the device."""
    return Found(elements, **{k: x.item() for k, x in jax.device_get(fields).items()})


class Stored(NamedTuple):
    """A parameter with its moments and correction."""

    param: Any
    moments: Any
    correction: Any


def stored_leaves(params, state):
    """Returns each parameter with its correction and moments."""
    stored = []
    for param, packed in leaves_of(FlatParams.of(params), state):
        numbers = packed.numbers()
        correction = numbers.pop(CORRECTION, None)
        stored.append(Stored(param, tuple(numbers.values()), correction))
    return stored


def decoded(core, state, leaf):
    """Returns the f32 weight and moments of a leaf."""
    shape, groups = leaf.param.shape, leaf.param.shape
    quantized = [x for x in leaf.moments if isinstance(x, Quantized)]
    if quantized:
        groups = (*quantized[0].scale.shape, -1)
    dtype = None if leaf.correction is None else leaf.correction.dtype
    master = Packing((), state.format, 0, dtype, leaf.param.dtype).master
    leaf = jax.tree.map(lambda x: x.reshape(groups) if x.shape == shape else x, leaf)
    weight = master.decode(leaf.param, leaf.correction, Block())
    moments = (
        moment_codec(name, state.format).decode(stored, Block())
        if quantized
        else stored
        for name, stored in zip(core.rule.moments, leaf.moments, strict=True)
    )
    return weight, tuple(moments)


def compare_leaf(room, a, b, plain, kernel):
    """Compares two results for one leaf; see `differences`."""
    (weight, moments), (other, others) = plain, kernel
    bits = 0 if a.correction is None else 8 * a.correction.dtype.itemsize
    ends = [x.reshape(weight.shape) for x in (weight, other, a.param, b.param)]
    ulp = ulp_of(functools.reduce(jnp.maximum, map(magnitude, ends)), a.param.dtype)
    # |A - B| ≤ |A - a| + |a - b| + |b - B| for the weights a, b that are stored as A, B. A
    # threshold that both paths share takes the place of one half: no more than that.
    checks = [excess(weight, other, room[0], 2 * CODE[bits] * ulp)]
    checks.append(excess(a.param, b.param, room[0], 2 * CODE[0] * ulp))
    distance = steps_apart(a.param, b.param)
    codes = code = scales = wrong = jnp.zeros((), int)
    for error, x, y, one, two in zip(
        room[1:], a.moments, b.moments, moments, others, strict=True
    ):
        if not isinstance(x, Quantized):
            checks.append(excess(one, two, error, ulp_of(one, jnp.float32)))
            continue
        apart = jnp.abs(x.codes.astype(int) - y.codes.astype(int))
        codes, code = codes + jnp.sum(apart > 0), jnp.maximum(code, jnp.max(apart))
        scales += jnp.sum(x.scale != y.scale)
        # A scale of 16 bits is a rounded number: that may go up or down.
        narrow = x.scale.dtype.itemsize == 2
        units = 1 if narrow else ROUNDINGS * 2**24
        wrong += jnp.sum(apart > 1) + jnp.sum(steps_apart(x.scale, y.scale) > units)
    return {
        "codes": codes,
        "code": code,
        "scales": scales,
        "params": jnp.sum(distance > 0),
        "ulp": jnp.max(distance),
        "used": functools.reduce(jnp.maximum, (jnp.max(used) for used in checks)),
        "wrong": wrong + sum(jnp.sum(~(used <= 1)) for used in checks),
    }


def excess(x, y, room, unit):
    """Returns differences over what is allowed; inf where one is not finite alone."""
    x, y, unit = (z.ravel().astype(float) for z in (x, y, unit))
    same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    share = jnp.where(finite, jnp.abs(x - y) / (room + unit), jnp.inf)
    return jnp.where(same, 0.0, share)


def magnitude(x):
    return jnp.abs(x.astype(float))


def ulp_of(x, dtype):
    """Returns the distance of the numbers of `dtype` around `x`."""
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(magnitude(x))
    lowest = jnp.maximum(exponent - 1, info.minexp)
    return jnp.ldexp(jnp.ones(x.shape), lowest - info.nmant)


def steps_apart(x, y):
    """Counts the numbers of their dtype between two arrays; NaNs are equal."""
    dtype = jnp.dtype(f"i{x.dtype.itemsize}")

    def order(z):
        pattern = lax.bitcast_convert_type(z, dtype).astype(jnp.int64)
        return jnp.where(pattern < 0, jnp.iinfo(dtype).min - pattern, pattern)

    apart = jnp.abs(order(x) - order(y))
    return jnp.where(jnp.isnan(x) & jnp.isnan(y), 0, apart)


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
        options = (FORMATS | MORE)[self.format]
        compression = mpx.optim.Compression(min_size=0, **options)
        make, args, options = RULES[self.rule]
        return make(RATE, *args, **options, compression=compression, backend=backend)


def all_cases():
    """Yields all rules with all formats, dtypes where one of the two is the first."""
    for rule in RULES:
        for format in FORMATS:
            few = rule != FIRST[0] and format != FIRST[1]
            yield Case(rule, format, LEAVES[:1] if few else LEAVES)
    yield from (Case(FIRST[0], format, LEAVES) for format in MORE)
    for rule in ("adamw", "lion", "sgd"):
        yield Case(rule, FIRST[1], LAYERS, by_layer=True)


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


def prepare(cases, shapes, pool):
    """Traces one after another, and compiles meanwhile: both paths, and the comparison."""
    programs = []
    for case in cases:
        params = draw(case, 0, shapes, 0.05)
        state = case.optimizer("jax").init(params)
        flag, scale = jnp.ones((), bool), jnp.ones(())
        steps = {}
        for path, backend in (("plain", "jax"), ("kernel", "auto")):
            by_layer = case.by_layer and path == "kernel"
            take = step_by_layer if by_layer else take_step
            step = functools.partial(take, case.optimizer(backend))
            lowered = jax.jit(step).lower(params, state, params, flag, scale)
            steps[path] = pool.submit(lowered.compile)
        results = (params, state)
        with jax.enable_x64(True):
            compare = jax.jit(functools.partial(differences, case.optimizer("jax")))
            lowered = compare.lower(results, params, scale, results, results)
        programs.append((case, steps, pool.submit(lowered.compile)))
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


def run_case(case, steps, compare, shapes):
    """Takes steps from the same states; returns what differed by leaf, and other faults."""
    paths, compare = {k: x.result() for k, x in steps.items()}, compare.result()
    launches = {"plain": 0, "kernel": len(set(case.leaves))}
    problems = [p for k in paths for p in kernel_problems(paths[k], k, launches[k])]
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
    return total, problems


def kernel_problems(program, path, expected):
    """Says if a program has not the kernels it should have; equal leaves share one."""
    if jax.default_backend() == "cpu":
        return []  # the interpreter leaves no trace
    found = program.as_text().count(KERNEL)
    return [] if found == expected else [f"{path}: {found} kernels, not {expected}"]


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
        row = lax.broadcasted_iota(jnp.uint32, shape, 0) + jnp.uint32(first)
        column = lax.broadcasted_iota(jnp.uint32, shape, 1)
        place = row * np.uint32(0x9E3779B1) + column
        return mix(place ^ mix(jnp.uint32(stream)))

    def centred(columns, stream):
        top = (noise(columns, stream) >> np.uint32(8)).astype(jnp.int32)
        return top.astype(jnp.float32) * np.float32(2.0**-24) - np.float32(0.5)

    def codes(stream, lowest, dtype):
        top = (noise(width, stream) >> np.uint32(24)).astype(jnp.int32)
        return jnp.maximum(top + lowest, lowest + 1).astype(dtype)

    scales = (1 + centred(width // 32, 2)).astype(jnp.bfloat16)
    mu = Quantized(codes(1, -128, jnp.int8), scales)
    nu = Quantized(codes(3, 0, jnp.uint8), 2 + centred(width // 32, 4))
    correction = codes(5, -128, jnp.int8)
    params = {"w": centred(width, 6).astype(jnp.bfloat16)}
    any_size = mpx.optim.Compression(min_size=0)
    optimizer = mpx.optim.flash_adamw(RATE, compression=any_size)
    small: Any = optimizer.init({"w": params["w"][:1, :32]})
    numbers = {"mu": mu, "nu": nu, CORRECTION: correction}
    packed = small.packed["w"].packing.pack(numbers)
    state = dataclasses.replace(
        small, count=jnp.asarray(5, jnp.int32), packed={"w": packed}
    )
    return params, state, {"w": centred(width, 7).astype(jnp.bfloat16)}


def run_huge(rows, width, chunk):
    """Steps one huge leaf in place, then compares it with plain JAX part by part."""
    case = Case(*FIRST, ())
    yes, scale = jnp.array(True), jnp.ones(())
    inputs = jax.jit(functools.partial(huge_inputs, rows, width))()
    step = functools.partial(take_step, case.optimizer("auto"))
    program = jax.jit(step, donate_argnums=(0, 1)).lower(*inputs, yes, scale).compile()
    leaf = PackedLeaf(inputs[0]["w"], inputs[1].packed["w"])
    launches = int(_dispatch.can_address(leaf, leaf.param.size))
    problems = kernel_problems(program, "kernel", launches)
    result = program(*inputs, yes, scale)
    del inputs, leaf

    @jax.jit
    def part(first, result):
        # The rows are the last axis but one: the first one, or that behind the planes.
        cut = lambda x: lax.dynamic_slice_in_dim(x, first, chunk, x.ndim - 2)  # noqa: E731
        mine = jax.tree.map(lambda x: cut(x) if x.ndim else x, result)
        return huge_inputs(chunk, width, first), mine

    # A program of its own: together with `part` XLA would not round what it makes to bf16.
    plain = jax.jit(functools.partial(take_step, case.optimizer("jax")))
    compare = jax.jit(functools.partial(differences, case.optimizer("jax")))
    total = Found()
    for first in range(0, rows, chunk):
        (params, state, grads), got = part(jnp.int32(first), result)
        want = plain(params, state, grads, yes, scale)
        with jax.enable_x64(True):
            (fields,) = compare((params, state), grads, scale, want, got)
        total += found_of(chunk * width, fields)
    return total, problems


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
    counts = found.elements, found.codes, found.code, found.scales, found.params
    told = "WRONG: " + "; ".join(problems) if problems else ""
    measure.print_row(name, *counts, found.ulp, f"{found.used:.2f}", told)
    return not problems


def main():
    """Runs the cases; returns the exit status."""
    # The kernel steps everything, also what plain JAX steps as fast.
    setattr(_dispatch, "_takes_kernel", lambda job, backend: backend == "auto")  # noqa: B010
    options = measure.read_options(__doc__, "only= huge tiny")
    start = time.perf_counter()
    device = jax.devices()[0]
    if options.tiny:
        interpret_kernel()
    elif jax.default_backend() != "gpu":
        sys.exit(f"The kernel needs a GPU, but here is {device}: --tiny interprets it.")
    shapes = TINY_SHAPES if options.tiny else SHAPES
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    print(f"{device.device_kind}, jax {jax.__version__}")
    columns = "elements", "codes ≠", "by", "scales ≠", "params ≠", "ulps", "weight"
    measure.print_head("case", *columns, "")
    passed = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for case, steps, compare in prepare(cases, shapes, pool):
            leaves, problems = run_case(case, steps, compare, shapes)
            for leaf, found in leaves.items():
                passed.append(report(f"{case.name}, {leaf}", found, problems))
    if options.huge:
        width, chunk, sizes = TINY if options.tiny else HUGE
        for rows in sizes:
            found = run_huge(rows, width, chunk)
            passed.append(report(f"adamw, {rows} × {width}", *found))
    print(
        f"\n{sum(passed)} of {len(passed)} lines passed, {time.perf_counter() - start:.0f} s"
    )
    return int(not all(passed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
