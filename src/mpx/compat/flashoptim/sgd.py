"""SGD: the names of `flashoptim_jax.sgd`."""

from mpx.compat._flashoptim import flash_sgd as flash_sgd
from mpx.compat._flashoptim import flash_sgd_state_dict as flash_sgd_state_dict
from mpx.compat._flashoptim import flash_sgdw as flash_sgdw
from mpx.compat._flashoptim import (
    load_flash_sgd_state_dict as load_flash_sgd_state_dict,
)
from mpx.compat._flashoptim_convert import FlashSGDState as FlashSGDState
