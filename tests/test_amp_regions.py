"""What lies between matmuls computes in f32, as it is written: see `mpx._amp._regions`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import equations, normal, stored_result
from mpx import AmpRules, amp

KEY = jax.random.key(0)
D = 16
X = jax.random.normal(KEY, (32, D))
W = jax.random.normal(jax.random.key(1), (D, D)) / 4
EYE = jnp.eye(D)
PARAMS = {"w": W, "b": jnp.zeros((1, D))}
# Numbers of 16 bits, so that a product with the identity rounds nothing.
EXACT = X.astype(jnp.bfloat16).astype(jnp.float32)


def error(actual, wanted):
    """Returns the largest relative error of a tree, by the norms of its leaves."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
    sizes = [(np.linalg.norm(x - y), np.linalg.norm(y)) for x, y in pairs]
    return max(float(x / max(y, 1e-30)) for x, y in sizes)


# --- Numbers and bounds are those of the program --------------------------------------


def most(s):
    return jnp.max(s)


BOUNDS = {
    "where": lambda s: jnp.where(s > 0.999, 0.999, s),
    "select": lambda s: lax.select(s > 0.999, jnp.full_like(s, 0.999), s),
    "clip": lambda s: jnp.clip(s, 0.001, 0.999),
    "min": lambda s: jnp.minimum(s, 0.999),
    "pad": lambda s: lax.pad(s * 0, np.float32(0.999), ((1, 1, 0), (0, 0, 0))),
    "concatenate": lambda s: jnp.concatenate([s * 0, jnp.full_like(s, 0.999)]),
    "jit": lambda s: jax.jit(lambda s: jnp.where(s > 0.999, 0.999, s))(s),
}


def in_scan(bound):
    return lambda s: lax.scan(lambda c, x: (c, bound(x[None])), 0, s)[1]


@pytest.mark.parametrize("around", [lambda f: f, in_scan], ids=["plain", "scan"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_16_bits_do_not_hold_is_what_is_written(name, around):
    def func(params, x):
        s = 1 + jnp.abs(x @ params["w"])
        # Multiplied by a weight in between, so that the bounded values are stored.
        return jnp.sum(jnp.log(1 - around(BOUNDS[name])(s)))

    assert float(jnp.min(jnp.log(1 - most(BOUNDS[name](jnp.ones((2, 2))))))) < -6
    params = {"w": EYE}
    np.testing.assert_allclose(amp(func)(params, EXACT), func(params, EXACT), rtol=1e-4)


OFFSETS = {
    "a bias": (
        lambda p, x: x @ p["w"] + p["b"],
        {"w": EYE, "b": jnp.full((1, D), 300.3)},
    ),
    "a literal": (lambda p, x: (x @ p["w"]) * 2 + 300, {"w": EYE}),
    "in a jitted layer": (
        lambda p, x: jax.jit(lambda p, x: x @ p["w"] + p["b"])(p, x),
        {"w": EYE, "b": jnp.full((1, D), 300.3)},
    ),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_an_offset_after_a_matmul_is_not_rounded_before_the_loss(name):
    func, params = OFFSETS[name]
    y = func(params, EXACT) + 0.02 * X[::-1]

    def loss(params, x):
        return jnp.mean((func(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(amp(loss))(params, EXACT)
    wanted, wide = jax.value_and_grad(loss)(params, EXACT)
    np.testing.assert_allclose(value, wanted, rtol=1e-3)
    # The operands of the matmul behind the weight's gradient are rounded.
    assert error(grads, wide) < 2.0**-7


def test_an_offset_before_a_jitted_helper_with_a_matmul_is_not_rounded():
    # `jnp.corrcoef` is jitted, and multiplies what it has centred.
    func = lambda p, x: jnp.corrcoef(x @ p["w"] + p["b"])  # noqa: E731
    params = {"w": EYE, "b": jnp.full((1, D), 300.3)}

    def loss(params, x):
        return jnp.sum(func(params, x) * (X @ X.T))

    grads = jax.grad(amp(loss))(params, EXACT)
    assert error(grads, jax.grad(loss)(params, EXACT)) < 2.0**-6


def test_what_is_read_before_and_after_a_sum_that_runs_alone_is_not_rounded():
    params = {"w": EYE}

    def loss(params, x):
        h = x @ params["w"] + 300.3
        far = jnp.cumsum(h, 1) / jnp.arange(1.0, D + 1)[None]
        return jnp.mean((h - far - 0.02) ** 2)

    value, grads = jax.value_and_grad(amp(loss))(params, EXACT)
    wanted, wide = jax.value_and_grad(loss)(params, EXACT)
    np.testing.assert_allclose(value, wanted, rtol=1e-3)
    assert error(grads, wide) < 2.0**-7


@pytest.mark.parametrize("reduce", [lax.pmean, lax.pmax, lax.psum])
def test_a_reduction_over_an_axis_of_vmap_sends_nothing(reduce):
    def func(w, x):
        def one(x):
            h = (x[None] @ w)[0] + 300.3
            return h - reduce(h, "i") / (len(X) if reduce is lax.psum else 1)

        return jax.vmap(one, axis_name="i")(x)

    exact = func(EYE, EXACT)
    np.testing.assert_allclose(amp(func)(EYE, EXACT), exact, atol=1e-3)


STORED = {
    "a matmul": (lambda p, x: x @ p["w"], "bfloat16"),
    "a bound of 16 bits": (lambda p, x: jnp.clip(x @ p["w"], -1.0, 1.0), "bfloat16"),
    "a bound of f32": (lambda p, x: jnp.clip(x @ p["w"], 0.001, 0.999), "float32"),
    "a factor of f32": (lambda p, x: 0.999 * (x @ p["w"]), "bfloat16"),
    "a sum": (lambda p, x: jnp.sum(x @ p["w"], -1), "float32"),
    "a maximum": (lambda p, x: jnp.max(x @ p["w"], -1), "bfloat16"),
    "beside a sum": (lambda p, x: jax.nn.softmax(x @ p["w"]), "bfloat16"),
    "beside data of f32": (lambda p, x: x @ p["w"] + x, "float32"),
    # Jitted helpers, whose numbers are arguments or integers.
    "clip": (lambda p, x: jnp.clip(x @ p["w"], 0, 1), "bfloat16"),
    "where": (lambda p, x: jnp.where(x > 0, x @ p["w"], 0), "bfloat16"),
    "hard_tanh": (lambda p, x: jax.nn.hard_tanh(x @ p["w"]), "bfloat16"),
    "standardize": (lambda p, x: jax.nn.standardize(x @ p["w"]), "bfloat16"),
    "tril": (lambda p, x: jnp.tril(x @ p["w"]), "bfloat16"),
    "pad": (lambda p, x: jnp.pad(x @ p["w"], 1), "bfloat16"),
    "a row by its number": (lambda p, x: (x @ p["w"])[31:], "bfloat16"),
}


@pytest.mark.parametrize("name", STORED)
def test_only_numbers_of_16_bits_are_stored_in_16_bits(name):
    func, dtype = STORED[name]
    assert stored_result(func, PARAMS, X) == dtype


def test_a_carry_is_not_rounded_at_each_step():
    def last(narrow_carry):
        step = lambda h, _: (jnp.sin(h @ W), None)  # noqa: E731
        func = amp(lambda x: lax.scan(step, x, length=3)[0], narrow_carry=narrow_carry)
        return func(X)

    for narrow_carry in (False, True):
        h = last(narrow_carry)
        is_rounded = np.array_equal(h, h.astype(jnp.bfloat16).astype(jnp.float32))
        assert is_rounded == narrow_carry


# --- Sums ------------------------------------------------------------------------------


def added(step):
    def func(params, x):
        h = x @ params["w"]
        total = jnp.zeros_like(h)
        for _ in range(300):
            total = step(total, h, params)
        return total

    return func


ADDITIONS = {
    "of one value": added(lambda total, h, p: total + h),
    "with a bias": added(lambda total, h, p: total + (h + p["b"])),
    "by a jitted helper": added(lambda total, h, p: jax.jit(jnp.add)(total, h)),
    "in a scan": lambda p, x: lax.scan(
        lambda c, _: (c + x @ p["w"], None), jnp.zeros_like(x), length=300
    )[0],
    "in a loop": lambda p, x: lax.fori_loop(0, 300, lambda _, c: c + x @ p["w"], 0 * x),
    "as a running average": added(lambda total, h, p: 0.998 * total + 0.002 * h),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_a_sum_that_is_written_as_additions_does_not_stand_still(name):
    func, params = ADDITIONS[name], {"w": EYE, "b": jnp.ones((1, D)) * 0.0}
    actual = amp(func)(params, jnp.ones((2, D)))
    np.testing.assert_allclose(actual, func(params, jnp.ones((2, D))), rtol=1e-5)


MOMENTS = {
    "plain": lambda h: jnp.mean(h * h, -1) - jnp.mean(h, -1) ** 2,
    "transposed": lambda h: jnp.mean((h * h).T, 0) - jnp.mean(h.T, 0) ** 2,
    "windows": lambda h: windows(h * h) - windows(h) ** 2,
    "segments": lambda h: segments(h * h) - segments(h) ** 2,
    "cumsum": lambda h: cumulated(h * h) - cumulated(h) ** 2,
}


def windows(h):
    return lax.reduce_window(h, 0.0, lax.add, (1, 4), (1, 1), "valid") / 4


def segments(h):
    ids = jnp.arange(len(h)) // 8
    return jax.ops.segment_sum(h, ids, num_segments=len(h) // 8) / 8


def cumulated(h):
    return jnp.cumsum(h, -1)[:, 3:] / jnp.arange(4.0, D + 1)[None]


@pytest.mark.parametrize("name", MOMENTS)
def test_a_variance_by_two_moments_is_as_exact_as_in_f32(name):
    def loss(params, x):
        return jnp.sum(jnp.sqrt(MOMENTS[name](x @ params["w"]) + 0.01))

    params, x = {"w": EYE}, EXACT + 4
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    value, grads = jax.value_and_grad(amp(loss))(params, x)
    wanted, wide = jax.value_and_grad(loss)(params, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    # The cotangent of the product is rounded once, and the operands of the matmul.
    assert error(grads, wide) < 2.0**-7


def test_cotangents_of_a_value_with_many_readers_add_up_in_f32():
    def loss(params, x):
        h = x @ params["w"]
        return sum(jnp.sum(jnp.sin(h) @ params["w"]) for _ in range(600))

    x, params = jnp.full((2, D), 0.5), {"w": EYE}
    actual, wanted = jax.grad(amp(loss))(params, x), jax.grad(loss)(params, x)
    assert error(actual, wanted) < 2.0**-7


def test_a_gradient_of_a_bare_16_bit_table_is_summed_in_f32():
    def loss(table, x):
        def step(total, i):
            return total + jnp.sum(table[i] * x), None

        return lax.scan(step, 0.0, jnp.zeros(1000, jnp.int32))[0]

    table = jnp.ones((4, D), jnp.bfloat16)
    grad = jax.grad(amp(loss))(table, jnp.ones(D))
    np.testing.assert_allclose(grad[0].astype(np.float32), 1000.0, rtol=2.0**-7)


# --- Which matmuls run low --------------------------------------------------------------


def dots(func, *args):
    """Returns the dtypes of the operands of matmuls."""
    eqns = equations(jax.make_jaxpr(func)(*args))
    return [
        str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == "dot_general"
    ]


def test_a_contraction_of_four_stays_in_f32():
    def rotated(angle, points):
        c, s = jnp.cos(angle), jnp.sin(angle)
        return points @ jnp.array([[c, -s], [s, c]])

    points = jax.random.normal(KEY, (32, 2))
    assert dots(amp(rotated), 0.3, points) == ["float32"]
    for size, dtype in ((4, "float32"), (5, "bfloat16")):
        assert dots(amp(jnp.matmul), jnp.ones((8, size)), jnp.ones((size, 8))) == [
            dtype
        ]
    # A rule says otherwise.
    low = amp(jnp.matmul, rules=AmpRules(primitives={"dot_general": "low"}))
    assert dots(low, jnp.ones((8, 4)), jnp.ones((4, 8))) == ["bfloat16"]


ALGEBRA = {
    "cholesky": lambda a: jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(a)))),
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "solve": lambda a: jnp.sum(jnp.linalg.solve(a, jnp.ones((D, 1)))),
    "inv": lambda a: jnp.sum(jnp.linalg.inv(a)),
    "eigh": lambda a: jnp.sum(jnp.log(jnp.linalg.eigh(a)[0])),
    "behind jit": lambda a: jax.jit(jnp.linalg.slogdet)(a)[1],
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_products_that_reach_linear_algebra_stay_in_f32(name):
    def func(params, x):
        phi = x @ params["w"]
        return ALGEBRA[name](phi.T @ phi + 1e-3 * EYE)

    x = X * jnp.logspace(-3, 0, D)[None]
    value, grads = jax.value_and_grad(amp(func))(PARAMS, x)
    wanted, wide = jax.value_and_grad(func)(PARAMS, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-4)
    assert error(grads["w"], wide["w"]) < 1e-3


# --- Rules hold where they are decided --------------------------------------------------


def test_a_kept_parameter_is_not_rounded_before_a_loop():
    def func(params, x):
        return lax.scan(lambda c, ab: (c, ab[0] @ ab[1]), 0, (params["a"], x))[1]

    a = {"a": jax.random.normal(KEY, (2, D, D)), "unused": jnp.ones(())}
    x = jax.random.normal(KEY, (2, D, D))
    np.testing.assert_array_equal(amp(func, keep="^a$")(a, x), func(a, x))
    np.testing.assert_array_equal(amp(func, keep="^x$")(a, x), func(a, x))


def router(x, w):
    return jax.jit(jnp.matmul)(x, w)


def test_a_rule_of_a_function_reaches_a_helper_inside_a_loop():
    def func(params, x):
        return lax.scan(lambda c, w: (router(c, w), None), x, params["w"])[0]

    params = {"w": jnp.stack([W, W])}
    kept = amp(func, rules=AmpRules(functions={"router": "original"}))
    np.testing.assert_array_equal(kept(params, X), func(params, X))


def test_a_product_of_counts_that_a_loop_slices_is_exact():
    def func(params, ids):
        hot = (ids[..., None] == jnp.arange(8)[None, None]).astype(jnp.float32)
        return lax.scan(lambda c, m: (c + m.T @ m, None), jnp.zeros((8, 8)), hot)[0]

    ids = jnp.zeros((2, 601), jnp.int32)
    np.testing.assert_array_equal(amp(func)(PARAMS, ids), func(PARAMS, ids))


def test_a_weight_that_a_loop_scales_keeps_its_name():
    def func(params, x):
        def step(c, _):
            w, x = c
            return (w * 0.5, x @ w), None

        return lax.scan(step, (params["w"], x), length=2)[0][1]

    assert dots(amp(func), PARAMS, X) == ["bfloat16"]
    assert dots(amp(func, keep="^w$"), PARAMS, X) == ["float32"]


def test_counts_of_paths_are_exact_in_a_loop():
    adjacency = jnp.ones((8, 8), jnp.int32)

    def func(params, adjacency):
        a = (adjacency > 0).astype(jnp.float32)
        return lax.fori_loop(0, 4, lambda _, c: c @ a, a)[0, 0]

    assert float(amp(func)(PARAMS, adjacency)) == 8.0**4


def test_a_parameter_above_the_range_of_f16_is_not_clipped_before_f32():
    def func(params, x):
        return jnp.sum(x @ params["w"]) * 0 + jnp.sum(params["big"] * 1e-3)

    params = {"w": EYE, "big": jnp.array([1e6])}
    assert float(amp(func, dtype="f16")(params, EXACT)) == pytest.approx(1000.0)


# --- What is kept for the backward pass -------------------------------------------------

ACTIVATIONS = {
    name: getattr(jax.nn, name)
    for name in ("gelu", "silu", "softplus", "mish", "selu", "log_sigmoid", "elu")
} | {"tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, "glu": lambda h: jax.nn.glu(h)}


def kept_bytes(func, *args):
    kept = jax.eval_shape(lambda *args: jax.vjp(func, *args)[1], *args)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_keeps_one_array_of_16_bits(name):
    def loss(params, x):
        h = ACTIVATIONS[name](x @ params["w"])
        return jnp.sum(h @ params["w"][: h.shape[-1]])

    x = jax.random.normal(KEY, (64, D))
    found = kept_bytes(amp(loss), PARAMS, x)
    # x, what the activation reads, its result, and W twice.
    assert found <= 3 * 2 * x.size + 2 * 4 * W.size + 64


def test_a_relu_keeps_its_result_and_a_byte():
    def loss(params, x):
        return jnp.sum(jax.nn.relu(x @ params["w"]) @ params["w"])

    found = kept_bytes(amp(loss), PARAMS, X)
    assert found <= 2 * X.size + (2 + 1) * X.size + 2 * 4 * W.size + 64


@pytest.mark.parametrize("name", ["print", "callback"])
def test_what_reads_a_step_of_a_sum_may_be_host_code(name, capfd):
    seen = []

    def loss(params, x):
        h = total = x @ params["w"]
        for _ in range(10):
            total = total + h
            if name == "print":
                jax.debug.print("{}", jnp.sum(total))
            else:
                jax.debug.callback(lambda x: seen.append(float(x)), jnp.sum(total))
        return jnp.sum(total)

    jax.block_until_ready(jax.grad(amp(loss))(PARAMS, X))
    jax.effects_barrier()
    assert len(seen) == 10 or len(capfd.readouterr().out.split()) == 10


def test_amp_computes_in_four_sentences_what_the_report_lists():
    def loss(params, x):
        return jnp.mean(jnp.exp(x @ params["w"] + params["b"]))

    report = mpx.inspect.report(amp(loss), PARAMS, X)
    assert report.amp is not None


def positions():
    return jnp.arange(D, dtype=jnp.float32)


# Made from no number of 16 bits, by operations that are borders.
INDEPENDENT = {
    "iota": positions,
    "cumsum": lambda: jnp.cumsum(jnp.ones(D)),
    "sort": lambda: jnp.sort(jnp.cumsum(jnp.ones(D))),
    "random": lambda: jax.random.uniform(KEY, (D,)).round(),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", INDEPENDENT)
def test_what_no_number_of_16_bits_enters_parts_no_region(name, wrap):
    def func(params, x):
        def inner(h):
            far = 301 * h
            return h * (INDEPENDENT[name]()[None] + 301) - far

        return wrap(inner)(x @ params["w"])

    params = {"w": EYE}
    assert error(amp(func)(params, EXACT), func(params, EXACT)) < 1e-5


def test_what_a_softmax_keeps_is_of_the_numbers_that_are_read_again():
    # Scores of about 100: XLA leaves a rounding out in the forward pass, if it may.
    w, x = EYE + 0.125, jnp.linspace(-1.0, 1.0, 32 * D).reshape(32, D)

    def loss(params, x):
        h = jax.nn.gelu(x @ params["w"])
        return jnp.mean((jax.nn.softmax(h @ h.T) @ h) ** 2)

    found = jax.jit(jax.grad(amp(loss)))({"w": w}, x)
    assert error(found, jax.grad(loss)({"w": w}, x)) < 0.01


def test_what_a_norm_keeps_is_of_the_numbers_that_are_read_again():
    # Inputs far from 0 see it if the normalised numbers have another mean.
    x = 3 * jax.random.normal(KEY, (32, D)) + 50
    params = {"w": W, "v": jnp.flip(W, 0)}

    def loss(params, x):
        h = x @ params["w"]
        mean = jnp.mean(h, 0, keepdims=True)
        spread = jnp.mean(h**2, 0, keepdims=True) - mean**2
        h = jax.nn.gelu((h - mean) * lax.rsqrt(spread + 1e-5))
        return jnp.mean((h @ params["v"] - 1) ** 2)

    exact = jax.grad(loss)(params, x)
    # Eagerly nothing leaves a rounding out.
    wanted = error(jax.grad(amp(loss))(params, x), exact)
    assert error(jax.jit(jax.grad(amp(loss)))(params, x), exact) < 1.5 * wanted


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("size", [1e-5, 1.0, 100.0])
def test_a_norm_reads_numbers_of_any_size(size, dtype):
    # Below 6e-5 the numbers of f16 are subnormal.
    def loss(params, x):
        h = x @ params["w"]
        h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True))
        return jnp.mean(h * jnp.arange(float(D))[None])

    x, params = size * X, {"w": EYE}
    grads = mpx.value_and_grad(amp(loss, dtype))(
        mpx.StaticLossScaling(1.0), params, x
    ).grads
    assert error(grads, jax.grad(loss)(params, x)) < 0.02


MAXIMA = {
    "of a row": lambda s: s.max(-1),
    "of a column": lambda s: s.min(0),
    "as a scale": lambda s: s / jnp.max(jnp.abs(s), -1, keepdims=True),
    "in a remat": jax.checkpoint(lambda s: s.max(-1)),
    "compared by hand": lambda s: jnp.where(s == s.max(-1, keepdims=True), s**2, 0.0),
}


@pytest.mark.parametrize("name", [*MAXIMA, "softmax"])
def test_a_maximum_that_is_compared_is_computed_again_with_what_it_is_that_of(name):
    # XLA adds products in one step or in two: a kept maximum may equal none of them then, and
    # its gradient be lost. Without XLA's optimizations, as here, only the program shows it.
    def loss(p, x):
        s = (x @ p["w"]) * p["g"] + (x @ p["u"]) * p["b"]
        return jnp.sum(MAXIMA.get(name, jax.nn.softmax)(s) ** 2)

    p = {"w": W, "u": W.T, "g": W[:1], "b": W[1:2]}
    program = jax.make_jaxpr(jax.grad(amp(loss)))(p, X).jaxpr
    count = sum(
        x.primitive.name in ("reduce_max", "reduce_min") for x in equations(program)
    )
    assert (count == 1) == (name == "softmax")


# --- Under a vmap of somebody else's ---------------------------------------------------


def test_the_gradient_of_a_bias_under_somebodys_vmap_adds_in_f32():
    n, d = 4096, 4
    layer = amp(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]))
    p = {"w": normal(0, d, d), "b": jnp.zeros(d)}
    x = normal(1, n, d)

    def loss(p):
        return jnp.sum(jax.vmap(layer, (None, 0))(p, x))

    found = jax.grad(loss)(p)["b"]
    slopes = 1 - np.tanh(np.asarray(x, np.float64) @ np.asarray(p["w"])) ** 2
    np.testing.assert_allclose(found, slopes.sum(0), rtol=2e-3)
    sums = {
        (eqn.primitive.name, str(eqn.invars[0].aval.dtype))
        for eqn in equations(jax.make_jaxpr(jax.grad(loss))(p))
    }
    assert ("reduce_sum", "float32") in sums
    assert ("reduce_sum", "bfloat16") not in sums
