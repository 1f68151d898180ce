"""`amp` and `fp8` follow a parameter to the matmuls that read it, by one table of moves."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import mpx
from models import (
    equations,
    multiplied,
    normal,
    store,
    stored,
    stored_result,
)
from mpx import AmpRules, amp, amp_stop, fp8

D = 16
W, X = normal(0, D, D) / 4, normal(1, D, D)
LOW, F32 = "bfloat16", "float32"


@jax.custom_vjp
def quantised(w):
    return jnp.round(w * 8) / 8


quantised.defvjp(lambda w: (quantised(w), None), lambda _, grad: (grad,))

KEY = jax.random.key(0)
# From a weight and an input to a result whose matmuls read the weight.
WAYS = {
    "itself": lambda w, x: x @ w,
    "slice in a loop": lambda w, x: lax.fori_loop(
        0, 2, lambda i, x: x @ jnp.stack([w, w])[i], x
    ),
    "slice in a while": lambda w, x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] @ jnp.stack([w, w])[c[0]]), (0, x)
    )[1],
    "scan": lambda w, x: lax.scan(lambda x, w: (x @ w, None), x, jnp.stack([w]))[0],
    "carry that does not change": lambda w, x: lax.fori_loop(
        0, 2, lambda i, c: (c[0] @ c[1], c[1]), (x, w)
    )[0],
    "stop_gradient": lambda w, x: x @ lax.stop_gradient(w),
    "checkpoint_name": lambda w, x: x @ checkpoint_name(w, "weight"),
    "optimization_barrier": lambda w, x: x @ lax.optimization_barrier((x, w))[1],
    "jitted transpose": lambda w, x: x @ jax.jit(jnp.transpose)(w),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: x @ w)(x),
    "branch": lambda w, x: x @ lax.cond(x[0, 0] > 0, lambda: w, lambda: 2 * w),
    "reshaped": lambda w, x: x @ w.reshape(-1, 2 * D)[: D // 2].reshape(D, D),
    "reversed rows": lambda w, x: x @ w[::-1],
    "permuted rows": lambda w, x: (
        x @ w[jnp.asarray(np.random.default_rng(0).permutation(D))]
    ),
    "one of a stack": lambda w, x: x @ jnp.take(jnp.stack([w, w]), 1, axis=0),
    "scaled": lambda w, x: x @ (0.5 * w),
    "normalised": lambda w, x: x @ (w / jnp.sqrt(jnp.sum(w**2, 0, keepdims=True))),
    "straight through": lambda w, x: x @ quantised(w),
    "dropped out": lambda w, x: x @ (w * jax.random.uniform(KEY, w.shape)),
}


@pytest.mark.parametrize("name", WAYS)
def test_what_is_selected_is_kept(name):
    def func(params, x):
        return WAYS[name](params["head"], x)

    params = {"head": W}
    assert {*multiplied(jax.make_jaxpr(amp(func))(params, X))} == {LOW}
    for kept in (
        amp(func, keep="head"),
        amp(func, rules=AmpRules(params={"head": "f32"})),
    ):
        assert {*multiplied(jax.make_jaxpr(kept)(params, X))} == {F32}


# Loops without a known length, and user's rules, run as written in fp8.
@pytest.mark.some(10)
@pytest.mark.parametrize("name", sorted(WAYS.keys() - {"slice in a while"}))
def test_fp8_changes_the_matmul_and_keeps_it_if_asked(name):
    def func(params, x):
        return WAYS[name](params["layer"], x)

    def changed(**options):
        report = mpx.inspect.report(
            fp8(amp(func), min_gain=0, **options), {"layer": W}, X
        )
        return {matmul.param for matmul in report.fp8.changed}

    assert changed() == {"params/layer"}
    assert changed(keep="layer") == set()


@pytest.mark.standard_promotion
def test_matmul_of_a_mask_runs_low_forward_and_backward():
    for mask in (jnp.eye(D, dtype=bool), jnp.eye(D, dtype=jnp.int32)):

        def dispatch(x, mask=mask):
            return jnp.einsum("te,td->ed", mask, x)

        traced = jax.make_jaxpr(
            jax.grad(lambda x, f=dispatch: jnp.sum(amp(f)(x) ** 2))
        )(X)
        assert {*multiplied(traced)} == {LOW}
        np.testing.assert_array_equal(amp(dispatch)(X), X.astype(LOW).astype(F32))


# --- Regions --------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f, jax.checkpoint])
def test_scope_around_a_call_holds_inside_of_it(wrap):
    gelu = wrap(lambda x: jax.nn.gelu(x))

    def stopped(x):
        hidden = x @ W
        with amp_stop():
            return gelu(hidden)

    def scoped(x):
        hidden = x @ W
        with jax.named_scope("act"):
            return gelu(hidden)

    wanted = jax.nn.gelu((X.astype(LOW) @ W.astype(LOW)).astype(F32))
    for func in (
        amp(lambda x: store(stopped(x))),
        amp(lambda x: store(scoped(x)), keep="act"),
    ):
        np.testing.assert_allclose(func(X), wanted, rtol=2.0**-20, atol=2.0**-20)
    rounded = amp(lambda x: store(scoped(x)))(X)
    np.testing.assert_array_equal(rounded, rounded.astype(LOW).astype(F32))


@pytest.mark.parametrize("behind", [jnp.transpose, jnp.tanh, lambda x: 0.5 * x])
@pytest.mark.parametrize(
    "options", [{"keep": "act"}, {"rules": AmpRules(scopes={"act": "f32"})}]
)
def test_what_reads_an_f32_array_that_is_kept_is_not_rounded(behind, options):
    def func(x):
        with jax.named_scope("act"):
            y = jax.nn.gelu(x)
        return behind(y)

    assert stored_result(lambda x: func(x @ W), X) == LOW
    assert stored_result(lambda x: func(x @ W), X, **options) == F32


@jax.jit
def helper(x, w):
    return jnp.tanh(x @ w)


def router(w, x):
    return helper(x, w)


def other(w, x):
    return helper(x, w)


@pytest.mark.parametrize("rule", ["f32", "original"])
def test_rule_of_a_function_holds_for_the_jitted_functions_that_it_calls(rule):
    rules = AmpRules(functions={"^router$": rule})

    def both(w, x):
        return router(w, x), other(w, x)

    # The helper is traced once for both, from whichever called it first.
    for func, wanted in (
        (both, [F32, LOW]),
        (lambda w, x: both(w, x)[::-1], [F32, LOW]),
        (lambda w, x: (other(w, x), router(w, x)), [LOW, F32]),
    ):
        traced = jax.make_jaxpr(amp(func, rules=rules))(W, X)
        dots = [e for e in equations(traced) if e.primitive.name == "dot_general"]
        assert [str(eqn.invars[0].aval.dtype) for eqn in dots] == wanted


# --- What is no parameter -------------------------------------------------------------


class Batch(eqx.Module):
    x: jax.Array
    target: jax.Array


def test_module_that_holds_data_is_not_rounded():
    def off(params, batch):
        return batch.x @ params["w"] - batch.target

    batch = Batch(X, jnp.full((1, D), 1000.7))
    out = amp(off)({"w": jnp.zeros((D, D))}, batch)
    np.testing.assert_array_equal(out, jnp.full((D, D), -1000.7))
    swapped = amp(lambda batch, params: off(params, batch), params="params")
    np.testing.assert_array_equal(swapped(batch, {"w": jnp.zeros((D, D))}), out)


@pytest.mark.standard_promotion
def test_state_of_a_module_is_no_parameter():
    class Net(nnx.Module):
        def __init__(self):
            self.w, self.offset = nnx.Param(W), nnx.BatchStat(jnp.full((1, D), 1000.7))
            self.b = nnx.Param(jnp.zeros((1, D)))

        def __call__(self, x):
            biased = store(x @ self.w[...] + self.b[...])
            return store(biased - self.offset[...])

    traced = jax.make_jaxpr(lambda x: amp(Net())(x))(X)
    assert stored(traced) == [LOW, F32]


@pytest.mark.usefixtures("untyped")
def test_params_must_name_an_argument():
    with pytest.raises(
        ValueError, match="`params` names `argument 3`, but the function"
    ):
        amp(lambda w, x: x @ w, params=3)(W, X)
    with pytest.raises(TypeError, match="the position or the name of the argument"):
        amp(lambda w, x: x @ w, params=1.5)  # pyright: ignore[reportCallIssue]


def test_partial_and_method_keep_the_positions_of_their_arguments():
    def func(scale, x, w, b):
        return store(store(x @ w * scale) + b)

    bias = jnp.ones((1, D))
    bound = functools.partial(func, jnp.ones((1, D)))
    traced = jax.make_jaxpr(amp(bound, params=(1, 2)))(X, W, bias)
    assert stored(traced) == [LOW, LOW]  # what it holds is a parameter, too
