"""How the kernel is launched. Numbers are found by measurement, and only here."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """How work is cut into programs.

    Attributes:
        block: Elements of a program, a power of two.
        warps: Warps of 32 threads that share a block.
        min_size: Leaves with fewer elements run in plain JAX unless the kernel was asked
            for: launching a kernel would cost more than it saves.
        batch: How many leaves of equal shape share one launch.
        batch_size: Leaves with more elements have a launch of their own.
    """

    block: int = 1024
    warps: int = 4
    min_size: int = 65536
    batch: int = 8
    batch_size: int = 2**23


TRITON = Tuning()
