"""Compressed optimizers, gradient release, clipping, master weights and skipping."""
# pyright: reportUnknownVariableType=false

from mpx._optim._engine import FlashOptimizer as FlashOptimizer
from mpx._optim._optax import MasterWeights as MasterWeights
from mpx._optim._optax import MasterWeightsState as MasterWeightsState
from mpx._optim._optax import SkipNonfiniteState as SkipNonfiniteState
from mpx._optim._optax import master_weights as master_weights
from mpx._optim._optax import skip_nonfinite as skip_nonfinite
from mpx._optim._optimizers import flash_adam as flash_adam
from mpx._optim._optimizers import flash_adamw as flash_adamw
from mpx._optim._optimizers import flash_lion as flash_lion
from mpx._optim._optimizers import flash_muon as flash_muon
from mpx._optim._optimizers import flash_sgd as flash_sgd
from mpx._optim._optimizers import flash_sgdw as flash_sgdw
from mpx._optim._options import Clip as Clip
from mpx._optim._options import Compression as Compression
from mpx._optim._options import ParamGroup as ParamGroup
from mpx._optim._options import clip_scale as clip_scale
from mpx._optim._release import Released as Released
from mpx._optim._release import release as release
from mpx._optim._state import FlashState as FlashState
from mpx._optim._state import from_master as from_master
from mpx._optim._state import master_params as master_params
