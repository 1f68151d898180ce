"""The rule table of `amp` covers what JAX can compile, and policies change it."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpx
from models import equations, store, stored_result
from mpx import AmpRules, amp, amp_low, amp_stop
from mpx._amp._rules import PRIMITIVES, WITHOUT_RULES, Rule, rule_for
from mpx._casting._context import gradient_function
from mpx._program._primitives import TABLE
from mpx.testing import assert_trees_equal

# --- The table ------------------------------------------------------------------------

# What JAX can compile and the table does not name. A primitive that appears newly makes
# the test below red: give it a line in the table, or here if the default is right.
# The names are those of the oldest and of the newest supported JAX together.
BY_DEFAULT = {
    "has no f32 operand": """
        after_all axis_index clz create_token dim_as_value dimension_size empty
        empty2 from_edtype iota_2x32_shape mulhi philox2x32 philox4x32
        platform_index population_count random_bits random_clone random_fold_in
        random_seed random_split random_unwrap random_wrap rng_bit_generator
        shape_assertion threefry2x32 threefry4x32 to_edtype unreachable
    """,
    "draws numbers": "random_gamma rng_uniform",
    "is written for its own dtypes": """
        program_order
        approx_top_k broadcast_to call_exported check core_map create_linear cudnn_fusion
        custom_lin dce_sink inspect_sharding linear_call pin relayout
        run_state stage symmetric_product tie unpin with_memory_space_constraint
        dot_product_attention_bwd_wrapper dot_product_attention_fwd_wrapper
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd_wrapper
        scaled_matmul_wrapper
    """,
    "asynchronous or experimental communication": """
        all_gather_done all_gather_reduced_start all_gather_start all_to_all_done
        all_to_all_start pbroadcast_done pbroadcast_dynamic pbroadcast_start
        ppermute_done ppermute_start preduced psum_done psum_invariant_start psum_start
        ragged_all_to_all reduce_scatter_done reduce_scatter_start reduced_vary_cast_p
        unreduced_pmax unreduced_pmin unreduced_psum_start
        unreduced_reduce_scatter_start vary_unreduced_cast_p
    """,
    "stops the compilation": "refused",
    "changes what a kernel knows of a number": "as_unvarying",
    "belongs to another library": """
        announce_jaxpr maybe_set noinline nonbatchable nondifferentiable_backward
        nontraceable select_if_vmap unvmap_all unvmap_any unvmap_max vprim
    """,
}


def test_each_primitive_stands_in_the_table_once():
    names = list(itertools.chain.from_iterable(row.names for row in TABLE))
    assert sorted(names) == sorted({*names})
    assert not {*names} & {*WITHOUT_RULES}
    assert {row.rule for row in TABLE} <= {*Rule}
    assert {row.place for row in TABLE} <= {"inside", "stored", "alone"}


def test_every_primitive_of_this_jax_has_a_rule_or_falls_under_the_default():
    defaults = list(itertools.chain.from_iterable(map(str.split, BY_DEFAULT.values())))
    assert sorted(defaults) == sorted({*defaults}), "a name is listed twice"
    known = {*PRIMITIVES, *WITHOUT_RULES, *defaults}
    # In a process of its own: importing pallas adds what only kernels consist of.
    code = (
        "import mpx; from mpx._jax import _compat; print(*_compat.lowered_primitives())"
    )
    lowered = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert len(lowered) > 200
    assert {*lowered} - known == set()
    assert not {*defaults} & {*PRIMITIVES, *WITHOUT_RULES}


def test_default_of_an_unknown_primitive_is_to_run_as_written():
    assert rule_for("a_primitive_of_tomorrow", {}, compute_is_f16=False) == "original"


@pytest.mark.parametrize(
    ("power", "is_f16", "rule"),
    [(2, False, "f32"), (-1, False, "f32"), (3, False, "follow"), (3, True, "f32")],
)
def test_integer_power_runs_low_only_where_it_cannot_overflow(power, is_f16, rule):
    assert rule_for("integer_pow", {"y": power}, compute_is_f16=is_f16) == rule


# --- What the rules do ----------------------------------------------------------------

X = jnp.linspace(0.1, 1.3, 24).reshape(3, 8)
W = jnp.linspace(-1.0, 0.9, 64).reshape(8, 8)
B = jnp.linspace(0.5, 1.1, 8)

LOW, F32 = "bfloat16", "float32"
bf16 = functools.partial(amp, dtype="bf16")


def trace(func, *args, **options):
    return [*equations(jax.make_jaxpr(amp(func, **options))(*args))]


def dtypes_of(func, *args, primitive, dtype="bf16", **options):
    """Returns the dtypes of the first operand of each equation of one primitive."""
    return [
        str(eqn.invars[-1].aval.dtype)
        for eqn in trace(func, *args, dtype=dtype, **options)
        if eqn.primitive.name == primitive
    ]


# The dtype in which an operation computes, and in which its result is stored.
RULES = {
    "matmul": (lambda x: x @ W, "dot_general", "bfloat16", "bfloat16"),
    "exp": (lambda x: jnp.exp(x @ W), "exp", "float32", "bfloat16"),
    "sum": (lambda x: jnp.sum(x @ W), "reduce_sum", "float32", "float32"),
    "mean": (lambda x: jnp.mean(x @ W, 1), "div", "float32", "float32"),
    "softmax": (lambda x: jax.nn.softmax(x @ W), "reduce_max", "float32", "bfloat16"),
    "square": (lambda x: lax.square(x @ W), "square", "float32", "bfloat16"),
    "tanh": (lambda x: jnp.tanh(x @ W), "tanh", "float32", "bfloat16"),
    "reshape": (lambda x: (x @ W).reshape(-1), "reshape", "float32", "bfloat16"),
    "sum of two low": (lambda x: x @ W + x @ W, "add", "float32", "bfloat16"),
    "residual in f32": (lambda x: x + x @ W, "add", "float32", "float32"),
    "literal": (lambda x: (x @ W) * 0.3, "mul", "float32", "bfloat16"),
    "literal that overflows": (lambda x: x @ W * 3.4e38, "mul", "float32", "float32"),
    "literal that is flushed": (lambda x: x @ W + 1e-39, "add", "float32", "float32"),
    "bound": (lambda x: jnp.minimum(x @ W, 0.5), "min", "float32", "bfloat16"),
    "bound that is rounded": (
        lambda x: jnp.minimum(x @ W, 0.999),
        "min",
        "float32",
        "float32",
    ),
    "sort": (lambda x: lax.sort(x @ W), "sort", "float32", "float32"),
    "scatter": (lambda x: (x @ W).at[0].set(1.0), "scatter", "float32", "float32"),
    "cholesky": (
        lambda x: lax.linalg.cholesky(W.T @ W),
        "cholesky",
        "float32",
        "float32",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_operation_computes_and_stores_in_the_dtypes_of_its_rule(name):
    func, primitive, computes, stores = RULES[name]
    assert set(dtypes_of(func, X, primitive=primitive)) == {computes}
    assert stored_result(func, X, dtype="bf16") == stores


def test_result_that_is_returned_is_not_rounded():
    low = bf16(lambda x: (x @ W) * 0.3)(X)
    product = (X.astype(LOW) @ W.astype(LOW)).astype(F32)
    assert_trees_equal(low, product * 0.3)


def test_value_is_rounded_once_where_it_is_stored():
    """Three operations lie between the matmul and the array."""

    def func(x):
        return jnp.log1p(jnp.exp((x @ W) * 0.3))

    low = bf16(lambda x: store(func(x)))(X)
    product = (X.astype(LOW) @ W.astype(LOW)).astype(F32)
    once = jnp.log1p(jnp.exp(product * 0.3)).astype(LOW)
    assert_trees_equal(low, once.astype(F32))


def polynomial_of_low(x):
    return jnp.polyval(jnp.array([1.5, 2.0, 3.0]), x @ W)


def polynomial_with_low(x):
    return jnp.polyval((x @ W)[0], x)


@pytest.mark.parametrize("func", [polynomial_of_low, polynomial_with_low])
def test_coefficients_and_argument_of_a_polynomial_agree(func):
    # Up to four coefficients and the powers of the argument, rounded after each step.
    size = float(jnp.max(jnp.abs(X) @ jnp.abs(W))) + 1.3
    bound = 4 * 3 * 2.0**-8 * 4 * size**3
    actual, wanted = bf16(func)(X), func(X)
    np.testing.assert_allclose(actual, wanted, atol=bound)
    grad = jax.grad(lambda x: jnp.sum(bf16(func)(x)))(X)
    assert bool(jnp.all(jnp.isfinite(grad)))


def test_f16_has_a_narrower_range_than_bf16():
    assert stored_result(lambda x: (x @ W) * 2.0**100, X, dtype="bf16") == "bfloat16"
    assert stored_result(lambda x: (x @ W) * 2.0**100, X, dtype="f16") == "float32"


def test_default_compute_dtype_is_bf16_unless_the_user_chose_f16():
    dots = functools.partial(dtypes_of, primitive="dot_general", dtype=None)
    assert mpx.half_precision_datatype() == jnp.float16  # of the paper's functions
    assert dots(lambda x: x @ W, X) == ["bfloat16"]
    for dtype in ("float16", "bfloat16"):
        with mpx.half_precision(dtype):
            assert dots(lambda x: x @ W, X) == [dtype]
    mpx.set_half_precision_datatype("float16")
    assert dots(lambda x: x @ W, X) == ["float16"]
    assert mpx.inspect.report(mpx.amp(lambda x: x @ W), X).amp.dtype == "f16"
    mpx.set_half_precision_datatype(None)
    assert dots(lambda x: x @ W, X) == ["bfloat16"]
    assert mpx.inspect.report(mpx.amp(lambda x: x @ W), X).amp.dtype == "bf16"


def gelu_by_hand(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.045 * x**3)))


CHAINS = {
    "gelu": (jax.nn.gelu, "float16"),
    "gelu in jit": (jax.jit(jax.nn.gelu), "float16"),
    "gelu by hand": (gelu_by_hand, "float16"),
    "polynomial": (lambda x: 2.0 * x**3 + x, "float32"),
    "bounded number of a power": (lambda x: jnp.tanh(x**3) * x, "float16"),
    "power of a power": (lambda x: jnp.tanh(x**3) ** 100, "float32"),
}


@pytest.mark.parametrize("name", CHAINS)
def test_power_in_f16_is_f32_inside_and_f16_where_the_result_fits(name):
    func, dtype = CHAINS[name]
    low = lambda x: func(x @ W)  # noqa: E731
    assert {*dtypes_of(low, X, primitive="integer_pow", dtype="f16")} == {F32}
    assert stored_result(low, X, dtype="f16") == dtype


@pytest.mark.some(3)
@pytest.mark.parametrize("size", [1.0, 41.0, 150.0, 6e4])
@pytest.mark.parametrize("gelu", [jax.nn.gelu, gelu_by_hand])
def test_gelu_and_its_gradient_in_f16_are_those_of_f32(size, gelu):
    x = size * jnp.array([[1.0, -1.0, 0.5, 0.0], [0.1, -0.1, 0.01, 0.001]])

    def loss(x, w):
        return jnp.sum(gelu(x @ w) * (1 / size))

    low = mpx.value_and_grad(amp(loss, dtype="f16"))
    result = low(mpx.StaticLossScaling(size), x, jnp.eye(4))
    value, grads = jax.value_and_grad(loss)(x, jnp.eye(4))
    # Sums and products of a few f16 numbers of the same size.
    np.testing.assert_allclose(result.value, value, atol=8 * 2.0**-11)
    np.testing.assert_allclose(result.grads, grads, atol=8 * 2.0**-11 / size)


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


def mish_by_tanh(x):
    return x * jnp.tanh(jnp.log1p(jnp.exp(x)))


def saved(func, dtype, written=jnp.float32):
    """Returns the dtypes of what the backward pass of an activation keeps."""

    def loss(x, w):
        return jnp.sum(func(x @ w), dtype=jnp.float32)

    with gradient_function():
        args = X.astype(written), W.astype(written)
        _, backward = jax.vjp(amp(loss, dtype=dtype), *args)
    kept = [x for x in jax.tree.leaves(backward) if x.shape == X.shape]
    return [str(x.dtype) for x in kept]


@pytest.mark.some(4)
@pytest.mark.parametrize("func", [jax.nn.gelu, gelu_by_hand, exact_gelu, mish_by_tanh])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activation_keeps_its_operand_only_and_is_computed_in_f32(func, dtype):
    # The other one is the operand of the matmul.
    assert saved(func, dtype) == [dtype, dtype]
    low = amp(lambda x: func(x @ jnp.eye(X.shape[1])), dtype=dtype)
    x = X.astype(dtype).astype(jnp.float32)
    assert np.all(np.abs(low(x) - func(x)) <= 4 * 2.0**-24 * np.abs(func(x)) + 1e-7)


@pytest.mark.some(4)
@pytest.mark.parametrize("func", [jax.nn.gelu, gelu_by_hand, exact_gelu, mish_by_tanh])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_activation_that_is_written_in_16_bits_keeps_its_operand_only(func, dtype):
    assert saved(func, dtype, written=dtype) == [dtype, dtype]


@pytest.mark.parametrize(
    ("func", "more"),
    [
        (jnp.tanh, [LOW]),
        (jax.nn.silu, [LOW]),
        (jax.nn.relu, ["bool"]),
        (jnp.abs, ["bool"]),
        (lambda x: x * 0.3, []),
    ],
)
def test_activation_keeps_no_more_than_an_array_of_16_bits(func, more):
    assert sorted(saved(func, "bfloat16")) == [LOW, *more]


def test_power_in_a_region_that_is_stopped_runs_as_written():
    def func(x):
        y = x @ W
        with amp_stop():
            return y**3 + y

    assert dtypes_of(func, X, primitive="integer_pow", dtype="f16") == [F32]
    assert stored_result(func, X, dtype="f16") == F32


# --- Policies -------------------------------------------------------------------------


def scoped(x, w):
    """One matmul per scope: none, attn, block/attn, block/mlp/attn."""
    x = x @ w
    with jax.named_scope("attn"):
        x = x @ w
    with jax.named_scope("block"):
        with jax.named_scope("attn"):
            x = x @ w
        with jax.named_scope("mlp"), jax.named_scope("attn"):
            x = x @ w
    return x


SCOPES = {
    "name": ({"attn": "original"}, [LOW, F32, F32, F32]),
    "part of a name": ({"at": "f32"}, [LOW, F32, F32, F32]),
    "path": ({"^block/attn": "original"}, [LOW, LOW, F32, LOW]),
    "deep path": ({"block/.*/attn$": "original"}, [LOW, LOW, LOW, F32]),
    "outermost wins": ({"block": "low", "attn": "f32"}, [LOW, F32, LOW, LOW]),
    "outermost wins, f32": ({"mlp": "low", "block": "f32"}, [LOW, LOW, F32, F32]),
}


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_scope_of_a_policy_is_matched(name, wrap):
    scopes, expected = SCOPES[name]
    policy = AmpRules(scopes=scopes)
    actual = dtypes_of(wrap(scoped), X, W, primitive="dot_general", rules=policy)
    assert actual == expected


def test_scope_around_amp_counts():
    policy = AmpRules(scopes={"outer": "original"})
    func = amp(lambda x: x @ W, dtype="bf16", rules=policy)

    def outer(x):
        with jax.named_scope("outer"):
            return func(x)

    dots = [e for e in equations(jax.make_jaxpr(outer)(X)) if "dot" in str(e.primitive)]
    assert [str(e.invars[0].aval.dtype) for e in dots] == [F32]


def stopped_by_context(x):
    with amp_stop():
        x = x @ W
    return x @ W


def stopped_around_jit(x):
    with amp_stop():
        x = jax.jit(lambda x: x @ W)(x)
    return x @ W


def stopped_around_scan(x):
    with amp_stop():
        x = lax.scan(lambda c, w: (c @ w, None), x, W[None])[0]
    return x @ W


def stopped_inside_scan(x):
    def body(c, w):
        with amp_stop():
            return jax.jit(jnp.matmul)(c, w), None

    return lax.scan(body, x, W[None])[0] @ W


def by_scope(name):
    def func(x):
        with jax.named_scope(name):
            x = x @ W
        return x @ W

    return func


STOPPED = {
    "context": stopped_by_context,
    "decorator": lambda x: amp_stop(lambda x: x @ W)(x) @ W,
    "around jit": stopped_around_jit,
    "around scan": stopped_around_scan,
    "inside scan": stopped_inside_scan,
}


@pytest.mark.parametrize("name", STOPPED)
def test_amp_stop_keeps_a_region_as_it_is_written(name):
    func = STOPPED[name]
    assert dtypes_of(func, X, primitive="dot_general") == [F32, LOW]
    rounded = func(X).astype(jnp.float32)  # without amp nothing changes
    assert rounded.dtype == jnp.float32


@pytest.mark.parametrize("name", ["amp_stop", "amp_step", "amp_default", "amp"])
def test_scopes_of_the_user_stop_nothing_whatever_they_are_called(name):
    assert dtypes_of(by_scope(name), X, primitive="dot_general") == [LOW, LOW]


def test_weight_of_a_stopped_matmul_in_a_scan_is_not_rounded():
    weights = jnp.full((1, 8, 8), 1.001)

    def func(x, weights):
        def body(c, w):
            with amp_stop():
                return jax.jit(jnp.matmul)(c, w), None

        return lax.scan(body, x, weights)[0]

    assert_trees_equal(bf16(func)(X, weights), func(X, weights))


def test_weight_of_a_scan_that_a_parameter_rule_keeps_is_not_rounded():
    weights = jnp.full((1, 8, 8), 1.001)

    def func(x, weights):
        return lax.scan(lambda c, w: (c @ w, None), x, weights)[0]

    policy = AmpRules(params={"weights": "f32"})
    assert_trees_equal(bf16(func, rules=policy)(X, weights), func(X, weights))


def router(x):
    return x @ W


def test_function_rule_holds_for_what_the_function_wrote():
    policy = AmpRules(functions={"router": "original"})

    def func(x):
        return router(x) @ W

    actual = dtypes_of(func, X, primitive="dot_general", rules=policy)
    assert actual == [F32, LOW]


@pytest.mark.parametrize("key", ["exp", lax.exp_p], ids=["name", "object"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_primitive_rule_is_given_by_name_or_object(key, wrap):
    func = wrap(lambda x: jnp.exp(x @ W))
    policy = AmpRules(primitives={key: "low"})
    assert dtypes_of(func, X, primitive="exp", rules=policy) == [LOW]
    # A jitted function without a matmul is no exception.
    assert dtypes_of(wrap(jnp.exp), X, primitive="exp", rules=policy) == [LOW]


DISAGREE = {
    "add": lambda low, wide: low + wide,
    "select_n": lambda low, wide: jnp.where(wide > 0, low, wide),
    "concatenate": lambda low, wide: jnp.concatenate([low, wide]),
    "max": lambda low, wide: jnp.maximum(low, wide),
}


@pytest.mark.parametrize("name", DISAGREE)
@pytest.mark.parametrize("kind", ["primitives", "scopes"])
def test_operands_that_disagree_follow_the_widest(name, kind):
    def func(x):
        low, wide = x @ W, jnp.sin(x)
        with jax.named_scope("all"):
            return DISAGREE[name](low, wide)

    key = name if kind == "primitives" else "all"
    policy = AmpRules(**{kind: {key: "follow"}})
    (dtype,) = {*dtypes_of(func, X, primitive=name, rules=policy)}
    assert dtype == F32
    np.testing.assert_allclose(
        bf16(func, rules=policy)(X),
        func(X),
        # Two operands and the result of the matmul are rounded.
        atol=3 * 2.0**-8 * float(jnp.max(jnp.abs(X) @ jnp.abs(W))),
    )


@pytest.mark.parametrize("kind", ["primitives", "scopes"])
def test_literal_follows_a_low_operand_under_the_rule_follow(kind):
    def func(x):
        h = x @ W
        with jax.named_scope("all"):
            return h + 0.5

    key = "add" if kind == "primitives" else "all"
    policy = AmpRules(**{kind: {key: "follow"}})
    assert stored_result(func, X, dtype="bf16", rules=policy) == LOW


def test_operands_that_need_not_agree_are_left_alone():
    def func(x):
        return lax.sort((x @ W, 2 * x), num_keys=1)[1]

    np.testing.assert_array_equal(
        bf16(func)(jnp.ones((1, 8))), 2 * jnp.ones((1, 8))
    )  # of one row, whichever order
    bound = lax.optimization_barrier
    assert stored_result(lambda x: bound((x @ W, 2 * x))[0], X) == LOW
    assert stored_result(lambda x: bound((x @ W, 2 * x))[1], X) == F32


@pytest.mark.some(2)
@pytest.mark.parametrize("base", ["safe", "original"])
def test_scope_set_to_low_leaves_alone_what_has_no_low_version(base):
    def func(x):
        with jax.named_scope("all"):
            y = (x @ W).at[0].add(1.0)
            return jnp.sum(jnp.linalg.inv(W + 8 * jnp.eye(8))) + jnp.exp(y)

    policy = AmpRules(base, scopes={"all": "low"})
    assert dtypes_of(func, X, primitive="exp", rules=policy) == [LOW]
    out = amp(func, dtype="bf16", rules=policy)(X)
    # An absolute error of the exponent is a relative one of `exp`: two operands and the
    # product are rounded before it, and once more each sum and result after it.
    exponent = float(jnp.max(jnp.abs(X) @ jnp.abs(W))) + 1
    np.testing.assert_allclose(out, func(X), rtol=(1.5 * exponent + 2) * 2.0**-8)


def test_original_policy_changes_nothing():
    def func(x):
        return jnp.tanh(x @ W + B[None])

    assert_trees_equal(amp(func, dtype="bf16", rules="original")(X), func(X))


def precisions(func, *args, **options):
    return [
        (str(eqn.invars[0].aval.dtype), eqn.params["precision"])
        for eqn in trace(func, *args, dtype="bf16", **options)
        if eqn.primitive.name == "dot_general"
    ]


def test_rule_may_be_a_function_and_the_base_runs_the_rest_as_written():
    def at_compute(dtype, original_dtypes, *args, **params):
        assert len(original_dtypes) == len(args)
        args = [x.astype(dtype) if x.dtype == jnp.float32 else x for x in args]
        return args, params | {"preferred_element_type": dtype}

    def func(x):
        return jnp.tanh(x @ W) * 2

    policy = AmpRules("original", primitives={lax.dot_general_p: at_compute})
    assert dtypes_of(func, X, primitive="dot_general", rules=policy) == [LOW]
    assert dtypes_of(func, X, primitive="tanh", rules=policy) == [F32]


@pytest.mark.usefixtures("untyped")
def test_dictionary_of_rules_is_refused():
    with pytest.raises(TypeError, match="`rules` must be an `mpx.AmpRules` or a name"):
        amp(jnp.sin, rules={"dot_general": "low"})  # pyright: ignore[reportCallIssue]


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="`rules` must be one of safe"):
        amp(jnp.sin, rules="quick")
    for kind in ("primitives", "scopes"):
        with pytest.raises(ValueError, match="'dot_general'.. must be one of low"):
            AmpRules(**{kind: {"dot_general": "lower"}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dot", "JAX has none of that name.*jax.make_jaxpr"),
        ("dot_genral", "Did you mean 'dot_general'"),
        ("scan", "cannot have a rule.*use `scopes` or `functions`"),
        (jax.make_jaxpr(jax.jit(jnp.sin))(1.0).eqns[0].primitive, "cannot have a rule"),
        ("convert_element_type", "a cast is honoured"),
    ],
)
def test_primitive_that_no_rule_can_hold_for_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        AmpRules(primitives={name: "f32"})


def test_pattern_that_is_no_regular_expression_is_refused():
    for kind in ("scopes", "functions", "params"):
        with pytest.raises(ValueError, match=rf"'\(head' in `{kind}` is not a regular"):
            AmpRules(**{kind: {"(head": "f32"}})


def test_primitive_that_the_table_does_not_list_may_have_a_rule():
    for name in ("clz", "approx_top_k", "axis_index"):
        assert AmpRules(primitives={name: "f32"}).primitives == {name: Rule.F32}


@pytest.mark.parametrize("dtype", ["int8", "e4m3", "f32", jnp.float64, "bf32"])
def test_compute_dtype_other_than_16_bits_is_refused(dtype):
    with pytest.raises(ValueError, match="`dtype` must be f16 or bf16, but"):
        amp(dtype=dtype)


# --- amp_low and carries --------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_amp_low_starts_a_low_residual_stream(wrap):
    func = wrap(lambda x: amp_low(x) + x @ W)
    assert stored_result(func, X, dtype="bf16") == LOW
    assert_trees_equal(func(X), X + X @ W)  # without amp it is nothing


def test_amp_low_alone_is_seen_in_a_jitted_function():
    out = bf16(jax.jit(lambda x: amp_low(x)))(jnp.float32(1.001))
    assert_trees_equal(out, jnp.float32(1.0))


def test_amp_low_leaves_integers_and_other_leaves_alone():
    tree = {"x": X, "n": jnp.arange(3), "name": "a"}
    assert_trees_equal(bf16(amp_low)(tree)["n"], tree["n"])
    assert bf16(amp_low)(tree)["name"] == "a"


@pytest.mark.parametrize(("narrow", "dtype"), [(False, F32), (True, LOW)])
def test_carry_of_a_loop_is_f32_unless_it_may_be_narrow(narrow, dtype):
    def by_scan(x):
        return lax.scan(lambda c, _: (jnp.tanh(c @ W), None), x @ W, length=2)[0]

    def by_while(x):
        def step(c):
            return (c[0] + 1, jnp.tanh(c[1] @ W))

        return lax.while_loop(lambda c: c[0] < 2, step, (0, x @ W))[1]

    for func, name in ((by_scan, "scan"), (by_while, "while")):
        eqns = trace(func, X, dtype="bf16", narrow_carry=narrow)
        loop = next(eqn for eqn in eqns if eqn.primitive.name == name)
        floats = [v.aval.dtype for v in loop.outvars if v.aval.dtype != jnp.int32]
        assert [str(d) for d in floats] == [dtype]
        assert amp(func, narrow_carry=narrow)(X).dtype == jnp.float32


def test_narrow_carry_stays_f32_where_the_body_widens_it():
    def func(x):
        return lax.scan(lambda c, _: (c + jnp.exp(c), None), x @ W, length=2)[0]

    eqns = trace(func, X, dtype="bf16", narrow_carry=True)
    loop = next(eqn for eqn in eqns if eqn.primitive.name == "scan")
    assert [str(v.aval.dtype) for v in loop.outvars] == [F32]


def in_scan(f):
    return lambda x: lax.scan(lambda c, x: (c, f(x[None])), 0, x)[1]


def in_cond(f):
    return lambda x: lax.cond(x[0, 0] > 0, f, f, x)


def in_custom(f):
    call = jax.custom_jvp(f)
    call.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return call


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, in_scan, in_cond, in_custom])
def test_rule_of_a_scope_reaches_into_what_is_called_there(wrap):
    layer = wrap(lambda x: x @ W)

    def func(x):
        with jax.named_scope("head"):
            inside = layer(x)
        return inside, layer(x)

    policy = AmpRules(scopes={"head": "f32"})
    dots = dtypes_of(func, X, primitive="dot_general", rules=policy)
    half = len(dots) // 2
    assert ({*dots[:half]}, {*dots[half:]}) == ({F32}, {LOW})


LOW_BRANCH, F32_BRANCH = (lambda x: x @ W), (lambda x: x * 1.001)


@pytest.mark.parametrize(
    ("branches", "dtype"),
    [
        ((LOW_BRANCH, LOW_BRANCH), LOW),
        ((LOW_BRANCH, F32_BRANCH), F32),
        ((F32_BRANCH, LOW_BRANCH), F32),
    ],
    ids=["both low", "the first low", "the last low"],
)
def test_branches_agree_on_the_widest_dtype(branches, dtype):
    def func(x):
        return lax.cond(x[0, 0] > 0, *branches, x)

    eqns = trace(func, X, dtype="bf16")
    cond = next(eqn for eqn in eqns if eqn.primitive.name == "cond")
    assert [str(v.aval.dtype) for v in cond.outvars] == [dtype]
    # An f32 branch loses nothing to the other.
    if branches[0] is F32_BRANCH:
        assert_trees_equal(jax.jit(bf16(func))(X), jax.jit(func)(X))


# --- Precision that is asked for ------------------------------------------------------


@pytest.mark.parametrize("ambient", ["highest", "float32"])
def test_ambient_matmul_precision_does_not_keep_amp_from_working(ambient):
    with (
        jax.default_matmul_precision(ambient),
        pytest.warns(RuntimeWarning, match="JAX does not tell them apart"),
    ):
        assert dtypes_of(lambda x: x @ W, X, primitive="dot_general") == [LOW]


def test_function_whose_matmuls_all_ask_for_the_highest_precision_is_heard():
    def func(x):
        return jnp.matmul(x, W, precision="highest")

    with pytest.warns(RuntimeWarning, match="`amp` changed no matmul"):
        assert dtypes_of(func, X, primitive="dot_general") == [F32]
    # One that is changed beside it is enough.
    assert dtypes_of(lambda x: func(x) @ W, X, primitive="dot_general") == [F32, LOW]


def test_explicit_algorithm_is_kept():
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32

    def func(x):
        return jnp.matmul(x, W, precision=preset)

    assert precisions(func, X) == [(F32, preset)]


def test_result_asked_for_in_another_dtype_is_kept():
    def func(x):
        return jnp.matmul(x, W, preferred_element_type=jnp.bfloat16)

    plain = [e for e in equations(jax.make_jaxpr(func)(X)) if "dot" in str(e.primitive)]
    assert str(plain[0].invars[0].aval.dtype) == F32
    assert dtypes_of(func, X, primitive="dot_general") == [F32]


# --- 16-bit parameters ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:A function under `amp` in f16")
@pytest.mark.parametrize("compute", [LOW, "float16"])
@pytest.mark.parametrize("param", ["bfloat16", "float16"])
def test_f32_activations_times_16_bit_parameters_run_low(compute, param):
    # JAX multiplies f32 by bf16 as it is: without a cast of the parameter to be seen.
    def func(w, x):
        return jnp.sum(lax.dot_general(x, w, (((1,), (0,)), ((), ()))) ** 2)

    w = W.astype(param)
    mixed = [e for e in equations(jax.make_jaxpr(func)(w, X)) if "dot" in str(e)]
    assert {str(v.aval.dtype) for v in mixed[0].invars} == {F32, param}  # the premise
    grad = jax.grad(amp(func, dtype=compute))
    dots = [e for e in equations(jax.make_jaxpr(grad)(w, X)) if "dot_" in str(e)]
    assert len(dots) == 2  # forward, and the gradient of the parameter
    assert {str(v.aval.dtype) for e in dots for v in e.invars} == {compute}
    assert grad(w, X).dtype == param


# --- Values read in f32 ---------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True], ids=["inline", "jit"])
def test_cotangents_of_a_value_that_is_read_in_f32_add_up_in_f32(nested):
    """Mean, variance and difference of a norm read one low value."""

    def var(x):
        return jnp.var(x, -1, keepdims=True)

    def norm(x):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = (jax.jit(var) if nested else var)(x)
        return (x - mean) * lax.rsqrt(variance + 1e-5)

    def func(x):
        return jnp.sum(jnp.sin(norm(x @ W)))

    gradient = jax.grad(amp(func, dtype="bf16"))
    eqns = equations(jax.make_jaxpr(gradient)(X))
    sums = [eqn for eqn in eqns if eqn.primitive.name == "add_any"]
    assert sums
    assert {str(e.outvars[0].aval.dtype) for e in sums} == {F32}
