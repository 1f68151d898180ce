"""Cross entropy without logits: its numbers, its transformations, and its memory."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import equations, normal
from mpx import amp, amp_stop, linear_cross_entropy
from mpx._ops._cross_entropy import _operation

BATCH, LENGTH, WIDTH, VOCAB = 4, 6, 10, 104
TOKENS = BATCH * LENGTH
CHUNKS = 7  # of 15 entries, the last one of 14
HIDDEN = normal(0, BATCH, LENGTH, WIDTH)
WEIGHT = 0.3 * normal(1, WIDTH, VOCAB)
BIAS = normal(2, VOCAB)
LABELS = jnp.arange(TOKENS).reshape(BATCH, LENGTH) * 31 % VOCAB
MASK = jnp.arange(TOKENS).reshape(BATCH, LENGTH) % 5 > 0
FACTORS = jnp.where(MASK, normal(3, BATCH, LENGTH) ** 2, 0.0)


@pytest.fixture(autouse=True)
def way(request, monkeypatch):
    """Logits wait for the backward pass, as on one device, or are computed again."""
    chosen = getattr(request, "param", "kept")
    devices = 1 if chosen == "kept" else 8
    monkeypatch.setattr(_operation, "_devices", lambda: devices)
    return chosen


both_ways = pytest.mark.parametrize("way", ["kept", "again"], indirect=True)
again = pytest.mark.parametrize("way", ["again"], indirect=True)


def textbook(hidden, weight, bias, *, labels=LABELS, **options) -> Any:
    """The loss and its gradients in f64; options as of `linear_cross_entropy`."""
    weights, smoothing = options.get("weights"), options.get("label_smoothing", 0.0)
    z_loss, cap = options.get("z_loss", 0.0), options.get("soft_cap")
    is_turned = options.get("vocab_axis", 1) == 0
    h, w, b = (np.asarray(x).astype(np.float64) for x in (hidden, weight, bias))
    w = w.T if is_turned else w
    logits = h @ w + b
    z = logits if cap is None else cap * np.tanh(logits / cap)
    highest = z.max(-1, keepdims=True)
    lse = np.log(np.exp(z - highest).sum(-1)) + highest[..., 0]
    one_hot = np.asarray(np.eye(z.shape[-1])[np.asarray(labels)])
    target = (1 - smoothing) * one_hot + smoothing / z.shape[-1]
    terms = np.where(target == 0, 0.0, target * z)
    losses = lse - terms.sum(-1) + z_loss * lse**2
    factors = np.ones(lse.shape) if weights is None else np.array(weights, np.float64)
    losses = losses * factors
    dz = np.exp(z - lse[..., None]) * (1 + 2 * z_loss * lse)[..., None] - target
    if cap is not None:
        dz *= 1 - (z / cap) ** 2
    count = factors.sum() if options.get("reduction", "mean") == "mean" else 1.0
    dz *= factors[..., None] / count
    value = losses if options.get("reduction") == "none" else losses.sum() / count
    dw = h.reshape(-1, h.shape[-1]).T @ dz.reshape(-1, len(b))
    return value, (dz @ w.T, dw.T if is_turned else dw, dz.reshape(-1, len(b)).sum(0))


def run(hidden, weight, bias, *, labels=LABELS, wrap=lambda f: f, scale=1.0, **options):
    """The loss and its gradients; those of the sum if the losses are not reduced."""

    def loss(hidden, weight, bias):
        found = wrap(linear_cross_entropy)(
            hidden, weight, labels, bias=bias, chunks=CHUNKS, **options
        )
        return scale * jnp.sum(found), found

    grad = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    # Else XLA would drop casts to 16 bits and back, which a GPU does not.
    exact = {"xla_allow_excess_precision": False}
    (_, value), grads = jax.jit(grad, compiler_options=exact)(hidden, weight, bias)
    return value, jax.tree.map(lambda x: np.float64(x) / scale, grads)


def error(found, wanted):
    """The largest relative error of values and gradients, in the Euclidean norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    norm = np.linalg.norm
    arrays = ([np.float64(x).ravel(), np.float64(y).ravel()] for x, y in pairs)
    return np.max([norm(x - y) / max(norm(y), 1e-30) for x, y in arrays])


CASES = {
    "plain": {},
    "mask": {"weights": MASK},
    "weights": {"weights": FACTORS},
    "smoothed": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "soft cap": {"soft_cap": 2.0},
    "sum": {"reduction": "sum", "weights": MASK},
    "none": {"reduction": "none", "weights": FACTORS},
    "tied": {"vocab_axis": 0},
    "all": {
        "weights": FACTORS,
        "label_smoothing": 0.2,
        "z_loss": 1e-3,
        "soft_cap": 3.0,
        "vocab_axis": 0,
    },
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "kept") for name in CASES), ("plain", "again"), ("all", "again")],
    indirect=["way"],
)
def test_value_and_gradients_are_those_of_the_textbook(name):
    options = CASES[name]
    weight = WEIGHT.T if "vocab_axis" in options else WEIGHT
    found, wanted = (f(HIDDEN, weight, BIAS, **options) for f in (run, textbook))
    assert found[0].dtype == np.float32
    assert found[0].shape == np.shape(wanted[0])
    assert error(found, wanted) < 2e-6


# Operands of 16 bits are exact in f64. Their products are f32, so that the loss is exact;
# the gradient of the logits is rounded, and then that of each operand, once.
STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("first", "second"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")],
)
@both_ways
def test_operands_of_16_bits_have_a_loss_in_f32(first, second):
    """Logits of 1000 would be rounded by 4 in bf16."""
    args = (300 * HIDDEN).astype(first), WEIGHT.astype(second), BIAS
    found, wanted = run(*args), textbook(*args)
    assert error(found[0], wanted[0]) < 1e-6
    assert error(found[1], wanted[1]) < 2 * STEPS[second]


@pytest.mark.some(2)
@pytest.mark.parametrize("dtype", STEPS)
def test_logits_beyond_any_format(dtype):
    """Exponentials overflow without a shift; so do logits in f16."""
    args = (4e3 * HIDDEN).astype(dtype), (64 * WEIGHT).astype(dtype), 1e3 * BIAS
    found, wanted = run(*args), textbook(*args)
    assert wanted[0] > 1e5
    assert error(found[0], wanted[0]) < 1e-6
    assert error(found[1], wanted[1]) < 4 * STEPS[dtype]


@both_ways
def test_gradients_are_rounded_once():
    """2048 equal terms: a sum in bf16 would stop at 256 of them, one over chunks earlier."""
    hidden = jnp.ones((2048, 2), jnp.bfloat16)
    weight = jnp.zeros((2, 8), jnp.bfloat16)
    labels = jnp.zeros(2048, jnp.int32)

    def loss(weight):
        return linear_cross_entropy(hidden, weight, labels, reduction="sum", chunks=4)

    found = jax.grad(loss)(weight)
    assert found.dtype == jnp.bfloat16
    wanted = 2048 * (1 / 8 - np.eye(8)[0])
    np.testing.assert_array_equal(found.astype(np.float32), [wanted, wanted])


@pytest.mark.some(1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@both_ways
@pytest.mark.filterwarnings("ignore:.*without a loss scale")
def test_f16_gradients_are_rounded_after_the_loss_scale(dtype):
    """Gradients of rare entries are a few of the smallest steps of f16, 6e-8."""
    weight = WEIGHT.at[:, 50:].multiply(8.0).astype(dtype)
    wanted = textbook(HIDDEN, weight, BIAS)[1][1]
    rare = np.setdiff1d(np.arange(50), LABELS)
    assert np.median(np.abs(wanted[:, rare])) < 1e-6
    compute = lambda f: amp(f, "f16")  # noqa: E731
    # What is written in f32 needs no scale: the operation has its own.
    for scale in (2.0**15, 1.0)[: 1 + (dtype == "float32")]:
        found = run(HIDDEN, weight, BIAS, wrap=compute, scale=scale)[1][1]
        assert error(found, wanted) < 2.0**-9
        assert error(found[:, rare], wanted[:, rare]) < 2.0**-9
        assert np.mean(found == 0) < 0.01


def test_entries_of_the_vocabulary_may_be_excluded():
    bias = BIAS.at[:40].set(-jnp.inf)
    labels = LABELS % 64 + 40
    with np.errstate(invalid="ignore"):
        value, grads = textbook(HIDDEN, WEIGHT, bias, labels=labels)
    found = run(HIDDEN, WEIGHT, bias, labels=labels)
    assert error(found, (value, grads)) < 2e-6
    np.testing.assert_array_equal(found[1][1][:, :40], 0.0)


@both_ways
def test_excluded_words_stay_so_beside_a_soft_cap(way):
    options = {"labels": LABELS % 64 + 40, "soft_cap": 2.0}
    kept = [HIDDEN, WEIGHT[:, 40:], BIAS[40:]]
    value, (dh, dw, db) = textbook(*kept, labels=LABELS % 64, soft_cap=2.0)
    found = run(HIDDEN, WEIGHT, BIAS.at[:40].set(-jnp.inf), **options)
    dw, db = np.pad(dw, ((0, 0), (40, 0))), np.pad(db, (40, 0))
    assert error(found, (value, (dh, dw, db))) < 2e-6


def test_a_soft_cap_must_be_known_when_it_is_traced():
    call = lambda cap: linear_cross_entropy(HIDDEN, WEIGHT, LABELS, soft_cap=cap)  # noqa: E731
    with pytest.raises(TypeError, match="`soft_cap` must be a number, but .*Tracer"):
        jax.jit(call)(2.0)


def test_weights_below_0_have_a_sum_and_no_mean():
    weights = FACTORS.at[0, 1].set(-1.0)
    wanted = textbook(HIDDEN, WEIGHT, BIAS, weights=weights, reduction="sum")
    found = run(HIDDEN, WEIGHT, BIAS, weights=weights, reduction="sum")
    wanted = wanted[0], jax.tree.map(np.asarray, wanted[1])
    assert error(found, wanted) < 2e-6
    assert np.isnan(run(HIDDEN, WEIGHT, BIAS, weights=weights)[0])


# --- Tokens that do not count ---------------------------------------------------------


@pytest.mark.some(1)
@both_ways
def test_tokens_of_weight_0_may_hold_anything():
    hidden = jnp.where(MASK[..., None], HIDDEN, jnp.nan).at[0, 0].set(jnp.inf)
    labels = jnp.where(MASK, LABELS, -100)
    known = jnp.nan_to_num(hidden, posinf=0.0)
    for weights, z_loss in [(MASK, 0.0), (MASK.astype(jnp.float32), 0.1)]:
        wanted = textbook(known, WEIGHT, BIAS, weights=MASK, z_loss=z_loss)
        found = run(hidden, WEIGHT, BIAS, labels=labels, weights=weights, z_loss=z_loss)
        assert error(found, wanted) < 2e-6


@pytest.mark.some(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_without_tokens_has_loss_0_and_no_gradient(reduction):
    nothing = jnp.zeros_like(MASK)
    found = run(HIDDEN, WEIGHT, BIAS, weights=nothing, reduction=reduction)
    for x in jax.tree.leaves(found):
        np.testing.assert_array_equal(x, 0.0)
    empty = linear_cross_entropy(HIDDEN[:0], WEIGHT, LABELS[:0], reduction=reduction)
    np.testing.assert_array_equal(empty, 0.0)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "uint32"])
def test_labels_outside_the_vocabulary_give_nan(dtype):
    outside = [-1, VOCAB, -VOCAB, 127]
    labels = jnp.asarray(np.array([5, *outside, VOCAB - 1]).astype(dtype))
    found = linear_cross_entropy(
        HIDDEN[0], WEIGHT, labels, reduction="none", chunks=CHUNKS
    )
    np.testing.assert_array_equal(np.isnan(found), [0, 1, 1, 1, 1, 0])
    assert np.isnan(linear_cross_entropy(HIDDEN[0], WEIGHT, labels))


def test_weights_have_a_gradient():
    def loss(weights, reduction):
        return jnp.sum(
            linear_cross_entropy(
                HIDDEN, WEIGHT, LABELS, weights=weights, reduction=reduction
            )
        )

    zero = jnp.zeros_like(FACTORS)
    losses, _ = textbook(HIDDEN, WEIGHT, 0 * BIAS, reduction="none")
    np.testing.assert_allclose(jax.grad(loss)(zero, "sum"), losses, rtol=1e-6)
    mean = np.average(losses, weights=FACTORS)
    found = jax.grad(loss)(FACTORS, "mean")
    wanted = (losses - mean) / np.float64(FACTORS).sum()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


# --- Transformations ------------------------------------------------------------------


def mean_loss(hidden, weight, labels=LABELS):
    return linear_cross_entropy(hidden, weight, labels, chunks=CHUNKS)


WANTED = textbook(HIDDEN, WEIGHT, 0 * BIAS)


def in_scan(hidden, weight):
    def step(total, row):
        return total + mean_loss(row[0], weight, row[1]), None

    return lax.scan(step, 0.0, (hidden, LABELS))[0] / BATCH


def under_vmap(hidden, weight):
    return jnp.mean(jax.vmap(mean_loss, in_axes=(0, None, 0))(hidden, weight, LABELS))


def vmap_over_weights(hidden, weight):
    return jnp.mean(
        jax.vmap(mean_loss, in_axes=(None, 0))(hidden, jnp.stack([weight] * 2))
    )


def in_remat(hidden, weight):
    return jax.checkpoint(mean_loss)(hidden, weight)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "func", [mean_loss, in_scan, under_vmap, vmap_over_weights, in_remat]
)
def test_it_can_be_differentiated_in_any_place(func):
    found = jax.jit(jax.value_and_grad(func, argnums=(0, 1)))(HIDDEN, WEIGHT)
    assert error(found, (WANTED[0], WANTED[1][:2])) < 2e-6


def test_gradients_of_single_examples():
    grad = jax.grad(mean_loss, argnums=(0, 1))
    found = jax.vmap(grad, in_axes=(0, None, 0))(HIDDEN, WEIGHT, LABELS)
    each = [
        textbook(h, WEIGHT, 0 * BIAS, labels=y)[1][:2]
        for h, y in zip(HIDDEN, LABELS, strict=True)
    ]
    assert error(found, [np.stack(x) for x in zip(*each, strict=True)]) < 2e-6


def dense(hidden, weight):
    logits = hidden @ weight
    chosen = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def test_forward_mode_and_second_derivatives():
    tangents = HIDDEN * 2 + 1, WEIGHT - 1

    def derivatives(func):
        value, slope = jax.jvp(func, (HIDDEN, WEIGHT), tangents)
        grad = jax.grad(func, argnums=(0, 1))
        curve = jax.jvp(grad, (HIDDEN, WEIGHT), tangents)[1]
        moved = lambda *args: sum(map(jnp.vdot, grad(*args), tangents))  # noqa: E731
        return value, slope, curve, jax.grad(moved, argnums=(0, 1))(HIDDEN, WEIGHT)

    found, wanted = (jax.jit(lambda f=f: derivatives(f))() for f in (mean_loss, dense))
    assert error(found, wanted) < 1e-5


@pytest.mark.some(1)
@pytest.mark.parametrize("frozen", [0, 1])
@both_ways
def test_gradients_of_frozen_operands_are_not_computed(frozen, way):
    grad = jax.grad(mean_loss, argnums=1 - frozen)
    assert error(grad(HIDDEN, WEIGHT), WANTED[1][1 - frozen]) < 2e-6
    (eqn,) = (
        x
        for x in equations(jax.make_jaxpr(grad)(HIDDEN, WEIGHT))
        if x.primitive.name == "linear_cross_entropy_backward"
    )
    assert eqn.params["wrt"] == (1 - frozen,)
    # Without a gradient of the weight there is no memory in which logits could wait.
    is_kept = eqn.params["head"].kept is not None
    assert is_kept == (way == "kept" and frozen == 0)


def test_a_shared_head_under_vmap_is_one_operation():
    jaxpr = jax.make_jaxpr(jax.grad(under_vmap, argnums=1))(HIDDEN, WEIGHT)
    names = [x.primitive.name for x in equations(jaxpr)]
    assert names.count("linear_cross_entropy_backward") == 1
    assert "scan" not in names


def test_without_private_names_jax_differentiates_it(monkeypatch):
    monkeypatch.setattr(_operation, "private", lambda feature: None)
    found = run(HIDDEN, WEIGHT, BIAS, weights=FACTORS)
    assert error(found, textbook(HIDDEN, WEIGHT, BIAS, weights=FACTORS)) < 2e-6


# --- Memory ---------------------------------------------------------------------------


def temporary(func, *args):
    return jax.jit(func).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("vocab_axis", "way"), [(0, "kept"), (1, "kept"), (1, "again")], indirect=["way"]
)
def test_a_compiled_program_has_no_logits(vocab_axis):
    tokens, width, vocab = 512, 128, 4096
    shape = (vocab, width) if vocab_axis == 0 else (width, vocab)
    types = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((tokens, width), shape)]
    labels = jnp.zeros(tokens, jnp.int32)

    def loss(hidden, weight):
        return linear_cross_entropy(
            hidden, weight, labels, chunks=16, vocab_axis=vocab_axis
        )

    used = temporary(jax.value_and_grad(loss, argnums=(0, 1)), *types)
    # Chunks of logits and of their gradient, and the sum of that of the hidden states.
    chunk = tokens * vocab // 16 * 4
    assert used < 5 * chunk < tokens * vocab * 4


@pytest.mark.some(1)
@pytest.mark.parametrize("func", [under_vmap, in_remat])
def test_memory_does_not_grow_by_transformations(func):
    hidden = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    weight = jax.ShapeDtypeStruct((WIDTH, 50 * VOCAB), jnp.float32)
    grad = jax.value_and_grad(func, argnums=(0, 1))
    used = temporary(grad, hidden, weight)
    assert used < 2 * temporary(
        jax.value_and_grad(mean_loss, argnums=(0, 1)), hidden, weight
    )


# --- amp ------------------------------------------------------------------------------


def model(params, hidden):
    return mean_loss(jnp.tanh(hidden @ params["in"]), params["head"])


PARAMS = {"in": 0.3 * normal(4, WIDTH, WIDTH), "head": WEIGHT}


def dtypes(func, *args):
    """The compute dtypes of the operations in a program, forward and backward."""
    jaxpr = jax.make_jaxpr(jax.grad(func))(*args)
    heads = (x.params["head"] for x in equations(jaxpr) if "head" in x.params)
    return [str(head.dtype) for head in heads]


@amp_stop
def stopped(params, hidden):
    return mean_loss(hidden, params["head"])


def with_highest(params, hidden):
    with jax.default_matmul_precision("highest"):
        return mean_loss(hidden, params["head"])


@pytest.mark.parametrize(
    ("func", "options", "dtype", "reason"),
    [
        (model, {}, "bfloat16", "tensor cores multiply 16-bit numbers and add in f32"),
        (model, {"dtype": "f16"}, "float16", "tensor cores"),
        (model, {"keep": "head"}, "float32", "keep head"),
        (model, {"rules": "original"}, "float32", "policy original"),
        (stopped, {}, "float32", "scope amp_stop"),
        (with_highest, {}, "float32", "precision=HIGHEST was asked for"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*without a loss scale")
def test_rules_of_amp_choose_the_dtype(func, options, dtype, reason):
    low = amp(func, **options)
    assert dtypes(low, PARAMS, HIDDEN) == [dtype] * 2
    (row,) = (
        x
        for x in mpx.inspect.report(low, PARAMS, HIDDEN).amp.decisions
        if x.primitive == "linear_cross_entropy"
    )
    assert row.reason.startswith(reason)
    assert row.params[-1] == "params/head"


@pytest.mark.filterwarnings("ignore:`fp8` changed nothing")  # the rest is amp
def test_amp_is_as_exact_as_its_formats():
    wanted = jax.value_and_grad(lambda p, h: dense(jnp.tanh(h @ p["in"]), p["head"]))(
        PARAMS, HIDDEN
    )
    ways = {
        "grad of amp": jax.value_and_grad(amp(model)),
        "amp of grad": amp(jax.value_and_grad(model)),
        "fp8": jax.value_and_grad(mpx.fp8(model, min_gain=0)),
        "amp in amp": jax.value_and_grad(amp(lambda *args: amp(model)(*args))),
    }
    for name, func in ways.items():
        found = jax.jit(func)(PARAMS, HIDDEN)
        assert error(found, wanted) < 2.0**-6, name
        assert jax.tree.map(jnp.result_type, found) == jax.tree.map(
            jnp.result_type, wanted
        )


def test_the_report_counts_its_matmuls():
    report = mpx.inspect.report(amp(model), PARAMS, HIDDEN)
    rows = [x for x in report.matmuls if x.place.param == "params/head"]
    assert [x.dtype for x in rows] == ["bf16", "bf16"]
    product = 2 * TOKENS * WIDTH * VOCAB
    assert [x.flops for x in rows] == [product, 2 * product]
    assert not any(x.param for x in report.kept)


def test_amp_keeps_no_logits_for_each_step_of_a_loop():
    jaxpr = jax.make_jaxpr(jax.grad(amp(in_scan), argnums=1))(HIDDEN, WEIGHT)
    sizes = [var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars]
    assert max(sizes) <= max(WEIGHT.size, TOKENS * VOCAB // 4)
    found = jax.grad(amp(in_scan), argnums=1)(HIDDEN, WEIGHT)
    assert error(found, WANTED[1][1]) < 2.0**-7


# --- Several devices ------------------------------------------------------------------

DATA, COLUMN = P("x"), P(None, "x")
COLLECTIVE = re.compile(
    r"\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute|all-reduce)\("
)


@pytest.mark.some(1)
@again
@pytest.mark.parametrize(
    ("weight_spec", "hidden_spec"),
    [(P(), DATA), (P(), COLUMN), (COLUMN, DATA), (COLUMN, P()), (DATA, DATA)],
    ids=["data", "sequence", "fsdp", "vocabulary", "features"],
)
def test_devices_never_send_logits(weight_spec, hidden_spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    hidden, labels = (
        jnp.tile(x, (2, 4) + (1,) * (x.ndim - 2)) for x in (HIDDEN, LABELS)
    )
    hidden, weight = (
        jnp.concatenate([x] * 2, axis=i) for x, i in ((hidden, 2), (WEIGHT, 0))
    )
    specs = weight_spec, hidden_spec, hidden_spec
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((weight[:16], hidden[..., :16], labels), specs, strict=True)
    ]

    def loss(weight, hidden, labels):
        return linear_cross_entropy(hidden, weight, labels)

    grad = jax.jit(
        jax.value_and_grad(loss, argnums=(0, 1)),
        out_shardings=(None, tuple(x.sharding for x in args[:2])),
    )
    program = grad.lower(*args).compile()
    value, grads = textbook(args[1], args[0], np.zeros(VOCAB), labels=labels)
    assert error(program(*args), (value, grads[1::-1])) < 1e-5
    sent = [
        [int(n) for n in shape.split(",") if n]
        for shape in COLLECTIVE.findall(program.as_text() or "")
    ]
    assert sent or weight_spec == P()
    logits = labels.size * VOCAB
    for shape in sent:
        # Of weights, hidden states or tokens: an array of tokens and entries has neither
        # the width of the hidden states nor few numbers.
        assert 16 in shape or np.prod(shape) <= labels.size < logits / 100, sent


@pytest.mark.some(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_vocabulary_may_be_split_in_shard_map(check_vma):
    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(AxisType.Auto,) * 2)
    specs = P("data"), P(None, "vocab"), P("vocab"), P("data")

    def local(hidden, weight, bias, labels):
        loss = linear_cross_entropy(
            hidden,
            weight,
            labels,
            bias=bias,
            label_smoothing=0.1,
            z_loss=1e-2,
            axis_name="vocab",
            chunks=3,
        )
        return lax.pmean(loss, "data")

    split = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
    )
    wanted = textbook(HIDDEN, WEIGHT, BIAS, label_smoothing=0.1, z_loss=1e-2)
    grad = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2)))
    assert error(grad(HIDDEN, WEIGHT, BIAS, LABELS), wanted) < 2e-6
    if check_vma:  # the gradient may be taken inside, too
        inner = jax.shard_map(
            jax.value_and_grad(local, argnums=(0, 1, 2)),
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), specs[:3]),
        )
        found = jax.jit(inner)(HIDDEN, WEIGHT, BIAS, LABELS)
        assert error(found, wanted) < 2e-6


@both_ways
def test_all_words_of_one_device_may_be_excluded(way):
    mesh = jax.make_mesh((4,), ("vocab",), axis_types=(AxisType.Auto,))
    bias, labels = BIAS.at[:26].set(-jnp.inf), LABELS % 78 + 26
    specs = P(), P(None, "vocab"), P("vocab"), P()

    def local(hidden, weight, bias, labels):
        return linear_cross_entropy(
            hidden, weight, labels, bias=bias, axis_name="vocab"
        )

    split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    with np.errstate(invalid="ignore"):
        wanted = textbook(HIDDEN, WEIGHT, bias, labels=labels)
    grad = jax.jit(jax.value_and_grad(split, argnums=(0, 1, 2)))
    assert error(grad(HIDDEN, WEIGHT, bias, labels), wanted) < 2e-6
    # In forward mode, too.
    args, given = (HIDDEN, WEIGHT, bias), (HIDDEN, WEIGHT, jnp.zeros_like(bias))
    call = lambda x, w, b: split(x, w, b, labels)  # noqa: E731
    moved = jax.jit(lambda *x: jax.jvp(call, args, x)[1])(*given)
    parts = zip(wanted[1], given, strict=True)
    assert abs(moved - sum(np.vdot(x, y) for x, y in parts)) < 1e-4


@again
def test_mesh_axes_may_be_explicit():
    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        hidden, weight, labels = (
            jax.device_put(x, spec)
            for x, spec in (
                (HIDDEN, P("data")),
                (WEIGHT, P(None, "vocab")),
                (LABELS, P("data")),
            )
        )
        loss = lambda h, w: mean_loss(h, w, labels)  # noqa: E731
        found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
        losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert error(found, (WANTED[0], WANTED[1][:2])) < 2e-6
    specs = [getattr(x.sharding, "spec", None) for x in found[1]]
    assert specs == [P("data", None, None), P(None, "vocab")]
    assert jax.typeof(losses).sharding.spec == P("data", None)


# --- Errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_axis": 2}, ValueError, "`vocab_axis` must be one of 0, 1, .* but 2"),
        (
            {"weight": WEIGHT[None]},
            ValueError,
            r"two axes, .* it has \(1, 10, 104\)",
        ),
        (
            {"weight": WEIGHT.T},
            ValueError,
            r"`hidden` \(4, 6, 10\) must end with the 104 features .* Pass `vocab_axis=0`",
        ),
        ({"labels": LABELS[0]}, ValueError, r"`labels` \(6,\) must have the axes"),
        ({"bias": BIAS[:5]}, ValueError, r"`bias` must have the shape \(104,\)"),
        (
            {"labels": HIDDEN[..., 0]},
            TypeError,
            "must be integers, but they are float32",
        ),
        ({"weight": LABELS[:1].T @ LABELS[:1]}, TypeError, "`weight` must be floating"),
        (
            {"bias": jnp.arange(VOCAB)},
            TypeError,
            "`bias` must be floating, but it is int",
        ),
        ({"weights": MASK[:3]}, ValueError, r"`weights` \(3, 6\) must have the shape"),
        (
            {"reduction": "max"},
            ValueError,
            "`reduction` must be one of 'mean', 'sum', 'none', but 'max'",
        ),
        ({"soft_cap": 0.0}, ValueError, "`soft_cap` must be positive, but 0.0"),
        ({"soft_cap": "1"}, TypeError, "`soft_cap` must be a number, but '1'"),
        (
            {"label_smoothing": 2},
            ValueError,
            "`label_smoothing` must be from 0 to 1, but 2",
        ),
        (
            {"weights": -FACTORS},
            ValueError,
            "`weights` must not be negative for a mean",
        ),
        (
            {"weight": WEIGHT[:, :0]},
            ValueError,
            r"\(10, 0\) must hold at least one word",
        ),
        ({"chunks": 0}, ValueError, "`chunks` must be at least 1, but 0"),
    ],
)
@pytest.mark.usefixtures("untyped")
def test_arguments_that_do_not_fit(change, error, message):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS, **change}
    with pytest.raises(error, match=message):
        linear_cross_entropy(**given)


@pytest.mark.parametrize("wide", ["hidden", "weight"])
def test_one_operand_of_64_bits_makes_the_loss_one(wide):
    with jax.enable_x64(True):
        operands = {"hidden": normal(0, 4, 16), "weight": normal(1, 16, 32)}
        operands[wide] = operands[wide].astype(jnp.float64) / 3
        labels = jnp.arange(4)
        logits = operands["hidden"].astype(jnp.float64) @ operands["weight"].astype(
            jnp.float64
        )
        chosen = logits[jnp.arange(4), labels]
        expected = jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)
        loss = mpx.linear_cross_entropy(**operands, labels=labels)
    assert loss.dtype == np.float64
    np.testing.assert_allclose(loss, expected, rtol=1e-13)


@both_ways
def test_no_tokens_have_zero_gradients():
    hidden, labels = jnp.zeros((0, WIDTH)), jnp.zeros(0, jnp.int32)
    loss = lambda w, h: linear_cross_entropy(h, w, labels, reduction="sum")  # noqa: E731
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(WEIGHT, hidden)
    assert value == 0
    assert not jnp.any(grads[0])
    assert grads[1].shape == (0, WIDTH)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_labels_of_few_bits_fit_a_large_vocabulary(dtype):
    weight, labels = normal(4, WIDTH, 300), LABELS % 127
    found = linear_cross_entropy(HIDDEN, weight, labels.astype(dtype))
    assert found == linear_cross_entropy(HIDDEN, weight, labels)
