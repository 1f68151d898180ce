"""Options of the gradient functions, the paper's functions, and errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from grad_cases import (
    GRAD_FUNCTIONS,
    HALVES,
    check_exact,
    of_value_and_grad,
)
from models import (
    POLICIES,
    mlp,
    mlp_batch,
    mlp_loss,
    squared_error,
)
from mpx import DynamicLossScaling, NoLossScaling, StaticLossScaling
from mpx._gradients._grad import grad_options
from mpx.testing import assert_trees_equal

# --- Without mixed precision, without scaling -----------------------------------------

SWITCHED = {key: GRAD_FUNCTIONS[key] for key in GRAD_FUNCTIONS if "filter" in key}


@pytest.fixture(params=SWITCHED.values(), ids=SWITCHED.keys())
def paper_grad(request):
    return request.param


@pytest.mark.parametrize("has_aux", [False, True])
def test_switched_off_nothing_is_cast_scaled_or_checked(paper_grad, has_aux):
    seen = []

    def loss(w, x):
        seen.append((w.dtype, x.dtype))
        value = jnp.sum(w * x) * 2.0**100 * 2.0**100
        return (value, w) if has_aux else value

    scaling = DynamicLossScaling.pow2(2.0**8, period=1)
    w, x = jnp.ones(2), np.ones(2, np.float32)
    result = paper_grad(loss, scaling, has_aux=has_aux, use_mixed_precision=False)(w, x)
    assert seen == [(jnp.float32, np.float32)]
    assert result.scaling is scaling
    assert result.finite.dtype == bool
    assert result.finite
    assert_trees_equal(result.grads, jnp.full(2, jnp.inf))
    if has_aux:
        assert_trees_equal(result.aux, w)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_switched_off_gradients_are_f32_too(paper_grad, dtype):
    for options in ({}, {"has_aux": True}):
        loss = lambda w: (w * w, None) if options else w * w  # noqa: B023, E731
        result = paper_grad(loss, None, use_mixed_precision=False, **options)(
            dtype(3.0)
        )
        assert_trees_equal(result.grads, jnp.float32(6.0))
        assert result.scaling is None


def test_switched_off_it_is_the_gradient_of_jax(paper_grad, problem):
    result = paper_grad(
        squared_error, StaticLossScaling(8.0), use_mixed_precision=False, argnums=(0, 1)
    )(problem.w, problem.x, problem.y)
    expected = jax.grad(squared_error, argnums=(0, 1))(problem.w, problem.x, problem.y)
    assert_trees_equal(result.grads, jax.tree.map(jnp.asarray, expected))


def test_no_scaling_is_needed_where_the_range_is_that_of_f32(paper_grad, problem):
    args = problem.w, problem.x, problem.y
    for policy in (POLICIES["bf16"], POLICIES["f32"]):
        result = paper_grad(squared_error, None, policy=policy)(*args)
        check_exact(result, problem)
        assert isinstance(result.scaling, NoLossScaling)
    with mpx.half_precision("bf16"):
        step = paper_grad(squared_error, None)
        assert isinstance(eqx.filter_eval_shape(step, *args).scaling, NoLossScaling)


def test_f16_without_scaling_is_refused(paper_grad, problem):
    args = problem.w, problem.x, problem.y
    for options in ({}, {"policy": POLICIES["f16"]}):
        with pytest.raises(
            ValueError, match=r"f16 gradients need a loss scaling.*pow2"
        ):
            paper_grad(squared_error, None, **options)(*args)


def test_no_scaling_still_checks(paper_grad):
    loss = lambda w: w * jnp.inf  # noqa: E731
    assert not paper_grad(loss, None, policy=POLICIES["bf16"])(jnp.float32(1.0)).finite


# --- calculate_scaled_grad ------------------------------------------------------------


@pytest.mark.parametrize("name", HALVES)
def test_scaled_gradients_are_half_and_scaled(name, problem):
    args = problem.w, problem.x, problem.y
    scaling = StaticLossScaling(64.0)
    loss_with_aux = lambda *args: (squared_error(*args), "aux")  # noqa: E731
    with mpx.half_precision(name):
        step = eqx.filter_jit(mpx.calculate_scaled_grad(squared_error, scaling))
        value, grads = step(*args)
        step = eqx.filter_jit(mpx.calculate_scaled_grad(loss_with_aux, scaling, True))
        (value_2, aux), grads_2 = step(*args)
    assert_trees_equal(value, np.float32(64 * problem.value))
    assert_trees_equal(grads, (64 * problem.grad).astype(HALVES[name]))
    assert_trees_equal((value_2, grads_2), (value, grads))
    assert aux == "aux"


def test_scaled_gradients_overflow_as_half_does():
    loss = lambda w: w * 4.0  # noqa: E731
    _, grads = mpx.calculate_scaled_grad(loss, StaticLossScaling(2.0**15))(jnp.ones(()))
    assert_trees_equal(grads, jnp.float16(jnp.inf))


def test_scaled_gradients_unscaled_by_hand_are_those_of_filter_grad():
    model, (x, y) = mlp(), mlp_batch()
    scaling = DynamicLossScaling.pow2(2.0**10)
    value, grads = mpx.calculate_scaled_grad(mlp_loss, scaling)(model, x, y)
    expected = mpx.value_and_grad(mlp_loss)(scaling, model, x, y)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float16)}
    assert_trees_equal(scaling.unscale(grads), expected.grads)
    assert_trees_equal(scaling.unscale(value), expected.value)


def test_scaled_gradients_switched_off_are_neither_cast_nor_scaled(problem):
    value, grads = mpx.calculate_scaled_grad(
        squared_error, StaticLossScaling(64.0), use_mixed_precision=False
    )(problem.w, problem.x, problem.y)
    assert_trees_equal(value, np.float32(problem.value))
    assert_trees_equal(grads, problem.grad)


# --- Policies: what stays in f32 ------------------------------------------------------


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.linear = eqx.nn.Linear(4, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.head = eqx.nn.Linear(8, 1, key=keys[1])

    def __call__(self, x):
        hidden = self.norm(self.linear(x))
        return self.head(hidden), hidden


def normed_loss(model, x, y):
    pred, hidden = jax.vmap(model)(x)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype.name, eqx.filter(model, eqx.is_array))
    error = (pred[:, 0].astype(jnp.float32) - y.astype(jnp.float32)) ** 2
    return jnp.mean(error), (dtypes, hidden.dtype.name, y.dtype.name)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), set()),
        (eqx.nn.LayerNorm, {"norm"}),
        ([eqx.nn.LayerNorm, "^y$"], {"norm", "y"}),
        ("^y$", {"y"}),
        (lambda name, leaf: name == "" and leaf.ndim == 1, {"y"}),
    ],
    ids=["nothing", "type", "type and name", "name", "predicate"],
)
def test_what_is_kept_stays_f32(keep, kept):
    model, (x, y) = Normed(), mlp_batch()
    policy = mpx.Policy(compute_dtype="bf16", keep=keep)
    step = mpx.value_and_grad(normed_loss, has_aux=True, policy=policy)
    result = eqx.filter_eval_shape(step, NoLossScaling(), model, x, y)
    dtypes, hidden, target = result.aux
    full = lambda name: "float32" if name in kept else "bfloat16"  # noqa: E731
    assert dtypes.linear.weight == dtypes.head.weight == "bfloat16"
    assert dtypes.norm.weight == dtypes.norm.bias == full("norm")
    assert hidden == "bfloat16"  # a kept norm returns the dtype it was given
    assert target == full("y")
    assert {g.dtype for g in jax.tree.leaves(result.grads)} == {np.dtype(np.float32)}


def test_kept_norm_has_the_gradient_of_code_written_by_hand():
    model, (x, y) = Normed(), mlp_batch()
    low = lambda tree: mpx.cast_tree(tree, "bf16")  # noqa: E731

    def by_hand(model, x, y):
        hidden = jax.vmap(low(model.linear))(low(x)).astype(jnp.float32)
        hidden = jax.vmap(model.norm)(hidden)
        pred = jax.vmap(low(model.head))(low(hidden))[:, 0].astype(jnp.float32)
        return jnp.mean((pred - low(y).astype(jnp.float32)) ** 2)

    policy = mpx.Policy(compute_dtype="bf16", keep=eqx.nn.LayerNorm)
    result = mpx.value_and_grad(normed_loss, has_aux=True, policy=policy)(
        NoLossScaling(), model, x, y
    )
    value, grads = eqx.filter_value_and_grad(by_hand)(model, x, y)
    assert_trees_equal(result.value, value)
    assert_trees_equal(jax.tree.leaves(result.grads), jax.tree.leaves(grads))
    assert isinstance(result.grads.norm, eqx.nn.LayerNorm)


def test_rules_see_paths_without_the_names_of_arguments():
    names = []

    def rule(name, leaf):
        names.append(name)
        return name == "layers/0"

    def loss(model, batch, *rest, scale):
        return jnp.sum(model["layers"][1] * batch["x"] * rest[0]) * scale

    ones = jnp.ones(2)
    policy = mpx.Policy(compute_dtype="bf16", keep=rule)
    eqx.filter_eval_shape(
        mpx.value_and_grad(loss, policy=policy),
        NoLossScaling(),
        {"layers": [ones, ones]},
        {"x": ones, "index": jnp.arange(2)},
        ones,
        scale=jnp.float32(2.0),
    )
    assert sorted(names) == ["", "", "layers/0", "layers/1", "x"]


def test_regular_expression_keeps_one_layer_of_many():
    seen = []

    def loss(model, x):
        seen.extend(layer.weight.dtype.name for layer in model.layers)
        return jnp.sum(x)

    policy = mpx.Policy(compute_dtype="bf16", keep=r"^layers/1/")
    model, (x, _) = mlp(), mlp_batch()
    step = mpx.value_and_grad(loss, policy=policy)
    eqx.filter_eval_shape(step, NoLossScaling(), model, x)
    assert seen == ["bfloat16", "float32"]


def test_large_target_kept_by_its_name_does_not_overflow_f16():
    def loss(w, x, y):
        return jnp.mean((x * w).astype(jnp.float32) - y.astype(jnp.float32))

    w, x, y = jnp.float32(1.0), jnp.ones(4), jnp.full(4, 1e5)
    scaling = StaticLossScaling(8.0)
    without = mpx.value_and_grad(loss)(scaling, w, x, y)
    assert jnp.isinf(without.value)
    policy = mpx.Policy(compute_dtype="f16", keep="^y$")
    result = mpx.value_and_grad(loss, policy=policy)(scaling, w, x, y)
    assert_trees_equal(result.value, jnp.float32(1.0) - jnp.float32(1e5))
    assert_trees_equal(result.grads, jnp.float32(1.0))


def test_loss_scaling_inside_an_argument_stays_f32():
    def loss(state, x):
        assert state["scaling"].loss_scaling.dtype == jnp.float32
        return jnp.sum(state["w"] * x)

    state = {"w": jnp.ones(2), "scaling": DynamicLossScaling.pow2(2.0**20)}
    mpx.value_and_grad(loss)(StaticLossScaling(8.0), state, jnp.ones(2))


# --- Errors ---------------------------------------------------------------------------


def call(loss, *args, has_aux=False, kwargs=None, **options):
    """Returns calls of all functions: an error must not depend on which is used."""
    scaling = StaticLossScaling(8.0)
    return [
        lambda grad_of=grad_of: grad_of(loss, scaling, has_aux=has_aux, **options)(
            *args, **(kwargs or {})
        )
        for grad_of in GRAD_FUNCTIONS.values()
    ]


ONE = jnp.float32(1.0)
LOSS_ERROR = r"must return a real floating scalar"
ERRORS = {
    "vector": (
        call(lambda w: w * jnp.ones(3, w.dtype), ONE),
        TypeError,
        LOSS_ERROR + r".*float16 of shape \(3,\).*jnp.mean",
    ),
    "integer": (call(lambda w: 3, ONE), TypeError, LOSS_ERROR + r".*int of shape \(\)"),
    "integer array": (
        call(lambda w: jnp.int32(3), ONE),
        TypeError,
        LOSS_ERROR + ".*int32",
    ),
    "complex": (
        call(lambda w: lax.complex(*[w.astype(jnp.float32)] * 2), ONE),
        TypeError,
        LOSS_ERROR + ".*complex64",
    ),
    "none": (call(lambda w: None, ONE), TypeError, LOSS_ERROR + ".*NoneType"),
    "pair without has_aux": (
        call(lambda w: (w, w), ONE),
        TypeError,
        LOSS_ERROR + ".*tuple.*pass `has_aux=True`",
    ),
    "no pair with has_aux": (
        call(lambda w: w, ONE, has_aux=True),
        TypeError,
        r"With `has_aux=True`.*pair `\(loss, aux\)`",
    ),
    "triple with has_aux": (
        call(lambda w: (w, 1, 2), ONE, has_aux=True),
        TypeError,
        r"With `has_aux=True`.*pair.*tuple",
    ),
    "vector with has_aux": (
        call(lambda w: (w * jnp.ones(2, w.dtype), 1), ONE, has_aux=True),
        TypeError,
        LOSS_ERROR + r".*\(2,\)",
    ),
    "nothing to differentiate": (
        call(lambda model, x: x, {"step": 3, "index": jnp.arange(3)}, ONE),
        ValueError,
        "`model` is to be differentiated, but it holds no floating array.*argnums",
    ),
    "a batch instead of the model": (
        call(lambda model, x: x, ONE, jnp.arange(3), argnums=(0, 1)),
        ValueError,
        "`x` is to be differentiated, but it holds no floating array",
    ),
    "keyword": (
        call(lambda w: w, kwargs={"w": ONE}),
        TypeError,
        "Argument 0 is to be differentiated, but only 0 were passed.*not by keyword",
    ),
    "argnums": (
        call(lambda w: w, ONE, argnums=1),
        TypeError,
        "Argument 1 is to be differentiated, but only 1 were passed",
    ),
    "argnums twice": (
        call(lambda w, x: w, ONE, ONE, argnums=(0, -2)),
        ValueError,
        r"`argnums` \(0, -2\) names an argument twice",
    ),
    "argument twice": (
        call(lambda w, x: w * x, ONE, ONE, kwargs={"x": ONE}),
        TypeError,
        "multiple values for argument 'x'",
    ),
    "retry": (
        call(lambda w: w, ONE, retry=-1),
        ValueError,
        "`retry` must be 0 or more, but -1",
    ),
    "policy string": (
        call(lambda w: w, ONE, policy="c=int8"),
        ValueError,
        "Unknown dtype 'int8' in the policy",
    ),
    "grad_dtype": (
        call(lambda w: w, ONE, grad_dtype="int32"),
        ValueError,
        "`grad_dtype` must be a floating dtype",
    ),
}


@pytest.mark.parametrize(
    ("calls", "error", "match"), ERRORS.values(), ids=ERRORS.keys()
)
def test_mistake_is_explained(calls, error, match):
    for mistake in calls:
        with pytest.raises(error, match=f"(?s){match}"):
            mistake()


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize("scaling", [None, 8.0, jnp.ones(3), "dynamic", dict])
def test_wrong_scaling_is_refused(scaling):
    match = r"must be a loss scaling such as.*but .* was given"
    with pytest.raises(TypeError, match=match):
        mpx.value_and_grad(squared_error)(scaling, jnp.ones(3))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=match):
        mpx.accumulate(squared_error, 2)(scaling, jnp.ones(3))  # pyright: ignore[reportCallIssue]


# The type checker of the tests is quicker than these two messages: go around it.


def test_traced_switch_is_refused():
    unchecked = getattr(grad_options, "__wrapped__", grad_options)
    with pytest.raises(TypeError, match=r"`use_mixed_precision` must be.*static"):
        jax.jit(lambda flag: unchecked(False, flag))(True)


@pytest.mark.usefixtures("untyped")
def test_wrong_policy_object_is_refused():
    unchecked = getattr(grad_options, "__wrapped__", grad_options)
    with pytest.raises(TypeError, match="`policy` must be an `mpx.Policy` or a string"):
        unchecked(policy=3.0)


@pytest.mark.parametrize("policy", [None, "c=bf16", mpx.Policy(keep="x")])
def test_string_or_nothing_can_stand_for_a_policy(policy):
    expected = mpx.Policy() if policy is None else mpx.get_policy(policy)
    assert grad_options(policy=policy).policy == expected


def test_error_inside_the_loss_is_not_swallowed():
    def loss(w):
        raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        of_value_and_grad(loss, StaticLossScaling(8.0))(jnp.ones(()))
