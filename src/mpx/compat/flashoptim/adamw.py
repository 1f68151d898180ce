"""Adam and AdamW: the names of `flashoptim_jax.adamw`."""

from mpx.compat._flashoptim import flash_adam as flash_adam
from mpx.compat._flashoptim import flash_adamw as flash_adamw
from mpx.compat._flashoptim import flash_adamw_state_dict as flash_adamw_state_dict
from mpx.compat._flashoptim import (
    load_flash_adamw_state_dict as load_flash_adamw_state_dict,
)
from mpx.compat._flashoptim_convert import FlashAdamState as FlashAdamState
