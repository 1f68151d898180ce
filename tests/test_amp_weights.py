"""Gradients of weights, of embeddings and of gathers lose nothing to 16 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from models import equations, normal, store, stored
from mpx import AmpRules, amp, amp_low

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

bf16 = functools.partial(amp, dtype="bf16")
wide = functools.partial(bf16, reduce_dtype="f32")


def results(func, *args):
    """Returns the dtypes of operands and result of each matmul."""
    short = {"float32": "f32", "bfloat16": "bf16"}
    return [
        " ".join(short[str(v.aval.dtype)] for v in (*eqn.invars[:2], eqn.outvars[0]))
        for eqn in equations(jax.make_jaxpr(func)(*args))
        if eqn.primitive.name in MATMULS
    ]


LOW, WIDE = "bf16 bf16 bf16", "bf16 bf16 f32"
CPU = "f32 f32 f32"  # stands in for WIDE on CPUs, which do not have it for all shapes

# --- Weight gradients -----------------------------------------------------------------

ROWS = 4096  # the length of the sum that is a weight's gradient
X, W = normal(0, ROWS, 8), normal(1, 8, 6)
W2 = normal(2, 6, 8)


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + 1.0) @ params["w2"]


PARAMS = {"w": W, "w2": W2}


def loss(params, x):
    return jnp.sum(mlp(params, x) ** 2)


def by_scan(params, x):
    def step(total, x):
        return total + loss(params, x), None

    return lax.scan(step, 0.0, x.reshape(2, -1, 8))[0]


def layers(params, x):
    stack = jnp.stack([jnp.eye(8), params["w"] @ params["w"].T])
    x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
    return loss(params, x)


def over_devices(params, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(
        lambda p, x: lax.psum(loss(p, x), "d"),
        mesh=mesh,
        in_specs=(P(), P("d")),
        out_specs=P(),
    )(params, x)


PLACES = {
    "plain": loss,
    "jit": jax.jit(loss),
    "remat": jax.checkpoint(loss),
    "scan": by_scan,
    "vmap": lambda p, x: jnp.sum(jax.vmap(loss, (None, 0))(p, x.reshape(2, -1, 8))),
    "vmap of samples": lambda p, x: jnp.sum(
        jax.vmap(lambda x: jnp.sum(mlp(p, x[None]) ** 2))(x)
    ),
    "cond": lambda p, x: lax.cond(x[0, 0] > 9, lambda p, x: 0.0, loss, p, x),
    "shard_map": over_devices,
    "transposed": lambda p, x: loss({"w": p["w"], "w2": p["w2"].T.T}, x),
}


def exact_gradient(func, *args):
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        return jax.tree.map(np.asarray, jax.grad(func)(*args))


def errors(actual, wanted):
    return {
        name: np.linalg.norm(np.asarray(actual[name], np.float64) - wanted[name])
        / np.linalg.norm(wanted[name])
        for name in wanted
    }


@pytest.mark.some(2)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", PLACES)
def test_gradient_of_a_weight_comes_out_of_its_matmul_in_f32(name):
    func = PLACES[name]
    default = results(jax.grad(bf16(func)), PARAMS, X)
    asked = results(jax.grad(wide(func)), PARAMS, X)
    assert {*default} == {LOW}
    assert asked.count(WIDE) >= 2
    assert {*asked} == {LOW, WIDE, CPU}
    assert asked.count(WIDE) == asked.count(CPU)
    grads = jax.jit(jax.grad(wide(func)))(PARAMS, X)
    assert {str(x.dtype) for x in grads.values()} == {"float32"}
    reference = jax.jit(jax.grad(func))(PARAMS, X)
    assert max(errors(grads, jax.tree.map(np.asarray, reference)).values()) <= 12 * UNIT


def test_long_sum_is_more_exact_than_by_default():
    # Operands that bf16 holds exactly: what is left is the rounding of the result.
    x, w = (jnp.round(v * 8) / 8 for v in (X, W))
    cotangent = jnp.round(normal(3, ROWS, 6) * 8) / 8

    def linear(params, x):
        return jnp.sum((x @ params["w"]) * cotangent)

    wanted = np.asarray(x, np.float64).T @ np.asarray(cotangent, np.float64)

    def error(wrap):
        grad = jax.jit(jax.grad(wrap(linear)))({"w": w}, x)["w"]
        return np.max(np.abs(grad - wanted) / np.abs(wanted))

    assert error(bf16) > UNIT / 4
    # Products of multiples of 1/8 are multiples of 1/64; their sum is exact in f32.
    assert error(wide) == 0


@pytest.mark.standard_promotion
def test_error_against_f64_is_smaller_than_by_default():
    with jax.enable_x64(True):
        args = jax.tree.map(lambda x: np.asarray(x, np.float64), (PARAMS, X))
        wanted = jax.tree.map(np.asarray, jax.grad(loss)(*args))
    asked, default = (
        errors(jax.jit(jax.grad(f(loss)))(PARAMS, X), wanted) for f in (wide, bf16)
    )
    assert asked["w2"] < default["w2"]
    assert max(asked.values()) <= 12 * UNIT


def convolution(params, x):
    return jnp.sum(lax.conv(x, params["k"], (1, 1), "SAME") ** 2)


def ragged(params, x):
    return jnp.sum(lax.ragged_dot(x, params["k"], jnp.array([3, 5], jnp.int32)) ** 2)


OTHERS = {
    "convolution": (convolution, {"k": normal(4, 5, 3, 3, 3)}, normal(5, 2, 3, 8, 8)),
    "strided convolution": (
        lambda p, x: jnp.sum(lax.conv(x, p["k"], (2, 2), "VALID") ** 2),
        {"k": normal(4, 5, 3, 3, 3)},
        normal(5, 2, 3, 9, 9),
    ),
    "ragged_dot": (ragged, {"k": normal(6, 2, 8, 6)}, normal(7, 8, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_gradient_of_another_matmul_is_f32_too(name):
    func, params, x = OTHERS[name]
    assert WIDE in results(jax.grad(wide(func)), params, x)
    assert WIDE not in results(jax.grad(bf16(func)), params, x)
    grads = jax.jit(jax.grad(wide(func)))(params, x)
    wanted = jax.tree.map(np.asarray, jax.jit(jax.grad(func))(params, x))
    assert max(errors(grads, wanted).values()) <= 6 * UNIT


# --- Groups of rows whose sizes are known while the program runs ----------------------

BATCH = (
    {"k": normal(6, 2, 8, 6), "k2": normal(7, 2, 6, 8)},
    normal(8, 8, 8),
    jnp.array([3, 5], jnp.int32),
)


def experts(params, x, sizes):
    hidden = jnp.tanh(lax.ragged_dot(x, params["k"], sizes))
    return jnp.sum(lax.ragged_dot(hidden, params["k2"], sizes) ** 2)


def experts_by_scan(params, x, sizes):
    def step(total, x):
        return total + experts(params, x, sizes), None

    return lax.scan(step, 0.0, jnp.stack([x, x / 2]))[0]


EXPERTS = {
    "plain": experts,
    "jit": jax.jit(experts),
    "remat": jax.checkpoint(experts),
    "scan": experts_by_scan,
    "scan and remat": jax.checkpoint(experts_by_scan),
    "cond": lambda p, x, sizes: lax.cond(
        sizes[0] > 9, lambda *_: 0.0, experts, p, x, sizes
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", EXPERTS)
def test_ragged_matmul_takes_group_sizes_that_are_computed(name):
    func = EXPERTS[name]
    assert WIDE in results(jax.grad(wide(func)), *BATCH)
    both = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (wide(func), func)])
    grads, wanted = both(*BATCH)
    wanted = jax.tree.map(np.asarray, wanted)
    # Two matmuls forward and two backward, of three roundings each.
    assert max(errors(grads, wanted).values()) <= 4 * 3 * UNIT


def test_ragged_matmul_takes_other_group_sizes_for_each_element_of_a_vmap():
    params, x, sizes = BATCH
    # JAX knows this only where all operands have the new axis.
    args = jax.tree.map(lambda *x: jnp.stack(x), BATCH, (params, x / 2, sizes[::-1]))
    both = jax.jit(
        lambda *args: [jax.vmap(jax.grad(f))(*args) for f in (wide(experts), experts)]
    )
    grads, wanted = both(*args)
    wanted = jax.tree.map(np.asarray, wanted)
    assert max(errors(grads, wanted).values()) <= 4 * 3 * UNIT


TRANSFORMED = {
    "forward mode": lambda f: jax.jit(
        lambda p, x: jax.jvp(
            functools.partial(f, x=x), (p,), (jax.tree.map(jnp.cos, p),)
        )
    ),
    "gradient by forward mode": lambda f: jax.jit(jax.jacfwd(f)),
    "gradients of samples": lambda f: jax.jit(
        lambda p, x: jax.vmap(jax.grad(f), (None, 0))(p, x[:6, None])
    ),
    "gradient of a vmap": lambda f: jax.jit(
        jax.grad(lambda p, x: jnp.sum(jax.vmap(f, (None, 0))(p, x[:6, None])))
    ),
    "a weight for each": lambda f: jax.jit(
        jax.grad(
            lambda p, x: jnp.sum(
                jax.vmap(lambda s: f(jax.tree.map(lambda w: w * s, p), x[:6]))(
                    jnp.arange(1.0, 3.0)
                )
            )
        )
    ),
    "second derivative": lambda f: jax.jit(
        jax.grad(lambda p, x: jnp.sum(jax.grad(f)(p, x[:6])["w"] ** 2))
    ),
    "forward over reverse": lambda f: jax.jit(
        lambda p, x: jax.jvp(jax.grad(functools.partial(f, x=x[:6])), (p,), (p,))[1]
    ),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", TRANSFORMED)
def test_product_has_all_derivatives(name):
    transform = TRANSFORMED[name]
    actual, wanted = (transform(f)(PARAMS, X) for f in (wide(loss), loss))
    # Second derivatives: four matmuls in a chain, of three roundings each.
    for x, y in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        assert np.linalg.norm(x - y) <= 4 * 3 * UNIT * np.linalg.norm(y)


def test_forward_pass_is_the_same():
    np.testing.assert_array_equal(wide(mlp)(PARAMS, X), bf16(mlp)(PARAMS, X))


def test_activations_keep_16_bit_gradients():
    # Two forward and the gradient of the hidden layer; those of two weights.
    found = results(jax.grad(wide(loss)), PARAMS, X)
    assert [found.count(x) for x in (LOW, WIDE, CPU)] == [3, 2, 2]


def test_matmul_that_stays_f32_is_left_alone():
    policy = AmpRules(params={"w2": "f32"})
    found = results(jax.grad(wide(loss, rules=policy)), PARAMS, X)
    assert found.count(WIDE) == 1
    assert found.count("f32 f32 f32") == 1 + 3


# --- Embeddings and gathers -----------------------------------------------------------

TABLE = normal(8, 4, 8)
TOKENS = jnp.zeros(1024, jnp.int32)  # one row that collects a long sum
HEAD = normal(9, 8, 8)


def embed(p):
    return p["table"][TOKENS] @ p["head"]


def take(p):
    return jnp.take(p["table"], TOKENS, axis=0) @ p["head"]


def take_activations(p):
    return (p["table"] @ p["head"])[TOKENS] @ p["head"]


def take_low(p):
    return amp_low(p["table"])[TOKENS] @ p["head"]


def along_axis(p):
    y = jnp.broadcast_to(p["table"] @ p["head"], (4, 8))
    return jnp.take_along_axis(y, jnp.zeros((4, 1024), jnp.int32), axis=1)


def dynamic(p):
    y = p["table"] @ p["head"]

    def step(c, i):
        return c, lax.dynamic_slice_in_dim(y, i % 2, 2)

    return lax.scan(step, 0, TOKENS)[1]


GATHERS = {
    "embedding": embed,
    "jnp.take": take,
    "activations": take_activations,
    "marked low": take_low,
    "take_along_axis": along_axis,
    "dynamic_slice in a scan": dynamic,
}


@pytest.mark.some(3)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", GATHERS)
def test_gradient_of_a_gather_adds_up_in_f32(name, wrap):
    params = {"table": TABLE, "head": HEAD}

    def total(p):
        # Equal positive terms: a sum in bf16 would stand still at 256 of them.
        return jnp.sum(wrap(GATHERS[name])(p))

    grad = jax.jit(jax.grad(bf16(total)))
    sums = [
        str(eqn.invars[0].aval.dtype)
        for eqn in equations(jax.make_jaxpr(grad)(params))
        if eqn.primitive.name.replace("-", "_") in ("scatter_add", "add_any")
    ]
    assert {*sums} <= {"float32"}
    actual, wanted = grad(params), jax.jit(jax.grad(total))(params)
    for key, exact in wanted.items():
        error = np.linalg.norm(actual[key] - exact) / np.linalg.norm(exact)
        assert error <= 9 * UNIT, key


# --- Arguments inside shard_map ----------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
def test_bias_and_residual_are_told_apart_inside_of_shard_map(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def local(x, w, b):
        return store(x + store(jnp.tanh(x @ w + b[None])))

    func = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("d"), P(), P()),
        out_specs=P("d"),
        check_vma=check_vma,
    )
    params = HEAD, W2[0, 0] + X[0]
    traced = jax.make_jaxpr(bf16(lambda params, x: func(x, *params)))(params, X[:8])
    assert stored(traced) == ["bfloat16", "float32"]


def test_scan_may_slice_a_weight_and_close_over_it():
    weights = normal(5, 3, 8, 8) / 2

    def loss(params, x):
        def body(h, w):
            return jnp.tanh(h @ w) + h @ params["w"][0], None

        return jnp.sum(lax.scan(body, x, params["w"])[0])

    grads = [
        jax.grad(amp(loss, reduce_dtype=dtype))({"w": weights}, X)["w"]
        for dtype in ("f32", None)
    ]
    # The gradients of each matmul are rounded to bf16 in one case.
    np.testing.assert_allclose(*grads, atol=2.0**-7 * float(jnp.max(jnp.abs(grads[0]))))
