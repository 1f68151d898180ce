"""Recipes of `mpx.fp8`: number formats and how their scales are chosen."""

from mpx._fp8._delayed import Fp8State as Fp8State
from mpx._fp8._recipes import MXFP8 as MXFP8
from mpx._fp8._recipes import NVFP4 as NVFP4
from mpx._fp8._recipes import CurrentScaling as CurrentScaling
from mpx._fp8._recipes import DelayedScaling as DelayedScaling
from mpx._fp8._recipes import Int8 as Int8
from mpx._fp8._recipes import StaticScaling as StaticScaling
