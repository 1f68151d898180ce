"""Block sizes of the grouped kernels, by what they multiply."""

from typing import NamedTuple


class Blocks(NamedTuple):
    """The part of a product that one warpgroup computes at a time.

    Attributes:
        rows: Rows of the result.
        columns: Columns of the result.
        summed: Length of the sum that is loaded at a time.
        steps: How many such parts are loaded ahead.
        width: How many blocks of columns are computed before the next rows.
    """

    rows: int
    columns: int
    summed: int
    steps: int
    width: int


# With these, 16384 rows times 32 matrices of 2048 × 1024 take 0.13 ms forward and 0.44 with
# both gradients in bf16 (H200, jax 0.11.2, `python benchmarks/experts.py`); one dense matmul
# of the same work takes 0.11 and 0.38. `--tune` compares others.
ROWS = Blocks(128, 128, 64, 4, 8)
ROWS_FP8 = Blocks(128, 128, 128, 4, 8)
SUMS = Blocks(128, 128, 64, 4, 8)
# Columns of a result, and rows of one that is a sum, are multiples of this.
SMALLEST = 64
# H100 and H200 have so many; a smaller GPU runs the rest after the first.
PROGRAMS = 132
