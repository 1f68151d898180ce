"""`fp8(f)` is `fp8(amp(f))`, and the same with `amp` further inside."""

import contextlib
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from models import normal
from mpx.recipes import MXFP8, CurrentScaling

pytestmark = pytest.mark.standard_promotion
X = normal(0, 32, 32)
PARAMS = {"a": normal(1, 32, 64) / 6, "b": normal(2, 64, 32) / 8, "bias": normal(3, 64)}
STACK = {"w": normal(4, 3, 32, 32) / 6}


def mlp(params, x):
    hidden = jax.nn.gelu(x @ params["a"] + params["bias"])
    return jnp.mean((hidden @ params["b"] - x) ** 2)


def jitted(params, x):
    return jax.jit(mlp)(params, x) + jax.jit(mlp)(params, 2 * x)


def scanned(params, x):
    def layer(x, w):
        return jnp.tanh(x @ w), jnp.mean(x)

    out, means = lax.scan(jax.checkpoint(layer), x, params["w"])
    return jnp.mean(out**2) + jnp.sum(means)


def branches(params, x):
    first, second = (lambda y: y @ params["a"]), (lambda y: jnp.sin(y @ params["a"]))
    return jnp.mean(lax.cond(jnp.sum(x) > 0, first, second, x) ** 2)


def looped(params, x):
    """A loop whose matmuls run as they are written, and one outside."""
    step = lambda _, y: jnp.tanh(y @ params["a"] @ params["b"])  # noqa: E731
    return jnp.mean(lax.stop_gradient(lax.fori_loop(0, 3, step, x)) * (x @ x.T))


@jax.custom_vjp
def doubled(x, w):
    return 2 * x @ w


def forward(x, w):
    return doubled(x, w), (x, w)


def backward(kept, grad):
    x, w = kept
    return 2 * grad @ w.T, 2 * x.T @ grad


doubled.defvjp(forward, backward)


def custom(params, x):
    return jnp.mean((doubled(x, params["a"]) @ params["b"]) ** 2)


def attention(params, x):
    q, k, v = (x @ params["a"] for _ in range(3))
    weights = jax.nn.softmax(q @ k.T / 8)
    return jnp.mean((weights @ v @ params["b"]) ** 2)


def learnt_query(params, x):
    query = jnp.broadcast_to(params["a"][0, :32], x.shape)
    return jnp.mean((query @ x @ params["a"]) ** 2)


def tied(params, x):
    tokens = jnp.arange(32) % 7
    hidden = params["b"][tokens] + x
    logits = hidden @ params["b"].T
    return jnp.mean(jax.nn.logsumexp(logits, -1))


def normed_weight(params, x):
    weight = params["a"] / jnp.linalg.norm(params["a"], axis=0)
    return jnp.mean((x @ weight) ** 2)


def cast_by_hand(params, x):
    low = (x.astype(jnp.bfloat16) @ params["a"].astype(jnp.bfloat16)) ** 2
    return jnp.mean(low.astype(jnp.float32) @ params["b"])


def precise(params, x):
    hidden = jnp.dot(x, params["a"], precision="highest")
    return jnp.mean((hidden @ params["b"]) ** 2)


def mapped(params, x):
    row = lambda r: jnp.mean((r[None] @ params["a"]) ** 2)  # noqa: E731
    return jnp.mean(jax.vmap(row)(x)) + mlp(params, x)


def sharded(params, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    local = lambda p, x: lax.pmean(mlp(p, x), "data")  # noqa: E731
    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )(params, x)


def stopped(params, x):
    with mpx.amp_stop():
        hidden = x @ params["a"]
    return jnp.mean((hidden @ params["b"]) ** 2)


def gathered(params, x):
    """Weights in parts, as in FSDP by hand."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def local(a, b, x):
        whole = (lax.all_gather(w, "data", axis=0, tiled=True) for w in (a, b))
        return lax.pmean(jnp.mean(functools.reduce(jnp.matmul, whole, x) ** 2), "data")

    specs: Any = {"in_specs": P("data"), "out_specs": P()}
    return jax.shard_map(local, mesh=mesh, **specs)(params["a"], params["b"], x)


def closed_over(params, x):
    return jnp.mean((x @ PARAMS["a"] @ params["b"]) ** 2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.relu(nn.LayerNorm()(nn.Dense(64)(x))))


NET = Net()


def linen(params, x):
    return jnp.mean((NET.apply(params, x) - x) ** 2)


def module(params, x):
    return jnp.mean((jax.vmap(params)(x) - x) ** 2)


FUNCTIONS = {
    x.__name__: (x, PARAMS)
    for x in (
        *(mlp, jitted, branches, looped, custom, attention, learnt_query, tied),
        *(normed_weight, cast_by_hand, precise, mapped, sharded, stopped, closed_over),
        gathered,
    )
}
FUNCTIONS |= {
    "scanned": (scanned, STACK),
    "linen": (linen, NET.init(jax.random.key(0), X)),
    "equinox": (module, eqx.nn.MLP(32, 32, 64, 2, jnp.tanh, key=jax.random.key(0))),
    "16 bits": (mlp, mpx.cast_to_bfloat16(PARAMS)),
}


def forms(func, recipe="current", dtype="bf16", **options):
    """Returns a function under `fp8`: as it is, under `amp`, and with `amp` inside."""
    wrap = lambda f: mpx.fp8(f, recipe, min_gain=0, **options)  # noqa: E731
    cast = mpx.amp(func, dtype)
    return wrap(func), wrap(cast), wrap(lambda params, x: cast(params, x))


def programs(funcs, params, x):
    """Returns the programs of loss and gradients of some functions, as texts."""
    arrays, static = eqx.partition(params, eqx.is_array)

    def program(func):
        def loss(arrays, x):
            return func(eqx.combine(arrays, static), x)

        return jax.jit(jax.value_and_grad(loss)).lower(arrays, x).as_text()

    return [program(func) for func in funcs]


def seen(matmul):
    return matmul.param, matmul.shape, matmul.times, matmul.reason


@pytest.mark.some(7)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fp8_of_a_function_is_fp8_of_amp_of_it(name):
    func, params = FUNCTIONS[name]
    plain, cast, inside = forms(func)
    report = mpx.inspect.report(plain, params, X)
    heard = contextlib.nullcontext()
    if not report.fp8.changed:
        heard = pytest.warns(RuntimeWarning, match="`fp8` changed nothing")
    with heard:
        one, two, without = programs((plain, cast, mpx.amp(func)), params, X)
    assert one == two
    assert (one != without) is (len(report.fp8.changed) > 0) is (name != "tied")
    for other in (cast, inside):
        found = mpx.inspect.report(other, params, X)
        assert [*map(seen, found.fp8.matmuls)] == [*map(seen, report.fp8.matmuls)]
    with heard:
        arrays, static = eqx.partition(params, eqx.is_array)
        results = [
            jax.jit(jax.grad(lambda arrays, f=f: f(eqx.combine(arrays, static), X)))(
                arrays
            )
            for f in (plain, inside)
        ]
    mpx.testing.assert_trees_equal(*results)


INPUTS = {
    "bf16": X.astype(jnp.bfloat16),
    "f16": X.astype(jnp.float16),
    "uint8": jnp.arange(1024, dtype=jnp.uint8).reshape(32, 32) % 16,
    "bool": X > 0,
}


@pytest.mark.parametrize("low", [False, True], ids=["f32", "bf16 parameters"])
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_and_parameters_may_have_any_dtype(name, low):
    x, params = INPUTS[name], mpx.cast_to_bfloat16(PARAMS) if low else PARAMS
    plain, cast, _ = forms(lambda p, x: mlp(p, x.astype(jnp.float32)))
    given, given_cast, _ = forms(lambda p, x: jnp.sum(x @ p["a"]))
    for func in (plain, given):
        report = mpx.inspect.report(func, params, x)
        assert len(report.fp8.changed) == len(report.fp8.matmuls)
    one, two = programs((plain, cast), params, x)
    assert one == two
    one, two = programs((given, given_cast), params, x)
    assert one == two


def test_parameter_for_each_example_is_no_weight():
    for func in forms(learnt_query):
        matmuls = mpx.inspect.report(func, PARAMS, X).fp8.matmuls
        assert [bool(x.reason) for x in matmuls] == [True, False]
        assert matmuls[0].reason == "no operand is a parameter"


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (CurrentScaling(granularity="row"), {}),
        (MXFP8(emulate=True), {}),
        ("current", {"keep": "b$"}),
        ("current", {"keep": lambda matmul: matmul.param.endswith("a")}),
    ],
)
def test_both_forms_take_options(recipe, options):
    one, two = programs(forms(mlp, recipe, **options)[:2], PARAMS, X)
    assert one == two


@pytest.mark.filterwarnings("ignore:A function under `amp` in f16")
def test_dtype_of_amp_is_that_of_the_operands():
    (_, cast, inside) = forms(mlp, dtype="f16")
    for func in (cast, inside):
        matmuls = mpx.inspect.report(func, PARAMS, X).fp8.changed
        assert [x.dtype for x in matmuls] == ["f16", "f16"]
    assert cast(PARAMS, X) == inside(PARAMS, X) != forms(mlp)[0](PARAMS, X)


AMPS = {
    "params": (mpx.amp(mlp, params=0), ["", ""]),
    "keep": (mpx.amp(mlp, keep="^b$"), ["", "an operand is f32 (keep ^b$)"]),
    "rules": (mpx.amp(mlp, rules=mpx.AmpRules(primitives={"tanh": "f32"})), ["", ""]),
    "keep a gathered weight": (
        mpx.amp(gathered, keep="^b$"),
        ["", "an operand is f32 (keep ^b$)"],
    ),
    "narrow carry": (mpx.amp(mlp, narrow_carry=True), ["", ""]),
}


@pytest.mark.parametrize("name", AMPS)
def test_options_of_amp_hold(name):
    func, reasons = AMPS[name]
    report = mpx.inspect.report(mpx.fp8(func, min_gain=0), PARAMS, X)
    assert [x.reason for x in report.fp8.matmuls] == reasons
    inside = mpx.inspect.report(mpx.fp8(jax.jit(func), min_gain=0), PARAMS, X)
    assert [bool(x.reason) for x in inside.fp8.matmuls] == [*map(bool, reasons)]


def test_both_forms_keep_what_nnx_modules_change():
    def make():
        return nnx.Sequential(
            nnx.Linear(32, 64, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(64, rngs=nnx.Rngs(1)),
            nnx.Linear(64, 32, rngs=nnx.Rngs(2)),
        )

    def loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    results = []
    for func in forms(loss)[:2]:
        model = make()
        results.append((nnx.value_and_grad(func)(model, X), nnx.state(model)))
    mpx.testing.assert_trees_equal(*jax.tree.map(np.asarray, results))


def test_predicate_sees_how_often_a_matmul_runs():
    def loss(params, x):
        out = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, params["w"][0])
        return scanned(params, out)

    for func in forms(loss, keep=lambda matmul: matmul.times > 1):
        seen = [x.times for x in mpx.inspect.report(func, STACK, X).fp8.changed]
        assert seen == [1]


def test_what_wraps_a_function_under_amp_is_run():
    cast = mpx.amp(mlp)

    @functools.wraps(cast)
    def shifted(params, x):
        return cast(params, x) + 1

    func = mpx.fp8(shifted, min_gain=0)
    assert func(PARAMS, X) == mpx.fp8(cast, min_gain=0)(PARAMS, X) + 1


def test_half_precision_of_an_eager_call_is_that_of_the_call():
    for one in forms(jitted, dtype=None)[:2]:
        first = one(PARAMS, X)
        with mpx.half_precision("f16"):
            second = one(PARAMS, X)
        assert first != second
        assert one(PARAMS, X) == first
