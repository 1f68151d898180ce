"""Attention as people write it becomes one operation under `amp`, and nothing else does.

There is no GPU here. A fixture lets `amp` believe in one: the operation then runs in plain
JAX, which is compared with the function itself in f32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from attention_cases import (
    ARRAYS,
    BY_HAND,
    EMPTY,
    LIBRARIES,
    h200,
)
from attention_look_alikes import KEPT, LOOK_ALIKES
from models import equations, normal
from mpx._amp import _recognition as found
from mpx._ops import _attention

bf16 = functools.partial(mpx.amp, dtype="bf16")
UNIT = 2.0**-8
pytestmark = [pytest.mark.usefixtures("h200"), pytest.mark.standard_promotion]
__all__ = ["h200"]


def kernels(func, *args):
    """Returns the numbers of attention operations and of matmuls."""
    names = [x.primitive.name for x in equations(jax.make_jaxpr(func)(*args))]
    return names.count("cudnn_attention"), names.count("dot_general")


def with_gradients(func):
    """Returns a function of the results and of the gradients of all f32 arguments."""

    def call(*args):
        leaves, tree = jax.tree.flatten(args)
        free = [i for i, x in enumerate(leaves) if x.dtype == jnp.float32]

        def loss(chosen):
            for i, x in zip(free, chosen, strict=True):
                leaves[i] = x
            out = func(*jax.tree.unflatten(tree, leaves))
            weights = jnp.sin(jnp.arange(1.0, out.size + 1)).reshape(out.shape)
            return jnp.sum(out.astype(jnp.float32) * weights), out

        chosen = [leaves[i] for i in free]
        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(chosen)
        return [out, *grads]

    return call


def check(func, args, *, bound=5 * UNIT):
    """Compares a function under `amp` with the function in f32, with all gradients."""
    together = jax.jit(
        lambda *args: (with_gradients(bf16(func))(*args), with_gradients(func)(*args))
    )
    actual, expected = (
        [np.asarray(x, np.float64) for x in outs] for outs in together(*args)
    )
    # Some gradients are 0 but for rounding: that of a bias of keys, for one.
    typical = np.mean([np.linalg.norm(x) for x in expected[1:]])
    for got, wanted in zip(actual, expected, strict=True):
        assert got.shape == wanted.shape
        size = max(np.linalg.norm(wanted), typical / 4)
        assert np.linalg.norm(got - wanted) <= bound * size


@pytest.mark.some(8)
@pytest.mark.parametrize("name", BY_HAND)
def test_attention_by_hand_is_one_operation_with_the_same_gradients(name):
    func, args = BY_HAND[name]
    fused, matmuls = kernels(bf16(func), *args)
    # One makes a bias. Where masked scores have a gradient, rows without a key need two.
    more = 1 if name == "bias of pairs" else 2 * (", added" in name)
    assert (fused, matmuls) == (1, more)
    assert kernels(bf16(func, attention="keep"), *args)[0] == 0
    check(func, args)


def call_of(func, *args):
    """Returns the parameters of the kernel, and the shapes of its further operands."""
    found = [
        x
        for x in equations(jax.make_jaxpr(func)(*args))
        if x.primitive.name == "cudnn_attention"
    ]
    (eqn,) = found
    return eqn.params["spec"], [tuple(x.aval.shape) for x in eqn.invars[3:]]


def test_bias_is_read_from_the_inside_of_an_activation():
    q, k, v = ARRAYS[:3]
    heads, length = q.shape[2], q.shape[1]
    pair = normal(5, 2, heads * length, 16)
    activation = jax.jit(lambda x: 2 * jnp.tanh(x))

    def func(q, k, v, x, w):
        half = (x @ w.T).reshape(1, heads, length, -1)[..., :length] * 0.5
        scores = jnp.einsum("bthd,bshd->bhts", q, k) + activation(half)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    args = (q, k, v, *pair)
    assert kernels(bf16(func), *args)[0] == 1
    check(func, args)


CALLS = {
    "nanoGPT": ({"is_causal": True, "scale": 0.25}, []),
    "softmax by hand": ({"is_causal": True}, []),
    "iota": ({"is_causal": True}, []),
    "grouped": ({"is_causal": True}, []),
    "added constant": ({"is_causal": True}, []),
    "window": ({"is_causal": True, "window": (2, 0)}, []),
    "ALiBi": ({"is_causal": True, "extras": ("bias",)}, [(1, 4, 8, 8)]),
    "T5": ({"is_causal": False, "extras": ("bias",)}, [(1, 4, 8, 8)]),
    "bias of keys": ({"extras": ("bias",)}, [(2, 1, 1, 8)]),
    "padding": ({"is_causal": False, "extras": ("mask",)}, [(2, 1, 1, 8)]),
    "padding, added": ({"extras": ("mask",)}, [(2, 1, 1, 8)]),
    "padding, causal": ({"is_causal": True, "extras": ("mask",)}, [(2, 1, 1, 8)]),
    "JAX, bf16, mask": ({"extras": ("mask",)}, [(2, 1, 1, 8)]),
    "odd lengths": ({"extras": ()}, []),
    "odd lengths, bias": ({"extras": ("bias",)}, [(1, 4, 8, 6)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_masks_are_told_to_the_kernel_in_their_smallest_form(name):
    expected, shapes = CALLS[name]
    func, args = BY_HAND[name]
    spec, found = call_of(bf16(func), *args)
    assert {key: getattr(spec, key) for key in expected} == expected
    assert found == shapes


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_causal_mask_of_a_call_is_told_to_the_kernel(transform):
    mask = jnp.tril(jnp.ones((1, 1, 8, 8), bool))

    def loss(q, k, v):
        whole = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (2, 1, 8, 8))
        out = jax.nn.dot_product_attention(q, k, v, mask=mask & whole)
        return jnp.sum(jnp.sin(out))

    spec, shapes = call_of(bf16(transform(loss)), *ARRAYS)
    assert (spec.is_causal, spec.extras, shapes) == (True, (), [])
    check(loss, ARRAYS)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", LIBRARIES)
def test_attention_of_a_library_is_one_operation_with_the_same_gradients(name):
    func, args = LIBRARIES[name]()
    spec, _ = call_of(bf16(func), *args)
    unmasked = ("Linen", "Linen, padding", "Linen, bf16", "Linen, bf16, f32 softmax")
    assert spec.is_causal == (name not in unmasked)
    check(func, args)


@pytest.mark.some(4)
@pytest.mark.parametrize("name", EMPTY)
def test_row_in_which_everything_is_masked_stays_what_it_was(name):
    func, args = EMPTY[name]
    assert kernels(bf16(func), *args)[0] == 1
    actual, expected = jax.jit(lambda *x: (bf16(func)(*x), func(*x)))(*args)
    np.testing.assert_allclose(actual, expected, atol=4 * UNIT)
    if "nan" in name:
        assert np.isnan(actual).any()
    else:
        check(func, args)


# --- Through transformations ----------------------------------------------------------

CAUSAL = BY_HAND["padding, causal"]


def stacked(f):
    def call(q, k, v, mask):
        step = lambda c, q: (c + f(q, k, v, mask), None)  # noqa: E731
        return lax.scan(step, jnp.zeros_like(q), jnp.stack([q, -q]))[0]

    return call


def mapped(f):
    return lambda *args: jax.vmap(f)(*(jnp.stack([x, x]) for x in args))


def over_devices(f):
    mesh = jax.make_mesh((2, 4), ("b", "h"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, P("b", None, "h"))

    def call(q, k, v, mask):
        q, k, v = (lax.with_sharding_constraint(x, place) for x in (q, k, v))
        return f(q, k, v, mask)

    return call


def per_device(f):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"))


TRANSFORMS = {
    "jit": jax.jit,
    "scan": stacked,
    "remat": jax.checkpoint,
    "vmap": mapped,
    "cond": lambda f: lambda *x: lax.cond(x[0][0, 0, 0, 0] > 9, f, f, *x),
    "devices": over_devices,
    "shard_map": per_device,
}


@pytest.mark.some(1)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_attention_is_recognised_through_a_transformation(name):
    transform, (func, args) = TRANSFORMS[name], CAUSAL
    wrapped = transform(func)
    fused, matmuls = kernels(bf16(wrapped), *args)
    assert (fused, matmuls) == (2 if name == "cond" else 1, 0)
    check(wrapped, args)


def test_vmap_outside_of_amp_makes_the_batch_larger():
    func, args = CAUSAL
    args = tuple(jnp.stack([x, x]) for x in args)
    assert kernels(jax.vmap(bf16(func)), *args) == (1, 0)
    actual, expected = jax.vmap(bf16(func))(*args), jax.vmap(func)(*args)
    np.testing.assert_allclose(actual, expected, atol=4 * UNIT)


# --- What is not attention, or is to be kept ------------------------------------------


def programs(func, *args):
    return [
        str(jax.make_jaxpr(bf16(func, attention=x))(*args)) for x in ("fuse", "keep")
    ]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_is_left_alone(name):
    fused, kept = programs(LOOK_ALIKES[name], *ARRAYS)
    assert fused == kept
    assert "cudnn_attention" not in fused


@pytest.mark.parametrize("name", KEPT)
def test_attention_that_is_kept_is_told_with_the_reason(name):
    func, reason = KEPT[name]
    fused, kept = programs(func, *ARRAYS)
    assert fused == kept
    report = mpx.inspect.report(bf16(func), *ARRAYS)
    (row,) = [x for x in report.kept if x.primitive == "attention"]
    assert reason in row.reason
    assert "/tests/attention_" in row.source


# --- What the user said ---------------------------------------------------------------

EINSUM, _ = BY_HAND["einsum"]
ASKED = {
    "amp_stop": (mpx.amp_stop(EINSUM), {}),
    "scope": (jax.named_scope("head")(EINSUM), {"keep": "head"}),
    "rule of matmuls": (
        EINSUM,
        {"rules": mpx.AmpRules(primitives={"dot_general": "f32"})},
    ),
    "rule of a parameter": (
        lambda q, k, v: EINSUM(q, k, v),
        {"rules": mpx.AmpRules(params={"^v$": "f32"})},
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_choice_of_the_user_is_respected(name):
    func, options = ASKED[name]
    assert kernels(bf16(func, **options), *ARRAYS) == (0, 2)
    report = mpx.inspect.report(bf16(func, **options), *ARRAYS)
    assert [x.primitive for x in report.kept].count("attention") == 1


@pytest.mark.usefixtures("untyped")
def test_unknown_choice_is_refused():
    with pytest.raises(ValueError, match='"fuse" or "keep", but it is \'always\''):
        mpx.amp(EINSUM, attention="always")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("capability", "reason"), [((8, 0), "capability 8.0"), ((9, 0), "keys are few")]
)
def test_attention_is_kept_where_the_kernel_does_not_pay(
    capability, reason, monkeypatch
):
    monkeypatch.setattr(found, "cuda_capability", lambda: capability)
    monkeypatch.setattr(_attention, "LEAST", {9: 128 * 128})
    report = mpx.inspect.report(bf16(EINSUM), *ARRAYS)
    (row,) = [x for x in report.kept if x.primitive == "attention"]
    assert reason in row.reason
    assert kernels(bf16(EINSUM), *ARRAYS) == (0, 2)


@pytest.mark.parametrize(
    ("queries", "keys", "pays"),
    [
        (31, 32, False),
        (32, 32, True),
        (65, 65, True),
        (1, 4096, False),
        (1, 16384, True),
    ],
)
def test_kernel_pays_from_32_queries_and_keys_on(monkeypatch, queries, keys, pays):
    monkeypatch.setattr(_attention, "LEAST", {9: 128 * 128})
    assert (_attention.reason_not_paying((9, 0), queries, keys) is None) == pays


def test_failure_of_the_search_is_told_and_changes_nothing(monkeypatch):
    def fail(*_):
        raise KeyError("new parameter")

    monkeypatch.setattr("mpx._amp._recognition.find_attention", fail)
    with pytest.warns(RuntimeWarning, match="KeyError.*new parameter"):
        assert kernels(bf16(EINSUM), *ARRAYS) == (0, 2)


def test_fp8_leaves_attention_alone():
    func, args = LIBRARIES["Linen"]()

    def loss(*args):
        return jnp.sum(func(*args))

    for low in (mpx.fp8(bf16(loss), min_gain=0), bf16(mpx.fp8(loss, min_gain=0))):
        assert kernels(low, *args)[0] == 1
