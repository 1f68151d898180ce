"""The names of flashoptim-jax on top of mpx: `from mpx.compat import flashoptim`.

The state has the layout of flashoptim-jax: groups of the flattened array, f16 scales,
corrections in units of half an ulp. Its checkpoints load, and it loads those made here.
`to_mpx` and `from_mpx` convert to and from the state of `mpx.optim.flash_adamw` and the
others, which has the range of f32, is sharded like the parameters and is an optax state.

Where flashoptim-jax is known to be wrong mpx is not: it runs on CPUs and TPUs, bf16
gradients are not cast beforehand, 16-bit parameters are the rounded master weights,
scalars keep their corrections, integer leaves stay as they are, an inf or nan costs one
element instead of its group, f32 models need no option, and misspelt groups are errors.

Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.zeros(8)}
    >>> tx = flash_adamw(learning_rate=1e-3, weight_decay=1e-2)
    >>> state = tx.init(params)
    >>> params, state = tx.step(params, state, jax.tree.map(jnp.ones_like, params))
    >>> reconstruct_weights(params, state.ecc)["w"].dtype
    dtype('float32')
"""

from mpx.compat._flashoptim import FlashOptimizer as FlashOptimizer
from mpx.compat._flashoptim import flash_adam as flash_adam
from mpx.compat._flashoptim import flash_adamw as flash_adamw
from mpx.compat._flashoptim import flash_adamw_state_dict as flash_adamw_state_dict
from mpx.compat._flashoptim import flash_lion as flash_lion
from mpx.compat._flashoptim import flash_lion_state_dict as flash_lion_state_dict
from mpx.compat._flashoptim import flash_sgd as flash_sgd
from mpx.compat._flashoptim import flash_sgd_state_dict as flash_sgd_state_dict
from mpx.compat._flashoptim import flash_sgdw as flash_sgdw
from mpx.compat._flashoptim import (
    load_flash_adamw_state_dict as load_flash_adamw_state_dict,
)
from mpx.compat._flashoptim import (
    load_flash_lion_state_dict as load_flash_lion_state_dict,
)
from mpx.compat._flashoptim import (
    load_flash_sgd_state_dict as load_flash_sgd_state_dict,
)
from mpx.compat._flashoptim_codecs import QuantizedArray as QuantizedArray
from mpx.compat._flashoptim_codecs import cast_tree_bf16 as cast_tree_bf16
from mpx.compat._flashoptim_codecs import dequantize_momentum as dequantize_momentum
from mpx.compat._flashoptim_codecs import dequantize_variance as dequantize_variance
from mpx.compat._flashoptim_codecs import quantize_momentum as quantize_momentum
from mpx.compat._flashoptim_codecs import quantize_variance as quantize_variance
from mpx.compat._flashoptim_codecs import reconstruct_leaf as reconstruct_leaf
from mpx.compat._flashoptim_codecs import reconstruct_weights as reconstruct_weights
from mpx.compat._flashoptim_codecs import set_fp32_params as set_fp32_params
from mpx.compat._flashoptim_codecs import split_leaf as split_leaf
from mpx.compat._flashoptim_convert import FlashAdamState as FlashAdamState
from mpx.compat._flashoptim_convert import FlashLionState as FlashLionState
from mpx.compat._flashoptim_convert import FlashSGDState as FlashSGDState
from mpx.compat._flashoptim_convert import from_mpx as from_mpx
from mpx.compat._flashoptim_convert import to_mpx as to_mpx
from mpx.compat._flashoptim_torch import from_torch as from_torch
from mpx.compat._flashoptim_torch import to_torch as to_torch
