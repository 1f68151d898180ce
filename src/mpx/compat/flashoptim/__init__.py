"""The names of flashoptim-jax on top of mpx: `from mpx.compat import flashoptim`.

The state has the layout of flashoptim-jax: groups of the flattened array, f16 scales,
corrections in units of half an ulp. Its checkpoints load, and it loads those made here.
`to_mpx` and `from_mpx` convert to and from the state of `mpx.optim.flash_adamw` and the
others, which is sharded like the parameters and is an optax state.

Unlike flashoptim-jax, it runs on CPUs and TPUs, keeps the corrections of scalars, and
rejects misspelt groups; an inf or nan costs one element instead of its group.

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

from mpx.compat.flashoptim._optimizers import (
    FlashAdamState,
    FlashLionState,
    FlashOptimizer,
    FlashSGDState,
    flash_adam,
    flash_adamw,
    flash_adamw_state_dict,
    flash_lion,
    flash_lion_state_dict,
    flash_sgd,
    flash_sgd_state_dict,
    flash_sgdw,
    from_mpx,
    load_flash_adamw_state_dict,
    load_flash_lion_state_dict,
    load_flash_sgd_state_dict,
    to_mpx,
)
from mpx.compat.flashoptim.compression import (
    cast_tree_bf16,
    reconstruct_leaf,
    reconstruct_weights,
    set_fp32_params,
    split_leaf,
)
from mpx.compat.flashoptim.quantization import (
    QuantizedArray,
    dequantize_momentum,
    dequantize_variance,
    quantize_momentum,
    quantize_variance,
)
