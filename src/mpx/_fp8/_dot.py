"""The 8-bit matmul and its derivative, with scales for tensors or rows.

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from mpx._fp8._blocks import block_operands, block_product
from mpx._fp8._operands import (
    Axes,
    MatmulSpec,
    Operand,
    Shared,
    as_bytes,
    as_codes,
    differentiable_once,
    largest_magnitude,
    summed_last,
    to_fp8,
)
from mpx._jax._compat import varying_axes
from mpx._jax._devices import in_order
from mpx._jax._sharding import axes_of, in_auto_axes, spec_of

Operands = list[tuple[Operand, Operand]]
"""Both operands in 8 bits: for the product, and for the backward pass."""
_FAST = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
_FULL = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def _multiply(
    a: Operand,
    b: Operand,
    dtype: np.dtype,
    preset: lax.DotAlgorithmPreset,
    out_sharding: NamedSharding | None,
) -> Array:
    """Returns the product of two operands in `dtype`."""
    if a.rows is not None:
        return block_product(a, b, dtype)
    a, b = summed_last(a, b), summed_last(b, a)
    # An f16 result could overflow before it is scaled; bf16 cannot, and spares a pass.
    wide = np.dtype(jnp.float32) if dtype == np.float16 else dtype
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=((a.summed, b.summed), (a.batch, b.batch)),
        out_sharding=out_sharding,
    )

    def on_cuda(x: Array, y: Array) -> Array:
        # The preset is what makes it one cuBLASLt call: without it XLA tries Triton
        # kernels for half a minute, and ignores the accumulator that was asked for.
        return dot(x, y, precision=preset, preferred_element_type=wide)

    def elsewhere(x: Array, y: Array) -> Array:
        # The same numbers: products of 8-bit numbers are exact in f32.
        return dot(x, y, preferred_element_type=jnp.float32).astype(wide)

    kind = a.codes.dtype
    if kind == jnp.int8:
        # XLA would fuse the rounding into the matmul: four times as slow on an H200.
        codes = lax.optimization_barrier((in_order(a.codes), in_order(b.codes)))
        # The sum is exact in s32. Its scales are no powers of two: they need f32.
        out, wide = dot(*codes, preferred_element_type=jnp.int32), np.float32
        out = out.astype(wide)
    elif kind.itemsize > 1:
        return dot(a.codes, b.codes, preferred_element_type=dtype)
    else:
        out = lax.platform_dependent(a.codes, b.codes, cuda=on_cuda, default=elsewhere)
    if a.scale.ndim == b.scale.ndim == 0:
        # One number, though it may underflow: XLA folds one into the matmul, and makes
        # of a second a pass over the result (seen in what it compiles for an H200).
        return (out * (a.scale * b.scale).astype(wide)).astype(dtype)
    rows, columns = _row_scale(a), _row_scale(b)
    rows = lax.expand_dims(rows, range(rows.ndim, out.ndim))
    first = len(a.batch)
    columns = lax.expand_dims(columns, range(first, first + out.ndim - columns.ndim))

    def scaled(out: Array, rows: Array, columns: Array) -> Array:
        return (out * rows.astype(wide) * columns.astype(wide)).astype(dtype)

    # The columns of a weight may lie on the axis of a mesh on which the rows lie.
    return in_auto_axes(scaled, jax.typeof(out).sharding)(out, rows, columns)


def _row_scale(x: Operand) -> Array:
    """Returns the scales of rows with their axes as in a product, batch axes first."""
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

    `seen` are the largest magnitudes of activation, weight and gradient in earlier steps,
    f32[3]; `None` to scale by what is there now. The gradient of the `probe`, f32[3] of any
    value, is not one: it holds the three largest magnitudes of this step. `shared` are
    tensors that other matmuls of the same trace have quantised.
    """
    shared = {} if shared is None or seen is not None else shared
    operands = []
    for side, x in enumerate((lhs, rhs)):
        role, batch = spec.role(side), spec.dimensions[1][side]
        groups = spec.dimensions[0][side], spec.free_axes(side, x.ndim)
        key = (id(x), role, groups)
        if key not in shared:
            still = lax.stop_gradient(x)
            made = _quantize(spec, role, still, groups, batch=batch, seen=seen)
            # Not in one program, which XLA for CPUs cannot compile for 4 bits.
            shared[key] = x, as_bytes(made)
        operands.append(shared[key][1])
    return _jitted_dot(spec, (lhs, rhs), operands, seen, probe)


# Layers of one shape are traced once: what `jax.jit` has traced, and its derivative, it
# finds again, and inlined it leaves no call behind.
@functools.partial(
    jax.jit, static_argnums=(0, 1, 3), static_argnames="batch", inline=True
)
def _quantize(
    spec: MatmulSpec, role: str, x: Array, groups: tuple[Axes, Axes], **options: Any
) -> tuple[Operand, Operand]:
    if spec.recipe.in_blocks:
        return block_operands(spec, role, x, groups)
    return to_fp8(spec, role, x, groups, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(spec: MatmulSpec, *args: Any) -> Array:
    return _forward(spec, *args)[0]


def _forward(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: Operands,
    seen: Array | None,
    probe: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    # The codes come from these sides, though no derivative knows it.
    sides, operands = differentiable_once((sides, operands))
    lhs, rhs = (as_codes(x[0]) for x in operands)
    out = _multiply(lhs, rhs, spec.dtype, _FAST, spec.out_sharding)
    observed = None
    if probe is not None:
        activation, weight = sides[1 - spec.weight_side], sides[spec.weight_side]
        found = (largest_magnitude(x, finite=False) for x in (activation, weight))
        observed = [probe, *found]
    return out, ([x[1] for x in operands], seen, observed)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(
    spec: MatmulSpec, residuals: tuple[Any, ...], grad: Array
) -> tuple[Any, ...]:
    saved, seen, observed = residuals
    lhs, rhs = map(as_codes, saved)
    # The axes of `grad` are batch axes, those of the left operand and those of the right.
    batch = tuple(range(len(lhs.batch)))
    rows = tuple(range(len(batch), len(batch) + len(lhs.summed)))
    groups = tuple(range(len(batch) + len(rows), grad.ndim)), rows
    quantized = _quantize(spec, "grad", grad, groups, batch=batch, seen=seen)
    grads = []
    for side, other in enumerate((rhs, lhs)):
        # What an operand sums over here was left over in the forward pass.
        free, contracted = (lhs, rhs)[side].summed, spec.dimensions[0][side]
        rank = len(batch) + len(free) + len(contracted)
        grad_first, axes = _axes_of_gradient(spec, side, rank)
        factors = (quantized[side], other) if grad_first else (other, quantized[side])
        sharding = spec.shardings[side]
        if sharding is not None:
            entries = axes_of(sharding.spec, len(axes))
            sharding = NamedSharding(sharding.mesh, spec_of(entries[i] for i in axes))
        wide = spec.weight_grad if side == spec.weight_side else None
        out = _multiply(*factors, wide or spec.dtype, _FULL, sharding)
        # A wider sum over devices is rounded after it.
        out = lax.transpose(out, [int(i) for i in np.argsort(axes)])
        grads.append(out.astype(spec.dtype))
    dseen = None if seen is None else jnp.zeros_like(seen)
    dprobe = None
    if observed is not None:
        probe, *found = observed
        dprobe = jnp.stack([*found, largest_magnitude(grad, finite=False)])
        # The devices of a `shard_map` may share a state.
        if shared := varying_axes(jax.typeof(dprobe)) - varying_axes(jax.typeof(probe)):
            dprobe = lax.pmax(dprobe, tuple(sorted(shared)))
    (dlhs, drhs), dprobe = differentiable_once((grads, dprobe))
    return (dlhs, drhs), None, dseen, dprobe


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
