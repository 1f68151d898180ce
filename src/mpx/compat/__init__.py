"""The names of other libraries, for people who migrate: thin adapters."""

from mpx.compat import flashoptim as flashoptim
from mpx.compat import jaxamp as jaxamp
from mpx.compat import jmp as jmp
