"""The static description of an 8-bit matmul, and its operands in 8 bits.

GPUs before Blackwell multiply 8-bit matrices only if the axis that is summed over comes
last in both. Each tensor of a linear layer is summed over one half of its axes in the
forward pass and over the other half in the backward pass, so it is needed twice. XLA can
write both from one read, but at half the speed of memory: for 16384 × 16384 on an H200 it
took 0.53 ms and this kernel 0.30 (jax 0.11.2).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from mpx._casting._reduction import Reduce, automatic_size, weight_grad_dtype
from mpx._fp8._recipes import CurrentScaling, DelayedScaling, Recipe, StaticScaling
from mpx._fp8._scales import (
    DTYPES,
    cast_scaled,
    inverse,
    largest_magnitude,
    power_of_two_scale,
    quantize,
)
from mpx._jax._compat import struct_like, undifferentiable
from mpx._jax._devices import gpu_capability
from mpx._jax._private import private
from mpx._jax._sharding import (
    Parts,
    axes_of,
    over_shards,
    partitioned,
    reason_against_shards,
    replicated,
    spec_of,
)
from mpx._kernels import plain_under_vmap
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


# A program's part: rows and columns. The best of eight on an H200.
_TILE = (64, 128)
_WARPS = 4
# Pallas counts elements in 32 bits, signed.
_LARGEST = 2**31


def turning_pays() -> bool:
    """Returns whether the GPU needs the axis that is summed over to come last."""
    capability = gpu_capability()
    pays = isinstance(capability, tuple) and (8, 9) <= capability < (10, 0)
    return pays and private("kernels") is not None


def turn(x: Array, leading: int) -> Array:
    """Returns an array whose first axes are moved behind the others."""
    return lax.transpose(x, (*range(leading, x.ndim), *range(leading)))


def quantize_both(
    x: Array, scale: Array, form: str, *, leading: int, clip: bool
) -> tuple[Array, Array]:
    """Returns the codes of a tensor, and the same with `leading` axes moved to the end.

    Args:
        x: The tensor.
        scale: A power of two, a scalar.
        form: `e4m3` or `e5m2`.
        leading: How many axes are moved.
        clip: See `quantize`.
    """

    def plain(x: Array, factor: Array) -> tuple[Array, Array]:
        codes = cast_scaled(x, factor[0], form, clip=clip)
        return codes, turn(codes, leading)

    def local(x: Array, factor: Array) -> tuple[Array, Array]:
        shape, rows = x.shape, math.prod(x.shape[:leading])
        x = x.reshape(rows, -1)
        if x.size > _LARGEST or any(
            n % tile for n, tile in zip(x.shape, _TILE, strict=True)
        ):
            return plain(x.reshape(shape), factor)
        codes, turned = cast_and_turn(x, factor, form, clip=clip)
        return codes.reshape(shape), turned.reshape(shape[leading:] + shape[:leading])

    factor = inverse(scale)[None]
    if reason_against_shards(x) is not None:
        return plain(x, factor)
    kernel = functools.partial(_over_shards, local, leading=leading)
    return lax.platform_dependent(
        x, factor, cuda=plain_under_vmap(kernel, plain), default=plain
    )


def cast_and_turn(
    x: Array, factor: Array, form: str, *, clip: bool, interpret: bool = False
) -> tuple[Array, Array]:
    """Returns the codes of a matrix of whole tiles, and their transpose."""
    # Not before it is needed: importing Pallas takes as long as importing mpx.
    pl = plgpu = private("kernels")
    rows, columns = _TILE

    def kernel(x_ref: Any, factor_ref: Any, codes_ref: Any, turned_ref: Any) -> None:
        down = pl.ds(pl.program_id(0) * rows, rows)
        across = pl.ds(pl.program_id(1) * columns, columns)
        codes = cast_scaled(
            plgpu.load(x_ref.at[down, across]), factor_ref[0], form, clip=clip
        )
        plgpu.store(codes_ref.at[down, across], codes)
        plgpu.store(turned_ref.at[across, down], codes.T)

    like = x.astype(DTYPES[form])  # for what the results vary over in a shard_map
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=[struct_like(like, x.shape), struct_like(like, x.shape[::-1])],
            grid=(x.shape[0] // rows, x.shape[1] // columns),
            in_specs=[pl.no_block_spec] * 2,
            out_specs=[pl.no_block_spec] * 2,
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
            name="mpx_cast_and_turn",
        )(x, factor)
    )


def _over_shards(
    local: Callable[..., Any], x: Array, factor: Array, *, leading: int
) -> Any:
    """Calls `local` on each device with its shard of `x`."""

    def layout(x: Any, factor: Any) -> tuple[Any, Any]:
        axes = (*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec)))
        turned = PartitionSpec(*axes[leading:], *axes[:leading])
        results = x.sharding, NamedSharding(x.sharding.mesh, turned)
        return (x.sharding, replicated(x.sharding)), results

    axes = [f"axis{axis}" for axis in range(x.ndim)]
    kept, turned = " ".join(axes), " ".join(axes[leading:] + axes[:leading])
    rule = f"{kept}, one -> {kept}, {turned}"
    return over_shards(
        local, (x, factor), like=x, layout=layout, rule=rule, whole=("one",)
    )


def turned_for(
    codes: Array, other: Array, leading: int, summed: Sequence[int]
) -> Array:
    """Returns codes with `leading` axes moved to the end, turned after they are gathered.

    Under FSDP each matmul gathers its weight. Codes that are turned before are another array
    than those of the matmul that needs them as they are, and would be gathered apart.

    Args:
        codes: The codes of a weight, sharded over automatic axes.
        other: The other operand of the matmul: the weight is gathered over the axes that
            shard what is left of it.
        leading: How many axes are moved.
        summed: The axes of `other` that are summed over.
    """

    def plain(codes: Array, other: Array) -> Array:
        # XLA would take a bare transpose into the matmul, and not call cuBLASLt for it.
        return lax.optimization_barrier(turn(codes, leading))

    def parts(mesh: Any, args: Any, _: Any) -> Parts:
        entries, others = (axes_of(x.sharding.spec, len(x.shape)) for x in args)
        taken = {x for i, names in enumerate(others) if i not in summed for x in names}
        kept = [tuple(x for x in names if x not in taken) for names in entries]
        given = NamedSharding(mesh, spec_of(kept))
        turned = NamedSharding(mesh, spec_of(kept[leading:] + kept[:leading]))
        return Parts(plain, (given, args[1].sharding), turned)

    def kernel(codes: Array, other: Array) -> Array:
        axes = [f"axis{i}" for i in range(codes.ndim)]
        turned = " ".join(axes[leading:] + axes[:leading])
        others = " ".join(f"other{i}" for i in range(other.ndim))
        rule = f"{' '.join(axes)}, {others} -> {turned}"
        return partitioned(plain, (codes, other), parts, rule=rule)

    mappable = jax.custom_batching.custom_vmap(kernel)

    @mappable.def_vmap
    def _(size: int, batched: Any, codes: Array, other: Array) -> tuple[Array, bool]:
        if batched[0]:
            return jax.vmap(lambda x: plain(x, other), axis_size=size)(codes), True
        # The other operand has one more axis that is not summed over.
        return turned_for(codes, other, leading, [i + 1 for i in summed]), False

    return mappable(codes, other)
