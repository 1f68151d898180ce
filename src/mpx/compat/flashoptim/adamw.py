"""Adam and AdamW: the names of `flashoptim_jax.adamw`."""

from mpx.compat.flashoptim import FlashAdamState as FlashAdamState
from mpx.compat.flashoptim import flash_adam as flash_adam
from mpx.compat.flashoptim import flash_adamw as flash_adamw
from mpx.compat.flashoptim import flash_adamw_state_dict as flash_adamw_state_dict
from mpx.compat.flashoptim import (
    load_flash_adamw_state_dict as load_flash_adamw_state_dict,
)
