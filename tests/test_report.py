"""`inspect.report` of any function: what multiplies in which dtype, what is f32, and why."""

import collections
import functools
import json
import math
import re

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import print_saved_residuals

import h200
import mpx
from mpx.inspect import report

BF16 = jnp.bfloat16


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


# --- FLOPs ----------------------------------------------------------------------------

B, T, D, H = 6, 5, 8, 12
WEIGHTS = {"a": shape(D, H), "b": shape(H, D)}
LAYERS = {"a": shape(3, D, H), "b": shape(3, H, D)}
ONE = 2 * B * D * H  # each of the two matmuls, with B rows


def two_layers(p, x):
    return jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"])


def in_scan(p, x, around=lambda f: f):
    def layer(h, w):
        return jnp.tanh(h @ w["a"]) @ w["b"], None

    return jnp.sum(lax.scan(around(layer), x, p)[0])


def in_remat(p, x):
    return in_scan(p, x, jax.checkpoint)


def convolution(p, x):
    return jnp.sum(lax.conv_general_dilated(x, p, (1, 1), "SAME"))


def attention(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k))
    return jnp.sum(jnp.einsum("bts,bsd->btd", weights, v))


def experts(p, x):
    return jnp.sum(jnp.einsum("ecd,edf->ecf", x, p))


# By name: the function, its arguments, the operations forward and backward.
QKV = {name: shape(D, D) for name in "qkv"}
COUNTS = {
    # The input is no parameter: the first layer has the gradient of its weight only.
    "two layers": (two_layers, WEIGHTS, shape(B, D), 2 * ONE, 3 * ONE),
    # In a loop the first layer is as the others.
    "scan": (in_scan, LAYERS, shape(B, D), 6 * ONE, 12 * ONE),
    "remat": (in_remat, LAYERS, shape(B, D), 6 * ONE, (12 + 3) * ONE),
    "convolution": (
        convolution,
        shape(3, D, 3, 3),
        shape(B, D, T, T),
        2 * (B * 3 * T * T) * (D * 9),
        2 * (D * 3 * 3 * 3) * (B * T * T),
    ),
    "attention": (
        attention,
        QKV,
        shape(B, T, D),
        3 * 2 * B * T * D * D + 2 * 2 * B * T * T * D,
        3 * 2 * B * T * D * D + 4 * 2 * B * T * T * D,
    ),
    "batch dimensions": (
        experts,
        shape(B, D, H),
        shape(B, T, D),
        2 * B * T * D * H,
        2 * B * T * D * H,
    ),
}


@pytest.mark.parametrize(
    "wrap", [lambda f: f, mpx.amp, jax.jit], ids=["f", "amp", "jit"]
)
@pytest.mark.parametrize("name", COUNTS)
def test_operations_agree_with_a_count_by_hand(name, wrap):
    func, params, x, forward, backward = COUNTS[name]
    found = report(wrap(func), params, x)
    counts = collections.Counter()
    for matmul in found.matmuls:
        counts[matmul.place.backward] += matmul.flops
    assert counts[False] == forward
    assert counts[True] == backward
    assert sum(found.flops.values()) == forward + backward
    assert list(found.shares) == ["bf16" if wrap is mpx.amp else "f32"]
    alone = report(wrap(func), params, x, backward=False)
    assert sum(alone.flops.values()) == forward
    assert alone.passes == "forward"


def test_bytes_of_a_matmul_are_those_of_operands_and_result():
    def f(p, x):
        return lax.scan(lambda h, _: (h @ p, None), x, None, length=3)[0]

    (matmul,) = report(f, shape(D, D, dtype=BF16), shape(B, D, dtype=BF16)).matmuls
    assert (matmul.times, matmul.bytes) == (3, 3 * 2 * (D * D + 2 * B * D))
    assert (matmul.dtype, matmul.result) == ("bf16", "bf16")


# --- Names and dtypes, in all frameworks ----------------------------------------------


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a = nnx.Linear(D, H, rngs=rngs)
        self.b = nnx.Linear(H, D, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(D, name="b")(linen.relu(linen.Dense(H, name="a")(x)))


def squared(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def models():
    """By framework: a loss of parameters and an input, the parameters, their names."""
    x = jnp.ones((B, D))
    network = LinenNet()
    haiku = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([H, D])(x)))
    mlp = eqx.nn.MLP(D, D, H, 1, key=jax.random.key(0))
    return {
        "Linen": (
            lambda variables, x: squared(network.apply(variables, x)),
            network.init(jax.random.key(0), x),
            ["variables/params/a/kernel", "variables/params/b/kernel"],
        ),
        "NNX": (
            lambda net, x: squared(net(x)),
            Net(),
            ["net/a/kernel", "net/b/kernel"],
        ),
        "Equinox": (
            lambda model, x: squared(jax.vmap(model)(x)),
            mlp,
            ["model/layers/0/weight", "model/layers/1/weight"],
        ),
        "Haiku": (
            lambda params, x: squared(haiku.apply(params, x)),
            haiku.init(jax.random.key(0), x),
            ["params/mlp/~/linear_0/w", "params/mlp/~/linear_1/w"],
        ),
        "plain": (
            lambda p, x: squared(jax.nn.relu(x @ p["a"]) @ p["b"]),
            {"a": jnp.ones((D, H)), "b": jnp.ones((H, D))},
            ["p/a", "p/b"],
        ),
    }


def by_policy(loss):
    """The loss, with parameters and input cast to bf16 first."""

    @functools.wraps(loss)
    def low(*args):
        return loss(*mpx.cast_to_bfloat16(args))

    return low


ROUTES = {
    "f32": (lambda loss: loss, "f32"),
    "amp": (mpx.amp, "bf16"),
    "policy": (by_policy, "bf16"),
}
_DOT = re.compile(
    r"stablehlo\.dot_general .*?contracting_dims = \[([\d, ]*)\].*?"
    r": \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
)
_SHORT = {"f8E4M3FN": "e4m3", "f8E5M2": "e5m2"}


def flops_of_lowered(lowered):
    """Counts the operations of a lowered program by dtype, from its text."""
    counts = collections.Counter()
    for axes, *types in _DOT.findall(lowered.as_text()):
        (*first, left), (*_, right), (*out, _) = (text.split("x") for text in types)
        summed = math.prod(int(first[int(axis)]) for axis in axes.split(","))
        dtypes = dict.fromkeys(_SHORT.get(x, str(x)) for x in (left, right))
        counts["×".join(dtypes)] += 2 * summed * math.prod(map(int, out))
    return counts


@pytest.mark.some(1)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("route", ["f32", "amp", "policy"])
@pytest.mark.parametrize("framework", ["Linen", "NNX", "Equinox", "Haiku", "plain"])
def test_report_agrees_with_the_lowered_program(framework, route):
    loss, params, names = models()[framework]
    wrap, dtype = ROUTES[route]
    func, x = wrap(loss), jnp.ones((B, D))
    found = report(func, params, x)
    if framework == "NNX":
        graph, state = nnx.split(params)
        pure = lambda state, x: func(nnx.merge(graph, state), x)  # noqa: E731
        lowered = jax.jit(jax.value_and_grad(pure)).lower(state, x)
    else:
        arrays, static = eqx.partition(params, eqx.is_array)
        pure = lambda arrays, x: func(eqx.combine(arrays, static), x)  # noqa: E731
        lowered = jax.jit(jax.value_and_grad(pure)).lower(arrays, x)
    assert found.flops == flops_of_lowered(lowered)
    assert set(found.flops) == {dtype}
    forward = [m.place.param for m in found.matmuls if not m.place.backward]
    backward = [m.place.param for m in found.matmuls if m.place.backward]
    assert forward == names
    # The gradient of each weight, and the path to the first layer through the second.
    assert sorted(backward) == sorted([*names, names[1]])


def test_gradients_of_weights_are_named_through_calls_and_loops():
    def loss(p, x):
        step = jax.jit(lambda h, w: jnp.tanh(h @ w))
        h = step(step(x, p["one"]), p["two"])
        h = lax.scan(lambda h, _: (jnp.tanh(h @ p["shared"]), None), h, None, 3)[0]
        h, _ = lax.scan(jax.checkpoint(lambda h, w: (step(h, w), None)), h, p["layers"])
        return jnp.sum(h)

    params = {name: shape(D, D) for name in ("one", "two", "shared")}
    params["layers"] = shape(3, D, D)
    for wrap in (lambda f: f, mpx.amp):
        found = report(wrap(loss), params, shape(B, D))
        assert all(m.place.param for m in found.matmuls)
        count = collections.Counter()
        for m in found.matmuls:
            count[m.place.param.removeprefix("p/")] += m.flops
        one = 2 * B * D * D
        assert count == {
            "one": 2 * one,
            "two": 3 * one,
            "shared": 9 * one,
            "layers": 12 * one,
        }


def with_a_policy(p, x):
    grad = mpx.value_and_grad(two_layers, policy=mpx.Policy(compute_dtype="bfloat16"))
    return report(grad, mpx.DynamicLossScaling.pow2(), p, x)


GRADIENTS = {
    "grad": lambda p, x: report(jax.grad(two_layers), p, x),
    "value and grad": lambda p, x: report(
        jax.jit(jax.value_and_grad(two_layers)), p, x
    ),
    "policy": with_a_policy,
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", GRADIENTS)
def test_matmuls_of_a_gradient_function_have_names(name):
    params, x = (jax.tree.map(jnp.zeros_like, tree) for tree in (WEIGHTS, shape(B, D)))
    found = GRADIENTS[name](params, x)
    assert [m.place.param[-1] for m in found.matmuls] == list("abbba")
    assert sum(found.flops.values()) == 5 * ONE
    assert list(found.shares) == ["bf16" if name == "policy" else "f32"]


@pytest.mark.parametrize(
    ("granularity", "dtypes"),
    [("tensor", {"e4m3", "e4m3×e5m2", "e5m2×e4m3"}), ("row", {"e4m3"})],
)
def test_matmuls_in_fp8_have_names_and_dtypes(granularity, dtypes):
    def loss(p, x):
        return jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"])

    recipe = mpx.recipes.CurrentScaling(granularity=granularity)
    p = {"a": shape(64, 32, dtype=BF16), "b": shape(32, 64, dtype=BF16)}
    func = mpx.fp8(loss, recipe, min_gain=0)
    found = report(func, p, shape(16, 64, dtype=BF16))
    assert [m.place.param for m in found.matmuls] == [f"p/{x}" for x in "abbbaa"]
    assert {m.dtype for m in found.matmuls} == dtypes
    assert found.fp8.share == 1
    assert found.amp.dtype == "bf16"
    both = report(mpx.fp8(mpx.amp(loss), min_gain=0), p, shape(16, 64, dtype=BF16))
    assert both.fp8.share == 1
    assert both.amp.dtype == "bf16"


# --- What is f32, and why -------------------------------------------------------------

TABLE = np.ones(H, np.float32)


def line_of(func, text):
    """The file and line of some code of a function."""
    import inspect

    lines, first = inspect.getsourcelines(func)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"tests/test_report.py:{first + number}"


def closed_over(p, x):
    h = x @ p["a"]
    h = h * TABLE
    return h @ p["b"]


def constant(p, x):
    return (x @ p["a"] * np.float32(0.5)) @ p["b"]


def by_argument(p, x, *, scale):
    h = x @ p["a"] * scale
    return h @ p["b"]


def cast_by_hand(p, x):
    h = (x @ p["a"]).astype(jnp.float32)
    return jnp.tanh(h) @ p["b"].astype(jnp.float32)


def wide_weight(p, x):
    return x @ p["a"] @ jnp.ones((H, D))


LOW = {"a": shape(D, H, dtype=BF16), "b": shape(H, D, dtype=BF16)}
PROMOTED = {
    "a closed-over array": (
        closed_over, {}, f"promoted by a closed-over f32[{H}] array", "h * TABLE",
    ),
    "a constant": (constant, {}, "promoted by the f32 constant 0.5", "np.float32"),
    "an argument": (
        by_argument, {"scale": shape(H)}, "promoted by argument `scale`", "* scale",
    ),
    "a cast": (cast_by_hand, {}, "cast from bfloat16 to f32", "astype(jnp.float32)"),
    "another operand": (
        wide_weight, {}, "promoted by an f32 array that is made", "jnp.ones",
    ),
}  # fmt: skip


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", PROMOTED)
def test_what_makes_a_matmul_f32_is_told_with_its_line(name, monkeypatch):
    monkeypatch.chdir(__file__.rpartition("/tests/")[0])
    func, kwargs, reason, text = PROMOTED[name]
    found = report(func, LOW, shape(B, D, dtype=BF16), **kwargs)
    low, wide = found.matmuls
    assert low.dtype == "bf16"
    assert low.reason == ""
    assert "f32" in wide.dtype
    assert 0 < found.shares["bf16"] < 1
    told = [wide.reason, *(f"{x.reason} at {x.source}" for x in found.kept)]
    where = line_of(func, text)
    assert any(reason in x and where in x for x in told), told
    assert reason in str(found)
    assert where in str(found)


@pytest.mark.standard_promotion
def test_python_numbers_promote_nothing():
    found = report(
        lambda p, x: (x @ p["a"] * 2.5) @ p["b"], LOW, shape(B, D, dtype=BF16)
    )
    assert found.shares == {"bf16": 1.0}
    assert found.kept == ()
    assert "Nothing is promoted to f32." in str(found)


def test_f32_function_names_the_argument_that_is_f32():
    found = report(two_layers, WEIGHTS, shape(B, D))
    assert found.shares == {"f32": 1.0}
    assert {x.reason for x in found.kept} == {"argument `x`"}


def asked(p, x):
    h = jnp.tanh(x @ p["a"])
    return jnp.mean(jnp.matmul(h, p["b"], precision="highest"))


def stopped(p, x):
    h = x @ p["a"]
    with mpx.amp_stop():
        return jnp.mean(h @ p["b"])


def mean_of_two_layers(p, x):
    return jnp.mean(two_layers(p, x))


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (mpx.amp(mean_of_two_layers, keep="b"), "keep b"),
        (mpx.amp(asked), "precision=HIGHEST was asked for"),
        (mpx.amp(stopped), "scope amp_stop"),
    ],
)
def test_reason_of_an_f32_matmul_is_the_decision_of_amp_in_both_passes(func, reason):
    found = report(func, WEIGHTS, shape(B, D))
    rows = [x for x in found.matmuls if x.dtype == "f32"]
    assert {x.place.backward for x in rows} == {False, True}
    assert {x.reason for x in rows} == {reason}
    assert {x.reason for x in found.matmuls if x.dtype == "bf16"} == {""}


def test_reason_is_that_of_the_forward_pass_for_both_parameters_of_a_product():
    def loss(p, x):
        return jnp.mean((x @ p["w"]).astype(jnp.float32)) * jnp.dot(p["a"], p["b"])

    params = {"w": shape(D, H), "a": shape(H), "b": shape(H)}
    rows = [x for x in report(mpx.amp(loss), params, shape(B, D)).matmuls if x.reason]
    assert {x.place.param for x in rows if x.place.backward} == {"p/a", "p/b"}
    (reason,) = {x.reason for x in rows}
    assert reason.startswith("a product with a vector is a sum")


@pytest.mark.standard_promotion
def test_reason_of_a_product_with_complex_numbers_is_the_decision_of_amp():
    def loss(p, x):
        rotated = x @ (p["a"] * jnp.complex64(1j))
        return jnp.mean(jnp.square(jnp.abs(rotated)))

    found = report(mpx.amp(loss), WEIGHTS, shape(B, D))
    (row,) = (x for x in found.matmuls if not x.place.backward)
    assert (row.dtype, row.reason) == ("f32×complex64", "an operand is not f32")


@pytest.mark.standard_promotion
def test_reason_in_both_passes_is_what_promotes_the_forward_one():
    def loss(p, x):
        h = x.astype(BF16) @ p["a"].astype(BF16)
        return jnp.mean(h @ p["b"])

    found = report(loss, WEIGHTS, shape(B, D))
    wide = [x for x in found.matmuls if "f32" in x.dtype]
    assert len(wide) == 3
    assert {x.reason for x in wide} == {"argument `p/b`"}


# --- Residuals ------------------------------------------------------------------------


def tanh_twice(p, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]))


RESIDUALS = {
    # The result of tanh is what the next matmul and its own derivative need.
    "two layers": (two_layers, WEIGHTS, {"f32": 4 * B * H}),
    "three results": (tanh_twice, WEIGHTS, {"f32": 4 * B * (H + D)}),
    # What the matmul gives: relu and its mask are computed from it again.
    "relu": (
        lambda p, x: jnp.sum(jax.nn.relu(x @ p["a"])),
        WEIGHTS,
        {"f32": 4 * B * H},
    ),
    # Beside that, what the next matmul reads; and not the tanh in between.
    "remat of an activation": (
        lambda p, x: jnp.sum(jax.checkpoint(jax.nn.gelu)(x @ p["a"]) @ p["b"]),
        WEIGHTS,
        {"f32": 2 * 4 * B * H},
    ),
    # The carry of each layer, and nothing else.
    "remat": (in_remat, LAYERS, {"f32": 4 * 3 * B * D}),
    # A weight in 16 bits for each but the first layer, the cast input, and what the tanh
    # reads, from which its derivative is computed in f32, and what the matmul after it reads.
    "amp": (
        mpx.amp(two_layers, "bf16"),
        WEIGHTS,
        {"bf16": 2 * (B * D + 2 * B * H + H * D)},
    ),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_residuals_agree_with_a_count_by_hand(name):
    func, params, expected = RESIDUALS[name]
    found = report(func, params, shape(B, D))
    assert found.residual_bytes == expected
    assert report(func, params, shape(B, D), backward=False).residual_bytes == {}


def test_residuals_of_remat_are_those_that_jax_saves(capsys):
    print_saved_residuals(in_remat, LAYERS, shape(B, D))
    saved = [
        [int(size) for size in re.findall(r"\d+", line.partition("[")[2].split("]")[0])]
        for line in capsys.readouterr().out.splitlines()
        if "from the argument" not in line
    ]
    expected = sum(4 * math.prod(sizes) for sizes in saved if sizes)
    found = report(in_remat, LAYERS, shape(B, D))
    assert sum(found.residual_bytes.values()) == expected


BY_RECIPE = {
    "tensor": mpx.recipes.CurrentScaling(),
    "row": mpx.recipes.CurrentScaling(granularity="row"),
    "int8": mpx.recipes.Int8(),
    "nvfp4": mpx.recipes.NVFP4(emulate=True),
    "mxfp8": mpx.recipes.MXFP8(emulate=True),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", BY_RECIPE)
def test_scales_and_roundings_of_fp8_are_not_listed_as_f32(name):
    def loss(p, x):
        with jax.named_scope("mine"):
            h = x @ p["w"]
        return jnp.sum(h * np.full((1, 32), 1.5, np.float32))

    func = mpx.fp8(loss, BY_RECIPE[name], min_gain=0)
    found = report(func, {"w": shape(32, 32, dtype=BF16)}, shape(64, 32, dtype=BF16))
    assert found.fp8.share == 1
    assert [(x.primitive, x.scope) for x in found.kept] == [("reduce_sum", "")]
    assert {x.place.scope for x in found.matmuls} == {"mine"}
    outside = report(mpx.amp(func), {"w": shape(32, 32)}, shape(64, 32))
    assert [x.primitive for x in outside.kept] == ["reduce_sum"]


# --- Odd functions --------------------------------------------------------------------


def has_loop(p, x):
    return lax.while_loop(lambda h: h.sum() < 0, lambda h: h @ p, x).sum()


def test_function_without_a_gradient_is_reported_without():
    found = report(has_loop, shape(D, D), shape(B, D))
    assert found.passes.startswith(
        "forward only, since it has no gradient: Reverse-mode"
    )
    assert found.flops == {"f32": 2 * B * D * D}
    with pytest.raises(ValueError, match="Reverse-mode"):
        report(has_loop, shape(D, D), shape(B, D), backward=True)


def test_backward_needs_a_loss():
    with pytest.raises(
        TypeError, match="must return a scalar loss first, but it returned"
    ):
        report(jnp.matmul, shape(B, D), shape(D, D), backward=True)


ODD = {
    "nothing": lambda: None,
    "a number": lambda: 3,
    "no matmul": lambda: jnp.sin(jnp.ones(3)),
    "integers": lambda: jnp.arange(3) + 1,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("wrap", [lambda f: f, mpx.amp])
def test_function_without_matmuls(name, wrap):
    found = report(wrap(ODD[name]))
    assert (found.matmuls, found.flops, found.shares) == ((), {}, {})
    assert found.residual_bytes == {}
    assert "No matmuls." in str(found)
    json.loads(found.to_json())


def test_matmuls_of_an_empty_batch_can_be_shown():
    found = report(
        mpx.amp(lambda w, x: jnp.sum(x @ w)), jnp.ones((4, 4)), jnp.ones((0, 4))
    )
    assert "of 0 FLOP" in str(found)


def test_integer_result_has_no_backward_pass():
    found = report(lambda p, x: jnp.argmax(x @ p), shape(D, D), shape(B, D))
    assert found.passes == "forward"


def test_keyword_arguments_have_names():
    found = report(lambda x, *, w: x @ w, shape(B, D), w=shape(D, H, dtype=jnp.float32))
    (row,) = found.kept
    assert row.reason == "argument `x`"


def test_gradient_in_the_function_is_not_taken_again():
    found = report(jax.value_and_grad(two_layers), WEIGHTS, shape(B, D))
    assert sum(found.flops.values()) == 5 * ONE
    assert found.passes == "forward and backward"
    assert sum(found.residual_bytes.values()) == 4 * B * H


TRANSFORMED = {  # of a function under `amp`, without what it is given
    "grad": lambda f: jax.grad(f),
    "value and grad": lambda f: jax.value_and_grad(f),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "mpx": lambda f: functools.partial(mpx.value_and_grad(f), mpx.NoLossScaling()),
}


@pytest.mark.parametrize("wrap", [mpx.amp, lambda f: mpx.amp(jax.jit(f)), jax.jit])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_gradient_of_a_function_under_amp_is_reported_as_it_is_given(name, wrap):
    func, x = TRANSFORMED[name](wrap(two_layers)), shape(B, D)
    for backward in (None, False):
        found = report(func, WEIGHTS, x, backward=backward)
        assert sum(found.flops.values()) == 5 * ONE
        assert found.passes == "forward and backward"
    if "value" not in name and name != "mpx":
        with pytest.raises(TypeError, match="must return a scalar loss first"):
            report(func, WEIGHTS, x, backward=True)


def test_batch_of_a_module_under_amp_is_reported_as_it_is_given():
    mlp = eqx.nn.MLP(D, "scalar", H, 1, key=jax.random.key(0))
    found = report(jax.vmap(mpx.amp(mlp)), jnp.ones((B, D)))
    assert found.flops == {"bf16": 2 * B * H * (D + 1)}


def test_step_without_a_loss_has_both_passes():
    def step(weights, x):
        grads = jax.grad(two_layers)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    assert report(step, WEIGHTS, shape(B, D)).passes == "forward and backward"


def test_jitted_function_is_reported_each_time():
    func = jax.jit(mpx.amp(two_layers))
    args = jax.tree.map(jnp.zeros_like, (WEIGHTS, shape(B, D)))
    func(*args)
    for _ in range(2):
        assert [x.primitive for x in report(func, *args).kept] == ["reduce_sum"]


def test_module_that_is_the_function_has_the_parameters():
    mlp = eqx.nn.MLP(D, "scalar", H, 1, key=jax.random.key(0))
    for func in (mlp, mpx.amp(mlp), mpx.fp8(mpx.amp(mlp))):
        found = report(func, jnp.ones(D))
        names = {m.place.param for m in found.matmuls}
        assert names == {"layers/0/weight", "layers/1/weight"}
        assert found.passes == "forward and backward"


def test_kernels_and_callbacks_are_opaque():
    def f(x):
        return jax.pure_callback(np.sin, shape(B, D), x)

    (row,) = report(f, shape(B, D)).opaque
    assert row.primitive == "pure_callback"
    assert "pure_callback" in str(report(f, shape(B, D)))


def test_layers_are_one_row_of_the_table():
    def f(p, x):
        for w in p["layers"]:
            x = jnp.tanh(x @ w)
        return x

    found = report(f, {"layers": [shape(D, D)] * 3}, shape(B, D))
    assert [m.place.param for m in found.matmuls] == [f"p/layers/{i}" for i in range(3)]
    assert str(found).count("p/layers/") == 1
    assert "p/layers/*" in str(found)


def test_report_exports_to_json_and_html():
    found = report(mpx.amp(two_layers), WEIGHTS, shape(B, D))
    data = json.loads(found.to_json())
    assert data["matmuls"][0]["place"]["param"] == "p/a"
    assert data["amp"]["dtype"] == "bf16"
    assert "p/a  " in found._repr_html_()


def test_report_shows_its_tables_at_the_prompt():
    found = report(mpx.amp(two_layers), WEIGHTS, shape(B, D))
    assert repr(found) == str(found)


# --- Programs for a GPU that is not there ---------------------------------------------


# Lines as jaxlib 0.11.2 prints them for an H200, shortened.
HLO = """HloModule jit_step, num_partitions=8
ENTRY %main {
  %all-reduce-start = bf16[64,64]{1,0} all-reduce-start(%a), channel_id=1
  %all-gather-start = (f32[8]{0}, f32[64]{0}) all-gather-start(%b), dimensions={0}
  %reduce-scatter.1 = (f8e4m3fn[8]{0}, f8e4m3fn[4]{0}) reduce-scatter(%c, %d)
  %fusion.1 = f32[8]{0} fusion(%b), kind=kLoop
  %cudnn = (bf16[8]{0}, u8[0]{0}) custom-call(%e), custom_call_target="__cudnn$fmhaSoftmax"
}
"""


@pytest.mark.usefixtures("untyped")
def test_compiled_program_is_read():
    rows = mpx.inspect.collectives(HLO)
    assert {(x.kind, x.dtype) for x in rows} == {
        ("all-gather", "f32"),
        ("all-reduce", "bf16"),
        ("reduce-scatter", "e4m3"),
    }
    (row,) = [x for x in str(rows).splitlines() if x.startswith("reduce-scatter")]
    assert row.split() == ["reduce-scatter", "e4m3", "2", "84", "B"]


@pytest.mark.standard_promotion
def test_attention_is_found_for_a_gpu_that_is_not_there():
    q = shape(2, 256, 4, 64)

    def f(q):
        return jnp.mean(jax.nn.dot_product_attention(q, q, q))

    with h200.described():
        found = report(mpx.amp(f), q)
    assert [(x.what, x.found) for x in found.recognised] == [("attention", True)]
    assert {m.place.primitive for m in found.matmuls} == {
        "cudnn_attention",
        "cudnn_attention_backward",
    }
    here = report(mpx.amp(f), q)
    assert [(x.what, x.found) for x in here.recognised] != [("attention", True)]
