"""How far two results of one step may be apart, and how far they are; for kernel_check.py.

The kernel and plain JAX compute the same numbers in f32 with other roundings, and store
them with the same codecs. So the new f32 weights `a` and `b` may differ by the effect of
the roundings, and what is stored, `A` and `B`, by

    |A - B| ≤ |A - a| + |a - b| + |b - B|,

where the first and the last are the error bounds of the codec. A code is a rounded
number: it may go up or down, and so may a scale of 16 bits. If the scale does, by a bf16
ulp of at most 2⁻⁷, the softsign code 254 x / (s + |x|) moves by at most 254 / 4 · 2⁻⁷,
which is half a code: still one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpx._optim._core import Step
from mpx._optim._options import master_codec, moment_codec
from mpx._optim._params import flatten_params
from mpx._optim._state import leaves_of
from mpx._optim._update_rules import Given
from mpx._quant import Block, Dither, Quantized

# In f32 a rounding is 2⁻²⁴. No number takes part in more than eight of them on its way
# to a result (`nesterov` is the longest), on either path: 16 · 2⁻²⁴.
ROUNDINGS = 2.0**-20
# How far a stored weight is from the f32 one, in ulps of the parameter, by the bits of the
# correction: the bounds that the codecs of `mpx._quant` state.
CODE = {0: 1 / 2, 8: 2.0**-8, 16: 2.0**-16}


@dataclasses.dataclass
class Found:
    """How two results differ: counts of elements, and the largest distances.

    Attributes:
        elements: How many weights were compared.
        codes: Codes of moments that differ.
        code: By how much at most.
        scales: Scales of groups that differ.
        params: Parameters that differ.
        ulp: By how many of their ulps at most.
        used: The largest difference of a weight or an f32 moment, as a fraction of what
            is allowed.
        wrong: What differs by more than is allowed.
    """

    elements: int = 0
    codes: int = 0
    code: int = 0
    scales: int = 0
    params: int = 0
    ulp: int = 0
    used: float = 0.0
    wrong: int = 0

    def __add__(self, other):
        merged = {
            field.name: (max if field.name in ("code", "ulp", "used") else sum)(
                (getattr(self, field.name), getattr(other, field.name))
            )
            for field in dataclasses.fields(Found)
        }
        return Found(**merged)


@functools.partial(jax.jit, static_argnames="rule")
def rounding_errors(rule, scalars, grad, weight, moments):
    """By how much roundings may change the new weight and moments; runs in f64.

    Every input and coefficient is moved by all the roundings it can meet, and what that
    changes is added up. So it holds for sums that cancel, and for Lion's signs, too.
    """
    inputs = jax.tree.map(lambda x: x.astype(float), (scalars, grad, weight, moments))
    flat, treedef = jax.tree.flatten(inputs)

    def step(factors):
        moved = [x * factor for x, factor in zip(flat, factors, strict=True)]
        (scale, *rest), grad, weight, moments = treedef.unflatten(moved)
        given = Given(tuple(rest), grad * scale, weight, Block())
        new = rule.average(given, moments)
        return (rule.move(given, moments, new), *new)

    exact = step(jnp.ones(len(flat)))

    def add(total, unit):
        both = zip(step(1 + ROUNDINGS * unit), step(1 - ROUNDINGS * unit), strict=True)
        changes = [
            jnp.maximum(jnp.abs(up - x), jnp.abs(down - x))
            for (up, down), x in zip(both, exact, strict=True)
        ]
        return tuple(t + c for t, c in zip(total, changes, strict=True)), None

    zeros = tuple(jnp.zeros_like(x) for x in exact)
    return lax.scan(add, zeros, jnp.eye(len(flat)))[0]


def differences(optimizer, before, grads, grad_scale, plain, kernel):
    """Compares what two paths made of the same `(params, state)`; traced, in f64.

    Returns:
        For each leaf the fields of a `Found`, but `elements`.
    """
    core = optimizer.init.__self__
    old, want, got = (stored_leaves(*tree) for tree in (before, plain, kernel))
    step = Step(core, flatten_params(before[0]), before[1], grad_scale)
    scale, *rest = step.scalars(None, True)
    coefficients = rest[len(Dither._fields) :]
    weights, moments = zip(
        *(decoded(core, leaf, before[1]) for leaf in old), strict=True
    )
    columns = [
        jnp.concatenate([x.ravel() for x in c]) for c in zip(*moments, strict=True)
    ]
    allowed = rounding_errors(
        core.rule,
        (scale, *coefficients),
        jnp.concatenate(
            [x.astype(jnp.float32).ravel() for x in flatten_params(grads).leaves]
        ),
        jnp.concatenate([x.ravel() for x in weights]),
        tuple(columns),
    )
    ends = np.cumsum([leaf.param.size for leaf in old])
    split = zip(*(jnp.split(x, ends[:-1]) for x in allowed), strict=True)
    results = []
    for room, a, b in zip(split, want, got, strict=True):
        pair = (decoded(core, leaf, before[1]) for leaf in (a, b))
        results.append(compare_leaf(room, a, b, *pair))
    return results


def found_of(elements, fields):
    """Takes the result of `differences` for one leaf from the device."""
    numbers = jax.device_get(fields)
    return Found(elements, **{key: value.item() for key, value in numbers.items()})


def stored_leaves(params, state):
    """Returns each parameter with its correction and moments."""
    pairs = zip(*leaves_of(flatten_params(params), state), strict=True)
    return [
        packing.view(leaf.packed)._replace(param=leaf.param) for leaf, packing in pairs
    ]


def decoded(core, leaf, state):
    """Returns the f32 weight and moments of a leaf."""
    shape, groups = leaf.param.shape, leaf.param.shape
    quantized = [x for x in leaf.moments if isinstance(x, Quantized)]
    if quantized:
        groups = (*quantized[0].scale.shape, -1)
    dtype = None if leaf.correction is None else leaf.correction.dtype
    master = master_codec(leaf.param.dtype, dtype, state.format)
    leaf = jax.tree.map(lambda x: x.reshape(groups) if x.shape == shape else x, leaf)
    weight = master.decode(leaf.param, leaf.correction, Block())
    moments = [
        moment_codec(name, bool(quantized), state.format).decode(stored, Block())
        for name, stored in zip(core.rule.moments, leaf.moments, strict=True)
    ]
    return weight, moments


def compare_leaf(room, a, b, plain, kernel):
    """Compares two results for one leaf; see `differences`."""
    (weight, moments), (other, others) = plain, kernel
    bits = 0 if a.correction is None else 8 * a.correction.dtype.itemsize
    ends = [x.reshape(weight.shape) for x in (weight, other, a.param, b.param)]
    ulp = ulp_of(functools.reduce(jnp.maximum, map(magnitude, ends)), a.param.dtype)
    # |A - B| ≤ |A - a| + |a - b| + |b - B| for the weights a, b that are stored as A, B. A
    # threshold that both paths share takes the place of one half: no more than that.
    checks = [excess(weight, other, room[0], 2 * CODE[bits] * ulp)]
    checks.append(excess(a.param, b.param, room[0], 2 * CODE[0] * ulp))
    distance = steps_apart(a.param, b.param)
    codes = code = scales = wrong = jnp.zeros((), int)
    for error, x, y, one, two in zip(
        room[1:], a.moments, b.moments, moments, others, strict=True
    ):
        if not isinstance(x, Quantized):
            checks.append(excess(one, two, error, ulp_of(one, jnp.float32)))
            continue
        apart = jnp.abs(x.codes.astype(int) - y.codes.astype(int))
        codes, code = codes + jnp.sum(apart > 0), jnp.maximum(code, jnp.max(apart))
        scales += jnp.sum(x.scale != y.scale)
        # A scale of 16 bits is a rounded number: that may go up or down.
        narrow = x.scale.dtype.itemsize == 2
        units = 1 if narrow else ROUNDINGS * 2**24
        wrong += jnp.sum(apart > 1) + jnp.sum(steps_apart(x.scale, y.scale) > units)
    return {
        "codes": codes,
        "code": code,
        "scales": scales,
        "params": jnp.sum(distance > 0),
        "ulp": jnp.max(distance),
        "used": functools.reduce(jnp.maximum, (jnp.max(used) for used in checks)),
        "wrong": wrong + sum(jnp.sum(~(used <= 1)) for used in checks),
    }


def excess(x, y, room, unit):
    """Returns differences over what is allowed; inf where one is not finite alone."""
    x, y, unit = (z.ravel().astype(float) for z in (x, y, unit))
    same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    share = jnp.where(finite, jnp.abs(x - y) / (room + unit), jnp.inf)
    return jnp.where(same, 0.0, share)


def magnitude(x):
    return jnp.abs(x.astype(float))


def ulp_of(x, dtype):
    """Returns the distance of the numbers of `dtype` around `x`."""
    info = jnp.finfo(dtype)
    _, exponent = jnp.frexp(magnitude(x))
    lowest = jnp.maximum(exponent - 1, info.minexp)
    return jnp.ldexp(jnp.ones(x.shape), lowest - info.nmant)


def steps_apart(x, y):
    """Counts the numbers of their dtype between two arrays; NaNs are equal."""
    dtype = jnp.dtype(f"i{x.dtype.itemsize}")

    def order(z):
        pattern = lax.bitcast_convert_type(z, dtype).astype(jnp.int64)
        return jnp.where(pattern < 0, jnp.iinfo(dtype).min - pattern, pattern)

    apart = jnp.abs(order(x) - order(y))
    return jnp.where(jnp.isnan(x) & jnp.isnan(y), 0, apart)
