"""Autocast: op-by-op mixed precision for unmodified functions."""

from mpx._amp._policy import AmpRules as AmpRules
from mpx._amp._scopes import amp_low as amp_low
from mpx._amp._scopes import amp_stop as amp_stop
from mpx._amp._transform import amp as amp
