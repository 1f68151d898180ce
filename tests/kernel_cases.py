"""Kernels in the interpreter: leaves in the middle of training, and exact comparisons."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpx._jax._compat import HAS_MOSAIC, Literal, eval_equation, open_jaxpr
from mpx._kernels import _triton
from mpx._kernels._dispatch import run_plain
from mpx._optim._packing import LeafStep, PackedLeaf, Packing
from mpx._optim._update_rules import Adam, Lion, Sgd
from mpx._quant._codecs import Dither, bits, from_bits
from mpx.testing import assert_trees_equal

RULES = {
    "adamw": Adam(decoupled=True),
    "adam": Adam(decoupled=False),
    "lion": Lion(),
    "sgd": Sgd(decoupled=False, nesterov=True, moments=("mu",)),
    "sgdw": Sgd(decoupled=True, nesterov=False, moments=("mu",)),
}
HYPER = dict(
    learning_rate=0.01, weight_decay=0.1, b1=0.9, b2=0.99, eps=1e-8, momentum=0.9,
    dampening=0.1, beta=0.95,
)  # fmt: skip
# Every codec of weights and of moments: f16 and f32 parameters have one in both formats.
STORED = {
    "bf16 of 24 bits": (jnp.bfloat16, np.int8, "mpx"),
    "bf16 of 32 bits": (jnp.bfloat16, np.int16, "mpx"),
    "bf16": (jnp.bfloat16, None, "mpx"),
    "bf16 of 24 bits, flashoptim": (jnp.bfloat16, np.int8, "flashoptim"),
    "bf16 of 32 bits, flashoptim": (jnp.bfloat16, np.int16, "flashoptim"),
    "f16 of 24 bits": (jnp.float16, np.int8, "mpx"),
    "f16 of 32 bits": (jnp.float16, np.int16, "flashoptim"),
    "f16": (jnp.float16, None, "mpx"),
    "f32": (jnp.float32, None, "mpx"),  # has no correction
}
BLOCK = 256
DIVIDING, ODD = (16, 64), (7, 96)

needs_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="needs jax 0.11 or later")


def make_plan(
    rule, correction=np.int8, format="mpx", group=32, dithers=True, dtype=jnp.bfloat16
):
    stored = None, None
    if correction is not None:
        stored = np.dtype(correction), np.dtype(dtype)
    packing = Packing(rule.moments, format, group, *stored)
    return LeafStep(rule, packing, dithers)


def make_case(plan, shape, dtype=jnp.bfloat16, grad_dtype=jnp.bfloat16, seed=0):
    """A leaf in the middle of training, a gradient and scalars."""
    rng = np.random.default_rng(seed)

    def normal(scale, dtype):  # rounded by NumPy: JAX compiles a program for each shape
        spread = np.exp(2 * rng.standard_normal(shape))
        return jnp.asarray((rng.standard_normal(shape) * spread * scale).astype(dtype))

    hyper = {name: jnp.float32(value) for name, value in HYPER.items()}
    coefficients = plan.rule.coefficients(hyper, jnp.float32(3))
    dither = Dither(jnp.float32(0.2), jnp.float32(0.7))
    scalars = jnp.stack([jnp.float32(0.5), *dither, *coefficients])
    param = normal(0.05, dtype)
    leaf = first_step(plan, scalars, normal(1.0, grad_dtype), param)
    return scalars, normal(1.0, grad_dtype), leaf


@dataclasses.dataclass(frozen=True)
class Unfused:
    """A function whose products are rounded before anything is added to them.

    CPUs multiply and add with one rounding where the compiler sees both together, which
    is not at the same places in two programs.
    """

    function: Any

    @property
    def group_size(self):
        return self.function.group_size

    def __call__(self, *args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        trees = []

        def flat(*arrays):
            rest = iter(arrays)
            mixed = [next(rest) if isinstance(x, jax.Array) else x for x in leaves]
            args, kwargs = treedef.unflatten(mixed)
            new, tree = jax.tree.flatten(self.function(*args, **kwargs))
            trees.append(tree)
            return new

        jaxpr, consts = open_jaxpr(jax.make_jaxpr(flat)(*arrays))
        first = bits(arrays[0][(0,) * arrays[0].ndim])
        # Which no compiler can know, as long as the first array is no constant.
        zero = (first == 0x7F123456).astype(jnp.int32)
        return trees[0].unflatten(_evaluate(jaxpr, consts, arrays, zero))


def _evaluate(jaxpr, consts, args, zero):
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def value(x):
        return x.val if isinstance(x, Literal) else known[x]

    for eqn in jaxpr.eqns:
        inputs = [value(x) for x in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit"):
            outputs = _evaluate(*open_jaxpr(eqn.params["jaxpr"]), inputs, zero)
        else:
            outputs = eval_equation(eqn, inputs)
        if eqn.primitive.name == "mul" and outputs[0].dtype == jnp.float32:
            outputs = [from_bits(bits(outputs[0]) ^ zero)]
        known |= dict(zip(eqn.outvars, outputs, strict=True))
    return [value(x) for x in jaxpr.outvars]


def interpreted(plan, scalars, grad, leaf, finite=1.0):
    rows = jnp.append(jnp.asarray(finite, jnp.float32), scalars)[None]
    (new,) = _triton.launch(plan, rows, [grad], [leaf], block=BLOCK, interpret=True)
    return new


kernel = jax.jit(interpreted, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def plain(plan, scalars, grad, leaf):
    return run_plain(plan, scalars, grad, leaf, finite=None)


@functools.partial(jax.jit, static_argnums=0)
def first_step(plan, scalars, grad, param):
    leaf = PackedLeaf(param, plan.packing.zeros(param))
    return plain(plan, scalars, grad, leaf)


@functools.partial(jax.jit, static_argnums=0)
def moments_of(plan, leaf):
    numbers = leaf.packed.numbers()
    return [numbers[name] for name in plan.rule.moments]


def assert_kernel_equals_plain(plan, case):
    scalars, grad, leaf = case
    want = plain(Unfused(plan), scalars, grad, leaf)
    assert_trees_equal(kernel(Unfused(plan), scalars, grad, leaf), want)
    moments = [moments_of(plan, x) for x in (want, leaf)]
    changed = [
        float(np.mean(np.asarray(x) != np.asarray(y)))
        for x, y in zip(*map(jax.tree.leaves, moments), strict=True)
    ]
    assert min(changed) > 0.3, "the step did nothing"


def make_model(shape=(64, 64), leaves=1, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    draw = lambda: {  # noqa: E731
        str(index): jnp.asarray(rng.standard_normal(shape).astype(dtype))
        for index in range(leaves)
    }
    return draw(), draw()
