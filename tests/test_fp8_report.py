"""`inspect.report` and `inspect.fp8_check`: telling what becomes fp8, and whether it did."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import mpx
from attention_cases import pretend_h200
from mpx import amp, fp8
from mpx.recipes import DelayedScaling

BF16 = jnp.bfloat16


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, BF16)


def loss(params, x):
    def layer(h, w):
        with jax.named_scope("block"):
            return jnp.tanh(h @ w), None

    h, _ = lax.scan(layer, x, params["layers"])
    scores = h @ h.T
    logits = (scores @ h @ params["head"]).astype(jnp.float32)
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1))


def view(func, *args):
    return mpx.inspect.report(func, *args).fp8


PARAMS = {"layers": shape(4, 64, 64), "head": shape(64, 16)}
X = shape(32, 64)


def test_report_counts_every_step_of_a_scan():
    report = view(fp8(loss, min_gain=0), PARAMS, X)
    found = [(m.param, m.shape, m.times, m.reason) for m in report.matmuls]
    assert found == [
        ("params/layers", (32, 64, 64), 4, ""),
        ("", (32, 64, 32), 1, "no operand is a parameter"),
        ("", (32, 32, 64), 1, "no operand is a parameter"),
        ("params/head", (32, 64, 16), 1, "its result goes into a softmax"),
    ]
    layers, others = 4 * 32 * 64 * 64, 2 * 32 * 32 * 64 + 32 * 64 * 16
    assert report.share == layers / (layers + others)
    assert [m.flops for m in report.changed] == [2 * layers]
    assert len(report.kept) == 3


def test_report_is_a_table():
    lines = str(view(fp8(loss, min_gain=0), PARAMS, X)).splitlines()
    assert lines[0] == "76.2 % of the forward matmul operations run in fp8."
    assert lines[1].split()[2:6] == ["place", "shape", "times", "FLOPs"]
    assert lines[3].split() == ["params/layers", "32×64×64", "4", "76.2", "%", "fp8"]
    assert "test_fp8_report.py" in lines[4]


def test_report_uses_the_settings_of_the_function():
    report = view(fp8(loss), PARAMS, X)
    assert report.share == 0.0
    assert report.matmuls[0].reason.startswith("too small to gain")


def test_report_of_delayed_scaling_needs_no_state():
    report = view(fp8(loss, DelayedScaling(), min_gain=0), PARAMS, X)
    assert len(report.changed) == 1


def test_report_of_nothing():
    report = view(fp8(lambda p, x: x + p), X, X)
    assert report.share == 0.0
    assert str(report).startswith("No matmuls")


def test_report_counts_a_jitted_layer_each_time_it_is_called():
    layer = jax.jit(lambda x, w: x @ w)
    report = view(fp8(lambda p, x: layer(layer(x, p), p), min_gain=0), shape(64, 64), X)
    assert len(report.changed) == 2


def on_four_lines(p, x):
    h = jnp.tanh(x @ p["a"])
    h = jnp.tanh(h @ p["b"])
    h = jnp.tanh(h @ p["c"])
    return jnp.sum((h @ p["d"]).astype(jnp.float32))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "recipe",
    [
        mpx.recipes.CurrentScaling(),
        mpx.recipes.CurrentScaling(granularity="row"),
        DelayedScaling(),
        mpx.recipes.Int8(),
        mpx.recipes.MXFP8(emulate=True),
        mpx.recipes.NVFP4(emulate=True),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("around", [lambda f: f, amp, jax.checkpoint])
def test_matmuls_of_one_shape_have_their_own_lines(recipe, around):
    params, x = dict.fromkeys("abcd", shape(64, 64)), shape(32, 64)
    func = fp8(around(on_four_lines), recipe, min_gain=0)
    start = on_four_lines.__code__.co_firstlineno
    found = mpx.inspect.report(func, params, x)
    assert len(found.fp8.changed) == 4
    # Without the rotations of NVFP4.
    places = [x.place for x in found.matmuls if x.place.param]
    lines = {(x.param, x.source, x.backward) for x in places}
    file = "tests/test_fp8_report.py"
    assert lines == {
        (f"p/{name}", f"{file}:{start + i}", backward)
        for i, name in enumerate("abcd", 1)
        for backward in (False, True)
    }


def experts(p, x):
    tokens = jnp.einsum("ecd,edf->ecf", x.reshape(2, 16, 64), p["experts"])
    return lax.ragged_dot(tokens.reshape(32, 30), p["ragged"], jnp.asarray([8, 24]))


def images(p, x):
    def step(carry, image):
        out = lax.conv_general_dilated(image[None], p["kernel"], (1, 1), "SAME")
        return carry, jax.jit(jnp.tanh)(out)

    return lax.scan(step, 0, x.reshape(2, 4, 16, 16))


def kernel(p, x):
    from jax.experimental import pallas as pl

    def body(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((32, 64), BF16),
        grid=(4,),
        in_specs=[
            pl.BlockSpec((8, 64), lambda i: (i, 0)),
            pl.BlockSpec((64, 64), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((8, 64), lambda i: (i, 0)),
    )(x, p["layers"][0])


OTHERS = {
    "experts": (
        experts,
        [
            (
                "p/experts",
                "dot_general",
                (16, 64, 30),
                2,
                "30 is not a multiple of 16",
            ),
            (
                "p/ragged",
                "ragged_dot_general",
                (32, 30, 48),
                1,
                "it is a ragged matmul",
            ),
        ],
    ),
    "images": (
        images,
        [("p/kernel", "conv_general_dilated", (256, 36, 8), 2, "it is a convolution;")],
    ),
    "a kernel": (kernel, [("", "dot_general", (8, 64, 64), 4, "inside pallas_call,")]),
}
WEIGHTS = {
    "experts": shape(2, 64, 30),
    "ragged": shape(2, 30, 48),
    "kernel": shape(8, 4, 3, 3),
    "layers": shape(4, 64, 64),
}


@pytest.mark.filterwarnings("ignore:A function under `amp` has parameters of 16 bits")
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_report_lists_all_that_multiplies(name, around):
    func, expected = OTHERS[name]

    def both(p, x):
        return around(func)(p, x), x @ p["layers"][0]

    report = view(fp8(both, min_gain=0), WEIGHTS, X)
    *found, linear = report.matmuls
    assert len(found) == len(expected)
    for matmul, (param, primitive, sizes, times, reason) in zip(
        found, expected, strict=True
    ):
        assert (matmul.param, matmul.primitive) == (param, primitive)
        assert (matmul.shape, matmul.times) == (sizes, times)
        assert matmul.flops == 2 * math.prod(sizes) * times
        assert matmul.reason.startswith(reason)
    assert linear.reason == ""
    total = sum(matmul.flops for matmul in report.matmuls)
    assert report.share == linear.flops / total < 1


def test_report_counts_fused_attention(monkeypatch):
    pretend_h200(monkeypatch)

    def loss(p, x):
        q = (x @ p["layers"][0]).reshape(1, 32, 2, 32).astype(jnp.float32)
        return jnp.sum(jax.nn.dot_product_attention(q, q, q))

    report = view(fp8(amp(loss), min_gain=0), WEIGHTS, X)
    linear, fused = report.matmuls
    assert fused.primitive == "cudnn_attention"
    assert fused.reason.startswith("it is a fused attention")
    # Two products a head.
    assert (fused.shape, fused.times) == ((32, 32, 32), 2 * 2)
    assert report.share == linear.flops / (linear.flops + fused.flops)


def test_matmuls_of_a_narrow_carry_are_counted_once():
    def loss(p, x):
        body = jax.jit(lambda h, w: (jnp.tanh(h @ w), None))
        return jnp.sum(jax.lax.scan(body, x, p["layers"])[0])

    p, x = ({"layers": jnp.ones((4, 32, 32))}, jnp.ones((16, 32)))
    func = fp8(amp(loss, narrow_carry=True), DelayedScaling(), min_gain=0)
    (found,) = mpx.inspect.report(func, p, x).fp8.matmuls
    assert found.times == 4
    assert list(func.init(p, x).amaxes) == ["p/layers:0"]


# Lines as jaxlib 0.11.2 prints them for an H200, shortened.
CUBLAS = """
ENTRY %main (x: bf16[16,16]) -> bf16[16,16] {
  %x = bf16[16,16]{1,0} parameter(0)
  %q = f8e4m3fn[16,16]{1,0} convert(%x)
  %gemm.1 = (bf16[16,16]{1,0}) custom-call(%q, %q), custom_call_target="__cublas$lt$matmul$f8"
  %gemm.2 = (bf16[16,16]{1,0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  ROOT %dot.3 = bf16[16,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}
}
"""


def test_check_counts_calls_and_others():
    found = mpx.inspect.fp8_check(CUBLAS)
    assert found.fp8 == 1
    assert found.other == {"cublas bf16": 1, "dot bf16": 1}
    assert found.quantized
    assert str(found) == "1 fp8 matmuls; others: 1 cublas bf16, 1 dot bf16"


@pytest.mark.parametrize("target", ["__op$block_scaled_dot", "__cudnn$blockScaledDot"])
@pytest.mark.parametrize(
    ("codes", "scale"), [("f8e4m3fn", "f8e8m0fnu"), ("f4e2m1fn", "f8e4m3fn")]
)
def test_check_counts_blocks(target, codes, scale):
    operands = f"{codes}[1,32,32] %a, {codes}[1,32,32] %b, {scale}[1,32,1] %c"
    call = f'custom-call({operands}), custom_call_target="{target}"'
    found = mpx.inspect.fp8_check(f"  %dot = (bf16[1,32,32]{{2,1,0}}, u8[8]) {call}")
    assert found.fp8 == 1
    assert found.quantized
    assert not found.other


def test_check_sees_that_the_rounding_is_gone():
    assert not mpx.inspect.fp8_check(CUBLAS.replace("f8e4m3fn", "bf16")).quantized


def test_check_of_a_cpu_program_counts_dots():
    def run(p, x):
        return jnp.sum(fp8(lambda p, x: x @ p, min_gain=0)(p, x).astype(jnp.float32))

    ones = jnp.ones((16, 16), BF16)
    found = mpx.inspect.fp8_check(jax.jit(run).lower(ones, ones).compile())
    assert found.fp8 == 0
    assert found.quantized


def test_check_needs_a_compiled_program():
    with pytest.raises(TypeError, match=r"but function was given. Pass `jax.jit"):
        mpx.inspect.fp8_check(loss)
