"""Compressed optimizers: their rules, their state, and what a bad gradient does."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpx
from flash_cases import (
    BF16,
    F16,
    F32,
    KINDS,
    SHAPE,
    TINY,
    draw,
    kind,
    masters,
    stepper,
)
from models import count_traces
from mpx._optim._packing import decode_moment
from mpx._quant._codecs import Block, Quantized, SoftsignInt8, SqrtUint8
from mpx.testing import assert_trees_equal
from numerics import inject_nonfinite, ulp_distance

FULL = mpx.optim.Compression(quantize=False)


# --- the rules in f64, written down once more -----------------------------------------


def adam(w, g, s, t, *, lr, wd, b1=0.9, b2=0.999, eps=1e-8, decoupled):
    b1, b2 = (float(np.float32(b)) for b in (b1, b2))
    g = g if decoupled else g + wd * w
    m = b1 * s.get("m", 0) + (1 - b1) * g
    v = b2 * s.get("v", 0) + (1 - b2) * g * g
    w = w * (1 - lr * wd) if decoupled else w
    step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
    return w - lr * step, {"m": m, "v": v}


def lion(w, g, s, t, *, lr, wd, b1=0.9, b2=0.99):
    b1, b2 = (float(np.float32(b)) for b in (b1, b2))
    m = s.get("m", 0)
    step = np.sign(b1 * m + (1 - b1) * g)
    return w * (1 - lr * wd) - lr * step, {"m": b2 * m + (1 - b2) * g}


def sgd(w, g, s, t, *, lr, wd, momentum=None, damp=0.0, nesterov=False, decoupled):
    g = g if decoupled else g + wd * w
    w = w * (1 - lr * wd) if decoupled else w
    if momentum is None:
        return w - lr * g, {}
    m = momentum * s.get("m", 0) + (1 - damp) * g
    return w - lr * (g + momentum * m if nesterov else m), {"m": m}


def rate(count):
    return 0.01 * (1 + jnp.float32(count))


def decay(count):
    return 0.1 / (1 + jnp.float32(count))


# Optimizer, f64 rule, and optax's optimizer where it has one. A new row inherits all.
RULES = {
    "adamw": (
        lambda **o: mpx.optim.flash_adamw(rate, weight_decay=decay, **o),
        functools.partial(adam, decoupled=True),
        None,
    ),
    "adamw of optax": (
        lambda **o: mpx.optim.flash_adamw(rate, 0.8, 0.99, 1e-6, weight_decay=0.1, **o),
        lambda *a, lr, wd: adam(
            *a, lr=lr, wd=0.1, b1=0.8, b2=0.99, eps=1e-6, decoupled=True
        ),
        lambda: optax.adamw(rate, 0.8, 0.99, 1e-6, weight_decay=0.1),
    ),
    "adam": (
        lambda **o: mpx.optim.flash_adam(rate, weight_decay=decay, **o),
        functools.partial(adam, decoupled=False),
        None,
    ),
    "adam of optax": (
        lambda **o: mpx.optim.flash_adam(rate, **o),
        lambda *a, lr, wd: adam(*a, lr=lr, wd=0.0, decoupled=False),
        lambda: optax.adam(rate),
    ),
    "lion": (
        lambda **o: mpx.optim.flash_lion(rate, weight_decay=decay, **o),
        lion,
        None,
    ),
    "lion of optax": (
        lambda **o: mpx.optim.flash_lion(rate, weight_decay=0.1, **o),
        lambda *a, lr, wd: lion(*a, lr=lr, wd=0.1),
        lambda: optax.lion(rate, weight_decay=0.1),
    ),
    "sgd": (
        lambda **o: mpx.optim.flash_sgd(rate, weight_decay=decay, **o),
        functools.partial(sgd, decoupled=False),
        None,
    ),
    "sgd of optax": (
        lambda **o: mpx.optim.flash_sgd(rate, momentum=0.9, **o),
        lambda *a, lr, wd: sgd(*a, lr=lr, wd=0.0, momentum=0.9, decoupled=False),
        lambda: optax.sgd(rate, momentum=0.9),
    ),
    "nesterov of optax": (
        lambda **o: mpx.optim.flash_sgd(rate, momentum=0.9, nesterov=True, **o),
        lambda *a, lr, wd: sgd(
            *a, lr=lr, wd=0.0, momentum=0.9, nesterov=True, decoupled=False
        ),
        lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
    ),
    "dampened": (
        lambda **o: mpx.optim.flash_sgd(
            rate, 0.9, True, dampening=0.3, weight_decay=decay, **o
        ),
        functools.partial(sgd, momentum=0.9, damp=0.3, nesterov=True, decoupled=False),
        None,
    ),
    "sgdw": (
        lambda **o: mpx.optim.flash_sgdw(
            rate, 0.9, dampening=0.3, weight_decay=decay, **o
        ),
        functools.partial(sgd, momentum=0.9, damp=0.3, decoupled=True),
        None,
    ),
}
STEPS = 4


def reference(rule, weight, grads):
    """Returns the f64 weights after each step."""
    w, state = np.asarray(weight, np.float64), {}
    for count, grad in enumerate(grads):
        g = np.asarray(grad, np.float64)
        lr, wd = float(rate(count)), float(decay(count))
        w, state = rule(w, g, state, count + 1, lr=lr, wd=wd)
        yield w


@pytest.mark.parametrize("name", RULES)
def test_rules_are_those_of_f64_and_of_optax(name):
    make, rule, optax_make = RULES[name]
    tx, params = make(compression=FULL), draw(0)
    grads = [draw(step + 1) for step in range(STEPS)]
    step, traces = count_traces(tx.step)
    step = jax.jit(step)
    state = tx.init(params)
    # A step is a few roundings of numbers up to `top`, and of an update far below it.
    top = max(np.abs(w).max() for w in reference(rule, params, grads))
    tolerance = 4 * STEPS * top * 2.0**-24
    new = params
    for grad, expected in zip(grads, reference(rule, params, grads), strict=True):
        new, state = step(new, state, grad)
        np.testing.assert_allclose(new, expected, rtol=0, atol=tolerance)
    assert (int(state.count), len(traces)) == (STEPS, 1)  # schedules do not recompile
    if optax_make is None:
        return
    with jax.numpy_dtype_promotion("standard"):
        other: Any = optax_make()
        update, theirs, other_state = jax.jit(other.update), params, other.init(params)
        for grad in grads:
            updates, other_state = update(grad, other_state, theirs)
            theirs = optax.apply_updates(theirs, updates)
    np.testing.assert_allclose(new, np.asarray(theirs), rtol=0, atol=2 * tolerance)


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, BF16) for name in RULES), ("adamw", F16)]
)
def test_the_first_compressed_step_is_exact_to_the_master_weight(name, dtype):
    # Moments begin with zeros, which 8 bits hold.
    make, rule, _ = RULES[name]
    tx, params, grad = make(compression=TINY), draw(0, dtype=dtype), draw(1)
    state = tx.init(params)
    stepped = stepper(tx)(params, state, grad)
    expected = next(reference(rule, masters(params, state), [grad]))
    master = masters(*stepped)
    # Half an ulp of the parameter, of which 8 bits keep all but 1/127.
    unit = 2.0**-8 if dtype == BF16 else 2.0**-11
    np.testing.assert_allclose(master, expected, rtol=unit / 127 + 2.0**-20, atol=1e-7)
    rounded = np.asarray(stepped.params, F32)
    np.testing.assert_allclose(rounded, master, rtol=unit + 2.0**-20, atol=1e-7)


# --- what is stored -------------------------------------------------------------------


def test_state_has_the_documented_dtypes_and_shapes():
    params = {
        "w": jnp.ones((3, 5, 64), BF16),
        "odd": jnp.ones((64, 65), BF16),
        "small": jnp.ones((4,), F16),
        "full": jnp.ones((64, 64)),
    }
    tx: Any = mpx.optim.flash_adamw(
        1e-3, compression=mpx.optim.Compression(min_size=512)
    )
    made = jax.jit(tx.init)(params)
    assert int(made.count) == 0
    state = jax.eval_shape(lambda: made)
    mu, nu = state.mu["w"], state.nu["w"]
    assert isinstance(mu, Quantized)
    assert (mu.codes.dtype, mu.codes.shape) == (np.int8, (3, 5, 64))
    assert (mu.scale.dtype, mu.scale.shape) == (BF16, (3, 5, 2))
    assert (nu.codes.dtype, nu.scale.dtype) == (np.uint8, F32)
    assert (state.mu["odd"].dtype, state.mu["odd"].shape) == (F32, (64, 65))
    corrections = {k: x if x is None else x.dtype for k, x in state.correction.items()}
    assert corrections == {"w": "int8", "odd": "int8", "small": "int16", "full": None}
    assert state.format == "mpx"
    assert {
        k: jax.tree.map(lambda x: (x.shape, x.dtype), (packed.codes, packed.scales))
        for k, packed in state.packed.items()
    } == {
        "w": (((3, 3, 5, 64), np.uint8), ((3, 3, 5, 2), np.uint16)),
        "odd": (((9, 64, 65), np.uint8), None),
        "small": (((5, 4), np.uint16), None),
        "full": (((2, 64, 64), np.uint8), ((3, 64, 2), np.uint16)),
    }
    taken = sum(x.nbytes for x in jax.tree.leaves((params["w"], made.packed["w"])))
    assert taken / 960 == 2 + 1 + 1 + 1 + (2 + 4) / 32


@pytest.mark.parametrize("options", [{}, {"format": "flashoptim"}], ids=str)
@pytest.mark.parametrize("bits", [24, 32, None])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_master_weights_go_in_and_come_out(dtype, bits, options):
    weights = {"w": draw(0), "ids": jnp.arange(3), "n": None}
    params = weights | {"w": weights["w"].astype(dtype)}
    compression = mpx.optim.Compression(min_size=1, master_bits=bits, **options)
    state = mpx.optim.flash_adamw(1e-3, compression=compression).init(params)
    params, state = mpx.optim.from_master(weights, params, state)
    master = mpx.optim.master_params(params, state)
    half_ulp = {BF16: 2.0**-8, F16: 2.0**-11, F32: 0.0}[dtype]
    if dtype == BF16 and bits == 24 and not options:
        # The nearest to the master, which is off by 128 f32 ulps at most.
        distance = ulp_distance(params["w"].astype(F32), weights["w"])
        assert np.max(distance) <= 2**15 + 128
    else:
        assert_trees_equal(params["w"], weights["w"].astype(dtype))
    error = {24: half_ulp / 127, 32: 2.0**-22, None: half_ulp}[bits]
    np.testing.assert_allclose(master["w"], weights["w"], rtol=error)
    assert_trees_equal(master["ids"], weights["ids"])
    again = mpx.optim.from_master(master, params, state)
    assert_trees_equal(mpx.optim.master_params(*again), master)


def test_small_steps_add_up_in_the_master_weight():
    tx: Any = mpx.optim.flash_sgd(1.0, compression=TINY)
    params, state = tx.init_from(jnp.ones(SHAPE))
    for _ in range(100):  # each an eighth of what bf16 can see at 1
        params, state = stepper(tx)(params, state, jnp.full(SHAPE, 2.0**-12))
    np.testing.assert_allclose(params.astype(F32), 1 - 100 * 2.0**-12, rtol=2.0**-9)


def test_parameters_that_are_set_to_zero_train_on():
    tx, params = kind("adamw"), draw(0, dtype=BF16)
    params, state = stepper(tx)(params, tx.init(params), draw(1))
    pruned = jnp.zeros_like(params)
    master = mpx.optim.master_params(pruned, state)
    assert np.all(np.abs(master) < 2.0**-126)  # subnormal: what was left of them
    params, _ = stepper(tx)(pruned, state, draw(2))
    assert np.all(np.isfinite(np.asarray(params.astype(F32))))


# --- bad gradients --------------------------------------------------------------------


def mixed(seed=0):
    return {
        "w": draw(seed, dtype=BF16),
        "h": draw(seed + 1, dtype=F16),
        "f": draw(seed + 2),
        "small": draw(seed + 3, (3,), BF16),
    }


def wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x, F32)), tree)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_is_not_finite_changes_no_byte(name):
    tx, params = kind(name), mixed()
    before = stepper(tx)(params, tx.init(params), mixed(10), finite=True)
    bad = jax.tree.map(lambda g: jnp.full(g.shape, jnp.nan, g.dtype), mixed(20))
    assert_trees_equal(stepper(tx)(*before, bad, finite=False), before)
    assert_trees_equal(stepper(tx)(*before, mixed(20), finite=False), before)
    assert int(before.state.count) == 1
    # With finite gradients it is a step.
    good = stepper(tx)(*before, mixed(20), finite=True)
    assert int(good.state.count) == 2
    assert not np.array_equal(good.params["f"], before.params["f"])


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, np.inf) for name in KINDS), ("adamw", -np.inf), ("adamw", np.nan)],
)
def test_a_bad_gradient_damages_its_own_element_only(name, value):
    tx, params = kind(name), {"w": draw(0, dtype=BF16)}
    start = stepper(tx)(params, tx.init(params), {"w": draw(1)})
    place = 5
    bad = inject_nonfinite({"w": draw(2)}, value, index=place)
    clean = inject_nonfinite({"w": draw(2)}, 0.0, index=place)
    one, other = stepper(tx)(*start, bad), stepper(tx)(*start, clean)
    for after in range(3, 6):
        assert int(one.state.count) == int(other.state.count) == after - 1
        w = np.asarray(one.params["w"], F32).ravel()
        assert not np.isfinite(w[place])
        # As if the gradient had been zero, everywhere else.
        others = np.delete(w, place)
        expected = np.asarray(other.params["w"], F32).ravel()
        assert np.array_equal(others, np.delete(expected, place))
        one = stepper(tx)(*one, {"w": draw(after)})
        other = stepper(tx)(*other, {"w": draw(after)})


def test_a_bad_gradient_leaves_its_moments_and_the_scales_of_its_group():
    tx, params = kind("adamw"), {"w": draw(0, dtype=BF16)}
    start = stepper(tx)(params, tx.init(params), {"w": draw(1)})
    state = stepper(tx)(*start, inject_nonfinite({"w": draw(2)}, index=5)).state
    clean = stepper(tx)(*start, inject_nonfinite({"w": draw(2)}, 0.0, index=5)).state
    for name in ("mu", "nu"):
        moment, expected = getattr(state, name)["w"], getattr(clean, name)["w"]
        assert_trees_equal(moment.scale, expected.scale)
        same = np.asarray(moment.codes == expected.codes).ravel()
        assert np.all(np.delete(same, 5))
        assert_kept(start.state, state, name, "w", 5)


def assert_kept(before, after, name, leaf, place):
    """A moment is what it was, up to codes for another scale, rounded up or down."""
    was, got = (
        np.asarray(decode_moment(name, getattr(x, name)[leaf], x.format)).ravel()
        for x in (before, after)
    )
    assert np.all(np.isfinite(got))
    codes = {"mu": 127, "nu": 255}[name]
    was, got = (np.sqrt(x) if name == "nu" else x for x in (was, got))
    largest = max(np.max(np.abs(x)) for x in (was, got))
    assert abs(got[place] - was[place]) <= 2 * largest / codes


# The square of the first is infinite; of the last, the momentum of SGD is, too.
@pytest.mark.some(1)
@pytest.mark.parametrize("value", [3e19, -1e25, 3e38])
@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_too_large_for_the_state_is_left_out(name, value):
    tx, params = kind(name), mixed()
    first, grads = (wide(mixed(seed)) for seed in (10, 20))
    start = stepper(tx)(params, tx.init(params), first)
    huge = jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(value), grads)
    new = stepper(tx)(*start, huge)
    other = stepper(tx)(*start, grads)
    held = [masters(*x) for x in (start, new, other)]
    for leaf, (before, after, beside) in {
        leaf: [np.asarray(tree[leaf]).ravel() for tree in held] for leaf in params
    }.items():
        assert np.all(np.isfinite(np.asarray(new.params[leaf], F32)))
        np.testing.assert_array_equal(after[1:], beside[1:])
        overflows = name == "adamw" or (name == "sgd" and value == 3e38)
        # What SGD subtracts is beyond f16, but not beyond bf16.
        assert (after[0] == before[0]) == (overflows or ("sgd" in name and leaf == "h"))
        for moment in new.state.moments if overflows else ():
            assert_kept(start.state, new.state, moment, leaf, 0)
    assert mpx.all_finite((new.state.mu, new.state.nu))
    if name != "adamw":
        return
    last = new
    for number in range(30, 33):
        last = stepper(tx)(*last, wide(mixed(number)))
    moved = masters(*last)
    for leaf, before in held[1].items():
        places = (np.asarray(x).ravel()[0] for x in (moved[leaf], before))
        distance = abs(np.subtract(*places))
        assert 1e-3 < distance < 3 * 0.01 * 1000**0.5, leaf


def test_a_weight_beyond_its_dtype_may_come_back():
    tx = kind("sgd without momentum", rounding="nearest")
    params = {"w": jnp.full((1, 32), 65504.0, F16)}
    weights = {"w": jnp.full((1, 32), 65510.0)}
    start = mpx.optim.from_master(weights, params, tx.init(params))
    up, down = (
        stepper(tx)(*start, {"w": jnp.full((1, 32), grad)}) for grad in (-2000.0, 100.0)
    )
    assert_trees_equal(up.params, params)
    assert np.all(masters(*down)["w"] < 65509.5)


def test_a_learning_rate_that_is_nan_moves_nothing():
    tx = mpx.optim.flash_adamw(lambda count: jnp.float32(jnp.nan), compression=TINY)
    params = mixed()
    new = stepper(tx)(params, tx.init(params), mixed(1))
    assert_trees_equal(new.params, params)
    assert mpx.all_finite(new.state)


# --- scale invariance -----------------------------------------------------------------

FACTORS = [1e-6, 1e-3, 1.0, 1e3, 1e7]


def mlp_params():
    return {
        "a": draw(1, (8, 32)) * 0.3,
        "b": draw(2, (32, 32)) * 0.2,
        "c": draw(3, (32,)),
    }


def mlp_loss(params, x, y):
    h = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    return jnp.mean((h @ params["c"] - y) ** 2)


@functools.cache
def curve(name):
    """Returns a compiled training run: (factor, eps) to losses, one a step."""
    make = mpx.optim.flash_adamw if name == "flash" else optax.adamw
    options = {"compression": TINY} if name == "flash" else {}
    x = draw(4, (64, 8))
    y = jnp.sin(x.sum(1))

    @jax.jit
    def run(factor, eps):
        tx: Any = make(1e-2, eps=eps, **options)

        def step(carry, _):
            params, state = carry
            loss, grads = jax.value_and_grad(lambda p: mlp_loss(p, x, y) * factor)(
                params
            )
            if name == "flash":
                return tuple(tx.step(params, state, grads)), loss
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        params = mlp_params()
        return jax.lax.scan(step, (params, tx.init(params)), length=150)

    return run


@pytest.mark.some(3)
@pytest.mark.standard_promotion  # of optax
@pytest.mark.parametrize("factor", FACTORS)
def test_loss_times_a_factor_has_the_curve_of_optax(factor):
    _, losses = curve("flash")(jnp.float32(factor), jnp.float32(1e-8))
    _, expected = curve("optax")(jnp.float32(factor), jnp.float32(1e-8))
    ends = [float(x[-10:].mean()) / factor for x in (losses, expected)]
    assert ends[1] < 0.5 * float(expected[0]) / factor  # the premise: it learns
    # With f16 scales it is a third off at 1e-5, three times at 1e-6, and nan at 1e7.
    assert abs(ends[0] / ends[1] - 1) < 0.1


@pytest.mark.standard_promotion
@pytest.mark.parametrize("exponent", [-20, -10, 10, 23])
def test_loss_times_a_power_of_two_changes_no_bit(exponent):
    scale = jnp.float32(2.0**exponent)
    (params, _), losses = curve("flash")(scale, 1e-8 * scale)
    (same, _), expected = curve("flash")(jnp.float32(1), jnp.float32(1e-8))
    assert_trees_equal(params, same)
    assert_trees_equal(losses, expected * scale)


@pytest.mark.some(2)
@pytest.mark.parametrize("name", KINDS)
def test_grad_scale_multiplies_the_gradients(name):
    tx, params, grads = kind(name), mixed(), mixed(10)
    state = tx.init(params)
    scaled = jax.tree.map(lambda g: g * 8, grads)
    assert_trees_equal(
        stepper(tx)(params, state, scaled, grad_scale=0.125),
        stepper(tx)(params, state, grads, grad_scale=1.0),
    )


@pytest.mark.some(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_count_that_can_grow_no_further_stays_and_steps_are_finite(name):
    tx, params, grads = kind(name), mixed(), mixed(10)
    last = jnp.asarray(np.iinfo(np.int32).max, jnp.int32)
    state = dataclasses.replace(tx.init(params), count=last)
    before = dataclasses.replace(state, count=last - 1)
    new, state = stepper(tx)(params, state, grads)
    assert state.count == last
    # In f32 the two counts are one number.
    assert_trees_equal(new, stepper(tx)(params, before, grads).params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(new))


# --- derivatives ----------------------------------------------------------------------


def after_two_steps(tx: Any, params: Any, scale: Any) -> Any:
    """The sum of the parameters after two steps; gradients grow by `scale` each time."""
    state, step = tx.init(params), getattr(tx, "step", None)
    for seed in (1, 2):
        grads = scale**seed * draw(seed)
        if step is None:
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        else:
            params, state = step(params, state, grads)
    return jnp.sum(params.astype(F32))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("derivative", "dtype", "options"),
    [
        (jax.grad, F32, dict(min_size=1)),
        (jax.jacfwd, BF16, dict(quantize=False)),
        (jax.grad, BF16, dict(quantize=False, master_bits=None)),
    ],
    ids=["moments", "correction", "dithered"],
)
def test_steps_that_are_stored_in_integers_have_no_derivative(
    derivative, dtype, options
):
    tx = mpx.optim.flash_sgd(0.1, 0.9, compression=mpx.optim.Compression(**options))
    func = functools.partial(after_two_steps, tx, draw(0, dtype=dtype))
    with pytest.raises(NotImplementedError, match=r"no derivative.*stop_gradient"):
        derivative(func)(jnp.float32(1.0))
    constant = derivative(lambda x: x * func(jax.lax.stop_gradient(x)))
    assert constant(jnp.float32(1.0)) == func(jnp.float32(1.0))


@pytest.mark.standard_promotion
def test_steps_in_f32_have_the_derivative_of_optax():
    tx = mpx.optim.flash_adamw(0.1, weight_decay=0.1, compression=FULL)
    want, got = (
        jax.jit(jax.grad(functools.partial(after_two_steps, tx, draw(0))))(
            jnp.float32(1.5)
        )
        for tx in (optax.adamw(0.1, weight_decay=0.1), tx)
    )
    # A sum over 128 elements, each of the order of the rate and some 32 roundings off.
    np.testing.assert_allclose(got, want, rtol=0, atol=128 * 0.1 * 32 * 2.0**-24)
    assert abs(want) > 0.01


# --- small updates --------------------------------------------------------------------


@functools.cache
def drifter(rounding, **options):
    """Takes steps with gradients that come in some rows of weights of one, in turn."""
    compression = mpx.optim.Compression(min_size=1, rounding=rounding, **options)

    @jax.jit
    def run(rate, decay, size, period, steps):
        rows = jnp.arange(8)[:, None]

        def grad(count):
            return jnp.where((count + rows) % period == 0, size, 0.0) * jnp.ones(
                (8, 32)
            )

        def compressed(count, carry):
            tx = mpx.optim.flash_adamw(
                rate, weight_decay=decay, compression=compression
            )
            params, state = carry
            return tuple(tx.step(params, state, grad(count)))

        def exact(count, carry):
            params, state = carry
            tx = optax.adamw(rate, weight_decay=decay)
            updates, state = tx.update(grad(count), state, params)
            return optax.apply_updates(params, updates), state

        params = jnp.ones((8, 32))
        tx = mpx.optim.flash_adamw(0.0, compression=compression)
        got = jax.lax.fori_loop(0, steps, compressed, tuple(tx.init_from(params)))
        start = params, optax.adamw(0.0).init(params)
        want, _ = jax.lax.fori_loop(0, steps, exact, start)
        return mpx.optim.master_params(*got) - params, want - params

    return run


# Rate, decay, gradient, every how many steps a row has one, and steps.
DRIFTS = {
    **{
        f"rate {rate}": (rate, 0.0, 1.0, 1, 1000)
        for rate in (1e-3, 1e-4, 2e-5, 1e-5, 7e-6, 1e-6, 1e-7)
    },
    "decay 1e-5": (1e-3, 1e-2, 0.0, 1, 20_000),
    "decay 1e-6": (1e-4, 1e-2, 0.0, 1, 20_000),
    "sparse rows": (1e-5, 1e-2, 1.0, 97, 20_000),
    "gradients of 1e12": (1e-6, 0.0, 1e12, 1, 1000),
    "gradients of 1e-12": (1e-2, 0.0, 1e-12, 1, 1000),
}


@pytest.mark.some(4)
@pytest.mark.standard_promotion
@pytest.mark.parametrize("case", DRIFTS.values(), ids=DRIFTS)
def test_weights_of_24_bits_move_as_those_of_f32_do(case):
    moved, expected = map(np.asarray, drifter("dithered")(*case))
    assert np.linalg.norm(expected) > 0
    apart = np.linalg.norm(moved - expected) / np.linalg.norm(expected)
    assert apart < 0.05


@pytest.mark.standard_promotion
def test_weights_that_are_rounded_to_nearest_stand_still():
    """What dithering is for. The guide says so."""
    moved, expected = map(np.asarray, drifter("nearest")(*DRIFTS["rate 1e-06"]))
    assert np.all(moved == 0)
    assert np.all(expected < -9e-4)


@pytest.mark.standard_promotion
def test_without_masters_dithered_weights_move_all_the_same():
    moved, expected = drifter("dithered", master_bits=None)(*DRIFTS["rate 0.0001"])
    # 25 of 256 units below one: to two units.
    np.testing.assert_allclose(moved, expected, atol=2 * 2.0**-8)


# --- slow averages --------------------------------------------------------------------


AVERAGES = pytest.mark.parametrize("b2", [0.9, 0.999])


@functools.cache
def averager(make, rounding, **options):
    """Takes many steps with noisy gradients; returns the state and a decoded moment."""
    compression = mpx.optim.Compression(min_size=1, rounding=rounding)
    tx = make(0.0, compression=compression, **options)

    @jax.jit
    def run(state, mean, spread, count):
        def step(_, state):
            noise = jax.random.normal(jax.random.key(state.count), mean.shape)
            return tx.step(mean, state, mean + spread * noise).state

        state = jax.lax.fori_loop(0, count, step, state)
        stored, codec = (
            (state.mu, SoftsignInt8()) if state.nu is None else (state.nu, SqrtUint8())
        )
        groups = Quantized(stored.codes[:, None], stored.scale)
        return state, codec.decode(groups, Block())[:, 0]

    return tx, run


def slopes(y, x):
    return np.sum(x * y, axis=-1) / np.sum(x * x, axis=-1)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("optimized_programs")
@AVERAGES
def test_momentum_follows_a_slow_average(b2):
    """It moves by less than a bf16 ulp in a step, and yet gets where it should."""
    tx, run = averager(mpx.optim.flash_lion, "dithered", b2=b2)
    mean = draw(1, (64, 32))
    zero = jnp.zeros_like(mean)
    half_life = round(np.log(0.5) / np.log(b2))
    state, top = run(tx.init(mean), mean, zero, 10 * half_life)
    _, low = run(state, zero, zero, 2 * half_life)
    risen = slopes(top, mean * (1 - b2 ** (10 * half_life)))
    fallen = slopes(low, top * b2 ** (2 * half_life))
    for ratio in (risen, fallen):
        # An ulp of bf16 is up to 2⁻⁷.
        assert abs(np.mean(ratio) - 1) < 2.0**-6
        assert np.max(np.abs(ratio - 1)) < 2.0**-5


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("optimized_programs")
@AVERAGES
def test_momentum_forgets_what_was(b2):
    """Each number of a group goes its own way, by less than a code in a step."""
    tx, run = averager(mpx.optim.flash_lion, "dithered", b2=b2)
    before, after = draw(1, (64, 32)), draw(2, (64, 32))
    half_life = round(np.log(0.5) / np.log(b2))
    state, _ = run(tx.init(before), before, 0 * before, 10 * half_life)
    _, moment = run(state, after, 0 * after, 10 * half_life)
    # A code is at most 1/63 of the largest number of its group, 2 to 3 here.
    assert np.sqrt(np.mean(np.square(moment - after))) < 2 / 63
    assert abs(np.mean(slopes(moment - after, before))) < 0.02


def after_a_change(rounding, b2):
    """How far roots of second moments are off, and how much of old ones is in them.

    In logarithms, after ten half-lives with other gradients.
    """
    tx, run = averager(mpx.optim.flash_adamw, rounding, b2=b2)
    before, after = np.exp(draw(1, (64, 32))), np.exp(draw(2, (64, 32)))
    half_life = round(np.log(0.5) / np.log(b2))
    state, _ = run(tx.init(before), 0 * before, before, 10 * half_life)
    _, moment = run(state, 0 * after, after, 10 * half_life)
    error = np.log(np.sqrt(moment) / after)
    return np.sqrt(np.mean(np.square(error))), np.mean(slopes(error, np.log(before)))


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_second_moments_forget_what_was():
    off, held = after_a_change("dithered", 0.999)
    # The mean over 2048 numbers, each some 0.2 off: the average is one of random squares,
    # and small numbers have few codes.
    assert abs(held) < 0.03
    assert off < 0.25


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_programs")
def test_rounded_to_nearest_second_moments_do_not_forget():
    """What dithering is for. The guide says so."""
    _, held = after_a_change("nearest", 0.999)
    assert held > 0.4
