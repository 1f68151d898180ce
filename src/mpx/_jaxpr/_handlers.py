"""The table of equations that hold jaxprs, and how each is rebuilt around visited bodies."""

from mpx._jaxpr import _calls, _derivatives, _loops
from mpx._jaxpr._interpreter import Handler

HANDLERS: dict[str, Handler] = {
    **_calls.HANDLERS,
    **_derivatives.HANDLERS,
    **_loops.HANDLERS,
}
