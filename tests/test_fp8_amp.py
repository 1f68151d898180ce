"""`fp8(amp(f))` decides in one pass what it decides in two if `amp` is further inside."""

import functools

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
from mpx._fp8 import _transform
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


def closed_over(params, x):
    return jnp.mean((x @ PARAMS["a"] @ params["b"]) ** 2)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32)(nn.relu(nn.LayerNorm()(nn.Dense(64)(x))))


NET = Net()


def linen(params, x):
    return jnp.mean((NET.apply(params, x) - x) ** 2)


def module(model, x):
    return jnp.mean((jax.vmap(model)(x) - x) ** 2)


FUNCTIONS = {
    x.__name__: (x, PARAMS)
    for x in (
        *(mlp, jitted, branches, looped, custom, attention, learnt_query, tied),
        *(normed_weight, cast_by_hand, precise, mapped, sharded, stopped, closed_over),
    )
}
FUNCTIONS |= {
    "scanned": (scanned, STACK),
    "linen": (linen, NET.init(jax.random.key(0), X)),
    "equinox": (module, eqx.nn.MLP(32, 32, 64, 2, jnp.tanh, key=jax.random.key(0))),
    "16 bits": (mlp, mpx.cast_to_bfloat16(PARAMS)),
}


@pytest.fixture
def passes(monkeypatch):
    """How many of the calls took one pass."""
    seen = []
    make = _transform.Fp8InAmp

    def counted(**options):
        seen.append(options["dtype"])
        return make(**options)

    monkeypatch.setattr(_transform, "Fp8InAmp", counted)
    return seen


def both(func, recipe="current", dtype="bf16", **options):
    """Returns a function in one pass, and in two."""
    cast = mpx.amp(func, dtype)
    wrap = lambda f: mpx.fp8(f, recipe, min_gain=0, **options)  # noqa: E731
    return wrap(cast), wrap(lambda *args: cast(*args))


def programs(funcs, params, x):
    """Returns the programs of loss and gradients of some functions, as texts."""
    arrays, static = eqx.partition(params, eqx.is_array)

    def program(func):
        def loss(arrays, x):
            return func(eqx.combine(arrays, static), x)

        return jax.jit(jax.value_and_grad(loss)).lower(arrays, x).as_text()

    return [program(func) for func in funcs]


@pytest.mark.some(7)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_pass_writes_the_program_of_two(name, passes):
    func, params = FUNCTIONS[name]
    one, two, without = programs((*both(func), mpx.amp(func)), params, X)
    assert len(passes) == 1
    assert one == two
    report = mpx.inspect.report(both(func)[0], params, X)
    assert (one != without) is (len(report.fp8.changed) > 0)
    assert (one == without) is (name == "tied")


def test_parameter_for_each_example_is_no_weight():
    for func in both(learnt_query):
        matmuls = mpx.inspect.report(func, PARAMS, X).fp8.matmuls
        assert [bool(x.reason) for x in matmuls] == [True, False]
        assert matmuls[0].reason == "no operand is a parameter"


@pytest.mark.parametrize(
    ("recipe", "dtype", "options"),
    [
        (CurrentScaling(granularity="row"), "bf16", {}),
        (MXFP8(emulate=True), "bf16", {}),
        ("current", "f16", {}),
        ("current", "bf16", {"keep": "b$"}),
        ("current", "bf16", {"keep": lambda matmul: matmul.param.endswith("a")}),
    ],
)
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16")
def test_one_pass_takes_options(recipe, dtype, options, passes):
    one, two = both(mlp, recipe, dtype, **options)
    got, want = programs((one, two), PARAMS, X)
    assert len(passes) == 1
    assert got == want


def test_one_pass_keeps_what_nnx_modules_change(passes):
    def make():
        return nnx.Sequential(
            nnx.Linear(32, 64, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(64, rngs=nnx.Rngs(1)),
            nnx.Linear(64, 32, rngs=nnx.Rngs(2)),
        )

    def loss(model, x):
        return jnp.mean((model(x) - x) ** 2)

    results = []
    for func in both(loss):
        model = make()
        results.append((nnx.value_and_grad(func)(model, X), nnx.state(model)))
    assert len(passes) == 1
    mpx.testing.assert_trees_equal(*jax.tree.map(np.asarray, results))


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (mpx.amp(lambda w, x: jnp.mean(x @ w)), (PARAMS["a"], X)),  # no container
        (mpx.amp(mlp, params=0), (PARAMS, X)),
        (mpx.amp(mlp, keep="bias"), (PARAMS, X)),
        (mpx.amp(mlp, rules=mpx.AmpRules(primitives={"tanh": "f32"})), (PARAMS, X)),
    ],
    ids=["bare", "params", "keep", "rules"],
)
def test_what_both_may_see_differently_takes_two_passes(func, args, passes):
    jax.grad(mpx.fp8(func, min_gain=0))(*args)
    assert not passes


def test_predicate_sees_how_often_a_matmul_runs(passes):
    def loss(params, x):
        out = jax.jit(lambda x, w: jnp.tanh(x @ w))(x, params["w"][0])
        return scanned(params, out)

    one, two = both(loss, keep=lambda matmul: matmul.times > 1)
    got, want = programs((one, two), STACK, X)
    assert len(passes) == 1
    assert got == want
    seen = [x.times for x in mpx.inspect.report(one, STACK, X).fp8.changed]
    assert seen == [1]


def test_what_wraps_a_function_under_amp_is_run(passes):
    cast = mpx.amp(mlp)

    @functools.wraps(cast)
    def shifted(params, x):
        return cast(params, x) + 1

    func = mpx.fp8(shifted, min_gain=0)
    assert func(PARAMS, X) == mpx.fp8(cast, min_gain=0)(PARAMS, X) + 1
    assert len(passes) == 1  # that of `cast`
    mpx.fp8(jax.jit(cast), min_gain=0)(PARAMS, X)
    assert len(passes) == 1


def test_half_precision_of_an_eager_call_is_that_of_the_call(passes):
    one = mpx.fp8(mpx.amp(jitted), min_gain=0)
    first = one(PARAMS, X)
    with mpx.half_precision("f16"):
        second = one(PARAMS, X)
    assert [str(x) for x in passes] == ["bfloat16", "float16"]
    assert first != second
    assert one(PARAMS, X) == first
