"""The 8-bit matmul and its derivative, with scales for tensors, rows or blocks.

With `codes · scale ≈ tensor`, the three products of a linear layer are

    y  = (x̂ · ŵ) · s_x s_w      e4m3 × e4m3, fast accumulation
    dx = (ĝ · ŵᵀ) · s_g s_w     e5m2 × e4m3, full accumulation
    dw = (x̂ᵀ · ĝ) · s_x s_g     e5m2 × e4m3, full accumulation

where the codes x̂ and ŵ are all that the forward pass saves. They are made outside
what is differentiated, so that matmuls of one input share them. The products are written as
`lax.dot_general` on 8-bit operands. Quantising and dequantising around a bf16 product
would be deleted by XLA on a GPU, which then silently computes in bf16.

Matrices of MXFP8 and NVFP4 have blocks along the axis that is summed over, with
`codes · scale · whole ≈ matrix`. So the products of the backward pass are those of other
blocks than the forward one's, but for weights of NVFP4: their blocks are square.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32

from mpx._fp8._operands import (
    Axes,
    MatmulSpec,
    Operand,
    Shared,
    as_bytes,
    as_codes,
    cast_scaled,
    differentiable_once,
    inverse,
    largest_magnitude,
    power_of_two_scale,
    summed_last,
    to_fp8,
)
from mpx._fp8._recipes import MXFP8, NVFP4, Recipe
from mpx._fp8._rounding import TINY, mpx_round, noise_of, to_e4m3
from mpx._jax._compat import varying_axes
from mpx._jax._devices import gpu_capability, in_order
from mpx._jax._formats import FORMATS
from mpx._jax._sharding import axes_of, in_auto_axes, spec_of

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
) -> tuple[Operand, ...]:
    if spec.recipe.in_blocks:
        return block_operands(spec, role, x, groups)
    return to_fp8(spec, role, x, groups, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(spec: MatmulSpec, *args: Any) -> Array:
    return _forward(spec, *args)[0]


def _forward(
    spec: MatmulSpec,
    sides: tuple[Array, Array],
    operands: list[tuple[Operand, ...]],
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
    dprobe = None
    if observed is not None:
        probe, *found = observed
        dprobe = jnp.stack([*found, largest_magnitude(grad, finite=False)])
        # The devices of a `shard_map` may share a state.
        if shared := varying_axes(jax.typeof(dprobe)) - varying_axes(jax.typeof(probe)):
            dprobe = lax.pmax(dprobe, tuple(sorted(shared)))
    (dlhs, drhs), dprobe = differentiable_once((grads, dprobe))
    return (dlhs, drhs), None, None, dprobe


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


# --- Blocks ---------------------------------------------------------------------------


def is_native() -> bool:
    """Returns whether the default device multiplies blocks: Blackwell or later."""
    found = gpu_capability()
    return isinstance(found, tuple) and found >= (10, 0)


def check_supported(recipe: Recipe) -> None:
    """Raises a `NotImplementedError` where blocks would be slower than bf16."""
    if isinstance(recipe, MXFP8 | NVFP4) and not recipe.emulate and not is_native():
        name = type(recipe).__name__
        raise NotImplementedError(
            f"{name} needs the block-scaling units of a Blackwell GPU (compute capability "
            "10 or later), and the default device has none: it would be slower than "
            f"bf16. Use `CurrentScaling()`, or `{name}(emulate=True)` to study its "
            "numbers."
        )


def block_operands(
    spec: MatmulSpec, role: str, x: Array, groups: tuple[Axes, Axes]
) -> tuple[Operand, ...]:
    """Quantises a tensor, as a matrix, for two products: see `to_fp8`."""
    made: tuple[Operand, ...] = ()
    for i, summed in enumerate(groups):
        free = [axis for axis in range(x.ndim) if axis not in summed]
        rows = tuple(x.shape[axis] for axis in free)
        matrix = lax.transpose(x, (*free, *summed)).reshape(math.prod(rows), -1)
        # Both operands of the product for the weight's gradient sum over rows.
        is_of_weight = (role, i) in (("activation", 1), ("grad", spec.weight_side))
        if is_of_weight and isinstance(spec.recipe, NVFP4) and spec.recipe.hadamard:
            matrix = rotated(matrix)
        found = to_blocks(spec.recipe, role, matrix)
        made += (dataclasses.replace(found, summed=summed, rows=rows),)
    return made


def block_product(a: Operand, b: Operand, dtype: np.dtype) -> Array:
    """Returns the product of two operands that are quantised in blocks."""
    if is_native():
        operands = (x[None] for x in (a.codes, b.codes, a.scale, b.scale))
        wanted = jnp.dtype(dtype if a.whole is None else np.float32)
        out = jax.nn.scaled_matmul(*operands, preferred_element_type=wanted)[0]
    else:
        # Exact in f32: a number of a block has at most six significant bits. XLA for
        # CPUs has no batched product of bf16 numbers with an f32 result.
        numbers = np.dtype(np.float32) if dtype == np.float16 else dtype
        on_cpu = functools.partial(_emulated, dtype=np.dtype(np.float32))
        elsewhere = functools.partial(_emulated, dtype=numbers)
        out = lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)
    for x in (a, b):
        out = out if x.whole is None else out * x.whole
    return out.astype(dtype).reshape(*(a.rows or ()), *(b.rows or ()))


def _emulated(a: Operand, b: Operand, dtype: np.dtype) -> Array:
    one, other = (from_blocks(x, dtype) for x in (a, b))
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(one, other, axes, preferred_element_type=jnp.float32)


def from_blocks(blocks: Operand, dtype: np.dtype) -> Array:
    """Returns `codes · scale`, rounded to `dtype`.

    For e2m1 that is exact in bf16, f16 and f32: such a product has six significant bits.
    """
    (rows, columns), count = blocks.codes.shape, blocks.scale.shape[1]
    # The barrier: without it XLA on a GPU takes the two casts for none.
    codes, scale = lax.optimization_barrier((blocks.codes, blocks.scale))
    wide = codes.astype(jnp.float32).reshape(rows, count, columns // count)
    wide = wide * scale.astype(jnp.float32)[..., None]
    return wide.reshape(rows, columns).astype(dtype)


def to_blocks(recipe: Recipe, role: str, x: Array) -> Operand:
    """Quantises a matrix of activations, weights or gradients along its last axis."""
    if isinstance(recipe, NVFP4):
        return _to_nv(recipe, role, x)
    # An MX block stands for `codes · 2**(e8m0 - 127)`. The scale is rounded up, so that
    # nothing is clipped; rounded down, as the OCP text has it, training can diverge
    # (arXiv:2506.08027).
    form, (rows, columns) = recipe.form(role), x.shape
    blocks = x.reshape(rows, columns // MXFP8.multiple, MXFP8.multiple)
    scale = power_of_two_scale(largest_magnitude(blocks, (2,)), form)
    codes = cast_scaled(blocks, inverse(scale), form).reshape(rows, columns)
    return Operand(codes, scale[..., 0].astype(FORMATS["e8m0"].dtype), (1,))


# --- NVFP4 ----------------------------------------------------------------------------
# arXiv:2509.25149: e2m1 numbers, an e4m3 scale for 16 of them and an f32 scale for all. The
# largest magnitude of the matrix becomes 6 · 448, the product of the largest numbers.

_SIZE = NVFP4.multiple
_SIGNS = (1, 1, 1, -1, -1, 1, -1, 1, -1, -1, -1, 1, 1, -1, 1, -1)  # drawn once


def _to_nv(recipe: NVFP4, role: str, x: Array) -> Operand:
    (rows, columns), dithered = x.shape, recipe.is_dithered(role)
    tall = _SIZE if role == "weight" and recipe.weight_blocks == "2d" else 1
    tiles = x.astype(jnp.float32).reshape(rows // tall, tall, columns // _SIZE, _SIZE)
    peaks = largest_magnitude(tiles, (1, 3), finite=False)
    whole = jnp.maximum(largest_magnitude(peaks) * np.float32(1 / (6 * 448)), TINY)
    inverse = 1 / whole
    # The paper rounds all scales to nearest, and clips. A clipped gradient would not be
    # right on average: where it is rounded stochastically its scale is rounded up.
    scale = jnp.minimum(peaks * inverse * np.float32(1 / 6), 448.0)
    scale = to_e4m3(scale, up=dithered)
    # A block of zeros may have a scale of zero, and e2m1 has no inf and no nan.
    scale = jnp.where(peaks < jnp.inf, scale, jnp.nan)
    factor = jnp.where(scale == 0, 0.0, 1 / scale)
    noise = noise_of(x).reshape(tiles.shape) if dithered else None
    codes = mpx_round(tiles * inverse * factor, noise, "e2m1").reshape(x.shape)
    scale = jnp.broadcast_to(scale[..., 0], (*tiles.shape[:2], columns // _SIZE))
    scale = scale.reshape(rows, -1).astype(FORMATS["e4m3"].dtype)
    return Operand(codes, scale, (1,), whole=whole)


# An orthogonal matrix of ±1/4: random signs, then Hadamard's matrix.
_HADAMARD = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
_ROTATION = np.diag(_SIGNS) @ np.array(_HADAMARD) / 4


def rotated(x: Array) -> Float32[Array, "rows columns"]:
    """Rotates each 16 columns, which spreads an outlier over all of them.

    The rotation of both operands of a product cancels out in its sum.
    """
    pieces = x.astype(jnp.float32).reshape(len(x), -1, _SIZE)
    # Both are exact in TF32, too.
    return (pieces @ jnp.asarray(_ROTATION, jnp.float32)).reshape(x.shape)
