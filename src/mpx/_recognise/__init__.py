"""From equations to operations: attention, however it is written.

It is imported when a function is traced under `amp` for a GPU with a fused kernel.
"""

from mpx._recognise._attention import Call as Call
from mpx._recognise._attention import recognise as recognise
