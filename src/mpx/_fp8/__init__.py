"""FP8: linear layers on 8-bit operands, for unmodified functions."""

from mpx._fp8._check import Fp8Check as Fp8Check
from mpx._fp8._check import fp8_check as fp8_check
from mpx._fp8._delayed import Fp8State as Fp8State
from mpx._fp8._recipes import MXFP8 as MXFP8
from mpx._fp8._recipes import NVFP4 as NVFP4
from mpx._fp8._recipes import CurrentScaling as CurrentScaling
from mpx._fp8._recipes import DelayedScaling as DelayedScaling
from mpx._fp8._recipes import Int8 as Int8
from mpx._fp8._recipes import StaticScaling as StaticScaling
from mpx._fp8._transform import Fp8Function as Fp8Function
from mpx._fp8._transform import fp8 as fp8
