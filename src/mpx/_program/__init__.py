"""Traced programs: looking through them, following values, and running them with changes."""

from mpx._program._bodies import HANDLERS as HANDLERS
