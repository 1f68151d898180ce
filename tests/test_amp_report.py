"""`inspect.report` says what `amp` does, and does nothing itself."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mpx
from mpx import AmpRules

X, W = jnp.ones((3, 8)), jnp.ones((8, 8))


def bf16(f, *args, rules=None):
    return mpx.inspect.report(mpx.amp(f, "bf16", rules=rules), *args)


def view(f, *args, rules=None):
    return bf16(f, *args, rules=rules).amp


def reasons(decisions):
    return {(x.primitive, x.reason) for x in decisions}


# --- Matmuls --------------------------------------------------------------------------


def test_matmul_is_named_by_argument_scope_shape_and_line():
    def f(params, x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x @ params["w"]

    (matmul,) = view(f, {"w": W}, X).matmuls
    assert matmul.primitive == "dot_general"
    assert (matmul.before, matmul.after) == (("float32", "float32"), ("bfloat16",))
    assert matmul.shapes == ((3, 8), (8, 8))
    assert matmul.params == ("x", "params/w")
    assert matmul.scope == "outer/inner"
    line = f.__code__.co_firstlineno + 2
    assert matmul.source.endswith(f"test_amp_report.py:{line}")
    assert matmul.flops == 2 * 3 * 8 * 8


def test_layers_of_a_model_are_told_apart():
    model = eqx.nn.MLP(8, 2, 8, 2, key=jax.random.key(0))
    report = view(lambda model, x: jax.vmap(model)(x), model, X)
    names = [matmul.params[0] for matmul in report.matmuls]
    assert names == [f"model/layers/{i}/weight" for i in range(3)]
    assert {matmul.scope for matmul in report.matmuls} == {"eqx.nn.MLP/eqx.nn.Linear"}


def test_matmul_of_a_branch_is_listed_once():
    def f(x, w):
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, jnp.sin, x)

    assert len(bf16(f, X, W).matmuls) == 1


def test_matmul_of_a_jitted_helper_of_jax_has_the_line_that_calls_it():
    jax.jit(lambda x: jnp.cov(x))(X)  # so that the helper was traced elsewhere
    report = view(lambda x, w: jnp.cov(x @ w), X, W)
    assert all(__file__ in x.source for x in report.matmuls)


def test_function_without_matmuls_has_none():
    report = bf16(jnp.sin, X)
    assert (report.matmuls, report.kept, report.opaque) == ((), (), ())
    assert report.shares == {}
    assert "Matmul operations: none" in str(report)


# --- Operations -----------------------------------------------------------------------

ONE = 2 * 3 * 8 * 8


def in_scan(x, w):
    return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]


def twice_jitted(x, w):
    step = jax.jit(lambda x: x @ w)
    return step(x) + step(x)


def branched(x, w):
    return lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)


COUNTS = {
    "plain": (jnp.matmul, {"bf16": ONE}),
    "remat": (jax.checkpoint(jnp.matmul), {"bf16": ONE}),
    "scan": (in_scan, {"bf16": 5 * ONE}),
    "two calls": (twice_jitted, {"bf16": 2 * ONE}),
    "the larger branch": (branched, {"bf16": 2 * ONE}),
    "highest": (
        lambda x, w: x @ w + jnp.matmul(x, w, precision="highest"),
        {"bf16": ONE, "f32": ONE},
    ),
    "stopped": (mpx.amp_stop(jax.jit(jnp.matmul)), {"f32": ONE}),
    "gradient": (
        lambda x, w: jax.grad(lambda x: jnp.sum(x @ w))(x),
        {"bf16": 2 * ONE},
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_operations_are_counted_as_often_as_they_run(name):
    f, expected = COUNTS[name]
    assert bf16(f, X, W).flops == expected


def test_convolution_is_counted():
    image, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 3, 3))
    report = bf16(lambda x, k: lax.conv(x, k, (1, 1), "SAME"), image, kernel)
    assert report.flops == {"bf16": 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)}


def test_ragged_matmul_is_counted_forward_and_backward():
    x, w = jnp.ones((8, 8)), jnp.ones((2, 8, 6))

    def loss(x, w):
        return jnp.sum(lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32)))

    forward = mpx.inspect.report(mpx.amp(loss, "bf16"), x, w, backward=False)
    assert forward.flops == {"bf16": 2 * 8 * 8 * 6}
    # Each row belongs to one group, in both gradients.
    grad = jax.grad(loss, (0, 1))
    assert bf16(grad, x, w).flops == {"bf16": 3 * 2 * 8 * 8 * 6}


def test_shares_add_up_and_start_with_the_largest():
    def f(x, w):
        return in_scan(x, w) + jnp.matmul(x, w, precision="highest")

    shares = bf16(f, X, W).shares
    assert list(shares) == ["bf16", "f32"]
    assert shares["bf16"] == pytest.approx(5 / 6)
    assert sum(shares.values()) == pytest.approx(1)


def test_function_as_a_rule_is_named():
    def in_f16(compute_dtype, original_dtypes, *operands, **params):
        params["preferred_element_type"] = jnp.float16
        return [x.astype(jnp.float16) for x in operands], params

    policy = AmpRules(primitives={"dot_general": in_f16})
    report = bf16(jnp.matmul, X, W, rules=policy)
    assert report.shares == {"f16": 1.0}
    assert report.amp.matmuls[0].rule == "in_f16"


# --- What stays, and what is unknown --------------------------------------------------

SUMS = "sums of many terms stand still in 16 bits"
OWN = "somebody's own kernel or host code"


def with_callback(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((3, 8), jnp.float32), x @ W)


KEPT = {
    "rule": (lambda x: jnp.sum(x @ W), {("reduce_sum", SUMS)}),
    "scope": (mpx.amp_stop(lambda x: x @ W), {("dot_general", "scope amp_stop")}),
    "highest": (
        lambda x: (x @ W, jnp.matmul(x, W, precision="highest")),
        {("dot_general", "precision=HIGHEST was asked for")},
    ),
    "low": (lambda x: jnp.tanh(x @ W), set()),
    "callback": (with_callback, set()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays_is_told_with_its_reason(name):
    f, expected = KEPT[name]
    assert reasons(bf16(f, X).kept) == expected


def test_unknown_operation_is_opaque():
    assert reasons(bf16(with_callback, X).opaque) == {("pure_callback", OWN)}


def head(x, w):
    with jax.named_scope("head"):
        return x @ w


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (AmpRules(params={"w": "f32"}), "parameter w"),
        (AmpRules(scopes={"head": "f32"}), "scope head"),
        (AmpRules(functions={"head": "original"}), "function head"),
        (AmpRules(primitives={"dot_general": "f32"}), "policy safe"),
        (AmpRules("original"), "policy original"),
    ],
    ids=["params", "scopes", "functions", "primitives", "base"],
)
def test_override_is_given_as_the_reason(policy, reason):
    report = bf16(head, X, W, rules=policy)
    assert reasons(report.kept) == {("dot_general", reason)}
    assert report.shares == {"f32": 1.0}


# --- Tracing only ---------------------------------------------------------------------


def test_nothing_is_run():
    ran = []

    def f(x):
        jax.debug.callback(ran.append, x)
        return x @ x.T

    report = bf16(f, jax.ShapeDtypeStruct((3, 8), jnp.float32))
    jax.effects_barrier()
    assert report.shares == {"bf16": 1.0}
    assert not ran


@pytest.mark.standard_promotion
def test_nnx_module_is_left_as_it_was():
    # Not a pytree, so that JAX's own flattening does not make a copy either.
    class Net(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    net = Net(nnx.Rngs(0))
    for args in ((lambda net, x: net(x), net, X), (net, X)):
        report = bf16(*args)
        assert report.shares == {"bf16": 1.0}
        assert "linear/kernel" in str(report)
        np.testing.assert_array_equal(net.norm.mean[...], np.zeros(8))


def test_configured_half_precision_is_the_default():
    mpx.set_half_precision_datatype("bfloat16")
    assert mpx.inspect.report(mpx.amp(jnp.matmul), X, W).amp.dtype == "bf16"


# --- Text -----------------------------------------------------------------------------


def test_text_has_three_tables(monkeypatch):
    def f(x, w):
        return jnp.sum(with_callback(x @ w))

    monkeypatch.chdir(__file__.rpartition("/")[0])
    report = bf16(f, X, W)
    head, matmuls, kept, unknown = str(report).split("\n\n")
    assert head.startswith(
        "amp to bf16, rules safe. Matmul operations: 100.0 % in bf16"
    )
    assert "no gradient: Pure callbacks do not support JVP" in head
    line = f.__code__.co_firstlineno + 1
    row = f"x dot bf16 (3,8) @ (8,8) 1 384 224 B forward test_amp_report.py:{line}"
    assert matmuls.splitlines()[2].split() == row.split()
    assert "reduce_sum" in kept
    assert SUMS in kept
    assert "pure_callback" in unknown
