"""Checkpoints of training states, on Orbax."""

from mpx._checkpoint._checkpointer import Checkpointer as Checkpointer
from mpx._checkpoint._checkpointer import save as save
from mpx._checkpoint._f32 import from_f32 as from_f32
from mpx._checkpoint._f32 import to_f32 as to_f32
from mpx._checkpoint._restore import restore as restore
