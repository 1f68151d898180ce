"""Parameters under `amp` are what is named, held by the function or differentiated."""

import functools
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from models import normal
from mpx import amp

N, D = 6, 8
X, W, V = normal(0, N, D), normal(1, D, D), normal(2, D, D)
B = normal(3, 1, D)
BF16 = jnp.bfloat16


def layer(w, b, x):
    """Returns `x @ w + b`, which a matmul and what comes after it read: it is stored."""
    h = x @ w + b
    return h + 0.0 * (h @ V)


def loss(w, b, x):
    h = layer(w, b, x)
    return jnp.sum(h), h


def of_tree(p, x):
    return layer(p["w"], p["b"], x)


def loss_of_tree(p, x):
    return loss(p["w"], p["b"], x)


def second(func):
    return lambda x, p: func(p, x)


def is_rounded(h):
    """Returns whether numbers are those of bf16, as a stored sum with a bias is."""
    return bool(jnp.array_equal(h, h.astype(BF16).astype(jnp.float32)))


class Model(eqx.Module):
    w: jax.Array
    b: jax.Array

    def method(self, x):
        return layer(self.w, self.b, x)

    __call__ = method

    def of_batch(self, batch):
        return self.method(batch["x"])


class NnxModel(nnx.Module):
    def __init__(self):
        self.w, self.b = nnx.Param(W), nnx.Param(B)

    def __call__(self, x):
        return layer(self.w[...], self.b[...], x)


TREE = {"w": W, "b": B}
GRAD = functools.partial(jax.grad, has_aux=True)
KNOWN = {
    "a dict's": lambda: amp(of_tree)(TREE, X),
    "a module's": lambda: amp(Model.method)(Model(W, B), X),
    "a module's, second": lambda: amp(second(Model.method))(X, Model(W, B)),
    "a module's, as the function": lambda: amp(Model(W, B))(X),
    "an NNX module's": lambda: amp(lambda m, x: m(x))(NnxModel(), X),
    "an NNX module's, as the function": lambda: amp(NnxModel())(X),
    "the frozen part's": lambda: GRAD(
        amp(lambda p, q, x: loss_of_tree(eqx.combine(p, q), x))
    )({"w": W, "b": None}, {"w": None, "b": B}, X)[1],
    "a scan's": lambda: amp(
        lambda p, x: lax.scan(lambda _, p: (None, of_tree(p, x)), None, p)[1][0]
    )(jax.tree.map(lambda x: x[None], TREE), X),
    "differentiated outside jit": lambda: GRAD(jax.jit(amp(loss_of_tree)))(TREE, X)[1],
    "differentiated in vmap": lambda: jax.vmap(GRAD(amp(loss_of_tree)), (None, 0))(
        TREE, X[None]
    )[1],
    "a partial's array": lambda: amp(functools.partial(layer, W, B))(X),
    "a partial's keyword": lambda: amp(functools.partial(layer, b=B, w=W))(x=X),
    "a nested partial's": lambda: amp(
        functools.partial(functools.partial(layer, W), b=B)
    )(x=X),
    "a Partial's array": lambda: amp(jax.tree_util.Partial(layer, W, B))(X),
    "a Partial's keyword": lambda: amp(jax.tree_util.Partial(layer, b=B, w=W))(x=X),
    "a method's": lambda: amp(Model(W, B).method)(X),
    "a method's, before a batch": lambda: amp(Model(W, B).of_batch)({"x": X}),
    "a container's, beside a partial's array": lambda: amp(
        functools.partial(second(of_tree), X)
    )(TREE),
    "named": lambda: amp(layer, params=(0, "b"))(W, B, X),
    "named, from the end": lambda: amp(second(of_tree), params=-1)(X, TREE),
    "named beside a partial's": lambda: amp(
        functools.partial(lambda scale, x, p: of_tree(p, x) * scale, jnp.ones((1, D))),
        params=-1,
    )(X, TREE),
    "a differentiated container": lambda: GRAD(
        amp(lambda batch, p: loss_of_tree(p, batch["x"])), argnums=1
    )({"x": X}, TREE)[1],
    "differentiated arrays": lambda: GRAD(amp(loss), argnums=(0, 1))(W, B, X)[1],
    "differentiated by keyword": lambda: GRAD(
        lambda p: amp(lambda batch, p: loss_of_tree(p, batch["x"]))(p=p, batch={"x": X})
    )(TREE)[1],
    "differentiated inside jit": lambda: jax.jit(
        GRAD(amp(lambda batch, p: loss_of_tree(p, batch["x"])), argnums=1)
    )({"x": X}, TREE)[1],
    "differentiated under vmap": lambda: jax.vmap(
        GRAD(amp(lambda batch, p: loss_of_tree(p, batch["x"])), argnums=1), (0, None)
    )({"x": X[None]}, TREE)[1],
    "with vmap inside": lambda: GRAD(
        lambda p: jax.tree.map(
            lambda x: x[0],
            jax.vmap(
                amp(lambda batch, p: loss_of_tree(p, batch["x"])), in_axes=(0, None)
            )({"x": X[None]}, p),
        )
    )(TREE)[1],
    "in forward mode": lambda: jax.jvp(
        lambda p: amp(lambda batch, p: of_tree(p, batch["x"]))({"x": X}, p),
        (TREE,),
        (TREE,),
    )[0],
    "by mpx": lambda: (
        mpx.value_and_grad(
            amp(lambda batch, p: loss_of_tree(p, batch["x"])), argnums=1, has_aux=True
        )(mpx.NoLossScaling(), {"x": X}, TREE).aux
    ),
    "behind a loss scale": lambda: amp(lambda scaling, p, x: of_tree(p, x))(
        mpx.DynamicLossScaling.pow2(), TREE, X
    ),
    "behind a container of keys": lambda: amp(lambda keys, p, x: of_tree(p, x))(
        {"dropout": jax.random.key(0), "step": jnp.int32(1)}, TREE, X
    ),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", KNOWN)
def test_bias_is_a_parameter_however_it_is_passed(name):
    assert is_rounded(KNOWN[name]())


DATA = {
    "targets beside differentiated parameters": lambda: GRAD(
        amp(lambda batch, p: loss(p["w"], batch["b"], X)), argnums=1
    )({"b": B}, {"w": W})[1],
    "an array that nothing tells of": lambda: amp(layer)(W, B, X),
    "what is not named": lambda: amp(layer, params=0)(W, B, X),
}


@pytest.mark.parametrize("name", DATA)
def test_what_is_no_parameter_is_not_rounded(name):
    h = DATA[name]()
    assert not is_rounded(h)
    # Numbers of order 1, products of D terms of 16 bits.
    np.testing.assert_allclose(h, layer(W, B, X), atol=D * 2.0**-7)


@pytest.mark.parametrize("how", ["evaluated", "differentiated", "by mpx"])
def test_targets_that_come_first_are_not_rounded(how):
    def loss(batch, params):
        error = batch["x"] @ params["w"] + params["b"] - batch["y"]
        return jnp.mean(error**2)

    params = {"w": W[:, :1], "b": jnp.ones((1,))[None]}
    batch = {"x": X, "y": 1000.3 + normal(4, N, 1)}
    wanted = loss(batch, params)
    value = {
        "evaluated": lambda: amp(loss)(batch, params),
        "differentiated": lambda: jax.value_and_grad(amp(loss), argnums=1)(
            batch, params
        )[0],
        "by mpx": lambda: (
            mpx.value_and_grad(amp(loss), argnums=1)(
                mpx.NoLossScaling(), batch, params
            ).value
        ),
    }[how]()
    # Predictions of order 10 beside 1000: their errors in 16 bits are 2^-8 of one percent.
    np.testing.assert_allclose(value, wanted, rtol=2.0**-8 * 1e-2)


def test_report_says_which_container_was_taken_for_the_parameters():
    def loss(batch, params):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    args = {"x": X}, {"w": W}
    found = mpx.inspect.report(amp(loss), *args)
    assert found.amp is not None
    assert found.amp.guessed == ("batch",)
    assert "`batch`, the first container, is taken for the parameters" in str(found)
    named = mpx.inspect.report(amp(loss, params="params"), *args)
    assert named.amp is not None
    assert named.amp.guessed == ()


# --- Parameters of 16 bits ------------------------------------------------------------

LENGTH = 2048


def by_index(w):
    """A scan that reads rows of a table: its gradient is a sum of `LENGTH` terms."""

    def step(total, i):
        return total + jnp.sum(jnp.sin(w[i % N])), None

    return lax.scan(step, 0.0, jnp.arange(LENGTH))[0]


BARE = {
    "bare": lambda w: jax.grad(amp(by_index))(w),
    "bare, jit inside": lambda w: jax.grad(jax.jit(amp(by_index)))(w),
    "bare, second": lambda w: jax.grad(
        amp(lambda batch, w: by_index(w) + batch["x"]), argnums=1
    )({"x": jnp.zeros(())}, w),
    "in a dict": lambda w: jax.grad(amp(lambda p: by_index(p["w"])))({"w": w})["w"],
    "held by a partial": lambda w: jax.grad(
        lambda w: amp(functools.partial(by_index, w))()
    )(w),
    "by keyword": lambda w: jax.grad(lambda w: amp(by_index)(w=w))(w),
}


@pytest.mark.parametrize("name", BARE)
def test_gradient_of_a_16_bit_array_adds_up_in_f32(name):
    w = normal(0, N, 4).astype(BF16)
    exact = jax.grad(by_index)(w.astype(jnp.float32))
    found = BARE[name](w)
    assert found.dtype == BF16
    # It is rounded once.
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=2.0**-8)


@pytest.mark.standard_promotion
def test_gradient_in_16_bits_that_amp_could_not_foresee_is_heard():
    func = jax.jit(amp(lambda batch, w: by_index(w) + jnp.sum(batch["x"])))
    batch, w = {"x": jnp.zeros(2)}, normal(0, N, 4).astype(BF16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        func(batch, w)  # nothing is differentiated
        jax.grad(func)(batch, w)
    with pytest.warns(RuntimeWarning, match="`w`, of 16 bits, is differentiated, but"):
        jax.grad(func, argnums=1)(batch, w)


@pytest.mark.standard_promotion
def test_results_keep_the_dtypes_of_the_function_as_it_is_written():
    params = {"w": jnp.ones(2, BF16), "scale": jnp.ones((), BF16)}
    moments = {"w": jnp.full(2, 1003.0, jnp.float32), "scale": jnp.float32(1003.0)}

    def step(params, moments):
        grads = jax.grad(lambda p: jnp.sum(p["w"]) * p["scale"])(params)
        moments = jax.tree.map(lambda m, g: m + 0 * g, moments, grads)
        params = jax.tree.map(lambda p, m: (p - m).astype(p.dtype), params, moments)
        return params, moments, grads, jnp.sum(params["w"])

    found, wanted = amp(step)(params, moments), jax.eval_shape(step, params, moments)
    dtypes = [jax.tree.map(lambda x: x.dtype, x[:3]) for x in (found, wanted)]
    assert dtypes[0] == dtypes[1]
    assert found[3].dtype == jnp.float32  # a scalar, as a loss, is not rounded
    np.testing.assert_array_equal(found[1]["w"], 1003.0)


def test_function_that_runs_with_f32_parameters_only_is_run_so():
    def func(w, x):
        dims = lax.conv_dimension_numbers(x.shape, w.shape, ("NCH", "OIH", "NCH"))
        return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=dims)

    w, x = normal(0, 8, 8, 3), normal(1, 2, 8, 8)
    with pytest.raises(TypeError):
        func(w.astype(BF16), x)
    np.testing.assert_array_equal(amp(func)(w.astype(BF16), x), amp(func)(w, x))


@pytest.mark.parametrize("kind", [AssertionError, KeyError])
def test_function_that_checks_its_dtypes_runs_as_it_is_written(kind):
    def func(params, x):
        if params["w"].dtype != BF16:
            raise kind("16 bits are expected")
        return x @ params["w"]

    params = {"w": W.astype(BF16)}
    with pytest.warns(RuntimeWarning, match="needs 16 bits itself"):
        found = amp(func)(params, X.astype(BF16))
    np.testing.assert_array_equal(found, func(params, X.astype(BF16)))


# --- Names ----------------------------------------------------------------------------


def test_an_argument_may_have_any_name():
    names = ("func", "args", "kwargs", "visitor", "call")
    func = eval(f"lambda {', '.join(names)}: {' + '.join(names)}")
    ones = dict.fromkeys(names, jnp.ones(2))
    np.testing.assert_array_equal(amp(func)(**ones), len(names))
    np.testing.assert_array_equal(
        amp(func)(jnp.ones(2), **dict([*ones.items()][1:])), 5
    )


@pytest.mark.parametrize("params", [2, -2, "w"])
def test_params_of_a_partial_are_arguments_of_the_call(params):
    bound = functools.partial(layer, W)
    with pytest.raises(ValueError, match="Pass the position or the name of the arg"):
        amp(bound, params=params)(X)  # pyright: ignore[reportCallIssue]


def test_variable_may_hold_a_dict():
    class Net(nnx.Module):
        def __init__(self):
            self.q = nnx.Param({"w": W, "b": B})

        def __call__(self, x):
            return of_tree(self.q.get_value(), x)

    with jax.numpy_dtype_promotion("standard"):
        assert is_rounded(amp(lambda m, x: m(x))(Net(), X))
        kept = amp(lambda m, x: x @ m.q.get_value()["w"], keep="q/w")
        np.testing.assert_array_equal(kept(Net(), X), X @ W)


# --- Modules and marks ----------------------------------------------------------------


def test_two_modules_under_amp_with_equal_options_are_of_one_type():
    linear = eqx.nn.Linear(D, D, key=jax.random.key(0))
    options: Any = {"dtype": "f16", "keep": ["bias"], "params": 0}
    count = []

    @jax.jit
    def evaluate(model, x):
        count.append(None)
        return model(x)

    model = None
    for _ in range(2):
        model = amp(linear, **options)
        evaluate(model, X[0])
    assert len(count) == 1
    jax.tree.map(lambda x, y: x + y, amp(linear, "f16"), amp(linear, "f16"))
    other = amp(linear, **(options | {"keep": "weight"}))
    assert jax.tree.structure(other) != jax.tree.structure(model)


def test_class_under_amp_is_refused():
    with pytest.raises(
        TypeError, match="the class `Model` was given, whose call makes"
    ):
        amp(Model)


def test_amp_stop_holds_around_a_jitted_function():
    func = jax.jit(amp(lambda x: x @ V))
    low = func(X)
    assert not np.array_equal(low, X @ V)
    with mpx.amp_stop():
        np.testing.assert_array_equal(func(X), X @ V)
    np.testing.assert_array_equal(mpx.amp_stop(func)(X), X @ V)
    np.testing.assert_array_equal(func(X), low)


@pytest.mark.parametrize("default", [None, "high", "tensorfloat32"])
def test_precision_that_a_matmul_asks_for_is_honoured(default):
    def func(x):
        return jnp.dot(x, V), jnp.dot(x, V, precision="highest")

    with jax.default_matmul_precision(default):
        high = amp(lambda x: (jnp.dot(x, V), jnp.dot(x, V, precision="high")))(X)
        low, exact = amp(func)(X)
    wanted = X @ V
    np.testing.assert_array_equal(exact, wanted)
    assert not np.array_equal(low, wanted)
    # Where all matmuls have it, JAX does not tell apart which of them ask for it.
    assert np.array_equal(high[1], wanted) == (default is None)
