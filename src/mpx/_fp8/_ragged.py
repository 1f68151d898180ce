"""The 8-bit ragged matmul and its derivative.

Each row x of a token has a scale, and each expert's matrix w has one:

    y  = (x̂ · ŵ[g]) · s_x s_w[g]       e4m3 × e4m3
    dx = (ĝ · ŵ[g]ᵀ) · s_g s_w[g]      e5m2 × e4m3
    dw = Σ xᵀ g                        in 16 bits

The gradient of the weights is a sum over rows, out of which their scales cannot be taken.
In 8 bits it would need both operands again with other scales and, on Hopper, with the rows
last, and casting costs more than it would gain.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mpx._fp8._operands import as_bytes, differentiable_once
from mpx._fp8._recipes import Recipe, StaticScaling
from mpx._fp8._scales import DTYPES, largest_magnitude, power_of_two_scale, quantize
from mpx._ops._experts._plain import Kind, group_of_rows, plain


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """Everything about one ragged matmul that is known when it is traced.

    Attributes:
        recipe: Formats, and scales if they are static.
        dtype: The dtype of the operands and of the result.
        in_kernel: Whether there is a grouped kernel.
    """

    recipe: Recipe
    dtype: np.dtype
    in_kernel: bool

    def multiply(
        self, a: Array, b: Array, sizes: Array, kind: Kind, dtype: np.dtype
    ) -> Array:
        """Returns a grouped matmul."""
        if not self.in_kernel:
            return plain(a, b, sizes, kind=kind, dtype=dtype)
        from mpx._ops._experts._primitive import grouped_matmul

        return grouped_matmul(a, b, sizes, kind=kind, dtype=dtype)

    def to_fp8(self, role: str, x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
        """Returns codes of a tensor with a scale for all numbers along `axes`, and these."""
        form = getattr(self.recipe, role)
        if isinstance(self.recipe, StaticScaling):
            shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
            amax = jnp.full(shape, getattr(self.recipe, f"{role}_max"), jnp.float32)
        else:
            amax = largest_magnitude(x, axes)
        scale = power_of_two_scale(amax, form)
        clip = isinstance(self.recipe, StaticScaling)
        return quantize(x, scale, form, clip=clip), scale


def fp8_ragged_dot(spec: RaggedSpec, x: Array, w: Array, sizes: Array) -> Array:
    """Returns `lax.ragged_dot(x, w, sizes)` computed from 8-bit operands.

    Args:
        spec: What is static.
        x: The rows, (m, k).
        w: A matrix for each group, (groups, k, n).
        sizes: The number of rows of each group.
    """
    return _jitted_dot(spec, x, w, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(spec: RaggedSpec, x: Array, w: Array, sizes: Array) -> Array:
    return _forward(spec, x, w, sizes)[0]


def _forward(
    spec: RaggedSpec, x: Array, w: Array, sizes: Array
) -> tuple[Array, tuple[Any, ...]]:
    x, w = differentiable_once((x, w))
    rows, row_scale = spec.to_fp8("activation", x, (1,))
    codes, scale = spec.to_fp8("weight", w, (1, 2))
    # Hopper multiplies 8-bit matrices whose last axes are summed over.
    turned = lax.transpose(codes, (0, 2, 1))
    out = _product(spec, (rows, row_scale), (turned, scale), sizes)
    return out, (x, as_bytes(codes), scale, sizes)


def _backward(
    spec: RaggedSpec, residuals: tuple[Any, ...], grad: Array
) -> tuple[Any, ...]:
    x, codes, scale, sizes = residuals
    codes = lax.bitcast_convert_type(codes, DTYPES[spec.recipe.weight])
    dx = _product(spec, spec.to_fp8("grad", grad, (1,)), (codes, scale), sizes)
    dw = spec.multiply(x, grad, sizes, "sums", spec.dtype)
    return *differentiable_once((dx, dw)), None


_dot.defvjp(_forward, _backward)
_jitted_dot = jax.jit(_dot, static_argnums=0, inline=True)


def _product(
    spec: RaggedSpec,
    rows: tuple[Array, Array],
    matrices: tuple[Array, Array],
    sizes: Array,
) -> Array:
    """Returns rows times the matrix of their group, from codes and scales."""
    # An f16 result could overflow before it is scaled.
    wide = np.dtype(jnp.float32 if spec.dtype == np.float16 else spec.dtype)
    out = spec.multiply(rows[0], matrices[0], sizes, "turned", wide)
    # Rows behind all groups are zero, whatever their scale.
    group = group_of_rows(sizes, len(out))
    for scale in (rows[1], matrices[1][group, :, 0]):
        out = out * scale.astype(wide)
    return out.astype(spec.dtype)
