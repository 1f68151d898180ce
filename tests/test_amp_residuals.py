"""`amp(residuals=...)`: what the backward pass needs, kept in 8 bits."""

import contextlib
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mpx
from models import equations, normal
from mpx import amp, amp_stop
from mpx._kernels import _order
from mpx._residuals._codes import FORMS, decode, encode
from numerics import ulp_distance

BATCH, LENGTH, WIDTH, HIDDEN, HEADS, LAYERS = 4, 32, 64, 256, 2, 2
# The largest error of a code, as a share of the largest number of its block, or of itself.
LARGEST = {"int8": 1 / 127, "e4m3": 2.0**-4}


def norm(x, gain):
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + 1e-6) * gain[None, None]


def block(p, x, activation):
    h = norm(x, p["first"])
    q, k, v = ((h @ p[n]).reshape(*x.shape[:2], HEADS, -1) for n in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.float32(np.sqrt(WIDTH / HEADS))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    x = x + mixed.reshape(x.shape) @ p["o"]
    h = activation(norm(x, p["second"]) @ p["up"] + p["bias"][None, None])
    return x + h @ p["down"]


def layer_params(seed, *stacked):
    sizes = {n: (WIDTH, WIDTH) for n in "qkvo"}
    sizes |= {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {
        n: normal(seed + i, *stacked, *size) / np.float32(np.sqrt(size[0]))
        for i, (n, size) in enumerate(sizes.items())
    }
    params["bias"] = normal(seed + 9, *stacked, HIDDEN) / 8
    return params | {n: jnp.ones((*stacked, WIDTH)) for n in ("first", "second")}


def loss_of(x):
    return jnp.mean((x - 1) ** 2)


def attending(p, x):
    return loss_of(block(p, x, jax.nn.gelu))


def attending_remat(p, x):
    return loss_of(jax.checkpoint(block, static_argnums=2)(p, x, jax.nn.gelu))


def scanned(p, x, wrap=lambda f: f):
    step = wrap(lambda x, layer: (block(layer, x, jax.nn.gelu), None))
    return loss_of(jax.lax.scan(step, x, p)[0])


def mlp(p, x, activation=jax.nn.gelu):
    h = activation(x @ p["up"] + p["bias"][None, None]) @ p["down"]
    return loss_of(h)


def gated(p, x):
    h = norm(x, p["first"])
    return loss_of((jax.nn.silu(h @ p["up"]) * (h @ p["gate"])) @ p["down"])


def relu(p, x):
    return mlp(p, x, jax.nn.relu)


def clipped(p, x):
    return mlp(p, x, lambda x: jnp.maximum(x, 0))


LAYER = layer_params(0)
STACK = layer_params(0, LAYERS)
MODELS: dict[str, Any] = {
    "mlp": (mlp, LAYER),
    "gated": (gated, LAYER | {"gate": normal(77, WIDTH, HIDDEN) / 8}),
    "gelu": (attending, LAYER),
    "relu": (relu, LAYER),
    "maximum": (clipped, LAYER),
    "scan": (scanned, STACK),
    "scan of remat": (functools.partial(scanned, wrap=jax.checkpoint), STACK),
    "remat": (attending_remat, LAYER),
}
# Remat changes no number: without codes one program is enough.
ALIKE = {"scan of remat": "scan", "remat": "gelu"}
X = normal(5, BATCH, LENGTH, WIDTH)
every_model = pytest.mark.parametrize("name", MODELS)
every_form = pytest.mark.parametrize("form", FORMS)


def distance(found, exact):
    """The norm of the difference of two trees over that of the second."""
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
    return np.linalg.norm(flat(found) - flat(exact)) / np.linalg.norm(flat(exact))


def assert_one_code_more(plain, coded, exact, form="int8"):
    """Gradients of codes are as far from f32 as those of amp, and by a code at most."""
    before, after = (distance(found, exact) for found in (plain, coded))
    assert after < np.hypot(before, LARGEST[form])


def residuals(func, params, *args):
    """Returns the types of what the forward pass leaves, without the arguments."""

    def leaves(params, *args):
        return jax.tree.leaves(jax.vjp(lambda p: func(p, *args), params)[1])

    jaxpr = jax.make_jaxpr(leaves)(params, *args).jaxpr
    made = {x for x in jaxpr.outvars if not hasattr(x, "val")} - {*jaxpr.invars}
    return [x.aval for x in made]


@functools.cache
def kept(name, form=None):
    """Returns the residuals of a model."""
    func, params = MODELS[name]
    return residuals(amp(func, residuals=form), params, X)


def nbytes(avals):
    return sum(x.size * x.dtype.itemsize for x in avals)


def coded(avals):
    return [x for x in avals if x.dtype in (jnp.int8, jnp.uint8)]


@functools.cache
def compiled(name, form=None, dtype=jnp.bfloat16, rules=None):
    func, params = MODELS[name]
    func = func if form == "f32" else amp(func, dtype, rules=rules, residuals=form)
    return jax.jit(jax.value_and_grad(func)).lower(params, X).compile()


@functools.cache
def gradients(name, *options, **more):
    if options in ((), (None,), ("f32",)):
        name = ALIKE.get(name, name)
    return compiled(name, *options, **more)(MODELS[name][1], X)


def assert_only_gradients_are_coded(found, exact, form):
    """Compares loss and gradients in f32: there roundings are smaller than codes.

    XLA may leave out those to bf16, in one program and not in another.
    """
    # Sums of n numbers in another order differ by about √n·eps.
    bound = np.sqrt(X.size) * np.finfo(np.float32).eps
    assert abs(found[0] - exact[0]) <= bound * exact[0]
    assert 0 < distance(found[1], exact[1]) < LARGEST[form]


# --- The codes ------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("form", "keeps_signs"))
def through_a_code(x, form, keeps_signs=False):
    return decode(encode(x, form, keeps_signs=keeps_signs), form, x.dtype)


@every_form
@pytest.mark.parametrize("keeps_signs", [True, False])
@pytest.mark.parametrize("size", [32, 96, 197, 5])
def test_error_of_a_code_is_bounded(form, size, keeps_signs):
    x = normal(0, 50, size) * np.exp(3 * np.asarray(normal(1, 50, 1)))
    found = through_a_code(x, form, keeps_signs=keeps_signs)
    peaks = np.repeat(
        np.abs(np.pad(x, ((0, 0), (0, -size % 32)))).reshape(50, -1, 32).max(-1), 32, 1
    )[:, :size]
    slack = 1 + 2.0**-20
    smallest = FORMS[form][2] / FORMS[form][1] * peaks
    unit = smallest / 2 if form == "int8" else np.abs(x) / 16
    limit = np.where(np.abs(x) < smallest, smallest / (1 if keeps_signs else 2), unit)
    assert np.all(np.abs(found - x) <= limit * slack)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 32), 1), ((96, 5, 64), 2), ((32, 48), 1), ((96, 32, 7), 2)],
    ids=str,
)
def test_blocks_lie_within_rows(shape, axis):
    x = normal(0, *shape) * jnp.exp(3 * normal(1, *shape))
    coded = encode(x, "int8")
    length = shape[axis]
    full = np.pad(
        np.abs(x), [(0, -length % 32 if i == axis else 0) for i in range(x.ndim)]
    )
    peaks = full.reshape(*shape[:axis], -1, 32).max(axis + 1)
    assert coded.peak is not None
    assert np.array_equal(coded.peak, peaks)
    # Half a code, and four roundings of f32.
    limit = np.repeat(peaks, 32, axis)[..., :length] * (1 / 254 + 2.0**-22)
    assert np.all(np.abs(decode(coded, "int8", x.dtype) - x) <= limit)


def test_integers_are_their_own_codes():
    x = jnp.arange(-127.0, 129).at[-1].set(0).reshape(8, 32)
    coded = encode(x, "int8", peak=jnp.full((8, 1), 127.0))
    assert np.array_equal(coded.codes, x)


@every_form
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=str)
def test_the_largest_number_of_a_block_comes_back_exactly(form, dtype):
    x = normal(0, 64, 32).astype(dtype)
    found = through_a_code(x, form)
    at = np.argmax(np.abs(np.asarray(x, np.float32)), axis=-1)[:, None]
    here, there = (np.take_along_axis(np.asarray(y), at, -1) for y in (found, x))
    distance = ulp_distance(here, there)
    assert distance.max() <= (1 if dtype == jnp.float32 else 0)


@every_form
def test_codes_have_the_signs_of_the_numbers(form):
    x = normal(0, 64, 64).at[0].set(0.0).at[1, 0].set(1e-30).at[2, 0].set(-1e-30)
    found = through_a_code(x, form, keeps_signs=True)
    assert np.array_equal(np.sign(found), np.sign(x))


@pytest.mark.parametrize(
    ("form", "bad"), [(x, y) for x in FORMS for y in (np.inf, -np.inf, np.nan)]
)
def test_block_with_a_number_that_is_not_finite_becomes_nan(form, bad):
    x = normal(0, 2, 64).at[1, 40].set(bad)
    found = np.asarray(through_a_code(x, form))
    # Whatever the codes are: those of a nan differ between processors.
    assert np.isnan(encode(x, form).peak[1, 1])
    assert np.all(np.isnan(found[1, 32:]))
    assert np.all(np.isfinite(found[:, :32]))


@every_form
def test_huge_and_tiny_blocks_keep_their_size(form):
    x = normal(0, 3, 32)
    x = x / jnp.max(jnp.abs(x), axis=1, keepdims=True)
    # Of the largest numbers, 1 / x is no normal number.
    x = x * jnp.array([[3e38], [1e-30], [0.0]])
    found, x = np.asarray(through_a_code(x, form)), np.asarray(x)
    for row, exact in zip(found[:2], x[:2], strict=True):
        size = np.max(np.abs(exact))
        assert distance(row / size, exact / size) < LARGEST[form]
    assert not np.any(found[2])


# --- Gradients ------------------------------------------------------------------------


@pytest.mark.some(4)
@every_model
@every_form
def test_codes_change_gradients_by_less_than_one_and_the_loss_not_at_all(name, form):
    found = gradients(name, form, rules="original")
    assert_only_gradients_are_coded(found, gradients(name, "f32"), form)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", ["gelu", "relu", "maximum", "scan", "scan of remat"])
def test_int8_adds_less_than_the_error_of_one_array(name):
    exact, x = gradients(name, "f32")[1], normal(0, 100, 100)
    before, after = (distance(gradients(name, y)[1], exact) for y in (None, "int8"))
    assert after < np.hypot(before, distance(through_a_code(x, "int8"), x))


def test_int8_is_more_exact_than_e4m3():
    exact = gradients("mlp", "f32")[1]
    plain, *coded = (gradients("mlp", x)[1] for x in (None, "int8", "e4m3"))
    assert distance(coded[0], exact) < distance(coded[1], exact)
    assert_one_code_more(plain, coded[1], exact, "e4m3")


def test_gradients_in_f16_agree():
    exact, found = gradients("gelu", "f32")[1], None
    with mpx._casting._context.gradient_function():
        found = gradients("gelu", "int8", jnp.float16)[1]
    assert distance(found, exact) < LARGEST["int8"]


@pytest.mark.slow
@pytest.mark.standard_promotion
def test_training_ends_where_that_of_amp_ends(optimized_programs):
    func, params = MODELS["gelu"]
    optimizer = optax.adam(1e-2)

    def train(func):
        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(func)(params, X)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(params, updates), state), value

        carry = params, optimizer.init(params)
        return jax.jit(lambda: jax.lax.scan(step, carry, length=60)[1])()

    before, after = train(amp(func)), train(amp(func, residuals="int8"))
    assert before[-1] < before[0] / 20
    assert abs(after[-1] - before[-1]) < 0.02 * (before[0] - before[-1])


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@every_form
def test_numbers_that_are_not_finite_reach_the_gradients(bad, form):
    def loss(p, x):
        h = x @ p["up"]
        # Only the derivative for `down` reads it: the loss itself is finite.
        h = h.at[0, 0, 0].set(bad)
        out = jax.lax.stop_gradient(h) @ p["down"]
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 0.0))

    def grad(form):
        return jax.jit(jax.grad(amp(loss, residuals=form)))(LAYER, X)["down"]

    assert not np.all(np.isfinite(grad(None)))
    assert not np.all(np.isfinite(grad(form)))


# --- What is kept ---------------------------------------------------------------------


@every_model
def test_what_is_kept_has_less_bytes(name):
    before, after = (nbytes(kept(name, form)) for form in (None, "int8"))
    assert 0 < after < 0.6 * before


def test_layers_of_a_compiled_scan_need_less_memory():
    def temporary(form, layers):
        low = amp(scanned, residuals=form)
        lowered = jax.jit(jax.grad(low)).lower(layer_params(0, layers), X)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # What grows with the layers is stacked; the rest is needed within one of them.
    before, after = (
        temporary(form, 3 * LAYERS) - temporary(form, LAYERS) for form in (None, "int8")
    )
    assert 0 < after < 0.6 * before


def test_activation_that_several_matmuls_read_is_coded_once():
    def loss(p, x):
        h = jnp.tanh(x @ p["o"])
        return sum(loss_of(h @ p[n]) for n in "qkv")

    found = residuals(amp(loss, residuals="int8"), LAYER, X)
    sizes = [x.shape for x in coded(found)]
    # That activation, and the results of three matmuls that are squared.
    assert sizes == [X.shape] * 4


def test_preactivation_is_kept_and_its_gelu_is_not():
    found = kept("mlp", "int8")
    hidden = [x for x in found if x.shape[-1:] == (HIDDEN,) and x.size >= 4096]
    assert [x.dtype for x in hidden] == [jnp.int8]


def test_product_is_computed_again_from_its_factors():
    found = kept("gated", "int8")
    assert [x.shape[-1] for x in coded(found)].count(HIDDEN) == 2


@pytest.mark.parametrize("name", ["gelu", "scan"])
def test_parameters_are_not_coded(name):
    shapes = {x.shape for x in jax.tree.leaves(MODELS[name][1]) if x.size >= 4096}
    assert shapes
    assert shapes.isdisjoint(x.shape for x in kept(name, "int8"))


def test_parameters_computed_from_others_are_not_coded():
    def loss(p, x):
        w = p["q"] / jnp.sqrt(jnp.sum(p["q"] ** 2, axis=0, keepdims=True))
        return loss_of(jnp.tanh(x @ p["o"]) @ (w @ p["k"]))

    found = residuals(amp(loss, residuals="int8"), LAYER, X)
    assert [x.shape for x in coded(found)] == [X.shape] * 2


def test_small_arrays_are_kept_as_they_are():
    func, params = MODELS["mlp"]
    assert not coded(residuals(amp(func, residuals="int8"), params, X[:1, :8]))


def test_exp_is_kept_and_its_operand_is_not():
    def loss(p, x):
        return jnp.sum(jnp.exp(4 * (x @ p["q"])))

    found, exact = (
        jax.jit(jax.grad(amp(loss, residuals=form)))(LAYER, X)["q"]
        for form in ("int8", None)
    )
    # Of operands up to 14, half a code of int8 is 0.055, and exp makes 5 % of that.
    assert distance(found, exact) < LARGEST["int8"]


def test_small_weights_of_a_softmax_do_not_add_up():
    def loss(p, x):
        weights = jax.nn.softmax(8 * (x @ p["up"]))
        return jnp.mean((weights @ p["down"]) ** 2)

    exact = jax.jit(jax.grad(loss))(LAYER, X)
    plain, coded = (
        jax.jit(jax.grad(amp(loss, residuals=form)))(LAYER, X)
        for form in (None, "int8")
    )
    assert_one_code_more(plain, coded, exact)


@every_form
def test_a_softmax_that_is_sure_has_no_gradient(form):
    def loss(p, x):
        logits = 64.0 * (x @ p["up"])
        best = jnp.argmax(logits, axis=-1)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), best[..., None], -1)
        return -jnp.sum(jnp.where(chosen > -1e-6, chosen, 0.0))

    found, exact = (
        jax.jit(jax.grad(amp(loss, residuals=x)))(LAYER, X)["up"] for x in (form, None)
    )
    np.testing.assert_allclose(found, exact, atol=1e-5)


def attention(p, x):
    q, k = (y.reshape(BATCH, LENGTH, 4, -1) for y in (x @ p["q"], jnp.tanh(x) @ p["k"]))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.mean(jnp.einsum("bhqk,bkhd->bqhd", weights, q) ** 2)


def test_weights_of_attention_that_is_not_fused_are_kept_in_16_bits():
    exact = jax.jit(jax.grad(attention))(LAYER, X)
    before, after = (
        distance(jax.jit(jax.grad(amp(attention, residuals=x)))(LAYER, X), exact)
        for x in (None, "int8")
    )
    assert after < 1.6 * before


# Each row of the input has a single 1, which chooses a row of a matrix: with integers up
# to 256 nothing is rounded in bf16, in no order of sums.
CHOOSING = jnp.asarray(
    np.eye(WIDTH, dtype=np.float32)[np.arange(BATCH * LENGTH) % WIDTH]
)
CHOOSING = CHOOSING.reshape(BATCH, LENGTH, WIDTH)


def whole(seed, largest, *shape):
    numbers = np.random.default_rng(seed).integers(-largest, largest + 1, shape)
    return jnp.asarray(numbers, jnp.float32)


def test_the_order_of_numbers_is_not_asked_of_codes():
    def loss(p, x):
        image = (x @ p["q"]).reshape(BATCH, 4, LENGTH // 4, WIDTH)
        return jnp.mean(nn.max_pool(image, (2, 2), (2, 2)))

    # More integers than codes: some differ by less than one.
    params = {"q": whole(0, 255, WIDTH, WIDTH)}
    found, exact = (
        jax.jit(jax.grad(amp(loss, residuals=x)))(params, CHOOSING)["q"]
        for x in ("int8", None)
    )
    assert np.array_equal(found, exact)
    assert np.any(exact)


def test_scan_stacks_nothing_large_but_codes():
    found = kept("scan", "int8")
    large = {str(x.dtype) for x in found if x.size >= LAYERS * X.size}
    assert large == {"int8", "bfloat16"}  # codes, and the scores of attention


def test_mask_of_dropout_is_kept_and_its_random_bits_are_not():
    def loss(p, x, key):
        mask = jax.random.bits(key, x.shape) < np.uint32(0.9 * 2**32)
        return loss_of(jnp.where(mask, x @ p["q"], 0.0) @ p["o"])

    found = residuals(amp(loss, residuals="int8"), LAYER, X, jax.random.key(0))
    large = [x.dtype for x in found if x.size == X.size]
    assert sorted(map(str, large)) == ["bool", "int8", "int8"]


def test_statistics_and_user_rules_stay_exact():
    @jax.custom_vjp
    def shifted(x):
        return x + 1

    def forward(x):
        return x + 1, (jnp.sum(x, axis=-1, keepdims=True) + x) * 2

    def backward(kept, grad):
        assert kept.dtype == jnp.float32
        return (grad * kept,)

    shifted.defvjp(forward, backward)

    def loss(p, x):
        return jnp.sum(shifted(x @ p["q"]))

    params = {"q": whole(0, 3, WIDTH, WIDTH)}
    found, exact = (
        jax.jit(jax.grad(amp(loss, residuals=form)))(params, CHOOSING)["q"]
        for form in ("e4m3", None)
    )
    assert 0 < np.max(np.abs(exact)) <= 256, "would be rounded"
    assert np.array_equal(found, exact)


def test_remat_with_comparisons_keeps_its_input_exact():
    def loss(p, x):
        h = x @ p["q"]
        step = jax.checkpoint(lambda h: jax.nn.relu(h @ p["up"]) @ p["down"])
        return jnp.sum(h + step(h))

    params = {
        "q": whole(0, 3, WIDTH, WIDTH),
        "up": whole(1, 1, WIDTH, HIDDEN),
        "down": jnp.zeros((HIDDEN, WIDTH)).at[:, :1].set(whole(2, 1, HIDDEN, 1)),
    }
    found, exact = (
        jax.jit(jax.grad(amp(loss, residuals=form)))(params, CHOOSING)["up"]
        for form in ("e4m3", None)
    )
    assert 0 < np.max(np.abs(exact)) <= 256, "would be rounded"
    assert np.array_equal(found, exact)


# --- Transformations ------------------------------------------------------------------


def test_second_derivatives_are_refused():
    func, params = MODELS["mlp"]
    low = amp(func, residuals="int8")
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        jax.grad(lambda p: jnp.sum(jax.grad(low)(p, X)["up"]))(params)


def test_forward_mode_is_refused():
    func, params = MODELS["mlp"]
    low = lambda p: amp(func, residuals="int8")(p, X)  # noqa: E731
    forward = jax.jit(lambda p: jax.jvp(low, (p,), (p,)))
    with pytest.raises(TypeError, match="forward-mode"):
        forward.lower(params)


def test_vmap_gives_the_gradients_of_each_example():
    func, params = MODELS["mlp"]
    grad = jax.grad(amp(func, residuals="int8"))
    xs = normal(6, 3, BATCH, LENGTH, WIDTH)
    found = jax.jit(jax.vmap(grad, (None, 0)))(params, xs)
    each = [jax.jit(grad)(params, x) for x in xs]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    assert distance(found, stacked) < 2.0**-8


@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_sharded_arrays_give_the_same_gradients(spec):
    func, params = MODELS["gelu"]
    mesh = Mesh(jax.devices()[:4], "x")
    x = jax.device_put(X, NamedSharding(mesh, spec))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    low = amp(func, rules="original", residuals="int8")
    found = jax.jit(jax.value_and_grad(low))(params, x)
    assert_only_gradients_are_coded(found, gradients("gelu", "f32"), "int8")


@pytest.mark.parametrize("outside", [True, False])
def test_shard_map_gives_the_same_gradients(outside):
    func, params = MODELS["mlp"]
    mesh = Mesh(jax.devices()[:2], "x")
    wrap = functools.partial(amp, residuals="int8", params=0)

    def mean(p, x):
        return jax.lax.pmean(func(p, x), "x")

    inner = mean if outside else wrap(mean)
    mapped = jax.shard_map(inner, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    grads = jax.jit(jax.grad(wrap(mapped) if outside else mapped))(params, X)
    assert distance(grads, gradients("mlp", "f32")[1]) < LARGEST["int8"]
    found = residuals(wrap(mapped) if outside else mapped, params, X)
    assert coded(found)


def test_branches_keep_codes():
    def loss(p, x, flag):
        h = x @ p["q"]
        return loss_of(
            jax.lax.cond(flag, lambda h: jnp.tanh(h) @ p["k"], lambda h: h @ p["v"], h)
        )

    func = amp(loss, residuals="int8")
    grads = [jax.jit(jax.grad(f)) for f in (amp(loss), func, loss)]
    for flag in (True, False):
        assert_one_code_more(*(grad(LAYER, X, flag) for grad in grads))
    assert coded(residuals(func, LAYER, X, True))


def test_results_beside_the_loss_and_16_bit_parameters_work():
    def loss(p, x):
        h = jax.nn.relu(x @ p["up"]) @ p["down"]
        return loss_of(h), (h, jnp.argmax(h, axis=-1))

    stored = {"up": whole(0, 3, WIDTH, HIDDEN), "down": whole(1, 1, HIDDEN, WIDTH)}
    stored = mpx.cast_tree(stored, "bf16")
    results = [
        jax.jit(jax.value_and_grad(amp(loss, residuals=form), has_aux=True))(
            stored, CHOOSING
        )
        for form in (None, "int8")
    ]
    (plain, grads), (low, found) = results
    assert 0 < np.max(np.abs(plain[1][0])) <= 256, "would be rounded"
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(low)))
    assert found["up"].dtype == jnp.bfloat16
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    assert distance(jax.tree.map(lambda x: x.astype(jnp.float32), found), exact) < 2**-6


def test_without_a_gradient_the_program_is_that_of_amp():
    func, params = MODELS["scan"]

    def operations(form):
        lowered = jax.jit(amp(func, residuals=form)).lower(params, X)
        return lowered.cost_analysis()["flops"]

    assert operations("int8") == operations(None) > 0


def test_modules_of_equinox_are_trained():
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 2, key=jax.random.key(0))

    def loss(model, x):
        return loss_of(jax.vmap(jax.vmap(model))(x))

    value, grads = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, X)
    low = amp(loss, residuals="int8")
    found = eqx.filter_jit(eqx.filter_value_and_grad(low))(model, X)
    assert abs(found[0] - value) < 1e-2 * value
    assert (
        distance(eqx.filter(found[1], eqx.is_array), eqx.filter(grads, eqx.is_array))
        < 0.01
    )


@pytest.mark.standard_promotion
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_modules_of_flax_are_trained(framework):
    if framework == "linen":
        import flax.linen as nn

        model = nn.Sequential([nn.Dense(HIDDEN), nn.gelu, nn.Dense(WIDTH)])
        params = jax.jit(model.init)(jax.random.key(0), X)
        loss = lambda p, x: loss_of(model.apply(p, x))  # noqa: E731
    else:
        from flax import nnx

        made = nnx.Sequential(
            nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0)),
            nnx.gelu,
            nnx.Linear(HIDDEN, WIDTH, rngs=nnx.Rngs(1)),
        )
        graph, params = nnx.split(made)
        loss = lambda p, x: loss_of(nnx.merge(graph, p)(x))  # noqa: E731
    low = amp(loss, residuals="int8")
    assert_one_code_more(
        *(jax.jit(jax.grad(f))(params, X) for f in (amp(loss), low, loss))
    )
    assert coded(residuals(low, params, X))


def test_loss_scaling_takes_gradients():
    func, params = MODELS["mlp"]
    grad = mpx.value_and_grad(amp(func, "f16", residuals="int8"))
    result = jax.jit(grad)(mpx.DynamicLossScaling.pow2(), params, X)
    assert result.finite
    assert distance(result.grads, gradients("mlp", "f32")[1]) < LARGEST["int8"]


# --- Options and reports --------------------------------------------------------------


def test_a_derivative_through_a_reference_is_refused():
    def loss(p, x):
        ref = jax.new_ref(jnp.zeros(X.shape))
        ref[...] = jnp.tanh(x @ p["q"])
        return loss_of(ref[...] @ p["k"])

    with pytest.raises(NotImplementedError, match="passes through a reference"):
        jax.make_jaxpr(jax.grad(amp(loss, residuals="int8")))(LAYER, X)


def kept_in(loss, **options):
    """Returns the formats in which the arrays of a function are kept."""
    report = mpx.inspect.report(amp(loss, residuals="int8", **options), LAYER, X)
    return [row.format for row in report.residuals]


def test_what_is_selected_is_kept_exact():
    def loss(p, x, stop=contextlib.nullcontext):
        h = jnp.tanh(x @ p["q"])
        with jax.named_scope("router"), stop():
            h = jnp.tanh(h @ p["k"])
        return jnp.mean(jnp.tanh(h @ p["v"]) @ p["o"])

    assert kept_in(loss) == ["int8"] * 3
    for found in (
        kept_in(loss, keep="router"),
        kept_in(loss, keep="^k$"),
        kept_in(functools.partial(loss, stop=amp_stop)),
    ):
        assert found == ["bfloat16", "float32", "int8"]


@pytest.mark.parametrize("wrong", ["fp8", "bf16", True, 8])
@pytest.mark.usefixtures("untyped")
def test_other_values_are_refused(wrong):
    with pytest.raises(ValueError, match='must be "e4m3", "int8" or `None`'):
        amp(mlp, residuals=wrong)


def test_fp8_around_it_is_refused():
    with pytest.raises(ValueError, match="keeps its operands in 8 bits"):
        mpx.fp8(amp(mlp, residuals="int8"))


def test_report_says_what_is_kept():
    func, params = MODELS["mlp"]
    reports = [
        mpx.inspect.report(amp(func, residuals=form), params, X)
        for form in (None, "int8")
    ]
    before, after = (report.residual_bytes for report in reports)
    assert after["int8"] == max(after.values())
    assert sum(after.values()) < 0.6 * sum(before.values())
    text = str(reports[1])
    assert "Kept for the backward pass:" in text
    assert "in int8" in text
    found = [row for row in reports[1].residuals if row.format == "int8"]
    assert {row.shape for row in found} == {(*X.shape[:2], HIDDEN), X.shape}
    assert all(row.source.partition(":")[0] == __file__ for row in found)
    assert "kept in" in text


def test_report_says_what_bears_no_codes():
    loss = lambda p, x: jnp.sum(jnp.exp(x @ p["q"]))  # noqa: E731
    (row,) = mpx.inspect.report(amp(loss, residuals="int8"), LAYER, X).residuals
    assert (row.shape, row.dtype, row.format) == (X.shape, "bfloat16", "bfloat16")
    assert row.reason == "`exp` reads it"


def test_the_error_of_codes_is_measured():
    func, params = MODELS["mlp"]
    in_f32 = functools.partial(amp, func, rules="original")  # codes alone make errors
    found = mpx.inspect.residual_errors(in_f32(residuals="int8"), params, X)
    plain, coded = (
        jax.jit(jax.grad(in_f32(residuals=x)))(params, X) for x in (None, "int8")
    )
    for name in ("up", "down", "bias"):
        wanted = distance(coded[name], plain[name])
        assert 0 < found[f"p/{name}"] < LARGEST["int8"]
        np.testing.assert_allclose(found[f"p/{name}"], wanted, rtol=1e-3)
    with pytest.raises(TypeError, match="needs a loss function under 8-bit residuals"):
        mpx.inspect.residual_errors(amp(func), params, X)


def test_the_error_of_codes_shows_what_does_not_bear_them():
    def loss(p, x):
        with jax.named_scope("steep"):  # most numbers are far from the step at 0
            h = jnp.tanh(50 * (x @ p["q"]))
        return jnp.mean((jnp.tanh(h @ p["k"]) - 1) ** 2)

    errors, kept = (
        mpx.inspect.residual_errors(
            amp(loss, rules="original", residuals="int8", keep=keep), LAYER, X
        )
        for keep in ((), "steep")
    )
    assert errors["p/q"] > 0.2
    assert kept["p/q"] < LARGEST["int8"]
    assert kept["p/k"] < LARGEST["int8"]


def test_memory_has_a_row_for_it():
    func, params = MODELS["scan"]
    shape = jax.ShapeDtypeStruct((16 * BATCH, LENGTH, WIDTH), jnp.float32)
    found = mpx.inspect.memory(func, params, shape)
    low, plain = found["amp, int8 residuals"], found["amp bf16"]
    assert sum(low.residuals.values()) < 0.6 * sum(plain.residuals.values())
    assert low.peak < 0.9 * plain.peak


def test_decoding_waits_for_the_gradient():
    func, params = MODELS["gelu"]
    jaxpr = jax.make_jaxpr(jax.grad(amp(func, residuals="int8")))(params, X)
    barriers = [
        x for x in equations(jaxpr) if x.primitive.name == "optimization_barrier"
    ]
    sizes = [len(x.invars) for x in barriers if x.invars[0].aval.dtype == jnp.int8]
    # Codes, their scales, and a value of the backward pass.
    assert sizes
    assert set(sizes) == {3}


def normed(p, x):
    mean, square = jnp.mean(x, axis=-1), jnp.mean(x**2, axis=-1)
    scale = jax.lax.rsqrt(square - mean**2)
    return jnp.sum(jnp.tanh((x - mean[:, None]) * scale[:, None] * p[None]))


def times_variance(scale, x):
    mean, square = jnp.mean(x, axis=-1), jnp.mean(x**2, axis=-1)
    return jnp.sum(scale[None] * x * ((square - mean**2) ** 2)[:, None])


@pytest.mark.product
@pytest.mark.parametrize("func", [normed, times_variance])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_variances_are_kept(func, on_gpu, monkeypatch):
    if on_gpu:  # there a barrier stands between a mean and what reads it
        monkeypatch.setattr("mpx._amp._hints.cuda_capability", lambda: (9, 0))
    # Rows of very different sizes lie in one block of variances.
    sizes = 2.0 ** (np.arange(4096) % 16 - 8)
    x = normal(0, 4096, 64) * jnp.asarray(sizes, jnp.float32)[:, None]
    plain, coded = (
        jax.jit(jax.grad(amp(func, residuals=kept), argnums=1))(jnp.ones(64), x)
        for kept in (None, "int8")
    )
    apart = np.linalg.norm(coded - plain, axis=1) / np.linalg.norm(plain, axis=1)
    assert apart.max() < 0.05


def test_order_is_kept_by_a_kernel_that_writes_one():
    others = jnp.zeros((3, 5), jnp.int8), jnp.full((7,), jnp.nan), jnp.float32(0)
    assert _order._one(*others, interpret=True) == 1
    x = normal(0, 4)
    assert np.array_equal(jax.jit(_order.after)(x, others), x)


def coded_numbers(func, *args):
    """Counts the numbers that the backward pass of a function reads in int8."""
    low = amp(func, residuals="int8")
    first, *rest = args
    pull = lambda first: jax.vjp(lambda first: low(first, *rest), first)[1]  # noqa: E731
    pullback = jax.eval_shape(pull, first)
    return sum(x.size for x in jax.tree.leaves(pullback) if x.dtype == jnp.int8)


def test_rounding_is_not_a_reduction():
    def loss(w, x):
        low = lambda x: jax.lax.reduce_precision(x, 8, 7)  # noqa: E731
        return jnp.sum(jnp.tanh((low(x @ w) + low(x @ w.T)) @ w))

    w, x = normal(0, 64, 64), normal(1, 512, 64)
    assert coded_numbers(loss, w, x) == 2 * x.size


def test_blocks_lie_along_an_axis_without_explicit_sharding():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(1, 512, 64), NamedSharding(mesh, P("x")))
        w = jax.device_put(normal(0, 64, 64), NamedSharding(mesh, P()))
        found = coded_numbers(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), w, x)
    assert found == x.size


def test_remat_may_read_a_number_beside_a_code():
    def loss(w, x):
        scaled = jax.checkpoint(lambda h, factor: jnp.tanh(h * factor) * jnp.sin(h))
        return jnp.sum(scaled(x @ w, 0.5) @ w)

    w, x = normal(0, 64, 64) / 8, normal(1, 512, 64)
    found, exact = (
        jax.jit(jax.grad(f))(w, x) for f in (amp(loss, residuals="int8"), loss)
    )
    assert distance(found, exact) < 2 * LARGEST["int8"]
