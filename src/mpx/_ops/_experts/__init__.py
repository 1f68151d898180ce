"""Matmuls of rows with the matrix of their group, in a kernel for Hopper GPUs.

`_mosaic` is imported when the first such matmul is traced for a GPU that has the kernel, and
only if JAX has the private names that it needs.
"""
