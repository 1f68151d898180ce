"""Lion: the names of `flashoptim_jax.lion`."""

from mpx.compat._flashoptim import flash_lion as flash_lion
from mpx.compat._flashoptim import flash_lion_state_dict as flash_lion_state_dict
from mpx.compat._flashoptim import (
    load_flash_lion_state_dict as load_flash_lion_state_dict,
)
from mpx.compat._flashoptim_convert import FlashLionState as FlashLionState
