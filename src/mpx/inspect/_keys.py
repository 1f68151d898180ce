"""What is known of the values of a program, and what decides where they are rounded."""

from collections.abc import Collection
from typing import NamedTuple


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
        owner: The group whose 16-bit result it is, or -1.
        sources: The groups of the matmuls because of which it is of 16 bits: without one of
            them, `amp` would hold it in f32.
        is_pending: Whether it has been cast to 16 bits for whoever reads it.
        is_cotangent: Whether it belongs to the backward pass.
    """

    owner: int = -1
    sources: tuple[int, ...] = ()
    is_pending: bool = False
    is_cotangent: bool = False


class Key(NamedTuple):
    """What decides whether a site rounds, and how.

    Attributes:
        kind: `out` for a result of 16 bits or a cast to them, `entry` for an operand of a
            matmul, `eight` for one that is its own result, `sum` for a sum of rounded values.
        group: The group that rounds.
        owner: The group in whose format the value is already, or -1.
        sources: See `Known`.
        is_cotangent: Whether the value belongs to the backward pass.
    """

    kind: str
    group: int
    owner: int
    sources: tuple[int, ...]
    is_cotangent: bool

    def rounds(self, low: Collection[int], *, alone: bool = False) -> bool:
        """Returns whether a value is rounded to 16 bits if some groups run in them.

        Args:
            low: The groups that run in 16 bits.
            alone: Whether to judge a group by itself: that what it needs to be in 16 bits
                is, but rounds nothing.
        """
        if self.group not in low or self.kind in ("eight", "sum"):
            return False
        is_low = all(x in low for x in self.sources)
        if self.kind == "out":
            return alone or is_low
        return not (self.owner in low and is_low)


class Site(NamedTuple):
    """One place where a value is rounded, or where rounded values are added.

    Attributes:
        number: Its number.
        key: What it has in common with others.
        size: The size of the array.
        operands: How many operands of a sum are looked at.
        lengths: The lengths of the scans around it, outermost first.
    """

    number: int
    key: Key
    size: int
    operands: int
    lengths: tuple[int, ...]
