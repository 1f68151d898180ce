"""Codecs: how f32 numbers are stored in fewer bits. Pure functions, no kernels."""
