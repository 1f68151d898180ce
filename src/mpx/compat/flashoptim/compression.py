"""Master weights in parts: the names of `flashoptim_jax.compression`."""

from mpx.compat._flashoptim_codecs import cast_tree_bf16 as cast_tree_bf16
from mpx.compat._flashoptim_codecs import reconstruct_leaf as reconstruct_leaf
from mpx.compat._flashoptim_codecs import reconstruct_weights as reconstruct_weights
from mpx.compat._flashoptim_codecs import set_fp32_params as set_fp32_params
from mpx.compat._flashoptim_codecs import split_leaf as split_leaf
