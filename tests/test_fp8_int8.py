"""The recipe `Int8`: codes, scales and products beside NumPy, and how gradients round."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from fp8_cases import (
    BF16,
    as_f64,
    assert_scan_is_the_unrolled_loop,
    assert_training_ends_near_bf16,
    everywhere,
    explained,
    layer_problem,
    layers,
    one_layer,
    one_layer_problem,
    two_layer_problem,
    two_layers,
)
from models import normal
from mpx import fp8
from mpx._fp8 import _operands
from mpx._fp8._decide import predicted_gain
from mpx._fp8._operands import MatmulSpec, to_fp8
from mpx._fp8._rounding import mpx_round, noise_of
from mpx.recipes import CurrentScaling, Int8
from mpx.testing import assert_trees_equal
from test_fp8 import eight_bit_products
from test_fp8_scales import ALL, exact, plan_for, problem, products, run

NEAREST = Int8(rounding="nearest")

# --- NumPy's own computation ----------------------------------------------------------


def mixed(x):
    """The hash of 32-bit integers, written anew."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def uniform(x):
    """The random numbers of a tensor: from the bits of a number and from its place."""
    place = np.arange(x.size, dtype=np.uint32).reshape(x.shape)
    drawn = mixed(place ^ mixed(x.astype(np.float32).view(np.uint32)))
    return ((drawn >> np.uint32(16)).astype(np.float64) + 0.5) / 65536


def integers(x, axes, noise=None):
    """Codes and scales: 127 for the largest magnitude of what is summed."""
    largest = np.max(np.abs(x), axis=axes, keepdims=True)
    # Half of the largest number is a tie, which the rounding of the scale decides.
    scale = largest.astype(np.float32) * np.float32(1 / 127)
    number = (x.astype(np.float32) * (np.float32(1) / scale)).astype(np.float64)
    np.testing.assert_allclose(number, x / (largest / 127), rtol=2.0**-22)
    if noise is None:
        return np.rint(number), scale.astype(np.float64)
    codes = np.floor(np.clip(number, -127, 127) + noise)
    return codes, scale.astype(np.float64)


def groups_of(x, summed, batch=()):
    free = [i for i in range(x.ndim) if i not in (*summed, *batch)]
    return tuple(summed), tuple(free)


@pytest.mark.parametrize("role", ["activation", "weight", "grad"])
@pytest.mark.parametrize("recipe", [Int8(), NEAREST], ids=["stochastic", "nearest"])
def test_codes_and_scales_are_those_of_numpy(role, recipe):
    x = normal(3, 48, 80, dtype=BF16) * jnp.asarray(2.0 ** np.arange(-24, 24), BF16)[
        :, None
    ]  # fmt: skip
    spec = MatmulSpec((((1,), (0,)), ((), ())), x.dtype, 1, recipe)
    wide = as_f64(x)
    noise = uniform(wide) if (role, recipe) == ("grad", Int8()) else None
    found = to_fp8(spec, role, x, ((1,), (0,)), batch=(), seen=None)
    for operand, axis in zip(found, (1, 0), strict=True):
        codes, scale = integers(wide, axis, noise)
        assert operand.codes.dtype == jnp.int8
        assert np.array_equal(operand.codes, codes)
        assert np.abs(codes).max() == 127
        np.testing.assert_allclose(operand.scale, scale, rtol=2.0**-23)


LAYOUTS = ("x @ w", "w @ x (Equinox)", "heads, crossed", "experts", "two batch axes")


@pytest.mark.some(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", [Int8(), NEAREST], ids=["stochastic", "nearest"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_three_products_are_those_of_numpy(layout, recipe, dtype):
    a, b, g, dimensions, side = problem(layout, dtype)
    got = run(plan_for(a, b, dimensions, side, recipe), a, b, g)
    noise = uniform(as_f64(g)) if recipe == Int8() else None
    batch = dimensions[1]
    one, other = (
        groups_of(x, dimensions[0][i], batch[i]) for i, x in enumerate((a, b))
    )
    n_batch, n_rows = len(batch[0]), len(one[1])
    rows = tuple(range(n_batch, n_batch + n_rows))
    columns = tuple(range(n_batch + n_rows, g.ndim))

    def rounded(x, axes, noise=None):
        codes, scale = integers(as_f64(x), axes, noise)
        return codes * scale

    # `exact` casts to f32, which a code times a scale is not.
    factors = [
        (rounded(a, one[0]), rounded(b, other[0]), as_f64(g)),
        (as_f64(a), rounded(b, other[1]), rounded(g, columns, noise)),
        (rounded(a, one[1]), as_f64(b), rounded(g, rows, noise)),
    ]
    want = [products(x, dimensions)[i] for i, x in enumerate(factors)]
    ulp = float(jnp.finfo(dtype).eps)
    for found, true in zip(got, want, strict=True):
        assert found.dtype == dtype
        # The sum is exact. Two scales and their products round in f32, the result once.
        np.testing.assert_allclose(as_f64(found), true, rtol=ulp, atol=2.0**-18)


@pytest.mark.parametrize("layout", ["x @ w", "experts"])
def test_error_is_half_a_code_at_most(layout):
    a, b, g, dimensions, side = problem(layout)
    got = run(plan_for(a, b, dimensions, side, NEAREST), a, b, g)
    want, k = exact(a, b, g, dimensions), 96
    for found, true in zip(got, want, strict=True):
        # |x̂ŵ - xw| ≤ |w|/254 + |x|/254 (of the largest, below 5) and one ulp of bf16.
        bound = k * 2 * 5 * 5 / 254 + 2.0**-8 * np.abs(true)
        assert np.all(np.abs(as_f64(found) - true) <= bound)


# --- the backward pass in the compute dtype -------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize("layout", ALL)
def test_forward_only_leaves_gradients_as_they_are(layout):
    a, b, g, dimensions, side = problem(layout)
    out, da, db = run(plan_for(a, b, dimensions, side, Int8(backward=False)), a, b, g)
    assert_trees_equal(out, run(plan_for(a, b, dimensions, side, Int8()), a, b, g)[0])
    for found, true in zip((da, db), exact(a, b, g, dimensions)[1:], strict=True):
        np.testing.assert_allclose(as_f64(found), true, rtol=2.0**-8, atol=2.0**-18)


@pytest.mark.parametrize(("backward", "saved"), [(True, "int8"), (False, "bfloat16")])
def test_what_the_backward_pass_needs_is_kept(backward, saved):
    a, b, g, dimensions, side = problem("x @ w")
    plan = plan_for(a, b, dimensions, side, Int8(backward=backward))
    _, back = jax.vjp(lambda a, b: _operands_dot(plan, a, b), a, b)
    kept = [x for x in jax.tree.leaves(back) if getattr(x, "ndim", 0) and x.size > 96]
    assert sorted(x.shape for x in kept) == [a.shape, b.shape]
    assert {str(x.dtype) for x in kept} == {saved}


def _operands_dot(plan, a, b):
    from mpx._fp8._dot import fp8_dot

    return fp8_dot(plan, a, b, None, None)


# --- stochastic rounding --------------------------------------------------------------

MANY = 2**16


@pytest.mark.parametrize("value", [0.3, 5.5, -63.01, 126.9, 2.0**-9])
@pytest.mark.parametrize("same", ["value", "place"])
def test_stochastic_rounding_is_right_on_average(value, same):
    """Many numbers of one value, or numbers of nearly one value at one place each."""
    x = jnp.full((MANY,), value, jnp.float32)
    noise = noise_of(x)
    if same == "place":
        close = x * (1 + jnp.arange(MANY, dtype=jnp.float32) * 2.0**-24)
        noise = jax.vmap(lambda y: noise_of(y[None])[0])(close)
    codes = mpx_round(x, noise, "int8").astype(jnp.float32)
    below = math.floor(value)
    assert {*np.unique(codes)} == {below, below + 1}
    share = value - below
    # Five standard deviations of the mean, and the steps of the noise.
    bound = 5 * math.sqrt(share * (1 - share) / MANY) + 2.0**-17
    assert abs(float(jnp.mean(codes)) - value) <= bound


def test_random_numbers_are_spread_evenly():
    noise = np.asarray(noise_of(normal(0, MANY, dtype=BF16)))
    assert noise.min() > 0
    assert noise.max() < 1
    counts = np.histogram(noise, bins=16, range=(0, 1))[0]
    # χ² with 15 degrees of freedom: mean 15, standard deviation √30.
    chi = np.sum((counts - MANY / 16) ** 2 / (MANY / 16))
    assert chi < 15 + 5 * math.sqrt(30)


def test_integers_stay_what_they_are():
    whole = jnp.arange(-127, 128, dtype=jnp.float32)
    x = jnp.tile(whole, 64)
    assert np.array_equal(mpx_round(x, noise_of(x), "int8"), x)


def test_small_gradients_survive_on_average():
    # Each number is a tenth of a code: to nearest it would be lost.
    g = jnp.full((4096, 16), 0.1, BF16).at[:, 0].set(127.0)
    spec = MatmulSpec((((1,), (0,)), ((), ())), g.dtype, 1, Int8())
    rows, _ = to_fp8(spec, "grad", g, ((1,), (0,)), batch=(), seen=None)
    codes = np.asarray(rows.codes[:, 1:], np.float64)
    share = float(g[0, 1])
    sigma = math.sqrt(share * (1 - share) / codes.size)
    assert abs(codes.mean() - share) <= 5 * sigma
    plain = MatmulSpec((((1,), (0,)), ((), ())), g.dtype, 1, NEAREST)
    rows, _ = to_fp8(plain, "grad", g, ((1,), (0,)), batch=(), seen=None)
    assert not np.any(rows.codes[:, 1:])


# --- zeros, extremes, inf and nan -----------------------------------------------------


def test_rows_of_zeros_stay_zeros():
    x = normal(0, 32, 32, dtype=BF16).at[3].set(0)
    w = normal(1, 32, 32, dtype=BF16).at[:, 5].set(0)
    out = everywhere(lambda w, x: x @ w, Int8())(w, x)
    assert not np.any(as_f64(out)[3])
    assert not np.any(as_f64(out)[:, 5])
    assert np.all(np.isfinite(as_f64(out)))


@pytest.mark.parametrize("exponent", [-100, -60, 60, 100])
def test_scale_of_a_tensor_is_no_matter(exponent):
    x, w = normal(0, 32, 32, dtype=BF16), normal(1, 32, 32, dtype=BF16)
    layer = everywhere(lambda w, x: x @ w, Int8())
    factor = jnp.asarray(2.0**exponent, BF16)
    assert_trees_equal(layer(w, x * factor), layer(w, x) * factor)


def test_rows_below_the_range_vanish():
    x = jnp.full((16, 16), 2.0**-133, BF16)
    w = jnp.ones((16, 16), BF16)
    assert not np.any(as_f64(everywhere(lambda w, x: x @ w, Int8())(w, x)))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_stay_in_their_rows(bad):
    tensors = [normal(i, 32, 32, dtype=BF16) for i in range(3)]
    a, b, g = tensors
    plan = plan_for(a, b, (((1,), (0,)), ((), ())), 1, Int8())
    hurt = np.arange(32) == 3
    out, da, db = run(plan, a.at[3, 5].set(bad), b, g)
    finite = np.isfinite(as_f64(out))
    assert np.array_equal(finite, np.broadcast_to(~hurt[:, None], finite.shape))
    assert np.all(np.isfinite(as_f64(da)))
    assert not np.any(np.isfinite(as_f64(db)[5]))
    out, da, db = run(plan, a, b, g.at[3, 5].set(bad))
    assert np.array_equal(np.isfinite(as_f64(da)).all(axis=1), ~hurt)
    assert not np.isfinite(as_f64(db))[:, 5].any()


# --- which matmuls, and where ---------------------------------------------------------


def reasons(shape, recipe, **options):
    m, k, n = shape
    args = (jax.ShapeDtypeStruct((k, n), BF16), jax.ShapeDtypeStruct((m, k), BF16))
    func = fp8(lambda p, x: x @ p, recipe, **options)
    (matmul,) = mpx.inspect.report(func, *args).fp8.matmuls
    return matmul.reason


LONG = 133_152  # 127² of these exceed 2³¹


@pytest.mark.parametrize(
    ("shape", "recipe", "reason"),
    [
        ((LONG - 16, 64, 64), Int8(), ""),
        ((LONG, 64, 64), Int8(), f"a sum of {LONG} products may exceed s32"),
        ((64, LONG, 64), Int8(), f"a sum of {LONG} products may exceed s32"),
        ((64, 64, LONG), Int8(), f"a sum of {LONG} products may exceed s32"),
        ((LONG, 64, 64), Int8(backward=False), ""),
        ((64, LONG, 64), Int8(backward=False), "may exceed s32 (at most 133144)"),
        ((64, 72, 64), Int8(), "72 is not a multiple of 16"),
        ((64, 0, 64), Int8(), "a sum of at most 4 products gains nothing"),
    ],
)
def test_matmul_is_kept_for_its_size(shape, recipe, reason):
    found = reasons(shape, recipe, min_gain=0)
    assert reason in found
    assert bool(reason) == bool(found)


def test_longest_sum_is_exact():
    longest = LONG - 16
    assert longest * 127**2 < 2**31 <= (longest + 9) * 127**2
    x = jnp.ones((16, longest), BF16)
    out = jax.jit(everywhere(lambda p, x: x @ p, Int8()))(x.T, x)
    assert np.array_equal(as_f64(out), as_f64(jnp.full((16, 16), longest, BF16)))


def test_kept_matmul_computes_as_written():
    x, w = normal(0, 16, 24, dtype=BF16), normal(1, 24, 16, dtype=BF16)
    layer = lambda w, x: x @ w  # noqa: E731
    with pytest.warns(RuntimeWarning, match="`w` stay .*24 is not a multiple"):
        got = everywhere(layer, Int8())(w, x)
    assert_trees_equal(got, layer(w, x))


def test_prediction_counts_the_passes_that_run_in_int8():
    size = (16384, 4096, 16384)
    fp8_gain = predicted_gain(*size)
    whole = predicted_gain(*size, recipe=Int8())
    forward = predicted_gain(*size, recipe=Int8(backward=False))
    assert 1 < forward < whole < fp8_gain
    assert reasons((2048, 768, 768), Int8()).startswith("too small to gain")


@pytest.mark.parametrize("recipe", ["int8", Int8()])
def test_recipe_has_a_name(recipe):
    assert fp8(lambda p, x: x @ p, recipe).chosen.recipe == Int8()


@pytest.mark.parametrize(
    ("capability", "warns"),
    [(None, False), ((7, 5), False), ((8, 0), False), ((9, 0), False), ((7, 0), True)],
)
def test_gpu_without_int8_units_warns(monkeypatch, capability, warns):
    monkeypatch.setattr(mpx._fp8._transform, "gpu_capability", lambda: capability)
    x = jnp.ones((16, 16), BF16)
    func = everywhere(lambda p, x: x @ p, Int8())
    if not warns:
        func(x, x)
        return
    with pytest.warns(RuntimeWarning, match="7.0. has no int8 units .* may be slower"):
        func(x, x)


def test_warning_of_fp8_names_int8_where_there_are_units(monkeypatch):
    monkeypatch.setattr(mpx._fp8._transform, "gpu_capability", lambda: (8, 0))
    x = jnp.ones((16, 16), BF16)
    with pytest.warns(
        RuntimeWarning, match=r'`fp8\(func, "int8"\)` uses its int8 units'
    ):
        everywhere(lambda p, x: x @ p)(x, x)


# --- transformations ------------------------------------------------------------------


def test_scan_and_remat_run_in_int8():
    step = jax.value_and_grad(everywhere(layers, Int8()))
    # Forward, again in the backward pass but for the last, and two products each.
    assert eight_bit_products(jax.make_jaxpr(step)(*layer_problem())) == 2 + 1 + 4


def test_scan_and_remat_are_the_unrolled_loop_eager_or_jitted():
    assert_scan_is_the_unrolled_loop(Int8())


def test_remat_changes_no_gradient():
    # Linear: XLA may leave out a rounding to bf16 before a nonlinearity. What is left are
    # integer codes, their exact sums and two products with scales.
    p, x, g = (normal(i, 32, 32, dtype=BF16) for i in range(3))
    plain = lambda p, x: jnp.sum((x @ p) * g)  # noqa: E731
    step = lambda f: jax.jit(jax.grad(everywhere(f, Int8())))(p, x)  # noqa: E731
    assert_trees_equal(step(plain), step(jax.checkpoint(plain)))


@pytest.mark.parametrize("recipe", [Int8(), CurrentScaling(granularity="row")])
def test_what_is_rounded_twice_is_written_once(recipe):
    def to_codes(x):
        spec = MatmulSpec((((1,), (0,)), ((), ())), BF16, 1, recipe)
        return to_fp8(
            spec, "activation", jnp.tanh(x), ((1,), (0,)), batch=(), seen=None
        )

    found = jax.make_jaxpr(to_codes)(jnp.ones((4, 8), BF16)).eqns
    names = [eqn.primitive.name for eqn in found]
    (tanh,) = found[names.index("tanh")].outvars
    readers = [eqn.primitive.name for eqn in found if tanh in eqn.invars]
    # Rows and columns read what is behind it.
    assert readers == ["optimization_barrier"]
    assert names.count("reduce_max") == 2


def test_vmap_inside_is_one_matmul():
    p, x = normal(0, 32, 32, dtype=BF16), normal(1, 4, 16, 32, dtype=BF16)
    mapped = everywhere(lambda p, x: jax.vmap(lambda x: x @ p)(x), Int8())
    flat = everywhere(lambda p, x: (x.reshape(64, 32) @ p).reshape(4, 16, 32), Int8())
    assert_trees_equal(mapped(p, x), flat(p, x))


@pytest.mark.filterwarnings("ignore:`fp8` inside `jax.vmap`:RuntimeWarning")
def test_vmap_outside_is_a_loop():
    p, x = normal(0, 32, 32, dtype=BF16), normal(1, 4, 16, 32, dtype=BF16)
    g = normal(2, 16, 32, dtype=BF16)
    # Linear, as in the test of remat.
    grad = jax.grad(everywhere(lambda p, x: jnp.sum((x @ p) * g), Int8()))
    got = jax.jit(jax.vmap(grad, in_axes=(None, 0)))(p, x)
    assert_trees_equal(got, jnp.stack([jax.jit(grad)(p, row) for row in x]))


SHARDED = {
    "data": (AxisType.Auto, P()),
    "fsdp": (AxisType.Auto, P("x")),
    "tensor": (AxisType.Auto, P(None, "x")),
    "explicit": (AxisType.Explicit, P()),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("recipe", [Int8(), Int8(backward=False)], ids=["all", "fwd"])
def test_two_devices_compute_what_one_does(name, recipe):
    kind, spec = SHARDED[name]
    p, x = normal(0, 32, 64, dtype=BF16), normal(1, 64, 32, dtype=BF16)
    p, x = (jnp.round(2 * y) for y in (p, x))  # sums in bf16, if any, are exact
    g = jnp.ones((64, 64), BF16)

    def step(p, x, g):
        out, back = jax.vjp(everywhere(lambda p, x: x @ p, recipe, params="p"), p, x)
        return out, back(g)

    want = jax.jit(step)(p, x, g)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        place = lambda y, spec: jax.device_put(y, NamedSharding(mesh, spec))  # noqa: E731
        got = jax.jit(step)(place(p, spec), place(x, P("x")), place(g, P("x")))
    assert_trees_equal(jax.device_get(got), jax.device_get(want))


def test_shard_map_computes_what_one_device_does():
    p, x = normal(0, 32, 64, dtype=BF16), normal(1, 64, 32, dtype=BF16)
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
    )
    layer = everywhere(lambda p, x: x @ p, Int8())
    parts = jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    assert_trees_equal(jax.jit(parts)(p, x), layer(p, x))


@pytest.mark.parametrize("recipe", [Int8(), CurrentScaling(granularity="row")])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=str)
def test_scales_of_a_gathered_weight_are_transposed_with_it(monkeypatch, recipe, spec):
    p, x = normal(0, 32, 64, dtype=BF16), normal(1, 48, 32, dtype=BF16)
    loss = lambda p, x: jnp.sum(jnp.sin(x @ p).astype(jnp.float32))  # noqa: E731
    want = jax.jit(jax.grad(everywhere(loss, recipe)))(p, x)
    monkeypatch.setattr(_operands, "transposing_pays", lambda: True)  # as on an H200
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = (
        jax.device_put(p, NamedSharding(mesh, spec)),
        jax.device_put(x, NamedSharding(mesh, P("x"))),
    )
    got = jax.jit(jax.grad(everywhere(loss, recipe)))(*sharded)
    # Sums of f32 numbers come in another order.
    np.testing.assert_allclose(as_f64(got), as_f64(want), rtol=2.0**-7, atol=2.0**-10)


def test_second_derivatives_are_refused():
    p, x = normal(0, 32, 32, dtype=BF16), normal(1, 32, 32, dtype=BF16)
    grad = jax.grad(everywhere(lambda p, x: jnp.sum(jnp.sin(x @ p)), Int8()))
    with pytest.raises(NotImplementedError, match="fp8 has no second derivatives"):
        jax.grad(lambda p: jnp.sum(grad(p, x)))(p)


# --- inspect --------------------------------------------------------------------------


def test_report_calls_it_int8():
    report = mpx.inspect.report(everywhere(two_layers, Int8()), *two_layer_problem())
    assert report.fp8.recipe == "Int8"
    assert {x.format for x in report.fp8.changed} == {"int8"}
    lines = str(report.fp8).splitlines()
    assert lines[0] == "100.0 % of the forward matmul operations run in int8."
    assert lines[3].split()[-1] == "int8"
    assert lines[1].endswith("int8, or why not")
    assert report.shares == {"int8": 1.0}


def test_report_of_a_forward_pass_in_int8():
    func = everywhere(two_layers, Int8(backward=False))
    report = mpx.inspect.report(func, *two_layer_problem())
    assert report.shares == {"bf16": pytest.approx(2 / 3), "int8": pytest.approx(1 / 3)}


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("recipe", [Int8(), NEAREST, Int8(backward=False)])
def test_explain_knows_the_format_and_finds_nothing_wrong(recipe):
    found, args = explained(recipe), one_layer_problem()
    assert found.formats == ("bf16", "int8")
    wanted = jax.grad(one_layer)(*args)
    got = jax.jit(jax.grad(everywhere(one_layer, recipe)))(*args)
    assert found.grad_errors.keys() == {"params/a"}
    for name, error in found.grad_errors.items():
        name = name.removeprefix("params/")
        size = np.linalg.norm(wanted[name])
        assert error == pytest.approx(
            np.linalg.norm(got[name] - wanted[name]) / size, rel=1e-3
        )


@pytest.mark.standard_promotion
def test_explain_names_the_layer_that_int8_cannot_hold():
    def outliers(params, x):
        return jnp.mean(jnp.square(x @ params["w"]))

    # One input of each row is so large that all others round to zero, and has no weight.
    x = normal(0, 32, 32).at[:, 0].set(1e4)
    params = {"w": normal(1, 32, 32).at[0].set(0.0)}
    found = mpx.inspect.explain(everywhere(outliers, Int8()), params, x)
    assert found.verdict == "wrong"
    assert found.fault is not None
    assert (found.fault.format, found.fault.label) == ("int8", "params/w"), str(found)


def test_check_counts_int8_matmuls():
    text = """
  %x = s8[16,16]{1,0} parameter(0)
  %gemm.1 = (s32[16,16]{1,0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %dot.3 = s32[16,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}
"""
    found = mpx.inspect.fp8_check(text)
    assert (found.fp8, found.int8, found.other) == (0, 2, {})
    assert found.quantized
    assert str(found) == "2 int8 matmuls; others: none"
    both = (
        f'{text} %y = f32[] custom-call(%x), custom_call_target="__cublas$lt$matmul$f8"'
    )
    assert str(mpx.inspect.fp8_check(both)).startswith("1 fp8 and 2 int8 matmuls")


def test_check_is_not_deceived_by_int8_numbers_elsewhere():
    text = "%x = s8[16]{0} parameter(0)\n %d = f32[2,2]{1,0} dot(%a, %b)"
    assert not mpx.inspect.fp8_check(text).quantized


def test_check_of_a_compiled_step_finds_integers_only():
    step = jax.jit(jax.grad(everywhere(two_layers, Int8())))
    found = mpx.inspect.fp8_check(step.lower(*two_layer_problem()).compile())
    # XLA for CPUs multiplies some of them in s32.
    assert found.int8 > 0
    assert found.int8 + found.other.get("dot s32", 0) == 5
    assert found.other.keys() <= {"dot s32"}


def test_memory_counts_one_byte_a_number():
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    params = {"a": shape(1024, 4096), "b": shape(4096, 1024)}
    found = mpx.inspect.memory(
        everywhere(two_layers, Int8()), params, shape(8192, 1024)
    )
    kept = found.options[0].residuals
    assert kept["int8"] == (8192 * 1024 + 8192 * 4096 + 2 * 1024 * 4096)


# --- training -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.standard_promotion
@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("recipe", [Int8(), Int8(backward=False)], ids=["all", "fwd"])
def test_training_ends_near_bf16(recipe):
    assert_training_ends_near_bf16(recipe, 0.01)
