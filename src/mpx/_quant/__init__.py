"""Codecs: how f32 numbers are stored in fewer bits. Pure functions, no kernels."""

from mpx._quant._codecs import BitDelta as BitDelta
from mpx._quant._codecs import Full as Full
from mpx._quant._codecs import MasterCodec as MasterCodec
from mpx._quant._codecs import MomentCodec as MomentCodec
from mpx._quant._codecs import Quantized as Quantized
from mpx._quant._codecs import RoundedMaster as RoundedMaster
from mpx._quant._codecs import SoftsignInt8 as SoftsignInt8
from mpx._quant._codecs import SqrtUint8 as SqrtUint8
from mpx._quant._codecs import UlpFraction as UlpFraction
from mpx._quant._codecs import place as place
from mpx._quant._rounding import Block as Block
from mpx._quant._rounding import Dither as Dither
from mpx._quant._rounding import Rounding as Rounding
from mpx._quant._rounding import dither_of as dither_of
from mpx._quant._rounding import is_finite as is_finite
from mpx._quant._rounding import random_bits as random_bits
