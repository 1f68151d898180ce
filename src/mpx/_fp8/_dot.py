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
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from mpx._fp8._layouts import turned_for
from mpx._fp8._maxima import maxima_of
from mpx._fp8._operands import (
    Axes,
    Dimensions,
    Fp8Tensor,
    MatmulSpec,
    Shared,
    as_bytes,
    as_codes,
    differentiable_once,
    to_fp8,
)
from mpx._jax._compat import has_explicit_axes


def _multiply(
    a: Fp8Tensor,
    b: Fp8Tensor,
    dimensions: Dimensions,
    dtype: np.dtype,
    *,
    fast: bool,
    out_sharding: Any = None,
    gathered: int | None = None,
) -> Array:
    """Returns the product of two quantised tensors in `dtype`.

    `gathered` is the side that may have to be gathered, and is turned after that.
    """
    # An f16 result could overflow before it is scaled; bf16 cannot, and spares a pass.
    wide = np.dtype(jnp.float32) if dtype == np.float16 else dtype
    preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
    if fast:
        preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    dot = functools.partial(lax.dot_general, out_sharding=out_sharding)

    def on_cuda(x: Array, y: Array) -> Array:
        # The preset is what makes it one cuBLASLt call: without it XLA tries Triton
        # kernels for half a minute, and ignores the accumulator that was asked for.
        return dot(x, y, turned, precision=preset, preferred_element_type=wide)

    def elsewhere(x: Array, y: Array) -> Array:
        # The same numbers: products of 8-bit numbers are exact in f32.
        return dot(x, y, turned, preferred_element_type=jnp.float32).astype(wide)

    x, x_axes = a.summed_last(dimensions[0][0])
    y, y_axes = b.summed_last(dimensions[0][1])
    if gathered == 0:
        x, x_axes = _turned(x, x_axes, y, y_axes)
    if gathered == 1:
        y, y_axes = _turned(y, y_axes, x, x_axes)
    turned: Dimensions = ((x_axes, y_axes), dimensions[1])
    out = lax.platform_dependent(x, y, cuda=on_cuda, default=elsewhere)
    for scale in _output_scales(a, b, dimensions, out.ndim):
        out = out * scale.astype(wide)
    return out.astype(dtype)


def _turned(codes: Array, axes: Axes, other: Array, summed: Axes) -> tuple[Array, Axes]:
    """Returns the codes of a weight with the axes last that are summed over, and these."""
    count = len(axes)
    if sorted(axes) != list(range(count)) or count == codes.ndim:
        return codes, axes
    last = tuple(axis + codes.ndim - count for axis in axes)
    return turned_for(codes, other, count, summed), last


def _output_scales(
    a: Fp8Tensor, b: Fp8Tensor, dimensions: Dimensions, rank: int
) -> list[Array]:
    """Returns the scales of a product, shaped to be multiplied with it."""
    if a.scale.ndim == b.scale.ndim == 0:
        # One number, though it may underflow: XLA folds one into the matmul, and makes
        # of a second a pass over the result (seen in what it compiles for an H200).
        return [a.scale * b.scale]
    scales = []
    for x, axes, batch in zip((a, b), *dimensions, strict=True):
        # As in the product: the batch axes come first.
        free = [i for i in range(x.ndim) if i not in (*axes, *batch)]
        scale = lax.transpose(x.scale, (*batch, *free, *axes))
        scales.append(lax.squeeze(scale, range(scale.ndim - len(axes), scale.ndim)))
    rows, columns = scales
    first = len(dimensions[1][0])
    return [
        lax.expand_dims(rows, tuple(range(rows.ndim, rank))),
        lax.expand_dims(columns, tuple(range(first, first + rank - columns.ndim))),
    ]


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
        probe: f32[3] of any value, or f32[devices, 3]. Its gradient is not one: it is the
            three largest magnitudes of this step, or those of what each device holds.
            `None` if they are not needed.
        shared: Tensors that other matmuls have quantised, of the same trace.
    """
    shared = {} if shared is None or seen is not None else shared
    operands = []
    for side, x in enumerate((lhs, rhs)):
        axes = spec.dimensions[0][side] if spec.by_row else ()
        key = (id(x), spec.role(side), axes, spec.leading_axes(side, x.ndim))
        if key not in shared:
            summed, leading = spec.dimensions[0][side], key[-1]
            codes = _quantize(
                spec,
                spec.role(side),
                lax.stop_gradient(x),
                summed,
                seen,
                leading=leading,
            )
            shared[key] = x, codes
        operands.append(shared[key][1])
    return _jitted_dot(spec, (lhs, rhs), operands, _Maxima(seen, probe))


# Layers of one shape are traced once: what `jax.jit` has traced, and its derivative, it
# finds again, and inlined it leaves no call behind.
@functools.partial(
    jax.jit, static_argnums=(0, 1, 3), static_argnames="leading", inline=True
)
def _quantize(
    spec: MatmulSpec,
    role: str,
    x: Array,
    axes: Axes,
    seen: Array | None,
    *,
    leading: int | None,
) -> Fp8Tensor:
    return as_bytes(to_fp8(spec, role, x, axes, seen, leading=leading))


class _Maxima(NamedTuple):
    """Largest magnitudes of earlier steps, and the probe for those of now."""

    seen: Array | None
    probe: Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: list[Fp8Tensor],
    maxima: _Maxima,
) -> Array:
    return _forward(spec, sides, operands, maxima)[0]


class _Residuals(NamedTuple):
    """Residuals of the backward pass: operands as it will use them, and their maxima."""

    operands: tuple[Any, Any]
    seen: Array | None
    observed: tuple[Array, Array] | None


def _forward(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: list[Fp8Tensor],
    maxima: _Maxima,
) -> tuple[Array, _Residuals]:
    # The codes come from these sides, though no derivative knows it.
    sides, operands = differentiable_once((sides, operands))
    codes = [as_codes(spec, side, x) for side, x in enumerate(operands)]
    out = _multiply(
        codes[0],
        codes[1],
        spec.dimensions,
        spec.out_dtype,
        fast=True,
        out_sharding=spec.out_sharding,
        gathered=spec.weight_side if spec.one_order else None,
    )
    # The backward products sum over the other axes.
    free = spec.free_axes((sides[0].ndim, sides[1].ndim))
    saved: list[Any] = [x.needed_for(axes) for x, axes in zip(codes, free, strict=True)]
    if spec.by_row:
        # These need scales of their own.
        saved = [
            to_fp8(spec, spec.role(i), sides[i], free[i], maxima.seen) for i in (0, 1)
        ]
    if spec.recipe.weight_grad == "compute":
        saved[1 - spec.weight_side] = sides[1 - spec.weight_side]
    observed = None
    if maxima.probe is not None:
        shape = maxima.probe.shape[:-1]
        activation, weight = sides[1 - spec.weight_side], sides[spec.weight_side]
        observed = maxima_of(activation, shape), maxima_of(weight, shape)
    return out, _Residuals(as_bytes((saved[0], saved[1])), maxima.seen, observed)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _backward(spec: MatmulSpec, residuals: _Residuals, grad: Array) -> tuple[Any, ...]:
    operands = [
        as_codes(spec, side, x) if isinstance(x, Fp8Tensor) else x
        for side, x in enumerate(residuals.operands)
    ]
    ranks = operands[0].ndim, operands[1].ndim
    per_tensor = None
    if not spec.by_row:
        # Its leading axes are those of the left operand, over which the product for the
        # right one sums. Without an 8-bit product there they are not turned, nor with
        # batch axes, which would have to stay in front.
        leading = len(spec.free_axes(ranks)[0])
        turns = isinstance(operands[0], Fp8Tensor) and not spec.dimensions[1][0]
        turned = leading if turns else None
        per_tensor = to_fp8(spec, "grad", grad, (), residuals.seen, leading=turned)
    grads = []
    for side, product in enumerate(_transposed(spec, *ranks)):
        other = operands[1 - side]
        axes = product.dimensions[0][0 if product.grad_first else 1]
        if not isinstance(other, Fp8Tensor):
            mine: Any = grad.astype(other.dtype)
        elif per_tensor is not None:
            mine = per_tensor
        else:
            mine = to_fp8(spec, "grad", grad, axes, residuals.seen)
        factors = (mine, other) if product.grad_first else (other, mine)
        gathered = None
        if spec.one_order and side != spec.weight_side:
            gathered = 1 if product.grad_first else 0
        multiply = functools.partial(_multiply, fast=False, gathered=gathered)
        if not isinstance(other, Fp8Tensor):
            multiply = _in_compute_dtype
        out = multiply(
            *factors,
            product.dimensions,
            spec.grad_dtype(side),
            out_sharding=_sharding_before(operands[side], spec, side, product.order),
        )
        # A wider sum over devices is rounded after it.
        grads.append(lax.transpose(out, product.order).astype(spec.dtypes[side]))
    dseen = None if residuals.seen is None else jnp.zeros_like(residuals.seen)
    dprobe = None
    if residuals.observed is not None:
        largest = maxima_of(grad, residuals.observed[0].shape)
        dprobe = jnp.stack([*residuals.observed, largest], axis=-1)
    (dlhs, drhs), dprobe = differentiable_once((grads, dprobe))
    return (dlhs, drhs), None, _Maxima(dseen, dprobe)


_dot.defvjp(_forward, _backward)
_jitted_dot = jax.jit(_dot, static_argnums=0, inline=True)


def _in_compute_dtype(
    a: Any, b: Any, dimensions: Dimensions, dtype: np.dtype, *, out_sharding: Any
) -> Array:
    """Returns a product as JAX itself would differentiate it."""
    return lax.dot_general(
        a, b, dimensions, preferred_element_type=dtype, out_sharding=out_sharding
    )


class _Product(NamedTuple):
    """How the gradient of one operand is computed from the other and from `grad`.

    Attributes:
        grad_first: Whether `grad` is the left operand of the product.
        dimensions: The dimension numbers of the product.
        order: The permutation that puts the axes of its result in order.
    """

    grad_first: bool
    dimensions: Dimensions
    order: Axes


def _transposed(spec: MatmulSpec, lhs_rank: int, rhs_rank: int) -> list[_Product]:
    """Returns the products that give the gradients of both operands.

    Of the two orders of the factors the one is taken whose result needs no transpose:
    XLA folds the scale into a matmul only if nothing lies between.
    """
    contracted, batch = spec.dimensions
    free = spec.free_axes((lhs_rank, rhs_rank))
    first = len(batch[0])
    front = tuple(range(first))
    rows = tuple(range(first, first + len(free[0])))
    columns = tuple(range(first + len(rows), first + len(rows) + len(free[1])))
    found = []
    for side, summed in ((0, columns), (1, rows)):
        other = 1 - side
        # What is left of the other operand comes out in its order, not in this side's.
        order = np.argsort(contracted[other], kind="stable")
        rest = tuple(contracted[side][i] for i in order)
        choices = [
            _Product(
                True,
                ((summed, free[other]), (front, batch[other])),
                _order(batch[side] + free[side] + rest),
            ),
            _Product(
                False,
                ((free[other], summed), (batch[other], front)),
                _order(batch[side] + rest + free[side]),
            ),
        ]
        in_order = [x for x in choices if x.order == tuple(range(len(x.order)))]
        found.append((in_order or choices)[0])
    return found


def _order(axes: Axes) -> Axes:
    return tuple(int(i) for i in np.argsort(axes))


def _sharding_before(
    operand: Any, spec: MatmulSpec, side: int, order: Axes
) -> NamedSharding | None:
    """Returns the sharding of a gradient before its axes are put in order.

    Meshes with explicit axes ask for it; it is that of the operand.
    """
    known = operand
    if isinstance(operand, Fp8Tensor):
        known = operand.known
    sharding = jax.typeof(known).sharding
    if not has_explicit_axes(sharding.mesh):
        return None
    axes = [*sharding.spec, *[None] * (known.ndim - len(sharding.spec))]
    if isinstance(operand, Fp8Tensor) and operand.codes is None:
        leading = spec.leading_axes(side, operand.ndim)
        assert leading is not None
        axes = axes[-leading:] + axes[:-leading]
    before = [axes[i] for i in np.argsort(order)]
    return NamedSharding(sharding.mesh, PartitionSpec(*before))
