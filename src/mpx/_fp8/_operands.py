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
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float32, PyTree

from mpx._casting._context import automatic_size
from mpx._fp8._recipes import Recipe
from mpx._fp8._rounding import integer_scale, mpx_round, noise_of
from mpx._jax._compat import struct_like, undifferentiable
from mpx._jax._devices import gpu_capability
from mpx._jax._formats import FORMATS
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
from mpx._kernels._dispatch import plain_under_vmap

Axes = tuple[int, ...]
# For what the rules of a derivative get or return: JAX evaluates these rules on values, and
# differentiating them is a second derivative. An 8-bit code is a constant to JAX, so second
# derivatives would be 0; those of MX blocks would be rounded with scales made for others.
differentiable_once = undifferentiable(
    "fp8 has no second derivatives; take them of the function without fp8. If the "
    "gradient is a constant here, pass its arguments through `lax.stop_gradient`."
)


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """What is known of one matmul when it is traced."""

    dimensions: tuple[tuple[Axes, Axes], tuple[Axes, Axes]]  # of the `dot_general`
    dtype: np.dtype  # of operands and result
    weight_side: int  # Which operand is the parameter: 0 or 1
    recipe: Recipe
    # On meshes with explicit axes, what was asked for
    out_sharding: NamedSharding | None = None
    # The dtype in which the gradient of the parameter leaves its matmul, and so that of its
    # sum over devices; `None` for `dtype`
    weight_grad: np.dtype | None = None
    # On meshes with explicit axes, those of the operands
    shardings: tuple[NamedSharding | None, ...] = (None, None)
    # Whether tensors are quantised in both orders of their axes at once
    transposes: bool = dataclasses.field(default_factory=lambda: transposing_pays())
    # Its parameter and its source lines, for inspections: what is traced once for equal
    # specs has the lines of the first
    place: tuple[object, ...] = ()

    def role(self, side: int) -> str:
        """Returns whether an operand is the activation or the weight."""
        return "weight" if side == self.weight_side else "activation"

    def free_axes(self, side: int, rank: int) -> Axes:
        """Returns the axes of an operand that are neither summed over nor batch axes."""
        taken = (*self.dimensions[0][side], *self.dimensions[1][side])
        return tuple(axis for axis in range(rank) if axis not in taken)


class Operand(eqx.Module):
    """An operand of a product, `original ≈ codes · scale · whole`."""

    codes: Array  # 8-bit or 4-bit numbers, or those of the compute dtype, unscaled
    # f32, a scalar or one for each row with length-1 axes; e8m0 or e4m3 for each block
    scale: Array
    summed: Axes = eqx.field(static=True)  # The axes over which the product sums
    batch: Axes = eqx.field(static=True, default=())  # Its batch axes
    # Whether XLA may have to gather the codes, which are transposed after that
    gathered: bool = eqx.field(static=True, default=False)
    # Of a matrix (rows, columns) in blocks of its columns: the f32 scale of all, and the
    # shape of the axes that are its rows
    whole: Array | None = None
    rows: tuple[int, ...] | None = eqx.field(static=True, default=None)


def to_fp8(
    spec: MatmulSpec,
    role: str,
    x: Array,
    groups: tuple[Axes, Axes],
    *,
    batch: Axes,
    seen: Array | None,
) -> tuple[Operand, ...]:
    """Quantises a tensor for two products, which sum over either group of its axes."""
    recipe = spec.recipe
    # A weight that XLA may shard has its codes in one order, so that all three matmuls
    # gather the same ones, and what `jax.checkpoint` computes again shares the gather.
    gathered = spec.transposes and role == "weight" and automatic_size(x) > 1
    if recipe.by_row:
        # XLA would compute what is cheap to compute again for each maximum and each code.
        x, one = lax.optimization_barrier(x), jnp.ones((), jnp.float32)
        given = [Operand(x, one, axes, batch, gathered) for axes in groups]
        # The first product of a gradient is one of the backward pass, too.
        backward = role == "grad", True
        pairs = zip(given, backward, strict=True)
        return tuple(_by_row(recipe, role, *pair) for pair in pairs)
    form = recipe.form(role)
    known = recipe.known_maximum(role, seen)
    clip = known is not None
    # Of huge numbers a margin makes inf, which has no scale.
    amax = jnp.minimum(known, FORMATS["f32"].max) if clip else largest_magnitude(x)
    scale = power_of_two_scale(amax, form)
    may_transpose = spec.transposes and not (batch or gathered)
    come_first = (g for g in groups if may_transpose and sorted(g) == [*range(len(g))])
    leading = next(filter(None, come_first), ())
    if len(leading) in (0, x.ndim):
        codes = cast_scaled(x, inverse(scale), form, clip=clip)
        found = [(codes, axes) for axes in groups]
    else:
        codes, moved = quantize_both(x, scale, form, leading=len(leading), clip=clip)
        last = tuple(axis + x.ndim - len(leading) for axis in leading)
        found = [(moved, last) if g == leading else (codes, g) for g in groups]
    return tuple(Operand(x, scale, axes, batch, gathered) for x, axes in found)


def _by_row(recipe: Recipe, role: str, given: Operand, backward: bool) -> Operand:
    """Returns an operand in 8 bits, with a scale for all that is summed over."""
    x, form = given.codes, recipe.form(role, backward=backward)
    if not form:
        return given
    # An integer cannot be inf or nan. Where a row holds one of them, its scale is one.
    amax = largest_magnitude(x, given.summed, finite=form != "int8")
    if form != "int8":
        scale = power_of_two_scale(amax, form)
        codes = cast_scaled(x, inverse(scale), form)
        return dataclasses.replace(given, codes=codes, scale=scale)
    scale = integer_scale(amax)
    noise = noise_of(x) if recipe.is_dithered(role) else None
    codes = mpx_round(x.astype(jnp.float32) * (1 / scale), noise, form)
    made = dataclasses.replace(given, codes=codes, scale=scale)
    on_gpu = isinstance(gpu_capability(), tuple)
    return _summed_last(made, lax.transpose) if on_gpu and not given.gathered else made


def _summed_last(
    x: Operand, transpose: Callable[[Array, Sequence[int]], Array]
) -> Operand:
    """Returns an operand with the axes last that are summed over."""
    rank = x.codes.ndim
    order = [i for i in range(rank) if i not in x.summed] + [*x.summed]
    if order == [*range(rank)]:
        return x
    scale = lax.transpose(x.scale, order) if x.scale.ndim else x.scale
    last = tuple(range(rank - len(x.summed), rank))
    batch = tuple(order.index(i) for i in x.batch)
    return Operand(transpose(x.codes, order), scale, last, batch)


Shared = dict[Any, tuple[PyTree, PyTree]]
"""Quantised tensors by the `id` and role of the original, which is kept with them."""


def as_bytes(x: PyTree) -> PyTree:
    """Returns a tree with its numbers of 8 or 4 bits as unsigned integers.

    Differentiation would make gradients of such numbers. `jax.checkpoint` rounds those
    that its policy saves to their own precision, and JAX 0.10 makes nan of e4m3 above 240.
    Integers stay as they are.
    """

    def one(a: Array) -> Array:
        is_float = jnp.issubdtype(a.dtype, jnp.floating)
        bits = jnp.finfo(a.dtype).bits if is_float else 32
        return lax.bitcast_convert_type(a, f"uint{bits}") if bits <= 8 else a

    return jax.tree.map(one, x)


def as_codes(x: Operand) -> Operand:
    """Returns an operand with its bytes as numbers again; gradients are not among them."""

    def one(a: Array, form: str) -> Array:
        is_byte = a.dtype in (jnp.uint8, jnp.uint4)
        return lax.bitcast_convert_type(a, FORMATS[form].dtype) if is_byte else a

    codes = one(x.codes, "e2m1" if x.codes.dtype == jnp.uint4 else "e4m3")
    scale = one(x.scale, "e8m0" if x.whole is None else "e4m3")
    return dataclasses.replace(x, codes=codes, scale=scale)


# A program's part: rows and columns. The best of eight on an H200.
_TILE = (64, 128)
_WARPS = 4
# Pallas counts elements in 32 bits, signed.
_LARGEST = 2**31


def transposing_pays() -> bool:
    """Returns whether the GPU needs the axis that is summed over to come last."""
    capability = gpu_capability()
    pays = isinstance(capability, tuple) and (8, 9) <= capability < (10, 0)
    return pays and private("kernels") is not None


def quantize_both(
    x: Array, scale: Array, form: str, *, leading: int, clip: bool
) -> tuple[Array, Array]:
    """Returns the codes of a tensor, and the same with `leading` axes moved to the end.

    `scale` is a scalar; for `clip` see `cast_scaled`.
    """
    moved = lambda items: [*items[leading:], *items[:leading]]  # noqa: E731

    def plain(x: Array, factor: Array) -> tuple[Array, Array]:
        codes = cast_scaled(x, factor[0], form, clip=clip)
        return codes, lax.transpose(codes, moved(range(x.ndim)))

    def local(x: Array, factor: Array) -> tuple[Array, Array]:
        matrix = x.reshape(math.prod(x.shape[:leading]), -1)
        pairs = zip(matrix.shape, _TILE, strict=True)
        if x.size > _LARGEST or any(size % tile for size, tile in pairs):
            return plain(x, factor)
        codes, transposed = cast_and_transpose(matrix, factor, form, clip=clip)
        return codes.reshape(x.shape), transposed.reshape(moved(x.shape))

    def layout(x: Any, factor: Any) -> tuple[Any, Any]:
        spec = spec_of(moved(axes_of(x.sharding.spec, x.ndim)))
        results = x.sharding, NamedSharding(x.sharding.mesh, spec)
        return (x.sharding, replicated(x.sharding)), results

    def kernel(x: Array, factor: Array) -> tuple[Array, Array]:
        axes = [f"axis{i}" for i in range(x.ndim)]
        kept, transposed = " ".join(axes), " ".join(moved(axes))
        rule = f"{kept}, one -> {kept}, {transposed}"
        options = {"layout": layout, "rule": rule, "whole": ("one",)}
        return over_shards(local, (x, factor), like=x, **options)

    factor = inverse(scale)[None]
    if reason_against_shards(x) is not None:
        return plain(x, factor)
    return lax.platform_dependent(
        x, factor, cuda=plain_under_vmap(kernel, plain), default=plain
    )


def cast_and_transpose(
    x: Array, factor: Array, form: str, *, clip: bool, interpret: bool = False
) -> tuple[Array, Array]:
    """Returns the codes of a matrix of whole tiles, and their transpose."""
    # Not before it is needed: importing Pallas takes as long as importing mpx.
    pl = plgpu = private("kernels")
    rows, columns = _TILE

    def kernel(x_ref: Any, factor_ref: Any, codes_ref: Any, moved_ref: Any) -> None:
        down = pl.ds(pl.program_id(0) * rows, rows)
        across = pl.ds(pl.program_id(1) * columns, columns)
        x = plgpu.load(x_ref.at[down, across])
        codes = cast_scaled(x, factor_ref[0], form, clip=clip)
        plgpu.store(codes_ref.at[down, across], codes)
        plgpu.store(moved_ref.at[across, down], codes.T)

    # For what the results vary over in a `shard_map`
    like = x.astype(FORMATS[form].dtype)
    return tuple(
        pl.pallas_call(
            kernel,
            out_shape=[struct_like(like, x.shape), struct_like(like, x.shape[::-1])],
            grid=(x.shape[0] // rows, x.shape[1] // columns),
            in_specs=[pl.no_block_spec] * 2,
            out_specs=[pl.no_block_spec] * 2,
            compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
            interpret=interpret,
            name="mpx_cast_and_transpose",
        )(x, factor)
    )


def summed_last(x: Operand, other: Operand) -> Operand:
    """Returns an operand that may be gathered with the axes last that are summed over.

    Under FSDP each matmul gathers its weight. Codes that are transposed before are another
    array than those of the matmul that needs them as they are, and would be gathered apart.
    The weight is gathered over the axes that shard what is left of the `other` operand.
    """
    after = functools.partial(_transpose_after_gather, other.codes, other.summed)
    return _summed_last(x, after) if x.gathered else x


def _transpose_after_gather(
    other: Array, summed: Sequence[int], codes: Array, order: Sequence[int]
) -> Array:
    def plain(codes: Array, other: Array) -> Array:
        # XLA would take a bare transpose into the matmul, and not call cuBLASLt for it.
        return lax.optimization_barrier(lax.transpose(codes, order))

    def parts(mesh: Any, args: Any, _: Any) -> Parts:
        entries, others = (axes_of(x.sharding.spec, len(x.shape)) for x in args)
        taken = {x for i, names in enumerate(others) if i not in summed for x in names}
        kept = [tuple(x for x in names if x not in taken) for names in entries]
        given = NamedSharding(mesh, spec_of(kept))
        transposed = NamedSharding(mesh, spec_of(kept[i] for i in order))
        return plain, (given, args[1].sharding), transposed

    def kernel(codes: Array, other: Array) -> Array:
        axes = [f"axis{i}" for i in range(codes.ndim)]
        others = " ".join(f"other{i}" for i in range(other.ndim))
        transposed = " ".join(axes[i] for i in order)
        rule = f"{' '.join(axes)}, {others} -> {transposed}"
        return partitioned(plain, (codes, other), parts, rule=rule)

    mappable = jax.custom_batching.custom_vmap(kernel)

    @mappable.def_vmap
    def _(size: int, batched: Any, codes: Array, other: Array) -> tuple[Array, bool]:
        if batched[0]:
            return jax.vmap(lambda x: plain(x, other), axis_size=size)(codes), True
        # The other operand has one more axis that is not summed over.
        moved = [i + 1 for i in summed]
        return _transpose_after_gather(other, moved, codes, order), False

    return mappable(codes, other)


# --- Scales ---------------------------------------------------------------------------
# Powers of two are exact in every format, so scaling before or after a matmul gives the
# same bits, and rounding is that of the 8-bit format alone. They are built from exponent
# bits because `exp2` of an integer is inexact on GPUs and CPUs.

_MANTISSA = 0x7FFFFF
# Scale and inverse are both normal f32 numbers between these biased exponents.
_LOWEST, _HIGHEST = 1, 253


def largest_magnitude(
    x: Array, axes: Sequence[int] | None = None, *, finite: bool = True
) -> Float32[Array, "..."]:
    """Returns the largest absolute value, 0 for an empty array.

    It is a scalar, or that over some axes, which are kept with length 1. By default it is
    that of finite numbers: one inf or nan decides nothing about the scale of the others.
    """
    over, size = None if axes is None else tuple(axes), jnp.abs(x)
    if finite:
        size = jnp.where(size < jnp.inf, size, 0)
    found = jnp.max(size, axis=over, keepdims=over is not None, initial=0.0)
    return found.astype(jnp.float32)


def power_of_two_scale(amax: Array, form: str) -> Float32[Array, "..."]:
    """Returns the smallest power of two that brings `amax` into a format's range.

    That is `2**ceil(log2(amax / max))`, computed exactly. A scale of 1 is returned for 0.
    """
    mantissa, exponent = np.frexp(FORMATS[form].max)  # mantissa in [1/2, 1)
    limit = np.uint32(int((2 * mantissa - 1) * (_MANTISSA + 1)))
    bits = lax.bitcast_convert_type(amax.astype(jnp.float32), jnp.uint32)
    above = ((bits & np.uint32(_MANTISSA)) > limit).astype(jnp.int32)
    biased = (bits >> np.uint32(23)).astype(jnp.int32) - np.int32(exponent - 1) + above
    scale = _from_exponent(jnp.clip(biased, _LOWEST, _HIGHEST))
    usable = (amax > 0) & (amax < jnp.inf)
    return jnp.where(usable, scale, jnp.ones_like(scale))


def _from_exponent(biased: Array) -> Array:
    return lax.bitcast_convert_type(
        biased.astype(jnp.uint32) << np.uint32(23), jnp.float32
    )


def inverse(scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Returns the exact `1 / scale` of a power of two, by its exponent bits."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    return _from_exponent(np.int32(254) - (bits >> np.uint32(23)).astype(jnp.int32))


def cast_scaled(x: Array, factor: Array, form: str, *, clip: bool = False) -> Array:
    """Returns `x · factor` in an 8-bit format; the error is half an ulp of the format.

    With `clip`, magnitudes above the range become the largest number, as they must where
    the scale was chosen before `x` was known. Elsewhere a clip has made XLA fail ("A cycle
    is detected", jaxlib 0.11.2) where `x` comes out of a matmul. inf and nan become nan: a
    clipped inf would hide an overflow from loss scaling, and GPUs clip it.
    """
    # In f32: 2**126 would overflow f16. XLA fuses the product into the cast.
    scaled = x.astype(jnp.float32) * factor
    return mpx_clip(scaled, form) if clip else _cast(scaled, scaled, form)


def _cast(x: Array, clipped: Array, form: str) -> Array:
    return jnp.where(jnp.abs(x) < jnp.inf, clipped, jnp.nan).astype(FORMATS[form].dtype)


# Not inlined: `mpx.inspect.explain` knows it by its name, and leaves it out in f32.
@functools.partial(jax.jit, static_argnums=1)
def mpx_clip(x: Array, form: str) -> Array:
    """Returns scaled numbers in an 8-bit format, clipped to its range."""
    largest = np.float32(FORMATS[form].max)
    return _cast(x, jnp.clip(x, -largest, largest), form)
