"""Reports on what mixed precision does with a function, and checks of what was compiled."""

from mpx._fp8 import Fp8Check as Fp8Check
from mpx._fp8 import check as check
from mpx._inspect._explain import Explanation as Explanation
from mpx._inspect._explain import explain as explain
from mpx._inspect._faults import Fault as Fault
from mpx._inspect._memory import Memory as Memory
from mpx._inspect._memory import memory as memory
from mpx._inspect._report import Report as Report
from mpx._inspect._report import report as report
from mpx._inspect._target import Compiled as Compiled
from mpx._inspect._views import AmpView as AmpView
from mpx._inspect._views import Fp8View as Fp8View
