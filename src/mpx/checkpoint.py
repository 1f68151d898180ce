"""Checkpoints of any training state, on Orbax, and conversion of states to and from f32."""

from mpx._checkpoint import Checkpointer as Checkpointer
from mpx._checkpoint import from_f32 as from_f32
from mpx._checkpoint import restore as restore
from mpx._checkpoint import save as save
from mpx._checkpoint import to_f32 as to_f32
