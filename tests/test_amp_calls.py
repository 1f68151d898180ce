"""What `amp` knows of a value, its dtype and its name, holds inside of calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from models import equations
from mpx import AmpPolicy, amp
from mpx.testing import assert_trees_equal

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number

bf16 = functools.partial(amp, compute_dtype="bf16")

# --- Values that a jitted function casts ----------------------------------------------

# Small integers: the matmul is exact in bf16, so nothing but a wrong cast can differ.
X = jnp.array([[1.0, 2.0, -3.0, 4.0], [0.0, -2.0, 5.0, 1.0], [3.0, 1.0, 1.0, -1.0]])
W = jnp.array([[1.0, 2.0], [0.0, -1.0], [3.0, 1.0], [-2.0, 4.0]])
FACTORS = jnp.array([2, 3])


@jax.jit
def inner(x, i):
    return x * i.astype(jnp.float32)


@jax.jit
def outer(x, i):
    return inner(x, i) + 1


def layer_norm(x):
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - jnp.mean(x, axis=-1, keepdims=True)) * lax.rsqrt(variance + 1e-5)


READERS = {
    "std": lambda h: jnp.std(h),
    "std of rows": lambda h: jnp.std(h, axis=-1),
    "var": lambda h: jnp.var(h),
    "layer norm": layer_norm,
    "integer argument": lambda h: outer(h, FACTORS[None]),
    "f16 argument": lambda h: outer(h, FACTORS[None].astype(jnp.float16)),
}
CONTEXTS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    # Each row is a batch of its own.
    "vmap": lambda f: lambda x: jax.vmap(lambda row: f(row[None]))(x),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", READERS)
def test_what_a_jitted_function_casts_itself_is_left_to_it(name, context):
    def func(x):
        return READERS[name](x @ W)

    wrap = CONTEXTS[context]
    wanted = wrap(func)(X)
    # A few f32 operations, compiled in another order; a norm divides by 0.003 at least.
    np.testing.assert_allclose(wrap(bf16(func))(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", READERS)
def test_gradient_through_a_jitted_function_that_casts_is_right(name):
    def of_product(h):
        return jnp.sum(jnp.sin(READERS[name](h)))

    actual = jax.jit(jax.grad(bf16(lambda x: of_product(x @ W))))(X)
    cotangent = jax.grad(of_product)(X @ W)
    # The cotangent is rounded before the matmul, and the result after it.
    bound = 2.01 * UNIT * (jnp.abs(cotangent) @ jnp.abs(W.T)) + 1e-5
    assert bool(jnp.all(jnp.abs(actual - cotangent @ W.T) <= bound))


# --- Rules for parameters -------------------------------------------------------------

HEAD = jnp.full((4, 4), 1.001)  # no bf16 number
START = jnp.linspace(-1.0, 1.1, 12).reshape(3, 4)
KEEP_HEAD = AmpPolicy(params={"head": "f32"})


def by_while(head, x):
    def step(carry):
        return carry[0] @ head, carry[1] + 1

    return lax.while_loop(lambda carry: carry[1] < 2, step, (x, 0))[0]


def by_condition(head, x):
    def goes_on(carry):
        return jnp.sum(carry @ head) < 1.0

    return lax.while_loop(goes_on, lambda carry: carry + 1.0, x)


def by_traced_length(head, x):
    return lax.fori_loop(0, jnp.int32(2), lambda _, carry: carry @ head, x)


@jax.custom_vjp
def with_vjp(x, head):
    return x @ head


def _backward(residuals, cotangent):
    x, head = residuals
    return cotangent @ head.T, x.T @ cotangent


with_vjp.defvjp(lambda x, head: (x @ head, (x, head)), _backward)


@jax.custom_jvp
def with_jvp(x, head):
    return x @ head


@with_jvp.defjvp
def _(primals, tangents):
    (x, head), (dx, dhead) = primals, tangents
    return x @ head, dx @ head + x @ dhead


def closes_over(head, x):
    @jax.custom_vjp
    def call(x):
        return x @ head

    call.defvjp(lambda x: (x @ head, None), lambda _, cotangent: (cotangent @ head.T,))
    return call(lax.stop_gradient(x) * 1.0)


CALLS = {
    "while": by_while,
    "condition of a while": by_condition,
    "fori of a traced length": by_traced_length,
    "custom_vjp": lambda head, x: with_vjp(x, head),
    "custom_jvp": lambda head, x: with_jvp(x, head),
    "closure": closes_over,
}


def dot_dtypes(func, *args):
    return {
        str(eqn.invars[0].aval.dtype)
        for eqn in equations(jax.make_jaxpr(func)(*args))
        if eqn.primitive.name == "dot_general"
    }


@pytest.mark.parametrize("name", CALLS)
def test_parameter_rule_holds_inside_of_a_call(name):
    func = CALLS[name]
    kept = bf16(func, policy=KEEP_HEAD)
    assert_trees_equal(kept(HEAD, START), func(HEAD, START))
    assert dot_dtypes(kept, HEAD, START) == {"float32"}
    assert dot_dtypes(bf16(func), HEAD, START) == {"bfloat16"}


@pytest.mark.parametrize("func", [with_vjp, with_jvp], ids=["vjp", "jvp"])
def test_parameter_rule_holds_where_a_derivative_rule_is_run(func):
    def loss(head, x):
        return jnp.sum(jnp.sin(func(x, head)))

    value, (of_head, of_x) = jax.value_and_grad(
        bf16(loss, policy=KEEP_HEAD), argnums=(0, 1)
    )(HEAD, START)
    wanted, (wanted_head, wanted_x) = jax.value_and_grad(loss, argnums=(0, 1))(
        HEAD, START
    )
    assert_trees_equal((value, of_x), (wanted, wanted_x))
    if func is with_jvp:  # a tangent has the rule of its parameter
        assert_trees_equal(of_head, wanted_head)
    rounded = jax.grad(bf16(loss), argnums=1)(HEAD, START)
    assert not np.array_equal(rounded, wanted_x)


def test_tangent_of_a_derivative_rule_has_the_rule_of_its_parameter():
    def push(wrap):
        tangents = (HEAD / 3, START / 3)
        return jax.jvp(wrap(CALLS["custom_jvp"]), (HEAD, START), tangents)

    kept = functools.partial(bf16, policy=KEEP_HEAD)
    assert_trees_equal(push(kept), push(lambda f: f))
    assert not np.array_equal(push(bf16)[1], push(kept)[1])


def test_weight_of_a_custom_jvp_has_a_gradient_where_weight_gradients_are_f32():
    def loss(head, x):
        return jnp.sum(jnp.sin(with_jvp(x, head)))

    exact = jax.grad(bf16(loss, f32_weight_grads=True))(HEAD, START)
    wanted = jax.grad(loss)(HEAD, START)
    # Two matmuls one behind the other, of three roundings each.
    error = np.linalg.norm(exact - wanted)
    assert error <= 2 * 3 * UNIT * np.linalg.norm(wanted)


def affine(x, bias):
    return x @ HEAD + bias[None]


def affine_in_while(x, bias):
    def step(carry):
        return affine(carry[0], bias), carry[1] + 1

    return lax.while_loop(lambda carry: carry[1] < 2, step, (x, 0))[0]


affine_with_jvp = jax.custom_jvp(affine)
affine_with_jvp.defjvp(lambda primals, tangents: jax.jvp(affine, primals, tangents))
affine_with_vjp = jax.custom_vjp(affine)
affine_with_vjp.defvjp(
    lambda x, bias: (affine(x, bias), None),
    lambda _, cotangent: (cotangent @ HEAD.T, jnp.sum(cotangent, 0)),
)


@pytest.mark.parametrize("func", [affine_in_while, affine_with_jvp, affine_with_vjp])
def test_bias_follows_a_low_matmul_inside_of_a_call(func):
    def differentiated(x, bias):
        if func is affine_in_while:
            return jax.jvp(bf16(func), (x, bias), (x, bias))[0]
        return jax.vjp(bf16(func), x, bias)[0]

    adds = [
        str(eqn.outvars[0].aval.dtype)
        for eqn in equations(jax.make_jaxpr(differentiated)(START, jnp.ones(4)))
        if eqn.primitive.name == "add"
    ]
    assert {*adds} - {"int32"} == {"bfloat16"}
