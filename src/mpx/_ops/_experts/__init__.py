"""Matmuls of rows with the matrix of their group, in a kernel for Hopper GPUs."""
