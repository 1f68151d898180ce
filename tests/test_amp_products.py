"""Products that a matrix unit cannot help with stay in f32 under `amp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import equations, normal
from mpx import AmpRules, amp

N = 512
LOW, F32 = "bfloat16", "float32"
POSITIONS = jnp.arange(2048.0)
DATA = normal(9, 8, 8)  # not made of numbers of the program
FREQUENCIES = 10000.0 ** -(jnp.arange(0, 32, 2) / 32)


def dots(func, *args, **options):
    """Returns the dtype of the operands of each matmul under `amp`."""
    jaxpr = jax.make_jaxpr(amp(func, **options))(*args)
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    return [
        str(eqn.invars[0].aval.dtype)
        for eqn in equations(jaxpr)
        if eqn.primitive.name in names
    ]


# --- Without a sum --------------------------------------------------------------------


def conv(x, kernel, groups):
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups)


OUTER = {
    "einsum": (lambda: jnp.einsum("i,j->ij", POSITIONS, FREQUENCIES), F32),
    "one column": (lambda: POSITIONS[:, None] @ FREQUENCIES[None], F32),
    "batched": (
        lambda: jnp.einsum("bi,bj->bij", jnp.ones((2, 3)), jnp.ones((2, 4))),
        F32,
    ),
    "batched column": (lambda: jnp.ones((2, 3, 1)) @ jnp.ones((2, 1, 4)), F32),
    "under vmap": (
        lambda: jax.vmap(lambda p: jnp.einsum("i,j->ij", p, FREQUENCIES))(
            jnp.ones((2, 3))
        ),
        F32,
    ),
    "four summed": (lambda: DATA[:3, :4] @ DATA[:4], F32),
    "five summed": (lambda: DATA[:3, :5] @ DATA[:5], LOW),
    "batched, four summed": (lambda: DATA.reshape(4, 4, 4) @ DATA[:4, :4], F32),
    "pointwise conv": (lambda: conv(jnp.ones((2, 3, 8)), jnp.ones((3, 1, 1)), 3), F32),
    "depthwise conv": (lambda: conv(jnp.ones((2, 3, 8)), DATA[:3, None, :2], 3), F32),
    "wide depthwise conv": (lambda: conv(DATA[None, :3], DATA[:3, None, :5], 3), LOW),
    "grouped conv": (lambda: conv(DATA[None], DATA[:, :4, None], 2), F32),
    "ragged": (
        lambda: lax.ragged_dot(
            jnp.ones((4, 1)), jnp.ones((2, 1, 3)), jnp.array([1, 3])
        ),
        F32,
    ),
}


@pytest.mark.parametrize("name", OUTER)
def test_product_without_a_sum_or_of_few_stays_f32(name):
    func, dtype = OUTER[name]
    assert dots(func) == [dtype]


@pytest.mark.parametrize(
    "rules",
    [AmpRules(primitives={"dot_general": "low"}), AmpRules(scopes={"few": "low"})],
)
def test_product_of_few_runs_low_if_a_rule_says_so(rules):
    def func(x):
        with jax.named_scope("few"):
            return x[:, :2] @ DATA[:2]

    assert dots(func, DATA) == [F32]
    assert dots(func, DATA, rules=rules) == [LOW]


def rope(positions, frequencies, q, wrap=lambda f: f):
    """Rotary embeddings as in keras_hub; returns the rotated queries."""

    def tables(positions):
        angles = jnp.einsum("i,j->ij", positions, frequencies)
        return jnp.sin(angles), jnp.cos(angles)

    sin, cos = wrap(tables)(positions)
    first, second = jnp.split(q, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def in_scan(func):
    def call(x):
        return jax.tree.map(
            lambda leaf: leaf[0],
            lax.scan(lambda _, x: (None, func(x)), None, x[None])[1],
        )

    return call


ROPE = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": in_scan,
    "vmap": lambda f: lambda x: jax.tree.map(lambda y: y[0], jax.vmap(f)(x[None])),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ROPE)
def test_rotary_embedding_is_that_of_f32_at_2048_positions(name):
    q = normal(0, 2048, 32)

    def func(w, q):
        return rope(POSITIONS, FREQUENCIES, q @ w, ROPE[name])

    w = jnp.eye(32)
    low = jax.jit(amp(func, dtype="bf16"))(w, q)
    # Rounding q and the product costs an ulp each; wrong angles cost everything.
    rounded = q.astype(jnp.bfloat16).astype(jnp.float32)
    wanted = rope(POSITIONS, FREQUENCIES, rounded)
    assert float(jnp.max(jnp.abs(low - wanted))) <= 2.0**-8 * float(jnp.max(jnp.abs(q)))
    grad = jax.grad(lambda w: jnp.sum(amp(func)(w, q) * wanted))(w)
    exact = jax.grad(lambda w: jnp.sum(func(w, q) * wanted))(w)
    assert jnp.linalg.norm(grad - exact) <= 0.01 * jnp.linalg.norm(exact)


def test_report_says_why_a_product_without_a_sum_stays_f32():
    def func(w, x):
        angles = jnp.einsum("i,j->ij", POSITIONS[:2], FREQUENCIES)
        return jnp.sin(angles) + x @ w

    report = mpx.inspect.report(mpx.amp(func), jnp.ones((8, 16)), jnp.ones((2, 8)))
    (kept,) = report.kept
    assert kept.primitive == "dot_general"
    assert kept.reason == "a sum of at most 4 products gains nothing in 16 bits"
    assert kept.reason in str(report)
    assert 0 < report.shares["f32"] < report.shares["bf16"] < 1


# --- Nothing but a sum ----------------------------------------------------------------

INNER = {
    "vdot": lambda w: jnp.vdot(w, w),
    "rows": lambda w: jnp.sum(jnp.einsum("bd,bd->b", w, w)),
    "column": lambda w: (w.reshape(1, -1) @ w.reshape(-1, 1))[0, 0],
    "vmap": lambda w: jnp.sum(jax.vmap(jnp.dot)(w, w)),
}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_inner_product_is_a_sum_in_f32(name, dtype):
    w = normal(0, N, N)
    penalty = lambda w: 1e-4 * INNER[name](w)  # noqa: E731
    low = amp(penalty, dtype=dtype)
    np.testing.assert_allclose(low(w), penalty(w), rtol=N * 2.0**-23)
    result = mpx.value_and_grad(low)(mpx.StaticLossScaling(2.0), w)
    assert bool(result.finite)
    np.testing.assert_allclose(result.grads, 2e-4 * w, rtol=2.0**-20)


def test_product_with_a_vector_runs_low_if_one_operand_is_a_weight():
    w, x = jnp.ones((8, 6)), jnp.ones(6)
    assert dots(lambda params, x: params["w"] @ x, {"w": w}, x) == [LOW]
    assert dots(lambda x: w @ x, x) == [LOW]
    assert dots(lambda params, x: 2 * params["w"].T[:, 1:].T @ x, {"w": w}, x) == [LOW]
    assert dots(lambda params, x: x @ params["w"], {"w": x}, w) == [LOW]
    # Inner products, one or several.
    assert dots(lambda data, x: data @ x, w, x) == [F32]
    assert dots(lambda params: params["w"] @ params["w"], {"w": x}) == [F32]


def test_activation_of_several_matmuls_is_cast_once_and_a_weight_for_each():
    def heads(params, x):
        hidden = jnp.tanh(x)  # in f32
        tied = [hidden @ params["w"] for _ in range(2)]
        return sum(jnp.sum(y**2) for y in (*tied, hidden @ params["v"]))

    params = {"w": jnp.ones((8, 4)), "v": jnp.ones((8, 4))}
    jaxpr = jax.make_jaxpr(amp(heads))(params, jnp.ones((16, 8)))
    casts = [
        eqn.invars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("convert_element_type", "store")
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
    ]
    # The cotangents of a weight must add up in f32, those of an activation need not.
    assert sorted(casts) == [(8, 4)] * 3 + [(16, 8)]
