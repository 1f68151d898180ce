"""FP8: linear layers on 8-bit operands, for unmodified functions."""

from mpx._fp8._check import Fp8Check as Fp8Check
from mpx._fp8._check import fp8_check as fp8_check
from mpx._fp8._delayed import Fp8State as Fp8State
from mpx._fp8._transform import Fp8Function as Fp8Function
from mpx._fp8._transform import fp8 as fp8
