"""The 8-bit matmul and its derivative.

With `codes · scale ≈ tensor`, the three products of a linear layer are

    y  = (x̂ · ŵ) · s_x s_w      e4m3 × e4m3, fast accumulation
    dx = (ĝ · ŵᵀ) · s_g s_w     e5m2 × e4m3, full accumulation
    dw = (x̂ᵀ · ĝ) · s_x s_g     e5m2 × e4m3, full accumulation

where the codes x̂ and ŵ are all that the forward pass saves. They are made outside
what is differentiated, so that matmuls of one input share them. The products are written as
`lax.dot_general` on 8-bit operands. Quantising and dequantising around a bf16 product
would be deleted by XLA on a GPU, which then silently computes in bf16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from mpx._fp8._operands import (
    Axes,
    MatmulSpec,
    Operand,
    Shared,
    as_bytes,
    as_codes,
    differentiable_once,
    summed_last,
    to_fp8,
)
from mpx._fp8._scales import largest_magnitude
from mpx._jax._sharding import axes_of, spec_of

Operands = list[tuple[Operand, Operand]]
"""Both operands in 8 bits: for the product, and for the backward pass."""


def _multiply(
    a: Operand,
    b: Operand,
    dtype: np.dtype,
    *,
    fast: bool,
    out_sharding: NamedSharding | None,
) -> Array:
    """Returns the product of two operands in `dtype`."""
    a, b = summed_last(a, b), summed_last(b, a)
    # An f16 result could overflow before it is scaled; bf16 cannot, and spares a pass.
    wide = np.dtype(jnp.float32) if dtype == np.float16 else dtype
    preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    if fast:
        preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=((a.summed, b.summed), (a.batch, b.batch)),
        out_sharding=out_sharding,
    )
    if a.scale is None or b.scale is None:  # as JAX itself differentiates
        return dot(a.codes, b.codes, preferred_element_type=dtype)

    def on_cuda(x: Array, y: Array) -> Array:
        # The preset is what makes it one cuBLASLt call: without it XLA tries Triton
        # kernels for half a minute, and ignores the accumulator that was asked for.
        return dot(x, y, precision=preset, preferred_element_type=wide)

    def elsewhere(x: Array, y: Array) -> Array:
        # The same numbers: products of 8-bit numbers are exact in f32.
        return dot(x, y, preferred_element_type=jnp.float32).astype(wide)

    out = lax.platform_dependent(a.codes, b.codes, cuda=on_cuda, default=elsewhere)
    if a.scale.ndim == b.scale.ndim == 0:
        # One number, though it may underflow: XLA folds one into the matmul, and makes
        # of a second a pass over the result (seen in what it compiles for an H200).
        return (out * (a.scale * b.scale).astype(wide)).astype(dtype)
    rows, columns = _row_scale(a), _row_scale(b)
    rows = lax.expand_dims(rows, range(rows.ndim, out.ndim))
    first = len(a.batch)
    columns = lax.expand_dims(columns, range(first, first + out.ndim - columns.ndim))
    return (out * rows.astype(wide) * columns.astype(wide)).astype(dtype)


def _row_scale(x: Operand) -> Array:
    """Returns the scales of rows with their axes as in a product, batch axes first."""
    assert x.scale is not None
    rank, summed = x.scale.ndim, len(x.summed)
    free = [i for i in range(rank) if i not in (*x.summed, *x.batch)]
    scale = lax.transpose(x.scale, (*x.batch, *free, *x.summed))
    return lax.squeeze(scale, range(rank - summed, rank))


def fp8_dot(
    spec: MatmulSpec,
    lhs: Array,
    rhs: Array,
    seen: Array | None,
    probe: Array | None,
    *,
    shared: Shared | None = None,
) -> Array:
    """Returns `lax.dot_general(lhs, rhs)` computed from 8-bit operands.

    Args:
        spec: What is static.
        lhs: The left operand, in the compute dtype.
        rhs: The right operand, in the compute dtype.
        seen: f32[3], the largest magnitudes of activation, weight and gradient in
            earlier steps; `None` to scale by what is there now.
        probe: f32[3] of any value. Its gradient is not one: it is the three largest
            magnitudes of this step. `None` if they are not needed.
        shared: Tensors that other matmuls have quantised, of the same trace.
    """
    shared = {} if shared is None or seen is not None else shared
    operands = []
    for side, x in enumerate((lhs, rhs)):
        groups = spec.dimensions[0][side], spec.free_axes(side, x.ndim)
        key = (id(x), spec.role(side), groups)
        if key not in shared:
            still, batch = lax.stop_gradient(x), spec.dimensions[1][side]
            made = _quantize(
                spec, spec.role(side), still, groups, batch=batch, seen=seen
            )
            shared[key] = x, made
        operands.append(shared[key][1])
    return _jitted_dot(spec, (lhs, rhs), operands, _Maxima(seen, probe))


# Layers of one shape are traced once: what `jax.jit` has traced, and its derivative, it
# finds again, and inlined it leaves no call behind.
@functools.partial(
    jax.jit, static_argnums=(0, 1, 3), static_argnames="batch", inline=True
)
def _quantize(*args: Any, **options: Any) -> tuple[Operand, Operand]:
    return as_bytes(to_fp8(*args, **options))


class _Maxima(NamedTuple):
    """Largest magnitudes of earlier steps, and the probe for those of now."""

    seen: Array | None
    probe: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: Operands,
    maxima: _Maxima,
) -> Array:
    return _forward(spec, sides, operands, maxima)[0]


class _Residuals(NamedTuple):
    """Residuals of the backward pass: operands as it will use them, and their maxima."""

    operands: list[Operand]
    seen: Array | None
    observed: tuple[Array, Array] | None


def _forward(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: Operands,
    maxima: _Maxima,
) -> tuple[Array, _Residuals]:
    # The codes come from these sides, though no derivative knows it.
    sides, operands = differentiable_once((sides, operands))
    lhs, rhs = (as_codes(spec, side, x[0]) for side, x in enumerate(operands))
    out = _multiply(lhs, rhs, spec.out_dtype, fast=True, out_sharding=spec.out_sharding)
    saved = [x[1] for x in operands]
    activation, weight = sides[1 - spec.weight_side], sides[spec.weight_side]
    if spec.recipe.weight_grad == "compute":
        quantized = saved[1 - spec.weight_side]
        axes = spec.free_axes(1 - spec.weight_side, activation.ndim)
        saved[1 - spec.weight_side] = Operand(activation, None, axes, quantized.batch)
    observed = None
    if maxima.probe is not None:
        observed = largest_magnitude(activation), largest_magnitude(weight)
    return out, _Residuals(saved, maxima.seen, observed)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(spec: MatmulSpec, residuals: _Residuals, grad: Array) -> tuple[Any, ...]:
    lhs, rhs = (as_codes(spec, side, x) for side, x in enumerate(residuals.operands))
    # The axes of `grad` are batch axes, those of the left operand and those of the right.
    batch = tuple(range(len(lhs.batch)))
    rows = tuple(range(len(batch), len(batch) + len(lhs.summed)))
    groups = tuple(range(len(batch) + len(rows), grad.ndim)), rows
    quantized = to_fp8(spec, "grad", grad, groups, batch=batch, seen=residuals.seen)
    grads = []
    for side, other in enumerate((rhs, lhs)):
        mine = quantized[side]
        if other.scale is None:
            mine = Operand(grad.astype(other.codes.dtype), None, groups[side], batch)
        rank = (lhs, rhs)[side].codes.ndim
        grad_first, axes = _axes_of_gradient(spec, side, rank)
        factors = (mine, other) if grad_first else (other, mine)
        sharding = spec.shardings[side]
        if sharding is not None:
            entries = axes_of(sharding.spec, len(axes))
            sharding = NamedSharding(sharding.mesh, spec_of(entries[i] for i in axes))
        out = _multiply(
            *factors, spec.grad_dtype(side), fast=False, out_sharding=sharding
        )
        # A wider sum over devices is rounded after it.
        out = lax.transpose(out, [int(i) for i in np.argsort(axes)])
        grads.append(out.astype(spec.dtypes[side]))
    dseen = None if residuals.seen is None else jnp.zeros_like(residuals.seen)
    dprobe = None
    if residuals.observed is not None:
        dprobe = jnp.stack([*residuals.observed, largest_magnitude(grad)])
    (dlhs, drhs), dprobe = differentiable_once((grads, dprobe))
    return (dlhs, drhs), None, _Maxima(dseen, dprobe)


_dot.defvjp(_forward, _backward)
_jitted_dot = jax.jit(_dot, static_argnums=0, inline=True)


def _axes_of_gradient(spec: MatmulSpec, side: int, rank: int) -> tuple[bool, Axes]:
    """Returns whether `grad` comes first in the product for the gradient of an operand.

    The second result are the axes of the operand in the order of that product. Of the two
    orders of the factors the one is taken whose result needs no transpose: XLA folds the
    scale into a matmul only if nothing lies between.
    """
    contracted, batch = spec.dimensions
    free = spec.free_axes(side, rank)
    # What is left of the other operand comes out in its order, not in this side's.
    order = np.argsort(contracted[1 - side], kind="stable")
    rest = tuple(contracted[side][i] for i in order)
    first, last = batch[side] + free + rest, batch[side] + rest + free
    if last == tuple(range(rank)) != first:
        return False, last
    return True, first
