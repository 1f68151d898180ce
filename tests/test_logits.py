"""Cross entropy in chunks: what is recognised, its numbers, and that no logits exist."""

import collections
import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import equations, normal, trace_together
from mpx import amp, amp_stop
from mpx._logits import Chunks, Operands, _sizes, loss

BATCH, LENGTH, WIDTH, VOCAB = 4, 6, 10, 104
TOKENS = BATCH * LENGTH
TOLERANCE = 2.0**-6  # logits below 4 are rounded by 2⁻⁷ at most, and then once more
take = functools.partial(jnp.take_along_axis, axis=-1)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
log_softmax = jax.nn.log_softmax


def draw(seed, *shape, scale=1.0):
    return scale * normal(seed, *shape)


HIDDEN = draw(0, BATCH, LENGTH, WIDTH)
WEIGHT = draw(1, WIDTH, VOCAB, scale=0.2)
BIAS = draw(2, VOCAB, scale=0.2)
LABELS = jnp.arange(TOKENS).reshape(BATCH, LENGTH) * 31 % VOCAB
MASK = jnp.arange(TOKENS).reshape(BATCH, LENGTH) % 5 > 0
ARGS = HIDDEN, WEIGHT, BIAS


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Seven chunks of 16 entries, the last one smaller, on what is taken for one device."""
    monkeypatch.setattr(_sizes, "CHUNK", 16 * TOKENS)
    monkeypatch.setattr(_sizes, "_MULTIPLE", 16)
    monkeypatch.setattr(_sizes, "_devices", lambda: 1)


DEVICES = _sizes._devices


@pytest.fixture
def all_devices(small_chunks, monkeypatch):
    assert jax.device_count() == 8
    monkeypatch.setattr(_sizes, "_devices", DEVICES)


def grads(func, args=ARGS):
    return jax.jit(jax.value_and_grad(func, argnums=tuple(range(len(args)))))(*args)


def error(found, wanted):
    """The largest relative error of values and gradients, in the Euclidean norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    arrays = ([np.float64(x).ravel(), np.float64(y).ravel()] for x, y in pairs)
    norm = np.linalg.norm
    return max(norm(x - y) / max(norm(y), 1e-6) for x, y in arrays)


def largest(jaxpr):
    """The largest number of elements of a value in a program."""
    return max(var.aval.size for eqn in equations(jaxpr) for var in eqn.outvars)


def reasons(func, *args):
    found = mpx.inspect.report(func, *args).amp.decisions
    return [x.reason for x in found if "chunks" in x.reason or x.primitive == "logits"]


def masked_mean(x):
    return jnp.sum(jnp.where(MASK, x, 0.0)) / jnp.sum(MASK, dtype=jnp.float32)


def shifted(logits):
    return logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))


def z_loss(logits):
    z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(cross_entropy(logits, LABELS) + 1e-2 * z**2)


def old_optax(logits):
    logits = shifted(logits)
    normaliser = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    return jnp.mean(normaliser - take(logits, LABELS[..., None])[..., 0])


def flax_smoothed(logits):
    is_label = LABELS[..., None] == jnp.arange(VOCAB).reshape(1, 1, -1)
    soft = lax.select(
        is_label, jnp.full(logits.shape, 0.9), jnp.full(logits.shape, 0.1 / VOCAB)
    )
    return -jnp.sum(soft * nn.log_softmax(logits)) / TOKENS


def two_outputs(logits):
    losses = cross_entropy(logits, LABELS)
    return jnp.mean(losses) + jnp.std(losses) * jnp.max(losses)


ROWS, COLUMNS = jnp.arange(BATCH)[:, None], jnp.arange(LENGTH)[None]
ONE_HOT = lambda: jax.nn.one_hot(LABELS, VOCAB)  # noqa: E731
OUTSIDE = jnp.where(MASK, LABELS, VOCAB + 3)

# From logits to a scalar.
FORMS = {
    "optax": lambda x: cross_entropy(x, LABELS).mean(),
    "optax, one-hot": lambda x: optax.softmax_cross_entropy(x, ONE_HOT()).mean(),
    "optax, smoothed": lambda x: optax.softmax_cross_entropy(
        x, optax.smooth_labels(ONE_HOT(), 0.1)
    ).mean(),
    "optax, before 0.2.4": old_optax,
    "masked": lambda x: masked_mean(cross_entropy(x, LABELS)),
    "ignored label": lambda x: masked_mean(
        cross_entropy(x, jnp.where(MASK, LABELS, -100))
    ),
    "weighted": lambda x: jnp.sum(cross_entropy(x, LABELS) * MASK.astype(jnp.float32)),
    "take_along_axis": lambda x: -take(log_softmax(x), LABELS[..., None]).mean(),
    "labels in i8": lambda x: (
        -take(log_softmax(x), LABELS.astype(jnp.int8)[..., None]).mean()
    ),
    "index": lambda x: -log_softmax(x)[ROWS, COLUMNS, LABELS].mean(),
    "index under vmap": lambda x: (
        -jax.vmap(jax.vmap(lambda x, y: log_softmax(x)[y]))(x, LABELS).mean()
    ),
    "flat": lambda x: cross_entropy(x.reshape(-1, VOCAB), LABELS.reshape(-1)).mean(),
    "transposed": lambda x: cross_entropy(x.swapaxes(0, 1), LABELS.T).sum() / TOKENS,
    "one-hot": lambda x: -jnp.sum(ONE_HOT() * log_softmax(x), axis=-1).mean(),
    "one-hot of all": lambda x: -jnp.sum(log_softmax(x) * ONE_HOT()) / TOKENS,
    "one-hot outside": lambda x: (
        -jnp.sum(log_softmax(x) * jax.nn.one_hot(OUTSIDE, VOCAB))
    ),
    "where": lambda x: (
        -jnp.sum(
            jnp.where(
                LABELS[..., None] == jnp.arange(VOCAB)[None, None], log_softmax(x), 0.0
            )
        )
    ),
    "flax, smoothed": flax_smoothed,
    "one position off": lambda x: cross_entropy(x[:, 1:-1], LABELS[:, 2:]).mean(),
    "z loss": z_loss,
    "temperature": lambda x: cross_entropy(x / 4, LABELS).mean(),
    "jitted loss": lambda x: jax.jit(lambda x: cross_entropy(x, LABELS).mean())(x),
    "jitted losses": lambda x: jax.jit(cross_entropy)(x, LABELS).mean(),
    "one label": lambda x: cross_entropy(x, jnp.full_like(LABELS, 5)).mean(),
    "several scalars": two_outputs,
    "result and scalar": lambda x: (lambda y: (y.mean(), y))(cross_entropy(x, LABELS)),
}


# Whether logits are kept or computed again, the statistics of tokens and their gradients
# are those of the form. So both ways run with each kind of results: a scalar, one of all
# entries, several, and losses of tokens.
IN_BOTH_WAYS = ["optax", "optax, smoothed", "several scalars", "result and scalar"]


def in_both_ways(func, monkeypatch, **options):
    """Functions that keep logits in the weights' gradient, and compute them again."""

    def on(devices):
        def call(*args):
            with monkeypatch.context() as patch:
                patch.setattr(_sizes, "_devices", lambda: devices)
                return amp(func, logits="chunk", **options)(*args)

        return call

    return on(1), on(8)


@pytest.mark.parametrize("name", FORMS)
def test_forms_are_computed_in_chunks(name, monkeypatch):
    def func(hidden, weight, bias):
        return FORMS[name](hidden @ weight + bias[None, None])

    def grad(func):
        scalar = lambda *args: jax.tree.leaves(func(*args))[0]  # noqa: E731
        return jax.value_and_grad(scalar, argnums=(0, 1, 2))

    ways = in_both_ways(func, monkeypatch)
    if name not in IN_BOTH_WAYS:
        ways = ways[:1]
    traced, (_, *jaxprs) = trace_together([grad(func), *map(grad, ways)], *ARGS)
    wanted, *found = traced.lower().compile()(*ARGS)
    for one, jaxpr in zip(found, jaxprs, strict=True):
        assert error(one, wanted) < TOLERANCE
        # Neither logits nor their gradient nor a one-hot array.
        assert largest(jaxpr) < TOKENS * VOCAB


@pytest.mark.parametrize("name", IN_BOTH_WAYS)
def test_report_says_that_a_form_is_computed_in_chunks(name):
    def func(hidden, weight, bias):
        return FORMS[name](hidden @ weight + bias[None, None])

    assert reasons(amp(func, logits="chunk"), *ARGS) == ["cross entropy in chunks"]


# --- Other weights and places ---------------------------------------------------------


def head(hidden, weight):
    return cross_entropy(hidden @ weight, LABELS).mean()


def tied(hidden, weight):
    return cross_entropy(hidden @ weight.T.T, LABELS).mean()


def linen(hidden, weight):
    embed = nn.Embed(VOCAB, WIDTH)
    logits = embed.apply(
        {"params": {"embedding": weight.T}}, hidden, method=embed.attend
    )
    return cross_entropy(logits, LABELS).mean()


def equinox(hidden, weight):
    linear = eqx.nn.Linear(WIDTH, VOCAB, use_bias=False, key=jax.random.key(0))
    linear = eqx.tree_at(lambda x: x.weight, linear, weight.T)
    return cross_entropy(jax.vmap(jax.vmap(linear))(hidden), LABELS).mean()


def in_scan(hidden, weight):
    def step(total, row):
        hidden, labels = row
        return total + jnp.sum(cross_entropy(hidden @ weight, labels)), None

    rows = (jnp.concatenate([x, x], axis=1) for x in (hidden, LABELS))
    return lax.scan(step, 0.0, tuple(rows))[0] / (2 * TOKENS)


def in_remat(hidden, weight):
    return jax.checkpoint(lambda *args: head(*args))(hidden, weight)


def under_vmap(hidden, weight):
    return jnp.mean(
        jax.vmap(lambda row, y: cross_entropy(row @ weight, y))(hidden, LABELS)
    )


def jitted_model(hidden, weight):
    logits = jax.jit(lambda x, w: jnp.tanh(x) @ w)(hidden, weight)
    return cross_entropy(logits, LABELS).mean()


def two_heads(hidden, weight):
    return head(hidden, weight) + head(hidden + 1, weight)


def factors(hidden, weight):
    """The weights are a result of a matmul: they are held in 16 bits."""
    return head(hidden, jnp.tanh(weight @ weight.T) @ weight)


def bf16_model(hidden, weight):
    low = hidden.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)
    return cross_entropy(low.astype(jnp.float32), LABELS).mean()


PLACES = [
    tied,
    linen,
    equinox,
    in_scan,
    in_remat,
    under_vmap,
    jitted_model,
    two_heads,
    factors,
    bf16_model,
]


@pytest.mark.parametrize("func", PLACES)
def test_weights_and_places(func, monkeypatch):
    monkeypatch.setattr(_sizes, "CHUNK", 500)
    funcs = [func, *in_both_ways(func, monkeypatch)]
    funcs = [jax.value_and_grad(func, argnums=(0, 1)) for func in funcs]
    traced, (_, *jaxprs) = trace_together(funcs, HIDDEN, WEIGHT)
    wanted, *found = traced.lower().compile()(HIDDEN, WEIGHT)
    for one, jaxpr in zip(found, jaxprs, strict=True):
        assert error(one, wanted) < TOLERANCE
        assert largest(jaxpr) < TOKENS * VOCAB


def test_gradients_of_single_examples(monkeypatch):
    def func(hidden, weight, labels):
        return cross_entropy(hidden @ weight, labels).mean()

    def per_example(func):
        grad = jax.value_and_grad(func, argnums=(0, 1))
        return jax.jit(jax.vmap(grad, in_axes=(0, None, 0)))

    monkeypatch.setattr(_sizes, "CHUNK", 500)
    args = HIDDEN, WEIGHT, LABELS
    wanted = per_example(func)(*args)
    for call in in_both_ways(func, monkeypatch):
        assert error(per_example(call)(*args), wanted) < TOLERANCE


def test_a_mapped_function_keeps_its_logits():
    """Else there would be a gradient of the weights for each example, all at once."""

    def mean(func):
        run = jax.vmap(lambda *args: func(*args), in_axes=(0, None))
        return lambda *args: jnp.mean(run(*args))

    def func(hidden, weight):
        return cross_entropy(hidden @ weight, LABELS).mean()

    args = jnp.stack([HIDDEN, HIDDEN]), WEIGHT
    jaxprs = [
        str(jax.make_jaxpr(jax.grad(mean(amp(func, logits=x)), argnums=1))(*args))
        for x in ("chunk", "keep")
    ]
    assert jaxprs[0] == jaxprs[1]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def test_gradients_that_are_no_multiples_pass_through_the_backward_pass(monkeypatch):
    def func(hidden, weight):
        return jnp.mean(clipped(cross_entropy(hidden @ weight, LABELS)))

    def grad(func):
        scaled = lambda *args: 1e-3 * func(*args)  # noqa: E731
        return jax.jit(jax.grad(scaled, argnums=(0, 1)))(HIDDEN, WEIGHT)

    wanted = grad(func)
    for call in in_both_ways(func, monkeypatch):
        assert error(grad(call), wanted) < TOLERANCE


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_no_gradient_of_what_is_frozen_is_computed(frozen, monkeypatch):
    trained = 1 if frozen == "hidden" else 0
    wanted = jax.grad(head, argnums=trained)(HIDDEN, WEIGHT)
    for call in in_both_ways(head, monkeypatch):
        traced = jax.jit(jax.grad(call, argnums=trained)).trace(HIDDEN, WEIGHT)
        found = traced.lower().compile()(HIDDEN, WEIGHT)
        assert error(found, wanted) < TOLERANCE
        names = collections.Counter(x.primitive.name for x in equations(traced.jaxpr))
        # Logits, logits again and one gradient, the last for CPUs and other devices; all
        # for the chunks of the loop and for the smaller one after it.
        assert names["dot_general"] == 2 * (1 + 1 + 2)


# --- What keeps the logits ------------------------------------------------------------


def divergence(x):
    target = jax.nn.softmax(jnp.sin(x))
    return jnp.sum(target * log_softmax(x))


@amp_stop
def stopped(hidden, weight):
    return hidden @ weight


KEPT = {
    "accuracy": (
        lambda x: (cross_entropy(x, LABELS).mean(), jnp.argmax(x, axis=-1)),
        "argmax reads them, too",
    ),
    "returned": (lambda x: (cross_entropy(x, LABELS).mean(), x), "they are returned"),
    "soft targets": (lambda x: divergence(x), "sin reads them, too"),
    "two labels": (
        lambda x: jnp.mean(cross_entropy(x, LABELS) + cross_entropy(x, LABELS + 1)),
        "they are read at several labels",
    ),
    "a mask": (
        lambda x: cross_entropy(
            jnp.where(jnp.arange(VOCAB)[None, None] < 90, x, -1e9), LABELS % 90
        ).mean(),
        "a mask, or a bias that differs between tokens",
    ),
    "a bias for tokens": (
        lambda x: cross_entropy(
            x + jnp.sin(LABELS[..., None].astype(jnp.float32)), LABELS
        ).mean(),
        "a mask, or a bias that differs between tokens",
    ),
    "a soft cap": (lambda x: cross_entropy(jnp.tanh(x), LABELS).mean(), None),
    "another axis": (
        lambda x: -take(jax.nn.log_softmax(x, axis=0), LABELS[..., None]).mean(),
        None,
    ),
    "no softmax": (lambda x: jnp.mean(x - take(x, LABELS[..., None])), None),
    "differentiated maximum": (
        lambda x: (
            (lambda x: -take(x, LABELS[..., None]).sum())(
                x - jnp.max(x, axis=-1, keepdims=True)
            )
            + jax.nn.logsumexp(x, axis=-1).sum()
        ),
        "gather reads them, too",
    ),
    "a part": (
        lambda x: cross_entropy(x[..., :64], LABELS % 64).mean(),
        "they are a part of the vocabulary",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_logits_are_kept(name):
    form, reason = KEPT[name]

    def func(hidden, weight):
        return form(hidden @ weight)

    args = HIDDEN, WEIGHT
    chunk = amp(func, logits="chunk")
    assert reasons(chunk, *args) == (
        [f"the logits are kept: {reason}"] if reason else []
    )
    assert str(jax.make_jaxpr(chunk)(*args)) == str(jax.make_jaxpr(amp(func))(*args))


@pytest.mark.parametrize(
    ("options", "func", "reason"),
    [
        ({"keep": "weight"}, head, "keep weight"),
        ({"rules": "original"}, head, "policy original"),
        ({"rules": "tf32"}, head, "policy tf32"),
        (
            {},
            lambda hidden, weight: cross_entropy(
                stopped(hidden, weight), LABELS
            ).mean(),
            "scope amp_stop",
        ),
        (
            {},
            lambda hidden, weight: cross_entropy(
                jnp.matmul(hidden, weight, precision="highest"), LABELS
            ).mean(),
            "precision=HIGHEST was asked for",
        ),
    ],
)
def test_rules_keep_the_logits(options, func, reason):
    chunk = amp(func, logits="chunk", **options)
    assert reasons(chunk, HIDDEN, WEIGHT) == [f"the logits are kept: {reason}"]


def test_logits_of_one_chunk_are_kept(monkeypatch):
    monkeypatch.setattr(_sizes, "CHUNK", TOKENS * VOCAB)
    assert reasons(amp(head, logits="chunk"), HIDDEN, WEIGHT) == []


def test_an_unknown_option_is_an_error():
    with pytest.raises(
        ValueError, match='`logits` must be "chunk" or "keep", but it is 1'
    ):
        amp(head, logits=1)


# --- Numbers --------------------------------------------------------------------------


def test_labels_outside_the_vocabulary_choose_what_they_choose_in_jax():
    labels = jnp.array([0, VOCAB - 1, VOCAB, -1, -VOCAB, -VOCAB - 1, 10**6, 7])
    hidden = HIDDEN.reshape(-1, WIDTH)[:8]

    def func(hidden, weight):
        logp = log_softmax(hidden @ weight)
        one_hot = jnp.sum(jax.nn.one_hot(labels, VOCAB) * logp, axis=-1)
        return take(logp, labels[:, None])[:, 0], one_hot

    for i in (0, 1):
        one = lambda *args: func(*args)[i]  # noqa: B023, E731
        found = amp(one, logits="chunk")(hidden, WEIGHT)
        np.testing.assert_allclose(found, one(hidden, WEIGHT), rtol=TOLERANCE)


@pytest.mark.parametrize("vocab_first", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_extreme_logits(dtype, vocab_first):
    """Exponentials overflow without a shift, and a bias may rule entries out."""
    spec = Chunks(dtype=jnp.dtype(dtype), vocab_first=vocab_first, size=16, kept=8)
    hidden = HIDDEN.reshape(-1, WIDTH) * 100
    bias = BIAS.at[:40].set(-jnp.inf)
    labels = LABELS.reshape(-1) % 64 + 40

    def func(hidden, weight, bias):
        found = hidden @ (weight.T if vocab_first else weight) + bias[None]
        return cross_entropy(found, labels).mean()

    def chunked(hidden, weight, bias):
        operands = Operands(hidden, weight, bias, labels)
        mean = lambda x: jnp.mean(x.logsumexp - x.chosen)  # noqa: E731
        return loss(spec, mean, operands, [])

    exact = jnp.bfloat16 if dtype == "bfloat16" else jnp.float16
    weight = (WEIGHT.T if vocab_first else WEIGHT).astype(exact).astype(jnp.float32)
    args = hidden.astype(exact).astype(jnp.float32), weight, bias
    wanted, found = (grads(x, args) for x in (func, chunked))
    # The logits reach 300: in bf16 they are rounded by 1.
    assert error(found[0], wanted[0]) < 2.0**-7
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[1]))


def test_f16_gradients_do_not_depend_on_the_scale():
    """Probabilities of 1e-7 times a mean of 1/24 are far below the range of f16."""
    weight = WEIGHT.at[:, 50:].multiply(8.0)

    def func(weight, hidden):
        return head(hidden, weight)

    wanted = jax.grad(func)(weight, HIDDEN)
    for devices in (1, 8):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_sizes, "_devices", lambda: devices)  # noqa: B023
            run = jax.jit(mpx.value_and_grad(amp(func, "f16", logits="chunk")))
            found = [
                run(mpx.StaticLossScaling(scale), weight, HIDDEN).grads
                for scale in (1.0, 2.0**15)
            ]
        assert error(found[0], wanted) < 2.0**-8
        np.testing.assert_array_equal(*found)
        tiny = jnp.linalg.norm(wanted[:, :50])
        assert error(found[0][:, :50], wanted[:, :50]) < 2.0**-7, tiny


def test_it_runs_under_fp8_and_another_amp():
    def model(params, hidden):
        return head(jnp.tanh(hidden @ params["in"]), params["out"])

    params = {"in": draw(3, WIDTH, WIDTH, scale=0.3), "out": WEIGHT}
    wanted = grads(model, (params, HIDDEN))
    chunk = amp(model, logits="chunk")
    for outer in (lambda f: mpx.fp8(f, min_gain=0), amp):
        assert error(grads(outer(chunk), (params, HIDDEN)), wanted) < 2.0**-4


# --- Several devices ------------------------------------------------------------------

DATA, COLUMN = P("x"), P(None, "x")


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize(
    ("weight_spec", "hidden_spec"),
    [(P(), DATA), (COLUMN, DATA), (COLUMN, P())],
    ids=["data", "fsdp", "tensor"],
)
def test_devices_never_send_logits(weight_spec, hidden_spec):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    hidden, labels = (jnp.concatenate([x, x]) for x in (HIDDEN, LABELS))

    def func(weight, hidden, labels):
        return cross_entropy(hidden @ weight, labels).mean()

    specs = weight_spec, hidden_spec, hidden_spec
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((WEIGHT, hidden, labels), specs, strict=True)
    ]
    grad = jax.value_and_grad(func, argnums=(0, 1))
    chunked = jax.jit(
        jax.value_and_grad(amp(func, logits="chunk"), argnums=(0, 1)),
        out_shardings=(None, tuple(x.sharding for x in args[:2])),
    )
    program = chunked.lower(*args).compile()
    assert error(program(*args), grad(WEIGHT, hidden, labels)) < TOLERANCE
    sent = re.findall(
        r"\[([\d,]*)\][^=]*? (?:all-gather|all-to-all|collective-permute)\(",
        program.as_text() or "",
    )
    if hidden_spec == P():
        assert not sent, "each device has all tokens and its part of the vocabulary"
    for shape in sent:  # of weights or hidden states, never of tokens and entries
        assert WIDTH in map(int, shape.split(",")) or shape.count(",") == 0, sent


@pytest.mark.usefixtures("all_devices")
@pytest.mark.parametrize("check_vma", [True, False])
def test_it_runs_in_shard_map(check_vma):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    hidden, labels = (jnp.concatenate([x] * 16) for x in (HIDDEN, LABELS))

    def local(weight, hidden, labels):
        return lax.pmean(cross_entropy(hidden @ weight, labels).mean(), "x")[None]

    def func(weight, hidden, labels):
        losses = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), DATA, DATA),
            out_specs=DATA,
            check_vma=check_vma,
        )(weight, hidden, labels)
        # Each device gets another gradient of the mean that all have.
        return jnp.vdot(losses, jnp.arange(8.0))

    args = WEIGHT, hidden, labels
    chunk = amp(func, logits="chunk")
    traced, _ = trace_together(
        [jax.value_and_grad(f, argnums=(0, 1)) for f in (func, chunk)], *args
    )
    wanted, found = traced.lower().compile()(*args)
    assert error(found, wanted) < TOLERANCE
    assert reasons(chunk, *args) == ["cross entropy in chunks"]


# --- Memory ---------------------------------------------------------------------------


def test_a_compiled_program_has_no_logits():
    tokens, width, vocab = 512, 256, 8192
    shapes = (tokens, width), (width, vocab)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    labels = jnp.zeros(tokens, jnp.int32)

    def func(hidden, weight):
        return cross_entropy(hidden @ weight, labels).mean()

    def temporary(func):
        grad = jax.jit(jax.value_and_grad(func, argnums=(0, 1)))
        return grad.lower(*args).compile().memory_analysis().temp_size_in_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sizes, "CHUNK", tokens * vocab // 16)
        chunked = temporary(amp(func, logits="chunk"))
    assert chunked < temporary(amp(func)) / 4
