"""Launch parameters of the kernels. All numbers were found by measurement."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Division of the work into programs.

    Attributes:
        block: Elements of a program, a power of two.
        warps: Warps of 32 threads that share a block. A group must lie in one of them.
        batch: How many leaves of equal shape share one launch.
        batch_size: Leaves with more elements have a launch of their own.
    """

    block: int = 512
    warps: int = 1
    batch: int = 8
    batch_size: int = 2**23


# One warp needs no barrier to share the scales of its groups.
TRITON = Tuning()
# A program of Mosaic is a warpgroup, and each of its threads holds vectors of 8.
MOSAIC = Tuning(block=1024, warps=4)
