"""The static description of an 8-bit matmul, and its operands in 8 bits."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from mpx._casting._reduction import Reduce, automatic_size, weight_grad_dtype
from mpx._fp8._layouts import quantize_both, turning_pays
from mpx._fp8._recipes import CurrentScaling, DelayedScaling, Recipe, StaticScaling
from mpx._fp8._scales import DTYPES, largest_magnitude, power_of_two_scale, quantize
from mpx._jax._compat import undifferentiable
from mpx._program._queries import Equation

Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
ROLES = ("activation", "weight", "grad")

# For what the rules of a derivative get or return: JAX evaluates these rules on values, and
# differentiating them is a second derivative. An 8-bit code is a constant to JAX, so second
# derivatives would be 0; those of MX blocks would be rounded with scales made for others.
differentiable_once = undifferentiable(
    "fp8 has no second derivatives; take them of the function without fp8. If the "
    "gradient is a constant here, pass its arguments through `lax.stop_gradient`."
)


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """Everything about one matmul that is known when it is traced.

    Attributes:
        dimensions: The dimension numbers of the `dot_general`.
        dtypes: The dtypes of the two operands.
        out_dtype: The dtype of the result.
        weight_side: Which operand is the parameter: 0 or 1.
        recipe: Formats and scales.
        out_sharding: The sharding that was asked for, on meshes with explicit axes.
        weight_grad: The dtype in which the gradient of the parameter leaves its matmul, and
            so that of its sum over devices. `None` is the dtype of the parameter here.
        turns: Whether tensors are quantised in both orders of their axes at once.
        one_order: Whether codes of the parameter are made in one order all the same, for a
            parameter that may be sharded: all three matmuls then gather the same codes, and
            what `jax.checkpoint` computes again shares the gather with the backward pass.
            They are turned after it.
    """

    dimensions: Dimensions
    dtypes: tuple[np.dtype, np.dtype]
    out_dtype: np.dtype
    weight_side: int
    recipe: Recipe
    out_sharding: Any = None
    weight_grad: np.dtype | None = None
    turns: bool = dataclasses.field(default_factory=lambda: turning_pays())
    one_order: bool = False

    def grad_dtype(self, side: int) -> np.dtype:
        """Returns the dtype in which the gradient of an operand leaves its matmul."""
        if side == self.weight_side and self.weight_grad is not None:
            return self.weight_grad
        return self.dtypes[side]

    def role(self, side: int) -> str:
        """Returns whether an operand is the activation or the weight."""
        return "weight" if side == self.weight_side else "activation"

    @property
    def by_row(self) -> bool:
        """Returns whether each row has a scale, so that each direction needs its own codes."""
        return (
            isinstance(self.recipe, CurrentScaling) and self.recipe.granularity == "row"
        )

    def leading_axes(self, side: int, rank: int) -> int | None:
        """Returns the number of leading axes, if summed and free axes are contiguous.

        `None` if they are mixed, or if there are batch axes.
        """
        if self.dimensions[1][side]:
            return None
        summed = sorted(self.dimensions[0][side])
        if summed == list(range(len(summed))):
            return len(summed)
        if summed == list(range(rank - len(summed), rank)):
            return rank - len(summed)
        return None

    def free_axes(self, ranks: tuple[int, int]) -> tuple[Axes, Axes]:
        """Returns the axes of the operands that are neither summed over nor batch axes."""
        return tuple(
            tuple(axis for axis in range(rank) if axis not in (*axes, *batch))
            for rank, axes, batch in zip(ranks, *self.dimensions, strict=True)
        )  # pyright: ignore[reportReturnType]


def matmul_spec(
    eqn: Equation,
    operands: tuple[Array, Array],
    weight_side: int,
    recipe: Recipe,
    reduce: Reduce,
) -> MatmulSpec:
    """Returns the description of a `dot_general` that runs in 8 bits.

    Args:
        eqn: The matmul as it is written.
        operands: Its operands.
        weight_side: Which of them is the parameter.
        recipe: Formats and scales.
        reduce: The choice of the dtype in which gradients are summed over devices.
    """
    (summed, batch), weight = eqn.params["dimension_numbers"], operands[weight_side]
    return MatmulSpec(
        dimensions=(_pair(summed), _pair(batch)),
        dtypes=(operands[0].dtype, operands[1].dtype),
        out_dtype=np.dtype(eqn.outvars[0].aval.dtype),
        weight_side=weight_side,
        recipe=recipe,
        out_sharding=eqn.params.get("out_sharding"),
        weight_grad=weight_grad_dtype(reduce, weight, weight.dtype),
        turns=turning_pays(),
        one_order=turning_pays() and automatic_size(weight) > 1,
    )


def _pair(axes: Sequence[Sequence[int]]) -> tuple[Axes, Axes]:
    first, second = axes
    return tuple(first), tuple(second)


class Fp8Tensor(NamedTuple):
    """`original ≈ codes · scale`. One of the two orders may have been left out.

    Attributes:
        scale: Powers of two, f32: a scalar, or one for each row with length-1 axes.
        codes: 8-bit numbers, shaped as the original.
        turned: The same, with the leading axes behind the others.
    """

    scale: Array
    codes: Array | None
    turned: Array | None = None

    def summed_last(self, axes: Axes) -> tuple[Array, Axes]:
        """Returns the codes whose last axes are summed over, if there are such.

        Args:
            axes: The axes of the original that are summed over.

        Returns:
            The codes, and what became of the axes.
        """
        rank, count = self.ndim, len(axes)
        if self.turned is not None and sorted(axes) == list(range(count)):
            return self.turned, tuple(axis + rank - count for axis in axes)
        assert self.codes is not None
        return self.codes, axes

    @property
    def known(self) -> Array:
        """The codes in the order of the original, if they were not left out."""
        known = self.turned if self.codes is None else self.codes
        assert known is not None
        return known

    @property
    def ndim(self) -> int:
        """The number of axes of the original."""
        return self.known.ndim

    def needed_for(self, axes: Axes) -> "Fp8Tensor":
        """Leaves out the order that a sum over these axes does not need."""
        kept, _ = self.summed_last(axes)
        if kept is self.turned:
            return self._replace(codes=None)
        return self._replace(turned=None)


def to_fp8(
    spec: MatmulSpec,
    role: str,
    x: Array,
    axes: Axes,
    seen: Array | None,
    *,
    leading: int | None = None,
) -> Fp8Tensor:
    """Quantises a tensor that will be summed over `axes`.

    With `leading`, also in the order with so many axes moved to the end.
    """
    recipe = spec.recipe
    form, clip = getattr(recipe, role), True
    if isinstance(recipe, StaticScaling):
        amax = jnp.float32(getattr(recipe, f"{role}_max"))
    elif isinstance(recipe, DelayedScaling) and seen is not None:
        amax = seen[ROLES.index(role)] * np.float32(2.0**recipe.margin)
    else:
        amax, clip = largest_magnitude(x, axes if spec.by_row else None), False
    scale = power_of_two_scale(amax, form)
    turns = spec.turns and not (role == "weight" and spec.one_order)
    if leading and not spec.by_row and leading < x.ndim and turns:
        codes, turned = quantize_both(x, scale, form, leading=leading, clip=clip)
        return Fp8Tensor(scale, codes, turned)
    return Fp8Tensor(scale, quantize(x, scale, form, clip=clip))


Shared = dict[Any, tuple[Array, Fp8Tensor]]
"""Quantised tensors by the `id` and role of the original, which is kept with them."""


def as_bytes(x: PyTree) -> PyTree:
    """Returns a tree with its 8-bit numbers as bytes.

    Differentiation would make gradients of such numbers. `jax.checkpoint` rounds those
    that its policy saves to their own precision, and JAX 0.10 makes nan of e4m3 above 240.
    """
    return jax.tree.map(
        lambda a: a if a.dtype.itemsize > 1 else lax.bitcast_convert_type(a, jnp.uint8),
        x,
    )


def as_codes(spec: MatmulSpec, side: int, x: Fp8Tensor) -> Fp8Tensor:
    dtype = DTYPES[getattr(spec.recipe, spec.role(side))]
    return jax.tree.map(
        lambda a: a if a.dtype.itemsize > 1 else lax.bitcast_convert_type(a, dtype), x
    )
