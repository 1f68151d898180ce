"""SGD: the names of `flashoptim_jax.sgd`."""

from mpx.compat.flashoptim import FlashSGDState as FlashSGDState
from mpx.compat.flashoptim import flash_sgd as flash_sgd
from mpx.compat.flashoptim import flash_sgd_state_dict as flash_sgd_state_dict
from mpx.compat.flashoptim import flash_sgdw as flash_sgdw
from mpx.compat.flashoptim import load_flash_sgd_state_dict as load_flash_sgd_state_dict
