"""Traced programs: looking through them, following values, and running them with changes."""

from mpx._jaxpr import _calls, _derivatives, _loops
from mpx._jaxpr._interpreter import Handler

# How each equation that holds jaxprs is rebuilt around bodies that were visited.
HANDLERS: dict[str, Handler] = {
    **_calls.HANDLERS,
    **_derivatives.HANDLERS,
    **_loops.HANDLERS,
}
