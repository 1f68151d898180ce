"""Attention as one operation, which runs in cuDNN's flash kernel where that exists.

It is imported when the first function is traced under `amp`, and only if JAX has the
private names that it needs.
"""

from mpx._ops._attention._capture import captured as captured
from mpx._ops._attention._cudnn import Attention as Attention
from mpx._ops._attention._cudnn import reason_against as reason_against
from mpx._ops._attention._cudnn import reason_by_shapes as reason_by_shapes
from mpx._ops._attention._cudnn import reason_not_paying as reason_not_paying
from mpx._ops._attention._primitive import PLAIN as PLAIN
from mpx._ops._attention._primitive import attend as attend
from mpx._ops._attention._primitive import attention_backward_p as attention_backward_p
from mpx._ops._attention._primitive import attention_tangent_p as attention_tangent_p
from mpx._ops._attention._primitive import fitted_attention as fitted_attention
from mpx._ops._attention._primitive import padded_call as padded_call
