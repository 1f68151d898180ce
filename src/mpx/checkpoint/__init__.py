"""Checkpoints of any training state, on Orbax, and conversion of states to and from f32."""
# pyright: reportUnknownVariableType=false

from mpx.checkpoint._checkpointer import Checkpointer as Checkpointer
from mpx.checkpoint._checkpointer import restore as restore
from mpx.checkpoint._checkpointer import save as save
from mpx.checkpoint._f32 import from_f32 as from_f32
from mpx.checkpoint._f32 import to_f32 as to_f32
