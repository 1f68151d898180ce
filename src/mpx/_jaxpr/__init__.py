"""Traced programs: looking through them, following values, and running them with changes."""

from mpx._jaxpr._handlers import HANDLERS as HANDLERS
