"""Compressed optimizers, gradient release, clipping, master weights and skipping."""
# pyright: reportUnknownVariableType=false

from mpx._optim import Clip as Clip
from mpx._optim import Compression as Compression
from mpx._optim import FlashOptimizer as FlashOptimizer
from mpx._optim import FlashState as FlashState
from mpx._optim import ParamGroup as ParamGroup
from mpx._optim import Released as Released
from mpx._optim import clip_scale as clip_scale
from mpx._optim import flash_adam as flash_adam
from mpx._optim import flash_adamw as flash_adamw
from mpx._optim import flash_lion as flash_lion
from mpx._optim import flash_sgd as flash_sgd
from mpx._optim import flash_sgdw as flash_sgdw
from mpx._optim import from_master as from_master
from mpx._optim import master_params as master_params
from mpx._optim import release as release
from mpx._optim._optax import MasterWeights as MasterWeights
from mpx._optim._optax import MasterWeightsState as MasterWeightsState
from mpx._optim._optax import SkipNonfiniteState as SkipNonfiniteState
from mpx._optim._optax import master_weights as master_weights
from mpx._optim._optax import skip_nonfinite as skip_nonfinite
