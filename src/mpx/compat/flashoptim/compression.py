"""Master weights of 16-bit parameters: corrections in fractions of an ulp."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from mpx._jax._arguments import check_choice
from mpx._jax._tree import check_same_structure, check_shape, map_with_name
from mpx._quant._codecs import Block, UlpFraction

_BLOCK = Block()


def no_state() -> Array:
    """Returns what stands where a parameter has no correction or no moment."""
    return jnp.zeros((), jnp.int32)


def is_state(leaf: PyTree) -> bool:
    """Returns whether an array is more than `no_state()`."""
    return not (leaf.shape == () and leaf.dtype == np.int32)


def correction_dtype(dtype: DTypeLike, bits: int | None) -> np.dtype | None:
    """Returns the dtype of the correction of parameters of `dtype`, if they get one."""
    check_choice(bits, "master_weight_bits", (24, 32, None))
    has_none = bits is None or np.dtype(dtype).itemsize != 2
    return None if has_none else np.dtype(np.int8 if bits == 24 else np.int16)


def split_leaf(
    theta: Array,
    narrow_dtype: DTypeLike = jnp.bfloat16,
    master_weight_bits: int | None = 24,
) -> tuple[Array, Array]:
    """Splits f32 weights into parameters of `narrow_dtype` and their corrections."""
    theta = jnp.asarray(theta, jnp.float32)
    dtype = correction_dtype(narrow_dtype, master_weight_bits)
    if dtype is None:
        return theta.astype(narrow_dtype), no_state()
    return UlpFraction(dtype).encode(theta, narrow_dtype, _BLOCK)


def reconstruct_leaf(theta_lp: Array, rho: Array) -> Array:
    """Returns the f32 weights behind parameters and their corrections."""
    theta_lp, rho = jnp.asarray(theta_lp), jnp.asarray(rho)
    if theta_lp.dtype.itemsize != 2 or not is_state(rho):
        return theta_lp.astype(jnp.float32)
    return UlpFraction(np.dtype(rho.dtype)).decode(theta_lp, rho, _BLOCK)


def reconstruct_weights(params_lp: PyTree, errors: PyTree) -> PyTree:
    """Returns the f32 weights behind a tree of parameters: `errors` is `state.ecc`."""
    return jax.tree.map(reconstruct_leaf, params_lp, errors)


def set_fp32_params(
    fp32_params: PyTree, param_template: PyTree, master_weight_bits: int | None = 24
) -> tuple[PyTree, PyTree]:
    """Splits f32 weights into parameters with the dtypes of a template, and `ecc`.

    Raises:
        ValueError: If trees or shapes differ.
    """
    check_same_structure(fp32_params, param_template, "`set_fp32_params`")

    def split(name: str, weight: PyTree, like: PyTree) -> tuple[Array, Array]:
        check_shape(f"The weight of `{name}`", weight, like)
        return split_leaf(weight, jnp.asarray(like).dtype, master_weight_bits)

    pairs = map_with_name(split, fp32_params, param_template)
    params = jax.tree.map(lambda _, pair: pair[0], param_template, pairs)
    return params, jax.tree.map(lambda _, pair: pair[1], param_template, pairs)


def cast_tree_bf16(tree: PyTree) -> PyTree:
    """Casts every leaf of a tree to bf16."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
