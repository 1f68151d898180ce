"""Cross entropy of a large vocabulary in chunks, so that the logits never exist as a whole."""

from mpx._logits._chunks import Chunks as Chunks
from mpx._logits._operation import loss as loss
from mpx._logits._operation import scores as scores
