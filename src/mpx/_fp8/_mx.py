"""Blocks of 32 numbers with a shared power-of-two scale: the OCP MX format.

A block stands for `codes · 2**(e8m0 - 127)`. The scale is rounded up, so that nothing is
clipped; rounded down, as the OCP text has it, training can diverge (arXiv:2506.08027).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from mpx._fp8._operands import MatmulSpec, as_bytes, as_codes, differentiable_once
from mpx._fp8._recipes import MXFP8, Recipe
from mpx._fp8._scales import largest_magnitude, power_of_two_scale, quantize
from mpx._jax._devices import gpu_capability

BLOCK = 32
_E8M0 = jnp.float8_e8m0fnu


class Blocks(NamedTuple):
    """A matrix whose rows are cut into blocks.

    Attributes:
        codes: 8-bit numbers, (rows, columns).
        scale: One power of two for 32 columns, e8m0, (rows, columns / 32).
    """

    codes: Array
    scale: Array


def to_blocks(x: Array, form: str) -> Blocks:
    """Quantises a matrix along its last axis."""
    rows, columns = x.shape
    blocks = x.reshape(rows, columns // BLOCK, BLOCK)
    scale = power_of_two_scale(largest_magnitude(blocks, (2,)), form)
    codes = quantize(blocks, scale, form, clip=False).reshape(rows, columns)
    return Blocks(codes, scale[..., 0].astype(_E8M0))


def from_blocks(blocks: Blocks, dtype: np.dtype) -> Array:
    """Returns the numbers that blocks stand for, rounded to `dtype`."""
    rows, columns = blocks.codes.shape
    # The barrier: without it XLA on a GPU takes the two casts for none.
    codes, scale = lax.optimization_barrier((blocks.codes, blocks.scale))
    wide = codes.astype(jnp.float32).reshape(rows, columns // BLOCK, BLOCK)
    wide = wide * scale.astype(jnp.float32)[..., None]
    return wide.reshape(rows, columns).astype(dtype)


def is_native() -> bool:
    """Returns whether the default device multiplies MX blocks: Blackwell or later."""
    found = gpu_capability()
    return isinstance(found, tuple) and found >= (10, 0)


def check_supported(recipe: Recipe) -> None:
    """Raises a `NotImplementedError` where MXFP8 would be slower than bf16."""
    if isinstance(recipe, MXFP8) and not recipe.emulate and not is_native():
        raise NotImplementedError(
            "MXFP8 needs the block-scaling units of a Blackwell GPU (compute capability "
            "10 or later), and the default device has none: it would be slower than "
            "bf16. Use `CurrentScaling()`, or `MXFP8(emulate=True)` to study its numbers."
        )


def _multiply(a: Blocks, b: Blocks, dtype: np.dtype) -> Array:
    """Returns `a @ b.T`; both have their blocks along the sum."""
    if is_native():
        operands = (x[None] for x in (a.codes, b.codes, a.scale, b.scale))
        wanted = jnp.dtype(dtype)
        return jax.nn.scaled_matmul(*operands, preferred_element_type=wanted)[0]
    # Exact in f32: a number of a block has four significant bits.
    numbers = np.dtype(np.float32) if dtype == np.float16 else dtype
    return lax.dot_general(
        from_blocks(a, numbers),
        from_blocks(b, numbers),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(form: str, dtype: np.dtype, x: Array, w: Array) -> Array:
    """Returns `x @ w.T` for an activation (m, k) and a weight (n, k).

    `form` is the format of gradients.
    """
    return _forward(form, dtype, x, w)[0]


def _forward(form: str, dtype: np.dtype, x: Array, w: Array) -> tuple[Array, Any]:
    x, w = differentiable_once((x, w))
    out = _multiply(to_blocks(x, "e4m3"), to_blocks(w, "e4m3"), dtype)
    # The backward products sum along the other axes: they need blocks of their own.
    return out, as_bytes((to_blocks(x.T, "e4m3"), to_blocks(w.T, "e4m3")))


def _backward(
    form: str, dtype: np.dtype, residuals: tuple[Blocks, Blocks], grad: Array
) -> tuple[Array, Array]:
    x, w = (
        Blocks(as_codes(x.codes), lax.bitcast_convert_type(x.scale, _E8M0))
        for x in residuals
    )
    dx = _multiply(to_blocks(grad, form), w, dtype)
    dw = _multiply(to_blocks(grad.T, form), x, dtype)
    return differentiable_once((dx, dw))


_matmul.defvjp(_forward, _backward)


def mx_dot(spec: MatmulSpec, lhs: Array, rhs: Array) -> Array:
    """Returns a `dot_general` computed from MX blocks; operands become matrices."""
    matrices, shapes = [], []
    for side, x in enumerate((lhs, rhs)):
        free = spec.free_axes(side, x.ndim)
        shape = [x.shape[axis] for axis in free]
        ordered = lax.transpose(x, (*free, *spec.dimensions[0][side]))
        matrices.append(ordered.reshape(math.prod(shape), -1))
        shapes += shape
    x, w = matrices if spec.weight_side == 1 else reversed(matrices)
    out: Array = _matmul(spec.recipe.grad, spec.dtype, x, w)
    return (out if spec.weight_side == 1 else out.T).reshape(shapes)
