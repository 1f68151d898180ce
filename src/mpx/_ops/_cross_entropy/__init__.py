"""Cross entropy of a large vocabulary, whose logits never exist as a whole."""

from mpx._ops._cross_entropy._operation import (
    linear_cross_entropy as linear_cross_entropy,
)
