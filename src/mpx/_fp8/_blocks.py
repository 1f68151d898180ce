"""Matmuls whose numbers are scaled in blocks along the sum: MXFP8 and NVFP4.

`codes · scale · whole ≈ matrix`. A matrix has its blocks along the axis that is summed over.
So the products of the backward pass are those of other blocks than the forward one's, but for
weights of NVFP4: their blocks are square, and so the same in both.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from mpx._fp8._operands import (
    Axes,
    MatmulSpec,
    Operand,
    cast_scaled,
    inverse,
    largest_magnitude,
    power_of_two_scale,
)
from mpx._fp8._recipes import MXFP8, NVFP4, Recipe
from mpx._fp8._rounding import TINY, mpx_round, noise_of, to_e4m3
from mpx._jax._devices import gpu_capability
from mpx._jax._formats import FORMATS


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


# --- Products -------------------------------------------------------------------------


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
) -> tuple[Operand, Operand]:
    """Quantises a tensor, as a matrix, for two products: see `to_fp8`."""
    made = list[Operand]()
    for i, summed in enumerate(groups):
        free = [axis for axis in range(x.ndim) if axis not in summed]
        rows = tuple(x.shape[axis] for axis in free)
        matrix = lax.transpose(x, (*free, *summed)).reshape(math.prod(rows), -1)
        # Both operands of the product for the weight's gradient sum over rows.
        is_of_weight = (role, i) in (("activation", 1), ("grad", spec.weight_side))
        if is_of_weight and isinstance(spec.recipe, NVFP4) and spec.recipe.hadamard:
            matrix = rotated(matrix)
        found = to_blocks(spec.recipe, role, matrix)
        made.append(dataclasses.replace(found, summed=summed, rows=rows))
    first, second = made
    return first, second


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
