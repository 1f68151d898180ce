"""The table of equations that hold jaxprs, and how each is rebuilt around visited bodies."""

from mpx._program import _calls, _derivatives, _loops
from mpx._program._interpreter import Handler

HANDLERS: dict[str, Handler] = {
    **_calls.HANDLERS,
    **_derivatives.HANDLERS,
    **_loops.HANDLERS,
}
