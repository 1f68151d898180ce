"""`mpx.inspect.advise`: what it emulates is what `amp` does, and its policies hold."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import mpx
import mpx.inspect
from models import normal
from mpx._casting._context import gradient_function
from mpx.inspect._advice import Study
from mpx.inspect._emulation import Rounded, _format, change, rounded


def draw(seed, *shape, scale=1.0):
    fan = shape[-2] if len(shape) > 1 else 1
    return scale * normal(seed, *shape) * fan**-0.5


PARAMS = {"a": draw(0, 13, 24, scale=2.0), "b": draw(1, 24, 7), "c": draw(2, 7)}
X, Y = draw(3, 33, 13, scale=4.0), draw(4, 33, 7, scale=3.0)


def plain(params, x, y):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["a"])
    out = h @ params["b"] + params["c"][None]
    return jnp.mean(jnp.square(out - y))


def with_jit_and_remat(params, x, y):
    hidden = jax.jit(lambda x, a: jnp.tanh(x @ a))
    h = jax.checkpoint(lambda a: hidden(x, a))(params["a"])
    out = h @ params["b"] + params["c"][None]
    return jnp.mean(jnp.square(out - y))


def with_scan(params, x, y):
    def step(h, w):
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(jax.checkpoint(step), x @ params["a"], params["layers"])
    return jnp.mean(jnp.square(h @ params["b"] - y))


def with_custom_derivatives(params, x, y):
    @jax.custom_vjp
    def scaled(x):
        return 2 * jnp.sin(x)

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (2 * jnp.cos(x) * g,))
    h = scaled(jax.nn.silu(x @ params["a"]))
    return jnp.mean(jnp.square(h @ params["b"] - y))


def with_cond(params, x, y):
    h = x @ params["a"]
    h = jax.lax.cond(x[0, 0] > -100, jnp.tanh, jnp.sin, h)
    return jnp.mean(jnp.square(h @ params["b"] - y))


LAYERED = {**PARAMS, "layers": jnp.stack([draw(i, 24, 24) for i in (6, 7, 8)])}
PROGRAMS = {
    "plain": (plain, PARAMS),
    "jit and remat": (with_jit_and_remat, PARAMS),
    "scan": (with_scan, LAYERED),
    "custom derivatives": (with_custom_derivatives, PARAMS),
    "cond": (with_cond, PARAMS),
}


def size(tree):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x))) for x in jax.tree.leaves(tree)))


def relative(grads, exact):
    return size(jax.tree.map(lambda a, b: a - b, grads, exact)) / size(exact)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_emulated_error_of_amp_is_the_measured_one(name):
    loss, params = PROGRAMS[name]
    found = mpx.inspect.advise(loss, params, X, Y, formats=["bf16"])
    exact = jax.grad(loss)(params, X, Y)
    grads = jax.grad(mpx.amp(loss, "bf16"))(params, X, Y)
    assert found.proposals["bf16"].default == pytest.approx(
        relative(grads, exact), rel=0.1
    )
    labels = {x.label for x in found.groups}
    assert {"a", "b"} <= labels
    assert ("layers" in labels) == ("layers" in params)


def test_each_matmul_is_emulated_as_by_hand():
    known = Study(plain, (PARAMS, X, Y), {}, formats=["bf16"])

    def bf16(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    @jax.custom_vjp
    def low(x, w):
        return bf16(bf16(x) @ bf16(w))

    def backward(kept, g):
        x, w = map(bf16, kept)
        return bf16(bf16(g) @ w.T), bf16(x.T @ bf16(g))

    low.defvjp(lambda x, w: (low(x, w), (x, w)), backward)

    def only(which):
        def loss(params, x, y):
            first, second = (low if which == k else jnp.matmul for k in "ab")
            out = second(jnp.tanh(first(x, params["a"])), params["b"])
            return jnp.mean(jnp.square(out + params["c"][None] - y))

        return loss

    exact = jax.grad(plain)(PARAMS, X, Y)
    for which in "ab":
        real = relative(jax.grad(only(which))(PARAMS, X, Y), exact)
        assert known.alone("bf16", which).error == pytest.approx(real, rel=0.1)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["plain", "scan"])
def test_emulated_keep_list_is_the_real_one(name):
    loss, params = PROGRAMS[name]
    known = Study(loss, (params, X, Y), {}, formats=["bf16"])
    exact = jax.grad(loss)(params, X, Y)
    for label in known.labels:
        policy = known.keeping("bf16", label)
        grads = jax.grad(policy.apply(loss))(params, X, Y)
        # What follows a matmul in f32 runs in f32, too. The guide promises 0.82 to 1.16;
        # found are 1.00 on JAX 0.10 and 1.13 on JAX 0.12.
        assert known.error(policy) == pytest.approx(relative(grads, exact), rel=0.18)


def test_emulation_without_rounding_is_the_gradient():
    known = Study(with_scan, (LAYERED, X, Y), {}, formats=["bf16"]).emulation
    grads = known.gradient(Rounded())
    expected = jax.grad(with_scan)(LAYERED, X, Y)
    assert relative(grads, jax.tree.leaves(expected)) < 1e-5


def test_emulation_keeps_roundings_that_the_function_writes():
    def loss(params, x, y):
        h = jax.lax.reduce_precision(x @ params["a"], 8, 7)
        return jnp.mean(jnp.square(h @ params["b"] - y))

    known = Study(loss, (PARAMS, X, Y), {}, formats=["bf16"]).emulation
    expected = jax.jit(jax.grad(loss))(PARAMS, X, Y)
    grads = known.gradient(Rounded())
    assert relative(grads, jax.tree.leaves(expected)) < 1e-5


def test_loops_that_are_not_looked_into_run_as_written_and_are_named():
    def loss(params, x, y):
        def step(state):
            return state[0] + 1, jnp.tanh(state[1] @ params["layers"][0])

        start = (0, x @ params["a"])
        _, h = jax.lax.while_loop(lambda state: state[0] < 2, step, start)
        h = jax.lax.stop_gradient(h) + x @ params["a"]
        return jnp.mean(jnp.square(h @ params["b"] - y))

    found = mpx.inspect.advise(loss, LAYERED, X, Y, formats=["bf16"])
    assert found.opaque == ("while",)
    assert "Not looked into: while" in str(found)
    assert 0 < found.proposals["bf16"].default < 0.05


# --- rounding -------------------------------------------------------------------------

DTYPES = {
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
    "e4m3": jnp.float8_e4m3fn,
    "e5m2": jnp.float8_e5m2,
}
EDGES = [0.0, -1e30, jnp.inf, -jnp.inf, 1e-30, 65519.0, 65520.0, -7e4, 3e-8, 2.9e-8]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", DTYPES)
def test_rounding_is_that_of_a_cast(name):
    x = jnp.ravel(draw(5, 7, 300) * jnp.exp(draw(6, 7, 300, scale=40.0)))
    is_scaled, scale = name in ("e4m3", "e5m2"), 1.0
    if is_scaled:
        most = float(jnp.finfo(DTYPES[name]).max)
        scale = 2.0 ** np.ceil(np.log2(jnp.max(jnp.abs(x)) / most))
    else:
        x = jnp.concatenate([x, jnp.array(EDGES)])
    found = rounded(x, np.array(_format(name), np.float32), is_scaled=is_scaled)
    expected = (x / scale).astype(DTYPES[name]).astype(jnp.float32) * scale
    # Beyond the range of f16 numbers are nan, so that no function hides them.
    overflows = jnp.isinf(expected) & ~jnp.isinf(x)
    np.testing.assert_array_equal(found, jnp.where(overflows, jnp.nan, expected))
    assert np.any(found != x)
    assert jnp.any(overflows) == (name == "f16")


def test_change_that_is_not_finite_is_infinite_and_lost_gradients_are_seen():
    exact = [jnp.array([3.0, 4.0]), jnp.array([1e-6])]
    found = change([jnp.array([3.0, 4.5]), jnp.zeros(1)], exact)
    assert found.error == pytest.approx(0.1)
    assert found.lost == pytest.approx(1.0)
    assert change(exact, exact) == (0, 0)
    assert change([jnp.array([3.0, jnp.nan]), exact[1]], exact).error == np.inf


# --- range ----------------------------------------------------------------------------


def too_large(params, x, y):
    with jax.named_scope("large"):
        out = 1e-5 * ((500 * x) @ (500 * params["a"]))
    return jnp.mean(jnp.square(jnp.tanh(out) @ params["b"] - y))


def test_overflow_excludes_f16_and_the_policy_cures_it():
    found = mpx.inspect.advise(too_large, PARAMS, X, Y)
    (group,) = [x for x in found.groups if x.label == "a"]
    assert group.overflows
    assert "f16 overflows" in group.note
    proposal = found.proposals["f16"]
    assert "^a$" in str(proposal.policy)
    with gradient_function():
        default = jax.grad(mpx.amp(too_large, "f16"))(PARAMS, X, Y)
        grads = jax.grad(proposal.policy.apply(too_large))(PARAMS, X, Y)
    exact = jax.grad(too_large)(PARAMS, X, Y)
    assert not relative(default, exact) < 0.1
    assert relative(grads, exact) < 0.01
    assert found.proposals["bf16"].policy == mpx.inspect.PrecisionPolicy("bf16")


def cancelling(params, x, y):
    with jax.named_scope("distance"):
        far = (100 + x @ params["a"]) - (100 + x @ params["a"][:, ::-1])
    return jnp.mean(jnp.square(far @ params["b"] - y))


def with_relu(params, x, y):
    h = jax.nn.relu(x @ params["a"])
    return jnp.mean(jnp.square(h @ params["b"] - y))


@pytest.mark.parametrize("loss", [cancelling, with_relu])
def test_errors_that_no_derivative_predicts_are_seen(loss):
    found = mpx.inspect.advise(loss, PARAMS, X, Y, formats=["bf16"])
    real = relative(jax.grad(mpx.amp(loss))(PARAMS, X, Y), jax.grad(loss)(PARAMS, X, Y))
    assert found.proposals["bf16"].default == pytest.approx(real, rel=0.1)


def test_tiny_gradients_need_the_loss_scale():
    def loss(params, x, y):
        return 1e-9 * plain(params, x, y)

    found = mpx.inspect.advise(loss, PARAMS, X, Y, formats=["f16"])
    assert found.loss_scale > 2**20
    assert not any(x.note for x in found.groups)


def test_gradient_of_one_parameter_that_f16_loses_is_marked():
    def loss(params, x, y):
        return plain(params, x, y) + 1e-12 * jnp.mean(jnp.tanh(x @ params["d"]))

    params = {**PARAMS, "d": draw(8, 13, 5)}
    found = mpx.inspect.advise(loss, params, X, Y, formats=["f16"])
    (group,) = [x for x in found.groups if x.label == "d"]
    assert group.vanishing > 0.5
    assert "f16 loses" in group.note
    assert "^d$" in found.proposals["f16"].policy.keep


# --- policies -------------------------------------------------------------------------


def sensitive(params, x, y):
    """A matmul of large angles: in bf16 they are wrong by whole turns."""
    with jax.named_scope("angles"):
        h = jnp.sin(30 * (x @ params["a"]))
    return jnp.mean(jnp.square(h @ params["b"] + params["c"][None] - y))


@pytest.mark.some(1)
@pytest.mark.parametrize("format", ["bf16", "f16"])
def test_printed_policy_runs_and_reduces_the_error(format):
    found = mpx.inspect.advise(
        sensitive, PARAMS, X, Y, formats=[format], max_grad_error=0.01
    )
    proposal = found.proposals[format]
    assert proposal.policy.keep
    assert str(proposal.policy) in str(found)
    pasted = eval(str(proposal.policy), {"mpx": mpx, "loss": sensitive})
    exact = jax.grad(sensitive)(PARAMS, X, Y)
    with gradient_function():
        default = jax.grad(mpx.amp(sensitive, format))(PARAMS, X, Y)
        grads = jax.grad(pasted)(PARAMS, X, Y)
    # What is predicted is 0.82 to 1.16 of what is measured.
    assert relative(grads, exact) < 0.01 / 0.82 < relative(default, exact)


def test_policy_for_functions_without_scopes_runs():
    def hidden(x, w):
        return jnp.tanh(x @ w)

    def loss(params, x, y):
        return jnp.mean(jnp.square(hidden(x, params["a"]) @ params["b"] - y))

    found = mpx.inspect.advise(loss, PARAMS, X, Y, formats=["bf16"])
    (group,) = [x for x in found.groups if x.label.endswith("hidden")]
    assert group.kind == "functions"
    policy = mpx.inspect.PrecisionPolicy("bf16", functions=(group.selector,))
    pasted = eval(str(policy), {"mpx": mpx, "loss": loss})
    # Its matmul is in the function, and runs in f32, too.
    report = mpx.inspect.report(pasted, PARAMS, X, Y)
    assert [op.after for op in report.amp.matmuls] == [("float32",), ("bfloat16",)]


def test_emulated_error_of_fp8_is_the_measured_one():
    params = {k: draw(i, 512, 512) for i, k in enumerate(("up", "down"))}
    x = draw(9, 16, 512, scale=20.0)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["up"]) @ params["down"]))

    known = Study(loss, (params, x), {}, formats=["bf16", "e4m3"])
    (down,) = [i for i, x in enumerate(known.groups) if x.label == "down"]
    emulated = known.change(Rounded("bf16", known.active, frozenset([down])))
    low = mpx.fp8(mpx.amp(loss, "bf16"), min_gain=0, keep="^up$")
    (changed,) = mpx.inspect.report(low, params, x).fp8.changed
    assert changed.param == "params/down"
    real = relative(jax.grad(low)(params, x), jax.grad(loss)(params, x))
    assert emulated.error == pytest.approx(real, rel=0.1)


# --- frameworks -----------------------------------------------------------------------


def test_equinox_models_are_taken_whole():
    model = eqx.nn.MLP(13, 7, 24, 1, activation=jnp.tanh, key=jax.random.key(0))

    def loss(model, x, y):
        return jnp.mean(jnp.square(jax.vmap(model)(x) - y))

    found = mpx.inspect.advise(loss, model, X, Y, formats=["bf16"])
    assert {"layers/0/weight", "layers/1/weight"} <= {x.label for x in found.groups}


def test_module_that_is_the_function_holds_the_parameters():
    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x, y):
            return jnp.mean(jnp.square(jnp.tanh(x @ self.weight) - y))

    model = Model(normal(5, 13, 7))
    found = mpx.inspect.advise(model, X, Y, formats=["bf16"])
    assert "weight" in {x.label for x in found.groups}


def nnx_model():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(13, 24, rngs=rngs)
            self.down = nnx.Linear(24, 7, rngs=rngs)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    return Model(nnx.Rngs(0)), lambda model, x: model(x)


def linen_model():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(7, name="down")(jnp.tanh(linen.Dense(24, name="up")(x)))

    model = Model()
    return model.init(jax.random.key(0), X), model.apply


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("make", [nnx_model, linen_model])
def test_flax_models_are_taken_whole(make):
    model, apply = make()

    def loss(model, x, y):
        return jnp.mean(jnp.square(apply(model, x) - y))

    found = mpx.inspect.advise(loss, model, X, Y, formats=["bf16"])
    rows = {x.label: x for x in found.groups if x.label.endswith("kernel")}
    assert [x.rpartition("/")[0].rpartition("/")[2] for x in sorted(rows)] == [
        "down",
        "up",
    ]
    policy = mpx.inspect.PrecisionPolicy(
        "bf16", keep=tuple(x.selector for x in rows.values())
    )
    report = mpx.inspect.report(policy.apply(loss), model, X, Y)
    assert {op.after for op in report.amp.matmuls} == {("float32",)}
    predicted = found.proposals["bf16"].default
    assert all(x.errors["bf16"] < predicted for x in rows.values())


@pytest.mark.standard_promotion
def test_groups_of_a_scanned_cell_are_judged():
    linen = pytest.importorskip("flax.linen")
    model, x = linen.RNN(linen.LSTMCell(8)), draw(3, 3, 5, 6)
    params = model.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x)))

    found = mpx.inspect.advise(loss, params, x, formats=["bf16"])
    kernels = [f"{way}{gate}" for way in "ih" for gate in "ifgo"]
    labels = {f"params/cell/{name}/kernel" for name in kernels}
    assert labels <= {x.label for x in found.groups}


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_advice_for_sharded_arguments_is_that_for_one_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, y = (jnp.concatenate([a, a])[:64] for a in (X, Y))
    once = mpx.inspect.advise(plain, PARAMS, x, y, formats=["bf16", "e4m3"])
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P("data"))
        whole = jax.NamedSharding(mesh, jax.P())
        args = (*jax.device_put((PARAMS,), whole), *jax.device_put((x, y), rows))
        found = mpx.inspect.advise(plain, *args, formats=["bf16", "e4m3"])
        exact = jax.grad(plain)(*args)
        grads = jax.grad(mpx.amp(plain, "bf16"))(*args)
    before, after = ({x.label: x.errors for x in y.groups} for y in (once, found))
    assert before.keys() == after.keys()
    for label in before:
        assert after[label]["e4m3"] == pytest.approx(before[label]["e4m3"], rel=0.01)
        # Over several devices, weight gradients are summed in f32.
        assert after[label]["bf16"] <= 1.01 * before[label]["bf16"]
    assert found.proposals["bf16"].default == pytest.approx(
        relative(grads, exact), rel=0.1
    )


# --- results and errors ---------------------------------------------------------------


def test_advice_exports_to_json():
    once = mpx.inspect.advise(plain, PARAMS, X, Y, formats=["bf16", "e4m3"])
    data = json.loads(once.to_json())
    assert data["groups"][0]["errors"]["bf16"] > 0
    assert [*once.proposals] == ["bf16"]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: mpx.inspect.advise(mpx.amp(plain), PARAMS, X, Y),
            TypeError,
            "is under",
        ),
        (
            lambda: mpx.inspect.advise(plain, PARAMS, X, Y, formats=["f8"]),
            ValueError,
            r"`formats` must be some of bf16, f16, e4m3, e5m2, but \['f8'\]",
        ),
        (
            lambda: mpx.inspect.advise(lambda p, x: x @ p["a"], PARAMS, X),
            TypeError,
            "must return a scalar loss first",
        ),
        (
            lambda: mpx.inspect.advise(
                plain, PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype), Y
            ),
            TypeError,
            "Pass arrays with real numbers",
        ),
        (
            lambda: mpx.inspect.advise(plain, PARAMS, X, Y * np.nan, formats="bf16"),
            ValueError,
            "The gradient in f32 is not finite",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_progress_is_shown_on_terminals_only(capsys, monkeypatch):
    mpx.inspect.advise(plain, PARAMS, X, Y, formats=["bf16"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    mpx.inspect.advise(plain, PARAMS, X, Y, formats=["bf16"])
    found = capsys.readouterr()
    assert found.out == ""
    assert "advise: gradient 2" in found.err
    assert found.err.endswith("\r\x1b[K")
