"""`amp`: unmodified functions, in mixed precision, under every transformation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import count_traces, equations, normal, store, stored, trace_together
from mpx import amp, half_precision
from mpx.testing import assert_trees_equal

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")

bf16 = functools.partial(amp, dtype="bf16")


SETTINGS = {
    # JAX refuses to trace a sum of bf16 or f16 numbers, forward and backward.
    "jax_allow_f16_reductions": False,
    # Hundreds of small programs that run once.
    "jax_disable_most_optimizations": True,
}


@pytest.fixture(autouse=True)
def _settings():
    before = {name: jax.config.values[name] for name in SETTINGS}
    for name, value in SETTINGS.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def matmuls(jaxpr):
    """Returns the dtypes of the operands of each matmul."""
    return [
        tuple(str(var.aval.dtype) for var in eqn.invars[:2])
        for eqn in equations(jaxpr)
        if eqn.primitive.name in MATMULS
    ]


def matmuls_of(func, *args):
    return matmuls(jax.make_jaxpr(func)(*args))


def primitives_of(func, *args):
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(func)(*args))]


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


# --- The table ------------------------------------------------------------------------

W1, W2 = normal(1, 8, 16) / 8**0.5, normal(2, 16, 8) / 16**0.5
PARAMS = {"w1": W1, "b": normal(3, 16), "w2": W2}
X = normal(4, 2, 6, 8)  # two batches of six samples
LAYERS = {
    "w1": normal(5, 3, 8, 16) / 8**0.5,
    "b": normal(6, 3, 16),
    "w2": normal(7, 3, 16, 8) / 16**0.5,
}


def mlp(p, x):
    return jnp.tanh(x @ p["w1"] + p["b"][None]) @ p["w2"]


def residual(p, x):
    return x + mlp(p, x)


def scan_layers(p, x):
    return lax.scan(lambda c, layer: (residual(layer, c), jnp.sum(c)), x, p)[0]


def nested(p, x):
    """Scan around cond around remat."""

    @jax.checkpoint
    def block(layer, x):
        return residual(layer, x)

    def body(carry, layer):
        i, x = carry
        x = lax.cond(i % 2 == 0, block, lambda p, x: x - mlp(p, x), layer, x)
        return (i + 1, x), None

    return lax.scan(body, (0, x), p)[0][1]


def attention(p, x):
    q, k, v = x @ p["w1"][:, :8], x @ p["w1"][:, 8:], x @ p["w2"].T[:, :8]
    scores = jnp.where(jnp.tri(6, dtype=bool), q @ k.T / 8**0.5, -1e30)
    return jax.nn.softmax(scores, axis=-1) @ v


def layer_norm(p, x):
    y = mlp(p, x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    return y * lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + 1e-5)


def conv(p, x):
    images = x.reshape(1, 6, 8, 1)
    kernel = p["w1"][:3, :3].reshape(3, 3, 1, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return jax.nn.relu(y).reshape(6, 8)


def ragged(p, x):
    sizes = jnp.array([1, 3], jnp.int32)
    return lax.ragged_dot(x, jnp.stack([p["w1"], -p["w1"]]), sizes)


@jax.custom_vjp
def doubled(p, x):
    return mlp(p, x)


doubled.defvjp(
    lambda p, x: jax.vjp(mlp, p, x),
    lambda vjp, g: jax.tree.map(lambda leaf: 2 * leaf, vjp(g)),
)


@jax.custom_jvp
def tripled(p, x):
    return mlp(p, x)


@tripled.defjvp
def _(primals, tangents):
    out, tangent = jax.jvp(mlp, primals, tangents)
    return out, 3 * tangent


def closes_over(p, x):
    scale = jnp.sum(x * 0) + 1.5

    @jax.custom_vjp
    def call(x):
        return mlp(PARAMS, x) * lax.stop_gradient(scale)

    call.defvjp(lambda x: (call(x), x), lambda x, g: (jnp.sin(x) * jnp.sum(g),))
    return call(x) * p["b"][:8][None]


def gathers(p, x):
    y = mlp(p, x)
    y = y.at[jnp.array([0, 1, 1])].add(y[jnp.array([3, 2, 2])])
    return y.at[2, 3:6].set(y[0, :3]) + jnp.take_along_axis(
        y, jnp.argsort(y, axis=-1), -1
    )


def indexes(p, x):
    y = mlp(p, x)
    top, _ = lax.top_k(y, 3)
    return jnp.concatenate([jnp.cumsum(y, axis=0), top, y[:, ::-1]], axis=-1)


def linalg(p, x):
    gram = x @ x.T + 4 * jnp.eye(6)
    return jnp.linalg.solve(gram, mlp(p, x)) + jnp.linalg.cholesky(gram) @ x


def fft(p, x):
    return jnp.abs(jnp.fft.rfft(mlp(p, x)))


def complex_numbers(p, x):
    z = lax.complex(mlp(p, x), x)
    return jnp.abs(z @ lax.complex(p["w1"], p["w2"].T))


def explicit_low(p, x):
    y = x.astype(jnp.float16) @ p["w1"].astype(jnp.float16)
    return y.astype(jnp.float32) @ p["w2"]


def explicit_highest(p, x):
    return jnp.matmul(x, p["w1"], precision=lax.Precision.HIGHEST) @ p["w2"]


def callbacks(p, x):
    y = mlp(p, x)
    jax.debug.callback(lambda y: None, y)
    fixed = lax.stop_gradient(y)  # a callback has no derivative
    shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    wide = jax.pure_callback(
        lambda y: np.asarray(y) * np.float32(2), shape, fixed, vmap_method="sequential"
    )
    return wide + y


def double_kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def pallas(p, x):
    y = mlp(p, x)
    shape = jax.ShapeDtypeStruct(y.shape, jnp.float32)
    return pl.pallas_call(double_kernel, out_shape=shape, interpret=True)(y)


def dropout(p, x):
    key = jax.random.key(7, impl="unsafe_rbg")
    keep = jax.random.bernoulli(key, 0.5, (6, 16))
    hidden = jnp.where(keep, jnp.tanh(x @ p["w1"] + p["b"][None]), 0.0)
    return hidden @ p["w2"]


def while_loop(p, x):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, residual(p, c[1])), (0, x)
    )[1]


class Case(NamedTuple):
    """One function of the table.

    Attributes:
        func: A function of parameters and four samples.
        depth: How many matmuls lie one behind the other.
        params: Its parameters.
        kept: The dtypes of matmuls that stay as they are written.
        refused: The contexts that JAX refuses the function itself.
        refusal: A part of what it says then.
    """

    func: Callable[..., Any]
    depth: int
    params: Any = PARAMS
    kept: tuple[tuple[str, str], ...] = ()
    refused: tuple[str, ...] = ()
    refusal: str = ""


GRADIENTS = ("grad", "jit_grad", "remat")
F32_PAIR = ("float32", "float32")

CASES = {
    "mlp": Case(mlp, 2),
    "jit": Case(lambda p, x: jax.jit(mlp)(p, jax.jit(mlp)(p, x)), 4),
    "einsum": Case(lambda p, x: jnp.einsum("bi,ij,jk->bk", x, p["w1"], p["w2"]), 2),
    "attention": Case(attention, 3),
    "layer_norm": Case(layer_norm, 2),
    "log_softmax": Case(lambda p, x: jax.nn.log_softmax(mlp(p, x)), 2),
    "conv": Case(conv, 1),
    "scan": Case(scan_layers, 6, LAYERS),
    "nested": Case(nested, 6, LAYERS),
    "fori": Case(lambda p, x: lax.fori_loop(0, 3, lambda i, c: residual(p, c), x), 6),
    "while": Case(while_loop, 6, refused=GRADIENTS, refusal="Reverse-mode"),
    "cond": Case(
        lambda p, x: lax.cond(
            jnp.sum(x) > 0, mlp, lambda p, x: x * 2 + mlp(p, x), p, x
        ),
        2,
    ),
    "switch": Case(
        lambda p, x: lax.switch(1, [mlp, residual, lambda p, x: x], p, x), 2
    ),
    "remat": Case(jax.checkpoint(mlp), 2),
    "custom_vjp": Case(doubled, 2),
    "custom_jvp": Case(tripled, 2),
    "custom_vjp closing over a value": Case(closes_over, 2),
    "gather and scatter": Case(gathers, 2),
    "indexing": Case(indexes, 2),
    "linalg": Case(linalg, 3, kept=(F32_PAIR,)),  # inside the solver
    "fft": Case(fft, 2),
    "complex": Case(complex_numbers, 2, kept=(("complex64", "complex64"),)),
    "explicit f16": Case(explicit_low, 1, kept=(("float16", "float16"),)),
    "HIGHEST": Case(explicit_highest, 1, kept=(F32_PAIR,)),
    "ragged_dot": Case(ragged, 1, refused=("vmap",), refusal="ragged_dot vmap"),
    "callbacks": Case(callbacks, 2),
    "pallas": Case(pallas, 2, refused=GRADIENTS, refusal="Linearization failed"),
    "dropout": Case(dropout, 2),
}


def scalar(func):
    """Returns the loss whose gradient with respect to the output is a fixed one."""

    def loss(p, x):
        out = func(p, x)
        return jnp.sum(out * jnp.sin(jnp.arange(1.0, out.size + 1)).reshape(out.shape))

    return loss


def over_devices(func):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def local(p, x):
        return func(p, x[0])[None]

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False
    )


# How a function is called: with all samples or with the first batch.
OVER_BATCHES = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "scan": lambda f: lambda p, x: lax.scan(lambda c, x: (c, f(p, x)), 0, x)[1],
    "shard_map": over_devices,
}
CONTEXTS = {
    "jit": lambda f: f,
    "jit_grad": lambda f: jax.grad(scalar(f)),
    "remat": lambda f: jax.grad(scalar(jax.checkpoint(f))),
    **OVER_BATCHES,
    "eager": lambda f: f,
    "grad": lambda f: jax.grad(scalar(f)),
}
# Compiled as one program. `shard_map` makes it one of two devices.
TOGETHER = ("jit", "vmap", "jit_grad", "scan", "remat")


def input_of(context, x=X):
    return x if context in OVER_BATCHES else x[0]


@functools.cache
def reference_of(name):
    case = CASES[name]

    @jax.jit
    def run(p, x):
        outs = jnp.stack([case.func(p, x[0]), case.func(p, x[1])])
        if set(GRADIENTS) <= {*case.refused}:
            return outs, None
        return outs, jax.grad(scalar(case.func))(p, x[0])

    return run(case.params, X)


def expected(name, context):
    """Returns what the plain function computes."""
    outs, grads = reference_of(name)
    return grads if context in GRADIENTS else input_of(context, outs)


def check(name, context, actual, jaxpr):
    case, reference = CASES[name], expected(name, context)
    assert jax.tree.structure(actual) == jax.tree.structure(reference), context

    def of(tree):
        return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]

    assert of(actual) == of(reference), context
    low = {("bfloat16", "bfloat16")} if case.depth else set()
    assert set(matmuls(jaxpr)) == {*case.kept, *low}, context
    # Each matmul rounds two operands and its result; a gradient has twice as many.
    roundings = 3 * case.depth * (2 if context in GRADIENTS else 1)
    pairs = zip(*map(jax.tree.leaves, (actual, reference)), strict=True)
    errors = [relative_error(got, wanted) for got, wanted in pairs if np.any(wanted)]
    assert max(errors) <= roundings * UNIT, context
    # The numbers are low, too, and not the jaxpr alone: f32 rounds by 2**-24.
    assert case.depth == 0 or max(errors) > 2.0**-16, context


def check_compiled(name, contexts):
    """Compiles a function in several contexts as one program, and checks each."""
    case = CASES[name]

    def build(context):
        func = CONTEXTS[context](bf16(case.func))
        return lambda p, x: func(p, input_of(context, x))

    traced, jaxprs = trace_together(map(build, contexts), case.params, X)
    outs = traced.lower().compile()(case.params, X)
    for context, out, jaxpr in zip(contexts, outs, jaxprs, strict=True):
        check(name, context, out, jaxpr)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_amp_of_a_function_runs_its_matmuls_low_and_keeps_its_types(name):
    check_compiled(name, [c for c in TOGETHER if c not in CASES[name].refused])


@pytest.mark.some(1)
@pytest.mark.parametrize("name", CASES)
def test_amp_of_a_function_runs_low_on_each_device(name):
    check_compiled(name, ["shard_map"])


EAGER = [
    (name, context)
    for context in ("eager", "grad")
    for name, case in CASES.items()
    if context not in case.refused
]


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "context"), EAGER)
def test_amp_of_a_function_runs_low_op_by_op(name, context):
    func, args = CONTEXTS[context](bf16(CASES[name].func)), (CASES[name].params, X[0])
    check(name, context, func(*args), jax.make_jaxpr(func)(*args))


REFUSED = [(name, context) for name, case in CASES.items() for context in case.refused]


@pytest.mark.parametrize(("name", "context"), REFUSED)
def test_what_jax_refuses_is_refused_under_amp(name, context):
    case = CASES[name]
    for func in (case.func, bf16(case.func)):
        with pytest.raises((NotImplementedError, ValueError), match=case.refusal):
            jax.make_jaxpr(CONTEXTS[context](func))(case.params, input_of(context))


# --- What must come back bit for bit --------------------------------------------------


def no_matmul(x):
    y = jnp.where(x > 0, jnp.sin(x) * 2 + jnp.exp(x), -x)
    y = jax.nn.softmax(y) + jnp.cumsum(y, axis=0) / 3
    return lax.fori_loop(0, 2, lambda i, c: c * 1.001 + jnp.var(c), y)


def random_numbers(key):
    return jax.random.normal(key, (3,)), jax.random.gumbel(key, (3,))


KEY = jax.random.key(3, impl="unsafe_rbg")
UNCHANGED = {
    "no matmul": (no_matmul, (X[0],)),
    "its gradient": (jax.grad(lambda x: jnp.sum(no_matmul(x))), (X[0],)),
    "random numbers": (random_numbers, (KEY,)),
    "integer matmul": (lambda n: n @ n.T, (jnp.arange(6).reshape(2, 3),)),
    "bf16": (lambda x: x @ x.T, (X[0].astype(jnp.bfloat16),)),
    "complex": (lambda z: z @ z.T, (lax.complex(X[0], X[1]),)),
    "keys in and out": (lambda key: jax.random.split(key, 2), (KEY,)),
    "scalar": (lambda x: x * 2, (jnp.float32(1.001),)),
    "empty": (lambda: (), ()),
    "numpy": (lambda x: jnp.sin(x), (np.float32(1.001),)),
    "custom wide literal": (lambda x: x + 1e-30, (X[0],)),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("name", UNCHANGED)
def test_function_with_nothing_to_cast_comes_back_bit_for_bit(name):
    func, args = UNCHANGED[name]
    # As equal programs are compiled, their results are equal.
    assert_trees_equal(jax.jit(bf16(func))(*args), jax.jit(func)(*args))


def test_f64_is_left_alone():
    with jax.enable_x64(True):
        x = jnp.linspace(0.0, 1.0, 4, dtype=jnp.float64).reshape(2, 2) + 1e-12

        def func(x):
            return jnp.sin(x @ x)

        assert_trees_equal(jax.jit(bf16(func))(x), jax.jit(func)(x))


NUMPY = {
    "array": np.linspace(0.0, 1.0, 6).reshape(2, 3),
    "scalar": np.float64(0.7),
    "f32": np.float32([0.3]),
    "integers": np.arange(3),
    "key": jax.random.key(3),  # no NumPy array, and stays what it is
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpy_argument_is_what_jax_makes_of_it(name):
    given = NUMPY[name]

    def func(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.normal(x) if is_key else x + 1

    made = given if name == "key" else jnp.asarray(given)
    assert_trees_equal(bf16(func)(given), func(made))
    assert_trees_equal(bf16(lambda tree: func(tree["x"]))({"x": given}), func(made))


def test_numpy_f64_bias_follows_a_low_matmul():
    def func(params, x):
        return store(x @ W1 + params["bias"][None])

    params = {"bias": np.ones(W1.shape[1])}
    jaxpr = jax.make_jaxpr(lambda x: bf16(func)(params, x))(X[0])
    assert stored(jaxpr) == ["bfloat16"]
    x = jax.ShapeDtypeStruct(X[0].shape, "float32")
    report = mpx.inspect.report(mpx.amp(func), params, x)
    added = [op.params for op in report.amp.decisions if op.primitive == "add"]
    assert added == [("params/bias",)]


def test_numpy_f64_stays_f64_where_x64_is_on():
    with jax.enable_x64(True):
        x = np.linspace(0.0, 1.0, 4).reshape(2, 2) + 1e-12
        assert_trees_equal(bf16(lambda x: jnp.sin(x))(x), jnp.sin(jnp.asarray(x)))


def test_random_numbers_inside_a_low_function_are_the_same():
    def func(key, x):
        return jax.random.normal(key, (3,)), x @ x.T

    numbers, _ = jax.jit(bf16(func))(KEY, X[0])
    assert_trees_equal(numbers, jax.jit(func)(KEY, X[0])[0])


# --- Custom rules ---------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize(("func", "factor"), [(doubled, 2), (tripled, 3)])
def test_wrong_derivative_rule_survives(func, factor):
    def grad(f):
        return jax.jit(jax.grad(scalar(f)))(PARAMS, X[0])

    right, wrong = grad(mlp), grad(bf16(func))
    inside = bf16(jax.grad(scalar(func)))(PARAMS, X[0])
    for name in PARAMS:
        bound = 2 * 2 * 3 * UNIT
        assert relative_error(wrong[name], factor * right[name]) <= bound
        assert relative_error(inside[name], factor * right[name]) <= bound


# --- What equations carry -------------------------------------------------------------


def equation_of(func, *args, primitive, name=None):
    found = equations(jax.make_jaxpr(func)(*args))
    found = (eqn for eqn in found if eqn.primitive.name == primitive)
    return next(eqn for eqn in found if name in (None, eqn.params["name"]))


def test_inner_jit_keeps_its_name_and_shardings():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))

    @functools.partial(jax.jit, out_shardings=sharding, donate_argnums=0)
    def layer(x):
        return x @ W1

    eqn, plain = (
        equation_of(func, X[0], primitive="jit", name="layer")
        for func in (bf16(lambda x: layer(x * 2)), lambda x: layer(x * 2))
    )
    for name in ("name", "out_shardings", "in_shardings", "donated_invars"):
        assert eqn.params[name] == plain.params[name], name
    out = jax.jit(bf16(lambda x: layer(x * 2)))(X[0])
    assert out.sharding.is_equivalent_to(sharding, 2)


def test_sharding_constraint_is_kept():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))

    def func(x):
        return lax.with_sharding_constraint(x @ W1, sharding)

    assert jax.jit(bf16(func))(X[0]).sharding.is_equivalent_to(sharding, 2)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(scalar(f))])
def test_remat_keeps_its_policy(transform):
    policy = jax.checkpoint_policies.everything_saveable
    func = transform(jax.checkpoint(mlp, policy=policy, prevent_cse=False))
    kept, plain = (
        [
            {k: eqn.params[k] for k in ("policy", "prevent_cse", "differentiated")}
            for eqn in equations(jax.make_jaxpr(f)(PARAMS, X[0]))
            # Not the regions of `amp`, which it computes again itself.
            if eqn.params.get("policy") is policy
        ]
        for f in (bf16(func), func)
    )
    assert kept == plain
    assert plain


def test_scopes_are_neither_lost_nor_doubled():
    def func(x):
        with jax.named_scope("outer"):
            return lax.scan(lambda c, _: (jnp.tanh(c @ (W1 @ W2)), None), x, length=2)[
                0
            ]

    def stacks(f):
        return [
            str(eqn.source_info.name_stack)
            for eqn in equations(jax.make_jaxpr(f)(X[0]))
            if eqn.primitive.name == "tanh"
        ]

    assert stacks(bf16(func)) == stacks(func)


# --- How it is called -----------------------------------------------------------------


def test_amp_is_a_decorator_with_and_without_arguments():
    @amp
    def plain(x):
        """Has a docstring."""
        return x @ W1

    @amp(dtype="f16")
    def with_arguments(x):
        return x @ W1

    assert (plain.__name__, plain.__doc__) == ("plain", "Has a docstring.")
    assert matmuls_of(plain, X[0]) == [("bfloat16", "bfloat16")]
    assert matmuls_of(with_arguments, X[0]) == [("float16", "float16")]


def test_arguments_may_be_keywords_static_or_trees_and_results_no_arrays():
    def func(x, *rest, scale=1, mode, **others):
        assert isinstance(scale, int)
        assert mode in ("a", "b")
        out = x @ rest[0]["w"] * scale
        return {"out": out, "mode": mode, "none": None, "n": 3, "rest": others}

    out = bf16(func)(X[0], {"w": W1}, scale=2, mode="b", bias=jnp.ones(2))
    assert (out["mode"], out["none"], out["n"]) == ("b", None, 3)
    assert out["out"].dtype == jnp.float32
    assert_trees_equal(out["rest"], {"bias": jnp.ones(2)})


def test_constant_results_are_arrays():
    def func(x):
        return jnp.int32(3), jnp.array(False), jnp.float32(2), x

    out = bf16(func)(jnp.float32(1))
    assert all(isinstance(leaf, jax.Array) for leaf in out)
    assert_trees_equal(out, func(jnp.float32(1)))


def test_methods_and_modules_are_functions():
    linear = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    expected = linear(X[0, 0])
    for func in (linear, linear.__call__):
        assert relative_error(bf16(func)(X[0, 0]), expected) <= 3 * UNIT
        assert matmuls_of(bf16(func), X[0, 0]) == [("bfloat16", "bfloat16")]


def test_nested_amp_leaves_the_inner_choice_alone():
    inner = amp(lambda x: x @ W1, dtype="f16")
    outer = bf16(lambda x: inner(x) @ W2)
    assert matmuls_of(outer, X[0]) == [("float16", "float16"), ("bfloat16", "bfloat16")]
    assert outer(X[0]).dtype == jnp.float32


def test_error_of_the_function_is_its_own():
    def func(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        bf16(func)(X[0])


# --- Tracing --------------------------------------------------------------------------


def test_function_is_traced_once_under_jit():
    func, traces = count_traces(lambda x: x @ W1)
    jitted = jax.jit(bf16(func))
    jitted(X[0]), jitted(X[1])
    assert len(traces) == 1
    jitted(X[0, :2])
    assert len(traces) == 2


def test_eager_call_sees_what_the_function_closes_over_now():
    scale = [1.0]
    func = bf16(lambda x: (x @ W1) * scale[0])
    first = func(X[0])
    scale[0] = 2.0
    np.testing.assert_array_equal(func(X[0]), 2 * first)


class Jitted(eqx.Module):
    weight: jax.Array
    inner: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.inner(x, self.weight)


@pytest.mark.parametrize("is_module", [False, True])
def test_jitted_function_inside_is_compiled_once_for_eager_calls(is_module):
    inner = jax.jit(lambda x, w: x @ w)
    func = bf16(Jitted(W1, inner) if is_module else lambda x: inner(x, W1))
    func(X[0])
    events = []

    def listen(event, *_, **__):
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        func(X[1])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not events


def test_static_arguments_that_python_holds_equal_are_told_apart():
    func = bf16(lambda n, factor: n * factor)
    n = jnp.arange(3)
    assert func(n, 2).dtype == jnp.int32
    with jax.numpy_dtype_promotion("standard"):
        assert func(n, 2.0).dtype == jnp.float32
    signed = bf16(lambda x, zero: jnp.copysign(x, zero))
    assert signed(jnp.float32(1), 0.0) == 1
    assert signed(jnp.float32(1), -0.0) == -1


def test_eager_call_sees_a_change_of_the_compute_dtype():
    func = amp(lambda x: x * 1.0 @ jnp.ones((8, 2)))
    x = jnp.full((2, 8), 70000.0)
    assert np.isfinite(func(x)[0, 0])
    with half_precision("f16"):
        assert np.isinf(func(x)[0, 0])


# --- With the rest of mpx -------------------------------------------------------------


def loss(params, x):
    return jnp.mean(mlp(params, x) ** 2)


STEPS = {
    "value_and_grad": lambda f: mpx.value_and_grad(f, policy="p=f32,c=bf16,o=f32"),
    "accumulate": lambda f: mpx.accumulate(f, 2, policy="p=f32,c=bf16,o=f32"),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradient_with_loss_scaling_does_not_cast_the_inputs_again(name):
    step, scaling = STEPS[name](bf16(loss)), mpx.StaticLossScaling(2.0**6)
    traced = jax.jit(step).trace(scaling, PARAMS, X[0])
    assert set(matmuls(traced.jaxpr)) == {("bfloat16", "bfloat16")}
    result = traced.lower().compile()(scaling, PARAMS, X[0])
    wanted = jax.jit(jax.grad(loss))(PARAMS, X[0])
    for key, grad in wanted.items():
        assert result.grads[key].dtype == jnp.float32
        assert relative_error(result.grads[key], grad) <= 2 * 2 * 3 * UNIT
    # The bias is added in the dtype of amp's choice, and not rounded beforehand.
    seen = []
    spy = bf16(lambda p, x: (seen.append(p["b"].dtype), loss(p, x))[1])
    jax.eval_shape(STEPS[name](spy), scaling, PARAMS, X[0])
    assert {*seen} == {jnp.dtype(jnp.float32)}


def test_training_step_with_filter_grad_and_optimizer_update_runs():
    optimizer = optax.sgd(0.1)
    state = optimizer.init(PARAMS)
    step = mpx.filter_grad(bf16(loss), mpx.StaticLossScaling(2.0**4))
    _, finite, grads = jax.jit(step)(PARAMS, X[0])
    params, _ = mpx.optimizer_update(PARAMS, optimizer, state, grads, finite)
    assert loss(params, X[0]) < loss(PARAMS, X[0])


# --- Mistakes -------------------------------------------------------------------------


@pytest.mark.usefixtures("untyped")
def test_what_is_no_function_is_refused():
    with pytest.raises(
        TypeError, match=r"Expected a function.* but ArrayImpl was given"
    ):
        amp(jnp.float32(1.0))
    context: Any = amp()
    with pytest.raises(TypeError, match="`amp` is no context manager"), context:
        pass
    with pytest.raises(ValueError, match=r"For 8 bits use `mpx\.fp8\(func\)`"):
        amp(jnp.sum, "fp8")


def test_amp_of_amp_is_heard():
    inner = amp(lambda x: x @ W1, dtype="f16")
    with pytest.warns(RuntimeWarning, match="What the inner one chose holds"):
        outer = amp(inner, dtype="bf16")
    assert matmuls_of(outer, X[0]) == [("float16", "float16")]


def test_constant_result_keeps_its_weak_type():
    def func(x):
        return 2.0, 3, jnp.float32(1), x

    wanted = jax.make_jaxpr(func)(X[0]).out_avals
    assert jax.make_jaxpr(amp(func))(X[0]).out_avals == wanted
