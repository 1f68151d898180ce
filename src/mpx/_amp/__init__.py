"""Autocast: mixed precision for unmodified functions, region by region."""

from mpx._amp._rules import AmpRules as AmpRules
from mpx._amp._transform import amp as amp
from mpx._amp._transform import amp_low as amp_low
from mpx._amp._transform import amp_stop as amp_stop
