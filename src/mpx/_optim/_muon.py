"""Muon: the momentum of each matrix, orthogonalised, before the step of its elements."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PyTree

from mpx._jax._sharding import one_device_each, one_stack, sharded_as
from mpx._jax._tree import dtype_of, shape_of
from mpx._kernels import _dispatch as _kernels
from mpx._optim._options import F32, PARAM_DTYPES, FlatParams
from mpx._optim._packing import LeafStep, decode_moment
from mpx._optim._update_rules import Muon

_FP8 = np.dtype(jnp.float8_e4m3fn)
Matrices = PyTree | Callable[[PyTree], PyTree] | None
"""The axes of matrices: a tree of `optax.contrib.MuonDimensionNumbers`, or a function."""


def muon_rules(rule: Muon, matrices: Matrices, flat: FlatParams) -> list[Muon | None]:
    """Returns the rule of each parameter, `None` for those that are no matrices.

    `matrices` may be the beginning of a tree. Without it, arrays of two axes are matrices.
    """
    found: list[Any] = [
        ((0,), (1,)) if len(shape_of(x)) == 2 else None for x in flat.leaves
    ]
    if matrices is not None:
        found = flat.each(matrices, "`matrices`", _is_axes)

    def own(name: str, leaf: PyTree, axes: Any) -> Muon | None:
        if axes is None or dtype_of(leaf) not in PARAM_DTYPES:
            return None
        if not isinstance(axes, tuple):
            raise TypeError(
                "`matrices` must have an `optax.contrib.MuonDimensionNumbers`, or None, for "
                f"each parameter, but `{name}` has {axes!r}."
            )
        rank = len(shape_of(leaf))
        sides = [(x,) if isinstance(x, int) else tuple(x) for x in axes]
        given = [axis for side in sides for axis in side]
        inputs, outputs = ([axis % max(rank, 1) for axis in side] for side in sides)
        is_matrix = inputs and outputs and not {*inputs} & {*outputs}
        if not is_matrix or not all(-rank <= axis < rank for axis in given):
            raise ValueError(
                f"`matrices` gives the axes {sides} for `{name}`, of shape "
                f"{shape_of(leaf)}. Muon needs at least one axis for the inputs and one, "
                "which is another, for the outputs. Give None to step it with AdamW."
            )
        return dataclasses.replace(rule, inputs=tuple(inputs), outputs=tuple(outputs))

    return list(map(own, flat.names, flat.leaves, found))


def _is_axes(x: object) -> bool:
    # A variable of NNX has the attributes of what it holds.
    return isinstance(x, tuple) and hasattr(x, "reduction_axis")


def run(
    jobs: Sequence[_kernels.Job],
    *,
    finite: Array | None = None,
    backend: _kernels.Backend = "auto",
) -> list[PyTree]:
    """Runs steps; matrices that Muon steps get the direction beside their gradient."""
    jobs, stacks = list(jobs), dict[int, Array]()
    alike: dict[tuple[int, ...], list[int]] = {}
    rules = {index: rule for index, job in enumerate(jobs) if (rule := _rule(job))}
    for index, rule in rules.items():
        job, leaf = jobs[index], jobs[index].leaf
        if job.layer is not None:
            leaf = _kernels.layer_of(leaf, job.layer)
        stacks[index] = _stack(job.scalars, job.grad, leaf, rule=rule, body=job.body)
        alike.setdefault(stacks[index].shape[1:], []).append(index)
    for indices in alike.values():
        func = functools.partial(newton_schulz, rule=rules[indices[0]])
        call = _kernels.plain_under_vmap(
            functools.partial(one_device_each, func), functools.partial(one_stack, func)
        )
        found = call([stacks[index] for index in indices])
        for index, stack in zip(indices, found, strict=True):
            grad, rule = jobs[index].grad, rules[index]
            scaled = (stack * rule.scale(grad.shape)).astype(stack.dtype)
            towards = sharded_as(rule.from_stack(scaled, grad.shape), grad)
            jobs[index] = jobs[index]._replace(grad=(grad, towards))
    return _kernels.run(jobs, finite=finite, backend=backend)


def _rule(job: _kernels.Job) -> Muon | None:
    """Returns the rule of a step by Muon, for one layer with the axes that a layer has."""
    rule = job.body.rule if isinstance(job.body, LeafStep) else None
    if not isinstance(rule, Muon) or job.layer is None:
        return rule if isinstance(rule, Muon) else None
    sides = [tuple(axis - 1 for axis in side) for side in (rule.inputs, rule.outputs)]
    if any(axis < 0 for side in sides for axis in side):
        raise ValueError(
            f"The loss scans over the first axis of `{job.name}`, which Muon takes for one "
            "of a matrix, so `release` cannot step it layer by layer. Give the axes of "
            "inputs and outputs in `matrices`, with None if its layers are vectors."
        )
    return dataclasses.replace(rule, inputs=sides[0], outputs=sides[1])


# Under jit, so that leaves of equal types are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("rule", "body"))
def _stack(
    scalars: Array, grad: Array, leaf: PyTree, *, rule: Muon, body: LeafStep
) -> Array:
    """Returns the matrices of a leaf that are to be orthogonalised: (count, rows, columns)."""
    moment = leaf.packed.numbers()["mu"]
    grad_scale, _, _, *coefficients = scalars
    scaled = sharded_as(grad, leaf.param).astype(F32) * grad_scale
    mu = decode_moment("mu", moment, body.packing.format)
    direction = rule.direction(tuple(coefficients), scaled, mu)
    return rule.as_stack(direction.astype(rule.stored))


def newton_schulz(x: Array, rule: Muon) -> Array:
    """Orthogonalises matrices (count, rows, columns): their singular values become about 1.

    Norms are computed in f32 and matmuls in `rule.dtype`; for fp8 with a scale a matrix.
    """
    rows, columns = x.shape[1:]
    product = _fp8_product if rule.dtype == _FP8 else jnp.matmul
    tall = rows > columns
    x = (x.mT if tall else x).astype(F32)
    # The square of a number above 2⁶⁴ would be infinite.
    peak = jnp.max(jnp.abs(x), axis=(1, 2), keepdims=True, initial=0.0)
    peak = jnp.where(peak == 0, 1.0, peak)
    x = x / peak
    norm = jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True))
    x = (x / (norm + rule.eps / peak)).astype(rule.stored)

    # In f32: the coefficients, rounded to bf16, would be those of another polynomial.
    def plus(a: float, x: Array, b: float, y: Array) -> Array:
        return (a * x.astype(F32) + b * y.astype(F32)).astype(x.dtype)

    for a, b, c in rule.newton_schulz:
        square = product(x, x.mT)
        # `square` is symmetric; its transpose saves fp8 a copy.
        factor = plus(b, square, c, product(square, square.mT))
        x = plus(a, x, 1.0, product(factor, x))
    return x.mT if tall else x


def _fp8_product(x: Array, y: Array) -> Array:
    """Returns `x @ y` of matrices, from codes that are both summed over their last axis."""
    (x, x_scale), (y, y_scale) = _quantized(x), _quantized(y.mT)

    def dot(preset: lax.DotAlgorithmPreset | None, x: Array, y: Array) -> Array:
        axes = ((2,), (2,)), ((0,), (0,))
        wide = F32 if preset is None else jnp.bfloat16
        out = lax.dot_general(x, y, axes, preset, preferred_element_type=wide)
        return out.astype(jnp.bfloat16)

    # The preset selects cuBLASLt. Without it XLA tunes its own kernels for minutes.
    fast = functools.partial(dot, lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM)
    plain = functools.partial(dot, None)
    out = lax.platform_dependent(x, y, cuda=fast, default=plain)
    return (out.astype(F32) * (x_scale * y_scale)).astype(out.dtype)


def _quantized(x: Array) -> tuple[Array, Array]:
    """Returns the codes of matrices in e4m3, and the scale of each."""
    x = x.astype(F32)
    peak = jnp.max(jnp.abs(x), axis=(1, 2), keepdims=True, initial=0.0)
    scale = jnp.where(peak == 0, 1.0, peak / 448)
    return (x / scale).astype(_FP8), scale
