"""Kernels that step parameters. They hold no maths: the step is passed in."""
