"""What `amp` knows of a value, its dtype and its name, holds inside calls."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.internal import while_loop
from jax import lax
from jax.custom_derivatives import SymbolicZero

from models import equations
from mpx import AmpRules, amp
from mpx._jax._compat import Primitive
from mpx._program._queries import equations as walked
from mpx.testing import assert_trees_equal

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number

bf16 = functools.partial(amp, dtype="bf16")

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


@pytest.mark.some(4)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", READERS)
def test_what_a_jitted_function_casts_itself_is_left_to_it(name, context):
    def func(x):
        return READERS[name](x @ W)

    wrap = CONTEXTS[context]
    wanted = wrap(func)(X)
    # A few f32 operations, compiled in another order; a norm divides by 0.003 at least.
    np.testing.assert_allclose(wrap(bf16(func))(X), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.some(2)
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

HEAD = jnp.full((8, 8), 1.001)  # no bf16 number
START = jnp.linspace(-1.0, 1.1, 24).reshape(3, 8)
KEEP_HEAD = AmpRules(params={"head": "f32"})


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
    kept = bf16(func, rules=KEEP_HEAD)
    assert_trees_equal(kept(HEAD, START), func(HEAD, START))
    assert dot_dtypes(kept, HEAD, START) == {"float32"}
    assert dot_dtypes(bf16(func), HEAD, START) == {"bfloat16"}


@pytest.mark.parametrize("func", [with_vjp, with_jvp], ids=["vjp", "jvp"])
def test_parameter_rule_holds_where_a_derivative_rule_is_run(func):
    def loss(head, x):
        return jnp.sum(jnp.sin(func(x, head)))

    value, (of_head, of_x) = jax.value_and_grad(
        bf16(loss, rules=KEEP_HEAD), argnums=(0, 1)
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

    kept = functools.partial(bf16, rules=KEEP_HEAD)
    assert_trees_equal(push(kept), push(lambda f: f))
    assert not np.array_equal(push(bf16)[1], push(kept)[1])


def test_weight_of_a_custom_jvp_has_a_gradient_where_weight_gradients_are_f32():
    def loss(head, x):
        return jnp.sum(jnp.sin(with_jvp(x, head)))

    exact = jax.grad(bf16(loss, reduce_dtype="f32"))(HEAD, START)
    wanted = jax.grad(loss)(HEAD, START)
    # Two matmuls one behind the other, of three roundings each.
    error = np.linalg.norm(exact - wanted)
    assert error <= 2 * 3 * UNIT * np.linalg.norm(wanted)


def affine(x, bias):
    return x @ HEAD + bias[None]


affine_with_jvp = jax.custom_jvp(affine)
affine_with_jvp.defjvp(lambda primals, tangents: jax.jvp(affine, primals, tangents))
affine_with_vjp = jax.custom_vjp(affine)
affine_with_vjp.defvjp(
    lambda x, bias: (affine(x, bias), None),
    lambda _, cotangent: (cotangent @ HEAD.T, jnp.sum(cotangent, 0)),
)


@pytest.mark.parametrize("func", [affine, affine_with_jvp, affine_with_vjp])
def test_bias_follows_a_low_matmul_inside_of_a_call(func):
    def stored(x, bias):
        h = func(x, bias)
        return h + 0.0 * (h @ HEAD)  # a matmul reads it, and what comes after that

    low = bf16(stored, params="bias")
    for h in (low(START, BIAS), jax.vjp(low, START, BIAS)[0]):
        np.testing.assert_array_equal(h, h.astype(jnp.bfloat16).astype(h.dtype))


# --- Rules that ask which arguments are perturbed -------------------------------------

BIAS = jnp.linspace(-0.5, 0.5, 8)
SEEN = []  # what derivative rules were told


def affine_and_square(x, w, bias):
    return x @ w + bias[None], w * w


@jax.custom_vjp
def nosy_vjp(x, w, bias):
    return affine_and_square(x, w, bias)


def _nosy_forward(x, w, bias):
    SEEN.append(("perturbed", x.perturbed, w.perturbed, bias.perturbed))
    out = affine_and_square(x.value, w.value, bias.value)
    return out, (x.value, w.value, bias.perturbed)


def _nosy_backward(residuals, cotangents):
    x, w, asked = residuals
    SEEN.append(("cotangents", *(type(ct) is SymbolicZero for ct in cotangents)))
    of_out, of_square = (
        jnp.zeros(ct.shape, ct.dtype) if type(ct) is SymbolicZero else ct
        for ct in cotangents
    )
    of_bias = jnp.sum(of_out, 0) if asked else None
    return of_out @ w.T, x.T @ of_out + 2 * w * of_square, of_bias


nosy_vjp.defvjp(_nosy_forward, _nosy_backward, symbolic_zeros=True)


@jax.custom_jvp
def nosy_jvp(x, w, bias):
    return affine_and_square(x, w, bias)


def _nosy_rule(primals, tangents):
    SEEN.append(("tangents", *(type(t) is SymbolicZero for t in tangents)))
    (x, w, _), (dx, dw, dbias) = primals, tangents
    out, square = affine_and_square(*primals)
    dout = jnp.zeros_like(out)
    dout += 0.0 if type(dx) is SymbolicZero else dx @ w
    dout += 0.0 if type(dw) is SymbolicZero else x @ dw
    dout += 0.0 if type(dbias) is SymbolicZero else dbias[None]
    return (out, square), (dout, dw if type(dw) is SymbolicZero else 2 * w * dw)


nosy_jvp.defjvp(_nosy_rule, symbolic_zeros=True)


@jax.custom_vjp
def listener(x):
    return x, 2 * x


def _listen(_, cotangents):
    SEEN.append(("heard", *(type(ct) is SymbolicZero for ct in cotangents)))
    one, two = (0.0 if type(ct) is SymbolicZero else ct for ct in cotangents)
    return (one + 2 * two,)


def _start(x):
    SEEN.append(("listener", x.perturbed))
    return (x.value, 2 * x.value), None


listener.defvjp(_start, _listen, symbolic_zeros=True)


def by_scan(func):
    def scanned(x, w, bias):
        def step(total, _):
            return total + func(x, w, bias)[0], None

        return lax.scan(step, jnp.zeros((3, 8)), None, length=2)[0], w * w

    return scanned


AROUND = {
    "plain": lambda func: func,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": by_scan,
    "vmap": lambda func: jax.vmap(func, (None, 0, None)),
}
# Which arguments are differentiated for, and which results are used.
ASKED = {"x": 0, "w": 1, "x and bias": (0, 2), "all": (0, 1, 2)}


def gradient(wrap, func, around, argnums):
    def loss(x, w, bias):
        return jnp.sum(jnp.exp(AROUND[around](func)(x, w, bias)[0] / 4))

    return jax.grad(wrap(loss), argnums)


def told(func, *args):
    """Returns what the rules are told while a function is traced."""
    jax.clear_caches()  # a rule that JAX has traced for another call is not run again
    SEEN.clear()
    jax.make_jaxpr(func)(*args)
    # A rule may be traced several times.
    return list(dict.fromkeys(SEEN))


def arguments(around):
    # Of one sign, so that no gradient is a small difference of large numbers.
    w = jnp.stack([HEAD, HEAD / 2]) if around == "vmap" else HEAD
    return START + 1.2, w, BIAS


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("func", [nosy_vjp, nosy_jvp], ids=["vjp", "jvp"])
def test_rule_is_told_what_is_perturbed_as_without_amp(func, around, asked):
    args, argnums = arguments(around), ASKED[asked]
    wanted = told(gradient(lambda f: f, func, around, argnums), *args)
    assert wanted  # the premise: the rules were run
    assert told(gradient(bf16, func, around, argnums), *args) == wanted


def assert_close(grads, exact, bound):
    for grad, reference in zip(*map(jax.tree.leaves, (grads, exact)), strict=True):
        assert grad.dtype == jnp.float32
        error = np.linalg.norm(grad - reference)
        assert error <= bound * np.linalg.norm(reference)


@pytest.mark.some(3)
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("func", [nosy_vjp, nosy_jvp], ids=["vjp", "jvp"])
def test_gradient_by_a_rule_that_is_told_what_is_perturbed(func, around):
    actual = gradient(bf16, func, around, (0, 1, 2))
    exact = gradient(lambda f: f, affine_and_square, around, (0, 1, 2))
    both = jax.jit(lambda *args: (actual(*args), exact(*args)))
    # Two matmuls one behind the other, of three roundings each.
    grads, wanted = both(*arguments(around))
    assert_close(grads, wanted, 2 * 3 * UNIT)


def test_zero_that_a_backward_rule_leaves_out_reaches_the_rule_before_it():
    @jax.custom_vjp
    def ignores_bias(x, bias):
        return x @ HEAD + bias[None]

    ignores_bias.defvjp(
        lambda x, bias: (x @ HEAD + bias[None], None),
        lambda _, cotangent: (cotangent @ HEAD.T, None),
    )

    def loss(x, bias):
        one, two = listener(bias)
        return jnp.sum(ignores_bias(x, one)) + jnp.sum(two)

    seen = told(jax.grad(bf16(loss), argnums=1), START, BIAS)
    assert seen == told(jax.grad(loss, argnums=1), START, BIAS)
    assert ("heard", True, False) in seen
    grad = jax.jit(jax.grad(bf16(loss), argnums=1))(START, BIAS)
    np.testing.assert_array_equal(grad, 2.0)


@pytest.mark.parametrize("asked", ["x", "all"])
def test_zero_that_a_tangent_rule_returns_reaches_the_rule_after_it(asked):
    # The square depends on the weight only: else its tangent is a symbolic zero.
    def loss(x, w, bias):
        out, square = nosy_jvp(x, w, bias)
        return jnp.sum(out) + jnp.sum(listener(square)[0])

    seen = told(jax.grad(bf16(loss), ASKED[asked]), START, HEAD, BIAS)
    assert seen == told(jax.grad(loss, ASKED[asked]), START, HEAD, BIAS)
    assert (("listener", True) in seen) == (asked == "all")


def filtered(x, w):
    """A rule of Equinox, which asserts that it may leave out what is not perturbed."""

    @eqx.filter_custom_vjp
    def call(vjp_arg, other):
        return vjp_arg[0] @ vjp_arg[1] + other[None]

    @call.def_fwd
    def forward(perturbed, vjp_arg, other):
        SEEN.append(("filtered", *perturbed))
        return call(vjp_arg, other), None

    @call.def_bwd
    def backward(residuals, cotangent, perturbed, vjp_arg, other):
        del residuals, other
        x, w = vjp_arg
        return (
            cotangent @ w.T if perturbed[0] else None,
            x.T @ cotangent if perturbed[1] else None,
        )

    return call((x, w), BIAS)


def checkpointed(x, w):
    """What diffrax differentiates: a while loop that keeps some of its steps."""

    def step(carry):
        x, i = carry
        return jnp.tanh(x @ w), i + 1

    carry = (x, jnp.int32(0))
    return while_loop(
        lambda carry: carry[1] < 3, step, carry, max_steps=8, kind="checkpointed"
    )[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def with_constants(power, x, name, w):
    del name
    return (x @ w) ** power


def _powered(power, x, name, w):
    del name
    return (x @ w) ** power, (x, w)


def _of_power(power, name, residuals, cotangent):
    assert name == "name"
    x, w = residuals
    inner = cotangent * power * (x @ w) ** (power - 1)
    return inner @ w.T, x.T @ inner


with_constants.defvjp(_powered, _of_power)


@jax.custom_vjp
def with_integers(x, w, index):
    return (x @ w)[index], index + 1


with_integers.defvjp(
    lambda x, w, index: (with_integers(x, w, index), (x, w, index)),
    lambda kept, cts: (
        jnp.zeros_like(kept[0]).at[kept[2]].set(cts[0] @ kept[1].T),
        jnp.outer(kept[0][kept[2]], cts[0]),
        None,
    ),
)


@jax.custom_jvp
def with_integers_pushed(x, w, index):
    return (x @ w)[index], index + 1


@with_integers_pushed.defjvp
def _(primals, tangents):
    (x, w, index), (dx, dw, dindex) = primals, tangents
    out = with_integers_pushed(x, w, index)
    return out, ((dx @ w + x @ dw)[index], dindex)


# A function with rules, and what it is written without them.
RULES = {
    "eqx.filter_custom_vjp": (filtered, lambda x, w: x @ w + BIAS[None]),
    "checkpointed while": (
        checkpointed,
        lambda x, w: jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w),
    ),
    "nondiff_argnums": (
        lambda x, w: with_constants(2, x, "name", w),
        lambda x, w: (x @ w) ** 2,
    ),
    "integers of a custom_vjp": (
        lambda x, w: with_integers(x, w, jnp.int32(1))[0],
        lambda x, w: (x @ w)[1],
    ),
    "integers of a custom_jvp": (
        lambda x, w: with_integers_pushed(x, w, jnp.int32(1))[0],
        lambda x, w: (x @ w)[1],
    ),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=["x", "both"])
@pytest.mark.parametrize("name", RULES)
def test_gradient_of_a_rule_is_that_of_the_function(name, argnums):
    func, plain = RULES[name]

    def grad(wrap, func):
        return jax.grad(wrap(lambda x, w: jnp.sum(jnp.sin(func(x, w)))), argnums)

    SEEN.clear()
    both = (grad(bf16, func), grad(lambda f: f, plain))
    grads, wanted = jax.jit(lambda *args: [f(*args) for f in both])(START, HEAD / 4)
    if name == "eqx.filter_custom_vjp":
        assert {*SEEN} == {("filtered", True, argnums != 0)}
    # Up to four matmuls one behind the other, of three roundings each.
    assert_close(grads, wanted, 4 * 3 * UNIT)


def closes_over_jvp(head, x):
    @jax.custom_jvp
    def call(x):
        return x @ head

    call.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 2))
    return call(x)


@pytest.mark.parametrize("func", [closes_over_jvp, closes_over], ids=["jvp", "vjp"])
def test_derivative_for_a_value_that_a_function_closes_over_is_refused(func):
    with pytest.raises(NotImplementedError, match="Pass the value as an argument"):
        jax.grad(bf16(lambda head, x: jnp.sum(func(head, x))))(HEAD, START)


# --- High-level primitives of JAX 0.12 ------------------------------------------------


def by_root(x):
    angle = jnp.sum(x @ HEAD)
    return lax.custom_root(
        lambda y: y - jnp.tanh(angle),
        angle,
        lambda f, guess: jnp.tanh(angle),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def with_generic_rule():
    call: Any = jax.custom_vjp(lambda x: jnp.tanh(x @ HEAD))
    call.defvjp(
        lambda x: (call(x), x @ HEAD),
        lambda y, grad: ((grad * (1 - jnp.tanh(y) ** 2)) @ HEAD.T,),
        generic_batching=True,
    )
    return call


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="JAX has none before")
@pytest.mark.parametrize("name", ["root", "vjp", "remat3", "vjp3"])
def test_high_level_primitive_is_rebuilt(name):
    flags = {"remat3": "jax_remat3", "vjp3": "jax_custom_vjp3"}
    if name in flags:
        jax.config.update(flags[name], True)
    try:
        func = {
            "root": lambda: by_root,
            "vjp": with_generic_rule,
            "remat3": lambda: jax.checkpoint(lambda x: jnp.tanh(x @ HEAD)),
            "vjp3": lambda: affine_with_rule,
        }[name]()
        traced = jax.make_jaxpr(amp(func))(START)
        loss = lambda x: jnp.sum(func(x) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(amp(loss))(START)
        gradient = jax.make_jaxpr(jax.grad(amp(loss)))(START)
    finally:
        if name in flags:
            jax.config.update(flags[name], False)
    for jaxpr in (traced, gradient):
        dots = [e for e in walked(jaxpr) if e.primitive.name == "dot_general"]
        assert {str(eqn.invars[0].aval.dtype) for eqn in dots} == {"bfloat16"}
    direct = lambda x: jnp.tanh(x @ HEAD)  # noqa: E731
    if name == "root":
        direct = lambda x: jnp.tanh(jnp.sum(x @ HEAD))  # noqa: E731
    wanted, exact = jax.value_and_grad(amp(lambda x: jnp.sum(direct(x) ** 2)))(START)
    np.testing.assert_allclose(value, wanted, rtol=2.0**-7)
    np.testing.assert_allclose(
        grad, exact, atol=2.0**-6 * float(jnp.max(jnp.abs(exact)))
    )


@jax.custom_vjp
def affine_with_rule(x):
    return jnp.tanh(x @ HEAD)


affine_with_rule.defvjp(
    lambda x: (affine_with_rule(x), x @ HEAD),
    lambda y, grad: ((grad * (1 - jnp.tanh(y) ** 2)) @ HEAD.T,),
)


def test_operation_that_is_not_known_and_holds_matmuls_is_heard():
    primitive, body = (
        Primitive("unknown_call"),
        jax.make_jaxpr(lambda x: x @ HEAD)(START),
    )
    primitive.def_abstract_eval(lambda x, jaxpr: jaxpr.out_avals[0])
    with pytest.warns(
        RuntimeWarning, match="does not know the operation `unknown_call`"
    ):
        jax.make_jaxpr(amp(lambda x: primitive.bind(x, jaxpr=body)))(START)
