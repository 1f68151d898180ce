"""Ragged matmuls: the grouped kernel, its derivatives, and both under `amp` and `fp8`."""

import functools
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import h200
import mpx
from kernel_cases import needs_mosaic
from mpx._ops._experts import _plain, _ragged
from mpx._program._queries import GROUPED, equations
from mpx.recipes import MXFP8, CurrentScaling

BF16, F32 = jnp.bfloat16, jnp.float32
ROWS, SUMMED, COLUMNS = 136, 128, 256
SIZES: dict[str, list[int]] = {
    "uneven": [3, 97, 20, 16],
    "empty groups": [0, 100, 0, 36],
    "rows without a group": [50, 0, 33, 20],
    "one has all": [0, 0, 136, 0],
    "no rows": [0, 0, 0, 0],
    "one group": [136],
    "whole blocks": [64, 72],
}
# The others differ for the kernel only.
EDGES = ["rows without a group", "no rows", "one group"]
each_size = pytest.mark.parametrize("sizes", [SIZES[x] for x in EDGES], ids=EDGES)


@pytest.fixture
def hopper(monkeypatch):
    """As on a Hopper GPU; here plain JAX takes the place of the kernel."""
    for module in (_ragged,):
        monkeypatch.setattr(module, "gpu_capability", lambda: (9, 0))


def draw(groups, *, key=0, columns=COLUMNS, dtype=F32):
    """Matrices, rows and the gradient of the result: numbers of bf16."""
    rng = np.random.default_rng(key)
    shapes = (groups, SUMMED, columns), (ROWS, SUMMED), (ROWS, columns)
    return [jnp.asarray(rng.normal(size=shape), BF16).astype(dtype) for shape in shapes]


def as_f64(*arrays) -> Any:
    """Arrays of NumPy; one alone, of several a list."""
    found = [np.asarray(x.astype(F32), np.float64) for x in arrays]
    return found[0] if len(found) == 1 else found


def exact(p, x, grad, sizes):
    """The result and the gradients of matrices and rows, group by group, in f64."""
    p, x, grad = as_f64(p, x, grad)
    out, dp, dx = np.zeros(grad.shape), np.zeros(p.shape), np.zeros(x.shape)
    start = 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows], dx[rows] = x[rows] @ p[i], grad[rows] @ p[i].T
        dp[i] = x[rows].T @ grad[rows]
        start += size
    return out, dp, dx


def results(func, p, x, grad, sizes):
    """The same by a function and its derivative."""
    out, pull = jax.vjp(lambda p, x: func(p, x, jnp.asarray(sizes, jnp.int32)), p, x)
    return out, *pull(grad.astype(out.dtype))


def assert_close(got, want, ulp=2.0**-8):
    """Sums of a few hundred products near 1 in f32, rounded once."""
    for found, true in zip(got, want, strict=True):
        np.testing.assert_allclose(as_f64(found), true, rtol=ulp, atol=2.0**-12)


def off_by(found, true):
    """The relative error of the whole, which a sum of parts that cancel does not raise."""
    return np.linalg.norm(as_f64(found) - true) / np.linalg.norm(true)


def ragged(p, x, sizes):
    return lax.ragged_dot(x, p, sizes)


def grouped_in(func, *args):
    """The kinds of the grouped matmuls that a function becomes."""
    found = equations(jax.make_jaxpr(func)(*args))
    return [eqn.params["kind"] for eqn in found if eqn.primitive.name == GROUPED]


# --- the kernel -----------------------------------------------------------------------


@pytest.mark.parametrize("block", [64, 128])
def test_blocks_of_rows_hold_each_row_once(block):
    find = jax.jit(_plain.row_blocks, static_argnums=(1, 2))
    rng = np.random.default_rng(0)
    for case in [*(x for x in SIZES.values() if len(x) == 4), *range(40)]:
        sizes = case
        if isinstance(case, int):
            cuts = np.sort(rng.integers(0, ROWS + 1, 4))
            sizes = np.diff(cuts, prepend=0)
        owner = np.repeat([*range(4), 4], [*sizes, ROWS - sum(sizes)])
        seen = np.full(ROWS, -1)
        found = find(jnp.asarray(sizes, jnp.int32), ROWS, block)
        for group, first, begin, count in zip(*map(np.asarray, found), strict=True):
            assert first % 8 == 0
            assert 0 <= first <= ROWS - block
            if count == 0:
                continue
            rows = slice(first + begin, first + begin + count)
            assert begin >= 0
            assert begin + count <= block
            assert np.all(seen[rows] == -1)
            seen[rows] = group
        np.testing.assert_array_equal(seen, owner)


@pytest.mark.some(1)
@needs_mosaic
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", ["rows", "turned", "sums"])
@pytest.mark.parametrize("name", ["rows without a group", "uneven"])
def test_kernel_in_the_interpreter_is_right(kind, name):
    from mpx._ops._experts import _mosaic
    from mpx._ops._experts._mosaic import Blocks

    sizes, pallas = SIZES[name], import_module("jax.experimental.pallas.mosaic_gpu")
    p, x, grad = draw(4, columns=64, dtype=BF16)
    end = sum(sizes)
    # Nobody looks at these rows.
    x, grad = x.at[end:].set(jnp.nan), grad.at[end:].set(jnp.inf)
    options = {
        "dtype": np.dtype(F32),
        "blocks": Blocks(64, 64, 64, 2, 8),
        "programs": 2,
        "interpret": pallas.InterpretGPUParams(),
    }
    counts = jnp.asarray(sizes, jnp.int32)
    if kind == "sums":
        got = _mosaic.sum_rows(x, grad, counts, **options)
        want = exact(p, x[:end], grad[:end], sizes)[1]
    elif kind == "turned":
        got = _mosaic.multiply_rows(grad, p, counts, turned=True, **options)
        want = exact(p, x, grad, sizes)[2]
    else:
        got = _mosaic.multiply_rows(x, p, counts, turned=False, **options)
        want = exact(p, x, grad, sizes)[0]
    np.testing.assert_allclose(got, want, rtol=2.0**-20, atol=2.0**-15)


# --- under amp ------------------------------------------------------------------------


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@each_size
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f32 result", "f32 weight gradients"])
def test_amp_runs_ragged_matmuls_in_the_grouped_kernel(dtype, sizes):
    is_low = dtype in ("bf16", "f32 result")
    p, x, grad = draw(len(sizes), dtype=BF16 if is_low else F32)
    options = {"reduce_dtype": "f32"} if "weight" in dtype else {}
    wanted = {"preferred_element_type": F32} if "result" in dtype else {}
    func = lambda p, x, s: lax.ragged_dot(x, p, s, **wanted)  # noqa: E731
    run = functools.partial(results, mpx.amp(func, **options))  # pyright: ignore[reportCallIssue]
    counts = jnp.asarray(sizes, jnp.int32)
    # The kinds of the forward pass and of both gradients, in whatever order.
    assert sorted(grouped_in(run, p, x, grad, counts)) == ["rows", "sums", "turned"]
    got = jax.jit(run)(p, x, grad, counts)
    assert [a.dtype for a in got] == [F32 if wanted else p.dtype, p.dtype, x.dtype]
    want = exact(p, x, grad, sizes)
    assert_close(got, want)
    if options:
        assert_close(got[1:2], want[1:2], ulp=2.0**-20)
    if wanted:
        assert_close(got[:1], want[:1], ulp=2.0**-20)


SECOND = {
    "forward over reverse": lambda loss, args: jax.jvp(
        jax.grad(loss, (0, 1)), args, args
    )[1],
    "reverse over reverse": lambda loss, args: jax.grad(
        lambda *args: sum(jnp.sum(x**2) for x in jax.grad(loss, (0, 1))(*args)), (0, 1)
    )(*args),
}


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_right(name):
    sizes = SIZES["rows without a group"]
    p, x, _ = (a / 16 for a in draw(4))
    # JAX has no second derivative of a ragged matmul in reverse mode.
    ends = np.cumsum(sizes)
    rows = np.arange(ROWS)[:, None]
    member = jnp.asarray((rows < ends) & (rows >= ends - sizes), F32)

    def loss(func, p, x):
        return jnp.sum(func(p, x).astype(F32) ** 3)

    def grouped(p, x):
        return mpx.amp(ragged)(p, x, jnp.asarray(sizes, jnp.int32))

    def masked(p, x):
        return jnp.einsum("mk,gkn,mg->mn", x, p, member)

    derive = SECOND[name]

    def run(func, *args):
        return derive(functools.partial(loss, func), args)

    kinds = grouped_in(functools.partial(run, grouped), p, x)
    assert {*kinds} == {"rows", "turned", "sums"}
    got, want = run(grouped, p, x), run(masked, p, x)
    for found, true in zip(got, want, strict=True):
        assert off_by(found, as_f64(true)) < 2.0**-6


def in_scan(func, p, x, sizes):
    """Two layers with matrices of their own."""
    return lax.scan(lambda _, w: (None, func(w, x, sizes)), None, p)[1].sum(0)


WAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "remat": (lambda f, p, x, s: jax.checkpoint(f)(p, x, s), ()),
    "scan": (in_scan, ("p",)),
    "vmap over rows": (lambda f, *a: jax.vmap(f, (None, 0, None))(*a), ("x", "g")),
    "vmap over all": (lambda f, *a: jax.vmap(f)(*a), ("p", "x", "g", "s")),
    "vmap over matrices": (lambda f, *a: jax.vmap(f, (0, None, None))(*a), ("p", "g")),
}


@pytest.mark.some(2)
@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("way", WAYS)
def test_ragged_matmul_is_grouped_under(way):
    around, doubled = WAYS[way]
    first, second = ("uneven", "rows without a group")
    sizes = [SIZES[name if "s" in doubled else first] for name in (first, second)]
    cases = [draw(4, key=key) for key in (0, 1)]
    for i, letter in enumerate("pxg"):
        if letter not in doubled:
            cases[1][i] = cases[0][i]
    want = [exact(*case, sizes=size) for case, size in zip(cases, sizes, strict=True)]
    args = [
        jnp.stack([case[i] for case in cases]) if letter in doubled else cases[0][i]
        for i, letter in enumerate("pxg")
    ]
    counts = np.stack(sizes) if "s" in doubled else sizes[0]
    func = functools.partial(around, mpx.amp(ragged))
    run = functools.partial(results, func, sizes=counts)
    assert len(grouped_in(run, *args)) >= 3
    got = jax.jit(run)(*args)
    for i, (found, letter) in enumerate(zip(got, "gpx", strict=True)):
        pair = [w[i] for w in want]
        if way == "remat":
            true = pair[0]
        else:
            true = np.stack(pair) if letter in doubled else np.sum(pair, axis=0)
        assert off_by(found, true) < 2.0**-8


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.filterwarnings("ignore:`fp8` changed nothing")
@pytest.mark.parametrize("experts", ["replicated", "sharded"])
@pytest.mark.parametrize("wrap", [mpx.amp, functools.partial(mpx.fp8, min_gain=0)])
def test_eight_devices_have_the_rows_and_groups_of_their_own(experts, wrap):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    of_each = [draw(4, key=key) for key in range(8)]
    names = list(SIZES)[:4]
    sizes = [SIZES[names[key % 4]] for key in range(8)]
    if experts == "replicated":
        for each in of_each:
            each[0] = of_each[0][0]
    want = [exact(*each, sizes=size) for each, size in zip(of_each, sizes, strict=True)]
    p, x, grad = (jnp.concatenate(parts) for parts in zip(*of_each, strict=True))
    spec = P("x")
    if experts == "replicated":
        p, spec = of_each[0][0], P()

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, P("x"), P("x")), out_specs=P("x")
    )
    def call(p, x, sizes):
        return wrap(ragged)(p, x, sizes)

    counts = jnp.asarray(np.concatenate(sizes), jnp.int32)
    assert len(grouped_in(functools.partial(results, call), p, x, grad, counts)) == 3
    got = jax.jit(functools.partial(results, call))(p, x, grad, counts)
    parts = list(zip(*want, strict=True))
    dp = np.sum(parts[1], axis=0) if experts == "replicated" else parts[1]
    want = [np.concatenate(parts[0]), np.reshape(dp, p.shape), np.concatenate(parts[2])]
    for found, true in zip(got, want, strict=True):
        assert off_by(found, true) < (2.0**-8 if wrap is mpx.amp else 0.08)


KEPT = {
    "no Hopper GPU": ((8, 0), (136, 128, 256), "the kernel needs a Hopper GPU"),
    "rows": ((9, 0), (130, 128, 256), "it has 130 rows, not a mul"),
    "few rows": ((9, 0), (64, 128, 256), "it has 64 rows, not a multi"),
    "columns": ((9, 0), (136, 128, 96), "96 is not a multiple of 64"),
}


@pytest.mark.parametrize("name", KEPT)
def test_report_says_how_a_ragged_matmul_runs(monkeypatch, name):
    capability, (rows, summed, columns), reason = KEPT[name]
    monkeypatch.setattr(_ragged, "gpu_capability", lambda: capability)
    if not _ragged.HAS_MOSAIC and capability == (9, 0):
        reason = "the kernel needs jax 0.11 or later"
    args = [
        jnp.zeros((2, summed, columns)),
        jnp.zeros((rows, summed)),
        jnp.array([3, 5]),
    ]
    report = mpx.inspect.report(mpx.amp(ragged), *args)
    (matmul,) = report.amp.matmuls
    assert matmul.reason.startswith(f"every group for every row: {reason}")
    assert f"every group for every row: {reason}" in str(report)
    assert report.shares == {"bf16": 1.0}
    assert grouped_in(mpx.amp(ragged), *args) == []


@needs_mosaic
@pytest.mark.usefixtures("hopper")
def test_report_names_the_grouped_kernel_and_counts_its_work():
    p, x, _ = draw(4)
    args = p, x, jnp.array(SIZES["uneven"])
    report = mpx.inspect.report(mpx.amp(ragged), *args)
    assert report.amp.matmuls[0].reason == "in a grouped kernel"
    assert "in a grouped kernel" in str(report)
    assert report.flops == {"bf16": 2 * ROWS * SUMMED * COLUMNS}
    assert mpx.inspect.report(
        mpx.amp(jax.grad(lambda *a: ragged(*a).sum())), *args
    ).flops


@needs_mosaic
@pytest.mark.usefixtures("hopper")
def test_operands_that_may_be_sharded_run_in_plain_jax():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    p, x, grad = draw(4)
    sizes = SIZES["rows without a group"]
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("x")))
        report = mpx.inspect.report(mpx.amp(ragged), p, x, jnp.asarray(sizes))
        run = jax.jit(functools.partial(results, mpx.amp(ragged), sizes=sizes))
        got = run(p, x, grad)
    assert (
        "may be sharded: call it under `jax.shard_map`" in report.amp.matmuls[0].reason
    )
    assert_close(got, exact(p, x, grad, sizes))


FORMS = {
    "a batch": lambda p, x, s: lax.ragged_dot_general(
        x[None], p[None], s[None],
        lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1]),
    ),
    "axes behind": lambda p, x, s: lax.ragged_dot_general(
        x[..., None], p, s,
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
    "more axes": lambda p, x, s: lax.ragged_dot_general(
        x[:, None], p, s,
        lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), [0], [0]),
    ),
}  # fmt: skip


@pytest.mark.some(2)
@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", FORMS)
def test_other_forms_run_as_before(name):
    p, x, grad = draw(4)
    sizes = jnp.array(SIZES["uneven"])
    (matmul,) = mpx.inspect.report(mpx.amp(FORMS[name]), p, x, sizes).amp.matmuls
    assert "it is not rows times a matrix for each group" in matmul.reason
    out = mpx.amp(FORMS[name])(p, x, sizes)
    assert_close([out.reshape(grad.shape)], exact(p, x, grad, sizes)[:1])


# --- under fp8 ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8(emulate=True)])
def test_fp8_leaves_a_ragged_matmul(recipe):
    args = [
        jnp.ones((2, 128, 256), BF16),
        jnp.ones((136, 128), BF16),
        jnp.array([3, 5]),
    ]
    func = mpx.fp8(ragged, recipe, min_gain=0)
    (matmul,) = mpx.inspect.report(func, *args).fp8.kept
    assert matmul.reason.startswith("it is a ragged matmul")
    with pytest.warns(RuntimeWarning, match="changed nothing: .*it is a ragged matmul"):
        found = func(*args)
    assert np.array_equal(found, ragged(*args))


@needs_mosaic
@pytest.mark.usefixtures("hopper")
@pytest.mark.filterwarnings("ignore:`fp8` changed nothing")
def test_fp8_leaves_experts_to_the_grouped_kernel():
    p, x, grad = draw(4, dtype=BF16)
    func = mpx.fp8(ragged, min_gain=0)
    run = functools.partial(results, func, sizes=SIZES["uneven"])
    found = [
        (eqn.params["kind"], *(var.aval.dtype.name for var in eqn.invars[:2]))
        for eqn in equations(jax.make_jaxpr(run)(p, x, grad))
        if eqn.primitive.name == GROUPED
    ]
    assert {kind for kind, *_ in found} == {"rows", "turned", "sums"}
    assert {dtype for _, *dtypes in found for dtype in dtypes} == {"bfloat16"}


# --- compiled for an H200 -------------------------------------------------------------


def loss_of(func):
    return lambda p, x, s: jnp.mean(func(p, x, s).astype(F32) ** 2)


def batched(p, x, s):
    return jnp.einsum("ecd,edf->ecf", x.reshape(8, -1, x.shape[1]), p)


TOKENS, WIDTH, OUTPUTS, EXPERTS = 4096, 1024, 512, 8
# By name: a function, the number of devices, and how many grouped kernels and fp8 calls
# its gradient has.
PROGRAMS = {
    "amp": (mpx.amp(loss_of(ragged)), 1, (3, 0)),
    "amp, f32 gradients": (mpx.amp(loss_of(ragged), reduce_dtype="f32"), 1, (3, 0)),
    "fp8": (mpx.fp8(loss_of(ragged), min_gain=0), 1, (3, 0)),
    "fp8, batched": (mpx.fp8(loss_of(batched), min_gain=0), 1, (0, 3)),
    "auto": (mpx.amp(loss_of(ragged)), 8, (0, 0)),
    "shard_map": (mpx.amp(loss_of(ragged)), 8, (3, 0)),
    "shard_map, fp8": (mpx.fp8(loss_of(ragged), min_gain=0), 8, (3, 0)),
}


@pytest.mark.gpu_compile
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradient_for_an_h200_is_in_grouped_kernels(name):
    func, count, expected = PROGRAMS[name]
    mesh = Mesh(h200.devices()[:count], "x", axis_types=(AxisType.Auto,))
    specs = [P(), P("x"), P()] if count > 1 else [P()] * 3
    if name.startswith("shard_map"):
        each = lambda *args: lax.pmean(func(*args), "x")  # noqa: E731
    else:
        each = func
    call = each
    if each is not func:
        call = jax.shard_map(each, mesh=mesh, in_specs=(*specs,), out_specs=P())
    shapes = (
        ((EXPERTS, WIDTH, OUTPUTS), BF16),
        ((TOKENS, WIDTH), BF16),
        ((EXPERTS,), jnp.int32),
    )
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    ]
    # Pallas asks the mesh for the kind of its GPUs.
    with jax.set_mesh(mesh):
        program = jax.jit(jax.grad(call, argnums=(0, 1))).lower(*args)
        program = program.compile(h200.compiler_options())
    kernels = program.as_text().count('custom_call_target="mosaic_gpu_v2"')
    check = mpx.inspect.fp8_check(program)
    assert (kernels, check.fp8) == expected
    assert check.other.get("grouped bf16", 0) == max(0, kernels - check.fp8)


@pytest.mark.gpu_compile
@pytest.mark.usefixtures("hopper")
def test_kernel_is_not_split_between_devices_behind_our_back():
    # Traced without the mesh: only the compiler knows that there are eight devices.
    mesh = Mesh(h200.devices(), "x", axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P())
    shapes = (EXPERTS, WIDTH, OUTPUTS), (TOKENS, WIDTH)
    args = [jax.ShapeDtypeStruct(shape, BF16, sharding=sharding) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32, sharding=sharding)
    func = mpx.amp(ragged)
    assert grouped_in(func, *args, sizes) == ["rows"]
    program = jax.jit(func).lower(*args, sizes).compile(h200.compiler_options())
    assert "mosaic_gpu" not in str(program.as_text())


@needs_mosaic
@pytest.mark.usefixtures("hopper")
def test_what_the_grouped_kernel_reads_is_kept_in_8_bits():
    sizes = jnp.asarray(SIZES["rows without a group"], jnp.int32)
    p, x, _ = draw(4)

    def loss(p, x):
        h = jnp.tanh(lax.ragged_dot(x, p, sizes) / 16)
        return jnp.sum(lax.ragged_dot(h, jnp.swapaxes(p, 1, 2), sizes))

    low = mpx.amp(loss, residuals="int8")
    assert grouped_in(jax.grad(low), p, x).count("sums") == 2
    found = mpx.inspect.report(low, p, x).residuals
    assert [row.format for row in found] == ["int8"]
