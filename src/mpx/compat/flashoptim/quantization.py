"""Moments in 8 bits: the names of `flashoptim_jax.quantization`."""

from mpx.compat._flashoptim_codecs import QuantizedArray as QuantizedArray
from mpx.compat._flashoptim_codecs import dequantize_momentum as dequantize_momentum
from mpx.compat._flashoptim_codecs import dequantize_variance as dequantize_variance
from mpx.compat._flashoptim_codecs import quantize_momentum as quantize_momentum
from mpx.compat._flashoptim_codecs import quantize_variance as quantize_variance
