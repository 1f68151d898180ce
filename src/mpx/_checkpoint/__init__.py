"""Checkpoints of training states, on Orbax."""

from mpx._checkpoint._checkpointer import Checkpointer as Checkpointer
from mpx._checkpoint._checkpointer import restore as restore
from mpx._checkpoint._checkpointer import save as save
