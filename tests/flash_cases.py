"""Compressed optimizers and arrays that several tests share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpx

BF16, F16, F32 = (np.dtype(t) for t in (jnp.bfloat16, jnp.float16, jnp.float32))
SHAPE = (2, 64)
TINY = mpx.Compression(min_size=1)  # quantises whatever has whole groups


def draw(seed, shape=SHAPE, dtype=F32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# One optimizer for each kind of state.
KINDS = {
    "adamw": functools.partial(mpx.flash_adamw, 0.01),
    "lion": functools.partial(mpx.flash_lion, 0.01),
    "sgd": functools.partial(mpx.flash_sgd, 0.01, 0.9),
    "sgd without momentum": functools.partial(mpx.flash_sgd, 0.01),
}


@functools.cache
def kind(name, **options) -> Any:
    return KINDS[name](compression=mpx.Compression(min_size=1, **options))


# One program for each optimizer, however many tests use it.
@functools.cache
def stepper(tx):
    return jax.jit(tx.step)


# --- with optax and others ---------------------------------------------------------------

SMALL = mpx.Compression(min_size=64)
# Every rule, with all that it can keep; a new row inherits every test that takes `tx`.
OPTIMIZERS = {
    "adamw": functools.partial(mpx.flash_adamw, weight_decay=0.1),
    "adam": mpx.flash_adam,
    "lion": functools.partial(mpx.flash_lion, weight_decay=0.1),
    "sgd": functools.partial(mpx.flash_sgd, momentum=0.9, nesterov=True),
    "sgd without momentum": mpx.flash_sgd,
    "sgdw": functools.partial(mpx.flash_sgdw, momentum=0.9, weight_decay=0.1),
}


@functools.cache
def optimizer(name="adamw", rate=1e-2, **options) -> Any:
    return OPTIMIZERS[name](rate, compression=mpx.Compression(min_size=64, **options))


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
