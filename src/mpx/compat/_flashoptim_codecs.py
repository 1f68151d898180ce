"""How flashoptim-jax stores one array: flat groups with f16 scales, ulp corrections."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mpx._optim import Compression
from mpx._quant import Block, Quantized, SoftsignInt8, SqrtUint8, UlpFraction
from mpx._sharding import zeros_alike
from mpx._tree import check_same_structure, named_leaves, shape_of

MasterBits = int | None  # 24, 32 or None
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
_HALF = (np.dtype(jnp.bfloat16), F16)
_CORRECTIONS = (np.dtype(np.int8), np.dtype(np.int16))
_BLOCK = Block()
MOMENTUM, VARIANCE = SoftsignInt8(F16), SqrtUint8(F16)


class QuantizedArray(NamedTuple):
    """Numbers in 8 bits.

    Attributes:
        values: One integer per element, in the shape of the parameter.
        scales: f16, one per group of the flattened array; the last may be smaller.
    """

    values: Array
    scales: Array


def is_quantized(leaf: object) -> bool:
    """Whether a leaf is a `QuantizedArray`, ours or that of flashoptim-jax itself."""
    return getattr(leaf, "_fields", None) == QuantizedArray._fields


def no_state() -> Array:
    """Returns what stands where a parameter has no correction or no moment."""
    return jnp.zeros((), jnp.int32)


def is_state(leaf: Any) -> bool:
    """Whether a leaf is more than `no_state()`."""
    return is_quantized(leaf) or not (leaf.shape == () and leaf.dtype == np.int32)


class View(NamedTuple):
    """An array in a shape whose last axis consists of whole groups.

    An array that has this shape already keeps it, any other is flattened and padded
    with zeros. Groups of the last axis are then the groups of the flattened array.

    Attributes:
        shape: The array's own shape.
        group_size: Elements that share a scale; 0 leaves the shape alone.
    """

    shape: tuple[int, ...]
    group_size: int

    @property
    def grouped(self) -> bool:
        """Whether the array's own last axis consists of whole groups."""
        last = self.shape[-1] if self.shape else 1
        return self.group_size == 0 or last % self.group_size == 0

    @property
    def groups(self) -> int:
        """The number of groups."""
        return -(-self._size // self.group_size)

    @property
    def _size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def of(self, x: Array) -> Array:
        """Returns an array in this view."""
        if self.grouped:
            return x
        return jnp.pad(x.reshape(-1), (0, self.groups * self.group_size - self._size))

    def undo(self, x: Array) -> Array:
        """Returns an array in its own shape."""
        return x if self.grouped else x[: self._size].reshape(self.shape)

    def quantized(self, stored: Any, name: str) -> Quantized:
        """Returns codes and scales in this view."""
        if np.size(stored.scales) != self.groups:
            raise ValueError(
                f"`{name}` has {np.size(stored.scales)} scales, but its {self._size} "
                f"elements in groups of {self.group_size} have {self.groups}. Give the "
                "`group_size` that the state was made with."
            )
        codes = self.of(jnp.asarray(stored.values).reshape(self.shape))
        scales = jnp.asarray(stored.scales, F16)
        groups = codes.shape[-1] // self.group_size
        return Quantized(codes, scales.reshape(*codes.shape[:-1], groups))

    def undo_quantized(self, stored: Quantized) -> QuantizedArray:
        """Returns codes in their own shape and scales in one row."""
        return QuantizedArray(self.undo(stored.codes), stored.scale.reshape(-1))


def _quantize(codec: Any, x: Array, group_size: int) -> QuantizedArray:
    view = View(shape_of(x), group_size)
    blocks = view.of(jnp.asarray(x, F32)).reshape(view.groups, group_size)
    codes, scales = codec.encode(blocks, _BLOCK)
    size = int(np.prod(view.shape, dtype=np.int64))
    return QuantizedArray(codes.reshape(-1)[:size].reshape(view.shape), scales)


def _dequantize(codec: Any, x: Any, group_size: int) -> Array:
    view = View(shape_of(x.values), group_size)
    codes, scales = view.quantized(x, "x")
    blocks = Quantized(codes.reshape(view.groups, group_size), scales.reshape(-1))
    return view.undo(codec.decode(blocks, _BLOCK).reshape(codes.shape))


def quantize_momentum(x: Array, group_size: int = 32) -> QuantizedArray:
    """Stores signed numbers in int8, finer near zero."""
    return _quantize(MOMENTUM, x, group_size)


def dequantize_momentum(x: Any, group_size: int = 32) -> Array:
    """Returns the f32 numbers behind `quantize_momentum`."""
    return _dequantize(MOMENTUM, x, group_size)


def quantize_variance(x: Array, group_size: int = 32) -> QuantizedArray:
    """Stores numbers ≥ 0 by their roots in uint8; no number but zero becomes zero."""
    values, scales = _quantize(VARIANCE, x, group_size)
    # The codec of mpx never writes 0, but the original does: for what it has read there.
    zero = jnp.asarray(x, F32) == 0
    return QuantizedArray(jnp.where(zero, values.dtype.type(0), values), scales)


def dequantize_variance(x: Any, group_size: int = 32) -> Array:
    """Returns the f32 numbers behind `quantize_variance`."""
    return _dequantize(VARIANCE, x, group_size)


# --- weights --------------------------------------------------------------------------


def correction_dtype(dtype: Any, master_weight_bits: MasterBits) -> np.dtype | None:
    """Returns the dtype of the correction of parameters of `dtype`, if they get one."""
    bits: Any = master_weight_bits  # checked there
    compression = Compression(master_bits=bits, min_size=0)
    return compression.correction_dtype(jax.ShapeDtypeStruct((), dtype))


def init_correction(param: Any, master_weight_bits: MasterBits) -> Array:
    """Returns the correction of a parameter that is its own master weight."""
    dtype = correction_dtype(param.dtype, master_weight_bits)
    return no_state() if dtype is None else zeros_alike(param, dtype)


def has_correction(param: Any, correction: Any) -> bool:
    """Whether a parameter has a master weight of more bits than its own."""
    return param.dtype in _HALF and correction.dtype in _CORRECTIONS


def split_leaf(
    theta: Array,
    narrow_dtype: DTypeLike = jnp.bfloat16,
    master_weight_bits: MasterBits = 24,
) -> tuple[Array, Array]:
    """Splits f32 weights into parameters of `narrow_dtype` and their corrections."""
    theta = jnp.asarray(theta, F32)
    dtype = correction_dtype(narrow_dtype, master_weight_bits)
    if dtype is None:
        return theta.astype(narrow_dtype), no_state()
    param, correction = UlpFraction(dtype).encode(theta, narrow_dtype, _BLOCK)
    assert correction is not None
    return param, correction


def reconstruct_leaf(theta_lp: Array, rho: Array) -> Array:
    """Returns the f32 weights behind parameters and their corrections."""
    theta_lp, rho = jnp.asarray(theta_lp), jnp.asarray(rho)
    if not has_correction(theta_lp, rho):
        return theta_lp.astype(F32)
    return UlpFraction(np.dtype(rho.dtype)).decode(theta_lp, rho, _BLOCK)


def reconstruct_weights(params_lp: PyTree, errors: PyTree) -> PyTree:
    """Returns the f32 weights behind a tree of parameters: `errors` is `state.ecc`."""
    return jax.tree.map(reconstruct_leaf, params_lp, errors)


def set_fp32_params(
    fp32_params: PyTree, param_template: PyTree, master_weight_bits: MasterBits = 24
) -> tuple[PyTree, PyTree]:
    """Splits f32 weights into parameters with the dtypes of a template, and `ecc`.

    Raises:
        ValueError: If trees or shapes differ.
    """
    check_same_structure(fp32_params, param_template, "`set_fp32_params`")
    likes, treedef = jax.tree.flatten(param_template)
    pairs = []
    for (name, weight), like in zip(named_leaves(fp32_params), likes, strict=True):
        if shape_of(weight) != shape_of(like):
            raise ValueError(
                f"The weight of `{name}` has shape {shape_of(weight)}, but the template "
                f"has shape {shape_of(like)}."
            )
        pairs.append(split_leaf(weight, jnp.asarray(like).dtype, master_weight_bits))
    params = treedef.unflatten([param for param, _ in pairs])
    return params, treedef.unflatten([correction for _, correction in pairs])


def cast_tree_bf16(tree: PyTree) -> PyTree:
    """Casts every leaf of a tree to bf16."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
