"""Compressed optimizers and arrays that several tests share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx
from models import normal
from numerics import ulp_distance

BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))
SHAPE = (2, 64)
TINY = mpx.optim.Compression(min_size=1)  # quantises whatever has whole groups


def draw(seed, shape=SHAPE, dtype=F32):
    return normal(seed, *shape, dtype=dtype)


# One optimizer for each kind of state.
KINDS = {
    "adamw": functools.partial(mpx.optim.flash_adamw, 0.01),
    "lion": functools.partial(mpx.optim.flash_lion, 0.01),
    "sgd": functools.partial(mpx.optim.flash_sgd, 0.01, 0.9),
    "sgd without momentum": functools.partial(mpx.optim.flash_sgd, 0.01),
}


@functools.cache
def kind(name, **options) -> Any:
    return KINDS[name](compression=mpx.optim.Compression(min_size=1, **options))


# One program for each optimizer, however many tests use it.
@functools.cache
def stepper(tx):
    return jax.jit(tx.step)


# --- with optax and others ---------------------------------------------------------------

SMALL = mpx.optim.Compression(min_size=64)
# Every rule, with all that it can keep; a new row inherits every test that takes `tx`.
OPTIMIZERS = {
    "adamw": functools.partial(mpx.optim.flash_adamw, weight_decay=0.1),
    "adam": mpx.optim.flash_adam,
    "lion": functools.partial(mpx.optim.flash_lion, weight_decay=0.1),
    "sgd": functools.partial(mpx.optim.flash_sgd, momentum=0.9, nesterov=True),
    "sgd without momentum": mpx.optim.flash_sgd,
    "sgdw": functools.partial(mpx.optim.flash_sgdw, momentum=0.9, weight_decay=0.1),
    "muon": functools.partial(mpx.optim.flash_muon, weight_decay=0.1),
}


@functools.cache
def optimizer(name="adamw", rate=1e-2, **options) -> Any:
    return OPTIMIZERS[name](
        rate, compression=mpx.optim.Compression(min_size=64, **options)
    )


def make_params(dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    return {
        "w": jnp.array(random.normal(size=(4, 64)), dtype),  # quantised
        "layers": [{"b": jnp.array(random.normal(size=3), dtype)}, None],
    }


def make_grads(step, like=None, dtype=jnp.bfloat16):
    random = np.random.default_rng(step + 1)
    return jax.tree.map(
        lambda x: jnp.array(random.normal(size=x.shape), dtype),
        make_params() if like is None else like,
    )


def apply(tx, params, state, grads, **extra):
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


@functools.cache
def updater(tx):
    return jax.jit(functools.partial(apply, tx))


def train(step, carry, steps, grads=make_grads):
    for number in steps:
        carry = tuple(step(*carry, grads(number)))
    return carry


# --- one step in two programs -----------------------------------------------------------

# A product and a sum that one program rounds twice and another one once, fused, and
# reciprocals and roots of another vector length: a few roundings of f32.
ROUNDINGS = 4 * 2.0**-23


masters = jax.jit(mpx.optim.master_params)


@jax.jit
def _parts(params, state):
    """Returns what a state holds, and the master weights, in one program."""
    weights = mpx.optim.master_params(params, state)
    return state.mu, state.nu, state.correction, weights


def assert_same_step(got, want):
    """Compares one step from one start, taken by two programs, up to roundings of f32.

    Compilers promise no bits across programs: they fuse by shape, layout and processor.
    So a number may be off by `ROUNDINGS` before it is encoded, and a stored integer by
    one where that lies across a boundary: 254 codes make that 1e-4 of the codes, and 256
    ulps a unit 1/64 of the 24-bit masters, at most.

    Args:
        got: Parameters and state.
        want: Those of the other program.
    """
    got, want = jax.device_get((got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got[1].count == want[1].count
    found, expected = jax.device_get([_parts(*pair) for pair in (got, want)])
    for one, other in zip(found[:2], expected[:2], strict=True):
        jax.tree.map(_assert_same_moment, one, other, is_leaf=_is_quantized)
    jax.tree.map(_assert_same_master, got[0], found[2], found[3], expected[3])


def assert_same_step_of(name, got, want):
    """Compares one leaf of a step, as `assert_same_step` does: others may differ.

    Args:
        name: The key of the parameter.
        got: Parameters and state.
        want: Those of another optimizer.
    """
    found, expected = jax.device_get([_parts(*pair) for pair in (got, want)])
    _assert_same_moment(found[0][name], expected[0][name])
    if expected[1] is not None:
        _assert_same_moment(found[1][name], expected[1][name])
    weights = found[3][name], expected[3][name]
    _assert_same_master(got[0][name], found[2][name], *weights)


def _is_quantized(node):
    return hasattr(node, "codes")


def _assert_same_moment(one, other):
    if not _is_quantized(one):
        return _assert_close(one, other)
    # A rounded scale that differs by a unit moves the codes of its group, too.
    units = ulp_distance(one.scale, other.scale)
    assert np.max(units) <= (4 if one.scale.dtype == F32 else 1)
    apart = np.abs(np.int32(one.codes) - np.int32(other.codes))
    assert np.max(apart) <= 1
    assert np.mean(apart > 0) <= 1 / 100


def _assert_same_master(param, correction, one, other):
    if correction is not None and correction.dtype == np.int8:
        unit = 256 * 2.0**-23
    elif param.dtype == F32 or correction is not None:
        return _assert_close(one, other)
    else:
        unit = float(jnp.finfo(param.dtype).eps)
    _assert_close(one, other, unit)
    assert np.mean(one != other) <= 1 / 50


def _assert_close(one, other, unit=0.0):
    """Numbers of an array differ by roundings of its largest, and by one unit of theirs."""
    assert one.dtype == other.dtype
    one, other = np.float64(one), np.float64(other)
    bound = unit * np.abs(other) + ROUNDINGS * np.max(np.abs(other), initial=0)
    np.testing.assert_array_less(np.abs(one - other), bound + 1e-300)


# --- one leaf ----------------------------------------------------------------------------

W = {"layer": {"w": jnp.ones(SHAPE, BF16)}}


def step_with(grads=W, params=W, state=None, tx=None):
    tx = kind("adamw") if tx is None else tx
    return tx.step(params, tx.init(W) if state is None else state, grads)
