"""`jax.nn.dot_product_attention` under `amp` reaches cuDNN where that exists.

There is no GPU here. A fixture lets `amp` believe in one: what it then traces is run by
the plain operations, and lowered for CUDA it must contain the calls of cuDNN.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.nn import dot_product_attention
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpx
from attention_cases import pretend_h200
from models import equations, normal, trace_together
from mpx import AmpRules, amp, amp_stop
from mpx._amp import _decide
from mpx._ops import _attention
from mpx._program._queries import ATTENTION

UNIT = 2.0**-8  # half the distance of 1 to the next bf16 number
BATCH, LENGTH, HEADS, SIZE = 2, 8, 4, 16
SHAPE = (BATCH, LENGTH, HEADS, SIZE)

bf16 = functools.partial(amp, dtype="bf16")


Q, K, V = (normal(i, *SHAPE) for i in range(3))
ARGS = (Q, K, V)


@pytest.fixture
def cuda(monkeypatch):
    """Pretends that this is a machine with an H200 and cuDNN 9.10."""
    pretend_h200(monkeypatch)
    yield
    _attention._reason_by_jax.cache_clear()


def loss(*args, **options):
    out = dot_product_attention(*args, **options)
    return jnp.sum(out * jnp.sin(jnp.arange(1.0, out.size + 1)).reshape(out.shape))


def count(jaxpr):
    """Returns how often attention and matmuls of each dtype appear in a jaxpr."""
    counts = {}
    for eqn in equations(jaxpr):
        name = eqn.primitive.name
        if name == "dot_general" or name in ATTENTION:
            short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
            key = f"{name} {short[str(eqn.invars[0].aval.dtype)]}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def operations(func, *args):
    return count(jax.make_jaxpr(func)(*args))


def calls_in(traced):
    """Returns the calls of cuDNN in the program for CUDA."""
    lowered = traced.lower(lowering_platforms=("cuda",))
    return re.findall(r"@__cudnn\$fmha(\w+)", lowered.as_text())


def cudnn_calls(func, *args):
    return calls_in(jax.jit(func).trace(*args))


def compare(build, *args):
    """Runs a function under `amp` and as it is, as one program that is traced once.

    Args:
        build: Makes the function, from what is to be put around attention.
        *args: Its arguments.

    Returns:
        The operations under `amp`, the calls of cuDNN, and both results.
    """
    traced, (jaxpr, _) = trace_together((build(bf16), build(lambda f: f)), *args)
    actual, wanted = traced.lower().compile()(*args)
    return count(jaxpr), calls_in(traced), actual, wanted


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


# --- Every way to get there -----------------------------------------------------------


def over_devices(f):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return lambda *args: jnp.sum(
        jax.shard_map(
            lambda *args: f(*args)[None],
            mesh=mesh,
            in_specs=(P("d"), P("d"), P("d")),
            out_specs=P("d"),
        )(*args)
    )


def stacked(f):
    """Two calls in a scan."""

    def call(q, k, v):
        return lax.scan(lambda c, q: (c + f(q, k, v), None), 0.0, jnp.stack([q, -q]))[0]

    return call


FORWARD, BACKWARD = "cudnn_attention bf16", "cudnn_attention_backward bf16"
BOTH = {FORWARD: 1, BACKWARD: 1}
PLAIN = {"dot_general bf16": 2}
TRANSFORMS = {
    "as it is": (lambda f: bf16(f), {FORWARD: 1}),
    "jit inside": (lambda f: bf16(jax.jit(f)), {FORWARD: 1}),
    "jit outside": (lambda f: jax.jit(bf16(f)), {FORWARD: 1}),
    "grad outside": (lambda f: jax.grad(bf16(f), (0, 1, 2)), BOTH),
    "grad of jit": (lambda f: jax.grad(bf16(jax.jit(f))), BOTH),
    "remat": (
        lambda f: jax.grad(bf16(jax.checkpoint(f))),
        {FORWARD: 2, BACKWARD: 1},
    ),
    "scan": (lambda f: jax.grad(bf16(stacked(f))), BOTH),
    "shard_map": (lambda f: jax.grad(bf16(over_devices(f))), BOTH),
    "shard_map outside": (lambda f: jax.grad(over_devices(bf16(f))), BOTH),
    "cond": (
        lambda f: bf16(lambda *x: lax.cond(x[0][0, 0, 0, 0] > 0, f, f, *x)),  # pyright: ignore[reportIndexIssue]
        {FORWARD: 2},
    ),
    "amp in amp": (lambda f: jax.grad(amp(lambda *x: bf16(f)(*x), dtype="f16")), BOTH),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.filterwarnings("ignore:A function under `amp` in f16")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_attention_is_one_operation_and_a_call_of_cudnn(name):
    transform, counts = TRANSFORMS[name]
    traced = jax.jit(transform(loss)).trace(*ARGS)
    assert count(traced.jaxpr) == counts
    calls = calls_in(traced)
    assert "Softmax" in calls
    assert ("SoftmaxBackward" in calls) == (BACKWARD in counts)


@pytest.mark.usefixtures("cuda")
def test_function_that_was_jitted_before_is_found_too():
    inner = jax.jit(lambda *args: loss(*args) * 1.5)
    before = inner(*ARGS)
    assert operations(bf16(inner), *ARGS) == {FORWARD: 1}
    assert operations(inner, *ARGS) == {"dot_general f32": 2}
    np.testing.assert_array_equal(inner(*ARGS), before)


@pytest.mark.usefixtures("cuda")
def test_name_in_the_public_module_is_found_too():
    assert operations(bf16(jax.nn.dot_product_attention), *ARGS) == {FORWARD: 1}


# --- Every form of a call -------------------------------------------------------------

LENGTHS = jnp.array([5, 8], jnp.int32)
MASK = jnp.arange(BATCH * LENGTH * LENGTH).reshape(BATCH, 1, LENGTH, LENGTH) % 3 > 0
FORMS = {
    "plain": ({}, ARGS),
    "scale": ({"scale": 0.5}, ARGS),
    "causal": ({"is_causal": True}, ARGS),
    "mask": ({"mask": MASK}, ARGS),
    "mask of keys": ({"mask": MASK[:, :, :1]}, ARGS),
    "window": ({"is_causal": True, "local_window_size": (2, 0)}, ARGS),
    "window without causal": ({"local_window_size": (2, 0)}, ARGS),
    "key lengths": ({"key_value_seq_lengths": LENGTHS}, ARGS),
    "query lengths": ({"query_seq_lengths": LENGTHS}, ARGS),
    "all at once": (
        {"is_causal": True, "mask": MASK, "key_value_seq_lengths": LENGTHS},
        ARGS,
    ),
    "grouped heads": ({}, (Q, K[:, :, :2], V[:, :, :2])),
    "one head of keys": ({}, (Q, K[:, :, :1], V[:, :, :1])),
    "other length of keys": ({}, (Q[:, :4], K, V)),
    "without a batch": ({}, (Q[0], K[0], V[0])),
}


@pytest.mark.some(4)
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_call_is_right_and_becomes_a_call_of_cudnn(name):
    options, args = FORMS[name]

    def build(wrap):
        def run(*args):
            func = wrap(functools.partial(dot_product_attention, **options))
            out, vjp = jax.vjp(func, *args)
            return out, vjp(jnp.sin(jnp.arange(1.0, out.size + 1)).reshape(out.shape))

        return run

    counts, calls, actual, wanted = compare(build, *args)
    assert counts == BOTH
    has_mask = any("mask" in x or "lengths" in x for x in options)
    kind = "ScaleBiasSoftmax" if has_mask else "Softmax"
    assert calls == [kind, f"{kind}Backward"]
    # Rounded: three operands and a result; backward the cotangent and the gradients.
    for got, exact in zip(*map(jax.tree.leaves, (actual, wanted)), strict=True):
        assert got.dtype == jnp.float32
        assert relative_error(got, exact) <= 8 * UNIT


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", ["window", "window without causal"])
def test_window_is_told_to_cudnn_as_a_causal_one(name):
    options, args = FORMS[name]
    func = jax.jit(bf16(functools.partial(loss, **options)))
    text = func.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    text = text.replace("\\22", "'")  # how quotes are written there
    (length,) = re.findall(r"sliding_window_length\W+(\d+)", text)
    assert length == "3"  # two to the left, and the query itself
    assert re.findall(r"mask_type\W+(\w+)", text) == ["CAUSAL"]


BIASES = {
    "for all": (1, HEADS, LENGTH, LENGTH),
    "for each": (BATCH, HEADS, LENGTH, LENGTH),
    "for all heads": (BATCH, 1, LENGTH, LENGTH),
    "for all queries": (1, HEADS, 1, LENGTH),
}


@pytest.mark.some(2)
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap of all"])
@pytest.mark.parametrize("name", BIASES)
def test_bias_gets_its_gradient(name, transform):
    args = (*ARGS, normal(5, *BIASES[name]))

    def build(wrap):
        plain = functools.partial(loss, is_causal=True)
        grad = jax.grad(wrap(plain), (1, 3))
        if transform == "grad":
            return grad
        axes = (0, None, None, None) if transform == "vmap" else 0
        return jax.vmap(grad, axes)

    given = args
    if transform == "vmap":
        given = (jnp.stack([Q, -Q, 2 * Q]), *args[1:])
    elif transform == "vmap of all":
        given = tuple(jnp.stack([x, -x, 2 * x]) for x in args)
    counts, calls, grads, expected = compare(build, *given)
    if BIASES[name][0] == 1:
        assert counts == BOTH
        assert {*calls} == {"ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"}
    else:  # cuDNN has no gradient of a bias for each example
        assert {*counts} == {"dot_general bf16"}
    for actual, wanted in zip(grads, expected, strict=True):
        assert actual.shape == wanted.shape
        assert actual.dtype == jnp.float32
        assert relative_error(actual, wanted) <= 8 * UNIT


# --- What 16 bits make of a bias ------------------------------------------------------


@jax.custom_vjp
def mixed(scores, v):
    """Mixes values by a softmax, whose weights the backward kernel computes again."""
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def mixed_backward(kept, grad):
    scores, v, out, logsumexp = kept
    weights = jnp.exp(scores - logsumexp)
    mean = jnp.einsum("bthd,bthd->bht", grad, out)[..., None]
    of_scores = weights * (jnp.einsum("bthd,bshd->bhts", grad, v) - mean)
    return of_scores, jnp.einsum("bhts,bthd->bshd", weights, grad)


def mixed_forward(scores, v):
    logsumexp = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    out = mixed(scores, v)
    return out, (scores, v, out, logsumexp)


mixed.defvjp(mixed_forward, mixed_backward)


def simulated(query, key, value, bias=None, mask=None, *, scale, is_causal, **options):
    """cuDNN's kernel as JAX calls it: a bias of 16 bits, to which masks are added."""
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = scale * jnp.einsum("bthd,bshd->bhts", q, k)
    if mask is not None:
        lowest = jnp.asarray(-(2.0**41), query.dtype)
        mask = jnp.where(mask, jnp.zeros((), query.dtype), lowest)
        bias = mask if bias is None else bias + mask
    if bias is not None:
        assert bias.dtype == query.dtype
        scores += bias.astype(jnp.float32)
    if is_causal:
        before = np.tril(np.ones(scores.shape[2:], bool))[None, None]
        scores = jnp.where(before, scores, -jnp.inf)
    return mixed(scores, v).astype(query.dtype)


NOISE = np.asarray(normal(6, 1, HEADS, LENGTH, LENGTH))
PLACE = np.arange(LENGTH)
SEEN = (PLACE < LENGTH // 2)[None, None, None]
ROW = (PLACE == 3)[:, None]
SIMULATED = {
    "far from 0": ({}, {"bias": NOISE - 1000}),
    "far above 0": ({"is_causal": True}, {"bias": NOISE + 1000}),
    "large": ({}, {"bias": 300 * NOISE}),
    "of keys": ({"is_causal": True}, {"bias": NOISE[:, :, :1] * 20 + 1000}),
    "larger where masked": (
        {},
        {"bias": np.where(SEEN, NOISE, 1000 + NOISE), "mask": SEEN},
    ),
    "larger where later": ({"is_causal": True}, {"bias": NOISE + 100 * PLACE}),
    "a mask": ({}, {"bias": np.where(SEEN, NOISE, -1e30)}),
    "a row of a mask": ({}, {"bias": np.where(ROW, -1e30, NOISE)}),
    "a row of two masks": (
        {},
        {"bias": np.where(ROW, np.where(SEEN, -1e9, -3e9), NOISE)},
    ),
    "a row below all": ({}, {"bias": np.where(ROW, -np.inf, NOISE)}),
}


@pytest.mark.parametrize("name", SIMULATED)
def test_rounding_of_a_bias_does_not_matter(name, monkeypatch):
    options, extras = SIMULATED[name]
    fields = {"is_causal": False, "window": None, **options}
    spec = _attention.Attention(scale=0.3, extras=tuple(extras), **fields)
    spec = spec._replace(may_hide=name.startswith("a row"))
    low = [x.astype(jnp.bfloat16) for x in ARGS]
    arrays = (jnp.asarray(x) for x in extras.values())
    arrays = (x if x.dtype == bool else x.astype(jnp.float32) for x in arrays)
    given = [*low, *arrays]
    cotangent = normal(7, *low[0].shape).astype(jnp.bfloat16)
    plain = lambda *x: _attention.plain(*x, *given[len(spec.free) :], spec=spec)[0]  # noqa: E731

    def both(vjp, cotangent, *given):
        out, pullback = vjp(*given)
        return [out, *pullback(cotangent)]

    def exact(cotangent):
        expect = jax.jit(functools.partial(both, functools.partial(jax.vjp, plain)))
        wide = [x.astype(jnp.float32) for x in (cotangent, *low)]
        return expect(*wide, *given[3 : len(spec.free)])

    expected = exact(cotangent)
    monkeypatch.setattr(jax.nn, "dot_product_attention", simulated)

    def kernel(*free):
        more = [*free[3:], *given[len(spec.free) :]]
        extras = dict(zip(spec.extras, more, strict=True))
        operands = _attention._padded(free[:3], extras, spec)
        out, _ = _attention._vjp(operands, spec, spec.free)
        return out[..., : free[2].shape[-1]]

    simulating = functools.partial(both, functools.partial(jax.vjp, kernel))
    actual = jax.jit(simulating)(cotangent, *given[: len(spec.free)])
    for i, (got, x) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
        got, x = (np.nan_to_num(np.asarray(y, np.float64)) for y in (got, x))
        assert np.linalg.norm(got - x) <= 8 * UNIT * max(np.linalg.norm(x), 1e-3), i


HIDING = {
    "a table of parameters": (lambda p, x: p["table"][PLACE[:, None] - PLACE], False),
    "slopes": (lambda p, x: -(2.0**-4) * PLACE.astype(np.float32), False),
    "a matmul of data": (lambda p, x: x["bias"] @ p["table"], False),
    "data": (lambda p, x: x["bias"], True),
    "a padding that is added": (
        lambda p, x: (1.0 - x["tokens"].astype(jnp.float32)) * -1e9,
        True,
    ),
    "a padding of integers": (
        lambda p, x: ((x["tokens"] - 1) * 10**9).astype(jnp.float32),
        True,
    ),
    "a branch": (
        lambda p, x: lax.cond(
            x["tokens"][0] > 0, lambda y: y, lambda y: y - 1e9, jnp.zeros(LENGTH)
        ),
        True,
    ),
    "a table and a padding": (
        lambda p, x: p["table"] + jnp.where(x["tokens"] > 0, 0.0, -1e30)[None],
        True,
    ),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", HIDING)
def test_scores_that_a_bias_may_hide_are_in_a_kernel_of_twice_the_size(name):
    bias, may_hide = HIDING[name]
    size = ARGS[0].shape[-1]

    def func(params, x):
        return loss(*ARGS, bias(params, x).reshape(1, 1, -1, LENGTH))

    table = normal(1, 2 * LENGTH) if "table of" in name else normal(1, LENGTH, LENGTH)
    batch = {"bias": normal(2, LENGTH, LENGTH), "tokens": jnp.ones(LENGTH, jnp.int32)}
    jaxpr = jax.make_jaxpr(mpx.amp(func))({"table": table}, batch)
    (eqn,) = (x for x in equations(jaxpr) if x.primitive.name in ATTENTION)
    assert eqn.params["spec"].may_hide is may_hide
    assert eqn.invars[0].aval.shape[-1] == (2 * size if may_hide else size)


@pytest.mark.usefixtures("cuda")
def test_trained_bias_for_each_example_runs_op_by_op():
    def func(params, tokens):
        padding = jnp.where(tokens > 0, 0.0, -1e30)[:, None, None]
        return loss(*ARGS, params["table"][None, None] + padding)

    params = {"table": normal(1, LENGTH, LENGTH)}
    report = mpx.inspect.report(mpx.amp(func), params, jnp.ones((2, LENGTH), jnp.int32))
    (kept,) = (x for x in report.amp.decisions if x.primitive == "attention")
    assert kept.reason == "cuDNN has no gradient of a bias for each example"


@pytest.mark.usefixtures("cuda")
def test_bias_that_a_mask_tells_apart_runs_op_by_op():
    mask = jnp.arange(LENGTH)[None] < jnp.array([[4], [LENGTH]])

    def func(q, k, v, bias):
        return loss(q, k, v, bias, mask=mask[:, None, None])

    counts, calls, *_ = compare(lambda wrap: wrap(func), *ARGS, jnp.asarray(NOISE))
    assert (counts, calls) == ({"dot_general bf16": 2}, [])


BATCHED = {
    "all": (0, 0, 0),
    "the queries": (0, None, None),
    "the keys": (None, 0, 0),
    "another axis": (1, 2, 0),
}


@pytest.mark.some(2)
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", BATCHED)
def test_vmap_makes_the_batch_larger(name):
    axes = BATCHED[name]
    args = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip(ARGS, axes, strict=True)
    ]
    func = functools.partial(loss, is_causal=True, key_value_seq_lengths=LENGTHS)

    def build(wrap):
        return jax.vmap(jax.grad(wrap(func), (0, 1, 2)), axes)

    counts, calls, actual, wanted = compare(build, *args)
    assert counts == BOTH
    assert calls == ["ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"]
    for got, grad in zip(actual, wanted, strict=True):
        assert got.shape == grad.shape
        assert relative_error(got, grad) <= 8 * UNIT


@pytest.mark.usefixtures("cuda")
def test_logsumexp_is_returned_in_f32():
    def func(*args):
        return dot_product_attention(*args, return_residual=True, is_causal=True)

    assert operations(bf16(func), *ARGS) == PLAIN  # the scores are used elsewhere
    (out, residual), (wanted, expected) = jax.jit(
        lambda *args: (bf16(func)(*args), func(*args))
    )(*ARGS)
    assert (residual.shape, residual.dtype) == (expected.shape, jnp.float32)
    assert relative_error(out, wanted) <= 4 * UNIT
    assert relative_error(residual, expected) <= 4 * UNIT
    zero = jax.jit(jax.grad(lambda q: jnp.sum(bf16(func)(q, K, V)[1])))(Q)
    np.testing.assert_array_equal(zero, np.zeros(SHAPE))  # as in JAX


# --- Derivatives that cuDNN does not have ---------------------------------------------

MORE = {
    "forward mode outside": lambda f, wrap: lambda q: jax.jvp(wrap(f), (q,), (K,))[1],
    "forward mode inside": lambda f, wrap: wrap(lambda q: jax.jvp(f, (q,), (K,))[1]),
    "second order": lambda f, wrap: jax.grad(
        lambda q: jnp.sum(jax.grad(wrap(f))(q) ** 2)
    ),
    "vmap of forward mode": lambda f, wrap: jax.vmap(
        lambda t: jax.jvp(wrap(f), (Q,), (t,))[1]
    ),
}


@pytest.mark.some(1)
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", MORE)
def test_other_derivatives_take_the_plain_operations(name):
    build, args = MORE[name], (jnp.stack([Q, K]) if "vmap" in name else Q,)

    def func(q):
        out = dot_product_attention(q, K, V)
        return jnp.sum(out**2) if name == "second order" else out

    # Whatever is called there, it lowers for CUDA.
    counts, _, actual, wanted = compare(lambda wrap: build(func, wrap), *args)
    assert {"dot_general", "cudnn_attention_tangent"} & {x.split()[0] for x in counts}
    assert relative_error(actual, wanted) <= 16 * UNIT


# --- What the user said ---------------------------------------------------------------


def by_name(q, k, v):
    return loss(q, k, v)


LEFT = {
    "amp_stop": (amp_stop(loss), None, {"dot_general f32": 2}),
    "amp_stop around jit": (amp_stop(jax.jit(loss)), None, None),
    "scope": (
        jax.named_scope("head")(loss),
        AmpRules(scopes={"head": "f32"}),
        {"dot_general f32": 2},
    ),
    "function": (
        by_name,
        AmpRules(functions={"by_name": "original"}),
        {"dot_general f32": 2},
    ),
    "parameter": (
        by_name,
        AmpRules(params={"^k$": "f32"}),
        {"dot_general f32": 1, "dot_general bf16": 1},
    ),
    "primitive": (
        loss,
        AmpRules(primitives={"dot_general": "f32"}),
        {"dot_general f32": 2},
    ),
    "original": (loss, "original", {"dot_general f32": 2}),
}


@pytest.mark.usefixtures("cuda")
@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", LEFT)
def test_choice_of_the_user_is_respected(name):
    func, policy, counts = LEFT[name]
    wrapped = bf16(func, rules=policy)
    assert cudnn_calls(wrapped, *ARGS) == []
    if counts is not None:
        assert operations(wrapped, *ARGS) == counts
    if name.startswith("amp_stop"):
        np.testing.assert_array_equal(jax.jit(wrapped)(*ARGS), jax.jit(loss)(*ARGS))


@pytest.mark.usefixtures("cuda")
def test_f16_reaches_cudnn():
    assert operations(amp(loss, dtype="f16"), *ARGS) == {"cudnn_attention f16": 1}


@pytest.mark.usefixtures("cuda")
def test_cudnn_by_name_on_16_bit_parameters_runs_as_written():
    def asked(q, kv):
        return dot_product_attention(q, *kv, implementation="cudnn")

    low = [x.astype(jnp.bfloat16) for x in ARGS]
    with pytest.warns(RuntimeWarning, match="runs as it is written"):
        assert cudnn_calls(amp(asked, params=1), low[0], low[1:]) == ["Softmax"]


# --- What cuDNN cannot do -------------------------------------------------------------

LONG = normal(6, BATCH, 7, HEADS, SIZE)
UNSUPPORTED = {
    "head of 12": ({}, tuple(x[..., :12] for x in ARGS)),
    "odd length": ({}, (LONG, LONG, LONG)),
    "window to the right": ({"local_window_size": 2}, ARGS),
    "window and lengths": (
        {
            "is_causal": True,
            "local_window_size": (2, 0),
            "key_value_seq_lengths": LENGTHS,
        },
        ARGS,
    ),
}


@pytest.mark.some(1)
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_jax_does_not_ask_of_cudnn_is_padded_or_masked(name):
    options, args = UNSUPPORTED[name]
    func = functools.partial(loss, **options)
    counts, _, actual, wanted = compare(lambda wrap: jax.grad(wrap(func)), *args)
    assert counts == BOTH
    assert relative_error(actual, wanted) <= 16 * UNIT


@pytest.mark.usefixtures("cuda")
def test_f16_with_a_bias_runs_op_by_op():
    bias = jnp.where(MASK[:1], 0, -1e9)  # f16 has nothing below -65504
    func = amp(loss, dtype="f16")
    assert operations(func, *ARGS, bias) == {"dot_general f16": 2}
    assert np.isfinite(jax.jit(func)(*ARGS, bias))


@pytest.mark.usefixtures("cuda")
def test_older_gpu_runs_op_by_op(monkeypatch):
    monkeypatch.setattr("mpx._amp._recognition.cuda_capability", lambda: (7, 5))
    assert operations(bf16(loss), *ARGS) == {"dot_general bf16": 2}


@pytest.mark.usefixtures("cuda")
def test_explicitly_sharded_arrays_run_op_by_op():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = [jax.device_put(x, P("d")) for x in ARGS]
        assert operations(bf16(dot_product_attention), *args) == {"dot_general bf16": 2}


# --- Another JAX ----------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
def test_without_a_private_name_of_jax_attention_runs_op_by_op(monkeypatch):
    monkeypatch.setattr(_decide, "private", lambda feature: None)
    assert operations(bf16(loss), *ARGS) == PLAIN


@pytest.mark.usefixtures("cuda")
def test_kernel_that_jax_has_renamed_is_told(monkeypatch):
    monkeypatch.setattr(_attention, "CUDNN_KERNEL", "another_name")
    with pytest.warns(RuntimeWarning, match="runs without cuDNN's kernel"):
        assert operations(bf16(loss), *ARGS) == PLAIN


# --- Without cuDNN --------------------------------------------------------------------


def shape_of(jaxpr):
    return [
        (eqn.primitive.name, [(v.aval.shape, str(v.aval.dtype)) for v in eqn.outvars])
        for eqn in equations(jaxpr)
    ]


@pytest.mark.parametrize("name", FORMS)
def test_without_a_gpu_nothing_changes(name):
    options, args = FORMS[name]
    default = jax.grad(bf16(functools.partial(loss, **options)))
    plain = jax.grad(bf16(functools.partial(loss, implementation="xla", **options)))
    assert shape_of(jax.make_jaxpr(default)(*args)) == shape_of(
        jax.make_jaxpr(plain)(*args)
    )


# --- The report -----------------------------------------------------------------------


@pytest.mark.usefixtures("cuda")
def test_report_names_attention_with_its_arguments_and_operations():
    def attention(q, k, v):
        with jax.named_scope("attn"):
            return loss(q, k, v)

    report = mpx.inspect.report(amp(attention, "bf16"), *ARGS, backward=False)
    (row,) = report.amp.matmuls
    assert (row.primitive, row.params) == ("cudnn_attention", ("q", "k", "v"))
    assert row.scope.startswith("attn")
    assert (row.before[0], row.after) == ("float32", ("bfloat16",))
    one = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
    assert report.flops == {"bf16": 2 * one}
    assert report.shares == {"bf16": 1.0}
    assert "cuDNN's kernel" in str(report)


@pytest.mark.usefixtures("cuda")
def test_nnx_attention_reaches_cudnn():
    from flax import nnx

    layer = nnx.MultiHeadAttention(
        HEADS, 64, rngs=nnx.Rngs(0), decode=False, dropout_rate=0.0
    )
    x = normal(7, BATCH, LENGTH, 64)
    report = mpx.inspect.report(mpx.amp(lambda layer, x: layer(x), "bf16"), layer, x)
    assert "cudnn_attention" in {row.primitive for row in report.amp.matmuls}
    assert report.shares == {"bf16": 1.0}
