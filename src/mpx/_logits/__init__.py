"""Cross entropy of a large vocabulary in chunks, so that the logits never exist as a whole.

It is imported when a function under `amp` has logits that may be computed in chunks.
"""

from mpx._logits._chunks import Chunks as Chunks
from mpx._logits._chunks import Operands as Operands
from mpx._logits._chunks import Statistics as Statistics
from mpx._logits._match import Site as Site
from mpx._logits._match import find_sites as find_sites
from mpx._logits._operation import loss as loss
from mpx._logits._operation import scores as scores
from mpx._logits._scalar import MOST as MOST
from mpx._logits._scalar import dependents as dependents
from mpx._logits._scalar import scalar_after as scalar_after
from mpx._logits._sizes import chunks_for as chunks_for
from mpx._logits._values import bias_terms as bias_terms
from mpx._logits._values import hidden_states as hidden_states
from mpx._logits._values import needs_total as needs_total
from mpx._logits._values import token_labels as token_labels
from mpx._logits._values import value_of_exit as value_of_exit
